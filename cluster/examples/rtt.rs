//! Round trips between two processes' worth of loops: `rtt tcp|shm SPIN_US [SAME_CPU]`.
//! Prints p50 and p99 for 64 B and 4 KiB, and bulk throughput.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use base::NodeId;
use cluster::net::{Net, NetConfig};
use cluster::transport::socket_path;
use cluster::{Class, NetEvent, Peer, PeerAddress, SendError, Transport};

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).expect("this machine has that processor");
}

fn wait_up(net: &mut Net) {
    let mut events = Vec::new();
    while !events.iter().any(|e| matches!(e, NetEvent::Up { .. })) {
        net.poll(Some(Duration::from_secs(5)), &mut events);
    }
}

fn echo(mut net: Net, pins: Option<usize>) {
    if let Some(cpu) = pins {
        pin(cpu);
    }
    let mut events = Vec::new();
    loop {
        net.poll(None, &mut events);
        for event in events.drain(..) {
            match event {
                NetEvent::Frame { from, class: Class::LowLatency, kind, .. } => {
                    net.send(from, Class::LowLatency, kind, &[&[0u8; 16]]).expect("room");
                }
                NetEvent::Frame { from, kind, body, .. } => {
                    net.recycle(body);
                    net.send(from, Class::LowLatency, kind, &[]).expect("room");
                }
                NetEvent::Down { .. } => return,
                _ => {}
            }
        }
    }
}

fn round_trips(net: &mut Net, len: usize, gap: Duration) {
    let body = vec![1u8; len];
    let mut times = Vec::new();
    let mut events = Vec::new();
    for _ in 0..10_000 {
        let start = Instant::now();
        net.send(NodeId(2), Class::LowLatency, 1, &[&body]).expect("room");
        while !events.iter().any(|e| matches!(e, NetEvent::Frame { .. })) {
            net.poll(None, &mut events);
        }
        events.clear();
        times.push(start.elapsed());
        if !gap.is_zero() {
            std::thread::sleep(gap);
            if times.len() == 1000 {
                break;
            }
        }
    }
    times.sort();
    let at = |p: usize| times[times.len() * p / 100].as_nanos() as f64 / 1000.0;
    println!("{len:5} B  gap {gap:?}: p50 {:.1} us  p99 {:.1} us", at(50), at(99));
}

fn bulk(net: &mut Net) {
    let body = vec![1u8; 4 << 20];
    let start = Instant::now();
    let (mut sent, mut acked) = (0, 0);
    let mut events = Vec::new();
    while acked < 256 {
        while sent < 256 && sent - acked < 4 {
            match net.send(NodeId(2), Class::Bulk, 2, &[&body]) {
                Ok(()) => sent += 1,
                Err(SendError::Full) => break,
                Err(error) => panic!("{error}"),
            }
        }
        net.poll(None, &mut events);
        acked += events.iter().filter(|e| matches!(e, NetEvent::Frame { .. })).count();
        events.clear();
    }
    println!("bulk: {:.0} MB/s", (256 * 4) as f64 * 1.048_576 / start.elapsed().as_secs_f64());
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let shm = args[1] == "shm";
    let spin = Duration::from_micros(args[2].parse().expect("microseconds"));
    let pins = match args.get(3).map(String::as_str) {
        Some("same") => Some((0, 0)),
        Some("cross") => Some((0, 1)),
        _ => None,
    };
    let dir = std::env::temp_dir().join(format!("corbel-rtt-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a run directory");
    let make = |node: u32| {
        let mut config = NetConfig::new(NodeId(node), 1, 7);
        config.spin = spin;
        config.tcp = (!shm).then(|| "127.0.0.1:0".parse().expect("an address"));
        config.run_dir = shm.then(|| PathBuf::from(&dir));
        Net::new(config).expect("listening")
    };
    let (mut one, mut two) = (make(1), make(2));
    let address = |net: &Net| match net.tcp_address() {
        Some(at) => PeerAddress::Tcp(at),
        None => PeerAddress::Local(socket_path(&dir, net.node())),
    };
    let peers: Vec<Peer> =
        [&one, &two].map(|n| Peer { node: n.node(), address: address(n) }).to_vec();
    one.set_peers(&peers);
    two.set_peers(&peers);
    let thread = std::thread::spawn(move || {
        wait_up(&mut two);
        echo(two, pins.map(|p| p.1));
    });
    if let Some((cpu, _)) = pins {
        pin(cpu);
    }
    wait_up(&mut one);
    for gap in [Duration::ZERO, Duration::from_micros(500)] {
        round_trips(&mut one, 64, gap);
        round_trips(&mut one, 4096, gap);
    }
    bulk(&mut one);
    println!("{:?}", one.counters());
    drop(one);
    thread.join().expect("the echo thread");
    let _ = std::fs::remove_dir_all(&dir);
}
