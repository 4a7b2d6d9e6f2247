//! The session memory (format.rs), as this process sees it.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use crate::format::{
    CALLS, CALLS_AT, CONFIG_BYTES, Call, Counters, Header, INODES, INODES_AT, MAGIC, MODE,
    OBJECT_PLACES, OBJECTS, OBJECTS_AT, OFDS, OFDS_AT, Object, Ofd, SEALS, SLOTS, SLOTS_AT,
    STATE_BYTES, Slot, TABLE_BYTES, TABLES, TABLES_AT, THREADS, THREADS_AT, Table, VERSION,
    object_place, state,
};
use crate::sys::{self, Stat, nr};
use crate::table;

static CONFIG: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());
static STATE: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());
/// Descriptor of the configuration; goes along over exec.
pub static CONFIG_FD: AtomicI32 = AtomicI32::new(-1);
/// Descriptor of the state, or -1; goes along over an exec by the same user ([`hand_over`]).
static STATE_FD: AtomicI32 = AtomicI32::new(-1);
/// The user whose the state is.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// The user whose the configuration is: who runs `corbel run`.
static RUNNER: AtomicU32 = AtomicU32::new(0);

const F_SETFD: usize = 2;
const F_ADD_SEALS: usize = 1033;
const F_GET_SEALS: usize = 1034;
const MAP_SHARED: usize = 1;
const MAP_FIXED: usize = 0x10;
const MAP_ANONYMOUS: usize = 0x20;
/// MFD_CLOEXEC and MFD_ALLOW_SEALING.
const MEMFD_FLAGS: usize = 1 | 2;
/// Some machines want it of all memory that no program is in.
const MFD_NOEXEC_SEAL: usize = 8;

fn config<T>(offset: usize) -> &'static T {
    // SAFETY: only called after `map` has succeeded; offsets are constants of the format, within
    // CONFIG_BYTES, aligned; it is read-only here, and what changes in it is atomics.
    unsafe { &*CONFIG.load(Ordering::Relaxed).add(offset).cast::<T>() }
}

fn at<T>(offset: usize) -> &'static T {
    // SAFETY: only called after `begin` has succeeded; offsets are constants of the format, within
    // STATE_BYTES, aligned; what is shared there is atomics. A new state is mapped over the old one.
    unsafe { &*STATE.load(Ordering::Relaxed).add(offset).cast::<T>() }
}

fn header_checksum(header: &Header) -> u32 {
    let copy = Header { checksum: 0, ..*header };
    // SAFETY: Header is repr(C) integers without padding (checked by its layout: all u32 pairs
    // and byte arrays).
    base::crc32c(0, unsafe {
        core::slice::from_raw_parts((&raw const copy).cast::<u8>(), size_of::<Header>())
    })
}

/// What a memfd is, if it is one of that size, which stays, and only its user and the super-user could write to it.
fn sealed(fd: i32, bytes: usize) -> Option<Stat> {
    let good = |stat: &Stat| stat.size == bytes as i64 && stat.mode & 0o777 == MODE;
    let stat = sys::fstat(fd).filter(good)?;
    let set = sys::call3(nr::FCNTL, fd as usize, F_GET_SEALS, 0);
    (!sys::failed(set) && set as u32 & SEALS == SEALS).then_some(stat)
}

/// The user as whom this thread is known to others.
pub fn user() -> u32 {
    sys::call0(nr::GETEUID) as u32
}

