//! Threads that share one file, each through a descriptor of its own, and a second client that takes the leases from them.
//! Every word that was ever read must be one that could be there: of a write that had begun, and that no other
//! had replaced by then; no read may see two writes that are one entry each in either order at once; and in the end no write
//! is cut by another, however long.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::InodeId;
use base::random::Random;
use client::fs::{FileSystem, Handle, O_APPEND, O_EXCL, O_RDONLY, O_RDWR};
use client::libfs::{Config, LibFs, Limits};

use super::threads::{seed, together};
use super::{World, me};

/// Words of eight bytes of the file; each write fills its range with its own number.
const WORDS: u64 = 4096;
/// Bytes of an entry: what is longer is several.
const PIECE: usize = 4096;
const WRITERS: u64 = 4;
const READERS: u64 = 3;
const APPENDERS: u64 = 2;
/// Calls of a thread, and of the other client.
const CALLS: [u32; 2] = [800, 40];

/// A call: from when to when, words, and for a write its number.
#[derive(Clone, Debug)]
struct Write {
    number: u64,
    begin: u64,
    end: u64,
    from: u64,
    to: u64,
}

#[derive(Debug)]
struct Read {
    begin: u64,
    end: u64,
    from: u64,
    words: Vec<u64>,
}

#[derive(Default)]
struct Notes {
    clock: AtomicU64,
    numbers: AtomicU64,
    writes: Mutex<Vec<Write>>,
    reads: Mutex<Vec<Read>>,
    /// Where it came to lie, and how many words.
    appends: Mutex<Vec<Write>>,
}

fn attach(world: &World, aside: bool) -> LibFs {
    let config = Config::new(world.dir.join("sock").as_os_str().as_encoded_bytes());
    drop(world.attach());
    let limits = Limits {
        write_piece: PIECE,
        append_piece: PIECE,
        log_pieces: 200,
        aside,
        ..Limits::SHIPPED
    };
    LibFs::attach(Config { limits, ..config }).expect("attach")
}

