//! What strangers and broken peers may put on a socket: each gets a precise error and a counter,
//! loses its connection, and disturbs nobody else.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use base::NodeId;
use base::random::Random;
use cluster::limits::{BODY_MAX, STRANGERS_MAX};
use cluster::net::{Net, NetConfig};
use cluster::transport::socket_path;
use cluster::wire::{FRAME_HEAD, FrameHead, Hello, Refusal};
use cluster::{Class, DownReason, NetEvent, Peer, PeerAddress, Transport};

const CLUSTER: u128 = 7;
const PATIENCE: Duration = Duration::from_secs(10);
const HELLO: u16 = 0xff01;
const WELCOME: u16 = 0xff02;
const REFUSAL: u16 = 0xff03;

fn victim() -> Net {
    let mut config = NetConfig::new(NodeId(2), 1, CLUSTER);
    config.tcp = Some("127.0.0.1:0".parse().unwrap());
    config.spin = Duration::ZERO;
    let mut net = Net::new(config).unwrap();
    let nowhere = PeerAddress::Tcp("127.0.0.1:9".parse().unwrap());
    net.set_peers(&[Peer { node: NodeId(1), address: nowhere }]);
    net
}

fn frame(kind: u16, body: &[u8]) -> Vec<u8> {
    let head = FrameHead::new(kind, &[body]).unwrap();
    [&head.encode()[..], body].concat()
}

fn hello(class: Class, session: u64) -> Hello {
    Hello {
        class,
        from: NodeId(1),
        to: NodeId(2),
        cluster: CLUSTER,
        incarnation: 1,
        session,
        ring_bytes: None,
    }
}

fn poll_until(net: &mut Net, what: &str, mut done: impl FnMut(&NetEvent) -> bool) {
    let start = Instant::now();
    let mut all = Vec::new();
    loop {
        let from = all.len();
        net.poll(Some(Duration::from_millis(5)), &mut all);
        if all[from..].iter().any(&mut done) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{what} did not happen: {all:?}");
    }
}

fn rejected(net: &mut Net, needle: &str) {
    poll_until(
        net,
        needle,
        |e| matches!(e, NetEvent::Rejected { what, .. } if what.contains(needle)),
    );
}

