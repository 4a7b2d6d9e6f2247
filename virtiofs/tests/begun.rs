//! Requests that wait and hold no thread: syncs of a file system where one thread can wait for all, and whatever one begins that says
//! itself when it has ended.

mod common;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use base::Errno;
use client::fs::{Ended, FileSystem, Handle, Result, Waiting, Written};
use client::null::NullFs;
use common::{Host, create, read_in, scratch, write_in};
use frontend::fuse::wire::*;
use virtiofs::device::Options;
use virtiofs::driver::{Config, Driver, PAGE};
use zerocopy::{FromBytes, IntoBytes};

const ROOT: u64 = 1;
/// More than a queue may have threads.
const MANY: usize = 200;
const SOON: Duration = Duration::from_secs(60);

#[derive(Default)]
struct State {
    /// Whoever syncs comes back.
    open: bool,
    syncing: usize,
    synced: usize,
    released: usize,
    expected: usize,
    begun: VecDeque<Box<dyn FnOnce(Result<()>) + Send>>,
}

/// A file system whose syncs wait for a gate, or that says when they have ended, and its reads and writes too.
struct Slow {
    inner: NullFs,
    waiting: Waiting,
    state: Mutex<State>,
    changed: Condvar,
}

impl Slow {
    fn new(waiting: Waiting) -> Arc<Self> {
        let (inner, state) = (NullFs::default(), Mutex::default());
        Arc::new(Self { inner, waiting, state, changed: Condvar::new() })
    }

    /// Returns when the state is so.
    fn until(&self, is_so: impl Fn(&State) -> bool) {
        let state = self.state.lock().unwrap();
        let waited = self.changed.wait_timeout_while(state, SOON, |state| !is_so(state)).unwrap().1;
        assert!(!waited.timed_out());
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn begin(&self, end: impl FnOnce(Result<()>) + Send + 'static) {
        self.change(|state| state.begun.push_back(Box::new(end)));
    }

    /// Ends what was begun last.
    fn end(&self, result: Result<()>) {
        let end = self.state.lock().unwrap().begun.pop_back().unwrap();
        end(result);
    }
}

impl FileSystem for Slow {
    fn waiting(&self) -> Waiting {
        self.waiting
    }

    fn fsync(&self, _: Handle, _: bool) -> Result<()> {
        self.change(|state| state.syncing += 1);
        let state = self.state.lock().unwrap();
        let mut state = self.changed.wait_while(state, |state| !state.open).unwrap();
        state.synced += 1;
        Ok(())
    }

    fn begin_read(&self, _: Handle, offset: u64, len: usize, ended: Ended<Vec<u8>>) {
        self.begin(move |result| ended(result.map(|()| vec![offset as u8; len])));
    }

    fn begin_write(&self, _: Handle, offset: u64, data: Vec<u8>, _: bool, ended: Ended<Written>) {
        self.begin(move |result| ended(result.map(|()| Written { len: data.len(), offset })));
    }

    fn expect_fsync(&self, _: Handle) {
        self.change(|state| state.expected += 1);
    }

    fn release(&self, handle: Handle) {
        self.inner.release(handle);
        self.change(|state| state.released += 1);
    }

    fn begin_fsync(&self, _: Handle, _: bool, ended: Ended<()>) {
        self.begin(ended);
    }

