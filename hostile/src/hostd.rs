//! hostd, the real one, on its real socket, and processes that send it anything: packets of garbage, questions in one breath,
//! descriptors, connections that end in the middle. Beside it stands a nicfs that keeps the rules and takes its time.
//!
//! What must hold: every request that is whole gets one answer; an arena is handed out only where nicfs has said so of this
//! arena; and after all of it hostd serves the next.

use std::collections::VecDeque;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::{ClientId, Errno};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use service::HostdConfig;
use service::config::private_socket;
use service::link::{self, Packet};
use storage::format::item::ReadClass;
use storage::format::rpc;
use storage::format::superblock::Durability;
use storage::region::FileRegion;

use crate::input::Input;
use crate::siege::attacker::{connect, receive, send};

const STEPS: usize = 60;
const CONNECTIONS: usize = 6;
/// Arenas and logs that there are.
const SEGMENTS: u32 = 8;
/// nicfs answers questions in such groups: whoever asks again before that is asked about twice.
const GROUP: usize = 3;
/// Name of a stage's directory, before the number of its process.
const DIR: &str = "corbel-hostd-";
const PATIENCE: Duration = Duration::from_secs(20);

/// Whom nicfs lets map an arena. The odd ones nobody, whoever asks.
fn class(arena: u32) -> Option<ReadClass> {
    match arena {
        SEGMENTS.. => None,
        n if n % 2 == 1 => Some(ReadClass::Service),
        _ => Some(ReadClass::World),
    }
}

struct Stage {
    dir: PathBuf,
    socket: PathBuf,
    hostd: JoinHandle<()>,
}

/// One for the process: hostd lives through all that is sent to it.
fn stage() -> &'static Mutex<Stage> {
    static STAGE: OnceLock<Mutex<Stage>> = OnceLock::new();
    STAGE.get_or_init(|| Mutex::new(Stage::new()))
}

impl Stage {
    fn new() -> Self {
        remove_left();
        let dir = std::env::temp_dir().join(format!("{DIR}{}", std::process::id()));
        fs::create_dir(&dir).expect("a directory");
        let (region, socket) = (dir.join("region"), dir.join("hostd.sock"));
        drop(FileRegion::create(&region, Durability::Replicated).expect("a region"));
        for n in 0..SEGMENTS {
            // Each arena says which it is.
            fs::write(region.join(format!("arena.{n}")), n.to_le_bytes()).expect("room");
            fs::write(region.join(format!("log.{n}")), [0; 64]).expect("room");
        }
        let nicfs = listen(&private_socket(&socket));
        std::thread::spawn(move || keep_rules(&nicfs));
        let config = HostdConfig {
            region,
            durability: Durability::Replicated,
            socket: socket.clone(),
            connections_per_user: 64,
        };
        let hostd = std::thread::spawn(move || {
            service::hostd::run(config).expect("hostd runs");
        });
        let begin = Instant::now();
        while connect(&socket).is_err() && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { dir, socket, hostd }
    }
}

/// What processes that have ended left there: nobody ends a stage in order.
fn remove_left() {
    for entry in fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(DIR).and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn listen(path: &Path) -> OwnedFd {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
    let socket = socket.expect("a socket");
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).expect("a short path")).expect("bound");
    rustix::net::listen(&socket, 8).expect("listens");
    socket
}

/// nicfs. It ends with the process.
fn keep_rules(listener: &OwnedFd) {
    let Ok(socket) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else { return };
    let (mut asked, mut next) = (VecDeque::new(), 0);
    loop {
        // What has come in one breath is answered together, the rest a moment later.
        let wait = rustix::time::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let waits = (!asked.is_empty()).then_some(&wait);
        let quiet = poll(&mut [PollFd::new(&socket, PollFlags::IN)], waits) == Ok(0);
        match link::receive(&socket) {
            Ok(Some((packet, _))) => asked.push_back(packet),
            Ok(None) => {}
            Err(_) => return,
        }
        while asked.len() >= GROUP || quiet && !asked.is_empty() {
            next += 1;
            let answer = match asked.pop_front() {
                Some(Packet::Attach { token, .. }) if next % 4 == 0 => Packet::Refused {
                    token,
                    errno: Errno::AGAIN,
                    text: "not now".repeat(next as usize % 9),
                },
                // Now and then a log that there is not.
                Some(Packet::Attach { token, .. }) => {
                    let segment = (next % u64::from(SEGMENTS + 1)) as u32;
                    Packet::Attached { token, client: ClientId(next), segment }
                }
                Some(Packet::ArenaQuery { token, arena }) => {
                    Packet::Arena { token, class: class(arena), bytes: 4 }
                }
                _ => continue,
            };
            if link::send(socket.as_fd(), &answer, None).is_err() {
                return;
            }
        }
    }
}

