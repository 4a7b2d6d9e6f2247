//! What a joining node is sent where the volume has snapshots: all of them, state after state (`storage::volume::image`), and no
//! description by operations, so that what snapshots share is shared there as well.
//!
//! The state that the node goes on from is a snapshot too, which the head makes for it by an operation in the stream, under a
//! name that nobody else may use: so nothing that is read changes while it is read, whatever becomes of the files. It is
//! given up when all is sent.
//!
//! A piece is a message of *parts*, one behind the other:
//!
//! ```text
//! 1 item    inode u64, kind u8, item u64, length u16, value
//! 2 no item inode u64, kind u8, item u64
//! 3 blocks  arena u32, first block u64, number u32, their bytes
//! 4 state   number u64, length u16, the snapshot as its item has it: what has come is this
//! 5 end     inodes u64, blocks u64, time u64
//! ```

use std::collections::VecDeque;

use base::planted::{Bug, planted};
use base::wire::{Corrupt, Reader, Writer};
use base::{InodeId, NodeId, StreamSeq};
use storage::format::entry::Op;
use storage::format::item::{Run, Snapshot, kind};
use storage::format::page::Key;
use storage::limits::BLOCK_BYTES;
use storage::volume::image::{ImageEnd, SentBlocks};
use storage::volume::{Blocks, Place, Refusal, Volume, joins};

use super::message::Message;
use super::offer::Offers;
use super::snapshot::{MENDING, Outgoing, PIECE, Start};
use super::{Failure, Node};

/// Blocks in one part.
const BLOCKS: u64 = 32;
/// Leaves compared in one step.
const LEAVES: usize = 64;

/// One part of a piece.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part<'a> {
    /// An item, or that the state before had one and this has not.
    Item(Key, Option<&'a [u8]>),
    /// Content of blocks.
    Blocks {
        /// Arena.
        arena: u32,
        /// First block.
        block: u64,
        /// All bytes of whole blocks.
        bytes: &'a [u8],
    },
    /// What has come is a snapshot.
    State(u64, Snapshot),
    /// There is no more.
    End(ImageEnd),
}

impl<'a> Part<'a> {
    /// Appends the part.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer(out);
        match self {
            Self::Item(key, value) => {
                w.u8(if value.is_some() { 1 } else { 2 });
                w.u64(key.ino).u8(key.kind).u64(key.item);
                if let Some(value) = value {
                    w.u16(value.len() as u16).bytes(value);
                }
            }
            Self::Blocks { arena, block, bytes } => {
                let count = bytes.len() as u64 / BLOCK_BYTES;
                w.u8(3).u32(*arena).u64(*block).u32(count as u32).bytes(bytes);
            }
            Self::State(number, snapshot) => {
                let item = snapshot.encode();
                w.u8(4).u64(*number).u16(item.len() as u16).bytes(&item);
            }
            Self::End(end) => {
                w.u8(5).u64(end.inodes).u64(end.blocks).u64(end.time);
            }
        }
    }

    /// Reads one.
    pub fn decode(r: &mut Reader<'a>) -> Result<Self, Corrupt> {
        let tag = r.u8()?;
        Ok(match tag {
            1 | 2 => {
                let key = Key::new(r.u64()?, r.u8()?, r.u64()?);
                let value = if tag == 2 {
                    None
                } else {
                    let len = r.u16()?;
                    Some(r.bytes(len.into())?)
                };
                Self::Item(key, value)
            }
            3 => {
                let (arena, block, count) = (r.u32()?, r.u64()?, r.u32()? as usize);
                let Some(len) = count.checked_mul(BLOCK_BYTES as usize).filter(|len| *len > 0)
                else {
                    return Err(r.corrupt("holds no blocks, or more than there can be"));
                };
                Self::Blocks { arena, block, bytes: r.bytes(len)? }
            }
            4 => {
                let (number, len) = (r.u64()?, r.u16()?);
                Self::State(number, Snapshot::decode(r.bytes(len.into())?)?)
            }
            5 => Self::End(ImageEnd { inodes: r.u64()?, blocks: r.u64()?, time: r.u64()? }),
            _ => return Err(r.corrupt("has a part of an unknown kind")),
        })
    }
}

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
}

/// What a step came to.
enum Stepped {
    More,
    Done,
    /// Content is rotten, and is being mended.
    Waits,
    /// Some of what it is of is not there any more.
    Void,
}

