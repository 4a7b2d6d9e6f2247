//! What a chain costs that does nothing: a client rings, a frame of an append's length goes down the chain over the services' own links,
//! each member answers the head, and the head wakes the client. As many processes as a cluster has, woken up as often; nothing is
//! judged, copied or kept in between. What fsync takes beyond that is ours.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base::NodeId;
use clap::Args;
use cluster::net::{Net, NetConfig};
use cluster::transport::{Interest, socket_path};
use cluster::{Class, NetEvent, Peer, PeerAddress, Transport};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::process::Pid;

use super::Bench;
use crate::config;
use crate::failure::{Context, Failure, Result};

/// Bytes of an append of 4 KiB as it travels: the head of a chunk's message, that of an entry, the data.
const FRAME: usize = service::core::frame::FRAME_HEAD + storage::format::entry::HEADER_BYTES + 4096;
/// Bytes of an acknowledgement.
const ANSWER: usize = 12;
/// Of the descriptor that a client rings.
const BELL: u64 = 7;
const KIND: u16 = 1;
/// A member hears all others, and is ready.
const READY: u16 = 2;
/// Who hears nothing for so long looks whether he was left alone.
const PATIENCE: Duration = Duration::from_secs(1);

/// A member of such a chain: a process of its own.
#[derive(Args, Debug)]
pub struct Member {
    /// Its number, from 1 at the head on
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    node: u32,
    /// Where its and the others' sockets are, or their addresses, in their order
    #[arg(required = true)]
    places: Vec<String>,
}

impl Member {
    fn of(&self, node: u32) -> Option<PeerAddress> {
        let place = self.places.get(node as usize - 1)?;
        Some(match place.parse::<SocketAddr>() {
            Ok(address) => PeerAddress::Tcp(address),
            Err(_) => PeerAddress::Local(socket_path(Path::new(place), NodeId(node))),
        })
    }

    fn last(&self) -> u32 {
        self.places.len() as u32
    }

    fn net(&self) -> Result<Net> {
        let mut net = NetConfig::new(NodeId(self.node), 1, 7);
        let place = self.places.get(self.node as usize - 1).map_or("", String::as_str);
        match place.parse() {
            Ok(address) => net.tcp = Some(address),
            Err(_) => net.run_dir = Some(PathBuf::from(place)),
        }
        let mut net = Net::new(net).context("a link")?;
        let peers = (1..=self.last()).filter_map(|node| {
            let address = self.of(node)?;
            Some(Peer { node: NodeId(node), address })
        });
        net.set_peers(&peers.collect::<Vec<_>>());
        Ok(net)
    }

    /// Ends when its neighbours do, or who started it.
    pub fn run(&self) -> Result<()> {
        if self.node > self.last() {
            let (node, last) = (self.node, self.last());
            return Err(Failure::failed(format!("member {node} of a chain of {last}"), ""));
        }
        service::process::raise_priority(-10);
        service::process::keep_memory();
        let (parent, mut net, mut events) = (rustix::process::getppid(), self.net()?, Vec::new());
        let (mut up, mut ready) = (0, 0);
        while up + 1 < self.last() || self.node == 1 && ready + 1 < self.last() {
            net.poll(Some(PATIENCE), &mut events);
            for event in events.drain(..) {
                up += u32::from(matches!(event, NetEvent::Up { .. }));
                ready += u32::from(matches!(event, NetEvent::Frame { kind: READY, .. }));
            }
            wanted_by(parent)?;
        }
        if self.node == 1 {
            return self.head(net, parent);
        }
        say(&mut net, 1, READY, &[])?;
        loop {
            net.poll(Some(PATIENCE), &mut events);
            for event in events.drain(..) {
                match event {
                    NetEvent::Frame { body, .. } => {
                        if self.node < self.last() {
                            say(&mut net, self.node + 1, KIND, &body)?;
                        }
                        net.recycle(body);
                        say(&mut net, 1, KIND, &[0; ANSWER])?;
                    }
                    NetEvent::Down { .. } => return Ok(()),
                    _ => {}
                }
            }
            wanted_by(parent)?;
        }
    }

