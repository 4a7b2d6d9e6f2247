//! The coordinator, and the connections to it.

use service::core::Node;

use super::*;

impl World<'_> {
    /// The volume as it is configured.
    pub(crate) fn spec(&self) -> VolumeSpec {
        VolumeSpec {
            name: VOLUME.into(),
            replicas: self.preset.nodes as u16,
            min_replicas: self.preset.min_replicas,
            nodes: (1..=self.preset.nodes).map(|n| NodeId(n as u32)).collect(),
        }
    }

    pub(crate) fn start_coordinator(&mut self) -> Result<(), String> {
        let spec = self.spec();
        let image = self.image.clone();
        let patience = Patience::default();
        self.machine = Some(Machine::new(CLUSTER, &[spec], patience, image, self.now)?);
        Ok(())
    }

    pub(crate) fn speaker(&self, n: usize, incarnation: u64) -> Speaker {
        Speaker { volume: VOLUME.into(), node: self.hosts[n].id, incarnation }
    }

    /// Whether what travels on that connection arrives.
    pub(crate) fn reaches(&self, n: usize, connection: u64) -> bool {
        let host = &self.hosts[n];
        host.node.is_some() && host.connection == connection && !host.cut_off
    }

    pub(crate) fn connect(&mut self, n: usize, incarnation: u64) {
        let host = &mut self.hosts[n];
        if host.node.is_none() || host.incarnation != incarnation || host.connected {
            return;
        }
        if !host.cut_off && self.machine.is_some() {
            host.connection += 1;
            self.tell_coordinator(n, Up::Register(self.now));
        }
        let again = self.between(20 * MS, 60 * MS);
        self.at(self.now + again, Item::Connect(n, incarnation));
    }

    pub(crate) fn tell_coordinator(&mut self, n: usize, up: Up) {
        let slow = self.hosts[n].slow;
        let delay = if slow { self.between(MS, 20 * MS) } else { self.between(20 * US, 400 * US) };
        let host = &mut self.hosts[n];
        if host.cut_off || (!host.connected && !matches!(up, Up::Register(_))) {
            return;
        }
        host.order[0] = (host.order[0] + 1).max(self.now + delay);
        let (at, connection, incarnation) = (host.order[0], host.connection, host.incarnation);
        self.at(at, Item::ToCoordinator(n, connection, incarnation, up));
    }

    pub(crate) fn tell_node(&mut self, n: usize, item: Item) {
        let slow = self.hosts[n].slow;
        let delay = if slow { self.between(MS, 20 * MS) } else { self.between(20 * US, 400 * US) };
        let host = &mut self.hosts[n];
        host.order[1] = (host.order[1] + 1).max(self.now + delay);
        let at = host.order[1];
        self.at(at, item);
    }

    pub(crate) fn coordinator_hears(
        &mut self,
        n: usize,
        connection: u64,
        incarnation: u64,
        up: Up,
    ) -> Result<(), String> {
        if self.hosts[n].cut_off || self.hosts[n].connection != connection || self.machine.is_none()
        {
            return Ok(());
        }
        let by = self.speaker(n, incarnation);
        match up {
            Up::Register(sent) => {
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
                    before: host.before(),
                    region: 0,
                    opening: self.now < host.opens_at,
                    level: host.level,
                };
                let before = self.keeps_place(n, &registration);
                let heard = self.coordinate(CoEvent::Register(registration));
                if before && !self.seats().contains(&self.hosts[n].id) {
                    return Err(format!("node {} is back in time, and has lost its place", n + 1));
                }
                if heard {
                    self.tell_node(n, Item::Registered(n, connection, sent));
                    if let Some(view) = self.machine.as_ref().and_then(|m| m.view(VOLUME)) {
                        self.tell_node(n, Item::View(n, connection, view));
                    }
                }
            }
            Up::Opened(position) => {
                self.coordinate(CoEvent::Opened(by, position, String::new()));
            }
            Up::Beat(sent, position) => {
                if self.coordinate(CoEvent::Heartbeat(by, position)) {
                    self.tell_node(n, Item::Confirm(n, connection, sent));
                }
            }
            Up::Joined(who, epoch) => {
                self.coordinate(CoEvent::CaughtUp(by, who, epoch));
            }
            Up::Suspect(node, epoch) => {
                self.coordinate(CoEvent::Suspect(by, node, epoch));
            }
        }
        Ok(())
    }

    /// A process of the node is in the chain, and this one has its region: it goes on in its place.
    fn keeps_place(&self, n: usize, registration: &Registration) -> bool {
        let host = &self.hosts[n];
        let mut seats = self.image.iter().flat_map(|i| i.volumes.values()).flat_map(|v| &v.seats);
        let seat = seats.find(|seat| seat.node == host.id);
        let ours = |seat: &Seat| registration.before.contains(&seat.incarnation);
        host.noted.is_some() && seat.is_some_and(ours)
    }

    pub(crate) fn coordinate(&mut self, event: CoEvent) -> bool {
        let now = self.now;
        let Some(machine) = &mut self.machine else { return false };
        let (verdict, actions) = machine.step(event, now);
        if let Err(why) = &verdict {
            let why = why.clone();
            self.trace(|| format!("coordinator refuses: {why}"));
        }
        for action in actions {
            match action {
                Action::Persist(image) => {
                    self.image = Some(image);
                    self.doubt_sessions();
                }
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

    /// Whether every node that may become the head has been told that all understand so much. (From then on none understands less.)
    pub(crate) fn all_know(&self, level: Level) -> bool {
        let view = self.machine.as_ref().and_then(|machine| machine.view(VOLUME));
        let told = |host: &Host| {
            let knows = |node: &Node| host.has_view && node.status().level >= level;
            host.node.as_ref().is_none_or(knows)
        };
        view.is_some_and(|view| view.level >= level) && self.hosts.iter().all(told)
    }

    /// The nodes of the chain.
    pub(crate) fn seats(&self) -> Vec<NodeId> {
        let seats = self.image.iter().flat_map(|i| i.volumes.values()).flat_map(|v| &v.seats);
        seats.map(|s| s.node).collect()
    }

    /// What the clients of a node that is out of the chain have appended may be lost, and what they
    /// append before they know is lost.
    fn doubt_sessions(&mut self) {
        for c in 0..self.actors.len() {
            if !self.is_seated(self.actors[c].node) {
                self.doubt_session(c);
            }
        }
    }

    /// The node's nicfs, as it runs now or ran last, is in the chain.
    pub(crate) fn is_seated(&self, n: usize) -> bool {
        let host = &self.hosts[n];
        let mut seats = self.image.iter().flat_map(|i| i.volumes.values()).flat_map(|v| &v.seats);
        seats.any(|s| s.node == host.id && host.processes.contains(&s.incarnation))
    }

    pub(crate) fn view_arrived(&mut self, n: usize, view: &View) -> Result<(), String> {
        for host in self.hosts.iter().filter(|host| host.node.is_some()) {
            if host.level < view.level && view.chain.contains(&host.id) {
                return Err(format!(
                    "node {} is told level {}, above its own",
                    host.id, view.level
                ));
            }
        }
        let host = &mut self.hosts[n];
        let (me, member) = (host.id, view.is_member(host.id, host.incarnation));
        let mut chain = view.chain.clone();
        if member {
            host.noted = Some(view.epoch);
            host.processes = vec![host.incarnation];
        } else {
            chain.retain(|x| *x != me);
        }
        host.has_view = true;
        self.trace(|| {
            let (syncing, lapse) = (&view.syncing, view.lapse_ms);
            format!("view {me} epoch {} {chain:?} syncing {syncing:?} lapse {lapse}", view.epoch)
        });
        let (epoch, syncing) = (view.epoch, view.syncing.clone());
        let lapse = Nanos::from(view.lapse_ms) * MS;
        self.deliver(
            n,
            Event::Needs { members: view.min_replicas.into(), replicas: view.replicas.into() },
        )?;
        self.deliver(n, Event::Level(view.level))?;
        self.deliver(n, Event::View { epoch, chain, syncing, lapse })?;
        self.update_links();
        Ok(())
    }

    pub(crate) fn drop_connection(&mut self, n: usize) {
        let host = &mut self.hosts[n];
        if host.connected {
            host.connected = false;
            host.disconnected_at = self.now;
            host.dropped_unnoticed = host.hung;
        }
        host.connection += 1;
        let incarnation = host.incarnation;
        let delay = self.between(MS, 40 * MS);
        self.at(self.now + delay, Item::Connect(n, incarnation));
    }
}
