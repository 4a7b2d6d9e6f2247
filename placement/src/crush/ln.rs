//! `crush_ln`: 2^44 · log2(u + 1) in fixed point, with the very errors that Ceph's tables have.
//!
//! Ceph looks the logarithm up in three tables. Two follow their formulas (reciprocals rounded up,
//! logarithms rounded down). The third, meant to be 2^48 · log2(1 + k / 2^15), is too large by one
//! constant from its third entry on, and 42 of its entries are off by something else. Clusters place
//! data by these numbers, so they are part of the format now. The tables are computed here when the
//! crate is compiled, and the deviations are listed.

use std::sync::OnceLock;

/// How much Ceph's low-order table exceeds its formula from entry 2 on.
const LOW_EXCESS: u64 = 0x1_4770_0000;

/// Entries of Ceph's low-order table that deviate from formula + [`LOW_EXCESS`].
const LOW_DEVIATIONS: [(usize, u64); 42] = [
    (56, 0xa2_b07f_3458),
    (127, 0x16d_f6ca_19bd),
    (134, 0x182_b07f_3458),
    (181, 0x209_c06e_6212),
    (184, 0x212_b07f_3458),
    (188, 0x21d_6a73_a78f),
    (193, 0x22c_2367_9b4e),
    (198, 0x23a_2c3b_0ea4),
    (199, 0x23d_13ee_805b),
    (200, 0x240_35e9_221f),
    (203, 0x247_ed64_6bfe),
    (207, 0x254_9264_4d65),
    (210, 0x25d_13ee_805b),
    (212, 0x262_9645_3882),
    (216, 0x26d_32f7_98a9),
    (222, 0x27e_6580_aecb),
    (225, 0x287_bdbf_5255),
    (227, 0x28d_13ee_805b),
    (228, 0x290_35e9_221f),
    (229, 0x292_9645_3882),
    (231, 0x299_02a3_7aab),
    (233, 0x29d_eabd_1083),
    (235, 0x2a4_c760_5d61),
    (236, 0x2a7_bdbf_5255),
    (237, 0x2a9_6056_dafc),
    (238, 0x2ac_3daf_14ef),
    (239, 0x2af_1b01_9eca),
    (240, 0x2b2_9645_3882),
    (241, 0x2b5_d022_d80f),
    (243, 0x2ba_9012_e713),
    (244, 0x2bd_6d49_01cc),
    (245, 0x2c0_4a79_6cf6),
    (246, 0x2c3_27a4_28a6),
    (247, 0x2c6_1a5e_8f4c),
    (248, 0x2c8_e1e8_91f6),
    (249, 0x2cb_bf02_3fc2),
    (250, 0x2ce_9c16_3e6e),
    (251, 0x2d1_7924_8e13),
    (252, 0x2d4_562d_2ec6),
    (253, 0x2d7_3330_209d),
    (254, 0x2da_102d_63b0),
    (255, 0x2dc_ed24_f814),
];

/// floor(2^48 · log2(1 + num / den)) for num ≤ den, by squaring: each squaring yields one bit.
const fn log2_48(num: u64, den: u64) -> u64 {
    let mut y: u128 = (1 << 62) + (((num as u128) << 62) / den as u128);
    if num == den {
        return 1 << 48;
    }
    let mut result = 0;
    let mut bit = 0;
    while bit < 48 {
        y = (y * y) >> 62;
        result <<= 1;
        if y >> 63 != 0 {
            y >>= 1;
            result |= 1;
        }
        bit += 1;
    }
    result
}

/// ceil(2^48 / (1 + k / 128)), for k in 0..=128.
const fn reciprocals() -> [u64; 129] {
    let mut table = [0; 129];
    let mut k = 0;
    while k < 129 {
        table[k] = (128u64 << 48).div_ceil(128 + k as u64);
        k += 1;
    }
    table
}

/// floor(2^48 · log2(1 + k / 128)), but for the last entry, which is 2^32 too small in Ceph.
const fn high_logs() -> [u64; 129] {
    let mut table = [0; 129];
    let mut k = 0;
    while k < 128 {
        table[k] = log2_48(k as u64, 128);
        k += 1;
    }
    table[128] = 0xffff_0000_0000;
    table
}

/// 2^48 · log2(1 + k / 2^15) as Ceph has it.
const fn low_logs() -> [u64; 256] {
    let mut table = [0; 256];
    let mut k = 0;
    while k < 256 {
        table[k] = log2_48(k as u64, 1 << 15) + if k >= 2 { LOW_EXCESS } else { 0 };
        k += 1;
    }
    let mut d = 0;
    while d < LOW_DEVIATIONS.len() {
        table[LOW_DEVIATIONS[d].0] = LOW_DEVIATIONS[d].1;
        d += 1;
    }
    table
}

static RECIPROCAL: [u64; 129] = reciprocals();
static HIGH_LOG: [u64; 129] = high_logs();
static LOW_LOG: [u64; 256] = low_logs();

/// 2^44 · log2(u + 1), `u` a 16-bit draw.
pub fn crush_ln(u: u16) -> u64 {
    let mut x = u32::from(u) + 1;
    let mut exponent = 15;
    if x & 0x1_8000 == 0 {
        let shift = x.leading_zeros() - 16;
        x <<= shift;
        exponent -= u64::from(shift);
    }
    let index = ((x >> 8) - 128) as usize;
    let low = ((u64::from(x).wrapping_mul(RECIPROCAL[index]) >> 48) & 0xff) as usize;
    (exponent << 44) + ((HIGH_LOG[index] + LOW_LOG[low]) >> 4)
}

/// 2^48 − [`crush_ln`]\(u), as a table over all 65,536 draws: what a straw2 draw divides by the
/// weight. Never negative. 512 KiB, built at the first use.
pub(super) fn distance_table() -> &'static [u64] {
    static TABLE: OnceLock<Vec<u64>> = OnceLock::new();
    TABLE.get_or_init(|| (0..=u16::MAX).map(distance).collect())
}

/// 2^48 − [`crush_ln`]\(u).
pub(super) fn distance(u: u16) -> u64 {
    (1u64 << 48).saturating_sub(crush_ln(u))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums over the tables that were read out of libceph-common 16.2.15.
    #[test]
    fn tables_are_cephs() {
        let fold = |table: &[u64]| {
            table
                .iter()
                .fold(0u64, |h, v| (h ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23))
        };
        assert_eq!(fold(&RECIPROCAL), RH_FOLD);
        assert_eq!(fold(&HIGH_LOG), LH_FOLD);
        assert_eq!(fold(&LOW_LOG), LL_FOLD);
    }

    #[test]
    fn a_draw_never_exceeds_the_whole() {
        assert_eq!(crush_ln(0), 0);
        for u in 0..=u16::MAX {
            assert!(crush_ln(u) <= 1 << 48, "{u}");
        }
        assert_eq!(crush_ln(u16::MAX), 0xffff_f000_0000);
    }

    const RH_FOLD: u64 = 0x4f14_03c2_5eec_bf01;
    const LH_FOLD: u64 = 0x3853_c8ab_86a8_f998;
    const LL_FOLD: u64 = 0x9772_ef07_a8c8_1df5;
}
