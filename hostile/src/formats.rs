//! Every format of bytes that comes from outside, in one table: real samples of it, its reader, and
//! where its checksum and version lie. Property tests go through all of it (tests/formats.rs), and
//! so do the fuzz targets `media`, `memory` and `wire`.

mod media;
mod memory;
mod wire;

use base::crc32c;
use base::wire::Corrupt;

pub use media::{INCARNATION, MEDIA};
pub use memory::MEMORY;
pub use wire::WIRE;

/// Where a checksum lies, and what it covers.
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    /// Its offset.
    pub at: usize,
    /// First byte that it covers.
    pub from: usize,
    /// One past the last; None: to the end.
    pub to: Option<usize>,
}

/// Where a version lies: offset and bytes.
pub type Version = (usize, usize);

/// One format.
#[derive(Debug)]
pub struct Format {
    /// In words.
    pub name: &'static str,
    /// Real ones.
    pub samples: fn() -> Vec<Vec<u8>>,
    /// Reads, and writes again what was understood.
    pub read: fn(&[u8]) -> Result<Vec<u8>, String>,
    /// Its checksum, if it has one.
    pub sum: Option<Sum>,
    /// Its version, if it has one of its own.
    pub version: Option<Version>,
    /// The reader takes what it needs from the front, and leaves the rest.
    pub prefix: bool,
    /// Two inputs can mean the same (text with replaced characters).
    pub lossy: bool,
}

impl Format {
    /// What most formats are.
    const fn new(
        name: &'static str,
        samples: fn() -> Vec<Vec<u8>>,
        read: fn(&[u8]) -> Result<Vec<u8>, String>,
    ) -> Self {
        Self { name, samples, read, sum: None, version: None, prefix: false, lossy: false }
    }

    const fn sum(self, at: usize, from: usize) -> Self {
        Self { sum: Some(Sum { at, from, to: None }), ..self }
    }

    const fn version(self, at: usize, bytes: usize) -> Self {
        Self { version: Some((at, bytes)), ..self }
    }

    const fn prefix(self) -> Self {
        Self { prefix: true, ..self }
    }

    /// Makes the checksum right, as somebody can who knows the format.
    pub fn seal(&self, bytes: &mut [u8]) {
        let Some(Sum { at, from, to }) = self.sum else { return };
        let to = to.unwrap_or(bytes.len());
        if from <= to && to <= bytes.len() && at + 4 <= bytes.len() {
            let crc = crc32c(0, &bytes[from..to]);
            bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
        }
    }

    /// Reads, and checks what holds of every reader: no panic, and what is accepted has one meaning,
    /// that of what is written again.
    pub fn judge(&self, bytes: &[u8]) -> Result<Vec<u8>, String> {
        let again = (self.read)(bytes)?;
        if self.lossy {
            assert_eq!((self.read)(&again).as_ref(), Ok(&again), "{}: {bytes:?}", self.name);
        } else if self.prefix {
            same(self.name, &bytes[..again.len().min(bytes.len())], &again);
        } else {
            same(self.name, bytes, &again);
        }
        Ok(again)
    }
}

/// Says where two encodings differ, which ought not to.
fn same(name: &str, bytes: &[u8], again: &[u8]) {
    if bytes != again {
        let at = bytes.iter().zip(again).position(|(a, b)| a != b);
        panic!("{name}: not the same from byte {at:?} on: {bytes:x?} means {again:x?}");
    }
}

/// An error in words; it must have some.
fn words(corrupt: Corrupt) -> String {
    let text = corrupt.to_string();
    assert!(text.len() > 10, "{text:?} says nothing");
    text
}

/// The body of a target over one group: the first byte chooses the format, the second whether the
/// checksum is made right.
pub fn run(group: &[Format], bytes: &[u8]) {
    let Some((&[which, how], rest)) = bytes.split_first_chunk::<2>() else { return };
    let format = &group[usize::from(which) % group.len()];
    let mut bytes = rest.to_vec();
    if how & 1 == 0 {
        format.seal(&mut bytes);
    }
    let _ = format.judge(&bytes);
}

/// Input of [`run`] for each sample of a group.
pub fn seeds(group: &[Format]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for (which, format) in (0u8..).zip(group) {
        let samples = (format.samples)();
        all.extend(samples.into_iter().map(|s| [&[which, 0], &s[..]].concat()));
    }
    all
}
