//! Whom the directories on the way let come to an inode.
//!
//! Arenas are mapped whole. So who may map one must be able to open every file in it, by the file's own mode and by the
//! search permissions of all directories above it. Each inode therefore has a *reach*, a class that is no wider than what
//! the directory lets in that holds its name ([`Inode::lets_in`]); a file's blocks lie in the arena of what its own mode
//! and its reach have in common ([`Inode::class`]).
//!
//! What is made gets the reach of its directory. If a directory then lets in others than before, or moves, what is below
//! it has to follow, however much that is; and a file that moves may have leases elsewhere, whose owners know where its
//! blocks lie. So it is done later: the inode is *unplaced* (`kind::UNPLACED`), on media and on every member, and the
//! head goes over those, some at a time (`service/src/core/reach.rs`), by [`Op::Place`].
//!
//! Always true, for each name: an inode in a directory that is not unplaced itself has (or, unplaced, shall have) a reach
//! within what the directory lets in; a directory has just that. [`check`](crate::check) looks whether it is so.
//!
//! A file with several names has what all of them have in common, and keeps that when names go.

use base::InodeId;
use base::planted::{Bug, planted};

use super::{Applied, Done, Fault, Refusal, Volume, corrupt};
use crate::format::entry::Op;
use crate::format::item::{Inode, ReadClass, kind};
use crate::format::page::Key;

/// What is still to be done about an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unplaced {
    /// A directory: to look at what it holds.
    Directory,
    /// To give it this reach.
    Reach(ReadClass),
}

fn key(ino: InodeId) -> Key {
    Key::new(0, kind::UNPLACED, ino.0)
}

impl Volume {
    /// How many inodes are unplaced.
    pub const fn unplaced(&self) -> u64 {
        self.unplaced
    }

    /// Of a state that is read: whether any are is all that is asked.
    pub(super) fn any_unplaced(&mut self) -> u64 {
        self.unplaced = 1;
        let any = self.unplaced_after(InodeId::NONE).map_or(true, |found| found.is_some());
        u64::from(any)
    }

    /// The next inode after this one that is unplaced.
    pub fn unplaced_after(&self, after: InodeId) -> Result<Option<(InodeId, Unplaced)>, Fault> {
        if self.unplaced == 0 {
            return Ok(None);
        }
        let mut found = None;
        self.tree.scan(
            Key::new(0, kind::UNPLACED, after.0.saturating_add(1)),
            Key::new(0, kind::UNPLACED, u64::MAX),
            &mut |key, value| {
                found = Some((InodeId(key.item), decode(value)));
                false
            },
        )?;
        let Some((ino, what)) = found else { return Ok(None) };
        Ok(Some((ino, what.map_err(corrupt(ino))?)))
    }

    /// What is to be done about an inode.
    pub fn unplaced_of(&self, ino: InodeId) -> Result<Option<Unplaced>, Fault> {
        if self.unplaced == 0 {
            return Ok(None);
        }
        let found = self.tree.get_with(key(ino), decode)?;
        found.transpose().map_err(corrupt(ino))
    }

    /// The reach of an inode; none if it does not exist.
    pub fn reach(&self, ino: InodeId) -> Result<Option<ReadClass>, Fault> {
        Ok(self.inode(ino)?.map(|inode| inode.reach))
    }

    /// Whom a directory lets in.
    pub fn lets_in(&self, dir: InodeId) -> Result<Option<ReadClass>, Fault> {
        Ok(self.inode(dir)?.filter(Inode::is_dir).map(|inode| inode.lets_in()))
    }

