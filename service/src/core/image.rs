//! What a joining node is sent where the volume has snapshots: all of them, state after state (`storage::volume::image`), and no
//! description by operations, so that what snapshots share is shared there as well.
//!
//! The state that the node goes on from is a snapshot too, which the head makes for it by an operation in the stream, under a
//! name that nobody else may use: so nothing that is read changes while it is read, whatever becomes of the files. It is
//! given up when all is sent.
//!
//! A piece is a message of *parts* (`part`). Content that the node may have from before is offered by its checksums, as with a snapshot
//! (`offer`), and told by where it lies instead of by its file. What was offered of a state is answered, and what the node lacks sent, before that
//! state ends: it may be given up behind that. (Who takes it: `arrive`.)

mod arrive;
mod part;

use std::collections::{BTreeMap, VecDeque};

use base::planted::{Bug, planted};
use base::{InodeId, NodeId};
use storage::format::entry::Op;
use storage::format::item::{Run, Snapshot, kind};
use storage::format::page::Key;
use storage::limits::BLOCK_BYTES;
use storage::volume::image::{ImageEnd, SentBlocks};
use storage::volume::{Blocks, Place, Volume, joins};

use super::history::Claim;
use super::message::Message;
use super::offer::{Asked, COMPARED, OFFERED_A_TURN, Offers};
use super::snapshot::{MENDING, Outgoing, PASSES, PIECE, Start};
use super::{Failure, Node};

pub use part::{Has, Part};

/// Blocks in one part.
const BLOCKS: u64 = 32;
/// Leaves compared in one step.
const LEAVES: usize = 64;
/// Runs that were offered before all that was answered.
const OFFERED_MAX: usize = 4096;

/// An image on its way.
#[derive(Debug)]
pub(super) struct Image {
    /// Of the snapshot that was made for it.
    name: Vec<u8>,
    /// What is sent, from the oldest on.
    states: VecDeque<(u64, Snapshot)>,
    /// The state before, by its slot and its name.
    before: Option<(u16, Vec<u8>)>,
    /// The next item of the first of `states`. None: its items are sent.
    key: Option<Key>,
    /// Content that is still to be sent, with the file that it is of.
    blocks: VecDeque<(InodeId, Run)>,
    sent: SentBlocks,
    end: ImageEnd,
    /// Inodes told of.
    pub(super) passed: u64,
    /// Nothing was sent yet.
    begins: bool,
    /// Content of the first of `states` that was offered, by arena and block: where in which file of the snapshot it is.
    offered: BTreeMap<(u32, u64), (InodeId, Run)>,
    /// Behind which transaction all snapshots are of later states than the node has. None: that is not known.
    behind: Option<u64>,
    /// Content that the node lacks.
    lacking: VecDeque<(InodeId, Run)>,
    /// Nothing can be done before the node has answered.
    awaits: bool,
}

/// What a step came to.
enum Stepped {
    More,
    Done,
    /// Content is rotten, and is being mended.
    Waits,
    /// The node has to answer first.
    Awaits,
    /// Some of what it is of is not there any more.
    Void,
}

/// What a piece does beside its bytes.
#[derive(Debug, Default)]
struct Turn {
    /// It waits for an answer.
    asks: bool,
    /// Blocks that were offered, and that were compared.
    offered: u64,
    compared: u64,
}

impl Image {
    /// Whether nothing can be done for it before the node has answered.
    pub(super) fn waits(&self, offers: &Offers) -> bool {
        self.awaits && offers.asked.is_empty() && !offers.are_settled()
    }

    /// Some of the content that is to be sent.
    fn send(&mut self, volume: &Volume, out: &mut Vec<u8>) -> Result<Stepped, Failure> {
        let Some((ino, run)) = self.lacking.front() else { return Ok(Stepped::More) };
        let part = run.cut(run.file, run.file + BLOCKS);
        let Some(bytes) = volume.blocks_at(Blocks::of(&part))? else { return Ok(Stepped::Waits) };
        Part::Blocks { arena: part.arena, block: part.block, bytes: &bytes }.encode(out);
        let (ino, rest) = (*ino, run.cut(part.end(), run.end()));
        self.lacking.pop_front();
        if rest.len > 0 {
            self.lacking.push_front((ino, rest));
        }
        Ok(Stepped::More)
    }

