//! What a client may promise (`core::room`).

use base::Nanos;
use storage::format::control;

use super::Client;
use crate::core::room::ROOM_MAX;

impl Client {
    /// Blocks were promised to entries that are settled.
    pub(super) fn use_room(&mut self, promised: u64) {
        if promised > 0 {
            self.room_used += promised;
            self.set_word(control::ROOM_USED, self.room_used);
        }
    }

    /// It may promise so many blocks more.
    pub fn add_room(&mut self, blocks: u64, now: Nanos) {
        self.room = self.room.saturating_add(blocks.min(ROOM_MAX));
        self.idle.1 = now;
        self.set_word(control::ROOM, self.room);
    }

    /// Takes back what it has not promised.
    fn take_room(&mut self) -> u64 {
        let before = self.room;
        let promised = || self.word(control::PROMISED).min(before);
        let first = promised();
        self.set_word(control::ROOM, first);
        // Who has added to it since and looked before has what he asked for.
        let now = promised().max(first);
        if now > first {
            self.set_word(control::ROOM, now);
        }
        self.room = now;
        before - now
    }

    /// The same, if it has promised nothing for so long.
    pub fn idle_room(&mut self, now: Nanos, after: Nanos) -> u64 {
        let (before, since) = self.idle;
        if self.room == before {
            return 0;
        }
        let promised = self.word(control::PROMISED).min(self.room);
        if promised != before {
            self.idle = (promised, now);
            return 0;
        }
        if now < since + after { 0 } else { self.take_room() }
    }

    /// Takes back what it has not promised, for a new account at the head: its token, and the blocks that are
    /// promised beyond what is settled.
    pub fn count_room(&mut self) -> (u64, u64) {
        self.take_room();
        self.room_token += 1;
        (self.room_token, self.room.saturating_sub(self.room_used))
    }

    /// What an earlier run had given it. The words are the client's to spoil: within bounds.
    pub(super) fn take_up_room(&mut self) {
        let settled = self.word(control::SETTLED);
        let since = self.marks.iter().filter(|mark| mark.seq > settled);
        let since: u64 = since.map(|mark| mark.promised).sum();
        self.room_used = self.word(control::ROOM_USED).min(u64::MAX / 4) + since;
        let room = self.word(control::ROOM).max(self.word(control::PROMISED));
        self.room = room.clamp(self.room_used, self.room_used + 2 * ROOM_MAX);
    }
}
