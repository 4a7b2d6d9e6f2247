//! The real client, hostd and nicfs on one machine, in processes of their own so that each can be
//! killed. The services are this test binary again, told by the environment what to be.

#![allow(unsafe_code)]

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base::{Errno, InodeId, NodeId};
use client::fs::{Caller, FileSystem, NewNode, O_RDWR, S_IFDIR};
use client::libfs::{Config, LibFs};
use service::nicfs::FormatParams;
use service::{HostdConfig, Membership, NicfsConfig, PeerTransport};
use storage::format::superblock::Durability;

#[path = "one_node/shared.rs"]
mod shared;
#[path = "one_node/threads.rs"]
mod threads;

const ROLE: &str = "CORBEL_TEST_ROLE";
const DIR: &str = "CORBEL_TEST_DIR";

fn config(dir: &Path) -> NicfsConfig {
    NicfsConfig {
        node: NodeId(1),
        cluster: "test".into(),
        membership: Membership::Standalone,
        listen: "127.0.0.1:0".parse().expect("an address"),
        transport: PeerTransport::Tcp,
        keys: None,
        region: dir.join("region"),
        durability: Durability::Replicated,
        socket: dir.join("sock"),
        admin: dir.join("status"),
        lanes: 2,
        lane_bytes: 5 << 20,
        clients_max: 16,
        clients_per_user: 16,
        per_user: service::core::PerUser::SHIPPED,
        scheduler: Default::default(),
        weights: Default::default(),
        memory: 64 << 20,
        high: 70,
        low: 30,
        scrub_every: 0,
        scrub_rate: 64 << 20,
        join_rate: 0,
        pipeline: service::config::Pipeline::Pipelined,
        inline_bytes: 128 << 10,
        host_copies: true,
        ranges: true,
        hold: 2_000_000,
        compression: service::packing::Compression::Auto,
        fabric_delay: 0,
    }
}

/// What the other processes run; nothing when the tests are run.
#[test]
fn service_process() {
    let (Ok(role), Ok(dir)) = (std::env::var(ROLE), std::env::var(DIR)) else { return };
    let _ = env_logger::builder().try_init();
    let config = config(Path::new(&dir));
    if role == "writer" {
        return writer(Path::new(&dir));
    }
    let ended = if role == "nicfs" {
        service::nicfs::run(config)
    } else {
        let (region, durability) = (config.region, config.durability);
        service::hostd::run(HostdConfig {
            region,
            durability,
            socket: config.socket,
            connections_per_user: 8,
        })
    };
    ended.expect("a service ends in order or by force");
}

