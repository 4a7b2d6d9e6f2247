//! A snapshot, or what it has otherwise than an earlier one, as a stream of bytes that another volume takes in (`corbel send`,
//! `corbel receive`). It lies in files and goes through pipes, and outlives the volumes that it comes from.
//!
//! ```text
//! head      magic "CORBSEND", version u32 (1), zero u32
//! frame     length of the body u32, CRC32C u32, body
//! body      kind u8, fields as in Record
//! ```
//!
//! The checksum of a frame goes on from the one of the frame before (the first from 0): none can be left out, come twice or in another order.
//!
//! # What the records say
//!
//! States, not operations: the size and the changed bytes of each file, the names that are gone and those that are new, the
//! attributes. Inodes go by their numbers at the sender, which are never given again; who receives remembers what he made for each. So a record that is
//! taken in once more changes nothing, and an interrupted stream goes on from a [`Position`], wherever that was.
//!
//! They come in stages, each in the order of inodes. First what is new, empty. Then attributes, *before*: who receives gives what is new its owner
//! and mode, and lets into what he has nobody whom not both states let in. Then all names that are gone, all that are new, the content of files,
//! each with its attributes as they are to stay, and those of what has no content. Last, what is gone. So nobody reads meanwhile who may not, neither in the
//! earlier state nor in the later one, and content lies where it is to stay.

use alloc::vec::Vec;

use base::{InodeId, crc32c};

use super::entry::{Stamp, name_is_legal};
use super::item::{S_IFMT, S_IFREG};
use super::{Corrupt, Reader, Writer};

/// Bytes of the head.
pub const HEAD_BYTES: usize = 16;
/// Bytes before a body.
pub const FRAME_BYTES: usize = 8;
/// Bytes of a body at most: more than the names of all attributes of an inode have, or one of them.
pub const BODY_MAX: usize = 4 << 20;
/// Bytes of content in one record at most.
pub const DATA_MAX: usize = 256 << 10;

const MAGIC: &[u8; 8] = b"CORBSEND";
const VERSION: u32 = 1;
const NAME: &str = "stream of a snapshot";

/// The head.
pub fn head() -> [u8; HEAD_BYTES] {
    let mut bytes = [0; HEAD_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// Checks the head.
pub fn check_head(bytes: &[u8; HEAD_BYTES]) -> Result<(), Corrupt> {
    let mut r = Reader::new(NAME, bytes);
    if r.bytes(8)? != MAGIC {
        return Err(r.corrupt("does not begin as one: it is something else"));
    }
    if r.u32()? != VERSION {
        return Err(r.corrupt(
            "is of a newer version: receive it with the corbel that made it, or a later one",
        ));
    }
    r.zeroes(4)
}

/// A part of a stream: its records come one after the other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(u8)]
pub enum Stage {
    /// What is new.
    #[default]
    New = 1,
    /// Attributes, before.
    Attributes = 2,
    /// Names that are gone.
    Unnamed = 3,
    /// Names that are new.
    Named = 4,
    /// Content of files, and their attributes.
    Content = 5,
    /// Attributes of all others.
    Final = 6,
    /// What is gone.
    Gone = 7,
}

impl Stage {
    /// All, in their order.
    pub const ALL: [Self; 7] = [
        Self::New,
        Self::Attributes,
        Self::Unnamed,
        Self::Named,
        Self::Content,
        Self::Final,
        Self::Gone,
    ];
}

/// Up to where a stream was taken in: all before it. As text three numbers in base 16 with dashes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Position {
    /// In this stage ...
    pub stage: Stage,
    /// ... at this inode ...
    pub ino: InodeId,
    /// ... its content up to here.
    pub offset: u64,
}

impl core::fmt::Display for Position {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:x}-{:x}-{:x}", self.stage as u8, self.ino.0, self.offset)
    }
}

impl core::str::FromStr for Position {
    type Err = Corrupt;

    fn from_str(text: &str) -> Result<Self, Corrupt> {
        let wrong = Corrupt::new("position", "is not three numbers with dashes, as in 1-2a-1000");
        let mut parts = text.split('-').map(|part| u64::from_str_radix(part, 16).ok());
        let mut next = || parts.next().flatten();
        let (Some(stage), Some(ino), Some(offset)) = (next(), next(), next()) else {
            return Err(wrong);
        };
        let stage = Stage::ALL.into_iter().find(|one| *one as u64 == stage);
        match (stage, parts.next()) {
            (Some(stage), None) => Ok(Self { stage, ino: InodeId(ino), offset }),
            _ => Err(wrong),
        }
    }
}

