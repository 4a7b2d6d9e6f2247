//! The example in C, as somebody else's: built by the system's compiler, loaded, and used through the trait that all front ends use.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use base::{Errno, InodeId};
use client::fs::{Caller, FileSystem, Handle, O_EXCL, O_RDWR, Rename, SetAttr, Waiting};
use foreign::ForeignFs;

const ME: Caller<'_> = Caller { uid: 7, gid: 8, groups: &[9], pid: 0, umask: 0o22 };
const ROOT: InodeId = InodeId::ROOT;

/// A library of a C file, built once for a test.
struct Library(PathBuf);

impl Drop for Library {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn build(name: &str, source: &Path) -> Library {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library =
        std::env::temp_dir().join(format!("corbel-foreign-{name}-{}.so", std::process::id()));
    let built = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"])
        .arg("-o")
        .arg(&library)
        .arg(source)
        .arg("-I")
        .arg(here.join("include"))
        .status()
        .unwrap();
    assert!(built.success());
    Library(library)
}

fn ram(name: &str) -> Library {
    build(name, &Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/ram.c"))
}

fn names(fs: &ForeignFs) -> Vec<Vec<u8>> {
    let (mut all, mut cookie) = (Vec::new(), 0);
    loop {
        // Two at a time: each call goes on behind a cookie of the one before.
        let before = all.len();
        fs.readdir(&ME, ROOT, cookie, &mut |entry| {
            cookie = entry.next;
            all.push(entry.name.to_vec());
            all.len() < before + 2
        })
        .unwrap();
        if all.len() == before {
            return all;
        }
    }
}

#[test]
fn files_are_made_written_read_renamed_and_removed() {
    let library = ram("files");
    let fs = ForeignFs::open(&library.0, "").unwrap();
    assert_eq!(fs.waiting(), Waiting::Nobody);
    assert!(fs.getattr(&ME, ROOT).unwrap().is_dir());
    assert_eq!(fs.lookup(&ME, ROOT, b"f"), Err(Errno::NOENT));
    let (attr, handle) = fs.create(&ME, ROOT, b"f", 0o666, O_RDWR).unwrap();
    assert_eq!((attr.mode, attr.uid, attr.gid), (0o100_644, 7, 8));
    assert_eq!(fs.create(&ME, ROOT, b"f", 0o666, O_RDWR | O_EXCL), Err(Errno::EXIST));
    let (again, second) = fs.create(&ME, ROOT, b"f", 0o666, O_RDWR).unwrap();
    assert_eq!(again.ino, attr.ino);
    fs.release(second);
    assert_eq!(fs.write(handle, 99, b"", false).unwrap().len, 0);
    assert_eq!(fs.fgetattr(handle).unwrap().size, 0);
    let written = fs.write(handle, 10, b"hello", false).unwrap();
    assert_eq!((written.len, written.offset), (5, 10));
    assert_eq!(fs.write(handle, 0, b" world", true).unwrap().offset, 15);
    let mut buf = [1; 64];
    assert_eq!(fs.read(handle, 8, &mut buf), Ok(13));
    assert_eq!(buf[..13], *b"\0\0hello world");
    assert_eq!(fs.read(handle, 21, &mut buf), Ok(0));
    fs.fsync(handle, true).unwrap();
    fs.fsync_inode(&ME, ROOT).unwrap();
    let cut = fs.setattr(&ME, attr.ino, &SetAttr { size: Some(12), ..SetAttr::default() }).unwrap();
    assert_eq!((cut.size, fs.fgetattr(handle).unwrap().size), (12, 12));
    for i in 0..5 {
        let (_, handle) = fs.create(&ME, ROOT, format!("g{i}").as_bytes(), 0o600, O_RDWR).unwrap();
        fs.release(handle);
    }
    let rename = Rename { parent: ROOT, name: b"f", new_parent: ROOT, new_name: b"g0", flags: 0 };
    fs.rename(&ME, &rename).unwrap();
    let all = names(&fs);
    assert_eq!(all[..2], [b".".to_vec(), b"..".to_vec()]);
    let mut all = all[2..].to_vec();
    all.sort();
    assert_eq!(all, [b"g0", b"g1", b"g2", b"g3", b"g4"].map(|name| name.to_vec()));
    assert_eq!(fs.lookup(&ME, ROOT, b"g0").unwrap().ino, attr.ino);
    fs.unlink(&ME, ROOT, b"g0").unwrap();
    // It lives as long as it is open.
    assert_eq!(fs.read(handle, 10, &mut buf), Ok(2));
    fs.release(handle);
    assert_eq!(fs.getattr(&ME, attr.ino), Err(Errno::STALE));
    // What it does not do.
    assert_eq!(fs.link(&ME, attr.ino, ROOT, b"h"), Err(Errno::NOSYS));
    assert_eq!(fs.getxattr(&ME, ROOT, b"user.x"), Err(Errno::OPNOTSUPP));
    assert_eq!(fs.lookup(&ME, ROOT, b"a\0b"), Err(Errno::INVAL));
    assert_eq!(fs.lookup(&ME, ROOT, &[b'x'; 256]), Err(Errno::NAMETOOLONG));
    assert_eq!(fs.statfs().unwrap().inodes, 4096);
}

/// Syncs that are begun end later, by another thread of the library's, and hold none of ours.
#[test]
fn what_is_begun_ends_later() {
    let library = ram("later");
    let fs = ForeignFs::open(&library.0, "10").unwrap();
    let (_, handle) = fs.create(&ME, ROOT, b"f", 0o600, O_RDWR).unwrap();
    let (done, all) = mpsc::channel();
    for _ in 0..100 {
        let done = done.clone();
        let end = move |result| done.send((result, std::thread::current().id())).unwrap();
        fs.begin_fsync(handle, false, Box::new(end));
    }
    for _ in 0..100 {
        let (result, thread) = all.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(result, Ok(()));
        assert_ne!(thread, std::thread::current().id());
    }
    let (done, all) = mpsc::channel();
    fs.begin_read(Handle(999), 0, 10, Box::new(move |read| done.send(read).unwrap()));
    assert_eq!(all.recv_timeout(Duration::from_secs(20)), Ok(Err(Errno::BADF)));
}

#[test]
fn what_is_no_back_end_is_refused_in_words() {
    let library = ram("refused");
    for (path, argument, said) in [
        (Path::new("/nonexistent.so"), "", "nonexistent.so"),
        (Path::new("/etc/passwd"), "", "passwd"),
        (&library.0, "0", "does not open \"0\""),
        (&library.0, "99999", "Invalid argument"),
    ] {
        let error = ForeignFs::open(path, argument).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    let place = std::env::temp_dir();
    for (name, text, said) in [
        ("empty", "int nothing;\n", "exports no corbel_fs_open"),
        (
            "null",
            "#include <corbel-fs.h>\nint corbel_fs_open(const char *a, const struct corbel_fs_operations **o, void **f) {\n\
             (void)a; *o = NULL; *f = NULL; return 0; }\n",
            "no operations",
        ),
        (
            "few",
            "#include <corbel-fs.h>\nstatic const struct corbel_fs_operations few = {.size = sizeof(size_t)};\n\
             int corbel_fs_open(const char *a, const struct corbel_fs_operations **o, void **f) {\n\
             (void)a; *o = &few; *f = NULL; return 0; }\n",
            "without lookup",
        ),
    ] {
        let source = place.join(format!("corbel-foreign-{name}-{}.c", std::process::id()));
        std::fs::write(&source, text).unwrap();
        let library = build(name, &source);
        let error = ForeignFs::open(&library.0, "").unwrap_err();
        std::fs::remove_file(&source).unwrap();
        assert!(error.contains(said), "{error}");
    }
}

/// A back end that answers what was not asked for: wrong kinds, numbers and names that no kernel would take, more bytes than there
/// is room for, a directory that never ends.
#[test]
fn answers_that_are_none_are_errors() {
    const LIAR: &str = r#"
#include <corbel-fs.h>
#include <errno.h>
#include <stddef.h>
static struct corbel_fs_attr attr = {.mode = 0100644};
static void lookup(void *f, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t p, const char *n) {
    (void)f, (void)c, (void)p;
    switch (n[0]) {
    case 'a': attr.ino = 0; corbel_fs_reply_attr(r, &attr); break;
    case 'b': attr.ino = 1ull << 63; corbel_fs_reply_attr(r, &attr); break;
    case 'c': attr.ino = 2; attr.mode = 0644; corbel_fs_reply_attr(r, &attr); attr.mode = 0100644; break;
    case 'd': corbel_fs_reply_attr(r, NULL); break;
    case 'e': corbel_fs_reply_data(r, "x", 1); break;
    case 'f': corbel_fs_reply_done(r, 0); break;
    case 'g': corbel_fs_reply_done(r, 70000); break;
    case 'h': corbel_fs_reply_done(r, -ENOENT); break;
    default: attr.ino = 2; attr.size = 3; corbel_fs_reply_attr(r, &attr);
    }
}
static void getattr(void *f, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t i) { (void)i; lookup(f, r, c, 1, "z"); }
static void open_(void *f, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t i, uint32_t g) {
    (void)f, (void)c, (void)i, (void)g;
    corbel_fs_reply_open(r, NULL, 5);
}
static void read_(void *f, corbel_fs_request_t *r, uint64_t h, uint64_t o, size_t l) {
    static char much[100000];
    (void)f, (void)h, (void)o, (void)l;
    corbel_fs_reply_data(r, much, sizeof much);
}
static void write_(void *f, corbel_fs_request_t *r, uint64_t h, uint64_t o, const void *d, size_t l, int a) {
    (void)f, (void)h, (void)d, (void)a;
    corbel_fs_reply_written(r, l + 1, o);
}
static void readdir_(void *f, corbel_fs_request_t *r, const struct corbel_fs_caller *c, uint64_t i, uint64_t k) {
    (void)f, (void)c, (void)i;
    if (k == 7) { corbel_fs_reply_entry(r, "again", 3, 0100000, 7); corbel_fs_reply_done(r, 0); return; }
    corbel_fs_reply_entry(r, "a/b", 2, 0100000, 1);
    corbel_fs_reply_entry(r, "", 2, 0100000, 2);
    corbel_fs_reply_entry(r, "..", 2, 0100000, 3);
    corbel_fs_reply_entry(r, "zero", 0, 0100000, 4);
    corbel_fs_reply_entry(r, "cookie", 2, 0100000, 0);
    corbel_fs_reply_entry(r, NULL, 2, 0100000, 5);
    corbel_fs_reply_entry(r, "good", 2, 0100000, 7);
    corbel_fs_reply_done(r, 0);
}
static const struct corbel_fs_operations all = {.size = sizeof all, .lookup = lookup, .getattr = getattr, .open = open_, .read = read_,
    .write = write_, .readdir = readdir_};
int corbel_fs_open(const char *a, const struct corbel_fs_operations **o, void **f) { (void)a; *o = &all; *f = NULL; return 0; }
"#;
    let source = std::env::temp_dir().join(format!("corbel-foreign-liar-{}.c", std::process::id()));
    std::fs::write(&source, LIAR).unwrap();
    let library = build("liar", &source);
    std::fs::remove_file(&source).unwrap();
    let fs = ForeignFs::open(&library.0, "").unwrap();
    for name in [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"] {
        assert_eq!(fs.lookup(&ME, ROOT, name), Err(Errno::IO), "{name:?}");
    }
    assert_eq!(fs.lookup(&ME, ROOT, b"z").unwrap().ino, InodeId(2));
    let handle = fs.open(&ME, InodeId(2), 0).unwrap();
    let mut buf = [1; 10];
    assert_eq!(fs.read(handle, 0, &mut buf), Ok(10));
    assert_eq!(fs.write(handle, 0, b"x", false), Err(Errno::IO));
    let mut seen = Vec::new();
    let listed = fs.readdir(&ME, ROOT, 0, &mut |entry| {
        seen.push(entry.name.to_vec());
        true
    });
    assert_eq!(listed, Err(Errno::IO));
    assert_eq!(seen, [&b"."[..], b"..", b"good"]);
    assert_eq!(fs.fsync(handle, false), Err(Errno::NOSYS));
    fs.release(handle);
}
