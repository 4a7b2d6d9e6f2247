//! ELF files, as far as the search for system calls needs them.

use std::fs;
use std::path::Path;

use crate::failure::{Context as _, Failure, Kind, Result};
use crate::format;

/// Libraries larger than this are not looked at.
const LIBRARY_MAX: u64 = 64 << 20;
/// Segments and sections of a file at most.
const PARTS_MAX: usize = 512;
/// A segment that is loaded, and one that may be executed.
const LOAD: u32 = 1;
const EXECUTE: u32 = 1;

/// An ELF file.
#[derive(Debug)]
pub struct Elf {
    /// All of it.
    pub bytes: Vec<u8>,
    /// (type, flags, offset, address, size) of each program header.
    pub segments: Vec<(u32, u32, u64, u64, u64)>,
    /// (type, flags, address, offset, size) of each section.
    sections: Vec<(u32, u64, u64, u64, u64)>,
}

/// A little-endian number of `N` bytes.
pub fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let field: [u8; N] = bytes.get(at..at.checked_add(N)?)?.try_into().ok()?;
    Some(field.iter().rev().fold(0, |all, b| all << 8 | u64::from(*b)))
}

pub fn refuse(path: &Path, what: &str) -> Failure {
    Failure::new(
        Kind::Environment,
        format!("{}: {what}", path.display()),
        "run the program without the fast path: corbel run --mode fuse",
    )
}

impl Elf {
    pub fn read(path: &Path) -> Result<Self> {
        let size = fs::metadata(path).context(path.display())?.len();
        if size > LIBRARY_MAX {
            return Err(refuse(path, "is larger than 64 MiB"));
        }
        let bytes = fs::read(path).context(path.display())?;
        Self::parse(bytes).ok_or_else(|| refuse(path, "is not a 64-bit x86 ELF file"))
    }

    pub fn parse(bytes: Vec<u8>) -> Option<Self> {
        if !bytes.starts_with(b"\x7fELF\x02\x01") || number::<2>(&bytes, 18)? != 62 {
            return None;
        }
        let field = |at: usize| number::<8>(&bytes, at);
        let (phoff, phnum) = (field(32)? as usize, number::<2>(&bytes, 56)? as usize);
        let (shoff, shnum) = (field(40)? as usize, number::<2>(&bytes, 60)? as usize);
        if phnum > PARTS_MAX || shnum > PARTS_MAX {
            return None;
        }
        let table = |at: usize, rows: usize, row: usize| {
            let end = at.checked_add(rows * row)?;
            Some(bytes.get(at..end)?.chunks_exact(row))
        };
        let mut segments = Vec::new();
        for row in table(phoff, phnum, 56)? {
            let field = |at: usize| number::<8>(row, at);
            let (kind, flags) = (number::<4>(row, 0)?, number::<4>(row, 4)?);
            segments.push((kind as u32, flags as u32, field(8)?, field(16)?, field(32)?));
        }
        let mut sections = Vec::new();
        for row in table(shoff, shnum, 64)? {
            let field = |at: usize| number::<8>(row, at);
            let kind = number::<4>(row, 4)? as u32;
            sections.push((kind, field(8)?, field(16)?, field(24)?, field(32)?));
        }
        Some(Self { bytes, segments, sections })
    }

    pub fn part(&self, offset: u64, size: u64) -> Option<&[u8]> {
        let from = usize::try_from(offset).ok()?;
        self.bytes.get(from..from.checked_add(usize::try_from(size).ok()?)?)
    }

    /// Bytes from an address on, up to the end of its segment.
    pub fn at_address(&self, address: u64) -> Option<&[u8]> {
        self.segments.iter().filter(|s| s.0 == LOAD).find_map(|&(_, _, offset, base, size)| {
            let skip = address.checked_sub(base).filter(|s| *s < size)?;
            self.part(offset.checked_add(skip)?, size - skip)
        })
    }

    /// Pages of the executable segment as they are mapped, from one address to another.
    pub fn pages(&self, low: usize, high: usize) -> Option<Vec<u8>> {
        let page = format::PAGE as u64;
        let holds = |&&(kind, flags, _, base, size): &&(u32, u32, u64, u64, u64)| {
            let end = base.saturating_add(size).checked_next_multiple_of(page).unwrap_or(0);
            kind == 1 && flags & 1 != 0 && base / page * page <= low as u64 && high as u64 <= end
        };
        let &(_, _, offset, base, _) = self.segments.iter().find(holds)?;
        let from = usize::try_from(offset.checked_add(low as u64)?.checked_sub(base)?).ok()?;
        let file = self.bytes.get(from..)?;
        let mut pages = vec![0; high.checked_sub(low)?];
        let len = file.len().min(pages.len());
        pages[..len].copy_from_slice(&file[..len]);
        Some(pages)
    }

    /// Executable sections: address and bytes.
    pub fn code(&self) -> impl Iterator<Item = (u64, &[u8])> {
        // SHT_PROGBITS with SHF_EXECINSTR
        self.sections
            .iter()
            .filter(|s| s.0 == 1 && s.1 & 4 != 0)
            .filter_map(|&(_, _, address, offset, size)| Some((address, self.part(offset, size)?)))
    }

    pub fn in_code(&self, address: u64) -> bool {
        self.code().any(|(base, bytes)| address >= base && address - base < bytes.len() as u64)
    }

    pub fn build_id(&self) -> Option<Vec<u8>> {
        for &(kind, _, offset, _, size) in &self.segments {
            if kind != 4 {
                continue;
            }
            let notes = self.part(offset, size)?;
            let mut at = 0usize;
            while let (Some(name), Some(len), Some(kind)) =
                (number::<4>(notes, at), number::<4>(notes, at + 4), number::<4>(notes, at + 8))
            {
                let body = at.checked_add(12)?.checked_add((name as usize + 3) & !3)?;
                let end = body.checked_add(len as usize)?;
                if kind == 3 && notes.get(at + 12..at + 16) == Some(b"GNU\0") {
                    return notes.get(body..end).map(<[u8]>::to_vec);
                }
                at = (end + 3) & !3;
            }
        }
        None
    }

    /// Segments that are loaded: whether for execution, address and bytes in the file.
    pub fn loaded(&self) -> impl Iterator<Item = (bool, u64, &[u8])> {
        let loaded = self.segments.iter().filter(|s| s.0 == LOAD);
        loaded.filter_map(|&(_, flags, offset, address, size)| {
            Some((flags & EXECUTE != 0, address, self.part(offset, size)?))
        })
    }

    /// Where in the file a loaded address is.
    pub fn offset_of(&self, address: u64) -> Option<u64> {
        self.segments.iter().filter(|s| s.0 == LOAD).find_map(|&(_, _, offset, base, size)| {
            let skip = address.checked_sub(base).filter(|skip| *skip < size)?;
            offset.checked_add(skip)
        })
    }

    /// Values of all symbols.
    pub fn symbols(&self) -> Vec<u64> {
        let tables = self.sections.iter().filter(|s| s.0 == 11 || s.0 == 2);
        let tables = tables.filter_map(|s| self.part(s.3, s.4));
        tables.flat_map(|t| t.chunks_exact(24).filter_map(|s| number::<8>(s, 8))).collect()
    }
}
