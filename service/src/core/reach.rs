//! The head puts inodes where the directories above them want them (`storage/src/volume/reach.rs` says what that means).
//!
//! What is to be done is in the tree, so a new head goes on with it; where it is in a directory is only known here. Each
//! step looks at some names, or asks for the write lease of one file: who has a lease on a file knows where its blocks lie.

use std::collections::{BTreeSet, VecDeque};

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Nanos};
use storage::format::control::LeaseMode;
use storage::format::entry::Op;
use storage::format::item::ReadClass;
use storage::volume::reach::Unplaced;

use super::lease::Want;
use super::{Failure, Node};

/// Asks for leases like a client: the service itself.
pub(super) const SERVICE: ClientId = ClientId(0);
/// After a round in which nothing could be placed (there is no room, somebody does not give a lease back): twice as
/// long after each, from the first to the second.
const REST: (Nanos, Nanos) = (50_000_000, 5_000_000_000);

/// So often a part may wait for a publication.
const WAITS: u32 = 1000;

/// How far the head is.
#[derive(Debug, Default)]
pub(super) struct Placing {
    /// The inode looked at last.
    after: InodeId,
    walk: Option<Walk>,
    /// Files whose leases were asked for.
    asked: BTreeSet<InodeId>,
    /// Those that it has.
    granted: VecDeque<InodeId>,
    /// The file that is being moved, under its lease.
    moving: Option<Moving>,
    /// Something was placed in this round.
    progress: bool,
    /// Nothing is tried before, unless there is something new.
    rest: Nanos,
    /// How long the rest was, and how many there were to place.
    last: (Nanos, u64),
}

/// The names of a directory.
#[derive(Clone, Copy, Debug)]
struct Walk {
    dir: InodeId,
    lets_in: ReadClass,
    cookie: u64,
}

/// A file whose blocks move: out of the way, and, when it has its new reach, to where they belong (see `parts`).
#[derive(Clone, Copy, Debug)]
struct Moving {
    ino: InodeId,
    /// The next part begins at this block.
    at: u64,
    placed: bool,
    /// How often the next part had to wait for a publication.
    waits: u32,
}

impl Node {
    /// Some of what is to be placed; `true` when there is more to do at once.
    pub(super) fn place_step(&mut self) -> Result<bool, Failure> {
        let may_place = self.may_place();
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        let count = self.volume.unplaced();
        let rests = self.env.now < head.placing.rest && head.placing.last.1 == count;
        if head.placing.moving.is_none() {
            let next = head.placing.granted.pop_front();
            head.placing.moving = next.map(|ino| Moving { ino, at: 0, placed: false, waits: 0 });
        }
        if let Some(moving) = head.placing.moving {
            return self.move_on(moving);
        }
        if count == 0 || rests || !may_place {
            return Ok(false);
        }
        if let Some(walk) = head.placing.walk {
            return self.walk_on(walk);
        }
        let Some((ino, what)) = self.volume.unplaced_after(head.placing.after)? else {
            let progress = std::mem::take(&mut head.placing.progress);
            head.placing.after = InodeId::NONE;
            let same = !progress && head.placing.last.1 == count;
            let rest = if same { (2 * head.placing.last.0).clamp(REST.0, REST.1) } else { 0 };
            (head.placing.last, head.placing.rest) = ((rest, count), self.env.now + rest);
            return Ok(!same);
        };
        head.placing.after = ino;
        match what {
            Unplaced::Directory => {
                let lets_in = self.volume.lets_in(ino)?.unwrap_or_default();
                head.placing.walk = Some(Walk { dir: ino, lets_in, cookie: 0 });
            }
            Unplaced::Reach(reach) => self.ask_for(ino, reach)?,
        }
        Ok(true)
    }

    /// Whether the head may put something into the stream, and knows of all leases.
    pub(super) fn may_place(&self) -> bool {
        let Some(head) = self.part.head() else { return false };
        let grants = head.ready && self.env.now >= self.view.grants_from;
        grants && !head.paused && self.ring.has_room()
    }

