//! Links between the nodes: delay, order, loss.

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

    pub(crate) fn send(&mut self, from: usize, to: usize, class: Class, kind: u16, body: Vec<u8>) {
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
        self.at(at, Item::Frame { from, to, link: number, kind, body });
    }

    /// A bit of a chunk changes on the way, if that is what befalls the node.
    pub(crate) fn damage(&mut self, to: usize, kind: u16, body: &mut [u8]) {
        let prefix = service::core::message::CHUNK_PREFIX;
        if kind != service::core::message::CHUNK || !self.hosts[to].damage || body.len() <= prefix {
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
        self.trace(|| format!("down {} misses {}", at + 1, peer + 1));
        self.deliver(at, Event::PeerDown(NodeId(peer as u32 + 1)))
    }
}
