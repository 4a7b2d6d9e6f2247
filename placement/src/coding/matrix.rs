//! Generator matrices: k identity rows (the data) above m parity rows.
//!
//! Which are safe (every choice of k surviving rows is invertible) is said by [`Kind::is_safe`];
//! `docs/coding.md` has the table and how it was found.

use super::field::{inv, mul};

/// Chunks per stripe, data and parity together, at most. 256 field elements name at most 256
/// rows; 255 keeps the count itself in a byte.
pub const CHUNKS_MAX: usize = 255;

/// How the parity rows are made. The names in brackets are those of Ceph profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// ISA-L's `gf_gen_rs_matrix` (isa `reed_sol_van`): row i is the powers of 2^i. **Not** safe for
    /// every k and m.
    IsalVandermonde,
    /// ISA-L's `gf_gen_cauchy1_matrix` (isa `cauchy`): row i, column j is 1 / (i xor j), i from k.
    Cauchy,
    /// Jerasure's `reed_sol_vandermonde_coding_matrix` for w = 8 (jerasure `reed_sol_van`): an
    /// extended Vandermonde matrix brought to systematic form.
    JerasureVandermonde,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 3] = [Kind::IsalVandermonde, Kind::Cauchy, Kind::JerasureVandermonde];

    /// Whether any m losses of k + m chunks can be decoded with this matrix.
    ///
    /// True by construction for the Cauchy and the Jerasure form. For ISA-L's Vandermonde form the
    /// bounds were found by trying every square submatrix (`isal_vandermonde_bounds` in the tests).
    pub const fn is_safe(self, k: usize, m: usize) -> bool {
        if k == 0 || k + m > CHUNKS_MAX {
            return false;
        }
        match self {
            Kind::Cauchy | Kind::JerasureVandermonde => true,
            Kind::IsalVandermonde => match m {
                0..=3 => true,
                4 => k <= 21,
                5 => k <= 5,
                6..=21 => k <= 4,
                _ => k <= 3,
            },
        }
    }

    /// The m x k parity rows, row by row.
    ///
    /// The caller has checked 1 <= k and k + m <= [`CHUNKS_MAX`].
    pub(super) fn parity_rows(self, k: usize, m: usize) -> Vec<u8> {
        assert!(k >= 1);
        assert!(k + m <= CHUNKS_MAX);
        match self {
            Kind::IsalVandermonde => isal_vandermonde(k, m),
            Kind::Cauchy => {
                (k..k + m).flat_map(|i| (0..k).map(move |j| inv((i ^ j) as u8))).collect()
            }
            Kind::JerasureVandermonde => jerasure_vandermonde(k, m),
        }
    }
}

fn isal_vandermonde(k: usize, m: usize) -> Vec<u8> {
    let mut rows = Vec::with_capacity(k * m);
    let mut generator = 1u8;
    for _ in 0..m {
        let mut power = 1u8;
        for _ in 0..k {
            rows.push(power);
            power = mul(power, generator);
        }
        generator = mul(generator, 2);
    }
    rows
}

/// Jerasure's construction, step by step, since the result depends on the order of its column
/// operations: an extended Vandermonde matrix of k + m rows (first row 1 0 0 .., last row 0 0 .. 1,
/// row i the powers of i); columns are combined until the top is the identity; then columns and
/// rows of the parity part are scaled so that its first row and first column are all ones.
fn jerasure_vandermonde(k: usize, m: usize) -> Vec<u8> {
    let rows = k + m;
    if m == 0 {
        return Vec::new();
    }
    let mut a = extended_vandermonde(rows, k);
    for i in 1..k {
        // Column operations never clear a whole row of a Vandermonde matrix, so a pivot is found.
        let pivot = (i..rows).find(|&r| a[r * k + i] != 0).expect("full column rank");
        for c in 0..k {
            a.swap(i * k + c, pivot * k + c);
        }
        let scale = inv(a[i * k + i]);
        for r in 0..rows {
            a[r * k + i] = mul(scale, a[r * k + i]);
        }
        for c in (0..k).filter(|&c| c != i) {
            let e = a[i * k + c];
            for r in 0..rows {
                a[r * k + c] ^= mul(e, a[r * k + i]);
            }
        }
    }
    let mut parity = a.split_off(k * k);
    for c in 0..k {
        let scale = inv(parity[c]);
        for r in 0..m {
            parity[r * k + c] = mul(scale, parity[r * k + c]);
        }
    }
    for row in parity.chunks_mut(k).skip(1) {
        let scale = inv(row[0]);
        row.iter_mut().for_each(|e| *e = mul(*e, scale));
    }
    parity
}

fn extended_vandermonde(rows: usize, k: usize) -> Vec<u8> {
    let mut a = vec![0u8; rows * k];
    a[0] = 1;
    for i in 1..rows - 1 {
        let mut power = 1u8;
        for c in 0..k {
            a[i * k + c] = power;
            power = mul(power, i as u8);
        }
    }
    a[rows * k - 1] = 1;
    a
}

