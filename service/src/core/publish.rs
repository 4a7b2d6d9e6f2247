//! Publishing: what is applied is sealed, its copies are made, by hostd or here and in slices, and the root is flipped.

use base::planted::{Bug, planted};
use base::{ClientId, Nanos, Sequence, StreamSeq};
use storage::limits::BLOCK_BYTES;
use storage::media::Segment;
use storage::volume::{Blocks, CopyItem, Sealed, back_copies, run_copies};

use super::client::Client;
use super::{Effect, Failure, Node};

/// A batch of applied chunks is published after this time at the latest.
const PUBLISH_AFTER: Nanos = 5_000_000;
/// hostd, which needs milliseconds, is helped to the processor when it has not answered for so long.
const HELP_AFTER: Nanos = 30_000_000;
/// hostd must answer within this time, or the node copies for itself.
const HOST_TIMEOUT: Nanos = 500_000_000;

/// A sealed transaction on its way to the media.
#[derive(Debug)]
pub(super) struct Job {
    sealed: Sealed,
    upto: StreamSeq,
    clients: Vec<(ClientId, Sequence)>,
    /// The first of its copies that is not done.
    next: Place,
    hosted: Option<Hosted>,
    /// hostd had some, and did not do them as it should: the rest is done here.
    isolated: bool,
}

/// A place in a list of copies: the copy, and bytes of it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Place {
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
    from: Place,
}

fn copy_len(item: &CopyItem) -> u64 {
    match *item {
        CopyItem::Copy { len, .. } | CopyItem::Zero { len, .. } => len,
    }
}

/// At most `most` bytes of a copy, from `at` on.
fn part_of(item: &CopyItem, at: u64, most: u64) -> CopyItem {
    let len = copy_len(item).saturating_sub(at).min(most);
    match *item {
        CopyItem::Copy { from, to, .. } => {
            CopyItem::Copy { from: (from.0, from.1 + at), to: (to.0, to.1 + at), len }
        }
        CopyItem::Zero { to, .. } => CopyItem::Zero { to: (to.0, to.1 + at), len },
    }
}

