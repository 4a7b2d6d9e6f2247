//! A device that is killed at any moment and started again: its guest sees a pause, and nothing else.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use base::random::Random;
use common::process::{self, Process};
use common::{create, read_in, scratch, write_in};
use frontend::fuse::wire::*;
use virtiofs::driver::{Config, Driver};
use zerocopy::{FromBytes, IntoBytes};

const ROOT: u64 = 1;

/// Not a test: the device, as a process that can be killed.
#[test]
fn device_process() {
    process::body();
}

#[test]
fn open_files_and_inodes_survive_the_device() {
    let mut device = Process::start(&scratch());
    let mut guest = Driver::over(device.connect(), Config::default()).unwrap();
    guest.init().unwrap();
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    let wrote = guest.call_on(1, op::WRITE, node, &[&write_in(fh, 0, 5)], b"hello", 0).unwrap();
    assert_eq!(wrote.error, 0);
    for round in 0..3 {
        device.replace(&mut guest);
        // Without INIT, by the same node and handle; from the other side as well.
        let read = guest.call_on(1, op::READ, node, &[&read_in(fh, 0, 100)], &[], 100).unwrap();
        assert_eq!((read.error, &*read.body), (0, &b"hello"[..]), "round {round}");
        let asked = guest.call(op::GETATTR, node, &[GetattrIn::default().as_bytes()]).unwrap();
        assert_eq!(asked.error, 0);
    }
    let release = ReleaseIn { fh: fh.into(), ..ReleaseIn::default() };
    assert_eq!(guest.call(op::RELEASE, node, &[release.as_bytes()]).unwrap().error, 0);
    guest.tell(op::FORGET, node, &[ForgetIn { nlookup: 1.into() }.as_bytes()]).unwrap();
    device.replace(&mut guest);
    let read = guest.call_on(1, op::READ, node, &[&read_in(fh, 0, 1)], &[], 1).unwrap();
    assert_eq!(read.error, -libc::ESTALE);
}

/// The guest moves to a device of another process, which has the same directory: by what vhost-user has for live migration.
#[test]
fn a_device_hands_its_guest_on() {
    use ::vhost::vhost_user::VhostUserFrontend;
    use ::vhost::vhost_user::message::{
        VhostTransferStateDirection as Way, VhostTransferStatePhase,
    };

    let mut from = Process::keyed();
    let to = from.beside();
    let mut guest = Driver::over(from.connect(), Config::default()).unwrap();
    guest.init().unwrap();
    let mut files = Vec::new();
    for n in 0..40 {
        let (node, fh) = create(&mut guest, 1, ROOT, format!("f{n}").as_bytes());
        let wrote = guest.call_on(1, op::WRITE, node, &[&write_in(fh, 0, 5)], b"hello", 0).unwrap();
        assert_eq!(wrote.error, 0);
        files.push((node, fh));
    }
    // Not while it runs.
    let (_, write) = std::io::pipe().unwrap();
    let phase = VhostTransferStatePhase::STOPPED;
    let refused = guest.frontend.set_device_state_fd(Way::SAVE, phase, write.into());
    assert!(refused.is_err());
    guest.stop().unwrap();
    let state = guest.save().unwrap();
    assert!(state.len() > 40 * 8);
    // A device of the same tenant refuses it that serves another directory: its inodes are others.
    let other = Process::keyed();
    guest.connect_stopped(other.connect()).unwrap();
    assert!(guest.load(&state).is_err());
    // A damaged one is refused, and the device is as it was.
    guest.connect_stopped(to.connect()).unwrap();
    assert!(guest.load(&state[..state.len() - 1]).is_err());
    guest.load(&state).unwrap();
    guest.start().unwrap();
    from.kill();
    for (node, fh) in files {
        let read = guest.call_on(1, op::READ, node, &[&read_in(fh, 0, 9)], &[], 9).unwrap();
        assert_eq!((read.error, &*read.body), (0, &b"hello"[..]));
    }
    let (node, _) = create(&mut guest, 1, ROOT, b"new");
    assert_ne!(node, 0);
}

/// A monitor says what it likes: without the devices' key it cannot make its guest one that was told of an inode beside its directory.
#[test]
fn a_monitor_cannot_say_what_its_guest_knows() {
    use ::vhost::vhost_user::VhostUserFrontend;
    use ::vhost::vhost_user::message::{
        VhostTransferStateDirection as Way, VhostTransferStatePhase as Phase,
    };

    for keyed in [false, true] {
        let root = scratch();
        if keyed {
            std::fs::write(root.join("key"), [7; 32]).unwrap();
        }
        let secret = root.join("secret");
        std::fs::write(&secret, b"not the guest's").unwrap();
        let ino = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&secret).unwrap());
        // The file is to be found by its number: somebody else's guest has it open, say, by a link.
        std::fs::hard_link(&secret, root.join("shared/link")).unwrap();
        let device = Process::start(&root);
        let mut guest = Driver::over(device.connect(), Config::default()).unwrap();
        guest.init().unwrap();
        guest.stop().unwrap();
        guest.connect_stopped(device.connect()).unwrap();
        for magic in [b"CRBLVFM1", b"CRBLVFM2"] {
            let numbers = [u64::from_le_bytes(*magic), 1, 0, ino, 1];
            let body: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
            let crc = u64::from(base::crc32c(0, &body)).to_le_bytes();
            for end in [&crc[..], &[0; 32], &[]] {
                let (read, mut write) = std::io::pipe().unwrap();
                let asked =
                    guest.frontend.set_device_state_fd(Way::LOAD, Phase::STOPPED, read.into());
                let _ = std::io::Write::write_all(&mut write, &[&body, end].concat());
                drop(write);
                assert!(asked.is_err() || guest.frontend.check_device_state().is_err());
                // It hangs up on who asks for what was not offered.
                if asked.is_err() {
                    guest.connect_stopped(device.connect()).unwrap();
                }
            }
        }
        guest.start().unwrap();
        let asked = guest.call(op::GETATTR, ino, &[GetattrIn::default().as_bytes()]).unwrap();
        assert_ne!(asked.error, 0, "keyed: {keyed}");
    }
}

