//! Directed histories: what goes wrong, and at which moment of the protocol.
//!
//! Faults drawn at random times seldom meet two in a row at the moment that matters. A [`Script`] waits for a state
//! of the cluster ("member 3 is ahead of member 2", "the answer to a recall is on its way") and brings its faults
//! about right then. Everything else of the history (the operations of the clients, delays) is drawn from the seed.

use base::Nanos;
use base::random::Random;
use service::core::Role;

use crate::actor::Kind;
use crate::faults::Fault;
use crate::world::{Flavour, MS, Preset, US, World};

/// Kinds of messages (`service/src/core/message.rs`) that scripts wait for.
pub mod kind {
    /// A chunk is on a member.
    pub const CHUNK_ACK: u16 = 2;
    /// Appended entries, from an agent to the head.
    pub const ENTRIES: u16 = 5;
    /// A lease was taken back.
    pub const RECALLED: u16 = 11;
}

/// The moment for which a step waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// At once.
    Now,
    /// Every node is in the chain and nothing is under way between them.
    Whole,
    /// The first node has more of the stream than the second.
    Ahead(usize, usize),
    /// This node sends that one messages of these two kinds, the second right after the first.
    Sends(usize, usize, [u16; 2]),
    /// This node sends that one a message of this kind.
    SendsOne(usize, usize, u16),
    /// fsync has returned to this client, and the first node has more of the stream than the second.
    SyncedAhead(usize, usize, usize),
    /// fsync has returned to this client.
    Synced(usize),
    /// One node suspects another.
    Suspects(usize, usize),
    /// The head tells the coordinator that the node has everything.
    Joined(usize),
    /// The node is in the chain no more, as the coordinator has it.
    Out(usize),
    /// The node is head, and serves.
    Heads(usize),
    /// A link is up, as both its ends believe.
    Linked(usize, usize),
}

/// A fault of a step: how long after its moment, which, and how long it lasts.
pub type Deed = (Nanos, Fault, Nanos);

/// One step: wait, for a moment, and do.
#[derive(Clone, Debug)]
pub struct Step {
    /// Not before so long after the step before.
    pub pause: Nanos,
    /// The moment.
    pub when: When,
    /// What happens then.
    pub deeds: Vec<Deed>,
}

/// Steps, one after the other, again and again.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// See above.
    pub steps: Vec<Step>,
    /// How often, until the cluster is healed.
    pub rounds: u32,
}

impl Script {
    /// A script of so many rounds.
    pub fn new(rounds: u32) -> Self {
        Self { steps: Vec::new(), rounds }
    }

    /// With one step more.
    #[must_use]
    pub fn then(mut self, pause: Nanos, when: When, deeds: &[Deed]) -> Self {
        self.steps.push(Step { pause, when, deeds: deeds.to_vec() });
        self
    }
}

/// How far a script is.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    step: usize,
    round: u32,
    /// The step may begin from here on.
    from: Nanos,
    /// What has happened since the script looked last.
    pub(crate) moments: Vec<Moment>,
}

/// What a script cannot see in the state afterwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moment {
    /// A message of this kind was sent.
    Sent(usize, usize, u16),
    /// fsync returned.
    Synced(usize),
    /// A suspicion was told to the coordinator.
    Suspects(usize, usize),
    /// That a node has caught up was told to the coordinator.
    Joined(usize),
}

