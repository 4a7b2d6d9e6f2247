//! Joining: a node that has lost its place, or is new, gets the state of the volume as of some place in the stream, then the
//! stream from there on. (Who sends it: `snapshot`.)
//!
//! # Who comes back
//!
//! A node that was in the chain has the stream up to some chunk, and perhaps chunks behind that which the others never had: they
//! went on from what all members held. Only the head of an epoch makes chunks in it, so two streams are the same up to the last chunk of that
//! epoch which both have. The node says of which epoch its last chunk is; the head looks up where its own stream leaves that epoch, and the
//! earlier of the two is where they part. If the head's ring has what comes then, and the node has published nothing beyond, it cuts its ring there and
//! gets the rest: nothing of the volume is copied. Else it takes a snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{Epoch, InodeId, Nanos, NodeId, StreamSeq};
use storage::format::item::Run;
use storage::format::sum::arena_bytes;
use storage::limits::BLOCK_BYTES;
use storage::media::Segment;
use storage::volume::image::Had;
use storage::volume::{Blocks, Fault, Params, Refusal, View, Volume, back_copies, run_copies};

use super::client::LogFile;
use super::head::NUMBERS_END;
use super::history::Claim;
use super::message::Message;
use super::offer::{COMPARED, Doubt, Offered, Part};
use super::room::BELOW_LEFT;
use super::{Effect, Failure, Node, entries};

/// A joining node that hears nothing asks again after this time.
const JOIN_AGAIN: u64 = 500_000_000;
/// One that has everything and is not in the chain after this time begins anew.
const JOIN_GIVE_UP: u64 = 5_000_000_000;

/// Snapshots from before of which content is looked for, the newest.
const STATES_MAX: usize = 16;

/// How far a node that joins has come.
#[derive(Debug, Default)]
pub(super) struct Join {
    /// Instead of a snapshot the rest of the stream was asked for, so many times.
    pub returning: Option<u32>,
    /// It comes.
    pub behind: Option<Behind>,
    /// When something was asked or heard about joining.
    pub joining_at: Nanos,
    /// When everything was here.
    pub joined_at: Nanos,
}

/// What was missed of the stream is on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Behind {
    /// The last chunk that the head had.
    last: StreamSeq,
    /// What comes after this one was asked for last.
    from: StreamSeq,
    /// So many come for one question, as far as it is known: the other side has a bound of its own.
    batch: u64,
}

/// How a snapshot comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// By operations that make all of it.
    Described,
    /// As an image (`core::image`).
    Image,
    /// As what is to be changed of what there is (`core::reconcile`).
    InPlace,
}

/// A snapshot arriving.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// The snapshot of which pieces have arrived, and the piece that is next.
    pub(super) begun: Option<(StreamSeq, u32)>,
    /// The volume was emptied for it, or for one before it that did not come to its end.
    pub(super) emptied: bool,
    /// All that the volume held before either came from the head of that epoch, if it is known; 0: it is not.
    pub(super) whole: Epoch,
    /// What the volume held before is the state that the head was told of.
    pub(super) claimed: bool,
    /// A piece of it has come, and what there was before it is gone, or kept.
    wiped: bool,
    /// What there was before is brought to what the head has, where it is.
    in_place: bool,
    /// Some of what there was before has been let go: what is held back may be of something else.
    let_go_any: bool,
    /// What the volume held before, and before other snapshots that did not come to their end: the newest last.
    pub(super) kept: Vec<View>,
    /// All of it that files before this one had is let go, or decided.
    let_go: InodeId,
    /// Offers were decided of files up to this one.
    decided: InodeId,
    /// Of an image: the empty volume, which is on media until all has come.
    image: Option<View>,
    /// Of snapshots that were here before, by their numbers, what they show.
    pub(super) states: Vec<(u64, View)>,
    /// The key by which an image offers something, and of what may be here already where it lies.
    pub(super) image_key: Option<u64>,
    pub(super) image_doubted: BTreeMap<(u32, u64), Had>,
    /// What may be taken over when the head has compared it, by file and first block.
    doubted: BTreeMap<(InodeId, u64), Vec<Run>>,
}

