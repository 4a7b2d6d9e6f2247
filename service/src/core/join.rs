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

use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{Epoch, InodeId, Nanos, NodeId, StreamSeq};
use storage::media::Segment;
use storage::volume::{Params, Refusal, Volume, back_copies, run_copies};

use super::head::NUMBERS_END;
use super::message::Message;
use super::{Effect, Failure, Node, Role, entries};

/// A joining node that hears nothing asks again after this time.
const JOIN_AGAIN: u64 = 500_000_000;
/// One that has everything and is not in the chain after this time begins anew.
const JOIN_GIVE_UP: u64 = 5_000_000_000;

/// How far a node that joins has come.
#[derive(Debug, Default)]
pub(super) struct Join {
    /// A snapshot that was asked for, until all of it is here.
    pub incoming: Option<Incoming>,
    /// Instead of one the rest of the stream was asked for, so many times.
    pub returning: Option<u32>,
    /// It comes.
    pub behind: Option<Behind>,
    /// When something was asked or heard about joining.
    pub joining_at: Nanos,
    /// When everything was here.
    pub joined_at: Nanos,
    /// In this epoch everything was, and what came since is kept.
    pub whole_in: Option<Epoch>,
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

/// A snapshot arriving.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// The snapshot of which pieces have arrived, and the piece that is next.
    begun: Option<(StreamSeq, u32)>,
}

impl Node {
    pub(super) fn begin_join(&mut self, out: &mut Vec<Effect>) {
        log::info!("joining: asking the head for the volume's state");
        self.join.incoming = Some(Incoming::default());
        self.join.joining_at = self.now;
        // What processes here have open goes before: who asks for the snapshot has told it.
        self.report_past(out);
        self.member.stash.clear();
        (self.member.dropped, self.join.behind, self.join.whole_in) = (None, None, None);
        self.join.returning = self.may_return().then_some(0);
        match self.join.returning {
            Some(_) => self.want_return(out),
            None => self.want_snapshot(out),
        }
    }

    /// It is to join again in the epoch in which it had everything: what it has it keeps. The head, which has heard so or is about to, may
    /// have acknowledged by now what it holds.
    pub(super) fn join_where_it_was(&mut self, out: &mut Vec<Effect>) {
        if self.join.whole_in != Some(self.epoch) {
            return self.begin_join(out);
        }
        self.report_past(out);
        (self.join.joining_at, self.join.joined_at) = (self.now, self.now);
        self.to_head(Message::Position { seq: self.ring.last() }, out);
    }

    /// What is here may be the beginning of the stream that the head has.
    fn may_return(&self) -> bool {
        self.config.limits.returns > 0 && self.ring.last().0 > 0 && self.ring.last_epoch().0 > 0
    }

    fn want_return(&mut self, out: &mut Vec<Effect>) {
        let (last, epoch) = (self.ring.last(), self.ring.last_epoch());
        let (incarnation, published) = (self.config.incarnation, self.member.published);
        self.to_head(Message::Return { incarnation, last, epoch, published }, out);
    }

