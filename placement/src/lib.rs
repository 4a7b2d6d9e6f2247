//! Pure kernels: placement, Reed-Solomon, checksums, compression. No I/O, and no threads but those of [`dispatch`].
//!
//! - [`coding`]: Reed-Solomon codes, bit-exact with ISA-L and Jerasure.
//! - [`checksum`]: CRC32C, incremental and combined from parts.
//! - [`compress`]: LZ4 blocks and the test for data not worth compressing.
//! - [`codec`]: codecs by number, for what is packed and has to be unpacked elsewhere.
//! - [`crush`]: CRUSH placement, bit-exact with Ceph.
//! - [`dispatch`]: task queues before the engines, and other accelerators.
//! - [`engine`]: who does the arithmetic; one trait, chosen by what the CPU has.

pub mod checksum;
pub mod codec;
pub mod coding;
pub mod compress;
pub mod crush;
pub mod dispatch;
pub mod engine;
#[cfg(all(feature = "foreign", unix))]
pub mod foreign;