impl Node {
    pub(super) fn begin_join(&mut self) {
        log::info!("joining: asking the head for the volume's state");
        // What processes here have open goes before: who asks for the snapshot has told it.
        self.report_past();
        self.member.stash.clear();
        let whole = self.member.whole_in.unwrap_or_default();
        (self.member.dropped, self.member.whole_in) = (None, None);
        // A snapshot that is half here has more to go on from than its half.
        let before = self.member.incoming.take().unwrap_or_default();
        // (Half an image lies over what was there.)
        let kept = if before.image.is_some() { Vec::new() } else { before.kept };
        let emptied = before.emptied;
        self.member.incoming = Some(Incoming { kept, emptied, whole, ..Incoming::default() });
        let returns = self.may_return();
        let Some(join) = self.part.join_mut() else { return };
        let returning = returns.then_some(0);
        *join = Join { returning, behind: None, joining_at: self.env.now, ..*join };
        match returning {
            Some(_) => self.want_return(),
            None => self.want_snapshot(),
        }
    }

    /// It is to join again in the epoch in which it had everything: what it has it keeps. The head, which has heard so or is about to, may
    /// have acknowledged by now what it holds.
    pub(super) fn join_where_it_was(&mut self) {
        if self.member.whole_in != Some(self.view.epoch) {
            return self.begin_join();
        }
        self.report_past();
        self.note_joining();
        self.to_head(Message::Position { seq: self.ring.last() });
    }

    /// What is here may be the beginning of the stream that the head has.
    fn may_return(&self) -> bool {
        self.env.config.limits.returns > 0 && self.ring.last().0 > 0 && self.ring.last_epoch().0 > 0
    }

    /// What cannot be cut: it is published, or being published, and its copies may lie over what was there before.
    fn published_or_begun(&self) -> StreamSeq {
        self.member.job.as_ref().map_or(self.member.published, |job| job.upto())
    }

    fn want_return(&mut self) {
        let (last, epoch) = (self.ring.last(), self.ring.last_epoch());
        let (incarnation, published) = (self.env.config.incarnation, self.published_or_begun());
        self.to_head(Message::Return { incarnation, last, epoch, published });
    }

    /// Head: a node is back, whose stream ends with that chunk of that epoch.
    pub(super) fn return_wanted(
        &mut self,
        from: NodeId,
        incarnation: u64,
        (last, epoch): (StreamSeq, Epoch),
        published: StreamSeq,
    ) -> Result<(), Failure> {
        let now = (!self.fenced).then_some(self.env.now);
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.keeping.heard_of(from);
        if !head.ready || !self.view.syncing.contains(&from) {
            return Ok(());
        }
        let followed = head.followers.contains(&from);
        if !head.begins_anew(from, incarnation, now) {
            return Ok(());
        }
        head.snapshots.remove(&from);
        head.acked.remove(&from);
        if followed {
            self.followed_no_more()?;
        }
        let agreed = self.parts_at(last, epoch).filter(|at| {
            let rest = *at == self.ring.last() || self.ring.get(StreamSeq(at.0 + 1)).is_some();
            rest && *at >= published
        });
        self.env.counters.returns += u64::from(agreed.is_some());
        log::info!("node {from} is back with the stream up to {last}: {agreed:?} is common");
        let (seq, last) = (agreed.unwrap_or_default(), self.ring.last());
        self.send(from, Message::Resume { seq, last });
        Ok(())
    }

    /// Up to where a stream is this one that ends with chunk `last` of that epoch; `None` if that is not known any more.
    fn parts_at(&self, last: StreamSeq, epoch: Epoch) -> Option<StreamSeq> {
        if planted(Bug::ReturnUncut) {
            return Some(last.min(self.ring.last()));
        }
        let mut at = self.ring.last();
        loop {
            let made = match self.ring.get(at) {
                Some(kept) => kept.header.epoch,
                None => self.ring.epoch_before().filter(|_| at.0 + 1 == self.ring.oldest().0)?,
            };
            if made <= epoch {
                return Some(at.min(last));
            }
            at.0 = at.0.checked_sub(1)?;
        }
    }

    /// The head says up to where the stream here is its own.
    pub(super) fn resume(&mut self, seq: StreamSeq, last: StreamSeq) -> Result<(), Failure> {
        let asked = self.part.join_mut().and_then(|join| join.returning.take());
        if asked.is_none() {
            let joins = self.part.join().is_some() && !self.is_behind();
            if seq.0 == 0 && joins && self.member.incoming.is_none() {
                // The stream went on without it meanwhile. What has changed since is less than all.
                self.begin_join();
            }
            return Ok(());
        }
        if seq.0 == 0 || seq < self.published_or_begun() || seq > self.ring.last() {
            self.want_snapshot();
            return Ok(());
        }
        self.keeps_acknowledged(seq)?;
        self.ring.cut(seq)?;
        self.member.recent.cut(seq);
        self.member.replayed = self.member.replayed.min(seq);
        if self.member.applied > seq {
            self.take_back_to(seq)?;
        }
        self.member.dirty.retain(|_, at| at.0 <= seq);
        self.count_settled()?;
        self.member.incoming = None;
        self.note_joining();
        log::info!("what is here of the stream goes on from {seq}, to {last}");
        self.env.out.push(Effect::Position(seq));
        if let Some(join) = self.part.join_mut() {
            join.behind = Some(Behind { last, from: seq, batch: 0 });
        }
        self.catch_up();
        Ok(())
    }

