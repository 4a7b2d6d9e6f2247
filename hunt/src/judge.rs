//! Compares what a worker says with what the reference says, and knows what may differ.
//!
//! **What may differ** (each with the page that says so):
//! - inode and device numbers; but two names are one inode in both or in neither
//! - times that nobody has set: both must lie between the same two pauses of the history
//! - times of access, if the reference cannot do without them (docs/mount.md: reading does not change them)
//! - space taken (`blocks`), and the size of directories
//! - the order of a directory
//! - COLLAPSE_RANGE, INSERT_RANGE, FICLONE where the kernel serves the file: EOPNOTSUPP (docs/mount.md)
//! - O_DIRECT asks for no alignment (docs/mount.md), and the reference does not get it
//! - where holes are: SEEK_DATA and SEEK_HOLE may take zeros for data, never data for a hole
//! - which lock F_GETLK names, if several are in the way
//! - what another node has removed is ESTALE where it would be ENOENT (docs/mount.md)
//! - F_GETLK names no process of another machine (docs/mount.md)
//! - what `statx` with AT_STATX_DONT_SYNC tells, if without it is right
//! - where `getcwd` says that a directory is which others have moved, until somebody has looked there (docs/mount.md)
//! - ESTALE of a `rename` in a mount of a directory that others have moved, until somebody has looked there (docs/mount.md)
//! - what `corbel run` opens anew for the kernel and could not open now: EACCES, or the placeholder of it where a program was
//!   executed (docs/interception.md)
//! - `flock` of a directory by programs on several machines (docs/mount.md)
//! - a file without a name in a directory that was removed: ENOENT, where ext4 says EPERM
//! - what a mount's kernel says before ENOENT of a name that is made in a directory which others have removed (docs/mount.md)
//! - positions in directories, locks that count from there on included

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::text::field;

/// Where two answers differ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The step, counted from 0.
    pub step: usize,
    /// What the step was.
    pub text: String,
    /// In short, what differs: the same for the same cause, as far as that can be told.
    pub kind: String,
    /// What the reference said.
    pub expected: String,
    /// What the worker said.
    pub got: String,
    /// More about it.
    pub detail: String,
}

/// Fields that are times.
const TIMES: [&str; 3] = ["atime", "mtime", "ctime"];

/// What is remembered of a history to judge the rest.
#[derive(Debug)]
pub struct Judge {
    /// Nothing that happened in this history can have an earlier time.
    begin: Duration,
    /// Moments in which nothing happened.
    pauses: Vec<Duration>,
    /// Whether times of access are comparable.
    pub atime: bool,
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn time(text: &str) -> Option<Duration> {
    let (seconds, nanoseconds) = text.split_once('.')?;
    Some(Duration::new(seconds.parse().ok()?, nanoseconds.parse().ok()?))
}

impl Default for Judge {
    fn default() -> Self {
        // Times of files come from a clock that is some ticks behind.
        Self { begin: now() - Duration::from_secs(1), pauses: Vec::new(), atime: true }
    }
}

impl Judge {
    /// Nothing happens at this moment, and did not for some ticks.
    pub fn pause(&mut self) {
        self.pauses.push(now());
    }

    /// Between which pauses a time lies; none if it is not of this history.
    fn interval(&self, time: Duration) -> Option<usize> {
        let known = time >= self.begin && time <= now() + Duration::from_secs(1);
        known.then(|| self.pauses.partition_point(|pause| *pause <= time))
    }

    fn same_time(&self, one: &str, two: &str) -> bool {
        if one == two {
            return true;
        }
        let interval = |text| time(text).and_then(|time| self.interval(time));
        matches!((interval(one), interval(two)), (Some(a), Some(b)) if a == b)
    }

    /// The first field in which two lists of `key=value` differ.
    pub fn differing(&self, real: &[&str], reference: &[&str]) -> Option<String> {
        let mode = field(reference, "mode").and_then(|m| u32::from_str_radix(m, 8).ok());
        let is = |kind| mode.is_some_and(|mode| mode & libc::S_IFMT == kind);
        let (is_dir, is_link) = (is(libc::S_IFDIR), is(libc::S_IFLNK));
        let keys = real.iter().chain(reference).filter_map(|token| token.split_once('='));
        let mut seen = BTreeSet::new();
        for (key, _) in keys {
            if !seen.insert(key) || matches!(key, "ino" | "blocks") || (is_dir && key == "size") {
                continue;
            }
            // The director follows links of the reference, too.
            if is_link && key == "atime" {
                continue;
            }
            let (a, b) = (field(real, key), field(reference, key));
            let same = match (a, b) {
                _ if key == "atime" && !self.atime => true,
                (Some(a), Some(b)) if TIMES.contains(&key) => self.same_time(a, b),
                (a, b) => a == b,
            };
            if !same {
                return Some(key.to_string());
            }
        }
        None
    }

