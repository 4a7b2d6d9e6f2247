//! Which file system a source names.

use std::sync::Arc;

use client::dir::{self, DirFs};
use client::fs::FileSystem;

/// Descriptors of ours start here, above what a shell or a service manager hands down.
const FD_MIN: i32 = 64;
/// Inodes held by descriptor, if the limit of open files allows twice as many.
const NODES_MAX: usize = 16_384;

/// Opens a back end that needs no cluster: `dir:/PATH` serves a directory, `null:` swallows data.
/// None when the source is neither, and so is a node's socket.
///
/// # Errors
/// Why the back end cannot be opened.
pub fn open_back_end(source: &str) -> Option<Result<Arc<dyn FileSystem>, String>> {
    if let Some(path) = source.strip_prefix("dir:") {
        return Some(open_dir(path));
    }
    (source == "null:").then(|| Ok(Arc::new(client::null::NullFs::default()) as Arc<_>))
}

fn open_dir(path: &str) -> Result<Arc<dyn FileSystem>, String> {
    let path = std::path::absolute(path).map_err(|e| format!("dir:{path}: {e}"))?;
    let impersonate = rustix::process::geteuid().is_root();
    let options =
        dir::Options { fd_min: FD_MIN, nodes_max: raise_limit(), watch: None, impersonate };
    let fs = DirFs::open(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()), options)
        .map_err(|e| format!("dir:{}: {e}", path.display()))?;
    // Modes come with the caller's umask applied; ours must not be applied on top.
    rustix::process::umask(rustix::fs::Mode::empty());
    Ok(Arc::new(fs))
}

/// Lifts the limit of open files as far as we may; returns how many inodes to hold open.
fn raise_limit() -> usize {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If it is refused, the old limit counts.
    let _ = setrlimit(Resource::Nofile, limit);
    let now = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(now / 2).unwrap_or(usize::MAX).min(NODES_MAX)
}
