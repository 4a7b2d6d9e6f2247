//! Handlers of names and attributes.

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caller, FileSystem, Handle, NewNode, Rename, Result, S_IFDIR, S_IFLNK, S_IFMT, SetAttr,
    SetTime, Time, XattrMode, is_acl,
};
use zerocopy::FromBytes;

use super::pages::For;
use super::parse::Args;
use super::reply::{Answer, ReplySink, attr_out, negative_entry, statx_out};
use super::server::{Call, Server};
use super::virtual_dir;
use super::wire::{
    BatchForgetIn, ForgetIn, ForgetOne, GETATTR_FH, GetattrIn, GetxattrIn, GetxattrOut, LinkIn,
    MkdirIn, MknodIn, Rename2In, RenameIn, SetattrIn, SetxattrIn, StatfsOut, StatxIn, fattr,
};
use crate::planted::{Bug, planted};

/// The extended attribute with a file's capabilities.
const CAPABILITY: &[u8] = b"security.capability";
const S_ISUID: u32 = 0o4000;
const S_ISGID: u32 = 0o2000;
const S_IXGRP: u32 = 0o010;
const NSEC: u32 = 1_000_000_000;
/// Longest value of an extended attribute (XATTR_SIZE_MAX).
const XATTR_MAX: usize = 65_536;
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;

/// A time that the kernel sent; nanoseconds are checked since they go on to the log.
fn time(sec: i64, nsec: u32) -> Result<SetTime> {
    if nsec < NSEC { Ok(SetTime::At(Time { sec, nsec })) } else { Err(Errno::INVAL) }
}

impl<F: FileSystem + ?Sized> Server<F> {
    /// Of the system's own attributes there are access lists, if the file system keeps them.
    fn check_xattr(&self, name: &[u8]) -> Result<()> {
        let lists = self.fs.keeps_acls() && is_acl(name);
        if name.starts_with(b"system.") && !lists { Err(Errno::OPNOTSUPP) } else { Ok(()) }
    }

    pub(super) fn lookup(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let name = args.any_name()?;
        args.end()?;
        if self.is_virtual_name(call.ino, name) {
            return Ok(Answer::of(&self.virtual_root_entry()));
        }
        if name == b"." || name == b".." {
            if self.options.guest.is_some() {
                return Err(Errno::STALE); // only those ask that had EXPORT_SUPPORT
            }
            return self.lookup_dot(call, name);
        }
        let found = self.until_kept(|| {
            let attr = self.fs.lookup(&call.caller, call.ino, name)?;
            Ok(self.entry(call.ino, name, &attr))
        });
        match found {
            Ok(entry) => Ok(Answer::of(&entry)),
            Err(Errno::NOENT) => {
                let keep = self.name_cache(call.ino, name, None);
                if keep.is_zero() {
                    Err(Errno::NOENT)
                } else {
                    Ok(Answer::of(&negative_entry(keep)))
                }
            }
            Err(error) => Err(error),
        }
    }

    /// The kernel has a node number from a handle (`open_by_handle_at`, NFS), and not the node: `.` of anything,
    /// which needs not be a directory; then `..` of a directory, up to one that it knows. Who asks may search
    /// anything, as the kernel has judged: it walks paths without these.
    fn lookup_dot(&self, call: &Call<'_>, name: &[u8]) -> Result<Answer> {
        let mut by_number = (name == b".").then_some(call.ino);
        let found = self.until_kept(|| {
            let attr = match by_number {
                Some(ino) => self.fs.getattr(&Caller::ROOT, ino)?,
                None => self.fs.lookup(&Caller::ROOT, call.ino, name)?,
            };
            // What was found by `..` alone need not be found by its number yet.
            by_number = Some(attr.ino);
            Ok(self.entry(call.ino, name, &attr))
        });
        // It may have been given a number that never was.
        let mut entry =
            found.map_err(|error| if error == Errno::STALE { Errno::NOENT } else { error })?;
        (entry.entry_valid, entry.entry_valid_nsec) = (0.into(), 0.into());
        Ok(Answer::of(&entry))
    }

