//! Properties of the coder on every engine; `tests/libraries.rs` compares with ISA-L and Jerasure.

use base::random::Random;

use super::*;
use crate::engine;

fn chunks(random: &mut Random, count: usize, len: usize) -> Vec<Vec<u8>> {
    (0..count)
        .map(|_| {
            let mut chunk = vec![0u8; len];
            random.fill(&mut chunk);
            chunk
        })
        .collect()
}

fn refs(chunks: &[Vec<u8>]) -> Vec<&[u8]> {
    chunks.iter().map(Vec::as_slice).collect()
}

fn muts(chunks: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    chunks.iter_mut().map(Vec::as_mut_slice).collect()
}

/// Straight from the definition.
fn slow_encode(code: &Code, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let k = code.data_chunks();
    let row = |r: usize| {
        (0..data[0].len())
            .map(|i| (0..k).fold(0, |s, c| s ^ field::mul(code.matrix()[r * k + c], data[c][i])))
            .collect()
    };
    (0..code.parity_chunks()).map(row).collect()
}

fn random_shape(random: &mut Random) -> (usize, usize, usize) {
    let k = 1 + random.below(14) as usize;
    let m = random.below(9) as usize;
    let len = match random.below(4) {
        0 => random.below(70),
        1 => random.below(600),
        _ => random.below(3_000),
    };
    (k, m, len as usize)
}

fn pick(random: &mut Random, from: usize, count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..from).collect();
    (0..count).map(|_| all.swap_remove(random.below(all.len() as u64) as usize)).collect()
}

#[test]
fn engines_agree_with_the_definition() {
    let mut random = Random::new(11);
    for round in 0..150 {
        let (k, m, len) = random_shape(&mut random);
        let kind = Kind::ALL[round % 3];
        // An odd start, so that no vector is aligned by luck.
        let skew = random.below(64).min(len as u64) as usize;
        let data = chunks(&mut random, k, len);
        let want = slow_encode(&Code::new(kind, k, m).unwrap(), &data);
        for e in engine::available() {
            let code = Code::with_engine(kind, k, m, e).unwrap();
            let mut parity = chunks(&mut random, m, len);
            code.encode(&refs(&data), &mut muts(&mut parity)).unwrap();
            assert_eq!(parity, want, "{} k {k} m {m} length {len}", e.name());
            let mut part = chunks(&mut random, m, len);
            let from: Vec<&[u8]> = data.iter().map(|d| &d[skew..]).collect();
            let mut to: Vec<&mut [u8]> = part.iter_mut().map(|p| &mut p[skew..]).collect();
            code.encode(&from, &mut to).unwrap();
            assert!(part.iter().zip(&want).all(|(p, w)| p[skew..] == w[skew..]), "{}", e.name());
        }
    }
}

#[test]
fn wide_codes() {
    let mut random = Random::new(12);
    for (k, m) in [(1, 254), (254, 1), (200, 55), (128, 127), (255, 0)] {
        for kind in [Kind::Cauchy, Kind::JerasureVandermonde] {
            let data = chunks(&mut random, k, 131);
            let code = Code::new(kind, k, m).unwrap();
            let want = slow_encode(&code, &data);
            for e in engine::available() {
                let code = Code::with_engine(kind, k, m, e).unwrap();
                let mut all = data.clone();
                all.extend(chunks(&mut random, m, 131));
                let (d, p) = all.split_at_mut(k);
                code.encode(&refs(d), &mut muts(p)).unwrap();
                assert!(p == want, "{} {kind:?} k {k} m {m}", e.name());
                let lost = pick(&mut random, k + m, m);
                let whole = all.clone();
                lost.iter().for_each(|&i| all[i].fill(0xee));
                code.decode(&mut muts(&mut all), &lost).unwrap();
                assert!(all == whole, "{} {kind:?} k {k} m {m}", e.name());
            }
        }
    }
}

