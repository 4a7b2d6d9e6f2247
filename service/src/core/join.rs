//! Joining: a node that has lost its place, or is new, gets the state of the volume as of some place in the stream, then the
//! stream from there on. (Who sends it: `snapshot`.)

use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{InodeId, Nanos, StreamSeq};
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
    /// When something was asked or heard about joining.
    pub joining_at: Nanos,
    /// When everything was here.
    pub joined_at: Nanos,
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
        self.want_snapshot(out);
    }

    pub(super) fn report_past(&mut self, out: &mut Vec<Effect>) {
        for message in self.past_reports() {
            self.to_head(message, out);
        }
    }

    fn want_snapshot(&mut self, out: &mut Vec<Effect>) {
        self.to_head(Message::SnapshotWant { incarnation: self.config.incarnation }, out);
    }

    /// It is in the chain: what it asked for since it had everything will not come.
    pub(super) fn end_join(&mut self) -> Result<(), Failure> {
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
            Some(_) => self.want_snapshot(out),
            // The head no longer keeps what is missing here, or it would be in the chain by now.
            None if self.now > self.join.joined_at + JOIN_GIVE_UP => self.begin_join(out),
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
            self.join.incoming = None;
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
