//! The whole run: which workloads, on how many threads, and what is printed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base::random::Random;
use storage::format::superblock::Durability;

use super::lab::{Effort, Lab, Tally, Violation};
use super::oracle::Model;
use super::workload::{Act, Ground, Workload, alphabet, more_letters, sample, variants};

/// What to run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// All sequences up to that length.
    pub length: usize,
    /// Random sequences after them.
    pub sample: u64,
    /// Seed of those.
    pub seed: u64,
    /// Ends the run.
    pub seconds: Option<u64>,
    /// Threads.
    pub threads: usize,
    /// How thoroughly.
    pub effort: Effort,
    /// Whether operations that have returned must survive.
    pub returned: bool,
    /// Also on a disk.
    pub disk: bool,
    /// Do not end at the first violation.
    pub keep_going: bool,
    /// Of the sequences of length 2 and more, only one in so many.
    pub thin: u64,
    /// Of all workloads only one part (from 0 on) of so many.
    pub part: (usize, usize),
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            length: 2,
            sample: 1000,
            seed: 1,
            seconds: None,
            threads: 2,
            effort: Effort::default(),
            returned: true,
            disk: true,
            keep_going: false,
            thin: 1,
            part: (0, 1),
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What was done.
    pub tally: Tally,
    /// What was found.
    pub violations: Vec<Violation>,
    /// Workloads that were to be run.
    pub planned: usize,
    /// How long it took.
    pub seconds: f64,
    /// All that was planned was done.
    pub complete: bool,
}

impl Report {
    /// In one line.
    pub fn line(&self) -> String {
        let t = &self.tally;
        let all = t.checked + t.nested;
        format!(
            "{} of {} workloads, {} crash points, {} states made, {} recovered, checked and compared \
             ({} of them after a second crash during recovery), {} violations; {:.1} s, {:.0} \
             states/s{}",
            t.workloads,
            self.planned,
            t.points,
            t.states + t.nested,
            all,
            t.nested,
            self.violations.len(),
            self.seconds,
            all as f64 / self.seconds.max(0.001),
            if self.complete { "" } else { "; ended before the plan was through" }
        )
    }

    /// For programs.
    pub fn json(&self) -> String {
        let t = &self.tally;
        format!(
            "{{\"workloads\":{},\"planned\":{},\"points\":{},\"made\":{},\"checked\":{},\"nested\":{},\
             \"violations\":{},\"seconds\":{:.3},\"complete\":{}}}",
            t.workloads,
            self.planned,
            t.points,
            t.states + t.nested,
            t.checked + t.nested,
            t.nested,
            self.violations.len(),
            self.seconds,
            self.complete
        )
    }
}

/// Whether a sequence is possible from the beginning.
pub fn possible(model: &Model, acts: &[Act]) -> bool {
    let mut model = model.clone();
    acts.iter().enumerate().all(|(i, act)| model.apply(act, i as u64, i as u64).is_some())
}

/// What each ground holds.
#[derive(Debug)]
pub struct Models(Vec<(Ground, Model)>);

impl Models {
    /// What that ground holds.
    pub fn of(&self, ground: Ground) -> &Model {
        let found = self.0.iter().find(|m| m.0 == ground);
        &found.unwrap_or(&self.0[0]).1
    }
}

/// Makes every ground.
pub fn models(lab: &mut Lab) -> Result<Models, String> {
    let all = [Ground::Fresh, Ground::Wrap, Ground::Ripe, Ground::Full];
    let made = all.map(|ground| lab.ground(ground).map(|(model, _)| (ground, model)));
    made.into_iter().collect::<Result<Vec<_>, _>>().map(Models)
}

/// All possible sequences of that length.
fn sequences(model: &Model, letters: &[Act], length: usize) -> Vec<Vec<Act>> {
    let mut all: Vec<Vec<Act>> = vec![Vec::new()];
    for _ in 0..length {
        let longer = all.iter().flat_map(|acts| {
            letters.iter().map(move |a| acts.iter().cloned().chain([a.clone()]).collect())
        });
        all = longer.filter(|acts: &Vec<Act>| possible(model, acts)).collect();
    }
    all
}

