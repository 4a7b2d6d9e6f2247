//! File locks: `fcntl` records, open file descriptions, `flock`.
//!
//! The kernel tells a lock's owner by a number: a process's for POSIX locks, an open file's for
//! open-file-description locks and `flock`. It does not say which of the two. Locks go
//!
//! - at FLUSH of any descriptor of the file: those of the process that closes it;
//! - at RELEASE: those whose owner has used this open file and no other one since its last FLUSH. An
//!   open file's number is used with that file only, so they are its own; a process that has the
//!   file open no more has sent FLUSH before.
//!
//! The kernel sends FLUSH before a `close` returns, and RELEASE at about that time, without waiting for it: another thread
//! may read the caller's next request sooner. So who is barred where an open file with locks has just sent FLUSH, or is being
//! released (without a FLUSH, where it was mapped), waits for a moment, for it to be released ([`CLOSING`]). The file system is told
//! before FLUSH is answered, so that nobody else hears meanwhile that they bar him.
//!
//! A request that may wait takes no thread: it is put on a list, which one thread tries again when
//! the file system says that a lock may be free.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use client::fs::{FileSystem, LOCK_END, Lock, LockKind, LockSpace, Result};
use zerocopy::IntoBytes;

use super::lock_book::LockBook;
use super::parse::Args;
use super::reply::{Answer, LaterReply, ReplySink};
use super::server::{Call, Locked, Server};
use super::wire::{
    F_RDLCK, F_UNLCK, F_WRLCK, FileLock, FlushIn, InterruptIn, LK_FLOCK, LkIn, LkOut, OutHeader,
};

/// Requests that may wait for a lock at once.
const WAITING_MAX: usize = 1000;
/// Interrupts remembered that came before their request was put on the list. At most as many
/// requests are between being read and being put there as there are threads.
const EARLY_MAX: usize = 256;
/// While locks are held or wanted, the file system is looked after so often.
const POLL_MS: u64 = 1000;

/// An open file of which a descriptor was closed is released within that time, if it was the last one.
const CLOSING: Duration = Duration::from_millis(if cfg!(test) { 2000 } else { 250 });

/// Open files of a guest through which owners have locked, each counted for each owner. (No client of a volume may have more ranges locked
/// than a quarter of that; but who gives a lock up piece by piece, and does not close the file, is remembered.)
const USES_MAX: usize = 1 << 16;

/// A thread that has read a RELEASE may be kept from the processor for that long before it says so.
const READ: Duration = Duration::from_millis(2);

/// Whose locks: the file, the space and the owner's number.
pub type Owner = (InodeId, LockSpace, u64);

/// What a server keeps about locks.
#[derive(Default)]
pub(super) struct Locks {
    state: Mutex<State>,
    changed: Condvar,
    /// An open file was released, and its locks are gone.
    released: Condvar,
    /// Owners in `state`: FLUSH asks for nothing else as long as there are none.
    owners: AtomicUsize,
    /// Where there is a ledger.
    book: LockBook,
    /// Held while those who wait are tried. `true`: they are not, since the guest is about to go on elsewhere.
    paused: Mutex<bool>,
}

/// A RELEASE that was read, until it is served: the kernel sent it before what it sends next, which another thread may serve
/// sooner.
pub(super) struct Releasing<'a>(&'a Locks, InodeId);

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if let Some(count) = state.releasing.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                state.releasing.remove(&self.1);
            }
        }
        state.released += 1;
        drop(state);
        self.0.released.notify_all();
    }
}

/// An owner's use of an open file.
#[derive(Clone, Copy, Default)]
struct Use {
    /// Requests for locks that have no answer yet, and all that were begun.
    asks: usize,
    begun: u64,
    /// Something may be locked.
    locked: bool,
}

