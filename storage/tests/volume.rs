//! The volume told by example: namespace rules, data, classes, space, publication.

mod common;

use base::{ClientId, Epoch, InodeId, Sequence, StreamSeq};
use common::*;
use storage::format::entry::{Header, Op};
use storage::format::item::ReadClass;
use storage::media::Segment;
use storage::volume::{AccountId, Amount, Refusal, Volume, run_copies};

#[test]
fn files_are_written_published_and_found_again() {
    let mut d = Driver::new(64 << 20);
    d.apply(&create(2, 1, b"file", FILE)).unwrap();
    d.apply(&write(2, 10, b"hello")).unwrap();
    d.apply(&write(2, 10_000, &[7; 9000])).unwrap();
    d.publish();
    let mut want = vec![0; 19_000];
    want[10..15].copy_from_slice(b"hello");
    want[10_000..].fill(7);
    assert_eq!(d.read(2), want);
    d.reopen();
    assert_eq!(d.read(2), want);
    assert_eq!(d.volume.lookup(InodeId(1), b"file"), Ok(Some((InodeId(2), 0o100000))));
    let attr = d.volume.attr(InodeId(2)).unwrap().unwrap();
    assert_eq!((attr.size, attr.nlink, attr.blocks), (19_000, 1, 8 * 4));
    d.apply(&truncate(2, 12)).unwrap();
    d.apply(&truncate(2, 5000)).unwrap();
    d.publish();
    let mut want = vec![0; 5000];
    want[10..12].copy_from_slice(b"he");
    assert_eq!(d.read(2), want);
}

#[test]
fn arenas_follow_the_mode() {
    let mut d = Driver::new(64 << 20);
    d.apply(&create(2, 1, b"file", FILE)).unwrap();
    d.apply(&write(2, 0, &[9; 100_000])).unwrap();
    for (mode, class) in [
        (0o640, ReadClass::Group { uid: 10, gid: 20 }),
        (0o600, ReadClass::Owner { uid: 10 }),
        (0o604, ReadClass::Service),
        (0o644, ReadClass::World),
    ] {
        d.must(&chmod(2, mode)).unwrap();
        if mode != 0o600 {
            d.publish();
            assert_eq!(d.read(2), vec![9; 100_000]);
        }
        for e in d.volume.extents(InodeId(2), 0, 100).unwrap() {
            assert_eq!(d.volume.arena_class(e.arena), Some(class));
        }
    }
    d.reopen();
    assert_eq!(d.read(2), vec![9; 100_000]);
    assert_eq!(d.volume.statfs().blocks - d.volume.statfs().blocks_free, 25);
}

