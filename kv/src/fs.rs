//! The file system over the script's operations.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use client::fs::{
    Attr, Caller, DirEntry, FileSystem, Handle, NAME_MAX, NewNode, O_ACCMODE, O_APPEND, O_EXCL,
    O_RDONLY, O_TRUNC, O_WRONLY, Rename, Result, S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK,
    S_IFMT, S_IFREG, S_IFSOCK, SetAttr, SetTime, StatFs, Time, Whence, Written, XattrMode,
    check_name, check_own_name, falloc,
};

use crate::link::{Address, Links};
use crate::resp::Reply;

const TARGET_MAX: usize = 4095;
const XATTR_NAME_MAX: usize = 255;
const XATTR_BYTES_MAX: usize = 65_536;
const XATTRS_MAX: &[u8] = b"256";
/// Offsets stay exact in the script, whose numbers are doubles.
const FILE_MAX: u64 = 1 << 50;
/// Bytes that one request carries.
const IO_MAX: usize = 1 << 20;
/// Names of one request.
const LIST_MAX: usize = 256;
const COOKIE_DOT: u64 = 1;
const COOKIE_DOT_DOT: u64 = 2;
/// Inodes of one request that says that they are open.
const KEEP_MAX: usize = 1000;
/// A guest may ask as often as it likes how much room there is; the server is asked once in so long.
const SPACE_KEPT: Duration = Duration::from_secs(1);
/// Steps that the keeper takes at once, to give space back.
const REAP_MAX: usize = 256;
/// Turns of the keeper in which it has nothing to do itself, before it looks what others have left.
const IDLE_TURNS: u32 = 12;

/// What a file system is made with; one that is there keeps what it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Bytes of a piece of a file.
    pub piece: u32,
    /// Seconds for which a file lives that has no name and of whose opener nothing is heard.
    pub grace: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { piece: 64 << 10, grace: 15 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Open {
    ino: InodeId,
    mode: u32,
    append: bool,
}

#[derive(Default)]
struct State {
    open: HashMap<u64, Open>,
    last: u64,
    /// Something lost its last name by us: its space is to be given back.
    left: bool,
    /// What the server had room for, and when it said so.
    space: Option<(StatFs, Instant)>,
    ended: bool,
}

struct Inner {
    links: Links,
    piece: u64,
    turn: Duration,
    state: Mutex<State>,
    end: Condvar,
}

/// A file system on a key-value server.
pub struct KvFs {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for KvFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvFs").field("links", &self.inner.links).finish_non_exhaustive()
    }
}

fn check_end(offset: u64, len: u64) -> Result<u64> {
    offset.checked_add(len).filter(|end| *end <= FILE_MAX).ok_or(Errno::FBIG)
}

fn text(n: impl ToString) -> Vec<u8> {
    n.to_string().into_bytes()
}

fn flag(on: bool) -> &'static [u8] {
    if on { b"1" } else { b"0" }
}

fn time(bytes: &[u8]) -> Option<Time> {
    let (sec, nsec) = std::str::from_utf8(bytes).ok()?.split_once('.')?;
    let nsec = nsec.parse().ok().filter(|nsec| *nsec < 1_000_000_000)?;
    Some(Time { sec: sec.parse().ok()?, nsec })
}

fn time_text(time: SetTime) -> Result<Vec<u8>> {
    match time {
        SetTime::Now => Ok(b"now".to_vec()),
        SetTime::At(Time { nsec: 1_000_000_000.., .. }) => Err(Errno::INVAL),
        SetTime::At(Time { sec, nsec }) => Ok(format!("{sec}.{nsec:09}").into_bytes()),
    }
}

/// What permission an open needs.
fn what(flags: u32) -> Result<u32> {
    let what = match flags & O_ACCMODE {
        O_RDONLY => 4,
        O_WRONLY => 2,
        2 => 6,
        _ => return Err(Errno::INVAL),
    };
    Ok(if flags & O_TRUNC != 0 { what | 2 } else { what })
}

/// The next of an operation's answers. A server that gives less is none of ours.
fn next(answers: &mut std::vec::IntoIter<Reply>) -> Result<Reply> {
    answers.next().ok_or(Errno::IO)
}

