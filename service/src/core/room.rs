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
use storage::format::sum::SUM_BYTES;
use storage::limits::BLOCK_BYTES;
use storage::media::Spare;

use super::head::Head;
use super::message::Message;
use super::{Failure, Node, entries};

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
pub(super) const BELOW_LEFT: u64 = 16 << 20;
/// What checksums have taken is counted anew when one in so many bytes of what arenas have is another...
const COUNT_SHARE: u64 = 64;
/// ... and so many at least.
const COUNT_LEAST: u64 = 4 << 20;
/// Between two words of it.
const SEEK_PAUSE: Nanos = 50_000_000;
/// Who promises nothing for so long gives back what he has...
const IDLE: Nanos = 2_000_000_000;
/// ... or for so long, when space is short.
const IDLE_SHORT: Nanos = 100_000_000;

/// Blocks, with checksums of `sum` bytes, for which there is room: where blocks are, or were, and in what is reserved, and `part` of what is free.
/// Of what arenas have, `sums` bytes are checksums.
fn fits(spare: &Spare, part: u64, sum: u64, sums: u64) -> u64 {
    let taken = spare.data.saturating_sub(spare.reserved).saturating_sub(sums);
    taken / BLOCK_BYTES + spare.reserved.saturating_add(part) / (BLOCK_BYTES + sum)
}

impl Node {
    // --- the head ---

    /// An agent's word: what its client has promised beyond `settled`.
    pub(super) fn open_room(
        &mut self,
        client: ClientId,
        (token, room): (u64, u64),
        settled: Sequence,
    ) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        // A client cannot have more than it was given.
        head.set_room(client, room.min(2 * ROOM_MAX));
        if let Some(known) = head.known.get_mut(&client) {
            (known.room_token, known.room_from) = (token, settled);
        }
        if head.ready { self.redeem_judged(client) } else { Ok(()) }
    }

    /// What was in the stream before its agent knew it is promised no more.
    pub(super) fn redeem_judged(&mut self, client: ClientId) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let Some(known) = head.known.get(&client) else { return Ok(()) };
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

    /// So many of a client's promised blocks are judged.
    pub(super) fn redeem(&mut self, client: ClientId, blocks: u64) {
        if let Some(head) = self.part.head_mut() {
            head.redeem(client, blocks);
        }
    }

    /// What no operation may have but those to which it was promised, and what only seems to be there.
    pub(super) fn kept_free(&self) -> u64 {
        if planted(Bug::RoomUnkept) {
            return 0;
        }
        let reserved = self.part.head().map_or(0, |head| head.reserved);
        reserved.saturating_add(self.member.short)
    }

    /// Looks how much of what is free in the volume the file system below has. Members may share it, so each
    /// has a part; as it is used the parts that others leave come in.
    pub(super) fn look_below(&mut self) -> Result<(), Failure> {
        let (at, seq) = self.member.looked_below;
        let pause = if seq == self.ring.last() { BELOW_PAUSE_IDLE } else { BELOW_PAUSE };
        if self.env.now < at + pause && at > 0 {
            return Ok(());
        }
        self.member.looked_below = (self.env.now, self.ring.last());
        let blocks = self.volume.superblock().capacity_blocks;
        let sum = self.volume.sums_base().map_or(0, |_| SUM_BYTES);
        let below = match self.env.media.spare()? {
            Some(spare) => {
                let chain = self.view.chain.len().max(1) as u64;
                let part = spare.free.saturating_sub(BELOW_LEFT) / chain;
                let sums = match spare.data.saturating_add(part) / (BLOCK_BYTES + sum) < blocks {
                    true => self.sums_taken(spare.data - spare.reserved)?,
                    // There is enough: how much exactly does not count.
                    false => 0,
                };
                Some(fits(&spare, part, sum, sums))
            }
            None => None,
        };
        self.member.short = below.map_or(0, |below| blocks.saturating_sub(below));
        Ok(())
    }

    /// Bytes of checksums among so many that arenas have, or somewhat more: they are counted when that has changed by a part.
    fn sums_taken(&mut self, data: u64) -> Result<u64, Failure> {
        let Some(base) = self.volume.sums_base() else { return Ok(0) };
        if let Some((then, sums)) = self.member.sums_below
            && then.abs_diff(data) <= (then / COUNT_SHARE).max(COUNT_LEAST)
        {
            // A block of entries comes with one block of data at least.
            return Ok(sums + data.saturating_sub(then) / 2);
        }
        let sums = self.env.media.taken_from(base)?;
        self.member.sums_below = Some((data, sums));
        Ok(sums)
    }

    /// Blocks that are free in the volume and in the file system below.
    pub(super) fn free_below(&self) -> u64 {
        self.volume.blocks_free().saturating_sub(self.member.short)
    }

    /// Sets space aside for a client that writes.
    pub(super) fn give_room(&mut self, client: ClientId) {
        let free = self.volume.blocks_free().saturating_sub(self.kept_free());
        let Some(head) = self.part.head_mut() else { return };
        let Some(known) = head.known.get(&client) else { return };
        let (token, room) = (known.room_token, known.room);
        let Shares { share, most, least } = self.env.config.room;
        let most = (free / share).min(most);
        let blocks = most.saturating_sub(room);
        if !head.ready || blocks < least.max(most / 2) || !self.volume.has_pages() {
            return;
        }
        head.set_room(client, most);
        self.to_agent(client, Message::Room { client, token, blocks });
    }

    /// An operation was refused for want of space, and some is set aside for others: what of it lies idle shall come
    /// back.
    pub(super) fn seek_room(&mut self) {
        let Some(head) = self.part.head() else { return };
        let lately = self.agent.room_sought.is_some_and(|at| self.env.now < at + SEEK_PAUSE);
        if head.reserved == 0 || lately {
            return;
        }
        self.agent.room_sought = Some(self.env.now);
        for node in self.view.chain.clone() {
            if node != self.me() {
                self.send(node, Message::RoomSought);
            }
        }
    }

    // --- the agent ---

    /// The head has set space aside for a client of this node.
    pub(super) fn room_given(&mut self, client: ClientId, token: u64, blocks: u64) {
        if let Some(client) = self.agent.clients.get_mut(&client)
            && client.room_token == token
        {
            client.add_room(blocks, self.env.now);
        }
    }

    /// Returns what lies idle.
    pub(super) fn return_room(&mut self) {
        let sought = self.agent.room_sought.is_some_and(|at| self.env.now < at + SOUGHT);
        let short = sought || self.free_below() < self.volume.superblock().capacity_blocks / SHORT;
        let (now, after) = (self.env.now, if short { IDLE_SHORT } else { IDLE });
        let mut back = Vec::new();
        for client in self.agent.clients.values_mut() {
            let blocks = client.idle_room(now, after);
            if blocks > 0 {
                let (client, token) = (client.id, client.room_token);
                back.push(Message::RoomBack { client, token, blocks });
            }
        }
        back.into_iter().for_each(|message| self.to_head(message));
    }
}