#[test]
fn namespace_rules() {
    let mut d = Driver::new(64 << 20);
    d.apply(&create(2, 1, b"a", DIR)).unwrap();
    d.apply(&create(3, 2, b"b", DIR)).unwrap();
    d.apply(&create(4, 3, b"f", FILE)).unwrap();
    assert_eq!(d.apply(&create(9, 1, b"a", FILE)), Err(Refusal::Exists));
    assert_eq!(d.apply(&create(4, 1, b"z", FILE)), Err(Refusal::Exists));
    assert_eq!(d.apply(&create(9, 77, b"z", FILE)), Err(Refusal::NoEntry));
    assert_eq!(d.apply(&create(9, 4, b"z", FILE)), Err(Refusal::NotDirectory));
    assert_eq!(d.apply(&rename(2, (1, b"a"), (3, b"x"), 0)), Err(Refusal::Cycle));
    assert_eq!(d.apply(&rename(2, (1, b"a"), (2, b"x"), 0)), Err(Refusal::Cycle));
    assert_eq!(d.apply(&unlink(2, 1, b"a")), Err(Refusal::IsDirectory));
    assert_eq!(d.apply(&unlink(5, 3, b"f")), Err(Refusal::Mismatch));
    let rmdir = |ino, parent, name| Op::Rmdir {
        ino: InodeId(ino),
        parent: InodeId(parent),
        name,
        open: false,
    };
    assert_eq!(d.apply(&rmdir(3, 2, b"b")), Err(Refusal::NotEmpty));
    assert_eq!(d.apply(&rmdir(4, 3, b"f")), Err(Refusal::NotDirectory));
    assert_eq!(d.apply(&rename(3, (2, b"b"), (3, b"f"), 4)), Err(Refusal::Cycle));
    d.apply(&rename(4, (3, b"f"), (1, b"g"), 0)).unwrap();
    assert!(d.apply(&rename(4, (3, b"f"), (1, b"g"), 0)).unwrap().already);
    let orphan = d.apply(&rmdir(3, 2, b"b")).unwrap().orphaned;
    assert_eq!(orphan, Some(InodeId(3)));
    assert_eq!(d.apply(&create(9, 3, b"in removed", FILE)), Err(Refusal::NoEntry));
    assert_eq!(d.volume.orphans(), Ok(vec![InodeId(3)]));
    d.apply(&Op::Reap { ino: InodeId(3) }).unwrap();
    assert_eq!(d.volume.attr(InodeId(3)), Ok(None));
    let root = d.volume.attr(InodeId(1)).unwrap().unwrap();
    assert_eq!((root.nlink, root.entries), (3, 2));
    let mut names = Vec::new();
    d.volume
        .readdir(InodeId(1), 0, 10, &mut |n| {
            names.push((n.ino.0, n.name.to_vec()));
            true
        })
        .unwrap();
    names[2..].sort();
    let want = [(1, &b"."[..]), (1, b".."), (2, b"a"), (4, b"g")];
    assert_eq!(names, want.map(|(i, n)| (i, n.to_vec())));
}

#[test]
fn a_full_volume_stays_deletable() {
    let mut d = Driver::new(1 << 20);
    let mut ino = 2;
    while d.must(&create(ino, 1, format!("{ino}").as_bytes(), FILE)).is_ok() {
        match d.must(&write(ino, 0, &[1; 50_000])) {
            Ok(_) => ino += 1,
            Err(e) => {
                assert_eq!(e, Refusal::NoSpace);
                break;
            }
        }
    }
    d.publish();
    assert_eq!(d.read(2), vec![1; 50_000]);
    d.must(&write(2, 0, &[2; 50_000])).unwrap();
    d.must(&truncate(3, 100)).unwrap();
    for i in 2..=ino {
        d.must(&unlink(i, 1, format!("{i}").as_bytes())).unwrap();
        d.must(&Op::Reap { ino: InodeId(i) }).unwrap();
    }
    assert_eq!(d.volume.statfs().blocks_free, 256);
    d.must(&create(1000, 1, b"again", FILE)).unwrap();
    d.must(&write(1000, 0, &[3; 1_000_000])).unwrap();
    d.publish();
    d.reopen();
    assert_eq!(d.read(1000), vec![3; 1_000_000]);
}

#[test]
fn sealed_transactions_can_be_pipelined() {
    fn can_be_sent<T: Send>() {}
    can_be_sent::<(Volume, storage::volume::Sealed)>();
    let mut d = Driver::new(64 << 20);
    d.apply(&create(2, 1, b"a", FILE)).unwrap();
    let client = ClientId(5);
    let one = d.volume.seal(StreamSeq(1), Epoch(1), &[(client, Sequence(10))]).unwrap();
    d.apply(&create(3, 1, b"b", FILE)).unwrap();
    let two = d.volume.seal(StreamSeq(2), Epoch(1), &[(client, Sequence(20))]).unwrap();
    d.apply(&create(4, 1, b"c", FILE)).unwrap();
    assert_eq!(Volume::open(d.media.clone()).unwrap().lookup(InodeId(1), b"a"), Ok(None));
    run_copies(&*d.media, &one.copies).unwrap();
    d.volume.publish(one).unwrap();
    let seen = Volume::open(d.media.clone()).unwrap();
    assert!(seen.lookup(InodeId(1), b"a").unwrap().is_some());
    assert!(seen.lookup(InodeId(1), b"b").unwrap().is_none());
    assert_eq!(seen.published(client), Ok(Sequence(10)));
    d.volume.publish(two).unwrap();
    let seen = Volume::open(d.media.clone()).unwrap();
    assert!(seen.lookup(InodeId(1), b"b").unwrap().is_some());
    assert_eq!(seen.published(client), Ok(Sequence(20)));
    assert_eq!(seen.root().stream_seq, StreamSeq(2));
    d.publish();
    d.reopen();
    assert!(d.volume.lookup(InodeId(1), b"c").unwrap().is_some());
}