#[derive(Default)]
struct State {
    /// The open files through which an owner has locked since its last FLUSH, or is asking for a lock.
    used: BTreeMap<Owner, BTreeMap<u64, Use>>,
    /// Entries of all of `used`.
    uses: usize,
    /// Open files through which somebody has locked, and a descriptor of which was closed: when.
    closing: BTreeMap<(InodeId, u64), Instant>,
    /// RELEASEs of them that were read and are not served yet: how many of an inode.
    releasing: BTreeMap<InodeId, usize>,
    /// How many of them were released.
    released: u64,
    waiting: VecDeque<Waiting>,
    /// Numbers of requests.
    interrupted: VecDeque<u64>,
    closed: bool,
}

struct Waiting {
    unique: u64,
    ino: InodeId,
    fh: u64,
    lock: Lock,
    reply: Box<dyn LaterReply>,
}

impl Waiting {
    fn owner(&self) -> Owner {
        (self.ino, self.lock.space, self.lock.owner)
    }

    fn answer(self, locks: &Locks, result: Result<()>) {
        locks.end_use(self.owner(), self.fh, &result);
        let error = result.map_or_else(|e| -i32::from(e.0), |()| 0);
        let len = u32::try_from(size_of::<OutHeader>()).unwrap_or(0);
        let head = OutHeader { len: len.into(), error: error.into(), unique: self.unique.into() };
        self.reply.send(head.as_bytes());
    }
}

impl Locks {
    fn paused(&self) -> MutexGuard<'_, bool> {
        self.paused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An owner is about to ask for a lock: what it gets is to be given back, whatever happens meanwhile. `most`: entries at most.
    fn begin_use(&self, owner: Owner, fh: u64, most: usize) -> Result<()> {
        let mut state = self.state();
        let known = state.used.get(&owner).is_some_and(|handles| handles.contains_key(&fh));
        if !known && state.uses >= most {
            return Err(Errno::NOLCK);
        }
        state.uses += usize::from(!known);
        let entry = state.used.entry(owner).or_default().entry(fh).or_default();
        entry.asks += 1;
        entry.begun += 1;
        self.owners.store(state.used.len(), Ordering::Release);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Open files that owners use, each counted for each owner.
    #[cfg(test)]
    pub(super) fn uses(&self) -> usize {
        let state = self.state();
        assert_eq!(state.uses, state.used.values().map(BTreeMap::len).sum::<usize>());
        state.uses
    }

    /// It was answered. Who was refused, and had nothing, is forgotten: a guest may make up owners without end.
    fn end_use(&self, owner: Owner, fh: u64, result: &Result<()>) {
        let refused = matches!(
            result,
            Err(Errno::AGAIN
                | Errno::NOLCK
                | Errno::DEADLK
                | Errno::INTR
                | Errno::ACCES
                | Errno::BADF
                | Errno::INVAL)
        );
        let mut state = self.state();
        let known = state.used.get_mut(&owner).and_then(|handles| handles.get_mut(&fh));
        match known {
            Some(entry) => {
                entry.asks = entry.asks.saturating_sub(1);
                entry.locked |= !refused;
            }
            None if refused => return,
            // A FLUSH came in between.
            None => {
                let entry = Use { locked: true, ..Use::default() };
                state.used.entry(owner).or_default().insert(fh, entry);
                state.uses += 1;
            }
        }
        self.thin_out(&mut state, owner, fh);
    }

    /// Requests for locks that an owner has begun through `fh`, if none of them is under way.
    fn at_rest(&self, owner: Owner, fh: u64) -> Option<u64> {
        let state = self.state();
        let entry = state.used.get(&owner)?.get(&fh)?;
        (entry.asks == 0).then_some(entry.begun)
    }

    /// All that the owner had locked of the file it has given up, when it had begun so many requests.
    fn note_unlocked(&self, owner: Owner, fh: u64, begun: u64) {
        let mut state = self.state();
        let known = state.used.get_mut(&owner).and_then(|handles| handles.get_mut(&fh));
        if let Some(entry) = known.filter(|entry| entry.asks == 0 && entry.begun == begun) {
            entry.locked = false;
            self.thin_out(&mut state, owner, fh);
        }
    }

    /// Takes out what stands for nothing.
    fn thin_out(&self, state: &mut State, owner: Owner, fh: u64) {
        let Some(handles) = state.used.get_mut(&owner) else { return };
        if handles.get(&fh).is_some_and(|entry| entry.asks == 0 && !entry.locked) {
            handles.remove(&fh);
            state.uses -= 1;
        }
        if state.used.get(&owner).is_some_and(BTreeMap::is_empty) {
            state.used.remove(&owner);
        }
        self.owners.store(state.used.len(), Ordering::Release);
    }

    fn forget_owner(&self, owner: Owner) -> bool {
        if self.owners.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut state = self.state();
        let known = state.used.remove(&owner);
        state.uses -= known.as_ref().map_or(0, BTreeMap::len);
        self.owners.store(state.used.len(), Ordering::Release);
        known.is_some()
    }

    /// A descriptor of `fh` is being closed, perhaps the last one; whether there may be locks that go with it.
    fn note_closing(&self, ino: InodeId, fh: u64) -> bool {
        if self.owners.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut state = self.state();
        let locks = state.used.range(of_inode(ino)).any(|(_, handles)| handles.contains_key(&fh));
        if locks {
            state.closing.insert((ino, fh), Instant::now());
        }
        locks
    }

    /// It is released, and its locks are gone.
    fn note_released(&self, ino: InodeId, fh: u64) {
        let mut state = self.state();
        if state.closing.remove(&(ino, fh)).is_some() {
            state.released += 1;
            drop(state);
            self.released.notify_all();
        }
    }

    fn releases(&self) -> u64 {
        if self.owners.load(Ordering::Acquire) == 0 { 0 } else { self.state().released }
    }

    /// The first that is done with a RELEASE; nothing where nobody has a lock.
    pub(super) fn releasing(&self, ino: InodeId) -> Option<Releasing<'_>> {
        if self.owners.load(Ordering::Acquire) == 0 {
            return None;
        }
        *self.state().releasing.entry(ino).or_default() += 1;
        Some(Releasing(self, ino))
    }

