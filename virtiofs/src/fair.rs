//! Who is served next, of tenants that share processors by weight: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) of what their
//! requests cost: each as one of its kind does as a rule (`price.rs`), so that nobody pays for what others do to its requests.
//!
//! Here are neither threads nor clocks: times and costs come in as nanoseconds, and the same calls give the same order.
//! `share.rs` has the threads, and measures.
//!
//! Each tenant has had its share up to a *tag*, in virtual time: what it was charged, divided by its weight. Of those who wait, the one
//! with the least tag is next. What was not used is kept as credit for a while, and so is bounded what a tenant can ask for at once that comes
//! back after a pause. One that has most of its credit is *polite*: it does not wait for a place at all.
//!
//! Who is behind its share need not be one that asks for little: floods whose guests cannot ask fast enough are all behind theirs. So it is also
//! kept how much of a processor each has used lately. One that has used only a small part of its share is *light*: it goes before the polite.

/// How far a tenant of weight 1 may get ahead of one that waits: handing a place over costs a wake-up.
pub(crate) const QUANTUM: f64 = 200e3;
/// What a tenant that was away may use before the others, on each place. It must be much longer than a guest takes to ask again, or
/// the tenant of the greatest weight, which is soonest without requests, loses of its share.
const CREDIT: f64 = 4e6;
/// A tenant of the least weight has that much: a request or two.
const CREDIT_LEAST: f64 = 100e3;
/// Who has waited for so long is next, whatever it had.
pub(crate) const PATIENCE: u64 = 500_000_000;

/// What a tenant has used counts as lately for about so long.
const LATELY: f64 = 20e6;
/// Light is who has used less than this part of its share lately, and stays so up to the second part.
const LIGHT: (f64, f64) = (0.25, 0.4);
/// Who has used less than this lately does not count among those that share.
const NOTHING: f64 = 50e3;

#[derive(Debug)]
struct Tenant {
    weight: f64,
    /// Up to when it has had its share, in virtual time.
    had: f64,
    /// Threads that wait, and that have a place.
    waiting: usize,
    running: usize,
    /// Since when it waits: for the first place, or for the next.
    since: u64,
    /// What it uses of a place before it gives it away, as a rule.
    usual: f64,
    /// All that it was charged, in nanoseconds.
    charged: f64,
    /// What it had used lately, at that time.
    lately: f64,
    noted: u64,
    light: bool,
}

impl Tenant {
    fn is_active(&self) -> bool {
        self.waiting + self.running > 0
    }

    /// Whether it has asked for anything lately.
    fn is_there(&self, now: u64) -> bool {
        let fades = (4.0 * LATELY) as u64;
        self.is_active() || self.lately > NOTHING && now.saturating_sub(self.noted) < fades
    }

    /// What it has used lately, which fades.
    fn lately(&self, now: u64) -> f64 {
        self.lately * (-(now.saturating_sub(self.noted) as f64) / LATELY).exp()
    }
}

/// What whoever has a place was charged in advance, and has used of it.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Account {
    advance: f64,
    used: f64,
}

/// The order.
#[derive(Debug)]
pub(crate) struct Fair {
    tenants: Vec<Tenant>,
    places: usize,
    /// With a place. More than there are places, if polite ones were let in.
    running: usize,
    waiting: usize,
    /// The virtual time: the tag of the one that began last.
    clock: f64,
    /// The last time that was told.
    now: u64,
}

impl Fair {
    pub(crate) fn new(places: usize) -> Self {
        Self {
            tenants: Vec::new(),
            places: places.max(1),
            running: 0,
            waiting: 0,
            clock: 0.0,
            now: 0,
        }
    }

    /// One more tenant; its number.
    pub(crate) fn join(&mut self, weight: f64) -> usize {
        self.tenants.push(Tenant {
            weight,
            had: self.clock,
            waiting: 0,
            running: 0,
            since: 0,
            usual: 0.0,
            charged: 0.0,
            lately: 0.0,
            noted: self.now,
            light: true,
        });
        self.tenants.len() - 1
    }

