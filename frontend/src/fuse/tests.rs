//! Requests as bytes, right ones and wrong ones, against the `null` back end, which counts what
//! changed.

use std::sync::{Arc, Mutex};

use base::InodeId;
use base::random::Random;
use client::fs::Invalidate;
use client::null::NullFs;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::wire::*;
use super::{Options, ReplySink, Server};

mod forgets;

/// Collects replies.
#[derive(Default)]
struct Sink {
    room: Vec<u8>,
    replies: Vec<Vec<u8>>,
    /// Somebody else has answered.
    taken: bool,
}

impl ReplySink for Sink {
    fn payload(&mut self, len: usize) -> &mut [u8] {
        self.room.resize(len, 0xee);
        &mut self.room[..len]
    }

    fn send(&mut self, head: &[u8], payload_len: usize) -> bool {
        self.replies.push([head, &self.room[..payload_len]].concat());
        !self.taken
    }
}

/// The kernel's pages: which were dropped.
#[derive(Default)]
struct Dropped(Mutex<Vec<(u64, i64, i64)>>);

impl Invalidate for Dropped {
    fn inode(&self, ino: InodeId, offset: i64, len: i64) {
        self.0.lock().unwrap().push((ino.0, offset, len));
    }

    fn entry(&self, _: InodeId, _: &[u8]) {}

    fn store(&self, _: InodeId, _: u64, _: &[u8]) {}
}

struct World {
    fs: Arc<NullFs>,
    server: Server<NullFs>,
}

const ROOT: u64 = 1;

fn request(opcode: u32, nodeid: u64, parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    let header = InHeader {
        len: u32::try_from(40 + body.len()).unwrap().into(),
        opcode: opcode.into(),
        unique: 77.into(),
        nodeid: nodeid.into(),
        uid: 1000.into(),
        gid: 1000.into(),
        ..InHeader::default()
    };
    [header.as_bytes(), &body].concat()
}

impl World {
    /// A server that has not been spoken to.
    fn fresh() -> Self {
        let fs = Arc::new(NullFs::default());
        let options = Options { groups_from_proc: false, ..Options::default() };
        Self { fs: fs.clone(), server: Server::new(fs, options) }
    }

    fn new() -> Self {
        let world = Self::fresh();
        let (error, _) =
            world.call(op::INIT, 0, &[&init_in(7, 45), InitInExt::default().as_bytes()]);
        assert_eq!(error, 0);
        world
    }

    fn raw(&self, request: &[u8]) -> Vec<Vec<u8>> {
        let mut sink = Sink::default();
        self.server.handle(request, &mut sink);
        sink.replies
    }

