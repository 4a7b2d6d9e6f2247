//! What tests of back ends do by hand, each in one call.
#![allow(dead_code)] // each test takes what it needs

use base::InodeId;
use client::fs::*;

/// A file below the root, with content.
pub fn file(fs: &impl FileSystem, name: &[u8], data: &[u8]) -> InodeId {
    let (attr, handle) = fs.create(&Caller::ROOT, InodeId::ROOT, name, 0o644, O_RDWR).unwrap();
    assert_eq!(fs.write(handle, 0, data, false).unwrap().len, data.len());
    fs.release(handle);
    attr.ino
}

/// All of a file.
pub fn content(fs: &impl FileSystem, ino: InodeId) -> Vec<u8> {
    let handle = fs.open(&Caller::ROOT, ino, O_RDONLY).unwrap();
    let size = fs.fgetattr(handle).unwrap().size;
    let mut data = vec![0xff; usize::try_from(size).unwrap() + 10];
    let len = fs.read(handle, 0, &mut data).unwrap();
    data.truncate(len);
    fs.release(handle);
    data
}

/// A directory.
pub fn mkdir(fs: &impl FileSystem, parent: InodeId, name: &[u8]) -> Attr {
    let node = NewNode { mode: S_IFDIR | 0o755, rdev: 0, target: b"" };
    fs.mknod(&Caller::ROOT, parent, name, &node).unwrap()
}

/// The names in a directory, as they come.
pub fn names(fs: &impl FileSystem, dir: InodeId) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    fs.readdir(&Caller::ROOT, dir, 0, &mut |entry| {
        all.push(entry.name.to_vec());
        true
    })
    .unwrap();
    all
}

/// From a directory and a name there to another.
pub fn rename(
    fs: &impl FileSystem,
    (parent, name): (InodeId, &[u8]),
    (new_parent, new_name): (InodeId, &[u8]),
    flags: u32,
) -> Result<()> {
    fs.rename(&Caller::ROOT, &Rename { parent, name, new_parent, new_name, flags })
}
