//! Workloads: short sequences of operations on a small set of names, as ACE makes them
//! (CrashMonkey, OSDI'18). Written as text, so that a failure can be run again.

use base::random::Random;

/// Flag of rename.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flag {
    /// Replace what is there.
    Plain,
    /// Only if nothing is there.
    NoReplace,
    /// Swap the two.
    Exchange,
}

/// What an application does. Names are paths from the root.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Act {
    Create(String),
    Mkdir(String),
    Symlink(String, String),
    Write(String, u64, u64),
    Append(String, u64),
    Truncate(String, u64),
    Fallocate(String, u64, u64, u16),
    Rename(String, String, Flag),
    Link(String, String),
    Unlink(String),
    Rmdir(String),
    Chmod(String, u32),
    Chown(String, u32),
    Utime(String),
    SetXattr(String, String, usize),
    RemoveXattr(String, String),
    Clone(String, String),
    /// A file without a name is made, written and named, in three entries; then it is closed.
    Tmpfile(String, u64),
    /// Rights of user 7, and those of others.
    SetAcl(String, u16, u16),
    /// The limit of user 7, in blocks.
    Quota(u64),
    /// The volume as it is stays under a name.
    Snapshot(String),
    /// It is given up.
    DropSnapshot(String),
    /// A file as a snapshot has it comes into one that is there: all of it.
    Back(String, String, String),
    /// The same of a piece: from where, to where, how much.
    Piece(String, String, String, [u64; 3]),
    Fsync,
    /// Nothing, for long enough that the service publishes.
    Pause,
}

impl std::fmt::Display for Act {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Create(n) => write!(f, "create {n}"),
            Self::Mkdir(n) => write!(f, "mkdir {n}"),
            Self::Symlink(n, to) => write!(f, "symlink {n} {to}"),
            Self::Write(n, at, len) => write!(f, "write {n} {at} {len}"),
            Self::Append(n, len) => write!(f, "append {n} {len}"),
            Self::Truncate(n, size) => write!(f, "truncate {n} {size}"),
            Self::Fallocate(n, at, len, mode) => write!(f, "fallocate {n} {at} {len} {mode}"),
            Self::Rename(a, b, Flag::Plain) => write!(f, "rename {a} {b}"),
            Self::Rename(a, b, Flag::NoReplace) => write!(f, "noreplace {a} {b}"),
            Self::Rename(a, b, Flag::Exchange) => write!(f, "exchange {a} {b}"),
            Self::Link(a, b) => write!(f, "link {a} {b}"),
            Self::Unlink(n) => write!(f, "unlink {n}"),
            Self::Rmdir(n) => write!(f, "rmdir {n}"),
            Self::Chmod(n, mode) => write!(f, "chmod {n} {mode}"),
            Self::Chown(n, uid) => write!(f, "chown {n} {uid}"),
            Self::Utime(n) => write!(f, "utime {n}"),
            Self::SetXattr(n, name, len) => write!(f, "setxattr {n} {name} {len}"),
            Self::RemoveXattr(n, name) => write!(f, "removexattr {n} {name}"),
            Self::Clone(a, b) => write!(f, "clone {a} {b}"),
            Self::Tmpfile(n, len) => write!(f, "tmpfile {n} {len}"),
            Self::SetAcl(n, user, others) => write!(f, "setacl {n} {user} {others}"),
            Self::Quota(blocks) => write!(f, "quota {blocks}"),
            Self::Snapshot(name) => write!(f, "snapshot {name}"),
            Self::DropSnapshot(name) => write!(f, "drop {name}"),
            Self::Back(s, a, b) => write!(f, "back {s} {a} {b}"),
            Self::Piece(s, a, b, [from, to, len]) => {
                write!(f, "piece {s} {a} {b} {from} {to} {len}")
            }
            Self::Fsync => f.write_str("fsync"),
            Self::Pause => f.write_str("pause"),
        }
    }
}

