//! How the fields of messages travel, each by its type.

use base::wire::{Corrupt, Reader, Writer};
use base::{ClientId, Epoch, InodeId, Sequence, StreamSeq};
use storage::format::control::LeaseMode;
use storage::format::lock::{LOCK_BYTES, Lock, LockSpace};
use storage::format::rpc::Span;
use storage::format::sole::SOLE_LOCKS;
use storage::limits::{BLOCK_BYTES, FILE_SIZE_MAX};

use super::{Identity, LockAsk, NAME, Raw, SoleSays};
use crate::core::frame::FRAME_HEAD;
use crate::core::heal::Answer;
use crate::core::offer::{Doubt, OFFER_BLOCKS, Offered, Part};

/// Of a list, at most.
const LIST_MAX: usize = 1 << 20;

/// What the head of an Entries message lacks to be as long as a chunk's.
const ENTRIES_ZEROES: usize = FRAME_HEAD - 28;
const _: () = assert!(ENTRIES_ZEROES == 64, "as it is shown");

/// What can be a field of a message.
pub(super) trait Field: Sized {
    /// How it travels, in words.
    const SHOWN: &str;

    fn put(&self, w: &mut Writer<'_>);

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt>;
}

/// What can be in a list: a u32 says how many there are.
trait Item: Field {
    /// Bytes of one.
    const BYTES: usize;
    /// How a list of them travels, in words.
    const LIST: &str;
    /// Why a list is refused that says more than it has.
    const TOO_MANY: &str;
}

macro_rules! numbers {
    ($($type:ident),+) => {
        $(impl Field for $type {
            const SHOWN: &str = stringify!($type);

            fn put(&self, w: &mut Writer<'_>) {
                w.$type(*self);
            }

            fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
                r.$type()
            }
        })+
    };
}

macro_rules! names {
    ($($type:ident($of:ident)),+) => {
        $(impl Field for $type {
            const SHOWN: &str = stringify!($of);

            fn put(&self, w: &mut Writer<'_>) {
                self.0.put(w);
            }

            fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
                Field::take(r).map(Self)
            }
        })+
    };
}

numbers!(u8, u16, u32, u64, u128);
names!(ClientId(u64), Epoch(u32), InodeId(u64));

macro_rules! positions {
    ($($type:ident),+) => {
        $(impl Field for $type {
            const SHOWN: &str = "u64";

            fn put(&self, w: &mut Writer<'_>) {
                w.u64(self.0);
            }

            fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
                let position = Self(r.u64()?);
                if position >= Self::END {
                    return Err(Corrupt::new(NAME, "names a position that nothing can have"));
                }
                Ok(position)
            }
        })+
    };
}

positions!(Sequence, StreamSeq);

impl Field for bool {
    const SHOWN: &str = "u8";

    fn put(&self, w: &mut Writer<'_>) {
        w.u8(u8::from(*self));
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        r.flag()
    }
}

impl Field for LeaseMode {
    const SHOWN: &str = "u8";

    fn put(&self, w: &mut Writer<'_>) {
        w.u8(*self as u8);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Self::from_u8(r.u8()?).ok_or(Corrupt::new(NAME, "has an unknown lease mode"))
    }
}

impl Field for Span {
    const SHOWN: &str = "u64, u64";

    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.from).u64(self.to);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Ok(Self { from: r.u64()?, to: r.u64()? })
    }
}

impl Field for Answer {
    const SHOWN: &str = "u8";

    fn put(&self, w: &mut Writer<'_>) {
        w.u8(*self as u8);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Self::from_u8(r.u8()?).ok_or(Corrupt::new(NAME, "answers what is no answer"))
    }
}

impl Field for Lock {
    const SHOWN: &str = "lock";

    fn put(&self, w: &mut Writer<'_>) {
        self.encode(w);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Self::decode(r)
    }
}

impl Field for Option<Lock> {
    const SHOWN: &str = "u8, lock if 1";

