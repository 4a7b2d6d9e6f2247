//! What devices are made of: one file for each, which its server has locked as long as it lives. They are in memory, as the devices
//! are: both are gone after a boot.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::failure::{Context, Failure, Result};
use crate::source::SourceArgs;

/// Where they are: root's alone, since what is written there is opened by root. (`/run/corbel` is the services' user's, and goes with them.)
const DIR: &str = "/run/corbel-ublk";

/// What a device is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// As it was written on the command line.
    pub source: String,
    /// Where the node of the volume is, if it is a file of one.
    pub socket: Option<PathBuf>,
    /// What makes it the same as another; none: nothing does.
    pub identity: Option<String>,
    /// The number that the kernel keeps with the device.
    pub mark: u64,
    read_only: bool,
    cache: Option<u64>,
    write_back: bool,
}

impl Made {
    /// Of a source, opened like that.
    pub fn new(
        source: String,
        socket: Option<PathBuf>,
        identity: Option<String>,
        mark: u64,
        how: &SourceArgs,
    ) -> Self {
        let (read_only, cache, write_back) = (how.read_only, how.cache, how.write_back);
        Self { source, socket, identity, mark, read_only, cache, write_back }
    }

    /// Whether a device of it may outlive its server. Not if something that was answered would be gone with that: whoever uses the disk
    /// goes on, and would never know.
    pub fn lasts(&self) -> bool {
        self.identity.is_some() && !self.write_back
    }

    /// The same under another mark.
    pub fn marked(self, mark: u64) -> Self {
        Self { mark, ..self }
    }

    /// How to open it again.
    pub fn how(&self) -> SourceArgs {
        let (read_only, cache, write_back) = (self.read_only, self.cache, self.write_back);
        SourceArgs { size: None, read_only, cache, write_back }
    }
}

/// All of them.
#[derive(Debug)]
pub struct Records(PathBuf);

/// One at a time makes or takes over a device: as long as this is held.
#[derive(Debug)]
pub struct Turn {
    /// Locked.
    _file: File,
}

/// A record.
#[derive(Debug)]
pub struct Held {
    id: u32,
    path: PathBuf,
    file: File,
    made: Made,
}

impl Records {
    /// Those of this machine.
    pub fn open() -> Result<Self> {
        Self::at(Path::new(DIR))
    }

    fn at(dir: &Path) -> Result<Self> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.context(dir.display())?;
        Ok(Self(dir.to_owned()))
    }

    /// Waits for one's turn.
    pub fn turn(&self) -> Result<Turn> {
        let path = self.0.join("lock");
        let mut options = File::options();
        let file = options.create(true).truncate(false).write(true).open(&path);
        let file = file.context(path.display())?;
        let locked = flock(&file, FlockOperation::LockExclusive).map_err(std::io::Error::from);
        locked.context(path.display())?;
        Ok(Turn { _file: file })
    }

    fn path(&self, id: u32) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// The record of a device, if there is one.
    pub fn get(&self, id: u32) -> Result<Option<Held>> {
        let path = self.path(id);
        let mut file = match File::options().read(true).write(true).open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            result => result.context(path.display())?,
        };
        let mut text = String::new();
        file.read_to_string(&mut text).context(path.display())?;
        // One that is torn says nothing.
        let made = serde_json::from_str(&text).ok();
        Ok(made.map(|made| Held { id, path, file, made }))
    }

    /// All that there are.
    pub fn all(&self) -> Result<Vec<Held>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&self.0).context(self.0.display())? {
            let name = entry.context(self.0.display())?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json")?.parse().ok());
            if let Some(id) = id {
                all.extend(self.get(id)?);
            }
        }
        Ok(all)
    }

    /// Adds one, locked. What was there of a device with that number, which is gone, is forgotten.
    pub fn add(&self, id: u32, made: &Made) -> Result<Held> {
        let path = self.path(id);
        let _ = std::fs::remove_file(&path);
        let mut options = File::options();
        let file = options.create_new(true).read(true).write(true).open(&path);
        let held = Held { id, file: file.context(path.display())?, path, made: made.clone() };
        let held = held.take(|| Failure::failed("a record is locked", "try again"))?;
        held.write(made)?;
        Ok(held)
    }
}

impl Held {
    /// The device's number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// What it is made of.
    pub fn made(&self) -> &Made {
        &self.made
    }

    /// Locks it until this process ends, or fails with what `taken` gives: its server lives.
    pub fn take(self, taken: impl FnOnce() -> Failure) -> Result<Self> {
        match flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(self),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(taken()),
            Err(error) => Err(Failure::io(self.path.display(), &error.into())),
        }
    }

    /// Writes what it is made of now.
    pub fn write(&self, made: &Made) -> Result<()> {
        let text = serde_json::to_string(made).map_err(std::io::Error::from);
        let text = text.context(self.path.display())?;
        let mut file = &self.file;
        file.rewind().context(self.path.display())?;
        file.set_len(0).context(self.path.display())?;
        file.write_all(text.as_bytes()).context(self.path.display())
    }

    /// Forgets it: the device is gone.
    pub fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_memory_alone_does_not_last() {
        let how =
            |write_back| SourceArgs { size: None, read_only: false, cache: Some(1), write_back };
        let made = |identity: Option<&str>, write_back| {
            Made::new("a".into(), None, identity.map(str::to_owned), 1, &how(write_back)).lasts()
        };
        assert!(made(Some("a"), false) && !made(Some("a"), true) && !made(None, false));
    }

    #[test]
    fn records_are_found_again_and_locked() {
        let dir = std::env::temp_dir().join(format!("corbel-ublk-records-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let records = Records::at(&dir).unwrap();
        let how =
            SourceArgs { size: Some(1), read_only: true, cache: Some(512), write_back: false };
        let made = Made::new("file:/a".into(), None, Some("file:/a".into()), 77, &how);
        let held = records.add(3, &made).unwrap();
        let taken = || Failure::failed("taken", "");
        let again = records.get(3).unwrap().unwrap();
        assert_eq!((again.made(), again.id()), (&made, 3));
        assert!(
            again.made().lasts()
                && again.made().how().read_only
                && again.made().how().size.is_none()
        );
        assert_eq!(again.take(taken).unwrap_err().message, "taken");
        drop(held);
        let again = records.all().unwrap().remove(0).take(taken).unwrap();
        std::fs::write(dir.join("4.json"), "{torn").unwrap();
        assert_eq!(records.all().unwrap().len(), 1);
        again.remove();
        assert!(records.all().unwrap().is_empty() && records.get(3).unwrap().is_none());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
