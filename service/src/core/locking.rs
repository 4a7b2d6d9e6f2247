//! File locks between client, agent and head.
//!
//! The head judges (`locks`); each agent remembers what its clients were granted, and tells a new
//! head before that grants anything (`view`). An agent's memory changes only when the head's answer
//! comes, in the order of the head's answers, so that it never claims what the head has given away.
//!
//! Where the head has left a file's locks to one client (`sole`), whoever else asks about them is answered when they have come
//! back: then the table says again what is locked.

use std::collections::{BTreeMap, BTreeSet};

use base::planted::{Bug, planted};
use base::{ClientId, Errno, InodeId, Nanos, NodeId};
use storage::format::lock::{Lock, LockKind, LockSpace};
use storage::format::rpc::LOCK_LEAVING;
use storage::locks::FileLocks;
use storage::permission::{R, W};
use storage::volume::Volume;

use super::head::Head;
use super::locks::Wish;
use super::message::{LockAsk, Message, SoleSays};
use super::sole::{Return, Wishes};
use super::sought::Sought;
use super::{Failure, Node};

/// Who shall give locks back, and is silent, is told again after so long.
const SOLE_ASKED_AGAIN: Nanos = 1_000_000_000;

/// What an agent keeps about the file locks of its clients. (Those of all are the head's.)
#[derive(Debug, Default)]
pub(super) struct Locking {
    /// Names this run of the service; never 0.
    pub(super) run: u64,
    /// What they were granted.
    held: BTreeMap<ClientId, BTreeMap<InodeId, FileLocks>>,
    /// Clients of an earlier run, of which the process before this one knew that.
    untold: BTreeSet<ClientId>,
    /// Clients to which others may have left some.
    seeking: BTreeSet<ClientId>,
    /// When to ask for the sole use of a file's locks.
    pub(super) wishes: Wishes,
    /// Those on their way back.
    pub(super) returns: Vec<Return>,
    /// What the head was told that came back, and may not have heard.
    unheard: Vec<Unheard>,
    /// Whose heirs it was told of, and may not have heard.
    heirs: Vec<HeirTold>,
    /// What the head asks for heirs on other nodes.
    pub(super) sought: Vec<Sought>,
}

/// A client has taken the place of another. A head that does not hear of it gives the locks away at the other's end.
#[derive(Clone, Copy, Debug)]
struct HeirTold {
    client: ClientId,
    heir: ClientId,
    /// As of [`Unheard`].
    since: u64,
    /// Of an heir on another node, which may ask again until then: what it is told is not heard where nobody has asked.
    until: Nanos,
}

/// An heir on another node has given up by then, whatever becomes of heads and links.
const TOLD_FOR: Nanos = 60_000_000_000;

/// So many of one heir's are kept: messages are under way for milliseconds, unless the link is down.
const HEIRS_TOLD: usize = 64;

/// What a client had locked of a file when the sole use came back. A head that does not hear of it goes on believing what it
/// knew when it gave the sole use away.
#[derive(Debug)]
struct Unheard {
    client: ClientId,
    ino: InodeId,
    /// Of the sole use.
    token: u64,
    says: SoleSays,
    /// Who answers a question that was asked after this one has heard it.
    since: u64,
}

impl Locking {
    pub(super) fn new(run: u64) -> Self {
        Self { run, ..Self::default() }
    }

    /// A client is no more.
    pub(super) fn drop_client(&mut self, client: ClientId) {
        self.held.remove(&client);
        self.untold.remove(&client);
        self.seeking.remove(&client);
        self.unheard.retain(|told| told.client != client);
        self.heirs.retain(|told| told.heir != client);
    }

    /// What a client was granted is another one's, whose agent this is as well (`beside`), or not. `since` as in [`told`](Self::told).
    pub(super) fn inherit(
        &mut self,
        client: ClientId,
        heir: ClientId,
        (since, beside, now): (u64, bool, Nanos),
    ) {
        let until = if beside { 0 } else { now.saturating_add(TOLD_FOR) };
        // A head that has heard nothing of it yet knows the one in between perhaps not at all.
        self.heirs.iter_mut().filter(|told| told.heir == client).for_each(|told| told.heir = heir);
        self.heirs.push(HeirTold { client, heir, since, until });
        let over = self.heirs.iter().filter(|t| t.heir == heir).count().saturating_sub(HEIRS_TOLD);
        let mut oldest = 0..over;
        self.heirs.retain(|told| told.heir != heir || oldest.next().is_none());
        if !beside && planted(Bug::HeirRemembered) {
            return;
        }
        let Some(left) = self.held.remove(&client) else { return };
        if !beside {
            // The other agent learns of it when its client asks for each.
            return;
        }
        let files = self.held.entry(heir).or_default();
        for (ino, mut file) in left {
            file.rename(client, heir);
            files.entry(ino).or_default().join(file);
        }
    }

