//! Whose word counts for a rotten block, and when it is lost; and what nothing may be compared with.

use std::collections::VecDeque;
use std::sync::Arc;

use base::random::Random;
use base::{Errno, InodeId, NodeId, StreamSeq, crc32c};
use service::core::event::COPIES_MAX;
use service::core::heal::Answer;
use service::core::limits::Limits;
use service::core::message::{self, Message};
use service::core::{Copier, Event};
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::rpc::Request;
use storage::format::sum::{Sum, sum_at};
use storage::limits::BLOCK_BYTES;
use storage::media::Media;
use storage::volume::{CopyItem, Volume, run_copies};

use crate::rig::{Hand, Rig, config_with};
use crate::scrub::{Nobody, filled, flip, flip_in, place, rotten, scrub, view, write};

const BLOCK: usize = BLOCK_BYTES as usize;
const SECOND: u64 = 1_000_000_000;

/// Flips a bit, and makes the checksum say that this is right.
fn bless(rig: &Rig, n: usize, ino: InodeId, offset: u64) {
    flip_in(rig, n, ino, offset);
    let (segment, at) = place(rig.nodes[n].volume(), ino, offset);
    let block = at / BLOCK_BYTES;
    let mut bytes = vec![0; BLOCK];
    rig.regions[n].read(segment, block * BLOCK_BYTES, &mut bytes).expect("a block");
    let sum = Sum::new(crc32c(0, &bytes), StreamSeq(1));
    let at = sum_at(rig.nodes[n].volume().sums_base().expect("sums"), block);
    rig.regions[n].damage(segment, at, &sum.encode()).expect("an entry");
}

/// Flips a bit of a block's entry.
fn flip_sum(rig: &Rig, n: usize, ino: InodeId, offset: u64) {
    let (segment, at) = place(rig.nodes[n].volume(), ino, offset);
    let base = rig.nodes[n].volume().sums_base().expect("sums");
    flip(rig, n, segment, sum_at(base, at / BLOCK_BYTES));
}

fn block_of(rig: &Rig, n: usize, ino: InodeId, block: u64) -> Vec<u8> {
    let (segment, at) = place(rig.nodes[n].volume(), ino, block * BLOCK_BYTES);
    let mut bytes = vec![0; BLOCK];
    rig.regions[n].read(segment, at, &mut bytes).expect("a block");
    bytes
}

/// Time passes, and messages arrive.
fn wait(rig: &mut Rig, nanos: u64) {
    for _ in 0..nanos / 20_000_000 {
        rig.pass(20_000_000);
        rig.deliver_all();
    }
}

/// Takes the questions for blocks that node `n` has asked node `of`.
fn questions(rig: &mut Rig, n: u32, of: u32) -> usize {
    let link = rig.links.iter_mut().find(|l| (l.0, l.1) == (NodeId(of), NodeId(n)));
    let (_, _, queue) = link.expect("a link");
    let all = queue.len();
    queue.retain(|(kind, _)| *kind != message::BLOCK_WANT);
    all - queue.len()
}

/// Node 2 answers node 1.
fn answer(rig: &mut Rig, ino: InodeId, seq: StreamSeq, answer: Answer, bytes: Vec<u8>) {
    let epoch = rig.nodes[0].status().epoch;
    let (kind, body) = Message::Block { ino, block: 1, seq, answer, bytes }.into_body(epoch);
    rig.event(0, Event::Frame { from: NodeId(2), kind, body: body.to_vec().into() });
}

#[test]
pub fn what_is_proved_goes_before_what_is_the_same() {
    let (mut rig, _, files) = filled(3, 21);
    let (ino, right) = (files[0], vec![1; BLOCK]);
    // The member that is asked first has it wrong, and does not know; the last has it right.
    bless(&rig, 1, ino, 5000);
    flip_in(&rig, 0, ino, 4100);
    scrub(&mut rig, 0);
    assert!(block_of(&rig, 0, ino, 1) == right, "the rot of another is taken");
    let mended = |rig: &Rig| rig.nodes[0].status().counters.mended;
    assert_eq!((mended(&rig), rotten(&rig, 0)), (1, 0));
    // Now nothing says here what is right, and the others do not agree: nobody's word is taken.
    flip_sum(&rig, 0, ino, 5000);
    rig.event(0, Event::Scrub);
    wait(&mut rig, SECOND);
    let status = rig.nodes[0].status();
    assert_eq!((status.scrub.rotten, status.scrub.lost, mended(&rig)), (1, 1, 1));
    // They do again.
    bless(&rig, 1, ino, 5000);
    wait(&mut rig, 3 * SECOND);
    assert!(block_of(&rig, 0, ino, 1) == right);
    assert_eq!((rig.nodes[0].status().scrub.rotten, mended(&rig), rotten(&rig, 0)), (0, 2, 0));
}

