//! The `extern "C"` half: pointers to slices, errors to errno.
//!
//! # Safety
//! Every function trusts its caller exactly as its POSIX namesake does: `fs` came from
//! `corbel_connect` and is not disconnected, strings end in NUL, buffers have the length given.
#![allow(unsafe_code, missing_docs, clippy::missing_safety_doc)]

use std::ffi::{CStr, c_char, c_int, c_void};

use base::Errno;
use client::fs::{Attr, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, SetAttr, SetTime, Time, XattrMode};
use libc::{mode_t, off_t, size_t, ssize_t, stat, statvfs, timespec};

use crate::Volume;

type Outcome<T> = Result<T, Errno>;

fn set_errno(e: Errno) {
    // SAFETY: errno's address is always valid in the calling thread.
    unsafe { *libc::__errno_location() = i32::from(e.0) };
}

fn done(outcome: Outcome<()>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

fn number(outcome: Outcome<u64>) -> i64 {
    match outcome {
        Ok(n) => n as i64,
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

/// # Safety
/// `fs` is null or a live connection.
unsafe fn volume<'a>(fs: *mut Volume) -> Outcome<&'a Volume> {
    // SAFETY: the caller's promise; null is caught.
    unsafe { fs.as_ref() }.ok_or(Errno::INVAL)
}

/// # Safety
/// `text` is null or a NUL-terminated string.
unsafe fn bytes<'a>(text: *const c_char) -> Outcome<&'a [u8]> {
    if text.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: not null, NUL-terminated by the caller's promise.
    Ok(unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// # Safety
/// `buf` is null or has `len` bytes.
unsafe fn input<'a>(buf: *const c_void, len: size_t) -> Outcome<&'a [u8]> {
    match (buf.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Errno::FAULT),
        // SAFETY: not null and of that length by the caller's promise.
        _ => Ok(unsafe { std::slice::from_raw_parts(buf.cast(), len.min(isize::MAX as usize)) }),
    }
}

/// # Safety
/// `buf` is null or has `len` writable bytes.
unsafe fn output<'a>(buf: *mut c_void, len: size_t) -> Outcome<&'a mut [u8]> {
    if len == 0 {
        return Ok(&mut []);
    }
    if buf.is_null() {
        return Err(Errno::FAULT);
    }
    let len = len.min(isize::MAX as usize);
    // SAFETY: not null and of that length by the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(buf.cast(), len) })
}

fn offset(at: off_t) -> Outcome<u64> {
    u64::try_from(at).map_err(|_| Errno::INVAL)
}

fn umask() -> u32 {
    // SAFETY: umask cannot fail. It is set and set back because POSIX has no way to read it.
    unsafe {
        let mask = libc::umask(0o077);
        libc::umask(mask);
        mask
    }
}

/// Of which sources the library is, for `corbel bench`.
#[used]
#[unsafe(link_section = ".note.corbel")]
static BUILT_OF: base::note::Note = base::note::Note::of(env!("CORBEL_BUILT_OF"));

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_connect(socket: *const c_char) -> *mut Volume {
    // SAFETY: the module's contract.
    match unsafe { bytes(socket) }.and_then(Volume::connect) {
        Ok(volume) => Box::into_raw(Box::new(volume)),
        Err(e) => {
            set_errno(e);
            std::ptr::null_mut()
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_disconnect(fs: *mut Volume) {
    if !fs.is_null() {
        // SAFETY: it came from `Box::into_raw` in `corbel_connect` and is not used again.
        drop(unsafe { Box::from_raw(fs) });
    }
}

/// Calls on a volume and one path that give 0 or -1.
macro_rules! on_path {
    ($($name:ident($($arg:ident: $type:ty),*) = |$fs:ident, $path:ident| $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            fs: *mut Volume, path: *const c_char $(, $arg: $type)*
        ) -> c_int {
            // SAFETY: the module's contract.
            let parts = unsafe { volume(fs).and_then(|v| Ok((v, bytes(path)?))) };
            done(parts.and_then(|($fs, $path)| $body))
        }
    )*};
}

/// Calls on a volume and a descriptor that give 0 or -1.
macro_rules! on_fd {
    ($($name:ident($($arg:ident: $type:ty),*) = |$fs:ident, $fd:ident| $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fs: *mut Volume, fd: c_int $(, $arg: $type)*) -> c_int {
            // SAFETY: the module's contract.
            let $fs = unsafe { volume(fs) };
            let $fd = fd;
            done($fs.and_then(|$fs| $body))
        }
    )*};
}

on_path! {
    corbel_truncate(size: off_t) = |fs, path| {
        let size = Some(offset(size)?);
        fs.setattr(path, true, &SetAttr { size, ..SetAttr::default() })
    };
    corbel_stat(st: *mut stat) = |fs, path| put_stat(fs.stat(path, true)?, st);
    corbel_lstat(st: *mut stat) = |fs, path| put_stat(fs.stat(path, false)?, st);
    corbel_access(mode: c_int) = |fs, path| fs.access(path, mode as u32);
    corbel_chmod(mode: mode_t) = |fs, path| {
        fs.setattr(path, true, &SetAttr { mode: Some(mode), ..SetAttr::default() })
    };
    corbel_chown(uid: u32, gid: u32) = |fs, path| fs.setattr(path, true, &owner(uid, gid));
    corbel_lchown(uid: u32, gid: u32) = |fs, path| fs.setattr(path, false, &owner(uid, gid));
    corbel_utimens(times: *const timespec) = |fs, path| fs.setattr(path, true, &set_times(times)?);
    corbel_mkdir(mode: mode_t) = |fs, path| {
        fs.make(path, S_IFDIR | mode & 0o7777, umask(), 0, &[])
    };
    corbel_mknod(mode: mode_t, dev: u64) = |fs, path| {
        let kind = if mode & S_IFMT == 0 { S_IFREG } else { mode & S_IFMT };
        let (major, minor) = (libc::major(dev), libc::minor(dev));
        let rdev = minor & 0xff | major << 8 | (minor & !0xff) << 12;
        fs.make(path, kind | mode & 0o7777, umask(), rdev, &[])
    };
    corbel_rmdir() = |fs, path| fs.remove(path, true);
    corbel_unlink() = |fs, path| fs.remove(path, false);
    corbel_rename(to: *const c_char) = |fs, path| {
        // SAFETY: the module's contract.
        fs.rename(path, unsafe { bytes(to) }?, 0)
    };
    corbel_renameat2(to: *const c_char, flags: u32) = |fs, path| {
        // SAFETY: the module's contract.
        fs.rename(path, unsafe { bytes(to) }?, flags)
    };
    corbel_link(to: *const c_char) = |fs, path| {
        // SAFETY: the module's contract.
        fs.link(path, unsafe { bytes(to) }?)
    };
    corbel_setxattr(name: *const c_char, value: *const c_void, len: size_t, flags: c_int) =
        |fs, path| {
            let how = match flags {
                0 => XattrMode::Set,
                libc::XATTR_CREATE => XattrMode::Create,
                libc::XATTR_REPLACE => XattrMode::Replace,
                _ => return Err(Errno::INVAL),
            };
            // SAFETY: the module's contract.
            let (name, value) = unsafe { (bytes(name)?, input(value, len)?) };
            fs.fs().setxattr(&fs.caller(), fs.ino(path)?, name, value, how)
        };
    corbel_removexattr(name: *const c_char) = |fs, path| {
        // SAFETY: the module's contract.
        fs.fs().removexattr(&fs.caller(), fs.ino(path)?, unsafe { bytes(name) }?)
    };
}

on_fd! {
    corbel_close() = |fs, fd| fs.close(fd);
    corbel_fsync() = |fs, fd| fs.fsync(fd, false);
    corbel_fdatasync() = |fs, fd| fs.fsync(fd, true);
    corbel_ftruncate(size: off_t) = |fs, fd| fs.ftruncate(fd, offset(size)?);
    corbel_fallocate(mode: c_int, at: off_t, len: off_t) = |fs, fd| {
        fs.fallocate(fd, mode as u32, offset(at)?, offset(len)?)
    };
    corbel_fstat(st: *mut stat) = |fs, fd| put_stat(fs.fstat(fd)?, st);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_open(
    fs: *mut Volume,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the module's contract.
    let parts = unsafe { volume(fs).and_then(|v| Ok((v, bytes(path)?))) };
    let opened = parts.and_then(|(fs, path)| fs.open(path, flags, mode, umask()));
    number(opened.map(|fd| fd as u64)) as c_int
}

/// Calls that move bytes.
macro_rules! transfer {
    ($($name:ident: $make:ident $pointer:ty, ($($arg:ident: $type:ty),*)
        = |$fs:ident, $fd:ident, $buf:ident| $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            fs: *mut Volume, fd: c_int, buf: $pointer, len: size_t $(, $arg: $type)*
        ) -> ssize_t {
            // SAFETY: the module's contract.
            let parts = unsafe { volume(fs).and_then(|v| Ok((v, $make(buf, len)?))) };
            let $fd = fd;
            number(parts.and_then(|($fs, $buf)| $body).map(|n| n as u64)) as ssize_t
        }
    )*};
}

transfer! {
    corbel_read: output *mut c_void, () = |fs, fd, buf| fs.read(fd, buf);
    corbel_write: input *const c_void, () = |fs, fd, buf| fs.write(fd, buf);
    corbel_pread: output *mut c_void, (at: off_t) = |fs, fd, buf| fs.pread(fd, buf, offset(at)?);
    corbel_pwrite: input *const c_void, (at: off_t) = |fs, fd, buf| fs.pwrite(fd, buf, offset(at)?);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_lseek(
    fs: *mut Volume,
    fd: c_int,
    at: off_t,
    whence: c_int,
) -> off_t {
    // SAFETY: the module's contract.
    number(unsafe { volume(fs) }.and_then(|fs| fs.lseek(fd, at, whence)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_sync(fs: *mut Volume) -> c_int {
    // SAFETY: the module's contract.
    done(unsafe { volume(fs) }.and_then(Volume::sync))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_symlink(
    fs: *mut Volume,
    target: *const c_char,
    path: *const c_char,
) -> c_int {
    // SAFETY: the module's contract.
    let parts = unsafe { volume(fs).and_then(|v| Ok((v, bytes(target)?, bytes(path)?))) };
    done(parts.and_then(|(fs, target, path)| match target {
        [] => Err(Errno::NOENT),
        _ => fs.make(path, S_IFLNK | 0o777, 0, 0, target),
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_readlink(
    fs: *mut Volume,
    path: *const c_char,
    buf: *mut c_char,
    len: size_t,
) -> ssize_t {
    // SAFETY: the module's contract.
    let parts = unsafe { volume(fs).and_then(|v| Ok((v, bytes(path)?, output(buf.cast(), len)?))) };
    let copied = parts.and_then(|(fs, path, buf)| {
        if buf.is_empty() {
            return Err(Errno::INVAL);
        }
        let target = fs.readlink(path)?;
        let n = target.len().min(buf.len());
        buf[..n].copy_from_slice(&target[..n]);
        Ok(n as u64)
    });
    number(copied) as ssize_t
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_statvfs(fs: *mut Volume, st: *mut statvfs) -> c_int {
    // SAFETY: the module's contract.
    let Some(st) = (unsafe { st.as_mut() }) else { return done(Err(Errno::FAULT)) };
    // SAFETY: the module's contract.
    done(unsafe { volume(fs) }.and_then(|fs| {
        let s = fs.fs().statfs()?;
        // SAFETY: statvfs is plain data, for which zeroes are a value.
        *st = unsafe { std::mem::zeroed() };
        st.f_bsize = s.block_bytes.into();
        st.f_frsize = s.block_bytes.into();
        (st.f_blocks, st.f_bfree, st.f_bavail) = (s.blocks, s.blocks_free, s.blocks_free);
        (st.f_files, st.f_ffree, st.f_favail) = (s.inodes, s.inodes_free, s.inodes_free);
        st.f_namemax = s.name_max.into();
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_readdir(
    fs: *mut Volume,
    path: *const c_char,
    each: Option<extern "C" fn(*mut c_void, *const c_char, u64, c_int) -> c_int>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the module's contract.
    let parts = unsafe { volume(fs).and_then(|v| Ok((v, bytes(path)?))) };
    let mut stopped = 0;
    let listed = parts.and_then(|(fs, path)| {
        let each = each.ok_or(Errno::FAULT)?;
        fs.readdir(path, &mut |entry| {
            let mut name = [0u8; 256];
            let len = entry.name.len().min(255);
            name[..len].copy_from_slice(&entry.name[..len]);
            let kind = (entry.kind >> 12) as c_int;
            stopped = each(context, name.as_ptr().cast(), entry.ino.0, kind);
            stopped == 0
        })
    });
    if listed.is_ok() { stopped } else { done(listed) }
}

/// Copies a value out as getxattr and listxattr do: length 0 only asks for the size.
///
/// # Safety
/// `buf` has room for `len` bytes.
unsafe fn copy_value(value: &[u8], buf: *mut c_void, len: size_t) -> Outcome<u64> {
    if len > 0 {
        if value.len() > len {
            return Err(Errno::RANGE);
        }
        // SAFETY: the module's contract.
        unsafe { output(buf, len) }?[..value.len()].copy_from_slice(value);
    }
    Ok(value.len() as u64)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_getxattr(
    fs: *mut Volume,
    path: *const c_char,
    name: *const c_char,
    value: *mut c_void,
    len: size_t,
) -> ssize_t {
    // SAFETY: the module's contract.
    let parts = unsafe { volume(fs).and_then(|v| Ok((v, bytes(path)?, bytes(name)?))) };
    let copied = parts.and_then(|(fs, path, name)| {
        let found = fs.fs().getxattr(&fs.caller(), fs.ino(path)?, name)?;
        // SAFETY: the module's contract.
        unsafe { copy_value(&found, value, len) }
    });
    number(copied) as ssize_t
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn corbel_listxattr(
    fs: *mut Volume,
    path: *const c_char,
    list: *mut c_char,
    len: size_t,
) -> ssize_t {
    // SAFETY: the module's contract.
    let parts = unsafe { volume(fs).and_then(|v| Ok((v, bytes(path)?))) };
    let copied = parts.and_then(|(fs, path)| {
        let found = fs.fs().listxattr(&fs.caller(), fs.ino(path)?)?;
        // SAFETY: the module's contract.
        unsafe { copy_value(&found, list.cast(), len) }
    });
    number(copied) as ssize_t
}

fn owner(uid: u32, gid: u32) -> SetAttr {
    let given = |id: u32| (id != u32::MAX).then_some(id);
    SetAttr { uid: given(uid), gid: given(gid), ..SetAttr::default() }
}

fn set_times(times: *const timespec) -> Outcome<SetAttr> {
    if times.is_null() {
        let (atime, mtime) = (Some(SetTime::Now), Some(SetTime::Now));
        return Ok(SetAttr { atime, mtime, ..SetAttr::default() });
    }
    // SAFETY: not null; an array of two by the contract of utimensat(2).
    let [atime, mtime] = unsafe { *times.cast::<[timespec; 2]>() };
    let one = |t: timespec| match t.tv_nsec {
        libc::UTIME_NOW => Ok(Some(SetTime::Now)),
        libc::UTIME_OMIT => Ok(None),
        nsec @ 0..=999_999_999 => Ok(Some(SetTime::At(Time { sec: t.tv_sec, nsec: nsec as u32 }))),
        _ => Err(Errno::INVAL),
    };
    Ok(SetAttr { atime: one(atime)?, mtime: one(mtime)?, ..SetAttr::default() })
}

fn put_stat(attr: Attr, st: *mut stat) -> Outcome<()> {
    // SAFETY: the module's contract; null is caught.
    let Some(st) = (unsafe { st.as_mut() }) else { return Err(Errno::FAULT) };
    // SAFETY: stat is plain data, for which zeroes are a value.
    *st = unsafe { std::mem::zeroed() };
    st.st_ino = attr.ino.0;
    st.st_mode = attr.mode;
    st.st_nlink = attr.nlink.into();
    (st.st_uid, st.st_gid) = (attr.uid, attr.gid);
    let (major, minor) =
        ((attr.rdev & 0xf_ff00) >> 8, (attr.rdev & 0xff) | ((attr.rdev >> 12) & 0xf_ff00));
    st.st_rdev = libc::makedev(major, minor);
    st.st_size = attr.size as i64;
    st.st_blksize = 4096;
    st.st_blocks = attr.blocks as i64;
    (st.st_atime, st.st_atime_nsec) = (attr.atime.sec, attr.atime.nsec.into());
    (st.st_mtime, st.st_mtime_nsec) = (attr.mtime.sec, attr.mtime.nsec.into());
    (st.st_ctime, st.st_ctime_nsec) = (attr.ctime.sec, attr.ctime.nsec.into());
    Ok(())
}
