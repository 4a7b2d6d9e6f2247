//! Access control lists at the service: who may set them, and whom they let in.

use base::{Errno, InodeId};
use storage::acl::{ACCESS, DEFAULT};
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::item::ReadClass;
use storage::format::rpc::{Request, WANT_READ};

use crate::rig::{Hand, Rig, create};

const OWNER: u32 = 1000;
const FRIEND: u32 = 2000;
const OTHER: u32 = 3000;
const NONE: u32 = u32::MAX;

fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        value.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    value
}

/// The owner all, the friend what is given, others nothing.
fn for_friend(perm: u16) -> Vec<u8> {
    list(&[(1, 7, NONE), (2, perm, FRIEND), (4, 0, NONE), (16, 7, NONE), (32, 0, NONE)])
}

fn refused(hand: &mut Hand, rig: &mut Rig, lease: InodeId, op: &Op<'_>) -> Option<u64> {
    let before = hand.refusals();
    hand.append_in(rig, lease, op);
    hand.sync(rig);
    (hand.refusals() > before).then(|| hand.word(storage::format::control::REFUSED_ERRNO))
}

fn may_read(hand: &Hand, rig: &mut Rig, ino: InodeId) -> Result<(), Errno> {
    rig.settle();
    let request = Request::Inode { ino, mode: LeaseMode::Read, flags: WANT_READ };
    let opened = hand.call(rig, &request).map(drop);
    let bytes = hand.call(rig, &Request::Read { ino, offset: 0, len: 7 });
    assert_eq!(bytes.clone().map(drop), opened, "what may be opened may be read");
    assert!(bytes.is_err() || bytes == Ok(b"content".to_vec()));
    opened
}

#[test]
fn a_list_lets_in_whom_it_names_and_nobody_else() {
    let mut rig = Rig::new(2, 1);
    let (mut owner, friend, other) =
        (rig.attach(0, OWNER), rig.attach(1, FRIEND), rig.attach(0, OTHER));
    let ino = owner.create(&mut rig, b"file", 0o100_600);
    owner.append(&Op::Write { ino, offset: 0, data: b"content", clear_setid: true });
    owner.append(&Op::SetXattr { ino, name: ACCESS, value: &for_friend(4) });
    owner.sync(&mut rig);
    assert_eq!(owner.refusals(), 0);
    assert_eq!(may_read(&friend, &mut rig, ino), Ok(()));
    assert_eq!(may_read(&other, &mut rig, ino), Err(Errno::ACCES));
    let reply = friend.lease(&mut rig, ino, LeaseMode::Read).unwrap();
    assert_eq!((reply.record.mode, reply.record.acl.is_some()), (0o100_770, true));
    for extent in &reply.extents {
        let class = rig.nodes[1].volume().arena_class(extent.arena);
        assert_eq!(class, Some(ReadClass::Owner { uid: OWNER }), "no mapping shows it to others");
    }
    // chmod takes from the mask, and a plain list the rest. (A list whose mask allows nothing is not asked at all.)
    let chmod = |mode| {
        let none = Default::default();
        Op::SetAttr { ino, mask: 1, mode, uid: 0, gid: 0, atime: none, mtime: none }
    };
    for (mode, friends) in [(0o717, Err(Errno::ACCES)), (0o707, Ok(()))] {
        owner.append_in(&mut rig, ino, &chmod(mode));
        owner.sync(&mut rig);
        assert_eq!(may_read(&friend, &mut rig, ino), friends);
        assert_eq!(may_read(&other, &mut rig, ino), Ok(()));
    }
    let plain = list(&[(1, 6, NONE), (4, 4, NONE), (32, 4, NONE)]);
    owner.append_in(&mut rig, ino, &Op::SetXattr { ino, name: ACCESS, value: &plain });
    owner.sync(&mut rig);
    assert_eq!(may_read(&friend, &mut rig, ino), Ok(()));
    let reply = friend.lease(&mut rig, ino, LeaseMode::Read).unwrap();
    assert_eq!(
        (reply.record.mode, reply.record.acl, reply.record.xattrs),
        (0o100_644, None, false)
    );
    assert_eq!(owner.refusals(), 0);
    rig.settle();
    rig.check();
}