/// The directed workloads of a plan and all its sequences, with the media they run on.
fn sequences_of(plan: &Plan, models: &Models) -> Vec<(Workload, Durability)> {
    let (letters, mut all) = (alphabet(), Vec::new());
    let more: Vec<Act> = letters.iter().cloned().chain(more_letters()).collect();
    all.extend(directed().into_iter().map(|w| (w, Durability::Pmem)));
    let mut random = Random::new(plan.seed);
    for length in 1..=plan.length {
        for core in
            sequences(models.of(Ground::Fresh), if length == 1 { &more } else { &letters }, length)
        {
            for workload in variants(&core) {
                if length > 1 && plan.thin > 1 && !random.chance(1, plan.thin) {
                    continue;
                }
                if length == 1 {
                    for ground in [Ground::Wrap, Ground::Ripe] {
                        let other = Workload { ground, ..workload.clone() };
                        all.push((other, Durability::Pmem));
                    }
                }
                if plan.disk && (length == 1 || random.chance(1, 8)) {
                    all.push((workload.clone(), Durability::Disk));
                }
                all.push((workload, Durability::Pmem));
            }
        }
    }
    all
}

/// What a plan consists of. Random sequences are made when they are run, since there may be millions; they take
/// turns with the others, so that a run that ends early has had some of both.
struct Workloads<'a> {
    plan: &'a Plan,
    models: Models,
    letters: Vec<Act>,
    fixed: Vec<(Workload, Durability)>,
}

impl<'a> Workloads<'a> {
    fn new(plan: &'a Plan, models: Models) -> Self {
        let letters = alphabet().into_iter().chain(more_letters()).collect();
        let fixed = sequences_of(plan, &models);
        Self { plan, models, letters, fixed }
    }

    /// Those of the plan's part.
    fn len(&self) -> usize {
        let all = self.fixed.len() + self.plan.sample as usize;
        let (part, parts) = (self.plan.part.0, self.plan.part.1.max(1));
        all / parts + usize::from(part < all % parts)
    }

    fn at(&self, n: usize) -> (Workload, Durability) {
        let n = n * self.plan.part.1.max(1) + self.plan.part.0;
        let (fixed, samples) = (self.fixed.len(), self.plan.sample as usize);
        let turns = 2 * fixed.min(samples);
        match n {
            _ if n < turns && n.is_multiple_of(2) => self.fixed[n / 2].clone(),
            _ if n < turns => self.sample(n / 2),
            _ if fixed > samples => self.fixed[n - samples].clone(),
            _ => self.sample(n - fixed),
        }
    }

    fn sample(&self, i: usize) -> (Workload, Durability) {
        let seed = self.plan.seed.wrapping_mul(1_000_003).wrapping_add(i as u64);
        let mut random = Random::new(seed);
        let length = 3 + random.below(6) as usize;
        let workload = sample(&mut random, length, &self.letters, |ground, acts| {
            possible(self.models.of(ground), acts)
        });
        let disk = self.plan.disk && random.chance(1, 8);
        (workload, if disk { Durability::Disk } else { Durability::Pmem })
    }
}

