//! Files of whose locks the client has the sole use, and what it has granted itself of them (`storage::format::sole`).

use std::collections::BTreeSet;

use base::planted::{Bug, planted};
use base::{InodeId, Nanos};
use storage::format::lock::Lock;
use storage::format::sole::{self, SOLE_BYTES, SOLE_FILES, SOLE_LOCKS, SoleWord};
use storage::locks::FileLocks;
use storage::media::MediaError;

use super::Client;

/// A file whose locks are the client's alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sole {
    /// Its place in the client's memory.
    file: usize,
    word: SoleWord,
    /// By which the head knows this grant; 0: that is not known here.
    token: u64,
    /// Since when.
    at: Nanos,
}

impl Client {
    /// Gives it the sole use of a file's locks; `false`: it has no place for one more, or more than `most`.
    pub fn give_sole(&mut self, (ino, token): (InodeId, u64), most: usize, now: Nanos) -> bool {
        let taken: BTreeSet<usize> = self.soles.values().map(|sole| sole.file).collect();
        let free = (0..most.min(SOLE_FILES)).find(|file| !taken.contains(file));
        let Some(file) = free.filter(|_| !self.soles.contains_key(&ino)) else { return false };
        self.generation += 1;
        let word = SoleWord::given(self.generation);
        // In this order: whoever finds the word looks at the inode then.
        self.set_word(sole::file_at(file), ino.0);
        self.set_word(sole::file_at(file) + 8, word.0);
        self.soles.insert(ino, Sole { file, word, token, at: now });
        true
    }

    /// Whether it has it.
    pub fn has_sole(&self, ino: InodeId) -> bool {
        self.soles.contains_key(&ino)
    }

    /// By which token it has it; 0: none that is known.
    pub fn sole_token(&self, ino: InodeId) -> u64 {
        self.soles.get(&ino).map_or(0, |sole| sole.token)
    }

    /// Of which files.
    pub fn soles(&self) -> impl Iterator<Item = InodeId> {
        self.soles.keys().copied()
    }

    /// Whether there is a place for one more; else the file whose place may be taken, which has it since before `then`.
    pub fn place_for_sole(&self, most: usize, then: Nanos) -> Result<(), Option<InodeId>> {
        if self.soles.len() < most.min(SOLE_FILES) {
            return Ok(());
        }
        let oldest = self.soles.iter().min_by_key(|(_, sole)| sole.at);
        Err(oldest.filter(|(_, sole)| sole.at < then).map(|(ino, _)| *ino))
    }

    /// From now on it grants itself nothing more of this file, once those are out that are in an operation.
    pub fn take_sole_back(&self, ino: InodeId) {
        if let Some(sole) = self.soles.get(&ino)
            && !planted(Bug::SoleWordKept)
        {
            self.set_word(sole::file_at(sole.file) + 8, sole.word.coming_back().0);
        }
    }

    /// All that it has locked of the file; `None`: what it had locked before stands, as it has granted itself nothing. Nothing
    /// that it writes there is trusted: what is no lock, or is barred by another one, does not count.
    pub fn read_sole(&self, ino: InodeId) -> Result<Option<FileLocks>, MediaError> {
        let Some(sole) = self.soles.get(&ino) else { return Ok(None) };
        if SoleWord(self.word(sole::used_at(sole.file))) != sole.word {
            return Ok(None);
        }
        let mut table = [0; SOLE_LOCKS * SOLE_BYTES];
        self.media.read(self.log(), sole::record_at(0), &mut table)?;
        let mut locks = FileLocks::default();
        for record in table.as_chunks::<SOLE_BYTES>().0 {
            let mut words = [0; 4];
            for (word, bytes) in words.iter_mut().zip(record.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            match sole::take_record(words) {
                Ok(Some((file, lock))) if file == sole.file => self.take_lock(&mut locks, lock),
                _ => {}
            }
        }
        Ok(Some(locks))
    }

    fn take_lock(&self, locks: &mut FileLocks, lock: Lock) {
        let free = locks.barring(self.id, lock).next().is_none();
        if free {
            // One that splits another makes two of it: what there is no room for does not count either.
            let room = SOLE_LOCKS.saturating_sub(locks.iter().count());
            let _ = locks.put(self.id, lock, room);
        }
    }

    /// It has the sole use no more, and what it granted itself is read.
    pub fn end_sole(&mut self, ino: InodeId) {
        if let Some(sole) = self.soles.remove(&ino)
            && !planted(Bug::SoleWordKept)
        {
            self.set_word(sole::file_at(sole.file) + 8, 0);
        }
    }

    /// Takes back what an earlier run had given, as far as the client's own memory says it: that may be wrong, and the head
    /// knows better.
    pub(super) fn take_up_soles(&mut self) {
        for file in 0..SOLE_FILES {
            let at = sole::file_at(file);
            let (ino, word) = (InodeId(self.word(at)), SoleWord(self.word(at + 8)));
            let some = word.is_given() || word == word.coming_back() && word.0 != 0;
            if !some || self.soles.contains_key(&ino) {
                self.set_word(at + 8, 0);
                continue;
            }
            let given = SoleWord::given(word.0 >> 8);
            self.soles.insert(ino, Sole { file, word: given, token: 0, at: 0 });
            self.take_sole_back(ino);
        }
    }
}
