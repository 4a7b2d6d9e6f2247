//! Heirs on other nodes: a virtual machine moves, and the device that it has there goes on with what its device here had locked.
//!
//! Who shows a secret ([`heir`](super::heir)) and finds nobody beside it who had it, has the head ask the agents of all other nodes (`HeirSeek`,
//! `HeirSought`). Each looks for clients of the same user that have ended with that secret, or live and leave
//! (`storage::format::control`, "Heir"), takes back what those had granted themselves, and gives the head their locks for the heir
//! (`LockHeir`), in one step each, so that nobody who waits gets one in between. Then it answers (`HeirAnswer`), and when all have,
//! the heir's agent is told (`HeirFound`). Nobody is waited for who does not answer: the heir's agent asks anew, and gives up in the end.

use std::collections::BTreeSet;

use base::planted::{Bug, planted};
use base::{ClientId, Nanos, NodeId};

use super::heir::Inherited;
use super::message::Message;
use super::{Failure, Node};

/// Who seeks asks again after so long: a message, or the head, may be lost.
pub(super) const SEEK_AGAIN: Nanos = 500_000_000;
/// For so long in all.
pub(super) const SEEK_FOR: Nanos = 3_000_000_000;
/// An agent whose clients do not get ready answers no more after so long.
const ANSWER_WITHIN: Nanos = 2_000_000_000;
/// Clients that a head seeks for at once.
const SEEKING_MAX: usize = 256;
/// Questions that an agent answers at once.
const SOUGHT_MAX: usize = 64;

/// Agent: what it was asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sought {
    heir: ClientId,
    token: u64,
    user: u32,
    secret: u128,
    until: Nanos,
}

/// Head: who seeks, and who has not answered.
#[derive(Debug)]
pub(super) struct Seeking {
    heir: ClientId,
    token: u64,
    awaited: BTreeSet<NodeId>,
    /// Something was left to it.
    given: bool,
    /// It has given up by then.
    until: Nanos,
}

impl Seeking {
    /// There is a new view: what was asked in the one before may be lost.
    pub(super) fn ask_all(&mut self, chain: &[NodeId]) {
        self.awaited = chain.iter().copied().filter(|node| *node != self.heir.node()).collect();
    }

    /// Whether it is for that client.
    pub(super) fn is_for(&self, client: ClientId) -> bool {
        self.heir == client
    }

    /// Whether a node was asked for that heir.
    pub(super) fn asks(&self, node: NodeId, heir: ClientId) -> bool {
        self.heir == heir && self.awaited.contains(&node)
    }
}

impl Node {
    /// Head: a client shows a secret that nobody beside it had.
    pub(super) fn seek_heirs_of(
        &mut self,
        from: NodeId,
        heir: ClientId,
        (token, secret): (u64, u128),
    ) {
        let Some(head) = self.part.head_mut() else { return };
        if !head.ready {
            head.missed.insert(from);
            return;
        }
        // (It is asked again, if it lives.)
        let Some(known) = head.known.get(&heir) else { return };
        let user = known.identity.uid;
        let until = self.env.now.saturating_add(SEEK_FOR + SEEK_AGAIN);
        let given = head.seeking.iter().any(|seeking| seeking.heir == heir && seeking.given);
        head.seeking.retain(|seeking| seeking.heir != heir);
        let awaited: BTreeSet<NodeId> =
            self.view.chain.iter().copied().filter(|node| *node != from).collect();
        if awaited.is_empty() {
            self.to_agent(heir, Message::HeirFound { client: heir, token, given });
            return;
        }
        if head.seeking.len() >= SEEKING_MAX {
            return;
        }
        head.seeking.push(Seeking { heir, token, awaited: awaited.clone(), given, until });
        for node in awaited {
            let asks = Message::HeirSought { heir, token, user, secret };
            if node == self.me() {
                self.local.push_back(asks);
            } else {
                self.send(node, asks);
            }
        }
    }

    /// Head: all that was left to the heir on that node it has by now.
    pub(super) fn heir_answered(&mut self, from: NodeId, heir: ClientId, token: u64) {
        let Some(head) = self.part.head_mut() else { return };
        let same = |seeking: &&mut Seeking| (seeking.heir, seeking.token) == (heir, token);
        let Some(seeking) = head.seeking.iter_mut().find(same) else { return };
        seeking.awaited.remove(&from);
        if seeking.awaited.is_empty() {
            let given = seeking.given;
            head.seeking.retain(|seeking| seeking.heir != heir);
            self.to_agent(heir, Message::HeirFound { client: heir, token, given });
        }
    }

    /// Agent: the head asks for what is left to a client of another node.
    pub(super) fn heir_sought(&mut self, heir: ClientId, token: u64, (user, secret): (u32, u128)) {
        if secret == 0 {
            self.to_head(Message::HeirAnswer { heir, token });
            return;
        }
        let until = self.env.now.saturating_add(ANSWER_WITHIN);
        let sought = &mut self.agent.locking.sought;
        sought.retain(|before| before.heir != heir);
        if sought.len() < SOUGHT_MAX {
            sought.push(Sought { heir, token, user, secret, until });
        }
    }

    /// Agent: goes on with what was asked; `true` when something was answered.
    pub(super) fn step_sought(&mut self) -> Result<bool, Failure> {
        if self.agent.locking.sought.is_empty() {
            return Ok(false);
        }
        let (mut answered, mut kept) = (false, Vec::new());
        for sought in std::mem::take(&mut self.agent.locking.sought) {
            let Sought { heir, token, user, secret, until } = sought;
            match self.leave_one(heir, (user, secret), false)? {
                Inherited::Nobody => {
                    answered = true;
                    // What was said before may be lost with its link, and this not.
                    for told in self.agent.locking.left_to(heir) {
                        self.to_head(told);
                    }
                    self.to_head(Message::HeirAnswer { heir, token });
                }
                _ if self.env.now >= until => {}
                Inherited::One | Inherited::Later | Inherited::Waits => kept.push(sought),
            }
        }
        kept.append(&mut self.agent.locking.sought);
        self.agent.locking.sought = kept;
        Ok(answered)
    }

    /// Who seeks no more is forgotten, and what nobody can have missed by now.
    pub(super) fn forget_seekers(&mut self) {
        let now = self.env.now;
        self.agent.locking.forget_told(now);
        if let Some(head) = self.part.head_mut() {
            head.seeking.retain(|seeking| now < seeking.until);
        }
    }

    /// Head: a client of a node has left something to `heir`.
    pub(super) fn note_left(&mut self, from: NodeId, heir: ClientId) {
        let Some(head) = self.part.head_mut() else { return };
        let asks = |seeking: &&mut Seeking| seeking.asks(from, heir);
        head.seeking.iter_mut().filter(asks).for_each(|seeking| seeking.given = true);
    }

    /// Head: whether an agent may say that a client of its leaves what it has locked to `heir`.
    pub(super) fn may_leave_to(&self, from: NodeId, client: ClientId, heir: ClientId) -> bool {
        let Some(head) = self.part.head() else { return false };
        let user = |client| head.known.get(&client).map(|known| known.identity.uid);
        let strangers = user(client).is_some() && user(client) != user(heir);
        let asked = || head.seeking.iter().any(|seeking| seeking.asks(from, heir));
        (!strangers || planted(Bug::HeirOfAnyUser))
            && (heir.node() == from || asked() || planted(Bug::HeirUnasked))
    }
}
