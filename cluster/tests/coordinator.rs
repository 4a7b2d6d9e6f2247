//! The embedded coordinator and its clients over TCP, with real time.

use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::{NodeId, StreamSeq};
use cluster::coordinator::client::{Client, ClientConfig, ask, force};
use cluster::coordinator::embedded::{Server, ServerConfig};
use cluster::coordinator::machine::{Patience, VolumeSpec};
use cluster::coordinator::message::Message;
use cluster::coordinator::{CoordEvent, Coordinator, DataState, Registration, View};
use cluster::wire::FrameHead;

const CLUSTER: u128 = 99;
const PATIENCE: Duration = Duration::from_secs(10);

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("corbel-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(folder: &Path, listen: &str) -> ServerConfig {
    ServerConfig {
        listen: listen.parse().unwrap(),
        folder: folder.to_owned(),
        cluster: CLUSTER,
        volumes: vec![VolumeSpec {
            name: "v".to_owned(),
            replicas: 2,
            nodes: vec![NodeId(1), NodeId(2)],
            ..VolumeSpec::default()
        }],
        patience: Patience {
            heartbeat_ms: 20,
            failure_timeout_ms: 200,
            lost_connection_ms: 100,
            ..Patience::default()
        },
        keys: None,
    }
}

/// A server in a thread; dropped, it stops without a word, as if killed.
struct Running {
    stop: Arc<AtomicBool>,
    address: cluster::PeerAddress,
    thread: Option<JoinHandle<Server>>,
}

impl Running {
    fn start(folder: &Path, listen: &str) -> Self {
        let mut server = Server::open(&config(folder, listen)).unwrap();
        let (stop, address) = (Arc::new(AtomicBool::new(false)), server.address());
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                server.turn(Duration::from_millis(20)).unwrap();
            }
            server
        });
        Self { stop, address, thread: Some(thread) }
    }

    fn end(mut self) -> Server {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

fn client(server: &Running, node: u32, incarnation: u64) -> Client {
    Client::new(ClientConfig {
        coordinator: server.address.clone(),
        cluster: CLUSTER,
        registration: Registration {
            volume: "v".to_owned(),
            node: NodeId(node),
            incarnation,
            position: StreamSeq(3),
            state: DataState::Fresh,
            tcp: Some("10.0.0.1:700".parse().unwrap()),
            run_dir: "/run/x".to_owned(),
            info: "rack 7".to_owned(),
            ..Registration::default()
        },
        keys: None,
    })
    .unwrap()
}

/// Polls when the clients' descriptors say so, until `done`. The longest time in which this thread, which
/// never waits for longer than a millisecond or two, had no processor.
fn until(clients: &mut [Client], what: &str, mut done: impl FnMut(&[Client]) -> bool) -> Duration {
    let start = Instant::now();
    let (mut last, mut starved) = (start, Duration::ZERO);
    let mut events = Vec::new();
    while !done(clients) {
        starved = starved.max(last.elapsed());
        last = Instant::now();
        assert!(start.elapsed() < PATIENCE, "{what} did not happen: {events:?}");
        for client in clients.iter_mut() {
            let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(
                client.as_fd(),
                rustix::event::PollFlags::IN,
            )];
            if rustix::event::poll(&mut fds, Some(&zero)).unwrap() > 0 {
                client.poll(&mut events);
            }
        }
    }
    starved.max(last.elapsed())
}

fn chain(client: &Client) -> (u32, Vec<u32>) {
    client.view().map_or((0, vec![]), |v| (v.epoch.0, v.chain.iter().map(|n| n.0).collect()))
}

#[test]
fn a_cluster_lives_through_it_all() {
    let folder = Folder::new("coord");
    let server = Running::start(&folder.0, "127.0.0.1:0");
    let mut clients = vec![client(&server, 1, 1), client(&server, 2, 1)];
    assert!(clients[0].fenced(), "before it has registered");
    until(&mut clients, "the first chain", |c| c.iter().all(|c| chain(c) == (1, vec![1, 2])));
    assert!(!clients[0].fenced());
    let member = clients[1].view().unwrap().member(NodeId(1)).unwrap();
    assert_eq!((member.info.as_str(), member.position), ("rack 7", StreamSeq(3)));

    // Killed and started again on the same state: the nodes go on in the same epoch.
    let address = server.address.clone();
    drop(server.end());
    until(&mut clients, "fencing", |c| c.iter().all(Client::fenced));
    let server = Running::start(&folder.0, &address.to_string());
    until(&mut clients, "the end of fencing", |c| !c.iter().any(Client::fenced));
    assert_eq!(chain(&clients[0]), (1, vec![1, 2]));

    // The head dies: the end of its connection is noticed well before the failure timeout.
    let died = Instant::now();
    drop(clients.remove(0));
    let starved = until(&mut clients, "eviction", |c| chain(&c[0]) == (2, vec![2]));
    // On a machine that runs nothing in time nothing can be said of it.
    let busy = starved > Duration::from_millis(50);
    assert!(busy || died.elapsed() < Duration::from_millis(1900), "{:?}", died.elapsed());

    // It returns, catches up, and is the tail.
    clients.push(client(&server, 1, 2));
    until(&mut clients, "syncing", |c| {
        c[1].view().is_some_and(|v| v.syncing == [NodeId(1)] && v.epoch.0 == 2)
    });
    clients[1].caught_up(NodeId(1), 2, base::Epoch(2));
    until(&mut clients, "the return", |c| c.iter().all(|c| chain(c) == (3, vec![2, 1])));
    assert!(clients[1].view().unwrap().is_member(NodeId(1), 2));
    assert!(!clients[1].view().unwrap().is_member(NodeId(1), 1));

    // The head accuses it.
    clients[0].suspect(NodeId(1), base::Epoch(3));
    until(&mut clients, "the suspicion", |c| chain(&c[0]) == (4, vec![2]));
    let views = ask(&server.address, CLUSTER, None, PATIENCE).unwrap();
    assert_eq!(views[0].chain, [NodeId(2)]);
    let why = force(&server.address, CLUSTER, None, "v", PATIENCE).unwrap_err().to_string();
    assert!(why.contains("nothing to force"), "{why}");
    let why = ask(&server.address, CLUSTER + 1, None, PATIENCE).unwrap_err().to_string();
    assert!(why.contains("another cluster"), "{why}");
    assert!(server.end().counters().persisted >= 3);
}

