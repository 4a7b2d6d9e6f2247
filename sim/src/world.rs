//! The world: clock, event queue, links, coordinator, faults, and the judging at the end.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::random::Random;
use base::{ClientId, Nanos, NodeId, StreamSeq, crc32c};
use cluster::coordinator::machine::{
    Action, Event as CoEvent, Machine, Patience, Speaker, VolumeSpec,
};
use cluster::coordinator::store::Image;
use cluster::coordinator::{DataState, Registration, View};
use cluster::transport::Class;
use service::core::{Effect, Event, Role};
use storage::media::Media;
use storage::volume::Volume;

use crate::actor::Actor;
use crate::faults::Fault;
use crate::host::{Host, TICK, fresh_region};
use crate::model::{Body, Model, State};

/// Microsecond.
pub const US: Nanos = 1000;
/// Millisecond.
pub const MS: Nanos = 1_000_000;
const VOLUME: &str = "sim";
const CLUSTER: u128 = 42;
/// After healing, everything must be answered and quiet within this time.
const HEAL_LIMIT: Nanos = 30_000 * MS;
/// Events of one history; more is a loop.
const EVENTS_MAX: u64 = 20_000_000;

/// What a history consists of.
#[derive(Clone, Debug)]
pub struct Preset {
    /// Nodes.
    pub nodes: usize,
    /// Clients in all.
    pub clients: usize,
    /// Operations of each client.
    pub ops: u32,
    /// Faults at most.
    pub faults: u32,
    /// Largest write.
    pub write_max: u64,
    /// Longest file.
    pub file_max: u64,
    /// Faults fall into this time.
    pub active: Nanos,
}

impl Preset {
    /// The preset that a seed stands for.
    pub fn of(seed: u64) -> Self {
        let mut r = Random::new(seed ^ 0x5eed);
        let mut preset = Self {
            nodes: 1 + r.below(3) as usize,
            clients: 1 + r.below(4) as usize,
            ops: 20 + r.below(60) as u32,
            faults: r.below(7) as u32,
            write_max: 9000,
            file_max: 40_000,
            active: 2000 * MS,
        };
        if r.chance(2, 3) {
            preset.nodes = 3;
        }
        if r.chance(1, 16) {
            // Hostile: lanes and ring run full.
            (preset.write_max, preset.file_max) = (1 << 20, 1 << 20);
        }
        preset
    }
}

/// What came of a history.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Checksum over the trace.
    pub hash: u64,
    /// What was violated, if anything.
    pub violation: Option<String>,
    /// Events handled.
    pub events: u64,
    /// Virtual time passed.
    pub virtual_ns: Nanos,
    /// Operations of clients that were appended.
    pub operations: u64,
    /// Observations compared with the model.
    pub observations: u64,
    /// fsyncs acknowledged.
    pub fsyncs: u64,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
}

pub(crate) enum Up {
    Register,
    Beat(Nanos, StreamSeq),
    Joined(NodeId, base::Epoch),
    Suspect(NodeId, base::Epoch),
}

pub(crate) enum Item {
    Frame {
        from: usize,
        to: usize,
        link: u64,
        kind: u16,
        body: Vec<u8>,
    },
    PeerUp {
        at: usize,
        peer: usize,
        link: u64,
    },
    PeerDown {
        at: usize,
        peer: usize,
        link: u64,
    },
    Run(usize),
    /// For this incarnation of a node only.
    To(usize, u64, Event),
    Connect(usize, u64),
    ToCoordinator(usize, u64, u64, Up),
    Disconnected(usize, u64),
    Registered(usize, u64),
    Confirm(usize, u64, Nanos),
    View(usize, u64, View),
    CoordinatorTick,
    Step(usize, u64),
    Attached {
        actor: usize,
        stamp: u64,
        client: ClientId,
        segment: u32,
    },
    Fault(Fault),
    End(Fault),
    Heal,
}

/// The pair's state as the fabric has it, and as each end believes.
#[derive(Default, Clone)]
struct Link {
    up: bool,
    number: u64,
    cut: u32,
    believes: [Option<u64>; 2],
    order: [[Nanos; 2]; 2],
}

