//! Operations that LibFS would never write, in a log that is well formed. Each is judged; then root looks what is so.

use base::InodeId;
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, Stamp, mask};
use storage::format::item::ReadClass;
use storage::format::rpc::{Amount, InodeReply};

use super::attacker::Attacker;
use super::{Attack, Ground, Outcome, STRANGER, Tried, attack};

pub(super) const ATTACKS: &[Attack] = &[
    attack("entry-write-secret", "bytes into a file of root's", |g| {
        let ino = g.ino("secret")?;
        changes(
            g,
            "secret",
            &["secret"],
            &[Op::Write { ino, offset: 0, data: b"hostile", clear_setid: true }],
        )
    }),
    attack("entry-cut-secret", "cuts a file of root's", |g| {
        let ino = g.ino("secret")?;
        changes(g, "secret", &["secret"], &[Op::Truncate { ino, size: 0, clear_setid: true }])
    }),
    attack("entry-chmod-secret", "opens a file of root's to all", |g| {
        let op = setattr(g.ino("secret")?, mask::MODE, 0o666, 0);
        changes(g, "secret", &["secret"], &[op])
    }),
    attack("entry-chown-secret", "takes a file of root's for its own", |g| {
        let op = setattr(g.ino("secret")?, mask::UID, 0, STRANGER);
        changes(g, "secret", &["secret"], &[op])
    }),
    attack("entry-give-setid", "gives a program of its own to root, with set-user-ID", give_setid),
    attack("entry-make-as-root", "makes a set-user-ID program that is root's", |g| {
        makes(g, 0o104_755, 0)
    }),
    attack("entry-make-device", "makes a device that is the machine's memory", |g| {
        makes(g, 0o060_666, STRANGER)
    }),
    attack("entry-write-setid", "writes into root's set-user-ID program", |g| {
        let ino = g.ino("setid")?;
        changes(
            g,
            "setid",
            &["setid"],
            &[Op::Write { ino, offset: 0, data: b"hostile", clear_setid: false }],
        )
    }),
    attack("entry-reap", "frees an inode that is in use", |g| {
        let ino = g.ino("pub/mine")?;
        held(g, "pub/mine", LeaseMode::Write, |_| vec![Op::Reap { ino }])
    }),
    attack("entry-place", "says whom directories let come to its blocks", |g| {
        let ino = g.ino("pub/mine")?;
        held(g, "pub/mine", LeaseMode::Write, |_| {
            vec![Op::Place { ino, reach: ReadClass::World, later: false }]
        })
    }),
    attack("entry-move", "says where blocks lie", |g| {
        let ino = g.ino("pub/mine")?;
        held(g, "pub/mine", LeaseMode::Write, |_| {
            vec![Op::Move { ino, from: 0, to: u64::MAX, out: true }]
        })
    }),
    attack("entry-link-secret", "another name for a file of root's", |g| links(g, "secret")),
    attack("entry-link-setid", "another name for root's set-user-ID program", |g| {
        links(g, "setid")
    }),
    attack("entry-link-readable", "another name for a file of root's that it may read", |g| {
        links(g, "sticky/root")
    }),
    attack("entry-link-directory", "another name for a directory", |g| links(g, "way")),
    attack("entry-unlink-closed", "removes a name from a closed directory", |g| {
        let (ino, parent) = (g.ino("closed/open")?, g.ino("closed")?);
        changes(g, "closed/open", &[], &[Op::Unlink { ino, parent, name: b"open", open: false }])
    }),
    attack("entry-unlink-sticky", "removes root's file from a sticky directory", |g| {
        let (ino, parent) = (g.ino("sticky/root")?, g.ino("sticky")?);
        changes(
            g,
            "sticky/root",
            &["sticky/root", "sticky"],
            &[Op::Unlink { ino, parent, name: b"root", open: false }],
        )
    }),
    attack("entry-rename-sticky", "puts its own file over root's in a sticky directory", |g| {
        let (ino, parent, replaced, new_parent) =
            (g.ino("pub/mine")?, g.ino("pub")?, g.ino("sticky/root")?, g.ino("sticky")?);
        let op = Op::Rename {
            ino,
            parent,
            name: b"mine",
            new_parent,
            new_name: b"root",
            replaced,
            noreplace: false,
            exchange: false,
            open: false,
        };
        changes(g, "sticky/root", &["pub/mine", "sticky/root", "pub", "sticky"], &[op])
    }),
    attack("entry-clone-secret", "clones root's bytes into a file of its own", |g| {
        let (ino, source) = (g.ino("pub/mine")?, g.ino("secret")?);
        changes(
            g,
            "pub/mine",
            &["pub/mine", "secret"],
            &[Op::CloneRange {
                ino,
                offset: 0,
                len: 4096,
                source,
                source_offset: 0,
                zeroes: false,
            }],
        )
    }),
    attack("entry-clone-beyond", "clones what lies in blocks beyond a file's end", |g| {
        let ino = g.ino("pub/mine")?;
        let op = Op::CloneRange {
            ino,
            offset: 1 << 20,
            len: 4096,
            source: ino,
            source_offset: 0,
            zeroes: true,
        };
        held(g, "pub/mine", LeaseMode::Write, |_| vec![op])
    }),
    attack("entry-quota", "gives itself more space", |g| {
        let (ino, limit) = (InodeId::ROOT, Amount { blocks: 1 << 40, inodes: 1 << 40 });
        changes(g, "", &[ROOT], &[Op::SetQuota { ino, user: Some(STRANGER), limit }])
    }),
    attack("entry-number", "a file under a number that is another's", |g| {
        let (ino, parent) = (g.ino("secret")?, g.ino("pub")?);
        let op = create(ino, parent, b"taken", 0o100_644, STRANGER);
        changes(g, "secret", &["secret", "pub"], &[op])
    }),
    attack("entry-security", "gives its program capabilities", |g| {
        let ino = g.ino("pub/mine")?;
        let value = [1, 0, 0, 2, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0xff, 1, 0, 0, 0, 0, 0, 0];
        let op = Op::SetXattr { ino, name: b"security.capability", value: &value };
        held(g, "pub/mine", LeaseMode::Write, |_| vec![op])
    }),
    attack("entry-trusted", "writes attributes that are root's", |g| {
        let ino = g.ino("pub/mine")?;
        let op = Op::SetXattr { ino, name: b"trusted.key", value: b"hostile" };
        held(g, "pub/mine", LeaseMode::Write, |_| vec![op])
    }),
    attack("entry-time", "a time of the year 2554", time),
    attack("entry-cycle", "puts a directory below itself", cycle),
    attack("entry-names", "names with slashes, dots and zeroes", names),
];