    /// The head's stream is about to take the place of what comes behind that chunk here. No chain goes on without what all its members
    /// had, whoever its head is: what was promised to clients does not go without a word.
    fn keeps_acknowledged(&self, seq: StreamSeq) -> Result<(), Failure> {
        let acked = self.member.all_acked;
        if seq < acked { Err(Failure::Acknowledged(seq, acked)) } else { Ok(()) }
    }

    /// Asks for what it has missed, some at a time; when all of that is here it tells so, and is sent all that comes.
    pub(super) fn catch_up(&mut self) {
        let seq = self.ring.last();
        let Some(join) = self.part.join_mut() else { return };
        let Some(behind) = join.behind else { return };
        if seq >= behind.last {
            join.behind = None;
            self.member.whole_in = Some(self.view.epoch);
            self.to_head(Message::Position { seq });
        } else if seq.0 >= behind.from.0 + behind.batch {
            let batch =
                if behind.batch == 0 { self.env.config.limits.resend } else { behind.batch };
            join.behind = Some(Behind { from: seq, batch, ..behind });
            self.note_joining();
            self.want_stream();
        }
    }

    /// Something has come.
    pub(super) fn note_joining(&mut self) {
        if let Some(join) = self.part.join_mut() {
            (join.joining_at, join.joined_at) = (self.env.now, self.env.now);
        }
    }

    /// Whether it is being sent the state of the volume: nobody waits for it before it has that.
    pub fn is_being_filled(&self) -> bool {
        self.part.join().is_some() && self.member.incoming.is_some()
    }

    /// Whether what it has missed of the stream comes.
    pub(super) fn is_behind(&self) -> bool {
        self.part.join().is_some_and(|join| join.behind.is_some())
    }

    /// Nothing has come for a while: some of what was asked for is lost, or that was all that comes for one question.
    fn ask_for_rest(&mut self) {
        let seq = self.ring.last();
        let Some(join) = self.part.join_mut() else { return };
        let Some(behind) = join.behind else { return };
        let came = seq.0.saturating_sub(behind.from.0);
        let batch = if came > 0 { came.min(behind.batch) } else { behind.batch };
        join.behind = Some(Behind { from: seq, batch, ..behind });
        self.want_stream();
    }

    /// How far the stream has each client: what is published, and what is in the ring.
    fn count_settled(&mut self) -> Result<(), Failure> {
        self.member.settled.clear();
        for seq in self.member.published.0 + 1..=self.ring.last().0 {
            let Some(header) = self.ring.get(StreamSeq(seq)).map(|kept| kept.header) else {
                continue;
            };
            if header.client.0 == 0 {
                continue;
            }
            if header.is_farewell() {
                self.member.settled.remove(&header.client);
                continue;
            }
            let before = self.settled_of(header.client);
            self.member.settled.insert(header.client, before.max(header.last_seq));
        }
        Ok(())
    }

    pub(super) fn report_past(&mut self) {
        for message in self.past_reports() {
            self.to_head(message);
        }
    }

    fn want_snapshot(&mut self) {
        self.env.out.push(Effect::Wipes);
        let had = self.volume.sums_base().is_some() && self.volume.root().inodes > 1;
        let incarnation = self.env.config.incarnation;
        let claim = self.claim();
        // (When it asks again what it has said before still holds for what was here before.)
        if let Some(incoming) = self.member.incoming.as_mut().filter(|i| !i.emptied) {
            incoming.claimed = claim.is_some_and(|claim| claim.published.0 > 0);
        }
        let limits = &self.env.config.limits;
        if limits.offer_blocks > 0 && self.volume.sums_base().is_some() {
            let Claim { published, last, epoch } = claim.unwrap_or_default();
            self.to_head(Message::ImageHad { incarnation, published, last, epoch });
        }
        if let Some(Claim { published, last, epoch }) = claim {
            // (Where there is no room beside what there was, that goes first.)
            let in_place = self.env.config.limits.in_place
                && !self.member.never_in_place
                && !self.volume.has_snapshots()
                && self.has_room_beside().unwrap_or(false);
            if in_place && published.0 > 0 {
                self.to_head(Message::SnapshotInPlace { incarnation, published, last, epoch });
            }
            self.to_head(Message::SnapshotSince { incarnation, had, published, last, epoch });
        }
        if had {
            self.to_head(Message::SnapshotHad { incarnation });
        }
        self.to_head(Message::SnapshotWant { incarnation });
    }

