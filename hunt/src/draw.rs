//! Histories drawn from a seed. Each history draws first what it is about: which kinds of calls, how
//! many files, how large, how many actors; so that some do little else than map and cut one file, and
//! others move names about.

use std::fs;
use std::path::{Path, PathBuf};

use base::random::Random;

use crate::script::Step;
use crate::stage::{BATCH, Source, Stage};
use crate::text::escape;
use crate::worker::{MAPS, SEATS, SLOTS};

/// Kinds of calls.
pub const GROUPS: [&str; 20] = [
    "data", "size", "hole", "copy", "clone", "sync", "map", "stat", "mode", "owner", "time",
    "xattr", "acl", "names", "dirs", "lock", "dup", "child", "cred", "direct",
];

/// What the reference, and this process, can do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Abilities {
    /// Owners and users can be changed.
    pub root: bool,
    /// Extended attributes of users.
    pub xattrs: bool,
    /// Values of attributes of tens of KiB.
    pub large_xattrs: bool,
    /// Access control lists.
    pub acls: bool,
    /// fallocate beyond reserving and punching.
    pub zero_range: bool,
    /// Moving extents.
    pub shift: bool,
    /// Files without a name.
    pub tmpfile: bool,
}

/// What the user wants.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Only these groups (all if empty).
    pub only: Vec<String>,
    /// Not these.
    pub without: Vec<String>,
    /// What is known to differ: see `AVOIDED`.
    pub avoid: Vec<String>,
    /// All calls are about one file.
    pub one_file: bool,
    /// Faults, and how many calls lie between them.
    pub faults: Option<u64>,
    /// Calls of a history, if not drawn.
    pub calls: Option<u64>,
    /// Nodes.
    pub nodes: u32,
    /// Whether nodes can be cut off.
    pub links: bool,
}

/// Known bugs that would be found again and again, and what is left out for them.
pub const AVOIDED: [&str; 1] = [
    // exec and spawn by somebody whose effective user is not the real one: the loader takes no library.
    "exec-as-other",
];

/// What a process has, as far as it is known.
#[derive(Clone, Debug)]
struct Process {
    actor: usize,
    seat: usize,
    alive: bool,
    slots: Vec<Option<Open>>,
    maps: Vec<Option<usize>>,
    /// Whether it is somebody else than root now.
    other: bool,
    /// Whether its effective user or group is not its real one: a program that it executes loads no library.
    parts: bool,
    /// Whether it is such a program: also under `run` all that it does is the kernel's.
    bare: bool,
    moved: bool,
}

#[derive(Clone, Debug)]
struct Open {
    dir: bool,
    path_only: bool,
    told: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Want {
    File,
    Dir,
    Nothing,
    Any,
}

/// A history in the making.
#[derive(Debug)]
pub struct Draw {
    random: Random,
    wish: Wish,
    abilities: Abilities,
    /// Group and weight.
    weights: Vec<(&'static str, u64)>,
    names: Vec<Vec<u8>>,
    dirs: Vec<Vec<u8>>,
    /// Files are about that large.
    most: u64,
    left: u64,
    /// Calls between pauses, sweeps, restarts.
    rates: [u64; 3],
    batch: u64,
    processes: Vec<Process>,
    /// Actors whose calls the kernel takes to a mount.
    mounted: Vec<bool>,
    /// Files get capabilities, or else set-id bits: see [`Draw::mode`].
    capabilities: bool,
    pattern: u64,
    begun: bool,
    reference: PathBuf,
    ended: bool,
    /// Turns until what goes on beside the calls is waited for.
    calm_in: Option<u64>,
}

/// How much a value is worth that is at hand.
const USERS: [u32; 4] = [0, 1000, 1001, 65534];
const CAPABILITY: &str = "security.capability";
const XATTRS: [&str; 9] = [
    "user.a",
    "user.b",
    "user.c",
    "user.%ff%fe",
    "user.{n*250}",
    "trusted.t",
    CAPABILITY,
    "security.s",
    "user.",
];
/// Times long before and long after any history.
const TIMES: [&str; 9] = [
    "now",
    "now",
    "omit",
    "0.0",
    "1.000000001",
    "1000000000.123456789",
    "999999999.999999999",
    "-1.5",
    "4000000000.000000000",
];

impl Draw {
    /// A history for actors with these views.
    pub fn new(seed: u64, views: &[String], wish: &Wish, abilities: Abilities) -> Self {
        let mut random = Random::new(seed ^ 0x4875_6e74);
        let weights = weights(&mut random, wish, abilities);
        let one_file = wish.one_file || random.chance(1, 8);
        let files = if one_file { 1 } else { 1 + random.below(8) as usize };
        let mut names: Vec<Vec<u8>> = (0..files).map(|n| vec![b'a' + n as u8]).collect();
        let odd: [&[u8]; 7] = [
            &[b'n'; 255],
            &[b'm'; 256],
            b"\xff\xfe\n;",
            b" sp ace",
            b"-x",
            b".hid",
            b"name-of-some-length.tar.gz",
        ];
        if random.chance(1, 4) {
            names.extend(odd.iter().filter(|_| random.chance(1, 3)).map(|n| n.to_vec()));
        }
        let dirs = if one_file { 0 } else { random.below(4) as usize };
        let most = [300, 5000, 20_000, 70_000, 300_000, 1 << 20, 6 << 20][random.below(7) as usize];
        let left = match random.below(12) {
            0..4 => 20 + random.below(100),
            4..9 => 200 + random.below(1000),
            9..11 => 1000 + random.below(4000),
            _ => 5000 + random.below(15_000),
        };
        let often =
            |random: &mut Random, from: u64| if random.chance(1, 3) { from } else { from * 10 };
        let rates = [often(&mut random, 20), often(&mut random, 100), often(&mut random, 150)];
        let process = |actor| Process {
            actor,
            seat: 0,
            alive: true,
            slots: vec![None; SLOTS],
            maps: vec![None; MAPS],
            other: false,
            parts: false,
            bare: false,
            moved: false,
        };
        Self {
            weights,
            names,
            dirs: (0..dirs).map(|n| vec![b'p' + n as u8]).collect(),
            most,
            left: wish.calls.unwrap_or(left),
            rates,
            batch: [1, 2, 6, BATCH as u64][random.below(4) as usize],
            processes: (0..views.len()).map(process).collect(),
            mounted: views.iter().map(|view| view.starts_with('m')).collect(),
            capabilities: random.chance(1, 2),
            pattern: 0,
            begun: false,
            reference: PathBuf::new(),
            ended: false,
            calm_in: None,
            wish: wish.clone(),
            abilities,
            random,
        }
    }

