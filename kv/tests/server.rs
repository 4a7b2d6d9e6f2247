//! Against a real server (redis-server or valkey-server of the distribution), each test its own: what a file system must do, what two
//! of them see of each other, connections that break, a server that is restarted, and any history beside a model of it.

mod by_hand;

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use base::{Errno, InodeId};
use by_hand::{content, file, mkdir, names, rename};
use client::fs::*;
use kv::link::{Address, Links};
use kv::resp::Reply;
use kv::{KvFs, Options};
use proptest::prelude::*;

static COUNT: AtomicU32 = AtomicU32::new(0);
const ROOT: InodeId = InodeId::ROOT;
const USER: Caller<'static> = Caller { uid: 1000, gid: 1000, groups: &[], pid: 1, umask: 0 };
const OTHER: Caller<'static> = Caller { uid: 2000, gid: 2000, groups: &[], pid: 1, umask: 0 };

struct Server {
    dir: PathBuf,
    child: Child,
    config: Vec<&'static str>,
}

/// The program, and under which name it is to be run: Debian's package of tools has the server under another one.
fn program() -> Option<(PathBuf, &'static str)> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |name: &str| {
        std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
    };
    ["redis-server", "valkey-server", "redis-check-rdb", "valkey-check-rdb"]
        .iter()
        .find_map(|name| found(name).map(|file| (file, "redis-server")))
}

