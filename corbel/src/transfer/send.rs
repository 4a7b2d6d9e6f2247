//! `corbel send`: writes the stream ([`storage::format::transfer`]).
//!
//! What one state has otherwise than another the node finds out from its tree, without reading what both share. Which inodes each
//! of them shows is found by a walk over its names: a directory may have moved to where the snapshot looks without
//! anything below it having changed, and that is new to who receives.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use base::{Errno, InodeId};
use clap::Args;
use client::fs::{
    Attr, Difference, FileSystem, Handle, Key, O_RDONLY, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG,
    SnapshotRecord, Time,
};
use storage::format::entry::Stamp;
use storage::format::transfer::{self, Attributes, BODY_MAX, DATA_MAX, Position, Record, Stage};
use storage::limits::BLOCK_BYTES;

use super::{MIB, failed, stop};
use crate::cli::Global;
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;
use crate::volume::Volume;

/// Bytes gathered before they are written.
const WRITE: usize = 1 << 20;
/// Content after which progress is told.
const TELL: u64 = 512 * MIB;

/// Arguments of `corbel send`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  corbel send monday > monday.corbel\n  corbel send tuesday --from monday | \
    ssh other corbel receive /copies/home\n  corbel send tuesday --from monday --resume 1-2a-1000 | \
    ssh other corbel receive /copies/home\n\nThe stream goes to standard output. It has a checksum in each record; it is not \
    compressed: pipe it\nthrough zstd if the line is slow. An interrupted one is gone on with: corbel receive --status says from \
    where."
)]
pub struct SendArgs {
    /// Name of the snapshot
    pub name: OsString,
    /// Send what it has otherwise than this earlier snapshot of the same directory, which was received before
    #[arg(long, value_name = "NAME")]
    pub from: Option<OsString>,
    /// Go on from where a stream of the same snapshots was received to
    #[arg(long, value_name = "POSITION")]
    pub resume: Option<Position>,
    /// Say what would be sent, and send nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Socket of the local node, if it is not the configuration's
    #[arg(long, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,
}

/// A snapshot, and the inodes that it shows.
struct State {
    record: SnapshotRecord,
    shows: HashSet<InodeId>,
    /// In their order.
    sorted: Vec<InodeId>,
}

/// The number of an inode of a snapshot in the volume.
fn number(ino: InodeId) -> InodeId {
    ino.of_snapshot().map_or(ino, |(_, ino)| ino)
}

impl State {
    fn at(&self, ino: InodeId) -> InodeId {
        ino.in_snapshot(self.record.slot)
    }

    fn find(volume: &Volume, name: &[u8]) -> Result<SnapshotRecord> {
        let all = volume.snapshots().map_err(|e| failed("listing snapshots", e))?;
        all.into_iter().find(|one| one.name == name).ok_or_else(|| {
            let name = String::from_utf8_lossy(name);
            let remedy = "corbel snapshot list has the names";
            Failure::failed(format!("snapshot {name}: there is none"), remedy)
        })
    }

    /// Walks over its names.
    fn walk(volume: &Volume, record: SnapshotRecord) -> Result<Self> {
        let (slot, root) = (record.slot, record.dir);
        let mut shows = HashSet::from([root]);
        let mut left = vec![root];
        while let Some(dir) = left.pop() {
            stop()?;
            let list = volume.list(dir.in_snapshot(slot));
            for (_, ino, kind) in list.map_err(|e| failed(format!("directory {}", dir.0), e))? {
                let ino = number(ino);
                if shows.insert(ino) && kind & S_IFMT == S_IFDIR {
                    left.push(ino);
                }
            }
        }
        let mut sorted: Vec<_> = shows.iter().copied().collect();
        sorted.sort_unstable();
        Ok(Self { record, shows, sorted })
    }
}

/// What is different of one inode.
#[derive(Default)]
struct Group {
    ino: InodeId,
    /// First byte and number of bytes.
    content: Vec<(u64, u64)>,
    gone: Vec<(InodeId, Vec<u8>)>,
    new: Vec<(InodeId, Vec<u8>)>,
}

/// Differences, put together by inode, in their order.
struct Groups<'a> {
    fs: &'a dyn FileSystem,
    before: u64,
    number: u64,
    at: Option<Key>,
    ready: std::vec::IntoIter<Difference>,
    coming: Option<Group>,
}

