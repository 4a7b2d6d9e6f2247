//! Mounts a back end in the foreground: `mount_dir SOURCE DIR [OPTIONS]`, where SOURCE is
//! `dir:/PATH` or `null:`. Prints `ready` when the mount answers; ends on SIGTERM and SIGINT.

use std::path::Path;
use std::process::ExitCode;

use frontend::dev_fuse::Session;
use frontend::fuse::Options;
use frontend::mount_options::MountOptions;
use frontend::process::EndingSignals;

fn run(args: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [source, dir, rest @ ..] = args else {
        return Err("usage: mount_dir SOURCE DIR [OPTIONS]".into());
    };
    let signals = EndingSignals::catch()?;
    let fs = frontend::source::open_back_end(source).ok_or("source: dir:/PATH or null:")??;
    let mut mount_options = MountOptions { source: source.clone(), ..MountOptions::default() };
    for list in rest {
        mount_options.apply(list)?;
    }
    let options = Options { config_text: format!("source {source}\n"), ..Options::default() };
    let session = Session::mount(fs, Path::new(dir), &mount_options, options)?;
    println!("ready");
    if signals.wait_or(session.ended())? {
        session.unmount()?;
    }
    eprint!("{}", session.stats_text());
    session.drain(std::time::Duration::from_secs(5));
    Ok(())
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mount_dir: {error}");
            ExitCode::FAILURE
        }
    }
}