fn number<T: std::str::FromStr>(reply: &Reply) -> Result<T> {
    reply.number().ok_or(Errno::IO)
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(
        &self,
        op: &str,
        caller: &Caller<'_>,
        args: &[&[u8]],
    ) -> Result<std::vec::IntoIter<Reply>> {
        Ok(self.links.call(op, caller, args, false)?.into_iter())
    }

    fn change(
        &self,
        op: &str,
        caller: &Caller<'_>,
        args: &[&[u8]],
    ) -> Result<std::vec::IntoIter<Reply>> {
        Ok(self.links.call(op, caller, args, true)?.into_iter())
    }

    fn attr(&self, reply: Reply) -> Result<Attr> {
        let Reply::Array(fields) = reply else { return Err(Errno::IO) };
        let [ino, mode, nlink, uid, gid, rdev, size, pieces, a, m, c, b] = &fields[..] else {
            return Err(Errno::IO);
        };
        let moment = |reply: &Reply| match reply {
            Reply::Bytes(Some(bytes)) => time(bytes).ok_or(Errno::IO),
            _ => Err(Errno::IO),
        };
        let pieces: u64 = number(pieces)?;
        Ok(Attr {
            ino: InodeId(number(ino)?),
            mode: number(mode)?,
            nlink: number(nlink)?,
            uid: number(uid)?,
            gid: number(gid)?,
            rdev: number(rdev)?,
            size: number(size)?,
            blocks: pieces.saturating_mul(self.piece).div_ceil(512),
            atime: moment(a)?,
            mtime: moment(m)?,
            ctime: moment(c)?,
            btime: moment(b)?,
            learnt: 0,
        })
    }

    fn open(&self, handle: Handle) -> Result<Open> {
        self.state().open.get(&handle.0).copied().ok_or(Errno::BADF)
    }

    fn to_write(&self, handle: Handle) -> Result<Open> {
        self.open(handle)
            .and_then(|open| if open.mode == O_RDONLY { Err(Errno::BADF) } else { Ok(open) })
    }

    fn register(&self, ino: InodeId, flags: u32) -> Handle {
        let mut state = self.state();
        state.last += 1;
        let number = state.last;
        let (mode, append) = (flags & O_ACCMODE, flags & O_APPEND != 0);
        state.open.insert(number, Open { ino, mode, append });
        Handle(number)
    }

    /// Cuts or extends, in as many steps as it takes.
    fn truncate(&self, caller: &Caller<'_>, ino: InodeId, size: u64, checked: bool) -> Result<()> {
        let (ino, size) = (text(ino.0), text(check_end(0, size)?));
        loop {
            let args: [&[u8]; 3] = [&ino, &size, flag(checked)];
            let mut answers = self.change("truncate", caller, &args)?;
            if number::<u8>(&next(&mut answers)?)? == 1 {
                return Ok(());
            }
        }
    }

    /// An operation that cuts a file and did not get to its end says so; it is made again.
    fn again<T>(&self, mut run: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match run() {
                Err(Errno(u16::MAX)) => {}
                done => return done,
            }
        }
    }

    fn punch(&self, ino: InodeId, offset: u64, end: u64) -> Result<()> {
        let (ino, end) = (text(ino.0), text(end));
        let mut at = text(offset);
        loop {
            let mut answers = self.change("punch", &Caller::ROOT, &[&ino, &at, &end])?;
            match next(&mut answers)?.bytes() {
                Some(more) if !more.is_empty() => at = more,
                _ => return Ok(()),
            }
        }
    }

    /// One turn of the keeper.
    fn keep(&self, idle: &mut u32) -> Result<()> {
        let (mut open, left) = {
            let mut state = self.state();
            let open: Vec<u64> = state.open.values().map(|open| open.ino.0).collect();
            (open, std::mem::take(&mut state.left))
        };
        open.sort_unstable();
        open.dedup();
        for some in open.chunks(KEEP_MAX) {
            let inos: Vec<Vec<u8>> = some.iter().map(text).collect();
            let args: Vec<&[u8]> = inos.iter().map(Vec::as_slice).collect();
            self.links.call("keep", &Caller::ROOT, &args, true)?;
        }
        *idle += 1;
        if !left && *idle < IDLE_TURNS {
            return Ok(());
        }
        *idle = 0;
        for _ in 0..REAP_MAX {
            let more = self.links.call("reap", &Caller::ROOT, &[], true)?;
            if more.first().and_then(Reply::number::<u8>) != Some(1) {
                break;
            }
        }
        // What has just lost its name is not to be had yet.
        let answers = self.links.call("count", &Caller::ROOT, &[], false)?;
        if answers.get(1).and_then(Reply::number::<u64>).is_some_and(|orphans| orphans > 0) {
            self.state().left = true;
        }
        Ok(())
    }
}

