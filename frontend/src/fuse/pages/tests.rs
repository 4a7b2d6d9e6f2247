//! A kernel with pages, as FUSE has it (Linux 5.10 to 6.18), in front of a file that others change as well. Every
//! step of every request is taken in an order drawn from a seed; what each `read` finds must be what the file
//! was at some moment since it began, byte by byte and its end.

use base::InodeId;
use base::random::Random;
use client::fs::{Attr, S_IFREG, Time};

use super::*;

/// Pages of the file at most, each of two cells (what is smaller than a page).
const PAGES: usize = 3;
const CELLS: usize = 2 * PAGES;

/// What a cell shows: nothing (behind the end), or the number of the write that it is of.
type Cell = Option<u32>;

/// The server's side of the truth.
#[derive(Default)]
struct File {
    /// All states since the beginning, and the number of cells in each.
    states: Vec<([u32; CELLS], usize)>,
    /// The last state that has returned.
    returned: usize,
    writes: u32,
    ctime: i64,
    mtime: i64,
    clock: i64,
    learnt: u64,
    /// Somebody else had the lease since the last look.
    lost: bool,
}

impl File {
    fn now(&self) -> ([u32; CELLS], usize) {
        *self.states.last().unwrap()
    }

    fn attr(&mut self) -> Attr {
        if std::mem::take(&mut self.lost) {
            self.learnt += 1;
        }
        let time = |sec| Time { sec, nsec: 0 };
        Attr {
            ino: InodeId(5),
            mode: S_IFREG | 0o644,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: self.now().1 as u64,
            blocks: 0,
            atime: time(0),
            mtime: time(self.mtime),
            ctime: time(self.ctime),
            btime: time(0),
            learnt: self.learnt,
        }
    }

    fn change(&mut self, cells: std::ops::Range<usize>, size: Option<usize>, restores: bool) {
        self.writes += 1;
        self.clock += 1;
        let (mut state, old) = self.now();
        let size = size.unwrap_or(old).max(cells.end.min(CELLS));
        if old < size {
            state[old..size].fill(0);
        }
        state[cells].fill(self.writes);
        self.ctime = self.clock;
        if !restores {
            self.mtime = self.clock;
        }
        self.states.push((state, size));
    }
}

/// The kernel's inode.
#[derive(Default)]
struct Kernel {
    /// Of the connection, and of the inode.
    versions: u64,
    version: u64,
    size: usize,
    mtime: i64,
    valid: bool,
    pages: [Option<[u32; 2]>; PAGES],
    locked: [bool; PAGES],
    unstable: bool,
    /// Somebody writes: one at a time.
    writing: bool,
    /// An answer to SETATTR is on its way, whose size may be late when others make the file longer.
    setting: bool,
}

impl Kernel {
    fn bump(&mut self) {
        self.versions += 1;
        self.version = self.versions;
    }

    /// False if a page is locked.
    fn drop_pages(&mut self) -> bool {
        for page in 0..PAGES {
            if self.locked[page] {
                return false;
            }
            self.pages[page] = None;
        }
        true
    }

    fn cut(&mut self, size: usize) {
        for cell in size..CELLS {
            match &mut self.pages[cell / 2] {
                Some(page) if cell % 2 == 1 && size == cell => page[1] = 0,
                page => *page = None,
            }
        }
    }
}

/// Where a request is.
#[derive(Clone, Debug)]
enum Step {
    Begin,
    /// GETATTR is on its way, asked at that version.
    Asked(u64),
    /// It was answered: the pages are to go (after the file was made longer, if so) before the reply.
    Dropping(u64, Attr, bool, u8),
    /// The reply is on its way; whether it may be kept.
    Answered(u64, Attr, bool),
    /// The kernel has taken it in, but for dropping pages.
    Taken,
    /// Pages are read, the next one is this.
    Read(usize),
    /// READ of a page is on its way, asked at that version.
    Filling(usize, u64),
    /// Its reply is.
    Filled(usize, u64, [u32; 2], usize),
    /// A write is in the page.
    Written(bool),
    /// WRITE or SETATTR was served.
    Served(Option<Attr>),
    /// Another has asked for the lease.
    Recalled,
    End,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    Seek,
    Stat,
    Open,
    /// A write on this node, to one cell or a page.
    Write(usize, usize),
    /// SETATTR on this node.
    Set,
    /// Another node writes, or cuts, and sets the time back or not.
    Other(usize, usize, Option<usize>, bool),
}

#[derive(Clone, Debug)]
struct Actor {
    kind: Kind,
    step: Step,
    since: usize,
    found: [Cell; CELLS],
}