impl Act {
    /// From its text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let bad = || format!("no operation: {text:?}");
        let name = |i: usize| words.get(i).map(ToString::to_string).ok_or_else(bad);
        let number = |i: usize| words.get(i).and_then(|w| w.parse::<u64>().ok()).ok_or_else(bad);
        let rename = |flag| Ok(Self::Rename(name(1)?, name(2)?, flag));
        match words.first().copied().unwrap_or("") {
            "create" => Ok(Self::Create(name(1)?)),
            "mkdir" => Ok(Self::Mkdir(name(1)?)),
            "symlink" => Ok(Self::Symlink(name(1)?, name(2)?)),
            "write" => Ok(Self::Write(name(1)?, number(2)?, number(3)?)),
            "append" => Ok(Self::Append(name(1)?, number(2)?)),
            "truncate" => Ok(Self::Truncate(name(1)?, number(2)?)),
            "fallocate" => {
                let mode = u16::try_from(number(4)?).map_err(|_| bad())?;
                Ok(Self::Fallocate(name(1)?, number(2)?, number(3)?, mode))
            }
            "rename" => rename(Flag::Plain),
            "noreplace" => rename(Flag::NoReplace),
            "exchange" => rename(Flag::Exchange),
            "link" => Ok(Self::Link(name(1)?, name(2)?)),
            "unlink" => Ok(Self::Unlink(name(1)?)),
            "rmdir" => Ok(Self::Rmdir(name(1)?)),
            "chmod" => Ok(Self::Chmod(name(1)?, number(2)? as u32)),
            "chown" => Ok(Self::Chown(name(1)?, number(2)? as u32)),
            "utime" => Ok(Self::Utime(name(1)?)),
            "setxattr" => Ok(Self::SetXattr(name(1)?, name(2)?, number(3)? as usize)),
            "removexattr" => Ok(Self::RemoveXattr(name(1)?, name(2)?)),
            "clone" => Ok(Self::Clone(name(1)?, name(2)?)),
            "tmpfile" => Ok(Self::Tmpfile(name(1)?, number(2)?)),
            "setacl" => Ok(Self::SetAcl(name(1)?, number(2)? as u16 & 7, number(3)? as u16 & 7)),
            "quota" => Ok(Self::Quota(number(1)?)),
            "snapshot" => Ok(Self::Snapshot(name(1)?)),
            "drop" => Ok(Self::DropSnapshot(name(1)?)),
            "back" => Ok(Self::Back(name(1)?, name(2)?, name(3)?)),
            "piece" => {
                let piece = [number(4)?, number(5)?, number(6)?];
                Ok(Self::Piece(name(1)?, name(2)?, name(3)?, piece))
            }
            "fsync" => Ok(Self::Fsync),
            "pause" => Ok(Self::Pause),
            _ => Err(bad()),
        }
    }
}

/// When the service gets a turn, while the application works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pace {
    /// Only when an fsync waits for it; the log collects what was appended.
    Lazy,
    /// After each operation it fetches and publishes everything.
    Eager,
    /// After each operation it fetches, and never publishes by itself.
    Fetching,
}

/// What lies in the region when the workload begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ground {
    /// A few files.
    Fresh,
    /// The same, and the stream ring is so near its end that the first chunks wrap.
    Wrap,
    /// The same, and the next publications make the stream ring give up its oldest chunks.
    Ripe,
    /// The same, and a file z that leaves three blocks free.
    Full,
}

/// A workload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Workload {
    /// Where it begins.
    pub ground: Ground,
    /// How the service keeps up.
    pub pace: Pace,
    /// Whether the region of the second of two members is looked at.
    pub member: bool,
    /// What is done.
    pub acts: Vec<Act>,
}

impl std::fmt::Display for Workload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?}", self.ground, self.pace)?;
        if self.member {
            f.write_str(" Member")?;
        }
        self.acts.iter().try_for_each(|act| write!(f, "; {act}"))
    }
}

impl Workload {
    /// From its text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(';');
        let head: Vec<&str> = parts.next().unwrap_or("").split_whitespace().collect();
        let ground = match head.first() {
            Some(&"Fresh") => Ground::Fresh,
            Some(&"Wrap") => Ground::Wrap,
            Some(&"Ripe") => Ground::Ripe,
            Some(&"Full") => Ground::Full,
            other => return Err(format!("no ground: {other:?} (Fresh, Wrap, Ripe, Full)")),
        };
        let pace = match head.get(1) {
            Some(&"Lazy") => Pace::Lazy,
            Some(&"Eager") => Pace::Eager,
            Some(&"Fetching") => Pace::Fetching,
            other => return Err(format!("no pace: {other:?} (Lazy, Eager, Fetching)")),
        };
        let member = head.get(2) == Some(&"Member");
        let acts = parts.map(Act::parse).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { ground, pace, member, acts })
    }
}

/// Every operation that workloads are made of. Which of them are possible depends on what was done
/// before: the oracle says so.
pub fn alphabet() -> Vec<Act> {
    letters(ALPHABET)
}

/// More of them: in sequences of one operation and in random ones. (Of two, all sequences are many.)
pub fn more_letters() -> Vec<Act> {
    letters(MORE)
}

fn letters(text: &str) -> Vec<Act> {
    let mut all = Vec::new();
    for text in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
        match Act::parse(text) {
            Ok(act) => all.push(act),
            Err(e) => unreachable!("{e}"),
        }
    }
    all
}