#[test]
fn xattrs_and_links() {
    let mut d = Driver::new(64 << 20);
    let target = vec![b't'; 4095];
    let mut link = create(2, 1, b"link", 0o120777);
    if let Op::Create { target: t, .. } = &mut link {
        *t = &target;
    }
    d.apply(&link).unwrap();
    assert_eq!(d.volume.symlink(InodeId(2)), Ok(target.clone()));
    for len in [0, 1, 900, 954, 955, 960, 961, 20_000, 61_440, 3] {
        let value: Vec<u8> = (0..len).map(|i: usize| (i % 251) as u8).collect();
        let ino = InodeId(2);
        d.apply(&Op::SetXattr { ino, name: b"user.a", value: &value }).unwrap();
        d.apply(&Op::SetXattr { ino, name: b"user.b", value: b"other" }).unwrap();
        assert_eq!(d.volume.xattr(ino, b"user.a"), Ok(Some(value)), "{len}");
    }
    d.publish();
    d.reopen();
    let mut names = d.volume.xattrs(InodeId(2)).unwrap();
    names.sort();
    assert_eq!(names, [b"user.a".to_vec(), b"user.b".to_vec()]);
    d.apply(&Op::RemoveXattr { ino: InodeId(2), name: b"user.a" }).unwrap();
    assert_eq!(d.volume.xattr(InodeId(2), b"user.a"), Ok(None));
    let gone = d.apply(&Op::RemoveXattr { ino: InodeId(2), name: b"user.a" });
    assert_eq!(gone, Err(Refusal::NoAttribute));
}

#[test]
fn large_files_give_their_memory_back() {
    use std::os::unix::fs::MetadataExt;
    let mut d = Driver::new(64 << 20);
    d.apply(&create(2, 1, b"big", FILE)).unwrap();
    for i in 0..16 {
        d.apply(&write(2, i << 20, &vec![7; 1 << 20])).unwrap();
    }
    d.publish();
    let blocks = || std::fs::metadata(d.dir.0.join("arena.0")).unwrap().blocks();
    assert!(blocks() >= 16 << 11);
    d.volume.apply(&header(1), &truncate(2, 1 << 20), (Segment::Stream, 0)).unwrap();
    let sealed = d.volume.seal(StreamSeq(99), Epoch(1), &[]).unwrap();
    let freed = d.volume.publish(sealed).unwrap();
    assert_eq!(freed.iter().map(|run| run.len).sum::<u64>(), 15 << 8);
    for run in freed {
        d.media.discard(Segment::Arena(run.arena), run.block * 4096, run.len * 4096).unwrap();
    }
    assert!(blocks() < 2 << 11, "{}", blocks());
    assert_eq!(d.read(2), vec![7; 1 << 20]);
}

fn header(n: u64) -> Header {
    Header { length: 0, sequence: Sequence(n), epoch: Epoch(1), lane: 0, time: 1, promised: 0 }
}

