//! Locks of objects, as the cluster's class `lock` keeps them. They are taken and let go like all else that is changed: a full cluster
//! says so, rather than let whoever renews one wait until it has ended.

use std::ffi::{CStr, c_int};
use std::sync::Arc;
use std::time::Duration;

use base::Errno;

use super::io::{Io, Step};
use super::{text, told};

const EXCLUSIVE: u8 = 1;
/// `LOCK_FLAG_MUST_RENEW`: only who has the lock gets it.
const MUST_RENEW: u8 = 2;
/// A client, among those that a cluster has names for.
const CLIENT: u8 = 8;

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend(u32::try_from(text.len()).unwrap_or(0).to_le_bytes());
    out.extend(text.as_bytes());
}

/// As Ceph encodes what may have more fields one day: version, the oldest that is alike, length.
pub fn envelope(fields: &[u8]) -> Vec<u8> {
    let mut out = vec![1, 1];
    out.extend(u32::try_from(fields.len()).unwrap_or(0).to_le_bytes());
    out.extend(fields);
    out
}

impl Io {
    /// A method of the class.
    fn ask(self: &Arc<Self>, name: &str, method: &CStr, fields: &[u8]) -> Result<(), Errno> {
        let step = Step::Exec(c"lock", method, &envelope(fields));
        Self::wait(self.cluster.patience(), |done| self.change(name, &[step], done))
    }

    /// Takes a lock of an object for so long (zero: until it is let go), or renews it: then only who has it gets it.
    pub fn lock(
        self: &Arc<Self>,
        name: &str,
        lock: &Lock<'_>,
        duration: Duration,
        renew: bool,
    ) -> Result<(), Errno> {
        let mut fields = Vec::new();
        put_text(&mut fields, lock.name);
        fields.push(EXCLUSIVE);
        for text in [lock.cookie, lock.tag, lock.description] {
            put_text(&mut fields, text);
        }
        let seconds = u32::try_from(duration.as_secs()).map_err(|_| Errno::INVAL)?;
        fields.extend(seconds.to_le_bytes());
        fields.extend(duration.subsec_nanos().to_le_bytes());
        fields.push(if renew { MUST_RENEW } else { 0 });
        self.ask(name, c"lock", &fields)
    }

    /// Lets a lock go.
    pub fn unlock(self: &Arc<Self>, name: &str, lock: &str, cookie: &str) -> Result<(), Errno> {
        let mut fields = Vec::new();
        put_text(&mut fields, lock);
        put_text(&mut fields, cookie);
        self.ask(name, c"unlock", &fields)
    }

    /// Gives a lock another cookie than the one that it has.
    pub fn set_cookie(
        self: &Arc<Self>,
        name: &str,
        lock: &Lock<'_>,
        new: &str,
    ) -> Result<(), Errno> {
        let mut fields = Vec::new();
        put_text(&mut fields, lock.name);
        fields.push(EXCLUSIVE);
        for text in [lock.cookie, lock.tag, new] {
            put_text(&mut fields, text);
        }
        self.ask(name, c"set_cookie", &fields)
    }

    /// Takes a lock from who has it.
    pub fn break_lock(self: &Arc<Self>, name: &str, lock: &str, of: &Locker) -> Result<(), Errno> {
        let mut fields = Vec::new();
        put_text(&mut fields, lock);
        fields.push(CLIENT);
        fields.extend(of.number().ok_or(Errno::INVAL)?.to_le_bytes());
        put_text(&mut fields, &of.cookie);
        self.ask(name, c"break_lock", &fields)
    }

    /// Who has a lock of an object.
    pub fn lockers(&self, name: &str, lock: &str) -> Result<Vec<Locker>, Errno> {
        const ROOM: usize = 16 << 10;
        let (name, lock) = (text(name)?, text(lock)?);
        let mut exclusive = 0;
        let mut texts = [const { Vec::new() }; 4].map(|_: Vec<u8>| vec![0u8; ROOM]);
        let mut lens = [ROOM; 4];
        let [tag, clients, cookies, addresses] = &mut texts;
        let [tag_len, clients_len, cookies_len, addresses_len] = &mut lens;
        // SAFETY: the handle lives, texts end in NUL, and each buffer is as long as is said.
        let count = unsafe {
            (self.cluster.lib.lockers)(
                self.raw,
                name.as_ptr(),
                lock.as_ptr(),
                &raw mut exclusive,
                tag.as_mut_ptr().cast(),
                tag_len,
                clients.as_mut_ptr().cast(),
                clients_len,
                cookies.as_mut_ptr().cast(),
                cookies_len,
                addresses.as_mut_ptr().cast(),
                addresses_len,
            )
        };
        told(c_int::try_from(count).map_err(|_| Errno::IO)?)?;
        let split = |bytes: &[u8]| -> Vec<String> {
            let parts = bytes.split(|byte| *byte == 0);
            parts.map(|part| String::from_utf8_lossy(part).into_owned()).collect()
        };
        let (clients, cookies, addresses) = (split(clients), split(cookies), split(addresses));
        let lockers = clients.into_iter().zip(cookies).zip(addresses);
        let lockers = lockers.map(|((client, cookie), address)| Locker { client, cookie, address });
        Ok(lockers.take(usize::try_from(count).unwrap_or(0)).collect())
    }
}

/// A lock of an object.
#[derive(Clone, Copy, Debug)]
pub struct Lock<'a> {
    /// Its name: an object may have several.
    pub name: &'a str,
    /// What tells the holder from others of the same client.
    pub cookie: &'a str,
    /// By which rules it is taken: who has others does not get it.
    pub tag: &'a str,
    /// Who that is, for people.
    pub description: &'a str,
}

/// Who has a lock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Locker {
    /// `client.` and its number.
    pub client: String,
    /// What the client calls it.
    pub cookie: String,
    /// Where the client is.
    pub address: String,
}

impl Locker {
    /// The client's number.
    pub fn number(&self) -> Option<u64> {
        self.client.strip_prefix("client.")?.parse().ok()
    }

    /// Whether this may be put into a command that is shown to people: others who may write to the pool chose it.
    pub fn is_plain(&self) -> bool {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || " ._:/[]-".contains(c);
        [&self.client, &self.cookie, &self.address].iter().all(|text| text.chars().all(is_plain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_might_be_a_command_is_not_plain() {
        let of = |cookie: &str| Locker {
            client: "client.4711".into(),
            cookie: cookie.into(),
            address: "v1:[fe80::1]:0/1198395772".into(),
        };
        assert!(of("auto 94000000000000").is_plain());
        assert_eq!(of("").number(), Some(4711));
        for bad in ["'; id; '", "$(id)", "`id`", "a\nb", "\u{1b}[2J", "a\\", "\"", "\u{202e}"] {
            assert!(!of(bad).is_plain(), "{bad}");
        }
    }
}