    /// Error and body of the reply.
    fn call(&self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> (i32, Vec<u8>) {
        let replies = self.raw(&request(opcode, nodeid, parts));
        assert_eq!(replies.len(), 1);
        checked(&replies[0])
    }

    fn out<T: FromBytes>(&self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> T {
        let (error, body) = self.call(opcode, nodeid, parts);
        assert_eq!(error, 0, "opcode {opcode}");
        T::read_from_prefix(&body).unwrap().0
    }

    /// A file with one open handle: its node and the handle.
    fn file(&self, name: &[u8]) -> (u64, u64) {
        let arg = CreateIn { flags: 2.into(), mode: 0o644.into(), ..CreateIn::default() };
        let (error, body) = self.call(op::CREATE, ROOT, &[arg.as_bytes(), name, b"\0"]);
        assert_eq!(error, 0);
        let (entry, rest) = EntryOut::read_from_prefix(&body).unwrap();
        let (open, _) = OpenOut::read_from_prefix(rest).unwrap();
        (entry.nodeid.get(), open.fh.get())
    }
}

/// Every reply has a header that tells the truth.
fn checked(reply: &[u8]) -> (i32, Vec<u8>) {
    let (header, body) = OutHeader::read_from_prefix(reply).unwrap();
    assert_eq!(header.len.get() as usize, reply.len());
    assert!((-4095..=0).contains(&header.error.get()));
    if header.error.get() != 0 {
        assert!(body.is_empty());
    }
    (header.error.get(), body.to_vec())
}

fn init_in(major: u32, minor: u32) -> Vec<u8> {
    let flags = (u32::MAX).into(); // a kernel that offers everything
    InitIn { major: major.into(), minor: minor.into(), max_readahead: 4096.into(), flags }
        .as_bytes()
        .to_vec()
}

fn bytes<T: IntoBytes + Immutable>(value: &T) -> Vec<u8> {
    value.as_bytes().to_vec()
}

fn write_in(fh: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    let arg = WriteIn {
        fh: fh.into(),
        offset: offset.into(),
        size: u32::try_from(data.len()).unwrap().into(),
        ..WriteIn::default()
    };
    [arg.as_bytes(), data].concat()
}

#[test]
fn init_agrees_on_what_both_know() {
    let world = World::fresh();
    let before = world.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]);
    assert_eq!(before.0, -5, "nothing is served before INIT");
    let newer: InitOut = world.out(op::INIT, 0, &[&init_in(8, 0)]);
    assert_eq!((newer.major.get(), world.server.is_ready()), (7, false), "asked to come again");
    assert_eq!(world.call(op::INIT, 0, &[&init_in(7, 30)]).0, -95, "too old");
    let ext = InitInExt { flags2: u32::MAX.into(), ..InitInExt::default() };
    let out: InitOut = world.out(op::INIT, 0, &[&init_in(7, 99), ext.as_bytes()]);
    assert_eq!((out.major.get(), out.minor.get()), (7, 45));
    let flags = u64::from(out.flags.get()) | u64::from(out.flags2.get()) << 32;
    assert_ne!(flags & init::AUTO_INVAL_DATA, 0, "the null back end promises nothing");
    let (posix_locks, flock_locks, writeback, dont_mask) = (1 << 1, 1 << 10, 1 << 16, 1 << 6);
    assert_eq!(flags & (posix_locks | flock_locks | writeback | dont_mask), 0);
    assert!(world.server.is_ready());
}

#[test]
fn a_file_from_create_to_forget() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    let out: WriteOut = world.out(op::WRITE, ino, &[&write_in(fh, 10, b"hello")]);
    assert_eq!(out.size.get(), 5);
    let attr: AttrOut = world.out(op::GETATTR, ino, &[GetattrIn::default().as_bytes()]);
    assert_eq!((attr.attr.size.get(), attr.attr.mode.get()), (15, 0o100_644));
    assert_eq!(attr.attr.uid.get(), 1000, "made for the caller");
    let read = ReadIn { fh: fh.into(), size: 100.into(), ..ReadIn::default() };
    assert_eq!(world.call(op::READ, ino, &[read.as_bytes()]).1.len(), 15);
    let statx: StatxOut = world.out(op::STATX, ino, &[StatxIn::default().as_bytes()]);
    assert_eq!((statx.size.get(), statx.mask.get()), (15, STATX_MASK));
    let entry: EntryOut = world.out(op::LOOKUP, ROOT, &[b"f\0"]);
    assert_eq!((entry.nodeid.get(), entry.entry_valid.get(), entry.attr_valid.get()), (ino, 0, 0));
    assert_eq!(world.call(op::LOOKUP, ROOT, &[b"g\0"]).0, -2);
    // Another inode's number does not open this handle, nor does a made-up one.
    assert_eq!(world.call(op::READ, ROOT, &[read.as_bytes()]).0, -9);
    let stranger = ReadIn { fh: (fh + 1).into(), ..read };
    assert_eq!(world.call(op::READ, ino, &[stranger.as_bytes()]).0, -9);
    let release = ReleaseIn { fh: fh.into(), ..ReleaseIn::default() };
    assert_eq!(world.call(op::RELEASE, ino, &[release.as_bytes()]).0, 0);
    assert_eq!(world.call(op::READ, ino, &[read.as_bytes()]).0, -9);
    let forget = ForgetIn { nlookup: 2.into() };
    assert!(world.raw(&request(op::FORGET, ino, &[forget.as_bytes()])).is_empty());
}

