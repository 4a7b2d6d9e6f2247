//! The coordinator is killed (SIGKILL) again and again at random moments while its chain changes:
//! whatever a node was told is still so afterwards, and the epoch never goes back.
//!
//! The program is its own coordinator: with the argument `serve FOLDER` it serves until killed.

use cluster::PeerAddress;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base::random::Random;
use base::{Epoch, NodeId, StreamSeq};
use cluster::coordinator::client::{Client, ClientConfig};
use cluster::coordinator::embedded::{Server, ServerConfig};
use cluster::coordinator::machine::{Patience, VolumeSpec};
use cluster::coordinator::{Coordinator, DataState, Registration};

const CLUSTER: u128 = 4;
const KILLS: u32 = 25;

fn serve(folder: &Path) -> ! {
    let config = ServerConfig {
        listen: "127.0.0.1:0".parse().expect("an address"),
        folder: folder.to_owned(),
        cluster: CLUSTER,
        volumes: vec![VolumeSpec { name: "v".to_owned(), replicas: 3, ..VolumeSpec::default() }],
        patience: Patience { hold_ms: 0, ..Patience::default() },
        keys: None,
    };
    let mut server = Server::open(&config).expect("the state is whole after each kill");
    println!("{}", server.address());
    let start = Instant::now();
    // The parent kills it long before; should the parent die, it ends by itself.
    while start.elapsed() < Duration::from_secs(30) {
        server.turn(Duration::from_millis(50)).expect("the state can be written");
    }
    std::process::exit(1);
}

fn start(folder: &Path) -> (Child, PeerAddress) {
    let mut child = Command::new(std::env::current_exe().expect("this program has a path"))
        .args(["serve".as_ref(), folder.as_os_str()])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it can be started");
    let mut line = String::new();
    let out = child.stdout.take().expect("it is piped");
    BufReader::new(out).read_line(&mut line).expect("it says where it listens");
    (child, line.trim().parse().expect("an address"))
}

fn client(at: &PeerAddress, node: u32, epoch: u32) -> Client {
    let epoch = Epoch(epoch);
    let registration = Registration {
        volume: "v".to_owned(),
        node: NodeId(node),
        incarnation: 1,
        position: StreamSeq(1),
        state: if epoch.0 == 0 { DataState::Fresh } else { DataState::Intact { epoch } },
        tcp: None,
        run_dir: String::new(),
        info: String::new(),
        ..Registration::default()
    };
    Client::new(ClientConfig {
        coordinator: at.clone(),
        cluster: CLUSTER,
        registration,
        keys: None,
    })
    .expect("descriptors")
}

/// Between two kills: the head evicts, the evicted catch up, over and over.
fn churn(clients: &mut [Client], newest: &mut u32, until: Instant) {
    let mut events = Vec::new();
    while Instant::now() < until {
        for client in clients.iter_mut() {
            client.poll(&mut events);
            let Some(view) = client.view().cloned() else { continue };
            *newest = view.epoch.0.max(*newest);
            let mut random = Random::new(u64::from(view.epoch.0));
            if let (Some(head), true) = (view.head(), view.chain.len() > 1) {
                let last = view.chain[1 + random.below(view.chain.len() as u64 - 1) as usize];
                clients[head.0 as usize - 1].suspect(last, view.epoch);
                break;
            }
            if let Some(node) = view.syncing.first() {
                let process = view.member(*node).map_or(0, |m| m.incarnation);
                clients[node.0 as usize - 1].caught_up(*node, process, view.epoch);
                break;
            }
        }
        events.clear();
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == "serve") {
        serve(&PathBuf::from(&args[2]));
    }
    let folder = std::env::temp_dir().join(format!("corbel-kill-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let seed = 21;
    let mut random = Random::new(seed);
    let mut newest = 0;
    for kill in 0..KILLS {
        let (mut child, at) = start(&folder);
        // What a client was told, it insists on: a coordinator that knew less would refuse it.
        let mut clients: Vec<Client> = (1..=3).map(|n| client(&at, n, newest)).collect();
        let wait = Instant::now();
        let mut events = Vec::new();
        while !clients.iter().all(|c| c.view().is_some_and(|v| v.epoch.0 >= newest.max(1))) {
            let late = wait.elapsed() > Duration::from_secs(10);
            assert!(!late, "seed {seed} kill {kill}: no view of epoch {newest}: {events:?}");
            clients.iter_mut().for_each(|c| c.poll(&mut events));
            std::thread::sleep(Duration::from_micros(200));
        }
        let life = Duration::from_micros(10_000 + random.below(60_000));
        churn(&mut clients, &mut newest, Instant::now() + life);
        child.kill().expect("it can be killed");
        child.wait().expect("it is dead");
    }
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
    assert!(newest > KILLS, "the chain must have changed often: epoch {newest}");
    println!("kill: {KILLS} kills, {newest} epochs, none went back");
}
