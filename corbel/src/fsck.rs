//! `corbel fsck`: the checker over the region of a node, and the comparison of replicas. Reads
//! only; the codes are those of fsck(8).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};
use service::core::ring::Ring;
use storage::check::{Data, Report, Severity, check, check_with_data};
use storage::format::superblock::{Durability, newest_root};
use storage::media::{Media, Segment};
use storage::region::FileRegion;
use storage::volume::{Volume, read_roots, read_superblocks};

use crate::cli::Global;
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;

/// Errors are left: repair is a matter of the replicas.
const LEFT: u8 = 4;
/// The check itself could not be done.
const OPERATIONAL: u8 = 8;

/// Arguments of `corbel fsck`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  corbel fsck --config node1.toml\n  \
    corbel fsck --region /srv/n1 --compare /srv/n2 --compare /srv/n3\n  \
    corbel fsck --region /srv/n1 --data\n\n\
    Exit codes, as in fsck(8): 0 no errors, 4 errors left, 8 the check failed, 16 usage.\n\
    Nothing is ever changed: a damaged replica is made anew from the others.")]
pub struct FsckArgs {
    /// Region to check (default: that of the configuration)
    #[arg(long, value_name = "DIR")]
    region: Option<PathBuf>,
    /// Compare with the region of another replica, byte for byte (repeatable)
    #[arg(long, value_name = "DIR")]
    compare: Vec<PathBuf>,
    /// Print the digest of all names, attributes and contents
    #[arg(long)]
    digest: bool,
    /// Read the content of all files as well, and compare each block with its checksum
    #[arg(long)]
    data: bool,
}

fn operational(path: &Path, error: impl std::fmt::Display, remedy: &str) -> Failure {
    let mut failure = Failure::failed(format!("{}: {error}", path.display()), remedy);
    failure.exit = Some(OPERATIONAL);
    failure
}

/// Opens a region that no service uses.
fn open(path: &Path) -> Result<Arc<FileRegion>> {
    // The mode decides how stores are made durable; nothing is stored here.
    let region = FileRegion::open(path, Durability::Replicated)
        .map_err(|e| operational(path, e, "name a directory that `corbel mkfs` made"))?;
    region.lock().map_err(|e| operational(path, e, "end `corbel serve` of this node first"))?;
    Ok(Arc::new(region))
}

fn volume(path: &Path, region: Arc<FileRegion>) -> Result<Volume> {
    Volume::open(region)
        .map_err(|e| operational(path, e, "the findings of `corbel fsck` say what is damaged"))
}

/// Runs `corbel fsck`; the exit code.
pub fn run(global: &Global, args: &FsckArgs, out: &Output) -> Result<u8> {
    let path = match &args.region {
        Some(path) => path.clone(),
        None => global.load()?.node.region,
    };
    let region = open(&path)?;
    let report = match args.data {
        true => with_data(&region, out),
        false => check(&*region),
    };
    let report =
        report.map_err(|e| operational(&path, e, "the region cannot be read; see the reason"))?;
    let unsummed = report.superblock.as_ref().is_some_and(|superblock| !superblock.sums);
    if args.data && unsummed {
        let what = "its blocks have no checksums: it is of the version before";
        let remedy = "`corbel upgrade` gives it some, while the node is ended";
        return Err(operational(&path, what, remedy));
    }
    let findings: Vec<Value> = report
        .findings
        .iter()
        .map(|f| {
            let severity = if f.severity == Severity::Damage { "damage" } else { "note" };
            json!({"severity": severity, "place": f.place, "problem": f.problem, "remedy": f.remedy})
        })
        .collect();
    if !out.json {
        report.findings.iter().for_each(|finding| println!("{}: {finding}", path.display()));
    }
    let mut differences = Vec::new();
    let mut digest = None;
    if report.is_sound() && (args.digest || !args.compare.is_empty()) {
        let first = volume(&path, region)?;
        digest = Some(first.digest().map_err(|e| operational(&path, e, "see the reason"))?);
        for other in &args.compare {
            differences.extend(compare(&first, other)?);
        }
    }
    let counts = report.counts;
    let object = json!({
        "region": path, "sound": report.is_sound(), "findings": findings,
        "findings_total": report.total, "digest": digest.map(|d| format!("{d:016x}")),
        "compared": args.compare.len(), "differences": differences,
        "stream_seq": report.root.as_ref().map(|root| root.stream_seq.0),
        "counts": {"pages": counts.pages, "inodes": counts.inodes, "files": counts.files,
            "directories": counts.directories, "names": counts.names, "extents": counts.extents,
            "blocks": counts.blocks, "shared_blocks": counts.shared, "orphans": counts.orphans,
            "compared": counts.compared, "rotten": counts.rotten, "excused": counts.excused},
    });
    out.result(&object, || {
        let verdict = if report.is_sound() { "sound" } else { "DAMAGED" };
        println!(
            "{}: {verdict}; {} files, {} directories, {} extents, {} blocks, {} pages",
            path.display(),
            counts.files,
            counts.directories,
            counts.extents,
            counts.blocks,
            counts.pages
        );
        if args.data {
            let (compared, rotten, excused) = (counts.compared, counts.rotten, counts.excused);
            let waits = if excused == 0 {
                String::new()
            } else {
                format!("; {excused} are half written, which the node makes good when it starts")
            };
            println!("  content: {compared} blocks compared, {rotten} rotten{waits}");
        }
        digest.iter().for_each(|digest| println!("  digest {digest:016x}"));
        differences.iter().for_each(|difference| println!("  {difference}"));
        if !args.compare.is_empty() && differences.is_empty() {
            println!("  {} other replicas agree byte for byte", args.compare.len());
        }
    });
    Ok(if report.is_sound() && differences.is_empty() { 0 } else { LEFT })
}

