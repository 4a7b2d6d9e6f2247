//! The library that `corbel run` loads into unmodified programs.
//!
//! It catches the file calls of libc and the loader at their system call sites and serves those
//! under the mount point by the file system object of crate `client`, in the process. It imports
//! nothing: no libc, no symbol, no thread-local storage; it makes its system calls itself.
//!
//! Reading order: patch.rs, objects.rs (how a site is caught) · entry.rs (the way in and out) · thread.rs (the
//! stack it runs on) · calls.rs (which call goes where) · table.rs (descriptors) · demote.rs (how
//! the kernel gets what is not served here) · calls/process.rs (fork, exec) · signal.rs.
//! docs/interception.md tells the whole.
#![no_std]
#![allow(unsafe_code)]

extern crate alloc;

mod calls;
mod demote;
mod entry;
mod format;
mod fsys;
mod heap;
mod holder;
mod lock;
mod mem;
mod mounts;
mod objects;
mod patch;
mod path;
mod protect;
mod ring;
mod session;
mod signal;
mod strict;
mod sys;
mod table;
mod thread;

use core::sync::atomic::Ordering;

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let place = info.location().map_or("?", |l| l.file());
    let mut digits = [0u8; 10];
    let mut line = info.location().map_or(0, |l| l.line());
    let mut at = digits.len();
    while line > 0 && at > 0 {
        at -= 1;
        digits[at] = b'0' + (line % 10) as u8;
        line /= 10;
    }
    let line = core::str::from_utf8(&digits[at..]).unwrap_or("?");
    sys::say(&["corbel: the interception library failed at ", place, ":", line]);
    sys::abort();
}

/// Of which sources it is, for `corbel bench`.
#[used]
#[unsafe(link_section = ".note.corbel")]
static BUILT_OF: base::note::Note = base::note::Note::of(env!("CORBEL_BUILT_OF"));

/// Run by the dynamic loader (glibc passes argc, argv and envp to constructors).
#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn(usize, *const usize, *const *const u8) = init;

/// Value of an environment variable, and where the auxiliary vector begins.
fn environment(envp: *const *const u8) -> (Option<&'static [u8]>, usize) {
    let mut found = None;
    let mut at = envp;
    // SAFETY: envp is the process's environment block: pointers to strings up to a null pointer,
    // with the auxiliary vector behind it (constructors run before anybody can have moved it).
    unsafe {
        while !(*at).is_null() {
            let mut len = 0;
            while *(*at).add(len) != 0 {
                len += 1;
            }
            let entry = core::slice::from_raw_parts(*at, len);
            if let Some(rest) = entry.strip_prefix(format::ENV.as_bytes())
                && let Some(value) = rest.strip_prefix(b"=")
            {
                found = Some(value);
            }
            at = at.add(1);
        }
    }
    (found, at as usize + 8)
}

extern "C" fn init(_argc: usize, _argv: *const usize, envp: *const *const u8) {
    if envp.is_null() {
        return;
    }
    let (Some(value), auxv) = environment(envp) else { return };
    let Some((config, state, slot)) = format::parse_env(value) else { return };
    if !session::map(config) || !session::reserve() {
        return;
    }
    thread::corbel_thread_new();
    table::protect(config);
    session::begin(state);
    session::note_thread(thread::tid());
    if session::header().overlay > 0 {
        table::protect(session::header().overlay);
    }
    let strict = session::header().strict != 0;
    if patch::patch_all(auxv) == 0 && !strict {
        session::counters().unpatched.fetch_add(1, Ordering::Relaxed);
        // Nothing will be served here: what came along open becomes what it is.
        calls::process::inherit(slot);
        let _ = demote::all();
        fsys::part();
        return;
    }
    signal::init();
    calls::limit::learn();
    if strict {
        strict::begin();
    }
    calls::process::inherit(slot);
    objects::loaded(auxv);
    session::counters().attached.fetch_add(1, Ordering::Relaxed);
}
