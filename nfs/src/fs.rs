//! The file system over either version of the protocol.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caller, DirEntry, FileSystem, Handle, Lock, LockKind, NewNode, O_ACCMODE, O_APPEND,
    O_DSYNC, O_EXCL, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY, Rename, Result, S_IFDIR, S_IFLNK, S_IFMT,
    S_IFREG, SetAttr, SetTime, StatFs, Time, Whence, Written, XattrMode, check_name,
    check_own_name,
};

use crate::proto::{Change, Facts, Fh, Limits, Locked, Page, Protocol, access, join_dev};
use crate::rpc::Cred;
use crate::table::{Kept, Node, Open, Seen, Stand, Table, Unstable, may_be_own, own};
use crate::url::{Url, Version};
use crate::v3::V3;

const COOKIE_DOT: u64 = 1;
const COOKIE_DOT_DOT: u64 = 2;
/// Where cookies of the server are that would be those two.
const COOKIE_MOVED: u64 = 3 << 61;
/// Names looked at when a file is searched by its number.
const SEARCH_MAX: u32 = 1 << 20;
/// Names that are kept in mind of that.
const SEEN_MAX: usize = 1 << 16;
/// Times that open-or-create follows a name that appears and vanishes.
const CREATE_TRIES: u32 = 16;
/// Bytes kept of what a server may lose: of one file, and of all.
const UNSTABLE_MAX: (usize, usize) = (8 << 20, 64 << 20);
/// Between two tries to make durable what could not be made.
const OWED_PAUSE: Duration = Duration::from_secs(1);
/// Who waits for a lock asks again after that.
const LOCK_POLL: Duration = Duration::from_millis(200);
/// What the names of files begin with that are open and have no other one, as with every client of NFS.
const STAND: &str = ".nfs";

/// What a name led to in a search.
enum Found {
    /// What was searched.
    It(Arc<Node>),
    /// A directory.
    Dir(Fh),
    Other,
}

/// Files that were closed and could not be made durable.
#[derive(Default)]
struct Owed {
    /// When that was tried last.
    tried: Option<Instant>,
    files: BTreeMap<InodeId, Arc<Node>>,
}

/// An export as a file system.
pub struct NfsFs {
    proto: Box<dyn Protocol>,
    root_fsid: (u64, u64),
    limits: Limits,
    locks: bool,
    table: Mutex<Table>,
    /// Bytes that are kept of what a server may lose.
    unstable: AtomicUsize,
    /// What is to be made durable, though nobody has it open.
    owed: Mutex<Owed>,
    stands: AtomicU64,
    /// Names that were seen in a search: a directory and a name in it, by the file's number.
    seen: Mutex<HashMap<u64, (Fh, Vec<u8>)>>,
    /// In names of ours: this machine and this export, so that what another one has open is not taken for ours.
    mark: u16,
    /// For how long is searched.
    search_time: Duration,
    lock_event: (Mutex<u64>, Condvar),
    text: String,
}

impl std::fmt::Debug for NfsFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NfsFs").field("export", &self.text).finish_non_exhaustive()
    }
}

fn cred(caller: &Caller<'_>) -> Cred {
    Cred { uid: caller.uid, gid: caller.gid, groups: caller.groups.to_vec() }
}

fn check_end(offset: u64, len: usize) -> Result<u64> {
    let end = offset.checked_add(len as u64).filter(|end| i64::try_from(*end).is_ok());
    end.ok_or(Errno::FBIG)
}

fn check_time(time: Option<SetTime>) -> Result<()> {
    match time {
        Some(SetTime::At(Time { nsec: 1_000_000_000.., .. })) => Err(Errno::INVAL),
        _ => Ok(()),
    }
}

/// What the server is asked for by the access mode of an open.
fn bits(flags: u32) -> Result<u32> {
    let bits = match flags & O_ACCMODE {
        O_RDONLY => access::READ,
        O_WRONLY => access::MODIFY,
        O_RDWR => access::READ | access::MODIFY,
        _ => return Err(Errno::INVAL),
    };
    Ok(if flags & O_TRUNC != 0 { bits | access::MODIFY } else { bits })
}

/// What can be opened here.
fn check_kind(kind: u32) -> Result<()> {
    match kind {
        S_IFREG => Ok(()),
        S_IFDIR => Err(Errno::ISDIR),
        S_IFLNK => Err(Errno::LOOP),
        // Special files are the business of the kernel in front.
        _ => Err(Errno::INVAL),
    }
}

/// Of this machine and this export: the same after a restart, also with other options.
fn mark(url: &Url) -> u16 {
    let name = rustix::system::uname();
    let text = format!("{} {} {}", name.nodename().to_string_lossy(), url.host, url.export);
    (base::crc32c(0, text.as_bytes()) & 0xffff) as u16
}

/// Our cookie of a server's.
fn cookie(server: u64) -> Result<u64> {
    match server {
        COOKIE_DOT | COOKIE_DOT_DOT => Ok(COOKIE_MOVED | server),
        // Kernels take no more than 63 bits, and 0 is the beginning.
        n if n == 0 || n > i64::MAX.cast_unsigned() => Err(Errno::OVERFLOW),
        n => Ok(n),
    }
}

