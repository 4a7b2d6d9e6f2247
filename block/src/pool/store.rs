//! What keeps named bytes.

use std::sync::Arc;

use base::Errno;

use super::dir::Dir;
use super::ground::Lock;
use super::rados::Rados;
use super::s3::{Keys, S3};

/// A store. Calls wait; [`Worker`](super::worker::Worker) is how the pool asks without waiting. Names are of the form
/// `image/name`, of letters, digits, `.`, `-` and `_`.
pub trait Store: Send + Sync {
    /// Keeps bytes under a name, in one step, durable when it returns: no reader sees a part of them.
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<(), Errno>;
    /// Bytes from `offset`; fewer than `len` only at their end. `ENOENT` where there is no such name.
    fn get(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, Errno>;
    /// Names of an image, without it and its slash.
    fn list(&self, image: &str) -> Result<Vec<String>, Errno>;
    /// Forgets a name; it is no error if there is none.
    fn remove(&self, name: &str) -> Result<(), Errno>;
    /// Takes the lock of an image for as long as the result lives; `EBUSY` where another process has it. A store
    /// that knows no locks gives one to everybody.
    fn lock(&self, image: &str) -> Result<Lock, Errno>;
}

/// Whether a name of an image is good: 1 to 128 letters, digits, `.`, `-`, `_`, not beginning with a dot.
pub fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    (1..=128).contains(&name.len()) && !name.starts_with('.') && name.chars().all(good)
}

/// Opens a store by what a pool's file says of it: `dir:PATH`, `s3:URL`, `rados:POOL/NAMESPACE`. The outer error: there is no such kind, or what is said is
/// wrong; the inner one: it is not to be had now.
pub fn open(at: &str) -> Result<Result<Arc<dyn Store>, String>, String> {
    match at.split_once(':') {
        Some(("dir", path)) => Ok(Dir::open(path.as_ref())
            .map(|dir| Arc::new(dir) as Arc<dyn Store>)
            .map_err(|error| error.to_string())),
        Some(("s3", url)) => {
            let place = url.parse()?;
            let keys = Keys::from_environment()?;
            Ok(S3::new(place, keys).map(|store| Arc::new(store) as Arc<dyn Store>))
        }
        Some(("rados", place)) => {
            let store =
                Rados::new(place.parse()?).map_err(|error| format!("store {at}: {error}"))?;
            Ok(Ok(Arc::new(store)))
        }
        _ => Err(format!(
            "store {at:?} is of no known kind: write dir:PATH, s3:URL or rados:POOL/NAMESPACE"
        )),
    }
}