/// Attributes of an inode.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct Attributes {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub atime: Stamp,
    pub mtime: Stamp,
    /// Names of the extended ones.
    pub xattrs: Vec<Vec<u8>>,
}

/// What a stream says.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Record {
    /// Comes first: of which volume, the snapshot's number, that of the one before (0: none), when it was made, the directory
    /// that it shows, where this stream begins, its name.
    Begin {
        volume: [u8; 16],
        number: u64,
        before: u64,
        time: u64,
        root: InodeId,
        from: Position,
        name: Vec<u8>,
    },
    /// An inode that is new; of a device its number, of a symbolic link its target. `mode` says of what type it is, and no more.
    Inode { ino: InodeId, mode: u32, rdev: u32, target: Vec<u8> },
    /// A file, of which the content follows, and its size.
    File { ino: InodeId, size: u64 },
    /// Bytes of a file.
    Data { ino: InodeId, offset: u64, bytes: Vec<u8> },
    /// So many zeroes of a file.
    Zero { ino: InodeId, offset: u64, len: u64 },
    /// A name that led there is gone; `last`: what it led to as well.
    Unnamed { dir: InodeId, ino: InodeId, last: bool, name: Vec<u8> },
    /// A name leads there.
    Named { dir: InodeId, ino: InodeId, name: Vec<u8> },
    /// Attributes of an inode, and the names of its extended ones (access lists among them), which follow; `last`: as they are to stay, and not
    /// before.
    Attributes { ino: InodeId, last: bool, what: Attributes },
    /// An extended attribute of an inode.
    Xattr { ino: InodeId, name: Vec<u8>, value: Vec<u8> },

    /// An inode is gone.
    Gone { ino: InodeId },
    /// Comes last: how many records came before it in this stream.
    End { records: u64 },
}

fn put_stamp(w: &mut Writer<'_>, at: Stamp) {
    w.u64(at.sec as u64).u32(at.nsec);
}

fn take_stamp(r: &mut Reader<'_>) -> Result<Stamp, Corrupt> {
    let at = Stamp { sec: r.u64()? as i64, nsec: r.u32()? };
    if at.nsec < 1_000_000_000 { Ok(at) } else { Err(r.corrupt("has a time that is none")) }
}

fn take_name(r: &mut Reader<'_>) -> Result<Vec<u8>, Corrupt> {
    let name = r.rest();
    let dots = matches!(name, b"." | b"..");
    if name_is_legal(name) && !dots {
        Ok(name.to_vec())
    } else {
        Err(r.corrupt("has a name that no file has"))
    }
}

fn take_xattr(r: &mut Reader<'_>) -> Result<Vec<u8>, Corrupt> {
    let len = r.u8()?;
    if len == 0 {
        return Err(r.corrupt("has an attribute without a name"));
    }
    Ok(r.bytes(len.into())?.to_vec())
}

impl Record {
    /// Up to where a stream is taken in with this record; none: it says nothing of files.
    pub fn position(&self) -> Option<Position> {
        let (stage, ino, offset) = match self {
            Self::Inode { ino, .. } => (Stage::New, *ino, 0),
            Self::File { ino, .. } => (Stage::Content, *ino, 0),
            Self::Data { ino, offset, bytes } => {
                (Stage::Content, *ino, offset.saturating_add(bytes.len() as u64))
            }
            Self::Zero { ino, offset, len } => (Stage::Content, *ino, offset.saturating_add(*len)),
            Self::Unnamed { dir, .. } => (Stage::Unnamed, *dir, 0),
            Self::Named { dir, .. } => (Stage::Named, *dir, 0),
            Self::Attributes { ino, last: false, .. } => (Stage::Attributes, *ino, 0),
            Self::Attributes { ino, what, .. } if what.mode & S_IFMT == S_IFREG => {
                (Stage::Content, *ino, u64::MAX)
            }
            Self::Attributes { ino, .. } => (Stage::Final, *ino, 0),

            Self::Gone { ino } => (Stage::Gone, *ino, 0),
            Self::Begin { .. } | Self::End { .. } | Self::Xattr { .. } => return None,
        };
        Some(Position { stage, ino, offset })
    }

    /// Appends the frame; `chain` is the checksum of the one before, and then of this one.
    pub fn encode(&self, chain: &mut u32, out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend_from_slice(&[0; FRAME_BYTES]);
        self.encode_body(out);
        let body = &out[begin + FRAME_BYTES..];
        let len = body.len() as u32;
        *chain = crc32c(*chain, body);
        out[begin..begin + 4].copy_from_slice(&len.to_le_bytes());
        out[begin + 4..begin + 8].copy_from_slice(&chain.to_le_bytes());
    }

