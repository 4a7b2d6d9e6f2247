//! What a client holds: leases, numbers to make something with, open inodes.

use std::collections::BTreeSet;

use base::planted::{Bug, planted};
use base::{InodeId, Nanos, StreamSeq};
use storage::format::clients::{PIN_CLOSED, PIN_LOST, PIN_OPEN, PIN_READ, PIN_WRITE};
use storage::format::control::{self, LeaseMode, LeaseWord};
use storage::format::rpc::Granted;
use storage::format::rpc::{WANT_READ, WANT_WRITE};
use storage::limits::PIN_SLOTS;
use storage::media::MediaError;

use super::{Client, Lease, Pin, Returned, Slots, Together};

/// A lease may be used for at least this long before it is taken back, unless its user is done with it: without it two clients
/// that each need two inodes could take them from each other for ever.
const HOLD: Nanos = 300_000;
/// Entries that are looked at to find out whether a lease was made use of.
const USES: usize = 64;

impl Client {
    pub(super) fn adopt_holdings(
        &mut self,
        leases: &[(u32, InodeId, LeaseMode)],
        pins: &[(u32, InodeId, u32)],
        now: Nanos,
    ) {
        let forgotten = planted(Bug::HeldForgotten);
        for (slot, ino, mode) in leases.iter().filter(|_| !forgotten) {
            if self.slots.insert(*ino, *slot).is_none() {
                self.modes.insert(
                    *ino,
                    Lease { mode: *mode, at: now, after: u64::MAX, token: 0, since: 0 },
                );
            }
        }
        self.lease_slots = Slots::without(&leases.iter().map(|l| l.0).collect());
        for (slot, ino, what) in pins {
            self.pins.insert(*ino, Pin { slot: Some(*slot), what: *what, told: None });
            if what & PIN_CLOSED != 0 && !planted(Bug::CloseNotRepeated) {
                self.closed.insert(*ino);
            }
        }
        self.pin_slots = Slots::without(&pins.iter().map(|p| p.0).collect());
    }

    /// Whether a kernel may still cache what the client learnt under its lease on `ino`, which may
    /// be one that was taken back.
    pub fn keeps(&self, ino: InodeId) -> bool {
        if !self.identity.is_mount() && !planted(Bug::KeptOfAnyone) {
            return false;
        }
        let slot = self.slots.get(&ino).or_else(|| self.returned.get(&ino).map(|r| &r.slot));
        let Some(&slot) = slot else { return false };
        let (word, bit) = control::kept(slot);
        !self.gone && !self.expelled && self.word(word) & bit != 0
    }

    /// Writes the lease word for a grant. `None` when the table, of `slots`, is full of leases in use.
    pub fn grant(
        &mut self,
        ino: InodeId,
        mode: LeaseMode,
        token: u64,
        (now, slots): (Nanos, usize),
    ) -> Result<Option<Granted>, MediaError> {
        let known = self.slots.get(&ino).copied();
        let returned = self.returned.get(&ino).map(|r| r.slot);
        let Some(slot) = known.or(returned).or_else(|| self.lease_slots.take(slots)) else {
            return Ok(None);
        };
        self.row.put_lease(slot, ino, mode, self.unmade.contains(&ino))?;
        if let Some(Returned { last: Some(last), .. }) = self.returned.remove(&ino) {
            self.returned_by.remove(&(last, ino));
        }
        self.slots.insert(ino, slot);
        self.generation += 1;
        let word = LeaseWord::new(self.generation, mode);
        self.set_word(control::lease_word(slot) - 8, ino.0);
        self.set_word(control::lease_word(slot), word.0);
        let after = self.last_sequence().0;
        let before = self.modes.get(&ino).filter(|lease| lease.mode == LeaseMode::Joint);
        let since = match before.map_or(0, |lease| lease.since) {
            _ if mode != LeaseMode::Joint => 0,
            0 => self.generation,
            since => since,
        };
        self.modes.insert(ino, Lease { mode, at: now, after, token, since });
        Ok(Some(Granted { slot, word }))
    }

    /// Whether a lease of it on the inode was taken back that allows something else than this, and what was done under it is not settled.
    pub fn was_other_than(&self, ino: InodeId, mode: LeaseMode) -> bool {
        self.returned.get(&ino).is_some_and(|r| r.mode != mode && mode != LeaseMode::Write)
    }

    /// The number is the client's to make something with, once.
    pub fn hand_out(&mut self, ino: InodeId) {
        self.unmade.insert(ino);
    }

    /// Numbers handed out that nothing in the stream is made with.
    pub const fn unmade(&self) -> &BTreeSet<InodeId> {
        &self.unmade
    }

