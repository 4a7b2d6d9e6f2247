//! May this client do this? Form was checked by decoding, sense is checked by `Volume::apply`; here
//! are leases, inode numbers and permissions. Everything is asked of the working state, in stream
//! order, so every later entry sees the effect of the earlier ones.

use std::collections::BTreeSet;

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Sequence};
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, mask};
use storage::format::item;
use storage::format::rpc::{InodeRecord, Span};
use storage::permission::{Creds, R, W, X};
use storage::volume::{Volume, joins};

use crate::core::lease::LeaseTable;
use crate::core::message::Identity;

/// What the head knows of a client, wherever it runs.
#[derive(Debug, Default)]
pub struct Known {
    /// Who.
    pub identity: Identity,
    /// Seed of its entries' checksums.
    pub incarnation: u32,
    /// Inode numbers handed out and not used.
    pub fresh: BTreeSet<InodeId>,
    /// Files that it may write because it opened them when it was allowed to.
    pub rights: BTreeSet<InodeId>,
    /// Inodes that it has open.
    pub pins: BTreeSet<InodeId>,
    /// Entries refused so far.
    pub refusals: u64,
    /// Blocks set aside for it.
    pub room: u64,
    /// Names the account.
    pub room_token: u64,
    /// The account counts what is beyond.
    pub room_from: Sequence,
}

impl Known {
    /// The identity in the form of the rules.
    pub fn creds(&self) -> Creds<'_> {
        let Identity { uid, gid, groups } = &self.identity;
        Creds { uid: *uid, gid: *gid, groups }
    }
}

fn record(volume: &Volume, ino: InodeId) -> Result<InodeRecord, Errno> {
    volume.attr(ino).map_err(|_| Errno::IO)?.ok_or(Errno::NOENT)
}

/// Whether `client` does this in a directory that it uses jointly with others: it waits for what becomes of it.
pub fn is_joint(leases: &LeaseTable, client: ClientId, op: &Op<'_>) -> bool {
    op.facts().dirs.iter().flatten().any(|dir| leases.mode(client, *dir) == LeaseMode::Joint)
}

/// Whether names are still as an operation takes them to be. (The volume takes what is so already for done: a part of the stream may
/// be done twice. Here it means that somebody else has done it, or that another name of the same inode is in the way.)
fn names_fit(volume: &Volume, op: &Op<'_>) -> Result<(), Errno> {
    let leads = |dir, name: &[u8], to: InodeId| {
        if volume.attr(dir).map_err(|_| Errno::IO)?.is_none_or(|r| r.nlink == 0) {
            return Err(Errno::NOENT);
        }
        match volume.lookup(dir, name).map_err(|_| Errno::IO)? {
            None if to == InodeId::NONE => Ok(()),
            None => Err(Errno::NOENT),
            Some((found, _)) if found == to => Ok(()),
            Some(_) if to == InodeId::NONE => Err(Errno::EXIST),
            Some(_) => Err(Errno::STALE),
        }
    };
    match *op {
        Op::Create { parent, name, .. } | Op::Link { parent, name, .. } => {
            leads(parent, name, InodeId::NONE)
        }
        Op::Unlink { ino, parent, name, .. } | Op::Rmdir { ino, parent, name, .. } => {
            leads(parent, name, ino)
        }
        Op::Rename { ino, parent, name, new_parent, new_name, replaced, .. } => {
            leads(parent, name, ino)?;
            leads(new_parent, new_name, replaced)
        }
        _ => Ok(()),
    }
}

/// Whether `op` writes bytes of a regular file, inside its size, that `client` has jointly with others who have others.
fn has_bytes(volume: &Volume, leases: &LeaseTable, client: ClientId, op: &Op<'_>) -> bool {
    let Op::Write { ino, offset, data, .. } = *op else { return false };
    let Some(to) = offset.checked_add(data.len() as u64) else { return false };
    let inside = volume.attr(ino).is_ok_and(|r| r.is_some_and(|r| to <= r.size));
    let own = leases.has_bytes(client, ino, Span { from: offset, to });
    inside && own || planted(Bug::RangeWriteUnjudged)
}