impl Job {
    /// The next copies of so many bytes; they count as done.
    fn slice(&mut self, bytes: u64) -> Vec<CopyItem> {
        let (mut items, mut left) = (Vec::new(), bytes);
        while left > 0
            && let Some(item) = self.sealed.copies.get(self.next.item)
        {
            let part = part_of(item, self.next.bytes, left);
            let len = copy_len(&part);
            self.next.bytes += len;
            // (Many small ones cost more than their bytes.)
            left = left.saturating_sub(len.max(256));
            if self.next.bytes >= copy_len(item) {
                self.next = Place { item: self.next.item + 1, bytes: 0 };
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
            left += copy_len(item);
            if left >= most + self.next.bytes {
                return most;
            }
        }
        left.saturating_sub(self.next.bytes)
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
        let waited = self.member.batch_since.is_some_and(|t| self.now >= t + PUBLISH_AFTER);
        self.member.publish_now
            || waited
            || self.member.batch_bytes >= self.config.limits.publish_bytes
            || self.volume.wants_publish()
            || !self.ring.has_room()
    }

    /// Whether the next slice begins to publish.
    pub(super) fn publishes_at_once(&self) -> bool {
        self.member.job.is_none() && self.publish_due()
    }

    /// When there is something to publish, if nothing comes before.
    pub(super) fn publish_deadline(&self) -> Option<Nanos> {
        match &self.member.job {
            // Looking earlier would find the same: hostd copies.
            Some(job) => {
                let after = |h: Hosted| if h.helped { HOST_TIMEOUT } else { HELP_AFTER };
                job.hosted.map(|h| h.asked + after(h))
            }
            None => self.member.batch_since.map(|t| t + PUBLISH_AFTER),
        }
    }

    fn seal(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        let clients: Vec<(ClientId, Sequence)> =
            std::mem::take(&mut self.member.batch).into_iter().collect();
        let sealed = self.volume.seal(upto, self.epoch, &clients)?;
        (self.member.batch_bytes, self.member.batch_since, self.member.publish_now) =
            (0, None, false);
        let (next, hosted, isolated) = (Place::default(), None, false);
        self.member.job = Some(Job { sealed, upto, clients, next, hosted, isolated });
        Ok(())
    }

    /// One step of publishing; `true` when there is more to do at once.
    pub(super) fn publish_step(&mut self, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        if self.member.job.is_none() {
            if !self.publish_due() {
                return Ok(false);
            }
            self.seal(self.member.applied)?;
        }
        if self.waits_for_host(out)? {
            return Ok(false);
        }
        let Some(job) = &mut self.member.job else { return Ok(false) };
        let items = job.slice(self.config.limits.slice_bytes);
        back_copies(&*self.media, &items)?;
        run_copies(&*self.media, &items)?;
        self.counters.copied_bytes += items.iter().map(copy_len).sum::<u64>();
        if !job.is_copied() {
            return Ok(true);
        }
        self.finish_job()?;
        Ok(self.publish_due())
    }

    /// Whether hostd copies; it is asked for the next piece if it is worth its while.
    fn waits_for_host(&mut self, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        let limits = &self.config.limits;
        let Some(job) = &mut self.member.job else { return Ok(false) };
        let Some(hosted) = &mut job.hosted else {
            let begins = job.next == Place::default();
            if self.member.host.is_none()
                || job.isolated
                || job.left(limits.host_min) < limits.host_min
            {
                self.counters.isolated_copies += u64::from(begins);
                return Ok(false);
            }
            self.counters.host_copies += u64::from(begins);
            self.member.next_job += 1;
            let (id, from) = (self.member.next_job, job.next);
            job.hosted = Some(Hosted { id, asked: self.now, helped: false, from });
            let items = job.slice(limits.host_bytes);
            back_copies(&*self.media, &items)?;
            out.push(Effect::Copies { id, items });
            return Ok(true);
        };
        if self.now >= hosted.asked + HELP_AFTER && !hosted.helped {
            hosted.helped = true;
            self.member.host.iter().for_each(|host| host.help(hosted.id));
        }
        if self.now < hosted.asked + HOST_TIMEOUT {
            return Ok(true);
        }
        // Isolated mode: hostd does not answer.
        self.end_host_copies()?;
        Ok(false)
    }

    /// hostd ran the copies.
    pub(super) fn copies_done(&mut self, id: u64, bad: &[u32]) -> Result<(), Failure> {
        let Some(job) = &mut self.member.job else { return Ok(()) };
        let Some(hosted) = job.hosted.take_if(|hosted| hosted.id == id) else { return Ok(()) };
        if !bad.is_empty() && !planted(Bug::BadCopiesIgnored) {
            (job.next, job.isolated) = (hosted.from, true);
        }
        if job.is_copied() { self.finish_job() } else { Ok(()) }
    }

    pub(super) fn host_down(&mut self) {
        self.member.host = None;
        if let Some(job) = &mut self.member.job
            && let Some(hosted) = job.hosted.take()
        {
            (job.next, job.isolated) = (hosted.from, true);
        }
    }

    /// Ends hostd's part of the job under way, now: it must not copy beside this node, nor after
    /// it, when what it reads and writes is something else. What it has not done is done here.
    fn end_host_copies(&mut self) -> Result<(), Failure> {
        let Some(hosted) = self.member.job.as_mut().and_then(|job| job.hosted.take()) else {
            return Ok(());
        };
        let done = match self.member.host.clone().filter(|_| !planted(Bug::LateCopies)) {
            None => false,
            Some(host) => {
                self.counters.settled_copies += 1;
                host.settle(hosted.id).map_err(Failure::Host)?
            }
        };
        if let Some(job) = self.member.job.as_mut().filter(|_| !done) {
            (job.next, job.isolated) = (hosted.from, true);
        }
        Ok(())
    }

    /// Publishes the job under way, if there is one, at once.
    pub(super) fn settle_job(&mut self) -> Result<(), Failure> {
        self.end_host_copies()?;
        let Some(job) = &mut self.member.job else { return Ok(()) };
        let items = job.slice(u64::MAX);
        back_copies(&*self.media, &items)?;
        run_copies(&*self.media, &items)?;
        self.finish_job()
    }

    /// Forgets the job under way: the volume it belongs to goes.
    pub(super) fn drop_job(&mut self) -> Result<(), Failure> {
        self.end_host_copies()?;
        self.member.job = None;
        Ok(())
    }

    fn finish_job(&mut self) -> Result<(), Failure> {
        let Some(job) = self.member.job.take() else { return Ok(()) };
        if !planted(Bug::NumberAgain) {
            self.agent.clients.values_mut().try_for_each(Client::write_made)?;
        }
        let freed = self.volume.publish(job.sealed)?;
        self.counters.publishes += 1;
        self.member.published = job.upto;
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
    pub(super) fn discard_step(&mut self) -> Result<bool, Failure> {
        let limits = self.config.limits;
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
                    self.media.discard(arena, at, bytes)?;
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

    fn clear(&self, arena: Segment, at: u64, bytes: u64) -> Result<(), Failure> {
        const ZEROES: &[u8] = &[0; 16 * BLOCK_BYTES as usize];
        for from in (0..bytes).step_by(ZEROES.len()) {
            let len = (bytes - from).min(ZEROES.len() as u64) as usize;
            self.media.write(arena, at + from, &ZEROES[..len])?;
        }
        Ok(())
    }

    /// Chunks that nobody needs any more leave the ring; their inodes are clean.
    pub(super) fn give_up(&mut self) -> Result<(), Failure> {
        let hold = self.head.snapshots.values().map(|s| StreamSeq(s.seq.0)).min();
        let mut done = self.member.published.min(self.member.all_acked);
        let mut step = self.config.limits.release_step;
        if planted(Bug::PublishedTooFar) {
            (done, step) = (self.member.all_acked, 1);
        }
        self.member.dirty.retain(|_, at| at.0 > done);
        let keep = hold.map_or(done, |h| h.min(done));
        // Somebody is away, and may come back for what it has missed.
        if self.chain.len() < self.wanted && self.ring.is_roomy() {
            return Ok(());
        }
        // In larger steps: each costs a persisted record.
        if keep.0 >= self.ring.oldest().0 + step || !self.ring.has_room() {
            self.ring.release(keep)?;
        }
        Ok(())
    }

    /// Publishes everything that is applied, at once.
    pub(super) fn publish_all(&mut self) -> Result<(), Failure> {
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
    pub(super) fn publish_working(&mut self, upto: StreamSeq) -> Result<(), Failure> {
        self.publish_through(upto)?;
        self.seal(upto)?;
        self.settle_job()
    }
}
