//! A rotten block is mended from another member.
//!
//! The others are asked for it one after the other, by inode and block of the file, for blocks lie elsewhere on each. All of them once is a
//! *round*. What one sends is *proved* if it is what the checksum here says, whatever has happened to the file in between: then it
//! is taken at once. Where that cannot be (the checksum is the rotten one, or a part of the block was written since), it may be the
//! *same* block: no operation behind the published state that the sender had changes it, and what is published here is as new as
//! that. Nothing says that the sender has it right, though, and another one may have what is proved. So it is taken when a
//! round has ended in which every member said something, nobody had a proved one, and all that had the same block had the same bytes.
//!
//! A block is lost when every member said in one round that it does not have it, or when they have different ones. Who does not answer, or cannot say now
//! (what he has is on its way to the medium, or is of another state), has not said that: he is asked again in the next round. All of it
//! begins anew with a new view, and when a member is back. A block counts as mended when it was read again.

use std::collections::{BTreeMap, BTreeSet};

use base::planted::{Bug, planted};
use base::{InodeId, Nanos, NodeId, StreamSeq, crc32c};
use storage::check::Touched;
use storage::format::entry::Op;
use storage::format::sum::Sum;
use storage::limits::BLOCK_BYTES;
use storage::volume::Place;

use super::message::Message;
use super::{Failure, Node};

/// A member that was asked for a block and does not answer is not waited for longer in this round; nor is what came of a state that
/// is not here.
const PATIENCE: Nanos = 500_000_000;
/// The next round begins after this time, or after the longer one if nobody has the block.
const PAUSE: (Nanos, Nanos) = (10_000_000, 1_000_000_000);
/// Who reads the block waits no longer for members that do not say whether they have it.
const BEARABLE: Nanos = 30_000_000_000;
/// Blocks in the middle of a round at once.
const ASKED: usize = 64;
/// Rotten blocks remembered; more are found again by the next pass.
const ROTTEN_MAX: usize = 65_536;

/// What a member says of a block that it was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Answer {
    /// It has no such block.
    None = 0,
    /// This one.
    Right = 1,
    /// What it has is rotten as well.
    Rotten = 2,
    /// It cannot say now: what it has is on its way to the medium.
    Later = 3,
}

impl Answer {
    /// From its number in a message.
    pub const fn from_u8(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::None),
            1 => Some(Self::Right),
            2 => Some(Self::Rotten),
            3 => Some(Self::Later),
            _ => None,
        }
    }
}

/// A block of a file.
type Key = (InodeId, u64);

/// A block that came.
#[derive(Clone, Debug)]
struct Came {
    from: NodeId,
    /// What was published there; 0: only a checksum says that it is right.
    seq: StreamSeq,
    bytes: Vec<u8>,
    /// Until then it may become clear that it is the same block.
    until: Nanos,
}

/// A block that is not what it should be.
#[derive(Clone, Debug, Default)]
struct Rotten {
    /// It is looked at then.
    due: Nanos,
    /// It is known since then, or since the members were others.
    since: Nanos,
    /// Who is asked.
    asked: Option<NodeId>,
    /// Who was asked in this round, and whether he said something.
    round: Vec<(NodeId, bool)>,
    /// The last operation that may have changed it.
    touched: StreamSeq,
    /// Where it lies in the published state.
    place: Option<Place>,
    /// What came, and could not be judged.
    came: Option<Came>,
    /// The same block as others have it, and of which published state.
    same: Option<(StreamSeq, Vec<u8>)>,
    /// Others have it differently.
    differ: bool,
    /// Rounds in which not everybody said something.
    rounds: u32,
    /// Nobody has it.
    lost: bool,
}

impl Rotten {
    /// Whether something of a round is kept: so many there are at a time.
    const fn is_busy(&self) -> bool {
        self.asked.is_some() || self.came.is_some() || self.same.is_some()
    }

    /// All of it once more.
    fn begin_anew(&mut self, now: Nanos) {
        (self.asked, self.came, self.same) = (None, None, None);
        (self.differ, self.lost, self.since, self.due) = (false, false, now, now);
        self.rounds = 0;
        self.round.clear();
    }

    /// What a member said, or that it said nothing.
    fn note(&mut self, node: NodeId, said: bool) {
        self.round.push((node, said));
    }
}

/// All that is rotten, by when it is looked at.
#[derive(Debug, Default)]
pub(super) struct Healing {
    of: BTreeMap<Key, Rotten>,
    busy: BTreeSet<(Nanos, Key)>,
    idle: BTreeSet<(Nanos, Key)>,
}

impl Healing {
    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    /// Blocks that no member has.
    pub(super) fn lost(&self) -> usize {
        self.of.values().filter(|rotten| rotten.lost).count()
    }

