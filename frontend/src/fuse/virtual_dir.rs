//! The directory `.corbel` in the root of every mount: looked up, never listed.
//!
//! - `inode/NUMBER` is the file with that inode number, under the very node number that its
//!   other names have, so the kernel has one inode for both. The interception library reopens by
//!   it. Directories are not given out: the kernel keeps one name a directory and would move it
//!   here. Who may: [`Options::may_open_by_number`](super::server::Options).
//! - `snapshots` holds the snapshots of the volume. `snapshots/NAME` is the directory that the snapshot shows, as it was then:
//!   an inode with a number of its own, and all below it is served as any other inode, by the rights of then. Nothing
//!   there can be changed (EROFS). The name is never kept, so that one that is removed is gone, and one that is
//!   made is there.
//! - `stats`, `config` and `calls` are texts, made when they are read.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::{Errno, InodeId};
use client::fs::{Attr, DirEntry, FileSystem, Result, S_IFDIR, S_IFREG, Time};

use super::files::Listing;
use super::names::payload;
use super::parse::Args;
use super::reply::{Answer, ReplySink, attr_out, entry_out, statx_out};
use super::server::{Call, IO_BYTES_MAX, Server};
use super::wire::{EntryOut, FOPEN_DIRECT_IO, OpenIn, OpenOut, ReadIn, op};

/// Its name in the root.
pub const NAME: &[u8] = b".corbel";
/// Set in the node numbers of this directory and nowhere else.
const VIRTUAL: u64 = 1 << 63;
const TOP: InodeId = InodeId(VIRTUAL | 1);
const INODES: InodeId = InodeId(VIRTUAL | 2);
const STATS: InodeId = InodeId(VIRTUAL | 3);
const CONFIG: InodeId = InodeId(VIRTUAL | 4);
const CALLS: InodeId = InodeId(VIRTUAL | 5);
const SNAPSHOTS: InodeId = InodeId(VIRTUAL | 6);
/// What it holds.
const CHILDREN: [(&[u8], InodeId); 5] = [
    (b"inode", INODES),
    (b"stats", STATS),
    (b"config", CONFIG),
    (b"calls", CALLS),
    (b"snapshots", SNAPSHOTS),
];
/// The cookie of `..`; behind it, in `snapshots`, stand the snapshots by their numbers.
const DOTS: u64 = 2;

/// Whether a node is one of these.
pub fn is_virtual(ino: InodeId) -> bool {
    ino.0 & VIRTUAL != 0
}

/// Whether `name` in `parent` is the directory.
pub fn is_its_name(parent: InodeId, name: &[u8]) -> bool {
    parent == InodeId::ROOT && name == NAME
}

fn attr(ino: InodeId) -> Result<Attr> {
    let (mode, nlink) = match ino {
        TOP => (S_IFDIR | 0o555, 4),
        SNAPSHOTS => (S_IFDIR | 0o555, 2),
        // Searchable, not readable: what is in it is not known.
        INODES => (S_IFDIR | 0o111, 2),
        STATS | CONFIG => (S_IFREG | 0o444, 1),
        // What others do is not everybody's business.
        CALLS => (S_IFREG | 0o400, 1),
        _ => return Err(Errno::STALE),
    };
    let time = Time::default();
    Ok(Attr {
        ino,
        mode,
        nlink,
        uid: 0,
        gid: 0,
        rdev: 0,
        size: 0, // read to the end, as in /proc
        blocks: 0,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
        learnt: 0,
    })
}

fn number(name: &[u8]) -> Option<u64> {
    // One spelling a number: no sign, no leading zero.
    if name.first() == Some(&b'0') || !name.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(name).ok()?.parse().ok().filter(|n| n & VIRTUAL == 0)
}

/// `NUMBER` or `NUMBER.PROOF`.
fn numbers(name: &[u8]) -> Option<(InodeId, Option<u64>)> {
    let Some(dot) = name.iter().position(|b| *b == b'.') else {
        return number(name).map(|n| (InodeId(n), None));
    };
    let digits = &name[dot + 1..];
    let proof = std::str::from_utf8(digits).ok().filter(|_| digits.iter().all(u8::is_ascii_digit));
    Some((InodeId(number(&name[..dot])?), Some(proof?.parse().ok()?)))
}

