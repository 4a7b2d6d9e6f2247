//! Where the bytes of a file are: an interval index over the own log (newest wins) above the
//! public extents. Pure logic; who copies is in `data`.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use base::Sequence;
use base::planted::{Bug, planted};
use storage::format::rpc::Extent;
use storage::limits::BLOCK_BYTES;

use super::log::Place;
use crate::fs::Whence;

/// A run of bytes in the own log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Length in bytes.
    pub len: u64,
    /// Where its first byte lies.
    pub place: Place,
}

impl Piece {
    fn skip(self, bytes: u64) -> Self {
        let place = Place { position: self.place.position + bytes, ..self.place };
        Self { len: self.len - bytes, place }
    }
}

/// What the next bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the own log.
    Log(Piece),
    /// In an arena.
    Arena {
        /// Arena.
        arena: u32,
        /// Byte offset in it.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Zeroes.
    Hole(u64),
    /// Beyond what the extent list covers: ask the service.
    Unknown,
}

/// Where [`Pieces::seek`] has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// There.
    At(u64),
    /// Nowhere: no data follows.
    None,
    /// Beyond what the extent list covers, from that offset on: ask the service.
    Unknown(u64),
}

/// The map of a file's bytes.
#[derive(Debug, Default)]
pub struct Pieces {
    /// By file offset; never overlapping.
    log: BTreeMap<u64, Piece>,
    /// Public extents by offset; never overlapping.
    extents: Vec<Extent>,
    /// The extent list is known from this offset on...
    known_from: u64,
    /// ... and for offsets below this.
    known_to: u64,
    /// Some of them are of blocks that others share.
    shared: bool,
    /// The extents reflect the own operations up to here.
    pub as_of: Sequence,
    /// Grows when bytes are where they are for another reason than that they were written: a piece of the log that was
    /// there while this stays the same is there still, or another lies above it.
    pub turned: u64,
}

impl Pieces {
    /// A file without any public bytes (just created).
    pub fn empty() -> Self {
        Self { known_to: u64::MAX, ..Self::default() }
    }

    /// Number of pieces of log, to bound the index.
    pub fn log_pieces(&self) -> usize {
        self.log.len()
    }

    /// The offset of the first piece that lies in the log no longer than up to there.
    pub fn first_until(&self, sequence: Sequence) -> Option<u64> {
        self.log.iter().find(|(_, p)| p.place.sequence <= sequence).map(|(start, _)| *start)
    }

    /// Notes that `len` bytes at `offset` now lie at `place`. Says whether all of them are known to have
    /// had a place before (in the log or an extent), for space accounting.
    pub fn wrote(&mut self, offset: u64, len: u64, place: Place) -> bool {
        if len == 0 {
            return true;
        }
        // The two common cases take one search: the same range again, and behind everything.
        if let Some(piece) = self.log.get_mut(&offset)
            && piece.len == len
        {
            piece.place = place;
            return true;
        }
        let had_place = match self.find(offset, len, |_| true) {
            Source::Log(piece) => piece.len >= len,
            Source::Arena { len: n, .. } => n >= len,
            Source::Hole(_) | Source::Unknown => false,
        };
        let behind = |(start, p): (&u64, &Piece)| start + p.len <= offset;
        if !self.log.last_key_value().is_none_or(behind) {
            self.cut_log(offset, offset.saturating_add(len));
        }
        self.log.insert(offset, Piece { len, place });
        had_place
    }

    /// Whether the byte at `offset` is known to have a place.
    pub fn has(&self, offset: u64) -> bool {
        matches!(self.find(offset, 1, |_| true), Source::Log(_) | Source::Arena { .. })
    }

    /// The bytes from `from` to `to` become zeroes (punch, or truncate with `to` = MAX).
    pub fn zero(&mut self, from: u64, to: u64) {
        self.turned += 1;
        self.cut_log(from, to);
        let mut kept = Vec::with_capacity(self.extents.len() + 1);
        for e in self.extents.drain(..) {
            let end = e.offset + e.len;
            if end <= from || e.offset >= to {
                kept.push(e);
                continue;
            }
            if e.offset < from {
                kept.push(Extent { len: from - e.offset, ..e });
            }
            if end > to {
                let skip = to - e.offset;
                kept.push(Extent {
                    offset: to,
                    len: end - to,
                    arena_offset: e.arena_offset + skip,
                    ..e
                });
            }
        }
        self.extents = kept;
        if to == u64::MAX && self.known_to >= from {
            (self.known_from, self.known_to) = (self.known_from.min(from), u64::MAX);
        }
    }