    /// Offers some of the content that is next, where that may be of use.
    fn offer(
        &mut self,
        volume: &mut Volume,
        offers: &Offers,
        (turn, out): (&mut Turn, &mut Vec<u8>),
    ) -> Result<(), Failure> {
        let Some((number, snapshot)) = self.states.front() else { return Ok(()) };
        for (_, state) in [self.states.back(), self.states.front()].into_iter().flatten() {
            volume.read_snapshot(state.slot);
        }
        let Some((ino, run)) = self.blocks.pop_front() else { return Ok(()) };
        let within = ino.in_snapshot(snapshot.slot);
        let mut part = run.cut(run.file, run.file + offers.blocks.max(BLOCKS));
        let mut known = Has::Maybe;
        if let (Some(since), Some(state)) = (&offers.since, volume.opened(snapshot.slot)) {
            let then = volume.snapshot_transaction(*number);
            let of_later = then.is_some_and(|then| self.behind.is_some_and(|at| then > at));
            // What it shows may have changed before the state that the node has, which has the snapshot as well, if that is not of a later
            // one; or, if it has not published it, what files have still.
            let last = self.states.back().and_then(|(_, last)| volume.opened(last.slot));
            let unpublished = then.is_some_and(|then| then > since.transaction);
            let (kept_in, otherwise) = if of_later || planted(Bug::ImageBetween) {
                (Some(state), Has::Maybe)
            } else {
                (last.filter(|_| unpublished), Has::Then)
            };
            known = otherwise;
            if let Some(kept_in) = kept_in {
                let (same, count) = kept_in.kept_since(ino, &part, since)?;
                part = part.cut(part.file, part.file + count);
                known = if same { Has::Last } else { otherwise };
            }
        }
        let crcs =
            if offers.blocks > 0 { volume.crcs(part.arena, part.block, part.len)? } else { None };
        match crcs {
            Some(crcs) => {
                let Run { file, arena, block, .. } = part;
                Part::Offered { known, number: *number, ino, file, arena, block, crcs }.encode(out);
                (turn.asks, turn.offered) = (true, turn.offered + part.len);
                self.offered.insert((arena, block), (within, part));
            }
            None => self.lacking.push_back((within, part)),
        }
        let rest = run.cut(part.end(), run.end());
        if rest.len > 0 {
            self.blocks.push_front((ino, rest));
        }
        Ok(())
    }

    /// What was offered of these blocks. (Whoever answers may name anything.)
    fn offered_at(&self, part: &super::offer::Part) -> Option<(InodeId, Run)> {
        let (arena, first) = (u32::try_from(part.ino.0).ok()?, part.first);
        let (_, (ino, run)) = self.offered.range(..=(arena, first)).next_back()?;
        let file = run.file.checked_add(first.checked_sub(run.block)?)?;
        let end = file.checked_add(part.count.into()).filter(|end| *end <= run.end());
        Some((*ino, run.cut(file, end?))).filter(|(_, run)| run.arena == arena && run.len > 0)
    }

    /// Does what the node has answered.
    fn answered(
        &mut self,
        volume: &Volume,
        (asked, offers): (Asked, &Offers),
        (turn, out): (&mut Turn, &mut Vec<u8>),
    ) -> Result<(), Failure> {
        match asked {
            Asked::Lack(part) => self.lacking.extend(self.offered_at(&part)),
            Asked::Doubt(doubt) => {
                let Some((ino, run)) = self.offered_at(&doubt.part) else { return Ok(()) };
                turn.compared += run.len;
                let same = volume.keyed_of(&[run], offers.id)? == doubt.keyed;
                if same || planted(Bug::ImageUncompared) {
                    let Run { arena, block, .. } = run;
                    Part::Same { arena, block, count: doubt.part.count }.encode(out);
                    turn.asks = true;
                } else {
                    self.lacking.push_back((ino, run));
                }
            }
        }
        Ok(())
    }

