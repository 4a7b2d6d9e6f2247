//! nicfs: see [`run`].

use crate::config::{Error, NicfsConfig};

/// What `mkfs` chooses for the region of a node.
#[derive(Clone, Debug)]
pub struct FormatParams {
    /// The same on every member of the chain.
    pub uuid: [u8; 16],
    /// Name of the volume.
    pub name: String,
    /// Bytes for the data of files.
    pub capacity: u64,
    /// Bytes of the stream ring.
    pub stream: u64,
    /// Owner of the root directory.
    pub uid: u32,
    /// Group of the root directory.
    pub gid: u32,
    /// Permission bits of the root directory.
    pub mode: u32,
}

/// Makes the region of a node: directory, volume, stream ring.
pub fn format(_config: &NicfsConfig, _params: &FormatParams) -> Result<(), Error> {
    Err(Error("nicfs: this build has no volume yet".into()))
}

/// Serves until a signal ends it.
pub fn run(_config: NicfsConfig) -> Result<(), Error> {
    Err(Error("nicfs: this build has no service loop yet".into()))
}