/// Maps the configuration of descriptor `fd`; false when it is not one of this version, or of somebody who may not
/// tell us which library to load.
pub fn map(fd: i32) -> bool {
    let Some(stat) = sealed(fd, CONFIG_BYTES) else { return false };
    if stat.uid != 0 && stat.uid != user() {
        return false;
    }
    let base = sys::call6(nr::MMAP, 0, CONFIG_BYTES, sys::PROT_READ, MAP_SHARED, fd as usize, 0);
    if sys::failed(base) {
        return false;
    }
    CONFIG.store(base as *mut u8, Ordering::Relaxed);
    let h = header();
    let lengths = [h.mount_len, h.backend_len, h.library_len];
    let known = h.magic == MAGIC && h.version == VERSION && h.bytes == CONFIG_BYTES as u64;
    if known {
        // Before there is anything that would ask it.
        base::cpu::be_told(h.processor);
    }
    let good = known
        && h.checksum == header_checksum(h)
        && lengths.iter().all(|l| (1..crate::format::PATH_MAX as u32).contains(l))
        && h.holder_len as usize <= crate::format::SOCKET_MAX
        && h.tables as usize <= TABLES
        && (h.users == 0 || users().is_none_or(|users| users == h.users));
    if good {
        CONFIG_FD.store(fd, Ordering::Relaxed);
        RUNNER.store(stat.uid, Ordering::Relaxed);
    } else {
        sys::call2(nr::MUNMAP, base as usize, CONFIG_BYTES);
    }
    good
}

/// The user namespace of this process.
fn users() -> Option<u64> {
    let (path, mut stat) = (c"/proc/self/ns/user".as_ptr() as usize, Stat::default());
    let known = sys::call2(nr::STAT, path, (&raw mut stat) as usize) == 0;
    known.then_some(stat.ino)
}

/// Memory of our own in the state's place, before there is one.
pub fn reserve() -> bool {
    let flags = MAP_SHARED | MAP_ANONYMOUS;
    let room = sys::call6(nr::MMAP, 0, STATE_BYTES, sys::PROT_RW, flags, usize::MAX, 0);
    if !sys::failed(room) {
        STATE.store(room as *mut u8, Ordering::Relaxed);
    }
    !sys::failed(room)
}

/// Takes part in the state of descriptor `fd` if it is this user's, else begins another one.
pub fn begin(fd: i32) {
    let given = if fd < 0 { None } else { sealed(fd, STATE_BYTES) };
    if given.as_ref().is_some_and(|stat| stat.uid == user()) && map_state(fd as usize, 0) {
        sys::call3(nr::FCNTL, fd as usize, F_SETFD, 1);
        table::protect(fd);
        STATE_FD.store(fd, Ordering::Relaxed);
        OWNER.store(user(), Ordering::Relaxed);
        return;
    }
    if given.is_some() {
        // Another user's.
        sys::call1(nr::CLOSE, fd as usize);
    }
    renew();
}

fn map_state(fd: usize, flags: usize) -> bool {
    let at = STATE.load(Ordering::Relaxed) as usize;
    let flags = MAP_SHARED | MAP_FIXED | flags;
    !sys::failed(sys::call6(nr::MMAP, at, STATE_BYTES, sys::PROT_RW, flags, fd, 0))
}

/// A file of memory, closed on exec.
pub fn memory(name: &core::ffi::CStr) -> Option<usize> {
    let make = |flags| {
        let name = name.as_ptr() as usize;
        crate::calls::limit::with_room(|| sys::call2(nr::MEMFD_CREATE, name, flags))
    };
    let mut made = make(MEMFD_FLAGS | MFD_NOEXEC_SEAL);
    if made == sys::err::INVAL {
        // The kernel does not know it.
        made = make(MEMFD_FLAGS);
    }
    (!sys::failed(made)).then_some(made as usize)
}

