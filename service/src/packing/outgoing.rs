//! Messages on their way to other nodes: packed or not, each behind the one before it.

use std::collections::{BTreeMap, VecDeque};

use base::planted::{Bug, planted};
use base::{Nanos, NodeId};
use cluster::transport::Class;
use placement::codec::Codec;
use placement::compress::looks_compressible;

use super::{Compression, Job, Packing, Piece, clear_of, passed_on, thin};
use crate::core::frame::Body;
use crate::core::message::{CHUNK, CHUNK_ACK, CHUNK_PREFIX, ENTRIES, IMAGE, PACKED, SNAPSHOT};
use storage::format::chunk::CHUNK_HEADER_BYTES;

/// What a thread packs in a second at least, by LZ4 and by Zstandard: a link that is faster than all of them gains nothing.
const PACE_LZ4: u64 = 125_000_000;
const PACE_ZSTD: u64 = 30_000_000;
/// A link is measured over so long at least, in which it always had something to do.
const MEASURE: Nanos = 5_000_000;
/// What was measured counts for so long: then it is found out again, by what has to wait.
const COUNTS: Nanos = 10_000_000_000;

/// How a link is just now.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// The time.
    pub now: Nanos,
    /// Bytes that the transport has taken and the peer has not.
    pub queued: usize,
}

#[derive(Debug)]
enum Slot {
    Ready(u16, Body),
    /// Its kind, and the piece that packs it.
    Working(u16, u64),
}

impl Slot {
    const fn kind(&self) -> u16 {
        match self {
            Self::Ready(kind, _) | Self::Working(kind, _) => *kind,
        }
    }
}

/// Measures what a link takes in a second while it has something to take.
#[derive(Debug, Default)]
struct Pace {
    /// Since when it has had something to do without a pause, and what was queued then.
    since: Option<(Nanos, usize)>,
    /// Bytes given to it since then.
    given: u64,
    /// Bytes a second, as measured last, and when.
    measured: Option<(u64, Nanos)>,
}

impl Pace {
    /// `bytes` are about to be given to it.
    fn look(&mut self, line: Line, bytes: usize) {
        match self.since {
            Some((since, queued)) if line.queued > 0 => {
                let (took, moved) = (
                    line.now.saturating_sub(since),
                    (self.given + queued as u64).saturating_sub(line.queued as u64),
                );
                if took >= MEASURE {
                    let rate = (u128::from(moved) * 1_000_000_000 / u128::from(took)) as u64;
                    self.measured = Some((rate, line.now));
                    (self.since, self.given) = (Some((line.now, line.queued)), 0);
                }
            }
            _ => (self.since, self.given) = (Some((line.now, line.queued)), 0),
        }
        self.given += bytes as u64;
    }

    /// Bytes a second, as far as is known.
    fn rate(&self, now: Nanos) -> Option<u64> {
        self.measured.filter(|(_, at)| now < at + COUNTS).map(|(rate, _)| rate)
    }
}

#[derive(Debug, Default)]
struct Queue {
    slots: VecDeque<Slot>,
    /// The transport has said that it takes no more, and will say when it does.
    blocked: bool,
    pace: Pace,
}

impl Queue {
    /// Puts a message behind those that wait. Of acknowledgements the newest says it all, and whoever waits for it does not wait
    /// for bytes: it overtakes chunks and entries. It overtakes nothing else: what a node says of its clients (`ClientUp`)
    /// is about what it had not acknowledged then.
    fn put(&mut self, slot: Slot) {
        if slot.kind() != CHUNK_ACK {
            self.slots.push_back(slot);
            return;
        }
        self.slots.retain(|slot| slot.kind() != CHUNK_ACK);
        let waits_for = |slot: &Slot| ![CHUNK, ENTRIES].contains(&slot.kind());
        let place = self.slots.iter().rposition(waits_for).map_or(0, |last| last + 1);
        self.slots.insert(place, slot);
    }
}

#[derive(Debug)]
pub(super) struct Outgoing {
    queues: BTreeMap<(NodeId, Class), Queue>,
    threads: u64,
}

impl Outgoing {
    pub(super) fn new(threads: usize) -> Self {
        Self { queues: BTreeMap::new(), threads: threads.max(1) as u64 }
    }

    pub(super) fn down(&mut self, node: NodeId) {
        self.queues.retain(|(to, _), _| *to != node);
    }