impl<'a> Groups<'a> {
    fn new(volume: &'a Volume, before: u64, number: u64, from: InodeId) -> Self {
        let at = Some(Key::new(from.0, 0, 0));
        Self { fs: &*volume.fs, before, number, at, ready: Vec::new().into_iter(), coming: None }
    }

    fn next(&mut self) -> Result<Option<Group>> {
        loop {
            for one in self.ready.by_ref() {
                let ino = one.of();
                let done = self.coming.take_if(|group| group.ino != ino);
                let group = self.coming.get_or_insert_with(|| Group { ino, ..Group::default() });
                match one {
                    Difference::Touched { .. } => {}
                    Difference::Content { offset, len, .. } => group.content.push((offset, len)),
                    Difference::Unnamed { ino, name, .. } => group.gone.push((ino, name)),
                    Difference::Named { ino, name, .. } => group.new.push((ino, name)),
                }
                if done.is_some() {
                    return Ok(done);
                }
            }
            let Some(at) = self.at else { return Ok(self.coming.take()) };
            stop()?;
            let told = self.fs.differences(self.before, self.number, at);
            let told = told.map_err(|e| failed("comparing the snapshots", e))?;
            self.ready = told.all.into_iter();
            self.at = told.next;
        }
    }
}

/// Where the stream goes.
struct Sink<W: Write> {
    out: Option<W>,
    bytes: Vec<u8>,
    chain: u32,
    records: u64,
    /// Bytes of content.
    content: u64,
    told: u64,
    output: Output,
}

impl<W: Write> Sink<W> {
    fn put(&mut self, record: &Record) -> Result<()> {
        record.encode(&mut self.chain, &mut self.bytes);
        self.records += 1;
        if let Record::Data { bytes, .. } = record {
            self.content += bytes.len() as u64;
            if self.content - self.told >= TELL {
                self.told = self.content;
                self.output.step(format!("{} MiB of content sent", self.content / MIB));
            }
        }
        if self.bytes.len() >= WRITE { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        stop()?;
        if let Some(out) = &mut self.out {
            let mut left = &self.bytes[..];
            while !left.is_empty() {
                match out.write(left) {
                    Ok(n) if n > 0 => left = &left[n..],
                    Ok(_) => {
                        return Err(Failure::io("standard output", &ErrorKind::WriteZero.into()));
                    }
                    // (A signal, perhaps the one to stop: who receives may take nothing for a long time.)
                    Err(e) if e.kind() == ErrorKind::Interrupted => stop()?,
                    Err(e) if e.kind() == ErrorKind::BrokenPipe => {
                        let remedy = "see what it says; corbel receive --status TARGET there says how to go on";
                        return Err(Failure::failed("who receives has gone", remedy));
                    }
                    Err(e) => return Err(Failure::io("standard output", &e)),
                }
            }
        }
        self.bytes.clear();
        Ok(())
    }
}

/// Makes the records of one stream.
struct Sender<'a, W: Write> {
    volume: &'a Volume,
    now: State,
    then: Option<State>,
    from: Position,
    sink: Sink<W>,
}

fn stamp(at: Time) -> Stamp {
    Stamp { sec: at.sec, nsec: at.nsec }
}