    /// What differs between two answers to the same call.
    pub fn compare(&self, name: &str, real: &str, reference: &str) -> Option<String> {
        if real == reference {
            return None;
        }
        let a: Vec<&str> = real.split(' ').collect();
        let b: Vec<&str> = reference.split(' ').collect();
        let head =
            |tokens: &[&str]| (tokens[0].to_string(), tokens.get(1).map(|t| (*t).to_string()));
        let ((value, error), (wanted, due)) = (head(&a), head(&b));
        if error != due {
            // What is gone: as on NFS, it may be told by the number that it had.
            if (error.as_deref(), due.as_deref()) == (Some("ESTALE"), Some("ENOENT")) {
                return None;
            }
            let show =
                |error: Option<String>| error.filter(|e| e != "0").unwrap_or("success".into());
            return Some(format!("{name}: {} for {}", show(error), show(due)));
        }
        if value != wanted {
            return Some(format!("{name}: result"));
        }
        if name == "getlk" && field(&a, "type") != Some("2") && field(&b, "type") != Some("2") {
            // Of several locks that are in the way, any may be named.
            return None;
        }
        let field = self.differing(&a[2.min(a.len())..], &b[2.min(b.len())..])?;
        Some(format!("{name}: {field}"))
    }

    /// What differs, between two readings of a tree, in what was not changed in between as its times tell: the kind,
    /// and the two entries.
    pub fn compare_untouched(
        &self,
        after: &str,
        before: &str,
        sums: bool,
    ) -> Option<(String, String, String)> {
        let (after, before) = (entries(after), entries(before));
        for (path, was) in &before {
            let Some(is) = after.get(path) else { continue };
            let (was, is): (Vec<&str>, Vec<&str>) =
                (was.split(';').collect(), is.split(';').collect());
            if field(&was, "ino") != field(&is, "ino")
                || field(&was, "ctime") != field(&is, "ctime")
            {
                continue;
            }
            if let Some(key) = self.differing(&is, &was).filter(|key| sums || key != "sum") {
                let show = |about: &[&str]| format!("{path};{}", about.join(";"));
                return Some((key, show(&is), show(&was)));
            }
        }
        // A name goes only if its directory changes.
        for (path, was) in &before {
            let dir = path.rsplit_once('/').map(|(dir, _)| dir);
            let Some(dir) = dir.filter(|_| !after.contains_key(path)) else { continue };
            let time = |tree: &BTreeMap<String, String>| {
                let about = tree.get(dir)?;
                field(&about.split(';').collect::<Vec<_>>(), "ctime").map(str::to_owned)
            };
            if let Some(time_before) = time(&before)
                && time(&after) == Some(time_before)
            {
                return Some(("names".into(), "nothing".into(), format!("{path};{was}")));
            }
        }
        None
    }

    /// What is wrong, in a reading of a tree, with a file that was synced before and looked as is said.
    pub fn compare_synced(
        &self,
        tree: &str,
        ino: &str,
        synced: &str,
        may_be_gone: bool,
        sums: bool,
    ) -> Option<&'static str> {
        let synced: Vec<&str> = synced.split(' ').collect();
        let tree = entries(tree);
        let found = tree.values().map(|about| about.split(';').collect::<Vec<_>>());
        let found = found.into_iter().find(|about| field(about, "ino") == Some(ino));
        let Some(found) = found else {
            // A file without a name is not seen.
            let named = field(&synced, "nlink").is_some_and(|n| n != "0");
            return (named && !may_be_gone).then_some("it is gone");
        };
        let when = |about: &[&str]| field(about, "ctime").and_then(time);
        match when(&found).cmp(&when(&synced)) {
            std::cmp::Ordering::Less => Some("it went back"),
            std::cmp::Ordering::Equal if field(&found, "size") != field(&synced, "size") => {
                Some("size")
            }
            std::cmp::Ordering::Equal if sums && field(&found, "sum") != field(&synced, "sum") => {
                Some("content")
            }
            _ => None,
        }
    }

