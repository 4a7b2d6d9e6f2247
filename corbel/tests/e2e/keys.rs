//! Nodes that speak over TCP: by certificates, and not with strangers.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use base::{NodeId, StreamSeq};
use cluster::coordinator::client::{self, Client, ClientConfig};
use cluster::coordinator::message::Message;
use cluster::coordinator::{CoordEvent, Coordinator as _, DataState, Registration, identity};
use cluster::tls::{KeyPlace, Keys};
use cluster::transport::PeerAddress;
use cluster::wire::FrameHead;
use serde_json::Value;

use super::harness::{Cluster, Scratch, corbel, json, text, wait_for};

const LONG: Duration = Duration::from_secs(60);
const NAME: &str = "local";

/// A key of a node's configuration.
fn configured(cluster: &Cluster, node: usize, key: &str) -> String {
    let file = fs::read_to_string(cluster.path(&format!("n{node}/corbel.toml"))).unwrap();
    let line = file.lines().find_map(|line| line.strip_prefix(&format!("{key} = ")));
    line.expect("the key").trim_matches('"').to_owned()
}

fn cert(args: &[&str], dir: &Path, out: &Path, cluster: &str) {
    let name = format!("cluster.id={cluster}");
    let mut all: Vec<&std::ffi::OsStr> = vec!["--set".as_ref(), name.as_ref(), "cert".as_ref()];
    all.extend(args.iter().map(AsRef::<std::ffi::OsStr>::as_ref));
    if args[0] == "authority" || args[0] == "revoke" {
        all.extend(["--dir".as_ref(), dir.as_os_str()]);
    } else {
        all.extend(["--authority".as_ref(), dir.as_os_str(), "--out".as_ref(), out.as_os_str()]);
    }
    text(&corbel(all));
}

/// Sends SIGHUP to the process of a pid file.
fn hang_up(pid_file: &Path) {
    let text = fs::read_to_string(pid_file).unwrap();
    let pid = text.split_whitespace().next().unwrap();
    assert!(std::process::Command::new("kill").args(["-HUP", pid]).status().unwrap().success());
}

fn keys(folder: &Path, role: &str, cluster: &str) -> Keys {
    let place = KeyPlace {
        folder: folder.to_owned(),
        role: role.parse().unwrap(),
        cluster: cluster.to_owned(),
        encrypts: true,
    };
    Keys::open(place).unwrap()
}

fn registration(node: u32, incarnation: u64) -> Registration {
    Registration {
        volume: NAME.to_owned(),
        node: NodeId(node),
        incarnation,
        position: StreamSeq(0),
        state: DataState::Fresh,
        tcp: Some("127.0.0.1:9".parse().unwrap()),
        run_dir: String::new(),
        info: String::new(),
        ..Registration::default()
    }
}

/// What the coordinator makes of somebody who registers as node 2.
fn registers(coordinator: &PeerAddress, keys: Option<Keys>) -> String {
    let (cluster, registration) = (identity(NAME), registration(2, u64::MAX / 2));
    let config = ClientConfig { coordinator: coordinator.clone(), cluster, registration, keys };
    let mut client = Client::new(config).unwrap();
    let mut heard = Vec::new();
    wait_for("an answer to a stranger", LONG, || {
        client.poll(&mut heard);
        heard.iter().find_map(|event| match event {
            CoordEvent::Trouble(why) => Some(why.clone()),
            CoordEvent::Connected | CoordEvent::View(_) => panic!("a stranger is node 2"),
            CoordEvent::Denied(_) => None,
        })
    })
}

fn chain(cluster: &Cluster, node: usize) -> (Value, usize) {
    let status = cluster.status(node);
    (status["epoch"].clone(), status["chain"].as_array().map_or(0, Vec::len))
}

fn chain_of(cluster: &Cluster, node: usize, members: usize) {
    wait_for(&format!("a chain of {members}"), LONG, || {
        (chain(cluster, node).1 == members).then_some(())
    });
}