/// Judges one operation of `client`.
pub fn judge(
    volume: &Volume,
    leases: &LeaseTable,
    client: ClientId,
    known: &Known,
    op: &Op<'_>,
) -> Result<(), Errno> {
    let facts = op.facts();
    for ino in facts.touches() {
        let jointly = facts.dirs.contains(&Some(ino)) || planted(Bug::JointChangesAll);
        match leases.mode(client, ino) {
            LeaseMode::Write => {}
            LeaseMode::Joint if jointly => {}
            LeaseMode::Joint if has_bytes(volume, leases, client, op) => {}
            _ if planted(Bug::LeaseUnchecked) => {}
            _ => return Err(Errno::STALE),
        }
    }
    if is_joint(leases, client, op) && !planted(Bug::JointDoneAlready) {
        names_fit(volume, op)?;
    }
    if matches!(op, Op::Reap { .. } | Op::Move { .. }) && !planted(Bug::ReapAllowed) {
        // Only the service frees inodes, and says where blocks lie.
        return Err(Errno::PERM);
    }
    if matches!(op, Op::Place { .. }) && !planted(Bug::PlaceAllowed) {
        // Only the service says where blocks lie.
        return Err(Errno::PERM);
    }
    if matches!(op, Op::CloneRange { zeroes: true, .. }) {
        // Only the service knows what lies beyond.
        return Err(Errno::PERM);
    }
    if let Some(ino) = facts.makes
        && !known.fresh.contains(&ino)
        && !planted(Bug::NumberUnchecked)
    {
        return Err(Errno::INVAL);
    }
    if let Op::CloneRange { source, .. } = *op
        && let Some((slot, _)) = source.of_snapshot()
        && volume.snapshot_in(slot).is_none_or(|snapshot| joins::is_one(&snapshot.name))
    {
        return Err(Errno::NOENT);
    }
    let super_user = known.identity.uid == 0 || planted(Bug::PermissionSkipped);
    match *op {
        // Only who may see everything says for how long everything stays.
        Op::Snapshot { .. } | Op::DropSnapshot { .. } if !super_user => return Err(Errno::PERM),
        Op::Snapshot { name, .. } | Op::DropSnapshot { name, .. } if joins::is_one(name) => {
            // The service's own, for nodes that join.
            return Err(Errno::INVAL);
        }
        // Whom the directories above it let come so far is about to change: it is asked again.
        Op::Snapshot { ino, .. } if ino != InodeId::ROOT && volume.unplaced() > 0 => {
            return Err(Errno::BUSY);
        }
        Op::Snapshot { name, .. } if volume.snapshot_named(name).is_some() => {
            return Err(Errno::EXIST);
        }
        Op::DropSnapshot { name, .. } if volume.snapshot_named(name).is_none() => {
            return Err(Errno::NOENT);
        }
        _ if super_user => return Ok(()),
        _ => {}
    }
    permitted(volume, known, op)
}

fn may_write(volume: &Volume, known: &Known, ino: InodeId) -> Result<(), Errno> {
    let r = record(volume, ino)?;
    let creds = known.creds();
    // The owner could change the mode first; a right outlives a change of the mode.
    if creds.owns(&r) || known.rights.contains(&ino) { Ok(()) } else { creds.may(&r, W) }
}

/// A file of a snapshot may be read by whom its mode let, and the directories above it, when it was made. No lease says that
/// somebody has come to it: what is noted of whom these let in does, or less. Others read its bytes.
fn may_read(volume: &Volume, known: &Known, ino: InodeId) -> Result<(), Errno> {
    let creds = known.creds();
    if planted(Bug::SnapshotCloneUnjudged) && ino.of_snapshot().is_some() {
        return Ok(());
    }
    let (state, there) = volume.source(ino).ok_or(Errno::NOENT)?;
    creds.may(&record(state, there)?, R)?;
    if ino.of_snapshot().is_none() {
        return Ok(());
    }
    let reach = state.reach(there).map_err(|_| Errno::IO)?;
    let comes = reach.is_some_and(|reach| reach.readable_by(creds.uid, creds.gid, creds.groups));
    if comes && state.unplaced() == 0 { Ok(()) } else { Err(Errno::ACCES) }
}

