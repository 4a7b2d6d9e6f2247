//! Regular files of which several clients write other bytes at once (`storage::format::control`, "Ranges").

use base::random::Random;
use base::{Errno, InodeId, NodeId};
use service::core::Event;
use service::core::limits::Limits;
use storage::format::Reader;
use storage::format::control::{self, LeaseMode};
use storage::format::entry::Op;
use storage::format::rpc::{InodeReply, Request, Span, WANT_REACH};

use crate::rig::{Hand, Rig, config_with};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;

/// A rig in which who waits once for a file of which he wants other bytes shares it.
fn rig(nodes: u32, seed: u64) -> Rig {
    let limits = Limits { joint_after: 1, ..Limits::SHIPPED };
    Rig::with(nodes, seed, config_with(limits))
}

/// Asks for bytes of a file, as LibFS does.
fn ask(rig: &mut Rig, hand: &Hand, ino: InodeId, (from, to): (u64, u64)) -> InodeReply {
    let body = hand.call(rig, &Request::Range { ino, flags: 0, from, to }).expect("a lease");
    InodeReply::decode(&mut Reader::new("reply", &body)).expect("a well formed reply")
}

fn block(n: u64) -> (u64, u64) {
    (n * BLOCK, (n + 1) * BLOCK)
}

fn write(hand: &mut Hand, ino: InodeId, offset: u64, data: &[u8]) {
    hand.append(&Op::Write { ino, offset, data, clear_setid: false });
}

/// A file of some blocks, and two clients, on these nodes, each with some of its bytes: the first from its begin on, the second from
/// its middle on.
fn pair(rig: &mut Rig, nodes: [usize; 2]) -> ([Hand; 2], InodeId, [Span; 2]) {
    let mut hands = nodes.map(|n| rig.attach(n, 0));
    let ino = hands[0].create(rig, b"shared", 0o100_666);
    write(&mut hands[0], ino, 0, &vec![1; (BLOCKS * BLOCK) as usize]);
    hands[0].sync(rig);
    let first = ask(rig, &hands[0], ino, block(0));
    assert_eq!(first.granted.word.mode(), LeaseMode::Write, "alone, as ever");
    // Each gets so much that the other has to give it back, until it is little enough.
    let mut last = [first.clone(), first];
    for n in [1, 0].into_iter().cycle().take(12) {
        if !hands[n].holds(last[n].granted) {
            last[n] = ask(rig, &hands[n], ino, block(BLOCKS / 2 * n as u64));
            assert_eq!(last[n].granted.word.mode(), LeaseMode::Joint);
        } else if n == 1 {
            break;
        }
    }
    assert!((0..2).all(|n| hands[n].holds(last[n].granted)), "nobody minds any more");
    (hands, ino, last.map(|reply| reply.span))
}

fn content(rig: &Rig, n: usize, ino: InodeId) -> Vec<u8> {
    let mut bytes = vec![0; (BLOCKS * BLOCK) as usize];
    let found = rig.nodes[n].volume().read_file(ino, 0, &mut bytes).expect("content");
    bytes.truncate(found);
    bytes
}

/// Each writes its own bytes, in any order, and nothing goes to and fro; all of it is there on all nodes, with the latest times.
#[test]
fn who_writes_other_bytes_takes_nothing() {
    for nodes in [[0, 0], [0, 1], [1, 1], [1, 2]] {
        for seed in 0..6 {
            let mut random = Random::new(seed);
            let mut rig = rig(3, seed);
            let (mut hands, ino, spans) = pair(&mut rig, nodes);
            assert!(spans[0].to <= spans[1].from || spans[1].to <= spans[0].from, "{spans:?}");
            let recalls = rig.nodes[0].counters().recalls;
            let mut model = vec![1; (BLOCKS * BLOCK) as usize];
            for step in 0..40u8 {
                let n = random.below(2) as usize;
                let end = spans[n].to.min(BLOCKS * BLOCK);
                let from = spans[n].from + random.below(end - spans[n].from);
                let len = 1 + random.below((end - from).min(9000));
                let data = vec![step + 2; len as usize];
                write(&mut hands[n], ino, from, &data);
                model[from as usize..(from + len) as usize].copy_from_slice(&data);
                if random.chance(1, 5) {
                    hands[random.below(2) as usize].ring(&mut rig);
                    rig.pass(1_000_000);
                }
            }
            hands.iter().for_each(|hand| hand.sync(&mut rig));
            rig.settle();
            assert_eq!(rig.nodes[0].counters().recalls, recalls, "{nodes:?}, seed {seed}");
            assert_eq!(hands.iter().map(Hand::refusals).sum::<u64>(), 0, "{nodes:?}, seed {seed}");
            for n in 0..3 {
                assert!(content(&rig, n, ino) == model, "{nodes:?}, seed {seed}: node {n}");
            }
            rig.check();
        }
    }
}

