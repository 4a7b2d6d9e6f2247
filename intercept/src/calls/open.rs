//! open, openat, openat2, creat.

use base::Errno;
use client::fs::{Attr, Handle, S_IFDIR, S_IFLNK, S_IFREG};
use core::sync::atomic::Ordering;

use super::Reply;
use crate::entry::Regs;
use crate::format::state;
use crate::fsys::{caller, fs, maker, template};
use crate::path::{self, Found, Last, Path, Stop};
use crate::sys::{self, at, err, nr, o};
use crate::table;
use crate::{demote, mem, protect, ring, session};

/// Times that a path is resolved again because what it led to was removed meanwhile.
const TRIES: u32 = 16;

/// What was asked.
struct Request {
    dirfd: i32,
    path: Path,
    path_at: usize,
    flags: u32,
    mode: u32,
}

fn request(r: &Regs) -> Result<Request, Stop> {
    let cwd = at::FDCWD;
    let (dirfd, path_at, flags, mode) = match r.rax {
        nr::OPEN => (cwd, r.rdi, r.rsi as u32, r.rdx as u32),
        nr::CREAT => (cwd, r.rdi, o::CREAT | o::WRONLY | o::TRUNC, r.rsi as u32),
        nr::OPENAT => (r.rdi as i32, r.rsi, r.rdx as u32, r.r10 as u32),
        _ => {
            // openat2: struct open_how; what resolves specially is the kernel's.
            let how: [u64; 3] = if r.r10 >= 24 { mem::get(r.rdx)? } else { [0, 0, 1] };
            let strange = r.r10 != 24
                || how[0] & !u64::from(o::KNOWN) != 0
                || how[1] & !0o7777 != 0
                || how[1] != 0 && how[0] as u32 & (o::CREAT | o::TMPFILE) == 0;
            if how[2] != 0 || strange {
                path::to_kernel(r.rdi as i32)?;
                return Err(Stop::Kernel);
            }
            (r.rdi as i32, r.rsi, how[0] as u32, how[1] as u32)
        }
    };
    let create_dir = o::CREAT | o::DIRECTORY;
    let kernel = flags & o::PATH != 0
        // As every file without a name: the kernel's descriptor keeps it over fork and exec.
        || flags & o::TMPFILE == o::TMPFILE
        // What that means has changed: as this kernel has it.
        || flags & create_dir == create_dir
        || ring::has();
    if kernel {
        path::to_kernel(dirfd)?;
        return Err(Stop::Kernel);
    }
    Ok(Request { dirfd, path: Path::get(path_at)?, path_at, flags, mode })
}

/// All forms of open.
pub fn open(r: &mut Regs) -> Reply {
    let q = request(r)?;
    for _ in 0..TRIES {
        match named(&q) {
            Err(Stop::Error(err::STALE)) => {}
            done => return done,
        }
    }
    Err(Stop::Error(err::NOENT))
}

/// Opens what the path leads to now; ESTALE if it went meanwhile.
fn named(q: &Request) -> Reply {
    let flags = q.flags;
    let creates = flags & o::CREAT != 0;
    let exclusive = creates && flags & o::EXCL != 0;
    let last = match (creates, flags & o::NOFOLLOW == 0 && !exclusive) {
        (true, true) => Last::Create,
        (true, false) if exclusive && !q.path.bytes().ends_with(b"/") => Last::New,
        (true, false) => Last::CreateHere,
        (false, true) => Last::Follow,
        (false, false) => Last::Keep,
    };
    let found = path::resolve_as(&caller(), q.dirfd, &q.path, last)?;
    if creates && found.slash && !found.dot {
        return Err(Stop::Error(err::ISDIR));
    }
    if flags & o::ACCMODE == 3 {
        return Err(Stop::Kernel);
    }
    let Some(attr) = found.attr else { return make(q, &found) };
    if exclusive {
        return Err(Stop::Error(err::EXIST));
    }
    match attr.kind() {
        S_IFLNK if flags & o::DIRECTORY != 0 => Err(Stop::Error(err::NOTDIR)),
        S_IFLNK => Err(Stop::Error(err::LOOP)),
        S_IFDIR => directory(q, &attr),
        _ if flags & o::DIRECTORY != 0 => Err(Stop::Error(err::NOTDIR)),
        S_IFREG => {
            if flags & o::CREAT != 0 {
                protect::create(found.parent, &attr)?;
            }
            existing(q, &attr)
        }
        _ => Err(Stop::Kernel),
    }
}

fn directory(q: &Request, attr: &Attr) -> Reply {
    if q.flags & (o::ACCMODE | o::CREAT | o::TRUNC) != 0 {
        return Err(Stop::Error(err::ISDIR));
    }
    let handle = match fs()?.open_dir(&caller(), attr.ino, 4) {
        Ok(handle) => Some(handle),
        // Nothing keeps it there.
        Err(Errno::NOSYS) => {
            fs()?.access(&caller(), attr.ino, 4)?;
            None
        }
        // It was removed meanwhile.
        Err(Errno::NOENT) => return Err(Stop::Error(err::STALE)),
        Err(e) => return Err(e.into()),
    };
    place_directory(q, attr, handle)
}