/// Sequences that chance would seldom find, each for a danger of its own. They come first.
const DIRECTED: [&str; 42] = [
    // Copies large enough for hostd.
    "Fresh Eager; create z; write z 0 140000; fsync; write z 100 135000",
    "Fresh Fetching; create z; write z 0 140000; fsync; write z 100 135000",
    // While hostd copies, another chunk is acknowledged; then old chunks are given up.
    "Ripe Fetching; create z; write z 0 140000; utime B; utime A; utime B",
    // The same where no log of the client can make up for what the ring loses.
    "Ripe Fetching Member; create z; write z 0 140000; utime B; utime A; utime B; utime A; utime B",
    "Ripe Fetching Member; create z; write z 0 140000; utime B; write z 0 140000; utime B; utime A; \
     write z 0 140000; utime A; utime B",
    // Blocks that a move has left are used again before the move is published.
    "Fresh Lazy; chmod A/x 384; create A/y; append A/y 5000; fsync",
    "Fresh Fetching; create A/y; chmod A/x 384; append A/y 5000; chmod A/x 420; append A/y 9000",
    // A member that lags must publish in the middle of a chunk.
    "Fresh Lazy Member; create A/y; clone A/x A/y; pause; create z; rename z B/x; write A/x 5 10; fsync",
    "Fresh Lazy Member; create A/y; chmod A/y 384; clone A/x A/y; pause; create z; rename z B/x; \
     write A/x 5 10; fsync",
    // The tree splits and merges.
    "Fresh Eager; setxattr A/x user.a 3000; setxattr A/x user.b 3000; setxattr B user.c 3000; \
     removexattr A/x user.a; removexattr A/x user.b; setxattr B user.d 3000; unlink A/x",
    // What was given up has to be published before it can be used again.
    "Full Lazy; truncate z 0; create A/y; append A/y 200; write z 0 12000; write A/x 3000 9000; fsync",
    "Full Lazy Member; truncate z 0; pause; create A/y; rename A/y B/x; write z 0 60000; fsync",
    // Half a root record is left by one crash, half of the next one written over it by another.
    "Full Fetching; setxattr A/x user.big 3000; fsync; write A/x 4096 4096; chmod A/x 420; fsync; \
     rename A B; fsync; quota 100000; pause; setacl B 5 1; fsync; pause",
    // A chunk that is larger than what is left of the stream ring.
    "Wrap Fetching; create z; write z 0 30000; fsync; write z 0 60000; fsync; write z 100 50000; fsync",
    // What is copied from is changed afterwards.
    "Fresh Lazy; create A/y; clone A/x A/y; write A/x 500 1000; rename A/x A/y; fsync; create A/x",
    "Fresh Lazy; create A/y; chmod A/y 384; clone A/x A/y; write A/x 500 1000; rename A/x A/y; fsync; \
     create A/x",
    // Files that share blocks are written and cut, each and in turn; one of them goes, and what it
    // alone had is used again.
    "Fresh Lazy; create A/y; clone A/x A/y; pause; write A/x 500 1000; write A/y 400 10; fsync; pause; \
     write A/y 3000 9000; truncate A/x 100",
    "Fresh Lazy Member; create A/y; clone A/x A/y; pause; write A/y 0 5000; write A/x 3000 9000; fsync",
    "Fresh Eager; create A/y; clone A/x A/y; unlink A/x; create z; write z 0 12000; append A/y 3000; fsync",
    "Fresh Fetching; create A/y; clone A/x A/y; truncate A/y 100; unlink A/y; create z; write z 0 12000; \
     write A/x 0 100; fsync",
    "Fresh Lazy; create A/y; clone A/x A/y; create z; clone A/y z; pause; fallocate A/x 1000 5000 3; \
     unlink A/y; pause; append z 1; chmod A/x 384; fsync; unlink z",
    // One of two that share a block changes a part of it, so the rest is copied; then the other does.
    "Fresh Lazy; create A/y; clone A/x A/y; pause; write A/x 500 10; write A/y 0 5000; fsync; pause",
    // What a snapshot has is written to, in part and in whole, cut and removed, before and after it is published.
    "Fresh Lazy; snapshot s; write A/x 500 1000; fsync; truncate A/x 100; pause; unlink A/x; create z; \
     write z 0 12000; fsync",
    "Fresh Eager; snapshot s; write A/x 500 1000; write A/x 4096 4096; snapshot t; truncate A/x 0; \
     write A/x 0 5000; drop s; create z; write z 0 12000; fsync; drop t; write z 0 50000",
    "Fresh Fetching; write A/x 500 1000; snapshot s; write A/x 500 1000; drop s; write A/x 500 1000; fsync; pause",
    "Fresh Fetching Member; snapshot s; write A/x 500 1000; pause; drop s; write A/x 600 10; fsync; snapshot t; \
     pause; write A/x 700 10",
    "Fresh Lazy Member; create A/y; clone A/x A/y; snapshot s; write A/x 500 10; write A/y 0 5000; chmod A/x 384; \
     fsync; drop s; pause",
    // Pages of the tree that a snapshot has, and that leave it.
    "Fresh Eager; setxattr A/x user.a 3000; setxattr A/x user.b 3000; snapshot s; setxattr B user.c 3000; \
     removexattr A/x user.a; removexattr A/x user.b; drop s; setxattr B user.d 3000; unlink A/x",
    // Two publications after a snapshot: each root record is written over the other's, and no number is next to the last.
    "Fresh Eager; snapshot s; fsync; snapshot t; fsync; utime B; fsync; drop s; drop t; fsync; utime A; pause",
    "Ripe Fetching Member; snapshot s; create z; write z 0 60000; utime B; snapshot t; write z 100 40000; drop s; \
     utime A; utime B",
    // What a snapshot has comes back: into the file that had it, and into another, before the state is on media and after it.
    "Fresh Lazy; snapshot s; write A/x 0 5000; back s A/x A/x; fsync; write A/x 500 10; pause",
    "Fresh Eager; snapshot s; write A/x 0 5000; back s A/x A/x; write A/x 500 10; drop s; create z; write z 0 12000; \
     fsync; append A/x 3000",
    "Fresh Fetching; snapshot s; truncate A/x 0; create A/y; back s A/x A/y; drop s; create z; write z 0 12000; \
     fsync; pause; write A/y 100 5000",
    "Fresh Fetching Member; snapshot s; truncate A/x 0; pause; back s A/x A/x; drop s; write A/x 600 10; snapshot t; \
     back t A/x A/x; fsync",
    // A block between two lives: a snapshot has it, the next has it not, a file has it again; each snapshot goes first.
    "Fresh Eager; snapshot s; truncate A/x 0; snapshot t; back s A/x A/x; drop s; create z; write z 0 12000; fsync; \
     write A/x 100 10; drop t; write z 0 50000",
    "Fresh Eager; snapshot s; unlink A/x; snapshot t; create A/y; back s A/x A/y; drop t; truncate A/y 0; create z; \
     write z 0 12000; fsync; back s A/x A/y",
    "Fresh Fetching; snapshot s; truncate A/x 0; snapshot t; pause; back s A/x A/x; truncate A/x 100; back s A/x A/x; \
     drop s; write A/x 4096 4096; fsync; drop t; pause",
    "Fresh Lazy Member; snapshot s; truncate A/x 0; snapshot t; back s A/x A/x; pause; drop s; write A/x 500 1000; \
     create z; write z 0 12000; fsync; pause",
    // Copied, since others may read the one than the other; what is read stays until that is published, and the snapshot goes.
    "Fresh Fetching; snapshot s; create A/y; chmod A/y 384; pause; back s A/x A/y; drop s; write A/x 0 5000; fsync",
    "Fresh Lazy Member; snapshot s; chmod A/x 384; pause; piece s A/x A/x 4096 0 1904; drop s; write A/x 5 10; \
     create z; rename z B/x; fsync",
    "Ripe Fetching Member; snapshot s; write A/x 0 9000; utime B; piece s A/x A/x 100 4196 3000; utime A; drop s; \
     write A/x 0 9000; utime B",
    // Written to and gone in the same chunk, which then says nothing of what was written in place.
    "Fresh Fetching; tmpfile A/y 5000; fsync; write A/x 20000 10; fsync; write A/y 0 5000; \
     rename A/x A/y; rename A z",
];

