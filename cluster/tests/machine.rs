//! The coordinator's decisions: each rule by an example, then all of them under random histories.

use std::collections::BTreeMap;

use base::random::Random;
use base::{Epoch, Level, Nanos, NodeId, StreamSeq};
use cluster::coordinator::machine::{Action, Event, Machine, Patience, Speaker, VolumeSpec};
use cluster::coordinator::message::Choice;
use cluster::coordinator::store::{Image, Seat};
use cluster::coordinator::{DataState, Registration, View};

const MS: Nanos = 1_000_000;
const INTACT: fn(u32) -> DataState = |e| DataState::Intact { epoch: Epoch(e) };

fn spec(replicas: u16, nodes: &[u32]) -> VolumeSpec {
    let nodes = nodes.iter().map(|n| NodeId(*n)).collect();
    VolumeSpec { name: "v".to_owned(), replicas, nodes, ..VolumeSpec::default() }
}

fn seat(node: u32, incarnation: u64) -> Seat {
    Seat { node: NodeId(node), incarnation }
}

fn by(node: u32, incarnation: u64) -> Speaker {
    Speaker { volume: "v".to_owned(), node: NodeId(node), incarnation }
}

fn registration(node: u32, incarnation: u64, position: u64, state: DataState) -> Registration {
    Registration {
        volume: "v".to_owned(),
        node: NodeId(node),
        incarnation,
        position: StreamSeq(position),
        state,
        tcp: None,
        run_dir: String::new(),
        info: String::new(),
        // Who has data has the region of the processes before it.
        before: match state {
            DataState::Fresh => Vec::new(),
            DataState::Intact { .. } => (1..incarnation).collect(),
        },
        ..Registration::default()
    }
}

/// A machine, its clock, and what it has persisted and said.
struct World {
    machine: Machine,
    spec: VolumeSpec,
    now: Nanos,
    image: Option<Image>,
    pushed: BTreeMap<NodeId, View>,
}

impl World {
    fn new(spec: VolumeSpec) -> Self {
        let machine =
            Machine::new(1, std::slice::from_ref(&spec), Patience::default(), None, 0).unwrap();
        Self { machine, spec, now: 0, image: None, pushed: BTreeMap::new() }
    }

    fn step(&mut self, event: Event) -> Result<(), String> {
        let (verdict, actions) = self.machine.step(event, self.now);
        for action in actions {
            match action {
                Action::Persist(image) => self.image = Some(image),
                Action::Push(node, view) => drop(self.pushed.insert(node, view)),
            }
        }
        verdict
    }

    fn register(&mut self, node: u32, incarnation: u64, position: u64, state: DataState) {
        let event = Event::Register(registration(node, incarnation, position, state));
        self.step(event).unwrap();
    }

    /// Time passes; `beating` send heartbeats.
    fn pass(&mut self, ms: u64, beating: &[(u32, u64)]) {
        for _ in 0..ms / 50 {
            self.now += 50 * MS;
            for (node, incarnation) in beating {
                let _ = self.step(Event::Heartbeat(by(*node, *incarnation), StreamSeq(0)));
            }
            self.step(Event::Tick).unwrap();
        }
    }

    /// The coordinator is killed and started again from what it had persisted.
    fn restart(&mut self) {
        let specs = std::slice::from_ref(&self.spec);
        let image = self.image.clone();
        if let Some(image) = &image {
            assert_eq!(Image::decode(&image.encode()).as_ref(), Ok(image), "it round-trips");
        }
        self.machine = Machine::new(1, specs, Patience::default(), image, self.now).unwrap();
    }

    fn view(&self) -> View {
        self.machine.view("v").unwrap()
    }

    fn chain(&self) -> (u32, Vec<u32>) {
        let view = self.view();
        (view.epoch.0, view.chain.iter().map(|n| n.0).collect())
    }

    fn syncing(&self) -> Vec<u32> {
        self.view().syncing.iter().map(|n| n.0).collect()
    }
}

fn three() -> World {
    let mut world = World::new(spec(3, &[1, 2, 3]));
    for node in 1..=3 {
        assert_eq!(world.chain(), (0, vec![]));
        world.register(node, 1, 0, DataState::Fresh);
    }
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.pass(2000, &[(1, 1), (2, 1), (3, 1)]);
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world
}

