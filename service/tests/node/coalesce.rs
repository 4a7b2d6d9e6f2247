//! What a chunk undoes itself is taken out of it: the head applies all that was done, the others what is left, and all have the same.

use base::InodeId;
use base::random::Random;
use service::core::entries;
use storage::format::entry::{Op, Stamp, mask};

use crate::rig::{Hand, Rig, create};

const FILE: u64 = 40_000;

/// Attributes and content of a file on a node.
fn file(rig: &Rig, n: usize, ino: InodeId) -> Option<(String, Vec<u8>)> {
    let record = rig.nodes[n].volume().attr(ino).expect("sound")?;
    let mut bytes = vec![0; record.size as usize];
    let read = rig.nodes[n].volume().read_file(ino, 0, &mut bytes).expect("sound");
    assert_eq!(read, bytes.len());
    Some((format!("{record:?}"), bytes))
}

fn same_everywhere(rig: &mut Rig, files: &[InodeId], what: &str) {
    rig.pass(100_000_000);
    rig.settle();
    for n in 0..rig.nodes.len() {
        rig.work(n);
    }
    for ino in files {
        let head = file(rig, 0, *ino);
        for n in 1..rig.nodes.len() {
            assert_eq!(file(rig, n, *ino), head, "{what}: {ino} on node {}", n + 1);
        }
    }
    rig.check();
}

fn one(random: &mut Random, files: &[InodeId], data: &[u8]) -> Op<'static> {
    let ino = files[random.below(files.len() as u64) as usize];
    let offset = random.below(FILE);
    let most = [300, 5000, 20_000][random.below(3) as usize];
    let len = 1 + random.below(most);
    match random.below(24) {
        0 => Op::Truncate { ino, size: offset, clear_setid: random.chance(1, 2) },
        1 => {
            let to = Stamp { sec: offset as i64, nsec: 5 };
            let (mask, mode) = (mask::MODE | mask::MTIME, 0o4755);
            Op::SetAttr { ino, mask, mode, uid: 0, gid: 0, atime: to, mtime: to }
        }
        2 => Op::Fallocate { ino, offset, len, mode: 0 },
        3 => {
            let source = files[random.below(files.len() as u64) as usize];
            let (offset, len) = (offset / 4096 * 4096, 4096);
            if source == ino {
                return Op::Truncate { ino, size: offset, clear_setid: false };
            }
            Op::CloneRange { ino, offset, len, source, source_offset: 0, zeroes: false }
        }
        _ => {
            let from = random.below(1000) as usize;
            // (For the rest of the test's life: a few hundred KiB.)
            let data = data[from..from + len as usize].to_vec().leak();
            Op::Write { ino, offset, data, clear_setid: random.chance(1, 2) }
        }
    }
}

/// Random histories: whatever is taken out, all nodes end with the same, and nothing is refused for it.
#[test]
fn every_node_ends_with_the_same() {
    let mut data = vec![0; 30_000];
    Random::new(9).fill(&mut data);
    let mut taken_out = 0;
    for seed in 0..25 {
        let mut random = Random::new(seed);
        let mut rig = Rig::new(3, seed);
        let mut hand = rig.attach((seed % 3) as usize, 0);
        let mut files: Vec<InodeId> = Vec::new();
        for n in 0..3u8 {
            files.push(hand.create(&mut rig, &[b'f', b'0' + n], 0o106_755));
        }
        hand.sync(&mut rig);
        for _ in 0..6 {
            for _ in 0..1 + random.below(20) {
                let op = one(&mut random, &files, &data);
                hand.append(&op);
            }
            if random.chance(1, 2) {
                brief(&mut rig, &mut hand, &mut random, &data);
            }
            hand.sync(&mut rig);
        }
        same_everywhere(&mut rig, &files, &format!("seed {seed}"));
        // (A clone from beyond the end, say, is refused, here as without.)
        taken_out += rig.nodes[0].counters().coalesced;
    }
    assert!(taken_out > 100, "{taken_out}");
}

/// A file that is made, written and removed; another one may take its name, or it gets a second one and stays.
fn brief(rig: &mut Rig, hand: &mut Hand, random: &mut Random, data: &[u8]) {
    let (root, name) = (InodeId::ROOT, &b"brief"[..]);
    let (ino, _) = hand.numbers(rig, 1)[0];
    hand.append_in(rig, root, &create(ino, root, name, 0o100_644, 0));
    let data = &data[..1 + random.below(9000) as usize];
    for offset in [0, 100, 5000] {
        hand.append(&Op::Write { ino, offset, data, clear_setid: false });
    }
    let stays = random.chance(1, 3);
    if stays {
        let kept = format!("kept-{ino}");
        hand.append(&Op::Link { ino, parent: root, name: kept.as_bytes() });
    }
    hand.append(&Op::Unlink { ino, parent: root, name, open: false });
    hand.sync(rig);
    rig.pass(100_000_000);
    rig.settle();
    (0..rig.nodes.len()).for_each(|n| rig.work(n));
    let head = file(rig, 0, ino);
    assert_eq!(head.is_some(), stays);
    for n in 1..rig.nodes.len() {
        assert_eq!(file(rig, n, ino), head, "on node {}", n + 1);
    }
}

