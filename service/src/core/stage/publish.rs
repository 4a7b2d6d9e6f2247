//! Publishing: what is applied is sealed, its copies are made, by hostd, as pieces of work, or, if they are few, here and in slices;
//! and the root is flipped. Copies are made in their order, by one at a time.

use base::planted::{Bug, planted};
use base::{ClientId, Nanos, Sequence, StreamSeq};
use storage::format::sum::{SUM_BYTES, SUMS_A_BLOCK, sum_at};
use storage::limits::BLOCK_BYTES;
use storage::media::{MediaError, Segment};
use storage::volume::{Blocks, CopyItem, Place, Sealed, Summing, back_copies, run_copies};

use crate::core::event::COPIES_MAX;
use crate::core::head::Head;
use crate::core::work::{self, End, Kind, Piece};
use crate::core::{Effect, Failure, Node};

/// A batch of applied chunks is published after this time at the latest.
const PUBLISH_AFTER: Nanos = 5_000_000;
/// hostd, which needs milliseconds, is helped to the processor when it has not answered for so long.
const HELP_AFTER: Nanos = 30_000_000;
/// hostd must answer within this time, or the node copies for itself.
const HOST_TIMEOUT: Nanos = 500_000_000;

/// A sealed transaction on its way to the media.
#[derive(Debug)]
pub(in crate::core) struct Job {
    sealed: Sealed,
    upto: StreamSeq,
    clients: Vec<(ClientId, Sequence)>,
    /// The first of its copies that is not done.
    next: Step,
    hosted: Option<Hosted>,
    /// The copies before the next that are under way as work.
    piece: Option<Piece>,
    /// hostd had some, and did not do them as it should: the rest is done here.
    isolated: bool,
    /// What comes before may have been copied already, in part or in whole.
    again: Step,
    /// How what comes next is summed.
    summing: Option<Summing>,
}

/// A place in a list of copies: the copy, and bytes of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct Step {
    item: usize,
    bytes: u64,
}

/// Copies that hostd makes.
#[derive(Clone, Copy, Debug)]
struct Hosted {
    /// By this number.
    id: u64,
    /// It was asked then.
    asked: Nanos,
    /// It was helped.
    helped: bool,
    /// From where on: order counts, so what it does not do well is done again from here on.
    from: Step,
    /// How that was summed.
    summing: Option<Summing>,
}

impl Job {
    /// Up to where the state is that it publishes.
    pub(in crate::core) const fn upto(&self) -> StreamSeq {
        self.upto
    }

    /// Whether two copy for it.
    pub(in crate::core) const fn is_copied_twice(&self) -> bool {
        self.hosted.is_some() && self.piece.is_some()
    }

    /// The work that is under way, if it has that number, has ended: what has come of it. `None`: it is not under way (any more).
    fn end_piece(&mut self, id: u64) -> Option<Result<(), MediaError>> {
        let piece = self.piece.take_if(|piece| piece.id() == id)?;
        let Some(End::Copied(end)) = piece.take() else {
            // Somebody spoke too early.
            self.piece = Some(piece);
            return None;
        };
        Some(end)
    }

    /// The next copies of so many bytes, and so many of them at most; they count as done.
    fn slice(&mut self, bytes: u64, most: usize) -> Vec<CopyItem> {
        let (mut items, mut left) = (Vec::new(), bytes);
        let mut again = self.next < self.again;
        if let Some(summing) = self.summing {
            items.push(CopyItem::Summing(Summing { again: again || summing.again, ..summing }));
        }
        // (Each may come with a word of how it is summed.)
        while left > 0
            && items.len() + 2 <= most
            && let Some(item) = self.sealed.copies.get(self.next.item)
        {
            if let CopyItem::Summing(summing) = item {
                self.summing = Some(*summing);
            }
            if (again && self.next >= self.again) || matches!(item, CopyItem::Summing(_)) {
                again = self.next < self.again;
                let with = |s: Summing| Summing { again: again || s.again, ..s };
                items.extend(self.summing.map(with).map(CopyItem::Summing));
            }
            if matches!(item, CopyItem::Summing(_)) {
                self.next = Step { item: self.next.item + 1, bytes: 0 };
                continue;
            }
            let part = item.part(self.next.bytes, left);
            let len = part.bytes();
            self.next.bytes += len;
            // (Many small ones cost more than their bytes.)
            left = left.saturating_sub(len.max(256));
            if self.next.bytes >= item.bytes() {
                self.next = Step { item: self.next.item + 1, bytes: 0 };
            }
            items.push(part);
        }
        items
    }

