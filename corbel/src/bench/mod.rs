//! `corbel bench`: figures measured here and now. One module per bench; each prints its rows as it
//! goes and ends with the figures, under `--json` on one last line
//! `{"bench": NAME, "figures": {…}}`.

pub mod kernels;
mod race;

use clap::Subcommand;
use serde_json::{Map, Value, json};

use crate::failure::Result;
use crate::output::Output;

/// Figures of a bench, by name.
pub type Figures = Map<String, Value>;

/// Verbs of `corbel bench`.
#[derive(Subcommand, Debug)]
pub enum BenchVerb {
    /// Placement, Reed-Solomon, CRC32C and LZ4 on one core, against the established libraries
    #[command(after_help = "Examples:\n  corbel bench kernels\n  \
                corbel bench kernels --engine avx2 --json\n\n\
                Libraries that are not installed (libisal2, libjerasure2) are left out, and the\n\
                figures that need them are null.")]
    Kernels(kernels::Options),
}

/// Runs `corbel bench …`.
pub fn run(out: &Output, verb: &BenchVerb) -> Result<()> {
    let (name, figures) = match verb {
        BenchVerb::Kernels(options) => ("kernels", kernels::run(out.json, options)?),
    };
    out.result(&json!({"bench": name, "figures": figures}), || {
        for (figure, value) in &figures {
            println!("{figure:<24} {value}");
        }
    });
    Ok(())
}