    /// Public extents are no longer to be trusted at all (blocks moved).
    pub fn forget_extents(&mut self) {
        self.turned += 1;
        self.extents.clear();
        (self.known_from, self.known_to) = (0, 0);
        self.shared = false;
    }

    /// Whether changing bytes `from..to` makes the public extents wrong: the service changes no block
    /// that others share, but gives the file another, in which the bytes beside these lie as well.
    pub fn moves(&self, from: u64, to: u64) -> bool {
        let shared = |at: u64| {
            let block = at / BLOCK_BYTES * BLOCK_BYTES;
            let i = self.extents.partition_point(|e| e.offset + e.len <= block);
            self.extents.get(i).is_some_and(|e| e.shared && e.offset < block + BLOCK_BYTES)
        };
        self.shared
            && from < to
            && (!from.is_multiple_of(BLOCK_BYTES) && shared(from)
                || !to.is_multiple_of(BLOCK_BYTES) && shared(to))
    }

    /// Whether something written that the extents do not reflect makes them wrong.
    pub fn will_move(&self) -> bool {
        let newer = |(_, p): &(&u64, &Piece)| p.place.sequence > self.as_of;
        self.shared && self.log.iter().filter(newer).any(|(at, p)| self.moves(*at, at + p.len))
    }

    /// Nothing is known of any byte but from the service (the bytes have moved within the file).
    pub fn forget(&mut self) {
        self.log.clear();
        self.forget_extents();
    }

    /// Takes a fresh extent list, from offset `from` on, reflecting operations up to `as_of`. Of what lies
    /// below `from` it says nothing: that stays known only if the two touch.
    pub fn install(&mut self, from: u64, extents: &[Extent], complete: bool, as_of: Sequence) {
        self.turned += 1;
        // The first may begin before `from`, in the middle of one that is known.
        let first = extents.first().map_or(from, |e| e.offset.min(from));
        let touches = self.known_from < first && first <= self.known_to;
        if touches && !planted(Bug::GapIsHole) || from > 0 && planted(Bug::GapIsHole) {
            self.extents.retain(|e| e.offset < first);
            if let Some(last) = self.extents.last_mut() {
                last.len = last.len.min(first - last.offset);
            }
            self.as_of = self.as_of.min(as_of);
        } else {
            self.extents.clear();
            (self.known_from, self.as_of) = (first, as_of);
        }
        self.extents.extend(extents.iter().filter(|e| e.len > 0));
        self.shared = self.extents.iter().any(|e| e.shared);
        self.known_to = match (complete, self.extents.last()) {
            (true, _) => u64::MAX,
            (false, Some(last)) => last.offset + last.len,
            (false, None) => from,
        };
        // What the list now shows needs no log any more.
        let shown = from..self.known_to;
        let settled: Vec<(u64, u64)> = self
            .log
            .iter()
            .filter(|(_, p)| p.place.sequence <= as_of || planted(Bug::PiecesDropped))
            .map(|(&start, p)| (start.max(shown.start), (start + p.len).min(shown.end)))
            .filter(|(start, end)| start < end)
            .collect();
        for (start, end) in settled {
            self.cut_log(start, end);
        }
    }

    /// From where to ask for extents, for one who looks at the bytes from `offset` on and does not know `at`. What is
    /// known between the two stays known only if the next list touches it: where only the log shows bytes in between, a
    /// list from `at` on would not, and the beginning would be asked for anew, and then `at` again, without end.
    pub fn asks_from(&self, offset: u64, at: u64) -> u64 {
        let bridges = offset < self.known_to && self.known_to < at;
        if bridges && !planted(Bug::ListApart) { self.known_to } else { at }
    }

