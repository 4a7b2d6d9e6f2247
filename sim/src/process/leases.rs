//! Leases, as they lie in the memory that a process shares with its service: while one of them counts for writing, no
//! other of the same inode counts; and while one is joint, none for reading or writing.

use base::planted::{Bug, planted};
use storage::format::control::{LeaseMode, LeaseWord};
use storage::limits::LEASE_SLOTS;

use super::*;

/// The leases of one in so many entries are looked at: where there is a script, and else. (A look goes through all that
/// every process has.)
const SELDOM: [u64; 2] = [4, 16];

impl Attached {
    /// The lease on an inode, by its word.
    fn lease(&self, ino: u64) -> Option<LeaseMode> {
        // Slots are taken from the first one on.
        let slots = (0..LEASE_SLOTS as u32).map(control::lease_word);
        let mut used = slots.map(|at| (self.memory.peek(at - 8), at)).take_while(|of| of.0 != 0);
        let (_, at) = used.find(|of| of.0 == ino)?;
        let word = LeaseWord(self.memory.peek(at));
        (word.0 != 0).then(|| word.mode())
    }

    /// Notes of each inode the mode of the lease that was given last, and when in the model's time.
    pub(super) fn look_at_grants(&mut self, now: u64) {
        let ((words, modes), times) = (&mut self.given, &mut self.given_at);
        let first = control::lease_word(0) as usize - 8;
        self.memory.view(|log| {
            // One slot after the other: the inode, and the word. (Slots are taken from the first one on.)
            let slots = log.get(first..).unwrap_or_default().as_chunks::<16>().0;
            for (slot, bytes) in slots.iter().take(LEASE_SLOTS).enumerate() {
                let pair = bytes.as_chunks::<8>().0;
                let (ino, word) = (u64::from_le_bytes(pair[0]), u64::from_le_bytes(pair[1]));
                if words.len() == slot {
                    if ino == 0 {
                        break;
                    }
                    words.push(0);
                }
                if std::mem::replace(&mut words[slot], word) != word && word != 0 {
                    modes.insert(ino, LeaseWord(word).mode());
                    times.insert(ino, now);
                }
            }
        });
    }
}

impl World<'_> {
    /// What a process has just written is of these inodes: if it may, nobody else may at this moment.
    pub(super) fn judge_leases(&self, c: usize, seq: u64, op: &Op<'_>) -> Result<(), String> {
        if !seq.is_multiple_of(SELDOM[usize::from(!self.preset.is_directed())]) {
            return Ok(());
        }
        for ino in effects::touched(op) {
            let own = match self.lease_of(c, ino, false) {
                Some(mode @ (LeaseMode::Write | LeaseMode::Joint)) => mode,
                _ => continue,
            };
            for other in (0..self.actors.len()).filter(|other| *other != c) {
                if let Some(mode) = self.lease_of(other, ino, planted(Bug::LapseIgnored))
                    && (own, mode) != (LeaseMode::Joint, LeaseMode::Joint)
                {
                    return Err(format!(
                        "leases conflict: inode {ino} is {own:?} at client {c}, {mode:?} at client {other}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether the lease on a file that a process was given last is one on ranges. (It may be on its way back by now.)
    pub(super) fn has_ranges(&self, c: usize, ino: u64) -> bool {
        let last = self.actors[c].process.as_ref().and_then(|p| p.attached.last());
        let given = last.and_then(|a| a.given.1.get(&ino));
        self.preset.shares_bytes() && given == Some(&LeaseMode::Joint)
    }

    /// What a process does under a lease on ranges must be a write inside the file's size, to blocks that nobody else has written since it
    /// was given something of the file last.
    pub(super) fn judge_ranges(
        &mut self,
        c: usize,
        session: usize,
        op: &Op<'_>,
    ) -> Result<(), String> {
        if !self.preset.shares_bytes() {
            return Ok(());
        }
        for ino in effects::touched(op) {
            if !self.has_ranges(c, ino) {
                continue;
            }
            let size = match self.model.current(ino).map(|s| &s.body) {
                Some(Body::File(bytes, _)) => bytes.len() as u64,
                _ => continue,
            };
            let (from, to) = match *op {
                Op::Write { offset, data, .. } => (offset, offset + data.len() as u64),
                _ => return Err(format!("inode {ino}: done with some bytes of it, and takes all")),
            };
            if to > size {
                return Err(format!("inode {ino}: {from}..{to} written beside others, of {size}"));
            }
            let now = self.model.now() + 1;
            let last = self.actors[c].process.as_ref().and_then(|p| p.attached.last());
            let given = last.and_then(|a| a.given_at.get(&ino)).copied().unwrap_or(0);
            for block in from as usize / BLOCK..(to as usize).div_ceil(BLOCK) {
                let before = self.writers.insert((ino, block), (session, now));
                if let Some((other, at)) =
                    before.filter(|(other, at)| *other != session && *at > given)
                {
                    return Err(format!(
                        "leases conflict: block {block} of inode {ino} is written by session {session}, given something at {given}, and by {other} at {at}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether the leases of a process count at this moment, as far as time goes.
    pub(super) fn is_in_time(&self, c: usize) -> bool {
        let last = self.actors[c].process.as_ref().and_then(|p| p.attached.last());
        let clock = self.hosts[self.actors[c].node].clients_clock(self.now);
        last.is_some_and(|last| clock < last.memory.peek(control::LEASES_UNTIL))
    }

    /// The lease of a process that counts at this moment. `lapsed`: also when its time is over.
    fn lease_of(&self, c: usize, ino: u64, lapsed: bool) -> Option<LeaseMode> {
        let last = self.actors[c].process.as_ref()?.attached.last()?;
        let host = &self.hosts[self.actors[c].node];
        let in_time = self.is_in_time(c);
        let attached = !last.ended && last.memory.peek(control::STATE) == control::STATE_ATTACHED;
        let counts = attached && !host.gone && (in_time || lapsed);
        counts.then(|| last.lease(ino)).flatten()
    }
}