#[test]
fn three_nodes_over_tcp_hear_each_other_and_nobody_else() {
    let Some(cluster) = Cluster::over_tcp(3, "64MiB") else { return };
    let ours = cluster.path("keys");
    text(&cluster.shell(2, "echo before > f; sync f").output().unwrap());
    assert_eq!(text(&cluster.shell(3, "cat f").output().unwrap()), "before\n");
    let (epoch, members) = chain(&cluster, 1);
    assert_eq!(members, 3);

    // Strangers: without keys, with those of another authority, of another cluster, of another node.
    let coordinator: PeerAddress = configured(&cluster, 1, "coordinator").parse().unwrap();
    let scratch = Scratch::new();
    let (theirs, elsewhere) = (scratch.path("theirs"), scratch.path("elsewhere"));
    cert(&["authority"], &theirs, &theirs, NAME);
    cert(&["issue", "node-2"], &theirs, &theirs, NAME);
    cert(&["issue", "admin"], &theirs, &theirs, NAME);
    cert(&["issue", "node-2"], &ours, &elsewhere, "elsewhere");
    cert(&["issue", "admin"], &ours, &elsewhere, "elsewhere");
    let none = registers(&coordinator, None);
    assert!(none.contains("TLS"), "{none}");
    let other = registers(&coordinator, Some(keys(&theirs, "node-2", NAME)));
    assert!(other.contains("another authority"), "{other}");
    let foreign = registers(&coordinator, Some(keys(&elsewhere, "node-2", "elsewhere")));
    assert!(
        foreign.contains("of no use in cluster") || foreign.contains("another cluster"),
        "{foreign}"
    );
    let node = registers(&coordinator, Some(keys(&ours, "node-1", NAME)));
    assert!(node.contains("registers as node 2") && node.contains("corbel cert issue"), "{node}");
    let asked = |keys: Option<&Keys>| {
        let views = client::ask(&coordinator, identity(NAME), keys, LONG).map(|views| views.len());
        let forced = client::force(&coordinator, identity(NAME), keys, NAME, LONG);
        (views.map_err(|e| e.to_string()), forced.unwrap_err().to_string())
    };
    for keys in
        [None, Some(keys(&theirs, "admin", NAME)), Some(keys(&elsewhere, "admin", "elsewhere"))]
    {
        let (views, forced) = asked(keys.as_ref());
        assert!(views.is_err(), "{views:?}");
        assert!(!forced.contains("nothing to force"), "{forced}");
    }
    let (views, forced) = asked(Some(&keys(&ours, "node-1", NAME)));
    assert!(views == Ok(1) && forced.contains("may not decide"), "{forced}");
    let (views, forced) = asked(Some(&keys(&ours, "admin", NAME)));
    assert!(views == Ok(1) && forced.contains("nothing to force"), "{forced}");

    // Plain words, to all ports.
    let (kind, body) = Message::Force { cluster: identity(NAME), volume: NAME.to_owned() }.encode();
    let words = [&FrameHead::new(kind, &[&body]).unwrap().encode()[..], &body].concat();
    let ports = (1..=3).map(|node| configured(&cluster, node, "listen"));
    for port in ports.chain([configured(&cluster, 1, "coordinator")]) {
        let mut stream = TcpStream::connect(port.parse::<SocketAddr>().unwrap()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(&words).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer.first(), Some(&0x15), "{port} says more than an alert");
    }
    assert_eq!(chain(&cluster, 1), (epoch.clone(), 3), "a stranger has changed the chain");

    // Keys are renewed while there is traffic, and nothing ends.
    let old = scratch.path("old.pem");
    fs::copy(ours.join("node-3.pem"), &old).unwrap();
    let mut writer =
        cluster.shell(1, "for i in $(seq 200); do echo $i >> g; sync g; done").spawn().unwrap();
    for role in ["node-1", "node-2", "node-3", "coordinator"] {
        cert(&["renew", role], &ours, &ours, NAME);
    }
    for node in 1..=3 {
        wait_for("renewed keys", LONG, || cluster.log(node).contains("read again").then_some(()));
    }
    assert!(writer.wait().unwrap().success());
    assert_eq!(chain(&cluster, 1), (epoch, 3), "renewed keys have cost a link");

    // Who says that the files have changed is believed at once: by the supervisor, which tells nicfs, and by the coordinator.
    let read = |log: &str| log.matches("read again").count();
    let before = read(&cluster.log(2));
    hang_up(&cluster.path("n2/run/serve.pid"));
    wait_for("keys read again", LONG, || (read(&cluster.log(2)) > before).then_some(()));
    assert_eq!(chain(&cluster, 1).1, 3, "nobody has ended by it");

    // Revoked, a node is out; with new keys it is back.
    for file in [&ours.join("node-3.pem"), &old] {
        cert(&["revoke", file.to_str().unwrap()], &ours, &ours, NAME);
    }
    chain_of(&cluster, 1, 2);
    cert(&["renew", "node-3"], &ours, &ours, NAME);
    chain_of(&cluster, 1, 3);

    // The head dies, and others go on with all that was written.
    text(&cluster.corbel(&["cluster", "kill", "1"]));
    text(&cluster.shell(2, "echo after >> f; sync f").output().unwrap());
    assert_eq!(
        text(&cluster.shell(3, "cat f; wc -l < g").output().unwrap()),
        "before\nafter\n200\n"
    );
    text(&cluster.corbel(&["cluster", "start", "1"]));
    chain_of(&cluster, 2, 3);
    assert_eq!(text(&cluster.shell(1, "cat f").output().unwrap()), "before\nafter\n");
}

#[test]
fn without_keys_nothing_is_spoken_over_tcp() {
    let scratch = Scratch::new();
    let state = format!("cluster.coordinator_dir={}", scratch.path("state").display());
    let keys = format!("cluster.keys={}", scratch.path("keys").display());
    let socket = format!("node.socket={}", scratch.path("run/sock").display());
    for role in [&["coordinator"][..], &["nicfs"], &[]] {
        let args = ["--json", "--set", &state, "--set", &keys, "--set", &socket, "serve"];
        let refused = corbel([&args[..], role].concat());
        assert_eq!(refused.status.code(), Some(3), "{role:?}: {refused:?}");
        let error = json(&refused)["error"].take();
        let said = format!("{} {}", error["message"], error["remedy"]);
        for word in ["authority.pem", "corbel cert", "cluster.authentication"] {
            assert!(said.contains(word), "{role:?}: {said}");
        }
    }
}
