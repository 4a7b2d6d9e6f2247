//! What a joining node is sent by the head: the namespace of one moment, then the content of the files.
//!
//! The moment is a [`View`] of the published tree, whose pages stay as long as the snapshot needs them, while
//! the volume goes on. A cursor goes over it, a few names or inodes a turn ([`NodeConfig::join_step`] and
//! [`PIECE`]), between whatever else there is to do, so that nobody waits for a node that joins, however much
//! the volume holds. What a turn made is a piece, a message of entries made by the service (more than one if
//! an inode has very many extended attributes). At most
//! [`WINDOW`] pieces are on their way: the joining node acknowledges each when it has applied it.
//!
//! Order: inodes without a name; names from the root downwards, parents before children; then every inode by
//! number, with what making names would change (times, lists to be inherited, accounts) and its content.
//! Content is read from the volume as it is when its turn has come, and may be newer than the moment. Blocks that files share
//! are sent once, and as clones after that; blocks that are reserved and not written are reserved there, too. So the node
//! has as much room as all others, and takes as head nothing that does not fit them. Blocks that a file has been given since the
//! moment are left out: so they fit, also if another file has given them up. To a node that may have the content from before
//! it is offered first (`offer`), and what it lacks is sent between the rest. The
//! stream that follows says the same again; operations that use content which is there (`CloneRange`, `Shift`)
//! end the snapshot, and the node asks for another.
//!
//! [`NodeConfig::join_step`]: super::NodeConfig::join_step

mod in_place;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::planted::{Bug, planted};
use base::{Epoch, InodeId, Nanos, NodeId, Sequence, StreamSeq};
use storage::acl;
use storage::format::entry::{Op, Stamp, mask};
use storage::format::item::ReadClass;
use storage::format::page::Key;
use storage::format::rpc::{Extent, InodeRecord};
use storage::limits::BLOCK_BYTES;
use storage::volume::reach::Unplaced;
use storage::volume::{AccountId, Place, View, Volume};

use super::head::Head;
use super::history::Claim;
use super::image::Image;
use super::message::Message;
use super::offer::{
    Asked, COMPARED, Doubt, OFFER_BLOCKS, OFFERED_A_TURN, Offered, Offers, Part, SAME_A_TURN,
};
use super::reconcile::{RANGES_A_TURN, Reconciling};
use super::{Effect, Failure, Node};

/// Bytes of synthetic entries after which a turn ends.
pub(super) const PIECE: usize = 32 * 1024;
/// Bytes of one message, unless one entry is longer.
const MESSAGE: usize = 512 * 1024;
/// Bytes of file content in one entry.
const CONTENT: usize = 32 * 1024;
/// Blocks of which is looked in a turn whether they have changed.
const LOOKED_A_TURN: u64 = 16 * 1024;
/// Pieces on their way at once.
const WINDOW: u32 = 32;
/// After a piece, whoever waits for what is in the stream by then goes first, for so long at most.
const GOES_FIRST: Nanos = 1_000_000;
/// Where somebody has written since the piece before, the next begins so long after it at least: what a writer waits for is the
/// processor, here and where the pieces go, which both are to have left over for it.
const REST: Nanos = 150_000;
/// A joining node that asks again, and has not acknowledged anything for so long, lacks a piece.
const LOST: Nanos = 1_000_000_000;
/// After this time a head that is not fenced knows what became of a request to let a node into the chain: a
/// heartbeat sent later has been confirmed, on the same connection.
const PROMOTE_KNOWN: Nanos = 1_000_000_000;
/// So long after content was found rotten it is read again.
pub(super) const MENDING: Nanos = 10_000_000;
/// fallocate: do not change the size.
const KEEP_SIZE: u16 = 1;
const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;

/// From the third snapshot on that a process is sent, all waits for it rather than that it comes to nothing.
pub(super) const PASSES: u32 = 3;

/// Where in the stream a snapshot is, and whether what comes then is kept for whom it is sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) seq: StreamSeq,
    /// However long it takes. Else as long as there is room: whoever is left behind is sent another one, of what has changed since.
    pub(super) waited_for: bool,
    /// It is left behind.
    pub(super) behind: bool,
}

/// A snapshot on its way to a joining node.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) start: Start,
    /// None: all of it is on its way.
    dump: Option<Dump>,
    /// Instead of that: the volume with its snapshots.
    pub(super) image: Option<Box<Image>>,
    /// Messages sent.
    number: u32,
    /// Messages acknowledged.
    acked: u32,
    /// When it was begun, or something was acknowledged last.
    heard: Nanos,
    /// What comes next is being mended; it is tried again then.
    pub(super) pause: Nanos,
    /// The next piece comes when all members have the stream up to there, or at that moment.
    yields: (StreamSeq, Nanos),
    /// And not before that moment, as somebody writes.
    rests: Nanos,
    pub(super) offers: Offers,
    /// Inodes in all, and those that are done, but for what the node lacks.
    inodes: u64,
    passed: u64,
    /// Bytes sent, since when.
    sent: u64,
    begun: Nanos,
    /// The last piece of an image was sent.
    told: bool,
}

/// How far a node that joins is, for `status`.
#[derive(Clone, Debug)]
pub struct JoinStatus {
    /// Node.
    pub node: NodeId,
    /// Inodes in all, and those of which it has been told.
    pub inodes: u64,
    /// See `inodes`.
    pub passed: u64,
    /// Bytes that it was sent.
    pub sent: u64,
    /// For how long, in nanoseconds.
    pub since: Nanos,
}

impl Outgoing {
    /// Whether all of it is on its way: no content is read for it any more.
    pub(super) const fn is_sent(&self) -> bool {
        self.dump.is_none() && self.image.is_none()
    }