/// And back.
fn server_cookie(cookie: u64) -> u64 {
    match cookie {
        COOKIE_DOT | COOKIE_DOT_DOT => 0,
        n if n & !3 == COOKIE_MOVED && n & 3 != 0 => n & 3,
        n => n,
    }
}

impl NfsFs {
    /// The file system of an export.
    ///
    /// # Errors
    /// In words, with what to do: no libnfs, no server, no such export.
    pub fn open(url: &Url) -> std::result::Result<Self, String> {
        crate::libnfs::load()?;
        let proto: Box<dyn Protocol> = match url.version {
            Version::V3 => Box::new(V3::open(url)?),
            Version::V4 => Box::new(crate::v4::V4::open(url)?),
        };
        let root = proto.root();
        let facts = proto
            .getattr(&Cred::ROOT, &root)
            .map_err(|error| format!("{url}: the root of the export: {error:?}"))?;
        if facts.mode & S_IFMT != S_IFDIR {
            return Err(format!("{url}: no directory: export one"));
        }
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
        Ok(Self {
            root_fsid: facts.fsid,
            limits: proto.limits(),
            locks: url.locks,
            table: Mutex::new(Table::new(&root, facts.fileid)),
            unstable: AtomicUsize::new(0),
            owed: Mutex::default(),
            stands: AtomicU64::new(seed),
            seen: Mutex::default(),
            mark: mark(url),
            search_time: url.patience,
            lock_event: (Mutex::new(1), Condvar::new()),
            text: url.to_string(),
            proto,
        })
    }

    /// Nothing more is asked, though somebody may hold this still: what waits ends with EIO.
    pub fn end(&self) {
        self.proto.end();
    }