#[test]
fn odd_requests_get_precise_refusals() {
    let mut d = Driver::new(64 << 20);
    d.apply(&create(2, 1, b"file", FILE)).unwrap();
    d.apply(&create(3, 1, b"dir", DIR)).unwrap();
    d.apply(&create(4, 1, b"fifo", 0o010644)).unwrap();
    d.apply(&create(5, 1, b"four blocks", FILE)).unwrap();
    d.apply(&write(5, 0, &[1; 16384])).unwrap();
    let falloc = |ino, mode, offset, len| Op::Fallocate { ino: InodeId(ino), offset, len, mode };
    let shift =
        |ino, insert, offset, len, size| Op::Shift { ino: InodeId(ino), offset, len, insert, size };
    let apply = |d: &mut Driver, op: &Op<'_>| {
        d.volume.apply(&header(1), op, (Segment::Stream, 0)).map(|_| ())
    };
    for (op, want) in [
        (write(3, 0, b"x"), Refusal::IsDirectory),
        (write(4, 0, b"x"), Refusal::Invalid),
        (write(9, 0, b"x"), Refusal::NoEntry),
        (write(2, 1 << 44, b"x"), Refusal::TooBig),
        (write(2, u64::MAX, b"x"), Refusal::TooBig),
        (truncate(2, (1 << 44) + 1), Refusal::TooBig),
        (falloc(2, 0, 0, 0), Refusal::Invalid),
        (falloc(2, 0, 0, 65 << 20), Refusal::NoSpace),
        (falloc(2, 0, u64::MAX, 2), Refusal::TooBig),
        (falloc(2, 2, 0, 10), Refusal::Unsupported),
        (falloc(2, 8, 0, 4096), Refusal::Unsupported),
        (shift(2, false, 0, 4096, 0), Refusal::Invalid),
        (shift(2, true, 0, 4096, 4096), Refusal::Invalid),
        (shift(5, false, 0, 10, 16374), Refusal::Invalid),
        (shift(5, false, 0, 0, 16384), Refusal::Invalid),
        (shift(5, false, 8192, 8192, 8192), Refusal::Invalid),
        (shift(5, false, 0, 4096, 8192), Refusal::Invalid),
        (shift(5, false, 0, 4096, u64::MAX), Refusal::Invalid),
        (shift(5, true, 10, 4096, 20480), Refusal::Invalid),
        (shift(5, true, 0, 4095, 20479), Refusal::Invalid),
        (shift(5, true, 16384, 4096, 20480), Refusal::Invalid),
        (shift(5, true, 0, 4096, 24576), Refusal::Invalid),
        (shift(5, true, 0, 1 << 44, (1 << 44) + 16384), Refusal::TooBig),
        (shift(3, true, 0, 4096, 4096), Refusal::IsDirectory),
        (falloc(3, 0, 0, 10), Refusal::IsDirectory),
        (create(0, 1, b"zero", FILE), Refusal::Invalid),
        (create(9, 1, b"typeless", 0o644), Refusal::Invalid),
        (create(9, 1, b"a/b", FILE), Refusal::BadName),
        (create(9, 1, b"..", FILE), Refusal::BadName),
        (create(9, 1, &[b'n'; 256], FILE), Refusal::BadName),
        (Op::Link { ino: InodeId(3), parent: InodeId(1), name: b"l" }, Refusal::NotPermitted),
        (Op::Link { ino: InodeId(2), parent: InodeId(4), name: b"l" }, Refusal::NotDirectory),
        (Op::Reap { ino: InodeId(1) }, Refusal::Invalid),
        (Op::Reap { ino: InodeId(2) }, Refusal::Invalid),
        (rename(2, (1, b"file"), (3, b"x"), 4), Refusal::Mismatch),
        (rename(2, (1, b"none"), (3, b"x"), 0), Refusal::NoEntry),
    ] {
        let before = d.volume.digest();
        assert_eq!(apply(&mut d, &op), Err(want), "{op:?}");
        assert_eq!(d.volume.digest(), before, "{op:?} changed something");
    }
}

