//! hostd's side: its connection, the processes that it lets in, and their bells.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use base::ClientId;
use cluster::transport::{Interest, Transport};
use rustix::net::SocketFlags;
use storage::region::FileRegion;

use super::{BELLS_TIME, Driver, MUTE_LOOK, TOKEN_HOST};
use crate::config::Error;
use crate::core::Event;
use crate::host::HostLink;
use crate::link::{self, Packet};

impl<N: Transport> Driver<N> {
    pub(super) fn host_arrived(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(&self.host_listener, flags) else { return };
        // The newest hostd is the one that lives.
        self.host_lost();
        if self.net.register(socket.as_fd(), TOKEN_HOST, Interest::READ).is_err() {
            return;
        }
        log::info!("hostd is here");
        let clients = self.node.status().clients;
        let clients = clients.iter().map(|c| (c.client, c.pid, c.start_time));
        for (client, pid, start) in clients.chain(self.node.past_clients()) {
            let packet = Packet::Adopt { client, pid, start };
            let _ = link::send(socket.as_fd(), &packet, None);
        }
        let region = match FileRegion::open(&self.config.region, self.config.durability) {
            Ok(region) => region,
            Err(e) => {
                self.trouble = Some(format!("nicfs: region {}: {e}", self.config.region.display()));
                return;
            }
        };
        let host = Arc::new(HostLink::new(socket, region, self.config.durability));
        self.host = Some(Arc::clone(&host));
        if host.may_end() {
            self.deliver(Event::HostUp(host));
        } else {
            log::warn!("hostd may not be signalled by this user; copies are made without it");
        }
    }

    pub(super) fn host_lost(&mut self) {
        if let Some(host) = self.host.take() {
            let _ = self.net.deregister(host.socket().as_fd());
            if let Err(why) = host.end() {
                self.trouble = Some(format!("nicfs: hostd does not end its copies: {why}"));
                return;
            }
            log::warn!("hostd is gone; copies are made without it");
            self.attaching.clear();
            self.deliver(Event::HostDown);
        }
    }

    pub(super) fn host_speaks(&mut self) {
        loop {
            let Some(host) = &self.host else { return };
            match host.receive() {
                Ok(None) => return,
                Ok(Some((packet, fds))) => self.host_packet(packet, fds),
                Err(e) => {
                    if e.kind() != std::io::ErrorKind::UnexpectedEof {
                        log::warn!("hostd: {e}");
                    }
                    self.host_lost();
                    return;
                }
            }
        }
    }

    pub(super) fn host_packet(&mut self, packet: Packet, fds: Vec<OwnedFd>) {
        match packet {
            Packet::Attach { token, pid, start, uid, gid, lanes, groups } => {
                let Some(bell) = fds.into_iter().next() else { return };
                self.attaching.insert(token, bell);
                let start_time = start;
                self.deliver(Event::Attach { token, pid, start_time, uid, gid, groups, lanes });
            }
            Packet::Gone { client } => {
                self.drop_bell(client);
                self.deliver(Event::ClientGone(client));
            }
            Packet::Bell { client } => {
                if self.mute.remove(&client)
                    && let Some(bell) = fds.into_iter().next()
                {
                    self.take_bell(client, bell);
                    // It may have rung while nobody had it.
                    self.deliver(Event::Doorbell(client));
                }
            }
            Packet::ArenaQuery { token, arena } => {
                self.deliver(Event::ArenaQuery { token, arena });
            }
            Packet::CopiesDone { id, bad } => self.deliver(Event::CopiesDone { id, bad }),
            other => log::warn!("hostd sent {other:?}, which nicfs does not take"),
        }
    }

    pub(super) fn take_bell(&mut self, client: ClientId, bell: OwnedFd) {
        let number = self.next_bell;
        self.next_bell += 1;
        if self.net.register(bell.as_fd(), number, Interest::READ).is_ok() {
            self.bells.insert(number, (client, bell));
            self.bell_of.insert(client, number);
        }
    }

    pub(super) fn drop_bell(&mut self, client: ClientId) {
        self.mute.remove(&client);
        if let Some(token) = self.bell_of.remove(&client)
            && let Some((_, fd)) = self.bells.remove(&token)
        {
            let _ = self.net.deregister(fd.as_fd());
        }
    }

    pub(super) fn tell_host(&mut self, packet: &Packet) -> bool {
        match &self.host {
            Some(host) if host.send(packet) => true,
            Some(_) => {
                // It does not read. What it was to be told somebody waits for: when the link ends hostd tells all of them to
                // ask again, and comes back.
                self.host_lost();
                false
            }
            None => false,
        }
    }

    /// Nobody hears these clients ring.
    pub(super) fn look_at_mute(&mut self) {
        if self.mute.is_empty() || Instant::now() < self.look_at_mute {
            return;
        }
        self.look_at_mute = Instant::now() + MUTE_LOOK;
        for client in self.mute.iter().copied().collect::<Vec<_>>() {
            self.deliver(Event::Doorbell(client));
        }
    }

    /// Those who rang, one after the other; whoever is not heard now is before who rings later.
    pub(super) fn answer_bells(&mut self) -> Result<(), Error> {
        let begin = Instant::now();
        while begin.elapsed() < BELLS_TIME
            && let Some(token) = self.rung.pop_front()
        {
            self.ready(token)?;
        }
        Ok(())
    }
}