#[test]
fn append_ignores_the_offset_but_not_for_mapped_pages() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    let size = || -> u64 {
        let attr: AttrOut = world.out(op::GETATTR, ino, &[GetattrIn::default().as_bytes()]);
        attr.attr.size.get()
    };
    let write = |flags: u32, write_flags: u32| {
        let arg = WriteIn {
            fh: fh.into(),
            size: 4.into(),
            flags: flags.into(),
            write_flags: write_flags.into(),
            ..WriteIn::default()
        };
        let _: WriteOut = world.out(op::WRITE, ino, &[arg.as_bytes(), b"data"]);
    };
    write(0, 0);
    write(client::fs::O_APPEND, 0);
    assert_eq!(size(), 8);
    write(client::fs::O_APPEND, WRITE_CACHE);
    assert_eq!(size(), 8, "a page of a shared mapping goes where it was mapped from");
}

#[test]
fn a_guest_reads_directly_without_asking_for_attributes() {
    let guest = super::server::Guest { nodes_max: 100, handles_max: 100 };
    let past = |guest: Option<super::server::Guest>, minor: u32, flags: u32| {
        let fs = Arc::new(NullFs::default());
        let options = Options { groups_from_proc: false, guest, ..Options::default() };
        let world = World { fs: fs.clone(), server: Server::new(fs, options) };
        let more = InitInExt { flags2: u32::MAX.into(), ..InitInExt::default() };
        let _: InitOut = world.out(op::INIT, 0, &[&init_in(7, minor), more.as_bytes()]);
        let (ino, _) = world.file(b"f");
        let arg = OpenIn { flags: flags.into(), ..OpenIn::default() };
        let opened: OpenOut = world.out(op::OPEN, ino, &[arg.as_bytes()]);
        opened.open_flags.get() & FOPEN_DIRECT_IO != 0
    };
    let direct = super::server::O_DIRECT;
    assert!(past(Some(guest), 45, direct));
    assert!(!past(Some(guest), 45, 0) && !past(Some(guest), 45, direct | 2), "pages, writes");
    assert!(!past(Some(guest), 39, direct), "a kernel that would not map it");
    assert!(!past(None, 45, direct), "a kernel of a mount");
}

#[test]
fn direct_writes_are_parallel_where_pages_can_be_dropped() {
    let opened = |world: &World, name: &[u8], flags: u32| -> (u64, OpenOut) {
        let (ino, _) = world.file(name);
        let arg = OpenIn { flags: flags.into(), ..OpenIn::default() };
        (ino, world.out(op::OPEN, ino, &[arg.as_bytes()]))
    };
    let direct = 2 | super::server::O_DIRECT;
    let parallel = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES;
    let of_minor = |minor: u32| {
        let world = World::fresh();
        let more = InitInExt { flags2: u32::MAX.into(), ..InitInExt::default() };
        let _: InitOut = world.out(op::INIT, 0, &[&init_in(7, minor), more.as_bytes()]);
        world
    };
    let world = of_minor(45);
    assert_eq!(
        opened(&world, b"early", direct).1.open_flags.get() & parallel,
        0,
        "nobody drops pages"
    );
    let old = of_minor(39);
    old.server.reaches(Arc::default() as Arc<Dropped>);
    assert_eq!(opened(&old, b"f", direct).1.open_flags.get() & parallel, 0);

    let dropped: Arc<Dropped> = Arc::default();
    world.server.reaches(dropped.clone());
    let (plain, through) = opened(&world, b"f", 2);
    assert_eq!(through.open_flags.get() & parallel, 0);
    let (ino, past) = opened(&world, b"g", direct);
    assert_eq!(past.open_flags.get() & parallel, parallel);
    let write = |ino: u64, fh: u64, write_flags: u32, data: &[u8]| {
        let size = u32::try_from(data.len()).unwrap();
        let arg = WriteIn {
            fh: fh.into(),
            offset: 4096.into(),
            size: size.into(),
            write_flags: write_flags.into(),
            ..WriteIn::default()
        };
        let _: WriteOut = world.out(op::WRITE, ino, &[arg.as_bytes(), data]);
    };
    write(plain, through.fh.get(), 0, b"data");
    write(ino, past.fh.get(), WRITE_CACHE, b"data");
    write(ino, past.fh.get(), 0, b"");
    assert!(dropped.0.lock().unwrap().is_empty(), "the cache is right, or nothing was written");
    // Its own flags may have changed since; the kernel goes by those of the open.
    write(ino, past.fh.get(), 0, b"data");
    assert_eq!(*dropped.0.lock().unwrap(), [(ino, 4096, 4)]);
}