    /// Waits for open files other than `fh` that are being closed or released; whether any was released after the first so many,
    /// or may have been. (Where no such file is known, and another one of this mount has the lock, for a moment: the kernel's
    /// RELEASE may have been read, and not be known yet. Not for records, which are a process's mostly: those go at FLUSH, and who
    /// tries a database's again and again would wait each time.)
    fn await_closing(&self, ino: InodeId, (fh, space): (u64, LockSpace), before: u64) -> bool {
        let mut state = self.state();
        let (begun, mut waited) = (Instant::now(), false);
        let is_rival = |(owner, handles): (&Owner, &BTreeMap<u64, Use>)| {
            space == LockSpace::Flock && owner.1 == space && handles.keys().any(|h| *h != fh)
        };
        let has_rivals = state.used.range(of_inode(ino)).any(is_rival);
        loop {
            let now = Instant::now();
            let others = state.closing.range((ino, 0)..=(ino, u64::MAX)).filter(|(k, _)| k.1 != fh);
            let releasing = state.releasing.contains_key(&ino).then_some(&begun);
            let all = others.map(|(_, since)| since).chain(releasing);
            let perhaps = has_rivals && state.released == before;
            let ends = all.map(|since| *since + CLOSING).chain(perhaps.then_some(begun + READ));
            let end = ends.filter(|end| *end > now).max();
            let Some(end) = end else { return waited || state.released != before };
            waited = true;
            let left = end.saturating_duration_since(now);
            let (back, _) =
                self.released.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
            state = back;
        }
    }

