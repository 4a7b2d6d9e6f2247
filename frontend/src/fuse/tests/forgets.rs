//! FORGET and what tells the kernel of an inode, one in the middle of the other. What the kernel knows it finds by its number, also
//! when that has no name any more: it may have it open by its path alone, or stand in it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};

use base::InodeId;
use client::dir::{self, DirFs};
use client::fs::{Attr, Caller, FileSystem, NewNode, Result};
use zerocopy::{FromBytes, IntoBytes};

use super::super::wire::*;
use super::super::{Options, Server};
use super::{InitInExt, ROOT, Sink, checked, init_in, request};
use crate::planted::{Bug, choose};

/// Moments at which something else happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    /// Something was looked up, and is not counted yet.
    Lookup,
    /// Its attributes were asked for, by its number.
    Getattr,
    /// Something was made.
    Mknod,
    /// The kernel has forgotten something, and the file system has not yet.
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
}

impl FileSystem for Between {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        let found = self.inner.lookup(caller, parent, name);
        self.reach(At::Lookup);
        found
    }

    fn getattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        let found = self.inner.getattr(caller, ino);
        self.reach(At::Getattr);
        found
    }

    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        let made = self.inner.mknod(caller, parent, name, node);
        self.reach(At::Mknod);
        made
    }

    fn forget(&self, ino: InodeId, told: &dyn Fn() -> bool) {
        self.reach(At::Forget);
        self.inner.forget(ino, told);
    }

    client::pass_on! { inner:
        setattr readlink unlink rmdir rename link open create read write fallocate lseek fgetattr
        fsync fsync_inode release readdir statfs getxattr listxattr setxattr removexattr keeps
    }
}

struct World {
    back: PathBuf,
    fs: Arc<Between>,
    server: Arc<Server<Between>>,
    me: Weak<World>,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.back);
    }
}