impl World<'_> {
    /// Notes what a script may wait for.
    pub(crate) fn moment(&mut self, moment: Moment) {
        if self.preset.is_directed() {
            self.stage.moments.push(moment);
        }
    }

    /// Looks whether the next step's moment has come; called after every event.
    pub(crate) fn follow_script(&mut self) -> Result<(), String> {
        let moments = std::mem::take(&mut self.stage.moments);
        let script = &self.preset.script;
        if self.healed || self.stage.round >= script.rounds || self.now < self.stage.from {
            return Ok(());
        }
        let Some(step) = script.steps.get(self.stage.step) else { return Ok(()) };
        if self.now < self.stage.from + step.pause || !self.is_moment(step.when, &moments) {
            return Ok(());
        }
        let (when, deeds) = (step.when, step.deeds.clone());
        self.trace(|| format!("SCRIPT {when:?}"));
        self.outcome.steps += 1;
        self.stage.from = self.now;
        self.stage.step += 1;
        if self.stage.step == self.preset.script.steps.len() {
            (self.stage.step, self.stage.round) = (0, self.stage.round + 1);
        }
        for (after, fault, lasts) in deeds {
            match after {
                0 => self.begin_fault_for(fault, Some(lasts))?,
                _ => self.at(self.now + after, crate::world::Item::Deed(fault, lasts)),
            }
        }
        Ok(())
    }

    fn is_moment(&self, when: When, moments: &[Moment]) -> bool {
        let stream = |n: usize| self.hosts[n].node.as_ref().map(|x| x.position().0);
        match when {
            When::Now => true,
            When::Whole => self.is_whole(),
            When::Ahead(a, b) => stream(a).zip(stream(b)).is_some_and(|(a, b)| a > b),
            When::Sends(a, b, [first, second]) => {
                let sent = |pair: &[Moment], at: usize, kind| pair[at] == Moment::Sent(a, b, kind);
                moments.windows(2).any(|pair| sent(pair, 0, first) && sent(pair, 1, second))
            }
            When::SendsOne(a, b, kind) => moments.contains(&Moment::Sent(a, b, kind)),
            When::Synced(c) => moments.contains(&Moment::Synced(c)),
            When::SyncedAhead(c, a, b) => {
                moments.contains(&Moment::Synced(c)) && self.is_moment(When::Ahead(a, b), &[])
            }
            When::Joined(n) => moments.contains(&Moment::Joined(n)),
            When::Suspects(a, b) => moments.contains(&Moment::Suspects(a, b)),
            When::Out(n) => !self.seats().contains(&self.hosts[n].id),
            When::Heads(n) => self.hosts[n].node.as_ref().is_some_and(|x| {
                let status = x.status();
                status.role == Role::Head && status.ready
            }),
            When::Linked(a, b) => {
                let number = self.link_number(a, b);
                number.is_some() && number == self.believes(a, b) && number == self.believes(b, a)
            }
        }
    }

    fn is_whole(&self) -> bool {
        let mut epoch = None;
        self.hosts.iter().all(|host| {
            host.node.as_ref().is_some_and(|node| {
                let s = node.status();
                let in_chain = matches!(s.role, Role::Head | Role::Member);
                in_chain
                    && s.ready
                    && !s.fenced
                    && s.chain.len() == self.hosts.len()
                    && *epoch.get_or_insert(s.epoch) == s.epoch
            })
        })
    }
}

/// A directed history, and what it is for.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// What it is called: like the planted bug that it shows, if there is one.
    pub name: &'static str,
    /// What happens in it.
    pub tells: &'static str,
    make: fn(&mut Preset, &mut Random),
}

impl Scenario {
    /// The history of `seed`.
    pub fn preset(&self, seed: u64) -> Preset {
        let mut preset = Preset::plain(seed);
        (self.make)(&mut preset, &mut Random::new(seed ^ 0x5c12));
        if !preset.clients_at.is_empty() {
            preset.clients = preset.clients_at.len();
        }
        preset
    }

    /// The scenario of that name.
    pub fn named(name: &str) -> Option<&'static Scenario> {
        ALL.iter().find(|s| s.name == name)
    }
}

