//! Lines of the log: on standard error, each with when, how grave it is, and who says it. The journal notes the time itself, and takes
//! how grave it is from the front of the line (sd-daemon(3)).

use std::io::Write;

use log::{Level, LevelFilter};
use rustix::fs::Stat;

use crate::clock::rfc3339_now;

/// Begins to log what is at least so grave.
pub fn begin(level: LevelFilter) {
    let journal = std::env::var("JOURNAL_STREAM").ok();
    let stderr = rustix::fs::fstat(std::io::stderr()).ok();
    let to_journal = stderr.is_some_and(|stderr| is_journal(journal.as_deref(), &stderr));
    let mut builder = env_logger::Builder::new();
    builder.filter_level(level).format(move |out, record| {
        let (level, target, args) = (record.level(), record.target(), record.args());
        if to_journal {
            writeln!(out, "<{}>{target}: {args}", severity(level))
        } else {
            writeln!(out, "{} {level:5} {target}: {args}", rfc3339_now())
        }
    });
    builder.init();
}

/// Whether that is what systemd has connected to its journal (`$JOURNAL_STREAM`, systemd.exec(5)): a program may have been given another
/// standard error since.
fn is_journal(stream: Option<&str>, stderr: &Stat) -> bool {
    let of = |stream: &str| {
        let (device, inode) = stream.split_once(':')?;
        Some((device.parse::<u64>().ok()?, inode.parse::<u64>().ok()?))
    };
    stream.and_then(of) == Some((stderr.st_dev, stderr.st_ino))
}

/// As syslog counts.
const fn severity(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_systemd_has_connected_is_the_journal() {
        let stat = rustix::fs::stat("/").unwrap();
        let here = format!("{}:{}", stat.st_dev, stat.st_ino);
        assert!(is_journal(Some(&here), &stat));
        for other in ["", ":", "8:1", "x:y", &format!("{here}0"), &format!("{here}:1")] {
            assert!(!is_journal(Some(other), &stat), "{other}");
        }
        assert!(!is_journal(None, &stat));
    }
}
