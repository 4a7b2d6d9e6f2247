//! Signals: the application's handlers run through a wrapper (entry.rs) that puts them off while
//! the thread is in the engine, and that turns a fault on application memory into EFAULT.
//!
//! What is put off is at most one signal a stay: the wrapper blocks all others in the interrupted
//! context; at the way out the signal is raised again and the mask put back.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicUsize, Ordering};

use crate::entry::{Regs, corbel_restorer, corbel_sigwrap};
use crate::mem;
use crate::sys::{self, err, nr};
use crate::thread::area;

const SIGNALS: usize = 65;
const SIGSEGV: usize = 11;
const SIGBUS: usize = 7;
pub const SIGSYS: usize = 31;
/// Signals that a fault raises: SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV, SIGSYS.
const FAULTS: u64 = 1 << 3 | 1 << 4 | 1 << (SIGBUS - 1) | 1 << 7 | 1 << (SIGSEGV - 1) | 1 << 30;
const SIG_SETMASK: usize = 2;
pub const SIG_DFL: usize = 0;
pub const SIG_IGN: usize = 1;
pub const SA_RESTORER: usize = 0x0400_0000;
pub const SA_SIGINFO: usize = 4;
pub const SA_ONSTACK: usize = 0x0800_0000;
pub const SA_NODEFER: usize = 0x4000_0000;
const SA_RESETHAND: usize = 0x8000_0000;

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Action {
    pub handler: usize,
    pub flags: usize,
    pub restorer: usize,
    pub mask: u64,
}

/// The application's handlers, by signal.
pub static HANDLERS: [AtomicUsize; SIGNALS] = [const { AtomicUsize::new(0) }; SIGNALS];

/// For SIGSEGV and SIGBUS without a handler of the application: what would have happened.
pub extern "C" fn fatal(signal: usize, info: *const i32, _context: usize) {
    let default = Action { handler: SIG_DFL, ..Action::default() };
    sys::call4(nr::RT_SIGACTION, signal, (&raw const default) as usize, 0, 8);
    // SAFETY: the kernel passes a siginfo; the third int is si_code.
    let code = unsafe { *info.add(2) };
    if code <= 0 {
        // Sent, not faulted: it will not come again by itself.
        let pid = sys::call0(nr::GETPID) as usize;
        sys::call3(nr::TGKILL, pid, sys::call0(nr::GETTID) as usize, signal);
    }
}

fn wrap() -> usize {
    corbel_sigwrap as *const () as usize
}

/// Takes over SIGSEGV and SIGBUS where nobody has a handler for them yet, and wraps the handlers
/// that other constructors may have set.
pub fn init() {
    for (signal, own) in HANDLERS.iter().enumerate().skip(1) {
        if signal == 9 || signal == 19 || signal == 32 || signal == 33 {
            continue;
        }
        let mut old = Action::default();
        sys::call4(nr::RT_SIGACTION, signal, 0, (&raw mut old) as usize, 8);
        let fault = signal == SIGSEGV || signal == SIGBUS;
        let new = match old.handler {
            SIG_DFL if fault => {
                own.store(fatal as *const () as usize, Ordering::Release);
                Action {
                    handler: wrap(),
                    flags: SA_RESTORER | SA_SIGINFO | SA_ONSTACK | SA_NODEFER,
                    restorer: corbel_restorer as *const () as usize,
                    mask: 0,
                }
            }
            SIG_DFL | SIG_IGN => continue,
            handler => {
                own.store(handler, Ordering::Release);
                Action { handler: wrap(), ..old }
            }
        };
        sys::call4(nr::RT_SIGACTION, signal, (&raw const new) as usize, 0, 8);
    }
}

