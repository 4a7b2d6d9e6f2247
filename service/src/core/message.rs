//! Messages between the nodes of a chain. A body begins with the epoch (u32) under which it was
//! sent; one of an older epoch is refused and counted. All numbers little-endian.
//!
//! Each message is declared once, below: its kind, who says it to whom, its fields in the order in which they travel. From
//! that come the type, both directions of the codec, and [`table`], which docs/protocol.md shows. How a field travels its
//! type says (`field`). Kind 31 ([`PACKED`]) holds another message, compressed ([`crate::packing`]): the core never meets it.

mod field;

use base::wire::{Corrupt, Reader, Writer};
use base::{ClientId, Epoch, InodeId, Sequence, StreamSeq};
use storage::format::control::LeaseMode;
use storage::format::lock::Lock;
use storage::format::rpc::Span;

use super::frame::{Body, Checked, FRAME_HEAD, Frame, Received};
use super::heal::Answer;
use super::offer::{Doubt, Offered, Part};
use field::{Field, entries_head};

/// Kind of what holds a message, compressed.
pub const PACKED: u16 = 31;
/// Bytes before the chunk in a Chunk message: epoch and what is acknowledged by all.
pub const CHUNK_PREFIX: usize = 12;

/// Epoch and acknowledged position of a Chunk message.
pub fn chunk_prefix(frame: &[u8]) -> Result<(Epoch, StreamSeq), Corrupt> {
    let mut r = Reader::new(NAME, frame);
    Ok((Epoch(r.u32()?), StreamSeq::take(&mut r)?))
}

/// The client of whose log a message holds entries.
pub fn entries_client(kind: u16, body: &[u8]) -> Option<ClientId> {
    let mut r = Reader::new(NAME, body.get(4..).filter(|_| kind == ENTRIES)?);
    entries_head(&mut r).ok().map(|(client, ..)| client)
}

/// The beginning of a Chunk message, with room for a chunk of `len` bytes behind it.
pub fn chunk_frame(len: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(CHUNK_PREFIX + len);
    frame.resize(CHUNK_PREFIX, 0);
    frame
}

/// Fills the beginning in.
pub fn set_chunk_prefix(frame: &mut [u8], epoch: Epoch, all_acked: StreamSeq) {
    frame[..4].copy_from_slice(&epoch.0.to_le_bytes());
    frame[4..CHUNK_PREFIX].copy_from_slice(&all_acked.0.to_le_bytes());
}

/// Whose operations these are, as hostd learnt it from the kernel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Identity {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl Identity {
    /// Whether it may be a mount for whose kernel others wait.
    pub const fn is_mount(&self) -> bool {
        self.uid == 0
    }
}

/// What an agent asks about a file lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum LockAsk {
    /// Lock, or unlock; with `wait` not 0 the client waits under that number.
    Set { lock: Lock, wait: u64 },
    /// Which lock bars this one?
    Test { lock: Lock },
    /// No longer wait.
    Cancel { wait: u64 },
}

/// What an agent says of the sole use of a file's locks (`core::sole`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SoleSays {
    /// Its client could use it.
    Wants,
    /// Its client has it.
    Has,
    /// It is not used, or no more; what was locked before still is.
    Unused,
    /// It comes back, and this is all that is locked there. Not `vouched`: by what the client's own memory says.
    Returns {
        /// The locks.
        locks: Vec<Lock>,
        /// This run of the agent knows that the client had it.
        vouched: bool,
    },
}

/// Entries of a log, in a message.
#[derive(Clone, Debug)]
pub enum Raw {
    /// As they came from another node.
    Unchecked(Frame),
    /// As they were fetched here, or checked before.
    Checked(Checked),
}

impl Raw {
    /// The bytes.
    pub fn body(&self) -> &[u8] {
        match self {
            Self::Unchecked(frame) => frame.body(),
            Self::Checked(checked) => checked.body(),
        }
    }

    fn into_frame(self) -> Frame {
        match self {
            Self::Unchecked(frame) => frame,
            Self::Checked(checked) => checked.into_frame(),
        }
    }

