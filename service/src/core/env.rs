//! What every part of a node stands on: its configuration, the region, the clock and the randomness that it is given, what it
//! counts, and what it wants done. The parts share this and nothing else.

use std::sync::Arc;

use base::random::Random;
use base::{Nanos, NodeId};
use cluster::transport::Class;
use storage::media::Media;

use super::frame::Body;
use super::message::CHUNK;
use super::{Counters, Effect, NodeConfig};

/// Bodies above this travel in the bulk class.
const BULK_MIN: usize = 64 * 1024;

/// See the module.
pub(super) struct Env {
    pub config: NodeConfig,
    pub media: Arc<dyn Media>,
    pub random: Random,
    pub counters: Counters,
    /// As it was when the event came that is being handled.
    pub now: Nanos,
    pub realtime_offset: u64,
    /// Number of the last piece of work.
    pub pieces: u64,
    /// What the event comes to; the driver's, which takes it when the event is done with.
    pub out: Vec<Effect>,
}

impl Env {
    pub(super) fn new(config: NodeConfig, media: Arc<dyn Media>, random: Random) -> Self {
        let (counters, out) = (Counters::default(), Vec::new());
        Self { config, media, random, counters, now: 0, realtime_offset: 0, pieces: 0, out }
    }

    /// The time that files show.
    pub(super) const fn realtime(&self) -> u64 {
        self.now.wrapping_add(self.realtime_offset)
    }

    /// Sends a Chunk message.
    pub(super) fn send_chunk(&mut self, to: NodeId, body: Body) {
        let class = if body.len() > BULK_MIN { Class::Bulk } else { Class::LowLatency };
        self.out.push(Effect::Send { to, class, kind: CHUNK, body });
    }
}
