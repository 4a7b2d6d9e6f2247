//! Taking a request apart. Every length is checked against what is there; what does not fit is
//! EINVAL before anything is done.

use std::io::IoSlice;

use base::Errno;
use client::fs::Result;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::wire::InHeader;

/// Longest file name.
pub const NAME_MAX: usize = 255;
/// Longest symbolic link target.
const TARGET_MAX: usize = 4095;

/// A request whose frame is right: its stated length is its length.
#[derive(Debug)]
pub struct Request<'a> {
    /// The header.
    pub header: &'a InHeader,
    /// What follows it, without extensions.
    pub body: &'a [u8],
    /// The data of a WRITE that are not in `body`, but after it.
    pub data: &'a [IoSlice<'a>],
}

impl<'a> Request<'a> {
    /// Checks the frame. The header comes back in both cases if there is one, for the reply.
    pub fn parse(bytes: &'a [u8], data: &'a [IoSlice<'a>]) -> (Option<&'a InHeader>, Result<Self>) {
        let Ok((header, rest)) = InHeader::ref_from_prefix(bytes) else {
            return (None, Err(Errno::IO));
        };
        let extensions = usize::from(header.total_extlen.get()) * 8;
        let after: usize = data.iter().map(|piece| piece.len()).sum();
        // Extensions stand at the end of all.
        let whole = header.len.get() as usize == bytes.len() + after
            && extensions <= rest.len()
            && (after == 0 || extensions == 0);
        let request = if whole {
            Ok(Self { header, body: &rest[..rest.len() - extensions], data })
        } else {
            Err(Errno::IO)
        };
        (Some(header), request)
    }
}

/// The arguments of a request, taken from the front.
#[derive(Debug)]
pub struct Args<'a>(&'a [u8]);

impl<'a> Args<'a> {
    /// The arguments in `body`.
    pub fn new(body: &'a [u8]) -> Self {
        Self(body)
    }

    /// The next structure.
    pub fn take<T>(&mut self) -> Result<&'a T>
    where
        T: FromBytes + Immutable + KnownLayout + Unaligned,
    {
        let (value, rest) = T::ref_from_prefix(self.0).map_err(|_| Errno::INVAL)?;
        self.0 = rest;
        Ok(value)
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// A string up to its NUL, which must be there.
    fn string(&mut self) -> Result<&'a [u8]> {
        let end = self.0.iter().position(|&b| b == 0).ok_or(Errno::INVAL)?;
        let string = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Ok(string)
    }

    /// A file name: 1 to 255 bytes, no slash. May be `.` or `..`, which only LOOKUP allows.
    pub fn any_name(&mut self) -> Result<&'a [u8]> {
        let name = self.string()?;
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        if name.is_empty() || name.contains(&b'/') {
            return Err(Errno::INVAL);
        }
        Ok(name)
    }

    /// A file name that is not `.` or `..`.
    pub fn name(&mut self) -> Result<&'a [u8]> {
        let name = self.any_name()?;
        if name == b"." || name == b".." { Err(Errno::INVAL) } else { Ok(name) }
    }

    /// A string in the place of a name that is not to be used, whatever it says.
    pub fn no_name(&mut self) -> Result<()> {
        if self.string()?.len() > NAME_MAX { Err(Errno::NAMETOOLONG) } else { Ok(()) }
    }

    /// Target of a symbolic link.
    pub fn target(&mut self) -> Result<&'a [u8]> {
        let target = self.string()?;
        match target.len() {
            0 => Err(Errno::NOENT),
            1..=TARGET_MAX => Ok(target),
            _ => Err(Errno::NAMETOOLONG),
        }
    }

    /// Name of an extended attribute: 1 to 255 bytes.
    pub fn xattr_name(&mut self) -> Result<&'a [u8]> {
        let name = self.string()?;
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(Errno::RANGE);
        }
        Ok(name)
    }

    /// Everything must have been taken.
    pub fn end(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(Errno::INVAL) }
    }
}