    client::pass_on! { inner:
        lookup getattr setattr readlink mknod unlink rmdir rename link open create read write fallocate
        lseek fgetattr fsync_inode readdir statfs getxattr listxattr setxattr
        removexattr forget keeps
    }
}

fn offer(guest: &mut Driver, slot: usize, request: &[u8], data: &[u8], reply: usize, room: usize) {
    let queue = &mut guest.queues[1];
    let head = queue.prepare(slot, request, data, reply, room);
    queue.offer(head);
    queue.notify();
}

fn fsync(guest: &mut Driver, slot: usize, node: u64, fh: u64) {
    let arg = FsyncIn { fh: fh.into(), ..FsyncIn::default() };
    let request = guest.request(op::FSYNC, node, &[arg.as_bytes()], 0);
    offer(guest, slot, &request, &[], PAGE, 0);
}

/// The slots that come back, with their errors.
fn back(guest: &mut Driver, count: usize) -> Vec<(usize, i32)> {
    let mut back: Vec<(usize, i32)> = (0..count)
        .map(|_| {
            let (head, written) = guest.queues[1].wait().unwrap();
            let slot = guest.queues[1].slot_of(head);
            (slot, guest.reply(1, slot, written, PAGE).unwrap().error)
        })
        .collect();
    back.sort_unstable();
    back
}

fn threads_of_syncs() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    let names: Vec<String> = tasks.filter_map(|task| name(task.ok()?)).collect();
    names.iter().filter(|name| matches!(name.trim(), "syncs" | "virtiofs-1")).count()
}

fn config() -> Config {
    Config { size: 1024, slots: MANY + 2, ..Config::default() }
}

#[test]
fn syncs_of_a_crowd_hold_no_thread_each() {
    let slow = Slow::new(Waiting::Together);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let mut guest = host.guest(config());
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    for slot in 1..=MANY {
        fsync(&mut guest, slot, node, fh);
    }
    slow.until(|state| state.syncing > 0);
    // What does not wait is served beside them.
    for _ in 0..100 {
        let asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
        assert_eq!(asked.error, 0);
    }
    // Another test of this process may have some too.
    let threads = threads_of_syncs();
    assert!(threads <= 24, "{threads} threads for {MANY} syncs");
    slow.change(|state| state.open = true);
    let all: Vec<(usize, i32)> = (1..=MANY).map(|slot| (slot, 0)).collect();
    assert_eq!(back(&mut guest, MANY), all);
    slow.until(|state| state.synced == MANY);
}

#[test]
fn what_is_begun_ends_in_any_order_and_holds_no_thread() {
    let slow = Slow::new(Waiting::Nobody);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let mut guest = host.guest(config());
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    for slot in 1..=MANY {
        match slot % 3 {
            0 => fsync(&mut guest, slot, node, fh),
            1 => {
                let arg = write_in(fh, slot, 100);
                let request = guest.request(op::WRITE, node, &[&arg], 100);
                offer(&mut guest, slot, &request, &[7; 100], PAGE, 0);
            }
            _ => {
                let request = guest.request(op::READ, node, &[&read_in(fh, slot, 100)], 0);
                offer(&mut guest, slot, &request, &[], size_of::<OutHeader>(), 100);
            }
        }
    }
    slow.until(|state| state.begun.len() == MANY);
    let asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
    assert_eq!(asked.error, 0);
    // The last first; every seventh fails.
    for slot in (1..=MANY).rev() {
        slow.end(if slot % 7 == 0 { Err(Errno::NOSPC) } else { Ok(()) });
        let (head, written) = guest.queues[1].wait().unwrap();
        assert_eq!(guest.queues[1].slot_of(head), slot);
        let room = if slot % 3 == 2 { size_of::<OutHeader>() } else { PAGE };
        let reply = guest.reply(1, slot, written, room).unwrap();
        if slot % 7 == 0 {
            assert_eq!((reply.error, reply.body.len()), (-libc::ENOSPC, 0));
            continue;
        }
        assert_eq!(reply.error, 0);
        match slot % 3 {
            0 => assert!(reply.body.is_empty()),
            1 => assert_eq!(reply.body[..4], 100u32.to_le_bytes()),
            _ => assert_eq!(reply.body, vec![slot as u8; 100]),
        }
    }
}

