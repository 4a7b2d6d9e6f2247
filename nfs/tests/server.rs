//! Against a real server (NFS-Ganesha, its VFS back end on a tmpfs), each test its own, over both versions of the protocol: what a file system must
//! do, what others see of it, a server that is restarted, locks, and any history beside a model of it. `scripts/suites/knfsd.sh` runs the same
//! against the kernel's server.

#[path = "../../kv/tests/by_hand/mod.rs"]
mod by_hand;
mod common;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::{Errno, InodeId};
use by_hand::{content, file, mkdir};
use client::fs::*;
use common::Server;
use nfs::NfsFs;
use proptest::prelude::*;

const ROOT: InodeId = InodeId::ROOT;
const USER: Caller<'static> = Caller { uid: 1000, gid: 1000, groups: &[], pid: 1, umask: 0 };
const OTHER: Caller<'static> = Caller { uid: 2000, gid: 2000, groups: &[], pid: 1, umask: 0 };

fn names(fs: &NfsFs, dir: InodeId) -> Vec<Vec<u8>> {
    let mut all = by_hand::names(fs, dir);
    all.sort();
    all
}

fn rename(fs: &NfsFs, from: (InodeId, &[u8]), to: (InodeId, &[u8])) -> Result<()> {
    by_hand::rename(fs, from, to, 0)
}

fn files_directories_and_names(version: u32) {
    let Some(server) = Server::start() else { return };
    let (fs, other) = (server.open(version), server.open(version));
    let dir = mkdir(&fs, ROOT, b"dir");
    assert_eq!(other.lookup(&Caller::ROOT, ROOT, b"dir").unwrap(), dir);
    assert_eq!(other.lookup(&Caller::ROOT, dir.ino, b"..").unwrap().ino, ROOT);
    assert_eq!(other.lookup(&Caller::ROOT, ROOT, b"..").unwrap().ino, ROOT);
    let data: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let ino = file(&fs, b"a\xc3\xa4\n name", &data);
    let there = server.read("aä\n name");
    assert!(there == data && content(&other, ino) == data);
    assert_eq!(fs.lookup(&USER, ROOT, &[b'x'; 256]), Err(Errno::NAMETOOLONG));
    assert_eq!(fs.lookup(&USER, ROOT, b"a/b"), Err(Errno::INVAL));
    assert_eq!(fs.lookup(&USER, ROOT, b"none"), Err(Errno::NOENT));
    assert_eq!(fs.lookup(&USER, ino, b"x"), Err(Errno::NOTDIR));
    let again =
        fs.mknod(&Caller::ROOT, ROOT, b"dir", &NewNode { mode: S_IFDIR, rdev: 0, target: b"" });
    assert_eq!(again, Err(Errno::EXIST));
    let long = [b'x'; 255];
    let named = file(&fs, &long, b"long");
    assert_eq!(fs.lookup(&Caller::ROOT, ROOT, &long).unwrap().ino, named);
    fs.unlink(&Caller::ROOT, ROOT, &long).unwrap();

    rename(&fs, (ROOT, b"a\xc3\xa4\n name"), (dir.ino, b"b")).unwrap();
    assert_eq!(names(&other, ROOT), [&b"."[..], b"..", b"dir"]);
    assert_eq!(names(&other, dir.ino), [&b"."[..], b"..", b"b"]);
    let second = fs.link(&Caller::ROOT, ino, ROOT, b"c").unwrap();
    assert_eq!((second.nlink, second.ino), (2, ino));
    assert_eq!(other.lookup(&Caller::ROOT, ROOT, b"c").unwrap().ino, ino);
    assert_eq!(fs.link(&Caller::ROOT, ino, ROOT, b"c"), Err(Errno::EXIST));
    assert_eq!(fs.rmdir(&Caller::ROOT, ROOT, b"dir"), Err(Errno::NOTEMPTY));
    assert_eq!(fs.unlink(&Caller::ROOT, ROOT, b"dir"), Err(Errno::ISDIR));
    assert_eq!(fs.rmdir(&Caller::ROOT, ROOT, b"c"), Err(Errno::NOTDIR));
    fs.unlink(&Caller::ROOT, dir.ino, b"b").unwrap();
    fs.rmdir(&Caller::ROOT, ROOT, b"dir").unwrap();
    assert!(content(&other, ino) == data);

    let link = NewNode { mode: S_IFLNK | 0o777, rdev: 0, target: b"some/where" };
    let link = fs.mknod(&Caller::ROOT, ROOT, b"l", &link).unwrap();
    assert_eq!((link.size, link.kind()), (10, S_IFLNK));
    // A number that it was not told of is looked for.
    assert_eq!(other.readlink(&USER, link.ino).unwrap(), b"some/where");
    assert_eq!(fs.readlink(&USER, link.ino).unwrap(), b"some/where");
    assert_eq!(fs.open(&USER, link.ino, O_RDONLY), Err(Errno::LOOP));
    assert_eq!(fs.open(&USER, ROOT, O_RDONLY), Err(Errno::ISDIR));
    let tube = NewNode { mode: S_IFIFO | 0o600, rdev: 0, target: b"" };
    assert_eq!(fs.mknod(&Caller::ROOT, ROOT, b"p", &tube).unwrap().kind(), S_IFIFO);
    let socket = NewNode { mode: S_IFSOCK | 0o600, rdev: 0, target: b"" };
    assert_eq!(fs.mknod(&Caller::ROOT, ROOT, b"s", &socket).unwrap().kind(), S_IFSOCK);
    let disk = NewNode { mode: S_IFBLK | 0o600, rdev: 0x801, target: b"" };
    let disk = fs.mknod(&Caller::ROOT, ROOT, b"d", &disk).unwrap();
    assert_eq!((disk.kind(), disk.rdev), (S_IFBLK, 0x801));
    let space = fs.statfs().unwrap();
    assert!(space.blocks > 0 && space.blocks_free > 0 && space.name_max == 255, "{space:?}");
}

