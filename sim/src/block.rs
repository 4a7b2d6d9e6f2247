//! The block layer and pools on simulated stores: the production code of the crate `block` ([`Layer`], [`Image`],
//! [`repair`]) on time, chance and stores of this module. One seed gives one history. `corbel-sim block` runs them.
//!
//! Stores answer after different times, and so in any order; they fail, hang and go on, lie, say that they have kept what they have
//! not, or that they have not what they have, and lose all; never more of them at the same time, and until they are repaired,
//! than the pool promises to do without. The process that writes is killed at any answer: what it had asked of stores is
//! carried out or not. Beside it stands a model of what each sector may hold.
//!
//! [`Layer`]: ::block::layer::Layer
//! [`Image`]: ::block::pool::Image
//! [`repair`]: ::block::pool::repair

pub mod command;
mod front;
mod model;
mod stores;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ::block::device::{Answer, Op, SECTOR, Zero};
use ::block::layer::Config;
use ::block::pool::ground::Access;
use ::block::pool::repair::{self, Orders, Report};
use ::block::pool::{Coding, Image, Pool, Spec, StoreSpec};
use base::random::Random;

use front::Front;
use model::{Model, Range};
use stores::{Mode, Stage};

/// How a history ended.
#[derive(Clone, Default, Debug)]
pub struct Outcome {
    /// What was wrong.
    pub violation: Option<String>,
    /// Of everything that happened.
    pub hash: u64,
    /// What was done, and how often.
    pub counts: BTreeMap<&'static str, u64>,
}

const CODINGS: [&str; 5] = ["replicated:3", "replicated:2", "rs:4,2", "rs:2,2", "rs:6,3"];
const NAME: &str = "vm";

struct History<'a> {
    random: Random,
    stage: Arc<Stage>,
    spec: Spec,
    front: Option<Front>,
    layer: Option<Config>,
    /// Bytes of an object.
    object: u64,
    model: Model,
    /// Where the last read ended.
    next: u64,
    /// Stores that have misbehaved since everything was repaired.
    tainted: BTreeSet<usize>,
    tolerated: usize,
    outcome: Outcome,
    sink: Option<&'a mut dyn FnMut(&str)>,
}

type Step = Result<(), String>;

/// Runs one history; `sink` gets a line for each thing that happens.
pub fn run(seed: u64, sink: Option<&mut dyn FnMut(&str)>) -> Outcome {
    let mut random = Random::new(seed ^ 0xb10c);
    let coding: Coding = match CODINGS[random.below(CODINGS.len() as u64) as usize].parse() {
        Ok(coding) => coding,
        Err(error) => return Outcome { violation: Some(error), ..Outcome::default() },
    };
    let count = coding.width() + random.below(3) as usize;
    let stores = (0..count).map(|i| StoreSpec {
        domain: format!("d{i}"),
        at: format!("dir:/{i}"),
        out: false,
    });
    let spec = match Spec::new(coding, stores.collect()) {
        Ok(spec) => Spec { id: seed, ..spec },
        Err(error) => return Outcome { violation: Some(error), ..Outcome::default() },
    };
    let layer = random.chance(1, 2).then(|| Config {
        cache_bytes: 4096 << random.below(7),
        write_back: random.chance(2, 3),
        coalesce: random.chance(3, 4),
        read_ahead: if random.chance(1, 2) { 64 << 10 } else { 0 },
        merge_max: 4096 << random.below(5),
        depth: 1 + random.below(8) as usize,
    });
    let object = 4096 << random.below(5);
    let size = object * (2 + random.below(10));
    let mut history = History {
        stage: Stage::new(count, random.next_u64()),
        model: Model::new(size / SECTOR),
        tolerated: coding.parity_tolerated(),
        random,
        spec,
        front: None,
        layer,
        object,
        next: 0,
        tainted: BTreeSet::new(),
        outcome: Outcome::default(),
        sink,
    };
    let ended = history.live(size, object as u32);
    history.outcome.violation = ended.err();
    history.outcome.hash = history.stage.hash();
    history.outcome
}

/// How many stores a pool does without, whatever they do.
trait Tolerates {
    fn parity_tolerated(self) -> usize;
}

impl Tolerates for Coding {
    fn parity_tolerated(self) -> usize {
        self.copies() - 1
    }
}