    /// What it is about, for people.
    pub fn about(&self) -> String {
        let groups: Vec<String> =
            self.weights.iter().map(|(name, weight)| format!("{name} {weight}")).collect();
        format!(
            "{} calls, {} names, files of {}: {}",
            self.left,
            self.names.len(),
            self.most,
            groups.join(", ")
        )
    }

    fn one<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.random.below(list.len() as u64) as usize].clone()
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.random.chance(1, one_in)
    }

    fn next_pattern(&mut self) -> u64 {
        self.pattern += 1;
        self.pattern
    }

    /// A place in a file, most often where something could go wrong.
    fn offset(&mut self) -> u64 {
        let most = self.most;
        let near = |random: &mut Random, step: u64| {
            let base = random.below(most / step + 2) * step;
            (base + random.below(3)).saturating_sub(1)
        };
        match self.random.below(20) {
            0..3 => 0,
            3..8 => near(&mut self.random, 4096),
            8..10 => near(&mut self.random, 65536),
            10..12 => self.random.below(most / 4096 + 1) * 4096,
            12..19 => self.random.below(most),
            _ => most + self.random.below(most),
        }
    }

    fn length(&mut self) -> u64 {
        let most = self.most;
        match self.random.below(20) {
            0 => 0,
            1..4 => 1 + self.random.below(16),
            4..7 => [511, 512, 4095, 4096, 4097, 8192, 65535, 65536, 65537]
                [self.random.below(9) as usize]
                .min(2 * most),
            7..11 => 1 + self.random.below(5000.min(most)),
            11..14 => (1 + self.random.below(most / 4096 + 1)) * 4096,
            14..18 => 1 + self.random.below((most / 4).max(1)),
            _ => 1 + self.random.below(most),
        }
    }

    fn lengths(&mut self) -> String {
        let count = 1 + self.random.below(4);
        let lengths: Vec<String> = (0..count).map(|_| self.length().to_string()).collect();
        lengths.join(",")
    }

    /// A name without the directory it is in.
    fn leaf(&mut self) -> Vec<u8> {
        let (names, dirs) = (self.names.len() as u64, self.dirs.len() as u64);
        let pick = self.random.below(names + dirs) as usize;
        if pick < self.names.len() {
            self.names[pick].clone()
        } else {
            self.dirs[pick - self.names.len()].clone()
        }
    }

    fn candidate(&mut self) -> Vec<u8> {
        let depth = match self.random.below(20) {
            _ if self.dirs.is_empty() => 0,
            0..12 => 0,
            12..18 => 1,
            _ => 2,
        };
        let mut path = Vec::new();
        for _ in 0..depth {
            let dir = self.dirs[self.random.below(self.dirs.len() as u64) as usize].clone();
            path.extend(dir);
            path.push(b'/');
        }
        path.extend(self.leaf());
        path
    }

    fn is(&self, path: &[u8], want: Want) -> bool {
        use std::os::unix::ffi::OsStrExt as _;
        let path = self.reference.join(Path::new(std::ffi::OsStr::from_bytes(path)));
        match (fs::metadata(path), want) {
            (_, Want::Any) => true,
            (Ok(about), Want::File) => about.is_file(),
            (Ok(about), Want::Dir) => about.is_dir(),
            (result, Want::Nothing) => result.is_err(),
            (Err(_), _) => false,
        }
    }

