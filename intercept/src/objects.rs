//! Programs and libraries that make system calls by themselves: `liburing`, what was linked with it
//! statically, runtimes of other languages. Their calls are caught like those of libc: at the start of a program, and
//! whenever a file is mapped for execution (`dlopen`).
//!
//! Which calls a file has stands in the session ([`Object`]), by the file's identity. What does not stand there
//! yet is asked of the holder in `corbel run`, which disassembles it or has done so before
//! (corbel/src/run/objects.rs). What may make a ring of io_uring in a way that cannot be caught makes this
//! process one with a ring.
#![allow(unsafe_code)]

use client::mutex::Mutex;

use crate::calls::limit;
use crate::format::{ANY_NUMBER, ASKED_MAX, Call, STUB, Site, WINDOW_MAX, WINDOW_MIN};
use crate::patch::{self, LinkMap, Segment};
use crate::sys::{self, Stat, nr, o};
use crate::{calls, entry, format, holder, ring, session, strict, table};

const PAGE: usize = format::PAGE;
const S_IFMT: u32 = 0o170_000;
const S_IFREG: u32 = 0o100_000;
/// `io_uring_setup`, and how its number looks behind the first byte of an instruction that loads it.
const RING: u16 = nr::IO_URING_SETUP as u16;
const RING_LOADED: [u8; 4] = [0xa9, 1, 0, 0];
/// Places of stubs remembered, to be used again where a library comes to lie where it was before.
const AREAS: usize = 64;

/// Address of a text, and where its stubs are and how long.
type Area = [usize; 3];
static PLACES: Mutex<[Area; AREAS]> = Mutex::new([[0; 3]; AREAS]);

/// A file as the session knows it.
type Key = [u64; 4];

fn key(stat: &Stat) -> Option<Key> {
    let changed = (stat.ctime[0] as u64).wrapping_mul(1_000_000_000) + stat.ctime[1] as u64;
    (stat.mode & S_IFMT == S_IFREG).then_some([stat.dev, stat.ino, stat.size as u64, changed])
}

/// The file behind a name that the loader knows; empty for the program itself.
fn path_of(map: &LinkMap) -> Option<*const u8> {
    // SAFETY: the loader's names are strings that live as long as the object.
    match unsafe { map.name.as_ref() }? {
        0 => Some(c"/proc/self/exe".as_ptr().cast()),
        // The vDSO has no file.
        b'/' | b'.' => Some(map.name),
        _ => None,
    }
}

fn stat(path: *const u8) -> Option<Key> {
    let mut stat = Stat::default();
    (sys::call2(nr::STAT, path as usize, (&raw mut stat) as usize) == 0).then_some(())?;
    key(&stat)
}

/// A file that the session does not know yet.
#[derive(Clone, Copy)]
struct Unknown {
    key: Key,
    fd: i32,
    /// Which of the loader's it is.
    nth: usize,
}

/// Looks at all that the loader has mapped, but for libc and itself.
pub fn loaded(auxv: usize) {
    // Many at a time: asking takes longer than answering.
    let mut unknown = [Unknown { key: [0; 4], fd: -1, nth: 0 }; ASKED_MAX];
    let mut count = 0;
    for (nth, (map, segments)) in patch::objects(auxv).enumerate() {
        if map.addr == strict::image() {
            continue;
        }
        let Some((path, key)) = path_of(map).and_then(|path| Some((path, stat(path)?))) else {
            continue;
        };
        if session::object(&key).is_some() {
            segments.for_each(|segment| catch(&key, &segment));
            continue;
        }
        let flags = (o::CLOEXEC | o::NONBLOCK) as usize;
        let fd = limit::with_room(|| sys::call3(nr::OPEN, path as usize, flags, 0));
        unknown[count] = Unknown { key, fd: fd as i32, nth };
        count += 1;
        if count == ASKED_MAX {
            ask(auxv, &unknown);
            count = 0;
        }
    }
    ask(auxv, &unknown[..count]);
}

/// Has files entered in the session's table, and catches their calls.
fn ask(auxv: usize, files: &[Unknown]) {
    let Some(last) = files.last() else { return };
    let mut fds = [-1; ASKED_MAX];
    let mut count = 0;
    for file in files.iter().filter(|file| file.fd >= 0) {
        fds[count] = file.fd;
        count += 1;
    }
    holder::look_at(&fds[..count]);
    for fd in &fds[..count] {
        sys::call1(nr::CLOSE, *fd as usize);
    }
    for (nth, (_, segments)) in patch::objects(auxv).enumerate().take(last.nth + 1) {
        if let Some(file) = files.iter().find(|file| file.nth == nth) {
            segments.for_each(|segment| catch(&file.key, &segment));
        }
    }
}

