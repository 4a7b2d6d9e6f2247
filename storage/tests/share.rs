//! Blocks that files share: how many there are, who pays for them, and that a change in one file
//! shows in no other. Against a model that knows of each block of a file which one it is.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use base::InodeId;
use base::random::Random;
use common::{Driver, FILE, chmod, create, truncate, unlink, write};
use storage::check::check;
use storage::format::entry::Op;
use storage::volume::Refusal;

const BLOCK: u64 = 4096;
const CAPACITY: u64 = 4 << 20;

fn clone(from: u64, source_offset: u64, to: u64, offset: u64, len: u64) -> Op<'static> {
    Op::CloneRange {
        ino: InodeId(to),
        offset,
        len,
        source: InodeId(from),
        source_offset,
        zeroes: false,
    }
}

fn free(d: &Driver) -> u64 {
    d.volume.statfs().blocks_free
}

fn blocks(d: &Driver, ino: u64) -> u64 {
    d.volume.attr(InodeId(ino)).unwrap().unwrap().blocks / 8
}

fn sound(d: &mut Driver) -> u64 {
    d.publish();
    let report = check(&*d.media).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
    report.counts.shared
}

/// Two files of `len` bytes that share everything.
fn pair(len: usize) -> (Driver, Vec<u8>) {
    let mut d = Driver::new(CAPACITY);
    let data: Vec<u8> = (0..len).map(|i| (i / 7) as u8 | 1).collect();
    d.must(&create(2, 1, b"a", FILE)).unwrap();
    d.must(&create(3, 1, b"b", FILE)).unwrap();
    d.must(&write(2, 0, &data)).unwrap();
    d.must(&clone(2, 0, 3, 0, len as u64)).unwrap();
    (d, data)
}

#[test]
fn a_clone_takes_no_space_and_each_file_pays() {
    let (mut d, data) = pair(10 * 4096 + 100);
    assert_eq!(free(&d), CAPACITY / BLOCK - 11);
    assert_eq!((blocks(&d, 2), blocks(&d, 3)), (11, 11));
    assert_eq!(sound(&mut d), 11);
    d.reopen();
    assert_eq!(free(&d), CAPACITY / BLOCK - 11);
    assert_eq!((d.read(2), d.read(3)), (data.clone(), data));
}