#[test]
pub fn who_says_nothing_may_have_it() {
    let (mut rig, hand, files) = filled(2, 22);
    let ino = files[0];
    flip_in(&rig, 0, ino, 5000);
    hand.post(0, &Request::Read { ino, offset: 4096, len: 4096 }, hand.seq);
    rig.event(0, Event::Doorbell(hand.client));
    let mut asked = 0;
    for _ in 0..25 * 5 {
        rig.pass(200_000_000);
        asked += questions(&mut rig, 1, 2);
        rig.deliver_all();
        assert_eq!(rig.nodes[0].status().scrub.lost, 0);
        assert!(!hand.has_reply(0), "a member has it, and was not heard");
    }
    // (Again and again for 25 s, and less and less often.)
    assert!((10..=60).contains(&asked), "{asked}");
    // Nobody waits for ever.
    for _ in 0..10 * 5 {
        rig.pass(200_000_000);
        questions(&mut rig, 1, 2);
    }
    let body = hand.reply(0).expect("an answer");
    let status = storage::format::rpc::reply_status(&body).expect("a status").0;
    assert_eq!(status.map(|()| 0), Err(Errno::IO));
    // He is heard again.
    wait(&mut rig, SECOND);
    assert_eq!(rotten(&rig, 0), 0);
    let read = Request::Read { ino, offset: 4096, len: 4096 };
    assert_eq!(hand.call(&mut rig, &read), Ok(vec![1; BLOCK]));
}

/// A member that cannot say now, or is of another state, has not said that it has no such block.
#[test]
fn lost_is_what_all_have_said() {
    let (mut rig, _, files) = filled(2, 23);
    let ino = files[0];
    let published = rig.nodes[0].status().published;
    flip_in(&rig, 0, ino, 5000);
    rig.event(0, Event::Scrub);
    let lost = |rig: &Rig| rig.nodes[0].status().scrub.lost;
    let mut told = 0;
    let says = [
        (Answer::Later, published, 0),
        (Answer::None, StreamSeq(0), 0),
        (Answer::None, StreamSeq(published.0 + 1), 0),
        (Answer::None, published, 1),
        (Answer::Later, published, 0),
        (Answer::Rotten, published, 1),
    ];
    for _ in 0..400 {
        rig.pass(20_000_000);
        if questions(&mut rig, 1, 2) > 0 && told < says.len() {
            let (what, seq, then) = says[told];
            told += 1;
            answer(&mut rig, ino, seq, what, Vec::new());
            assert_eq!(lost(&rig), then, "{what:?} {seq}");
        }
    }
    assert_eq!((told, lost(&rig)), (says.len(), 0), "it is asked again, and nobody answers");
    // It is said again; and a member that is back may have it.
    wait(&mut rig, SECOND);
    assert_eq!(rotten(&rig, 0), 0);
    for n in [0, 1] {
        flip_in(&rig, n, ino, 5000);
        rig.event(n, Event::Scrub);
    }
    wait(&mut rig, 2 * SECOND);
    assert_eq!(lost(&rig), 1);
    rig.event(0, Event::PeerUp(NodeId(2)));
    assert_eq!(lost(&rig), 0);
    wait(&mut rig, 2 * SECOND);
    assert_eq!(lost(&rig), 1);
    view(&mut rig, 0, 2, &[1, 2], &[]);
    assert_eq!(lost(&rig), 0);
}

/// What a member says of a state that never comes is not waited for.
#[test]
pub fn an_answer_from_the_future_keeps_nobody() {
    let (mut rig, _, files) = filled(2, 24);
    let ino = files[0];
    flip_in(&rig, 0, ino, 5000);
    rig.event(0, Event::Scrub);
    let mut lies = 0;
    for _ in 0..100 {
        rig.pass(20_000_000);
        if lies < 2 && questions(&mut rig, 1, 2) > 0 {
            lies += 1;
            answer(&mut rig, ino, StreamSeq(1 << 62), Answer::Right, vec![9; BLOCK]);
        }
        rig.deliver_all();
    }
    assert_eq!(lies, 2);
    assert_eq!((rotten(&rig, 0), rig.nodes[0].status().counters.mended), (0, 1));
}