    /// Owners who have used `fh` and nothing else.
    fn forget_handle(&self, ino: InodeId, fh: u64) -> Vec<Owner> {
        if self.owners.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut state = self.state();
        let (mut ended, mut gone) = (Vec::new(), 0);
        for (owner, handles) in state.used.range_mut(of_inode(ino)) {
            if handles.remove(&fh).is_some() {
                gone += 1;
                ended.extend(handles.is_empty().then_some(*owner));
            }
        }
        state.uses -= gone;
        for owner in &ended {
            state.used.remove(owner);
        }
        self.owners.store(state.used.len(), Ordering::Release);
        ended
    }
}

/// All owners of locks on an inode.
const fn of_inode(ino: InodeId) -> RangeInclusive<Owner> {
    (ino, LockSpace::Record, 0)..=(ino, LockSpace::Flock, u64::MAX)
}

impl State {
    fn take_waiting(&mut self, unique: u64) -> Option<Waiting> {
        let at = self.waiting.iter().position(|w| w.unique == unique)?;
        self.waiting.remove(at)
    }

    fn take_interrupt(&mut self, unique: u64) -> bool {
        let at = self.interrupted.iter().position(|u| *u == unique);
        at.map(|at| self.interrupted.remove(at)).is_some()
    }
}

fn note_kept(ino: InodeId, unlocked: Result<()>) {
    if let Err(error) = unlocked {
        log::warn!("locks of a closed file (inode {ino}) could not be given back: {error}");
    }
}

/// A lock as the kernel asks for it.
fn lock_of(arg: &LkIn, pid: u32) -> Result<Lock> {
    let kind = match arg.lk.kind.get() {
        F_RDLCK => LockKind::Read,
        F_WRLCK => LockKind::Write,
        F_UNLCK => LockKind::None,
        _ => return Err(Errno::INVAL),
    };
    let owner = arg.owner.get();
    if arg.lk_flags.get() & LK_FLOCK != 0 {
        return Ok(Lock { kind, pid, ..Lock::all_of(LockSpace::Flock, owner) });
    }
    let (start, end) = (arg.lk.start.get(), arg.lk.end.get());
    if start > end || end > LOCK_END {
        return Err(Errno::INVAL);
    }
    Ok(Lock { space: LockSpace::Record, kind, owner, pid, start, end })
}

impl<F: FileSystem + ?Sized> Server<F> {
    /// Whether the kernel was told to ask us for locks.
    pub fn shares_locks(&self) -> bool {
        self.options.shared_locks && self.fs.keeps_locks()
    }

    fn lk_args(&self, call: &Call<'_>, mut args: Args<'_>) -> Result<(u64, Lock)> {
        let arg: &LkIn = args.take()?;
        args.end()?;
        if !self.shares_locks() {
            return Err(Errno::NOSYS);
        }
        let fh = arg.fh.get();
        self.opened(fh, call.ino)?;
        Ok((fh, lock_of(arg, arg.lk.pid.get())?))
    }

    pub(super) fn getlk(
        &self,
        call: &Call<'_>,
        args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let (fh, lock) = self.lk_args(call, args)?;
        let before = self.locks.releases();
        let mut held = self.fs.test_lock(call.ino, &lock)?;
        if held.is_some() && self.locks.await_closing(call.ino, (fh, lock.space), before) {
            held = self.fs.test_lock(call.ino, &lock)?;
        }
        let lk = match held {
            None => FileLock { kind: F_UNLCK.into(), ..FileLock::default() },
            Some(held) => FileLock {
                start: held.start.into(),
                end: held.end.into(),
                kind: if held.kind == LockKind::Write { F_WRLCK } else { F_RDLCK }.into(),
                pid: held.pid.into(),
            },
        };
        Ok(Answer::of(&LkOut { lk }))
    }

    pub(super) fn setlk(
        &self,
        call: &Call<'_>,
        args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let (fh, lock) = self.lk_args(call, args)?;
        if lock.kind == LockKind::None {
            return self.give_up((call.ino, fh), &lock);
        }
        let owner = (call.ino, lock.space, lock.owner);
        self.locks.begin_use(owner, fh, self.uses_max())?;
        let before = self.locks.releases();
        let mut done = self.ask_lock((call.ino, fh), &lock, 0);
        if done == Err(Errno::AGAIN) && self.locks.await_closing(call.ino, (fh, lock.space), before)
        {
            done = self.ask_lock((call.ino, fh), &lock, 0);
        }
        self.locks.end_use(owner, fh, &done);
        done.map(|()| Answer::Empty)
    }

