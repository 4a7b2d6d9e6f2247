//! Locks that this client grants its own owners, of files whose locks the service has left to it alone
//! (`storage::format::sole` has the rules).

use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use base::planted::{Bug, planted};
use base::{ClientId, InodeId};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::sole::{self, SOLE_FILES, SOLE_LOCKS, SoleWord};
use storage::locks::FileLocks;

use super::host::{Host, Memory};
use super::segment::Segment;

impl<H: Host> Segment<H> {
    /// Where the service says that an inode's locks are this client's alone: the place, and the word to be looked at.
    pub fn sole_of(&self, ino: InodeId) -> Option<(usize, SoleWord)> {
        // (A place that it had before may say its number still.)
        let places = (0..SOLE_FILES).filter(|file| self.word(sole::file_at(*file)) == ino.0);
        let words = places.map(|file| (file, SoleWord(self.word(sole::file_at(file) + 8))));
        words.into_iter().find(|(_, word)| word.is_given())
    }

    /// Whether that is so. Meaningful inside an operation, as [`lease_holds`](Self::lease_holds) is.
    pub fn is_sole(&self, (file, word): (usize, SoleWord), ino: InodeId) -> bool {
        let at = sole::file_at(file);
        // In this order: the place may be another file's since, under another word.
        self.memory.load(at + 8, Ordering::SeqCst) == word.0
            && self.memory.load(at, Ordering::SeqCst) == ino.0
    }

    /// Whether what is granted here counts at this moment.
    pub fn grants(&self) -> bool {
        self.attached() && (self.in_time() || planted(Bug::SoleOutOfTime))
    }
}

/// A file of which all that is locked lies in the table.
#[derive(Debug, Default)]
struct File {
    word: SoleWord,
    /// The records that it lies in.
    records: Vec<u8>,
}

/// The table, of one session.
#[derive(Debug, Default)]
pub struct Soles {
    session: u64,
    files: [File; SOLE_FILES],
    free: Vec<u8>,
}

impl Soles {
    /// Of a session; `most` records.
    pub fn of(session: u64, most: usize) -> Self {
        let free = (0..most.min(SOLE_LOCKS) as u8).rev().collect();
        Self { session, files: Default::default(), free }
    }

    /// Whose it is.
    pub const fn session(&self) -> u64 {
        self.session
    }

    /// Whether what is locked of the file lies there under that word.
    pub fn has(&self, (file, word): (usize, SoleWord)) -> bool {
        self.files[file].word == word
    }

    /// Writes all that is locked of a file; `false`, and nothing is changed, when there is no room. Inside an operation in which
    /// the word was looked at.
    pub fn write<H: Host>(
        &mut self,
        segment: &Segment<H>,
        (file, word): (usize, SoleWord),
        locks: Option<&FileLocks>,
    ) -> bool {
        let anew = !self.has((file, word));
        if anew {
            // What lies there is of another grant of this place, which is back.
            self.clear(segment, file);
        }
        let count = locks.map_or(0, |locks| locks.iter().count());
        if self.files[file].records.len() + self.free.len() < count {
            self.sweep(segment);
        }
        let records = &mut self.files[file].records;
        if records.len() + self.free.len() < count {
            return false;
        }
        while records.len() < count {
            records.extend(self.free.pop());
        }
        let locks = locks.into_iter().flat_map(FileLocks::iter).map(|held| held.lock);
        for (record, lock) in records.iter().zip(locks) {
            put(segment, *record, sole::record(file, &lock));
        }
        for record in records.drain(count..) {
            put(segment, record, [0; 4]);
            self.free.push(record);
        }
        if anew {
            // Last: from now on the table counts.
            segment.memory.store(sole::used_at(file), word.0, Ordering::Release);
            self.files[file].word = word;
        }
        true
    }

    fn clear<H: Host>(&mut self, segment: &Segment<H>, file: usize) {
        for record in self.files[file].records.drain(..) {
            put(segment, record, [0; 4]);
            self.free.push(record);
        }
        self.files[file].word = SoleWord::default();
    }

    /// Records of files that are back, and read.
    fn sweep<H: Host>(&mut self, segment: &Segment<H>) {
        for file in 0..SOLE_FILES {
            let now = SoleWord(segment.word(sole::file_at(file) + 8));
            if !self.files[file].word.is_open(now) {
                self.clear(segment, file);
            }
        }
    }
}

fn put<H: Host>(segment: &Segment<H>, record: u8, words: [u64; 4]) {
    for (at, word) in (sole::record_at(record.into())..).step_by(8).zip(words) {
        segment.memory.store(at, word, Ordering::Relaxed);
    }
}

/// What becomes of a lock that is asked for here.
#[derive(Debug)]
pub enum Judged {
    /// All that is locked of the file from now on.
    Now(FileLocks),
    /// That, and it is barred.
    Barred(FileLocks),
    /// That is the head's to say.
    Ask,
}

/// Judges by all that is locked of the file.
pub fn judge(own: ClientId, held: Option<&FileLocks>, lock: Lock, waits: bool) -> Judged {
    let mut locks = held.cloned().unwrap_or_default();
    let barred = locks.barring(own, lock).next().is_some();
    if barred && waits {
        // Who waits is noted there, where circles are seen.
        return Judged::Ask;
    }
    if !barred {
        let _ = locks.put(own, lock, usize::MAX);
        return Judged::Now(locks);
    }
    if lock.space == LockSpace::Flock {
        // A change of mode gives the old one up first.
        let _ = locks.put(own, Lock { kind: LockKind::None, ..lock }, usize::MAX);
    }
    Judged::Barred(locks)
}

#[cfg(test)]
mod model;
