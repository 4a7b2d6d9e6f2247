//! `corbel-sim`: histories of a cluster, each from one seed.
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use sim::scenario::{ALL, Scenario};
use sim::{Flavour, Outcome, Preset, run};

#[cfg(feature = "planted")]
#[path = "main/planted.rs"]
mod planted;

#[cfg(not(feature = "planted"))]
mod planted {
    /// Says how to get it.
    pub fn main(_: impl Iterator<Item = String>) -> std::process::ExitCode {
        eprintln!(
            "corbel-sim: built without the feature `planted`; use cargo run --release -p sim --features planted -- planted"
        );
        std::process::ExitCode::from(2)
    }
}

const USAGE: &str = "\
corbel-sim [--seeds N] [--from S] [--seed S] [--trace] [--seconds T] [--keep-going]
  --seeds N      run N seeds (100)
  --from S       begin with seed S (1)
  --seed S       run this seed alone, twice, and compare the traces
  --trace        print one line an event
  --seconds T    end after T seconds
  --keep-going   go on after a violation
  --flavour F    only histories of that kind: plain, large, hostile, full, quota, joint, bytes, parted, long
corbel-sim scenario NAME [--bug VARIANT] [the options above]
  the same with directed histories; --bug plants a variant (with --features planted)
corbel-sim planted [--only NAME]... [--from S] [--json]   (built with --features planted)
  switches each broken variant on, and says which judge finds it after how many tries";

type Args = std::iter::Peekable<std::iter::Skip<std::env::Args>>;

#[derive(Default)]
struct Options {
    seeds: Option<u64>,
    from: u64,
    seed: Option<u64>,
    trace: bool,
    seconds: Option<u64>,
    keep_going: bool,
    flavour: Option<Flavour>,
    /// Directed histories instead of random ones.
    scenario: Option<&'static Scenario>,
}

/// Options of `corbel-sim scenario NAME`.
fn scenario_options(args: &mut Args) -> Result<Options, String> {
    let name = args.next().ok_or_else(|| format!("which scenario?\n{}", list()))?;
    let scenario = Scenario::named(&name);
    let scenario =
        scenario.ok_or_else(|| format!("there is no scenario \"{name}\"\n{}", list()))?;
    Ok(Options { scenario: Some(scenario), ..options(args)? })
}

fn list() -> String {
    ALL.iter().map(|s| format!("  {}: {}\n", s.name, s.tells)).collect()
}

#[cfg(feature = "planted")]
fn plant(name: &str) -> Result<(), String> {
    use base::planted::{Bug, choose};
    choose(Bug::named(name).ok_or_else(|| format!("there is no variant \"{name}\""))?);
    Ok(())
}

#[cfg(not(feature = "planted"))]
fn plant(_: &str) -> Result<(), String> {
    Err("built without the feature `planted`".into())
}

fn options(args: &mut Args) -> Result<Options, String> {
    let mut o = Options { from: 1, ..Options::default() };
    while let Some(arg) = args.next() {
        if arg == "--bug" {
            plant(&args.next().unwrap_or_default())?;
            continue;
        }
        if arg == "--flavour" {
            o.flavour = Some(match args.next().unwrap_or_default().as_str() {
                "plain" => Flavour::Plain,
                "large" => Flavour::Large,
                "hostile" => Flavour::Hostile,
                "full" => Flavour::Full,
                "quota" => Flavour::Quota,
                "joint" => Flavour::Joint,
                "parted" => Flavour::Parted,
                "bytes" => Flavour::Bytes,
                "long" => Flavour::Long,
                other => return Err(format!("--flavour {other}: there is no such\n{USAGE}")),
            });
            continue;
        }
        let mut number = || {
            let text = args.next().ok_or_else(|| format!("{arg} wants a number\n{USAGE}"))?;
            text.parse::<u64>().map_err(|e| format!("{arg} {text}: {e}\n{USAGE}"))
        };
        match arg.as_str() {
            "--seeds" => o.seeds = Some(number()?),
            "--from" => o.from = number()?,
            "--seed" => o.seed = Some(number()?),
            "--seconds" => o.seconds = Some(number()?),
            "--trace" => o.trace = true,
            "--keep-going" => o.keep_going = true,
            _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
        }
    }
    Ok(o)
}