    fn path(&mut self, process: usize, want: Want) -> String {
        let mut path = self.candidate();
        for _ in 0..6 {
            if self.is(&path, want) {
                break;
            }
            path = self.candidate();
        }
        if want == Want::Dir && (self.dirs.is_empty() || self.chance(4)) {
            path = b".".to_vec();
        }
        if self.chance(40) {
            path.push(b'/');
        }
        if self.chance(40) {
            path = [b"./", &path[..]].concat();
        }
        if !self.dirs.is_empty() && self.chance(30) {
            let dir = self.one(&self.dirs.clone());
            path = [&dir[..], b"/../", &path[..]].concat();
        }
        let token = escape(&path);
        let dirs = self.slots(process, |open| open.dir);
        if !dirs.is_empty() && self.chance(5) {
            let slot = self.one(&dirs);
            return format!(
                "s{slot}:{}",
                if self.chance(2) { escape(&self.leaf()) } else { token }
            );
        }
        let moved = self.processes[process].moved;
        if self.chance(if moved { 2 } else { 25 }) { format!("@{token}") } else { token }
    }

    /// A path for a call that takes no directory descriptor.
    fn plain_path(&mut self, process: usize, want: Want) -> String {
        let path = self.path(process, want);
        match path.split_once(':') {
            Some((_, rest)) => rest.to_string(),
            None => path,
        }
    }

    fn slots(&self, process: usize, which: impl Fn(&Open) -> bool) -> Vec<usize> {
        let slots = self.processes[process].slots.iter().enumerate();
        slots.filter(|(_, open)| open.as_ref().is_some_and(&which)).map(|(n, _)| n).collect()
    }

    /// An open file, or now and then anything that is open.
    fn slot(&mut self, process: usize) -> Option<usize> {
        let odd = self.chance(30);
        let slots = self.slots(process, |open| odd || (!open.dir && !open.path_only));
        if slots.is_empty() { None } else { Some(self.one(&slots)) }
    }

    fn free_slot(&self, process: usize) -> Option<usize> {
        self.processes[process].slots.iter().position(Option::is_none)
    }

    /// Whether the kernel takes the calls of a process to a mount.
    fn is_mounted(&self, process: usize) -> bool {
        self.mounted[self.processes[process].actor]
    }

    /// Whether what a process does in a mount, others may do elsewhere.
    fn is_mounted_among_others(&self, process: usize) -> bool {
        (self.is_mounted(process) || self.processes[process].bare) && self.mounted.len() > 1
    }

    fn mode(&mut self) -> String {
        let modes = [
            0o644, 0o666, 0o600, 0o755, 0o777, 0o400, 0o000, 0o4755, 0o2755, 0o6777, 0o1777, 0o640,
            0o711,
        ];
        let mode = self.one(&modes);
        // Files with both lose more than they should in a mount (docs/mount.md), which serves, under `corbel run`, a file
        // that is mapped, and the descriptor that was given capabilities.
        format!("0{:o}", if self.capabilities { mode & 0o1777 } else { mode })
    }

    fn open(&mut self, process: usize) -> String {
        let Some(slot) = self.free_slot(process) else { return self.close(process) };
        let mut want = Want::File;
        let mut flags = vec![self.one(&["rd", "wr", "rdwr", "rdwr", "rdwr"])];
        let direct = self.weight("direct") > 0;
        match self.random.below(30) {
            0..9 => {
                flags.push("creat");
                want = if self.chance(2) { Want::Nothing } else { Want::File };
                if self.chance(4) {
                    flags.push("excl");
                }
            }
            9..11 => {
                flags = vec!["rd", "directory"];
                want = Want::Dir;
            }
            11 if self.abilities.tmpfile => {
                flags = vec![self.one(&["wr", "rdwr"]), "tmpfile"];
                want = Want::Dir;
                if self.chance(5) {
                    flags.push("excl");
                }
            }
            // It does not hold what somebody else removes, a program under `corbel run` included (docs/mount.md).
            12 if self.is_mounted(process) && !self.is_mounted_among_others(process) => {
                flags = vec!["path"];
                want = Want::Any;
            }
            13 => want = Want::Any,
            14 => want = Want::Dir,
            _ => {}
        }
        for (flag, one_in) in [
            ("trunc", 12),
            ("append", 6),
            ("nofollow", 12),
            ("cloexec", 8),
            ("dsync", 25),
            ("sync", 30),
            ("noatime", 20),
        ] {
            if self.chance(one_in) {
                flags.push(flag);
            }
        }
        if direct && self.chance(3) {
            flags.push("direct");
        }
        // So that a pipe does not hold anybody up.
        flags.push("nonblock");
        let mode = self.mode();
        let mode = if self.chance(2) { "0644".to_string() } else { mode };
        let path = self.path(process, want);
        // It cannot say that it would rather not wait for the other end of a pipe.
        if self.weight("names") == 0 && self.chance(20) {
            let path = self.plain_path(process, want);
            return format!("creat s{slot} {path} {mode}");
        }
        format!("open s{slot} {path} {} {mode}", flags.join("|"))
    }

    fn close(&mut self, process: usize) -> String {
        let slots = self.slots(process, |_| true);
        if slots.is_empty() { "getcwd".into() } else { format!("close s{}", self.one(&slots)) }
    }

    fn avoids(&self, what: &str) -> bool {
        self.wish.avoid.iter().any(|avoided| avoided == what)
    }

    fn weight(&self, group: &str) -> u64 {
        self.weights.iter().find(|(name, _)| *name == group).map_or(0, |(_, weight)| *weight)
    }

