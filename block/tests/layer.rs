//! The layer in front of a model of a disk, from a seed: any order of answers, failures, crashes.
//!
//! The model holds what each sector may hold after a crash: what was durable when the last flush that owed it was
//! answered, or anything written since. A client never has two requests in flight at the same bytes, so what it may read
//! is one thing.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use base::random::Random;
use base::{Errno, Nanos};
use block::device::{Answer, Op, Outcome, SECTOR, Zero};
use block::layer::{Config, Effect, Layer};

const SECTORS: u64 = 256;
const SIZE: u64 = SECTORS * SECTOR;

/// A sector's bytes: all of one version, which is unique but for 0, the zeroes.
fn bytes_of(version: u64) -> Vec<u8> {
    version.to_le_bytes().repeat(SECTOR as usize / 8)
}

fn version_of(bytes: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(bytes[..8].try_into().ok()?);
    (bytes == bytes_of(version)).then_some(version)
}

/// The disk below: what it holds, and what of that would be there after a power cut.
#[derive(Default)]
struct Disk {
    now: BTreeMap<u64, u64>,
    durable: BTreeMap<u64, u64>,
    /// Sectors changed since they were durable, each with all it held since.
    since: BTreeMap<u64, Vec<u64>>,
}

impl Disk {
    fn set(&mut self, sector: u64, version: u64) {
        self.now.insert(sector, version);
        self.since.entry(sector).or_default().push(version);
    }

    fn flush(&mut self) {
        self.durable = self.now.clone();
        self.since.clear();
    }

    fn crash(&mut self, random: &mut Random) {
        for (sector, versions) in std::mem::take(&mut self.since) {
            let at = random.below(versions.len() as u64 + 1) as usize;
            if let Some(version) = versions.get(at) {
                self.durable.insert(sector, *version);
            }
        }
    }
}

/// An operation of the client.
#[derive(Debug)]
struct Asked {
    range: Range<u64>,
    /// Version of the first sector written; the others count up. `None`: a read.
    writes: Option<u64>,
    zeroes: bool,
    trims: bool,
    fua: bool,
    /// Of a flush: the least version of each sector that it owes.
    owes: Option<BTreeMap<u64, u64>>,
}