fn permitted(volume: &Volume, known: &Known, op: &Op<'_>) -> Result<(), Errno> {
    let creds = known.creds();
    match *op {
        Op::Pad | Op::Reap { .. } | Op::Place { .. } | Op::Move { .. } => Ok(()),
        Op::SetQuota { .. }
        | Op::SetProject { .. }
        | Op::Snapshot { .. }
        | Op::DropSnapshot { .. } => Err(Errno::PERM),
        Op::Create { parent, uid, gid, mode, .. } | Op::Tmpfile { parent, uid, gid, mode, .. } => {
            let dir = record(volume, parent)?;
            creds.may(&dir, W | X)?;
            let group = creds.in_group(gid) || (dir.mode & 0o2000 != 0 && gid == dir.gid);
            // Without execution for the group the bit gives nobody the group's rights: Linux lets it be.
            let setgid_of_others =
                mode & 0o2010 == 0o2010 && mode & 0o170_000 != 0o040_000 && !creds.in_group(gid);
            if uid != creds.uid || !group || setgid_of_others {
                return Err(Errno::PERM);
            }
            match mode & 0o170_000 {
                0o020_000 | 0o060_000 => Err(Errno::PERM),
                _ => Ok(()),
            }
        }
        Op::Link { ino, parent, .. } => {
            let r = record(volume, ino)?;
            if r.nlink == 0 && !creds.owns(&r) && !known.rights.contains(&ino) {
                // What has no name can be had only from somebody who has it open.
                return Err(Errno::NOENT);
            }
            creds.may_link(&r)?;
            creds.may(&record(volume, parent)?, W | X)
        }
        Op::Unlink { ino, parent, .. } | Op::Rmdir { ino, parent, .. } => {
            creds.may_remove(&record(volume, parent)?, &record(volume, ino)?)
        }
        Op::Rename { ino, parent, new_parent, replaced, exchange, .. } => {
            let (old, new) = (record(volume, parent)?, record(volume, new_parent)?);
            let moved = record(volume, ino)?;
            creds.may_remove(&old, &moved)?;
            creds.may(&new, W | X)?;
            if moved.mode & 0o170_000 == 0o040_000 && parent != new_parent {
                creds.may(&moved, W)?;
            }
            if replaced != InodeId::NONE {
                let other = record(volume, replaced)?;
                creds.may_remove(&new, &other)?;
                let is_dir = other.mode & 0o170_000 == 0o040_000;
                if exchange && is_dir && parent != new_parent {
                    creds.may(&other, W)?;
                }
            }
            Ok(())
        }
        Op::Write { ino, clear_setid, .. } | Op::Truncate { ino, clear_setid, .. } => {
            let mode = record(volume, ino)?.mode;
            if !clear_setid && (mode & 0o4000 != 0 || mode & 0o2010 == 0o2010) {
                // A write by anybody but the super-user ends set-user-ID and set-group-ID.
                return Err(Errno::PERM);
            }
            may_write(volume, known, ino)
        }
        Op::Fallocate { ino, .. } | Op::Shift { ino, .. } => may_write(volume, known, ino),
        Op::CloneRange { ino, source, .. } => {
            may_read(volume, known, source)?;
            may_write(volume, known, ino)
        }
        Op::SetXattr { ino, name, .. } | Op::RemoveXattr { ino, name } => {
            let r = record(volume, ino)?;
            if name.starts_with(b"user.") {
                may_write(volume, known, ino)
            } else if name == storage::limits::CAPABILITY && matches!(op, Op::RemoveXattr { .. }) {
                // They end when the file is changed, whoever does.
                if creds.owns(&r) { Ok(()) } else { may_write(volume, known, ino) }
            } else if storage::acl::is_acl(name) && creds.owns(&r) {
                // As with chmod: who is not in the group cannot keep set-group-ID.
                let keeps = r.mode & 0o2000 != 0 && name == storage::acl::ACCESS;
                if keeps && !creds.in_group(r.gid) { Err(Errno::PERM) } else { Ok(()) }
            } else {
                Err(Errno::PERM)
            }
        }
        Op::SetAttr { ino, mask: fields, mode, uid, gid, .. } => {
            let r = record(volume, ino)?;
            let ended = r.mode & 0o7777 & !mode;
            let is_file = r.mode & item::S_IFMT == item::S_IFREG;
            if fields == mask::MODE
                && mode & !r.mode == 0
                && matches!(ended, 0o2000 | 0o4000 | 0o6000)
                && is_file
            {
                // Who changes the content ends set-user-ID and set-group-ID. (To the mode that it is, only the owner.)
                return if creds.owns(&r) { Ok(()) } else { may_write(volume, known, ino) };
            }
            set_attr(&creds, &r, fields, mode, uid, gid)
        }
    }
}

fn set_attr(
    creds: &Creds<'_>,
    r: &InodeRecord,
    fields: u64,
    mode: u32,
    uid: u32,
    gid: u32,
) -> Result<(), Errno> {
    if !creds.owns(r) {
        // Others may only set both times to now, and need write permission for it; the entry does
        // not tell "now" from another time, which harms nobody who may write.
        let times = mask::ATIME | mask::MTIME;
        return if fields & !times == 0 { creds.may(r, W) } else { Err(Errno::PERM) };
    }
    if fields & mask::UID != 0 && uid != r.uid {
        return Err(Errno::PERM);
    }
    if fields & mask::GID != 0 && gid != r.gid && !creds.in_group(gid) {
        return Err(Errno::PERM);
    }
    let new_gid = if fields & mask::GID != 0 { gid } else { r.gid };
    let owner_changes = fields & (mask::UID | mask::GID) != 0;
    let file = r.mode & 0o170_000 == 0o100_000;
    let left = if fields & mask::MODE != 0 { mode } else { r.mode & 0o7777 };
    if owner_changes && file && left & 0o4000 != 0 {
        return Err(Errno::PERM);
    }
    let gains_setgid = fields & mask::MODE != 0 && mode & 0o2000 != 0 && r.mode & 0o2000 == 0;
    if gains_setgid && !creds.in_group(new_gid) {
        return Err(Errno::PERM);
    }
    Ok(())
}
