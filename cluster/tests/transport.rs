//! Two and three transports in one process, over TCP and over shared memory: the same tests.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use base::NodeId;
use base::random::Random;
use cluster::limits::BODY_MAX;
use cluster::net::{Net, NetConfig, Waker};
use cluster::transport::socket_path;
use cluster::{Class, DownReason, Interest, NetEvent, Peer, PeerAddress, SendError, Transport};

const CLUSTER: u128 = 0x1234_5678;
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    Tcp,
    Shm,
}

struct RunDir(PathBuf);

impl RunDir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("corbel-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(node: u32, incarnation: u64, way: Way, dir: &RunDir) -> NetConfig {
    let mut config = NetConfig::new(NodeId(node), incarnation, CLUSTER);
    match way {
        Way::Tcp => config.tcp = Some("127.0.0.1:0".parse().unwrap()),
        Way::Shm => config.run_dir = Some(dir.0.clone()),
    }
    config.spin = Duration::ZERO;
    config
}

fn address(net: &Net, way: Way, dir: &RunDir) -> PeerAddress {
    match way {
        Way::Tcp => PeerAddress::Tcp(net.tcp_address().unwrap()),
        Way::Shm => PeerAddress::Local(socket_path(&dir.0, net.node())),
    }
}

fn introduce(nets: &mut [Net], way: Way, dir: &RunDir) {
    let peers: Vec<Peer> =
        nets.iter().map(|n| Peer { node: n.node(), address: address(n, way, dir) }).collect();
    for net in nets.iter_mut() {
        net.set_peers(&peers);
    }
}

/// Polls all of `nets` in turn until `done`; the events of each since the start.
fn until(nets: &mut [Net], what: &str, mut done: impl FnMut(&[Vec<NetEvent>]) -> bool) {
    let start = Instant::now();
    let mut seen: Vec<Vec<NetEvent>> = vec![Vec::new(); nets.len()];
    while !done(&seen) {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen: {seen:?}");
        for (net, seen) in nets.iter_mut().zip(&mut seen) {
            net.poll(Some(Duration::from_millis(1)), seen);
        }
    }
}

fn ups(events: &[NetEvent]) -> usize {
    events.iter().filter(|e| matches!(e, NetEvent::Up { .. })).count()
}

fn downs(events: &[NetEvent]) -> usize {
    events.iter().filter(|e| matches!(e, NetEvent::Down { .. })).count()
}

fn frames(events: &[NetEvent]) -> usize {
    events.iter().filter(|e| matches!(e, NetEvent::Frame { .. })).count()
}

fn nets(count: u32, way: Way, dir: &RunDir) -> Vec<Net> {
    let mut nets: Vec<Net> =
        (1..=count).map(|n| Net::new(config(n, 1, way, dir)).unwrap()).collect();
    introduce(&mut nets, way, dir);
    until(&mut nets, "all links up", |seen| seen.iter().all(|s| ups(s) == count as usize - 1));
    nets
}

