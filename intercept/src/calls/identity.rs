//! A process that becomes somebody else: set*id, setgroups, capset.
//!
//! What it has open stays open, by the kernel's descriptors. If it cannot go back to being whose session it is, it parts
//! from the session: its log, its arenas and the shared state are no longer mapped when the call returns, so that
//! nothing it may do from then on touches what it could touch before; its next use of a file begins a session as
//! who it is now. A temporary change (the saved identity still is the session's) parts nobody: who can go back has all
//! the rights that the session has.

use core::sync::atomic::{AtomicBool, Ordering};

use base::InodeId;

use super::process::cwd;
use crate::entry::Regs;
use crate::sys::{self, nr};
use crate::table::{self, THREADS};
use crate::{demote, fsys, path, session, thread};

/// A thread is parting from the session: the others stay out of it.
pub static PARTING: AtomicBool = AtomicBool::new(false);

/// MEMBARRIER_CMD_PRIVATE_EXPEDITED, and its registration.
const BARRIER: usize = 8;
const BARRIER_READY: usize = 16;
/// 0.1 ms.
const PAUSE: [i64; 2] = [0, 100_000];

fn pause() {
    sys::call2(nr::NANOSLEEP, PAUSE.as_ptr() as usize, 0);
}

/// The call, and what follows from it.
pub fn change(r: &Regs) -> isize {
    let before = fsys::is_bound().then(who);
    if before.is_some() || !matches!(r.rax, nr::SETFSUID | nr::SETFSGID | nr::CAPSET) {
        keep_rights(before.is_some());
    }
    let ret = sys::call3(r.rax, r.rdi, r.rsi, r.rdx);
    fsys::forget_identity();
    if is_another() {
        // A child of vfork has its parent's memory, and cannot: what it executes begins a session of its own.
        if !table::in_vfork() {
            // Who has become somebody with more rights can open what he could not before.
            give_all();
            part();
        }
    } else if before.is_some_and(|before| before != who()) {
        // The service goes on judging this session by who began it.
        path::disable();
    }
    ret
}

/// User and group.
fn who() -> (u32, u32) {
    let caller = fsys::caller();
    (caller.uid, caller.gid)
}

/// Whether this thread has given up being whose session it is, for good; or is the super-user in somebody else's, who may
/// do more than the service would let him. (The services may have been restarted while he was that somebody.)
fn is_another() -> bool {
    let mut ids = [0u32; 3];
    let at = ids.as_mut_ptr() as usize;
    if sys::call3(nr::GETRESUID, at, at + 4, at + 8) != 0 {
        return false;
    }
    let begun_by = fsys::begun_by();
    let can_be = |owner: &dyn Fn(u32) -> bool| ids.iter().any(|id| owner(*id));
    let is_more = begun_by.is_some_and(|user| user != 0) && ids[1] == 0;
    !can_be(&session::is_owner) || begun_by.is_some_and(|user| !ids.contains(&user)) || is_more
}

/// Before the super-user gives up rights, or somebody whose session is `bound` to others gets some: what is open stays
/// open, also in a child or program that could not open it again, and the working directory stays where it is.
fn keep_rights(bound: bool) {
    if fsys::caller().uid != 0 && !bound {
        return;
    }
    give_all();
    if !table::in_vfork() && table::context().cwd.load(Ordering::Acquire) != 0 && cwd() != 0 {
        // The session of a child of fork begins at its first use: now, with the rights that are left. The next one,
        // when the services have been restarted, is begun by somebody who must show that he was shown the directory.
        let (ino, fs) = (InodeId(cwd()), fsys::fs());
        if let Ok(fs) = fs
            && let Ok(proof) = fs.prove(ino)
        {
            fs.vouch(ino, proof);
            fsys::show_cwd(ino, proof);
        }
    }
}

/// What is open becomes the kernel's, as far as this process may open it now.
fn give_all() {
    for number in table::used() {
        if table::index(table::entry(number as i32)).is_some() {
            demote::at_best(number as i32);
        }
    }
}

/// Another thread is parting from the session: waits until it has.
#[cold]
pub fn stand_aside() {
    let area = thread::area();
    area.aside.store(true, Ordering::SeqCst);
    while PARTING.load(Ordering::SeqCst) {
        pause();
    }
    area.aside.store(false, Ordering::SeqCst);
}

/// Does what may take long and touches nothing of the session; nobody who parts from it has to wait for that.
pub fn aside<T>(what: impl FnOnce() -> T) -> T {
    let area = thread::area();
    area.aside.store(true, Ordering::SeqCst);
    let done = what();
    area.aside.store(false, Ordering::SeqCst);
    if PARTING.load(Ordering::SeqCst) {
        stand_aside();
    }
    done
}

/// Leaves the session behind.
fn part() {
    while PARTING.swap(true, Ordering::SeqCst) {
        stand_aside();
    }
    if THREADS.load(Ordering::SeqCst) {
        // Who enters from here on sees the flag, and who has entered before is seen.
        sys::call2(nr::MEMBARRIER, BARRIER_READY, 0);
        sys::call2(nr::MEMBARRIER, BARRIER, 0);
        while thread::others_inside() {
            pause();
        }
    }
    // Another thread may have done it, or have begun a session as somebody who can still go back.
    if is_another() {
        for number in table::used() {
            // What the mount could not open (a removed directory, a file that neither might open) is not served any more.
            table::clear(number as i32);
        }
        fsys::part();
        session::renew();
    }
    PARTING.store(false, Ordering::SeqCst);
}
