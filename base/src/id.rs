//! Newtypes for every identifier. Conversions are the named field `.0`; on media and wire they
//! are little-endian integers of the same width.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        #[repr(transparent)]
        pub struct $name(pub $int);

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

id!(
    /// Inode number, never reused within a volume. 0 is no inode, 1 is the root directory.
    InodeId(u64)
);
id!(
    /// A node of the cluster, as its configuration numbers it. 0 is no node.
    NodeId(u32)
);
id!(
    /// A client (one LibFS instance) as the cluster knows it: node in the upper 32 bits, a number
    /// that the node never hands out twice in one incarnation in the lower.
    ClientId(u64)
);
id!(
    /// Epoch of a volume's chain: grows by one at each failure and return of a member.
    Epoch(u32)
);
id!(
    /// Order of a client's operations across its lanes; starts at 1, never repeats within a log.
    Sequence(u64)
);
id!(
    /// Position of a chunk in a volume's replication stream; the same on every member of the chain.
    StreamSeq(u64)
);

impl InodeId {
    /// No inode.
    pub const NONE: InodeId = InodeId(0);
    /// The root directory of every volume.
    pub const ROOT: InodeId = InodeId(1);
    /// Bits of a number that a volume gives; above them stand 15 of the snapshot's slot for an inode of a snapshot.
    pub const BITS: u32 = 48;

    /// The inode as the snapshot in that slot (1 to 32,767) has it.
    #[must_use]
    pub const fn in_snapshot(self, slot: u16) -> Self {
        Self(self.0 | (slot as u64) << Self::BITS)
    }

    /// The snapshot's slot, and the number in it. None: it is an inode of the volume.
    pub const fn of_snapshot(self) -> Option<(u16, Self)> {
        match (self.0 >> Self::BITS) as u16 {
            0 | 0x8000.. => None,
            slot => Some((slot, Self(self.0 & ((1 << Self::BITS) - 1)))),
        }
    }
}

impl Sequence {
    /// No sequence that is handed out comes here: what claims one of these is refused where it enters, so that nothing behind
    /// it needs to ask whether there is a next.
    pub const END: Sequence = Sequence(1 << 63);
}

impl StreamSeq {
    /// No chunk comes here (see [`Sequence::END`]).
    pub const END: StreamSeq = StreamSeq(1 << 63);
}

impl ClientId {
    /// Composes the id of client `number` on `node`.
    pub const fn new(node: NodeId, number: u32) -> Self {
        Self(((node.0 as u64) << 32) | number as u64)
    }

    /// The node that the client runs on.
    pub const fn node(self) -> NodeId {
        NodeId((self.0 >> 32) as u32)
    }
}
