//! Who waits for something is answered by what brings it, not by a timer.

use base::InodeId;
use service::core::Event;
use storage::format::control::LeaseMode;
use storage::format::rpc::{self, InodeReply, Request};

use crate::rig::Rig;

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