impl Server {
    fn spawn(dir: &Path, config: &[&str]) -> Option<Child> {
        let (program, name) = program()?;
        let mut child = Command::new(program)
            .arg0(name)
            .args(["--port", "0", "--save", "", "--dir"])
            .arg(dir)
            .arg("--unixsocket")
            .arg(dir.join("s"))
            .args(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        for _ in 0..3000 {
            if std::os::unix::net::UnixStream::connect(dir.join("s")).is_ok() {
                return Some(child);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = child.kill();
        let _ = child.wait();
        panic!("the server does not come up");
    }

    /// None, and a word, where there is no such program.
    fn start(config: &[&'static str]) -> Option<Self> {
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("kv-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let Some(child) = Self::spawn(&dir, config) else {
            println!("skipped: no redis-server here (scripts/prepare.sh tools installs it)");
            return None;
        };
        Some(Self { dir, child, config: config.to_vec() })
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(self.dir.join("s"));
    }

    fn again(&mut self) {
        self.child = Self::spawn(&self.dir, &self.config).unwrap();
    }

    fn address(&self) -> Address {
        format!("{}#test", self.dir.join("s").display()).parse().unwrap()
    }

    fn open(&self) -> KvFs {
        KvFs::open(self.address(), Options { piece: 4096, grace: 1 }).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn files_directories_and_names() {
    let Some(server) = Server::start(&[]) else { return };
    let (fs, other) = (server.open(), server.open());
    let dir = mkdir(&fs, ROOT, b"dir");
    assert_eq!(fs.getattr(&Caller::ROOT, ROOT).unwrap().nlink, 3);
    // What one did the other sees at once.
    assert_eq!(other.lookup(&Caller::ROOT, ROOT, b"dir").unwrap(), dir);
    assert_eq!(other.lookup(&Caller::ROOT, dir.ino, b"..").unwrap().ino, ROOT);
    let data: Vec<u8> = (0..20_000u32).map(|n| n as u8).collect();
    let ino = file(&fs, b"a\xff\n name", &data);
    assert_eq!(content(&other, ino), data);
    assert_eq!(fs.lookup(&USER, ROOT, &[b'x'; 256]), Err(Errno::NAMETOOLONG));
    assert_eq!(fs.lookup(&USER, ROOT, b"none"), Err(Errno::NOENT));
    assert_eq!(fs.lookup(&USER, ino, b"x"), Err(Errno::NOTDIR));
    let again = fs.mknod(&USER, ROOT, b"dir", &NewNode { mode: S_IFDIR, rdev: 0, target: b"" });
    assert_eq!(again, Err(Errno::EXIST));

    rename(&fs, (ROOT, b"a\xff\n name"), (dir.ino, b"b"), 0).unwrap();
    assert_eq!(names(&other, ROOT), [&b"."[..], b"..", b"dir"]);
    assert_eq!(names(&other, dir.ino), [&b"."[..], b"..", b"b"]);
    let second = fs.link(&Caller::ROOT, ino, ROOT, b"c").unwrap();
    assert_eq!(second.nlink, 2);
    assert_eq!(fs.rmdir(&Caller::ROOT, ROOT, b"dir"), Err(Errno::NOTEMPTY));
    assert_eq!(fs.unlink(&Caller::ROOT, ROOT, b"dir"), Err(Errno::ISDIR));
    assert_eq!(fs.rmdir(&Caller::ROOT, ROOT, b"c"), Err(Errno::NOTDIR));
    fs.unlink(&Caller::ROOT, dir.ino, b"b").unwrap();
    fs.rmdir(&Caller::ROOT, ROOT, b"dir").unwrap();
    assert_eq!(fs.getattr(&Caller::ROOT, ROOT).unwrap().nlink, 2);
    assert_eq!(content(&other, ino), data);

    let link = NewNode { mode: S_IFLNK | 0o777, rdev: 0, target: b"some/where" };
    let link = fs.mknod(&USER, ROOT, b"l", &link).unwrap();
    assert_eq!((link.size, link.uid), (10, 1000));
    assert_eq!(other.readlink(&USER, link.ino).unwrap(), b"some/where");
    assert_eq!(other.open(&USER, link.ino, O_RDONLY), Err(Errno::LOOP));
    let tube = NewNode { mode: S_IFIFO | 0o600, rdev: 0, target: b"" };
    assert_eq!(fs.mknod(&USER, ROOT, b"p", &tube).unwrap().kind(), S_IFIFO);
    let disk = NewNode { mode: S_IFBLK | 0o600, rdev: 0x801, target: b"" };
    assert_eq!(fs.mknod(&USER, ROOT, b"d", &disk), Err(Errno::PERM));
    assert_eq!(fs.mknod(&Caller::ROOT, ROOT, b"d", &disk).unwrap().rdev, 0x801);
    assert!(fs.statfs().unwrap().blocks > 0);
}

#[test]
fn renames_as_posix_has_them() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let (a, b) = (mkdir(&fs, ROOT, b"a"), mkdir(&fs, ROOT, b"b"));
    let inner = mkdir(&fs, a.ino, b"inner");
    assert_eq!(rename(&fs, (ROOT, b"a"), (inner.ino, b"x"), 0), Err(Errno::INVAL));
    assert_eq!(rename(&fs, (ROOT, b"a"), (a.ino, b"x"), 0), Err(Errno::INVAL));
    assert_eq!(rename(&fs, (a.ino, b"inner"), (ROOT, b"a"), 0), Err(Errno::NOTEMPTY));
    let f = file(&fs, b"f", b"f");
    assert_eq!(rename(&fs, (ROOT, b"f"), (ROOT, b"b"), 0), Err(Errno::ISDIR));
    assert_eq!(rename(&fs, (ROOT, b"b"), (ROOT, b"f"), 0), Err(Errno::NOTDIR));
    assert_eq!(rename(&fs, (ROOT, b"b"), (ROOT, b"f"), 1), Err(Errno::EXIST));
    // One takes the place of an empty one.
    rename(&fs, (a.ino, b"inner"), (ROOT, b"b"), 0).unwrap();
    assert_eq!(fs.lookup(&Caller::ROOT, inner.ino, b"..").unwrap().ino, ROOT);
    assert_eq!(fs.getattr(&Caller::ROOT, a.ino).unwrap().nlink, 2);
    assert_eq!(fs.getattr(&Caller::ROOT, ROOT).unwrap().nlink, 4);
    assert_eq!(fs.getattr(&Caller::ROOT, b.ino).unwrap().nlink, 0);
    // And two change places.
    rename(&fs, (ROOT, b"f"), (ROOT, b"b"), 2).unwrap();
    assert_eq!(fs.lookup(&Caller::ROOT, ROOT, b"b").unwrap().ino, f);
    assert_eq!(fs.lookup(&Caller::ROOT, ROOT, b"f").unwrap().ino, inner.ino);
    assert_eq!(rename(&fs, (ROOT, b"f"), (ROOT, b"none"), 2), Err(Errno::NOENT));
    // Two names of one file: nothing happens.
    fs.link(&Caller::ROOT, f, ROOT, b"g").unwrap();
    rename(&fs, (ROOT, b"b"), (ROOT, b"g"), 0).unwrap();
    assert_eq!(fs.getattr(&Caller::ROOT, f).unwrap().nlink, 2);
}

#[test]
fn permission_is_judged_where_the_files_are() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let (attr, handle) = fs.create(&USER, ROOT, b"mine", 0o640, O_RDWR).unwrap();
    fs.release(handle);
    assert_eq!((attr.uid, attr.gid, attr.mode & 0o7777), (1000, 1000, 0o640));
    assert_eq!(fs.open(&OTHER, attr.ino, O_RDONLY), Err(Errno::ACCES));
    let member = Caller { groups: &[5, 1000], ..OTHER };
    let handle = fs.open(&member, attr.ino, O_RDONLY).unwrap();
    assert_eq!(fs.write(handle, 0, b"x", false), Err(Errno::BADF));
    assert_eq!(fs.open(&member, attr.ino, O_RDWR), Err(Errno::ACCES));
    let mode = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
    assert_eq!(fs.setattr(&OTHER, attr.ino, &mode(0o777)), Err(Errno::PERM));
    assert_eq!(fs.setattr(&USER, attr.ino, &mode(0o4711)).unwrap().mode & 0o7777, 0o4711);
    let owner = SetAttr { uid: Some(0), ..SetAttr::default() };
    assert_eq!(fs.setattr(&USER, attr.ino, &owner), Err(Errno::PERM));
    let now =
        SetAttr { mtime: Some(SetTime::Now), atime: Some(SetTime::Now), ..SetAttr::default() };
    assert_eq!(fs.setattr(&OTHER, attr.ino, &now), Err(Errno::ACCES));
    let size = SetAttr { size: Some(10), ..SetAttr::default() };
    assert_eq!(fs.setattr(&OTHER, attr.ino, &size), Err(Errno::ACCES));
    assert_eq!(fs.setattr(&USER, attr.ino, &size).unwrap().size, 10);
    // The root is sticky.
    assert_eq!(fs.unlink(&OTHER, ROOT, b"mine"), Err(Errno::PERM));
    assert_eq!(fs.access(&OTHER, attr.ino, 4), Err(Errno::ACCES));
    let dir = fs.mknod(&USER, ROOT, b"d", &NewNode { mode: S_IFDIR | 0o700, rdev: 0, target: b"" });
    let dir = dir.unwrap().ino;
    assert_eq!(fs.lookup(&OTHER, dir, b"x"), Err(Errno::ACCES));
    assert!(matches!(fs.create(&OTHER, dir, b"x", 0o600, O_RDWR), Err(Errno::ACCES)));
    assert_eq!(fs.link(&OTHER, attr.ino, ROOT, b"theirs"), Err(Errno::PERM));
}

#[test]
fn extended_attributes() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let ino = file(&fs, b"f", b"");
    let set = |name: &[u8], value: &[u8], mode| fs.setxattr(&Caller::ROOT, ino, name, value, mode);
    set(b"user.a", b"\0\xff", XattrMode::Create).unwrap();
    assert_eq!(set(b"user.a", b"", XattrMode::Create), Err(Errno::EXIST));
    assert_eq!(set(b"user.b", b"", XattrMode::Replace), Err(Errno::NODATA));
    assert_eq!(set(b"user.", b"", XattrMode::Set), Err(Errno::INVAL));
    assert_eq!(set(b"other.x", b"", XattrMode::Set), Err(Errno::OPNOTSUPP));
    assert_eq!(set(b"user.big", &vec![0; 65_537], XattrMode::Set), Err(Errno::TOOBIG));
    set(b"trusted.t", b"t", XattrMode::Set).unwrap();
    assert_eq!(fs.getxattr(&USER, ino, b"user.a").unwrap(), b"\0\xff");
    assert_eq!(fs.getxattr(&USER, ino, b"trusted.t"), Err(Errno::NODATA));
    assert_eq!(fs.listxattr(&USER, ino).unwrap(), b"user.a\0");
    assert_eq!(fs.listxattr(&Caller::ROOT, ino).unwrap(), b"trusted.t\0user.a\0");
    let strange = fs.setxattr(&OTHER, ino, b"user.a", b"", XattrMode::Set);
    assert_eq!(strange, Err(Errno::ACCES));
    fs.removexattr(&Caller::ROOT, ino, b"user.a").unwrap();
    assert_eq!(fs.removexattr(&Caller::ROOT, ino, b"user.a"), Err(Errno::NODATA));
}

#[test]
fn what_is_open_outlives_its_name_and_then_gives_its_space_back() {
    let Some(server) = Server::start(&[]) else { return };
    let (fs, other) = (server.open(), server.open());
    let ino = file(&fs, b"f", &[7; 10_000]);
    let handle = other.open(&Caller::ROOT, ino, O_RDWR).unwrap();
    fs.unlink(&Caller::ROOT, ROOT, b"f").unwrap();
    assert_eq!(fs.orphans().unwrap(), 1);
    // Longer than the grace, for as long as somebody says that it is open.
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(500));
        other.tend().unwrap();
        fs.tend().unwrap();
    }
    let mut data = [0; 3];
    assert_eq!((other.read(handle, 9_997, &mut data).unwrap(), data), (3, [7; 3]));
    assert_eq!(other.fgetattr(handle).unwrap().nlink, 0);
    other.release(handle);
    for _ in 0..100 {
        fs.tend().unwrap();
        if fs.orphans().unwrap() == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(fs.orphans().unwrap(), 0);
    assert_eq!(fs.getattr(&Caller::ROOT, ino), Err(Errno::STALE));
    // Nothing of it is left.
    let left = Links::new(server.address(), "look".into()).once(&[b"KEYS", b"*:f:*"]).unwrap();
    assert_eq!(left, kv::resp::Reply::Array(vec![]));

    let (attr, handle) = fs.tmpfile(&USER, ROOT, 0o600, O_RDWR).unwrap();
    fs.write(handle, 0, b"late", false).unwrap();
    assert_eq!(fs.link(&USER, attr.ino, ROOT, b"named").unwrap().nlink, 1);
    fs.release(handle);
    assert_eq!(content(&other, attr.ino), b"late");
    let (attr, handle) = fs.tmpfile(&USER, ROOT, 0o600, O_RDWR | O_EXCL).unwrap();
    assert_eq!(fs.link(&USER, attr.ino, ROOT, b"never"), Err(Errno::NOENT));
    fs.release(handle);
}

#[test]
fn long_directories_are_listed_whole_while_they_change() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let node = NewNode { mode: S_IFREG | 0o600, rdev: 0, target: b"" };
    for n in 0..600 {
        fs.mknod(&Caller::ROOT, ROOT, format!("n{n}").as_bytes(), &node).unwrap();
    }
    let (mut seen, mut cookie) = (Vec::new(), 0);
    loop {
        let before = seen.len();
        fs.readdir(&Caller::ROOT, ROOT, cookie, &mut |entry| {
            seen.push(String::from_utf8_lossy(entry.name).into_owned());
            cookie = entry.next;
            seen.len() < before + 100
        })
        .unwrap();
        if seen.len() == before {
            break;
        }
        // Those that were told already go.
        if let Some(name) = seen.iter().rev().find(|name| name.starts_with('n')) {
            let _ = fs.unlink(&Caller::ROOT, ROOT, name.as_bytes());
        }
    }
    let told: std::collections::BTreeSet<&String> = seen.iter().collect();
    assert_eq!((seen.len(), told.len()), (602, 602));
}

#[test]
fn holes_and_ends() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let (attr, h) = fs.create(&Caller::ROOT, ROOT, b"f", 0o644, O_RDWR).unwrap();
    fs.write(h, 1 << 40, b"far", false).unwrap();
    assert_eq!(fs.fgetattr(h).unwrap().size, (1 << 40) + 3);
    assert_eq!(fs.fgetattr(h).unwrap().blocks, 8);
    assert_eq!(fs.lseek(h, 0, Whence::Data).unwrap(), 1 << 40);
    assert_eq!(fs.lseek(h, 5, Whence::Hole).unwrap(), 5);
    assert_eq!(fs.lseek(h, (1 << 40) + 1, Whence::Hole).unwrap(), (1 << 40) + 3);
    assert_eq!(fs.lseek(h, 1 << 41, Whence::Data), Err(Errno::NXIO));
    assert_eq!(fs.write(h, u64::MAX - 1, b"xyz", false), Err(Errno::FBIG));
    assert_eq!(fs.write(h, 1 << 50, b"x", false), Err(Errno::FBIG));
    assert_eq!(fs.fallocate(h, 0, 1 << 50, 1), Err(Errno::FBIG));
    fs.fallocate(h, falloc::PUNCH_HOLE | falloc::KEEP_SIZE, (1 << 40) - 10, 12).unwrap();
    let mut data = [9; 5];
    assert_eq!((fs.read(h, 1 << 40, &mut data).unwrap(), &data[..3]), (3, &b"\0\0r"[..]));
    // What was cut away does not come back.
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    fs.write(h, 0, &[1; 9000], false).unwrap();
    fs.setattr(&Caller::ROOT, attr.ino, &size(100)).unwrap();
    fs.setattr(&Caller::ROOT, attr.ino, &size(10_000)).unwrap();
    let mut data = vec![9; 10_000];
    assert_eq!(fs.read(h, 0, &mut data).unwrap(), 10_000);
    assert!(data[..100].iter().all(|b| *b == 1) && data[100..].iter().all(|b| *b == 0));
    // More pieces than one run of the script takes away.
    for n in 0..4200u64 {
        fs.write(h, n * 4096, b"x", false).unwrap();
    }
    fs.setattr(&Caller::ROOT, attr.ino, &size(0)).unwrap();
    assert_eq!(fs.fgetattr(h).unwrap().blocks, 0);
    for n in 0..4200u64 {
        fs.write(h, n * 4096, b"x", false).unwrap();
    }
    fs.release(fs.open(&Caller::ROOT, attr.ino, O_WRONLY | O_TRUNC).unwrap());
    assert_eq!((fs.fgetattr(h).unwrap().size, fs.fgetattr(h).unwrap().blocks), (0, 0));
}

