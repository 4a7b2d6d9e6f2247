//! Any sequence of requests to the FUSE server: each gets at most one reply, whose header tells
//! its length. Input: records of a length byte and so many bytes; the frame's length field is
//! put right in most, so that the handlers are reached.

use std::sync::Arc;

use client::null::NullFs;
use frontend::fuse::{Options, ReplySink, Server};

#[derive(Default)]
struct Sink {
    room: Vec<u8>,
    replies: usize,
}

impl ReplySink for Sink {
    fn payload(&mut self, len: usize) -> &mut [u8] {
        self.room.resize(len, 0);
        &mut self.room
    }

    fn send(&mut self, head: &[u8], payload_len: usize) -> bool {
        let stated = u32::from_le_bytes(head[..4].try_into().expect("a header"));
        assert_eq!(stated as usize, head.len() + payload_len);
        self.replies += 1;
        true
    }
}

fn init() -> Vec<u8> {
    let mut request = vec![0; 40 + 16];
    request[0] = 56;
    request[4] = 26;
    request[40] = 7;
    request[44] = 31;
    request
}

/// The target.
pub fn run(data: &[u8]) {
    let options = Options { groups_from_proc: false, ..Options::default() };
    let server = Server::new(Arc::new(NullFs::default()), options);
    let mut sink = Sink::default();
    server.handle(&init(), &mut sink);
    assert!(server.is_ready());
    let mut rest = data;
    while let Some((&len, tail)) = rest.split_first() {
        let (record, tail) = tail.split_at(usize::from(len).min(tail.len()));
        rest = tail;
        let mut request = record.to_vec();
        if len & 1 == 0 && request.len() >= 40 {
            request[..4].copy_from_slice(&(record.len() as u32).to_le_bytes());
            request[5..8].fill(0);
            request[36..40].fill(0);
        }
        sink.replies = 0;
        server.handle(&request, &mut sink);
        assert!(sink.replies <= 1);
    }
}
