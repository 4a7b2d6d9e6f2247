//! What one snapshot has otherwise than another, in terms of files, for who sends it to another volume (`corbel send`).
//!
//! It is found without reading what both share: pages of the tree by their places, and content by the places of its blocks, since no
//! block that a snapshot has is ever written to. (The items of a file's content say little: a run that got a block longer is another
//! item. So places are compared block by block.)

use base::InodeId;
use base::planted::{Bug, planted};

use super::share::shared_in;
use super::{Fault, Volume, corrupt};
use crate::format::item::{Run, decode_name, kind};
use crate::format::page::Key;
use crate::format::rpc::Difference;
use crate::limits::BLOCK_BYTES;
use crate::tree::Change;

/// Runs of one file that are looked at together.
const RUNS: usize = 128;
/// Parts of content that are told of at a time, and a piece's more: a file may have more for a few items.
const PARTS: usize = 128;
/// Pieces of files, of so many runs, that are compared at a time.
const PIECES: usize = 16;
/// In the kind of a key from which to go on: in the middle of a file's content, at the block that is the item.
const MIDDLE: u8 = 0x80;

/// Differences, and where to go on, unless that was all.
pub type Differences = (Vec<Difference>, Option<Key>);

/// Where blocks of a file lie: as they begin in the file, so many, in which arena and where there; none: nowhere, or nothing was
/// written there.
type Span = (u64, u64, Option<(u32, u64)>);

/// What runs say of blocks `from..to`, without gaps.
fn spans(runs: &[Run], from: u64, to: u64) -> Vec<Span> {
    let (mut all, mut at) = (Vec::new(), from);
    for run in runs.iter().filter(|run| run.end() > from && run.file < to) {
        let run = run.cut(from, to);
        if run.file > at {
            all.push((at, run.file - at, None));
        }
        let place = (!run.unwritten).then_some((run.arena, run.block));
        all.push((run.file, run.len, place));
        at = run.end();
    }
    if at < to {
        all.push((at, to - at, None));
    }
    all
}

/// The parts, as first block and number of blocks, that lie elsewhere. Both cover the same blocks of the file.
fn elsewhere(now: &[Span], then: &[Span]) -> Vec<(u64, u64)> {
    let mut parts: Vec<(u64, u64)> = Vec::new();
    let (mut i, mut j) = (0, 0);
    while let (Some(a), Some(b)) = (now.get(i), then.get(j)) {
        let (from, to) = (a.0.max(b.0), (a.0 + a.1).min(b.0 + b.1));
        let at = |span: &Span| span.2.map(|(arena, block)| (arena, block + (from - span.0)));
        if at(a) != at(b) {
            match parts.last_mut() {
                Some(last) if last.0 + last.1 == from => last.1 += to - from,
                _ => parts.push((from, to - from)),
            }
        }
        i += usize::from(a.0 + a.1 == to);
        j += usize::from(b.0 + b.1 == to);
    }
    parts
}

/// Finds the differences of one piece of the items.
struct Finder<'a> {
    now: &'a Volume,
    then: Option<&'a Volume>,
    found: Vec<Difference>,
    /// A file, and up to which block of it the content was compared.
    compared: (u64, u64),
    /// Parts of content that were found, and pieces of files that were compared.
    parts: usize,
    pieces: usize,
}