    /// Bytes that are not copied yet, up to `most`.
    fn left(&self, most: u64) -> u64 {
        let items = self.sealed.copies.iter().skip(self.next.item);
        let mut left = 0u64;
        for item in items {
            left += item.bytes();
            if left >= most + self.next.bytes {
                return most;
            }
        }
        left.saturating_sub(self.next.bytes)
    }

    /// What hostd was not asked for in the end is done here: nobody has begun it.
    fn undo(&mut self, hosted: Hosted) {
        if planted(Bug::UnaskedAgain) {
            self.again = self.again.max(self.next);
        }
        (self.next, self.summing, self.isolated) = (hosted.from, hosted.summing, true);
    }

    /// What hostd was asked for is done here, from the beginning: it may have done some of it.
    fn redo(&mut self, hosted: Hosted) {
        if !planted(Bug::HostedCompared) {
            self.again = self.again.max(self.next);
        }
        (self.next, self.summing, self.isolated) = (hosted.from, hosted.summing, true);
    }

    fn is_copied(&self) -> bool {
        self.next.item >= self.sealed.copies.len()
    }
}

impl Node {
    /// Whether the applied chunks should be published now.
    fn publish_due(&self) -> bool {
        if self.member.applied == self.member.published {
            return false;
        }
        self.member.publish_now
            || self.batch_due().is_some_and(|due| self.env.now >= due)
            || self.member.batch_bytes >= self.env.config.limits.publish_bytes
            || self.volume.wants_publish()
            || !self.ring.has_room()
    }

    /// Whether the next slice begins to publish.
    pub(in crate::core) fn publishes_at_once(&self) -> bool {
        self.member.job.is_none() && self.publish_due()
    }

    /// When what has been applied has waited for long enough. (What was in the stream may have been cut off meanwhile: then nothing waits.)
    fn batch_due(&self) -> Option<Nanos> {
        let waits = self.member.applied != self.member.published;
        self.member.batch_since.filter(|_| waits).map(|since| since + PUBLISH_AFTER)
    }

    /// When there is something to publish, if nothing comes before.
    pub(in crate::core) fn publish_deadline(&self) -> Option<Nanos> {
        match &self.member.job {
            // Looking earlier would find the same: hostd copies.
            Some(job) => {
                let after = |h: Hosted| if h.helped { HOST_TIMEOUT } else { HELP_AFTER };
                job.hosted.map(|h| h.asked + after(h))
            }
            None => self.batch_due(),
        }
    }

    fn seal(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        let clients: Vec<(ClientId, Sequence)> =
            std::mem::take(&mut self.member.batch).into_iter().collect();
        let sealed = self.volume.seal(upto, self.view.epoch, &clients)?;
        (self.member.batch_bytes, self.member.batch_since, self.member.publish_now) =
            (0, None, false);
        let (next, again, hosted, summing) = (Step::default(), Step::default(), None, None);
        let (piece, isolated) = (None, false);
        self.member.job =
            Some(Job { sealed, upto, clients, next, hosted, piece, isolated, again, summing });
        Ok(())
    }

    /// One step of publishing; `true` when there is more to do at once.
    pub(in crate::core) fn publish_step(&mut self) -> Result<bool, Failure> {
        if self.member.job.is_none() {
            if !self.publish_due() {
                return Ok(false);
            }
            self.seal(self.member.applied)?;
        }
        if self.waits_for_ring() || self.waits_for_host()? || self.waits_for_work() {
            return Ok(false);
        }
        let Some(job) = &mut self.member.job else { return Ok(false) };
        let items = job.slice(self.env.config.limits.slice_bytes, usize::MAX);
        back_copies(&*self.env.media, &items)?;
        run_copies(&*self.env.media, &items)?;
        self.env.counters.copied_bytes += items.iter().map(CopyItem::bytes).sum::<u64>();
        if !job.is_copied() {
            return Ok(true);
        }
        self.finish_job()?;
        Ok(self.publish_due())
    }

    /// Whether what is to be published is not in the ring yet: copies would take what lies there, and a root that is flipped says
    /// that it is there.
    fn waits_for_ring(&self) -> bool {
        let upto = self.member.job.as_ref().map_or(StreamSeq(0), Job::upto);
        self.ring.kept_to() < upto && !planted(Bug::PublishedUnkept)
    }

