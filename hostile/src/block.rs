//! What comes to a block server: a client's half of NBD, in pieces of any size; and what lies in a store: heads and
//! names of shards, a pool's file.

use std::sync::Arc;

use ::block::device::{Answer, Blocking, Memory, Op, PAYLOAD_MAX, wait_for};
use ::block::nbd::handshake::{Agreed, Handshake, Next, TlsPolicy};
use ::block::nbd::proto::{BASE_ALLOCATION, IHAVEOPT, Put, REQUEST_MAGIC, option};
use ::block::nbd::requests::{Rules, Taken, reply, take};
use ::block::nbd::{Export, Exports};
use ::block::pool::{Spec, patch, shard};

use crate::input::Input;

const SIZE: u64 = 1 << 20;

fn exports() -> Arc<Exports> {
    let mut exports = Exports::new();
    for (name, text) in [("a", ""), ("disk", "for people")] {
        let device = Arc::new(Blocking(Memory::new(SIZE)));
        let export = Export { description: text.into(), device, multi_conn: true };
        exports.add(name, export).expect("a good name");
    }
    Arc::new(exports)
}

/// A target: the first byte says what the others are.
pub fn run(bytes: &[u8]) {
    let Some((what, rest)) = bytes.split_first() else { return };
    match what % 4 {
        0 => talk(rest, TlsPolicy::Off),
        1 => talk(rest, TlsPolicy::Required),
        2 => stored(rest),
        _ => script(rest),
    }
}

/// A client's bytes, all of them at once: nothing is taken that is not there, and it comes to an end.
fn talk(bytes: &[u8], policy: TlsPolicy) {
    let (mut machine, greeting) = Handshake::new(exports(), policy);
    assert_eq!(greeting.len(), 18);
    let mut rest = bytes;
    loop {
        let mut out = Vec::new();
        let (taken, next) = machine.take(rest, &mut out);
        assert!(taken <= rest.len());
        assert!(out.len() < (1 << 20), "an answer of {} bytes", out.len());
        rest = &rest[taken..];
        match next {
            Next::More if taken > 0 => {}
            Next::More | Next::Close(_) => return,
            Next::StartTls => machine.secured(),
            Next::Transmit(agreed) => return transmit(&agreed, rest),
        }
    }
}

fn transmit(agreed: &Agreed, mut rest: &[u8]) {
    let device = &agreed.export.device;
    let rules = Rules {
        size: device.size(),
        traits: device.traits(),
        structured: agreed.structured,
        block_status: agreed.block_status,
    };
    loop {
        let (taken, what) = take(rest, &rules);
        assert!(taken <= rest.len());
        rest = &rest[taken..];
        let (asked, outcome) = match what {
            Taken::More(all) => {
                assert!(all > rest.len() && all <= 28 + PAYLOAD_MAX as usize);
                return;
            }
            Taken::Farewell | Taken::Broken(_) => return,
            Taken::Answer(asked, outcome) => (asked, outcome),
            Taken::Do(asked, op) => {
                if let Op::Write { offset, data, .. } = &op {
                    assert!(offset + data.len() as u64 <= SIZE);
                }
                (asked, wait_for(&**device, op))
            }
        };
        let data = matches!(outcome, Ok(Answer::Data(_)));
        let reply = reply(&asked, agreed.structured, outcome);
        assert!(reply.head.len() >= 16);
        assert!(!data || reply.data.len() == asked.len as usize);
    }
}

/// What a store holds is anybody's.
fn stored(bytes: &[u8]) {
    for len in [0, 4096, 8192] {
        if let Ok((head, sums)) = shard::decode(bytes, len) {
            assert_eq!((head.bytes as usize, sums.len()), (len, len.div_ceil(4096)));
        }
    }
    let text = String::from_utf8_lossy(bytes);
    if let Some((object, version, number, hole)) = shard::parse(&text) {
        assert_eq!(shard::name(object, version, number, hole), text);
    }
    if let Some((object, of)) = patch::parse(&text) {
        assert_eq!(patch::name(object, &of), text);
        assert!(of.head_bytes() <= 1 << 20);
    }
    let version = shard::Version { number: 9, drawn: 1 };
    let base = shard::Version::NONE;
    let of = patch::Patch { version, base, place: 0, offset: 512, len: 8192, zero: false };
    if let Ok(sums) = patch::decode(bytes, (1, 2, 3), &of) {
        assert_eq!(sums.len(), 2);
    }
    if let Ok(spec) = serde_json::from_str::<Spec>(&text)
        && spec.check().is_ok()
    {
        assert!(spec.coding.quorum() <= spec.coding.width());
        assert!(spec.coding.width() <= spec.stores.len());
    }
}

