//! A node that comes back is brought to the head's state in place: what is the same is not even named, and nothing that differs is left.

use std::sync::Arc;

use base::random::Random;
use base::{InodeId, NodeId};
use service::core::limits::Limits;
use service::core::message::{Message, SNAPSHOT_ITEMS};
use service::core::reconcile::Part;
use service::core::{Node, entries};
use storage::format::entry::Op;
use storage::format::page::Key;
use storage::format::rpc::Amount;
use storage::limits::BLOCK_BYTES;
use storage::media::Media;
use storage::volume::reconcile::RangeEnd;

use crate::offers::{back, came, change, interrupted_with, parted_with};
use crate::rig::{Hand, Rig, config_with, create};
use crate::scrub::{view, write};
use crate::since::{sparse, until_in_seen, until_next};

const BLOCK: usize = BLOCK_BYTES as usize;
const TWO: NodeId = NodeId(2);

fn limits() -> Limits {
    Limits { returns: 0, ..Limits::SHIPPED }
}

/// What a node was told of that came back.
#[derive(Debug, Default)]
struct Told {
    ranges: usize,
    items: Vec<Key>,
    anew: Vec<InodeId>,
    /// Bytes of operations, and the files that they make.
    ops: usize,
    made: usize,
}

/// Until the second node is in, in the epoch after this one.
fn comes_in(rig: &mut Rig, epoch: u32) -> Told {
    let mut told = Told::default();
    until_in_seen(rig, epoch, &mut |kind, body| match Message::decode(kind, body) {
        Ok((_, Message::SnapshotItems { raw, .. })) => {
            let mut r = base::wire::Reader::new("parts", &raw);
            while r.left() > 0 {
                match Part::decode(&mut r).expect("what the head has put there") {
                    Part::Range(..) => told.ranges += 1,
                    Part::Items(_, _, items) => told.items.extend(items.iter().map(|(key, _)| key)),
                    Part::Anew(ino) => told.anew.push(ino),
                }
            }
        }
        Ok((_, Message::Snapshot { raw, .. })) => {
            told.ops += raw.len();
            let ops = entries(&raw, 0).map(|entry| entry.expect("what the head has put there").2);
            told.made += ops.filter(|op| matches!(op, Op::Create { .. })).count();
        }
        _ => {}
    });
    told
}

/// Two nodes with so many small files; then the second is away.
fn parted(seed: u64, files: u8) -> (Rig, Hand, Vec<InodeId>) {
    parted_with(limits(), seed, files, 2)
}

#[test]
fn what_is_the_same_is_not_named() {
    let (mut rig, mut hand, files) = parted(1, 100);
    let before = came(&rig);
    // The times stay what they are: no attribute says so.
    hand.append_in(&mut rig, files[40], &write(files[40], BLOCK_BYTES + 10, &[9; 10]));
    hand.append_in(&mut rig, files[70], &write(files[70], 5 * BLOCK_BYTES, &[8; 10]));
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 3);
    let told = comes_in(&mut rig, 3);
    assert!(told.ranges > 10, "{told:?}");
    // (What was published last may have come with what follows.)
    assert_eq!(told.anew, [files[40], files[99]], "and no other file is told of by itself");
    let of = |ino: &InodeId| told.items.iter().any(|key| key.ino == ino.0);
    assert!(of(&files[70]) && !of(&files[40]), "{told:?}");
    assert_eq!(told.made, 0, "nothing is made anew");
    let others = files.iter().filter(|ino| of(ino)).count();
    assert!(others < 12, "{others} of 100 files were told of");
    let came = came(&rig).1 - before.1;
    assert!(came < 14_000, "{came} bytes were sent");
}

/// Who had all of it is told of nothing but what the ranges come to.
#[test]
fn nothing_is_sent_where_nothing_has_changed() {
    let (mut rig, _, _) = parted(2, 60);
    back(&mut rig, 3);
    let told = comes_in(&mut rig, 3);
    // (What was published last may have come with what follows.)
    assert!(told.items.len() < 30 && told.anew.len() < 2, "{told:?}");
    assert!(told.ops < 20_000, "{told:?}");
}