#[test]
fn appends_of_two_do_not_meet() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let ino = file(&fs, b"log", b"");
    std::thread::scope(|scope| {
        for who in 0..2u8 {
            let server = &server;
            scope.spawn(move || {
                let fs = server.open();
                let handle = fs.open(&Caller::ROOT, ino, O_WRONLY | O_APPEND).unwrap();
                for _ in 0..200 {
                    assert_eq!(fs.write(handle, 0, &[who; 37], false).unwrap().len, 37);
                }
            });
        }
    });
    let all = content(&fs, ino);
    assert_eq!(all.len(), 2 * 200 * 37);
    let lines: Vec<&[u8]> = all.chunks(37).collect();
    assert!(lines.iter().all(|line| line.iter().all(|b| *b == line[0])));
    assert_eq!(lines.iter().filter(|line| line[0] == 1).count(), 200);
}

/// Requests that can be done only once, while connections break all the time.
#[test]
fn each_request_is_done_once_whatever_breaks() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let links = Links::new(server.address(), "killer".into());
            while !done.load(Ordering::Relaxed) {
                let kill: [&[u8]; 4] = [b"CLIENT", b"KILL", b"TYPE", b"normal"];
                let _ = links.once(&kill);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let node = NewNode { mode: S_IFREG | 0o600, rdev: 0, target: b"" };
        let ino = file(&fs, b"log", b"");
        let handle = fs.open(&Caller::ROOT, ino, O_WRONLY | O_APPEND).unwrap();
        for n in 0..300 {
            let name = format!("n{n}");
            fs.mknod(&Caller::ROOT, ROOT, name.as_bytes(), &node).unwrap();
            rename(&fs, (ROOT, name.as_bytes()), (ROOT, b"moved"), 1).unwrap();
            fs.write(handle, 0, name.as_bytes(), false).unwrap();
            fs.unlink(&Caller::ROOT, ROOT, b"moved").unwrap();
        }
        fs.release(handle);
        done.store(true, Ordering::Relaxed);
        let expected: String = (0..300).map(|n| format!("n{n}")).collect();
        assert_eq!(content(&fs, ino), expected.into_bytes());
    });
}

