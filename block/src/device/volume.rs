//! A file of the Corbel volume (or of any [`FileSystem`]): a flush returns when every replica has it.

use std::sync::Arc;

use base::{Errno, InodeId};
use client::fs::{
    Caller, FileSystem, Handle, O_EXCL, O_RDONLY, O_RDWR, S_IFDIR, S_IFREG, SetAttr, Whence, falloc,
};
use client::path::{Found, Walked, walk};

use super::{Disk, Extent, Prompt, Traits, push_extent};

/// Most bytes written, or punched, by one call: a long one would keep a lease that others wait for.
const PIECE: u64 = 8 << 20;

/// The file.
pub struct VolumeFile {
    fs: Arc<dyn FileSystem>,
    handle: Handle,
    read_only: bool,
}

impl std::fmt::Debug for VolumeFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolumeFile").field("handle", &self.handle).finish_non_exhaustive()
    }
}

impl VolumeFile {
    /// Opens the regular file at an absolute path of the volume as `caller`; with `create` makes one of that many
    /// bytes (a hole) with mode 0600 if there is none. Links that lead outside are refused with `ELOOP`.
    pub fn open(
        fs: Arc<dyn FileSystem>,
        caller: &Caller<'_>,
        path: &[u8],
        read_only: bool,
        create: Option<u64>,
    ) -> Result<Self, Errno> {
        let found = find(&*fs, caller, path)?;
        let flags = if read_only { O_RDONLY } else { O_RDWR };
        let handle = match (found.attr, create) {
            (None, Some(size)) if !found.must_be_dir && !read_only => {
                let (attr, handle) =
                    fs.create(caller, found.parent, &found.name, 0o600, O_RDWR | O_EXCL)?;
                let set = SetAttr { size: Some(size), handle: Some(handle), ..SetAttr::default() };
                if let Err(error) = fs.setattr(caller, attr.ino, &set) {
                    fs.release(handle);
                    return Err(error);
                }
                handle
            }
            (None, _) => return Err(Errno::NOENT),
            (Some(attr), _) => match attr.kind() {
                S_IFREG => fs.open(caller, attr.ino, flags)?,
                S_IFDIR => return Err(Errno::ISDIR),
                _ => return Err(Errno::INVAL),
            },
        };
        Ok(Self { fs, handle, read_only })
    }
}

/// Where a path leads. Absolute links lead to the volume's own root: there is no other here.
fn find(fs: &dyn FileSystem, caller: &Caller<'_>, path: &[u8]) -> Result<Found, Errno> {
    let mut path = path.to_vec();
    for _ in 0..40 {
        match walk(fs, caller, InodeId::ROOT, &path, true)? {
            Walked::At(found) => return Ok(found),
            Walked::Outside(next) if next.starts_with(b"..") => path = [b"/", &next[2..]].concat(),
            Walked::Outside(next) => path = next,
        }
    }
    Err(Errno::LOOP)
}

/// Calls `each` with pieces of a range.
fn pieces(
    offset: u64,
    len: u64,
    mut each: impl FnMut(u64, u64) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let n = PIECE.min(end - at);
        each(at, n)?;
        at += n;
    }
    Ok(())
}

impl Disk for VolumeFile {
    fn traits(&self) -> Traits {
        Traits { read_only: self.read_only, ..Traits::BYTES }
    }

    fn size(&self) -> u64 {
        self.fs.fgetattr(self.handle).map_or(0, |attr| attr.size)
    }

    fn prompt(&self) -> Prompt {
        Prompt::UnlessDurable
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < buf.len() {
            let n = self.fs.read(self.handle, offset + done as u64, &mut buf[done..])?;
            if n == 0 {
                // It was cut short meanwhile.
                buf[done..].fill(0);
                break;
            }
            done += n;
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < data.len() {
            let end = data.len().min(done + PIECE as usize);
            let n = self.fs.write(self.handle, offset + done as u64, &data[done..end], false)?.len;
            if n == 0 {
                return Err(Errno::IO);
            }
            done += n;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), Errno> {
        self.fs.fsync(self.handle, true)
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), Errno> {
        match self.zero(offset, len, false) {
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => result,
        }
    }

    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno> {
        let mode = if no_hole { falloc::ZERO_RANGE } else { falloc::PUNCH_HOLE };
        pieces(offset, len, |at, n| self.fs.fallocate(self.handle, mode | falloc::KEEP_SIZE, at, n))
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, Errno> {
        let seek = |at, whence| match self.fs.lseek(self.handle, at, whence) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            Err(error) => Err(error),
        };
        let (mut at, end) = (offset, offset + len);
        let mut extents = Vec::new();
        while at < end {
            let data = seek(at, Whence::Data)?.unwrap_or(end).clamp(at, end);
            let hole = Extent { len: data - at, hole: true, zero: true };
            if !push_extent(&mut extents, hole) || data == end {
                break;
            }
            let next = seek(data, Whence::Hole)?.unwrap_or(end).clamp(data, end);
            // Somebody punches under our hands: call it data rather than go round for ever.
            let next = if next == data { end } else { next };
            if !push_extent(&mut extents, Extent { len: next - data, hole: false, zero: false }) {
                break;
            }
            at = next;
        }
        Ok(extents)
    }
}

impl Drop for VolumeFile {
    fn drop(&mut self) {
        self.fs.release(self.handle);
    }
}
