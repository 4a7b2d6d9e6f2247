//! Who makes snapshots: one client, which alone knows their names. It brings back what they show as well: it clones files of them,
//! in whole and in part, into files that are there, to which all others write, which they cut and remove, and the snapshots go.
//!
//! No file changes by a snapshot, so the model knows nothing of them. What they show is judged at the end: every member has the same
//! ones, and each shows the same state there, though they have published at other times, put blocks elsewhere, crashed, or
//! joined since. Of files on which the client had leases when it made one it is known to the byte what that is. What it has cloned
//! is a version like others from then on, with the bytes that the snapshot showed.
//!
//! What two of them have otherwise is told by the volume: who follows that comes from the one to the other, on each member.

use std::collections::BTreeSet;
use std::sync::Arc;

use base::Level;
use service::core::Role;
use storage::volume::{Volume, joins};

use super::*;
use crate::whole::differences_are_complete;

/// There are not more at a time, or not for long.
const ALIVE: usize = 5;
/// One in so many clones is one from a snapshot that is gone, where there is one.
const OVER: u64 = 8;

/// Snapshots that were made.
#[derive(Debug, Default)]
pub(crate) struct History {
    made: u64,
    /// Given up, or about to be.
    dropped: BTreeSet<Vec<u8>>,
    /// What the first member has: number, name, and what it shows.
    pub shown: Option<Vec<(u64, Vec<u8>, u64)>>,
    /// By name, what files hold there on which the client had leases.
    had: BTreeMap<Vec<u8>, BTreeMap<u64, Vec<u8>>>,
    /// Slots that were cloned from, and of which snapshots.
    slots: BTreeMap<u16, Vec<u8>>,
    /// Those of them that are empty by now.
    over: BTreeSet<u16>,
}

impl History {
    /// Whether an operation asks for a snapshot that is gone.
    pub(super) fn is_over(&self, op: &Op<'_>) -> bool {
        let Op::CloneRange { source, .. } = op else { return false };
        source.of_snapshot().is_some_and(|(slot, _)| self.over.contains(&slot))
    }

    /// Whether a snapshot shows of a file what was in it.
    fn judge(&self, name: &[u8], state: &Volume) -> Result<(), String> {
        let fault = |e: storage::volume::Fault| e.to_string();
        for (ino, bytes) in self.had.get(name).into_iter().flatten() {
            let name = String::from_utf8_lossy(name);
            let size = state.attr(InodeId(*ino)).map_err(fault)?.map(|r| r.size);
            let mut seen = vec![0; bytes.len()];
            state.read_file(InodeId(*ino), 0, &mut seen).map_err(fault)?;
            if size != Some(bytes.len() as u64) || seen != *bytes {
                return Err(format!(
                    "snapshot {name} shows {size:?} bytes of file {ino}, crc {:08x}, which had {}, crc {:08x}",
                    base::crc32c(0, &seen),
                    bytes.len(),
                    base::crc32c(0, bytes)
                ));
            }
        }
        Ok(())
    }
}