    /// Whether the next piece may be sent.
    fn is_open(&self) -> bool {
        let goes_on = self.dump.as_ref().is_some_and(|dump| !dump.waits(&self.offers, false))
            || self.image.as_ref().is_some_and(|image| !image.waits(&self.offers));
        goes_on && self.number < self.acked.saturating_add(WINDOW)
    }

    /// When the next piece may be made, if it may; all members have the stream up to `acked`.
    fn due(&self, acked: StreamSeq) -> Option<Nanos> {
        let yields = if self.yields.0 > acked { self.yields.1 } else { 0 };
        self.is_open().then_some(self.pause.max(yields).max(self.rests))
    }

    /// The items of a node that is brought to this state in place.
    pub(super) fn reconciling(&mut self) -> Option<&mut Reconciling> {
        self.dump.as_mut()?.reconciling.as_deref_mut()
    }

    /// The number of the next message.
    pub(super) const fn next(&mut self) -> u32 {
        self.number += 1;
        self.number - 1
    }

    /// Of something that begins now, at that position.
    pub(super) fn new(
        start: Start,
        (dump, image): (Option<Dump>, Option<Image>),
        offers: Offers,
        inodes: u64,
        now: Nanos,
    ) -> Self {
        Self {
            start,
            dump,
            image: image.map(Box::new),
            number: 0,
            acked: 0,
            heard: now,
            pause: 0,
            yields: (start.seq, 0),
            rests: 0,
            offers,
            inodes,
            passed: 0,
            sent: 0,
            begun: now,
            told: false,
        }
    }

    /// A piece is sent.
    pub(super) const fn note_sent(&mut self, bytes: u64, passed: u64, end: bool) {
        self.sent += bytes;
        self.passed = if end { self.inodes } else { passed };
        self.told = end;
    }
}

/// How far a snapshot is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Names and attributes of a node that is brought to this state in place.
    Items,
    /// Inodes without a name, after this one.
    Orphans(InodeId),
    /// Names of the first of `dirs`, from this cookie on.
    Names(u64),
    Quotas,
    /// Inodes after this one.
    Inodes(InodeId),
    /// Whether a file shares blocks with others, from here on.
    Sharing(InodeId, u64),
    /// Whether content of a file, from here on, is what a node has of it already.
    Unchanged(InodeId, u64),
    /// Content of a file, from here on.
    Content(InodeId, u64),
    /// What the node lacks of what it was offered.
    Lacking,
    Done,
}

/// The cursor over a view.
#[derive(Debug)]
pub(super) struct Dump {
    view: View,
    stage: Stage,
    /// Directories whose names are still to be told.
    dirs: VecDeque<InodeId>,
    /// Files with several names, of which one has been told.
    linked: BTreeSet<InodeId>,
    shared: SharedSent,
    /// The node is brought to this state in place.
    reconciling: Option<Box<Reconciling>>,
    /// Blocks were offered that others share, who are to be cloned when they are there.
    shared_offered: bool,
    /// Inodes told.
    passed: u64,
}

/// Blocks that files share and that were sent as bytes of one of them: the others are sent as clones
/// of it, so that they take no more space there than here.
#[derive(Debug, Default)]
struct SharedSent {
    /// By arena and offset in it.
    runs: BTreeMap<(u32, u64), SentRun>,
}

#[derive(Clone, Copy, Debug)]
struct SentRun {
    /// Bytes of whole blocks.
    len: u64,
    ino: InodeId,
    /// Of the file that was sent, and where what was sent of it ends.
    offset: u64,
    end: u64,
}

impl SharedSent {
    /// What lies at that place in an arena, from there on; or for how long nothing lies there.
    fn find(&self, arena: u32, at: u64) -> Result<SentRun, u64> {
        if let Some((&(of, begin), run)) = self.runs.range(..=(arena, at)).next_back()
            && of == arena
            && at < begin + run.len
        {
            let skip = at - begin;
            return Ok(SentRun { len: run.len - skip, offset: run.offset + skip, ..*run });
        }
        let next = self.runs.range((arena, at)..).next();
        Err(next.filter(|((of, _), _)| *of == arena).map_or(u64::MAX, |((_, next), _)| next - at))
    }

    /// Bytes `from..to` of a file were sent, which lie in `extent`.
    fn add(&mut self, ino: InodeId, extent: &Extent, from: u64, to: u64) {
        let len = (to - from).next_multiple_of(BLOCK_BYTES);
        let at = extent.arena_offset + (from - extent.offset);
        self.runs.insert((extent.arena, at), SentRun { len, ino, offset: from, end: to });
    }
}

impl Dump {
    fn new(view: View) -> Self {
        let dirs = VecDeque::from([InodeId::ROOT]);
        let (stage, linked, shared) =
            (Stage::Orphans(InodeId::NONE), BTreeSet::new(), SharedSent::default());
        let reconciling = None;
        Self { view, stage, dirs, linked, shared, reconciling, shared_offered: false, passed: 0 }
    }

    /// Whether nothing can be done before the node has answered, in this turn also what was `made` in it.
    fn waits(&self, offers: &Offers, made: bool) -> bool {
        if let (Stage::Items, Some(reconciling)) = (self.stage, &self.reconciling) {
            return reconciling.waits(made);
        }
        let must = self.stage == Stage::Lacking && !planted(Bug::OfferUnawaited)
            || self.shared_offered && !planted(Bug::CloneUnawaited);
        must && offers.asked.is_empty() && (made || !offers.are_settled())
    }