#[test]
fn a_person_goes_on_with_an_older_copy_when_the_chain_has_lost_its_own() {
    let mut world = three();
    let choose = |world: &mut World, node, incarnation, epoch, position| {
        let choice = Choice {
            node: NodeId(node),
            incarnation,
            epoch: Epoch(epoch),
            position: StreamSeq(position),
        };
        world.step(Event::Choose("v".to_owned(), choice))
    };
    // 2 and 3 are put out; 1 goes on alone, and loses its region.
    world.step(Event::Disconnected(by(2, 1))).unwrap();
    world.step(Event::Disconnected(by(3, 1))).unwrap();
    world.pass(1000, &[(1, 1)]);
    let (epoch, chain) = world.chain();
    assert_eq!(chain, [1]);
    world.register(2, 2, 70, INTACT(1));
    assert!(choose(&mut world, 2, 2, 1, 0).unwrap_err().contains("node 1"), "1 serves");
    world.step(Event::Disconnected(by(1, 1))).unwrap();
    world.pass(1000, &[(2, 2)]);
    world.register(1, 2, 0, DataState::Fresh);
    world.pass(5000, &[(1, 2), (2, 2)]);
    assert_eq!(world.chain(), (epoch, vec![1]), "nobody goes on by chance");
    world.register(3, 2, 60, DataState::Fresh);

    let copies = world.machine.copies("v").unwrap();
    assert!(!copies.lives);
    let may: Vec<bool> = copies.copies.iter().map(|c| c.may_be_chosen).collect();
    assert_eq!(may, [false, true, false], "{copies:?}");
    assert!(choose(&mut world, 1, 2, 1, 0).unwrap_err().contains("no copy"));
    assert!(choose(&mut world, 9, 2, 1, 0).unwrap_err().contains("not registered"));
    assert!(choose(&mut world, 2, 2, 1, 71).unwrap_err().contains("look again"));
    choose(&mut world, 2, 2, 1, 0).unwrap();
    assert_eq!(world.chain(), (epoch + 1, vec![2]));
    assert!(world.view().is_member(NodeId(2), 2));
    world.pass(100, &[(1, 2), (2, 2), (3, 2)]);
    assert_eq!(world.syncing(), [1, 3], "the others are filled from it");
    assert_eq!(world.image.as_ref().unwrap().volumes["v"].seats, [seat(2, 2)]);
}

#[test]
fn a_process_that_was_put_out_is_no_choice_before_it_has_restarted() {
    let mut world = three();
    let choose = |world: &mut World, incarnation| {
        let (node, epoch, position) = (NodeId(2), Epoch(1), StreamSeq(0));
        let choice = Choice { node, incarnation, epoch, position };
        world.step(Event::Choose("v".to_owned(), choice))
    };
    for node in [2, 3] {
        let epoch = world.view().epoch;
        world.step(Event::Suspect(by(1, 1), NodeId(node), epoch)).unwrap();
    }
    world.step(Event::Disconnected(by(1, 1))).unwrap();
    // The same process says what it had.
    world.register(2, 1, 0, INTACT(1));
    world.pass(1000, &[(2, 1), (3, 1)]);
    world.register(1, 2, 0, DataState::Fresh);
    assert!(choose(&mut world, 1).unwrap_err().contains("restart"));
    world.register(2, 2, 0, INTACT(1));
    choose(&mut world, 2).unwrap();
    assert_eq!(world.chain().1, [2]);
}

#[test]
fn a_dead_head_is_replaced_by_the_next_and_returns_at_the_tail() {
    let mut world = three();
    world.pass(450, &[(2, 1), (3, 1)]);
    assert_eq!(world.chain().0, 1, "not before the timeout");
    world.pass(100, &[(2, 1), (3, 1)]);
    assert_eq!(world.chain(), (2, vec![2, 3]));
    assert_eq!(world.pushed[&NodeId(3)].epoch, Epoch(2));
    world.register(1, 2, 0, INTACT(1));
    assert_eq!(world.chain(), (2, vec![2, 3]));
    assert_eq!(world.syncing(), [1]);
    let stale = Event::CaughtUp(by(1, 2), seat(1, 2), Epoch(1));
    assert!(world.step(stale).unwrap_err().contains("epoch 1"));
    let foreign = Event::CaughtUp(by(3, 1), seat(1, 2), Epoch(2));
    assert!(world.step(foreign).unwrap_err().contains("may not speak"));
    // Of the process that died, by a head that has not heard of its end.
    let late = Event::CaughtUp(by(2, 1), seat(1, 1), Epoch(2));
    assert!(world.step(late).unwrap_err().contains("has taken its place"));
    assert_eq!(world.chain(), (2, vec![2, 3]));
    world.step(Event::CaughtUp(by(1, 2), seat(1, 2), Epoch(2))).unwrap();
    assert_eq!(world.chain(), (3, vec![2, 3, 1]));
}