    pub(super) fn done(&mut self, id: u64, kind: u16, body: Body) -> Option<(NodeId, Class)> {
        for (place, queue) in &mut self.queues {
            let of = |slot: &&mut Slot| matches!(slot, Slot::Working(_, piece) if *piece == id);
            let Some(slot) = queue.slots.iter_mut().find(of) else { continue };
            *slot = Slot::Ready(kind, body);
            return Some(*place);
        }
        None
    }

    /// By what a message is packed, if it is.
    fn choose(&self, how: Compression, kind: u16, body: &[u8], rate: Option<u64>) -> Option<Codec> {
        let looks = || looks_compressible(body);
        match how {
            Compression::None => None,
            Compression::Zstd => Some(Codec::Zstd),
            Compression::Lz4 => looks().then_some(Codec::Lz4),
            // Nobody waits for a node that joins, and all others share the link with it.
            Compression::Auto if is_for_join(kind) && rate.is_none() => {
                looks().then_some(Codec::Lz4)
            }
            Compression::Auto => {
                let rate = rate?;
                let by = [(PACE_ZSTD, Codec::Zstd), (PACE_LZ4, Codec::Lz4)];
                let (_, codec) = by.into_iter().find(|(pace, _)| rate < pace * self.threads)?;
                looks().then_some(codec)
            }
        }
    }
}

/// Whether a message is a piece of what a joining node is sent.
const fn is_for_join(kind: u16) -> bool {
    matches!(kind, SNAPSHOT | IMAGE)
}

impl Packing {
    /// Takes a message that is to be sent; what is to be worked for it, if anything. To be called only while the link is
    /// there: what is sent to nobody is lost.
    #[must_use]
    pub fn send(
        &mut self,
        to: NodeId,
        class: Class,
        kind: u16,
        body: Body,
        line: Line,
    ) -> Option<Piece> {
        let kept = (kind == CHUNK).then(|| self.pass_on(&body)).flatten();
        self.counters.raw_out += body.len() as u64;
        let queue = self.outgoing.queues.entry((to, class)).or_default();
        if let Some(packed) = kept {
            self.counters.passed_on += 1;
            queue.put(Slot::Ready(PACKED, packed.into()));
            return None;
        }
        let waits = line.queued > 0 || queue.blocked || is_for_join(kind);
        let least = if waits { self.limits.short } else { self.limits.long };
        let rate = queue.pace.rate(line.now);
        let long = clear_of(kind).is_some() && body.len() >= least;
        let by = long.then(|| self.outgoing.choose(self.compression, kind, &body, rate));
        let Some(codec) = by.flatten() else {
            // What was taken out of a chunk is not sent, whatever else is done.
            let long = kind == CHUNK && body.len() >= self.limits.short;
            let thin = if long { thin(&body) } else { None };
            let slot = match thin {
                Some(thin) => {
                    self.counters.packed += 1;
                    self.counters.packed_from += body.len() as u64;
                    self.counters.packed_to += thin.len() as u64;
                    Slot::Ready(PACKED, thin.into())
                }
                None => Slot::Ready(kind, body),
            };
            self.outgoing.queues.entry((to, class)).or_default().put(slot);
            return None;
        };
        let piece = self.piece(Job::Pack { codec, kind, body });
        let queue = self.outgoing.queues.entry((to, class)).or_default();
        queue.put(Slot::Working(kind, piece.id));
        Some(piece)
    }

    /// The chunk as it came, packed, if it did.
    fn pass_on(&mut self, body: &[u8]) -> Option<Vec<u8>> {
        let header = body.get(CHUNK_PREFIX..CHUNK_PREFIX + CHUNK_HEADER_BYTES)?;
        let kept = self.incoming.take_kept(header, body.len())?;
        Some(passed_on(kept, &body[..CHUNK_PREFIX]))
    }

    /// The next message to a node that may be given to the transport: its kind and body. It is gone from here then
    /// ([`Packing::put_back`]).
    pub fn next(&mut self, to: NodeId, class: Class) -> Option<(u16, Body)> {
        let queue = self.outgoing.queues.get_mut(&(to, class)).filter(|q| !q.blocked)?;
        let front = match queue.slots.front()? {
            Slot::Working(..) if planted(Bug::PackedOvertaken) => {
                let ready = queue.slots.iter().position(|s| matches!(s, Slot::Ready(..)))?;
                queue.slots.remove(ready)?
            }
            Slot::Working(..) => return None,
            Slot::Ready(..) => queue.slots.pop_front()?,
        };
        match front {
            Slot::Ready(kind, body) => Some((kind, body)),
            Slot::Working(..) => None,
        }
    }