/// At the beginning there are: A/x (6000 bytes, an xattr user.k), B (empty).
const ALPHABET: &str = "
    create A/y
    create B/x
    create z
    mkdir A/y
    mkdir z
    symlink z A/x
    symlink A/y nowhere
    write A/x 500 1000
    write A/x 4096 4096
    write A/x 3000 9000
    write A/x 20000 10
    write A/y 0 5000
    append A/x 3000
    append A/x 1
    append A/y 200
    truncate A/x 0
    truncate A/x 100
    truncate A/x 4096
    truncate A/x 20000
    truncate z 0
    write z 0 12000
    fallocate A/x 8000 8000 0
    fallocate A/x 12288 4096 1
    fallocate A/x 1000 5000 3
    fallocate A/x 4096 4096 3
    fallocate A/x 500 6000 16
    fallocate A/x 6000 6000 17
    fallocate A/x 0 4096 8
    fallocate A/x 4096 8192 8
    fallocate A/x 0 4096 32
    fallocate A/x 4096 8192 32
    rename A/x A/y
    rename A/x B/x
    rename A/x z
    rename A/y A/x
    rename B/x A/x
    rename A z
    rename A B
    rename B A/y
    noreplace A/x A/y
    noreplace A/x B/x
    exchange A/x B
    exchange A/x A/y
    exchange A B
    link A/x A/y
    link A/x B/x
    link A/x z
    unlink A/x
    unlink A/y
    unlink B/x
    unlink z
    rmdir B
    rmdir A
    rmdir A/y
    rmdir z
    chmod A/x 384
    chmod A/x 420
    chmod B 448
    chown A/x 5
    utime A/x
    utime B
    setxattr A/x user.k 20
    setxattr A/x user.big 3000
    setxattr B user.k 8
    removexattr A/x user.k
    clone A/x A/y
";

const MORE: &str = "
    tmpfile A/y 5000
    tmpfile z 100
    setacl A/x 6 4
    setacl A/x 0 0
    setacl B 5 1
    quota 100000
    quota 0
    clone A/y A/x
    clone A/x z
    clone z A/y
    snapshot s
    snapshot t
    drop s
    drop t
    back s A/x A/x
    back s A/x A/y
    back t A/x z
    piece s A/x A/x 4096 0 1904
    piece s A/x A/y 0 8192 4096
    piece t A/x B/x 100 300 3000
";

/// A random sequence of that many operations, fsyncs between them. `possible` says what can
/// be done after what was chosen so far.
pub fn sample(
    random: &mut Random,
    length: usize,
    alphabet: &[Act],
    mut possible: impl FnMut(Ground, &[Act]) -> bool,
) -> Workload {
    let ground = match random.below(8) {
        0 => Ground::Wrap,
        1 => Ground::Ripe,
        2 => Ground::Full,
        _ => Ground::Fresh,
    };
    let mut acts: Vec<Act> = Vec::new();
    let mut core = 0;
    let mut tries = 0;
    while core < length && tries < 1000 {
        tries += 1;
        acts.push(alphabet[random.below(alphabet.len() as u64) as usize].clone());
        if !possible(ground, &acts) {
            acts.pop();
            continue;
        }
        core += 1;
        if random.chance(2, 5) {
            acts.push(Act::Fsync);
        }
        if random.chance(1, 6) {
            acts.push(Act::Pause);
        }
    }
    let pace = [Pace::Lazy, Pace::Eager, Pace::Fetching][random.below(3) as usize];
    Workload { ground, pace, member: random.chance(1, 4), acts }
}

/// The variants of a sequence: with and without an fsync after each operation, at each pace.
pub fn variants(core: &[Act]) -> Vec<Workload> {
    let mut all = Vec::new();
    for mask in 0..1u32 << core.len() {
        let mut acts = Vec::new();
        for (i, act) in core.iter().enumerate() {
            acts.push(act.clone());
            if mask >> i & 1 == 1 {
                acts.push(Act::Fsync);
            }
        }
        for pace in [Pace::Lazy, Pace::Eager, Pace::Fetching] {
            if pace == Pace::Lazy && mask == 0 {
                // The service would do nothing at all; the log alone is looked at with others.
                continue;
            }
            let (ground, member) = (Ground::Fresh, false);
            all.push(Workload { ground, pace, member, acts: acts.clone() });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_as_it_is_written() {
        for pace in [Pace::Lazy, Pace::Eager, Pace::Fetching] {
            for ground in [Ground::Fresh, Ground::Wrap, Ground::Ripe, Ground::Full] {
                let mut acts = alphabet();
                acts.extend(more_letters());
                acts.push(Act::Fsync);
                for member in [false, true] {
                    let w = Workload { ground, pace, member, acts: acts.clone() };
                    assert_eq!(Workload::parse(&w.to_string()), Ok(w));
                }
            }
        }
        assert!(Workload::parse("Fresh Lazy; frobnicate A/x").is_err());
        assert!(Workload::parse("Fresh Lazy; write A/x 1").is_err());
        assert!(Workload::parse("Nowhere Lazy; create A/x").is_err());
    }
}