#[test]
fn any_losses_come_back() {
    let mut random = Random::new(13);
    for _ in 0..400 {
        let (k, m, len) = random_shape(&mut random);
        let kind = Kind::ALL[random.below(3) as usize];
        let engines: Vec<_> = engine::available().collect();
        let e = engines[random.below(engines.len() as u64) as usize];
        let code = Code::with_engine(kind, k, m, e).unwrap();
        let mut all = chunks(&mut random, k + m, len);
        let (d, p) = all.split_at_mut(k);
        code.encode(&refs(d), &mut muts(p)).unwrap();
        let whole = all.clone();
        let losses = random.below(m as u64 + 1) as usize;
        let lost = pick(&mut random, k + m, losses);
        lost.iter().for_each(|&i| all[i].fill(0xee));
        match code.decode(&mut muts(&mut all), &lost) {
            Ok(()) => assert_eq!(all, whole, "{} {kind:?} k {k} m {m} lost {lost:?}", e.name()),
            Err(error) => {
                assert!(matches!(error, CodingError::Singular { .. }), "{error}");
                assert!(!kind.is_safe(k, m), "{kind:?} k {k} m {m} lost {lost:?}: {error}");
            }
        }
        // One of them alone, as a degraded read does it.
        if let (Some(&one), Ok(_)) = (lost.first(), code.plan(&lost)) {
            let plan = code.plan_for(&lost, &[one]).unwrap();
            assert!(plan.sources().iter().all(|s| !lost.contains(s)));
            let from: Vec<&[u8]> = plan.sources().iter().map(|&s| whole[s].as_slice()).collect();
            let mut got = vec![0u8; len];
            plan.rebuild(&from, &mut [&mut got]).unwrap();
            assert_eq!(got, whole[one]);
        }
    }
}

#[test]
fn updates_and_verify() {
    let mut random = Random::new(14);
    for _ in 0..200 {
        let (k, m, len) = random_shape(&mut random);
        let (m, len) = (m + 1, len + 1);
        let engines: Vec<_> = engine::available().collect();
        let e = engines[random.below(engines.len() as u64) as usize];
        let code = Code::with_engine(Kind::Cauchy, k, m, e).unwrap();
        let mut data = chunks(&mut random, k, len);
        let mut parity = chunks(&mut random, m, len);
        code.encode(&refs(&data), &mut muts(&mut parity)).unwrap();
        let index = random.below(k as u64) as usize;
        let from = random.below(len as u64) as usize;
        let to = from + random.below((len - from) as u64 + 1) as usize;
        let old = data[index][from..to].to_vec();
        random.fill(&mut data[index][from..to]);
        let mut ranges: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[from..to]).collect();
        code.update(index, &old, &data[index][from..to], &mut ranges).unwrap();
        assert_eq!(parity, slow_encode(&code, &data), "{}", e.name());
        assert_eq!(code.verify(&refs(&data), &refs(&parity)), Ok(None));
        let row = random.below(m as u64) as usize;
        let offset = random.below(len as u64) as usize;
        parity[row][offset] ^= 1 << random.below(8);
        let found = code.verify(&refs(&data), &refs(&parity)).unwrap();
        assert_eq!(found, Some(Mismatch { row, offset }), "{}", e.name());
    }
}

#[test]
fn batches_are_one_by_one() {
    let mut random = Random::new(15);
    for e in engine::available() {
        let code = Code::with_engine(Kind::JerasureVandermonde, 4, 2, e).unwrap();
        let mut stripes: Vec<_> = (0..5).map(|i| chunks(&mut random, 6, 100 * i)).collect();
        let mut split: Vec<_> = stripes.iter_mut().map(|s| s.split_at_mut(4)).collect();
        let mut parts: Vec<_> = split.iter_mut().map(|(d, p)| (refs(d), muts(p))).collect();
        let mut batch: Vec<_> =
            parts.iter_mut().map(|(d, p)| Stripe { inputs: d, outputs: p }).collect();
        code.encode_many(&mut batch).unwrap();
        for s in &stripes {
            assert_eq!(s[4..], slow_encode(&code, &s[..4]));
        }
        let plan = code.plan(&[0, 5]).unwrap();
        let mut out: Vec<_> = stripes.iter().map(|s| chunks(&mut random, 2, s[0].len())).collect();
        let from: Vec<Vec<&[u8]>> = stripes
            .iter()
            .map(|s| plan.sources().iter().map(|&i| s[i].as_slice()).collect())
            .collect();
        let mut to: Vec<_> = out.iter_mut().map(|o| muts(o)).collect();
        let mut batch: Vec<_> =
            from.iter().zip(&mut to).map(|(i, o)| Stripe { inputs: i, outputs: o }).collect();
        plan.rebuild_many(&mut batch).unwrap();
        for (s, o) in stripes.iter().zip(&out) {
            assert_eq!([&s[0], &s[5]], [&o[0], &o[1]]);
        }
    }
}

