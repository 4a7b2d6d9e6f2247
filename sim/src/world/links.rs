//! Links between the nodes: delay, order, loss.

use service::packing::{Line, Moved};

use super::*;

impl World<'_> {
    pub(crate) fn believes(&self, at: usize, peer: usize) -> Option<u64> {
        let link = self.links.get(&(at.min(peer), at.max(peer)))?;
        link.believes[usize::from(at > peer)]
    }

    /// The link between the two, if it is up.
    pub(crate) fn link_number(&self, a: usize, b: usize) -> Option<u64> {
        let link = self.links.get(&(a.min(b), a.max(b)))?;
        link.up.then_some(link.number)
    }

    /// Whether what `from` sends to `to` now is on its way.
    fn is_linked(&self, from: usize, to: usize) -> bool {
        let link = self.links.get(&(from.min(to), from.max(to)));
        link.is_some_and(|l| l.up && l.believes[usize::from(from > to)] == Some(l.number))
    }

    /// A node sends a message: packed perhaps, and then later.
    pub(crate) fn send(&mut self, from: usize, to: usize, class: Class, kind: u16, body: Vec<u8>) {
        if !self.is_linked(from, to) {
            self.transmit(from, to, class, kind, body);
            return;
        }
        let line = self.line(from);
        let node = NodeId(to as u32 + 1);
        let piece = self.hosts[from].packing.send(node, class, kind, body.into(), line);
        self.begin_work(from, piece);
        self.transmit_ready(from, to, class);
    }

    /// As it seems to a sender: nothing waits here, but what if it did.
    fn line(&mut self, from: usize) -> Line {
        let told = self.hosts[from].compression == Compression::Auto;
        let queued = if told && self.random.chance(1, 2) { 1 << 16 } else { 0 };
        Line { now: self.now, queued }
    }

    fn transmit_ready(&mut self, from: usize, to: usize, class: Class) {
        let node = NodeId(to as u32 + 1);
        while let Some((kind, body)) = self.hosts[from].packing.next(node, class) {
            let (line, bytes) = (self.line(from), body.len());
            self.transmit(from, to, class, kind, body.to_vec());
            self.hosts[from].packing.sent(node, class, bytes, line);
        }
    }

    /// A piece of work takes its time; another one may be done before.
    fn begin_work(&mut self, n: usize, piece: Option<Piece>) {
        let Some(piece) = piece else { return };
        let delay = match self.random.below(12) {
            0 => self.between(MS, 20 * MS),
            _ => self.between(US, 300 * US),
        };
        let incarnation = self.hosts[n].incarnation;
        self.at(self.now + delay, Item::Worked(n, incarnation, piece));
    }

    /// A piece of work is done.
    pub(crate) fn worked(
        &mut self,
        n: usize,
        incarnation: u64,
        piece: Piece,
    ) -> Result<(), String> {
        if self.hosts[n].incarnation != incarnation || self.hosts[n].node.is_none() {
            return Ok(());
        }
        self.trace(|| format!("worked {}", n + 1));
        match self.hosts[n].packing.done(piece.work()) {
            Some(Moved::Out(to, class)) => self.transmit_ready(n, to.0 as usize - 1, class),
            Some(Moved::In(from, class)) => self.deliver_heard(n, from, class)?,
            None => {}
        }
        Ok(())
    }

    /// A message has come.
    pub(crate) fn arrived(
        &mut self,
        from: usize,
        to: usize,
        class: Class,
        kind: u16,
        body: Vec<u8>,
    ) -> Result<(), String> {
        let node = NodeId(from as u32 + 1);
        let host = &mut self.hosts[to];
        if host.packing.is_plain(node, class, kind, body.len()) {
            return self.deliver(to, Event::Frame { from: node, kind, body: body.into() });
        }
        let keep = host.node.as_ref().is_some_and(|n| n.passes_on());
        let incarnation = host.node.as_ref().and_then(|n| n.incarnation_of(kind, &body));
        let piece = host.packing.hear(node, class, kind, body, keep, incarnation);
        self.begin_work(to, piece);
        self.deliver_heard(to, node, class)
    }

    fn deliver_heard(&mut self, n: usize, from: NodeId, class: Class) -> Result<(), String> {
        while let Some(heard) = self.hosts[n].packing.next_heard(from, class) {
            let kind = heard.kind;
            let epoch = self.hosts[n].node.as_ref().map(|node| node.status().epoch);
            match heard.body {
                Ok(body) => self.deliver(n, Event::Frame { from, kind, body })?,
                Err(damaged) => match damaged.instead(kind, epoch.unwrap_or_default()) {
                    Some(body) => {
                        self.deliver(n, Event::Frame { from, kind, body: body.into() })?
                    }
                    None => self.break_link(n, from.0 as usize - 1),
                },
            }
        }
        Ok(())
    }

    /// One end does not want the other any more, for now.
    pub(crate) fn break_link(&mut self, a: usize, b: usize) {
        if let Some(link) = self.links.get_mut(&(a.min(b), a.max(b))) {
            link.cut += 1;
            self.update_links();
            self.at(self.now + MS, Item::End(Fault::LinkDown(a, b)));
        }
    }

    fn transmit(&mut self, from: usize, to: usize, class: Class, kind: u16, body: Vec<u8>) {
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
        self.moment(Moment::Sent(from, to, kind));
        self.at(at, Item::Frame { from, to, class, link: number, kind, body });
    }

    /// A bit of a chunk changes on the way, if that is what befalls the node.
    pub(crate) fn damage(&mut self, to: usize, kind: u16, body: &mut [u8]) {
        use service::core::message::{CHUNK, CHUNK_PREFIX, PACKED};
        // Of what travels packed any bit.
        let packed = kind == PACKED && body.get(4..6) == Some(&CHUNK.to_le_bytes()[..]);
        let prefix = if packed { 0 } else { CHUNK_PREFIX };
        if !(kind == CHUNK || packed) || !self.hosts[to].damage || body.len() <= prefix {
            return;
        }
        if self.random.chance(1, 3) {
            let at = prefix + self.random.below((body.len() - prefix) as u64) as usize;
            body[at] ^= 1 << self.random.below(8);
        }
    }

    /// Links follow what lives, who knows of whom, and what is cut.
    pub(crate) fn update_links(&mut self) {
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
                // What is in flight when a link breaks may arrive, or be lost with it.
                let lost = !wanted && self.random.chance(1, 2);
                let Some(link) = self.links.get_mut(&(a, b)) else { continue };
                // In the order of what happened, at each end: nothing overtakes.
                let incoming = 1 - side;
                let last = match lost {
                    true => link.told[side],
                    false => link.order[incoming].iter().copied().max().unwrap_or(0),
                };
                let when = (self.now + delay).max(last + 1);
                link.order[incoming] = link.order[incoming].map(|t| t.max(when));
                link.told[side] = when;
                let item = if wanted {
                    Item::PeerUp { at, peer, link: number }
                } else {
                    Item::PeerDown { at, peer, link: number }
                };
                self.at(when, item);
            }
        }
    }

    pub(crate) fn peer_up(&mut self, at: usize, peer: usize, number: u64) -> Result<(), String> {
        let Some(link) = self.links.get_mut(&(at.min(peer), at.max(peer))) else { return Ok(()) };
        if !link.up || link.number != number || self.hosts[at].node.is_none() {
            return Ok(());
        }
        link.believes[usize::from(at > peer)] = Some(number);
        self.trace(|| format!("up {} sees {}", at + 1, peer + 1));
        self.deliver(at, Event::PeerUp(NodeId(peer as u32 + 1)))
    }

    pub(crate) fn peer_down(&mut self, at: usize, peer: usize, number: u64) -> Result<(), String> {
        let Some(link) = self.links.get_mut(&(at.min(peer), at.max(peer))) else { return Ok(()) };
        let believes = &mut link.believes[usize::from(at > peer)];
        if *believes != Some(number) {
            return Ok(());
        }
        *believes = None;
        self.hosts[at].packing.down(NodeId(peer as u32 + 1));
        self.trace(|| format!("down {} misses {}", at + 1, peer + 1));
        self.deliver(at, Event::PeerDown(NodeId(peer as u32 + 1)))
    }
}
