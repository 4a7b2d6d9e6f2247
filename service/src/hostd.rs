//! hostd: see [`run`].

use crate::config::{Error, HostdConfig};

/// Serves processes of this host until a signal ends it.
pub fn run(_config: HostdConfig) -> Result<(), Error> {
    Err(Error("hostd: this build has no service loop yet".into()))
}
