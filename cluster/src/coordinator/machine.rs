//! The coordinator's decisions: `step(event, now)` changes the state and says what to do, in order.
//! No clock, no I/O, no randomness: the same events give the same actions.
//!
//! Always true, of each volume (`check` asserts it after every step):
//! - the epoch only grows, by one with each change of the chain; 0 means that there is no chain;
//! - the chain has at least one seat from epoch 1 on, at most `replicas`, and no node twice;
//! - a seat is added only at epoch 0, by re-forming from the seats before it, or from `syncing`;
//! - a seat passes to another process of its node only if that has the region of the process before it;
//! - the level only grows;
//! - `syncing` and the chain share no node, and together are at most `replicas`, or the chain alone;
//! - whatever was pushed was persisted by an earlier action.

mod volume;

use std::collections::BTreeMap;

use base::{Epoch, Nanos, NodeId, StreamSeq};

use super::message::{Choice, Copies, Registration, View, valid_name};
use super::store::{Image, Seat};
use volume::Volume;

/// A volume as the configuration describes it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VolumeSpec {
    /// Its name.
    pub name: String,
    /// Replicas wanted, 1 or more.
    pub replicas: u16,
    /// So many members of the chain must hold what is acknowledged: with fewer, fsync waits. 0: a majority of `replicas`.
    pub min_replicas: u16,
    /// Nodes that may register, in the order in which they are preferred; empty: any.
    pub nodes: Vec<NodeId>,
}

impl VolumeSpec {
    /// How many members must hold what is acknowledged.
    pub const fn least(&self) -> u16 {
        match self.min_replicas {
            0 => self.replicas / 2 + 1,
            given => given,
        }
    }
}

/// How patient the coordinator is. All in milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// Between two heartbeats of a node.
    pub heartbeat_ms: u32,
    /// A member is evicted when it has been silent for this long.
    pub failure_timeout_ms: u32,
    /// The same after its connection has ended, which is what the death of a process looks like.
    pub lost_connection_ms: u32,
    /// After the restart of a whole chain: how long the first member waits for the others.
    pub grace_ms: u32,
    /// A node that was suspected is not brought back for this long.
    pub hold_ms: u32,
    /// A member whose process was started again keeps its place if that is ready within this time after it has come.
    pub return_ms: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            heartbeat_ms: 100,
            failure_timeout_ms: 500,
            lost_connection_ms: 150,
            grace_ms: 2000,
            hold_ms: 1000,
            return_ms: 400,
        }
    }
}

impl Patience {
    /// After this long without having been heard, by the coordinator's clock, a node holds itself for
    /// replaced and its clients' leases have lapsed. Clocks differ by one percent at most.
    pub(crate) fn lapse(&self) -> Nanos {
        let fence = crate::coordinator::fence_after(millis(self.failure_timeout_ms));
        fence + fence / 50
    }

    /// Says what is wrong with the figures, if anything is.
    pub fn check(&self) -> Result<(), String> {
        if self.heartbeat_ms == 0 || self.failure_timeout_ms < 4 * self.heartbeat_ms {
            return Err(format!(
                "failure_timeout_ms ({}) must be at least 4 times heartbeat_ms ({}), which must not be 0",
                self.failure_timeout_ms, self.heartbeat_ms
            ));
        }
        if !(100..=self.failure_timeout_ms).contains(&self.lost_connection_ms) {
            return Err(format!(
                "lost_connection_ms ({}) must lie between 100 and failure_timeout_ms ({})",
                self.lost_connection_ms, self.failure_timeout_ms
            ));
        }
        Ok(())
    }
}

pub(crate) fn millis(ms: u32) -> Nanos {
    Nanos::from(ms) * 1_000_000
}

/// Which process of which node of which volume speaks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Speaker {
    /// The volume.
    pub volume: String,
    /// The node.
    pub node: NodeId,
    /// Its process.
    pub incarnation: u64,
}

/// What happens to the coordinator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A node introduces itself.
    Register(Registration),
    /// A process that had said that it is about to be ready is; what it has by now.
    Opened(Speaker, StreamSeq, String),
    /// It lives.
    Heartbeat(Speaker, StreamSeq),
    /// Its connection ended.
    Disconnected(Speaker),
    /// This process of a node has all of the stream.
    CaughtUp(Speaker, Seat, Epoch),
    /// `node` does not acknowledge.
    Suspect(Speaker, NodeId, Epoch),
    /// The speaker stops in order.
    Leave(Speaker),
    /// A person decides to form the chain without those that are missing.
    Force(String),
    /// A person goes on with one copy of a volume, when the chain has lost all that it had.
    Choose(String, Choice),
    /// Time passes; to come at least every half failure timeout.
    Tick,
}

/// What is to be done, in this order; nothing after a Persist that failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Make this survive.
    Persist(Image),
    /// Tell a node, if it is connected.
    Push(NodeId, View),
}

/// Why an event was turned down; nothing was changed.
pub type Refused = String;

/// See the module.
#[derive(Debug)]
pub struct Machine {
    cluster: u128,
    generation: u64,
    patience: Patience,
    volumes: BTreeMap<String, Volume>,
    last: Nanos,
}

