//! Proofs that a client was shown an inode.
//!
//! Permission on the way to an inode is asked for when a name is looked up. Whoever asks by *number*
//! afterwards (attributes, content, a lease) did not come that way, and a number is easily guessed. So
//! each answer that shows an inode carries a proof of it, and a request by number gives it back, as
//! NFS does with its file handles: the SipHash-2-4 of the number (8 bytes, little-endian) under a secret of
//! the node ([`super::clients::Header`]). It is worth what an open O_PATH descriptor is worth: it
//! outlives a change of the directories above, and may be handed on, but it opens nothing; read and
//! write permission are judged each time.
//!
//! No proof is needed for the root of the volume, for what the client holds (a lease, an open file), nor
//! by the super-user, who gets them with an inode's attributes only, to check what others show
//! him (a mount: `.corbel/inode/NUMBER.PROOF`).

use base::InodeId;
use base::siphash::siphash24;

/// See the module. 0: none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Proof(pub u64);

impl Proof {
    /// No proof.
    pub const NONE: Self = Self(0);

    /// The proof of an inode.
    #[must_use]
    pub fn new(secret: u128, ino: InodeId) -> Self {
        // 0 says that there is none.
        Self(siphash24(secret, &ino.0.to_le_bytes()).max(1))
    }
}
