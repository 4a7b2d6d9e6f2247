//! A store in a directory: a directory for each image, a file for each name.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use base::Errno;

use super::ground::Lock;
use super::store::Store;

/// What a file is called before it is whole.
const UNFINISHED: &str = ".new-";
const LOCK: &str = ".lock";

/// The store.
#[derive(Debug)]
pub struct Dir {
    root: PathBuf,
    next: AtomicU64,
}

fn errno(error: &std::io::Error) -> Errno {
    error.raw_os_error().and_then(|n| u16::try_from(n).ok()).map_or(Errno::IO, Errno)
}

impl Dir {
    /// A store in an existing directory.
    pub fn open(root: &Path) -> std::io::Result<Self> {
        if !fs::metadata(root)?.is_dir() {
            return Err(std::io::ErrorKind::NotADirectory.into());
        }
        Ok(Self { root: root.to_owned(), next: AtomicU64::new(0) })
    }

    /// The directory of an image, made if it is not there. Never the root: a disk that is not mounted must not be mistaken
    /// for an empty store.
    fn make(&self, image: &str) -> std::io::Result<PathBuf> {
        let dir = self.root.join(image);
        match fs::create_dir(&dir) {
            Ok(()) => File::open(&self.root)?.sync_all()?,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        Ok(dir)
    }

    fn put_file(&self, name: &str, parts: &[&[u8]]) -> std::io::Result<()> {
        let path = self.root.join(name);
        let (image, _) = name.split_once('/').unwrap_or((name, ""));
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let unfinished = format!("{UNFINISHED}{}-{number}", std::process::id());
        let dir = self.root.join(image);
        let unfinished = dir.join(unfinished);
        let create = || File::options().write(true).create_new(true).open(&unfinished);
        let mut file = match create() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                self.make(image)?;
                create()?
            }
            file => file?,
        };
        let written = (|| {
            for part in parts {
                file.write_all(part)?;
            }
            file.sync_data()?;
            fs::rename(&unfinished, &path)?;
            File::open(&dir)?.sync_all()
        })();
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }
}

impl Store for Dir {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<(), Errno> {
        self.put_file(name, parts).map_err(|error| errno(&error))
    }

    fn get(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let file = File::open(self.root.join(name)).map_err(|error| errno(&error))?;
        let mut bytes = vec![0; len];
        let mut have = 0;
        while have < len {
            match file.read_at(&mut bytes[have..], offset + have as u64) {
                Ok(0) => break,
                Ok(n) => have += n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(errno(&error)),
            }
        }
        bytes.truncate(have);
        Ok(bytes)
    }

    fn list(&self, image: &str) -> Result<Vec<String>, Errno> {
        let entries = match fs::read_dir(self.root.join(image)) {
            // A root that is there and knows nothing of the image is empty; one that is not there is no store.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return fs::metadata(&self.root).map(|_| Vec::new()).map_err(|e| errno(&e));
            }
            entries => entries.map_err(|error| errno(&error))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(|error| errno(&error))?.file_name();
            if let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    fn remove(&self, name: &str) -> Result<(), Errno> {
        match fs::remove_file(self.root.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(errno(&error)),
            _ => Ok(()),
        }
    }

    fn lock(&self, image: &str) -> Result<Lock, Errno> {
        let dir = self.make(image).map_err(|error| errno(&error))?;
        let options = File::options().write(true).create(true).truncate(false).open(dir.join(LOCK));
        let file = options.map_err(|error| errno(&error))?;
        match file.try_lock() {
            Ok(()) => Ok(Box::new(file)),
            Err(TryLockError::WouldBlock) => Err(Errno::BUSY),
            Err(TryLockError::Error(error)) => Err(errno(&error)),
        }
    }
}
