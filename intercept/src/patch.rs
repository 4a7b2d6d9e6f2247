//! Writes the jumps: each system call site of libc and the loader goes to a stub of its own.
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

/// The loader's `link_map`, as far as debuggers know it.
#[repr(C)]
struct LinkMap {
    addr: usize,
    name: *const u8,
    dynamic: usize,
    next: *const LinkMap,
    prev: *const LinkMap,
}

fn word(at: usize) -> usize {
    // SAFETY: called on the auxiliary vector, program headers and dynamic sections of mapped
    // objects, which the loader has read before us.
    unsafe { (at as *const usize).read_unaligned() }
}

fn half(at: usize) -> usize {
    // SAFETY: as in `word`.
    unsafe { (at as *const u32).read_unaligned() as usize }
}

/// Head of the link map, found through the program's DT_DEBUG.
fn link_map(auxv: usize) -> Option<*const LinkMap> {
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
    if phdr == 0 {
        return None;
    }
    let headers = (0..count.min(64)).map(|i| phdr + i * 56);
    let bias = headers.clone().find(|h| half(*h) == 6).map_or(0, |h| phdr - word(h + 16));
    let dynamic = headers.clone().find(|h| half(*h) == 2).map(|h| word(h + 16) + bias)?;
    let debug = (0..256).map(|i| dynamic + i * 16).take_while(|d| word(*d) != 0);
    let debug = debug.into_iter().find(|d| word(*d) == 21).map(|d| word(d + 8))?;
    (debug != 0).then(|| word(debug + 8) as *const LinkMap)
}

/// Build-id note of the object mapped at `base`.
fn build_id(base: usize) -> Option<&'static [u8]> {
    if half(base) != 0x464c_457f {
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

/// Executable memory within reach of `base`.
fn near(base: usize, len: usize) -> Option<usize> {
    for step in 1..64 {
        let hint = base.wrapping_sub(step * (REACH / 64)) & !4095;
        // MAP_FIXED_NOREPLACE: taken or not at all.
        let at = sys::call6(nr::MMAP, hint, len, sys::PROT_RW, 0x10_0022, usize::MAX, 0);
        if !sys::failed(at) {
            let at = at as usize;
            if at.abs_diff(base) < REACH * 3 / 2 {
                return Some(at);
            }
            sys::call2(nr::MUNMAP, at, len);
        }
    }
    None
}

/// Writes machine code into our own mapping.
fn write(at: usize, bytes: &[u8]) {
    // SAFETY: within the stub area or the windows of a library, which are writable until they are sealed.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
}

fn write_stub(stub: usize, entry_slot: usize, window: usize, site: &Site) {
    let (len, split) = (site.len as usize, site.syscall as usize);
    // SAFETY: the window lies in the library's mapped text (the table's build-id is the library's).
    let text = unsafe { core::slice::from_raw_parts(window as *const u8, len) };
    let at = [stub as i64, entry_slot as i64, window as i64];
    let (code, len) = format::stub(text, split, at);
    write(stub, &code[..len]);
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
    let Some(area) = near(base, area_len) else { return false };
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
        let window = base + site.at as usize;
        write(window, &format::jump(window as i64, (area + 64 + i * STUB) as i64));
        // What is left of the window is never reached; int3 says so.
        let left = usize::from(site.len) - 5;
        write(window + 5, &[0xcc; WINDOW_MAX as usize][..left]);
    }
    sys::call3(nr::MPROTECT, low, high - low, 5);
    true
}

/// Patches what has a table; the number of libraries patched.
pub fn patch_all(auxv: usize) -> usize {
    let mut patched = 0;
    let mut map = match link_map(auxv) {
        Some(map) => map,
        None => return 0,
    };
    for _ in 0..4096 {
        if map.is_null() {
            break;
        }
        // SAFETY: a node of the loader's list, which does not change while constructors run.
        let node = unsafe { &*map };
        map = node.next;
        // The program itself (first, with an empty name) and the vDSO have no table.
        if node.addr == 0 {
            continue;
        }
        let Some(id) = build_id(node.addr) else { continue };
        let table = session::tables()
            .find(|t| t.build_id_len as usize == id.len() && &t.build_id[..id.len()] == id);
        if let Some(table) = table
            && patch(node.addr, table)
        {
            patched += 1;
        }
    }
    patched
}
