//! `corbel-sim block`.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use super::run;

/// What it takes.
pub const USAGE: &str = "\
corbel-sim block [--seeds N] [--from S] [--seconds T] [--keep-going] [--bug VARIANT]
corbel-sim block --seed S [--trace]
  the block layer and pools, on stores that fail, hang, lie, forget, deny and lose";

#[derive(Default)]
struct Options {
    seeds: Option<u64>,
    from: u64,
    seed: Option<u64>,
    seconds: Option<u64>,
    trace: bool,
    keep_going: bool,
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

fn options(args: &mut dyn Iterator<Item = String>) -> Result<Options, String> {
    let mut o = Options { from: 1, ..Options::default() };
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--trace" => o.trace = true,
            "--keep-going" => o.keep_going = true,
            "--bug" => plant(&args.next().unwrap_or_default())?,
            "--seeds" | "--from" | "--seed" | "--seconds" => {
                let text = args.next().ok_or_else(|| format!("{arg} wants a number\n{USAGE}"))?;
                let number = text.parse().map_err(|e| format!("{arg} {text}: {e}\n{USAGE}"))?;
                match arg.as_str() {
                    "--seeds" => o.seeds = Some(number),
                    "--from" => o.from = number,
                    "--seed" => o.seed = Some(number),
                    _ => o.seconds = Some(number),
                }
            }
            _ => return Err(format!("unknown argument {arg}\n{USAGE}")),
        }
    }
    Ok(o)
}

/// Runs the command; the arguments after `block`.
pub fn main(args: &mut dyn Iterator<Item = String>) -> ExitCode {
    match options(args) {
        Ok(o) => match o.seed {
            Some(seed) => one(&o, seed),
            None => many(&o),
        },
        Err(text) => {
            eprintln!("corbel-sim block: {text}");
            ExitCode::from(2)
        }
    }
}

fn one(o: &Options, seed: u64) -> ExitCode {
    let mut print = |line: &str| println!("{line}");
    let sink: Option<&mut dyn FnMut(&str)> = if o.trace { Some(&mut print) } else { None };
    let first = run(seed, sink);
    println!("seed {seed}: {first:?}");
    if run(seed, None).hash != first.hash {
        println!("seed {seed}: NOT DETERMINISTIC");
        return ExitCode::FAILURE;
    }
    if first.violation.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn many(o: &Options) -> ExitCode {
    let begun = Instant::now();
    let (mut ran, mut violations) = (0u64, 0u64);
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in o.from..o.from + o.seeds.unwrap_or(100) {
        if o.seconds.is_some_and(|seconds| begun.elapsed().as_secs() >= seconds) {
            break;
        }
        let outcome = run(seed, None);
        ran += 1;
        outcome.counts.into_iter().for_each(|(what, n)| *counts.entry(what).or_default() += n);
        if let Some(why) = outcome.violation {
            violations += 1;
            println!("seed {seed}: {why}\n  replay: corbel-sim block --seed {seed} --trace");
            if !o.keep_going {
                break;
            }
        }
    }
    let counts: Vec<String> = counts.iter().map(|(what, n)| format!("{what} {n}")).collect();
    println!(
        "{ran} seeds, {violations} violations in {:.0} s; {}",
        begun.elapsed().as_secs_f64(),
        counts.join(", ")
    );
    if violations == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