fn main() -> ExitCode {
    base::output::end_where_it_ends("corbel-sim");
    if std::env::args().any(|arg| matches!(arg.as_str(), "--help" | "-h")) {
        println!("{USAGE}\n{}\n{}", sim::crash::command::USAGE, sim::block::command::USAGE);
        return ExitCode::SUCCESS;
    }
    if std::env::args().nth(1).as_deref() == Some("planted") {
        return planted::main(std::env::args().skip(2));
    }
    if std::env::args().nth(1).as_deref() == Some("crash") {
        return sim::crash::command::main(&mut std::env::args().skip(2));
    }
    if std::env::args().nth(1).as_deref() == Some("block") {
        return sim::block::command::main(&mut std::env::args().skip(2));
    }
    let mut args = std::env::args().skip(1).peekable();
    let options = match args.next_if_eq("scenario") {
        Some(_) => scenario_options(&mut args),
        None => options(&mut args),
    };
    let options = match options {
        Ok(options) => options,
        Err(text) => {
            eprintln!("corbel-sim: {text}");
            return ExitCode::from(2);
        }
    };
    if let Some(seed) = options.seed {
        return one(&options, seed);
    }
    many(&options)
}

impl Options {
    fn preset(&self, seed: u64) -> Preset {
        let mut preset = self.scenario.map_or_else(|| Preset::of(seed), |s| s.preset(seed));
        if let Some(flavour) = self.flavour {
            preset.make(flavour);
        }
        preset
    }

    fn words(&self) -> String {
        let scenario = self.scenario.map(|s| format!("scenario {} ", s.name));
        let flavour =
            self.flavour.map(|f| format!("--flavour {} ", format!("{f:?}").to_lowercase()));
        [scenario, flavour].into_iter().flatten().collect()
    }
}

fn one(options: &Options, seed: u64) -> ExitCode {
    let mut print = |line: &str| println!("{line}");
    let sink: Option<&mut dyn FnMut(&str)> = if options.trace { Some(&mut print) } else { None };
    let first = run(seed, options.preset(seed), sink);
    let second = run(seed, options.preset(seed), None);
    println!("seed {seed}: {first:?}");
    if first.hash != second.hash {
        println!("seed {seed}: NOT DETERMINISTIC");
        return ExitCode::FAILURE;
    }
    if first.violation.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn many(options: &Options) -> ExitCode {
    let begin = Instant::now();
    let (mut violations, mut ran, mut total) = (0u64, 0u64, Outcome::default());
    for seed in options.from..options.from + options.seeds.unwrap_or(100) {
        if options.seconds.is_some_and(|s| begin.elapsed().as_secs() >= s) {
            break;
        }
        let outcome = run(seed, options.preset(seed), None);
        ran += 1;
        total.add(&outcome);
        if let Some(why) = outcome.violation {
            violations += 1;
            println!(
                "seed {seed}: {why}\n  replay: corbel-sim {}--seed {seed} --trace",
                options.words()
            );
            if !options.keep_going {
                break;
            }
        }
    }
    let (seconds, hours) = (begin.elapsed().as_secs_f64(), total.virtual_ns as f64 / 3.6e12);
    println!(
        "{ran} seeds, {violations} violations; {hours:.2} h virtual in {seconds:.0} s ({:.2} h a minute)",
        60.0 * hours / seconds.max(0.001)
    );
    println!(
        "{} operations ({}), {} observations, {} interleavings, {} fsyncs; {} entries to refuse, {} operations without space, \
         {} over a quota, {} snapshots; {} jointly, {} of them untaken, {} writes beside others, {} judged anew; {} heirs; {} steps of scripts",
        total.operations,
        listed(&total.kinds),
        total.observations,
        total.switches,
        total.fsyncs,
        total.dared,
        total.no_space,
        total.over_quota,
        total.snapshots,
        total.joint,
        total.untaken,
        total.parts,
        total.unsaid,
        total.heirs,
        total.steps
    );
    println!("{} faults ({})", total.faults.values().sum::<u64>(), listed(&total.faults));
    if violations == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn listed(counts: &BTreeMap<&'static str, u64>) -> String {
    let all: Vec<String> = counts.iter().map(|(what, n)| format!("{what} {n}")).collect();
    all.join(", ")
}