fn renames_as_posix_has_them(version: u32) {
    let Some(server) = Server::start() else { return };
    let fs = server.open(version);
    let (a, b) = (mkdir(&fs, ROOT, b"a"), mkdir(&fs, ROOT, b"b"));
    let inner = mkdir(&fs, a.ino, b"inner");
    assert_eq!(rename(&fs, (ROOT, b"a"), (inner.ino, b"x")), Err(Errno::INVAL));
    assert_eq!(rename(&fs, (a.ino, b"inner"), (ROOT, b"a")), Err(Errno::NOTEMPTY));
    let f = file(&fs, b"f", b"f");
    assert_eq!(rename(&fs, (ROOT, b"f"), (ROOT, b"b")), Err(Errno::ISDIR));
    assert_eq!(rename(&fs, (ROOT, b"b"), (ROOT, b"f")), Err(Errno::NOTDIR));
    assert_eq!(rename(&fs, (ROOT, b"none"), (ROOT, b"f")), Err(Errno::NOENT));
    assert_eq!(rename(&fs, (ROOT, b".."), (ROOT, b"f")), Err(Errno::BUSY));
    // One takes the place of an empty one.
    rename(&fs, (a.ino, b"inner"), (ROOT, b"b")).unwrap();
    assert_eq!(fs.lookup(&Caller::ROOT, inner.ino, b"..").unwrap().ino, ROOT);
    assert_eq!(fs.getattr(&Caller::ROOT, b.ino), Err(Errno::STALE));
    // Two names of one file: nothing happens, also where it is open.
    fs.link(&Caller::ROOT, f, ROOT, b"g").unwrap();
    let handle = fs.open(&Caller::ROOT, f, O_RDONLY).unwrap();
    rename(&fs, (ROOT, b"f"), (ROOT, b"g")).unwrap();
    assert_eq!(fs.fgetattr(handle).unwrap().nlink, 2);
    fs.release(handle);
    assert_eq!(names(&fs, ROOT), [&b"."[..], b"..", b"a", b"b", b"f", b"g"]);
    // What is renamed by somebody else stays what it was.
    let handle = fs.open(&Caller::ROOT, f, O_RDWR).unwrap();
    server.rename("f", "a/elsewhere");
    fs.write(handle, 0, b"F", false).unwrap();
    fs.fsync(handle, false).unwrap();
    fs.release(handle);
    assert_eq!(server.read("a/elsewhere"), b"F");
    let flags = Rename { parent: ROOT, name: b"g", new_parent: ROOT, new_name: b"h", flags: 1 };
    assert_eq!(fs.rename(&Caller::ROOT, &flags), Err(Errno::INVAL));
}

fn what_is_open_outlives_its_name(version: u32) {
    let Some(server) = Server::start() else { return };
    let fs = server.open(version);
    let ino = file(&fs, b"f", &[7; 10_000]);
    let handle = fs.open(&Caller::ROOT, ino, O_RDWR).unwrap();
    fs.unlink(&Caller::ROOT, ROOT, b"f").unwrap();
    assert_eq!(fs.lookup(&Caller::ROOT, ROOT, b"f"), Err(Errno::NOENT));
    let mut data = [0; 3];
    assert_eq!((fs.read(handle, 9_997, &mut data).unwrap(), data), (3, [7; 3]));
    assert_eq!(fs.write(handle, 0, b"still", false).unwrap().len, 5);
    assert_eq!(fs.fgetattr(handle).unwrap().nlink, 0);
    // Another file takes the name, and then a third one over it while it is open.
    let second = file(&fs, b"f", b"second");
    let second = fs.open(&Caller::ROOT, second, O_RDONLY).unwrap();
    let third = file(&fs, b"g", b"third");
    rename(&fs, (ROOT, b"g"), (ROOT, b"f")).unwrap();
    assert_eq!(fs.lookup(&Caller::ROOT, ROOT, b"f").unwrap().ino, third);
    let mut data = [0; 6];
    assert_eq!((fs.read(second, 0, &mut data).unwrap(), &data), (6, b"second"));
    assert_eq!(fs.fgetattr(second).unwrap().nlink, 0);
    assert_eq!(server.count(), 3);
    fs.release(handle);
    fs.release(second);
    assert_eq!(names(&fs, ROOT), [&b"."[..], b"..", b"f"]);
    // A device that comes back knows its open files by number, also those that have no name, and clears up after itself.
    let ino = file(&fs, b"late", b"late");
    let handle = fs.open(&Caller::ROOT, ino, O_RDONLY).unwrap();
    fs.unlink(&Caller::ROOT, ROOT, b"late").unwrap();
    let next = server.open(version);
    let again = next.open(&Caller::ROOT, ino, O_RDONLY).unwrap();
    let mut data = [0; 4];
    assert_eq!((next.read(again, 0, &mut data).unwrap(), &data), (4, b"late"));
    assert_eq!(next.fgetattr(again).unwrap().nlink, 0);
    next.release(again);
    assert_eq!(names(&next, ROOT), [&b"."[..], b"..", b"f"]);
    drop((fs, handle));
    // The kernel's server has a file at hand for a moment after its last name is gone.
    let gone = next.getattr(&Caller::ROOT, ino).map(|attr| attr.nlink);
    assert!(matches!(gone, Err(Errno::STALE) | Ok(0)), "{gone:?}");
}

