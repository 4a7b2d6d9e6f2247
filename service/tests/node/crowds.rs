//! One user takes no place from others.

use base::{Errno, InodeId};
use service::core::{Event, NodeConfig, PerUser};
use storage::format::control::{self, LeaseMode};
use storage::format::rpc::Request;

use crate::rig::{Hand, Rig, config};

const MS: u64 = 1_000_000;

fn bounded(per_user: PerUser) -> impl Fn(u32) -> NodeConfig {
    move |node| NodeConfig { per_user, ..config(node) }
}

#[test]
fn one_user_attaches_as_often_as_it_may_and_root_and_others_still_find_a_place() {
    let mut rig = Rig::new(1, 1);
    let taken = (0..20).filter(|_| rig.try_attach(0, 7)).count();
    assert_eq!(taken, 6, "as the limit for a user is");
    assert_eq!(rig.refused, vec![Errno::NFILE; 14]);
    assert_eq!(rig.nodes[0].status().counters.crowded_out, 14);
    assert!(rig.try_attach(0, 8), "another user");
    assert!(rig.try_attach(0, 0), "root");
    assert!(!rig.try_attach(0, 0), "there are eight places");
}

/// So many files that everybody may read.
fn files(rig: &mut Rig, count: usize) -> Vec<InodeId> {
    let mut root = rig.attach(0, 0);
    let made = (0..count).map(|i| root.create(rig, format!("f{i}").as_bytes(), 0o100_644));
    let made = made.collect();
    root.sync(rig);
    rig.settle();
    made
}

fn leases(rig: &Rig, uid: u32) -> usize {
    let clients = rig.nodes[0].status().clients;
    clients.iter().filter(|c| c.uid == uid).map(|c| c.leases).sum()
}

/// A user with two clients has as many leases as it may, however many it asks for; each is granted, and takes one back.
#[test]
fn one_user_has_so_many_leases_and_no_more() {
    let mut rig = Rig::with(1, 5, bounded(PerUser { leases: 10, ..PerUser::SHIPPED }));
    let all = files(&mut rig, 40);
    let (one, two, other) = (rig.attach(0, 7), rig.attach(0, 7), rig.attach(0, 8));
    for (i, ino) in all.iter().enumerate() {
        let hand = if i % 2 == 0 { &one } else { &two };
        assert!(hand.lease(&mut rig, *ino, LeaseMode::Read).is_ok(), "lease {i}");
        other.lease(&mut rig, *ino, LeaseMode::Read).expect("another's lease");
        rig.pass(MS);
        assert!(leases(&rig, 7) <= 12, "{} leases", leases(&rig, 7));
        assert!(leases(&rig, 8) <= 12, "{} leases", leases(&rig, 8));
    }
    rig.settle();
    assert!((8..=10).contains(&leases(&rig, 7)), "{} leases", leases(&rig, 7));
    assert!(rig.nodes[0].counters().leases_over >= 60);
    let root = rig.attach(0, 0);
    for ino in &all {
        root.lease(&mut rig, *ino, LeaseMode::Read).expect("root's lease");
    }
    assert!(leases(&rig, 0) >= 40, "root has as many as it wants");
    // What was taken back is at the head as well.
    assert!(rig.nodes[0].status().leases <= 40 + 2 * 12 + 1);
    rig.check();
}

/// Asks as fast as answers come, for so long; how many came.
fn asks(rig: &mut Rig, hands: &[&Hand], time: u64) -> u64 {
    let (mut answers, end) = (0, rig.now + time);
    for hand in hands {
        hand.post(0, &Request::StatFs, 0);
    }
    while rig.now < end {
        for hand in hands {
            rig.event(0, Event::Doorbell(hand.client));
            if hand.reply(0).is_some() {
                answers += 1;
                hand.post(0, &Request::StatFs, 0);
            }
        }
        rig.pass(MS / 10);
    }
    answers
}

/// A user's requests beyond so many a second wait, and are answered; others' do not wait for them, nor does what
/// gives something back.
#[test]
fn one_user_asks_so_fast_and_no_faster() {
    let mut rig = Rig::with(1, 7, bounded(PerUser { requests: 100, ..PerUser::SHIPPED }));
    let (one, two, other) = (rig.attach(0, 7), rig.attach(0, 7), rig.attach(0, 8));
    // A second's worth may be saved up.
    let first = asks(&mut rig, &[&one, &two], 1000 * MS);
    assert!((190..=205).contains(&first), "{first} answers in the first second");
    let then = asks(&mut rig, &[&one, &two], 1000 * MS);
    assert!((95..=105).contains(&then), "{then} answers in the second");
    assert!(rig.nodes[0].counters().throttled > 0);
    assert!(one.reply(0).is_none() && two.reply(0).is_none());
    // Nothing of it is another's business.
    other.post(0, &Request::StatFs, 0);
    rig.event(0, Event::Doorbell(other.client));
    assert!(other.reply(0).is_some());
    one.post(1, &Request::Release { slots: vec![] }, 0);
    rig.event(0, Event::Doorbell(one.client));
    assert!(one.reply(1).is_some(), "what gives back does not wait");
    // The node sleeps meanwhile, and wakes for them by itself.
    assert!(rig.nodes[0].prepare_to_sleep() || rig.nodes[0].deadline().is_some());
    let due = rig.nodes[0].deadline().expect("a time to look again");
    assert!(due > rig.now && due <= rig.now + 20 * MS, "in {} ns", due - rig.now);
    rig.pass(20 * MS);
    rig.pass(20 * MS);
    assert!(one.reply(0).is_some() && two.reply(0).is_some(), "none is forgotten");
}

