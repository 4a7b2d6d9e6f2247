//! The sockets of the services, and what is in the directories beside them.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use storage::format::rpc;

use super::attacker::{Attacker, ask, connect, connect_to, receive, send, send_with};
use super::{Attack, Ground, Outcome, PER_USER, Tried, attack};

pub(super) const ATTACKS: &[Attack] = &[
    attack("coordinator-socket", "it speaks to the coordinator", |g| {
        knocks(g, "coordinator/coordinator.sock")
    }),
    attack("fabric-socket", "it speaks as a node to a node", |g| knocks(g, "fabric/node-1.sock")),
    attack("status-socket", "it speaks to the status socket of a node", |g| {
        knocks(g, "n1/run/nicfs.status")
    }),
    attack("inner-socket", "it speaks to nicfs as hostd does", |g| {
        Ok(match connect(&g.cluster.join("n1/run/hostd.sock.nicfs")) {
            Ok(_) => Outcome::Succeeded("it is connected".into()),
            Err(e) => Outcome::Held(e),
        })
    }),
    attack("ports", "a port of the cluster that is not for metrics, from the loopback", ports),
    attack("metrics-garbage", "anything at all to the ports that there are", metrics_garbage),
    attack("regions", "files of a region, keys and configurations that others may read", regions),
    attack(
        "hostd-garbage",
        "packets of garbage, half ones, long ones, of another version",
        garbage,
    ),
    attack("hostd-descriptors", "descriptors that nobody asked for", descriptors),
    attack(
        "hostd-connections",
        "as many connections as it gets, and more, while root attaches",
        connections,
    ),
    attack("hostd-hangs-up", "connects and hangs up as fast as it can", hangs_up),
    attack("hostd-attaches", "as many clients as it gets, while root attaches", attaches),
    attack(
        "hostd-attach-twice",
        "two clients on one connection, and one that never reads its answers",
        twice,
    ),
    attack("session", "what programs of root's share under `corbel run`", session),
];

fn knocks(ground: &Ground, socket: &str) -> Tried {
    let path = ground.cluster.join(socket);
    let mut stream = match UnixStream::connect(&path) {
        Ok(stream) => stream,
        Err(e) => return Ok(Outcome::Held(e.to_string())),
    };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
    let mut reply = [0; 64];
    let said = stream.write_all(&[0; 12]).and_then(|()| stream.read(&mut reply));
    Ok(Outcome::of(matches!(said, Ok(n) if n > 0), format!("{said:?}")))
}

/// Ports on which processes of the cluster listen. The super-user says whose they are: beside it other clusters may run,
/// whose owners have said that theirs are for everybody.
fn listening(ground: &Ground) -> Result<Vec<u16>, String> {
    let ports = ground.root("ports")?;
    ports.split_whitespace().map(|p| p.parse().map_err(|e| format!("{p}: {e}"))).collect()
}

