//! What bad input gets: the bodies of all fuzz targets, as plain functions over bytes.
//!
//! Two callers: the wrappers in `fuzz/fuzz_targets` (libFuzzer, nightly) search for inputs, and
//! `tests/replay.rs` (stable, in `make test`) runs everything that is kept in `fuzz/corpus`. A body
//! returns, or panics when something that must hold does not.
//!
//! [`formats`] is the table of all formats of bytes, [`text`] of what people write; [`node`],
//! [`peer`], [`fabric`], [`coordinator`] and [`image`] drive whole parts of the system with scripts
//! ([`input`]) of which any bytes are one.

pub mod block;
pub mod coding;
pub mod coordinator;
pub mod crush_map;
pub mod device;
pub mod fabric;
mod forge;
pub mod formats;
pub mod frames;
pub mod fuse_request;
pub mod handshake;
pub mod hostd;
pub mod image;
pub mod input;
pub mod lz4_block;
pub mod node;
pub mod osd_map;
pub mod packed;
pub mod peer;
pub mod resp;
// The same nodes, links and clients worked by hand as in the tests of the service.
#[allow(dead_code, unreachable_pub)]
#[path = "../../service/tests/node/rig.rs"]
mod rig;
pub mod s3;
pub mod siege;
pub mod text;
// What the volume's own tests find differences with.
#[allow(dead_code, missing_docs, unreachable_pub)]
#[path = "../../storage/tests/common/whole.rs"]
mod whole;

/// A target.
#[derive(Debug)]
pub struct Target {
    /// Name of the target and of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Takes any bytes.
    pub body: fn(&[u8]),
    /// Inputs made of real objects, to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

const fn target(name: &'static str, body: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, body, seeds }
}

/// Every target.
pub const TARGETS: &[Target] = &[
    target("block", block::run, block::seeds),
    target("coding", coding::run, Vec::new),
    target("coordinator", coordinator::run, Vec::new),
    target("crush_map", crush_map::run, Vec::new),
    target("device", device::run, device::seeds),
    target("fabric", fabric::run, Vec::new),
    target("frames", frames::run, Vec::new),
    target("fuse_request", fuse_request::run, Vec::new),
    target("handshake", handshake::run, Vec::new),
    target("hostd", hostd::run, Vec::new),
    target("image", image::run, Vec::new),
    target("lz4_block", lz4_block::run, Vec::new),
    target("media", |b| formats::run(formats::MEDIA, b), || formats::seeds(formats::MEDIA)),
    target("memory", |b| formats::run(formats::MEMORY, b), || formats::seeds(formats::MEMORY)),
    target("node", node::run, Vec::new),
    target("osd_map", osd_map::run, Vec::new),
    target("packed", packed::run, packed::seeds),
    target("peer", peer::run, Vec::new),
    target("resp", resp::run, resp::seeds),
    target("s3", s3::run, s3::seeds),
    target("text", text::run, text::seeds),
    target("wire", |b| formats::run(formats::WIRE, b), || formats::seeds(formats::WIRE)),
];

/// Runs the target called `name`.
///
/// # Panics
/// If there is none, and if what must hold of the input does not.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|t| t.name == name);
    let target = target.unwrap_or_else(|| panic!("no target is called {name}"));
    (target.body)(bytes);
}