    fn data(&mut self, p: usize) -> Option<String> {
        let slot = self.slot(p)?;
        let (offset, length, lengths) = (self.offset(), self.length(), self.lengths());
        let pattern = self.next_pattern();
        Some(match self.random.below(24) {
            0..3 => format!("read s{slot} {length}"),
            3..8 => format!("pread s{slot} {length} {offset}"),
            8 => format!("readv s{slot} {lengths}"),
            9 => format!("preadv2 s{slot} {lengths} {offset} -"),
            10 => format!("preadv2 s{slot} {lengths} -1 -"),
            11..14 => format!("write s{slot} {length} {pattern}"),
            14..19 => format!("pwrite s{slot} {length} {pattern} {offset}"),
            19 => format!("writev s{slot} {lengths} {pattern}"),
            20 => {
                // The kernel does not pass it to a mount (docs/mount.md).
                let kinds = if self.is_mounted_among_others(p) { 4 } else { 6 };
                let flags = ["-", "-", "dsync", "sync", "append", "append|dsync"];
                let flags = self.one(&flags[..kinds]);
                let offset = if self.chance(4) { "-1".into() } else { offset.to_string() };
                format!("pwritev2 s{slot} {lengths} {pattern} {offset} {flags}")
            }
            21 => format!("lseek s{slot} {offset} set"),
            22 => {
                format!("lseek s{slot} {} cur", offset.cast_signed() - self.offset().cast_signed())
            }
            _ => format!("lseek s{slot} {} end", -(self.random.below(5000).cast_signed())),
        })
    }

    fn size(&mut self, p: usize) -> Option<String> {
        let offset = self.offset();
        if self.chance(6) {
            return Some(format!("truncate {} {offset}", self.plain_path(p, Want::File)));
        }
        let slot = self.slot(p)?;
        if self.chance(2) {
            return Some(format!("ftruncate s{slot} {offset}"));
        }
        let mut modes = vec!["-", "keep", "punch|keep", "punch|keep"];
        if self.abilities.zero_range {
            modes.extend(["zero", "zero|keep", "unshare", "punch"]);
        }
        let mut length = self.length();
        let mut offset = offset;
        let mut mode = self.one(&modes);
        if self.abilities.shift && self.chance(4) {
            mode = self.one(&["collapse", "insert"]);
            if !self.chance(8) {
                (offset, length) = (offset / 4096 * 4096, (length / 4096 + 1) * 4096);
            }
        }
        Some(format!("fallocate s{slot} {mode} {offset} {length}"))
    }

    fn hole(&mut self, p: usize) -> Option<String> {
        let (slot, offset) = (self.slot(p)?, self.offset());
        Some(format!("lseek s{slot} {offset} {}", self.one(&["data", "hole"])))
    }

    fn copy(&mut self, p: usize) -> Option<String> {
        let (from, to) = (self.slot(p)?, self.slot(p)?);
        let length = if self.chance(6) { 256 * 1024 + self.length() } else { self.length() };
        let mut place =
            || if self.random.chance(1, 4) { "-".to_string() } else { self.offset().to_string() };
        let (at, onto) = (place(), place());
        Some(if self.chance(4) {
            format!("sendfile s{to} s{from} {at} {length}")
        } else {
            format!("copyrange s{from} {at} s{to} {onto} {length}")
        })
    }

    fn clone_range(&mut self, p: usize) -> Option<String> {
        let (from, to) = (self.slot(p)?, self.slot(p)?);
        let block = |n: u64| n / 4096 * 4096;
        let (at, length, onto) = (block(self.offset()), block(self.length()), block(self.offset()));
        Some(if self.chance(3) {
            format!("clone s{to} s{from}")
        } else {
            format!("clonerange s{to} s{from} {at} {length} {onto}")
        })
    }

    fn sync(&mut self, p: usize) -> Option<String> {
        let slot = self.slot(p)?;
        Some(match self.random.below(6) {
            0..3 => format!("fsync s{slot}"),
            3 => format!("fdatasync s{slot}"),
            4 => format!("syncfs s{slot}"),
            _ => format!("syncrange s{slot} {} {}", self.offset(), self.length()),
        })
    }

    fn map(&mut self, p: usize) -> Option<String> {
        let maps = &self.processes[p].maps;
        let free = maps.iter().position(Option::is_none);
        let used: Vec<usize> = (0..MAPS).filter(|n| maps[*n].is_some()).collect();
        let new = match free {
            Some(free) if used.is_empty() || self.chance(5) => Some(free),
            _ => None,
        };
        if let Some(map) = new {
            let slot = self.slot(p)?;
            let offset = self.offset() / 4096 * 4096;
            if self.chance(4) {
                let (length, pattern) = (self.length(), self.next_pattern());
                return Some(format!("mapcopy s{slot} {offset} {length} {pattern}"));
            }
            let protection = self.one(&["r", "r|w", "r|w"]);
            return Some(format!(
                "mmap m{map} s{slot} {offset} {} {protection} shared",
                self.length()
            ));
        }
        let map = if used.is_empty() { 0 } else { self.one(&used) };
        let (offset, length) = (self.offset() % (self.most / 4 + 1), self.length());
        // What it was made by is closed: there is nothing to be done with it any more.
        let slot = self.processes[p].maps[map];
        if slot.is_some_and(|slot| self.processes[p].slots[slot].is_none()) {
            return Some(format!("munmap m{map}"));
        }
        Some(match self.random.below(10) {
            0..4 => format!("peek m{map} {offset} {length}"),
            4..8 => format!("poke m{map} {offset} {length} {}", self.next_pattern()),
            8 => format!("msync m{map}"),
            _ => format!("munmap m{map}"),
        })
    }

