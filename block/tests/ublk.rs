//! The queues of ublk over a model of the driver: it has a disk's requests, gives them out in any order, checks what comes back, and gives
//! up when its disk is removed.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::Errno;
use base::random::Random;
use block::device::{
    Answer, Blocking, Device, Disk, Memory, Op, Outcome, ReadOnly, Request, Traits,
};
use block::ublk::abi::{ABORTED, Description, op};
use block::ublk::queue::{Move, Next, Pages, Queue, Rules};
use block::ublk::worker::{Event, Kernel, run};
use rustix::event::{PollFd, PollFlags, poll};

const SIZE: u64 = 1 << 20;
const IO_BYTES: u32 = 64 << 10;

fn rules(traits: Traits, direct: bool) -> Rules {
    Rules { size: SIZE, traits, io_bytes: IO_BYTES, direct }
}

/// A request of the disk's user, and what is to become of it.
#[derive(Clone, Debug)]
struct Wanted {
    asked: Description,
    data: Vec<u8>,
    /// Bytes, or an error's number.
    result: i32,
}

/// What the driver has under a tag.
#[derive(Clone, Debug)]
enum Tag {
    /// Nothing was asked yet.
    New,
    /// A fetch waits for a request.
    Idle,
    /// A request is the server's.
    Out(Box<Wanted>),
    Aborted,
}

/// The driver, with the disk as it has to be.
struct Driver {
    tags: Vec<Tag>,
    model: Vec<u8>,
    /// Nobody else may have a request at the same sectors.
    busy: HashMap<u16, (u64, u64)>,
    random: Random,
    file: Option<Arc<Memory>>,
    moves: Vec<(u16, i32)>,
    committed: usize,
    aborted: bool,
    /// Requests are made as long as that many are left.
    left: usize,
}

impl Driver {
    fn new(seed: u64, depth: u16, left: usize) -> Self {
        Self {
            tags: vec![Tag::New; depth.into()],
            model: vec![0; SIZE as usize],
            busy: HashMap::new(),
            random: Random::new(seed),
            file: None,
            moves: Vec::new(),
            committed: 0,
            aborted: false,
            left,
        }
    }

    /// What somebody asks of the disk.
    fn wish(&mut self) -> Option<Wanted> {
        let most = u64::from(IO_BYTES) / 512;
        let longest = if self.random.chance(1, 8) { most } else { 12 };
        let sectors = 1 + self.random.below(longest);
        let start = self.random.below(SIZE / 512 - sectors);
        let taken = |(from, to): &(u64, u64)| start < *to && *from < start + sectors;
        if self.busy.values().any(taken) {
            return None;
        }
        let range = (start * 512) as usize..((start + sectors) * 512) as usize;
        let (len, fua) = (range.len(), if self.random.chance(1, 4) { op::FUA } else { 0 });
        let mut data = Vec::new();
        let (code, result) = match self.random.below(10) {
            0 => (u32::from(op::FLUSH), 0),
            1 => {
                self.model[range].fill(0);
                let hole = if self.random.chance(1, 2) { op::NO_UNMAP } else { 0 };
                (u32::from(op::WRITE_ZEROES) | hole, 0)
            }
            2 => {
                self.model[range].fill(0);
                (u32::from(op::DISCARD), 0)
            }
            3..6 => {
                data = self.model[range].to_vec();
                (u32::from(op::READ), len as i32)
            }
            _ => {
                self.random.fill(&mut self.model[range.clone()]);
                data = self.model[range].to_vec();
                (u32::from(op::WRITE) | fua, len as i32)
            }
        };
        let asked = Description { op_flags: code, sectors: sectors as u32, start, addr: 0 };
        Some(Wanted { asked, data, result })
    }