/// The body of the keeper's thread.
fn tend(inner: &Weak<Inner>) {
    let mut idle = 0;
    loop {
        let Some(inner) = inner.upgrade() else { return };
        {
            let state = inner.state();
            let (state, _) =
                inner.end.wait_timeout(state, inner.turn).unwrap_or_else(PoisonError::into_inner);
            if state.ended {
                drop(state);
                inner.links.end();
                return;
            }
        }
        if let Err(error) = inner.keep(&mut idle) {
            log::warn!("telling the server what is open: {error:?}");
        }
    }
}

static MADE: AtomicU64 = AtomicU64::new(0);

impl KvFs {
    /// The file system at an address; it is made if there is none.
    ///
    /// # Errors
    /// In words: no server there, one that would throw keys away, or a file system of another version.
    pub fn open(address: Address, options: Options) -> std::result::Result<Self, String> {
        let place = address.place.to_string();
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
        let own = format!(
            "{:x}-{seed:016x}-{:x}",
            std::process::id(),
            MADE.fetch_add(1, Ordering::Relaxed)
        );
        let links = Links::new(address, own);
        look_at(&links, &place)?;
        if options.piece < 4096 || options.piece > IO_MAX as u32 || options.grace == 0 {
            return Err("pieces of 4 KiB to 1 MiB, and a grace of a second or more".into());
        }
        let (piece, grace) = (text(options.piece), text(options.grace));
        let begun = links.call("begin", &Caller::ROOT, &[&piece, &grace], true).map_err(|e| {
            let version = "the file system there is of another version";
            let may = "it does not let us run scripts: the user needs +script|load +evalsha +eval, and what the script does";
            let what = match e {
                Errno::PROTONOSUPPORT => version.into(),
                Errno::ACCES => may.into(),
                other => format!("{other:?}"),
            };
            format!("{place}: {what}")
        })?;
        let field = |at: usize| begun.get(at).and_then(Reply::number::<u64>);
        let (piece, grace) = field(1)
            .zip(field(2))
            .filter(|(piece, _)| (1..=IO_MAX as u64).contains(piece))
            .filter(|(_, grace)| (1..=u64::from(u32::MAX)).contains(grace))
            .ok_or_else(|| format!("{place}: what is there is no file system of ours"))?;
        let turn = Duration::from_millis(grace * 1000 / 3);
        let (state, end) = (Mutex::default(), Condvar::new());
        let inner = Arc::new(Inner { links, piece, turn, state, end });
        let keeper = Arc::downgrade(&inner);
        std::thread::Builder::new()
            .name("kv-keeper".into())
            .spawn(move || tend(&keeper))
            .map_err(|e| format!("a thread: {e}"))?;
        Ok(Self { inner })
    }

    /// Lets the keeper do a turn now: for tests.
    ///
    /// # Errors
    /// The server refused.
    pub fn tend(&self) -> Result<()> {
        self.inner.keep(&mut IDLE_TURNS.saturating_sub(1))
    }

    /// How many inodes are there that have no name.
    ///
    /// # Errors
    /// The server refused.
    pub fn orphans(&self) -> Result<u64> {
        let mut answers = self.inner.ask("count", &Caller::ROOT, &[])?;
        let _ = next(&mut answers)?;
        number(&next(&mut answers)?)
    }
}

