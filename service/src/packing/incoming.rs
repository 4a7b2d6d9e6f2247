//! Messages that came from other nodes: those that are packed are unpacked, the checksums of long ones compared; and what came behind
//! one of these waits for it.

use std::collections::{BTreeMap, VecDeque};

use base::planted::{Bug, planted};
use base::wire::Corrupt;
use base::{Epoch, NodeId};
use cluster::transport::Class;
use storage::format::chunk::CHUNK_HEADER_BYTES;

use super::{Head, Job, Kept, Limits, Packing, Piece};
use crate::core::frame::Received;
use crate::core::message::{CHUNK, CHUNK_PREFIX, ENTRIES, PACKED};

/// A message to be delivered.
#[derive(Debug)]
pub struct Heard {
    /// Its kind.
    pub kind: u16,
    /// Its body; or what is wrong with what came in its place.
    pub body: Result<Received, Damaged>,
    /// What it was packed in, for who can use the memory.
    pub packed: Option<Vec<u8>>,
}

/// A packed message that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damaged(pub Corrupt);

impl core::fmt::Display for Damaged {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

impl Damaged {
    /// What is delivered instead in the epoch `now`: a chunk of which nothing is left, which is asked for again. Nothing else is: its
    /// link has to end, and all that was to come over it is made up for.
    pub fn instead(self, kind: u16, now: Epoch) -> Option<Vec<u8>> {
        (kind == CHUNK).then(|| [&now.0.to_le_bytes()[..], &[0; CHUNK_PREFIX - 4]].concat())
    }
}

#[derive(Debug)]
enum State {
    Ready(Heard),
    Working { id: u64, kind: u16, keep: bool },
}

#[derive(Debug)]
struct Slot {
    /// What it holds, or will hold.
    bytes: usize,
    state: State,
}

#[derive(Debug, Default)]
pub(super) struct Incoming {
    queues: BTreeMap<(NodeId, Class), VecDeque<Slot>>,
    /// Of all slots.
    pub(super) held: usize,
    /// The oldest first.
    kept: VecDeque<Kept>,
    pub(super) kept_bytes: usize,
}

impl Incoming {
    pub(super) fn down(&mut self, node: NodeId) {
        for (place, queue) in &self.queues {
            if place.0 == node {
                self.held -= queue.iter().map(|slot| slot.bytes).sum::<usize>();
            }
        }
        self.queues.retain(|(from, _), _| *from != node);
    }

    fn put(&mut self, from: NodeId, class: Class, bytes: usize, state: State) {
        self.held += bytes;
        self.queues.entry((from, class)).or_default().push_back(Slot { bytes, state });
    }

    pub(super) fn done(
        &mut self,
        id: u64,
        outcome: Result<Received, Corrupt>,
        packed: Option<Vec<u8>>,
        limits: Limits,
    ) -> Option<(NodeId, Class)> {
        for (place, queue) in &mut self.queues {
            let of = |slot: &&mut Slot| matches!(slot.state, State::Working { id: one, .. } if one == id);
            let Some(slot) = queue.iter_mut().find(of) else { continue };
            let State::Working { kind, keep, .. } = slot.state else { continue };
            let place = *place;
            let (packed, kept) = match (&outcome, packed) {
                (Ok(message), Some(packed)) if keep && kind == CHUNK => {
                    (None, Kept::of(message.bytes(), packed))
                }
                (_, packed) => (packed, None),
            };
            let body = outcome.map_err(Damaged);
            slot.state = State::Ready(Heard { kind, body, packed });
            if let Some(kept) = kept {
                self.keep(kept, limits.kept);
            }
            return Some(place);
        }
        None
    }

    fn keep(&mut self, kept: Kept, most: usize) {
        self.kept_bytes += kept.packed.len();
        self.kept.push_back(kept);
        while self.kept_bytes > most
            && let Some(oldest) = self.kept.pop_front()
        {
            self.kept_bytes -= oldest.packed.len();
        }
    }

