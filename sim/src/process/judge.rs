//! Judging of calls: what an entry must be that a call appends, and what the call may give.

use std::ops::Range;

use base::InodeId;
use client::fs::{
    Attr, LockKind, LockSpace, O_ACCMODE, O_DIRECTORY, O_EXCL, O_RDONLY, O_TRUNC, Time, XattrMode,
    falloc,
};
use storage::format::entry::mask;

use super::call::{Call, Reply, Value, Walked};
use super::effects::ACL;
use super::host::CHANGED;
use super::*;
use crate::model::{Body, Look, State};
use crate::rights::{R, W, X};

const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;

/// Something that a caller must be allowed, of an inode: why it is not, if it is known.
type Need<'a> = (u64, Box<dyn Fn(&State) -> Option<Result<(), Errno>> + 'a>);

fn nanos(time: Time) -> u64 {
    time.sec as u64 * 1_000_000_000 + u64::from(time.nsec)
}

/// Whether a state has these attributes.
fn has(state: &State, attr: &Attr) -> bool {
    let (size, links) = match &state.body {
        Body::File(bytes, links) => (bytes.len() as u64, *links),
        Body::Symlink(target, links) => (target.len() as u64, *links),
        Body::Dir(_) => (attr.size, attr.nlink),
        // It may be there for a while.
        Body::Gone => return attr.nlink == 0,
    };
    (state.mode, state.uid, state.gid, state.mtime, state.ctime, size, links)
        == (
            attr.mode,
            attr.uid,
            attr.gid,
            nanos(attr.mtime),
            nanos(attr.ctime),
            attr.size,
            attr.nlink,
        )
}

/// The bytes that an operation changes, of which inode. (What moves or cuts a file has to do with all of it.)
fn changed(op: &Op<'_>) -> Option<(u64, Range<u64>)> {
    match *op {
        Op::Write { ino, offset, data, .. } => Some((ino.0, offset..offset + data.len() as u64)),
        Op::Truncate { ino, .. }
        | Op::Fallocate { ino, .. }
        | Op::Shift { ino, .. }
        | Op::CloneRange { ino, .. } => Some((ino.0, 0..u64::MAX)),
        _ => None,
    }
}

impl Piece {
    /// Whether an entry of a later session is this one, which did not count, once more. (A write tells by its bytes.)
    fn is_again(&self, op: &Op<'_>, what: &str) -> bool {
        let kind = |text: &str| text.split([' ', '{']).next().map(str::to_owned);
        match op {
            Op::Write { .. } => false,
            Op::CloneRange { .. } => self.what == what,
            _ => kind(&self.what) == kind(what),
        }
    }
}