    /// What a head that does not know is to hold for open by this client: what is, and numbers that something can still be
    /// made with. What it made with one and closed is neither, though this node may not have come so far in the stream.
    pub fn reported_pins(&self) -> Vec<InodeId> {
        let unmade = self.unmade.difference(&self.unmade_closed);
        self.pins.keys().chain(unmade).copied().collect()
    }

    /// Something in that chunk of the stream is made with the number.
    pub fn note_made(&mut self, ino: InodeId, seq: StreamSeq) {
        self.unmade_closed.remove(&ino);
        if self.unmade.remove(&ino) {
            self.made.push((seq, ino));
        }
    }

    /// Writes down which numbers are made use of by chunks up to `kept`, which are durable in the
    /// ring (or recovery would refuse what made them). To be called before any of these is published (or
    /// nothing would tell a number that is used and removed from one that was never used).
    pub fn write_made(&mut self, kept: StreamSeq) -> Result<(), MediaError> {
        let (now, later): (Vec<_>, _) = self.made.drain(..).partition(|(seq, _)| *seq <= kept);
        self.made = later;
        if now.is_empty() {
            return Ok(());
        }
        for (_, ino) in now {
            let held = self.slots.get(&ino).zip(self.modes.get(&ino)).map(|(s, l)| (*s, l.mode));
            let returned = self.returned.get(&ino).map(|r| (r.slot, r.mode));
            if let Some((slot, mode)) = held.or(returned) {
                self.row.note_made(slot, ino, mode)?;
            }
        }
        self.row.fence()
    }

    /// Takes the word away; operations that entered before are in `busy`.
    fn revoke(&mut self, ino: InodeId) -> Option<(u32, Lease)> {
        let slot = self.slots.remove(&ino)?;
        self.set_word(control::lease_word(slot), 0);
        Some((slot, self.modes.remove(&ino)?))
    }

    /// Ends a lease under which nothing waits to be settled; the token of its last grant.
    pub fn give_up(&mut self, ino: InodeId) -> Result<Option<u64>, MediaError> {
        let Some((slot, lease)) = self.revoke(ino) else { return Ok(None) };
        self.row.drop_lease(slot)?;
        self.lease_slots.free.push(slot);
        Ok(Some(lease.token))
    }

    /// Takes a lease back for the head; it counts as held until [`Client::has_returned`]. The token of
    /// its last grant, if it was held.
    pub fn take_back(&mut self, ino: InodeId) -> Option<u64> {
        let (slot, lease) = self.revoke(ino)?;
        self.returned.insert(ino, Returned { slot, mode: lease.mode, last: None });
        Some(lease.token)
    }

    /// The head is told what is held here, and has it from that: tokens of before mean nothing.
    pub fn forget_tokens(&mut self) {
        self.modes.values_mut().for_each(|lease| lease.token = 0);
    }

    /// Everything that was done under a lease taken back has been fetched.
    pub fn has_returned(&mut self, ino: InodeId) -> Result<(), MediaError> {
        let last = self.reader.next - 1;
        if let Some(returned) = self.returned.get_mut(&ino) {
            if let Some(before) = returned.last.replace(last) {
                self.returned_by.remove(&(before, ino));
            }
            self.returned_by.insert((last, ino));
        }
        self.forget_returned()
    }

    /// Leases are free of which everything is settled.
    pub(super) fn forget_returned(&mut self) -> Result<(), MediaError> {
        while let Some((last, ino)) = self.returned_by.first().copied()
            && last <= self.settled.0
        {
            self.returned_by.remove(&(last, ino));
            let Some(returned) = self.returned.remove(&ino) else { continue };
            self.row.drop_lease(returned.slot)?;
            self.lease_slots.free.push(returned.slot);
            if planted(Bug::SlotFreedTwice) {
                self.lease_slots.free.push(returned.slot);
            }
        }
        Ok(())
    }

    /// Leases taken back of which the head may not know all that was done under them.
    pub fn returned(&self) -> Vec<(InodeId, LeaseMode)> {
        let kept = |_: &_| !planted(Bug::ReportedTooFew);
        self.returned.iter().filter(kept).map(|(i, r)| (*i, r.mode)).collect()
    }

    /// The client has the inode open; it was allowed to read or write then, if these are asked for.
    pub fn pin_for(&mut self, ino: InodeId, flags: u8) -> Result<(), MediaError> {
        let right = |flag, right| if flags & flag != 0 { right } else { 0 };
        self.pin(ino, right(WANT_READ, PIN_READ) | right(WANT_WRITE, PIN_WRITE))
    }