    /// Bytes that are kept because the server may still lose them: for tests.
    pub fn unstable(&self) -> usize {
        self.unstable.load(Ordering::Relaxed)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn node(&self, ino: InodeId) -> Result<Arc<Node>> {
        if let Some(node) = self.table().node(ino) {
            return Ok(node);
        }
        self.search(ino)
    }

    fn dir(&self, ino: InodeId) -> Result<Arc<Node>> {
        let node = self.node(ino)?;
        if node.kind == S_IFDIR { Ok(node) } else { Err(Errno::NOTDIR) }
    }

    /// What there is of a handle: known from now on.
    fn adopt(&self, fh: &Fh, facts: &Facts, named: Option<(&Fh, &[u8])>) -> Result<Arc<Node>> {
        if facts.fsid != self.root_fsid {
            return Err(Errno::XDEV);
        }
        let kind = facts.mode & S_IFMT;
        let seen = self.table().see(fh, facts.fileid, kind);
        let node = match seen {
            Seen::Node(node) => node,
            // Some servers name a file by several handles. If the other one is gone, its number was given away again.
            Seen::Doubtful(other) => match self.proto.getattr(&Cred::ROOT, &other.fh) {
                Ok(there) if there.fileid == facts.fileid && there.mode & S_IFMT == kind => other,
                Ok(_) | Err(Errno::STALE | Errno::NOENT) => {
                    self.table().see_apart(fh, facts.fileid, kind)
                }
                Err(error) => return Err(error),
            },
        };
        if let Some((dir, name)) = named {
            node.seen_under(dir, name);
        }
        Ok(node)
    }

    fn attr(node: &Node, facts: &Facts) -> Attr {
        // Names of ours are none.
        let stands = u32::try_from(node.gate().stands.len()).unwrap_or(u32::MAX);
        Self::attr_with(node, facts, stands)
    }

    fn attr_with(node: &Node, facts: &Facts, stands: u32) -> Attr {
        Attr {
            ino: node.ino,
            mode: facts.mode,
            nlink: facts.nlink.saturating_sub(stands),
            uid: facts.uid,
            gid: facts.gid,
            rdev: join_dev(facts.rdev),
            size: facts.size,
            blocks: facts.used.div_ceil(512),
            atime: facts.atime,
            mtime: facts.mtime,
            ctime: facts.ctime,
            btime: facts.btime,
            learnt: 0,
        }
    }

    fn attr_of(&self, cred: &Cred, node: &Node) -> Result<Attr> {
        Ok(Self::attr(node, &self.proto.getattr(cred, &node.fh)?))
    }

    /// Last resort for a number of which nothing is known, as after a restart of the device: walks the tree. What is seen on the way is kept in
    /// mind, so that many such numbers take few walks.
    fn search(&self, ino: InodeId) -> Result<Arc<Node>> {
        let (root, fileid) = {
            let table = self.table();
            (table.root(), table.swap(ino.0))
        };
        let seen = self.seen().remove(&fileid);
        if let Some((dir, name)) = seen
            && let Ok(Found::It(node)) = self.look(ino, fileid, &dir, &name)
        {
            return Ok(node);
        }
        let begun = Instant::now();
        let mut left = SEARCH_MAX;
        let mut todo = VecDeque::from([root.fh.clone()]);
        while let Some(dir) = todo.pop_front() {
            let (mut from, mut verifier) = (0, [0; 8]);
            // A directory that vanished meanwhile has nothing to find.
            while let Ok(Page { entries, end, verifier: next }) =
                self.proto.list(&Cred::ROOT, &dir, from, verifier)
            {
                verifier = next;
                let Some(last) = entries.last().map(|entry| entry.cookie) else { break };
                for entry in entries {
                    left = left.saturating_sub(1);
                    if matches!(&entry.name[..], b"." | b"..") {
                        continue;
                    }
                    let may_be_dir = matches!(entry.kind, S_IFDIR | 0);
                    let may_be_it = entry.fileid == fileid || may_be_own(ino, entry.fileid);
                    if may_be_it || may_be_dir {
                        match self.look(ino, fileid, &dir, &entry.name)? {
                            Found::It(node) => return Ok(node),
                            Found::Dir(below) => todo.push_back(below),
                            Found::Other => {}
                        }
                    }
                    let mut seen = self.seen();
                    if seen.len() < SEEN_MAX {
                        seen.insert(entry.fileid, (dir.clone(), entry.name));
                    }
                }
                if end || last == from {
                    break;
                }
                from = last;
                if left == 0 || begun.elapsed() > self.search_time {
                    return Err(Errno::STALE);
                }
            }
            if left == 0 || begun.elapsed() > self.search_time {
                break;
            }
        }
        Err(Errno::STALE)
    }

    /// Whether a name leads to what is searched, or further.
    fn look(&self, ino: InodeId, fileid: u64, dir: &Fh, name: &[u8]) -> Result<Found> {
        let Ok((fh, facts)) = self.proto.lookup(&Cred::ROOT, dir, name) else {
            return Ok(Found::Other);
        };
        if facts.fsid != self.root_fsid {
            return Ok(Found::Other);
        }
        if facts.fileid == fileid {
            let node = self.adopt(&fh, &facts, Some((dir, name)))?;
            if node.ino == ino {
                self.stand_again(&node, dir, name, fileid);
                return Ok(Found::It(node));
            }
        } else if may_be_own(ino, facts.fileid) && own(facts.fileid, &fh) == ino.0 {
            let node = self.table().see_again(ino, &fh, facts.mode & S_IFMT);
            node.seen_under(dir, name);
            self.stand_again(&node, dir, name, facts.fileid);
            return Ok(Found::It(node));
        }
        Ok(if facts.mode & S_IFMT == S_IFDIR { Found::Dir(fh) } else { Found::Other })
    }

    fn seen(&self) -> MutexGuard<'_, HashMap<u64, (Fh, Vec<u8>)>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file was found under a name that a device of before has left to it: it goes when the file is closed.
    fn stand_again(&self, node: &Node, dir: &Fh, name: &[u8], fileid: u64) {
        let ours = format!("{STAND}{fileid:016x}{:04x}", self.mark);
        if name.starts_with(ours.as_bytes()) && name.len() == ours.len() + 8 {
            let stand = Stand { dir: dir.clone(), name: name.to_vec(), cred: Cred::ROOT };
            node.gate().stands.push(stand);
        }
    }

    fn handle(&self, handle: Handle) -> Result<Arc<Open>> {
        self.table().open(handle.0).ok_or(Errno::BADF)
    }

    fn to_write(&self, handle: Handle) -> Result<Arc<Open>> {
        self.handle(handle)
            .and_then(|open| if open.mode == O_RDONLY { Err(Errno::BADF) } else { Ok(open) })
    }

    /// A file that is counted as open in its gate.
    fn register(&self, node: Arc<Node>, flags: u32, cred: Cred) -> Handle {
        let mode = flags & O_ACCMODE;
        {
            let mut state = node.state();
            if mode != O_WRONLY {
                state.openers[0] = Some(cred.clone());
            }
            if mode != O_RDONLY {
                state.openers[1] = Some(cred.clone());
            }
        }
        let (append, sync) = (flags & O_APPEND != 0, flags & O_DSYNC != 0);
        Handle(self.table().register(Open { node, mode, append, sync, cred }))
    }

    /// Opens a file that is there.
    fn open_node(&self, cred: Cred, node: Arc<Node>, flags: u32) -> Result<Handle> {
        check_kind(node.kind)?;
        let bits = bits(flags)?;
        // Before the server is asked: from now on nobody takes its last name away.
        node.gate().opens += 1;
        let may = self
            .proto
            .access(&cred, &node.fh, bits)
            .and_then(|may| if may & bits == bits { Ok(()) } else { Err(Errno::ACCES) });
        let opened = may
            .and_then(|()| if flags & O_TRUNC != 0 { self.cut(&cred, &node, 0) } else { Ok(()) });
        match opened {
            Ok(()) => Ok(self.register(node, flags, cred)),
            Err(error) => {
                self.close(&node);
                Err(error)
            }
        }
    }

    /// One handle less.
    fn close(&self, node: &Node) {
        let mut gate = node.gate();
        gate.opens = gate.opens.saturating_sub(1);
        if gate.opens > 0 {
            return;
        }
        for Stand { dir, name, cred } in std::mem::take(&mut gate.stands) {
            match self.proto.remove(&cred, &dir, &name, false) {
                Ok(()) | Err(Errno::NOENT | Errno::STALE) => {}
                Err(error) => {
                    let name = String::from_utf8_lossy(&name);
                    log::warn!(
                        "{}: {name} was open without a name, and is left: {error:?}",
                        self.text
                    );
                }
            }
        }
    }

    /// A name that nobody has, for a file that is to lose its own.
    fn stand_name(&self, fileid: u64) -> Vec<u8> {
        let count = self.stands.fetch_add(1, Ordering::Relaxed);
        format!("{STAND}{fileid:016x}{:04x}{:08x}", self.mark, count as u32).into_bytes()
    }

    /// Cuts or extends.
    fn cut(&self, cred: &Cred, node: &Node, size: u64) -> Result<()> {
        let _alone = node.io.write().unwrap_or_else(PoisonError::into_inner);
        // What is written again later must not come after that.
        self.commit_alone(node)?;
        self.proto.setattr(cred, &node.fh, &Change { size: Some(size), ..Change::default() })
    }

    fn take_unstable(&self, node: &Node) -> Kept {
        let all = node.unstable().take();
        self.unstable.fetch_sub(all.bytes(), Ordering::Relaxed);
        all
    }

    fn give_back(&self, node: &Node, all: Kept) {
        self.unstable.fetch_add(all.bytes(), Ordering::Relaxed);
        node.unstable().put_back(all);
    }

    /// Makes what was written durable. Whoever comes while somebody else is about it waits, and asks for itself what became of it.
    fn commit(&self, cred: &Cred, node: &Node) -> Result<()> {
        let _one = node.committing();
        {
            // Nobody cuts the file while what may have to be written again is in nobody's list.
            let _shared = node.io.read().unwrap_or_else(PoisonError::into_inner);
            let written = self.take_unstable(node);
            let last = written.iter().last().map(|one| one.cred.clone());
            let cred = last.as_ref().unwrap_or(cred);
            let done = self.proto.commit(cred, &node.fh);
            if done.is_ok_and(|verifier| written.iter().all(|one| one.verifier == verifier)) {
                return Ok(());
            }
            self.give_back(node, written);
            done?;
        }
        let _alone = node.io.write().unwrap_or_else(PoisonError::into_inner);
        self.write_again(node)
    }

    /// The same where nobody else writes.
    fn commit_alone(&self, node: &Node) -> Result<()> {
        let last = node.unstable().iter().last().map(|one| one.cred.clone());
        let Some(cred) = last else { return Ok(()) };
        let verifier = self.proto.commit(&cred, &node.fh)?;
        if node.unstable().iter().all(|one| one.verifier == verifier) {
            self.take_unstable(node);
            return Ok(());
        }
        self.write_again(node)
    }

    /// The server has begun anew and lost what was not durable: all of it is written again, in order.
    fn write_again(&self, node: &Node) -> Result<()> {
        log::info!("{}: the server has begun anew, data are written again", self.text);
        let mut written = self.take_unstable(node);
        let (mut done, mut failed) = (0, Ok(()));
        for one in written.iter() {
            failed = self.write_whole(&one.cred, node, one.offset, &one.data);
            if failed.is_err() {
                break;
            }
            done += 1;
        }
        written.drop_first(done);
        self.give_back(node, written);
        failed
    }

    /// Writes all of it, durably.
    fn write_whole(
        &self,
        cred: &Cred,
        node: &Node,
        mut offset: u64,
        mut data: &[u8],
    ) -> Result<()> {
        while !data.is_empty() {
            let part = &data[..data.len().min(self.limits.write)];
            let len = self.proto.write(cred, &node.fh, offset, part, true)?.len.min(part.len());
            (offset, data) = (offset + len as u64, &data[len..]);
        }
        Ok(())
    }

    /// Writes, as much as goes.
    fn write_at(&self, open: &Open, offset: u64, data: &[u8]) -> Result<usize> {
        let Open { node, cred, .. } = open;
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let part = &data[done..data.len().min(done + self.limits.write)];
            let room = self.unstable.load(Ordering::Relaxed) + part.len() <= UNSTABLE_MAX.1;
            let stable = open.sync || !room;
            let wrote = match self.proto.write(cred, &node.fh, at, part, stable) {
                Ok(wrote) => wrote,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            };
            let len = wrote.len.min(part.len());
            if !wrote.stable && !stable {
                let (data, cred) = (part[..len].to_vec(), cred.clone());
                let one = Unstable { offset: at, data, verifier: wrote.verifier, cred };
                let cost = node.unstable().push(one);
                self.unstable.fetch_add(cost, Ordering::Relaxed);
            }
            done += len;
        }
        Ok(done)
    }

