//! Bit for bit against ISA-L, Jerasure and liblz4. Where a library is absent its test says so and
//! passes; `golden.rs` has vectors from the same libraries that are always compared.

use base::random::Random;
use placement::coding::{Code, Kind};
use placement::foreign::{Isal, Jerasure, Lz4, Missing};
use placement::{compress, engine};

/// The library, or a notice that the comparison did not take place.
fn or_skip<T>(library: Result<T, Missing>) -> Option<T> {
    library.inspect_err(|e| eprintln!("SKIPPED, nothing compared: {e}")).ok()
}

fn chunks(random: &mut Random, count: usize, len: usize) -> Vec<Vec<u8>> {
    let mut chunks = vec![vec![0u8; len]; count];
    chunks.iter_mut().for_each(|c| random.fill(c));
    chunks
}

fn refs(chunks: &[Vec<u8>]) -> Vec<&[u8]> {
    chunks.iter().map(Vec::as_slice).collect()
}

fn muts(chunks: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    chunks.iter_mut().map(Vec::as_mut_slice).collect()
}

/// Every (k, m) that the issue names, and some wide ones.
fn shapes() -> impl Iterator<Item = (usize, usize)> {
    let narrow = (2..=12).flat_map(|k| (1..=4).map(move |m| (k, m)));
    narrow.chain([(1, 1), (1, 9), (16, 11), (33, 20), (100, 30), (200, 55)])
}

#[test]
fn isal_matrices() {
    let Some(isal) = or_skip(Isal::load()) else { return };
    for kind in [Kind::IsalVandermonde, Kind::Cauchy] {
        for k in 1..=60 {
            for m in 0..=30 {
                let code = Code::new(kind, k, m).unwrap();
                let theirs = isal.matrix(kind, k, m).unwrap();
                assert_eq!(theirs[k * k..], *code.matrix(), "{kind:?} k {k} m {m}");
            }
        }
    }
}

#[test]
fn isal_encodes_the_same() {
    let Some(isal) = or_skip(Isal::load()) else { return };
    let mut random = Random::new(21);
    for (k, m) in shapes() {
        for kind in Kind::ALL {
            for _ in 0..4 {
                // ISA-L's kernels need at least 16 bytes, or fall back.
                let len = 1 + random.below(9_000) as usize;
                let data = chunks(&mut random, k, len);
                let mut want = chunks(&mut random, m, len);
                let code = Code::new(kind, k, m).unwrap();
                let tables = isal.tables(k, m, code.matrix());
                isal.encode(&tables, &refs(&data), &mut muts(&mut want));
                for e in engine::available() {
                    let code = Code::with_engine(kind, k, m, e).unwrap();
                    let mut parity = chunks(&mut random, m, len);
                    code.encode(&refs(&data), &mut muts(&mut parity)).unwrap();
                    assert!(parity == want, "{} {kind:?} k {k} m {m} length {len}", e.name());
                }
            }
        }
    }
}

/// A stripe encoded by ISA-L, with losses, decoded by ISA-L's own recipe and by ours.
#[test]
fn isal_decodes_the_same() {
    let Some(isal) = or_skip(Isal::load()) else { return };
    let mut random = Random::new(22);
    for (k, m) in shapes().filter(|&(k, m)| k + m < 60) {
        for kind in [Kind::IsalVandermonde, Kind::Cauchy] {
            let len = 16 + random.below(3_000) as usize;
            let matrix = isal.matrix(kind, k, m).unwrap();
            let mut all = chunks(&mut random, k + m, len);
            let (data, parity) = all.split_at_mut(k);
            isal.encode(&isal.tables(k, m, &matrix[k * k..]), &refs(data), &mut muts(parity));

            let mut left: Vec<usize> = (0..k + m).collect();
            let lost: Vec<usize> = (0..m)
                .map(|_| left.swap_remove(random.below(left.len() as u64) as usize))
                .collect();
            left.sort_unstable();
            let square: Vec<u8> =
                left.iter().flat_map(|&r| matrix[r * k..][..k].to_vec()).collect();
            let Some(inverse) = isal.invert(&square, k) else {
                assert!(!kind.is_safe(k, m), "{kind:?} k {k} m {m}");
                continue;
            };
            for &target in lost.iter().filter(|&&t| t < k) {
                let tables = isal.tables(k, 1, &inverse[target * k..][..k]);
                let from: Vec<&[u8]> = left.iter().map(|&s| all[s].as_slice()).collect();
                let mut theirs = vec![0u8; len];
                isal.encode(&tables, &from, &mut [&mut theirs]);
                assert_eq!(theirs, all[target], "ISA-L itself, {kind:?} k {k} m {m}");
            }
            for e in engine::available() {
                let code = Code::with_engine(kind, k, m, e).unwrap();
                let mut broken = all.clone();
                lost.iter().for_each(|&i| broken[i].fill(0));
                code.decode(&mut muts(&mut broken), &lost).unwrap();
                assert!(broken == all, "{} {kind:?} k {k} m {m} lost {lost:?}", e.name());
            }
        }
    }
}

#[test]
fn jerasure_is_the_same() {
    let Some(jerasure) = or_skip(Jerasure::load()) else { return };
    let kind = Kind::JerasureVandermonde;
    for k in 1..=40 {
        for m in 1..=20 {
            let ours: Vec<i32> =
                Code::new(kind, k, m).unwrap().matrix().iter().map(|&e| e.into()).collect();
            assert_eq!(jerasure.matrix(k, m), ours, "k {k} m {m}");
        }
    }
    let mut random = Random::new(23);
    for (k, m) in shapes() {
        let matrix = jerasure.matrix(k, m);
        for _ in 0..4 {
            let len = 16 * (1 + random.below(300) as usize);
            let data = chunks(&mut random, k, len);
            let mut want = chunks(&mut random, m, len);
            jerasure.encode(&matrix, &refs(&data), &mut muts(&mut want));
            for e in engine::available() {
                let code = Code::with_engine(kind, k, m, e).unwrap();
                let mut parity = chunks(&mut random, m, len);
                code.encode(&refs(&data), &mut muts(&mut parity)).unwrap();
                assert!(parity == want, "{} k {k} m {m} length {len}", e.name());
            }
        }
    }
}

#[test]
fn lz4_blocks_cross_over() {
    let Some(lz4) = or_skip(Lz4::load()) else { return };
    let mut random = Random::new(24);
    for round in 0..200 {
        let len = random.below(if round % 10 == 0 { 300_000 } else { 5_000 }) as usize;
        let alphabet = 1 + random.below(256);
        let plain: Vec<u8> = (0..len).map(|_| random.below(alphabet) as u8).collect();
        let mut packed = vec![0u8; compress::bound(len)];
        let mut back = vec![0u8; len];
        let n = compress::compress(&plain, &mut packed).unwrap();
        assert_eq!(lz4.decompress(&packed[..n], &mut back), Some(len), "theirs reads ours");
        assert!(back == plain);
        let n = lz4.compress(&plain, &mut packed).unwrap();
        back.fill(0);
        assert_eq!(compress::decompress(&packed[..n], &mut back), Ok(len), "ours reads theirs");
        assert!(back == plain);
    }
}