/// What it is for: of blocks that are written again and again, and of files that are gone, next to nothing is sent.
#[test]
fn what_is_written_again_or_removed_is_not_sent() {
    let mut rig = Rig::new(2, 7);
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    hand.sync(&mut rig);
    for turn in 0..8u8 {
        for block in 0..4u64 {
            let data = &[turn; 4096][..];
            hand.append(&Op::Write { ino, offset: block * 4096, data, clear_setid: false });
        }
    }
    let (brief, _) = hand.numbers(&mut rig, 1)[0];
    let (root, name) = (InodeId::ROOT, &b"brief"[..]);
    hand.append_in(&mut rig, root, &create(brief, root, name, 0o100_644, 0));
    hand.append(&Op::Write { ino: brief, offset: 0, data: &[3; 10_000], clear_setid: false });
    hand.append(&Op::Unlink { ino: brief, parent: root, name, open: false });
    hand.sync(&mut rig);
    let counters = rig.nodes[0].counters();
    assert_eq!(counters.coalesced, 7 * 4 + 1);
    assert_eq!(counters.coalesced_bytes, 7 * 4 * 4096 + 10_000);
    // What is left out of it, and put in again where it arrives.
    let (mut raw, mut sent) = (0, 0);
    for seq in 1..=rig.nodes[1].position().0 {
        let Some((header, body)) = rig.nodes[1].chunk(base::StreamSeq(seq)) else { continue };
        assert!(entries(&body, header.incarnation).all(|entry| entry.is_ok()));
        let message = [&[0; 12][..], &header.encode(), &body].concat();
        let thin = service::packing::thin(&message);
        if let Some(thin) = &thin {
            let chunk = service::core::message::CHUNK;
            assert_eq!(service::packing::unpack(thin), Ok((chunk, message.clone())));
        }
        raw += message.len();
        sent += thin.map_or(message.len(), |thin| thin.len());
    }
    assert!(raw > 140_000 && sent < 25_000, "{raw} bytes, {sent} sent");
    assert_eq!(hand.refusals(), 0);
    same_everywhere(&mut rig, &[ino, brief], "at the end");
    let (_, bytes) = file(&rig, 0, ino).expect("it is there");
    assert!(bytes.iter().all(|b| *b == 7));
}

/// The set-id bits go although the only write that takes them is overwritten.
#[test]
fn bits_that_a_write_takes_away_do_not_come_back() {
    let mut rig = Rig::new(2, 8);
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o104_755);
    hand.sync(&mut rig);
    for clear_setid in [true, false] {
        hand.append(&Op::Write { ino, offset: 0, data: &[1; 100], clear_setid });
    }
    hand.sync(&mut rig);
    assert_eq!(rig.nodes[0].counters().coalesced, 0);
    same_everywhere(&mut rig, &[ino], "first");
    for clear_setid in [true, true, false] {
        hand.append(&Op::Write { ino, offset: 0, data: &[2; 100], clear_setid });
    }
    hand.sync(&mut rig);
    assert_eq!(rig.nodes[0].counters().coalesced, 1, "one of the two that take them is left");
    same_everywhere(&mut rig, &[ino], "then");
}

/// Bytes that were moved or shared before they are overwritten are where they went.
#[test]
fn bytes_that_went_elsewhere_before_are_there() {
    let mut rig = Rig::new(2, 9);
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    let other = hand.create(&mut rig, b"other", 0o100_644);
    let write = |data: &'static [u8]| Op::Write { ino, offset: 0, data, clear_setid: false };
    hand.append(&write(&[1; 4096]));
    hand.sync(&mut rig);
    hand.append(&write(&[2; 4096]));
    hand.append(&Op::Shift { ino, offset: 0, len: 4096, insert: true, size: 8192 });
    hand.append(&write(&[3; 4096]));
    let (offset, source_offset, len) = (0, 0, 4096);
    hand.append(&Op::CloneRange {
        ino: other,
        offset,
        len,
        source: ino,
        source_offset,
        zeroes: false,
    });
    hand.append(&write(&[4; 4096]));
    hand.sync(&mut rig);
    same_everywhere(&mut rig, &[ino, other], "moved and shared");
    for n in 0..2 {
        let (_, bytes) = file(&rig, n, ino).expect("it is there");
        assert_eq!((bytes.len(), bytes[0], bytes[8191]), (8192, 4, 2), "node {}", n + 1);
        assert_eq!(file(&rig, n, other).expect("it is there").1, [3; 4096], "node {}", n + 1);
    }
}

/// A pad has what was promised to the write in whose place it stands, and no more: sums of that are kept.
#[test]
fn a_pad_was_promised_no_more_than_a_write() {
    use storage::format::entry::{blocks_of, decode, pad_over};
    let (seq, epoch, ino) = (base::Sequence(1), base::Epoch(1), InodeId(7));
    for (offset, len) in [(0, 1), (4095, 1), (4095, 2), (1, 4096), (4095, 8194), (8192, 8192)] {
        let data = vec![1; len as usize];
        let write = Op::Write { ino, offset, data: &data, clear_setid: true };
        let promised = blocks_of(offset, len);
        let mut entry = write.to_promised_entry(promised, seq, epoch, 1, 9, 5);
        assert_eq!(pad_over(&mut entry, 5) as u64, len);
        let (header, op) = decode(&entry, 5).expect("a pad");
        assert_eq!(
            (op, header.promised, header.sequence, header.lane),
            (Op::Pad, promised, seq, 1)
        );
    }
    for promised in [2, u64::MAX] {
        let pad = Op::Pad.to_promised_entry(promised, seq, epoch, 0, 9, 5);
        assert!(decode(&pad, 5).is_err(), "{promised}");
    }
}

/// The conditions, taken out, are missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn conditions_that_are_taken_out_are_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 5] = [
        (Bug::CoalescedUncounted, what_is_written_again_or_removed_is_not_sent),
        (Bug::SetidCoalesced, bits_that_a_write_takes_away_do_not_come_back),
        (Bug::PartlyCovered, every_node_ends_with_the_same),
        (Bug::UnlinkedCoalesced, every_node_ends_with_the_same),
        (Bug::UseCoalesced, bytes_that_went_elsewhere_before_are_there),
    ];
    assert_eq!(missed(&tests), []);
}