    /// What differs between two readings of a whole tree: the kind, and the two entries.
    pub fn compare_trees(&self, real: &str, reference: &str) -> Option<(String, String, String)> {
        let (a, b) = (entries(real), entries(reference));
        let mut inodes = BTreeMap::new();
        let mut back = BTreeMap::new();
        for path in a.keys().chain(b.keys()) {
            let there =
                |about: Option<&String>| about.map_or("nothing".into(), |a| format!("{path};{a}"));
            let (one, two) = (a.get(path), b.get(path));
            let differ = |what: &str| Some((format!("sweep: {what}"), there(one), there(two)));
            let (Some(one), Some(two)) = (one, two) else {
                return differ("names");
            };
            let one: Vec<&str> = one.split(';').collect();
            let two: Vec<&str> = two.split(';').collect();
            if let Some(key) = self.differing(&one, &two) {
                let key = if key.starts_with("x:") { "xattr" } else { &key };
                return differ(key);
            }
            if let (Some(x), Some(y)) = (field(&one, "ino"), field(&two, "ino")) {
                let (x, y) = (x.to_string(), y.to_string());
                let known = inodes.entry(x.clone()).or_insert_with(|| y.clone()) == &y;
                if !known || back.entry(y).or_insert_with(|| x.clone()) != &x {
                    return differ("which names are one inode");
                }
            }
        }
        None
    }
}

/// What is told of each name in a reading of a tree.
fn entries(text: &str) -> BTreeMap<String, String> {
    let all = text.split(' ').skip(2);
    all.filter_map(|e| e.split_once(';')).map(|(p, a)| (p.into(), a.into())).collect()
}

/// What a descriptor of a directory has told since it was rewound.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    told: Vec<String>,
    /// Names, with their inodes, that were there all the time.
    always: Option<BTreeSet<(String, u64)>>,
    /// It was put somewhere.
    lost: bool,
}

impl Pass {
    /// Goes back to behind the name with that number.
    pub fn seek(&mut self, to: usize) {
        self.told.truncate(to);
        if to == 0 {
            *self = Self::default();
        }
    }

    /// Nobody knows where it stands, until it is rewound.
    pub fn lose(&mut self) {
        self.lost = true;
    }