    /// It is in the chain: what it asked for since it had everything will not come.
    pub(super) fn end_join(&mut self) -> Result<(), Failure> {
        match self.member.incoming.take() {
            Some(incoming) if incoming.emptied => {
                let seq = self.ring.last();
                Err(Failure::Diverged(seq, "it is in the chain with half a snapshot".into()))
            }
            _ => Ok(()),
        }
    }

    /// What a joining node asked for may have come before the head knew of it, or got lost.
    pub(super) fn join_again(&mut self) {
        let now = self.env.now;
        let Some(join) = self.part.join_mut().filter(|join| now >= join.joining_at + JOIN_AGAIN)
        else {
            return;
        };
        join.joining_at = now;
        match self.member.incoming {
            Some(_) => match &mut join.returning {
                Some(tries) if *tries < self.env.config.limits.returns => {
                    *tries += 1;
                    self.want_return();
                }
                _ => {
                    join.returning = None;
                    self.want_snapshot();
                }
            },
            // The head no longer keeps what is missing here, or it would be in the chain by now.
            None if now > join.joined_at + JOIN_GIVE_UP => self.begin_join(),
            // Some of it was lost.
            None if join.behind.is_some() => self.ask_for_rest(),
            None => self.to_head(Message::Position { seq: self.ring.last() }),
        }
    }

    pub(super) fn snapshot_arrived(
        &mut self,
        seq: StreamSeq,
        piece: u32,
        last_inode: InodeId,
        (end, waits): (bool, bool),
        raw: &[u8],
    ) -> Result<(), Failure> {
        if !self.takes_piece(seq, piece, Way::Described, raw.len())? {
            return Ok(());
        }
        let Some((segment, base)) = self.ring.next_body(raw.len()) else {
            return Err(Failure::Diverged(seq, "a snapshot piece exceeds the stream ring".into()));
        };
        self.note_used(seq, last_inode)?;
        // The free part of the ring holds the piece while its data is copied out.
        self.env.media.write(segment, base, raw)?;
        for entry in entries(raw, 0) {
            let (offset, header, op) = entry.map_err(|e| Failure::Diverged(seq, e.to_string()))?;
            let source = (segment, base + offset as u64 + 64);
            let applied = self.with_room(|volume| volume.apply(&header, &op, source))?;
            match applied {
                Err(refusal)
                    if self.is_in_place()
                        && !matches!(refusal, Refusal::NoEntry | Refusal::Fault(_)) =>
                {
                    return self.not_in_place(seq, refusal);
                }
                applied => _ = refused(seq, applied)?,
            }
        }
        self.publish_piece()?;
        self.to_head(Message::SnapshotAck { seq, piece });
        if end {
            self.volume.let_all_go();
            self.member.incoming = None;
            let sealed = self.volume.seal(seq, self.view.epoch, &[])?;
            let freed = self.volume.publish(sealed)?;
            self.member.discards.extend(freed);
            self.joined_at(seq, waits)?;
        }
        Ok(())
    }

    /// As head it gives none of these numbers out again, also of what is gone.
    pub(super) fn note_used(&mut self, seq: StreamSeq, last_inode: InodeId) -> Result<(), Failure> {
        if last_inode.0 >= NUMBERS_END {
            let what = format!("a snapshot says that inode {last_inode} was used");
            return Err(Failure::Diverged(seq, what));
        }
        if !planted(Bug::NumbersForgotten) {
            self.volume.note_used(last_inode);
        }
        Ok(())
    }

    /// The state of the stream up to there is here, and published.
    pub(super) fn joined_at(&mut self, seq: StreamSeq, waits: bool) -> Result<(), Failure> {
        (self.member.applied, self.member.published) = (seq, seq);
        // Whoever made that chunk: all up to it is as the head of this epoch has it.
        self.ring.restart(seq, self.view.epoch)?;
        self.member.whole_in = Some(self.view.epoch);
        self.member.never_in_place = false;
        if let Some(join) = self.part.join_mut() {
            join.joined_at = self.env.now;
        }
        if !waits {
            self.know_all_lost();
        }
        log::info!("state as of stream position {seq} is here");
        self.env.out.push(Effect::Position(seq));
        self.to_head(Message::Position { seq });
        Ok(())
    }

