//! What is always true of what the service knows of a client.

use base::always;

use super::{Client, Slots};

impl Slots {
    /// Those that are taken are handed out, and not free as well.
    fn invariants(&self, what: &str, taken: impl Iterator<Item = u32>) -> Result<(), String> {
        // Which are free, and then which are used as well.
        let mut seen = vec![false; self.unused as usize];
        let mut mark =
            |slot: u32| seen.get_mut(slot as usize).map(|seen| std::mem::replace(seen, true));
        for slot in &self.free {
            always!(mark(*slot) == Some(false), "{what} slot {slot} is free twice");
        }
        for slot in taken {
            let before = mark(slot);
            always!(before.is_some(), "{what} slot {slot} was never handed out");
            always!(before == Some(false), "{what} slot {slot} is used twice, or free as well");
        }
        Ok(())
    }
}

impl Client {
    /// The cheap ones, of which there is one for each of its positions.
    pub fn positions(&self) -> Result<(), String> {
        let (settled, id) = (self.settled.0, self.id.0);
        let (published, replicated) = (self.published.0, self.replicated.0);
        always!(published <= settled, "client {id:#x}: published {published} of {settled} settled");
        always!(replicated <= settled, "client {id:#x}: replicated {replicated} of {settled}");
        Ok(())
    }

    /// All of them; else what is not so.
    pub fn invariants(&self) -> Result<(), String> {
        self.positions()?;
        let of = |e: String| format!("client {:#x}: {e}", self.id.0);
        let returned = self.returned.values().map(|r| r.slot);
        let leases = self.slots.values().copied().chain(returned);
        self.lease_slots.invariants("lease", leases).map_err(of)?;
        let pins = self.pins.values().filter_map(|pin| pin.slot);
        self.pin_slots.invariants("pin", pins).map_err(of)?;
        always!(
            self.slots.keys().eq(self.modes.keys()),
            "client {:#x}: slots and modes of its leases differ",
            self.id.0
        );
        for (told, ino) in &self.told_closed {
            let same = self.pins.get(ino).is_some_and(|pin| pin.told == Some(*told));
            always!(
                same,
                "client {:#x}: {ino} was told closed, and its pin does not say so",
                self.id.0
            );
        }
        let sorted = self.marks.iter().is_sorted_by_key(|mark| mark.seq);
        always!(sorted, "client {:#x}: marks of its log out of order", self.id.0);
        let behind = self.marks.back().is_none_or(|mark| mark.seq < self.reader.next);
        always!(behind, "client {:#x}: a mark at {} or behind", self.id.0, self.reader.next);
        Ok(())
    }
}