/// Part of a file has been mapped for execution.
pub fn mapped(segment: &Segment, fd: i32) {
    let Some(key) = sys::fstat(fd).as_ref().and_then(key) else { return };
    // libc and the loader have tables of their own; a second libc is somebody's own business.
    if session::object(&key).is_none() {
        holder::look_at(&[fd]);
    }
    catch(&key, segment);
}

/// Catches the calls in a segment.
fn catch(key: &Key, segment: &Segment) {
    let Some(object) = session::object(key) else {
        // There is nobody left to ask, or no room: only the worst is looked for.
        // SAFETY: a mapped segment of a file, which is long enough or it could not run.
        let text = unsafe { core::slice::from_raw_parts(segment.at as *const u8, segment.len) };
        let loads = |w: &[u8]| w[1..] == RING_LOADED && w[0] & 0xf8 == 0xb8;
        if text.windows(1 + RING_LOADED.len()).any(loads) {
            ring::foresee();
        }
        return;
    };
    let calls = session::calls(object);
    let caught = patch_all(segment, calls);
    let unseen = object.unseen.load(core::sync::atomic::Ordering::Relaxed) != 0;
    if unseen || !caught && calls.iter().any(|call| call.number == RING) {
        ring::foresee();
    }
}

/// Whether a call comes to the engine at all. In the strict mode all do, and better by a jump.
fn matters(call: &Call) -> bool {
    call.number == ANY_NUMBER || strict::on() || calls::is_looked_at(call.number.into())
}

/// Where the window of a call lies, if it is as it was when the file was looked at.
fn window(segment: &Segment, call: &Call) -> Option<usize> {
    let skip = (call.at as usize).checked_sub(segment.offset)?;
    let good = (WINDOW_MIN..=WINDOW_MAX).contains(&call.len)
        && usize::from(call.syscall) + 2 <= usize::from(call.len)
        && skip.checked_add(call.len.into())? <= segment.len;
    if !good {
        return None;
    }
    let at = segment.at + skip;
    // SAFETY: within the segment.
    let bytes = unsafe { core::slice::from_raw_parts(at as *const u8, call.len.into()) };
    (base::checksum::portable(0, bytes) == call.check).then_some(at)
}

/// Writes jumps over the calls of a segment; false if that was not possible for all of them.
fn patch_all(segment: &Segment, calls: &[Call]) -> bool {
    let inside =
        |call: &&Call| (segment.offset..segment.offset + segment.len).contains(&(call.at as usize));
    let calls = || calls.iter().filter(inside).filter(|call| matters(call));
    let (Some(first), Some(last)) = (calls().next(), calls().next_back()) else { return true };
    if calls().any(|call| window(segment, call).is_none()) {
        return false;
    }
    let address = |call: &Call| segment.at + call.at as usize - segment.offset;
    let low = address(first) & !(PAGE - 1);
    let high = (address(last) + usize::from(last.len)).next_multiple_of(PAGE);
    let len = (64 + calls().count() * STUB).next_multiple_of(PAGE);
    let Some(area) = place(segment, len) else { return false };
    // Readable, writable and executable for the moment, as with libc.
    if sys::call3(nr::MPROTECT, low, high - low, 7) != 0 {
        return false;
    }
    entry::learn_registers();
    patch::write(area, &(entry::corbel_entry_whole as *const () as usize).to_le_bytes());
    for (i, call) in calls().enumerate() {
        let site = Site { at: call.at, len: call.len, syscall: call.syscall, reserved: 0 };
        let (window, stub) = (address(call), area + 64 + i * STUB);
        patch::write_stub(stub, area, window, &site);
        patch::write_jump(window, stub, &site);
    }
    sys::call3(nr::MPROTECT, area, len, 5);
    sys::call3(nr::MPROTECT, low, high - low, 5);
    true
}

/// Memory for stubs near a text, writable. What a library left behind that lay there before is used again.
fn place(segment: &Segment, len: usize) -> Option<usize> {
    let mut places = PLACES.lock();
    if let Some([_, area, room]) = places.iter().find(|[text, ..]| *text == segment.at)
        && *room >= len
    {
        return (sys::call3(nr::MPROTECT, *area, len, sys::PROT_RW) == 0).then_some(*area);
    }
    let area = patch::near(segment.at, segment.len, len)?;
    if let Some(free) = places.iter_mut().find(|p| p[0] == 0 || p[0] == segment.at) {
        *free = [segment.at, area, len];
    }
    Some(area)
}

/// Maps code as the application asked, and catches what is in it.
pub fn map(at: usize, len: usize, prot: usize, flags: usize, fd: usize, offset: usize) -> isize {
    let ret = sys::call6(nr::MMAP, at, len, prot, flags, fd, offset);
    // A shared mapping is the file itself.
    if !sys::failed(ret) && flags & 0xf == 2 && prot & 2 == 0 && !table::in_vfork() {
        mapped(&Segment { at: ret as usize, len, offset }, fd as i32);
    }
    ret
}
