//! Writes the jumps: each system call site of libc and the loader goes to a stub of its own. (Of programs and
//! other libraries see objects.rs.)
//!
//! [`format::stub`] says what a stub is. Mostly `corbel run` has written jumps and stubs already, and they are
//! mapped ([`lay_over`]); else they are written here. The tables (format.rs) were made offline, by
//! build-id; a library with another build-id is left alone and the mount serves the program.
#![allow(unsafe_code)]

use crate::format::{self, PAGE, SITES, STUB, STUBS_BELOW, Site, Table, WINDOW_MAX, WINDOW_MIN};
use crate::sys::{self, nr};
use crate::{entry, session};

/// How far from a library its stubs may be (rel32, with room to spare).
const REACH: usize = 1 << 30;

/// First bytes of an ELF file.
const ELF: usize = 0x464c_457f;
/// Objects of the loader looked at.
const MAPS_MAX: usize = 4096;

/// The loader's `link_map`, as far as debuggers know it.
#[repr(C)]
#[derive(Debug)]
pub struct LinkMap {
    /// What is added to the addresses in the file.
    pub addr: usize,
    /// Path, empty for the program itself.
    pub name: *const u8,
    dynamic: usize,
    next: *const LinkMap,
    prev: *const LinkMap,
}

/// Part of a file that is mapped for execution.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Where it lies.
    pub at: usize,
    /// Bytes.
    pub len: usize,
    /// Where in the file it begins.
    pub offset: usize,
}

/// Program headers: address of the first, how many.
type Headers = (usize, usize);
const HEADER: usize = 56;

fn word(at: usize) -> usize {
    // SAFETY: called on the auxiliary vector, program headers and dynamic sections of mapped
    // objects, which the loader has read before us.
    unsafe { (at as *const usize).read_unaligned() }
}

fn half(at: usize) -> usize {
    // SAFETY: as in `word`.
    unsafe { (at as *const u32).read_unaligned() as usize }
}

/// The program's headers, by the auxiliary vector.
fn program(auxv: usize) -> Option<Headers> {
    let (mut phdr, mut count) = (0, 0);
    let mut at = auxv;
    for _ in 0..64 {
        match word(at) {
            0 => break,
            3 => phdr = word(at + 8),
            5 => count = word(at + 8),
            _ => {}
        }
        at += 16;
    }
    (phdr != 0).then_some((phdr, count.min(64)))
}

/// Head of the link map, found through the program's DT_DEBUG.
fn link_map((phdr, count): Headers) -> Option<*const LinkMap> {
    let headers = (0..count).map(|i| phdr + i * HEADER);
    let bias = headers.clone().find(|h| half(*h) == 6).map_or(0, |h| phdr - word(h + 16));
    let dynamic = headers.clone().find(|h| half(*h) == 2).map(|h| word(h + 16) + bias)?;
    let debug = (0..256).map(|i| dynamic + i * 16).take_while(|d| word(*d) != 0);
    let debug = debug.into_iter().find(|d| word(*d) == 21).map(|d| word(d + 8))?;
    (debug != 0).then(|| word(debug + 8) as *const LinkMap)
}

/// Build-id note of the object mapped at `base`.
fn build_id(base: usize) -> Option<&'static [u8]> {
    if half(base) != ELF {
        return None;
    }
    let (phoff, count) = (word(base + 32), half(base + 56) & 0xffff);
    for header in (0..count.min(64)).map(|i| base + phoff + i * 56) {
        if half(header) != 4 {
            continue;
        }
        let (mut at, len) = (base + word(header + 16), word(header + 32));
        let end = at + len;
        while at + 12 <= end {
            let (name, desc, kind) = (half(at), half(at + 4), half(at + 8));
            let body = at + 12 + ((name + 3) & !3);
            if kind == 3 && name == 4 && body + desc <= end {
                // SAFETY: within the mapped note segment.
                return Some(unsafe { core::slice::from_raw_parts(body as *const u8, desc) });
            }
            at = body + ((desc + 3) & !3);
        }
    }
    None
}

