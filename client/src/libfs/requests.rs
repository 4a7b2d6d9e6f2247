//! Request slots: how a client asks its node (`storage::format::rpc`). The protocol of one slot, for whoever
//! speaks it, and who of a process's threads has which.

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, Ordering};

use base::planted::{Bug, planted};
use storage::format::{control, rpc};
use storage::limits::{RPC_SLOT_BYTES, RPC_SLOTS};

use super::host::{EVERYBODY, Host, MS, Memory};

/// Most bytes of a body.
const BODY_MAX: usize = RPC_SLOT_BYTES - rpc::SLOT_BODY as usize;

/// Where a slot begins: its state (32 bits), behind it the length of its body (32 bits).
const fn at(slot: usize) -> u64 {
    assert!(slot < RPC_SLOTS);
    control::RPC + (slot * RPC_SLOT_BYTES) as u64
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    /// Nothing yet.
    Waits,
    /// The service was started anew while it worked on it: to be put again.
    Again,
    /// The reply is there.
    Reply,
}

/// Puts a request into a slot that the caller has. The service is to be rung for afterwards.
pub fn put(memory: &impl Memory, slot: usize, body: &[u8]) {
    let body = &body[..body.len().min(BODY_MAX)];
    memory.store32(at(slot) + 4, body.len() as u32, Ordering::Relaxed);
    memory.write(at(slot) + rpc::SLOT_BODY, body);
    memory.store32(at(slot), rpc::SLOT_REQUEST, Ordering::SeqCst);
}

/// Looks what became of it.
pub fn look(memory: &impl Memory, slot: usize) -> Seen {
    match memory.load32(at(slot), Ordering::Acquire) {
        rpc::SLOT_REPLY => Seen::Reply,
        rpc::SLOT_AGAIN => Seen::Again,
        _ => Seen::Waits,
    }
}

/// Takes the reply out; the slot is free then.
pub fn take(memory: &impl Memory, slot: usize, out: &mut Vec<u8>) {
    let len = memory.load32(at(slot) + 4, Ordering::Relaxed) as usize;
    out.clear();
    out.resize(len.min(BODY_MAX), 0);
    // A slot lies in every segment.
    let _ = memory.read(at(slot) + rpc::SLOT_BODY, out);
    drop_reply(memory, slot);
}

/// Frees a slot whose reply nobody wants.
fn drop_reply(memory: &impl Memory, slot: usize) {
    memory.store32(at(slot), rpc::SLOT_FREE, Ordering::Release);
}

/// The slots of a process.
#[derive(Debug)]
pub struct Slots<H: Host> {
    /// Bit i: slot i is free.
    free: AtomicU32,
    /// Bit i: nobody waits for the reply in slot i.
    forgotten: AtomicU32,
    host: PhantomData<fn() -> H>,
}

impl<H: Host> Slots<H> {
    /// So many of them, all free.
    pub fn new(count: usize) -> Self {
        let all = (1u64 << count.clamp(1, RPC_SLOTS)) - 1;
        Self { free: AtomicU32::new(all as u32), forgotten: AtomicU32::new(0), host: PhantomData }
    }

    /// A free one, if there is one now.
    pub fn try_take(&self, memory: &H::Memory) -> Option<usize> {
        self.collect_forgotten(memory);
        loop {
            H::point();
            let free = self.free.load(Ordering::SeqCst);
            if free == 0 {
                return None;
            }
            let slot = free.trailing_zeros();
            H::point();
            if self
                .free
                .compare_exchange(free, free & !(1 << slot), Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
            {
                return Some(slot as usize);
            }
        }
    }

    /// Waits a little for one to be given back.
    pub fn wait(&self) {
        // Nobody wakes us for a reply that nobody waits for, hence the limit.
        let limit = if self.some_are_forgotten() { MS } else { 100 * MS };
        H::wait(&self.free, 0, limit);
    }

    /// Whether replies are on their way for which nobody waits.
    pub fn some_are_forgotten(&self) -> bool {
        self.forgotten.load(Ordering::SeqCst) != 0
    }

    /// Gives a slot back whose reply was taken.
    pub fn give(&self, slot: usize) {
        H::point();
        if self.free.fetch_or(1 << slot, Ordering::SeqCst) == 0 {
            // All: the next ones given back wake nobody.
            H::wake(&self.free, EVERYBODY);
        }
    }

    /// Nobody waits for the reply in this slot any more: it is given back when that comes.
    pub fn forget(&self, slot: usize) {
        H::point();
        self.forgotten.fetch_or(1 << slot, Ordering::SeqCst);
    }

    fn collect_forgotten(&self, memory: &H::Memory) {
        let mut pending = self.forgotten.load(Ordering::SeqCst);
        while pending != 0 {
            let slot = pending.trailing_zeros() as usize;
            pending &= !(1 << slot);
            // One that a restarted service did not get to is dropped, as its answer would have been.
            let done = || look(memory, slot) != Seen::Waits;
            if !done() {
                continue;
            }
            H::point();
            if self.forgotten.fetch_and(!(1 << slot), Ordering::SeqCst) & 1 << slot == 0 {
                continue;
            }
            // Ours now; but what was done was perhaps the request before, which others collected.
            if done() || planted(Bug::SlotCollectedTwice) {
                drop_reply(memory, slot);
                self.give(slot);
            } else {
                self.forget(slot);
            }
        }
    }
}
