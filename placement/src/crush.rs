//! CRUSH: where data goes, computed from a map of the cluster; bit-exact with Ceph's.
//!
//! - [`Map`] is the map as people and formats see it. `wire` reads and writes Ceph's binary form,
//!   `compile` + `assemble` and `decompile` crushtool's text, `build` derives what a bucket keeps.
//! - [`Placer`] is a checked map laid out for choosing (`flat`). `choose` runs rules over it, `engine`
//!   draws straw2 with the vectors that the processor has, `batch` maps many inputs at once.
//! - `stats` says how a map uses its devices, and what moves when it changes.
//!
//! docs/placement.md has the measured figures and what was compared with Ceph.

mod assemble;
mod batch;
mod build;
mod choose;
mod compile;
mod decompile;
mod engine;
mod error;
mod flat;
pub mod hash;
pub mod limits;
mod ln;
mod map;
mod stats;
mod wire;

pub use batch::Batch;
pub use build::make_bucket;
pub use choose::{ITEM_NONE, Workspace};
pub use engine::Engine;
pub use error::{Error, Result};
pub use flat::{Options, Placer};
pub use ln::crush_ln;
pub use map::{
    Algorithm, Bucket, CHOOSE_ARGS_DEFAULT, ChooseArg, Map, RULE_ERASURE, RULE_REPLICATED, Rule,
    Step, Tunables, Weights,
};
pub use stats::{DeviceUse, Inputs, Movement, Usage, movement, usage};
