//! Crash states of memory: every state that a power cut can leave is opened by the production
//! recovery, checked, and compared with what an oracle allows. docs/testing.md tells it whole.

#[cfg(feature = "planted")]
pub mod catch;
pub mod command;
pub mod drive;
pub mod lab;
pub mod oracle;
pub mod run;
pub mod states;
pub mod trace;
pub mod workload;
