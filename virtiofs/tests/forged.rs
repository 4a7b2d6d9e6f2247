//! Monitors and fronts that mean harm, or are mad: messages and frames drawn from a printed seed, most of them nearly right. Whatever they
//! say, the device goes on, and a decent one that comes after them is served.

mod common;

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use base::random::Random;
use client::fs::FileSystem;
use client::null::NullFs;
use common::{Host, scratch};
use frontend::fuse::wire::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use virtiofs::device::{Device, Options};
use virtiofs::driver::{Config, Driver};
use virtiofs::remote::back::{Back, Window};
use virtiofs::remote::frame::{self, Header, Hello, MAGIC, VERSIONS, kind};
use virtiofs::remote::front::{self, Front};
use virtiofs::remote::link::{Address, Listener};
use virtiofs::vhost;
use zerocopy::{FromZeros, IntoBytes};

const ROOT: u64 = 1;
/// Connections of each kind.
const MANY: usize = 400;

fn seed() -> u64 {
    let given = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or(u64::from(std::process::id()));
    println!("SEED={seed}");
    seed
}

/// A number such as faults like.
fn number(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => 1,
        2 => random.below(10),
        3 => 1 << random.below(64),
        4 => u64::MAX - random.below(3),
        5 => 0x4000_0000 + random.below(1 << 20),
        6 => random.below(1 << 16),
        _ => random.next_u64(),
    }
}

fn memory(bytes: u64) -> File {
    let fd = rustix::fs::memfd_create("forged", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(bytes).unwrap();
    file
}

/// The codes of vhost-user that carry something, with the bytes that each wants.
const MESSAGES: &[(u32, usize)] = &[
    (1, 0),   // GET_FEATURES
    (2, 8),   // SET_FEATURES
    (3, 0),   // SET_OWNER
    (4, 0),   // RESET_OWNER
    (5, 40),  // SET_MEM_TABLE
    (6, 16),  // SET_LOG_BASE
    (8, 8),   // SET_VRING_NUM
    (9, 40),  // SET_VRING_ADDR
    (10, 8),  // SET_VRING_BASE
    (11, 8),  // GET_VRING_BASE
    (12, 8),  // SET_VRING_KICK
    (13, 8),  // SET_VRING_CALL
    (14, 8),  // SET_VRING_ERR
    (15, 0),  // GET_PROTOCOL_FEATURES
    (16, 8),  // SET_PROTOCOL_FEATURES
    (17, 0),  // GET_QUEUE_NUM
    (18, 8),  // SET_VRING_ENABLE
    (24, 12), // GET_CONFIG
    (25, 12), // SET_CONFIG
    (31, 24), // GET_INFLIGHT_FD
    (32, 24), // SET_INFLIGHT_FD
    (34, 0),  // RESET_DEVICE
    (36, 0),  // GET_MAX_MEM_SLOTS
    (37, 40), // ADD_MEM_REG
    (38, 40), // REM_MEM_REG
    (42, 8),  // SET_DEVICE_STATE_FD
    (43, 0),  // CHECK_DEVICE_STATE
];

/// A message, and the descriptors that come with it.
fn message(random: &mut Random) -> (Vec<u8>, Vec<File>) {
    let (code, wanted) = MESSAGES[random.below(MESSAGES.len() as u64) as usize];
    let code = if random.below(40) == 0 { number(random) as u32 } else { code };
    let wanted = if random.below(20) == 0 { random.below(200) as usize } else { wanted };
    let mut payload = Vec::new();
    while payload.len() < wanted {
        // Indices of queues and counts of regions are small, mostly.
        let small = random.below(3) > 0;
        let value = if small { random.below(6) } else { number(random) };
        payload.extend_from_slice(&value.to_le_bytes());
    }
    payload.truncate(wanted);
    if matches!(code, 5 | 37) && random.below(2) == 0 {
        // One region that might be.
        let region = [0x4000_0000u64, 1 << 20, 0x7f00_0000_0000, random.below(2) * 4096];
        payload = [&1u64.to_le_bytes()[..], region.as_bytes()].concat();
    }
    let size = if random.below(30) == 0 { number(random) as u32 } else { payload.len() as u32 };
    let flags = if random.below(30) == 0 {
        number(random) as u32
    } else {
        1 | (random.below(2) as u32) << 3
    };
    let head = [code, flags, size].map(u32::to_le_bytes).concat();
    let wants_one = matches!(code, 5 | 6 | 12 | 13 | 14 | 32 | 37 | 42);
    let count = if random.below(10) == 0 { random.below(4) } else { u64::from(wants_one) };
    let files = (0..count).map(|_| memory(random.below(3) << 20)).collect();
    ([head, payload].concat(), files)
}

fn send(stream: &UnixStream, bytes: &[u8], files: &[File]) -> bool {
    let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).is_ok()
}