    /// Whether a client may have locked something; of one of an earlier run that is not known.
    pub(super) fn may_hold(&self, client: ClientId) -> bool {
        self.held.contains_key(&client)
            || self.untold.contains(&client)
            || self.seeking.contains(&client)
    }

    /// Whether what a client has granted itself is still on its way back.
    pub(super) fn returns_of(&self, client: ClientId) -> bool {
        self.returns.iter().any(|back| back.client() == client)
    }

    /// A client of an earlier run goes on. Which locks it has, it says when it is asked for them, soon.
    pub(super) fn take_up(&mut self, client: ClientId) {
        self.untold.insert(client);
    }

    /// No client is left.
    pub(super) fn drop_all(&mut self) {
        self.held.clear();
        self.untold.clear();
        self.returns.clear();
        self.unheard.clear();
        self.heirs.clear();
        self.sought.clear();
        self.seeking.clear();
    }

    /// The head is told what came back; `since`: the number of the question that was asked last.
    pub(super) fn told(
        &mut self,
        (client, ino): (ClientId, InodeId),
        token: u64,
        says: SoleSays,
        since: u64,
    ) {
        self.unheard.push(Unheard { client, ino, token, says, since });
    }

    /// The head has answered that question: what it was told before, it has heard.
    pub(super) fn heard(&mut self, question: u64) {
        self.unheard.retain(|told| told.since >= question);
        self.heirs.retain(|told| told.since >= question || told.until > 0);
    }

    /// Whatever was under way is lost: whose heirs the head is told of again, before it is told what they hold.
    pub(super) fn heirs_again(&mut self, since: u64) -> Vec<Message> {
        let again = self.heirs.iter_mut().map(|told| {
            told.since = since;
            Message::LockHeir { client: told.client, heir: told.heir }
        });
        again.collect()
    }

    /// What is told of heirs on other nodes is told no more.
    pub(super) fn forget_told(&mut self, now: Nanos) {
        self.heirs.retain(|told| told.until == 0 || now < told.until);
    }

    /// Clients of which the head is told that what they had locked is others'.
    pub(super) fn leavers(&self) -> BTreeSet<ClientId> {
        self.heirs.iter().map(|told| told.client).collect()
    }

    /// A client seeks what others have left to it: the head may know of locks that are not known here, until it has asked for each.
    pub(super) fn seeks(&mut self, client: ClientId) {
        if !self.untold.contains(&client) && !planted(Bug::SeekerReported) {
            self.seeking.insert(client);
        }
    }

    /// There were none.
    pub(super) fn got_nothing(&mut self, client: ClientId) {
        self.seeking.remove(&client);
    }

    /// What the head was told of that heir, and may not have heard.
    pub(super) fn left_to(&self, heir: ClientId) -> Vec<Message> {
        let of_it = self.heirs.iter().filter(|told| told.heir == heir);
        of_it.map(|told| Message::LockHeir { client: told.client, heir }).collect()
    }

    /// The head has given a client the sole use of a file anew.
    pub(super) fn given_anew(&mut self, client: ClientId, ino: InodeId) {
        self.unheard.retain(|told| (told.client, told.ino) != (client, ino));
    }

    /// Whatever was under way is lost: what it is told again, before any question after the one asked last.
    pub(super) fn tell_again(&mut self, client: ClientId, since: u64) -> Vec<Message> {
        let own = self.unheard.iter_mut().filter(|told| told.client == client);
        own.map(|told| {
            told.since = since;
            told.message()
        })
        .collect()
    }

    /// What came back by that token (0: any), if the head may not have heard it.
    pub(super) fn told_of(&self, client: ClientId, ino: InodeId, token: u64) -> Option<Message> {
        let same = |told: &&Unheard| {
            (told.client, told.ino) == (client, ino) && (told.token == token || told.token == 0)
        };
        self.unheard.iter().find(same).map(Unheard::message)
    }

