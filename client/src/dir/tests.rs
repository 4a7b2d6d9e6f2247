use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::string::String;
use std::vec::Vec;

use super::*;
use crate::fs::{O_APPEND, O_EXCL, O_RDWR, S_IFDIR, S_IFLNK, S_IFREG};

const ME: Caller<'static> = Caller::ROOT;

/// A backing directory that is removed with the test.
struct Backing(PathBuf);

impl Backing {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(std::format!("corbel-dir-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn serve(&self, nodes_max: usize) -> DirFs {
        let path = self.0.to_str().unwrap().as_bytes();
        DirFs::open(path, Options { nodes_max, fd_min: 500, ..Options::default() }).unwrap()
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn names(fs: &DirFs, ino: InodeId) -> Vec<String> {
    let mut names = Vec::new();
    fs.readdir(&ME, ino, 0, &mut |entry| {
        names.push(String::from_utf8(entry.name.to_vec()).unwrap());
        true
    })
    .unwrap();
    names.sort();
    names
}

fn mkdir(fs: &DirFs, parent: InodeId, name: &[u8]) -> InodeId {
    let node = NewNode { mode: S_IFDIR | 0o755, rdev: 0, target: b"" };
    fs.mknod(&ME, parent, name, &node).unwrap().ino
}

fn move_to(parent: InodeId, name: &'static [u8], new_parent: InodeId) -> Rename<'static> {
    Rename { parent, name, new_parent, new_name: name, flags: 0 }
}

#[test]
fn root_is_one_and_has_no_parent() {
    let backing = Backing::new("root");
    let fs = backing.serve(16);
    let root = fs.getattr(&ME, InodeId::ROOT).unwrap();
    assert_eq!((root.ino, root.kind()), (InodeId::ROOT, S_IFDIR));
    assert_eq!(fs.lookup(&ME, InodeId::ROOT, b"..").unwrap().ino, InodeId::ROOT);
    let sub = mkdir(&fs, InodeId::ROOT, b"sub");
    assert_eq!(fs.lookup(&ME, sub, b"..").unwrap().ino, InodeId::ROOT);
    let mut dots = Vec::new();
    fs.readdir(&ME, sub, 0, &mut |e| {
        dots.push((e.name.to_vec(), e.ino));
        true
    })
    .unwrap();
    dots.sort();
    assert_eq!(dots, [(b".".to_vec(), sub), (b"..".to_vec(), InodeId::ROOT)]);
}

#[test]
fn files_links_and_append() {
    let backing = Backing::new("files");
    let fs = backing.serve(16);
    let root = InodeId::ROOT;
    let (attr, h) = fs.create(&ME, root, b"f", 0o644, O_RDWR | O_EXCL).unwrap();
    assert_eq!(fs.create(&ME, root, b"f", 0o644, O_RDWR | O_EXCL), Err(Errno::EXIST));
    assert_eq!(fs.write(h, 0, b"0123456789", false), Ok(Written { len: 10, offset: 0 }));
    let (same, a) = fs.create(&ME, root, b"f", 0o600, O_RDWR | O_APPEND).unwrap();
    assert_eq!((same.ino, same.mode), (attr.ino, S_IFREG | 0o644));
    assert_eq!(fs.write(a, 3, b"ab", false), Ok(Written { len: 2, offset: 10 }));
    assert_eq!(fs.write(h, 0, b"cd", true), Ok(Written { len: 2, offset: 12 }));
    let mut buf = [0u8; 32];
    assert_eq!(fs.read(h, 0, &mut buf), Ok(14));
    assert_eq!(&buf[..14], b"0123456789abcd");
    assert_eq!(fs.link(&ME, attr.ino, root, b"g").unwrap().nlink, 2);
    let link = NewNode { mode: S_IFLNK | 0o777, rdev: 0, target: b"to/where" };
    let symlink = fs.mknod(&ME, root, b"s", &link).unwrap();
    assert_eq!(fs.readlink(&ME, symlink.ino).unwrap(), b"to/where");
    assert_eq!(fs.open(&ME, symlink.ino, 0), Err(Errno::LOOP));
    assert_eq!(names(&fs, root), [".", "..", "f", "g", "s"]);
    fs.release(a);
    fs.release(h);
    assert_eq!(fs.read(h, 0, &mut buf), Err(Errno::BADF));
}

#[test]
fn unlinked_file_lives_while_open_then_frees_its_space() {
    let backing = Backing::new("unlink");
    let fs = backing.serve(16);
    let (attr, h) = fs.create(&ME, InodeId::ROOT, b"f", 0o644, O_RDWR).unwrap();
    fs.write(h, 0, b"still here", false).unwrap();
    fs.unlink(&ME, InodeId::ROOT, b"f").unwrap();
    assert_eq!(fs.lookup(&ME, InodeId::ROOT, b"f"), Err(Errno::NOENT));
    assert_eq!(fs.getattr(&ME, attr.ino).unwrap().nlink, 0);
    let mut buf = [0u8; 10];
    assert_eq!(fs.read(h, 0, &mut buf), Ok(10));
    let truncate = SetAttr { size: Some(3), handle: Some(h), ..SetAttr::default() };
    assert_eq!(fs.setattr(&ME, attr.ino, &truncate).unwrap().size, 3);
    let backing_fd = fs.handle(h).unwrap().fd.as_raw_fd();
    assert!(backing_fd >= 500, "descriptors stay out of the host's way: {backing_fd}");
    fs.release(h);
    assert_eq!(fs.getattr(&ME, attr.ino), Err(Errno::STALE));
    // Nothing may hold the deleted inode any more, or df would not see its blocks come back.
    let inode_path = backing.0.to_str().unwrap();
    let held = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|e| std::fs::read_link(e.unwrap().path()).ok())
        .any(|p| p.starts_with(inode_path) && p.to_string_lossy().contains("(deleted)"));
    assert!(!held);
}

#[test]
fn evicted_inodes_are_found_again_after_renames() {
    let backing = Backing::new("evict");
    let fs = backing.serve(2);
    let (a, b) = (mkdir(&fs, InodeId::ROOT, b"a"), mkdir(&fs, InodeId::ROOT, b"b"));
    let deep = mkdir(&fs, a, b"deep");
    let (file, h) = fs.create(&ME, deep, b"file", 0o644, O_RDWR).unwrap();
    fs.write(h, 0, b"x", false).unwrap();
    fs.release(h);
    fs.rename(&ME, &move_to(a, b"deep", b)).unwrap();
    for i in 0..20u8 {
        let name = [b'n', b'0' + i / 10, b'0' + i % 10];
        mkdir(&fs, InodeId::ROOT, &name);
    }
    assert_eq!(fs.getattr(&ME, file.ino).unwrap().size, 1, "found by its new path");
    // Beside us: the hint is wrong, the number must still decide.
    std::fs::rename(backing.0.join("b/deep"), backing.0.join("elsewhere")).unwrap();
    for i in 0..20u8 {
        let name = [b'n', b'0' + i / 10, b'0' + i % 10];
        fs.lookup(&ME, InodeId::ROOT, &name).unwrap();
    }
    assert_eq!(fs.getattr(&ME, file.ino).unwrap().size, 1, "found by searching");
    assert_eq!(fs.lookup(&ME, deep, b"file").unwrap().ino, file.ino);
    // A fresh server knows nothing, and still serves the number.
    let fresh = backing.serve(2);
    assert_eq!(fresh.getattr(&ME, file.ino).unwrap().size, 1);
    assert_eq!(fresh.getattr(&ME, InodeId(file.ino.0 + 987_654_321)), Err(Errno::STALE));
}

#[test]
fn what_is_told_again_is_not_forgotten() {
    let backing = Backing::new("told");
    let fs = backing.serve(16);
    let dir = mkdir(&fs, InodeId::ROOT, b"d");
    fs.forget(dir, &|| true);
    std::fs::remove_dir(backing.0.join("d")).unwrap();
    assert!(fs.keeps(dir) && fs.keeps(InodeId::ROOT));
    assert_eq!(fs.getattr(&ME, dir).map(|attr| attr.ino), Ok(dir));
    fs.forget(dir, &|| false);
    assert_eq!((fs.keeps(dir), fs.getattr(&ME, dir).err()), (false, Some(Errno::STALE)));
}

#[test]
fn names_that_lead_out_are_refused() {
    let backing = Backing::new("names");
    std::fs::create_dir(backing.0.join("root")).unwrap();
    let inner = Path::new("root");
    let path = backing.0.join(inner);
    let fs = DirFs::open(path.to_str().unwrap().as_bytes(), Options::default()).unwrap();
    let root = InodeId::ROOT;
    let long = [b'x'; 256];
    for (name, error) in [
        (&b"a/b"[..], Errno::INVAL),
        (b"", Errno::INVAL),
        (b"a\0", Errno::INVAL),
        (&long, Errno::NAMETOOLONG),
    ] {
        assert_eq!(fs.lookup(&ME, root, name), Err(error));
        assert_eq!(fs.unlink(&ME, root, name), Err(error));
        assert_eq!(fs.create(&ME, root, name, 0o644, 0), Err(error));
    }
    assert_eq!(fs.rmdir(&ME, root, b".."), Err(Errno::NOTEMPTY));
    assert_eq!(fs.unlink(&ME, root, b".."), Err(Errno::ISDIR));
    assert_eq!(fs.rename(&ME, &move_to(root, b"..", root)), Err(Errno::BUSY));
    assert_eq!(fs.create(&ME, root, b"..", 0o644, 0), Err(Errno::ISDIR));
    let (_, h) = fs.create(&ME, root, &long[..255], 0o644, O_RDWR).unwrap();
    fs.release(h);
}

#[test]
fn impersonation_owns_and_refuses() {
    if !rustix::process::geteuid().is_root() {
        std::println!("skipped: needs root");
        return;
    }
    let backing = Backing::new("identity");
    std::fs::set_permissions(&backing.0, std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .unwrap();
    let path = backing.0.to_str().unwrap().as_bytes();
    let options = Options { impersonate: true, ..Options::default() };
    let fs = DirFs::open(path, options).unwrap();
    let user = Caller { uid: 1234, gid: 2345, groups: &[77], pid: 1, umask: 0 };
    let other = Caller { uid: 4321, gid: 77, groups: &[], pid: 1, umask: 0 };
    let (attr, h) = fs.create(&user, InodeId::ROOT, b"f", 0o640, O_RDWR).unwrap();
    fs.release(h);
    assert_eq!((attr.uid, attr.gid), (1234, 2345));
    assert_eq!(fs.open(&other, attr.ino, 0), Err(Errno::ACCES));
    let chgrp = SetAttr { gid: Some(77), ..SetAttr::default() };
    assert_eq!(fs.setattr(&other, attr.ino, &chgrp), Err(Errno::PERM));
    assert_eq!(fs.setattr(&user, attr.ino, &chgrp).unwrap().gid, 77);
    let h = fs.open(&other, attr.ino, 0).unwrap();
    fs.release(h);
    // And the thread is root again.
    assert!(rustix::process::geteuid().is_root());
    assert!(fs.open(&ME, attr.ino, O_RDWR).is_ok());
}
