//! What the volume must show: the judge's own account of every operation, independent of the code
//! under test.
//!
//! Leases give every inode one writer at a time, so the order in which the clients append *is* the
//! order of the inode's versions. (Where several write one file at a time, it is that of each block's: `shared`.) A version belongs to a session (one attachment of a client) and
//! to a sequence. When a session ends by a fault, a suffix of its log may be lost: how much is not
//! known, but it is *one* cut for all inodes, not below what fsync or another client's view
//! vouched for, not above what was appended. Each later observation narrows the cut.

mod shared;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

pub use self::shared::{BLOCK, Look, Part};

/// Content of an inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    /// No name leads to it any more.
    Gone,
    /// Bytes of a regular file, and its names: 0 when it is only open somewhere.
    File(Vec<u8>, u32),
    /// Names of a directory and where they lead.
    Dir(BTreeMap<Vec<u8>, u64>),
    /// Target of a symbolic link, and its names.
    Symlink(Vec<u8>, u32),
}

/// Extended attributes by name.
pub type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// What a reader of an inode sees.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    /// Type and permission bits; 0 when gone.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// The directory whose quota counts it, if one does.
    pub project: u64,
    /// When content or names changed last, in nanoseconds.
    pub mtime: u64,
    /// When anything changed last.
    pub ctime: u64,
    /// Extended attributes; None: the reader did not look.
    pub xattrs: Option<Xattrs>,
    /// Content.
    pub body: Body,
}

impl State {
    /// An inode that is no more.
    pub const fn gone() -> Self {
        let (mode, uid, gid, project, mtime, ctime) = (0, 0, 0, 0, 0, 0);
        Self { mode, uid, gid, project, mtime, ctime, xattrs: None, body: Body::Gone }
    }

    /// Something new, in the group that has its owner's number.
    pub fn new(mode: u32, uid: u32, time: u64, body: Body) -> Self {
        let (mtime, ctime, xattrs) = (time, time, Some(Xattrs::new()));
        Self { mode, uid, gid: uid, project: 0, mtime, ctime, xattrs, body }
    }

    /// Whether no name leads to it.
    pub fn is_gone(&self) -> bool {
        matches!(self.body, Body::Gone | Body::File(_, 0))
    }

    /// Bytes of it were written at that time. (Of writes that meet the order in time does not depend on that in the stream.)
    pub fn written(&mut self, time: u64, clear_setid: bool) {
        let time = time.max(self.ctime);
        (self.mtime, self.ctime) = (time, time);
        if clear_setid {
            self.clear_setid();
        }
    }

    /// What a write ends of the bits by which others become its owner.
    pub fn clear_setid(&mut self) {
        let group = if self.mode & 0o10 != 0 { 0o2000 } else { 0 };
        self.mode &= !(0o4000 | group);
    }

    /// Whether a reader of this could have seen that.
    fn shows(&self, seen: &Self) -> bool {
        if seen.body == Body::Gone {
            return self.is_gone();
        }
        self.has_attributes_of(seen) && self.body == seen.body
    }

    fn has_attributes_of(&self, seen: &Self) -> bool {
        (self.mode, self.uid, self.gid, self.project, self.mtime, self.ctime)
            == (seen.mode, seen.uid, seen.gid, seen.project, seen.mtime, seen.ctime)
            && (self.xattrs.is_none() || seen.xattrs.is_none() || self.xattrs == seen.xattrs)
    }

    fn attributes(&self) -> String {
        let xattrs = match &self.xattrs {
            None => "?".into(),
            Some(all) => {
                all.keys().map(|n| String::from_utf8_lossy(n)).collect::<Vec<_>>().join(",")
            }
        };
        let Self { mode, uid, gid, project, mtime, ctime, .. } = self;
        format!(
            "{mode:o} uid {uid} gid {gid} project {project} times {mtime} {ctime} xattrs [{xattrs}]"
        )
    }

