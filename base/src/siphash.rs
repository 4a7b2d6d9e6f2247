//! SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed hash of short inputs whose values nobody can tell
//! without the key.

/// The 64-bit hash of `message` under `key`.
#[must_use]
pub fn siphash24(key: u128, message: &[u8]) -> u64 {
    let (k0, k1) = (key as u64, (key >> 64) as u64);
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let (words, rest) = message.as_chunks::<8>();
    for word in words {
        absorb(&mut v, u64::from_le_bytes(*word));
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    last[7] = message.len() as u8;
    absorb(&mut v, u64::from_le_bytes(last));
    v[2] ^= 0xff;
    for _ in 0..4 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn absorb(v: &mut [u64; 4], word: u64) {
    v[3] ^= word;
    round(v);
    round(v);
    v[0] ^= word;
}

fn round(v: &mut [u64; 4]) {
    let [mut a, mut b, mut c, mut d] = *v;
    a = a.wrapping_add(b);
    b = b.rotate_left(13) ^ a;
    a = a.rotate_left(32);
    c = c.wrapping_add(d);
    d = d.rotate_left(16) ^ c;
    a = a.wrapping_add(d);
    d = d.rotate_left(21) ^ a;
    c = c.wrapping_add(b);
    b = b.rotate_left(17) ^ c;
    c = c.rotate_left(32);
    *v = [a, b, c, d];
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first values of the authors' list, and its last: key 00..0f, messages 00.. of 0 to 63 bytes.
    #[test]
    fn agrees_with_the_published_vectors() {
        let key = u128::from_le_bytes(core::array::from_fn(|i| i as u8));
        let message: [u8; 63] = core::array::from_fn(|i| i as u8);
        let known: [(usize, u64); 5] = [
            (0, 0x726f_db47_dd0e_0e31),
            (1, 0x74f8_39c5_93dc_67fd),
            (7, 0xab02_00f5_8b01_d137),
            (8, 0x93f5_f579_9a93_2462),
            (15, 0xa129_ca61_49be_45e5),
        ];
        for (len, value) in known {
            assert_eq!(siphash24(key, &message[..len]), value, "{len} bytes");
        }
        assert_eq!(siphash24(key, &message), 0x958a_324c_eb06_4572);
    }
}
