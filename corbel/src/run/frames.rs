//! Where a program's functions begin and end, from the tables for unwinding (`.eh_frame`).
//!
//! A function decodes from its first byte to its last; what lies between functions may be anything. So a
//! `syscall` found in one of these is an instruction, and not two bytes of a table of constants.

use crate::elf::{Elf, number};

/// Segment with the address of the tables.
const EH_FRAME_HEADER: u32 = 0x6474_e550;
/// Functions of one file at most, and landing pads of one function.
const FRAMES_MAX: usize = 4 << 20;
const PADS_MAX: usize = 4096;

/// A function, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// First byte.
    pub from: u64,
    /// One behind the last.
    pub to: u64,
    /// Where the table of its exceptions is, or 0.
    pub exceptions: u64,
    /// The way back from a signal handler: the frame begins a byte before the code.
    pub signal: bool,
}

/// Bytes with an address, read one after the other.
struct Cursor<'a> {
    bytes: &'a [u8],
    address: u64,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(elf: &'a Elf, address: u64) -> Option<Self> {
        Some(Self { bytes: elf.at_address(address)?, address, at: 0 })
    }

    fn fixed<const N: usize>(&mut self) -> Option<u64> {
        let value = number::<N>(self.bytes, self.at)?;
        self.at += N;
        Some(value)
    }

    fn skip(&mut self, by: u64) -> Option<()> {
        self.at = self.at.checked_add(usize::try_from(by).ok()?)?;
        (self.at <= self.bytes.len()).then_some(())
    }

    fn leb(&mut self) -> Option<u64> {
        let (mut value, mut shift) = (0u64, 0);
        loop {
            let byte = self.fixed::<1>()?;
            if shift < 64 {
                value |= (byte & 0x7f) << shift;
            }
            shift += 7;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
    }

    /// A number in one of the forms that pointers have; `here`: it counts from its own place.
    fn pointer(&mut self, encoding: u8) -> Option<u64> {
        let here = self.address.wrapping_add(self.at as u64);
        let value = match encoding & 0xf {
            0 | 4 | 0xc => self.fixed::<8>()?,
            1 => self.leb()?,
            2 => self.fixed::<2>()?,
            3 => self.fixed::<4>()?,
            0xa => self.fixed::<2>()? as u16 as i16 as u64,
            0xb => self.fixed::<4>()? as u32 as i32 as u64,
            _ => return None,
        };
        match encoding & 0x70 {
            0 => Some(value),
            0x10 if value != 0 => Some(value.wrapping_add(here)),
            0x10 => Some(0),
            _ => None,
        }
    }
}

/// What functions have in common: the forms of their pointers.
#[derive(Clone, Copy, Debug, Default)]
struct Common {
    address: u8,
    exceptions: Option<u8>,
    augmented: bool,
    signal: bool,
}

/// Reads what begins at `at` behind its length and the zero.
fn common(mut c: Cursor<'_>) -> Option<Common> {
    let version = c.fixed::<1>()?;
    let end = c.bytes.get(c.at..)?.iter().position(|b| *b == 0)?;
    let words = &c.bytes[c.at..c.at + end];
    c.skip(end as u64 + 1)?;
    c.leb()?;
    c.leb()?;
    if version == 1 {
        c.fixed::<1>()?;
    } else {
        c.leb()?;
    }
    let mut found = Common::default();
    let Some((b'z', words)) = words.split_first() else { return Some(found) };
    found.augmented = true;
    c.leb()?;
    for word in words {
        match word {
            b'R' => found.address = c.fixed::<1>()? as u8,
            b'L' => found.exceptions = Some(c.fixed::<1>()? as u8),
            b'P' => {
                let encoding = c.fixed::<1>()? as u8;
                c.pointer(encoding & 0x7f)?;
            }
            b'S' => found.signal = true,
            b'B' => {}
            _ => return None,
        }
    }
    Some(found)
}

/// All functions, by address; none where the file has no such tables.
pub fn frames(elf: &Elf) -> Vec<Frame> {
    let mut all = listed(elf).unwrap_or_default();
    all.sort_unstable_by_key(|f| (f.from, f.to));
    all.dedup();
    all
}

fn listed(elf: &Elf) -> Option<Vec<Frame>> {
    let header = elf.segments.iter().find(|s| s.0 == EH_FRAME_HEADER)?.3;
    let mut c = Cursor::new(elf, header)?;
    if c.fixed::<1>()? != 1 {
        return None;
    }
    let encoding = c.fixed::<1>()? as u8;
    c.skip(2)?;
    let tables = c.pointer(encoding)?;
    let bytes = elf.at_address(tables)?;
    let mut all = Vec::new();
    let mut known: Option<(usize, Common)> = None;
    let mut at = 0;
    // A length of zero ends the list; one of all ones begins a form that no linker writes.
    while let Some(len) = number::<4>(bytes, at).filter(|len| (4..0xffff_fff0).contains(len)) {
        let body = at + 4;
        let next = body.checked_add(usize::try_from(len).ok()?)?;
        let bytes = bytes.get(..next)?;
        at = next;
        let back = number::<4>(bytes, body)? as usize;
        if back == 0 {
            continue;
        }
        let parent = body.checked_sub(back)?;
        if known.is_none_or(|(at, _)| at != parent) {
            let inside = Cursor { bytes, address: tables, at: parent + 8 };
            let Some(found) = common(inside) else { continue };
            known = Some((parent, found));
        }
        let Some((_, form)) = known else { continue };
        let c = Cursor { bytes, address: tables, at: body + 4 };
        if let Some(frame) = frame(c, form) {
            all.push(frame);
        }
        if all.len() >= FRAMES_MAX {
            return None;
        }
    }
    Some(all)
}

fn frame(mut c: Cursor<'_>, form: Common) -> Option<Frame> {
    let from = c.pointer(form.address)?;
    let to = from.checked_add(c.pointer(form.address & 0xf)?)?;
    let mut exceptions = 0;
    if form.augmented {
        c.leb()?;
        if let Some(encoding) = form.exceptions {
            exceptions = c.pointer(encoding)?;
        }
    }
    (from < to).then_some(Frame { from, to, exceptions, signal: form.signal })
}

/// Where exceptions lead within a function: places that no branch shows. None: they cannot be read.
pub fn landing_pads(elf: &Elf, frame: &Frame) -> Option<Vec<u64>> {
    if frame.exceptions == 0 {
        return Some(Vec::new());
    }
    let mut c = Cursor::new(elf, frame.exceptions)?;
    let base = match c.fixed::<1>()? as u8 {
        0xff => frame.from,
        encoding => c.pointer(encoding)?,
    };
    if c.fixed::<1>()? != 0xff {
        c.leb()?;
    }
    let encoding = c.fixed::<1>()? as u8;
    let len = c.leb()?;
    let end = c.at.checked_add(usize::try_from(len).ok()?)?;
    let mut pads = Vec::new();
    while c.at < end {
        c.pointer(encoding)?;
        c.pointer(encoding)?;
        let pad = c.pointer(encoding)?;
        c.leb()?;
        if pad != 0 {
            pads.push(base.wrapping_add(pad));
        }
        if pads.len() > PADS_MAX {
            return None;
        }
    }
    Some(pads)
}