#[test]
fn set_id_bits_go_when_the_kernel_says_so() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    let chmod =
        SetattrIn { valid: fattr::MODE.into(), mode: 0o6755.into(), ..SetattrIn::default() };
    let _: AttrOut = world.out(op::SETATTR, ino, &[chmod.as_bytes()]);
    let mut arg = WriteIn { fh: fh.into(), size: 1.into(), ..WriteIn::default() };
    let mode = || -> u32 {
        let attr: AttrOut = world.out(op::GETATTR, ino, &[GetattrIn::default().as_bytes()]);
        attr.attr.mode.get() & 0o7777
    };
    let _: WriteOut = world.out(op::WRITE, ino, &[arg.as_bytes(), b"x"]);
    assert_eq!(mode(), 0o6755);
    arg.write_flags = WRITE_KILL_SUIDGID.into();
    let _: WriteOut = world.out(op::WRITE, ino, &[arg.as_bytes(), b"x"]);
    assert_eq!(mode(), 0o755);
}

#[test]
fn listings_fit_continue_and_hide() {
    let world = World::new();
    for i in 0..100 {
        world.file(format!("name-{i}").as_bytes());
    }
    for (opcode, entry_head) in [(op::READDIR, 0), (op::READDIRPLUS, size_of::<EntryOut>())] {
        let (mut cookie, mut names) = (0u64, Vec::new());
        loop {
            let arg = ReadIn { offset: cookie.into(), size: 1000.into(), ..ReadIn::default() };
            let (error, body) = world.call(opcode, ROOT, &[arg.as_bytes()]);
            assert_eq!(error, 0);
            assert!(body.len() <= 1000);
            if body.is_empty() {
                break;
            }
            let mut rest = &body[..];
            while !rest.is_empty() {
                let (dirent, _) = Dirent::read_from_prefix(&rest[entry_head..]).unwrap();
                let len = dirent.namelen.get() as usize;
                names.push(rest[entry_head + 24..entry_head + 24 + len].to_vec());
                cookie = dirent.off.get();
                rest = &rest[(entry_head + 24 + len).next_multiple_of(8)..];
            }
        }
        assert_eq!(names.len(), 102, "dots and all names once");
        assert!(!names.contains(&b".corbel".to_vec()));
    }
}

#[test]
fn a_nameless_file_gets_a_name_or_goes() {
    let world = World::new();
    let make = || {
        let arg = CreateIn { flags: 2.into(), mode: 0o640.into(), ..CreateIn::default() };
        let (error, body) = world.call(op::TMPFILE, ROOT, &[arg.as_bytes(), b"/\0"]);
        assert_eq!(error, 0);
        let (entry, rest) = EntryOut::read_from_prefix(&body).unwrap();
        let (open, _) = OpenOut::read_from_prefix(rest).unwrap();
        assert_eq!((entry.attr.nlink.get(), entry.attr.mode.get()), (0, 0o100_640));
        (entry.nodeid.get(), open.fh.get())
    };
    let release = |ino: u64, fh: u64| {
        let release = ReleaseIn { fh: fh.into(), ..ReleaseIn::default() };
        assert_eq!(world.call(op::RELEASE, ino, &[release.as_bytes()]).0, 0);
    };
    let (ino, fh) = make();
    let _: WriteOut = world.out(op::WRITE, ino, &[&write_in(fh, 0, b"hello")]);
    let entry: EntryOut = world.out(op::LINK, ROOT, &[&ino.to_le_bytes(), b"named\0"]);
    assert_eq!((entry.nodeid.get(), entry.attr.nlink.get()), (ino, 1));
    release(ino, fh);
    let found: EntryOut = world.out(op::LOOKUP, ROOT, &[b"named\0"]);
    assert_eq!((found.nodeid.get(), found.attr.size.get()), (ino, 5));
    let (ino, fh) = make();
    release(ino, fh);
    assert_eq!(world.call(op::GETATTR, ino, &[&[0; 16]]).0, -116, "gone with its last handle");
}

