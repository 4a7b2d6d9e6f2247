//! Matrices and parity that ISA-L 2.30 and Jerasure 2.0 gave, kept here so that bit-exactness is
//! tested where the libraries are absent. `libraries.rs` compares far more where they are present.

use base::random::Random;
use placement::coding::{Code, Kind};
use placement::engine;

mod vectors;
use vectors::{DIGESTS, MATRICES};

/// Length of a chunk; a multiple of 16, as Jerasure wants it.
const CHUNK: usize = 208;

/// CRC32C of the parity of a stripe of seeded random data.
fn digest(code: &Code) -> u32 {
    let (k, m) = (code.data_chunks(), code.parity_chunks());
    let mut random = Random::new((k * 1000 + m) as u64);
    let mut data = vec![0u8; k * CHUNK];
    let mut parity = vec![0u8; m * CHUNK];
    random.fill(&mut data);
    let data: Vec<&[u8]> = data.chunks(CHUNK).collect();
    code.encode(&data, &mut parity.chunks_mut(CHUNK).collect::<Vec<_>>()).unwrap();
    code.engine().crc32c(0, &parity)
}

#[test]
fn matrices_are_theirs() {
    for (kind, k, m, rows) in MATRICES {
        assert_eq!(Code::new(kind, k, m).unwrap().matrix(), rows, "{kind:?} k {k} m {m}");
    }
}

#[test]
fn parity_is_theirs() {
    assert_eq!(DIGESTS.len(), 11 * 4);
    for (k, m, digests) in DIGESTS {
        for e in engine::available() {
            for (kind, want) in Kind::ALL.into_iter().zip(digests) {
                let code = Code::with_engine(kind, k, m, e).unwrap();
                assert_eq!(digest(&code), want, "{} {kind:?} k {k} m {m}", e.name());
            }
        }
    }
}
