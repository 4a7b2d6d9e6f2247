//! Inodes of snapshots ([`InodeId::of_snapshot`]): they never change, so that no lease is had of them. What is asked about one
//! goes to the service, which answers from the state that the snapshot keeps, and nothing of it is among the inodes of
//! this process; whatever would change one is EROFS.
//!
//! The answers are remembered for a moment ([`KNOWN_MS`]), and no longer, since a snapshot may be removed. Its
//! slot may then be another's: a number that is asked for later means what is in that one.
//!
//! Locks: whoever locks for reading has the lock, since nobody can have one against it; who asks for an exclusive one is
//! told ENOLCK.

use alloc::sync::Arc;
use alloc::vec::Vec;

use base::{Errno, InodeId, Sequence};
use storage::acl::is_acl;
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, name_is_legal};
use storage::format::page::Key;
use storage::format::proof::Proof;
use storage::format::rpc::{self, Differences, InodeRecord, InodeReply, Request, SnapshotRecord};
use storage::limits::NAME_MAX;

use super::host::Host;
use super::inode::{Inode, Map, attr};
use super::kernel::now_ms;
use super::names::search;
use super::permission::{R, W, X, may};
use super::session::Session;
use super::sync::RwLock;
use super::turn::{Ask, parse_inode};
use super::xattrs::{visible_to, xattr_rules};
use super::{LibFsOn, Open, acl};
use crate::fs::{
    Attr, Caller, DirEntry, Handle, Lock, LockKind, O_ACCMODE, O_DIRECTORY, O_RDONLY, O_TRUNC,
    Result, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, Whence, check_own_name,
};

/// For how many milliseconds an answer is remembered.
pub const KNOWN_MS: u64 = 1000;
/// Answers remembered.
const KNOWN_MAX: usize = 4096;
/// Directories above the one that a snapshot shows, at most: far more than there are.
const DEPTH_MAX: usize = 1 << 20;

/// What was answered about an inode.
#[derive(Debug)]
struct Known {
    record: InodeRecord,
    target: Vec<u8>,
    proof: Proof,
}

/// Something remembered until then, in milliseconds of the clock of this process.
#[derive(Debug)]
struct Until<T> {
    at: u64,
    value: T,
}

/// What is remembered of snapshots.
#[derive(Debug)]
pub struct Snapshots<H: Host> {
    inodes: RwLock<Map<u64, Until<Arc<Known>>>, H>,
    /// Names, and the directory that each shows.
    names: RwLock<Map<Vec<u8>, Until<InodeId>>, H>,
}

impl<H: Host> Default for Snapshots<H> {
    fn default() -> Self {
        Self { inodes: RwLock::default(), names: RwLock::default() }
    }
}

impl<H: Host> Snapshots<H> {
    fn forget(&self) {
        self.inodes.write().clear();
        self.names.write().clear();
    }
}

/// Remembers, and no more than so many: what is over goes first, or else all.
fn put<K: core::hash::Hash + Eq, T>(map: &mut Map<K, Until<T>>, key: K, value: T, now: u64) {
    if map.len() >= KNOWN_MAX {
        map.retain(|_, known| known.at > now);
        if map.len() >= KNOWN_MAX {
            map.clear();
        }
    }
    map.insert(key, Until { at: now + KNOWN_MS, value });
}

/// Whether an inode is one of a snapshot.
pub const fn is_in_one(ino: InodeId) -> bool {
    ino.of_snapshot().is_some()
}

/// Whether these may be changed.
///
/// # Errors
/// EROFS: one of them is in a snapshot.
pub fn writable(inodes: &[InodeId]) -> Result<()> {
    if inodes.iter().any(|ino| is_in_one(*ino)) { Err(Errno::ROFS) } else { Ok(()) }
}

/// What the service says about snapshots, up to the end of a reply.
fn take_records(body: &[u8]) -> Result<Vec<SnapshotRecord>> {
    let mut r = rpc::reply_status(body).map_err(|_| Errno::IO)?.1;
    let mut all = Vec::new();
    while r.left() > 0 {
        all.push(SnapshotRecord::decode(&mut r).map_err(|_| Errno::IO)?);
    }
    Ok(all)
}

/// The directory that a snapshot shows, as it is there.
fn root(record: &SnapshotRecord) -> InodeId {
    record.dir.in_snapshot(record.slot)
}