/// Picks `columns` independent rows of a `rows` x `columns` matrix and inverts the square matrix of
/// the rows picked. Returns the rows in order and the inverse, or how many independent rows there
/// are when they are too few.
pub(super) fn invert_some_rows(
    matrix: &[u8],
    rows: usize,
    columns: usize,
) -> Result<(Vec<usize>, Vec<u8>), usize> {
    assert!(matrix.len() == rows * columns);
    let mut work = matrix.to_vec();
    let mut picked = Vec::with_capacity(columns);
    // Gaussian elimination by rows, in order: each row is reduced by those picked before it, so the
    // first rows that will do are taken.
    let mut pivots: Vec<usize> = Vec::with_capacity(columns);
    for r in 0..rows {
        if picked.len() == columns {
            break;
        }
        let (done, rest) = work.split_at_mut(r * columns);
        let row = &mut rest[..columns];
        for (&p, &c) in picked.iter().zip(&pivots) {
            let e = row[c];
            xor_scaled(row, &done[p * columns..][..columns], e);
        }
        let Some(c) = row.iter().position(|&e| e != 0) else { continue };
        let scale = inv(row[c]);
        row.iter_mut().for_each(|e| *e = mul(*e, scale));
        picked.push(r);
        pivots.push(c);
    }
    if picked.len() < columns {
        return Err(picked.len());
    }
    let square: Vec<u8> =
        picked.iter().flat_map(|&r| matrix[r * columns..][..columns].iter().copied()).collect();
    Ok((picked, invert(square, columns).expect("rows picked are independent")))
}

/// Inverse of an n x n matrix, or none.
pub(super) fn invert(mut a: Vec<u8>, n: usize) -> Option<Vec<u8>> {
    assert!(a.len() == n * n);
    let mut out = vec![0u8; n * n];
    for i in 0..n {
        out[i * n + i] = 1;
    }
    for i in 0..n {
        let pivot = (i..n).find(|&r| a[r * n + i] != 0)?;
        if pivot != i {
            for c in 0..n {
                a.swap(i * n + c, pivot * n + c);
                out.swap(i * n + c, pivot * n + c);
            }
        }
        let scale = inv(a[i * n + i]);
        for c in 0..n {
            a[i * n + c] = mul(a[i * n + c], scale);
            out[i * n + c] = mul(out[i * n + c], scale);
        }
        for r in (0..n).filter(|&r| r != i) {
            let e = a[r * n + i];
            if e != 0 {
                for c in 0..n {
                    a[r * n + c] ^= mul(e, a[i * n + c]);
                    out[r * n + c] ^= mul(e, out[i * n + c]);
                }
            }
        }
    }
    Some(out)
}

fn xor_scaled(row: &mut [u8], other: &[u8], by: u8) {
    if by != 0 {
        for (e, &o) in row.iter_mut().zip(other) {
            *e ^= mul(by, o);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `f` with every choice of `count` numbers below `limit`, until it says false.
    fn choices(limit: usize, count: usize, f: &mut impl FnMut(&[usize]) -> bool) -> bool {
        let mut at: Vec<usize> = (0..count).collect();
        loop {
            if count > limit || !f(&at) {
                return count > limit;
            }
            let Some(i) = (0..count).rev().find(|&i| at[i] < limit - count + i) else {
                return true;
            };
            at[i] += 1;
            (i + 1..count).for_each(|j| at[j] = at[j - 1] + 1);
        }
    }

    /// Whether every square submatrix of the m x k parity that uses the last column is invertible.
    fn last_column_is_safe(matrix: &[u8], m: usize, k: usize) -> bool {
        (1..=m.min(k)).all(|size| {
            choices(m, size, &mut |rows| {
                choices(k - 1, size - 1, &mut |columns| {
                    let columns = || columns.iter().copied().chain([k - 1]);
                    let square =
                        rows.iter().flat_map(|r| columns().map(move |c| matrix[r * k + c]));
                    invert(square.collect(), size).is_some()
                })
            })
        })
    }

    /// The largest k up to `limit` for which every pattern of m losses can be decoded.
    fn largest_safe(kind: Kind, m: usize, limit: usize) -> usize {
        (1..=limit)
            .take_while(|&k| last_column_is_safe(&kind.parity_rows(k, m), m, k))
            .last()
            .unwrap_or(0)
    }

    #[test]
    fn isal_vandermonde_bounds() {
        for m in (4..=30).chain([100]) {
            let found = largest_safe(Kind::IsalVandermonde, m, 24);
            assert!(Kind::IsalVandermonde.is_safe(found, m), "k {found} m {m}");
            assert!(!Kind::IsalVandermonde.is_safe(found + 1, m), "k {} m {m}", found + 1);
        }
        // With three rows 1, x, x^2 (x = 2^j, all different) every minor is a product of
        // differences, so up to m = 3, and by symmetry up to k = 3, no search is needed.
        for m in 1..=3 {
            assert_eq!(largest_safe(Kind::IsalVandermonde, m, 60), 60);
            assert!(Kind::IsalVandermonde.is_safe(CHUNKS_MAX - m, m));
        }
    }

    #[test]
    fn the_other_forms_are_safe() {
        for kind in [Kind::Cauchy, Kind::JerasureVandermonde] {
            for m in 1..=5 {
                // Jerasure's matrix depends on k in every entry, so each k is searched whole.
                for k in 1..=10 {
                    let matrix = kind.parity_rows(k, m);
                    for columns in 1..=k {
                        let part: Vec<u8> =
                            matrix.chunks(k).flat_map(|row| row[..columns].to_vec()).collect();
                        assert!(last_column_is_safe(&part, m, columns), "{kind:?} {k} {m}");
                    }
                }
            }
        }
    }
}