    /// Unlocks.
    fn give_up(&self, (ino, fh): (InodeId, u64), lock: &Lock) -> Result<Answer> {
        let owner = (ino, lock.space, lock.owner);
        let all = (lock.start, lock.end) == (0, LOCK_END);
        let begun = if all { self.locks.at_rest(owner, fh) } else { None };
        self.ask_lock((ino, fh), lock, 0)?;
        if let Some(begun) = begun {
            self.locks.note_unlocked(owner, fh, begun);
        }
        Ok(Answer::Empty)
    }

    /// A kernel's owners are processes and open files; a guest's are what it says.
    fn uses_max(&self) -> usize {
        if self.options.guest.is_some() { USES_MAX } else { usize::MAX }
    }

    pub(super) fn setlkw(
        &self,
        call: &Call<'_>,
        args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let (fh, lock) = self.lk_args(call, args)?;
        if lock.kind == LockKind::None {
            return self.give_up((call.ino, fh), &lock);
        }
        let owner = (call.ino, lock.space, lock.owner);
        self.locks.begin_use(owner, fh, self.uses_max())?;
        let done = self.wait_for_lock(call, fh, lock, sink);
        if !matches!(done, Ok(Answer::Silent)) {
            let result = done.as_ref().map(drop).map_err(|e| *e);
            self.locks.end_use(owner, fh, &result);
        }
        done
    }

    fn wait_for_lock(
        &self,
        call: &Call<'_>,
        fh: u64,
        lock: Lock,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        loop {
            let seen = self.fs.lock_event()?;
            match self.ask_lock((call.ino, fh), &lock, call.unique) {
                Ok(()) => return Ok(Answer::Empty),
                Err(Errno::AGAIN) => {}
                Err(e) => return Err(e),
            }
            let reply = sink.later().ok_or(Errno::AGAIN)?;
            let waiting = Waiting { unique: call.unique, ino: call.ino, fh, lock, reply };
            if let Err(e) = self.put_on_list(waiting) {
                self.fs.cancel_lock(call.ino, call.unique);
                return Err(e);
            }
            // What became free since the first look was told to a list without this request.
            let missed = self.fs.lock_event().is_ok_and(|now| now != seen);
            if !missed || self.locks.state().take_waiting(call.unique).is_none() {
                return Ok(Answer::Silent);
            }
        }
    }

    fn put_on_list(&self, waiting: Waiting) -> Result<()> {
        let mut state = self.locks.state();
        if state.take_interrupt(waiting.unique) {
            return Err(Errno::INTR);
        }
        if state.waiting.len() >= WAITING_MAX || state.closed {
            return Err(Errno::NOLCK);
        }
        state.waiting.push_back(waiting);
        drop(state);
        self.locks.changed.notify_one();
        Ok(())
    }

    /// Requests that wait for a lock are cut short here, others by the transport; the kernel goes on
    /// waiting for their replies.
    pub(super) fn interrupt(
        &self,
        _: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &InterruptIn = args.take()?;
        args.end()?;
        let unique = arg.unique.get();
        if let Some(interrupts) = self.interrupts.get() {
            interrupts(unique);
        }
        if !self.shares_locks() {
            return Ok(Answer::Silent);
        }
        let mut state = self.locks.state();
        if let Some(waiting) = state.take_waiting(unique) {
            drop(state);
            self.fs.cancel_lock(waiting.ino, unique);
            waiting.answer(&self.locks, Err(Errno::INTR));
        } else {
            // Perhaps it is about to wait.
            if state.interrupted.len() >= EARLY_MAX {
                state.interrupted.pop_front();
            }
            state.interrupted.push_back(unique);
        }
        Ok(Answer::Silent)
    }

