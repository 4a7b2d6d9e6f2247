//! The path, descriptor and offset rules of the C library, over the `dir` back end: what differs
//! from Corbel is only what lies below the trait.

use base::Errno;
use client::dir::{DirFs, Options};
use corbel::Volume;

struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new(name: &str) -> (Self, Volume) {
        let path = std::env::temp_dir().join(format!("corbel-capi-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a writable temporary directory");
        let bytes = std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str());
        let fs = DirFs::open(bytes, Options::default()).expect("the directory opens");
        (Self(path), Volume::over(Box::new(fs)))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const CREATE: i32 = libc::O_CREAT | libc::O_RDWR;

#[test]
fn offsets_append_and_descriptors() {
    let (_scratch, fs) = Scratch::new("offsets");
    let fd = fs.open(b"/a", CREATE, 0o644, 0).expect("created");
    assert_eq!(fs.write(fd, b"hello"), Ok(5));
    assert_eq!(fs.write(fd, b" world"), Ok(6));
    assert_eq!(fs.lseek(fd, -5, libc::SEEK_END), Ok(6));
    let mut buf = [0; 16];
    assert_eq!(fs.read(fd, &mut buf), Ok(5));
    assert_eq!(&buf[..5], b"world");
    assert_eq!(fs.read(fd, &mut buf), Ok(0));
    assert_eq!(fs.lseek(fd, -1, libc::SEEK_SET), Err(Errno::INVAL));
    let log = fs.open(b"a", libc::O_WRONLY | libc::O_APPEND, 0, 0).expect("relative to the root");
    assert_ne!(log, fd);
    assert_eq!(fs.write(log, b"!"), Ok(1));
    assert_eq!(fs.lseek(log, 0, libc::SEEK_CUR), Ok(12), "the offset follows an append");
    assert_eq!(fs.pread(log, &mut buf, 0), Err(Errno::BADF), "write-only");
    assert_eq!(fs.close(fd), Ok(()));
    assert_eq!(fs.close(fd), Err(Errno::BADF));
    assert_eq!(fs.open(b"/b", CREATE, 0o600, 0), Ok(fd), "the lowest free number");
    assert_eq!(fs.read(-1, &mut buf), Err(Errno::BADF));
    fs.open(b"/masked", CREATE, 0o666, 0o027).expect("created");
    fs.make(b"/dir", 0o040_777, 0o027, 0, &[]).expect("mkdir");
    let mode = |path: &[u8]| fs.stat(path, true).expect("it is there").mode & 0o777;
    assert_eq!((mode(b"/masked"), mode(b"/dir")), (0o640, 0o750));
}

#[test]
fn paths_links_and_loops() {
    let (_scratch, fs) = Scratch::new("paths");
    fs.make(b"/d", 0o040_755, 0, 0, &[]).expect("mkdir");
    fs.make(b"/d/e/", 0o040_755, 0, 0, &[]).expect("mkdir with a trailing slash");
    let fd = fs.open(b"/d/e/../f", CREATE, 0o644, 0).expect("dot-dot");
    fs.close(fd).expect("open");
    assert_eq!(fs.stat(b"/d/f/", true).unwrap_err(), Errno::NOTDIR);
    assert_eq!(fs.stat(b"/d/f/x", true).unwrap_err(), Errno::NOTDIR);
    assert_eq!(fs.stat(b"", true).unwrap_err(), Errno::NOENT);
    assert_eq!(fs.stat(&[b'x'; 256], true).unwrap_err(), Errno::NAMETOOLONG);
    assert_eq!(fs.stat(&vec![b'/'; 5000], true).unwrap_err(), Errno::NAMETOOLONG);
    fs.make(b"/up", 0o120_777, 0, 0, b"d/../d/f").expect("symlink");
    fs.make(b"/abs", 0o120_777, 0, 0, b"/d/e/").expect("symlink");
    fs.make(b"/loop", 0o120_777, 0, 0, b"loop").expect("symlink");
    let file = fs.stat(b"/d/f", true).expect("there").ino;
    assert_eq!(fs.stat(b"/up", true).expect("followed").ino, file);
    assert_eq!(fs.stat(b"/up", false).expect("not followed").kind(), 0o120_000);
    assert!(fs.stat(b"/abs", true).expect("followed from the root").is_dir());
    assert_eq!(fs.stat(b"/loop", true).unwrap_err(), Errno::LOOP);
    fs.make(b"/grows", 0o120_777, 0, 0, &[b"grows/".as_slice(), &[b'x'; 255]].concat())
        .expect("symlink");
    assert_eq!(fs.stat(b"/grows/f", true).unwrap_err(), Errno::LOOP);
    assert_eq!(fs.open(b"/up", libc::O_NOFOLLOW, 0, 0), Err(Errno::LOOP));
    assert_eq!(fs.open(b"/up", CREATE | libc::O_EXCL, 0o644, 0), Err(Errno::EXIST));
    assert!(fs.stat(b"/../..", true).expect("the root's parent is the root").is_dir());
    assert_eq!(fs.remove(b"/d", true), Err(Errno::NOTEMPTY));
    assert_eq!(fs.remove(b"/d", false), Err(Errno::ISDIR));
    assert_eq!(fs.remove(b"/d/f", true), Err(Errno::NOTDIR));
    assert_eq!(fs.rename(b"/d/f", b"/d/e/", 0), Err(Errno::NOTDIR));
    assert_eq!(fs.rename(b"/d", b"/d/e/x", 0), Err(Errno::INVAL));
    assert_eq!(fs.rename(b"/d/f", b"/g", 0), Ok(()));
    assert_eq!(fs.link(b"/g", b"/h"), Ok(()));
    assert_eq!(fs.stat(b"/g", true).expect("there").nlink, 2);
}
