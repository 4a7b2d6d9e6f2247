//! What one turn of the deciding thread may cost. Everything that clients can ask for is done in turns: between two of them
//! the node hears its peers, the coordinator and other clients. What does not fit in one goes on in the next.
//!
//! The price is counted and not measured, so that it is the same in every run of the simulator: tree pages looked at (from 50 to
//! 200 ns each), and for entries and bytes as many pages as take as long.

use super::Node;

/// An entry is decoded, judged, and put into a frame.
const ENTRY: u64 = 8;
/// Bytes that are summed and copied in the time of a look at a page.
const BYTES: u64 = 512;

/// A chunk is kept with a fence, sent, and told of, however little is in it.
const CHUNK: u64 = 500;

/// A lease is taken back: what its client is inside of is looked at, its log, and what it has closed.
const RECALL: u64 = 30;

/// The turn under way.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// Pages looked at before it began.
    from: u64,
    /// Beside those that are counted by the tree.
    spent: u64,
    /// Entries of a client had to be left for the next turn.
    pub(super) cut_short: bool,
    /// A lease on its way back was looked at: one a turn is, whatever else has been done.
    pub(super) recalled: bool,
    /// Inodes without a name were freed: a chunk of them a turn is, whatever else has been done.
    pub(super) reaped: bool,
    /// Requests had to be left for the next turn.
    pub(super) unanswered: bool,
    /// A client's locks became its heir's: of one client in a turn.
    pub(super) inherited: bool,
}

impl Node {
    /// A turn begins.
    pub(super) fn begin_turn(&mut self) {
        self.turn.from = self.volume.tree().visits();
        self.turn.spent = 0;
        (self.turn.recalled, self.turn.reaped, self.turn.inherited) = (false, false, false);
    }

    /// An entry of so many bytes was taken up.
    pub(super) fn spend_entry(&mut self, bytes: usize) {
        self.turn.spent += ENTRY + bytes as u64 / BYTES;
    }

    /// A lease on its way back was looked at.
    pub(super) fn spend_recall(&mut self) {
        self.turn.spent += RECALL;
        self.turn.recalled = true;
    }

    /// So many extents, or fewer, will be freed.
    pub(super) fn spend_extents(&mut self, extents: u64) {
        self.turn.spent += extents;
    }

    /// A chunk is closed because of one entry.
    pub(super) fn spend_chunk(&mut self) {
        self.turn.spent += CHUNK;
    }

    /// Whether this turn has cost what a turn may.
    pub(super) fn turn_is_over(&self) -> bool {
        let visits = self.volume.tree().visits().saturating_sub(self.turn.from);
        visits + self.turn.spent >= self.env.config.limits.turn
    }
}