fn permission_is_judged_by_the_server(version: u32) {
    let Some(server) = Server::start() else { return };
    server.chmod("", 0o1777);
    let fs = server.open(version);
    let (attr, handle) = fs.create(&USER, ROOT, b"mine", 0o640, O_RDWR).unwrap();
    fs.release(handle);
    assert_eq!((attr.uid, attr.gid, attr.mode & 0o7777), (1000, 1000, 0o640));
    assert_eq!(fs.open(&OTHER, attr.ino, O_RDONLY), Err(Errno::ACCES));
    let member = Caller { groups: &[5, 1000], ..OTHER };
    let handle = fs.open(&member, attr.ino, O_RDONLY).unwrap();
    assert_eq!(fs.write(handle, 0, b"x", false), Err(Errno::BADF));
    fs.release(handle);
    assert_eq!(fs.open(&member, attr.ino, O_RDWR), Err(Errno::ACCES));
    // A file may be written by who makes it, whatever its mode says.
    let (closed, handle) = fs.create(&USER, ROOT, b"closed", 0o400, O_RDWR | O_EXCL).unwrap();
    assert_eq!((closed.mode & 0o7777, closed.uid), (0o400, 1000));
    assert_eq!(fs.write(handle, 0, b"x", false).unwrap().len, 1);
    fs.release(handle);
    let mode = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
    assert_eq!(fs.setattr(&OTHER, attr.ino, &mode(0o777)), Err(Errno::PERM));
    assert_eq!(fs.setattr(&USER, attr.ino, &mode(0o711)).unwrap().mode & 0o7777, 0o711);
    let owner = SetAttr { uid: Some(0), ..SetAttr::default() };
    assert_eq!(fs.setattr(&USER, attr.ino, &owner), Err(Errno::PERM));
    let owner = SetAttr { uid: Some(2000), gid: Some(77), ..SetAttr::default() };
    let theirs = fs.setattr(&Caller::ROOT, attr.ino, &owner).unwrap();
    assert_eq!((theirs.uid, theirs.gid), (2000, 77));
    assert_eq!(server.owner("mine"), (2000, 77));
    let size = SetAttr { size: Some(10), ..SetAttr::default() };
    assert_eq!(fs.setattr(&USER, attr.ino, &size), Err(Errno::ACCES));
    assert_eq!(fs.setattr(&OTHER, attr.ino, &size).unwrap().size, 10);
    // The root is sticky.
    assert!(matches!(fs.unlink(&USER, ROOT, b"mine"), Err(Errno::PERM | Errno::ACCES)));
    assert_eq!(fs.access(&USER, attr.ino, 4), Err(Errno::ACCES));
    assert_eq!(fs.access(&USER, attr.ino, 1), Ok(()));
    let dir = fs.mknod(&USER, ROOT, b"d", &NewNode { mode: S_IFDIR | 0o700, rdev: 0, target: b"" });
    let dir = dir.unwrap().ino;
    assert_eq!(fs.lookup(&OTHER, dir, b"x"), Err(Errno::ACCES));
    assert!(matches!(fs.create(&OTHER, dir, b"x", 0o600, O_RDWR), Err(Errno::ACCES)));

    // Where the server makes nobody of the super-user, he is nobody.
    let squashed = format!("nfs://127.0.0.1/squash?version={version}").parse().unwrap();
    let squashed = server.open_at(&squashed);
    let nobody = squashed.create(&Caller::ROOT, ROOT, b"root's", 0o644, O_RDWR).unwrap();
    assert!(nobody.0.uid > 0, "{:?}", nobody.0);
    squashed.release(nobody.1);
    let closed = squashed.lookup(&Caller::ROOT, ROOT, b"closed").unwrap();
    assert_eq!(squashed.open(&Caller::ROOT, closed.ino, O_RDONLY), Err(Errno::ACCES));
}

