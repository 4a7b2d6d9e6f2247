//! Damage of every kind: flipped bits are found or cost nothing, forged entries change nothing
//! that they must not.

mod common;

use std::sync::Arc;

use base::random::Random;
use base::{ClientId, Epoch, InodeId, Sequence, StreamSeq};
use common::*;
use storage::check::{Severity, check};
use storage::format::chunk::ChunkHeader;
use storage::format::entry::{self, HEADER_BYTES, Op, RawHeader};
use storage::format::item::ReadClass;
use storage::format::superblock::{
    ROOT_AT, ROOT_BYTES, SUPERBLOCK_AT, SUPERBLOCK_BYTES, Superblock,
};
use storage::media::{Media, Segment};
use storage::memory::MemoryRegion;
use storage::volume::{Refusal, Sealed, Volume, run_copies};

const CAPACITY: u64 = 2 << 20;

/// A small volume with an item of every kind, published twice.
fn sample() -> (Arc<MemoryRegion>, Volume) {
    let media = Arc::new(MemoryRegion::new());
    media.ensure(Segment::Stream, 1 << 20).unwrap();
    let mut volume = Volume::format(media.clone(), &params(CAPACITY)).unwrap();
    for ino in 2..200 {
        let name = format!("name {ino}");
        let mode = if ino % 5 == 0 { DIR } else { FILE };
        feed(&mut volume, ino, &create(ino, 1, name.as_bytes(), mode)).unwrap();
        let value = vec![ino as u8; 50 + ino as usize * 10];
        let set = Op::SetXattr { ino: InodeId(ino), name: b"user.x", value: &value };
        feed(&mut volume, ino, &set).unwrap();
        if mode == FILE {
            feed(&mut volume, ino, &write(ino, ino * 300, &value)).unwrap();
        }
    }
    feed(&mut volume, 300, &unlink(2, 1, b"name 2")).unwrap();
    publish(&media, &mut volume, 300);
    feed(&mut volume, 301, &chmod(3, 0o600)).unwrap();
    publish(&media, &mut volume, 301);
    (media, volume)
}

fn feed(volume: &mut Volume, n: u64, op: &Op<'_>) -> Result<(), Refusal> {
    let bytes = op.to_entry(Sequence(n), Epoch(1), 0, n * 1_000_000, 7);
    let (header, op) = entry::decode(&bytes, 7).unwrap();
    volume.apply(&header, &op, (Segment::Stream, 0)).map(|_| ())
}

fn publish(media: &MemoryRegion, volume: &mut Volume, n: u64) {
    let clients = [(ClientId(9), Sequence(n))];
    let sealed: Sealed = volume.seal(StreamSeq(n), Epoch(1), &clients).unwrap();
    run_copies(media, &sealed.copies).unwrap();
    volume.publish(sealed).unwrap();
}

fn flip(media: &MemoryRegion, segment: Segment, bit: u64) {
    let mut byte = [0];
    media.read(segment, bit / 8, &mut byte).unwrap();
    byte[0] ^= 1 << (bit % 8);
    media.damage(segment, bit / 8, &byte).unwrap();
}

#[test]
fn either_superblock_and_either_root_serves() {
    let (media, volume) = sample();
    assert!(check(&*media).unwrap().findings.is_empty());
    let places = [(SUPERBLOCK_AT, SUPERBLOCK_BYTES, "superblock"), (ROOT_AT, ROOT_BYTES, "root")];
    for (at, len, name) in places {
        for bit in (0..len as u64 * 8).step_by(37) {
            for copy in [0, 1] {
                flip(&media, Segment::Super, at[copy] * 8 + bit);
                let report = check(&*media).unwrap();
                let found = &report.findings[0];
                assert!(found.place.starts_with(name) && !found.problem.is_empty(), "{found}");
                assert_eq!(found.severity, Severity::Note);
                let opened = Volume::open(media.clone()).unwrap();
                let behind = volume.root().transaction - opened.root().transaction;
                assert!(behind <= u64::from(name == "root"));
                flip(&media, Segment::Super, at[copy] * 8 + bit);
            }
        }
        // Both at once: a precise error.
        flip(&media, Segment::Super, at[0] * 8 + 200);
        flip(&media, Segment::Super, at[1] * 8 + 200);
        let error = Volume::open(media.clone()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("checksum"), "{error}");
        assert!(!check(&*media).unwrap().is_sound());
        flip(&media, Segment::Super, at[0] * 8 + 200);
        flip(&media, Segment::Super, at[1] * 8 + 200);
    }
    assert!(check(&*media).unwrap().findings.is_empty());
}