/// See the module.
pub struct World<'a> {
    pub(crate) now: Nanos,
    pub(crate) random: Random,
    pub(crate) preset: Preset,
    queue: BTreeMap<(Nanos, u64), Item>,
    number: u64,
    pub(crate) hosts: Vec<Host>,
    links: BTreeMap<(usize, usize), Link>,
    machine: Option<Machine>,
    image: Option<Image>,
    pub(crate) actors: Vec<Actor>,
    pub(crate) model: Model,
    pub(crate) outcome: Outcome,
    pub(crate) healed: bool,
    sink: Option<&'a mut dyn FnMut(&str)>,
}

impl std::fmt::Debug for World<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("now", &self.now).finish_non_exhaustive()
    }
}

/// Runs the history of `seed`; each event is one line to `sink`.
pub fn run(seed: u64, preset: Preset, sink: Option<&mut dyn FnMut(&str)>) -> Outcome {
    let mut world = match World::new(seed, preset, sink) {
        Ok(world) => world,
        Err(why) => return Outcome { violation: Some(why), ..Outcome::default() },
    };
    if let Err(why) = world.history() {
        world.trace(|| format!("VIOLATION {why}"));
        world.outcome.violation = Some(why);
    }
    world.outcome.virtual_ns = world.now;
    world.outcome
}

impl<'a> World<'a> {
    fn new(
        seed: u64,
        preset: Preset,
        sink: Option<&'a mut dyn FnMut(&str)>,
    ) -> Result<Self, String> {
        let hosts = (1..=preset.nodes).map(|n| Host::new(NodeId(n as u32)));
        let hosts = hosts.collect::<Result<Vec<_>, _>>()?;
        let mut world = Self {
            now: 0,
            random: Random::new(seed),
            queue: BTreeMap::new(),
            number: 0,
            hosts,
            links: BTreeMap::new(),
            machine: None,
            image: None,
            actors: Vec::new(),
            model: Model::new(0o40_755),
            outcome: Outcome::default(),
            healed: false,
            sink,
            preset,
        };
        for a in 0..world.preset.nodes {
            for b in a + 1..world.preset.nodes {
                world.links.insert((a, b), Link::default());
            }
        }
        world.start_coordinator()?;
        for n in 0..world.preset.nodes {
            world.start_node(n)?;
        }
        for c in 0..world.preset.clients {
            let node = c % world.preset.nodes;
            world.actors.push(Actor::new(node, world.preset.ops));
            let at = 20 * MS + world.random.below(50 * MS);
            world.step_in(c, at);
        }
        world.at(50 * MS, Item::CoordinatorTick);
        for _ in 0..world.random.below(u64::from(world.preset.faults) + 1) {
            let (nodes, clients) = (world.preset.nodes, world.preset.clients);
            let fault = Fault::draw(&mut world.random, nodes, clients);
            let at = 50 * MS + world.random.below(world.preset.active);
            world.at(at, Item::Fault(fault));
        }
        let heal = world.preset.active + 1600 * MS;
        world.at(heal, Item::Heal);
        Ok(world)
    }

    pub(crate) fn trace(&mut self, line: impl FnOnce() -> String) {
        let line = format!("{:>12} {}", self.now, line());
        let half = u64::from(crc32c(self.outcome.hash as u32, line.as_bytes()));
        self.outcome.hash = self.outcome.hash.rotate_left(23) ^ half;
        if let Some(sink) = &mut self.sink {
            sink(&line);
        }
    }

    pub(crate) fn at(&mut self, at: Nanos, item: Item) {
        self.number += 1;
        self.queue.insert((at.max(self.now), self.number), item);
    }

    /// A delay between the two, in nanoseconds.
    pub(crate) fn between(&mut self, least: Nanos, most: Nanos) -> Nanos {
        least + self.random.below(most - least + 1)
    }

    fn history(&mut self) -> Result<(), String> {
        let limit = self.preset.active + 1600 * MS + HEAL_LIMIT;
        let mut look_at = 0;
        while let Some(((at, _), item)) = self.queue.pop_first() {
            self.now = at;
            self.outcome.events += 1;
            if self.outcome.events > EVENTS_MAX {
                return Err(format!("no end after {EVENTS_MAX} events"));
            }
            self.handle(item)?;
            if self.healed && self.now >= look_at {
                look_at = self.now + 20 * MS;
                if self.is_quiet() {
                    return self.judge();
                }
                if self.now > limit {
                    return Err(format!("no progress after healing: {}", self.state_of_affairs()));
                }
            }
        }
        Err("the queue ran empty".into())
    }