/// The network was dark, its asker gave the connection up, and the kernel delivers it when later ones have been done long ago.
#[test]
fn a_request_that_comes_after_later_ones_is_not_done() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let ino = file(&fs, b"f", b"first");
    let links = Links::new(server.address(), "by-hand".into());
    let write = |seq: &str, data: &[u8]| {
        let ino = ino.0.to_string();
        let script = include_bytes!("../src/ops.lua");
        let head: [&[u8]; 10] = [
            b"EVAL",
            script,
            b"1",
            b"{test}",
            b"write",
            b"by-hand-1",
            seq.as_bytes(),
            b"0",
            b"0",
            b"",
        ];
        let args: [&[u8]; 4] = [ino.as_bytes(), b"0", data, b"1000"];
        match links.once(&[&head[..], &args[..]].concat()).unwrap() {
            Reply::Array(all) => all[0].number::<u16>().unwrap(),
            other => panic!("{other:?}"),
        }
    };
    for (seq, data) in [("9", &b"older"[..]), ("10", b"newer")] {
        assert_eq!(write(seq, data), 0);
        // And again: it is not done twice, and says what it said.
        assert_eq!(write(seq, b"other"), 0);
        assert_eq!(content(&fs, ino), data);
    }
    assert_eq!(write("9", b"older"), Errno::STALE.0);
    assert_eq!(content(&fs, ino), b"newer");
    assert_eq!(write("11", b"third"), 0);
    assert_eq!(content(&fs, ino), b"third");
}