    pub(super) fn forget(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &ForgetIn = args.take()?;
        args.end()?;
        self.uncount_lookup(call.ino, arg.nlookup.get());
        Ok(Answer::Silent)
    }

    pub(super) fn batch_forget(
        &self,
        _: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &BatchForgetIn = args.take()?;
        let len = (arg.count.get() as usize).checked_mul(size_of::<ForgetOne>());
        let ones = args.bytes(len.ok_or(Errno::INVAL)?)?;
        args.end()?;
        let ones = <[ForgetOne]>::ref_from_bytes(ones).map_err(|_| Errno::INVAL)?;
        for one in ones {
            self.uncount_lookup(InodeId(one.nodeid.get()), one.nlookup.get());
        }
        Ok(Answer::Silent)
    }

    pub(super) fn getattr(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &GetattrIn = args.take()?;
        args.end()?;
        let attr = self.attr_of(call, arg.getattr_flags.get(), arg.fh.get(), For::Reading)?;
        Ok(Answer::of(&attr_out(&attr, self.attr_seconds(&attr, self.may_cache_attr(&attr)))))
    }

    pub(super) fn statx(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &StatxIn = args.take()?;
        args.end()?;
        let attr = self.attr_of(call, arg.getattr_flags.get(), arg.fh.get(), For::Looking)?;
        Ok(Answer::of(&statx_out(&attr, self.attr_seconds(&attr, self.may_cache_attr(&attr)))))
    }

    /// Attributes that are told next. `by_handle`: what they are for if they are asked for through a handle.
    fn attr_of(&self, call: &Call<'_>, flags: u32, fh: u64, by_handle: For) -> Result<Attr> {
        let asked = self.known.changes(call.ino);
        // The kernel also sends directory handles here, which are always 0.
        let attr = if flags & GETATTR_FH != 0 && fh != 0 {
            let opened = self.opened(fh, call.ino)?;
            let mut attr = self.fs.fgetattr(opened.handle)?;
            // Who cannot read moves to the end of the file, and needs the answer.
            if opened.reads {
                let size = attr.size;
                self.refresh(&mut attr, by_handle, asked, || self.last_byte(opened.handle, size));
            }
            attr
        } else {
            // Who has got this answer uses names.
            if !planted(Bug::NamesUnawaited) {
                self.fs.await_names(call.ino);
            }
            let mut attr = self.fs.getattr(&call.caller, call.ino)?;
            self.refresh(&mut attr, For::Looking, asked, || None);
            attr
        };
        self.known.tell(&attr);
        Ok(attr)
    }

    fn last_byte(&self, handle: Handle, size: u64) -> Option<u8> {
        let mut byte = [0];
        let read = self.fs.read(handle, size.checked_sub(1)?, &mut byte);
        (read == Ok(1)).then_some(byte[0])
    }

