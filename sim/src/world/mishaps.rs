//! Faults begin and end; in the end all are healed.

use service::core::Node;

use super::*;

/// How long an end in order may take (as in `service::nicfs`).
const CLOSING: Nanos = 1500 * MS;

impl World<'_> {
    pub(crate) fn begin_fault(&mut self, fault: Fault) -> Result<(), String> {
        self.begin_fault_for(fault, None)
    }

    /// Begins a fault that lasts as long as said, or as drawn.
    pub(crate) fn begin_fault_for(
        &mut self,
        fault: Fault,
        scripted: Option<Nanos>,
    ) -> Result<(), String> {
        let spoilt = matches!(fault, Fault::Kill(_));
        if (self.healed && !spoilt)
            || (matches!(fault, Fault::RegionLost(_) | Fault::BitRot(_)) && !self.may_lose(fault))
            || self.takes_last(fault)
        {
            return Ok(());
        }
        self.trace(|| format!("FAULT {fault:?}"));
        *self.outcome.faults.entry(fault.kind()).or_default() += 1;
        match fault {
            Fault::Partition(n) => {
                let lasts = scripted.unwrap_or_else(|| fault.lasts(&mut self.random));
                self.hosts[n].cut_off = true;
                let until = self.now + lasts;
                for (_, link) in self.links.iter_mut().filter(|((a, b), _)| [*a, *b].contains(&n)) {
                    for order in &mut link.order {
                        *order = order.map(|last| last.max(until));
                    }
                }
                self.at(until, Item::End(fault));
                return Ok(());
            }
            Fault::Crash(n) => self.stop_node(n, true),
            Fault::Planned(n) => {
                let lasts = scripted.unwrap_or_else(|| fault.lasts(&mut self.random));
                if self.hosts[n].node.is_some() && !self.hosts[n].hung {
                    self.hosts[n].leaving = true;
                    self.deliver(n, Event::Closing)?;
                    let incarnation = self.hosts[n].incarnation;
                    let by = self.now + CLOSING;
                    self.at(self.now + US, Item::Closing { n, incarnation, by, lasts });
                }
                return Ok(());
            }
            Fault::CrashAll => {
                for n in 0..self.hosts.len() {
                    self.stop_node(n, true);
                    let back = Item::End(Fault::Crash(n));
                    let after = fault.lasts(&mut self.random);
                    self.at(self.now + after, back);
                }
            }
            Fault::Hang(n) => {
                if self.hosts[n].node.is_some() {
                    self.hosts[n].hung = true;
                }
            }
            Fault::PowerCut(n) => {
                self.stop_node(n, false);
                self.hostd_ends(n)?;
                self.hosts[n].boot += 1;
                self.hosts[n].region = Arc::new(self.hosts[n].region.cut(&mut self.random));
            }
            Fault::RegionLost(n) => {
                self.stop_node(n, false);
                self.hostd_ends(n)?;
                self.hosts[n].region = fresh_region(self.hosts[n].id, self.hosts[n].shape)?;
                self.hosts[n].noted = None;
                self.hosts[n].processes.clear();
                self.hosts[n].lose();
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
            Fault::OneWay(a, b) => {
                let lasts = scripted.unwrap_or_else(|| fault.lasts(&mut self.random));
                if let Some(link) = self.links.get_mut(&(a.min(b), a.max(b))) {
                    // Everything that is sent from here on arrives after that.
                    let order = &mut link.order[usize::from(a > b)];
                    *order = order.map(|last| last.max(self.now + lasts));
                }
            }
            Fault::Damage(n) => self.hosts[n].damage = true,
            Fault::BitRot(n) => {
                let root = self.hosts[n].node.as_ref().map(|x| x.volume().root().page);
                self.stop_node(n, false);
                self.hostd_ends(n)?;
                // Its machine was started anew: no process has an heir. (Seed 9756272.)
                self.hosts[n].boot += 1;
                self.rot(n, root)?;
                // Whether it still counts is known when somebody reads it.
                self.hosts[n].rotten = Some(self.hosts[n].noted.take());
            }
            Fault::Hostd(n) => {
                let incarnation = self.hosts[n].incarnation;
                self.hosts[n].hostd_down = true;
                self.hostd_ends(n)?;
                self.at(self.now, Item::To(n, incarnation, Event::HostDown));
            }
            Fault::Gone(n) => {
                self.hosts[n].gone = true;
                self.stop_node(n, false);
            }
            Fault::Kill(c) => self.kill_actor(c)?,
            Fault::Stop(c) => {
                let lasts = scripted.unwrap_or_else(|| fault.lasts(&mut self.random));
                self.actors[c].stop_for = Some(lasts);
            }
        }
        let lasts = scripted.unwrap_or_else(|| fault.lasts(&mut self.random));
        if scripted.is_none() || !matches!(fault, Fault::OneWay(..)) {
            // What a script holds back arrives in the end.
            self.at(self.now + lasts, Item::End(fault));
        }
        Ok(())
    }

    /// Another member has everything, whatever becomes of the node: it is there and stays, and the coordinator has no
    /// reason to put it out.
    pub(crate) fn may_lose(&self, fault: Fault) -> bool {
        let (Fault::RegionLost(n) | Fault::BitRot(n)) = fault else { return false };
        let seats = self.image.iter().flat_map(|i| i.volumes.values()).flat_map(|c| &c.seats);
        let mut others = seats.filter(|s| s.node != self.hosts[n].id);
        others.any(|s| {
            let host = &self.hosts[s.node.0 as usize - 1];
            let there = host.node.is_some() && host.connected && !host.hung && !host.cut_off;
            host.noted.is_some() && there && !host.leaving && host.incarnation == s.incarnation
        })
    }

    /// A member has lost its region, and this would put out the last that has everything and is there: which of
    /// them the coordinator then goes on with is chance.
    fn takes_last(&self, fault: Fault) -> bool {
        let host = |seat: &NodeId| &self.hosts[seat.0 as usize - 1];
        let seats = self.seats();
        if seats.iter().all(|s| host(s).noted.is_some()) {
            return false;
        }
        let there = |s: &&NodeId| {
            let host = host(s);
            host.noted.is_some() && host.node.is_some() && !host.hung && !host.cut_off
        };
        let sound: Vec<usize> = seats.iter().filter(there).map(|s| s.0 as usize - 1).collect();
        match fault {
            Fault::Crash(n)
            | Fault::Planned(n)
            | Fault::PowerCut(n)
            | Fault::Hang(n)
            | Fault::CutOff(n)
            | Fault::Partition(n)
            | Fault::Reconnect(n) => seats.len() > 1 && sound.iter().all(|s| *s == n),
            Fault::CrashAll => seats.len() > 1,
            _ => false,
        }
    }

    /// A node that ends in order, as the driver waits for it.
    pub(crate) fn close_node(
        &mut self,
        (n, incarnation): (usize, u64),
        by: Nanos,
        lasts: Nanos,
    ) -> Result<(), String> {
        let Some(node) = self.hosts[n].node.as_ref() else { return Ok(()) };
        if self.hosts[n].incarnation != incarnation {
            return Ok(());
        }
        if !node.is_closed() && self.now < by {
            self.at(self.now + MS, Item::Closing { n, incarnation, by, lasts });
            return Ok(());
        }
        self.trace(|| format!("node {} ends in order", n + 1));
        self.deliver(n, Event::Shutdown)?;
        for c in 0..self.actors.len() {
            self.judge_dismissed(c, n)?;
        }
        if self.hosts[n].node.as_ref().is_some_and(Node::may_leave) {
            let host = &self.hosts[n];
            if host.connected && !host.cut_off {
                self.at(self.now + 50 * US, Item::Left(n, incarnation));
            }
        }
        self.stop_node(n, true);
        self.at(self.now + lasts, Item::End(Fault::Planned(n)));
        Ok(())
    }

    fn hostd_up(&mut self, n: usize) {
        if std::mem::take(&mut self.hosts[n].hostd_down) {
            self.hostd_starts(n, 0);
        }
    }

    /// A bit of the tree changes: of the root page, or of any of the first ones.
    fn rot(&mut self, n: usize, root: Option<u64>) -> Result<(), String> {
        let page = root.filter(|_| self.random.chance(1, 2)).unwrap_or(self.random.below(64));
        let at = page * 4096 + self.random.below(4096);
        let bit = 1u8 << self.random.below(8);
        let region = &self.hosts[n].region;
        let mut byte = [0];
        let fault = |e| format!("rot: {e}");
        region.read(Segment::Tree, at, &mut byte).map_err(fault)?;
        region.damage(Segment::Tree, at, &[byte[0] ^ bit]).map_err(fault)
    }

    pub(crate) fn end_fault(&mut self, fault: Fault) -> Result<(), String> {
        self.trace(|| format!("end of {fault:?}"));
        match fault {
            Fault::Crash(n)
            | Fault::Planned(n)
            | Fault::PowerCut(n)
            | Fault::RegionLost(n)
            | Fault::BitRot(n) => {
                self.start_node(n)?;
            }
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
            Fault::Partition(n) => {
                self.end_fault(Fault::CutOff(n))?;
                for other in (0..self.hosts.len()).filter(|other| *other != n) {
                    self.end_fault(Fault::OneWay(n, other))?;
                }
            }
            Fault::Slow(n) => self.hosts[n].slow = false,
            Fault::Coordinator => {
                if self.machine.is_none() {
                    self.start_coordinator()?;
                }
            }
            Fault::OneWay(a, b) => {
                if self.random.chance(1, 2)
                    && let Some(link) = self.links.get_mut(&(a.min(b), a.max(b)))
                {
                    link.cut += 1;
                    self.update_links();
                    self.at(self.now + MS, Item::End(Fault::LinkDown(a, b)));
                }
            }
            Fault::Damage(n) => self.hosts[n].damage = false,
            Fault::Hostd(n) => self.hostd_up(n),
            Fault::Hang(n) => self.wake_node(n)?,
            Fault::CrashAll
            | Fault::Reconnect(_)
            | Fault::Gone(_)
            | Fault::Kill(_)
            | Fault::Stop(_) => {}
        }
        Ok(())
    }

    pub(crate) fn heal(&mut self) -> Result<(), String> {
        self.trace(|| "HEAL".into());
        self.healed = true;
        self.preset.hostd_deaf = false;
        if self.preset.is_directed() {
            // What was lost must not be written anew.
            self.actors.iter_mut().filter_map(|a| a.process.as_mut()).for_each(Process::hurry);
        }
        if self.machine.is_none() {
            self.start_coordinator()?;
        }
        for link in self.links.values_mut() {
            link.cut = 0;
        }
        for n in 0..self.hosts.len() {
            (self.hosts[n].slow, self.hosts[n].damage) = (false, false);
            self.wake_node(n)?;
            self.hostd_up(n);
            if std::mem::take(&mut self.hosts[n].cut_off) {
                self.drop_connection(n);
            }
            self.start_node(n)?;
        }
        self.update_links();
        Ok(())
    }
}