#[test]
fn the_end_of_a_connection_shortens_the_wait() {
    let mut world = three();
    world.step(Event::Disconnected(by(1, 1))).unwrap();
    world.pass(100, &[(2, 1), (3, 1)]);
    assert_eq!(world.chain().0, 1);
    world.pass(100, &[(2, 1), (3, 1)]);
    assert_eq!(world.chain(), (2, vec![2, 3]));
}

/// It has the region of the process before it, so nothing is lost: neither its place, nor the order, head, middle and tail.
#[test]
fn a_member_that_restarts_at_once_keeps_its_place() {
    for node in 1..=3 {
        let mut world = three();
        world.register(node, 2, 7, INTACT(1));
        assert_eq!(world.chain(), (2, vec![1, 2, 3]), "node {node}: in a new epoch");
        let view = world.view();
        assert!(view.is_member(NodeId(node), 2) && !view.is_member(NodeId(node), 1));
        assert_eq!((world.syncing(), view.lapse_ms), (vec![], 0));
    }
}

#[test]
fn a_member_that_restarts_without_its_region_is_out_at_once() {
    let mut world = three();
    world.step(Event::Disconnected(by(1, 1))).unwrap();
    let other = Registration { before: vec![], ..registration(1, 2, 7, INTACT(1)) };
    world.step(Event::Register(other)).unwrap();
    assert_eq!(world.chain(), (2, vec![2, 3]));
    assert_eq!(world.syncing(), [1]);
    let old = Event::Heartbeat(by(1, 1), StreamSeq(0));
    assert!(world.step(old).unwrap_err().contains("not registered"));
    let late = Event::Register(registration(1, 1, 0, INTACT(1)));
    assert!(world.step(late).unwrap_err().contains("newer process"));
}

/// It says so as soon as it has its region, long before it can serve: then it is waited for, a while.
#[test]
fn who_is_about_to_be_ready_is_waited_for() {
    let opens = |world: &mut World, incarnation| {
        let before = (1..incarnation).collect();
        let new = registration(2, incarnation, 7, INTACT(1));
        let event = Event::Register(Registration { opening: true, before, ..new });
        world.step(event).unwrap();
    };
    let opened = Event::Opened(by(2, 2), StreamSeq(9), String::new());
    let mut world = three();
    world.step(Event::Disconnected(by(2, 1))).unwrap();
    world.pass(100, &[(1, 1), (3, 1)]);
    opens(&mut world, 2);
    world.pass(300, &[(1, 1), (3, 1), (2, 2)]);
    assert_eq!(world.chain(), (1, vec![1, 2, 3]), "it is not ready yet");
    world.step(opened.clone()).unwrap();
    assert_eq!(world.chain(), (2, vec![1, 2, 3]));
    // Not for ever, and no longer if it is started again and again.
    let mut world = three();
    world.step(Event::Disconnected(by(2, 1))).unwrap();
    opens(&mut world, 2);
    world.pass(200, &[(1, 1), (3, 1), (2, 2)]);
    world.step(Event::Disconnected(by(2, 2))).unwrap();
    opens(&mut world, 3);
    world.pass(150, &[(1, 1), (3, 1), (2, 3)]);
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.pass(100, &[(1, 1), (3, 1), (2, 3)]);
    assert_eq!(world.chain(), (2, vec![1, 3]));
    assert!(world.syncing().is_empty(), "it has not said that it can");
    world.step(Event::Opened(by(2, 3), StreamSeq(9), String::new())).unwrap();
    assert_eq!(world.syncing(), [2]);
    // Nobody waits for one that has died again.
    let mut world = three();
    world.step(Event::Disconnected(by(2, 1))).unwrap();
    opens(&mut world, 2);
    world.step(Event::Disconnected(by(2, 2))).unwrap();
    world.pass(150, &[(1, 1), (3, 1)]);
    assert_eq!(world.chain(), (2, vec![1, 3]));
    assert!(world.step(opened).is_ok(), "a late word changes nothing");
    assert_eq!(world.chain(), (2, vec![1, 3]));
}

#[test]
fn a_double_never_pushes_the_real_one_out() {
    let mut world = three();
    let double = |incarnation| registration(2, incarnation, 0, DataState::Fresh);
    let refused = world.step(Event::Register(double(5))).unwrap_err();
    assert!(refused.contains("another node.id"), "{refused}");
    world.step(Event::Heartbeat(by(2, 1), StreamSeq(0))).unwrap();
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    // Nor when the coordinator has forgotten who is there.
    world.restart();
    assert!(world.step(Event::Register(double(5))).unwrap_err().contains("wait a moment"));
    world.register(2, 1, 0, INTACT(1));
    assert!(world.step(Event::Register(double(6))).unwrap_err().contains("another node.id"));
    // When the real one is gone it may have the number.
    for node in [1, 3] {
        world.register(node, 1, 0, INTACT(1));
    }
    world.pass(2000, &[(1, 1), (3, 1)]);
    world.step(Event::Register(double(7))).unwrap();
    assert_eq!((world.chain(), world.syncing()), ((2, vec![1, 3]), vec![2]));
}

