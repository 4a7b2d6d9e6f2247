//! Clients that come and go: who has done nothing costs nobody anything, and who has done something is waited for.

use base::{ClientId, InodeId};
use service::core::Event;
use storage::format::control::LeaseMode;
use storage::format::entry::Op;

use crate::rig::Rig;

/// Chunks that each node has in its stream.
fn chunks(rig: &Rig) -> Vec<u64> {
    rig.nodes.iter().map(|node| node.status().counters.chunks).collect()
}

fn has(rig: &Rig, n: usize, client: ClientId) -> bool {
    rig.nodes[n].status().clients.iter().any(|c| c.client == client)
}

fn end(rig: &mut Rig, n: usize, client: ClientId) {
    rig.event(n, Event::ClientGone(client));
    rig.deliver_all();
}

/// Where its node is the head, where it is another member, and where there are others.
const PLACES: [(u32, usize); 4] = [(1, 0), (2, 0), (2, 1), (3, 2)];

#[test]
fn who_has_done_nothing_leaves_nothing() {
    for (nodes, n) in PLACES {
        let mut rig = Rig::new(nodes, 7);
        let mut writer = rig.attach(n, 0);
        let file = writer.create(&mut rig, b"file", 0o100_644);
        writer.sync(&mut rig);
        rig.settle();
        let before = chunks(&rig);
        let reader = rig.attach(n, 0);
        let lease = reader.lease(&mut rig, file, LeaseMode::Read).expect("a lease");
        assert!(reader.holds(lease.granted));
        assert!(!reader.numbers(&mut rig, 4).is_empty());
        end(&mut rig, n, reader.client);
        // At once, with nothing published.
        assert!(!has(&rig, n, reader.client), "{nodes} {n}");
        assert_eq!(chunks(&rig), before, "{nodes} {n}");
        // What it held is free: nobody is asked for it.
        let write = writer.lease(&mut rig, file, LeaseMode::Write).expect("a lease");
        assert!(writer.holds(write.granted));
        // And nothing of it comes back where the node starts again.
        rig.settle();
        rig.check();
        assert_eq!(chunks(&rig), before, "{nodes} {n}");
    }
}

#[test]
fn what_a_client_has_done_is_there_when_it_is_forgotten() {
    for (nodes, n) in PLACES {
        let mut rig = Rig::new(nodes, 8);
        let mut writer = rig.attach(n, 0);
        let file = writer.create(&mut rig, b"file", 0o100_644);
        writer.sync(&mut rig);
        rig.settle();
        let before = chunks(&rig);
        // Nobody has rung for it when it ends, and nothing was synced.
        let lease = writer.lease(&mut rig, file, LeaseMode::Write).expect("a lease");
        assert!(writer.holds(lease.granted));
        writer.append(&Op::Write { ino: file, offset: 0, data: b"last", clear_setid: false });
        end(&mut rig, n, writer.client);
        rig.settle();
        assert!(!has(&rig, n, writer.client), "{nodes} {n}");
        // The write, and that everybody may forget how far it was.
        let more: Vec<u64> =
            chunks(&rig).iter().zip(&before).map(|(now, then)| now - then).collect();
        assert!(more.iter().all(|n| *n >= 2), "{nodes} {n}: {more:?}");
        let reader = rig.attach(n, 0);
        let found = reader.lease(&mut rig, file, LeaseMode::Read).expect("a lease");
        assert_eq!(found.record.size, 4, "{nodes} {n}");
        assert_ne!(file, InodeId::ROOT);
        rig.check();
    }
}
