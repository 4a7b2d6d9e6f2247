//! The rjenkins1 hashes (Robert Jenkins' 32-bit mixing function), as CRUSH uses them.

/// What every hash starts from.
pub(super) const SEED: u32 = 1_315_423_911;
/// First padding word.
pub(super) const PAD_X: u32 = 231_232;
/// Second padding word.
pub(super) const PAD_Y: u32 = 1232;

/// The mixing step: one round over three words, the third of which carries the result.
const fn mix(mut a: u32, mut b: u32, mut c: u32) -> (u32, u32, u32) {
    a = a.wrapping_sub(b).wrapping_sub(c) ^ (c >> 13);
    b = b.wrapping_sub(c).wrapping_sub(a) ^ (a << 8);
    c = c.wrapping_sub(a).wrapping_sub(b) ^ (b >> 13);
    a = a.wrapping_sub(b).wrapping_sub(c) ^ (c >> 12);
    b = b.wrapping_sub(c).wrapping_sub(a) ^ (a << 16);
    c = c.wrapping_sub(a).wrapping_sub(b) ^ (b >> 5);
    a = a.wrapping_sub(b).wrapping_sub(c) ^ (c >> 3);
    b = b.wrapping_sub(c).wrapping_sub(a) ^ (a << 10);
    c = c.wrapping_sub(a).wrapping_sub(b) ^ (b >> 15);
    (a, b, c)
}

/// Hash of one word.
pub const fn hash1(a: u32) -> u32 {
    let h = SEED ^ a;
    let (_, _x, h) = mix(a, PAD_X, h);
    let (_, _, h) = mix(PAD_Y, a, h);
    h
}

/// Hash of two words.
pub const fn hash2(a: u32, b: u32) -> u32 {
    let h = SEED ^ a ^ b;
    let (a, b, h) = mix(a, b, h);
    let (_x, _a, h) = mix(PAD_X, a, h);
    let (_, _, h) = mix(b, PAD_Y, h);
    h
}

/// Hash of three words: what straw, straw2 and uniform buckets draw from.
pub const fn hash3(a: u32, b: u32, c: u32) -> u32 {
    let h = SEED ^ a ^ b ^ c;
    let (a, b, h) = mix(a, b, h);
    let (c, x, h) = mix(c, PAD_X, h);
    let (y, _a, h) = mix(PAD_Y, a, h);
    let (_b, _x, h) = mix(b, x, h);
    let (_, _, h) = mix(y, c, h);
    h
}

/// Hash of four words: what list and tree buckets draw from.
pub const fn hash4(a: u32, b: u32, c: u32, d: u32) -> u32 {
    let h = SEED ^ a ^ b ^ c ^ d;
    let (a, b, h) = mix(a, b, h);
    let (c, d, h) = mix(c, d, h);
    let (_a, x, h) = mix(a, PAD_X, h);
    let (y, _b, h) = mix(PAD_Y, b, h);
    let (_c, _x, h) = mix(c, x, h);
    let (_, _, h) = mix(y, d, h);
    h
}

/// Hash of five words.
pub const fn hash5(a: u32, b: u32, c: u32, d: u32, e: u32) -> u32 {
    let h = SEED ^ a ^ b ^ c ^ d ^ e;
    let (a, b, h) = mix(a, b, h);
    let (c, d, h) = mix(c, d, h);
    let (e, x, h) = mix(e, PAD_X, h);
    let (y, _a, h) = mix(PAD_Y, a, h);
    let (_b, x, h) = mix(b, x, h);
    let (y, _c, h) = mix(y, c, h);
    let (_d, _x, h) = mix(d, x, h);
    let (_, _, h) = mix(y, e, h);
    h
}