    fn handle(&mut self, item: Item) -> Result<(), String> {
        match item {
            Item::Frame { from, to, link, kind, body } => {
                if self.believes(to, from) == Some(link) {
                    self.trace(|| {
                        let crc = crc32c(0, &body);
                        format!(
                            "frame {}>{} kind {kind} {} {crc:08x}",
                            from + 1,
                            to + 1,
                            body.len()
                        )
                    });
                    let from = NodeId(from as u32 + 1);
                    self.deliver(to, Event::Frame { from, kind, body })?;
                }
            }
            Item::PeerUp { at, peer, link } => self.peer_up(at, peer, link)?,
            Item::PeerDown { at, peer, link } => self.peer_down(at, peer, link)?,
            Item::Run(n) => self.run_node(n)?,
            Item::To(n, incarnation, event) => {
                if self.hosts[n].incarnation == incarnation {
                    self.deliver(n, event)?;
                }
            }
            Item::Connect(n, incarnation) => self.connect(n, incarnation),
            Item::ToCoordinator(n, connection, incarnation, up) => {
                self.coordinator_hears(n, connection, incarnation, up);
            }
            Item::Disconnected(n, incarnation) => {
                let by = self.speaker(n, incarnation);
                self.coordinate(CoEvent::Disconnected(by));
            }
            Item::Registered(n, connection) => {
                if self.reaches(n, connection) {
                    self.hosts[n].connected = true;
                    self.hosts[n].confirmed_at = Some(self.now);
                }
            }
            Item::Confirm(n, connection, sent) => {
                if self.reaches(n, connection) {
                    self.hosts[n].confirmed_at = Some(sent);
                }
            }
            Item::View(n, connection, view) => {
                if self.reaches(n, connection) {
                    self.view_arrived(n, &view)?;
                }
            }
            Item::CoordinatorTick => {
                self.coordinate(CoEvent::Tick);
                self.at(self.now + 50 * MS, Item::CoordinatorTick);
            }
            Item::Step(actor, stamp) => self.step_actor(actor, stamp)?,
            Item::Attached { actor, stamp, client, segment } => {
                self.actor_attached(actor, stamp, client, segment)?;
            }
            Item::Fault(fault) => self.begin_fault(fault)?,
            Item::End(fault) => self.end_fault(fault)?,
            Item::Heal => self.heal()?,
        }
        Ok(())
    }

    // --- nodes ---

    fn start_node(&mut self, n: usize) -> Result<(), String> {
        if self.hosts[n].node.is_some() {
            return Ok(());
        }
        let seed = self.random.next_u64();
        self.trace(|| format!("start {}", n + 1));
        self.hosts[n].start(self.now, seed)?;
        let incarnation = self.hosts[n].incarnation;
        let delay = self.between(100 * US, 2 * MS);
        self.at(self.now + delay, Item::Connect(n, incarnation));
        let delay = self.between(0, 3 * MS);
        let up = Item::To(n, incarnation, Event::HostUp);
        self.at(self.now + delay, up);
        self.run_soon(n);
        Ok(())
    }

    fn stop_node(&mut self, n: usize) {
        if self.hosts[n].node.is_none() {
            return;
        }
        let told = self.hosts[n].connected && !self.hosts[n].cut_off;
        let incarnation = self.hosts[n].incarnation;
        self.hosts[n].stop();
        self.trace(|| format!("stop {}", n + 1));
        if told {
            let delay = self.between(100 * US, 2 * MS);
            self.at(self.now + delay, Item::Disconnected(n, incarnation));
        }
        for c in 0..self.actors.len() {
            if self.actors[c].node == n {
                self.end_session(c, "its node died");
            }
        }
        self.update_links();
    }

    /// Gives the core an event and carries out what it wants.
    pub(crate) fn deliver(&mut self, n: usize, event: Event) -> Result<(), String> {
        let mut effects = Vec::new();
        let Some(node) = &mut self.hosts[n].node else { return Ok(()) };
        node.apply(self.now, event, &mut effects);
        self.carry_out(n, effects)?;
        self.run_soon(n);
        Ok(())
    }

    fn run_soon(&mut self, n: usize) {
        let delay =
            if self.hosts[n].slow { self.between(MS, 8 * MS) } else { self.between(200, 4 * US) };
        self.run_at(n, self.now + delay);
    }

    fn run_at(&mut self, n: usize, at: Nanos) {
        if at < self.hosts[n].next_run {
            self.hosts[n].next_run = at;
            self.at(at, Item::Run(n));
        }
    }

