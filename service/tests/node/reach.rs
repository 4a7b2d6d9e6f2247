//! Memory shows nobody more than the directories on the way let them open, also after these have changed; and not for long
//! what is gone.

use base::InodeId;
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, Stamp, mask};
use storage::format::item::ReadClass;
use storage::limits::BLOCK_BYTES;
use storage::media::{Media, Segment};

use crate::rig::{Hand, Rig, create};

const SECRET: &[u8] = b"what the owner of the directory wrote";
const OTHER: u32 = 2000;
/// What a member looks at beyond the blocks that are used: far more than these tests use.
const LOOK: u64 = 4 << 20;

fn chmod(ino: InodeId, mode: u32) -> Op<'static> {
    let (mask, time) = (mask::MODE, Stamp::default());
    Op::SetAttr { ino, mask, mode, uid: 0, gid: 0, atime: time, mtime: time }
}

/// A directory of root's with a file that everybody may read, if they come so far.
fn with_file(rig: &mut Rig, root: &mut Hand, mode: u32) -> (InodeId, InodeId) {
    let dir = root.create(rig, b"dir", 0o040_000 | mode);
    let (ino, _) = root.numbers(rig, 1)[0];
    root.append_in(rig, dir, &create(ino, dir, b"file", 0o100_644, 0));
    root.append_in(rig, ino, &Op::Write { ino, offset: 0, data: SECRET, clear_setid: false });
    root.sync(rig);
    rig.settle();
    (dir, ino)
}

/// In which arenas that `OTHER` may map the secret lies, on any member.
fn shown(rig: &Rig) -> Vec<(usize, u32)> {
    let mut found = Vec::new();
    for (n, (node, region)) in rig.nodes.iter().zip(&rig.regions).enumerate() {
        for (arena, class) in node.volume().arenas() {
            let size = region.size(Segment::Arena(arena)).expect("an arena").min(LOOK);
            let mut bytes = vec![0; size as usize];
            region.read(Segment::Arena(arena), 0, &mut bytes).expect("its bytes");
            let there = bytes.windows(SECRET.len()).any(|w| w == SECRET);
            found.extend((there && class.readable_by(OTHER, OTHER, &[])).then_some((n, arena)));
        }
    }
    found
}

fn class_of(rig: &Rig, n: usize, ino: InodeId) -> Option<ReadClass> {
    let extents = rig.nodes[n].volume().extents(ino, 0, 1).expect("extents");
    rig.nodes[n].volume().arena_class(extents.first()?.arena)
}

#[test]
fn a_directory_that_lets_nobody_in_takes_its_files_along() {
    let mut rig = Rig::new(3, 1);
    let (mut root, other) = (rig.attach(0, 0), rig.attach(1, OTHER));
    let (dir, ino) = with_file(&mut rig, &mut root, 0o755);
    assert_eq!(shown(&rig).len(), 3, "everybody may open it");
    // Somebody else reads it and knows where its blocks lie.
    let granted = other.lease(&mut rig, ino, LeaseMode::Read).expect("a lease").granted;
    assert!(other.holds(granted));
    root.append_in(&mut rig, dir, &chmod(dir, 0o700));
    root.sync(&mut rig);
    rig.settle();
    assert!(!other.holds(granted), "who knows where the blocks were has to ask again");
    assert_eq!(class_of(&rig, 2, ino), Some(ReadClass::Owner { uid: 0 }));
    assert_eq!(shown(&rig), [], "on no member, and nothing is left behind");
    // And back.
    root.append_in(&mut rig, dir, &chmod(dir, 0o755));
    root.sync(&mut rig);
    rig.settle();
    assert_eq!(class_of(&rig, 1, ino), Some(ReadClass::World));
    rig.check();
}

#[test]
fn what_is_made_in_a_closed_directory_is_shown_to_nobody_and_moves_out_with_its_name() {
    let mut rig = Rig::new(2, 2);
    let mut root = rig.attach(0, 0);
    let (dir, ino) = with_file(&mut rig, &mut root, 0o700);
    assert_eq!(shown(&rig), []);
    let out = Op::Rename {
        ino,
        parent: dir,
        name: b"file",
        new_parent: InodeId::ROOT,
        new_name: b"out",
        replaced: InodeId::NONE,
        noreplace: false,
        exchange: false,
        open: false,
    };
    for of in [dir, ino] {
        root.lease(&mut rig, of, LeaseMode::Write).expect("a lease");
    }
    root.append_in(&mut rig, InodeId::ROOT, &out);
    root.sync(&mut rig);
    rig.settle();
    assert_eq!(root.refusals(), 0);
    assert_eq!(class_of(&rig, 1, ino), Some(ReadClass::World));
    rig.check();
}