    /// A process closes a descriptor: its record locks on the file go, and it is told what went wrong
    /// with what it wrote.
    pub(super) fn flush(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        if !self.shares_locks() {
            // Nothing is held back until close; the kernel stops asking after this answer.
            return Err(Errno::NOSYS);
        }
        let arg: &FlushIn = args.take()?;
        args.end()?;
        let owner = (call.ino, LockSpace::Record, arg.lock_owner.get());
        if self.locks.forget_owner(owner) {
            self.unlock(owner);
        }
        if self.locks.note_closing(call.ino, arg.fh.get()) {
            self.fs.leaves_locks(call.ino);
        }
        // Files of the virtual directory have no handle.
        if let Ok(opened) = self.opened(arg.fh.get(), call.ino) {
            self.fs.flush(opened.handle)?;
        }
        Ok(Answer::Empty)
    }

    /// An open file is no more: its locks go.
    pub(super) fn unlock_handle(&self, ino: InodeId, fh: u64) {
        for owner in self.locks.forget_handle(ino, fh) {
            self.unlock(owner);
        }
        self.locks.note_released(ino, fh);
    }

    /// The kernel is gone, and with it all owners.
    pub(super) fn unlock_all(&self) {
        let mut state = self.locks.state();
        let used = std::mem::take(&mut state.used);
        state.uses = 0;
        let waiting = std::mem::take(&mut state.waiting);
        self.locks.owners.store(0, Ordering::Release);
        drop(state);
        waiting.into_iter().for_each(|w| self.fs.cancel_lock(w.ino, w.unique));
        self.locks.book.clear();
        // The ledger may be another guest's by now.
        for (ino, space, owner) in used.into_keys() {
            note_kept(ino, self.fs.lock(ino, &Lock::all_of(space, owner), 0));
        }
    }

    fn unlock(&self, (ino, space, owner): Owner) {
        note_kept(ino, self.ask_lock((ino, 0), &Lock::all_of(space, owner), 0));
    }

    /// Asks the file system; where there is a ledger, it knows what is locked, whatever happens meanwhile.
    fn ask_lock(&self, (ino, fh): (InodeId, u64), lock: &Lock, wait: u64) -> Result<()> {
        let ask = || self.fs.lock(ino, lock, wait);
        let Some(ledger) = &self.options.ledger else { return ask() };
        self.locks.book.lock(&**ledger, ((ino, lock.space, lock.owner), fh), *lock, ask)
    }

    /// Goes on with what a guest had locked; how many of these locks are lost.
    pub(super) fn resume_locks(&self, locked: &[Locked], secret: Option<u128>) -> usize {
        if !self.shares_locks() {
            return locked.len();
        }
        // Who had nothing locked is nobody's heir: what the one before may have had was another guest's, and is given back by its end.
        if !locked.is_empty()
            && let Err(error) = self.fs.inherit(secret)
        {
            log::warn!("others may have got what was locked before: {error}");
        }
        let Some(ledger) = &self.options.ledger else { return locked.len() };
        let mut owners: BTreeMap<Owner, (u64, Vec<Lock>)> = BTreeMap::new();
        for Locked { ino, fh, lock } in locked {
            let owned = owners.entry((*ino, lock.space, lock.owner)).or_default();
            owned.0 = *fh;
            owned.1.push(*lock);
        }
        let mut lost = 0;
        for (owner, (fh, locks)) in owners {
            if self.opened(fh, owner.0).is_err() {
                // It was given back, and they were about to be.
                self.unlock(owner);
                continue;
            }
            self.locks.end_use(owner, fh, &Ok(()));
            let ask = |lock: &Lock| self.fs.lock(owner.0, lock, 0);
            lost += self.locks.book.resume(&**ledger, (owner, fh), &locks, ask);
        }
        if !locked.is_empty() && secret.is_none() {
            self.arrive();
        }
        lost
    }

