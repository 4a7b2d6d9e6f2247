//! Supplementary groups of callers. The protocol carries only uid and gid; the rest is read from
//! `/proc/PID/status` and kept for a moment, since a program makes many calls in a row.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer is used. A process whose groups change keeps its old ones this long, unless
/// its uid or gid changed with them, as at login.
const KEEP: Duration = Duration::from_millis(500);
/// Processes remembered; past it all are forgotten, which costs one read each.
const PROCESSES_MAX: usize = 1024;

type Groups = Arc<[u32]>;
/// Process, user, group.
type Key = (u32, u32, u32);

/// The cache.
#[derive(Debug, Default)]
pub struct GroupCache {
    known: Mutex<HashMap<Key, (Instant, Groups)>>,
}

impl GroupCache {
    /// Supplementary groups of process `pid`, which acts as `uid` and `gid`. Root gets none: it
    /// needs none.
    pub fn of(&self, pid: u32, uid: u32, gid: u32) -> Groups {
        if uid == 0 || pid == 0 {
            return Arc::new([]);
        }
        let key = (pid, uid, gid);
        let now = Instant::now();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((read, groups)) = known.get(&key)
            && now.duration_since(*read) < KEEP
        {
            return groups.clone();
        }
        let groups = read(pid);
        if known.len() >= PROCESSES_MAX {
            known.clear();
        }
        known.insert(key, (now, groups.clone()));
        groups
    }
}

/// A process that is gone, or hidden, has none.
fn read(pid: u32) -> Groups {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    parse(&status)
}

fn parse(status: &str) -> Groups {
    status
        .lines()
        .find_map(|line| line.strip_prefix("Groups:"))
        .into_iter()
        .flat_map(str::split_ascii_whitespace)
        .filter_map(|group| group.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_status() {
        assert_eq!(&*parse("Name:\tx\nGroups:\t4 24 1000 \nNSpid: 1\n"), [4, 24, 1000]);
        assert_eq!(&*parse("Groups:\t \n"), []);
        assert_eq!(&*parse(""), []);
    }
}
