//! The kernel, as it is: a ring whose commands go to the character device of a ublk device.
#![allow(unsafe_code)] // entries of a ring, and memory that the kernel writes, have no safe wrapper

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;

use base::Errno;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::mm::{MapFlags, ProtFlags};
use zerocopy::IntoBytes;

use super::abi::{self, Description, IoCommand};
use super::queue::{Move, Pages};
use super::worker::{Event, Kernel};

/// What an entry of the ring was for, above its tag.
const FETCH: u64 = 0;
const MOVE: u64 = 1 << 16;
const BELL: u64 = 2 << 16;

/// Which queue of which device this is.
#[derive(Debug)]
pub struct Place {
    /// The character device.
    pub device: Arc<File>,
    /// Its number among the device's queues.
    pub queue: u16,
    /// Its requests.
    pub depth: u16,
    /// The file that bytes are moved from and to, if they are.
    pub file: Option<Arc<OwnedFd>>,
}

/// Descriptions of the requests of a queue, which the kernel writes.
#[derive(Debug)]
struct Descriptions {
    at: NonNull<Description>,
    bytes: usize,
    depth: u16,
}

impl Descriptions {
    fn map(place: &Place) -> io::Result<Self> {
        let bytes = usize::from(place.depth) * size_of::<Description>();
        let bytes = bytes.next_multiple_of(rustix::param::page_size());
        let offset = abi::descriptions_offset(place.queue);
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of ours.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                &place.device,
                offset,
            )
        }?;
        let at = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mapped at nothing"))?;
        Ok(Self { at, bytes, depth: place.depth })
    }

    fn get(&self, tag: u16) -> Description {
        assert!(tag < self.depth, "a tag of this queue");
        // SAFETY: the mapping has `depth` descriptions and lives as long as `self`. The kernel wrote this one before it completed the
        // fetch under its tag, and writes it again only after the next one; should it do so now, any bytes are a `Description`.
        unsafe { self.at.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptions {
    fn drop(&mut self) {
        // SAFETY: it is ours, and no reference into it exists: `get` copies.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// The ring of a queue. It belongs to the thread that made it.
pub struct Ring {
    ring: IoUring,
    descriptions: Descriptions,
    place: Place,
    /// The ring watches the bell.
    watching: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring for a queue.
    ///
    /// # Errors
    /// When the kernel lacks memory, or the right to use io_uring is not given.
    pub fn new(place: Place) -> io::Result<Self> {
        let descriptions = Descriptions::map(&place)?;
        // One thread uses it, and that always waits in the kernel for what comes: it need not be interrupted.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .dontfork()
            .build(u32::from(place.depth) + 1)?;
        if place.file.is_some() {
            // The kernel puts the pages of the request with tag N in place N.
            ring.submitter().register_buffers_sparse(place.depth.into())?;
        }
        Ok(Self { ring, descriptions, place, watching: false })
    }

    fn push(&mut self, entry: squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: what entries refer to outlives them: the character device and the file are open as long as `self` has
            // the ring, the bell belongs to the caller of `wait` and is only polled, and no entry has memory of this process.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }

    fn command(&mut self, number: u32, tag: u16, result: i32) -> io::Result<()> {
        let command = IoCommand { queue: self.place.queue, tag, result, addr: 0 };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let device = types::Fd(self.place.device.as_raw_fd());
        // Where the pages of the next request go in the table of buffers.
        let buffer = self.place.file.as_ref().map(|_| u64::from(tag));
        let entry = opcode::UringCmd16::new(device, number).cmd(bytes).addr(buffer).build();
        self.push(entry.user_data(FETCH | u64::from(tag)))
    }
}

impl Pages for Ring {
    fn take(&self, tag: u16, data: &mut [u8]) -> Result<(), Errno> {
        let offset = abi::buffer_offset(self.place.queue, tag);
        self.place.device.read_exact_at(data, offset).map_err(|_| Errno::IO)
    }

    fn give(&self, tag: u16, data: &[u8]) -> Result<(), Errno> {
        let offset = abi::buffer_offset(self.place.queue, tag);
        self.place.device.write_all_at(data, offset).map_err(|_| Errno::IO)
    }
}

impl Kernel for Ring {
    fn fetch(&mut self, tag: u16) -> io::Result<()> {
        self.command(abi::io::FETCH, tag, 0)
    }

    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.command(abi::io::COMMIT_AND_FETCH, tag, result)
    }

    fn start_move(&mut self, tag: u16, what: Move) -> io::Result<()> {
        let file = self.place.file.as_ref().ok_or_else(|| io::Error::other("no file"))?;
        let file = types::Fd(file.as_raw_fd());
        // In a table of buffers that the kernel fills, an address is an offset into the buffer.
        let from = std::ptr::without_provenance_mut::<u8>(what.from as usize);
        let entry = if what.write {
            let flags = if what.durable { RWF_DSYNC } else { 0 };
            opcode::WriteFixed::new(file, from, what.len, tag)
                .offset(what.offset)
                .rw_flags(flags)
                .build()
        } else {
            opcode::ReadFixed::new(file, from, what.len, tag).offset(what.offset).build()
        };
        self.push(entry.user_data(MOVE | u64::from(tag)))
    }

    fn describe(&self, tag: u16) -> Description {
        self.descriptions.get(tag)
    }

    fn wait(&mut self, bell: BorrowedFd<'_>, events: &mut Vec<Event>) -> io::Result<()> {
        if !self.watching {
            let poll = opcode::PollAdd::new(types::Fd(bell.as_raw_fd()), POLLIN).build();
            self.push(poll.user_data(BELL))?;
            self.watching = true;
        }
        match self.ring.submit_and_wait(1) {
            Ok(_) => {}
            // More than the kernel can take now: what has ended is taken first.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy
                ) => {}
            // Memory is short, for a moment: whoever writes to this disk to have some of it waits for us.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory
                ) =>
            {
                std::thread::sleep(SHORT);
            }
            Err(error) => return Err(error),
        }
        for entry in self.ring.completion() {
            let tag = (entry.user_data() & 0xffff) as u16;
            events.push(match entry.user_data() & !0xffff {
                FETCH => Event::Fetched(tag, entry.result()),
                MOVE => Event::Moved(tag, entry.result()),
                _ => {
                    self.watching = false;
                    let mut count = [0; 8];
                    // Empty is as good.
                    let _ = rustix::io::read(bell, &mut count);
                    Event::Woken
                }
            });
        }
        Ok(())
    }
}

/// How long a ring rests for which the kernel has no memory.
const SHORT: std::time::Duration = std::time::Duration::from_millis(1);
/// `RWF_DSYNC` of `preadv2(2)`.
const RWF_DSYNC: i32 = 2;
/// `POLLIN` of `poll(2)`.
const POLLIN: u32 = 1;