impl<H: Host> LibFsOn<H> {
    /// Asks what does not depend on what this client does meanwhile.
    fn ask_of_snapshot<T>(
        &self,
        mut ask: impl FnMut(&'static Session<H>) -> Result<T>,
    ) -> Result<T> {
        self.run(|turn| Ok(ask(turn.session)?))
    }

    fn call_of_snapshot(&self, request: &Request<'_>) -> Result<Vec<u8>> {
        self.ask_of_snapshot(|session| {
            let mut body = Vec::new();
            session.call(request, Sequence(0), &mut body)?;
            Ok(body)
        })
    }

    /// Snapshots with a higher number, as many as the service tells at a time.
    pub(super) fn do_snapshots(&self, after: u64) -> Result<Vec<SnapshotRecord>> {
        let (body, session) = self.ask_of_snapshot(|session| {
            let mut body = Vec::new();
            session.call(&Request::Snapshots { after }, Sequence(0), &mut body)?;
            Ok((body, session))
        })?;
        let all = take_records(&body)?;
        if all.iter().any(|record| record.number <= after) {
            // It would go on for ever.
            return Err(Errno::IO);
        }
        all.iter().for_each(|record| session.remember_proof(root(record), record.proof));
        Ok(all)
    }

    /// The first snapshot of which that is so.
    fn find_snapshot(
        &self,
        is_it: impl Fn(&SnapshotRecord) -> bool,
    ) -> Result<Option<SnapshotRecord>> {
        let mut after = 0;
        loop {
            let some = self.do_snapshots(after)?;
            let Some(last) = some.last() else { return Ok(None) };
            after = last.number;
            if let Some(found) = some.into_iter().find(&is_it) {
                return Ok(Some(found));
            }
        }
    }

    /// The directory that the snapshot of that name shows, for who could come so far.
    pub(super) fn do_snapshot(&self, caller: &Caller<'_>, name: &[u8]) -> Result<InodeId> {
        let root = self.snapshot_named(name)?;
        // The service has judged so for who has begun the session, who may be another.
        let mut at = self.known_in_snapshot(root)?;
        for _ in 0..DEPTH_MAX {
            let above = at.record.parent;
            if caller.uid == 0 || above == at.record.ino || !is_in_one(above) {
                return Ok(root);
            }
            at = self.known_in_snapshot(above)?;
            may(caller, &at.record, X)?;
        }
        Err(Errno::LOOP)
    }

    /// The same for everybody. That there is one is remembered for a moment; that there is none is not.
    fn snapshot_named(&self, name: &[u8]) -> Result<InodeId> {
        let now = now_ms::<H>();
        if let Some(known) = self.snapshots.names.read().get(name)
            && known.at > now
        {
            return Ok(known.value);
        }
        let found = self.find_snapshot(|record| record.name == name)?.ok_or(Errno::NOENT)?;
        put(&mut self.snapshots.names.write(), name.to_vec(), root(&found), now);
        Ok(root(&found))
    }

    /// Makes a snapshot of a directory.
    pub(super) fn do_make_snapshot(
        &self,
        caller: &Caller<'_>,
        dir: InodeId,
        name: &[u8],
    ) -> Result<()> {
        if caller.uid != 0 {
            return Err(Errno::PERM);
        }
        check_own_name(name, Errno::INVAL)?;
        writable(&[dir])?;
        let is_dir = |mode: u32| mode & S_IFMT == S_IFDIR;
        if !is_dir(self.attr_of(dir)?.mode) {
            return Err(Errno::NOTDIR);
        }
        // (The service judges; what can be known before need not be among what it has refused.)
        if self.find_snapshot(|record| record.name == name)?.is_some() {
            return Err(Errno::EXIST);
        }
        self.change_snapshots(&Op::Snapshot { ino: dir, name }, name, true)
    }

    /// Gives a snapshot up.
    pub(super) fn do_drop_snapshot(&self, caller: &Caller<'_>, name: &[u8]) -> Result<()> {
        if caller.uid != 0 {
            return Err(Errno::PERM);
        }
        check_own_name(name, Errno::INVAL)?;
        let found = self.find_snapshot(|record| record.name == name)?.ok_or(Errno::NOENT)?;
        let dropped =
            self.change_snapshots(&Op::DropSnapshot { ino: found.dir, name }, name, false);
        self.snapshots.forget();
        dropped
    }

    /// What one snapshot has otherwise than an earlier one, as much as the service tells at a time.
    pub(super) fn do_differences(
        &self,
        before: u64,
        number: u64,
        from: Key,
    ) -> Result<Differences> {
        let body = self.call_of_snapshot(&Request::Differences { before, number, from })?;
        let mut r = rpc::reply_status(&body).map_err(|_| Errno::IO)?.1;
        let told = Differences::decode(&mut r).map_err(|_| Errno::IO)?;
        // It would go on for ever. (In the middle of a file's content the kind has another bit.)
        let place = |key: Key| (key.ino, key.kind & 0x7f, key.item);
        let stands = told.next.is_some_and(|next| place(next) <= place(from));
        if stands { Err(Errno::IO) } else { Ok(told) }
    }

    /// Appends an operation that touches no inode, and returns when the service has judged it. `there`: whether there is
    /// a snapshot of that name afterwards.
    fn change_snapshots(&self, op: &Op<'_>, name: &[u8], there: bool) -> Result<()> {
        let mut before = self.refusals();
        let (number, own) = self.run(|turn| {
            let now = Self::now(&[]);
            Self::count_in(&mut before, turn.session);
            let place = self.log(turn, 0, &[], op, now)?;
            Ok((turn.session.number, place.sequence))
        })?;
        let judged = self.run(|turn| {
            let session = turn.session;
            let Some((_, refusals)) = before.filter(|_| session.number == number) else {
                return Ok(false);
            };
            // There are none with a higher number: the answer, which reflects the operation, is all that is asked for.
            let mut body = Vec::new();
            session.call(&Request::Snapshots { after: u64::MAX }, own, &mut body)?;
            if session.refusals() == refusals || session.others(refusals, (own, own)) {
                return Ok(true);
            }
            Err(session.refusal().into())
        })?;
        // The session has ended in between: whether the operation was taken shows in what there is.
        if !judged && self.find_snapshot(|record| record.name == name)?.is_some() != there {
            return Err(Errno::IO);
        }
        Ok(())
    }

    /// What the service says of an inode of a snapshot.
    fn known_in_snapshot(&self, ino: InodeId) -> Result<Arc<Known>> {
        let now = now_ms::<H>();
        if let Some(known) = self.snapshots.inodes.read().get(&ino.0)
            && known.at > now
        {
            return Ok(Arc::clone(&known.value));
        }
        let known =
            self.ask_about(&Request::Inode { ino, mode: LeaseMode::None, flags: 0 }, now)?;
        if known.record.ino == ino { Ok(known) } else { Err(Errno::IO) }
    }

    /// Puts a question whose answer is an inode of a snapshot.
    fn ask_about(&self, request: &Request<'_>, now: u64) -> Result<Arc<Known>> {
        let (reply, session) = self.ask_of_snapshot(|session| {
            let mut body = Vec::new();
            session.call(request, Sequence(0), &mut body)?;
            Ok((parse_inode(&body)?, session))
        })?;
        let InodeReply { record, target, proof, parent_proof, .. } = reply;
        if !is_in_one(record.ino) {
            return Err(Errno::IO);
        }
        session.remember_proof(record.ino, proof);
        self.proofs.put(record.parent, parent_proof);
        let ino = record.ino.0;
        let known = Arc::new(Known { record, target, proof });
        put(&mut self.snapshots.inodes.write(), ino, Arc::clone(&known), now);
        Ok(known)
    }

    pub(super) fn snapshot_attr(&self, ino: InodeId) -> Result<Attr> {
        self.known_in_snapshot(ino).map(|known| attr(&known.record))
    }

    pub(super) fn snapshot_lookup(
        &self,
        caller: &Caller<'_>,
        dir: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        let known = self.known_in_snapshot(dir)?;
        search(caller, &known.record)?;
        match name {
            b"." => return Ok(attr(&known.record)),
            b".." => return self.snapshot_attr(self.above_in_snapshot(&known.record)?),
            _ if name.len() > NAME_MAX => return Err(Errno::NAMETOOLONG),
            _ if !name_is_legal(name) => return Err(Errno::NOENT),
            _ => {}
        }
        let request = Request::Lookup { dir, name, mode: LeaseMode::None, flags: 0 };
        self.ask_about(&request, now_ms::<H>()).map(|known| attr(&known.record))
    }

    /// The directory above one; of that which the snapshot shows, itself.
    fn above_in_snapshot(&self, record: &InodeRecord) -> Result<InodeId> {
        let found = self.find_snapshot(|one| root(one) == record.ino)?;
        let leads = found.is_none() && is_in_one(record.parent);
        Ok(if leads { record.parent } else { record.ino })
    }

    pub(super) fn snapshot_readlink(&self, ino: InodeId) -> Result<Vec<u8>> {
        let known = self.known_in_snapshot(ino)?;
        match known.record.mode & S_IFMT {
            S_IFLNK => Ok(known.target.clone()),
            _ => Err(Errno::INVAL),
        }
    }

    /// Who may use it; who may write to it may not. A device or a pipe is another matter: what is written there is none of
    /// the volume's.
    pub(super) fn snapshot_access(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        what: u32,
    ) -> Result<()> {
        let known = self.known_in_snapshot(ino)?;
        may(caller, &known.record, what)?;
        let kept = matches!(known.record.mode & S_IFMT, S_IFREG | S_IFDIR | S_IFLNK);
        if kept && what & W != 0 { Err(Errno::ROFS) } else { Ok(()) }
    }

    pub(super) fn snapshot_open(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        flags: u32,
    ) -> Result<Handle> {
        let known = self.known_in_snapshot(ino)?;
        match known.record.mode & S_IFMT {
            S_IFREG => {}
            S_IFDIR => return Err(Errno::ISDIR),
            _ => return Err(Errno::NXIO),
        }
        if flags & O_ACCMODE != O_RDONLY || flags & O_TRUNC != 0 {
            return Err(Errno::ROFS);
        }
        may(caller, &known.record, R)?;
        Ok(self.open_in_snapshot(ino, O_RDONLY))
    }

    pub(super) fn snapshot_open_dir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        what: u32,
    ) -> Result<Handle> {
        let known = self.known_in_snapshot(ino)?;
        if known.record.mode & S_IFMT != S_IFDIR {
            return Err(Errno::NOTDIR);
        }
        may(caller, &known.record, what)?;
        Ok(self.open_in_snapshot(ino, O_DIRECTORY))
    }

