//! The eight-lane engine. See `engine` for why its answers are exact.
#![allow(unsafe_code)]

use super::{LEAST, LOG2, Lanes, UNDECIDED};
use crate::crush::flat::{Straw2, Table};
use crate::crush::hash::{PAD_X, PAD_Y, SEED};
use std::arch::x86_64::*;

const LANES: usize = 8;
/// Lanes with one bucket that are worth a vector of their own.
const RUN_LEAST: usize = 3;
/// Items of one bucket that are drawn side by side.
const ABREAST: usize = 2;

/// Nearest item so far in each lane, and the next nearest's lower bound.
struct Nearest {
    low: __m256,
    inverse: __m256,
    position: __m256i,
    next: __m256,
}

/// Winner of one bucket, items across lanes.
pub(super) fn pick(set: &Straw2, x: u32, r: u32) -> Option<usize> {
    // SAFETY: engines are resolved against the processor before they are used.
    unsafe { pick_items(set, x, r) }
}

/// Winners of many draws, one a lane.
pub(super) fn pick_many(table: &Table, lanes: &Lanes, chosen: &mut [i32]) {
    let live = lanes.live;
    let mut from = 0;
    while from < live {
        let bucket = lanes.bucket[from];
        let rest = &lanes.bucket[from..live.min(from + LANES)];
        let run = rest.iter().take_while(|b| **b == bucket).count();
        // SAFETY: engines are resolved against the processor before they are used.
        from += unsafe {
            if run >= RUN_LEAST {
                // Lanes past the run draw for nothing; the next vector overwrites them.
                pick_same(table, lanes, from, bucket as usize, chosen);
                run
            } else {
                pick_mixed(table, lanes, from, chosen);
                LANES
            }
        };
    }
}

/// `N` hashes side by side: one alone is a chain in which every operation waits for the last.
type Words<const N: usize> = [__m256i; N];

/// One line of the mixing: a − b − c, then exclusive or with c shifted.
macro_rules! line {
    ($a:ident, $b:ident, $c:ident, $shift:ident, $by:literal) => {
        for i in 0..N {
            let rest = _mm256_sub_epi32(_mm256_sub_epi32($a[i], $b[i]), $c[i]);
            $a[i] = _mm256_xor_si256(rest, $shift::<$by>($c[i]));
        }
    };
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn mix<const N: usize>(a: &mut Words<N>, b: &mut Words<N>, c: &mut Words<N>) {
    line!(a, b, c, _mm256_srli_epi32, 13);
    line!(b, c, a, _mm256_slli_epi32, 8);
    line!(c, a, b, _mm256_srli_epi32, 13);
    line!(a, b, c, _mm256_srli_epi32, 12);
    line!(b, c, a, _mm256_slli_epi32, 16);
    line!(c, a, b, _mm256_srli_epi32, 5);
    line!(a, b, c, _mm256_srli_epi32, 3);
    line!(b, c, a, _mm256_slli_epi32, 10);
    line!(c, a, b, _mm256_srli_epi32, 15);
}

/// Lower bounds of the distances for weight 1: 16 − log2(u + 1) − slack, not below [`LEAST`].
/// `SITE` differs at every call, so that each has its own copy, which then is inlined: a call would
/// spill every vector register.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn distances<const SITE: u8, const N: usize>(
    x: __m256i,
    ids: Words<N>,
    r: __m256i,
    slack: __m256,
) -> [__m256; N] {
    let (mut a, mut b, mut c) = ([x; N], ids, [r; N]);
    let mut px = [_mm256_set1_epi32(PAD_X as i32); N];
    let mut py = [_mm256_set1_epi32(PAD_Y as i32); N];
    let seed = _mm256_xor_si256(_mm256_set1_epi32(SEED as i32), _mm256_xor_si256(x, r));
    let mut h = ids;
    for h in &mut h {
        *h = _mm256_xor_si256(*h, seed);
    }
    mix(&mut a, &mut b, &mut h);
    mix(&mut c, &mut px, &mut h);
    mix(&mut py, &mut a, &mut h);
    mix(&mut b, &mut px, &mut h);
    mix(&mut py, &mut c, &mut h);
    let whole = _mm256_sub_ps(_mm256_set1_ps(16.0), slack);
    let mut low = [whole; N];
    for i in 0..N {
        let u = _mm256_and_si256(h[i], _mm256_set1_epi32(0xffff));
        let v = _mm256_cvtepi32_ps(_mm256_add_epi32(u, _mm256_set1_epi32(1)));
        let bits = _mm256_castps_si256(v);
        let exponent = _mm256_sub_epi32(_mm256_srli_epi32::<23>(bits), _mm256_set1_epi32(127));
        let exponent = _mm256_cvtepi32_ps(exponent);
        let mantissa = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f_ffff));
        let mantissa = _mm256_or_si256(mantissa, _mm256_set1_epi32(0x3f80_0000));
        let mantissa = _mm256_castsi256_ps(mantissa);
        let t = _mm256_sub_ps(mantissa, _mm256_set1_ps(1.0));
        let mut log = _mm256_set1_ps(LOG2[5]);
        for c in LOG2[..5].iter().rev() {
            log = _mm256_fmadd_ps(log, t, _mm256_set1_ps(*c));
        }
        let below = _mm256_sub_ps(whole, _mm256_add_ps(exponent, log));
        low[i] = _mm256_max_ps(below, _mm256_set1_ps(LEAST));
    }
    low
}

