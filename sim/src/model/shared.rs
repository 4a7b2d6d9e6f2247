//! Files that several clients write at once, each of them blocks of its own (`LeaseMode::Joint` of a regular file).
//!
//! There the order in which clients append is the order of each *block's* versions only: when the session of one of them
//! is lost, a suffix of its log is no more, and what others wrote elsewhere in the file afterwards stays. So such a write is
//! a [`Part`]: it is there only if all is that it was made of, which is
//!
//! - the last version of the whole file before it, under a lease that excludes everybody else,
//! - the parts before it that have a block in common with it: a block is given to another client when it has what was written there,
//! - the parts of its own session before it: a session loses a suffix.
//!
//! What may be there is each set of parts that is closed in that sense and holds what is certain. Of all these sets together
//! those that show what somebody saw have a least and a greatest one, per block and per time that was seen; so what must be there and what
//! cannot be follows without going through them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use super::{Body, Model, Past, Sight, State, Version};

/// Blocks in which ranges are given.
pub const BLOCK: usize = 4096;
/// Where a sight can be explained in more ways than that, it decides nothing more.
const WAYS_MAX: usize = 64;
/// A longer list of versions is cut, where nobody disputes them.
const LONG: usize = 24;

/// A write to some blocks of a file, which leaves the others to others.
#[derive(Clone, Debug)]
pub struct Part {
    /// Where it begins.
    pub offset: usize,
    /// What was written.
    pub data: Rc<[u8]>,
    /// The time that it says.
    pub time: u64,
    /// It ends the bits by which others become its owner.
    pub clears: bool,
    /// Blocks of which it is not known what it was made of: with what is in doubt there or without, they show the same.
    pub loose: Vec<usize>,
}

impl Part {
    /// The blocks that it touches.
    pub fn blocks(&self) -> Range<usize> {
        self.offset / BLOCK..(self.offset + self.data.len()).div_ceil(BLOCK)
    }

    pub(super) fn apply(&self, state: &mut State) {
        state.written(self.time, self.clears);
        if let Body::File(bytes, _) = &mut state.body
            && let Some(place) = bytes.get_mut(self.offset..self.offset + self.data.len())
        {
            place.copy_from_slice(&self.data);
        }
    }

    /// Writes what it has of those bytes of the file.
    fn copy_to(&self, from: usize, bytes: &mut [u8]) -> bool {
        let (start, end) =
            (self.offset.max(from), (self.offset + self.data.len()).min(from + bytes.len()));
        if start >= end {
            return false;
        }
        bytes[start - from..end - from]
            .copy_from_slice(&self.data[start - self.offset..end - self.offset]);
        true
    }
}

/// What somebody has seen of an inode.
pub enum Look<'a> {
    /// Something that it has or is, and not of its bytes more than how many they are.
    Of(&'a dyn Fn(&State) -> bool),
    /// Something that depends on its bytes.
    Content(&'a dyn Fn(&State) -> bool),
    /// Bytes of a file.
    Bytes {
        /// Where they begin.
        from: usize,
        /// For how many it asked.
        want: usize,
        /// Those that it was given.
        got: &'a [u8],
    },
    /// All of it.
    All(&'a State),
}

impl std::fmt::Debug for Look<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Of(_) => f.write_str("of it"),
            Self::Content(_) => f.write_str("of its content"),
            Self::Bytes { from, want, got } => write!(f, "{} of {want} at {from}", got.len()),
            Self::All(seen) => f.write_str(&seen.summary()),
        }
    }
}

impl Look<'_> {
    /// Whether a state shows that.
    pub fn fits(&self, state: &State) -> bool {
        match self {
            Self::Of(fits) | Self::Content(fits) => fits(state),
            Self::Bytes { from, want, got } => {
                let Body::File(all, _) = &state.body else { return false };
                all[(*from).min(all.len())..all.len().min(from + want)] == **got
            }
            Self::All(seen) => state.shows(seen),
        }
    }
}