    /// It is rung by its standard input, and wakes by its standard output, both of them eventfds.
    fn head(&self, mut net: Net, parent: Option<Pid>) -> Result<()> {
        let bell = File::from(owned(std::io::stdin().as_fd())?);
        let mut client = File::from(owned(std::io::stdout().as_fd())?);
        net.register(bell.as_fd(), BELL, Interest::READ).context("the bell")?;
        let mut wake = || client.write_all(&1u64.to_le_bytes()).context("the client");
        // It is ready.
        wake()?;
        let (frame, mut events, mut missing) = (vec![1; FRAME], Vec::new(), 0);
        loop {
            net.poll(Some(PATIENCE), &mut events);
            for event in events.drain(..) {
                match event {
                    NetEvent::Ready { token: BELL, .. } => {
                        (&bell).read_exact(&mut [0; 8]).context("the bell")?;
                        missing = self.last() - 1;
                        match missing {
                            0 => wake()?,
                            _ => say(&mut net, 2, KIND, &frame)?,
                        }
                    }
                    NetEvent::Frame { body, .. } => {
                        net.recycle(body);
                        let last = missing == 1;
                        missing = missing.saturating_sub(1);
                        if last {
                            wake()?;
                        }
                    }
                    NetEvent::Down { .. } => return Ok(()),
                    _ => {}
                }
            }
            wanted_by(parent)?;
        }
    }
}

/// An error if who started it has ended.
fn wanted_by(parent: Option<Pid>) -> Result<()> {
    if rustix::process::getppid() == parent {
        return Ok(());
    }
    Err(Failure::failed("the bench has ended", ""))
}

fn owned(fd: std::os::fd::BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().context("a descriptor")
}

fn say(net: &mut Net, to: u32, kind: u16, body: &[u8]) -> Result<()> {
    net.send(NodeId(to), Class::LowLatency, kind, &[body])
        .map_err(|e| Failure::failed(format!("member {to} does not take a frame: {e}"), ""))
}

/// Such a chain, and its client. Ends when dropped.
#[derive(Debug)]
pub struct Floor {
    members: Vec<Child>,
    bell: File,
    wakes: File,
}

impl Floor {
    /// With as many members as the bench's clusters have, over the same kind of links; its files are below `dir`.
    pub fn start(bench: &Bench<'_>, dir: &Path) -> Result<Self> {
        let dir = dir.join("floor");
        std::fs::create_dir_all(&dir).context(dir.display())?;
        let places = (0..bench.replicas).map(|_| match bench.transport {
            config::Transport::Tcp => {
                // (A port that is free now.)
                let free = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
                free.map(|at| at.to_string()).context("a port")
            }
            config::Transport::Shm => Ok(dir.display().to_string()),
        });
        let places = places.collect::<Result<Vec<_>>>()?;
        let make = || {
            let fd = eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from);
            fd.context("an eventfd")
        };
        let (bell, wakes) = (make()?, make()?);
        let mut floor = Self { members: Vec::new(), bell: bell.into(), wakes: wakes.into() };
        let program = crate::local::own_program()?;
        for node in 1..=bench.replicas {
            let mut command = Command::new(&program);
            command.args(["bench", "floor-member", "--node", &node.to_string()]).args(&places);
            command.stdin(Stdio::null()).stdout(Stdio::null());
            if node == 1 {
                command.stdin(floor.bell.try_clone().context("an eventfd")?);
                command.stdout(floor.wakes.try_clone().context("an eventfd")?);
            }
            floor.members.push(command.spawn().context("a member of the chain")?);
        }
        floor.wait()?;
        Ok(floor)
    }

    fn wait(&mut self) -> Result<()> {
        let ready = PollFd::new(&self.wakes, PollFlags::IN);
        let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        let woken = poll(&mut [ready], Some(&limit)).map_err(std::io::Error::from);
        if woken.context("a chain that does nothing")? == 0 {
            return Err(Failure::failed("a chain that does nothing has not answered for 10 s", ""));
        }
        self.wakes.read_exact(&mut [0; 8]).context("a chain that does nothing")
    }

    /// One after the other: the middle of so many, and what one in a hundred exceeds, in microseconds.
    pub fn turn(&mut self, count: usize) -> Result<[f64; 2]> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let begin = Instant::now();
            self.bell.write_all(&1u64.to_le_bytes()).context("the bell")?;
            self.wait()?;
            times.push(begin.elapsed());
        }
        times.sort_unstable();
        let at = |share: usize| times[(count * share / 100).min(count - 1)].as_secs_f64() * 1e6;
        Ok([at(50), at(99)])
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.kill();
            let _ = member.wait();
        }
    }
}