/// Who ends leaves nothing behind by which its connections are known, but where a request may still come from one.
#[test]
fn a_server_forgets_who_has_ended() {
    let Some(server) = Server::start(&[]) else { return };
    let links = Links::new(server.address(), "counts".into());
    let known = || match links.once(&[b"KEYS", b"{test}:r:*"]).unwrap() {
        Reply::Array(names) => names.len(),
        other => panic!("{other:?}"),
    };
    let fs = server.open();
    std::thread::scope(|scope| {
        let fs = &fs;
        for n in 0..8 {
            scope.spawn(move || {
                for i in 1..=30 {
                    file(fs, &[b'a' + n, i], b"x");
                }
            });
        }
    });
    assert!(known() > 0);
    drop(fs);
    assert_eq!(known(), 0);
    // One that goes on after that is as good as one that has just begun.
    let fs = server.open();
    file(&fs, b"one", b"1");
    fs.end();
    file(&fs, b"two", b"2");
    assert_eq!(names(&fs, ROOT).len(), 2 + 8 * 30 + 2);
    drop(fs);
    assert_eq!(known(), 0);
    // A connection breaks under a request: it is known for as long as that may come.
    let fs = server.open();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Asked again once it is known to have broken.
            for n in 0..2000 {
                let name = format!("b{n}");
                fs.link(&Caller::ROOT, file(&fs, name.as_bytes(), b""), ROOT, &[1, n as u8 | 1])
                    .ok();
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..50 {
            let _ = links.once(&[b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes"]);
            std::thread::sleep(Duration::from_millis(2));
        }
        done.store(true, Ordering::Relaxed);
    });
    drop(fs);
    assert!(known() > 0);
}

#[test]
fn a_server_that_lets_nobody_load_scripts_is_refused() {
    let Some(server) =
        Server::start(&["--user", "default", "on", "nopass", "~*", "+@all", "-script"])
    else {
        return;
    };
    let refused = KvFs::open(server.address(), Options::default()).unwrap_err();
    assert!(refused.contains("scripts"), "{refused}");
}

/// A guest's statfs makes no connections.
#[test]
fn asking_for_room_takes_no_connections() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let links = Links::new(server.address(), "counts".into());
    let made = || {
        let stats = links.once(&[b"INFO", b"stats"]).unwrap().bytes().unwrap();
        let stats = String::from_utf8(stats).unwrap();
        let field = stats.lines().find_map(|l| l.strip_prefix("total_connections_received:"));
        field.unwrap().parse::<u64>().unwrap()
    };
    let before = made();
    let rooms: Vec<StatFs> = (0..20).map(|_| fs.statfs().unwrap()).collect();
    assert!(rooms.iter().all(|room| room.name_max == 255));
    assert!(made() - before <= 2);
}