/// A monitor that stops the queue waits for what was begun, so that nothing is written to the guest's memory, or done, behind its back.
#[test]
fn whoever_stops_the_queue_waits_for_what_was_begun() {
    let slow = Slow::new(Waiting::Nobody);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let mut guest = host.guest(config());
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    fsync(&mut guest, 1, node, fh);
    slow.until(|state| state.begun.len() == 1);
    let ender = slow.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        ender.change(|state| state.synced = 1);
        ender.end(Ok(()));
    });
    guest.stop().unwrap();
    assert_eq!(slow.state.lock().unwrap().synced, 1);
    assert_eq!(back(&mut guest, 1), [(1, 0)]);
    thread.join().unwrap();
}

/// More data than a device may hold is waited for, which bounds it; here by what the file system does at once.
#[test]
fn a_guest_makes_the_device_hold_so_much_and_no_more() {
    let slow = Slow::new(Waiting::Nobody);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let data = 1 << 20;
    let mut guest = host.guest(Config { size: 1024, slots: 82, data, ..Config::default() });
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    for slot in 1..=80 {
        let request = guest.request(op::WRITE, node, &[&write_in(fh, 0, data)], data);
        offer(&mut guest, slot, &request, &vec![7; data], PAGE, 0);
    }
    // 64 are begun, and the others written meanwhile.
    assert_eq!(back(&mut guest, 16).len(), 16);
    slow.until(|state| state.begun.len() == 64);
    for _ in 0..64 {
        slow.end(Ok(()));
    }
    assert_eq!(back(&mut guest, 64).iter().filter(|(_, error)| *error == 0).count(), 64);
}

/// The gate of the guest's: it names no file that it has not open, and no more than it may read.
#[test]
fn what_is_begun_was_judged_before() {
    let slow = Slow::new(Waiting::Nobody);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let mut guest = host.guest(config());
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    let asked = |guest: &mut Driver, opcode, node, arg: &[u8]| {
        guest.call(opcode, node, &[arg]).unwrap().error
    };
    let sync = FsyncIn { fh: (fh + 9).into(), ..FsyncIn::default() };
    assert_eq!(asked(&mut guest, op::FSYNC, node, sync.as_bytes()), -libc::EBADF);
    assert_eq!(asked(&mut guest, op::READ, node, &read_in(fh + 9, 0, 100)), -libc::EBADF);
    assert_eq!(asked(&mut guest, op::READ, node + 77, &read_in(fh, 0, 100)), -libc::ESTALE);
    assert!(slow.state.lock().unwrap().begun.is_empty());
    // Who asks for more than there is room for is told so, whatever was read.
    let request = guest.request(op::READ, node, &[&read_in(fh, 0, 4 * PAGE)], 0);
    offer(&mut guest, 1, &request, &[], size_of::<OutHeader>(), 0);
    slow.until(|state| state.begun.len() == 1);
    slow.end(Ok(()));
    assert_eq!(back(&mut guest, 1), [(1, -libc::EIO)]);
}

/// A handle is the back end's until what was begun with it has ended, whatever the guest gives back meanwhile.
#[test]
fn a_handle_is_released_when_nothing_waits() {
    let slow = Slow::new(Waiting::Nobody);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let mut guest = host.guest(Config { queues: 2, ..config() });
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    for slot in 1..=2 {
        let request = guest.request(op::READ, node, &[&read_in(fh, 0, 100)], 0);
        offer(&mut guest, slot, &request, &[], size_of::<OutHeader>(), 100);
    }
    slow.until(|state| state.begun.len() == 2);
    let release = ReleaseIn { fh: fh.into(), ..ReleaseIn::default() };
    let queue = |guest: &mut Driver, opcode, arg: &[u8]| {
        guest.call_on(2, opcode, node, &[arg], &[], 0).unwrap().error
    };
    assert_eq!(queue(&mut guest, op::RELEASE, release.as_bytes()), 0);
    assert_eq!(queue(&mut guest, op::RELEASE, release.as_bytes()), -libc::EBADF);
    assert_eq!(slow.state.lock().unwrap().released, 0);
    slow.end(Ok(()));
    back(&mut guest, 1);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(slow.state.lock().unwrap().released, 0);
    // The last one; and the guest may begin anew before that.
    guest.call(op::DESTROY, ROOT, &[]).unwrap();
    slow.end(Err(Errno::IO));
    slow.until(|state| state.released == 1);
}

