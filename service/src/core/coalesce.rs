//! Coalescing (LineFS section 3.3): what a chunk in the making undoes itself need not travel, be kept or be published. All of it has
//! been judged and applied by the head, entry by entry: what is refused, what it costs and when it was done is what it would
//! be otherwise. Then the bytes that the end of the chunk does not show are taken out: their entries become *pads*, which keep sequence,
//! time and promise, so that the chunk settles what it settles.
//!
//! Two kinds of writes are such:
//!
//! - All of their bytes are written again, with nothing in between that reads the file, its length or its attributes.
//!   The last of those that write them is left, and with it length and times; the set-id bits go if any of them takes them.
//! - Their inode ends in the chunk: it has no name any more, and nobody has it open. Nothing in between depends on its
//!   content or its length.
//!
//! What comes before a snapshot stays whatever comes behind it.
//!
//! Names stay, and so does everything else: what makes or removes one has its effect on directories, on what is open
//! and on who holds which number. A chunk is applied and published whole, so the states in between are nobody's.

use std::collections::BTreeMap;

use base::InodeId;
use base::planted::{Bug, planted};
use storage::format::entry::Op;

/// What matters here of an entry that is in the chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Note {
    Write {
        ino: InodeId,
        from: u64,
        to: u64,
        clears: bool,
        /// Where the entry begins.
        at: usize,
    },
    /// The inode is no more.
    Ends(InodeId),
    /// It gets a name or loses one.
    Named([InodeId; 2]),
    /// Its content, length or attributes matter, or change otherwise.
    Used([InodeId; 2]),
    /// The state here stays.
    Divides,
}

/// The entries of a chunk in the making, in order.
#[derive(Debug, Default)]
pub(super) struct Notes {
    notes: Vec<Note>,
    writes: usize,
    ends: bool,
}

/// What is known of an inode from later entries.
#[derive(Debug, Default)]
struct Later {
    ends: bool,
    /// Ranges that are written later, with nothing in between: begin and end. They do not touch.
    covered: BTreeMap<u64, u64>,
    clears: bool,
}

impl Later {
    fn covers(&self, from: u64, to: u64) -> bool {
        let before = self.covered.range(..=from).next_back();
        before.is_some_and(|(_, end)| *end >= to)
    }

    fn cover(&mut self, mut from: u64, mut to: u64) {
        if let Some((begin, end)) = self.covered.range(..=from).next_back()
            && *end >= from
        {
            (from, to) = (*begin, to.max(*end));
        }
        while let Some((begin, end)) = self.covered.range(from..=to).next() {
            let (begin, end) = (*begin, *end);
            self.covered.remove(&begin);
            to = to.max(end);
        }
        self.covered.insert(from, to);
    }
}

impl Notes {
    /// An entry was put into the chunk, at that place.
    pub(super) fn add(&mut self, op: &Op<'_>, at: usize) {
        let note = match *op {
            Op::Pad => return,
            Op::Write { ino, offset, data, clear_setid } => {
                self.writes += 1;
                let to = offset.saturating_add(data.len() as u64);
                Note::Write { ino, from: offset, to, clears: clear_setid, at }
            }
            Op::Reap { ino } => {
                self.ends = true;
                Note::Ends(ino)
            }
            ref other => {
                let facts = other.facts();
                if facts.divides {
                    self.notes.push(Note::Divides);
                    return;
                }
                let inodes = facts.inodes.map(|ino| ino.unwrap_or(InodeId::NONE));
                if facts.names { Note::Named(inodes) } else { Note::Used(inodes) }
            }
        };
        self.notes.push(note);
    }

    /// Where the writes begin whose bytes the end of the chunk does not show.
    pub(super) fn dead(&self) -> Vec<usize> {
        let mut dead = Vec::new();
        if self.writes < 2 && !(self.ends && self.writes > 0) {
            return dead;
        }
        let mut later: BTreeMap<InodeId, Later> = BTreeMap::new();
        for note in self.notes.iter().rev() {
            match *note {
                Note::Write { ino, from, to, clears, at } => {
                    let later = later.entry(ino).or_default();
                    let shown = !clears || later.clears || planted(Bug::SetidCoalesced);
                    let again = later.covers(from, to)
                        || planted(Bug::PartlyCovered) && later.covers(from, from + 1);
                    if later.ends || again && shown {
                        dead.push(at);
                    } else {
                        later.cover(from, to);
                        later.clears |= clears;
                    }
                }
                Note::Divides if planted(Bug::SnapshotCoalesced) => {}
                Note::Divides => later.clear(),
                Note::Ends(ino) => {
                    later.insert(ino, Later { ends: true, ..Later::default() });
                }
                Note::Named(inodes) => {
                    for ino in inodes {
                        // (To the end it makes no difference under which name it was.)
                        if later.get(&ino).is_some_and(|later| !later.ends) {
                            later.remove(&ino);
                        }
                        if planted(Bug::UnlinkedCoalesced) {
                            later.insert(ino, Later { ends: true, ..Later::default() });
                        }
                    }
                }
                Note::Used(inodes) => {
                    for ino in inodes {
                        if !planted(Bug::UseCoalesced) {
                            later.remove(&ino);
                        }
                    }
                }
            }
        }
        dead
    }
}
