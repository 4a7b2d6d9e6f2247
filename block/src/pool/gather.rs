//! Reads parts of shards and patches: from whoever has them; where one is lost, wrong, or late, from one more of the
//! others than it takes, and the first that answer decide.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use base::{Errno, Nanos};
use placement::dispatch::{Buffers, Work};

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
const AT_A_TIME: usize = 32;

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

/// Parts of shards on their way, and those that have come.
pub(super) struct Gather<'a> {
    image: &'a Image,
    object: u64,
    sources: &'a [Source],
    to: Sender<Answer>,
    from: Receiver<Answer>,
    asked: Vec<Option<Part>>,
    have: Vec<(Part, Arc<Vec<u8>>)>,
    /// Source and shard.
    lost: HashSet<(usize, usize)>,
    /// Some store said that there is no such shard: it may have been moved, or replaced.
    pub moved: bool,
    /// Some shard was not what it should be.
    pub damaged: bool,
}

impl<'a> Gather<'a> {
    pub fn new(image: &'a Image, object: u64, sources: &'a [Source]) -> Self {
        let (to, from) = channel();
        Self {
            image,
            object,
            sources,
            to,
            from,
            asked: Vec::new(),
            have: Vec::new(),
            lost: HashSet::new(),
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
        let Some(store) = self.store(part) else { return };
        let source = &self.sources[part.source];
        let from = part.from / BLOCK * BLOCK;
        let to = part.to.next_multiple_of(BLOCK).min(self.image.source_bytes(source));
        let part = Part { from, to, ..part };
        let known = self.image.sums(self.object, source, part.shard).is_some();
        let name = self.image.source_name(self.object, source, part.shard);
        let head = self.image.head_bytes(source);
        let ask = Ask::Shard { name, head, known, from, len: to - from };
        store.ask(ask, self.asked.len(), &self.to);
        self.asked.push(Some(part));
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

    /// Takes an answer in.
    pub fn take(&mut self, (number, told): Answer) {
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
        self.asked.iter().flatten().count()
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
            .filter_map(|o| self.store(o).map(|w| (w.is_suspect(), w.load(), o.shard)))
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

    /// The bytes of a part, if what has come suffices.
    fn solve(&self, part: Part) -> Option<Vec<u8>> {
        if let Some(bytes) = self.has(part) {
            return Some(bytes.to_vec());
        }
        let code = match self.sources[part.source].patch {
            Some(_) => None,
            None => self.image.pool.code.as_ref(),
        };
        let Some(code) = code else {
            return self.all(part).find_map(|other| self.has(other).map(<[u8]>::to_vec));
        };
        let same = |shard| Part { shard, ..part };
        let coding = self.image.info.coding;
        let there: Vec<usize> =
            self.all(part).filter(|o| self.has(*o).is_some()).map(|o| o.shard).collect();
        if there.len() < coding.data() {
            return None;
        }
        let lost: Vec<usize> = (0..coding.width()).filter(|s| !there.contains(s)).collect();
        let plan = Arc::new(code.plan_for(&lost, &[part.shard]).ok()?);
        let sources = plan.sources().iter().map(|shard| self.piece(same(*shard)));
        let inputs: Vec<Piece> = sources.collect::<Option<_>>()?;
        let stripes = vec![Buffers { inputs, outputs: vec![vec![0; part.to - part.from]] }];
        let (work, result) = self.image.pool.dispatcher.run(Work::Rebuild { plan, stripes });
        if let Err(failure) = result {
            log::error!("pool: image {}: decoding: {failure}", self.image.name);
            return None;
        }
        let Work::Rebuild { mut stripes, .. } = work else { return None };
        stripes.pop()?.outputs.pop()
    }

    /// Gets all parts, some at a time.
    pub fn run(&mut self, parts: &[Part]) -> Result<Vec<Vec<u8>>, Errno> {
        let mut all = Vec::with_capacity(parts.len());
        for parts in parts.chunks(AT_A_TIME) {
            all.extend(self.run_some(parts)?);
            // What is late is late; nobody asks for it any more.
            self.have.clear();
        }
        Ok(all)
    }

    fn run_some(&mut self, parts: &[Part]) -> Result<Vec<Vec<u8>>, Errno> {
        let ground = &*self.image.pool.ground;
        let end = ground.now() + PATIENCE;
        let mut hedge = HEDGE_MIN;
        let mut asked_others = vec![false; parts.len()];
        for part in parts {
            match self.store(*part) {
                Some(store) if !store.is_suspect() => {
                    hedge = hedge.max((4 * store.load()).min(HEDGE_MAX));
                    self.ask(*part);
                }
                _ => {}
            }
        }
        let mut late = ground.now() + hedge;
        let mut done: Vec<Option<Vec<u8>>> = vec![None; parts.len()];
        loop {
            for (i, part) in parts.iter().enumerate() {
                if done[i].is_none() {
                    done[i] = self.solve(*part);
                }
                if done[i].is_some() {
                    continue;
                }
                // Not to be had directly, or not in time: from others. And again when some of those are lost.
                let direct = self.is_asked(*part);
                let overdue = ground.now() >= late;
                if !direct || overdue || asked_others[i] {
                    self.ask_others(*part);
                    asked_others[i] = true;
                }
            }
            if done.iter().all(Option::is_some) {
                return Ok(done.into_iter().flatten().collect());
            }
            let now = ground.now();
            if now >= late {
                // Whom nobody heard in time, others stand in for; then for those again.
                late = now + hedge;
            }
            if self.outstanding() == 0 || now >= end {
                return Err(if now >= end { Errno::TIMEDOUT } else { Errno::IO });
            }
            if let Some(answer) = ground.wait(&self.from, late.min(end)) {
                self.take(answer);
            }
        }
    }

    /// Asks for one part alone, of whom has it, and waits.
    pub fn one(&mut self, part: Part) -> Result<Vec<u8>, Errno> {
        let ground = &*self.image.pool.ground;
        self.ask(part);
        match ground.wait(&self.from, ground.now() + PATIENCE) {
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