fn dial(port: u16) -> std::io::Result<std::net::TcpStream> {
    let stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

/// Whether Corbel's metrics are served there.
fn is_metrics(port: u16) -> bool {
    let Ok(mut stream) = dial(port) else { return false };
    let mut text = String::new();
    let _ = stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n");
    let _ = stream.read_to_string(&mut text);
    text.contains("corbel_")
}

fn ports(ground: &Ground) -> Tried {
    // What answers a frame of the fabric with a frame.
    let mut answer = Vec::new();
    for port in listening(ground)? {
        let Ok(mut stream) = dial(port) else { continue };
        let mut reply = [0; 4];
        let frame = [b"CBFR\x01\x01".as_slice(), &[1, 0xff, 16, 0, 0, 0], &[0; 28]].concat();
        if stream.write_all(&frame).and_then(|()| stream.read_exact(&mut reply)).is_ok()
            && &reply == b"CBFR"
        {
            answer.push(port);
        }
    }
    Ok(Outcome::of(!answer.is_empty(), format!("{answer:?}")))
}

fn metrics_garbage(ground: &Ground) -> Tried {
    let ports: Vec<u16> = listening(ground)?.into_iter().filter(|port| is_metrics(*port)).collect();
    let long = format!("GET /{} HTTP/1.0\r\n", "a".repeat(1 << 20));
    for port in &ports {
        for bytes in [
            b"".as_slice(),
            b"\0\0\0\0",
            b"GET",
            b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
            long.as_bytes(),
        ] {
            if let Ok(mut stream) = dial(*port) {
                let _ = stream.write_all(bytes);
            }
        }
    }
    let dead: Vec<_> = ports.iter().filter(|port| !is_metrics(**port)).collect();
    Ok(Outcome::of(!dead.is_empty(), format!("of {ports:?} do not answer any more: {dead:?}")))
}

/// Whatever below a directory it can open; at most so deep.
fn readable(dir: &Path, depth: u32, found: &mut Vec<PathBuf>) {
    let Ok(all) = fs::read_dir(dir) else { return };
    for path in all.flatten().map(|e| e.path()) {
        match fs::symlink_metadata(&path) {
            Ok(m) if m.is_dir() && depth > 0 && !path.ends_with("mnt") => {
                readable(&path, depth - 1, found)
            }
            Ok(m) if m.is_file() && fs::File::open(&path).is_ok() => found.push(path),
            _ => {}
        }
    }
}

fn regions(ground: &Ground) -> Tried {
    let mut found = Vec::new();
    readable(&ground.cluster, 4, &mut found);
    for part in ["n1/region", "n1/run", "coordinator", "fabric", "n1"] {
        readable(&ground.cluster.join(part), 2, &mut found);
    }
    for file in [
        "n1/region/superblock",
        "n1/region/tree",
        "n1/region/stream",
        "n1/region/arena.0",
        "n1/region/arena.1",
        "n1/run/log",
        "n1/run/mount.log",
        "coordinator/log",
        "n1/run/coordinator.log",
    ] {
        found.extend(Some(ground.cluster.join(file)).filter(|path| fs::File::open(path).is_ok()));
    }
    Ok(Outcome::of(!found.is_empty(), format!("{found:?}")))
}

fn garbage(ground: &Ground) -> Tried {
    let mut random = base::random::Random::new(1);
    for round in 0..300u64 {
        let socket = connect(&ground.socket())?;
        let mut bytes = vec![0; [1, 63, 64, 65, 255, 256, 4096, 60_000][round as usize % 8]];
        random.fill(&mut bytes);
        if round % 3 == 0 && bytes.len() >= 64 {
            let kind = (round % 7) as u32;
            bytes[..64].copy_from_slice(&rpc::host_request(kind, u64::MAX - round));
            bytes[4] ^= (round % 5 == 0) as u8;
        }
        let _ = send(&socket, &bytes);
    }
    Attacker::attach(&ground.socket()).map_err(|e| format!("nobody attaches afterwards: {e}"))?;
    Ok(Outcome::Held("300 packets, and hostd takes clients".into()))
}

fn descriptors(ground: &Ground) -> Tried {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::os::fd::AsFd as _;
    let socket = connect(&ground.socket())?;
    let null = fs::File::open("/dev/null").map_err(|e| e.to_string())?;
    let fds = [null.as_fd(); 100];
    for _ in 0..100 {
        let mut space = [core::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(100))];
        let mut buffer = SendAncillaryBuffer::new(&mut space);
        buffer.push(SendAncillaryMessage::ScmRights(&fds));
        let request = rpc::host_request(rpc::HOST_ARENA, 0);
        let part = [std::io::IoSlice::new(&request)];
        if rustix::net::sendmsg(&socket, &part, &mut buffer, SendFlags::NOSIGNAL).is_err()
            || receive(&socket).is_err()
        {
            break;
        }
    }
    drop(socket);
    ground.root("attach").map(|_| Outcome::Held("10,000 descriptors, and root attaches".into()))
}