#[test]
fn a_change_of_one_file_shows_in_no_other_and_takes_what_it_needs() {
    let before = 10 * 4096 + 100;
    // What is done to file 2, the blocks that it takes from the free ones.
    let changes: [(Op<'_>, u64); 10] = [
        (write(2, 5000, b"few bytes"), 1),
        (write(2, 4090, b"over an edge"), 2),
        (write(2, 0, &[7; 8192]), 2),
        (write(2, before, b"at the end"), 1),
        (truncate(2, 4096 + 10), 1),
        (truncate(2, 8192), 0),
        (Op::Fallocate { ino: InodeId(2), offset: 100, len: 9000, mode: 3 }, 2),
        (Op::Fallocate { ino: InodeId(2), offset: 100, len: 9000, mode: 16 }, 3),
        (Op::Fallocate { ino: InodeId(2), offset: 0, len: 9000, mode: 64 }, 3),
        (clone(2, 20_000, 2, 100, 9000), 3),
    ];
    for (op, takes) in changes {
        let (mut d, data) = pair(before as usize);
        let (mut alone, had) = (Driver::new(CAPACITY), free(&d));
        alone.must(&create(2, 1, b"a", FILE)).unwrap();
        alone.must(&write(2, 0, &data)).unwrap();
        alone.must(&op).unwrap();
        alone.publish();
        d.must(&op).unwrap();
        assert_eq!(had - free(&d), takes, "{op:?}");
        sound(&mut d);
        assert!(d.read(3) == data && d.read(2) == alone.read(2), "{op:?}");
        d.reopen();
        assert!(d.read(3) == data && d.read(2) == alone.read(2), "{op:?}");
    }
}

#[test]
fn blocks_go_when_the_last_owner_lets_go() {
    let orders = [[2, 3, 4], [2, 4, 3], [3, 2, 4], [3, 4, 2], [4, 2, 3], [4, 3, 2]];
    for (n, order) in orders.into_iter().enumerate() {
        let (mut d, data) = pair(30_000);
        d.must(&create(4, 1, b"c", FILE)).unwrap();
        d.must(&clone(3, 8192, 4, 4096, 30_000 - 8192)).unwrap();
        let used = CAPACITY / BLOCK - free(&d);
        assert_eq!(used, 8);
        for (i, ino) in order.into_iter().enumerate() {
            if n % 2 == 0 {
                d.must(&truncate(ino, 0)).unwrap();
            } else {
                let name = [b"a", b"b", b"c"][ino as usize - 2];
                d.must(&unlink(ino, 1, name)).unwrap();
                d.must(&Op::Reap { ino: InodeId(ino) }).unwrap();
            }
            sound(&mut d);
            let left = &order[i + 1..];
            let want = match left {
                [] => 0,
                // File 4 has not the first two.
                [4] => 6,
                _ => 8,
            };
            assert_eq!(CAPACITY / BLOCK - free(&d), want, "{order:?}");
            for ino in left.iter().filter(|ino| **ino != 4) {
                assert_eq!(d.read(*ino), data);
            }
        }
    }
}

#[test]
fn files_that_others_may_read_share_nothing() {
    let (mut d, data) = pair(20_000);
    let used = CAPACITY / BLOCK - free(&d);
    d.must(&chmod(3, 0o600)).unwrap();
    assert_eq!(CAPACITY / BLOCK - free(&d), 2 * used);
    assert_eq!(sound(&mut d), 0);
    d.must(&create(4, 1, b"c", 0o100600)).unwrap();
    d.must(&clone(2, 0, 4, 0, 20_000)).unwrap();
    assert_eq!(CAPACITY / BLOCK - free(&d), 3 * used);
    d.must(&create(5, 1, b"d", 0o100600)).unwrap();
    d.must(&clone(4, 0, 5, 0, 20_000)).unwrap();
    assert_eq!((CAPACITY / BLOCK - free(&d), sound(&mut d)), (3 * used, used));
    for ino in 2..=5 {
        assert_eq!(d.read(ino), data);
    }
}

#[test]
fn without_room_for_a_block_of_its_own_a_write_is_refused_and_nothing_changes() {
    let (mut d, data) = pair(20_000);
    d.must(&create(4, 1, b"c", FILE)).unwrap();
    let rest = free(&d) * BLOCK;
    d.must(&Op::Fallocate { ino: InodeId(4), offset: 0, len: rest, mode: 0 }).unwrap();
    assert_eq!(free(&d), 0);
    let ino = InodeId(2);
    for op in [
        write(2, 0, b"x"),
        truncate(2, 100),
        Op::Fallocate { ino, offset: 10, len: 20, mode: 3 },
        Op::Fallocate { ino, offset: 10, len: 20, mode: 16 },
        chmod(2, 0o600),
    ] {
        assert_eq!(d.must(&op), Err(Refusal::NoSpace), "{op:?}");
    }
    // A clone takes none; what gives a whole block up neither.
    d.must(&create(5, 1, b"d", FILE)).unwrap();
    d.must(&clone(2, 0, 5, 0, 20_000)).unwrap();
    d.must(&truncate(5, 4096)).unwrap();
    sound(&mut d);
    assert_eq!(
        (d.read(2), d.read(3), d.read(5)),
        (data.clone(), data.clone(), data[..4096].into())
    );
    d.must(&truncate(4, 4096)).unwrap();
    d.must(&write(2, 0, b"x")).unwrap();
    sound(&mut d);
    assert_eq!((d.read(3), d.read(2)[0]), (data, b'x'));
}

/// Of each block which one it is (None is a hole), the bytes, the mode.
type File = (Vec<Option<u64>>, Vec<u8>, u32);

/// Files by inode.
#[derive(Default)]
struct Model {
    files: BTreeMap<u64, File>,
    next: u64,
}

impl Model {
    fn owners(&self, id: u64) -> usize {
        self.files.values().flat_map(|f| &f.0).filter(|b| **b == Some(id)).count()
    }

    fn used(&self) -> u64 {
        let all: BTreeSet<_> = self.files.values().flat_map(|f| &f.0).flatten().collect();
        all.len() as u64
    }

    /// Bytes of a file are about to change.
    fn own(&mut self, ino: u64, at: usize, end: usize) {
        for b in at / 4096..end.div_ceil(4096) {
            let id = self.files[&ino].0.get(b).copied().flatten();
            if id.is_none_or(|id| self.owners(id) > 1) {
                self.next += 1;
                let list = &mut self.files.get_mut(&ino).unwrap().0;
                list.resize(list.len().max(b + 1), None);
                list[b] = Some(self.next);
            }
        }
    }

    fn write(&mut self, ino: u64, at: usize, data: &[u8]) {
        self.own(ino, at, at + data.len());
        let bytes = &mut self.files.get_mut(&ino).unwrap().1;
        bytes.resize(bytes.len().max(at + data.len()), 0);
        bytes[at..at + data.len()].copy_from_slice(data);
    }

    fn truncate(&mut self, ino: u64, size: usize) {
        if !size.is_multiple_of(4096)
            && size < self.files[&ino].1.len()
            && self.maps(ino, size / 4096)
        {
            self.own(ino, size, size + 1);
        }
        let file = self.files.get_mut(&ino).unwrap();
        file.0.truncate(size.div_ceil(4096));
        file.1.resize(size, 0);
    }

    fn maps(&self, ino: u64, block: usize) -> bool {
        self.files[&ino].0.get(block).is_some_and(Option::is_some)
    }

    /// Clones whole blocks, up to the end of the source or less.
    fn clone(&mut self, from: u64, a: usize, to: u64, b: usize, len: usize) {
        let (ids, data, mode) = &self.files[&from];
        let (data, same) = (data[a..a + len].to_vec(), *mode == self.files[&to].2);
        let id = |ino: u64, at: usize| self.files[&ino].0.get(at / 4096).copied().flatten();
        // Nothing lies there, or what is to come.
        let (there, comes) = (id(to, b + len), id(from, a + len));
        let empty = b + len >= self.files[&to].1.len() || there.is_none() || there == comes;
        let tail = a + len == self.files[&from].1.len() && empty;
        let n = if tail { len.div_ceil(4096) } else { len / 4096 };
        let ids: Vec<_> = (0..n).map(|i| ids.get(a / 4096 + i).copied().flatten()).collect();
        // Holes belong to nobody.
        let shares = n > 0 && (same || ids.iter().all(Option::is_none));
        if !shares {
            // Copied: only the blocks that the source has, and those that are there.
            let has = |i: usize| self.maps(from, a / 4096 + i);
            let had: Vec<_> = (0..len.div_ceil(4096)).map(has).collect();
            for (i, had) in had.into_iter().enumerate() {
                if had || self.maps(to, b / 4096 + i) {
                    let at = b + i * 4096;
                    self.own(to, at, at + 1);
                }
            }
        } else {
            let list = &mut self.files.get_mut(&to).unwrap().0;
            list.resize(list.len().max(b / 4096 + n), None);
            list[b / 4096..b / 4096 + n].copy_from_slice(&ids);
            // The rest of a block, if the source has it or there is one.
            let last = (a + n * 4096) / 4096;
            let there = self.maps(from, last) || self.maps(to, b / 4096 + n);
            if len > n * 4096 && there {
                self.own(to, b + n * 4096, b + len);
            }
        }
        let bytes = &mut self.files.get_mut(&to).unwrap().1;
        bytes.resize(bytes.len().max(b + len), 0);
        bytes[b..b + len].copy_from_slice(&data);
    }
}

#[test]
fn counts_and_contents_agree_with_the_model() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let mut d = Driver::new(2 << 20);
        let mut model = Model::default();
        for ino in 2..7 {
            let mode = if ino == 6 { 0o100600 } else { FILE };
            d.must(&create(ino, 1, &[b'a' + ino as u8], mode)).unwrap();
            model.files.insert(ino, (Vec::new(), Vec::new(), mode));
        }
        let mut shared = 0;
        for n in 0..500 {
            let (ino, other) = (2 + random.below(5), 2 + random.below(5));
            let size = model.files[&other].1.len() as u64;
            let (at, len) = (random.below(60_000), 1 + random.below(30_000));
            match random.below(8) {
                0..=2 => {
                    let len = if random.chance(1, 2) { len } else { 1 + len % 50 };
                    let data = vec![n as u8 | 1; len as usize];
                    if d.must(&write(ino, at, &data)).is_ok() {
                        model.write(ino, at as usize, &data);
                    }
                }
                3 => {
                    if d.must(&truncate(ino, at)).is_ok() {
                        model.truncate(ino, at as usize);
                    }
                }
                4 if random.chance(1, 3) => {
                    d.must(&truncate(ino, 0)).unwrap();
                    model.truncate(ino, 0);
                }
                _ => {
                    let from = (random.below(size + 1)) & !4095;
                    let rest = size - from;
                    let len = if random.chance(1, 2) { rest } else { rest & !4095 };
                    let to = at & !4095;
                    if len > 0 && ino != other && d.must(&clone(other, from, ino, to, len)).is_ok()
                    {
                        model.clone(other, from as usize, ino, to as usize, len as usize);
                    }
                }
            }
            let used = 512 - free(&d);
            assert_eq!(used, model.used(), "seed {seed}, step {n}");
            if random.chance(1, 10) {
                shared += sound(&mut d);
                if random.chance(1, 2) {
                    d.reopen();
                    assert_eq!(512 - free(&d), used, "seed {seed}, step {n}");
                }
                for (ino, (list, bytes, _)) in &model.files {
                    assert!(d.read(*ino) == *bytes, "seed {seed}, step {n}, inode {ino}");
                    let own = list.iter().flatten().count() as u64;
                    assert_eq!(blocks(&d, *ino), own, "seed {seed}, step {n}, inode {ino}");
                }
            }
        }
        assert!(shared > 100, "{shared}");
    }
}

/// A part of a chunk may be done twice after a crash: a clone that is there already takes no more, also of its last block, which
/// lies before a hole of the target. (What counts blocks is the same on every member.)
#[test]
fn a_clone_that_is_done_twice_takes_no_more() {
    let (mut d, data) = pair(2 * 4096 + 100);
    d.must(&truncate(3, 0)).unwrap();
    d.must(&truncate(3, 9 * BLOCK)).unwrap();
    let len = data.len() as u64;
    for _ in 0..3 {
        d.must(&clone(2, 0, 3, BLOCK, len)).unwrap();
        d.publish();
        assert_eq!((free(&d), blocks(&d, 3)), (CAPACITY / BLOCK - 3, 3));
        let read = d.read(3);
        assert_eq!(read.len() as u64, 9 * BLOCK);
        assert!(read[BLOCK as usize..(BLOCK + len) as usize] == data);
        assert!(read[(BLOCK + len) as usize..].iter().all(|byte| *byte == 0));
        assert_eq!(sound(&mut d), 3);
    }
}