    /// Gives out a request, if somebody has one and a fetch waits.
    fn give_out(&mut self, events: &mut Vec<Event>) {
        for tag in 0..self.tags.len() {
            if !matches!(self.tags[tag], Tag::Idle) || self.random.chance(1, 3) {
                continue;
            }
            if self.left == 0 {
                break;
            }
            let Some(wanted) = self.wish() else { continue };
            self.left -= 1;
            let range = (wanted.asked.start, wanted.asked.start + u64::from(wanted.asked.sectors));
            self.busy.insert(tag as u16, range);
            self.tags[tag] = Tag::Out(Box::new(wanted));
            events.push(Event::Fetched(tag as u16, 0));
        }
    }
}

/// The model as a worker sees it.
struct Model {
    driver: Mutex<Driver>,
}

impl Pages for Model {
    fn take(&self, tag: u16, data: &mut [u8]) -> Result<(), Errno> {
        let driver = self.driver.lock().unwrap();
        let Tag::Out(wanted) = &driver.tags[usize::from(tag)] else { panic!("{tag} is not out") };
        assert_eq!(wanted.asked.op_flags as u8, op::WRITE);
        data.copy_from_slice(&wanted.data);
        Ok(())
    }

    fn give(&self, tag: u16, data: &[u8]) -> Result<(), Errno> {
        let driver = self.driver.lock().unwrap();
        let Tag::Out(wanted) = &driver.tags[usize::from(tag)] else { panic!("{tag} is not out") };
        assert_eq!(wanted.asked.op_flags as u8, op::READ);
        assert!(data == wanted.data, "{:?}", wanted.asked);
        Ok(())
    }
}

impl Kernel for Model {
    fn fetch(&mut self, tag: u16) -> io::Result<()> {
        let tag = &mut self.driver.get_mut().unwrap().tags[usize::from(tag)];
        assert!(matches!(tag, Tag::New), "fetched twice");
        *tag = Tag::Idle;
        Ok(())
    }

    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        let driver = self.driver.get_mut().unwrap();
        let Tag::Out(wanted) = &driver.tags[usize::from(tag)] else { panic!("{tag} is not out") };
        let write = wanted.asked.op_flags as u8 != op::READ;
        assert!(
            result == wanted.result || (write && result == 0 && wanted.result == 0),
            "{wanted:?}: {result}"
        );
        driver.busy.remove(&tag);
        driver.committed += 1;
        driver.tags[usize::from(tag)] = Tag::Idle;
        Ok(())
    }

    fn start_move(&mut self, tag: u16, what: Move) -> io::Result<()> {
        let driver = self.driver.get_mut().unwrap();
        let Tag::Out(wanted) = &mut driver.tags[usize::from(tag)] else {
            panic!("{tag} is not out")
        };
        let from = what.from as usize;
        assert_eq!(what.offset, wanted.asked.start * 512 + u64::from(what.from));
        assert_eq!(from + what.len as usize, wanted.data.len(), "all that is left");
        assert_eq!(what.durable, wanted.asked.op_flags & op::FUA != 0);
        // Not always all of it, and now and then nothing, for now.
        if driver.random.chance(1, 10) {
            driver.moves.push((tag, -i32::from(Errno::INTR.0)));
            return Ok(());
        }
        let len = if driver.random.chance(1, 3) {
            1 + driver.random.below(what.len.into())
        } else {
            what.len.into()
        };
        let part = from..from + len as usize;
        let file = driver.file.as_ref().unwrap();
        if what.write {
            file.write(what.offset, &wanted.data[part]).unwrap();
        } else {
            let mut read = vec![0; part.len()];
            file.read(what.offset, &mut read).unwrap();
            assert!(read == wanted.data[part]);
        }
        driver.moves.push((tag, len as i32));
        Ok(())
    }

    fn describe(&self, tag: u16) -> Description {
        let driver = self.driver.lock().unwrap();
        let Tag::Out(wanted) = &driver.tags[usize::from(tag)] else { panic!("{tag} is not out") };
        wanted.asked
    }

    fn wait(&mut self, bell: BorrowedFd<'_>, events: &mut Vec<Event>) -> io::Result<()> {
        let driver = self.driver.get_mut().unwrap();
        events.extend(driver.moves.drain(..).map(|(tag, result)| Event::Moved(tag, result)));
        driver.give_out(events);
        if driver.left == 0 && !driver.aborted && driver.busy.is_empty() {
            driver.aborted = true;
            for (tag, is) in driver.tags.iter_mut().enumerate() {
                assert!(matches!(is, Tag::Idle), "{is:?}");
                *is = Tag::Aborted;
                events.push(Event::Fetched(tag as u16, ABORTED));
            }
        }
        if events.is_empty() {
            // All is with the device: what wakes the worker is nothing but the bell.
            let mut fds = [PollFd::from_borrowed_fd(bell, PollFlags::IN)];
            let limit = Duration::from_secs(10).try_into().unwrap();
            if driver.busy.is_empty() {
                return Ok(());
            }
            assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "nobody wakes the worker");
            let _ = rustix::io::read(bell, &mut [0; 8]);
            events.push(Event::Woken);
        }
        Ok(())
    }
}

