//! `corbel upgrade`: brings the region of a node to the format of this version, in place, while its services are ended.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde_json::json;
use storage::format::superblock::Durability;
use storage::media::Media;
use storage::region::FileRegion;
use storage::volume::{add_sums, read_superblocks};

use crate::cli::Global;
use crate::failure::{Failure, Result};
use crate::output::Output;

/// Arguments of `corbel upgrade`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  systemctl stop corbel\n  corbel upgrade --config node1.toml\n  \
    systemctl start corbel\n\n\
    Reads all that the region holds, once, and gives each block its checksum. What it holds is taken for right.\n\
    Interrupted, run it again, or start the node: it goes on where it was. Older versions of corbel refuse it afterwards.\n\
    A node that is filled anew by the others (`corbel mkfs`) needs none of this."
)]
pub struct UpgradeArgs {
    /// Region to upgrade (default: that of the configuration)
    #[arg(long, value_name = "DIR")]
    region: Option<PathBuf>,
}

/// Runs `corbel upgrade`.
pub fn run(global: &Global, args: &UpgradeArgs, out: &Output) -> Result<()> {
    let path = match &args.region {
        Some(path) => path.clone(),
        None => global.load()?.node.region,
    };
    let failed = |e: &dyn std::fmt::Display, remedy: &str| {
        Failure::failed(format!("{}: {e}", path.display()), remedy)
    };
    let made = "name a directory that `corbel mkfs` made";
    let open = |durability| FileRegion::open(&path, durability).map_err(|e| failed(&e, made));
    // How stores are made durable, the region itself says.
    let found = read_superblocks(&open(Durability::Replicated)?).map_err(|e| failed(&e, made))?;
    let [a, b] = found;
    let superblock = a.or(b).map_err(|e| failed(&e, "`corbel fsck` says more"))?;
    let region = open(superblock.durability)?;
    region.lock().map_err(|e| failed(&e, "end `corbel serve` of this node first"))?;
    let media = Arc::new(region) as Arc<dyn Media>;
    let mut shown = 0;
    let done = add_sums(&media, &mut |done, all| {
        let percent = done * 100 / all.max(1);
        if percent >= shown + 5 {
            shown = percent;
            out.step(format!("  {percent} %"));
        }
    });
    let done = done.map_err(|e| failed(&e, "what is damaged, `corbel fsck` says"))?;
    let object = json!({"region": path, "upgraded": done.is_some(), "blocks": done.unwrap_or(0)});
    out.result(&object, || match done {
        Some(0) => println!("{}: is of this version now", path.display()),
        Some(blocks) => println!("{}: {blocks} blocks have checksums now", path.display()),
        None => println!("{}: is of this version already", path.display()),
    });
    Ok(())
}