fn place_directory(q: &Request, attr: &Attr, handle: Option<Handle>) -> Reply {
    let let_go = |stop| {
        if let Some(handle) = handle {
            crate::fsys::release(handle);
        }
        Err(stop)
    };
    if let Err(stop) = may_hide(q.flags, attr) {
        return let_go(stop);
    }
    if q.flags & o::DIRECT != 0 {
        return let_go(Stop::Error(err::INVAL));
    }
    let cloexec = q.flags & o::CLOEXEC;
    let Some(index) = table::new_ofd(state::DIR, attr.ino.0, q.flags) else {
        return let_go(Stop::Kernel);
    };
    if let Some(handle) = handle {
        table::install_new(index, handle);
    }
    // The placeholder is the very directory, so that fchdir and openat on it work in the kernel.
    let how = (o::PATH | o::DIRECTORY | cloexec | (q.flags & o::NOFOLLOW)) as usize;
    let fd = sys::call4(nr::OPENAT, q.dirfd as usize, q.path_at, how, 0);
    finish(fd, index, cloexec)
}

/// Enters the description under the number, or gives it back.
fn finish(fd: isize, index: usize, cloexec: u32) -> Reply {
    if sys::failed(fd) {
        table::drop_new(index);
        return Err(Stop::Error(fd));
    }
    if fd as usize >= table::FDS {
        sys::call1(nr::CLOSE, fd as usize);
        table::drop_new(index);
        return Err(Stop::Kernel);
    }
    table::set(fd as i32, index, cloexec != 0);
    if ring::has() {
        // Made by another thread while the file was being opened here.
        demote::descriptor(fd as i32)?;
    }
    Ok(fd)
}

/// The flags that a handle is opened with: appending is decided at each write.
fn handle_flags(flags: u32) -> u32 {
    flags & (o::ACCMODE | o::TRUNC | o::DSYNC | o::EXCL)
}

fn existing(q: &Request, attr: &Attr) -> Reply {
    if session::kernel_owned(attr.ino.0) {
        session::counters().kernel_opens.fetch_add(1, Ordering::Relaxed);
        return Err(Stop::Kernel);
    }
    let Some(index) = table::new_ofd(state::FILE, attr.ino.0, q.flags & !o::CREAT) else {
        return Err(Stop::Kernel);
    };
    let flags = handle_flags(q.flags) & !o::EXCL;
    place(q, index, || open_existing(q, attr, flags))
}

fn open_existing(q: &Request, attr: &Attr, flags: u32) -> Result<Handle, Stop> {
    if q.flags & o::NOATIME != 0 {
        // Permission is judged first; to cut a file is to write it.
        let cuts = if flags & o::TRUNC != 0 { 2 } else { 0 };
        let asked = [4, 2, 6, 6][(flags & o::ACCMODE) as usize] | cuts;
        fs()?.access(&caller(), attr.ino, asked)?;
        may_hide(q.flags, attr)?;
    }
    let opened = fs()?.open(&caller(), attr.ino, flags).map_err(|e| match e {
        // Its last name is gone.
        Errno::NOENT => Errno::STALE,
        e => e,
    });
    Ok(opened?)
}

/// O_NOATIME is for the owner.
pub fn may_hide(flags: u32, attr: &Attr) -> Result<(), Stop> {
    let who = caller();
    let may = flags & o::NOATIME == 0 || who.uid == 0 || who.uid == attr.uid;
    if may { Ok(()) } else { Err(Stop::Error(err::PERM)) }
}

fn make(q: &Request, found: &Found) -> Reply {
    if q.flags & o::CREAT == 0 {
        return Err(Stop::Error(err::NOENT));
    }
    let (who, mode) = maker(q.mode)?;
    let Some(index) = table::new_ofd(state::FILE, 0, q.flags & !o::CREAT) else {
        return Err(Stop::Kernel);
    };
    let flags = handle_flags(q.flags);
    place(q, index, || {
        let (attr, handle) = fs()?.create(&who, found.parent, found.name(), mode, flags)?;
        let ofd = table::ofd(index);
        table::set_inode(ofd, attr.ino.0);
        // Among the flags that are kept it says that this open made the file.
        ofd.flags.fetch_or(o::CREAT, Ordering::Relaxed);
        Ok(handle)
    })
}

/// The number comes first: an open that fails for want of one has made nothing and cut off nothing.
fn place(q: &Request, index: usize, open: impl FnOnce() -> Result<Handle, Stop>) -> Reply {
    let cloexec = q.flags & o::CLOEXEC;
    let command = if cloexec != 0 { sys::F_DUPFD_CLOEXEC } else { 0 };
    let placeholder = match template() {
        Ok(template) => sys::call3(nr::FCNTL, template as usize, command, 0),
        Err(e) => e,
    };
    if sys::failed(placeholder) || placeholder as usize >= table::FDS {
        return finish(placeholder, index, cloexec);
    }
    match open() {
        Ok(handle) => table::install_new(index, handle),
        Err(stop) => {
            sys::call1(nr::CLOSE, placeholder as usize);
            table::drop_new(index);
            return Err(stop);
        }
    }
    // Somebody may have given the inode to the kernel before the description could be seen.
    let ofd = table::ofd(index);
    if session::kernel_owned(ofd.ino.load(Ordering::Relaxed)) {
        let (file, leaving) = (state::FILE, state::LEAVING);
        let _ = ofd.state.compare_exchange(file, leaving, Ordering::AcqRel, Ordering::Relaxed);
    }
    finish(placeholder, index, cloexec)
}

/// Used by fcntl: what F_GETFL shows.
pub fn visible(flags: u32) -> u32 {
    let kept = o::ACCMODE | o::APPEND | o::NONBLOCK | o::SYNC | o::DIRECT | o::NOATIME;
    (flags & (kept | o::DIRECTORY | o::NOFOLLOW)) | o::LARGEFILE
}
