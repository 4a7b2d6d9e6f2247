//! Memory: whoever can map an arena reads all that is in it, without a word to anybody.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use client::libfs::linux::Mapping;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use storage::format::rpc;

use super::attacker::{Attacker, ask, receive, send};
use super::{Attack, Ground, Outcome, Tried, attack};

pub(super) const ATTACKS: &[Attack] = &[
    attack("arena-of-secret", "a 0600 file of root's is in an arena that it maps", |g| {
        finds(g, "secret")
    }),
    attack("arena-of-closed", "a 0644 file in a 0700 directory is in an arena that it maps", |g| {
        finds(g, "closed/open")
    }),
    attack("arena-of-group", "a 0640 file of another group is in an arena that it maps", |g| {
        finds(g, "group")
    }),
    attack(
        "arena-after-rm",
        "a file that was for everybody is read in a mapping after it was removed",
        |g| loses(g, "way/open", "remove way/open"),
    ),
    attack("arena-after-chmod", "the same, when its directory was closed", |g| {
        loses(g, "way/open", "mode way 700")
    }),
    attack("arena-after-mode", "the same, when its own mode was closed", |g| {
        loses(g, "way/open", "mode way/open 600")
    }),
    attack("arena-after-rename", "the same, when its directory was moved into a closed one", |g| {
        loses(g, "way/open", "rename way closed/way")
    }),
    attack("arena-written", "an arena is written through the descriptor of a reader", written),
    attack("arena-reopened", "an arena's descriptor is opened again, for writing", reopened),
    attack("arena-cut", "an arena is cut, or made longer, through the descriptor of a reader", cut),
    attack(
        "arena-asked-twice",
        "an arena that it may have and one that it may not are asked for in one breath",
        asked_twice,
    ),
    attack("arena-numbers", "arenas that there are not, by any number", numbers),
];

/// Arenas that a volume of the siege may have.
const ARENAS: u64 = 256;
/// What is taken from somebody is gone from memory after this time: the bound of docs/service.md, on a busy machine.
const GONE: Duration = Duration::from_secs(30);

/// Every arena that it is given.
fn given(attacker: &Attacker) -> Result<Vec<OwnedFd>, String> {
    let mut all = Vec::new();
    for arena in 0..ARENAS {
        if let (Ok(_), fds) = ask(&attacker.socket, rpc::HOST_ARENA, arena)? {
            all.extend(fds);
        }
    }
    Ok(all)
}

/// How often a text is in what it is given. What was never written is skipped.
pub(super) fn search(attacker: &Attacker, text: &str) -> Result<usize, String> {
    given(attacker)?.iter().map(|fd| occurrences(fd, text)).sum()
}

fn occurrences(fd: &OwnedFd, text: &str) -> Result<usize, String> {
    let (mut found, mut at) = (0, 0u64);
    let mut buffer = vec![0; 1 << 20];
    while let Ok(data) = rustix::fs::seek(fd, rustix::fs::SeekFrom::Data(at)) {
        let got = rustix::io::pread(fd, &mut buffer, data).map_err(|e| format!("an arena: {e}"))?;
        if got == 0 {
            break;
        }
        found += buffer[..got].windows(text.len()).filter(|w| *w == text.as_bytes()).count();
        at = data + got as u64;
    }
    Ok(found)
}

fn finds(ground: &Ground, part: &str) -> Tried {
    let there = ground.root(&format!("find {part}"))?;
    let attacker = Attacker::attach(&ground.socket())?;
    let found = search(&attacker, &ground.marker(part))?;
    Ok(Outcome::of(found > 0, format!("{found} of {there} times")))
}

