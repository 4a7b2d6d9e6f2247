//! Reads parts of shards and patches: from whoever has them; where one is lost, wrong, or late, from one more of the
//! others than it takes, and the first that answer decide.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use base::planted::{Bug, planted};
use base::{Errno, Nanos};
use placement::dispatch::{Buffers, Work};

use super::flight::{Leg, Line, TASKS};
use super::ground::Access;
use super::image::Image;
use super::opened::PATIENCE;
use super::patch::Patch;
use super::shard::{BLOCK, Version};
use super::survey::Held;
use super::worker::{Answer, Ask, Piece, Told};

/// Others are asked after four times the usual time, but no sooner and no later than after these.
pub(super) const HEDGE_MIN: Nanos = 1_000_000;
pub(super) const HEDGE_MAX: Nanos = 50_000_000;
/// Parts that are asked for at the same time: a store refuses what its queue does not hold.
pub(super) const PARTS: usize = 32;

/// Something that lies in several stores: shards of an object, or copies of a patch.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub version: Version,
    /// The patch; `None`: the object as a whole.
    pub patch: Option<Patch>,
    /// Store of each shard, or copy.
    pub at: Vec<Option<usize>>,
}

impl Source {
    /// A version of an object.
    pub fn whole(version: Version, at: &[Option<usize>]) -> Self {
        Self { version, patch: None, at: at.to_vec() }
    }

    /// A patch.
    pub fn patch(held: &Held) -> Self {
        let Held { patch, at, .. } = held;
        let at = at.iter().copied().map(Some).collect();
        Self { version: patch.version, patch: Some(*patch), at }
    }

    fn width(&self) -> usize {
        self.at.len()
    }
}

/// A part of the bytes of one shard, or copy, of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Part {
    pub source: usize,
    pub shard: usize,
    pub from: usize,
    pub to: usize,
}

/// A part that is wanted.
#[derive(Debug)]
struct Wanted {
    part: Part,
    bytes: Option<Vec<u8>>,
    /// Others were asked for it.
    others: bool,
    /// It is being computed.
    computed: bool,
}

/// Parts of shards on their way, and those that have come.
pub(super) struct Gather<'a> {
    image: &'a Image,
    object: u64,
    sources: Vec<Source>,
    line: Line,
    asked: Vec<Option<Part>>,
    have: Vec<(Part, Arc<Vec<u8>>)>,
    /// Source and shard.
    lost: HashSet<(usize, usize)>,
    wanted: Vec<Wanted>,
    /// What each task computes, by place among those that are wanted.
    tasks: Vec<Option<Vec<usize>>>,
    /// Nobody does anything else while this waits.
    pub alone: bool,
    /// Others are asked when nothing was heard until then,
    late: Nanos,
    /// and again after as long.
    hedge: Nanos,
    end: Nanos,
    failed: Option<Errno>,
    /// Bytes asked for.
    pub bytes: u64,
    /// Some store said that there is no such shard: it may have been moved, or replaced.
    pub moved: bool,
    /// Some shard was not what it should be.
    pub damaged: bool,
}

impl<'a> Gather<'a> {
    pub fn new(image: &'a Image, object: u64, sources: Vec<Source>, line: Line) -> Self {
        Self {
            image,
            object,
            sources,
            line,
            asked: Vec::new(),
            have: Vec::new(),
            lost: HashSet::new(),
            wanted: Vec::new(),
            tasks: Vec::new(),
            alone: false,
            late: 0,
            hedge: HEDGE_MIN,
            end: 0,
            failed: None,
            bytes: 0,
            moved: false,
            damaged: false,
        }
    }

