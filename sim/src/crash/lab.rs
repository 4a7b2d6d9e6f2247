//! Takes one workload, records it, and judges every crash state of it.

use std::collections::HashMap;
use std::sync::Arc;

use base::NodeId;
use service::core::ring::{RING_BYTES_MIN, Ring};
use storage::check::{Data, check_with_data};
use storage::format::superblock::{Durability, newest_root};

use super::drive::{self, HEAD, MADE, MEMBER, Machine, Session};
use super::oracle::{Model, Oracle, print_of};
use super::states::{DISK, Grain, MEMORY, Pending, Pick, Point, walk};
use super::trace::{Acks, Event, Region, Side, Trace};
use super::workload::{Act, Ground, Pace, Workload};

/// How thoroughly.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Random states at each point, beside the enumerated ones.
    pub random: usize,
    /// Of one in so many recovered states, the recovery is crashed as well.
    pub nested: u64,
    /// Such points of a recovery, at most.
    pub nested_points: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Self { random: 6, nested: 12, nested_points: 4 }
    }
}

impl Effort {
    /// The same with every recovery crashed at every point: some things take two crashes to show.
    #[must_use]
    pub fn twice(self) -> Self {
        Self { nested: 1, nested_points: usize::MAX, ..self }
    }
}

/// The moment and the choice that make one crash state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spot {
    /// Fences before it.
    pub fence: usize,
    /// What reached the media.
    pub pick: Pick,
}

/// What was found wrong.
#[derive(Clone, Debug)]
pub struct Violation {
    /// In which workload.
    pub workload: Workload,
    /// On which media.
    pub durability: Durability,
    /// Whether what had returned was demanded.
    pub returned: bool,
    /// Where; None: without any crash.
    pub spot: Option<Spot>,
    /// Where in the recovery after that, if it was crashed too.
    pub then: Option<Spot>,
    /// What.
    pub why: String,
    /// The state in words.
    pub state: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let spot = |s: &Spot| format!("{}/{}", s.fence, s.pick);
        writeln!(f, "{}", self.why)?;
        writeln!(f, "  workload: {}", self.workload)?;
        if let Some(at) = &self.spot {
            writeln!(f, "  crash after fence {}, {}: {}", at.fence, at.pick, self.state)?;
        }
        if let Some(then) = &self.then {
            writeln!(f, "  recovery crashed after its fence {}, {}", then.fence, then.pick)?;
        }
        write!(f, "  replay: corbel-sim crash --workload \"{}\"", self.workload)?;
        if self.durability == Durability::Disk {
            f.write_str(" --disk")?;
        }
        if !self.returned {
            f.write_str(" --synced")?;
        }
        if let Some(at) = &self.spot {
            write!(f, " --at {}", spot(at))?;
        }
        self.then.iter().try_for_each(|then| write!(f, " --then {}", spot(then)))
    }
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Workloads.
    pub workloads: u64,
    /// Points at which the power could fail.
    pub points: u64,
    /// States made there.
    pub states: u64,
    /// Of these, different ones within their workload (of its first operation: within all workloads that begin
    /// alike): recovered, checked and compared.
    pub checked: u64,
    /// States of a recovery that was crashed itself, likewise.
    pub nested: u64,
}

impl Tally {
    /// Sums.
    pub fn add(&mut self, other: &Tally) {
        self.workloads += other.workloads;
        self.points += other.points;
        self.states += other.states;
        self.checked += other.checked;
        self.nested += other.nested;
    }
}

/// What lies in a region before a workload begins.
#[derive(Debug)]
struct Base {
    ground: Ground,
    durability: Durability,
    /// The region that is looked at.
    region: Arc<Region>,
    /// The head's, if that is another one.
    head: Option<Arc<Region>>,
    model: Model,
    steps: u64,
}

/// One worker's laboratory.
#[derive(Debug)]
pub struct Lab {
    bases: Vec<Base>,
    /// How thoroughly.
    pub effort: Effort,
    /// Whether an operation that has returned must survive (else: what fsync covered).
    pub returned: bool,
    /// What was done so far.
    pub tally: Tally,
    /// What recovery makes of states of the first operation of a workload, by base and hash: many workloads begin
    /// with the same one.
    first: HashMap<(usize, u64), u64>,
}

const GROUND: [&str; 5] =
    ["mkdir A", "mkdir B", "create A/x", "write A/x 0 6000", "setxattr A/x user.k 16"];
