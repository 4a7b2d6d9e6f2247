//! An image comes to a node that joins: what its arenas held stays where it is until something else comes to lie there, and what of it is
//! the same as in the image is not sent.

use base::wire::Reader;
use base::{InodeId, StreamSeq};
use storage::limits::BLOCK_BYTES;
use storage::volume::{Blocks, Fault, Refusal, Volume};

use super::super::join::Way;
use super::super::message::Message;
use super::super::offer::{COMPARED, Doubt, Part as Blocked};
use super::super::{Failure, Node};
use super::part::{Has, Part};

/// What is said of a piece that offers something.
#[derive(Debug, Default)]
struct Reply {
    /// By which key; none: nothing was offered.
    id: Option<u64>,
    /// Blocks of arenas.
    lacks: Vec<Blocked>,
    doubts: Vec<Doubt>,
}

impl Node {
    /// A piece of an image has come.
    pub(in crate::core) fn image_arrived(
        &mut self,
        seq: StreamSeq,
        piece: u32,
        last_inode: InodeId,
        (end, waits): (bool, bool),
        raw: &[u8],
    ) -> Result<(), Failure> {
        if !self.takes_piece(seq, piece, Way::Image, raw.len())? {
            return Ok(());
        }
        self.note_used(seq, last_inode)?;
        let diverged = |what: String| Failure::Diverged(seq, what);
        let mut r = Reader::new("image", raw);
        let (mut ends, mut reply) = (None, Reply::default());
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
                Part::Key(key) => {
                    if let Some(incoming) = &mut self.member.incoming {
                        incoming.image_key = Some(key);
                    }
                }
                Part::Offered { known, number, ino, file, arena, block, crcs } => {
                    let at = Blocks { arena, block, len: crcs.len() as u64 };
                    self.image_offered(known, (number, ino, file), (at, &crcs), &mut reply)?;
                }
                Part::Same { arena, block, count } => {
                    self.image_same(arena, block, count, &mut reply)?;
                }
            }
        }
        self.volume.image_pages(false)?;
        self.to_head(match reply.id {
            Some(id) => {
                let Reply { lacks, doubts, .. } = reply;
                Message::SnapshotLack { seq, piece, id, lacks, doubts }
            }
            None => Message::SnapshotAck { seq, piece },
        });
        match (end, ends) {
            (false, None) => Ok(()),
            (true, Some(state)) => {
                self.volume.end_image(&state, seq, self.view.epoch)?;
                self.member.incoming = None;
                self.open_volume_anew()?;
                self.discard_free()?;
                self.joined_at(seq, waits)
            }
            _ => Err(diverged("an image does not end where it says so".into())),
        }
    }

    /// What is offered is looked for where it is to lie, and where the file had it before.
    fn image_offered(
        &mut self,
        known: Has,
        (number, ino, file): (u64, InodeId, u64),
        (at, crcs): (Blocks, &[u32]),
        reply: &mut Reply,
    ) -> Result<(), Failure> {
        let Some(incoming) = &mut self.member.incoming else { return Ok(()) };
        let Some(key) = incoming.image_key else {
            let what = "an image offers something before it says by which key";
            let seq = incoming.begun.map_or(StreamSeq(0), |(seq, _)| seq);
            return Err(Failure::Diverged(seq, what.into()));
        };
        reply.id = Some(key);
        // In the same snapshot, if it was here; else as it was last.
        let before = incoming.states.iter().find(|(n, _)| *n == number).map(|(_, view)| view);
        let there = match known {
            // What was half here of something else may lie over what was there before.
            _ if !incoming.claimed || incoming.kept.len() != 1 => false,
            Has::Maybe => false,
            Has::Last => true,
            Has::Then => before.is_some(),
        };
        let before = if known == Has::Last { None } else { before }.or(incoming.kept.last());
        let end = file.saturating_add(at.len);
        let runs = before.map(|before| before.runs(ino, file, end, crcs.len())).transpose();
        let runs = match runs {
            Ok(runs) => runs.unwrap_or_default(),
            Err(Fault::Media(e)) => return Err(e.into()),
            // (It is damaged, or gone by now.)
            Err(_) => Vec::new(),
        };
        if there && self.volume.keep_blocks(at, crcs, (&runs, file))? {
            self.env.counters.taken_over_bytes += at.len * BLOCK_BYTES;
            return Ok(());
        }
        let most = (COMPARED as usize, key);
        let (had, lacks) = self.volume.may_have_blocks(at, crcs, (&runs, file), most)?;
        let arena = InodeId(at.arena.into());
        let part = |first, count| Blocked { ino: arena, first, count };
        reply.lacks.extend(lacks.into_iter().map(|(first, count)| part(first, count as u32)));
        for had in had {
            let part = part(had.block, had.from.len() as u32);
            reply.doubts.push(Doubt { part, keyed: had.keyed });
            incoming.image_doubted.insert((at.arena, had.block), had);
        }
        Ok(())
    }

    /// What was offered is the same here.
    fn image_same(
        &mut self,
        arena: u32,
        block: u64,
        count: u32,
        reply: &mut Reply,
    ) -> Result<(), Failure> {
        let Some(incoming) = &mut self.member.incoming else { return Ok(()) };
        let Some(key) = incoming.image_key else { return Ok(()) };
        reply.id = Some(key);
        let had = incoming.image_doubted.remove(&(arena, block));
        let had = had.filter(|had| had.from.len() == count as usize);
        let taken = had.map(|had| self.volume.take_blocks(arena, &had, key)).transpose()?;
        if taken == Some(true) {
            self.env.counters.taken_over_bytes += u64::from(count) * BLOCK_BYTES;
        } else {
            let ino = InodeId(arena.into());
            reply.lacks.push(Blocked { ino, first: block, count });
        }
        Ok(())
    }

    /// Takes out of the arenas what they held before. What is long goes at once, since it may be all that an arena has addresses for.
    fn discard_free(&mut self) -> Result<(), Failure> {
        let long = (self.env.config.limits.discard_min / BLOCK_BYTES).max(1);
        for free in self.volume.free_blocks() {
            if free.len >= long {
                self.discard_blocks(&free)?;
            } else {
                self.member.discards.push_back(free);
            }
        }
        Ok(())
    }

    /// Does something that takes pages; what has come is written before, if that makes room, and what was here before is let go.
    fn with_pages(
        &mut self,
        seq: StreamSeq,
        apply: impl Fn(&mut Volume) -> Result<(), Refusal>,
    ) -> Result<(), Failure> {
        let mut done = apply(&mut self.volume);
        for views in [false, true] {
            if !matches!(done, Err(Refusal::NeedsPublish | Refusal::NoSpace)) {
                break;
            }
            if let Some(incoming) = self.member.incoming.as_mut().filter(|_| views) {
                incoming.kept.clear();
                incoming.states.clear();
            }
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