/// All of them.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "drawn",
        tells: "moments and faults that nobody has thought of: the script is drawn from the seed, too",
        make: draw,
    },
    Scenario {
        name: "old-epoch-accepted",
        tells: "what the head granted arrives when a member that is gone has made another epoch, in which it is not held",
        make: |p, _| {
            use Kind::{Create, List, Read, Rename, Write};
            (p.clients_at, p.pace, p.ops, p.syncs) = (vec![1, 0, 1, 0], MS, 1000, 1000);
            p.favour = vec![Create, Write, Write, Read, Read, List, Rename];
            p.script = Script::new(6).then(
                200 * MS,
                When::Whole,
                &[(0, Fault::OneWay(0, 1), 60 * MS), (2 * MS, Fault::Crash(2), 30 * MS)],
            );
        },
    },
    Scenario {
        name: "heir-untold",
        tells: "processes that lock the same few files are killed, and their next lives are their heirs",
        make: |p, _| heirs(p),
    },
    Scenario { name: "heir-alone", tells: "the same", make: |p, _| heirs(p) },
    Scenario {
        name: "shared-bytes",
        tells: "processes of all nodes write and read the same few files, mostly blocks of their own, while links and nodes come and go",
        make: |p, r| {
            p.make(Flavour::Bytes);
            p.clients_at = (0..3 + r.below(2)).map(|_| r.below(3) as usize).collect();
            (p.ops, p.syncs, p.threads) = (300, [10, 30, 100][r.below(3) as usize], 1 + r.below(2));
            p.pace = [200 * US, MS, 4 * MS][r.below(3) as usize];
            let pause = [40, 150, 400][r.below(3) as usize] * MS;
            p.script = Script::new(3).then(pause, When::Whole, &deeds(p, r));
            for _ in 0..r.below(3) {
                let (when, deeds) = (moment(p, r), deeds(p, r));
                p.script = std::mem::take(&mut p.script).then(r.below(20 * MS), when, &deeds);
            }
            p.active = 1200 * MS;
        },
    },
    Scenario {
        name: "sync-own-only",
        tells: "processes sync files that others write, whose node loses its link to the second, and dies",
        make: |p, _| {
            use Kind::{Create, Write};
            p.favour = vec![Create, Write, Write, Write, Write, Write];
            syncs_of_others(p);
        },
    },
    Scenario {
        name: "early-vouches",
        tells: "processes of the head's node sync files that others of it write, and so on",
        make: |p, _| {
            use Kind::{Create, Write};
            p.favour = vec![Create, Write, Write, Write, Write, Write];
            (p.clients_at, p.pace, p.ops, p.syncs) = (vec![0, 0, 0], 200 * US, 3000, 6);
            p.script = (0..3).fold(Script::new(3), |script, c| {
                let ahead = When::SyncedAhead(c, 0, 1);
                script.then(20 * MS, When::Whole, &[(0, Fault::LinkDown(0, 1), 20 * MS)]).then(
                    0,
                    ahead,
                    &[(0, Fault::Crash(0), 300 * MS)],
                )
            });
        },
    },
    Scenario {
        name: "sync-joint-alone",
        tells: "processes sync directories that others use as well, and so on",
        make: |p, _| {
            use Kind::{Create, Link, Mkdir, Rename, Unlink};
            p.make(Flavour::Joint);
            p.favour = vec![Mkdir, Create, Create, Create, Link, Unlink, Rename];
            syncs_of_others(p);
        },
    },
    Scenario {
        name: "loss-beside-untold",
        tells: "processes write and sync the same files at a node that loses its place, and nobody syncs first",
        make: |p, _| {
            use Kind::{Create, Write};
            (p.clients_at, p.pace, p.ops, p.syncs) = (vec![1, 1, 1], MS, 3000, 6);
            p.favour = vec![Create, Write, Write, Write, Write, Write];
            p.script = (0..3).fold(Script::new(3), |script, c| {
                let lost = [(0, Fault::Crash(1), 700 * MS)];
                script.then(0, When::Whole, &[]).then(40 * MS, When::Synced(c), &lost)
            });
        },
    },
    Scenario {
        name: "take-over-short",
        tells: "the last member is sent what the second has not got, and the head dies",
        make: |p, _| {
            (p.pace, p.ops) = (10 * MS, 1000);
            p.script = Script::new(2)
                .then(300 * MS, When::Whole, &[(0, Fault::OneWay(0, 1), 500 * MS)])
                .then(10 * MS, When::Ahead(0, 1), &[(0, Fault::LinkDown(0, 2), 200 * US)])
                .then(0, When::Ahead(2, 1), &[(0, Fault::Crash(0), 700 * MS)]);
        },
    },
    Scenario {
        name: "unready-orders",
        tells: "the head dies, the second asks the last for what it has not got, whose clients write on",
        make: |p, _| {
            p.clients_at = vec![2, 2, 2, 0];
            behind_its_member(p);
        },
    },
    Scenario {
        name: "release-overtakes",
        tells: "the same, and leases are on their way back",
        make: |p, _| {
            p.clients_at = vec![2, 2, 0, 1];
            behind_its_member(p);
        },
    },
    Scenario {
        name: "progress-forgotten",
        tells: "the second is not told that all have what its client wrote, and becomes the head",
        make: |p, _| {
            (p.clients_at, p.syncs) = (vec![1, 1, 1, 0], 2);
            behind_its_member(p);
            // Right behind the last acknowledgement of a chunk, before the word of it.
            p.script.steps[0].when = When::SendsOne(2, 0, kind::CHUNK_ACK);
        },
    },
    Scenario {
        name: "room-unsought",
        tells: "the ring runs full by what members write while a node joins",
        make: |p, _| {
            p.make(Flavour::Large);
            (p.clients_at, p.pace, p.ops) = (vec![1, 1, 1], MS, 100);
            (p.capacity, p.active) = (160 << 20, 3000 * MS);
            p.favour = vec![Kind::Write, Kind::Chmod, Kind::Create];
            let lost = [(0, Fault::RegionLost(2), 30 * MS)];
            p.script = Script::new(4).then(200 * MS, When::Whole, &lost);
        },
    },
    Scenario {
        name: "room-unkept",
        tells: "clients on all nodes write until nothing is left, and most of them count on room that they were given",
        make: |p, random| {
            p.make(Flavour::Full);
            (p.clients_at, p.pace, p.ops) = (vec![0, 1, 2, 0], 4 * MS, 150);
            (p.write_max, p.file_max) = (40_000, 400_000);
            (p.capacity, p.write_min) = (1 << 20, 9000);
            use Kind::{Append, Create, Unlink, Write};
            p.favour = vec![Append, Create, Write, Append, Append, Write, Append, Unlink];
            if random.chance(1, 2) {
                p.script =
                    Script::new(6).then(200 * MS, When::Whole, &[(0, Fault::Crash(0), 30 * MS)]);
            }
        },
    },
    Scenario {
        name: "grant-before-replicated",
        tells: "what one client of the head writes another reads, members get none of it, the head dies",
        make: |p, _| {
            (p.clients_at, p.pace, p.ops, p.syncs) = (vec![0, 0, 1, 2], MS, 400, 1000);
            p.favour = vec![Kind::Read, Kind::List, Kind::Write, Kind::Chmod, Kind::Create];
            p.script = Script::new(2)
                .then(200 * MS, When::Whole, &[(0, Fault::OneWay(0, 1), 900 * MS)])
                .then(40 * MS, When::Ahead(0, 1), &[(0, Fault::Crash(0), 900 * MS)]);
        },
    },
    Scenario {
        name: "joint-before-replicated",
        tells: "what one client of the head does to names after another a third looks up there, members get none of it, the head dies",
        make: |p, _| {
            use Kind::{Create, Link, List, Rename, Unlink};
            p.make(Flavour::Joint);
            p.favour = vec![Create, Unlink, Rename, Link, List, List, List];
            (p.clients_at, p.pace, p.ops, p.syncs) = (vec![0, 0, 0, 1], MS, 400, 1000);
            p.script = Script::new(3)
                .then(100 * MS, When::Whole, &[(0, Fault::OneWay(0, 1), 900 * MS)])
                .then(20 * MS, When::Ahead(0, 1), &[(0, Fault::Crash(0), 900 * MS)]);
        },
    },
    Scenario {
        name: "stale-recall",
        tells: "recalls cross the report of a member that lost its link, and it is slow",
        make: |p, _| {
            (p.clients_at, p.pace) = (vec![0, 1, 2], MS);
            p.ops = 400;
            p.script = Script::new(40)
                .then(20 * MS, When::Linked(0, 1), &[(0, Fault::LinkDown(0, 1), 100 * US)])
                .then(
                    300 * US,
                    When::Linked(0, 1),
                    &[(0, Fault::OneWay(1, 0), 20 * MS), (0, Fault::Slow(1), 60 * MS)],
                );
        },
    },
    Scenario {
        name: "join-keeps-old",
        tells: "a member that others went on without returns with what it had",
        make: |p, _| {
            p.script =
                Script::new(2).then(200 * MS, When::Whole, &[(0, Fault::Crash(1), 300 * MS)]);
        },
    },
    Scenario {
        name: "progress-overstated",
        tells: "fsync waits for the last member, the client's node loses its link to the head, both die",
        make: |p, _| {
            (p.clients_at, p.pace, p.syncs) = (vec![1, 1, 0], 5 * MS, 3);
            p.script = Script::new(1)
                .then(300 * MS, When::Whole, &[(0, Fault::OneWay(1, 2), 550 * MS)])
                .then(30 * MS, When::Ahead(1, 2), &[(0, Fault::LinkDown(0, 1), 100 * US)])
                .then(
                    0,
                    When::Synced(0),
                    &[(0, Fault::Crash(0), 900 * MS), (0, Fault::Crash(1), 900 * MS)],
                );
        },
    },
    Scenario {
        name: "gap-acknowledged",
        tells: "large chunks arrive after small ones; when fsync returns, the head dies",
        make: |p, _| {
            (p.nodes, p.clients_at, p.pace, p.syncs) = (2, vec![0, 0], 3 * MS, 3);
            (p.write_max, p.file_max, p.ops) = (300_000, 400_000, 200);
            p.favour = vec![Kind::Write, Kind::Chmod, Kind::Create];
            p.script = Script::new(3)
                .then(300 * MS, When::Whole, &[(0, Fault::Slow(1), 800 * MS)])
                .then(10 * MS, When::SyncedAhead(0, 0, 1), &[(0, Fault::Crash(0), 500 * MS)]);
        },
    },
    Scenario {
        name: "lost-node-kept",
        tells: "a member dies for good; what its clients held is wanted",
        make: |p, _| {
            (p.pace, p.ops) = (10 * MS, 500);
            p.script = Script::new(1).then(300 * MS, When::Whole, &[(0, Fault::Gone(2), 1)]);
        },
    },
    Scenario {
        name: "reported-too-few",
        tells: "the head dies while a lease comes back to it, behind the last operations under it",
        make: |p, _| {
            (p.clients_at, p.pace) = (vec![1, 2, 1, 2], 2 * MS);
            p.script = Script::new(4)
                .then(
                    100 * MS,
                    When::Sends(1, 0, [kind::ENTRIES, kind::RECALLED]),
                    &[(0, Fault::Crash(0), 250 * MS)],
                )
                .then(0, When::Whole, &[]);
        },
    },
    Scenario {
        name: "rewind-ahead",
        tells: "the link between head and member breaks when entries are on their way, and again when they are back",
        make: |p, _| {
            (p.clients_at, p.pace, p.ops) = (vec![1, 1, 1, 0], MS, 200);
            p.script = Script::new(60)
                .then(
                    5 * MS,
                    When::SendsOne(1, 0, kind::ENTRIES),
                    &[(20 * US, Fault::LinkDown(0, 1), 10 * US)],
                )
                .then(100 * US, When::Linked(0, 1), &[(100 * US, Fault::LinkDown(0, 1), 10 * US)]);
        },
    },
    Scenario {
        name: "moved-content",
        tells: "files change their mode while their content is sent to a member that joins",
        make: |p, _| {
            joins(p, &[Kind::Chmod, Kind::Chmod, Kind::Chmod]);
        },
    },
    Scenario {
        name: "view-reused",
        tells: "names come and go while names are sent to a member that joins",
        make: |p, _| {
            joins(p, &[Kind::Create, Kind::Unlink, Kind::Rename]);
            (p.ops, p.active, p.script.rounds) = (1500, 1500 * MS, 6);
        },
    },
    Scenario {
        name: "clone-while-joining",
        tells: "ranges of files are cloned and written while files are sent to a member that joins",
        make: |p, _| {
            joins(p, &[Kind::Clone, Kind::Clone, Kind::Write]);
        },
    },
    Scenario {
        name: "shift-while-joining",
        tells: "blocks go from the middle of files, and come into it, while files are sent to a member that joins",
        make: |p, _| {
            joins(p, &[Kind::Shift, Kind::Shift, Kind::Write]);
        },
    },
    Scenario {
        name: "snapshot-piece-lost",
        tells: "files larger than one message are sent to a member that joins",
        make: |p, _| {
            joins(p, &[Kind::Write]);
            (p.write_min, p.write_max, p.file_max) = (100_000, 300_000, 400_000);
            (p.ops, p.pace) = (40, 5 * MS);
        },
    },
    Scenario {
        name: "ring-overrun",
        tells: "more than the stream ring holds is written while hostd hangs, and the node restarts",
        make: |p, _| {
            p.nodes = 1;
            (p.clients_at, p.pace, p.ops) = (vec![0; 8], 100 * US, 20);
            (p.write_min, p.write_max, p.file_max) = (900_000, 1 << 20, 1 << 20);
            (p.hostd_deaf, p.capacity, p.syncs) = (true, 200 << 20, 1000);
            p.favour = vec![Kind::Write, Kind::Create];
            p.insists = true;
            p.active = 900 * MS;
            // Memory still has what the ring has lost: who needs the ring is who comes after a crash.
            let crash = [(0, Fault::Crash(0), 30 * MS)];
            p.script = Script::new(3).then(300 * MS, When::Whole, &crash);
        },
    },
    Scenario {
        name: "suspected-at-once",
        tells: "the head suspects a member that hears nothing of it, and dies at once",
        make: |p, _| {
            use Kind::{Create, List, Read, Rename, Write};
            (p.clients_at, p.pace, p.ops, p.syncs) = (vec![1, 2, 1, 2], 5 * MS, 1000, 1000);
            p.favour = vec![Create, Write, Write, Read, Read, List, Rename];
            p.script = Script::new(1)
                .then(1600 * MS, When::Whole, &[(0, Fault::OneWay(1, 0), 900 * MS)])
                .then(0, When::Suspects(0, 1), &[(0, Fault::CutOff(1), 700 * MS)])
                .then(0, When::Out(1), &[(0, Fault::Crash(0), 900 * MS)]);
        },
    },
    Scenario {
        name: "lapse-ignored",
        tells: "nicfs of a member hangs for longer than leases hold; its clients read on",
        make: |p, _| {
            (p.clients_at, p.pace, p.ops) = (vec![1, 0, 1, 2], 5 * MS, 1000);
            // Nobody waits for the node that hangs.
            p.syncs = 1000;
            p.favour = vec![Kind::Read, Kind::List, Kind::Write, Kind::Create, Kind::Unlink];
            (p.script, p.active) = (hangs(1), 3500 * MS);
        },
    },
    Scenario {
        name: "number-again",
        tells: "nicfs is started anew, and a client makes an inode with a number that it has used",
        make: |p, _| {
            (p.nodes, p.clients_at, p.pace, p.ops) = (1, vec![0], 2 * MS, 400);
            p.hostile = true;
            p.favour = vec![Kind::Create, Kind::Unlink, Kind::OldNumber];
            p.script = Script::new(20).then(60 * MS, When::Whole, &[(0, Fault::Crash(0), 20 * MS)]);
        },
    },
    Scenario {
        name: "hung-head",
        tells: "nicfs of the head hangs for longer than leases hold, and wakes; all its clients go on",
        make: |p, _| {
            (p.clients_at, p.pace, p.ops) = (vec![0, 1, 0, 2], 5 * MS, 1000);
            (p.script, p.active) = (hangs(0), 3500 * MS);
        },
    },
    Scenario {
        name: "lapse-short",
        tells: "a member is suspected, does not hear of it, and is out of the chain while its clients' leases hold",
        make: |p, _| {
            (p.clients_at, p.pace, p.ops) = (vec![1, 2, 1, 0], 5 * MS, 1000);
            p.script = Script::new(1)
                .then(1600 * MS, When::Whole, &[(0, Fault::OneWay(1, 0), 700 * MS)])
                .then(560 * MS, When::Now, &[(0, Fault::CutOff(1), 700 * MS)]);
        },
    },
    Scenario {
        name: "join-keeps-logs",
        tells: "nicfs of a member dies and returns when others have gone on; its clients live",
        make: |p, _| {
            (p.clients_at, p.pace, p.ops) = (vec![1, 0, 1, 2], 5 * MS, 1000);
            // They do not wait for their node soon, and want the same few files.
            p.syncs = 1000;
            p.favour = vec![Kind::Write, Kind::Chmod, Kind::Rename, Kind::Create];
            p.script =
                Script::new(4).then(150 * MS, When::Whole, &[(0, Fault::Crash(1), 200 * MS)]);
        },
    },
    Scenario {
        name: "held-forgotten",
        tells: "nicfs of every node dies while clients work, and all return",
        make: |p, _| {
            (p.clients_at, p.pace, p.ops) = (vec![1, 0, 1, 2], 5 * MS, 1000);
            p.script = Script::new(4).then(
                150 * MS,
                When::Whole,
                &[
                    (0, Fault::Crash(0), 60 * MS),
                    (0, Fault::Crash(1), 90 * MS),
                    (0, Fault::Crash(2), 30 * MS),
                ],
            );
        },
    },
    Scenario {
        name: "numbers-of-another",
        tells: "a new head hands out numbers, of which the last member hears nothing, and which is the next head alone; its \
                clients go on with what they had open",
        make: |p, _| {
            use Kind::{Read, Tmpfile, Write};
            (p.clients_at, p.ops, p.syncs) = (vec![1, 1, 2, 2], 1000, 1000);
            (p.starts, p.pace, p.closes) = (vec![1550 * MS; 4], 4 * MS, 200);
            // What was handed out before is soon used up.
            (p.numbers, p.favour) = (Some(2), vec![Tmpfile, Tmpfile, Read, Write]);
            p.active = 5000 * MS;
            p.script = Script::new(1)
                .then(1600 * MS, When::Whole, &[(0, Fault::CutOff(0), 2500 * MS)])
                .then(0, When::Heads(1), &[(0, Fault::OneWay(1, 2), 900 * MS)])
                .then(150 * MS, When::Ahead(1, 2), &[(0, Fault::CutOff(1), 1500 * MS)]);
        },
    },
    Scenario {
        name: "join-unheard",
        tells: "a head that was cut off joins a new one, and tells what is open there before that knows that it joins",
        make: |p, _| {
            use Kind::{Create, Read, Tmpfile, Unlink};
            (p.clients_at, p.ops, p.syncs, p.closes) = (vec![0, 1, 2, 0], 400, 10, 400);
            (p.pace, p.active) = (25 * MS, 9000 * MS);
            p.favour = vec![Tmpfile, Tmpfile, Create, Unlink, Read, Read];
            // Who comes back is the last one: the next is the head by then.
            let cut = |n| [(0, Fault::CutOff(n), 700 * MS)];
            p.script = Script::new(3)
                .then(1600 * MS, When::Whole, &cut(0))
                .then(100 * MS, When::Whole, &cut(1))
                .then(100 * MS, When::Whole, &cut(2));
        },
    },
    Scenario {
        name: "caught-up-unnamed",
        tells: "a node that joins has everything, loses its region, and asks again at once",
        make: |p, _| {
            p.pace = 5 * MS;
            // What a slow head says reaches the coordinator when the node is there again.
            p.script = Script::new(12)
                .then(30 * MS, When::Whole, &[(0, Fault::RegionLost(1), 20 * MS)])
                .then(0, When::Now, &[(0, Fault::Slow(0), 300 * MS)])
                .then(0, When::Joined(1), &[(0, Fault::RegionLost(1), US)]);
        },
    },
];