/// In whatever order the head hears of them.
#[test]
fn the_times_are_those_of_the_latest() {
    for order in [[0, 1], [1, 0]] {
        let mut rig = rig(3, 9);
        let (mut hands, ino, spans) = pair(&mut rig, [0, 1]);
        for n in order {
            let time = 5_000_000_000 + n as u64;
            let op = Op::Write { ino, offset: spans[n].from, data: b"x", clear_setid: false };
            hands[n].append_at(&op, time);
            hands[n].sync(&mut rig);
        }
        rig.settle();
        for node in &rig.nodes {
            let record = node.volume().attr(ino).expect("sound").expect("there");
            assert_eq!((record.mtime.sec, record.mtime.nsec), (5, 1), "{order:?}");
            assert_eq!(record.ctime, record.mtime);
        }
        rig.check();
    }
}

/// What is not its own, and what is behind the end, nobody may write under such a lease.
#[test]
fn who_writes_what_is_not_his_is_refused() {
    for nodes in [[0, 0], [1, 2]] {
        let size = BLOCKS * BLOCK;
        for (at, len, refused) in
            [(0, 10, false), (BLOCKS / 2 * BLOCK, 1, true), (size - 1, 1, true), (size, 1, true)]
        {
            let mut rig = rig(3, 5);
            let (mut hands, ino, [own, _]) = pair(&mut rig, nodes);
            assert!(own.from == 0 && own.to <= BLOCKS / 2 * BLOCK, "{own:?}");
            write(&mut hands[0], ino, at, &vec![9; len]);
            hands[0].sync(&mut rig);
            rig.settle();
            assert_eq!(hands[0].refusals() > 0, refused, "{nodes:?}: {len} at {at}");
            assert_eq!(content(&rig, 2, ino).contains(&9), !refused);
            rig.check();
        }
        // Nor anything else of it.
        let mut rig = rig(3, 5);
        let (mut hands, ino, _) = pair(&mut rig, nodes);
        hands[0].append(&Op::Truncate { ino, size: 0, clear_setid: false });
        hands[0].sync(&mut rig);
        assert_eq!(hands[0].refusals(), 1);
        assert_eq!(content(&rig, 1, ino).len() as u64, size);
    }
}

/// Who wants some of somebody's bytes, or all of the file, gets them when that one has given all of his back, and sees what he wrote.
#[test]
fn who_wants_anothers_bytes_sees_what_was_written() {
    for nodes in [[0, 0], [0, 1], [1, 0], [1, 2]] {
        for whole in [false, true] {
            let mut rig = rig(3, 3);
            let (mut hands, ino, _) = pair(&mut rig, nodes);
            // (Nobody is known to have asked for it last: those who mean the same bytes share nothing.)
            ask(&mut rig, &hands[0], ino, block(2));
            let own = ask(&mut rig, &hands[0], ino, block(3));
            let third = rig.attach(2, 0);
            ask(&mut rig, &third, ino, block(BLOCKS - 1));
            write(&mut hands[0], ino, 2 * BLOCK, b"by the first");
            let got = match whole {
                true => hands[1].lease(&mut rig, ino, LeaseMode::Read).expect("a lease"),
                false => ask(&mut rig, &hands[1], ino, block(2)),
            };
            assert!(hands[1].holds(got.granted) && !hands[0].holds(own.granted), "{nodes:?}");
            let n = nodes[1];
            assert_eq!(&content(&rig, n, ino)[2 * BLOCK as usize..][..12], b"by the first");
            if whole {
                assert_eq!(got.record.size, BLOCKS * BLOCK);
                assert!(got.complete && !got.extents.is_empty(), "all of it is known");
            } else {
                assert_eq!(got.granted.word.mode(), LeaseMode::Joint);
                // What it was granted before it has no more, and is told so.
                let again = ask(&mut rig, &hands[0], ino, block(8));
                assert_ne!(again.since, own.since);
                let more = ask(&mut rig, &hands[0], ino, block(9));
                assert_eq!(more.since, again.since, "it has had it since then");
            }
            rig.check();
        }
    }
}