#[test]
fn handles_left_open_are_closed_by_destroy() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    assert_eq!(world.call(op::UNLINK, ROOT, &[b"f\0"]).0, 0);
    assert_eq!(world.call(op::GETATTR, ino, &[GetattrIn::default().as_bytes()]).0, 0);
    assert_eq!(world.call(op::DESTROY, 0, &[]).0, 0);
    let (error, _) = world.call(op::INIT, 0, &[&init_in(7, 45), InitInExt::default().as_bytes()]);
    assert_eq!(error, 0);
    assert_eq!(world.call(op::GETATTR, ino, &[GetattrIn::default().as_bytes()]).0, -116);
    let read = ReadIn { fh: fh.into(), size: 1.into(), ..ReadIn::default() };
    assert_eq!(world.call(op::READ, ino, &[read.as_bytes()]).0, -9);
}

#[test]
fn wrong_arguments_are_named_and_change_nothing() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    let before = world.fs.changes();
    let long = [b"x".repeat(256), vec![0]].concat();
    let mkdir = bytes(&MkdirIn { mode: 0o755.into(), ..MkdirIn::default() });
    let time = SetattrIn {
        valid: fattr::MTIME.into(),
        mtimensec: 1_000_000_000.into(),
        ..SetattrIn::default()
    };
    let unknown = SetattrIn { valid: (1 << 20).into(), ..SetattrIn::default() };
    let huge =
        SetattrIn { valid: fattr::SIZE.into(), size: u64::MAX.into(), ..SetattrIn::default() };
    let rename = Rename2In { newdir: ROOT.into(), flags: 4.into(), ..Rename2In::default() };
    let allocate = FallocateIn {
        fh: fh.into(),
        offset: 1.into(),
        length: u64::MAX.into(),
        ..FallocateIn::default()
    };
    let xattr = SetxattrIn { size: 5.into(), flags: 0.into() };
    let copy = |fh_out: u64, off_out: u64, flags: u64| {
        let len = 1 << 20;
        let words = [fh, 0, ino, fh_out, off_out, len, flags];
        words.map(u64::to_le_bytes).concat()
    };
    let cases: &[(u32, u64, &[&[u8]], i32)] = &[
        (op::MKDIR, ROOT, &[&mkdir, &long], -36),
        (op::MKDIR, ROOT, &[&mkdir, b"a/b\0"], -22),
        (op::MKDIR, ROOT, &[&mkdir, b"..\0"], -22),
        (op::MKDIR, ROOT, &[&mkdir, b"\0"], -22),
        (op::MKDIR, ROOT, &[&mkdir, b"no end"], -22),
        (op::MKDIR, ROOT, &[&mkdir, b"x\0more"], -22),
        (op::MKDIR, ROOT, &[&mkdir, b".corbel\0"], -17),
        (op::SYMLINK, ROOT, &[b"s\0\0"], -2),
        (op::WRITE, ino, &[&write_in(fh, u64::MAX, b"x")], -22),
        (op::WRITE, ino, &[&write_in(fh, 1 << 62, b"x")[..40]], -22),
        (op::SETATTR, ino, &[time.as_bytes()], -22),
        (op::SETATTR, ino, &[unknown.as_bytes()], -22),
        (op::SETATTR, ino, &[huge.as_bytes()], -22),
        (op::RENAME2, ROOT, &[rename.as_bytes(), b"f\0g\0"], -22),
        (op::RENAME, ROOT, &[&ROOT.to_le_bytes(), b"f\0.corbel\0"], -1),
        (op::FALLOCATE, ino, &[allocate.as_bytes()], -27),
        (op::SETXATTR, ino, &[xattr.as_bytes(), b"user.a\0val"], -22),
        (op::SETXATTR, ino, &[xattr.as_bytes(), b"system.posix_acl_access\0value"], -95),
        (op::UNLINK, ROOT, &[b".corbel\0"], -1),
        (op::LINK, ROOT, &[&(1u64 << 63 | 3).to_le_bytes(), b"l\0"], -1),
        (op::TMPFILE, ROOT, &[], -22),
        (op::TMPFILE, ROOT, &[&[0; 16], b"no end"], -22),
        (op::TMPFILE, ino, &[&[0; 16], b"/\0"], -20),
        (op::TMPFILE, 1 << 63 | 1, &[&[0; 16], b"/\0"], -1),
        (op::FLUSH, ino, &[], -38),
        (op::COPY_FILE_RANGE, ino, &[&copy(fh + 1, 0, 0)], -9),
        (op::COPY_FILE_RANGE, ino, &[&copy(fh, 0, 1)], -22),
        (op::COPY_FILE_RANGE, ino, &[&copy(fh, u64::MAX, 0)], -22),
        (op::COPY_FILE_RANGE, ino, &[&copy(fh, i64::MAX as u64, 0)], -27),
        (op::COPY_FILE_RANGE, ino, &[&copy(fh, 0, 0)[..48]], -22),
        (op::COPY_FILE_RANGE, ROOT, &[&copy(fh, 0, 0)], -9),
        (1000, ROOT, &[], -38),
        (0, ROOT, &[], -38),
        (u32::MAX, ROOT, &[], -38),
    ];
    for (i, (opcode, nodeid, parts, error)) in cases.iter().enumerate() {
        assert_eq!(world.call(*opcode, *nodeid, parts).0, *error, "case {i}, opcode {opcode}");
    }
    assert_eq!(world.fs.changes(), before);
}