/// Who opened a file for reading does not write to it, also where the back end would let it.
#[test]
fn a_file_that_was_opened_for_reading_is_not_written() {
    let slow = Slow::new(Waiting::Nobody);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let mut guest = host.guest(config());
    let (node, _) = create(&mut guest, 1, ROOT, b"f");
    let opened = guest.call(op::OPEN, node, &[OpenIn::default().as_bytes()]).unwrap();
    let (open, _) = OpenOut::read_from_prefix(&opened.body).unwrap();
    let fh = open.fh.get();
    let wrote = guest.call_on(1, op::WRITE, node, &[&write_in(fh, 0, 4)], b"mine", 0).unwrap();
    assert_eq!(wrote.error, -libc::EBADF);
    let arg = FallocateIn { fh: fh.into(), length: 10.into(), ..FallocateIn::default() };
    assert_eq!(guest.call(op::FALLOCATE, node, &[arg.as_bytes()]).unwrap().error, -libc::EBADF);
    assert!(slow.state.lock().unwrap().begun.is_empty());
}

/// A guest that makes one descriptor available again and again, which has not come back, has no more under way than the ring has
/// descriptors; and all come back in the end.
#[test]
fn no_more_is_under_way_than_there_are_descriptors() {
    let slow = Slow::new(Waiting::Nobody);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let mut guest = host.guest(Config { size: 64, slots: 4, ..Config::default() });
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    let arg = FsyncIn { fh: fh.into(), ..FsyncIn::default() };
    let request = guest.request(op::FSYNC, node, &[arg.as_bytes()], 0);
    let queue = &mut guest.queues[1];
    let head = queue.prepare(1, &request, &[], PAGE, 0);
    for _ in 0..3 {
        for _ in 0..32 {
            queue.offer(head);
        }
        queue.kick_anyway();
        std::thread::sleep(Duration::from_millis(20));
    }
    slow.until(|state| state.begun.len() == 64);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(slow.state.lock().unwrap().begun.len(), 64);
    for _ in 0..96 {
        slow.until(|state| !state.begun.is_empty());
        slow.end(Ok(()));
    }
    for _ in 0..96 {
        assert_eq!(guest.queues[1].wait().unwrap().0, head);
    }
    let asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
    assert_eq!(asked.error, 0);
}

/// Who writes twice and syncs, again and again, is expected to sync when it has written twice; who does not is not.
#[test]
fn a_sync_is_expected_where_one_has_come_so_far() {
    let slow = Slow::new(Waiting::Together);
    slow.change(|state| state.open = true);
    let host = Host::of(slow.clone(), Options::default(), scratch());
    let mut guest = host.guest(config());
    let (node, fh) = create(&mut guest, 1, ROOT, b"f");
    let mut round = |writes: usize| {
        for _ in 0..writes {
            let wrote = guest.call_on(1, op::WRITE, node, &[&write_in(fh, 0, 4)], b"mine", 0);
            assert_eq!(wrote.unwrap().error, 0);
        }
        let expected = slow.state.lock().unwrap().expected;
        let arg = FsyncIn { fh: fh.into(), ..FsyncIn::default() };
        assert_eq!(guest.call(op::FSYNC, node, &[arg.as_bytes()]).unwrap().error, 0);
        expected
    };
    let seen: Vec<usize> = [2, 2, 2, 2, 2, 2, 1, 1, 3, 2, 3, 0, 0].map(&mut round).into();
    // Four alike, and from the fifth on it is known; what is otherwise once ends that.
    assert_eq!(seen, [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2]);
}