    /// Whether hostd copies; it is asked for the next piece if it is worth its while.
    fn waits_for_host(&mut self) -> Result<bool, Failure> {
        let limits = &self.env.config.limits;
        let Some(job) = self.member.job.as_mut().filter(|job| job.piece.is_none()) else {
            return Ok(false);
        };
        let Some(hosted) = &mut job.hosted else {
            let begins = job.next == Step::default();
            if self.member.host.is_none()
                || job.isolated
                || job.left(limits.host_min) < limits.host_min
            {
                self.env.counters.isolated_copies += u64::from(begins);
                return Ok(false);
            }
            self.env.counters.host_copies += u64::from(begins);
            self.member.next_job += 1;
            let (id, from, summing) = (self.member.next_job, job.next, job.summing);
            job.hosted = Some(Hosted { id, asked: self.env.now, helped: false, from, summing });
            let items = job.slice(limits.host_bytes, COPIES_MAX);
            back_copies(&*self.env.media, &items)?;
            self.env.counters.hosted_bytes += items.iter().map(CopyItem::bytes).sum::<u64>();
            self.env.out.push(Effect::Copies { id, items });
            return Ok(true);
        };
        if self.env.now >= hosted.asked + HELP_AFTER && !hosted.helped {
            hosted.helped = true;
            self.member.host.iter().for_each(|host| host.help(hosted.id));
        }
        if self.env.now < hosted.asked + HOST_TIMEOUT {
            return Ok(true);
        }
        // Isolated mode: hostd does not answer.
        self.end_host_copies()?;
        Ok(false)
    }

    /// Whether somebody else than this thread copies; he is asked for the next piece if there is much to copy.
    fn waits_for_work(&mut self) -> bool {
        let limits = &self.env.config.limits;
        let Some(job) = &mut self.member.job else { return false };
        if job.piece.is_some() {
            return !planted(Bug::PublishedUncopied);
        }
        // (The least that is too much.)
        let long = (limits.inline_bytes as u64).saturating_add(1);
        if long == u64::MAX || job.left(long) < long {
            return false;
        }
        // (Not less than is done here at a time.)
        let most = limits.slice_bytes.max(limits.piece_bytes as u64);
        let items = job.slice(most, COPIES_MAX);
        let bytes = items.iter().map(CopyItem::bytes).sum::<u64>();
        self.env.counters.copied_bytes += bytes;
        self.env.pieces += 1;
        let work = work::Job::Publish(items);
        let piece = Piece::new(self.env.pieces, Kind::Publish, bytes as usize, work);
        job.piece = Some(piece.clone());
        self.env.out.push(Effect::Work(piece));
        true
    }

    /// A piece of work has ended; `false`: none of these.
    pub(in crate::core) fn work_copied(&mut self, id: u64) -> Result<bool, Failure> {
        let Some(job) = &mut self.member.job else { return Ok(false) };
        let Some(end) = job.end_piece(id) else { return Ok(false) };
        end?;
        if job.is_copied() {
            self.finish_job()?;
        }
        Ok(true)
    }

    /// What others copy for the job under way is copied when this returns, or is left to do here.
    fn end_copies(&mut self) -> Result<(), Failure> {
        self.end_host_copies()?;
        let Some(job) = &mut self.member.job else { return Ok(()) };
        let Some(piece) = job.piece.clone().filter(|_| !planted(Bug::CopiesOutlive)) else {
            return Ok(());
        };
        piece.settle(&*self.env.media);
        job.end_piece(piece.id()).transpose()?;
        Ok(())
    }

    /// hostd ran the copies.
    pub(in crate::core) fn copies_done(&mut self, id: u64, bad: &[u32]) -> Result<(), Failure> {
        let Some(job) = &mut self.member.job else { return Ok(()) };
        let Some(hosted) = job.hosted.take_if(|hosted| hosted.id == id) else { return Ok(()) };
        if !bad.is_empty() && !planted(Bug::BadCopiesIgnored) {
            job.redo(hosted);
        }
        if job.is_copied() { self.finish_job() } else { Ok(()) }
    }

