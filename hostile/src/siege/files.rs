//! The same by ordinary system calls: in a mount, as any program of the user's makes them.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink};

use super::{Attack, Ground, Outcome, Tried, attack};

pub(super) const ATTACKS: &[Attack] = &[
    attack("mount-secret", "opens root's file, on both nodes", |g| {
        none(&[
            ("here", fs::read(g.path("secret")).map(drop)),
            ("there", fs::read(g.there("secret")).map(drop)),
        ])
    }),
    attack("mount-closed", "a file in a closed directory, by its path", |g| {
        none(&[
            ("read", fs::read(g.path("closed/open")).map(drop)),
            ("stat", fs::metadata(g.path("closed/open")).map(drop)),
        ])
    }),
    attack(
        "mount-closed-later",
        "keeps a descriptor of a directory that is closed then",
        closed_later,
    ),
    attack("mount-number", "a file by its number", by_number),
    attack("mount-who-exists", "which numbers there are", who_exists),
    attack("mount-chown", "takes files, and gives its own away", |g| {
        let (secret, mine) = (g.path("secret"), g.path("pub/mine"));
        none(&[
            ("take", chown(&secret, Some(super::STRANGER), None)),
            ("give", chown(&mine, Some(0), None)),
        ])
    }),
    attack("mount-setgid", "a program for a group that it is not in", setgid),
    attack("mount-device", "makes devices", |g| {
        use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
        let made = mknodat(
            CWD,
            g.path("pub/dev"),
            FileType::CharacterDevice,
            Mode::from(0o666),
            makedev(1, 1),
        );
        none(&[("device", made.map_err(Into::into))])
    }),
    attack("mount-sticky", "removes and replaces root's file in a sticky directory", |g| {
        let (target, mine) = (g.path("sticky/root"), g.path("pub/mine"));
        none(&[
            ("remove", fs::remove_file(&target)),
            ("replace", fs::rename(&mine, &target)),
            ("away", fs::rename(&target, g.path("pub/away"))),
        ])
    }),
    attack("mount-hard-link", "a second name for root's set-user-ID program", |g| {
        none(&[("link", fs::hard_link(g.path("setid"), g.path("pub/setid")))])
    }),
    attack("mount-symlink", "a symbolic link in a sticky directory that root follows", |g| {
        symlink(g.path("secret"), g.path("sticky/trap")).map_err(|e| e.to_string())?;
        let wrote = OpenOptions::new().write(true).open(g.path("sticky/trap"));
        none(&[("write", wrote.map(drop))])
    }),
    attack("mount-attributes", "attributes that only root may see or set", attributes),
    attack("mount-orphan-names", "names that the service might take for its own", orphan_names),
    attack("mount-corbel-dir", "writes into the directory of the mount's own files", |g| {
        let dir = g.cluster.join("n1/mnt/.corbel");
        none(&[
            ("make", fs::File::create(dir.join("new")).map(drop)),
            ("remove", fs::remove_file(dir.join("stats"))),
            ("rename", fs::rename(g.path("pub/mine"), dir.join("mine"))),
        ])
    }),
    attack("mount-full", "takes all of the space, while root writes", full),
];

/// Succeeded if one of them did.
fn none(tries: &[(&str, std::io::Result<()>)]) -> Tried {
    let said: Vec<String> = tries
        .iter()
        .map(|(what, how)| {
            format!(
                "{what}: {}",
                match how {
                    Ok(()) => "done".to_owned(),
                    Err(e) => e.to_string(),
                }
            )
        })
        .collect();
    Ok(Outcome::of(tries.iter().any(|(_, how)| how.is_ok()), said.join(", ")))
}

fn closed_later(ground: &Ground) -> Tried {
    use rustix::fs::{Mode, OFlags, open, openat};
    let dir = open(ground.path("way"), OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty())
        .map_err(|e| e.to_string())?;
    ground.root("mode way 700")?;
    let file = openat(&dir, "open", OFlags::RDONLY, Mode::empty());
    none(&[("openat", file.map(drop).map_err(Into::into))])
}

