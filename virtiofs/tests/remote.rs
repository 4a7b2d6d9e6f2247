//! The same device over a connection: a guest here, its file system there, and a network between them that breaks.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::random::Random;
use client::dir::{self, DirFs};
use client::fs::FileSystem;
use common::{create, read_in, scratch, write_in};
use frontend::fuse::wire::*;
use virtiofs::device::{Crew, Device, Options};
use virtiofs::driver::{Config, Driver};
use virtiofs::remote::back::{Back, Window};
use virtiofs::remote::frame::{self, Header, Hello, MAGIC, kind};
use virtiofs::remote::front::{self, Front};
use virtiofs::remote::link::{Address, Listener};
use virtiofs::vhost;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const ROOT: u64 = 1;

/// Both sides.
struct Pair {
    root: PathBuf,
    back: Back,
    front: Arc<Front>,
    device: Arc<Device>,
    _crew: Crew,
}

impl Pair {
    fn new(window: Window, soft: Option<Duration>) -> Self {
        let root = scratch();
        let shared = root.join("shared");
        let fs = DirFs::open(shared.to_str().unwrap().as_bytes(), dir::Options::default()).unwrap();
        let device = Device::new(Arc::new(fs) as Arc<dyn FileSystem>, Options::default());
        let back = Back::new("tenant", 4, window);
        let crew = device.start(&back).unwrap();
        let address = Address::Unix(root.join("back"));
        let (listener, there) = (Listener::bind(&address, None).unwrap(), back.clone());
        std::thread::spawn(move || there.listen(&listener));
        let rings = vhost::rings("tenant", 4).unwrap();
        let (tenant, silence) = ("tenant".into(), Duration::from_secs(5));
        let options = front::Options { address, identity: None, tenant, soft, silence };
        let front = Front::start(&*rings, options).unwrap();
        let listener = UnixListener::bind(root.join("socket")).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                vhost::serve(&rings, None, None, stream.unwrap());
            }
        });
        Self { root, back, front, device, _crew: crew }
    }

    fn guest(&self, config: Config) -> Driver {
        let stream = UnixStream::connect(self.root.join("socket")).unwrap();
        let mut guest = Driver::over(stream, config).unwrap();
        guest.init().unwrap();
        guest
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.front.stop();
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

#[test]
fn files_on_another_machine() {
    let pair = Pair::new(Window::default(), None);
    let mut guest = pair.guest(Config { queues: 2, data: 64 << 10, ..Config::default() });
    for queue in 1..=2 {
        let (node, fh) = create(&mut guest, queue, ROOT, format!("f{queue}").as_bytes());
        let data: Vec<u8> = (0..60_000u32).map(|i| (i % 241) as u8).collect();
        let wrote =
            guest.call_on(queue, op::WRITE, node, &[&write_in(fh, 0, data.len())], &data, 0);
        assert_eq!(wrote.unwrap().error, 0);
        let read = guest.call_on(queue, op::READ, node, &[&read_in(fh, 7, 59_993)], &[], 59_993);
        assert_eq!(read.unwrap().body, data[7..]);
        guest.tell(op::FORGET, node, &[ForgetIn { nlookup: 1.into() }.as_bytes()]).unwrap();
    }
    assert_eq!(pair.front.under_way(), 0);
}

/// Requests that can be done once only, over a connection that breaks all the time: each is done, once.
#[test]
fn a_connection_that_breaks_is_a_pause() {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(u64::from(std::process::id()));
    println!("SEED={seed}");
    let mut random = Random::new(seed);
    let pair = Pair::new(Window { requests: 8, ..Window::default() }, None);
    let shared = pair.root.join("shared");
    let mut guest = pair.guest(Config { slots: 32, ..Config::default() });
    let mut names = Vec::new();
    for round in 0..6 {
        let make = round % 2 == 0;
        let mut asked = Vec::new();
        for slot in 1..32 {
            let name = format!("d{slot}");
            let z = format!("{name}\0");
            let request = if make {
                let arg = MkdirIn { mode: 0o755.into(), ..MkdirIn::default() };
                guest.request(op::MKDIR, ROOT, &[arg.as_bytes(), z.as_bytes()], 0)
            } else {
                guest.request(op::RMDIR, ROOT, &[z.as_bytes()], 0)
            };
            let q = &mut guest.queues[1];
            let head = q.prepare(slot, &request, &[], 4096, 0);
            q.offer(head);
            asked.push(name);
            if random.below(4) == 0 {
                q.notify();
                std::thread::sleep(Duration::from_micros(random.below(300)));
                pair.back.cut();
            }
        }
        guest.queues[1].notify();
        for _ in &asked {
            if random.below(8) == 0 {
                pair.back.cut();
            }
            let (head, written) = guest.queues[1].wait().unwrap();
            let slot = guest.queues[1].slot_of(head);
            let reply = guest.reply(1, slot, written, 4096).unwrap();
            assert_eq!(reply.error, 0, "round {round}");
        }
        for name in &asked {
            assert_eq!(shared.join(name).exists(), make, "{name}");
        }
        names = asked;
    }
    assert_eq!((names.len(), pair.front.under_way()), (31, 0));
}

#[test]
fn with_a_limit_of_time_a_request_ends() {
    let pair = Pair::new(Window::default(), Some(Duration::from_millis(300)));
    let mut guest = pair.guest(Config::default());
    // Somebody else takes the place of the back, and says nothing.
    std::fs::remove_file(pair.root.join("back")).unwrap();
    let _silent = UnixListener::bind(pair.root.join("back")).unwrap();
    pair.back.cut();
    let mut asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
    for _ in 0..10 {
        if asked.error != 0 {
            break;
        }
        asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
    }
    assert_eq!(asked.error, -libc::EIO);
}

/// A side that never was there is away like one that has gone: nobody waits for it without end.
#[test]
fn with_a_limit_of_time_nobody_waits_for_who_never_came() {
    let root = scratch();
    let rings = vhost::rings("tenant", 1).unwrap();
    let options = front::Options {
        address: Address::Unix(root.join("nobody")),
        identity: None,
        tenant: "tenant".into(),
        soft: Some(Duration::from_millis(500)),
        silence: Duration::from_secs(5),
    };
    let front = Front::start(&*rings, options).unwrap();
    let (monitor, device) = UnixStream::pair().unwrap();
    std::thread::spawn(move || vhost::serve(&rings, None, None, device));
    let mut guest = Driver::over(monitor, Config::default()).unwrap();
    assert_eq!(guest.init().unwrap_err(), "INIT: error -5");
    // What comes later does not each wait as long again.
    let begun = std::time::Instant::now();
    for _ in 0..20 {
        let asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
        assert_eq!(asked.error, -libc::EIO);
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    front.stop();
    std::fs::remove_dir_all(root).unwrap();
}

fn hello(tenant: &[u8]) -> Vec<u8> {
    let hello = Hello {
        magic: MAGIC,
        from: 1.into(),
        to: 9.into(),
        queues: 2.into(),
        tenant: u16::try_from(tenant.len()).unwrap().into(),
        session: [7; 16],
    };
    let payload = [hello.as_bytes(), tenant].concat();
    frame::frame(&Header::of(kind::HELLO, payload.len()), &payload)
}

fn request(tag: u64, room: u32, queue: u16, payload: &[u8]) -> Vec<u8> {
    let mut header = Header::of(kind::REQUEST, payload.len());
    (header.tag, header.room, header.queue) = (tag.into(), room.into(), queue.into());
    frame::frame(&header, payload)
}

/// What the back says to these bytes before it hangs up; a frame's kind each, and the words of the last.
fn said(pair: &Pair, bytes: &[u8]) -> (Vec<u8>, String) {
    let mut stream = UnixStream::connect(pair.root.join("back")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let _ = stream.write_all(bytes);
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    let (mut kinds, mut words, mut rest) = (Vec::new(), String::new(), &all[..]);
    while let Some((header, payload, len)) = frame::take(rest).unwrap() {
        kinds.push(header.kind);
        words = String::from_utf8_lossy(payload).into();
        rest = &rest[len..];
    }
    (kinds, words)
}

#[test]
fn who_breaks_the_protocol_is_told_and_left() {
    let pair = Pair::new(Window { requests: 2, bytes: 10_000, ..Window::default() }, None);
    let header = InHeader::new_zeroed();
    let good = request(1, 100, 1, header.as_bytes());
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"GET / HTTP/1.1\r\n\r\nxxxxxxxxxxxxxxxxxxxxxxxx".to_vec(), "a frame of"),
        (good.clone(), "out of place"),
        (hello(b"other"), "this device is tenant's"),
        ([hello(b"tenant"), hello(b"tenant")].concat(), "out of place"),
        ([hello(b"tenant"), request(1, 100, 9, header.as_bytes())].concat(), "there is no queue 9"),
        (
            [hello(b"tenant"), request(1, u32::MAX, 1, header.as_bytes())].concat(),
            "more is under way",
        ),
        (frame::frame(&Header::of(kind::HELLO, 3), b"abc"), "a short greeting"),
        ([vec![0xff; 4], vec![kind::HELLO], vec![0; 27]].concat(), "a frame of 4294967295 bytes"),
    ];
    for (bytes, words) in cases {
        let (kinds, told) = said(&pair, &bytes);
        assert_eq!(kinds.last(), Some(&kind::BYE), "{words}");
        assert!(told.contains(words), "{told:?}, not {words:?}");
    }
    // The device is there for who speaks rightly: the front comes back by itself.
    let mut guest = pair.guest(Config::default());
    let asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
    assert_eq!(AttrOut::read_from_prefix(&asked.body).unwrap().0.attr.nlink.get(), 2);
}

/// A guest that is gone, or whose side is, keeps nothing on the other one.
#[test]
fn who_stays_away_keeps_nothing() {
    let pair = Pair::new(Window::default(), None);
    let (there, device) = (pair.back.clone(), pair.device.clone());
    std::thread::spawn(move || there.watch(Duration::from_millis(300), || device.forget_guest()));
    let comes_to = |ready| {
        (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            pair.device.server().is_ready() == ready
        })
    };
    let mut guest = pair.guest(Config::default());
    assert!(comes_to(true));
    // A connection that breaks is none that stays away.
    pair.back.cut();
    std::thread::sleep(Duration::from_millis(700));
    let asked = guest.call(op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()]).unwrap();
    assert!(asked.error == 0 && pair.device.server().is_ready());
    guest.hang_up();
    pair.front.has_guest(false);
    assert!(comes_to(false), "it is gone");
    pair.front.has_guest(true);
    let guest = pair.guest(Config::default());
    assert!(comes_to(true), "another one");
    guest.hang_up();
    pair.front.stop();
    assert!(comes_to(false), "its side is gone");
}
