//! A device, driven without a virtual machine: every kind of request over every queue, and what no decent guest does.

mod common;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use common::{Host, create, open, read_in, write_in};
use frontend::fuse::wire::*;
use virtiofs::driver::{Config, Driver, PAGE, flag};
use virtiofs::limits::{Limits, Rate};
use zerocopy::{FromBytes, IntoBytes};

const ROOT: u64 = 1;

#[test]
fn files_over_all_queues_and_every_form_of_chain() {
    for (indirect, event_index) in [(true, true), (true, false), (false, true), (false, false)] {
        let host = Host::dir();
        let config = Config {
            queues: 3,
            indirect,
            event_index,
            slots: 4,
            data: 32 * PAGE,
            ..Config::default()
        };
        let mut guest = host.guest(config);
        for queue in 1..=3 {
            let name = format!("file{queue}");
            let (node, fh) = create(&mut guest, queue, ROOT, name.as_bytes());
            let data: Vec<u8> = (0..100_001u32).map(|i| (i % 251) as u8).collect();
            let wrote = guest
                .call_on(queue, op::WRITE, node, &[&write_in(fh, 0, data.len())], &data, 0)
                .unwrap();
            assert_eq!(wrote.error, 0);
            assert_eq!(WriteOut::read_from_prefix(&wrote.body).unwrap().0.size.get(), 100_001);
            assert_eq!(std::fs::read(host.path(&name)).unwrap(), data);
            // In pieces that are not whole pages, beyond the end, and where nothing is.
            for (at, len) in [(0, 100_001), (1, 4095), (4096, 4096), (99_000, 8000), (200_000, 10)]
            {
                let read = guest
                    .call_on(queue, op::READ, node, &[&read_in(fh, at, len)], &[], len)
                    .unwrap();
                let end = data.len().min(at + len);
                assert_eq!((read.error, &*read.body), (0, data.get(at..end).unwrap_or(&[])));
            }
            let release = ReleaseIn { fh: fh.into(), ..ReleaseIn::default() };
            assert_eq!(guest.call(op::RELEASE, node, &[release.as_bytes()]).unwrap().error, 0);
            let forget = ForgetIn { nlookup: 1.into() };
            guest.tell(op::FORGET, node, &[forget.as_bytes()]).unwrap();
            // It is not known any more.
            let asked = guest.call(op::GETATTR, node, &[GetattrIn::default().as_bytes()]);
            assert_eq!(asked.unwrap().error, -libc::ESTALE);
        }
        let listed =
            guest.call_on(2, op::READDIR, ROOT, &[&read_in(0, 0, PAGE)], &[], PAGE).unwrap();
        assert_eq!(listed.error, 0);
        for queue in 1..=3 {
            let name = format!("file{queue}");
            assert!(listed.body.windows(name.len()).any(|w| w == name.as_bytes()));
        }
        guest.hang_up();
    }
}

#[test]
fn names() {
    let host = Host::dir();
    let mut guest = host.guest(Config::default());
    let dir = MkdirIn { mode: 0o755.into(), umask: 0o022.into() };
    let made = guest.call(op::MKDIR, ROOT, &[dir.as_bytes(), b"d\0"]).unwrap();
    let node = EntryOut::read_from_prefix(&made.body).unwrap().0.nodeid.get();
    let (file, _) = create(&mut guest, 1, node, b"f");
    let to = Rename2In { newdir: ROOT.into(), ..Rename2In::default() };
    assert_eq!(guest.call(op::RENAME2, node, &[to.as_bytes(), b"f\0g\0"]).unwrap().error, 0);
    assert!(host.path("g").exists());
    assert_eq!(guest.call(op::SYMLINK, ROOT, &[b"l\0/etc/passwd\0"]).unwrap().error, 0);
    let again = guest.call(op::MKDIR, ROOT, &[dir.as_bytes(), b"d\0"]).unwrap();
    assert_eq!(again.error, -libc::EEXIST);
    let link = LinkIn { oldnodeid: file.into() };
    assert_eq!(guest.call(op::LINK, node, &[link.as_bytes(), b"h\0"]).unwrap().error, 0);
    assert_eq!(guest.call(op::RMDIR, ROOT, &[b"d\0"]).unwrap().error, -libc::ENOTEMPTY);
    assert_eq!(guest.call(op::UNLINK, node, &[b"h\0"]).unwrap().error, 0);
    assert_eq!(guest.call(op::RMDIR, ROOT, &[b"d\0"]).unwrap().error, 0);
}