    /// Goes on, over at most `steps` names or inodes; says over how many it did.
    fn step(
        &mut self,
        now: &Volume,
        steps: u32,
        offers: &mut Offers,
        out: &mut Synthetic,
    ) -> Result<u32, Failure> {
        match offers.asked.pop_front() {
            Some(Asked::Lack(part)) => {
                if let Some(rest) = self.lacking(now, part, out)? {
                    offers.asked.push_front(Asked::Lack(rest));
                }
                return Ok(1);
            }
            Some(Asked::Doubt(doubt)) => {
                self.doubted(now, doubt, offers, out)?;
                return Ok(1);
            }
            None => {}
        }
        self.shared_offered &= !offers.are_settled();
        match self.stage {
            Stage::Names(cookie) => return self.names(cookie, steps, out),
            Stage::Items => match &mut self.reconciling {
                Some(reconciling) if !reconciling.is_over() => {
                    let (items, ranges) = (&mut out.items, &mut out.ranges);
                    reconciling.step(&self.view, offers.id, items, ranges)?;
                }
                // All that share anything are emptied before any content comes, so that what they had may be had again.
                _ if now.shares_blocks() => self.stage = Stage::Sharing(InodeId::NONE, 0),
                _ => self.stage = Stage::Inodes(InodeId::NONE),
            },
            Stage::Sharing(ino, at) => self.sharing((ino, at), now, out)?,
            Stage::Orphans(after) => self.orphan(after, out)?,
            Stage::Quotas => {
                self.quotas(out);
                self.stage = Stage::Inodes(InodeId::NONE);
            }
            Stage::Inodes(after) if self.reconciling.is_some() => {
                match self.next_in_place(after, now, offers)? {
                    Some(ino) => self.begin_in_place(ino)?,
                    None => self.stage = Stage::Lacking,
                }
            }
            Stage::Inodes(after) => match self.view.inodes_after(after, 1)?.first() {
                Some(ino) => self.begin_inode(*ino, out)?,
                None => self.stage = Stage::Lacking,
            },
            Stage::Unchanged(ino, at) => self.unchanged((ino, at), now, offers, out)?,
            Stage::Content(ino, at) => {
                let Some(record) = self.view.attr(ino)? else { return Err(vanished(ino)) };
                match self.content(now, out, &record, at, offers)? {
                    Some(to) => self.stage = Stage::Content(ino, to),
                    None => {
                        // Writing it has changed the times.
                        out.times(&record);
                        self.stage = Stage::Inodes(ino);
                    }
                }
            }
            Stage::Lacking => self.stage = Stage::Done,
            Stage::Done => {}
        }
        Ok(1)
    }

    /// The file whose content is read next.
    fn reads(&self, offers: &Offers) -> Option<InodeId> {
        match (offers.asked.front(), self.stage) {
            (Some(asked), _) => Some(asked.ino()),
            (None, Stage::Content(ino, _)) => Some(ino),
            _ => None,
        }
    }

    /// Some of what the node lacks; what is left of that.
    fn lacking(
        &self,
        now: &Volume,
        part: Part,
        out: &mut Synthetic,
    ) -> Result<Option<Part>, Failure> {
        // Whoever answers may name anything.
        let Some(record) = self.view.attr(part.ino)? else { return Ok(None) };
        let (at, end) = (part.first * BLOCK_BYTES, part.end() * BLOCK_BYTES);
        let to = match self.next_content(now, part.ino, at, record.size)? {
            Some(Next::Bytes { from, to, .. }) if from < end => {
                // What is rotten here is mended first.
                self.bytes(now, out, part.ino, (from, to.min(end)))?.unwrap_or(at)
            }
            Some(Next::Bytes { .. }) | None => end,
            Some(Next::Reserved { end, .. } | Next::Skip(end)) => end,
        };
        let first = to.div_ceil(BLOCK_BYTES);
        if first < part.end() {
            return Ok(Some(Part { first, count: (part.end() - first) as u32, ..part }));
        }
        if !planted(Bug::WantedLeavesTimes) {
            out.times(&record);
        }
        Ok(None)
    }

    /// Compares what the node may have: it is to take it over, or it lacks it. (That stands behind what else was asked.)
    fn doubted(
        &self,
        now: &Volume,
        doubt: Doubt,
        offers: &mut Offers,
        out: &mut Synthetic,
    ) -> Result<(), Failure> {
        let part = doubt.part;
        out.compared += u64::from(part.count);
        let comes_to = now.keyed(part.ino, part.first, part.end(), offers.id)?;
        if comes_to == Some(doubt.keyed) || planted(Bug::DoubtedTaken) {
            out.sure.push(part);
        } else {
            offers.asked.push_back(Asked::Lack(part));
        }
        Ok(())
    }

    /// Names of one directory.
    fn names(&mut self, cookie: u64, steps: u32, out: &mut Synthetic) -> Result<u32, Failure> {
        let Some(dir) = self.dirs.front().copied() else {
            self.stage = Stage::Quotas;
            self.linked.clear();
            return Ok(1);
        };
        let mut names = Vec::new();
        let end = self.view.readdir(dir, cookie, steps as usize, &mut |n| {
            names.push((n.ino, n.name.to_vec(), n.next));
            true
        })?;
        let (mut told, mut at, mut whole) = (0, cookie, true);
        for (ino, name, next) in names {
            if out.len() >= PIECE {
                whole = false;
                break;
            }
            (told, at) = (told + 1, next);
            if name != b"." && name != b".." {
                self.name(dir, ino, &name, out)?;
            }
        }
        self.stage = Stage::Names(at);
        if whole && end != Some(false) {
            self.dirs.pop_front();
            self.stage = Stage::Names(0);
        }
        Ok(told.max(1))
    }

