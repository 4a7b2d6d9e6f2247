//! Space is reserved before it is promised (`storage::format::control`, "Room").
//!
//! The head sets blocks aside for each client that writes, before it grants the write lease, and again as it judges what the
//! client promised with them. What is set aside nobody else gets, so a promised write is never
//! refused for want of space, whatever becomes of links and heads. As less is left each gets less, and in the end
//! nothing: then writes are judged one by one.
//!
//! What a client has and has not used is known in three places that may not agree while messages are under way: head and agent
//! only ever add and subtract, which comes out the same in any order; what is lost with a link or
//! a head is set right by `ClientUp`, which begins a new account (a token names it).

use base::planted::{Bug, planted};
use base::{ClientId, Nanos, Sequence, StreamSeq};
use storage::format::entry::Header;
use storage::limits::BLOCK_BYTES;

use super::message::Message;
use super::{Effect, Failure, Node, entries};

/// How much is set aside for a client.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// One in so many of the blocks that are free...
    pub share: u64,
    /// ... but no more than this: half of it is what the client can write until it gets the next.
    pub most: u64,
    /// Fewer are not worth a message.
    pub least: u64,
}

impl Shares {
    /// As shipped: 128 MiB at most.
    pub const SHIPPED: Self = Self { share: 16, most: ROOM_MAX, least: 16 };
}

/// A client can have no more blocks than these.
pub(super) const ROOM_MAX: u64 = 32_768;
/// Space is short when less than one in so many of the volume's blocks is free: then what lies idle is taken back sooner.
const SHORT: u64 = 8;
/// Space counts as short for so long after somebody got none.
const SOUGHT: Nanos = 2_000_000_000;
/// Between two looks at the file system below.
const BELOW_PAUSE: Nanos = 50_000_000;
/// The same while nobody writes here: it costs some system calls for each segment.
const BELOW_PAUSE_IDLE: Nanos = 1_000_000_000;
/// So many bytes are left there, for what members need between two looks.
const BELOW_LEFT: u64 = 16 << 20;
/// Between two words of it.
const SEEK_PAUSE: Nanos = 50_000_000;
/// Who promises nothing for so long gives back what he has...
const IDLE: Nanos = 2_000_000_000;
/// ... or for so long, when space is short.
const IDLE_SHORT: Nanos = 100_000_000;

impl Node {
    // --- the head ---

    /// Sets an account.
    fn set_room(&mut self, client: ClientId, room: u64) {
        if let Some(known) = self.head.known.get_mut(&client) {
            self.head.reserved = self.head.reserved - known.room + room;
            known.room = room;
        }
    }

    /// An agent's word: what its client has promised beyond `settled`.
    pub(super) fn open_room(
        &mut self,
        client: ClientId,
        (token, room): (u64, u64),
        settled: Sequence,
    ) -> Result<(), Failure> {
        // A client cannot have more than it was given.
        self.set_room(client, room.min(2 * ROOM_MAX));
        if let Some(known) = self.head.known.get_mut(&client) {
            (known.room_token, known.room_from) = (token, settled);
        }
        if self.ready { self.redeem_judged(client) } else { Ok(()) }
    }

    /// What was in the stream before its agent knew it is promised no more.
    pub(super) fn redeem_judged(&mut self, client: ClientId) -> Result<(), Failure> {
        let Some(known) = self.head.known.get(&client) else { return Ok(()) };
        let (from, incarnation, room) = (known.room_from, known.incarnation, known.room);
        if self.settled_of(client) <= from || room == 0 {
            return Ok(());
        }
        let mut blocks = 0;
        for seq in self.ring.oldest().0..=self.ring.last().0 {
            let Some(kept) = self.ring.get(StreamSeq(seq)).copied() else { continue };
            if kept.header.client != client || kept.header.last_seq <= from {
                continue;
            }
            for entry in entries(&self.ring.body(&kept)?, incarnation).flatten() {
                if entry.1.sequence > from {
                    blocks += entry.1.promised;
                }
            }
        }
        self.redeem(client, blocks);
        Ok(())
    }

    /// What of its client's account is an operation's.
    pub(super) fn promised_to(&self, client: ClientId, header: &Header) -> u64 {
        self.head.known.get(&client).map_or(0, |known| known.room.min(header.promised))
    }

