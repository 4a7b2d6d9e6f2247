//! Rings full of anything: whatever a guest writes into its descriptors, each head that it offers comes back once, what is served is a
//! reply that tells its length, and the device goes on. Seeds are printed; `SEED=N` runs one.

mod common;

use base::random::Random;
use common::{Host, create, write_in};
use frontend::fuse::wire::*;
use virtiofs::driver::{BASE, Config, Driver, PAGE, flag};
use zerocopy::{FromBytes, IntoBytes};

const ROOT: u64 = 1;
const ROUNDS: u64 = 60;
/// Heads of one round.
const HEADS: u16 = 6;

/// An address: mostly where the slots lie (a guest that has replies written over its own rings has none that could be looked
/// at), sometimes at an edge of memory, or nowhere.
fn address(random: &mut Random, inside: u64) -> u64 {
    match random.below(10) {
        0 => random.next_u64(),
        1 => BASE.wrapping_sub(random.below(64)),
        2 => inside + random.below(1 << 16),
        3 => u64::MAX - random.below(64),
        _ => inside + random.below(256),
    }
}

fn len(random: &mut Random) -> u32 {
    match random.below(8) {
        0 => random.next_u64() as u32,
        1 => 0,
        2 => 1 << random.below(32),
        3 => 16 * random.below(40) as u32,
        _ => 16 + random.below(200) as u32,
    }
}

/// A request of some kind, with some of its bytes turned.
fn request(guest: &mut Driver, random: &mut Random, node: u64, fh: u64) -> Vec<u8> {
    let opcode = match random.below(4) {
        0 => random.below(70) as u32,
        1 => op::WRITE,
        2 => op::READ,
        _ => [op::LOOKUP, op::GETATTR, op::SETATTR, op::MKDIR, op::READDIRPLUS, op::RENAME2]
            [random.below(6) as usize],
    };
    // Another INIT is another guest, and DESTROY the end of this one: what they do is tried elsewhere.
    let opcode = if matches!(opcode, op::INIT | op::DESTROY) { op::STATFS } else { opcode };
    let node = [ROOT, node, random.next_u64(), 0][random.below(4) as usize];
    let mut body = write_in(fh, random.below(1 << 20) as usize, random.below(8192) as usize);
    body.resize(random.below(120) as usize, 0);
    let mut request = guest.request(opcode, node, &[&body], 0);
    for _ in 0..random.below(4) {
        // Not the operation: see above.
        let at = random.below(request.len() as u64) as usize;
        if !(4..8).contains(&at) {
            request[at] = random.next_u64() as u8;
        }
    }
    request
}

fn history(seed: u64) {
    println!("SEED={seed}");
    let mut random = Random::new(seed);
    let mut options = virtiofs::device::Options::default();
    (options.guest.nodes_max, options.guest.handles_max) = (200, 50);
    let host = Host::dir_with(options);
    let config = Config { queues: 2, indirect: random.below(2) == 0, ..Config::default() };
    let mut guest = host.guest(config);
    let (node, fh) = create(&mut guest, 1, ROOT, b"file");
    for _ in 0..ROUNDS {
        let requests: Vec<_> =
            (0..HEADS).map(|_| request(&mut guest, &mut random, node, fh)).collect();
        // The last queue: nothing lies behind its slots.
        let q = &mut guest.queues[2];
        for (slot, request) in requests.iter().enumerate() {
            let (request_at, _, data_at, table_at) = q.slot(slot);
            q.put_bytes(request, request_at);
            // A table of anything, also where an indirect one may be.
            for table in [q.table, table_at, data_at] {
                for _ in 0..random.below(12) {
                    let index = random.below(24) as u16;
                    let at = address(&mut random, data_at);
                    let flags = match random.below(8) {
                        0 => random.next_u64() as u16,
                        n => n as u16,
                    };
                    let next = random.below(28) as u16;
                    q.describe(table, index, at, len(&mut random), flags, next);
                }
            }
        }
        // Most heads begin rightly: else no request would be read.
        for (slot, request) in (0u16..).zip(&requests) {
            if random.below(4) > 0 {
                let (request_at, reply_at, _, _) = q.slot(usize::from(slot));
                let bytes = u32::try_from(request.len()).unwrap();
                q.describe(q.table, slot, request_at, bytes, flag::NEXT, 20 + slot % 8);
                let room = [4096, 16, 15, 200][random.below(4) as usize];
                q.describe(q.table, 20 + slot % 8, reply_at, room, flag::WRITE, 0);
            }
        }
        for head in 0..HEADS {
            q.offer(head);
        }
        q.notify();
        let mut back = [0; HEADS as usize];
        for _ in 0..HEADS {
            let (head, written) = q.wait().unwrap();
            back[usize::from(head)] += 1;
            assert!(written == 0 || written >= 16, "{written} bytes");
        }
        assert_eq!(back, [1; HEADS as usize]);
        assert_eq!(q.wait_for(std::time::Duration::ZERO).unwrap(), None);
    }
    // It is the same device, and nothing has left its directory.
    let asked =
        guest.call_on(1, op::GETATTR, ROOT, &[GetattrIn::default().as_bytes()], &[], 0).unwrap();
    assert_eq!(asked.error, 0);
    assert!(AttrOut::read_from_prefix(&asked.body).is_ok());
    let beside = std::fs::read_dir(host.outside().parent().unwrap()).unwrap();
    let mut beside: Vec<_> = beside.map(|entry| entry.unwrap().file_name()).collect();
    beside.sort();
    assert_eq!(beside, ["shared", "socket"]);
    assert!(config.data >= PAGE);
}

#[test]
fn rings_of_anything() {
    if let Some(seed) = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        return history(seed);
    }
    let first = u64::from(std::process::id());
    (first..first + 6).for_each(history);
}
