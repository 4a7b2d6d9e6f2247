//! Operations on attributes and extended attributes.

use std::sync::Arc;

use base::InodeId;

use super::{Applied, Done, Fault, Refusal, Volume, corrupt};
use crate::acl::{self, Acl};
use crate::format::entry::{Op, Stamp, mask};
use crate::format::item::{
    COLLISIONS_MAX, Inode, PIECE_BYTES, ReadClass, S_IFDIR, S_IFLNK, S_IFMT, XATTRS_MAX,
};
use crate::format::item::{kind, name_hash};
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

/// Pieces in which an attribute is stored: length of its name, length of its value, name, value.
fn pieces_of(name: &[u8], len: usize) -> u32 {
    u32::try_from((1 + 4 + name.len() + len).div_ceil(PIECE_BYTES)).unwrap_or(u32::MAX)
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
        let (before, was) = (inode.class(), inode);
        let let_in = inode.lets_in();
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
        self.may_give(&was, inode.uid)?;
        self.may_reclass(ino, &inode, before)?;
        if mask & mask::MODE != 0
            && inode.acl
            && let Some(acl) = self.acl(ino, acl::ACCESS)?
        {
            let mut acl = Acl::clone(&acl);
            acl.chmod(mode);
            self.put_xattr(ino, &mut inode, acl::ACCESS, &acl.encode())?;
        }
        self.reclass(ino, &inode, before)?;
        if was.uid != inode.uid {
            self.account_inode(&was, false);
            self.account_inode(&inode, true);
        }
        self.lets_in_others(ino, &inode, let_in)?;
        self.put_inode(ino, &inode)?;
        Ok(Applied::default())
    }

    /// Whether the blocks of an inode can move to the arena of the class that it has now.
    pub(super) fn may_reclass(
        &self,
        ino: InodeId,
        inode: &Inode,
        before: ReadClass,
    ) -> Result<(), Refusal> {
        if before != inode.class() && inode.blocks > 0 {
            self.can_move(ino, inode.class(), (self.moved.upto(ino), u64::MAX))?;
        }
        Ok(())
    }

    pub(super) fn reclass(
        &mut self,
        ino: InodeId,
        inode: &Inode,
        before: ReadClass,
    ) -> Result<(), Fault> {
        if before != inode.class() && inode.blocks > 0 {
            self.move_blocks(ino, inode.class(), (self.moved.upto(ino), u64::MAX))?;
        }
        Ok(())
    }

    /// An access list, or none.
    pub(super) fn acl(&self, ino: InodeId, name: &[u8]) -> Result<Option<Arc<Acl>>, Fault> {
        let Some(value) = self.xattr(ino, name)? else { return Ok(None) };
        Ok(Acl::decode(&value).map_err(corrupt(ino))?.map(Arc::new))
    }

    /// Sets (or, with an empty value, removes) an access list. The mode follows an access list, and
    /// one that says no more than a mode is only that.
    pub(super) fn set_acl(&mut self, ino: InodeId, name: &[u8], value: &[u8], now: Stamp) -> Done {
        let mut inode = self.need(ino)?;
        let list = Acl::decode(value).map_err(|_| Refusal::Invalid)?;
        let is_default = name == acl::DEFAULT;
        if inode.is_link() {
            return Err(Refusal::Unsupported);
        }
        if is_default && !inode.is_dir() {
            return if list.is_some() { Err(Refusal::Invalid) } else { Ok(Applied::default()) };
        }
        let (before, let_in) = (inode.class(), inode.lets_in());
        let had = if is_default { inode.default_acl } else { inode.acl };
        let kept = list.as_ref().filter(|list| is_default || !list.is_minimal());
        if is_default {
            inode.default_acl = kept.is_some();
        } else {
            inode.acl = kept.is_some();
            if let Some(list) = &list {
                inode.mode = inode.mode & !0o777 | list.mode();
            }
        }
        self.may_reclass(ino, &inode, before)?;
        let kept = kept.map(Acl::encode);
        let (weight, had_blocks) = (inode.weight(), inode.attribute_blocks());
        if let Some(list) = &kept {
            let grown = Inode { xattrs: self.pieces_with(ino, &inode, name, list)?, ..inode };
            self.may_take(&inode, grown.attribute_blocks().saturating_sub(had_blocks), 0)?;
        }
        match kept {
            Some(list) => self.put_xattr(ino, &mut inode, name, &list)?,
            None if had => self.drop_xattr(ino, &mut inode, name)?,
            None => {}
        }
        self.account_change(&inode, weight);
        self.reclass(ino, &inode, before)?;
        self.lets_in_others(ino, &inode, let_in)?;
        inode.ctime = now;
        self.put_inode(ino, &inode)?;
        Ok(Applied::default())
    }

    /// What the lists that a new inode of this type gets from its directory count as; or more.
    pub(super) fn inherited_blocks(
        &self,
        parent: (InodeId, &Inode),
        mode: u32,
    ) -> Result<u64, Fault> {
        let (parent, dir) = parent;
        if !dir.default_acl {
            return Ok(0);
        }
        let Some(list) = self.acl(parent, acl::DEFAULT)? else { return Ok(0) };
        let lists = match mode & S_IFMT {
            S_IFLNK => 0,
            S_IFDIR => 2,
            _ => 1,
        };
        let xattrs = lists * pieces_of(acl::DEFAULT, list.encode().len());
        Ok(Inode { xattrs, ..Inode::default() }.attribute_blocks())
    }

    /// What a new inode gets from the default list of its directory: permission bits and a list of
    /// its own.
    pub(super) fn inherit(
        &mut self,
        parent: (InodeId, &Inode),
        ino: InodeId,
        inode: &mut Inode,
    ) -> Result<(), Refusal> {
        let (parent, dir) = parent;
        if !dir.default_acl || inode.is_link() {
            return Ok(());
        }
        let Some(list) = self.acl(parent, acl::DEFAULT)? else { return Ok(()) };
        let (mode, own) = list.inherited(inode.mode);
        (inode.mode, inode.acl) = (mode, own.is_some());
        if let Some(own) = own {
            self.put_xattr(ino, inode, acl::ACCESS, &own.encode())?;
        }
        if inode.is_dir() {
            inode.default_acl = true;
            self.put_xattr(ino, inode, acl::DEFAULT, &list.encode())?;
        }
        Ok(())
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
        let before = inode.weight();
        let grown = Inode { xattrs: self.pieces_with(ino, &inode, name, value)?, ..inode };
        self.may_take(
            &inode,
            grown.attribute_blocks().saturating_sub(inode.attribute_blocks()),
            0,
        )?;
        self.put_xattr(ino, &mut inode, name, value)?;
        self.account_change(&inode, before);
        inode.ctime = now;
        self.put_inode(ino, &inode)?;
        Ok(Applied::default())
    }

    /// Pieces of attributes that an inode will have.
    fn pieces_with(
        &self,
        ino: InodeId,
        inode: &Inode,
        name: &[u8],
        value: &[u8],
    ) -> Result<u32, Refusal> {
        let had = match self.find_xattr(ino, name)? {
            Ok(item) => self.pieces(ino, item)?,
            Err(_) => 0,
        };
        let more = pieces_of(name, value.len());
        let pieces = inode.xattrs.saturating_sub(had).saturating_add(more);
        if pieces > XATTRS_MAX { Err(Refusal::NoSpace) } else { Ok(pieces) }
    }

    /// Pieces of one attribute.
    fn pieces(&self, ino: InodeId, item: u64) -> Result<u32, Fault> {
        let key = |piece| Key::new(ino.0, kind::XATTR, item + piece);
        let mut pieces = 0;
        self.tree.scan(key(0), key(255), &mut |_, _| {
            pieces += 1;
            true
        })?;
        Ok(pieces)
    }

    /// Stores an extended attribute; the caller stores the inode, and counts what it takes.
    fn put_xattr(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        name: &[u8],
        value: &[u8],
    ) -> Result<(), Refusal> {
        let item = match self.find_xattr(ino, name)? {
            Ok(item) => {
                inode.xattrs = inode.xattrs.saturating_sub(self.drop_pieces(ino, item)?);
                item
            }
            Err(Some(item)) => item,
            Err(None) => return Err(Refusal::NoSpace),
        };
        inode.xattrs = inode.xattrs.saturating_add(pieces_of(name, value.len())).min(XATTRS_MAX);
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
        Ok(())
    }

    /// Removes an attribute's pieces; how many they were.
    fn drop_pieces(&mut self, ino: InodeId, item: u64) -> Result<u32, Fault> {
        let mut pieces = 0;
        while pieces < 256
            && self.tree.remove(Key::new(ino.0, kind::XATTR, item + u64::from(pieces)))?
        {
            pieces += 1;
        }
        Ok(pieces)
    }

    pub(super) fn remove_xattr(&mut self, ino: InodeId, name: &[u8], now: Stamp) -> Done {
        let mut inode = self.need(ino)?;
        let before = inode.weight();
        self.drop_xattr(ino, &mut inode, name)?;
        self.account_change(&inode, before);
        inode.ctime = now;
        self.put_inode(ino, &inode)?;
        Ok(Applied::default())
    }

    /// Removes an extended attribute; the caller stores the inode.
    fn drop_xattr(&mut self, ino: InodeId, inode: &mut Inode, name: &[u8]) -> Result<(), Refusal> {
        let Ok(item) = self.find_xattr(ino, name)? else { return Err(Refusal::NoAttribute) };
        inode.xattrs = inode.xattrs.saturating_sub(self.drop_pieces(ino, item)?);
        Ok(())
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