fn works(guest: &mut Driver) {
    let asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
    assert_eq!(asked.error, 0);
}

#[test]
fn monitors_that_say_anything_end_only_their_connection() {
    let mut random = Random::new(seed());
    let host = Host::null(Options::default());
    for round in 0..MANY {
        let mut stream = host.connect();
        // What it answers is of no interest, but that it is read.
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        for _ in 0..random.below(24) {
            let (bytes, files) = message(&mut random);
            if !send(&stream, &bytes, &files) {
                break;
            }
            let _ = stream.read(&mut [0; 4096]);
        }
        let _ = stream.shutdown(std::net::Shutdown::Both);
        drop(stream);
        if round % 40 == 39 {
            let mut guest = host.guest(Config::default());
            works(&mut guest);
            guest.hang_up();
        }
    }
}

/// Most of a front's frames: a session that is agreed upon, then requests that might be, out of place, too many or too long.
fn frames(random: &mut Random) -> Vec<u8> {
    let mut all = Vec::new();
    if random.below(10) > 0 {
        let mut hello = Hello::new_zeroed();
        hello.magic = if random.below(20) == 0 { [7; 8] } else { MAGIC };
        let odd = random.below(20) == 0;
        hello.from = if odd { number(random) as u16 } else { VERSIONS.0 }.into();
        hello.to = if odd { number(random) as u16 } else { VERSIONS.1 }.into();
        hello.queues = if random.below(10) == 0 { number(random) as u16 } else { 4 }.into();
        let name = if random.below(20) == 0 { "another" } else { "tenant" };
        hello.tenant =
            if random.below(20) == 0 { number(random) as u16 } else { name.len() as u16 }.into();
        hello.session = [random.below(3) as u8; 16];
        let payload = [hello.as_bytes(), name.as_bytes()].concat();
        all.extend(frame::frame(&Header::of(kind::HELLO, payload.len()), &payload));
    }
    for _ in 0..random.below(20) {
        let mut payload = vec![0; random.below(200) as usize];
        let what = if random.below(8) == 0 { random.below(9) as u8 } else { kind::REQUEST };
        if what == kind::REQUEST && random.below(4) > 0 {
            let opcode = match random.below(3) {
                0 => op::INIT,
                1 => op::GETATTR,
                _ => random.below(60) as u32,
            };
            let body = random.below(128) as usize;
            let request = InHeader {
                len: ((size_of::<InHeader>() + body) as u32).into(),
                opcode: opcode.into(),
                unique: number(random).into(),
                nodeid: random.below(3).into(),
                ..InHeader::default()
            };
            payload = request.as_bytes().to_vec();
            payload.extend((0..body).map(|_| random.below(4) as u8));
        }
        let mut header = Header::of(what, payload.len());
        header.flags = random.below(3) as u8;
        header.queue =
            if random.below(8) == 0 { number(random) as u16 } else { random.below(5) as u16 }
                .into();
        header.tag = if random.below(8) == 0 { number(random) } else { random.below(100) }.into();
        header.done = number(random).into();
        header.room =
            if random.below(8) == 0 { number(random) as u32 } else { random.below(5000) as u32 }
                .into();
        if random.below(40) == 0 {
            header.len = (number(random) as u32).into();
        }
        all.extend(frame::frame(&header, &payload));
    }
    if random.below(6) == 0 && !all.is_empty() {
        all.truncate(random.below(all.len() as u64) as usize);
    }
    if random.below(10) == 0 && !all.is_empty() {
        let at = random.below(all.len() as u64) as usize;
        all[at] ^= 1 << random.below(8);
    }
    all
}

#[test]
fn fronts_that_say_anything_end_only_their_connection() {
    let mut random = Random::new(seed());
    let root = scratch();
    let fs: Arc<dyn FileSystem> = Arc::new(NullFs::default());
    let device = Device::new(fs, Options::default());
    let back = Back::new("tenant", 4, Window::default());
    let _crew = device.start(&back).unwrap();
    let address = Address::Unix(root.join("back"));
    let (listener, there) = (Listener::bind(&address, None).unwrap(), back.clone());
    std::thread::spawn(move || there.listen(&listener));
    for _ in 0..MANY {
        let Ok(mut stream) = UnixStream::connect(root.join("back")) else { continue };
        stream.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
        let _ = stream.write_all(&frames(&mut random));
        let _ = stream.read(&mut [0; 4096]);
    }
    let rings = vhost::rings("tenant", 4).unwrap();
    let (tenant, silence) = ("tenant".into(), Duration::from_secs(5));
    let options = front::Options { address, identity: None, tenant, soft: None, silence };
    let front = Front::start(&*rings, options).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || vhost::serve(&rings, None, None, theirs));
    let mut guest = Driver::over(ours, Config::default()).unwrap();
    guest.init().unwrap();
    works(&mut guest);
    front.stop();
    let _ = std::fs::remove_dir_all(&root);
}