#[test]
fn a_server_that_comes_back_is_gone_on_with() {
    let config = ["--appendonly", "yes", "--appendfsync", "always"];
    let Some(mut server) = Server::start(&config) else { return };
    let fs = server.open();
    let ino = file(&fs, b"f", b"before");
    let handle = fs.open(&Caller::ROOT, ino, O_RDWR).unwrap();
    fs.fsync(handle, false).unwrap();
    server.kill();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| fs.write(handle, 6, b" and after", false));
        std::thread::sleep(Duration::from_millis(50));
        server.again();
        assert_eq!(writer.join().unwrap().unwrap().len, 10);
    });
    assert_eq!(content(&fs, ino), b"before and after");
}

#[test]
fn servers_that_lose_files_are_refused() {
    let evicts = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let Some(server) = Server::start(&evicts) else { return };
    let refused = KvFs::open(server.address(), Options::default()).unwrap_err();
    assert!(refused.contains("noeviction"), "{refused}");
    let Some(server) = Server::start(&["--requirepass", "secret"]) else { return };
    let refused = KvFs::open(server.address(), Options::default()).unwrap_err();
    assert!(refused.contains("NOAUTH"), "{refused}");
    let mut address = server.address();
    address.login = Some(kv::link::login("wrong\n").unwrap());
    assert!(KvFs::open(address.clone(), Options::default()).is_err());
    address.login = Some(kv::link::login("secret\n").unwrap());
    let fs = KvFs::open(address, Options::default()).unwrap();
    file(&fs, b"f", b"data");
    // No room: an error, nothing half done, and what frees space still works.
    let Some(server) = Server::start(&["--maxmemory", "8mb"]) else { return };
    let fs = server.open();
    let (_, handle) = fs.create(&Caller::ROOT, ROOT, b"big", 0o600, O_RDWR).unwrap();
    let full = (0..100).find_map(|n| fs.write(handle, n << 20, &[1; 1 << 20], false).err());
    assert_eq!(full, Some(Errno::NOSPC));
    assert_eq!(fs.fgetattr(handle).unwrap().size % (1 << 20), 0);
    let node = NewNode { mode: S_IFREG, rdev: 0, target: b"" };
    let size = SetAttr { size: Some(0), handle: Some(handle), ..SetAttr::default() };
    fs.setattr(&Caller::ROOT, fs.fgetattr(handle).unwrap().ino, &size).unwrap();
    fs.mknod(&USER, ROOT, b"yes", &node).unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize, u8),
    Append(usize, u8),
    Cut(u64),
    Punch(u64, u64),
    Read(u64, usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u64..30_000, 1usize..9000, any::<u8>()).prop_map(|(a, l, b)| Step::Write(a, l, b)),
        1 => (1usize..5000, any::<u8>()).prop_map(|(l, b)| Step::Append(l, b)),
        1 => (0u64..40_000).prop_map(Step::Cut),
        1 => (0u64..30_000, 1u64..10_000).prop_map(|(a, l)| Step::Punch(a, l)),
        2 => (0u64..40_000, 1usize..9000).prop_map(|(a, l)| Step::Read(a, l)),
    ]
}