/// Bytes left in the stream ring at the end of the ground `Wrap`: a draft reserves 64 KiB.
const LEFT: u64 = 66_400;
/// States of first operations that are remembered.
const FIRST_MAX: usize = 4 << 20;
/// Of one in so many recovered states, work goes on.
const USED: u64 = 50;
/// Blocks of the volume: few, so that they are used again soon, and that reading them is quick.
const fn blocks(ground: Ground) -> usize {
    match ground {
        Ground::Full => 20,
        _ => 64,
    }
}
/// Blocks free at the end of the ground `Full`.
const FREE: usize = 3;
/// Chunks kept at the end of the ground `Ripe`: the service gives up 32 at a time.
const KEPT: u64 = 30;
/// Bytes written at a time to come near the end of the ring, and where that ends.
const FILL_STEP: u64 = 131_072;
const FILL: u64 = FILL_STEP + 40_000;

impl Base {
    fn make(ground: Ground, member: bool, durability: Durability) -> Result<Self, String> {
        let region = Region::new();
        let id = if member { MEMBER } else { HEAD };
        drive::format(&region, id, durability, blocks(ground))?;
        let head = member.then(Region::new);
        let machine = match &head {
            None => Machine::start(&region, HEAD, 1, false)?,
            Some(head) => {
                drive::format(head, HEAD, durability, blocks(ground))?;
                Machine::pair(head, &region, 1, false, false)?
            }
        };
        let mut session = Session::attach(machine, Model::new(0o755, MADE, blocks(ground)), 0)?;
        let act = |session: &mut Session, text: &str| -> Result<(), String> {
            let done = session.act(&Act::parse(text)?, Pace::Lazy)?;
            if done { Ok(()) } else { Err(format!("the ground refuses {text}")) }
        };
        if ground == Ground::Wrap {
            act(&mut session, "create z")?;
            while session.machine.ring_left()? > LEFT + FILL {
                act(&mut session, &format!("write z 0 {FILL_STEP}"))?;
                session.sync()?;
                session.machine.quiet()?;
            }
            act(&mut session, "unlink z")?;
        }
        for text in GROUND {
            act(&mut session, text)?;
        }
        if ground == Ground::Full {
            act(&mut session, "create z")?;
            act(&mut session, &format!("write z 0 {}", (blocks(ground) - 2 - FREE) * 4096))?;
        }
        session.sync()?;
        while ground == Ground::Wrap && session.machine.ring_left()? > LEFT {
            // Small chunks push the large ones out, which recovery would look at each time.
            act(&mut session, "utime B")?;
            session.sync()?;
            session.machine.quiet()?;
        }
        while ground == Ground::Ripe && session.machine.ring_kept()? < KEPT {
            act(&mut session, "utime B")?;
            session.sync()?;
            session.machine.quiet()?;
        }
        session.end()?;
        let model = session.oracle.last().clone();
        let steps = session.steps();
        drop(session);
        region.settle();
        head.iter().for_each(|head| head.settle());
        Ok(Self { ground, durability, region, head, model, steps })
    }
}

/// What recovery made of a state.
#[derive(Debug)]
struct Recovered {
    print: u64,
    trace: Option<Trace>,
}

/// Recovers what lies in the region, as a node does that starts on it, and reads all of it.
fn recover(
    region: &Arc<Region>,
    id: NodeId,
    epoch: u32,
    record: bool,
    go_on: Option<&Oracle>,
) -> Result<Recovered, String> {
    sound(region, "before recovery")?;
    if record {
        region.record();
    }
    let machine = Machine::start(region, id, epoch, false).and_then(|mut m| {
        m.quiet()?;
        Ok(m)
    });
    let trace = record.then(|| region.recorded());
    let machine = machine?;
    let orphans = machine.volume().orphans().map_err(|e| e.to_string())?;
    if !orphans.is_empty() {
        return Err(format!("orphans are left after recovery: {orphans:?}"));
    }
    let seen = drive::view(machine.volume())?;
    sound(region, "after recovery")?;
    let print = print_of(&seen);
    if let Some(model) = go_on.and_then(|oracle| oracle.state(print)) {
        use_it(region, id, epoch, machine, model)
            .map_err(|e| format!("used after recovery: {e}"))?;
    }
    Ok(Recovered { print, trace })
}

