//! File locks between client, agent and head.
//!
//! The head judges (`locks`); each agent remembers what its clients were granted, and tells a new
//! head before that grants anything (`view`). An agent's memory changes only when the head's answer
//! comes, in the order of the head's answers, so that it never claims what the head has given away.

use std::collections::{BTreeMap, BTreeSet};

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, NodeId};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::locks::FileLocks;
use storage::permission::{R, W};

use super::locks::{LockTable, Wish};
use super::message::{LockAsk, Message};
use super::{Effect, Failure, Node};

/// What a node keeps about file locks.
#[derive(Debug, Default)]
pub(super) struct Locking {
    /// Names this run of the service; never 0.
    pub(super) run: u64,
    /// Head: everybody's.
    pub(super) table: LockTable,
    /// Head: asked during a takeover.
    early: Vec<(NodeId, Message)>,
    /// Agent: what its clients were granted.
    held: BTreeMap<ClientId, BTreeMap<InodeId, FileLocks>>,
    /// Agent: clients of an earlier run, of which the process before this one knew that.
    untold: BTreeSet<ClientId>,
}

impl Locking {
    pub(super) fn new(run: u64) -> Self {
        Self { run, ..Self::default() }
    }

    /// This node becomes head and knows nothing of others yet; or is head no more.
    pub(super) fn drop_table(&mut self) {
        self.table = LockTable::default();
        self.early.clear();
    }

    /// Agent: a client is no more.
    pub(super) fn drop_client(&mut self, client: ClientId) {
        self.held.remove(&client);
        self.untold.remove(&client);
    }

    /// Agent: a client of an earlier run goes on. Which locks it has, it says when it is asked for them, soon.
    pub(super) fn take_up(&mut self, client: ClientId) {
        self.untold.insert(client);
    }

    /// Agent: no client is left.
    pub(super) fn drop_all(&mut self) {
        self.held.clear();
        self.untold.clear();
    }

    fn remember(&mut self, client: ClientId, ino: InodeId, lock: Lock) {
        let files = self.held.entry(client).or_default();
        let file = files.entry(ino).or_default();
        // The head has counted it.
        let _ = file.put(client, lock, usize::MAX);
        if file.is_empty() {
            files.remove(&ino);
        }
        if files.is_empty() {
            self.held.remove(&client);
        }
    }

    /// Agent: what a client holds, for a head that does not know.
    pub(super) fn report(&self, client: ClientId, most: usize) -> Vec<Message> {
        let files = self.held.get(&client).filter(|_| !planted(Bug::LocksUnreported));
        let files = files.into_iter().flatten();
        let all: Vec<(InodeId, Lock)> =
            files.flat_map(|(ino, file)| file.iter().map(|h| (*ino, h.lock))).collect();
        let mut pieces: Vec<Vec<_>> = all.chunks(most).map(<[_]>::to_vec).collect();
        // What clients of an earlier run had locked the head knows better than this process, until they have asked for it
        // again. (What they give up meanwhile waits in their slots.)
        let whole = !self.untold.contains(&client);
        if pieces.is_empty() && whole {
            // "Nothing" is told, too: the head may have granted what never arrived here.
            pieces.push(Vec::new());
        }
        let piece = |(n, locks)| Message::LockHeld { client, first: whole && n == 0, locks };
        pieces.into_iter().enumerate().map(piece).collect()
    }
}

impl Node {
    /// Agent: the head has answered; the memory of what is held follows.
    pub(super) fn note_lock(&mut self, client: ClientId, ino: InodeId, ask: LockAsk, errno: u16) {
        let LockAsk::Set { lock, .. } = ask else { return };
        if errno == 0 {
            self.locking.remember(client, ino, lock);
        } else if lock.space == LockSpace::Flock && errno == Errno::AGAIN.0 {
            // The head has given up the old mode (see `LockTable::set`).
            self.locking.remember(client, ino, Lock { kind: LockKind::None, ..lock });
        }
    }

    /// Agent: a lock that the client waits for may be free.
    pub(super) fn lock_freed(&self, client: ClientId) {
        if let Some(client) = self.agent.clients.get(&client) {
            client.tell_of_locks();
        }
    }

    /// Agent: a new head knows no waiters; those who wait must ask again.
    pub(super) fn wake_lock_waiters(&self) {
        for client in self.agent.clients.values() {
            client.set_lock_run(self.locking.run);
            client.tell_of_locks();
        }
    }

