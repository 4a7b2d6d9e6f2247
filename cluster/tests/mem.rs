//! The in-process transport, alone and under a wrapper that loses, doubles, delays and reorders
//! frames by a seed: what a simulator stacks on it.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use base::NodeId;
use base::random::Random;
use cluster::limits::BODY_MAX;
use cluster::mem::{MemNet, MemTransport};
use cluster::{
    Class, Counters, DownReason, Interest, NetEvent, Peer, PeerAddress, SendError, Transport,
};

/// Faults of a transport: to what is received, of `one_in` frames one each.
struct Flaky<T> {
    inner: T,
    random: Random,
    one_in: u64,
    late: VecDeque<NetEvent>,
}

impl<T: Transport> Transport for Flaky<T> {
    fn node(&self) -> NodeId {
        self.inner.node()
    }

    fn set_peers(&mut self, peers: &[Peer]) {
        self.inner.set_peers(peers);
    }

    fn send(
        &mut self,
        to: NodeId,
        class: Class,
        kind: u16,
        parts: &[&[u8]],
    ) -> Result<(), SendError> {
        self.inner.send(to, class, kind, parts)
    }

    fn queued(&self, to: NodeId, class: Class) -> usize {
        self.inner.queued(to, class)
    }

    fn is_up(&self, node: NodeId) -> bool {
        self.inner.is_up(node)
    }

    fn poll(&mut self, timeout: Option<Duration>, out: &mut Vec<NetEvent>) {
        let mut events = Vec::new();
        self.inner.poll(timeout, &mut events);
        if self.random.chance(1, 2) {
            out.extend(self.late.drain(..));
        }
        for event in events {
            if !matches!(event, NetEvent::Frame { .. }) {
                out.push(event);
                continue;
            }
            match self.random.below(self.one_in) {
                0 => {}
                1 => out.extend([event.clone(), event]),
                2 => self.late.push_back(event),
                _ => out.push(event),
            }
        }
    }

    fn register(&mut self, fd: BorrowedFd<'_>, token: u64, i: Interest) -> std::io::Result<()> {
        self.inner.register(fd, token, i)
    }

    fn deregister(&mut self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        self.inner.deregister(fd)
    }

    fn set_spin(&mut self, spin: Duration) {
        self.inner.set_spin(spin);
    }

    fn disconnect(&mut self, node: NodeId) {
        self.inner.disconnect(node);
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

fn peers(count: u32) -> Vec<Peer> {
    let address = PeerAddress::Local("/nowhere".into());
    (1..=count).map(|n| Peer { node: NodeId(n), address: address.clone() }).collect()
}

fn two(net: &MemNet) -> (MemTransport, MemTransport) {
    let (mut one, mut two) = (net.join(NodeId(1), 1), net.join(NodeId(2), 1));
    one.set_peers(&peers(2));
    two.set_peers(&peers(2));
    (one, two)
}

fn poll(transport: &mut dyn Transport) -> Vec<NetEvent> {
    let mut events = Vec::new();
    transport.poll(None, &mut events);
    events
}

#[test]
fn links_frames_and_death() {
    let net = MemNet::new();
    let (mut one, mut two) = two(&net);
    assert_eq!(poll(&mut one), [NetEvent::Up { node: NodeId(2), incarnation: 1 }]);
    one.send(NodeId(2), Class::Bulk, 4, &[b"a", b"b"]).unwrap();
    assert_eq!(one.send(NodeId(3), Class::Bulk, 4, &[]), Err(SendError::Down));
    assert_eq!(one.send(NodeId(2), Class::Bulk, 0xff00, &[]), Err(SendError::ReservedKind));
    let frame =
        NetEvent::Frame { from: NodeId(1), class: Class::Bulk, kind: 4, body: b"ab".to_vec() };
    assert_eq!(poll(&mut two), [NetEvent::Up { node: NodeId(1), incarnation: 1 }, frame]);
    drop(two);
    let down = NetEvent::Down { node: NodeId(2), reason: DownReason::Closed };
    assert_eq!(poll(&mut one), [down]);
    let mut again = net.join(NodeId(2), 2);
    again.set_peers(&peers(2));
    assert_eq!(poll(&mut one), [NetEvent::Up { node: NodeId(2), incarnation: 2 }]);
    one.disconnect(NodeId(2));
    let ours = NetEvent::Down { node: NodeId(2), reason: DownReason::Ours };
    assert_eq!(poll(&mut one), [ours, NetEvent::Up { node: NodeId(2), incarnation: 2 }]);
}

#[test]
fn the_queue_is_bounded() {
    let net = MemNet::new();
    let (mut one, mut two) = two(&net);
    poll(&mut one);
    let body = vec![0u8; BODY_MAX];
    let mut sent = 0;
    while one.send(NodeId(2), Class::Bulk, 1, &[&body]).is_ok() {
        sent += 1;
        assert!(sent < 100);
    }
    assert_eq!(one.send(NodeId(2), Class::Bulk, 1, &[&body]), Err(SendError::Full));
    assert!(one.send(NodeId(2), Class::LowLatency, 1, &[&body]).is_ok());
    assert_eq!(poll(&mut two).len(), 1 + sent + 1);
    assert_eq!(poll(&mut one), [NetEvent::Drained { node: NodeId(2), class: Class::Bulk }]);
    assert!(one.send(NodeId(2), Class::Bulk, 1, &[&body]).is_ok());
}

/// Same seed, same history; another seed, another.
#[test]
fn faults_are_deterministic() {
    let history = |seed: u64| {
        let net = MemNet::new();
        let (mut one, inner) = two(&net);
        let mut two = Flaky { inner, random: Random::new(seed), one_in: 8, late: VecDeque::new() };
        let mut got = Vec::new();
        for kind in 0..500u16 {
            one.send(NodeId(2), Class::LowLatency, kind, &[]).unwrap();
            let frames = poll(&mut two).into_iter().filter_map(|e| match e {
                NetEvent::Frame { kind, .. } => Some(kind),
                _ => None,
            });
            got.extend(frames);
        }
        got
    };
    let one = history(1);
    assert_eq!(one, history(1));
    assert_ne!(one, history(2));
    assert!(!one.is_sorted(), "some are delayed");
    let lost = (0..500u16).filter(|k| !one.contains(k)).count();
    assert!((20..150).contains(&lost), "{lost} lost");
}