#[test]
fn a_region_of_another_volume_is_not_let_in() {
    let of = |node, incarnation, region, state| Registration {
        region,
        ..registration(node, incarnation, 0, state)
    };
    let mut world = World::new(spec(3, &[1, 2, 3]));
    world.step(Event::Register(of(1, 1, 7, DataState::Fresh))).unwrap();
    let refused = world.step(Event::Register(of(2, 1, 8, DataState::Fresh))).unwrap_err();
    let remedy = "corbel mkfs --force --uuid 00000000-0000-0000-0000-000000000007";
    assert!(refused.contains(remedy), "{refused}");
    for node in [2, 3] {
        world.step(Event::Register(of(node, 2, 7, DataState::Fresh))).unwrap();
    }
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.pass(2000, &[(1, 1), (2, 2), (3, 2)]);
    world.step(Event::Disconnected(by(3, 2))).unwrap();
    world.pass(300, &[(1, 1), (2, 2)]);
    assert_eq!(world.chain(), (2, vec![1, 2]));
    // It has data, and all that it would take is to be put into the wrong place.
    assert!(world.step(Event::Register(of(3, 3, 9, INTACT(1)))).is_err());
    assert!(world.syncing().is_empty());
    world.step(Event::Register(of(3, 4, 7, INTACT(1)))).unwrap();
    assert_eq!(world.syncing(), [3]);
}

#[test]
fn the_last_member_is_never_evicted() {
    let mut world = three();
    world.pass(1000, &[(2, 1)]);
    assert_eq!(world.chain(), (2, vec![2]));
    world.pass(5000, &[]);
    assert_eq!(world.chain(), (2, vec![2]));
    assert!(!world.view().member(NodeId(2)).unwrap().reachable);
    world.pass(100, &[(2, 1)]);
    assert_eq!(world.chain(), (2, vec![2]), "the same process goes on in the same epoch");
}

#[test]
fn suspicion_is_believed_from_the_head_of_now_only() {
    let mut world = three();
    let suspect =
        |who: u32, node: u32, epoch: u32| Event::Suspect(by(who, 1), NodeId(node), Epoch(epoch));
    assert!(world.step(suspect(2, 3, 1)).unwrap_err().contains("not the head"));
    assert!(world.step(suspect(1, 3, 0)).unwrap_err().contains("epoch"));
    assert!(world.step(suspect(1, 1, 1)).unwrap_err().contains("itself"));
    assert!(world.step(suspect(1, 9, 1)).unwrap_err().contains("neither"));
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.step(suspect(1, 2, 1)).unwrap();
    assert_eq!(world.chain(), (2, vec![1, 3]));
    assert!(world.syncing().is_empty(), "held back for a while");
    world.pass(1100, &[(1, 1), (2, 1), (3, 1)]);
    assert_eq!(world.syncing(), [2]);
    world.step(suspect(1, 2, 2)).unwrap();
    assert_eq!(world.chain(), (2, vec![1, 3]), "dropping a syncing node is no new epoch");
    world.step(suspect(1, 3, 2)).unwrap();
    assert_eq!(world.chain(), (3, vec![1]));
}

#[test]
fn a_restart_of_all_waits_for_all_and_puts_the_longest_first() {
    let mut world = three();
    world.pass(1000, &[]);
    assert_eq!(world.chain(), (1, vec![1, 2, 3]), "all are silent: nobody is evicted");
    world.register(1, 2, 5, INTACT(1));
    world.register(2, 2, 9, INTACT(1));
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.register(3, 2, 9, INTACT(1));
    assert_eq!(world.chain(), (2, vec![2, 3, 1]));
}

#[test]
fn a_restart_goes_on_without_the_missing_after_the_grace_or_by_force() {
    let mut world = three();
    world.pass(1000, &[]);
    assert!(world.step(Event::Force("v".to_owned())).unwrap_err().contains("1, 2, 3"));
    world.register(3, 2, 5, INTACT(1));
    world.pass(1500, &[(3, 2)]);
    assert_eq!(world.chain().0, 1);
    let mut forced = three();
    forced.pass(1000, &[]);
    forced.register(3, 2, 5, INTACT(1));
    forced.step(Event::Force("v".to_owned())).unwrap();
    assert_eq!(forced.chain(), (2, vec![3]));
    world.pass(600, &[(3, 2)]);
    assert_eq!(world.chain(), (2, vec![3]));
    world.register(1, 2, 9, INTACT(1));
    assert_eq!(world.chain(), (2, vec![3]), "no matter how long its stream: it was left behind");
    assert_eq!(world.syncing(), [1]);
}