    /// Whether no client of this machine may believe that an earlier run's head has left locks to it.
    fn is_quiet(&self) -> bool {
        !self.returns.iter().any(Return::is_of_before) || planted(Bug::SoleOfBeforeUnheard)
    }

    /// How many locks of a file a client is known to have.
    pub(super) fn count(&self, client: ClientId, ino: InodeId) -> usize {
        let file = self.held.get(&client).and_then(|files| files.get(&ino));
        file.map_or(0, |file| file.iter().count())
    }

    /// What a client has locked of a file is this, and nothing else.
    pub(super) fn replace(&mut self, client: ClientId, ino: InodeId, locks: FileLocks) {
        let files = self.held.entry(client).or_default();
        if locks.is_empty() {
            files.remove(&ino);
        } else {
            files.insert(ino, locks);
        }
        if files.is_empty() {
            self.held.remove(&client);
        }
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

    /// What a client holds, for a head that does not know.
    pub(super) fn report(&self, client: ClientId, most: usize) -> Vec<Message> {
        let files = self.held.get(&client).filter(|_| !planted(Bug::LocksUnreported));
        let files = files.into_iter().flatten();
        let all: Vec<(InodeId, Lock)> =
            files.flat_map(|(ino, file)| file.iter().map(|h| (*ino, h.lock))).collect();
        let mut pieces: Vec<Vec<_>> = all.chunks(most).map(<[_]>::to_vec).collect();
        // What clients of an earlier run had locked the head knows better than this process, until they have asked for it
        // again. (What they give up meanwhile waits in their slots.)
        let whole = !self.untold.contains(&client) && !self.seeking.contains(&client);
        if pieces.is_empty() && whole {
            // "Nothing" is told, too: the head may have granted what never arrived here.
            pieces.push(Vec::new());
        }
        let piece = |(n, locks)| Message::LockHeld { client, first: whole && n == 0, locks };
        pieces.into_iter().enumerate().map(piece).collect()
    }
}

impl Node {
    /// the head has answered; the memory of what is held follows.
    pub(super) fn note_lock(&mut self, client: ClientId, ino: InodeId, ask: LockAsk, errno: u16) {
        let LockAsk::Set { lock, .. } = ask else { return };
        if errno == 0 {
            // What it has from now on it has not left to anybody.
            self.agent.locking.heirs.retain(|told| told.client != client);
            self.agent.locking.remember(client, ino, lock);
        } else if lock.space == LockSpace::Flock && errno == Errno::AGAIN.0 {
            // The head has given up the old mode (see `LockTable::set`).
            self.agent.locking.remember(client, ino, Lock { kind: LockKind::None, ..lock });
        }
    }

    /// a lock that the client waits for may be free.
    pub(super) fn lock_freed(&self, client: ClientId) {
        if let Some(client) = self.agent.clients.get(&client) {
            client.tell_of_locks();
        }
    }

    /// a new head knows no waiters; those who wait must ask again.
    pub(super) fn wake_lock_waiters(&self) {
        for client in self.agent.clients.values() {
            client.set_lock_run(self.agent.locking.run);
            client.tell_of_locks();
        }
    }

    // --- head ---

    /// An agent asks.
    pub(super) fn lock_wanted(&mut self, from: NodeId, message: Message) -> Result<(), Failure> {
        self.judge_lock(from, message, None)
    }

