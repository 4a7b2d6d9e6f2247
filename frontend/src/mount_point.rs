//! Putting a FUSE file system into the tree and taking it out: by system call as root, by
//! `fusermount3` otherwise.

use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use rustix::io::{Errno, FdFlags};
use rustix::mount::UnmountFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::mount_options::MountOptions;

/// Dead mounts found on top of each other before we give up.
const DEAD_MAX: u32 = 16;

/// Why something could not be mounted or unmounted, with what to do about it.
#[derive(Debug)]
pub struct MountError {
    text: String,
}

impl MountError {
    pub(crate) fn new(text: String) -> Self {
        Self { text }
    }

    pub(crate) fn point(dir: &Path, error: &std::io::Error) -> Self {
        Self::new(format!("mount point {}: {error}", dir.display()))
    }
}

impl std::fmt::Display for MountError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for MountError {}

impl From<Errno> for MountError {
    fn from(error: Errno) -> Self {
        Self::new(error.to_string())
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Takes away what a killed server left on `dir`: "transport endpoint is not connected".
pub(crate) fn clear_dead(dir: &Path) -> Result<(), MountError> {
    for _ in 0..DEAD_MAX {
        match rustix::fs::stat(dir) {
            // With io_uring it is ECANCELED for a moment, until the kernel has cleared the rings.
            Err(Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED) => {
                log::warn!("{}: taking away the mount of a server that died", dir.display());
                detach(dir)?;
            }
            Err(error) => return Err(MountError::point(dir, &error.into())),
            Ok(_) => return Ok(()),
        }
    }
    Err(MountError::new(format!(
        "{}: too many dead mounts on top of each other; run `umount -l` on it",
        dir.display()
    )))
}

/// Mounts on `dir`, and returns the device to serve.
pub(crate) fn mount(dir: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    if is_root() { mount_direct(dir, options) } else { mount_helper(dir, options) }
}

fn mount_direct(dir: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let device: OwnedFd = File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .map_err(|e| {
            MountError::new(format!("/dev/fuse: {e}; load the kernel module: modprobe fuse"))
        })?
        .into();
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={}",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if options.default_permissions {
        data.push_str(",default_permissions");
    }
    if options.allow_other {
        data.push_str(",allow_other");
    }
    let data = std::ffi::CString::new(data).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(&*options.source, dir, "fuse.corbel", options.flags, data.as_c_str())
        .map_err(|e| MountError::new(format!("cannot mount on {}: {e}", dir.display())))?;
    Ok(device)
}

/// Attempts to remount while files are being given back.
const REMOUNT_TRIES: u32 = 50;
/// Between two of them.
const REMOUNT_PAUSE: std::time::Duration = std::time::Duration::from_millis(10);

/// Changes the kernel flags of a mount that is there (`mount -o remount,ro`).
///
/// # Errors
/// When the kernel refuses: somebody else than root asks, nothing is mounted there, or files are open
/// for writing that shall become read-only.
pub fn remount(dir: &Path, options: &MountOptions) -> Result<(), MountError> {
    let remount = || rustix::mount::mount_remount(dir, options.flags, c"");
    let mut result = remount();
    // The kernel gives closed files back a moment later, and counts those that are removed until then.
    for _ in 0..REMOUNT_TRIES {
        if result != Err(Errno::BUSY) {
            break;
        }
        std::thread::sleep(REMOUNT_PAUSE);
        result = remount();
    }
    result.map_err(|error| {
        let remedy = match error {
            Errno::PERM => "; only root may do that",
            Errno::INVAL => "; nothing is mounted there",
            Errno::BUSY => "; files are open for writing",
            _ => "",
        };
        MountError::new(format!("cannot remount {}: {error}{remedy}", dir.display()))
    })
}

/// fusermount3 is set-uid root: it mounts for us and passes the device through a socket.
fn mount_helper(dir: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let mut words = vec!["subtype=corbel".to_owned()];
    words.push(format!("fsname={}", options.source.replace([',', '\\'], "_")));
    if options.default_permissions {
        words.push("default_permissions".into());
    }
    if options.allow_other {
        words.push("allow_other".into());
    }
    words.extend(options.flag_words().map(str::to_owned));
    let (ours, theirs) =
        UnixStream::pair().map_err(|e| MountError::new(format!("cannot make a socket: {e}")))?;
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?; // the child inherits it
    let status = Command::new("fusermount3")
        .arg("-o")
        .arg(words.join(","))
        .arg("--")
        .arg(dir)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .status()
        .map_err(|e| {
            MountError::new(format!("cannot run fusermount3: {e}; install fuse3, or mount as root"))
        })?;
    drop(theirs);
    if !status.success() {
        return Err(MountError::new(format!("fusermount3 refused to mount on {}", dir.display())));
    }
    receive_device(&ours)
}

fn receive_device(socket: &UnixStream) -> Result<OwnedFd, MountError> {
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    ancillary
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })
        .ok_or_else(|| MountError::new("fusermount3 sent no device".into()))
}

/// Unmounts; what is still in use goes away with its last user.
pub(crate) fn unmount(dir: &Path) -> Result<(), MountError> {
    if !is_root() {
        return helper_unmount(dir, &["-u"]).or_else(|_| detach(dir));
    }
    match rustix::mount::unmount(dir, UnmountFlags::NOFOLLOW) {
        Err(Errno::BUSY) => {
            log::warn!("{} is in use: it goes away when its last user does", dir.display());
            detach(dir)
        }
        // Somebody else was quicker.
        Err(Errno::INVAL) => Ok(()),
        other => other.map_err(|e| MountError::new(format!("umount {}: {e}", dir.display()))),
    }
}

fn detach(dir: &Path) -> Result<(), MountError> {
    if is_root() {
        let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        return rustix::mount::unmount(dir, flags)
            .map_err(|e| MountError::new(format!("umount {}: {e}", dir.display())));
    }
    helper_unmount(dir, &["-u", "-z"])
}

fn helper_unmount(dir: &Path, how: &[&str]) -> Result<(), MountError> {
    let output = Command::new("fusermount3").args(how).arg("--").arg(dir).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            Err(MountError::new(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
        }
        Err(error) => Err(MountError::new(format!("cannot run fusermount3: {error}"))),
    }
}
