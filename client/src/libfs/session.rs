//! An attachment to the local node: the log segment, its log, the request slots, and the arenas mapped so far.
//! When the service ends or expels the client, a new session replaces it.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};

use base::planted::{Bug, planted};
use base::{Errno, InodeId, Sequence};
use storage::format::control;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Granted, Request};

use super::host::{Arena, Host, Memory};
use super::limits::{Config, Limits};
use super::log::{Log, Place};
use super::proofs::Proofs;
use super::requests::{self, Seen, Slots};
use super::segment::Segment;
use super::sync::{RwLock, Word};
use crate::fs::Result;

/// Looks at slots whose answers nobody waits for before sleeping.
const SLOT_YIELDS: u32 = 100;

/// Bits of a sequence or a number of refusals in a mark.
const MARK_BITS: u32 = 44;

/// Numbers of refusals that are remembered.
const JUDGED_MAX: usize = 32;

/// A live attachment.
#[derive(Debug)]
pub struct Session<H: Host> {
    /// Tells sessions of one process apart.
    pub number: u64,
    /// The control area.
    pub segment: Segment<H>,
    /// The log.
    pub log: Log<H>,
    slots: Slots<H>,
    arenas: RwLock<BTreeMap<u32, Arena<H>>, H>,
    /// Its memory is shared with nobody any more.
    parted: AtomicBool,
    /// What the service has to say of what is open was not waited for.
    pub unheard: AtomicBool,
    /// The session that this one replaces.
    pub previous: Option<&'static Session<H>>,
    /// Inode numbers at hand, each pre-leased.
    pub fresh: RwLock<Vec<(InodeId, Granted)>, H>,
    /// Held by the thread that asks for more of them: how many it has asked for the last time.
    pub fetching: RwLock<u32, H>,
    /// Held by the thread that does what counts only if it is taken.
    pub joint: RwLock<(), H>,
    /// The last own operation on an inode that the cache has forgotten since. What the service says
    /// of an inode that is not in the cache counts only if it reflects this.
    pub evicted: Word<H>,
    /// Slots of leases that are to be given back.
    released: RwLock<Vec<u32>, H>,
    /// Of numbers of refusals, how far was judged while it was that many.
    judged: RwLock<Vec<(u64, u64)>, H>,
    /// What the service showed; they outlive the session.
    proofs: Arc<Proofs<H>>,
    limits: Limits,
    /// Who the service knows us as, whatever the process has become since.
    user: u32,
}

impl<H: Host> Session<H> {
    /// Connects to hostd and maps what it hands out.
    pub fn attach(config: &Config, number: u64, proofs: Arc<Proofs<H>>) -> Result<Self> {
        let user = H::euid();
        let segment = Segment::<H>::attach(config)?;
        let arenas = RwLock::new(BTreeMap::new());
        arenas.write().spread();
        Ok(Self {
            number,
            log: Log::new(segment.descriptor),
            slots: Slots::new(config.limits.requests),
            segment,
            arenas,
            parted: AtomicBool::new(false),
            unheard: AtomicBool::new(false),
            previous: None,
            fresh: RwLock::new(Vec::new()),
            fetching: RwLock::new(0),
            joint: RwLock::new(()),
            evicted: Word::new(0),
            released: RwLock::new(Vec::new()),
            judged: RwLock::new(Vec::new()),
            proofs,
            limits: config.limits,
            user,
        })
    }

    /// Whether the service knows us as the super-user.
    pub const fn is_super_user(&self) -> bool {
        self.user == 0
    }

    /// As whom it knows us.
    pub const fn user(&self) -> u32 {
        self.user
    }

    /// Remembers what came with an inode's attributes; the super-user needs none. Who has given up that right since
    /// begins the next session as somebody who does.
    pub fn remember_proof(&self, ino: InodeId, proof: Proof) {
        if !self.is_super_user() {
            self.proofs.put(ino, proof);
        } else if H::euid() != 0 {
            self.proofs.vouch(ino, proof);
        }
    }

    /// How many of this client's entries the service has refused.
    #[inline]
    pub fn refusals(&self) -> u64 {
        self.segment.word(control::REFUSALS)
    }

    /// The same; and notes how far it has judged, since what it refuses from here on lies behind that.
    pub fn note_refusals(&self) -> u64 {
        // In this order: it counts a refusal before it says that the entry is judged.
        let upto = self.segment.word(control::SETTLED);
        let count = self.refusals();
        let mut judged = self.judged.write();
        match judged.last_mut() {
            Some((known, before)) if *known == count => *before = upto.max(*before),
            _ => {
                if judged.len() == JUDGED_MAX {
                    judged.remove(0);
                }
                judged.push((count, upto));
            }
        }
        count
    }