fn open(fs: &LibFs, name: &str, flags: u32) -> Handle {
    let found = fs.lookup(&me(), InodeId::ROOT, name.as_bytes()).expect("it was made");
    fs.open(&me(), found.ino, flags).expect("open")
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

impl Notes {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn write(&self, fs: &LibFs, file: Handle, random: &mut Random) {
        let longest = if random.chance(1, 5) { 1500 } else { PIECE as u64 / 8 };
        let from = random.below(WORDS);
        let to = (from + 1 + random.below(longest)).min(WORDS);
        let number = self.numbers.fetch_add(1, Ordering::SeqCst) + 1;
        let data = number.to_le_bytes().repeat((to - from) as usize);
        let begin = self.now();
        let written = fs.write(file, from * 8, &data, false).expect("write");
        let end = self.now();
        assert_eq!(written.len, data.len());
        self.writes.lock().unwrap().push(Write { number, begin, end, from, to });
    }

    fn read(&self, fs: &LibFs, file: Handle, random: &mut Random) {
        let from = random.below(WORDS);
        let mut bytes = vec![0; (1 + random.below(700)).min(WORDS - from) as usize * 8];
        let begin = self.now();
        let read = fs.read(file, from * 8, &mut bytes).expect("read");
        let end = self.now();
        assert_eq!(read, bytes.len(), "from {from}");
        self.reads.lock().unwrap().push(Read { begin, end, from, words: words(&bytes) });
    }

    fn append(&self, fs: &LibFs, file: Handle, random: &mut Random) {
        let count = 1 + random.below(900);
        let number = self.numbers.fetch_add(1, Ordering::SeqCst) + 1;
        let data = number.to_le_bytes().repeat(count as usize);
        let begin = self.now();
        let written = fs.write(file, 0, &data, true).expect("append");
        let end = self.now();
        assert_eq!((written.len, written.offset % 8), (data.len(), 0));
        let from = written.offset / 8;
        self.appends.lock().unwrap().push(Write { number, begin, end, from, to: from + count });
    }

    /// Judges every word that was read.
    fn judge(&self) {
        let writes = self.writes.lock().unwrap();
        let by_number = |number: u64| -> &Write {
            let at = writes.partition_point(|w| w.number < number);
            writes.get(at).filter(|w| w.number == number).expect("a number that nobody has written")
        };
        // Of each word the writes by their ends, each with the latest begin until there.
        let mut ended: Vec<Vec<(u64, u64)>> = vec![Vec::new(); WORDS as usize];
        let mut by_end: Vec<&Write> = writes.iter().collect();
        by_end.sort_by_key(|w| w.end);
        for w in by_end {
            for word in &mut ended[w.from as usize..w.to as usize] {
                let latest = word.last().map_or(0, |(_, begin)| *begin).max(w.begin);
                word.push((w.end, latest));
            }
        }
        for read in self.reads.lock().unwrap().iter() {
            let is_last = read.end == u64::MAX;
            let mut seen: Vec<(&Write, Vec<u64>)> = Vec::new();
            for (i, number) in read.words.iter().enumerate() {
                let word = read.from + i as u64;
                let w = by_number(*number);
                assert!(w.from <= word && word < w.to, "{word} is {w:?}");
                assert!(w.begin < read.end, "{word} is {w:?} before it began");
                let ended = &ended[word as usize];
                let before = ended.partition_point(|(end, _)| *end < read.begin);
                let latest = before.checked_sub(1).map_or(0, |at| ended[at].1);
                assert!(
                    latest <= w.end,
                    "{word} is {w:?}, which was replaced, in {}..{}",
                    read.begin,
                    read.end
                );
                match seen.iter_mut().find(|(s, _)| s.number == w.number) {
                    Some((_, words)) => words.push(word),
                    None => seen.push((w, vec![word])),
                }
            }
            // Two writes that meet came one after the other, everywhere.
            let one = |w: &Write| is_last || (w.to - w.from) * 8 <= PIECE as u64;
            let above = |words: &[u64], w: &Write| words.iter().any(|i| (w.from..w.to).contains(i));
            for (i, (a, of_a)) in seen.iter().enumerate() {
                for (b, of_b) in &seen[i + 1..] {
                    let both = one(a) && one(b) && above(of_a, b) && above(of_b, a);
                    assert!(!both, "{a:?} and {b:?} are both above each other");
                }
            }
        }
    }

    /// Each append lies where its call said, and nowhere is anything else; who ended first lies in front.
    fn judge_appends(&self, all: &[u64]) {
        let mut appends = self.appends.lock().unwrap().clone();
        appends.sort_by_key(|a| a.from);
        let mut at = 0;
        let mut latest = 0;
        for a in &appends {
            assert_eq!(a.from, at, "{a:?}");
            assert!(all[a.from as usize..a.to as usize].iter().all(|w| *w == a.number), "{a:?}");
            assert!(a.end >= latest, "{a:?} lies behind one that began later");
            (at, latest) = (a.to, latest.max(a.begin));
        }
        assert_eq!(at, all.len() as u64);
    }
}

fn share(aside: bool, name: &str) {
    let seed = seed();
    let world = World::new(name);
    let (fs, other) = (attach(&world, aside), attach(&world, true));
    for name in ["shared", "log"] {
        let made = fs.create(&me(), InodeId::ROOT, name.as_bytes(), 0o644, O_RDWR | O_EXCL);
        fs.release(made.expect("create").1);
    }
    let notes = Notes::default();
    let first = notes.numbers.fetch_add(1, Ordering::SeqCst) + 1;
    let file = open(&fs, "shared", O_RDWR);
    let data = first.to_le_bytes().repeat(WORDS as usize);
    assert_eq!(fs.write(file, 0, &data, false).expect("write").len, data.len());
    let (begin, end) = (notes.now(), notes.now());
    notes.writes.lock().unwrap().push(Write { number: first, begin, end, from: 0, to: WORDS });
    let mut threads: Vec<Box<dyn FnOnce() + Send + '_>> = Vec::new();
    let (notes, fs, other) = (&notes, &fs, &other);
    for n in 0..WRITERS + READERS + APPENDERS + 1 {
        threads.push(Box::new(move || {
            let mut random = Random::new(seed ^ n << 32);
            let (writes, reads) = (n < WRITERS, n < WRITERS + READERS);
            let (fs, last) =
                if n == WRITERS + READERS + APPENDERS { (other, true) } else { (fs, false) };
            let file = match (reads || last, writes) {
                (true, writes) => open(fs, "shared", if writes { O_RDWR } else { O_RDONLY }),
                (false, _) => open(fs, "log", O_RDWR | O_APPEND),
            };
            for _ in 0..CALLS[usize::from(last)] {
                match (writes, reads || last) {
                    (true, _) => notes.write(fs, file, &mut random),
                    (false, true) => notes.read(fs, file, &mut random),
                    (false, false) => notes.append(fs, file, &mut random),
                }
                if last {
                    std::thread::sleep(Duration::from_millis(5));
                } else if random.chance(1, 200) {
                    std::thread::sleep(Duration::from_micros(random.below(300)));
                }
            }
            fs.fsync(file, false).expect("fsync");
            fs.release(file);
        }));
    }
    if !together(&world, threads) {
        return;
    }
    notes.writes.lock().unwrap().sort_by_key(|w| w.number);
    // What is there in the end, for the one who wrote it and for the other.
    for fs in [fs, other] {
        let file = open(fs, "shared", O_RDONLY);
        let mut bytes = vec![0; WORDS as usize * 8];
        assert_eq!(fs.read(file, 0, &mut bytes).expect("read"), bytes.len());
        let read = Read { begin: notes.now(), end: u64::MAX, from: 0, words: words(&bytes) };
        notes.reads.lock().unwrap().push(read);
        let log = open(fs, "log", O_RDONLY);
        let mut bytes = vec![0; fs.fgetattr(log).expect("stat").size as usize];
        assert_eq!(fs.read(log, 0, &mut bytes).expect("read"), bytes.len());
        notes.judge_appends(&words(&bytes));
    }
    notes.judge();
    let (writes, reads) = (notes.writes.lock().unwrap().len(), notes.reads.lock().unwrap().len());
    println!("{writes} writes, {reads} reads, {} appends", notes.appends.lock().unwrap().len());
}

#[test]
fn threads_that_share_a_file_see_only_what_can_be() {
    share(true, "shared");
}

#[test]
fn so_do_those_that_lock_it() {
    share(false, "shared-locked");
}