struct World {
    random: Random,
    layer: Layer,
    now: Nanos,
    disk: Disk,
    /// Each with its answer, where the disk has done it already.
    below: HashMap<u64, (Op, Option<Answer>)>,
    asked: HashMap<u64, Asked>,
    /// What each sector was last made by an operation that was completed.
    done: BTreeMap<u64, u64>,
    /// All that each sector was ever told to be, in order (trims may leave anything older).
    history: BTreeMap<u64, Vec<u64>>,
    /// Owed after a crash: nothing older than this.
    floor: BTreeMap<u64, u64>,
    next: u64,
    version: u64,
    fails: bool,
    untrusted: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let config = Config {
            cache_bytes: [0, 4 << 10, 16 << 10, 64 << 10, 1 << 20][random.below(5) as usize],
            write_back: random.chance(1, 2),
            coalesce: random.chance(1, 2),
            read_ahead: [0, 8 << 10, 32 << 10][random.below(3) as usize],
            merge_max: [4 << 10, 64 << 10][random.below(2) as usize],
            depth: 1 + random.below(8) as usize,
        };
        let fails = random.chance(1, 5);
        Self {
            random,
            layer: Layer::new(config, SIZE),
            now: 0,
            disk: Disk::default(),
            below: HashMap::new(),
            asked: HashMap::new(),
            done: BTreeMap::new(),
            history: BTreeMap::new(),
            floor: BTreeMap::new(),
            next: 0,
            version: 0,
            fails,
            untrusted: false,
        }
    }

    fn free_range(&mut self) -> Option<Range<u64>> {
        for _ in 0..20 {
            let from = if self.random.chance(1, 3) {
                // Close to where others are at work.
                self.random.below(32)
            } else {
                self.random.below(SECTORS)
            };
            let longest = if self.random.chance(1, 10) { 80 } else { 12 };
            let len = 1 + self.random.below(longest);
            let range = from..(from + len).min(SECTORS);
            let busy =
                |asked: &Asked| asked.range.start < range.end && range.start < asked.range.end;
            if !self.asked.values().any(busy) {
                return Some(range);
            }
        }
        None
    }

    fn ask(&mut self) {
        let Some(range) = self.free_range() else { return };
        self.next += 1;
        let request = self.next;
        let (offset, len) = (range.start * SECTOR, (range.end - range.start) * SECTOR);
        let fua = self.random.chance(1, 8);
        let mut asked = Asked {
            range: range.clone(),
            writes: None,
            zeroes: false,
            trims: false,
            fua,
            owes: None,
        };
        let op = match self.random.below(20) {
            0..=7 => Op::Read { offset, len: len as u32 },
            8..=15 => {
                asked.writes = Some(self.version + 1);
                let mut data = Vec::new();
                for sector in range.clone() {
                    self.version += 1;
                    data.extend(bytes_of(self.version));
                    self.history.entry(sector).or_default().push(self.version);
                }
                Op::Write { offset, data, fua }
            }
            16 => {
                asked.zeroes = true;
                for sector in range {
                    self.history.entry(sector).or_default().push(0);
                }
                Op::Zero { offset, len, how: Zero { fua, no_hole: false, fast: false } }
            }
            17 => {
                asked.trims = true;
                for sector in range {
                    self.history.entry(sector).or_default().push(0);
                }
                Op::Trim { offset, len, fua }
            }
            18 => Op::Status { offset, len },
            _ => {
                asked.range = 0..0;
                let owed = self.done.keys().map(|sector| (*sector, self.places(*sector)));
                asked.owes = Some(owed.collect());
                Op::Flush
            }
        };
        self.asked.insert(request, asked);
        self.tell(|layer, now, out| layer.request(now, request, op, out));
    }

    /// How many changes of a sector there have been that were completed: the place of the last one in its history, plus one.
    fn places(&self, sector: u64) -> u64 {
        self.done.get(&sector).copied().unwrap_or(0)
    }

    fn tell(&mut self, what: impl FnOnce(&mut Layer, Nanos, &mut Vec<Effect>)) {
        let mut out = Vec::new();
        what(&mut self.layer, self.now, &mut out);
        for effect in out {
            match effect {
                Effect::Submit(number, op) => {
                    // A disk does what it is asked at any moment before it answers.
                    let early = self.random.chance(1, 2).then(|| self.carry_out(op.clone()));
                    assert!(self.below.insert(number, (op, early)).is_none());
                }
                Effect::Complete(request, outcome) => self.completed(request, outcome),
            }
        }
    }

    fn completed(&mut self, request: u64, outcome: Outcome) {
        let asked = self.asked.remove(&request).expect("each request is completed once");
        if let Err(errno) = outcome {
            assert!(self.fails, "{errno:?} without a failure below");
            // What it did of it nobody knows.
            self.untrusted = true;
            return;
        }
        if let Some(owes) = asked.owes {
            for (sector, place) in owes {
                let floor = self.floor.entry(sector).or_default();
                *floor = (*floor).max(place);
            }
            return;
        }
        let changes = asked.writes.is_some() || asked.zeroes || asked.trims;
        if changes {
            for sector in asked.range {
                let place = self.history.get(&sector).map_or(0, Vec::len) as u64;
                self.done.insert(sector, place);
                if asked.fua {
                    self.floor.insert(sector, place);
                }
            }
            return;
        }
        if let Ok(Answer::Data(data)) = outcome
            && !self.untrusted
        {
            for (sector, bytes) in asked.range.zip(data.chunks(SECTOR as usize)) {
                let expected = self.history.get(&sector).and_then(|h| h.last()).copied();
                let got = version_of(bytes).expect("a sector is whole");
                assert_eq!(got, expected.unwrap_or(0), "sector {sector}");
            }
        }
    }

    /// The device answers one of the requests below, whichever.
    fn answer(&mut self) {
        let mut numbers: Vec<u64> = self.below.keys().copied().collect();
        numbers.sort_unstable();
        if numbers.is_empty() {
            return;
        }
        let number = numbers[self.random.below(numbers.len() as u64) as usize];
        let Some((op, early)) = self.below.remove(&number) else { return };
        let outcome = if self.fails && self.random.chance(1, 30) {
            Err(Errno::IO)
        } else {
            Ok(early.unwrap_or_else(|| self.carry_out(op)))
        };
        self.tell(|layer, now, out| layer.answered(now, number, outcome, out));
    }

    fn carry_out(&mut self, op: Op) -> Answer {
        let sectors = |offset: u64, len: u64| {
            assert_eq!((offset % SECTOR, len % SECTOR), (0, 0));
            assert!(len > 0 && offset + len <= SIZE);
            offset / SECTOR..(offset + len) / SECTOR
        };
        match op {
            Op::Read { offset, len } => {
                let version = |sector| self.disk.now.get(&sector).copied().unwrap_or(0);
                Answer::Data(
                    sectors(offset, len.into()).flat_map(|s| bytes_of(version(s))).collect(),
                )
            }
            Op::Write { offset, data, fua } => {
                let range = sectors(offset, data.len() as u64);
                for (sector, bytes) in range.zip(data.chunks(SECTOR as usize)) {
                    let version = version_of(bytes).expect("a sector is whole");
                    self.disk.set(sector, version);
                    if fua {
                        self.disk.durable.insert(sector, version);
                        self.disk.since.remove(&sector);
                    }
                }
                Answer::Done
            }
            Op::Trim { offset, len, fua } | Op::Zero { offset, len, how: Zero { fua, .. } } => {
                for sector in sectors(offset, len) {
                    self.disk.set(sector, 0);
                    if fua {
                        self.disk.durable.insert(sector, 0);
                        self.disk.since.remove(&sector);
                    }
                }
                Answer::Done
            }
            Op::Flush => {
                self.disk.flush();
                Answer::Done
            }
            Op::Status { len, .. } => {
                let extent = block::device::Extent { len, hole: false, zero: false };
                Answer::Extents(vec![extent])
            }
        }
    }

    fn pass(&mut self) {
        self.now += self.random.below(2_000_000);
        while self.layer.wake_at().is_some_and(|at| at <= self.now) {
            self.tell(|layer, now, out| layer.tick(now, out));
        }
    }

    fn settle(&mut self) {
        for _ in 0..100_000 {
            if self.asked.is_empty() && self.below.is_empty() {
                return;
            }
            self.answer();
            self.pass();
        }
        panic!("{} requests are never completed: {:?}", self.asked.len(), self.asked);
    }

    /// After a power cut, whatever the disk made of it: each sector holds what it was told to be, and nothing older than what
    /// is owed.
    fn check_crash(&mut self) {
        self.disk.crash(&mut self.random);
        for (sector, history) in &self.history {
            let got = self.disk.durable.get(sector).copied().unwrap_or(0);
            let floor = self.floor.get(sector).copied().unwrap_or(0) as usize;
            let allowed = &history[floor.saturating_sub(1)..];
            let before = floor == 0 && got == 0;
            assert!(
                before || allowed.contains(&got),
                "sector {sector} holds {got} after a crash; owed is one of {allowed:?}"
            );
        }
    }
}