    /// An open file of which nobody is told: it keeps nothing, and its inode is not among those that are remembered.
    fn open_in_snapshot(&self, ino: InodeId, flags: u32) -> Handle {
        self.open_handle(Arc::new(Inode::new(ino)), flags)
    }

    pub(super) fn snapshot_read(
        &self,
        open: &Open<H>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<usize> {
        let (ino, mut done) = (open.inode.ino, 0);
        while done < buf.len() {
            let at = offset.saturating_add(done as u64);
            let len = (buf.len() - done).min(self.config.limits.remote_read);
            let request = Request::Read { ino, offset: at, len: len as u32 };
            let body = match self.call_of_snapshot(&request) {
                // What was read before counts.
                Err(_) if done > 0 => break,
                body => body?,
            };
            let bytes = body.get(8..).unwrap_or_default();
            let n = bytes.len().min(len);
            buf[done..done + n].copy_from_slice(&bytes[..n]);
            done += n;
            if n == 0 {
                break;
            }
        }
        Ok(done)
    }

    /// All of it is data, up to its end: where nothing lies the service does not tell.
    pub(super) fn snapshot_seek(&self, open: &Open<H>, offset: u64, whence: Whence) -> Result<u64> {
        let size = self.known_in_snapshot(open.inode.ino)?.record.size;
        match whence {
            _ if offset >= size => Err(Errno::NXIO),
            Whence::Data => Ok(offset),
            Whence::Hole => Ok(size),
        }
    }

    pub(super) fn snapshot_readdir(
        &self,
        caller: &Caller<'_>,
        dir: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let known = self.known_in_snapshot(dir)?;
        if known.record.mode & S_IFMT != S_IFDIR {
            return Err(Errno::NOTDIR);
        }
        may(caller, &known.record, R)?;
        let mut cookie = cookie;
        loop {
            let start = cookie;
            let body = self.call_of_snapshot(&Request::Names { dir, cookie })?;
            let mut r = rpc::reply_status(&body).map_err(|_| Errno::IO)?.1;
            let end = r.u8().map_err(|_| Errno::IO)? != 0;
            while r.left() > 0 {
                let rpc::Name { ino, kind, next, proof, name } =
                    rpc::take_name(&mut r).map_err(|_| Errno::IO)?;
                self.proofs.put(ino, proof);
                cookie = next;
                if !each(&DirEntry { ino, kind, next, name }) {
                    return Ok(());
                }
            }
            if end || cookie == start {
                return Ok(());
            }
        }
    }

    pub(super) fn snapshot_getxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
    ) -> Result<Vec<u8>> {
        let known = self.known_in_snapshot(ino)?;
        if is_acl(name) {
            return acl::value(&known.record, name);
        }
        xattr_rules(caller, &known.record, name, R)?;
        if !known.record.xattrs {
            return Err(Errno::NODATA);
        }
        self.xattrs_in_snapshot(&Ask::Xattr { ino, name: name.to_vec() })
    }

