//! Logs that count no more, and that somebody still has.
//!
//! Whoever has the descriptor of a log can take as much memory by it as there is, also when the file has no name any more. So a
//! log that its process still has open or mapped is not removed but *left*: it is renamed to `left.INODE.USER.BYTES`, looked at
//! like those of clients, and removed when nobody has it. Who gives it another size, or takes more by it than it had, finds it empty
//! from then on (its last number is 0). The names outlast the process that looks.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno as OsError;

/// Looks between two questions whether somebody has a log still.
const ASK: u8 = 4;

/// A log that was left.
#[derive(Debug)]
struct Left {
    file: OwnedFd,
    inode: u64,
    user: u32,
    /// So long it is, and so much it may have, with what the file system needs itself.
    bytes: u64,
    looks: u8,
}

/// All of a region; nothing is known of those of the process before until they are looked for.
#[derive(Debug, Default)]
pub(crate) struct LeftLogs(Option<Vec<Left>>);

/// Whether a file of so many bytes is of that size, and has no more memory than it needs. (Some file systems count what they
/// need themselves, at most this much.)
pub(crate) fn is_as_it_was(file: &OwnedFd, bytes: u64) -> Result<bool, OsError> {
    let stat = rustix::fs::fstat(file)?;
    let is = u64::try_from(stat.st_size).unwrap_or(0);
    let taken = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    let own = if bytes == 0 { 0 } else { bytes / 64 + (64 << 10) };
    Ok(is == bytes && taken <= bytes + own)
}

/// Whether somebody else has the file open, or mapped, or in a message: else it can be leased. A file system that knows no leases
/// does not say.
fn is_had(file: &OwnedFd) -> bool {
    let lease =
                // SAFETY: a plain call on a descriptor that is open.
        |kind: libc::c_int| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) };
    if lease(libc::F_WRLCK) != 0 {
        return std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN);
    }
    lease(libc::F_UNLCK);
    false
}

/// Whether it is the name of one.
pub(crate) fn is_one(name: &str) -> bool {
    let numbers = name.strip_prefix("left.").unwrap_or_default().split('.');
    numbers.clone().count() == 3 && numbers.clone().all(|number| number.parse::<u64>().is_ok())
}

impl Left {
    fn name(&self) -> String {
        format!("left.{}.{}.{}", self.inode, self.user, self.bytes)
    }

    /// One of a name, if that is the name of one.
    fn of_name(dir: &OwnedFd, name: &str) -> Result<Option<Self>, OsError> {
        let mut parts = name.strip_prefix("left.").unwrap_or_default().split('.');
        let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok());
        let (Some(inode), Some(user), Some(bytes)) = (number(), number(), number()) else {
            return Ok(None);
        };
        let Ok(user) = u32::try_from(user) else { return Ok(None) };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(dir, name, flags, Mode::empty())?;
        let left = Self { file, inode, user, bytes, looks: 0 };
        Ok((left.name() == name).then_some(left))
    }

    /// Looks once. `false`: nobody has it, and it is gone.
    fn look(&mut self, dir: &OwnedFd) -> Result<bool, OsError> {
        if !is_as_it_was(&self.file, self.bytes)? {
            if self.bytes > 0 {
                let before = self.name();
                self.bytes = 0;
                rustix::fs::renameat(dir, before, dir, self.name())?;
            }
            rustix::fs::ftruncate(&self.file, 0)?;
        }
        self.looks = (self.looks + 1) % ASK;
        if self.looks != 0 || is_had(&self.file) {
            return Ok(true);
        }
        rustix::fs::unlinkat(dir, self.name(), AtFlags::empty())?;
        Ok(false)
    }
}

impl LeftLogs {
    fn all(&mut self, dir: &OwnedFd) -> Result<&mut Vec<Left>, OsError> {
        if self.0.is_none() {
            let mut found = Vec::new();
            for entry in rustix::fs::Dir::read_from(dir.as_fd())? {
                if let Ok(name) = entry?.file_name().to_str()
                    && name.starts_with("left.")
                    && let Some(left) = Left::of_name(dir, name)?
                {
                    found.push(left);
                }
            }
            self.0 = Some(found);
        }
        Ok(self.0.get_or_insert_default())
    }

    /// The file of that name goes, and is looked after if somebody has it: then the answer is `true`. `bytes`: so long it is
    /// to be.
    pub(crate) fn leave(
        &mut self,
        dir: &OwnedFd,
        name: &str,
        (file, user, bytes): (OwnedFd, u32, u64),
    ) -> Result<bool, OsError> {
        let all = self.all(dir)?;
        let inode = rustix::fs::fstat(&file)?.st_ino;
        let mut left = Left { file, inode, user, bytes, looks: ASK - 1 };
        // (No two files have one number; one of that name is what a power cut brought back.)
        rustix::fs::renameat_with(dir, name, dir, left.name(), RenameFlags::empty())?;
        let stays = left.look(dir)?;
        if stays {
            all.push(left);
        }
        Ok(stays)
    }

    /// Looks at all: how many each user still has.
    pub(crate) fn look(&mut self, dir: &OwnedFd) -> Result<BTreeMap<u32, usize>, OsError> {
        let all = self.all(dir)?;
        let (mut users, mut failed) = (BTreeMap::new(), None);
        all.retain_mut(|left| match left.look(dir) {
            Ok(stays) => stays,
            // Somebody has removed it by hand.
            Err(OsError::NOENT) => false,
            Err(e) => {
                failed = Some(e);
                true
            }
        });
        for left in all {
            *users.entry(left.user).or_default() += 1;
        }
        failed.map_or(Ok(users), Err)
    }

    /// Memory that whoever has them may still take by them.
    pub(crate) fn missing(&self) -> u64 {
        let missing = |left: &Left| {
            let taken = crate::backing::taken(&left.file).unwrap_or(0);
            left.bytes.saturating_sub(taken)
        };
        self.0.iter().flatten().map(missing).sum()
    }
}