    fn put(&self, w: &mut Writer<'_>) {
        self.is_some().put(w);
        self.iter().for_each(|lock| lock.put(w));
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Ok(if r.flag()? { Some(Lock::take(r)?) } else { None })
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    const SHOWN: &str = "both u64";

    fn put(&self, w: &mut Writer<'_>) {
        self.0.put(w);
        self.1.put(w);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Ok((A::take(r)?, B::take(r)?))
    }
}

impl Item for u32 {
    const LIST: &str = "list of u32";
    const BYTES: usize = 4;
    const TOO_MANY: &str = "claims more groups than it holds";
}

impl Item for InodeId {
    const LIST: &str = "list of u64";
    const BYTES: usize = 8;
    const TOO_MANY: &str = "claims more inodes than it holds";
}

impl Item for (InodeId, LeaseMode) {
    const LIST: &str = "list of (u64, u8)";
    const BYTES: usize = 9;
    const TOO_MANY: &str = "claims more leases than it holds";
}

impl Item for (InodeId, Lock) {
    const LIST: &str = "list of (u64, lock)";
    const BYTES: usize = 8 + LOCK_BYTES;
    const TOO_MANY: &str = "claims more locks than it holds";
}

impl Item for Offered {
    const LIST: &str = "list of (ino u64, first block u64, list of CRC32C u32)";
    const BYTES: usize = 20;
    const TOO_MANY: &str = "claims more offers than it holds";
}

impl Item for Part {
    const LIST: &str = "list of (ino u64, first block u64, blocks u32)";
    const BYTES: usize = 20;
    const TOO_MANY: &str = "claims more blocks than it holds";
}

impl Item for Doubt {
    const LIST: &str = "list of (ino u64, first block u64, blocks u32, keyed u64)";
    const BYTES: usize = 28;
    const TOO_MANY: &str = "doubts more blocks than it holds";
}

impl Item for Lock {
    const LIST: &str = "list of locks";
    const BYTES: usize = LOCK_BYTES;
    const TOO_MANY: &str = "claims more locks than it holds";
}

impl<T: Item> Field for Vec<T> {
    const SHOWN: &str = T::LIST;

    fn put(&self, w: &mut Writer<'_>) {
        w.u32(self.len() as u32);
        self.iter().for_each(|item| item.put(w));
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let n = r.u32()? as usize;
        if n > LIST_MAX || n > r.left() / T::BYTES {
            return Err(r.corrupt(T::TOO_MANY));
        }
        (0..n).map(|_| T::take(r)).collect()
    }
}

/// All that is left.
impl Field for Vec<u8> {
    const SHOWN: &str = "the rest";

    fn put(&self, w: &mut Writer<'_>) {
        w.bytes(self);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Ok(r.rest().to_vec())
    }
}

impl Field for Raw {
    const SHOWN: &str = "64 zeroes, log entries";

    fn put(&self, w: &mut Writer<'_>) {
        w.bytes(&[0; ENTRIES_ZEROES]).bytes(self.body());
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        r.zeroes(ENTRIES_ZEROES)?;
        Ok(Self::Unchecked(r.rest().to_vec().into()))
    }
}

impl Field for Identity {
    const SHOWN: &str = "uid u32, gid u32, list of u32";

    fn put(&self, w: &mut Writer<'_>) {
        let Self { uid, gid, groups } = self;
        w.u32(*uid).u32(*gid);
        groups.put(w);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Ok(Self { uid: r.u32()?, gid: r.u32()?, groups: Field::take(r)? })
    }
}

/// Whether a file can have these blocks.
fn in_a_file(first: u64, count: u64) -> bool {
    count > 0 && first.checked_add(count).is_some_and(|end| end <= FILE_SIZE_MAX / BLOCK_BYTES)
}

impl Field for Offered {
    const SHOWN: &str = <Self as Item>::LIST;

    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.ino.0).u64(self.first);
        self.crcs.put(w);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (ino, first, crcs) = (InodeId(r.u64()?), r.u64()?, Vec::<u32>::take(r)?);
        let count = crcs.len() as u64;
        if count > OFFER_BLOCKS || !in_a_file(first, count) {
            return Err(r.corrupt("offers blocks that no file has, or too many"));
        }
        Ok(Self { ino, first, crcs })
    }
}

