//! The session memory (format.rs), as this process sees it.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::format::{
    CALLS, CALLS_AT, COUNTERS_AT, Call, Counters, Header, INODES, INODES_AT, MAGIC, OBJECT_PLACES,
    OBJECTS, OBJECTS_AT, OFDS, OFDS_AT, Object, Ofd, SESSION_BYTES, SLOTS, SLOTS_AT, Slot,
    TABLE_BYTES, TABLES, TABLES_AT, THREADS, THREADS_AT, Table, VERSION, object_place, state,
};
use crate::sys::{self, nr};

static BASE: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());
/// Descriptor of the memfd; goes along over exec.
pub static FD: AtomicI32 = AtomicI32::new(-1);

fn at<T>(offset: usize) -> &'static T {
    // SAFETY: only called after `map` has succeeded; offsets are constants of the format, within
    // SESSION_BYTES, aligned; what is shared there is atomics or written once before the fork.
    unsafe { &*BASE.load(Ordering::Relaxed).add(offset).cast::<T>() }
}

fn header_checksum(header: &Header) -> u32 {
    let copy = Header { checksum: 0, ..*header };
    // SAFETY: Header is repr(C) integers without padding (checked by its layout: all u32 pairs
    // and byte arrays).
    // The portable form: to ask the processor what it can do takes longer, in a virtual machine.
    base::checksum::portable(0, unsafe {
        core::slice::from_raw_parts((&raw const copy).cast::<u8>(), size_of::<Header>())
    })
}

/// Maps the session of descriptor `fd`; false when it is not one of this version.
pub fn map(fd: i32) -> bool {
    let Some(stat) = sys::fstat(fd) else { return false };
    if stat.size != SESSION_BYTES as i64 {
        return false;
    }
    let base = sys::call6(nr::MMAP, 0, SESSION_BYTES, sys::PROT_RW, 1, fd as usize, 0);
    if sys::failed(base) {
        return false;
    }
    BASE.store(base as *mut u8, Ordering::Relaxed);
    let h = header();
    let lengths = [h.mount_len, h.backend_len, h.library_len];
    let good = h.magic == MAGIC
        && h.version == VERSION
        && h.checksum == header_checksum(h)
        && h.bytes == SESSION_BYTES as u64
        && lengths.iter().all(|l| (1..crate::format::PATH_MAX as u32).contains(l))
        && h.holder_len as usize <= crate::format::SOCKET_MAX
        && h.tables as usize <= TABLES;
    if good {
        FD.store(fd, Ordering::Relaxed);
    } else {
        sys::call2(nr::MUNMAP, base as usize, SESSION_BYTES);
    }
    good
}

/// The configuration.
pub fn header() -> &'static Header {
    at(0)
}

/// The prefix.
pub fn mount() -> &'static [u8] {
    let h = header();
    &h.mount[..h.mount_len as usize]
}

/// The counters.
pub fn counters() -> &'static Counters {
    at(COUNTERS_AT)
}

/// Site tables.
pub fn tables() -> impl Iterator<Item = &'static Table> {
    (0..header().tables as usize).map(|i| at::<Table>(TABLES_AT + i * TABLE_BYTES))
}

/// All open file descriptions.
pub fn ofds() -> &'static [Ofd; OFDS] {
    at(OFDS_AT)
}

/// Exec records.
pub fn slots() -> &'static [Slot; SLOTS] {
    at(SLOTS_AT)
}

/// What is known of a file with code, if it was asked about in this session.
pub fn object(key: &[u64; 4]) -> Option<&'static Object> {
    let all = at::<[Object; OBJECTS]>(OBJECTS_AT);
    let first = object_place(key);
    let places = (first..first + OBJECT_PLACES).map(|i| &all[i % OBJECTS]);
    let mut known = places.take_while(|o| o.state.load(Ordering::Acquire) != 0);
    known.find(|o| o.key.iter().zip(key).all(|(a, b)| a.load(Ordering::Relaxed) == *b))
}

/// The calls of such a file.
pub fn calls(object: &Object) -> &'static [Call] {
    let all = at::<[Call; CALLS]>(CALLS_AT);
    let first = object.first.load(Ordering::Relaxed) as usize;
    let count = object.count.load(Ordering::Relaxed) as usize;
    all.get(first..first.saturating_add(count)).unwrap_or(&[])
}

/// Notes a thread that the library serves.
pub fn note_thread(tid: u32) {
    let ring = at::<[AtomicU32; THREADS]>(THREADS_AT);
    let n = counters().threads.fetch_add(1, Ordering::Relaxed);
    ring[n as usize % THREADS].store(tid, Ordering::Relaxed);
}

fn inodes() -> &'static [AtomicU64; INODES] {
    at(INODES_AT)
}

/// Whether the kernel owns the inode (it has a shared mapping on this machine).
pub fn kernel_owned(ino: u64) -> bool {
    let all = inodes();
    for i in 0..INODES {
        match all[(ino as usize).wrapping_add(i) % INODES].load(Ordering::Acquire) {
            0 => return false,
            n if n == ino => return true,
            _ => {}
        }
    }
    false
}

/// Makes the kernel the inode's owner for the rest of the session, and sends every open file
/// description of it there.
pub fn give_to_kernel(ino: u64) {
    let all = inodes();
    for i in 0..INODES {
        let slot = &all[(ino as usize).wrapping_add(i) % INODES];
        match slot.compare_exchange(0, ino, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(n) if n == ino => break,
            Err(_) => {}
        }
    }
    let high = counters().ofds_high.load(Ordering::Acquire) as usize;
    for ofd in &ofds()[..high.min(OFDS)] {
        if ofd.ino.load(Ordering::Acquire) == ino {
            let _ = ofd.state.compare_exchange(
                state::FILE,
                state::LEAVING,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        }
    }
}
