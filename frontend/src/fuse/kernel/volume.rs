//! The file system: what the client of one node shows of a volume that other nodes change, under leases. What a kernel
//! may keep is decided as in LibFS (`client/src/libfs/kernel.rs`).

use std::sync::Arc;

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caching, Caller, DirEntry, FileSystem, Handle, LEARNT_ELSEWHERE, NewNode, Rename, Result,
    S_IFDIR, S_IFREG, SetAttr, SetTime, StatFs, Time, Whence, Written, XattrMode,
};

use super::fiber::{Pause, pause};
use super::{CELL, CELLS, DIR, NAMES, Shared, State};

/// Attributes are news for so long, names are told for so long and counted for longer, of directories that have not
/// changed for so long: as in LibFS.
const NEWS_MS: u64 = 100;
const NAMES_MS: u64 = 250;
const TAKEN_IN_MS: u64 = 120;
const QUIET_MS: u64 = 2000;

/// See the module.
pub(in crate::fuse) struct Volume(pub(super) Arc<Shared>);

fn number_of(name: &[u8]) -> Result<usize> {
    NAMES.iter().position(|known| *known == name).ok_or(Errno::NOENT)
}

fn time(sec: i64) -> Time {
    Time { sec, nsec: 0 }
}

impl State {
    /// Attributes as they are.
    fn attr_now(&self, ino: u64) -> Result<Attr> {
        let truth = self.truth();
        let (mode, size, mtime, ctime) = match truth.files.get(&ino) {
            Some(file) => (S_IFREG | file.mode, file.size * CELL, file.mtime, file.ctime),
            None if ino == DIR => (S_IFDIR | 0o755, 0, truth.dir_time, truth.dir_time),
            None => return Err(Errno::NOENT),
        };
        Ok(Attr {
            ino: InodeId(ino),
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: size as u64,
            blocks: 0,
            atime: time(0),
            mtime: time(mtime),
            ctime: time(ctime),
            btime: time(0),
            learnt: self.leases.get(&ino).map_or(0, |lease| lease.learnt),
        })
    }

    /// The lease is held, and what others did is known.
    fn hold(&mut self, ino: u64) {
        if !self.lease(ino).held {
            self.learnt += 1;
            let learnt = self.learnt;
            let lease = self.lease(ino);
            (lease.held, lease.learnt) = (true, learnt);
        }
    }

    fn attr(&mut self, ino: u64) -> Result<Attr> {
        // The service has said what is so at a moment, and the lease went to another.
        if !self.lease(ino).held && self.random.chance(1, 4) {
            return Ok(Attr { learnt: LEARNT_ELSEWHERE, ..self.attr_now(ino)? });
        }
        self.hold(ino);
        self.attr_now(ino)
    }

    fn handle(&self, handle: Handle) -> Result<u64> {
        self.handles.get(handle.0 as usize).copied().ok_or(Errno::BADF)
    }

    fn may_keep(&mut self, attr: &Attr, is_new: bool) -> bool {
        let (ms, ino) = (self.ms, attr.ino.0);
        let now = self.attr_now(ino);
        let lease = self.lease(ino);
        if lease.told.0 != attr.ctime.sec {
            lease.told = (attr.ctime.sec, ms);
        }
        let is_news = ms - lease.told.1 < NEWS_MS;
        if is_news && !is_new || lease.stale_until > ms || lease.recalled || !lease.held {
            return false;
        }
        let same = now.is_ok_and(|now| Attr { learnt: attr.learnt, ..now } == *attr);
        lease.kept |= same;
        same
    }

    fn renamed(&mut self, then: impl FnOnce(&mut super::Truth, i64)) -> usize {
        self.dir_changed = self.ms;
        self.change(|truth, now| {
            truth.dir_time = now;
            then(truth, now);
        })
    }
}

impl Volume {
    /// Does something at one moment, which others may come before and after.
    fn at_once<T>(&self, then: impl FnOnce(&mut State) -> T) -> T {
        pause(Pause::Point);
        let got = then(&mut self.0.lock());
        pause(Pause::Point);
        got
    }
}