/// A version of the whole file, and the parts that were written after it and before the next one.
struct Stretch<'a> {
    base: &'a Version,
    /// Of the first of `parts` among the file's versions.
    at: usize,
    parts: &'a [Version],
    /// Which parts each one needs directly.
    needs: Vec<Vec<usize>>,
    /// What is certain, and was there before it.
    before: Vec<Option<usize>>,
    certain: Vec<bool>,
    /// It is certain, and was before anybody looked.
    fixed: Vec<bool>,
}

/// What is asked of the parts that are there.
#[derive(Clone, Debug, Default)]
struct Way {
    with: Vec<usize>,
    without: Vec<usize>,
    /// Of each of these one at least.
    one_of: Vec<Vec<usize>>,
}

impl<'a> Stretch<'a> {
    fn new(
        versions: &'a [Version],
        at: usize,
        end: usize,
        is_certain: impl Fn(&Version) -> bool,
        later: bool,
        since: u64,
    ) -> Self {
        let parts = &versions[at..end];
        let mut certain: Vec<bool> = parts.iter().map(|v| later || is_certain(v)).collect();
        let fixed = parts.iter().zip(&certain).map(|(v, certain)| v.at <= since && *certain);
        let mut fixed: Vec<bool> = fixed.collect();
        let mut needs = vec![Vec::new(); parts.len()];
        let (mut of_block, mut of_session) = (BTreeMap::new(), BTreeMap::new());
        for (i, v) in parts.iter().enumerate() {
            let blocks = v.part.iter().flat_map(Part::blocks);
            let loose = |block| v.part.as_ref().is_some_and(|part| part.loose.contains(&block));
            let before =
                blocks.filter_map(|block| of_block.insert(block, i).filter(|_| !loose(block)));
            let own = v.by.and_then(|(session, _)| of_session.insert(session, i));
            needs[i] = before.chain(own).collect();
        }
        for i in (0..parts.len()).rev() {
            for need in needs[i].clone() {
                certain[need] |= certain[i];
                fixed[need] |= fixed[i];
            }
        }
        // At any moment what is certain was there in its order, and what came before a part was there with it.
        let mut last = None;
        let before = certain.iter().enumerate().map(|(i, certain)| {
            let before = last;
            last = if *certain { Some(i) } else { last };
            before
        });
        let before = before.collect();
        Self { base: &versions[at - 1], at, parts, needs, before, certain, fixed }
    }

    /// What is there if that part is.
    fn needs(&self, i: usize) -> impl Iterator<Item = usize> {
        self.needs[i].iter().copied().chain(self.before[i])
    }

    /// Everything that can be there without those.
    fn most(&self, without: &[usize]) -> Vec<bool> {
        let mut there = vec![true; self.parts.len()];
        without.iter().for_each(|i| there[*i] = false);
        for i in 0..there.len() {
            there[i] = there[i] && self.needs(i).all(|need| there[need]);
        }
        there
    }

    /// What is there at least with those.
    fn least(&self, with: &[usize]) -> Vec<bool> {
        let mut there = self.fixed.clone();
        with.iter().for_each(|i| there[*i] = true);
        for i in (0..there.len()).rev() {
            if there[i] {
                self.needs(i).for_each(|need| there[need] = true);
            }
        }
        there
    }

    /// What those were made of, and they.
    fn shown(&self, with: &[usize]) -> Vec<bool> {
        let mut shown = vec![false; self.parts.len()];
        with.iter().for_each(|i| shown[*i] = true);
        for i in (0..shown.len()).rev() {
            if shown[i] {
                self.needs[i].iter().for_each(|need| shown[*need] = true);
            }
        }
        shown
    }