    /// hostd does not get to know of the copies that it was to be asked for.
    pub(in crate::core) fn copies_unasked(&mut self, id: u64) {
        if let Some(job) = &mut self.member.job
            && let Some(hosted) = job.hosted.take_if(|hosted| hosted.id == id)
        {
            job.undo(hosted);
        }
    }

    pub(in crate::core) fn host_down(&mut self) {
        self.member.host = None;
        if let Some(job) = &mut self.member.job
            && let Some(hosted) = job.hosted.take()
        {
            job.redo(hosted);
        }
    }

    /// Whether copies that are under way write to the block.
    pub(in crate::core) fn is_being_copied(&self, place: &Place) -> bool {
        let (arena, from) = (Segment::Arena(place.arena), place.block * BLOCK_BYTES);
        let hits = |item: &CopyItem| match *item {
            CopyItem::Copy { to, len, .. } | CopyItem::Zero { to, len } => {
                to.0 == arena && to.1 < from + BLOCK_BYTES && from < to.1 + len
            }
            _ => false,
        };
        self.member.job.as_ref().is_some_and(|job| job.sealed.copies.iter().any(hits))
    }

    /// Ends hostd's part of the job under way, now: it must not copy beside this node, nor after
    /// it, when what it reads and writes is something else. What it has not done is done here.
    fn end_host_copies(&mut self) -> Result<(), Failure> {
        let Some(hosted) = self.member.job.as_mut().and_then(|job| job.hosted.take()) else {
            return Ok(());
        };
        let asks = |e: &Effect| matches!(e, Effect::Copies { id, .. } if *id == hosted.id);
        if let Some(at) = self.env.out.iter().position(asks) {
            // In this very turn: nobody has heard of it.
            self.env.out.remove(at);
            self.member.job.iter_mut().for_each(|job| job.undo(hosted));
            return Ok(());
        }
        let done = match self.member.host.clone().filter(|_| !planted(Bug::LateCopies)) {
            None => false,
            Some(host) => {
                self.env.counters.settled_copies += 1;
                host.settle(hosted.id).map_err(Failure::Host)?
            }
        };
        if let Some(job) = self.member.job.as_mut().filter(|_| !done) {
            job.redo(hosted);
        }
        Ok(())
    }

    /// Publishes the job under way, if there is one, at once.
    pub(in crate::core) fn settle_job(&mut self) -> Result<(), Failure> {
        self.end_copies()?;
        if self.waits_for_ring() {
            self.settle_ring()?;
        }
        let Some(job) = &mut self.member.job else { return Ok(()) };
        let items = job.slice(u64::MAX, usize::MAX);
        back_copies(&*self.env.media, &items)?;
        run_copies(&*self.env.media, &items)?;
        self.finish_job()
    }

    /// Forgets the job under way: the volume it belongs to goes.
    pub(in crate::core) fn drop_job(&mut self) -> Result<(), Failure> {
        self.end_copies()?;
        self.member.job = None;
        Ok(())
    }

    fn finish_job(&mut self) -> Result<(), Failure> {
        let Some(job) = self.member.job.take() else { return Ok(()) };
        if !planted(Bug::NumberAgain) {
            let kept = match planted(Bug::MadeUnkept) {
                true => self.ring.last(),
                false => self.ring.kept_to(),
            };
            let mut clients = self.agent.clients.values_mut();
            clients.try_for_each(|client| client.write_made(kept))?;
        }
        let freed = self.volume.publish(job.sealed)?;
        self.env.counters.publishes += 1;
        self.member.published = job.upto;
        self.note_published()?;
        for (id, seq) in job.clients {
            if let Some(client) = self.agent.clients.get_mut(&id) {
                // The chunk that makes everybody forget a client (sequence 0) comes after all that
                // it wrote, which may be in the same batch.
                client.set_published(if seq.0 == 0 { client.settled } else { seq })?;
            }
        }
        self.member.discards.extend(freed);
        self.give_up()?;
        self.remove_finished_clients()
    }