    fn step(
        &mut self,
        volume: &mut Volume,
        offers: &mut Offers,
        (turn, out): (&mut Turn, &mut Vec<u8>),
    ) -> Result<Stepped, Failure> {
        self.awaits = false;
        if std::mem::take(&mut self.begins) && offers.blocks > 0 {
            Part::Key(offers.id).encode(out);
        }
        if !self.lacking.is_empty() {
            return self.send(volume, out);
        }
        if let Some(asked) = offers.asked.pop_front() {
            return self.answered(volume, (asked, offers), (turn, out)).map(|()| Stepped::More);
        }
        // (Nothing that was offered is asked for any more. What a piece asks is told of when that is made.)
        let settled = offers.are_settled() && !turn.asks || planted(Bug::ImageUnsettled);
        if settled {
            self.offered.clear();
        }
        let Some((number, snapshot)) = self.states.front() else { return Ok(Stepped::Done) };
        if !self.blocks.is_empty() {
            if self.offered.len() >= OFFERED_MAX {
                self.awaits = true;
                return Ok(Stepped::Awaits);
            }
            return self.offer(volume, offers, (turn, out)).map(|()| Stepped::More);
        }
        let Some(key) = self.key else {
            if !settled {
                // As long as it may be asked for, what the state has must stay.
                self.awaits = true;
                return Ok(Stepped::Awaits);
            }
            Part::State(*number, snapshot.clone()).encode(out);
            self.before = Some((snapshot.slot, snapshot.name.clone()));
            self.states.pop_front();
            self.key = Some(Key::MIN);
            if self.states.is_empty() {
                Part::End(self.end).encode(out);
                return Ok(Stepped::Done);
            }
            return Ok(Stepped::More);
        };
        let bounds = (PIECE / 4, LEAVES);
        let before = self.before.as_ref().map(|(slot, _)| *slot);
        let changes = volume.snapshot_changes(before, snapshot.slot, key, bounds)?;
        let Some((changes, next)) = changes else { return Ok(Stepped::Void) };
        self.key = next;
        for (key, value) in changes {
            self.passed += u64::from(key.kind == kind::ATTR && self.before.is_none());
            Part::Item(key, value.as_deref()).encode(out);
            if let Some(value) = value.filter(|_| key.kind == kind::EXTENT) {
                let run = Run::decode(key.item, &value).map_err(|corrupt| {
                    Failure::Volume(storage::volume::Fault::Item { ino: key.ino, corrupt })
                })?;
                for blocks in self.sent.new_of(&run) {
                    let file = run.file + (blocks.block - run.block);
                    let part = run.cut(file, file + blocks.len);
                    self.blocks.push_back((InodeId(key.ino), part));
                }
            }
        }
        Ok(Stepped::More)
    }

    /// Whether the snapshot with that name is still read.
    pub(super) fn reads(&self, name: &[u8]) -> bool {
        let mut names = self.states.iter().map(|(_, state)| &state.name);
        names.any(|other| other == name) || self.before.as_ref().is_some_and(|(_, n)| n == name)
    }

    /// What is to be mended before the next content can be sent.
    fn rotten(&self, volume: &Volume) -> Result<Vec<Place>, Failure> {
        let Some((ino, run)) = self.lacking.front() else { return Ok(Vec::new()) };
        let part = run.cut(run.file, run.file + BLOCKS);
        let mut wrong = Vec::new();
        volume.compare(*ino, &part, &mut wrong)?;
        Ok(wrong)
    }
}

impl Node {
    /// Nodes that are to be sent an image, and those that have been: the snapshots that are made for that come and go. `true`: something was done.
    pub(super) fn images_step(&mut self) -> Result<bool, Failure> {
        let Some(head) = self.part.head() else { return Ok(false) };
        let wanted = head.images_wanted.first_key_value().map(|(node, claim)| (*node, *claim));
        let used = |name: &[u8]| {
            let mut images = head.snapshots.values().filter_map(|going| going.image.as_ref());
            images.any(|image| image.name == name)
        };
        let over = self.volume.join_snapshots().find(|name| !used(name)).map(<[u8]>::to_vec);
        if (wanted.is_none() && over.is_none()) || !self.may_place() {
            return Ok(false);
        }
        if let Some(name) = over {
            let op = Op::DropSnapshot { ino: InodeId::ROOT, name: &name };
            return Ok(self.emit_some(vec![op])? > 0);
        }
        let Some((node, claim)) = wanted else { return Ok(false) };
        self.begin_image(node, claim).map(|()| true)
    }

