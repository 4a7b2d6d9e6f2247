//! Who waits for an fsync waits for what lies before it in the stream: a log is taken a piece at a time while somebody else waits.

use std::collections::BTreeMap;

use base::Sequence;
use service::core::limits::Limits;
use service::core::schedule::Scheduler;
use service::core::{Event, NodeConfig};
use storage::format::control;
use storage::format::entry::Op;

use crate::rig::{Hand, Rig, config_with};

const PIECE: u64 = 4096;
const WINDOW: u64 = 8192;

fn write(hand: &mut Hand, ino: base::InodeId, offset: u64) -> Sequence {
    let data = [7; 2000];
    hand.append(&Op::Write { ino, offset, data: &data, clear_setid: false })
}

fn rig() -> Rig {
    rig_with(Scheduler::Urgent, &[])
}

fn rig_with(scheduler: Scheduler, weights: &[(u32, u32)]) -> Rig {
    let limits = Limits { shared_bytes: PIECE as usize, shared_window: WINDOW, ..Limits::SHIPPED };
    let weights: BTreeMap<u32, u32> = weights.iter().copied().collect();
    let config = config_with(limits);
    Rig::with(2, 8, move |n| NodeConfig { scheduler, weights: weights.clone(), ..config(n) })
}

/// What a client has in its log and waits for, before the service hears of it.
fn flood(rig: &mut Rig, hand: &mut Hand) -> (base::InodeId, u64) {
    let ino = hand.create(rig, b"flood", 0o100_644);
    hand.sync(rig);
    let before = hand.seq;
    for n in 0..30 {
        write(hand, ino, n * 2000);
    }
    hand.set(control::SYNC_REQUEST, hand.seq);
    (ino, before)
}

/// At the head and at another member; the flood's own fsync ends, too.
#[test]
fn a_flood_is_taken_a_piece_at_a_time_while_somebody_else_waits() {
    for n in [0, 1] {
        let mut rig = rig();
        let (mut greedy, mut polite) = (rig.attach(n, 0), rig.attach(n, 0));
        let ino = polite.create(&mut rig, b"polite", 0o100_644);
        let (_, before) = flood(&mut rig, &mut greedy);
        polite.sync(&mut rig);
        write(&mut polite, ino, 0);
        polite.set(control::SYNC_REQUEST, polite.seq);
        for hand in [&polite, &greedy] {
            rig.event(hand.n, Event::Doorbell(hand.client));
        }
        // Nothing is acknowledged: so much is on its way, and no more, however often it is looked at.
        for _ in 0..20 {
            rig.turn(n);
        }
        let sent = |hand: &Hand| {
            rig.nodes[n]
                .status()
                .clients
                .iter()
                .find(|c| c.client == hand.client)
                .map(|c| c.pending_bytes)
        };
        let entry = 2000 + 64;
        let most = WINDOW + PIECE + 2 * entry + (before + 1) * 256;
        let taken = sent(&greedy).expect("it is there");
        assert!(taken <= most && taken >= PIECE, "node {}: {taken} bytes of {}", n + 1, 30 * entry);
        // An acknowledgement lets more in; in the end all of both.
        polite.sync(&mut rig);
        greedy.sync(&mut rig);
        rig.check();
    }
}

/// Alone a client has all of it: one look takes all.
#[test]
fn alone_a_log_is_taken_whole() {
    let mut rig = rig();
    let mut greedy = rig.attach(0, 0);
    flood(&mut rig, &mut greedy);
    rig.event(0, Event::Doorbell(greedy.client));
    assert_eq!(greedy.word(control::SETTLED), greedy.seq, "it is in the stream");
    greedy.sync(&mut rig);
    rig.check();
}

/// Bytes that were taken of each of these floods while all go on, by a head that is told of acknowledgements now and then.
fn shares(rig: &mut Rig, uids: &[u32]) -> Vec<u64> {
    let mut hands: Vec<Hand> = uids.iter().map(|uid| rig.attach(0, *uid)).collect();
    let mut files = Vec::new();
    for (n, hand) in hands.iter_mut().enumerate() {
        files.push(hand.create(rig, format!("flood{n}").as_bytes(), 0o100_644));
        hand.sync(rig);
    }
    let begin: Vec<u64> = hands.iter().map(|hand| hand.word(control::SETTLED)).collect();
    for _ in 0..200 {
        for (hand, ino) in hands.iter_mut().zip(&files) {
            while hand.seq < hand.word(control::SETTLED) + 20 {
                write(hand, *ino, 0);
            }
            hand.set(control::SYNC_REQUEST, hand.seq);
            rig.event(0, Event::Doorbell(hand.client));
        }
        for _ in 0..3 {
            rig.turn(0);
        }
        for link in 0..rig.links.len() {
            rig.deliver(link);
        }
        rig.now += 100_000;
    }
    let taken = hands.iter().zip(begin).map(|(hand, begin)| hand.word(control::SETTLED) - begin);
    let taken = taken.collect();
    for hand in &mut hands {
        hand.sync(rig);
    }
    rig.check();
    taken
}

/// What each user got, of so many clients each; within 15 % of these shares.
fn divided(scheduler: Scheduler, weights: &[(u32, u32)], uids: &[u32], parts: &[u64]) {
    let mut rig = rig_with(scheduler, weights);
    let taken = shares(&mut rig, uids);
    let mut users: Vec<u32> = uids.to_vec();
    users.dedup();
    let of = |user: u32| {
        let of_it = taken.iter().zip(uids).filter(|(_, uid)| **uid == user);
        of_it.map(|(bytes, _)| *bytes).collect::<Vec<_>>()
    };
    let sums: Vec<u64> = users.iter().map(|user| of(*user).iter().sum()).collect();
    let (all, whole) = (sums.iter().sum::<u64>(), parts.iter().sum::<u64>());
    for (sum, part) in sums.iter().zip(parts) {
        let (got, due) = (sum * whole * 100, all * part * 100);
        assert!(
            got.abs_diff(due) <= due * 15 / 100,
            "{scheduler:?} {weights:?} {uids:?}: {taken:?}"
        );
    }
    // And the clients of a user take turns.
    for user in &users {
        let all = of(*user);
        let (least, most) = (all.iter().min().unwrap(), all.iter().max().unwrap());
        assert!(least * 10 >= most * 8, "{scheduler:?} {uids:?}: {taken:?}");
    }
}

#[test]
fn floods_take_turns() {
    divided(Scheduler::Urgent, &[], &[0, 0, 0], &[1]);
    divided(Scheduler::RoundRobin, &[], &[0, 0, 0], &[1]);
}

/// However many processes they have.
#[test]
fn users_share_by_their_weights() {
    divided(Scheduler::Urgent, &[], &[1, 1, 1, 1, 2], &[1, 1]);
    divided(Scheduler::Urgent, &[(1, 3)], &[1, 2], &[3, 1]);
    divided(Scheduler::Urgent, &[(2, 4)], &[1, 1, 1, 2], &[1, 4]);
    divided(Scheduler::RoundRobin, &[(2, 4)], &[1, 1, 1, 2], &[3, 1]);
}

/// A flood that is taken whole is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn a_flood_that_is_taken_whole_is_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 3] = [
        (Bug::FloodFirst, a_flood_is_taken_a_piece_at_a_time_while_somebody_else_waits),
        (Bug::LowestFirst, floods_take_turns),
        (Bug::LeftTakenForMissing, users_share_by_their_weights),
    ];
    assert_eq!(missed(&tests), []);
}