/// What was recovered can be worked with, and is still there after another start.
fn use_it(
    region: &Arc<Region>,
    id: NodeId,
    epoch: u32,
    machine: Machine,
    model: &Model,
) -> Result<(), String> {
    let mut session = Session::attach(machine, model.clone(), 1000)?;
    for text in ["create q", "write q 0 5000", "append A/x 5000", "mkdir B/r", "unlink q"] {
        session.act(&Act::parse(text)?, Pace::Eager)?;
        session.sync()?;
    }
    session.machine.quiet()?;
    let all = session.oracle.len();
    let bounds = super::oracle::Bounds { least: all, most: all };
    session.oracle.judge(&drive::view(session.machine.volume())?, bounds)?;
    let oracle = session.oracle.clone();
    drop(session);
    let mut machine = Machine::start(region, id, epoch + 1, false)?;
    machine.quiet()?;
    sound(region, "after work")?;
    oracle.judge(&drive::view(machine.volume())?, bounds)
}

fn sound(region: &Arc<Region>, when: &str) -> Result<(), String> {
    let media = region.by(Side::Node);
    let found = storage::volume::read_superblocks(&*media).map_err(|e| e.to_string())?;
    let uuid = found.into_iter().flatten().next().map(|s| s.uuid).unwrap_or_default();
    let roots = storage::volume::read_roots(&*media, &uuid).map_err(|e| e.to_string())?;
    let published = newest_root(&roots).map(|root| root.stream_seq).unwrap_or_default();
    let ring = Ring::open(Arc::clone(&media) as _, RING_BYTES_MIN, published);
    let pending = ring.and_then(|ring| ring.touched(published)).map_err(|e| e.to_string())?;
    let mut data = Data { pending: &pending, progress: &mut |_, _| {} };
    let report = check_with_data(&*media, &mut data).map_err(|e| format!("check: {e}"))?;
    if report.is_sound() && report.root.is_some() {
        return Ok(());
    }
    let findings: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    Err(format!("the checker {when}: {}", findings.join("; ")))
}

/// The node whose region is looked at.
fn seat(workload: &Workload) -> NodeId {
    if workload.member { MEMBER } else { HEAD }
}

/// A workload that was recorded.
struct Recorded<'a> {
    workload: &'a Workload,
    /// Which base it began on.
    base: usize,
    durability: Durability,
    region: Arc<Region>,
    oracle: Oracle,
    trace: Trace,
}

impl Lab {
    /// A laboratory.
    pub fn new(effort: Effort, returned: bool) -> Self {
        let (bases, first) = (Vec::new(), HashMap::new());
        Self { bases, effort, returned, tally: Tally::default(), first }
    }

    fn base(
        &mut self,
        ground: Ground,
        member: bool,
        durability: Durability,
    ) -> Result<usize, String> {
        let same =
            |b: &Base| (b.ground, b.durability, b.head.is_some()) == (ground, durability, member);
        let found = self.bases.iter().position(same);
        if let Some(at) = found {
            return Ok(at);
        }
        self.bases.push(Base::make(ground, member, durability)?);
        Ok(self.bases.len() - 1)
    }

    /// What there is at the beginning.
    pub fn ground(&mut self, ground: Ground) -> Result<(Model, u64), String> {
        let at = self.base(ground, false, Durability::Pmem)?;
        Ok((self.bases[at].model.clone(), self.bases[at].steps))
    }

