//! Hostile LZ4 blocks: an error or a result within the buffer, never a panic; and every input
//! survives the round trip.

use placement::compress;

/// The target.
pub fn run(data: &[u8]) {
    let Some((&[a, b], rest)) = data.split_first_chunk::<2>() else { return };
    let room = usize::from(u16::from_le_bytes([a, b]));
    let mut out = vec![0xa5u8; room + 64];
    if let Ok(n) = compress::decompress(rest, &mut out[..room]) {
        assert!(n <= room);
    }
    assert!(out[room..].iter().all(|&b| b == 0xa5), "bytes written behind the buffer");

    let mut packed = vec![0u8; compress::bound(rest.len())];
    let n = compress::compress(rest, &mut packed).expect("the buffer is large enough");
    let mut back = vec![0u8; rest.len()];
    assert_eq!(compress::decompress(&packed[..n], &mut back), Ok(rest.len()));
    assert_eq!(back, rest);
    if let Ok(Some(n)) = compress::compress_if_worth(rest, &mut packed) {
        assert!(n < rest.len());
    }
}
