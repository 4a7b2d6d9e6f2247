//! Links that are private have their frames signed and not encrypted, if both sides want it so: after the handshake of TLS,
//! records of this module instead of TLS's.
//!
//! ```text
//! record: offset size   field
//!              0    1   0x80, which no record of TLS begins with
//!              1    3   length of the data, at most 32 KiB
//!              4        data
//!                  16   AES-128-GCM over all before, with nothing to encrypt
//! ```
//!
//! The keys, one a direction, come out of the handshake (RFC 8446, 7.5), the nonce is the number of the record: one that is
//! changed, left out, repeated or out of order does not match.

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use rustls::Connection;

use crate::decode::LinkError;

const LABEL: &[u8] = b"EXPORTER-corbel-frames";
const HEAD: usize = 4;
const MARK: u8 = 0x80;
const DATA_MAX: usize = 32 << 10;
const KEY: usize = 16;
const TAG: usize = 16;

/// What the bytes of a connection begin with.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Not all of a record is there.
    Part,
    /// A record of TLS of so many bytes.
    Tls(usize),
    /// One of this module with so many bytes of data.
    Signed(usize),
}

/// Looks at the beginning of a record.
pub fn next(bytes: &[u8]) -> Result<Next, LinkError> {
    let (len, whole) = match bytes {
        [MARK, a, b, c, ..] => {
            let len = usize::from(*c) << 16 | usize::from(*b) << 8 | usize::from(*a);
            (len, Next::Signed(len))
        }
        [0x14..=0x17, _, _, a, b, ..] => {
            let len = 5 + (usize::from(*a) << 8 | usize::from(*b));
            (len, Next::Tls(len))
        }
        [MARK | 0x14..=0x17, ..] | [] => return Ok(Next::Part),
        _ => return Err(LinkError::Protocol("what came is neither TLS nor signed".to_owned())),
    };
    let need = match whole {
        Next::Signed(_) if len > DATA_MAX || len == 0 => {
            return Err(LinkError::Protocol("a signed record has an impossible length".to_owned()));
        }
        Next::Signed(_) => HEAD + len + TAG,
        _ => len,
    };
    Ok(if bytes.len() < need { Next::Part } else { whole })
}

/// Both directions of one connection.
pub struct Signed {
    speaks: LessSafeKey,
    hears: LessSafeKey,
    sent: u64,
    heard: u64,
    out: Vec<u8>,
    /// Of `out`, what is gone already.
    gone: usize,
}

fn nonce(number: u64) -> Nonce {
    let mut bytes = [0u8; NONCE_LEN];
    bytes[NONCE_LEN - 8..].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl Signed {
    /// After the handshake.
    pub fn new(tls: &Connection) -> Result<Self, LinkError> {
        let wrong =
            |e: &dyn core::fmt::Display| LinkError::Protocol(format!("TLS gives no keys: {e}"));
        let both =
            tls.export_keying_material([0u8; 2 * KEY], LABEL, None).map_err(|e| wrong(&e))?;
        let key = |bytes: &[u8]| {
            UnboundKey::new(&AES_128_GCM, bytes).map(LessSafeKey::new).map_err(|e| wrong(&e))
        };
        let (dialler, other) = (key(&both[..KEY])?, key(&both[KEY..])?);
        let (speaks, hears) = match tls {
            Connection::Client(_) => (dialler, other),
            Connection::Server(_) => (other, dialler),
        };
        Ok(Self { speaks, hears, sent: 0, heard: 0, out: Vec::new(), gone: 0 })
    }

    /// What waits for the socket.
    pub fn pending(&self) -> &[u8] {
        &self.out[self.gone..]
    }

    pub fn sent(&mut self, bytes: usize) {
        self.gone += bytes;
        if self.gone >= self.out.len() {
            self.out.clear();
            self.gone = 0;
        }
    }

    /// Puts a part of `data` into a record; how much.
    pub fn write(&mut self, data: &[&[u8]]) -> Result<usize, LinkError> {
        let begin = self.out.len();
        self.out.extend_from_slice(&[MARK, 0, 0, 0]);
        let mut left = DATA_MAX;
        for part in data {
            let take = left.min(part.len());
            self.out.extend_from_slice(&part[..take]);
            left -= take;
        }
        let len = DATA_MAX - left;
        if len == 0 {
            self.out.truncate(begin);
            return Ok(0);
        }
        self.out[begin + 1..begin + HEAD].copy_from_slice(&(len as u32).to_le_bytes()[..3]);
        let aad = Aad::from(&self.out[begin..]);
        let tag = self
            .speaks
            .seal_in_place_separate_tag(nonce(self.sent), aad, &mut [])
            .map_err(|_| LinkError::Protocol("a record cannot be signed".to_owned()))?;
        self.sent += 1;
        self.out.extend_from_slice(tag.as_ref());
        Ok(len)
    }

    /// Checks a whole record with `len` bytes of data: where these lie in it, and its length.
    pub fn check(
        &mut self,
        record: &[u8],
        len: usize,
    ) -> Result<(core::ops::Range<usize>, usize), LinkError> {
        let whole = HEAD + len + TAG;
        let mut tag = [0u8; TAG];
        tag.copy_from_slice(&record[HEAD + len..whole]);
        self.hears
            .open_in_place(nonce(self.heard), Aad::from(&record[..HEAD + len]), &mut tag)
            .map_err(|_| {
                LinkError::Protocol(
                    "a record does not match its signature: somebody is between".to_owned(),
                )
            })?;
        self.heard += 1;
        Ok((HEAD..HEAD + len, whole))
    }
}
