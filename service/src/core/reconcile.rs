//! A node that comes back is brought to the head's state in place: of names and attributes it is sent those that differ, of content what has
//! changed since the state that it has (`storage::volume::reconcile`, `history`).
//!
//! It begins as a snapshot does (`snapshot`), at a moment that is fixed. The head says what ranges of its items come to under a key that is
//! this snapshot's; the node says which of them come to something else with it (`SnapshotDiffers`), and is sent these: the files in them are empty
//! then. When all ranges are the same on both, files with content follow by number, those of ranges that were sent as in any snapshot. Of all others
//! the node has the attributes and knows where there is content, so what is left to ask is whether that has been written since its state: if
//! not, the file is not named at all; else it is emptied ([`Part::Anew`]), and comes like the rest. (What files share is always sent
//! anew, so that it is shared there as well.)
//!
//! What is on its way lies over the state that the node has told of, and nothing else: a snapshot that is begun again in this way, for a node that has asked
//! twice, finds it the same. After an interruption it is sent a snapshot that goes on from whatever it has (`offer`).
//!
//! A message holds *parts*, one behind the other:
//!
//! ```text
//! 1 range  first key, last u8 (1: the last of all) or the key behind it, digest u64
//! 2 items  first key, as in 1 the end, number u32, of each: key, length u16, value
//! 3 anew   inode u64
//! key: inode u64, kind u8, item u64
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use base::wire::{Corrupt, Reader, Writer};
use base::{InodeId, NodeId, StreamSeq};
use storage::format::item::attr_key;
use storage::format::page::Key;
use storage::volume::reconcile::{Items, RangeEnd};
use storage::volume::{Blocks, Fault, Refusal, View};

use super::join::Way;
use super::message::Message;
use super::{Failure, Node};

/// Bytes of items in one range, about.
const RANGE: usize = 1024;
/// Ranges in one message.
pub(super) const RANGES_A_TURN: usize = 16;

/// Items from a key on, up to another; none: the last of all.
type Range = (Key, Option<Key>);

/// One part of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part<'a> {
    /// What a range comes to.
    Range(Key, Option<Key>, u64),
    /// What a range has.
    Items(Key, Option<Key>, Vec<(Key, &'a [u8])>),
    /// The content of a file comes anew.
    Anew(InodeId),
}

fn put_key(w: &mut Writer<'_>, key: &Key) {
    w.u64(key.ino).u8(key.kind).u64(key.item);
}

fn take_key(r: &mut Reader<'_>) -> Result<Key, Corrupt> {
    Ok(Key::new(r.u64()?, r.u8()?, r.u64()?))
}

fn put_range(w: &mut Writer<'_>, from: &Key, end: Option<&Key>) {
    put_key(w, from);
    w.u8(u8::from(end.is_none()));
    if let Some(end) = end {
        put_key(w, end);
    }
}

fn take_range(r: &mut Reader<'_>) -> Result<Range, Corrupt> {
    let (from, last) = (take_key(r)?, r.u8()?);
    match last {
        0 => match take_key(r)? {
            end if end > from => Ok((from, Some(end))),
            _ => Err(r.corrupt("has a range that ends before it begins")),
        },
        1 => Ok((from, None)),
        _ => Err(r.corrupt("has a range that ends in an unknown way")),
    }
}

impl<'a> Part<'a> {
    /// Appends the part.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        match self {
            Self::Range(from, end, digest) => {
                w.u8(1);
                put_range(&mut w, from, end.as_ref());
                w.u64(*digest);
            }
            Self::Items(from, end, items) => {
                w.u8(2);
                put_range(&mut w, from, end.as_ref());
                w.u32(items.len() as u32);
                for (key, value) in items {
                    put_key(&mut w, key);
                    w.u16(value.len() as u16).bytes(value);
                }
            }
            Self::Anew(ino) => {
                w.u8(3).u64(ino.0);
            }
        }
    }

    /// Reads one.
    pub fn decode(r: &mut Reader<'a>) -> Result<Self, Corrupt> {
        match r.u8()? {
            1 => {
                let (from, end) = take_range(r)?;
                Ok(Self::Range(from, end, r.u64()?))
            }
            2 => {
                let ((from, end), count) = (take_range(r)?, r.u32()?);
                let mut items = Vec::new();
                for _ in 0..count {
                    let (key, len) = (take_key(r)?, r.u16()?);
                    items.push((key, r.bytes(len.into())?));
                }
                Ok(Self::Items(from, end, items))
            }
            3 => Ok(Self::Anew(InodeId(r.u64()?))),
            _ => Err(r.corrupt("has a part of an unknown kind")),
        }
    }
}

