//! `corbel-sim crash`.

use std::process::ExitCode;

use storage::format::superblock::Durability;

use super::lab::{Lab, Spot};
use super::run::{Plan, run};
use super::states::Pick;
use super::workload::Workload;

/// What it takes.
pub const USAGE: &str = "\
corbel-sim crash [--length N] [--sample N] [--seed S] [--seconds T] [--threads N] [--json]
                 [--random N] [--synced] [--no-disk] [--thin N] [--keep-going]
corbel-sim crash --workload TEXT [--disk] [--trace] [--at FENCE/CHOICE [--then FENCE/CHOICE]]
  --length N     all sequences of up to N operations (2)
  --sample N     then N random sequences of 3 to 8 operations (1000)
  --seed S       of the random sequences (1)
  --seconds T    end after T seconds
  --threads N    (2)
  --random N     random states at each crash point, beside the enumerated ones (6)
  --twice        crash every recovery again, at every point, not only some
  --synced       demand only what fsync covered, not all that has returned
  --no-disk      only memory, no disk
  --thin N       of the sequences of two operations only one in N
  --part I/N     of all workloads only one part, from 0/N to N-1/N
  --keep-going   go on after a violation
  --json         the figures as one line of JSON
  --workload     this one alone; --at and --then this crash state alone;
                 --trace prints what it does to memory";

#[derive(Default)]
struct Options {
    plan: Plan,
    json: bool,
    workload: Option<Workload>,
    disk: bool,
    at: Option<Spot>,
    then: Option<Spot>,
    trace: bool,
    #[cfg(feature = "planted")]
    bug: Option<String>,
}

fn spot(text: &str) -> Result<Spot, String> {
    let (fence, pick) = text.split_once('/').ok_or_else(|| format!("{text}: not FENCE/CHOICE"))?;
    let fence = fence.parse().map_err(|e| format!("{text}: {e}"))?;
    Ok(Spot { fence, pick: Pick::parse(pick)? })
}

fn options(args: &mut dyn Iterator<Item = String>) -> Result<Options, String> {
    let mut o = Options::default();
    while let Some(arg) = args.next() {
        let mut text = || args.next().ok_or_else(|| format!("{arg} wants a value\n{USAGE}"));
        let number =
            |text: String| text.parse::<u64>().map_err(|e| format!("{arg} {text}: {e}\n{USAGE}"));
        match arg.as_str() {
            "--length" => o.plan.length = number(text()?)?.min(3) as usize,
            "--sample" => o.plan.sample = number(text()?)?,
            "--seed" => o.plan.seed = number(text()?)?,
            "--seconds" => o.plan.seconds = Some(number(text()?)?),
            "--threads" => o.plan.threads = number(text()?)?.clamp(1, 256) as usize,
            "--random" => o.plan.effort.random = number(text()?)?.min(100_000) as usize,
            "--thin" => o.plan.thin = number(text()?)?,
            "--part" => {
                let text = text()?;
                let pair =
                    text.split_once('/').and_then(|(i, n)| i.parse().ok().zip(n.parse().ok()));
                o.plan.part = pair
                    .filter(|(i, n)| i < n)
                    .ok_or_else(|| format!("{text}: not a part like 0/4"))?;
            }
            "--twice" => o.plan.effort = o.plan.effort.twice(),
            "--synced" => o.plan.returned = false,
            "--no-disk" => o.plan.disk = false,
            "--keep-going" => o.plan.keep_going = true,
            "--json" => o.json = true,
            #[cfg(feature = "planted")]
            "--bug" => o.bug = Some(text()?),
            "--workload" => o.workload = Some(Workload::parse(&text()?)?),
            "--trace" => o.trace = true,
            "--disk" => o.disk = true,
            "--at" => o.at = Some(spot(&text()?)?),
            "--then" => o.then = Some(spot(&text()?)?),
            _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
        }
    }
    Ok(o)
}

/// Runs the command; the arguments after `crash`.
pub fn main(args: &mut dyn Iterator<Item = String>) -> ExitCode {
    let done = options(args).and_then(|o| match &o.workload {
        #[cfg(feature = "planted")]
        _ if o.bug.is_some() => hunt(&o),
        Some(workload) => one(&o, workload),
        None => many(&o),
    });
    done.unwrap_or_else(|text| {
        eprintln!("corbel-sim crash: {text}");
        ExitCode::from(2)
    })
}

/// Hunts one planted bug, or all.
#[cfg(feature = "planted")]
fn hunt(o: &Options) -> Result<ExitCode, String> {
    use base::planted::Bug;
    let (name, mut missed) = (o.bug.as_deref().unwrap_or(""), 0);
    let budget = super::catch::Budget::default();
    let all = Bug::ALL.iter().filter(|b| (b.0 as u16) < 50 && (name == "all" || b.1 == name));
    let all: Vec<_> = all.collect();
    for (bug, name, _) in &all {
        match super::catch::catch(*bug, budget) {
            Some(how) => println!("caught {name}: {how}"),
            None => {
                missed += 1;
                println!("MISSED {name}");
            }
        }
    }
    println!("{} of {} planted bugs caught", all.len() - missed, all.len());
    Ok(if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn one(o: &Options, workload: &Workload) -> Result<ExitCode, String> {
    let mut lab = Lab::new(o.plan.effort, o.plan.returned);
    let durability = if o.disk { Durability::Disk } else { Durability::Pmem };
    if o.trace {
        lab.lines(workload, durability)?.iter().for_each(|line| println!("{line}"));
    }
    let found = lab.explore(workload, durability, o.at.map(|at| (at, o.then)));
    println!("{:?}", lab.tally);
    if o.at.is_some() && lab.tally.checked == 0 {
        return Err("there is no such fence in this workload".into());
    }
    match found {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(violation) => {
            println!("{violation}");
            Ok(ExitCode::FAILURE)
        }
    }
}

fn many(o: &Options) -> Result<ExitCode, String> {
    let report = run(&o.plan)?;
    for violation in report.violations.iter().take(50) {
        println!("VIOLATION {violation}");
    }
    println!("{}", if o.json { report.json() } else { report.line() });
    Ok(if report.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