/// A file that is written all the time, so that something of it is always under way, has rotten blocks as well, and the pass comes to its end.
#[test]
fn a_scrub_ends_beside_a_writer() {
    let mut rig = Rig::with(2, 25, config_with(Limits { host_min: 1, ..Limits::SHIPPED }));
    let mut hand = rig.attach(0, 0);
    let ino = hand.create(&mut rig, b"file", 0o100_644);
    hand.append_in(&mut rig, ino, &write(ino, 0, &vec![1; 9 * BLOCK]));
    hand.sync(&mut rig);
    rig.settle();
    flip_in(&rig, 0, ino, 5000);
    flip_in(&rig, 1, ino, 8 * BLOCK_BYTES);
    for n in [0, 1] {
        rig.event(n, Event::HostUp(Arc::new(Nobody) as Arc<dyn Copier>));
    }
    let over = |rig: &Rig, n: usize| rig.nodes[n].status().scrub.passes == 1;
    let (mut rounds, mut jobs) = (0, VecDeque::new());
    while !(over(&rig, 0) && over(&rig, 1)) {
        rounds += 1;
        assert!(rounds < 2000, "{:?}", [0, 1].map(|n| rig.nodes[n].status().scrub));
        hand.append_in(&mut rig, ino, &write(ino, 3 * BLOCK_BYTES + rounds % 4000, &[7; 9]));
        rig.event(0, Event::Doorbell(hand.client));
        rig.pass(1_000_000);
        rig.deliver_all();
        if rounds == 20 {
            (0..2).for_each(|n| rig.event(n, Event::Scrub));
        }
        jobs.push_back(std::mem::take(&mut rig.copies));
        if jobs.len() > 3 {
            rig.copies = jobs.pop_front().unwrap_or_default();
            host_copies(&mut rig);
        }
    }
    (0..2).for_each(|n| rig.event(n, Event::HostDown));
    hand.sync(&mut rig);
    rig.settle();
    for n in [0, 1] {
        assert_eq!((rotten(&rig, n), rig.nodes[n].status().counters.mended), (0, 1));
    }
}

/// Who asked for a pass gets one, also if the volume is replaced meanwhile.
#[test]
fn a_scrub_that_was_asked_for_survives_a_join() {
    let mut rig = Rig::forgetful(3, 26);
    let mut hand = rig.attach(0, 0);
    let file = hand.create(&mut rig, b"file", 0o100_644);
    hand.append_in(&mut rig, file, &write(file, 0, &vec![5; 20 * BLOCK]));
    hand.sync(&mut rig);
    rig.settle();
    rig.event(2, Event::Scrub);
    rig.slice(2);
    assert!(rig.nodes[2].status().scrub.running);
    for n in 0..3 {
        view(&mut rig, n, 2, &[1, 2], &[]);
    }
    for n in 0..3 {
        view(&mut rig, n, 3, &[1, 2], &[3]);
    }
    wait(&mut rig, 2 * SECOND);
    assert!(rig.nodes[2].status().counters.taken_over_bytes >= 20 * BLOCK_BYTES);
    let scrub = rig.nodes[2].status().scrub;
    assert_eq!((scrub.running, scrub.passes), (true, 0));
    for n in 0..3 {
        view(&mut rig, n, 4, &[1, 2, 3], &[]);
    }
    wait(&mut rig, SECOND);
    let scrub = rig.nodes[2].status().scrub;
    assert_eq!((scrub.running, scrub.passes), (false, 1));
}

fn hosted() -> (Rig, Hand, InodeId) {
    let limits = Limits { host_min: 1, ..Limits::SHIPPED };
    let mut rig = Rig::with(1, 27, config_with(limits));
    rig.event(0, Event::HostUp(Arc::new(Nobody) as Arc<dyn Copier>));
    let mut hand = rig.attach(0, 0);
    let file = hand.create(&mut rig, b"file", 0o100_644);
    (rig, hand, file)
}

/// hostd makes what it was asked for.
fn host_copies(rig: &mut Rig) {
    for (n, id, items) in std::mem::take(&mut rig.copies) {
        run_copies(&*rig.regions[n], &items).expect("memory");
        rig.event(n, Event::CopiesDone { id, bad: Vec::new() });
    }
}