#[test]
fn a_guest_stays_in_its_directory() {
    let host = Host::dir();
    std::fs::write(host.outside(), b"secret").unwrap();
    let number = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(host.outside()).unwrap());
    let mut guest = host.guest(Config::default());
    // By number, never having been told of it; by the parent; by the names that a mount has beside its files.
    for node in [number, 2, 3, u64::MAX, 1 << 63 | 1, 1 << 63 | 2] {
        for (opcode, arg) in [
            (op::GETATTR, GetattrIn::default().as_bytes().to_vec()),
            (op::OPEN, OpenIn::default().as_bytes().to_vec()),
            (op::LOOKUP, b"x\0".to_vec()),
            (op::LOOKUP, b".\0".to_vec()),
            (op::READLINK, Vec::new()),
            (op::STATFS, Vec::new()),
        ] {
            let reply = guest.call(opcode, node, &[&arg]).unwrap();
            assert_eq!(reply.error, -libc::ESTALE, "opcode {opcode} of {node}");
        }
    }
    for name in [&b"..\0"[..], b".\0", b".corbel\0"] {
        let error = guest.call(op::LOOKUP, ROOT, &[name]).unwrap().error;
        assert!([-libc::ESTALE, -libc::ENOENT].contains(&error), "{name:?}: {error}");
    }
    for name in [&b"../outside\0"[..], b"/etc/passwd\0", b"\0", b"..\0"] {
        let error = guest.call(op::UNLINK, ROOT, &[name]).unwrap().error;
        assert_ne!(error, 0);
    }
    let to = RenameIn { newdir: number.into() };
    create(&mut guest, 1, ROOT, b"mine");
    let moved = guest.call(op::RENAME, ROOT, &[to.as_bytes(), b"mine\0x\0"]).unwrap();
    assert_eq!(moved.error, -libc::ESTALE);
    let link = LinkIn { oldnodeid: number.into() };
    let linked = guest.call(op::LINK, ROOT, &[link.as_bytes(), b"y\0"]).unwrap();
    assert_eq!(linked.error, -libc::ESTALE);
    assert_eq!(std::fs::read(host.outside()).unwrap(), b"secret");
}

#[test]
fn what_a_guest_may_hold_is_bounded() {
    let mut options = virtiofs::device::Options::default();
    (options.guest.nodes_max, options.guest.handles_max) = (10, 3);
    let host = Host::null(options);
    let mut guest = host.guest(Config::default());
    let (node, _) = create(&mut guest, 1, ROOT, b"f");
    for left in [true, true, false, false] {
        let opened = guest.call(op::OPEN, node, &[OpenIn::default().as_bytes()]).unwrap();
        assert_eq!(opened.error, if left { 0 } else { -libc::ENFILE });
    }
    let make = |guest: &mut Driver, i: u32| {
        let arg = MknodIn { mode: 0o100_644.into(), ..MknodIn::default() };
        guest.call(op::MKNOD, ROOT, &[arg.as_bytes(), format!("n{i}\0").as_bytes()]).unwrap()
    };
    let nodes: Vec<_> = (0..20).map(|i| make(&mut guest, i)).take_while(|r| r.error == 0).collect();
    assert_eq!(nodes.len(), 9);
    assert_eq!(make(&mut guest, 30).error, -libc::ENOMEM);
    // What it forgets makes room.
    let told = EntryOut::read_from_prefix(&nodes[0].body).unwrap().0.nodeid.get();
    guest.tell(op::FORGET, told, &[ForgetIn { nlookup: 1.into() }.as_bytes()]).unwrap();
    assert_eq!(make(&mut guest, 31).error, 0);
}