impl World<'_> {
    /// The entry that makes a snapshot, or gives one up; none while not all nodes know of them.
    pub(super) fn snapshot<'a>(&mut self, c: usize, name: &'a mut Vec<u8>) -> Option<Op<'a>> {
        if !self.all_know(Level::SNAPSHOTS) {
            return None;
        }
        let node = self.actors[c].node;
        let volume = self.hosts[node].node.as_ref().map(service::core::Node::volume);
        let all = volume.map_or_else(Vec::new, |volume| volume.snapshots(0, usize::MAX));
        let mut names: Vec<Vec<u8>> = all.into_iter().map(|stat| stat.snapshot.name).collect();
        names.retain(|name| !joins::is_one(name) && !self.history.dropped.contains(name));
        let ino = InodeId::ROOT;
        if !names.is_empty() && (names.len() >= ALIVE || self.random.chance(1, 3)) {
            let which = self.random.below(names.len() as u64) as usize;
            *name = names.swap_remove(which);
            self.history.dropped.insert(name.clone());
            return Some(Op::DropSnapshot { ino, name });
        }
        self.history.made += 1;
        *name = format!("s{}", self.history.made).into_bytes();
        let had = self.known_content(c);
        self.history.had.insert(name.clone(), had);
        Some(Op::Snapshot { ino, name })
    }

    /// What files hold that nobody but the client can change now.
    fn known_content(&self, c: usize) -> BTreeMap<u64, Vec<u8>> {
        let leases = self.session(c).map(|s| &s.leases).into_iter().flatten();
        let held = leases.filter(|(ino, _)| self.holds(c, **ino, LeaseMode::Read));
        let content = |(ino, lease): (&u64, &Lease)| match &lease.view.as_ref()?.body {
            Body::File(bytes, links) if *links > 0 => Some((*ino, bytes.clone())),
            _ => None,
        };
        held.filter_map(content).collect()
    }

    /// A file as a snapshot has it, by the region of the client's node, and what it holds; nothing, if there is none.
    pub(super) fn source_then(
        &mut self,
        c: usize,
        target: u64,
    ) -> Result<(InodeId, Vec<u8>), String> {
        let nothing = (InodeId::NONE, Vec::new());
        if !self.all_know(Level::SNAPSHOTS) {
            return Ok(nothing);
        }
        let host = &self.hosts[self.actors[c].node];
        let region = Arc::clone(&host.region);
        // (Who joins has a region that is being filled.)
        let serves = |node: &service::core::Node| {
            let status = node.status();
            matches!(status.role, Role::Head | Role::Member) && status.ready
        };
        if !host.node.as_ref().is_some_and(serves) {
            return Ok(nothing);
        }
        let mut volume = Volume::open(region as _).map_err(|e| format!("open: {e:?}"))?;
        let gone = |(slot, name): &(&u16, &Vec<u8>)| {
            volume.snapshot_in(**slot).is_none() && self.history.dropped.contains(*name)
        };
        let gone = self.history.slots.iter().filter(gone);
        self.history.over = gone.map(|(slot, _)| *slot).collect();
        if !self.history.over.is_empty() && self.random.chance(1, OVER) {
            let which = self.random.below(self.history.over.len() as u64) as usize;
            let slot = self.history.over.iter().nth(which).copied().unwrap_or(1);
            return Ok((InodeId(target).in_snapshot(slot), vec![0; 10_000]));
        }
        let mut all = volume.snapshots(0, usize::MAX);
        all.retain(|stat| {
            let name = &stat.snapshot.name;
            !joins::is_one(name) && !self.history.dropped.contains(name)
        });
        if all.is_empty() {
            return Ok(nothing);
        }
        let one = all.swap_remove(self.random.below(all.len() as u64) as usize).snapshot;
        let Some(state) = volume.read_snapshot(one.slot) else { return Ok(nothing) };
        self.history.judge(&one.name, state)?;
        let fault = |e: storage::volume::Fault| e.to_string();
        let mut files = Vec::new();
        for ino in state.inodes_after(InodeId(0), usize::MAX).map_err(fault)? {
            let record = state.attr(ino).map_err(fault)?;
            let is_file = |r: &rpc::InodeRecord| r.mode & S_IFMT == S_IFREG && r.size > 0;
            files.extend(record.filter(is_file).map(|r| (ino, r.size)));
        }
        // The same file, as it was, or any.
        let same = files.iter().position(|(ino, _)| ino.0 == target);
        let any = self.random.below(files.len().max(1) as u64) as usize;
        let at = same.filter(|_| self.random.chance(1, 2)).unwrap_or(any);
        let Some(&(ino, size)) = files.get(at) else { return Ok(nothing) };
        let mut bytes = vec![0; size as usize];
        state.read_file(ino, 0, &mut bytes).map_err(fault)?;
        self.history.slots.insert(one.slot, one.name);
        Ok((ino.in_snapshot(one.slot), bytes))
    }

    /// What a member shows of snapshots, by its region.
    pub(crate) fn judge_snapshots(&mut self, n: usize, volume: &mut Volume) -> Result<(), String> {
        volume.invariants()?;
        let (mut shown, mut slots) = (Vec::new(), vec![None]);
        for stat in volume.snapshots(0, usize::MAX) {
            let slot = stat.snapshot.slot;
            let before = slots[self.random.below(slots.len() as u64) as usize];
            for before in [slots.last().copied().flatten(), before] {
                let random = &mut self.random;
                let bounds = || (1 + random.below(4000) as usize, 1 + random.below(30) as usize);
                differences_are_complete(volume, before, slot, bounds).map_err(|why| {
                    format!(
                        "node {}: snapshot {} against slot {before:?}: {why}",
                        n + 1,
                        stat.number
                    )
                })?;
            }
            slots.push(Some(slot));
            let state = volume.read_snapshot(slot).ok_or("a snapshot is not on media")?;
            let digest = state.digest().map_err(|e| format!("snapshot {}: {e}", stat.number))?;
            let had = self.history.had.get(&stat.snapshot.name).map_or(0, BTreeMap::len);
            self.outcome.observations += had as u64;
            self.history
                .judge(&stat.snapshot.name, state)
                .map_err(|why| format!("node {}: {why}", n + 1))?;
            let (mut wrong, mut at) = (Vec::new(), InodeId::NONE);
            while let [ino] = state.inodes_after(at, 1).map_err(|e| e.to_string())?[..] {
                at = ino;
                let size = state.attr(ino).map_err(|e| e.to_string())?.map_or(0, |r| r.size);
                let mut bytes = vec![0; size as usize];
                let read = state.read_checked(ino, 0, &mut bytes, &mut wrong);
                read.map_err(|e| e.to_string())?;
            }
            if !wrong.is_empty() {
                return Err(format!(
                    "node {}: snapshot {} is rotten: {wrong:?}",
                    n + 1,
                    stat.number
                ));
            }
            shown.push((stat.number, stat.snapshot.name, digest));
        }
        self.outcome.snapshots += shown.len() as u64;
        match &self.history.shown {
            Some(first) if *first != shown => {
                Err(format!("node {} has other snapshots: {shown:?} against {first:?}", n + 1))
            }
            Some(_) => Ok(()),
            None => {
                self.history.shown = Some(shown);
                Ok(())
            }
        }
    }
}
