//! All that a state of a volume has, by a walk over it, and what the differences of two states make of the earlier one. (The
//! simulator has this file as well: nothing here panics.)

use std::collections::BTreeMap;

use base::InodeId;
use storage::format::page::Key;
use storage::format::rpc::{Difference, InodeRecord};
use storage::volume::{Fault, Volume};

const TYPE: u32 = 0o170_000;
const FILE: u32 = 0o100_000;
const DIR: u32 = 0o040_000;
const SYMLINK: u32 = 0o120_000;
/// Pieces that differences may come in: far more than any test has.
const PIECES_MAX: usize = 1 << 20;

/// An inode, with all that is told of it as touched, and the bytes of a file.
#[derive(Clone, PartialEq, Debug)]
pub struct One {
    record: InodeRecord,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    target: Vec<u8>,
    pub bytes: Vec<u8>,
}

/// See the module.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Whole {
    pub inodes: BTreeMap<InodeId, One>,
    pub names: BTreeMap<(InodeId, Vec<u8>), InodeId>,
}

impl Whole {
    pub fn of(state: &Volume) -> Result<Self, Fault> {
        let mut all = Self::default();
        for ino in state.inodes_after(InodeId(0), usize::MAX)? {
            let Some(record) = state.attr(ino)? else { continue };
            let (mut bytes, mut target, mut xattrs) = (Vec::new(), Vec::new(), BTreeMap::new());
            match record.mode & TYPE {
                FILE => {
                    bytes.resize(record.size as usize, 0);
                    state.read_file(ino, 0, &mut bytes)?;
                }
                SYMLINK => target = state.symlink(ino)?,
                DIR => {
                    state.readdir(ino, 0, usize::MAX, &mut |name| {
                        if name.name != b"." && name.name != b".." {
                            all.names.insert((ino, name.name.to_vec()), name.ino);
                        }
                        true
                    })?;
                }
                _ => {}
            }
            for name in state.xattrs(ino)? {
                xattrs.insert(name.clone(), state.xattr(ino, &name)?.unwrap_or_default());
            }
            all.inodes.insert(ino, One { record, xattrs, target, bytes });
        }
        Ok(all)
    }

    /// Makes of an earlier state what the later one is, by what is told of the differences and nothing else.
    pub fn follow(&mut self, later: &Self, told: Vec<Difference>) -> Result<(), String> {
        for one in told {
            match one {
                Difference::Touched { ino } => match later.inodes.get(&ino) {
                    None => drop(self.inodes.remove(&ino)),
                    Some(there) => {
                        let had = self.inodes.remove(&ino).map(|one| one.bytes);
                        let mut bytes = had.unwrap_or_default();
                        bytes.resize(there.bytes.len(), 0);
                        self.inodes.insert(ino, One { bytes, ..there.clone() });
                    }
                },
                Difference::Content { ino, offset, len } => {
                    let Some(there) = later.inodes.get(&ino) else { continue };
                    let end = offset.saturating_add(len).min(there.bytes.len() as u64) as usize;
                    let part = (offset as usize).min(end)..end;
                    let into = self.inodes.get_mut(&ino).map(|one| &mut one.bytes);
                    let into = into.and_then(|bytes| bytes.get_mut(part.clone()));
                    let into = into.ok_or_else(|| {
                        format!("content of inode {ino} at {offset} is told of before its size")
                    })?;
                    into.copy_from_slice(&there.bytes[part]);
                }
                Difference::Unnamed { dir, ino, name } => {
                    if self.names.remove(&(dir, name)) != Some(ino) {
                        return Err(format!("inode {ino} had no such name in {dir}"));
                    }
                }
                Difference::Named { dir, ino, name, kind } => {
                    let there = later.inodes.get(&ino);
                    if there.is_none_or(|there| there.record.mode & TYPE != kind) {
                        return Err(format!("inode {ino} is told to be of type {kind:o}"));
                    }
                    if self.names.insert((dir, name), ino).is_some() {
                        return Err(format!("inode {ino} gets a name in {dir} that is there"));
                    }
                }
            }
        }
        Ok(())
    }

    /// In a few words, what another state has otherwise.
    pub fn against(&self, other: &Self) -> Result<(), String> {
        for ino in self.inodes.keys().chain(other.inodes.keys()) {
            let (Some(a), Some(b)) = (self.inodes.get(ino), other.inodes.get(ino)) else {
                return Err(format!("inode {ino} is there in one of them only"));
            };
            if a.bytes != b.bytes {
                let at = a.bytes.iter().zip(&b.bytes).position(|(a, b)| a != b);
                return Err(format!("content of inode {ino} from byte {at:?} on"));
            }
            if a != b {
                return Err(format!("attributes of inode {ino}"));
            }
        }
        if self.names == other.names { Ok(()) } else { Err("names".into()) }
    }
}

/// The state in a slot.
pub fn whole(volume: &mut Volume, slot: u16) -> Result<Whole, String> {
    let state = volume.read_snapshot(slot).ok_or("a snapshot is not on media")?;
    Whole::of(state).map_err(|e| format!("slot {slot}: {e:?}"))
}

/// The differences of two snapshots, asked for in pieces of these bounds.
pub fn differences(
    volume: &mut Volume,
    before: Option<u16>,
    slot: u16,
    mut bounds: impl FnMut() -> (usize, usize),
) -> Result<Vec<Difference>, String> {
    let (mut all, mut at) = (Vec::new(), Some(Key::MIN));
    for _ in 0..PIECES_MAX {
        let Some(key) = at else { break };
        let found = volume.snapshot_difference(before, slot, key, bounds());
        let (some, next) = found
            .map_err(|e| format!("differences from {key:?} on: {e:?}"))?
            .ok_or("a snapshot is not on media")?;
        let place = |key: Key| (key.ino, key.kind & 0x7f, key.item);
        if next.is_some_and(|next| place(next) <= place(key)) {
            return Err(format!("differences go on at {next:?} behind {key:?}"));
        }
        all.extend(some);
        at = next;
    }
    if !all.iter().map(Difference::of).is_sorted() {
        return Err("differences are not in the order of inodes".into());
    }
    Ok(all)
}

/// Who has the earlier of two snapshots (none: an empty volume), and is told the differences, has the later one.
pub fn differences_are_complete(
    volume: &mut Volume,
    before: Option<u16>,
    slot: u16,
    bounds: impl FnMut() -> (usize, usize),
) -> Result<(), String> {
    let mut has = before.map_or(Ok(Whole::default()), |before| whole(volume, before))?;
    let right = whole(volume, slot)?;
    let told = differences(volume, before, slot, bounds)?;
    has.follow(&right, told)?;
    has.against(&right).map_err(|what| format!("not told of: {what}"))
}
