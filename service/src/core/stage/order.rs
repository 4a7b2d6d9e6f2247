//! Order: the head judges entries one after the other, applies those that pass to its working state, and makes chunks of them
//! that settle their place in the one order of the volume.

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Sequence, StreamSeq};
use storage::format::chunk::ChunkHeader;
use storage::format::control::LeaseMode;
use storage::format::entry::{Header, Op, entry_bytes};
use storage::limits::CHUNK_BYTES_MAX;
use storage::volume::{Refusal, joins};

use super::check::{is_joint, judge};
use super::draft::{Draft, Ended, Entries, Taken};
use crate::core::frame::Checked;
use crate::core::message::{Message, Raw};
use crate::core::parts::Step;
use crate::core::reach::SERVICE;
use crate::core::{Failure, Node, cause, entries};

/// Clients' clocks may be so much ahead of the head's.
const AHEAD_MAX: u64 = 10_000_000_000;
/// Room in a chunk for the service's own Reap entries.
const REAP_SLACK: usize = 64 * 1024;

impl Node {
    /// Judges entries of a client and puts those that pass into the stream.
    pub(in crate::core) fn ingest(
        &mut self,
        client: ClientId,
        first: Sequence,
        last: Sequence,
        raw: Checked,
    ) -> Result<(), Failure> {
        let Some(head) = self.part.head() else { return Ok(()) };
        let Some(known) = head.known.get(&client) else { return Ok(()) };
        let incarnation = known.incarnation;
        let done = self.settled_of(client);
        if last <= done && !planted(Bug::RetryTwice) {
            return Ok(());
        }
        if first.0 > done.0 + 1 {
            // What lies between was lost with a link or an epoch; the agent sends it again.
            self.env.counters.bad_messages += 1;
            return Ok(());
        }
        let body = raw.body();
        let (mut draft, mut begun) = (self.draft(body.len(), body)?, Sequence(0));
        // Where the rest begins that has to wait, and whether for a publication.
        let mut rest = None;
        for (offset, header, op) in raw.entries() {
            if header.sequence <= done && !planted(Bug::RetryTwice) {
                continue;
            }
            if header.sequence > last || begun.0 > 0 && header.sequence <= begun {
                // No agent sends that: what comes before it counts.
                self.env.counters.bad_messages += 1;
                return self.leave(draft, client, incarnation, begun);
            }
            let len = entry_bytes(header.length as usize).min(body.len() - offset);
            if begun.0 > 0 && self.turn_is_over() {
                self.turn.cut_short = true;
                rest = Some((offset, false));
                break;
            }
            self.spend_entry(len);
            if draft.len() + len + REAP_SLACK / 2 > draft.reserved {
                self.close(draft, client, begun, incarnation)?;
                draft = self.draft(body.len() - offset, body)?;
            }
            let entry = (offset, len);
            draft = match self.one(draft, client, incarnation, &header, &op, entry, begun)? {
                Taken::Up(draft) => draft,
                Taken::Part(draft) => {
                    self.turn.cut_short = true;
                    rest = Some((offset, false));
                    begun = if begun.0 > 0 { begun } else { done };
                    draft
                }
                Taken::Later(draft) => {
                    rest = Some((offset, true));
                    begun = if begun.0 > 0 { begun } else { done };
                    draft
                }
            };
            if rest.is_some() {
                break;
            }
            begun = header.sequence;
            if draft.is_untaken() {
                self.spend_chunk();
                self.close(draft, client, begun, incarnation)?;
                draft = self.draft(body.len() - offset, body)?;
            }
        }
        let Some((offset, awaits)) = rest else {
            let (ended, own) = draft.end();
            let entries = own.unwrap_or_else(|begin| raw.from(begin));
            self.issue_settled(ended, entries, client, last, incarnation)?;
            self.give_room(client);
            return Ok(());
        };
        self.leave(draft, client, incarnation, begun)?;
        let first = Sequence(begun.0 + 1);
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if !planted(Bug::RestForgotten) {
            let raw = Raw::Checked(raw.from(offset));
            let rest = Message::Entries { client, first, last, raw };
            head.stalled.push_front((client.node(), rest));
        }
        if awaits {
            head.awaits = Some(self.member.applied);
            self.member.publish_now = true;
        }
        self.give_room(client);
        Ok(())
    }

