//! The programs as people use them: the command line, local clusters of real processes, and other
//! people's programs on mounts and under `corbel run`.
//!
//! Most need root and /dev/fuse (a container without them says so and passes).

mod as_native;
mod block;
mod cluster;
mod coherence;
mod copies;
mod crush;
mod descriptors;
mod doors;
mod foreign;
mod harness;
mod helper;
mod hunt;
mod keys;
mod lapse;
mod locks;
mod nfs;
mod overload;
mod patience;
mod posix;
mod rados;
mod ranges;
mod recover;
mod restart;
mod run;
mod semantics;
mod siege;
mod snapshots;
mod space;
mod suites;
mod sync;
mod transfer;
mod virtiofs;