#[test]
fn directories_are_entered_and_written_by_their_lists() {
    let mut rig = Rig::new(1, 1);
    let (mut owner, mut friend, mut other) =
        (rig.attach(0, OWNER), rig.attach(0, FRIEND), rig.attach(0, OTHER));
    let dir = owner.create(&mut rig, b"dir", 0o040_700);
    owner.append(&Op::SetXattr { ino: dir, name: ACCESS, value: &for_friend(7) });
    owner.append(&Op::SetXattr { ino: dir, name: DEFAULT, value: &for_friend(6) });
    owner.sync(&mut rig);
    for (hand, name, want) in [(&mut friend, &b"f"[..], None), (&mut other, b"o", Some(13))] {
        let (ino, _) = hand.numbers(&mut rig, 1)[0];
        // Others cannot have the lease's answer, but may hold the lease.
        let ask = Request::Inode { ino: dir, mode: LeaseMode::Write, flags: 0 };
        hand.call(&mut rig, &ask).unwrap();
        let before = hand.refusals();
        hand.append(&create(ino, dir, name, 0o100_666, hand.uid));
        hand.sync(&mut rig);
        let errno = hand.word(storage::format::control::REFUSED_ERRNO);
        assert_eq!((hand.refusals() > before).then_some(errno), want, "{name:?}");
    }
    let look = |hand: &Hand, rig: &mut Rig| {
        let (dir, mode, flags) = (dir, LeaseMode::Read, 0);
        hand.call(rig, &Request::Lookup { dir, name: b"f", mode, flags }).map(drop)
    };
    assert_eq!(look(&friend, &mut rig), Ok(()));
    assert_eq!(look(&other, &mut rig), Err(Errno::ACCES));
    let (made, _) = rig.nodes[0].volume().lookup(dir, b"f").unwrap().unwrap();
    let record = rig.nodes[0].volume().attr(made).unwrap().unwrap();
    assert_eq!(record.mode, 0o100_660, "the default list took the place of the umask");
    assert!(record.acl.is_some() && record.default_acl.is_none());
    rig.settle();
    rig.check();
}

#[test]
fn lists_of_others_and_what_is_no_list_are_refused() {
    let mut rig = Rig::new(1, 1);
    let (mut owner, mut bad) = (rig.attach(0, OWNER), rig.attach(0, FRIEND));
    let ino = owner.create(&mut rig, b"file", 0o100_666);
    owner.sync(&mut rig);
    let set = |name, value| Op::SetXattr { ino, name, value };
    let (good, mut long) = (for_friend(7), for_friend(7));
    assert_eq!(refused(&mut bad, &mut rig, ino, &set(ACCESS, &good)), Some(1), "not the owner");
    let remove = Op::RemoveXattr { ino, name: ACCESS };
    assert_eq!(refused(&mut bad, &mut rig, ino, &remove), Some(1));
    assert_eq!(refused(&mut owner, &mut rig, ino, &set(b"system.other", &good)), Some(1));
    assert_eq!(refused(&mut owner, &mut rig, ino, &set(DEFAULT, &good)), Some(22), "no directory");
    long.extend(std::iter::repeat_n(0xff, 60_000));
    for value in [&good[..good.len() - 1], &good[..12], b"x", &long[..]] {
        assert_eq!(refused(&mut owner, &mut rig, ino, &set(ACCESS, value)), Some(22));
    }
    assert_eq!(refused(&mut owner, &mut rig, ino, &set(ACCESS, &good)), None);
    assert_eq!(refused(&mut owner, &mut rig, ino, &remove), None);
    rig.settle();
    rig.check();
}