/// A node that hangs, again and again. For a while after its start the coordinator evicts nobody for silence.
fn hangs(node: usize) -> Script {
    Script::new(2).then(1600 * MS, When::Whole, &[(0, Fault::Hang(node), 900 * MS)])
}

/// Processes lock the same few files, and are killed again and again.
fn heirs(p: &mut Preset) {
    use Kind::{Create, Lock};
    (p.clients_at, p.pace, p.ops, p.syncs) = (vec![0, 1, 2, 1], MS, 1000, 1000);
    p.favour = vec![Create, Lock, Lock, Lock, Lock, Lock, Lock, Lock];
    p.script = (0..4).fold(Script::new(8), |script, c| {
        script.then(15 * MS, When::Whole, &[(0, Fault::Kill(c), 0)])
    });
}

/// The head dies when something was synced there, and nobody else has all that was done.
fn syncs_of_others(p: &mut Preset) {
    (p.clients_at, p.pace, p.ops, p.syncs) = (vec![0, 0, 1, 1], 200 * US, 3000, 6);
    p.script = (0..4).fold(Script::new(4), |script, c| {
        script.then(20 * MS, When::Whole, &[(0, Fault::LinkDown(0, 1), 20 * MS)]).then(
            0,
            When::SyncedAhead(2 + c % 2, 0, 1),
            &[(0, Fault::Crash(0), 300 * MS)],
        )
    });
}