    /// What a tenant may be behind the clock, in virtual time.
    fn credit(&self, tenant: usize) -> f64 {
        let own = &self.tenants[tenant];
        let rivals = self.tenants.iter().filter(|other| other.is_active());
        let all: f64 = rivals.map(|other| other.weight).sum();
        let all = if own.is_active() { all } else { all + own.weight };
        (CREDIT * self.places as f64 / all).max(CREDIT_LEAST / own.weight)
    }

    /// Where its next turn would begin.
    fn tag(&self, tenant: usize) -> f64 {
        let had = self.tenants[tenant].had;
        if had >= self.clock { had } else { had.max(self.clock - self.credit(tenant)) }
    }

    /// Whether it has used so little lately that it need not wait.
    pub(crate) fn is_polite(&self, tenant: usize) -> bool {
        let had = self.tenants[tenant].had;
        had < self.clock && had <= self.clock - self.credit(tenant) / 2.0
    }

    /// So late it is.
    pub(crate) fn at(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    /// Whether it has used only a small part of its share lately.
    pub(crate) fn is_light(&self, tenant: usize) -> bool {
        self.tenants[tenant].light
    }

    /// Whether others have used anything lately, or want to.
    pub(crate) fn has_rivals(&self, tenant: usize) -> bool {
        let mut others = self.tenants.iter().enumerate().filter(|(other, _)| *other != tenant);
        others.any(|(_, other)| other.is_there(self.now))
    }

    /// It has used so much more, or nothing for a while.
    fn note(&mut self, tenant: usize, cost: f64) {
        let now = self.now;
        let all = self.tenants.iter().enumerate();
        let all = all.filter(|(index, other)| *index == tenant || other.is_there(now));
        let all: f64 = all.map(|(_, other)| other.weight).sum();
        let own = &mut self.tenants[tenant];
        own.lately = own.lately(now) + cost;
        own.noted = now;
        let part = if own.light { LIGHT.1 } else { LIGHT.0 };
        own.light = own.lately < part * LATELY * self.places as f64 * own.weight / all;
    }

    fn begin(&mut self, tenant: usize, tag: f64, now: u64) -> Account {
        self.clock = self.clock.max(tag);
        self.running += 1;
        let own = &mut self.tenants[tenant];
        own.had = tag + own.usual / own.weight;
        own.running += 1;
        own.since = now;
        Account { advance: own.usual, used: 0.0 }
    }

    /// A thread of a tenant wants a place: it has one, or waits for what [`next`](Self::next) says.
    pub(crate) fn ask(&mut self, tenant: usize, now: u64) -> Option<Account> {
        self.at(now);
        self.note(tenant, 0.0);
        let (tag, clock) = (self.tag(tenant), self.clock);
        if self.running < self.places && self.waiting == 0 {
            return Some(self.begin(tenant, tag, now));
        }
        let is_let_in = self.tenants[tenant].running == 0
            && (self.running < 2 * self.places && self.is_polite(tenant)
                || self.running < 3 * self.places && self.is_light(tenant));
        if is_let_in {
            let account = self.begin(tenant, tag, now);
            // A light one may be ahead of others, who do not lose by it what they have not used.
            self.clock = clock;
            return Some(account);
        }
        let own = &mut self.tenants[tenant];
        if own.waiting == 0 {
            own.since = now;
        }
        own.waiting += 1;
        self.waiting += 1;
        None
    }

    /// Who has waited for too long, the one longest first.
    fn starved(&self, now: u64) -> Option<usize> {
        let late =
            |tenant: &Tenant| tenant.waiting > 0 && now.saturating_sub(tenant.since) >= PATIENCE;
        let all = self.tenants.iter().enumerate().filter(|(_, tenant)| late(tenant));
        all.min_by_key(|(_, tenant)| tenant.since).map(|(index, _)| index)
    }

    /// Of those who wait, but for one tenant, the one whose turn it is.
    fn first(&self, but: Option<usize>) -> Option<(usize, f64)> {
        let waiting = self.tenants.iter().enumerate().filter(|(_, tenant)| tenant.waiting > 0);
        let waiting = waiting.filter(|(index, _)| Some(*index) != but);
        waiting.map(|(index, _)| (index, self.tag(index))).min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// If there is a free place and somebody waits: who gets it.
    pub(crate) fn next(&mut self, now: u64) -> Option<(usize, Account)> {
        self.at(now);
        if self.running >= self.places || self.waiting == 0 {
            return None;
        }
        let (tenant, tag) = match self.starved(now) {
            // That it had to wait for so long was its share. What is beyond that it does not owe.
            Some(tenant) => (tenant, self.tag(tenant).min(self.clock)),
            None => self.first(None)?,
        };
        self.waiting -= 1;
        self.tenants[tenant].waiting -= 1;
        Some((tenant, self.begin(tenant, tag, now)))
    }

    /// Who has a place has used so much since it was charged last.
    pub(crate) fn charge(&mut self, tenant: usize, account: &mut Account, cost: f64) {
        let own = &mut self.tenants[tenant];
        own.had += (cost - std::mem::take(&mut account.advance)) / own.weight;
        own.charged += cost;
        account.used += cost;
        self.note(tenant, cost);
    }

    /// The same while nobody waited: it took nothing from anybody, and owes little for it. The virtual time goes on with whoever has
    /// had least, or those that come in seldom would use up their credit beside one that is alone.
    pub(crate) fn charge_alone(&mut self, tenant: usize, account: &mut Account, cost: f64) {
        let before = self.tenants[tenant].had;
        self.charge(tenant, account, cost);
        account.used = 0.0;
        let active = self.tenants.iter().filter(|tenant| tenant.is_active());
        let least = active.map(|tenant| tenant.had).min_by(f64::total_cmp);
        self.clock = self.clock.max(least.unwrap_or(self.clock));
        let own = &mut self.tenants[tenant];
        own.had = own.had.min(before.max(self.clock + QUANTUM / own.weight));
    }

    /// It has used so much without a place: one that need not wait was not asked to.
    pub(crate) fn pass(&mut self, tenant: usize, cost: f64) {
        let tag = self.tag(tenant);
        let own = &mut self.tenants[tenant];
        own.had = tag + cost / own.weight;
        own.charged += cost;
        self.note(tenant, cost);
    }

    /// Whether a place is kept for one more request, after `more` was used beside what was charged.
    pub(crate) fn goes_on(&self, tenant: usize, account: &Account, more: f64, now: u64) -> bool {
        let crowded = self.is_crowded();
        if self.waiting == 0 && !crowded {
            return true;
        }
        // Somebody was let in: those that have used their share make room for it.
        if crowded && !self.is_polite(tenant) && !self.is_light(tenant) {
            return false;
        }
        let own = &self.tenants[tenant];
        let had = own.had + (more - account.advance) / own.weight;
        let ahead = QUANTUM / own.weight;
        // Its other threads have the same tag.
        let is_long = own.waiting > 0 && account.used + more >= QUANTUM;
        let first = self.first(Some(tenant));
        !is_long && self.starved(now).is_none() && first.is_none_or(|(_, tag)| had < tag + ahead)
    }

    /// Whether anybody would have a place sooner if another one gave it away.
    pub(crate) fn is_sought(&self) -> bool {
        self.waiting > 0 || self.is_crowded()
    }

    /// Whether somebody of a tenant waits.
    pub(crate) fn waits(&self, tenant: usize) -> bool {
        self.tenants[tenant].waiting > 0
    }

    /// Whether more have a place than there are.
    pub(crate) fn is_crowded(&self) -> bool {
        self.running > self.places
    }

    /// A place is free again. The requests of its turn were [charged](Self::charge).
    pub(crate) fn leave(&mut self, tenant: usize, mut account: Account) {
        // What was charged in advance and not used.
        self.charge(tenant, &mut account, 0.0);
        let own = &mut self.tenants[tenant];
        own.usual += (account.used.min(QUANTUM) - own.usual) / 8.0;
        own.running -= 1;
        self.running -= 1;
    }

    /// Nanoseconds that a tenant was charged.
    pub(crate) fn charged(&self, tenant: usize) -> f64 {
        self.tenants[tenant].charged
    }

    /// Nobody has a place or waits for one.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting == 0 && !self.tenants.iter().any(Tenant::is_active)
    }
}

#[cfg(test)]
mod tests;
