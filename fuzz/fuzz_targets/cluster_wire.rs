//! Any bytes on a socket: frames, hellos, and the coordinator's messages and state. Nothing panics,
//! nothing above the limit is allocated, and what is accepted means the same when packed again.
#![no_main]

use cluster::coordinator::message::{MESSAGE_MAX, Message};
use cluster::coordinator::store::Image;
use cluster::decode::{Decoder, LinkError, Pool, Source};
use cluster::limits::BODY_MAX;
use cluster::wire::{FrameHead, Hello, Refusal};
use libfuzzer_sys::fuzz_target;

/// Hands out the input in pieces whose lengths come from the input too.
struct Pieces<'a> {
    bytes: &'a [u8],
    step: usize,
}

impl Source for Pieces<'_> {
    fn read(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError> {
        assert!(max <= BODY_MAX);
        let n = self.step.min(max).min(self.bytes.len());
        let (taken, rest) = self.bytes.split_at(n);
        dst.extend_from_slice(taken);
        self.bytes = rest;
        Ok(n)
    }
}

fn frames(bytes: &[u8], step: usize) {
    for mut decoder in [Decoder::for_ring(), Decoder::for_socket(MESSAGE_MAX)] {
        let mut source = Pieces { bytes, step };
        let mut pool = Pool::default();
        while let Ok(Some((kind, body))) = decoder.next(&mut source, &mut pool) {
            message(kind, &body);
        }
    }
}

fn message(kind: u16, body: &[u8]) {
    if let Ok(message) = Message::decode(kind, body) {
        let (kind, body) = message.encode();
        assert_eq!(Message::decode(kind, &body), Ok(message));
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&[which, kind, step], bytes)) = data.split_first_chunk::<3>() else { return };
    let step = usize::from(step) + 1;
    match which % 4 {
        0 => frames(bytes, step),
        // A right head, so that the body is reached.
        1 => {
            let Some(head) = FrameHead::new(u16::from(kind), &[bytes]) else { return };
            frames(&[&head.encode()[..], bytes].concat(), step);
        }
        2 => {
            if let Ok(hello) = Hello::decode(bytes) {
                assert_eq!(hello.encode(), bytes);
            }
            let _ = Refusal::decode(bytes);
        }
        _ => {
            if let Ok(image) = Image::decode(bytes) {
                assert_eq!(image.encode(), bytes);
            }
        }
    }
});