    /// In few words.
    pub fn summary(&self) -> String {
        match &self.body {
            Body::Gone => "gone".into(),
            Body::File(b, n) => {
                let crc = base::crc32c(0, b);
                format!("file {} nlink {n} {} bytes crc {crc:08x}", self.attributes(), b.len())
            }
            Body::Dir(names) => {
                let names: Vec<String> = names
                    .iter()
                    .map(|(n, i)| format!("{}={i}", String::from_utf8_lossy(n)))
                    .collect();
                format!("dir {} {{{}}}", self.attributes(), names.join(" "))
            }
            Body::Symlink(target, links) => {
                let target = String::from_utf8_lossy(target);
                format!("symlink {} nlink {links} {target}", self.attributes())
            }
        }
    }
}

/// A version that an operation in the stream has made.
#[derive(Debug)]
pub struct Made {
    /// Of this inode.
    pub ino: u64,
    /// When.
    pub at: u64,
    before: Option<Version>,
}

#[derive(Clone, Debug)]
struct Version {
    /// `None`: nobody disputes it.
    by: Option<(usize, u64)>,
    /// It is in the stream: whatever becomes of who did it, it is so until the stream loses it.
    firm: bool,
    /// When it was made, counted in versions.
    at: u64,
    /// With all versions before it.
    state: Rc<State>,
    /// It is of a part of a file.
    part: Option<Part>,
    /// Sessions that have seen it, or what was made of it: as long as one of them lasts it is so.
    seen: Vec<usize>,
}

/// Who has seen what is so from then on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sight {
    /// Whatever becomes of anybody: it is on every member.
    Lasting,
    /// A file: as long as the session lasts that has seen it, since its node has it. All else for good.
    Early,
}

/// A version that another has certainly taken the place of.
#[derive(Clone, Debug)]
struct Past {
    until: u64,
    state: Rc<State>,
}

#[derive(Clone, Copy, Debug)]
struct Session {
    alive: bool,
    lo: u64,
    hi: u64,
    /// When it was over.
    over: Option<u64>,
}

/// A version that was lost with its session, which saw it until then.
#[derive(Clone, Debug)]
struct Lost {
    session: usize,
    until: u64,
    state: Rc<State>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Model {
    inodes: BTreeMap<u64, Vec<Version>>,
    /// Files of which parts were written.
    shared: BTreeSet<u64>,
    past: BTreeMap<u64, Vec<Past>>,
    lost: BTreeMap<u64, Vec<Lost>>,
    sessions: Vec<Session>,
    /// Versions so far: the model's time.
    now: u64,
    /// Nobody asks what was before.
    asked_from: u64,
    /// Sessions have less than before.
    lowered: bool,
}

impl Model {
    /// A volume with an empty root.
    pub fn new(root: State) -> Self {
        let (state, part, seen) = (Rc::new(root), None, Vec::new());
        let first = Version { by: None, firm: true, at: 0, state, part, seen };
        Self { inodes: BTreeMap::from([(1, vec![first])]), ..Self::default() }
    }

    /// Its time.
    pub const fn now(&self) -> u64 {
        self.now
    }

    /// Nobody will ask what was before that time.
    pub fn forget_before(&mut self, at: u64) {
        if at > self.asked_from {
            self.asked_from = at;
            self.past.retain(|_, all| {
                all.retain(|past| past.until > at);
                !all.is_empty()
            });
            self.lost.retain(|_, all| {
                all.retain(|lost| lost.until > at);
                !all.is_empty()
            });
        }
    }

    /// A client attached.
    pub fn begin(&mut self) -> usize {
        self.sessions.push(Session { alive: true, lo: 0, hi: u64::MAX, over: None });
        self.sessions.len() - 1
    }