/// What the file system does not copy is copied here, and not by the kernel from its pages.
#[test]
fn ranges_are_copied() {
    let world = World::new();
    let ((from, from_fh), (to, to_fh)) = (world.file(b"from"), world.file(b"to"));
    let write = WriteIn { fh: from_fh.into(), size: 7.into(), ..WriteIn::default() };
    let _: WriteOut = world.out(op::WRITE, from, &[write.as_bytes(), b"copy me"]);
    let copy = |len: u64| {
        let words = [from_fh, 2, to, to_fh, 1, len, 0].map(u64::to_le_bytes).concat();
        let out: WriteOut = world.out(op::COPY_FILE_RANGE, from, &[&words]);
        out.size.get()
    };
    assert_eq!((copy(3), copy(1 << 40), copy(0)), (3, 5, 0));
    let read = ReadIn { fh: to_fh.into(), size: 64.into(), ..ReadIn::default() };
    assert_eq!(world.call(op::READ, to, &[read.as_bytes()]).1.len(), 6);
}

/// One right request of every operation that takes arguments.
fn samples(ino: u64, fh: u64) -> Vec<Vec<u8>> {
    let fh_in = |size: usize| [fh.to_le_bytes().to_vec(), vec![0; size - 8]].concat();
    let setattr = SetattrIn { valid: fattr::SIZE.into(), size: 5.into(), ..SetattrIn::default() };
    let read = ReadIn { fh: fh.into(), size: 64.into(), ..ReadIn::default() };
    let allocate = FallocateIn { fh: fh.into(), length: 9.into(), ..FallocateIn::default() };
    let seek = LseekIn { fh: fh.into(), whence: 4.into(), ..LseekIn::default() };
    let xattr = SetxattrIn { size: 3.into(), flags: 0.into() };
    let forget = [
        BatchForgetIn { count: 1.into(), ..BatchForgetIn::default() }.as_bytes(),
        ForgetOne::default().as_bytes(),
    ]
    .concat();
    let root = ROOT.to_le_bytes();
    vec![
        request(op::LOOKUP, ROOT, &[b"f\0"]),
        request(op::FORGET, ino, &[&[0; 8]]),
        request(op::BATCH_FORGET, 0, &[&forget]),
        request(op::GETATTR, ino, &[&[0; 16]]),
        request(op::SETATTR, ino, &[setattr.as_bytes()]),
        request(op::SYMLINK, ROOT, &[b"sym\0target\0"]),
        request(op::MKNOD, ROOT, &[&[0; 16], b"node\0"]),
        request(op::MKDIR, ROOT, &[&[0; 8], b"dir\0"]),
        request(op::RENAME, ROOT, &[&root, b"node\0moved\0"]),
        request(op::RENAME2, ROOT, &[&root, &[0; 8], b"moved\0node\0"]),
        request(op::LINK, ROOT, &[&ino.to_le_bytes(), b"hard\0"]),
        request(op::UNLINK, ROOT, &[b"hard\0"]),
        request(op::RMDIR, ROOT, &[b"dir\0"]),
        request(op::OPEN, ino, &[&[0; 8]]),
        request(op::CREATE, ROOT, &[&[0; 16], b"made\0"]),
        request(op::TMPFILE, ROOT, &[&[0; 16], b"/\0"]),
        request(op::READ, ino, &[read.as_bytes()]),
        request(op::WRITE, ino, &[&write_in(fh, 3, b"bytes")]),
        request(op::FSYNC, ino, &[&fh_in(16)]),
        request(op::SETXATTR, ino, &[xattr.as_bytes(), b"user.x\0val"]),
        request(op::GETXATTR, ino, &[&[0; 8], b"user.x\0"]),
        request(op::LISTXATTR, ino, &[&[0; 8]]),
        request(op::REMOVEXATTR, ino, &[b"user.x\0"]),
        request(op::READDIR, ROOT, &[read.as_bytes()]),
        request(op::READDIRPLUS, ROOT, &[read.as_bytes()]),
        request(op::FALLOCATE, ino, &[allocate.as_bytes()]),
        request(op::LSEEK, ino, &[seek.as_bytes()]),
        request(op::STATX, ino, &[&[0; 24]]),
        request(op::FSYNCDIR, ROOT, &[&[0; 16]]),
    ]
}