/// The head dies when the second has less than the third, which writes on.
fn behind_its_member(p: &mut Preset) {
    (p.pace, p.ops) = (MS, 1000);
    p.favour = vec![Kind::Write, Kind::Chmod, Kind::Create];
    p.script = Script::new(2)
        .then(300 * MS, When::Whole, &[(0, Fault::OneWay(0, 1), 500 * MS)])
        .then(10 * MS, When::Ahead(0, 1), &[(0, Fault::LinkDown(0, 2), 200 * US)])
        .then(0, When::Ahead(2, 1), &[(0, Fault::Crash(0), 700 * MS)]);
}

/// A member that joins a slow head, while a client beside the head does as it likes, and not for long afterwards:
/// what the member lacks must not be written anew.
fn joins(p: &mut Preset, kinds: &[Kind]) {
    (p.clients_at, p.pace, p.ops, p.syncs) = (vec![0], MS, 500, 1000);
    (p.numbers, p.active) = (Some(100), 300 * MS);
    p.favour = [&[Kind::Create, Kind::Mkdir, Kind::Write][..], kinds].concat();
    p.script = Script::new(1).then(
        100 * MS,
        When::Whole,
        &[(0, Fault::RegionLost(1), 50 * MS), (40 * MS, Fault::Slow(0), 100 * MS)],
    );
}