    fn encode_body(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        match self {
            Self::Begin { volume, number, before, time, root, from, name } => {
                w.u8(1).bytes(volume).u64(*number).u64(*before).u64(*time).u64(root.0);
                w.u8(from.stage as u8).u64(from.ino.0).u64(from.offset).bytes(name);
            }
            Self::Inode { ino, mode, rdev, target } => {
                w.u8(2).u64(ino.0).u32(*mode).u32(*rdev).bytes(target);
            }
            Self::File { ino, size } => {
                w.u8(10).u64(ino.0).u64(*size);
            }
            Self::Data { ino, offset, bytes } => {
                w.u8(3).u64(ino.0).u64(*offset).bytes(bytes);
            }
            Self::Zero { ino, offset, len } => {
                w.u8(4).u64(ino.0).u64(*offset).u64(*len);
            }
            Self::Unnamed { dir, ino, last, name } => {
                w.u8(5).u64(dir.0).u64(ino.0).u8((*last).into()).bytes(name);
            }
            Self::Named { dir, ino, name } => {
                w.u8(6).u64(dir.0).u64(ino.0).bytes(name);
            }
            Self::Attributes { ino, last, what } => {
                w.u8(7).u64(ino.0).u8((*last).into()).u32(what.mode).u32(what.uid).u32(what.gid);
                put_stamp(&mut w, what.atime);
                put_stamp(&mut w, what.mtime);
                for name in &what.xattrs {
                    w.u8(name.len() as u8).bytes(name);
                }
            }
            Self::Xattr { ino, name, value } => {
                w.u8(11).u64(ino.0).u8(name.len() as u8).bytes(name).bytes(value);
            }

            Self::Gone { ino } => {
                w.u8(8).u64(ino.0);
            }
            Self::End { records } => {
                w.u8(9).u64(*records);
            }
        }
    }

    /// What a frame says of its body: how long it is, and its checksum.
    pub fn frame(bytes: &[u8; FRAME_BYTES]) -> Result<(usize, u32), Corrupt> {
        let mut r = Reader::new(NAME, bytes);
        let (len, crc) = (r.u32()? as usize, r.u32()?);
        if len == 0 || len > BODY_MAX {
            return Err(r.corrupt("has a record of an impossible length"));
        }
        Ok((len, crc))
    }