    /// Operation `seq` of `session` was appended under leases; it brought these states about.
    pub fn appended(&mut self, session: usize, seq: u64, changes: Vec<(u64, State)>) {
        let s = &self.sessions[session];
        if !s.alive && seq > s.hi {
            return;
        }
        self.now += 1;
        for (ino, state) in changes {
            let (by, at, seen) = (Some((session, seq)), self.now, Vec::new());
            let (state, part) = (Rc::new(state), None);
            let versions = self.inodes.entry(ino).or_default();
            versions.push(Version { by, firm: false, at, state, part, seen });
        }
    }

    /// Operation `seq` of `session` is in the stream, and so from now on.
    pub fn took(&mut self, session: usize, seq: u64, changes: Vec<(u64, State)>) -> Vec<Made> {
        self.now += 1;
        let (by, at) = (Some((session, seq)), self.now);
        let made = changes.into_iter().map(|(ino, state)| {
            let versions = self.inodes.entry(ino).or_default();
            let before = versions.last().cloned();
            let (state, part, seen) = (Rc::new(state), None, Vec::new());
            versions.push(Version { by, firm: true, at, state, part, seen });
            Made { ino, at, before }
        });
        made.collect()
    }

    /// The stream has lost an operation that it took, and made these. Gives those that stay: more was done to these
    /// inodes after it under leases, and it is as lost, or not, as that.
    pub fn untook(&mut self, session: usize, seq: u64, made: Vec<Made>) -> Vec<Made> {
        self.now += 1;
        let (now, mut stay) = (self.now, Vec::new());
        for one in made {
            let is = |v: &mut Version| v.at == one.at && v.by == Some((session, seq));
            let versions = self.inodes.entry(one.ino).or_default();
            let Some(version) = versions.pop_if(is) else {
                self.firm(session, seq, one.at, false);
                stay.push(one);
                continue;
            };
            if versions.is_empty() {
                // (Somebody has looked since, and what was before is not kept.)
                versions.extend(one.before);
            }
            // Who began before has perhaps seen it.
            let past = Past { until: now, state: version.state };
            self.past.entry(one.ino).or_default().push(past);
        }
        stay
    }

    /// Whether an operation that was taken at that time is in the stream.
    pub fn firm(&mut self, session: usize, seq: u64, at: u64, firm: bool) {
        let is = |v: &&mut Version| v.at == at && v.by == Some((session, seq));
        self.inodes.values_mut().flatten().filter(is).for_each(|v| v.firm = firm);
    }

    /// Whether nothing has ended a session.
    pub fn is_alive(&self, session: usize) -> bool {
        self.sessions[session].alive
    }

    /// Whether an operation of a session must survive.
    pub fn is_vouched(&self, session: usize, seq: u64) -> bool {
        seq <= self.sessions[session].lo
    }

    /// Takes a session's operations from `from` on out, to be put back otherwise: which they were, and when.
    pub fn take_out(&mut self, session: usize, from: u64) -> BTreeMap<u64, u64> {
        let mut out = BTreeMap::new();
        for versions in self.inodes.values_mut() {
            versions.retain(|v| match v.by {
                Some((s, seq)) if s == session && seq >= from => {
                    out.insert(seq, v.at);
                    false
                }
                _ => true,
            });
        }
        out
    }

    /// Puts one of them back.
    pub fn put_back(&mut self, session: usize, seq: u64, at: u64, changes: Vec<(u64, State)>) {
        let s = &self.sessions[session];
        if !s.alive && seq > s.hi {
            return;
        }
        for (ino, state) in changes {
            let (by, state, seen) = (Some((session, seq)), Rc::new(state), Vec::new());
            let versions = self.inodes.entry(ino).or_default();
            versions.push(Version { by, firm: false, at, state, part: None, seen });
        }
    }

    /// Everything of the session up to `seq` must survive from here on.
    pub fn vouched(&mut self, session: usize, seq: u64) -> Result<(), String> {
        let s = &mut self.sessions[session];
        if s.hi < seq {
            return Err(format!(
                "inode of a session of which {} is there, and {seq} vouched for",
                s.hi
            ));
        }
        s.lo = s.lo.max(seq);
        Ok(())
    }

