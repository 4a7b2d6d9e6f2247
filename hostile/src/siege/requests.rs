//! Requests by number, which anybody may guess, and more of them than anybody needs.

use std::time::Instant;

use base::wire::Reader;
use storage::format::control::LeaseMode;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Request};
use storage::limits::RPC_SLOTS;

use super::attacker::Attacker;
use super::{Attack, Ground, Outcome, Tried, attack};

pub(super) const ATTACKS: &[Attack] = &[
    attack("request-inode", "attributes and places of root's file, by its number", |g| {
        let ino = g.ino("secret")?;
        refused(g, &Request::Inode { ino, mode: LeaseMode::Read, flags: rpc::WANT_READ })
    }),
    attack("request-lease", "a write lease on root's file, which nobody else has then", |g| {
        let ino = g.ino("secret")?;
        refused(g, &Request::Inode { ino, mode: LeaseMode::Write, flags: rpc::WANT_WRITE })
    }),
    attack("request-pin", "keeps root's file alive", |g| {
        let ino = g.ino("secret")?;
        refused(g, &Request::Inode { ino, mode: LeaseMode::None, flags: rpc::WANT_PIN })
    }),
    attack("request-read", "bytes of root's file", |g| {
        let ino = g.ino("secret")?;
        refused(g, &Request::Read { ino, offset: 0, len: 4096 })
    }),
    attack("request-extents", "where root's file lies", |g| {
        let ino = g.ino("secret")?;
        refused(g, &Request::Extents { ino, from: 0 })
    }),
    attack("request-names", "names of a closed directory", |g| {
        let dir = g.ino("closed")?;
        refused(g, &Request::Names { dir, cookie: 0 })
    }),
    attack("request-lookup", "a name in a closed directory", |g| {
        let dir = g.ino("closed")?;
        refused(g, &Request::Lookup { dir, name: b"open", mode: LeaseMode::Read, flags: 0 })
    }),
    attack("request-open-of-closed", "a readable file in a closed directory, by its number", |g| {
        let ino = g.ino("closed/open")?;
        refused(g, &Request::Read { ino, offset: 0, len: 4096 })
    }),
    attack("request-proofs", "the proof of root's file, guessed", proofs),
    attack("request-trusted", "attributes that only root may see", trusted),
    attack("request-quota", "what others use", quota),
    attack("request-garbage", "anything at all in all slots", garbage),
    attack("request-flood", "requests as fast as it can, in all slots, while root works", flood),
    attack("request-numbers", "inode numbers without end", numbers),
];

fn refused(ground: &Ground, request: &Request<'_>) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let mut said = Vec::new();
    for proof in [Proof::NONE, Proof(1), Proof(u64::MAX)] {
        match attacker.request(request, proof)? {
            Ok(body) => {
                return Ok(Outcome::Succeeded(format!("{} bytes for {proof:?}", body.len())));
            }
            Err(errno) => said.push(format!("{errno:?}")),
        }
    }
    Ok(Outcome::Held(said.join(", ")))
}

fn proofs(ground: &Ground) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let ino = ground.ino("closed/open")?;
    // With the proof of another inode too.
    let path = format!("{}/pub/mine", ground.name);
    let mine = attacker.walk(&path, LeaseMode::Read)?.map_err(|e| format!("{e:?}"))?;
    let request = Request::Inode { ino, mode: LeaseMode::Read, flags: 0 };
    for guess in std::iter::once(mine.proof.0).chain(1..5000) {
        if attacker.request(&request, Proof(guess))?.is_ok() {
            return Ok(Outcome::Succeeded(format!("{guess:x}")));
        }
    }
    Ok(Outcome::Held("5,000 guesses".into()))
}

fn trusted(ground: &Ground) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let path = format!("{}/pub/attributes", ground.name);
    let file = attacker.walk(&path, LeaseMode::Read)?.map_err(|e| format!("{e:?}"))?;
    let ino = file.record.ino;
    let one = attacker.request(&Request::XattrGet { ino, name: b"trusted.key" }, file.proof)?;
    let part =
        attacker.request(&Request::XattrPart { ino, name: b"trusted.key", from: 0 }, file.proof)?;
    let user = attacker.request(&Request::XattrGet { ino, name: b"user.key" }, file.proof)?;
    let list = attacker.request(&Request::XattrList { ino }, file.proof)?;
    if user.is_err() {
        return Err(format!("it does not see what it may see: {user:?}"));
    }
    let told = list.as_ref().is_ok_and(|list| list.windows(7).any(|w| w == b"trusted"));
    Ok(Outcome::of(one.is_ok() || part.is_ok() || told, format!("{one:?}, {part:?}, {list:?}")))
}

fn quota(ground: &Ground) -> Tried {
    use storage::format::rpc::{Account, AccountId};
    let attacker = Attacker::attach(&ground.socket())?;
    let body = attacker.request(&Request::Accounts { after: None }, Proof::NONE)?;
    let Ok(body) = body else { return Ok(Outcome::Held(format!("{body:?}"))) };
    let mut r = Reader::new("accounts", &body);
    let mut others = Vec::new();
    while r.left() > 0 {
        let account = Account::decode(&mut r).map_err(|e| e.to_string())?;
        if matches!(account.id, AccountId::User(uid) if uid != super::STRANGER) {
            others.push(account.id);
        }
    }
    Ok(Outcome::of(!others.is_empty(), format!("{others:?}")))
}

fn garbage(ground: &Ground) -> Tried {
    let mut random = base::random::Random::new(3);
    let attacker = Attacker::attach(&ground.socket())?;
    for round in 0..4000 {
        let mut body = vec![0; random.below(300) as usize];
        random.fill(&mut body);
        if let Some(kind) = body.first_mut() {
            *kind %= 20;
        }
        attacker.post(round % RPC_SLOTS, &body);
    }
    ground
        .root("serve")
        .map(|took| Outcome::Held(format!("4,000 bodies; root is served in {took} ms")))
}

fn flood(ground: &Ground) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut body = Vec::new();
            Request::StatFs.encode(base::Sequence(0), &mut body);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                (0..RPC_SLOTS).for_each(|slot| attacker.post(slot, &body));
            }
        });
        let took = ground.root("serve").and_then(|t| t.parse::<u64>().map_err(|e| e.to_string()));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        took.map(|took| Outcome::of(took > 10_000, format!("root is served in {took} ms")))
    })
}

fn numbers(ground: &Ground) -> Tried {
    let (attacker, begin) = (Attacker::attach(&ground.socket())?, Instant::now());
    let mut had = 0;
    while begin.elapsed().as_secs() < 3 {
        match attacker.request(&Request::Inodes { count: u32::MAX }, Proof::NONE)? {
            Ok(body) => {
                had += Reader::new("numbers", &body).u32().map_err(|e| e.to_string())? as u64
            }
            Err(_) => break,
        }
    }
    let took = ground.root("serve")?;
    Ok(Outcome::of(had > 1 << 20, format!("{had} numbers; root is served in {took} ms")))
}