    fn stat(&mut self, p: usize) -> Option<String> {
        let path = self.path(p, Want::Any);
        Some(match self.random.below(10) {
            0..2 => format!("stat {path}"),
            2..4 => format!("lstat {path}"),
            4..7 => format!("fstat s{}", self.slot(p)?),
            7 => {
                let other = self.path(p, Want::Any);
                let slot = self.slot(p).map(|slot| format!("s{slot}"));
                format!("same {} {other}", slot.filter(|_| self.chance(2)).unwrap_or(path))
            }
            8 => format!("statx s{}:'' empty", self.slot(p)?),
            _ => format!("statx {path} {}", self.one(&["-", "nofollow", "dontsync", "forcesync"])),
        })
    }

    fn permissions(&mut self, p: usize) -> Option<String> {
        let (path, mode) = (self.path(p, Want::Any), self.mode());
        Some(match self.random.below(8) {
            0..3 => format!("chmod {path} {mode}"),
            3..6 => format!("fchmod s{} {mode}", self.slot(p)?),
            _ => {
                let rights = self.one(&["f", "r", "w", "x", "r|w|x"]);
                format!("access {path} {rights} {}", self.one(&["-", "eaccess"]))
            }
        })
    }

    fn owner(&mut self, p: usize) -> Option<String> {
        let mut who = || {
            if self.random.chance(1, 4) {
                -1
            } else {
                i64::from(USERS[self.random.below(4) as usize])
            }
        };
        let (mut uid, gid) = (who(), who());
        let how = self.random.below(3);
        if (uid, gid) == (-1, -1) && self.processes[p].other {
            // Of a stranger a mount learns next to nothing by that (docs/mount.md).
            uid = 0;
        }
        Some(match how {
            0 => format!("fchown s{} {uid} {gid}", self.slot(p)?),
            1 => format!("chown {} {uid} {gid}", self.path(p, Want::Any)),
            _ => format!("lchown {} {uid} {gid}", self.path(p, Want::Any)),
        })
    }

    fn time(&mut self, p: usize) -> Option<String> {
        let (atime, mtime) = (self.one(&TIMES), self.one(&TIMES));
        if self.chance(2) {
            return Some(format!("futimens s{} {atime} {mtime}", self.slot(p)?));
        }
        let flags = self.one(&["-", "-", "nofollow"]);
        Some(format!("utimens {} {atime} {mtime} {flags}", self.path(p, Want::Any)))
    }

    fn xattr(&mut self, p: usize) -> Option<String> {
        let large = self.abilities.large_xattrs;
        let capabilities = self.capabilities;
        let known: Vec<&str> =
            XATTRS.into_iter().filter(|name| capabilities || *name != CAPABILITY).collect();
        let name = if self.chance(3) { "user.a" } else { self.one(&known) };
        let (prefix, whom) = match self.random.below(4) {
            0 => ("", self.plain_path(p, Want::Any)),
            1 => ("l", self.plain_path(p, Want::Any)),
            _ => ("f", format!("s{}", self.slot(p)?)),
        };
        let length = match self.random.below(8) {
            0 => 0,
            1..6 => 1 + self.random.below(100),
            6 => 20,
            _ if large => self.random.below(60_000),
            _ => self.random.below(300),
        };
        Some(match self.random.below(12) {
            0..5 => {
                let length = if name == CAPABILITY && !self.chance(4) { 20 } else { length };
                // A value that is what it was before some file systems do not count as a change.
                let flags =
                    if length == 0 { "create" } else { self.one(&["-", "-", "create", "replace"]) };
                format!("{prefix}setxattr {whom} {name} {length} {} {flags}", self.next_pattern())
            }
            5..8 => {
                let space = if self.chance(4) { 0 } else { self.one(&[65536, 65536, 10]) };
                format!("{prefix}getxattr {whom} {name} {space}")
            }
            8..10 => format!("{prefix}listxattr {whom} {}", self.one(&[65536, 65536, 0, 8])),
            _ => format!("{prefix}removexattr {whom} {name}"),
        })
    }

    fn acl(&mut self, p: usize) -> Option<String> {
        let path = self.plain_path(p, Want::Any);
        let which = self.one(&["access", "access", "default"]);
        if self.chance(3) {
            return Some(format!("getxattr {path} system.posix_acl_{which} 65536"));
        }
        if self.chance(6) {
            return Some(format!("removexattr {path} system.posix_acl_{which}"));
        }
        let mut rights = || self.random.below(8);
        let mut entries =
            vec![format!("u:{}", rights()), format!("g:{}", rights()), format!("o:{}", rights())];
        let mask = rights();
        let (user, group, one, two) = (1000, 1001, rights(), rights());
        if self.chance(2) {
            entries.push(format!("u{user}:{one}"));
        }
        if self.chance(3) {
            entries.push(format!("g{group}:{two}"));
        }
        if entries.len() > 3 || self.chance(3) {
            entries.push(format!("m:{mask}"));
        }
        if self.chance(30) {
            entries.pop();
        }
        Some(format!("setacl {path} {which} {}", entries.join(",")))
    }

