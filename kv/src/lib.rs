//! Files over an existing key-value server that speaks the Redis protocol (Redis 5 or later, Valkey): DPFS, section 5, the back end
//! for "a file system where there is none".
//!
//! - [`resp`]: the protocol;
//! - [`link`]: connections, and requests that are done once whatever breaks;
//! - `ops.lua`: every operation as one script that the server runs: at once, or not at all;
//! - [`KvFs`]: the [`FileSystem`](client::fs::FileSystem) over these.
//!
//! # Keys
//! All begin with the name of the file system in braces, so that a cluster keeps them in one slot (an operation needs them together).
//!
//! | key | kind | what it has |
//! | --- | --- | --- |
//! | `{NAME}:s` | hash | `v` version (1), `c` bytes of a piece, `g` grace in seconds, `n` last inode, `k` last cookie |
//! | `{NAME}:i:INO` | hash | an inode: `m` mode, `n` links, `u` `g` owner, `s` size, `p` the directory above, `r` device, `a` `t` `c` `b` times, `l` target |
//! | `{NAME}:d:INO` | hash | a directory: name to inode, type and cookie |
//! | `{NAME}:o:INO` | sorted set | the same names by cookie |
//! | `{NAME}:f:INO:N` | string | piece N of a file; what it is short of is zero |
//! | `{NAME}:c:INO` | sorted set | which pieces there are |
//! | `{NAME}:x:INO` | hash | extended attributes |
//! | `{NAME}:z` | sorted set | inodes without a name, and until when somebody has them open |
//! | `{NAME}:r:CONNECTION` | hash | the last request of a connection and its answer, for a week, or until who has it ends in peace |
//!
//! # Limits
//! - One server (or one slot of a cluster) has all of it, in its memory.
//! - Files up to 1 PiB, names up to 255 bytes, 65,000 links, 256 extended attributes of 64 KiB, 4096 directories above each other where
//!   one is renamed.
//! - Taking away more than 4096 pieces (256 MiB) of a file at once is done in steps; who looks meanwhile sees it get shorter.
//! - A file that is open and has no name lives as long as its opener tells the server so, every few seconds: one that was cut off for
//!   longer than the grace has lost it. Its space comes back when the grace has passed.
//! - No locks across machines, no access lists. `fsync` is what the server does: nothing is lost with `appendonly yes` and
//!   `appendfsync always`.

pub mod link;
pub mod resp;

mod fs;

pub use fs::{KvFs, Options};
