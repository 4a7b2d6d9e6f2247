//! The NBD server at the other end of our own client, which also says what no decent client says.

mod rig;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::Errno;
use base::random::Random;
use block::device::{Blocking, Device, Disk, Extent, Memory, Prompt, ReadOnly, Traits};
use block::nbd::client::Client;
use block::nbd::connection::{Bounds, Common};
use block::nbd::handshake::TlsPolicy;
use block::nbd::proto::{
    IHAVEOPT, Put, REQUEST_MAGIC, STATE_HOLE, STATE_ZERO, command, flag, option, transmission,
};
use block::nbd::{Address, Exports, Limits, Server};

use rig::{Scratch, export, serve, serve_with};

const SIZE: u64 = 64 << 20;

fn memory() -> Arc<dyn Device> {
    Arc::new(Blocking(Memory::new(SIZE)))
}

#[test]
fn what_is_written_is_read() {
    let scratch = Scratch::new("rw");
    let server = serve(&scratch, memory());
    for structured in [false, true] {
        let mut client = Client::greet(&server.addresses()[0]).unwrap();
        client.agree("", structured).unwrap();
        assert_eq!(client.size, SIZE);
        let mut random = Random::new(7);
        let mut data = vec![0; 3 << 20];
        random.fill(&mut data);
        let at = 4096 + 17;
        let len = data.len() as u32;
        client.call((command::WRITE, flag::FUA), at, len, &data).unwrap().result.unwrap();
        assert_eq!(client.call((command::READ, 0), at, len, b"").unwrap().result.unwrap(), data);
        client.call((command::TRIM, 0), at, len, b"").unwrap().result.unwrap();
        client.call((command::FLUSH, 0), 0, 0, b"").unwrap().result.unwrap();
        let zeroes = client.call((command::READ, 0), at, len, b"").unwrap().result.unwrap();
        assert!(zeroes.iter().all(|b| *b == 0));
    }
}

/// Many requests in flight, replies in any order, two connections: a flush on one covers what the other was answered.
#[test]
fn many_in_flight_on_two_connections() {
    let scratch = Scratch::new("many");
    let server = serve(&scratch, memory());
    let mut random = Random::new(11);
    let mut clients: Vec<Client> =
        (0..2).map(|_| Client::open(&server.addresses()[0], "disk").unwrap()).collect();
    assert_ne!(clients[0].flags & transmission::CAN_MULTI_CONN, 0);
    let mut model = vec![0u8; 1 << 20];
    for round in 0..30 {
        let client = &mut clients[round % 2];
        let mut writes = Vec::new();
        for slot in 0..64u64 {
            let mut data = vec![0; 1 + random.below(16 << 10) as usize];
            random.fill(&mut data);
            let at = slot * (16 << 10);
            model[at as usize..at as usize + data.len()].copy_from_slice(&data);
            let len = data.len() as u32;
            writes.push(client.ask((command::WRITE, 0), at, len, &data).unwrap());
        }
        for _ in 0..64 {
            let reply = client.reply().unwrap();
            reply.result.unwrap();
            let at = writes.iter().position(|cookie| *cookie == reply.cookie).expect("ours");
            writes.swap_remove(at);
        }
        let other = &mut clients[(round + 1) % 2];
        other.call((command::FLUSH, 0), 0, 0, b"").unwrap().result.unwrap();
        let all = other.call((command::READ, 0), 0, 1 << 20, b"").unwrap().result.unwrap();
        assert!(all == model, "round {round}");
    }
}