fn in_order(way: Way) {
    let dir = RunDir::new(&format!("order-{way:?}"));
    let mut nets = nets(3, way, &dir);
    let mut random = Random::new(11);
    let mut sent: Vec<Vec<u8>> = Vec::new();
    let mut got: Vec<Vec<u8>> = Vec::new();
    let lens = [0usize, 1, 24, 4096, 65_512, 65_536, 65_537, 700_000, BODY_MAX];
    let start = Instant::now();
    let mut events = Vec::new();
    while got.len() < 300 {
        assert!(start.elapsed() < PATIENCE, "{way:?}: {} of 300 arrived", got.len());
        if sent.len() < 300 {
            let pick =
                lens[random.below(if sent.len().is_multiple_of(50) { 9 } else { 7 }) as usize];
            let mut body = vec![0u8; pick];
            random.fill(&mut body);
            let cut = random.below(pick as u64 + 1) as usize;
            let kind = sent.len() as u16;
            match nets[0].send(NodeId(3), Class::Bulk, kind, &[&body[..cut], &[], &body[cut..]]) {
                Ok(()) => sent.push(body),
                Err(error) => assert_eq!(error, SendError::Full),
            }
        }
        nets[0].poll(Some(Duration::ZERO), &mut Vec::new());
        nets[2].poll(Some(Duration::ZERO), &mut events);
        for event in events.drain(..) {
            let NetEvent::Frame { from, class, kind, body } = event else {
                panic!("{way:?}: unexpected {event:?}");
            };
            assert_eq!((from, class, kind), (NodeId(1), Class::Bulk, got.len() as u16));
            assert!(body == sent[got.len()], "{way:?}: body {} differs", got.len());
            nets[2].recycle(body.clone());
            got.push(body);
        }
    }
    assert_eq!(nets[2].counters().frames_in, 300);
    let too_long = vec![0u8; BODY_MAX + 1];
    let refused = nets[0].send(NodeId(2), Class::Bulk, 1, &[&too_long]);
    assert_eq!(refused, Err(SendError::TooLong));
    let refused = nets[0].send(NodeId(2), Class::Bulk, 0xff01, &[]);
    assert_eq!(refused, Err(SendError::ReservedKind));
    assert_eq!(nets[0].send(NodeId(9), Class::Bulk, 1, &[]), Err(SendError::Down));
}

#[test]
fn frames_arrive_in_order_over_tcp() {
    in_order(Way::Tcp);
}

#[test]
fn frames_arrive_in_order_over_shm() {
    in_order(Way::Shm);
}

/// A peer that does not read: the queue fills to its limit and not beyond, Full is reported, and
/// Drained once it reads; nothing is lost.
fn slow_reader(way: Way) {
    let dir = RunDir::new(&format!("slow-{way:?}"));
    let mut nets = nets(2, way, &dir);
    let body = vec![7u8; 256 << 10];
    let mut sent = 0;
    while let Ok(()) = nets[0].send(NodeId(2), Class::Bulk, 1, &[&body]) {
        sent += 1;
        assert!(sent < 1000, "{way:?}: nothing bounds the queue");
    }
    let refused = nets[0].send(NodeId(2), Class::Bulk, 1, &[&body]);
    assert_eq!(refused, Err(SendError::Full));
    assert!(nets[0].queued(NodeId(2), Class::Bulk) <= (16 << 20) + body.len() + 64);
    assert_eq!(nets[0].counters().full, 2);
    // The other class is not held up.
    nets[0].send(NodeId(2), Class::LowLatency, 2, &[b"urgent"]).unwrap();
    let mut urgent = Vec::new();
    nets[1].poll(Some(PATIENCE), &mut urgent);
    assert!(
        matches!(&urgent[0], NetEvent::Frame { class: Class::LowLatency, body, .. } if body == b"urgent"),
        "{way:?}: the urgent frame came behind the bulk"
    );
    let before = frames(&urgent) - 1;
    until(&mut nets, "drained and received", |seen| {
        seen[0]
            .iter()
            .any(|e| matches!(e, NetEvent::Drained { node: NodeId(2), class: Class::Bulk }))
            && before + frames(&seen[1]) == sent
    });
    nets[0].send(NodeId(2), Class::Bulk, 1, &[&body]).unwrap();
}

#[test]
fn a_slow_reader_meets_a_bounded_queue_over_tcp() {
    slow_reader(Way::Tcp);
}

#[test]
fn a_slow_reader_meets_a_bounded_queue_over_shm() {
    slow_reader(Way::Shm);
}

