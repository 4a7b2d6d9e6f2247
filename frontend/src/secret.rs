//! Files with a secret, which nobody else may read.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// What such a file holds: `most` bytes, or one more, by which the caller sees that it is too long.
///
/// # Errors
/// In words that begin with its path: it cannot be read, others can read it, it is somebody else's (who may change its mode
/// whenever he likes), or no file.
pub fn read(path: &Path, most: usize) -> Result<Vec<u8>, String> {
    let wrong = |e: std::io::Error| format!("{}: {e}", path.display());
    // A FIFO would keep who opens it until somebody writes.
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path).map_err(wrong)?;
    let found = file.metadata().map_err(wrong)?;
    if !found.is_file() {
        return Err(format!("{}: is no file", path.display()));
    }
    let (own, owner) = (rustix::process::geteuid().as_raw(), found.uid());
    if owner != own && owner != 0 {
        return Err(format!(
            "{}: is user {owner}'s, who can read it: chown {own}, and think about a new one",
            path.display()
        ));
    }
    let mode = found.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "{}: has mode {mode:03o}, so that others can read the secret: chmod 600, and think about a new one",
            path.display()
        ));
    }
    let mut secret = Vec::new();
    file.take(most as u64 + 1).read_to_end(&mut secret).map_err(wrong)?;
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_others_can_read_is_no_secret() {
        let path = std::env::temp_dir().join(format!("corbel-secret-{}", std::process::id()));
        std::fs::write(&path, [7; 40]).unwrap();
        for (mode, good) in [
            (0o600, true),
            (0o400, true),
            (0o640, false),
            (0o604, false),
            (0o644, false),
            (0o620, false),
        ] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            match read(&path, 64) {
                Ok(secret) => assert!(good && secret == [7; 40], "{mode:o}"),
                Err(text) => assert!(!good && text.contains(&format!("{mode:03o}")), "{text}"),
            }
        }
        // One that never ends is read to where it is too long.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(read(&path, 20).unwrap().len(), 21);
        std::fs::remove_file(&path).unwrap();
        assert!(read(&path, 20).unwrap_err().contains("corbel-secret"));
        // Nobody writes to it.
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(read(&path, 20).unwrap_err().contains("is no file"));
        std::fs::remove_file(&path).unwrap();
        if rustix::process::geteuid().is_root() {
            std::fs::write(&path, [7; 40]).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            assert!(read(&path, 64).unwrap_err().contains("12345"));
            std::fs::remove_file(&path).unwrap();
        }
    }
}