    fn record<'a>(
        &mut self,
        workload: &'a Workload,
        durability: Durability,
    ) -> Result<Recorded<'a>, String> {
        let at = self.base(workload.ground, workload.member, durability)?;
        let base = &self.bases[at];
        let region = Arc::clone(&base.region);
        let mark = region.mark();
        let head = base.head.as_ref().map(|head| (head, head.mark()));
        region.record();
        let done = Self::run(base, workload);
        let mut trace = region.recorded();
        region.undo_to(mark);
        if let Some((head, mark)) = head {
            head.undo_to(mark);
        }
        let (oracle, acks) = done?;
        trace.acks = (!workload.member).then_some(acks);
        Ok(Recorded { workload, base: at, durability, region, oracle, trace })
    }

    /// Runs the workload to its end, without a crash.
    fn run(base: &Base, workload: &Workload) -> Result<(Oracle, Acks), String> {
        let big = workload.acts.iter().any(|a| matches!(a, Act::Write(_, _, n) if *n >= 1 << 17));
        let machine = match &base.head {
            None => Machine::start(&base.region, HEAD, 2, big)?,
            Some(head) => Machine::pair(head, &base.region, 2, big, workload.pace == Pace::Lazy)?,
        };
        let mut session = Session::attach(machine, base.model.clone(), base.steps)?;
        for act in &workload.acts {
            session.act(act, workload.pace)?;
        }
        session.machine.catch_up()?;
        let (oracle, acks) = (session.oracle.clone(), session.acks());
        // What the service shows must be what POSIX says, or comparing states means nothing.
        base.region.note(Event::Returned(oracle.len()));
        let mark = base.region.mark();
        let trace = base.region.recorded();
        session.sync()?;
        session.machine.quiet()?;
        let seen = drive::view(session.machine.volume())?;
        let all = super::oracle::Bounds { least: oracle.len(), most: oracle.len() };
        oracle.judge(&seen, all).map_err(|e| format!("without a crash: {e}"))?;
        drop(session);
        base.region.undo_to(mark);
        base.region.resume(trace);
        Ok((oracle, acks))
    }

    /// What a workload does to memory, a line each; fences are numbered.
    pub fn lines(
        &mut self,
        workload: &Workload,
        durability: Durability,
    ) -> Result<Vec<String>, String> {
        let recorded = self.record(workload, durability)?;
        let mut fence = 0;
        let line = |event: &Event| match event {
            Event::Fence(side) => {
                fence += 1;
                format!("fence {fence} {side:?}")
            }
            Event::Store { segment, offset, len, .. } => {
                format!("store {segment:?}+{offset} {len}")
            }
            other => format!("{other:?}"),
        };
        Ok(recorded.trace.events.iter().map(line).collect())
    }

    /// Every crash state of a workload, or the one at `only`.
    pub fn explore(
        &mut self,
        workload: &Workload,
        durability: Durability,
        only: Option<(Spot, Option<Spot>)>,
    ) -> Result<(), Box<Violation>> {
        self.tally.workloads += 1;
        let returned = self.returned;
        let violation = |why| {
            let (spot, then, state) = (None, None, String::new());
            let workload = workload.clone();
            Box::new(Violation { workload, durability, returned, spot, then, why, state })
        };
        let recorded = self.record(workload, durability).map_err(violation)?;
        let region = Arc::clone(&recorded.region);
        let mark = region.mark();
        let grain = if durability == Durability::Disk { DISK } else { MEMORY };
        let mut found = None;
        let mut known = HashMap::new();
        let walked = walk(&region, &recorded.trace, grain, &mut |point, pending| {
            self.visit(&recorded, grain, point, pending, only, &mut known).map_err(|v| {
                let why = v.why.clone();
                found = Some(v);
                why
            })
        });
        region.undo_to(mark);
        match (found, walked) {
            (Some(v), _) => Err(v),
            (None, Err(why)) => Err(violation(why)),
            (None, Ok(())) => Ok(()),
        }
    }

    fn visit(
        &mut self,
        recorded: &Recorded<'_>,
        grain: Grain,
        point: Point,
        pending: &Pending,
        only: Option<(Spot, Option<Spot>)>,
        known: &mut HashMap<u64, u64>,
    ) -> Result<(), Box<Violation>> {
        let region = &recorded.region;
        let bounds = point.bounds(self.demands_returned(recorded));
        self.tally.points += 1;
        let returned = self.returned;
        let seed = point.fence as u64 * 1000;
        let picks = match only {
            Some((spot, _)) if spot.fence == point.fence => vec![spot.pick],
            Some(_) => Vec::new(),
            None if point.progress[0] == 0 => {
                // Attaching is the same in all workloads: a few of its states in each.
                let all = pending.picks(self.effort.random, seed);
                let step = (all.len() / 3).max(1);
                all.into_iter().step_by(step).collect()
            }
            None => pending.picks(self.effort.random, seed),
        };
        for pick in picks {
            let wrong = |why: String, then: Option<Spot>| {
                Box::new(Violation {
                    workload: recorded.workload.clone(),
                    durability: recorded.durability,
                    returned,
                    spot: Some(Spot { fence: point.fence, pick }),
                    then,
                    why,
                    state: pending.describe(region, pick),
                })
            };
            self.tally.states += 1;
            let state = pending.state(region, pick);
            let hash = pending.hash(region, &state);
            let early = only.is_none() && point.progress[0] <= 1;
            let met = self.first.get(&(recorded.base, hash)).filter(|_| early);
            if let Some(&print) = known.get(&hash).or(met) {
                if !recorded.oracle.allows(print, bounds) {
                    return Err(wrong(self.explain(recorded, pending, pick, bounds), None));
                }
                continue;
            }
            let mark = region.mark();
            pending.make(region, &state).map_err(|e| wrong(e.to_string(), None))?;
            let crashed = region.mark();
            self.tally.checked += 1;
            let nested = only.is_some() || hash.is_multiple_of(self.effort.nested.max(1));
            let used = only.is_some() || hash.is_multiple_of(USED);
            let recovered = recover(
                region,
                seat(recorded.workload),
                3,
                nested,
                used.then_some(&recorded.oracle),
            );
            region.undo_to(crashed);
            let again = recovered.map_err(|why| wrong(why, None)).and_then(|recovered| {
                if !recorded.oracle.allows(recovered.print, bounds) {
                    let why = self.explain(recorded, pending, pick, bounds);
                    return Err(wrong(why, None));
                }
                known.insert(hash, recovered.print);
                if early && self.first.len() < FIRST_MAX {
                    self.first.insert((recorded.base, hash), recovered.print);
                }
                let Some(trace) = recovered.trace else { return Ok(()) };
                let then = only.and_then(|(_, then)| then);
                let done = self.crash_again(recorded, &trace, grain, recovered.print, hash, then);
                done.map_err(|(spot, why)| wrong(why, Some(spot)))
            });
            region.undo_to(mark);
            again?;
        }
        Ok(())
    }

    /// Whether what has returned is on these media: only where the log of the client is.
    fn demands_returned(&self, recorded: &Recorded<'_>) -> bool {
        self.returned && recorded.durability == Durability::Pmem && !recorded.workload.member
    }

    /// What is wrong with a state that the oracle refuses.
    fn explain(
        &self,
        recorded: &Recorded<'_>,
        pending: &Pending,
        pick: Pick,
        bounds: super::oracle::Bounds,
    ) -> String {
        let region = &recorded.region;
        let mark = region.mark();
        let why = (|| {
            let state = pending.state(region, pick);
            // What is there already is stored again; that changes nothing.
            pending.make(region, &state).map_err(|e| e.to_string())?;
            let mut machine = Machine::start(region, seat(recorded.workload), 3, false)?;
            machine.quiet()?;
            recorded.oracle.judge(&drive::view(machine.volume())?, bounds)
        })();
        region.undo_to(mark);
        why.err().unwrap_or_else(|| "the oracle refuses it".into())
    }

    /// The power fails again while the node recovers: what it then recovers must be the same.
    fn crash_again(
        &mut self,
        recorded: &Recorded<'_>,
        trace: &Trace,
        grain: Grain,
        print: u64,
        seed: u64,
        only: Option<Spot>,
    ) -> Result<(), (Spot, String)> {
        let (region, id) = (&recorded.region, seat(recorded.workload));
        let fences = trace.events.iter().filter(|e| matches!(e, Event::Fence(_))).count() + 1;
        let step = fences.div_ceil(self.effort.nested_points.max(1));
        let first = seed as usize % step;
        let mark = region.mark();
        let mut found = None;
        let mut tally = 0;
        let walked = walk(region, trace, grain, &mut |point, pending| {
            let picks = match only {
                Some(spot) if spot.fence == point.fence => vec![spot.pick],
                Some(_) => Vec::new(),
                None if point.fence % step == first => {
                    let all = pending.picks(2, seed % 1_000_000 + point.fence as u64);
                    let skip = (all.len() / 6).max(1);
                    all.into_iter().step_by(skip).collect()
                }
                None => Vec::new(),
            };
            for pick in picks {
                let here = region.mark();
                let state = pending.state(region, pick);
                let made = pending.make(region, &state).map_err(|e| e.to_string());
                tally += 1;
                let again = made.and_then(|()| recover(region, id, 4, false, None));
                region.undo_to(here);
                let why = match again {
                    Ok(r) if r.print == print => continue,
                    Ok(_) => "a second crash, during recovery, leads to another state".into(),
                    Err(why) => format!("after a second crash, during recovery: {why}"),
                };
                found = Some((Spot { fence: point.fence, pick }, why.clone()));
                return Err(why);
            }
            Ok(())
        });
        region.undo_to(mark);
        self.tally.nested += tally;
        match (found, walked) {
            (Some(f), _) => Err(f),
            (None, Err(why)) => Err((Spot { fence: 0, pick: Pick::Nothing }, why)),
            (None, Ok(())) => Ok(()),
        }
    }
}