/// `rt_sigaction`: the application sees its own handlers, the kernel the wrapper.
pub fn sigaction(r: &Regs) -> Result<isize, isize> {
    let (signal, new, old) = (r.rdi as u32 as usize, r.rsi, r.rdx);
    let raw = || sys::call4(nr::RT_SIGACTION, signal, new, old, r.r10);
    if signal == 0 || signal >= SIGNALS || r.r10 != 8 || signal == 9 || signal == 19 {
        return Ok(raw());
    }
    if signal == SIGSYS && crate::strict::on() {
        return crate::strict::sigaction(new, old);
    }
    // A vfork child has its own actions but our memory: no bookkeeping; exec is near.
    if crate::table::in_vfork() {
        return Ok(raw());
    }
    let before = HANDLERS[signal].load(Ordering::Acquire);
    let fault = signal == SIGSEGV || signal == SIGBUS;
    let mut handler = before;
    let mut new_at = 0;
    let mut passed: Action;
    if new != 0 {
        passed = mem::get(new).map_err(|_| err::FAULT)?;
        match passed.handler {
            SIG_DFL if fault => {
                handler = fatal as *const () as usize;
                passed = Action {
                    handler: wrap(),
                    flags: SA_RESTORER | SA_SIGINFO | SA_ONSTACK | SA_NODEFER,
                    restorer: corbel_restorer as *const () as usize,
                    mask: 0,
                };
            }
            SIG_DFL | SIG_IGN => {}
            h => {
                handler = h;
                passed.handler = wrap();
                if crate::strict::on() {
                    passed.mask &= !(1 << (SIGSYS - 1));
                    passed.flags |= SA_RESTORER;
                    passed.restorer = corbel_restorer as *const () as usize;
                }
            }
        }
        HANDLERS[signal].store(handler, Ordering::Release);
        new_at = (&raw const passed) as usize;
    }
    let mut previous = Action::default();
    let ret = sys::call4(nr::RT_SIGACTION, signal, new_at, (&raw mut previous) as usize, 8);
    if ret < 0 {
        HANDLERS[signal].store(before, Ordering::Release);
        return Ok(ret);
    }
    if old != 0 {
        if previous.handler == wrap() {
            previous.handler = before;
            if before == fatal as *const () as usize {
                previous = Action::default();
            }
        }
        mem::put(old, &previous).map_err(|_| err::FAULT)?;
    }
    Ok(ret)
}

/// Called by the wrapper when the thread is in the engine.
pub extern "C" fn defer(signal: usize, info: *const [u64; 16], context: *mut u8) {
    let area = area();
    if FAULTS >> (signal - 1) & 1 != 0 {
        // A fault in the engine itself, or a signal that pretends to be one: not to be put off.
        fatal(signal, info.cast(), 0);
        return;
    }
    let mut action = Action::default();
    sys::call4(nr::RT_SIGACTION, signal, 0, (&raw mut action) as usize, 8);
    if action.handler == SIG_DFL && action.flags & SA_RESETHAND != 0 {
        // This delivery has ended the handler, which has not run yet.
        action.handler = wrap();
        sys::call4(nr::RT_SIGACTION, signal, (&raw const action) as usize, 0, 8);
    }
    // SAFETY: uc_sigmask is at 296 in the kernel's ucontext of x86-64, which we were given. The kernel writes the
    // siginfo for handlers that ask for it; for others whatever was on the stack stands there.
    unsafe {
        let mask = context.add(296).cast::<u64>();
        area.saved_mask = *mask;
        area.signal = signal as u32;
        area.info = if action.flags & SA_SIGINFO != 0 { *info } else { sent(signal) };
        *mask |= !FAULTS;
    }
    area.pending = 1;
}

/// A siginfo as `kill` makes it (SI_USER), from nobody.
const fn sent(signal: usize) -> [u64; 16] {
    let mut info = [0; 16];
    info[0] = signal as u64;
    info
}

/// Sets the thread's signal mask.
pub fn set_mask(mask: u64) {
    sys::call4(nr::RT_SIGPROCMASK, SIG_SETMASK, (&raw const mask) as usize, 0, 8);
}

/// Blocks all signals that can be put off, and leaves what was put off to the kernel, which has it wait; the mask to
/// be set again. For a vfork: the child begins with this thread's mask, and what waits for this thread is not for it.
pub fn block() -> u64 {
    let (all, mut mask) = (!FAULTS, 0u64);
    let (new, old) = ((&raw const all) as usize, (&raw mut mask) as usize);
    sys::call4(nr::RT_SIGPROCMASK, SIG_SETMASK, new, old, 8);
    let area = area();
    if area.pending != 0 {
        mask = area.saved_mask;
        area.pending = 0;
        raise(area.signal as usize, &area.info);
    }
    mask
}

/// In a child of fork: what was put off is its parent's.
pub fn forked() {
    let area = area();
    if area.pending != 0 {
        area.pending = 0;
        set_mask(area.saved_mask);
    }
}

/// Raises what was put off. Runs on the application's stack, out of the engine.
pub extern "C" fn flush() {
    let area = area();
    let (signal, mask, info) = (area.signal as usize, area.saved_mask, area.info);
    if area.pending == 0 {
        return;
    }
    area.pending = 0;
    raise(signal, &info);
    if mask >> (signal - 1) & 1 != 0 {
        // It came where a call lets in for its duration what is blocked else (ppoll).
        set_mask(!FAULTS & !(1 << (signal - 1)));
    }
    set_mask(mask);
}

fn raise(signal: usize, info: &[u64; 16]) {
    let pid = sys::call0(nr::GETPID) as usize;
    let tid = sys::call0(nr::GETTID) as usize;
    let raised = sys::call4(nr::RT_TGSIGQUEUEINFO, pid, tid, signal, info.as_ptr() as usize);
    if sys::failed(raised) {
        // Without what came along is better than not at all.
        sys::call3(nr::TGKILL, pid, tid, signal);
    }
}
