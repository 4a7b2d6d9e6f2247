//! A guest begins anew while requests of before are under way: what their server forgets at its end is not what the next one has told of.
//! (As in `frontend/src/fuse/tests/forgets.rs`, with two servers.)

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::InodeId;
use client::dir::{self, DirFs};
use client::fs::{Attr, Caller, FileSystem, Result};
use common::{Host, scratch};
use frontend::fuse::Server;
use frontend::fuse::wire::*;
use virtiofs::device::Options;
use virtiofs::driver::{Config, Driver};
use zerocopy::{FromBytes, IntoBytes};

const ROOT: u64 = 1;
const STALE: i32 = -116;

/// Moments at which something else happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    /// Something was looked up, and is not counted yet.
    Lookup,
    /// A server has forgotten something, and the file system has not yet.
    Forget,
}

type Then = Box<dyn FnOnce() + Send>;

/// A directory, between whose calls something else happens, once.
struct Between {
    inner: DirFs,
    then: Mutex<Option<(At, Then)>>,
}

impl Between {
    fn reach(&self, at: At) {
        let then = self.then.lock().unwrap().take_if(|(when, _)| *when == at);
        if let Some((_, then)) = then {
            then();
        }
    }

    fn at(&self, at: At, then: impl FnOnce() + Send + 'static) {
        assert!(self.then.lock().unwrap().replace((at, Box::new(then))).is_none());
    }
}

impl FileSystem for Between {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        let found = self.inner.lookup(caller, parent, name);
        self.reach(At::Lookup);
        found
    }

    fn forget(&self, ino: InodeId, told: &dyn Fn() -> bool) {
        self.reach(At::Forget);
        self.inner.forget(ino, told);
    }

    client::pass_on! { inner:
        getattr setattr readlink mknod unlink rmdir rename link open create read write fallocate
        lseek fgetattr fsync fsync_inode release readdir statfs getxattr listxattr setxattr
        removexattr keeps
    }
}

fn lookup(guest: &mut Driver, name: &[u8]) -> u64 {
    let reply = guest.call(op::LOOKUP, ROOT, &[name, b"\0"]).unwrap();
    assert_eq!(reply.error, 0);
    EntryOut::read_from_prefix(&reply.body).unwrap().0.nodeid.get()
}

fn getattr(guest: &mut Driver, node: u64) -> i32 {
    guest.call(op::GETATTR, node, &[GetattrIn::default().as_bytes()]).unwrap().error
}

/// Nobody else has the server any more.
fn let_go(old: Arc<Server<dyn FileSystem>>) {
    let start = Instant::now();
    while Arc::strong_count(&old) > 1 {
        assert!(start.elapsed() < Duration::from_secs(60), "somebody keeps it");
        std::thread::yield_now();
    }
    drop(old);
}

struct World {
    fs: Arc<Between>,
    host: Host,
    guest: Arc<Mutex<Driver>>,
    node: u64,
    old: Option<Arc<Server<dyn FileSystem>>>,
}

impl World {
    /// The guest knew the directory `d`, and has begun anew; the server of before is still at work.
    fn new() -> Self {
        let root = scratch();
        let path = root.join("shared");
        std::fs::create_dir(path.join("d")).unwrap();
        let options = dir::Options { fd_min: 700, ..dir::Options::default() };
        let inner = DirFs::open(path.to_str().unwrap().as_bytes(), options).unwrap();
        let fs = Arc::new(Between { inner, then: Mutex::default() });
        let host = Host::of(fs.clone(), Options::default(), root);
        let mut guest = host.guest(Config::default());
        let node = lookup(&mut guest, b"d");
        let old = host.device.server();
        guest.init().unwrap();
        assert!(!Arc::ptr_eq(&old, &host.device.server()));
        assert!(old.is_told(InodeId(node)) && getattr(&mut guest, node) == STALE);
        Self { fs, host, guest: Arc::new(Mutex::new(guest)), node, old: Some(old) }
    }

    /// The guest knows the directory: it is found without its name.
    fn is_held(&self) {
        assert!(self.fs.then.lock().unwrap().is_none(), "it came to that");
        std::fs::rename(self.host.path("d"), self.host.outside()).unwrap();
        assert_eq!(getattr(&mut self.guest.lock().unwrap(), self.node), 0, "the guest knows it");
    }
}

/// The last server forgets, and the next has told of it before.
#[test]
fn what_was_told_since_is_not_forgotten() {
    let mut world = World::new();
    assert_eq!(lookup(&mut world.guest.lock().unwrap(), b"d"), world.node);
    let_go(world.old.take().unwrap());
    world.is_held();
}

/// The last server has forgotten to half, and the next tells of it whole.
#[test]
fn what_is_told_while_it_is_forgotten_stays() {
    let mut world = World::new();
    let (guest, node) = (world.guest.clone(), world.node);
    world.fs.at(At::Forget, move || assert_eq!(lookup(&mut guest.lock().unwrap(), b"d"), node));
    let_go(world.old.take().unwrap());
    world.is_held();
}

/// The next server tells of it to half, and the last forgets it whole.
#[test]
fn what_is_forgotten_while_it_is_told_is_looked_up_again() {
    let mut world = World::new();
    let old = world.old.take().unwrap();
    world.fs.at(At::Lookup, move || let_go(old));
    assert_eq!(lookup(&mut world.guest.lock().unwrap(), b"d"), world.node);
    world.is_held();
}

/// What the next one forgets stays for as long as the last may know it, and goes with that.
#[test]
fn what_both_forget_is_gone() {
    let mut world = World::new();
    {
        let mut guest = world.guest.lock().unwrap();
        assert_eq!(lookup(&mut guest, b"d"), world.node);
        let forget = ForgetIn { nlookup: 1.into() };
        guest.tell(op::FORGET, world.node, &[forget.as_bytes()]).unwrap();
        // Answered behind it, in the same queue or another.
        while world.host.device.server().is_told(InodeId(world.node)) {
            std::thread::yield_now();
        }
    }
    assert!(world.fs.keeps(InodeId(world.node)), "a request of before may be at it");
    let_go(world.old.take().unwrap());
    assert!(!world.fs.keeps(InodeId(world.node)));
}