impl History<'_> {
    fn say(&mut self, text: impl FnOnce() -> String) {
        if let Some(sink) = &mut self.sink {
            let line = format!("{:>12} {}", self.stage.now(), text());
            sink(&line);
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.outcome.counts.entry(what).or_default() += 1;
    }

    fn pool(&self) -> Result<Arc<Pool>, String> {
        let stores: Vec<Box<dyn Access>> = self.stage.accesses();
        Pool::on(self.stage.ground(), self.spec.clone(), stores).map(Arc::new)
    }

    fn live(&mut self, size: u64, object: u32) -> Step {
        let (coding, layer) = (self.spec.coding, self.layer);
        self.say(|| format!("{coding}, {size} bytes in objects of {object}, {layer:?}"));
        self.pool()?.create(NAME, size, object)?;
        self.open()?;
        for _ in 0..60 + self.random.below(120) {
            match self.random.below(100) {
                0..50 => self.change()?,
                50..68 => self.look()?,
                68..74 => self.flush()?,
                74..86 => self.misbehave(),
                86..90 => self.mend()?,
                90..94 => self.crash()?,
                94..96 => self.settle()?,
                _ => self.stage.pass(1_000_000 << self.random.below(9)),
            }
        }
        self.settle()
    }

    /// Opens the image, as whoever comes after a crash does.
    fn open(&mut self) -> Step {
        let opened = Image::open(self.pool()?, NAME, false);
        let image = match opened {
            Ok(image) => image,
            // Too many are silent: later, when they are there again.
            Err(why) => {
                self.say(|| format!("not opened: {why}"));
                if self.tainted.is_empty() {
                    return Err(format!(
                        "all stores are well, and the image cannot be opened: {why}"
                    ));
                }
                self.heal();
                Image::open(self.pool()?, NAME, false)?
            }
        };
        self.front = Some(Front::new(image, self.layer, &self.stage));
        Ok(())
    }

    fn range(&mut self) -> Range {
        let sectors = self.model.sectors();
        let from = self.random.below(sectors);
        let most = if self.random.chance(1, 5) { sectors } else { 24 };
        Range { from, count: (1 + self.random.below(most)).min(sectors - from) }
    }

    /// Gives the front a few requests at once.
    fn perform(&mut self, ops: Vec<Op>) -> Vec<Option<::block::device::Outcome>> {
        match &mut self.front {
            Some(front) => front.perform(ops, &mut self.random),
            None => ops.iter().map(|_| None).collect(),
        }
    }

    /// Writes and zeroes that do not overlap.
    fn change(&mut self) -> Step {
        let (mut ranges, mut ops) = (Vec::<(Range, u64)>::new(), Vec::new());
        for _ in 0..=self.random.below(4) {
            let range = self.range();
            if ranges.iter().any(|(other, _)| other.overlaps(range)) {
                continue;
            }
            let (offset, len) = (range.from * SECTOR, range.count * SECTOR);
            let stamp = if self.random.chance(1, 6) {
                let how = Zero { fua: false, no_hole: false, fast: false };
                ops.push(Op::Zero { offset, len, how });
                0
            } else {
                let stamp = self.random.next_u64() | 1;
                let data = model::bytes(stamp, range);
                ops.push(Op::Write { offset, data, fua: self.random.chance(1, 10) });
                stamp
            };
            ranges.push((range, stamp));
        }
        // Zeroes and what is durable before it is answered are so without a flush, or are owed one: the model asks for less.
        let durable = self.layer.is_none_or(|config| !config.write_back);
        for ((range, stamp), outcome) in ranges.iter().zip(self.perform(ops)) {
            let done = matches!(outcome, Some(Ok(_))) && !self.stage.is_dead();
            let told = outcome.map(|outcome| outcome.map(|_| ()));
            self.say(|| format!("write {range:?} {stamp:x}: {told:?}"));
            self.model.wrote(*range, *stamp, done, durable);
            self.count(if done { "writes" } else { "writes that failed" });
        }
        self.died()
    }

    fn flush(&mut self) -> Step {
        let done = matches!(self.perform(vec![Op::Flush])[..], [Some(Ok(_))]);
        let done = done && !self.stage.is_dead();
        self.say(|| format!("flush: {done}"));
        if done {
            self.model.flushed();
            self.count("flushes");
        }
        self.died()
    }

    fn look(&mut self) -> Step {
        let mut range = self.range();
        // In order, often: it is read ahead.
        if self.random.chance(1, 2) {
            let from = self.next % self.model.sectors();
            range = Range { from, count: range.count.min(self.model.sectors() - from).min(8) };
        }
        self.next = range.from + range.count;
        let (offset, len) = (range.from * SECTOR, (range.count * SECTOR) as u32);
        let outcome = self.perform(vec![Op::Read { offset, len }]).pop().flatten();
        let well = self.stage.are_well() && self.tainted.is_empty();
        match outcome {
            Some(Ok(Answer::Data(data))) => {
                self.say(|| format!("read {range:?}"));
                self.count("reads");
                self.model.check(range, &data)?;
            }
            other if well && !self.stage.is_dead() => {
                return Err(format!(
                    "all stores are well, and a read of {range:?} fails: {other:?}"
                ));
            }
            other => self.say(|| format!("read {range:?}: {:?}", other.map(|o| o.err()))),
        }
        self.died()
    }

    /// A store begins to do what it should not, or ceases to.
    fn misbehave(&mut self) {
        let store = self.random.below(self.stage.count() as u64) as usize;
        if self.stage.mode(store) != Mode::Well {
            self.say(|| format!("store {store} is well again"));
            return self.stage.be(store, Mode::Well);
        }
        if !self.tainted.contains(&store) && self.tainted.len() >= self.tolerated {
            return;
        }
        self.tainted.insert(store);
        if self.random.chance(1, 6) {
            self.say(|| format!("store {store} has lost all"));
            self.count("losses");
            return self.stage.lose(store);
        }
        let mode = Mode::BAD[self.random.below(Mode::BAD.len() as u64) as usize];
        self.say(|| format!("store {store}: {mode:?}"));
        self.count(mode.name());
        self.stage.be(store, mode);
    }

    fn heal(&mut self) {
        for store in 0..self.stage.count() {
            self.stage.be(store, Mode::Well);
        }
    }

    /// All stores are well again, and what they missed is made good.
    fn mend(&mut self) -> Step {
        self.heal();
        self.stage.drain();
        for round in 0..2 {
            // As fast as it goes, or so slow that the time of it counts.
            let rate = if self.random.chance(1, 3) { 1 << (16 + self.random.below(8)) } else { 0 };
            let orders = Orders { verify: true, repair: true, rate };
            let Some(front) = &self.front else { return Ok(()) };
            let (begun, mut last) = (self.stage.now(), (0, 0));
            let mut fewer = false;
            let report = repair::run(front.image(), orders, |done, of, _| {
                fewer |= done < last.0 || done > of;
                last = (done, of);
                true
            });
            if fewer || last.0 != last.1 {
                return Err(format!("a repair says that it is at {} of {}", last.0, last.1));
            }
            let passed = self.stage.now() - begun;
            let report = report.map_err(|errno| format!("a repair ended with {errno}"))?;
            self.say(|| format!("{report:?}"));
            let due = (report.bytes.saturating_sub(self.most())) * 1_000_000_000;
            if rate > 0 && passed < due / rate {
                return Err(format!(
                    "a repair of {rate} bytes a second is over in {passed} ns: {report:?}"
                ));
            }
            let Report { lost, missing, damaged, misplaced, .. } = report;
            if lost > 0 {
                return Err(format!(
                    "no more stores misbehaved than may, and objects are lost: {report:?}"
                ));
            }
            if round == 1 && missing + damaged + misplaced > 0 {
                return Err(format!("a repair left something: {report:?}"));
            }
            self.stage.drain();
        }
        self.tainted.clear();
        self.count("repairs");
        Ok(())
    }

    /// Bytes that a repair may have under way beyond its rate.
    fn most(&self) -> u64 {
        let coding = self.spec.coding;
        8 * self.object * coding.width() as u64
    }

    /// The process is killed, while it writes.
    fn crash(&mut self) -> Step {
        self.stage.kill_after(self.random.below(60));
        self.say(|| "about to be killed".into());
        for _ in 0..4 {
            self.change()?;
        }
        // Or while it does nothing.
        if self.stage.spare() {
            self.say(|| "killed between".into());
            self.restart()?;
        }
        Ok(())
    }

    /// If it was killed: somebody opens the image anew.
    fn died(&mut self) -> Step {
        if self.stage.is_dead() { self.restart() } else { Ok(()) }
    }

    fn restart(&mut self) -> Step {
        self.count("crashes");
        self.stage.bury();
        self.front = None;
        self.model.crashed();
        self.say(|| "opened anew".into());
        self.open()
    }

    /// Everything is well, and nothing under way: what is there is among what may be there, and stays.
    fn settle(&mut self) -> Step {
        self.heal();
        self.stage.drain();
        for round in 0..2 {
            self.front = None;
            self.stage.bury();
            if round == 0 {
                self.model.crashed();
            }
            self.open()?;
            let all = Range { from: 0, count: self.model.sectors() };
            let len = (all.count * SECTOR) as u32;
            let outcome = self.perform(vec![Op::Read { offset: 0, len }]).pop().flatten();
            let Some(Ok(Answer::Data(data))) = outcome else {
                let tainted = &self.tainted;
                return Err(format!(
                    "all stores are well again ({tainted:?} were not), and reading fails: {outcome:?}"
                ));
            };
            self.model.check(all, &data)?;
            self.model.is(&data);
        }
        self.say(|| "settled".into());
        self.count("settled");
        Ok(())
    }
}
