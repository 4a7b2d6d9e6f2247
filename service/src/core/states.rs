//! What clients read of snapshots: states that do not change, so nobody is asked for a lease and nothing is waited for but that
//! the state is on the medium. An inode of a snapshot is told by the snapshot's slot (`InodeId::in_snapshot`), and who may do
//! what with it is said by its attributes as they were.
//!
//! A snapshot of a directory shows what is below it. Whoever the directories above it did not let come so far then is not let
//! in by this way either.

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Sequence, StreamSeq};
use storage::format::control::LeaseMode;
use storage::format::page::Key;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Differences, InodeRecord, InodeReply, SnapshotRecord, WANT_READ};
use storage::permission::{Creds, R, X};
use storage::volume::{Volume, joins};

use super::limits::LIST_BYTES;
use super::message::Identity;
use super::requests::{Pending, Step, Stepped, What, list_names, refuse};
use super::{Failure, Node};

/// Snapshots told of in one reply.
const TOLD: usize = 64;
/// Bytes of items that are compared for one reply, and a page more: a name that is gone counts as 32 and takes up to 273 in the
/// reply, so that all of it fits into a slot ...
const DIFFERENCES_BYTES: usize = 4 << 10;
/// ... and pages.
const DIFFERENCES_PAGES: usize = 64;

/// Who asks for what.
struct Asks {
    identity: Identity,
    /// Of proofs; the super-user needs none.
    secret: Option<u128>,
    slot: u16,
}

impl Asks {
    fn may(&self, record: &InodeRecord, what: u32) -> Result<(), Errno> {
        let Identity { uid, gid, groups } = &self.identity;
        Creds { uid: *uid, gid: *gid, groups }.may(record, what)
    }

    fn proof(&self, ino: InodeId) -> Proof {
        self.secret.map_or(Proof::NONE, |secret| Proof::new(secret, ino))
    }
}

impl Node {
    /// A request about an inode of a snapshot: the slot, and the inode in it.
    pub(super) fn step_snapshot(
        &mut self,
        p: &mut Pending,
        (slot, ino): (u16, InodeId),
    ) -> Stepped {
        let Some(client) = self.agent.clients.get(&p.client) else { return Ok(Step::Wait) };
        let identity = client.identity.clone();
        let secret = (identity.uid != 0).then(|| self.agent.table.secret());
        let asks = Asks { identity, secret, slot };
        let Some(snapshot) = self.volume.snapshot_in(slot) else { return refuse(Errno::NOENT) };
        if joins::is_one(&snapshot.name) {
            return refuse(Errno::NOENT);
        }
        let dir = snapshot.dir;
        let Some(state) = self.volume.read_snapshot(slot) else {
            // What it holds is on its way to the medium.
            self.member.publish_now = true;
            return Ok(Step::Wait);
        };
        if let Some((named, proof)) = p.shown
            && named != dir.in_snapshot(slot)
            && asks.secret.is_some()
            && proof != asks.proof(named)
            && !planted(Bug::SnapshotUnproved)
        {
            self.env.counters.unshown += 1;
            return refuse(Errno::STALE);
        }
        let Identity { uid, gid, groups } = &asks.identity;
        if !state.reach(dir)?.is_some_and(|reach| reach.readable_by(*uid, *gid, groups)) {
            return refuse(Errno::ACCES);
        }
        let Some(record) = state.attr(ino)? else { return refuse(Errno::NOENT) };
        let after = p.after;
        let (xattr_bytes, names) =
            (self.env.config.limits.xattr_bytes, self.env.config.limits.names);
        match &p.what {
            What::Inode { mode: LeaseMode::None, flags } if flags & !WANT_READ == 0 => {
                inode(&asks, state, record, dir, *flags, after)
            }
            What::Lookup { name, mode: LeaseMode::None, flags, .. } if flags & !WANT_READ == 0 => {
                if let Err(errno) = asks.may(&record, X) {
                    return refuse(errno);
                }
                let Some((ino, _)) = state.lookup(ino, name)? else { return refuse(Errno::NOENT) };
                let Some(record) = state.attr(ino)? else { return refuse(Errno::NOENT) };
                inode(&asks, state, record, dir, *flags, after)
            }
            What::Names { cookie } => {
                if let Err(errno) = asks.may(&record, R) {
                    return refuse(errno);
                }
                list(&asks, state, &record, dir, *cookie, names)
            }
            What::XattrGet { .. } | What::XattrList | What::XattrPart { .. } => {
                xattr(&asks, state, &record, &p.what, xattr_bytes)
            }
            What::Read { offset, len } => {
                if let Err(errno) = asks.may(&record, R) {
                    return refuse(errno);
                }
                let mut bytes = vec![0u8; (*len as usize).min(LIST_BYTES)];
                let mut wrong = Vec::new();
                let n = state.read_checked(ino, *offset, &mut bytes, &mut wrong)?;
                if !wrong.is_empty() {
                    // Members have the same snapshots: it is mended as what is in use.
                    wrong.iter_mut().for_each(|place| place.ino = place.ino.in_snapshot(slot));
                    self.suspect_all(&wrong);
                    return if self.is_lost(&wrong) { refuse(Errno::IO) } else { Ok(Step::Wait) };
                }
                let mut body = Vec::new();
                rpc::reply_ok(&mut body);
                body.extend_from_slice(&bytes[..n]);
                Ok(Step::Answer(body))
            }
            // Whatever else there is would change something.
            _ => refuse(Errno::ROFS),
        }
    }

