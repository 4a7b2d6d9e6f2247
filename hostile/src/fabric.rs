//! A node's transport with peers that put anything on their sockets and into their rings: one that
//! dials it, one that it dials, strangers; beside them one that keeps the rules, whose frames arrive.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use base::NodeId;
use cluster::limits::BODY_MAX;
use cluster::net::{Net, NetConfig};
use cluster::transport::socket_path;
use cluster::wire::{FRAME_HEAD, FrameHead, Hello};
use cluster::{Class, NetEvent, Peer, PeerAddress, Transport};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{RecvAncillaryMessage, SendAncillaryMessage};

use crate::input::Input;

const CLUSTER: u128 = 7;
const VICTIM: NodeId = NodeId(3);
const HONEST: NodeId = NodeId(1);
/// Dials the victim.
const CALLER: NodeId = NodeId(2);
/// Is dialled by it.
const CALLED: NodeId = NodeId(4);
const HELLO: u16 = 0xff01;
const WELCOME: u16 = 0xff02;
const STEPS: usize = 60;
const PATIENCE: Duration = Duration::from_secs(5);
/// The first page of a ring file, then a ring of each direction.
const RING_HEAD: u64 = 4096;
const RING: u32 = 16 << 10;

/// A folder of this process for its sockets.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("corbel-fabric-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder for sockets");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn frame(kind: u16, body: &[u8]) -> Vec<u8> {
    let head = FrameHead::new(kind, &[body]).expect("a short body");
    [&head.encode()[..], body].concat()
}

fn hello(from: NodeId, class: Class, ring_bytes: Option<u32>) -> Hello {
    Hello { class, from, to: VICTIM, cluster: CLUSTER, incarnation: 1, session: 1, ring_bytes }
}

/// A ring file, sealed or not, with a right head unless `wrong`.
fn ring_file(bytes: u32, wrong: bool) -> Option<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("ring", flags).ok()?;
    rustix::fs::ftruncate(&file, RING_HEAD + 2 * u64::from(bytes)).ok()?;
    let mut head = *b"CBRG\x01\0\0\0\0\0\0\0";
    head[8..].copy_from_slice(&bytes.to_le_bytes());
    rustix::io::pwrite(&file, &head, 0).ok()?;
    if !wrong {
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).ok()?;
    }
    Some(file)
}

fn send_with(stream: &UnixStream, bytes: &[u8], file: Option<&OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = file.iter().map(|f| f.as_fd()).collect();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    let _ = rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags);
}

/// A connection of a peer gone mad, and the ring that goes with it.
struct Mad {
    stream: UnixStream,
    ring: Option<OwnedFd>,
    /// Direction that the mad one writes.
    out: u64,
    ring_bytes: u32,
    tail: u64,
}

impl Mad {
    fn new(stream: UnixStream) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        Some(Self { stream, ring: None, out: 0, ring_bytes: RING, tail: 0 })
    }

    /// Dials, and says hello as the script wants it.
    fn dial(folder: &Folder, input: &mut Input<'_>) -> Option<Self> {
        let mut this = Self::new(UnixStream::connect(socket_path(&folder.0, VICTIM)).ok()?)?;
        let bits = input.u8();
        let class = if bits & 1 == 0 { Class::LowLatency } else { Class::Bulk };
        let mut greeting = hello(CALLER, class, Some(RING));
        greeting.session = u64::from(bits >> 1 & 1) + 1;
        match input.u8() {
            b'f' => greeting.from = NodeId(input.u8().into()),
            b't' => greeting.to = NodeId(input.u8().into()),
            b'c' => greeting.cluster = input.odd().into(),
            b'i' => greeting.incarnation = input.odd(),
            b's' => greeting.session = input.odd(),
            b'r' => greeting.ring_bytes = Some(input.odd() as u32),
            b'n' => greeting.ring_bytes = None,
            _ => {}
        }
        let size = if bits & 4 == 0 { RING } else { u32::from(input.u8()) * 64 };
        this.ring = (bits & 8 == 0).then(|| ring_file(size, bits & 16 != 0)).flatten();
        send_with(&this.stream, &frame(HELLO, &greeting.encode()), this.ring.as_ref());
        Some(this)
    }

    /// Answers a dial of the victim, as the script wants it.
    fn answer(listener: &UnixListener, input: &mut Input<'_>) -> Option<Self> {
        let mut this = Self::new(listener.accept().ok()?.0)?;
        this.out = 1;
        let mut bytes = vec![0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let flags = rustix::net::RecvFlags::DONTWAIT;
        let mut into = [IoSliceMut::new(&mut bytes)];
        let got = rustix::net::recvmsg(&this.stream, &mut into, &mut control, flags).ok()?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut files) = message {
                this.ring = files.next();
            }
        }
        let body = bytes.get(FRAME_HEAD..got.bytes)?;
        let theirs = Hello::decode(body).expect("a hello");
        this.ring_bytes = theirs.ring_bytes.unwrap_or(RING);
        let mut welcome = Hello { from: CALLED, to: VICTIM, ..theirs };
        match input.u8() {
            b'f' => welcome.from = NodeId(input.u8().into()),
            b's' => welcome.session = input.odd(),
            b'i' => welcome.incarnation = input.odd(),
            b'r' => welcome.ring_bytes = Some(input.odd() as u32),
            _ => {}
        }
        let kind = if input.u8() == b'k' { u16::from(input.u8()) | 0xff00 } else { WELCOME };
        let _ = this.stream.write(&frame(kind, &welcome.encode()));
        Some(this)
    }

    fn ring_at(&self, offset: u64, bytes: &[u8]) {
        let end = RING_HEAD + 2 * u64::from(self.ring_bytes);
        if let Some(file) = &self.ring
            && offset + bytes.len() as u64 <= end
        {
            // A sealed file does not grow; a refusal is as good as a write.
            let _ = rustix::io::pwrite(file, bytes, offset);
        }
    }

    /// Bytes go into the ring as they should, counters and doorbell included.
    fn push(&mut self, bytes: &[u8]) {
        let size = u64::from(self.ring_bytes);
        for byte in bytes {
            let at = RING_HEAD + self.out * size + self.tail % size;
            self.ring_at(at, &[*byte]);
            self.tail += 1;
        }
        self.ring_at(64 + 256 * self.out, &self.tail.to_le_bytes());
        let _ = self.stream.write(&[1]);
    }

    fn say(&mut self, input: &mut Input<'_>) {
        let (how, kind, body) = (input.u8(), u16::from(input.u8()), input.piece());
        let mut bytes = if how & 1 == 0 { frame(kind, body) } else { body.to_vec() };
        if how & 2 != 0 {
            let at = usize::from(input.u8()) % bytes.len().max(1);
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= input.u8();
            }
        }
        if how & 4 != 0 {
            let head = FrameHead { kind, len: input.odd() as u32, body_crc: None };
            bytes = [&head.encode()[..], body].concat();
        }
        if how & 8 == 0 {
            self.push(&bytes);
        } else {
            let _ = self.stream.write(&bytes);
        }
    }

    fn scribble(&self, input: &mut Input<'_>) {
        let offset = match input.below(3) {
            0 => u64::from(input.u8()) * 8,
            1 => [64, 128, 192, 256, 320, 384, 448, 512][input.below(8)],
            _ => RING_HEAD + u64::from(input.u16()),
        };
        let value = input.odd();
        self.ring_at(offset, &value.to_le_bytes());
        if input.flag() {
            let _ = (&self.stream).write(&[value as u8; 3]);
        }
    }
}