    /// One turn of the driver's loop (`service::nicfs`).
    fn run_node(&mut self, n: usize) -> Result<(), String> {
        if self.hosts[n].next_run != self.now {
            return Ok(());
        }
        self.hosts[n].next_run = Nanos::MAX;
        let mut effects = Vec::new();
        let (now, slept) = (self.now, self.hosts[n].slept);
        let host = &mut self.hosts[n];
        let fence = host.should_fence(now);
        let Some(node) = &mut host.node else { return Ok(()) };
        if !slept {
            node.look_around(now, &mut effects);
        }
        if fence != host.fenced {
            host.fenced = fence;
            node.apply(now, Event::Fenced(fence), &mut effects);
        }
        let beat = now >= host.next_tick;
        if beat || node.deadline().is_some_and(|d| d <= now) {
            if beat {
                host.next_tick = now + TICK;
            }
            node.apply(now, Event::Tick, &mut effects);
        }
        let slices = 1 + self.random.below(4);
        let mut busy = false;
        for _ in 0..slices {
            busy = node.work(now, &mut effects);
            if !busy {
                break;
            }
        }
        host.slept = !busy && node.prepare_to_sleep();
        let wake = node.deadline().map_or(host.next_tick, |d| d.min(host.next_tick));
        let slept = host.slept;
        if beat {
            let position = node.position();
            self.tell_coordinator(n, Up::Beat(now, position));
        }
        self.carry_out(n, effects)?;
        self.check_events(n);
        if slept {
            // A timer that is due at once still takes a moment.
            self.run_at(n, wake.max(self.now + 500));
        } else {
            self.run_soon(n);
        }
        Ok(())
    }

    fn carry_out(&mut self, n: usize, effects: Vec<Effect>) -> Result<(), String> {
        for effect in effects {
            match effect {
                Effect::Send { to, class, kind, body } => {
                    self.send(n, to.0 as usize - 1, class, kind, body);
                }
                Effect::Attached { token, client, segment } => {
                    let (actor, stamp) = ((token >> 40) as usize, token & 0xff_ffff_ffff);
                    let delay = self.between(10 * US, 200 * US);
                    let item = Item::Attached { actor, stamp, client, segment };
                    self.at(self.now + delay, item);
                }
                Effect::AttachRefused { .. } | Effect::Arena { .. } | Effect::Detached(_) => {}
                Effect::Copies { id, items } => self.host_copies(n, id, &items)?,
                Effect::CaughtUp(node, epoch) => {
                    self.tell_coordinator(n, Up::Joined(node, epoch));
                }
                Effect::Suspect(node) => {
                    let epoch = self.hosts[n].node.as_ref().map(|x| x.status().epoch);
                    self.trace(|| format!("node {} suspects {node}", n + 1));
                    self.tell_coordinator(n, Up::Suspect(node, epoch.unwrap_or_default()));
                }
                Effect::Position(_) => {}
            }
        }
        if let Some(failure) = self.hosts[n].node.as_ref().and_then(|x| x.failure()) {
            return Err(format!("node {} failed: {failure}", n + 1));
        }
        self.check_events(n);
        Ok(())
    }

    /// hostd copies, sometimes not at all.
    fn host_copies(
        &mut self,
        n: usize,
        id: u64,
        items: &[storage::volume::CopyItem],
    ) -> Result<(), String> {
        let lost = self.random.chance(1, 10);
        if lost {
            return Ok(());
        }
        let bad = if self.random.chance(1, 5) {
            vec![self.random.below(items.len() as u64) as u32]
        } else {
            Vec::new()
        };
        let upto = bad.first().map_or(items.len(), |b| *b as usize);
        storage::volume::run_copies(&*self.hosts[n].region, &items[..upto])
            .map_err(|e| format!("hostd cannot copy: {e}"))?;
        let incarnation = self.hosts[n].incarnation;
        let delay = self.between(50 * US, 3 * MS);
        self.at(self.now + delay, Item::To(n, incarnation, Event::CopiesDone { id, bad }));
        Ok(())
    }

    /// Clients whose event word grew wake.
    pub(crate) fn check_events(&mut self, n: usize) {
        for c in 0..self.actors.len() {
            if self.actors[c].node == n && self.actor_has_news(c) {
                let delay = self.between(500, 8 * US);
                self.step_in(c, delay);
            }
        }
    }

    // --- links ---