#[test]
fn wrong_clusters_and_late_processes_are_told_why() {
    let folder = Folder::new("coord-refuse");
    let server = Running::start(&folder.0, "127.0.0.1:0");
    let mut clients = vec![client(&server, 1, 5)];
    until(&mut clients, "registration", |c| !c[0].fenced());
    let mut late = client(&server, 1, 4);
    let mut events = Vec::new();
    let start = Instant::now();
    while !events.iter().any(|e| matches!(e, CoordEvent::Trouble(t) if t.contains("newer process")))
    {
        assert!(start.elapsed() < PATIENCE, "{events:?}");
        late.poll(&mut events);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(late.fenced());
    until(&mut clients, "peace for the newer one", |c| !c[0].fenced());
}

/// Garbage, wrong lengths and messages out of place close that connection and no other.
#[test]
fn hostile_bytes_are_counted_and_cost_nothing() {
    let folder = Folder::new("coord-hostile");
    let server = Running::start(&folder.0, "127.0.0.1:0");
    let mut clients = vec![client(&server, 1, 1), client(&server, 2, 1)];
    until(&mut clients, "the first chain", |c| chain(&c[0]) == (1, vec![1, 2]));
    let mut random = base::random::Random::new(5);
    for round in 0..60 {
        let mut stream = TcpStream::connect(server.address.to_string()).unwrap();
        let mut bytes = vec![0u8; 40 + random.below(200) as usize];
        random.fill(&mut bytes);
        match round % 3 {
            0 => {}
            1 => {
                // A right frame around a wrong body.
                let head = FrameHead::new(round % 14, &[&bytes]).unwrap();
                bytes = [&head.encode()[..], &bytes].concat();
            }
            _ => {
                let (kind, body) = Message::View(View::default()).encode();
                let head = FrameHead::new(kind, &[&body]).unwrap();
                bytes = [&head.encode()[..], &body].concat();
            }
        }
        stream.write_all(&bytes).unwrap();
    }
    until(&mut clients, "a while", {
        let start = Instant::now();
        move |_| start.elapsed() > Duration::from_millis(300)
    });
    assert!(!clients[0].fenced() && !clients[1].fenced());
    assert_eq!(chain(&clients[1]), (1, vec![1, 2]));
    assert_eq!(server.end().counters().corrupt, 60);
}

#[test]
fn a_corrupt_state_is_refused_and_says_what_to_do() {
    let folder = Folder::new("coord-corrupt");
    let server = Running::start(&folder.0, "127.0.0.1:0");
    let mut clients = vec![client(&server, 1, 1), client(&server, 2, 1)];
    until(&mut clients, "the first chain", |c| chain(&c[0]) == (1, vec![1, 2]));
    let busy = Server::open(&config(&folder.0, "127.0.0.1:0")).unwrap_err().to_string();
    assert!(busy.contains("another coordinator"), "{busy}");
    drop(server.end());
    let path = folder.0.join("state");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let why = Server::open(&config(&folder.0, "127.0.0.1:0")).unwrap_err().to_string();
    assert!(why.contains("checksum") && why.contains("Restore"), "{why}");
    bytes[last] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    std::fs::write(folder.0.join("state.new"), b"half a file").unwrap();
    let server = Server::open(&config(&folder.0, "127.0.0.1:0")).unwrap();
    assert_eq!(server.views()[0].epoch.0, 1, "a crash while writing leaves the old state");
    drop(server);
    let mut other = config(&folder.0, "127.0.0.1:0");
    other.cluster = 1;
    let why = Server::open(&other).unwrap_err().to_string();
    assert!(why.contains("belongs to cluster"), "{why}");
}
