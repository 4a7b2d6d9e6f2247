//! The real client, hostd and nicfs on one machine, in processes of their own so that each can be
//! killed. The services are this test binary again, told by the environment what to be.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base::{Errno, InodeId, NodeId};
use client::fs::{Caller, FileSystem, NewNode, O_RDWR, S_IFDIR};
use client::libfs::{Config, LibFs};
use service::nicfs::FormatParams;
use service::{HostdConfig, Membership, NicfsConfig, PeerTransport};
use storage::format::superblock::Durability;

const ROLE: &str = "CORBEL_TEST_ROLE";
const DIR: &str = "CORBEL_TEST_DIR";

fn config(dir: &Path) -> NicfsConfig {
    NicfsConfig {
        node: NodeId(1),
        cluster: "test".into(),
        membership: Membership::Standalone,
        listen: "127.0.0.1:0".parse().expect("an address"),
        transport: PeerTransport::Tcp,
        region: dir.join("region"),
        durability: Durability::Replicated,
        socket: dir.join("sock"),
        admin: dir.join("status"),
        lanes: 2,
        lane_bytes: 5 << 20,
        clients_max: 16,
        memory: 64 << 20,
        high: 70,
        low: 30,
        fabric_delay: 0,
    }
}

/// What the other processes run; nothing when the tests are run.
#[test]
fn service_process() {
    let (Ok(role), Ok(dir)) = (std::env::var(ROLE), std::env::var(DIR)) else { return };
    let _ = env_logger::builder().try_init();
    let config = config(Path::new(&dir));
    let ended = if role == "nicfs" {
        service::nicfs::run(config)
    } else {
        let (region, durability) = (config.region, config.durability);
        service::hostd::run(HostdConfig { region, durability, socket: config.socket })
    };
    ended.expect("a service ends in order or by force");
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
        let params = FormatParams {
            uuid: *b"0123456789abcdef",
            time: 1_000_000_007,
            name: "test".into(),
            capacity: 64 << 20,
            stream: 20 << 20,
            uid: 0,
            gid: 0,
            mode: 0o777,
        };
        service::nicfs::format(&config(&dir), &params).expect("a region");
        let (nicfs, hostd) = (Service::start("nicfs", &dir), Service::start("hostd", &dir));
        Self { nicfs, hostd, dir }
    }

    fn attach(&self) -> LibFs {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let attached = LibFs::attach(Config {
                socket: self.dir.join("sock").as_os_str().as_encoded_bytes().to_vec(),
                lanes: 0,
                fd_min: 3,
                mount: b"/mnt".to_vec(),
            });
            match attached {
                Ok(fs) => return fs,
                Err(e) => assert!(Instant::now() < end, "cannot attach: {e}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
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

/// Whoever runs the test.
fn me() -> Caller<'static> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Caller { uid, gid, groups: &[], pid: 1 }
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