fn attributes_and_times(version: u32) {
    let Some(server) = Server::start() else { return };
    let fs = server.open(version);
    let ino = file(&fs, b"f", b"12345");
    let at = |sec, nsec| Some(SetTime::At(Time { sec, nsec }));
    let set = SetAttr {
        atime: at(1_000_000, 5),
        mtime: at(2_000_000_000, 123_456_789),
        ..SetAttr::default()
    };
    let attr = fs.setattr(&Caller::ROOT, ino, &set).unwrap();
    assert_eq!(attr.atime, Time { sec: 1_000_000, nsec: 5 });
    assert_eq!(attr.mtime, Time { sec: 2_000_000_000, nsec: 123_456_789 });
    let bad = SetAttr { atime: at(1, 1_000_000_000), ..SetAttr::default() };
    assert_eq!(fs.setattr(&Caller::ROOT, ino, &bad), Err(Errno::INVAL));
    let now = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
    let mtime = fs.setattr(&Caller::ROOT, ino, &now).unwrap().mtime;
    assert!(mtime.sec != 2_000_000_000 && mtime.sec > 1_600_000_000);
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    assert_eq!(fs.setattr(&Caller::ROOT, ino, &size(3)).unwrap().size, 3);
    assert_eq!(fs.setattr(&Caller::ROOT, ino, &size(6)).unwrap().size, 6);
    assert_eq!(content(&fs, ino), b"123\0\0\0");
    assert_eq!(fs.setattr(&Caller::ROOT, ino, &size(u64::MAX)), Err(Errno::FBIG));
    assert_eq!(fs.setattr(&Caller::ROOT, ROOT, &size(0)), Err(Errno::ISDIR));
    // What somebody else does is seen at once.
    server.write("f", "theirs");
    assert_eq!(content(&fs, ino), b"theirs");
    let handle = fs.open(&Caller::ROOT, ino, O_RDWR | O_APPEND).unwrap();
    server.write("f", "theirs and more");
    assert_eq!(fs.write(handle, 0, b"!", false).unwrap(), Written { len: 1, offset: 15 });
    assert_eq!(fs.lseek(handle, 3, Whence::Hole), Ok(16));
    assert_eq!(fs.lseek(handle, 3, Whence::Data), Ok(3));
    assert_eq!(fs.lseek(handle, 16, Whence::Data), Err(Errno::NXIO));
    assert_eq!(fs.fallocate(handle, 0, 0, 10), Err(Errno::OPNOTSUPP));
    assert_eq!(fs.read(handle, i64::MAX as u64 + 5, &mut [0; 1]).unwrap_or(0), 0);
    assert_eq!(fs.write(handle, u64::MAX, b"x", false).map(|w| w.len), Ok(1));
    fs.release(handle);
    let handle = fs.open(&Caller::ROOT, ino, O_WRONLY | O_TRUNC).unwrap();
    assert_eq!(fs.fgetattr(handle).unwrap().size, 0);
    assert_eq!(fs.read(handle, 0, &mut [0; 1]), Err(Errno::BADF));
    assert_eq!(fs.write(handle, u64::MAX, b"x", false), Err(Errno::FBIG));
    fs.release(handle);
    assert_eq!(fs.read(handle, 0, &mut [0; 1]), Err(Errno::BADF));
    assert_eq!(fs.listxattr(&USER, ino), Ok(vec![]));
    assert_eq!(fs.getxattr(&USER, ino, b"user.a"), Err(Errno::OPNOTSUPP));
    // Open or make, in one step.
    let (there, handle) = fs.create(&Caller::ROOT, ROOT, b"f", 0o600, O_RDWR).unwrap();
    assert_eq!((there.ino, there.mode & 0o7777), (ino, 0o644));
    fs.release(handle);
    let new = fs.create(&Caller::ROOT, ROOT, b"f", 0o600, O_RDWR | O_EXCL);
    assert_eq!(new.map(drop), Err(Errno::EXIST));
}

fn long_directories_are_listed_whole(version: u32) {
    let Some(server) = Server::start() else { return };
    let fs = server.open(version);
    server.write_many("a-rather-long-name-of-a-file-", 1500);
    server.mkdir("dir");
    let (mut seen, mut cookie, mut kinds) = (Vec::new(), 0, BTreeMap::new());
    loop {
        let before = seen.len();
        fs.readdir(&Caller::ROOT, ROOT, cookie, &mut |entry| {
            seen.push(String::from_utf8_lossy(entry.name).into_owned());
            kinds.insert(entry.name.to_vec(), (entry.kind, entry.ino));
            assert!(entry.next > 0 && entry.next < 1 << 63);
            cookie = entry.next;
            seen.len() < before + 100
        })
        .unwrap();
        if seen.len() == before {
            break;
        }
    }
    assert_eq!(seen[..2], [".", ".."]);
    let told: std::collections::BTreeSet<&String> = seen.iter().collect();
    assert_eq!((seen.len(), told.len()), (1503, 1503));
    let dir = fs.lookup(&Caller::ROOT, ROOT, b"dir").unwrap();
    assert_eq!(kinds[&b"dir"[..]], (S_IFDIR, dir.ino));
    assert_eq!(kinds[&b"a-rather-long-name-of-a-file-7"[..]].0, S_IFREG);
}