    pub(super) fn snapshot_listxattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        if !self.known_in_snapshot(ino)?.record.xattrs {
            return Ok(Vec::new());
        }
        self.xattrs_in_snapshot(&Ask::Xattrs { ino }).map(|names| visible_to(caller, names))
    }

    fn xattrs_in_snapshot(&self, what: &Ask) -> Result<Vec<u8>> {
        self.ask_of_snapshot(|session| {
            let mut body = Vec::new();
            match session.call(&what.request(), Sequence(0), &mut body) {
                Err(Errno::TOOBIG) => Self::in_parts(session, what, Sequence(0)),
                asked => asked.map(|()| body.split_off(8)),
            }
        })
    }

    /// See the module.
    pub(super) fn snapshot_lock(&self, ino: InodeId, lock: &Lock) -> Result<()> {
        self.known_in_snapshot(ino)?;
        if lock.kind == LockKind::Write { Err(Errno::NOLCK) } else { Ok(()) }
    }

    /// The proof of an inode of a snapshot, also where none is needed.
    pub(super) fn snapshot_proof(&self, ino: InodeId) -> Result<u64> {
        self.known_in_snapshot(ino).map(|known| known.proof.0)
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn nothing_of_a_snapshot_may_be_changed() {
        let (here, there) = (InodeId(9), InodeId(9).in_snapshot(0x7fff));
        assert!(!is_in_one(here) && is_in_one(there));
        assert_eq!(writable(&[here, InodeId::ROOT]), Ok(()));
        assert_eq!(writable(&[here, there]), Err(Errno::ROFS));
        // The numbers of what a mount makes up itself are none of a snapshot.
        assert!(!is_in_one(InodeId(1 << 63 | 1)));
    }

    #[test]
    fn what_is_over_goes_first_and_never_are_there_more_than_so_many() {
        let mut map: Map<u64, Until<u64>> = Map::default();
        for n in 0..KNOWN_MAX as u64 {
            put(&mut map, n, n, n / 2);
        }
        let now = KNOWN_MS + 1;
        put(&mut map, u64::MAX, 7, now);
        assert!(map[&u64::MAX].at > now && map.values().all(|known| known.at > now));
        assert!(map.len() > 1 && map.len() < KNOWN_MAX, "only what was over went");
        for n in 0..=KNOWN_MAX as u64 {
            put(&mut map, n, n, now);
        }
        assert!(map.len() <= KNOWN_MAX && map.contains_key(&(KNOWN_MAX as u64)));
    }

    #[test]
    fn a_reply_is_read_whole_or_not_at_all() {
        let record = |number| SnapshotRecord {
            number,
            slot: 3,
            dir: InodeId(7),
            time: 1,
            inodes: 2,
            own_blocks: 4,
            proof: Proof(5),
            name: b"name".to_vec(),
        };
        let mut body = Vec::new();
        rpc::reply_ok(&mut body);
        assert_eq!(take_records(&body), Ok(vec![]));
        record(1).encode(&mut body);
        record(2).encode(&mut body);
        assert_eq!(take_records(&body), Ok(vec![record(1), record(2)]));
        assert_eq!(root(&record(1)).of_snapshot(), Some((3, InodeId(7))));
        body.pop();
        assert_eq!(take_records(&body), Err(Errno::IO));
    }
}