#[test]
fn a_file_without_a_name_gets_one_or_is_freed() {
    let mut d = Driver::new(64 << 20);
    let tmpfile = |ino, linkable| {
        let (ino, parent) = (InodeId(ino), InodeId::ROOT);
        Op::Tmpfile { ino, parent, mode: FILE, uid: 10, gid: 20, linkable }
    };
    let link = |ino, name| Op::Link { ino: InodeId(ino), parent: InodeId::ROOT, name };
    let reap = |ino| Op::Reap { ino: InodeId(ino) };
    for (ino, linkable) in [(2, true), (3, false), (4, true)] {
        let orphaned = Some(InodeId(ino));
        let made = d.apply(&tmpfile(ino, linkable)).unwrap();
        assert_eq!((made.orphaned, made.already), (orphaned, false));
        d.apply(&write(ino, 0, b"content")).unwrap();
    }
    assert!(d.apply(&tmpfile(2, true)).unwrap().already);
    assert_eq!(d.apply(&tmpfile(1, true)), Err(Refusal::Exists));
    let directory = Op::Tmpfile {
        ino: InodeId(9),
        parent: InodeId::ROOT,
        mode: DIR,
        uid: 10,
        gid: 20,
        linkable: true,
    };
    assert_eq!(d.apply(&directory), Err(Refusal::Invalid));
    d.publish();
    assert!(storage::check::check(&*d.media).unwrap().is_sound());
    d.reopen();
    let linkable = |d: &Driver, ino| d.volume.attr(InodeId(ino)).unwrap().unwrap().linkable;
    assert!(linkable(&d, 2) && !linkable(&d, 3), "remembered on media");
    assert_eq!(d.apply(&link(3, b"three")), Err(Refusal::NoEntry), "it was made to have no name");
    d.apply(&link(2, b"two")).unwrap();
    assert!(d.apply(&link(2, b"two")).unwrap().already);
    assert!(!linkable(&d, 2));
    assert_eq!(d.apply(&reap(2)), Err(Refusal::Invalid), "it has a name");
    for ino in [3, 4] {
        d.apply(&reap(ino)).unwrap();
    }
    assert_eq!(d.volume.orphans().unwrap(), []);
    d.apply(&unlink(2, 1, b"two")).unwrap();
    assert_eq!(d.apply(&link(2, b"again")), Err(Refusal::NoEntry), "what had a name and lost it");
    d.publish();
    let report = storage::check::check(&*d.media).unwrap();
    assert!(report.is_sound(), "{:?}", report.findings);
    assert_eq!((report.counts.inodes, report.counts.orphans), (2, 1));
}