impl Actor {
    /// Whether this is not, or no longer, on this node.
    fn is_elsewhere(&self) -> bool {
        matches!(self.kind, Kind::Other(..)) || matches!(self.step, Step::End)
    }
}

/// How the server behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Policy {
    Ours,
    /// Leaves everything to the kernel.
    Kernels,
    /// Drops pages, but leaves the size to the kernel.
    NoStore,
    /// Answers while another drops pages.
    NoWait,
    /// Takes what the kernel writes itself for being in its pages.
    Trusting,
}

struct World {
    random: Random,
    policy: Policy,
    file: File,
    kernel: Kernel,
    pages: Pages,
    kept: bool,
    told: (i64, u64),
    ms: u64,
}

impl World {
    fn new(seed: u64, policy: Policy) -> Self {
        let mut file =
            File { states: vec![([0; CELLS], 4)], ctime: 1, mtime: 1, ..File::default() };
        (file.clock, file.learnt) = (1, 1);
        let mut attr = file.attr();
        if seed.is_multiple_of(3) {
            attr.learnt = LEARNT_ELSEWHERE;
        }
        let kernel = Kernel { size: 4, mtime: 1, ..Kernel::default() };
        Self {
            random: Random::new(seed),
            policy,
            file,
            kernel,
            pages: Pages::new(&attr, 0),
            kept: false,
            told: (1, 0),
            ms: 0,
        }
    }

    /// `alone`: nobody else is at work on this node.
    fn draw(&mut self, cuts: bool, alone: bool) -> Actor {
        let at = self.random.below(CELLS as u64) as usize;
        let long = 1 + self.random.below(2) as usize;
        let (from, to) = (at, (at + long).min(CELLS));
        let kind = match self.random.below(14) {
            // What a kernel knows of a file's end is right only where nobody else moves it.
            0..=10 if cuts && !alone => Kind::Other(from, to, None, self.random.below(3) > 0),
            0..=4 => Kind::Read,
            5 => Kind::Seek,
            6 => Kind::Stat,
            7 => Kind::Open,
            // The kernel sends a request for each page that it does not hold whole.
            8 | 9 => Kind::Write(from, to.min(from / 2 * 2 + 2)),
            10 => Kind::Set,
            11 if cuts => Kind::Other(0, 0, Some(1 + at), self.random.below(2) == 0),
            _ => Kind::Other(from, to, None, self.random.below(3) > 0),
        };
        Actor { kind, step: Step::Begin, since: self.file.returned, found: [None; CELLS] }
    }

    /// Whether these attributes may be kept: told long enough ago, with fresh pages.
    fn keeps(&mut self, attr: &Attr) -> bool {
        let version = (attr.ctime.sec, 0);
        if self.told.0 != version.0 {
            self.told = (version.0, self.ms);
        }
        let fresh = self.policy == Policy::Kernels || self.pages.is_fresh(attr);
        let keeps = fresh && self.ms - self.told.1 >= SETTLE_MS && !self.file.lost;
        self.kept |= keeps;
        keeps
    }

    fn what(kind: Kind) -> For {
        match kind {
            Kind::Stat => For::Looking,
            Kind::Open => For::Opening,
            _ => For::Reading,
        }
    }

