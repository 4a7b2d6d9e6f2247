//! What nicfs notes in a region's directory: in which epoch it served, and which processes had the region since.

use std::path::Path;

use base::Epoch;
use cluster::coordinator::message::BEFORE_MAX;

use crate::config::Error;

/// What nicfs keeps in a region's directory beside the region: the last epoch that it served in, the processes that had the region
/// since, and what becomes each.
pub const EPOCH_FILES: [&str; 4] = ["epoch", "epoch.new", "processes", "processes.new"];

pub(super) fn forget_epoch(region: &Path) -> Result<(), Error> {
    for name in [EPOCH_FILES[0], EPOCH_FILES[2]] {
        match std::fs::remove_file(region.join(name)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::new(&format!("{}", region.join(name).display()), e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The last epoch that this node was a member of, noted before it served anything in it.
pub(super) fn note_epoch(region: &Path, epoch: Epoch) -> Result<(), Error> {
    note(region, [EPOCH_FILES[0], EPOCH_FILES[1]], &format!("{:020}\n", epoch.0))
}

/// The processes that had the region since one was a member in the epoch that is noted, that one first. Who takes the
/// region over names them to the coordinator, and may go on in their place: the region belongs to one process at a time.
pub(super) fn note_processes(region: &Path, processes: &[u64]) -> Result<(), Error> {
    let all = processes.iter().copied().chain(std::iter::repeat(0)).take(BEFORE_MAX);
    let text: String = all.map(|process| format!("{process:020}\n")).collect();
    note(region, [EPOCH_FILES[2], EPOCH_FILES[3]], &text)
}

pub(super) fn noted_processes(region: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(region.join(EPOCH_FILES[2])).unwrap_or_default();
    let all = text.lines().map_while(|line| line.parse().ok());
    all.filter(|process| *process != 0).take(BEFORE_MAX).collect()
}

/// Adds a process; of too many those in the middle go.
pub(super) fn with_process(mut before: Vec<u64>, process: u64) -> Vec<u64> {
    before.push(process);
    if before.len() > BEFORE_MAX {
        before.remove(1);
    }
    before
}

/// Writes a file. Where the file system is full, too: there are two of one length, that are written in turn and change names.
fn note(region: &Path, [name, fresh]: [&str; 2], text: &str) -> Result<(), Error> {
    let path = region.join(name);
    let fresh = region.join(fresh);
    let fill = || -> std::io::Result<()> {
        let file =
            std::fs::File::options().write(true).create(true).truncate(false).open(&fresh)?;
        std::os::unix::fs::FileExt::write_all_at(&file, text.as_bytes(), 0)?;
        file.set_len(text.len() as u64)?;
        file.sync_all()
    };
    let write = || -> std::io::Result<()> {
        fill()?;
        let (cwd, swap) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
        if rustix::fs::renameat_with(cwd, &fresh, cwd, &path, swap).is_err() {
            std::fs::rename(&fresh, &path)?;
            // For the next time.
            let _ = fill();
        }
        std::fs::File::open(region)?.sync_all()
    };
    write().map_err(|e| Error::new(&format!("file {}", path.display()), e))
}

/// Says why the region is not to be used any more.
pub const GIVEN_UP: &str = "given-up";

/// A medium that does not keep what is written is not served from again: whoever starts this node anew is told why.
pub(super) fn give_up(region: &Path, why: &str) {
    if let Err(e) = std::fs::write(region.join(GIVEN_UP), format!("{why}\n")) {
        log::error!("{}: cannot note that it is given up: {e}", region.display());
    }
}

pub(super) fn is_given_up(region: &Path) -> Result<(), Error> {
    match std::fs::read_to_string(region.join(GIVEN_UP)) {
        Err(_) => Ok(()),
        Ok(why) => Err(Error(format!(
            "nicfs: region {}: this copy was given up, because its medium failed ({}): replace the medium, and let the node join \
             anew: `corbel mkfs --force --uuid UUID` with the uuid that the other nodes have",
            region.display(),
            why.trim()
        ))),
    }
}

pub(super) fn noted_epoch(region: &Path) -> Option<Epoch> {
    std::fs::read_to_string(region.join(EPOCH_FILES[0])).ok()?.trim().parse().ok().map(Epoch)
}
