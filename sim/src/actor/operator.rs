//! Who makes snapshots: one client, which alone knows their names.
//!
//! No file changes by it, so the model knows nothing of them. What they show is judged at the end: every member has the same
//! ones, and each shows the same state there, though they have published at other times, put blocks elsewhere, crashed, or
//! joined since.

use std::collections::BTreeSet;

use storage::volume::{Volume, joins};

use super::*;

/// There are not more at a time, or not for long.
const ALIVE: usize = 5;

/// Snapshots that were made.
#[derive(Debug, Default)]
pub(crate) struct History {
    made: u64,
    /// Given up, or about to be.
    dropped: BTreeSet<Vec<u8>>,
    /// What the first member has: number, name, and what it shows.
    pub shown: Option<Vec<(u64, Vec<u8>, u64)>>,
}

impl World<'_> {
    /// The entry that makes a snapshot, or gives one up.
    pub(super) fn snapshot<'a>(&mut self, c: usize, name: &'a mut Vec<u8>) -> Op<'a> {
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
            return Op::DropSnapshot { ino, name };
        }
        self.history.made += 1;
        *name = format!("s{}", self.history.made).into_bytes();
        Op::Snapshot { ino, name }
    }

    /// What a member shows of snapshots, by its region.
    pub(crate) fn judge_snapshots(&mut self, n: usize, volume: &mut Volume) -> Result<(), String> {
        volume.invariants()?;
        let mut shown = Vec::new();
        for stat in volume.snapshots(0, usize::MAX) {
            let slot = stat.snapshot.slot;
            let state = volume.read_snapshot(slot).ok_or("a snapshot is not on media")?;
            let digest = state.digest().map_err(|e| format!("snapshot {}: {e}", stat.number))?;
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