    fn moving(&mut self, p: usize) -> Option<String> {
        Some(match self.random.below(20) {
            0..6 => {
                let flags = self.one(&["-", "-", "-", "noreplace", "exchange"]);
                let from = self.path(p, Want::Any);
                format!("rename {from} {} {flags}", self.path(p, Want::Any))
            }
            6..10 => format!("unlink {}", self.path(p, Want::Any)),
            10..13 => {
                let (from, to) = (self.path(p, Want::File), self.path(p, Want::Nothing));
                format!("link {from} {to} {}", self.one(&["-", "follow"]))
            }
            13 => {
                let slot = self.slot(p)?;
                format!(
                    "linkfd s{slot} {} {}",
                    self.path(p, Want::Nothing),
                    self.one(&["empty", "proc"])
                )
            }
            14..16 => {
                let target = match self.random.below(5) {
                    0 => "..".to_string(),
                    1 => format!("../{}", escape(&self.leaf())),
                    2 => escape(&[b'l'; 300]),
                    _ => escape(&self.candidate()),
                };
                format!("symlink {target} {}", self.path(p, Want::Nothing))
            }
            16..18 => format!("readlink {}", self.path(p, Want::Any)),
            _ => {
                let kind = self.one(&["fifo", "reg", "sock"]);
                format!("mknod {} {kind} {}", self.path(p, Want::Nothing), self.mode())
            }
        })
    }

    fn directories(&mut self, p: usize) -> Option<String> {
        let dirs = self.slots(p, |open| open.dir);
        Some(match self.random.below(16) {
            0..5 => format!(
                "mkdir {} {}",
                self.path(p, Want::Nothing),
                self.one(&["0755", "0777", "0700", "02775", "01777"])
            ),
            5..7 => format!("rmdir {}", self.path(p, Want::Any)),
            7..9 => format!("list {}", self.path(p, Want::Dir)),
            9..12 if !dirs.is_empty() => {
                format!("getdents s{} {}", self.one(&dirs), self.one(&[290, 600, 32768]))
            }
            12 if !dirs.is_empty() => {
                let slot = self.one(&dirs);
                let told = self.processes[p].slots[slot].as_ref().map_or(0, |open| open.told);
                format!("seekdir s{slot} {}", self.random.below(told + 1))
            }
            13 if self.chance(3) => format!("chdir {}", self.path_from_root(p)),
            14 if !dirs.is_empty() && self.chance(3) => format!("fchdir s{}", self.one(&dirs)),
            15 => "getcwd".into(),
            _ => {
                let slot = self.free_slot(p)?;
                format!("open s{slot} {} rd|directory|nonblock 0", self.path(p, Want::Dir))
            }
        })
    }

    fn path_from_root(&mut self, p: usize) -> String {
        let path = self.plain_path(p, Want::Dir);
        if path.starts_with('@') { path } else { format!("@{path}") }
    }

    fn lock(&mut self, p: usize) -> Option<String> {
        let slot = self.slot(p)?;
        if self.chance(4) {
            return Some(format!("flock s{slot} {}", self.one(&["sh", "ex", "un"])));
        }
        let space = self.one(&["posix", "ofd"]);
        let kind = self.one(&["r", "w", "w", "u"]);
        let whence = self.one(&["set", "set", "set", "cur", "end"]);
        let start = self.random.below(20).cast_signed() - i64::from(whence != "set") * 5;
        let length = self.one(&[0, 1, 5, 10, 100, -3]);
        if self.chance(3) {
            let kind = if kind == "u" { "r" } else { kind };
            return Some(format!("getlk s{slot} {space} {kind} {whence} {start} {length}"));
        }
        Some(format!("lock s{slot} {space} {kind} {whence} {start} {length}"))
    }

    fn duplicate(&mut self, p: usize) -> Option<String> {
        let from = self.slot(p)?;
        Some(match self.random.below(10) {
            0..3 => format!("dup s{from} s{}", self.free_slot(p)?),
            3..5 => format!("dup2 s{from} s{} {}", self.slot(p)?, self.one(&["-", "-", "cloexec"])),
            5 => format!("fdupfd s{from} s{} {}", self.free_slot(p)?, self.random.below(60)),
            6 => format!("getfl s{from}"),
            7..9 => format!(
                "setfl s{from} {}",
                self.one(&["-", "append", "nonblock", "append|nonblock"])
            ),
            _ => format!("setfd s{from} {}", self.one(&["-", "cloexec"])),
        })
    }

    fn children(&mut self, p: usize) -> Option<String> {
        let Process { actor, seat, .. } = self.processes[p];
        if seat != 0 && self.chance(3) {
            return Some("exit".into());
        }
        let taken =
            self.processes.iter().filter(|other| other.actor == actor).map(|other| other.seat);
        let next = taken.max()? + 1;
        if self.processes[p].other && self.avoids("exec-as-other") {
            return (next < SEATS).then(|| format!("fork {next}"));
        }
        (next < SEATS).then(|| format!("{} {next}", self.one(&["fork", "fork", "exec", "spawn"])))
    }