    /// What that shows, and what is there at most, if it can be.
    fn solve(&self, way: &Way) -> Option<(Vec<bool>, Vec<bool>)> {
        let most = self.most(&way.without);
        let mut least = self.least(&way.with).into_iter().zip(&most);
        if least.any(|(least, most)| least && !most) {
            return None;
        }
        let mut shown = self.shown(&way.with);
        for all in &way.one_of {
            let mut any: Option<Vec<bool>> = None;
            for i in all.iter().filter(|i| most[**i]) {
                let one = self.shown(&[*i]);
                any = Some(match any {
                    None => one,
                    Some(any) => any.iter().zip(one).map(|(a, b)| *a && b).collect(),
                });
            }
            shown.iter_mut().zip(any?).for_each(|(shown, any)| *shown |= any);
        }
        Some((shown, most))
    }

    fn bytes(&self) -> &'a [u8] {
        match &self.base.state.body {
            Body::File(bytes, _) => bytes,
            _ => &[],
        }
    }

    /// Which parts are there where a block shows these bytes.
    fn block_ways(&self, from: usize, got: &[u8]) -> Vec<Way> {
        let mut bytes = self.bytes()[from..from + got.len()].to_vec();
        let block = from / BLOCK;
        let (mut ways, mut with) = (Vec::new(), Vec::new());
        let mut fits = bytes == got;
        for (i, part) in self.parts.iter().enumerate() {
            let Some(part) = part.part.as_ref().filter(|p| p.blocks().contains(&block)) else {
                continue;
            };
            let fit = if part.copy_to(from, &mut bytes) { bytes == got } else { fits };
            match (fits, fit) {
                (true, false) => {
                    let with = std::mem::take(&mut with);
                    ways.push(Way { with, without: vec![i], one_of: Vec::new() });
                }
                (false, true) => with = vec![i],
                _ => {}
            }
            fits = fit;
        }
        if fits {
            ways.push(Way { with, ..Way::default() });
        }
        ways
    }

    /// The same of bytes of several blocks, together with what is asked otherwise.
    fn bytes_ways(&self, ways: Vec<Way>, from: usize, got: &[u8]) -> Vec<Way> {
        let (mut ways, mut at) = (ways, 0);
        while at < got.len() && !ways.is_empty() {
            let len = (BLOCK - (from + at) % BLOCK).min(got.len() - at);
            let here = self.block_ways(from + at, &got[at..at + len]);
            at += len;
            if here.len() * ways.len() > WAYS_MAX {
                continue;
            }
            let both = |(a, b): (&Way, &Way)| Way {
                with: [&a.with[..], &b.with].concat(),
                without: [&a.without[..], &b.without].concat(),
                one_of: a.one_of.clone(),
            };
            let all = ways.iter().flat_map(|a| here.iter().map(move |b| (a, b)));
            ways = all.map(both).filter(|way| self.solve(way).is_some()).collect();
        }
        ways
    }

    /// Which parts are there where its attributes are such.
    fn ways_of(&self, fits: &dyn Fn(&State) -> bool) -> Vec<Way> {
        let base = &self.base.state;
        let parts = || self.parts.iter().map(|v| v.part.as_ref());
        let time = |part: Option<&Part>| part.map_or(0, |p| p.time).max(base.ctime);
        let clears = |part: Option<&Part>| part.is_some_and(|p| p.clears);
        let which = |is: &dyn Fn(Option<&Part>) -> bool| -> Vec<usize> {
            parts().enumerate().filter(|(_, part)| is(*part)).map(|(i, _)| i).collect()
        };
        let (mut ways, mut all) = (Vec::new(), true);
        match fits(base) {
            true => ways.push(Way { without: (0..self.parts.len()).collect(), ..Way::default() }),
            false => all = false,
        }
        let times: BTreeSet<u64> = parts().map(time).collect();
        let mut state = State::clone(base);
        for cleared in [false, true] {
            if cleared && !parts().any(clears) {
                continue;
            }
            for t in &times {
                (state.mtime, state.ctime, state.mode) = (base.mtime, base.ctime, base.mode);
                state.written(*t, cleared);
                if !fits(&state) {
                    all = false;
                    continue;
                }
                let without = which(&|p| time(p) > *t || !cleared && clears(p));
                let mut one_of = vec![which(&|p| time(p) == *t)];
                if cleared {
                    one_of.push(which(&clears));
                }
                ways.push(Way { with: Vec::new(), without, one_of });
            }
        }
        if all { vec![Way::default()] } else { ways }
    }

    /// Which parts are there where its bytes tell such a thing: one way after the other. `None`: there are too many.
    fn content_ways(&self, fits: &dyn Fn(&State) -> bool) -> Option<Vec<Way>> {
        let all = || 0..self.parts.len();
        if self.certain.iter().all(|certain| *certain) {
            let base = std::iter::once(&self.base.state);
            let states = base.chain(self.parts.iter().map(|v| &v.state)).enumerate();
            let way = |count: usize| Way {
                with: (0..count).collect(),
                without: (count..self.parts.len()).collect(),
                one_of: Vec::new(),
            };
            return Some(states.filter(|(_, s)| fits(s)).map(|(count, _)| way(count)).collect());
        }
        let (mut ways, mut sets) = (Vec::new(), vec![self.least(&[])]);
        let mut known: BTreeSet<Vec<bool>> = sets.iter().cloned().collect();
        while let Some(there) = sets.pop() {
            let mut state = State::clone(&self.base.state);
            let some = all().filter(|i| there[*i]).filter_map(|i| self.parts[i].part.as_ref());
            some.for_each(|part| part.apply(&mut state));
            if fits(&state) {
                let (with, without) = all().partition(|i| there[*i]);
                ways.push(Way { with, without, one_of: Vec::new() });
            }
            for i in all().filter(|i| !there[*i]) {
                if self.needs(i).all(|need| there[need]) {
                    let mut more = there.clone();
                    more[i] = true;
                    if known.insert(more.clone()) {
                        sets.push(more);
                    }
                }
            }
            if known.len() > 16 * WAYS_MAX {
                return None;
            }
        }
        Some(ways)
    }

    /// What was seen, and what is there at most, in each way in which that may have been.
    fn explain(&self, look: &Look<'_>) -> Vec<(Vec<bool>, Vec<bool>)> {
        if self.parts.is_empty() {
            return if look.fits(&self.base.state) { vec![Default::default()] } else { Vec::new() };
        }
        let len = self.bytes().len();
        let ways = match look {
            Look::Of(fits) => self.ways_of(fits),
            Look::Content(fits) => match self.content_ways(fits) {
                Some(ways) => ways,
                None => vec![Way::default()],
            },
            Look::Bytes { from, want, got } => {
                let there = (*from).min(len)..len.min(from + want);
                match got.len() == there.len() {
                    true => self.bytes_ways(vec![Way::default()], there.start, got),
                    false => Vec::new(),
                }
            }
            Look::All(seen) => match (&seen.body, &self.base.state.body) {
                (Body::Gone, _) if self.base.state.is_gone() => vec![Way::default()],
                (Body::File(got, links), Body::File(_, names))
                    if got.len() == len && links == names =>
                {
                    let ways = self.ways_of(&|state| state.has_attributes_of(seen));
                    let ways: Vec<Way> =
                        ways.into_iter().filter(|way| self.solve(way).is_some()).collect();
                    self.bytes_ways(ways, 0, got)
                }
                _ => Vec::new(),
            },
        };
        ways.iter().filter_map(|way| self.solve(way)).collect()
    }
}

