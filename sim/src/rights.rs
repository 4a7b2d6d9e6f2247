//! Who may do what, as the judges have it: POSIX permission and access control lists (acl(5)), in code that shares
//! nothing with what is judged.

use base::Errno;
use client::fs::{SetAttr, SetTime};
use storage::format::entry::{Op, mask};

use crate::actor::GUEST;
use crate::model::{Model, State};
use crate::process::effects::{ACL, DEFAULT_ACL};

/// Read permission.
pub const R: u32 = 4;
/// Write permission.
pub const W: u32 = 2;
/// Search permission.
pub const X: u32 = 1;

const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;
/// A group of which all but the super-user are.
pub const SHARED: u32 = 50;
/// Another user, who is in the guest's group.
pub const OTHER: u32 = 7;

/// On whose behalf something is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Who {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: &'static [u32],
}

impl Who {
    /// The super-user.
    pub const ROOT: Self = Self { uid: 0, gid: 0, groups: &[] };

    /// A user as a process has it.
    pub const fn of(uid: u32) -> Self {
        match uid {
            0 => Self::ROOT,
            GUEST => Self { uid, gid: uid, groups: &[SHARED] },
            _ => Self { uid, gid: uid, groups: &[SHARED, GUEST] },
        }
    }

    /// A user in no group but its own, as a client that writes its log by hand is.
    pub const fn alone(uid: u32) -> Self {
        Self { uid, gid: uid, groups: &[] }
    }

    /// Whether that is one of the groups.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether this is the owner, or the super-user.
    pub const fn owns(&self, s: &State) -> bool {
        self.uid == 0 || s.mode != 0 && self.uid == s.uid
    }

    /// Whether they may do all of `what`. `None`: nobody knows the list.
    pub fn may(&self, s: &State, what: u32) -> Option<bool> {
        if s.mode == 0 {
            return None;
        }
        if self.uid == 0 {
            return Some(true);
        }
        let bits = |shift: u32| (s.mode >> shift) & what == what;
        if self.uid == s.uid {
            return Some(bits(6));
        }
        // A list whose mask allows nothing is not asked, as in Linux.
        if s.mode & 0o070 != 0 {
            let all = s.xattrs.as_ref()?;
            if let Some(list) = all.get(ACL) {
                return Some(self.by_list(list, s.gid, what));
            }
        }
        Some(if self.in_group(s.gid) { bits(3) } else { bits(0) })
    }

    /// What acl(5) says of who is not the owner.
    fn by_list(&self, list: &[u8], group: u32, what: u32) -> bool {
        let entries = || {
            list[4..].chunks_exact(8).map(|e| {
                let half = |at: usize| u16::from_le_bytes([e[at], e[at + 1]]);
                (half(0), u32::from(half(2)), u32::from_le_bytes([e[4], e[5], e[6], e[7]]))
            })
        };
        let lets = |rights: u32| rights & what == what;
        let masked = entries().find(|e| e.0 == 16).is_none_or(|e| lets(e.1));
        if let Some((_, rights, _)) = entries().find(|e| e.0 == 2 && e.2 == self.uid) {
            return lets(rights) && masked;
        }
        let own = |e: &(u16, u32, u32)| {
            e.0 == 4 && self.in_group(group) || e.0 == 8 && self.in_group(e.2)
        };
        let groups: Vec<u32> = entries().filter(own).map(|e| e.1).collect();
        if groups.is_empty() {
            return entries().any(|e| e.0 == 32 && lets(e.1));
        }
        masked && groups.into_iter().any(lets)
    }

    /// Whether they may take a name that leads to `victim` out of `dir`, as far as that directory is sticky.
    pub const fn may_take(&self, dir: &State, victim: &State) -> bool {
        dir.mode & 0o1000 == 0 || self.owns(dir) || self.owns(victim)
    }

    /// Whether they may give it another name: what proc_sys_fs(5) says of `protected_hardlinks`. `None`: nobody knows
    /// the list.
    pub fn may_link(&self, s: &State) -> Option<bool> {
        let set_id = s.mode & 0o4000 != 0 || s.mode & 0o2000 != 0 && s.mode & 0o10 != 0;
        match () {
            () if s.mode == 0 => None,
            () if self.owns(s) => Some(true),
            () if s.mode & S_IFMT != S_IFREG || set_id => Some(false),
            () => self.may(s, R | W),
        }
    }

    /// The set-id bits that end when they change the content of a file.
    pub fn ends(&self, s: &State) -> u32 {
        if self.uid == 0 || s.mode & S_IFMT != S_IFREG {
            return 0;
        }
        let group = s.mode & 0o10 != 0 || !self.in_group(s.gid);
        s.mode & (0o4000 | if group { 0o2000 } else { 0 })
    }

    /// Why they may not set these attributes, if they may not.
    pub fn sets(&self, s: &State, set: &SetAttr) -> Result<(), Errno> {
        let own = if self.owns(s) { Ok(()) } else { Err(Errno::PERM) };
        if set.mode.is_some() {
            own?;
        }
        if set.uid.is_some() || set.gid.is_some() {
            let group = set.gid.is_none_or(|gid| gid == s.gid || self.in_group(gid));
            let gives = set.uid.is_none_or(|uid| uid == s.uid) && self.uid == s.uid && group;
            if self.uid != 0 && !gives {
                return Err(Errno::PERM);
            }
        }
        match (set.atime, set.mtime) {
            (None, None) => Ok(()),
            (Some(SetTime::Now), Some(SetTime::Now)) if own.is_err() => {
                if self.may(s, W) == Some(false) { Err(Errno::ACCES) } else { Ok(()) }
            }
            _ => own,
        }
    }