fn history(seed: u64) {
    let mut world = World::new(seed);
    let steps = 50 + world.random.below(400);
    for _ in 0..steps {
        match world.random.below(10) {
            0..=4 if world.asked.len() < 16 => world.ask(),
            0..=8 => world.answer(),
            _ => world.pass(),
        }
        let bound = (1 << 20) / 4096;
        assert!(world.layer.cached_pages() <= bound);
    }
    if world.random.chance(1, 2) {
        world.settle();
        let all = Op::Read { offset: 0, len: SIZE as u32 };
        let asked = Asked {
            range: 0..SECTORS,
            writes: None,
            zeroes: false,
            trims: false,
            fua: false,
            owes: None,
        };
        world.next += 1;
        let request = world.next;
        world.asked.insert(request, asked);
        world.tell(|layer, now, out| layer.request(now, request, all, out));
        world.settle();
    }
    if !world.untrusted {
        world.check_crash();
    }
}

/// A flood of writes, wherever, with as many more under way as find no room, and flushes among them, over a device that answers
/// in turn: each flush goes down when the device has what was dirty when it came, and what was under way already; what became
/// dirty since does not hold it up.
fn flood(seed: u64) {
    const PAGE: u64 = 4096;
    let mut random = Random::new(seed);
    let pages = 16 << random.below(6);
    let config = Config {
        cache_bytes: pages * PAGE,
        write_back: true,
        coalesce: random.chance(1, 2),
        read_ahead: 0,
        merge_max: PAGE << random.below(4),
        depth: 1 + random.below(16) as usize,
    };
    let size = 8 * pages;
    let mut layer = Layer::new(config, size * PAGE);
    let (mut next, mut now) = (0, 0);
    let mut below = std::collections::VecDeque::new();
    // Pages that are being written, by request, and the request that is a flush: what was dirty, and what was answered since.
    let mut writing: HashMap<u64, u64> = HashMap::new();
    let mut flush: Option<(u64, usize, usize)> = None;
    let (mut flushes, mut answers) = (0, 0);
    while flushes < 8 {
        let mut out = Vec::new();
        next += 1;
        if flush.is_none() && random.chance(1, 40) {
            flush = Some((next, layer.dirty_pages(), 0));
            layer.request(now, next, Op::Flush, &mut out);
        } else if writing.len() < 16 {
            let page = random.below(size);
            if !writing.values().any(|other| *other == page) {
                writing.insert(next, page);
                let data = vec![1; PAGE as usize];
                let op = Op::Write { offset: page * PAGE, data, fua: false };
                layer.request(now, next, op, &mut out);
            }
        } else if let Some((number, _)) = below.pop_front() {
            answers += 1;
            now += 100_000;
            if let Some((_, dirty, since)) = &mut flush {
                *since += 1;
                // What was under way before, perhaps of a page that was changed again since; what finds a place when all that is owed
                // is under way, before that and before the flush itself.
                let most = *dirty + 3 * config.depth + 1;
                assert!(
                    *since <= most,
                    "a flush of {dirty} pages waits for {since} answers, {config:?}"
                );
            }
            layer.answered(now, number, Ok(Answer::Done), &mut out);
        }
        if layer.wake_at().is_some_and(|at| at <= now) {
            layer.tick(now, &mut out);
        }
        for effect in out {
            match effect {
                Effect::Submit(number, op) => below.push_back((number, op)),
                Effect::Complete(request, outcome) => {
                    outcome.unwrap();
                    if writing.remove(&request).is_none() {
                        assert_eq!(flush.take().map(|flush| flush.0), Some(request));
                        flushes += 1;
                    }
                }
            }
        }
        assert!(answers < 1_000_000, "the flood never ends");
    }
}

