//! Operations on the namespace.

use base::InodeId;
use base::planted::{Bug, planted};

use super::{Applied, Done, Fault, Refusal, Volume, corrupt};
use crate::format::entry::{Op, Stamp, name_is_legal};
use crate::format::item::{self, COLLISIONS_MAX, Inode, PIECE_BYTES, attr_key, kind, name_hash};
use crate::format::page::Key;
use crate::limits::{LINK_MAX, TARGET_MAX};

/// A name found in a directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub item: u64,
    pub ino: InodeId,
    pub kind: u32,
}

const ALREADY: Done = Ok(Applied { orphaned: None, already: true });

impl Volume {
    /// First item that a name can have.
    fn name_item(&self, name: &[u8]) -> u64 {
        let hash = name_hash(&self.superblock.uuid, name) >> 9;
        hash.max(1) << 8
    }

    pub(super) fn find_name(&self, dir: InodeId, name: &[u8]) -> Result<Option<Found>, Fault> {
        if self.condemned.get() {
            return Err(Fault::Condemned);
        }
        let first = self.name_item(name);
        let (mut found, mut failed) = (None, None);
        let to = Key::new(dir.0, kind::NAME, first + COLLISIONS_MAX - 1);
        self.tree.scan(Key::new(dir.0, kind::NAME, first), to, &mut |key, value| {
            match item::decode_name(value) {
                Ok((ino, kind, other)) if other == name => {
                    found = Some(Found { item: key.item, ino, kind });
                }
                Ok(_) => {}
                Err(e) => failed = Some(e),
            }
            found.is_none() && failed.is_none()
        })?;
        failed.map_or(Ok(found), |e| Err(corrupt(dir)(e)))
    }

    /// A free item for a new name.
    fn free_item(&self, dir: InodeId, name: &[u8]) -> Result<u64, Refusal> {
        let first = self.name_item(name);
        let mut free = first;
        let to = Key::new(dir.0, kind::NAME, first + COLLISIONS_MAX - 1);
        self.tree.scan(Key::new(dir.0, kind::NAME, first), to, &mut |key, _| {
            let taken = key.item == free;
            free += u64::from(taken);
            taken
        })?;
        if free < first + COLLISIONS_MAX { Ok(free) } else { Err(Refusal::NoSpace) }
    }

    fn put_name(
        &mut self,
        dir: InodeId,
        item: u64,
        ino: InodeId,
        mode: u32,
        name: &[u8],
    ) -> Result<(), Fault> {
        let mut value = [0u8; 9 + 255];
        value[0..8].copy_from_slice(&ino.0.to_le_bytes());
        value[8] = ((mode & item::S_IFMT) >> 12) as u8;
        value[9..9 + name.len()].copy_from_slice(name);
        self.tree.put(Key::new(dir.0, kind::NAME, item), &value[..9 + name.len()])
    }

    /// Stores a directory that gained or lost names, with its times.
    fn touch_dir(&mut self, ino: InodeId, dir: &mut Inode, now: Stamp) -> Result<(), Fault> {
        (dir.mtime, dir.ctime) = (now, now);
        self.put_inode(ino, dir)
    }

