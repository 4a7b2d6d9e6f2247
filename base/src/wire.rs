//! Bounds-checked packing and unpacking of little-endian fields: what media formats and messages
//! share.

use alloc::vec::Vec;

/// Bytes that do not follow their format: which structure, and what is wrong with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Corrupt {
    /// The structure.
    pub structure: &'static str,
    /// What is wrong.
    pub what: &'static str,
}

impl Corrupt {
    /// Names a defect.
    pub const fn new(structure: &'static str, what: &'static str) -> Self {
        Self { structure, what }
    }
}

impl core::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}: {}", self.structure, self.what)
    }
}

impl core::error::Error for Corrupt {}

/// Reads fields off the front of a slice; running off its end is an error, never a panic.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    structure: &'static str,
    bytes: &'a [u8],
}

macro_rules! take_int {
    ($($name:ident -> $int:ty),*) => {$(
        /// The next integer.
        pub fn $name(&mut self) -> Result<$int, Corrupt> {
            let bytes = self.bytes(core::mem::size_of::<$int>())?;
            let mut array = [0u8; core::mem::size_of::<$int>()];
            array.copy_from_slice(bytes);
            Ok(<$int>::from_le_bytes(array))
        }
    )*};
}

impl<'a> Reader<'a> {
    /// A reader of `bytes`, which claim to be a `structure`.
    pub const fn new(structure: &'static str, bytes: &'a [u8]) -> Self {
        Self { structure, bytes }
    }

    take_int!(u8 -> u8, u16 -> u16, u32 -> u32, u64 -> u64, u128 -> u128, i64 -> i64);

    /// The next byte as yes or no: nothing but 1 and 0.
    pub fn flag(&mut self) -> Result<bool, Corrupt> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.corrupt("has a flag that is neither 0 nor 1")),
        }
    }

    /// The next `len` bytes, all of which must be zero.
    pub fn zeroes(&mut self, len: usize) -> Result<(), Corrupt> {
        if self.bytes(len)?.iter().any(|b| *b != 0) {
            return Err(self.corrupt("has bytes set that must be zero"));
        }
        Ok(())
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Corrupt> {
        if len > self.bytes.len() {
            return Err(Corrupt::new(self.structure, "is cut short"));
        }
        let (taken, rest) = self.bytes.split_at(len);
        self.bytes = rest;
        Ok(taken)
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        core::mem::take(&mut self.bytes)
    }

    /// Bytes left.
    pub const fn left(&self) -> usize {
        self.bytes.len()
    }

    /// Checks that nothing is left.
    pub const fn end(&self) -> Result<(), Corrupt> {
        if self.bytes.is_empty() {
            Ok(())
        } else {
            Err(Corrupt::new(self.structure, "has bytes after its end"))
        }
    }

    /// A defect of this structure.
    pub const fn corrupt(&self, what: &'static str) -> Corrupt {
        Corrupt::new(self.structure, what)
    }
}

/// Appends little-endian fields to a vector.
#[derive(Debug)]
pub struct Writer<'a>(pub &'a mut Vec<u8>);

macro_rules! put_int {
    ($($name:ident($int:ty)),*) => {$(
        /// Appends an integer.
        pub fn $name(&mut self, value: $int) -> &mut Self {
            self.0.extend_from_slice(&value.to_le_bytes());
            self
        }
    )*};
}

impl Writer<'_> {
    put_int!(u8(u8), u16(u16), u32(u32), u64(u64), u128(u128), i64(i64));

    /// Appends bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
}
