//! The coordinator's side: the node registers, hears views, and is fenced when it hears nothing.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::{Epoch, Level, StreamSeq};
use cluster::coordinator::client::{Client, ClientConfig};
use cluster::coordinator::{CoordEvent, DataState, Registration, View};
use cluster::net::Net;
use cluster::tls::Keys;
use cluster::transport::{Peer, PeerAddress, Transport, socket_path};
use storage::format::superblock::Durability;
use storage::region::FileRegion;

use super::noted::{note_epoch, note_processes, noted_processes, with_process};
use super::{Began, Driver, nanos};
use crate::beat::Beat;
use crate::config::{Error, Membership, NicfsConfig, PeerTransport};
use crate::core::Event;
use crate::crew::Crew;
use crate::serving::Serving;

/// Registers with the coordinator, if there is one, as who has the region and is about to be ready. `crew`: who works for it.
pub(super) fn register(
    config: &NicfsConfig,
    region: &FileRegion,
    (net, keys): (&Net, &Option<Keys>),
    incarnation: u64,
    state: DataState,
    crew: &Arc<Crew>,
) -> Result<Option<Beat>, Error> {
    let Membership::Coordinator(address) = &config.membership else { return Ok(None) };
    let before = match state {
        DataState::Fresh => Vec::new(),
        DataState::Intact { .. } => noted_processes(&config.region),
    };
    // Before it is in anybody's place: whoever comes after it has to know of it.
    note_processes(&config.region, &with_process(before.clone(), incarnation))?;
    let (tcp, run_dir) = match &config.transport {
        PeerTransport::Tcp => (net.tcp_address(), String::new()),
        PeerTransport::Shm(dir) => (None, dir.display().to_string()),
    };
    let superblock = storage::volume::read_superblocks(region)
        .map_err(|e| Error::new("nicfs: superblock", e))?;
    let uuid = superblock.into_iter().flatten().next().map(|s| s.uuid);
    let registration = Registration {
        volume: config.cluster.clone(),
        node: config.node,
        incarnation,
        position: StreamSeq(0),
        state,
        tcp,
        run_dir,
        info: String::new(),
        before,
        region: uuid.map_or(0, u128::from_be_bytes),
        opening: true,
        level: Level::NEWEST,
    };
    // Longer than nicfs waits for hostd.
    let patience = match config.durability {
        Durability::Disk => Duration::from_secs(3),
        _ => Duration::ZERO,
    };
    let client = ClientConfig {
        coordinator: address.clone(),
        cluster: cluster::coordinator::identity(&config.cluster),
        registration,
        keys: keys.clone(),
    };
    let at = (StreamSeq(0), state);
    let beat =
        Client::new(client).and_then(|client| Beat::start(client, at, patience, Arc::clone(crew)));
    beat.map(Some).map_err(|e| Error::new("nicfs: coordinator", e))
}

impl<N: Transport> Driver<N> {
    /// Is ready: the coordinator hears of it. Without one this node stands alone.
    pub(super) fn join(&mut self) {
        if self.coordinator.is_some() {
            self.serving = Some(Serving::begin(|event| self.deliver(event)));
            // When this copy was published last, for a person who has to choose between copies.
            let info = self.node.volume().root().time.to_string();
            if let Some(beat) = &self.coordinator {
                beat.opened(self.node.position(), info);
            }
            return;
        }
        let event = Event::View {
            epoch: Epoch(1),
            chain: vec![self.config.node],
            syncing: Vec::new(),
            lapse: 0,
        };
        self.deliver(event);
        // Nobody can take the place of a node that stands alone.
        self.deliver(Event::ServesUntil(u64::MAX));
    }

    /// Passes on for how long the coordinator counts this node in. What it said before its last
    /// confirmation, a view without this node above all, has been handled when this is called.
    pub(super) fn check_fence(&mut self) {
        let Some(coordinator) = &self.coordinator else { return };
        let until = coordinator.serves_until();
        let Some(mut serving) = self.serving.take() else { return };
        let until = until.map(|until| nanos(until.saturating_duration_since(self.began)));
        serving.look(until, &mut Began(self.began), |event| self.deliver(event));
        self.serving = Some(serving);
    }

    pub(super) fn coordinator_speaks(&mut self) -> Result<(), Error> {
        let heard = self.coordinator.as_mut().map(Beat::hear).unwrap_or_default();
        for event in heard {
            match event {
                CoordEvent::View(view) => self.view(&view)?,
                CoordEvent::Denied(why) => log::warn!("coordinator: {why}"),
                CoordEvent::Trouble(what) => log::warn!("coordinator: {what}"),
                CoordEvent::Connected => log::info!("registered with the coordinator"),
            }
        }
        Ok(())
    }

    pub(super) fn view(&mut self, view: &View) -> Result<(), Error> {
        let me = self.config.node;
        let member = view.is_member(me, self.incarnation);
        let mut chain = view.chain.clone();
        if !member {
            chain.retain(|n| *n != me);
        }
        if member {
            // Noted before anything is acknowledged or served in the epoch.
            if noted_processes(&self.config.region) != [self.incarnation] {
                note_processes(&self.config.region, &[self.incarnation])?;
            }
            note_epoch(&self.config.region, view.epoch)?;
            self.state = DataState::Intact { epoch: view.epoch };
        }
        let peers: Vec<Peer> = view
            .members
            .iter()
            .filter(|m| m.node != me)
            .filter_map(|m| {
                let address = match (m.tcp, m.run_dir.is_empty()) {
                    (Some(tcp), _) => PeerAddress::Tcp(tcp),
                    (None, false) => PeerAddress::Local(socket_path(Path::new(&m.run_dir), m.node)),
                    (None, true) => return None,
                };
                Some(Peer { node: m.node, address })
            })
            .collect();
        self.net.set_peers(&peers);
        let syncing = view.syncing.clone();
        let lapse = u64::from(view.lapse_ms) * 1_000_000;
        let (members, replicas) = (view.min_replicas.into(), view.replicas.into());
        self.deliver(Event::Needs { members, replicas });
        self.deliver(Event::Level(view.level));
        self.deliver(Event::View { epoch: view.epoch, chain, syncing, lapse });
        self.progress(self.node.position());
        Ok(())
    }

    pub(super) fn progress(&mut self, position: StreamSeq) {
        let state = self.state;
        if let Some(coordinator) = &self.coordinator {
            coordinator.set_progress(position, state);
        }
    }
}