/// What a peer sent before it died still arrives, then exactly one Down; its next incarnation is
/// linked again, and an older one is refused.
fn death_and_return(way: Way, dying: usize) {
    let dir = RunDir::new(&format!("death-{way:?}-{dying}"));
    let mut nets = nets(2, way, &dir);
    let old = address(&nets[dying], way, &dir);
    let survivor = NodeId(2 - dying as u32);
    nets[dying].send(survivor, Class::LowLatency, 5, &[b"last words"]).unwrap();
    let node = nets[dying].node();
    drop(nets.remove(dying));
    let mut events = Vec::new();
    let start = Instant::now();
    while downs(&events) == 0 {
        assert!(start.elapsed() < PATIENCE, "{way:?}: no Down in {events:?}");
        nets[0].poll(Some(Duration::from_millis(10)), &mut events);
    }
    assert!(matches!(&events[0], NetEvent::Frame { kind: 5, .. }), "{way:?}: {events:?}");
    let reason = DownReason::Closed;
    assert_eq!(events[1], NetEvent::Down { node, reason }, "{way:?}");
    assert_eq!(nets[0].send(node, Class::Bulk, 1, &[]), Err(SendError::Down));

    let mut again = config(node.0, 2, way, &dir);
    if let PeerAddress::Tcp(at) = old {
        again.tcp = Some(at);
    }
    nets.insert(dying, Net::new(again).unwrap());
    introduce(&mut nets, way, &dir);
    until(&mut nets, "return", |seen| ups(&seen[0]) == 1 && ups(&seen[1]) == 1);
    if dying == 0 {
        let mut late = vec![Net::new(config(node.0, 1, Way::Tcp, &dir)).unwrap()];
        let peer = Peer { node: survivor, address: address(&nets[1], way, &dir) };
        late[0].set_peers(&[peer]);
        let others = &mut nets;
        until(&mut late, "refusal of the old incarnation", |seen| {
            for net in others.iter_mut() {
                net.poll(Some(Duration::ZERO), &mut Vec::new());
            }
            seen[0].iter().any(
                |e| matches!(e, NetEvent::Rejected { what, .. } if what.contains("OldIncarnation")),
            )
        });
        assert!(nets[1].is_up(node), "the late process must not disturb the link");
    }
}

#[test]
fn a_dead_dialler_is_noticed_and_returns_over_tcp() {
    death_and_return(Way::Tcp, 0);
}

#[test]
fn a_dead_acceptor_is_noticed_and_returns_over_tcp() {
    death_and_return(Way::Tcp, 1);
}

#[test]
fn a_dead_dialler_is_noticed_and_returns_over_shm() {
    death_and_return(Way::Shm, 0);
}

#[test]
fn a_dead_acceptor_is_noticed_and_returns_over_shm() {
    death_and_return(Way::Shm, 1);
}

/// Both ends sleep between messages; every wake-up must come through.
fn sleepers(way: Way) {
    let dir = RunDir::new(&format!("sleep-{way:?}"));
    let mut nets = nets(2, way, &dir);
    let mut two = nets.pop().unwrap();
    let mut one = nets.pop().unwrap();
    const ROUNDS: u32 = 2000;
    let echo = std::thread::spawn(move || {
        let mut events = Vec::new();
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE);
            two.poll(Some(PATIENCE), &mut events);
            for event in events.drain(..) {
                match event {
                    NetEvent::Frame { from, class, kind, body } => {
                        two.send(from, class, kind, &[&body]).unwrap();
                    }
                    NetEvent::Down { .. } => return two.counters(),
                    other => panic!("{other:?}"),
                }
            }
        }
    });
    let mut events = Vec::new();
    for round in 0..ROUNDS {
        let class = Class::ALL[(round % 2) as usize];
        one.send(NodeId(2), class, 3, &[&round.to_le_bytes(), &[0u8; 4000]]).unwrap();
        let start = Instant::now();
        while frames(&events) == 0 {
            assert!(start.elapsed() < PATIENCE, "{way:?}: round {round} got no answer");
            one.poll(Some(PATIENCE), &mut events);
        }
        let NetEvent::Frame { body, .. } = &events[0] else { panic!("{events:?}") };
        assert_eq!(body[..4], round.to_le_bytes());
        events.clear();
    }
    drop(one);
    assert_eq!(echo.join().unwrap().frames_in, u64::from(ROUNDS));
}