fn a_server_that_begins_anew_is_gone_on_with(version: u32) {
    let Some(mut server) = Server::start() else { return };
    let fs = server.open(version);
    let (attr, handle) = fs.create(&Caller::ROOT, ROOT, b"f", 0o600, O_RDWR).unwrap();
    fs.write(handle, 0, &[1; 100_000], false).unwrap();
    let kept = fs.unstable();
    server.kill();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| fs.write(handle, 100_000, &[2; 100_000], false));
        std::thread::sleep(Duration::from_millis(300));
        server.again();
        assert_eq!(writer.join().unwrap().unwrap().len, 100_000);
    });
    assert!(kept == 0 || fs.unstable() > kept);
    fs.fsync(handle, false).unwrap();
    assert_eq!(fs.unstable(), 0);
    let there = server.read("f");
    assert!(there[..100_000] == [1; 100_000] && there[100_000..] == [2; 100_000]);
    // Names that are made while it is away are made once.
    server.kill();
    std::thread::scope(|scope| {
        let maker = scope.spawn(|| mkdir(&fs, ROOT, b"dir"));
        std::thread::sleep(Duration::from_millis(300));
        server.again();
        maker.join().unwrap();
    });
    assert!(server.is_dir("dir"));
    fs.release(handle);
    fs.unlink(&Caller::ROOT, ROOT, b"f").unwrap();
    assert_eq!(fs.getattr(&Caller::ROOT, attr.ino), Err(Errno::STALE));
}

fn a_server_that_is_away_ends_in_an_error(version: u32) {
    let Some(mut server) = Server::start() else { return };
    let mut url = server.url(version);
    url.patience = Duration::from_millis(1500);
    let fs = server.open_at(&url);
    let ino = file(&fs, b"f", b"data");
    server.kill();
    let begun = std::time::Instant::now();
    assert_eq!(fs.getattr(&Caller::ROOT, ino), Err(Errno::IO));
    assert!(begun.elapsed() >= url.patience);
    server.again();
    // It is tried as before.
    for _ in 0..20 {
        if fs.getattr(&Caller::ROOT, ino).is_ok() {
            return;
        }
    }
    panic!("it does not go on");
}

fn lock(kind: LockKind, owner: u64, start: u64, end: u64) -> Lock {
    Lock { space: LockSpace::Record, kind, owner, pid: 1, start, end }
}

