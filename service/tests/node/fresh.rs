//! What a node answers reflects what its client did before it asked, also where the node is not the head: it has
//! the client's operations in its ring first, and in the state that it answers from a little later.

use std::collections::BTreeSet;

use base::wire::Reader;
use base::{Epoch, Errno, InodeId, NodeId};
use service::core::Event;
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, mask};
use storage::format::rpc::{self, InodeReply, Request};

use crate::rig::{Hand, Rig, create};

type Answer = Result<Vec<u8>, Errno>;

/// Asks on a node that has everything in its ring; its background work is done slice by slice. Says
/// how many slices it took.
fn ask(rig: &mut Rig, hand: &Hand, request: &Request<'_>) -> (Answer, u32) {
    hand.post(0, request, hand.seq);
    for slices in 0..1000 {
        rig.event(hand.n, Event::Doorbell(hand.client));
        rig.deliver_all();
        if let Some(body) = hand.reply(0) {
            let status = rpc::reply_status(&body).expect("a status").0;
            return (status.map(|()| body[8..].to_vec()), slices);
        }
        rig.slice(hand.n);
        rig.now += 1_000_000;
        rig.event(hand.n, Event::Tick);
    }
    panic!("no answer to {request:?}");
}

/// A file with bytes, attributes and a directory, all of which every member has applied and published.
struct Tree {
    rig: Rig,
    hand: Hand,
    dir: InodeId,
    file: InodeId,
}

fn tree(nodes: u32, n: usize) -> Tree {
    let mut rig = Rig::new(nodes, 3);
    let mut hand = rig.attach(n, 0);
    let dir = hand.create(&mut rig, b"dir", 0o040_755);
    let file = hand.create(&mut rig, b"file", 0o100_600);
    let ino = file;
    let set = |name, value| Op::SetXattr { ino, name, value };
    hand.append_in(&mut rig, file, &set(b"user.old", b"old"));
    hand.append_in(&mut rig, file, &Op::Write { ino, offset: 0, data: b"old", clear_setid: false });
    hand.sync(&mut rig);
    rig.settle();
    Tree { rig, hand, dir, file }
}