/// However large the cache is, and however slow the device, and whatever is written beside it: a flush takes little more than the second after which
/// what is dirty is written anyhow.
fn slow_device(seed: u64) {
    const PAGE: u64 = 4096;
    let mut random = Random::new(seed);
    let config = Config {
        cache_bytes: 4096 * PAGE,
        write_back: true,
        coalesce: random.chance(1, 2),
        read_ahead: 0,
        merge_max: 1 << 20,
        depth: 1 + random.below(16) as usize,
    };
    // Of one request, of so many at the same time.
    let takes = 500_000 + random.below(3_000_000);
    let servers = (1 + random.below(4) as usize).min(config.depth);
    let size = 65_536;
    let mut layer = Layer::new(config, size * PAGE);
    let (mut next, mut now) = (0, 0);
    let mut queue = std::collections::VecDeque::new();
    let mut served: Vec<(Nanos, u64)> = Vec::new();
    let mut writing = std::collections::HashSet::new();
    let mut flush: Option<(u64, Nanos)> = None;
    let mut longest = 0;
    // What comes at one go before anything was written back fills the cache: nobody knows how slow the device is.
    let from = 4096 * takes / servers as u64 + 1_000_000_000;
    while now < from + 7_000_000_000 {
        let mut out = Vec::new();
        if now > from && flush.is_none() {
            next += 1;
            flush = Some((next, now));
            layer.request(now, next, Op::Flush, &mut out);
        } else if writing.len() < 16 {
            next += 1;
            writing.insert(next);
            let (offset, data) = (random.below(size) * PAGE, vec![1; PAGE as usize]);
            layer.request(now, next, Op::Write { offset, data, fua: false }, &mut out);
        } else {
            while served.len() < servers
                && let Some(number) = queue.pop_front()
            {
                served.push((now + takes, number));
            }
            let first = (0..served.len()).min_by_key(|i| served[*i].0);
            let at = first.map_or(Nanos::MAX, |i| served[i].0);
            let wake = layer.wake_at().unwrap_or(Nanos::MAX);
            assert!(at.min(wake) < Nanos::MAX, "nothing happens any more");
            now = now.max(at.min(wake));
            if wake <= now {
                layer.tick(now, &mut out);
            } else if let Some(i) = first {
                let (_, number) = served.swap_remove(i);
                layer.answered(now, number, Ok(Answer::Done), &mut out);
            }
        }
        for effect in out {
            match effect {
                Effect::Submit(number, _) => queue.push_back(number),
                Effect::Complete(request, outcome) => {
                    outcome.unwrap();
                    if !writing.remove(&request) {
                        let (number, begun) = flush.take().unwrap();
                        assert_eq!(number, request);
                        longest = longest.max(now - begun);
                    }
                }
            }
        }
    }
    let floor = 16 * config.depth as u64 * takes / servers as u64;
    let most = floor.max(1_000_000_000) * 3 / 2 + 32 * takes;
    assert!(longest <= most, "a flush takes {longest} ns, {config:?}, {servers} at {takes} ns");
}