impl<W: Write> Sender<'_, W> {
    /// Whether who receives has an inode of the later state already.
    fn is_known(&self, ino: InodeId) -> bool {
        self.then.as_ref().is_some_and(|then| then.shows.contains(&ino))
    }

    /// The first inode of a stage that is sent; none: the stage was.
    fn first(&self, stage: Stage) -> Option<InodeId> {
        match stage.cmp(&self.from.stage) {
            std::cmp::Ordering::Less => None,
            std::cmp::Ordering::Equal => Some(self.from.ino),
            std::cmp::Ordering::Greater => Some(InodeId(0)),
        }
    }

    /// Calls for each inode from `from` on of which anything is different, with what is: of what is new to who receives with
    /// all that it has. In the order of inodes.
    fn each(
        &mut self,
        from: InodeId,
        mut call: impl FnMut(&mut Self, Group, bool) -> Result<()>,
    ) -> Result<()> {
        let before = self.then.as_ref().map_or(0, |then| then.record.number);
        let number = self.now.record.number;
        let volume = self.volume;
        // What is new: with an earlier state, what that does not show; without, all.
        let skip = self.now.sorted.partition_point(|ino| *ino < from);
        let new: Vec<InodeId> = match before {
            0 => Vec::new(),
            _ => self.now.sorted[skip..].iter().copied().filter(|i| !self.is_known(*i)).collect(),
        };
        let mut new = new.into_iter().peekable();
        let mut groups = Groups::new(volume, before, number, from);
        loop {
            let group = groups.next()?;
            let upto = group.as_ref().map(|group| group.ino);
            while let Some(ino) = new.next_if(|ino| upto.is_none_or(|upto| *ino <= upto)) {
                let mut whole = Groups::new(volume, 0, number, ino);
                let group = whole.next()?.filter(|group| group.ino == ino);
                call(self, group.unwrap_or(Group { ino, ..Group::default() }), true)?;
            }
            let Some(group) = group else { return Ok(()) };
            let shown = self.now.shows.contains(&group.ino);
            if before == 0 && shown {
                call(self, group, true)?;
            } else if before != 0 && (!shown || self.is_known(group.ino)) {
                // (What is shown no more has names that are gone.)
                call(self, group, false)?;
            }
        }
    }

    fn attr(&self, ino: InodeId) -> Result<Attr> {
        let attr = self.volume.fs.getattr(&self.volume.caller(), self.now.at(ino));
        attr.map_err(|e| failed(format!("inode {}", ino.0), e))
    }

    /// What is new to who receives.
    fn new_ones(&mut self) -> Result<()> {
        let Some(first) = self.first(Stage::New) else { return Ok(()) };
        let skip = self.now.sorted.partition_point(|ino| *ino < first);
        let new: Vec<_> =
            self.now.sorted[skip..].iter().copied().filter(|i| !self.is_known(*i)).collect();
        for ino in new {
            let attr = self.attr(ino)?;
            let target = match attr.kind() {
                S_IFLNK => self.volume.fs.readlink(&self.volume.caller(), self.now.at(ino)),
                _ => Ok(Vec::new()),
            };
            let target = target.map_err(|e| failed(format!("inode {}", ino.0), e))?;
            let (mode, rdev) = (attr.kind(), attr.rdev);
            self.sink.put(&Record::Inode { ino, mode, rdev, target })?;
        }
        Ok(())
    }

    fn content(&mut self) -> Result<()> {
        let Some(first) = self.first(Stage::Content) else { return Ok(()) };
        self.each(first, |this, group, new| {
            let ino = group.ino;
            if !this.now.shows.contains(&ino) {
                return Ok(());
            }
            let attr = this.attr(ino)?;
            if attr.kind() != S_IFREG {
                return Ok(());
            }
            let size = attr.size;
            this.sink.put(&Record::File { ino, size })?;
            if !group.content.is_empty() {
                let goes_on = this.from.stage == Stage::Content && this.from.ino == ino;
                let from = if goes_on { this.from.offset } else { 0 };
                let caller = this.volume.caller();
                let file = this.volume.fs.open(&caller, this.now.at(ino), O_RDONLY);
                let file = file.map_err(|e| failed(format!("content of inode {}", ino.0), e))?;
                let sent = this.parts(file, ino, &group.content, (from, size), new);
                this.volume.fs.release(file);
                sent?;
            }
            this.put_attributes(ino, &attr, true)
        })
    }

    /// Sends what lies in parts of a file.
    fn parts(
        &mut self,
        file: Handle,
        ino: InodeId,
        parts: &[(u64, u64)],
        (from, size): (u64, u64),
        new: bool,
    ) -> Result<()> {
        let mut buf = vec![0; DATA_MAX];
        for (offset, len) in parts {
            let end = offset.saturating_add(*len).min(size);
            let mut at = (*offset).max(from);
            while at < end {
                let most = (end - at).min(DATA_MAX as u64) as usize;
                let read = self.volume.fs.read(file, at, &mut buf[..most]);
                let n = read.map_err(|e| match e {
                    Errno::IO => Failure::new(
                        Kind::Damaged,
                        format!("inode {}: content at {at} cannot be read", ino.0),
                        "it may be damaged in all members: corbel scrub tells; go on when it is mended, or send a snapshot without that file",
                    ),
                    e => failed(format!("inode {}: reading at {at}", ino.0), e),
                })?;
                if n == 0 {
                    break;
                }
                self.pieces(ino, at, &buf[..n], new)?;
                at += n as u64;
            }
        }
        Ok(())
    }

    /// Sends bytes of a file, those of blocks that are all zeroes as such; of a new file they are not there.
    fn pieces(&mut self, ino: InodeId, offset: u64, bytes: &[u8], new: bool) -> Result<()> {
        let is_zero = |block: &&[u8]| block.iter().all(|byte| *byte == 0);
        let mut at = offset;
        // (They begin with a block.)
        let blocks: Vec<&[u8]> = bytes.chunks(BLOCK_BYTES as usize).collect();
        for run in blocks.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            let len: usize = run.iter().map(|block| block.len()).sum();
            let begin = (at - offset) as usize;
            if !is_zero(&run[0]) {
                let bytes = bytes[begin..begin + len].to_vec();
                self.sink.put(&Record::Data { ino, offset: at, bytes })?;
            } else if !new {
                self.sink.put(&Record::Zero { ino, offset: at, len: len as u64 })?;
            }
            at += len as u64;
        }
        Ok(())
    }

    fn unnamed(&mut self) -> Result<()> {
        let Some(first) = self.first(Stage::Unnamed).filter(|_| self.then.is_some()) else {
            return Ok(());
        };
        self.each(first, |this, group, _| {
            let dir = group.ino;
            let known = this.then.as_ref().is_some_and(|then| then.shows.contains(&dir));
            group.gone.into_iter().filter(|_| known).try_for_each(|(ino, name)| {
                let last = !this.now.shows.contains(&ino);
                this.sink.put(&Record::Unnamed { dir, ino, last, name })
            })
        })
    }

    fn named(&mut self) -> Result<()> {
        let Some(first) = self.first(Stage::Named) else { return Ok(()) };
        self.each(first, |this, group, _| {
            let dir = group.ino;
            let shown = this.now.shows.contains(&dir);
            group
                .new
                .into_iter()
                .filter(|_| shown)
                .try_for_each(|(ino, name)| this.sink.put(&Record::Named { dir, ino, name }))
        })
    }

    /// Attributes before everything else (`last`: not; and then of all but files, which have theirs with their content).
    fn attributes(&mut self, last: bool) -> Result<()> {
        let stage = if last { Stage::Final } else { Stage::Attributes };
        let Some(first) = self.first(stage) else { return Ok(()) };
        self.each(first, |this, group, _| {
            let ino = group.ino;
            if !this.now.shows.contains(&ino) {
                return Ok(());
            }
            let attr = this.attr(ino)?;
            if last && attr.kind() == S_IFREG {
                return Ok(());
            }
            this.put_attributes(ino, &attr, last)
        })
    }

    fn put_attributes(&mut self, ino: InodeId, attr: &Attr, last: bool) -> Result<()> {
        let (fs, caller, at) = (&self.volume.fs, self.volume.caller(), self.now.at(ino));
        let what = |e| failed(format!("attributes of inode {}", ino.0), e);
        let names = fs.listxattr(&caller, at).map_err(what)?;
        let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let mut xattrs: Vec<_> = names.map(<[u8]>::to_vec).collect();
        xattrs.sort_unstable();
        if xattrs.iter().map(|name| 1 + name.len()).sum::<usize>() > BODY_MAX / 2 {
            let message = format!("inode {} has too many extended attributes to be sent", ino.0);
            return Err(Failure::failed(message, "remove some, and send another snapshot"));
        }
        let (mode, uid, gid) = (attr.mode, attr.uid, attr.gid);
        let (atime, mtime) = (stamp(attr.atime), stamp(attr.mtime));
        let names = xattrs.clone();
        let all = Attributes { mode, uid, gid, atime, mtime, xattrs };
        self.sink.put(&Record::Attributes { ino, last, what: all })?;
        for name in names {
            let value = fs.getxattr(&caller, at, &name).map_err(what)?;
            self.sink.put(&Record::Xattr { ino, name, value })?;
        }
        Ok(())
    }

    /// (All of them, wherever a stream goes on: there are few, and they take no time.)
    fn gone(&mut self) -> Result<()> {
        let Some(then) = &self.then else { return Ok(()) };
        let gone = then.sorted.iter().filter(|ino| !self.now.shows.contains(ino));
        for ino in gone.copied().collect::<Vec<_>>() {
            self.sink.put(&Record::Gone { ino })?;
        }
        Ok(())
    }

    /// What was read was of these snapshots: what tells the inodes of one from others is another's when it is deleted.
    fn are_there(&self) -> Result<()> {
        for state in [Some(&self.now), self.then.as_ref()].into_iter().flatten() {
            let found = State::find(self.volume, &state.record.name)?;
            if (found.number, found.slot) != (state.record.number, state.record.slot) {
                let name = String::from_utf8_lossy(&found.name);
                let message = format!("snapshot {name} was deleted while it was sent");
                return Err(Failure::failed(message, "send another"));
            }
        }
        Ok(())
    }

    fn all(&mut self, volume: [u8; 16]) -> Result<()> {
        self.sink.bytes.extend_from_slice(&transfer::head());
        let SnapshotRecord { number, time, dir: root, ref name, .. } = self.now.record;
        let (before, name) =
            (self.then.as_ref().map_or(0, |then| then.record.number), name.clone());
        self.sink.put(&Record::Begin {
            volume,
            number,
            before,
            time,
            root,
            from: self.from,
            name,
        })?;
        self.new_ones()?;
        self.attributes(false)?;
        self.unnamed()?;
        self.named()?;
        self.content()?;
        self.attributes(true)?;
        self.gone()?;
        self.are_there()?;

        self.sink.put(&Record::End { records: self.sink.records })?;
        self.sink.flush()
    }
}

