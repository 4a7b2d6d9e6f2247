//! What a thread does next.

use client::fs::{
    Amount, Handle, LockKind, O_APPEND, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, SetAttr, SetTime, Time,
    XattrMode, falloc,
};

use super::call::{Call, Step};
use super::effects::{ACL, DEFAULT_ACL};
use super::host::Answer;
use super::*;
use crate::acl;
use crate::actor::{GUEST, Kind, quota};
use crate::model::Body;
use crate::rights::{OTHER, R, SHARED, X};

const NAMES: u64 = 5;
const DIRS: usize = 5;
const BLOCK: u64 = 4096;
const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;
/// Files that a thread has open at a time.
const OPEN_MAX: usize = 4;
/// Directories.
const OPEN_DIRS: usize = 2;

/// A directory, a name in it, and what that leads to.
struct Target {
    dir: u64,
    name: Vec<u8>,
    ino: Option<u64>,
}

impl World<'_> {
    /// A thread asks what to do: after a rest it is told.
    pub(super) fn next_call(&mut self, c: usize, t: usize) -> Result<Option<Answer>, String> {
        if self.process(c).is_some_and(|p| p.inherits.is_empty()) {
            self.start_others(c)?;
        }
        let left = self.thread(c, t).map_or(0, |thread| thread.ops);
        let next = self.process(c).and_then(|p| p.inherits.front());
        let has_inherited = matches!(next, Some(Call::Lock { .. }));
        let delay = if has_inherited {
            // Time enough for others who want it.
            self.between(0, 100 * MS)
        } else if left == 0 {
            if self.healed { 0 } else { 50 * MS }
        } else if self.random.chance(1, 2) {
            self.between(0, 10 * US)
        } else if self.healed {
            self.between(10 * US, MS)
        } else {
            self.between(10 * US, self.preset.pace)
        };
        if let Some(thread) = self.thread(c, t) {
            thread.idle = true;
        }
        self.go_on(c, t, delay, Answer::Go);
        Ok(None)
    }

    /// The rest is over.
    pub(super) fn choose_call(&mut self, c: usize, t: usize) -> Answer {
        if let Some(call) = self.process(c).and_then(|p| p.inherits.front().cloned()) {
            let (who, umask, paths) = (Who::of(self.actors[c].uid), 0, Vec::new());
            self.begin_call(c, t, call.clone(), (who, umask));
            return Answer::Call(Box::new(Task { call, who, umask, paths }));
        }
        let Some(thread) = self.thread(c, t) else { return Answer::End };
        let call = if thread.ops == 0 {
            match self.last_call(c, t) {
                Some(call) => call,
                None if self.healed => return Answer::End,
                // Until then it waits.
                None => Call::Statfs,
            }
        } else {
            thread.ops -= 1;
            self.draw_call(c, t)
        };
        let who = self.draw_caller(c);
        let umask = [0, 0o022, 0o027, 0o077][self.random.below(4) as usize];
        let umask = if self.preset.hostile { umask } else { 0 };
        let paths = if self.actors[c].uid == 0 { Vec::new() } else { self.paths_to(&call.named()) };
        self.begin_call(c, t, call.clone(), (who, umask));
        Answer::Call(Box::new(Task { call, who, umask, paths }))
    }

    /// On whose behalf a process does something: it is bound to a user, or does it for others, as a mount.
    fn draw_caller(&mut self, c: usize) -> Who {
        let uid = self.actors[c].uid;
        if uid != 0 || !self.preset.has_users() {
            return Who::of(uid);
        }
        Who::of([0, 0, GUEST, OTHER][self.random.below(4) as usize])
    }

    /// The names that lead to inodes, from the root.
    fn paths_to(&self, inos: &[u64]) -> Vec<Vec<Step>> {
        let mut paths: BTreeMap<u64, Vec<Step>> = BTreeMap::from([(1, Vec::new())]);
        let mut dirs = vec![1];
        while let Some(dir) = dirs.pop() {
            let Some(Body::Dir(names)) = self.model.current(dir).map(|s| &s.body) else { continue };
            for (name, ino) in names {
                if !paths.contains_key(ino) {
                    let mut path = paths.get(&dir).cloned().unwrap_or_default();
                    path.push((dir, name.clone(), *ino));
                    paths.insert(*ino, path);
                    dirs.push(*ino);
                }
            }
        }
        inos.iter().filter_map(|ino| paths.get(ino).cloned()).collect()
    }

    /// When there is nothing more to do, what is open is closed, and all synced, once everything is healed.
    fn last_call(&mut self, c: usize, t: usize) -> Option<Call> {
        if let Some(unlock) = self.draw_unlock(c, t, None) {
            return Some(unlock);
        }
        let process = self.process(c)?;
        let open = process.open.iter().find(|(_, open)| open.thread == t);
        if let Some((handle, open)) = open.map(|(h, o)| (*h, o.clone())) {
            process.open.remove(&handle);
            return Some(Call::Release { handle: Handle(handle), ino: open.ino });
        }
        if !self.healed {
            return None;
        }
        let thread = self.thread(c, t)?;
        (!std::mem::replace(&mut thread.synced, true)).then_some(Call::SyncAll)
    }

    fn begin_call(&mut self, c: usize, t: usize, call: Call, (who, umask): (Who, u32)) {
        let (since, at) = (self.model.now(), self.now);
        let Some(process) = self.process(c) else { return };
        let own: Vec<usize> = process.attached.iter().map(|a| a.session).collect();
        let all = process.attached.iter().map(|a| (a.session, a.last_counted())).collect();
        let again: BTreeSet<(usize, u64)> = process
            .attached
            .iter()
            .flat_map(|a| a.again.iter().map(|seq| (a.session, *seq)))
            .collect();
        let current = process.attached.last().filter(|a| !a.ended);
        let refused = current.map_or(0, |a| a.memory.peek(control::REFUSED_SEQ));
        let current = current.map(|a| a.session);
        let newest = match &call {
            Call::Fsync { ino, .. } | Call::FsyncInode { ino } => {
                // Also what others have done, if it is there.
                let is_there = |ino| self.model.current(ino).is_some_and(|state| !state.is_gone());
                let others = matches!(call, Call::Fsync { .. }) || *ino != 1 && is_there(*ino);
                let beside = self.lost_beside(c, &call);
                let counts = |by: (usize, u64)| match own.contains(&by.0) {
                    true => !again.contains(&by),
                    false => others && (self.model.is_alive(by.0) || beside.contains(&by.0)),
                };
                self.model.newest_of(*ino, counts)
            }
            Call::SyncAll => all,
            _ => Vec::new(),
        };
        self.trace(|| format!("thread {c}.{t} calls {} as {}", call.brief(), who.uid));
        self.begin_lock(c, t, &call);
        let handle = if let Call::Write { handle, .. } = call { handle.0 } else { u64::MAX };
        let open = self.process(c).and_then(|p| p.open.get(&handle));
        let appends = open.is_some_and(|open| open.flags & O_APPEND != 0);
        if let Some(thread) = self.thread(c, t) {
            let (wrote, entries, first) = (0, 0, None);
            let under_way = UnderWay {
                call,
                who,
                umask,
                since,
                at,
                wrote,
                entries,
                first,
                appends,
                newest,
                current,
                last_part: None,
                made: None,
                own: Vec::new(),
                joint: Vec::new(),
                refused,
            };
            thread.under_way = Some(under_way);
        }
    }

    fn draw_call(&mut self, c: usize, t: usize) -> Call {
        if self.random.chance(1, self.preset.syncs) {
            return self.draw_sync(c, t);
        }
        if self.random.chance(1, self.preset.closes)
            && let Some(call) = self.draw_close(c, t)
        {
            return call;
        }
        if self.preset.insists
            && self.random.chance(7, 8)
            && self.own_open(c, t, |open| open.flags & 3 == O_RDWR).is_some()
            && let Some(call) = self.draw_content(c, t, Kind::Write)
        {
            return call;
        }
        let favoured = self.preset.favour.len() as u64;
        for _ in 0..8 {
            let kind = match favoured {
                0 => None,
                _ if !self.preset.is_directed() && self.random.chance(1, 3) => None,
                n => Some(self.preset.favour[self.random.below(n) as usize]),
            };
            let drawn = match kind {
                Some(kind) => self.draw_kind_of_call(c, t, kind),
                None => self.draw_any(c, t),
            };
            if let Some(call) = drawn {
                return call;
            }
        }
        Call::Readdir { dir: 1 }
    }

    fn draw_sync(&mut self, c: usize, t: usize) -> Call {
        if self.preset.is_directed() && self.preset.joint {
            // (Of the root it is one of all.)
            return Call::FsyncInode { ino: self.draw_dir() };
        }
        match (self.random.below(4), self.own_open(c, t, |_| true)) {
            (0, _) => Call::SyncAll,
            (1, _) => Call::FsyncInode { ino: self.draw_dir() },
            (_, Some((handle, ino))) => Call::Fsync { handle, ino },
            (_, None) => Call::SyncAll,
        }
    }

    fn draw_any(&mut self, c: usize, t: usize) -> Option<Call> {
        if self.preset.quota && self.random.chance(1, 6) {
            return self.draw_quota(c, t);
        }
        let kind = match self.random.below(70) {
            0..=3 => Kind::Create,
            4 | 5 => Kind::Mkdir,
            6 => Kind::Symlink,
            7..=11 => Kind::Write,
            12 | 13 => Kind::Append,
            14 => Kind::Truncate,
            15 => Kind::Fallocate,
            16 => Kind::Punch,
            17 => Kind::Zero,
            18 | 19 => Kind::Clone,
            20 | 21 => Kind::Chmod,
            22 => Kind::Chown,
            23 => Kind::Utimes,
            24 => Kind::SetXattr,
            25 => Kind::RemoveXattr,
            26..=28 => Kind::Unlink,
            29 | 30 => Kind::Rename,
            31 => Kind::Exchange,
            32 => Kind::Link,
            33..=40 => Kind::Read,
            41 | 42 => Kind::Tmpfile,
            43 => Kind::Shift,
            44 => Kind::SetAcl,
            45 => Kind::SetDefault,
            46 => Kind::Project,
            47..=50 => Kind::List,
            51 => {
                let at = self.draw_target();
                return Some(Call::GetXattr { ino: at.ino?, name: self.draw_xattr() });
            }
            52 => return Some(Call::ListXattr { ino: self.draw_target().ino? }),
            53 => return Some(Call::Project { ino: self.draw_target().ino? }),
            54 if self.random.chance(1, 4) => return Some(Call::Statfs),
            54 => return Some(Call::Getattr { ino: self.draw_target().ino? }),
            55 => return Some(Call::Readlink { ino: self.draw_target().ino? }),
            56 => {
                let (handle, ino) = self.own_open(c, t, |_| true)?;
                let (offset, data) = (self.draw_offset(), self.random.chance(1, 2));
                return Some(Call::Seek { handle, ino, offset, data });
            }
            57 | 58 => {
                let (handle, ino) = self.own_open(c, t, |_| true)?;
                return Some(Call::Fgetattr { handle, ino });
            }
            59 => return self.draw_close(c, t),
            62..=65 => Kind::Lock,
            66 | 67 => Kind::OpenDir,
            _ => {
                let at = self.draw_target();
                return Some(Call::Lookup { dir: at.dir, name: at.name });
            }
        };
        self.draw_kind_of_call(c, t, kind)
    }

    /// Limits, and what is counted by them.
    fn draw_quota(&mut self, c: usize, t: usize) -> Option<Call> {
        match self.random.below(5) {
            0 => return self.draw_kind_of_call(c, t, Kind::Project),
            1 => return self.draw_kind_of_call(c, t, Kind::Chown),
            2 => return self.draw_kind_of_call(c, t, Kind::Create),
            _ => {}
        }
        self.draw_limits()
    }

    fn draw_limits(&mut self) -> Option<Call> {
        let dir = self.draw_dir();
        let user = [None, Some(GUEST), Some(OTHER)][self.random.below(3) as usize];
        let number = user.map_or(quota::of_directory(dir), quota::of_user_number);
        let (_, used) = self.count(number, None);
        let blocks = if self.random.chance(1, 4) { 1 + self.random.below(40) } else { 0 };
        let limit = match self.random.below(5) {
            0 => Amount::default(),
            _ => Amount { blocks, inodes: (used + self.random.below(4)).max(1) },
        };
        Some(Call::SetQuota { ino: if user.is_some() { 1 } else { dir }, user, limit })
    }

    /// Whether the call that makes it has not come back: nobody knows its number.
    fn is_being_made(&self, ino: u64) -> bool {
        let threads =
            self.actors.iter().filter_map(|a| a.process.as_ref()).flat_map(|p| &p.threads);
        threads.filter_map(|t| t.under_way.as_ref()).any(|u| u.made == Some(ino))
    }

    fn draw_dir(&mut self) -> u64 {
        let mut dirs = self.model.dirs();
        dirs.retain(|ino| !self.is_being_made(*ino));
        dirs[self.random.below(dirs.len() as u64) as usize]
    }

    fn draw_target(&mut self) -> Target {
        let few = self.preset.strides && self.random.chance(7, 8);
        let dir = if few { 1 } else { self.draw_dir() };
        let name = vec![b'a' + self.random.below(if few { 2 } else { NAMES }) as u8];
        let ino = self.target(dir, &name).filter(|ino| !self.is_being_made(*ino));
        Target { dir, name, ino }
    }

    fn draw_xattr(&mut self) -> &'static [u8] {
        [&b"user.a"[..], b"user.b", ACL][self.random.below(3) as usize]
    }

    fn draw_offset(&mut self) -> u64 {
        self.random.below(self.preset.file_max)
    }

    /// A file that the thread has open.
    fn own_open(
        &mut self,
        c: usize,
        t: usize,
        fits: impl Fn(&Open) -> bool,
    ) -> Option<(Handle, u64)> {
        self.own(c, t, |open| !open.is_dir() && fits(open))
    }

    /// A file or directory that the thread has open.
    fn own(&mut self, c: usize, t: usize, fits: impl Fn(&Open) -> bool) -> Option<(Handle, u64)> {
        let open = &self.process(c)?.open;
        let own: Vec<(u64, u64)> = open
            .iter()
            .filter(|(_, o)| o.thread == t && fits(o))
            .map(|(h, o)| (*h, o.ino))
            .collect();
        let (handle, ino) = *own.get(self.random.below(own.len().max(1) as u64) as usize)?;
        Some((Handle(handle), ino))
    }

    fn draw_close(&mut self, c: usize, t: usize) -> Option<Call> {
        let (handle, ino) = self.own(c, t, |_| true)?;
        if let Some(unlock) = self.draw_unlock(c, t, Some(ino)) {
            // Who closes a file has no locks on it any more.
            return Some(unlock);
        }
        self.process(c)?.open.remove(&handle.0);
        Some(Call::Release { handle, ino })
    }

    /// How many files, or directories, a thread has open.
    fn count_open(&mut self, c: usize, t: usize, dirs: bool) -> usize {
        let Some(process) = self.process(c) else { return 0 };
        process.open.values().filter(|o| o.thread == t && o.is_dir() == dirs).count()
    }

    /// A directory is opened, or something is done in one that is open, which others may have removed.
    fn draw_of_open_dir(&mut self, c: usize, t: usize) -> Option<Call> {
        let count = self.count_open(c, t, true);
        if count == 0 || count < OPEN_DIRS && self.random.chance(1, 4) {
            let at = self.draw_target();
            let dir = at.ino.filter(|_| self.random.chance(7, 8)).unwrap_or(at.dir);
            let what = [0, R | X, X][self.random.below(3) as usize];
            return Some(Call::OpenDir { ino: dir, what });
        }
        let (handle, ino) = self.own(c, t, Open::is_dir)?;
        let name = self.draw_target().name;
        Some(match self.random.below(8) {
            0 => {
                self.process(c)?.open.remove(&handle.0);
                Call::Release { handle, ino }
            }
            1 => Call::Readdir { dir: ino },
            2 => Call::Lookup { dir: ino, name },
            3 => Call::Make { dir: ino, name, mode: S_IFREG | 0o644, target: Vec::new() },
            4 => Call::FsyncInode { ino },
            // Somebody removes it.
            5 => {
                let (dir, name) = self.name_of(ino)?;
                Call::Remove { dir, name, is_dir: true }
            }
            _ => Call::Getattr { ino },
        })
    }

    /// A name that leads to a directory.
    fn name_of(&self, ino: u64) -> Option<(u64, Vec<u8>)> {
        self.model.dirs().into_iter().find_map(|dir| match &self.model.current(dir)?.body {
            Body::Dir(names) => {
                let (name, _) = names.iter().find(|(_, to)| **to == ino)?;
                Some((dir, name.clone()))
            }
            _ => None,
        })
    }

    /// A file to work on: one that is open, or else (and sometimes anyhow) one to be opened first.
    fn draw_file(&mut self, c: usize, t: usize) -> Result<(Handle, u64), Option<Call>> {
        let writable = |open: &Open| open.flags & 3 == O_RDWR;
        let anew = self.random.chance(1, 8);
        if let Some(found) = self.own_open(c, t, writable).filter(|_| !anew) {
            return Ok(found);
        }
        if self.count_open(c, t, false) >= OPEN_MAX {
            return Err(self.draw_close(c, t));
        }
        let at = self.draw_target();
        let Some(ino) = at.ino.filter(|ino| self.is_file(*ino)) else { return Err(None) };
        let flags = match self.random.below(12) {
            0 => O_RDWR | O_TRUNC,
            1 | 2 => O_RDWR | O_APPEND,
            3 => O_RDONLY,
            _ => O_RDWR,
        };
        Err(Some(Call::Open { ino, flags }))
    }

    fn draw_range(&mut self) -> (u64, u64) {
        let limit = self.preset.file_max;
        let (least, most) = (self.preset.write_min, self.preset.write_max.min(limit));
        let len = least + self.random.below(most - least + 1);
        (self.random.below(limit - len + 1), len)
    }

    fn draw_kind_of_call(&mut self, c: usize, t: usize, kind: Kind) -> Option<Call> {
        match kind {
            Kind::Write
            | Kind::Append
            | Kind::Fallocate
            | Kind::Punch
            | Kind::Zero
            | Kind::Shift
            | Kind::Clone
            | Kind::Read => self.draw_content(c, t, kind),
            Kind::Create | Kind::Mkdir | Kind::Symlink | Kind::Tmpfile | Kind::List => {
                self.draw_making(c, t, kind)
            }
            Kind::Unlink | Kind::Rename | Kind::Exchange | Kind::Link => {
                self.draw_names(c, t, kind)
            }
            Kind::Quota => self.draw_limits(),
            Kind::Lock => {
                let (_, ino) = self.own_open(c, t, |_| true)?;
                let lock = self.draw_lock(c, t);
                if lock.kind != LockKind::None && self.random.chance(1, 5) {
                    return Some(Call::TestLock { ino, lock });
                }
                let wait = lock.kind != LockKind::None && self.random.chance(1, 3);
                Some(Call::Lock { ino, lock, wait })
            }
            Kind::OpenDir => self.draw_of_open_dir(c, t),
            _ => self.draw_attributes(kind),
        }
    }

    fn draw_making(&mut self, c: usize, t: usize, kind: Kind) -> Option<Call> {
        let Target { dir, name, .. } = self.draw_target();
        Some(match kind {
            Kind::List => Call::Readdir { dir },
            Kind::Mkdir if self.model.dirs().len() < DIRS => {
                let mode = S_IFDIR | self.draw_dir_mode();
                Call::Make { dir, name, mode, target: Vec::new() }
            }
            Kind::Symlink => {
                let target = self.draw_target().name;
                Call::Make { dir, name, mode: S_IFLNK | 0o777, target }
            }
            Kind::Tmpfile => {
                let nameless = |o: &Open| o.flags & NAMELESS != 0;
                match self.own_open(c, t, nameless) {
                    Some((_, ino)) if self.random.chance(2, 3) => Call::Link { ino, dir, name },
                    _ => Call::Tmpfile { dir },
                }
            }
            _ => {
                let mode = self.draw_mode([0o644, 0o644, 0o666, 0o600]);
                let flags = [O_EXCL, 0, O_APPEND, O_TRUNC][self.random.below(4) as usize];
                if self.random.chance(1, 4) {
                    let mode = S_IFREG | mode;
                    return Some(Call::Make { dir, name, mode, target: Vec::new() });
                }
                Call::Create { dir, name, mode, flags: O_RDWR | flags }
            }
        })
    }

    fn draw_names(&mut self, c: usize, t: usize, kind: Kind) -> Option<Call> {
        let Target { dir, name, ino } = self.draw_target();
        let Target { dir: dir2, name: name2, ino: other } = self.draw_target();
        let is_dir = |ino: Option<u64>| ino.is_some_and(|ino| self.model_is_dir(ino));
        let (first, second) = (is_dir(ino), is_dir(other));
        Some(match kind {
            Kind::Unlink => {
                let lies = self.random.chance(1, 30);
                Call::Remove { dir, name, is_dir: first != lies }
            }
            Kind::Link => match self.own_open(c, t, |o| o.flags & NAMELESS != 0) {
                Some((_, ino)) => Call::Link { ino, dir: dir2, name: name2 },
                None => Call::Link { ino: ino?, dir: dir2, name: name2 },
            },
            Kind::Exchange => {
                // Directories in directories are exchanged seldom: a circle is refused.
                other.filter(|_| !second || dir == dir2 || self.random.chance(1, 4))?;
                Call::Rename { dir, name, dir2, name2, flags: 2 }
            }
            _ => {
                let flags = u32::from(self.random.chance(1, 4));
                Call::Rename { dir, name, dir2, name2, flags }
            }
        })
    }

    fn draw_content(&mut self, c: usize, t: usize, kind: Kind) -> Option<Call> {
        let (handle, ino) = match self.draw_file(c, t) {
            Ok(found) => found,
            Err(first) => return first,
        };
        let (mut offset, mut len) = self.draw_range();
        let mut keep = self.random.chance(1, 2);
        let size = match self.model.current(ino).map(|s| &s.body) {
            Some(Body::File(bytes, _)) => bytes.len() as u64,
            _ => 0,
        };
        if self.preset.strides
            && matches!(kind, Kind::Write | Kind::Read)
            && let Some(own) = self.draw_stride(c, size)
        {
            ((offset, len), keep) = (own, false);
        }
        Some(match kind {
            // (Its times are of all that was written.)
            Kind::Read if self.preset.strides && self.random.chance(1, 8) => {
                Call::Fgetattr { handle, ino }
            }
            Kind::Read => {
                let len = if keep { self.preset.file_max } else { len } as usize;
                Call::Read { handle, ino, offset: if keep { 0 } else { offset }, len }
            }
            Kind::Fallocate => {
                let mode = if keep { falloc::KEEP_SIZE } else { 0 };
                Call::Allocate { handle, ino, mode, offset, len }
            }
            Kind::Punch => {
                let mode = falloc::PUNCH_HOLE | falloc::KEEP_SIZE;
                Call::Allocate { handle, ino, mode, offset, len }
            }
            Kind::Zero => {
                let mode = falloc::ZERO_RANGE | if keep { falloc::KEEP_SIZE } else { 0 };
                Call::Allocate { handle, ino, mode, offset, len }
            }
            Kind::Shift => {
                let (at, by) = (offset % size.max(1) / BLOCK * BLOCK, BLOCK * (1 + len % 2));
                let grows = keep && size + by <= self.preset.file_max;
                let mode = if grows { falloc::INSERT_RANGE } else { falloc::COLLAPSE_RANGE };
                Call::Allocate { handle, ino, mode, offset: at, len: by }
            }
            Kind::Clone => {
                let (source, from) = self.own_open(c, t, |o| o.flags & 3 == O_RDWR)?;
                let size = match self.model.current(from).map(|s| &s.body) {
                    Some(Body::File(bytes, _)) => bytes.len() as u64,
                    _ => 0,
                };
                let at = self.random.below(size + 1) / BLOCK * BLOCK;
                let to = (handle, ino, offset / BLOCK * BLOCK);
                let len = (size - at).min(self.preset.file_max.saturating_sub(to.2));
                let len = if len == size - at { len } else { len / BLOCK * BLOCK };
                Call::Clone { from: (source, from, at), to, len }
            }
            _ => {
                let append = kind == Kind::Append && size + len <= self.preset.file_max;
                let mut data = vec![0; len as usize];
                self.random.fill(&mut data);
                let shared = self.random.chance(1, 12);
                Call::Write { handle, ino, offset, data, append, shared }
            }
        })
    }

    /// Bytes of blocks that mostly one process uses, or now and then those beside them.
    fn draw_stride(&mut self, c: usize, size: u64) -> Option<(u64, u64)> {
        let (clients, blocks) = (self.actors.len() as u64, size / BLOCK);
        let mine = if self.random.chance(11, 12) { c as u64 } else { self.random.below(clients) };
        let block = self.random.below(blocks.max(1)) / clients * clients + mine;
        if block >= blocks || self.random.chance(1, 30) {
            return None;
        }
        let whole = self.random.chance(1, 2);
        let from = block * BLOCK + if whole { 0 } else { self.random.below(BLOCK) };
        let most = if self.random.chance(1, 10) { 2 * BLOCK } else { (block + 1) * BLOCK - from };
        let most = most.min(size - from);
        Some((from, if whole { most } else { 1 + self.random.below(most) }))
    }

    fn draw_attributes(&mut self, kind: Kind) -> Option<Call> {
        let ino = self.draw_target().ino?;
        let state = self.model.current(ino)?;
        let (is_file, is_dir) = (state.mode & S_IFMT == S_IFREG, state.mode & S_IFMT == S_IFDIR);
        let set = |set| Some(Call::SetAttr { ino, set });
        let none = SetAttr::default();
        match kind {
            // (Files that several shall write at a time are long.)
            Kind::Truncate if is_file && self.preset.strides && self.random.chance(3, 4) => {
                Some(Call::Truncate { ino, size: self.preset.file_max })
            }
            Kind::Truncate => is_file.then(|| Call::Truncate { ino, size: self.draw_offset() }),
            Kind::Chmod if is_file || is_dir => {
                let bits = self.draw_mode([0o644, 0o600, 0o640, 0o755]);
                let of_dir = self.draw_dir_mode();
                // To what it is, sometimes.
                let same = self.random.chance(1, 3);
                let mode = if is_dir { of_dir } else { bits };
                let mode = if same { self.model.current(ino)?.mode & 0o7777 } else { mode };
                set(SetAttr { mode: Some(mode), ..none })
            }
            Kind::Chown => {
                let uid = if self.random.chance(1, 2) { GUEST } else { 0 };
                if !self.preset.hostile {
                    return set(SetAttr { uid: Some(uid), ..none });
                }
                let uid = [None, Some(uid), Some(OTHER)][self.random.below(3) as usize];
                let gid = [None, Some(0), Some(GUEST), Some(SHARED)][self.random.below(4) as usize];
                let gid = if uid.is_none() { gid.or(Some(SHARED)) } else { gid };
                set(SetAttr { uid, gid, ..none })
            }
            Kind::Utimes if self.preset.hostile && self.random.chance(1, 3) => {
                set(SetAttr { mtime: Some(SetTime::Now), atime: Some(SetTime::Now), ..none })
            }
            Kind::Utimes => {
                let time = self.now + REALTIME + self.random.below(1 << 40);
                let at = |t: Nanos| {
                    SetTime::At(Time {
                        sec: (t / 1_000_000_000) as i64,
                        nsec: (t % 1_000_000_000) as u32,
                    })
                };
                // Back to what it was, sometimes.
                let before = self.model.current(ino)?.mtime;
                let mtime = if self.random.chance(1, 3) { before } else { time };
                set(SetAttr { mtime: Some(at(mtime)), atime: Some(at(time)), ..none })
            }
            Kind::SetAcl if is_file || is_dir => {
                let value = Some(self.draw_list(is_dir));
                Some(Call::SetXattr { ino, name: ACL, value, how: XattrMode::Set })
            }
            Kind::SetDefault if is_dir => {
                let value = self.draw_list(true);
                let value = self.random.chance(3, 4).then_some(value);
                Some(Call::SetXattr { ino, name: DEFAULT_ACL, value, how: XattrMode::Set })
            }
            Kind::SetXattr | Kind::RemoveXattr if is_file || is_dir => {
                let name = [&b"user.a"[..], b"user.b"][self.random.below(2) as usize];
                // (Where there are limits some are so large that they count.)
                let most = if self.preset.quota && self.random.chance(1, 8) { 20_000 } else { 600 };
                let mut data = vec![0; 1 + self.random.below(most) as usize];
                self.random.fill(&mut data);
                let how = match self.random.below(4) {
                    0 => XattrMode::Create,
                    1 => XattrMode::Replace,
                    _ => XattrMode::Set,
                };
                let value = (kind == Kind::SetXattr).then_some(data);
                Some(Call::SetXattr { ino, name, value, how })
            }
            Kind::Project => {
                let dir = self.draw_dir();
                let project = if self.random.chance(1, 2) { dir } else { 0 };
                Some(Call::SetProject { ino, project })
            }
            _ => None,
        }
    }

    /// Permission bits of a file: of these, where it matters to nobody.
    fn draw_mode(&mut self, usual: [u32; 4]) -> u32 {
        const ALL: [u32; 12] =
            [0o644, 0o600, 0o640, 0o660, 0o666, 0o000, 0o060, 0o604, 0o755, 0o4755, 0o6775, 0o2664];
        let usual = usual[self.random.below(4) as usize];
        if self.preset.hostile && self.random.chance(1, 2) {
            return ALL[self.random.below(12) as usize];
        }
        usual
    }

    /// Permission bits of a directory.
    fn draw_dir_mode(&mut self) -> u32 {
        const ALL: [u32; 10] =
            [0o755, 0o777, 0o1777, 0o2775, 0o3777, 0o700, 0o770, 0o711, 0o733, 0o555];
        if self.preset.hostile { ALL[self.random.below(10) as usize] } else { 0o755 }
    }

    /// An access control list. Where rights matter to nobody, who passes by searches directories.
    fn draw_list(&mut self, is_dir: bool) -> Vec<u8> {
        let mut rights = || self.random.below(8) as u16;
        let (owner, user, other, group, mask, others) =
            (rights(), rights(), rights(), rights(), rights(), rights());
        if !self.preset.hostile {
            return acl::list(7, user, if is_dir { 5 | others & 2 } else { others });
        }
        let owner = if self.random.chance(2, 3) { 7 } else { owner };
        let mask = if self.random.chance(1, 2) { 7 } else { mask };
        let mut users = vec![(OTHER, other), (GUEST, user)];
        users.retain(|_| self.random.chance(1, 2));
        let mut groups = vec![(SHARED, other), (GUEST, group)];
        groups.retain(|_| self.random.chance(1, 2));
        acl::full([owner, group, mask, others], &users, &groups)
    }

    fn model_is_dir(&self, ino: u64) -> bool {
        self.model.current(ino).is_some_and(|s| s.mode & S_IFMT == S_IFDIR)
    }
}