    fn believes(&self, at: usize, peer: usize) -> Option<u64> {
        let link = self.links.get(&(at.min(peer), at.max(peer)))?;
        link.believes[usize::from(at > peer)]
    }

    fn send(&mut self, from: usize, to: usize, class: Class, kind: u16, body: Vec<u8>) {
        let slow = self.hosts.get(to).is_some_and(|h| h.slow);
        let delay = match (slow, self.random.below(20)) {
            (true, _) => self.between(MS, 20 * MS),
            (_, 0) => self.between(50 * US, 2 * MS),
            _ => self.between(2 * US, 30 * US),
        };
        let now = self.now;
        let Some(link) = self.links.get_mut(&(from.min(to), from.max(to))) else { return };
        let side = usize::from(from > to);
        if !link.up || link.believes[side] != Some(link.number) {
            self.trace(|| format!("lost {}>{} kind {kind}", from + 1, to + 1));
            return;
        }
        let last = &mut link.order[side][class as usize];
        *last = (*last + 1).max(now + delay);
        let (at, number) = (*last, link.number);
        self.at(at, Item::Frame { from, to, link: number, kind, body });
    }

    /// Links follow what lives, who knows of whom, and what is cut.
    fn update_links(&mut self) {
        let pairs: Vec<(usize, usize)> = self.links.keys().copied().collect();
        for (a, b) in pairs {
            let fit = |n: usize| self.hosts[n].node.is_some() && self.hosts[n].has_view;
            let fit = fit(a) && fit(b);
            let Some(link) = self.links.get_mut(&(a, b)) else { continue };
            let wanted = fit && link.cut == 0;
            if wanted == link.up {
                continue;
            }
            link.up = wanted;
            if wanted {
                link.number += 1;
            }
            let number = link.number;
            for (side, (at, peer)) in [(a, b), (b, a)].into_iter().enumerate() {
                let delay = self.between(10 * US, if wanted { 500 * US } else { 3 * MS });
                let Some(link) = self.links.get_mut(&(a, b)) else { continue };
                // In the order of what happened, at each end: nothing overtakes.
                let incoming = 1 - side;
                let last = link.order[incoming].iter().copied().max().unwrap_or(0);
                let when = (self.now + delay).max(last + 1);
                link.order[incoming] = [when; 2];
                let item = if wanted {
                    Item::PeerUp { at, peer, link: number }
                } else {
                    Item::PeerDown { at, peer, link: number }
                };
                self.at(when, item);
            }
        }
    }

    fn peer_up(&mut self, at: usize, peer: usize, number: u64) -> Result<(), String> {
        let Some(link) = self.links.get_mut(&(at.min(peer), at.max(peer))) else { return Ok(()) };
        if !link.up || link.number != number || self.hosts[at].node.is_none() {
            return Ok(());
        }
        link.believes[usize::from(at > peer)] = Some(number);
        self.trace(|| format!("up {} sees {}", at + 1, peer + 1));
        self.deliver(at, Event::PeerUp(NodeId(peer as u32 + 1)))
    }

    fn peer_down(&mut self, at: usize, peer: usize, number: u64) -> Result<(), String> {
        let Some(link) = self.links.get_mut(&(at.min(peer), at.max(peer))) else { return Ok(()) };
        let believes = &mut link.believes[usize::from(at > peer)];
        if *believes != Some(number) {
            return Ok(());
        }
        *believes = None;
        self.trace(|| format!("down {} misses {}", at + 1, peer + 1));
        self.deliver(at, Event::PeerDown(NodeId(peer as u32 + 1)))
    }

    // --- coordinator ---

    fn start_coordinator(&mut self) -> Result<(), String> {
        let spec = VolumeSpec {
            name: VOLUME.into(),
            replicas: self.preset.nodes as u16,
            nodes: (1..=self.preset.nodes).map(|n| NodeId(n as u32)).collect(),
        };
        let image = self.image.clone();
        let patience = Patience::default();
        self.machine = Some(Machine::new(CLUSTER, &[spec], patience, image, self.now)?);
        Ok(())
    }

    fn speaker(&self, n: usize, incarnation: u64) -> Speaker {
        Speaker { volume: VOLUME.into(), node: self.hosts[n].id, incarnation }
    }

    /// Whether what travels on that connection arrives.
    fn reaches(&self, n: usize, connection: u64) -> bool {
        let host = &self.hosts[n];
        host.node.is_some() && host.connection == connection && !host.cut_off
    }