/// Checks the region and reads all content. What the stream ring is about to write anew is excused.
fn with_data(
    region: &Arc<FileRegion>,
    out: &Output,
) -> std::result::Result<Report, storage::media::MediaError> {
    let superblock = read_superblocks(&**region)?.into_iter().flatten().next();
    let mut pending = Vec::new();
    if let Some(superblock) = superblock {
        let roots = read_roots(&**region, &superblock.uuid)?;
        let published = newest_root(&roots).map(|root| root.stream_seq).unwrap_or_default();
        let media = Arc::clone(region) as Arc<dyn Media>;
        if media.size(Segment::Stream).is_ok_and(|size| size > 0) {
            let ring = Ring::open(media, superblock.stream_bytes, published)?;
            pending = ring.touched(published)?;
        }
    }
    let mut shown = 0;
    let mut progress = |done: u64, all: u64| {
        let percent = done * 100 / all.max(1);
        if percent >= shown + 5 && !out.json {
            shown = percent;
            out.step(format!("  content: {percent} %"));
        }
    };
    check_with_data(&**region, &mut Data { pending: &pending, progress: &mut progress })
}

/// What differs between a volume and that in another region.
fn compare(first: &Volume, other: &Path) -> Result<Vec<String>> {
    let second = volume(other, open(other)?)?;
    let found = first
        .differences(&second)
        .map_err(|e| operational(other, e, "the findings of `corbel fsck` say what is damaged"))?;
    Ok(found.into_iter().map(|text| format!("{}: {text}", other.display())).collect())
}

/// Whether the replicas in these regions are sound and the same; what is wrong if not, their
/// common digest if so.
pub fn agree(regions: &[PathBuf]) -> Result<u64> {
    let Some((first, others)) = regions.split_first() else { return Ok(0) };
    for path in regions {
        let region = open(path)?;
        let report = check(&*region).map_err(|e| operational(path, e, "see the reason"))?;
        if let Some(finding) = report.findings.iter().find(|f| f.severity == Severity::Damage) {
            let message = format!("{}: {finding}", path.display());
            return Err(Failure::new(Kind::Damaged, message, finding.remedy));
        }
    }
    let volume = volume(first, open(first)?)?;
    for other in others {
        let differences = compare(&volume, other)?;
        if let Some(difference) = differences.first() {
            let message = format!("{}: {difference}", first.display());
            return Err(Failure::new(Kind::Damaged, message, "replicas must never differ"));
        }
    }
    volume.digest().map_err(|e| operational(first, e, "see the reason"))
}

#[cfg(test)]
mod tests {
    use storage::media::{Media, Segment};
    use storage::volume::Params;

    use super::*;

    fn region(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("corbel-fsck-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        dir
    }

    /// Two empty volumes of one identity agree; a flipped bit in a page is damage, in words.
    #[test]
    fn damage_and_agreement() {
        let (a, b) = (region("a"), region("b"));
        for path in [&a, &b] {
            let media = Arc::new(FileRegion::create(path, Durability::Replicated).unwrap());
            Volume::format(media, &params()).unwrap();
        }
        agree(&[a.clone(), b.clone()]).unwrap();
        {
            let media = open(&b).unwrap();
            let mut byte = [0u8; 1];
            media.read(Segment::Tree, 4096 + 100, &mut byte).unwrap();
            media.write(Segment::Tree, 4096 + 100, &[byte[0] ^ 4]).unwrap();
            media.read(Segment::Tree, 100, &mut byte).unwrap();
            media.write(Segment::Tree, 100, &[byte[0] ^ 4]).unwrap();
            let other = open(&b).unwrap_err();
            assert_eq!(other.exit_code(), OPERATIONAL, "in use: {other}");
        }
        assert_eq!(agree(&[a.clone(), b.clone()]).unwrap_err().kind, Kind::Damaged);
        assert_eq!(agree(&[a.join("none")]).unwrap_err().exit_code(), OPERATIONAL);
        for path in [&a, &b] {
            std::fs::remove_dir_all(path).unwrap();
        }
    }

    fn params() -> Params {
        Params {
            uuid: [7; 16],
            name: "test".into(),
            node: base::NodeId(1),
            durability: Durability::Replicated,
            capacity_bytes: 16 << 20,
            stream_bytes: 16 << 20,
            time: 1,
            uid: 0,
            gid: 0,
            mode: 0o755,
        }
    }
}