    fn begin_image(&mut self, node: NodeId, claim: Option<Claim>) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        head.images_wanted.remove(&node);
        if !self.view.syncing.contains(&node) {
            return Ok(());
        }
        let name = joins::name(node, self.ring.last());
        let op = Op::Snapshot { ino: InodeId::ROOT, name: &name };
        if !planted(Bug::ImageUnfrozen) && self.emit_some(vec![op])? == 0 {
            // There is no room for it: the node asks again.
            log::warn!(
                "node {node} cannot be sent the volume with its snapshots: there is no room to make one more"
            );
            return Ok(());
        }
        self.env.counters.snapshots += 1;
        // All of it is on the medium before it is read.
        self.publish_all()?;
        // What is made for others goes when it has served them.
        let others = |other: &[u8]| joins::is_one(other) && other != name;
        let mut states = self.volume.snapshots(0, usize::MAX);
        states.retain(|stat| !others(&stat.snapshot.name));
        let states = states.into_iter().map(|stat| (stat.number, stat.snapshot)).collect();
        let (key, end) = (Some(Key::MIN), self.volume.image_end());
        let image = Image {
            name,
            states,
            before: None,
            key,
            blocks: VecDeque::new(),
            sent: SentBlocks::default(),
            end,
            passed: 0,
            begins: true,
            offered: BTreeMap::new(),
            behind: claim.and_then(|claim| self.member.history.with(claim.last)),
            lacking: VecDeque::new(),
            awaits: false,
        };
        let (seq, now) = (self.member.applied, self.env.now);
        let blocks = if claim.is_some() { self.env.config.limits.offer_blocks } else { 0 };
        let since = claim.filter(|_| blocks > 0).and_then(|claim| self.since(claim));
        log::info!("node {node} joins at stream position {seq}, with all snapshots");
        match &since {
            Some(since) => {
                log::info!("node {node} has what was published up to {}", since.position);
            }
            None => log::info!(
                "node {node}: all that it may have is compared, since when it was so is not known"
            ),
        }
        let offers = Offers::new(blocks, since, self.env.random.next_u64());
        let inodes = self.volume.root().inodes;
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let process = head.joining.get(&node).copied().unwrap_or(0);
        // (Who has nothing is sent all of it again.)
        let waited_for = head.begin_pass(node, process) >= PASSES || claim.is_none();
        let start = Start { seq, waited_for, behind: false };
        head.snapshots.insert(node, Outgoing::new(start, (None, Some(image)), offers, inodes, now));
        Ok(())
    }

    /// Makes and sends the next piece of an image; the image, if there is more of it.
    pub(super) fn image_piece(
        &mut self,
        node: NodeId,
        going: &mut Outgoing,
        mut image: Box<Image>,
    ) -> Result<Option<Box<Image>>, Failure> {
        let (mut raw, mut end, mut left) = (Vec::new(), false, self.env.config.join_step.max(1));
        let mut turn = Turn::default();
        while raw.len() < PIECE
            && left > 0
            && turn.offered < OFFERED_A_TURN
            && turn.compared < COMPARED
        {
            left = left.saturating_sub(16);
            match image.step(&mut self.volume, &mut going.offers, (&mut turn, &mut raw))? {
                Stepped::More => {}
                Stepped::Awaits => break,
                Stepped::Done => {
                    end = true;
                    break;
                }
                Stepped::Waits => {
                    let wrong = image.rotten(&self.volume)?;
                    self.suspect_all(&wrong);
                    if self.is_lost(&wrong) {
                        let names = image.states.front().map(|(_, state)| &state.name[..]);
                        log::error!(
                            "node {node} cannot be sent the volume with its snapshots: no member has block {} of inode {} of snapshot {} as it \
                             should be; remove the file, or the snapshot, that has it",
                            wrong[0].file,
                            wrong[0].ino.of_snapshot().map_or(wrong[0].ino, |(_, ino)| ino),
                            names.unwrap_or_default().escape_ascii()
                        );
                        return Ok(None);
                    }
                    going.pause = self.env.now + MENDING;
                    break;
                }
                // It asks again when nothing comes.
                Stepped::Void => return Ok(None),
            }
        }
        if raw.is_empty() {
            return Ok(Some(image));
        }
        going.note_sent(raw.len() as u64, image.passed, end);
        let rate = self.env.config.limits.join_rate;
        if rate > 0 {
            // What is compared costs memory's time here, and nothing on the link.
            let compared = turn.compared.max(turn.offered) * BLOCK_BYTES / 64;
            let nanos = u128::from(raw.len() as u64 + compared) * 1_000_000_000 / u128::from(rate);
            going.pause = going.pause.max(self.env.now.saturating_add(nanos as u64));
        }
        let (seq, piece, last_inode) = (going.start.seq, going.next(), self.volume.last_inode());
        if turn.asks {
            going.offers.made(piece);
        }
        let (view, now) = (&self.view, self.env.now);
        let waits =
            self.part.head().is_some_and(|h| h.keeping.waits_for_others_than(node, view, now));
        self.send(node, Message::Image { seq, piece, last_inode, end, waits, raw });
        Ok((!end).then_some(image))
    }
}