#[test]
fn a_member_that_lost_its_data_is_no_candidate() {
    let mut world = three();
    world.pass(1000, &[]);
    for node in [1, 2] {
        world.register(node, 2, 0, DataState::Fresh);
    }
    world.pass(5000, &[(1, 2), (2, 2)]);
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.register(3, 2, 4, INTACT(1));
    world.pass(2100, &[(1, 2), (2, 2), (3, 2)]);
    assert_eq!(world.chain(), (2, vec![3]));
    assert_eq!(world.syncing(), [1, 2]);
}

#[test]
fn a_coordinator_that_restarts_changes_nothing_and_gives_time() {
    let mut world = three();
    world.now += 10_000 * MS;
    world.restart();
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.register(2, 1, 0, INTACT(1));
    world.pass(400, &[(2, 1)]);
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.register(1, 1, 0, INTACT(1));
    world.register(3, 1, 0, INTACT(1));
    world.pass(5000, &[(1, 1), (2, 1), (3, 1)]);
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.restart();
    world.register(2, 1, 0, INTACT(1));
    world.pass(2000, &[(2, 1)]);
    assert_eq!(world.chain(), (2, vec![2]), "those that do not return are out");
}

#[test]
fn a_pause_of_the_coordinator_is_not_held_against_the_nodes() {
    let mut world = three();
    world.now += 3_000 * MS; // Stopped: heartbeats wait unread.
    world.step(Event::Heartbeat(by(2, 1), StreamSeq(0))).unwrap();
    world.step(Event::Tick).unwrap();
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
    world.pass(700, &[(2, 1)]);
    assert_eq!(world.chain(), (2, vec![2]));
}

/// Every member hears from the coordinator how many of them must hold what is acknowledged, whatever its own file says.
#[test]
fn the_view_says_how_many_must_hold_what_is_acknowledged() {
    let least = |replicas, min_replicas| {
        let spec = VolumeSpec { min_replicas, ..spec(replicas, &[]) };
        let machine = Machine::new(1, &[spec], Patience::default(), None, 0);
        machine.map(|machine| machine.view("v").unwrap().min_replicas)
    };
    let majorities = [1, 2, 3, 4, 5].map(|replicas| least(replicas, 0).unwrap());
    assert_eq!(majorities, [1, 2, 2, 3, 3]);
    assert_eq!((least(3, 1), least(3, 3)), (Ok(1), Ok(3)));
    assert!(least(3, 4).unwrap_err().contains("at most 3"));
}

#[test]
fn leaving_in_order() {
    let mut world = three();
    world.step(Event::Leave(by(1, 1))).unwrap();
    assert_eq!(world.chain(), (2, vec![2, 3]));
    world.step(Event::Leave(by(3, 1))).unwrap();
    world.step(Event::Leave(by(2, 1))).unwrap();
    assert_eq!(world.chain(), (3, vec![2]), "the last one keeps its seat");
    world.register(3, 2, 0, INTACT(2));
    world.pass(5000, &[(3, 2)]);
    assert_eq!(world.chain(), (3, vec![2]));
    world.register(2, 2, 0, INTACT(3));
    assert_eq!(world.chain(), (4, vec![2]));
    assert_eq!(world.syncing(), [3]);
}

#[test]
fn what_cannot_be_is_refused_with_a_remedy() {
    let mut world = three();
    let refused = |world: &mut World, r: Registration| world.step(Event::Register(r)).unwrap_err();
    assert!(
        refused(&mut world, registration(4, 1, 0, DataState::Fresh)).contains("not configured")
    );
    assert!(refused(&mut world, registration(1, 2, 0, INTACT(7))).contains("restore its folder"));
    let mut other = registration(1, 2, 0, DataState::Fresh);
    other.volume = "w".to_owned();
    assert!(refused(&mut world, other).contains("no volume \"w\""));
    assert_eq!(world.chain(), (1, vec![1, 2, 3]));
}

#[test]
fn spare_nodes_step_in() {
    let mut world = World::new(spec(2, &[]));
    for node in [5, 6, 7] {
        world.register(node, 1, 0, DataState::Fresh);
    }
    assert_eq!(world.chain(), (1, vec![5, 6]));
    assert!(world.syncing().is_empty());
    world.pass(2600, &[(6, 1), (7, 1)]);
    assert_eq!(world.chain(), (2, vec![6]));
    assert_eq!(world.syncing(), [7]);
}

