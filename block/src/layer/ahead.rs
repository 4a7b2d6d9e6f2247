//! Who reads in order is read ahead of.

/// Streams that are told apart.
const STREAMS: usize = 8;
/// The first piece read ahead.
const FIRST: u64 = 64 << 10;

#[derive(Clone, Copy, Debug)]
struct Stream {
    next: u64,
    /// Bytes to be ahead by; 0: read in order once only.
    window: u64,
    /// What was asked for already ends here.
    ahead: u64,
    used: u64,
}

/// Streams of reads.
#[derive(Clone, Debug, Default)]
pub struct Ahead {
    streams: Vec<Stream>,
    clock: u64,
}

impl Ahead {
    /// A read was asked for: the range that should be read ahead, if any, within `end`.
    pub fn read(&mut self, offset: u64, len: u64, max: u64, end: u64) -> Option<(u64, u64)> {
        self.clock += 1;
        let next = offset + len;
        let Some(stream) = self.streams.iter_mut().find(|stream| stream.next == offset) else {
            if self.streams.len() == STREAMS {
                let oldest = (0..STREAMS).min_by_key(|i| self.streams[*i].used).unwrap_or(0);
                self.streams.swap_remove(oldest);
            }
            self.streams.push(Stream { next, window: 0, ahead: next, used: self.clock });
            return None;
        };
        stream.used = self.clock;
        stream.next = next;
        let first = stream.window == 0;
        if first {
            stream.window = FIRST.max(2 * len).min(max);
        }
        stream.ahead = stream.ahead.max(next);
        // Half of it is still to be read: time enough for the next piece.
        if !first && stream.ahead - next > stream.window / 2 {
            return None;
        }
        let from = stream.ahead;
        let to = (from + stream.window).min(end);
        stream.window = (2 * stream.window).min(max);
        stream.ahead = to.max(from);
        (to > from).then_some((from, to))
    }
}
