//! What a joining node is offered instead of content, because it may have it from before: checksums. (Who offers: `snapshot`;
//! who takes: `join`.)
//!
//! A node that comes back has most of what it is to be sent. Where the head would send the bytes of a file it sends the
//! checksums of the blocks, as they lie at rest. The node, which keeps what its volume held before
//! ([`storage::volume::Volume::begin_anew`]), says which blocks it lacks; these it is sent. Of those that have the right
//! checksums it says, a range at a time, what they come to under a key that was drawn for this snapshot: the checksums alone
//! are of other bytes as well, which whoever writes to a file can find. The head compares that with what its own come to, and
//! tells the node to take them over, or sends them. So the bytes that travel are those of what has changed since it went
//! away, and a checksum for each block.
//!
//! Nothing rests on what the node was when it went: neither on how long it was away, nor on a stream that the two have in
//! common, nor on times, nor on having come to the end of another snapshot before. What it had beyond the stream that was agreed
//! on is taken over as little as anything else that differs.

use std::collections::VecDeque;

use base::InodeId;
use storage::volume::since::Since;

/// Blocks of one file offered at a time.
pub const OFFER_BLOCKS: u64 = 1024;
/// Blocks offered in one message: the node that joins reads them all, on the thread that decides.
pub(super) const OFFERED_A_TURN: u64 = 1024;
/// Parts that have not changed in one message: each takes the node that joins some changes in its tree.
pub(super) const SAME_A_TURN: usize = 128;
/// Blocks that are compared at a time, and about so many in a turn of the head.
pub(super) const COMPARED: u64 = 256;

/// Blocks of a file by their checksums.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offered {
    /// File.
    pub ino: InodeId,
    /// First block.
    pub first: u64,
    /// The CRC32C of the blocks.
    pub crcs: Vec<u32>,
}

/// Blocks of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// File.
    pub ino: InodeId,
    /// First block.
    pub first: u64,
    /// Number of blocks.
    pub count: u32,
}

impl Part {
    /// The block behind it.
    pub(super) const fn end(&self) -> u64 {
        self.first + self.count as u64
    }
}

/// Blocks that have the right checksums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Doubt {
    /// Which.
    pub part: Part,
    /// What their bytes come to ([`storage::volume::Keyed`]).
    pub keyed: u64,
}

/// What is to be done for a node that has answered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asked {
    /// To be sent.
    Lack(Part),
    /// To be compared.
    Doubt(Doubt),
}

impl Asked {
    /// The file.
    pub(super) const fn ino(&self) -> InodeId {
        match self {
            Self::Lack(part) | Self::Doubt(Doubt { part, .. }) => part.ino,
        }
    }
}

/// What was offered to a node, and what became of that.
#[derive(Debug, Default)]
pub(super) struct Offers {
    /// Blocks of a file that are offered at a time; 0: the node has nothing from before.
    pub blocks: u64,
    /// The state that it has from before, if that is known: what has not changed since is not offered.
    pub since: Option<Since>,
    /// What its answers name, so that none counts that was given to another snapshot; and the key of what is compared.
    pub id: u64,
    /// Messages with offers that were not answered, in order.
    unanswered: VecDeque<u32>,
    /// What it has answered, and is not done yet.
    pub asked: VecDeque<Asked>,
}

impl Offers {
    /// Of a snapshot with that number.
    pub(super) fn new(blocks: u64, since: Option<Since>, id: u64) -> Self {
        Self {
            blocks: blocks.min(OFFER_BLOCKS),
            since,
            id,
            unanswered: VecDeque::new(),
            asked: VecDeque::new(),
        }
    }

    /// That message offers something.
    pub(super) fn made(&mut self, message: u32) {
        self.unanswered.push_back(message);
    }

    /// That message was answered. `false`: it is none that waits for an answer.
    pub(super) fn answered(&mut self, message: u32, lacks: &[Part], doubts: &[Doubt]) -> bool {
        let found = self.unanswered.iter().position(|m| *m == message);
        if let Some(at) = found {
            self.unanswered.remove(at);
            self.asked.extend(doubts.iter().map(|doubt| Asked::Doubt(*doubt)));
            self.asked.extend(lacks.iter().map(|part| Asked::Lack(*part)));
        }
        found.is_some()
    }

    /// How many messages have arrived, if so many are said to: an answer that is lost shows.
    pub(super) fn bounds(&self, arrived: u32) -> u32 {
        self.unanswered.front().map_or(arrived, |first| arrived.min(*first))
    }

    /// Whether the node has all that it was offered.
    pub(super) fn are_settled(&self) -> bool {
        self.unanswered.is_empty() && self.asked.is_empty()
    }
}