/// A script of moments of the protocol, and of what may happen there.
fn draw(p: &mut Preset, r: &mut Random) {
    p.clients_at = (0..2 + r.below(3)).map(|_| r.below(3) as usize).collect();
    (p.ops, p.syncs) = (300, 2 + r.below(10));
    p.pace = [MS, 3 * MS, 10 * MS, 40 * MS][r.below(4) as usize];
    match r.below(6) {
        // The stream ring runs full.
        0 | 1 => {
            p.make(Flavour::Large);
            (p.ops, p.capacity) = (80, 160 << 20);
        }
        2 => p.hostile = true,
        3 => p.make(Flavour::Full),
        _ => {}
    }
    p.favour = match r.below(4) {
        0 => vec![Kind::Write, Kind::Chmod, Kind::Create],
        1 => vec![Kind::Read, Kind::List, Kind::Write, Kind::Create, Kind::Unlink],
        _ => Vec::new(),
    };
    let pause = [20, 100, 300, 1600][r.below(4) as usize] * MS;
    p.script = Script::new(1 + r.below(4) as u32).then(pause, When::Whole, &deeds(p, r));
    for _ in 0..r.below(4) {
        let pause = [0, r.below(20 * US), r.below(2 * MS), r.below(100 * MS)][r.below(4) as usize];
        let (when, deeds) = (moment(p, r), deeds(p, r));
        p.script = std::mem::take(&mut p.script).then(pause, when, &deeds);
    }
    p.active = 3000 * MS;
}

