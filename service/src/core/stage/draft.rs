//! A chunk in the making: of the entries that came, or of what the service makes itself.

use base::{Sequence, StreamSeq};

use crate::core::coalesce::Notes;
use crate::core::frame::Checked;

/// A chunk in the making.
pub(super) struct Draft<'a> {
    pub(super) entries: Entries<'a>,
    pub(super) count: u32,
    pub(super) source: (storage::media::Segment, u64),
    pub(super) reserved: usize,
    pub(super) seq: StreamSeq,
    /// How many entries were refused, the last of them, and why.
    pub(super) refused: (u32, Sequence, u16),
    /// What its entries do to each other.
    pub(super) notes: Notes,
}

/// The entries of a draft: those that came, as they lie there, as long as all of them are taken as they are; else a copy.
pub(super) struct Entries<'a> {
    pub(super) raw: &'a [u8],
    /// Where those that were taken begin, and how many bytes they are.
    pub(super) taken: (usize, usize),
    pub(super) copy: Option<Checked>,
}

impl<'a> Entries<'a> {
    /// None yet, of those.
    pub(super) const fn of(raw: &'a [u8]) -> Self {
        Self { raw, taken: (0, 0), copy: None }
    }

    pub(super) fn len(&self) -> usize {
        self.copy.as_ref().map_or(self.taken.1, Checked::len)
    }

    /// The entry that lies there is the next.
    pub(super) fn push(&mut self, at: usize, len: usize) {
        let (begin, have) = self.taken;
        if self.copy.is_none() && (have == 0 || begin + have == at) {
            self.taken = (if have == 0 { at } else { begin }, have + len);
            return;
        }
        let bytes = &self.raw[at..at + len];
        self.copied(len).end().extend_from_slice(bytes);
    }

    /// An entry that was made here is the next.
    pub(super) fn push_made(&mut self, bytes: &[u8]) {
        self.copied(bytes.len()).end().extend_from_slice(bytes);
    }

    pub(super) fn copied(&mut self, more: usize) -> &mut Checked {
        let (begin, len) = self.taken;
        let taken = &self.raw[begin..begin + len];
        self.copy.get_or_insert_with(|| {
            let mut copy = Checked::none(0, len + more);
            copy.end().extend_from_slice(taken);
            copy
        })
    }

    /// Where they begin in what came, if they are all of it from there on.
    pub(super) fn rest_of_all(&self) -> Option<usize> {
        let (begin, len) = self.taken;
        (self.copy.is_none() && len > 0 && begin + len == self.raw.len()).then_some(begin)
    }

    /// Them, in memory of their own.
    pub(super) fn detach(mut self) -> Checked {
        self.copied(0);
        self.copy.unwrap_or_else(|| Checked::none(0, 0))
    }
}

/// What became of an entry.
pub(super) enum Taken<'a> {
    /// It is in the draft, or refused.
    Up(Draft<'a>),
    /// A part of it is in the draft; the rest comes in further turns.
    Part(Draft<'a>),
    /// It waits until what was done before is published.
    Later(Draft<'a>),
}

/// What is left of a draft beside its entries.
pub(super) struct Ended {
    pub(super) count: u32,
    pub(super) reserved: usize,
    pub(super) seq: StreamSeq,
    pub(super) refused: (u32, Sequence, u16),
    pub(super) notes: Notes,
}

impl Draft<'_> {
    /// Whether it says that an operation under a joint lease was not taken.
    pub(super) fn is_untaken(&self) -> bool {
        self.refused.0 == 0 && self.refused.1.0 > 0
    }

    /// Bytes of the entries.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Its entries apart, or where they begin in what came, all of which they are from there on.
    pub(super) fn end(self) -> (Ended, Result<Checked, usize>) {
        let Self { entries, count, reserved, seq, refused, notes, .. } = self;
        let ended = Ended { count, reserved, seq, refused, notes };
        (ended, entries.rest_of_all().map_or_else(|| Ok(entries.detach()), Err))
    }

    /// Its entries, in memory of their own.
    pub(super) fn end_apart(self) -> (Ended, Checked) {
        let Self { entries, count, reserved, seq, refused, notes, .. } = self;
        (Ended { count, reserved, seq, refused, notes }, entries.detach())
    }
}