/// Has a client expelled: it stays inside an operation when a lease of its is wanted.
fn expel(rig: &mut Rig, ino: InodeId, uid: u32) -> bool {
    if !rig.try_attach(0, uid) {
        return false;
    }
    let hand = rig.last_attached(0, uid);
    hand.lease(rig, ino, LeaseMode::Read).expect("a lease");
    hand.set(control::in_op(0), 1);
    let root = rig.attach(0, 0);
    root.lease(rig, ino, LeaseMode::Write).expect("a lease, after a second");
    assert!(rig.detached.contains(&hand.client));
    rig.event(0, Event::ClientGone(hand.client));
    rig.event(0, Event::ClientGone(root.client));
    for _ in 0..20 {
        rig.pass(MS);
    }
    true
}

/// Whose clients are expelled again and again waits longer and longer before the next attaches; others do not, and it is
/// forgotten in time.
#[test]
fn expulsions_have_a_price() {
    let mut rig = Rig::new(1, 9);
    let ino = files(&mut rig, 1)[0];
    let (mut waits, mut begin) = (Vec::new(), 0);
    while waits.len() < 12 {
        if expel(&mut rig, ino, 7) {
            waits.push(begin);
            begin = 0;
        } else {
            if begin == 0 {
                assert!(rig.try_attach(0, 8), "another user waits as well");
                let other = rig.last_attached(0, 8).client;
                rig.event(0, Event::ClientGone(other));
            }
            rig.pass(10 * MS);
            begin += 10;
        }
        assert!(begin <= 31_000, "for ever");
    }
    // Milliseconds that were waited: nothing the first times, then about twice as long each time.
    assert!(waits[..2].iter().all(|ms| *ms <= 20), "{waits:?}");
    assert!(waits[11] >= 25_000, "{waits:?}");
    assert!(waits.windows(2).all(|w| w[1] + 20 >= w[0]), "{waits:?}");
    assert!(rig.nodes[0].counters().barred > 0);
    assert_eq!(rig.nodes[0].counters().expelled, 12);
    for _ in 0..13 * 60 {
        rig.pass(1000 * MS);
    }
    assert!(expel(&mut rig, ino, 7) && rig.try_attach(0, 7), "it is forgotten");
}

/// That a kernel keeps something is believed of root's clients. Who else sets the bit is not waited for.
#[test]
fn nobody_waits_for_what_a_program_says_that_a_kernel_keeps() {
    let mut rig = Rig::new(1, 11);
    let ino = files(&mut rig, 1)[0];
    let (program, mount, root) = (rig.attach(0, 7), rig.attach(0, 0), rig.attach(0, 0));
    assert!(!program.descriptor.keeps && mount.descriptor.keeps);
    for (hand, waited) in [(&program, false), (&mount, true)] {
        let granted = hand.lease(&mut rig, ino, LeaseMode::Read).expect("a lease").granted;
        let (word, bit) = control::kept(granted.slot);
        hand.set(word, hand.word(word) | bit);
        rig.pass(MS);
        let begin = rig.now;
        root.post(0, &Request::Inode { ino, mode: LeaseMode::Write, flags: 0 }, 0);
        rig.event(0, Event::Doorbell(root.client));
        while root.reply(0).is_none() {
            rig.pass(MS / 10);
            if rig.now > begin + 20 * MS && hand.word(word) & bit != 0 && waited {
                hand.set(word, hand.word(word) & !bit);
            }
        }
        let took = (rig.now - begin) / MS;
        assert_eq!(took >= 20, waited, "{took} ms");
        root.post(1, &Request::Release { slots: vec![0] }, 0);
    }
    assert_eq!(rig.nodes[0].counters().expelled, 0);
}

/// Each of these limits, taken out, is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variants are one for the whole process"]
fn limits_that_are_not_there_are_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 4] = [
        (Bug::LeasesUncounted, one_user_has_so_many_leases_and_no_more),
        (Bug::RequestsUncounted, one_user_asks_so_fast_and_no_faster),
        (Bug::ExpelledFree, expulsions_have_a_price),
        (Bug::KeptOfAnyone, nobody_waits_for_what_a_program_says_that_a_kernel_keeps),
    ];
    assert_eq!(missed(&tests), []);
}