/// See [`DIRECTED`].
pub fn directed() -> Vec<Workload> {
    DIRECTED.iter().filter_map(|text| Workload::parse(text).ok()).collect()
}

/// Runs a plan.
pub fn run(plan: &Plan) -> Result<Report, String> {
    let begin = Instant::now();
    let all = Workloads::new(plan, models(&mut lab(plan))?);
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let report = Mutex::new(Report::default());
    std::thread::scope(|scope| {
        for _ in 0..plan.threads.max(1) {
            scope.spawn(|| {
                let mut lab = lab(plan);
                let mut found = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= all.len() {
                        break;
                    }
                    let (workload, durability) = all.at(at);
                    if let Err(violation) = lab.explore(&workload, durability, None) {
                        found.push(*violation);
                        if !plan.keep_going {
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                    let limit = plan.seconds.map(Duration::from_secs);
                    if limit.is_some_and(|limit| begin.elapsed() >= limit) {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
                let mut report = report.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                report.tally.add(&lab.tally);
                report.violations.append(&mut found);
            });
        }
    });
    let mut report = report.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    report.planned = all.len();
    report.seconds = begin.elapsed().as_secs_f64();
    report.complete = next.load(Ordering::Relaxed) >= all.len();
    Ok(report)
}

fn lab(plan: &Plan) -> Lab {
    Lab::new(plan.effort, plan.returned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_turns_leave_nothing_out() {
        for (sample, parts) in [(0, 1), (7, 1), (7, 3), (5000, 1), (5000, 4)] {
            let mut seen = Vec::new();
            for part in 0..parts {
                let plan = Plan { length: 1, sample, part: (part, parts), ..Plan::default() };
                let models = models(&mut Lab::new(Effort::default(), false)).unwrap();
                let all = Workloads::new(&plan, models);
                seen.extend((0..all.len()).map(|n| format!("{:?}", all.at(n))));
            }
            let plan = Plan { length: 1, sample, ..Plan::default() };
            let models = models(&mut Lab::new(Effort::default(), false)).unwrap();
            let all = Workloads::new(&plan, models);
            let fixed = all.fixed.iter().map(|w| format!("{w:?}"));
            let samples = (0..sample as usize).map(|i| format!("{:?}", all.sample(i)));
            let mut whole: Vec<String> = fixed.chain(samples).collect();
            seen.sort();
            whole.sort();
            assert_eq!(seen, whole, "{sample} samples in {parts} parts");
        }
    }

    #[test]
    fn the_directed_workloads_are_possible() {
        assert_eq!(directed().len(), DIRECTED.len());
        let models = models(&mut Lab::new(Effort::default(), false)).unwrap();
        for workload in directed() {
            assert!(possible(models.of(workload.ground), &workload.acts), "{workload}");
        }
    }
}