impl Head {
    /// Sets an account.
    fn set_room(&mut self, client: ClientId, room: u64) {
        if let Some(known) = self.known.get_mut(&client) {
            self.reserved = self.reserved - known.room + room;
            known.room = room;
        }
    }

    /// What of its client's account is an operation's.
    pub(super) fn promised_to(&self, client: ClientId, header: &Header) -> u64 {
        self.known.get(&client).map_or(0, |known| known.room.min(header.promised))
    }

    /// So many of a client's promised blocks are judged.
    fn redeem(&mut self, client: ClientId, blocks: u64) {
        if let Some(room) = self.known.get(&client).map(|known| known.room)
            && blocks > 0
        {
            self.set_room(client, room.saturating_sub(blocks));
        }
    }

    /// A client does not need so many of its blocks.
    pub(super) fn room_returned(&mut self, client: ClientId, token: u64, blocks: u64) {
        if self.known.get(&client).is_some_and(|known| known.room_token == token) {
            self.redeem(client, blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What arenas have is room for blocks, however many arenas there are: of their checksums only what is there is none.
    #[test]
    fn many_arenas_take_no_room_for_checksums_that_are_not_there() {
        const GIB: u64 = 1 << 30;
        // 100 users with a GiB each, in a volume of 256 GiB (0.5 GiB of checksums if all of it is in one arena), and nothing left below.
        let (blocks, sums) = (100 * GIB, 100 * GIB / 512);
        let spare = Spare { data: blocks + sums, reserved: 0, free: 0 };
        assert_eq!(fits(&spare, 0, SUM_BYTES, sums), blocks / BLOCK_BYTES);
        // What is reserved, or free, is for both.
        let spare = Spare { data: blocks + sums + GIB, reserved: GIB, free: GIB };
        let more = 3 * GIB / 2 / (BLOCK_BYTES + SUM_BYTES);
        assert_eq!(fits(&spare, GIB / 2, SUM_BYTES, sums), blocks / BLOCK_BYTES + more);
        assert_eq!(fits(&Spare { data: 5, reserved: 9, free: 0 }, 0, 0, 7), 0);
    }
}
