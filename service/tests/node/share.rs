//! Who waits for an fsync waits for what lies before it in the stream: a log is taken a piece at a time while somebody else waits.

use base::Sequence;
use service::core::Event;
use service::core::limits::Limits;
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
    let limits = Limits { shared_bytes: PIECE as usize, shared_window: WINDOW, ..Limits::SHIPPED };
    Rig::with(2, 8, config_with(limits))
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

/// A flood that is taken whole is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn a_flood_that_is_taken_whole_is_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 1] =
        [(Bug::FloodFirst, a_flood_is_taken_a_piece_at_a_time_while_somebody_else_waits)];
    assert_eq!(missed(&tests), []);
}
