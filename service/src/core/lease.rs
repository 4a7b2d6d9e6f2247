//! The head's lease table: per inode one writer or many readers.
//!
//! Always true: a writer excludes every other holder; whoever waits is behind a holder that is
//! being recalled; each (client, inode) is recalled at most once at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::planted::{Bug, planted};
use base::{ClientId, InodeId};
use storage::format::control::LeaseMode;

/// A client that waits for a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Want {
    /// Who.
    pub client: ClientId,
    /// The agent's name for the request.
    pub token: u64,
    /// What.
    pub mode: LeaseMode,
    /// What is asked for beside the lease, if it is to be judged when the lease is granted.
    pub judge: Option<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    mode: LeaseMode,
    /// Of the want that was granted last; 0: adopted.
    token: u64,
}

#[derive(Debug, Default)]
struct Entry {
    holders: BTreeMap<ClientId, Holder>,
    waiting: VecDeque<Want>,
    recalling: BTreeSet<ClientId>,
}

/// What a change of the table asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Take the lease back from the client.
    Recall(ClientId, InodeId),
    /// The client has it now.
    Grant(InodeId, Want),
}

/// See the module.
#[derive(Debug, Default)]
pub struct LeaseTable {
    entries: BTreeMap<InodeId, Entry>,
    /// What each client holds, for its end.
    of: BTreeMap<ClientId, BTreeSet<InodeId>>,
    /// What each client waits for, for its end: short-lived processes come and go, and a mount beside them
    /// holds a hundred thousand leases that need not be looked at.
    wanted: BTreeMap<ClientId, BTreeSet<InodeId>>,
}

impl LeaseTable {
    /// The mode that `client` holds on `ino`.
    pub fn mode(&self, client: ClientId, ino: InodeId) -> LeaseMode {
        self.entries
            .get(&ino)
            .and_then(|e| e.holders.get(&client))
            .map_or(LeaseMode::None, |holder| holder.mode)
    }

    /// The token of the want by which `client` got what it holds on `ino`; 0 if it was adopted.
    pub fn token(&self, client: ClientId, ino: InodeId) -> Option<u64> {
        Some(self.entries.get(&ino)?.holders.get(&client)?.token)
    }

    /// Whether somebody else may write, and may have done what is not known yet.
    pub fn is_written_beside(&self, client: ClientId, ino: InodeId) -> bool {
        let writes = |(c, h): (&ClientId, &Holder)| *c != client && h.mode == LeaseMode::Write;
        self.entries.get(&ino).is_some_and(|e| e.holders.iter().any(writes))
    }

    /// What `client` holds on `ino` shall come back; `false` if it holds nothing, or is asked already.
    pub fn take_back(&mut self, client: ClientId, ino: InodeId) -> bool {
        self.entries
            .get_mut(&ino)
            .is_some_and(|e| e.holders.contains_key(&client) && e.recalling.insert(client))
    }

    /// A lease that nobody can dispute: a fresh inode number, or one reported by an agent.
    pub fn adopt(&mut self, client: ClientId, ino: InodeId, mode: LeaseMode) {
        if mode > LeaseMode::None {
            let holders = &mut self.entries.entry(ino).or_default().holders;
            holders.insert(client, Holder { mode, token: 0 });
            self.of.entry(client).or_default().insert(ino);
        }
    }

    /// A client asks.
    pub fn want(&mut self, ino: InodeId, want: Want, out: &mut Vec<Action>) {
        self.entries.entry(ino).or_default().waiting.push_back(want);
        self.wanted.entry(want.client).or_default().insert(ino);
        self.advance(ino, out);
    }

    /// Strikes out everything that `client` holds and waits for; where that was.
    fn strike(&mut self, client: ClientId) -> BTreeSet<InodeId> {
        let mut touched = self.of.remove(&client).unwrap_or_default();
        touched.extend(self.wanted.remove(&client).unwrap_or_default());
        for ino in &touched {
            if let Some(entry) = self.entries.get_mut(ino) {
                entry.waiting.retain(|w| w.client != client);
                entry.holders.remove(&client);
                entry.recalling.remove(&client);
            }
        }
        touched
    }

    /// A recalled or returned lease is gone.
    pub fn released(&mut self, client: ClientId, ino: InodeId, out: &mut Vec<Action>) {
        if let Some(entry) = self.entries.get_mut(&ino) {
            entry.holders.remove(&client);
            entry.recalling.remove(&client);
        }
        if let Some(inodes) = self.of.get_mut(&client) {
            inodes.remove(&ino);
        }
        self.advance(ino, out);
    }

    /// The agent of `client` says what it holds: that and nothing else counts from now on.
    pub fn replace(
        &mut self,
        client: ClientId,
        held: &[(InodeId, LeaseMode)],
        out: &mut Vec<Action>,
    ) {
        let mut touched = self.strike(client);
        for (ino, mode) in held {
            self.adopt(client, *ino, *mode);
            touched.insert(*ino);
        }
        for ino in touched {
            self.advance(ino, out);
        }
    }

    /// A client ended: everything it held or waited for is void.
    pub fn gone(&mut self, client: ClientId, out: &mut Vec<Action>) {
        for ino in self.strike(client) {
            self.advance(ino, out);
        }
    }