#[test]
pub fn copies_that_nobody_was_asked_for_are_compared() {
    let (mut rig, mut hand, file) = hosted();
    hand.append_in(&mut rig, file, &write(file, 0, &vec![3; 2 * BLOCK]));
    for _ in 0..5 {
        hand.ring(&mut rig);
        rig.pass(6_000_000);
        host_copies(&mut rig);
    }
    assert_eq!(rotten(&rig, 0), 0);
    flip_in(&rig, 0, file, 3000);
    hand.append_in(&mut rig, file, &write(file, 100, &[4; 10]));
    let mut unasked = 0;
    for _ in 0..5 {
        hand.ring(&mut rig);
        rig.pass(6_000_000);
        for (_, id, _) in std::mem::take(&mut rig.copies) {
            unasked += 1;
            rig.event(0, Event::CopiesUnasked(id));
        }
    }
    assert_eq!((unasked, rig.nodes[0].status().published), (1, rig.nodes[0].status().stream));
    assert_eq!(rotten(&rig, 0), 1, "a part of it was written: that makes nothing right");
}

/// hostd is asked for no more at once than goes into a message.
#[test]
fn a_batch_of_many_copies_goes_to_hostd_in_parts() {
    let (mut rig, mut hand, file) = hosted();
    let granted = hand.lease(&mut rig, file, LeaseMode::Write).expect("a lease").granted;
    assert!(hand.holds(granted));
    for n in 0..6000u64 {
        hand.append(&write(file, n * 3 % 60_000, &[n as u8 | 1]));
    }
    let (mut most, mut all) = (0, 0);
    for _ in 0..40 {
        hand.ring(&mut rig);
        rig.pass(6_000_000);
        for (_, _, items) in &rig.copies {
            most = most.max(items.len());
            all += items.iter().filter(|item| matches!(item, CopyItem::Copy { .. })).count();
        }
        host_copies(&mut rig);
    }
    assert_eq!(hand.refusals(), 0);
    println!("{all} copies, {most} at once");
    assert!(all > COPIES_MAX && most <= COPIES_MAX, "{all} copies, {most} at once");
    assert_eq!(rotten(&rig, 0), 0);
}

/// A node ends in the middle of copies, with so much in its ring that the replay is taken back for want of space: what was
/// half copied is compared with nothing, in neither go.
#[test]
pub fn what_is_replayed_in_two_goes_is_not_compared() {
    let mut rig = Rig::new(2, 28);
    let mut hand = rig.attach(0, 0);
    let [a, b, c] = [b"a", b"b", b"c"].map(|name| hand.create(&mut rig, name, 0o100_644));
    hand.append_in(&mut rig, c, &write(c, 0, &vec![1; BLOCK]));
    hand.append_in(&mut rig, a, &Op::Fallocate { ino: a, offset: 0, len: 14 << 20, mode: 0 });
    hand.sync(&mut rig);
    rig.settle();
    // From now on the second one only keeps what comes.
    rig.busy = Some(1);
    let alone = |rig: &mut Rig, hand: &Hand| {
        for _ in 0..20 {
            rig.event(0, Event::Doorbell(hand.client));
            rig.pass(1_000_000);
            rig.deliver_all();
        }
    };
    hand.append_in(&mut rig, a, &Op::Truncate { ino: a, size: 0, clear_setid: false });
    hand.append_in(&mut rig, c, &write(c, 100, &[2; 50]));
    alone(&mut rig, &hand);
    for n in 0..28u64 {
        hand.append_in(&mut rig, b, &write(b, n << 17, &vec![3; 1 << 17]));
        if n % 7 == 6 {
            alone(&mut rig, &hand);
        }
    }
    assert_eq!(hand.refusals(), 0);
    let status = rig.nodes[1].status();
    println!("{} published, {} in the ring", status.published, status.stream);
    assert_eq!(rig.nodes[0].status().stream, status.stream);
    assert!(status.published < status.stream);
    let free = rig.nodes[1].volume().blocks_free();
    assert!(free < (28 << 17) / BLOCK_BYTES, "{free} blocks: the replay has to publish");
    let (segment, at) = place(rig.nodes[1].volume(), c, 100);
    let region = rig.regions[1].cut(&mut Random::new(1));
    region.damage(segment, at, &[2; 50]).expect("half of a publication");
    let mut rig = Rig::on(vec![Arc::new(region)], 29);
    rig.settle();
    let volume: &Volume = rig.nodes[0].volume();
    assert_eq!(volume.attr(b).expect("sound").map(|attr| attr.size), Some(28 << 17));
    assert_eq!(rotten(&rig, 0), 0);
}