impl Tree {
    /// Does `ops`, under leases on all that there is, then asks at once.
    fn after(&mut self, ops: &[Op<'_>], request: &Request<'_>) -> Answer {
        for ino in [InodeId::ROOT, self.dir, self.file] {
            let lease = self.hand.lease(&mut self.rig, ino, LeaseMode::Write).expect("a lease");
            assert!(self.hand.holds(lease.granted));
        }
        for op in ops {
            self.hand.append(op);
        }
        let (answer, _) = ask(&mut self.rig, &self.hand, request);
        assert_eq!(self.hand.refusals(), 0);
        answer
    }
}

/// Every node of a chain of one, and of two.
fn everywhere(test: impl Fn(&mut Tree)) {
    for (nodes, n) in [(1, 0), (2, 0), (2, 1)] {
        test(&mut tree(nodes, n));
    }
}

#[test]
fn an_attribute_that_was_set_is_there() {
    everywhere(|t| {
        let ino = t.file;
        let set = Op::SetXattr { ino, name: b"user.new", value: b"1" };
        let get = Request::XattrGet { ino, name: b"user.new" };
        assert_eq!(t.after(&[set], &get), Ok(b"1".to_vec()));
        let again = Op::SetXattr { ino, name: b"user.new", value: b"2" };
        assert_eq!(t.after(&[again], &get), Ok(b"2".to_vec()));
        let remove = Op::RemoveXattr { ino, name: b"user.new" };
        assert_eq!(t.after(&[remove], &get), Err(Errno::NODATA));
        let old = Op::RemoveXattr { ino, name: b"user.old" };
        assert_eq!(t.after(&[old], &Request::XattrList { ino }), Ok(Vec::new()));
    });
}

#[test]
fn what_was_made_a_moment_ago_has_attributes_names_and_bytes() {
    everywhere(|t| {
        let numbers = t.hand.numbers(&mut t.rig, 4);
        let ino = numbers[0].0;
        let make = create(ino, InodeId::ROOT, b"fresh", 0o100_600, 0);
        let get = Request::XattrGet { ino, name: b"user.none" };
        assert_eq!(t.after(&[make], &get), Err(Errno::NODATA), "it is there, and has none");

        let ino = numbers[1].0;
        let make = create(ino, InodeId::ROOT, b"listed", 0o040_700, 0);
        let inner = create(numbers[2].0, ino, b"inner", 0o100_600, 0);
        let list = t.after(&[make, inner], &Request::Names { dir: ino, cookie: 0 });
        let list = list.expect("it can be listed");
        let mut r = Reader::new("names", &list[1..]);
        let mut names = Vec::new();
        while r.left() > 0 {
            names.push(rpc::take_name(&mut r).expect("a name").name.to_vec());
        }
        assert!(names.contains(&b"inner".to_vec()), "{names:?}");

        let ino = numbers[3].0;
        let make = create(ino, InodeId::ROOT, b"written", 0o100_600, 0);
        let write = Op::Write { ino, offset: 0, data: b"bytes", clear_setid: false };
        let read = Request::Read { ino, offset: 0, len: 100 };
        assert_eq!(t.after(&[make, write], &read), Ok(b"bytes".to_vec()));
    });
}

#[test]
fn a_name_leads_to_what_was_put_there() {
    everywhere(|t| {
        let (ino, parent) = (t.file, InodeId::ROOT);
        let lookup = |name| Request::Lookup { dir: parent, name, mode: LeaseMode::None, flags: 0 };
        let rename = Op::Rename {
            ino,
            parent,
            name: b"file",
            new_parent: parent,
            new_name: b"moved",
            replaced: InodeId::NONE,
            noreplace: true,
            exchange: false,
            open: false,
        };
        let found = t.after(&[rename], &lookup(b"moved")).expect("it is there");
        let found = InodeReply::decode(&mut Reader::new("reply", &found)).expect("well formed");
        assert_eq!(found.record.ino, ino);
        let link = Op::Link { ino, parent, name: b"again" };
        assert!(t.after(&[link], &lookup(b"again")).is_ok());
        let unlink = Op::Unlink { ino, parent, name: b"again", open: false };
        assert_eq!(t.after(&[unlink], &lookup(b"again")).err(), Some(Errno::NOENT));
    });
}

#[test]
fn attributes_and_bytes_are_those_written_last() {
    everywhere(|t| {
        let ino = t.file;
        let (atime, mtime) = Default::default();
        let mode = Op::SetAttr { ino, mask: mask::MODE, mode: 0o640, uid: 0, gid: 0, atime, mtime };
        let get = Request::Inode { ino, mode: LeaseMode::None, flags: 0 };
        let answer = t.after(&[mode], &get).expect("it is there");
        let answer = InodeReply::decode(&mut Reader::new("reply", &answer)).expect("well formed");
        assert_eq!(answer.record.mode, 0o100_640);

        let write = Op::Write { ino, offset: 0, data: b"new!", clear_setid: false };
        let read = Request::Read { ino, offset: 0, len: 100 };
        assert_eq!(t.after(&[write], &read), Ok(b"new!".to_vec()));
        let write = Op::Write { ino, offset: 4096, data: &[1; 4096], clear_setid: false };
        let answer = t.after(&[write], &Request::Extents { ino, from: 0 }).expect("extents");
        let mut r = Reader::new("extents", &answer);
        let (reflected, complete, all) = rpc::take_extents(&mut r).expect("well formed");
        assert!(reflected.0 >= t.hand.seq && complete);
        assert_eq!(all.iter().map(|e| e.len).sum::<u64>(), 8192, "{all:?}");

        // A directory's attributes, as they come with its lease, too.
        let (ino, parent) = (t.hand.numbers(&mut t.rig, 1)[0].0, t.dir);
        let make = create(ino, parent, b"one", 0o100_600, 0);
        let get = Request::Inode { ino: parent, mode: LeaseMode::Write, flags: 0 };
        let answer = t.after(&[make], &get).expect("it is there");
        let answer = InodeReply::decode(&mut Reader::new("reply", &answer)).expect("well formed");
        assert_eq!(answer.record.entries, 1);
    });
}

#[test]
fn space_and_accounts_count_what_was_done() {
    everywhere(|t| {
        let statfs = |t: &mut Tree, ops: &[Op<'_>]| {
            let body = t.after(ops, &Request::StatFs).expect("figures");
            let mut r = Reader::new("figures", &body);
            let [blocks, free, inodes, free_inodes] = {
                r.u32().expect("bytes");
                [0; 4].map(|_| r.u64().expect("a figure"))
            };
            (blocks - free, inodes - free_inodes)
        };
        let before = statfs(t, &[]);
        let ino = t.hand.numbers(&mut t.rig, 1)[0].0;
        let make = create(ino, InodeId::ROOT, b"more", 0o100_600, 0);
        let write = Op::Write { ino, offset: 0, data: &[7; 8192], clear_setid: false };
        let after = statfs(t, &[make, write]);
        assert_eq!((after.0 - before.0, after.1 - before.1), (2, 1));

        let write = Op::Write { ino, offset: 8192, data: &[7; 4096], clear_setid: false };
        let body = t.after(&[write], &Request::Accounts { after: None }).expect("accounts");
        let own = rpc::Account::decode(&mut Reader::new("accounts", &body)).expect("an account");
        assert_eq!(own.used.blocks, 1 + 3, "the old file and the new one");
    });
}

/// What the node does not answer itself is only put into order behind the operations.
#[test]
fn what_another_answers_is_not_waited_for() {
    let mut t = tree(2, 1);
    let ino = t.file;
    let set = Op::SetXattr { ino, name: b"user.new", value: b"1" };
    t.hand.append(&set);
    for request in [
        Request::Inodes { count: 1 },
        Request::Unpin { inodes: vec![t.dir] },
        Request::Release { slots: vec![] },
    ] {
        let (answer, slices) = ask(&mut t.rig, &t.hand, &request);
        assert!(answer.is_ok() && slices == 0, "{request:?}: {answer:?} after {slices}");
    }
}

/// A process may have open what was made under a number that nobody knows of who is left.
#[test]
fn two_heads_never_hand_out_the_same_number() {
    let mut rig = Rig::new(3, 3);
    let mut given = BTreeSet::new();
    for head in 0..3u32 {
        let chain: Vec<NodeId> = (head + 1..=3).map(NodeId).collect();
        for n in 0..3 {
            let chain = chain.clone();
            let view = Event::View { epoch: Epoch(head + 2), chain, syncing: Vec::new(), lapse: 0 };
            rig.event(n, view);
        }
        rig.pass(1_000_000_000);
        let hand = rig.attach(head as usize, 0);
        for (number, _) in hand.numbers(&mut rig, 64) {
            assert!(given.insert(number), "{number} of head {}", head + 1);
        }
    }
    assert!(given.len() > 100, "{}", given.len());
}
