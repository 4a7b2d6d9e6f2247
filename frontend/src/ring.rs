//! An io_uring with room for one command, and the memory through which the kernel hands over a FUSE
//! request: what `dev_uring` needs of `linux/io_uring.h` and `linux/fuse.h`.
#![allow(unsafe_code)] // system calls on memory that the kernel shares, and its mapping

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::io_uring::{
    IORING_OFF_SQ_RING, IORING_OFF_SQES, IoringEnterFlags, IoringSetupFlags, io_uring_enter,
    io_uring_params, io_uring_setup,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::fuse::IO_BYTES_MAX;

/// `IORING_OP_URING_CMD`.
const URING_CMD: u8 = 46;
/// `FUSE_IO_URING_CMD_REGISTER`: an entry for requests.
const REGISTER: u32 = 1;
/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`: a reply, and the wish for the next request.
const COMMIT_AND_FETCH: u32 = 2;

/// A submission with the 80 bytes for a command of its own (`IORING_SETUP_SQE128`), as the kernel has it.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Command {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    cmd_op: u32,
    pad: u32,
    addr: u64,
    len: u32,
    cmd_flags: u32,
    user_data: u64,
    buf_index: u16,
    personality: u16,
    file_index: u32,
    /// From here on `struct fuse_uring_cmd_req`.
    request_flags: u64,
    commit_id: u64,
    qid: u16,
    padding: [u16; 3],
    rest: [u64; 7],
}

/// What the kernel reads at `addr` of [`REGISTER`].
#[repr(C)]
#[derive(Debug)]
struct IoVec {
    base: *mut u8,
    len: usize,
}

/// A completion, as the kernel has it.
#[repr(C)]
struct Completion {
    user_data: u64,
    result: i32,
    flags: u32,
}

const _: () = assert!(size_of::<Command>() == 128 && size_of::<Completion>() == 16);

/// Memory that is mapped, and no more when this is dropped.
#[derive(Debug)]
struct Mapped {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: memory is not bound to a thread; who may touch it is up to the owner.
unsafe impl Send for Mapped {}

impl Mapped {
    fn new(fd: &OwnedFd, offset: u64, len: usize) -> Result<Self, Errno> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that nothing else uses.
        let at = unsafe { mmap(null_mut(), len, both, MapFlags::SHARED, fd, offset) }?;
        let at = NonNull::new(at.cast::<u8>()).ok_or(Errno::NOMEM)?;
        Ok(Self { at, len })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: it is our mapping, and whoever had slices of it has borrowed its owner. An error would
        // leave it there.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// A ring for one command at a time, for the thread that makes it.
#[derive(Debug)]
pub struct Ring {
    fd: OwnedFd,
    rings: Mapped,
    commands: Mapped,
    at: io_uring_params,
    /// A command lies there that the kernel has not taken.
    queued: bool,
}

impl Ring {
    /// For the calling thread, and only for it.
    ///
    /// # Errors
    /// When the kernel has no such rings, or lets us have none.
    pub fn new() -> Result<Self, Errno> {
        let flags = IoringSetupFlags::SQE128
            | IoringSetupFlags::NO_SQARRAY
            // Only when the thread asks does the kernel copy a request to it: one wake-up, and no signal.
            | IoringSetupFlags::SINGLE_ISSUER
            | IoringSetupFlags::DEFER_TASKRUN;
        let mut at = io_uring_params::default();
        at.flags = flags;
        // SAFETY: the kernel fills in the parameters, and nothing else.
        let fd = unsafe { io_uring_setup(1, &mut at) }?;
        let len = at.cq_off.cqes as usize + at.cq_entries as usize * size_of::<Completion>();
        let rings = Mapped::new(&fd, IORING_OFF_SQ_RING, len)?;
        let commands =
            Mapped::new(&fd, IORING_OFF_SQES, at.sq_entries as usize * size_of::<Command>())?;
        Ok(Self { fd, rings, commands, at, queued: false })
    }

    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: the kernel gave these offsets, within the rings and aligned; they live as long as we.
        unsafe { self.rings.at.add(offset as usize).cast::<AtomicU32>().as_ref() }
    }

    /// Gives the kernel a command at the next [`submit`](Self::submit) or [`wait`](Self::wait). The last
    /// one has been taken: there is one at a time.
    pub fn queue(&mut self, command: Command) {
        let tail = self.word(self.at.sq_off.tail);
        let at = tail.load(Ordering::Relaxed);
        let slot = at & (self.at.sq_entries - 1);
        // SAFETY: within the mapping, as the kernel has `sq_entries` of them, a power of two; and it reads
        // none before the tail says so.
        unsafe { self.commands.at.cast::<Command>().add(slot as usize).write(command) };
        tail.store(at.wrapping_add(1), Ordering::Release);
        self.queued = true;
    }

    fn enter(&mut self, wait: u32) -> Result<(), Errno> {
        let submit = u32::from(self.queued);
        let flags = IoringEnterFlags::GETEVENTS;
        // SAFETY: the command points to memory that lives (see its makers), and there is no argument.
        match unsafe { io_uring_enter(&self.fd, submit, wait, flags) } {
            Ok(_) => {
                self.queued = false;
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The result of the last command, if it is there; it stays there.
    fn result(&self) -> Option<i32> {
        let at = self.word(self.at.cq_off.head).load(Ordering::Relaxed);
        if at == self.word(self.at.cq_off.tail).load(Ordering::Acquire) {
            return None;
        }
        let slot = (at & (self.at.cq_entries - 1)) as usize;
        // SAFETY: within the mapping (see `new`), aligned, and the tail says that it is written.
        unsafe {
            let first = self.rings.at.add(self.at.cq_off.cqes as usize).cast::<Completion>();
            Some(first.add(slot).read().result)
        }
    }

    /// Hands the command over.
    ///
    /// # Errors
    /// When the kernel refuses it. (Its result may be there all the same, for [`wait`](Self::wait).)
    pub fn submit(&mut self) -> Result<(), Errno> {
        while self.queued {
            self.enter(0)?;
        }
        match self.result() {
            Some(error) if error < 0 => Err(Errno::from_raw_os_error(-error)),
            _ => Ok(()),
        }
    }

    /// Hands the command over if that is not done yet, and waits until the kernel has a request, or none
    /// any more.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn wait(&mut self) -> Result<(), Errno> {
        let result = loop {
            match self.result() {
                Some(result) if !self.queued => break result,
                _ => self.enter(1)?,
            }
        };
        let head = self.word(self.at.cq_off.head);
        head.store(head.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        if result < 0 { Err(Errno::from_raw_os_error(-result)) } else { Ok(()) }
    }
}

/// Where the payload of a request or a reply begins in an [`Area`]; `struct fuse_uring_req_header` is at its
/// beginning. Room is left in between to put a request together.
pub const PAYLOAD: usize = 4096;
/// Size of `struct fuse_uring_req_header`.
const HEADERS: usize = 288;
const AREA: usize = PAYLOAD + IO_BYTES_MAX;

/// The memory of an entry, mapped twice: the kernel is told one address when the entry is registered, and for
/// good; the thread that serves it uses the other. So somebody else can give the kernel other memory at its
/// address, while a thread goes on with what it is at.
#[derive(Debug)]
pub struct Area {
    memory: OwnedFd,
    ours: Mapped,
}

/// The address that the kernel has. The memory there stays until [`Window::unmap`].
#[derive(Clone, Copy, Debug)]
pub struct Window(NonNull<u8>);

// SAFETY: an address is not bound to a thread.
unsafe impl Send for Window {}
// SAFETY: nobody gets at the memory through a reference to this.
unsafe impl Sync for Window {}

impl Area {
    /// New memory, all zero.
    ///
    /// # Errors
    /// When there is none.
    pub fn new() -> Result<Self, Errno> {
        let memory = rustix::fs::memfd_create("corbel-fuse", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, AREA as u64)?;
        let ours = Mapped::new(&memory, 0, AREA)?;
        Ok(Self { memory, ours })
    }

    /// Maps it for the kernel.
    ///
    /// # Errors
    /// When there is no room.
    pub fn window(&self) -> Result<Window, Errno> {
        let mapped = Mapped::new(&self.memory, 0, AREA)?;
        let window = Window(mapped.at);
        std::mem::forget(mapped);
        Ok(window)
    }

    /// Puts it in the place of the memory that the kernel has had there.
    ///
    /// # Errors
    /// When there is no room; then all is as before.
    pub fn replace(&self, window: Window) -> Result<(), Errno> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: a window is a mapping of this length that no reference leads into (see `bytes`).
        unsafe { mmap(window.0.as_ptr().cast(), AREA, both, flags, &self.memory, 0) }?;
        Ok(())
    }

    /// All of it. To be called while the kernel has no command of this entry, and writes nothing there.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is so long, ours, and borrowed from us. The kernel writes only between a
        // command and its completion, when the thread is in a system call.
        unsafe { std::slice::from_raw_parts_mut(self.ours.at.as_ptr(), AREA) }
    }
}

impl Window {
    /// The entry is no more.
    pub fn unmap(self) {
        drop(Mapped { at: self.0, len: AREA });
    }
}

/// What [`Command::register`] points to.
#[derive(Debug)]
pub struct Parts([IoVec; 2]);

impl Parts {
    /// Headers and payload in `window`.
    pub fn new(window: Window) -> Box<Self> {
        let payload = window.0.as_ptr().wrapping_add(PAYLOAD);
        let headers = IoVec { base: window.0.as_ptr(), len: HEADERS };
        Box::new(Self([headers, IoVec { base: payload, len: IO_BYTES_MAX }]))
    }
}

impl Command {
    /// Makes an entry of a queue and waits for its first request. The parts must live until it is
    /// submitted, and their window until it ends with an error.
    pub fn register(device: &OwnedFd, qid: u16, parts: &Parts) -> Self {
        Self {
            opcode: URING_CMD,
            fd: device.as_raw_fd(),
            cmd_op: REGISTER,
            addr: parts.0.as_ptr() as u64,
            len: 2,
            qid,
            ..Self::default()
        }
    }

    /// Answers a request of an entry with what is in its window, and waits for the next one.
    pub fn commit(device: &OwnedFd, qid: u16, commit_id: u64) -> Self {
        let (opcode, fd) = (URING_CMD, device.as_raw_fd());
        Self { opcode, fd, cmd_op: COMMIT_AND_FETCH, qid, commit_id, ..Self::default() }
    }
}
