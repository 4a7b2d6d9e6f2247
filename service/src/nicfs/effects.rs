//! What the core wants done, done: to peers, hostd and the coordinator. Messages pass the packing on their way.

use std::sync::Arc;
use std::time::Instant;

use base::{ClientId, NodeId};
use cluster::coordinator::DataState;
use cluster::transport::{Class, SendError, Transport};

use super::noted::forget_epoch;
use super::{Driver, Ended, Worked};
use crate::core::frame::Body;
use crate::core::work::Piece;
use crate::core::{Effect, Event};
use crate::link::Packet;
use crate::packing::{self, Line, Moved};

impl<N: Transport> Driver<N> {
    pub(super) fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { to, class, kind, body } => self.send(to, class, kind, body),
                Effect::Attached { token, client, segment } => {
                    self.attached(token, client, segment);
                }
                Effect::AttachRefused { token, errno, text } => {
                    self.attaching.remove(&token);
                    self.tell_host(&Packet::Refused { token, errno, text: text.into() });
                }
                Effect::Arena { token, class, bytes } => {
                    self.tell_host(&Packet::Arena { token, class, bytes });
                }
                Effect::Copies { id, items } => self.copies(id, items),
                Effect::Work(piece) => self.stage_work(piece),
                Effect::Detached(client) => {
                    self.drop_bell(client);
                    self.tell_host(&Packet::Detached { client });
                }
                Effect::Watch { client, pid, start_time } => {
                    self.tell_host(&Packet::Adopt { client, pid, start: start_time });
                }
                Effect::Renew(node) => self.net.disconnect(node),
                Effect::CaughtUp(node, process, epoch) => {
                    if let Some(coordinator) = &self.coordinator {
                        coordinator.caught_up(node, process, epoch);
                    }
                }
                Effect::Suspect(node) => {
                    log::warn!("node {node} does not acknowledge");
                    let epoch = self.node.status().epoch;
                    if let Some(coordinator) = &self.coordinator {
                        coordinator.suspect(node, epoch);
                    }
                }
                Effect::Wipes => self.forget_region(),
                Effect::Position(position) => self.progress(position),
            }
        }
    }

    /// What lies here is about to be replaced: it counts no longer.
    pub(super) fn forget_region(&mut self) {
        if self.state == DataState::Fresh {
            return;
        }
        match forget_epoch(&self.config.region) {
            Ok(()) => self.state = DataState::Fresh,
            // What was asked for must not come.
            Err(e) => self.trouble = Some(format!("nicfs: {e}")),
        }
        self.progress(self.node.position());
    }

    pub(super) fn attached(&mut self, token: u64, client: ClientId, segment: u32) {
        let Some(bell) = self.attaching.remove(&token) else { return };
        self.take_bell(client, bell);
        if !self.tell_host(&Packet::Attached { token, client, segment }) {
            self.drop_bell(client);
            self.deliver(Event::ClientGone(client));
        }
    }

    pub(super) fn copies(&mut self, id: u64, items: Vec<storage::volume::CopyItem>) {
        if !self.host.as_ref().is_some_and(|host| host.ask(id, items)) {
            // The node does them itself, and nobody else has begun.
            self.deliver(Event::CopiesUnasked(id));
        }
    }

    pub(super) fn send(&mut self, to: NodeId, class: Class, kind: u16, body: Body) {
        if !self.net.is_up(to) {
            return;
        }
        let line = self.line(to, class);
        let piece = self.packing.send(to, class, kind, body, line);
        self.work(piece);
        self.transmit(to, class);
    }

    pub(super) fn line(&self, to: NodeId, class: Class) -> Line {
        Line { now: self.now(), queued: self.net.queued(to, class) }
    }

    /// Gives the transport what it takes of what is ready.
    pub(super) fn transmit(&mut self, to: NodeId, class: Class) {
        while let Some((kind, body)) = self.packing.next(to, class) {
            let line = self.line(to, class);
            match self.net.send(to, class, kind, &[&body]) {
                Ok(()) => self.packing.sent(to, class, body.len(), line),
                Err(SendError::Down) => {}
                Err(SendError::Full) => self.packing.put_back(to, class, kind, body),
                Err(e) => log::error!("message {kind} to node {to}: {e}"),
            }
        }
    }

    pub(super) fn hear(&mut self, from: NodeId, class: Class, kind: u16, body: Vec<u8>) {
        if self.packing.is_plain(from, class, kind, body.len()) {
            self.deliver(Event::Frame { from, kind, body: body.into() });
            return;
        }
        let keep = self.node.passes_on();
        let incarnation = self.node.incarnation_of(kind, &body);
        let piece = self.packing.hear(from, class, kind, body, keep, incarnation);
        self.work(piece);
        self.deliver_heard(from, class);
        while self.packing.is_full() {
            let ended = self.pool.wait();
            if ended.is_empty() {
                break;
            }
            self.take_up(ended);
        }
    }

    pub(super) fn deliver_heard(&mut self, from: NodeId, class: Class) {
        while let Some(heard) = self.packing.next_heard(from, class) {
            if let Some(packed) = heard.packed {
                self.net.recycle(packed);
            }
            match heard.body {
                Ok(body) => self.deliver(Event::Frame { from, kind: heard.kind, body }),
                Err(damaged) => {
                    log::warn!("message {} of node {from}: {damaged}", heard.kind);
                    match damaged.instead(heard.kind, self.node.status().epoch) {
                        Some(body) => {
                            let (kind, body) = (heard.kind, body.into());
                            self.deliver(Event::Frame { from, kind, body });
                        }
                        None => self.net.disconnect(from),
                    }
                }
            }
        }
    }

    /// Has a message packed or unpacked.
    pub(super) fn work(&mut self, piece: Option<packing::Piece>) {
        let Some(piece) = piece else { return };
        let bytes = piece.bytes();
        let work = move || {
            let begin = Instant::now();
            Ended::Packing(piece.work(), begin.elapsed())
        };
        if let Some(ended) = self.give(bytes, work) {
            self.take_up(vec![ended]);
        }
    }

    /// Has a piece of a stage done.
    pub(super) fn stage_work(&mut self, piece: Piece) {
        let (media, bytes) = (Arc::clone(&self.media), piece.bytes());
        let work = move || {
            let begin = Instant::now();
            piece.run(&*media);
            let stage = piece.kind().name();
            Ended::Stage(piece.id(), Worked { stage, bytes, took: begin.elapsed() })
        };
        // Other effects of the event that wanted it are still to be carried out: what comes of its end must not overtake them.
        let ended = self.give(bytes, work);
        self.ended_here.extend(ended);
    }

    /// Has a piece done beside this thread; if there is no room for it, it is done now.
    fn give(
        &mut self,
        bytes: usize,
        work: impl FnOnce() -> Ended + Send + 'static,
    ) -> Option<Ended> {
        if self.pipeline != crate::config::Pipeline::Pipelined {
            return Some(work());
        }
        self.pool.give(bytes, work).err().map(|work| work())
    }

    pub(super) fn work_ended(&mut self) {
        let here = std::mem::take(&mut self.ended_here);
        self.take_up(here);
        let ended = self.pool.take();
        self.take_up(ended);
    }

    pub(super) fn take_up(&mut self, ended: Vec<Ended>) {
        for ended in ended {
            match ended {
                Ended::Packing(done, took) => {
                    let (stage, bytes) = done.what();
                    self.count(Worked { stage, bytes, took });
                    match self.packing.done(done) {
                        Some(Moved::Out(to, class)) => self.transmit(to, class),
                        Some(Moved::In(from, class)) => self.deliver_heard(from, class),
                        None => {}
                    }
                }
                Ended::Stage(id, worked) => {
                    self.count(worked);
                    self.deliver(Event::WorkEnded(id));
                }
            }
        }
    }

    fn count(&mut self, Worked { stage, bytes, took }: Worked) {
        let work = self.worked.entry(stage).or_default();
        work.pieces += 1;
        work.bytes += bytes as u64;
        work.time += took;
    }
}