/// A directory far above, with more below it than one step looks at.
#[test]
fn whatever_lies_below_a_directory_follows_it() {
    let mut rig = Rig::new(2, 3);
    let mut root = rig.attach(0, 0);
    let top = root.create(&mut rig, b"top", 0o040_755);
    let (mut at, mut files) = (top, Vec::new());
    for depth in 0..5u32 {
        let (dir, _) = root.numbers(&mut rig, 1)[0];
        root.append_in(&mut rig, at, &create(dir, at, b"deeper", 0o040_755, 0));
        at = dir;
        for i in 0..40 {
            let (ino, _) = root.numbers(&mut rig, 1)[0];
            let name = format!("file {depth} {i}");
            root.append_in(&mut rig, at, &create(ino, at, name.as_bytes(), 0o100_644, 0));
            let data = SECRET;
            root.append_in(&mut rig, ino, &Op::Write { ino, offset: 0, data, clear_setid: false });
            files.push(ino);
        }
    }
    root.sync(&mut rig);
    rig.settle();
    assert_eq!(shown(&rig).len(), 2);
    root.append_in(&mut rig, top, &chmod(top, 0o711));
    root.sync(&mut rig);
    rig.settle();
    assert!(rig.nodes[0].volume().unplaced() == 0, "who comes through comes as far as before");
    root.append_in(&mut rig, top, &chmod(top, 0o700));
    root.sync(&mut rig);
    for _ in 0..100 {
        rig.settle();
        if rig.nodes[0].volume().unplaced() == 0 {
            break;
        }
    }
    for ino in files {
        assert_eq!(class_of(&rig, 1, ino), Some(ReadClass::Owner { uid: 0 }), "{ino}");
    }
    assert_eq!(shown(&rig), []);
    rig.check();
}

#[test]
fn what_was_in_a_small_file_that_is_gone_is_cleared() {
    let mut rig = Rig::new(2, 4);
    let mut root = rig.attach(0, 0);
    let (dir, ino) = with_file(&mut rig, &mut root, 0o755);
    assert_eq!(shown(&rig).len(), 2);
    root.lease(&mut rig, ino, LeaseMode::Write).expect("a lease");
    let unlink = Op::Unlink { ino, parent: dir, name: b"file", open: false };
    root.append_in(&mut rig, dir, &unlink);
    root.sync(&mut rig);
    rig.settle();
    assert_eq!(shown(&rig), [], "nothing of {} bytes a block is left", BLOCK_BYTES);
    rig.check();
}

#[test]
fn no_client_says_whom_directories_let_come() {
    let mut rig = Rig::new(1, 5);
    let mut root = rig.attach(0, 0);
    let (_, ino) = with_file(&mut rig, &mut root, 0o700);
    root.append_in(&mut rig, ino, &Op::Place { ino, reach: ReadClass::World, later: false });
    root.sync(&mut rig);
    rig.settle();
    assert_eq!(root.refusals(), 1, "not even root");
    assert_eq!(shown(&rig), []);
    rig.check();
}

/// Every check that is taken out is missed by one of the tests above.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn every_variant_shows_what_it_must_not() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 5] = [
        (
            Bug::ReachForgotten,
            what_is_made_in_a_closed_directory_is_shown_to_nobody_and_moves_out_with_its_name,
        ),
        (Bug::SearchForgotten, a_directory_that_lets_nobody_in_takes_its_files_along),
        (Bug::PlaceUnrecalled, a_directory_that_lets_nobody_in_takes_its_files_along),
        (Bug::FreedUncleared, what_was_in_a_small_file_that_is_gone_is_cleared),
        (Bug::PlaceAllowed, no_client_says_whom_directories_let_come),
    ];
    assert_eq!(missed(&tests), []);
}