    /// The next names of a directory.
    fn walk_on(&mut self, walk: Walk) -> Result<bool, Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        let Walk { dir, lets_in, cookie } = walk;
        head.placing.walk = None;
        let (Some(now), Some(reach)) = (self.volume.lets_in(dir)?, self.volume.reach(dir)?) else {
            return Ok(true);
        };
        if now != lets_in {
            // It has changed again: all that was looked at must be looked at anew.
            head.placing.walk = Some(Walk { dir, lets_in: now, cookie: 0 });
            return Ok(true);
        }
        let (mut names, most) = (Vec::new(), self.env.config.join_step.max(1) as usize);
        let end = self.volume.readdir(dir, cookie, most, &mut |n| {
            names.push((n.ino, n.name == b"." || n.name == b"..", n.next));
            true
        })?;
        let (mut ops, mut at) = (Vec::new(), Vec::new());
        for (ino, is_dot, next) in &names {
            let op = if *is_dot { None } else { self.volume.placement(*ino, lets_in)? };
            ops.extend(op);
            at.push((ops.len(), *next));
        }
        if end == Some(true) {
            ops.push(Op::Place { ino: dir, reach, later: false });
        }
        let all = ops.len();
        let done = self.emit_some(ops)?;
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        head.placing.progress |= done > 0;
        if done == all && end == Some(true) {
            return Ok(true);
        }
        let cookie = at.iter().rev().find(|(n, _)| *n <= done).map_or(cookie, |(_, next)| *next);
        head.placing.walk = Some(Walk { cookie, ..walk });
        if done == 0 && all > 0 {
            // The tree has no room, not before something is published at least.
            head.placing.rest = self.env.now + REST.0;
            head.placing.last = (REST.0, self.volume.unplaced());
        }
        Ok(done > 0 || all == 0)
    }

    /// A file is to be placed: at once where that moves nothing, else when nobody has a lease on it.
    fn ask_for(&mut self, ino: InodeId, reach: ReadClass) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if !self.volume.placing_moves(ino, reach)? || planted(Bug::PlaceUnrecalled) {
            return self.place_now(ino, reach);
        }
        if !head.placing.asked.insert(ino) {
            return Ok(());
        }
        let want = Want::all(SERVICE, 0, LeaseMode::Write);
        let mut actions = Vec::new();
        head.leases.want(ino, want, &mut actions);
        self.act(actions)
    }

    /// Nobody else has a lease on the file now.
    pub(super) fn place_granted(&mut self, ino: InodeId) {
        let Some(head) = self.part.head_mut() else { return };
        head.placing.asked.remove(&ino);
        head.placing.granted.push_back(ino);
    }

    /// Goes on with a file: its blocks move in as many parts, one a turn, as one operation of a client would.
    fn move_on(&mut self, moving: Moving) -> Result<bool, Failure> {
        if !self.may_place() {
            // The ring has no room, or the node is no head any more: then nobody asks it for the lease.
            return Ok(false);
        }
        let Moving { ino, at, placed, .. } = moving;
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        head.placing.moving = None;
        let reach = match self.volume.unplaced_of(ino)? {
            Some(Unplaced::Reach(reach)) if !placed => reach,
            None if placed => ReadClass::World,
            // It is gone, or has been placed meanwhile.
            _ => return self.release_placed(ino).map(|()| true),
        };
        let Some((class, _)) = self.volume.file(ino)? else {
            return self.release_placed(ino).map(|()| true);
        };
        let class = if placed { class } else { ReadClass::Service };
        let to = self.volume.moved_end(
            ino,
            (at, u64::MAX),
            Some(class),
            self.env.config.limits.pieces,
        )?;
        let place = Op::Place { ino, reach, later: false };
        let (op, next) = match (placed, at, to) {
            (false, 0, u64::MAX) => (place, None),
            (false, u64::MAX, _) => (place, Some(Moving { at: 0, placed: true, ..moving })),
            (true, _, u64::MAX) => (Op::Move { ino, from: at, to, out: false }, None),
            (_, _, to) => {
                let part = Op::Move { ino, from: at, to, out: !placed };
                (part, Some(Moving { at: to, ..moving }))
            }
        };
        let done = self.emit_some(vec![op])?;
        let Some(head) = self.part.head_mut() else { return Ok(false) };
        head.placing.progress |= done > 0;
        if done == 0 && self.member.publish_now && moving.waits < WAITS {
            // Blocks or pages are free when what was done before is published.
            head.placing.moving = Some(Moving { waits: moving.waits + 1, ..moving });
            return Ok(self.member.job.is_none());
        }
        match next {
            Some(next) if done > 0 => head.placing.moving = Some(Moving { waits: 0, ..next }),
            // There is no room: it is tried again.
            _ => self.release_placed(ino)?,
        }
        Ok(true)
    }

    fn release_placed(&mut self, ino: InodeId) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let mut actions = Vec::new();
        head.leases.released(SERVICE, ino, &mut actions);
        self.act(actions)
    }

    fn place_now(&mut self, ino: InodeId, reach: ReadClass) -> Result<(), Failure> {
        let done = self.emit_some(vec![Op::Place { ino, reach, later: false }])?;
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.placing.progress |= done > 0;
        Ok(())
    }
}