impl<F: FileSystem + ?Sized> Server<F> {
    /// Answer to the look-up of `.corbel`.
    pub(super) fn virtual_root_entry(&self) -> EntryOut {
        attr(TOP).map_or_else(|_| EntryOut::default(), |attr| entry_out(&attr, Duration::ZERO, 0))
    }

    /// Serves a request on a node of this directory.
    pub(super) fn virtual_call(
        &self,
        opcode: u32,
        call: &Call<'_>,
        mut args: Args<'_>,
        sink: &mut dyn ReplySink,
    ) -> Result<Answer> {
        let attr = attr(call.ino)?;
        match opcode {
            op::LOOKUP => {
                let name = args.any_name()?;
                args.end()?;
                Ok(Answer::of(&self.virtual_lookup(call, name)?))
            }
            op::GETATTR => Ok(Answer::of(&attr_out(&attr, 0))),
            op::STATX => Ok(Answer::of(&statx_out(&attr, 0))),
            op::OPEN => {
                let arg: &OpenIn = args.take()?;
                if call.ino == CALLS && call.caller.uid != 0 {
                    return Err(Errno::ACCES);
                }
                if arg.flags.get() & client::fs::O_ACCMODE != client::fs::O_RDONLY {
                    return Err(Errno::ACCES);
                }
                let open_flags = FOPEN_DIRECT_IO.into();
                Ok(Answer::of(&OpenOut { open_flags, ..OpenOut::default() }))
            }
            op::OPENDIR => Ok(Answer::of(&OpenOut::default())),
            op::READ => self.virtual_read(call.ino, args.take()?, sink),
            op::READDIR | op::READDIRPLUS if call.ino == TOP => {
                list(args.take()?, opcode == op::READDIRPLUS, sink)
            }
            op::READDIR | op::READDIRPLUS if call.ino == SNAPSHOTS => {
                self.list_snapshots(args.take()?, opcode == op::READDIRPLUS, sink)
            }
            op::RELEASE | op::RELEASEDIR | op::FSYNC | op::FSYNCDIR => Ok(Answer::Empty),
            // The kernel draws conclusions about all files from the first answer.
            op::FLUSH => self.flush(call, args, sink),
            op::FORGET => Ok(Answer::Silent),
            op::STATFS => self.statfs(call, args, sink),
            // Also what the kernel asks for to judge users other than root: there is no access list.
            op::GETXATTR => Err(Errno::NODATA),
            op::LISTXATTR => Err(Errno::OPNOTSUPP),
            _ => Err(Errno::PERM),
        }
    }

    fn virtual_lookup(&self, call: &Call<'_>, name: &[u8]) -> Result<EntryOut> {
        match call.ino {
            TOP => {
                let (_, ino) = CHILDREN.iter().find(|(n, _)| *n == name).ok_or(Errno::NOENT)?;
                Ok(entry_out(&attr(*ino)?, Duration::ZERO, 0))
            }
            INODES => {
                let (ino, proof) = numbers(name).ok_or(Errno::NOENT)?;
                let attr = self.until_kept(|| {
                    // Anew each time: what has been forgotten may be gone, and its number another one's.
                    let attr = self.fs.getattr(&call.caller, ino).map_err(|_| Errno::NOENT)?;
                    let shown = || proof.is_some_and(|p| self.fs.prove(ino) == Ok(p));
                    let may = (self.options.may_open_by_number)(&call.caller, &attr);
                    if !may && !shown() {
                        // As where there is none: nobody is told which numbers there are.
                        return Err(Errno::NOENT);
                    }
                    if attr.is_dir() {
                        return Err(Errno::ISDIR);
                    }
                    Ok(self.count_kept(&attr).map(|_| attr))
                })?;
                // The entry is never kept: the next caller may be another one.
                let seconds = self.attr_seconds(&attr, self.fs.may_cache(ino));
                Ok(entry_out(&attr, Duration::ZERO, seconds))
            }
            SNAPSHOTS => {
                let root = self.fs.snapshot(&call.caller, name).map_err(no_snapshots)?;
                let attr = self.until_kept(|| {
                    let attr = self.fs.getattr(&call.caller, root)?;
                    Ok(self.count_kept(&attr).map(|_| attr))
                })?;
                Ok(entry_out(&attr, Duration::ZERO, self.attr_seconds(&attr, false)))
            }
            _ => Err(Errno::NOTDIR),
        }
    }