fn silent(opcode: u32) -> bool {
    matches!(opcode, op::FORGET | op::BATCH_FORGET)
}

fn opcode_of(request: &[u8]) -> u32 {
    InHeader::read_from_prefix(request).map_or(0, |(header, _)| header.opcode.get())
}

#[test]
fn samples_are_right() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    for sample in samples(ino, fh) {
        let replies = world.raw(&sample);
        assert_eq!(replies.len(), usize::from(!silent(opcode_of(&sample))));
        assert!(replies.iter().all(|r| checked(r).0 == 0), "opcode {}", opcode_of(&sample));
    }
}

/// Cut anywhere, with the length in the header old or new: an error, and nothing is done.
#[test]
fn truncated_requests_change_nothing() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    for sample in samples(ino, fh) {
        for len in 0..sample.len() {
            for fix_header in [false, true] {
                let mut cut = sample[..len].to_vec();
                if fix_header && len >= 40 {
                    cut[..4].copy_from_slice(&u32::try_from(len).unwrap().to_le_bytes());
                }
                let before = world.fs.changes();
                let replies = world.raw(&cut);
                let opcode = opcode_of(&sample);
                assert_eq!(world.fs.changes(), before, "opcode {opcode} cut to {len}");
                assert_eq!(replies.len(), usize::from(len >= 40 && !silent(opcode)));
                for reply in &replies {
                    assert!(matches!(checked(reply).0, -22 | -5), "opcode {opcode} cut to {len}");
                }
            }
        }
    }
}

/// Any bit flipped, and random bytes: at most one reply, well formed; never a panic.
#[test]
fn flipped_bits_get_one_reply() {
    for seed in 0..8 {
        let world = World::new();
        let (ino, fh) = world.file(b"f");
        let mut random = Random::new(seed);
        for sample in samples(ino, fh) {
            for bit in 0..sample.len() * 8 {
                let mut flipped = sample.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                if random.chance(1, 4) {
                    let at = random.below(flipped.len() as u64) as usize;
                    flipped[at] = random.next_u64() as u8;
                }
                one_reply(&world, &flipped);
            }
        }
    }
}

fn one_reply(world: &World, request: &[u8]) {
    let replies = world.raw(request);
    assert!(replies.len() <= 1);
    for reply in &replies {
        checked(reply);
    }
    if !world.server.is_ready() {
        // A flip made it DESTROY; go on with a live connection.
        world.call(op::INIT, 0, &[&init_in(7, 45), InitInExt::default().as_bytes()]);
    }
}

#[test]
fn random_bytes_get_one_reply() {
    let world = World::new();
    let mut random = Random::new(99);
    for _ in 0..20_000 {
        let len = random.below(200) as usize;
        let mut bytes = vec![0; len];
        random.fill(&mut bytes);
        if len >= 40 && random.chance(9, 10) {
            // Past the frame check, into the handlers.
            bytes[..4].copy_from_slice(&u32::try_from(len).unwrap().to_le_bytes());
            bytes[4..8].copy_from_slice(&(random.below(60) as u32).to_le_bytes());
            bytes[36..40].fill(0);
            if random.chance(1, 2) {
                bytes[16..24].copy_from_slice(&random.below(8).to_le_bytes());
            }
        }
        one_reply(&world, &bytes);
    }
}

