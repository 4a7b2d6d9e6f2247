//! Bytes on their way to a peer that does not take them yet; the same for sockets and rings.

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::decode::LinkError;

/// Bytes go here.
pub trait Sink {
    /// Takes as much of `parts`, in order, as there is room for; 0: none now.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, LinkError>;
}

/// Parts handed to one write.
const GATHER: usize = 16;

/// A queue with a high and a low watermark. Above `high` it is full until it is below half of it.
#[derive(Debug)]
pub struct OutQueue {
    chunks: VecDeque<Vec<u8>>,
    /// Bytes of the first chunk that are gone already.
    gone: usize,
    bytes: usize,
    high: usize,
    full: bool,
}

impl OutQueue {
    pub fn new(high: usize) -> Self {
        Self { chunks: VecDeque::new(), gone: 0, bytes: 0, high, full: false }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Sends `parts`, at once if nothing is queued before them, and queues what is left.
    pub fn send(&mut self, parts: &[&[u8]], sink: &mut dyn Sink) -> Result<(), LinkError> {
        let total: usize = parts.iter().map(|p| p.len()).sum();
        let mut sent = 0;
        if self.bytes == 0 && parts.len() <= GATHER {
            let mut slices = [IoSlice::new(&[]); GATHER];
            for (slice, part) in slices.iter_mut().zip(parts) {
                *slice = IoSlice::new(part);
            }
            sent = sink.write(&slices[..parts.len()])?;
        }
        if sent < total {
            self.push_rest(parts, sent, total);
        }
        Ok(())
    }

    fn push_rest(&mut self, parts: &[&[u8]], sent: usize, total: usize) {
        let mut skip = sent;
        let mut chunk = Vec::with_capacity(total - sent);
        for part in parts {
            let from = skip.min(part.len());
            skip -= from;
            chunk.extend_from_slice(&part[from..]);
        }
        self.bytes += chunk.len();
        self.chunks.push_back(chunk);
        if self.bytes > self.high {
            self.full = true;
        }
    }

    /// Moves on what the sink takes. True if the queue had been full and no longer is.
    pub fn flush(&mut self, sink: &mut dyn Sink) -> Result<bool, LinkError> {
        while self.bytes > 0 {
            let mut slices = [IoSlice::new(&[]); GATHER];
            let mut used = 0;
            for (slice, chunk) in slices.iter_mut().zip(&self.chunks) {
                *slice = IoSlice::new(&chunk[if used == 0 { self.gone } else { 0 }..]);
                used += 1;
            }
            let sent = sink.write(&slices[..used])?;
            if sent == 0 {
                break;
            }
            self.drop_front(sent);
        }
        let drained = self.full && self.bytes < self.high / 2 + 1;
        if drained {
            self.full = false;
        }
        Ok(drained)
    }

    fn drop_front(&mut self, mut sent: usize) {
        self.bytes -= sent;
        while let Some(front) = self.chunks.front() {
            let left = front.len() - self.gone;
            if sent < left {
                self.gone += sent;
                return;
            }
            sent -= left;
            self.gone = 0;
            self.chunks.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;

    struct Slow {
        random: Random,
        taken: Vec<u8>,
    }

    impl Sink for Slow {
        fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, LinkError> {
            let all: Vec<u8> = parts.iter().flat_map(|p| p.iter().copied()).collect();
            let n = (self.random.below(40) as usize).min(all.len());
            self.taken.extend_from_slice(&all[..n]);
            Ok(n)
        }
    }

    #[test]
    fn order_and_watermarks_hold_with_a_slow_sink() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut sink = Slow { random: Random::new(!seed), taken: Vec::new() };
            let mut queue = OutQueue::new(200);
            let mut wanted = Vec::new();
            for step in 0..200u32 {
                if random.chance(1, 2) && !queue.is_full() {
                    let a = vec![step as u8; random.below(30) as usize];
                    let b = vec![!step as u8; random.below(90) as usize];
                    queue.send(&[&a, &b], &mut sink).unwrap();
                    wanted.extend_from_slice(&a);
                    wanted.extend_from_slice(&b);
                    assert!(queue.bytes() <= 200 + 120, "seed {seed}");
                } else {
                    let was = queue.is_full();
                    let drained = queue.flush(&mut sink).unwrap();
                    assert_eq!(drained, was && !queue.is_full(), "seed {seed}");
                }
            }
            for _ in 0..10_000 {
                queue.flush(&mut sink).unwrap();
            }
            assert!(queue.is_empty(), "seed {seed}");
            assert_eq!(sink.taken, wanted, "seed {seed}");
        }
    }
}