/// It is true to its checksum; nobody asks for memory for what it claims.
#[test]
fn a_superblock_that_claims_more_pages_than_there_are_is_refused() {
    let (media, volume) = sample();
    let pages = media.size(Segment::Tree).unwrap() / 4096;
    for tree_pages in [pages + 1, 1 << 40] {
        let forged = Superblock { tree_pages, ..volume.superblock().clone() }.encode();
        for at in SUPERBLOCK_AT {
            media.write(Segment::Super, at, &forged).unwrap();
        }
        let what = "more tree pages than the region has";
        let Err(error) = Volume::open(media.clone()) else { panic!("{tree_pages} pages") };
        assert!(error.to_string().contains(what), "{error}");
        let report = check(&*media).unwrap();
        let found = report.findings.iter().find(|f| f.problem.contains(what));
        assert!(found.is_some_and(|f| f.severity == Severity::Damage), "{report:?}");
    }
    let impossible = Superblock { tree_pages: (1 << 40) + 1, ..volume.superblock().clone() };
    assert!(Superblock::decode(&impossible.encode()).is_err());
}

#[test]
fn a_flip_in_any_page_is_found_by_opening_and_by_checking() {
    let (media, volume) = sample();
    let mut random = Random::new(4);
    let (mut hit, mut number) = (0, 0);
    while hit < volume.tree().pages() {
        // Pages in use are those whose damage the checker notices; all lie at the front.
        let mut noticed = false;
        for _ in 0..6 {
            let bit = number * 4096 * 8 + random.below(4096 * 8);
            flip(&media, Segment::Tree, bit);
            let report = check(&*media).unwrap();
            let opened = Volume::open(media.clone());
            assert_eq!(report.is_sound(), opened.is_ok(), "page {number}");
            if let Err(e) = opened {
                noticed = true;
                assert!(e.to_string().contains(&format!("page {number}")), "{e}");
                assert!(report.findings.iter().any(|f| f.place == format!("page {number}")));
            } else {
                assert!(!noticed, "one bit of page {number} is not covered");
            }
            flip(&media, Segment::Tree, bit);
        }
        hit += u64::from(noticed);
        number += 1;
        assert!(number < 1000);
    }
    assert!(hit > 20);
    assert!(check(&*media).unwrap().is_sound());
}

fn ops() -> Vec<Op<'static>> {
    let (ino, parent) = (InodeId(7), InodeId(1));
    let zero = Default::default();
    vec![
        Op::Pad,
        create(7, 1, b"name", FILE),
        Op::Link { ino, parent, name: b"name" },
        unlink(7, 1, b"name"),
        Op::Rmdir { ino, parent, name: b"name", open: true },
        rename(7, (1, b"old"), (5, b"new"), 8),
        write(7, 100, b"some bytes"),
        truncate(7, 5),
        Op::Fallocate { ino, offset: 1, len: 2, mode: 3 },
        Op::SetAttr { ino, mask: 31, mode: 0o600, uid: 1, gid: 2, atime: zero, mtime: zero },
        Op::SetXattr { ino, name: b"user.a", value: b"value" },
        Op::RemoveXattr { ino, name: b"user.a" },
        Op::CloneRange {
            ino,
            offset: 0,
            len: 5,
            source: InodeId(9),
            source_offset: 3,
            zeroes: true,
        },
        Op::Shift { ino, offset: 4096, len: 8192, insert: true, size: 20480 },
        Op::Move { ino, from: 1, to: 9, out: true },
        Op::Reap { ino },
        Op::Place { ino, reach: ReadClass::Group { uid: 7, gid: 8 }, later: true },
    ]
}