/// The root of the volume, where leases are asked for.
const ROOT: &str = "/";
/// How often it takes leases that it lost before it could use them.
const TRIES: u32 = 5;

fn setattr(ino: InodeId, mask: u64, mode: u32, uid: u32) -> Op<'static> {
    let none = Stamp::default();
    Op::SetAttr { ino, mask, mode, uid, gid: 0, atime: none, mtime: none }
}

fn create(ino: InodeId, parent: InodeId, name: &[u8], mode: u32, uid: u32) -> Op<'_> {
    let rdev = if mode & 0o170_000 == 0o060_000 { 0x101 } else { 0 };
    Op::Create { ino, parent, mode, rdev, uid, gid: uid, name, target: b"" }
}

/// Appends each; all must be refused, or it is expelled. How they were.
fn refused(attacker: &Attacker, ops: &[Op<'_>]) -> Result<(bool, String), String> {
    let mut said = Vec::new();
    for op in ops {
        attacker.append(op, 1)?;
        match attacker.judged() {
            Ok(None) => return Ok((false, format!("{op:?} is done"))),
            Ok(Some(errno)) => said.push(format!("{errno:?}")),
            Err(e) => said.push(e),
        }
    }
    Ok((true, said.join(", ")))
}

/// With leases on what it can walk to, and without on the rest: nothing of it may be seen of a part afterwards.
fn changes(ground: &Ground, part: &str, leases: &[&str], ops: &[Op<'_>]) -> Tried {
    let state = || -> Result<String, String> {
        let read = ground.root(&format!("read {part}")).unwrap_or_default();
        Ok(ground.root(&format!("stat {part}"))? + &read)
    };
    let before = state()?;
    let attacker = Attacker::attach(&ground.socket())?;
    // Somebody may want a lease back just then: what is refused for that says nothing of rights.
    let mut said = String::new();
    for _ in 0..TRIES {
        for path in leases {
            let had = match *path {
                ROOT => attacker.root(LeaseMode::Write)?,
                _ => attacker.walk(&format!("{}/{path}", ground.name), LeaseMode::Write)?,
            };
            had.map_err(|e| format!("{path}: {e:?}"))?;
        }
        let (all, how) = refused(&attacker, ops)?;
        if !all {
            return Ok(Outcome::Succeeded(how));
        }
        let stale = how.contains("STALE");
        said = how;
        if leases.is_empty() || !stale {
            break;
        }
    }
    if !leases.is_empty() && said.contains("STALE") {
        return Err(format!("it never has the leases {leases:?}: {said}"));
    }
    let after = state()?;
    Ok(Outcome::of(before != after, format!("{said}; {before:.40} and then {after:.40}")))
}

/// With a lease on a part, which it may have.
fn held<'a>(
    ground: &Ground,
    part: &str,
    mode: LeaseMode,
    ops: impl FnOnce(&InodeReply) -> Vec<Op<'a>>,
) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let path = format!("{}/{part}", ground.name);
    let reply = attacker.walk(&path, mode)?.map_err(|e| format!("{path}: {e:?}"))?;
    let (all, said) = refused(&attacker, &ops(&reply))?;
    Ok(Outcome::of(!all, said))
}

