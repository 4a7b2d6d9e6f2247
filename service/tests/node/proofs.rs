//! Who asks by number must have been shown the inode.

use base::wire::Reader;
use base::{Errno, InodeId, Sequence};
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::proof::Proof;
use storage::format::rpc::{self, InodeReply, Request, WANT_PIN};

use crate::rig::{Hand, Rig, SECRET, create};

const OWNER: u32 = 1000;
const STRANGER: u32 = 2000;

/// Everything that can be asked about an inode by its number.
fn all(ino: InodeId) -> [Request<'static>; 9] {
    let mode = LeaseMode::Read;
    [
        Request::Inode { ino, mode: LeaseMode::None, flags: 0 },
        Request::Inode { ino, mode: LeaseMode::Write, flags: WANT_PIN },
        Request::Lookup { dir: ino, name: b"inner", mode, flags: 0 },
        Request::Names { dir: ino, cookie: 0 },
        Request::Extents { ino, from: 0 },
        Request::XattrGet { ino, name: b"user.a" },
        Request::XattrList { ino },
        Request::XattrPart { ino, name: b"user.a", from: 0 },
        Request::Read { ino, offset: 0, len: 10 },
    ]
}

fn lookup(hand: &Hand, rig: &mut Rig, dir: InodeId, name: &[u8]) -> Result<InodeReply, Errno> {
    let request = Request::Lookup { dir, name, mode: LeaseMode::Read, flags: 0 };
    let body = hand.call(rig, &request)?;
    Ok(InodeReply::decode(&mut Reader::new("reply", &body)).expect("a well formed reply"))
}

/// A directory of the owner's with that mode, and a file that everybody may read in it.
fn tree(rig: &mut Rig, owner: &mut Hand, mode: u32) -> (InodeId, InodeId) {
    let dir = owner.create(rig, b"dir", 0o040_000 | mode);
    let (inner, _) = owner.numbers(rig, 1)[0];
    owner.append_in(rig, dir, &create(inner, dir, b"inner", 0o100_666, OWNER));
    owner.sync(rig);
    rig.settle();
    (dir, inner)
}

#[test]
fn a_stranger_who_guesses_numbers_learns_nothing() {
    for n in 0..2 {
        let mut rig = Rig::new(2, 1);
        let mut owner = rig.attach(n, OWNER);
        let (dir, inner) = tree(&mut rig, &mut owner, 0o700);
        let mut stranger = rig.attach(n, STRANGER);
        stranger.proofs = false;
        let mut refused = 0;
        for ino in [dir, inner, InodeId(inner.0 + 1), InodeId(u64::MAX)] {
            for request in all(ino) {
                assert_eq!(stranger.call(&mut rig, &request), Err(Errno::STALE), "{request:?}");
                refused += 1;
                // Neither does a forged proof help, nor that of another inode.
                for proof in [Proof(1), Proof(u64::MAX), Proof::new(SECRET, InodeId(99))] {
                    let mut body = Vec::new();
                    request.encode_shown(Sequence(0), proof, &mut body);
                    stranger.post_raw(0, &body);
                    rig.event(n, service::core::Event::Doorbell(stranger.client));
                    let reply = stranger.reply(0).expect("an answer at once");
                    assert_eq!(rpc::reply_status(&reply).unwrap().0, Err(Errno::STALE));
                    refused += 1;
                }
            }
        }
        assert_eq!(rig.nodes[n].counters().unshown, refused);
        // The way by names ends at the directory.
        let found = lookup(&stranger, &mut rig, InodeId::ROOT, b"dir").expect("it is in the root");
        assert_eq!(found.proof, Proof::new(SECRET, dir));
        stranger.proofs = true;
        assert_eq!(lookup(&stranger, &mut rig, dir, b"inner").err(), Some(Errno::ACCES));
        rig.check();
    }
}

