//! A plain file of the host (or a block device of it).

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use base::Errno;
use rustix::fs::{FallocateFlags, SeekFrom};

use super::{Disk, Extent, Prompt, Traits, push_extent};

/// The file.
#[derive(Debug)]
pub struct PlainFile {
    file: File,
    read_only: bool,
}

/// An error of the host as one of ours.
fn errno(error: &std::io::Error) -> Errno {
    let number = error.raw_os_error().and_then(|n| u16::try_from(n).ok());
    number.map_or(Errno::IO, Errno)
}

impl PlainFile {
    /// Opens an existing file, or with `create` makes one of that many bytes if there is none.
    pub fn open(path: &Path, read_only: bool, create: Option<u64>) -> std::io::Result<Self> {
        let mut options = File::options();
        options.read(true).write(!read_only);
        let file = match (options.open(path), create) {
            (Err(error), Some(size)) if error.kind() == std::io::ErrorKind::NotFound => {
                let file = options.create_new(true).open(path)?;
                file.set_len(size)?;
                file
            }
            (opened, _) => opened?,
        };
        Ok(Self { file, read_only })
    }
}

impl Disk for PlainFile {
    fn traits(&self) -> Traits {
        Traits { read_only: self.read_only, ..Traits::BYTES }
    }

    fn size(&self) -> u64 {
        // Of a block device stat tells no size; the end of it does.
        rustix::fs::seek(&self.file, SeekFrom::End(0)).unwrap_or(0)
    }

    fn prompt(&self) -> Prompt {
        Prompt::Never
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64) {
                // It was cut short meanwhile: what is not there reads as zero.
                Ok(0) => {
                    buf[done..].fill(0);
                    break;
                }
                Ok(n) => done += n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(errno(&error)),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.file.write_all_at(data, offset).map_err(|error| errno(&error))
    }

    fn flush(&self) -> Result<(), Errno> {
        self.file.sync_data().map_err(|error| errno(&error))
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self.file.as_fd(), flags, offset, len) {
            // A hint: where it cannot be taken, nothing is lost.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) | Ok(()) => Ok(()),
            Err(error) => Err(errno(&error.into())),
        }
    }

    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno> {
        let flags = if no_hole {
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
        } else {
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
        };
        rustix::fs::fallocate(self.file.as_fd(), flags, offset, len).map_err(|error| match error {
            rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS => Errno::OPNOTSUPP,
            error => errno(&error.into()),
        })
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, Errno> {
        let seek = |from| match rustix::fs::seek(&self.file, from) {
            Ok(at) => Ok(Some(at)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(errno(&error.into())),
        };
        let (mut at, end) = (offset, offset + len);
        let mut extents = Vec::new();
        while at < end {
            let data = seek(SeekFrom::Data(at))?.unwrap_or(end).clamp(at, end);
            let hole = Extent { len: data - at, hole: true, zero: true };
            if !push_extent(&mut extents, hole) || data == end {
                break;
            }
            let next = seek(SeekFrom::Hole(data))?.unwrap_or(end).clamp(data, end);
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
