//! The sixteen-lane engine. See `engine` for why its answers are exact.
#![allow(unsafe_code)]

use super::{LEAST, LOG2, Lanes, UNDECIDED};
use crate::crush::flat::{Straw2, Table};
use crate::crush::hash::{PAD_X, PAD_Y, SEED};
use std::arch::x86_64::*;

const LANES: usize = 16;
/// Lanes with one bucket that are worth a vector of their own.
const RUN_LEAST: usize = 5;
/// Items of one bucket that are drawn side by side.
const ABREAST: usize = 4;

/// Nearest item so far in each lane, and the next nearest's lower bound.
struct Nearest {
    low: __m512,
    inverse: __m512,
    position: __m512i,
    next: __m512,
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
type Words<const N: usize> = [__m512i; N];

/// One line of the mixing: a − b − c, then exclusive or with c shifted.
macro_rules! line {
    ($a:ident, $b:ident, $c:ident, $shift:ident, $by:literal) => {
        for i in 0..N {
            let rest = _mm512_sub_epi32(_mm512_sub_epi32($a[i], $b[i]), $c[i]);
            $a[i] = _mm512_xor_si512(rest, $shift::<$by>($c[i]));
        }
    };
}

#[inline]
#[target_feature(enable = "avx512f")]
fn mix<const N: usize>(a: &mut Words<N>, b: &mut Words<N>, c: &mut Words<N>) {
    line!(a, b, c, _mm512_srli_epi32, 13);
    line!(b, c, a, _mm512_slli_epi32, 8);
    line!(c, a, b, _mm512_srli_epi32, 13);
    line!(a, b, c, _mm512_srli_epi32, 12);
    line!(b, c, a, _mm512_slli_epi32, 16);
    line!(c, a, b, _mm512_srli_epi32, 5);
    line!(a, b, c, _mm512_srli_epi32, 3);
    line!(b, c, a, _mm512_slli_epi32, 10);
    line!(c, a, b, _mm512_srli_epi32, 15);
}

/// Lower bounds of the distances for weight 1: 16 − log2(u + 1) − slack, not below [`LEAST`].
/// `SITE` differs at every call, so that each has its own copy, which then is inlined: a call would
/// spill every vector register.
#[inline]
#[target_feature(enable = "avx512f")]
fn distances<const SITE: u8, const N: usize>(
    x: __m512i,
    ids: Words<N>,
    r: __m512i,
    slack: __m512,
) -> [__m512; N] {
    let (mut a, mut b, mut c) = ([x; N], ids, [r; N]);
    let mut px = [_mm512_set1_epi32(PAD_X as i32); N];
    let mut py = [_mm512_set1_epi32(PAD_Y as i32); N];
    let seed = _mm512_xor_si512(_mm512_set1_epi32(SEED as i32), _mm512_xor_si512(x, r));
    let mut h = ids;
    for h in &mut h {
        *h = _mm512_xor_si512(*h, seed);
    }
    mix(&mut a, &mut b, &mut h);
    mix(&mut c, &mut px, &mut h);
    mix(&mut py, &mut a, &mut h);
    mix(&mut b, &mut px, &mut h);
    mix(&mut py, &mut c, &mut h);
    let whole = _mm512_sub_ps(_mm512_set1_ps(16.0), slack);
    let mut low = [whole; N];
    for i in 0..N {
        let u = _mm512_and_si512(h[i], _mm512_set1_epi32(0xffff));
        let v = _mm512_cvtepi32_ps(_mm512_add_epi32(u, _mm512_set1_epi32(1)));
        let exponent = _mm512_getexp_ps(v);
        let mantissa = _mm512_getmant_ps::<_MM_MANT_NORM_1_2, _MM_MANT_SIGN_SRC>(v);
        let t = _mm512_sub_ps(mantissa, _mm512_set1_ps(1.0));
        let mut log = _mm512_set1_ps(LOG2[5]);
        for c in LOG2[..5].iter().rev() {
            log = _mm512_fmadd_ps(log, t, _mm512_set1_ps(*c));
        }
        let below = _mm512_sub_ps(whole, _mm512_add_ps(exponent, log));
        low[i] = _mm512_max_ps(below, _mm512_set1_ps(LEAST));
    }
    low
}

impl Nearest {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        let far = _mm512_set1_ps(f32::INFINITY);
        Self { low: far, inverse: far, position: _mm512_setzero_si512(), next: far }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn offer(&mut self, low: __m512, inverse: __m512, position: __m512i) {
        self.next = _mm512_min_ps(self.next, _mm512_max_ps(self.low, low));
        let nearer = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(low, self.low);
        self.low = _mm512_mask_mov_ps(self.low, nearer, low);
        self.inverse = _mm512_mask_mov_ps(self.inverse, nearer, inverse);
        self.position = _mm512_mask_mov_epi32(self.position, nearer, position);
    }

    /// Lanes in which the nearest is certain: its upper bound is below the next, and it has weight
    /// (among items without, the first wins, whatever they drew).
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn certain(&self, next: __m512, slack: __m512) -> __mmask16 {
        let heavy = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.inverse, _mm512_set1_ps(1.0));
        heavy & _mm512_cmp_ps_mask::<_CMP_GT_OQ>(next, self.high(slack))
    }

    /// Upper bound of the nearest: its lower bound and twice the slack, with room for rounding.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn high(&self, slack: __m512) -> __m512 {
        let width = _mm512_mul_ps(slack, _mm512_set1_ps(2.1));
        _mm512_fmadd_ps(width, self.inverse, self.low)
    }
}