/// Which of a file's versions were seen, and which there are at most, where they show what was seen.
struct Found {
    shown: Vec<bool>,
    most: Vec<bool>,
    /// The version of the whole file that it may be at the latest.
    base: usize,
    /// Extended attributes are the same in all of them.
    one_kind: bool,
}

/// Where versions of a whole file are.
fn bases(versions: &[Version]) -> Vec<usize> {
    let is_base = |(i, v): &(usize, &Version)| *i == 0 || v.part.is_none();
    versions.iter().enumerate().filter(is_base).map(|(i, _)| i).collect()
}

impl Model {
    /// Whether anybody has written a part of the inode.
    pub(super) fn is_shared(&self, ino: u64) -> bool {
        self.shared.contains(&ino)
    }

    /// Operation `seq` of `session` was appended under a lease on ranges, and makes the file this.
    pub fn appended_part(
        &mut self,
        session: usize,
        seq: u64,
        (ino, state): (u64, State),
        mut part: Part,
    ) {
        let s = &self.sessions[session];
        if !s.alive && seq > s.hi {
            return;
        }
        if self.shared.insert(ino) {
            self.drop_lost_of(ino);
        }
        let range = part.offset as u64..(part.offset + part.data.len()) as u64;
        part.loose = self.unsettled(ino, session, Some(range)).unwrap_or_default();
        self.now += 1;
        let (by, at, seen) = (Some((session, seq)), self.now, Vec::new());
        let (state, part) = (Rc::new(state), Some(part));
        let versions = self.inodes.entry(ino).or_default();
        versions.push(Version { by, firm: false, at, state, part, seen });
        if versions.len() > LONG {
            self.fold(ino);
        }
    }