impl Field for Part {
    const SHOWN: &str = <Self as Item>::LIST;

    fn put(&self, w: &mut Writer<'_>) {
        w.u64(self.ino.0).u64(self.first).u32(self.count);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (ino, first, count) = (InodeId(r.u64()?), r.u64()?, r.u32()?);
        if u64::from(count) > OFFER_BLOCKS || !in_a_file(first, count.into()) {
            return Err(r.corrupt("names blocks that no file has, or too many"));
        }
        Ok(Self { ino, first, count })
    }
}

impl Field for Doubt {
    const SHOWN: &str = <Self as Item>::LIST;

    fn put(&self, w: &mut Writer<'_>) {
        self.part.put(w);
        w.u64(self.keyed);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Ok(Self { part: Part::take(r)?, keyed: r.u64()? })
    }
}

impl Field for LockAsk {
    const SHOWN: &str = "what u8 (1 set, 2 test, 3 cancel), wait u64, lock";

    fn put(&self, w: &mut Writer<'_>) {
        let (what, wait, lock) = match *self {
            Self::Set { lock, wait } => (1, wait, lock),
            Self::Test { lock } => (2, 0, lock),
            Self::Cancel { wait } => (3, wait, Lock::all_of(LockSpace::Record, 0)),
        };
        w.u8(what).u64(wait);
        lock.put(w);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (what, wait) = (r.u8()?, r.u64()?);
        let lock = Lock::take(r)?;
        match what {
            1 => Ok(Self::Set { lock, wait }),
            2 if wait == 0 => Ok(Self::Test { lock }),
            3 if lock == Lock::all_of(LockSpace::Record, 0) => Ok(Self::Cancel { wait }),
            2 | 3 => Err(r.corrupt("asks about a lock with more than it needs")),
            _ => Err(r.corrupt("asks an unknown thing about a lock")),
        }
    }
}

impl Field for SoleSays {
    const SHOWN: &str =
        "what u8 (1 wants, 2 has, 3 unused, 4 returns, 5 returns unvouched), list of locks";

    fn put(&self, w: &mut Writer<'_>) {
        let (what, locks) = match self {
            Self::Wants => (1, None),
            Self::Has => (2, None),
            Self::Unused => (3, None),
            Self::Returns { locks, vouched: true } => (4, Some(locks)),
            Self::Returns { locks, vouched: false } => (5, Some(locks)),
        };
        w.u8(what);
        locks.unwrap_or(&Vec::new()).put(w);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (what, locks) = (r.u8()?, Vec::<Lock>::take(r)?);
        match what {
            1..=3 if !locks.is_empty() => Err(r.corrupt("has locks that it does not need")),
            1 => Ok(Self::Wants),
            2 => Ok(Self::Has),
            3 => Ok(Self::Unused),
            4 | 5 if locks.len() > SOLE_LOCKS => {
                Err(r.corrupt("returns more locks than there can be"))
            }
            4 | 5 => Ok(Self::Returns { locks, vouched: what == 4 }),
            _ => Err(r.corrupt("says an unknown thing of a sole use")),
        }
    }
}

/// What comes before the entries of an Entries message that stays where it lies.
pub(super) fn entries_head(r: &mut Reader<'_>) -> Result<(ClientId, Sequence, Sequence), Corrupt> {
    let head = (Field::take(r)?, Field::take(r)?, Field::take(r)?);
    r.zeroes(ENTRIES_ZEROES)?;
    Ok(head)
}
