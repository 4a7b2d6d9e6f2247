//! Several guests: what one changes another sees at once, what a guest may keep if it is said that nobody else changes anything, and
//! tenants that share the threads of a process.

mod common;

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use base::InodeId;
use client::fs::{Attr, Caller, FileSystem, Result};
use client::null::NullFs;
use common::{Host, create, read_in, scratch, write_in};
use frontend::fuse::wire::*;
use virtiofs::device::Options;
use virtiofs::driver::{Config, Driver, PAGE};
use virtiofs::measure::{self, Load};
use virtiofs::share::Share;
use virtiofs::tenant::{self, Keeps, Tenant};
use zerocopy::{FromBytes, IntoBytes};

const ROOT: u64 = 1;

fn tenant(fs: &Arc<dyn FileSystem>, path: &[u8], keeps: Keeps) -> Host {
    let options = tenant::Options { keeps, ..tenant::Options::default() };
    let tenant = Tenant::new(fs.clone(), path, options).unwrap();
    Host::of(Arc::new(tenant), Options::default(), scratch())
}

fn lookup(guest: &mut Driver, name: &[u8]) -> std::result::Result<EntryOut, i32> {
    let reply = guest.call(op::LOOKUP, ROOT, &[name, b"\0"]).unwrap();
    if reply.error != 0 {
        return Err(reply.error);
    }
    Ok(EntryOut::read_from_prefix(&reply.body).unwrap().0)
}

fn getattr(guest: &mut Driver, node: u64) -> AttrOut {
    let reply = guest.call(op::GETATTR, node, &[GetattrIn::default().as_bytes()]).unwrap();
    assert_eq!(reply.error, 0);
    AttrOut::read_from_prefix(&reply.body).unwrap().0
}

/// Two guests with devices of their own in front of one directory. Nothing that either is told may be kept, so that its kernel asks each
/// time; and what it is answered is what the other has done.
#[test]
fn what_one_guest_changes_another_sees() {
    let one = Host::dir();
    let two = Host::of(one.fs.clone(), Options::default(), scratch());
    let (mut a, mut b) = (one.guest(Config::default()), two.guest(Config::default()));
    assert_eq!(lookup(&mut b, b"f").err(), Some(-libc::ENOENT));
    let (node, fh) = create(&mut a, 1, ROOT, b"f");
    let seen = lookup(&mut b, b"f").unwrap();
    assert_eq!(seen.nodeid.get(), node);
    for round in 1..=5u64 {
        let data = vec![round as u8; 100 * round as usize];
        let wrote =
            a.call_on(1, op::WRITE, node, &[&write_in(fh, 0, data.len())], &data, 0).unwrap();
        assert_eq!(wrote.error, 0);
        let told = getattr(&mut b, node);
        assert_eq!((told.attr.size.get(), told.attr_valid.get()), (100 * round, 0));
        assert_eq!(told.attr_valid_nsec.get(), 0);
        let again = lookup(&mut b, b"f").unwrap();
        let kept = (again.entry_valid.get(), again.entry_valid_nsec.get(), again.attr_valid.get());
        assert_eq!(kept, (0, 0, 0));
        let other = common::open(&mut b, 1, node, 0);
        let read = b.call_on(1, op::READ, node, &[&read_in(other, 0, PAGE)], &[], PAGE).unwrap();
        assert_eq!(read.body, data);
        // Pages of before this open are not gone on with.
        let arg = OpenIn::default();
        let opened = b.call(op::OPEN, node, &[arg.as_bytes()]).unwrap();
        let flags = OpenOut::read_from_prefix(&opened.body).unwrap().0.open_flags.get();
        assert_eq!(flags & FOPEN_KEEP_CACHE, 0);
    }
    assert_eq!(b.call(op::UNLINK, ROOT, &[b"f\0"]).unwrap().error, 0);
    assert_eq!(lookup(&mut a, b"f").err(), Some(-libc::ENOENT));
    assert_eq!(getattr(&mut a, node).attr.nlink.get(), 0);
}

#[test]
fn a_guest_alone_may_keep_what_it_is_said_to() {
    let fs: Arc<dyn FileSystem> = Arc::new(NullFs::default());
    for (keeps, names, data) in
        [(Keeps::Nothing, false, false), (Keeps::Metadata, true, false), (Keeps::All, true, true)]
    {
        let host = tenant(&fs, b"/", keeps);
        let mut guest = host.guest(Config::default());
        let (node, _) = create(&mut guest, 1, ROOT, format!("{keeps:?}").as_bytes());
        let entry = lookup(&mut guest, format!("{keeps:?}").as_bytes()).unwrap();
        assert_eq!((entry.entry_valid.get() > 0, entry.attr_valid.get() > 0), (names, names));
        assert_eq!(getattr(&mut guest, node).attr_valid.get() > 0, names);
        let opened = guest.call(op::OPEN, node, &[OpenIn::default().as_bytes()]).unwrap();
        let flags = OpenOut::read_from_prefix(&opened.body).unwrap().0.open_flags.get();
        assert_eq!(flags & FOPEN_KEEP_CACHE != 0, data, "{keeps:?}");
    }
}