impl Nearest {
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn new() -> Self {
        let far = _mm256_set1_ps(f32::INFINITY);
        Self { low: far, inverse: far, position: _mm256_setzero_si256(), next: far }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn offer(&mut self, low: __m256, inverse: __m256, position: __m256i) {
        self.next = _mm256_min_ps(self.next, _mm256_max_ps(self.low, low));
        let nearer = _mm256_cmp_ps::<_CMP_LT_OQ>(low, self.low);
        self.low = _mm256_blendv_ps(self.low, low, nearer);
        self.inverse = _mm256_blendv_ps(self.inverse, inverse, nearer);
        self.position = _mm256_blendv_epi8(self.position, position, _mm256_castps_si256(nearer));
    }

    /// Lanes in which the nearest is certain: its upper bound is below the next, and it has weight
    /// (among items without, the first wins, whatever they drew).
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn certain(&self, next: __m256, slack: __m256) -> __m256 {
        let heavy = _mm256_cmp_ps::<_CMP_LE_OQ>(self.inverse, _mm256_set1_ps(1.0));
        _mm256_and_ps(heavy, _mm256_cmp_ps::<_CMP_GT_OQ>(next, self.high(slack)))
    }

    /// Upper bound of the nearest: its lower bound and twice the slack, with room for rounding.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn high(&self, slack: __m256) -> __m256 {
        let width = _mm256_mul_ps(slack, _mm256_set1_ps(2.1));
        _mm256_fmadd_ps(width, self.inverse, self.low)
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn lanes_f32(vector: __m256) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    // SAFETY: the array is as long as the vector.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), vector) };
    out
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn lanes_i32(vector: __m256i) -> [i32; LANES] {
    let mut out = [0; LANES];
    // SAFETY: the array is as long as the vector.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), vector) };
    out
}

#[target_feature(enable = "avx2,fma")]
fn pick_items(set: &Straw2, x: u32, r: u32) -> Option<usize> {
    let (x, r) = (_mm256_set1_epi32(x as i32), _mm256_set1_epi32(r as i32));
    let slack = _mm256_set1_ps(set.slack);
    let mut nearest = Nearest::new();
    let mut position = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (ids, inverse) in set.ids.chunks_exact(LANES).zip(set.inverse.chunks_exact(LANES)) {
        // SAFETY: chunks of exactly as many entries as are loaded.
        let (id, inverse) =
            unsafe { (_mm256_loadu_si256(ids.as_ptr().cast()), _mm256_loadu_ps(inverse.as_ptr())) };
        let [low] = distances::<0, 1>(x, [id], r, slack);
        nearest.offer(_mm256_mul_ps(low, inverse), inverse, position);
        position = _mm256_add_epi32(position, _mm256_set1_epi32(LANES as i32));
    }
    let low = _mm256_set1_ps(lanes_f32(nearest.low).into_iter().fold(f32::INFINITY, f32::min));
    let lane = _mm256_cmp_ps::<_CMP_EQ_OQ>(nearest.low, low);
    // Everybody but the winner: the others' nearest, and every lane's next.
    let others = _mm256_blendv_ps(nearest.low, nearest.next, lane);
    let next = lanes_f32(_mm256_min_ps(others, nearest.next)).into_iter();
    let next = _mm256_set1_ps(next.fold(f32::INFINITY, f32::min));
    let certain = _mm256_and_ps(nearest.certain(next, slack), lane);
    let (lane, certain) = (_mm256_movemask_ps(lane) as u32, _mm256_movemask_ps(certain) as u32);
    let position = lanes_i32(nearest.position);
    (lane.is_power_of_two() && certain == lane)
        .then(|| position[lane.trailing_zeros() as usize % LANES] as usize)
}

/// Item `i` of each lane's bucket: its number and inverse weight. Lanes past their bucket's end get
/// the table's last cell, which never wins. Single loads are faster here than gathers.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn cells_at(table: &Table, ranges: &[(u32, u32); LANES], i: u32) -> (__m256i, __m256) {
    let last = table.cells.len() as u32 - 1;
    let cells = ranges.map(|(start, size)| {
        let at = if i < size { start + i } else { last };
        table.cells[at as usize]
    });
    // SAFETY: the array is as long as two vectors.
    unsafe {
        let ptr: *const __m256i = cells.as_ptr().cast();
        // Even words are numbers, odd ones inverses; the halves come out crosswise.
        let a = _mm256_loadu_ps(ptr.cast());
        let b = _mm256_loadu_ps(ptr.add(1).cast());
        let order = |v: __m256| _mm256_permute4x64_epi64::<0xd8>(_mm256_castps_si256(v));
        let ids = order(_mm256_shuffle_ps::<0x88>(a, b));
        (ids, _mm256_castsi256_ps(order(_mm256_shuffle_ps::<0xdd>(a, b))))
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load(list: &[u32], from: usize) -> __m256i {
    let part = &list[from..from + LANES];
    // SAFETY: the part is as long as a vector.
    unsafe { _mm256_loadu_si256(part.as_ptr().cast()) }
}

/// Lanes that all draw from one bucket, item after item.
struct Same {
    x: __m256i,
    r: __m256i,
    slack: __m256,
    position: __m256i,
    nearest: Nearest,
}

impl Same {
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn offer<const SITE: u8, const N: usize>(&mut self, cells: &[[u32; 2]; N]) {
        let ids = cells.map(|cell| _mm256_set1_epi32(cell[0] as i32));
        let low = distances::<SITE, N>(self.x, ids, self.r, self.slack);
        for (low, cell) in low.into_iter().zip(cells) {
            let inverse = _mm256_set1_ps(f32::from_bits(cell[1]));
            self.nearest.offer(_mm256_mul_ps(low, inverse), inverse, self.position);
            self.position = _mm256_add_epi32(self.position, _mm256_set1_epi32(1));
        }
    }
}

/// One vector of lanes that all draw from `bucket`.
#[target_feature(enable = "avx2,fma")]
fn pick_same(table: &Table, lanes: &Lanes, from: usize, bucket: usize, chosen: &mut [i32]) {
    let (x, r) = (load(&lanes.x, from), load(&lanes.r, from));
    let slack = _mm256_set1_ps(table.slack[bucket]);
    let start = table.start[bucket];
    let cells = &table.cells[start as usize..][..table.size[bucket] as usize];
    let mut draw =
        Same { x, r, slack, position: _mm256_set1_epi32(start as i32), nearest: Nearest::new() };
    let (groups, rest) = cells.as_chunks::<ABREAST>();
    for group in groups {
        draw.offer::<1, ABREAST>(group);
    }
    let (pairs, rest) = rest.as_chunks::<2>();
    for pair in pairs {
        draw.offer::<4, 2>(pair);
    }
    for single in rest {
        draw.offer::<2, 1>(std::array::from_ref(single));
    }
    finish(table, &draw.nearest, slack, &mut chosen[from..from + LANES]);
}

/// One vector of lanes that draw from different buckets.
#[target_feature(enable = "avx2,fma")]
fn pick_mixed(table: &Table, lanes: &Lanes, from: usize, chosen: &mut [i32]) {
    let (x, r) = (load(&lanes.x, from), load(&lanes.r, from));
    let mut ranges = [(0, 0); LANES];
    let mut slack = [0.0f32; LANES];
    let buckets = &lanes.bucket[from..from + LANES];
    for (lane, bucket) in buckets.iter().map(|b| *b as usize).enumerate() {
        ranges[lane] = (table.start[bucket], table.size[bucket]);
        slack[lane] = table.slack[bucket];
    }
    let longest = ranges.iter().map(|r| r.1).max().unwrap_or(0);
    // SAFETY: both arrays are as long as a vector.
    let (mut position, slack) = unsafe {
        let start = ranges.map(|r| r.0);
        (_mm256_loadu_si256(start.as_ptr().cast()), _mm256_loadu_ps(slack.as_ptr()))
    };
    let mut nearest = Nearest::new();
    let one = _mm256_set1_epi32(1);
    for i in (0..longest).step_by(2) {
        let (id0, inverse0) = cells_at(table, &ranges, i);
        let (id1, inverse1) = cells_at(table, &ranges, i + 1);
        let [low0, low1] = distances::<3, 2>(x, [id0, id1], r, slack);
        nearest.offer(_mm256_mul_ps(low0, inverse0), inverse0, position);
        position = _mm256_add_epi32(position, one);
        nearest.offer(_mm256_mul_ps(low1, inverse1), inverse1, position);
        position = _mm256_add_epi32(position, one);
    }
    finish(table, &nearest, slack, &mut chosen[from..from + LANES]);
}

/// Writes the items that won, their positions being those in the whole table.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn finish(table: &Table, nearest: &Nearest, slack: __m256, chosen: &mut [i32]) {
    let decided = _mm256_castps_si256(nearest.certain(nearest.next, slack));
    let undecided = _mm256_set1_epi32(UNDECIDED);
    let items = table.items.as_ptr();
    assert!(chosen.len() == LANES);
    // SAFETY: a decided lane's position is that of a cell with weight, and so of an item.
    unsafe {
        let cell = nearest.position;
        let item = _mm256_mask_i32gather_epi32::<4>(undecided, items.cast(), cell, decided);
        _mm256_storeu_si256(chosen.as_mut_ptr().cast(), item);
    }
}
