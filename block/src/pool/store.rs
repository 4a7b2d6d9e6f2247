//! What keeps named bytes.

use base::Errno;

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
    fn lock(&self, image: &str) -> Result<Box<dyn Send + Sync>, Errno>;
}

/// Whether a name of an image is good: 1 to 128 letters, digits, `.`, `-`, `_`, not beginning with a dot.
pub fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    (1..=128).contains(&name.len()) && !name.starts_with('.') && name.chars().all(good)
}