/// More tenants than places, all of which ask for all they can: each gets all of its answers, over every queue.
#[test]
fn tenants_share_the_threads_of_a_process() {
    let share = Share::new(1);
    let hosts: Vec<Host> = [1, 4, 2, 1]
        .map(|weight| {
            let share = Some(share.join(weight));
            Host::null(Options { share, ..Options::default() })
        })
        .into();
    std::thread::scope(|scope| {
        for host in &hosts {
            scope.spawn(move || {
                let config = Config { queues: 2, slots: 8, ..Config::default() };
                let mut guest = host.guest(config);
                let target = measure::target(&mut guest, "f", 1 << 20).unwrap();
                for load in [Load::Mixed(4096), Load::WriteFsync, Load::Getattr] {
                    // An error, or an answer that does not come, is one here.
                    measure::run_queues(&mut guest, 2, load, target, 8, 500).unwrap();
                }
            });
        }
    });
}

/// A file system whose node is away, for who looks up one name: it does not come back before the gate is opened.
#[derive(Default)]
struct Gated {
    inner: NullFs,
    /// Who waits, and whether it is open.
    gate: Mutex<(usize, bool)>,
    changed: Condvar,
}

const BEHIND: &[u8] = b"behind";

impl Gated {
    /// Returns when so many wait at the gate.
    fn await_waiting(&self, count: usize) {
        let gate = self.gate.lock().unwrap();
        let few = |gate: &mut (usize, bool)| gate.0 < count;
        let (gate, waited) =
            self.changed.wait_timeout_while(gate, Duration::from_secs(60), few).unwrap();
        assert!(!waited.timed_out(), "{} wait, of {count}", gate.0);
    }

    fn open_gate(&self) {
        self.gate.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

impl FileSystem for Gated {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        if name == BEHIND {
            let mut gate = self.gate.lock().unwrap();
            gate.0 += 1;
            self.changed.notify_all();
            drop(self.changed.wait_while(gate, |gate| !gate.1).unwrap());
        }
        self.inner.lookup(caller, parent, name)
    }

    client::pass_on! { inner:
        getattr setattr readlink mknod unlink rmdir rename link open create read write fallocate
        lseek fgetattr fsync fsync_inode release readdir statfs getxattr listxattr setxattr
        removexattr forget keeps
    }
}

/// Requests that do not come back hold up nobody for good: neither the other tenants, though there is one place for all of them, nor what
/// their own guest asks behind them in the same queue, more often than the queue had threads.
#[test]
fn one_whose_requests_do_not_come_back_holds_up_nobody() {
    const STUCK: usize = 5;
    let share = Share::new(1);
    let gated = Arc::new(Gated::default());
    let options = |weight| Options { share: Some(share.join(weight)), ..Options::default() };
    let (slow, other) = (Host::of(gated.clone(), options(100), scratch()), Host::null(options(1)));
    let (mut slow, mut other) = (
        slow.guest(Config { slots: STUCK + 1, ..Config::default() }),
        other.guest(Config::default()),
    );
    create(&mut slow, 1, ROOT, BEHIND);
    // By then the watch sleeps.
    std::thread::sleep(Duration::from_millis(1500));
    for slot in 1..=STUCK {
        let request = slow.request(op::LOOKUP, ROOT, &[BEHIND, b"\0"], 0);
        let queue = &mut slow.queues[1];
        let head = queue.prepare(slot, &request, &[], PAGE, 0);
        queue.offer(head);
        queue.notify();
        gated.await_waiting(slot);
        // The driver waits a minute for each.
        for _ in 0..20 {
            getattr(&mut other, ROOT);
        }
        getattr(&mut slow, ROOT);
    }
    gated.open_gate();
    let mut back: Vec<usize> = (0..STUCK)
        .map(|_| {
            let (head, written) = slow.queues[1].wait().unwrap();
            let slot = slow.queues[1].slot_of(head);
            assert_eq!(slow.reply(1, slot, written, PAGE).unwrap().error, 0);
            slot
        })
        .collect();
    back.sort_unstable();
    assert_eq!(back, (1..=STUCK).collect::<Vec<_>>());
    getattr(&mut slow, ROOT);
}

/// A guest that shall have no pages has files opened past them; others have not.
#[test]
fn who_keeps_no_pages_reads_past_them() {
    const DIRECT_IO: u32 = 1;
    let fs: Arc<dyn FileSystem> = Arc::new(NullFs::default());
    for (n, keeps) in [Keeps::NoPages, Keeps::Nothing, Keeps::Metadata].into_iter().enumerate() {
        let host = tenant(&fs, b"/", keeps);
        let mut guest = host.guest(Config::default());
        let (node, _) = create(&mut guest, 1, ROOT, format!("f{n}").as_bytes());
        let opened = guest.call(op::OPEN, node, &[OpenIn::default().as_bytes()]).unwrap();
        let (open, _) = OpenOut::read_from_prefix(&opened.body).unwrap();
        assert_eq!(open.open_flags.get() & DIRECT_IO != 0, keeps == Keeps::NoPages, "{keeps:?}");
        assert_eq!(getattr(&mut guest, node).attr_valid.get() == 0, n < 2, "{keeps:?}");
    }
}