/// The first queue is for what gives back; a guest may put anything there, and gets no more by it.
#[test]
fn limits_hold_on_every_queue() {
    let limited = |rate: f64, burst: f64| {
        let limits = Arc::new(Limits::new(Some(Rate { rate, burst }), None));
        let options = virtiofs::device::Options { limits: limits.clone(), ..Default::default() };
        (Host::null(options), limits)
    };
    let getattr = GetattrIn::default();
    // All are counted, and none that gives back.
    let (host, limits) = limited(1e-6, 10.0);
    let mut guest = host.guest(Config::default());
    for _ in 0..20 {
        guest.tell(op::FORGET, ROOT, &[ForgetIn { nlookup: 1.into() }.as_bytes()]).unwrap();
    }
    for _ in 0..6 {
        let asked = guest.call_on(0, op::GETATTR, ROOT, &[getattr.as_bytes()], &[], 0).unwrap();
        assert_eq!((asked.error, limits.delay()), (0, None));
    }
    for _ in 0..4 {
        guest.call_on(1, op::GETATTR, ROOT, &[getattr.as_bytes()], &[], 0).unwrap();
    }
    assert!(limits.delay().is_some());
    // Who is over them is overdrawn by one request, however many it asks.
    let (host, limits) = limited(20.0, 1.0);
    let mut guest = host.guest(Config::default());
    for _ in 0..12 {
        guest.call_on(0, op::GETATTR, ROOT, &[getattr.as_bytes()], &[], 0).unwrap();
        assert!(limits.delay().is_none_or(|delay| delay <= Duration::from_millis(51)));
    }
}

/// A guest that is over its limits is stopped: what was held back over the first queue is in the ring as if nobody had taken it, and is
/// not done later, when another device has the guest.
#[test]
fn what_is_held_back_does_not_outlive_its_queue() {
    use ::vhost::VhostBackend;

    let options = virtiofs::device::Options {
        limits: Arc::new(Limits::new(Some(Rate { rate: 1e-6, burst: 1.0 }), None)),
        ..Default::default()
    };
    let host = Host::dir_with(options);
    let mut guest = host.guest(Config::default());
    // Overdrawn by this one.
    let asked = guest.call_on(0, op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()], &[], 0);
    assert_eq!(asked.unwrap().error, 0);
    let dir = MkdirIn { mode: 0o755.into(), umask: 0o022.into() };
    let request = guest.request(op::MKDIR, ROOT, &[dir.as_bytes(), b"late\0"], 0);
    let q = &mut guest.queues[0];
    let head = q.prepare(0, &request, &[], 4096, 0);
    q.offer(head);
    q.notify();
    for _ in 0..2 {
        // The book of what was taken (QEMU's vhost-user.rst, "Inflight I/O tracking"): the entry of the head behind 16 bytes.
        let is_taken = |guest: &Driver| {
            let (inflight, file) = guest.inflight.as_ref().unwrap();
            let at = inflight.mmap_offset + 16 + 16 * u64::from(head);
            let mut byte = [0];
            std::os::unix::fs::FileExt::read_exact_at(file, &mut byte, at).unwrap();
            byte[0] == 1
        };
        let taken = (0..6000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            is_taken(&guest)
        });
        assert!(taken);
        assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 1);
        assert!(!is_taken(&guest));
        guest.stop().unwrap();
        // And it is the next one when the queue goes on.
        guest.start().unwrap();
    }
    assert!(!host.path("late").exists());
}

#[test]
fn a_guest_that_begins_anew_holds_nothing() {
    let host = Host::dir();
    let mut guest = host.guest(Config::default());
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    // It reboots: without a word, and without DESTROY.
    guest.init().unwrap();
    let read = guest.call_on(1, op::READ, node, &[&read_in(fh, 0, 10)], &[], 10).unwrap();
    assert_ne!(read.error, 0);
    // The monitor goes, and another one comes.
    guest.hang_up();
    let mut guest = host.guest(Config { queues: 2, ..Config::default() });
    let found = guest.call(op::LOOKUP, ROOT, &[b"f\0"]).unwrap();
    let found = EntryOut::read_from_prefix(&found.body).unwrap().0.nodeid.get();
    let fh = open(&mut guest, 2, found, 0);
    let read = guest.call_on(2, op::READ, found, &[&read_in(fh, 0, 10)], &[], 10).unwrap();
    assert_eq!((read.error, read.body.len()), (0, 0));
}