    /// The transport has taken a message.
    pub fn sent(&mut self, to: NodeId, class: Class, bytes: usize, before: Line) {
        self.counters.wire_out += bytes as u64;
        if let Some(queue) = self.outgoing.queues.get_mut(&(to, class)) {
            queue.pace.look(before, bytes);
        }
    }

    /// The transport takes nothing more for now, this message included.
    pub fn put_back(&mut self, to: NodeId, class: Class, kind: u16, body: Body) {
        let queue = self.outgoing.queues.entry((to, class)).or_default();
        queue.slots.push_front(Slot::Ready(kind, body));
        queue.blocked = true;
    }

    /// The transport takes messages again.
    pub fn drained(&mut self, to: NodeId, class: Class) {
        if let Some(queue) = self.outgoing.queues.get_mut(&(to, class)) {
            queue.blocked = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(kinds: &[u16]) -> Vec<u8> {
        let mut queue = Queue::default();
        for (n, kind) in (0..).zip(kinds) {
            queue.put(Slot::Ready(*kind, vec![n].into()));
        }
        let number = |slot: &Slot| match slot {
            Slot::Ready(_, body) => body[0],
            Slot::Working(..) => unreachable!("none is in work"),
        };
        queue.slots.iter().map(number).collect()
    }

    /// (They overtook everything: a head that had dropped what was acknowledged from its ring heard then, by `ClientUp`, of
    /// space promised to just that, and kept it free for as long as the client lived.)
    #[test]
    fn acknowledgements_overtake_bytes_alone() {
        const CLIENT_UP: u16 = 3;
        let kinds = [CLIENT_UP, ENTRIES, CHUNK_ACK, CHUNK, CLIENT_UP, ENTRIES, CHUNK, CHUNK_ACK];
        assert_eq!(queue(&kinds), [0, 1, 3, 4, 7, 5, 6]);
        assert_eq!(queue(&[ENTRIES, CHUNK, CHUNK_ACK]), [2, 0, 1]);
    }

    #[test]
    fn a_link_is_measured_only_while_it_is_busy() {
        let mut pace = Pace::default();
        let look = |pace: &mut Pace, ms: u64, queued: usize, bytes: usize| {
            pace.look(Line { now: ms * 1_000_000, queued }, bytes);
        };
        look(&mut pace, 0, 0, 1000);
        look(&mut pace, 100, 0, 1000);
        assert_eq!(pace.rate(0), None, "it was idle, as far as anybody knows");
        look(&mut pace, 101, 500, 1000);
        // Of 2000 bytes 800 are left after 10 ms: 120 kB/s.
        look(&mut pace, 110, 800, 1000);
        assert_eq!(pace.rate(120_000_000), Some(120_000));
        look(&mut pace, 500, 0, 1000);
        look(&mut pace, 900, 0, 1000);
        assert_eq!(pace.rate(1_000_000_000), Some(120_000), "nothing new is known");
        assert_eq!(pace.rate(11_000_000_000), None, "it may be another one by now");
    }

    #[test]
    fn packing_pays_where_it_is_faster_than_the_link() {
        let outgoing = Outgoing::new(2);
        let words = b"some words, some words ".repeat(1000);
        let auto = |rate| outgoing.choose(Compression::Auto, CHUNK, &words, rate);
        assert_eq!(auto(Some(118_000_000)), Some(Codec::Lz4), "1 Gbit/s");
        assert_eq!(auto(Some(12_000_000)), Some(Codec::Zstd), "100 Mbit/s");
        assert_eq!(auto(Some(2_000_000_000)), None);
        assert_eq!(auto(None), None, "nobody knows: nothing has had to wait");
        let joins = outgoing.choose(Compression::Auto, SNAPSHOT, &words, None);
        assert_eq!(joins, Some(Codec::Lz4), "a snapshot, whatever is known");
        let mut noise = vec![0; 20_000];
        base::random::Random::new(1).fill(&mut noise);
        assert_eq!(outgoing.choose(Compression::Auto, SNAPSHOT, &noise, Some(1)), None);
        assert_eq!(outgoing.choose(Compression::Lz4, CHUNK, &noise, Some(1)), None);
        assert_eq!(outgoing.choose(Compression::None, CHUNK, &words, Some(1)), None);
    }
}
