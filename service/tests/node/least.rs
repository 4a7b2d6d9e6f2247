//! `min_replicas`: what fewer members hold than the volume asks for is not acknowledged, and what waits goes on as soon as
//! they are enough.

use base::{Epoch, InodeId, NodeId};
use service::core::Event;
use storage::format::control;
use storage::format::entry::Op;

use crate::rig::{Hand, Rig, create};

const ONE: NodeId = NodeId(1);
const TWO: NodeId = NodeId(2);

fn view(rig: &mut Rig, epoch: u32, chain: &[NodeId], syncing: &[NodeId]) {
    for n in 0..rig.nodes.len() {
        let (chain, syncing) = (chain.to_vec(), syncing.to_vec());
        rig.event(n, Event::View { epoch: Epoch(epoch), chain, syncing, lapse: 0 });
    }
}

fn wants_sync(rig: &mut Rig, hand: &Hand) {
    hand.set(control::SYNC_REQUEST, hand.seq);
    rig.event(hand.n, Event::Doorbell(hand.client));
    rig.settle();
}

fn is_synced(hand: &Hand) -> bool {
    hand.word(control::REPLICATED) >= hand.seq
}

/// Two nodes of which both must hold it; a client at the first.
fn both() -> (Rig, Hand, InodeId) {
    let mut rig = Rig::new(2, 7);
    for n in 0..2 {
        rig.event(n, Event::Needs { members: 2, replicas: 2 });
    }
    let mut hand = rig.attach(0, 0);
    let file = hand.create(&mut rig, b"file", 0o100_644);
    hand.sync(&mut rig);
    (rig, hand, file)
}

fn write(hand: &mut Hand, ino: InodeId, byte: u8) {
    hand.append(&Op::Write { ino, offset: 0, data: &[byte; 3000], clear_setid: false });
}

#[test]
fn a_chain_with_too_few_members_acknowledges_nothing_until_one_has_joined() {
    let (mut rig, mut hand, file) = both();
    view(&mut rig, 2, &[ONE], &[]);
    assert!(rig.nodes[0].status().too_few);
    let acknowledged = rig.nodes[0].acknowledged();
    write(&mut hand, file, 1);
    wants_sync(&mut rig, &hand);
    // It is in the stream, and published; its own client reads it.
    assert!(hand.word(control::SETTLED) >= hand.seq && !is_synced(&hand));
    assert_eq!(rig.nodes[0].acknowledged(), acknowledged);
    // Whoever joins holds everything before it is in the chain, and counts from then on.
    view(&mut rig, 2, &[ONE], &[TWO]);
    for _ in 0..30 {
        rig.pass(50_000_000);
        rig.deliver_all();
    }
    assert!(is_synced(&hand) && !rig.nodes[0].status().too_few);
    assert_eq!(rig.nodes[1].position(), rig.nodes[0].position());
    view(&mut rig, 3, &[ONE, TWO], &[]);
    rig.settle();
    write(&mut hand, file, 2);
    hand.sync(&mut rig);
    rig.settle();
    rig.check();
}

#[test]
fn a_new_head_that_is_too_few_acknowledges_nothing_of_what_the_old_one_had_not() {
    let (mut rig, _, file) = both();
    let mut other = rig.attach(1, 0);
    let (ino, _) = other.numbers(&mut rig, 1)[0];
    other.append_in(&mut rig, InodeId::ROOT, &create(ino, InodeId::ROOT, b"other", 0o100_644, 0));
    other.sync(&mut rig);
    view(&mut rig, 2, &[TWO], &[]);
    write(&mut other, ino, 3);
    wants_sync(&mut rig, &other);
    assert!(other.word(control::SETTLED) >= other.seq && !is_synced(&other), "{file}");
    // A person lowers what the volume asks for.
    rig.event(1, Event::Needs { members: 1, replicas: 2 });
    rig.settle();
    assert!(is_synced(&other));
}

/// The stream ring runs full while nothing is acknowledged: that is a pause for who writes, and no end of the service.
#[test]
fn writers_pause_when_the_ring_is_full_of_what_is_not_acknowledged() {
    let (mut rig, mut hand, file) = both();
    // (What one has made another sees when it is acknowledged.)
    let mut others: Vec<(Hand, InodeId)> = Vec::new();
    for n in 1..6 {
        let mut other = rig.attach(0, 0);
        let ino = other.create(&mut rig, &[b'f', n], 0o100_644);
        other.sync(&mut rig);
        others.push((other, ino));
    }
    view(&mut rig, 2, &[ONE], &[]);
    for n in 0..3 {
        // (The log of the test has no laps.)
        let data = vec![n; 1 << 20];
        hand.append(&Op::Write { ino: file, offset: 0, data: &data, clear_setid: false });
        for (other, ino) in &mut others {
            other.append(&Op::Write { ino: *ino, offset: 0, data: &data, clear_setid: false });
        }
    }
    for (other, _) in &others {
        wants_sync(&mut rig, other);
    }
    wants_sync(&mut rig, &hand);
    let all = || others.iter().map(|(other, _)| other).chain([&hand]);
    assert!(all().all(|hand| !is_synced(hand)));
    assert!(all().any(|hand| hand.word(control::SETTLED) < hand.seq), "the ring is full");
    rig.event(0, Event::Needs { members: 1, replicas: 2 });
    for _ in 0..10 {
        rig.settle();
    }
    assert!(all().all(|hand| is_synced(hand) && hand.refusals() == 0));
    rig.check();
}