/// Runs `corbel send`.
pub fn run(global: &Global, args: &SendArgs, output: &Output) -> Result<()> {
    let usage = |message: String, remedy: &str| Failure::new(Kind::Usage, message, remedy);
    let out = std::io::stdout();
    if !args.dry_run && out.is_terminal() {
        let remedy = "redirect it to a file, or pipe it into corbel receive";
        return Err(usage("the stream would go to a terminal".into(), remedy));
    }
    crate::signals::catch();
    let volume = Volume::open(global, args.socket.as_deref())?;
    if volume.caller().uid != 0 {
        return Err(failed("sending a snapshot", Errno::PERM));
    }
    let now = State::find(&volume, args.name.as_bytes())?;
    let then = args.from.as_ref().map(|name| State::find(&volume, name.as_bytes())).transpose()?;
    if let Some(then) = &then {
        let shown = |one: &SnapshotRecord| String::from_utf8_lossy(&one.name).into_owned();
        if then.dir != now.dir {
            let message = format!("{} and {} are of two directories", shown(then), shown(&now));
            return Err(usage(
                message,
                "give two snapshots of one directory: corbel snapshot list",
            ));
        }
        if then.number >= now.number {
            let message = format!("{} is not earlier than {}", shown(then), shown(&now));
            return Err(usage(message, "give the earlier one with --from"));
        }
    }
    let (before, number) = (then.as_ref().map_or(0, |then| then.number), now.number);
    let told = volume.fs.differences(before, number, Key::MAX);
    let uuid = told.map_err(|e| failed("comparing the snapshots", e))?.volume;
    let now = State::walk(&volume, now)?;
    let then = then.map(|then| State::walk(&volume, then)).transpose()?;
    // (Past the buffer of lines that programs have there.)
    let out = (!args.dry_run).then(|| out.as_fd().try_clone_to_owned().map(File::from));
    let out = out.transpose().map_err(|e| Failure::io("standard output", &e))?;
    let sink = Sink {
        out,
        bytes: Vec::with_capacity(2 * WRITE),
        chain: 0,
        records: 0,
        content: 0,
        told: 0,
        output: *output,
    };
    let from = args.resume.unwrap_or_default();
    let mut sender = Sender { volume: &volume, now, then, from, sink };
    sender.all(uuid)?;
    let (records, bytes) = (sender.sink.records, sender.sink.content);
    if args.dry_run {
        let said = serde_json::json!({"records": records, "content_bytes": bytes});
        output.result(&said, || println!("{records} records, {bytes} bytes of content"));
    } else {
        output.step(format!("{records} records, {bytes} bytes of content sent"));
    }
    Ok(())
}