    /// The guest, whose queues are stopped, is to go on elsewhere: nobody is asked for locks any more, and whoever shows the secret may have
    /// what is locked. What that is, as the next server must know it.
    pub fn leave_locks(&self, secret: u128) -> Vec<Locked> {
        if !self.shares_locks() {
            return Vec::new();
        }
        *self.locks.paused() = true;
        let waiting: Vec<_> =
            self.locks.state().waiting.iter().map(|w| (w.ino, w.unique)).collect();
        waiting.into_iter().for_each(|(ino, unique)| self.fs.cancel_lock(ino, unique));
        let all = self.locks.book.all();
        let left = self.fs.leave(Some(secret));
        if let Err(error) = left {
            log::warn!("what the guest has locked may not go with it: {error}");
        }
        if left == Ok(false) {
            // Others may get them before the guest goes on.
            for owner in all.iter().map(|l| (l.ino, l.lock.space, l.lock.owner)) {
                note_kept(owner.0, self.fs.lock(owner.0, &Lock::all_of(owner.1, owner.2), 0));
            }
        }
        all
    }

    /// The guest goes on here after all; how many of its locks are lost.
    pub fn retake_locks(&self, secret: u128) -> usize {
        if !self.shares_locks() {
            return 0;
        }
        if let Err(error) = self.fs.inherit(Some(secret)) {
            log::warn!("others may have got what was locked before: {error}");
        }
        let ask = |ino, lock: &Lock| self.fs.lock(ino, lock, 0);
        let ledger = self.options.ledger.as_ref();
        let lost = ledger.map_or(0, |ledger| self.locks.book.retake(&**ledger, ask));
        self.arrive();
        *self.locks.paused() = false;
        self.try_waiting();
        lost
    }

    /// The guest is gone: what it had locked is free, unless somebody else has it by now to whom it was left.
    pub fn give_locks_back(&self) {
        if self.shares_locks() {
            self.unlock_all();
        }
    }

    /// Nobody is left anything any more: the guest is here.
    pub fn arrive(&self) {
        if self.shares_locks()
            && let Err(error) = self.fs.leave(None)
        {
            log::warn!("locks of a guest that has come: {error}");
        }
    }

    /// Ends [`run_locks`](Self::run_locks).
    pub fn close_locks(&self) {
        self.locks.state().closed = true;
        self.locks.changed.notify_all();
    }

    /// Serves those who wait for locks until closed: the body of a thread of the transport.
    pub fn run_locks(&self) {
        loop {
            {
                let mut state = self.locks.state();
                while state.used.is_empty() && state.waiting.is_empty() && !state.closed {
                    state = self.locks.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                if state.closed {
                    return;
                }
            }
            let seen = match self.fs.lock_event() {
                Ok(event) => event,
                Err(error) => {
                    log::warn!("waiting for file locks: {error}");
                    std::thread::sleep(Duration::from_millis(POLL_MS));
                    continue;
                }
            };
            self.try_waiting();
            self.fs.await_lock_event(seen, POLL_MS);
        }
    }

    /// Tries everybody on the list once.
    fn try_waiting(&self) {
        let paused = self.locks.paused();
        if *paused {
            return;
        }
        let count = self.locks.state().waiting.len();
        for _ in 0..count {
            let Some(waiting) = self.locks.state().waiting.pop_front() else { return };
            match self.ask_lock((waiting.ino, waiting.fh), &waiting.lock, waiting.unique) {
                Err(Errno::AGAIN) => {
                    let mut state = self.locks.state();
                    if !state.take_interrupt(waiting.unique) {
                        state.waiting.push_back(waiting);
                        continue;
                    }
                    drop(state);
                    self.fs.cancel_lock(waiting.ino, waiting.unique);
                    waiting.answer(&self.locks, Err(Errno::INTR));
                }
                result => waiting.answer(&self.locks, result),
            }
        }
    }
}