#[test]
fn a_flush_of_a_slow_device_is_bounded() {
    for seed in 1..=8 {
        told(seed, slow_device).unwrap();
    }
}

#[test]
fn a_flush_waits_for_what_was_dirty_when_it_came() {
    for seed in seeds() {
        told(seed, flood).unwrap();
    }
}

/// However much is to be read ahead, the device is asked for it in pieces of a length that it is asked for anyway, without a gap.
#[test]
fn much_is_read_ahead_in_pieces() {
    const READ: u64 = 32 << 20;
    let usual = Config { coalesce: false, ..Config::default() };
    let config = Config { cache_bytes: 1 << 40, read_ahead: 5 << 30, ..usual };
    let mut layer = Layer::new(config, 1 << 40);
    let (mut asked, mut ahead): (Vec<Range<u64>>, u64) = (Vec::new(), 0);
    // Nothing is answered, so that nothing has to be kept.
    for i in 0..300 {
        let mut out = Vec::new();
        layer.request(i, i, Op::Read { offset: i * READ, len: READ as u32 }, &mut out);
        for effect in out {
            let Effect::Submit(_, Op::Read { offset, len }) = effect else { panic!("{effect:?}") };
            let most = if offset < 2 * READ { READ } else { config.merge_max };
            assert!(len > 0 && u64::from(len) <= most, "{len} bytes at {offset}");
            asked.push(offset..offset + u64::from(len));
            ahead = ahead.max(offset.saturating_sub(i * READ));
        }
    }
    assert!(asked.is_sorted_by(|a, b| a.end == b.start), "a gap, or something twice");
    assert!(ahead > 4 << 30, "{ahead} bytes are read ahead");
}