fn connections(ground: &Ground) -> Tried {
    let held: Vec<OwnedFd> = (0..1500).map_while(|_| connect(&ground.socket()).ok()).collect();
    Ok(match ground.root("attach") {
        Ok(_) => Outcome::Held(format!("{} connections, and root attaches", held.len())),
        Err(e) => Outcome::Succeeded(format!("{} connections, and {e}", held.len())),
    })
}

/// One process that connects and hangs up as fast as it can, while root attaches.
fn hangs_up(ground: &Ground) -> Tried {
    let socket = ground.socket();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let mut count = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                count += usize::from(connect(&socket).is_ok());
            }
            count
        });
        let mut took: Vec<u64> = Vec::new();
        let mut said = Ok(());
        for _ in 0..15 {
            let begin = std::time::Instant::now();
            said = said.and(ground.root("attach").map(|_| ()));
            took.push(begin.elapsed().as_millis() as u64);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let count = flood.join().map_err(|_| "the flood has ended")?;
        said?;
        took.sort_unstable();
        // Each took 350 ms where all that came was taken before nicfs was heard; on a busy machine 10.
        Ok(Outcome::of(
            took[7] > 150,
            format!("{count} connections, and root attaches in {took:?} ms"),
        ))
    })
}

fn attaches(ground: &Ground) -> Tried {
    let held: Vec<Attacker> =
        (0..300).map_while(|_| Attacker::attach(&ground.socket()).ok()).collect();
    let root = ground.root("attach");
    // A node that was away for a moment, as on a busy machine, has ended those that it had.
    let live = held.iter().filter(|client| !client.is_over()).count();
    if live < held.len() && live <= PER_USER {
        return Err(format!("{live} of {} clients live: their node lost its place", held.len()));
    }
    Ok(match root {
        Ok(_) => Outcome::of(
            live > PER_USER,
            format!("{live} clients of {} attached, and root attaches", held.len()),
        ),
        Err(e) => Outcome::Succeeded(format!("{live} clients, and {e}")),
    })
}

fn twice(ground: &Ground) -> Tried {
    let first = Attacker::attach(&ground.socket())?;
    let (second, fds) = ask(&first.socket, rpc::HOST_ATTACH, 1)?;
    let deaf = connect(&ground.socket())?;
    for _ in 0..10_000 {
        if send(&deaf, &rpc::host_request(rpc::HOST_ARENA, 0)).is_err() {
            break;
        }
    }
    ground.root("attach")?;
    Ok(Outcome::of(second.is_ok() || !fds.is_empty(), format!("{second:?}")))
}

/// Programs under `corbel run` share descriptors by an abstract socket, which has no owner and no mode. It is the super-user's
/// session here; `imposter.py` of the end-to-end tests takes a name that is free again.
fn session(ground: &Ground) -> Tried {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    let name = ground.root("session")?;
    let address = rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(|e| format!("{name}: {e}"))?;
    let null = fs::File::open("/dev/null").map_err(|e| e.to_string())?;
    let (mut asked, mut given) = (0, 0);
    for op in 0..6u32 {
        for index in 0..24u32 {
            for (generation, state) in [(0, 0), (1, 0), (1, 1), (2, 1)] {
                let socket = connect_to(&address)?;
                let words = [op, index, generation, state].map(u32::to_ne_bytes);
                let fds = if op == 1 { vec![null.as_fd()] } else { Vec::new() };
                let _ = send_with(&socket, &words.concat(), &fds);
                asked += 1;
                // Its own that it has put it may get back.
                given += receive(&socket).map_or(0, |(_, fds)| {
                    let own = |fd: &OwnedFd| {
                        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
                        fs::read_link(path).is_ok_and(|path| path == Path::new("/dev/null"))
                    };
                    fds.iter().filter(|fd| !own(fd)).count()
                });
            }
        }
    }
    Ok(Outcome::of(given > 0, format!("{given} descriptors in {asked} answers of {name}")))
}