    /// The client has the inode open, with these rights.
    pub fn pin(&mut self, ino: InodeId, rights: u32) -> Result<(), MediaError> {
        let what = PIN_OPEN | rights;
        let old = self.pins.get(&ino).copied();
        // Closed and opened again: what it wrote before keeps its right until it is settled.
        let what = what | old.map_or(0, |p| p.what & !PIN_CLOSED);
        if old.is_some_and(|p| p.what == what) {
            return Ok(());
        }
        let slot = match old {
            Some(pin) => pin.slot,
            None => self.pin_slots.take(PIN_SLOTS),
        };
        self.put_pin(ino, Pin { slot, what, told: None })
    }

    fn put_pin(&mut self, ino: InodeId, pin: Pin) -> Result<(), MediaError> {
        if let Some(slot) = pin.slot {
            self.row.put_pin(slot, ino, pin.what)?;
        }
        let before = self.pins.insert(ino, pin).and_then(|pin| pin.told);
        before.map(|told| self.told_closed.remove(&(told, ino)));
        Ok(())
    }

    /// The client has it open no more, and nothing that it did to it is still to be judged.
    pub fn unpin(&mut self, ino: InodeId) -> Result<(), MediaError> {
        let Some(pin) = self.pins.remove(&ino) else { return Ok(()) };
        pin.told.map(|told| self.told_closed.remove(&(told, ino)));
        if let Some(slot) = pin.slot {
            self.row.put_pin(slot, ino, 0)?;
            self.pin_slots.free.push(slot);
        }
        Ok(())
    }

    /// Takes out what the client says that it has closed. What it did to it before is in its log.
    pub fn collect_closed(&mut self) -> Result<(), MediaError> {
        let mut words = [0; control::CLOSED_SLOTS * 8];
        self.media.read(self.log(), control::CLOSED, &mut words)?;
        for (slot, word) in (0..).zip(words.as_chunks().0) {
            let (at, ino) = (control::CLOSED + slot * 8, u64::from_le_bytes(*word));
            if ino != 0 && self.media.cas64(self.log(), at, ino, 0)? == ino {
                self.note_closed(InodeId(ino))?;
            }
        }
        Ok(())
    }

    /// The client has closed the inode. It stays written down until the head has heard of it, whatever becomes of
    /// links, heads and this service. (Numbers that mean nothing would pile up for as long as the log cannot be
    /// read.)
    fn note_closed(&mut self, ino: InodeId) -> Result<(), MediaError> {
        self.write_closed(ino)?;
        let untold = self.pins.get(&ino).is_some_and(|pin| pin.told.is_none());
        if untold {
            self.closed.insert(ino);
        }
        Ok(())
    }

    /// Writes down that it is closed, for the next run of the service: that is told when the log is read as far as
    /// the client says. (A request that was taken and not answered is put again by who waits for its answer; for
    /// this one nobody waits.)
    pub fn write_closed(&mut self, ino: InodeId) -> Result<(), MediaError> {
        match self.pins.get(&ino).copied() {
            Some(pin) if pin.told.is_none() && pin.what & PIN_CLOSED == 0 => {
                self.put_pin(ino, Pin { what: pin.what | PIN_CLOSED, ..pin })
            }
            _ => Ok(()),
        }
    }

    /// Whether it has no other way to say that it has closed something.
    pub fn closes_now(&self) -> bool {
        let now = self.word(control::CLOSED_NOW) != 0;
        if now {
            self.set_word(control::CLOSED_NOW, 0);
        }
        now || !self.closed.is_empty()
    }

    /// It asks to open the inode (again).
    pub fn reopens(&mut self, ino: InodeId) {
        self.closed.remove(&ino);
        if let Some((_, these)) = &mut self.closing {
            these.remove(&ino);
        }
    }

    /// What it asked for was answered: if it was not opened, it is as closed as before.
    pub fn stays_closed(&mut self, ino: InodeId) {
        let closed = |pin: &Pin| pin.what & PIN_CLOSED != 0 && pin.told.is_none();
        if self.pins.get(&ino).is_some_and(closed) {
            self.closed.insert(ino);
        }
    }

    /// What was closed, to be told to the head now that the log is read to its end.
    pub fn tell_closed(&mut self) -> Result<Vec<InodeId>, MediaError> {
        let closed: Vec<InodeId> = std::mem::take(&mut self.closed).into_iter().collect();
        self.closing = None;
        self.told(&closed)?;
        Ok(closed)
    }