    /// Takes in what one call told, there being these names at that time (as `NAME/TYPE`, with inodes).
    pub fn told(&mut self, names: &[&str], there: &BTreeSet<(String, u64)>) -> Option<String> {
        if self.lost {
            return None;
        }
        let always = self.always.get_or_insert_with(|| there.clone());
        always.retain(|name| there.contains(name));
        for name in names {
            if !there.iter().any(|(n, _)| n == name) {
                return Some(format!("{name} is not there"));
            }
            // One that was gone for a while may come again.
            let lasting = always.iter().any(|(n, _)| n == name);
            if lasting && self.told.iter().any(|told| told == name) {
                return Some(format!("{name} is told twice"));
            }
            self.told.push((*name).to_string());
        }
        if names.is_empty() {
            let missing = always.iter().find(|(name, _)| !self.told.contains(name));
            return missing.map(|(name, _)| format!("{name} was never told"));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_errors_and_fields_are_compared() {
        let judge = Judge::default();
        let kind = |a: &str, b: &str| judge.compare("x", a, b);
        assert_eq!(kind("3 0", "3 0"), None);
        assert_eq!(kind("3 0", "4 0").unwrap(), "x: result");
        assert_eq!(kind("-1 EIO", "4 0").unwrap(), "x: EIO for success");
        assert_eq!(kind("0 0", "-1 ENOENT").unwrap(), "x: success for ENOENT");
        assert_eq!(kind("0 0 ino=1 size=2", "0 0 ino=5 size=2"), None);
        assert_eq!(kind("0 0 size=1", "0 0 size=2").unwrap(), "x: size");
        assert_eq!(kind("0 0 mode=40755 size=1", "0 0 mode=40755 size=2"), None);
        assert_eq!(kind("0 0", "0 0 size=2").unwrap(), "x: size");
        assert_eq!(kind("noslot", "0 0").unwrap(), "x: success for success");
    }

    #[test]
    fn times_are_exact_or_between_the_same_pauses() {
        let mut judge = Judge::default();
        let stamp = |ago: u64| {
            let time = now() - Duration::from_millis(ago);
            format!("0 0 mtime={}.{:09}", time.as_secs(), time.subsec_nanos())
        };
        let before = stamp(0);
        let differs = |judge: &Judge, a: &str, b: &str| judge.compare("x", a, b).is_some();
        assert!(!differs(&judge, &before, &stamp(20)));
        std::thread::sleep(Duration::from_millis(5));
        judge.pause();
        std::thread::sleep(Duration::from_millis(5));
        assert!(differs(&judge, &before, &stamp(0)));
        assert!(differs(&judge, "0 0 mtime=5.000000000", "0 0 mtime=5.000000001"));
        assert!(!differs(&judge, "0 0 mtime=5.000000001", "0 0 mtime=5.000000001"));
        assert!(differs(&judge, &before, "0 0 mtime=5.000000000"));
    }

    #[test]
    fn trees_are_compared_with_their_links() {
        let judge = Judge::default();
        let tree = |a: u64, b: u64| format!("0 0 a;ino={a};size=1 b;ino={b};size=1");
        assert_eq!(judge.compare_trees(&tree(1, 2), &tree(7, 8)), None);
        let one = judge.compare_trees(&tree(1, 1), &tree(7, 8)).unwrap();
        assert_eq!(one.0, "sweep: which names are one inode");
        assert!(judge.compare_trees(&tree(1, 2), &tree(7, 7)).is_some());
        let kind = |text: &str| judge.compare_trees(text, &tree(1, 2)).unwrap().0;
        assert_eq!(kind("0 0 a;ino=1;size=1"), "sweep: names");
        assert_eq!(kind("0 0 a;ino=1;size=2 b;ino=2;size=1"), "sweep: size");
    }

    #[test]
    fn what_was_not_touched_is_as_it_was() {
        let mut judge = Judge::default();
        judge.pause();
        let tree = |ctime: u64, sum: u64| {
            format!("0 0 d;ino=1;ctime=5.0 d/a;ino=2;ctime={ctime}.0;sum={sum}")
        };
        let untouched = |after: &str, sums| judge.compare_untouched(after, &tree(7, 1), sums);
        assert_eq!(untouched(&tree(7, 1), true), None);
        assert_eq!(untouched(&tree(8, 2), true), None);
        assert_eq!(untouched(&tree(7, 2), false), None);
        assert_eq!(untouched(&tree(7, 2), true).unwrap().0, "sum");
        assert_eq!(untouched("0 0 d;ino=1;ctime=5.0", true).unwrap().0, "names");
        assert_eq!(untouched("0 0 d;ino=1;ctime=6.0", true), None);
    }

    #[test]
    fn what_was_synced_does_not_go_back() {
        let judge = Judge::default();
        let said = "0 0 size=5 nlink=1 ctime=7.000000000 ino=2 sum=1";
        let wrong = |ctime: u64, size: u64, sum: u64| {
            let tree = format!("0 0 a;ino=2;size={size};ctime={ctime}.000000000;sum={sum}");
            judge.compare_synced(&tree, "2", said, false, true)
        };
        assert_eq!(wrong(7, 5, 1), None);
        assert_eq!(wrong(8, 6, 2), None);
        assert_eq!(wrong(6, 5, 1), Some("it went back"));
        assert_eq!(wrong(7, 6, 1), Some("size"));
        assert_eq!(wrong(7, 5, 2), Some("content"));
        assert_eq!(judge.compare_synced("0 0", "2", said, false, true), Some("it is gone"));
        assert_eq!(judge.compare_synced("0 0", "2", said, true, true), None);
    }

    #[test]
    fn directories_are_told_once_and_whole() {
        let names = |list: &[&str]| -> BTreeSet<(String, u64)> {
            list.iter().enumerate().map(|(n, name)| ((*name).to_string(), n as u64)).collect()
        };
        let all = names(&["a", "b", "c"]);
        let mut pass = Pass::default();
        assert_eq!(pass.told(&["a", "b"], &all), None);
        assert!(pass.clone().told(&["a"], &all).is_some());
        assert!(pass.clone().told(&["x"], &all).is_some());
        assert!(pass.clone().told(&[], &all).is_some());
        assert_eq!(pass.clone().told(&[], &names(&["a", "b"])), None);
        assert_eq!(pass.told(&["c"], &all), None);
        assert_eq!(pass.told(&[], &all), None);
        pass.seek(1);
        assert_eq!(pass.told(&["b", "c"], &all), None);
        pass.seek(0);
        assert_eq!(pass.told(&["a"], &all), None);
    }
}