    fn name(
        &mut self,
        dir: InodeId,
        ino: InodeId,
        name: &[u8],
        out: &mut Synthetic,
    ) -> Result<(), Failure> {
        let Some(record) = self.view.attr(ino)? else { return Ok(()) };
        let is_dir = record.mode & S_IFMT == S_IFDIR;
        if is_dir {
            self.dirs.push_back(ino);
        } else if record.nlink > 1 && !self.linked.insert(ino) {
            out.op(&Op::Link { ino, parent: dir, name });
            return Ok(());
        }
        self.make(out, &record, dir, name)
    }

    /// The next inode without a name that somebody still has open. It lives on without a name on the other node as
    /// well: a name in the root that goes away at once, while there are no others that it could be.
    fn orphan(&mut self, after: InodeId, out: &mut Synthetic) -> Result<(), Failure> {
        let Some(ino) = self.view.orphan_after(after)? else {
            self.stage = Stage::Names(0);
            return Ok(());
        };
        self.stage = Stage::Orphans(ino);
        let Some(record) = self.view.attr(ino)? else { return Ok(()) };
        if record.linkable {
            let (mode, uid, gid, parent) = (record.mode, record.uid, record.gid, InodeId::ROOT);
            out.time = nanos(record.btime);
            out.op(&Op::Tmpfile { ino, parent, mode, uid, gid, linkable: true });
            return self.rest(out, &record);
        }
        let name = format!(".corbel-orphan-{ino}").into_bytes();
        let parent = InodeId::ROOT;
        self.make(out, &record, parent, &name)?;
        if record.mode & S_IFMT == S_IFDIR {
            out.op(&Op::Rmdir { ino, parent, name: &name, open: true });
        } else {
            out.op(&Op::Unlink { ino, parent, name: &name, open: true });
        }
        Ok(())
    }

    fn quotas(&self, out: &mut Synthetic) {
        for (account, limit) in self.view.limits() {
            let (ino, user) = match account {
                AccountId::User(uid) => (InodeId::ROOT, Some(uid)),
                AccountId::Directory(ino) => (ino, None),
            };
            out.op(&Op::SetQuota { ino, user, limit });
        }
    }

    /// What may come only when all names are there: whose quota counts it (a file may have names in two
    /// trees since before one of them had a quota), the list that would be inherited, the times.
    fn begin_inode(&mut self, ino: InodeId, out: &mut Synthetic) -> Result<(), Failure> {
        self.stage = Stage::Inodes(ino);
        self.passed += 1;
        let Some(record) = self.view.attr(ino)? else { return Ok(()) };
        if record.project != InodeId::NONE {
            out.op(&Op::SetProject { ino, project: record.project });
        }
        // As long as there is nothing to be done it follows from the names who reaches what everybody does.
        let reach = self.view.reach(ino)?.unwrap_or_default();
        match self.view.unplaced_of(ino)? {
            None if self.view.unplaced() == 0 && reach == ReadClass::World => {}
            Some(Unplaced::Directory) => out.op(&Op::Place { ino, reach, later: true }),
            Some(Unplaced::Reach(then)) => {
                out.op(&Op::Place { ino, reach, later: false });
                out.op(&Op::Place { ino, reach: then, later: true });
            }
            None => out.op(&Op::Place { ino, reach, later: false }),
        }
        if let Some(list) = &record.default_acl {
            out.op(&Op::SetXattr { ino, name: acl::DEFAULT, value: &list.encode() });
        }
        // What is reserved may lie behind the end, also of an empty file.
        let holds = record.size > 0 || (record.blocks > 0 && !planted(Bug::ReservedUnsent));
        if record.mode & S_IFMT == S_IFREG && holds {
            self.stage = Stage::Content(ino, 0);
        } else {
            out.times(&record);
        }
        Ok(())
    }

    fn make(
        &self,
        out: &mut Synthetic,
        r: &InodeRecord,
        parent: InodeId,
        name: &[u8],
    ) -> Result<(), Failure> {
        out.time = nanos(r.btime);
        let target = self.view.symlink(r.ino)?;
        let (ino, mode, rdev, uid, gid) = (r.ino, r.mode, r.rdev, r.uid, r.gid);
        out.op(&Op::Create { ino, parent, mode, rdev, uid, gid, name, target: &target });
        self.rest(out, r)
    }

    /// What an inode has besides what it was made with, and what comes when all names are there.
    fn rest(&self, out: &mut Synthetic, r: &InodeRecord) -> Result<(), Failure> {
        let ino = r.ino;
        if r.mode & S_IFMT == S_IFREG && r.size > 0 {
            out.op(&Op::Truncate { ino, size: r.size, clear_setid: false });
        }
        for name in self.view.xattrs(ino)? {
            if name == acl::DEFAULT {
                continue;
            }
            if let Some(value) = self.view.xattr(ino, &name)? {
                out.op(&Op::SetXattr { ino, name: &name, value: &value });
            }
        }
        Ok(())
    }
}

fn vanished(ino: InodeId) -> Failure {
    let corrupt = base::wire::Corrupt::new("view", "has lost an inode");
    Failure::Volume(storage::volume::Fault::Item { ino: ino.0, corrupt })
}

/// What comes next of the content of a file.
enum Next {
    /// Nothing up to there.
    Skip(u64),
    /// Blocks without content.
    Reserved { from: u64, end: u64 },
    /// Bytes in an extent.
    Bytes { extent: Extent, from: u64, to: u64 },
}