    /// `put_off`: it was put off until then, and is put off no longer, whoever leaves meanwhile.
    fn judge_lock(
        &mut self,
        from: NodeId,
        message: Message,
        put_off: Option<Nanos>,
    ) -> Result<(), Failure> {
        let Message::LockWant { client, ino, token, ask } = message else { return Ok(()) };
        if client.node() != from {
            self.env.counters.bad_messages += 1;
            return Ok(());
        }
        let judges = self.judges_locks();
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if !judges {
            // Not before every agent has said what its clients hold, and clients of lost nodes have
            // learnt that they hold nothing.
            if head.early_locks.len() < self.env.config.limits.unready {
                head.early_locks.push((from, message));
            } else {
                head.missed.insert(from);
            }
            return Ok(());
        }
        if !head.known.contains_key(&client) {
            return Ok(());
        }
        if let LockAsk::Set { lock, .. } = ask {
            self.retract(client, ino, lock);
        }
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let asks = match ask {
            LockAsk::Set { lock, .. } => lock.kind != LockKind::None,
            LockAsk::Test { .. } => !planted(Bug::TestBesideSole),
            LockAsk::Cancel { .. } => false,
        };
        if asks
            && let Some(other) = head.locks.sole(ino)
            && other != client
        {
            self.await_sole(from, message, (other, ino));
            return Ok(());
        }
        let (mut told, mut found) = (BTreeSet::new(), None);
        let answer = match ask {
            LockAsk::Set { lock, wait } => match head.may_lock(&self.volume, client, ino, &lock)? {
                Ok(()) => {
                    let wish = Wish { client, ino, lock, wait };
                    head.locks.set(self.env.now, wish, &mut told)
                }
                refused => refused,
            },
            LockAsk::Test { lock } => head.may_lock(&self.volume, client, ino, &lock)?.map(|()| {
                found = head.locks.test(client, ino, lock).map(|held| {
                    // A process number says nothing on another machine.
                    let here = held.client.node() == client.node();
                    Lock { pid: if here { held.lock.pid } else { 0 }, ..held.lock }
                });
            }),
            LockAsk::Cancel { wait: LOCK_LEAVING } => {
                head.locks.leaving(self.env.now, client, ino);
                Ok(())
            }
            LockAsk::Cancel { wait } => {
                head.locks.cancel(self.env.now, client, wait, &mut told);
                Ok(())
            }
        };
        let barred = match ask {
            LockAsk::Set { lock, wait: 0 } if answer == Err(Errno::AGAIN) => Some(lock),
            LockAsk::Test { lock } if found.is_some() => Some(lock),
            _ => None,
        };
        if let Some(lock) = barred
            && let Some(until) = head.locks.in_doubt(self.env.now, client, ino, lock)
            && let first = put_off.filter(|_| !planted(Bug::PutOffAgain))
            && let until = first.map_or(until, |first| first.min(until))
            && until > self.env.now
            && head.doubtful_locks.len() < self.env.config.limits.unready
        {
            head.doubtful_locks.push((until, from, message));
            self.tell_of_locks(told);
            return Ok(());
        }
        match answer {
            Ok(()) => self.env.counters.locks += 1,
            Err(_) => self.env.counters.locks_refused += 1,
        }
        let errno = answer.map_or_else(|e| e.0, |()| 0);
        self.to_agent(client, Message::LockDone { client, token, errno, found });
        self.tell_of_locks(told);
        match ask {
            LockAsk::Set { lock: Lock { kind: LockKind::None, .. }, .. } => {
                self.look_at_doubtful(|(_, _, message)| is_about(message, ino))
            }
            _ => Ok(()),
        }
    }

    /// Head: whether locks are granted. Not before clients of this machine that an earlier run has left locks to are out of the
    /// operations in which they may believe it.
    fn judges_locks(&self) -> bool {
        let ready = self.part.head().is_some_and(|head| head.ready);
        ready && self.env.now >= self.view.grants_from && self.agent.locking.is_quiet()
    }

    /// Head: the owner asks for something else by now, so that what it asked for before, and was not told of yet, must not be
    /// granted after it: nobody would give that up.
    fn retract(&mut self, client: ClientId, ino: InodeId, lock: Lock) {
        let Some(head) = self.part.head_mut().filter(|_| !planted(Bug::AwaitedGrantedLate)) else {
            return;
        };
        let mut tokens = Vec::new();
        head.doubtful_locks.retain(|(_, _, message)| {
            let Message::LockWant {
                client: who,
                ino: of,
                token,
                ask: LockAsk::Set { lock: l, .. },
            } = message
            else {
                return true;
            };
            let same = (*who, *of, l.owner, l.space) == (client, ino, lock.owner, lock.space);
            if same {
                tokens.push(*token);
            }
            !same
        });
        for token in tokens {
            let errno = Errno::AGAIN.0;
            self.to_agent(client, Message::LockDone { client, token, errno, found: None });
        }
    }

    // --- sole use ---