#[test]
fn who_was_shown_an_inode_may_ask_about_it_later() {
    let mut rig = Rig::new(1, 1);
    let mut owner = rig.attach(0, OWNER);
    let (dir, inner) = tree(&mut rig, &mut owner, 0o755);
    let stranger = rig.attach(0, STRANGER);
    let found = lookup(&stranger, &mut rig, dir, b"inner").expect("it may be searched");
    assert_eq!(found.proof, Proof::new(SECRET, inner));
    let found = lookup(&stranger, &mut rig, InodeId::ROOT, b"dir").expect("it is in the root");
    assert_eq!(found.parent_proof, Proof::new(SECRET, InodeId::ROOT));
    for request in &all(inner)[4..] {
        let answer = stranger.call(&mut rig, request);
        assert!(matches!(answer, Ok(_) | Err(Errno::NODATA)), "{request:?}: {answer:?}");
    }
    // The proof outlives the change: as an open O_PATH descriptor would. Content is another matter.
    let mask = storage::format::entry::mask::MODE;
    let chmod = |ino, mode| Op::SetAttr {
        ino,
        mask,
        mode,
        uid: 0,
        gid: 0,
        atime: Default::default(),
        mtime: Default::default(),
    };
    owner.append_in(&mut rig, inner, &chmod(inner, 0o600));
    owner.sync(&mut rig);
    let read = Request::Read { ino: inner, offset: 0, len: 10 };
    assert_eq!(stranger.call(&mut rig, &read), Err(Errno::ACCES));
    rig.check();
}

#[test]
fn a_list_shows_inodes_to_those_who_may_search() {
    for (mode, shows) in [(0o744, false), (0o755, true)] {
        let mut rig = Rig::new(1, 1);
        let mut owner = rig.attach(0, OWNER);
        let (dir, inner) = tree(&mut rig, &mut owner, mode);
        let stranger = rig.attach(0, STRANGER);
        let body = stranger.call(&mut rig, &Request::Names { dir, cookie: 0 }).expect("readable");
        let mut r = Reader::new("names", &body[1..]);
        let mut proofs = Vec::new();
        while r.left() > 0 {
            let name = rpc::take_name(&mut r).expect("a name");
            proofs.push((name.ino, name.proof));
        }
        let proof = if shows { Proof::new(SECRET, inner) } else { Proof::NONE };
        assert!(proofs.contains(&(inner, proof)), "{mode:o}: {proofs:?}");
    }
}

#[test]
fn the_super_user_needs_none() {
    let mut rig = Rig::new(1, 1);
    let mut owner = rig.attach(0, OWNER);
    let (_, inner) = tree(&mut rig, &mut owner, 0o700);
    let mut root = rig.attach(0, 0);
    root.proofs = false;
    for request in &all(inner)[4..] {
        let answer = root.call(&mut rig, request);
        assert!(matches!(answer, Ok(_) | Err(Errno::NODATA)), "{request:?}: {answer:?}");
    }
    let found = lookup(&root, &mut rig, InodeId::ROOT, b"dir").expect("it is in the root");
    // He is told one where he asks for it, to check what others show.
    let proof = Proof::new(SECRET, found.record.ino);
    assert_eq!((found.proof, found.parent_proof), (proof, Proof::NONE));
}

/// Who asks how far a node's state must reach is judged for nothing, and gets nothing by it.
#[test]
fn a_question_gives_no_rights() {
    let mut rig = Rig::new(2, 1);
    let mut owner = rig.attach(0, OWNER);
    let file = owner.create(&mut rig, b"secret", 0o100_600);
    owner.sync(&mut rig);
    rig.settle();
    let stranger = rig.attach(1, STRANGER);
    let read = Request::Read { ino: file, offset: 0, len: 10 };
    assert_eq!(stranger.call(&mut rig, &read), Err(Errno::ACCES));
    let all = rpc::WANT_PIN | rpc::WANT_READ | rpc::WANT_WRITE | rpc::WANT_JOINT;
    for mode in [LeaseMode::None, LeaseMode::Read, LeaseMode::Write] {
        let flags = rpc::WANT_REACH | all;
        let body = stranger.call(&mut rig, &Request::Inode { ino: file, mode, flags });
        let body = body.expect("an answer");
        let reply = InodeReply::decode(&mut Reader::new("reply", &body)).expect("well formed");
        assert!(!stranger.holds(reply.granted), "{mode:?}");
        assert_eq!(stranger.call(&mut rig, &read), Err(Errno::ACCES), "{mode:?}");
    }
    rig.check();
}

#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn rights_that_a_question_gives_are_missed() {
    use base::planted::{Bug, missed};
    assert_eq!(missed(&[(Bug::ReachUnjudged, a_question_gives_no_rights as fn())]), []);
}
