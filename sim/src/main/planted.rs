//! `corbel-sim planted`: each broken variant, and who finds it.

use std::process::ExitCode;

use sim::planted::{FIRST_SEED, Found, hunt, inside, names};

fn fail(text: &str) -> ExitCode {
    eprintln!("corbel-sim planted: {text}");
    ExitCode::from(2)
}

/// `[--only NAME]... [--from S] [--json]`; `--inside NAME` is for the program itself.
pub fn main(mut args: impl Iterator<Item = String>) -> ExitCode {
    let (mut only, mut json, mut from) = (Vec::new(), false, FIRST_SEED);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => json = true,
            "--from" => {
                let Some(seed) = args.next().and_then(|seed| seed.parse().ok()) else {
                    return fail("--from wants a number");
                };
                from = seed;
            }
            "--only" | "--inside" => {
                let Some(name) = args.next() else { return fail(&format!("{arg} wants a name")) };
                if base::planted::Bug::named(&name).is_none() {
                    return fail(&format!(
                        "no variant \"{name}\"; there are {}",
                        names().join(" ")
                    ));
                }
                if arg == "--inside" {
                    return match inside(&name, from) {
                        Ok(_) => ExitCode::SUCCESS,
                        Err(why) => fail(&why),
                    };
                }
                only.push(name);
            }
            _ => {
                return fail(&format!(
                    "unknown argument {arg}; use [--only NAME]... [--from S] [--json]"
                ));
            }
        }
    }
    if only.is_empty() {
        only = names().into_iter().map(String::from).collect();
    }
    let mut caught = 0;
    for name in &only {
        match hunt(name, from) {
            Ok(found) => {
                caught += usize::from(found.is_caught());
                show(&found, json);
            }
            Err(why) => return fail(&why),
        }
    }
    println!("{} planted, {caught} caught", only.len());
    if caught == only.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn show(found: &Found, json: bool) {
    let Found { name, judge, tries, seconds } = found;
    if json {
        // Names and judges are words of a-z and dashes: nothing to escape.
        println!(
            r#"{{"name":"{name}","caught":{},"judge":"{judge}","tries":{tries},"seconds":{seconds:.1}}}"#,
            found.is_caught()
        );
    } else {
        let by = if found.is_caught() { judge.as_str() } else { "NOT CAUGHT" };
        println!("{name:<28} {by:<12} {tries:>7} tries {seconds:>7.1} s");
    }
}