impl Image {
    fn step(&mut self, volume: &mut Volume, out: &mut Vec<u8>) -> Result<Stepped, Failure> {
        let Some((number, snapshot)) = self.states.front() else { return Ok(Stepped::Done) };
        if let Some((ino, run)) = self.blocks.front() {
            let part = run.cut(run.file, run.file + BLOCKS);
            let blocks = Blocks { arena: part.arena, block: part.block, len: part.len };
            let Some(bytes) = volume.blocks_at(blocks)? else { return Ok(Stepped::Waits) };
            Part::Blocks { arena: part.arena, block: part.block, bytes: &bytes }.encode(out);
            let (ino, rest) = (*ino, run.cut(part.end(), run.end()));
            self.blocks.pop_front();
            if rest.len > 0 {
                self.blocks.push_front((ino, rest));
            }
            return Ok(Stepped::More);
        }
        let Some(key) = self.key else {
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
        let (Some((ino, run)), Some((_, state))) = (self.blocks.front(), self.states.front())
        else {
            return Ok(Vec::new());
        };
        let part = run.cut(run.file, run.file + BLOCKS);
        let mut wrong = Vec::new();
        volume.compare(ino.in_snapshot(state.slot), &part, &mut wrong)?;
        Ok(wrong)
    }
}

impl Node {
    /// Nodes that are to be sent an image, and those that have been: the snapshots that are made for that come and go. `true`: something was done.
    pub(super) fn images_step(&mut self) -> Result<bool, Failure> {
        let Some(head) = self.part.head() else { return Ok(false) };
        let wanted = head.images_wanted.first().copied();
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
        let Some(node) = wanted else { return Ok(false) };
        self.begin_image(node).map(|()| true)
    }

    fn begin_image(&mut self, node: NodeId) -> Result<(), Failure> {
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
        // All of it is on the medium before it is read.
        self.publish_all()?;
        // What is made for others goes when it has served them.
        let others = |other: &[u8]| joins::is_one(other) && other != name;
        let mut states = self.volume.snapshots(0, usize::MAX);
        states.retain(|stat| !others(&stat.snapshot.name));
        let states = states.into_iter().map(|stat| (stat.number, stat.snapshot)).collect();
        let (key, end) = (Some(Key::MIN), self.volume.image_end());
        let (before, blocks, sent, passed) = (None, VecDeque::new(), SentBlocks::default(), 0);
        let image = Image { name, states, before, key, blocks, sent, end, passed };
        let (seq, now) = (self.member.applied, self.env.now);
        let offers = Offers::new(0, None, self.env.random.next_u64());
        log::info!("node {node} joins at stream position {seq}, with all snapshots");
        let inodes = self.volume.root().inodes;
        let start = Start { seq, waited_for: true, behind: false };
        let going = Outgoing::new(start, (None, Some(image)), offers, inodes, now);
        if let Some(head) = self.part.head_mut() {
            head.snapshots.insert(node, going);
        }
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
        while raw.len() < PIECE && left > 0 {
            left = left.saturating_sub(16);
            match image.step(&mut self.volume, &mut raw)? {
                Stepped::More => {}
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
            let nanos = u128::from(raw.len() as u64) * 1_000_000_000 / u128::from(rate);
            going.pause = going.pause.max(self.env.now.saturating_add(nanos as u64));
        }
        let (seq, piece, last_inode) = (going.start.seq, going.next(), self.volume.last_inode());
        let (view, now) = (&self.view, self.env.now);
        let waits =
            self.part.head().is_some_and(|h| h.keeping.waits_for_others_than(node, view, now));
        self.send(node, Message::Image { seq, piece, last_inode, end, waits, raw });
        Ok((!end).then_some(image))
    }

    /// A piece of an image has come.
    pub(super) fn image_arrived(
        &mut self,
        seq: StreamSeq,
        piece: u32,
        last_inode: InodeId,
        (end, waits): (bool, bool),
        raw: &[u8],
    ) -> Result<(), Failure> {
        if !self.takes_piece(seq, piece, true, raw.len())? {
            return Ok(());
        }
        self.note_used(seq, last_inode)?;
        let diverged = |what: String| Failure::Diverged(seq, what);
        let mut r = Reader::new("image", raw);
        let mut ends = None;
        while r.left() > 0 {
            match Part::decode(&mut r).map_err(|e| diverged(e.to_string()))? {
                Part::Item(key, value) => {
                    self.with_pages(seq, |volume| volume.image_item(key, value))?;
                }
                Part::Blocks { arena, block, bytes } => {
                    self.volume.image_blocks(arena, block, bytes)?;
                }
                Part::State(number, snapshot) => {
                    self.with_pages(seq, |volume| volume.image_state(number, snapshot.clone()))?;
                }
                Part::End(end) => ends = Some(end),
            }
        }
        self.volume.image_pages(false)?;
        self.to_head(Message::SnapshotAck { seq, piece });
        match (end, ends) {
            (false, None) => Ok(()),
            (true, Some(state)) => {
                self.volume.end_image(&state, seq, self.view.epoch)?;
                self.member.incoming = None;
                self.open_volume_anew()?;
                self.joined_at(seq, waits)
            }
            _ => Err(diverged("an image does not end where it says so".into())),
        }
    }

    /// Does something that takes pages; what has come is written before, if that makes room.
    fn with_pages(
        &mut self,
        seq: StreamSeq,
        apply: impl Fn(&mut Volume) -> Result<(), Refusal>,
    ) -> Result<(), Failure> {
        let mut done = apply(&mut self.volume);
        if matches!(done, Err(Refusal::NeedsPublish)) {
            self.volume.image_pages(true)?;
            done = apply(&mut self.volume);
        }
        match done {
            Ok(()) => Ok(()),
            Err(Refusal::Fault(fault)) => Err(fault.into()),
            Err(refusal) => Err(Failure::Diverged(seq, format!("image: {refusal}"))),
        }
    }
}