    /// Reads a body. `chain` is the checksum of the frame before, and then of this one.
    pub fn decode(body: &[u8], crc: u32, chain: &mut u32) -> Result<Self, Corrupt> {
        let mut r = Reader::new(NAME, body);
        if crc32c(*chain, body) != crc {
            return Err(r.corrupt("is damaged: a record has another checksum"));
        }
        *chain = crc;
        let kind = r.u8()?;
        let record = match kind {
            1 => {
                let mut volume = [0; 16];
                volume.copy_from_slice(r.bytes(16)?);
                let (number, before, time) = (r.u64()?, r.u64()?, r.u64()?);
                let (root, stage) = (InodeId(r.u64()?), r.u8()?);
                let stage = Stage::ALL.into_iter().find(|one| *one as u8 == stage);
                let stage = stage.ok_or(r.corrupt("begins in an unknown stage"))?;
                let from = Position { stage, ino: InodeId(r.u64()?), offset: r.u64()? };
                if number == 0 || before >= number || root.0 == 0 {
                    return Err(r.corrupt("is of a snapshot that cannot be"));
                }
                let name = take_name(&mut r)?;
                Self::Begin { volume, number, before, time, root, from, name }
            }
            2 => {
                let (ino, mode, rdev) = (InodeId(r.u64()?), r.u32()?, r.u32()?);
                Self::Inode { ino, mode, rdev, target: r.rest().to_vec() }
            }
            3 => {
                let (ino, offset) = (InodeId(r.u64()?), r.u64()?);
                Self::Data { ino, offset, bytes: r.rest().to_vec() }
            }
            4 => Self::Zero { ino: InodeId(r.u64()?), offset: r.u64()?, len: r.u64()? },
            5 => {
                let (dir, ino, last) = (InodeId(r.u64()?), InodeId(r.u64()?), r.flag()?);
                Self::Unnamed { dir, ino, last, name: take_name(&mut r)? }
            }
            6 => {
                let (dir, ino) = (InodeId(r.u64()?), InodeId(r.u64()?));
                Self::Named { dir, ino, name: take_name(&mut r)? }
            }
            7 => {
                let (ino, last) = (InodeId(r.u64()?), r.flag()?);
                let (mode, uid, gid) = (r.u32()?, r.u32()?, r.u32()?);
                let (atime, mtime) = (take_stamp(&mut r)?, take_stamp(&mut r)?);
                let mut xattrs = Vec::new();
                while r.left() > 0 {
                    xattrs.push(take_xattr(&mut r)?);
                }
                let what = Attributes { mode, uid, gid, atime, mtime, xattrs };
                Self::Attributes { ino, last, what }
            }
            8 => Self::Gone { ino: InodeId(r.u64()?) },
            9 => Self::End { records: r.u64()? },
            10 => Self::File { ino: InodeId(r.u64()?), size: r.u64()? },
            11 => {
                let (ino, name) = (InodeId(r.u64()?), take_xattr(&mut r)?);
                Self::Xattr { ino, name, value: r.rest().to_vec() }
            }
            _ => return Err(r.corrupt("has a record of an unknown kind")),
        };
        r.end()?;
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn some() -> Vec<Record> {
        let (ino, dir, stamp) = (InodeId(7), InodeId(1), Stamp { sec: -5, nsec: 999_999_999 });
        let from = Position { stage: Stage::Named, ino, offset: 9 };
        let (volume, name) = (*b"0123456789abcdef", b"name".to_vec());
        let xattrs = vec![b"user.a".to_vec(), b"user.b".to_vec()];
        let attributes = |mode, last| {
            let (uid, gid, atime, mtime, xattrs) = (1, 2, stamp, stamp, xattrs.clone());
            let what = Attributes { mode, uid, gid, atime, mtime, xattrs };
            Record::Attributes { ino, last, what }
        };
        vec![
            Record::Begin {
                volume,
                number: 3,
                before: 2,
                time: 1,
                root: dir,
                from,
                name: name.clone(),
            },
            Record::Inode { ino, mode: 0o120_777, rdev: 0, target: b"a/b".to_vec() },
            attributes(0o100_644, false),
            Record::Xattr { ino, name: b"user.a".to_vec(), value: vec![1; 5000] },
            Record::Xattr { ino, name: b"user.b".to_vec(), value: vec![] },
            Record::Unnamed { dir, ino, last: true, name: name.clone() },
            Record::Named { dir, ino, name },
            Record::File { ino, size: 9000 },
            Record::Data { ino, offset: 4096, bytes: vec![1, 2, 3] },
            Record::Zero { ino, offset: 8192, len: 4096 },
            attributes(0o100_644, true),
            attributes(0o040_755, true),
            Record::Gone { ino },
            Record::End { records: 13 },
        ]
    }

    /// The records of a stream, up to its end.
    fn decode_all(mut bytes: &[u8]) -> Result<Vec<Record>, Corrupt> {
        let (mut all, mut chain) = (Vec::new(), 0);
        while let Some((frame, rest)) = bytes.split_first_chunk() {
            let (len, crc) = Record::frame(frame)?;
            let body = rest.get(..len).ok_or(Corrupt::new(NAME, "ends in the middle"))?;
            all.push(Record::decode(body, crc, &mut chain)?);
            bytes = &rest[len..];
        }
        Ok(all)
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_is() {
        let (mut bytes, mut chain, mut ends) = (Vec::new(), 0, vec![0]);
        for record in some() {
            record.encode(&mut chain, &mut bytes);
            ends.push(bytes.len());
        }
        assert_eq!(decode_all(&bytes), Ok(some()));
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1 << (at % 8);
            assert!(decode_all(&other).is_err(), "byte {at}");
        }
        // One that is left out, comes twice, or earlier.
        for pair in ends.windows(2) {
            let (begin, end) = (pair[0], pair[1]);
            let without = [&bytes[..begin], &bytes[end..]].concat();
            assert!(end == bytes.len() || decode_all(&without).is_err());
            let twice = [&bytes[..end], &bytes[begin..]].concat();
            assert!(decode_all(&twice).is_err());
        }
        assert_eq!(check_head(&head()), Ok(()));
        assert!(check_head(b"CORBSEND\x02\0\0\0\0\0\0\0").is_err());
    }

    #[test]
    fn positions_are_in_the_order_of_the_records() {
        let all: Vec<_> = some().iter().filter_map(Record::position).collect();
        assert!(all.is_sorted());
        for position in all {
            use alloc::string::ToString;
            assert_eq!(position.to_string().parse(), Ok(position));
        }
        for wrong in ["", "1", "1-2", "8-1-1", "0-1-1", "1-2-3-4", "1-2-g", "1--2"] {
            assert!(wrong.parse::<Position>().is_err(), "{wrong}");
        }
    }
}