    /// Head: it is answered when the file's locks are back from the client that they are left to.
    fn await_sole(&mut self, from: NodeId, message: Message, (other, ino): (ClientId, InodeId)) {
        let most = self.env.config.limits.unready;
        let Some(head) = self.part.head_mut() else { return };
        let token = head.locks.sole_token(ino);
        let asked = head.doubtful_locks.iter().any(|(_, _, m)| is_about(m, ino));
        if !head.doubtful_locks.iter().any(|(until, _, _)| *until == Nanos::MAX) {
            head.soles_asked = self.env.now;
        }
        if head.doubtful_locks.len() < most {
            head.doubtful_locks.push((Nanos::MAX, from, message));
        } else {
            head.missed.insert(from);
        }
        if !asked {
            let told = Message::LockSoleTold { client: other, ino, token, given: false };
            self.to_agent(other, told);
        }
    }

    /// Head: what an agent says of the sole use of a file's locks.
    pub(super) fn sole_said(
        &mut self,
        client: ClientId,
        (ino, token): (InodeId, u64),
        says: SoleSays,
    ) -> Result<(), Failure> {
        let fresh = self.token();
        let (now, gives) = (self.env.now, self.judges_locks() && self.env.config.limits.soles > 0);
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let Some(known) = head.known.get(&client) else { return Ok(()) };
        let awaited = head.doubtful_locks.iter().any(|(_, _, m)| is_about(m, ino));
        let mut told = BTreeSet::new();
        match says {
            SoleSays::Wants => {
                if head.locks.sole(ino) == Some(client) {
                    // What it was told, or said, was lost, or is on its way: it says which.
                    let (token, given) = (head.locks.sole_token(ino), false);
                    self.to_agent(client, Message::LockSoleTold { client, ino, token, given });
                    return Ok(());
                }
                let free = gives && !awaited && known.pins.contains(&ino);
                if free && head.locks.give_sole(now, client, (ino, fresh)) {
                    let (token, given) = (fresh, true);
                    self.to_agent(client, Message::LockSoleTold { client, ino, token, given });
                }
                return Ok(());
            }
            SoleSays::Has => {
                // It cannot be where somebody else's lock was reported first.
                if !head.locks.adopt_sole(client, ino, token) || awaited {
                    let given = false;
                    self.to_agent(client, Message::LockSoleTold { client, ino, token, given });
                }
                // Another head has given it: none of this one's is like it.
                self.next_token = self.next_token.max(token.min(1 << 62));
                return Ok(());
            }
            SoleSays::Unused => {
                head.locks.end_sole(client, ino, token);
            }
            SoleSays::Returns { locks, vouched } => {
                if head.locks.end_sole(client, ino, token) || vouched {
                    head.locks.replace(now, client, (ino, &locks), &mut told);
                }
            }
        }
        self.tell_of_locks(told);
        self.look_at_doubtful(|(_, _, message)| is_about(message, ino))
    }

    /// Head: an agent begins anew, and what it was told to give back may be lost.
    pub(super) fn ask_soles_again(&mut self, client: ClientId) {
        let Some(head) = self.part.head() else { return };
        let awaited = |ino: &InodeId| head.doubtful_locks.iter().any(|(_, _, m)| is_about(m, *ino));
        let inodes = head.locks.soles_of(client).filter(awaited);
        let soles: Vec<_> = inodes.map(|ino| (ino, head.locks.sole_token(ino))).collect();
        for (ino, token) in soles {
            self.to_agent(client, Message::LockSoleTold { client, ino, token, given: false });
        }
    }

    /// Head: what was put off is asked once more.
    fn look_at_doubtful(
        &mut self,
        which: impl Fn(&(Nanos, NodeId, Message)) -> bool,
    ) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        let some: Vec<_> = head.doubtful_locks.extract_if(.., |doubt| which(doubt)).collect();
        some.into_iter()
            .try_for_each(|(until, from, message)| self.judge_lock(from, message, Some(until)))
    }

    /// Head: what is not known by now is answered as it is.
    pub(super) fn end_doubts(&mut self) -> Result<(), Failure> {
        let now = self.env.now;
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        // Who shall give locks back is told again: that, or the answer, may be lost.
        let again = now >= head.soles_asked.saturating_add(SOLE_ASKED_AGAIN);
        if again {
            head.soles_asked = now;
        }
        self.look_at_doubtful(|(until, _, _)| *until <= now || again && *until == Nanos::MAX)
    }

    /// When that is next.
    pub(super) fn doubts_deadline(&self) -> Option<Nanos> {
        let head = self.part.head()?;
        let again = head.soles_asked.saturating_add(SOLE_ASKED_AGAIN);
        let until = |until: &Nanos| if *until == Nanos::MAX { again } else { *until };
        head.doubtful_locks.iter().map(|(doubt, _, _)| until(doubt)).min()
    }