    /// The session ended, but its node lived on and says that it has taken all there was up to `seq`.
    pub fn drained(&mut self, session: usize, seq: u64) -> Result<(), String> {
        let hi = self.sessions[session].hi;
        if hi < seq {
            return Err(format!("inode of a dead client: {seq} was in its log, seen up to {hi}"));
        }
        self.vouched(session, seq)
    }

    /// The session's node is out of the chain, and its client does not know yet: what is not vouched for may be
    /// lost, but until then the client sees what it does.
    pub fn headless(&mut self, session: usize) {
        self.sessions[session].alive = false;
    }

    /// The session is over; operations up to `hi` may count.
    pub fn ended(&mut self, session: usize, hi: u64) {
        // What began before may have seen what is lost with it; what begins now has not.
        self.now += 1;
        let s = &mut self.sessions[session];
        s.alive = false;
        s.over.get_or_insert(self.now);
        self.lower(session, hi);
        self.drop_lost();
    }

    /// The newest version; right whenever no fault left doubt.
    pub fn current(&self, ino: u64) -> Option<&State> {
        let versions = self.inodes.get(&ino)?;
        versions.iter().rev().find(|v| self.counts(v)).map(|v| &*v.state)
    }

    /// What an inode may be now, one operation left out that may not have been; `None`: not made.
    fn possible(
        &self,
        ino: u64,
        without: Option<(usize, u64)>,
    ) -> impl Iterator<Item = Option<&State>> {
        let versions = self.inodes.get(&ino).map_or(&[][..], Vec::as_slice);
        let counts = |v: &Version| self.counts(v);
        let certain = |v: &Version| counts(v) && self.is_certain(v);
        let from = versions.iter().rposition(certain);
        let unborn = from.is_none().then_some(None);
        let later = versions[from.unwrap_or(0)..].iter();
        let later = later.filter(move |v| counts(v) && (v.by.is_none() || v.by != without));
        unborn.into_iter().chain(later.map(|v| Some(&*v.state)))
    }

    /// How many inodes there are of a kind, at least and at most, one operation left out.
    pub fn count(
        &self,
        without: Option<(usize, u64)>,
        counts: impl Fn(&State) -> bool,
    ) -> (u64, u64) {
        let (mut least, mut most) = (0, 0);
        for ino in self.inodes.keys() {
            let (mut all, mut any) = (true, false);
            for state in self.possible(*ino, without) {
                let one = state.is_some_and(&counts);
                (all, any) = (all && one, any || one);
            }
            (least, most) = (least + u64::from(all && any), most + u64::from(any));
        }
        (least, most)
    }

    /// Everything that an inode may be now.
    pub fn candidates(&self, ino: u64) -> Vec<State> {
        let gone = State::gone();
        self.possible(ino, None).map(|s| s.unwrap_or(&gone).clone()).collect()
    }

    /// Whether an inode may have that value of an extended attribute now, or may have none.
    pub fn may_have_xattr(
        &self,
        ino: u64,
        name: &[u8],
        value: Option<&[u8]>,
    ) -> Result<(), String> {
        let shows = |state: &State| {
            let known = state.xattrs.as_ref();
            known.is_none_or(|all| all.get(name).map(Vec::as_slice) == value)
        };
        if self.possible(ino, None).any(|state| state.is_none_or(shows)) {
            return Ok(());
        }
        let name = String::from_utf8_lossy(name);
        let seen = value.map_or("none".into(), |v| format!("{} bytes", v.len()));
        Err(format!("inode {ino}: attribute {name} seen as {seen}, which nobody set last"))
    }

    /// Inodes that ever were.
    pub fn inodes(&self) -> Vec<u64> {
        self.inodes.keys().copied().collect()
    }