#[test]
fn quotas_bound_users_and_directories_exactly() {
    let mut d = Driver::new(64 << 20);
    let limit = |blocks, inodes| Amount { blocks, inodes };
    let quota = |ino: u64, user, limit| Op::SetQuota { ino: InodeId(ino), user, limit };
    let project = |ino: u64, of: u64| Op::SetProject { ino: InodeId(ino), project: InodeId(of) };
    let used = |d: &Driver, id| d.volume.account(id).used;
    let (user, tree) = (AccountId::User(10), AccountId::Directory(InodeId(2)));
    d.apply(&create(2, 1, b"tree", DIR)).unwrap();
    d.apply(&create(3, 1, b"outside", FILE)).unwrap();
    d.apply(&project(2, 2)).unwrap();
    d.apply(&quota(2, None, limit(8, 4))).unwrap();
    d.apply(&quota(1, Some(10), limit(20, 0))).unwrap();
    assert_eq!(d.apply(&quota(3, None, limit(1, 1))), Err(Refusal::NotDirectory));
    assert_eq!(d.apply(&quota(1, Some(0), limit(1, 1))), Err(Refusal::Invalid));
    d.volume.enforce_quotas(true);
    d.apply(&create(4, 2, b"f", FILE)).unwrap();
    d.apply(&write(4, 0, &[1; 8 * 4096])).unwrap();
    assert_eq!(d.apply(&write(4, 8 * 4096, &[1])), Err(Refusal::Quota));
    d.apply(&write(4, 0, &[2; 8 * 4096])).unwrap();
    assert_eq!((used(&d, tree), used(&d, user)), (limit(8, 2), limit(8, 3)));
    d.apply(&write(3, 0, &[1; 12 * 4096])).unwrap();
    assert_eq!(d.apply(&write(3, 12 * 4096, &[1])), Err(Refusal::Quota), "the user's");
    d.apply(&truncate(4, 4096)).unwrap();
    assert_eq!(used(&d, tree), limit(1, 2));
    // Another user's: the directory counts it, the first user does not.
    d.apply(&Op::SetAttr {
        ino: InodeId(4),
        mask: 2,
        mode: 0,
        uid: 11,
        gid: 0,
        atime: Default::default(),
        mtime: Default::default(),
    })
    .unwrap();
    assert_eq!((used(&d, user), used(&d, AccountId::User(11))), (limit(12, 2), limit(1, 1)));
    // Inodes: the directory itself, f, and two more.
    d.apply(&create(5, 2, b"sub", DIR)).unwrap();
    d.apply(&create(6, 5, b"g", FILE)).unwrap();
    assert_eq!(d.apply(&create(7, 5, b"h", FILE)), Err(Refusal::Quota));
    // Nothing gets in or out but by copying, and the directory itself may go where it likes.
    let link =
        |ino: u64, parent: u64| Op::Link { ino: InodeId(ino), parent: InodeId(parent), name: b"n" };
    assert_eq!(d.apply(&link(3, 2)), Err(Refusal::CrossQuota));
    assert_eq!(d.apply(&link(4, 1)), Err(Refusal::CrossQuota));
    assert_eq!(d.apply(&rename(4, (2, b"f"), (1, b"f"), 0)), Err(Refusal::CrossQuota));
    assert_eq!(d.apply(&rename(3, (1, b"outside"), (5, b"o"), 0)), Err(Refusal::CrossQuota));
    d.apply(&rename(6, (5, b"g"), (2, b"g"), 0)).unwrap();
    d.apply(&rename(2, (1, b"tree"), (1, b"moved"), 0)).unwrap();
    d.publish();
    let before = d.volume.accounts(None, 100);
    assert_eq!(before.len(), 4, "{before:?}");
    d.reopen();
    assert_eq!(d.volume.accounts(None, 100), before);
    assert_eq!(d.volume.accounts(Some(user), 1)[0].id, AccountId::User(11));
    // Not enforced, as on the members that follow the head.
    d.apply(&create(7, 5, b"h", FILE)).unwrap();
    d.publish();
    let report = storage::check::check(&*d.media).unwrap();
    assert!(report.is_sound(), "{:?}", report.findings);
    assert_eq!(used(&d, tree), limit(1, 5));
    d.apply(&quota(1, Some(10), limit(0, 0))).unwrap();
    d.volume.enforce_quotas(true);
    d.apply(&write(3, 0, &[1; 30 * 4096])).unwrap();
    d.publish();
    assert!(storage::check::check(&*d.media).unwrap().is_sound());
}