#[test]
fn what_is_gone_or_has_another_name_goes_there_as_well() {
    let (mut rig, mut hand, files) = parted(3, 60);
    let root = InodeId::ROOT;
    for n in [3, 17, 18, 40] {
        let (name, ino) = (format!("f{n}"), files[n]);
        let gone = Op::Unlink { ino, parent: root, name: name.as_bytes(), open: false };
        hand.append_in(&mut rig, root, &gone);
    }
    let dir = hand.numbers(&mut rig, 1)[0].0;
    hand.append_in(&mut rig, root, &create(dir, root, b"dir", 0o040_755, 0));
    hand.append_in(&mut rig, root, &Op::Link { ino: files[5], parent: root, name: b"second" });
    let list = [7u8; 3000];
    hand.append_in(
        &mut rig,
        files[9],
        &Op::SetXattr { ino: files[9], name: b"user.long", value: &list },
    );
    let limit = Amount { blocks: 0, inodes: 1000 };
    hand.append_in(&mut rig, root, &Op::SetQuota { ino: root, user: Some(7), limit });
    hand.append_in(&mut rig, root, &Op::SetQuota { ino: dir, user: None, limit });
    hand.sync(&mut rig);
    rig.settle();
    assert_eq!(hand.refusals(), 0);
    back(&mut rig, 3);
    comes_in(&mut rig, 3);
    for node in &rig.nodes {
        assert_eq!(node.volume().limits().count(), 2);
        assert_eq!(node.volume().lookup(root, b"f17"), Ok(None));
    }
}

/// Content goes, and other blocks are reserved, in the same moment: no attribute tells.
#[test]
fn a_hole_where_content_was_is_one_there_as_well() {
    let (mut rig, mut hand, files) = parted(4, 30);
    let ino = files[12];
    let len = BLOCK_BYTES;
    hand.append_in(&mut rig, ino, &Op::Fallocate { ino, offset: 0, len, mode: 3 });
    hand.append_in(&mut rig, ino, &Op::Fallocate { ino, offset: 9 * len, len, mode: 1 });
    hand.sync(&mut rig);
    rig.settle();
    assert_eq!(hand.refusals(), 0);
    back(&mut rig, 3);
    comes_in(&mut rig, 3);
}

/// What files share, and has not changed, is taken over by all of them, and is shared there as well.
#[test]
fn what_is_shared_is_kept_and_stays_shared() {
    let (mut rig, mut hand, files) = parted(8, 30);
    for n in 0..2 {
        view(&mut rig, n, 3, &[1], &[2]);
    }
    comes_in(&mut rig, 3);
    let big = hand.create(&mut rig, b"big", 0o100_644);
    for n in 0..60 {
        let data = vec![n as u8 + 1; BLOCK];
        hand.append_in(&mut rig, big, &write(big, n * BLOCK_BYTES, &data));
    }
    let (len, zeroes) = (60 * BLOCK_BYTES, false);
    // (Of the same class as it: others would have copies.)
    let copies = [files[4], files[20]];
    for ino in copies {
        let (offset, source, source_offset) = (20 * BLOCK_BYTES, big, 0);
        let clone = Op::CloneRange { ino, offset, len, source, source_offset, zeroes };
        hand.append_in(&mut rig, ino, &clone);
    }
    hand.sync(&mut rig);
    rig.settle();
    rig.pass(1_000_000_000);
    // (Some more, so that the clones are not the last that was published.)
    for n in [10, 11, 12] {
        hand.append_in(&mut rig, files[n], &write(files[n], 0, &[7; 10]));
        hand.sync(&mut rig);
        rig.settle();
        rig.pass(1_000_000_000);
    }
    assert_eq!(hand.refusals(), 0);
    let before = came(&rig);
    for n in 0..2 {
        view(&mut rig, n, 5, &[1], &[]);
    }
    hand.append_in(&mut rig, files[25], &write(files[25], 0, &[7; 10]));
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 6);
    let told = comes_in(&mut rig, 6);
    assert!([big, copies[0], copies[1]].iter().all(|ino| told.anew.contains(ino)), "{told:?}");
    let (taken, came) = (came(&rig).0 - before.0, came(&rig).1 - before.1);
    assert!(taken >= len && came < len / 3, "{taken} bytes were taken over, {came} sent");
    let [here, there] = [0, 1].map(|n| rig.nodes[n].volume().statfs());
    assert_eq!(here.blocks_free, there.blocks_free);
}