    /// Whether nothing is kept of a file, and nobody is just about what was.
    fn is_durable(&self, node: &Node) -> bool {
        let _one = node.committing();
        node.unstable().is_empty()
    }

    fn owed(&self) -> MutexGuard<'_, Owed> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries again to make durable what could not be when its file was closed, now and then.
    fn pay_owed(&self) {
        let all = {
            let Owed { tried, files } = &mut *self.owed();
            if files.is_empty() || tried.is_some_and(|tried| tried.elapsed() < OWED_PAUSE) {
                return;
            }
            *tried = Some(Instant::now());
            std::mem::take(files)
        };
        let mut all = all.into_iter();
        for (ino, node) in all.by_ref() {
            match self.commit(&Cred::ROOT, &node) {
                Ok(()) => log::info!("{}: {ino} is durable now", self.text),
                Err(Errno::STALE) => {
                    log::error!("{}: {ino} is gone from the server", self.text);
                    self.take_unstable(&node);
                }
                Err(_) => {
                    // A server that does not answer shall not be waited for as often as there are files.
                    self.owed().files.insert(ino, node);
                    break;
                }
            }
        }
        self.owed().files.extend(all);
    }

    /// A file has more that may be lost than is kept.
    fn relieve(&self, open: &Open) -> Result<()> {
        let kept = open.node.unstable().bytes();
        if kept > UNSTABLE_MAX.0 { self.commit(&open.cred, &open.node) } else { Ok(()) }
    }

