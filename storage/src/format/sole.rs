//! Locks that a client grants itself: the *sole use* of a file's locks.
//!
//! Where one client alone has locks on a file, and nobody else waits for one, the head may leave it to that client who of its
//! own owners gets which. The head is asked nothing then. When somebody else asks, the sole use comes back like a
//! lease, and what was granted meanwhile lies where the service reads it: the client is not needed for that, which may be
//! idle, or stopped.
//!
//! ```text
//! SOLES       service  SOLE_FILES x {inode u64, word u64}
//!                      word: 0, or generation << 8 | 1 given, 2 on its way back
//! SOLE_USED   client   SOLE_FILES words: the word of the file when all that the client has locked of it lies in the table
//! SOLE_TABLE  client   SOLE_LOCKS x 32 bytes, in any order:
//!      0  4  pid     process, for F_GETLK
//!      4  1  file    place in SOLES
//!      5  1  space   as in `format::lock`
//!      6  1  kind    1 read, 2 write; 0: nothing lies here
//!      7  1  zero
//!      8  8  owner   16  8  start   24  8  end
//! ```
//!
//! A thread of the client enters an operation (`format::control`, "Operations and recall"), looks at the word, then at the
//! inode beside it, whether the session goes on and leases count still; judges; changes the table so that it holds all locks
//! of the file; looks once more whether the session goes on and leases count (else it undoes the change, and asks the head); and
//! leaves. The first time it writes all that it knows to be locked of the file, and the word into `SOLE_USED` last; it does so
//! while it asks the head nothing about that file. To take the sole use back the service stores the word
//! with 2, waits for who is in an operation as for a lease, reads the table, if `SOLE_USED` says that it is complete, and
//! stores 0. Records may be used again from then on only, and those of a place in `SOLES` are
//! cleared before its next file is used.

use super::Corrupt;
use super::control::{SOLE_TABLE, SOLE_USED, SOLES};
use super::lock::{Lock, LockKind};

/// Files whose locks a client has the sole use of at a time, at most.
pub const SOLE_FILES: usize = 16;
/// Locks that it grants itself, of all these files.
pub const SOLE_LOCKS: usize = 100;
/// Bytes of a record of the table.
pub const SOLE_BYTES: usize = 32;

const GIVEN: u64 = 1;
const COMES_BACK: u64 = 2;
const NAME: &str = "lock of a client's own";

/// The word of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SoleWord(pub u64);

impl SoleWord {
    /// The client has the sole use.
    pub const fn given(generation: u64) -> Self {
        Self(generation << 8 | GIVEN)
    }

    /// Whether the client has it.
    pub const fn is_given(self) -> bool {
        self.0 & 0xff == GIVEN
    }

    /// The same grant on its way back.
    pub const fn coming_back(self) -> Self {
        Self(self.0 & !0xff | COMES_BACK)
    }

    /// Whether the service may still read what was granted under this one, if the word is `now`.
    pub const fn is_open(self, now: Self) -> bool {
        now.0 & 0xff != 0 && now.0 >> 8 == self.0 >> 8
    }
}

/// Offset of the inode of a file; its word lies 8 bytes behind.
pub const fn file_at(file: usize) -> u64 {
    SOLES + file as u64 * 16
}

/// Offset of a file's word of `SOLE_USED`.
pub const fn used_at(file: usize) -> u64 {
    SOLE_USED + file as u64 * 8
}

/// Offset of a record.
pub const fn record_at(record: usize) -> u64 {
    SOLE_TABLE + (record * SOLE_BYTES) as u64
}

/// A record as four words; the first one says whether there is one.
pub const fn record(file: usize, lock: &Lock) -> [u64; 4] {
    let what = (file as u64) << 32 | (lock.space as u64) << 40 | (lock.kind as u64) << 48;
    [what | lock.pid as u64, lock.owner, lock.start, lock.end]
}

/// Reads one: the file's place, and the lock. What is written there is not trusted.
pub fn take_record(words: [u64; 4]) -> Result<Option<(usize, Lock)>, Corrupt> {
    let [what, owner, start, end] = words;
    let byte = |n: u32| (what >> n) as u8;
    let (file, space, kind) = (byte(32) as usize, byte(40), byte(48));
    if what >> 56 != 0 || file >= SOLE_FILES {
        return Err(Corrupt::new(NAME, "is of no file"));
    }
    let lock = Lock::of_parts((space, kind), owner, what as u32, (start, end))?;
    Ok((lock.kind != LockKind::None).then_some((file, lock)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::lock::{LOCK_END, LockSpace};
    use base::random::Random;

    #[test]
    fn what_is_written_is_read_and_the_rest_is_refused() {
        let mut random = Random::new(16);
        for n in 0..2000 {
            let (a, b) = (random.next_u64() >> 1, random.next_u64() >> 1);
            let space = if random.chance(1, 2) { LockSpace::Record } else { LockSpace::Flock };
            let kind = if random.chance(1, 2) { LockKind::Read } else { LockKind::Write };
            let (start, end) = match space {
                LockSpace::Record => (a.min(b), a.max(b)),
                LockSpace::Flock => (0, LOCK_END),
            };
            let owner = random.next_u64();
            let lock = Lock { space, kind, owner, pid: n, start, end };
            let file = random.below(SOLE_FILES as u64) as usize;
            let words = record(file, &lock);
            assert_eq!(take_record(words), Ok(Some((file, lock))));
            let none = Lock { kind: LockKind::None, ..lock };
            assert_eq!(take_record(record(file, &none)), Ok(None));
            for bad in [SOLE_FILES as u64 | 1 << 7, 255] {
                let what = words[0] & !(255 << 32) | bad << 32;
                assert!(take_record([what, words[1], words[2], words[3]]).is_err());
            }
            let [what, owner, start, end] = words;
            assert!(take_record([what | 3 << 48, owner, start, end]).is_err(), "a kind");
            assert!(take_record([what | 2 << 40, owner, start, end]).is_err(), "a space");
            assert!(take_record([what | 1 << 56, owner, start, end]).is_err(), "a reserved byte");
            assert!(take_record([what, owner, end, start]).is_err() || start == end, "a range");
            assert!(take_record([what, owner, start, 1 << 63]).is_err(), "an end");
        }
        assert_eq!(take_record([0; 4]), Ok(None), "what was never written");
    }

    #[test]
    fn a_word_says_how_far_it_is() {
        let word = SoleWord::given(7);
        assert!(word.is_given() && !word.coming_back().is_given() && !SoleWord(0).is_given());
        assert!(word.is_open(word) && word.is_open(word.coming_back()));
        assert!(!word.is_open(SoleWord(0)) && !word.is_open(SoleWord::given(8)));
    }
}