    /// Snapshots with higher numbers.
    pub(super) fn answer_snapshots(
        &mut self,
        p: &mut Pending,
        after: u64,
        upto: Option<StreamSeq>,
    ) -> Stepped {
        // What was in the stream when it was asked is in the answer.
        let upto = upto.unwrap_or_else(|| self.ring.last());
        if self.member.applied < upto {
            p.what = What::Snapshots { after, upto: Some(upto) };
            return Ok(Step::Wait);
        }
        let mut body = Vec::new();
        rpc::reply_ok(&mut body);
        let mut told = Vec::new();
        let mut from = after;
        while told.is_empty() {
            told = self.volume.snapshots(from, TOLD);
            let Some(last) = told.last() else { break };
            from = last.number;
            // The service's own are nobody's to read.
            told.retain(|stat| !joins::is_one(&stat.snapshot.name));
        }
        for stat in told {
            let (number, own_blocks, snapshot) = (stat.number, stat.own_blocks, stat.snapshot);
            let (slot, dir, time, inodes) =
                (snapshot.slot, snapshot.dir, snapshot.time, snapshot.inodes);
            let (name, proof) = (snapshot.name, self.proof_for(p.client, dir.in_snapshot(slot)));
            let record =
                SnapshotRecord { number, slot, dir, time, inodes, own_blocks, proof, name };
            record.encode(&mut body);
        }
        Ok(Step::Answer(body))
    }
}

impl Node {
    /// What one snapshot has otherwise than an earlier one.
    pub(super) fn answer_differences(
        &mut self,
        client: ClientId,
        before: u64,
        number: u64,
        from: Key,
    ) -> Stepped {
        let Some(client) = self.agent.clients.get(&client) else { return Ok(Step::Wait) };
        if client.identity.uid != 0 && !planted(Bug::DifferencesForAll) {
            return refuse(Errno::PERM);
        }
        let slot = |number: u64| self.volume.snapshot_numbered(number).map(|found| found.slot);
        let earlier = match before {
            0 => None,
            before => match slot(before) {
                None => return refuse(Errno::NOENT),
                found => found,
            },
        };
        let Some(later) = slot(number) else { return refuse(Errno::NOENT) };
        if before >= number {
            return refuse(Errno::INVAL);
        }
        let bounds = (DIFFERENCES_BYTES, DIFFERENCES_PAGES);
        let Some((all, next)) = self.volume.snapshot_difference(earlier, later, from, bounds)?
        else {
            // One of them is on its way to the medium.
            self.member.publish_now = true;
            return Ok(Step::Wait);
        };
        let mut body = Vec::new();
        rpc::reply_ok(&mut body);
        let volume = self.volume.superblock().uuid;
        Differences { volume, next, all }.encode(&mut body);
        Ok(Step::Answer(body))
    }
}