    /// The names come in the order of their numbers, so that a listing that goes on later leaves none out and has none twice.
    fn list_snapshots(&self, arg: &ReadIn, plus: bool, sink: &mut dyn ReplySink) -> Result<Answer> {
        let room = sink.payload((arg.size.get() as usize).min(IO_BYTES_MAX));
        let mut listing = Listing { room, used: 0 };
        let none = EntryOut::default();
        let plus = plus.then_some(&none);
        let from = arg.offset.get();
        let dots: [(&[u8], InodeId); 2] = [(b".", SNAPSHOTS), (b"..", TOP)];
        for (next, (name, ino)) in (1..).zip(dots).skip(from.min(DOTS) as usize) {
            if !listing.push(plus, &DirEntry { ino, kind: S_IFDIR, next, name }) {
                return Ok(Answer::Payload(listing.used));
            }
        }
        let mut after = from.saturating_sub(DOTS);
        loop {
            let some = match self.fs.snapshots(after) {
                Err(Errno::OPNOTSUPP) => Vec::new(),
                some => some?,
            };
            let Some(last) = some.last() else { return Ok(Answer::Payload(listing.used)) };
            after = last.number;
            for one in &some {
                let (ino, next) = (one.dir.in_snapshot(one.slot), one.number.saturating_add(DOTS));
                let entry = DirEntry { ino, kind: S_IFDIR, next, name: &one.name };
                if !listing.push(plus, &entry) {
                    return Ok(Answer::Payload(listing.used));
                }
            }
        }
    }

    fn virtual_read(&self, ino: InodeId, arg: &ReadIn, sink: &mut dyn ReplySink) -> Result<Answer> {
        let text = match ino {
            STATS => self.stats_text(),
            CONFIG => {
                let transport = if self.is_over_io_uring() { "io_uring" } else { "device" };
                format!("{}transport {transport}\n", self.options.config_text)
            }
            CALLS => self.callers.text(Self::op_name),
            _ => return Err(Errno::ISDIR),
        };
        let from = usize::try_from(arg.offset.get()).unwrap_or(usize::MAX).min(text.len());
        let rest = &text.as_bytes()[from..];
        payload(sink, &rest[..rest.len().min(arg.size.get() as usize).min(IO_BYTES_MAX)])
    }

    /// Lines `name value`: calls by operation, then totals, then the file system's own.
    pub fn stats_text(&self) -> String {
        let mut text = String::new();
        let load = |c: &std::sync::atomic::AtomicU64| c.load(Ordering::Relaxed);
        for (opcode, calls) in (0..).zip(&self.counters.calls) {
            let calls = load(calls);
            if let Some(name) = Self::op_name(opcode)
                && calls != 0
            {
                let _ = writeln!(text, "fuse_{name}_total {calls}");
            }
        }
        for (name, counter) in [
            ("errors", &self.counters.errors),
            ("malformed", &self.counters.malformed),
            ("unknown", &self.counters.unknown),
            ("read_bytes", &self.counters.bytes_read),
            ("written_bytes", &self.counters.bytes_written),
            ("copied_bytes", &self.counters.bytes_copied),
        ] {
            let _ = writeln!(text, "fuse_{name}_total {}", load(counter));
        }
        if let Some(more) = &self.options.more_stats {
            text.push_str(&more());
        }
        text
    }
}

/// Where there can be none there is no such name.
fn no_snapshots(error: Errno) -> Errno {
    if error == Errno::OPNOTSUPP { Errno::NOENT } else { error }
}

fn list(arg: &ReadIn, plus: bool, sink: &mut dyn ReplySink) -> Result<Answer> {
    let room = sink.payload((arg.size.get() as usize).min(IO_BYTES_MAX));
    let mut listing = Listing { room, used: 0 };
    let dots: [(&[u8], InodeId); 2] = [(b".", TOP), (b"..", InodeId::ROOT)];
    for (next, (name, ino)) in (1..).zip(dots.iter().chain(&CHILDREN)) {
        if next <= arg.offset.get() {
            continue;
        }
        let texts = [STATS, CONFIG, CALLS];
        let kind = if texts.contains(ino) { S_IFREG } else { S_IFDIR };
        let none = EntryOut::default();
        let entry = DirEntry { ino: *ino, kind, next, name };
        if !listing.push(plus.then_some(&none), &entry) {
            break;
        }
    }
    Ok(Answer::Payload(listing.used))
}
