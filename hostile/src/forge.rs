//! Log entries as an attacker would make them: right in form, wrong in what they say.

use base::InodeId;
use storage::format::entry::{Op, RawHeader, Stamp};
use storage::format::lock::{LOCK_END, Lock, LockKind, LockSpace};

use crate::input::Input;

const NAMES: [&[u8]; 8] = [b"good", b"a", b"b", b"..", b"a/b", b"", &[b'x'; 255], &[b'y'; 256]];

/// One of the inodes that are known, or any number.
pub fn inode(input: &mut Input<'_>, known: &[InodeId]) -> InodeId {
    let choice = usize::from(input.u8());
    match known.get(choice % (known.len() + 2)) {
        Some(ino) => *ino,
        None if choice.is_multiple_of(2) => InodeId::ROOT,
        None => InodeId(input.odd()),
    }
}

fn name<'a>(input: &mut Input<'a>) -> &'a [u8] {
    match NAMES.get(usize::from(input.u8()) % 9) {
        Some(name) => name,
        None => input.piece(),
    }
}

/// The same inodes as snapshots in these slots have them, whether there are any or not.
pub fn then(known: &[InodeId], slots: &[u16]) -> Vec<InodeId> {
    let inodes: Vec<InodeId> = known.iter().copied().chain([InodeId::ROOT]).collect();
    slots.iter().flat_map(|slot| inodes.iter().map(|ino| ino.in_snapshot(*slot))).collect()
}

/// A clone of what some inode has: pieces in order, at edges, over each other, beyond all ends.
pub fn clone_range(input: &mut Input<'_>, ino: InodeId, source: InodeId) -> Op<'static> {
    let (offset, len, source_offset) = match input.below(4) {
        0 => (0, 1 + u64::from(input.u16()), 0),
        1 => (4096 * u64::from(input.u8() % 8), 4096, 4096 * u64::from(input.u8() % 8)),
        _ => (input.odd(), input.odd(), input.odd()),
    };
    Op::CloneRange { ino, offset, len, source, source_offset, zeroes: false }
}

/// Header and payload of an entry of any operation.
pub fn operation(input: &mut Input<'_>, known: &[InodeId], uid: u32) -> (RawHeader, Vec<u8>) {
    let (kind, bits) = (input.below(18), input.u8());
    let flag = bits & 1 != 0;
    let uid = if bits & 2 != 0 { 0 } else { uid };
    let ino = inode(input, known);
    let op = match kind {
        0 | 1 => Op::Create {
            ino,
            parent: inode(input, known),
            mode: if flag { 0o040_755 } else { [0o100_644, 0o100_600, 0o120_777][input.below(3)] },
            rdev: u32::from(bits >> 4),
            uid,
            gid: uid,
            name: name(input),
            target: if bits & 4 != 0 { input.piece() } else { b"" },
        },
        2 => Op::Link { ino, parent: inode(input, known), name: name(input) },
        3 => Op::Unlink { ino, parent: inode(input, known), name: name(input), open: flag },
        4 => Op::Rmdir { ino, parent: inode(input, known), name: name(input), open: flag },
        5 => Op::Rename {
            ino,
            parent: inode(input, known),
            name: name(input),
            new_parent: inode(input, known),
            new_name: name(input),
            replaced: if flag { InodeId::NONE } else { inode(input, known) },
            noreplace: bits & 4 != 0,
            exchange: bits & 8 != 0,
            open: bits & 16 != 0,
        },
        6 | 7 => {
            let (offset, len) = (input.odd(), usize::from(input.u16()));
            let data = vec![bits; len];
            return sealed(&Op::Write { ino, offset, data: &data, clear_setid: flag });
        }
        8 => Op::Truncate { ino, size: input.odd(), clear_setid: flag },
        9 => {
            Op::Fallocate { ino, offset: input.odd(), len: input.odd(), mode: u16::from(bits >> 1) }
        }
        10 => {
            let stamp = Stamp { sec: input.odd() as i64, nsec: input.odd() as u32 };
            let (mask, mode) = (input.odd(), input.odd() as u32);
            Op::SetAttr { ino, mask, mode, uid, gid: uid, atime: stamp, mtime: stamp }
        }
        11 => Op::SetXattr { ino, name: name(input), value: input.piece() },
        12 => Op::RemoveXattr { ino, name: name(input) },
        13 => Op::CloneRange {
            ino,
            offset: input.odd(),
            len: input.odd(),
            source: inode(input, known),
            source_offset: input.odd(),
            zeroes: false,
        },
        14 => {
            let (offset, len, size) = (input.odd(), input.odd(), input.odd());
            Op::Shift { ino, offset, len, insert: flag, size }
        }
        15 => Op::Snapshot { ino, name: name(input) },
        16 => Op::DropSnapshot { ino, name: name(input) },
        _ => Op::Reap { ino },
    };
    sealed(&op)
}

fn sealed(op: &Op<'_>) -> (RawHeader, Vec<u8>) {
    let mut payload = Vec::new();
    let mut raw = op.encode(&mut payload);
    if let Op::Write { data, .. } = op {
        payload.extend_from_slice(data);
    }
    raw.length = payload.len() as u32;
    (raw, payload)
}

/// The bytes of an entry with a right checksum, whatever its fields say.
pub fn seal(raw: &RawHeader, payload: &[u8], incarnation: u32) -> Vec<u8> {
    let mut bytes = raw.seal(incarnation, &[payload]).to_vec();
    bytes.extend_from_slice(payload);
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    bytes
}

/// A lock, of which some are none.
pub fn lock(input: &mut Input<'_>) -> Lock {
    let bits = input.u8();
    Lock {
        space: if bits & 1 == 0 { LockSpace::Record } else { LockSpace::Flock },
        kind: [LockKind::None, LockKind::Read, LockKind::Write][usize::from(bits >> 1) % 3],
        owner: u64::from(bits >> 5),
        pid: u32::from(bits),
        start: if bits & 1 == 0 { input.odd() } else { 0 },
        end: if bits & 1 == 0 { input.odd() } else { LOCK_END },
    }
}
