//! What a server sends, before libnfs sees it. libnfs 4.0.0 believes its server: the length of a verifier is taken as a signed number and used
//! to go back in the buffer, and fragments that are never the last are kept for ever. So records are put together here, within bounds,
//! and their heads are judged; libnfs gets those that are whole, each in one piece.
// The protocol's integers are big-endian.
#![allow(clippy::big_endian_bytes)]

use crate::xdr::{Garbage, In};

/// Bytes of a record at most, as libnfs takes them: a mebibyte of data and what is around it.
pub const RECORD_MAX: usize = (1 << 20) + 4092;
/// Bytes of a verifier at most (RFC 5531, 8.2).
const VERIFIER_MAX: usize = 400;
/// This fragment is the record's last.
const LAST: u32 = 1 << 31;

/// Puts records together.
#[derive(Debug, Default)]
pub struct Guard {
    /// The mark of the fragment that comes.
    mark: Vec<u8>,
    /// How much of it is still to come, and whether it is the last.
    fragment: Option<(usize, bool)>,
    record: Vec<u8>,
}

/// What one record is an answer to, and the record.
#[derive(Debug, PartialEq, Eq)]
pub struct Record {
    /// The number of the request.
    pub xid: u32,
    /// All of it, without a mark.
    pub bytes: Vec<u8>,
}

/// The number of the request that a record answers.
///
/// # Errors
/// It is no answer.
pub fn judge(record: &[u8]) -> Result<u32, Garbage> {
    let mut read = In::new(record);
    let xid = read.u32()?;
    // Servers call nobody back over this connection.
    if read.u32()? != 1 {
        return Err(Garbage);
    }
    match read.u32()? {
        0 => {
            let _flavour = read.u32()?;
            read.bytes(VERIFIER_MAX)?;
            // The least and the greatest version follow, where that was wrong.
            if read.u32()? == 2 {
                read.u64()?;
            }
        }
        1 if read.u32()? == 0 => {
            read.u64()?;
        }
        1 => {
            read.u32()?;
        }
        _ => return Err(Garbage),
    }
    Ok(xid)
}

impl Guard {
    /// Takes what came, and hands on each record that is whole.
    ///
    /// # Errors
    /// What no server sends: the connection is of no use any more.
    pub fn feed(&mut self, mut bytes: &[u8], each: &mut dyn FnMut(Record)) -> Result<(), Garbage> {
        while !bytes.is_empty() {
            let Some((left, last)) = self.fragment else {
                let (now, rest) = bytes.split_at(bytes.len().min(4 - self.mark.len()));
                self.mark.extend_from_slice(now);
                bytes = rest;
                let Ok(mark) = <[u8; 4]>::try_from(&self.mark[..]) else { continue };
                self.mark.clear();
                let mark = u32::from_be_bytes(mark);
                let len = usize::try_from(mark & !LAST).map_err(|_| Garbage)?;
                // A fragment without anything would come for ever.
                if len == 0 || len > RECORD_MAX - self.record.len().min(RECORD_MAX) {
                    return Err(Garbage);
                }
                self.fragment = Some((len, mark & LAST != 0));
                continue;
            };
            let (now, rest) = bytes.split_at(bytes.len().min(left));
            self.record.extend_from_slice(now);
            bytes = rest;
            let left = left - now.len();
            self.fragment = (left > 0).then_some((left, last));
            if left == 0 && last {
                let bytes = std::mem::take(&mut self.record);
                each(Record { xid: judge(&bytes)?, bytes });
            }
        }
        Ok(())
    }
}

/// A record as it stands on the wire, in one fragment.
pub fn marked(record: &[u8], to: &mut Vec<u8>) {
    let len = u32::try_from(record.len()).unwrap_or(0);
    to.extend_from_slice(&(len | LAST).to_be_bytes());
    to.extend_from_slice(record);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xdr::Out;

    fn accepted(xid: u32, verifier: &[u8], rest: &[u8]) -> Vec<u8> {
        Out::default().u32(xid).u32(1).u32(0).u32(0).bytes(verifier).u32(0).fixed(rest).take()
    }

    fn all(guard: &mut Guard, bytes: &[u8]) -> Result<Vec<u32>, Garbage> {
        let mut xids = Vec::new();
        guard.feed(bytes, &mut |record| xids.push(record.xid)).map(|()| xids)
    }

    #[test]
    fn records_come_in_any_pieces() {
        let mut wire = Vec::new();
        marked(&accepted(1, b"", b"abcd"), &mut wire);
        // One in two fragments.
        let second = accepted(2, b"verifier", b"efgh");
        let (a, b) = second.split_at(9);
        wire.extend_from_slice(&[0, 0, 0, 9]);
        wire.extend_from_slice(a);
        marked(b, &mut wire);
        for size in 1..wire.len() {
            let (mut guard, mut got) = (Guard::default(), Vec::new());
            for piece in wire.chunks(size) {
                guard.feed(piece, &mut |record| got.push(record)).unwrap();
            }
            assert_eq!(got.iter().map(|r| r.xid).collect::<Vec<_>>(), [1, 2]);
            assert_eq!(got[1].bytes, second);
        }
    }

    #[test]
    fn what_would_harm_is_refused() {
        // A length that is negative where it is taken as signed.
        let mut bad = Out::default();
        let negative =
            bad.u32(1).u32(1).u32(0).u32(0).u32(0xffff_fff0).u32(0).fixed(&[0; 64]).take();
        let mut wire = Vec::new();
        marked(&negative, &mut wire);
        assert_eq!(all(&mut Guard::default(), &wire), Err(Garbage));
        // Fragments for ever, whether they have something or not.
        let mut guard = Guard::default();
        let piece = [&[0, 1, 0, 0][..], &[0; 65_536]].concat();
        let until = (0..64).find(|_| all(&mut guard, &piece).is_err());
        assert_eq!(until, Some(16));
        assert_eq!(all(&mut Guard::default(), &[0; 4]), Err(Garbage));
        // More than anything has; a call; nothing; a verifier that is none.
        assert_eq!(all(&mut Guard::default(), &[0xff; 4]), Err(Garbage));
        let call = Out::default().u32(1).u32(0).take();
        assert_eq!(judge(&call), Err(Garbage));
        assert_eq!(judge(&accepted(1, &[0; 401], b"")), Err(Garbage));
        assert_eq!(judge(&accepted(9, &[0; 400], b"")), Ok(9));
        assert_eq!(judge(&[0, 0]), Err(Garbage));
        for (rest, good) in [
            (&[1, 1, 5][..], true),
            (&[1, 1], false),
            (&[1, 0, 2, 2], true),
            (&[1, 0], false),
            (&[2], false),
            (&[1], false),
        ] {
            let mut out = Out::default();
            out.u32(3).u32(1);
            rest.iter().for_each(|n| {
                out.u32(*n);
            });
            assert_eq!(judge(&out.take()).is_ok(), good, "{rest:?}");
        }
    }
}
