//! A client's own log: its size, its words, its bytes.

use std::fs;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use base::InodeId;
use client::libfs::host::Memory as _;
use rustix::fs::{FallocateFlags, StatVfs};
use storage::format::control;
use storage::format::entry::{Op, mask};
use storage::limits::{LEASE_SLOTS, RPC_SLOTS};

use super::PER_USER;
use super::attacker::Attacker;
use super::{Attack, Ground, Outcome, Tried, attack};

pub(super) const ATTACKS: &[Attack] = &[
    attack("log-cut", "its log is cut to nothing while the service reads it", |g| resized(g, 0)),
    attack("log-grown", "its log grows until there is no memory", |g| resized(g, 1 << 36)),
    attack(
        "log-after-end",
        "a log that counts no more is filled, whose descriptor it kept",
        after_end,
    ),
    attack(
        "log-after-ends",
        "the same of one log after the other, each as long as it was",
        after_ends,
    ),
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
    if to == 0 {
        return Ok(Outcome::Held(format!("{done:?}; root is served in {took} ms")));
    }
    let gone = comes_back(file, &before, 64 << 20)?;
    Ok(match gone {
        None => Outcome::Held(format!("{done:?}; root is served in {took} ms")),
        Some(bytes) => Outcome::Succeeded(format!("{done:?}, and {bytes} bytes are gone")),
    })
}

/// Waits until the file system has what it had before, but for so many bytes; else what is gone for good.
fn comes_back(file: &OwnedFd, before: &StatVfs, but: u64) -> Result<Option<u64>, String> {
    let begin = Instant::now();
    loop {
        let now = rustix::fs::fstatvfs(file).map_err(|e| e.to_string())?;
        let gone = before.f_bfree.saturating_sub(now.f_bfree) * now.f_bsize;
        if gone < but {
            return Ok(None);
        }
        if begin.elapsed().as_secs() > 20 {
            return Ok(Some(gone));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Hangs up, and waits until its log has lost its name.
fn ended(attacker: Attacker) -> Result<OwnedFd, String> {
    let Attacker { socket, log_file, memory, .. } = attacker;
    drop((socket, memory));
    let link = format!("/proc/self/fd/{}", log_file.as_raw_fd());
    let begin = Instant::now();
    while fs::read_link(&link).is_ok_and(|at| {
        let name = at.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("log.") && !name.contains("deleted")
    }) {
        if begin.elapsed().as_secs() > 20 {
            return Err("its log stays where it was".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(log_file)
}

fn after_end(ground: &Ground) -> Tried {
    let file = ended(Attacker::attach(&ground.socket())?)?;
    let before = rustix::fs::fstatvfs(&file).map_err(|e| e.to_string())?;
    let (mut done, mut gone) = (Vec::new(), None);
    // The second time it is known for what it is.
    for _ in 0..2 {
        done.push(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 28));
        gone = gone.or(comes_back(&file, &before, 64 << 20)?);
    }
    Ok(match gone {
        None => Outcome::Held(format!("{done:?}; all of it came back")),
        Some(bytes) => Outcome::Succeeded(format!("{done:?}, and {bytes} bytes are gone")),
    })
}

fn after_ends(ground: &Ground) -> Tried {
    let mut held = Vec::new();
    let (mut before, mut each, mut barred) = (None, 0, None);
    while held.len() < 4 * PER_USER {
        let attacker = match Attacker::attach(&ground.socket()) {
            Ok(attacker) => attacker,
            Err(why) => {
                barred = Some(why);
                break;
            }
        };
        each = attacker.descriptor.segment_bytes();
        let file = ended(attacker)?;
        if before.is_none() {
            before = Some(rustix::fs::fstatvfs(&file).map_err(|e| e.to_string())?);
        }
        let full = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, each);
        held.push(file);
        if full.is_err() {
            break;
        }
    }
    let took = ground.root("serve")?;
    let count = held.len();
    // Three times as many as it may have clients, and no more.
    Ok(Outcome::of(
        count > 3 * PER_USER + 1,
        format!("{count} logs of {each} bytes, then {barred:?}; root is served in {took} ms"),
    ))
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
