//! Operations on attributes and extended attributes.

use base::InodeId;

use super::{Applied, Done, Fault, Refusal, Volume, corrupt};
use crate::format::entry::{Op, Stamp, mask};
use crate::format::item::{COLLISIONS_MAX, PIECE_BYTES, ReadClass, S_IFMT, kind, name_hash};
use crate::format::page::Key;
use crate::format::{Corrupt, Reader};
use crate::limits::{XATTR_NAME_MAX, XATTR_VALUE_MAX};

const XATTR: &str = "extended attribute";

/// Name, length of the value, and the first bytes of it, from piece 0.
fn first_piece(piece: &[u8]) -> Result<(&[u8], usize, &[u8]), Corrupt> {
    let mut r = Reader::new(XATTR, piece);
    let (name, len) = (r.u8()?, r.u32()? as usize);
    let name = r.bytes(name.into())?;
    if name.is_empty() || len > XATTR_VALUE_MAX {
        return Err(r.corrupt("has an illegal name or a value over the limit"));
    }
    Ok((name, len, r.rest()))
}

impl Volume {
    pub(super) fn set_attr(&mut self, op: &Op<'_>, now: Stamp) -> Done {
        let Op::SetAttr { ino, mask, mode, uid, gid, atime, mtime } = *op else {
            return Err(Refusal::Invalid);
        };
        if mask & !mask::ALL != 0 || mode & !0o7777 != 0 {
            return Err(Refusal::Invalid);
        }
        let mut inode = self.need(ino)?;
        let before = ReadClass::of(inode.mode, inode.uid, inode.gid);
        if mask & mask::MODE != 0 {
            inode.mode = (inode.mode & S_IFMT) | mode;
        }
        if mask & mask::UID != 0 {
            inode.uid = uid;
        }
        if mask & mask::GID != 0 {
            inode.gid = gid;
        }
        if mask & mask::ATIME != 0 {
            inode.atime = atime;
        }
        if mask & mask::MTIME != 0 {
            inode.mtime = mtime;
        }
        inode.ctime = now;
        let after = ReadClass::of(inode.mode, inode.uid, inode.gid);
        if before != after && inode.blocks > 0 {
            self.can_allocate(after, inode.blocks, inode.blocks)?;
            self.move_blocks(ino, after)?;
        }
        self.put_inode(ino, &inode)?;
        Ok(Applied::default())
    }

    /// First item that an attribute's name can have.
    fn xattr_item(&self, name: &[u8]) -> u64 {
        (name_hash(&self.superblock.uuid, name) >> 17).max(1) << 16
    }

    /// The item of piece 0 of an attribute: Ok where it is, Err where it could be (None: nowhere).
    fn find_xattr(&self, ino: InodeId, name: &[u8]) -> Result<Result<u64, Option<u64>>, Fault> {
        let first = self.xattr_item(name);
        let (mut found, mut failed, mut free) = (None, None, first);
        let to = Key::new(ino.0, kind::XATTR, first + (COLLISIONS_MAX << 8) - 1);
        self.tree.scan(Key::new(ino.0, kind::XATTR, first), to, &mut |key, value| {
            if key.item & 0xff != 0 {
                return true;
            }
            if key.item == free {
                free += 1 << 8;
            }
            match first_piece(value) {
                Ok((other, ..)) if other == name => found = Some(key.item),
                Ok(_) => {}
                Err(e) => failed = Some(e),
            }
            found.is_none() && failed.is_none()
        })?;
        if let Some(e) = failed {
            return Err(corrupt(ino)(e));
        }
        let free = (free < first + (COLLISIONS_MAX << 8)).then_some(free);
        Ok(found.ok_or(free))
    }

    pub(super) fn set_xattr(
        &mut self,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        now: Stamp,
    ) -> Done {
        let mut inode = self.need(ino)?;
        if name.is_empty() || name.len() > XATTR_NAME_MAX || value.len() > XATTR_VALUE_MAX {
            return Err(Refusal::Invalid);
        }
        let item = match self.find_xattr(ino, name)? {
            Ok(item) => {
                self.drop_pieces(ino, item)?;
                item
            }
            Err(None) => return Err(Refusal::NoSpace),
            Err(Some(item)) => {
                inode.xattrs += 1;
                item
            }
        };
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        piece.push(name.len() as u8);
        piece.extend_from_slice(&(value.len() as u32).to_le_bytes());
        piece.extend_from_slice(name);
        let (head, rest) = value.split_at(value.len().min(PIECE_BYTES - piece.len()));
        piece.extend_from_slice(head);
        self.tree.put(Key::new(ino.0, kind::XATTR, item), &piece)?;
        for (i, piece) in rest.chunks(PIECE_BYTES).enumerate() {
            self.tree.put(Key::new(ino.0, kind::XATTR, item + 1 + i as u64), piece)?;
        }
        inode.ctime = now;
        self.put_inode(ino, &inode)?;
        Ok(Applied::default())
    }

    fn drop_pieces(&mut self, ino: InodeId, item: u64) -> Result<(), Fault> {
        for piece in 0..256 {
            if !self.tree.remove(Key::new(ino.0, kind::XATTR, item + piece))? {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn remove_xattr(&mut self, ino: InodeId, name: &[u8], now: Stamp) -> Done {
        let mut inode = self.need(ino)?;
        let Ok(item) = self.find_xattr(ino, name)? else { return Err(Refusal::NoAttribute) };
        self.drop_pieces(ino, item)?;
        inode.xattrs = inode.xattrs.saturating_sub(1);
        inode.ctime = now;
        self.put_inode(ino, &inode)?;
        Ok(Applied::default())
    }

    /// Value of an extended attribute.
    pub fn xattr(&self, ino: InodeId, name: &[u8]) -> Result<Option<Vec<u8>>, Fault> {
        let Ok(item) = self.find_xattr(ino, name)? else { return Ok(None) };
        self.xattr_value(ino, item).map(Some)
    }

    fn xattr_value(&self, ino: InodeId, item: u64) -> Result<Vec<u8>, Fault> {
        let (mut value, mut want, mut failed) = (Vec::new(), 0, None);
        let key = |piece| Key::new(ino.0, kind::XATTR, item + piece);
        self.tree.scan(key(0), key(255), &mut |at, piece| {
            if at.item != item {
                value.extend_from_slice(piece);
                return value.len() < want;
            }
            match first_piece(piece) {
                Ok((_, len, head)) => {
                    want = len;
                    value.extend_from_slice(head);
                }
                Err(e) => failed = Some(e),
            }
            failed.is_none() && value.len() < want
        })?;
        if failed.is_none() && value.len() != want {
            failed = Some(Corrupt::new(XATTR, "has pieces that do not add up to its length"));
        }
        failed.map_or(Ok(value), |e| Err(corrupt(ino)(e)))
    }

    /// Names of the extended attributes.
    pub fn xattrs(&self, ino: InodeId) -> Result<Vec<Vec<u8>>, Fault> {
        let (mut names, mut failed) = (Vec::new(), None);
        let (from, to) = (Key::new(ino.0, kind::XATTR, 0), Key::new(ino.0, kind::XATTR, u64::MAX));
        self.tree.scan(from, to, &mut |key, piece| {
            if key.item & 0xff == 0 {
                match first_piece(piece) {
                    Ok((name, ..)) => names.push(name.to_vec()),
                    Err(e) => failed = Some(e),
                }
            }
            failed.is_none()
        })?;
        failed.map_or(Ok(names), |e| Err(corrupt(ino)(e)))
    }
}