    /// Directories that may be.
    pub fn dirs(&self) -> Vec<u64> {
        let is_dir =
            |v: &Vec<Version>| v.last().is_some_and(|v| matches!(v.state.body, Body::Dir(_)));
        self.inodes.iter().filter(|(_, v)| is_dir(v)).map(|(i, _)| *i).collect()
    }

    /// `seen` is what `by` (a session; `None`: the judge) sees of the inode. An error says why
    /// that cannot be.
    pub fn observe(&mut self, by: Option<usize>, ino: u64, seen: &State) -> Result<(), String> {
        self.observe_with(Sight::Lasting, by, ino, seen)
    }

    /// The same of what a session is shown of a file before every member has it.
    pub fn observe_early(&mut self, by: usize, ino: u64, seen: &State) -> Result<(), String> {
        self.observe_with(Sight::Early, Some(by), ino, seen)
    }

    fn observe_with(
        &mut self,
        sight: Sight,
        by: Option<usize>,
        ino: u64,
        seen: &State,
    ) -> Result<(), String> {
        let gone = seen.is_gone();
        if self.is_shared(ino) {
            let look = Look::All(seen);
            let told = self.watch_shared((sight, by), ino, (u64::MAX, gone), &look);
            self.drop_lost();
            return told.map_err(|may| format!("inode {ino}: seen {}; {may}", seen.summary()));
        }
        let told = self.watch(sight, by, ino, u64::MAX, gone, |state| state.shows(seen));
        self.drop_lost();
        let Some(chosen) =
            told.map_err(|may| format!("inode {ino}: seen {}; {may}", seen.summary()))?
        else {
            return Ok(());
        };
        let Some(versions) = self.inodes.get_mut(&ino) else { return Ok(()) };
        let mut kept: Vec<Version> = chosen.iter().map(|i| versions[*i].clone()).collect();
        // What was before may be so again, once nobody is left who has seen this.
        let early = !kept[0].seen.is_empty();
        if !early {
            kept[0].by = None;
        }
        if kept.len() > 1 && seen.xattrs.is_none() {
            // Which it was is not known: whatever is done from here on is done to either.
            kept.truncate(1);
            Rc::make_mut(&mut kept[0].state).xattrs = None;
        } else if seen.xattrs.is_some() {
            Rc::make_mut(&mut kept[0].state).xattrs.clone_from(&seen.xattrs);
        }
        if early {
            kept.splice(..0, versions[..chosen[0]].iter().cloned());
        }
        let before = if early { chosen[0] } else { 0 };
        let all = std::mem::replace(versions, kept);
        self.lose(
            ino,
            all.into_iter().enumerate().filter(|(i, _)| *i >= before && !chosen.contains(i)),
        );
        Ok(())
    }

    /// Keeps those of the versions that are lost for who saw them before.
    fn lose(&mut self, ino: u64, versions: impl Iterator<Item = (usize, Version)>) {
        for (_, Version { by, state, .. }) in versions {
            let Some((session, seq)) = by else { continue };
            let Session { hi, over, .. } = self.sessions[session];
            let until = over.unwrap_or(self.now);
            if seq > hi && until > self.asked_from {
                self.lost.entry(ino).or_default().push(Lost { session, until, state });
            }
        }
    }

    /// Somebody has seen, at some moment since the model's time `since`, a part of the inode: one that `fits`. An
    /// error says what it may have been. (`since` [`u64::MAX`]: seen now.)
    /// `by` are the sessions of who saw it, the last of them the present one.
    pub fn glimpse(
        &mut self,
        by: &[usize],
        ino: u64,
        since: u64,
        gone: bool,
        look: &Look<'_>,
    ) -> Result<(), String> {
        let fits = |state: &State| look.fits(state);
        if self.past.get(&ino).is_some_and(|p| p.iter().any(|p| p.until > since && fits(&p.state)))
        {
            return Ok(());
        }
        let last = by.last().copied();
        let may = match self.is_shared(ino) {
            true => self.watch_shared((Sight::Early, last), ino, (since, gone), look),
            false => self.watch(Sight::Early, last, ino, since, gone, fits).map(drop),
        };
        self.drop_lost();
        // (Who was shown it lost it with his own session.)
        let over = by.iter().filter_map(|s| self.sessions[*s].over).max();
        let until = |l: &Lost| if by.contains(&l.session) { l.until } else { over.unwrap_or(0) };
        let mut lost = self.lost.get(&ino).into_iter().flatten();
        if may.is_err() && lost.any(|l| until(l) > since && fits(&l.state)) {
            return Ok(());
        }
        may.map_err(|may| format!("inode {ino}: {may}"))
    }