    pub(super) fn setattr(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &SetattrIn = args.take()?;
        args.end()?;
        let valid = arg.valid.get();
        if valid & !fattr::ALL != 0 {
            return Err(Errno::INVAL);
        }
        let when = |bit: u32, value: u32| (valid & bit != 0).then_some(value);
        let mut set = SetAttr {
            mode: when(fattr::MODE, arg.mode.get() & 0o7777),
            uid: when(fattr::UID, arg.uid.get()),
            gid: when(fattr::GID, arg.gid.get()),
            size: (valid & fattr::SIZE != 0).then_some(arg.size.get()),
            ..SetAttr::default()
        };
        if valid & fattr::ATIME_NOW != 0 {
            set.atime = Some(SetTime::Now);
        } else if valid & fattr::ATIME != 0 {
            set.atime = Some(time(arg.atime.get(), arg.atimensec.get())?);
        }
        if valid & fattr::MTIME_NOW != 0 {
            set.mtime = Some(SetTime::Now);
        } else if valid & fattr::MTIME != 0 {
            set.mtime = Some(time(arg.mtime.get(), arg.mtimensec.get())?);
        }
        if set.size.is_some_and(|size| i64::try_from(size).is_err()) {
            return Err(Errno::INVAL);
        }
        if valid & fattr::FH != 0 && set.size.is_some() {
            set.handle = Some(self.opened(arg.fh.get(), call.ino)?.handle);
        }
        let _change = self.known.change(call.ino, set.size.unwrap_or(0));
        if valid & fattr::FIELDS == 0 {
            // chown to the same owner, which has its time: of that the kernel tells only this.
            let owner = self.fs.getattr(&Caller::ROOT, call.ino)?.uid;
            set.uid = [0, owner].contains(&call.caller.uid).then_some(owner);
        }
        let mut attr = self.fs.setattr(&call.caller, call.ino, &set)?;
        if valid & fattr::FIELDS == 0 && [0, attr.uid].contains(&call.caller.uid) {
            // It also ends set-id bits.
            attr = self.clear_set_id(call, call.ino, attr)?;
        }
        if valid & fattr::KILL_SUIDGID != 0 && set.size.is_some() {
            attr = self.clear_set_id(call, call.ino, attr)?;
        }
        self.known.tell(&attr);
        Ok(Answer::of(&attr_out(
            &attr,
            self.attr_seconds(&attr, self.may_cache_unversioned(&attr)),
        )))
    }

    /// The kernel asks us to drop set-id bits when content changes under a caller without
    /// CAP_FSETID. Most file systems behind the trait have done so themselves.
    pub(super) fn clear_set_id(&self, call: &Call<'_>, ino: InodeId, attr: Attr) -> Result<Attr> {
        let mut drop = attr.mode & S_ISUID;
        // Without execution for the group it stays with its members.
        let member = || call.caller.uid == 0 || self.in_group(call, attr.gid);
        if attr.mode & S_ISGID != 0 && (attr.mode & S_IXGRP != 0 || !member()) {
            drop |= S_ISGID;
        }
        if drop == 0 || attr.is_dir() {
            return Ok(attr);
        }
        let mode = Some(attr.mode & 0o7777 & !drop);
        self.fs.setattr(&Caller::ROOT, ino, &SetAttr { mode, ..SetAttr::default() })
    }

    pub(super) fn readlink(
        &self,
        call: &Call<'_>,
        args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        args.end()?;
        let target = self.fs.readlink(&call.caller, call.ino)?;
        payload(sink, &target)
    }

    fn make(
        &self,
        call: &Call<'_>,
        caller: &Caller<'_>,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Answer> {
        if self.is_virtual_name(call.ino, name) {
            return Err(Errno::EXIST);
        }
        let attr = self.fs.mknod(caller, call.ino, name, node)?;
        Ok(Answer::of(&self.new_entry(call.ino, name, &attr)))
    }

    pub(super) fn symlink(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let name = args.name()?;
        let target = args.target()?;
        args.end()?;
        self.make(call, &call.caller, name, &NewNode { mode: S_IFLNK | 0o777, rdev: 0, target })
    }

    pub(super) fn mknod(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &MknodIn = args.take()?;
        let name = args.name()?;
        args.end()?;
        let caller = Caller { umask: arg.umask.get() & 0o777, ..call.caller };
        let mode = arg.mode.get() & (S_IFMT | 0o7777);
        if matches!(mode & S_IFMT, S_IFDIR | S_IFLNK) {
            return Err(Errno::INVAL);
        }
        self.make(call, &caller, name, &NewNode { mode, rdev: arg.rdev.get(), target: b"" })
    }