    /// One step; false if it has to wait.
    fn step(&mut self, actor: &mut Actor) -> Result<bool, String> {
        actor.step = match actor.step.clone() {
            Step::Begin => match actor.kind {
                Kind::Read | Kind::Seek | Kind::Stat if self.kernel.valid => Step::Taken,
                Kind::Read | Kind::Seek | Kind::Stat | Kind::Open => {
                    Step::Asked(self.kernel.versions)
                }
                Kind::Write(..) | Kind::Set if self.kernel.writing => return Ok(false),
                Kind::Write(from, to) => {
                    if (from / 2..to.div_ceil(2)).any(|page| self.kernel.locked[page]) {
                        return Ok(false);
                    }
                    // Cells show what they are in the file once it is there.
                    let number = u32::MAX;
                    for cell in from..to {
                        if let Some(page) = &mut self.kernel.pages[cell / 2] {
                            page[cell % 2] = number;
                        } else if from <= cell / 2 * 2 && to >= cell / 2 * 2 + 2 {
                            self.kernel.pages[cell / 2] = Some([number; 2]);
                        }
                    }
                    let last = (to - 1) / 2;
                    let locks = self.kernel.pages[last].is_none();
                    self.kernel.locked[last] |= locks;
                    self.kernel.unstable = to > self.kernel.size;
                    self.kernel.writing = true;
                    Step::Written(locks)
                }
                Kind::Set => {
                    (self.kernel.writing, self.kernel.setting) = (true, true);
                    Step::Written(false)
                }
                Kind::Other(..) => Step::Recalled,
            },
            Step::Asked(version) => {
                let mut attr = self.file.attr();
                if self.random.below(4) == 0 {
                    attr.learnt = LEARNT_ELSEWHERE;
                }
                let verdict = match self.policy {
                    Policy::Kernels => Verdict::Tell,
                    _ => {
                        let asked = self.pages.changes;
                        self.pages.judge(&attr, Self::what(actor.kind), asked, self.ms)
                    }
                };
                match verdict {
                    Verdict::Wait if self.policy != Policy::NoWait => return Ok(false),
                    Verdict::Drop { extend } => {
                        let extend = extend && self.policy != Policy::NoStore;
                        Step::Dropping(version, attr, extend, 0)
                    }
                    Verdict::Tell | Verdict::Renew | Verdict::Wait => {
                        if actor.kind != Kind::Open {
                            self.pages.tell(&attr, self.ms);
                        }
                        let keep = match actor.kind {
                            Kind::Open if self.policy == Policy::Kernels => self.kept,
                            Kind::Open => self.pages.is_fresh(&attr),
                            _ => self.keeps(&attr),
                        };
                        if verdict == Verdict::Renew {
                            attr.mtime = unseen(&attr);
                        }
                        Step::Answered(version, attr, keep)
                    }
                }
            }
            Step::Dropping(version, attr, extend, stage) => match stage {
                0 => {
                    if extend {
                        self.kernel.bump();
                        self.kernel.size = self.kernel.size.max(attr.size as usize);
                        self.kernel.valid = false;
                    }
                    Step::Dropping(version, attr, extend, 1)
                }
                1 => {
                    self.kernel.bump();
                    self.kernel.valid = false;
                    Step::Dropping(version, attr, extend, 2)
                }
                _ => {
                    if !self.kernel.drop_pages() {
                        return Ok(false);
                    }
                    self.pages.dropped(&attr);
                    if actor.kind != Kind::Open {
                        self.pages.tell(&attr, self.ms);
                    }
                    let keep = actor.kind == Kind::Open && self.pages.is_fresh(&attr);
                    Step::Answered(version, attr, keep)
                }
            },
            Step::Answered(version, attr, keep) => {
                if actor.kind == Kind::Open {
                    if !keep && !self.kernel.drop_pages() {
                        return Ok(false);
                    }
                    // What is mapped now is read without a look at the attributes; its end is not known.
                    Step::Read(0)
                } else if self.kernel.version > version || self.kernel.unstable {
                    Step::Taken
                } else {
                    let size = attr.size as usize;
                    let other = self.kernel.size != size || self.kernel.mtime != attr.mtime.sec;
                    if other && self.kernel.locked.iter().any(|locked| *locked) {
                        return Ok(false);
                    }
                    self.kernel.bump();
                    self.kernel.valid = keep;
                    (self.kernel.size, self.kernel.mtime) = (size, attr.mtime.sec);
                    if other {
                        self.kernel.cut(size);
                        self.kernel.drop_pages();
                    }
                    Step::Taken
                }
            }
            Step::Taken => match actor.kind {
                Kind::Read => Step::Read(0),
                Kind::Seek => {
                    let sizes = || self.file.states[actor.since..].iter().map(|state| state.1);
                    if !sizes().any(|size| size == self.kernel.size) {
                        let is: Vec<_> = sizes().collect();
                        return Err(format!("the end is {}, not of {is:?}", self.kernel.size));
                    }
                    Step::End
                }
                _ => Step::End,
            },
            Step::Read(page) if page == PAGES => Step::End,
            Step::Read(page) => {
                let (open, cell) = (actor.kind == Kind::Open, 2 * page);
                if !open && cell >= self.kernel.size {
                    self.judge(actor, cell, self.kernel.size)?;
                    Step::End
                } else if self.kernel.locked[page] {
                    return Ok(false);
                } else if let Some(cells) = self.kernel.pages[page] {
                    actor.found[cell..cell + 2].copy_from_slice(&cells.map(Some));
                    let end = if open { CELLS } else { self.kernel.size };
                    self.judge(actor, cell, end)?;
                    Step::Read(page + 1)
                } else {
                    self.kernel.locked[page] = true;
                    Step::Filling(page, self.kernel.versions)
                }
            }
            Step::Filling(page, version) => {
                self.pages.filled = true;
                let (state, size) = self.file.now();
                let mut cells = [0; 2];
                let end = size.clamp(2 * page, 2 * page + 2);
                cells[..end - 2 * page].copy_from_slice(&state[2 * page..end]);
                if end < 2 * page + 2 {
                    self.pages.least = self.pages.least.min(end as u64);
                }
                Step::Filled(page, version, cells, end)
            }
            Step::Filled(page, version, cells, end) => {
                if end < 2 * page + 2
                    && version >= self.kernel.version
                    && end < self.kernel.size
                    && !self.kernel.unstable
                {
                    self.kernel.bump();
                    self.kernel.size = end;
                }
                self.kernel.locked[page] = false;
                self.kernel.pages[page] = Some(cells);
                Step::Read(page)
            }
            Step::Written(locks) => {
                self.pages.change(
                    if let Kind::Write(_, to) = actor.kind { to as u64 } else { 0 },
                    self.ms,
                );
                let attr = match actor.kind {
                    Kind::Write(from, to) => {
                        self.file.attr(); // takes the lease
                        self.file.change(from..to, None, false);
                        let number = self.file.writes;
                        for cell in from..to {
                            if let Some(page) = &mut self.kernel.pages[cell / 2]
                                && page[cell % 2] == u32::MAX
                            {
                                page[cell % 2] = number;
                            }
                        }
                        None
                    }
                    _ => {
                        self.file.attr();
                        self.file.change(0..0, None, self.random.below(2) == 0);
                        let attr = self.file.attr();
                        self.pages.tell(&attr, self.ms);
                        Some(attr)
                    }
                };
                let dirty = self.pages.dirty;
                self.pages.changed(self.ms);
                self.pages.dirty &= dirty || self.policy != Policy::Trusting;
                if locks && let Kind::Write(_, to) = actor.kind {
                    actor.found[0] = Some((to - 1) as u32 / 2);
                }
                Step::Served(attr)
            }
            Step::Served(attr) => {
                self.kernel.bump();
                match (actor.kind, attr) {
                    (Kind::Write(_, to), _) => {
                        if let Some(Some(page)) = actor.found.first() {
                            self.kernel.locked[*page as usize] = false;
                        }
                        self.kernel.unstable = false;
                        self.kernel.size = self.kernel.size.max(to);
                        self.kernel.valid = false;
                    }
                    (_, Some(attr)) => {
                        (self.kernel.size, self.kernel.mtime) =
                            (attr.size as usize, attr.mtime.sec);
                        self.kernel.valid = false;
                    }
                    _ => {}
                }
                (self.kernel.writing, self.kernel.setting) = (false, false);
                self.file.returned = self.file.states.len() - 1;
                Step::End
            }
            Step::Recalled
                if self.kernel.setting
                    && matches!(actor.kind, Kind::Other(_, to, size, _)
                        if to.max(size.unwrap_or(0)) > self.file.now().1) =>
            {
                return Ok(false);
            }
            Step::Recalled if std::mem::take(&mut self.kept) => {
                // The lease is given back first.
                self.kernel.bump();
                self.kernel.valid = false;
                Step::Recalled
            }
            Step::Recalled => {
                let Kind::Other(from, to, size, restores) = actor.kind else { unreachable!() };
                self.file.lost = true;
                self.file.change(from..to, size, restores);
                self.file.returned = self.file.states.len() - 1;
                Step::End
            }
            Step::End => Step::End,
        };
        Ok(true)
    }

