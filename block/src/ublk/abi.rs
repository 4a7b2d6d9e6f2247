//! Numbers and structures of `include/uapi/linux/ublk_cmd.h`, those that are used here. They are the machine's own byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What device and logical blocks are counted in.
pub const SECTOR_SHIFT: u32 = 9;
/// Requests that a queue may have.
pub const DEPTH_MAX: u16 = 4096;
/// Queues that a device may have.
pub const QUEUES_MAX: u16 = 4096;
/// How a request ends that the kernel gives up, with the device or its server: it is not fetched again.
pub const ABORTED: i32 = -19;

/// Where the data of a request begins in the character device.
const BUFFERS: u64 = 0x8000_0000;
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = TAG_SHIFT + 16;

/// Where the data of a request is in the character device.
pub fn buffer_offset(queue: u16, tag: u16) -> u64 {
    BUFFERS + ((u64::from(queue) << QUEUE_SHIFT) | (u64::from(tag) << TAG_SHIFT))
}

/// Where the descriptions of a queue's requests are in the character device.
pub fn descriptions_offset(queue: u16) -> u64 {
    // A whole number of pages, of whatever size.
    let bytes = u64::from(DEPTH_MAX) * size_of::<Description>() as u64;
    let page = rustix::param::page_size() as u64;
    u64::from(queue) * bytes.next_multiple_of(page)
}

/// A command for a character device of ublk, as `_IOC` encodes it.
const fn encode(direction: u32, number: u32, size: usize) -> u32 {
    (direction << 30) | ((size as u32) << 16) | ((b'u' as u32) << 8) | number
}
const READ: u32 = 2;
const BOTH: u32 = 3;

/// Commands for `/dev/ublk-control`.
pub mod control {
    use super::{BOTH, ControlCommand, READ, encode};
    const SIZE: usize = size_of::<ControlCommand>();
    /// Tells a device's [`super::Info`].
    pub const GET_INFO: u32 = encode(READ, 0x02, SIZE);
    /// Makes a device.
    pub const ADD: u32 = encode(BOTH, 0x04, SIZE);
    /// Removes one, and waits until nobody has its character device open.
    pub const DELETE: u32 = encode(BOTH, 0x05, SIZE);
    /// Makes its disk, once all requests of all queues are fetched.
    pub const START: u32 = encode(BOTH, 0x06, SIZE);
    /// Removes its disk.
    pub const STOP: u32 = encode(BOTH, 0x07, SIZE);
    /// Says what the disk is like.
    pub const SET_PARAMS: u32 = encode(BOTH, 0x08, SIZE);
    /// Tells that.
    pub const GET_PARAMS: u32 = encode(READ, 0x09, SIZE);
    /// Begins to take over a device whose server is gone.
    pub const START_RECOVERY: u32 = encode(BOTH, 0x10, SIZE);
    /// Ends that, once all requests of all queues are fetched.
    pub const END_RECOVERY: u32 = encode(BOTH, 0x11, SIZE);
    /// Tells what the driver can do.
    pub const GET_FEATURES: u32 = encode(READ, 0x13, SIZE);
}

/// Commands for the character device of a device.
pub mod io {
    use super::{BOTH, IoCommand, encode};
    const SIZE: usize = size_of::<IoCommand>();
    /// The server is ready for a request under a tag.
    pub const FETCH: u32 = encode(BOTH, 0x20, SIZE);
    /// A request has ended, and the server is ready for the next one.
    pub const COMMIT_AND_FETCH: u32 = encode(BOTH, 0x21, SIZE);
}

/// What the driver can do, and a device is to do.
pub mod flag {
    /// The ring may read and write with the pages of requests.
    pub const ZERO_COPY: u64 = 1 << 0;
    /// The device outlives its server.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// What a server had in hand when it died is given to the next one.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are encoded as those of ioctl are.
    pub const IOCTL_ENCODE: u64 = 1 << 6;
    /// The data of requests is read and written at the character device.
    pub const USER_COPY: u64 = 1 << 7;
    /// The pages of a request are put in the ring's table of buffers before it is told.
    pub const AUTO_BUF_REG: u64 = 1 << 11;
}

/// What a device is doing.
pub mod state {
    /// It has no disk.
    pub const DEAD: u16 = 0;
    /// It has a disk and a server.
    pub const LIVE: u16 = 1;
    /// It has a disk whose requests wait for the next server.
    pub const QUIESCED: u16 = 2;
}

/// What requests ask for.
pub mod op {
    /// Bytes.
    pub const READ: u8 = 0;
    /// Bytes to keep.
    pub const WRITE: u8 = 1;
    /// What was completed becomes durable.
    pub const FLUSH: u8 = 2;
    /// Bytes are needed no more.
    pub const DISCARD: u8 = 3;
    /// Bytes read as zero.
    pub const WRITE_ZEROES: u8 = 5;
    /// It is completed when it is durable.
    pub const FUA: u32 = 1 << 13;
    /// Zeroes keep their space.
    pub const NO_UNMAP: u32 = 1 << 15;
}