    /// Head: an agent asks.
    pub(super) fn lock_wanted(
        &mut self,
        from: NodeId,
        message: Message,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let Message::LockWant { client, ino, token, ask } = message else { return Ok(()) };
        if client.node() != from {
            self.counters.bad_messages += 1;
            return Ok(());
        }
        if !self.ready || self.now < self.head.grants_from {
            // Not before every agent has said what its clients hold, and clients of lost nodes have
            // learnt that they hold nothing.
            if self.locking.early.len() < self.config.limits.unready {
                self.locking.early.push((from, message));
            } else {
                self.head.missed.insert(from);
            }
            return Ok(());
        }
        if !self.head.known.contains_key(&client) {
            return Ok(());
        }
        let mut told = BTreeSet::new();
        let mut found = None;
        let answer = match ask {
            LockAsk::Set { lock, wait } => match self.lock_check(client, ino, &lock)? {
                Ok(()) => {
                    let wish = Wish { client, ino, lock, wait };
                    self.locking.table.set(self.now, wish, &mut told)
                }
                refused => refused,
            },
            LockAsk::Test { lock } => self.lock_check(client, ino, &lock)?.map(|()| {
                found = self.locking.table.test(client, ino, lock).map(|held| {
                    // A process number says nothing on another machine.
                    let here = held.client.node() == client.node();
                    Lock { pid: if here { held.lock.pid } else { 0 }, ..held.lock }
                });
            }),
            LockAsk::Cancel { wait } => {
                self.locking.table.cancel(self.now, client, wait, &mut told);
                Ok(())
            }
        };
        match answer {
            Ok(()) => self.counters.locks += 1,
            Err(_) => self.counters.locks_refused += 1,
        }
        let errno = answer.map_or_else(|e| e.0, |()| 0);
        self.to_agent(client, Message::LockDone { client, token, errno, found }, out);
        self.tell_of_locks(told, out);
        Ok(())
    }

    /// Only what a client has open, and could open now, can it lock; freeing is always allowed.
    fn lock_check(
        &self,
        client: ClientId,
        ino: InodeId,
        lock: &Lock,
    ) -> Result<Result<(), Errno>, Failure> {
        if lock.kind == LockKind::None {
            return Ok(Ok(()));
        }
        let Some(known) = self.head.known.get(&client) else { return Ok(Err(Errno::STALE)) };
        if !known.pins.contains(&ino) {
            return Ok(Err(Errno::BADF));
        }
        let Some(record) = self.volume.attr(ino)? else { return Ok(Err(Errno::BADF)) };
        let creds = known.creds();
        let may = known.rights.contains(&ino)
            || creds.may(&record, R).is_ok()
            || creds.may(&record, W).is_ok();
        Ok(if may { Ok(()) } else { Err(Errno::ACCES) })
    }

    /// Head: an agent says what a client of its holds.
    pub(super) fn locks_reported(
        &mut self,
        from: NodeId,
        client: ClientId,
        first: bool,
        locks: &[(InodeId, Lock)],
        out: &mut Vec<Effect>,
    ) {
        if client.node() != from {
            self.counters.bad_messages += 1;
            return;
        }
        if !self.head.known.contains_key(&client) {
            return;
        }
        let mut told = BTreeSet::new();
        if first {
            self.locking.table.gone(self.now, client, &mut told);
        }
        for (ino, lock) in locks {
            if lock.kind != LockKind::None && !self.locking.table.adopt(client, *ino, *lock) {
                // An unlock whose answer was lost: the agent asks for it again.
                log::debug!("client {:#x}: its lock on {ino} was given up before", client.0);
            }
        }
        self.tell_of_locks(told, out);
    }

    /// Head: a client ended.
    pub(super) fn forget_locks(&mut self, client: ClientId, out: &mut Vec<Effect>) {
        if planted(Bug::LocksOfEndedKept) {
            return;
        }
        let mut told = BTreeSet::new();
        self.locking.table.gone(self.now, client, &mut told);
        self.tell_of_locks(told, out);
    }

    /// Head: the takeover is done; what was asked during it is answered.
    pub(super) fn serve_early_locks(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if !self.ready || self.now < self.head.grants_from {
            return Ok(());
        }
        let early = std::mem::take(&mut self.locking.early);
        early.into_iter().try_for_each(|(from, message)| self.lock_wanted(from, message, out))?;
        self.tell_missed(out);
        Ok(())
    }

    fn tell_of_locks(&mut self, told: BTreeSet<ClientId>, out: &mut Vec<Effect>) {
        for client in told {
            self.to_agent(client, Message::LockFree { client }, out);
        }
    }
}