    /// The same of who never stops, whose log is never at its end: what was closed when it had what is read by now.
    pub fn tell_closed_before(&mut self) -> Result<Vec<InodeId>, MediaError> {
        let Some((mut unread, these)) = self.closing.take() else {
            if !self.closed.is_empty() && !planted(Bug::ClosedUntold) {
                self.closing = Some((self.unread(), self.closed.clone()));
            }
            return Ok(Vec::new());
        };
        if !self.has_read(&mut unread) {
            self.closing = Some((unread, these));
            return Ok(Vec::new());
        }
        let these: Vec<InodeId> = these.into_iter().filter(|ino| self.closed.remove(ino)).collect();
        self.told(&these)?;
        Ok(these)
    }

    /// The same of some that were closed when the log was as far as it is read.
    pub fn tell_these(&mut self, inodes: &[InodeId]) -> Result<Vec<InodeId>, MediaError> {
        inodes.iter().try_for_each(|ino| self.note_closed(*ino))?;
        let these: Vec<InodeId> =
            inodes.iter().copied().filter(|ino| self.closed.remove(ino)).collect();
        self.told(&these)?;
        Ok(these)
    }

    fn told(&mut self, closed: &[InodeId]) -> Result<(), MediaError> {
        let last = self.reader.next - 1;
        for ino in closed {
            if let Some(pin) = self.pins.get_mut(ino) {
                pin.told = Some(last);
                self.told_closed.insert((last, *ino));
            }
        }
        self.forget_closed()
    }

    /// What was done before comes to the head again, which pins again what that made or unlinked.
    pub(super) fn tell_closed_again(&mut self) {
        for (_, ino) in std::mem::take(&mut self.told_closed) {
            if let Some(pin) = self.pins.get_mut(&ino) {
                pin.told = None;
                self.closed.insert(ino);
            }
        }
        if planted(Bug::CloseNotRepeated) {
            self.closed.clear();
        }
    }

    /// What was closed is let go once the head has judged everything before: until then that may have to be told
    /// again, and a head that does not know must hear of it as it was.
    pub(super) fn forget_closed(&mut self) -> Result<(), MediaError> {
        while let Some((last, ino)) = self.told_closed.first().copied()
            && last <= self.settled.0
        {
            self.told_closed.remove(&(last, ino));
            self.unpin(ino)?;
            if self.unmade.contains(&ino) && !planted(Bug::ClosedReported) {
                self.unmade_closed.insert(ino);
            }
        }
        Ok(())
    }

    /// Whether the client has the inode open.
    pub fn has_pin(&self, ino: InodeId) -> bool {
        self.pins.contains_key(&ino)
    }

    /// Whether it holds a lease on the inode, or has it open.
    pub fn has(&self, ino: InodeId) -> bool {
        self.slots.contains_key(&ino) || self.pins.contains_key(&ino)
    }

    /// Whether it has, or had until it gave it back a moment ago.
    pub fn has_had(&self, ino: InodeId) -> bool {
        self.has(ino) || self.returned.contains_key(&ino)
    }

    /// Notes with what it has open of which others have lost something.
    pub fn mark_lost(&mut self, lost: impl Fn(InodeId) -> bool) -> Result<(), MediaError> {
        let open = self.pins.iter().filter(|(ino, pin)| pin.what & PIN_CLOSED == 0 && lost(**ino));
        let open: Vec<_> = open.map(|(ino, pin)| (*ino, *pin)).collect();
        open.into_iter()
            .try_for_each(|(ino, pin)| self.put_pin(ino, Pin { what: pin.what | PIN_LOST, ..pin }))
    }

    /// Whether it has it open, and was allowed to read it then: that outlives a change of the mode.
    pub fn reads(&self, ino: InodeId) -> bool {
        let reads = self.pins.get(&ino).is_some_and(|p| p.what & PIN_READ != 0);
        reads && !planted(Bug::ReadRightForgotten)
    }

    /// Inodes that the client has open.
    pub fn pins(&self) -> Vec<InodeId> {
        self.pins.keys().copied().collect()
    }

    /// Those of them that it did not close since, each with its slot and its bits.
    pub fn open_with_bits(&self) -> impl Iterator<Item = (InodeId, Option<u32>, u32)> {
        let open = self.pins.iter().filter(|(_, p)| p.what & PIN_CLOSED == 0);
        open.map(|(ino, p)| (*ino, p.slot, p.what))
    }

    /// Those of them that it did not close since.
    pub fn open(&self) -> Vec<InodeId> {
        self.pins.iter().filter(|(_, p)| p.what & PIN_CLOSED == 0).map(|(i, _)| *i).collect()
    }

    /// Those that it may write, whatever their mode says now.
    pub fn rights(&self) -> Vec<InodeId> {
        self.pins.iter().filter(|(_, p)| p.what & PIN_WRITE != 0).map(|(i, _)| *i).collect()
    }