    fn credentials(&mut self, p: usize) -> Option<String> {
        if self.chance(5) {
            return Some(format!("umask 0{:o}", self.one(&[0o022, 0o000, 0o077, 0o002])));
        }
        let uid = if self.processes[p].other && self.chance(2) { 0 } else { self.one(&USERS) };
        let gid = self.one(&USERS);
        let groups = if self.chance(12) { self.one(&["1000", "1001,1000", "0"]) } else { "-" };
        Some(format!("cred {uid} {gid} {groups}"))
    }

    fn line(&mut self, p: usize) -> String {
        // Who has nothing open opens something first.
        let open = self.slots(p, |open| !open.dir && !open.path_only).len();
        if open == 0 && !self.chance(4) || self.chance(if open < 4 { 8 } else { 20 }) {
            return self.open(p);
        }
        if self.chance(if open > 8 { 10 } else { 40 }) {
            return self.close(p);
        }
        let total: u64 = self.weights.iter().map(|(_, weight)| weight).sum();
        let mut pick = self.random.below(total.max(1));
        let weights = self.weights.clone();
        let group = weights.iter().find(|(_, weight)| {
            let found = pick < *weight;
            pick = pick.saturating_sub(*weight);
            found
        });
        let line = match group.map(|(name, _)| *name) {
            Some("size") => self.size(p),
            Some("hole") => self.hole(p),
            Some("copy") => self.copy(p),
            Some("clone") => self.clone_range(p),
            Some("sync") => self.sync(p),
            Some("map") => self.map(p),
            Some("stat") => self.stat(p),
            Some("mode") => self.permissions(p),
            Some("owner") => self.owner(p),
            Some("time") => self.time(p),
            Some("xattr") => self.xattr(p),
            Some("acl") => self.acl(p),
            Some("names") => self.moving(p),
            Some("dirs") => self.directories(p),
            Some("lock") => self.lock(p),
            Some("dup") => self.duplicate(p),
            Some("child") => self.children(p),
            Some("cred") => self.credentials(p),
            _ => self.data(p),
        };
        line.unwrap_or_else(|| self.open(p))
    }

    fn event(&mut self) -> Option<Step> {
        let [pause, sweep, restart] = self.rates;
        if self.chance(pause) {
            return Some(Step::Pause(30));
        }
        if self.chance(sweep) {
            return Some(Step::Sweep(self.random.below(3) as usize));
        }
        if self.chance(restart * 4) {
            let actors = self.processes.iter().map(|p| p.actor).max().unwrap_or(0) as u64 + 1;
            return Some(Step::Restart(self.random.below(actors) as usize));
        }
        self.fault()
    }

    fn fault(&mut self) -> Option<Step> {
        if let Some(turns) = self.calm_in {
            self.calm_in = turns.checked_sub(1);
            return (turns == 0).then_some(Step::Calm);
        }
        let faults = self.wish.faults?;
        if !self.chance(faults) {
            return None;
        }
        let node = 1 + self.random.below(u64::from(self.wish.nodes));
        // Shorter and longer than the others wait for a node.
        let ms = if self.chance(2) { 10 + self.random.below(400) } else { self.random.below(4000) };
        let beside = if self.chance(2) { " &" } else { "" };
        let kind = self.random.below(if self.wish.links { 12 } else { 9 });
        let turns = 3 + self.random.below(40);
        self.calm_in = (!beside.is_empty() || kind == 8).then_some(turns);
        Some(Step::Fault(match kind {
            0..2 => format!("nicfs {node}{beside}"),
            2 => format!("hostd {node}{beside}"),
            3 => format!("stop {node} hostd {ms}{beside}"),
            4 => format!("stop {node} nicfs {ms}{beside}"),
            5 => format!("term {node}{beside}"),
            6 => format!("node {node}{beside}"),
            7 => format!("coordinator {ms}{beside}"),
            8 => format!("full {}", self.random.below(4000)),
            _ => format!("cut {node} {ms}{beside}"),
        }))
    }
}

/// What a history is about.
fn weights(random: &mut Random, wish: &Wish, abilities: Abilities) -> Vec<(&'static str, u64)> {
    let can = |name: &str| match name {
        "owner" | "cred" => abilities.root,
        "xattr" => abilities.xattrs,
        "acl" => abilities.acls,
        "dirs" | "names" => !wish.one_file,
        _ => true,
    };
    let wanted = |name: &str| {
        (wish.only.is_empty() || wish.only.iter().any(|n| n == name))
            && !wish.without.iter().any(|n| n == name)
    };
    let sparse = random.chance(1, 3);
    let mut weights = Vec::new();
    for name in GROUPS {
        let drawn = match random.below(if sparse { 4 } else { 2 }) {
            0 => 1 + random.below(8),
            _ => u64::from(name == "data" || name == "stat"),
        };
        if drawn > 0 && can(name) && wanted(name) {
            weights.push((name, drawn));
        }
    }
    if weights.is_empty() {
        weights
            .extend(GROUPS.iter().filter(|name| can(name) && wanted(name)).map(|name| (*name, 1)));
    }
    weights
}

