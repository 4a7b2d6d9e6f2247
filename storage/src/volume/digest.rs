//! What a volume holds, whatever its physical layout: a digest, and a comparison byte by byte.
//!
//! Both need the copies of everything sealed to have been run, and nothing unpublished: then the
//! members of a chain that applied the stream up to the same position agree.

use base::{InodeId, crc32c};

use super::{Fault, Volume};
use crate::format::item::Inode;
use crate::format::item::{attr_key, name_hash};
use crate::format::page::Key;
use crate::limits::BLOCK_BYTES;

/// Differences reported at most.
pub const DIFFERENCES_MAX: usize = 100;

/// Bytes of a file read at a time.
const READ_BYTES: u64 = 256 * 1024;

/// Everything about an inode but its content and its access time.
#[derive(PartialEq, Eq, Debug)]
struct Facts {
    inode: Inode,
    names: Vec<(Vec<u8>, InodeId, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    target: Vec<u8>,
}

/// Folds bytes into a 64-bit state: SipHash keyed with what came before.
fn fold(state: u64, bytes: &[u8]) -> u64 {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&state.to_le_bytes());
    key[8..12].copy_from_slice(&crc32c(0, bytes).to_le_bytes());
    name_hash(&key, bytes)
}

impl Volume {
    /// Up to `max` inodes after `after`, by number.
    pub fn inodes_after(&self, after: InodeId, max: usize) -> Result<Vec<InodeId>, Fault> {
        let mut found = Vec::new();
        let mut next = after.0.checked_add(1);
        while let Some(ino) = next.filter(|_| found.len() < max) {
            next = None;
            self.tree().scan(attr_key(InodeId(ino)), Key::MAX, &mut |key, _| {
                found.push(InodeId(key.ino));
                next = key.ino.checked_add(1);
                false
            })?;
        }
        Ok(found)
    }

    fn facts(&self, ino: InodeId) -> Result<Option<Facts>, Fault> {
        let Some(mut inode) = self.inode(ino)? else { return Ok(None) };
        let (mut names, mut xattrs) = (Vec::new(), Vec::new());
        self.readdir(ino, 2, usize::MAX, &mut |n| {
            names.push((n.name.to_vec(), n.ino, n.kind));
            true
        })?;
        names.sort_unstable();
        for name in self.xattrs(ino)? {
            let value = self.xattr(ino, &name)?.unwrap_or_default();
            xattrs.push((name, value));
        }
        xattrs.sort_unstable();
        inode.atime = Default::default();
        if inode.nlink == 0 {
            // Where a directory without a name once was.
            inode.parent = InodeId::NONE;
        }
        Ok(Some(Facts { inode, names, xattrs, target: self.symlink(ino)? }))
    }

    /// Digest of all names, attributes (without access times), extended
    /// attributes and contents, in the order of the inode numbers; and of which snapshots there are, and what each alone
    /// holds back. (What they show: [`Volume::read_snapshot`].)
    pub fn digest(&self) -> Result<u64, Fault> {
        let (mut state, mut at) = (0, InodeId::NONE);
        for stat in self.snapshots(0, usize::MAX) {
            state = fold(state, &stat.number.to_le_bytes());
            state = fold(state, &stat.own_blocks.to_le_bytes());
            state = fold(state, &stat.snapshot.encode());
        }
        while let [ino] = self.inodes_after(at, 1)?[..] {
            at = ino;
            let Some(facts) = self.facts(ino)? else { continue };
            state = fold(state, &ino.0.to_le_bytes());
            state = fold(state, &facts.inode.encode());
            for (name, child, kind) in &facts.names {
                state = fold(state, name);
                state = fold(state, &child.0.to_le_bytes());
                state = fold(state, &kind.to_le_bytes());
            }
            for (name, value) in &facts.xattrs {
                state = fold(fold(state, name), value);
            }
            state = fold(state, &facts.target);
            self.each_part(ino, &mut |offset, part| {
                for (i, block) in part.chunks(BLOCK_BYTES as usize).enumerate() {
                    // A block of zeroes and a hole are the same.
                    if block.iter().any(|&b| b != 0) {
                        let end = block.iter().rposition(|&b| b != 0).map_or(0, |i| i + 1);
                        let number = offset / BLOCK_BYTES + i as u64;
                        state = fold(state, &number.to_le_bytes());
                        state = fold(state, &block[..end]);
                    }
                }
                true
            })?;
        }
        Ok(state)
    }