    /// What was seen since then of a directory that several use shows what others had done before: all members have that.
    pub fn vouch_seen(
        &mut self,
        by: Option<usize>,
        ino: u64,
        since: u64,
        fits: impl Fn(&State) -> bool,
    ) {
        let versions = self.inodes.get(&ino).map_or(&[][..], Vec::as_slice);
        let first = self.first_possible(versions, since);
        let seen = (first..versions.len()).find(|at| fits(&versions[*at].state));
        let shown = versions[..seen.map_or(0, |at| at + 1)].iter().filter(|v| v.firm);
        let others = shown.filter_map(|v| v.by).filter(|(s, _)| by != Some(*s));
        for (s, seq) in others.collect::<Vec<_>>() {
            let session = &mut self.sessions[s];
            session.lo = session.lo.max(seq.min(session.hi));
        }
    }

    /// What may have been seen of an inode at some moment since then.
    pub fn during(&self, ino: u64, since: u64) -> Vec<Rc<State>> {
        let past = self.past.get(&ino).into_iter().flatten();
        let past = past.filter(|p| p.until > since).map(|p| Rc::clone(&p.state));
        let versions = self.inodes.get(&ino).map_or(&[][..], Vec::as_slice);
        let first = self.first_possible(versions, since);
        let unborn = self.may_be_unborn(ino, since).then(|| Rc::new(State::gone()));
        let later = versions[first..].iter().filter(|v| self.counts(v));
        past.chain(unborn).chain(later.map(|v| Rc::clone(&v.state))).collect()
    }

    /// Whether the inode may not have been made at some moment since then: not yet, or in a session that lost it.
    pub fn may_be_unborn(&self, ino: u64, since: u64) -> bool {
        let first = self.inodes.get(&ino).and_then(|versions| versions.first());
        first.is_none_or(|v| v.at > since || !self.is_certain(v))
    }

    fn counts(&self, v: &Version) -> bool {
        v.firm || v.by.is_none_or(|(s, seq)| seq <= self.sessions[s].hi)
    }

    fn is_certain(&self, v: &Version) -> bool {
        v.firm
            || v.by.is_none_or(|(s, seq)| {
                let s = &self.sessions[s];
                s.alive || seq <= s.lo
            })
            || v.seen.iter().any(|s| self.sessions[*s].alive)
    }

    /// The first version that may have been there at some moment since then.
    fn first_possible(&self, versions: &[Version], since: u64) -> usize {
        versions.iter().rposition(|v| self.is_certain(v) && v.at <= since).unwrap_or(0)
    }

