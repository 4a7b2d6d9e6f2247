//! The external data representation (RFC 4506): what requests are written in, and how answers are read. All integers are big-endian, everything is
//! padded to four bytes. A reader never goes past its end and never keeps more than came, whatever lengths say.
// Not ours to choose.
#![allow(clippy::big_endian_bytes)]

use base::Errno;

/// What came is not what the protocol says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Garbage;

impl From<Garbage> for Errno {
    fn from(_: Garbage) -> Self {
        Self::IO
    }
}

/// Arguments of a request, as they are written.
#[derive(Clone, Default, Debug)]
pub struct Out(Vec<u8>);

impl Out {
    /// A number of 32 bits.
    pub fn u32(&mut self, n: u32) -> &mut Self {
        self.0.extend_from_slice(&n.to_be_bytes());
        self
    }

    /// A number of 64 bits.
    pub fn u64(&mut self, n: u64) -> &mut Self {
        self.0.extend_from_slice(&n.to_be_bytes());
        self
    }

    /// A truth.
    pub fn flag(&mut self, on: bool) -> &mut Self {
        self.u32(on.into())
    }

    /// Bytes whose number is known to both.
    pub fn fixed(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Bytes with their number before them.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        // Nothing that is sent is as long as that: names, targets, and data of a piece.
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX)).fixed(bytes)
    }

    /// What was written.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0)
    }
}

/// An answer, as it is read.
#[derive(Clone, Copy, Debug)]
pub struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    /// Reads `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// How many bytes there are still.
    pub fn left(&self) -> usize {
        self.0.len()
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Garbage> {
        let (now, rest) = self.0.split_first_chunk().ok_or(Garbage)?;
        self.0 = rest;
        Ok(*now)
    }

    /// A number of 32 bits.
    ///
    /// # Errors
    /// There is less.
    pub fn u32(&mut self) -> Result<u32, Garbage> {
        self.array().map(u32::from_be_bytes)
    }

    /// A number of 64 bits.
    ///
    /// # Errors
    /// There is less.
    pub fn u64(&mut self) -> Result<u64, Garbage> {
        self.array().map(u64::from_be_bytes)
    }

    /// A truth.
    ///
    /// # Errors
    /// There is less, or it is neither 0 nor 1.
    pub fn flag(&mut self) -> Result<bool, Garbage> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Garbage),
        }
    }

    /// So many bytes.
    ///
    /// # Errors
    /// There is less.
    pub fn fixed(&mut self, len: usize) -> Result<&'a [u8], Garbage> {
        let whole = len.checked_next_multiple_of(4).ok_or(Garbage)?;
        let (now, rest) = self.0.split_at_checked(whole).ok_or(Garbage)?;
        self.0 = rest;
        Ok(&now[..len])
    }

    /// Eight bytes that mean nothing to us.
    ///
    /// # Errors
    /// There is less.
    pub fn eight(&mut self) -> Result<[u8; 8], Garbage> {
        self.array()
    }

    /// Bytes with their number before them, at most `max`.
    ///
    /// # Errors
    /// There is less than the number says, or it is more than `max`.
    pub fn bytes(&mut self, max: usize) -> Result<&'a [u8], Garbage> {
        let len = usize::try_from(self.u32()?).map_err(|_| Garbage)?;
        if len > max { Err(Garbage) } else { self.fixed(len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut out = Out::default();
        out.u32(7).u64(1 << 40).flag(true).bytes(b"abcde").fixed(b"12345678").bytes(b"");
        let bytes = out.take();
        assert_eq!(bytes.len(), 4 + 8 + 4 + 12 + 8 + 4);
        let mut read = In::new(&bytes);
        assert_eq!((read.u32(), read.u64(), read.flag()), (Ok(7), Ok(1 << 40), Ok(true)));
        assert_eq!((read.bytes(5), read.eight()), (Ok(&b"abcde"[..]), Ok(*b"12345678")));
        assert_eq!((read.bytes(0), read.left()), (Ok(&b""[..]), 0));
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        for bytes in
            [&[0xff; 4][..], &[0, 0, 0, 5, 1, 2, 3, 4, 5], &[0, 0, 0], &[0xff, 0xff, 0xff, 0xfd, 1]]
        {
            assert_eq!(In::new(bytes).bytes(usize::MAX), Err(Garbage), "{bytes:?}");
        }
        assert_eq!(In::new(&[0, 0, 0, 5, 1, 2, 3, 4, 5, 0, 0, 0]).bytes(4), Err(Garbage));
        assert_eq!(In::new(&[0, 0, 0, 2]).flag(), Err(Garbage));
        assert_eq!(In::new(&[0; 7]).eight(), Err(Garbage));
    }
}