    /// Whether a piece that came in that way, of so many bytes, is wanted, and the one that is next; with the first the volume is emptied,
    /// unless it is gone on from.
    pub(super) fn takes_piece(
        &mut self,
        seq: StreamSeq,
        piece: u32,
        way: Way,
        bytes: usize,
    ) -> Result<bool, Failure> {
        if self.part.join().is_some_and(|join| join.returning.is_some()) {
            // What was asked for before.
            return Ok(false);
        }
        self.env.counters.snapshot_bytes += bytes as u64;
        self.is_next_piece(seq, piece, way)
    }

    fn is_next_piece(&mut self, seq: StreamSeq, piece: u32, way: Way) -> Result<bool, Failure> {
        let Some(incoming) = &mut self.member.incoming else { return Ok(false) };
        // Whoever asks twice is sent two, and may forget in the middle of the first that it has begun: of
        // which its end alone would be a state with nothing in it.
        let headless = planted(Bug::SnapshotHeadless) && incoming.begun.is_none();
        if piece != 0 && incoming.begun != Some((seq, piece)) && !headless {
            return Ok(false);
        }
        let goes_on = incoming.begun.is_some_and(|(before, _)| before == seq) && piece != 0;
        if goes_on && incoming.image.is_some() != (way == Way::Image) {
            let what = "an image goes on as a snapshot, or a snapshot as an image";
            return Err(Failure::Diverged(seq, what.into()));
        }
        if goes_on && way == Way::InPlace && !incoming.in_place {
            let what = "what there was before a snapshot is spoken of in its middle";
            return Err(Failure::Diverged(seq, what.into()));
        }
        let again = incoming.in_place && !incoming.let_go_any;
        let as_told = incoming.claimed && (!incoming.wiped || again);
        if piece == 0 && way == Way::InPlace && !as_told {
            // What this was to go on from is gone since it was asked for: it asks again.
            incoming.begun = None;
            return Ok(false);
        }
        incoming.begun = Some((seq, piece + 1));
        incoming.emptied = true;
        if let Some(join) = self.part.join_mut() {
            join.joining_at = self.env.now;
        }
        if (piece == 0 || headless) && !planted(Bug::JoinKeepsOld) {
            self.keeps_acknowledged(seq)?;
            self.wipe(seq, way)?;
        }
        Ok(true)
    }

    /// A piece that offers what this node may have: takes over what it has.
    pub(super) fn offer_arrived(
        &mut self,
        seq: StreamSeq,
        (piece, id): (u32, u64),
        offers: &[Offered],
        sure: &[Part],
    ) -> Result<(), Failure> {
        let offered: usize = offers.iter().map(|o| 20 + 4 * o.crcs.len()).sum();
        if !self.takes_piece(seq, piece, Way::Described, offered + 20 * sure.len())? {
            return Ok(());
        }
        let (mut lacks, mut doubts) = (Vec::new(), Vec::new());
        for offered in offers {
            self.offered(seq, id, offered, &mut lacks, &mut doubts)?;
        }
        for part in sure {
            if !self.take_over(seq, part)? {
                lacks.push(*part);
            }
        }
        self.publish_piece()?;
        self.to_head(Message::SnapshotLack { seq, piece, id, lacks, doubts });
        Ok(())
    }

    /// Looks for what is offered in what was here: what has the right checksums is to be compared.
    fn offered(
        &mut self,
        seq: StreamSeq,
        key: u64,
        offered: &Offered,
        lacks: &mut Vec<Part>,
        doubts: &mut Vec<Doubt>,
    ) -> Result<(), Failure> {
        let Offered { ino, first, crcs } = offered;
        let ino = *ino;
        let Some(incoming) = &mut self.member.incoming else { return Ok(()) };
        incoming.decided = incoming.decided.max(ino);
        let mut rest = vec![(*first, crcs.len() as u64)];
        // The newest first: it has what came last.
        for before in incoming.kept.iter().rev() {
            let mut left = Vec::new();
            for (from, count) in rest {
                let crcs = &crcs[(from - first) as usize..][..count as usize];
                let found = self.volume.may_have(before, ino, from, crcs);
                let Some((runs, lacks)) = refused(seq, found)? else { continue };
                left.extend(lacks);
                for runs in together(&runs) {
                    let (first, end) = (runs[0].file, runs[runs.len() - 1].end());
                    let part = Part { ino, first, count: (end - first) as u32 };
                    let keyed = self.volume.keyed_of(&runs, key)?;
                    doubts.push(Doubt { part, keyed });
                    incoming.doubted.insert((ino, first), runs);
                }
            }
            rest = left;
        }
        let part = |(first, count): (u64, u64)| Part { ino, first, count: count as u32 };
        lacks.extend(rest.into_iter().map(part));
        Ok(())
    }

