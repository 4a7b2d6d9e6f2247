//! How names of objects become placement groups: Robert Jenkins' hash of 1996, as Ceph has it, and a remainder that changes little when there
//! are more groups.

/// [`super::Pool::object_hash`] of this one.
pub(super) const RJENKINS: u8 = 2;
/// What is hashed between a namespace and a name.
pub(super) const BETWEEN: u8 = 0o37;

fn mix([mut a, mut b, mut c]: [u32; 3]) -> [u32; 3] {
    for [right, left, last] in [[13, 8, 13], [12, 16, 5], [3, 10, 15]] {
        a = a.wrapping_sub(b).wrapping_sub(c) ^ (c >> right);
        b = b.wrapping_sub(c).wrapping_sub(a) ^ (a << left);
        c = c.wrapping_sub(a).wrapping_sub(b) ^ (b >> last);
    }
    [a, b, c]
}

/// Hash of a name.
pub fn str_hash(name: &[u8]) -> u32 {
    let word =
        |bytes: &[u8]| bytes.iter().rev().fold(0u32, |word, byte| (word << 8) | u32::from(*byte));
    let mut state: [u32; 3] = [0x9e37_79b9, 0x9e37_79b9, 0];
    let (chunks, rest) = name.as_chunks::<12>();
    for chunk in chunks {
        for (sum, bytes) in state.iter_mut().zip(chunk.chunks(4)) {
            *sum = sum.wrapping_add(word(bytes));
        }
        state = mix(state);
    }
    // The lowest byte of the last word is that of the length, of which Ceph takes 32 bits.
    #[allow(clippy::cast_possible_truncation)]
    let len = name.len() as u32;
    let (first, last) = rest.split_at(rest.len().min(8));
    for (sum, bytes) in state.iter_mut().zip(first.chunks(4)) {
        *sum = sum.wrapping_add(word(bytes));
    }
    state[2] = state[2].wrapping_add(len).wrapping_add(word(last) << 8);
    mix(state)[2]
}

/// `x` modulo the next power of two, or the one before where that is `n` or more: between powers of two a greater `n` leaves most where they are. Of
/// none it is none.
pub const fn stable_mod(x: u32, n: u32) -> u32 {
    let Some(last) = n.checked_sub(1) else { return 0 };
    let mask = u32::MAX.unbounded_shr(last.leading_zeros());
    if x & mask < n { x & mask } else { x & (mask >> 1) }
}