/// What the head knows of the items of a node that it reconciles.
#[derive(Debug)]
pub(super) struct Reconciling {
    /// The next range that is told of. None: all are.
    next: Option<Key>,
    /// Ranges that were told of and not answered, by the number of the message.
    asked: VecDeque<(u32, Vec<Range>)>,
    /// Those that differ, and are still to be sent.
    differ: VecDeque<Range>,
    /// Those that were sent: where each begins, and ends.
    sent: BTreeMap<Key, Option<Key>>,
}

impl Reconciling {
    pub(super) const fn new() -> Self {
        Self {
            next: Some(Key::MIN),
            asked: VecDeque::new(),
            differ: VecDeque::new(),
            sent: BTreeMap::new(),
        }
    }

    /// Whether nothing can be done before the node has answered; `asks`: in this turn it was asked something.
    pub(super) fn waits(&self, asks: bool) -> bool {
        self.next.is_none() && self.differ.is_empty() && (asks || !self.asked.is_empty())
    }

    /// Whether all items are the same on both.
    pub(super) fn is_over(&self) -> bool {
        self.next.is_none() && self.differ.is_empty() && self.asked.is_empty()
    }

    /// What is sent next of the items.
    pub(super) fn step(
        &mut self,
        view: &View,
        key: u64,
        out: &mut Vec<u8>,
        ranges: &mut Vec<Range>,
    ) -> Result<(), Failure> {
        if let Some((from, end)) = self.differ.pop_front() {
            let items: Items = view.items_in(from, end)?;
            let items = items.iter().map(|(key, value)| (*key, &value[..])).collect();
            Part::Items(from, end, items).encode(out);
            self.sent.insert(from, end);
        } else if let Some(from) = self.next {
            let found = view.items_come_to(from, RangeEnd::After(RANGE), key);
            let (digest, end) = found.map_err(|refusal| match refusal {
                Refusal::Fault(fault) => Failure::from(fault),
                other => Failure::Diverged(StreamSeq(0), format!("snapshot: {other}")),
            })?;
            Part::Range(from, end, digest).encode(out);
            ranges.push((from, end));
            self.next = end;
        }
        Ok(())
    }

    /// Those were told of in that message.
    pub(super) fn asked(&mut self, piece: u32, ranges: Vec<Range>) {
        self.asked.push_back((piece, ranges));
    }

    /// Which of them differ. (Whoever answers may name anything.)
    fn answered(&mut self, piece: u32, which: &[u32]) {
        let Some(at) = self.asked.iter().position(|(asked, _)| *asked == piece) else { return };
        let Some((_, ranges)) = self.asked.remove(at) else { return };
        let which: BTreeSet<_> = which.iter().collect();
        self.differ.extend(which.into_iter().filter_map(|n| ranges.get(*n as usize)));
    }

    /// The content of a file comes anew, of which nothing was sent.
    pub(super) fn note_sent(&mut self, ino: InodeId) {
        self.sent.insert(attr_key(ino), ino.0.checked_add(1).map(|next| attr_key(InodeId(next))));
    }

    /// The first inode after that one of which some item was sent.
    pub(super) fn next_sent(
        &self,
        view: &View,
        after: InodeId,
    ) -> Result<Option<InodeId>, Failure> {
        let last = Key::new(after.0, u8::MAX, u64::MAX);
        let reaches = self.sent.range(..=last).next_back();
        let reaches = reaches.filter(|(_, end)| end.is_none_or(|end| end > last));
        let behind = self.sent.range((Bound::Excluded(last), Bound::Unbounded));
        for (from, _) in reaches.into_iter().chain(behind) {
            let at = after.max(InodeId(from.ino.saturating_sub(1)));
            if let [ino] = view.inodes_after(at, 1)?[..]
                && self.was_sent(ino)
            {
                return Ok(Some(ino));
            }
        }
        Ok(None)
    }