    /// Whether what was found in a page, up to where the file ended for the reader, was so at some moment.
    fn judge(&self, actor: &Actor, cell: usize, end: usize) -> Result<(), String> {
        for cell in cell..cell + 2 {
            let states = &self.file.states[actor.since..];
            let is = |(state, size): &([u32; CELLS], usize)| (cell < *size).then(|| state[cell]);
            let found = actor.found[cell].filter(|_| cell < end);
            // A write that is under way shows early.
            let early = found == Some(u32::MAX);
            // Whoever maps the file sees zeroes behind its end.
            let mapped = actor.kind == Kind::Open && found == Some(0);
            let were: Vec<Cell> = states.iter().map(is).collect();
            // Of what is cut away while it is read zeroes may be seen, as on any file system.
            let cut = found == Some(0) && were.contains(&None) && were.iter().any(Option::is_some);
            if !early && !mapped && !cut && !were.contains(&found) {
                return Err(format!("cell {cell}: {found:?}, not of {were:?}"));
            }
        }
        Ok(())
    }
}

/// What went wrong in one history, if anything.
fn history(seed: u64, policy: Policy, cuts: bool) -> Result<(), String> {
    let mut world = World::new(seed, policy);
    let mut trace = Vec::new();
    for _ in 0..60 {
        // All at once; then time passes, which is when the kernel has taken everything in.
        let mut actors: Vec<Actor> = Vec::new();
        for _ in 0..1 + world.random.below(4) {
            let alone = actors.iter().all(Actor::is_elsewhere);
            actors.push(world.draw(cuts, alone));
        }
        let mut idle = 0;
        while actors.iter().any(|actor| !matches!(actor.step, Step::End)) {
            let at = world.random.below(actors.len() as u64) as usize;
            let before = actors[at].step.clone();
            let went = world.step(&mut actors[at]).map_err(|text| {
                format!("seed {seed}: {:?}: {text}\n{}", actors[at].kind, trace.join("\n"))
            })?;
            if went && !matches!(before, Step::End) {
                trace.push(format!("{at} {:?} {before:?}", actors[at].kind));
                idle = 0;
            }
            idle += 1;
            assert!(idle < 1000, "seed {seed}: all wait: {actors:?}");
            // New ones begin while others are under way.
            if matches!(actors[at].step, Step::End) && world.random.below(3) == 0 {
                let alone = actors.iter().all(Actor::is_elsewhere);
                actors[at] = world.draw(cuts, alone);
            }
            let last = trace.len().saturating_sub(60);
            trace.drain(..last);
        }
        world.ms += world.random.below(2) * (SETTLE_MS + 1);
    }
    Ok(())
}

