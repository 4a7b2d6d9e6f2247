//! GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), the field of ISA-L and of
//! Jerasure's w = 8, and the per-coefficient tables that the vector engines multiply with.

/// The field's polynomial.
pub const POLYNOMIAL: u16 = 0x11d;

/// Powers of the generator 2, twice over, so that the sum of two logarithms needs no reduction.
const EXP: [u8; 512] = exp();
const LOG: [u8; 256] = log();

const fn exp() -> [u8; 512] {
    let mut t = [0u8; 512];
    let mut x = 1u16;
    let mut i = 0;
    while i < 512 {
        t[i] = x as u8;
        x <<= 1;
        if x & 0x100 != 0 {
            x ^= POLYNOMIAL;
        }
        i += 1;
    }
    t
}

const fn log() -> [u8; 256] {
    let mut t = [0u8; 256];
    let mut i = 0;
    while i < 255 {
        t[EXP[i] as usize] = i as u8;
        i += 1;
    }
    t
}

/// Product of two field elements.
#[inline]
pub const fn mul(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    EXP[LOG[a as usize] as usize + LOG[b as usize] as usize]
}

/// Multiplicative inverse; 0 for 0, as in ISA-L.
#[inline]
pub const fn inv(a: u8) -> u8 {
    if a == 0 {
        return 0;
    }
    EXP[255 - LOG[a as usize] as usize]
}

/// Multiplication by each constant as an 8 x 8 bit matrix in the form of `vgf2p8affineqb`: byte
/// 7 - i holds the input bits whose parity is output bit i. 2 KiB.
pub(crate) static AFFINE: [u64; 256] = affine();

const fn affine() -> [u64; 256] {
    let mut t = [0u64; 256];
    let mut c = 0;
    while c < 256 {
        let mut j = 0;
        while j < 8 {
            let column = mul(c as u8, 1 << j);
            let mut i = 0;
            while i < 8 {
                if column & (1 << i) != 0 {
                    t[c] |= 1 << ((7 - i) * 8 + j);
                }
                i += 1;
            }
            j += 1;
        }
        c += 1;
    }
    t
}

/// Multiplication by each constant split by nibble, for byte shuffles: 16 products of the low
/// nibble, then 16 of the high one. 8 KiB.
pub(crate) static NIBBLES: [[u8; 32]; 256] = nibbles();

const fn nibbles() -> [[u8; 32]; 256] {
    let mut t = [[0u8; 32]; 256];
    let mut c = 0;
    while c < 256 {
        let mut n = 0;
        while n < 16 {
            t[c][n] = mul(c as u8, n as u8);
            t[c][16 + n] = mul(c as u8, (n as u8) << 4);
            n += 1;
        }
        c += 1;
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shift and add, straight from the definition.
    fn slow(a: u8, b: u8) -> u8 {
        let mut product = 0u16;
        for bit in 0..8 {
            if b & (1 << bit) != 0 {
                product ^= u16::from(a) << bit;
            }
        }
        for bit in (8..16).rev() {
            if product & (1 << bit) != 0 {
                product ^= POLYNOMIAL << (bit - 8);
            }
        }
        product as u8
    }

    #[test]
    fn every_product_matches_the_definition() {
        for a in 0..=255u8 {
            for b in 0..=255u8 {
                let want = slow(a, b);
                assert_eq!(mul(a, b), want, "{a} * {b}");
                let n = &NIBBLES[usize::from(a)];
                assert_eq!(n[usize::from(b & 15)] ^ n[16 + usize::from(b >> 4)], want);
                let mut bits = 0u8;
                for i in 0..8 {
                    let row = (AFFINE[usize::from(a)] >> ((7 - i) * 8)) as u8;
                    bits |= (((row & b).count_ones() & 1) as u8) << i;
                }
                assert_eq!(bits, want, "affine {a} * {b}");
            }
            assert_eq!(mul(a, inv(a)), u8::from(a != 0));
        }
    }
}
