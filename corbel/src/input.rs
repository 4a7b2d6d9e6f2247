//! What of the program reads files and words that others wrote: a library of its own, so that tests
//! and fuzz targets feed it the same code that ships.

pub mod config;
#[path = "run/elf.rs"]
mod elf;
pub mod failure;
#[path = "../../intercept/src/format.rs"]
pub mod format;
#[path = "run/frames.rs"]
mod frames;
#[path = "run/objects.rs"]
pub mod objects;
#[path = "run/sites.rs"]
pub mod sites;
pub mod units;