/// Who syncs the file waits until every member has what the others wrote, which nobody has read of their logs; and takes nothing from them.
#[test]
fn who_syncs_waits_for_what_others_wrote() {
    for nodes in [[0, 0], [0, 1], [1, 0], [1, 2]] {
        let mut rig = rig(3, 6);
        let (mut hands, ino, spans) = pair(&mut rig, nodes);
        rig.settle();
        let recalls = rig.nodes[0].counters().recalls;
        // (Nobody rings: it lies in the log until somebody looks.)
        let op =
            Op::Write { ino, offset: spans[1].from, data: b"by the other", clear_setid: false };
        hands[1].append_at(&op, 5_000_000_000);
        let reach = Request::Inode { ino, mode: LeaseMode::None, flags: WANT_REACH };
        hands[0].post(0, &reach, 0);
        rig.event(hands[0].n, Event::Doorbell(hands[0].client));
        for _ in 0..25 {
            rig.deliver_all();
            if hands[0].has_reply(0) {
                break;
            }
            rig.pass(60_000);
        }
        assert!(hands[0].has_reply(0), "{nodes:?}");
        let record = rig.nodes[0].volume().attr(ino).expect("sound").expect("there");
        assert_eq!(record.mtime.sec, 5, "{nodes:?}: the head knows of it when that is answered");
        rig.settle();
        let at = spans[1].from as usize;
        for node in 0..3 {
            assert_eq!(
                &content(&rig, node, ino)[at..at + 12],
                b"by the other",
                "{nodes:?}, {node}"
            );
        }
        assert_eq!(rig.nodes[0].counters().recalls, recalls, "{nodes:?}");
        rig.check();
    }
}

/// The other ends, or its link breaks, or the head does, while it is waited for.
#[test]
fn who_syncs_waits_for_nobody_who_is_gone() {
    for what in 0..4 {
        let mut rig = rig(3, 6);
        let (mut hands, ino, spans) = pair(&mut rig, [1, 2]);
        rig.settle();
        write(&mut hands[1], ino, spans[1].from, b"by the other");
        let reach = Request::Inode { ino, mode: LeaseMode::None, flags: WANT_REACH };
        hands[0].post(0, &reach, 0);
        rig.event(hands[0].n, Event::Doorbell(hands[0].client));
        match what {
            0 => rig.event(2, Event::ClientGone(hands[1].client)),
            1 => rig.renew(NodeId(1), NodeId(3)),
            2 => rig.renew(NodeId(1), NodeId(2)),
            _ => rig.cut_to(2, &[2, 3]),
        }
        for _ in 0..20 {
            rig.settle();
        }
        assert!(hands[0].reply(0).is_some(), "case {what}");
        let at = spans[1].from as usize;
        assert_eq!(&content(&rig, 1, ino)[at..at + 12], b"by the other", "case {what}");
        rig.check();
    }
}

/// What it has written itself is published before it is shown where its blocks lie (seed 619 of `shared-bytes`).
#[test]
fn who_is_shown_blocks_is_shown_published_ones() {
    let mut rig = rig(3, 6);
    let (mut hands, ino, spans) = pair(&mut rig, [0, 0]);
    rig.settle();
    write(&mut hands[0], ino, spans[0].from + 100, b"in a block");
    let seq = hands[0].seq;
    hands[0].set(control::SYNC_REQUEST, seq);
    rig.event(hands[0].n, Event::Doorbell(hands[0].client));
    rig.deliver_all();
    assert!(hands[0].word(control::SETTLED) >= seq, "the head has it");
    assert!(hands[0].word(control::PUBLISHED) < seq, "and has not published it");
    hands[0].post(0, &Request::Extents { ino, from: 0 }, 0);
    rig.event(hands[0].n, Event::Doorbell(hands[0].client));
    for _ in 0..200 {
        if hands[0].has_reply(0) {
            break;
        }
        rig.deliver_all();
        rig.pass(60_000);
    }
    assert!(hands[0].has_reply(0) && hands[0].word(control::PUBLISHED) >= seq);
    rig.check();
}

