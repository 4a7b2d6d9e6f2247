//! The one binary. `cli` has the verbs; each verb is one module.

mod ask;
mod bench;
mod cert;
mod cli;
mod clock;
mod cluster;
mod copy;
mod crush;
mod demo;
mod fsck;
mod links;
mod local;
mod logging;
mod metrics;
mod mkfs;
mod mount;
mod nbd;
mod output;
mod pool;
mod process;
mod quota;
mod rados;
mod recover;
mod run;
mod scrub;
mod serve;
mod signals;
mod snapshot;
mod source;
mod status;
mod transfer;
mod ublk;
mod upgrade;
mod virtiofs;
mod volume;

use std::process::ExitCode;

use corbel_input::{config, failure, units};

use cli::{Cli, Verb};
use failure::Result;
use output::Output;

fn run(cli: Cli, out: &Output) -> Result<u8> {
    let global = &cli.global;
    match cli.verb {
        Verb::Mount(args) => mount::run(global, out, &args)?,
        Verb::Virtiofs(args) => virtiofs::run(global, out, &args)?,
        Verb::Pool(verb) => pool::run(out, &verb)?,
        Verb::Nbd(args) => nbd::run(global, out, &args)?,
        Verb::Ublk(args) => ublk::run(global, out, &args)?,
        Verb::Mkfs(args) => mkfs::run(global, &args, out)?,
        Verb::Serve(args) => serve::run(global, &args)?,
        Verb::Status(args) => status::run(global, &args, out)?,
        Verb::Quota(args) => quota::run(global, &args, out)?,
        Verb::Snapshot(args) => snapshot::run(global, &args, out)?,
        Verb::Send(args) => transfer::send::run(global, &args, out)?,
        Verb::Receive(args) => transfer::receive::run(global, &args, out)?,
        Verb::Recover(args) => recover::run(global, &args, out)?,
        Verb::Cert(verb) => cert::run(global, out, &verb)?,
        Verb::Cluster(verb) => cluster::run(out, &verb)?,
        Verb::Scrub(args) => scrub::run(global, &args, out)?,
        Verb::Upgrade(args) => upgrade::run(global, &args, out)?,
        Verb::Fsck(args) => return fsck::run(global, &args, out),
        Verb::Demo(args) => demo::run(&args, out)?,
        Verb::Bench(verb) => return bench::run(out, &verb),
        Verb::Crush(verb) => crush::run(out, &verb)?,
        Verb::Rados(verb) => rados::run(out, &verb)?,
        Verb::Config(verb) => cli::config(global, out, &verb)?,
        Verb::Completion { shell } => cli::completion(shell),
        Verb::Run(args) => return run::run(global, out, &args),
        Verb::Man { dir } => cli::man(out, dir.as_ref())?,
    }
    Ok(0)
}

fn main() -> ExitCode {
    base::output::end_where_it_ends("corbel");
    let json = std::env::args().take_while(|arg| arg != "--").any(|arg| arg == "--json");
    let out = Output { json };
    let mut streams = false;
    let result = cli::parse().and_then(|cli| {
        logging::begin(cli.log_level());
        streams = matches!(&cli.verb, Verb::Send(args) if !args.dry_run);
        run(cli, &out)
    });
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if json && streams {
                // What goes to standard output is no place for it.
                eprintln!("{}", failure.to_json());
            } else {
                failure.print(json);
            }
            ExitCode::from(failure.exit_code())
        }
    }
}