    /// What the bytes at `offset` are, `len` at most. Log pieces that `intact` refuses count only
    /// through the extents, which must then be newer than the piece.
    pub fn find(&self, offset: u64, len: u64, intact: impl Fn(&Place) -> bool) -> Source {
        let mut limit = len;
        if let Some((&start, piece)) = self.log.range(..=offset).next_back()
            && offset < start + piece.len
        {
            let part = piece.skip(offset - start);
            let part = Piece { len: part.len.min(len), ..part };
            return if intact(&part.place) { Source::Log(part) } else { Source::Unknown };
        }
        if let Some((&next, _)) = self.log.range(offset..).next() {
            limit = limit.min(next - offset);
        }
        self.find_extent(offset, limit)
    }

    /// The first data or hole at `offset` or behind, in a file that ends at `size`. A block in which anything lies is
    /// data as a whole: so it is once it is published, and so it is told before.
    pub fn seek(
        &self,
        offset: u64,
        size: u64,
        whence: Whence,
        intact: impl Fn(&Place) -> bool,
    ) -> Seek {
        let floor = |at: u64| at / BLOCK_BYTES * BLOCK_BYTES;
        let mut at = floor(offset);
        // No byte from `offset` to here is in a hole.
        let mut full = offset;
        while at < size {
            let (data, len) = match self.find(at, size - at, &intact) {
                Source::Hole(len) => (false, len),
                Source::Log(piece) => (true, piece.len),
                Source::Arena { len, .. } => (true, len),
                Source::Unknown => return Seek::Unknown(self.asks_from(floor(offset), at)),
            };
            let end = at + len;
            match (whence, data) {
                (Whence::Data, true) => return Seek::At(floor(at).max(offset)),
                (Whence::Hole, true) if full < floor(at) => return Seek::At(full),
                (Whence::Hole, true) => full = full.max(end.next_multiple_of(BLOCK_BYTES)),
                // Longer than the block that `full` is in.
                (Whence::Hole, false) if at <= floor(full) && floor(full) + BLOCK_BYTES <= end => {
                    return Seek::At(full);
                }
                _ => {}
            }
            at = end;
        }
        match whence {
            Whence::Hole => Seek::At(full.min(size)),
            Whence::Data => Seek::None,
        }
    }

    fn find_extent(&self, offset: u64, len: u64) -> Source {
        if offset < self.known_from || offset >= self.known_to {
            return Source::Unknown;
        }
        let len = len.min(self.known_to - offset);
        let at = self.extents.partition_point(|e| e.offset + e.len <= offset);
        match self.extents.get(at) {
            Some(e) if e.offset <= offset => {
                let skip = offset - e.offset;
                let len = len.min(e.len - skip);
                if e.unwritten {
                    Source::Hole(len)
                } else {
                    Source::Arena { arena: e.arena, offset: e.arena_offset + skip, len }
                }
            }
            Some(e) => Source::Hole(len.min(e.offset - offset)),
            None => Source::Hole(len),
        }
    }

    fn cut_log(&mut self, from: u64, to: u64) {
        if let Some((&start, &piece)) = self.log.range(..from).next_back() {
            let end = start + piece.len;
            if end > from {
                self.log.insert(start, Piece { len: from - start, ..piece });
                if end > to {
                    self.log.insert(to, piece.skip(to - start));
                }
            }
        }
        while let Some((&start, &piece)) = self.log.range(from..to).next() {
            self.log.remove(&start);
            if start + piece.len > to {
                self.log.insert(to, piece.skip(to - start));
            }
        }
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use base::random::Random;

    const SIZE: u64 = 400;

    /// Byte `i` of the model: what `find` must say about it.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Byte {
        Zero,
        Log(u64),
        Arena(u64),
    }