fn connect(net: &Net) -> TcpStream {
    let stream = TcpStream::connect(net.tcp_address().unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn read_frame(stream: &mut impl Read) -> (u16, Vec<u8>) {
    let mut head = [0u8; FRAME_HEAD];
    stream.read_exact(&mut head).unwrap();
    let head = FrameHead::decode(&head, BODY_MAX).unwrap();
    let mut body = vec![0u8; head.len as usize];
    stream.read_exact(&mut body).unwrap();
    (head.kind, body)
}

fn closed(stream: &mut TcpStream) {
    // Reset counts as closed: what we sent was not read to its end.
    assert!(matches!(stream.read(&mut [0u8; 64]), Ok(0) | Err(_)), "still open");
}

/// Both connections of a link, made by hand.
fn link(net: &mut Net, session: u64) -> (TcpStream, TcpStream) {
    let (mut low, mut bulk) = (connect(net), connect(net));
    low.write_all(&frame(HELLO, &hello(Class::LowLatency, session).encode())).unwrap();
    bulk.write_all(&frame(HELLO, &hello(Class::Bulk, session).encode())).unwrap();
    poll_until(net, "up", |e| matches!(e, NetEvent::Up { node: NodeId(1), incarnation: 1 }));
    assert_eq!(read_frame(&mut low).0, WELCOME);
    assert_eq!(read_frame(&mut bulk).0, WELCOME);
    (low, bulk)
}

#[test]
fn strangers_with_garbage_are_turned_away() {
    let mut net = victim();
    let (mut low, _bulk) = link(&mut net, 1);
    let mut random = Random::new(3);
    for round in 1..=50 {
        let mut stream = connect(&net);
        let mut bytes = vec![0u8; 24 + random.below(400) as usize];
        random.fill(&mut bytes);
        stream.write_all(&bytes).unwrap();
        rejected(&mut net, "magic");
        closed(&mut stream);
        assert_eq!(net.counters().corrupt, round);
    }
    low.write_all(&frame(9, b"still here")).unwrap();
    poll_until(
        &mut net,
        "the frame of the peer",
        |e| matches!(e, NetEvent::Frame { kind: 9, body, .. } if body == b"still here"),
    );
}

#[test]
fn every_wrong_head_has_its_own_error() {
    let mut net = victim();
    let right = frame(HELLO, &hello(Class::Bulk, 1).encode());
    let signed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = right.clone();
        change(&mut bytes);
        let crc = base::crc32c(0, &bytes[..20]);
        bytes[20..24].copy_from_slice(&crc.to_le_bytes());
        bytes
    };
    let mut flipped = right.clone();
    flipped[9] ^= 4;
    let cases: [(Vec<u8>, &str); 8] = [
        (flipped, "head does not match its checksum"),
        (signed(&|b| b[4] = 2), "unknown version"),
        (signed(&|b| b[5] |= 0x80), "unknown flag"),
        (signed(&|b| b[17] = 1), "reserved"),
        (signed(&|b| b[8..12].copy_from_slice(&u32::MAX.to_le_bytes())), "longer than the limit"),
        // Fit for a peer, too long for a stranger.
        (signed(&|b| b[8..12].copy_from_slice(&2000u32.to_le_bytes())), "longer than the limit"),
        (signed(&|b| b[30] ^= 1), "body does not match its checksum"),
        (frame(5, b"no hello"), "before the hello"),
    ];
    for (bytes, error) in cases {
        let before = net.counters().corrupt;
        let mut stream = connect(&net);
        stream.write_all(&bytes).unwrap();
        rejected(&mut net, error);
        closed(&mut stream);
        assert_eq!(net.counters().corrupt, before + 1, "{error}");
    }
}

#[test]
fn wrong_hellos_are_answered_with_a_refusal() {
    let mut net = victim();
    let right = hello(Class::Bulk, 1);
    let cases = [
        (Hello { cluster: 8, ..right }, Refusal::WrongCluster, "check the config"),
        (Hello { to: NodeId(3), ..right }, Refusal::WrongNode, "this is node 2"),
        (Hello { from: NodeId(4), ..right }, Refusal::UnknownPeer, "not among the peers"),
        (Hello { ring_bytes: Some(4096), ..right }, Refusal::Malformed, "local socket only"),
    ];
    for (hello, refusal, needle) in cases {
        let mut stream = connect(&net);
        stream.write_all(&frame(HELLO, &hello.encode())).unwrap();
        rejected(&mut net, needle);
        let (kind, body) = read_frame(&mut stream);
        assert_eq!(kind, REFUSAL);
        let (code, text) = Refusal::decode(&body).unwrap();
        assert_eq!(code, refusal);
        assert!(text.contains(needle), "{text}");
        closed(&mut stream);
    }
    assert_eq!(net.counters().refused, 4);
}

#[test]
fn a_peer_that_breaks_the_protocol_loses_its_link() {
    let mut net = victim();
    let mut flipped = frame(1, &[5u8; 100]);
    flipped[60] ^= 1;
    let mut long = FrameHead { kind: 1, len: BODY_MAX as u32 + 1, body_crc: None }.encode();
    let crc = base::crc32c(0, &long[..20]);
    long[20..24].copy_from_slice(&crc.to_le_bytes());
    let cases = [(flipped, "body does not match"), (long.to_vec(), "longer than the limit")];
    for (session, (bytes, error)) in (1..).zip(cases) {
        let (mut low, mut bulk) = link(&mut net, session);
        bulk.write_all(&bytes).unwrap();
        poll_until(&mut net, error, |e| {
            matches!(e, NetEvent::Down { node: NodeId(1), reason: DownReason::Protocol(what) }
                if what.contains(error))
        });
        closed(&mut low);
        closed(&mut bulk);
        assert_eq!(net.counters().corrupt, session);
    }
    // A body that is announced and never comes costs its memory once and nothing else.
    let (mut low, mut bulk) = link(&mut net, 9);
    let head = FrameHead { kind: 1, len: BODY_MAX as u32, body_crc: None };
    bulk.write_all(&head.encode()).unwrap();
    low.write_all(&frame(2, b"x")).unwrap();
    poll_until(&mut net, "the other class", |e| matches!(e, NetEvent::Frame { kind: 2, .. }));
}

#[test]
fn a_newer_session_replaces_and_an_older_is_refused() {
    let mut net = victim();
    let (mut old, _old_bulk) = link(&mut net, 5);
    let mut low = connect(&net);
    low.write_all(&frame(HELLO, &hello(Class::LowLatency, 6).encode())).unwrap();
    poll_until(&mut net, "replaced", |e| {
        matches!(e, NetEvent::Down { reason: DownReason::Replaced, .. })
    });
    closed(&mut old);
    let mut late = connect(&net);
    late.write_all(&frame(HELLO, &hello(Class::Bulk, 5).encode())).unwrap();
    rejected(&mut net, "came after");
    let mut twice = connect(&net);
    twice.write_all(&frame(HELLO, &hello(Class::LowLatency, 6).encode())).unwrap();
    rejected(&mut net, "connected already");
}

#[test]
fn silent_strangers_are_limited_in_number_and_time() {
    let mut net = victim();
    let mut silent: Vec<TcpStream> = (0..STRANGERS_MAX + 10).map(|_| connect(&net)).collect();
    let start = Instant::now();
    let mut events = Vec::new();
    while net.counters().refused < 10 {
        assert!(start.elapsed() < PATIENCE, "{:?}", net.counters());
        net.poll(Some(Duration::from_millis(5)), &mut events);
    }
    while start.elapsed() < Duration::from_millis(2300) {
        net.poll(Some(Duration::from_millis(50)), &mut events);
    }
    for stream in &mut silent {
        closed(stream);
    }
    link(&mut net, 1);
}

/// Over a local socket: no ring, and none that could be cut under our feet.
#[test]
fn wrong_rings_are_refused() {
    let dir = std::env::temp_dir().join(format!("corbel-ringless-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let mut config = NetConfig::new(NodeId(2), 1, CLUSTER);
    config.run_dir = Some(dir.clone());
    let mut net = Net::new(config).unwrap();
    let address = PeerAddress::Local(socket_path(&dir, NodeId(1)));
    net.set_peers(&[Peer { node: NodeId(1), address }]);
    let with_ring =
        |session, bytes| Hello { ring_bytes: Some(bytes), ..hello(Class::Bulk, session) };
    let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 4096 + 2 * 65536).unwrap();
    let cases = [
        (with_ring(1, 65536), None, "no file came along"),
        (with_ring(2, 65537), Some(&file), "power of two"),
        (with_ring(4, 65536), Some(&file), "not sealed"),
    ];
    for (hello, file, error) in cases {
        let stream = UnixStream::connect(socket_path(&dir, NodeId(2))).unwrap();
        let bytes = frame(HELLO, &hello.encode());
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = file.iter().map(std::os::fd::AsFd::as_fd).collect();
        if !fds.is_empty() {
            assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
        }
        let iov = [std::io::IoSlice::new(&bytes)];
        let flags = rustix::net::SendFlags::empty();
        rustix::net::sendmsg(&stream, &iov, &mut control, flags).unwrap();
        rejected(&mut net, error);
    }
    assert_eq!(net.counters().corrupt, 3);
    std::fs::remove_dir_all(&dir).unwrap();
}