    pub(super) fn create(&mut self, op: &Op<'_>, now: Stamp) -> Done {
        let Op::Create { ino, parent, mode, rdev, uid, gid, name, target } = *op else {
            return Err(Refusal::Invalid);
        };
        if !name_is_legal(name) {
            return Err(Refusal::BadName);
        }
        if ino.0 == 0 || !mode_is_legal(mode, rdev, target) {
            return Err(Refusal::Invalid);
        }
        let mut dir = self.need_dir(parent)?;
        if let Some(found) = self.find_name(parent, name)? {
            return if found.ino == ino { ALREADY } else { Err(Refusal::Exists) };
        }
        if self.inode(ino)?.is_some() {
            return Err(Refusal::Exists);
        }
        let is_dir = mode & item::S_IFMT == item::S_IFDIR;
        if is_dir && dir.nlink >= LINK_MAX {
            return Err(Refusal::TooManyLinks);
        }
        let item = self.free_item(parent, name)?;
        let mut inode = Inode {
            mode,
            nlink: if is_dir { 2 } else { 1 },
            uid,
            gid,
            rdev,
            size: target.len() as u64,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            parent: if is_dir { parent } else { InodeId::NONE },
            project: dir.project,
            reach: dir.lets_in(),
            ..Default::default()
        };
        self.may_take(&inode, self.inherited_blocks((parent, &dir), mode)?, 1)?;
        self.inherit((parent, &dir), ino, &mut inode)?;
        self.put_inode(ino, &inode)?;
        for (i, piece) in target.chunks(PIECE_BYTES).enumerate() {
            self.tree.put(Key::new(ino.0, kind::TARGET, i as u64), piece)?;
        }
        self.put_name(parent, item, ino, mode, name)?;
        dir.entries += 1;
        dir.nlink += u32::from(is_dir);
        self.touch_dir(parent, &mut dir, now)?;
        self.account_inode(&inode, true);
        self.inodes += 1;
        self.last_inode = self.last_inode.max(ino.0);
        Ok(Applied::default())
    }

    /// Makes a regular file without a name. Only the inode is new: its directory says where it
    /// belongs, and does not change.
    pub(super) fn tmpfile(&mut self, op: &Op<'_>, now: Stamp) -> Done {
        let Op::Tmpfile { ino, parent, mode, uid, gid, linkable } = *op else {
            return Err(Refusal::Invalid);
        };
        if ino.0 == 0 || mode & item::S_IFMT != item::S_IFREG || !mode_is_legal(mode, 0, &[]) {
            return Err(Refusal::Invalid);
        }
        let dir = self.need_dir(parent)?;
        if let Some(inode) = self.inode(ino)? {
            let same = inode.nlink == 0 && self.is_linkable(ino)? == linkable;
            return if same && inode.is_file() { ALREADY } else { Err(Refusal::Exists) };
        }
        let times = Inode { atime: now, mtime: now, ctime: now, btime: now, ..Default::default() };
        let mut inode =
            Inode { mode, uid, gid, project: dir.project, reach: dir.lets_in(), ..times };
        self.may_take(&inode, self.inherited_blocks((parent, &dir), mode)?, 1)?;
        self.inherit((parent, &dir), ino, &mut inode)?;
        self.put_inode(ino, &inode)?;
        self.tree.put(Key::new(0, kind::ORPHAN, ino.0), item::orphan_value(linkable))?;
        self.account_inode(&inode, true);
        self.inodes += 1;
        self.last_inode = self.last_inode.max(ino.0);
        Ok(Applied { orphaned: Some(ino), already: false })
    }

    pub(super) fn link(&mut self, ino: InodeId, parent: InodeId, name: &[u8], now: Stamp) -> Done {
        if !name_is_legal(name) {
            return Err(Refusal::BadName);
        }
        let mut dir = self.need_dir(parent)?;
        let mut inode = self.need(ino)?;
        if inode.is_dir() {
            return Err(Refusal::NotPermitted);
        }
        if let Some(found) = self.find_name(parent, name)? {
            return if found.ino == ino { ALREADY } else { Err(Refusal::Exists) };
        }
        if inode.nlink == 0 && !self.is_linkable(ino)? {
            return Err(Refusal::NoEntry);
        }
        if inode.nlink >= LINK_MAX {
            return Err(Refusal::TooManyLinks);
        }
        if inode.project != dir.project {
            return Err(Refusal::CrossQuota);
        }
        let before = inode.weight();
        if inode.nlink > 0 {
            self.may_take(&inode, 0, 1)?;
        }
        let item = self.free_item(parent, name)?;
        self.put_name(parent, item, ino, inode.mode, name)?;
        if inode.nlink == 0 {
            self.tree.remove(Key::new(0, kind::ORPHAN, ino.0))?;
        }
        // One without a name belongs where it gets one.
        let also = inode.nlink > 0;
        self.reached_by(ino, &mut inode, dir.lets_in(), also)?;
        inode.nlink += 1;
        inode.ctime = now;
        self.account_change(&inode, before);
        self.put_inode(ino, &inode)?;
        dir.entries += 1;
        self.touch_dir(parent, &mut dir, now)?;
        Ok(Applied::default())
    }