#[test]
fn chains_that_are_none_come_back_empty() {
    let host = Host::dir();
    for indirect in [true, false] {
        let mut guest = host.guest(Config { indirect, ..Config::default() });
        let request = guest.request(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()], 0);
        let len = u32::try_from(request.len()).unwrap();
        let q = &mut guest.queues[1];
        let (request_at, reply_at, data_at, own_table) = q.slot(0);
        q.put_bytes(&request, request_at);
        let (read, write, next) = (0, flag::WRITE, flag::NEXT);
        let mut bad: Vec<Vec<(u64, u32, u16, u16)>> = vec![
            // A loop of one, and of two.
            vec![(request_at, len, next, 0)],
            vec![(request_at, len, next, 1), (request_at, len, next, 0)],
            // Outside of memory, across its end, and around all of it.
            vec![(0, len, read, 0)],
            vec![(0xffff_ffff_ffff_f000, 8192, read, 0)],
            vec![(request_at, u32::MAX, read, 0)],
            vec![(request_at, len, next, 1), (reply_at, u32::MAX, write, 0)],
            vec![(request_at, len, next, 1), (0, 4096, write, 0)],
            // What is written before what is read.
            vec![(reply_at, 4096, write | next, 1), (request_at, len, read, 0)],
            // A descriptor that there is not.
            vec![(request_at, len, next, 60_000)],
            // Empty.
            vec![(request_at, 0, read, 0)],
            // A header that is cut.
            vec![(request_at, 39, next, 1), (reply_at, 4096, write, 0)],
            // Tables in tables, of a length that is none, empty, that are not there, and with a next.
            vec![(own_table, 16, flag::INDIRECT, 0)],
            vec![(data_at, 15, flag::INDIRECT, 0)],
            vec![(data_at, 0, flag::INDIRECT, 0)],
            vec![(64, 32, flag::INDIRECT, 0)],
            vec![(data_at, 1 << 24, flag::INDIRECT, 0)],
            vec![(data_at, 32, flag::INDIRECT | next, 1)],
        ];
        // Longer than any request needs.
        let long: Vec<_> = (0..200u16)
            .map(|i| (request_at, 4000, if i < 199 { next } else { 0 }, i + 1))
            .collect();
        bad.push(long.iter().map(|d| (d.0, 65_536, d.2, d.3)).collect());
        for chain in &bad {
            let table = if indirect { own_table } else { q.table };
            for (i, (address, len, flags, next)) in (0u16..).zip(chain) {
                q.describe(table, i, *address, *len, *flags, *next);
            }
            if indirect {
                let bytes = u32::try_from(chain.len() * 16).unwrap();
                q.describe(q.table, 0, own_table, bytes, flag::INDIRECT, 0);
            }
            q.offer(0);
            q.notify();
            let (head, written) = q.wait().unwrap();
            assert_eq!((head, written), (0, 0), "{chain:?}");
        }
        // A head that is no descriptor is not given back at all; what follows is served.
        q.offer(q.size);
        q.offer(u16::MAX);
        q.notify();
        // A reply without room for more than its header, and for less.
        for (room, expect) in [(16u32, 16u32), (15, 0), (60, 16)] {
            let table = if indirect { own_table } else { q.table };
            q.describe(table, 0, request_at, len, next, 1);
            q.describe(table, 1, reply_at, room, write, 0);
            if indirect {
                q.describe(q.table, 0, own_table, 32, flag::INDIRECT, 0);
            }
            q.offer(0);
            q.notify();
            assert_eq!(q.wait().unwrap(), (0, expect));
        }
        let asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
        assert_eq!((asked.error, asked.body.len()), (0, 104));
        guest.hang_up();
    }
    assert!(host.device.malformed() > 0);
}