    /// So many of a client's promised blocks are judged: whether it had them.
    pub(super) fn redeem(&mut self, client: ClientId, blocks: u64) -> bool {
        let Some(room) = self.head.known.get(&client).map(|known| known.room) else { return false };
        if blocks == 0 {
            return true;
        }
        self.set_room(client, room.saturating_sub(blocks));
        room >= blocks
    }

    /// What no operation may have but those to which it was promised, and what only seems to be there.
    pub(super) fn kept_free(&self) -> u64 {
        if planted(Bug::RoomUnkept) {
            0
        } else {
            self.head.reserved.saturating_add(self.member.short)
        }
    }

    /// Looks how much of what is free in the volume the file system below has. Members may share it, so each
    /// has a part; as it is used the parts that others leave come in.
    pub(super) fn look_below(&mut self) -> Result<(), Failure> {
        let (at, seq) = self.member.looked_below;
        let pause = if seq == self.ring.last() { BELOW_PAUSE_IDLE } else { BELOW_PAUSE };
        if self.now < at + pause && at > 0 {
            return Ok(());
        }
        self.member.looked_below = (self.now, self.ring.last());
        let blocks = self.volume.superblock().capacity_blocks;
        let below = self.media.spare()?.map(|spare| {
            let part = spare.free.saturating_sub(BELOW_LEFT) / self.chain.len().max(1) as u64;
            spare.data.saturating_add(part) / BLOCK_BYTES
        });
        self.member.short = below.map_or(0, |below| blocks.saturating_sub(below));
        Ok(())
    }

    /// Blocks that are free in the volume and in the file system below.
    pub(super) fn free_below(&self) -> u64 {
        self.volume.blocks_free().saturating_sub(self.member.short)
    }

    /// Sets space aside for a client that writes.
    pub(super) fn give_room(&mut self, client: ClientId, out: &mut Vec<Effect>) {
        let Some(known) = self.head.known.get(&client) else { return };
        let (token, room) = (known.room_token, known.room);
        let free = self.volume.blocks_free().saturating_sub(self.kept_free());
        let Shares { share, most, least } = self.config.room;
        let most = (free / share).min(most);
        let blocks = most.saturating_sub(room);
        if !self.ready || blocks < least.max(most / 2) || !self.volume.has_pages() {
            return;
        }
        self.set_room(client, most);
        self.to_agent(client, Message::Room { client, token, blocks }, out);
    }

    /// An operation was refused for want of space, and some is set aside for others: what of it lies idle shall come
    /// back.
    pub(super) fn seek_room(&mut self, out: &mut Vec<Effect>) {
        let lately = self.agent.room_sought.is_some_and(|at| self.now < at + SEEK_PAUSE);
        if self.head.reserved == 0 || lately {
            return;
        }
        self.agent.room_sought = Some(self.now);
        for node in self.chain.clone() {
            if node != self.me() {
                self.send(node, Message::RoomSought, out);
            }
        }
    }

    /// A client does not need so many of its blocks.
    pub(super) fn room_returned(&mut self, client: ClientId, token: u64, blocks: u64) {
        if self.head.known.get(&client).is_some_and(|known| known.room_token == token) {
            self.redeem(client, blocks);
        }
    }

    // --- the agent ---

    /// The head has set space aside for a client of this node.
    pub(super) fn room_given(&mut self, client: ClientId, token: u64, blocks: u64) {
        if let Some(client) = self.agent.clients.get_mut(&client)
            && client.room_token == token
        {
            client.add_room(blocks, self.now);
        }
    }

    /// Returns what lies idle.
    pub(super) fn return_room(&mut self, out: &mut Vec<Effect>) {
        let sought = self.agent.room_sought.is_some_and(|at| self.now < at + SOUGHT);
        let short = sought || self.free_below() < self.volume.superblock().capacity_blocks / SHORT;
        let (now, after) = (self.now, if short { IDLE_SHORT } else { IDLE });
        let mut back = Vec::new();
        for client in self.agent.clients.values_mut() {
            let blocks = client.idle_room(now, after);
            if blocks > 0 {
                let (client, token) = (client.id, client.room_token);
                back.push(Message::RoomBack { client, token, blocks });
            }
        }
        back.into_iter().for_each(|message| self.to_head(message, out));
    }
}
