//! Content is compared with its checksums where it is read.

use base::InodeId;

use super::copies::{read_block, read_sum};
use super::{Fault, Volume, corrupt};
use crate::format::item::{Run, kind};
use crate::format::page::Key;
use crate::format::sum::{SUM_BYTES, Sum, sum_at};
use crate::limits::BLOCK_BYTES;
use crate::media::Segment;

/// A block of a file, and where it lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// File.
    pub ino: InodeId,
    /// Block of the file.
    pub file: u64,
    /// Arena.
    pub arena: u32,
    /// Block of the arena.
    pub block: u64,
}

/// A run of a file with content, if there is one; and where to look next: file and block.
pub type Content = (Option<(InodeId, Run)>, Option<(InodeId, u64)>);

/// Runs of files of snapshots, and where to look next: which snapshot, and the place among the pages that hang on it.
pub type Past = (Vec<(InodeId, Run)>, Option<(u64, usize)>);

impl Volume {
    /// As [`Volume::read_file`], and says which of the blocks are not what their checksums say.
    pub fn read_checked(
        &self,
        ino: InodeId,
        offset: u64,
        buf: &mut [u8],
        wrong: &mut Vec<Place>,
    ) -> Result<usize, Fault> {
        let (from, end) = (offset / BLOCK_BYTES, offset.saturating_add(buf.len() as u64));
        let to = end.div_ceil(BLOCK_BYTES);
        if self.sums_base().is_some() {
            for run in self.runs(ino, from, to, usize::MAX)? {
                self.compare(ino, &run.cut(from, to), wrong)?;
            }
        }
        self.read_file(ino, offset, buf)
    }

    /// Compares the blocks of a run with their checksums.
    pub fn compare(&self, ino: InodeId, run: &Run, wrong: &mut Vec<Place>) -> Result<(), Fault> {
        let Some(base) = self.sums_base().filter(|_| !run.unwritten) else { return Ok(()) };
        let segment = Segment::Arena(run.arena);
        let (mut bytes, mut entries) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < run.len {
            let blocks = (run.len - at).min(64);
            let first = run.block + at;
            let (len, sums) = ((blocks * BLOCK_BYTES) as usize, (blocks * SUM_BYTES) as usize);
            bytes.clear();
            entries.clear();
            self.media.append(segment, first * BLOCK_BYTES, len, &mut bytes)?;
            self.media.append(segment, sum_at(base, first), sums, &mut entries)?;
            let (entries, _) = entries.as_chunks::<{ SUM_BYTES as usize }>();
            for (n, (bytes, entry)) in
                (0..).zip(bytes.chunks_exact(BLOCK_BYTES as usize).zip(entries))
            {
                let sum = Sum::decode(*entry);
                if !sum.is_known() || !sum.is_of(bytes) {
                    let (file, block) = (run.file + at + n, first + n);
                    wrong.push(Place { ino, file, arena: run.arena, block });
                }
            }
            at += blocks;
        }
        Ok(())
    }

    /// Where the content of a block of a file lies, if it has any; the file may be one of a snapshot.
    pub fn place_of(&mut self, ino: InodeId, file: u64) -> Result<Option<Place>, Fault> {
        if let Some((slot, within)) = ino.of_snapshot() {
            let place = match self.read_snapshot(slot) {
                Some(state) => state.place_in(within, file)?,
                None => None,
            };
            return Ok(place.map(|place| Place { ino, ..place }));
        }
        self.place_in(ino, file)
    }

    fn place_in(&self, ino: InodeId, file: u64) -> Result<Option<Place>, Fault> {
        let end = file.saturating_add(1);
        let run = self.runs(ino, file, end, 1)?.into_iter().find(|run| !run.unwritten);
        Ok(run.map(|run| {
            let run = run.cut(file, end);
            Place { ino, file, arena: run.arena, block: run.block }
        }))
    }

