//! What a node has as a keeper of the volume, whatever its part in the chain: how far its working state is in the stream, and
//! what of it is published. (The stream comes in by `stage/keep`; `stage/publish` brings it to the media.)

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use base::{ClientId, Epoch, InodeId, Nanos, Sequence, StreamSeq};
use storage::volume::Blocks;

use super::Copier;
use super::frame::{Received, Recent};
use super::history::History;
use super::join::Incoming;
use super::stage::publish::Job;

/// See the module.
pub(super) struct Member {
    /// The chunks up to there are in the working state.
    pub applied: StreamSeq,
    /// Those up to there lay in the ring when this process began.
    pub replayed: StreamSeq,
    /// Those up to there on the media.
    pub published: StreamSeq,
    /// Which transactions brought them there.
    pub history: History,
    /// Those up to there on all members, as far as it is known here.
    pub all_acked: StreamSeq,
    /// Chunks that came before the one that is next.
    pub stash: BTreeMap<StreamSeq, Received>,
    /// Chunks that are in the ring and not applied yet.
    pub recent: Recent,
    /// The first and the last of those that found no room there, and are not asked for again yet.
    pub dropped: Option<(StreamSeq, StreamSeq)>,
    /// A snapshot that was asked for, until all of it is here: meanwhile the volume is as it was, or half of one.
    pub incoming: Option<Incoming>,
    /// In this epoch everything was here of a node that joined, and what came since is kept.
    pub whole_in: Option<Epoch>,
    /// More is in the ring than was said.
    pub kept_untold: bool,
    /// Something of others waits for its turn outside.
    pub hearing: bool,
    /// When the head was told last how far it is.
    pub acknowledged_at: Nanos,
    /// Whose chunk was the last, and when it came.
    pub last_chunk: Option<(ClientId, Nanos)>,
    /// How far the stream has each client.
    pub settled: BTreeMap<ClientId, Sequence>,
    /// Inodes by the last chunk that changed them, and for whom, and the last that did so for another one, until all have
    /// published it.
    pub dirty: BTreeMap<InodeId, (StreamSeq, ClientId, StreamSeq)>,
    /// What was published when the chunk after `applied` was found to wait for more.
    pub waits_beyond: Option<StreamSeq>,

    /// Clients whose operations are applied and not published, and how far.
    pub batch: BTreeMap<ClientId, Sequence>,
    pub batch_bytes: u64,
    pub batch_since: Option<Nanos>,
    /// Somebody waits for a publication.
    pub publish_now: bool,
    /// What is here could not be brought to the state of the volume in place: it is not tried again before all of it has come.
    pub never_in_place: bool,
    /// A publication under way.
    pub job: Option<Job>,
    pub next_job: u64,
    /// hostd, while it lives.
    pub host: Option<Arc<dyn Copier>>,
    /// Blocks that were freed, and go back to the medium.
    pub discards: VecDeque<Blocks>,
    /// Free blocks of the volume that the file system below does not have, and when that was seen.
    pub short: u64,
    pub looked_below: (Nanos, StreamSeq),
    /// Bytes that all arenas had, and those of their checksums, when these were counted.
    pub sums_below: Option<(u64, u64)>,
}

impl Member {
    /// A chunk that lies before the newest known, perhaps, changed an inode.
    pub(super) fn mark_before(&mut self, ino: InodeId, seq: StreamSeq, client: ClientId) {
        let (newest, by, before) = self.dirty.entry(ino).or_insert((seq, client, StreamSeq(0)));
        if seq > *newest {
            if *by != client {
                (*by, *before) = (client, *newest);
            }
            *newest = seq;
        } else if *by != client {
            *before = seq.max(*before);
        }
    }

    /// Of a volume that is published so far.
    pub(super) fn new(published: StreamSeq) -> Self {
        Self {
            applied: published,
            replayed: published,
            published,
            history: History::default(),
            all_acked: StreamSeq(0),
            stash: BTreeMap::new(),
            recent: Recent::default(),
            dropped: None,
            incoming: None,
            whole_in: None,
            kept_untold: false,
            hearing: false,
            acknowledged_at: 0,
            last_chunk: None,
            settled: BTreeMap::new(),
            dirty: BTreeMap::new(),
            waits_beyond: None,
            batch: BTreeMap::new(),
            batch_bytes: 0,
            batch_since: None,
            publish_now: false,
            never_in_place: false,
            job: None,
            next_job: 1,
            host: None,
            discards: VecDeque::new(),
            short: 0,
            looked_below: (0, StreamSeq(0)),
            sums_below: None,
        }
    }
}