    /// An agent says what a client of its holds.
    pub(super) fn locks_reported(
        &mut self,
        from: NodeId,
        client: ClientId,
        first: bool,
        locks: &[(InodeId, Lock)],
    ) {
        if client.node() != from {
            self.env.counters.bad_messages += 1;
            return;
        }
        let Some(head) = self.part.head_mut() else { return };
        if !head.known.contains_key(&client) {
            return;
        }
        let mut told = BTreeSet::new();
        if first {
            head.locks.gone(self.env.now, client, &mut told);
        }
        for (ino, lock) in locks {
            if lock.kind != LockKind::None && !head.locks.adopt(client, *ino, *lock) {
                // An unlock whose answer was lost: the agent asks for it again.
                log::debug!("client {:#x}: its lock on {ino} was given up before", client.0);
            }
        }
        self.tell_of_locks(told);
    }

    /// An agent says that a client of its has taken the place of another.
    pub(super) fn locks_inherited(
        &mut self,
        from: NodeId,
        client: ClientId,
        heir: ClientId,
    ) -> Result<(), Failure> {
        if !self.may_leave_to(from, client, heir) {
            // Or it was said again, of what is long since done.
            log::debug!("client {:#x} leaves nothing to {:#x}", client.0, heir.0);
            return Ok(());
        }
        let Some(head) = self.part.head_mut() else { return Ok(()) };
        if !head.known.contains_key(&heir) {
            return Ok(());
        }
        let mut told = BTreeSet::new();
        let soles = head.locks.inherit(self.env.now, client, heir, &mut told);
        self.note_left(from, heir);
        self.tell_of_locks(told);
        self.look_at_doubtful(|(_, _, message)| soles.iter().any(|ino| is_about(message, *ino)))
    }

    /// A client ended.
    pub(super) fn forget_locks(&mut self, client: ClientId) -> Result<(), Failure> {
        let Some(head) = self.part.head_mut().filter(|_| !planted(Bug::LocksOfEndedKept)) else {
            return Ok(());
        };
        let mut told = BTreeSet::new();
        let soles = head.locks.end_soles(client);
        head.locks.gone(self.env.now, client, &mut told);
        self.tell_of_locks(told);
        self.look_at_doubtful(|(_, _, message)| soles.iter().any(|ino| is_about(message, *ino)))
    }

    /// The takeover is done; what was asked during it is answered.
    pub(super) fn serve_early_locks(&mut self) -> Result<(), Failure> {
        let judges = self.judges_locks();
        let Some(head) = self.part.head_mut().filter(|_| judges) else { return Ok(()) };
        let early = std::mem::take(&mut head.early_locks);
        early.into_iter().try_for_each(|(from, message)| self.lock_wanted(from, message))?;
        self.tell_missed();
        Ok(())
    }

    fn tell_of_locks(&mut self, told: BTreeSet<ClientId>) {
        for client in told {
            self.to_agent(client, Message::LockFree { client });
        }
    }
}

impl Unheard {
    fn message(&self) -> Message {
        let (client, ino, token, says) = (self.client, self.ino, self.token, self.says.clone());
        Message::LockSole { client, ino, token, says }
    }
}

/// Whether a message asks about the locks of a file.
fn is_about(message: &Message, file: InodeId) -> bool {
    matches!(message, Message::LockWant { ino, .. } if *ino == file)
}

impl Head {
    /// Only what a client has open, and could open now, can it lock; freeing is always allowed.
    fn may_lock(
        &self,
        volume: &Volume,
        client: ClientId,
        ino: InodeId,
        lock: &Lock,
    ) -> Result<Result<(), Errno>, Failure> {
        if lock.kind == LockKind::None {
            return Ok(Ok(()));
        }
        let Some(known) = self.known.get(&client) else { return Ok(Err(Errno::STALE)) };
        if !known.pins.contains(&ino) {
            return Ok(Err(Errno::BADF));
        }
        let Some(record) = volume.attr(ino)? else { return Ok(Err(Errno::BADF)) };
        let creds = known.creds();
        let may = known.rights.contains(&ino)
            || creds.may(&record, R).is_ok()
            || creds.may(&record, W).is_ok();
        Ok(if may { Ok(()) } else { Err(Errno::ACCES) })
    }
}