#[target_feature(enable = "avx512f")]
fn pick_items(set: &Straw2, x: u32, r: u32) -> Option<usize> {
    let (x, r) = (_mm512_set1_epi32(x as i32), _mm512_set1_epi32(r as i32));
    let slack = _mm512_set1_ps(set.slack);
    let mut nearest = Nearest::new();
    let mut position = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (ids, inverse) in set.ids.chunks_exact(LANES).zip(set.inverse.chunks_exact(LANES)) {
        // SAFETY: chunks of exactly as many entries as are loaded.
        let (id, inverse) =
            unsafe { (_mm512_loadu_si512(ids.as_ptr().cast()), _mm512_loadu_ps(inverse.as_ptr())) };
        let [low] = distances::<0, 1>(x, [id], r, slack);
        nearest.offer(_mm512_mul_ps(low, inverse), inverse, position);
        position = _mm512_add_epi32(position, _mm512_set1_epi32(LANES as i32));
    }
    let low = _mm512_reduce_min_ps(nearest.low);
    let lane = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(nearest.low, _mm512_set1_ps(low));
    // Everybody but the winner: the others' nearest, and every lane's next.
    let others = _mm512_mask_mov_ps(nearest.low, lane, nearest.next);
    let next = _mm512_reduce_min_ps(_mm512_min_ps(others, nearest.next));
    let certain = nearest.certain(_mm512_set1_ps(next), slack) & lane;
    (lane.is_power_of_two() && certain == lane)
        .then(|| _mm512_mask_reduce_add_epi32(lane, nearest.position) as usize)
}

/// Item `i` of each lane's bucket: its number and inverse weight. Lanes past their bucket's end get
/// the table's last cell, which never wins. Single loads are faster here than gathers.
#[inline]
#[target_feature(enable = "avx512f")]
fn cells_at(table: &Table, ranges: &[(u32, u32); LANES], i: u32) -> (__m512i, __m512) {
    let last = table.cells.len() as u32 - 1;
    let cells = ranges.map(|(start, size)| {
        let at = if i < size { start + i } else { last };
        table.cells[at as usize]
    });
    // SAFETY: the array is as long as two vectors.
    unsafe {
        let ptr: *const __m512i = cells.as_ptr().cast();
        // Even words are numbers, odd ones inverses.
        let (a, b) = (_mm512_loadu_si512(ptr), _mm512_loadu_si512(ptr.add(1)));
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        let inverses = _mm512_permutex2var_epi32(a, odd, b);
        (_mm512_permutex2var_epi32(a, even, b), _mm512_castsi512_ps(inverses))
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(list: &[u32], from: usize) -> __m512i {
    let part = &list[from..from + LANES];
    // SAFETY: the part is as long as a vector.
    unsafe { _mm512_loadu_si512(part.as_ptr().cast()) }
}

/// Lanes that all draw from one bucket, item after item.
struct Same {
    x: __m512i,
    r: __m512i,
    slack: __m512,
    position: __m512i,
    nearest: Nearest,
}

impl Same {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn offer<const SITE: u8, const N: usize>(&mut self, cells: &[[u32; 2]; N]) {
        let ids = cells.map(|cell| _mm512_set1_epi32(cell[0] as i32));
        let low = distances::<SITE, N>(self.x, ids, self.r, self.slack);
        for (low, cell) in low.into_iter().zip(cells) {
            let inverse = _mm512_set1_ps(f32::from_bits(cell[1]));
            self.nearest.offer(_mm512_mul_ps(low, inverse), inverse, self.position);
            self.position = _mm512_add_epi32(self.position, _mm512_set1_epi32(1));
        }
    }
}

/// One vector of lanes that all draw from `bucket`.
#[target_feature(enable = "avx512f")]
fn pick_same(table: &Table, lanes: &Lanes, from: usize, bucket: usize, chosen: &mut [i32]) {
    let (x, r) = (load(&lanes.x, from), load(&lanes.r, from));
    let slack = _mm512_set1_ps(table.slack[bucket]);
    let start = table.start[bucket];
    let cells = &table.cells[start as usize..][..table.size[bucket] as usize];
    let mut draw =
        Same { x, r, slack, position: _mm512_set1_epi32(start as i32), nearest: Nearest::new() };
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
#[target_feature(enable = "avx512f")]
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
        (_mm512_loadu_si512(start.as_ptr().cast()), _mm512_loadu_ps(slack.as_ptr()))
    };
    let mut nearest = Nearest::new();
    let one = _mm512_set1_epi32(1);
    for i in (0..longest).step_by(2) {
        let (id0, inverse0) = cells_at(table, &ranges, i);
        let (id1, inverse1) = cells_at(table, &ranges, i + 1);
        let [low0, low1] = distances::<3, 2>(x, [id0, id1], r, slack);
        nearest.offer(_mm512_mul_ps(low0, inverse0), inverse0, position);
        position = _mm512_add_epi32(position, one);
        nearest.offer(_mm512_mul_ps(low1, inverse1), inverse1, position);
        position = _mm512_add_epi32(position, one);
    }
    finish(table, &nearest, slack, &mut chosen[from..from + LANES]);
}

/// Writes the items that won, their positions being those in the whole table.
#[inline]
#[target_feature(enable = "avx512f")]
fn finish(table: &Table, nearest: &Nearest, slack: __m512, chosen: &mut [i32]) {
    let decided = nearest.certain(nearest.next, slack);
    let undecided = _mm512_set1_epi32(UNDECIDED);
    let items = table.items.as_ptr();
    assert!(chosen.len() == LANES);
    // SAFETY: a decided lane's position is that of a cell with weight, and so of an item.
    unsafe {
        let cell = nearest.position;
        let item = _mm512_mask_i32gather_epi32::<4>(undecided, decided, cell, items.cast());
        _mm512_storeu_si512(chosen.as_mut_ptr().cast(), item);
    }
}