    /// Takes out of the arenas some of what was freed, as far as nobody has taken it since: who has mapped an arena
    /// shall not read for long what was in a file that is gone. Long runs go back to the medium, others are
    /// cleared. `true` when there is more.
    pub(in crate::core) fn discard_step(&mut self) -> Result<bool, Failure> {
        let limits = self.env.config.limits;
        let long = (limits.discard_min / BLOCK_BYTES).max(1);
        let (mut left, mut clear) = (limits.discard_max / BLOCK_BYTES, limits.slice_bytes);
        while left > 0
            && clear > 0
            && let Some(blocks) = self.member.discards.pop_front()
        {
            let now = Blocks { len: blocks.len.min(left), ..blocks };
            left -= now.len;
            let free = match planted(Bug::TakenDiscarded) {
                true => vec![now],
                false => self.volume.still_free(now),
            };
            for free in free {
                let (at, bytes) = (free.block * BLOCK_BYTES, free.len * BLOCK_BYTES);
                let arena = Segment::Arena(free.arena);
                if free.len >= long {
                    self.discard_blocks(&free)?;
                } else if !planted(Bug::FreedUncleared) {
                    self.clear(arena, at, bytes)?;
                    clear = clear.saturating_sub(bytes);
                }
            }
            if now.len < blocks.len {
                let (block, len) = (blocks.block + now.len, blocks.len - now.len);
                self.member.discards.push_front(Blocks { block, len, ..blocks });
            }
        }
        Ok(!self.member.discards.is_empty())
    }

    /// Gives free blocks back to the medium.
    pub(in crate::core) fn discard_blocks(&self, free: &Blocks) -> Result<(), Failure> {
        let (at, bytes) = (free.block * BLOCK_BYTES, free.len * BLOCK_BYTES);
        self.env.media.discard(Segment::Arena(free.arena), at, bytes)?;
        self.discard_sums(free)
    }

    /// The checksums of so many free blocks that they fill pages of their own.
    fn discard_sums(&self, free: &Blocks) -> Result<(), Failure> {
        let Some(base) = self.volume.sums_base() else { return Ok(()) };
        let first = free.block.next_multiple_of(SUMS_A_BLOCK);
        let last = (free.block + free.len) / SUMS_A_BLOCK * SUMS_A_BLOCK;
        if first < last {
            let (at, bytes) = (sum_at(base, first), (last - first) * SUM_BYTES);
            self.env.media.discard(Segment::Arena(free.arena), at, bytes)?;
        }
        Ok(())
    }

    fn clear(&self, arena: Segment, at: u64, bytes: u64) -> Result<(), Failure> {
        const ZEROES: &[u8] = &[0; 16 * BLOCK_BYTES as usize];
        for from in (0..bytes).step_by(ZEROES.len()) {
            let len = (bytes - from).min(ZEROES.len() as u64) as usize;
            self.env.media.write(arena, at + from, &ZEROES[..len])?;
        }
        Ok(())
    }

    /// Chunks that nobody needs any more leave the ring; their inodes are clean.
    pub(in crate::core) fn give_up(&mut self) -> Result<(), Failure> {
        let hold = self.part.head().and_then(|head| match planted(Bug::RestReleased) {
            true => head.snapshots.values().map(|going| going.start.seq).min(),
            false => head.held().min(),
        });
        let mut done = self.member.published.min(self.member.all_acked);
        let mut step = self.env.config.limits.release_step;
        if planted(Bug::PublishedTooFar) {
            (done, step) = (self.member.all_acked, 1);
        }
        self.member.dirty.retain(|_, at| at.0 > done);
        let keep = hold.map_or(done, |h| h.min(done));
        // Somebody is away, and may come back for what it has missed.
        if self.view.chain.len() < self.view.wanted && self.ring.is_roomy() {
            return Ok(());
        }
        // In larger steps: each costs a persisted record.
        if keep.0 >= self.ring.oldest().0 + step || !self.ring.has_room() {
            self.ring.release(keep)?;
        }
        if keep < done
            && !self.ring.has_room()
            && self.part.head_mut().is_some_and(Head::leave_behind)
        {
            let hold = self.part.head().and_then(|head| head.held().min());
            self.ring.release(hold.map_or(done, |hold| hold.min(done)))?;
        }
        Ok(())
    }

    /// Publishes everything that is applied, at once.
    pub(in crate::core) fn publish_all(&mut self) -> Result<(), Failure> {
        self.publish_through(self.member.applied)
    }

    fn publish_through(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        loop {
            self.settle_job()?;
            if self.member.published >= upto {
                return Ok(());
            }
            self.seal(upto)?;
        }
    }

    /// Publishes the working state as that of `upto`, also if it holds a part of the next chunk.
    pub(in crate::core) fn publish_working(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        self.publish_through(upto)?;
        self.seal(upto)?;
        self.settle_job()
    }
}