#[test]
fn no_wake_up_is_lost_over_tcp() {
    sleepers(Way::Tcp);
}

#[test]
fn no_wake_up_is_lost_over_shm() {
    sleepers(Way::Shm);
}

/// Frames far larger than the ring, both ways at once, with both ends sleeping for room. Many times: a doorbell
/// can be taken for an older one.
#[test]
fn rings_smaller_than_their_frames() {
    (0..20).for_each(|_| small_rings());
}

fn small_rings() {
    let dir = RunDir::new("small-ring");
    let mut nets = nets(2, Way::Shm, &dir);
    let mut two = nets.pop().unwrap();
    let mut one = nets.pop().unwrap();
    const COUNT: usize = 12;
    let run = |mut net: Net, to: NodeId| {
        let body = vec![to.0 as u8; 3 << 20];
        let (mut sent, mut got) = (0, 0);
        let mut events = Vec::new();
        let start = Instant::now();
        while got < COUNT || sent < COUNT || net.queued(to, Class::LowLatency) > 0 {
            assert!(start.elapsed() < PATIENCE, "stuck at {sent} sent, {got} received");
            // Until it is refused: then there is an event when it may go on.
            while sent < COUNT && net.send(to, Class::LowLatency, 1, &[&body]).is_ok() {
                sent += 1;
            }
            // Long, so that a lost wake-up shows; but the last bytes leave without an event.
            let all = got == COUNT && sent == COUNT;
            let wait = if all { Duration::from_millis(5) } else { PATIENCE * 2 };
            net.poll(Some(wait), &mut events);
            got += frames(&events);
            events.clear();
        }
        net
    };
    one.set_spin(Duration::ZERO);
    two.set_spin(Duration::ZERO);
    let other = std::thread::spawn(move || run(two, NodeId(1)));
    let one = run(one, NodeId(2));
    let two = other.join().unwrap();
    assert_eq!(one.counters().frames_in, COUNT as u64);
    assert_eq!(two.counters().frames_in, COUNT as u64);
}

#[test]
fn peers_can_change_at_run_time() {
    let dir = RunDir::new("peers");
    let mut nets = nets(3, Way::Shm, &dir);
    let two = Peer { node: NodeId(2), address: address(&nets[1], Way::Shm, &dir) };
    nets[0].set_peers(std::slice::from_ref(&two));
    assert!(!nets[0].is_up(NodeId(3)));
    assert!(nets[0].is_up(NodeId(2)));
    until(&mut nets, "down at both", |seen| downs(&seen[0]) == 1 && downs(&seen[2]) == 1);
    let three = Peer { node: NodeId(3), address: address(&nets[2], Way::Shm, &dir) };
    nets[0].set_peers(&[two, three]);
    until(&mut nets, "up at both", |seen| ups(&seen[0]) == 1 && ups(&seen[2]) == 1);
}

#[test]
fn foreign_descriptors_wake_the_loop() {
    let dir = RunDir::new("waker");
    let mut net = Net::new(config(1, 1, Way::Tcp, &dir)).unwrap();
    let waker = std::sync::Arc::new(Waker::new().unwrap());
    net.register(waker.as_fd(), 77, Interest::READ).unwrap();
    let far = std::sync::Arc::clone(&waker);
    let thread = std::thread::spawn(move || far.wake());
    let mut events = Vec::new();
    net.poll(Some(PATIENCE), &mut events);
    thread.join().unwrap();
    assert_eq!(events, [NetEvent::Ready { token: 77, readable: true, writable: false }]);
    waker.clear();
    events.clear();
    net.poll(Some(Duration::from_millis(5)), &mut events);
    assert_eq!(events, []);
    net.deregister(waker.as_fd()).unwrap();
    waker.wake();
    net.poll(Some(Duration::from_millis(5)), &mut events);
    assert_eq!(events, []);
}