    fn locked(&self, ino: InodeId, kind: LockKind) -> Result<Locked> {
        if !self.locks {
            return Err(Errno::NOSYS);
        }
        let node = self.node(ino)?;
        check_kind(node.kind)?;
        let state = node.state();
        let [reader, writer] = &state.openers;
        let who = if kind == LockKind::Write {
            writer.as_ref().or(reader.as_ref())
        } else {
            reader.as_ref().or(writer.as_ref())
        };
        let cred = who.cloned().unwrap_or(Cred::ROOT);
        Ok(Locked { fh: node.fh.clone(), named: state.named.clone(), cred })
    }

    /// Takes away a name that is not a directory's. A file that is open keeps one of ours.
    fn take_name(&self, cred: &Cred, dir: &Node, name: &[u8]) -> Result<()> {
        let (fh, facts) = self.proto.lookup(cred, &dir.fh, name)?;
        if facts.mode & S_IFMT == S_IFDIR {
            return Err(Errno::ISDIR);
        }
        let node = self.table().by_handle(&fh);
        let Some(node) = node else { return self.proto.remove(cred, &dir.fh, name, false) };
        let mut gate = node.gate();
        if gate.opens == 0 {
            return self.proto.remove(cred, &dir.fh, name, false);
        }
        let stand = self.stand_name(facts.fileid);
        self.proto.rename(cred, (&dir.fh, name), (&dir.fh, &stand))?;
        // One that was ours is no other name.
        gate.stands.retain(|old| old.dir != dir.fh || old.name != name);
        gate.stands.push(Stand { dir: dir.fh.clone(), name: stand.clone(), cred: cred.clone() });
        node.state().named = Some((dir.fh.clone(), stand));
        Ok(())
    }

    /// What was renamed has that name now, by which it is found to be locked.
    fn follow(&self, cred: &Cred, dir: &Fh, name: &[u8]) {
        if !self.locks {
            return;
        }
        let Ok((fh, _)) = self.proto.lookup(cred, dir, name) else { return };
        let node = self.table().by_handle(&fh);
        if let Some(node) = node {
            node.state().named = Some((dir.clone(), name.to_vec()));
        }
    }

    /// The file that a rename would take a name from, if it is known, and is another one than what is renamed.
    fn target(
        &self,
        cred: &Cred,
        from: (&Node, &[u8]),
        to: (&Node, &[u8]),
    ) -> Result<Option<(Arc<Node>, u64)>> {
        let (fh, facts) = match self.proto.lookup(cred, &to.0.fh, to.1) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        let node = self.table().by_handle(&fh);
        let Some(node) = node.filter(|node| node.kind != S_IFDIR) else { return Ok(None) };
        // Two names of one file: nothing happens.
        let same = self.proto.lookup(cred, &from.0.fh, from.1)?.0 == fh;
        Ok((!same).then_some((node, facts.fileid)))
    }
}

impl Drop for NfsFs {
    fn drop(&mut self) {
        let nodes = self.table().nodes();
        for node in nodes {
            if !node.unstable().is_empty()
                && let Err(error) = self.commit(&Cred::ROOT, &node)
            {
                log::error!("{}: what was written last may be lost: {error:?}", self.text);
            }
        }
        self.proto.end();
    }
}