    fn take(&mut self, key: Key) -> Option<Rotten> {
        let rotten = self.of.remove(&key)?;
        let set = if rotten.is_busy() { &mut self.busy } else { &mut self.idle };
        set.remove(&(rotten.due, key));
        Some(rotten)
    }

    fn put(&mut self, key: Key, rotten: Rotten) {
        let set = if rotten.is_busy() { &mut self.busy } else { &mut self.idle };
        set.insert((rotten.due, key));
        self.of.insert(key, rotten);
    }

    /// Which is looked at next, and when.
    fn next(&self) -> Option<(Nanos, Key)> {
        let idle = self.idle.first().filter(|_| self.busy.len() < ASKED);
        self.busy.first().into_iter().chain(idle).min().copied()
    }

    /// When there is something to do.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.next().map(|(due, _)| due)
    }

    /// Everybody is asked anew about those of the blocks.
    fn begin_anew(&mut self, now: Nanos, which: impl Fn(&Rotten) -> bool) {
        let keys: Vec<_> = self.of.iter().filter(|(_, r)| which(r)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(mut rotten) = self.take(key) {
                rotten.begin_anew(now);
                self.put(key, rotten);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Node {
    /// A block is not what its checksum says: rotten, or on its way to the medium.
    pub(super) fn suspect(&mut self, place: &Place) {
        if let Some(seq) = self.unpublished(place.ino) {
            self.look_again_after(place, seq);
            return;
        }
        let key = (place.ino, place.file);
        let healing = &self.scrub.healing;
        if healing.of.contains_key(&key) || healing.len() >= ROTTEN_MAX {
            return;
        }
        self.env.counters.rotten += 1;
        if self.env.counters.rotten.is_power_of_two() {
            log::warn!(
                "block {} of inode {} is rotten (arena {}, block {}); {} so far",
                place.file,
                place.ino,
                place.arena,
                place.block,
                self.env.counters.rotten
            );
        }
        // Before that anything may have.
        let (touched, now) = (self.member.published, self.env.now);
        let place = Some(*place);
        let rotten = Rotten { touched, place, since: now, due: now, ..Rotten::default() };
        self.scrub.healing.put(key, rotten);
    }

    /// These blocks were found rotten while they were read for a node that joins.
    pub(super) fn suspect_all(&mut self, wrong: &[Place]) {
        wrong.iter().for_each(|place| self.suspect(place));
    }

    /// An operation of that chunk is applied: blocks that it may change are not what others had before.
    pub(super) fn rotten_touched(&mut self, op: &Op<'_>, seq: StreamSeq) {
        if self.scrub.healing.of.is_empty() {
            return;
        }
        for touched in Touched::by(op) {
            let blocks = (touched.ino, touched.from)..(touched.ino, touched.to);
            let of = &mut self.scrub.healing.of;
            of.range_mut(blocks).for_each(|(_, rotten)| rotten.touched = seq);
        }
    }

    /// The members are others: what was asked is not answered any more, and others may have what is lost.
    pub(super) fn heal_in_new_view(&mut self) {
        self.scrub.healing.begin_anew(self.env.now, |_| true);
    }

    /// A member is back: it may have what is lost.
    pub(super) fn heal_with_peer(&mut self) {
        self.scrub.healing.begin_anew(self.env.now, |rotten| rotten.lost);
    }

    /// Whether nobody has one of these blocks, or nobody has said for too long.
    pub(super) fn is_lost(&self, wrong: &[Place]) -> bool {
        let lost = |place: &Place| {
            let rotten = self.scrub.healing.of.get(&(place.ino, place.file));
            // Nobody is asked for what is not remembered.
            let full = self.scrub.healing.len() >= ROTTEN_MAX;
            let never = full && self.unpublished(place.ino).is_none();
            rotten.map_or(never, |r| r.lost || self.env.now >= r.since.saturating_add(BEARABLE))
        };
        wrong.iter().any(lost)
    }

    /// Goes on with what is rotten, as far as it is due.
    pub(super) fn mend_step(&mut self) -> Result<(), Failure> {
        for _ in 0..ASKED {
            let Some((due, key)) = self.scrub.healing.next() else { break };
            if due > self.env.now {
                break;
            }
            self.mend_on(key)?;
        }
        Ok(())
    }

    fn mend_on(&mut self, key: Key) -> Result<(), Failure> {
        let Some(mut rotten) = self.scrub.healing.take(key) else { return Ok(()) };
        if let Some(came) = rotten.came.take() {
            return self.judge(key, rotten, came);
        }
        if let Some(silent) = rotten.asked.take() {
            rotten.note(silent, false);
        }
        match self.volume.place_of(key.0, key.1)? {
            // Removed meanwhile.
            None => return Ok(()),
            // On its way to another place, which holds nothing yet.
            Some(place) if rotten.place != Some(place) && self.unpublished(key.0).is_some() => {
                rotten.due = self.env.now + PAUSE.0;
                self.scrub.healing.put(key, rotten);
                return Ok(());
            }
            Some(place) => {
                rotten.place = Some(place);
                let (bytes, sum) = self.volume.block_at(&place)?;
                if sum.is_known() && sum.is_of(&bytes) {
                    // Written anew meanwhile.
                    return Ok(());
                }
            }
        }
        self.ask_next(key, rotten)
    }

    /// Asks the next member, or ends the round.
    fn ask_next(&mut self, key: Key, mut rotten: Rotten) -> Result<(), Failure> {
        let (me, now) = (self.me(), self.env.now);
        let others = self.view.chain.iter().copied().filter(|node| *node != me);
        let asked = |node: &NodeId| rotten.round.iter().any(|(n, _)| n == node);
        let Some(node) = others.clone().find(|node| !asked(node)) else {
            let all = others.clone().all(|node| rotten.round.contains(&(node, true)));
            return self.end_round(key, rotten, all || planted(Bug::LostWhenSilent));
        };
        (rotten.asked, rotten.due) = (Some(node), now + PATIENCE);
        self.scrub.healing.put(key, rotten);
        self.send(node, Message::BlockWant { ino: key.0, block: key.1 });
        Ok(())
    }

    /// Everybody was asked, and nobody has what is proved. `all`: everybody said something.
    fn end_round(&mut self, key: Key, mut rotten: Rotten, all: bool) -> Result<(), Failure> {
        rotten.round.clear();
        let differ = std::mem::take(&mut rotten.differ);
        let same = rotten.same.take();
        let none = differ || same.is_none();
        // (What was written since, nobody was asked for.)
        let same = same.filter(|(seq, _)| all && !differ && rotten.touched <= *seq);
        if let Some((_, bytes)) = same {
            return match self.place_to_mend(key, &mut rotten)? {
                Mends::Over => Ok(()),
                Mends::At(place, _) => self.write_over(key, rotten, place, &bytes),
                Mends::Later => {
                    rotten.due = self.env.now + PAUSE.0;
                    self.scrub.healing.put(key, rotten);
                    Ok(())
                }
            };
        }
        let lost = all && none;
        if lost && !rotten.lost {
            let why =
                if differ { "the others have different ones" } else { "no other member has it" };
            log::error!("block {} of inode {} is rotten, and {why}", key.1, key.0);
        }
        rotten.lost = lost;
        // Who said nothing is asked again soon, and then less and less often: a member without checksums never says anything.
        let pause = PAUSE.0.saturating_mul(1 << rotten.rounds.min(16));
        rotten.due = self.env.now + if lost { PAUSE.1 } else { pause.min(PAUSE.1) };
        rotten.rounds = if lost { 0 } else { rotten.rounds.saturating_add(1) };
        self.scrub.healing.put(key, rotten);
        Ok(())
    }

    /// Another member asks for a block.
    pub(super) fn block_wanted(
        &mut self,
        from: NodeId,
        ino: InodeId,
        block: u64,
    ) -> Result<(), Failure> {
        // Where operations on the file wait, its blocks may be others than those that are published: what lies there is right
        // if it is what the other's checksum says, and not because of its position.
        let waits = self.unpublished(ino).is_some() || self.volume.is_unpublished_snapshot(ino);
        let seq = if waits { StreamSeq(0) } else { self.member.published };
        let (answer, bytes) = match self.volume.place_of(ino, block)? {
            _ if !self.keeps_volume() => (Answer::Later, Vec::new()),
            None if waits => (Answer::Later, Vec::new()),
            None => (Answer::None, Vec::new()),
            Some(place) if self.is_being_copied(&place) => (Answer::Later, Vec::new()),
            Some(place) => {
                let (found, sum) = self.volume.block_at(&place)?;
                let has_sums = self.volume.sums_base().is_some();
                if !has_sums || sum.is_known() && sum.is_of(&found) {
                    (Answer::Right, found)
                } else {
                    self.suspect(&place);
                    (if waits { Answer::Later } else { Answer::Rotten }, Vec::new())
                }
            }
        };
        // Without checksums nothing here says that it is right.
        let proof = self.volume.sums_base().is_some() || answer != Answer::Right;
        let seq = if proof { seq } else { StreamSeq(0) };
        self.send(from, Message::Block { ino, block, seq, answer, bytes });
        Ok(())
    }

    /// What a member says of a block that it was asked for.
    pub(super) fn block_arrived(
        &mut self,
        from: NodeId,
        key: Key,
        seq: StreamSeq,
        answer: Answer,
        bytes: Vec<u8>,
    ) -> Result<(), Failure> {
        let healing = &mut self.scrub.healing;
        if healing.of.get(&key).is_none_or(|rotten| rotten.asked != Some(from)) {
            return Ok(());
        }
        let Some(mut rotten) = healing.take(key) else { return Ok(()) };
        rotten.asked = None;
        let right = answer == Answer::Right;
        if right && bytes.len() as u64 == BLOCK_BYTES {
            let until = self.env.now.saturating_add(PATIENCE);
            return self.judge(key, rotten, Came { from, seq, bytes, until });
        }
        self.env.counters.bad_messages += u64::from(right);
        // Who is of another state has not said anything of this one.
        let said = match answer {
            Answer::Rotten => true,
            Answer::None => seq.0 > 0 && rotten.touched <= seq && seq <= self.member.published,
            Answer::Right | Answer::Later => false,
        };
        rotten.note(from, said);
        self.ask_next(key, rotten)
    }

    /// What is to be done with what came.
    fn judge(&mut self, key: Key, mut rotten: Rotten, came: Came) -> Result<(), Failure> {
        let (now, published) = (self.env.now, self.member.published);
        let newer = came.seq.0 > 0 && rotten.touched <= came.seq;
        let mends = self.place_to_mend(key, &mut rotten)?;
        let (place, proved) = match mends {
            Mends::Over => return Ok(()),
            Mends::At(place, sum) => {
                let proved = sum.is_known() && sum.is_of(&came.bytes);
                (Some(place), proved || planted(Bug::HealUnproved))
            }
            Mends::Later => (None, false),
        };
        let same = newer && came.seq <= published;
        match place {
            Some(place) if proved || same && planted(Bug::HealAtOnce) => {
                return self.write_over(key, rotten, place, &came.bytes);
            }
            Some(_) if same => {
                let Came { from, seq, bytes, .. } = came;
                let kept = rotten.same.take().filter(|(seq, _)| rotten.touched <= *seq);
                rotten.differ |= kept.as_ref().is_some_and(|(_, kept)| *kept != bytes);
                rotten.same = Some((kept.map_or(seq, |kept| kept.0.min(seq)), bytes));
                rotten.note(from, true);
            }
            // Soon: what it waits for is under way.
            _ if (place.is_none() || newer) && now < came.until => {
                (rotten.came, rotten.due) = (Some(came), now + PAUSE.0);
                self.scrub.healing.put(key, rotten);
                return Ok(());
            }
            _ => rotten.note(came.from, false),
        }
        self.ask_next(key, rotten)
    }

    /// Where a block is to be mended.
    fn place_to_mend(&mut self, key: Key, rotten: &mut Rotten) -> Result<Mends, Failure> {
        let Some(place) = self.volume.place_of(key.0, key.1)? else { return Ok(Mends::Over) };
        let (held, sum) = self.volume.block_at(&place)?;
        let right = sum.is_known() && sum.is_of(&held);
        let moves = rotten.place != Some(place) && self.unpublished(key.0).is_some();
        if !moves {
            rotten.place = Some(place);
        }
        Ok(match moves || self.is_being_copied(&place) {
            true => Mends::Later,
            false if right => Mends::Over,
            false => Mends::At(place, sum),
        })
    }

    /// Writes what the block should be over what it is.
    fn write_over(
        &mut self,
        key: Key,
        mut rotten: Rotten,
        place: Place,
        bytes: &[u8],
    ) -> Result<(), Failure> {
        let (_, sum) = self.volume.block_at(&place)?;
        let sum = match sum.is_known() && sum.is_of(bytes) {
            true => sum,
            false => Sum::new(crc32c(0, bytes), self.member.published),
        };
        self.volume.mend(&place, bytes, sum)?;
        let (held, sum) = self.volume.block_at(&place)?;
        if (held != bytes || !sum.is_of(&held)) && !planted(Bug::HealUnread) {
            rotten.begin_anew(self.env.now);
            rotten.due = self.env.now + PAUSE.1;
            self.scrub.healing.put(key, rotten);
            return self.medium_fails(&format!("block {} of arena {}", place.block, place.arena));
        }
        self.env.counters.mended += 1;
        if self.env.counters.mended.is_power_of_two() {
            log::info!(
                "block {} of inode {} is mended; {} so far",
                key.1,
                key.0,
                self.env.counters.mended
            );
        }
        Ok(())
    }
}

/// Whether a block can be mended now.
enum Mends {
    /// It is right, or there is no such block any more.
    Over,
    /// There, with the checksum that it has.
    At(Place, Sum),
    /// It is being written, or goes to another place.
    Later,
}