    /// The whole entries that it begins with, and what is wrong with the first that is none.
    pub fn check(self, incarnation: u32) -> (Checked, Option<Corrupt>) {
        match self {
            Self::Checked(checked) if checked.incarnation() == incarnation => (checked, None),
            other => Checked::of(other.into_frame(), incarnation),
        }
    }
}

impl PartialEq for Raw {
    fn eq(&self, other: &Self) -> bool {
        self.body() == other.body()
    }
}

impl Eq for Raw {}

impl From<Vec<u8>> for Raw {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Unchecked(bytes.into())
    }
}

const NAME: &str = "peer message";

/// Declares the messages: kind, name of the kind, who says it to whom, the message and its fields.
macro_rules! messages {
    ($($(#[doc = $doc:literal])+ $kind:literal $CONST:ident $route:literal $name:ident
        $({ $($field:ident: $type:ty),+ })?;)+) => {
        $(
            #[doc = concat!("Kind of [`Message::", stringify!($name), "`].")]
            pub const $CONST: u16 = $kind;
        )+

        /// A message.
        #[derive(Clone, PartialEq, Eq, Debug)]
        #[allow(missing_docs)]
        pub enum Message {
            $($(#[doc = $doc])+ $name $({ $($field: $type),+ })?,)+
        }

        impl Message {
            /// Kind and body.
            pub fn encode(&self, epoch: Epoch) -> (u16, Vec<u8>) {
                let mut out = Vec::new();
                let mut w = Writer(&mut out);
                epoch.put(&mut w);
                let kind = match self {
                    $(Self::$name $({ $($field),+ })? => {
                        $($($field.put(&mut w);)+)?
                        $kind
                    })+
                };
                (kind, out)
            }

            /// Epoch and message.
            pub fn decode(kind: u16, body: &[u8]) -> Result<(Epoch, Self), Corrupt> {
                let mut r = Reader::new(NAME, body);
                let epoch = Epoch::take(&mut r)?;
                let message = match kind {
                    $($kind => Self::$name $({ $($field: Field::take(&mut r)?),+ })?,)+
                    _ => return Err(r.corrupt("is of an unknown kind")),
                };
                r.end()?;
                Ok((epoch, message))
            }
        }

        /// All messages: kind, name, who says it to whom, its fields and how they travel, what it says.
        #[allow(clippy::type_complexity)]
        const DECLARED: &[(u16, &str, &str, &[(&str, &str)], &str)] = &[
            $((
                $kind,
                stringify!($name),
                $route,
                &[$($((stringify!($field), <$type as Field>::SHOWN)),+)?],
                concat!($($doc),+),
            ),)+
        ];
    };
}

messages! {
    /// A chunk (`storage::format::chunk`), and up to where all have acknowledged the stream.
    1 CHUNK "chain -> next" Chunk { all_acked: StreamSeq, chunk: Vec<u8> };
    /// The stream is persistent here up to it. Said again while more is here and not persistent yet: the member is at work.
    2 CHUNK_ACK "member -> head" ChunkAck { seq: StreamSeq };
    /// A client, what it holds, has open, and has opened for writing; `room`: its new account, and the blocks that are promised beyond `settled`.
    3 CLIENT_UP "agent -> head" ClientUp { client: ClientId, incarnation: u32, settled: Sequence, identity: Identity, leases: Vec<(InodeId, LeaseMode)>, pins: Vec<InodeId>, rights: Vec<InodeId>, room: (u64, u64) };
    /// It has ended.
    4 CLIENT_GONE "agent -> head" ClientGone { client: ClientId };
    /// Entries of its log. (The head can make a chunk of them where they lie.)
    5 ENTRIES "agent -> head" Entries { client: ClientId, first: Sequence, last: Sequence, raw: Raw };
    /// It asks for a lease; `flags` are those of its request, `span` the bytes that will do (0, 0: nothing but all).
    6 LEASE_WANT "agent -> head" LeaseWant { client: ClientId, ino: InodeId, token: u64, mode: LeaseMode, flags: u8, span: Span };
    /// It has it, once the state here is as new as `stream`, or those bytes of a file, if it is a joint one; or why not.
    7 GRANTED "head -> agent" Granted { client: ClientId, ino: InodeId, token: u64, mode: LeaseMode, errno: u16, stream: StreamSeq, span: Span };
    /// It asks for inode numbers.
    8 NUMBERS_WANT "agent -> head" NumbersWant { client: ClientId, token: u64, count: u32 };
    /// They are its own, with the write leases on them.
    9 NUMBERS "head -> agent" Numbers { client: ClientId, token: u64, first: InodeId, count: u32 };
    /// A lease is wanted back.
    10 RECALL "head -> agent" Recall { client: ClientId, ino: InodeId, token: u64 };
    /// It is back, and all that was done under it was sent before.
    11 RECALLED "agent -> head" Recalled { client: ClientId, ino: InodeId, token: u64 };
    /// It has these open no more.
    12 UNPIN "agent -> head" Unpin { client: ClientId, inodes: Vec<InodeId> };
    /// It gives a lease back unasked; `token` is that of its last grant (0: none since `ClientUp`): a later grant makes this void.
    13 RELEASED "agent -> head" Released { client: ClientId, ino: InodeId, token: u64 };
    /// How far the head is with it, and how far all members are.
    14 PROGRESS "head -> agent" Progress { client: ClientId, settled: Sequence, replicated: Sequence };
    /// The last chunk held.
    15 POSITION "member -> head" Position { seq: StreamSeq };
    /// Send what you hold from there on.
    16 STREAM_WANT "any -> any" StreamWant { from: StreamSeq };
    /// What you hold up to `seq` is the stream (0: you need a snapshot), and `last` is its end: ask for the rest, and tell your position then.
    17 RESUME "head -> syncing" Resume { seq: StreamSeq, last: StreamSeq };
    /// This process needs a snapshot.
    18 SNAPSHOT_WANT "syncing -> head" SnapshotWant { incarnation: u64 };
    /// A piece of it, counted from 0, of made log entries; `waits`: somebody who is away may have files open.
    19 SNAPSHOT "head -> syncing" Snapshot { seq: StreamSeq, piece: u32, last_inode: InodeId, end: bool, waits: bool, raw: Vec<u8> };
    /// The piece is applied here, and all before it.
    24 SNAPSHOT_ACK "syncing -> head" SnapshotAck { seq: StreamSeq, piece: u32 };
    /// It asks about a file lock.
    20 LOCK_WANT "agent -> head" LockWant { client: ClientId, ino: InodeId, token: u64, ask: LockAsk };
    /// What became of that, and the lock that bars it if that was the question.
    21 LOCK_DONE "head -> agent" LockDone { client: ClientId, token: u64, errno: u16, found: Option<Lock> };
    /// Locks that it holds; `first`: instead of all known before.
    22 LOCK_HELD "agent -> head" LockHeld { client: ClientId, first: bool, locks: Vec<(InodeId, Lock)> };
    /// Something that it waits for may be free.
    23 LOCK_FREE "head -> agent" LockFree { client: ClientId };
    /// So many blocks are set aside for it; `token` is that of `ClientUp`.
    25 ROOM "head -> agent" Room { client: ClientId, token: u64, blocks: u64 };
    /// So many it does not need.
    26 ROOM_BACK "agent -> head" RoomBack { client: ClientId, token: u64, blocks: u64 };
    /// Somebody got no space: what lies idle shall come back.
    27 ROOM_SOUGHT "head -> agent" RoomSought;
    /// All that the process of this session, which has ended, has open (`core::past`); also of a node that joins.
    28 KEPT "agent -> head" Kept { client: ClientId, inodes: Vec<InodeId> };
    /// It has these open, too, and may write to the second.
    29 PINNED "agent -> head" Pinned { client: ClientId, inodes: Vec<InodeId>, rights: Vec<InodeId> };
    /// Some question found no room before the head was ready: ask all of them again.
    30 ASK_AGAIN "head -> agent" AskAgain;
    /// This process has the stream up to `last`, a chunk of that epoch, has published so much of it, and wants the rest.
    32 RETURN "syncing -> head" Return { incarnation: u64, last: StreamSeq, epoch: Epoch, published: StreamSeq };
    /// A block of a file is rotten here (`core::heal`).
    35 BLOCK_WANT "member -> member" BlockWant { ino: InodeId, block: u64 };
    /// What it is in this state that was published (`answer`: 0 there is none, 1 this, 2 it is rotten as well, 3 cannot be said now).
    36 BLOCK "member -> member" Block { ino: InodeId, block: u64, seq: StreamSeq, answer: Answer, bytes: Vec<u8> };
    /// Whether it could use the sole use of a file's locks, has it, or gives it back (`core::sole`); `token`: by which it has it (0: not known).
    37 LOCK_SOLE "agent -> head" LockSole { client: ClientId, ino: InodeId, token: u64, says: SoleSays };
    /// It has it now (`given`), or shall give back what it had by that token.
    38 LOCK_SOLE_TOLD "head -> agent" LockSoleTold { client: ClientId, ino: InodeId, token: u64, given: bool };
    /// Its process has ended, and all that it has locked is another client's, at once (`core::heir`), of the same agent or of one for which the head has asked. Said again, before `LockHeld`, where the head may not have heard it.
    39 LOCK_HEIR "agent -> head" LockHeir { client: ClientId, heir: ClientId };
    /// It shows a secret that nobody beside it had (`core::sought`): does anybody leave something to it?
    50 HEIR_SEEK "agent -> head" HeirSeek { client: ClientId, token: u64, secret: u128 };
    /// That client of another node, of this user, asks.
    51 HEIR_SOUGHT "head -> agent" HeirSought { heir: ClientId, token: u64, user: u32, secret: u128 };
    /// Nobody here leaves more to it than was said by `LockHeir` before.
    52 HEIR_ANSWER "agent -> head" HeirAnswer { heir: ClientId, token: u64 };
    /// All have answered. `given`: somebody has left something to it.
    53 HEIR_FOUND "head -> agent" HeirFound { client: ClientId, token: u64, given: bool };
    /// This process needs a snapshot, and its volume has held something: content may be offered (`core::offer`). `SnapshotWant` follows, for a head that does not know this.
    42 SNAPSHOT_HAD "syncing -> head" SnapshotHad { incarnation: u64 };
    /// This process needs a snapshot. Its volume has what the stream says up to `published`, and maybe some of what follows, up to `last`, of the stream as the head of that epoch had it (`core::history`). `had` as with `SnapshotHad`, which follows, for a head that does not know this.
    44 SNAPSHOT_SINCE "syncing -> head" SnapshotSince { incarnation: u64, had: bool, published: StreamSeq, last: StreamSeq, epoch: Epoch };
    /// This process needs a snapshot, and if that is an image (`core::image`), content may be offered: its arenas may hold some. The rest as with `SnapshotSince`, or 0; what it would say else follows, for a head that does not know this.
    46 IMAGE_HAD "syncing -> head" ImageHad { incarnation: u64, published: StreamSeq, last: StreamSeq, epoch: Epoch };
    /// This process needs a snapshot, and can be brought to the head's state in place (`core::reconcile`). The rest as with `SnapshotSince`, which follows, for a head that does not know this, or cannot do it.
    47 SNAPSHOT_IN_PLACE "syncing -> head" SnapshotInPlace { incarnation: u64, published: StreamSeq, last: StreamSeq, epoch: Epoch };
    /// A piece of that: what items come to under the key `id`, items, and files whose content comes anew.
    48 SNAPSHOT_ITEMS "head -> syncing" SnapshotItems { seq: StreamSeq, piece: u32, id: u64, last_inode: InodeId, raw: Vec<u8> };
    /// The piece is applied here, and all before it; of the ranges in it, counted from 0, these differ.
    49 SNAPSHOT_DIFFERS "syncing -> head" SnapshotDiffers { seq: StreamSeq, piece: u32, id: u64, ranges: Vec<u32> };
    /// A piece of a snapshot: content that has not changed since; it is answered as an offer is.
    45 SNAPSHOT_SAME "head -> syncing" SnapshotSame { seq: StreamSeq, piece: u32, id: u64, parts: Vec<Part> };
    /// A piece of a snapshot: content that the node may have from before, and of what it has doubted what is the same. `id`: which snapshot, and the key of what is compared.
    40 SNAPSHOT_OFFER "head -> syncing" SnapshotOffer { seq: StreamSeq, piece: u32, id: u64, offers: Vec<Offered>, sure: Vec<Part> };
    /// A piece of an image, counted as those of a snapshot (`core::image`): parts one behind the other; `waits`: as there.
    43 IMAGE "head -> syncing" Image { seq: StreamSeq, piece: u32, last_inode: InodeId, end: bool, waits: bool, raw: Vec<u8> };
    /// The piece is applied here, and all before it; of what it offers this is lacking, and this has the right checksums and is to be compared. (Of an image: blocks of arenas instead of files.)
    41 SNAPSHOT_LACK "syncing -> head" SnapshotLack { seq: StreamSeq, piece: u32, id: u64, lacks: Vec<Part>, doubts: Vec<Doubt> };
}

/// The messages in Markdown, as docs/protocol.md has them.
pub fn table() -> String {
    let mut text =
        String::from("| kind | message | from → to | after the epoch | what it says |\n");
    text.push_str("| --- | --- | --- | --- | --- |\n");
    for (kind, name, route, fields, says) in DECLARED {
        let fields: Vec<String> =
            fields.iter().map(|(name, as_)| format!("{name} {as_}")).collect();
        let (route, fields) = (route.replace("->", "→"), fields.join(", "));
        text.push_str(&format!("| {kind} | {name} | {route} | {fields} | {} |\n", says.trim()));
    }
    text
}

impl Message {
    /// The client for which an agent speaks to the head with this message.
    pub const fn speaks_for(&self) -> Option<ClientId> {
        match self {
            Self::ClientUp { client, .. }
            | Self::ClientGone { client }
            | Self::Entries { client, .. }
            | Self::RoomBack { client, .. }
            | Self::LeaseWant { client, .. }
            | Self::NumbersWant { client, .. }
            | Self::Recalled { client, .. }
            | Self::Unpin { client, .. }
            | Self::Kept { client, .. }
            | Self::Pinned { client, .. }
            | Self::Released { client, .. }
            | Self::LockWant { client, .. }
            | Self::LockHeld { client, .. }
            | Self::LockSole { client, .. }
            | Self::LockHeir { client, .. }
            | Self::HeirSeek { client, .. } => Some(*client),
            _ => None,
        }
    }

    /// Kind and body; what is long is sent in the memory in which it lies.
    pub fn into_body(self, epoch: Epoch) -> (u16, Body) {
        if let Self::Entries { client, first, last, raw } = self {
            let body = raw.into_frame().into_body(|head| {
                let mut bytes = Vec::with_capacity(FRAME_HEAD);
                Writer(&mut bytes).u32(epoch.0).u64(client.0).u64(first.0).u64(last.0);
                bytes.resize(FRAME_HEAD, 0);
                head.copy_from_slice(&bytes);
            });
            return (ENTRIES, body);
        }
        let (kind, body) = self.encode(epoch);
        (kind, body.into())
    }

    /// Epoch and message, of a body that need not be kept: what is long stays in its memory.
    pub fn take(kind: u16, body: Received) -> Result<(Epoch, Self), Corrupt> {
        if kind != ENTRIES {
            return Self::decode(kind, body.bytes());
        }
        let mut r = Reader::new(NAME, body.bytes());
        let epoch = Epoch(r.u32()?);
        let (client, first, last) = entries_head(&mut r)?;
        let short = Corrupt::new(NAME, "is shorter than its head");
        let raw = Raw::Unchecked(Frame::received(body).ok_or(short)?);
        Ok((epoch, Self::Entries { client, first, last, raw }))
    }
}
