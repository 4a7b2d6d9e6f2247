//! Input read as a script: numbers and pieces off the front. Past the end all is zero, so that any
//! bytes are a script, and a prefix of a script is one that does less.

/// What is left of the script.
#[derive(Clone, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// The whole script.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether it is at its end.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `len` bytes, or what is left.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn number(&mut self, bytes: usize) -> u64 {
        self.take(bytes).iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
    }

    /// A byte.
    pub fn u8(&mut self) -> u8 {
        self.number(1) as u8
    }

    /// Two.
    pub fn u16(&mut self) -> u16 {
        self.number(2) as u16
    }

    /// Four.
    pub fn u32(&mut self) -> u32 {
        self.number(4) as u32
    }

    /// A choice among `n`.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.u8()) % n
    }

    /// A bit.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 == 1
    }

    /// A number that code may stumble over, in as few bytes as can be.
    pub fn odd(&mut self) -> u64 {
        let choice = self.u8();
        let n = u64::from(choice >> 3);
        match choice % 8 {
            0 => n,
            1 => u64::MAX - n,
            2 => 1 << (2 * n),
            3 => (1 << (2 * n)) - 1,
            4 => self.number(2),
            5 => self.number(4),
            6 => self.number(8),
            _ => n * 4096,
        }
    }

    /// A piece with its length in front (one byte), up to 255 bytes.
    pub fn piece(&mut self) -> &'a [u8] {
        let len = self.u8();
        self.take(len.into())
    }
}