    /// The bytes of a block, and its checksum.
    pub fn block_at(&self, place: &Place) -> Result<(Vec<u8>, Sum), Fault> {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        let (segment, base) = (Segment::Arena(place.arena), self.sums_base().unwrap_or(0));
        if self.sums_base().is_none() {
            self.media.read(segment, place.block * BLOCK_BYTES, &mut bytes)?;
            return Ok((bytes, Sum::default()));
        }
        let wrong = read_block(&*self.media, base, segment, place.block, &mut bytes)?;
        let sum = wrong.map_or_else(|| read_sum(&*self.media, base, segment, place.block), Ok)?;
        Ok((bytes, sum))
    }

    /// Writes what a block should hold over what it holds. Whether it is there, reading it again shows.
    pub fn mend(&self, place: &Place, bytes: &[u8], sum: Sum) -> Result<(), Fault> {
        let Some(base) = self.sums_base() else { return Ok(()) };
        let (segment, at) = (Segment::Arena(place.arena), place.block * BLOCK_BYTES);
        let entry = sum_at(base, place.block);
        self.media.write(segment, at, bytes)?;
        self.media.persist(segment, at, bytes.len() as u64)?;
        self.media.write(segment, entry, &sum.encode())?;
        self.media.persist(segment, entry, SUM_BYTES)?;
        Ok(self.media.fence()?)
    }

    /// The first run with content at block `file` of a file or after it, cut to what lies behind, or of a file with a higher number; with
    /// `None` where to go on if there was none among some items, or at the end.
    pub fn content_after(&self, ino: InodeId, file: u64, items: usize) -> Result<Content, Fault> {
        let first = self.runs(ino, file, u64::MAX, 1)?;
        if let Some(run) = first.first() {
            let rest = run.cut(file, run.end());
            let next = Some((ino, run.end()));
            return Ok((Some((ino, rest)).filter(|_| !run.unwritten), next));
        }
        let from = Key::new(ino.0, kind::EXTENT + 1, 0);
        let (mut left, mut found, mut last) = (items, None, ino);
        self.tree.scan(from, Key::new(u64::MAX, u8::MAX, u64::MAX), &mut |key, _| {
            (left, last) = (left.saturating_sub(1), InodeId(key.ino));
            found = (key.kind == kind::EXTENT).then_some((last, key.item));
            found.is_none() && left > 0
        })?;
        // Of the inode looked at last the names are passed over next time: there may be many.
        let beyond = if last == ino { InodeId(ino.0.saturating_add(1)) } else { last };
        Ok((None, found.or((left == 0).then_some((beyond, 0)))))
    }

    /// Content that only snapshots have, of one page of those from that place on: runs of their files, and where to go on. What a newer
    /// state has as well is left out as far as a look at the same place of the same file now says so.
    pub fn past_content(&self, at: (u64, usize)) -> Result<Past, Fault> {
        let Some((transaction, at, number)) = self.tree.kept_page(at) else {
            return Ok((Vec::new(), None));
        };
        let next = Some((transaction, at + 1));
        let Some(slot) = self.slot_of(transaction) else { return Ok((Vec::new(), next)) };
        let page = match self.tree.read_kept(number) {
            Ok(page) if page.level() == 0 => page,
            // (A page that is rotten was found before.)
            Ok(_) | Err(Fault::Page { .. }) => return Ok((Vec::new(), next)),
            Err(other) => return Err(other),
        };
        let mut found = Vec::new();
        for i in (0..page.count()).filter(|i| page.key(*i).kind == kind::EXTENT) {
            let (ino, item) = (InodeId(page.key(i).ino), page.key(i).item);
            let run = Run::decode(item, page.value(i)).map_err(corrupt(ino))?;
            if run.unwritten {
                continue;
            }
            let mut from = run.file;
            for now in self.runs(ino, run.file, run.end(), usize::MAX)? {
                let same = now.arena == run.arena
                    && now.block.wrapping_sub(now.file) == run.block.wrapping_sub(run.file);
                let part = now.cut(run.file, run.end());
                if same && from < part.file {
                    found.push((ino.in_snapshot(slot), run.cut(from, part.file)));
                }
                from = if same { part.end() } else { from };
            }
            if from < run.end() {
                found.push((ino.in_snapshot(slot), run.cut(from, run.end())));
            }
        }
        Ok((found, next))
    }

    /// Numbers that tree pages may have.
    pub fn page_numbers(&self) -> u64 {
        self.tree.numbers()
    }
}
