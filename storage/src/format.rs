//! Every structure on media and in shared memory, without logic beyond packing and unpacking.
//! Little-endian throughout; numbers, once given, are forever; reserved bytes are zero and are
//! checked to be zero.

pub mod chunk;
pub mod clients;
pub mod control;
pub mod entry;
pub mod facts;
pub mod item;
pub mod lock;
pub mod page;
pub mod proof;
pub mod publications;
pub mod rpc;
pub mod sole;
pub mod sum;
pub mod superblock;
pub mod transfer;

pub use base::wire::{Corrupt, Reader, Writer};