fn locks_hold_for_all(version: u32) {
    let Some(mut server) = Server::start() else { return };
    let (fs, other) = (server.open(version), server.open(version));
    assert!(fs.keeps_locks());
    let ino = file(&fs, b"f", &[0; 1000]);
    let other_ino = other.lookup(&Caller::ROOT, ROOT, b"f").unwrap().ino;
    let ours = fs.open(&Caller::ROOT, ino, O_RDWR).unwrap();
    let theirs = other.open(&Caller::ROOT, other_ino, O_RDWR).unwrap();
    fs.lock(ino, &lock(LockKind::Write, 1, 0, 99), 0).unwrap();
    // Another owner, of the same client and of another one.
    assert_eq!(fs.lock(ino, &lock(LockKind::Read, 2, 50, 60), 0), Err(Errno::AGAIN));
    assert_eq!(
        other.lock(other_ino, &lock(LockKind::Write, 1, 99, LOCK_END), 0),
        Err(Errno::AGAIN)
    );
    let bars = other.test_lock(other_ino, &lock(LockKind::Read, 1, 0, LOCK_END)).unwrap().unwrap();
    assert_eq!((bars.kind, bars.start, bars.end), (LockKind::Write, 0, 99));
    assert_eq!(other.test_lock(other_ino, &lock(LockKind::Read, 1, 100, 200)), Ok(None));
    // Part of it is given back, and what is read may be read by all.
    fs.lock(ino, &lock(LockKind::None, 1, 50, 99), 0).unwrap();
    other.lock(other_ino, &lock(LockKind::Write, 1, 50, 99), 0).unwrap();
    fs.lock(ino, &lock(LockKind::Read, 1, 0, 49), 0).unwrap();
    other.lock(other_ino, &lock(LockKind::Read, 1, 0, 49), 0).unwrap();
    assert_eq!(fs.lock(ino, &lock(LockKind::Write, 1, 0, 49), 0), Err(Errno::AGAIN));
    // Whole files, by flock.
    let whole = Lock { space: LockSpace::Flock, ..lock(LockKind::Write, 9, 0, LOCK_END) };
    let second = file(&fs, b"g", b"");
    let second_there = other.lookup(&Caller::ROOT, ROOT, b"g").unwrap().ino;
    let opened = [
        fs.open(&Caller::ROOT, second, O_RDWR).unwrap(),
        other.open(&Caller::ROOT, second_there, O_RDWR).unwrap(),
    ];
    fs.lock(second, &whole, 0).unwrap();
    assert_eq!(other.lock(second_there, &whole, 0), Err(Errno::AGAIN));
    let seen = fs.lock_event().unwrap();
    fs.lock(second, &Lock { kind: LockKind::None, ..whole }, 0).unwrap();
    assert_ne!(fs.lock_event().unwrap(), seen);
    other.lock(second_there, &whole, 0).unwrap();
    assert_eq!(fs.lock(second, &whole, 0), Err(Errno::AGAIN));
    other.lock(second_there, &Lock { kind: LockKind::None, ..whole }, 0).unwrap();
    fs.release(opened[0]);
    other.release(opened[1]);

    // A server that begins anew has forgotten them; they are asked for again.
    for grace in [false, true] {
        server.kill();
        if grace {
            server.again_with_grace();
        } else {
            server.again();
        }
        let _ = fs.getattr(&Caller::ROOT, ino);
        for fs in [&fs, &other] {
            for _ in 0..100 {
                fs.lock_event().unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let third = server.open(version);
        let third_ino = third.lookup(&Caller::ROOT, ROOT, b"f").unwrap().ino;
        let opened = third.open(&Caller::ROOT, third_ino, O_RDWR).unwrap();
        assert_eq!(third.lock(third_ino, &lock(LockKind::Write, 7, 0, 49), 0), Err(Errno::AGAIN));
        assert_eq!(third.lock(third_ino, &lock(LockKind::Read, 7, 50, 99), 0), Err(Errno::AGAIN));
        // (While a server is in its time of grace it gives none to who had none, however long that is on a busy machine.)
        for _ in 0..3000 {
            match third.lock(third_ino, &lock(LockKind::Write, 7, 100, 101), 0) {
                Err(Errno::AGAIN) => std::thread::sleep(Duration::from_millis(20)),
                done => {
                    done.unwrap();
                    break;
                }
            }
        }
        third.lock(third_ino, &lock(LockKind::None, 7, 0, LOCK_END), 0).unwrap();
        third.release(opened);
    }
    fs.lock(ino, &lock(LockKind::None, 1, 0, LOCK_END), 0).unwrap();
    other.lock(other_ino, &lock(LockKind::Write, 1, 0, LOCK_END), 0).unwrap();
    fs.release(ours);
    other.release(theirs);
}

/// A file that was renamed is locked like any other.
fn what_was_renamed_can_be_locked(version: u32) {
    let Some(server) = Server::start() else { return };
    let (fs, other) = (server.open(version), server.open(version));
    let ino = file(&fs, b"before", b"data");
    mkdir(&fs, ROOT, b"dir");
    let dir = fs.lookup(&Caller::ROOT, ROOT, b"dir").unwrap().ino;
    let handle = fs.open(&Caller::ROOT, ino, O_RDWR).unwrap();
    for (n, to) in [(ROOT, &b"after"[..]), (dir, b"below")].into_iter().enumerate() {
        let from = [(ROOT, &b"before"[..]), (ROOT, b"after")][n];
        rename(&fs, from, to).unwrap();
        fs.lock(ino, &lock(LockKind::Write, 1, 0, 9), 0).unwrap();
        let there = other.lookup(&Caller::ROOT, to.0, to.1).unwrap().ino;
        assert_eq!(other.lock(there, &lock(LockKind::Write, 1, 0, 9), 0), Err(Errno::AGAIN));
        fs.lock(ino, &lock(LockKind::None, 1, 0, LOCK_END), 0).unwrap();
    }
    fs.release(handle);
}

fn locks_can_be_the_guests_own(version: u32) {
    let Some(server) = Server::start() else { return };
    let mut url = server.url(version);
    url.locks = false;
    let fs = server.open_at(&url);
    let ino = file(&fs, b"f", b"");
    assert!(!fs.keeps_locks());
    assert_eq!(fs.lock(ino, &lock(LockKind::Write, 1, 0, 9), 0), Err(Errno::NOSYS));
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize, u8),
    Append(usize, u8),
    Cut(u64),
    Read(u64, usize),
    Sync,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u64..30_000, 1usize..9000, any::<u8>()).prop_map(|(a, l, b)| Step::Write(a, l, b)),
        1 => (1usize..5000, any::<u8>()).prop_map(|(l, b)| Step::Append(l, b)),
        1 => (0u64..40_000).prop_map(Step::Cut),
        2 => (0u64..40_000, 1usize..9000).prop_map(|(a, l)| Step::Read(a, l)),
        1 => Just(Step::Sync),
    ]
}

