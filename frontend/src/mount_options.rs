//! Options of `mount -o`, as mount(8), fstab and systemd hand them over.

use std::time::Duration;

use base::Errno;
use client::fs::check_own_name;
use client::libfs::Verify;
use rustix::mount::MountFlags;

/// Threads that serve requests unless `threads=` says otherwise: enough that a few slow fsyncs
/// leave some for look-ups.
const THREADS: usize = 8;
const THREADS_MAX: usize = 256;
/// What `soft` means without `timeo=`.
const TIMEO: Duration = Duration::from_secs(30);

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// Kernel flags (`ro`, `nosuid`, ...).
    pub flags: MountFlags,
    /// Let other users in.
    pub allow_other: bool,
    /// The kernel checks modes before it asks the file system.
    pub default_permissions: bool,
    /// Serving threads.
    pub threads: usize,
    /// Serve requests over io_uring if the kernel offers that.
    pub io_uring: bool,
    /// `fcntl` and `flock` locks hold among the processes of this mount only.
    pub local_locks: bool,
    /// Which reads are compared with the checksums of what is read.
    pub verify: Verify,
    /// Requests that wait for the node longer than `timeo` end with EIO; else they wait without end.
    pub soft: bool,
    /// Only with `soft`.
    pub timeo: Duration,
    /// Mount the directory of that snapshot, which nobody can change.
    pub snapshot: Option<String>,
    /// Change the flags of the mount that is there instead.
    pub remount: bool,
    /// What the mount table shows as the source.
    pub source: String,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            // Reading marks no time of access here, and the mount table shall say so.
            flags: MountFlags::NOATIME,
            allow_other: rustix::process::geteuid().is_root(),
            default_permissions: true,
            threads: THREADS,
            io_uring: true,
            local_locks: false,
            verify: Verify::Never,
            soft: false,
            snapshot: None,
            remount: false,
            timeo: TIMEO,
            source: "corbel".into(),
        }
    }
}

/// Options that set or clear a kernel flag.
const FLAGS: [(&str, MountFlags, bool); 17] = [
    ("rw", MountFlags::RDONLY, false),
    ("ro", MountFlags::RDONLY, true),
    ("suid", MountFlags::NOSUID, false),
    ("nosuid", MountFlags::NOSUID, true),
    ("dev", MountFlags::NODEV, false),
    ("nodev", MountFlags::NODEV, true),
    ("exec", MountFlags::NOEXEC, false),
    ("noexec", MountFlags::NOEXEC, true),
    ("atime", MountFlags::NOATIME, false),
    ("noatime", MountFlags::NOATIME, true),
    ("diratime", MountFlags::NODIRATIME, false),
    ("nodiratime", MountFlags::NODIRATIME, true),
    ("relatime", MountFlags::RELATIME, true),
    ("norelatime", MountFlags::RELATIME, false),
    ("strictatime", MountFlags::STRICTATIME, true),
    ("sync", MountFlags::SYNCHRONOUS, true),
    ("dirsync", MountFlags::DIRSYNC, true),
];

/// Options that are for mount(8), fstab readers and systemd, not for us.
const FOR_OTHERS: [&str; 11] = [
    "defaults", "async", "auto", "noauto", "user", "nouser", "users", "owner", "group", "_netdev",
    "nofail",
];

/// Options of our own, for the error text.
const OWN: &str = "allow_other, default_permissions, no_default_permissions, local_locks, threads=N, io_uring, \
     no_io_uring, verify=never|sample|always, hard, soft, timeo=SECONDS, snapshot=NAME, remount";

impl MountOptions {
    /// Takes in one comma-separated list.
    ///
    /// # Errors
    /// The first option that is not known, with what is.
    pub fn apply(&mut self, list: &str) -> Result<(), String> {
        list.split(',').filter(|option| !option.is_empty()).try_for_each(|o| self.apply_one(o))
    }

