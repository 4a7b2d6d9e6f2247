//! Quotas at the service: the head enforces, every member counts, and only the super-user sets them.

use base::wire::Reader;
use base::{Epoch, InodeId, NodeId};
use service::core::Event;
use storage::format::control;
use storage::format::entry::Op;
use storage::format::rpc::{Account, AccountId, Amount, Request};

use crate::rig::{Hand, Rig, create};

const USER: u32 = 1000;

fn accounts(hand: &Hand, rig: &mut Rig, after: Option<AccountId>) -> Vec<Account> {
    let body = hand.call(rig, &Request::Accounts { after }).expect("accounts");
    let mut r = Reader::new("accounts", &body);
    let mut all = Vec::new();
    while r.left() > 0 {
        all.push(Account::decode(&mut r).expect("an account"));
    }
    all
}

/// Errno of a refusal, 0 if there was none.
fn outcome(hand: &mut Hand, rig: &mut Rig, lease: InodeId, op: &Op<'_>) -> u64 {
    let before = hand.refusals();
    hand.append_in(rig, lease, op);
    hand.sync(rig);
    if hand.refusals() > before { hand.word(control::REFUSED_ERRNO) } else { 0 }
}

fn quota(ino: InodeId, user: Option<u32>, blocks: u64, inodes: u64) -> Op<'static> {
    Op::SetQuota { ino, user, limit: Amount { blocks, inodes } }
}

/// A directory with a quota of 8 blocks and 5 inodes, everybody may write in it.
fn world(count: u32) -> (Rig, Hand, InodeId) {
    let mut rig = Rig::forgetful(count, 1);
    let mut root = rig.attach(0, 0);
    let dir = root.create(&mut rig, b"dir", 0o040_777);
    for op in [Op::SetProject { ino: dir, project: dir }, quota(dir, None, 8, 5)] {
        assert_eq!(outcome(&mut root, &mut rig, dir, &op), 0);
    }
    (rig, root, dir)
}

#[test]
fn limits_hold_whoever_writes_and_on_whatever_node() {
    let (mut rig, mut root, dir) = world(2);
    let mut user = rig.attach(1, USER);
    let make = |hand: &mut Hand, rig: &mut Rig, name: &[u8]| {
        let (ino, _) = hand.numbers(rig, 1)[0];
        let errno = outcome(hand, rig, dir, &create(ino, dir, name, 0o100_644, hand.uid));
        (ino, errno)
    };
    let write = |ino, blocks: usize| Op::Write {
        ino,
        offset: 0,
        data: &[7; 64 * 4096][..blocks * 4096],
        clear_setid: true,
    };
    let (a, errno) = make(&mut user, &mut rig, b"a");
    assert_eq!(errno, 0);
    assert_eq!(outcome(&mut user, &mut rig, a, &write(a, 8)), 0);
    assert_eq!(outcome(&mut user, &mut rig, a, &write(a, 9)), 122);
    let (b, errno) = make(&mut root, &mut rig, b"b");
    assert_eq!(errno, 0);
    assert_eq!(outcome(&mut root, &mut rig, b, &write(b, 1)), 122, "the super-user as well");
    let (set, root_dir) = (quota(InodeId::ROOT, Some(USER), 0, 2), InodeId::ROOT);
    assert_eq!(outcome(&mut root, &mut rig, root_dir, &set), 0);
    assert_eq!(make(&mut user, &mut rig, b"c").1, 0);
    assert_eq!(make(&mut user, &mut rig, b"d").1, 122, "the user's");
    assert_eq!(make(&mut root, &mut rig, b"d").1, 0);
    assert_eq!(make(&mut root, &mut rig, b"e").1, 122, "the directory's");
    rig.settle();
    let here: Vec<_> = rig.nodes.iter().map(|n| n.volume().accounts(None, 99)).collect();
    assert_eq!(here[0], here[1]);
    let of = |id| here[0].iter().find(|account| account.id == id).map(|account| account.used);
    assert_eq!(of(AccountId::User(USER)), Some(Amount { blocks: 8, inodes: 2 }));
    assert_eq!(of(AccountId::Directory(dir)), Some(Amount { blocks: 8, inodes: 5 }));
    // Of other users nobody but the super-user is told.
    assert_eq!(accounts(&root, &mut rig, None), here[0]);
    let own = accounts(&user, &mut rig, None);
    assert_eq!(own.iter().map(|a| a.id).collect::<Vec<_>>(), [AccountId::User(USER)]);
    let rest = accounts(&user, &mut rig, Some(own[0].id));
    assert_eq!(rest.iter().map(|a| a.id).collect::<Vec<_>>(), [AccountId::Directory(dir)]);
    assert_eq!(accounts(&user, &mut rig, Some(rest[0].id)), []);
    rig.check();
}