    /// What nobody disputes of the oldest versions, and nobody asks for, is one version.
    fn fold(&mut self, ino: u64) {
        let Some(versions) = self.inodes.get(&ino) else { return };
        let settled = |v: &&Version| {
            let vouched = v.by.is_none_or(|(s, seq)| seq <= self.sessions[s].lo);
            vouched && !v.firm && v.at <= self.asked_from
        };
        let count = versions.iter().take_while(settled).count();
        if count < LONG / 2 {
            return;
        }
        if let Some(versions) = self.inodes.get_mut(&ino) {
            versions.drain(..count - 1);
            (versions[0].by, versions[0].part) = (None, None);
            versions[0].seen.clear();
        }
    }

    /// Sessions have lost something: of files that are written in parts that is gone from the middle, with what was made of it.
    pub(super) fn drop_lost(&mut self) {
        while std::mem::take(&mut self.lowered) {
            for ino in self.shared.clone() {
                let Some(versions) = self.inodes.get(&ino) else { continue };
                if versions.iter().all(|v| self.counts(v)) {
                    continue;
                }
                // What rests on something that is lost is lost.
                let (mut blocks, mut any, mut lost) = (BTreeSet::new(), false, Vec::new());
                for v in versions {
                    let rests = match &v.part {
                        Some(part) => part
                            .blocks()
                            .any(|block| blocks.contains(&block) && !part.loose.contains(&block)),
                        None => any,
                    };
                    if !self.counts(v) || rests && !self.is_certain(v) {
                        any = true;
                        blocks.extend(v.part.iter().flat_map(Part::blocks));
                        lost.extend(v.by);
                    } else if v.part.is_none() {
                        (any, blocks) = (false, BTreeSet::new());
                    }
                }
                lost.into_iter().for_each(|(session, seq)| self.lower(session, seq - 1));
                self.drop_lost_of(ino);
            }
        }
    }

    fn drop_lost_of(&mut self, ino: u64) {
        let Some(versions) = self.inodes.remove(&ino) else { return };
        let (mut there, lost) = versions.into_iter().partition::<Vec<_>, _>(|v| self.counts(v));
        self.lose(ino, lost.into_iter().enumerate());
        for i in 1..there.len() {
            let Some(part) = there[i].part.clone() else { continue };
            let mut state = State::clone(&there[i - 1].state);
            part.apply(&mut state);
            there[i].state = Rc::new(state);
        }
        self.inodes.insert(ino, there);
    }

