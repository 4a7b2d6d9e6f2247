//! Files with a secret, which nobody else may read.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What such a file holds: `most` bytes, or one more, by which the caller sees that it is too long.
///
/// # Errors
/// In words that begin with its path: it cannot be read, or others can read it.
pub fn read(path: &Path, most: usize) -> Result<Vec<u8>, String> {
    let wrong = |e: std::io::Error| format!("{}: {e}", path.display());
    let file = File::open(path).map_err(wrong)?;
    let mode = file.metadata().map_err(wrong)?.mode() & 0o777;
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
    }
}