impl FileSystem for Volume {
    fn lookup(&self, _: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        self.at_once(|state| {
            if parent == InodeId::ROOT {
                return state.attr(DIR);
            }
            state.hold(DIR);
            let ino = state.truth().names[number_of(name)?].ok_or(Errno::NOENT)?;
            state.attr(ino)
        })
    }

    fn getattr(&self, _: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        self.at_once(|state| state.attr(ino.0))
    }

    fn setattr(&self, _: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
        self.at_once(|state| {
            state.hold(ino.0);
            state.change(|truth, now| {
                if let Some(file) = truth.files.get_mut(&ino.0) {
                    file.ctime = now;
                    file.mode = set.mode.unwrap_or(file.mode);
                    if let Some(SetTime::At(at)) = set.mtime {
                        file.mtime = at.sec;
                    }
                }
            });
            state.attr_now(ino.0)
        })
    }

    fn open(&self, _: &Caller<'_>, ino: InodeId, _: u32) -> Result<Handle> {
        self.at_once(|state| {
            state.attr_now(ino.0)?;
            state.handles.push(ino.0);
            Ok(Handle(state.handles.len() as u64 - 1))
        })
    }

    fn create(
        &self,
        _: &Caller<'_>,
        _: InodeId,
        name: &[u8],
        mode: u32,
        _: u32,
    ) -> Result<(Attr, Handle)> {
        self.at_once(|state| {
            let at = number_of(name)?;
            state.hold(DIR);
            let ino = match state.truth().names[at] {
                Some(ino) => ino,
                None => {
                    state.made += 1;
                    let ino = 100 + state.made;
                    state.renamed(|truth, now| {
                        let file =
                            super::File { mode, mtime: now, ctime: now, ..Default::default() };
                        truth.files.insert(ino, file);
                        truth.names[at] = Some(ino);
                    });
                    *state.lease(ino) = super::Lease { held: true, ..Default::default() };
                    ino
                }
            };
            state.hold(ino);
            state.handles.push(ino);
            Ok((state.attr_now(ino)?, Handle(state.handles.len() as u64 - 1)))
        })
    }