    /// Takes over what was found to be the same. `false`: it is there no more.
    fn take_over(&mut self, seq: StreamSeq, part: &Part) -> Result<bool, Failure> {
        let Some(incoming) = &mut self.member.incoming else { return Ok(false) };
        let Some(runs) = incoming.doubted.remove(&(part.ino, part.first)) else {
            return Ok(false);
        };
        if runs.last().is_none_or(|run| run.end() != part.end()) {
            return Ok(false);
        }
        self.take_runs(seq, part, &runs)
    }

    fn take_runs(&mut self, seq: StreamSeq, part: &Part, runs: &[Run]) -> Result<bool, Failure> {
        let taken = self.with_room(|volume| volume.take_over(part.ino, runs))?;
        let taken = refused(seq, taken)?.unwrap_or(true);
        self.env.counters.taken_over_bytes +=
            if taken { u64::from(part.count) * BLOCK_BYTES } else { 0 };
        Ok(taken)
    }

    /// A piece that names what has not changed since the state that was here before.
    pub(super) fn same_arrived(
        &mut self,
        seq: StreamSeq,
        (piece, id): (u32, u64),
        parts: &[Part],
    ) -> Result<(), Failure> {
        if !self.takes_piece(seq, piece, Way::Described, 20 * parts.len())? {
            return Ok(());
        }
        let mut lacks = Vec::new();
        for part in parts {
            if !self.take_same(seq, part)? {
                lacks.push(*part);
            }
        }
        self.publish_piece()?;
        self.to_head(Message::SnapshotLack { seq, piece, id, lacks, doubts: Vec::new() });
        Ok(())
    }

    /// Takes over what has not changed. `false`: it is there no more, or was not what the head was told of.
    fn take_same(&mut self, seq: StreamSeq, part: &Part) -> Result<bool, Failure> {
        let Some(incoming) = &mut self.member.incoming else { return Ok(false) };
        incoming.decided = incoming.decided.max(part.ino);
        // What was half here of another snapshot may lie over what was there before.
        let [before] = &incoming.kept[..] else { return Ok(false) };
        if !incoming.claimed || part.count == 0 {
            return Ok(false);
        }
        let Some(runs) = before.runs_with(part.ino, part.first, part.end())? else {
            return Ok(false);
        };
        self.take_runs(seq, part, &runs)
    }

    /// What the volume held before the snapshot that is coming.
    fn kept(&self) -> &[View] {
        self.member.incoming.as_ref().map_or(&[], |incoming| &incoming.kept)
    }

    /// Whether anything of that is kept, or held back.
    pub(super) fn keeps_old(&self) -> bool {
        !self.kept().is_empty() || self.volume.held() > 0
    }

    /// Does something to the volume, and makes room for it as far as that takes some: by publishing, by letting go
    /// of what can be taken over no more, and of all of it at last.
    pub(super) fn with_room<T>(
        &mut self,
        mut apply: impl FnMut(&mut Volume) -> Result<T, Refusal>,
    ) -> Result<Result<T, Refusal>, Failure> {
        for tried in 0.. {
            let done = apply(&mut self.volume);
            let lacks = matches!(done, Err(Refusal::NeedsPublish));
            match tried {
                0 if lacks => {}
                1 if lacks && !self.kept().is_empty() => self.let_go_decided()?,
                2 if lacks && self.keeps_old() => {
                    log::info!(
                        "what was here before is given up: there is no room for it beside what comes"
                    );
                    if let Some(incoming) = &mut self.member.incoming {
                        incoming.kept.clear();
                        incoming.let_go_any = true;
                    }
                    self.volume.let_all_go();
                }
                _ => return Ok(done),
            }
            self.publish_piece()?;
        }
        Ok(Err(Refusal::NeedsPublish))
    }

    /// Lets go of what files had before of which all that was offered is decided.
    fn let_go_decided(&mut self) -> Result<(), Failure> {
        let Some(incoming) = &mut self.member.incoming else { return Ok(()) };
        incoming.let_go_any = true;
        let doubted = incoming.doubted.keys().next().map_or(InodeId(u64::MAX), |(ino, _)| *ino);
        let upto = incoming.decided.min(doubted);
        for before in &incoming.kept {
            let mut at = incoming.let_go;
            while let Some(ino) = before.inodes_after(at, 1)?.first().copied()
                && ino < upto
            {
                self.volume.let_go(before, ino)?;
                at = ino;
            }
        }
        incoming.let_go = incoming.let_go.max(InodeId(upto.0.saturating_sub(1)));
        Ok(())
    }

