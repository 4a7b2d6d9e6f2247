//! Every limit of the media formats, with the consequence of changing it.

/// Bytes of a tree page and of a data block. Extents count in blocks; writes are byte-granular.
pub const BLOCK_BYTES: u64 = 4096;
/// A line of the CPU cache: log entries begin on one, so that a torn line never mixes two headers.
pub const LINE_BYTES: u64 = 64;
/// Longest name of a directory entry (NAME_MAX).
pub const NAME_MAX: usize = 255;
/// Longest target of a symbolic link (PATH_MAX with its NUL).
pub const TARGET_MAX: usize = 4095;
/// Longest name of an extended attribute.
pub const XATTR_NAME_MAX: usize = 255;
/// Longest value of an extended attribute (XATTR_SIZE_MAX). Builds before this one had 60 KiB, and refuse log
/// entries and volumes with longer ones.
pub const XATTR_VALUE_MAX: usize = 64 * 1024;
/// Longest payload of one log entry. A write call above it becomes several entries.
pub const PAYLOAD_MAX: usize = 1 << 20;
/// Largest file: 16 TiB.
pub const FILE_SIZE_MAX: u64 = 1 << 44;
/// Snapshots of a volume. Inodes of theirs are told from others by a number of 15 bits (`InodeId::in_snapshot`).
pub const SNAPSHOTS_MAX: usize = 16_384;
/// Hard links of one inode.
pub const LINK_MAX: u32 = 1_000_000;

/// Lanes of a client's log.
pub const LANES_MAX: usize = 8;
/// Smallest lane: the largest entry must fit four times, so that a full ring always drains.
pub const LANE_BYTES_MIN: u64 = 4 * (PAYLOAD_MAX as u64 + LINE_BYTES);
/// Largest lane (the papers' 512 MiB).
pub const LANE_BYTES_MAX: u64 = 512 << 20;
/// Leases that one client can hold: more than the inodes that it remembers. Each costs 16 bytes of its
/// control area and 16 of its row in the client table (where files are sparse, only once it is used), and
/// some 200 of the service's memory while it is held.
pub const LEASE_SLOTS: usize = 131_072;
/// Open inodes of one client that a restarted service remembers; of those beyond, a file without a
/// name does not survive the restart.
pub const PIN_SLOTS: usize = 16_384;
/// Threads of a client that can be inside an operation at once; each costs a cache line.
pub const OP_SLOTS: usize = 64;
/// Requests of a client that can be under way at once.
pub const RPC_SLOTS: usize = 8;
/// Ranges of file locks that one client (a whole mount, say) can hold; the head keeps 48 bytes each.
pub const LOCKS_MAX: usize = 16_384;
/// Locks that one client can wait for at once.
pub const LOCK_WAITS_MAX: usize = 1024;
/// Bytes of a request slot: the longest reply (a batch of names or extents).
pub const RPC_SLOT_BYTES: usize = 64 * 1024;

/// Largest chunk of the replication stream (LineFS: 4 MiB), payloads and headers.
pub const CHUNK_BYTES_MAX: usize = 4 << 20;

const _: () = {
    assert!(LANE_BYTES_MIN.is_multiple_of(LINE_BYTES));
    assert!(PAYLOAD_MAX + 64 <= CHUNK_BYTES_MAX);
    // The tree numbers a value's pieces by a byte.
    assert!(
        (XATTR_VALUE_MAX + XATTR_NAME_MAX + 8).div_ceil(super::format::item::PIECE_BYTES) <= 256
    );
};

/// The extended attribute with a file's capabilities, which end when it is changed.
pub const CAPABILITY: &[u8] = b"security.capability";