/// Options and requests with right heads, made of a script.
fn script(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut out = Vec::new();
    Put(&mut out).u32(3);
    while !input.is_empty() {
        match input.u8() {
            b'r' => {
                let (flags, command) = (u16::from(input.u8()), u16::from(input.u8() % 9));
                let (offset, piece) = (input.odd(), input.piece());
                let len = if command == 1 { piece.len() as u64 } else { input.odd() };
                let mut put = Put(&mut out);
                put.u32(REQUEST_MAGIC).u16(flags).u16(command).u64(7);
                put.u64(offset).u32(len as u32);
                if command == 1 {
                    put.bytes(piece);
                }
            }
            number => {
                let piece = input.piece();
                Put(&mut out).u64(IHAVEOPT).u32(u32::from(number % 12)).u32(piece.len() as u32);
                out.extend_from_slice(piece);
            }
        }
    }
    talk(&out, TlsPolicy::Off);
}

/// A client that comes to terms and asks for a few things; the head of a shard; a name; a pool's file.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut talk = vec![0];
    let mut put = Put(&mut talk);
    put.u32(3).u64(IHAVEOPT).u32(option::STRUCTURED_REPLY).u32(0);
    put.u64(IHAVEOPT).u32(option::LIST).u32(0);
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        put.u64(IHAVEOPT).u32(option).u32(4 + 4 + 4 + 4 + 15).u32(4).bytes(b"disk").u32(1);
        put.u32(15).bytes(BASE_ALLOCATION.as_bytes());
    }
    for option in [option::INFO, option::GO] {
        put.u64(IHAVEOPT).u32(option).u32(4 + 4 + 2 + 4).u32(4).bytes(b"disk").u16(2).u16(3).u16(1);
    }
    let request = |put: &mut Put<'_>, flags: u16, command: u16, offset: u64, len: u32| {
        put.u32(REQUEST_MAGIC).u16(flags).u16(command).u64(9).u64(offset).u32(len);
    };
    for (flags, command, offset, len) in [
        (0, 0, 0, 4096),
        (4, 0, SIZE - 1, 2),
        (1, 1, 512, 8),
        (0, 3, 0, 0),
        (0, 4, 0, 65536),
        (0, 5, 0, 1),
        (3, 6, 4096, 100),
        (8, 7, 0, 1 << 20),
    ] {
        request(&mut put, flags, command, offset, len);
        if command == 1 {
            put.bytes(b"8 bytes.");
        }
    }
    request(&mut put, 0, 2, 0, 0);
    let mut old = vec![0];
    Put(&mut old).u32(1).u64(IHAVEOPT).u32(option::EXPORT_NAME).u32(1).bytes(b"a");
    let mut secure = vec![1];
    Put(&mut secure).u32(3).u64(IHAVEOPT).u32(option::LIST).u32(0);
    Put(&mut secure).u64(IHAVEOPT).u32(option::STARTTLS).u32(0);
    Put(&mut secure).u64(IHAVEOPT).u32(option::ABORT).u32(0);
    let version = shard::Version { number: 3, drawn: 0xabcd };
    let head = shard::Head {
        pool: 1,
        image: 2,
        object: 3,
        version,
        shard: 1,
        data: 2,
        width: 3,
        bytes: 4096,
        object_bytes: 8192,
    };
    let store = |bytes: &[u8]| [&[2], bytes].concat();
    let (base, number) = (shard::Version::NONE, shard::Version { number: 9, drawn: 1 });
    let of = patch::Patch { version: number, base, place: 0, offset: 512, len: 8192, zero: false };
    let spec = r#"{"version":1,"id":7,"coding":{"rs":{"data":2,"parity":1}},"stores":[
        {"domain":"a","at":"dir:/a"},{"domain":"b","at":"dir:/b"},{"domain":"c","at":"dir:/c","out":false}]}"#;
    let spec = spec.as_bytes();
    vec![
        talk,
        old,
        secure,
        store(&shard::encode(&head, &[7; 4096])),
        store(shard::name(3, version, 1, false).as_bytes()),
        store(shard::name(3, version, 1, true).as_bytes()),
        store(&patch::encode((1, 2, 3), &of, &[7; 8192])),
        store(patch::name(3, &of).as_bytes()),
        store(spec),
        store(b"{\"version\":1}"),
        b"\x03r\x00\x01\x00\x08datadatar\x00\x00\x00\x00".to_vec(),
    ]
}
