//! One volume: who is registered, the chain, and the rules by which it changes.

use std::collections::BTreeMap;

use base::planted::{Bug, planted};
use base::{Epoch, Nanos, NodeId, StreamSeq};

use super::{Patience, Refused, Speaker, VolumeSpec, millis};
use crate::coordinator::message::{
    Choice, Copies, Copy, DataState, Member, NODES_MAX, Registration, View,
};
use crate::coordinator::store::{Chain, Seat};

/// While the chain is shorter than wanted, a node that this coordinator has not heard of since it began may still come back, and
/// may have an older program. After this long it is waited for no more: it is to be updated before it comes.
const MAY_RETURN: Nanos = 600_000_000_000;

/// A node that has registered.
#[derive(Debug)]
struct Node {
    registration: Registration,
    /// Silent beyond this, it is not reachable.
    deadline: Nanos,
    connected: bool,
    reachable: bool,
    /// Suspected: not brought back before this.
    hold_until: Nanos,
    /// When it was last heard: what it was told then may keep its clients' leases alive for a while.
    heard: Nanos,
    /// The volume's epoch when this process came: it has seen no chain before that.
    came: Epoch,
    /// Of a process that is not ready yet: until when it keeps the place of the one before it.
    opening: Option<Nanos>,
}

/// As `8-4-4-4-12` hexadecimal digits, which `corbel mkfs` prints and takes.
fn show_uuid(uuid: u128) -> String {
    let hex = format!("{uuid:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

impl Node {
    /// It is there, and has its region.
    fn is_ready(&self) -> bool {
        self.reachable && self.connected && !self.registration.opening
    }

    /// The region of the process that holds the seat is this one's now: that one is dead, and has lost nothing.
    fn follows(&self, seat: &Seat) -> bool {
        let new = &self.registration;
        new.node == seat.node
            && matches!(new.state, DataState::Intact { .. })
            && new.before.contains(&seat.incarnation)
            && !planted(Bug::RestartIsLoss)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Volume {
    spec: VolumeSpec,
    patience: Patience,
    pub chain: Chain,
    /// As the caller of `settle` has it.
    kept: Chain,
    nodes: BTreeMap<NodeId, Node>,
    syncing: Vec<NodeId>,
    /// Nobody is evicted for silence before this: after a start, or after all were silent.
    quiet_until: Nanos,
    /// When to re-form a chain of which no process lives on.
    reform_at: Option<Nanos>,
    forced: bool,
    told: View,
    /// When this coordinator began: members that it never heard of may have been heard of then.
    began: Nanos,
    /// Until then clients of nodes that left the chain may use their leases.
    lapsed_at: Nanos,
}

impl Volume {
    pub fn new(spec: VolumeSpec, chain: Chain, patience: Patience, now: Nanos) -> Self {
        let settling = millis(patience.failure_timeout_ms) + 1_000_000_000;
        let told = View::default();
        // Who left the chain last, and when, is not known.
        let lapsed_at = if chain.epoch.0 == 0 { 0 } else { now + patience.lapse() };
        Self {
            spec,
            patience,
            kept: chain.clone(),
            chain,
            nodes: BTreeMap::new(),
            syncing: Vec::new(),
            quiet_until: now + settling,
            reform_at: None,
            forced: false,
            told,
            began: now,
            lapsed_at,
        }
    }

    pub fn view(&self, now: Nanos) -> View {
        let member = |(id, node): (&NodeId, &Node)| Member {
            node: *id,
            incarnation: node.registration.incarnation,
            reachable: node.reachable,
            position: node.registration.position,
            tcp: node.registration.tcp,
            run_dir: node.registration.run_dir.clone(),
            info: node.registration.info.clone(),
        };
        View {
            volume: self.spec.name.clone(),
            epoch: self.chain.epoch,
            replicas: self.spec.replicas,
            min_replicas: self.spec.least(),
            level: self.chain.level,
            chain: self.chain.seats.iter().map(|s| s.node).collect(),
            incarnations: self.chain.seats.iter().map(|s| s.incarnation).collect(),
            syncing: self.syncing.clone(),
            members: self.nodes.iter().map(member).collect(),
            lapse_ms: u32::try_from(self.lapsed_at.saturating_sub(now).div_ceil(1_000_000))
                .unwrap_or(u32::MAX),
        }
    }

    /// The new view for all that can hear it, if it is one.
    pub fn news(&mut self, now: Nanos) -> Vec<(NodeId, View)> {
        let view = self.view(now);
        if view.same(&self.told) {
            return Vec::new();
        }
        self.told = view.clone();
        let hears = self.nodes.iter().filter(|(_, node)| node.connected);
        hears.map(|(id, _)| (*id, view.clone())).collect()
    }

    pub fn extend_deadlines(&mut self, pause: Nanos) {
        for node in self.nodes.values_mut() {
            node.deadline += pause;
            node.opening = node.opening.map(|until| until + pause);
        }
        self.quiet_until += pause;
        self.reform_at = self.reform_at.map(|at| at + pause);
    }

    fn seat(&self, node: NodeId) -> Option<&Seat> {
        self.chain.seats.iter().find(|s| s.node == node)
    }

    /// The process that holds the seat is there and connected.
    fn lives(&self, seat: &Seat) -> bool {
        self.nodes.get(&seat.node).is_some_and(|n| {
            n.connected && n.reachable && n.registration.incarnation == seat.incarnation
        })
    }

    /// The process that holds the seat may still live: it was heard of not long ago. Or there is another that follows
    /// it, and is about to be ready.
    fn may_live(&self, seat: &Seat) -> bool {
        self.nodes.get(&seat.node).is_some_and(|n| {
            let same = n.registration.incarnation == seat.incarnation;
            n.reachable && (same || n.opening.is_some() && n.follows(seat))
        })
    }

    pub fn register(&mut self, new: Registration, now: Nanos) -> Result<(), Refused> {
        self.may_register(&new, now)?;
        let node = new.node;
        let timeout = millis(self.patience.failure_timeout_ms);
        let same =
            self.nodes.get(&node).is_some_and(|n| n.registration.incarnation == new.incarnation);
        if !same {
            self.syncing.retain(|n| *n != node);
        }
        let hold_until = self.nodes.get(&node).map_or(0, |n| n.hold_until);
        let others_live = self.chain.seats.iter().any(|s| self.lives(s));
        let came = self.nodes.get(&node).filter(|_| same).map_or(self.chain.epoch, |n| n.came);
        // One that is started again and again is waited for no longer than one that is started once.
        let before = self.nodes.get(&node).and_then(|n| n.opening);
        let until = now + millis(self.patience.return_ms);
        let opening = new.opening.then(|| before.map_or(until, |before| before.min(until)));
        let entry = Node {
            registration: new,
            deadline: now + timeout,
            connected: true,
            reachable: true,
            hold_until,
            heard: now,
            came,
            opening,
        };
        self.nodes.insert(node, entry);
        self.woke(node, others_live, now);
        Ok(())
    }

    /// If all of the chain had been silent, the trouble was on our side: the others get time too.
    fn woke(&mut self, node: NodeId, others_live: bool, now: Nanos) {
        let lives = self.seat(node).is_some_and(|s| self.lives(s));
        if lives && !others_live {
            let grace = millis(self.patience.failure_timeout_ms);
            self.quiet_until = self.quiet_until.max(now + grace);
        }
    }

    fn may_register(&self, new: &Registration, now: Nanos) -> Result<(), Refused> {
        let (node, epoch) = (new.node, self.chain.epoch);
        if !self.spec.nodes.is_empty() && !self.spec.nodes.contains(&node) {
            return Err(format!(
                "node {node} is not configured for volume \"{}\"; add it to its nodes",
                self.spec.name
            ));
        }
        if !self.nodes.contains_key(&node) && self.nodes.len() >= NODES_MAX {
            return Err(format!("volume \"{}\" has {NODES_MAX} nodes already", self.spec.name));
        }
        if let Some(old) = self.nodes.get(&node)
            && old.registration.incarnation > new.incarnation
        {
            return Err(format!(
                "node {node}: a newer process (incarnation {}) has registered; stop one of the two",
                old.registration.incarnation
            ));
        }
        if new.level < self.chain.level {
            return Err(format!(
                "node {node}: its program understands level {}, and volume \"{}\" has level {}: what that has may be in use; \
                 update the node's program",
                new.level, self.spec.name, self.chain.level
            ));
        }
        self.is_no_double(new, now)?;
        self.has_the_volume(new)?;
        if let Some(seat) = self.seat(node)
            && seat.incarnation > new.incarnation
        {
            return Err(format!(
                "node {node}: incarnation {} is in the chain; {} is older: incarnations must grow",
                seat.incarnation, new.incarnation
            ));
        }
        match new.state {
            DataState::Intact { epoch: theirs } if theirs > epoch => Err(format!(
                "node {node} has data of epoch {theirs} of volume \"{}\", the coordinator knows only epoch {epoch}: \
                 its state is lost or old; restore its folder before anything else",
                self.spec.name
            )),
            _ => Ok(()),
        }
    }

    /// Whoever takes a node's number has its region, or the one that had the number is gone.
    fn is_no_double(&self, new: &Registration, now: Nanos) -> Result<(), Refused> {
        let node = new.node;
        let follows =
            |incarnation| incarnation == new.incarnation || new.before.contains(&incarnation);
        let lives = self.nodes.get(&node).filter(|old| old.connected && old.reachable);
        if let Some(old) = lives
            && !follows(old.registration.incarnation)
        {
            let at = match (old.registration.tcp, &*old.registration.run_dir) {
                (Some(tcp), _) => format!("at {tcp}"),
                (None, dir) => format!("in {dir}"),
            };
            return Err(format!(
                "node {node}: another process of that number is there ({at}), with another region; give one of the \
                 two another node.id, or stop the one that is there"
            ));
        }
        // After a start of this coordinator nobody is there at first.
        if let Some(seat) = self.seat(node)
            && !self.nodes.contains_key(&node)
            && now < self.quiet_until
            && !follows(seat.incarnation)
        {
            return Err(format!(
                "node {node}: the process that is in the chain may be about to come back; wait a moment"
            ));
        }
        Ok(())
    }

    /// A region of another volume would be overwritten, or pass for a copy of this one.
    fn has_the_volume(&self, new: &Registration) -> Result<(), Refused> {
        if new.region == 0 {
            return Ok(());
        }
        // Members know best; before there are some, whoever came first.
        let seated = |id: &NodeId| self.seat(*id).is_some();
        let others =
            self.nodes.iter().filter(|(id, n)| **id != new.node && n.registration.region != 0);
        let other = others.min_by_key(|(id, n)| (!seated(id), !n.reachable, n.came));
        let Some((id, other)) = other.filter(|(_, n)| n.registration.region != new.region) else {
            return Ok(());
        };
        let keeps_place = self.seat(new.node).is_some_and(|seat| {
            seat.incarnation == new.incarnation || new.before.contains(&seat.incarnation)
        });
        if keeps_place && seated(id) {
            // They were made into one volume before anybody looked.
            return Ok(());
        }
        let (theirs, uuid) = (show_uuid(new.region), show_uuid(other.registration.region));
        Err(format!(
            "node {}: its region holds volume {theirs}, but this one is {uuid} (as node {id} has it): name the right \
             node.region, or give up what is there with `corbel mkfs --force --uuid {uuid}`",
            new.node
        ))
    }

    /// A process is ready.
    pub fn opened(
        &mut self,
        by: &Speaker,
        position: StreamSeq,
        info: String,
    ) -> Result<(), Refused> {
        let node = self.speaker(by)?;
        (node.registration.position, node.registration.info) = (position, info);
        node.registration.opening = false;
        node.opening = None;
        Ok(())
    }

    /// The registered process that speaks.
    fn speaker(&mut self, by: &Speaker) -> Result<&mut Node, Refused> {
        match self.nodes.get_mut(&by.node) {
            Some(node) if node.registration.incarnation == by.incarnation => Ok(node),
            _ => Err(format!("node {} incarnation {} is not registered", by.node, by.incarnation)),
        }
    }

    pub fn heard(&mut self, by: &Speaker, position: StreamSeq, now: Nanos) -> Result<(), Refused> {
        let timeout = millis(self.patience.failure_timeout_ms);
        let others_live = self.chain.seats.iter().any(|s| self.lives(s));
        let node = self.speaker(by)?;
        node.deadline = now + timeout;
        node.heard = now;
        node.connected = true;
        // Not told to the others with each heartbeat: it is for the re-forming of a chain.
        node.registration.position = position;
        self.told_position(by.node, position);
        if let Some(node) = self.nodes.get_mut(&by.node)
            && !node.reachable
        {
            node.reachable = true;
            self.woke(by.node, others_live, now);
        }
        Ok(())
    }

    fn told_position(&mut self, node: NodeId, position: StreamSeq) {
        for member in self.told.members.iter_mut().filter(|m| m.node == node) {
            member.position = position;
        }
    }

    pub fn disconnected(&mut self, by: &Speaker, now: Nanos) -> Result<(), Refused> {
        let soon = now + millis(self.patience.lost_connection_ms);
        let node = self.speaker(by)?;
        node.connected = false;
        node.deadline = node.deadline.min(soon);
        Ok(())
    }

    fn current(&self, epoch: Epoch) -> Result<(), Refused> {
        if epoch == self.chain.epoch {
            return Ok(());
        }
        Err(format!("speaks of epoch {epoch}, now is {}", self.chain.epoch))
    }

    pub fn caught_up(&mut self, by: &Speaker, who: Seat, epoch: Epoch) -> Result<(), Refused> {
        let node = who.node;
        self.speaker(by)?;
        self.current(epoch)?;
        let is_head = self.chain.seats.first().is_some_and(|head| *head == by.seat());
        if by.node != node && !is_head {
            return Err(format!("node {} may not speak for node {node}", by.node));
        }
        if !self.syncing.contains(&node) {
            return Err(format!("node {node} is not syncing"));
        }
        let Some(entry) = self.nodes.get(&node).filter(|n| n.reachable) else {
            return Err(format!("node {node} is not reachable"));
        };
        let seat = Seat { node, incarnation: entry.registration.incarnation };
        if seat != who && !planted(Bug::CaughtUpUnnamed) {
            return Err(format!(
                "node {node}: incarnation {} has caught up, but {} has taken its place",
                who.incarnation, seat.incarnation
            ));
        }
        self.syncing.retain(|n| *n != node);
        self.chain.seats.push(seat);
        self.chain.epoch.0 += 1;
        Ok(())
    }

    pub fn suspect(
        &mut self,
        by: &Speaker,
        node: NodeId,
        epoch: Epoch,
        now: Nanos,
    ) -> Result<(), Refused> {
        self.speaker(by)?;
        self.current(epoch)?;
        if self.chain.seats.first() != Some(&by.seat()) {
            return Err(format!("node {} is not the head, whom alone this is believed", by.node));
        }
        if node == by.node {
            return Err("the head cannot suspect itself; it may leave".to_owned());
        }
        let in_chain = self.seat(node).is_some();
        if !in_chain && !self.syncing.contains(&node) {
            return Err(format!("node {node} is neither in the chain nor syncing"));
        }
        self.chain.seats.retain(|s| s.node != node);
        self.syncing.retain(|n| *n != node);
        if in_chain {
            self.chain.epoch.0 += 1;
        }
        let hold = millis(self.patience.hold_ms);
        if let Some(entry) = self.nodes.get_mut(&node) {
            entry.hold_until = now + hold;
        }
        Ok(())
    }

    pub fn leave(&mut self, by: &Speaker) -> Result<(), Refused> {
        self.speaker(by)?;
        let others_live = self.chain.seats.iter().any(|s| s.node != by.node && self.lives(s));
        // Who leaves has ended its clients' sessions before: there are no leases to wait for.
        self.nodes.remove(&by.node);
        self.syncing.retain(|n| *n != by.node);
        if others_live && self.seat(by.node).is_some() {
            self.chain.seats.retain(|s| s.node != by.node);
            self.kept.seats.retain(|s| s.node != by.node);
            self.chain.epoch.0 += 1;
        }
        Ok(())
    }

    pub fn force(&mut self) -> Result<(), Refused> {
        if self.chain.epoch.0 == 0 {
            if self.nodes.values().any(|n| n.reachable) {
                self.forced = true;
                return Ok(());
            }
            return Err("no node has registered yet".to_owned());
        }
        if self.chain.seats.iter().any(|s| self.lives(s)) {
            return Err("the chain has a living member; there is nothing to force".to_owned());
        }
        if self.candidates().is_empty() && !self.all_are_empty() {
            return Err(format!(
                "none of the chain's nodes ({}) has registered with its data; start one of them \
                 (only if all of them are there and empty, forcing begins an empty volume)",
                self.chain.seats.iter().map(|s| s.node.to_string()).collect::<Vec<_>>().join(", ")
            ));
        }
        self.forced = true;
        Ok(())
    }

    /// What every registered node has, for a person who has to choose.
    pub fn copies(&self) -> Copies {
        let copy = |(id, node): (&NodeId, &Node)| Copy {
            node: *id,
            incarnation: node.registration.incarnation,
            reachable: node.reachable && node.connected,
            seated: self.seat(*id).is_some(),
            may_be_chosen: self.is_stuck().is_ok() && self.may_be_chosen(*id, node).is_ok(),
            state: node.registration.state,
            position: node.registration.position,
            info: node.registration.info.clone(),
        };
        let lives = self.chain.seats.iter().any(|s| self.lives(s));
        Copies { epoch: self.chain.epoch, lives, copies: self.nodes.iter().map(copy).collect() }
    }

    /// Whether the volume waits for a person.
    fn is_stuck(&self) -> Result<(), Refused> {
        if self.chain.epoch.0 == 0 {
            return Err("no chain has been formed yet; there is nothing to choose".to_owned());
        }
        if let Some(seat) = self.chain.seats.iter().find(|s| self.may_live(s)) {
            return Err(format!("node {} is in the chain and serves, or may", seat.node));
        }
        match self.candidates().first() {
            Some(seat) => Err(format!(
                "node {} was in the chain and is back with its data; it goes on by itself in a moment",
                seat.node
            )),
            None => Ok(()),
        }
    }

    fn may_be_chosen(&self, id: NodeId, node: &Node) -> Result<Epoch, Refused> {
        if !node.is_ready() {
            return Err(format!("node {id} does not answer; start its services"));
        }
        let DataState::Intact { epoch } = node.registration.state else {
            return Err(format!("node {id} has no copy: its region is empty, or was being filled"));
        };
        if node.came != self.chain.epoch {
            // Its process has been put out of the chain and has ended its clients' sessions.
            return Err(format!("node {id} was running when it was put out; restart its services"));
        }
        Ok(epoch)
    }

    /// A person goes on with one copy alone, whatever the others had.
    pub fn choose(&mut self, choice: Choice) -> Result<(), Refused> {
        self.is_stuck()?;
        let id = choice.node;
        let node = self.nodes.get(&id).ok_or_else(|| format!("node {id} has not registered"))?;
        let epoch = self.may_be_chosen(id, node)?;
        let (incarnation, position) = (node.registration.incarnation, node.registration.position);
        if (incarnation, epoch, position) != (choice.incarnation, choice.epoch, choice.position) {
            return Err(format!("node {id} has changed since its copy was shown; look again"));
        }
        self.chain.seats = vec![Seat { node: id, incarnation }];
        self.chain.epoch.0 += 1;
        self.reform_at = None;
        self.syncing.clear();
        Ok(())
    }

    /// When time alone may make a rule due that was not so at `now`. While the chain is not whole, soon.
    pub fn due(&self, now: Nanos) -> Nanos {
        let whole = self.chain.seats.iter().all(|seat| self.lives(seat));
        let soon = now + millis(self.patience.heartbeat_ms) / 2;
        let silent = self.nodes.values().filter(|node| node.reachable).map(|node| node.deadline);
        let held = self.nodes.values().map(|node| node.hold_until);
        let held = held.chain(self.nodes.values().filter_map(|node| node.opening));
        let waits = held.chain([self.quiet_until]).chain(self.reform_at).filter(|at| *at > now);
        silent.chain(waits).chain((!whole).then_some(soon)).min().unwrap_or(Nanos::MAX)
    }

    /// Applies all rules that time and registrations may have made due. True if the chain changed
    /// since the last call (by whatever).
    pub fn settle(&mut self, now: Nanos) -> bool {
        let quiet = now < self.quiet_until;
        for node in self.nodes.values_mut() {
            if node.deadline <= now {
                node.reachable = false;
            }
            // It is waited for no longer. (It is registered, and joins when it is ready.)
            node.opening = node.opening.filter(|until| now < *until);
        }
        if self.chain.epoch.0 == 0 {
            self.form();
        } else if self.chain.seats.iter().any(|s| self.lives(s)) {
            self.renew();
            self.evict(quiet);
        } else {
            self.reform(now);
        }
        self.forced = false;
        self.choose_syncing(now);
        self.raise_level(now);
        let fewer = self.chain.seats.len() < self.kept.seats.len();
        let changed = self.kept != self.chain && !(fewer && planted(Bug::CoordinatorForgets));
        if changed {
            self.note_departed();
            self.kept = self.chain.clone();
        }
        changed
    }

    /// What all nodes understand may be used from now on, if no other is to come back.
    fn raise_level(&mut self, now: Nanos) {
        let seats = &self.chain.seats;
        let known = |seat: &Seat| self.nodes.contains_key(&seat.node);
        if seats.is_empty() || !seats.iter().all(known) {
            return;
        }
        let whole = seats.len() >= self.wanted();
        if !whole && now < self.began + MAY_RETURN && !planted(Bug::LevelUnasked) {
            return;
        }
        let may_come = |node: &&Node| node.reachable || now < node.heard + MAY_RETURN;
        let levels = self.nodes.values().filter(may_come).map(|node| node.registration.level);
        let all = if planted(Bug::LevelOfAnyone) { levels.max() } else { levels.min() };
        self.chain.level = self.chain.level.max(all.unwrap_or_default());
    }

    /// Members that left may not know it: what they heard last may keep leases alive.
    fn note_departed(&mut self) {
        for seat in &self.kept.seats {
            if self.seat(seat.node).is_none() {
                let heard = self.nodes.get(&seat.node).map_or(self.began, |n| n.heard);
                let lapse = self.patience.lapse();
                let lapse = if planted(Bug::LapseShort) { lapse / 3 } else { lapse };
                self.lapsed_at = self.lapsed_at.max(heard + lapse);
            }
        }
    }

    /// Members of a chain that is whole.
    fn wanted(&self) -> usize {
        match self.spec.nodes.len() {
            0 => usize::from(self.spec.replicas),
            configured => configured.min(usize::from(self.spec.replicas)),
        }
    }

    /// The first chain: of the configured nodes as soon as as many as wanted are there.
    fn form(&mut self) {
        let there = |id: &NodeId| self.nodes.get(id).is_some_and(Node::is_ready);
        let mut order: Vec<NodeId> = if self.spec.nodes.is_empty() {
            self.nodes.keys().copied().collect()
        } else {
            self.spec.nodes.clone()
        };
        order.retain(there);
        if order.is_empty() || order.len() < self.wanted() && !self.forced {
            return;
        }
        order.truncate(usize::from(self.spec.replicas));
        self.chain.seats = order.iter().filter_map(|id| self.new_seat(*id)).collect();
        self.chain.epoch = Epoch(1);
    }

    fn new_seat(&self, node: NodeId) -> Option<Seat> {
        let entry = self.nodes.get(&node)?;
        Some(Seat { node, incarnation: entry.registration.incarnation })
    }

    /// Some member lives, and others were started again: they go on in their places. Nothing was acknowledged
    /// without them, and nobody has given away what their clients hold.
    fn renew(&mut self) {
        let mut renewed = false;
        for seat in &mut self.chain.seats {
            let node = self.nodes.get(&seat.node);
            if let Some(node) = node.filter(|n| n.is_ready() && n.follows(seat)) {
                seat.incarnation = node.registration.incarnation;
                renewed = true;
            }
        }
        // Messages of the processes before them are of an epoch that is over.
        self.chain.epoch.0 += u32::from(renewed);
    }

    /// Some member lives: those that do not make room. A member that has lost its region, or cannot say that it is the same,
    /// is out at once, a silent one when its time is up, unless all had been silent.
    fn evict(&mut self, quiet: bool) {
        self.reform_at = None;
        let stays = |seat: &Seat| {
            let restarted = self.nodes.get(&seat.node).is_some_and(|n| {
                n.registration.incarnation != seat.incarnation && !n.follows(seat)
            });
            self.may_live(seat) || quiet && !restarted
        };
        let left: Vec<Seat> = self.chain.seats.iter().copied().filter(stays).collect();
        if left.len() < self.chain.seats.len() {
            self.chain.seats = left;
            self.chain.epoch.0 += 1;
        }
    }

    /// Members whose process is another one now, but which kept their data.
    fn candidates(&self) -> Vec<Seat> {
        let mut found: Vec<(StreamSeq, Seat)> = Vec::new();
        for seat in &self.chain.seats {
            let Some(node) = self.nodes.get(&seat.node) else { continue };
            let registration = &node.registration;
            let same = registration.incarnation == seat.incarnation;
            let has_data = same || registration.state != DataState::Fresh;
            if node.is_ready() && has_data {
                let seat = Seat { node: seat.node, incarnation: registration.incarnation };
                found.push((registration.position, seat));
            }
        }
        found.sort_by_key(|(position, seat)| (std::cmp::Reverse(*position), seat.node));
        found.into_iter().map(|(_, seat)| seat).collect()
    }

    /// Every node of the chain is there and none has data: either the chain was formed and all
    /// died before they had noted it, or all have lost their memory. A person must tell which.
    fn all_are_empty(&self) -> bool {
        self.chain.seats.iter().all(|seat| {
            self.nodes
                .get(&seat.node)
                .is_some_and(|n| n.is_ready() && n.registration.state == DataState::Fresh)
        })
    }

    /// No process of the chain lives on: the chain is made of its restarted members, of all of
    /// them, or after a while of those that are there.
    fn reform(&mut self, now: Nanos) {
        let mut found = self.candidates();
        if found.is_empty() && self.forced && self.all_are_empty() {
            found = self.chain.seats.iter().filter_map(|s| self.new_seat(s.node)).collect();
        }
        if found.is_empty() {
            self.reform_at = None;
            return;
        }
        let at = *self.reform_at.get_or_insert(now + millis(self.patience.grace_ms));
        let may_return = self.chain.seats.iter().any(|s| self.may_live(s));
        let all = found.len() == self.chain.seats.len();
        if all || self.forced || now >= at && !may_return {
            self.chain.seats = found;
            self.chain.epoch.0 += 1;
            self.reform_at = None;
        }
    }

    /// Fills the places that the chain leaves open with nodes to be brought up to date; those that
    /// have begun go on, then those that have most.
    fn choose_syncing(&mut self, now: Nanos) {
        let in_chain: Vec<NodeId> = self.chain.seats.iter().map(|s| s.node).collect();
        let fits = |id: &NodeId| {
            !in_chain.contains(id)
                && self.nodes.get(id).is_some_and(|n| n.is_ready() && n.hold_until <= now)
        };
        let room = usize::from(self.spec.replicas).saturating_sub(in_chain.len());
        let head_lives = self.chain.seats.first().is_some_and(|s| self.lives(s));
        let mut chosen: Vec<NodeId> = self.syncing.iter().copied().filter(fits).collect();
        if self.chain.epoch.0 > 0 && head_lives {
            let mut more: Vec<NodeId> =
                self.nodes.keys().copied().filter(|id| fits(id) && !chosen.contains(id)).collect();
            more.sort_by_key(|id| (std::cmp::Reverse(self.worth(*id)), *id));
            chosen.extend(more);
        }
        chosen.truncate(room);
        self.syncing = chosen;
    }

    fn worth(&self, node: NodeId) -> (u32, u64) {
        self.nodes.get(&node).map_or((0, 0), |n| match n.registration.state {
            DataState::Fresh => (0, 0),
            DataState::Intact { epoch } => (epoch.0, n.registration.position.0),
        })
    }

    /// The invariants of the module above.
    pub fn check(&self) {
        let seats = &self.chain.seats;
        assert_eq!(seats.is_empty(), self.chain.epoch.0 == 0, "a chain has an epoch: {self:?}");
        assert!(self.chain.epoch >= self.told.epoch, "the epoch only grows: {self:?}");
        assert!(self.chain.level >= self.told.level, "the level only grows: {self:?}");
        for (at, seat) in seats.iter().enumerate() {
            assert!(seats[..at].iter().all(|s| s.node != seat.node), "a node twice: {self:?}");
            assert!(!self.syncing.contains(&seat.node), "in the chain and syncing: {self:?}");
        }
        let most = usize::from(self.spec.replicas).max(seats.len());
        assert!(seats.len() + self.syncing.len() <= most, "more than wanted: {self:?}");
    }
}

impl Speaker {
    fn seat(&self) -> Seat {
        Seat { node: self.node, incarnation: self.incarnation }
    }
}