/// Begins a state of the user that this process has become: from here on it shares nothing with those of before.
pub fn renew() {
    // What this process has mapped stays the kernel's.
    let mapped = inodes().each_ref().map(|ino| ino.load(Ordering::Acquire));
    let made = memory(c"corbel-state").map(|fd| fd as i32);
    let ready = made.filter(|fd| {
        let fd = *fd as usize;
        sys::call2(nr::FTRUNCATE, fd, STATE_BYTES) == 0
            && sys::call2(nr::FCHMOD, fd, MODE as usize) == 0
            && sys::call3(nr::FCNTL, fd, F_ADD_SEALS, SEALS as usize) == 0
            && map_state(fd, 0)
    });
    // Without one, only the children of fork share it.
    if ready.is_none() && !map_state(usize::MAX, MAP_ANONYMOUS) {
        sys::say(&["corbel: no memory for a new session; the process ends"]);
        sys::abort();
    }
    if let (Some(fd), None) = (made, ready) {
        sys::call1(nr::CLOSE, fd as usize);
    }
    let fd = ready.map_or(-1, |fd| table::raise(fd, true));
    let before = STATE_FD.swap(fd, Ordering::Relaxed);
    if before >= 0 {
        table::close_internal(before);
    }
    let owner = if fd >= 0 { sys::fstat(fd).map(|stat| stat.uid) } else { None };
    OWNER.store(owner.unwrap_or_else(user), Ordering::Relaxed);
    for (to, ino) in inodes().iter().zip(mapped) {
        to.store(ino, Ordering::Release);
    }
    let mut number = [0u32; 1];
    sys::call3(nr::GETRANDOM, number.as_mut_ptr() as usize, 4, 0);
    counters().number.store(number[0], Ordering::Relaxed);
}

/// Whose the state is, who may change it.
pub fn owner() -> u32 {
    OWNER.load(Ordering::Relaxed)
}

/// Whether it is this user's.
pub fn is_owner(uid: u32) -> bool {
    owner() == uid
}

/// Who made the configuration.
pub fn runner() -> u32 {
    RUNNER.load(Ordering::Relaxed)
}

/// The state's descriptor as the next program may have it, or -1: it is open in that program from now on, or (if the exec
/// fails, or is none that takes part) not.
pub fn hand_over(hand: bool) -> i32 {
    let fd = STATE_FD.load(Ordering::Relaxed);
    let hand = hand && is_owner(user());
    if fd >= 0 {
        sys::call3(nr::FCNTL, fd as usize, F_SETFD, usize::from(!hand));
    }
    if hand { fd } else { -1 }
}

/// The configuration.
pub fn header() -> &'static Header {
    config(0)
}

/// Whether something is of the mount, as it was when the session began.
pub fn is_the_mounts(stat: &Stat) -> bool {
    header().device != 0 && stat.dev == u64::from(header().device)
}

/// The prefix.
pub fn mount() -> &'static [u8] {
    let h = header();
    &h.mount[..h.mount_len as usize]
}

/// The counters.
pub fn counters() -> &'static Counters {
    at(0)
}

/// Site tables.
pub fn tables() -> impl Iterator<Item = &'static Table> {
    (0..header().tables as usize).map(|i| config::<Table>(TABLES_AT + i * TABLE_BYTES))
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
    let all = config::<[Object; OBJECTS]>(OBJECTS_AT);
    let first = object_place(key);
    let places = (first..first + OBJECT_PLACES).map(|i| &all[i % OBJECTS]);
    let mut known = places.take_while(|o| o.state.load(Ordering::Acquire) != 0);
    known.find(|o| o.key.iter().zip(key).all(|(a, b)| a.load(Ordering::Relaxed) == *b))
}

/// The calls of such a file.
pub fn calls(object: &Object) -> &'static [Call] {
    let all = config::<[Call; CALLS]>(CALLS_AT);
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

/// Whether the kernel owns the inode (it has a shared mapping on this machine): any may be that once the table is full.
pub fn kernel_owned(ino: u64) -> bool {
    let all = inodes();
    for i in 0..INODES {
        match all[(ino as usize).wrapping_add(i) % INODES].load(Ordering::Acquire) {
            0 => return false,
            n if n == ino => return true,
            _ => {}
        }
    }
    // There was no room for all that are.
    true
}

/// Makes the kernel the inode's owner for the rest of the session, and sends every open file
/// description of it there.
pub fn give_to_kernel(ino: u64) {
    let all = inodes();
    let noted = (0..INODES).any(|i| {
        let slot = &all[(ino as usize).wrapping_add(i) % INODES];
        let was = slot.compare_exchange(0, ino, Ordering::AcqRel, Ordering::Acquire);
        was.is_ok() || was == Err(ino)
    });
    if !noted {
        counters().exhausted.fetch_add(1, Ordering::Relaxed);
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