/// A file of that size, changed at that time.
fn attr(size: u64, ctime: i64, learnt: u64) -> Attr {
    let mut file =
        File { states: vec![([0; CELLS], size as usize)], learnt, ctime, ..File::default() };
    file.attr()
}

/// Pages that were read in, of 4 cells.
fn filled() -> Pages {
    let mut pages = Pages::new(&attr(4, 1, 1), 0);
    pages.filled = true;
    pages
}

/// (It was taken for a cut: an answer with a time that the kernel never saw, which it threw away at the end of
/// the write, and went on with pages that another node had made old.)
#[test]
fn attributes_of_before_an_own_write_are_not_of_a_file_that_was_cut() {
    let mut pages = filled();
    let asked = pages.changes;
    let changed = attr(4, 2, 2);
    pages.change(6, 1000);
    pages.changed(1000);
    let verdict = pages.judge(&changed, For::Reading, asked, 1000);
    assert!(matches!(verdict, Verdict::Drop { .. }), "{verdict:?}");
}

/// (The largest size was remembered for as long as nobody read, and the same happened after a change of mode.)
#[test]
fn what_the_kernel_may_think_of_a_size_ends() {
    let later = 1000 + SETTLE_MS;
    let tells: [fn(&mut Pages, u64); 2] = [
        |pages, now| {
            pages.change(0, now);
            pages.changed(now);
        },
        |pages, now| pages.tell(&attr(3, 3, 3), now),
    ];
    for tell in tells {
        let mut pages = filled();
        // Another has cut it, and the kernel was told so.
        let cut = attr(2, 2, 2);
        assert_eq!(pages.judge(&cut, For::Reading, 0, 1000), Verdict::Renew);
        pages.tell(&cut, 1000);
        tell(&mut pages, later);
        let again = attr(3, 4, 4);
        let verdict = pages.judge(&again, For::Reading, pages.changes, later);
        assert!(matches!(verdict, Verdict::Drop { .. }), "{verdict:?}");
    }
}

/// How many histories; `CORBEL_SEEDS` says how many more.
const SEEDS: u64 = 300;

#[test]
fn a_read_finds_what_others_wrote_before_it_began() {
    let more = std::env::var("CORBEL_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 0..SEEDS + more.unwrap_or(0) {
        for cuts in [false, true] {
            history(seed, Policy::Ours, cuts).unwrap();
        }
    }
}

/// The judge objects to what is not enough.
#[test]
fn without_that_it_does_not() {
    for (policy, cuts) in [
        (Policy::Kernels, false),
        (Policy::Kernels, true),
        (Policy::NoStore, false),
        (Policy::NoWait, false),
        (Policy::Trusting, false),
    ] {
        let found = (0..SEEDS).find_map(|seed| history(seed, policy, cuts).err());
        assert!(found.is_some(), "{policy:?}, cuts {cuts}");
    }
}