#[test]
fn virtual_nodes_take_no_orders() {
    let world = World::new();
    let (ino, fh) = world.file(b"f");
    let before = world.fs.changes();
    for node in 0..8u64 {
        for sample in samples(ino, fh) {
            let mut there = sample;
            there[16..24].copy_from_slice(&(1 << 63 | node).to_le_bytes());
            one_reply(&world, &there);
        }
    }
    assert_eq!(world.fs.changes(), before);
}

/// A reply that comes too late, since its process was let go, gives nothing out.
#[test]
fn what_nobody_got_is_given_back() {
    let world = World::new();
    let (ino, _) = world.file(b"f");
    for (opcode, node, name, opened_at) in
        [(op::OPEN, ino, &b""[..], 0), (op::CREATE, ROOT, b"g\0", size_of::<EntryOut>())]
    {
        let arg = CreateIn { flags: 2.into(), mode: 0o644.into(), ..CreateIn::default() };
        let arg = if opcode == op::OPEN { &arg.as_bytes()[..8] } else { arg.as_bytes() };
        let mut sink = Sink { taken: true, ..Sink::default() };
        world.server.handle(&request(opcode, node, &[arg, name]), &mut sink);
        let (error, body) = checked(&sink.replies[0]);
        assert_eq!(error, 0);
        let opened = OpenOut::read_from_prefix(&body[opened_at..]).unwrap().0;
        let node = if opened_at > 0 {
            EntryOut::read_from_prefix(&body).unwrap().0.nodeid.get()
        } else {
            ino
        };
        let read = ReadIn { fh: opened.fh, size: 1.into(), ..ReadIn::default() };
        assert_eq!(world.call(op::READ, node, &[read.as_bytes()]).0, -9, "opcode {opcode}");
    }
}

/// Else whoever takes the kernel's attributes of it away would wait for the kernel to know it.
#[test]
fn a_listing_that_nobody_got_tells_of_nothing() {
    let world = World::new();
    let (ino, _) = world.file(b"f");
    let forget = ForgetIn { nlookup: 1.into() };
    assert!(world.raw(&request(op::FORGET, ino, &[forget.as_bytes()])).is_empty());
    assert!(!world.server.is_told(InodeId(ino)));
    for taken in [true, false] {
        let read = ReadIn { size: 4096.into(), ..ReadIn::default() };
        let mut sink = Sink { taken, ..Sink::default() };
        world.server.handle(&request(op::READDIRPLUS, ROOT, &[read.as_bytes()]), &mut sink);
        assert_eq!(checked(&sink.replies[0]).0, 0);
        assert_eq!(world.server.is_told(InodeId(ino)), !taken);
    }
}

/// A back end without snapshots: the directory is there, holds nothing, and nothing is made in it.
#[test]
fn where_there_are_no_snapshots_their_directory_is_empty() {
    let world = World::new();
    let top: EntryOut = world.out(op::LOOKUP, ROOT, &[b".corbel\0"]);
    let all: EntryOut = world.out(op::LOOKUP, top.nodeid.get(), &[b"snapshots\0"]);
    let node = all.nodeid.get();
    assert_eq!((all.attr.mode.get(), all.entry_valid.get()), (0o040_555, 0));
    assert_eq!(world.call(op::LOOKUP, node, &[b"daily\0"]).0, -2);
    assert_eq!(world.call(op::MKDIR, node, &[&[0; 8], b"daily\0"]).0, -1);
    assert_eq!(world.call(op::RMDIR, node, &[b"daily\0"]).0, -1);
    for (offset, names) in [(0u64, &[&b"."[..], b".."][..]), (1, &[b".."]), (2, &[]), (9, &[])] {
        let arg = ReadIn { offset: offset.into(), size: 4096.into(), ..ReadIn::default() };
        let (error, body) = world.call(op::READDIR, node, &[arg.as_bytes()]);
        assert_eq!(error, 0);
        let (mut rest, mut found) = (&body[..], Vec::new());
        while !rest.is_empty() {
            let (dirent, name) = Dirent::read_from_prefix(rest).unwrap();
            let len = dirent.namelen.get() as usize;
            found.push(&name[..len]);
            rest = &rest[(size_of::<Dirent>() + len).next_multiple_of(8)..];
        }
        assert_eq!(found, names, "from {offset}");
    }
}
