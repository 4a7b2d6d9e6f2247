//! Messages between the nodes of a chain. A body begins with the epoch (u32) under which it was
//! sent; one of an older epoch is refused and counted. All numbers little-endian.
//!
//! ```text
//! kind              from -> to        fields after the epoch
//!  1 Chunk          chain -> next     all acked u64, chunk (storage::format::chunk)
//!  2 ChunkAck       member -> head    stream seq u64: persistent here up to it
//!  3 ClientUp       agent -> head     client u64, incarnation u32, settled u64, uid u32, gid u32,
//!                                     n u32, groups u32 x n, n u32, {inode u64, mode u8} x n leases,
//!                                     n u32, inodes u64 x n pinned, the same opened for writing,
//!                                     token u64, blocks u64 promised beyond settled
//!  4 ClientGone     agent -> head     client u64
//!  5 Entries        agent -> head     client u64, first seq u64, last seq u64, 64 bytes of zeroes (so that the head can
//!                                     make a chunk of it where it lies), raw log entries
//!  6 LeaseWant      agent -> head     client u64, inode u64, token u64, mode u8, flags u8
//!  7 Granted        head -> agent     client u64, inode u64, token u64, mode u8, errno u16, stream u64
//!  8 NumbersWant    agent -> head     client u64, token u64, count u32
//!  9 Numbers        head -> agent     client u64, token u64, first u64, count u32
//! 10 Recall         head -> agent     client u64, inode u64, token u64
//! 11 Recalled       agent -> head     client u64, inode u64, token u64
//! 12 Unpin          agent -> head     client u64, n u32, inodes u64 x n
//! 13 Released       agent -> head     client u64, inode u64, token u64 of the last grant (0: none since
//!                                     ClientUp; a later grant makes this void)
//! 14 Progress       head -> agent     client u64, settled u64, replicated u64
//! 15 Position       member -> head    stream seq u64 of the last chunk held
//! 16 StreamWant     any -> any        from stream seq u64: send what you hold from there on
//! 17 Resume         head -> syncing   stream seq u64: what you hold up to there is the stream; 0: you need a snapshot;
//!                                     stream seq u64 of the last chunk: ask for the rest, and tell your position then
//! 18 SnapshotWant   syncing -> head   incarnation of the process u64
//! 19 Snapshot       head -> syncing   stream seq u64, piece u32 (counted from 0), last inode u64, end u8,
//!                                     waits u8 (somebody who is away may have files open), raw log entries
//! 24 SnapshotAck    syncing -> head   stream seq u64, piece u32: applied here, and all before it
//! 20 LockWant       agent -> head     client u64, inode u64, token u64, what u8 (1 set, 2 test,
//!                                     3 cancel), wait u64, lock (storage::format::lock)
//! 21 LockDone       head -> agent     client u64, token u64, errno u16, found u8, lock if found
//! 22 LockHeld       agent -> head     client u64, first u8 (1: instead of all known before), n u32,
//!                                     {inode u64, lock} x n
//! 23 LockFree       head -> agent     client u64: something that it waits for may be free
//! 25 Room           head -> agent     client u64, token u64 of ClientUp, blocks u64: set aside for it
//! 26 RoomBack       agent -> head     client u64, token u64 of ClientUp, blocks u64: not needed
//! 27 RoomSought     head -> agent     somebody got no space: what lies idle shall come back
//! 28 Kept           agent -> head     client u64, n u32, inodes u64 x n: all that the process of this session,
//!                                     which has ended, has open (core::past); also of a node that joins
//! 29 Pinned         agent -> head     client u64, n u32, inodes u64 x n, m u32, inodes u64 x m: it has the first open,
//!                                     too, and may write to the second
//! 30 AskAgain       head -> agent     some question found no room before the head was ready: ask all of them again
//! 31 Packed         any -> any        1, 5 or 19, compressed ([`crate::packing`]): the core never meets it
//! 32 Return         syncing -> head   incarnation of the process u64, stream seq u64 of the last chunk held, epoch u32 of that
//!                                     chunk, published u64: it has this of the stream, and wants the rest
//! ```

use base::wire::{Corrupt, Reader, Writer};
use base::{ClientId, Epoch, InodeId, Sequence, StreamSeq};
use storage::format::control::LeaseMode;
use storage::format::lock::{LOCK_BYTES, Lock, LockSpace};

use super::frame::{Body, Checked, FRAME_HEAD, Frame};