impl World {
    /// A directory with another one in it, `d`.
    fn new() -> Arc<Self> {
        let name = std::thread::current().name().map_or("", |name| name).replace(':', "-");
        let back =
            std::env::temp_dir().join(format!("corbel-forgets-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&back);
        std::fs::create_dir_all(back.join("served/d")).unwrap();
        let inner = DirFs::open(
            back.join("served").to_str().unwrap().as_bytes(),
            dir::Options { fd_min: 700, ..dir::Options::default() },
        );
        let fs = Arc::new(Between { inner: inner.unwrap(), then: Mutex::default() });
        let options = Options { groups_from_proc: false, ..Options::default() };
        let server = Arc::new(Server::new(fs.clone(), options));
        let world = Arc::new_cyclic(|me| Self { back, fs, server, me: me.clone() });
        let (error, _) =
            world.call(op::INIT, 0, &[&init_in(7, 45), InitInExt::default().as_bytes()]);
        assert_eq!(error, 0);
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.back.join("served").join(name)
    }

    /// Does something when a request comes to that moment next.
    fn at(&self, at: At, then: impl FnOnce(&World) + Send + 'static) {
        let me = self.me.clone();
        let then = Box::new(move || then(&me.upgrade().unwrap()));
        assert!(self.fs.then.lock().unwrap().replace((at, then)).is_none());
    }

    fn call(&self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> (i32, Vec<u8>) {
        let mut sink = Sink::default();
        self.server.handle(&request(opcode, nodeid, parts), &mut sink);
        checked(&sink.replies[0])
    }

    /// The node that the kernel is told of.
    fn entry(&self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> u64 {
        let (error, body) = self.call(opcode, nodeid, parts);
        assert_eq!(error, 0, "opcode {opcode}");
        EntryOut::read_from_prefix(&body).unwrap().0.nodeid.get()
    }

    fn lookup(&self, name: &[u8]) -> u64 {
        self.entry(op::LOOKUP, ROOT, &[name, b"\0"])
    }

    fn forget(&self, node: u64) {
        let forget = ForgetIn { nlookup: 1.into() };
        self.server.handle(&request(op::FORGET, node, &[forget.as_bytes()]), &mut Sink::default());
    }

    fn getattr(&self, node: u64) -> i32 {
        self.call(op::GETATTR, node, &[GetattrIn::default().as_bytes()]).0
    }

    /// The kernel knows `node`, which is told once and has the name: it is found without it, until the kernel has forgotten it.
    fn is_held(&self, node: u64, name: &str) {
        assert!(self.fs.then.lock().unwrap().is_none(), "it came to that");
        std::fs::rename(self.path(name), self.back.join("elsewhere")).unwrap();
        assert_eq!(self.getattr(node), 0, "the kernel knows it");
        self.forget(node);
        assert!(!self.server.is_told(InodeId(node)));
        assert_eq!(self.getattr(node), -116, "it was told once");
    }
}

/// FORGET is served to half, and another LOOKUP whole.
#[test]
fn what_is_told_while_it_is_forgotten_stays() {
    let world = World::new();
    let node = world.lookup(b"d");
    world.at(At::Forget, move |world| assert_eq!(world.lookup(b"d"), node));
    world.forget(node);
    world.is_held(node, "d");
}

/// LOOKUP is served to half, and FORGET whole.
#[test]
fn what_is_forgotten_while_it_is_told_is_looked_up_again() {
    let world = World::new();
    let node = world.lookup(b"d");
    world.at(At::Lookup, move |world| world.forget(node));
    assert_eq!(world.lookup(b"d"), node);
    world.is_held(node, "d");
}

/// The same, and the name leads to something else by then, or to nothing.
#[test]
fn what_is_looked_up_again_may_be_another() {
    let world = World::new();
    let node = world.lookup(b"d");
    world.at(At::Lookup, move |world| {
        world.forget(node);
        std::fs::rename(world.path("d"), world.path("e")).unwrap();
        std::fs::create_dir(world.path("d")).unwrap();
    });
    let other = world.lookup(b"d");
    assert!(other != node && !world.server.is_told(InodeId(node)));
    world.at(At::Lookup, move |world| {
        world.forget(other);
        std::fs::remove_dir(world.path("d")).unwrap();
    });
    assert_eq!(world.call(op::LOOKUP, ROOT, &[b"d\0"]).0, -2);
    assert!(!world.server.is_told(InodeId(other)));
}

/// By a handle that somebody kept, and by its number.
#[test]
fn what_is_forgotten_while_its_number_is_told_is_found_again() {
    for proc in [false, true] {
        let world = World::new();
        std::fs::write(world.path("f"), "").unwrap();
        let node = world.lookup(b"f");
        world.at(At::Getattr, move |world| world.forget(node));
        let found = if proc {
            let top = world.lookup(b".corbel");
            let inodes = world.entry(op::LOOKUP, top, &[b"inode\0"]);
            let mut asked = request(op::LOOKUP, inodes, &[format!("{node}\0").as_bytes()]);
            asked[24..28].fill(0);
            let mut sink = Sink::default();
            world.server.handle(&asked, &mut sink);
            let (error, body) = checked(&sink.replies[0]);
            assert_eq!(error, 0);
            EntryOut::read_from_prefix(&body).unwrap().0.nodeid.get()
        } else {
            world.entry(op::LOOKUP, node, &[b".\0"])
        };
        assert_eq!(found, node);
        world.is_held(node, "f");
    }
}

/// What lies above is told of by its number: it is found by that from then on.
#[test]
fn what_is_found_by_dots_is_found_by_its_number() {
    let world = World::new();
    std::fs::create_dir(world.path("d/e")).unwrap();
    let above = world.lookup(b"d");
    let below = world.entry(op::LOOKUP, above, &[b"e\0"]);
    world.forget(above);
    assert_eq!(world.entry(op::LOOKUP, below, &[b"..\0"]), above);
    world.is_held(above, "d");
}

/// What is made is looked up and forgotten by somebody else before it is told.
#[test]
fn what_is_forgotten_while_it_is_made_is_found_again() {
    let world = World::new();
    world.at(At::Mknod, |world| {
        let node = world.lookup(b"new");
        world.forget(node);
    });
    let mode = MkdirIn { mode: 0o755.into(), ..MkdirIn::default() };
    let node = world.entry(op::MKDIR, ROOT, &[mode.as_bytes(), b"new\0"]);
    world.is_held(node, "new");
    // And is gone by then.
    world.at(At::Mknod, |world| {
        let node = world.lookup(b"gone");
        world.forget(node);
        std::fs::remove_dir(world.path("gone")).unwrap();
    });
    let node = world.entry(op::MKDIR, ROOT, &[mode.as_bytes(), b"gone\0"]);
    assert_eq!((world.getattr(node), world.call(op::LOOKUP, ROOT, &[b"gone\0"]).0), (-116, -2));
    assert!(world.server.is_told(InodeId(node)));
}

/// A listing tells only of what is there.
#[test]
fn what_is_forgotten_while_it_is_listed_is_named_only() {
    let world = World::new();
    let node = world.lookup(b"d");
    for forgotten in [true, false] {
        if forgotten {
            world.at(At::Lookup, move |world| world.forget(node));
        }
        let read = ReadIn { size: 4096.into(), ..ReadIn::default() };
        let (error, body) = world.call(op::READDIRPLUS, ROOT, &[read.as_bytes()]);
        assert_eq!(error, 0);
        let told: Vec<_> = super::super::files::told_by(&body).collect();
        assert_eq!(told, if forgotten { vec![] } else { vec![InodeId(node)] });
        assert!(body.windows(2).any(|name| name == b"d\0"), "it has its name there");
        assert_eq!(world.server.is_told(InodeId(node)), !forgotten);
    }
    world.is_held(node, "d");
}

/// What was wrong, put back, is missed.
#[test]
fn planted_bugs_are_caught() {
    let tests: [(Bug, fn()); 2] = [
        (Bug::ForgetUnasked, what_is_told_while_it_is_forgotten_stays),
        (Bug::KeptUnasked, what_is_forgotten_while_it_is_told_is_looked_up_again),
    ];
    for (bug, test) in tests {
        choose(bug);
        let done = std::panic::catch_unwind(test);
        choose(Bug::None);
        assert!(done.is_err(), "{bug:?} is not caught");
        test();
    }
}
