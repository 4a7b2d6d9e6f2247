//! A client's own log: its size, its words, its bytes.

use base::InodeId;
use client::libfs::host::Memory as _;
use rustix::fs::FallocateFlags;
use storage::format::control;
use storage::format::entry::{Op, mask};
use storage::limits::{LEASE_SLOTS, RPC_SLOTS};

use super::attacker::Attacker;
use super::{Attack, Ground, Outcome, Tried, attack};

pub(super) const ATTACKS: &[Attack] = &[
    attack("log-cut", "its log is cut to nothing while the service reads it", |g| resized(g, 0)),
    attack("log-grown", "its log grows until there is no memory", |g| resized(g, 1 << 36)),
    attack("log-garbage", "garbage where entries are expected", garbage),
    attack("log-lengths", "entries that say they are longer than anything", lengths),
    attack("log-words", "every word of the control area is anything", words),
    attack("log-stuck", "an operation that never ends, under a lease that root wants", stuck),
    attack("log-kept", "what a kernel keeps, as only a mount may say", kept),
    attack("log-sequences", "sequences that go back, and far ahead", sequences),
];

fn resized(ground: &Ground, to: u64) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let file = &attacker.log_file;
    let before = rustix::fs::fstatvfs(file).map_err(|e| e.to_string())?;
    let done = match to {
        0 => rustix::fs::ftruncate(file, 0),
        _ => rustix::fs::fallocate(file, FallocateFlags::empty(), 0, 1 << 28)
            .and_then(|()| rustix::fs::ftruncate(file, to)),
    };
    attacker.ring();
    let took = ground.root("serve")?;
    // What it took comes back.
    let begin = std::time::Instant::now();
    loop {
        let now = rustix::fs::fstatvfs(file).map_err(|e| e.to_string())?;
        let left = before.f_bfree.saturating_sub(now.f_bfree) * now.f_bsize;
        if to == 0 || left < 64 << 20 {
            return Ok(Outcome::Held(format!("{done:?}; root is served in {took} ms")));
        }
        if begin.elapsed().as_secs() > 20 {
            return Ok(Outcome::Succeeded(format!("{done:?}, and {left} bytes are gone")));
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn garbage(ground: &Ground) -> Tried {
    let mut random = base::random::Random::new(2);
    for _ in 0..8 {
        let attacker = Attacker::attach(&ground.socket())?;
        let mut bytes = vec![0; 64 << 10];
        random.fill(&mut bytes);
        attacker.memory.write(attacker.descriptor.lane_offset(0), &bytes);
        attacker.set(control::LAST_SEQUENCE, random.below(1 << 40));
        attacker.set(control::SYNC_REQUEST, random.below(1 << 40));
        attacker.ring();
    }
    ground.root("serve").map(|took| Outcome::Held(format!("root is served in {took} ms")))
}

fn lengths(ground: &Ground) -> Tried {
    for at in (0..64).step_by(4) {
        let attacker = Attacker::attach(&ground.socket())?;
        let place = attacker.descriptor.lane_offset(0);
        let chmod = setattr(InodeId::ROOT);
        attacker.append(&chmod, 1)?;
        attacker.memory.write(place + at, &u32::MAX.to_le_bytes());
        attacker.set(control::SYNC_REQUEST, 1);
        attacker.ring();
    }
    ground.root("serve").map(|took| Outcome::Held(format!("root is served in {took} ms")))
}

fn setattr(ino: InodeId) -> Op<'static> {
    let none = storage::format::entry::Stamp::default();
    Op::SetAttr { ino, mask: mask::MODE, mode: 0o777, uid: 0, gid: 0, atime: none, mtime: none }
}

fn words(ground: &Ground) -> Tried {
    for value in [u64::MAX, 1, 1 << 63, 0x5555_5555_5555_5555] {
        let attacker = Attacker::attach(&ground.socket())?;
        for at in (0..control::RPC + (RPC_SLOTS as u64 * 64)).step_by(8) {
            attacker.set(at, value);
        }
        attacker.ring();
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    ground.root("serve").map(|took| Outcome::Held(format!("root is served in {took} ms")))
}

/// It stands inside an operation for ever, and holds what root wants next.
fn stuck(ground: &Ground) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let path = format!("{}/pub", ground.name);
    let lease = attacker.walk(&path, control::LeaseMode::Write)?.map_err(|e| format!("{e:?}"))?;
    for slot in 0..8 {
        attacker.set(control::IN_OP + slot * 64, 1);
    }
    let took = within(ground)?;
    Ok(Outcome::of(
        took > 10_000,
        format!("lease {:?}; root is served in {took} ms", lease.granted),
    ))
}

fn within(ground: &Ground) -> Result<u64, String> {
    let said = ground.root("touch pub/new")?;
    said.parse().map_err(|e| format!("{said}: {e}"))
}

fn kept(ground: &Ground) -> Tried {
    // A busy machine makes one of them slow; the attack would make each.
    let mut waits = Vec::new();
    for _ in 0..4 {
        let Ok(attacker) = Attacker::attach(&ground.socket()) else { break };
        let path = format!("{}/pub", ground.name);
        attacker.walk(&path, control::LeaseMode::Read)?.map_err(|e| format!("{e:?}"))?;
        for word in 0..LEASE_SLOTS as u64 / 64 {
            attacker.set(control::KEPT + word * 8, u64::MAX);
        }
        waits.push(within(ground)?);
    }
    let fastest = waits.iter().min().ok_or("no client of it could attach")?;
    Ok(Outcome::of(*fastest > 900, format!("root waits for {waits:?} ms")))
}

fn sequences(ground: &Ground) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    for value in [u64::MAX, u64::MAX - 1, 1 << 63, 0, 1 << 32] {
        attacker.set(control::LAST_SEQUENCE, value);
        attacker.set(control::SYNC_REQUEST, value);
        attacker.ring();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    ground.root("serve").map(|took| Outcome::Held(format!("root is served in {took} ms")))
}
