//! Who waits for something is answered by what brings it, not by a timer.

use base::InodeId;
use service::config::Pipeline;
use service::core::Event;
use service::core::limits::Limits;
use storage::format::control::{self, LeaseMode};
use storage::format::rpc::{self, InodeReply, Request};

use crate::rig::{Hand, Rig, config_with};

/// A look-up of a file tells where its bytes lie, and for that what its client did before must be published.
#[test]
fn who_waits_for_a_publication_needs_no_timer() {
    let mut rig = Rig::new(1, 4);
    let mut hand = rig.attach(0, 0);
    let file = hand.create(&mut rig, b"file", 0o100_644);
    rig.settle();
    for name in [b"1", b"2", b"3"] {
        hand.create(&mut rig, name, 0o100_644);
        let request =
            Request::Lookup { dir: InodeId::ROOT, name: b"file", mode: LeaseMode::Read, flags: 0 };
        hand.post(0, &request, hand.seq);
        rig.event(0, Event::Doorbell(hand.client));
        rig.work(0);
        let body = hand.reply(0).expect("an answer before the node sleeps");
        let (status, mut rest) = rpc::reply_status(&body).expect("a status");
        assert_eq!(status, Ok(()));
        assert_eq!(InodeReply::decode(&mut rest).expect("a reply").record.ino, file);
    }
    rig.settle();
    rig.check();
}

/// A service that takes nothing before somebody asks (Assise's way): what a client has appended lies in its log until it wants an
/// fsync, or room, for which it rings where nobody does who only appends; or until it has lain there for long.
#[test]
fn who_asks_for_nothing_is_left_alone() {
    let limits = Limits { on_demand: true, hold: Pipeline::ASSISE_HOLD, ..Limits::SHIPPED };
    let mut rig = Rig::with(2, 6, config_with(limits));
    let mut hand = rig.attach(0, 0);
    let lies = |hand: &Hand| hand.word(control::REPLICATED) < hand.seq;
    let append = |rig: &mut Rig, hand: &mut Hand, name: &[u8]| {
        hand.create(rig, name, 0o100_644);
        rig.settle();
        assert!(lies(hand), "{name:?} was not asked for");
        assert_eq!(hand.word(control::DOORBELL), control::BELL_DOZING);
    };
    append(&mut rig, &mut hand, b"synced");
    hand.sync(&mut rig);
    append(&mut rig, &mut hand, b"without room");
    rig.event(0, Event::Doorbell(hand.client));
    rig.deliver_all();
    assert!(!lies(&hand), "who waits for room is served");
    append(&mut rig, &mut hand, b"forgotten");
    rig.pass(Pipeline::ASSISE_HOLD);
    rig.deliver_all();
    assert!(!lies(&hand), "nothing lies for ever");
    rig.check();
}
