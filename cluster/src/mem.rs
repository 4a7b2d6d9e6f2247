//! A transport within one process and one thread: deterministic, for tests and the simulator.
//! Frames arrive in the order in which they were sent, at the next poll of the receiver; `poll`
//! never sleeps. Faults (delay, loss, reordering between classes) are wrappers around it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::Duration;

use base::NodeId;

use crate::limits::BODY_MAX;
use crate::transport::{
    Class, Counters, DownReason, Interest, NetEvent, Peer, SendError, Transport,
};
use crate::wire::KIND_RESERVED;

/// Bytes that wait in one direction of one class before a send is refused.
const QUEUE_HIGH: usize = 16 << 20;

#[derive(Debug, Default)]
struct Inbox {
    incarnation: u64,
    events: VecDeque<NetEvent>,
    wanted: BTreeSet<NodeId>,
    up: BTreeSet<NodeId>,
    /// Bytes waiting here, by sender and class, and whether that sender was refused.
    waiting: BTreeMap<(NodeId, Class), (usize, bool)>,
}

/// The net that joins the transports of one process.
#[derive(Clone, Debug, Default)]
pub struct MemNet {
    inboxes: Rc<RefCell<BTreeMap<NodeId, Inbox>>>,
}

impl MemNet {
    /// A net without nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Joins `node`; a transport that had joined under the same number is cut off.
    pub fn join(&self, node: NodeId, incarnation: u64) -> MemTransport {
        self.leave(node);
        let inbox = Inbox { incarnation, ..Inbox::default() };
        self.inboxes.borrow_mut().insert(node, inbox);
        MemTransport { net: self.clone(), node, incarnation, counters: Counters::default() }
    }

    /// What the death of a node looks like to the others.
    pub fn leave(&self, node: NodeId) {
        let peers: Vec<NodeId> = match self.inboxes.borrow().get(&node) {
            Some(inbox) => inbox.up.iter().copied().collect(),
            None => return,
        };
        for peer in peers {
            self.cut(node, peer, &DownReason::Closed);
        }
        self.inboxes.borrow_mut().remove(&node);
    }

    /// Ends the link between two nodes until one of them calls `set_peers` again.
    pub fn cut(&self, a: NodeId, b: NodeId, reason: &DownReason) {
        let mut inboxes = self.inboxes.borrow_mut();
        for (here, there) in [(a, b), (b, a)] {
            let Some(inbox) = inboxes.get_mut(&here) else { continue };
            if inbox.up.remove(&there) {
                inbox.waiting.retain(|(from, _), _| *from != there);
                inbox.events.push_back(NetEvent::Down { node: there, reason: reason.clone() });
            }
        }
    }

    fn link(&self, a: NodeId, b: NodeId) {
        let mut inboxes = self.inboxes.borrow_mut();
        let both = inboxes.get(&a).is_some_and(|i| i.wanted.contains(&b))
            && inboxes.get(&b).is_some_and(|i| i.wanted.contains(&a));
        if !both || inboxes[&a].up.contains(&b) {
            return;
        }
        for (here, there) in [(a, b), (b, a)] {
            let incarnation = inboxes[&there].incarnation;
            if let Some(inbox) = inboxes.get_mut(&here) {
                inbox.up.insert(there);
                inbox.events.push_back(NetEvent::Up { node: there, incarnation });
            }
        }
    }
}

/// One node's end of a [`MemNet`].
#[derive(Debug)]
pub struct MemTransport {
    net: MemNet,
    node: NodeId,
    incarnation: u64,
    counters: Counters,
}

impl MemTransport {
    fn is_current(&self) -> bool {
        let inboxes = self.net.inboxes.borrow();
        inboxes.get(&self.node).is_some_and(|inbox| inbox.incarnation == self.incarnation)
    }
}

impl Drop for MemTransport {
    fn drop(&mut self) {
        if self.is_current() {
            self.net.leave(self.node);
        }
    }
}

impl Transport for MemTransport {
    fn node(&self) -> NodeId {
        self.node
    }

    fn set_peers(&mut self, peers: &[Peer]) {
        if !self.is_current() {
            return;
        }
        let wanted: BTreeSet<NodeId> =
            peers.iter().map(|p| p.node).filter(|n| *n != self.node).collect();
        let gone: Vec<NodeId> = {
            let mut inboxes = self.net.inboxes.borrow_mut();
            let Some(inbox) = inboxes.get_mut(&self.node) else { return };
            inbox.wanted = wanted.clone();
            inbox.up.difference(&wanted).copied().collect()
        };
        for node in gone {
            self.net.cut(self.node, node, &DownReason::Ours);
        }
        for node in wanted {
            self.net.link(self.node, node);
        }
    }

    fn send(
        &mut self,
        to: NodeId,
        class: Class,
        kind: u16,
        parts: &[&[u8]],
    ) -> Result<(), SendError> {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        if len > BODY_MAX {
            return Err(SendError::TooLong);
        }
        if kind >= KIND_RESERVED {
            return Err(SendError::ReservedKind);
        }
        if !self.is_up(to) {
            return Err(SendError::Down);
        }
        let mut inboxes = self.net.inboxes.borrow_mut();
        let Some(inbox) = inboxes.get_mut(&to) else { return Err(SendError::Down) };
        let waiting = inbox.waiting.entry((self.node, class)).or_default();
        if waiting.1 || waiting.0 > QUEUE_HIGH {
            waiting.1 = true;
            self.counters.full += 1;
            return Err(SendError::Full);
        }
        waiting.0 += len;
        let body = parts.concat();
        inbox.events.push_back(NetEvent::Frame { from: self.node, class, kind, body });
        self.counters.frames_out += 1;
        self.counters.bytes_out += len as u64;
        Ok(())
    }

    fn queued(&self, to: NodeId, class: Class) -> usize {
        let inboxes = self.net.inboxes.borrow();
        inboxes.get(&to).and_then(|i| i.waiting.get(&(self.node, class))).map_or(0, |w| w.0)
    }

    fn is_up(&self, node: NodeId) -> bool {
        self.is_current() && self.net.inboxes.borrow()[&self.node].up.contains(&node)
    }

    fn poll(&mut self, _timeout: Option<Duration>, out: &mut Vec<NetEvent>) {
        if !self.is_current() {
            return;
        }
        let mut inboxes = self.net.inboxes.borrow_mut();
        let Some(inbox) = inboxes.get_mut(&self.node) else { return };
        let events = std::mem::take(&mut inbox.events);
        let waiting = std::mem::take(&mut inbox.waiting);
        for event in &events {
            if let NetEvent::Frame { body, .. } = event {
                self.counters.frames_in += 1;
                self.counters.bytes_in += body.len() as u64;
            }
        }
        out.extend(events);
        for ((sender, class), (_, refused)) in waiting {
            if let (true, Some(inbox)) = (refused, inboxes.get_mut(&sender)) {
                inbox.events.push_back(NetEvent::Drained { node: self.node, class });
            }
        }
    }

    /// Nothing watches descriptors here: the caller of a deterministic world delivers such events
    /// itself.
    fn register(
        &mut self,
        _fd: BorrowedFd<'_>,
        _token: u64,
        _interest: Interest,
    ) -> std::io::Result<()> {
        Err(std::io::Error::other("the in-process transport watches no descriptors"))
    }

    fn deregister(&mut self, _fd: BorrowedFd<'_>) -> std::io::Result<()> {
        Ok(())
    }

    fn set_spin(&mut self, _spin: Duration) {}

    fn disconnect(&mut self, node: NodeId) {
        self.net.cut(self.node, node, &DownReason::Ours);
        self.net.link(self.node, node);
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
