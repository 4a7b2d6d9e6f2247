//! A device in this process, and the requests that most tests make.
#![allow(dead_code)] // each test uses some of it

pub mod process;

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use client::dir::{self, DirFs};
use client::fs::FileSystem;
use client::null::NullFs;
use frontend::fuse::wire::*;
use virtiofs::device::{Crew, Device, Options};
use virtiofs::driver::{Config, Driver};
use virtiofs::vhost;
use zerocopy::{FromBytes, IntoBytes};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A device that listens on a socket, as `corbel virtiofs` does.
pub struct Host {
    pub fs: Arc<dyn FileSystem>,
    pub device: Arc<Device>,
    root: PathBuf,
    _crew: Crew,
}

pub fn scratch() -> PathBuf {
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    let root = std::env::temp_dir().join(format!("virtiofs-{}-{n}", std::process::id()));
    std::fs::create_dir_all(root.join("shared")).unwrap();
    root
}

impl Host {
    pub fn dir() -> Self {
        Self::dir_with(Options::default())
    }

    pub fn dir_with(options: Options) -> Self {
        let root = scratch();
        let path = root.join("shared");
        let fs = DirFs::open(path.to_str().unwrap().as_bytes(), dir::Options::default()).unwrap();
        Self::of(Arc::new(fs), options, root)
    }

    pub fn null(options: Options) -> Self {
        Self::of(Arc::new(NullFs::default()), options, scratch())
    }

    pub fn of(fs: Arc<dyn FileSystem>, options: Options, root: PathBuf) -> Self {
        let device = Device::new(fs.clone(), options);
        let rings = vhost::rings("test", 4).unwrap();
        let crew = device.start(&*rings).unwrap();
        let listener = UnixListener::bind(root.join("socket")).unwrap();
        let served = device.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                vhost::serve(&rings, Some(&served), Some("test"), stream.unwrap());
            }
        });
        Self { fs, device, root, _crew: crew }
    }

    /// A file of the directory that the guest gets.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join("shared").join(name)
    }

    /// A file beside it.
    pub fn outside(&self) -> PathBuf {
        self.root.join("outside")
    }

    /// Where a monitor connects.
    pub fn socket(&self) -> PathBuf {
        self.root.join("socket")
    }

    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(self.root.join("socket")).unwrap()
    }

    /// A guest that has sent INIT.
    pub fn guest(&self, config: Config) -> Driver {
        let mut guest = Driver::over(self.connect(), config).unwrap();
        guest.init().unwrap();
        guest
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

pub fn create(guest: &mut Driver, queue: usize, dir: u64, name: &[u8]) -> (u64, u64) {
    let arg = CreateIn { flags: 2.into(), mode: 0o644.into(), ..CreateIn::default() };
    let reply =
        guest.call_on(queue, op::CREATE, dir, &[arg.as_bytes(), name, b"\0"], &[], 0).unwrap();
    assert_eq!(reply.error, 0);
    let (entry, rest) = EntryOut::read_from_prefix(&reply.body).unwrap();
    let (open, _) = OpenOut::read_from_prefix(rest).unwrap();
    (entry.nodeid.get(), open.fh.get())
}

pub fn open(guest: &mut Driver, queue: usize, node: u64, flags: u32) -> u64 {
    let arg = OpenIn { flags: flags.into(), ..OpenIn::default() };
    let reply = guest.call_on(queue, op::OPEN, node, &[arg.as_bytes()], &[], 0).unwrap();
    assert_eq!(reply.error, 0);
    OpenOut::read_from_prefix(&reply.body).unwrap().0.fh.get()
}

pub fn read_in(fh: u64, at: usize, len: usize) -> Vec<u8> {
    let size = u32::try_from(len).unwrap();
    ReadIn { fh: fh.into(), offset: (at as u64).into(), size: size.into(), ..ReadIn::default() }
        .as_bytes()
        .to_vec()
}

pub fn write_in(fh: u64, at: usize, len: usize) -> Vec<u8> {
    let size = u32::try_from(len).unwrap();
    WriteIn { fh: fh.into(), offset: (at as u64).into(), size: size.into(), ..WriteIn::default() }
        .as_bytes()
        .to_vec()
}
