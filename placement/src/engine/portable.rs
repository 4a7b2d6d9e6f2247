//! The engine without instructions chosen by hand. Written so that the compiler's vectoriser has
//! an easy time on any CPU: whole arrays, no branches that depend on data.

use super::{Engine, Mode};
use crate::checksum;
use crate::coding::Product;

/// Bytes worked on at once: eight 64-bit words, one cache line.
const WORDS: usize = 8;
const LINE: usize = WORDS * 8;
/// Outputs computed in one pass over the inputs.
const ROWS_MAX: usize = 4;

#[derive(Debug)]
pub(super) struct Portable;

impl Engine for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn combine(
        &self,
        product: Product<'_>,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mode: Mode,
    ) {
        let len = product.check(inputs, outputs);
        for at in (0..len).step_by(LINE) {
            let to = len.min(at + LINE);
            for first in (0..outputs.len()).step_by(ROWS_MAX) {
                let group = &mut outputs[first..];
                match group.len() {
                    1 => line::<1>(product, first, inputs, group, at, to, mode),
                    2 => line::<2>(product, first, inputs, group, at, to, mode),
                    3 => line::<3>(product, first, inputs, group, at, to, mode),
                    _ => line::<ROWS_MAX>(product, first, inputs, group, at, to, mode),
                }
            }
        }
    }

    fn crc32c(&self, seed: u32, bytes: &[u8]) -> u32 {
        checksum::portable(seed, bytes)
    }
}

/// Bytes `at .. to` (one line or less) of the first R outputs of a group.
fn line<const R: usize>(
    product: Product<'_>,
    first: usize,
    inputs: &[&[u8]],
    outputs: &mut [&mut [u8]],
    at: usize,
    to: usize,
    mode: Mode,
) {
    let mut sums = [[0u64; WORDS]; R];
    for (c, input) in inputs.iter().enumerate() {
        let by = std::array::from_fn(|r| product.coefficient(first + r, c));
        add_products(&mut sums, by, load(&input[at..to]));
    }
    for (sum, out) in sums.iter().zip(outputs) {
        store(sum, &mut out[at..to], mode);
    }
}

/// sums[r] += by[r] * x: x times 1, 2, 4 .. 128 in turn, each taken where the coefficient has the bit.
fn add_products<const R: usize>(sums: &mut [[u64; WORDS]; R], by: [u8; R], mut x: [u64; WORDS]) {
    for bit in 0..8 {
        for (sum, by) in sums.iter_mut().zip(by) {
            let mask = u64::from((by >> bit) & 1).wrapping_neg();
            sum.iter_mut().zip(&x).for_each(|(s, x)| *s ^= x & mask);
        }
        for x in &mut x {
            // Eight bytes doubled: shift, and fold the byte's top bit back as 0x1d.
            let top = (*x >> 7) & 0x0101_0101_0101_0101;
            *x = ((*x << 1) & 0xfefe_fefe_fefe_fefe) ^ (top | top << 2 | top << 3 | top << 4);
        }
    }
}

fn load(bytes: &[u8]) -> [u64; WORDS] {
    let mut line = [0u8; LINE];
    line[..bytes.len()].copy_from_slice(bytes);
    let mut words = [0u64; WORDS];
    for (word, bytes) in words.iter_mut().zip(line.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

fn store(sum: &[u64; WORDS], out: &mut [u8], mode: Mode) {
    let mut line = [0u8; LINE];
    for (bytes, word) in line.as_chunks_mut::<8>().0.iter_mut().zip(sum) {
        *bytes = word.to_le_bytes();
    }
    match mode {
        Mode::Set => out.copy_from_slice(&line[..out.len()]),
        Mode::Add => out.iter_mut().zip(&line).for_each(|(o, s)| *o ^= s),
    }
}