    /// The blocks of a file of which it is not certain what they are now, but for what that session wrote last: of those in a
    /// range, or of all. `None`: it is not certain what the file is.
    pub fn unsettled(&self, ino: u64, by: usize, range: Option<Range<u64>>) -> Option<Vec<usize>> {
        if !self.is_shared(ino) {
            return self.is_settled(ino, by).then(Vec::new);
        }
        let versions = self.inodes.get(&ino).map_or(&[][..], Vec::as_slice);
        let Some(base) = bases(versions).pop() else { return Some(Vec::new()) };
        let known = |v: &Version| v.by.is_some_and(|(s, _)| s == by) || self.is_certain(v);
        if !versions[base..].iter().any(known) {
            return None;
        }
        let parts = &versions[base + 1..];
        let blocks: BTreeSet<usize> = match range {
            Some(range) => {
                (range.start as usize / BLOCK..(range.end as usize).div_ceil(BLOCK)).collect()
            }
            None => parts.iter().filter_map(|v| v.part.as_ref()).flat_map(Part::blocks).collect(),
        };
        let of = |block: &usize| {
            let mut all = parts.iter().rev();
            all.find(|v| v.part.as_ref().is_some_and(|part| part.blocks().contains(block)))
        };
        Some(blocks.into_iter().filter(|block| of(block).is_some_and(|v| !known(v))).collect())
    }

    /// Puts over some bytes of a file, as a node has them, what a session has done behind those of its operations that the node has.
    pub fn lay_own_over(&self, (ino, by): (u64, usize), after: u64, from: usize, bytes: &mut [u8]) {
        let own = |v: &&Version| v.by.is_some_and(|(s, seq)| s == by && seq > after);
        for v in self.inodes.get(&ino).into_iter().flatten().filter(own) {
            match (&v.part, &v.state.body) {
                (Some(part), _) => drop(part.copy_to(from, bytes)),
                (None, Body::File(all, _)) => {
                    let there = all.get(from..).unwrap_or(&[]);
                    bytes.iter_mut().zip(there).for_each(|(byte, there)| *byte = *there);
                }
                _ => {}
            }
        }
    }

    /// What was seen must be what some set of versions shows.
    fn find(&self, versions: &[Version], since: u64, look: &Look<'_>) -> Option<Found> {
        let (bases, mut end) = (bases(versions), versions.len());
        let mut found: Option<Found> = None;
        let certain = |v: &Version| self.is_certain(v);
        let (mut later, mut later_fixed) = (false, false);
        // The last first.
        for base in bases.into_iter().rev() {
            let stretch = Stretch::new(versions, base + 1, end, certain, later, since);
            end = base;
            if !later_fixed {
                for (shown, most) in stretch.explain(look) {
                    let (mut all, mut any) =
                        (vec![false; versions.len()], vec![false; versions.len()]);
                    // (What it was made of itself it may have been made without, where that shows the same.)
                    all[base] = true;
                    any[..=base].fill(true);
                    all[stretch.at..stretch.at + shown.len()].copy_from_slice(&shown);
                    any[stretch.at..stretch.at + most.len()].copy_from_slice(&most);
                    match &mut found {
                        None => {
                            found = Some(Found { shown: all, most: any, base, one_kind: true });
                        }
                        Some(found) => {
                            found.shown.iter_mut().zip(all).for_each(|(a, b)| *a &= b);
                            found.most.iter_mut().zip(any).for_each(|(a, b)| *a |= b);
                            let (a, b) = (&versions[base].state, &versions[found.base].state);
                            found.one_kind &= a.xattrs == b.xattrs;
                        }
                    }
                }
            }
            later_fixed |= certain(&versions[base]) && versions[base].at <= since
                || stretch.fixed.iter().any(|fixed| *fixed);
            later |= certain(&versions[base]) || stretch.certain.iter().any(|certain| *certain);
            if later_fixed {
                break;
            }
        }
        found
    }