/// It asks twice before anything has come, and is sent it twice: the second finds what the first has left.
#[test]
fn what_is_begun_twice_comes_to_the_same() {
    for delivered in [0, 1, 3, 8, 20] {
        let (mut rig, mut hand, files) = parted(5, 40);
        for ino in files.iter().step_by(7) {
            hand.append_in(&mut rig, *ino, &write(*ino, 100, &[5; 6000]));
        }
        hand.sync(&mut rig);
        rig.settle();
        back(&mut rig, 3);
        let pieces = rig.links.iter().position(|(to, _, _)| *to == TWO).expect("a link");
        // All that it says is heard, and what is said to it comes late.
        for _ in 0..30 {
            rig.pass(100_000_000);
            for link in 0..rig.links.len() {
                while link != pieces && rig.deliver(link) {}
            }
        }
        (0..delivered).for_each(|_| _ = rig.deliver(pieces));
        let queue = rig.links[pieces].2.iter();
        let begun = queue.filter(|(kind, _)| *kind == SNAPSHOT_ITEMS).count();
        assert!(begun > 1 || delivered > 0, "it has begun");
        comes_in(&mut rig, 3);
    }
}

/// Something that is told cannot be done where it is: the node asks for all of it, and comes in by that.
#[test]
fn who_cannot_be_brought_there_is_sent_all_of_it() {
    let (mut rig, mut hand, files) = parted(9, 40);
    for ino in files.iter().step_by(3) {
        hand.append_in(&mut rig, *ino, &write(*ino, 100, &[5; 6000]));
    }
    hand.sync(&mut rig);
    rig.settle();
    back(&mut rig, 3);
    let pieces = until_next(&mut rig, SNAPSHOT_ITEMS);
    let (kind, body) = rig.links[pieces].2.pop_front().expect("a piece");
    let Ok((epoch, Message::SnapshotItems { seq, piece, id, last_inode, mut raw })) =
        Message::decode(kind, &body)
    else {
        panic!("message {kind} is none of items");
    };
    // (No content can be taken from a directory.)
    Part::Anew(InodeId::ROOT).encode(&mut raw);
    let told = Message::SnapshotItems { seq, piece, id, last_inode, raw };
    let (kind, body) = told.encode(epoch);
    rig.links[pieces].2.push_front((kind, body));
    rig.deliver(pieces);
    // (What is on its way is of no use any more; the head begins anew when nobody has taken it for a while.)
    assert_eq!(comes_in(&mut rig, 3).made, files.len(), "all of it is made anew");
}

/// The service of the head was started again while the other was away.
#[test]
fn a_head_that_was_started_again_knows_what_has_changed() {
    let (mut rig, mut hand, files) = parted(7, 140);
    let before = came(&rig);
    rig.pass(2_000_000_000);
    hand.append_in(&mut rig, files[20], &write(files[20], 10, &[9; 10]));
    hand.sync(&mut rig);
    // (So long that it is put down what was published.)
    rig.pass(2_000_000_000);
    hand.append_in(&mut rig, files[21], &write(files[21], 10, &[9; 10]));
    hand.sync(&mut rig);
    rig.settle();
    let media = Arc::clone(&rig.regions[0]) as Arc<dyn Media>;
    let random = Random::new(99);
    rig.nodes[0] = Node::new(config_with(limits())(1), media, random).expect("a node");
    for n in 0..2 {
        view(&mut rig, n, 3, &[1], &[]);
    }
    rig.settle();
    back(&mut rig, 4);
    let told = comes_in(&mut rig, 4);
    assert!(told.ranges > 10, "it is brought there in place: {told:?}");
    assert!([20, 21].iter().all(|n| told.anew.contains(&files[*n])), "{told:?}");
    // (Of files beside them it is not known any more whether something was cloned into them: they are compared.)
    assert!(told.anew.len() < 90, "{} of 140", told.anew.len());
    let came = came(&rig).1 - before.1;
    assert!(came < 60_000, "{came} bytes were sent");
}