/// One fault, or two.
fn deeds(p: &Preset, r: &mut Random) -> Vec<Deed> {
    (0..1 + r.below(2)).map(|_| deed(p, r)).collect()
}

fn deed(p: &Preset, r: &mut Random) -> Deed {
    let (a, b) = two(r);
    let fault = match r.below(8) {
        0 => Fault::LinkDown(a, b),
        1 => Fault::OneWay(a, b),
        2 => Fault::Crash(a),
        3 => Fault::Hang(a),
        _ => Fault::draw(r, p.nodes, p.clients_at.len()),
    };
    let lasts = if r.chance(1, 3) { r.below(500 * US) } else { fault.lasts(r) };
    (if r.chance(1, 2) { 0 } else { r.below(2 * MS) }, fault, 1 + lasts)
}

fn moment(p: &Preset, r: &mut Random) -> When {
    let (a, b) = two(r);
    let client = r.below(p.clients_at.len() as u64) as usize;
    // All kinds of messages.
    let mut kind = || 1 + r.below(23) as u16;
    match (kind(), kind()) {
        (1..=3, _) => When::Now,
        (4, _) => When::Whole,
        (5..=8, _) => When::Ahead(a, b),
        (9, k) => When::Sends(a, b, [k, kind()]),
        (10..=14, k) => When::SendsOne(a, b, k),
        (15 | 16, _) => When::SyncedAhead(client, a, b),
        (17, _) => When::Synced(client),
        (18, _) => When::Suspects(a, b),
        (19, _) => When::Joined(a),
        (20, _) => When::Out(a),
        (21 | 22, _) => When::Heads(a),
        _ => When::Linked(a, b),
    }
}

/// Two nodes of three.
fn two(r: &mut Random) -> (usize, usize) {
    let a = r.below(3) as usize;
    (a, (a + 1 + r.below(2) as usize) % 3)
}