#[test]
fn bad_requests_are_refused() {
    use CodingError::*;
    for (k, m) in [(0, 3), (200, 56), (256, 0), (usize::MAX, 2), (2, usize::MAX)] {
        assert_eq!(Code::new(Kind::Cauchy, k, m).err(), Some(Shape { data: k, parity: m }));
    }
    let code = Code::new(Kind::Cauchy, 3, 2).unwrap();
    assert_eq!(code.plan(&[5]).err(), Some(Index { index: 5, limit: 5 }));
    assert_eq!(code.plan(&[1, 1]).err(), Some(Listed { index: 1 }));
    assert_eq!(code.plan(&[0, 1, 2]).err(), Some(TooManyLost { lost: 3, parity: 2 }));
    assert_eq!(code.plan_for(&[0], &[1]).err(), Some(Listed { index: 1 }));
    assert_eq!(code.plan_for(&[0], &[0, 0]).err(), Some(Listed { index: 0 }));
    assert_eq!(code.plan_for(&[0], &[9]).err(), Some(Index { index: 9, limit: 5 }));
    let (a, b) = ([1u8; 10], [1u8; 11]);
    let (mut p, mut q) = ([0u8; 10], [0u8; 9]);
    let what = "data chunks";
    assert_eq!(
        code.encode(&[&a, &a], &mut [&mut p, &mut q]),
        Err(Count { what, expected: 3, found: 2 })
    );
    assert_eq!(
        code.encode(&[&a, &b, &a], &mut [&mut p, &mut q]),
        Err(Length { what: "data chunk", index: 1, expected: 10, found: 11 })
    );
    assert_eq!(
        code.encode(&[&a, &a, &a], &mut [&mut p, &mut q]),
        Err(Length { what: "parity chunk", index: 1, expected: 10, found: 9 })
    );
    assert_eq!(p, [0; 10], "nothing is written");
    assert_eq!(code.update(3, &a, &a, &mut []), Err(Index { index: 3, limit: 3 }));
    assert!(code.update(0, &a, &b, &mut [&mut p, &mut q]).is_err());
    assert!(code.verify(&[&a, &a, &a], &[&a]).is_err());
    assert!(code.decode(&mut [&mut p, &mut q], &[0]).is_err());
}

#[test]
fn an_unsafe_matrix_is_noticed() {
    // Rows 1, x, x^2, x^3 with x = 2^j: without the third row, three columns with x + y + z = 0
    // are dependent. The first such three have z below column 22.
    let code = Code::new(Kind::IsalVandermonde, 22, 4).unwrap();
    assert!(!code.kind().is_safe(22, 4) && code.kind().is_safe(21, 4));
    let mut refused = Vec::new();
    for a in 0..22 {
        for b in 0..a {
            for c in 0..b {
                // Row 2 (x^2) lost: rows 0, 1 and 3 must do.
                match code.plan(&[a, b, c, 24]) {
                    Ok(plan) => assert_eq!(plan.sources().len(), 22),
                    Err(e) => {
                        assert_eq!(e, CodingError::Singular { lost: 3, rank: 2 });
                        refused.push((c, b, a));
                    }
                }
            }
        }
    }
    assert!(!refused.is_empty());
    assert!(refused.iter().all(|&(_, _, a)| a == 21), "{refused:?}");
}