/// A device that completes in any order, by other threads.
struct Jumbled {
    disk: Arc<Memory>,
    queue: Arc<Mutex<Vec<Request>>>,
    flushed: AtomicUsize,
}

impl Jumbled {
    fn start(disk: Arc<Memory>, seed: u64) -> (Arc<Self>, std::thread::JoinHandle<()>) {
        let queue = Arc::new(Mutex::new(Vec::<Request>::new()));
        let device =
            Arc::new(Self { disk, queue: Arc::clone(&queue), flushed: AtomicUsize::new(0) });
        let weak = Arc::downgrade(&device);
        let mut random = Random::new(seed);
        let thread = std::thread::spawn(move || {
            while let Some(device) = weak.upgrade() {
                let mut queue = queue.lock().unwrap();
                if queue.is_empty() {
                    drop(queue);
                    std::thread::sleep(Duration::from_micros(50));
                    continue;
                }
                let which = random.below(queue.len() as u64) as usize;
                let request = queue.swap_remove(which);
                drop(queue);
                if matches!(request.op, Op::Flush) {
                    device.flushed.fetch_add(1, Ordering::Relaxed);
                }
                Blocking(Through(Arc::clone(&device.disk))).submit(request);
            }
        });
        (device, thread)
    }
}

impl Device for Jumbled {
    fn traits(&self) -> Traits {
        Traits::BYTES
    }
    fn size(&self) -> u64 {
        SIZE
    }
    fn submit(&self, request: Request) {
        self.queue.lock().unwrap().push(request);
    }
    fn is_prompt(&self, _: &Op) -> bool {
        true
    }
}

/// A disk that several have.
struct Through(Arc<Memory>);

impl Disk for Through {
    fn traits(&self) -> Traits {
        self.0.traits()
    }
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn prompt(&self) -> block::device::Prompt {
        self.0.prompt()
    }
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        self.0.read(offset, buf)
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.0.write(offset, data)
    }
    fn flush(&self) -> Result<(), Errno> {
        self.0.flush()
    }
    fn trim(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.0.trim(offset, len)
    }
    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno> {
        self.0.zero(offset, len, no_hole)
    }
    fn extents(&self, offset: u64, len: u64) -> Result<Vec<block::device::Extent>, Errno> {
        self.0.extents(offset, len)
    }
}

fn holds(disk: &Memory, model: &[u8]) {
    let mut all = vec![0; model.len()];
    disk.read(0, &mut all).unwrap();
    assert_eq!(all.iter().zip(model).position(|(a, b)| a != b), None);
}