/// Many requests under way, most of which can be done only once; the device is killed among them. Each is answered, once, as if
/// nothing had happened.
#[test]
fn nothing_under_way_is_lost_or_fails() {
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| {
        u64::from(std::process::id())
            ^ u64::from(std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos())
    });
    println!("SEED={seed}");
    let mut random = Random::new(seed);
    let mut device = Process::start(&scratch());
    let shared = device.root.join("shared");
    let slots = 16;
    let config = Config { queues: 2, slots, ..Config::default() };
    let mut guest = Driver::over(device.connect(), config).unwrap();
    guest.init().unwrap();
    let (mut made, mut next) = (Vec::new(), 0u32);
    for _ in 0..6 {
        // Head by queue: what was asked, and what must be there after it.
        let mut under_way: BTreeMap<(usize, u16), (String, bool)> = BTreeMap::new();
        for slot in 1..slots {
            for queue in 1..=2 {
                let request = if random.below(2) == 0 || made.is_empty() {
                    next += 1;
                    let name = format!("n{next}");
                    let z = format!("{name}\0");
                    let (opcode, arg) = match random.below(4) {
                        0 => (
                            op::MKDIR,
                            MkdirIn { mode: 0o755.into(), ..MkdirIn::default() }
                                .as_bytes()
                                .to_vec(),
                        ),
                        1 => (
                            op::CREATE,
                            CreateIn {
                                flags: 0o302.into(),
                                mode: 0o644.into(),
                                ..CreateIn::default()
                            }
                            .as_bytes()
                            .to_vec(),
                        ),
                        2 => (
                            op::MKNOD,
                            MknodIn { mode: 0o100_644.into(), ..MknodIn::default() }
                                .as_bytes()
                                .to_vec(),
                        ),
                        _ => (op::SYMLINK, Vec::new()),
                    };
                    let target: &[u8] = if opcode == op::SYMLINK { b"to\0" } else { b"" };
                    let request = guest.request(opcode, ROOT, &[&arg, z.as_bytes(), target], 0);
                    (request, name, true)
                } else {
                    let at = random.below(made.len() as u64) as usize;
                    let name: String = made.swap_remove(at);
                    let kind = std::fs::symlink_metadata(shared.join(&name)).unwrap().file_type();
                    let opcode = if kind.is_dir() { op::RMDIR } else { op::UNLINK };
                    let request = guest.request(opcode, ROOT, &[format!("{name}\0").as_bytes()], 0);
                    (request, name, false)
                };
                let q = &mut guest.queues[queue];
                let head = q.prepare(slot, &request.0, &[], 4096, 0);
                q.offer(head);
                under_way.insert((queue, head), (request.1, request.2));
            }
        }
        for queue in 1..=2 {
            guest.queues[queue].notify();
        }
        // Some have been done by then, some said so, some are in the middle.
        for _ in 0..random.below(2000) {
            std::hint::spin_loop();
        }
        std::thread::sleep(Duration::from_micros(random.below(1500)));
        device.replace(&mut guest);
        while !under_way.is_empty() {
            for queue in 1..=2 {
                if !under_way.keys().any(|(q, _)| *q == queue) {
                    continue;
                }
                let (head, written) = guest.queues[queue].wait().unwrap();
                let slot = guest.queues[queue].slot_of(head);
                let reply = guest.reply(queue, slot, written, 4096).unwrap();
                let (name, there) =
                    under_way.remove(&(queue, head)).expect("an answer to no request");
                assert_eq!(reply.error, 0, "{name}, to be there: {there}");
                assert_eq!(std::fs::symlink_metadata(shared.join(&name)).is_ok(), there, "{name}");
                if there {
                    let told = EntryOut::read_from_prefix(&reply.body).unwrap().0.nodeid.get();
                    let found = std::fs::symlink_metadata(shared.join(&name)).unwrap();
                    assert_eq!(told, std::os::unix::fs::MetadataExt::ino(&found));
                    made.push(name);
                }
            }
        }
    }
    let left = std::fs::read_dir(&shared).unwrap().count();
    assert_eq!(left, made.len());
}