/// Writable memory within reach of the `size` bytes at `base`: below, or, where a program lies at the low
/// end of all addresses, just below or far above, out of the way of its heap.
pub fn near(base: usize, size: usize, len: usize) -> Option<usize> {
    let below = (1..64).filter_map(|step| base.checked_sub(step * (REACH / 64)));
    let just_below = base.checked_sub(len + PAGE).filter(|at| *at > REACH / 1024);
    let above = (4..24).rev().map(|step| base + size + step * (REACH / 16));
    for hint in below.chain(just_below).chain(above) {
        let hint = hint & !(PAGE - 1);
        // MAP_FIXED_NOREPLACE: taken or not at all.
        let at = sys::call6(nr::MMAP, hint, len, sys::PROT_RW, 0x10_0022, usize::MAX, 0);
        if !sys::failed(at) {
            let at = at as usize;
            if at.abs_diff(base) < REACH * 7 / 4 && at.abs_diff(base + size) < REACH * 7 / 4 {
                return Some(at);
            }
            sys::call2(nr::MUNMAP, at, len);
        }
    }
    None
}

/// Writes machine code into our own mapping.
pub fn write(at: usize, bytes: &[u8]) {
    // SAFETY: within the stub area or the windows of a library, which are writable until they are sealed.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
}

/// Writes the stub of a window.
pub fn write_stub(stub: usize, entry_slot: usize, window: usize, site: &Site) {
    let (len, split) = (site.len as usize, site.syscall as usize);
    // SAFETY: the window lies in the library's mapped text (the table's build-id is the library's).
    let text = unsafe { core::slice::from_raw_parts(window as *const u8, len) };
    let at = [stub as i64, entry_slot as i64, window as i64];
    let (code, len) = format::stub(text, split, at);
    write(stub, &code[..len]);
}

/// Writes the jump from a window to its stub.
pub fn write_jump(window: usize, stub: usize, site: &Site) {
    write(window, &format::jump(window as i64, stub as i64));
    // What is left of the window is never reached; int3 says so.
    let left = usize::from(site.len) - 5;
    write(window + 5, &[0xcc; WINDOW_MAX as usize][..left]);
}

/// Maps the text that `corbel run` has patched over the library's: a few calls, where writing the jumps
/// makes a copy of each page that has one. False if something lies where the stubs must.
fn lay_over(base: usize, table: &Table) -> bool {
    let header = session::header();
    let fd = header.overlay;
    let Some((low, high)) = format::text_range(&table.sites[..(table.count as usize).min(SITES)])
    else {
        return false;
    };
    let (stubs, text) = (table.stubs_bytes as usize, table.text_bytes as usize);
    if stubs == 0 || text != high - low || base < STUBS_BELOW {
        return false;
    }
    if sys::fstat(fd).is_none_or(|stat| [stat.ino, stat.dev] != header.overlay_id) {
        return false;
    }
    let area = base - STUBS_BELOW;
    // MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    let pointer = sys::call6(nr::MMAP, area, PAGE, sys::PROT_RW, 0x10_0022, usize::MAX, 0);
    if pointer as usize != area {
        if !sys::failed(pointer) {
            sys::call2(nr::MUNMAP, pointer as usize, PAGE);
        }
        return false;
    }
    write(area, &(entry::corbel_entry as *const () as usize).to_le_bytes());
    sys::call3(nr::MPROTECT, area, PAGE, 1);
    let map = |at: usize, len: usize, flags: usize, from: u32| {
        // PROT_READ | PROT_EXEC
        sys::call6(nr::MMAP, at, len, 5, flags, fd as usize, from as usize) as usize == at
    };
    // MAP_PRIVATE with MAP_FIXED_NOREPLACE, and with MAP_FIXED.
    if !map(area + PAGE, stubs, 0x10_0002, table.stubs_at) {
        sys::call2(nr::MUNMAP, area, PAGE);
        return false;
    }
    if !map(base + low, text, 0x12, table.text_at) {
        sys::call2(nr::MUNMAP, area, PAGE + stubs);
        return false;
    }
    true
}