impl World<'_> {
    // --- entries ---

    /// The entry must be one that the call is for.
    pub(super) fn judge_entry(
        &mut self,
        c: usize,
        t: usize,
        (session, seq): (usize, u64),
        op: &Op<'_>,
    ) -> Result<(), String> {
        let size = match op {
            Op::Write { ino, .. } => match self.model.current(ino.0).map(|s| &s.body) {
                Some(Body::File(bytes, _)) => bytes.len() as u64,
                _ => 0,
            },
            _ => 0,
        };
        if let Some((ino, range)) = changed(op)
            && let Some(other) = self.in_the_middle(c, t, ino, &range)
        {
            let what = brief(op);
            return Err(format!("client {c}.{t} does {seq} {what} in the middle of a {other}"));
        }
        let void = self.may_be_void(c, t, op);
        if !void && let Some(why) = self.oversteps(c, t, op) {
            let who = Who::of(self.actors[c].uid);
            let call = self.thread(c, t).and_then(|t| t.under_way.as_ref());
            let (call, who) =
                call.map_or_else(|| (String::new(), who), |u| (u.call.brief(), u.who));
            let what = brief(op);
            return Err(format!(
                "client {c}.{t} does {seq} {what} for {call} as {}: {why}",
                who.uid
            ));
        }
        // What was refused may have been the end of the file for its process.
        let size = match op {
            Op::Write { offset, .. } if void => *offset,
            _ => size,
        };
        let Some(under_way) = self.thread(c, t).and_then(|thread| thread.under_way.as_mut()) else {
            return Err(format!("client {c}.{t} does {seq} {} outside of any call", brief(op)));
        };
        under_way.entries += 1;
        let (before, what) = (under_way.wrote, brief(op));
        let earlier = under_way.last_part.take().filter(|part| part.session != session);
        let mut again = earlier.as_ref().filter(|part| part.is_again(op, &what)).cloned();
        let mut fits = under_way.fits(op, size);
        if let (false, Some(part)) = (fits, earlier) {
            // What was appended when the session ended counts perhaps not, and is done again.
            under_way.wrote = part.before;
            under_way.first.take_if(|_| part.before == 0);
            fits = under_way.fits(op, size);
            again = Some(part);
        }
        if fits {
            let before = again.as_ref().map_or(before, |part| part.before);
            under_way.last_part = Some(Piece { session, seq, what, before });
            if let (Some(part), Some(process)) = (again, self.process(c)) {
                let mut all = process.attached.iter_mut();
                if let Some(ended) = all.find(|a| a.session == part.session) {
                    ended.again.insert(part.seq);
                }
            }
            return Ok(());
        }
        let call = under_way.call.brief();
        Err(format!("client {c}.{t} does {seq} {} for {call}", brief(op)))
    }

    /// Why an entry is none that the caller may bring about, or is not what the call comes to: as everything is at this
    /// moment, under its leases.
    fn oversteps(&self, c: usize, t: usize, op: &Op<'_>) -> Option<String> {
        let bound = Who::of(self.actors[c].uid);
        let u = self.actors[c].process.as_ref()?.threads[t].under_way.as_ref()?;
        let ended = |ino: InodeId| self.model.current(ino.0).map_or(0, |s| bound.ends(s));
        let ends_first = |ino: InodeId| match ended(ino) {
            0 => None,
            bits => Some(format!("the bits {bits:o} should have ended before")),
        };
        if let Some(why) = u.who.barred(&self.model, op) {
            return Some(why.into());
        }
        match *op {
            Op::Create { parent, mode, uid, gid, .. }
            | Op::Tmpfile { parent, mode, uid, gid, .. } => {
                let asked = match &u.call {
                    Call::Make { mode, .. } => *mode,
                    Call::Create { mode, .. } => S_IFREG | *mode,
                    _ => S_IFREG | 0o644,
                };
                let dir = self.model.current(parent.0)?;
                let (group, made) = u.who.makes(dir, asked, u.umask)?;
                let good = (uid, gid, mode) == (u.who.uid, group, made);
                (!good).then(|| format!("it should have group {group} and mode {made:o}"))
            }
            Op::Write { ino, clear_setid, .. } | Op::Truncate { ino, clear_setid, .. } => {
                let state = self.model.current(ino.0)?;
                let (mode, ends) = (state.mode, bound.ends(state));
                // The entry ends them itself, but for what a member of the group would keep.
                let clears = mode & (0o4000 | if mode & 0o10 != 0 { 0o2000 } else { 0 });
                // It may say so again where one that did may be refused.
                let misses = !clear_setid && ends & clears != 0;
                if misses || clear_setid && bound.uid == 0 || ends & !clears != 0 {
                    return Some(format!("of {mode:o}, {ends:o} should end"));
                }
                let sized = matches!(u.call, Call::Truncate { .. });
                let barred = sized && u.who.may(state, W) == Some(false);
                barred.then(|| "it may not write to the file".into())
            }
            Op::Fallocate { ino, .. } | Op::Shift { ino, .. } | Op::CloneRange { ino, .. } => {
                ends_first(ino)
            }
            Op::SetAttr { ino, mask, mode, uid, gid, .. } => {
                // (A directory that somebody has removed may be open still; the model has nothing of it. Seed 8936694.)
                let state = self.model.current(ino.0).filter(|state| !state.is_gone())?;
                let Call::SetAttr { set, .. } = &u.call else {
                    let who = if matches!(u.call, Call::SetXattr { .. }) { u.who } else { bound };
                    let ends = match (&u.call, who.uid, who.in_group(state.gid)) {
                        (Call::SetXattr { .. }, 0, _) | (Call::SetXattr { .. }, _, true) => 0,
                        (Call::SetXattr { .. }, ..) => 0o2000,
                        _ => who.ends(state),
                    };
                    let kept = state.mode & 0o7777 & !mode;
                    let good = mask == mask::MODE && mode & !state.mode == 0 && kept & !ends == 0;
                    return (!good).then(|| format!("of {:o}, {ends:o} may end", state.mode));
                };
                if let Err(errno) = u.who.sets(state, set) {
                    return Some(format!("that is {errno:?}"));
                }
                let (fields, bits, owner, group) = u.who.set(state, set);
                let good = fields == mask
                    && (mask & mask::MODE == 0 || mode == bits)
                    && (mask & (mask::UID | mask::GID) == 0 || (uid, gid) == (owner, group));
                (!good).then(|| format!("it comes to {fields:x} {bits:o} {owner} {group}"))
            }
            _ => None,
        }
    }

    /// The write of several entries to these bytes of the inode in the middle of which another thread of the process is.
    fn in_the_middle(
        &mut self,
        c: usize,
        t: usize,
        ino: u64,
        range: &Range<u64>,
    ) -> Option<String> {
        let session = self.by(c)?;
        let threads = self.process(c)?.threads.iter().enumerate();
        let others = threads.filter(|(n, _)| *n != t).filter_map(|(_, o)| o.under_way.as_ref());
        let mut writes = others.filter(|u| match &u.call {
            // (One that was cut by the end of a session may be done.)
            Call::Write { ino: of, offset, data, append, .. } => {
                let begun = u.last_part.as_ref().is_some_and(|part| part.session == session);
                // Appends have all of it.
                let theirs = if u.appends || *append {
                    0..u64::MAX
                } else {
                    *offset..offset + data.len() as u64
                };
                let meet = theirs.start.max(range.start) < theirs.end.min(range.end);
                *of == ino && begun && meet && (1..data.len()).contains(&u.wrote)
            }
            _ => false,
        });
        writes.next().map(|u| u.call.brief())
    }

    // --- results ---

    /// A call has come back.
    pub(super) fn call_done(
        &mut self,
        c: usize,
        t: usize,
        reply: &Reply,
        walked: &[Walked],
    ) -> Result<(), String> {
        let Some(mut under_way) = self.thread(c, t).and_then(|thread| thread.under_way.take())
        else {
            return Err(format!("thread {c}.{t}: a result of no call"));
        };
        self.trace(|| format!("thread {c}.{t} gets {}", brief_reply(reply)));
        // What it sees may be so because another's session is over, whose process has not seen it yet.
        for other in 0..self.actors.len() {
            self.look_at_ended(other)?;
        }
        self.outcome.observations += 1;
        self.no_refusals(c)?;
        if under_way.joint.iter().any(|(client, _)| !self.lives(c, *client)) {
            // What was taken, or whether, died with the session.
            under_way.entries = under_way.entries.max(1);
        }
        let locked = self.judge_lock((c, t), &under_way, reply);
        let walk = walked.iter().try_for_each(|step| self.judge_step(c, &under_way, step));
        let judged = walk.and_then(|()| self.judge_reply((c, t), &under_way, reply));
        let judged = judged.and_then(|()| self.judge_joint(c, &under_way, reply));
        let oldest = self.actors.iter().filter_map(|a| a.process.as_ref()).flat_map(|p| &p.threads);
        let oldest = oldest.filter_map(|t| t.under_way.as_ref().map(|u| u.since)).min();
        self.model.forget_before(oldest.unwrap_or(self.model.now()));
        let by = under_way.who.uid;
        judged.map_err(|e| format!("client {c}.{t} as {by}, {}: {e}", under_way.call.brief()))?;
        locked
    }

    fn judge_reply(
        &mut self,
        (c, t): (usize, usize),
        under_way: &UnderWay,
        reply: &Reply,
    ) -> Result<(), String> {
        let judged = match reply {
            Ok(Value::Astray) => return Ok(()),
            Ok(value) => self.judge_value(c, t, under_way, value),
            Err(errno) => self.judge_error(c, under_way, *errno),
        };
        judged?;
        self.judge_told(c, under_way, reply.as_ref().err().copied())
    }

    /// A name was looked up on the way to what a call is about.
    fn judge_step(
        &mut self,
        c: usize,
        u: &UnderWay,
        (dir, name, found): &Walked,
    ) -> Result<(), String> {
        let call = Call::Lookup { dir: *dir, name: name.clone() };
        let judged = match found {
            Ok(ino) => {
                self.judge_let(c, u, &call)?;
                self.saw_name(c, u, *dir, name, *ino)
            }
            Err(errno) => self.judge_error_of(c, u, &call, *errno),
        };
        judged.map_err(|e| format!("on the way, {}: {e}", call.brief()))
    }

    /// What a caller must be allowed for a call.
    fn needs<'a>(&self, u: &UnderWay, call: &'a Call) -> Vec<Need<'a>> {
        let who = u.who;
        let access = |ino: u64, what: u32| -> Need<'a> {
            let access = move |s: &State| match who.may(s, what)? {
                true => Some(Ok(())),
                false => Some(Err(Errno::ACCES)),
            };
            (ino, Box::new(access))
        };
        match call {
            Call::Lookup { dir, .. } => vec![access(*dir, X)],
            Call::Readdir { dir } => vec![access(*dir, R)],
            Call::Make { dir, .. } | Call::Tmpfile { dir } | Call::Remove { dir, .. } => {
                vec![access(*dir, X), access(*dir, W | X)]
            }
            Call::Link { ino, dir, .. } => {
                let links = move |s: &State| match who.may_link(s)? {
                    true => Some(Ok(())),
                    false => Some(Err(Errno::PERM)),
                };
                vec![access(*dir, X), access(*dir, W | X), (*ino, Box::new(links))]
            }
            Call::Create { dir, name, .. } => {
                let there = self.leads(*dir, name, u).into_iter().flatten();
                let mut all = vec![access(*dir, X), access(*dir, W | X)];
                all.extend(there.map(|ino| access(ino, R | W)));
                all
            }
            Call::Rename { dir, dir2, name, name2, flags } => {
                let mut all = vec![access(*dir, W | X), access(*dir2, W | X)];
                let mut moved = self.leads(*dir, name, u);
                if *flags == 2 {
                    moved.extend(self.leads(*dir2, name2, u));
                }
                let dirs = moved.into_iter().flatten().filter(|_| dir != dir2);
                let dirs = dirs.filter(|ino| self.ever(*ino, u, |s| s.mode & S_IFMT == S_IFDIR));
                all.extend(dirs.map(|ino| access(ino, W)));
                all
            }
            Call::Open { ino, flags } => {
                let write = flags & O_ACCMODE != O_RDONLY || flags & O_TRUNC != 0;
                vec![access(*ino, R | if write { W } else { 0 })]
            }
            Call::OpenDir { ino, what } if *what != 0 => vec![access(*ino, *what)],
            Call::Truncate { ino, .. } => vec![access(*ino, W)],
            Call::GetXattr { ino, name } if *name != ACL => vec![access(*ino, R)],
            Call::SetXattr { ino, name, .. } => {
                let sets = move |s: &State| {
                    let unsure = who.may(s, W).is_none() && !name.starts_with(b"system.");
                    if unsure { None } else { Some(who.sets_xattr(s, name)) }
                };
                vec![(*ino, Box::new(sets))]
            }
            Call::SetAttr { ino, set } => {
                let sets = move |s: &State| who.may(s, W).map(|_| who.sets(s, set));
                vec![(*ino, Box::new(sets))]
            }
            Call::SetProject { ino, .. } | Call::SetQuota { ino, .. } => {
                let sets =
                    move |_: &State| Some(if who.uid == 0 { Ok(()) } else { Err(Errno::PERM) });
                vec![(*ino, Box::new(sets))]
            }
            _ => Vec::new(),
        }
    }

    /// A call that has succeeded must have been allowed, at some moment. What appends entries is judged by these.
    fn judge_let(&self, c: usize, u: &UnderWay, call: &Call) -> Result<(), String> {
        let judged = match call {
            Call::Create { .. } => return Ok(()),
            Call::Rename { dir, name, dir2, name2, .. } if u.entries == 0 => {
                // Both names of one inode.
                self.judge_let(c, u, &Call::Lookup { dir: *dir, name: name.clone() })?;
                return self.judge_let(c, u, &Call::Lookup { dir: *dir2, name: name2.clone() });
            }
            Call::Make { .. }
            | Call::Tmpfile { .. }
            | Call::Remove { .. }
            | Call::Link { .. }
            | Call::Rename { .. }
            | Call::SetXattr { .. } => u.entries > 0,
            _ => false,
        };
        if u.who.uid == 0 || judged {
            return Ok(());
        }
        for (ino, need) in self.needs(u, call) {
            let states = self.model.during(ino, u.since);
            let mut states = states.iter().filter(|s| s.mode != 0).peekable();
            let known = states.peek().is_some();
            if known && !states.any(|s| !matches!(need(s), Some(Err(_)))) {
                if self.is_tainted(c, u, &[ino]) {
                    continue;
                }
                return Err(format!("it may not do that to {ino}; {}", self.what_may_be(u)));
            }
        }
        Ok(())
    }

    /// Whether a call may have been refused with that error, by somebody's right.
    fn may_be_barred(&self, c: usize, u: &UnderWay, call: &Call, errno: Errno) -> bool {
        let bars = |(ino, need): Need<'_>| {
            let states = self.model.during(ino, u.since);
            // Of a directory that was removed, and that somebody has open, the model does not know the mode any more.
            if states.iter().any(|s| s.mode == 0) && self.keeps_dir(c, ino, u) {
                return true;
            }
            let mut states = states.iter().filter(|s| s.mode != 0);
            states.any(|s| need(s).is_none_or(|need| need == Err(errno)))
        };
        if u.who.uid == 0 {
            return false;
        }
        if matches!(errno, Errno::ACCES | Errno::PERM) && self.needs(u, call).into_iter().any(bars)
        {
            return true;
        }
        // A sticky directory.
        let sticks = |dir: u64, name: &[u8]| {
            let dirs = self.model.during(dir, u.since);
            self.leads(dir, name, u).into_iter().flatten().any(|ino| {
                let victims = self.model.during(ino, u.since);
                dirs.iter().any(|dir| victims.iter().any(|v| !u.who.may_take(dir, v)))
            })
        };
        errno == Errno::PERM
            && match call {
                Call::Remove { dir, name, .. } => sticks(*dir, name),
                Call::Rename { dir, name, dir2, name2, .. } => {
                    sticks(*dir, name) || sticks(*dir2, name2)
                }
                _ => false,
            }
    }

    /// Who may not search a directory does not learn what is there.
    fn judge_silence(&self, u: &UnderWay, call: &Call, errno: Errno) -> Result<(), String> {
        let tells =
            [Errno::NOENT, Errno::EXIST, Errno::ISDIR, Errno::NOTDIR, Errno::NOTEMPTY, Errno::NXIO];
        let dirs = match call {
            // What is to be linked is gone: nothing is said of names.
            Call::Link { ino, .. }
                if errno == Errno::NOENT && self.ever(*ino, u, State::is_gone) =>
            {
                Vec::new()
            }
            Call::Lookup { dir, .. }
            | Call::Make { dir, .. }
            | Call::Create { dir, .. }
            | Call::Remove { dir, .. }
            | Call::Link { dir, .. } => vec![*dir],
            // The old name is looked for first.
            Call::Rename { dir, name, .. }
                if errno == Errno::NOENT && self.leads(*dir, name, u).contains(&None) =>
            {
                vec![*dir]
            }
            Call::Rename { dir, dir2, .. } => vec![*dir, *dir2],
            _ => Vec::new(),
        };
        if u.who.uid == 0 || !tells.contains(&errno) {
            return Ok(());
        }
        for dir in dirs {
            let states = self.model.during(dir, u.since);
            if !states.iter().any(|s| s.mode == 0 || s.is_gone() || u.who.may(s, X) != Some(false))
            {
                return Err(format!("fails with {errno:?}, and may not search {dir}"));
            }
        }
        Ok(())
    }

    /// Nothing of a process that keeps the rules is ever refused.
    fn no_refusals(&mut self, c: usize) -> Result<(), String> {
        let doubts = self.preset.doubts();
        let Some(attached) = self.process(c).and_then(|p| p.attached.last()) else { return Ok(()) };
        if doubts || attached.memory.peek(control::REFUSALS) == 0 {
            return Ok(());
        }
        let (seq, errno) = (
            attached.memory.peek(control::REFUSED_SEQ),
            attached.memory.peek(control::REFUSED_ERRNO),
        );
        Err(format!("client {c} {:#x}: operation {seq} refused with {errno}", attached.client.0))
    }

    fn by(&mut self, c: usize) -> Option<usize> {
        self.process(c)?.attached.last().map(|a| a.session)
    }

    /// A part of an inode was seen.
    fn saw(
        &mut self,
        c: usize,
        u: &UnderWay,
        ino: u64,
        what: impl FnOnce() -> String,
        fits: impl Fn(&State) -> bool,
    ) -> Result<(), String> {
        self.saw_look(c, u, ino, what, &Look::Of(&fits))
    }

    fn saw_look(
        &mut self,
        c: usize,
        u: &UnderWay,
        ino: u64,
        what: impl FnOnce() -> String,
        look: &Look<'_>,
    ) -> Result<(), String> {
        let sessions = |p: &mut Process| p.attached.iter().map(|a| a.session).collect::<Vec<_>>();
        let by: Vec<usize> = self.process(c).map(sessions).unwrap_or_default();
        let seen = self.model.glimpse(&by, ino, u.since, false, look);
        if seen.is_err() && (self.is_tainted(c, u, &[ino]) || self.is_of_past_head(c, u)) {
            return Ok(());
        }
        seen.map_err(|e| format!("seen {}; {e}", what()))
    }

    fn saw_attr(&mut self, c: usize, u: &UnderWay, attr: &Attr) -> Result<(), String> {
        let Attr { ino, mode, nlink, uid, gid, size, mtime, ctime, .. } = *attr;
        let what = || {
            let times = (nanos(mtime), nanos(ctime));
            format!("{mode:o} uid {uid} gid {gid} nlink {nlink} size {size} times {times:?}")
        };
        self.saw(c, u, ino.0, what, |state| has(state, attr))
    }

    fn judge_value(
        &mut self,
        c: usize,
        t: usize,
        u: &UnderWay,
        value: &Value,
    ) -> Result<(), String> {
        self.judge_let(c, u, &u.call)?;
        match (&u.call, value) {
            (Call::Lookup { dir, name }, Value::Attr(attr)) => {
                self.saw_name(c, u, *dir, name, attr.ino.0)?;
                self.saw_attr(c, u, attr)
            }
            (Call::Getattr { ino } | Call::Fgetattr { ino, .. }, Value::Attr(attr))
            | (Call::Truncate { ino, .. } | Call::SetAttr { ino, .. }, Value::Attr(attr))
            | (Call::Link { ino, .. }, Value::Attr(attr)) => {
                if attr.ino.0 != *ino {
                    return Err(format!("attributes of {}", attr.ino));
                }
                if !matches!(u.call, Call::Getattr { .. } | Call::Fgetattr { .. }) {
                    did(u, 1)?;
                }
                self.saw_attr(c, u, attr)
            }
            (Call::Make { dir, name, .. }, Value::Attr(attr)) => {
                did(u, 1)?;
                self.saw_name(c, u, *dir, name, attr.ino.0)?;
                self.saw_attr(c, u, attr)
            }
            (Call::Create { dir, name, flags, .. }, Value::Made(attr, handle)) => {
                self.opened((c, t), u, *handle, attr.ino.0, *flags);
                if u.made.is_none() {
                    // It was there: then it was opened.
                    self.judge_let(c, u, &Call::Lookup { dir: *dir, name: name.clone() })?;
                    self.judge_let(c, u, &Call::Open { ino: attr.ino.0, flags: *flags })?;
                }
                self.saw_name(c, u, *dir, name, attr.ino.0)?;
                self.saw_attr(c, u, attr)
            }
            (Call::Tmpfile { .. }, Value::Made(attr, handle)) => {
                did(u, 1)?;
                self.opened((c, t), u, *handle, attr.ino.0, client::fs::O_RDWR | NAMELESS);
                self.saw_attr(c, u, attr)
            }
            (Call::Open { ino, flags }, Value::Opened(handle)) => {
                self.opened((c, t), u, *handle, *ino, *flags);
                self.saw(c, u, *ino, || "a file".into(), |s| s.mode & S_IFMT == S_IFREG)
            }
            (Call::OpenDir { ino, .. }, Value::Opened(handle)) => {
                self.opened((c, t), u, *handle, *ino, O_DIRECTORY);
                // Whoever has it open opens it again when it is gone.
                let fits = |s: &State| s.is_gone() || s.mode & S_IFMT == S_IFDIR;
                self.saw(c, u, *ino, || "a directory".into(), fits)
            }
            (Call::Lock { .. } | Call::Inherit, Value::Nothing)
            | (Call::TestLock { .. }, Value::Barring(_)) => Ok(()),
            (Call::Readlink { ino }, Value::Bytes(target)) => {
                let fits = |s: &State| matches!(&s.body, Body::Symlink(to, _) if to == target);
                self.saw(c, u, *ino, || format!("a link to {target:?}"), fits)
            }
            (Call::Readdir { dir }, Value::Names(names)) => {
                let all: BTreeMap<Vec<u8>, u64> = names.iter().cloned().collect();
                if all.len() != names.len() {
                    return Err(format!("a name twice in {names:?}"));
                }
                let fits = |s: &State| matches!(&s.body, Body::Dir(there) if *there == all);
                let what = || names.iter().map(|(n, i)| format!("{}={i} ", text(n))).collect();
                self.saw(c, u, *dir, what, fits)?;
                let by = self.by(c);
                self.model.vouch_seen(by, *dir, u.since, fits);
                Ok(())
            }
            (Call::Read { ino, offset, len, .. }, Value::Bytes(bytes)) => {
                self.saw_bytes(c, u, *ino, *offset, *len, bytes)
            }
            (Call::Write { .. }, Value::Written(written))
                if 0 < u.wrote && written.len == u.wrote && self.by(c) != u.current =>
            {
                // The session ended in the middle of it.
                Ok(())
            }
            (Call::Write { data, .. }, Value::Written(written)) => {
                if written.len != data.len() || u.wrote != data.len() {
                    let (len, wrote) = (written.len, u.wrote);
                    return Err(format!("{len} of {} written, {wrote} in the log", data.len()));
                }
                if u.first.is_some_and(|first| first != written.offset) {
                    return Err(format!("at {}, in the log {:?}", written.offset, u.first));
                }
                Ok(())
            }
            (Call::Seek { ino, offset, data, .. }, Value::Number(found)) => {
                let (from, to) = (*offset as usize, *found as usize);
                let fits = |s: &State| {
                    let Body::File(bytes, _) = &s.body else { return false };
                    let zeroes = |range: std::ops::Range<usize>| {
                        bytes.get(range).is_some_and(|b| b.iter().all(|b| *b == 0))
                    };
                    from < bytes.len()
                        && to >= from
                        && if *data {
                            to < bytes.len() && zeroes(from..to)
                        } else {
                            to == bytes.len() || zeroes(to..to + 1)
                        }
                };
                let what = || format!("data or a hole at {found}");
                self.saw_look(c, u, *ino, what, &Look::Content(&fits))
            }
            (Call::GetXattr { ino, name }, Value::Bytes(value)) => {
                let fits =
                    |s: &State| s.xattrs.as_ref().is_none_or(|all| all.get(*name) == Some(value));
                self.saw(c, u, *ino, || format!("{} bytes of {}", value.len(), text(name)), fits)
            }
            (Call::ListXattr { ino }, Value::Bytes(list)) => {
                let mut names: Vec<&[u8]> = list.split(|b| *b == 0).collect();
                names.pop();
                names.sort_unstable();
                let fits = |s: &State| {
                    let all = s.xattrs.as_ref();
                    all.is_none_or(|all| all.keys().map(|n| &n[..]).eq(names.iter().copied()))
                };
                self.saw(c, u, *ino, || format!("attributes {}", text(list)), fits)
            }
            (Call::Project { ino }, Value::Number(project)) => {
                let fits = |s: &State| s.project == *project;
                self.saw(c, u, *ino, || format!("project {project}"), fits)
            }
            (Call::SetXattr { name, value: None, .. }, _) if name.starts_with(b"system.") => Ok(()),
            (Call::Rename { dir, name, dir2, name2, .. }, _) if u.entries == 0 => {
                // Both names of one inode: nothing is done.
                let (old, new) = (self.leads(*dir, name, u), self.leads(*dir2, name2, u));
                let same = old.iter().any(|ino| ino.is_some() && new.contains(ino));
                // Another thread made it, which was refused: what this one has seen of it never was.
                let unmade = self.preset.doubts() && (dir, name) == (dir2, name2);
                if same || unmade { Ok(()) } else { Err("nothing was done".into()) }
            }
            (Call::Clone { len: 0, .. }, _) => Ok(()),
            (
                Call::Allocate { .. }
                | Call::Clone { .. }
                | Call::SetXattr { .. }
                | Call::Remove { .. }
                | Call::Rename { .. }
                | Call::SetProject { .. }
                | Call::SetQuota { .. },
                _,
            ) => did(u, 1),
            (Call::Release { .. } | Call::Statfs, _) => Ok(()),
            (Call::Fsync { .. } | Call::FsyncInode { .. } | Call::SyncAll, _) => {
                for (session, seq) in self.vouched_by(c, u) {
                    self.model.vouched(session, seq)?;
                }
                self.outcome.fsyncs += 1;
                self.moment(crate::scenario::Moment::Synced(c));
                Ok(())
            }
            (_, value) => Err(format!("gives {value:?}")),
        }
    }

    /// What a sync that succeeds vouches for: all but what is lost, and told already.
    fn vouched_by(&mut self, c: usize, u: &UnderWay) -> Vec<(usize, u64)> {
        let Some(process) = self.process(c) else { return Vec::new() };
        let told = match &u.call {
            Call::Fsync { handle, .. } => {
                process.open.get(&number(*handle)).map_or(0, |open| open.ended.saturating_sub(1))
            }
            // Of the root: of all.
            Call::FsyncInode { ino } if *ino != 1 => process.told.get(ino).copied().unwrap_or(0),
            _ => process.told.get(&0).copied().unwrap_or(0),
        };
        let own: Vec<usize> = process.attached.iter().map(|a| a.session).collect();
        let beside = self.lost_beside(c, &u.call);
        let alive = own.last().copied().filter(|own| self.model.is_alive(*own));
        let counts = |(session, seq): &&(usize, u64)| match own.iter().position(|s| s == session) {
            Some(at) => at >= told || u.current == Some(*session),
            // What ends while it is synced may be lost with its node.
            None => {
                self.model.is_alive(*session)
                    || beside.contains(session)
                    || alive.is_some_and(|own| self.model.has_seen(&[own], (*session, *seq)))
            }
        };
        u.newest.iter().filter(counts).copied().collect()
    }

    /// Sessions of other processes of the same node that lasted when what a call syncs was opened, and ended with the node's place: what is
    /// lost with them would have been told.
    pub(super) fn lost_beside(&self, c: usize, call: &Call) -> BTreeSet<usize> {
        let process = self.actors[c].process.as_ref();
        let Call::Fsync { handle, .. } = call else { return BTreeSet::new() };
        let Some(open) = process.and_then(|p| p.open.get(&number(*handle))) else {
            return BTreeSet::new();
        };
        let over = self.beside(c, control::STATE_GONE);
        open.beside.intersection(&over).copied().collect()
    }

    /// Sessions of other processes that live on the same node, in that state.
    fn beside(&self, c: usize, state: u64) -> BTreeSet<usize> {
        let n = self.actors[c].node;
        let others = self.actors.iter().enumerate().filter(|(at, a)| *at != c && a.node == n);
        let attached = others.filter_map(|(_, a)| a.process.as_ref()).flat_map(|p| &p.attached);
        // (Another client may have that log by now.)
        let own = |a: &&Attached| {
            let descriptor = a.memory.bytes(0, control::DESCRIPTOR_BYTES);
            Descriptor::decode(&descriptor).is_ok_and(|d| d.client == a.client)
        };
        let are = attached.filter(|a| a.memory.peek(control::STATE) == state).filter(own);
        are.map(|a| a.session).collect()
    }

    fn opened(
        &mut self,
        (c, t): (usize, usize),
        u: &UnderWay,
        handle: Handle,
        ino: u64,
        flags: u32,
    ) {
        let (refused, since) = (self.told_at_open(c, u), self.model.now());
        let beside = self.beside(c, control::STATE_ATTACHED);
        let Some(process) = self.process(c) else { return };
        let ended = process.attached.len();
        let at = |session| process.attached.iter().position(|a| a.session == session);
        let began = u.current.and_then(at).map_or(ended, |at| at + 1);
        let open = Open { ino, flags, thread: t, since, ended, began, refused, beside };
        process.open.insert(number(handle), open);
    }

    fn saw_name(
        &mut self,
        c: usize,
        u: &UnderWay,
        dir: u64,
        name: &[u8],
        ino: u64,
    ) -> Result<(), String> {
        let fits = |s: &State| matches!(&s.body, Body::Dir(all) if all.get(name) == Some(&ino));
        self.saw(c, u, dir, || format!("{} leads to {ino}", text(name)), fits)
    }

    /// Bytes of a file were read: in pieces, each at one moment.
    fn saw_bytes(
        &mut self,
        c: usize,
        u: &UnderWay,
        ino: u64,
        offset: u64,
        len: usize,
        bytes: &[u8],
    ) -> Result<(), String> {
        let piece = self.process(c).map_or(1, |p| p.limits.read_piece);
        let mut at = 0;
        loop {
            let want = piece.min(len - at);
            let got = &bytes[at.min(bytes.len())..bytes.len().min(at + want)];
            let from = offset as usize + at;
            let what = || {
                let crc = base::crc32c(0, got);
                format!("{} bytes at {from} of {want}, crc {crc:08x}", got.len())
            };
            let seen = self.saw_look(c, u, ino, what, &Look::Bytes { from, want, got });
            let Err(why) = seen else {
                at += got.len();
                if got.len() < want || at >= len {
                    break;
                }
                continue;
            };
            match self.first_part(c, u, ino, from, got) {
                Some(part) => at += part,
                // It was cut elsewhere before this, where the bytes do not show it.
                None if self.in_pieces(u, ino, (offset as usize, len, piece), bytes) => {
                    return Ok(());
                }
                None => return Err(why),
            }
        }
        if at < bytes.len() {
            Err(format!("{} bytes more than asked", bytes.len() - at))
        } else {
            Ok(())
        }
    }

    /// How many bytes of what was read are of one moment, where a piece is cut: at what was the end of the file, or,
    /// if the client was not given every arena that it asked for, anywhere.
    fn first_part(
        &self,
        c: usize,
        u: &UnderWay,
        ino: u64,
        from: usize,
        got: &[u8],
    ) -> Option<usize> {
        let maps_all = self.actors[c].process.as_ref().is_some_and(|p| !p.unmapped);
        let states = self.model.during(ino, u.since);
        let alike = states.iter().filter_map(|s| {
            let Body::File(all, _) = &s.body else { return None };
            let there = all.get(from..)?;
            let same = there.iter().zip(got).take_while(|(a, b)| a == b).count();
            (!maps_all || same == there.len()).then_some(same)
        });
        alike.max().filter(|same| *same > 0)
    }

    /// Whether some cutting makes every piece of one moment: a piece ends after `piece` bytes, or at what was the end of
    /// the file, from which the next goes on.
    fn in_pieces(
        &self,
        u: &UnderWay,
        ino: u64,
        (offset, len, piece): (usize, usize, usize),
        bytes: &[u8],
    ) -> bool {
        let states = self.model.during(ino, u.since);
        let mut ends = BTreeSet::from([0]);
        while let Some(at) = ends.pop_first() {
            if at == bytes.len() {
                return true;
            }
            let want = piece.min(len - at);
            let got = &bytes[at..bytes.len().min(at + want)];
            for state in &states {
                let Body::File(all, _) = &state.body else { continue };
                let there = all.get(offset + at..).unwrap_or(&[]);
                let there = &there[..there.len().min(want)];
                if !there.is_empty() && got.starts_with(there) {
                    ends.insert(at + there.len());
                }
            }
        }
        false
    }

    // --- errors ---

    /// What a name may have led to while the call was under way.
    fn leads(&self, dir: u64, name: &[u8], u: &UnderWay) -> Vec<Option<u64>> {
        let states = self.model.during(dir, u.since);
        let to = |s: &std::rc::Rc<State>| match &s.body {
            Body::Dir(all) => all.get(name).copied(),
            _ => None,
        };
        states.iter().map(to).collect()
    }

    fn ever(&self, ino: u64, u: &UnderWay, fits: impl Fn(&State) -> bool) -> bool {
        let states = self.model.during(ino, u.since);
        states.is_empty() && fits(&State::gone()) || states.iter().any(|s| fits(s))
    }

    fn judge_error(&mut self, c: usize, u: &UnderWay, errno: Errno) -> Result<(), String> {
        if self.hosts[self.actors[c].node].gone {
            return Ok(());
        }
        let fsync = matches!(u.call, Call::Fsync { .. } | Call::FsyncInode { .. } | Call::SyncAll);
        if errno == Errno::IO && fsync {
            return self.judge_loss(c, u);
        }
        // Of what there may be too little of, `judge_told` knows more.
        if self.is_refusal(c, u, errno) {
            return Ok(());
        }
        self.judge_error_of(c, u, &u.call, errno)
    }

    pub(super) fn judge_error_of(
        &mut self,
        c: usize,
        u: &UnderWay,
        call: &Call,
        errno: Errno,
    ) -> Result<(), String> {
        if self.is_tainted(c, u, &call.inodes()) || self.is_of_past_head(c, u) {
            return Ok(());
        }
        self.judge_silence(u, call, errno)?;
        if self.may_fail(c, u, call, errno) || self.may_be_barred(c, u, call, errno) {
            return Ok(());
        }
        Err(format!("fails with {errno:?}; {}", self.what_may_be(u)))
    }

    /// What the model knows of the inodes that a call is about.
    fn what_may_be(&self, u: &UnderWay) -> String {
        let known = u.call.inodes().into_iter().map(|ino| {
            let states = self.model.during(ino, u.since);
            let states: Vec<String> = states.iter().map(|s| s.summary()).collect();
            format!("inode {ino}: may be one of [{}]", states.join(" | "))
        });
        known.collect::<Vec<_>>().join("; ")
    }

    /// An fsync says that something was lost: a session must have ended, and each open file hears of it once.
    fn judge_loss(&mut self, c: usize, u: &UnderWay) -> Result<(), String> {
        self.look_at_ended(c)?;
        let beside = self.beside(c, control::STATE_ATTACHED);
        let Some(process) = self.process(c) else { return Ok(()) };
        let ended = process.attached.len();
        let any = process.attached.iter().any(|a| a.ended);
        if let Call::Fsync { handle, .. } = u.call
            && let Some(open) = process.open.get_mut(&number(handle))
        {
            let lives = !process.attached.last().is_some_and(|a| a.ended);
            if open.ended.min(open.began) == ended && lives {
                return Err("a loss is told twice, or was none".into());
            }
            (open.ended, open.began, open.beside) = (ended, ended, beside);
        }
        let of = match u.call {
            Call::FsyncInode { ino } if ino != 1 => ino,
            _ => 0,
        };
        if !matches!(u.call, Call::Fsync { .. }) {
            process.told.insert(of, ended - 1);
        }
        if any { Ok(()) } else { Err("nothing was lost".into()) }
    }

    /// Whether a process has had a directory open all the while.
    fn keeps_dir(&self, c: usize, ino: u64, u: &UnderWay) -> bool {
        let Some(process) = &self.actors[c].process else { return false };
        let mut open = process.open.values();
        open.any(|open| open.is_dir() && open.ino == ino && open.since <= u.since)
    }

    fn may_fail(&mut self, c: usize, u: &UnderWay, call: &Call, errno: Errno) -> bool {
        let gone = |ino: u64| self.ever(ino, u, State::is_gone);
        let none = |dir: u64, name: &[u8]| self.leads(dir, name, u).contains(&None);
        let some = |dir: u64, name: &[u8]| self.leads(dir, name, u).iter().any(Option::is_some);
        let any = |dir: u64, name: &[u8], fits: &dyn Fn(u64) -> bool| {
            self.leads(dir, name, u).into_iter().flatten().any(fits)
        };
        let full = |ino: u64| {
            self.ever(ino, u, |s| matches!(&s.body, Body::Dir(names) if !names.is_empty()))
        };
        let lacks = |ino: u64, name: &[u8]| {
            self.ever(ino, u, |s| s.xattrs.as_ref().is_none_or(|all| !all.contains_key(name)))
        };
        let has = |ino: u64, name: &[u8]| {
            self.ever(ino, u, |s| s.xattrs.as_ref().is_none_or(|all| all.contains_key(name)))
        };
        let size = |ino: u64, fits: &dyn Fn(u64) -> bool| {
            self.ever(ino, u, |s| match &s.body {
                Body::File(bytes, _) => fits(bytes.len() as u64),
                _ => false,
            })
        };
        // It may be gone by now.
        let is = |ino: u64, kind: u32| self.ever(ino, u, |s| s.mode & S_IFMT == kind);
        let dir = |ino: u64| is(ino, S_IFDIR);
        let file = |ino: u64| is(ino, S_IFREG);
        // What is open lives on, whatever becomes of sessions and nodes; unless its node was away for too long, or
        // has forgotten everything.
        let lost = self.actors[c].process.as_ref().is_some_and(|p| p.attached.len() > 1);
        let forgotten = self.outcome.faults.contains_key("bit-rot-noticed");
        let away = forgotten || !self.hosts[self.actors[c].node].is_patient();
        // What was made in a session, and perhaps lost with it, is perhaps nowhere. (A file that is open and gone otherwise
        // has a state.)
        let never = |ino: u64| self.model.may_be_unborn(ino, u.since);
        // (Or its making was refused.)
        let refused = self.preset.doubts();
        let by_handle = |ino: u64| lost && away && gone(ino) || (lost || refused) && never(ino);
        let opened = |ino: u64| self.actors[c].process.as_ref().is_some_and(|p| p.has_open(ino));
        let open = |h: Handle| self.actors[c].process.as_ref().and_then(|p| p.open.get(&number(h)));
        match (errno, call) {
            (Errno::NOENT | Errno::STALE, call) => match call {
                Call::Lookup { dir, name } | Call::Remove { dir, name, .. } => {
                    gone(*dir) || none(*dir, name)
                }
                Call::Readdir { dir }
                | Call::Make { dir, .. }
                | Call::Create { dir, .. }
                | Call::Tmpfile { dir } => gone(*dir),
                Call::Rename { dir, name, dir2, name2, flags } => {
                    gone(*dir)
                        || gone(*dir2)
                        || none(*dir, name)
                        || *flags == 2 && none(*dir2, name2)
                }
                Call::Link { ino, dir, .. } => gone(*ino) || gone(*dir),
                // What is open is there.
                Call::Getattr { ino } | Call::OpenDir { ino, .. }
                    if self.keeps_dir(c, *ino, u) && !(lost && away) =>
                {
                    (lost || refused) && never(*ino)
                }
                Call::Getattr { ino }
                | Call::OpenDir { ino, .. }
                | Call::Readlink { ino }
                | Call::Open { ino, .. }
                | Call::Truncate { ino, .. }
                | Call::SetAttr { ino, .. }
                | Call::SetXattr { ino, .. }
                | Call::GetXattr { ino, .. }
                | Call::ListXattr { ino }
                | Call::SetProject { ino, .. }
                | Call::SetQuota { ino, .. }
                | Call::Project { ino }
                | Call::FsyncInode { ino } => gone(*ino),
                Call::Fgetattr { ino, .. }
                | Call::Read { ino, .. }
                | Call::Write { ino, .. }
                | Call::Allocate { ino, .. }
                | Call::Seek { ino, .. }
                | Call::Fsync { ino, .. } => by_handle(*ino),
                // Of an heir: it knows what the one before had open, which may have been gone by then.
                Call::Lock { ino, .. } if !opened(*ino) => gone(*ino) || never(*ino),
                Call::Lock { ino, lock, .. } => lock.kind != LockKind::None && by_handle(*ino),
                Call::TestLock { ino, .. } => by_handle(*ino),
                Call::Clone { from, to, .. } => by_handle(from.1) || by_handle(to.1),
                Call::Release { .. } | Call::Statfs | Call::SyncAll | Call::Inherit => false,
            },
            // Nobody has answered in time.
            (Errno::AGAIN, Call::Inherit) => true,
            // Whether it may be barred is judged apart.
            (Errno::AGAIN, Call::Lock { lock, .. }) => lock.kind != LockKind::None,
            (Errno::DEADLK, Call::Lock { lock, wait, .. }) => {
                *wait && lock.space == LockSpace::Record
            }
            // Who could not open it now gets no lock.
            (Errno::ACCES, Call::Lock { ino, .. } | Call::TestLock { ino, .. }) => {
                let bound = Who::of(self.actors[c].uid);
                let barred =
                    |s: &State| bound.may(s, R) != Some(true) && bound.may(s, W) != Some(true);
                bound.uid != 0 && self.ever(*ino, u, barred)
            }
            (Errno::NOTDIR, Call::OpenDir { ino, .. }) => {
                self.ever(*ino, u, |s| s.mode & S_IFMT != S_IFDIR)
            }
            (Errno::EXIST, Call::Make { dir, name, .. } | Call::Link { dir, name, .. }) => {
                some(*dir, name)
            }
            (Errno::EXIST, Call::Create { dir, name, flags, .. }) => {
                flags & O_EXCL != 0 && some(*dir, name)
            }
            (Errno::EXIST, Call::Rename { dir2, name2, flags: 1, .. }) => some(*dir2, name2),
            (Errno::EXIST, Call::SetXattr { ino, name, how: XattrMode::Create, .. }) => {
                has(*ino, name)
            }
            (Errno::ISDIR, Call::Create { dir: d, name, .. }) => any(*d, name, &dir),
            (Errno::NXIO, Call::Create { dir: d, name, .. }) => {
                any(*d, name, &|ino| !dir(ino) && !file(ino))
            }
            (Errno::ISDIR, Call::Remove { dir: d, name, is_dir: false }) => any(*d, name, &dir),
            (Errno::NOTDIR, Call::Remove { dir: d, name, is_dir: true }) => {
                any(*d, name, &|ino| !dir(ino))
            }
            (Errno::NOTEMPTY, Call::Remove { dir, name, is_dir: true })
            | (Errno::NOTEMPTY, Call::Rename { dir2: dir, name2: name, .. }) => {
                any(*dir, name, &full)
            }
            (Errno::ISDIR, Call::Rename { dir2, name2, .. }) => any(*dir2, name2, &dir),
            (Errno::NOTDIR, Call::Rename { dir2, name2, .. }) => any(*dir2, name2, &|i| !dir(i)),
            // Into itself.
            (Errno::INVAL, Call::Rename { dir: d, name, dir2, name2, flags }) => {
                d != dir2 && (any(*d, name, &dir) || *flags == 2 && any(*dir2, name2, &dir))
            }
            (Errno::XDEV, Call::Rename { .. } | Call::Link { .. }) => true,
            (Errno::PERM, Call::Link { ino, .. }) => dir(*ino),
            // Whatever is there, or is not.
            (Errno::PERM, Call::SetProject { .. } | Call::SetQuota { .. }) => u.who.uid != 0,
            (Errno::INVAL, Call::Readlink { ino }) => {
                self.ever(*ino, u, |s| s.mode & S_IFMT != S_IFLNK)
            }
            (Errno::NODATA, Call::GetXattr { ino, name }) => lacks(*ino, name) || !file(*ino),
            (Errno::NODATA, Call::SetXattr { ino, name, .. }) => lacks(*ino, name),
            (Errno::OPNOTSUPP, Call::GetXattr { ino, name }) => *name == ACL && is(*ino, S_IFLNK),
            // What its making was refused of is an empty file, until the process hears of it.
            (Errno::NXIO, Call::Seek { ino, .. }) if refused && never(*ino) => true,
            (Errno::NXIO, Call::Seek { ino, offset, data, .. }) => self.ever(*ino, u, |s| {
                let Body::File(bytes, _) = &s.body else { return false };
                let rest = bytes.get(*offset as usize..).unwrap_or(&[]);
                rest.is_empty() || *data && rest.iter().all(|b| *b == 0)
            }),
            (Errno::INVAL, Call::Allocate { ino, mode, offset, len, .. }) => {
                let insert = mode & falloc::INSERT_RANGE != 0;
                let shift = insert || mode & falloc::COLLAPSE_RANGE != 0;
                let end = if insert { *offset } else { offset + len };
                shift && size(*ino, &|size| end >= size)
            }
            (Errno::BADF, Call::Clone { to, .. }) => {
                open(to.0).is_some_and(|open| open.flags & client::fs::O_APPEND != 0)
            }
            // Where the service would ask again, and may say no, programs copy by themselves.
            (Errno::OPNOTSUPP, Call::Clone { from, to, .. }) => {
                let bound = Who::of(self.actors[c].uid);
                let unsure = |s: &State| {
                    let listed = s.xattrs.as_ref().is_none_or(|all| all.contains_key(ACL));
                    let all = s.mode & 0o444 == 0o444 && !listed;
                    let owner = bound.uid == s.uid && s.mode & 0o400 != 0;
                    !(all || owner)
                };
                bound.uid != 0
                    && (self.ever(from.1, u, unsure) || self.ever(to.1, u, |s| bound.ends(s) != 0))
            }
            (Errno::INVAL, Call::Clone { from, to, len }) => {
                let apart = from.2.abs_diff(to.2) >= *len && *len != 0;
                let (at, end) = (from.2, from.2 + len);
                from.1 == to.1 && !apart
                    || size(from.1, &|size| {
                        let ends = *len == 0 || len.is_multiple_of(4096) || size == end;
                        size < end || !ends || size < at
                    })
            }
            _ => false,
        }
    }
}

