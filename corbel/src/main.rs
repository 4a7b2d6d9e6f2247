//! The one binary. `cli` has the verbs; each verb is one module.

mod ask;
mod bench;
mod cli;
mod config;
mod failure;
mod local;
mod metrics;
mod mount;
mod output;
mod process;
mod signals;
mod units;

use std::process::ExitCode;

use cli::{Cli, Verb};
use failure::Result;
use output::Output;

fn run(cli: Cli, out: &Output) -> Result<u8> {
    let global = &cli.global;
    match cli.verb {
        Verb::Mount(args) => mount::run(global, out, &args)?,
        Verb::Bench(verb) => bench::run(out, &verb)?,
        Verb::Config(verb) => cli::config(global, out, &verb)?,
        Verb::Completion { shell } => cli::completion(shell),
        Verb::Man { dir } => cli::man(out, dir.as_ref())?,
    }
    Ok(0)
}

fn main() -> ExitCode {
    let json = std::env::args().take_while(|arg| arg != "--").any(|arg| arg == "--json");
    let out = Output { json };
    let result = cli::parse().and_then(|cli| {
        env_logger::Builder::new().filter_level(cli.global.log_level).init();
        run(cli, &out)
    });
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            failure.print(json);
            ExitCode::from(failure.exit_code())
        }
    }
}