/// A node of the random histories: what it is, and what it really has.
#[derive(Clone, Debug, Default)]
struct Node {
    incarnation: u64,
    /// The first process that had its region.
    since: u64,
    running: bool,
    fresh: bool,
    /// Number of the last acknowledged write that it has.
    has: u64,
    /// Of the last view it was sent.
    epoch: u32,
    mute: bool,
}

/// Nodes start, stop, lose their disks, fall silent, catch up and accuse; the coordinator crashes
/// before, between and after persisting and telling; writes are acknowledged when the chain that a
/// view showed agrees. Lost is what is acknowledged and missing on a member of the chain.
struct History {
    seed: u64,
    random: Random,
    world: World,
    nodes: BTreeMap<u32, Node>,
    acked: u64,
    epoch: u32,
    healing: bool,
}

impl History {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let replicas = 1 + random.below(3) as u16;
        let count = u32::from(replicas) + random.below(2) as u32;
        let nodes = (1..=count).map(|n| (n, Node { fresh: true, ..Node::default() })).collect();
        let world = World::new(spec(replicas, &[]));
        Self { seed, random, world, nodes, acked: 0, epoch: 0, healing: false }
    }

    /// Feeds an event; the coordinator may die at any action of it.
    fn feed(&mut self, event: Event) {
        let (_, actions) = self.world.machine.step(event, self.world.now);
        let dies = self.random.chance(1, 60);
        let at = self.random.below(4) as usize;
        for (index, action) in actions.into_iter().enumerate() {
            if dies && index == at {
                break;
            }
            match action {
                Action::Persist(image) => self.world.image = Some(image),
                Action::Push(node, view) => self.told(node, &view),
            }
        }
        if dies {
            self.world.restart();
            for (id, node) in self.nodes.clone() {
                if node.running && !node.mute {
                    self.register(id);
                }
            }
        }
        self.judge();
    }

    fn told(&mut self, id: NodeId, view: &View) {
        let seed = self.seed;
        let kept = self.world.image.as_ref().map_or(0, |i| i.volumes["v"].epoch.0);
        assert!(view.epoch.0 <= kept, "seed {seed}: told {} before it was kept", view.epoch);
        let node = self.nodes.get_mut(&id.0).unwrap();
        assert!(view.epoch.0 >= node.epoch, "seed {seed}: the epoch of node {id} went back");
        node.epoch = view.epoch.0;
        // A member notes that it is one before it does anything as such.
        if view.is_member(id, node.incarnation) {
            (node.fresh, node.since) = (false, node.incarnation);
        }
    }

    fn judge(&mut self) {
        let seed = self.seed;
        let Some(image) = &self.world.image else { return };
        let chain = &image.volumes["v"];
        assert!(chain.epoch.0 >= self.epoch, "seed {seed}: epoch went back");
        self.epoch = chain.epoch.0;
        for seat in &chain.seats {
            let node = &self.nodes[&seat.node.0];
            let same = node.incarnation == seat.incarnation;
            assert!(
                if same { node.has == self.acked } else { node.fresh || node.has == self.acked },
                "seed {seed}: node {} in the chain has {} of {}: {:?}",
                seat.node,
                node.has,
                self.acked,
                self.nodes
            );
        }
    }

    fn register(&mut self, id: u32) {
        let node = self.nodes[&id].clone();
        let state = if node.fresh { DataState::Fresh } else { INTACT(node.epoch) };
        let before = (node.since..node.incarnation).collect();
        let opening = self.random.chance(1, 3);
        let new = registration(id, node.incarnation, node.has, state);
        self.feed(Event::Register(Registration { before, opening, ..new }));
        if opening && (self.healing || self.random.chance(3, 4)) {
            self.feed(Event::Opened(by(id, node.incarnation), StreamSeq(node.has), String::new()));
        }
    }

    /// The chain acknowledges a write, if every process in it lives; a node that is in a chain has
    /// data from then on.
    fn write(&mut self) {
        let Some(image) = &self.world.image else { return };
        let seats = image.volumes["v"].seats.clone();
        let agree = |nodes: &BTreeMap<u32, Node>| {
            !seats.is_empty()
                && seats.iter().all(|s| {
                    let node = &nodes[&s.node.0];
                    node.running && node.incarnation == s.incarnation
                })
        };
        if agree(&self.nodes) {
            self.acked += 1;
            for seat in seats {
                let node = self.nodes.get_mut(&seat.node.0).unwrap();
                node.has = self.acked;
                node.fresh = false;
            }
        }
    }

    fn others_have_data(&self, id: u32) -> bool {
        let Some(image) = &self.world.image else { return true };
        image.volumes["v"].seats.iter().any(|s| {
            let node = &self.nodes[&s.node.0];
            s.node.0 != id && node.has == self.acked && !node.fresh && node.running
        })
    }

    fn act(&mut self) {
        let ids: Vec<u32> = self.nodes.keys().copied().collect();
        let id = ids[self.random.below(ids.len() as u64) as usize];
        let node = self.nodes[&id].clone();
        let speaker = by(id, node.incarnation);
        let view = self.world.view();
        match self.random.below(12) {
            0 if node.running => {
                let node = self.nodes.get_mut(&id).unwrap();
                node.running = false;
                if self.random.chance(1, 2) {
                    self.feed(Event::Disconnected(speaker));
                }
            }
            1 | 2 if !node.running => {
                let wipe = self.random.chance(1, 4) && self.others_have_data(id);
                let node = self.nodes.get_mut(&id).unwrap();
                node.running = true;
                node.mute = false;
                node.incarnation += 1;
                if wipe {
                    (node.fresh, node.has, node.since) = (true, 0, node.incarnation);
                    // Whoever may be the real one is not pushed out; of a process that has ended this is known by then.
                    self.feed(Event::Disconnected(speaker));
                }
                self.register(id);
            }
            3 if node.running => self.nodes.get_mut(&id).unwrap().mute = !node.mute,
            4 if node.running && view.syncing.contains(&NodeId(id)) => {
                // In one step: the head counts its acknowledgement from here on.
                if let Some(head) = view.head().map(|h| self.nodes[&h.0].clone())
                    && head.running
                {
                    let node = self.nodes.get_mut(&id).unwrap();
                    (node.has, node.fresh) = (self.acked, false);
                    let who = seat(id, self.nodes[&id].incarnation);
                    self.feed(Event::CaughtUp(speaker, who, view.epoch));
                }
            }
            5 if node.running => {
                let target = NodeId(ids[self.random.below(ids.len() as u64) as usize]);
                self.feed(Event::Suspect(speaker, target, view.epoch));
            }
            6 if node.running && self.random.chance(1, 4) => {
                self.nodes.get_mut(&id).unwrap().running = false;
                self.feed(Event::Leave(speaker));
            }
            7 if self.random.chance(1, 4) => self.feed(Event::Force("v".to_owned())),
            8 => self.world.now += self.random.below(700) * MS,
            _ => self.beat(),
        }
        self.write();
    }

    fn beat(&mut self) {
        let end = self.world.now + (20 + self.random.below(80)) * MS;
        if self.random.chance(1, 8) {
            self.rest(end);
        }
        self.world.now = end;
        for (id, node) in self.nodes.clone() {
            if node.running && !node.mute {
                self.feed(Event::Heartbeat(by(id, node.incarnation), StreamSeq(node.has)));
            }
        }
        self.feed(Event::Tick);
    }

    /// Before the machine wants to look at the clock, time alone makes nothing due.
    fn rest(&mut self, end: u64) {
        let about = |world: &World| {
            let view = world.view();
            (view.epoch, view.chain, view.syncing)
        };
        let until = self.world.now + self.world.machine.rest(self.world.now);
        while self.world.now + 3 * MS < end.min(until) {
            self.world.now += 3 * MS;
            let before = about(&self.world);
            self.world.step(Event::Tick).unwrap();
            assert_eq!(about(&self.world), before, "seed {}: {until}", self.seed);
        }
    }

    /// All come back, with what they have: then the chain must become whole.
    fn heal(&mut self) {
        self.healing = true;
        for id in self.nodes.keys().copied().collect::<Vec<_>>() {
            let node = self.nodes.get_mut(&id).unwrap();
            node.mute = false;
            if !node.running {
                node.running = true;
                node.incarnation += 1;
            }
            self.register(id);
        }
        for round in 0..400 {
            self.beat();
            if round == 200 {
                // Only where a chain was formed and nobody lived to note it.
                self.feed(Event::Force("v".to_owned()));
            }
            let view = self.world.view();
            for id in view.syncing {
                let node = self.nodes.get_mut(&id.0).unwrap();
                (node.has, node.fresh) = (self.acked, false);
                let speaker = by(id.0, node.incarnation);
                let who = seat(id.0, node.incarnation);
                self.feed(Event::CaughtUp(speaker, who, view.epoch));
            }
            for id in self.nodes.keys().copied().collect::<Vec<_>>() {
                // Refused, as long as the process before it was thought to live; or not ready.
                let known = self.world.view().member(NodeId(id)).map(|m| m.incarnation);
                if known != Some(self.nodes[&id].incarnation) || round % 20 == 0 {
                    self.register(id);
                }
            }
        }
        let view = self.world.view();
        let wanted = usize::from(view.replicas);
        assert_eq!(view.chain.len(), wanted, "seed {}: {view:?} {:?}", self.seed, self.nodes);
    }
}

