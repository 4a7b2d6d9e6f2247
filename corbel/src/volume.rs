//! The volume of the local node, for verbs that look at it and change it.

use std::path::Path;
use std::sync::Arc;

use base::{Errno, InodeId};
use client::fs::{Caller, FileSystem, Handle, SnapshotRecord};
use client::path::{Walked, walk};

use crate::cli::Global;
use crate::failure::Result;

/// Directories on the way to the root, at most, when a path is looked for.
const DEPTH_MAX: usize = 1000;

/// The volume, as the user of this command sees it.
pub struct Volume {
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    uid: u32,
    gid: u32,
}

impl Volume {
    /// The volume of the node behind a socket, or behind that of the configuration.
    ///
    /// # Errors
    /// There is no configuration, or the node does not answer.
    pub fn open(global: &Global, socket: Option<&Path>) -> Result<Self> {
        let socket = match socket {
            Some(socket) => socket.to_owned(),
            None => global.load()?.node.socket,
        };
        let fs = crate::mount::open_source(&socket.display().to_string())?;
        let uid = rustix::process::geteuid().as_raw();
        Ok(Self { fs, uid, gid: rustix::process::getegid().as_raw() })
    }

    /// On whose behalf things are done.
    pub fn caller(&self) -> Caller<'static> {
        Caller { uid: self.uid, gid: self.gid, ..Caller::ROOT }
    }

    /// The directory with that path in the volume.
    ///
    /// # Errors
    /// There is none.
    pub fn at(&self, path: &Path) -> std::result::Result<InodeId, Errno> {
        let bytes = path.as_os_str().as_encoded_bytes();
        match walk(&*self.fs, &self.caller(), InodeId::ROOT, bytes, true)? {
            Walked::At(found) => {
                let attr = found.existing()?;
                attr.is_dir().then_some(attr.ino).ok_or(Errno::NOTDIR)
            }
            Walked::Outside(_) => Err(Errno::XDEV),
        }
    }

    /// Names and inodes of a directory, without the dots.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn list(&self, dir: InodeId) -> std::result::Result<Vec<(Vec<u8>, InodeId, u32)>, Errno> {
        let mut all = Vec::new();
        self.fs.readdir(&self.caller(), dir, 0, &mut |entry| {
            if entry.name != b"." && entry.name != b".." {
                all.push((entry.name.to_vec(), entry.ino, entry.kind));
            }
            true
        })?;
        Ok(all)
    }

    /// All snapshots, from the oldest on.
    ///
    /// # Errors
    /// The node does not say.
    pub fn snapshots(&self) -> std::result::Result<Vec<SnapshotRecord>, Errno> {
        let mut all: Vec<SnapshotRecord> = Vec::new();
        loop {
            let more = self.fs.snapshots(all.last().map_or(0, |last| last.number))?;
            if more.is_empty() {
                return Ok(all);
            }
            all.extend(more);
        }
    }

    /// Writes all of these bytes to an open file.
    ///
    /// # Errors
    /// Some of them cannot be written.
    pub fn write_all(
        &self,
        file: Handle,
        mut offset: u64,
        mut bytes: &[u8],
    ) -> std::result::Result<(), Errno> {
        while !bytes.is_empty() {
            let n = self.fs.write(file, offset, bytes, false)?.len.min(bytes.len());
            if n == 0 {
                return Err(Errno::IO);
            }
            (offset, bytes) = (offset + n as u64, &bytes[n..]);
        }
        Ok(())
    }

    /// Path of a directory, found from below.
    pub fn path(&self, dir: InodeId) -> Option<String> {
        let (mut at, mut path): (_, Vec<Vec<u8>>) = (dir, Vec::new());
        for _ in 0..DEPTH_MAX {
            if at == InodeId::ROOT {
                let names: Vec<_> = path.iter().rev().map(|n| String::from_utf8_lossy(n)).collect();
                return Some(format!("/{}", names.join("/")));
            }
            let above = self.fs.lookup(&self.caller(), at, b"..").ok()?.ino;
            let (name, ..) = self.list(above).ok()?.into_iter().find(|(_, ino, _)| *ino == at)?;
            path.push(name);
            at = above;
        }
        None
    }
}