/// It keeps what others want to be rid of: the blocks, and a program with set-user-ID when it has been mended.
fn links(ground: &Ground, part: &str) -> Tried {
    let (ino, parent) = (ground.ino(part)?, ground.ino("pub")?);
    changes(ground, part, &[part, "pub"], &[Op::Link { ino, parent, name: b"kept" }])
}

fn makes(ground: &Ground, mode: u32, uid: u32) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let (ino, _) = *attacker.numbers(1)?.first().ok_or("no numbers")?;
    let path = format!("{}/pub", ground.name);
    let dir = attacker.walk(&path, LeaseMode::Write)?.map_err(|e| format!("{e:?}"))?;
    let (all, said) = refused(&attacker, &[create(ino, dir.record.ino, b"made", mode, uid)])?;
    let there = ground.root("stat pub/made");
    Ok(Outcome::of(!all || there.is_ok(), format!("{said}; {there:?}")))
}

fn give_setid(ground: &Ground) -> Tried {
    let ino = ground.ino("pub/mine")?;
    let ops = [setattr(ino, mask::MODE | mask::UID, 0o4755, 0), setattr(ino, mask::UID, 0, 0)];
    held(ground, "pub/mine", LeaseMode::Write, |_| ops.to_vec())
}

fn names(ground: &Ground) -> Tried {
    let path = format!("{}/pub", ground.name);
    // Each costs a client: they are few, since the next has to wait for longer.
    let bad: [&[u8]; 3] = [b"../secret", b"..", b"a\0b"];
    let mut said = Vec::new();
    for name in bad {
        let attacker = Attacker::attach(&ground.socket())?;
        let dir = attacker.walk(&path, LeaseMode::Write)?.map_err(|e| format!("{e:?}"))?;
        let (ino, _) = *attacker.numbers(1)?.first().ok_or("no numbers")?;
        let (all, how) =
            refused(&attacker, &[create(ino, dir.record.ino, name, 0o100_644, STRANGER)])?;
        if !all {
            return Ok(Outcome::Succeeded(format!("{name:?}: {how}")));
        }
        said.push(how);
    }
    Ok(Outcome::Held(said.join("; ")))
}

/// It may change its own file; but not to a time that nobody's clock has.
fn time(ground: &Ground) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let path = format!("{}/pub/mine", ground.name);
    let reply = attacker.walk(&path, LeaseMode::Write)?.map_err(|e| format!("{e:?}"))?;
    attacker.append(&setattr(reply.record.ino, mask::MODE, 0o600, 0), u64::MAX)?;
    let judged = attacker.judged()?;
    let stat = ground.root("stat pub/mine")?;
    let ctime: u64 = stat.rsplit(' ').next().and_then(|t| t.parse().ok()).ok_or("no ctime")?;
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_err(|e| e.to_string())?;
    Ok(Outcome::of(
        ctime > now.as_secs() + 60,
        format!("{judged:?}; ctime {ctime}, now {}", now.as_secs()),
    ))
}

fn cycle(ground: &Ground) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let numbers = attacker.numbers(2)?;
    let [(a, _), (b, _)] = numbers[..] else { return Err("no numbers".into()) };
    let path = format!("{}/pub", ground.name);
    let dir = attacker.walk(&path, LeaseMode::Write)?.map_err(|e| format!("{e:?}"))?.record.ino;
    for op in [create(a, dir, b"a", 0o040_755, STRANGER), create(b, a, b"b", 0o040_755, STRANGER)] {
        attacker.append(&op, 1)?;
        if let Some(errno) = attacker.judged()? {
            return Err(format!("it cannot make directories: {errno:?}"));
        }
    }
    let op = Op::Rename {
        ino: a,
        parent: dir,
        name: b"a",
        new_parent: b,
        new_name: b"c",
        replaced: InodeId::NONE,
        noreplace: false,
        exchange: false,
        open: false,
    };
    let (all, said) = refused(&attacker, &[op])?;
    Ok(Outcome::of(!all, said))
}