fn by_number(ground: &Ground) -> Tried {
    let ino = ground.ino("secret")?;
    let at = ground.cluster.join("n1/mnt/.corbel/inode").join(ino.0.to_string());
    none(&[("read", fs::read(&at).map(drop)), ("stat", fs::metadata(&at).map(drop))])
}

fn who_exists(ground: &Ground) -> Tried {
    let dir = ground.cluster.join("n1/mnt/.corbel/inode");
    let said = |ino: u64| {
        format!(
            "{:?}",
            fs::metadata(dir.join(ino.to_string())).map(drop).map_err(|e| e.raw_os_error())
        )
    };
    let (there, not) = (said(ground.ino("secret")?.0), said(1 << 40));
    Ok(Outcome::of(there != not, format!("{there} and {not}")))
}

fn setgid(ground: &Ground) -> Tried {
    let path = ground.path("pub/mine");
    let given = chown(&path, None, Some(super::OTHERS));
    let set = fs::set_permissions(&path, fs::Permissions::from_mode(0o2755));
    let m = fs::metadata(&path).map_err(|e| e.to_string())?;
    let has = m.gid() == super::OTHERS && m.mode() & 0o2000 != 0;
    Ok(Outcome::of(given.is_ok() || has, format!("{given:?}, {set:?}, {:o}", m.mode())))
}

fn attributes(ground: &Ground) -> Tried {
    use rustix::fs::{XattrFlags, getxattr, listxattr, setxattr};
    let (path, mine) = (ground.path("pub/attributes"), ground.path("pub/mine"));
    let mut buffer = vec![0; 1 << 16];
    let list = listxattr(&path, &mut buffer[..]).map_err(|e| e.to_string())?;
    let told = buffer[..list].windows(7).any(|w| w == b"trusted");
    let got = getxattr(&path, "trusted.key", &mut buffer[..]);
    let set = setxattr(&mine, "trusted.key", b"x", XattrFlags::empty());
    let capability = setxattr(
        &mine,
        "security.capability",
        &[1, 0, 0, 2, 255, 255, 255, 255, 0, 0, 0, 0, 255, 1, 0, 0, 0, 0, 0, 0],
        XattrFlags::empty(),
    );
    let any = told || got.is_ok() || set.is_ok() || capability.is_ok();
    Ok(Outcome::of(any, format!("listed {told}, {got:?}, {set:?}, {capability:?}")))
}

fn orphan_names(ground: &Ground) -> Tried {
    let ino = ground.ino("pub/mine")?;
    for name in [format!(".corbel-orphan-{}", ino.0), ".corbel-orphan-1".into(), ".corbel".into()] {
        let _ = fs::File::create(ground.path("pub").join(name));
    }
    let mut open = fs::File::create(ground.path("pub/gone")).map_err(|e| e.to_string())?;
    fs::remove_file(ground.path("pub/gone")).map_err(|e| e.to_string())?;
    open.write_all(b"x").and_then(|()| open.sync_all()).map_err(|e| e.to_string())?;
    ground.root("serve").map(|took| Outcome::Held(format!("root is served in {took} ms")))
}

fn full(ground: &Ground) -> Tried {
    let file = fs::File::create(ground.path("pub/much")).map_err(|e| e.to_string())?;
    let (block, mut at) = (vec![7; 1 << 20], 0u64);
    let why = loop {
        match file.write_at(&block, at) {
            Ok(n) => at += n as u64,
            Err(e) => break e,
        }
        if at > 4 << 30 {
            return Err("the volume is too large to be filled".into());
        }
    };
    let _ = file.sync_all();
    fs::remove_file(ground.path("pub/much")).map_err(|e| e.to_string())?;
    drop(file);
    let enough = why.raw_os_error() == Some(rustix::io::Errno::NOSPC.raw_os_error())
        || why.raw_os_error() == Some(rustix::io::Errno::DQUOT.raw_os_error());
    // Free again, and nobody is down.
    let begin = std::time::Instant::now();
    while ground.root("serve").is_err() {
        if begin.elapsed().as_secs() > 20 {
            return Ok(Outcome::Succeeded("the space does not come back".into()));
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    Ok(Outcome::of(!enough, format!("{why} after {at} bytes, and root is served")))
}