    /// Ends a draft in the middle of what a client sent; the rest, from the entry after `begun` on, is taken up later.
    fn leave(
        &mut self,
        draft: Draft<'_>,
        client: ClientId,
        incarnation: u32,
        begun: Sequence,
    ) -> Result<(), Failure> {
        if begun.0 == 0 {
            // A part of the client's first operation: nothing of its own is settled by it, and a chunk that says so is its end.
            self.close(draft, ClientId(0), Sequence(1), incarnation)
        } else {
            self.close(draft, client, begun, incarnation)
        }
    }

    /// Judges and applies one entry.
    #[allow(clippy::too_many_arguments)]
    fn one<'a>(
        &mut self,
        mut draft: Draft<'a>,
        client: ClientId,
        incarnation: u32,
        header: &Header,
        op: &Op<'_>,
        (at, len): (usize, usize),
        before: Sequence,
    ) -> Result<Taken<'a>, Failure> {
        // What a client takes for now may be any number; what is too far ahead is brought back before it is anybody's ctime.
        let told = header.time;
        let bounded = told.min(self.env.realtime().saturating_add(AHEAD_MAX));
        let header = &Header { time: self.time_of(client, op, bounded)?, ..*header };
        if planted(Bug::RedeemedTwice) {
            self.redeem(client, header.promised);
        }
        if let Op::CloneRange { source, .. } = *op
            && let Some((slot, _)) = source.of_snapshot()
            && self.volume.read_snapshot(slot).is_none()
            && self.volume.snapshot_in(slot).is_some()
            && self.may_wait(&draft)
        {
            // Who may read it is known when it is on media.
            return Ok(Taken::Later(draft));
        }
        let Some(head) = self.part.head() else { return Ok(Taken::Up(draft)) };
        let Some(known) = head.known.get(&client) else { return Ok(Taken::Up(draft)) };
        let judged = if header.epoch > self.view.epoch && !planted(Bug::FutureEpochAccepted) {
            Err(base::Errno::STALE)
        } else if op.level() > self.view.level && !planted(Bug::LevelIgnored) {
            // A member with an older program could not follow.
            Err(base::Errno::OPNOTSUPP)
        } else {
            judge(&self.volume, &head.leases, client, known, op)
        };
        if let Err(errno) = judged {
            self.redeem(client, header.promised);
            let refused = (client, incarnation, before);
            return Ok(Taken::Up(self.refuse(draft, refused, header, op, errno)?));
        }
        self.used_jointly(client, op);
        let step = match self.part_of(client, header.sequence, op)? {
            Step::Refuse(errno) => {
                self.redeem(client, header.promised);
                let refused = (client, incarnation, before);
                return Ok(Taken::Up(self.refuse(draft, refused, header, op, errno)?));
            }
            step => step,
        };
        let part = match &step {
            Step::Part(part, _) | Step::Last(part) => Some(part),
            _ => None,
        };
        let same = |part: &Op<'_>| {
            let Header { sequence, epoch, lane, time, promised, .. } = *header;
            // The next head counts what it was promised with the part that settles it.
            let promised = if matches!(step, Step::Part(..)) { 0 } else { promised };
            part.to_promised_entry(promised, sequence, epoch, lane, time, incarnation)
        };
        let (whole, op, cut_up) = (op, part.unwrap_or(op), part.is_some_and(|part| part != op));
        let other = (cut_up || header.time != told).then(|| same(op));
        let mut tries = 0;
        let applied = loop {
            let source = (draft.source.0, draft.source.1 + draft.len() as u64 + 64);
            // Where the order is made, and nowhere else.
            self.volume.enforce_quotas(true);
            // What it was promised is its own. The account has it until the operation is judged: it may have to wait.
            let own = self.part.head().map_or(0, |head| head.promised_to(client, header));
            self.volume.keep_free(self.kept_free().saturating_sub(own));
            let applied = self.volume.apply(header, op, source);
            self.volume.enforce_quotas(false);
            self.volume.keep_free(0);
            match applied {
                Ok(applied) => break applied,
                Err(Refusal::NeedsPublish) if self.may_wait(&draft) => {
                    // Copying what is to be published first takes as long as it takes: others have their turns meanwhile.
                    return Ok(Taken::Later(draft));
                }
                Err(Refusal::NeedsPublish)
                    if tries == 0 || (tries == 1 && self.volume.views_hold_pages()) =>
                {
                    if tries == 1 {
                        // Space goes before nodes that join; they ask again.
                        log::warn!(
                            "the tree is nearly full: snapshots for joining nodes begin anew"
                        );
                        self.end_snapshots();
                    }
                    tries += 1;
                    // What is in the draft must be in the ring before its copies can run.
                    let (rest, raw) = (draft.reserved, draft.entries.raw);
                    self.close(draft, client, before, incarnation)?;
                    self.publish_working(self.member.applied)?;
                    draft = self.draft(rest, raw)?;
                }
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                Err(refusal) => {
                    let errno = match refusal {
                        Refusal::NeedsPublish => base::Errno::NOSPC,
                        other => other.errno(),
                    };
                    self.forget_cut(client);
                    self.redeem(client, header.promised);
                    let refused = (client, incarnation, before);
                    draft = self.refuse(draft, refused, header, whole, errno)?;
                    if errno == base::Errno::NOSPC {
                        self.seek_room();
                    }
                    return Ok(Taken::Up(draft));
                }
            }
        };
        self.redeem(client, header.promised);
        draft.notes.add(op, draft.len());
        match other {
            Some(bytes) => draft.entries.push_made(&bytes),
            None => draft.entries.push(at, len),
        }
        draft.count += 1;
        self.mark_dirty(op, draft.seq, client);
        self.note_done(client, op, draft.seq)?;
        let facts = op.facts();
        if let Op::DropSnapshot { name, .. } = op {
            // What is still to be sent of it is not there any more.
            self.end_images(name);
        }
        if facts.reads_content && !planted(Bug::CloneWhileJoining) {
            // Alone among the operations they use content that is there. Who joins would do them on
            // content that may be newer: their snapshots begin anew when they ask again.
            self.end_snapshots();
        }
        if let Some(head) = self.part.head_mut()
            && let Some(known) = head.known.get_mut(&client)
            && let Some(ino) = facts.makes
        {
            known.fresh.remove(&ino);
            known.pins.insert(ino);
            // Who makes it may write to it, whatever becomes of it, until it has closed it.
            known.rights.insert(ino);
        }
        if let Some(ino) = applied.orphaned {
            self.orphaned(&mut draft, client, incarnation, header, op, ino)?;
        }
        if let Step::Part(_, next) = step {
            self.env.counters.parts += 1;
            if let Some(head) = self.part.head_mut() {
                head.cuts.insert(client, next);
            }
            return Ok(Taken::Part(draft));
        }
        self.forget_cut(client);
        Ok(Taken::Up(draft))
    }

    /// No part of an operation of this client is done that is not settled.
    fn forget_cut(&mut self, client: ClientId) {
        if let Some(head) = self.part.head_mut() {
            head.cuts.remove(&client);
        }
    }

    /// Nodes that join are sent nothing more of what is here now: they ask again.
    fn end_snapshots(&mut self) {
        if let Some(head) = self.part.head_mut() {
            // (Of an image nothing changes.)
            head.snapshots.retain(|_, s| s.is_sent() || s.image.is_some());
        }
    }

    /// The same of those that are sent the volume with its snapshots, and still have to come to this one.
    fn end_images(&mut self, name: &[u8]) {
        if let Some(head) = self.part.head_mut() {
            head.snapshots.retain(|_, s| s.image.as_ref().is_none_or(|image| !image.reads(name)));
        }
    }

    /// Whether there is something to publish, here or in the draft.
    fn may_wait(&self, draft: &Draft<'_>) -> bool {
        draft.count > 0 || self.member.job.is_some() || self.member.applied > self.member.published
    }

    /// An inode lost its last name: it goes at once unless somebody has it open.
    fn orphaned(
        &mut self,
        draft: &mut Draft<'_>,
        client: ClientId,
        incarnation: u32,
        header: &Header,
        op: &Op<'_>,
        ino: InodeId,
    ) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let open = op.facts().open;
        if let Some(known) = head.known.get_mut(&client) {
            if open {
                known.pins.insert(ino);
            } else {
                known.pins.remove(&ino);
                known.rights.remove(&ino);
            }
        }
        if self.is_pinned(ino) {
            return Ok(());
        }
        if self.part_to_free(ino)?.is_some() {
            // In parts, behind what is in the making.
            if let Some(head) = self.part.head_mut() {
                head.let_go.insert(ino);
            }
            self.turn.cut_short = true;
            return Ok(());
        }
        let reap = Op::Reap { ino };
        let bytes =
            reap.to_entry(header.sequence, self.view.epoch, header.lane, header.time, incarnation);
        match self.volume.apply(header, &reap, draft.source) {
            Ok(_) => {
                draft.notes.add(&reap, draft.len());
                draft.entries.push_made(&bytes);
                draft.count += 1;
                Ok(())
            }
            Err(Refusal::Fault(fault)) => Err(fault.into()),
            Err(Refusal::NeedsPublish) => {
                self.reap_once_published(ino);
                self.turn.cut_short = true;
                Ok(())
            }
            // It stays an orphan; the next takeover frees it.
            Err(_) => Ok(()),
        }
    }

    pub(in crate::core) fn mark_dirty(&mut self, op: &Op<'_>, seq: StreamSeq, client: ClientId) {
        for ino in op.facts().touches().filter(|ino| *ino != InodeId::NONE) {
            let dirty = self.member.dirty.entry(ino).or_insert((seq, client, StreamSeq(0)));
            if dirty.1 != client {
                (dirty.1, dirty.2) = (client, dirty.0);
            }
            dirty.0 = seq;
        }
        self.rotten_touched(op, seq);
        if matches!(op, Op::Snapshot { .. }) && !planted(Bug::SnapshotUntold) {
            self.blocks_frozen();
        }
    }

    /// Who changes a part of a block gets another one from now on, and the bytes beside lie in that: clients here that know their files'
    /// blocks, as those that are changed in place, ask anew before they read or write. (The blocks that they know are nobody else's before the
    /// snapshot is gone again, which comes later here as everywhere.)
    fn blocks_frozen(&mut self) {
        for client in self.agent.clients.values_mut() {
            let writes = |mode| matches!(mode, LeaseMode::Write | LeaseMode::Joint);
            let held = client.leases().into_iter().filter(|(_, mode)| writes(*mode));
            held.for_each(|(ino, _)| client.suspend(ino));
        }
    }

    /// Notes in the draft that an operation is refused; `before`: the last one before it that is in the draft.
    fn refuse<'a>(
        &mut self,
        mut draft: Draft<'a>,
        (client, incarnation, before): (ClientId, u32, Sequence),
        header: &Header,
        op: &Op<'_>,
        errno: base::Errno,
    ) -> Result<Draft<'a>, Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(draft) };
        self.env.counters.refused += 1;
        if is_joint(&head.leases, client, op) && !planted(Bug::JointRefusalCounts) {
            // Who did it waits for this, and nobody else is told. A chunk says this of one operation, and nothing else then.
            if draft.refused.0 > 0 {
                let (rest, raw) = (draft.reserved, draft.entries.raw);
                self.close(draft, client, before, incarnation)?;
                draft = self.draft(rest, raw)?;
            }
            draft.refused = (0, header.sequence, errno.0);
            self.env.counters.untaken += 1;
            return Ok(draft);
        }
        draft.refused = (draft.refused.0 + 1, header.sequence, cause(draft.refused.2, errno.0));
        let Some(known) = head.known.get_mut(&client) else { return Ok(draft) };
        known.refusals += 1;
        let refusals = known.refusals;
        if refusals.is_power_of_two() {
            // A hostile client cannot fill the log with them.
            log::warn!(
                "client {:#x} (uid {}): operation {} refused with {errno:?} ({refusals} so far): {}",
                client.0,
                known.identity.uid,
                header.sequence,
                summary(op)
            );
        }
        Ok(draft)
    }

    /// Begins a chunk that may become that long, of some of the entries of `raw`.
    fn draft<'a>(&mut self, want: usize, raw: &'a [u8]) -> Result<Draft<'a>, Failure> {
        let reserved = (want + REAP_SLACK).min(CHUNK_BYTES_MAX);
        self.make_room(reserved)?;
        let seq = StreamSeq(self.ring.last().0 + 1);
        match self.ring.next_body(reserved) {
            Some(source) => {
                let (entries, (refused, notes)) = (Entries::of(raw), Default::default());
                Ok(Draft { entries, count: 0, source, reserved, seq, refused, notes })
            }
            // Members lag by a whole ring: only waiting for them, or for their end, helps; the
            // callers check `has_room` before they come here.
            None => Err(Failure::Diverged(seq, "the stream ring is full".into())),
        }
    }

    /// Ends a draft: into the ring, down the chain. `settled` is what it settles.
    fn close(
        &mut self,
        draft: Draft<'_>,
        client: ClientId,
        settled: Sequence,
        incarnation: u32,
    ) -> Result<(), Failure> {
        let (ended, entries) = draft.end_apart();
        self.issue_settled(ended, entries, client, settled, incarnation)
    }

    /// The same of a draft that has ended.
    fn issue_settled(
        &mut self,
        mut ended: Ended,
        mut entries: Checked,
        client: ClientId,
        settled: Sequence,
        incarnation: u32,
    ) -> Result<(), Failure> {
        if ended.count == 0 && settled <= self.settled_of(client) {
            return Ok(());
        }
        if self.env.config.limits.coalesce {
            self.coalesce(&mut ended, &mut entries, incarnation);
        }
        let header = ChunkHeader {
            epoch: self.view.epoch,
            stream_seq: ended.seq,
            client,
            last_seq: settled,
            incarnation,
            entries: ended.count,
            body_bytes: entries.len() as u32,
            time: self.env.realtime(),
            refusals: ended.refused.0,
            refused: ended.refused.1,
            errno: ended.refused.2,
        };
        self.issue(header, entries, ended.reserved)
    }

    /// Takes out of a chunk what its end does not show.
    fn coalesce(&mut self, ended: &mut Ended, entries: &mut Checked, incarnation: u32) {
        for at in ended.notes.dead() {
            self.env.counters.coalesced += 1;
            self.env.counters.coalesced_bytes += entries.pad_over(at, incarnation) as u64;
            if planted(Bug::CoalescedUncounted) {
                ended.count -= 1;
            }
        }
    }

    /// Emits a chunk of the service's own, already judged; applies it here. `false`: some of it cannot be done before something is
    /// published, and is left out.
    pub(in crate::core) fn emit(
        &mut self,
        client: ClientId,
        last: Sequence,
        incarnation: u32,
        raw: &[u8],
    ) -> Result<bool, Failure> {
        let mut draft = self.draft(raw.len(), raw)?;
        let mut all = true;
        for entry in entries(raw, incarnation).flatten() {
            let (offset, header, op) = entry;
            let source = (draft.source.0, draft.source.1 + draft.len() as u64 + 64);
            match self.volume.apply(&header, &op, source) {
                Ok(_) => {
                    let len = entry_bytes(header.length as usize).min(raw.len() - offset);
                    draft.entries.push(offset, len);
                    draft.count += 1;
                }
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                Err(Refusal::NeedsPublish) => all = false,
                Err(_) => {}
            }
        }
        if draft.count == 0 && last.0 != 0 {
            return Ok(all);
        }
        self.issue_own(draft, client, last, incarnation, self.env.realtime())?;
        Ok(all)
    }

    /// Emits operations of the service's own, one after the other, as long as they can be done and the turn is not over;
    /// how many.
    pub(in crate::core) fn emit_some(&mut self, ops: Vec<Op<'_>>) -> Result<usize, Failure> {
        let (time, mut done) = (self.env.realtime(), 0);
        let most = ops.len() * (entry_bytes(0) + entry_bytes(joins::NAME_MAX));
        let mut draft = self.draft(most, &[])?;
        self.volume.keep_free(self.kept_free());
        for op in &ops {
            if done > 0 && (self.turn_is_over() || draft.len() + REAP_SLACK / 2 > draft.reserved) {
                break;
            }
            let time = self.time_of(SERVICE, op, time)?;
            let bytes = op.to_entry(Sequence(1), self.view.epoch, 0, time, 0);
            let Ok((header, _)) = storage::format::entry::decode(&bytes, 0) else { break };
            let source = (draft.source.0, draft.source.1 + draft.len() as u64 + 64);
            match self.volume.apply(&header, op, source) {
                Ok(_) => {}
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                Err(Refusal::NeedsPublish) => {
                    self.member.publish_now = true;
                    break;
                }
                Err(_) => break,
            }
            draft.entries.push_made(&bytes);
            draft.count += 1;
            self.mark_dirty(op, draft.seq, ClientId(0));
            self.spend_entry(bytes.len());
            done += 1;
        }
        self.volume.keep_free(0);
        if done == 0 {
            return Ok(0);
        }
        self.issue_own(draft, ClientId(0), Sequence(1), 0, time)?;
        Ok(done)
    }

    /// The time of an operation that is ordered now: a snapshot's says which number and slot it gets, and whoever has inodes of one that is
    /// gone must not find another there. Of clients that write other bytes of a file at once none knows the others' times, and the order in
    /// which their writes come here says nothing: the file's times do not go back.
    fn time_of(&self, client: ClientId, op: &Op<'_>, time: u64) -> Result<u64, Failure> {
        let shares = |ino| {
            let head = self.part.head().filter(|_| !planted(Bug::RangeTimesByOrder));
            head.is_some_and(|head| head.leases.mode(client, ino) == LeaseMode::Joint)
        };
        Ok(match *op {
            Op::Snapshot { .. } => self.volume.snapshot_time(time),
            Op::Write { ino, .. } if shares(ino) => {
                self.volume.attr(ino)?.map_or(time, |record| time.max(record.ctime.nanos()))
            }
            _ => time,
        })
    }

    /// Ends a draft of the service's own.
    fn issue_own(
        &mut self,
        draft: Draft<'_>,
        client: ClientId,
        last_seq: Sequence,
        incarnation: u32,
        time: u64,
    ) -> Result<(), Failure> {
        let (ended, checked) = draft.end_apart();
        let header = ChunkHeader {
            epoch: self.view.epoch,
            stream_seq: ended.seq,
            client,
            last_seq,
            incarnation,
            entries: ended.count,
            body_bytes: checked.len() as u32,
            time,
            ..ChunkHeader::default()
        };
        self.issue(header, checked, ended.reserved)
    }

    fn issue(
        &mut self,
        header: ChunkHeader,
        checked: Checked,
        reserved: usize,
    ) -> Result<(), Failure> {
        if self.part.head().is_none() {
            return Ok(());
        }
        let body = checked.into_chunk(&header, self.view.epoch, self.member.all_acked);
        let Some(kept) = self.keep(&header, &body, reserved)? else {
            return Err(Failure::Diverged(header.stream_seq, "the stream ring is full".into()));
        };
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let next = self.view.chain.get(1).copied();
        let all = head.followed().chain(next);
        all.for_each(|node| self.env.send_chunk(node, body.clone()));
        head.unacked_bytes += u64::from(header.body_bytes);
        self.note_chunk(&header);
        if kept || planted(Bug::SettledUnkept) {
            self.note_kept(&header)?;
        }
        self.applied_chunk(&header);
        self.advance_acks()
    }
}

/// An operation without its payload, for the log.
fn summary(op: &Op<'_>) -> String {
    match *op {
        Op::Write { ino, offset, data, .. } => format!("write {ino} {}+{}", offset, data.len()),
        ref other => {
            let mut text = format!("{other:?}");
            text.truncate(200);
            text
        }
    }
}