    fn unlink(&self, _: &Caller<'_>, _: InodeId, name: &[u8]) -> Result<()> {
        self.at_once(|state| {
            let at = number_of(name)?;
            state.hold(DIR);
            state.truth().names[at].ok_or(Errno::NOENT)?;
            state.renamed(|truth, _| truth.names[at] = None);
            Ok(())
        })
    }

    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.at_once(|state| {
            let ino = state.handle(handle)?;
            let file = state.truth().files.get(&ino).ok_or(Errno::STALE)?;
            let bytes: Vec<u8> =
                file.cells[..file.size].iter().flat_map(|cell| cell.to_le_bytes()).collect();
            let from = bytes.get(offset as usize..).unwrap_or(&[]);
            let len = from.len().min(buf.len());
            buf[..len].copy_from_slice(&from[..len]);
            Ok(len)
        })
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        self.at_once(|state| {
            let ino = state.handle(handle)?;
            state.hold(ino);
            let end = state.truth().files.get(&ino).map_or(0, |file| file.size * CELL) as u64;
            // Files end there for good.
            let last = ((CELLS - 1) * CELL) as u64;
            let offset = if append { end.min(last) } else { offset };
            let cell = |bytes: &[u8]| bytes.try_into().map(u32::from_le_bytes).unwrap_or(0);
            let from = offset as usize / CELL;
            state.change(|truth, now| {
                if let Some(file) = truth.files.get_mut(&ino) {
                    for (at, bytes) in data.chunks(CELL).enumerate() {
                        file.cells[from + at] = cell(bytes);
                    }
                    file.size = file.size.max(from + data.len() / CELL).min(CELLS);
                    (file.mtime, file.ctime) = (now, now);
                }
            });
            Ok(Written { len: data.len(), offset })
        })
    }

    fn fgetattr(&self, handle: Handle) -> Result<Attr> {
        self.at_once(|state| {
            let ino = state.handle(handle)?;
            state.attr(ino)
        })
    }

    fn release(&self, _: Handle) {}

    fn readdir(
        &self,
        _: &Caller<'_>,
        _: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let names = self.at_once(|state| {
            state.hold(DIR);
            state.truth().names
        });
        for (at, name) in NAMES.iter().enumerate().skip(cookie as usize) {
            if let Some(ino) = names[at] {
                let (ino, next) = (InodeId(ino), at as u64 + 1);
                if !each(&DirEntry { ino, kind: S_IFREG, next, name }) {
                    break;
                }
            }
        }
        Ok(())
    }

    fn caching(&self) -> Caching {
        Caching::Attributes
    }

    fn may_cache_attr(&self, attr: &Attr) -> bool {
        self.at_once(|state| state.may_keep(attr, false))
    }

    fn may_cache_new_attr(&self, attr: &Attr) -> bool {
        self.at_once(|state| state.may_keep(attr, true))
    }

    fn name_cache_ms(&self, _: InodeId, name: &[u8], leads_to: Option<InodeId>) -> Option<u32> {
        Some(self.at_once(|state| {
            let Ok(at) = number_of(name) else { return 0 };
            let as_said = state.truth().names[at] == leads_to.map(|ino| ino.0);
            let quiet = state.ms - state.dir_changed >= QUIET_MS;
            let ms = state.ms;
            let lease = state.lease(DIR);
            if !as_said || !quiet || !lease.held || lease.recalled {
                return 0;
            }
            lease.until = lease.until.max(ms + NAMES_MS + TAKEN_IN_MS);
            lease.kept = true;
            NAMES_MS as u32
        }))
    }

    fn await_names(&self, dir: InodeId) {
        loop {
            let stale = {
                let mut state = self.0.lock();
                let ms = state.ms;
                state.lease(dir.0).stale_until > ms
            };
            if !stale {
                return;
            }
            pause(Pause::Sleeps);
        }
    }

    fn has_cached(&self, ino: InodeId) -> bool {
        self.0.lock().lease(ino.0).kept
    }

    fn readlink(&self, _: &Caller<'_>, _: InodeId) -> Result<Vec<u8>> {
        Err(Errno::INVAL)
    }

    fn mknod(&self, _: &Caller<'_>, _: InodeId, _: &[u8], _: &NewNode<'_>) -> Result<Attr> {
        Err(Errno::OPNOTSUPP)
    }

    fn rmdir(&self, _: &Caller<'_>, _: InodeId, _: &[u8]) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }

    fn rename(&self, _: &Caller<'_>, _: &Rename<'_>) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }

    fn link(&self, _: &Caller<'_>, _: InodeId, _: InodeId, _: &[u8]) -> Result<Attr> {
        Err(Errno::OPNOTSUPP)
    }

    fn fallocate(&self, _: Handle, _: u32, _: u64, _: u64) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }

    fn lseek(&self, _: Handle, _: u64, _: Whence) -> Result<u64> {
        Err(Errno::OPNOTSUPP)
    }

    fn fsync(&self, _: Handle, _: bool) -> Result<()> {
        Ok(())
    }

    fn fsync_inode(&self, _: &Caller<'_>, _: InodeId) -> Result<()> {
        Ok(())
    }

    fn statfs(&self) -> Result<StatFs> {
        Err(Errno::OPNOTSUPP)
    }

    fn getxattr(&self, _: &Caller<'_>, _: InodeId, _: &[u8]) -> Result<Vec<u8>> {
        Err(Errno::NODATA)
    }

    fn listxattr(&self, _: &Caller<'_>, _: InodeId) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn setxattr(&self, _: &Caller<'_>, _: InodeId, _: &[u8], _: &[u8], _: XattrMode) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }

    fn removexattr(&self, _: &Caller<'_>, _: InodeId, _: &[u8]) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }
}