    /// None of the entries up to here is among those refused after the first `count`.
    pub fn judged_after(&self, count: u64) -> u64 {
        let judged = self.judged.read();
        judged.iter().filter(|(known, _)| *known == count).map(|(_, upto)| *upto).max().unwrap_or(0)
    }

    /// Whether none of these operations, which are judged, is among those refused after the first `count`.
    pub fn others(&self, count: u64, (first, last): (Sequence, Sequence)) -> bool {
        let refused = self.segment.word(control::REFUSED_SEQ);
        // In this order: the service says which one it refuses, counts it, and then says that it is judged.
        let counted = self.segment.word(control::SETTLED) >= refused;
        let alone = self.refusals() == count + 1;
        refused < first.0 || refused > last.0 && counted && alone
    }

    /// A number of this session, to be remembered where it may be compared in another one: sessions count anew.
    #[inline]
    pub fn mark(&self, number: u64) -> u64 {
        let session = if planted(Bug::RefusalsKept) { 0 } else { self.number };
        session << MARK_BITS | number & ((1 << MARK_BITS) - 1)
    }

    /// The number that is remembered so; 0 if it is of another session.
    #[inline]
    pub fn marked(&self, mark: u64) -> u64 {
        if mark ^ self.mark(mark) == 0 { mark & ((1 << MARK_BITS) - 1) } else { 0 }
    }

    /// Why it refused the last one.
    pub fn refusal(&self) -> Errno {
        match self.segment.word(control::REFUSED_ERRNO) as u16 {
            // The head that knew is gone.
            0 => Errno::IO,
            errno => Errno(errno),
        }
    }

    /// The session is over, and was so before another one that is over as well: what it was told last is kept, and its log and the
    /// arenas, which are as large as they are, go. Threads may still be inside.
    pub fn part(&self) {
        let sealed = self.segment.word(control::SEALED_AT) != control::SEAL_PENDING;
        if self.segment.attached() || !sealed || self.parted.swap(true, Ordering::AcqRel) {
            return;
        }
        self.arenas.write().clear();
        if self.log.part() {
            self.segment.memory.part(control::RPC);
            self.segment.shut();
        } else {
            // The next time.
            self.parted.store(false, Ordering::Release);
        }
    }

    /// Whether the bytes of a log entry certainly lie there still.
    #[inline]
    pub fn is_intact(&self, place: &Place) -> bool {
        self.log.is_intact(place)
    }

    /// Whether operations of session `number` up to `last`, which had returned, may be lost with
    /// it: not all of them had reached every member when it ended. The words of a session are never
    /// unmapped, so they can still be read.
    pub fn lost_with(&self, number: u64, last: Sequence) -> bool {
        let mut at = Some(self);
        while let Some(session) = at {
            if session.number == number {
                return last.0 > session.segment.word(control::REPLICATED);
            }
            at = session.previous;
        }
        true
    }

    /// Promises space for a write that may need so many blocks; `false`: there is none, and what the service says
    /// of the write must be waited for.
    #[inline]
    pub fn promise(&self, blocks: u64) -> bool {
        if blocks == 0 {
            return true;
        }
        let memory = &self.segment.memory;
        let promised = memory.add(control::PROMISED, blocks).wrapping_add(blocks);
        // After the addition: the service looks at that once more when it has taken room back.
        if promised <= memory.load(control::ROOM, Ordering::SeqCst) {
            return true;
        }
        self.promise_less(blocks);
        false
    }

    /// Takes a promise back.
    #[cold]
    pub fn promise_less(&self, blocks: u64) {
        self.segment.memory.add(control::PROMISED, blocks.wrapping_neg());
    }

    /// Up to there, what this client did is persistent on every member.
    pub fn replicated(&self) -> Sequence {
        Sequence(self.segment.word(control::REPLICATED))
    }

    /// The highest sequence handed out.
    pub fn last(&self) -> Sequence {
        self.log.last()
    }

    /// What an answer about an inode must reflect: `last` is the last own operation on it in this
    /// session, as far as the cache knows.
    pub fn known_after(&self, last: Sequence) -> Sequence {
        Sequence(self.evicted.load(Ordering::Acquire)).max(last)
    }

    /// Waits until the service reclaims some log space.
    pub fn wait_for_space(&self, lane: u8, before: u64) -> Result<()> {
        self.segment.ring(true);
        self.segment.wait_until(|| self.segment.word(control::reclaim(lane.into())) != before)
    }