    pub(super) fn mkdir(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &MkdirIn = args.take()?;
        let name = args.name()?;
        args.end()?;
        let caller = Caller { umask: arg.umask.get() & 0o777, ..call.caller };
        let mode = S_IFDIR | (arg.mode.get() & 0o7777);
        self.make(call, &caller, name, &NewNode { mode, rdev: 0, target: b"" })
    }

    /// A name that shall go or move: not the virtual directory's.
    fn removable<'a>(&self, parent: InodeId, args: &mut Args<'a>) -> Result<&'a [u8]> {
        let name = args.name()?;
        if self.is_virtual_name(parent, name) { Err(Errno::PERM) } else { Ok(name) }
    }

    pub(super) fn unlink(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let name = self.removable(call.ino, &mut args)?;
        args.end()?;
        self.fs.unlink(&call.caller, call.ino, name)?;
        Ok(Answer::Empty)
    }

    pub(super) fn rmdir(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let name = self.removable(call.ino, &mut args)?;
        args.end()?;
        self.fs.rmdir(&call.caller, call.ino, name)?;
        Ok(Answer::Empty)
    }

    fn rename_to(
        &self,
        call: &Call<'_>,
        new_parent: InodeId,
        flags: u32,
        mut args: Args<'_>,
    ) -> Result<Answer> {
        let name = self.removable(call.ino, &mut args)?;
        let new_name = self.removable(new_parent, &mut args)?;
        args.end()?;
        if virtual_dir::is_virtual(new_parent) {
            return Err(Errno::PERM);
        }
        self.check_told(new_parent)?;
        if !matches!(flags, 0 | RENAME_NOREPLACE | RENAME_EXCHANGE) {
            return Err(Errno::INVAL);
        }
        let rename = Rename { parent: call.ino, name, new_parent, new_name, flags };
        self.fs.rename(&call.caller, &rename)?;
        Ok(Answer::Empty)
    }

    pub(super) fn rename(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &RenameIn = args.take()?;
        self.rename_to(call, InodeId(arg.newdir.get()), 0, args)
    }

    pub(super) fn rename2(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &Rename2In = args.take()?;
        self.rename_to(call, InodeId(arg.newdir.get()), arg.flags.get(), args)
    }

    pub(super) fn link(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &LinkIn = args.take()?;
        let name = args.name()?;
        args.end()?;
        let old = InodeId(arg.oldnodeid.get());
        if virtual_dir::is_virtual(old) {
            return Err(Errno::PERM);
        }
        if self.is_virtual_name(call.ino, name) {
            return Err(Errno::EXIST);
        }
        self.check_told(old)?;
        let _change = self.known.change(old, 0);
        let attr = self.fs.link(&call.caller, old, call.ino, name)?;
        Ok(Answer::of(&self.new_entry(call.ino, name, &attr)))
    }

    pub(super) fn statfs(
        &self,
        call: &Call<'_>,
        args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        args.end()?;
        let ino = if virtual_dir::is_virtual(call.ino) { InodeId::ROOT } else { call.ino };
        let stat = self.fs.statfs_of(ino)?;
        Ok(Answer::of(&StatfsOut {
            blocks: stat.blocks.into(),
            bfree: stat.blocks_free.into(),
            bavail: stat.blocks_free.into(),
            files: stat.inodes.into(),
            ffree: stat.inodes_free.into(),
            bsize: stat.block_bytes.into(),
            namelen: stat.name_max.into(),
            frsize: stat.block_bytes.into(),
            ..StatfsOut::default()
        }))
    }

    pub(super) fn setxattr(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &SetxattrIn = args.take()?;
        let name = args.xattr_name()?;
        let size = arg.size.get() as usize;
        let value = args.bytes(size)?;
        args.end()?;
        if size > XATTR_MAX {
            return Err(Errno::TOOBIG);
        }
        self.check_xattr(name)?;
        let mode = match arg.flags.get() {
            0 => XattrMode::Set,
            1 => XattrMode::Create,
            2 => XattrMode::Replace,
            // Both: it cannot be.
            3 => {
                self.fs.getxattr(&call.caller, call.ino, name)?;
                XattrMode::Create
            }
            _ => return Err(Errno::INVAL),
        };
        // Who may give a file capabilities the kernel has judged: it asks for a single power (and of an empty value
        // for none).
        let gives = name == CAPABILITY;
        let caller = if gives { &Caller::ROOT } else { &call.caller };
        self.fs.setxattr(caller, call.ino, name, value, mode)?;
        self.note_acl(call.ino, name);
        Ok(Answer::Empty)
    }

    pub(super) fn getxattr(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &GetxattrIn = args.take()?;
        let name = args.xattr_name()?;
        args.end()?;
        self.check_xattr(name)?;
        let value = self.fs.getxattr(&call.caller, call.ino, name);
        self.tell_once(call.ino, name);
        sized(sink, &value?, arg.size.get())
    }

    /// An access list, or that there is none, is about to be told. The kernel keeps it until it asks for the inode's
    /// attributes, or is told that they are not what they were. Nobody tells it that of attributes that it does not
    /// keep; and to show a list to whoever has the file open, or knows its name, it asks for none. So then it is told
    /// now: it does not keep a list that it had asked for before.
    fn tell_once(&self, ino: InodeId, name: &[u8]) {
        if self.options.kernel_checks
            && is_acl(name)
            && self.fs.keeps_acls()
            && !self.fs.has_cached(ino)
            && !self.fs.is_of_snapshot(ino)
            && let Some(kernel) = self.kernel.get()
        {
            kernel.inode(ino, -1, 0);
        }
    }

    pub(super) fn listxattr(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let arg: &GetxattrIn = args.take()?;
        args.end()?;
        let mut names = self.fs.listxattr(&call.caller, call.ino)?;
        if names.windows(7).any(|w| w == b"system.") {
            let served =
                |name: &&[u8]| self.check_xattr(name.strip_suffix(b"\0").unwrap_or(name)).is_ok();
            names = names.split_inclusive(|&b| b == 0).filter(served).flatten().copied().collect();
        }
        sized(sink, &names, arg.size.get())
    }

    pub(super) fn removexattr(
        &self,
        call: &Call<'_>,
        mut args: Args<'_>,
        _: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let name = args.xattr_name()?;
        args.end()?;
        self.check_xattr(name)?;
        // Whether the caller may end a file's capabilities the kernel has judged; it ends them itself, in the
        // caller's name, when the file is written to.
        let ends = name == CAPABILITY;
        let caller = if ends { &Caller::ROOT } else { &call.caller };
        self.fs.removexattr(caller, call.ino, name)?;
        self.note_acl(call.ino, name);
        Ok(Answer::Empty)
    }

    /// An access control list changes the mode, which a kernel that passes it on as any attribute does
    /// not know.
    fn note_acl(&self, ino: InodeId, name: &[u8]) {
        if name.starts_with(b"system.") {
            self.forget_mode(ino);
        }
    }
}

/// Bytes as payload.
pub(super) fn payload(sink: &mut dyn ReplySink, bytes: &[u8]) -> Result<Answer> {
    let room = sink.payload(bytes.len());
    room.get_mut(..bytes.len()).ok_or(Errno::RANGE)?.copy_from_slice(bytes);
    Ok(Answer::Payload(bytes.len()))
}

/// An extended attribute's answer: the size when the caller asks with 0, else the bytes if they
/// fit.
fn sized(sink: &mut dyn ReplySink, bytes: &[u8], asked: u32) -> Result<Answer> {
    let len = u32::try_from(bytes.len()).map_err(|_| Errno::RANGE)?;
    if asked == 0 {
        return Ok(Answer::of(&GetxattrOut { size: len.into(), ..GetxattrOut::default() }));
    }
    if len > asked {
        return Err(Errno::RANGE);
    }
    payload(sink, bytes)
}