/// Content, holes left out. Blocks that a file has been given since the moment are left out as well: the stream brings them. So at no
/// time does the node that joins need more room than the moment did, whatever went from one file to another in between.
impl Dump {
    /// What comes at `at` or behind it. None: there is no more.
    fn next_content(
        &self,
        now: &Volume,
        ino: InodeId,
        at: u64,
        size: u64,
    ) -> Result<Option<Next>, Failure> {
        let then = &self.view;
        let ([extent], [had]) = (&now.extents(ino, at, 1)?[..], &then.extents(ino, at, 1)?[..])
        else {
            return Ok(None);
        };
        let from = at.max(extent.offset).max(had.offset);
        let end = (extent.offset + extent.len).min(had.offset + had.len);
        Ok(Some(if from >= end {
            // The one ends before the other begins.
            Next::Skip(from)
        } else if extent.unwritten {
            Next::Reserved { from, end }
        } else if from >= size {
            // The file has become longer since the moment, which the stream says; something reserved may lie behind.
            Next::Skip(end)
        } else {
            Next::Bytes { extent: *extent, from, to: end.min(size) }
        }))
    }

    /// Content of a file from `at` on, or an offer of it; returns where to go on. None: there is no more.
    fn content(
        &mut self,
        now: &Volume,
        out: &mut Synthetic,
        record: &InodeRecord,
        at: u64,
        offers: &Offers,
    ) -> Result<Option<u64>, Failure> {
        let (ino, size) = (record.ino, record.size);
        let (extent, from, mut to) = match self.next_content(now, ino, at, size)? {
            None => return Ok(None),
            Some(Next::Skip(to)) => return Ok(Some(to)),
            Some(Next::Reserved { from: offset, end }) => {
                let (len, mode) = (end - offset, KEEP_SIZE);
                if !planted(Bug::ReservedUnsent) {
                    out.op(&Op::Fallocate { ino, offset, len, mode });
                }
                return Ok(Some(end));
            }
            Some(Next::Bytes { extent, from, to }) => (extent, from, to),
        };
        if extent.shared {
            match self.shared.find(extent.arena, extent.arena_offset + (from - extent.offset)) {
                Ok(run) => {
                    let to = to.min(from + run.len);
                    // Where one of the files ends the rest of the block is zeroes, also in the other.
                    let len = (to - from).min(run.end.saturating_sub(run.offset));
                    let (source, source_offset) = (run.ino, run.offset);
                    let zeroes = true;
                    out.op(&Op::CloneRange {
                        ino,
                        offset: from,
                        len,
                        source,
                        source_offset,
                        zeroes,
                    });
                    return Ok(Some(to.next_multiple_of(BLOCK_BYTES)));
                }
                Err(free) => to = to.min(from.saturating_add(free)),
            }
        }
        let (same, upto) = self.same(now, out, ino, (from, to), offers)?;
        to = upto;
        let offered = match same {
            true => Some(to),
            false => {
                let most = from + offers.blocks * BLOCK_BYTES;
                self.offer(now, out, record, &extent, (from, to.min(most)))?
            }
        };
        let to = match offered {
            Some(to) => to,
            None => match self.bytes(now, out, ino, (from, to))? {
                Some(to) => to,
                // When it is mended.
                None => return Ok(Some(at)),
            },
        };
        if extent.shared {
            self.shared_offered |= offered.is_some();
            self.shared.add(ino, &extent, from, to);
        }
        // Of the block with the last byte there is no more.
        Ok(Some(to.next_multiple_of(BLOCK_BYTES)))
    }

    /// Whether the node has bytes of a file from before, or may not have them, and up to where.
    fn same(
        &self,
        now: &Volume,
        out: &mut Synthetic,
        ino: InodeId,
        (from, to): (u64, u64),
        offers: &Offers,
    ) -> Result<(bool, u64), Failure> {
        let Some(since) = &offers.since else { return Ok((false, to)) };
        let first = from / BLOCK_BYTES;
        let end = to.div_ceil(BLOCK_BYTES).min(first + OFFER_BLOCKS);
        let (same, blocks) = self.view.same_since(now, ino, (first, end), since)?;
        if same {
            out.same.push(Part { ino, first, count: blocks as u32 });
        }
        Ok((same, to.min((first + blocks) * BLOCK_BYTES)))
    }

    /// Some bytes of an extent: up to where. None: they are rotten.
    fn bytes(
        &self,
        now: &Volume,
        out: &mut Synthetic,
        ino: InodeId,
        (from, to): (u64, u64),
    ) -> Result<Option<u64>, Failure> {
        let to = to.min(from + CONTENT as u64);
        let mut data = vec![0u8; (to - from) as usize];
        let n = now.read_checked(ino, from, &mut data, &mut out.wrong)?;
        if !out.wrong.is_empty() && !planted(Bug::RotSent) {
            return Ok(None);
        }
        data.truncate(n);
        if n > 0 {
            out.op(&Op::Write { ino, offset: from, data: &data, clear_setid: false });
        }
        Ok(Some(to))
    }

    /// Offers blocks of an extent: up to where. None: what they should be is not known, or the file has another end by now than
    /// it had at the moment, and this is the block in which it lies.
    fn offer(
        &self,
        now: &Volume,
        out: &mut Synthetic,
        record: &InodeRecord,
        extent: &Extent,
        (from, to): (u64, u64),
    ) -> Result<Option<u64>, Failure> {
        let mut to = to;
        if !to.is_multiple_of(BLOCK_BYTES)
            && now.attr(record.ino)?.is_none_or(|now| now.size != record.size)
        {
            to = to / BLOCK_BYTES * BLOCK_BYTES;
        }
        let (first, count) = (from / BLOCK_BYTES, to.div_ceil(BLOCK_BYTES) - from / BLOCK_BYTES);
        let block = (extent.arena_offset + (from - extent.offset)) / BLOCK_BYTES;
        if count == 0 {
            return Ok(None);
        }
        let Some(crcs) = now.crcs(extent.arena, block, count)? else { return Ok(None) };
        out.offered += count;
        out.offers.push(Offered { ino: record.ino, first, crcs });
        Ok(Some(to))
    }
}