/// A head that takes over does not know who has which bytes: it believes those who have some, and gives nobody any before they are back.
#[test]
fn a_new_head_believes_those_who_have_some() {
    let mut rig = rig(3, 8);
    let (mut hands, ino, spans) = pair(&mut rig, [1, 2]);
    write(&mut hands[0], ino, spans[0].from, b"first");
    write(&mut hands[1], ino, spans[1].from, b"second");
    rig.cut_to(2, &[2, 3]);
    rig.settle();
    hands.iter().for_each(|hand| hand.sync(&mut rig));
    assert_eq!(hands.iter().map(Hand::refusals).sum::<u64>(), 0, "they had these bytes");
    assert_eq!(&content(&rig, 2, ino)[spans[0].from as usize..][..5], b"first");
    assert_eq!(&content(&rig, 1, ino)[spans[1].from as usize..][..6], b"second");
    let third = rig.attach(1, 0);
    let got = ask(&mut rig, &third, ino, block(BLOCKS - 1));
    assert!(third.holds(got.granted));
    let had = |hand: &Hand| {
        (0..8).any(|slot| {
            let word = hand.word(control::lease_word(slot));
            hand.word(control::lease_word(slot) - 8) == ino.0 && word != 0
        })
    };
    assert!(!hands.iter().any(had), "what they had came back");
    rig.check();
}

/// Who asks for the same bytes, for more than there are, or of a directory, is given all or nothing.
#[test]
fn what_cannot_be_shared_is_not() {
    let mut rig = rig(3, 4);
    let hands = [0, 1].map(|n| rig.attach(n, 0));
    let mut first = rig.attach(0, 0);
    let ino = first.create(&mut rig, b"file", 0o100_666);
    write(&mut first, ino, 0, &[1; 10_000]);
    first.sync(&mut rig);
    for round in 0..6 {
        for hand in &hands {
            let got = ask(&mut rig, hand, ino, (100, 200));
            let alone = got.granted.word.mode() == LeaseMode::Write;
            assert!(alone || round < 2, "round {round}: the same");
        }
    }
    for (n, span) in
        [(0, (0, 4000)), (1, (9999, 10_001)), (0, (8192, u64::MAX)), (1, (1 << 50, 1 << 51))]
    {
        let got = ask(&mut rig, &hands[n], ino, span);
        if span.1 > 10_000 {
            assert_eq!(got.granted.word.mode(), LeaseMode::Write, "{span:?}");
        }
    }
    for hand in &hands {
        let got = ask(&mut rig, hand, InodeId::ROOT, (0, 1));
        assert_eq!((got.granted.word.mode(), got.since), (LeaseMode::Write, 0));
    }
    let none = Request::Range { ino: InodeId(1 << 40), flags: 0, from: 0, to: 1 };
    assert_eq!(hands[0].call(&mut rig, &none).err(), Some(Errno::NOENT));
    rig.check();
}

/// Nobody makes the head remember more than it will.
#[test]
fn of_how_many_spans_is_bounded() {
    let limits = Limits { joint_after: 1, ranges: 4, ..Limits::SHIPPED };
    let mut rig = Rig::with(1, 2, config_with(limits));
    let mut hands = [0, 0].map(|n| rig.attach(n, 0));
    let ino = hands[0].create(&mut rig, b"file", 0o100_666);
    // Granules of a MiB: the ends of a large file, of which nothing is there.
    hands[0].append(&Op::Truncate { ino, size: 1 << 30, clear_setid: false });
    hands[0].sync(&mut rig);
    let mut modes = Vec::new();
    for n in 0..40u64 {
        let hand = &hands[(n % 2) as usize];
        let got = ask(&mut rig, hand, ino, ((n * 5) << 20, ((n * 5) << 20) + 10));
        modes.push(got.granted.word.mode());
    }
    assert!(modes.iter().filter(|mode| **mode == LeaseMode::Joint).count() > 20, "{modes:?}");
    assert!(modes[2..].contains(&LeaseMode::Write), "{modes:?}");
    rig.check();
}

/// What is taken out is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn rules_that_are_taken_out_are_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 7] = [
        (Bug::RangeHalfPublished, who_is_shown_blocks_is_shown_published_ones),
        (Bug::SyncSharedAlone, who_syncs_waits_for_what_others_wrote),
        (Bug::RangeUnjudged, who_wants_anothers_bytes_sees_what_was_written),
        (Bug::RangeTimesByOrder, the_times_are_those_of_the_latest),
        (Bug::RangeGrantStale, who_wants_anothers_bytes_sees_what_was_written),
        (Bug::RangeWriteUnjudged, who_writes_what_is_not_his_is_refused),
        (Bug::RangesUnreported, a_new_head_believes_those_who_have_some),
    ];
    assert_eq!(missed(&tests), []);
}