    /// Publishes a part of a snapshot, as a state of before the stream.
    pub(super) fn publish_piece(&mut self) -> Result<(), Failure> {
        let sealed = self.volume.seal(StreamSeq(0), self.view.epoch, &[])?;
        back_copies(&*self.env.media, &sealed.copies)?;
        run_copies(&*self.env.media, &sealed.copies)?;
        let freed = self.volume.publish(sealed)?;
        self.member.discards.extend(freed);
        Ok(())
    }

    /// Publishes what has come, and holds back what was given up for it.
    pub(super) fn publish_holding(&mut self, given_up: &[Blocks]) -> Result<(), Failure> {
        let sealed = self.volume.seal(StreamSeq(0), self.view.epoch, &[])?;
        back_copies(&*self.env.media, &sealed.copies)?;
        run_copies(&*self.env.media, &sealed.copies)?;
        self.volume.publish(sealed)?;
        self.volume.hold_back(given_up);
        Ok(())
    }

    /// Makes the volume empty before a snapshot comes, unless that goes on from what it holds.
    fn wipe(&mut self, seq: StreamSeq, way: Way) -> Result<(), Failure> {
        let image = way == Way::Image;
        self.drop_job()?;
        self.forget_scrub();
        self.forget_history()?;
        self.member.recent.cut(StreamSeq(0));
        let old = self.volume.superblock().clone();
        let params = Params {
            uuid: old.uuid,
            name: old.name.clone(),
            node: old.node,
            durability: old.durability,
            capacity_bytes: old.capacity_blocks * storage::limits::BLOCK_BYTES,
            stream_bytes: old.stream_bytes,
            time: old.created,
            uid: 0,
            gid: 0,
            mode: 0o755,
        };
        if let Some(incoming) = self.member.incoming.as_mut() {
            if incoming.image.is_some() {
                incoming.kept.clear();
            }
            // (The head was told of what there was before the first.)
            incoming.claimed &= !incoming.wiped || incoming.in_place && way == Way::InPlace;
            incoming.wiped = true;
            incoming.states.clear();
            incoming.image_doubted.clear();
            incoming.image_key = None;
        }
        if image {
            // What is free says the image.
            self.member.discards.clear();
        }
        let given_up = self.volume.slots_given_up();
        let kept = match way {
            Way::InPlace => match self.go_on_from_old()? {
                true => true,
                // It is told of all that it lacks, which is everything.
                false => {
                    let kept = self.keep_old(&params, image)?;
                    if let Some(incoming) = self.member.incoming.as_mut().filter(|_| !kept) {
                        incoming.claimed = false;
                    }
                    kept
                }
            },
            Way::Described | Way::Image => self.keep_old(&params, image)?,
        };
        if let Some(incoming) = self.member.incoming.as_mut() {
            incoming.in_place = way == Way::InPlace;
        }
        let logs: BTreeMap<_, _> =
            self.agent.clients.values().map(|c| (Segment::Log(c.segment), c.log_file())).collect();
        for segment in self.env.media.segments()? {
            match segment {
                Segment::Log(_) if planted(Bug::JoinKeepsLogs) => {}
                Segment::Log(_) => match logs.get(&segment) {
                    Some(log) => self.leave_log(*log)?,
                    None => {
                        let bytes = self.env.media.size(segment)?;
                        self.leave_log(LogFile::of_nobody(segment, bytes))?;
                    }
                },
                // Emptied, not removed: hostd and clients have them mapped.
                Segment::Arena(_) | Segment::Tree if !kept => {
                    self.env.media.discard(segment, 0, self.env.media.size(segment)?)?;
                }
                _ => {}
            }
        }
        if !planted(Bug::JoinKeepsLogs) {
            for (_, client) in std::mem::take(&mut self.agent.clients) {
                self.agent.table.remove(client.into_row())?;
            }
        }
        self.agent.locking.drop_all();
        self.member.batch.clear();
        self.member.settled.clear();
        self.member.stash.clear();
        self.member.dirty.clear();
        if kept {
            // Their numbers may become those of other classes.
            for number in self.volume.strange_arenas()? {
                let arena = Segment::Arena(number);
                self.env.media.discard(arena, 0, self.env.media.size(arena)?)?;
            }
        } else {
            let arenas = self.volume.arenas();
            self.volume = Volume::format_with(Arc::clone(&self.env.media), &params, &arenas)?;
        }
        self.volume.note_slots_given_up(&given_up);
        if let Some(incoming) = &mut self.member.incoming {
            incoming.image = image.then(|| self.volume.begin_image());
        }
        self.ring.restart(seq, Epoch(0))?;
        (self.member.applied, self.member.published) = (StreamSeq(0), StreamSeq(0));
        Ok(())
    }