impl Finder<'_> {
    /// Where to go on, if this was too much.
    fn item(&mut self, (key, value): Change) -> Result<Option<Key>, Fault> {
        let ino = InodeId(key.ino);
        match key.kind {
            kind::ATTR | kind::TARGET | kind::XATTR => {
                let touched = Difference::Touched { ino };
                let told = self.found.last() == Some(&touched);
                self.found.extend((!told).then_some(touched));
            }
            kind::NAME => {
                let name = |value: &[u8]| {
                    let (ino, kind, name) = decode_name(value).map_err(corrupt(ino))?;
                    Ok::<_, Fault>((ino, kind, name.to_vec()))
                };
                if let Some((ino, _, name)) = self.before(key, name)?.transpose()? {
                    self.found.push(Difference::Unnamed { dir: InodeId(key.ino), ino, name });
                }
                if let Some((ino, kind, name)) = value.as_deref().map(name).transpose()? {
                    self.found.push(Difference::Named { dir: InodeId(key.ino), ino, kind, name });
                }
            }
            kind::EXTENT => {
                let run = |value: &[u8]| Run::decode(key.item, value).map_err(corrupt(ino));
                let before = self.before(key, run)?.transpose()?;
                let now = value.as_deref().map(run).transpose()?;
                let end = now.iter().chain(&before).map(Run::end).max();
                let rest = self.content(ino, key.item, end.unwrap_or(key.item))?;
                return Ok(rest.map(|block| Key::new(key.ino, MIDDLE | kind::EXTENT, block)));
            }
            _ => {}
        }
        Ok(None)
    }

    /// Goes on in the middle of a file's content, as far as what lies there in either state is in one piece; where to go on then.
    fn middle(&mut self, ino: InodeId, block: u64) -> Result<Key, Fault> {
        let mut at = block;
        loop {
            let mut end = at;
            for state in [Some(self.now), self.then].into_iter().flatten() {
                let run = state.runs(ino, at, at.saturating_add(1), 1)?;
                // (One that begins here is an item that is met.)
                let across = run.first().filter(|run| run.file < at || at == block);
                end = across.map_or(end, |run| run.end().max(end));
            }
            if end == at {
                // (Where nothing lies, what follows is an item of its own.)
                return Ok(Key::new(ino.0, kind::EXTENT, at.max(block.saturating_add(1))));
            }
            if let Some(block) = self.content(ino, at, end)? {
                return Ok(Key::new(ino.0, MIDDLE | kind::EXTENT, block));
            }
            at = end;
        }
    }

    fn before<T>(&self, key: Key, show: impl FnOnce(&[u8]) -> T) -> Result<Option<T>, Fault> {
        match self.then {
            Some(then) => then.tree.get_with(key, show),
            None => Ok(None),
        }
    }

    /// Whether others have a block of a file.
    fn is_shared(&self, runs: &[Run], block: u64) -> Result<bool, Fault> {
        let run = runs.iter().find(|run| (run.file..run.end()).contains(&block));
        let Some(run) = run.map(|run| run.cut(block, block + 1)) else { return Ok(false) };
        let found = shared_in(&self.now.tree, run.arena, run.block, run.block + 1)?;
        Ok(found.iter().any(|s| (s.block..s.end()).contains(&run.block)))
    }

    /// Compares the places of the blocks `from..to` that were not compared before; where to go on, if that was too much.
    fn content(&mut self, ino: InodeId, from: u64, to: u64) -> Result<Option<u64>, Fault> {
        let compared = if self.compared.0 == ino.0 { self.compared.1 } else { 0 };
        let mut from = from.max(compared);
        while from < to {
            if self.parts >= PARTS || self.pieces >= PIECES {
                return Ok(Some(from));
            }
            self.pieces += 1;
            let now = self.now.runs(ino, from, to, RUNS)?;
            let then = match self.then {
                Some(then) if !planted(Bug::DifferenceWhole) => then.runs(ino, from, to, RUNS)?,
                _ => Vec::new(),
            };
            // What lies behind the last run of a full piece is looked at next.
            let end = |runs: &[Run]| match runs {
                [.., last] if runs.len() == RUNS => last.end().min(to),
                _ => to,
            };
            let until = end(&now).min(end(&then));
            let parts = elsewhere(&spans(&now, from, until), &spans(&then, from, until));
            for (block, blocks) in parts {
                if planted(Bug::DifferenceShared) && self.is_shared(&now, block)? {
                    continue;
                }
                let (offset, len) = (block * BLOCK_BYTES, blocks * BLOCK_BYTES);
                match self.found.last_mut() {
                    Some(Difference::Content { ino: of, offset: at, len: before })
                        if *of == ino && *at + *before == offset =>
                    {
                        *before += len;
                    }
                    _ => {
                        self.parts += 1;
                        self.found.push(Difference::Content { ino, offset, len });
                    }
                }
            }
            from = until;
        }
        self.compared = (ino.0, to.max(compared));
        Ok(None)
    }
}

impl Volume {
    /// What the snapshot in a slot has otherwise than an earlier one (`None`: than an empty volume), from a key on, and where to go on; in
    /// the order of inodes, until they are so many bytes or so many pages were looked at. Content may be told of twice where a piece ends. None: one of
    /// them is not there any more, or not on media yet.
    pub fn snapshot_difference(
        &mut self,
        before: Option<u16>,
        slot: u16,
        from: Key,
        bounds: (usize, usize),
    ) -> Result<Option<Differences>, Fault> {
        let is_middle = from.kind == MIDDLE | kind::EXTENT;
        let items = if is_middle { Key::new(from.ino, kind::EXTENT, from.item) } else { from };
        // (Both are opened by that.)
        let bounds = if is_middle { (1, 1) } else { bounds };
        let Some((changes, next)) = self.snapshot_changes(before, slot, items, bounds)? else {
            return Ok(None);
        };
        let Some(now) = self.opened(slot) else { return Ok(None) };
        let then = before.and_then(|before| self.opened(before));
        let (found, compared) = (Vec::new(), (0, 0));
        let mut finder = Finder { now, then, found, compared, parts: 0, pieces: 0 };
        if is_middle {
            let next = finder.middle(InodeId(from.ino), from.item)?;
            return Ok(Some((finder.found, Some(next))));
        }
        for change in changes {
            let rest = finder.item(change)?;
            if rest.is_some() {
                return Ok(Some((finder.found, rest)));
            }
        }
        Ok(Some((finder.found, next)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(file: u64, block: u64, len: u64) -> Run {
        Run { file, arena: 0, block, len, unwritten: false }
    }

    #[test]
    fn a_run_that_grew_is_new_only_where_it_grew() {
        let (then, now) = ([run(0, 100, 50)], [run(0, 100, 51)]);
        let parts = elsewhere(&spans(&now, 0, 51), &spans(&then, 0, 51));
        assert_eq!(parts, [(50, 1)]);
        // Split, with a hole, and with the rest moved.
        let now = [run(0, 100, 10), run(20, 120, 10), run(30, 500, 20)];
        let parts = elsewhere(&spans(&now, 0, 50), &spans(&then, 0, 50));
        assert_eq!(parts, [(10, 10), (30, 20)]);
        assert_eq!(elsewhere(&spans(&then, 5, 50), &spans(&then, 5, 50)), []);
        // What nothing was written to reads as a hole does.
        let unwritten = [Run { unwritten: true, ..run(0, 900, 50) }];
        assert_eq!(elsewhere(&spans(&unwritten, 0, 50), &spans(&[], 0, 50)), []);
        assert_eq!(elsewhere(&spans(&unwritten, 0, 50), &spans(&then, 0, 50)), [(0, 50)]);
    }
}