    /// Whether some item of an inode was sent, and so its content is to come.
    pub(super) fn was_sent(&self, ino: InodeId) -> bool {
        let last = Key::new(ino.0, u8::MAX, u64::MAX);
        let found = self.sent.range(..=last).next_back();
        found.is_some_and(|(_, end)| end.is_none_or(|end| end > attr_key(ino)))
    }
}

impl Node {
    /// A node says which of the ranges that it was told of differ.
    pub(super) fn ranges_answered(
        &mut self,
        from: NodeId,
        seq: StreamSeq,
        (piece, id): (u32, u64),
        which: &[u32],
    ) {
        let Some(head) = self.part.head_mut() else { return };
        let going =
            head.snapshots.get_mut(&from).filter(|s| s.start.seq == seq && s.offers.id == id);
        let Some(going) = going else { return };
        if going.offers.answered(piece, &[], &[]) {
            if let Some(reconciling) = going.reconciling() {
                reconciling.answered(piece, which);
            }
            self.snapshot_acked(from, seq, piece);
        }
    }

    /// What is here cannot be brought to what the head has where it is: it asks for a snapshot of all, and for no other from now on.
    pub(super) fn not_in_place(&mut self, seq: StreamSeq, why: Refusal) -> Result<(), Failure> {
        match why {
            Refusal::Fault(fault @ Fault::Item { .. }) => {
                Err(Failure::Diverged(seq, format!("snapshot: {fault}")))
            }
            Refusal::Fault(fault) => Err(fault.into()),
            why => {
                log::info!("what is here cannot be brought to the state of the volume: {why}");
                self.member.never_in_place = true;
                // What came with this piece is of a snapshot that is given up.
                self.publish_piece()?;
                self.begin_join();
                Ok(())
            }
        }
    }

    /// Some of the items of the head have come, or what they come to.
    pub(super) fn items_arrived(
        &mut self,
        seq: StreamSeq,
        (piece, id): (u32, u64),
        last_inode: InodeId,
        raw: &[u8],
    ) -> Result<(), Failure> {
        if !self.takes_piece(seq, piece, Way::InPlace, raw.len())? {
            return Ok(());
        }
        self.note_used(seq, last_inode)?;
        let diverged = |what: String| Failure::Diverged(seq, what);
        let mut r = Reader::new("snapshot", raw);
        let (mut ranges, mut differ) = (0, Vec::new());
        let mut given_up: Vec<Blocks> = Vec::new();
        while r.left() > 0 {
            let freed = match Part::decode(&mut r).map_err(|e| diverged(e.to_string()))? {
                Part::Range(..) if ranges as usize == RANGES_A_TURN => {
                    return Err(diverged("a snapshot tells of too many ranges at once".into()));
                }
                Part::Range(from, end, digest) => {
                    let end = RangeEnd::Before(end);
                    match self.volume.items_come_to(from, end, id) {
                        Ok((comes_to, _)) if comes_to == digest => {}
                        Ok(_) => differ.push(ranges),
                        Err(refusal) => return self.not_in_place(seq, refusal),
                    }
                    ranges += 1;
                    continue;
                }
                Part::Items(from, end, items) => {
                    self.with_room(|volume| volume.replace_items(from, end, &items))?
                }
                Part::Anew(ino) => self.with_room(|volume| volume.empty_file(ino))?,
            };
            match freed {
                Ok(freed) => given_up.extend(freed),
                Err(refusal) => return self.not_in_place(seq, refusal),
            }
        }
        if given_up.is_empty() || !self.keeps_old() {
            self.publish_piece()?;
        } else {
            // What they hold may be wanted again: it stays where it is.
            self.publish_holding(&given_up)?;
        }
        self.to_head(if ranges > 0 {
            Message::SnapshotDiffers { seq, piece, id, ranges: differ }
        } else {
            Message::SnapshotAck { seq, piece }
        });
        Ok(())
    }
}