/// Pages of which every second sector or so is dirty make more requests than there are pages: no more of them are in flight than there may be.
#[test]
fn no_more_is_written_back_at_a_time_than_its_depth() {
    for (coalesce, depth, sectors) in
        [(true, 3, [0, 7].as_slice()), (false, 3, &[0, 2, 4, 6]), (true, 1, &[0, 2, 7])]
    {
        let config = Config { write_back: true, coalesce, depth, ..Config::default() };
        let mut layer = Layer::new(config, 1 << 30);
        let (mut below, mut out) = (std::collections::VecDeque::new(), Vec::new());
        let mut next = 0;
        let mut written = 0;
        let mut flushed = false;
        let pages = 300;
        for step in 0..=pages {
            for sector in if step == pages { &[][..] } else { sectors } {
                next += 1;
                let (offset, data) = (step * 4096 + sector * SECTOR, vec![1; SECTOR as usize]);
                layer.request(0, next, Op::Write { offset, data, fua: false }, &mut out);
            }
            if step == pages {
                layer.request(0, 1 << 60, Op::Flush, &mut out);
            }
            loop {
                for effect in out.drain(..) {
                    match effect {
                        Effect::Submit(number, op) => below.push_back((number, op)),
                        Effect::Complete(request, outcome) => {
                            outcome.unwrap();
                            flushed |= request == 1 << 60;
                        }
                    }
                }
                assert!(below.len() <= depth, "{} write-backs in flight", below.len());
                // Nothing is answered before all is there.
                if step < pages {
                    break;
                }
                let Some((number, op)) = below.pop_front() else { break };
                if let Op::Write { data, .. } = &op {
                    written += data.len() as u64 / SECTOR;
                }
                layer.answered(0, number, Ok(Answer::Done), &mut out);
            }
        }
        assert!(flushed && layer.is_settled());
        assert_eq!(written, pages * sectors.len() as u64);
    }
}

/// Runs a history; the seed is told if it fails.
fn try_history(seed: u64) -> Result<(), String> {
    told(seed, history)
}

fn told(seed: u64, history: fn(u64)) -> Result<(), String> {
    std::panic::catch_unwind(|| history(seed)).map_err(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        format!("seed {seed}: {}", said.unwrap_or_default())
    })
}

fn seeds() -> Range<u64> {
    let read = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let from: u64 = read("CORBEL_SEED").unwrap_or(1);
    from..from + read("CORBEL_SEEDS").unwrap_or(600)
}

/// Found: a read began before a write-back of the same page ended, and the page was gone when it came: what it brought was
/// kept.
#[test]
fn found_before() {
    history(42);
}

#[test]
fn histories_are_a_disk_s() {
    for seed in seeds() {
        try_history(seed).unwrap();
    }
}

/// Each broken variant is found by the same histories.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn broken_variants_are_found() {
    use base::planted::{Bug, choose};
    for bug in [
        Bug::StaleReadJoined,
        Bug::StaleReadKept,
        Bug::PageWrittenTwice,
        Bug::FlushForgetsDirty,
        Bug::FlushOvertakes,
        Bug::TrimLeavesDirty,
        Bug::SupersededForgotten,
        Bug::WrittenBackUnnoticed,
    ] {
        choose(bug);
        let found = (1..20_000).find(|seed| try_history(*seed).is_err());
        choose(Bug::None);
        let seed = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        eprintln!("{bug:?}: seed {seed}");
    }
    choose(Bug::FlushStarves);
    let found = (1..1000).find(|seed| told(*seed, flood).is_err());
    choose(Bug::None);
    assert!(found.is_some(), "{:?} is not found", Bug::FlushStarves);
    choose(Bug::DirtyUnbounded);
    let found = (1..9).find(|seed| told(*seed, slow_device).is_err());
    choose(Bug::None);
    assert!(found.is_some(), "{:?} is not found", Bug::DirtyUnbounded);
}
