//! Per-thread areas, found by `%gs`: the stack that the engine runs on, and signals put off.
//!
//! Invariants:
//! - `cur` is `top` exactly when the thread is not in the engine.
//! - A thread's area carries its `%fs` base in `owner`. A new thread starts with its creator's
//!   `%gs`; the entry code sees that the owner is another and makes an area first.
//! - An area is used again only when the thread that had it is gone.
#![allow(unsafe_code)]

use core::arch::asm;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use crate::calls::limit;
use crate::fsys::Identity;
use crate::sys::{self, nr, o};
use crate::table::Context;

/// Stack of one entry. LibFS runs on it too.
pub const FRAME: usize = 64 * 1024;
/// Entries that can nest (handlers that interrupt an exit of the engine).
const FRAMES: usize = 6;
const AREA_BYTES: usize = FRAME * FRAMES + 4096;
/// vfork calls that can nest.
pub const VFORKS: usize = 8;
/// Areas remembered for use again.
const AREAS: usize = 4096;

/// One thread's area. The entry code knows the offsets.
#[repr(C)]
#[derive(Debug)]
pub struct Area {
    /// 0: the thread's `%fs` base.
    pub owner: usize,
    /// 8: low end of the frame in use.
    pub cur: usize,
    /// 16: `cur` outside the engine.
    pub top: usize,
    /// 24: the descriptor table of `context`.
    pub fds: *mut AtomicU32,
    /// 32: a signal was put off.
    pub pending: u64,
    /// 40: vfork return addresses in use.
    pub vforks: u64,
    /// 48: return addresses of vfork-like calls under way.
    pub vfork_return: [usize; VFORKS],
    /// `cur` outside the engine, at each of them: the child may exec inside the engine.
    pub vfork_cur: [usize; VFORKS],
    /// The signal mask at each of them: meanwhile nothing may come, in the parent.
    pub vfork_mask: [u64; VFORKS],
    /// What the thread (or the vfork child that runs on it) sees as its process.
    pub context: *mut Context,
    /// Kernel thread id; 0 while unknown (after fork).
    pub tid: u32,
    /// Signal mask to restore when the signal that was put off is raised.
    pub saved_mask: u64,
    /// Number of that signal.
    pub signal: u32,
    /// Its siginfo.
    pub info: [u64; 16],
    /// Returns of calls made in this library's text (strict mode): the one used last ...
    pub raw: u8,
    /// ... and their ring.
    pub raw_return: [usize; 256],
    /// `raw` at each vfork under way: what the child leaves there when it execs is not the parent's.
    pub vfork_raw: [u8; VFORKS],
    /// Inside, and waiting for another thread that parts from the session (calls/identity.rs).
    pub aside: AtomicBool,
    /// As whom the thread calls (fsys.rs).
    pub identity: Identity,
    /// Lock request handed to the kernel in place of the application's (lock.rs).
    pub flock: [u64; 4],
}

/// In the list while an area changes hands.
const TAKEN: *mut Area = core::ptr::dangling_mut();

static AREA_LIST: [AtomicPtr<Area>; AREAS] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; AREAS];

/// The calling thread's area.
pub fn area() -> &'static mut Area {
    let at: *mut Area;
    // SAFETY: inside the engine %gs points to this thread's area, which is never unmapped; only
    // this thread (and signal code on it, which follows `cur`) touches it.
    unsafe {
        asm!("mov {}, gs:[{}]", out(reg) at, in(reg) core::mem::offset_of!(AreaPage, this),
            options(nostack, readonly, preserves_flags));
        &mut *at
    }
}

/// The area with a pointer to itself behind it.
#[repr(C)]
struct AreaPage {
    area: Area,
    this: *mut Area,
}
const _: () = assert!(size_of::<AreaPage>() <= 4096);

/// The calling thread's id, from its area.
pub fn tid() -> u32 {
    let area = area();
    if area.tid == 0 {
        area.tid = sys::call0(nr::GETTID) as u32;
    }
    area.tid
}

fn fs_base() -> usize {
    let base: usize;
    // SAFETY: the ABI keeps the thread pointer at %fs:0.
    unsafe { asm!("mov {}, fs:[0]", out(reg) base, options(nostack, readonly)) };
    base
}