    /// The message, packed, of a chunk with that header that is `bytes` long in all.
    pub(super) fn take_kept(&mut self, header: &[u8], bytes: usize) -> Option<Vec<u8>> {
        // Magic, version, flags, checksum and epoch come before the sequence.
        let same = |kept: &Kept| match planted(Bug::StalePassedOn) {
            true => kept.header[16..24] == header[16..24],
            false => kept.header == header && kept.bytes == bytes,
        };
        let at = self.kept.iter().position(same)?;
        let kept = self.kept.remove(at)?;
        self.kept_bytes -= kept.packed.len();
        Some(kept.packed)
    }
}

impl Kept {
    fn of(message: &[u8], packed: Vec<u8>) -> Option<Self> {
        let header = message.get(CHUNK_PREFIX..CHUNK_PREFIX + CHUNK_HEADER_BYTES)?.to_vec();
        Some(Self { header, bytes: message.len(), packed })
    }
}

impl Packing {
    /// Takes a message that came over a link; what is to be worked for it, if anything. `keep`: chunks are passed on to
    /// somebody. `incarnation`: of the log of which it holds entries, if that is known.
    #[must_use]
    pub fn hear(
        &mut self,
        from: NodeId,
        class: Class,
        kind: u16,
        body: Vec<u8>,
        keep: bool,
        incarnation: Option<u32>,
    ) -> Option<Piece> {
        let ready = |kind, body, packed| State::Ready(Heard { kind, body, packed });
        if kind != PACKED {
            let bytes = body.len();
            if !self.is_verified_apart(kind, bytes) {
                self.incoming.put(from, class, bytes, ready(kind, Ok(body.into()), None));
                return None;
            }
            let piece = self.piece(Job::Verify { kind, body, incarnation });
            let state = State::Working { id: piece.id, kind, keep: false };
            self.incoming.put(from, class, bytes, state);
            return Some(piece);
        }
        let head = match Head::read(&body) {
            Ok(head) => head,
            Err(corrupt) => {
                // What it was may be told: then only that message is asked for again.
                self.counters.bad += 1;
                let kind = body.get(4..6).map_or(PACKED, |k| u16::from_le_bytes([k[0], k[1]]));
                let state = ready(kind, Err(Damaged(corrupt)), Some(body));
                self.incoming.put(from, class, 0, state);
                return None;
            }
        };
        let (bytes, kind) = (head.bytes() + body.len(), head.kind);
        let piece = self.piece(Job::Unpack { head, body });
        self.incoming.put(from, class, bytes, State::Working { id: piece.id, kind, keep });
        if head.bytes() <= self.limits.inline {
            let _ = self.done(piece.work());
            return None;
        }
        Some(piece)
    }

    /// Whether somebody else than the thread that decides compares the checksums of what is in a message.
    fn is_verified_apart(&self, kind: u16, bytes: usize) -> bool {
        matches!(kind, CHUNK | ENTRIES) && bytes > self.limits.verify
    }

    /// Whether a message of that kind and length goes to the core as it comes.
    pub fn is_plain(&self, from: NodeId, class: Class, kind: u16, bytes: usize) -> bool {
        let works = kind == PACKED || self.is_verified_apart(kind, bytes);
        !works && self.incoming.queues.get(&(from, class)).is_none_or(VecDeque::is_empty)
    }

    /// The next message of a node that may be delivered.
    pub fn next_heard(&mut self, from: NodeId, class: Class) -> Option<Heard> {
        let queue = self.incoming.queues.get_mut(&(from, class))?;
        let ready = |slot: &Slot| matches!(slot.state, State::Ready(_));
        let at = match planted(Bug::UnpackedOvertakes) {
            true => queue.iter().position(ready)?,
            false => Some(0).filter(|_| queue.front().is_some_and(ready))?,
        };
        let slot = queue.remove(at)?;
        self.incoming.held -= slot.bytes;
        match slot.state {
            State::Ready(heard) => Some(heard),
            State::Working { .. } => None,
        }
    }

    /// Whether anything that came waits for its turn.
    pub fn is_hearing(&self) -> bool {
        self.incoming.held > 0
    }

    /// Whether so much waits for its turn that nothing more is to be heard before something has been unpacked.
    pub fn is_full(&self) -> bool {
        self.incoming.held > self.limits.held
    }
}