fn as_model(fs: &KvFs, steps: &[Step]) {
    let name = format!("m{}", COUNT.fetch_add(1, Ordering::Relaxed));
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
            Step::Punch(at, len) => {
                let mode = falloc::PUNCH_HOLE | falloc::KEEP_SIZE;
                fs.fallocate(h, mode, at, len).unwrap();
                let (at, end) = (at as usize, (at + len) as usize);
                let (at, end) = (at.min(model.len()), end.min(model.len()));
                model[at..end].fill(0);
            }
            Step::Read(at, len) => {
                let mut data = vec![0xee; len];
                let got = fs.read(h, at, &mut data).unwrap();
                let at = (at as usize).min(model.len());
                let end = (at + len).min(model.len());
                assert_eq!(&data[..got], &model[at..end]);
            }
        }
        assert_eq!(fs.fgetattr(h).unwrap().size, model.len() as u64);
    }
    assert_eq!(content(fs, attr.ino), model);
    fs.release(h);
}

#[test]
fn a_file_is_what_a_string_of_bytes_is() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let cases = ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() };
    proptest!(cases, |(steps in proptest::collection::vec(step(), 1..25))| as_model(&fs, &steps));
}

/// Names: any history of several directories beside the back end `null`, which keeps them in memory.
#[test]
fn names_are_as_in_memory() {
    let Some(server) = Server::start(&[]) else { return };
    let fs = server.open();
    let seed = u64::from(std::process::id());
    println!("SEED={seed}");
    let mut random = base::random::Random::new(seed);
    let model = client::null::NullFs::default();
    // Numbers of the same inode here and there.
    let mut twins: BTreeMap<u64, u64> = BTreeMap::from([(1, 1)]);
    let mut dirs = vec![ROOT];
    for n in 0..1500 {
        let dir = dirs[random.below(dirs.len() as u64) as usize];
        let other = dirs[random.below(dirs.len() as u64) as usize];
        let twin = |ino: InodeId| InodeId(twins[&ino.0]);
        let name = format!("n{}", random.below(6)).into_bytes();
        let second = format!("n{}", random.below(6)).into_bytes();
        let (a, b) = match random.below(6) {
            0 | 1 => {
                let kind = if random.below(2) == 0 { S_IFDIR } else { S_IFREG };
                let node = NewNode { mode: kind | 0o755, rdev: 0, target: b"" };
                let a = fs.mknod(&Caller::ROOT, dir, &name, &node);
                let b = model.mknod(&Caller::ROOT, twin(dir), &name, &node);
                if let (Ok(a), Ok(b)) = (&a, &b) {
                    twins.insert(a.ino.0, b.ino.0);
                    if kind == S_IFDIR && dirs.len() < 12 {
                        dirs.push(a.ino);
                    }
                }
                (a.map(drop), b.map(drop))
            }
            2 => {
                let flags = [0, 0, 1, 2][random.below(4) as usize];
                let a = rename(&fs, (dir, &name), (other, &second), flags);
                let to = Rename {
                    parent: twin(dir),
                    name: &name,
                    new_parent: twin(other),
                    new_name: &second,
                    flags,
                };
                (a, model.rename(&Caller::ROOT, &to))
            }
            3 => {
                let (a, b) = (
                    fs.unlink(&Caller::ROOT, dir, &name),
                    model.unlink(&Caller::ROOT, twin(dir), &name),
                );
                (a, b)
            }
            4 => {
                let (a, b) = (
                    fs.rmdir(&Caller::ROOT, dir, &name),
                    model.rmdir(&Caller::ROOT, twin(dir), &name),
                );
                (a, b)
            }
            _ => {
                let a = fs.lookup(&Caller::ROOT, dir, &name);
                let b = model.lookup(&Caller::ROOT, twin(dir), &name);
                if let (Ok(a), Ok(b)) = (&a, &b) {
                    assert_eq!((twins[&a.ino.0], a.nlink), (b.ino.0, b.nlink), "step {n}");
                }
                (a.map(drop), b.map(drop))
            }
        };
        // One that is gone: `null` has forgotten it, here it lives for a while.
        let gone = |r: &Result<()>| matches!(r, Err(Errno::STALE | Errno::NOENT));
        if a != b {
            let order = [Errno::NOTEMPTY, Errno::ISDIR, Errno::INVAL, Errno::EXIST, Errno::NOTDIR];
            let either = |r: &Result<()>| r.as_ref().is_err_and(|e| order.contains(e));
            assert!(gone(&a) && gone(&b) || either(&a) && either(&b), "step {n}: {a:?} {b:?}");
        }
    }
    let mut whole: Vec<InodeId> = vec![ROOT];
    while let Some(dir) = whole.pop() {
        let twin = InodeId(twins[&dir.0]);
        let mut there = Vec::new();
        model
            .readdir(&Caller::ROOT, twin, 0, &mut |e| {
                there.push(e.name.to_vec());
                true
            })
            .unwrap();
        let (mut here, count) = (names(&fs, dir), there.len());
        here.sort();
        there.sort();
        assert_eq!((here.len(), &here), (count, &there));
        for name in here.iter().filter(|name| !name.starts_with(b".")) {
            let attr = fs.lookup(&Caller::ROOT, dir, name).unwrap();
            if attr.is_dir() {
                whole.push(attr.ino);
            }
        }
    }
}
