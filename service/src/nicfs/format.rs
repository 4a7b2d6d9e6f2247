//! `mkfs`: the region of a node is made, found again, and given up.

use std::sync::Arc;

use storage::format::control;
use storage::media::{Media, Segment};
use storage::region::FileRegion;
use storage::volume::{Params, Volume, bytes_when_full};

use super::noted::forget_epoch;
use crate::config::{Error, NicfsConfig};
use crate::host::end_copies;

/// What `mkfs` chooses for the region of a node.
#[derive(Clone, Debug)]
pub struct FormatParams {
    /// The same on every member of the chain.
    pub uuid: [u8; 16],
    /// Realtime nanoseconds of the volume's birth, the same on every member of the chain too: it is
    /// what the root directory shows.
    pub time: u64,
    /// Name of the volume.
    pub name: String,
    /// Bytes for the data of files.
    pub capacity: u64,
    /// Bytes of the stream ring.
    pub stream: u64,
    /// Owner of the root directory.
    pub uid: u32,
    /// Group of the root directory.
    pub gid: u32,
    /// Permission bits of the root directory.
    pub mode: u32,
    /// Whether nothing is reserved: the volume has what the file system below has left then.
    pub sparse: bool,
}

/// What a region needs beside data and tree: the ring, a client's log, and a little.
fn beside(config: &NicfsConfig, stream: u64) -> u64 {
    let log = u64::from(config.lanes).saturating_mul(config.lane_bytes);
    stream.saturating_add(log).saturating_add(4 << 20)
}

pub(super) fn in_mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// Whether there is room for what the volume promises.
fn has_room(region: &FileRegion, config: &NicfsConfig, params: &FormatParams) -> Result<(), Error> {
    let at = config.region.display();
    let beside = beside(config, params.stream);
    let (what, needed) = if params.sparse {
        ("its ring and a log alone", beside)
    } else {
        let full = bytes_when_full(params.capacity);
        ("a full one with its tree, ring and a log", full.saturating_add(beside))
    };
    match region.free_bytes().map_err(|e| Error::new(&format!("region {at}"), e))? {
        Some(free) if free < needed => Err(Error(format!(
            "no room for a volume of {}: {what} takes {}, and the file system of {at} has {} free; choose a smaller \
            node.capacity or another file system{}",
            in_mib(params.capacity),
            in_mib(needed),
            in_mib(free),
            if params.sparse { "" } else { ", or give --sparse to have nothing reserved" },
        ))),
        _ => Ok(()),
    }
}

/// Makes the region of a node: directory, volume, stream ring.
pub fn format(config: &NicfsConfig, params: &FormatParams) -> Result<(), Error> {
    let at = |what: &str| format!("{what} {}", config.region.display());
    let region = FileRegion::create(&config.region, config.durability)
        .map_err(|e| Error::new(&at("region"), e))?;
    region.keeps_its_promise().map_err(|e| Error::new(&at("region"), e))?;
    region.lock().map_err(|e| Error::new(&at("region"), e))?;
    end_copies(&region).map_err(|e| Error(format!("{}: hostd: {e}", at("region"))))?;
    has_room(&region, config, params)?;
    if !params.sparse {
        let full = bytes_when_full(params.capacity);
        region.reserve(full).map_err(|e| Error::new(&at("region"), e))?;
    }
    let params = Params {
        uuid: params.uuid,
        name: params.name.clone(),
        node: config.node,
        durability: config.durability,
        capacity_bytes: params.capacity,
        stream_bytes: params.stream,
        time: params.time,
        uid: params.uid,
        gid: params.gid,
        mode: params.mode,
    };
    let region: Arc<dyn Media> = Arc::new(region);
    Volume::format(Arc::clone(&region), &params).map_err(|e| Error::new(&at("volume in"), e))?;
    // All that the service would make at its start, so that it has room there.
    let ring = crate::core::ring::bytes(params.stream_bytes);
    region.ensure(Segment::Stream, ring).map_err(|e| Error::new(&at("ring in"), e))?;
    // A region that was in use before starts afresh for the coordinator, too.
    forget_epoch(&config.region)
}

/// Takes a region that is about to be removed, which fails while its service runs, and tells programs that
/// still have their logs in it that nothing of them counts any more: they look for the service anew. The
/// region is this caller's as long as the value lives.
pub fn abandon(config: &NicfsConfig) -> Result<FileRegion, Error> {
    let error = |e| Error::new(&format!("region {}", config.region.display()), e);
    let region = FileRegion::open(&config.region, config.durability).map_err(error)?;
    region.lock().map_err(error)?;
    for segment in region.segments().map_err(error)? {
        if matches!(segment, Segment::Log(_)) {
            // Half of a log has no client.
            let _ = region.store64(segment, control::SEALED_AT, 0);
            let _ = region.store64(segment, control::STATE, control::STATE_EXPELLED);
        }
    }
    Ok(region)
}

/// A node that has lost some of what was reserved goes on with what there is.
pub(super) fn take_up_reserve(region: &FileRegion) -> Result<(), storage::volume::Fault> {
    let parsed = storage::volume::read_superblocks(region)?;
    let Some(superblock) = parsed.into_iter().flatten().next() else { return Ok(()) };
    let full = bytes_when_full(superblock.capacity_blocks * storage::limits::BLOCK_BYTES);
    let missing = region.take_up_reserve(full)?;
    if missing > 0 {
        let at = region.path().display();
        log::warn!("{at}: of the reserved space {} are gone; make room there", in_mib(missing));
    }
    Ok(())
}

pub(super) fn ring_bytes(media: &dyn Media) -> Result<u64, Error> {
    let parsed =
        storage::volume::read_superblocks(media).map_err(|e| Error::new("nicfs: superblock", e))?;
    let found = parsed.into_iter().reduce(|a, b| if a.is_ok() { a } else { b.or(a) });
    match found {
        Some(Ok(superblock)) => Ok(superblock.stream_bytes),
        Some(Err(e)) if media.size(Segment::Super).is_ok_and(|size| size > 0) => {
            Err(Error(format!("nicfs: {e}")))
        }
        _ => {
            Err(Error("nicfs: the region has no superblock; run `corbel mkfs` on it first".into()))
        }
    }
}