/// Attaches, makes a file, says so, and goes on writing, without fsync, until it is killed.
fn writer(dir: &Path) {
    let fs = attach(dir);
    let (_, file) = fs.create(&me(), InodeId::ROOT, b"writer", 0o644, O_RDWR).expect("create");
    for n in 0..u64::MAX {
        fs.write(file, n % 1000 * 8, &n.to_le_bytes(), false).expect("write");
        if n % 10 == 0 {
            std::fs::write(dir.join("written"), n.to_string()).expect("a file");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn attach(dir: &Path) -> LibFs {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let attached = LibFs::attach(Config::new(dir.join("sock").as_os_str().as_encoded_bytes()));
        match attached {
            Ok(fs) => return fs,
            Err(e) => assert!(Instant::now() < end, "cannot attach: {e}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A process that does not outlive the test.
struct Service(Child);

impl Service {
    fn start(role: &str, dir: &Path) -> Self {
        let program = std::env::current_exe().expect("the test has a name");
        let child = Command::new(program)
            .args(["--exact", "service_process", "--nocapture"])
            .env(ROLE, role)
            .env(DIR, dir)
            .stdout(Stdio::null())
            .spawn();
        Self(child.expect("a process"))
    }

    /// SIGKILL, at whatever it is doing.
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.kill();
    }
}

struct World {
    nicfs: Service,
    hostd: Service,
    dir: PathBuf,
}

impl World {
    fn new(name: &str) -> Self {
        let shm = PathBuf::from("/dev/shm");
        let base = if shm.is_dir() { shm } else { std::env::temp_dir() };
        let dir = base.join(format!("corbel-test-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a directory");
        format(&dir);
        let (nicfs, hostd) = (Service::start("nicfs", &dir), Service::start("hostd", &dir));
        Self { nicfs, hostd, dir }
    }

    /// The operator ends the node, takes its region away, and begins it anew.
    fn begin_anew(&mut self, take_away: impl Fn(&Path)) {
        self.hostd.kill();
        self.nicfs.kill();
        take_away(&self.dir.join("region"));
        format(&self.dir);
        self.nicfs = Service::start("nicfs", &self.dir);
        self.hostd = Service::start("hostd", &self.dir);
    }

    fn attach(&self) -> LibFs {
        attach(&self.dir)
    }

    /// What nicfs says of itself.
    fn status(&self) -> String {
        let mut text = String::new();
        let stream = std::os::unix::net::UnixStream::connect(self.dir.join("status"));
        stream.expect("nicfs answers").read_to_string(&mut text).expect("nicfs answers");
        text
    }

    /// Clients that nicfs knows.
    fn clients(&self) -> usize {
        self.status().matches("\"pid\"").count()
    }

    /// Before an abort, which ends nothing else.
    fn end_by_force(&self) {
        for service in [&self.nicfs, &self.hostd] {
            if let Some(pid) = rustix::process::Pid::from_raw(service.0.id() as i32) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }

    /// Ends both services and looks for damage.
    fn check(mut self) {
        self.hostd.kill();
        self.nicfs.kill();
        let region = storage::region::FileRegion::open(
            &self.dir.join("region"),
            config(&self.dir).durability,
        );
        let report =
            storage::check::check(&region.expect("the region is there")).expect("readable");
        assert!(report.is_sound(), "{:?}", report.findings);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.nicfs.kill();
        self.hostd.kill();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// An empty volume.
fn format(dir: &Path) {
    let params = FormatParams {
        uuid: *b"0123456789abcdef",
        time: 1_000_000_007,
        name: "test".into(),
        capacity: 64 << 20,
        stream: 20 << 20,
        uid: 0,
        gid: 0,
        mode: 0o777,
        sparse: true,
    };
    service::nicfs::format(&config(dir), &params).expect("a region");
}

/// Whoever runs the test.
fn me() -> Caller<'static> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Caller { uid, gid, groups: &[], pid: 1, umask: 0 }
}

fn content(seed: u32, len: u32) -> Vec<u8> {
    (0..len).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[test]
fn two_clients_see_one_file_system() {
    let (world, me) = (World::new("two"), me());
    let (fs, other) = (world.attach(), world.attach());
    let node = NewNode { mode: S_IFDIR | 0o755, rdev: 0, target: &[] };
    let sub = fs.mknod(&me, InodeId::ROOT, b"sub", &node).expect("mkdir");
    let (attr, file) = fs.create(&me, sub.ino, b"file", 0o644, O_RDWR).expect("create");
    let data = content(1, 1_000_000);
    assert_eq!(fs.write(file, 0, &data, false).expect("write").len, data.len());
    fs.fsync(file, false).expect("fsync");
    let mut back = vec![0; data.len()];
    assert_eq!(fs.read(file, 0, &mut back), Ok(data.len()));
    assert!(back == data, "own log");
    let seen = other.lookup(&me, sub.ino, b"file").expect("lookup");
    assert_eq!((seen.ino, seen.size), (attr.ino, data.len() as u64));
    let open = other.open(&me, seen.ino, O_RDWR).expect("open");
    back.fill(0);
    assert_eq!(other.read(open, 0, &mut back), Ok(data.len()));
    assert!(back == data, "public copy");
    other.write(open, 10, b"hello", false).expect("write");
    let mut five = [0; 5];
    assert_eq!(fs.read(file, 10, &mut five), Ok(5));
    assert_eq!(&five, b"hello", "coherent");
    fs.unlink(&me, sub.ino, b"file").expect("unlink");
    assert_eq!(other.lookup(&me, sub.ino, b"file").map(|_| ()), Err(Errno::NOENT));
    assert_eq!(other.read(open, 10, &mut five), Ok(5), "an unlinked file lives while it is open");
    other.release(open);
    fs.release(file);
    for i in 0..100 {
        let name = format!("f{i}");
        let (_, file) = fs.create(&me, sub.ino, name.as_bytes(), 0o644, O_RDWR).expect("create");
        fs.write(file, 0, &data[..4096], false).expect("write");
        fs.fsync(file, false).expect("fsync");
        fs.release(file);
        fs.unlink(&me, sub.ino, name.as_bytes()).expect("unlink");
    }
    fs.rmdir(&me, sub.ino, b"x").expect_err("there is no x");
    world.check();
}

/// hostd dies while a client works: nothing stops, and a new one learns whom to watch.
#[test]
fn a_client_does_not_notice_that_hostd_was_killed() {
    let (mut world, me) = (World::new("hostd"), me());
    let fs = world.attach();
    let (attr, file) = fs.create(&me, InodeId::ROOT, b"file", 0o644, O_RDWR).expect("create");
    let data = content(2, 300_000);
    for round in 0..6u64 {
        if round % 2 == 1 {
            world.hostd.kill();
        }
        let at = round * data.len() as u64;
        assert_eq!(fs.write(file, at, &data, false).expect("write").len, data.len());
        fs.fsync(file, false).expect("fsync without hostd");
        if round % 2 == 1 {
            world.hostd = Service::start("hostd", &world.dir);
            // It takes new clients, and they see what was written meanwhile.
            let other = world.attach();
            let open = other.open(&me, attr.ino, O_RDWR).expect("open");
            let mut back = vec![0; data.len()];
            assert_eq!(other.read(open, at, &mut back), Ok(data.len()));
            assert!(back == data, "round {round}");
            other.release(open);
        }
    }
    fs.release(file);
    world.check();
}

/// nicfs dies: what was fsynced is there, and the client goes on by itself.
#[test]
fn what_was_fsynced_survives_the_kill_of_nicfs() {
    let (mut world, me) = (World::new("nicfs"), me());
    let fs = world.attach();
    let data = content(3, 200_000);
    for round in 0..3u32 {
        let name = format!("file{round}");
        let (_, file) =
            fs.create(&me, InodeId::ROOT, name.as_bytes(), 0o644, O_RDWR).expect("create");
        fs.write(file, 0, &data, false).expect("write");
        fs.fsync(file, false).expect("fsync");
        fs.release(file);
        world.nicfs.kill();
        world.nicfs = Service::start("nicfs", &world.dir);
        for old in 0..=round {
            let name = format!("file{old}");
            let seen = fs.lookup(&me, InodeId::ROOT, name.as_bytes()).expect("an fsynced file");
            let open = fs.open(&me, seen.ino, O_RDWR).expect("open");
            let mut back = vec![0; data.len()];
            assert_eq!(fs.read(open, 0, &mut back), Ok(data.len()));
            assert!(back == data, "round {round}");
            fs.release(open);
        }
    }
    world.check();
}

/// Nobody fsyncs. Whoever dies, at whatever it is doing: what was written is there, in the same
/// session, with the same open files.
#[test]
fn what_was_written_survives_every_restart() {
    let (mut world, me) = (World::new("written"), me());
    let fs = world.attach();
    let (attr, file) = fs.create(&me, InodeId::ROOT, b"file", 0o644, O_RDWR).expect("create");
    let (_, nameless) = fs.create(&me, InodeId::ROOT, b"temp", 0o600, O_RDWR).expect("create");
    fs.write(nameless, 0, b"nameless", false).expect("write");
    fs.unlink(&me, InodeId::ROOT, b"temp").expect("unlink");
    let data = content(4, 50_000);
    for round in 0..6u64 {
        fs.write(file, round * 50_000, &data, false).expect("write");
        world.nicfs.kill();
        if round % 3 == 1 {
            world.hostd.kill();
        }
        // The log takes what its lease allows, also while nobody serves.
        fs.write(file, round * 50_000, &round.to_le_bytes(), false).expect("write without nicfs");
        world.nicfs = Service::start("nicfs", &world.dir);
        if round % 3 == 1 {
            world.hostd = Service::start("hostd", &world.dir);
        }
        let name = format!("round{round}");
        let (_, made) =
            fs.create(&me, InodeId::ROOT, name.as_bytes(), 0o644, O_RDWR).expect("create");
        fs.fsync(made, false).expect("fsync");
        fs.release(made);
        let other = world.attach();
        let open = other.open(&me, attr.ino, O_RDWR).expect("open");
        let mut back = vec![0; data.len()];
        for old in 0..=round {
            assert_eq!(other.read(open, old * 50_000, &mut back), Ok(data.len()));
            assert_eq!(back[..8], old.to_le_bytes());
            assert!(back[8..] == data[8..], "round {round}");
        }
        other.release(open);
        let mut text = [0; 8];
        assert_eq!(fs.read(nameless, 0, &mut text), Ok(8));
        assert_eq!(&text, b"nameless", "an open file without a name, round {round}");
    }
    fs.fsync(file, false).expect("nothing was lost");
    world.check();
}

/// The region goes from under a client that waits, and a new one comes in its place. The client is told in the end, goes on
/// there, and is told what it lost. (It waited for ever: who reads its log knew nothing of it.)
#[test]
fn who_waits_on_the_log_of_a_region_that_was_begun_anew_goes_on_in_the_new_one() {
    let moved = |region: &Path| {
        std::fs::rename(region, region.with_extension("old")).expect("renamed");
    };
    let removed = |region: &Path| std::fs::remove_dir_all(region).expect("removed");
    for take_away in [removed as fn(&Path), moved] {
        let mut world = World::new("anew");
        let fs = world.attach();
        let me = me();
        let (_, kept) = fs.create(&me, InodeId::ROOT, b"kept", 0o644, O_RDWR).expect("create");
        fs.fsync(kept, false).expect("fsync");
        world.begin_anew(|region| {
            fs.write(kept, 0, b"nobody reads this", false).expect("write without nicfs");
            take_away(region);
        });
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let first = fs.fsync(kept, false);
                let made =
                    fs.create(&me, InodeId::ROOT, b"later", 0o644, O_RDWR).map(|(_, file)| file);
                let synced = made.and_then(|file| fs.fsync(file, false));
                done.send((first, synced)).expect("heard");
            });
            let Ok((first, synced)) = ended.recv_timeout(Duration::from_secs(30)) else {
                world.end_by_force();
                eprintln!("the client waits for ever");
                std::process::abort();
            };
            assert!(first.is_err(), "what was written is in the region of before");
            assert_eq!(synced, Ok(()));
        });
        assert_eq!(world.clients(), 1);
        world.check();
    }
}

/// There is no space for an allocation, which says so: the file has lost nothing, and its fsync has nothing to say. (It
/// said ENOSPC again.) Nor has one of another file that was done, whatever was refused before.
#[test]
fn an_allocation_that_is_refused_is_told_once() {
    let (world, me) = (World::new("refused"), me());
    let fs = world.attach();
    let make = |name: &[u8]| fs.create(&me, InodeId::ROOT, name, 0o644, O_RDWR).expect("create").1;
    let (file, other) = (make(b"file"), make(b"other"));
    for round in 0..3 {
        fs.write(file, 0, b"some", false).expect("write");
        fs.write(other, 0, b"some", false).expect("write");
        assert_eq!(fs.fallocate(file, 0, 0, 1 << 30), Err(Errno::NOSPC), "round {round}");
        assert_eq!(fs.fsync(file, false), Ok(()), "round {round}");
        assert_eq!(fs.fgetattr(file).map(|attr| attr.size), Ok(4));
        fs.fsync(other, false).ok();
        assert_eq!(fs.fallocate(other, 0, 0, 8192), Ok(()), "round {round}");
        assert_eq!(fs.fsync(other, false), Ok(()), "round {round}");
        assert_eq!(fs.write(file, 0, b"more", false).map(|w| w.len), Ok(4));
    }
    fs.release(file);
    fs.release(other);
    world.check();
}

/// A process is killed while it writes and nicfs is dead: what it wrote is there afterwards, and
/// it is forgotten.
#[test]
fn the_log_of_a_killed_process_is_published_by_the_next_nicfs() {
    let (mut world, me) = (World::new("killed"), me());
    let fs = world.attach();
    let mut writer = Service::start("writer", &world.dir);
    let written = || -> u64 {
        let text = std::fs::read_to_string(world.dir.join("written")).unwrap_or_default();
        text.parse().unwrap_or(0)
    };
    let wait_beyond = |n: u64| {
        let end = Instant::now() + Duration::from_secs(30);
        while written() <= n {
            assert!(Instant::now() < end, "the writer does not get on");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_beyond(300);
    world.nicfs.kill();
    wait_beyond(written() + 200);
    writer.kill();
    let last = written();
    world.nicfs = Service::start("nicfs", &world.dir);
    let seen = fs.lookup(&me, InodeId::ROOT, b"writer").expect("lookup");
    let open = fs.open(&me, seen.ino, O_RDWR).expect("open");
    let end = Instant::now() + Duration::from_secs(30);
    while world.clients() > 1 {
        assert!(Instant::now() < end, "the dead writer stays listed");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut back = [0; 8];
    assert_eq!(fs.read(open, last % 1000 * 8, &mut back), Ok(8));
    assert!(u64::from_le_bytes(back) >= last, "{back:?} {last}");
    fs.release(open);
    world.check();
}

/// Processes come and go: none stays listed, no log stays behind.
#[test]
fn dead_clients_vanish() {
    let (world, me) = (World::new("vanish"), me());
    for round in 0..40u32 {
        let fs = world.attach();
        let name = format!("file{round}");
        let (_, file) =
            fs.create(&me, InodeId::ROOT, name.as_bytes(), 0o644, O_RDWR).expect("create");
        fs.write(file, 0, b"text", false).expect("write");
        if round % 3 == 0 {
            fs.fsync(file, false).expect("fsync");
        }
        // Its socket is closed, which is how hostd learns of the end of a process's image.
        for fd in fs.descriptors() {
            // SAFETY: descriptors of a client that is never used again.
            drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) });
        }
        std::mem::forget(fs);
    }
    let end = Instant::now() + Duration::from_secs(30);
    while world.clients() > 0 {
        assert!(Instant::now() < end, "{} clients stay listed", world.clients());
        std::thread::sleep(Duration::from_millis(10));
    }
    let logs = std::fs::read_dir(world.dir.join("region")).expect("a region");
    let left = logs.flatten().filter(|e| e.file_name().as_encoded_bytes().starts_with(b"log."));
    assert_eq!(left.count(), 0);
    world.check();
}

/// Attaches with bare hands: the socket, and the log's descriptor.
fn bare_attach(world: &World) -> (std::os::fd::OwnedFd, std::os::fd::OwnedFd) {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    use storage::format::rpc;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .expect("a socket");
    let address = SocketAddrUnix::new(world.dir.join("sock")).expect("an address");
    rustix::net::connect(&socket, &address).expect("hostd listens");
    let request = rpc::host_request(rpc::HOST_ATTACH, 0);
    rustix::net::send(&socket, &request, SendFlags::NOSIGNAL).expect("it takes requests");
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let mut reply = [0; rpc::HOST_MESSAGE_BYTES];
    let mut into = [std::io::IoSliceMut::new(&mut reply)];
    let flags = rustix::net::RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(&socket, &mut into, &mut control, flags).expect("an answer");
    let log = control.drain().find_map(|message| match message {
        rustix::net::RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    (socket, log.expect("a log"))
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < end, "{what}: not within half a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What a client does to the file of its log it does to itself: it is expelled, others go on, and the space comes back, as
/// often as it takes some.
#[test]
fn a_log_is_no_longer_and_no_shorter_than_it_was_made() {
    use rustix::fs::{FallocateFlags, fallocate, fstat, ftruncate};
    type Attack = fn(&std::os::fd::OwnedFd, u64) -> rustix::io::Result<()>;
    let attacks: [(&str, Attack); 6] = [
        ("grows", |log, size| fallocate(log, FallocateFlags::empty(), 0, size + (64 << 20))),
        ("grows unseen", |log, size| fallocate(log, FallocateFlags::KEEP_SIZE, size, 64 << 20)),
        ("is longer", |log, size| ftruncate(log, size + (64 << 20))),
        ("is shorter", |log, size| ftruncate(log, size / 2)),
        ("is empty", |log, _| ftruncate(log, 0)),
        ("is empty, then full", |log, size| {
            ftruncate(log, 0)?;
            fallocate(log, FallocateFlags::empty(), 0, size + (64 << 20))
        }),
    ];
    let world = World::new("resized");
    let (fs, me) = (world.attach(), me());
    let (_, file) = fs.create(&me, InodeId::ROOT, b"f", 0o644, O_RDWR).expect("create");
    let taken = |log: &std::os::fd::OwnedFd| fstat(log).expect("it is open").st_blocks * 512;
    for (n, (what, attack)) in attacks.iter().enumerate() {
        let (_socket, log) = bare_attach(&world);
        let size = u64::try_from(fstat(&log).expect("it is open").st_size).expect("a size");
        attack(&log, size).expect("the descriptor lets it");
        let said = format!("\"resized_logs\":{}", n + 1);
        until(what, || world.status().contains(&said));
        // Nothing is left of it, though it holds the descriptor and tries again.
        until(what, || taken(&log) == 0);
        fallocate(&log, FallocateFlags::empty(), 0, 64 << 20).expect("the descriptor lets it");
        until(what, || taken(&log) == 0);
        fs.write(file, 0, what.as_bytes(), false).expect(what);
        fs.fsync(file, false).expect(what);
    }
    // Holes in what is its own harm nobody, and nobody minds.
    let (_socket, log) = bare_attach(&world);
    let size = u64::try_from(fstat(&log).expect("it is open").st_size).expect("a size");
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&log, hole, 0, size).expect("the descriptor lets it");
    fs.write(file, 0, b"holes", false).expect("write");
    fs.fsync(file, false).expect("fsync");
    fs.release(file);
    world.check();
}

#[test]
fn a_program_of_another_version_is_told_so() {
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    };
    use storage::format::rpc;
    let world = World::new("version");
    drop(attach(&world.dir));
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .expect("a socket");
    let address = SocketAddrUnix::new(world.dir.join("sock")).expect("an address");
    rustix::net::connect(&socket, &address).expect("hostd listens");
    let mut request = rpc::host_request(rpc::HOST_ATTACH, 0);
    request[4] -= 1;
    rustix::net::send(&socket, &request, SendFlags::NOSIGNAL).expect("it takes requests");
    let mut reply = [0; rpc::HOST_MESSAGE_BYTES];
    rustix::net::recv(&socket, &mut reply[..], RecvFlags::empty()).expect("an answer");
    assert_eq!(rpc::host_reply_decode(&reply), Ok(Err(Errno::PROTONOSUPPORT)));
}