    /// Finds the versions that fit, and learns from it which of those in doubt count. `None`: it was not made yet,
    /// or the session knows its own.
    fn watch(
        &mut self,
        sight: Sight,
        by: Option<usize>,
        ino: u64,
        since: u64,
        gone: bool,
        fits: impl Fn(&State) -> bool,
    ) -> Result<Option<Vec<usize>>, String> {
        let Some(mut versions) = self.inodes.remove(&ino) else {
            return if gone { Ok(None) } else { Err("nobody made it".into()) };
        };
        // What surely did not survive is no version.
        let (there, lost) = versions.into_iter().partition::<Vec<_>, _>(|v| self.counts(v));
        versions = there;
        self.lose(ino, lost.into_iter().enumerate());
        let first = self.first_possible(&versions, since);
        let unborn = versions.first().is_none_or(|v| v.at > since || !self.is_certain(v));
        let matching: Vec<usize> =
            (first..versions.len()).filter(|i| fits(&versions[*i].state)).collect();
        let (Some(&oldest), Some(&newest)) = (matching.first(), matching.last()) else {
            let result = if gone && unborn {
                // Its creation was lost, and so all after it; or it is seen before that.
                if versions.first().is_none_or(|v| v.at <= since) {
                    for (s, seq) in versions.drain(..).filter_map(|v| v.by) {
                        self.lower(s, seq - 1);
                    }
                }
                Ok(None)
            } else {
                let may: Vec<String> = versions[first.min(versions.len())..]
                    .iter()
                    .map(|v| format!("{:?} {}", v.by, v.state.summary()))
                    .collect();
                Err(format!("may be one of [{}]", may.join(" | ")))
            };
            self.inodes.insert(ino, versions);
            return result;
        };
        let own = |v: &Version| v.by.is_some_and(|(s, _)| by == Some(s));
        // What came after it, before somebody looked, is not there.
        for after in versions[newest + 1..].iter().take_while(|v| v.at <= since && !own(v)) {
            if let Some((s, seq)) = after.by {
                self.lower(s, seq - 1);
            }
        }
        if own(&versions[newest]) {
            self.inodes.insert(ino, versions);
            return Ok(None);
        }
        let is_file = matches!(versions[oldest].state.body, Body::File(..));
        if let (Sight::Early, Some(by), true) = (sight, by, is_file)
            && versions[oldest].by.is_some()
        {
            let seen = &mut versions[oldest].seen;
            if !seen.contains(&by) {
                seen.push(by);
            }
            self.inodes.insert(ino, versions);
            return Ok(Some(matching));
        }
        if let Some((s, seq)) = versions[oldest].by {
            self.sessions[s].lo = self.sessions[s].lo.max(seq);
        }
        // What came before is past.
        let past = versions.drain(..oldest).zip(1..).map(|(v, _)| v).collect::<Vec<_>>();
        let mut until = versions[0].at;
        for v in past.into_iter().rev() {
            if until > self.asked_from {
                self.past.entry(ino).or_default().push(Past { until, state: v.state });
            }
            until = v.at;
        }
        self.inodes.insert(ino, versions);
        Ok(Some(matching.into_iter().map(|i| i - oldest).collect()))
    }

    /// Of a session no more than that is there.
    fn lower(&mut self, session: usize, hi: u64) {
        let s = &mut self.sessions[session];
        self.lowered |= hi < s.hi;
        s.hi = s.hi.min(hi);
    }

    /// Whether it is certain what the inode is now.
    pub fn is_settled(&self, ino: u64, by: usize) -> bool {
        let versions = self.inodes.get(&ino).into_iter().flatten();
        let Some(last) = versions.rev().find(|v| self.counts(v)) else { return true };
        last.by.is_some_and(|(s, _)| s == by) || self.is_certain(last)
    }

    /// The operations on an inode that are the newest of each session, of those that count.
    pub fn newest_of(&self, ino: u64, counts: impl Fn((usize, u64)) -> bool) -> Vec<(usize, u64)> {
        let all = self.inodes.get(&ino).into_iter().flatten().filter_map(|v| v.by);
        let newest: BTreeMap<_, _> = all.filter(|by| counts(*by)).collect();
        newest.into_iter().collect()
    }

    /// Whether one of those sessions has seen that operation on a file.
    pub fn has_seen(&self, sessions: &[usize], operation: (usize, u64)) -> bool {
        let is = |v: &&Version| v.by == Some(operation);
        let mut all = self.inodes.values().flatten().filter(is);
        all.any(|v| v.seen.iter().any(|s| sessions.contains(s)))
    }
}