    fn observed(pieces: &Pieces) -> Vec<Byte> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < SIZE {
            let at = bytes.len() as u64;
            match pieces.find(at, SIZE - at, |_| true) {
                Source::Log(p) => {
                    bytes.extend((0..p.len).map(|i| Byte::Log(p.place.position + i)));
                }
                Source::Arena { offset, len, .. } => {
                    bytes.extend((0..len).map(|i| Byte::Arena(offset + i)));
                }
                Source::Hole(len) => bytes.extend((0..len).map(|_| Byte::Zero)),
                Source::Unknown => panic!("unknown at {at} though everything is known"),
            }
        }
        bytes
    }

    #[test]
    fn agrees_with_a_byte_model() {
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let mut pieces = Pieces::empty();
            let mut model = vec![Byte::Zero; SIZE as usize];
            let mut sequence = 0;
            for _ in 0..60 {
                let from = random.below(SIZE);
                let to = (from + 1 + random.below(80)).min(SIZE);
                sequence += 1;
                match random.below(6) {
                    0 => {
                        pieces.zero(from, to);
                        model[from as usize..to as usize].fill(Byte::Zero);
                    }
                    1 => {
                        pieces.zero(from, u64::MAX);
                        model[from as usize..].fill(Byte::Zero);
                    }
                    2 => {
                        // Published: everything in the log now has a public place.
                        let extents: Vec<Extent> = (0..SIZE)
                            .filter(|&i| model[i as usize] != Byte::Zero)
                            .map(|i| Extent {
                                offset: i,
                                len: 1,
                                arena: 1,
                                unwritten: false,
                                shared: false,
                                arena_offset: 10_000 + i,
                            })
                            .collect();
                        pieces.install(0, &extents, true, Sequence(sequence));
                        for (i, b) in model.iter_mut().enumerate() {
                            if *b != Byte::Zero {
                                *b = Byte::Arena(10_000 + i as u64);
                            }
                        }
                        assert_eq!(pieces.log_pieces(), 0);
                    }
                    _ => {
                        let position = 1_000_000 + sequence * 1000;
                        let place = Place { lane: 0, position, sequence: Sequence(sequence) };
                        pieces.wrote(from, to - from, place);
                        for i in from..to {
                            model[i as usize] = Byte::Log(position + i - from);
                        }
                    }
                }
                assert_eq!(observed(&pieces), model, "seed {seed}");
            }
        }
    }

    /// Lists come in parts, and the log shows what is between two of them. (Before, the second list was asked for where
    /// the log ended, did not touch the first, and replaced it; the read gave up after 10,000 lists, with EIO.)
    #[test]
    fn all_is_known_in_the_end_where_lists_come_in_parts() {
        const BLOCKS: u64 = 8;
        const END: u64 = BLOCKS * BLOCK_BYTES;
        for seed in 0..500 {
            let mut random = Random::new(seed);
            let all: Vec<Extent> = (0..BLOCKS)
                .filter(|_| random.chance(3, 4))
                .map(|block| Extent {
                    offset: block * BLOCK_BYTES,
                    len: BLOCK_BYTES,
                    arena: 1,
                    unwritten: false,
                    shared: false,
                    arena_offset: (BLOCKS - block) * 2 * BLOCK_BYTES,
                })
                .collect();
            let mut pieces = Pieces::default();
            for sequence in 2..2 + random.below(3) {
                let at = random.below(END);
                let len = 1 + random.below(END - at);
                let place =
                    Place { lane: 0, position: sequence << 32, sequence: Sequence(sequence) };
                pieces.wrote(at, len, place);
            }
            let offset = random.below(END);
            let (mut at, mut lists) = (offset, 0);
            while at < END {
                let from = match pieces.find(at, END - at, |_| true) {
                    Source::Hole(len) | Source::Arena { len, .. } => {
                        at += len;
                        continue;
                    }
                    Source::Log(piece) => {
                        at += piece.len;
                        continue;
                    }
                    Source::Unknown => pieces.asks_from(offset, at),
                };
                let mut rest = all.iter().filter(|e| e.offset + e.len > from);
                let first = rest.next().copied();
                pieces.install(from, first.as_slice(), rest.next().is_none(), Sequence(1));
                lists += 1;
                assert!(lists <= 2 * BLOCKS, "seed {seed}: no end");
                // A read begins anew after each answer.
                at = offset;
            }
        }
    }

    /// What is in the log only is found as it is found later, when blocks are published: in xfstests' words, the
    /// size of an allocation is the same at any moment. (Before, what was not published was found byte by byte.)
    #[test]
    fn data_and_holes_are_whole_blocks_published_or_not() {
        const BLOCKS: u64 = 6;
        const END: u64 = BLOCKS * BLOCK_BYTES;
        let seek = |pieces: &Pieces, at, size, whence| pieces.seek(at, size, whence, |_| true);
        let mut seen = 0;
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let mut pieces = Pieces::empty();
            let (mut is_data, mut top) = ([false; BLOCKS as usize], 1);
            for sequence in 1..20 {
                let from = random.below(END);
                let len = if random.chance(1, 2) { 100 } else { 2 * BLOCK_BYTES };
                let to = (from + 1 + random.below(len)).min(END);
                let block = |at: u64| (at / BLOCK_BYTES) as usize;
                match random.below(8) {
                    0 => {
                        let (from, to) = (block(from), to.div_ceil(BLOCK_BYTES) as usize);
                        pieces.zero(from as u64 * BLOCK_BYTES, to as u64 * BLOCK_BYTES);
                        is_data[from..to].fill(false);
                    }
                    1 => {
                        let blocks = (0..BLOCKS).filter(|i| is_data[*i as usize]);
                        let extents: Vec<Extent> = blocks
                            .map(|i| Extent {
                                offset: i * BLOCK_BYTES,
                                len: BLOCK_BYTES,
                                arena: 1,
                                arena_offset: i * 9 * BLOCK_BYTES,
                                ..Extent::default()
                            })
                            .collect();
                        pieces.install(0, &extents, true, Sequence(sequence));
                    }
                    _ => {
                        let place = Place { lane: 0, position: from, sequence: Sequence(sequence) };
                        pieces.wrote(from, to - from, place);
                        is_data[block(from)..=block(to - 1)].fill(true);
                        top = top.max(to);
                    }
                }
                let size = top + random.below(END - top + 1);
                let at = random.below(size);
                for (whence, wanted) in [(Whence::Data, true), (Whence::Hole, false)] {
                    let found = (block(at)..=block(size - 1)).find(|i| is_data[*i] == wanted);
                    let found = found.map(|i| (i as u64 * BLOCK_BYTES).max(at));
                    let found = match (whence, found) {
                        (Whence::Hole, None) => Seek::At(size),
                        (Whence::Data, None) => Seek::None,
                        (_, Some(at)) => Seek::At(at),
                    };
                    seen += u32::from(found != Seek::At(at));
                    let is = seek(&pieces, at, size, whence);
                    assert_eq!(is, found, "seed {seed}: {whence:?} from {at} of {size}");
                }
            }
        }
        assert!(seen > 1000);
        let mut pieces = Pieces::empty();
        pieces.install(0, &[], false, Sequence(0));
        assert_eq!(seek(&pieces, BLOCK_BYTES + 5, END, Whence::Data), Seek::Unknown(BLOCK_BYTES));
    }

    /// What is public, as the service would tell it.
    fn public(bytes: &[Byte]) -> Vec<Extent> {
        let at = |i: usize| Extent {
            offset: i as u64,
            len: 1,
            arena: 1,
            arena_offset: 10_000 + i as u64,
            ..Extent::default()
        };
        (0..bytes.len()).filter(|i| bytes[*i] != Byte::Zero).map(at).collect()
    }

    /// A list of extents was asked for from the middle of the file on when nothing was known of what lies
    /// before (a chmod had made the client forget it), and then all before it was taken for a hole: other
    /// reads got zeroes.
    #[test]
    fn parts_of_the_list_in_any_order_never_show_what_is_not_so() {
        for seed in 0..400 {
            let mut random = Random::new(seed);
            let mut pieces = Pieces::empty();
            let mut truth = vec![Byte::Zero; SIZE as usize];
            let (mut published, mut published_at) = (truth.clone(), 0);
            // What was asked for must reflect this.
            let mut after = 0;
            for sequence in 1..80 {
                let from = random.below(SIZE);
                let to = (from + 1 + random.below(80)).min(SIZE);
                match random.below(8) {
                    0 => {
                        let end = if random.chance(1, 3) { SIZE } else { to };
                        pieces.zero(from, if end == SIZE { u64::MAX } else { end });
                        truth[from as usize..end as usize].fill(Byte::Zero);
                        after = sequence;
                    }
                    1 => {
                        pieces.forget_extents();
                        after = sequence;
                    }
                    2..=4 => {
                        if published_at < after || random.chance(1, 3) {
                            let moved = |(i, b): (usize, &Byte)| match b {
                                Byte::Zero => Byte::Zero,
                                _ => Byte::Arena(10_000 + i as u64),
                            };
                            published = truth.iter().enumerate().map(moved).collect();
                            published_at = sequence;
                        }
                        let mut list = public(&published);
                        list.retain(|e| e.offset >= from);
                        let most = random.below(60) as usize;
                        let complete = list.len() < most;
                        list.truncate(most);
                        pieces.install(from, &list, complete, Sequence(published_at));
                    }
                    _ => {
                        let position = 1_000_000 + sequence * 1000;
                        let place = Place { lane: 0, position, sequence: Sequence(sequence) };
                        pieces.wrote(from, to - from, place);
                        for i in from..to {
                            truth[i as usize] = Byte::Log(position + i - from);
                        }
                    }
                }
                for at in 0..SIZE {
                    let byte = truth[at as usize];
                    let seen = match pieces.find(at, 1, |_| true) {
                        Source::Unknown => continue,
                        Source::Log(p) => Byte::Log(p.place.position),
                        Source::Hole(_) => Byte::Zero,
                        Source::Arena { offset, .. } => Byte::Arena(offset),
                    };
                    // What is published may be read from either place.
                    let also = match published[at as usize] {
                        Byte::Arena(_) if published_at > 0 => published[at as usize],
                        _ => byte,
                    };
                    let moved_on =
                        matches!(byte, Byte::Log(p) if (p - 1_000_000) / 1000 > published_at);
                    let good = seen == byte || !moved_on && seen == also;
                    assert!(
                        good,
                        "seed {seed}, step {sequence}, byte {at}: {seen:?}, not {byte:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn unknown_beyond_a_cut_list_and_for_overwritten_log() {
        let mut pieces = Pieces::default();
        let e = Extent {
            offset: 0,
            len: 10,
            arena: 1,
            unwritten: false,
            shared: false,
            arena_offset: 0,
        };
        pieces.install(0, &[e], false, Sequence(1));
        assert_eq!(pieces.find(10, 5, |_| true), Source::Unknown);
        let place = Place { lane: 0, position: 64, sequence: Sequence(2) };
        pieces.wrote(2, 4, place);
        assert_eq!(pieces.find(3, 1, |_| false), Source::Unknown);
        assert!(matches!(pieces.find(0, 10, |_| false), Source::Arena { len: 2, .. }));
    }

    #[test]
    fn what_is_beside_a_change_of_a_shared_block_is_asked_for_anew() {
        let mut pieces = Pieces::default();
        let e = |offset, len, shared| Extent {
            offset,
            len,
            shared,
            arena_offset: 1 << 20 | offset,
            ..Extent::default()
        };
        let all = [e(0, 8192, false), e(8192, 8192, true), e(16384, 4096, false)];
        pieces.install(0, &all, true, Sequence(1));
        for (from, to, moves) in [
            (0, 100, false),
            (8000, 8192, false),
            (8000, 8193, true),
            (8192, 12288, false),
            (8192, 12289, true),
            (16383, 20480, true),
            (16384, 16390, false),
            (30000, 30001, false),
        ] {
            assert_eq!(pieces.moves(from, to), moves, "{from} to {to}");
        }
        let place = Place { lane: 0, position: 64, sequence: Sequence(5) };
        pieces.wrote(8200, 10, place);
        assert!(pieces.will_move());
        pieces.install(0, &all, true, Sequence(5));
        assert!(!pieces.will_move());
        // Half of a list, from the middle of a known extent on.
        pieces.install(12288, &[e(12288, 4096, false)], false, Sequence(5));
        assert!(pieces.moves(8000, 8193) && !pieces.moves(12289, 12300));
        assert!(matches!(pieces.find(8192, 8192, |_| true), Source::Arena { len: 4096, .. }));
    }
}