#[test]
fn each_request_is_carried_out_once_by_whoever_completes_it() {
    for seed in 0..6 {
        let depth = [1, 2, 7, 32][seed as usize % 4];
        let disk = Arc::new(Memory::new(SIZE));
        let mut kernel = Model { driver: Mutex::new(Driver::new(seed, depth, 3000)) };
        let (device, thread) = Jumbled::start(Arc::clone(&disk), seed);
        run(&mut kernel, &*device, rules(device.traits(), false), depth).unwrap();
        let driver = kernel.driver.into_inner().unwrap();
        assert_eq!(driver.committed, 3000);
        assert!(device.flushed.load(Ordering::Relaxed) > 0);
        holds(&disk, &driver.model);
        drop(device);
        thread.join().unwrap();
    }
}

#[test]
fn what_is_prompt_needs_no_waking() {
    let disk = Arc::new(Memory::new(SIZE));
    let mut kernel = Model { driver: Mutex::new(Driver::new(9, 8, 3000)) };
    let device = Blocking(Through(Arc::clone(&disk)));
    run(&mut kernel, &device, rules(device.traits(), false), 8).unwrap();
    holds(&disk, &kernel.driver.into_inner().unwrap().model);
}

#[test]
fn bytes_move_without_the_device_where_it_is_a_file() {
    for seed in 0..4 {
        let disk = Arc::new(Memory::new(SIZE));
        let mut driver = Driver::new(seed, 16, 3000);
        driver.file = Some(Arc::clone(&disk));
        let mut kernel = Model { driver: Mutex::new(driver) };
        let device = Blocking(Through(Arc::clone(&disk)));
        run(&mut kernel, &device, rules(device.traits(), true), 16).unwrap();
        holds(&disk, &kernel.driver.into_inner().unwrap().model);
    }
}

/// Pages that nobody may look at.
struct Blank;

impl Pages for Blank {
    fn take(&self, _: u16, data: &mut [u8]) -> Result<(), Errno> {
        data.fill(7);
        Ok(())
    }
    fn give(&self, _: u16, _: &[u8]) -> Result<(), Errno> {
        Err(Errno::IO)
    }
}

const IO: i32 = -5;

fn asked(code: u8, start: u64, sectors: u32) -> Description {
    Description { op_flags: code.into(), sectors, start, addr: 0 }
}

fn first(rules: Rules, what: Description) -> Next {
    Queue::new(rules, 1).fetched(0, 0, || what, &Blank).unwrap()
}

#[test]
fn what_makes_no_sense_is_not_carried_out() {
    let traits = Blocking(Memory::new(SIZE)).traits();
    let sectors = SIZE / 512;
    let most = IO_BYTES / 512;
    let wrong = [
        asked(op::READ, sectors, 1),
        asked(op::WRITE, sectors - 1, 2),
        asked(op::DISCARD, u64::MAX / 512, 8),
        asked(op::WRITE_ZEROES, u64::MAX, 1),
        asked(op::READ, 0, 0),
        asked(op::WRITE, 0, most + 1),
        asked(op::READ, 0, u32::MAX),
        asked(4, 0, 1),
        asked(15, 0, 1),
    ];
    for (i, what) in wrong.iter().enumerate() {
        for direct in [false, true] {
            let next = first(rules(traits, direct), *what);
            assert!(matches!(next, Next::Commit(result) if result < 0), "{i}: {next:?}");
        }
    }
    let coarse = Traits { block_min: 4096, ..traits };
    assert_eq!(first(rules(coarse, false), asked(op::READ, 1, 8)), Next::Commit(IO));
    assert_eq!(
        first(rules(coarse, false), asked(op::READ, 8, 8)),
        Next::Carry(Op::Read { offset: 4096, len: 4096 })
    );
    let only = ReadOnly(Arc::new(Blocking(Memory::new(SIZE)))).traits();
    for code in [op::WRITE, op::DISCARD, op::WRITE_ZEROES] {
        assert_eq!(first(rules(only, false), asked(code, 0, 1)), Next::Commit(IO));
    }
    // What is in bounds goes to the device with its data and flags.
    let what = Description { op_flags: u32::from(op::WRITE) | op::FUA, ..asked(op::WRITE, 2, 1) };
    let next = first(rules(traits, false), what);
    assert_eq!(next, Next::Carry(Op::Write { offset: 1024, data: vec![7; 512], fua: true }));
}

