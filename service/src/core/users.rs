//! What one user may have of a node, and how fast. Root is bound by none of it: its clients are the mounts, and the
//! administrator who looks what the others do.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Nanos};

use super::client::Client;
use super::{Failure, Node};

/// Bounds of one user, but root, on a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PerUser {
    /// Leases of all its clients. Beyond, each further one takes another back.
    pub leases: u64,
    /// Requests a second, of all its clients. Beyond, they wait.
    pub requests: u64,
}

impl PerUser {
    /// As shipped.
    pub const SHIPPED: Self = Self { leases: 524_288, requests: 50_000 };
}

impl Default for PerUser {
    fn default() -> Self {
        Self::SHIPPED
    }
}

/// Leases beyond the limit while others are on their way back; then there are none.
const LEASES_SLACK: u64 = 4096;
const SECOND: Nanos = 1_000_000_000;
/// A user may have kept so much of its requests for later.
const BURST: Nanos = SECOND;
/// Who asks too fast is looked at again after this time at the earliest: many at once cost less.
const PAUSE: Nanos = 1_000_000;
/// Expulsions with no more than that between them are one misbehaviour, and the longer they are past the less they count.
const SPAN: Nanos = 60 * SECOND;
/// What the second of them costs: time in which the user does not attach. Each further one doubles it.
const FIRST: Nanos = 100_000_000;
/// The most that one costs.
const MOST: Nanos = 30 * SECOND;

/// What is known of a user.
#[derive(Clone, Copy, Debug, Default)]
struct User {
    /// Its requests so far are paid for at this time.
    paid: Nanos,
    /// Expulsions that count.
    expelled: u32,
    /// When the last was.
    last: Nanos,
    /// It attaches no client before this time.
    barred_until: Nanos,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Users(BTreeMap<u32, User>);

impl Users {
    /// Counts a request; or when it can be counted.
    pub(super) fn ask(&mut self, uid: u32, limits: &PerUser, now: Nanos) -> Result<(), Nanos> {
        if uid == 0 || planted(Bug::RequestsUncounted) {
            return Ok(());
        }
        let user = self.0.entry(uid).or_default();
        let paid = user.paid.max(now);
        if paid > now + BURST {
            return Err((paid - BURST).max(now + PAUSE));
        }
        user.paid = paid + SECOND / limits.requests.max(1);
        Ok(())
    }

    /// A client of a user was expelled.
    fn expelled(&mut self, uid: u32, now: Nanos) {
        if uid == 0 || planted(Bug::ExpelledFree) {
            return;
        }
        let user = self.0.entry(uid).or_default();
        let spans = now.saturating_sub(user.last) / SPAN;
        user.expelled = user.expelled.saturating_sub(u32::try_from(spans).unwrap_or(u32::MAX));
        let wait = match user.expelled {
            0 => 0,
            n => FIRST.saturating_mul(1 << (n - 1).min(20)).min(MOST),
        };
        user.expelled = (user.expelled + 1).min(20);
        user.last = now;
        user.barred_until = now + wait;
    }

    fn is_barred(&self, uid: u32, now: Nanos) -> bool {
        self.0.get(&uid).is_some_and(|user| now < user.barred_until)
    }

    /// Forgets those of whom nothing counts any more.
    fn forget(&mut self, now: Nanos) {
        let counts =
            |user: &User| user.paid > now || now < user.last + SPAN * u64::from(user.expelled);
        self.0.retain(|_, user| counts(user));
    }
}

impl Node {
    /// Why a user does not attach now, if its clients were expelled again and again.
    pub(super) fn is_barred(&mut self, uid: u32) -> bool {
        self.agent.users.is_barred(uid, self.env.now)
    }

    /// A client was expelled.
    pub(super) fn price_expulsion(&mut self, id: ClientId) {
        if let Some(client) = self.agent.clients.get(&id) {
            self.agent.users.expelled(client.identity.uid, self.env.now);
        }
    }

    /// Clients whose requests were too many are looked at when some of them can be served.
    pub(super) fn collect_waiting(&mut self) -> Result<(), Failure> {
        let now = self.env.now;
        self.agent.users.forget(now);
        let due = |c: &&Client| c.waits_until.is_some_and(|at| now >= at);
        for id in self.agent.clients.values().filter(due).map(|c| c.id).collect::<Vec<_>>() {
            self.collect_requests(id)?;
            self.agent.active.insert(id);
        }
        Ok(())
    }

    /// When that is.
    pub(super) fn waiting_deadline(&self) -> Option<Nanos> {
        self.agent.clients.values().filter_map(|c| c.waits_until).min()
    }

    /// Whether a client may have one lease more. If its user has too many, one of them is on its way back then.
    pub(super) fn may_hold_more(&mut self, id: ClientId, ino: InodeId) -> bool {
        let Some(client) = self.agent.clients.get(&id) else { return true };
        let uid = client.identity.uid;
        if uid == 0 || client.has_lease(ino) || planted(Bug::LeasesUncounted) {
            return true;
        }
        // Who waits for an heir has its leases still.
        let there = |c: &Client| !c.gone || c.heir_until.is_some();
        let of_user = |c: &&Client| c.identity.uid == uid && there(c) && !c.expelled;
        let held: u64 = self.agent.clients.values().filter(of_user).map(Client::lease_count).sum();
        let limit = self.env.config.per_user.leases;
        if held < limit {
            return true;
        }
        self.env.counters.leases_over += 1;
        // Of the client that has most of them.
        let most = self.agent.clients.values().filter(of_user).max_by_key(|c| c.lease_count());
        let most = most.map(|c| c.id);
        if let Some(id) = most
            && let Some(older) = self.agent.clients.get_mut(&id).and_then(|c| c.next_to_go(ino))
        {
            self.release_wanted(id, older);
        }
        held < limit.saturating_add(LEASES_SLACK)
    }
}
