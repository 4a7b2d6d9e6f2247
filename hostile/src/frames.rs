//! Streams of bytes cut into frames, in pieces of any size, and what the frames hold.

use cluster::coordinator::message::{MESSAGE_MAX, Message};
use cluster::decode::{Decoder, LinkError, Pool, Source};
use cluster::limits::BODY_MAX;
use cluster::wire::FrameHead;

use crate::input::Input;

struct Pieces<'a> {
    bytes: &'a [u8],
    step: usize,
}

impl Source for Pieces<'_> {
    fn read(&mut self, dst: &mut Vec<u8>, max: usize) -> Result<usize, LinkError> {
        assert!(max <= BODY_MAX, "memory for more than a frame may hold");
        let n = self.step.min(max).min(self.bytes.len());
        let (taken, rest) = self.bytes.split_at(n);
        dst.extend_from_slice(taken);
        self.bytes = rest;
        Ok(n)
    }
}

/// Frames with right heads, made of a script: kind, body, and what is wrong with it.
fn framed(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    while !input.is_empty() {
        let (kind, wrong, body) = (u16::from(input.u8()), input.u8(), input.piece());
        let Some(mut head) = FrameHead::new(kind, &[body]) else { continue };
        match wrong {
            b'l' => head.len = input.odd() as u32,
            b'c' => head.body_crc = Some(7),
            b'n' => head.body_crc = None,
            _ => {}
        }
        bytes.extend_from_slice(&head.encode());
        bytes.extend_from_slice(body);
    }
    bytes
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (how, step) = (input.u8(), usize::from(input.u8()) + 1);
    let bytes = if how & 1 == 0 { framed(&mut input) } else { input.rest().to_vec() };
    for mut decoder in [Decoder::for_ring(), Decoder::for_socket(MESSAGE_MAX)] {
        let mut source = Pieces { bytes: &bytes, step };
        let mut pool = Pool::default();
        while let Ok(Some((kind, body))) = decoder.next(&mut source, &mut pool) {
            if let Ok(message) = Message::decode(kind, &body) {
                let (kind, body) = message.encode();
                assert_eq!(Message::decode(kind, &body), Ok(message));
            }
        }
    }
}