impl Machine {
    /// A coordinator that starts at `now` from what it had persisted, if anything.
    pub fn new(
        cluster: u128,
        specs: &[VolumeSpec],
        patience: Patience,
        image: Option<Image>,
        now: Nanos,
    ) -> Result<Self, String> {
        patience.check()?;
        let mut image = image.unwrap_or(Image { cluster, ..Image::default() });
        if image.cluster != cluster {
            return Err(format!(
                "the state belongs to cluster {:032x}, the configuration says {cluster:032x}; use the right folder",
                image.cluster
            ));
        }
        let mut volumes = BTreeMap::new();
        for spec in specs {
            if !valid_name(&spec.name) || spec.replicas == 0 || spec.replicas > 16 {
                return Err(format!(
                    "volume \"{}\": the name must be 1 to 64 of a-z A-Z 0-9 - _ . and replicas 1 to 16",
                    spec.name
                ));
            }
            if spec.min_replicas > spec.replicas {
                return Err(format!(
                    "volume \"{}\": min_replicas is {}, of {} replicas; write at most {}, or 0 for a majority",
                    spec.name, spec.min_replicas, spec.replicas, spec.replicas
                ));
            }
            let chain = image.volumes.remove(&spec.name).unwrap_or_default();
            let volume = Volume::new(spec.clone(), chain, patience, now);
            if volumes.insert(spec.name.clone(), volume).is_some() {
                return Err(format!("volume \"{}\" is configured twice", spec.name));
            }
        }
        if let Some(name) = image.volumes.keys().next() {
            return Err(format!(
                "the state has volume \"{name}\", the configuration has not; add it again"
            ));
        }
        Ok(Self { cluster, generation: image.generation, patience, volumes, last: now })
    }

    /// How patient it is.
    pub fn patience(&self) -> Patience {
        self.patience
    }

    /// The current views.
    pub fn views(&self) -> Vec<View> {
        self.volumes.values().map(|volume| volume.view(self.last)).collect()
    }

    /// The current view of one volume.
    pub fn view(&self, volume: &str) -> Option<View> {
        self.volumes.get(volume).map(|volume| volume.view(self.last))
    }

    /// What every node has of a volume.
    pub fn copies(&self, volume: &str) -> Option<Copies> {
        self.volumes.get(volume).map(Volume::copies)
    }

    /// See the module. A refusal comes with the actions that time alone brought about.
    pub fn step(&mut self, event: Event, now: Nanos) -> (Result<(), Refused>, Vec<Action>) {
        let now = now.max(self.last);
        self.forgive_own_pause(now);
        let verdict = self.apply(event, now);
        let mut changed = false;
        let mut pushes = Vec::new();
        for volume in self.volumes.values_mut() {
            changed |= volume.settle(now);
            volume.check();
            pushes
                .extend(volume.news(now).into_iter().map(|(node, view)| Action::Push(node, view)));
        }
        let mut actions = Vec::new();
        if changed {
            self.generation += 1;
            actions.push(Action::Persist(self.image()));
        }
        actions.extend(pushes);
        (verdict, actions)
    }

    /// For how long nothing becomes due by itself, if nobody says anything: the clock is to be looked at
    /// then. Never so long that it would be taken for a pause of the coordinator itself.
    pub fn rest(&self, now: Nanos) -> Nanos {
        let beat = millis(self.patience.heartbeat_ms);
        // A little more than what comes regularly in any case, so that this look mostly is none.
        let calm = (beat + beat / 3).min(millis(self.patience.failure_timeout_ms) / 3);
        let due = self.volumes.values().map(|volume| volume.due(self.last));
        match due.min() {
            None => calm,
            Some(due) => due.saturating_sub(now).clamp(1_000_000, calm),
        }
    }

    /// If the coordinator itself was stopped for a while, heartbeats wait unread and nobody else
    /// is to blame.
    fn forgive_own_pause(&mut self, now: Nanos) {
        let pause = now - self.last;
        self.last = now;
        if pause > millis(self.patience.failure_timeout_ms) / 2 {
            for volume in self.volumes.values_mut() {
                volume.extend_deadlines(pause);
            }
        }
    }

    fn image(&self) -> Image {
        let volumes =
            self.volumes.iter().map(|(name, v)| (name.clone(), v.chain.clone())).collect();
        Image { cluster: self.cluster, generation: self.generation, volumes }
    }

    fn volume(&mut self, name: &str) -> Result<&mut Volume, Refused> {
        self.volumes.get_mut(name).ok_or_else(|| {
            format!("there is no volume \"{name}\"; add it to the coordinator's configuration")
        })
    }

    fn apply(&mut self, event: Event, now: Nanos) -> Result<(), Refused> {
        match event {
            Event::Register(registration) => {
                let name = registration.volume.clone();
                self.volume(&name)?.register(registration, now)
            }
            Event::Opened(by, position, info) => {
                self.volume(&by.volume)?.opened(&by, position, info)
            }
            Event::Heartbeat(by, position) => self.volume(&by.volume)?.heard(&by, position, now),
            Event::Disconnected(by) => self.volume(&by.volume)?.disconnected(&by, now),
            Event::CaughtUp(by, who, epoch) => self.volume(&by.volume)?.caught_up(&by, who, epoch),
            Event::Suspect(by, node, epoch) => {
                self.volume(&by.volume)?.suspect(&by, node, epoch, now)
            }
            Event::Leave(by) => self.volume(&by.volume)?.leave(&by),
            Event::Force(name) => self.volume(&name)?.force(),
            Event::Choose(name, choice) => self.volume(&name)?.choose(choice),
            Event::Tick => Ok(()),
        }
    }
}