/// Refuses a server on which files would not be safe, and says what it promises.
fn look_at(links: &Links, place: &str) -> std::result::Result<(), String> {
    let ask = |parts: &[&[u8]]| links.once(parts).map_err(|e| format!("{place}: {e}"));
    match ask(&[b"PING"])? {
        Reply::Status(pong) if pong == "PONG" => {}
        Reply::Error(text) => return Err(format!("{place}: {text}")),
        _ => return Err(format!("{place}: no server of the Redis protocol")),
    }
    let get = |key: &str| match ask(&[b"CONFIG", b"GET", key.as_bytes()])? {
        Reply::Array(pair) => Ok(pair.into_iter().nth(1).and_then(Reply::bytes)),
        // Servers that are somebody else's often say nothing of themselves.
        _ => Ok(None),
    };
    let get = |key: &str| {
        let value: std::result::Result<_, String> = get(key);
        Ok::<_, String>(value?.map(|value| String::from_utf8_lossy(&value).into_owned()))
    };
    if let (Some(most), Some(policy)) = (get("maxmemory")?, get("maxmemory-policy")?)
        && most != "0"
        && policy != "noeviction"
    {
        return Err(format!(
            "{place}: it throws keys away when memory is short (maxmemory-policy {policy}): set noeviction"
        ));
    }
    match (get("appendonly")?.as_deref(), get("appendfsync")?.as_deref()) {
        (Some("yes"), Some("always")) => {}
        (None, _) => log::warn!("{place}: does not say whether it keeps what it has on a disk"),
        (only, sync) => log::warn!(
            "{place}: appendonly {}, appendfsync {}: what was written last is lost with the server, also after fsync",
            only.unwrap_or("?"),
            sync.unwrap_or("?")
        ),
    }
    Ok(())
}

impl KvFs {
    /// Nothing more is asked, though somebody may hold this still: the server need not remember the connections.
    pub fn end(&self) {
        self.inner.state().ended = true;
        self.inner.end.notify_all();
        self.inner.links.end();
    }
}

impl Drop for KvFs {
    fn drop(&mut self) {
        self.end();
    }
}