/// A process, and how many answers it has still to get.
struct Connection {
    socket: OwnedFd,
    due: usize,
}

/// What came: a descriptor must be of something that it may have.
fn look(answer: &(Vec<u8>, Vec<OwnedFd>)) {
    let said = rpc::host_reply_decode(&answer.0).expect("an answer that can be read");
    if answer.1.len() == 1 {
        let mut number = [0; 4];
        let got = rustix::io::pread(&answer.1[0], &mut number, 0).expect("it may be read");
        let arena = u32::from_le_bytes(number);
        assert_eq!(got, 4, "an arena");
        assert_eq!(class(arena), Some(ReadClass::World), "arena {arena} is handed out");
        assert!(rustix::io::pwrite(&answer.1[0], b"x", 0).is_err(), "and to be written");
    }
    assert!(said.is_ok() || answer.1.is_empty(), "a refusal with descriptors");
}

/// Runs a script.
///
/// # Panics
/// If something does not hold.
pub fn run(bytes: &[u8]) {
    let stage = stage().lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = Input::new(bytes);
    let open = || connect(&stage.socket).map(|socket| Connection { socket, due: 0 });
    let mut all: Vec<Connection> = Vec::new();
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        let step = input.below(9);
        if all.is_empty() || step == 0 && all.len() < CONNECTIONS {
            all.push(open().expect("hostd takes connections"));
        }
        let at = input.below(all.len());
        let one = &mut all[at];
        match step {
            // An arena, often of those that there are.
            1..4 => {
                let arena = if step == 1 { input.odd() } else { input.below(10) as u64 };
                let kind = if step == 3 { rpc::HOST_KNOWS } else { rpc::HOST_ARENA };
                one.due += usize::from(send(&one.socket, &rpc::host_request(kind, arena)).is_ok());
            }
            4 => {
                let request = rpc::host_request(rpc::HOST_ATTACH, input.odd());
                one.due += usize::from(send(&one.socket, &request).is_ok());
            }
            // A request that is nearly one.
            5 => {
                let mut request = rpc::host_request(input.u8().into(), input.odd()).to_vec();
                let place = input.below(request.len());
                request[place] ^= input.u8();
                one.due += usize::from(send(&one.socket, &request).is_ok());
            }
            6 => {
                let piece = input.piece();
                // (Nothing is what the end of a connection looks like.)
                if !piece.is_empty() {
                    one.due += usize::from(send(&one.socket, piece).is_ok());
                }
            }
            7 => {
                let fds = vec![one.socket.as_fd(); 1 + input.below(3)];
                let request = rpc::host_request(rpc::HOST_ARENA, 0);
                one.due +=
                    usize::from(link::send_bytes(one.socket.as_fd(), &request, &fds).is_ok());
            }
            // It goes, whatever it is still to be told.
            8 => drop(all.swap_remove(at)),
            _ => {}
        }
    }
    for connection in &all {
        for answered in 0..connection.due {
            let answer = receive(&connection.socket)
                .unwrap_or_else(|e| panic!("{answered} of {} answers, then: {e}", connection.due));
            look(&answer);
        }
        let mut more = [PollFd::new(&connection.socket, PollFlags::IN)];
        let wait = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(poll(&mut more, Some(&wait)), Ok(0), "an answer that nobody asked for");
    }
    drop(all);
    // The next is served.
    let next = open().expect("hostd takes connections");
    send(&next.socket, &rpc::host_request(rpc::HOST_ARENA, 0)).expect("it listens");
    look(&receive(&next.socket).expect("and answers"));
    assert!(!stage.hostd.is_finished(), "hostd has ended ({})", stage.dir.display());
}
