//! What the coordinator must not forget, and the file that keeps it.
//!
//! ```text
//! offset  size  field
//!      0     4  magic       "CBCS"
//!      4     4  version     1, or 2 as soon as a volume has a level above the first
//!      8     4  checksum    CRC32C of all bytes from 12 on
//!     12     4  length      of the whole file
//!     16    16  cluster     identity
//!     32     8  generation  grows by one with each write
//!     40     2  volumes     count; each:
//!               string      name (u16 length, bytes)
//!               u32         epoch
//!               u16         level of the volume (base::level), from version 2 on
//!               u16         members of the chain, head first; each u32 node, u64 incarnation
//! ```
//!
//! The file is replaced as a whole: written to `state.new`, synced, renamed to `state`, and the
//! folder synced. A crash at any point leaves the old file or the new one.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use base::wire::{Corrupt, Reader, Writer};
use base::{Epoch, Level, NodeId, crc32c};

use super::message::{NODES_MAX, valid_name};

const MAGIC: u32 = u32::from_le_bytes(*b"CBCS");
/// What any program reads; a newer one is written only when all nodes have been updated.
const OLDEST: u32 = 1;
const VERSION: u32 = 2;
const NAME: &str = "coordinator state";
const LENGTH_MAX: u64 = 1 << 20;
const VOLUMES_MAX: usize = 64;

/// A place in a chain: a node, and the process that held it. Another incarnation of the node is
/// not in the chain, it only may have the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seat {
    /// Which node.
    pub node: NodeId,
    /// Which of its processes.
    pub incarnation: u64,
}

/// A volume's chain.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Chain {
    /// 0 before the first.
    pub epoch: Epoch,
    /// What all nodes understand; never falls.
    pub level: Level,
    /// Head first.
    pub seats: Vec<Seat>,
}

/// Everything that survives a restart.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Image {
    /// Identity of the cluster.
    pub cluster: u128,
    /// Grows by one with each write.
    pub generation: u64,
    /// By name.
    pub volumes: BTreeMap<String, Chain>,
}

impl Image {
    /// The oldest that has all of it.
    fn version(&self) -> u32 {
        let first = self.volumes.values().all(|chain| chain.level <= Level::FIRST);
        if first { OLDEST } else { VERSION }
    }

    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let w = &mut Writer(&mut bytes);
        let version = self.version();
        w.u32(MAGIC).u32(version).u32(0).u32(0).u128(self.cluster).u64(self.generation);
        w.u16(self.volumes.len() as u16);
        for (name, chain) in &self.volumes {
            w.u16(name.len() as u16).bytes(name.as_bytes());
            w.u32(chain.epoch.0);
            if version > OLDEST {
                w.u16(chain.level.0);
            }
            w.u16(chain.seats.len() as u16);
            for seat in &chain.seats {
                w.u32(seat.node.0).u64(seat.incarnation);
            }
        }
        let length = bytes.len() as u32;
        bytes[12..16].copy_from_slice(&length.to_le_bytes());
        let crc = crc32c(0, &bytes[12..]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads and checks the file's bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let r = &mut Reader::new(NAME, bytes);
        if r.u32()? != MAGIC {
            return Err(r.corrupt("does not begin with its magic"));
        }
        let version = r.u32()?;
        let whole =
            bytes.get(8..12).is_some_and(|crc| crc == crc32c(0, &bytes[12..]).to_le_bytes());
        if version > VERSION && whole {
            return Err(r.corrupt(
                "is of a newer version than this program, and not damaged: update the coordinator",
            ));
        }
        if !(OLDEST..=VERSION).contains(&version) {
            return Err(r.corrupt("has an unknown version"));
        }
        let (crc, length) = (r.u32()?, r.u32()?);
        if length as usize != bytes.len() {
            return Err(r.corrupt("does not have the length that it gives"));
        }
        if crc != crc32c(0, &bytes[12..]) {
            return Err(r.corrupt("does not match its checksum"));
        }
        let (cluster, generation) = (r.u128()?, r.u64()?);
        let mut volumes = BTreeMap::new();
        let count = usize::from(r.u16()?);
        if count > VOLUMES_MAX {
            return Err(r.corrupt("has more than 64 volumes"));
        }
        for _ in 0..count {
            let len = usize::from(r.u16()?);
            let name = String::from_utf8_lossy(r.bytes(len)?).into_owned();
            let chain = Chain::take(version, r)?;
            if volumes.last_key_value().is_some_and(|(last, _)| *last >= name) {
                return Err(r.corrupt("has volumes out of order, or one twice"));
            }
            if !valid_name(&name) {
                return Err(r.corrupt("has an invalid volume name"));
            }
            volumes.insert(name, chain);
        }
        r.end()?;
        let image = Self { cluster, generation, volumes };
        if image.version() != version {
            return Err(r.corrupt("is of a version that nothing in it needs"));
        }
        Ok(image)
    }
}