    fn connect(&mut self, n: usize, incarnation: u64) {
        let host = &mut self.hosts[n];
        if host.node.is_none() || host.incarnation != incarnation || host.connected {
            return;
        }
        if !host.cut_off && self.machine.is_some() {
            host.connection += 1;
            self.tell_coordinator(n, Up::Register);
        }
        let again = self.between(20 * MS, 60 * MS);
        self.at(self.now + again, Item::Connect(n, incarnation));
    }

    fn tell_coordinator(&mut self, n: usize, up: Up) {
        let delay = self.between(20 * US, 400 * US);
        let host = &mut self.hosts[n];
        if host.cut_off || (!host.connected && !matches!(up, Up::Register)) {
            return;
        }
        host.order[0] = (host.order[0] + 1).max(self.now + delay);
        let (at, connection, incarnation) = (host.order[0], host.connection, host.incarnation);
        self.at(at, Item::ToCoordinator(n, connection, incarnation, up));
    }

    fn tell_node(&mut self, n: usize, item: Item) {
        let slow = self.hosts[n].slow;
        let delay = if slow { self.between(MS, 20 * MS) } else { self.between(20 * US, 400 * US) };
        let host = &mut self.hosts[n];
        host.order[1] = (host.order[1] + 1).max(self.now + delay);
        let at = host.order[1];
        self.at(at, item);
    }

    fn coordinator_hears(&mut self, n: usize, connection: u64, incarnation: u64, up: Up) {
        if self.hosts[n].cut_off || self.hosts[n].connection != connection || self.machine.is_none()
        {
            return;
        }
        let by = self.speaker(n, incarnation);
        match up {
            Up::Register => {
                let host = &self.hosts[n];
                let position = host.node.as_ref().map_or(StreamSeq(0), |x| x.position());
                let registration = Registration {
                    volume: VOLUME.into(),
                    node: host.id,
                    incarnation,
                    position,
                    state: host.noted.map_or(DataState::Fresh, |epoch| DataState::Intact { epoch }),
                    tcp: None,
                    run_dir: String::new(),
                    info: String::new(),
                };
                if self.coordinate(CoEvent::Register(registration)) {
                    self.tell_node(n, Item::Registered(n, connection));
                    if let Some(view) = self.machine.as_ref().and_then(|m| m.view(VOLUME)) {
                        self.tell_node(n, Item::View(n, connection, view));
                    }
                }
            }
            Up::Beat(sent, position) => {
                if self.coordinate(CoEvent::Heartbeat(by, position)) {
                    self.tell_node(n, Item::Confirm(n, connection, sent));
                }
            }
            Up::Joined(node, epoch) => {
                self.coordinate(CoEvent::CaughtUp(by, node, epoch));
            }
            Up::Suspect(node, epoch) => {
                self.coordinate(CoEvent::Suspect(by, node, epoch));
            }
        }
    }

    fn coordinate(&mut self, event: CoEvent) -> bool {
        let now = self.now;
        let Some(machine) = &mut self.machine else { return false };
        let (verdict, actions) = machine.step(event, now);
        if let Err(why) = &verdict {
            let why = why.clone();
            self.trace(|| format!("coordinator refuses: {why}"));
        }
        for action in actions {
            match action {
                Action::Persist(image) => self.image = Some(image),
                Action::Push(node, view) => {
                    let n = node.0 as usize - 1;
                    self.trace(|| {
                        format!(
                            "push {node} epoch {} {:?} {:?}",
                            view.epoch, view.chain, view.syncing
                        )
                    });
                    let connection = self.hosts[n].connection;
                    self.tell_node(n, Item::View(n, connection, view));
                }
            }
        }
        verdict.is_ok()
    }

    fn view_arrived(&mut self, n: usize, view: &View) -> Result<(), String> {
        let host = &mut self.hosts[n];
        let (me, member) = (host.id, view.is_member(host.id, host.incarnation));
        let mut chain = view.chain.clone();
        if member {
            host.noted = Some(view.epoch);
        } else {
            chain.retain(|x| *x != me);
            if view.syncing.contains(&me) {
                host.noted = None;
            }
        }
        host.has_view = true;
        self.trace(|| {
            format!("view {me} epoch {} {chain:?} syncing {:?}", view.epoch, view.syncing)
        });
        let (epoch, syncing) = (view.epoch, view.syncing.clone());
        self.deliver(n, Event::View { epoch, chain, syncing })?;
        self.update_links();
        Ok(())
    }