#[test]
fn a_flip_in_any_entry_or_chunk_header_is_refused() {
    for op in ops() {
        let bytes = op.to_entry(Sequence(3), Epoch(2), 1, 77, 5);
        let (header, decoded) = entry::decode(&bytes, 5).unwrap();
        assert_eq!((decoded, header.sequence), (op, Sequence(3)));
        assert!(entry::decode(&bytes, 6).is_err(), "another incarnation");
        let covered = HEADER_BYTES + header.length as usize;
        for bit in 0..covered * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(entry::decode(&flipped, 5).is_err(), "{op:?}, bit {bit}");
        }
        for cut in 0..covered {
            assert!(entry::decode(&bytes[..cut], 5).is_err(), "{op:?}, cut at {cut}");
        }
    }
    let chunk = ChunkHeader { entries: 3, body_bytes: 640, ..Default::default() }.encode();
    assert!(ChunkHeader::decode(&chunk).is_ok());
    for bit in 0..chunk.len() * 8 {
        let mut flipped = chunk;
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(ChunkHeader::decode(&flipped).is_err(), "bit {bit}");
    }
}

/// Entries with right checksums and hostile fields: what is decoded can be applied without a
/// fault, and the volume stays sound.
#[test]
fn forged_entries_do_no_harm() {
    let (media, mut volume) = sample();
    let mut random = Random::new(11);
    let samples: Vec<_> = ops()
        .iter()
        .map(|op| {
            let mut payload = Vec::new();
            let raw = op.encode(&mut payload);
            (raw, payload)
        })
        .collect();
    let hostile = |random: &mut Random| match random.below(6) {
        0 => random.next_u64(),
        1 => u64::MAX - random.below(3),
        2 => (1 << 44) - random.below(3),
        3 => random.below(1 << 22),
        _ => random.below(210),
    };
    let (mut decoded, mut applied) = (0, 0);
    for n in 0..40_000u64 {
        let (mut raw, mut payload): (RawHeader, Vec<u8>) =
            samples[random.below(samples.len() as u64) as usize].clone();
        (raw.sequence, raw.time) = (n + 1, random.next_u64() >> random.below(64));
        for _ in 0..random.below(4) {
            match random.below(5) {
                0 => raw.inode = hostile(&mut random),
                1 => raw.a = hostile(&mut random),
                2 => raw.b = hostile(&mut random),
                3 => raw.flags = random.below(40) as u16,
                _ if !payload.is_empty() => {
                    let at = random.below(payload.len() as u64) as usize;
                    payload[at] = random.next_u64() as u8;
                }
                _ => raw.op = random.below(20) as u8,
            }
        }
        raw.length = payload.len() as u32;
        let mut bytes = raw.seal(7, &[&payload]).to_vec();
        bytes.extend_from_slice(&payload);
        let Ok((header, op)) = entry::decode(&bytes, 7) else { continue };
        decoded += 1;
        if matches!(op, Op::Place { .. }) {
            // Nobody forges those: the service judges that they come from nobody else, and says what is right.
            continue;
        }
        match volume.apply(&header, &op, (Segment::Stream, 0)) {
            Ok(_) => applied += 1,
            Err(Refusal::NeedsPublish) => publish(&media, &mut volume, n + 1),
            Err(Refusal::Fault(fault)) => panic!("{op:?}: {fault}"),
            Err(_) => {}
        }
    }
    assert!(decoded > 10_000 && applied > 1000, "{decoded} {applied}");
    publish(&media, &mut volume, 50_000);
    let report = check(&*media).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
    volume.digest().unwrap();
}