    /// Head: a node is back, whose stream ends with that chunk of that epoch.
    pub(super) fn return_wanted(
        &mut self,
        from: NodeId,
        incarnation: u64,
        (last, epoch): (StreamSeq, Epoch),
        published: StreamSeq,
        out: &mut Vec<Effect>,
    ) {
        self.heard_of(from);
        if !self.is_head() || !self.ready || !self.syncing.contains(&from) {
            return;
        }
        if !self.begins_anew(from, incarnation) {
            return;
        }
        self.head.snapshots.remove(&from);
        self.head.acked.remove(&from);
        let agreed = self.parts_at(last, epoch).filter(|at| {
            let rest = *at == self.ring.last() || self.ring.get(StreamSeq(at.0 + 1)).is_some();
            rest && *at >= published
        });
        self.counters.returns += u64::from(agreed.is_some());
        log::info!("node {from} is back with the stream up to {last}: {agreed:?} is common");
        let (seq, last) = (agreed.unwrap_or_default(), self.ring.last());
        self.send(from, Message::Resume { seq, last }, out);
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
    pub(super) fn resume(
        &mut self,
        seq: StreamSeq,
        last: StreamSeq,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if self.role() != Role::Syncing || self.join.returning.take().is_none() {
            return Ok(());
        }
        if seq.0 == 0 || seq < self.member.published || seq > self.ring.last() {
            self.want_snapshot(out);
            return Ok(());
        }
        self.ring.cut(seq)?;
        if self.member.applied > seq {
            self.take_back_to(seq)?;
        }
        self.member.dirty.retain(|_, at| at.0 <= seq);
        self.count_settled()?;
        self.join.incoming = None;
        (self.join.joining_at, self.join.joined_at) = (self.now, self.now);
        log::info!("what is here of the stream goes on from {seq}, to {last}");
        out.push(Effect::Position(seq));
        self.join.behind = Some(Behind { last, from: seq, batch: 0 });
        self.catch_up(out);
        Ok(())
    }

    /// Asks for what it has missed, some at a time; when all of that is here it tells so, and is sent all that comes.
    pub(super) fn catch_up(&mut self, out: &mut Vec<Effect>) {
        let Some(behind) = self.join.behind else { return };
        let seq = self.ring.last();
        if seq >= behind.last {
            (self.join.behind, self.join.whole_in) = (None, Some(self.epoch));
            self.to_head(Message::Position { seq }, out);
        } else if seq.0 >= behind.from.0 + behind.batch {
            let batch = if behind.batch == 0 { self.config.limits.resend } else { behind.batch };
            self.join.behind = Some(Behind { from: seq, batch, ..behind });
            (self.join.joining_at, self.join.joined_at) = (self.now, self.now);
            self.want_stream(out);
        }
    }

    /// Nothing has come for a while: some of what was asked for is lost, or that was all that comes for one question.
    fn ask_for_rest(&mut self, out: &mut Vec<Effect>) {
        let Some(behind) = self.join.behind else { return };
        let seq = self.ring.last();
        let came = seq.0.saturating_sub(behind.from.0);
        let batch = if came > 0 { came.min(behind.batch) } else { behind.batch };
        self.join.behind = Some(Behind { from: seq, batch, ..behind });
        self.want_stream(out);
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

    pub(super) fn report_past(&mut self, out: &mut Vec<Effect>) {
        for message in self.past_reports() {
            self.to_head(message, out);
        }
    }

    fn want_snapshot(&mut self, out: &mut Vec<Effect>) {
        out.push(Effect::Wipes);
        self.to_head(Message::SnapshotWant { incarnation: self.config.incarnation }, out);
    }

    /// It is in the chain: what it asked for since it had everything will not come.
    pub(super) fn end_join(&mut self) -> Result<(), Failure> {
        (self.join.returning, self.join.behind) = (None, None);
        match self.join.incoming.take().and_then(|i| i.begun) {
            None => Ok(()),
            Some((seq, _)) => {
                Err(Failure::Diverged(seq, "it is in the chain with half a snapshot".into()))
            }
        }
    }

    /// What a joining node asked for may have come before the head knew of it, or got lost.
    pub(super) fn join_again(&mut self, out: &mut Vec<Effect>) {
        if self.role() != Role::Syncing || self.now < self.join.joining_at + JOIN_AGAIN {
            return;
        }
        self.join.joining_at = self.now;
        match self.join.incoming {
            Some(_) => match &mut self.join.returning {
                Some(tries) if *tries < self.config.limits.returns => {
                    *tries += 1;
                    self.want_return(out);
                }
                _ => {
                    self.join.returning = None;
                    self.want_snapshot(out);
                }
            },
            // The head no longer keeps what is missing here, or it would be in the chain by now.
            None if self.now > self.join.joined_at + JOIN_GIVE_UP => self.begin_join(out),
            // Some of it was lost.
            None if self.join.behind.is_some() => self.ask_for_rest(out),
            None => self.to_head(Message::Position { seq: self.ring.last() }, out),
        }
    }

    pub(super) fn snapshot_arrived(
        &mut self,
        seq: StreamSeq,
        piece: u32,
        last_inode: InodeId,
        (end, waits): (bool, bool),
        raw: &[u8],
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if self.join.returning.is_some() {
            // What was asked for before.
            return Ok(());
        }
        self.counters.snapshot_bytes += raw.len() as u64;
        let Some(incoming) = &mut self.join.incoming else { return Ok(()) };
        // Whoever asks twice is sent two, and may forget in the middle of the first that it has begun: of
        // which its end alone would be a state with nothing in it.
        let headless = planted(Bug::SnapshotHeadless) && incoming.begun.is_none();
        if piece != 0 && incoming.begun != Some((seq, piece)) && !headless {
            return Ok(());
        }
        incoming.begun = Some((seq, piece + 1));
        self.join.joining_at = self.now;
        if (piece == 0 || headless) && !planted(Bug::JoinKeepsOld) {
            self.wipe(seq)?;
        }
        let Some((segment, base)) = self.ring.next_body(raw.len()) else {
            return Err(Failure::Diverged(seq, "a snapshot piece exceeds the stream ring".into()));
        };
        // As head it gives none of these out again, also of what is gone.
        if last_inode.0 >= NUMBERS_END {
            let what = format!("a snapshot says that inode {last_inode} was used");
            return Err(Failure::Diverged(seq, what));
        }
        if !planted(Bug::NumbersForgotten) {
            self.volume.note_used(last_inode);
        }
        // The free part of the ring holds the piece while its data is copied out.
        self.media.write(segment, base, raw)?;
        for entry in entries(raw, 0) {
            let (offset, header, op) = entry.map_err(|e| Failure::Diverged(seq, e.to_string()))?;
            let source = (segment, base + offset as u64 + 64);
            let mut applied = self.volume.apply(&header, &op, source);
            if matches!(applied, Err(Refusal::NeedsPublish)) {
                self.publish_piece()?;
                applied = self.volume.apply(&header, &op, source);
            }
            match applied {
                Ok(_) => {}
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                // Content of a file that was removed or cut since: the stream says so, too.
                Err(Refusal::NoEntry) => {}
                Err(refusal) => {
                    return Err(Failure::Diverged(seq, format!("snapshot: {refusal}")));
                }
            }
        }
        self.publish_piece()?;
        self.to_head(Message::SnapshotAck { seq, piece }, out);
        if end {
            let sealed = self.volume.seal(seq, self.epoch, &[])?;
            self.volume.publish(sealed)?;
            (self.member.applied, self.member.published) = (seq, seq);
            self.ring.restart(seq)?;
            (self.join.incoming, self.join.whole_in) = (None, Some(self.epoch));
            self.join.joined_at = self.now;
            if !waits {
                self.know_all_lost();
            }
            log::info!("state as of stream position {seq} is here");
            out.push(Effect::Position(seq));
            self.to_head(Message::Position { seq }, out);
        }
        Ok(())
    }

    /// Publishes a part of a snapshot, as a state of before the stream.
    fn publish_piece(&mut self) -> Result<(), Failure> {
        let sealed = self.volume.seal(StreamSeq(0), self.epoch, &[])?;
        back_copies(&*self.media, &sealed.copies)?;
        run_copies(&*self.media, &sealed.copies)?;
        self.volume.publish(sealed)?;
        Ok(())
    }

    /// Makes the volume empty before a snapshot comes.
    fn wipe(&mut self, seq: StreamSeq) -> Result<(), Failure> {
        self.drop_job()?;
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
        for segment in self.media.segments()? {
            match segment {
                Segment::Log(_) if planted(Bug::JoinKeepsLogs) => {}
                Segment::Log(_) => self.media.remove(segment)?,
                // Emptied, not removed: hostd and clients have them mapped.
                Segment::Arena(_) | Segment::Tree => {
                    self.media.discard(segment, 0, self.media.size(segment)?)?;
                }
                Segment::Super | Segment::Stream | Segment::Clients => {}
            }
        }
        if !planted(Bug::JoinKeepsLogs) {
            for (_, client) in std::mem::take(&mut self.agent.clients) {
                self.agent.table.remove(client.into_row())?;
            }
        }
        self.locking.drop_all();
        self.member.batch.clear();
        self.member.settled.clear();
        self.member.stash.clear();
        self.member.dirty.clear();
        self.volume = Volume::format(Arc::clone(&self.media), &params)?;
        self.ring.restart(seq)?;
        (self.member.applied, self.member.published) = (StreamSeq(0), StreamSeq(0));
        Ok(())
    }
}
