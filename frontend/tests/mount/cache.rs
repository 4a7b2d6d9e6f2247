//! With a file system that promises to invalidate, the kernel answers from its caches until it is
//! told otherwise, and at once after that.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use base::InodeId;
use client::fs::FileSystem;

use crate::harness::Mounted;

/// Makes the promise for a file system that does not; the test keeps it.
pub struct Caching(pub Arc<dyn FileSystem>);

impl FileSystem for Caching {
    fn may_cache(&self, _: InodeId) -> bool {
        true
    }

    client::pass_on! { 0:
        lookup getattr setattr readlink mknod unlink rmdir rename link open create read write
        fallocate lseek fgetattr fsync fsync_inode release readdir statfs getxattr listxattr
        setxattr removexattr forget keeps
    }
}

#[test]
fn attributes_and_data_are_kept_until_told() {
    let Some(mut mount) = Mounted::caching("cache-data") else { return };
    let (path, back) = (mount.path("f"), mount.back().join("f"));
    fs::write(&back, "old!").unwrap();
    let open = File::open(&path).unwrap();
    let ino = open.metadata().unwrap().ino();
    let read = || {
        let mut buf = [0; 16];
        let len = open.read_at(&mut buf, 0).unwrap();
        String::from_utf8(buf[..len].to_vec()).unwrap()
    };
    assert_eq!((read(), fs::read_to_string(&path).unwrap()), ("old!".into(), "old!".into()));
    fs::write(&back, "new and longer").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 4, "not asked again");
    assert_eq!((read(), fs::read_to_string(&path).unwrap()), ("old!".into(), "old!".into()));
    mount.tell(&format!("inode {ino}"));
    assert_eq!(fs::metadata(&path).unwrap().len(), 14);
    assert_eq!(read(), "new and longer");
    assert_eq!(fs::read_to_string(&path).unwrap(), "new and longer");
    mount.tell(&format!("store {ino} put"));
    assert_eq!(read(), "put and longer", "straight into the kernel's cache");
    mount.tell("inode 123456789"); // that the kernel does not know: nothing to do
}

#[test]
fn names_are_kept_until_told() {
    let Some(mut mount) = Mounted::caching("cache-names") else { return };
    let (path, back) = (mount.path("n"), mount.back().join("n"));
    assert!(!path.exists());
    fs::write(&back, "").unwrap();
    assert!(!path.exists(), "that it does not exist is remembered");
    mount.tell("entry 1 n");
    assert!(path.exists());
    fs::remove_file(&back).unwrap();
    assert!(path.exists(), "that it exists is remembered");
    mount.tell("entry 1 n");
    assert!(!path.exists());
    // What goes through the kernel needs no telling.
    fs::write(&path, "here").unwrap();
    assert_eq!(fs::read_to_string(&back).unwrap(), "here");
    fs::rename(&path, mount.path("m")).unwrap();
    assert!(!path.exists());
    assert!(mount.path("m").exists());
    mount.sh("mkdir d; touch d/a d/b; ls -l d | grep -q a; git init -q r; cd r; git fsck");
}