    fn drop_connection(&mut self, n: usize) {
        let host = &mut self.hosts[n];
        if host.connected {
            host.connected = false;
            host.disconnected_at = self.now;
        }
        host.connection += 1;
        let incarnation = host.incarnation;
        let delay = self.between(MS, 40 * MS);
        self.at(self.now + delay, Item::Connect(n, incarnation));
    }

    // --- faults ---

    fn begin_fault(&mut self, fault: Fault) -> Result<(), String> {
        if self.healed || (matches!(fault, Fault::RegionLost(_)) && !self.may_lose(fault)) {
            return Ok(());
        }
        self.trace(|| format!("FAULT {fault:?}"));
        *self.outcome.faults.entry(fault.kind()).or_default() += 1;
        match fault {
            Fault::Crash(n) => self.stop_node(n),
            Fault::PowerCut(n) => {
                self.stop_node(n);
                self.hosts[n].region = Arc::new(self.hosts[n].region.cut(&mut self.random));
            }
            Fault::RegionLost(n) => {
                self.stop_node(n);
                self.hosts[n].region = fresh_region(self.hosts[n].id)?;
                self.hosts[n].noted = None;
            }
            Fault::LinkDown(a, b) => {
                if let Some(link) = self.links.get_mut(&(a.min(b), a.max(b))) {
                    link.cut += 1;
                }
                self.update_links();
            }
            Fault::CutOff(n) => self.hosts[n].cut_off = true,
            Fault::Reconnect(n) => {
                let incarnation = self.hosts[n].incarnation;
                if self.hosts[n].connected && self.hosts[n].node.is_some() {
                    self.drop_connection(n);
                    self.at(self.now + MS, Item::Disconnected(n, incarnation));
                }
            }
            Fault::Slow(n) => self.hosts[n].slow = true,
            Fault::Coordinator => {
                self.machine = None;
                for n in 0..self.hosts.len() {
                    self.drop_connection(n);
                }
            }
            Fault::Kill(c) => self.kill_actor(c)?,
            Fault::Stop(c) => {
                let lasts = fault.lasts(&mut self.random);
                self.actors[c].stop_for = Some(lasts);
            }
        }
        let lasts = fault.lasts(&mut self.random);
        self.at(self.now + lasts, Item::End(fault));
        Ok(())
    }

    /// Another member has everything, whatever becomes of the node.
    fn may_lose(&self, fault: Fault) -> bool {
        let Fault::RegionLost(n) = fault else { return false };
        let seats = self.image.iter().flat_map(|i| i.volumes.values()).flat_map(|c| &c.seats);
        let mut others = seats.filter(|s| s.node != self.hosts[n].id);
        others.any(|s| self.hosts[s.node.0 as usize - 1].noted.is_some())
    }

    fn end_fault(&mut self, fault: Fault) -> Result<(), String> {
        self.trace(|| format!("end of {fault:?}"));
        match fault {
            Fault::Crash(n) | Fault::PowerCut(n) | Fault::RegionLost(n) => self.start_node(n)?,
            Fault::LinkDown(a, b) => {
                if let Some(link) = self.links.get_mut(&(a.min(b), a.max(b))) {
                    link.cut = link.cut.saturating_sub(1);
                }
                self.update_links();
            }
            Fault::CutOff(n) => {
                if std::mem::take(&mut self.hosts[n].cut_off) {
                    self.drop_connection(n);
                }
            }
            Fault::Slow(n) => self.hosts[n].slow = false,
            Fault::Coordinator => {
                if self.machine.is_none() {
                    self.start_coordinator()?;
                }
            }
            Fault::Reconnect(_) | Fault::Kill(_) | Fault::Stop(_) => {}
        }
        Ok(())
    }

    fn heal(&mut self) -> Result<(), String> {
        self.trace(|| "HEAL".into());
        self.healed = true;
        if self.machine.is_none() {
            self.start_coordinator()?;
        }
        for link in self.links.values_mut() {
            link.cut = 0;
        }
        for n in 0..self.hosts.len() {
            self.hosts[n].slow = false;
            if std::mem::take(&mut self.hosts[n].cut_off) {
                self.drop_connection(n);
            }
            self.start_node(n)?;
        }
        self.update_links();
        Ok(())
    }

    // --- judging ---