    /// What setting these attributes comes to: which change, the mode, the owner and the group.
    pub fn set(&self, s: &State, set: &SetAttr) -> (u64, u32, u32, u32) {
        let member = self.uid == 0 || self.in_group(s.gid);
        let (mut fields, mut mode) = (0, s.mode & 0o7777);
        if let Some(asked) = set.mode {
            fields |= mask::MODE;
            mode = asked & if member { 0o7777 } else { 0o5777 };
        }
        let (uid, gid) = (set.uid.unwrap_or(s.uid), set.gid.unwrap_or(s.gid));
        if set.uid.is_some() || set.gid.is_some() {
            fields |= mask::UID | mask::GID;
            let group = if mode & 0o10 != 0 || !member { 0o2000 } else { 0 };
            let ends = mode & (0o4000 | group);
            if s.mode & S_IFMT != S_IFDIR && set.mode.is_none() && ends != 0 {
                fields |= mask::MODE;
                mode &= !ends;
            }
        }
        if set.atime.is_some() {
            fields |= mask::ATIME;
        }
        if set.mtime.is_some() {
            fields |= mask::MTIME;
        }
        (fields, mode, uid, gid)
    }

    /// Why they may not set or remove an extended attribute, if they may not.
    pub fn sets_xattr(&self, s: &State, name: &[u8]) -> Result<(), Errno> {
        let kind = s.mode & S_IFMT;
        if name == ACL || name == DEFAULT_ACL {
            return if self.owns(s) { Ok(()) } else { Err(Errno::PERM) };
        }
        if kind != S_IFREG && kind != S_IFDIR
            || kind == S_IFDIR && s.mode & 0o1000 != 0 && !self.owns(s)
        {
            return Err(Errno::PERM);
        }
        if self.may(s, W) == Some(false) { Err(Errno::ACCES) } else { Ok(()) }
    }

    /// What something new belongs to and may, in a directory: group and mode. `None`: nobody knows the list.
    pub fn makes(&self, dir: &State, asked: u32, umask: u32) -> Option<(u32, u32)> {
        let (mut mode, mut gid) = (asked, self.gid);
        if dir.mode & 0o2000 != 0 {
            gid = dir.gid;
            if asked & S_IFMT == S_IFDIR {
                mode |= 0o2000;
            } else if mode & 0o2010 == 0o2010 && self.uid != 0 && !self.in_group(gid) {
                mode &= !0o2000;
            }
        }
        if asked & S_IFMT == S_IFLNK {
            return Some((gid, S_IFLNK | 0o777));
        }
        match dir.xattrs.as_ref()?.get(DEFAULT_ACL) {
            Some(list) => {
                mode = mode & !0o777 | crate::acl::narrow(&mut list.clone(), mode);
            }
            None => mode &= !(umask & 0o777),
        }
        Some((gid, mode))
    }

    /// What they may not do of an operation on names, as everything is now.
    pub fn barred(&self, model: &Model, op: &Op<'_>) -> Option<&'static str> {
        let gone = State::gone();
        let state = |ino: base::InodeId| model.current(ino.0).unwrap_or(&gone);
        let may = |ino, what| self.may(state(ino), what) != Some(false);
        let fits = |all: bool, why| if all { None } else { Some(why) };
        match *op {
            Op::Create { parent, .. } | Op::Tmpfile { parent, .. } => {
                fits(may(parent, W | X), "it may not write to the directory")
            }
            Op::Link { ino, parent, .. } => {
                fits(may(parent, W | X), "it may not write to the directory").or_else(|| {
                    let may = self.may_link(state(ino)) != Some(false);
                    fits(may, "it may not give files of others another name")
                })
            }
            Op::Unlink { ino, parent, .. } | Op::Rmdir { ino, parent, .. } => {
                fits(may(parent, W | X), "it may not write to the directory").or_else(|| {
                    fits(self.may_take(state(parent), state(ino)), "the directory is sticky")
                })
            }
            Op::Rename { ino, parent, new_parent, replaced, exchange, .. } => {
                let there = replaced != base::InodeId::NONE;
                let moves = |ino| {
                    let is_dir = state(ino).mode & S_IFMT == S_IFDIR;
                    parent == new_parent || !is_dir || may(ino, W)
                };
                fits(may(parent, W | X) && may(new_parent, W | X), "it may not write to both")
                    .or_else(|| {
                        let takes = self.may_take(state(parent), state(ino))
                            && (!there || self.may_take(state(new_parent), state(replaced)));
                        fits(takes, "a directory is sticky")
                    })
                    .or_else(|| {
                        let moves = moves(ino) && (!exchange || moves(replaced));
                        fits(moves, "it may not write to a directory whose `..` changes")
                    })
            }
            Op::SetProject { .. } | Op::SetQuota { .. } => {
                fits(self.uid == 0, "only the super-user may")
            }
            Op::SetXattr { ino, name, .. } | Op::RemoveXattr { ino, name } => {
                // (Of a directory that was removed, and that the process has open, the model does not know the mode any more.)
                let may = state(ino).mode == 0 || self.sets_xattr(state(ino), name).is_ok();
                fits(may, "it may not set the attribute")
            }
            _ => None,
        }
    }
}