impl FileSystem for KvFs {
    fn lookup(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<Attr> {
        check_name(name)?;
        let mut answers = self.inner.ask("lookup", caller, &[&text(parent.0), name])?;
        self.inner.attr(next(&mut answers)?)
    }

    fn getattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Attr> {
        let mut answers = self.inner.ask("getattr", caller, &[&text(ino.0)])?;
        self.inner.attr(next(&mut answers)?)
    }

    fn setattr(&self, caller: &Caller<'_>, ino: InodeId, set: &SetAttr) -> Result<Attr> {
        if let Some(size) = set.size {
            if let Some(handle) = set.handle {
                let open = self.inner.open(handle)?;
                if open.mode == O_RDONLY || open.ino != ino {
                    return Err(Errno::INVAL);
                }
            }
            self.inner.truncate(caller, ino, size, set.handle.is_none())?;
        }
        // The change of time that goes with one of size is done.
        let mtime = set.mtime.filter(|time| set.size.is_none() || *time != SetTime::Now);
        if set.mode.is_none() && set.uid.is_none() && set.gid.is_none() {
            if set.atime.is_none() && mtime.is_none() {
                return self.getattr(caller, ino);
            }
        } else if set.mode.is_some() && self.getattr(caller, ino)?.kind() == S_IFLNK {
            return Err(Errno::OPNOTSUPP);
        }
        let number = |value: Option<u32>| value.map(text).unwrap_or_default();
        let moment = |value: Option<SetTime>| value.map(time_text).transpose();
        let args = [
            text(ino.0),
            number(set.mode),
            number(set.uid),
            number(set.gid),
            moment(set.atime)?.unwrap_or_default(),
            moment(mtime)?.unwrap_or_default(),
        ];
        let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
        let mut answers = self.inner.change("setattr", caller, &args)?;
        self.inner.attr(next(&mut answers)?)
    }

    fn readlink(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let mut answers = self.inner.ask("readlink", caller, &[&text(ino.0)])?;
        next(&mut answers)?.bytes().ok_or(Errno::IO)
    }

    fn mknod(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        name: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Attr> {
        check_own_name(name, Errno::EXIST)?;
        let kind = if node.mode & S_IFMT == 0 { S_IFREG } else { node.mode & S_IFMT };
        match kind {
            S_IFREG | S_IFDIR | S_IFLNK | S_IFIFO | S_IFSOCK => {}
            S_IFCHR | S_IFBLK if caller.uid == 0 => {}
            S_IFCHR | S_IFBLK => return Err(Errno::PERM),
            _ => return Err(Errno::INVAL),
        }
        if node.target.len() > TARGET_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let mode = text(kind | node.mode & 0o7777);
        let rdev = if matches!(kind, S_IFCHR | S_IFBLK) { node.rdev } else { 0 };
        let (parent, rdev) = (text(parent.0), text(rdev));
        let target = if kind == S_IFLNK { node.target } else { b"" };
        let args: [&[u8]; 5] = [&parent, name, &mode, &rdev, target];
        let mut answers = self.inner.change("make", caller, &args)?;
        self.inner.attr(next(&mut answers)?)
    }

    fn unlink(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        check_own_name(name, Errno::ISDIR)?;
        self.inner.change("unlink", caller, &[&text(parent.0), name, b"0"])?;
        self.inner.state().left = true;
        Ok(())
    }

    fn rmdir(&self, caller: &Caller<'_>, parent: InodeId, name: &[u8]) -> Result<()> {
        check_own_name(name, if name == b"." { Errno::INVAL } else { Errno::NOTEMPTY })?;
        self.inner.change("unlink", caller, &[&text(parent.0), name, b"1"])?;
        self.inner.state().left = true;
        Ok(())
    }

    fn rename(&self, caller: &Caller<'_>, rename: &Rename<'_>) -> Result<()> {
        check_own_name(rename.name, Errno::BUSY)?;
        check_own_name(rename.new_name, Errno::BUSY)?;
        if rename.flags > 2 {
            return Err(Errno::INVAL);
        }
        let (from, to, flags) =
            (text(rename.parent.0), text(rename.new_parent.0), text(rename.flags));
        let args: [&[u8]; 5] = [&from, rename.name, &to, rename.new_name, &flags];
        self.inner.change("rename", caller, &args)?;
        self.inner.state().left = true;
        Ok(())
    }

    fn link(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        parent: InodeId,
        name: &[u8],
    ) -> Result<Attr> {
        check_own_name(name, Errno::EXIST)?;
        let mut answers =
            self.inner.change("link", caller, &[&text(ino.0), &text(parent.0), name])?;
        self.inner.attr(next(&mut answers)?)
    }

    fn open(&self, caller: &Caller<'_>, ino: InodeId, flags: u32) -> Result<Handle> {
        let (number, what) = (text(ino.0), text(what(flags)?));
        let cuts = flags & O_TRUNC != 0;
        let args: [&[u8]; 3] = [&number, &what, flag(cuts)];
        self.inner.again(|| {
            if cuts {
                self.inner.change("open", caller, &args)
            } else {
                self.inner.ask("open", caller, &args)
            }
        })?;
        Ok(self.inner.register(ino, flags))
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
        let (parent, mode, what) = (text(parent.0), text(mode & 0o7777), text(what(flags)?));
        let (new, cuts) = (flag(flags & O_EXCL != 0), flag(flags & O_TRUNC != 0));
        let args: [&[u8]; 6] = [&parent, name, &mode, &what, new, cuts];
        let mut answers = self.inner.again(|| self.inner.change("create", caller, &args))?;
        let attr = self.inner.attr(next(&mut answers)?)?;
        Ok((attr, self.inner.register(attr.ino, flags)))
    }

    fn tmpfile(
        &self,
        caller: &Caller<'_>,
        parent: InodeId,
        mode: u32,
        flags: u32,
    ) -> Result<(Attr, Handle)> {
        let (parent, mode) = (text(parent.0), text(mode & 0o7777));
        let args: [&[u8]; 3] = [&parent, &mode, flag(flags & O_EXCL == 0)];
        let mut answers = self.inner.change("tmpfile", caller, &args)?;
        let attr = self.inner.attr(next(&mut answers)?)?;
        self.inner.state().left = true;
        Ok((attr, self.inner.register(attr.ino, flags)))
    }

    fn read(&self, handle: Handle, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let open = self.inner.open(handle)?;
        if open.mode == O_WRONLY {
            return Err(Errno::BADF);
        }
        let ino = text(open.ino.0);
        let mut done = 0;
        while done < buf.len() {
            let at = offset.saturating_add(done as u64);
            if at >= FILE_MAX {
                break;
            }
            let asked = (buf.len() - done).min(IO_MAX);
            let (place, len) = (text(at), text(asked));
            let mut answers = self.inner.ask("read", &Caller::ROOT, &[&ino, &place, &len])?;
            let size: u64 = number(&next(&mut answers)?)?;
            let Reply::Array(pieces) = next(&mut answers)? else { return Err(Errno::IO) };
            let there = usize::try_from(size.saturating_sub(at)).unwrap_or(usize::MAX).min(asked);
            let into = &mut buf[done..done + there];
            into.fill(0);
            let mut from = 0;
            for piece in pieces {
                let bytes = piece.bytes().ok_or(Errno::IO)?;
                // Up to where the next piece begins.
                let place = at + from as u64;
                let room = usize::try_from(self.inner.piece - place % self.inner.piece);
                let room = room.unwrap_or(usize::MAX).min(there - from);
                let to = into.get_mut(from..from + bytes.len()).ok_or(Errno::IO)?;
                if bytes.len() > room {
                    return Err(Errno::IO);
                }
                to.copy_from_slice(&bytes);
                from += room;
            }
            done += there;
            if there < asked {
                break;
            }
        }
        Ok(done)
    }

    fn write(&self, handle: Handle, offset: u64, data: &[u8], append: bool) -> Result<Written> {
        let open = self.inner.to_write(handle)?;
        let ino = text(open.ino.0);
        let most = text(FILE_MAX);
        if append || open.append {
            // More than a request carries is written short: what follows may be behind somebody else's.
            let data = &data[..data.len().min(IO_MAX)];
            let args: [&[u8]; 4] = [&ino, b"end", data, &most];
            let mut answers = self.inner.change("write", &Caller::ROOT, &args)?;
            return Ok(Written { len: data.len(), offset: number(&next(&mut answers)?)? });
        }
        check_end(offset, data.len() as u64)?;
        let mut done = 0;
        for part in data.chunks(IO_MAX) {
            let place = text(offset + done as u64);
            let args: [&[u8]; 4] = [&ino, &place, part, &most];
            match self.inner.change("write", &Caller::ROOT, &args) {
                Ok(_) => done += part.len(),
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(Written { len: done, offset })
    }

    fn fallocate(&self, handle: Handle, mode: u32, offset: u64, len: u64) -> Result<()> {
        let open = self.inner.to_write(handle)?;
        let end = check_end(offset, len)?;
        let keeps = mode & falloc::KEEP_SIZE != 0;
        match mode & !falloc::KEEP_SIZE {
            0 => {}
            falloc::PUNCH_HOLE if keeps => return self.inner.punch(open.ino, offset, end),
            falloc::ZERO_RANGE => self.inner.punch(open.ino, offset, end)?,
            _ => return Err(Errno::OPNOTSUPP),
        }
        if !keeps {
            self.inner.change("extend", &Caller::ROOT, &[&text(open.ino.0), &text(end)])?;
        }
        Ok(())
    }

    fn lseek(&self, handle: Handle, offset: u64, whence: Whence) -> Result<u64> {
        let open = self.inner.open(handle)?;
        if offset > FILE_MAX {
            return Err(Errno::NXIO);
        }
        let (ino, place) = (text(open.ino.0), text(offset));
        let args: [&[u8]; 3] = [&ino, &place, flag(whence == Whence::Data)];
        let mut answers = self.inner.ask("seek", &Caller::ROOT, &args)?;
        number(&next(&mut answers)?)
    }

    fn fgetattr(&self, handle: Handle) -> Result<Attr> {
        let open = self.inner.open(handle)?;
        self.getattr(&Caller::ROOT, open.ino)
    }

    /// What was answered was done; how much of a server that dies comes back is for its own configuration to say.
    fn fsync(&self, handle: Handle, _: bool) -> Result<()> {
        self.inner.open(handle).map(drop)
    }

    fn fsync_inode(&self, caller: &Caller<'_>, ino: InodeId) -> Result<()> {
        self.getattr(caller, ino).map(drop)
    }

    fn release(&self, handle: Handle) {
        self.inner.state().open.remove(&handle.0);
    }

    fn readdir(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        cookie: u64,
        each: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let (dir, most) = (text(ino.0), text(LIST_MAX));
        let mut cookie = cookie;
        loop {
            let from = text(cookie.max(COOKIE_DOT_DOT));
            let mut answers = self.inner.ask("list", caller, &[&dir, &from, &most])?;
            let parent = InodeId(number(&next(&mut answers)?)?);
            let count: usize = number(&next(&mut answers)?)?;
            let Reply::Array(found) = next(&mut answers)? else { return Err(Errno::IO) };
            let dots: [(u64, InodeId, &[u8]); 2] =
                [(COOKIE_DOT, ino, b"."), (COOKIE_DOT_DOT, parent, b"..")];
            for (next, ino, name) in dots.into_iter().filter(|dot| dot.0 > cookie) {
                if !each(&DirEntry { ino, kind: S_IFDIR, next, name }) {
                    return Ok(());
                }
            }
            let mut last = 0;
            for entry in found.chunks(4) {
                let [next, ino, kind, Reply::Bytes(Some(name))] = entry else {
                    return Err(Errno::IO);
                };
                last = number(next)?;
                let (ino, kind) = (InodeId(number(ino)?), number(kind)?);
                if !each(&DirEntry { ino, kind, next: last, name }) {
                    return Ok(());
                }
            }
            if count < LIST_MAX {
                return Ok(());
            }
            if last <= cookie {
                return Err(Errno::IO);
            }
            cookie = last;
        }
    }

    fn statfs(&self) -> Result<StatFs> {
        let known = self.inner.state().space;
        if let Some((space, at)) = known
            && at.elapsed() < SPACE_KEPT
        {
            return Ok(space);
        }
        let info = self.inner.links.once(&[b"INFO", b"memory"]).map_err(|_| Errno::IO)?;
        let info = String::from_utf8_lossy(&info.bytes().ok_or(Errno::IO)?).into_owned();
        let field = |name: &str| {
            let mut lines = info.lines().filter_map(|line| line.split_once(':'));
            lines.find(|(key, _)| *key == name).and_then(|(_, value)| value.parse::<u64>().ok())
        };
        let most = field("maxmemory").filter(|most| *most > 0);
        let most = most.or_else(|| field("total_system_memory")).unwrap_or(0);
        let used = field("used_memory").unwrap_or(0);
        let made: u64 = number(&next(&mut self.inner.ask("count", &Caller::ROOT, &[])?)?)?;
        let space = StatFs {
            block_bytes: 4096,
            blocks: most / 4096,
            blocks_free: most.saturating_sub(used) / 4096,
            inodes: 1 << 50,
            inodes_free: (1 << 50) - made.min(1 << 50),
            name_max: NAME_MAX as u32,
        };
        self.inner.state().space = Some((space, Instant::now()));
        Ok(space)
    }

    fn getxattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        let mut answers = self.inner.ask("getxattr", caller, &[&text(ino.0), name])?;
        next(&mut answers)?.bytes().ok_or(Errno::IO)
    }

    fn listxattr(&self, caller: &Caller<'_>, ino: InodeId) -> Result<Vec<u8>> {
        let mut answers = self.inner.ask("listxattr", caller, &[&text(ino.0)])?;
        let Reply::Array(names) = next(&mut answers)? else { return Err(Errno::IO) };
        let names = names.into_iter().filter_map(Reply::bytes);
        Ok(names.flat_map(|name| name.into_iter().chain([0])).collect())
    }

    fn setxattr(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        if name.is_empty() || name.len() > XATTR_NAME_MAX || name.contains(&0) {
            return Err(Errno::RANGE);
        }
        if value.len() > XATTR_BYTES_MAX {
            return Err(Errno::TOOBIG);
        }
        let how: &[u8] = match mode {
            XattrMode::Set => b"0",
            XattrMode::Create => b"1",
            XattrMode::Replace => b"2",
        };
        let args: [&[u8]; 5] = [&text(ino.0), name, value, how, XATTRS_MAX];
        self.inner.change("setxattr", caller, &args).map(drop)
    }

    fn removexattr(&self, caller: &Caller<'_>, ino: InodeId, name: &[u8]) -> Result<()> {
        let args: [&[u8]; 5] = [&text(ino.0), name, b"", b"3", XATTRS_MAX];
        self.inner.change("setxattr", caller, &args).map(drop)
    }

    fn access(&self, caller: &Caller<'_>, ino: InodeId, what: u32) -> Result<()> {
        self.inner.ask("access", caller, &[&text(ino.0), &text(what & 7)]).map(drop)
    }
}