    /// Finds what versions show what was seen, and learns from it which of those in doubt count.
    pub(super) fn watch_shared(
        &mut self,
        (sight, by): (Sight, Option<usize>),
        ino: u64,
        (since, gone): (u64, bool),
        look: &Look<'_>,
    ) -> Result<(), String> {
        let mut versions = self.inodes.remove(&ino).unwrap_or_default();
        let Some(found) = self.find(&versions, since, look) else {
            let unborn = versions.first().is_none_or(|v| v.at > since || !self.is_certain(v));
            let result = if gone && unborn {
                // Its creation was lost, and so all after it; or it is seen before that.
                if versions.first().is_none_or(|v| v.at <= since) {
                    for (s, seq) in versions.drain(..).filter_map(|v| v.by) {
                        self.lower(s, seq - 1);
                    }
                }
                Ok(())
            } else {
                let may: Vec<String> = versions
                    .iter()
                    .rev()
                    .take(12)
                    .map(|v| {
                        let part = v.part.as_ref().map(|p| (p.offset, p.data.len()));
                        format!("{:?} {part:?} {}", v.by, v.state.summary())
                    })
                    .collect();
                Err(format!("written in parts, the newest of which are [{}]", may.join(" | ")))
            };
            self.inodes.insert(ino, versions);
            return result;
        };
        let is_own = |v: &Version| v.by.is_some_and(|(s, _)| by == Some(s));
        // What is not there, and was appended before somebody looked, is lost.
        let absent = versions.iter().zip(&found.most).filter(|(_, there)| !**there).map(|(v, _)| v);
        let absent = absent.take_while(|v| v.at <= since && !is_own(v)).filter_map(|v| v.by);
        let absent: Vec<(usize, u64)> = absent.collect();
        absent.into_iter().for_each(|(s, seq)| self.lower(s, seq - 1));
        let early = sight == Sight::Early && by.is_some();
        let there = versions.iter_mut().zip(&found.shown).filter(|(_, there)| **there);
        for (v, _) in there {
            let Some((s, seq)) = v.by.filter(|_| !is_own(v)) else { continue };
            match by.filter(|_| early) {
                Some(by) if !v.seen.contains(&by) => v.seen.push(by),
                Some(_) => {}
                None => self.sessions[s].lo = self.sessions[s].lo.max(seq),
            }
        }
        if let Look::All(seen) = look {
            let own = versions.iter().zip(&found.most).any(|(v, there)| *there && is_own(v));
            if !early && !own {
                versions = self.collapse(ino, versions, &found, seen);
            } else if seen.xattrs.is_some() {
                for v in &mut versions[found.base..] {
                    if v.state.xattrs.is_none() {
                        Rc::make_mut(&mut v.state).xattrs.clone_from(&seen.xattrs);
                    }
                }
            }
        }
        self.inodes.insert(ino, versions);
        Ok(())
    }

    /// All of the file was seen, and every member has it: from now on it is that, and nothing is left to be disputed.
    fn collapse(
        &mut self,
        ino: u64,
        versions: Vec<Version>,
        found: &Found,
        seen: &State,
    ) -> Vec<Version> {
        let base = State::clone(&versions[found.base].state);
        let known = if found.one_kind { base.xattrs.clone() } else { None };
        // (Freed, it shows nothing; with no name it shows all.)
        let mut state = if seen.body == Body::Gone { base } else { seen.clone() };
        state.xattrs = if seen.xattrs.is_some() { seen.xattrs.clone() } else { known };
        let last = found.shown.iter().rposition(|there| *there).unwrap_or(0);
        let at = versions[last].at;
        let mut until = u64::MAX;
        for (v, there) in versions.iter().zip(&found.most).rev() {
            if *there && until != u64::MAX && until > self.asked_from {
                let state = Rc::clone(&v.state);
                self.past.entry(ino).or_default().push(Past { until, state });
            }
            if *there {
                until = v.at;
            }
        }
        let lost = versions.into_iter().zip(&found.most).filter(|(_, there)| !**there);
        self.lose(ino, lost.map(|(v, _)| v).enumerate());
        let (by, firm, part, seen) = (None, false, None, Vec::new());
        vec![Version { by, firm, at, state: Rc::new(state), part, seen }]
    }
}