#[test]
fn nobody_else_sets_them() {
    let (mut rig, mut root, dir) = world(1);
    let mut bad = rig.attach(0, USER);
    let own = bad.create(&mut rig, b"own", 0o040_755);
    for (ino, op) in [
        (own, quota(own, None, 1 << 60, 0)),
        (dir, quota(dir, None, 0, 0)),
        (InodeId::ROOT, quota(InodeId::ROOT, Some(USER), 0, 0)),
        (own, Op::SetProject { ino: own, project: dir }),
        (dir, Op::SetProject { ino: dir, project: InodeId::NONE }),
    ] {
        assert_eq!(outcome(&mut bad, &mut rig, ino, &op), 1, "{op:?}");
    }
    // What the super-user may, but makes no sense.
    let zero = quota(InodeId::ROOT, Some(0), 1, 1);
    assert_eq!(outcome(&mut root, &mut rig, InodeId::ROOT, &zero), 22);
    let file = root.create(&mut rig, b"file", 0o100_644);
    assert_eq!(outcome(&mut root, &mut rig, file, &quota(file, None, 1, 1)), 20);
    // Into the tree and out of it nothing is moved.
    let to = |parent, new_parent, ino| Op::Rename {
        ino,
        parent,
        name: b"file",
        new_parent,
        new_name: b"file",
        replaced: InodeId::NONE,
        noreplace: false,
        exchange: false,
        open: false,
    };
    root.lease(&mut rig, dir, control::LeaseMode::Write).unwrap();
    root.lease(&mut rig, file, control::LeaseMode::Write).unwrap();
    let op = to(InodeId::ROOT, dir, file);
    assert_eq!(outcome(&mut root, &mut rig, InodeId::ROOT, &op), 18);
    rig.settle();
    rig.check();
}

/// A node that joins has accounts and limits as the others, also for a file with names in two trees.
#[test]
fn who_joins_counts_the_same() {
    let (mut rig, mut root, _) = world(2);
    let file = root.create(&mut rig, b"file", 0o100_644);
    root.append(&Op::Write { ino: file, offset: 0, data: &[1; 5000], clear_setid: false });
    let sub = root.create(&mut rig, b"sub", 0o040_755);
    root.append_in(&mut rig, sub, &Op::Link { ino: file, parent: sub, name: b"other" });
    root.append_in(&mut rig, sub, &Op::SetProject { ino: sub, project: sub });
    root.append_in(&mut rig, file, &Op::SetProject { ino: file, project: sub });
    root.append_in(&mut rig, sub, &quota(sub, None, 100, 100));
    root.append_in(&mut rig, InodeId::ROOT, &quota(InodeId::ROOT, Some(USER), 3, 4));
    root.sync(&mut rig);
    rig.settle();
    assert_eq!(root.refusals(), 0);
    let (one, two) = (NodeId(1), NodeId(2));
    for (epoch, chain, syncing) in [(2, vec![one], vec![]), (3, vec![one], vec![two])] {
        for n in 0..2 {
            let (chain, syncing) = (chain.clone(), syncing.clone());
            rig.event(n, Event::View { epoch: Epoch(epoch), chain, syncing, lapse: 0 });
        }
        rig.settle();
    }
    let accounts: Vec<_> = rig.nodes.iter().map(|n| n.volume().accounts(None, 99)).collect();
    assert_eq!(accounts[0], accounts[1]);
    let of = |id| accounts[1].iter().find(|a| a.id == id).copied();
    let limit = Amount { blocks: 100, inodes: 100 };
    // The directory, and the file under each of its names.
    let used = Amount { blocks: 2, inodes: 3 };
    let id = AccountId::Directory(sub);
    assert_eq!(of(id), Some(Account { id, limit, used }));
    let limits = |n: &service::core::Node| n.volume().limits().collect::<Vec<_>>();
    assert_eq!((limits(&rig.nodes[1]).len(), limits(&rig.nodes[0])), (3, limits(&rig.nodes[1])));
    assert!(rig.nodes[0].volume().differences(rig.nodes[1].volume()).unwrap().is_empty());
    assert_eq!(rig.nodes[0].status().counters.snapshots, 1, "it was filled anew");
    rig.check();
}