impl Chain {
    fn take(version: u32, r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let epoch = Epoch(r.u32()?);
        let level = if version > OLDEST { Level(r.u16()?) } else { Level::FIRST };
        if level < Level::FIRST {
            return Err(r.corrupt("has a volume of level 0, which is none"));
        }
        let count = usize::from(r.u16()?);
        if count > NODES_MAX || (count == 0) != (epoch.0 == 0) {
            return Err(r.corrupt("has a chain of impossible length"));
        }
        let mut seats: Vec<Seat> = Vec::with_capacity(count);
        for _ in 0..count {
            let seat = Seat { node: NodeId(r.u32()?), incarnation: r.u64()? };
            if seat.node.0 == 0 || seats.iter().any(|s| s.node == seat.node) {
                return Err(r.corrupt("has node 0, or a node twice, in a chain"));
            }
            seats.push(seat);
        }
        Ok(Self { epoch, level, seats })
    }
}

/// The folder of the state file.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    /// Keeps two coordinators from one folder; released when the process ends, however it ends.
    lock: File,
}

impl Drop for Store {
    fn drop(&mut self) {
        // A child that this process is about to execute has the descriptor, too, for a moment.
        let _ = rustix::fs::flock(&self.lock, rustix::fs::FlockOperation::Unlock);
    }
}

fn explain(error: &io::Error, what: &str, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {what} {}: {error}", path.display()))
}

impl Store {
    /// Opens the folder (made if missing) and reads the state; [`None`] if there is none yet.
    pub fn open(folder: &Path) -> io::Result<(Self, Option<Image>)> {
        fs::create_dir_all(folder).map_err(|e| explain(&e, "make the folder", folder))?;
        let lock_path = folder.join("lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .map_err(|e| explain(&e, "open", &lock_path))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
            |_| {
                let path = folder.display();
                io::Error::other(format!("{path}: another coordinator uses this folder; stop it"))
            },
        )?;
        let store = Self { folder: folder.to_owned(), lock };
        let image = store.read()?;
        Ok((store, image))
    }

    fn read(&self) -> io::Result<Option<Image>> {
        let path = self.folder.join("state");
        let file = match fs::metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(explain(&e, "read", &path)),
            Ok(file) => file,
        };
        let remedy = format!(
            "{}: the coordinator does not guess who has the data. Restore the file from a backup; \
             if there is none, move it away and make the volume anew",
            path.display()
        );
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        if file.len() > LENGTH_MAX {
            return Err(invalid(format!("{NAME}: is longer than 1 MiB; {remedy}")));
        }
        let bytes = fs::read(&path).map_err(|e| explain(&e, "read", &path))?;
        Image::decode(&bytes).map(Some).map_err(|e| invalid(format!("{e}; {remedy}")))
    }

    /// Replaces the state. When it returns, the new one is what the next start reads. After an
    /// error either may be: do not go on.
    pub fn write(&self, image: &Image) -> io::Result<()> {
        let (new, path) = (self.folder.join("state.new"), self.folder.join("state"));
        let mut file = File::create(&new).map_err(|e| explain(&e, "write", &new))?;
        file.write_all(&image.encode()).map_err(|e| explain(&e, "write", &new))?;
        file.sync_all().map_err(|e| explain(&e, "sync", &new))?;
        fs::rename(&new, &path).map_err(|e| explain(&e, "replace", &path))?;
        let folder = File::open(&self.folder).map_err(|e| explain(&e, "open", &self.folder))?;
        folder.sync_all().map_err(|e| explain(&e, "sync", &self.folder))
    }
}