    fn apply_one(&mut self, option: &str) -> Result<(), String> {
        if let Some((_, flag, set)) = FLAGS.iter().find(|(name, _, _)| *name == option) {
            self.flags.set(*flag, *set);
            return Ok(());
        }
        let for_others = FOR_OTHERS.contains(&option)
            || option.starts_with("x-")
            || option.starts_with("X-")
            || option.starts_with("comment=")
            // What the mount table shows of a FUSE mount, and mount(8) repeats to remount it.
            || option.starts_with("user_id=")
            || option.starts_with("group_id=");
        if for_others {
            return Ok(());
        }
        match option.split_once('=') {
            None if option == "allow_other" => self.allow_other = true,
            None if option == "default_permissions" => self.default_permissions = true,
            None if option == "no_default_permissions" => self.default_permissions = false,
            None if option == "local_locks" => self.local_locks = true,
            None if option == "io_uring" => self.io_uring = true,
            None if option == "no_io_uring" => self.io_uring = false,
            None if option == "remount" => self.remount = true,
            None if option == "hard" => self.soft = false,
            None if option == "soft" => self.soft = true,
            Some(("timeo", seconds)) => {
                let limit = seconds.parse().ok().filter(|n| (1..=86_400).contains(n));
                let limit = limit.ok_or_else(|| format!("timeo={seconds}: give 1 to 86400"))?;
                self.timeo = Duration::from_secs(limit);
            }
            Some(("snapshot", name)) => {
                check_own_name(name.as_bytes(), Errno::INVAL).map_err(|e| {
                    format!("snapshot={name}: {e}; corbel snapshot list has the names")
                })?;
                self.snapshot = Some(name.into());
                self.flags.insert(MountFlags::RDONLY);
            }
            Some(("verify", which)) => {
                self.verify = Verify::named(which)
                    .ok_or_else(|| format!("verify={which}: give never, sample or always"))?;
            }
            Some(("threads", count)) => {
                self.threads = count
                    .parse()
                    .ok()
                    .filter(|n| (1..=THREADS_MAX).contains(n))
                    .ok_or_else(|| format!("threads={count}: give 1 to {THREADS_MAX}"))?;
            }
            _ => {
                let flags: Vec<&str> = FLAGS.iter().map(|(name, _, _)| *name).collect();
                return Err(format!(
                    "unknown mount option '{option}'; known are {OWN}, {}, and those that \
                     fstab and systemd use ({}, x-*)",
                    flags.join(", "),
                    FOR_OTHERS.join(", ")
                ));
            }
        }
        Ok(())
    }

    /// How long a request may wait for the node.
    pub fn limit(&self) -> Option<Duration> {
        self.soft.then_some(self.timeo)
    }

    /// The kernel flags as words, for fusermount3.
    pub(crate) fn flag_words(&self) -> impl Iterator<Item = &'static str> {
        let flags = self.flags;
        FLAGS.iter().filter(move |(_, flag, set)| *set && flags.contains(*flag)).map(|(n, _, _)| *n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_what_mount_and_fstab_say() {
        let mut options = MountOptions::default();
        options.apply("rw,noatime,_netdev,nofail,x-systemd.automount,threads=3").unwrap();
        assert_eq!((options.flags, options.threads), (MountFlags::NOATIME, 3));
        assert!(!options.local_locks);
        options.apply("local_locks").unwrap();
        assert!(options.local_locks);
        for (word, verify) in Verify::ALL {
            options.apply(&format!("verify={word}")).unwrap();
            assert_eq!(options.verify, verify);
        }
        assert!(options.apply("verify=now").unwrap_err().contains("sample"));
        assert!(options.io_uring);
        options.apply("no_io_uring").unwrap();
        assert!(!options.io_uring);
        options.apply("timeo=7").unwrap();
        assert_eq!(options.limit(), None);
        options.apply("soft").unwrap();
        assert_eq!(options.limit(), Some(Duration::from_secs(7)));
        options.apply("hard").unwrap();
        assert_eq!(options.limit(), None);
        options.apply("ro,nosuid,,atime").unwrap();
        assert_eq!(options.flags, MountFlags::RDONLY | MountFlags::NOSUID);
        assert_eq!(options.flag_words().collect::<Vec<_>>(), ["ro", "nosuid"]);
        options.apply("rw").unwrap();
        options.apply("snapshot=daily 3").unwrap();
        assert_eq!(options.snapshot.as_deref(), Some("daily 3"));
        assert!(options.flags.contains(MountFlags::RDONLY), "nobody can change a snapshot");
    }

    #[test]
    fn refuses_the_rest_by_name() {
        for bad in [
            "quux",
            "timeo=0",
            "timeo=x",
            "snapshot=",
            "snapshot=..",
            "snapshot=a/b",
            "threads=0",
            "threads=x",
            "allow_other=1",
            "ro ",
            "size=3",
        ] {
            let error = MountOptions::default().apply(bad).unwrap_err();
            assert!(error.contains(bad.trim_end_matches("=1")), "{bad}: {error}");
        }
    }
}
