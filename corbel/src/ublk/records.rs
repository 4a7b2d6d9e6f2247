//! What devices are made of: one file for each, which its server has locked as long as it lives. They are in memory, as the devices
//! are: both are gone after a boot. A record is whole or not there: it is put in the place of the one before.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
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
    #[serde(default)]
    read_ahead: Option<u64>,
    #[serde(default)]
    no_merge: bool,
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
        let SourceArgs { size: _, read_only, cache, write_back, read_ahead, no_merge } = *how;
        Self { source, socket, identity, mark, read_only, cache, write_back, read_ahead, no_merge }
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
        let Self { read_only, cache, write_back, read_ahead, no_merge, .. } = *self;
        SourceArgs { size: None, read_only, cache, write_back, read_ahead, no_merge }
    }
}

/// All of them.
#[derive(Debug)]
pub struct Records(PathBuf);

/// Others wait, or are refused, as long as this is held.
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

    /// One at a time changes which records there are. It takes no longer than that.
    fn turn(&self) -> Result<Turn> {
        let path = self.0.join("lock");
        self.lock(&path, FlockOperation::LockExclusive)?
            .ok_or_else(|| Failure::failed(format!("{} is locked", path.display()), "try again"))
    }

    /// One at a time serves a source, or begins to: the others are refused by `taken`. However long it takes, nobody else waits for it.
    pub fn turn_of(&self, identity: &str, taken: impl FnOnce() -> Failure) -> Result<Turn> {
        let name = format!("source-{:08x}.lock", base::crc32c(0, identity.as_bytes()));
        let turn = self.lock(&self.0.join(name), FlockOperation::NonBlockingLockExclusive)?;
        turn.ok_or_else(taken)
    }

    fn lock(&self, path: &Path, how: FlockOperation) -> Result<Option<Turn>> {
        let mut options = File::options();
        let file = options.create(true).truncate(false).write(true).open(path);
        let file = file.context(path.display())?;
        match flock(&file, how) {
            Ok(()) => Ok(Some(Turn { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(Failure::io(path.display(), &error.into())),
        }
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

    /// Puts one in its place, locked: of a device that is made, or taken over by who has locked the record before. What was there of a
    /// device with that number, which is gone, is forgotten.
    pub fn put(&self, id: u32, made: &Made) -> Result<Held> {
        let _turn = self.turn()?;
        let (path, new) = (self.path(id), self.0.join(format!("{id}.new")));
        let text = serde_json::to_string(made).map_err(std::io::Error::from);
        let text = text.context(path.display())?;
        let mut options = File::options();
        let file = options.create(true).truncate(true).read(true).write(true).open(&new);
        let mut file = file.context(new.display())?;
        file.write_all(text.as_bytes()).context(new.display())?;
        let held = Held { id, file, path, made: made.clone() };
        let held = held.take(|| Failure::failed("a record is locked", "try again"))?;
        std::fs::rename(&new, &held.path).context(held.path.display())?;
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

    /// Forgets it: the device is gone. (Another one may have its number by now, and a record of its own.)
    pub fn remove(self) {
        let records = self.path.parent().map(|dir| Records(dir.to_owned()));
        let _turn = records.map(|records| records.turn());
        let file = |of: &std::fs::Metadata| (of.dev(), of.ino());
        let own = self.file.metadata().map(|own| file(&own)).ok();
        if own.is_some() && own == std::fs::metadata(&self.path).map(|now| file(&now)).ok() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_memory_alone_does_not_last() {
        let how = |write_back| SourceArgs {
            size: None,
            read_only: false,
            cache: Some(1),
            write_back,
            read_ahead: None,
            no_merge: false,
        };
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
        let how = SourceArgs {
            size: Some(1),
            read_only: true,
            cache: Some(512),
            write_back: false,
            read_ahead: Some(0),
            no_merge: true,
        };
        let made = Made::new("file:/a".into(), None, Some("file:/a".into()), 77, &how);
        let held = records.put(3, &made).unwrap();
        let taken = || Failure::failed("taken", "");
        let again = records.get(3).unwrap().unwrap();
        assert_eq!((again.made(), again.id()), (&made, 3));
        assert!(
            again.made().lasts()
                && again.made().how().read_only
                && again.made().how().size.is_none()
                && again.made().how().read_ahead == Some(0)
                && again.made().how().no_merge
        );
        // As one that an older program has left.
        let older = serde_json::json!({"source": "file:/a", "socket": null, "identity": null, "mark": 1, "read_only": false,
            "cache": 5, "write_back": false});
        let older: Made = serde_json::from_value(older).unwrap();
        assert!(older.how().read_ahead.is_none() && !older.how().no_merge);
        assert_eq!(again.take(taken).unwrap_err().message, "taken");
        drop(held);
        let again = records.all().unwrap().remove(0).take(taken).unwrap();
        std::fs::write(dir.join("4.json"), "{torn").unwrap();
        assert_eq!(records.all().unwrap().len(), 1);
        // Another device of that number: whoever had the one before takes nothing away.
        let other = made.clone().marked(78);
        let next = records.put(3, &other).unwrap();
        again.remove();
        assert_eq!(records.get(3).unwrap().unwrap().made(), &other);
        next.remove();
        assert!(records.all().unwrap().is_empty() && records.get(3).unwrap().is_none());
        // One at a time has a source.
        let first = records.turn_of("file:/a", taken).unwrap();
        assert_eq!(records.turn_of("file:/a", taken).unwrap_err().message, "taken");
        records.turn_of("file:/b", taken).unwrap();
        drop(first);
        records.turn_of("file:/a", taken).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