    /// Shows the parts of a file that are not holes, in blocks, until `show` returns false.
    fn each_part(
        &self,
        ino: InodeId,
        show: &mut dyn FnMut(u64, &[u8]) -> bool,
    ) -> Result<(), Fault> {
        let mut buf = vec![0; READ_BYTES as usize];
        let mut at = 0;
        while let [extent] = self.extents(ino, at, 1)?[..] {
            let end = extent.offset + extent.len;
            at = at.max(extent.offset);
            while at < end {
                let want = (end - at).min(READ_BYTES) as usize;
                let got = self.read_file(ino, at, &mut buf[..want])?;
                if got == 0 || !show(at, &buf[..got]) {
                    return Ok(());
                }
                at += want as u64;
            }
        }
        Ok(())
    }

    /// Compares with another volume, byte for byte; says what differs (at most
    /// [`DIFFERENCES_MAX`] lines).
    pub fn differences(&self, other: &Volume) -> Result<Vec<String>, Fault> {
        let (mut found, mut at) = (Vec::new(), InodeId::NONE);
        let snapshots = [self.snapshots(0, usize::MAX), other.snapshots(0, usize::MAX)];
        if snapshots[0] != snapshots[1] {
            found.push(format!("snapshots: {:?} against {:?}", snapshots[0], snapshots[1]));
        }
        loop {
            let mine = self.inodes_after(at, 1)?.first().copied();
            let theirs = other.inodes_after(at, 1)?.first().copied();
            let next = [mine, theirs].into_iter().flatten().min();
            let Some(ino) = next.filter(|_| found.len() < DIFFERENCES_MAX) else { break };
            at = ino;
            match (self.facts(ino)?, other.facts(ino)?) {
                (Some(a), Some(b)) if a != b => {
                    found.push(format!("inode {ino}: {a:?} against {b:?}"));
                }
                (Some(a), Some(_)) if a.inode.is_file() => {
                    if let Some(offset) = self.first_difference(other, ino, a.inode.size)? {
                        found.push(format!("inode {ino}: differs from byte {offset} on"));
                    }
                }
                (Some(_), Some(_)) | (None, None) => {}
                (a, _) => {
                    let side = if a.is_some() { "first" } else { "second" };
                    found.push(format!("inode {ino}: exists only on the {side}"));
                }
            }
        }
        Ok(found)
    }

    fn first_difference(
        &self,
        other: &Volume,
        ino: InodeId,
        size: u64,
    ) -> Result<Option<u64>, Fault> {
        let (mut a, mut b) = (vec![0; READ_BYTES as usize], vec![0; READ_BYTES as usize]);
        // Each side's parts against the other: what is a hole in both needs no reading.
        for (x, y) in [(self, other), (other, self)] {
            let mut at = 0;
            while let [extent] = x.extents(ino, at, 1)?[..] {
                let end = (extent.offset + extent.len).min(size);
                at = at.max(extent.offset);
                while at < end {
                    let want = (end - at).min(READ_BYTES) as usize;
                    let got = x.read_file(ino, at, &mut a[..want])?;
                    let same = y.read_file(ino, at, &mut b[..want])? == got && a[..got] == b[..got];
                    if !same {
                        return Ok(Some(at));
                    }
                    at += want as u64;
                }
                at = at.max(extent.offset + extent.len);
            }
        }
        Ok(None)
    }
}