/// Kind of a chunk message.
pub const CHUNK: u16 = 1;
/// Kind of an acknowledgement.
pub const CHUNK_ACK: u16 = 2;
/// Kind of a batch of log entries.
pub const ENTRIES: u16 = 5;
/// Kind of a piece of a snapshot.
pub const SNAPSHOT: u16 = 19;
/// Kind of what holds one of these, compressed.
pub const PACKED: u16 = 31;
/// Bytes before the chunk in a Chunk message: epoch and what is acknowledged by all.
pub const CHUNK_PREFIX: usize = 12;

/// Epoch and acknowledged position of a Chunk message.
pub fn chunk_prefix(frame: &[u8]) -> Result<(Epoch, StreamSeq), Corrupt> {
    let mut r = Reader::new(NAME, frame);
    Ok((Epoch(r.u32()?), StreamSeq(r.u64()?)))
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

/// Groups, leases, pins in one message, at most.
const LIST_MAX: usize = 1 << 20;

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

/// A message; the module text has the fields.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Message {
    Chunk {
        all_acked: StreamSeq,
        chunk: Vec<u8>,
    },
    ChunkAck {
        seq: StreamSeq,
    },
    ClientUp {
        client: ClientId,
        incarnation: u32,
        settled: Sequence,
        identity: Identity,
        leases: Vec<(InodeId, LeaseMode)>,
        pins: Vec<InodeId>,
        rights: Vec<InodeId>,
        room: (u64, u64),
    },
    Room {
        client: ClientId,
        token: u64,
        blocks: u64,
    },
    RoomBack {
        client: ClientId,
        token: u64,
        blocks: u64,
    },
    RoomSought,
    AskAgain,
    ClientGone {
        client: ClientId,
    },
    Entries {
        client: ClientId,
        first: Sequence,
        last: Sequence,
        raw: Raw,
    },
    LeaseWant {
        client: ClientId,
        ino: InodeId,
        token: u64,
        mode: LeaseMode,
        flags: u8,
    },
    Granted {
        client: ClientId,
        ino: InodeId,
        token: u64,
        mode: LeaseMode,
        errno: u16,
        stream: StreamSeq,
    },
    NumbersWant {
        client: ClientId,
        token: u64,
        count: u32,
    },
    Numbers {
        client: ClientId,
        token: u64,
        first: InodeId,
        count: u32,
    },
    Recall {
        client: ClientId,
        ino: InodeId,
        token: u64,
    },
    Recalled {
        client: ClientId,
        ino: InodeId,
        token: u64,
    },
    Unpin {
        client: ClientId,
        inodes: Vec<InodeId>,
    },
    Released {
        client: ClientId,
        ino: InodeId,
        token: u64,
    },
    Progress {
        client: ClientId,
        settled: Sequence,
        replicated: Sequence,
    },
    Position {
        seq: StreamSeq,
    },
    StreamWant {
        from: StreamSeq,
    },
    Resume {
        seq: StreamSeq,
        last: StreamSeq,
    },
    Return {
        incarnation: u64,
        last: StreamSeq,
        epoch: Epoch,
        published: StreamSeq,
    },
    SnapshotWant {
        incarnation: u64,
    },
    Snapshot {
        seq: StreamSeq,
        piece: u32,
        last_inode: InodeId,
        end: bool,
        waits: bool,
        raw: Vec<u8>,
    },
    SnapshotAck {
        seq: StreamSeq,
        piece: u32,
    },
    LockWant {
        client: ClientId,
        ino: InodeId,
        token: u64,
        ask: LockAsk,
    },
    LockDone {
        client: ClientId,
        token: u64,
        errno: u16,
        found: Option<Lock>,
    },
    LockHeld {
        client: ClientId,
        first: bool,
        locks: Vec<(InodeId, Lock)>,
    },
    LockFree {
        client: ClientId,
    },
    Kept {
        client: ClientId,
        inodes: Vec<InodeId>,
    },
    Pinned {
        client: ClientId,
        inodes: Vec<InodeId>,
        rights: Vec<InodeId>,
    },
}

const NAME: &str = "peer message";

/// What the head of an Entries message lacks to be as long as a chunk's.
const ENTRIES_ZEROES: usize = FRAME_HEAD - 28;

