//! Nodes: their start and end, the turns of the driver's loop, what the core wants done.

use service::serving::Clocks;

use super::*;

/// Both clocks of the driver, at a moment.
struct Local(Nanos);

impl Clocks for Local {
    fn clients(&mut self) -> Nanos {
        self.0
    }

    fn left(&mut self, until: Nanos) -> Nanos {
        until.saturating_sub(self.0)
    }
}

impl World<'_> {
    pub(crate) fn start_node(&mut self, n: usize) -> Result<(), String> {
        if self.hosts[n].node.is_some() || self.hosts[n].gone {
            return Ok(());
        }
        let seed = self.random.next_u64();
        self.trace(|| format!("start {}", n + 1));
        // nicfs starts when what was copied for the one before it is at its end.
        self.hostd_ends(n)?;
        let rotten = self.hosts[n].rotten.take();
        match (self.hosts[n].start(self.now, seed), rotten) {
            (Ok(()), None) => {}
            // What has changed is in use no more.
            (Ok(()), Some(noted)) => self.hosts[n].noted = noted,
            (Err(why), Some(_)) if why.contains("damaged") => {
                // Damage that is noticed is what is claimed; the operator empties the region.
                self.trace(|| format!("replaced {}: {why}", n + 1));
                *self.outcome.faults.entry("bit-rot-noticed").or_default() += 1;
                self.hosts[n].region = fresh_region(self.hosts[n].id, self.hosts[n].shape)?;
                self.hosts[n].lose();
                self.hosts[n].processes.clear();
                self.hosts[n].start(self.now, seed)?;
            }
            (Err(why), _) => return Err(why),
        }
        self.look_at_verdicts(n)?;
        let incarnation = self.hosts[n].incarnation;
        let delay = self.between(100 * US, 2 * MS);
        self.at(self.now + delay, Item::Connect(n, incarnation));
        let opens = match self.random.below(4) {
            0 | 1 => 0,
            2 => self.between(0, 60 * MS),
            _ => self.between(0, 700 * MS),
        };
        self.hosts[n].opens_at = self.now + opens;
        if opens > 0 {
            self.at(self.now + opens, Item::Opened(n, incarnation));
        }
        if !self.hosts[n].hostd_down {
            let delay = self.between(0, 3 * MS);
            self.hostd_starts(n, delay);
        }
        self.host_adopts(n);
        self.run_soon(n);
        Ok(())
    }

    /// hostd tells which of the clients that nicfs took up are no more.
    fn host_adopts(&mut self, n: usize) {
        let Some(node) = &self.hosts[n].node else { return };
        let past = node.past_clients().map(|(client, ..)| client);
        let clients: Vec<ClientId> =
            node.status().clients.iter().map(|c| c.client).chain(past).collect();
        for client in clients {
            self.host_watches(n, client);
        }
    }

    /// hostd is to say when the process of that client ends; it may have.
    fn host_watches(&mut self, n: usize, client: ClientId) {
        if (0..self.actors.len()).all(|c| !self.is_client_of(c, client)) {
            let incarnation = self.hosts[n].incarnation;
            let delay = self.between(0, 5 * MS);
            self.at(self.now + delay, Item::To(n, incarnation, Event::ClientGone(client)));
        }
    }

    fn is_client_of(&self, c: usize, client: ClientId) -> bool {
        self.session(c).is_some_and(|s| s.client == client)
            || self.actors[c].process.as_ref().is_some_and(|p| p.is_client(client))
    }

    /// nicfs ends. Its clients live on, or end with the machine.
    pub(crate) fn stop_node(&mut self, n: usize, clients_live: bool) {
        if self.hosts[n].node.is_none() {
            if !clients_live {
                // They had outlived nicfs; not the machine.
                self.end_clients_of(n);
            }
            return;
        }
        let told = self.hosts[n].connected && !self.hosts[n].cut_off;
        let incarnation = self.hosts[n].incarnation;
        self.hosts[n].stop();
        self.pieces_die(n);
        self.trace(|| format!("stop {}", n + 1));
        for c in 0..self.actors.len() {
            if self.actors[c].node == n {
                self.locks.doubt(c);
            }
        }
        for item in std::mem::take(&mut self.hosts[n].held) {
            // What nobody read is lost; which links have ended is the fabric's to know.
            if matches!(item, Item::PeerDown { .. }) {
                self.at(self.now, item);
            }
        }
        if told {
            let delay = self.between(100 * US, 2 * MS);
            self.at(self.now + delay, Item::Disconnected(n, incarnation));
        }
        if !clients_live {
            self.end_clients_of(n);
        }
        self.update_links();
    }

    /// nicfs goes on after it was stopped: all that came meanwhile is there at once. Where it was stopped is
    /// not known: in the middle of a turn, or asleep.
    pub(crate) fn wake_node(&mut self, n: usize) -> Result<(), String> {
        if !std::mem::take(&mut self.hosts[n].hung) {
            return Ok(());
        }
        self.trace(|| format!("wake {}", n + 1));
        if std::mem::take(&mut self.hosts[n].dropped_unnoticed) {
            self.hosts[n].disconnected_at = self.now;
        }
        self.hosts[n].next_run = Nanos::MAX;
        if !self.hosts[n].slept && self.random.chance(1, 2) {
            self.hosts[n].next_run = self.now;
            self.run_node(n)?;
        }
        for item in std::mem::take(&mut self.hosts[n].held) {
            if !matches!(item, Item::Run(_)) {
                self.handle(item)?;
            }
        }
        self.run_soon(n);
        Ok(())
    }

    fn end_clients_of(&mut self, n: usize) {
        for c in 0..self.actors.len() {
            if self.actors[c].node == n && self.actors[c].process.is_some() {
                self.end_process(c, ("its node died", false));
            } else if self.actors[c].node == n {
                self.end_session(c, "its node died");
            }
        }
    }

    /// Gives the core an event and carries out what it wants.
    pub(crate) fn deliver(&mut self, n: usize, event: Event) -> Result<(), String> {
        let mut effects = Vec::new();
        let clock = self.hosts[n].clock;
        let Some(node) = &mut self.hosts[n].node else { return Ok(()) };
        node.apply(clock.local(self.now), event, &mut effects);
        self.judge_invariants(n)?;
        self.judge_acknowledged(n)?;
        self.look_at_verdicts(n)?;
        self.carry_out(n, effects)?;
        self.look_at_hostd(n);
        self.run_soon(n);
        Ok(())
    }

    /// hostd starts, and nicfs learns of it.
    pub(crate) fn hostd_starts(&mut self, n: usize, delay: Nanos) {
        let random = Random::new(self.random.next_u64());
        let hostd = Arc::new(Hostd::new(Arc::clone(&self.hosts[n].region), random));
        (self.hosts[n].hostd, self.hosts[n].knows_hostd) = (Some(Arc::clone(&hostd)), false);
        let incarnation = self.hosts[n].incarnation;
        self.at(self.now + delay, Item::To(n, incarnation, Event::HostUp(hostd)));
    }

    /// hostd ends, in the middle of its copies.
    pub(crate) fn hostd_ends(&mut self, n: usize) -> Result<(), String> {
        self.hosts[n].hostd.take().map_or(Ok(()), |hostd| hostd.die())
    }

    /// A hostd that nicfs had to kill is started again.
    fn look_at_hostd(&mut self, n: usize) {
        if self.hosts[n].hostd.as_ref().is_some_and(|hostd| hostd.killed()) {
            self.trace(|| format!("hostd of {} is killed", n + 1));
            *self.outcome.faults.entry("hostd-killed").or_default() += 1;
            self.hosts[n].hostd = None;
            let incarnation = self.hosts[n].incarnation;
            self.at(self.now, Item::To(n, incarnation, Event::HostDown));
            let delay = self.between(MS, 100 * MS);
            self.hostd_starts(n, delay);
        }
    }

    pub(crate) fn run_soon(&mut self, n: usize) {
        let delay =
            if self.hosts[n].slow { self.between(MS, 8 * MS) } else { self.between(200, 4 * US) };
        self.run_at(n, self.now + delay);
    }

    pub(crate) fn run_at(&mut self, n: usize, at: Nanos) {
        if at < self.hosts[n].next_run {
            self.hosts[n].next_run = at;
            self.at(at, Item::Run(n));
        }
    }

    /// One turn of the driver's loop (`service::nicfs`).
    pub(crate) fn run_node(&mut self, n: usize) -> Result<(), String> {
        if self.hosts[n].next_run != self.now {
            return Ok(());
        }
        self.hosts[n].next_run = Nanos::MAX;
        let mut effects = Vec::new();
        let (now, slept) = (self.now, self.hosts[n].slept);
        let host = &mut self.hosts[n];
        let (fence, until) = (host.should_fence(now), host.serves_until());
        let (clock, local) = (host.clock, host.clock.local(now));
        let collects = self.preset.hears();
        let Some(node) = &mut host.node else { return Ok(()) };
        if !slept {
            node.look_around(local, &mut effects);
        }
        if let Some(serving) = &mut host.serving {
            let tell = |event| node.apply(local, event, &mut effects);
            serving.look(until.filter(|_| !fence), &mut Local(local), tell);
        }
        let beat = now >= host.next_tick;
        if beat || node.deadline().is_some_and(|d| d <= local) {
            if beat {
                host.next_tick = now + clock.lasts(TICK);
            }
            node.set_hearing(host.packing.is_hearing());
            node.apply(local, Event::Tick, &mut effects);
        }
        let slices = 1 + self.random.below(4);
        let mut busy = false;
        for _ in 0..slices {
            if collects {
                self.hosts[n].collect();
            }
            let Some(node) = &mut self.hosts[n].node else { return Ok(()) };
            busy = node.work(local, &mut effects);
            self.judge_invariants(n)?;
            if !busy {
                break;
            }
        }
        let host = &mut self.hosts[n];
        let Some(node) = &mut host.node else { return Ok(()) };
        host.slept = !busy && node.prepare_to_sleep();
        let deadline = node.deadline().map(|d| clock.world(d));
        let wake = deadline.map_or(host.next_tick, |d| d.min(host.next_tick));
        let slept = host.slept;
        if beat {
            let position = node.position();
            self.tell_coordinator(n, Up::Beat(now, position));
        }
        self.judge_acknowledged(n)?;
        self.look_at_verdicts(n)?;
        self.carry_out(n, effects)?;
        self.look_at_hostd(n);
        self.check_events(n);
        if slept {
            // A timer that is due at once still takes a moment.
            self.run_at(n, wake.max(self.now + 500));
        } else {
            self.run_soon(n);
        }
        Ok(())
    }

    pub(crate) fn carry_out(&mut self, n: usize, effects: Vec<Effect>) -> Result<(), String> {
        for effect in effects {
            match effect {
                Effect::Send { to, class, kind, body } => {
                    self.send(n, to.0 as usize - 1, class, kind, body.to_vec());
                }
                Effect::Attached { token, client, segment } => {
                    let (actor, stamp) = ((token >> 40) as usize, token & 0xff_ffff_ffff);
                    let delay = self.between(10 * US, 200 * US);
                    let incarnation = self.hosts[n].incarnation;
                    if self.actors[actor].process.is_some() {
                        let given = Ok((client, segment));
                        self.at(self.now + delay, Item::Given { token, incarnation, given });
                        continue;
                    }
                    let item = Item::Attached { actor, stamp, client, segment, incarnation };
                    self.at(self.now + delay, item);
                }
                Effect::AttachRefused { token, errno, .. } => {
                    let (given, incarnation) = (Err(errno), self.hosts[n].incarnation);
                    self.at(self.now, Item::Given { token, incarnation, given });
                }
                Effect::Arena { .. } | Effect::Detached(_) => {}
                Effect::Watch { client, .. } => self.host_watches(n, client),
                Effect::Copies { id, items } => self.host_copies(n, id, items),
                Effect::Work(piece) => self.begin_piece(n, piece),
                Effect::Renew(node) => self.break_link(n, node.0 as usize - 1),
                Effect::CaughtUp(node, incarnation, epoch) => {
                    self.moment(Moment::Joined(node.0 as usize - 1));
                    self.tell_coordinator(n, Up::Joined(Seat { node, incarnation }, epoch));
                }
                Effect::Suspect(node) => {
                    let epoch = self.hosts[n].node.as_ref().map(|x| x.status().epoch);
                    self.trace(|| format!("node {} suspects {node}", n + 1));
                    self.moment(Moment::Suspects(n, node.0 as usize - 1));
                    self.tell_coordinator(n, Up::Suspect(node, epoch.unwrap_or_default()));
                }
                Effect::Wipes => {
                    self.hosts[n].noted = None;
                    self.hosts[n].processes = vec![self.hosts[n].incarnation];
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

    /// A piece of work is begun at some time, and its end heard of at some later one; some take very long.
    fn begin_piece(&mut self, n: usize, piece: service::core::work::Piece) {
        // (Where limits are small a publication is thousands of pieces, one behind the other.)
        let rarely = match (piece.kind(), piece.bytes()) {
            (service::core::work::Kind::Publish, ..100_000) => 256,
            _ => 16,
        };
        let delay = match self.random.below(rarely) {
            0 => self.between(MS, 300 * MS),
            1..=3 => self.between(MS, 20 * MS),
            _ => self.between(US, 300 * US),
        };
        let incarnation = self.hosts[n].incarnation;
        self.hosts[n].pieces.retain(|piece| !piece.is_begun());
        self.hosts[n].pieces.push(piece.clone());
        self.at(self.now + delay, Item::Piece(n, incarnation, piece));
    }

    /// A piece of work is done.
    pub(crate) fn do_piece(
        &mut self,
        n: usize,
        incarnation: u64,
        piece: &service::core::work::Piece,
    ) {
        if self.hosts[n].incarnation != incarnation || self.hosts[n].node.is_none() {
            return;
        }
        piece.run(&*self.hosts[n].region);
        let delay = self.between(US, 100 * US);
        let event = Event::WorkEnded(piece.id());
        self.trace(|| format!("work {} {}", n + 1, piece.id()));
        self.at(self.now + delay, Item::To(n, incarnation, event));
    }

    /// nicfs has ended, and with it the threads that worked: somewhere in the middle, or before they began.
    fn pieces_die(&mut self, n: usize) {
        for piece in std::mem::take(&mut self.hosts[n].pieces) {
            let share = self.random.below(256) as u8;
            if self.random.chance(1, 2) {
                piece.die(&*self.hosts[n].region, share);
            }
        }
    }

    /// hostd is asked for copies; sometimes it hangs for a while, or cannot do some.
    fn host_copies(&mut self, n: usize, id: u64, items: Vec<storage::volume::CopyItem>) {
        let incarnation = self.hosts[n].incarnation;
        let hangs = self.preset.hostd_deaf || self.random.chance(1, 10);
        let bad = self.random.chance(1, 5).then(|| self.random.below(items.len() as u64) as u32);
        let Some(hostd) = self.hosts[n].hostd.clone() else { return };
        if !self.hosts[n].knows_hostd || !hostd.ask(id, items, bad, hangs) {
            // As the driver does when hostd does not get to know.
            let event = Event::CopiesUnasked(id);
            return self.at(self.now, Item::To(n, incarnation, event));
        }
        let delay = if hangs { self.between(MS, 1500 * MS) } else { self.between(10 * US, 2 * MS) };
        self.at(self.now + delay, Item::Copies(n, hostd, id));
    }

    /// hostd copies some more.
    pub(crate) fn hostd_steps(
        &mut self,
        n: usize,
        hostd: Arc<Hostd>,
        id: u64,
    ) -> Result<(), String> {
        match hostd.step(id)? {
            Step::Void => {}
            Step::More => {
                let delay = self.between(10 * US, MS);
                self.at(self.now + delay, Item::Copies(n, hostd, id));
            }
            Step::Done(bad) => {
                let (delay, incarnation) = (self.between(10 * US, MS), self.hosts[n].incarnation);
                let event = Event::CopiesDone { id, bad };
                self.at(self.now + delay, Item::To(n, incarnation, event));
            }
        }
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
        self.look_at_waiters(n);
    }
}
