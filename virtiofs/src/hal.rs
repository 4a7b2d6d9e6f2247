//! What a transport gives a device: queues, requests as scatter lists, the way back, and whose they are.
//!
//! A [`Transport`] is vhost-user ([`crate::vhost`]), a socket to another machine ([`crate::remote`]), or the emulation
//! layer of a DPU behind the C ABI. The device ([`crate::device`]) knows no other.
#![allow(unsafe_code)] // memory that a guest writes to meanwhile has no safe type

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A piece of memory that its owner, a guest, may change at any time. What is read from it is copied before it is judged.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a piece is an address and a length; whoever made it promised that it may be used from any thread.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Piece {
    /// The `len` bytes at `ptr`.
    ///
    /// # Safety
    /// They are mapped, readable and, in a list of writable pieces, writable, for as long as the [`Chain`] that they
    /// belong to. No Rust reference to them lives outside of calls that are under way.
    pub const unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len }
    }

    /// Where it lies in this process.
    pub(crate) fn address(&self) -> usize {
        self.ptr.addr()
    }

    /// Bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is left after the first `count` bytes.
    #[must_use]
    pub fn skip(self, count: usize) -> Self {
        let count = count.min(self.len);
        // SAFETY: the sum stays within the piece, or points just behind it.
        Self { ptr: unsafe { self.ptr.add(count) }, len: self.len - count }
    }

    /// The first `count` bytes, or all.
    #[must_use]
    pub fn take(self, count: usize) -> Self {
        Self { len: self.len.min(count), ..self }
    }

    /// Copies from the piece; how many bytes.
    pub fn read(&self, to: &mut [u8]) -> usize {
        let len = self.len.min(to.len());
        // SAFETY: `len` bytes are within both, `to` is ours alone and so does not overlap. That the guest may write
        // meanwhile makes the bytes unknown, and nothing else.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr, to.as_mut_ptr(), len) };
        len
    }

    /// Copies into the piece; how many bytes.
    pub fn write(&self, from: &[u8]) -> usize {
        let len = self.len.min(from.len());
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.ptr, len) };
        len
    }

    /// For a system call or a copy that takes the bytes as they come.
    pub(crate) fn as_slice(&self) -> IoSlice<'_> {
        // SAFETY: mapped as long as the chain, which whoever borrows the piece holds. The bytes may change: those
        // who get them (`FileSystem::write_pieces`) know that they may conclude nothing from them.
        IoSlice::new(unsafe { std::slice::from_raw_parts(self.ptr, self.len) })
    }

    /// The same for writing.
    pub(crate) fn as_slice_mut(&mut self) -> IoSliceMut<'_> {
        // SAFETY: as above (`FileSystem::read_pieces`); of one chain's pieces each is borrowed once.
        IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) })
    }
}

/// Memory of our own as a list of one piece, for transports that carry bytes.
#[derive(Debug)]
pub struct Owned {
    bytes: *mut [u8],
    piece: [Piece; 1],
}

// SAFETY: it owns its memory, as a box does; what is done with it goes through `Piece`.
unsafe impl Send for Owned {}

impl Owned {
    /// These bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        let bytes = Box::into_raw(bytes.into_boxed_slice());
        // SAFETY: the box is ours until the drop, and nobody has a reference to it.
        let piece = [unsafe { Piece::new(bytes.cast(), bytes.len()) }];
        Self { bytes, piece }
    }

    /// The list.
    pub fn pieces(&self) -> &[Piece] {
        &self.piece
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: it came from a box in `new`, and is given back once.
        drop(unsafe { Box::from_raw(self.bytes) });
    }
}

/// Copies the first bytes of a scatter list into `to`; how many there were.
pub fn gather(pieces: &[Piece], to: &mut [u8]) -> usize {
    let mut done = 0;
    for piece in pieces {
        if done == to.len() {
            break;
        }
        done += piece.read(&mut to[done..]);
    }
    done
}

/// Copies `from` into a scatter list; how many bytes had room.
pub fn scatter(from: &[u8], pieces: &[Piece]) -> usize {
    let mut done = 0;
    for piece in pieces {
        if done == from.len() {
            break;
        }
        done += piece.write(&from[done..]);
    }
    done
}

