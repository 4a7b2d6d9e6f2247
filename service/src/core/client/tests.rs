use base::NodeId;
use storage::format::clients::Record;
use storage::memory::MemoryRegion;

use super::super::table::Table;
use super::*;

/// A client in memory of its own.
fn client() -> Client {
    let media: Arc<dyn Media> = Arc::new(MemoryRegion::new());
    let (mut table, _) = Table::open(Arc::clone(&media), true, 1, 2).unwrap();
    let (id, epoch, lane_bytes) = (ClientId::new(NodeId(1), 7), Epoch(1), 4 << 20);
    let record = Record {
        client: id,
        segment: 1,
        incarnation: 3,
        lanes: 1,
        lane_bytes,
        pid: 100,
        start_time: 1,
        epoch,
        uid: 1000,
        gid: 1000,
        groups: Vec::new(),
    };
    let descriptor = Descriptor {
        client: id,
        incarnation: 3,
        lanes: 1,
        lane_bytes,
        first_sequence: Sequence(1),
        node: NodeId(1),
        epoch,
        arena_bytes: 1 << 20,
        keeps: false,
    };
    let identity = Identity { uid: 1000, gid: 1000, groups: Vec::new() };
    let row = table.put(&record).unwrap();
    Client::create(media, 1, descriptor, identity, (100, 1), row, 1).unwrap()
}

/// A client may go on saying so, and its log may not be readable for a while: what is remembered of it ends with what it
/// has open. (Every number was kept, 64 at each look.)
#[test]
fn what_is_said_to_be_closed_does_not_pile_up() {
    let mut client = client();
    client.pin(InodeId(5), 0).unwrap();
    for round in 0..100 {
        for slot in 0..control::CLOSED_SLOTS as u64 {
            client
                .set_word(control::CLOSED + slot * 8, if slot < 2 { 5 } else { 64 * round + slot });
        }
        client.collect_closed().unwrap();
    }
    assert!(client.closed.len() <= 1, "{} numbers are remembered", client.closed.len());
    assert_eq!(client.tell_closed().unwrap(), [InodeId(5)]);
    assert!(!client.has_pin(InodeId(5)));
}

/// Closed, then opened again in vain: it is closed. (The first was forgotten, and the second took nothing back.)
#[test]
fn what_could_not_be_opened_again_stays_closed() {
    let (mut client, ino) = (client(), InodeId(5));
    client.pin(ino, 0).unwrap();
    client.set_word(control::CLOSED, ino.0);
    client.collect_closed().unwrap();
    client.reopens(ino);
    client.stays_closed(ino);
    assert_eq!(client.tell_closed().unwrap(), [ino]);

    // And with what could.
    client.pin(InodeId(6), 0).unwrap();
    client.reopens(InodeId(6));
    client.pin(InodeId(6), 0).unwrap();
    client.stays_closed(InodeId(6));
    assert_eq!(client.tell_closed().unwrap(), []);
}