/// Whether a thread, of whatever process, runs no more: it is gone, or waits for its parent to ask for its end.
pub fn has_ended(tid: u32) -> bool {
    const ESRCH: isize = -3;
    if sys::call2(nr::KILL, tid as usize, 0) == ESRCH {
        return true;
    }
    let (mut path, mut digits) = ([0u8; 40], [0; 20]);
    let mut len = 0;
    let number = crate::demote::decimal(u64::from(tid), &mut digits);
    for part in [b"/proc/".as_slice(), number, b"/stat"] {
        path[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    }
    let mut text = [0u8; 128];
    let open = || sys::call3(nr::OPEN, path.as_ptr() as usize, o::CLOEXEC as usize, 0);
    let fd = limit::with_room(open);
    if sys::failed(fd) {
        return false;
    }
    let got = sys::call3(nr::READ, fd as usize, text.as_mut_ptr() as usize, text.len());
    sys::call1(nr::CLOSE, fd as usize);
    let text = &text[..got.clamp(0, 128) as usize];
    // The name of the program stands in parentheses, and may have some itself.
    let state = text.iter().rposition(|b| *b == b')').and_then(|at| text.get(at + 2));
    matches!(state, Some(b'Z' | b'X'))
}

fn dead(area: *mut Area) -> bool {
    // SAFETY: areas in the list are never unmapped; a torn read gives a wrong guess at worst of a
    // thread id, which tgkill then denies or confirms.
    let tid = unsafe { (*area).tid };
    let pid = sys::call0(nr::GETPID) as usize;
    tid != 0 && sys::call3(nr::TGKILL, pid, tid as usize, 0) == -3
}

/// Whether other threads are in the engine, and do not stand aside.
pub fn others_inside() -> bool {
    let own: *const Area = area();
    let areas = AREA_LIST.iter().map(|slot| slot.load(Ordering::Acquire));
    let mut others =
        areas.take_while(|at| !at.is_null()).filter(|at| *at != TAKEN && *at != own.cast_mut());
    others.any(|at| {
        // SAFETY: areas in the list are never unmapped, and their words are read as their threads write them: whole.
        let inside = unsafe {
            let (cur, top) = ((&raw const (*at).cur).read_volatile(), (*at).top);
            cur != top && !(*at).aside.load(Ordering::SeqCst)
        };
        inside && !dead(at)
    })
}

fn reuse() -> Option<*mut Area> {
    // Looking costs a system call an area, so only when there are many.
    let full = AREA_LIST.iter().take_while(|a| !a.load(Ordering::Relaxed).is_null()).count();
    if full < 16 {
        return None;
    }
    for slot in &AREA_LIST[..full] {
        let at = slot.load(Ordering::Acquire);
        if !at.is_null()
            && at != TAKEN
            && dead(at)
            && slot.compare_exchange(at, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            // Between the look and the exchange another may have taken it and put it back: it is a living
            // thread's then. Now nobody can.
            let free = dead(at);
            if free {
                // SAFETY: the thread is gone and the exchange made us the only finder.
                unsafe { (*at).tid = 0 };
            }
            slot.store(at, Ordering::Release);
            if free {
                return Some(at);
            }
        }
    }
    None
}

fn fresh() -> Option<*mut Area> {
    let base = sys::map_anon(AREA_BYTES)?;
    let at = (base + FRAME * FRAMES) as *mut Area;
    for slot in &AREA_LIST {
        if slot
            .compare_exchange(core::ptr::null_mut(), at, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            break;
        }
    }
    Some(at)
}

/// Makes the calling thread's area. Called by the entry code, on a stack that is there for that.
pub extern "C" fn corbel_thread_new() {
    let Some(at) = reuse().or_else(fresh) else {
        sys::say(&["corbel: no memory for a thread's area; the process ends"]);
        sys::abort();
    };
    let page = at.cast::<AreaPage>();
    let top = at as usize;
    let context = crate::table::main_context();
    // SAFETY: the page is mapped (AREA_BYTES covers it) and nobody else's.
    unsafe {
        (*page).this = at;
        *at = Area {
            owner: fs_base(),
            cur: top,
            top,
            fds: (*context).fds,
            pending: 0,
            vforks: 0,
            vfork_return: [0; VFORKS],
            vfork_cur: [0; VFORKS],
            vfork_mask: [0; VFORKS],
            context,
            tid: sys::call0(nr::GETTID) as u32,
            saved_mask: 0,
            signal: 0,
            info: [0; 16],
            raw: 0,
            raw_return: [0; 256],
            vfork_raw: [0; VFORKS],
            aside: AtomicBool::new(false),
            identity: Identity::UNKNOWN,
            flock: [0; 4],
        };
    }
    // ARCH_SET_GS: once a thread, so the portable way will do.
    sys::call2(nr::ARCH_PRCTL, 0x1001, top);
    // SAFETY: as above.
    crate::session::note_thread(unsafe { (*at).tid });
    crate::strict::arm();
}