    /// What puts an inode right that has a name in a directory which lets in `by`; none if it is.
    pub fn placement(&self, ino: InodeId, by: ReadClass) -> Result<Option<Op<'static>>, Fault> {
        let Some(inode) = self.inode(ino)? else { return Ok(None) };
        if inode.is_dir() {
            let deeper = Inode { reach: by, ..inode }.lets_in() != inode.lets_in();
            let later = self.unplaced_of(ino)?.is_some() || (deeper && inode.entries > 0);
            return Ok((inode.reach != by).then_some(Op::Place { ino, reach: by, later }));
        }
        let target = self.target(ino, &inode)?;
        let reach = if inode.nlink > 1 { target.meet(by) } else { by };
        let later = !stays(&inode, reach);
        Ok((reach != target).then_some(Op::Place { ino, reach, later }))
    }

    /// Whether to place an inode so moves blocks that somebody may know the place of.
    pub fn placing_moves(&self, ino: InodeId, reach: ReadClass) -> Result<bool, Fault> {
        Ok(self.inode(ino)?.is_some_and(|inode| !inode.is_dir() && !stays(&inode, reach)))
    }

    /// The reach that an inode has, or shall have.
    fn target(&self, ino: InodeId, inode: &Inode) -> Result<ReadClass, Fault> {
        Ok(match self.unplaced_of(ino)? {
            Some(Unplaced::Reach(reach)) => reach,
            _ => inode.reach,
        })
    }

    /// An inode has got a name in a directory that lets in `by`, and lost another, or (`also`) keeps those that it had.
    /// The caller stores it.
    pub(super) fn reached_by(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        by: ReadClass,
        also: bool,
    ) -> Result<(), Fault> {
        if planted(Bug::ReachForgotten) {
            return Ok(());
        }
        if inode.is_dir() {
            let before = inode.lets_in();
            inode.reach = by;
            return self.lets_in_others(ino, inode, before);
        }
        let reach = if also { self.target(ino, inode)?.meet(by) } else { by };
        if stays(inode, reach) {
            inode.reach = reach;
            self.placed(ino)
        } else {
            self.unplace(ino, Unplaced::Reach(reach))
        }
    }

    /// A directory lets in others than `before`, perhaps.
    pub(super) fn lets_in_others(
        &mut self,
        ino: InodeId,
        inode: &Inode,
        before: ReadClass,
    ) -> Result<(), Fault> {
        if inode.is_dir()
            && inode.entries > 0
            && inode.lets_in() != before
            && !planted(Bug::SearchForgotten)
        {
            self.unplace(ino, Unplaced::Directory)?;
        }
        Ok(())
    }

    /// The service says where an inode belongs. The same again changes nothing.
    pub(super) fn place(&mut self, ino: InodeId, reach: ReadClass, later: bool) -> Done {
        let mut inode = self.need(ino)?;
        if ino == InodeId::ROOT && reach != ReadClass::World {
            return Err(Refusal::Invalid);
        }
        if !inode.is_dir() && later {
            if reach == inode.reach {
                self.placed(ino)?;
            } else {
                self.unplace(ino, Unplaced::Reach(reach))?;
            }
            return Ok(Applied::default());
        }
        let before = inode.class();
        inode.reach = reach;
        if !inode.is_dir() {
            self.may_reclass(ino, &inode, before)?;
            self.reclass(ino, &inode, before)?;
        }
        self.put_inode(ino, &inode)?;
        if later {
            self.unplace(ino, Unplaced::Directory)?
        } else {
            self.placed(ino)?
        }
        Ok(Applied::default())
    }

    fn unplace(&mut self, ino: InodeId, what: Unplaced) -> Result<(), Fault> {
        let is_new = self.unplaced_of(ino)?.is_none();
        match what {
            Unplaced::Directory => self.tree.put(key(ino), &[])?,
            Unplaced::Reach(reach) => self.tree.put(key(ino), &reach.encode())?,
        }
        self.unplaced += u64::from(is_new);
        Ok(())
    }

    /// Nothing is to be done about an inode any more.
    pub(super) fn placed(&mut self, ino: InodeId) -> Result<(), Fault> {
        if self.unplaced_of(ino)?.is_some() {
            self.tree.remove(key(ino))?;
            self.unplaced -= 1;
        }
        Ok(())
    }
}

/// Whether the blocks of an inode stay where they are if it has another reach.
fn stays(inode: &Inode, reach: ReadClass) -> bool {
    inode.blocks == 0 || Inode { reach, ..*inode }.class() == inode.class()
}

/// Reads an item that says what is to be done.
pub(crate) fn decode(value: &[u8]) -> Result<Unplaced, crate::format::Corrupt> {
    if value.is_empty() {
        return Ok(Unplaced::Directory);
    }
    Ok(Unplaced::Reach(ReadClass::decode(value)?))
}