/// The list without its first `count` bytes.
pub fn skip(pieces: &[Piece], mut count: usize) -> impl Iterator<Item = Piece> + '_ {
    pieces.iter().filter_map(move |piece| {
        let gone = count.min(piece.len());
        count -= gone;
        Some(piece.skip(gone)).filter(|rest| !rest.is_empty())
    })
}

/// One request of a guest. Dropped uncompleted, it is given back to the guest without a reply.
pub trait Chain: Send {
    /// What the guest asks: a FUSE request.
    fn readable(&self) -> &[Piece];
    /// Where the reply goes.
    fn writable(&self) -> &[Piece];
    /// It came to the device once before, which died before it answered: what it asks for may be done already.
    fn is_again(&self) -> bool {
        false
    }
    /// It was not begun, and is the next request of its queue again, for whoever has that then. For a queue that
    /// [`is_stopped`](Queue::is_stopped), from which nothing else was taken since; where queues are not stopped, it is dropped.
    fn put_back(self: Box<Self>) {}
    /// The first `bytes` of the writable pieces may be written before it is given back, whatever its reply is: a read in place may fail
    /// when it has done some of it. A transport that keeps book of what was written counts them with the reply.
    fn touches(&mut self, _bytes: usize) {}
    /// The reply is there, in the first `written` bytes of the writable pieces.
    fn complete(self: Box<Self>, written: u32);
    /// The reply is this, in two parts, of a request that was begun and has ended when it liked: nothing is written if the queue is another
    /// guest's by now. There is room for it.
    fn answer(self: Box<Self>, head: &[u8], payload: &[u8]) {
        let to: Vec<Piece> = skip(self.writable(), head.len()).collect();
        let written = scatter(head, self.writable()) + scatter(payload, &to);
        self.complete(u32::try_from(written).unwrap_or(0));
    }
    /// The reply comes later, by [`reply`](Self::reply): nobody looks at the pieces until then, and whoever stops the
    /// queue does not wait for it. Dropped after that, it is not given back.
    fn put_off(&mut self);
    /// The reply, which goes to the writable pieces as soon as the queue runs.
    fn reply(self: Box<Self>, reply: &[u8]);
}

/// What a wait ended with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// There may be a request.
    Look,
    /// There will be no more.
    Stop,
}

/// One queue of a device. Requests of one queue may be completed in any order, by any thread.
pub trait Queue: Send + Sync {
    /// The next request, if there is one.
    fn next(&self) -> Option<Box<dyn Chain>>;
    /// Returns when there may be a request, or the queue is gone. Sleeps only after it has looked for `spin`. One thread at
    /// a time.
    fn wait(&self, spin: Duration) -> Woken;
    /// Whether somebody stopped it who waits until nothing of it is under way: what was taken and not begun is to be
    /// [put back](Chain::put_back).
    fn is_stopped(&self) -> bool {
        false
    }
    /// Tells the guest now what it was given back: nobody will look for the next request for a while.
    fn flush(&self) {}
    /// Wakes all who wait, for good: for the end of the device.
    fn stop(&self);
}

/// A queue into which requests are handed.
#[derive(Default)]
pub struct Fed {
    /// Requests, and whether it has ended.
    waiting: Mutex<(VecDeque<Box<dyn Chain>>, bool)>,
    came: Condvar,
}

impl std::fmt::Debug for Fed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fed").field("waiting", &self.waiting().0.len()).finish()
    }
}

impl Fed {
    fn waiting(&self) -> MutexGuard<'_, (VecDeque<Box<dyn Chain>>, bool)> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands in a request.
    pub fn push(&self, chain: Box<dyn Chain>) {
        self.waiting().0.push_back(chain);
        self.came.notify_one();
    }
}

impl Queue for Fed {
    fn next(&self) -> Option<Box<dyn Chain>> {
        self.waiting().0.pop_front()
    }

    fn wait(&self, _: Duration) -> Woken {
        let mut waiting = self.waiting();
        while waiting.0.is_empty() && !waiting.1 {
            waiting = self.came.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        if waiting.1 { Woken::Stop } else { Woken::Look }
    }

    fn stop(&self) {
        self.waiting().1 = true;
        self.came.notify_all();
    }
}

/// The way to one guest.
pub trait Transport: Send + Sync {
    /// The queues: first the one for requests that must not wait behind others (FORGET), if the transport has such,
    /// then the others.
    fn queues(&self) -> Vec<Arc<dyn Queue>>;
    /// Whose device this is, for logs and figures.
    fn tenant(&self) -> &str;
}