fn as_model(fs: &NfsFs, n: u32, steps: &[Step]) {
    let name = format!("m{n}");
    let (attr, h) = fs.create(&Caller::ROOT, ROOT, name.as_bytes(), 0o600, O_RDWR).unwrap();
    let mut model: Vec<u8> = Vec::new();
    for step in steps {
        match *step {
            Step::Write(at, len, byte) => {
                fs.write(h, at, &vec![byte; len], false).unwrap();
                let at = at as usize;
                model.resize(model.len().max(at + len), 0);
                model[at..at + len].fill(byte);
            }
            Step::Append(len, byte) => {
                let wrote = fs.write(h, 0, &vec![byte; len], true).unwrap();
                assert_eq!(wrote, Written { len, offset: model.len() as u64 });
                model.resize(model.len() + len, byte);
            }
            Step::Cut(size) => {
                let set = SetAttr { size: Some(size), handle: Some(h), ..SetAttr::default() };
                assert_eq!(fs.setattr(&Caller::ROOT, attr.ino, &set).unwrap().size, size);
                model.resize(size as usize, 0);
            }
            Step::Read(at, len) => {
                let mut data = vec![0xee; len];
                let got = fs.read(h, at, &mut data).unwrap();
                let at = (at as usize).min(model.len());
                let end = (at + len).min(model.len());
                assert_eq!(&data[..got], &model[at..end]);
            }
            Step::Sync => fs.fsync(h, false).unwrap(),
        }
        assert_eq!(fs.fgetattr(h).unwrap().size, model.len() as u64);
    }
    assert_eq!(content(fs, attr.ino), model);
    fs.release(h);
    assert_eq!(fs.unstable(), 0);
}

fn a_file_is_what_a_string_of_bytes_is(version: u32) {
    let Some(server) = Server::start() else { return };
    let fs = server.open(version);
    let count = std::cell::Cell::new(0);
    let cases = ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() };
    proptest!(cases, |(steps in proptest::collection::vec(step(), 1..25))| {
        count.set(count.get() + 1);
        as_model(&fs, count.get(), &steps);
    });
}

/// Names: any history of several directories beside the same calls on a directory of this machine.
fn names_are_as_on_a_local_file_system(version: u32) {
    let Some(server) = Server::start() else { return };
    let fs = server.open(version);
    let seed = u64::from(std::process::id());
    println!("SEED={seed}");
    let mut random = base::random::Random::new(seed);
    let beside = server.beside();
    let model = client::dir::DirFs::open(
        beside.to_str().unwrap().as_bytes(),
        client::dir::Options::default(),
    )
    .unwrap();
    let mut twins: BTreeMap<u64, InodeId> = BTreeMap::from([(1, ROOT)]);
    let mut dirs = vec![ROOT];
    for n in 0..800 {
        let dir = dirs[random.below(dirs.len() as u64) as usize];
        let other = dirs[random.below(dirs.len() as u64) as usize];
        let twin = |ino: InodeId| twins[&ino.0];
        let name = format!("n{}", random.below(6)).into_bytes();
        let second = format!("n{}", random.below(6)).into_bytes();
        let (a, b) = match random.below(6) {
            0 | 1 => {
                let kind = if random.below(2) == 0 { S_IFDIR } else { S_IFREG };
                let node = NewNode { mode: kind | 0o755, rdev: 0, target: b"" };
                let a = fs.mknod(&Caller::ROOT, dir, &name, &node);
                let b = model.mknod(&Caller::ROOT, twin(dir), &name, &node);
                if let (Ok(a), Ok(b)) = (&a, &b) {
                    twins.insert(a.ino.0, b.ino);
                    if kind == S_IFDIR && dirs.len() < 12 {
                        dirs.push(a.ino);
                    }
                }
                (a.map(drop), b.map(drop))
            }
            2 => {
                let to = Rename {
                    parent: twin(dir),
                    name: &name,
                    new_parent: twin(other),
                    new_name: &second,
                    flags: 0,
                };
                (rename(&fs, (dir, &name), (other, &second)), model.rename(&Caller::ROOT, &to))
            }
            3 => (
                fs.unlink(&Caller::ROOT, dir, &name),
                model.unlink(&Caller::ROOT, twin(dir), &name),
            ),
            4 => {
                (fs.rmdir(&Caller::ROOT, dir, &name), model.rmdir(&Caller::ROOT, twin(dir), &name))
            }
            _ => {
                let a = fs.lookup(&Caller::ROOT, dir, &name);
                let b = model.lookup(&Caller::ROOT, twin(dir), &name);
                if let (Ok(a), Ok(b)) = (&a, &b) {
                    assert_eq!((twins[&a.ino.0], a.nlink), (b.ino, b.nlink), "step {n}");
                }
                (a.map(drop), b.map(drop))
            }
        };
        let gone = |r: &Result<()>| matches!(r, Err(Errno::STALE | Errno::NOENT));
        if a != b {
            let order = [Errno::NOTEMPTY, Errno::ISDIR, Errno::INVAL, Errno::EXIST, Errno::NOTDIR];
            let either = |r: &Result<()>| r.as_ref().is_err_and(|e| order.contains(e));
            assert!(gone(&a) && gone(&b) || either(&a) && either(&b), "step {n}: {a:?} {b:?}");
        }
        dirs.retain(|dir| {
            *dir == ROOT || model.getattr(&Caller::ROOT, twins[&dir.0]).is_ok_and(|a| a.nlink > 0)
        });
    }
}

