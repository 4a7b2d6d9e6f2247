//! Any shape, any losses, on every engine: rebuilt as it was, or a precise error.

use placement::coding::{Code, CodingError, Kind};
use placement::engine;

/// The target.
pub fn run(data: &[u8]) {
    let Some((&[kind, k, m, losses], rest)) = data.split_first_chunk::<4>() else { return };
    let (kind, k, m) = (Kind::ALL[usize::from(kind) % 3], usize::from(k), usize::from(m));
    let Some((lost, bytes)) = rest.split_at_checked(usize::from(losses)) else { return };
    let lost: Vec<usize> = lost.iter().map(|&l| l.into()).collect();
    for engine in engine::available() {
        let code = match Code::with_engine(kind, k, m, engine) {
            Ok(code) => code,
            Err(e) => {
                assert_eq!(e, CodingError::Shape { data: k, parity: m });
                assert!(k == 0 || k + m > 255);
                return;
            }
        };
        // Chunks cut from the input, so that the last ones may be of another length.
        let len = bytes.len() / k;
        let stripe: Vec<&[u8]> = bytes.chunks(len.max(1)).take(k).collect();
        let mut parity = vec![vec![0u8; len]; m];
        let mut muts: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
        if code.encode(&stripe, &mut muts).is_err() {
            return;
        }
        let refs: Vec<&[u8]> = parity.iter().map(Vec::as_slice).collect();
        assert_eq!(code.verify(&stripe, &refs), Ok(None));
        let whole: Vec<Vec<u8>> = stripe.iter().chain(&refs).map(|chunk| chunk.to_vec()).collect();
        let mut broken = whole.clone();
        lost.iter().filter(|&&l| l < k + m).for_each(|&l| broken[l].fill(0xee));
        let mut muts: Vec<&mut [u8]> = broken.iter_mut().map(Vec::as_mut_slice).collect();
        match code.decode(&mut muts, &lost) {
            Ok(()) => assert_eq!(broken, whole),
            Err(CodingError::Singular { .. }) => assert!(!kind.is_safe(k, m)),
            Err(_) => {}
        }
    }
}