impl FileSystem for NfsFs {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        check_name(name)?;
        let (cred, dir) = (cred(caller), self.dir(parent)?);
        // Above the root there is nothing that is ours.
        if name == b"." || name == b".." && parent == InodeId::ROOT {
            return self.attr_of(&cred, &dir);
        }
        let (fh, facts) = self.proto.lookup(&cred, &dir.fh, name)?;
        let node = self.adopt(&fh, &facts, Some((&dir.fh, name)))?;
        Ok(Self::attr(&node, &facts))
    }

    fn getattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        self.attr_of(&cred(caller), &*self.node(ino)?)
    }

    fn setattr(&self, caller: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
        check_time(set.atime)?;
        check_time(set.mtime)?;
        let (cred, node) = (cred(caller), self.node(ino)?);
        if let Some(size) = set.size {
            check_end(size, 0)?;
            match set.handle {
                Some(handle) => {
                    let open = self.to_write(handle)?;
                    if open.node.ino != ino {
                        return Err(Errno::BADF);
                    }
                    self.cut(&open.cred, &node, size)?;
                }
                None if node.kind == S_IFDIR => return Err(Errno::ISDIR),
                None => self.cut(&cred, &node, size)?,
            }
        }
        let change = Change {
            mode: set.mode.map(|mode| mode & 0o7777),
            uid: set.uid,
            gid: set.gid,
            size: None,
            atime: set.atime,
            mtime: set.mtime,
        };
        let rest = change.mode.is_some() || change.uid.is_some() || change.gid.is_some();
        if rest || change.atime.is_some() || change.mtime.is_some() {
            self.proto.setattr(&cred, &node.fh, &change)?;
        }
        self.attr_of(&cred, &node)
    }

    fn readlink(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let node = self.node(ino)?;
        if node.kind != S_IFLNK {
            return Err(Errno::INVAL);
        }
        self.proto.readlink(&cred(caller), &node.fh)
    }

    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        check_own_name(name, Errno::EXIST)?;
        if node.mode & S_IFMT == S_IFLNK {
            if node.target.is_empty() || node.target.contains(&0) {
                return Err(Errno::INVAL);
            }
            if node.target.len() > crate::proto::TARGET_MAX {
                return Err(Errno::NAMETOOLONG);
            }
        }
        let (cred, dir) = (cred(caller), self.dir(parent)?);
        let (fh, facts) = self.proto.make(&cred, &dir.fh, name, node)?;
        let node = self.adopt(&fh, &facts, Some((&dir.fh, name)))?;
        Ok(Self::attr(&node, &facts))
    }

    fn unlink(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        check_own_name(name, Errno::ISDIR)?;
        self.take_name(&cred(caller), &*self.dir(parent)?, name)
    }

    fn rmdir(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        check_own_name(name, if name == b"." { Errno::INVAL } else { Errno::NOTEMPTY })?;
        let dir = self.dir(parent)?;
        match self.proto.remove(&cred(caller), &dir.fh, name, true) {
            // Some servers say so.
            Err(Errno::EXIST) => Err(Errno::NOTEMPTY),
            done => done,
        }
    }

    fn rename(&self, caller: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        check_own_name(rename.name, Errno::BUSY)?;
        check_own_name(rename.new_name, Errno::BUSY)?;
        if rename.flags != 0 {
            // The protocol has no such thing.
            return Err(Errno::INVAL);
        }
        let cred = cred(caller);
        let (from, to) = (self.dir(rename.parent)?, self.dir(rename.new_parent)?);
        let (old, new) = ((&from.fh, rename.name), (&to.fh, rename.new_name));
        let replace = || match self.proto.rename(&cred, old, new) {
            // Some servers say so.
            Err(Errno::EXIST) => Err(Errno::NOTEMPTY),
            done => done,
        };
        let target = self.target(&cred, (&from, rename.name), (&to, rename.new_name))?;
        let Some((node, fileid)) = target else {
            replace()?;
            self.follow(&cred, &to.fh, rename.new_name);
            return Ok(());
        };
        let mut gate = node.gate();
        if gate.opens == 0 {
            replace()?;
            drop(gate);
            self.follow(&cred, &to.fh, rename.new_name);
            return Ok(());
        }
        // It is kept under a name of ours, so that the rename stays whole.
        let stand = Stand { dir: to.fh.clone(), name: self.stand_name(fileid), cred: cred.clone() };
        self.proto.link(&cred, &node.fh, &to.fh, &stand.name)?;
        let done = replace();
        if done.is_ok() {
            node.state().named = Some((stand.dir.clone(), stand.name.clone()));
            gate.stands.retain(|old| old.dir != to.fh || old.name != rename.new_name);
            gate.stands.push(stand);
        } else if let Err(error) = self.proto.remove(&cred, &to.fh, &stand.name, false) {
            let name = String::from_utf8_lossy(&stand.name);
            log::warn!("{}: {name} is left: {error:?}", self.text);
        }
        if done.is_ok() {
            self.follow(&cred, &to.fh, rename.new_name);
        }
        done
    }

    fn link(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        check_own_name(name, Errno::EXIST)?;
        let (cred, node, dir) = (cred(caller), self.node(ino)?, self.dir(parent)?);
        if node.kind == S_IFDIR {
            return Err(Errno::PERM);
        }
        self.proto.link(&cred, &node.fh, &dir.fh, name)?;
        node.state().named = Some((dir.fh.clone(), name.to_vec()));
        self.attr_of(&cred, &node)
    }

    fn open(&self, caller: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        self.pay_owed();
        self.open_node(cred(caller), self.node(ino)?, flags)
    }

    fn create(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        check_own_name(name, Errno::ISDIR)?;
        bits(flags)?;
        let (cred, dir) = (cred(caller), self.dir(parent)?);
        let new = flags & O_EXCL != 0;
        for _ in 0..CREATE_TRIES {
            match self.proto.create(&cred, &dir.fh, name, mode, new) {
                Ok((fh, facts)) => {
                    let node = self.adopt(&fh, &facts, Some((&dir.fh, name)))?;
                    node.gate().opens += 1;
                    let attr = Self::attr(&node, &facts);
                    return Ok((attr, self.register(node, flags, cred)));
                }
                Err(Errno::EXIST) if !new => {}
                Err(error) => return Err(error),
            }
            let (fh, facts) = match self.proto.lookup(&cred, &dir.fh, name) {
                Ok(found) => found,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error),
            };
            let node = self.adopt(&fh, &facts, Some((&dir.fh, name)))?;
            let handle = self.open_node(cred.clone(), node.clone(), flags)?;
            let attr = self.attr_of(&cred, &node).inspect_err(|_| self.release(handle))?;
            return Ok((attr, handle));
        }
        Err(Errno::IO)
    }

    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let open = self.handle(handle)?;
        if open.mode == O_WRONLY {
            return Err(Errno::BADF);
        }
        let mut done = 0;
        while done < buf.len() {
            let at = offset.saturating_add(done as u64);
            let asked = (buf.len() - done).min(self.limits.read);
            let (data, end) = match self.proto.read(&open.cred, &open.node.fh, at, asked) {
                Ok(got) => got,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            };
            let to = buf.get_mut(done..done + data.len()).ok_or(Errno::IO)?;
            to.copy_from_slice(&data);
            done += data.len();
            if end {
                break;
            }
            if data.is_empty() {
                log::warn!("{}: a read that gives nothing and is not at the end", self.text);
                return if done == 0 { Err(Errno::IO) } else { Ok(done) };
            }
        }
        Ok(done)
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        let open = self.to_write(handle)?;
        let node = &open.node;
        let written = if append || open.append {
            let _alone = node.io.write().unwrap_or_else(PoisonError::into_inner);
            let offset = self.proto.getattr(&open.cred, &node.fh)?.size;
            check_end(offset, data.len())?;
            Written { len: self.write_at(&open, offset, data)?, offset }
        } else {
            check_end(offset, data.len())?;
            let _shared = node.io.read().unwrap_or_else(PoisonError::into_inner);
            Written { len: self.write_at(&open, offset, data)?, offset }
        };
        // What was written is written; what comes of making it durable the next fsync says.
        if let Err(error) = self.relieve(&open) {
            log::warn!("{}: making data durable: {error:?}", self.text);
        }
        Ok(written)
    }

    fn fallocate(&self, handle: Handle, _: u32, _: u64, _: u64) -> Result<()> {
        self.to_write(handle)?;
        Err(Errno::OPNOTSUPP)
    }

    /// Of holes the protocol knows nothing: all of it is data.
    fn lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        let open = self.handle(handle)?;
        let size = self.proto.getattr(&open.cred, &open.node.fh)?.size;
        match whence {
            _ if offset >= size => Err(Errno::NXIO),
            Whence::Data => Ok(offset),
            Whence::Hole => Ok(size),
        }
    }

    fn fgetattr(&self, handle: Handle) -> Result<Attr> {
        let open = self.handle(handle)?;
        self.attr_of(&open.cred, &open.node)
    }

    fn fsync(&self, handle: Handle, _: bool) -> Result<()> {
        let open = self.handle(handle)?;
        self.pay_owed();
        if open.mode == O_RDONLY && self.is_durable(&open.node) {
            return Ok(());
        }
        self.commit(&open.cred, &open.node)
    }

    /// Names are durable when they are made: that is the server's duty.
    fn fsync_inode(&self, caller: &Caller<'_>, ino: InodeId) -> Result<()> {
        let node = self.node(ino)?;
        let all = if ino == InodeId::ROOT { self.table().nodes() } else { vec![node] };
        let waiting = all.iter().filter(|node| !self.is_durable(node));
        // All are tried; the first failure is told.
        let done: Vec<Result<()>> = waiting.map(|node| self.commit(&cred(caller), node)).collect();
        done.into_iter().collect()
    }

    fn release(&self, handle: Handle) {
        let Some(open) = self.table().close(handle.0) else { return };
        // As every client does: what is closed is the server's. Others of the same file may go on writing.
        if open.mode != O_RDONLY
            && !self.is_durable(&open.node)
            && let Err(error) = self.commit(&open.cred, &open.node)
        {
            log::error!(
                "{}: what was written to {} is not durable yet ({error:?}): goes on trying",
                self.text,
                open.node.ino
            );
            self.owed().files.insert(open.node.ino, open.node.clone());
        }
        self.close(&open.node);
    }

    fn readdir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        from: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let (cred, dir) = (cred(caller), self.dir(ino)?);
        if from < COOKIE_DOT_DOT {
            let parent = if ino == InodeId::ROOT { ino } else { self.above(&cred, &dir)? };
            let dots: [(u64, InodeId, &[u8]); 2] =
                [(COOKIE_DOT, ino, b"."), (COOKIE_DOT_DOT, parent, b"..")];
            for (next, ino, name) in dots.into_iter().filter(|dot| dot.0 > from) {
                if !each(&DirEntry { ino, kind: S_IFDIR, next, name }) {
                    return Ok(());
                }
            }
        }
        let mut at = server_cookie(from);
        let mut verifier = if at == 0 { [0; 8] } else { dir.state().verifier };
        loop {
            let page = self.proto.list(&cred, &dir.fh, at, verifier)?;
            verifier = page.verifier;
            dir.state().verifier = verifier;
            let before = at;
            for entry in &page.entries {
                at = entry.cookie;
                if matches!(&entry.name[..], b"." | b"..") {
                    continue;
                }
                let ino = InodeId(self.table().swap(entry.fileid));
                let next = cookie(entry.cookie)?;
                if !each(&DirEntry { ino, kind: entry.kind, next, name: &entry.name }) {
                    return Ok(());
                }
            }
            if page.end {
                return Ok(());
            }
            // A server that goes round in circles.
            if page.entries.is_empty() || at == before {
                log::warn!("{}: a list that does not end and has nothing more", self.text);
                return Err(Errno::IO);
            }
        }
    }

    fn statfs(&self) -> Result<StatFs> {
        self.proto.space()
    }

    fn getxattr(&self, _: &Caller<'_>, ino: InodeId, _: &[u8]) -> Result<Vec<u8>> {
        self.node(ino)?;
        Err(Errno::OPNOTSUPP)
    }

    fn listxattr(&self, _: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        self.node(ino)?;
        Ok(Vec::new())
    }

    fn setxattr(
        &self,
        _: &Caller<'_>,
        ino: InodeId,
        _: &[u8],
        _: &[u8],
        _: XattrMode,
    ) -> Result<()> {
        self.node(ino)?;
        Err(Errno::OPNOTSUPP)
    }

    fn removexattr(&self, _: &Caller<'_>, ino: InodeId, _: &[u8]) -> Result<()> {
        self.node(ino)?;
        Err(Errno::OPNOTSUPP)
    }

    fn access(&self, caller: &Caller<'_>, ino: InodeId, what: u32) -> Result<()> {
        let node = self.node(ino)?;
        let is_dir = node.kind == S_IFDIR;
        let bits = [
            (4, access::READ),
            (2, access::MODIFY),
            (1, if is_dir { access::LOOKUP } else { access::EXECUTE }),
        ];
        let bits =
            bits.iter().filter(|(bit, _)| what & bit != 0).fold(0, |all, (_, bit)| all | bit);
        if bits == 0 {
            return self.getattr(caller, ino).map(drop);
        }
        let may = self.proto.access(&cred(caller), &node.fh, bits)?;
        if may & bits == bits { Ok(()) } else { Err(Errno::ACCES) }
    }

    fn keeps_locks(&self) -> bool {
        self.locks
    }

    fn lock(&self, ino: InodeId, lock: &Lock, _: u64) -> Result<()> {
        self.proto.lock(&self.locked(ino, lock.kind)?, lock)?;
        if lock.kind != LockKind::Write {
            let (event, changed) = &self.lock_event;
            *event.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            changed.notify_all();
        }
        Ok(())
    }

    fn test_lock(&self, ino: InodeId, lock: &Lock) -> Result<Option<Lock>> {
        self.proto.test_lock(&self.locked(ino, lock.kind)?, lock)
    }

    /// No server tells us: who waits asks again, soon.
    fn lock_event(&self) -> Result<u64> {
        if !self.locks {
            return Err(Errno::NOSYS);
        }
        self.proto.tend_locks();
        Ok(*self.lock_event.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn await_lock_event(&self, seen: u64, limit_ms: u64) {
        let (event, changed) = &self.lock_event;
        let event = event.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = LOCK_POLL.min(Duration::from_millis(limit_ms));
        let wait = changed.wait_timeout_while(event, limit, |event| *event == seen);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    fn forget(&self, ino: InodeId, told: &dyn Fn() -> bool) {
        let mut table = self.table();
        if !told() {
            table.forget(ino);
        }
    }

    fn keeps(&self, ino: InodeId) -> bool {
        self.table().keeps(ino)
    }
}

impl NfsFs {
    /// The directory above one that is not the root.
    fn above(&self, cred: &Cred, dir: &Node) -> Result<InodeId> {
        match self.proto.lookup(cred, &dir.fh, b"..") {
            Ok((_, facts)) if facts.fsid == self.root_fsid => {
                Ok(InodeId(self.table().swap(facts.fileid)))
            }
            // It may not be looked at; then it is not looked at.
            Ok(_) | Err(Errno::ACCES | Errno::PERM | Errno::NOENT | Errno::OPNOTSUPP) => {
                Ok(InodeId::ROOT)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_go_there_and_back() {
        for n in [1, 2, 3, 4, 1 << 40, i64::MAX.cast_unsigned()] {
            assert_eq!(cookie(n).map(server_cookie), Ok(n));
            assert!(cookie(n).unwrap() > COOKIE_DOT_DOT);
        }
        assert_eq!((cookie(0), cookie(1 << 63)), (Err(Errno::OVERFLOW), Err(Errno::OVERFLOW)));
        assert_eq!((server_cookie(0), server_cookie(1), server_cookie(2)), (0, 0, 0));
    }
}