/// It sees what it may see, and keeps the descriptors; then something is taken from it.
fn loses(ground: &Ground, part: &str, how: &str) -> Tried {
    let there = ground.root(&format!("find {part}"))?;
    let attacker = Attacker::attach(&ground.socket())?;
    let (arenas, marker) = (given(&attacker)?, ground.marker(part));
    let count = || arenas.iter().map(|fd| occurrences(fd, &marker)).sum::<Result<usize, _>>();
    let before = count()?;
    if before == 0 {
        return Err(format!("it does not see what is for everybody ({there} times there)"));
    }
    ground.root(how)?;
    let begin = Instant::now();
    loop {
        let left = count()?;
        if left == 0 {
            return Ok(Outcome::Held(format!(
                "{before} times, gone after {} ms",
                begin.elapsed().as_millis()
            )));
        }
        if begin.elapsed() > GONE {
            return Ok(Outcome::Succeeded(format!("{left} of {before} times after {GONE:?}")));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// An arena that it is given.
fn one(ground: &Ground) -> Result<(Attacker, OwnedFd), String> {
    ground.root("find way/open")?;
    let attacker = Attacker::attach(&ground.socket())?;
    let fd = given(&attacker)?.into_iter().next().ok_or("it is given no arena")?;
    Ok((attacker, fd))
}

fn written(ground: &Ground) -> Tried {
    let (_attacker, fd) = one(ground)?;
    let wrote = rustix::io::pwrite(&fd, b"hostile", 0);
    let mapped = Mapping::new(fd.as_fd(), 4096, true);
    Ok(Outcome::of(wrote.is_ok() || mapped.is_ok(), format!("{wrote:?}, {:?}", mapped.map(drop))))
}

fn reopened(ground: &Ground) -> Tried {
    use std::os::fd::AsRawFd as _;
    let (_attacker, fd) = one(ground)?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let opened = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    Ok(Outcome::of(opened.is_ok(), format!("{:?}", opened.map(drop))))
}

fn cut(ground: &Ground) -> Tried {
    let (_attacker, fd) = one(ground)?;
    let cut = rustix::fs::ftruncate(&fd, 0);
    let grown = rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, 1 << 40);
    let punched =
        rustix::fs::fallocate(&fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096);
    let any = cut.is_ok() || grown.is_ok() || punched.is_ok();
    Ok(Outcome::of(any, format!("{cut:?}, {grown:?}, {punched:?}")))
}

/// Who decides and who hands out are two processes: an answer must not be taken for that of another question.
fn asked_twice(ground: &Ground) -> Tried {
    let there = ground.root("find secret")?;
    let attacker = Attacker::attach(&ground.socket())?;
    let socket = &attacker.socket;
    let mut open = None;
    for arena in 0..ARENAS {
        if let (Ok(_), _) = ask(socket, rpc::HOST_ARENA, arena)? {
            open = Some(arena);
            break;
        }
    }
    let open = open.ok_or("it is given no arena")?;
    let (marker, mut found, mut asked) = (ground.marker("secret"), 0, 0);
    for _ in 0..3 {
        for other in 0..ARENAS {
            for arena in [open, other, open, other] {
                send(socket, &rpc::host_request(rpc::HOST_ARENA, arena))?;
            }
            asked += 4;
            for _ in 0..4 {
                // One answer to each question, whatever it is.
                let (_, fds) = receive(socket)?;
                for fd in &fds {
                    found += occurrences(fd, &marker)?;
                }
            }
        }
    }
    Ok(Outcome::of(found > 0, format!("{found} times in {asked} answers ({there} times there)")))
}

fn numbers(ground: &Ground) -> Tried {
    let attacker = Attacker::attach(&ground.socket())?;
    let mut given = Vec::new();
    for number in
        [ARENAS + 1, 1 << 16, u64::from(u32::MAX) - 1, u64::from(u32::MAX), 1 << 32, u64::MAX]
    {
        if let (Ok(bytes), _) = ask(&attacker.socket, rpc::HOST_ARENA, number)? {
            given.push((number, bytes));
        }
    }
    Ok(Outcome::of(!given.is_empty(), format!("{given:?}")))
}