/// Whoever may have a few inodes has no more of the tree than they can take: a name counts as an inode, attributes as blocks.
#[test]
fn quotas_count_names_and_attributes() {
    let mut d = Driver::new(64 << 20);
    let user = AccountId::User(10);
    let used = |d: &Driver| d.volume.account(user).used;
    let amount = |blocks, inodes| Amount { blocks, inodes };
    let link = |name| Op::Link { ino: InodeId(3), parent: InodeId(2), name };
    let unlink = |name| Op::Unlink { ino: InodeId(3), parent: InodeId(2), name, open: false };
    let set = |name, value| Op::SetXattr { ino: InodeId(3), name, value };
    d.apply(&create(2, 1, b"d", DIR)).unwrap();
    d.apply(&create(3, 2, b"f", FILE)).unwrap();
    let limit = amount(20, 4);
    d.apply(&Op::SetQuota { ino: InodeId(1), user: Some(10), limit }).unwrap();
    d.volume.enforce_quotas(true);
    d.apply(&link(b"g")).unwrap();
    d.apply(&link(b"h")).unwrap();
    assert_eq!((used(&d), d.apply(&link(b"i"))), (amount(0, 4), Err(Refusal::Quota)));
    assert_eq!(d.apply(&create(4, 2, b"i", FILE)), Err(Refusal::Quota));
    // What is there already takes nothing, and what goes gives it back.
    assert!(d.apply(&link(b"h")).is_ok());
    d.apply(&unlink(b"f")).unwrap();
    assert_eq!(used(&d), amount(0, 3));
    d.apply(&Op::Rename {
        ino: InodeId(3),
        parent: InodeId(2),
        name: b"g",
        new_parent: InodeId(2),
        new_name: b"i",
        replaced: InodeId(0),
        noreplace: false,
        exchange: false,
        open: false,
    })
    .unwrap();
    assert_eq!(used(&d), amount(0, 3));
    // Attributes: the first few hundred bytes are free, and every four pieces a block.
    d.apply(&set(b"user.small", &[1; 900])).unwrap();
    assert_eq!(used(&d), amount(0, 3));
    d.apply(&set(b"user.large", &[1; 64 << 10])).unwrap();
    assert_eq!(used(&d), amount(17, 3));
    assert_eq!(d.apply(&set(b"user.other", &[1; 16 << 10])), Err(Refusal::Quota));
    d.apply(&set(b"user.large", &[2; 32 << 10])).unwrap();
    assert_eq!(used(&d), amount(9, 3), "another value in place of it");
    d.apply(&set(b"user.other", &[1; 16 << 10])).unwrap();
    assert_eq!(d.apply(&write(3, 0, &[1; 8 * 4096])), Err(Refusal::Quota), "data and attributes");
    d.publish();
    let before = used(&d);
    d.reopen();
    assert_eq!(used(&d), before);
    d.volume.enforce_quotas(true);
    d.apply(&Op::RemoveXattr { ino: InodeId(3), name: b"user.large" }).unwrap();
    d.apply(&Op::RemoveXattr { ino: InodeId(3), name: b"user.other" }).unwrap();
    assert_eq!(used(&d), amount(0, 3));
    // Lists that directories hand on: a large one is barred where the limit is reached.
    let mut list = 2_u32.to_le_bytes().to_vec();
    let mut entry = |tag: u16, perm: u16, id: u32| {
        list.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
        list.extend(id.to_le_bytes());
    };
    entry(1, 7, !0);
    (0..250).for_each(|id| entry(2, 7, 100 + id));
    for (tag, perm) in [(4, 7), (16, 7), (32, 5)] {
        entry(tag, perm, !0);
    }
    d.apply(&Op::SetXattr { ino: InodeId(2), name: b"system.posix_acl_default", value: &list })
        .unwrap();
    d.apply(&unlink(b"h")).unwrap();
    d.apply(&create(5, 2, b"sub", DIR)).unwrap();
    assert_eq!(used(&d), amount(1, 3));
    let limit = amount(1, 0);
    d.apply(&Op::SetQuota { ino: InodeId(1), user: Some(10), limit }).unwrap();
    assert_eq!(d.apply(&create(6, 2, b"more", DIR)), Err(Refusal::Quota));
    d.publish();
    let report = storage::check::check(&*d.media).unwrap();
    assert!(report.is_sound(), "{:?}", report.findings);
}

/// A wrong sum on media is found.
#[test]
fn the_checker_adds_up_the_accounts() {
    let mut d = Driver::new(64 << 20);
    d.apply(&create(2, 1, b"tree", DIR)).unwrap();
    let limit = Amount { blocks: 10, inodes: 10 };
    d.apply(&Op::SetQuota { ino: InodeId(2), user: Some(10), limit }).unwrap();
    d.publish();
    let number = d.volume.root().page;
    let mut bytes = vec![0; 4096];
    d.media.read(Segment::Tree, number * 4096, &mut bytes).unwrap();
    // The item's last word: one inode.
    let item = [10u64, 10, 0, 1].map(u64::to_le_bytes).concat();
    let at = bytes.windows(32).position(|w| w == item).expect("the account is in the only page");
    bytes[at + 24] = 2;
    let sum = base::crc32c(0, &bytes[8..]);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
    d.media.write(Segment::Tree, number * 4096, &bytes).unwrap();
    let report = storage::check::check(&*d.media).unwrap();
    assert!(report.findings.iter().any(|f| f.place.contains("User(10)")), "{:?}", report.findings);
}