#[test]
fn a_ring_that_says_that_everything_is_there() {
    let host = Host::dir();
    let mut guest = host.guest(Config { queues: 2, ..Config::default() });
    let q = &mut guest.queues[1];
    // 60,000 requests in a ring of 256.
    q.put(60_000u16, q.avail + 2);
    q.kick_anyway();
    // It is not served, and not looked at again and again; the other queues are.
    assert_eq!(q.wait_for(std::time::Duration::from_millis(50)).unwrap(), None);
    let asked = guest.call_on(2, op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()], &[], 0);
    assert_eq!(asked.unwrap().error, 0);
    drop(guest);
    let mut guest = host.guest(Config::default());
    assert_eq!(guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap().error, 0);
}

/// `dir` keeps no locks: the guest's kernel does, and is told so. (What waits where there are locks holds no thread:
/// `e2e virtiofs::a_tenant_has_its_directory_of_the_volume_and_nothing_else`.)
#[test]
fn a_lock_is_refused_where_the_back_end_keeps_none() {
    let host = Host::dir();
    assert!(!host.fs.keeps_locks());
    let mut guest = host.guest(Config::default());
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    let lock = LkIn { fh: fh.into(), owner: 7.into(), ..LkIn::default() };
    assert_eq!(guest.call(op::SETLKW, node, &[lock.as_bytes()]).unwrap().error, -libc::ENOSYS);
}

#[test]
fn messages_that_are_none_end_only_their_connection() {
    let host = Host::dir();
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 64],
        &[5, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f],
        // SET_VRING_NUM of a queue that there is not, GET_VRING_BASE of it, a size of 3.
        &[8, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 200, 0, 0, 0, 1, 0, 0, 0],
        &[11, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 200, 0, 0, 0, 0, 0, 0, 0],
        &[8, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0],
        // SET_MEM_TABLE without a descriptor, SET_VRING_ADDR without memory.
        &[5, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        &[9, 0, 0, 0, 1, 0, 0, 0, 40, 0, 0, 0, 1],
    ] {
        let mut stream = host.connect();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut guest = host.guest(Config::default());
        assert_eq!(
            guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap().error,
            0
        );
        guest.hang_up();
    }
}

/// Whether the device comes to have a guest, or to have none.
fn comes_to(device: &virtiofs::device::Device, ready: bool) -> bool {
    (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        device.server().is_ready() == ready
    })
}

/// A guest whose monitor does not come back is gone; also one that was there before the device.
#[test]
fn a_guest_that_does_not_come_back_keeps_nothing() {
    use std::os::unix::net::{UnixListener, UnixStream};
    use virtiofs::device::{Device, Options};
    use virtiofs::ledger::Kept;
    use virtiofs::vhost::{self, Patience};

    let fs = Arc::new(client::null::NullFs::default());
    let device = Device::new(fs, Options::default());
    device.resume(Kept::default());
    assert!(device.server().is_ready());
    let rings = vhost::rings("test", 2).unwrap();
    let _crew = device.start(&*rings).unwrap();
    let root = common::scratch();
    let listener = UnixListener::bind(root.join("socket")).unwrap();
    let there = device.clone();
    std::thread::spawn(move || {
        let (first, next) = (Some(Duration::from_millis(300)), Duration::from_millis(300));
        let serve = |stream| vhost::serve(&rings, Some(&there), None, stream);
        vhost::serve_all(&listener, Patience { first, next }, false, serve, |monitor| {
            if monitor == vhost::Monitor::Gone {
                there.forget_guest();
            }
        });
    });
    assert!(comes_to(&device, false), "nobody has come");
    let connect = || UnixStream::connect(root.join("socket")).unwrap();
    let mut guest = Driver::over(connect(), Config::default()).unwrap();
    guest.init().unwrap();
    assert!(comes_to(&device, true));
    // It comes back soon.
    guest.reconnect(connect()).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(device.server().is_ready());
    guest.hang_up();
    assert!(comes_to(&device, false), "it has not come back");
    // Its machine is reset, and may never mount again.
    let stream = connect();
    let mut monitor = stream.try_clone().unwrap();
    let mut guest = Driver::over(stream, Config::default()).unwrap();
    guest.init().unwrap();
    assert!(comes_to(&device, true));
    let reset: Vec<u8> = [34u32, 1, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    monitor.write_all(&reset).unwrap();
    assert!(comes_to(&device, false), "it was reset");
    drop((guest, monitor));
    std::fs::remove_dir_all(root).unwrap();
}