    /// Whether the file system below has what the volume may come to need beside what is held back, which is blocks for its capacity in
    /// all.
    fn has_room_beside(&self) -> Result<bool, Failure> {
        let Some(spare) = self.env.media.spare()? else { return Ok(true) };
        let blocks = arena_bytes(self.volume.superblock().capacity_blocks);
        Ok(spare.free.saturating_sub(BELOW_LEFT) >= blocks.saturating_sub(spare.data))
    }

    /// Whether what is here is brought to what the head has where it is.
    fn is_in_place(&self) -> bool {
        self.member.incoming.as_ref().is_some_and(|incoming| incoming.in_place)
    }

    /// What the volume holds stays, and is brought to what the head has. `false`: that is damaged, or has a snapshot that is gone elsewhere.
    fn go_on_from_old(&mut self) -> Result<bool, Failure> {
        if self.kept().is_empty() {
            // What was applied and not published goes.
            match self.open_volume_anew() {
                Ok(()) => {}
                Err(Fault::Media(e)) => return Err(e.into()),
                Err(fault) => {
                    log::warn!("what is here is not gone on from: {fault}");
                    return Ok(false);
                }
            }
            if self.volume.has_snapshots() {
                return Ok(false);
            }
            let view = self.volume.begin_reconciling()?;
            if let Some(incoming) = &mut self.member.incoming {
                incoming.kept.push(view);
            }
        }
        if let Some(incoming) = &mut self.member.incoming {
            incoming.doubted.clear();
            (incoming.let_go, incoming.decided) = (InodeId::NONE, InodeId::NONE);
        }
        Ok(true)
    }

    /// Begins the volume anew beside what it holds. `false`: that is damaged, or cannot be told apart from what comes.
    fn keep_old(&mut self, params: &Params, image: bool) -> Result<bool, Failure> {
        if self.volume.sums_base().is_none() || self.env.config.limits.offer_blocks == 0 {
            return Ok(false);
        }
        if !self.has_room_beside()? {
            log::info!(
                "what is here is given up first: the file system below has no room beside it"
            );
            return Ok(false);
        }
        if self.kept().is_empty() {
            // What was applied and not published goes.
            match self.open_volume_anew() {
                Ok(()) => {}
                Err(Fault::Media(e)) => return Err(e.into()),
                Err(fault) => {
                    log::warn!("nothing of what was here is taken over: {fault}");
                    return Ok(false);
                }
            }
        }
        if !image && self.kept().is_empty() && self.volume.root().inodes <= 1 {
            // There is nothing, but for what an image may have left.
            return Ok(false);
        }
        let states = if image { self.volume.snapshot_views(STATES_MAX) } else { Vec::new() };
        let view = self.volume.begin_anew(params)?;
        if let Some(incoming) = &mut self.member.incoming {
            incoming.states = states;
            incoming.kept.push(view);
            incoming.doubted.clear();
            (incoming.let_go, incoming.decided) = (InodeId::NONE, InodeId::NONE);
        }
        Ok(true)
    }
}

/// Runs that lie one behind the other in a file, as far as they are compared at a time.
fn together(runs: &[Run]) -> Vec<Vec<Run>> {
    let mut found: Vec<Vec<Run>> = Vec::new();
    for run in runs {
        let mut at = run.file;
        while at < run.end() {
            let goes_on = found.last_mut().filter(|group| {
                let (first, end) = (group[0].file, group[group.len() - 1].end());
                end == at && end - first < COMPARED
            });
            let room = goes_on.as_ref().map_or(COMPARED, |group| COMPARED - (at - group[0].file));
            let part = run.cut(at, at + room);
            at = part.end();
            match goes_on {
                Some(group) => group.push(part),
                None => found.push(vec![part]),
            }
        }
    }
    found
}

/// What a refusal in the middle of a snapshot means.
fn refused<T>(seq: StreamSeq, done: Result<T, Refusal>) -> Result<Option<T>, Failure> {
    match done {
        Ok(done) => Ok(Some(done)),
        // Content of a file that was removed or cut since: the stream says so, too.
        Err(Refusal::NoEntry) => Ok(None),
        Err(Refusal::Fault(fault)) => Err(fault.into()),
        Err(refusal) => Err(Failure::Diverged(seq, format!("snapshot: {refusal}"))),
    }
}
