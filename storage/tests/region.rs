//! The file-backed region: ranges, growth, modes, locking, access by several openers.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use storage::format::superblock::Durability;
use storage::media::{Media, MediaError, Segment};
use storage::region::{FileRegion, file_name, is_left, segment_of};

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("corbel-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Dir(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const MODES: [Durability; 3] = [Durability::Pmem, Durability::Replicated, Durability::Disk];

#[test]
fn every_mode_reads_what_it_wrote() {
    for mode in MODES {
        let dir = Dir::new(&format!("modes-{mode}"));
        let region = FileRegion::create(&dir.0, mode).unwrap();
        region.ensure(Segment::Tree, 10_000).unwrap();
        region.ensure(Segment::Arena(3), 1 << 40).unwrap();
        assert_eq!(region.size(Segment::Tree), Ok(12288));
        let data: Vec<u8> = (0..5000u32).map(|i| i as u8).collect();
        region.write(Segment::Tree, 123, &data).unwrap();
        region.copy((Segment::Tree, 123), (Segment::Arena(3), 1 << 39), 5000).unwrap();
        region.persist(Segment::Arena(3), 1 << 39, 5000).unwrap();
        region.persist(Segment::Tree, 123, 5000).unwrap();
        region.fence().unwrap();
        let mut back = vec![0; 5000];
        let other = FileRegion::open(&dir.0, mode).unwrap();
        other.read(Segment::Arena(3), 1 << 39, &mut back).unwrap();
        assert_eq!(back, data);
        other.discard(Segment::Arena(3), 1 << 39, 4096).unwrap();
        region.read(Segment::Arena(3), 1 << 39, &mut back).unwrap();
        assert!(back[..4096].iter().all(|&b| b == 0));
        assert_eq!(back[4096..], data[4096..]);
        region.store64(Segment::Tree, 8, 5).unwrap();
        assert_eq!(region.cas64(Segment::Tree, 8, 5, 6), Ok(5));
        assert_eq!(other.cas64(Segment::Tree, 8, 5, 7), Ok(6));
        assert_eq!(other.load64(Segment::Tree, 8), Ok(6));
        region.wake(Segment::Tree, 4).unwrap();
    }
}

/// Without DAX, which no temporary directory has, `pmem` would be a promise that nobody keeps.
#[test]
fn pmem_is_promised_on_persistent_memory_only() {
    for mode in MODES {
        let dir = Dir::new(&format!("promise-{mode}"));
        let region = FileRegion::create(&dir.0, mode).unwrap();
        let kept = region.keeps_its_promise();
        assert_eq!(kept.is_err(), mode == Durability::Pmem, "{kept:?}");
        let left = std::fs::read_dir(&dir.0).unwrap().count();
        assert_eq!(left, 0, "nothing is left of the trial");
    }
}

#[test]
fn ranges_are_checked() {
    let dir = Dir::new("ranges");
    let region = FileRegion::create(&dir.0, Durability::Replicated).unwrap();
    let mut buf = [0u8; 16];
    assert_eq!(region.read(Segment::Tree, 0, &mut buf), Err(MediaError::Missing(Segment::Tree)));
    region.ensure(Segment::Tree, 4096).unwrap();
    for offset in [4081, 4096, u64::MAX - 3, u64::MAX] {
        let out = MediaError::OutOfRange { segment: Segment::Tree, offset, len: 16, size: 4096 };
        assert_eq!(region.read(Segment::Tree, offset, &mut buf), Err(out.clone()));
        assert_eq!(region.write(Segment::Tree, offset, &buf), Err(out.clone()));
        assert_eq!(region.discard(Segment::Tree, offset, 16), Err(out));
    }
    assert!(region.load64(Segment::Tree, 4).is_err());
    assert!(region.load64(Segment::Tree, 4096).is_err());
    assert!(region.copy((Segment::Tree, 0), (Segment::Tree, 100), 200).is_err());
    assert!(region.wake(Segment::Tree, 2).is_err());
    // Growth by another opener is noticed.
    let other = FileRegion::open(&dir.0, Durability::Replicated).unwrap();
    other.ensure(Segment::Tree, 8192).unwrap();
    region.write(Segment::Tree, 8000, &buf).unwrap();
    region.ensure(Segment::Tree, 1).unwrap();
    assert_eq!(region.size(Segment::Tree), Ok(8192), "ensure never shrinks");
}

#[test]
fn names_modes_and_locks() {
    for s in [Segment::Super, Segment::Tree, Segment::Stream, Segment::Log(7), Segment::Arena(0)] {
        assert_eq!(segment_of(&file_name(s)), Some(s));
    }
    for bad in ["", "log", "log.", "log.01", "log.-1", "log.4294967296", "arena.x", "tree2"] {
        assert_eq!(segment_of(bad), None, "{bad}");
    }
    let dir = Dir::new("locks");
    let region = FileRegion::create(&dir.0, Durability::Replicated).unwrap();
    region.lock().unwrap();
    let other = FileRegion::open(&dir.0, Durability::Replicated).unwrap();
    assert!(other.lock().unwrap_err().to_string().contains("another service"));
    region.ensure(Segment::Log(2), 4096).unwrap();
    assert_eq!(region.segments(), Ok(vec![Segment::Log(2)]));
    assert!(FileRegion::create(&dir.0, Durability::Replicated).is_err());
    let mode = std::fs::metadata(dir.0.join("log.2")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let fd = region.open_segment(Segment::Log(2), false).unwrap();
    assert!(rustix::io::write(fd.as_fd(), b"x").is_err());
    region.remove(Segment::Log(2)).unwrap();
    assert_eq!(region.remove(Segment::Log(2)), Err(MediaError::Missing(Segment::Log(2))));
    drop(region);
    other.lock().unwrap();
}

/// A process that forks between the making of a region and its end gives its child all that is
/// open, for as long as the child has not executed its program.
#[test]
#[allow(unsafe_code)]
fn a_region_that_is_let_go_is_free_although_a_child_has_its_descriptor() {
    let dir = Dir::new("forked");
    let region = FileRegion::create(&dir.0, Durability::Replicated).unwrap();
    region.lock().unwrap();
    let of_children: Vec<_> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|n: &i32| {
            std::fs::read_link(format!("/proc/self/fd/{n}")).is_ok_and(|to| to == dir.0)
        })
        // SAFETY: the descriptor is that of `region`, which lives longer than the copy takes.
        .map(|n| unsafe { std::os::fd::BorrowedFd::borrow_raw(n) }.try_clone_to_owned().unwrap())
        .collect();
    assert!(!of_children.is_empty());
    drop(region);
    FileRegion::open(&dir.0, Durability::Replicated).unwrap().lock().unwrap();
}

#[test]
fn a_client_that_truncates_its_log_harms_itself_only() {
    let dir = Dir::new("truncate");
    let region = FileRegion::create(&dir.0, Durability::Replicated).unwrap();
    region.ensure(Segment::Log(1), 64 << 10).unwrap();
    region.write(Segment::Log(1), 40_000, b"entry").unwrap();
    let theirs = region.open_segment(Segment::Log(1), true).unwrap();
    assert_eq!(region.is_broken(Segment::Log(1)), Ok(false));
    rustix::fs::ftruncate(&theirs, 4096).unwrap();
    let mut buf = [1; 5];
    region.read(Segment::Log(1), 40_000, &mut buf).unwrap();
    assert_eq!(buf, [0; 5]);
    region.store64(Segment::Log(1), 60_000, 9).unwrap();
    assert_eq!(region.is_broken(Segment::Log(1)), Ok(true));
    region.remove(Segment::Log(1)).unwrap();
}

#[test]
fn a_segment_made_anew_is_seen_after_refresh() {
    let dir = Dir::new("refresh");
    let region = FileRegion::create(&dir.0, Durability::Replicated).unwrap();
    let other = FileRegion::open(&dir.0, Durability::Replicated).unwrap();
    region.ensure(Segment::Arena(0), 4096).unwrap();
    other.write(Segment::Arena(0), 0, b"old").unwrap();
    region.remove(Segment::Arena(0)).unwrap();
    region.ensure(Segment::Arena(0), 4096).unwrap();
    other.refresh().unwrap();
    other.write(Segment::Arena(0), 0, b"new").unwrap();
    let mut buf = [0; 3];
    region.read(Segment::Arena(0), 0, &mut buf).unwrap();
    assert_eq!(&buf, b"new");
}

/// What is reserved goes to what is written, and comes back when that is discarded.
#[test]
fn a_reserve_is_taken_and_given_back() {
    const MIB: u64 = 1 << 20;
    let dir = Dir::new("reserve");
    let region = FileRegion::create(&dir.0, Durability::Replicated).unwrap();
    region.reserve(16 * MIB).unwrap();
    let taken = |name: &str| {
        let about = std::fs::metadata(dir.0.join(name)).unwrap();
        std::os::unix::fs::MetadataExt::blocks(&about) * 512
    };
    let near = |is: u64, want: u64| assert!(is.abs_diff(want) <= 64 << 10, "{is} {want}");
    near(taken("ballast"), 16 * MIB);
    // Of sparse segments, as large as they are, what is written.
    let (one, two) = (Segment::Arena(0), Segment::Arena(1));
    for arena in [one, two] {
        region.ensure(arena, 1 << 40).unwrap();
    }
    region.back(&[(one, (1 << 39) + 5, 4 * MIB), (two, 0, MIB), (two, 0, MIB)]).unwrap();
    near(taken("arena.0"), 4 * MIB);
    near(taken("ballast"), 11 * MIB);
    let mut byte = [1];
    region.read(one, (1 << 39) + 5, &mut byte).unwrap();
    assert_eq!(byte, [0]);
    region.discard(one, 1 << 39, 4 * MIB).unwrap();
    near(taken("ballast"), 15 * MIB);
    // It is taken again where it was given back.
    region.back(&[(one, 1 << 39, 2 * MIB)]).unwrap();
    near(taken("arena.0"), 2 * MIB);
    near(taken("ballast"), 13 * MIB);
    // Whoever opens it next knows what is taken.
    let other = FileRegion::open(&dir.0, Durability::Replicated).unwrap();
    assert_eq!(other.take_up_reserve(16 * MIB), Ok(0));
    near(taken("ballast"), 13 * MIB);
    other.back(&[(one, 0, MIB)]).unwrap();
    near(taken("ballast"), 12 * MIB);
    // The ring has all of its blocks at once.
    region.ensure(Segment::Stream, 2 * MIB).unwrap();
    near(taken("stream"), 2 * MIB);
}

/// The first copy into blocks goes through the file, later ones through the mapping: whatever was there before, whether it
/// was taken beforehand, and wherever it begins, all who have the segment mapped find the bytes that were copied, and zeroes
/// or what there was beside them.
#[test]
fn copies_into_untouched_blocks_are_copies() {
    const SIZE: u64 = 1 << 20;
    for mode in MODES {
        let dir = Dir::new(&format!("untouched-{mode}"));
        let region = FileRegion::create(&dir.0, mode).unwrap();
        let mut random = base::random::Random::new(4);
        region.ensure(Segment::Stream, SIZE).unwrap();
        region.ensure(Segment::Arena(0), SIZE).unwrap();
        let mut source = vec![0; SIZE as usize];
        random.fill(&mut source);
        region.write(Segment::Stream, 0, &source).unwrap();
        let other = FileRegion::open(&dir.0, mode).unwrap();
        let mut model = vec![0u8; SIZE as usize];
        for step in 0..200 {
            let unit = [1, 64, 4096][random.below(3) as usize];
            let len = 1 + random.below(SIZE / 4);
            let from = random.below(SIZE - len);
            let to = random.below(SIZE - len) / unit * unit;
            let a = to as usize;
            match random.below(5) {
                0 => {
                    let (first, end) = (to.next_multiple_of(4096), (to + len) & !4095);
                    if first < end {
                        region.discard(Segment::Arena(0), first, end - first).unwrap();
                        model[first as usize..end as usize].fill(0);
                    }
                }
                1 => region.back(&[(Segment::Arena(0), to, len)]).unwrap(),
                _ => {
                    // In pieces, as a log has them.
                    let piece = 1 + random.below(len);
                    let run: Vec<_> = (0..len)
                        .step_by(piece as usize)
                        .map(|at| (Segment::Stream, from + at, piece.min(len - at)))
                        .take(1000)
                        .collect();
                    let len = run.iter().map(|piece| piece.2).sum::<u64>();
                    region.copy_run(&run, (Segment::Arena(0), to)).unwrap();
                    let b = (to + len) as usize;
                    model[a..b].copy_from_slice(&source[from as usize..(from + len) as usize]);
                }
            }
            if random.chance(1, 6) {
                let mut seen = vec![0; SIZE as usize];
                other.read(Segment::Arena(0), 0, &mut seen).unwrap();
                assert!(seen == model, "{mode}: step {step}");
                // Who reads everything has touched everything.
                region.discard(Segment::Arena(0), 0, SIZE).unwrap();
                model.fill(0);
            }
        }
    }
}

/// What arenas have behind an offset is counted as it is there, not as it might be.
#[test]
fn what_arenas_have_from_an_offset_on_is_counted() {
    let name = format!("/dev/shm/corbel-taken-{}", std::process::id());
    let dir = Dir(PathBuf::from(name));
    let region = FileRegion::create(&dir.0, Durability::Replicated).unwrap();
    let base = 1 << 30;
    for n in 0..20 {
        region.ensure(Segment::Arena(n), base + (2 << 20)).unwrap();
    }
    assert_eq!(region.taken_from(base), Ok(0));
    for n in 0..20 {
        let arena = Segment::Arena(n);
        region.write(arena, u64::from(n) << 20, &[1; 50_000]).unwrap();
        region.write(arena, base + 3 * 4096, &[1; 4097]).unwrap();
        region.write(arena, base + (1 << 20), &[1; 8]).unwrap();
    }
    assert_eq!(region.taken_from(base), Ok(20 * 3 * 4096));
    region.discard(Segment::Arena(5), base, 2 << 20).unwrap();
    assert_eq!(region.taken_from(base), Ok(19 * 3 * 4096));
    let spare = region.spare().unwrap().unwrap();
    assert_eq!((spare.data, spare.reserved), (20 * 13 * 4096 + 19 * 3 * 4096, 0));
}

/// Whoever has a log that counts no more keeps what lies in it, and takes no more by it; also past the process that left it.
#[test]
fn a_log_that_somebody_has_still_is_looked_after() {
    const BYTES: u64 = 1 << 20;
    let dir = Dir::new("left");
    let region = FileRegion::create(&dir.0, Durability::Replicated).unwrap();
    let names = || {
        let all = std::fs::read_dir(&dir.0).unwrap();
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
        let mut all: Vec<_> = all.map(name).filter_map(|name| name.into_string().ok()).collect();
        all.retain(|name| name.contains('.') && !name.contains("lock"));
        all
    };
    for log in 0..3 {
        region.ensure(Segment::Log(log), BYTES).unwrap();
        region.write(Segment::Log(log), 0, b"kept").unwrap();
    }
    let (first, second) =
        [1, 2].map(|log| region.open_segment(Segment::Log(log), true).unwrap()).into();
    assert_eq!(region.leave(Segment::Log(0), 7, BYTES), Ok(false), "nobody has it");
    assert_eq!(region.leave(Segment::Log(1), 7, BYTES), Ok(true));
    assert_eq!(region.leave(Segment::Log(2), 8, BYTES), Ok(true));
    assert_eq!(region.segments(), Ok(vec![]), "they are nobody's log");
    let all = names();
    assert!(all.len() == 2 && all.iter().all(|name| is_left(name)), "{all:?}");
    // One is filled beyond its end: it has nothing from then on. The other one is as it was, also for who looks next.
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&first, flags, BYTES, 4 << 20).unwrap();
    drop(region);
    let region = FileRegion::open(&dir.0, Durability::Replicated).unwrap();
    let taken = |file| rustix::fs::fstat(file).unwrap().st_blocks * 512;
    assert_eq!(region.look_at_left(), Ok([(7, 1), (8, 1)].into()));
    assert_eq!((taken(&first), taken(&second) > 0), (0, true));
    rustix::fs::ftruncate(&first, 100).unwrap();
    rustix::fs::fallocate(&first, rustix::fs::FallocateFlags::empty(), 0, BYTES).unwrap();
    region.look_at_left().unwrap();
    assert_eq!(taken(&first), 0, "again and again");
    let mut bytes = [0; 4];
    rustix::io::pread(&second, &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"kept");
    // One that cannot have the name is looked after without.
    region.ensure(Segment::Log(3), BYTES).unwrap();
    let third = region.open_segment(Segment::Log(3), true).unwrap();
    let inode = rustix::fs::fstat(&third).unwrap().st_ino;
    let way = dir.0.join(format!("left.{inode}.9.{BYTES}"));
    std::fs::create_dir(&way).unwrap();
    assert_eq!(region.leave(Segment::Log(3), 9, BYTES), Ok(true));
    std::fs::remove_dir(&way).unwrap();
    rustix::fs::fallocate(&third, flags, BYTES, 4 << 20).unwrap();
    assert_eq!(region.look_at_left(), Ok([(7, 1), (8, 1), (9, 1)].into()));
    assert_eq!((taken(&third), names().len()), (0, 2));
    drop(third);
    // When nobody has them any more they go.
    drop((first, second));
    for _ in 0..8 {
        region.look_at_left().unwrap();
    }
    assert_eq!((region.look_at_left(), names()), (Ok([].into()), vec![]));
}