    /// Makes the client ask anew before it uses the lease again; the head still counts it as held.
    pub fn suspend(&mut self, ino: InodeId) {
        if let Some(&slot) = self.slots.get(&ino) {
            self.set_word(control::lease_word(slot), 0);
        }
    }

    /// Makes it ask anew for everything.
    pub fn suspend_all(&mut self) {
        let held: Vec<InodeId> = self.modes.keys().copied().collect();
        held.into_iter().for_each(|ino| self.suspend(ino));
        self.tell_of_recalls();
    }

    /// Until when the lease is the client's, if it has not done by then what it asked for it for.
    pub fn held_until(&self, ino: InodeId) -> Option<Nanos> {
        self.modes.get(&ino).map(|lease| lease.at + HOLD)
    }

    /// It has got a lease on this inode, and needs those on lower numbers together with it.
    pub fn needs_together(&mut self, ino: InodeId, now: Nanos) {
        let below = if self.together.until > now { self.together.below.max(ino) } else { ino };
        self.together = Together { below, until: now + HOLD, activity: self.activity() };
    }

    /// Whether it has its lease on the inode together with others, which it has just got, and has done nothing since.
    pub fn has_together(&self, ino: InodeId, now: Nanos) -> bool {
        let Together { below, until, activity } = self.together;
        now < until && ino < below && activity == self.activity()
    }

    /// Whether something that was read of its log was done to the inode since its lease was granted last.
    pub fn has_used(&self, ino: InodeId) -> bool {
        let Some(lease) = self.modes.get(&ino) else { return false };
        let newest = self.marks.iter().rev().chain(&self.given_back).take(USES);
        newest.take_while(|mark| mark.seq > lease.after).any(|mark| mark.is_of(ino))
    }

    /// The inodes behind slots.
    pub fn inodes_of(&self, slots: &BTreeSet<u32>) -> Vec<InodeId> {
        self.slots.iter().filter(|(_, s)| slots.contains(s)).map(|(i, _)| *i).collect()
    }

    /// Leases held here.
    pub fn leases(&self) -> Vec<(InodeId, LeaseMode)> {
        self.modes.iter().map(|(ino, lease)| (*ino, lease.mode)).collect()
    }

    /// The lease that it has on an inode, if it is one that allows this, for it alone or for who reads, and counts now. (One of an
    /// earlier run of this service, or of an earlier head, was given to a state that this one may not have reached.)
    pub fn has_now(&self, ino: InodeId, mode: LeaseMode) -> Option<Granted> {
        let (slot, lease) = (*self.slots.get(&ino)?, self.modes.get(&ino)?);
        let word = LeaseWord(self.word(control::lease_word(slot)));
        let counts =
            lease.mode != LeaseMode::Joint && lease.mode >= mode && word.mode() == lease.mode;
        let counts = counts && lease.token != 0;
        counts.then_some(Granted { slot, word })
    }

    /// How many.
    pub fn lease_count(&self) -> u64 {
        self.modes.len() as u64
    }

    /// Since which generation of its word it has had a lease jointly with others; 0: it has none.
    pub fn joint_since(&self, ino: InodeId) -> u64 {
        self.modes.get(&ino).map_or(0, |lease| lease.since)
    }

    /// Whether it uses the directory, or the file, jointly with others.
    pub fn is_joint(&self, ino: InodeId) -> bool {
        self.modes.get(&ino).is_some_and(|lease| lease.mode == LeaseMode::Joint)
    }

    /// Whether it has one on an inode.
    pub fn has_lease(&self, ino: InodeId) -> bool {
        self.modes.contains_key(&ino)
    }

    /// A lease to be taken back because its user has too many: another one each time, and none on `but`.
    pub fn next_to_go(&mut self, but: InodeId) -> Option<InodeId> {
        let after = InodeId(self.gone_last.0.saturating_add(1));
        let mut all = self.modes.range(after..).chain(self.modes.range(..after)).map(|(i, _)| *i);
        let next = all.find(|i| *i != but && !self.unmade.contains(i))?;
        self.gone_last = next;
        Some(next)
    }

    /// Some read lease whose slot can be taken when the table is full.
    pub fn spare(&self, slots: usize) -> Option<InodeId> {
        let full = self.lease_slots.is_full(slots);
        let read =
            |(ino, lease): &(&InodeId, &Lease)| lease.mode == LeaseMode::Read && !self.keeps(**ino);
        full.then(|| self.modes.iter().find(read).map(|(i, _)| *i)).flatten()
    }
}