    /// Waits until everything up to `sequence` is persistent on every member of the chain.
    pub fn sync(&self, sequence: Sequence) -> Result<()> {
        if !self.begin_sync(sequence) {
            return Ok(());
        }
        self.segment.wait_until(|| self.segment.word(control::REPLICATED) >= sequence.0)
    }

    /// Has the service see to that, without waiting for it; false if it is so already.
    pub fn begin_sync(&self, sequence: Sequence) -> bool {
        if self.segment.word(control::REPLICATED) >= sequence.0 {
            return false;
        }
        self.segment.memory.raise(control::LAST_SEQUENCE, self.last().0);
        self.segment.memory.raise(control::SYNC_REQUEST, sequence.0);
        self.segment.ring(true);
        true
    }

    /// Asks the service; the reply's body (after its status) lies in `out`, from byte 8 on.
    /// `Err(STALE)` means that the session ended.
    pub fn call(&self, request: &Request<'_>, after: Sequence, out: &mut Vec<u8>) -> Result<()> {
        let memory = &self.segment.memory;
        let slot = self.take_slot()?;
        out.clear();
        let proof = request.names().map_or(Proof::NONE, |ino| self.proofs.get(ino));
        request.encode_shown(after, proof, out);
        self.announce(after);
        requests::put(memory, slot, out);
        self.segment.ring(true);
        loop {
            let mut seen = Seen::Waits;
            let answered = self.segment.wait_until(|| {
                seen = requests::look(memory, slot);
                seen != Seen::Waits
            });
            if let Err(error) = answered {
                if error == Errno::INTR {
                    // The answer is taken when it comes, and means nothing then.
                    self.slots.forget(slot);
                }
                return Err(error);
            }
            if seen == Seen::Reply {
                break;
            }
            // The service was started anew while it worked on this one.
            requests::put(memory, slot, out);
            self.segment.ring(true);
        }
        requests::take(memory, slot, out);
        self.slots.give(slot);
        let (status, _) = rpc::reply_status(out).map_err(|_| Errno::IO)?;
        status
    }

    /// Before a request that must see operations up to `after`: other threads may have sequences
    /// below it and still be writing, for which the service shall wait.
    fn announce(&self, after: Sequence) {
        if after.0 > 0 {
            self.segment.memory.raise(control::LAST_SEQUENCE, self.last().0);
        }
    }

    /// Posts a request whose answer does not matter; says whether there was a free slot for it.
    pub fn post(&self, request: &Request<'_>, after: Sequence) -> bool {
        let Some(slot) = self.slots.try_take(&self.segment.memory) else { return false };
        let mut body = Vec::new();
        request.encode(after, &mut body);
        self.announce(after);
        requests::put(&self.segment.memory, slot, &body);
        self.slots.forget(slot);
        self.segment.ring(true);
        true
    }

    /// Gives leases back; those that find no free slot with the next ones.
    pub fn release(&self, slots: Vec<u32>) {
        let mut all = self.released.write();
        all.extend(slots);
        while !all.is_empty() {
            let from = all.len().saturating_sub(self.limits.posted);
            let slots = all.split_off(from);
            let request = Request::Release { slots };
            if !self.post(&request, self.last())
                && let Request::Release { slots } = request
            {
                all.extend(slots);
                return;
            }
        }
    }

    fn take_slot(&self) -> Result<usize> {
        let mut yields = 0;
        loop {
            if let Some(slot) = self.slots.try_take(&self.segment.memory) {
                return Ok(slot);
            }
            if !self.segment.attached() {
                return Err(Errno::STALE);
            }
            if self.slots.some_are_forgotten() && yields < SLOT_YIELDS {
                yields += 1;
                H::yield_now();
                continue;
            }
            if self.segment.stops() {
                return Err(Errno::INTR);
            }
            self.slots.wait();
        }
    }

    /// The mapping of an arena; `None` when this process may not map it.
    pub fn arena(&self, config: &Config, arena: u32) -> Result<Arena<H>> {
        if let Some(known) = self.arenas.read().get(&arena) {
            return Ok(known.clone());
        }
        let mapping = self.segment.arena(config, arena)?.map(Arc::new);
        self.arenas.write().insert(arena, mapping.clone());
        Ok(mapping)
    }

    /// What is known of an arena (not asked for yet, not for this process, or its mapping), which stays while one looks
    /// at it. Readers with other numbers write no line that this one writes.
    #[inline]
    pub fn with_arena<T>(
        &self,
        by: u64,
        arena: u32,
        look: impl FnOnce(Option<&Arena<H>>) -> T,
    ) -> T {
        look(self.arenas.read_by(by).get(&arena))
    }
}