/// The peer that keeps the rules.
struct Honest {
    low: TcpStream,
    _bulk: TcpStream,
}

struct World {
    net: Net,
    events: Vec<NetEvent>,
    heard: u64,
    up: bool,
}

impl World {
    fn poll(&mut self) {
        self.events.clear();
        self.net.poll(Some(Duration::ZERO), &mut self.events);
        for event in &self.events {
            match event {
                NetEvent::Frame { from: HONEST, kind: 9, body, .. } => {
                    assert_eq!(body, b"still here");
                    self.heard += 1;
                }
                NetEvent::Frame { body, .. } => {
                    assert!(body.len() <= BODY_MAX && body.capacity() <= 2 * BODY_MAX);
                }
                NetEvent::Up { node: HONEST, .. } => self.up = true,
                NetEvent::Down { node: HONEST, reason } => {
                    panic!("the honest peer lost its link: {reason:?}");
                }
                NetEvent::Rejected { what, .. } => assert!(!what.is_empty()),
                _ => {}
            }
        }
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            self.poll();
            assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        }
    }

    fn honest(&mut self) -> Honest {
        let address = self.net.tcp_address().expect("it listens");
        let [low, bulk] = Class::ALL.map(|class| {
            let mut stream = TcpStream::connect(address).expect("it listens");
            stream.write_all(&frame(HELLO, &hello(HONEST, class, None).encode())).expect("room");
            stream
        });
        self.until("the honest link", |w| w.up);
        Honest { low, _bulk: bulk }
    }
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let folder = Folder::new();
    let listener = UnixListener::bind(socket_path(&folder.0, CALLED)).expect("a fresh folder");
    listener.set_nonblocking(true).expect("a socket");
    let mut config = NetConfig::new(VICTIM, 1, CLUSTER);
    config.tcp = "127.0.0.1:0".parse().ok();
    config.run_dir = Some(folder.0.clone());
    config.spin = Duration::ZERO;
    let mut net = Net::new(config).expect("a transport");
    let local = |node| Peer { node, address: PeerAddress::Local(socket_path(&folder.0, node)) };
    let nowhere = PeerAddress::Tcp("127.0.0.1:9".parse().expect("an address"));
    net.set_peers(&[local(CALLER), local(CALLED), Peer { node: HONEST, address: nowhere }]);
    let mut world = World { net, events: Vec::new(), heard: 0, up: false };
    let mut honest = world.honest();
    let mut mad: Vec<Mad> = Vec::new();
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        match input.below(8) {
            0 if mad.len() < 6 => mad.extend(Mad::dial(&folder, &mut input)),
            1 if mad.len() < 6 => mad.extend(Mad::answer(&listener, &mut input)),
            0 | 1 => {
                mad.remove(input.below(6));
            }
            2..=4 if !mad.is_empty() => {
                let at = input.below(mad.len());
                mad[at].say(&mut input);
            }
            5 if !mad.is_empty() => mad[input.below(mad.len())].scribble(&mut input),
            6 => {
                let body = vec![7; usize::from(input.u16())];
                let to = [CALLER, CALLED][input.below(2)];
                let _ = world.net.send(to, Class::Bulk, 5, &[&body]);
            }
            _ => world.poll(),
        }
        world.poll();
    }
    // A link that breaks is reported once more by the polls below; the honest peer is heard.
    honest.low.write_all(&frame(9, b"still here")).expect("an open link");
    world.until("the honest frame", |w| w.heard == 1);
    let _ = honest.low.set_nonblocking(true).map(|()| honest.low.read(&mut [0; 4096]));
    drop(mad);
    for _ in 0..3 {
        world.poll();
    }
    // No wait for the closing of ports: many inputs follow each other.
    for stream in [&honest.low, &honest._bulk] {
        let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
    }
}