    fn is_quiet(&self) -> bool {
        if !self.actors.iter().all(Actor::is_done) {
            return false;
        }
        let mut first = None;
        for host in &self.hosts {
            let Some(node) = &host.node else { return false };
            let s = node.status();
            let serves = matches!(s.role, Role::Head | Role::Member) && s.ready && !s.fenced;
            let still = s.applied == s.stream && s.published == s.stream;
            if !serves || !still || s.chain.len() != self.hosts.len() || s.requests + s.recalls > 0
            {
                return false;
            }
            let key = (s.stream, s.epoch);
            if *first.get_or_insert(key) != key {
                return false;
            }
        }
        true
    }

    fn state_of_affairs(&self) -> String {
        let mut text = String::new();
        for host in &self.hosts {
            match &host.node {
                None => text += &format!("[{} down]", host.id),
                Some(node) => {
                    let s = node.status();
                    text += &format!(
                        "[{} {:?} ready {} fenced {} epoch {} chain {:?} syncing {:?} stream {} \
                         applied {} published {} acked {} requests {} recalls {}]",
                        host.id,
                        s.role,
                        s.ready,
                        s.fenced,
                        s.epoch,
                        s.chain,
                        s.syncing,
                        s.stream,
                        s.applied,
                        s.published,
                        s.all_acked,
                        s.requests,
                        s.recalls
                    );
                }
            }
        }
        for (c, actor) in self.actors.iter().enumerate() {
            if !actor.is_done() {
                text += &format!("[client {c} {}]", actor.describe());
            }
        }
        text
    }

    /// Everything is quiet: every member shows what the model allows, and the same.
    fn judge(&mut self) -> Result<(), String> {
        self.trace(|| "JUDGE".into());
        let mut digests = Vec::new();
        for n in 0..self.hosts.len() {
            let media: Arc<dyn Media> = Arc::clone(&self.hosts[n].region) as _;
            let report = storage::check::check(&*media).map_err(|e| format!("check: {e}"))?;
            if !report.is_sound() {
                let findings: Vec<String> =
                    report.findings.iter().map(ToString::to_string).collect();
                return Err(format!("region of node {}: {}", n + 1, findings.join("; ")));
            }
            // Twice: as nicfs has it, and as somebody finds it who opens the region.
            let opened = Volume::open(media).map_err(|e| format!("open: {e:?}"))?;
            let cold = opened.digest().map_err(|e| format!("digest: {e:?}"))?;
            let Some(node) = &self.hosts[n].node else { continue };
            let warm = node.volume().digest().map_err(|e| format!("digest: {e:?}"))?;
            if cold != warm {
                let what = opened.differences(node.volume());
                return Err(format!("node {}: its region differs from its state: {what:?}", n + 1));
            }
            digests.push(cold);
            self.judge_content(n, &opened)?;
            if digests[0] != cold {
                let first = &self.hosts[0].region;
                let first = Volume::open(Arc::clone(first) as _).map_err(|e| format!("{e:?}"))?;
                let what = first.differences(&opened);
                return Err(format!("members 1 and {} differ: {what:?}", n + 1));
            }
        }
        Ok(())
    }

    fn judge_content(&mut self, n: usize, volume: &Volume) -> Result<(), String> {
        for ino in self.model.inodes() {
            let seen = state_of(volume, ino)?;
            self.outcome.observations += 1;
            self.model
                .observe(None, ino, &seen)
                .map_err(|e| format!("in the end, node {}: {e}", n + 1))?;
        }
        Ok(())
    }
}

/// What a volume says of an inode.
fn state_of(volume: &Volume, ino: u64) -> Result<State, String> {
    let ino = base::InodeId(ino);
    let fault = |e: storage::volume::Fault| format!("{ino}: {e:?}");
    let Some(record) = volume.attr(ino).map_err(fault)? else { return Ok(State::gone()) };
    if record.nlink == 0 {
        return Ok(State::gone());
    }
    let body = if record.mode & 0o170_000 == 0o040_000 {
        let mut names = BTreeMap::new();
        volume
            .readdir(ino, 0, usize::MAX, &mut |n| {
                if n.name != b"." && n.name != b".." {
                    names.insert(n.name.to_vec(), n.ino.0);
                }
                true
            })
            .map_err(fault)?;
        Body::Dir(names)
    } else {
        let mut bytes = vec![0; record.size as usize];
        volume.read_file(ino, 0, &mut bytes).map_err(fault)?;
        Body::File(bytes, record.nlink)
    };
    Ok(State { mode: record.mode, body })
}