/// Attributes of [`Basic`].
pub mod attribute {
    /// No writes.
    pub const READ_ONLY: u32 = 1 << 0;
    /// Flushes are needed.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// A write may be made durable alone.
    pub const FUA: u32 = 1 << 3;
}

/// A command for `/dev/ublk-control` (`ublksrv_ctrl_cmd`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ControlCommand {
    /// Device; all ones asks for any.
    pub id: u32,
    /// All ones: none.
    pub queue: u16,
    /// Bytes at `addr`.
    pub len: u16,
    /// What goes with it, either way.
    pub addr: u64,
    /// One number.
    pub data: u64,
    /// For devices of users without rights.
    pub path_len: u16,
    /// Nothing.
    pub pad: u16,
    /// Nothing.
    pub reserved: u32,
}

/// What a device is (`ublksrv_ctrl_dev_info`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Info {
    /// Hardware queues; the kernel makes no more than it has processors.
    pub queues: u16,
    /// Requests in each.
    pub depth: u16,
    /// One of [`state`].
    pub state: u16,
    /// Nothing.
    pub pad0: u16,
    /// Most bytes of a request.
    pub io_bytes: u32,
    /// Its number.
    pub id: u32,
    /// The server's process.
    pub pid: i32,
    /// Nothing.
    pub pad1: u32,
    /// Of [`flag`].
    pub flags: u64,
    /// The server's own.
    pub mark: u64,
    /// Who made it.
    pub uid: u32,
    /// Who made it.
    pub gid: u32,
    /// Nothing.
    pub reserved: [u64; 2],
}

/// What a disk is like (`ublk_param_basic`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Basic {
    /// Of [`attribute`].
    pub attributes: u32,
    /// Logical block, as a power of two.
    pub logical_shift: u8,
    /// Physical block.
    pub physical_shift: u8,
    /// Best size of a request.
    pub optimal_shift: u8,
    /// Smallest good size of a request.
    pub minimal_shift: u8,
    /// Most sectors of a request.
    pub max_sectors: u32,
    /// Border that requests do not cross; 0: none.
    pub chunk_sectors: u32,
    /// Sectors in all.
    pub sectors: u64,
    /// Nothing.
    pub virt_boundary_mask: u64,
}

/// What a disk does with what is not needed any more (`ublk_param_discard`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Discard {
    /// Where the first block begins.
    pub alignment: u32,
    /// Bytes of a block.
    pub granularity: u32,
    /// Most sectors of a request.
    pub max_sectors: u32,
    /// Most sectors of zeroes.
    pub max_zero_sectors: u32,
    /// Ranges in a request.
    pub max_segments: u16,
    /// Nothing.
    pub reserved: u16,
}

/// [`Params::basic`] is there.
pub const PARAMS_BASIC: u32 = 1 << 0;
/// [`Params::discard`] is there.
pub const PARAMS_DISCARD: u32 = 1 << 1;

/// Parameters of a disk (`ublk_params`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Params {
    /// Bytes of this structure.
    pub len: u32,
    /// Which of it are there.
    pub types: u32,
    /// What it is like.
    pub basic: Basic,
    /// What is not needed.
    pub discard: Discard,
    /// What is not used here: device numbers, zones.
    pub rest: [u8; 52],
}

impl Default for Params {
    fn default() -> Self {
        let len = size_of::<Self>() as u32;
        let (basic, discard) = (Basic::default(), Discard::default());
        Self { len, types: 0, basic, discard, rest: [0; 52] }
    }
}

/// A command for the character device (`ublksrv_io_cmd`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct IoCommand {
    /// Queue.
    pub queue: u16,
    /// Which of its requests.
    pub tag: u16,
    /// Bytes done, or the error's number, negative.
    pub result: i32,
    /// Not used with `USER_COPY`.
    pub addr: u64,
}

/// A request (`ublksrv_io_desc`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Description {
    /// One of [`op`] in the low byte; flags above.
    pub op_flags: u32,
    /// How many.
    pub sectors: u32,
    /// The first one.
    pub start: u64,
    /// Not used with `USER_COPY`.
    pub addr: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a C compiler has them, from the kernel's header.
    #[test]
    fn numbers_and_sizes_are_the_kernels() {
        assert_eq!(size_of::<ControlCommand>(), 32);
        assert_eq!(size_of::<Info>(), 64);
        assert_eq!((size_of::<Basic>(), size_of::<Discard>(), size_of::<Params>()), (32, 20, 112));
        assert_eq!((size_of::<IoCommand>(), size_of::<Description>()), (16, 24));
        assert_eq!((control::GET_INFO, control::ADD), (0x8020_7502, 0xc020_7504));
        assert_eq!((io::FETCH, io::COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
        assert_eq!(buffer_offset(0, 0), 0x8000_0000);
        assert_eq!(buffer_offset(1, 3), 0x8000_0000 + (1 << 41) + (3 << 25));
        assert_eq!(
            descriptions_offset(2),
            2 * 98304_u64.next_multiple_of(rustix::param::page_size() as u64)
        );
    }
}
