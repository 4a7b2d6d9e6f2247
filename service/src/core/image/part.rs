//! Parts of a piece of an image, one behind the other:
//!
//! ```text
//! 1 item    inode u64, kind u8, item u64, length u16, value
//! 2 no item inode u64, kind u8, item u64
//! 3 blocks  arena u32, first block u64, number u32, their bytes
//! 4 state   number u64, length u16, the snapshot as its item has it: what has come is this
//! 5 end     inodes u64, blocks u64, time u64
//! 6 key     key u64: what follows is offered by it
//! 7 offered what is known u8, number of the state u64, inode u64, block of the file u64, arena u32, first block u64, number u16, of each the
//!           CRC32C u32
//! 8 same    arena u32, first block u64, number u32
//! ```
//!
//! 6 to 8 are for a node that has said `ImageHad`.

use base::InodeId;
use base::wire::{Corrupt, Reader, Writer};
use storage::format::item::Snapshot;
use storage::format::page::Key;
use storage::limits::BLOCK_BYTES;
use storage::volume::image::ImageEnd;

use super::super::offer::OFFER_BLOCKS;

/// What is known of content that is offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Has {
    /// Nothing.
    Maybe = 0,
    /// The file has had it in the state that the node has told of.
    Last = 1,
    /// The snapshot shows it; which the node has, if it has one of that number: all that it has told of is of the same stream.
    Then = 2,
}

/// One part of a piece.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part<'a> {
    /// An item, or that the state before had one and this has not.
    Item(Key, Option<&'a [u8]>),
    /// Content of blocks.
    Blocks {
        /// Arena.
        arena: u32,
        /// First block.
        block: u64,
        /// All bytes of whole blocks.
        bytes: &'a [u8],
    },
    /// What has come is a snapshot.
    State(u64, Snapshot),
    /// There is no more.
    End(ImageEnd),
    /// What is offered is known by this, which is also the key of what is compared.
    Key(u64),
    /// Content of blocks that the node may have.
    Offered {
        /// Whether the node has it.
        known: Has,
        /// The state that comes.
        number: u64,
        /// The file in it, and the block of it with which this begins.
        ino: InodeId,
        /// See `ino`.
        file: u64,
        /// Arena.
        arena: u32,
        /// First block.
        block: u64,
        /// The CRC32C of the blocks.
        crcs: Vec<u32>,
    },
    /// Blocks that were offered, and that the node has.
    Same {
        /// Arena.
        arena: u32,
        /// First block.
        block: u64,
        /// Number of blocks.
        count: u32,
    },
}

impl<'a> Part<'a> {
    /// Appends the part.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        match self {
            Self::Item(key, value) => {
                w.u8(if value.is_some() { 1 } else { 2 });
                w.u64(key.ino).u8(key.kind).u64(key.item);
                if let Some(value) = value {
                    w.u16(value.len() as u16).bytes(value);
                }
            }
            Self::Blocks { arena, block, bytes } => {
                let count = bytes.len() as u64 / BLOCK_BYTES;
                w.u8(3).u32(*arena).u64(*block).u32(count as u32).bytes(bytes);
            }
            Self::State(number, snapshot) => {
                let item = snapshot.encode();
                w.u8(4).u64(*number).u16(item.len() as u16).bytes(&item);
            }
            Self::End(end) => {
                w.u8(5).u64(end.inodes).u64(end.blocks).u64(end.time);
            }
            Self::Key(key) => {
                w.u8(6).u64(*key);
            }
            Self::Offered { known, number, ino, file, arena, block, crcs } => {
                w.u8(7).u8(*known as u8).u64(*number).u64(ino.0).u64(*file).u32(*arena).u64(*block);
                w.u16(crcs.len() as u16);
                for crc in crcs {
                    w.u32(*crc);
                }
            }
            Self::Same { arena, block, count } => {
                w.u8(8).u32(*arena).u64(*block).u32(*count);
            }
        }
    }

    /// Reads one.
    pub fn decode(r: &mut Reader<'a>) -> Result<Self, Corrupt> {
        let tag = r.u8()?;
        Ok(match tag {
            1 | 2 => {
                let key = Key::new(r.u64()?, r.u8()?, r.u64()?);
                let value = if tag == 2 {
                    None
                } else {
                    let len = r.u16()?;
                    Some(r.bytes(len.into())?)
                };
                Self::Item(key, value)
            }
            3 => {
                let (arena, block, count) = (r.u32()?, r.u64()?, r.u32()? as usize);
                let Some(len) = count.checked_mul(BLOCK_BYTES as usize).filter(|len| *len > 0)
                else {
                    return Err(r.corrupt("holds no blocks, or more than there can be"));
                };
                Self::Blocks { arena, block, bytes: r.bytes(len)? }
            }
            4 => {
                let (number, len) = (r.u64()?, r.u16()?);
                Self::State(number, Snapshot::decode(r.bytes(len.into())?)?)
            }
            5 => Self::End(ImageEnd { inodes: r.u64()?, blocks: r.u64()?, time: r.u64()? }),
            6 => Self::Key(r.u64()?),
            7 => {
                let known = match r.u8()? {
                    0 => Has::Maybe,
                    1 => Has::Last,
                    2 => Has::Then,
                    _ => return Err(r.corrupt("offers something in an unknown way")),
                };
                let (number, ino, file) = (r.u64()?, InodeId(r.u64()?), r.u64()?);
                let (arena, block, count) = (r.u32()?, r.u64()?, r.u16()?);
                if count == 0 || u64::from(count) > OFFER_BLOCKS {
                    return Err(r.corrupt("offers no blocks, or more than there can be"));
                }
                let crcs = (0..count).map(|_| r.u32()).collect::<Result<_, _>>()?;
                Self::Offered { known, number, ino, file, arena, block, crcs }
            }
            8 => Self::Same { arena: r.u32()?, block: r.u64()?, count: r.u32()? },
            _ => return Err(r.corrupt("has a part of an unknown kind")),
        })
    }
}