fn valid(base: usize, site: &Site) -> bool {
    let (len, split) = (site.len, site.syscall);
    (WINDOW_MIN..=WINDOW_MAX).contains(&len) && split + 2 <= len && {
        let at = base + site.at as usize + split as usize;
        half(at) & 0xffff == 0x050f
    }
}

/// Patches one library; false when there is no memory near it.
fn patch(base: usize, table: &Table) -> bool {
    let sites = &table.sites[..(table.count as usize).min(SITES)];
    if lay_over(base, table) {
        return true;
    }
    let Some((low, high)) = format::text_range(sites) else { return false };
    if !sites.iter().all(|s| valid(base, s)) {
        return false;
    }
    let area_len = (sites.len() * STUB + 64 + 4095) & !4095;
    let Some(area) = near(base, high, area_len) else { return false };
    // The first words of the area: where the stubs jump through.
    write(area, &(entry::corbel_entry as *const () as usize).to_le_bytes());
    let (low, high) = (base + low, base + high);
    // Readable, writable and executable for the moment: another thread may be running there.
    if sys::call3(nr::MPROTECT, low, high - low, 7) != 0 {
        sys::call2(nr::MUNMAP, area, area_len);
        return false;
    }
    for (i, site) in sites.iter().enumerate() {
        let window = base + site.at as usize;
        let stub = area + 64 + i * STUB;
        write_stub(stub, area, window, site);
    }
    sys::call3(nr::MPROTECT, area, area_len, 5);
    for (i, site) in sites.iter().enumerate() {
        write_jump(base + site.at as usize, area + 64 + i * STUB, site);
    }
    sys::call3(nr::MPROTECT, low, high - low, 5);
    true
}

/// What the loader has mapped, the program first.
fn maps(auxv: usize) -> impl Iterator<Item = &'static LinkMap> {
    let mut next = program(auxv).and_then(link_map).unwrap_or(core::ptr::null());
    let one = move || {
        // SAFETY: a node of the loader's list, which does not change while constructors run.
        let map = unsafe { next.as_ref() }?;
        next = map.next;
        Some(map)
    };
    core::iter::from_fn(one).take(MAPS_MAX)
}

/// The table of the library mapped at `base`, if it has one.
fn table_of(base: usize) -> Option<&'static Table> {
    let id = build_id(base)?;
    session::tables().find(|t| t.build_id_len as usize == id.len() && &t.build_id[..id.len()] == id)
}

/// Patches what has a table; the number of libraries patched.
pub fn patch_all(auxv: usize) -> usize {
    // The program itself (first, with an empty name) and the vDSO have no table.
    let libraries = maps(auxv).filter(|map| map.addr != 0);
    libraries.filter(|map| table_of(map.addr).is_some_and(|table| patch(map.addr, table))).count()
}

/// Whatever else is mapped, and its parts that may be executed.
pub fn objects(
    auxv: usize,
) -> impl Iterator<Item = (&'static LinkMap, impl Iterator<Item = Segment>)> {
    maps(auxv).enumerate().filter_map(move |(i, map)| {
        let headers = if i == 0 {
            program(auxv)?
        } else if map.addr == 0 || half(map.addr) != ELF || table_of(map.addr).is_some() {
            return None;
        } else {
            (map.addr + word(map.addr + 32), half(map.addr + 56) & 0xffff)
        };
        Some((map, executable(headers, map.addr)))
    })
}

/// Segments that may be executed and not be written to.
fn executable((first, count): Headers, bias: usize) -> impl Iterator<Item = Segment> {
    let headers = (0..count.min(64)).map(move |i| first + i * HEADER);
    // PT_LOAD with PF_X and without PF_W.
    let code = headers.filter(|h| half(*h) == 1 && half(*h + 4) & 3 == 1);
    code.map(move |h| Segment { at: bias + word(h + 16), len: word(h + 32), offset: word(h + 8) })
}