#[test]
fn nothing_acknowledged_is_lost_under_random_histories() {
    let mut changes = 0;
    for seed in 0..400 {
        let mut history = History::new(seed);
        for _ in 0..300 {
            history.act();
        }
        history.heal();
        history.write();
        assert!(history.acked > 0, "seed {seed}: no write was ever acknowledged");
        changes += history.epoch;
    }
    assert!(changes > 4000, "the histories must be eventful: only {changes} epochs");
}

#[test]
fn a_state_file_with_any_bit_flipped_is_refused() {
    let world = three();
    let image = world.image.unwrap();
    let bytes = image.encode();
    for bit in 0..bytes.len() * 8 {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Image::decode(&bad).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        assert!(Image::decode(&bytes[..len]).is_err(), "cut to {len}");
    }
}

const OLD: Level = Level::FIRST;
const NEW: Level = Level::SNAPSHOTS;

/// A node comes whose program understands so much.
fn comes(world: &mut World, node: u32, incarnation: u64, level: Level) -> Result<(), String> {
    let state = if incarnation == 1 { DataState::Fresh } else { INTACT(world.chain().0) };
    let registration = Registration { level, ..registration(node, incarnation, 0, state) };
    world.step(Event::Register(registration))
}

#[test]
fn what_is_new_waits_for_the_last_node() {
    let mut world = World::new(spec(3, &[1, 2, 3]));
    for node in 1..=3 {
        comes(&mut world, node, 1, OLD).unwrap();
    }
    // One after the other is updated, the head first.
    for node in 1..=3 {
        assert_eq!(world.view().level, OLD, "node {node} is still to come");
        comes(&mut world, node, 2, NEW).unwrap();
        world.pass(200, &[(1, 2), (2, 1 + u64::from(node > 1)), (3, 1 + u64::from(node > 2))]);
    }
    assert_eq!(world.view().level, NEW);
    assert_eq!(world.pushed[&NodeId(2)].level, NEW, "all are told");
    // It stays so, whatever is started.
    world.restart();
    assert_eq!(world.view().level, NEW);
    let refused = comes(&mut world, 3, 3, OLD).unwrap_err();
    assert!(refused.contains("level 1") && refused.contains("update the node"), "{refused}");
    comes(&mut world, 3, 3, NEW).unwrap();
}