impl Node {
    /// Whether a node that wants to join is to be sent something from the beginning, as of now.
    fn joins_anew(&mut self, from: NodeId, incarnation: u64) -> Result<bool, Failure> {
        let now = (!self.fenced).then_some(self.env.now);
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        head.keeping.heard_of(from);
        if !head.ready || !self.view.syncing.contains(&from) {
            return Ok(false);
        }
        let asks_again = head.joining.get(&from) == Some(&incarnation);
        let followed = head.followers.contains(&from);
        if !head.begins_anew(from, incarnation, now) {
            return Ok(false);
        }
        if followed {
            self.followed_no_more()?;
        }
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        let comes = |s: &Outgoing| s.is_open() || self.env.now < s.heard + LOST;
        if asks_again && head.snapshots.get(&from).is_some_and(comes) {
            // There was more to do before the next piece than the node waits. Beginning anew would take
            // as long again.
            return Ok(false);
        }
        // What it held before is about to be wiped.
        head.acked.remove(&from);
        Ok(true)
    }

    /// A node wants to join a volume with snapshots; `had`: it may have some of the content, and says of what state.
    pub(super) fn image_wanted(
        &mut self,
        from: NodeId,
        incarnation: u64,
        had: Option<Claim>,
    ) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if head.joining.get(&from) != Some(&incarnation) {
            head.images_wanted.remove(&from);
        }
        if self.joins_anew(from, incarnation)?
            && let Some(head) = self.part.head_mut()
        {
            head.snapshots.remove(&from);
            // (It says so in the words of older programs as well.)
            let wanted = head.images_wanted.entry(from).or_default();
            *wanted = had.or(*wanted);
        }
        Ok(())
    }

    /// A node wants to join: fixes the namespace of this moment.
    pub(super) fn snapshot_wanted(
        &mut self,
        from: NodeId,
        incarnation: u64,
        (had, in_place): (bool, bool),
        claim: Option<Claim>,
    ) -> Result<(), Failure> {
        if self.volume.has_snapshots() {
            return self.image_wanted(from, incarnation, None);
        }
        if !self.joins_anew(from, incarnation)? {
            return Ok(());
        }
        self.env.counters.snapshots += 1;
        // Content is read from the arenas, which hold what is published, and must not be older.
        self.publish_all()?;
        log::info!("node {from} joins at stream position {}", self.member.applied);
        let (seq, heard) = (self.member.applied, self.env.now);
        let had = had && self.volume.sums_base().is_some();
        let blocks = if had { self.env.config.limits.offer_blocks } else { 0 };
        let since = claim.filter(|_| blocks > 0).and_then(|claim| self.since(claim));
        if let Some(since) = since {
            log::info!("node {from} has what was published up to {}", since.position);
        }
        let offers = Offers::new(blocks, since, self.env.random.next_u64());
        let in_place = in_place && since.is_some() && self.env.config.limits.in_place;
        if in_place {
            log::info!("it is brought to this state in place");
        }
        let view = self.volume.view();
        let dump = Some(if in_place { Dump::in_place(view) } else { Dump::new(view) });
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let inodes = self.volume.root().inodes;
        let pass = head.begin_pass(from, incarnation);
        // (Who knows of nothing before is sent all of it again.)
        let waited_for = claim.is_none() || pass >= PASSES || planted(Bug::JoinStalls);
        let start = Start { seq, waited_for, behind: false };
        let going = Outgoing::new(start, (dump, None), offers, inodes, heard);
        head.snapshots.insert(from, going);
        Ok(())
    }

    /// A node that had everything begins anew: nobody waits for what it does not acknowledge any more.
    pub(super) fn followed_no_more(&mut self) -> Result<(), Failure> {
        if planted(Bug::FollowerAwaited) { Ok(()) } else { self.advance_acks() }
    }

    /// A joining node has applied a piece.
    pub(super) fn snapshot_acked(&mut self, from: NodeId, seq: StreamSeq, piece: u32) {
        let Some(head) = self.part.head_mut() else { return };
        let now = self.env.now;
        if let Some(going) = head.snapshots.get_mut(&from).filter(|s| s.start.seq == seq) {
            // Of a snapshot that was begun anew at the same position: no piece counts that was not sent.
            let acked = going.offers.bounds(piece.saturating_add(1).min(going.number));
            if acked > going.acked {
                (going.acked, going.heard) = (acked, now);
            }
        }
    }

    /// It has taken over what it can of a piece that offers.
    pub(super) fn offer_answered(
        &mut self,
        from: NodeId,
        seq: StreamSeq,
        (piece, id): (u32, u64),
        lacks: &[Part],
        doubts: &[Doubt],
    ) {
        let Some(head) = self.part.head_mut() else { return };
        let going =
            head.snapshots.get_mut(&from).filter(|s| s.start.seq == seq && s.offers.id == id);
        if going.is_some_and(|going| going.offers.answered(piece, lacks, doubts)) {
            self.snapshot_acked(from, seq, piece);
        }
    }

    /// When the next piece is to be made that is put off.
    pub(super) fn snapshot_deadline(&self) -> Option<Nanos> {
        let acked = self.member.all_acked;
        let going = self.part.head()?.snapshots.values();
        going.filter_map(|s| s.due(acked)).filter(|at| *at > self.env.now).min()
    }

    /// How far the nodes are that are sent a snapshot.
    pub(super) fn join_status(&self) -> Vec<JoinStatus> {
        let Some(head) = self.part.head() else { return Vec::new() };
        let of = |(node, s): (&NodeId, &Outgoing)| JoinStatus {
            node: *node,
            inodes: s.inodes,
            passed: s.passed.min(s.inodes),
            sent: s.sent,
            since: self.env.now.saturating_sub(s.begun),
        };
        head.snapshots.iter().map(of).collect()
    }

    /// Makes and sends the next piece of a snapshot; `true` when there was one.
    pub(super) fn snapshot_step(&mut self) -> Result<bool, Failure> {
        let (now, acked) = (self.env.now, self.member.all_acked);
        let enough = self.view.chain.len() >= self.view.least;
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        let open =
            |(n, s): (&NodeId, &Outgoing)| s.due(acked).is_some_and(|at| now >= at).then_some(*n);
        let Some(node) = head.snapshots.iter().find_map(open) else { return Ok(false) };
        let Some(mut going) = head.snapshots.remove(&node) else { return Ok(false) };
        if enough {
            // (With fewer members nobody's wait ends before this node is in.)
            let writes = self.ring.last() > going.yields.0;
            going.rests = if writes { now + REST } else { 0 };
            going.yields = (self.ring.last(), now + GOES_FIRST);
        }
        head.in_the_making = Some(going.start);
        let done = self.next_piece(node, going);
        if let Some(head) = self.part.head_mut() {
            let start = head.in_the_making.take();
            if let (Some(start), Some(going)) = (start, head.snapshots.get_mut(&node)) {
                going.start = start;
            }
        }
        done
    }

    /// The next piece for a node.
    fn next_piece(&mut self, node: NodeId, mut going: Outgoing) -> Result<bool, Failure> {
        let now = self.env.now;
        if let Some(image) = going.image.take() {
            let rest = self.image_piece(node, &mut going, image)?;
            let sent = rest.is_none() && going.told;
            going.image = rest;
            if (going.image.is_some() || sent)
                && let Some(head) = self.part.head_mut()
            {
                // The entry stays, as that of a snapshot.
                head.snapshots.insert(node, going);
            }
            return Ok(true);
        }
        let Some(mut dump) = going.dump.take() else { return Ok(false) };
        let mut writer = Synthetic::default();
        let mut left = self.env.config.join_step.max(1);
        while left > 0
            && writer.len() < PIECE
            && writer.offered < OFFERED_A_TURN
            && writer.compared < COMPARED
            && writer.same.len() < SAME_A_TURN
            && writer.ranges.len() < RANGES_A_TURN
            && writer.looked < LOOKED_A_TURN
            && dump.stage != Stage::Done
            && writer.wrong.is_empty()
        {
            let made = if dump.stage == Stage::Items {
                !writer.ranges.is_empty()
            } else {
                writer.offers()
            };
            if dump.waits(&going.offers, made) {
                break;
            }
            let reads = dump.reads(&going.offers).and_then(|ino| self.member.dirty.get(&ino));
            let moving = reads.is_some_and(|(seq, ..)| *seq > self.member.published);
            if moving && !planted(Bug::MovedContent) {
                // Blocks that an operation has moved hold nothing before it is published.
                self.publish_all()?;
            }
            let steps = dump.step(&self.volume, left, &mut going.offers, &mut writer)?;
            left = left.saturating_sub(steps);
        }
        if planted(Bug::SnapshotPieceLost)
            && let Stage::Content(ino, _) = dump.stage
            && dump.view.inodes_after(ino, 1)?.is_empty()
        {
            dump.stage = Stage::Done;
        }
        if !writer.wrong.is_empty() && !planted(Bug::RotSent) {
            self.suspect_all(&writer.wrong);
            going.pause = self.env.now + MENDING;
            if writer.len() == 0 && !writer.offers() {
                going.dump = Some(dump);
                if let Some(head) = self.part.head_mut() {
                    head.snapshots.insert(node, going);
                }
                return Ok(false);
            }
        }
        let (end, offers) = (dump.stage == Stage::Done, writer.offers());
        let in_place = dump.reconciling.is_some();
        let (seq, last_inode) = (going.start.seq, self.volume.last_inode());
        going.passed = if end { going.inodes } else { dump.passed };
        let bytes = (writer.len() + writer.offers_bytes()) as u64;
        going.sent += bytes;
        let rate = self.env.config.limits.join_rate;
        if rate > 0 {
            // What is compared costs memory's time here, and nothing on the link.
            let compared = writer.compared.max(writer.offered) * BLOCK_BYTES / 64;
            let nanos = u128::from(bytes + compared) * 1_000_000_000 / u128::from(rate);
            going.pause = now.saturating_add(nanos as u64);
        }
        let has_items = !writer.items.is_empty();
        if has_items {
            // (Before all else of this turn: a file is emptied before its content comes.)
            let (piece, id, raw) = (going.next(), going.offers.id, writer.items);
            if !writer.ranges.is_empty() {
                going.offers.made(piece);
                if let Some(reconciling) = &mut dump.reconciling {
                    reconciling.asked(piece, writer.ranges);
                }
            }
            self.send(node, Message::SnapshotItems { seq, piece, id, last_inode, raw });
        }
        for raw in writer.done {
            let piece = going.next();
            let message =
                Message::Snapshot { seq, piece, last_inode, end: false, waits: true, raw };
            self.send(node, message);
        }
        if end || !writer.raw.is_empty() || !(offers || has_items || in_place) {
            let (piece, raw) = (going.next(), writer.raw);
            let (view, now) = (&self.view, self.env.now);
            let waits =
                self.part.head().is_some_and(|h| h.keeping.waits_for_others_than(node, view, now));
            self.send(node, Message::Snapshot { seq, piece, last_inode, end, waits, raw });
        }
        if !writer.offers.is_empty() || !writer.sure.is_empty() {
            let (piece, id) = (going.next(), going.offers.id);
            let (offers, sure) = (writer.offers, writer.sure);
            going.offers.made(piece);
            self.send(node, Message::SnapshotOffer { seq, piece, id, offers, sure });
        }
        if !writer.same.is_empty() {
            let (piece, id, parts) = (going.next(), going.offers.id, writer.same);
            going.offers.made(piece);
            self.send(node, Message::SnapshotSame { seq, piece, id, parts });
        }
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        if !end {
            going.dump = Some(dump);
        } else if planted(Bug::CaughtUpEarly) {
            let process = head.joining.get(&node).copied().unwrap_or(0);
            self.env.out.push(Effect::CaughtUp(node, process, self.view.epoch));
        }
        // The entry stays, and with it the chunks after `seq`, until the node says it is done.
        head.snapshots.insert(node, going);
        Ok(true)
    }
}