#[test]
fn the_checker_reports_what_contradicts_itself() {
    use storage::format::item::{Inode, Run, Shared, attr_key, kind};
    use storage::format::page::Key;
    use storage::tree::{Root, Tree};
    let (media, volume) = sample();
    let root = *volume.root();
    // Writes items behind the volume's back, in a transaction of its own.
    let tamper = |change: &dyn Fn(&mut Tree)| -> Vec<String> {
        let copy = Arc::new(media.cut(&mut Random::new(1)));
        let top = Root { page: root.page, level: root.level as u8 };
        let pages = volume.superblock().tree_pages;
        let (media, seen) = (copy.clone(), &mut |_: Key, _: &[u8]| Ok(()));
        let mut tree = Tree::open(media, pages, 100, top, root.transaction, seen).unwrap();
        change(&mut tree);
        let sealed = tree.seal();
        sealed.write(&*copy).unwrap();
        let mut next = root;
        next.transaction += 1;
        (next.page, next.level) = (sealed.root.page, u32::from(sealed.root.level));
        next.pages = tree.pages();
        let at = ROOT_AT[(next.transaction % 2) as usize];
        copy.write(Segment::Super, at, &next.encode()).unwrap();
        check(&*copy).unwrap().findings.iter().map(|f| f.to_string()).collect()
    };
    assert_eq!(tamper(&|_| {}), Vec::<String>::new());
    let inode = |tree: &Tree, ino: u64| -> Inode {
        tree.get_with(attr_key(InodeId(ino)), |v| Inode::decode(v).unwrap()).unwrap().unwrap()
    };
    let change = |tree: &mut Tree, ino: u64, with: &dyn Fn(&mut Inode)| {
        let mut it = inode(tree, ino);
        with(&mut it);
        tree.put(attr_key(InodeId(ino)), &it.encode()).unwrap();
    };
    let run = |arena, block| Run { file: 900, arena, block, len: 1, unwritten: false }.encode();
    let extent = |ino| Key::new(ino, kind::EXTENT, 900);
    type Tamper<'a> = (&'a str, &'a dyn Fn(&mut Tree));
    let share = |t: &mut Tree, block, len, owners| {
        let shared = Shared { arena: 0, block, len, owners };
        t.put(Shared::key(0, block), &shared.encode()).unwrap();
    };
    let cases: [Tamper<'_>; 18] = [
        ("link count", &|t| change(t, 4, &|i| i.nlink = 2)),
        ("blocks", &|t| change(t, 4, &|i| i.blocks += 1)),
        ("may be read by", &|t| change(t, 4, &|i| i.mode = 0o100600)),
        ("counts 0 names", &|t| change(t, 1, &|i| i.entries = 0)),
        ("lead to the root", &|t| {
            change(t, 5, &|i| i.parent = InodeId(10));
            change(t, 10, &|i| i.parent = InodeId(5));
        }),
        ("is its parent", &|t| change(t, 5, &|i| i.parent = InodeId(10))),
        ("another type", &|t| change(t, 4, &|i| i.mode = 0o010644)),
        ("no attributes", &|t| drop(t.remove(attr_key(InodeId(4))))),
        ("are mapped by, and not counted for, 2 owners", &|t| {
            t.put(extent(4), &run(0, 0)).unwrap()
        }),
        ("are counted for, and not mapped by, 2 owners", &|t| share(t, 0, 1, 2)),
        ("are mapped by, and not counted for, 2 owners", &|t| {
            t.put(extent(4), &run(0, 0)).unwrap();
            share(t, 0, 1, 3);
        }),
        ("blocks 1 to 2: are counted for, and not mapped by, 2 owners", &|t| {
            t.put(extent(4), &run(0, 0)).unwrap();
            share(t, 1, 1, 2);
        }),
        ("have one owner", &|t| share(t, 0, 1, 1)),
        ("beyond its arena", &|t| t.put(extent(4), &run(0, CAPACITY / 4096)).unwrap()),
        ("which is none", &|t| t.put(extent(4), &run(77, 0)).unwrap()),
        ("is no inode", &|t| t.put(Key::new(0, kind::ORPHAN, 5000), &[]).unwrap()),
        ("no orphan", &|t| drop(t.remove(Key::new(0, kind::ORPHAN, 2)))),
        ("unknown kind", &|t| t.put(Key::new(4, 99, 0), b"x").unwrap()),
    ];
    for (want, change) in cases {
        let found = tamper(change);
        assert!(found.iter().any(|f| f.contains(want)), "{want}: {found:#?}");
    }
}
