//! `corbel mkfs`: makes the region of a node and an empty volume in it.

use clap::Args;
use serde_json::json;
use service::nicfs::FormatParams;

use crate::cli::Global;
use crate::config::Config;
use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;
use crate::units::{parse_mode, parse_uuid};

/// Arguments of `corbel mkfs`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  corbel mkfs --config node1.toml                 prints the volume's uuid\n  \
    corbel mkfs --config node2.toml --uuid UUID     the same volume on the next node"
)]
pub struct MkfsArgs {
    /// Identity of the volume, the same on all of its nodes; random by default
    #[arg(long, value_parser = parse_uuid)]
    uuid: Option<[u8; 16]>,
    /// Permission bits of the root directory
    #[arg(long, default_value = "0755", value_parser = parse_mode)]
    mode: u32,
    /// Owner of the root directory (default: the caller)
    #[arg(long)]
    uid: Option<u32>,
    /// Group of the root directory (default: the caller's)
    #[arg(long)]
    gid: Option<u32>,
    /// Remove what the region's directory holds first. All of its data is lost
    #[arg(long)]
    force: bool,
    /// Reserve nothing: the volume has what the file system below has left. For trying things
    #[arg(long)]
    sparse: bool,
}

/// As `8-4-4-4-12` hexadecimal digits.
pub fn show_uuid(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// A UUID of version 7: milliseconds since 1970, then random bits from the kernel. The time in it is
/// the volume's birth, so that all members show the same.
pub fn new_uuid() -> Result<[u8; 16]> {
    use std::io::Read;
    let mut uuid = [0u8; 16];
    let mut source = std::fs::File::open("/dev/urandom").context("/dev/urandom")?;
    source.read_exact(&mut uuid).context("/dev/urandom")?;
    let millis = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(0));
    for (i, byte) in uuid[..6].iter_mut().enumerate() {
        *byte = (millis >> (40 - 8 * i)) as u8;
    }
    uuid[6] = uuid[6] & 0x0f | 0x70;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}

/// The time in a UUID of version 7, in nanoseconds since 1970; 0 for other versions.
pub fn time_of(uuid: &[u8; 16]) -> u64 {
    if uuid[6] >> 4 != 7 {
        return 0;
    }
    let millis = uuid[..6].iter().fold(0u64, |ms, byte| ms << 8 | u64::from(*byte));
    millis.saturating_mul(1_000_000)
}

/// Runs `corbel mkfs`.
pub fn run(global: &Global, args: &MkfsArgs, out: &Output) -> Result<()> {
    let config = global.load()?;
    let region = &config.node.region;
    clear(&config, args.force)?;
    let uuid = args.uuid.map_or_else(new_uuid, Ok)?;
    let params = FormatParams {
        uuid,
        time: time_of(&uuid),
        name: config.cluster.id.clone(),
        capacity: config.node.capacity.0,
        stream: config.node.stream.0,
        uid: args.uid.unwrap_or_else(|| rustix::process::getuid().as_raw()),
        gid: args.gid.unwrap_or_else(|| rustix::process::getgid().as_raw()),
        mode: args.mode,
        sparse: args.sparse,
    };
    service::nicfs::format(&crate::serve::nicfs_config(&config), &params).map_err(|error| {
        Failure::failed(
            format!("{}: {error}", region.display()),
            "check the directory, its file system and its free space",
        )
    })?;
    let uuid = show_uuid(&params.uuid);
    let about = json!({"region": region, "uuid": uuid, "capacity": params.capacity});
    out.result(&about, || println!("{}: volume {uuid}", region.display()));
    Ok(())
}

/// Refuses a region that holds something, or empties it.
fn clear(config: &Config, force: bool) -> Result<()> {
    let region = &config.node.region;
    let used = match std::fs::read_dir(region) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let parent = region.parent().unwrap_or(region);
            return std::fs::create_dir_all(parent).context(parent.display());
        }
        Err(error) => return Err(Failure::io(region.display(), &error)),
    };
    if !used {
        return Ok(());
    }
    if !force {
        return Err(Failure::new(
            Kind::Failed,
            format!("{}: there is something in it already", region.display()),
            "choose an empty node.region, or give --force to lose what is there",
        ));
    }
    if crate::process::read_pid_file(&crate::serve::run_dir(config).join("nicfs.pid")).is_some() {
        return Err(Failure::failed(
            format!("{}: its service is running", region.display()),
            "end `corbel serve` of this node first",
        ));
    }
    // Only what a region consists of is removed; a directory given by mistake keeps all.
    let mut parts = Vec::new();
    for entry in std::fs::read_dir(region).context(region.display())? {
        let entry = entry.context(region.display())?;
        let name = entry.file_name();
        if !name.to_str().is_some_and(is_part) {
            return Err(Failure::failed(
                format!("{}: {} is no part of a region", region.display(), name.display()),
                "this may be the wrong directory; remove that file yourself if it is not",
            ));
        }
        parts.push(entry.path());
    }
    let _ours = service::nicfs::abandon(&crate::serve::nicfs_config(config)).map_err(|error| {
        Failure::failed(error.to_string(), "end `corbel serve` of this node first")
    })?;
    // The noted epoch goes first: with it, an empty volume would pass for a copy of what was there.
    parts.sort_by_key(|path| !path.ends_with(service::nicfs::EPOCH_FILES[0]));
    for part in parts {
        std::fs::remove_file(&part).context(part.display())?;
    }
    Ok(())
}

/// Whether a region's directory has a file of that name: its segments, and what its services keep beside them.
fn is_part(name: &str) -> bool {
    storage::region::segment_of(name).is_some()
        || storage::region::is_left(name)
        || name == storage::region::COPIES_LOCK
        || name == storage::region::BALLAST
        || name == service::nicfs::GIVEN_UP
        || service::nicfs::EPOCH_FILES.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_read_back() {
        let uuid = new_uuid().unwrap();
        assert_eq!(parse_uuid(&show_uuid(&uuid)), Ok(uuid));
        assert_ne!(new_uuid().unwrap(), uuid);
        assert!(time_of(&uuid) > 1_700_000_000_000_000_000, "after 2023");
        assert_eq!(time_of(&[0xff; 16]), 0, "not version 7");
        let far = parse_uuid("ffffffff-ffff-7fff-8fff-ffffffffffff").unwrap();
        assert_eq!(time_of(&far), u64::MAX, "beyond what nanoseconds hold");
        for bad in
            ["", "1234", &"g".repeat(32), &"1".repeat(33), "+1111111111111111111111111111111"]
        {
            assert!(parse_uuid(bad).is_err(), "{bad}");
        }
        assert!(parse_mode("8").is_err() && parse_mode("10000").is_err());
    }
}