/// What is told of an inode. The directory that the snapshot shows is its own parent, but for the super-user, who judges for others whether they might come to it.
fn tagged(record: InodeRecord, asks: &Asks, dir: InodeId) -> InodeRecord {
    let slot = asks.slot;
    let parent = match record.parent {
        InodeId::NONE => InodeId::NONE,
        _ if record.ino == dir && asks.secret.is_some() => dir.in_snapshot(slot),
        parent => parent.in_snapshot(slot),
    };
    // Nothing is made in it, and no quota counts it.
    let (ino, limited, linkable) = (record.ino.in_snapshot(slot), false, false);
    InodeRecord { ino, parent, limited, linkable, project: InodeId::NONE, ..record }
}

fn inode(
    asks: &Asks,
    state: &Volume,
    record: InodeRecord,
    dir: InodeId,
    flags: u8,
    reflected: Sequence,
) -> Stepped {
    if flags & WANT_READ != 0
        && let Err(errno) = asks.may(&record, R)
    {
        return refuse(errno);
    }
    let target = state.symlink(record.ino)?;
    let record = tagged(record, asks, dir);
    let searches = record.parent != InodeId::NONE && asks.may(&record, X).is_ok();
    let parent_proof = if searches { asks.proof(record.parent) } else { Proof::NONE };
    let proof = asks.proof(record.ino);
    let shown =
        InodeReply { reflected, record, target, proof, parent_proof, ..InodeReply::default() };
    let reply = InodeReply { complete: true, ..shown };
    let mut body = Vec::new();
    reply.encode(&mut body);
    Ok(Step::Answer(body))
}

fn list(
    asks: &Asks,
    state: &Volume,
    record: &InodeRecord,
    dir: InodeId,
    cookie: u64,
    names: usize,
) -> Stepped {
    // Who may not search a directory may know what is there, and no more.
    let shows = asks.may(record, X).is_ok();
    list_names(state, (record.ino, cookie), names, |name| {
        let own = name.name == b".." && record.ino == dir;
        let ino = if own { dir } else { name.ino }.in_snapshot(asks.slot);
        (ino, if shows { asks.proof(ino) } else { Proof::NONE })
    })
}

fn xattr(asks: &Asks, state: &Volume, record: &InodeRecord, what: &What, most: usize) -> Stepped {
    let hidden = |name: &[u8]| name.starts_with(b"trusted.") && asks.identity.uid != 0;
    let value = |name: &[u8]| -> Result<Result<Vec<u8>, Errno>, Failure> {
        let known_to_all = storage::acl::is_acl(name) || name.starts_with(b"security.");
        if !known_to_all && let Err(errno) = asks.may(record, R) {
            return Ok(Err(errno));
        }
        if hidden(name) {
            return Ok(Err(Errno::NODATA));
        }
        Ok(state.xattr(record.ino, name)?.ok_or(Errno::NODATA))
    };
    let all = || -> Result<Vec<u8>, Failure> {
        let mut names = state.xattrs(record.ino)?;
        names.retain(|name| !hidden(name));
        names.iter_mut().for_each(|name| name.push(0));
        Ok(names.concat())
    };
    let (whole, from, cut) = match what {
        What::XattrGet { name } => (value(name)?, 0, false),
        What::XattrPart { name, from } if !name.is_empty() => (value(name)?, *from as usize, true),
        What::XattrPart { from, .. } => (Ok(all()?), *from as usize, true),
        _ => (Ok(all()?), 0, false),
    };
    match whole {
        Err(errno) => refuse(errno),
        Ok(whole) if whole.len() > most && !cut => refuse(Errno::TOOBIG),
        Ok(whole) => {
            let mut body = Vec::new();
            rpc::reply_ok(&mut body);
            let rest = whole.get(from..).unwrap_or(&[]);
            body.extend_from_slice(&rest[..rest.len().min(most)]);
            Ok(Step::Answer(body))
        }
    }
}