    fn store(&self, part: Part) -> Option<&'a dyn Access> {
        self.sources[part.source].at[part.shard].map(|store| &*self.image.pool.stores[store])
    }

    /// Shards of data of a source: how many it takes.
    fn data(&self, part: Part) -> usize {
        match self.sources[part.source].patch {
            Some(_) => 1,
            None => self.image.info.coding.data(),
        }
    }

    /// The same part of every shard, or copy.
    fn all(&self, part: Part) -> impl Iterator<Item = Part> + use<> {
        (0..self.sources[part.source].width()).map(move |shard| Part { shard, ..part })
    }

    /// Asks for whole blocks around a part.
    fn ask(&mut self, part: Part) {
        let source = &self.sources[part.source];
        let Some(store) = source.at[part.shard] else { return };
        let from = part.from / BLOCK * BLOCK;
        let to = part.to.next_multiple_of(BLOCK).min(self.image.source_bytes(source));
        let part = Part { from, to, ..part };
        let known = self.image.sums(self.object, source, part.shard).is_some();
        let name = self.image.source_name(self.object, source, part.shard);
        let head = self.image.head_bytes(source);
        let ask = Ask::Shard { name, head, known, from, len: to - from };
        self.line.ask(self.image, store, ask, self.asked.len());
        self.asked.push(Some(part));
        self.bytes += (to - from) as u64;
    }

    fn is_asked(&self, part: Part) -> bool {
        let covers = |asked: &Part| {
            (asked.source, asked.shard) == (part.source, part.shard)
                && asked.from <= part.from
                && part.to <= asked.to
        };
        self.asked.iter().flatten().any(covers)
    }

    fn find(&self, part: Part) -> Option<(&Arc<Vec<u8>>, Range<usize>)> {
        let of = (part.source, part.shard);
        let covers = |(have, _): &&(Part, Arc<Vec<u8>>)| {
            (have.source, have.shard) == of && have.from <= part.from && part.to <= have.to
        };
        let (have, bytes) = self.have.iter().find(covers)?;
        Some((bytes, part.from - have.from..part.to - have.from))
    }

    fn has(&self, part: Part) -> Option<&[u8]> {
        self.find(part).map(|(bytes, range)| &bytes[range])
    }

    fn piece(&self, part: Part) -> Option<Piece> {
        self.find(part).map(|(bytes, range)| Piece::new(bytes, range))
    }

    /// Takes in what a store has answered.
    fn have_read(&mut self, (number, told): Answer) {
        let Some(part) = self.asked.get_mut(number).and_then(Option::take) else { return };
        let source = &self.sources[part.source];
        match told {
            Ok(Told::Shard(head, bytes))
                if self.image.verify(self.object, source, part, &head, &bytes) =>
            {
                return self.have.push((part, Arc::new(bytes)));
            }
            Ok(_) => self.damaged = true,
            Err(Errno::NOENT) => self.moved = true,
            Err(_) => {}
        }
        self.lost.insert((part.source, part.shard));
    }

    fn outstanding(&self) -> usize {
        self.asked.iter().flatten().count() + self.tasks.iter().flatten().count()
    }

    /// Asks for more, so that `part` can be had from others: from one more of them than it takes, those first that answer
    /// fast. Whether anything was asked for.
    #[allow(clippy::explicit_counter_loop)] // it counts what is asked for, not turns
    fn ask_others(&mut self, part: Part) -> bool {
        let others = || self.all(part).filter(|other| other.shard != part.shard);
        let mut count = others().filter(|o| self.has(*o).is_some() || self.is_asked(*o)).count();
        let mut rest: Vec<(bool, Nanos, usize)> = others()
            .filter(|o| !self.lost.contains(&(o.source, o.shard)))
            .filter(|o| self.has(*o).is_none() && !self.is_asked(*o))
            .filter_map(|o| {
                self.store(o).map(|w| (w.is_suspect() || w.is_late(), w.load(), o.shard))
            })
            .collect();
        rest.sort_unstable();
        let data = self.data(part);
        let mut any = false;
        for (suspect, _, shard) in rest {
            // A suspect is asked only if it takes one.
            let enough = if suspect { data } else { data + 1 };
            if count >= enough {
                break;
            }
            self.ask(Part { shard, ..part });
            any = true;
            count += 1;
        }
        any
    }

    /// The bytes of a part, if they have come as they are.
    fn find_bytes(&self, part: Part) -> Option<Vec<u8>> {
        if let Some(bytes) = self.has(part) {
            return Some(bytes.to_vec());
        }
        let coded = self.sources[part.source].patch.is_none() && self.image.pool.code.is_some();
        if coded {
            return None;
        }
        self.all(part).find_map(|other| self.has(other).map(<[u8]>::to_vec))
    }

    /// What has come is taken; and what suffices to compute others is given to whoever computes: those of one stripe in one task.
    fn solve(&mut self) {
        let mut tasks: Vec<Vec<usize>> = Vec::new();
        for i in 0..self.wanted.len() {
            if self.wanted[i].bytes.is_some() || self.wanted[i].computed {
                continue;
            }
            let part = self.wanted[i].part;
            self.wanted[i].bytes = self.find_bytes(part);
            if self.wanted[i].bytes.is_some() || self.sources[part.source].patch.is_some() {
                continue;
            }
            let there = || self.all(part).filter(|other| self.has(*other).is_some());
            if self.image.pool.code.is_none() || there().count() < self.data(part) {
                continue;
            }
            let same = |task: &&mut Vec<usize>| {
                let other = self.wanted[task[0]].part;
                Part { shard: part.shard, ..other } == part
            };
            match tasks.iter_mut().find(same) {
                Some(task) => task.push(i),
                None => tasks.push(vec![i]),
            }
        }
        let missing = self.wanted.iter().filter(|wanted| wanted.bytes.is_none()).count();
        for task in tasks {
            let alone = self.alone && task.len() == missing;
            if self.begin_task(&task, alone).is_none() {
                self.failed = Some(Errno::IO);
            }
        }
    }

    /// Has parts of one stripe computed.
    fn begin_task(&mut self, task: &[usize], alone: bool) -> Option<()> {
        let code = self.image.pool.code.as_ref()?;
        let part = self.wanted[*task.first()?].part;
        let same = |shard| Part { shard, ..part };
        let has = |shard: &usize| self.has(same(*shard)).is_some();
        let lost: Vec<usize> = (0..self.image.info.coding.width()).filter(|s| !has(s)).collect();
        let shards: Vec<usize> = task.iter().map(|i| self.wanted[*i].part.shard).collect();
        let plan = Arc::new(code.plan_for(&lost, &shards).ok()?);
        let sources = plan.sources().iter().map(|shard| self.piece(same(*shard)));
        let inputs = sources.collect::<Option<_>>()?;
        let outputs = vec![vec![0; part.to - part.from]; plan.targets().len()];
        let work = Work::Rebuild { plan, stripes: vec![Buffers { inputs, outputs }] };
        for i in task {
            self.wanted[*i].computed = true;
        }
        // What stores had to do is done.
        self.end = self.end.max(self.image.pool.ground.now() + PATIENCE);
        let number = TASKS + self.tasks.len();
        // What it makes is in this order.
        self.tasks.push(Some(task.to_vec()));
        self.line.compute(self.image, work, number, alone);
        Some(())
    }

    /// Takes in what a task has made.
    fn have_computed(&mut self, number: usize, told: Result<Told, Errno>) {
        let Some(task) = self.tasks.get_mut(number - TASKS).and_then(Option::take) else { return };
        match told {
            Ok(Told::Chunks(chunks)) if chunks.len() == task.len() => {
                for (i, chunk) in task.into_iter().zip(chunks) {
                    self.wanted[i].bytes.get_or_insert(chunk);
                }
            }
            _ => self.failed = Some(Errno::IO),
        }
    }

    /// Gets all parts, some at a time, and waits for them.
    pub fn run(&mut self, from: &Receiver<Answer>, parts: &[Part]) -> Result<Vec<Vec<u8>>, Errno> {
        self.alone = true;
        let mut all = Vec::with_capacity(parts.len());
        for parts in parts.chunks(PARTS) {
            self.start(parts);
            while !self.advance() {
                if let Some(answer) = self.image.pool.ground.wait(from, self.until()) {
                    self.take(answer);
                }
            }
            all.extend(self.finish()?);
            // What is late is late; nobody asks for it any more.
            self.have.clear();
        }
        Ok(all)
    }

    /// Asks for parts.
    pub fn start(&mut self, parts: &[Part]) {
        let now = self.image.pool.ground.now();
        let wanted =
            |part: &Part| Wanted { part: *part, bytes: None, others: false, computed: false };
        self.wanted = parts.iter().map(wanted).collect();
        // Nobody waits for the tasks of those before.
        self.tasks.iter_mut().for_each(|task| *task = None);
        self.hedge = HEDGE_MIN;
        for part in parts {
            match self.store(*part) {
                // Somebody waits for it already, and longer than that takes: whoever comes now asks others at once, if those answer.
                Some(store)
                    if !planted(Bug::LateAwaited)
                        && store.is_late()
                        && self.can_do_without(*part) => {}
                Some(store) if !store.is_suspect() => {
                    self.hedge = self.hedge.max((4 * store.load()).min(HEDGE_MAX));
                    self.ask(*part);
                }
                _ => {}
            }
        }
        self.late = self.image.pool.ground.now() + self.hedge;
        self.end = now + PATIENCE;
    }

    /// Whether enough others have a part who are not late.
    fn can_do_without(&self, part: Part) -> bool {
        let others = self.all(part).filter(|other| other.shard != part.shard);
        let answers = |other: &Part| {
            self.store(*other).is_some_and(|store| !store.is_suspect() && !store.is_late())
        };
        others.filter(answers).take(self.data(part)).count() == self.data(part)
    }

    /// What was started, when it is over.
    pub fn finish(&mut self) -> Result<Vec<Vec<u8>>, Errno> {
        match self.failed {
            Some(errno) => Err(errno),
            None => self.wanted.iter_mut().map(|w| w.bytes.take().ok_or(Errno::IO)).collect(),
        }
    }

    /// Asks for one part alone, of whom has it, and waits.
    pub fn one(&mut self, from: &Receiver<Answer>, part: Part) -> Result<Vec<u8>, Errno> {
        let ground = &*self.image.pool.ground;
        self.ask(part);
        match ground.wait(from, ground.now() + PATIENCE) {
            Some(answer) => self.take(answer),
            None => return Err(Errno::TIMEDOUT),
        }
        match self.has(part) {
            Some(bytes) => Ok(bytes.to_vec()),
            None if self.damaged => Err(Errno::IO),
            None => Err(Errno::NOENT),
        }
    }
}

impl Leg for Gather<'_> {
    fn take(&mut self, (number, told): Answer) {
        if number >= TASKS {
            self.have_computed(number, told);
        } else {
            self.have_read((number, told));
        }
    }

    fn advance(&mut self) -> bool {
        self.solve();
        let now = self.image.pool.ground.now();
        for i in 0..self.wanted.len() {
            let Wanted { part, ref bytes, others, computed } = self.wanted[i];
            if bytes.is_some() || computed {
                continue;
            }
            // Not to be had directly, or not in time: from others. And again when some of those are lost.
            if !self.is_asked(part) || now >= self.late || others {
                self.ask_others(part);
                self.wanted[i].others = true;
            }
        }
        if self.failed.is_some() || self.wanted.iter().all(|wanted| wanted.bytes.is_some()) {
            return true;
        }
        if now >= self.late {
            // Whom nobody heard in time, others stand in for; then for those again.
            self.late = now + self.hedge;
        }
        if self.outstanding() == 0 || now >= self.end {
            self.failed = Some(if now >= self.end { Errno::TIMEDOUT } else { Errno::IO });
        }
        self.failed.is_some()
    }

    fn until(&self) -> Nanos {
        self.late.min(self.end)
    }
}