    /// The name that an operation removes. Err(ALREADY-like) is told apart by `Ok(None)`: the name
    /// is gone and so is the inode.
    fn name_to_remove(
        &self,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Option<Found>, Refusal> {
        match self.find_name(parent, name)? {
            Some(found) if found.ino == ino => Ok(Some(found)),
            Some(_) => Err(Refusal::Mismatch),
            None => match self.inode(ino)? {
                Some(inode) if inode.nlink > 0 => Err(Refusal::NoEntry),
                _ => Ok(None),
            },
        }
    }

    pub(super) fn unlink(
        &mut self,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
        now: Stamp,
    ) -> Done {
        let mut dir = self.need_dir(parent)?;
        let Some(found) = self.name_to_remove(ino, parent, name)? else { return ALREADY };
        let mut inode = self.need(ino)?;
        if inode.is_dir() {
            return Err(Refusal::IsDirectory);
        }
        self.tree.remove(Key::new(parent.0, kind::NAME, found.item))?;
        let orphaned = self.drop_link(ino, &mut inode, now)?;
        dir.entries = dir.entries.saturating_sub(1);
        self.touch_dir(parent, &mut dir, now)?;
        Ok(Applied { orphaned, already: false })
    }

    pub(super) fn rmdir(&mut self, ino: InodeId, parent: InodeId, name: &[u8], now: Stamp) -> Done {
        let mut dir = self.need_dir(parent)?;
        let Some(found) = self.name_to_remove(ino, parent, name)? else { return ALREADY };
        let mut inode = self.need(ino)?;
        if !inode.is_dir() {
            return Err(Refusal::NotDirectory);
        }
        if inode.entries > 0 && !planted(Bug::NotEmptyRemoved) {
            return Err(Refusal::NotEmpty);
        }
        self.tree.remove(Key::new(parent.0, kind::NAME, found.item))?;
        let orphaned = self.drop_link(ino, &mut inode, now)?;
        dir.entries = dir.entries.saturating_sub(1);
        dir.nlink = dir.nlink.saturating_sub(1);
        self.touch_dir(parent, &mut dir, now)?;
        Ok(Applied { orphaned, already: false })
    }

    /// Takes one link (of a directory: the last) from an inode and stores it.
    fn drop_link(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        now: Stamp,
    ) -> Result<Option<InodeId>, Fault> {
        let before = inode.weight();
        inode.nlink = if inode.is_dir() { 0 } else { inode.nlink.saturating_sub(1) };
        inode.ctime = now;
        self.account_change(inode, before);
        self.put_inode(ino, inode)?;
        if inode.nlink > 0 {
            return Ok(None);
        }
        self.tree.put(Key::new(0, kind::ORPHAN, ino.0), item::orphan_value(false))?;
        Ok(Some(ino))
    }

    /// Whether `dir` is `ancestor` or lies below it.
    fn lies_below(&self, dir: InodeId, ancestor: InodeId) -> Result<bool, Refusal> {
        let mut at = dir;
        for _ in 0..=self.inodes {
            if at == ancestor {
                return Ok(true);
            }
            if at == InodeId::ROOT {
                return Ok(false);
            }
            at = self.need_dir(at)?.parent;
        }
        let what = base::wire::Corrupt::new("directory", "is its own ancestor");
        Err(corrupt(dir)(what).into())
    }

    pub(super) fn rename(&mut self, op: &Op<'_>, now: Stamp) -> Done {
        let Op::Rename {
            ino,
            parent,
            name,
            new_parent,
            new_name,
            replaced,
            noreplace,
            exchange,
            ..
        } = *op
        else {
            return Err(Refusal::Invalid);
        };
        if !name_is_legal(name) || !name_is_legal(new_name) {
            return Err(Refusal::BadName);
        }
        if noreplace && exchange {
            return Err(Refusal::Invalid);
        }
        self.need_dir(parent)?;
        self.need_dir(new_parent)?;
        let old = self.find_name(parent, name)?;
        let new = self.find_name(new_parent, new_name)?;
        let holds = new.is_some_and(|n| n.ino == ino);
        if exchange {
            let (Some(old), Some(new)) = (old, new) else { return Err(Refusal::NoEntry) };
            if holds && old.ino == replaced {
                return ALREADY;
            }
            if old.ino != ino || new.ino != replaced {
                return Err(Refusal::Mismatch);
            }
            return self.swap_names((parent, name, old), (new_parent, new_name, new), now);
        }
        let Some(old) = old else {
            return if holds { ALREADY } else { Err(Refusal::NoEntry) };
        };
        if old.ino != ino {
            return Err(Refusal::Mismatch);
        }
        if noreplace && new.is_some() {
            return Err(Refusal::Exists);
        }
        if holds {
            // Two names of one inode: POSIX wants nothing done.
            return ALREADY;
        }
        if new.map_or(InodeId::NONE, |n| n.ino) != replaced {
            return Err(Refusal::Mismatch);
        }
        self.move_name((parent, name, old), (new_parent, new_name, new), now)
    }

    fn move_name(
        &mut self,
        (parent, _, old): (InodeId, &[u8], Found),
        (new_parent, new_name, new): (InodeId, &[u8], Option<Found>),
        now: Stamp,
    ) -> Done {
        let mut inode = self.need(old.ino)?;
        let is_dir = inode.is_dir();
        let across = parent != new_parent;
        self.same_quota(parent, new_parent, &[(old.ino, &inode)])?;
        if is_dir && !planted(Bug::CycleAllowed) && self.lies_below(new_parent, old.ino)? {
            return Err(Refusal::Cycle);
        }
        let mut target = None;
        if let Some(new) = new {
            let other = self.need(new.ino)?;
            match (is_dir, other.is_dir()) {
                (true, false) => return Err(Refusal::NotDirectory),
                (false, true) => return Err(Refusal::IsDirectory),
                (true, true) if other.entries > 0 => return Err(Refusal::NotEmpty),
                _ => target = Some((new, other)),
            }
        }
        let grows = is_dir && across && target.is_none();
        if grows && self.need_dir(new_parent)?.nlink >= LINK_MAX {
            return Err(Refusal::TooManyLinks);
        }
        let item = match new {
            Some(new) => new.item,
            None => self.free_item(new_parent, new_name)?,
        };
        // All is checked; now it is done.
        let mut orphaned = None;
        let replaces_dir = target.is_some_and(|(_, other)| other.is_dir());
        if let Some((new, mut other)) = target {
            orphaned = self.drop_link(new.ino, &mut other, now)?;
        }
        self.tree.remove(Key::new(parent.0, kind::NAME, old.item))?;
        self.put_name(new_parent, item, old.ino, inode.mode, new_name)?;
        if is_dir {
            inode.parent = new_parent;
        }
        if across {
            let (by, also) = (self.need(new_parent)?.lets_in(), inode.nlink > 1);
            self.reached_by(old.ino, &mut inode, by, also)?;
        }
        inode.ctime = now;
        self.put_inode(old.ino, &inode)?;
        let mut from = self.need(parent)?;
        from.entries = from.entries.saturating_sub(1);
        from.nlink = from.nlink.saturating_sub(u32::from(is_dir));
        self.touch_dir(parent, &mut from, now)?;
        let mut to = self.need(new_parent)?;
        to.entries += u64::from(new.is_none());
        to.nlink = to.nlink.saturating_sub(u32::from(replaces_dir)) + u32::from(is_dir);
        self.touch_dir(new_parent, &mut to, now)?;
        Ok(Applied { orphaned, already: false })
    }

    /// From one quota's tree to another an inode cannot be moved, unless it is the very directory
    /// that has a quota.
    fn same_quota(
        &self,
        parent: InodeId,
        new_parent: InodeId,
        moved: &[(InodeId, &Inode)],
    ) -> Result<(), Refusal> {
        if parent == new_parent || self.need(parent)?.project == self.need(new_parent)?.project {
            return Ok(());
        }
        let own = moved.iter().all(|(ino, inode)| inode.project == *ino);
        if own { Ok(()) } else { Err(Refusal::CrossQuota) }
    }

    fn swap_names(
        &mut self,
        (parent, name, old): (InodeId, &[u8], Found),
        (new_parent, new_name, new): (InodeId, &[u8], Found),
        now: Stamp,
    ) -> Done {
        if old.ino == new.ino {
            return ALREADY;
        }
        let (mut a, mut b) = (self.need(old.ino)?, self.need(new.ino)?);
        if (a.is_dir() && self.lies_below(new_parent, old.ino)?)
            || (b.is_dir() && self.lies_below(parent, new.ino)?)
        {
            return Err(Refusal::Cycle);
        }
        self.same_quota(parent, new_parent, &[(old.ino, &a), (new.ino, &b)])?;
        let (da, db) = (u32::from(a.is_dir()), u32::from(b.is_dir()));
        let across = parent != new_parent;
        if across {
            let (p, q) = (self.need(parent)?.nlink + db - da, self.need(new_parent)?.nlink);
            if p > LINK_MAX || q + da - db > LINK_MAX {
                return Err(Refusal::TooManyLinks);
            }
        }
        self.put_name(parent, old.item, new.ino, b.mode, name)?;
        self.put_name(new_parent, new.item, old.ino, a.mode, new_name)?;
        if a.is_dir() {
            a.parent = new_parent;
        }
        if b.is_dir() {
            b.parent = parent;
        }
        if across {
            let (here, there) = (self.need(parent)?.lets_in(), self.need(new_parent)?.lets_in());
            let (a_also, b_also) = (a.nlink > 1, b.nlink > 1);
            self.reached_by(old.ino, &mut a, there, a_also)?;
            self.reached_by(new.ino, &mut b, here, b_also)?;
        }
        (a.ctime, b.ctime) = (now, now);
        self.put_inode(old.ino, &a)?;
        self.put_inode(new.ino, &b)?;
        let mut from = self.need(parent)?;
        if across {
            from.nlink = (from.nlink + db).saturating_sub(da);
        }
        self.touch_dir(parent, &mut from, now)?;
        if across {
            let mut to = self.need(new_parent)?;
            to.nlink = (to.nlink + da).saturating_sub(db);
            self.touch_dir(new_parent, &mut to, now)?;
        }
        Ok(Applied::default())
    }

    /// Frees an inode that has no name. Does nothing when it is gone already.
    pub(super) fn reap(&mut self, ino: InodeId) -> Done {
        let Some(inode) = self.inode(ino)? else { return ALREADY };
        if inode.nlink > 0 || ino == InodeId::ROOT {
            return Err(Refusal::Invalid);
        }
        self.can_release(ino, 0, u64::MAX)?;
        self.unmap(ino, 0, u64::MAX)?;
        self.moved.forget(ino);
        self.account_inode(&inode, false);
        if inode.is_dir() {
            self.drop_quota(super::AccountId::Directory(ino))?;
        }
        let mut keys = Vec::new();
        let (from, to) = (Key::new(ino.0, 0, 0), Key::new(ino.0, u8::MAX, u64::MAX));
        self.tree.scan(from, to, &mut |key, _| {
            keys.push(key);
            true
        })?;
        for key in keys {
            self.tree.remove(key)?;
        }
        debug_assert!(!self.tree.contains(attr_key(ino))?);
        self.tree.remove(Key::new(0, kind::ORPHAN, ino.0))?;
        self.placed(ino)?;
        self.inodes -= 1;
        Ok(Applied::default())
    }
}

/// Whether an inode of this type, device and target can be made.
fn mode_is_legal(mode: u32, rdev: u32, target: &[u8]) -> bool {
    let of_type = match mode & item::S_IFMT {
        item::S_IFLNK => !target.is_empty() && target.len() <= TARGET_MAX && !target.contains(&0),
        item::S_IFDIR | item::S_IFREG | 0o010_000 | 0o140_000 => target.is_empty() && rdev == 0,
        0o020_000 | 0o060_000 => target.is_empty(),
        _ => false,
    };
    of_type && mode & !(item::S_IFMT | 0o7777) == 0
}