fn entries_head(r: &mut Reader<'_>) -> Result<(ClientId, Sequence, Sequence), Corrupt> {
    let head = (ClientId(r.u64()?), Sequence(r.u64()?), Sequence(r.u64()?));
    if r.bytes(ENTRIES_ZEROES)?.iter().any(|b| *b != 0) {
        return Err(r.corrupt("has bytes set that must be zero"));
    }
    Ok(head)
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

fn take_inodes(r: &mut Reader<'_>) -> Result<Vec<InodeId>, Corrupt> {
    let n = r.u32()? as usize;
    if n > LIST_MAX || n > r.left() / 8 {
        return Err(r.corrupt("claims more inodes than it holds"));
    }
    (0..n).map(|_| r.u64().map(InodeId)).collect()
}

fn take_mode(r: &mut Reader<'_>) -> Result<LeaseMode, Corrupt> {
    LeaseMode::from_u8(r.u8()?).ok_or(Corrupt::new(NAME, "has an unknown lease mode"))
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
            | Self::LockHeld { client, .. } => Some(*client),
            _ => None,
        }
    }

    /// Kind and body.
    pub fn encode(&self, epoch: Epoch) -> (u16, Vec<u8>) {
        let mut out = Vec::new();
        let mut w = Writer(&mut out);
        w.u32(epoch.0);
        let kind = match self {
            Self::Chunk { all_acked, chunk } => {
                w.u64(all_acked.0).bytes(chunk);
                CHUNK
            }
            Self::ChunkAck { seq } => {
                w.u64(seq.0);
                CHUNK_ACK
            }
            Self::RoomSought => 27,
            Self::AskAgain => 30,
            Self::Room { client, token, blocks } => {
                w.u64(client.0).u64(*token).u64(*blocks);
                25
            }
            Self::RoomBack { client, token, blocks } => {
                w.u64(client.0).u64(*token).u64(*blocks);
                26
            }
            Self::ClientUp {
                client,
                incarnation,
                settled,
                identity,
                leases,
                pins,
                rights,
                room,
            } => {
                w.u64(client.0).u32(*incarnation).u64(settled.0);
                w.u32(identity.uid).u32(identity.gid).u32(identity.groups.len() as u32);
                identity.groups.iter().for_each(|g| {
                    w.u32(*g);
                });
                w.u32(leases.len() as u32);
                for (ino, mode) in leases {
                    w.u64(ino.0).u8(*mode as u8);
                }
                put_inodes(&mut w, pins);
                put_inodes(&mut w, rights);
                w.u64(room.0).u64(room.1);
                3
            }
            Self::ClientGone { client } => {
                w.u64(client.0);
                4
            }
            Self::Entries { client, first, last, raw } => {
                w.u64(client.0).u64(first.0).u64(last.0).bytes(&[0; ENTRIES_ZEROES]);
                w.bytes(raw.body());
                ENTRIES
            }
            Self::LeaseWant { client, ino, token, mode, flags } => {
                w.u64(client.0).u64(ino.0).u64(*token).u8(*mode as u8).u8(*flags);
                6
            }
            Self::Granted { client, ino, token, mode, errno, stream } => {
                w.u64(client.0).u64(ino.0).u64(*token).u8(*mode as u8).u16(*errno).u64(stream.0);
                7
            }
            Self::NumbersWant { client, token, count } => {
                w.u64(client.0).u64(*token).u32(*count);
                8
            }
            Self::Numbers { client, token, first, count } => {
                w.u64(client.0).u64(*token).u64(first.0).u32(*count);
                9
            }
            Self::Recall { client, ino, token } => {
                w.u64(client.0).u64(ino.0).u64(*token);
                10
            }
            Self::Recalled { client, ino, token } => {
                w.u64(client.0).u64(ino.0).u64(*token);
                11
            }
            Self::Unpin { client, inodes } => {
                w.u64(client.0);
                put_inodes(&mut w, inodes);
                12
            }
            Self::Kept { client, inodes } => {
                w.u64(client.0);
                put_inodes(&mut w, inodes);
                28
            }
            Self::Pinned { client, inodes, rights } => {
                w.u64(client.0);
                put_inodes(&mut w, inodes);
                put_inodes(&mut w, rights);
                29
            }
            Self::Released { client, ino, token } => {
                w.u64(client.0).u64(ino.0).u64(*token);
                13
            }
            Self::Progress { client, settled, replicated } => {
                w.u64(client.0).u64(settled.0).u64(replicated.0);
                14
            }
            Self::Position { seq } => {
                w.u64(seq.0);
                15
            }
            Self::StreamWant { from } => {
                w.u64(from.0);
                16
            }
            Self::Resume { seq, last } => {
                w.u64(seq.0).u64(last.0);
                17
            }
            Self::Return { incarnation, last, epoch, published } => {
                w.u64(*incarnation).u64(last.0).u32(epoch.0).u64(published.0);
                32
            }
            Self::SnapshotWant { incarnation } => {
                w.u64(*incarnation);
                18
            }
            Self::Snapshot { seq, piece, last_inode, end, waits, raw } => {
                w.u64(seq.0).u32(*piece).u64(last_inode.0);
                w.u8(u8::from(*end)).u8(u8::from(*waits)).bytes(raw);
                SNAPSHOT
            }
            Self::SnapshotAck { seq, piece } => {
                w.u64(seq.0).u32(*piece);
                24
            }
            Self::LockWant { client, ino, token, ask } => {
                w.u64(client.0).u64(ino.0).u64(*token);
                ask.encode(&mut w);
                20
            }
            Self::LockDone { client, token, errno, found } => {
                w.u64(client.0).u64(*token).u16(*errno).u8(u8::from(found.is_some()));
                if let Some(lock) = found {
                    lock.encode(&mut w);
                }
                21
            }
            Self::LockHeld { client, first, locks } => {
                w.u64(client.0).u8(u8::from(*first)).u32(locks.len() as u32);
                for (ino, lock) in locks {
                    w.u64(ino.0);
                    lock.encode(&mut w);
                }
                22
            }
            Self::LockFree { client } => {
                w.u64(client.0);
                23
            }
        };
        (kind, out)
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
    pub fn take(kind: u16, body: Vec<u8>) -> Result<(Epoch, Self), Corrupt> {
        if kind != ENTRIES {
            return Self::decode(kind, &body);
        }
        let mut r = Reader::new(NAME, &body);
        let epoch = Epoch(r.u32()?);
        let (client, first, last) = entries_head(&mut r)?;
        let short = Corrupt::new(NAME, "is shorter than its head");
        let raw = Raw::Unchecked(Frame::received(body).ok_or(short)?);
        Ok((epoch, Self::Entries { client, first, last, raw }))
    }

    /// Epoch and message.
    pub fn decode(kind: u16, body: &[u8]) -> Result<(Epoch, Self), Corrupt> {
        let mut r = Reader::new(NAME, body);
        let epoch = Epoch(r.u32()?);
        let message = match kind {
            CHUNK => Self::Chunk { all_acked: StreamSeq(r.u64()?), chunk: r.rest().to_vec() },
            CHUNK_ACK => Self::ChunkAck { seq: StreamSeq(r.u64()?) },
            3 => Self::decode_client_up(&mut r)?,
            4 => Self::ClientGone { client: ClientId(r.u64()?) },
            ENTRIES => {
                let (client, first, last) = entries_head(&mut r)?;
                let raw = Raw::Unchecked(r.rest().to_vec().into());
                Self::Entries { client, first, last, raw }
            }
            6 => Self::LeaseWant {
                client: ClientId(r.u64()?),
                ino: InodeId(r.u64()?),
                token: r.u64()?,
                mode: take_mode(&mut r)?,
                flags: r.u8()?,
            },
            7 => Self::Granted {
                client: ClientId(r.u64()?),
                ino: InodeId(r.u64()?),
                token: r.u64()?,
                mode: take_mode(&mut r)?,
                errno: r.u16()?,
                stream: StreamSeq(r.u64()?),
            },
            8 => Self::NumbersWant { client: ClientId(r.u64()?), token: r.u64()?, count: r.u32()? },
            9 => Self::Numbers {
                client: ClientId(r.u64()?),
                token: r.u64()?,
                first: InodeId(r.u64()?),
                count: r.u32()?,
            },
            10 | 11 => {
                let (client, ino) = (ClientId(r.u64()?), InodeId(r.u64()?));
                let token = r.u64()?;
                if kind == 10 {
                    Self::Recall { client, ino, token }
                } else {
                    Self::Recalled { client, ino, token }
                }
            }
            12 => Self::Unpin { client: ClientId(r.u64()?), inodes: take_inodes(&mut r)? },
            28 => Self::Kept { client: ClientId(r.u64()?), inodes: take_inodes(&mut r)? },
            29 => {
                let (client, inodes) = (ClientId(r.u64()?), take_inodes(&mut r)?);
                Self::Pinned { client, inodes, rights: take_inodes(&mut r)? }
            }
            13 => Self::Released {
                client: ClientId(r.u64()?),
                ino: InodeId(r.u64()?),
                token: r.u64()?,
            },
            14 => Self::Progress {
                client: ClientId(r.u64()?),
                settled: Sequence(r.u64()?),
                replicated: Sequence(r.u64()?),
            },
            25 | 26 => {
                let (client, token, blocks) = (ClientId(r.u64()?), r.u64()?, r.u64()?);
                if kind == 25 {
                    Self::Room { client, token, blocks }
                } else {
                    Self::RoomBack { client, token, blocks }
                }
            }
            27 => Self::RoomSought,
            30 => Self::AskAgain,
            15 => Self::Position { seq: StreamSeq(r.u64()?) },
            16 => Self::StreamWant { from: StreamSeq(r.u64()?) },
            17 => Self::Resume { seq: StreamSeq(r.u64()?), last: StreamSeq(r.u64()?) },
            32 => Self::Return {
                incarnation: r.u64()?,
                last: StreamSeq(r.u64()?),
                epoch: Epoch(r.u32()?),
                published: StreamSeq(r.u64()?),
            },
            18 => Self::SnapshotWant { incarnation: r.u64()? },
            SNAPSHOT => Self::Snapshot {
                seq: StreamSeq(r.u64()?),
                piece: r.u32()?,
                last_inode: InodeId(r.u64()?),
                end: r.flag()?,
                waits: r.flag()?,
                raw: r.rest().to_vec(),
            },
            20..=23 => Self::decode_lock(kind, &mut r)?,
            24 => Self::SnapshotAck { seq: StreamSeq(r.u64()?), piece: r.u32()? },
            _ => return Err(r.corrupt("is of an unknown kind")),
        };
        r.end()?;
        Ok((epoch, message))
    }

    fn decode_lock(kind: u16, r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let client = ClientId(r.u64()?);
        Ok(match kind {
            20 => Self::LockWant {
                client,
                ino: InodeId(r.u64()?),
                token: r.u64()?,
                ask: LockAsk::decode(r)?,
            },
            21 => Self::LockDone {
                client,
                token: r.u64()?,
                errno: r.u16()?,
                found: if r.flag()? { Some(Lock::decode(r)?) } else { None },
            },
            22 => {
                let (first, n) = (r.flag()?, r.u32()? as usize);
                if n > r.left() / (8 + LOCK_BYTES) {
                    return Err(r.corrupt("claims more locks than it holds"));
                }
                let locks = (0..n)
                    .map(|_| Ok((InodeId(r.u64()?), Lock::decode(r)?)))
                    .collect::<Result<_, Corrupt>>()?;
                Self::LockHeld { client, first, locks }
            }
            _ => Self::LockFree { client },
        })
    }

    fn decode_client_up(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let client = ClientId(r.u64()?);
        let (incarnation, settled) = (r.u32()?, Sequence(r.u64()?));
        let (uid, gid, n) = (r.u32()?, r.u32()?, r.u32()? as usize);
        if n > r.left() / 4 {
            return Err(r.corrupt("claims more groups than it holds"));
        }
        let groups = (0..n).map(|_| r.u32()).collect::<Result<_, _>>()?;
        let n = r.u32()? as usize;
        if n > r.left() / 9 {
            return Err(r.corrupt("claims more leases than it holds"));
        }
        let leases = (0..n)
            .map(|_| Ok((InodeId(r.u64()?), take_mode(r)?)))
            .collect::<Result<_, Corrupt>>()?;
        let (pins, rights) = (take_inodes(r)?, take_inodes(r)?);
        let identity = Identity { uid, gid, groups };
        let room = (r.u64()?, r.u64()?);
        Ok(Self::ClientUp { client, incarnation, settled, identity, leases, pins, rights, room })
    }
}

fn put_inodes(w: &mut Writer<'_>, inodes: &[InodeId]) {
    w.u32(inodes.len() as u32);
    for ino in inodes {
        w.u64(ino.0);
    }
}

impl LockAsk {
    fn encode(&self, w: &mut Writer<'_>) {
        let (what, wait, lock) = match *self {
            Self::Set { lock, wait } => (1, wait, lock),
            Self::Test { lock } => (2, 0, lock),
            Self::Cancel { wait } => (3, wait, Lock::all_of(LockSpace::Record, 0)),
        };
        w.u8(what).u64(wait);
        lock.encode(w);
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, Corrupt> {
        let (what, wait) = (r.u8()?, r.u64()?);
        let lock = Lock::decode(r)?;
        match what {
            1 => Ok(Self::Set { lock, wait }),
            2 if wait == 0 => Ok(Self::Test { lock }),
            3 if lock == Lock::all_of(LockSpace::Record, 0) => Ok(Self::Cancel { wait }),
            2 | 3 => Err(r.corrupt("asks about a lock with more than it needs")),
            _ => Err(r.corrupt("asks an unknown thing about a lock")),
        }
    }
}