#[test]
fn a_node_that_is_away_may_have_an_old_program() {
    let mut world = World::new(spec(3, &[1, 2, 3]));
    for node in 1..=3 {
        comes(&mut world, node, 1, OLD).unwrap();
    }
    // The third is lost, and with it what the coordinator had heard of it.
    world.step(Event::Disconnected(by(3, 1))).unwrap();
    world.pass(3000, &[(1, 1), (2, 1)]);
    assert_eq!(world.chain().1, [1, 2]);
    world.restart();
    for node in [1, 2] {
        comes(&mut world, node, 2, NEW).unwrap();
        world.pass(100, &[(1, 2), (2, 2)]);
    }
    world.pass(60_000, &[(1, 2), (2, 2)]);
    assert_eq!(world.view().level, OLD, "it may come back");
    world.pass(600_000, &[(1, 2), (2, 2)]);
    assert_eq!(world.view().level, NEW, "it is waited for no longer");
    assert!(comes(&mut world, 3, 2, OLD).is_err());
}

/// What one that was lost had is remembered as long as it may come back, and no longer.
#[test]
fn a_spare_that_is_gone_holds_nobody_back() {
    let mut world = World::new(spec(2, &[1, 2, 3]));
    for (node, level) in [(1, NEW), (3, OLD), (2, NEW)] {
        comes(&mut world, node, 1, level).unwrap();
    }
    world.step(Event::Disconnected(by(3, 1))).unwrap();
    world.pass(3000, &[(1, 1), (2, 1)]);
    let epoch = world.view().epoch;
    world.step(Event::CaughtUp(by(2, 1), seat(2, 1), epoch)).unwrap();
    world.pass(60_000, &[(1, 1), (2, 1)]);
    assert_eq!(world.chain().1, [1, 2]);
    assert_eq!(world.view().level, OLD);
    world.pass(600_000, &[(1, 1), (2, 1)]);
    assert_eq!(world.view().level, NEW);
}

/// What goes wrong without it is missed.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn levels_that_are_not_agreed_on_are_missed() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 2] = [
        (Bug::LevelUnasked, a_node_that_is_away_may_have_an_old_program),
        (Bug::LevelOfAnyone, what_is_new_waits_for_the_last_node),
    ];
    assert_eq!(missed(&tests), []);
}