/// Passes bytes on, and changes some of those that come from the server.
fn mangler(seed: u64, mangles: &Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mangles = mangles.clone();
    std::thread::spawn(move || {
        for (n, near) in listener.incoming().enumerate() {
            let Ok(near) = near else { return };
            let Ok(far) = TcpStream::connect("127.0.0.1:2049") else { return };
            let mut random = base::random::Random::new(seed + n as u64);
            let mangles = mangles.clone();
            let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            std::thread::spawn(move || {
                let (mut far, mut near, mut piece) = (far, near, [0; 8192]);
                while let Ok(len @ 1..) = far.read(&mut piece) {
                    if mangles.load(Ordering::Relaxed) && random.below(6) == 0 {
                        let at = random.below(len as u64) as usize;
                        // A bit, a word of ones, or less than there was.
                        match random.below(3) {
                            0 => piece[at] ^= 1 << random.below(8),
                            1 => piece[at..len.min(at + 4)].fill(0xff),
                            _ => {
                                let _ = near.write_all(&piece[..at]);
                                break;
                            }
                        }
                    }
                    if near.write_all(&piece[..len]).is_err() {
                        break;
                    }
                }
                let _ = near.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    port
}

fn answers_that_are_mangled_harm_nobody(version: u32) {
    let Some(server) = Server::start() else { return };
    drop(server.open(version));
    let seed = u64::from(std::process::id());
    println!("SEED={seed}");
    let mangles = Arc::new(AtomicBool::new(false));
    let mut url = server.url(version);
    (url.nfs_port, url.patience) = (Some(mangler(seed, &mangles)), Duration::from_millis(1500));
    let fs = server.open_at(&url);
    let mut random = base::random::Random::new(seed);
    let mut failed = 0;
    for n in 0..150 {
        mangles.store(true, Ordering::Relaxed);
        let name = format!("n{}", random.below(8)).into_bytes();
        let begun = std::time::Instant::now();
        let done = match random.below(8) {
            0 | 1 => fs.create(&Caller::ROOT, ROOT, &name, 0o644, O_RDWR).and_then(|(attr, h)| {
                let wrote = fs.write(h, 0, &[7; 5000], false);
                let read = fs.read(h, 0, &mut [0; 5000]);
                let locked = fs.lock(attr.ino, &lock(LockKind::Write, 1, 0, 9), 0);
                let unlocked = fs.lock(attr.ino, &lock(LockKind::None, 1, 0, LOCK_END), 0);
                let synced = fs.fsync(h, false);
                fs.release(h);
                wrote.and(read).and(locked).and(unlocked).and(synced)
            }),
            2 => fs.lookup(&Caller::ROOT, ROOT, &name).map(drop),
            3 => fs.unlink(&Caller::ROOT, ROOT, &name),
            4 => rename(&fs, (ROOT, &name), (ROOT, b"other")),
            5 => fs.readdir(&Caller::ROOT, ROOT, 0, &mut |_| true),
            6 => fs.statfs().map(drop),
            _ => {
                let node = NewNode { mode: S_IFLNK | 0o777, rdev: 0, target: b"target" };
                fs.mknod(&Caller::ROOT, ROOT, &name, &node)
                    .and_then(|attr| fs.readlink(&Caller::ROOT, attr.ino))
                    .map(drop)
            }
        };
        failed += u32::from(done.is_err());
        // Some requests each, none of which waits longer than it may.
        assert!(begun.elapsed() < Duration::from_secs(60), "step {n}");
    }
    println!("{failed} of 150 failed");
    mangles.store(false, Ordering::Relaxed);
    let well = (0..20).find_map(|_| fs.lookup(&Caller::ROOT, ROOT, b".").ok());
    assert!(well.is_some_and(|root| root.is_dir()));
    let node = NewNode { mode: S_IFDIR | 0o755, rdev: 0, target: b"" };
    fs.mknod(&Caller::ROOT, ROOT, b"afterwards", &node).unwrap();
    assert!(server.is_dir("afterwards"));
}

macro_rules! over_both {
    ($($test:ident)*) => {
        mod v3 { $(#[test] fn $test() { super::common::apart(|| super::$test(3)); })* }
        mod v4 { $(#[test] fn $test() { super::common::apart(|| super::$test(4)); })* }
    };
}

over_both! {
    files_directories_and_names
    renames_as_posix_has_them
    what_is_open_outlives_its_name
    permission_is_judged_by_the_server
    attributes_and_times
    long_directories_are_listed_whole
    a_server_that_begins_anew_is_gone_on_with
    a_server_that_is_away_ends_in_an_error
    locks_hold_for_all
    what_was_renamed_can_be_locked
    locks_can_be_the_guests_own
    a_file_is_what_a_string_of_bytes_is
    names_are_as_on_a_local_file_system
    answers_that_are_mangled_harm_nobody
}