#[test]
fn a_tag_is_one_sides_at_a_time() {
    let traits = Traits::BYTES;
    let read = || asked(op::READ, 0, 1);
    let mut queue = Queue::new(rules(traits, false), 2);
    assert!(matches!(queue.fetched(0, 0, read, &Blank), Ok(Next::Carry(_))));
    // It is the server's: nothing can come under it. Nor under one that there is not.
    assert!(queue.fetched(0, 0, read, &Blank).is_err());
    assert!(queue.fetched(2, 0, read, &Blank).is_err());
    // What was not given out is not committed.
    assert_eq!(queue.completed(1, Ok(Answer::Done), &Blank), Next::Nothing);
    assert_eq!(queue.completed(9, Ok(Answer::Done), &Blank), Next::Nothing);
    assert_eq!(queue.moved(0, 512), Next::Nothing);
    // A fetch that fails is no request.
    assert!(queue.fetched(1, -22, read, &Blank).unwrap_err().contains("Invalid argument"));
    let outcome: Outcome = Err(Errno::NOSPC);
    assert_eq!(queue.completed(0, outcome, &Blank), Next::Commit(-28));
    assert!(!queue.is_over());
    for tag in 0..2 {
        assert_eq!(queue.fetched(tag, ABORTED, read, &Blank), Ok(Next::Nothing));
    }
    assert!(queue.is_over());
    assert!(queue.fetched(0, ABORTED, read, &Blank).is_err());
}

#[test]
fn what_a_device_owes_and_does_not_give_is_an_error() {
    let give = |code: u8, outcome: Outcome| {
        let mut queue = Queue::new(rules(Traits::BYTES, false), 1);
        queue.fetched(0, 0, || asked(code, 0, 1), &Blank).unwrap();
        queue.completed(0, outcome, &Blank)
    };
    assert_eq!(give(op::READ, Ok(Answer::Done)), Next::Commit(IO));
    assert_eq!(give(op::READ, Ok(Answer::Data(vec![0; 511]))), Next::Commit(IO));
    // (These pages take nothing.)
    assert_eq!(give(op::READ, Ok(Answer::Data(vec![0; 512]))), Next::Commit(IO));
    assert_eq!(give(op::WRITE, Ok(Answer::Data(vec![0; 512]))), Next::Commit(IO));
    assert_eq!(give(op::WRITE, Ok(Answer::Done)), Next::Commit(512));
    assert_eq!(give(op::WRITE, Err(Errno::STALE)), Next::Commit(IO));
    assert_eq!(give(op::FLUSH, Err(Errno::AGAIN)), Next::Commit(IO));
    assert_eq!(give(op::FLUSH, Ok(Answer::Done)), Next::Commit(0));
    // A file that ends before its disk does.
    let mut queue = Queue::new(rules(Traits::BYTES, true), 1);
    queue.fetched(0, 0, || asked(op::READ, 0, 2), &Blank).unwrap();
    let rest = Move { write: false, offset: 512, from: 512, len: 512, durable: false };
    assert_eq!(queue.moved(0, 512), Next::Move(rest));
    assert_eq!(queue.moved(0, 0), Next::Commit(IO));
}

/// Each broken variant is missed by one of the tests above.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn broken_variants_are_found() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 2] = [
        (Bug::MoveCutShort, bytes_move_without_the_device_where_it_is_a_file),
        (Bug::BellTooLate, each_request_is_carried_out_once_by_whoever_completes_it),
    ];
    assert_eq!(missed(&tests), []);
}