    /// Serves the queue of an inode as far as holders allow.
    fn advance(&mut self, ino: InodeId, out: &mut Vec<Action>) {
        let Some(entry) = self.entries.get_mut(&ino) else { return };
        while let Some(&want) = entry.waiting.front() {
            let write = want.mode == LeaseMode::Write;
            let blockers: Vec<ClientId> = entry
                .holders
                .iter()
                .filter(|(c, h)| {
                    let writes = h.mode == LeaseMode::Write && !planted(Bug::ReaderBesideWriter);
                    **c != want.client && (write || writes)
                })
                .map(|(c, _)| *c)
                .collect();
            if !blockers.is_empty() {
                for client in blockers {
                    if entry.recalling.insert(client) {
                        out.push(Action::Recall(client, ino));
                    }
                }
                return;
            }
            if entry.recalling.contains(&want.client) {
                // Its old lease is on its way back; it gets the new one afterwards.
                return;
            }
            entry.waiting.pop_front();
            if !entry.waiting.iter().any(|w| w.client == want.client)
                && let Some(inodes) = self.wanted.get_mut(&want.client)
            {
                inodes.remove(&ino);
                if inodes.is_empty() {
                    self.wanted.remove(&want.client);
                }
            }
            let none = Holder { mode: LeaseMode::None, token: 0 };
            let held = entry.holders.entry(want.client).or_insert(none);
            *held = Holder { mode: held.mode.max(want.mode), token: want.token };
            let granted = Want { mode: held.mode, ..want };
            if held.mode > LeaseMode::None {
                self.of.entry(want.client).or_default().insert(ino);
            } else {
                entry.holders.remove(&want.client);
            }
            out.push(Action::Grant(ino, granted));
        }
        if entry.holders.is_empty() && entry.waiting.is_empty() {
            self.entries.remove(&ino);
        }
    }

    /// Inodes with holders, for status.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is leased.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Panics when an invariant of the module does not hold.
    pub fn assert_invariants(&self) {
        for (ino, entry) in &self.entries {
            let writers = entry.holders.values().filter(|h| h.mode == LeaseMode::Write).count();
            assert!(writers == 0 || entry.holders.len() == 1, "{ino}: a writer beside others");
            for client in entry.holders.keys() {
                assert!(self.of.get(client).is_some_and(|s| s.contains(ino)), "{ino} unindexed");
            }
            for want in &entry.waiting {
                let known = self.wanted.get(&want.client).is_some_and(|s| s.contains(ino));
                assert!(known, "{ino}: a wait that its client's end would not find");
            }
            assert!(
                entry.waiting.is_empty() || !entry.recalling.is_empty(),
                "{ino}: somebody waits for nothing"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;

    impl LeaseTable {
        fn waits(&self, client: ClientId) -> Vec<u64> {
            let all = self.entries.values().flat_map(|e| &e.waiting);
            all.filter(|w| w.client == client).map(|w| w.token).collect()
        }

        fn held(&self, client: ClientId) -> Vec<(InodeId, LeaseMode)> {
            let of = |(i, e): (&InodeId, &Entry)| Some((*i, e.holders.get(&client)?.mode));
            self.entries.iter().filter_map(of).collect()
        }
    }

    #[test]
    fn random_histories_keep_the_invariants_and_serve_everybody() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut table = LeaseTable::default();
            let mut recalls: Vec<(ClientId, InodeId)> = Vec::new();
            let (mut asked, mut granted) = (0u64, 0u64);
            let settle = |actions: Vec<Action>, recalls: &mut Vec<_>, granted: &mut u64| {
                for action in actions {
                    match action {
                        Action::Recall(c, i) => recalls.push((c, i)),
                        Action::Grant(..) => *granted += 1,
                    }
                }
            };
            for _ in 0..200 {
                let mut out = Vec::new();
                if random.chance(1, 40) {
                    // A client ends, or its agent says anew what it holds: what it waited for counts no more.
                    let client = ClientId(1 + random.below(4));
                    let waited: Vec<u64> = table.waits(client);
                    if random.chance(1, 2) {
                        table.gone(client, &mut out);
                    } else {
                        let held = table.held(client);
                        table.replace(client, &held, &mut out);
                    }
                    asked -= waited.len() as u64;
                    recalls.retain(|(c, _)| *c != client);
                    assert!(table.waits(client).is_empty(), "seed {seed}: it waits no more");
                } else if random.chance(1, 2) && !recalls.is_empty() {
                    let at = random.below(recalls.len() as u64) as usize;
                    let (client, ino) = recalls.swap_remove(at);
                    table.released(client, ino, &mut out);
                } else {
                    let want = Want {
                        client: ClientId(1 + random.below(4)),
                        token: asked,
                        mode: if random.chance(1, 2) { LeaseMode::Read } else { LeaseMode::Write },
                        judge: None,
                    };
                    asked += 1;
                    table.want(InodeId(1 + random.below(3)), want, &mut out);
                }
                settle(out, &mut recalls, &mut granted);
                table.assert_invariants();
            }
            while let Some((client, ino)) = recalls.pop() {
                let mut out = Vec::new();
                table.released(client, ino, &mut out);
                settle(out, &mut recalls, &mut granted);
                table.assert_invariants();
            }
            assert_eq!(asked, granted, "seed {seed}: nobody waits for ever");
        }
    }
}
