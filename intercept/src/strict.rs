//! The net of the strict mode: Syscall User Dispatch.
//!
//! A thread that is *armed* gets SIGSYS at every `syscall` instruction outside this library's text:
//! in the program itself, in generated code, in libraries without a site table. The handler only
//! sets `rip` to the entry (entry.rs) with `rcx` as a stub would set it, so that both ways share one
//! path. What the entry lets through is made in this library's text ([`entry::STRICT`]), since the
//! stubs are outside.
//!
//! The kernel forgets it for every new thread, process and image: [`arm`] is called for each. A
//! vfork child is not armed: exec is near. SIGSYS must never be blocked, or the kernel ends the
//! process: it is taken out of masks that the program sets.
//!
//! [`entry::STRICT`]: crate::entry::STRICT
#![allow(unsafe_code)]

use core::arch::global_asm;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::calls::{CLASS, Reply};
use crate::entry::{self, PUT_OFF, Regs, corbel_entry_whole, corbel_restorer};
use crate::path::Stop;
use crate::signal::{
    Action, SA_NODEFER, SA_ONSTACK, SA_RESTORER, SA_SIGINFO, SIG_DFL, SIG_IGN, SIGSYS,
};
use crate::sys::{self, err, nr};
use crate::{mem, session};

const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
const DISPATCH_ON: usize = 1;
/// `si_code` of a SIGSYS that Syscall User Dispatch raises.
const SYS_USER_DISPATCH: i32 = 2;
const RT_SIGRETURN: usize = 15;
const SIG_UNBLOCK: usize = 1;
const BIT: u64 = 1 << (SIGSYS - 1);

/// Registers in the kernel's `ucontext` of x86-64.
const UC_RAX: usize = 144;
const UC_RCX: usize = 152;
const UC_RIP: usize = 168;

/// What the program set for SIGSYS: it is told so, and gets those that somebody sends.
static OWN: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

global_asm!(
    ".hidden __ehdr_start",
    ".text",
    ".globl corbel_image",
    ".hidden corbel_image",
    ".type corbel_image,@function",
    "corbel_image:",
    "lea rax, [rip + __ehdr_start]",
    "ret",
);

// SAFETY: the label of the assembly above.
unsafe extern "C" {
    /// Where this library is mapped.
    fn corbel_image() -> usize;
}

/// Where this library is mapped.
pub fn image() -> usize {
    // SAFETY: a function of ours that gives an address.
    unsafe { corbel_image() }
}

/// Whether the mode is on in this process.
#[inline(always)]
pub fn on() -> bool {
    entry::STRICT.load(Ordering::Relaxed) != 0
}

/// Begin and length of this library's executable segment.
fn text() -> Option<(usize, usize)> {
    let base = image();
    let word = |at: usize| -> usize {
        // SAFETY: the ELF header and the program headers behind it are mapped: the loader read them.
        unsafe { (at as *const usize).read_unaligned() }
    };
    let (first, count) = (base + word(base + 32), word(base + 56) & 0xffff);
    let mut headers = (0..count.min(32)).map(|i| first + i * 56);
    // PT_LOAD (1) with PF_X (1).
    let header = headers.find(|h| word(*h) as u32 == 1 && (word(*h) >> 32) & 1 != 0)?;
    Some((base + word(header + 16), word(header + 40)))
}

/// Switches the mode on, for good, and arms the calling thread.
pub fn begin() {
    if text().is_none() {
        return;
    }
    let action = Action {
        handler: caught as *const () as usize,
        flags: SA_RESTORER | SA_SIGINFO | SA_ONSTACK | SA_NODEFER,
        restorer: corbel_restorer as *const () as usize,
        mask: 0,
    };
    sys::call4(nr::RT_SIGACTION, SIGSYS, (&raw const action) as usize, 0, 8);
    let own = BIT;
    sys::call4(nr::RT_SIGPROCMASK, SIG_UNBLOCK, (&raw const own) as usize, 0, 8);
    CLASS[nr::RT_SIGPROCMASK].store(2, Ordering::Relaxed);
    entry::learn_registers();
    entry::STRICT.store(1, Ordering::SeqCst);
    arm();
}

/// Arms the calling thread, if the mode is on.
pub fn arm() {
    if !on() {
        return;
    }
    let Some((begin, len)) = text() else { return };
    // No selector: what is outside the range is always caught.
    sys::call6(nr::PRCTL, PR_SET_SYSCALL_USER_DISPATCH, DISPATCH_ON, begin, len, 0, 0);
}

/// The handler. Runs on the application's stack and touches nothing but the context.
extern "C" fn caught(signal: usize, info: *const i32, context: *mut u8) {
    // SAFETY: the kernel passes a siginfo (si_code is its third int) and a ucontext, whose
    // registers are where the constants say; a handler may change them.
    unsafe {
        if *info.add(2) != SYS_USER_DISPATCH {
            sent(signal, info, context);
            return;
        }
        let register = |at: usize| context.add(at).cast::<usize>();
        let rip = *register(UC_RIP);
        if *register(UC_RAX) == RT_SIGRETURN {
            // The stack is as the program's own way back left it; ours makes the call.
            *register(UC_RIP) = corbel_restorer as *const () as usize;
            return;
        }
        *register(UC_RCX) = rip - 2;
        *register(UC_RIP) = corbel_entry_whole as *const () as usize;
    }
    session::counters().trapped.fetch_add(1, Ordering::Relaxed);
}

/// A SIGSYS that is not ours.
fn sent(signal: usize, info: *const i32, context: *mut u8) {
    match OWN[0].load(Ordering::Acquire) {
        SIG_IGN => {}
        SIG_DFL => crate::signal::fatal(signal, info, 0),
        handler => {
            // SAFETY: the program gave this address as a handler; with or without SA_SIGINFO it
            // may be called with all three arguments.
            let handler: extern "C" fn(usize, *const i32, *mut u8) =
                unsafe { core::mem::transmute(handler) };
            handler(signal, info, context);
        }
    }
}

/// `rt_sigaction` for SIGSYS: noted, but the kernel keeps our handler.
pub fn sigaction(new: usize, old: usize) -> Result<isize, isize> {
    let [handler, flags, restorer, mask] = OWN.each_ref().map(|w| w.load(Ordering::Acquire));
    let before = Action { handler, flags, restorer, mask: mask as u64 };
    if new != 0 {
        let a: Action = mem::get(new).map_err(|_| err::FAULT)?;
        for (word, value) in OWN.iter().zip([a.handler, a.flags, a.restorer, a.mask as usize]) {
            word.store(value, Ordering::Release);
        }
    }
    if old != 0 {
        mem::put(old, &before).map_err(|_| err::FAULT)?;
    }
    Ok(0)
}

/// `rt_sigprocmask`, without SIGSYS in what is blocked.
pub fn sigprocmask(r: &Regs) -> Reply {
    let (how, set) = (r.rdi, r.rsi);
    if set == 0 || how == SIG_UNBLOCK || r.r10 != 8 {
        return Err(Stop::Kernel);
    }
    let mask: u64 = mem::get(set)?;
    if mask & BIT == 0 {
        return Err(Stop::Kernel);
    }
    let mask = mask & !BIT;
    let at = (&raw const mask) as usize;
    // While a signal is put off the mask is not the program's.
    match entry::unless_put_off(&[nr::RT_SIGPROCMASK, how, at, r.rdx, 8, 0, 0]) {
        PUT_OFF => Err(Stop::Flush),
        ret => Ok(ret),
    }
}
