//! Logs that count no more, and that somebody still has.
//!
//! Whoever has the descriptor of a log can take as much memory by it as there is, also when the file has no name any more. So a
//! log that its process still has open or mapped is not removed but *left*: it is renamed to `left.INODE.USER.BYTES`, looked at
//! like those of clients, and removed when nobody has it. Who gives it another size, or takes more by it than it had, finds it empty
//! from then on (its last number is 0). The names outlast the process that looks.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno as OsError;

/// Looks between two questions whether somebody has a log still.
const ASK: u8 = 4;
/// A file that is made and removed at once.
const PROBE: &str = "left.probe";

/// A log that was left.
#[derive(Debug)]
struct Left {
    file: OwnedFd,
    user: u32,
    /// So long it is, and so much it may have, with what the file system needs itself.
    bytes: u64,
    /// What it is called; nothing where the file system had no room for a name. Then it is looked after as long as this process lives.
    name: Option<String>,
    looks: u8,
}

/// All of a region; nothing is known of those of the process before until they are looked for.
#[derive(Debug, Default)]
pub(crate) struct LeftLogs(Option<Known>);

#[derive(Debug)]
struct Known {
    all: Vec<Left>,
    /// The file system tells whether somebody has a file. Of one that does not, all logs are removed at once: else they would stay.
    tells: bool,
}

/// Whether a file of so many bytes is of that size, and has no more memory than it needs. (Some file systems count what they
/// need themselves, at most this much.)
pub(crate) fn is_as_it_was(file: &OwnedFd, bytes: u64) -> Result<bool, OsError> {
    let stat = rustix::fs::fstat(file)?;
    let is = u64::try_from(stat.st_size).unwrap_or(0);
    let taken = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    let own = if bytes == 0 { 0 } else { bytes / 64 + (64 << 10) };
    Ok(is == bytes && taken <= bytes + own)
}

/// Whether somebody else has the file open, or mapped, or in a message: else it can be leased. (Any error but that one comes of a
/// file system that knows no leases.)
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

/// Whether a file that nobody has is not said to be had.
fn tells(dir: &OwnedFd) -> bool {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let probe = rustix::fs::openat(dir, PROBE, flags, Mode::RUSR | Mode::WUSR);
    let _ = rustix::fs::unlinkat(dir, PROBE, AtFlags::empty());
    // Without room for it nothing is known: what is had is looked after.
    probe.map_or(true, |probe| !is_had(&probe))
}

/// The three numbers of a name.
fn numbers(name: &str) -> Option<(u64, u32, u64)> {
    let mut parts = name.strip_prefix("left.")?.split('.');
    let (inode, user, bytes) = (parts.next()?, parts.next()?, parts.next()?);
    let numbers = (inode.parse().ok()?, user.parse().ok()?, bytes.parse().ok()?);
    (parts.next().is_none() && name_of(numbers) == name).then_some(numbers)
}

fn name_of((inode, user, bytes): (u64, u32, u64)) -> String {
    format!("left.{inode}.{user}.{bytes}")
}

/// Whether it is the name of one.
pub(crate) fn is_one(name: &str) -> bool {
    numbers(name).is_some()
}

impl Left {
    fn of_name(dir: &OwnedFd, name: &str) -> Result<Option<Self>, OsError> {
        let Some((_, user, bytes)) = numbers(name) else { return Ok(None) };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(dir, name, flags, Mode::empty())?;
        Ok(Some(Self { file, user, bytes, name: Some(name.to_owned()), looks: 0 }))
    }

    /// Gets the name that says what it is.
    fn rename(&mut self, dir: &OwnedFd, old: &str) -> Result<(), OsError> {
        let inode = rustix::fs::fstat(&self.file)?.st_ino;
        let name = name_of((inode, self.user, self.bytes));
        rustix::fs::renameat(dir, old, dir, &name)?;
        self.name = Some(name);
        Ok(())
    }

    /// Has no name any more.
    fn unlink(&mut self, dir: &OwnedFd) -> Result<(), OsError> {
        match self.name.take().map(|name| rustix::fs::unlinkat(dir, name, AtFlags::empty())) {
            // Somebody has removed it by hand.
            None | Some(Ok(()) | Err(OsError::NOENT)) => Ok(()),
            Some(Err(e)) => Err(e),
        }
    }

    /// Looks once. `false`: nobody has it, and it is gone.
    fn look(&mut self, dir: &OwnedFd) -> Result<bool, OsError> {
        if !is_as_it_was(&self.file, self.bytes)? {
            let known = std::mem::take(&mut self.bytes) == 0;
            rustix::fs::ftruncate(&self.file, 0)?;
            if let Some(name) = self.name.clone().filter(|_| !known) {
                // Under the old one the next process finds out anew.
                let _ = self.rename(dir, &name);
            }
        }
        self.looks = (self.looks + 1) % ASK;
        if self.looks != 0 || is_had(&self.file) {
            return Ok(true);
        }
        self.unlink(dir)?;
        Ok(false)
    }
}

impl LeftLogs {
    fn known(&mut self, dir: &OwnedFd) -> Result<&mut Known, OsError> {
        if self.0.is_none() {
            let mut all = Vec::new();
            for entry in rustix::fs::Dir::read_from(dir.as_fd())? {
                if let Ok(name) = entry?.file_name().to_str()
                    && let Some(left) = Left::of_name(dir, name)?
                {
                    all.push(left);
                }
            }
            self.0 = Some(Known { all, tells: tells(dir) });
        }
        Ok(self.0.get_or_insert_with(|| Known { all: Vec::new(), tells: true }))
    }

    /// The file of that name goes, and is looked after if somebody has it: then the answer is `true`. `bytes`: so long it is
    /// to be.
    pub(crate) fn leave(
        &mut self,
        dir: &OwnedFd,
        name: &str,
        (file, user, bytes): (OwnedFd, u32, u64),
    ) -> Result<bool, OsError> {
        let known = self.known(dir)?;
        let mut left = Left { file, user, bytes, name: Some(name.to_owned()), looks: 0 };
        let stays = known.tells && is_had(&left.file);
        if !stays || left.rename(dir, name).is_err() {
            // (Who filled the file system must not keep it in its place by that.)
            left.unlink(dir)?;
        }
        if stays {
            left.look(dir)?;
            known.all.push(left);
        }
        Ok(stays)
    }

    /// Looks at all: how many each user still has.
    pub(crate) fn look(&mut self, dir: &OwnedFd) -> Result<BTreeMap<u32, usize>, OsError> {
        let all = &mut self.known(dir)?.all;
        let (mut users, mut failed) = (BTreeMap::new(), None);
        all.retain_mut(|left| {
            let stays = left.look(dir);
            stays.map_err(|e| failed = Some(e)).unwrap_or(true)
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
        self.0.iter().flat_map(|known| &known.all).map(missing).sum()
    }
}
