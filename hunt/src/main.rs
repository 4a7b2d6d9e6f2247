//! `corbel-hunt`: carries out calls for `corbel bench hunt`, which starts it.

use clap::Parser;

/// Carries out calls for `corbel bench hunt`, which starts it
#[derive(Parser, Debug)]
#[command(name = "corbel-hunt", version)]
struct Cli {
    #[command(flatten)]
    worker: hunt::WorkerArgs,
}

fn main() -> std::io::Result<()> {
    hunt::work(&Cli::parse().worker)
}