/// Ranges are cut at the same places, and all items are in one of them, however short they are.
#[test]
fn ranges_come_to_the_same_on_both() {
    let (mut rig, mut hand, _) = parted(6, 20);
    for n in 0..2 {
        view(&mut rig, n, 4, &[1], &[2]);
    }
    comes_in(&mut rig, 4);
    sparse(&mut rig, &mut hand, b"S", 120);
    rig.settle();
    let [a, b] = [0, 1].map(|n| rig.nodes[n].volume());
    for most in [1, 100, 1000, 100_000] {
        let (mut from, mut ranges) = (Some(Key::MIN), 0);
        while let Some(at) = from {
            let (comes_to, end) = a.items_come_to(at, RangeEnd::After(most), 9).expect("a tree");
            let there = b.items_come_to(at, RangeEnd::Before(end), 9).expect("a tree");
            assert_eq!((comes_to, end), there, "from {at:?}");
            assert_ne!(a.items_come_to(at, RangeEnd::Before(end), 10).expect("a tree").0, comes_to);
            (from, ranges) = (end, ranges + 1);
        }
        assert!(ranges > 2 || most > 1000, "{ranges} ranges of {most}");
    }
}

/// As those of offers, with names that come and go.
#[test]
fn it_goes_on_wherever_it_is_interrupted() {
    let draw = |random: &mut Random, limits: &mut Limits| {
        limits.history = [1024, 1024, 4, 1][random.below(4) as usize];
    };
    let names = |rig: &mut Rig,
                 hand: &mut Hand,
                 files: &mut Vec<InodeId>,
                 random: &mut Random,
                 n: u64| {
        let (at, root) = (random.below(files.len() as u64) as usize, InodeId::ROOT);
        let ino = files[at];
        match random.below(10) {
            0 if files.len() > 4 => {
                // By all the names that there can be.
                let named = rig.nodes[0].volume();
                let mut found = Vec::new();
                let done = named.readdir(root, 2, usize::MAX, &mut |name| {
                    found.extend((name.ino == ino).then(|| name.name.to_vec()));
                    true
                });
                done.expect("the root");
                for name in found {
                    let gone = Op::Unlink { ino, parent: root, name: &name, open: false };
                    hand.append_in(rig, root, &gone);
                }
                files.swap_remove(at);
                hand.sync(rig);
            }
            1 => {
                let name = format!("l{n}");
                let link = Op::Link { ino, parent: root, name: name.as_bytes() };
                hand.append_in(rig, root, &link);
                hand.sync(rig);
            }
            2 => {
                let value = vec![n as u8; random.below(2500) as usize];
                hand.append_in(rig, ino, &Op::SetXattr { ino, name: b"user.some", value: &value });
            }
            3 => {
                let block = random.below(180) * BLOCK_BYTES;
                hand.append_in(rig, ino, &write(ino, block, &[n as u8; BLOCK]));
            }
            _ => change(rig, hand, files, random, n),
        }
    };
    let begin = |rig: &mut Rig, hand: &mut Hand| {
        let mut files = (0..2u8).map(|n| sparse(rig, hand, &[b'A' + n], 60)).collect::<Vec<_>>();
        files.extend((0..40).map(|n| hand.create(rig, format!("g{n}").as_bytes(), 0o100_644)));
        files
    };
    let (_, deaths) = interrupted_with(0..60, draw, begin, names, |_| {});
    assert!(deaths > 30, "{deaths} deaths");
}

/// What goes wrong without it is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn what_differs_all_the_same_is_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 3] = [
        (Bug::ReconcileHoles, a_hole_where_content_was_is_one_there_as_well),
        (Bug::ReconcileKeeps, what_is_gone_or_has_another_name_goes_there_as_well),
        (Bug::ReconcileStale, what_is_the_same_is_not_named),
    ];
    assert_eq!(missed(&tests), []);
}