fn did(u: &UnderWay, least: u32) -> Result<(), String> {
    if u.entries >= least { Ok(()) } else { Err("nothing was done".into()) }
}

/// Whether bytes differ only as others change them.
fn is_changed(data: &[u8], bytes: &[u8]) -> bool {
    let alike = |(a, b): (&u8, &u8)| a == b || a ^ b == CHANGED;
    data.len() == bytes.len() && data.iter().zip(bytes).all(alike)
}

fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

impl UnderWay {
    /// Whether the call may append the entry. `size`: of the file, if that is written.
    fn fits(&mut self, op: &Op<'_>, size: u64) -> bool {
        match (&self.call, op) {
            (
                Call::Write { ino, offset, data, append, shared, .. },
                Op::Write { ino: of, offset: at, data: bytes, .. },
            ) => {
                let appends = *append || self.appends;
                let begin = if appends { size } else { offset + self.wrote as u64 };
                let end = self.wrote + bytes.len();
                let alike = data
                    .get(self.wrote..end)
                    .is_some_and(|data| data == *bytes || *shared && is_changed(data, bytes));
                let good = of.0 == *ino && *at == begin && alike;
                if good {
                    self.first.get_or_insert(*at);
                    self.wrote = end;
                }
                good
            }
            (
                Call::Make { dir, name, mode, target },
                Op::Create { parent, name: n, target: to, mode: m, .. },
            ) => parent.0 == *dir && n == name && to == target && m & S_IFMT == mode & S_IFMT,
            (Call::Create { dir, name, .. }, Op::Create { parent, name: n, mode, .. }) => {
                parent.0 == *dir && n == name && mode & S_IFMT == S_IFREG
            }
            (Call::Create { flags, .. }, Op::Truncate { size: 0, .. }) => flags & O_TRUNC != 0,
            (Call::Open { ino, flags }, Op::Truncate { ino: of, size: 0, .. }) => {
                flags & O_TRUNC != 0 && of.0 == *ino
            }
            (Call::Tmpfile { dir }, Op::Tmpfile { parent, .. }) => parent.0 == *dir,
            (Call::Truncate { ino, size }, Op::Truncate { ino: of, size: to, .. }) => {
                of.0 == *ino && to == size
            }
            (
                Call::Allocate { ino, mode, offset, len, .. },
                Op::Fallocate { ino: of, offset: at, len: n, mode: m },
            ) => of.0 == *ino && at == offset && n == len && u32::from(*m) == *mode,
            (
                Call::Allocate { ino, mode, offset, len, .. },
                Op::Shift { ino: of, offset: at, len: n, insert, .. },
            ) => {
                of.0 == *ino
                    && at == offset
                    && n == len
                    && *insert == (mode & falloc::INSERT_RANGE != 0)
            }
            (
                Call::Clone { from, to, len },
                Op::CloneRange { ino, offset, len: n, source, source_offset, .. },
            ) => {
                let done = offset.wrapping_sub(to.2);
                (ino.0, source.0) == (to.1, from.1)
                    && source_offset.wrapping_sub(from.2) == done
                    && (*len == 0 || done + n <= *len)
            }
            // What it comes to, and which bits end before something else, is judged apart.
            (Call::SetAttr { ino, .. }, Op::SetAttr { ino: of, .. })
            | (
                Call::Write { ino, .. }
                | Call::Allocate { ino, .. }
                | Call::Clone { to: (_, ino, _), .. }
                | Call::Truncate { ino, .. }
                | Call::Open { ino, .. }
                | Call::SetXattr { ino, name: ACL, .. },
                Op::SetAttr { ino: of, .. },
            ) => of.0 == *ino,
            (Call::Create { flags, .. }, Op::SetAttr { .. }) => flags & O_TRUNC != 0,
            (
                Call::SetXattr { ino, name, value: Some(v), .. },
                Op::SetXattr { ino: of, name: n, value },
            ) => of.0 == *ino && n == name && value == v,
            (
                Call::SetXattr { ino, name, value: None, .. },
                Op::RemoveXattr { ino: of, name: n },
            ) => of.0 == *ino && n == name,
            (Call::Remove { dir, name, is_dir: false }, Op::Unlink { parent, name: n, .. })
            | (Call::Remove { dir, name, is_dir: true }, Op::Rmdir { parent, name: n, .. }) => {
                parent.0 == *dir && n == name
            }
            (
                Call::Rename { dir, name, dir2, name2, flags },
                Op::Rename { parent, name: n, new_parent, new_name, noreplace, exchange, .. },
            ) => {
                (parent.0, new_parent.0) == (*dir, *dir2)
                    && (n, new_name) == (&&name[..], &&name2[..])
                    && (*noreplace, *exchange) == (*flags == 1, *flags == 2)
            }
            (Call::Link { ino, dir, name }, Op::Link { ino: of, parent, name: n }) => {
                (of.0, parent.0) == (*ino, *dir) && n == name
            }
            (
                Call::SetQuota { ino, user, limit },
                Op::SetQuota { ino: of, user: who, limit: l },
            ) => (of.0, who, l) == (*ino, user, limit),
            (Call::SetProject { ino, project }, Op::SetProject { ino: of, project: p }) => {
                (of.0, p.0) == (*ino, *project)
            }
            _ => false,
        }
    }
}

fn brief_reply(reply: &Reply) -> String {
    match reply {
        Ok(Value::Bytes(bytes)) => {
            format!("{} bytes crc {:08x}", bytes.len(), base::crc32c(0, bytes))
        }
        Ok(Value::Attr(attr) | Value::Made(attr, _)) => {
            let Attr { ino, mode, nlink, uid, size, mtime, ctime, .. } = attr;
            let times = (nanos(*mtime), nanos(*ctime));
            format!("{ino} {mode:o} nlink {nlink} uid {uid} size {size} times {times:?}")
        }
        other => format!("{other:?}"),
    }
}