/// A disk whose flush takes until it is told.
struct Flushes(Memory, std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

impl Disk for Flushes {
    fn traits(&self) -> Traits {
        self.0.traits()
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn prompt(&self) -> Prompt {
        Prompt::UnlessDurable
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        self.0.read(offset, buf)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.0.write(offset, data)
    }

    fn flush(&self) -> Result<(), Errno> {
        self.1.lock().unwrap().recv().map_err(|_| Errno::IO)
    }

    fn trim(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.0.trim(offset, len)
    }

    fn zero(&self, offset: u64, len: u64, no_hole: bool) -> Result<(), Errno> {
        self.0.zero(offset, len, no_hole)
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, Errno> {
        self.0.extents(offset, len)
    }
}

/// Requests that come together with a flush, before it or behind it, and ask for nothing durable do not wait for it; those that do share it.
#[test]
fn what_is_quick_does_not_wait_for_a_flush() {
    let scratch = Scratch::new("quick");
    let (over, flushes) = std::sync::mpsc::channel();
    let disk = Flushes(Memory::new(SIZE), std::sync::Mutex::new(flushes));
    let server = serve(&scratch, Arc::new(Blocking(disk)));
    let mut client = Client::open(&server.addresses()[0], "disk").unwrap();
    let mut out = Vec::new();
    let data = [7; 512];
    let durable = [
        client.put(&mut out, (command::WRITE, flag::FUA), 0, 512, &data),
        client.put(&mut out, (command::FLUSH, 0), 0, 0, b""),
    ];
    let quick = [
        client.put(&mut out, (command::WRITE, 0), 512, 512, &data),
        client.put(&mut out, (command::READ, 0), 4096, 512, b""),
    ];
    client.send(&out).unwrap();
    let mut told = |expected: [u64; 2]| {
        let mut came: Vec<u64> = (0..2)
            .map(|_| {
                let reply = client.reply().unwrap();
                reply.result.unwrap();
                reply.cookie
            })
            .collect();
        came.sort_unstable();
        assert_eq!(came, expected);
    };
    told(quick);
    over.send(()).unwrap();
    told(durable);
}

#[test]
fn block_status_tells_holes() {
    let scratch = Scratch::new("status");
    let server = serve(&scratch, memory());
    let mut client = Client::open(&server.addresses()[0], "disk").unwrap();
    client.call((command::WRITE, 0), 64 << 10, 64 << 10, &vec![1; 64 << 10]).unwrap();
    let status = |client: &mut Client, flags| {
        client.call((command::BLOCK_STATUS, flags), 0, 1 << 20, b"").unwrap().extents
    };
    let hole = STATE_HOLE | STATE_ZERO;
    let all = status(&mut client, 0);
    assert_eq!(all, [(64 << 10, hole), (64 << 10, 0), ((1 << 20) - (128 << 10), hole)]);
    assert_eq!(status(&mut client, flag::REQ_ONE), [(64 << 10, hole)]);
}

#[test]
fn bad_requests_get_errors_and_change_nothing() {
    let scratch = Scratch::new("bad");
    let server = serve(&scratch, memory());
    let mut client = Client::open(&server.addresses()[0], "disk").unwrap();
    client.call((command::WRITE, 0), 0, 4096, &[9; 4096]).unwrap().result.unwrap();
    let block = [1u8; 4096];
    type Case<'a> = ((u16, u16), u64, u32, &'a [u8], Errno);
    let cases: [Case<'_>; 14] = [
        ((command::READ, 0), SIZE, 1, b"", Errno::INVAL),
        ((command::READ, 0), SIZE - 1, 2, b"", Errno::INVAL),
        ((command::READ, 0), u64::MAX, 4096, b"", Errno::INVAL),
        ((command::READ, 0), 0, 0, b"", Errno::INVAL),
        ((command::READ, 0), 0, 33 << 20, b"", Errno::OVERFLOW),
        ((command::READ, 1 << 9), 0, 512, b"", Errno::INVAL),
        ((command::WRITE, 0), SIZE - 4095, 4096, &block, Errno::NOSPC),
        ((command::WRITE, 0), u64::MAX - 4, 4096, &block, Errno::NOSPC),
        ((command::WRITE, flag::DF), 0, 4096, &block, Errno::INVAL),
        ((command::WRITE_ZEROES, 0), SIZE, 1, b"", Errno::NOSPC),
        ((command::TRIM, 0), 1, u32::MAX, b"", Errno::INVAL),
        ((command::FLUSH, 0), 1, 0, b"", Errno::INVAL),
        ((command::BLOCK_STATUS, 0), SIZE, 1, b"", Errno::INVAL),
        ((77, 0), 0, 0, b"", Errno::INVAL),
    ];
    for (what, offset, len, data, errno) in cases {
        let reply = client.call(what, offset, len, data).unwrap();
        assert_eq!(reply.result, Err(errno), "{what:?} {offset} {len}");
    }
    let kept = client.call((command::READ, 0), 0, 4096, b"").unwrap().result.unwrap();
    assert_eq!(kept, [9; 4096]);
}

#[test]
fn a_read_only_export_refuses_changes() {
    let scratch = Scratch::new("ro");
    let server = serve(&scratch, Arc::new(ReadOnly(memory())));
    let mut client = Client::open(&server.addresses()[0], "disk").unwrap();
    assert_ne!(client.flags & transmission::READ_ONLY, 0);
    for (command, data) in
        [(command::WRITE, &[1; 512][..]), (command::TRIM, b""), (command::WRITE_ZEROES, b"")]
    {
        let reply = client.call((command, 0), 0, 512, data).unwrap();
        assert_eq!(reply.result, Err(Errno::PERM));
    }
    let data = client.call((command::READ, 0), 0, 512, b"").unwrap().result.unwrap();
    assert_eq!(data, [0; 512]);
}

#[test]
fn options_are_haggled_over() {
    let scratch = Scratch::new("options");
    let mut exports = Exports::new();
    for name in ["a", "b"] {
        exports.add(name, export(memory())).unwrap();
    }
    assert!(exports.add("a", export(memory())).is_err());
    let server = serve_with(&scratch, exports, Limits::default());
    let address = &server.addresses()[0];
    let mut client = Client::greet(address).unwrap();
    let said = |result: io::Result<Vec<(u32, Vec<u8>)>>| result.unwrap_err().to_string();
    assert!(said(client.option(999, b"x")).starts_with("0x80000001"));
    assert!(said(client.option(option::STARTTLS, b"")).starts_with("0x80000002"));
    assert!(said(client.option(option::GO, b"\xff\xff\xff\xff")).starts_with("0x80000003"));
    assert!(said(client.option(option::SET_META_CONTEXT, b"")).starts_with("0x80000003"));
    let mut unknown = Vec::new();
    Put(&mut unknown).u32(1).bytes(b"z").u16(0);
    assert!(said(client.option(option::GO, &unknown)).starts_with("0x80000006"));
    // With two exports the empty name means neither.
    assert!(client.agree("", false).is_err());
    let listed = client.option(option::LIST, b"").unwrap();
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[1].1[..5], *b"\0\0\0\x01b");
    client.agree("b", true).unwrap();
    assert_eq!(client.size, SIZE);
    // The old way.
    let mut client = Client::greet(address).unwrap();
    let mut out = Vec::new();
    Put(&mut out).u64(IHAVEOPT).u32(option::EXPORT_NAME).u32(1).bytes(b"a");
    client.send(&out).unwrap();
    let told = client.read(10).unwrap();
    assert_eq!(told[..8], [0, 0, 0, 0, 4, 0, 0, 0]);
    let farewell = Client::greet(address).unwrap().option(option::ABORT, b"");
    assert_eq!(farewell.unwrap(), []);
}

/// Whatever bytes come, the server lives: and what it serves to others stays whole.
#[test]
fn hostile_bytes_hurt_nobody_else() {
    let scratch = Scratch::new("hostile");
    let server = serve(&scratch, memory());
    let address = &server.addresses()[0];
    let mut witness = Client::open(address, "disk").unwrap();
    witness.call((command::WRITE, 0), 0, 4096, &[5; 4096]).unwrap().result.unwrap();
    let seed = 0x0b1d;
    let mut random = Random::new(seed);
    for case in 0..200 {
        let mut client = Client::greet(address).unwrap();
        if random.chance(1, 2) {
            client.agree("disk", random.chance(1, 2)).unwrap();
        }
        let mut bytes = vec![0; random.below(200) as usize];
        random.fill(&mut bytes);
        if random.chance(1, 2) {
            let mut head = Vec::new();
            match random.below(2) {
                0 => Put(&mut head).u64(IHAVEOPT).u32(random.below(12) as u32).u32(100),
                // Reads and block status only: the witness looks at what others write.
                _ => Put(&mut head)
                    .u32(REQUEST_MAGIC)
                    .u16(random.next_u64() as u16)
                    .u16(if random.chance(1, 2) { command::READ } else { command::BLOCK_STATUS }),
            };
            bytes.splice(0..0, head);
        }
        // The server may have hung up.
        let _ = client.send(&bytes);
        drop(client);
        let kept = witness.call((command::READ, 0), 0, 4096, b"").unwrap().result.unwrap();
        assert_eq!(kept, [5; 4096], "case {case}, seed {seed}");
    }
}

#[test]
fn who_dawdles_is_sent_away() {
    let scratch = Scratch::new("slow");
    let mut exports = Exports::new();
    exports.add("disk", export(memory())).unwrap();
    let bounds = Bounds {
        handshake: Duration::from_millis(300),
        stall: Duration::from_millis(300),
        idle: Some(Duration::from_millis(300)),
        ..Bounds::default()
    };
    let limits = Limits { connections: 2, bounds };
    let server = serve_with(&scratch, exports, limits);
    let address = &server.addresses()[0];
    let gone = |client: &mut Client| client.read(1).unwrap_err().kind();
    // In the middle of the negotiation, in the middle of a request, and between requests.
    let mut haggling = Client::greet(address).unwrap();
    let mut head = Vec::new();
    Put(&mut head).u64(IHAVEOPT).u32(REQUEST_MAGIC);
    haggling.send(&head[..5]).unwrap();
    assert_eq!(gone(&mut haggling), io::ErrorKind::UnexpectedEof);
    let mut half = Client::open(address, "disk").unwrap();
    half.send(&head[8..]).unwrap();
    assert_eq!(gone(&mut half), io::ErrorKind::UnexpectedEof);
    let mut idle = Client::open(address, "disk").unwrap();
    assert_eq!(gone(&mut idle), io::ErrorKind::UnexpectedEof);
    drop((haggling, half, idle));
    // No more connections than allowed; and when they are gone there is room again.
    let mut held: Vec<Client> = Vec::new();
    let mut refused = 0;
    for _ in 0..6 {
        match Client::greet(address) {
            Ok(client) => held.push(client),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 0);
    drop(held);
    let again = (0..100).find_map(|_| {
        std::thread::sleep(Duration::from_millis(20));
        Client::open(address, "disk").ok()
    });
    assert!(again.is_some());
}

/// A client that never takes its replies holds up itself only.
#[test]
fn who_does_not_listen_holds_up_nobody() {
    let scratch = Scratch::new("deaf");
    let server = serve(&scratch, memory());
    let address = &server.addresses()[0];
    let mut deaf = Client::open(address, "disk").unwrap();
    let mut out = Vec::new();
    for _ in 0..40 {
        deaf.put(&mut out, (command::READ, 0), 0, 4 << 20, b"");
    }
    deaf.send(&out).unwrap();
    let mut other = Client::open(address, "disk").unwrap();
    for _ in 0..50 {
        other.call((command::WRITE, 0), 0, 4096, &[3; 4096]).unwrap().result.unwrap();
    }
    // It listens after all: nothing was lost.
    for _ in 0..40 {
        assert_eq!(deaf.reply().unwrap().result.unwrap().len(), 4 << 20);
    }
}

#[test]
fn tls_is_offered_and_can_be_required() {
    let scratch = Scratch::new("tls");
    let keys = rig::certificates(&scratch);
    let start = |policy, verify| {
        let mut exports = Exports::new();
        exports.add("disk", export(memory())).unwrap();
        let config = Some(block::nbd::tls::read(&scratch.path("server"), verify).unwrap());
        let common =
            Common { exports: Arc::new(exports), tls: policy, config, bounds: Bounds::default() };
        let listen = [Address::Tcp("127.0.0.1:0".parse().unwrap())];
        Server::start(common, &listen, Limits::default()).unwrap()
    };
    let server = start(TlsPolicy::Required, true);
    let address = &server.addresses()[0];
    let mut plain = Client::greet(address).unwrap();
    let said = plain.option(option::LIST, b"").unwrap_err().to_string();
    assert!(said.starts_with("0x80000005"), "{said}");
    assert!(plain.agree("disk", false).is_err());
    let mut client = rig::secure(Client::greet(address).unwrap(), &keys, true).unwrap();
    client.agree("disk", true).unwrap();
    let data = vec![0x5a; 1 << 20];
    client.call((command::WRITE, flag::FUA), 0, 1 << 20, &data).unwrap().result.unwrap();
    let read = client.call((command::READ, 0), 0, 1 << 20, b"").unwrap().result.unwrap();
    assert!(read == data);
    // Nobody knows this client.
    let stranger = rig::secure(Client::greet(address).unwrap(), &keys, false)
        .and_then(|mut client| client.agree("disk", true));
    assert!(stranger.is_err());
    // What is said before STARTTLS is answered is not taken for what is said after it.
    let mut early = Client::greet(address).unwrap();
    let mut out = Vec::new();
    Put(&mut out).u64(IHAVEOPT).u32(option::STARTTLS).u32(0);
    Put(&mut out).u64(IHAVEOPT).u32(option::LIST).u32(0);
    early.send(&out).unwrap();
    let mut rest = Vec::new();
    while let Ok(byte) = early.read(1) {
        rest.extend(byte);
    }
    assert!(rest.len() <= 20, "{} bytes after the answer", rest.len().saturating_sub(20));
    // Offered, and not taken.
    let server = start(TlsPolicy::On, false);
    Client::open(&server.addresses()[0], "disk").unwrap();
}

/// A device that grows is seen to have grown, by those who are connected already as well.
#[test]
fn growth_is_seen() {
    let scratch = Scratch::new("grow");
    let path = scratch.path("disk.img");
    let file = block::device::PlainFile::open(&path, false, Some(1 << 20)).unwrap();
    let server = serve(&scratch, Arc::new(Blocking(file)));
    let mut client = Client::open(&server.addresses()[0], "disk").unwrap();
    let block = [1; 512];
    let beyond = client.call((command::WRITE, 0), 1 << 20, 512, &block).unwrap();
    assert_eq!(beyond.result, Err(Errno::NOSPC));
    std::fs::File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
    client.call((command::WRITE, 0), 1 << 20, 512, &block).unwrap().result.unwrap();
    assert_eq!(Client::open(&server.addresses()[0], "disk").unwrap().size, 2 << 20);
}

#[test]
fn a_server_that_ends_finishes_what_it_has_begun() {
    let scratch = Scratch::new("end");
    let server = serve(&scratch, memory());
    let address = server.addresses()[0].clone();
    let mut client = Client::open(&address, "disk").unwrap();
    client.ask((command::WRITE, flag::FUA), 0, 4096, &[1; 4096]).unwrap();
    let reply = client.reply().unwrap();
    drop(server);
    assert!(reply.result.is_ok());
    assert!(client.call((command::READ, 0), 0, 512, b"").is_err());
    let Address::Unix(path) = address else { unreachable!("it listens at a path") };
    assert!(!path.exists());
}