impl Head {
    /// From where on nodes that join have to have the stream: behind a snapshot, and behind what who has that holds of it.
    pub(super) fn held(&self) -> impl Iterator<Item = StreamSeq> {
        let sent = self.snapshots.values().map(|going| going.start).chain(self.in_the_making);
        let sent = sent.filter(|place| !place.behind).map(|place| place.seq);
        let follow = self.followers.iter().filter_map(|node| self.acked.get(node).copied());
        sent.chain(follow).chain(self.catching_up.values().map(|at| at.acked))
    }

    /// There is no room in the ring: who is sent a snapshot, and need not be waited for, is left behind. `false`: nobody.
    pub(super) fn leave_behind(&mut self) -> bool {
        let mut left = false;
        self.wait_for_catching_up();
        let making = self.in_the_making.as_mut().map(|place| (None, place));
        let places = self.snapshots.iter_mut().map(|(node, going)| (Some(*node), &mut going.start));
        for (node, place) in places.chain(making) {
            if !place.waited_for && !place.behind {
                log::info!(
                    "the stream goes on without {}, which is to join at {}: it is sent what changes meanwhile when it has that",
                    node.map_or("a node".into(), |node| format!("node {node}")),
                    place.seq
                );
                (place.behind, left) = (true, true);
            }
        }
        left
    }