impl Source for Draw {
    fn next(&mut self, stage: &Stage<'_>) -> Vec<Step> {
        if !self.begun {
            self.begun = true;
            self.reference = stage.reference();
        }
        if self.left == 0 {
            // The last word: everything is the same.
            if self.calm_in.take().is_some() {
                return vec![Step::Calm];
            }
            let steps = if self.ended {
                Vec::new()
            } else {
                vec![Step::Sweep(self.random.below(3) as usize)]
            };
            self.ended = true;
            return steps;
        }
        if let Some(step) = self.event() {
            if let Step::Restart(actor) = step {
                self.forget(actor);
            }
            return vec![step];
        }
        let alive: Vec<usize> =
            (0..self.processes.len()).filter(|p| self.processes[*p].alive).collect();
        let process = self.one(&alive);
        let count = (1 + self.random.below(self.batch)).min(self.left);
        self.left -= count;
        let Process { actor, seat, .. } = self.processes[process];
        let mut steps: Vec<Step> = Vec::new();
        for _ in 0..count {
            let line = self.line(process);
            let last = matches!(line.split(' ').next(), Some("fork" | "exec" | "spawn" | "exit"));
            self.expect(process, &line);
            steps.push(Step::call(actor, seat, line));
            if last {
                break;
            }
        }
        steps
    }

    fn anew(&mut self) {
        let actors = self.processes.iter().map(|p| p.actor).max().unwrap_or(0);
        (0..=actors).for_each(|actor| self.forget(actor));
    }

    fn begun(&mut self, actor: usize) {
        self.forget(actor);
    }

    fn heard(&mut self, step: &Step, answer: &str) {
        let Step::Call { actor, seat, line } = step else { return };
        let Some(process) =
            self.processes.iter().position(|p| (p.actor, p.seat) == (*actor, *seat))
        else {
            return;
        };
        let words: Vec<&str> = line.split(' ').collect();
        let failed = answer.split(' ').nth(1) != Some("0") || answer.starts_with("special");
        let slot =
            |index: usize| words.get(index).and_then(|token| crate::worker::named_slot(token));
        match words[0] {
            // What was expected when it was drawn did not happen.
            "open" | "creat" if failed => {
                if let Some(slot) = slot(1) {
                    self.processes[process].slots[slot] = None;
                }
            }
            "dup" | "fdupfd" if failed => {
                if let Some(slot) = slot(2) {
                    self.processes[process].slots[slot] = None;
                }
            }
            "mmap" if failed => {
                if let Some(map) = words[1][1..].parse::<usize>().ok().filter(|n| *n < MAPS) {
                    self.processes[process].maps[map] = None;
                }
            }
            "getdents" if !failed => {
                let told =
                    answer.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
                if let Some(open) =
                    slot(1).and_then(|slot| self.processes[process].slots[slot].as_mut())
                {
                    open.told += told;
                }
            }
            "fork" | "exec" | "spawn" if !failed => {
                let mut child = self.processes[process].clone();
                child.seat = words[1].parse().unwrap_or(0);
                if words[0] != "fork" {
                    child.bare |= child.parts;
                    child.maps.fill(None);
                    child.moved |= self.processes[process].moved;
                }
                self.processes.push(child);
            }
            _ => {}
        }
    }
}

impl Draw {
    /// An actor starts anew.
    fn forget(&mut self, actor: usize) {
        self.processes.retain(|p| p.actor != actor || p.seat == 0);
        for process in self.processes.iter_mut().filter(|p| p.actor == actor) {
            process.slots.fill(None);
            process.maps.fill(None);
            (process.other, process.moved, process.alive) = (false, false, true);
            (process.parts, process.bare) = (false, false);
        }
    }

    /// Notes what a call will have done, if it succeeds: others of the same batch go by it.
    fn expect(&mut self, process: usize, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let slot =
            |index: usize| words.get(index).and_then(|token| crate::worker::named_slot(token));
        let process = &mut self.processes[process];
        match words[0] {
            "open" | "creat" => {
                let flags = if words[0] == "open" { words[3] } else { "" };
                let has = |flag: &str| flags.split('|').any(|f| f == flag);
                let open = Open { dir: has("directory"), path_only: has("path"), told: 0 };
                if let Some(slot) = slot(1) {
                    process.slots[slot] = Some(open);
                }
            }
            "close" => {
                if let Some(slot) = slot(1) {
                    process.slots[slot] = None;
                }
            }
            "dup" | "dup2" | "fdupfd" => {
                if let (Some(from), Some(to)) = (slot(1), slot(2)) {
                    process.slots[to] = process.slots[from].clone();
                }
            }
            "mmap" => {
                if let Some(map) = words[1][1..].parse::<usize>().ok().filter(|n| *n < MAPS) {
                    process.maps[map] = slot(2);
                }
            }
            "munmap" => {
                if let Some(map) = words[1][1..].parse::<usize>().ok().filter(|n| *n < MAPS) {
                    process.maps[map] = None;
                }
            }
            "exit" => process.alive = false,
            "cred" => {
                process.other = words[1] != "0";
                process.parts = process.other || words[2] != "0";
            }
            "chdir" | "fchdir" => process.moved = true,
            _ => {}
        }
    }
}