    /// A snapshot is begun for a process; the how manyth that is.
    pub(super) fn begin_pass(&mut self, node: NodeId, incarnation: u64) -> u32 {
        let pass = self.passes.entry(node).or_default();
        *pass = (incarnation, if pass.0 == incarnation { pass.1.saturating_add(1) } else { 1 });
        pass.1
    }

    /// A process of a node joins, from the beginning. `false`: it may be in the chain already, by the word of this head, and
    /// must neither be wiped nor cut. It asks again. (`now`: none while the coordinator is out of reach.)
    pub(super) fn begins_anew(
        &mut self,
        from: NodeId,
        incarnation: u64,
        now: Option<Nanos>,
    ) -> bool {
        let before = self.joining.insert(from, incarnation);
        self.catching_up.remove(&from);
        if before.is_some_and(|old| old != incarnation) {
            // What was promised for the process before it, the coordinator refuses to this one.
            self.promised.remove(&from);
        }
        let open = |at: &u64| now.is_none_or(|now| now < at + PROMOTE_KNOWN);
        let stays = self.promised.get(&from).is_some_and(open) && !planted(Bug::PromisedWiped);
        if !stays || planted(Bug::PromisedUnawaited) {
            self.followers.remove(&from);
        } else {
            // It is waited for, as it may be in the chain; but what it asked may have come late, or it has begun anew, so nobody
            // vouches for it again before it has said what it holds, and the promise ends.
            self.acked.remove(&from);
        }
        !stays
    }
}

fn nanos(s: Stamp) -> u64 {
    u64::try_from(s.sec).unwrap_or(0).saturating_mul(1_000_000_000) + u64::from(s.nsec)
}

/// Entries made by the service to describe a state.
#[derive(Default)]
struct Synthetic {
    done: Vec<Vec<u8>>,
    raw: Vec<u8>,
    time: u64,
    /// Content that could not be read because it is rotten.
    wrong: Vec<Place>,
    /// What is offered, after the entries, and how many blocks that is.
    offers: Vec<Offered>,
    offered: u64,
    /// What the node is to take over, and how many blocks were compared.
    sure: Vec<Part>,
    compared: u64,
    /// What has not changed since the state that the node has.
    same: Vec<Part>,
    /// Parts of what a node is sent that is brought to this state in place, and the ranges in them that it is asked about.
    items: Vec<u8>,
    ranges: Vec<(Key, Option<Key>)>,
    /// Blocks of which it was asked here whether they have changed.
    looked: u64,
}

impl Synthetic {
    fn op(&mut self, op: &Op<'_>) {
        let bytes = op.to_entry(Sequence(1), Epoch(0), 0, self.time, 0);
        if self.raw.len() + bytes.len() > MESSAGE && !self.raw.is_empty() {
            self.done.push(std::mem::take(&mut self.raw));
        }
        self.raw.extend(bytes);
    }

    fn times(&mut self, r: &InodeRecord) {
        self.time = nanos(r.ctime);
        self.op(&Op::SetAttr {
            ino: r.ino,
            mask: mask::ALL,
            mode: r.mode & 0o7777,
            uid: r.uid,
            gid: r.gid,
            atime: r.atime,
            mtime: r.mtime,
        });
    }

    /// Bytes of what is offered, about.
    fn offers_bytes(&self) -> usize {
        let offered = self.offers.iter().map(|o| 20 + 4 * o.crcs.len()).sum::<usize>();
        offered + 20 * (self.sure.len() + self.same.len())
    }

    /// Whether something is offered.
    fn offers(&self) -> bool {
        !self.offers.is_empty() || !self.sure.is_empty() || !self.same.is_empty()
    }

    fn len(&self) -> usize {
        self.raw.len() + self.done.iter().map(Vec::len).sum::<usize>() + self.items.len()
    }
}
