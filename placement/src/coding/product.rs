//! A coefficient matrix prepared for every engine: outputs = matrix x inputs, byte by byte.

use super::field::{AFFINE, NIBBLES};

/// An owned matrix with its per-coefficient tables, 41 bytes a coefficient, laid out by columns so
/// that one column (a partial update) is a view like any other.
#[derive(Clone, Debug)]
pub struct Coefficients {
    rows: usize,
    columns: usize,
    bytes: Vec<u8>,
    affine: Vec<u64>,
    nibbles: Vec<[u8; 32]>,
}

impl Coefficients {
    /// Prepares `matrix` (row by row; its length is `rows * columns`).
    pub fn new(rows: usize, columns: usize, matrix: &[u8]) -> Self {
        assert_eq!(matrix.len(), rows * columns);
        let mut bytes = Vec::with_capacity(matrix.len());
        for c in 0..columns {
            bytes.extend((0..rows).map(|r| matrix[r * columns + c]));
        }
        let affine = bytes.iter().map(|&b| AFFINE[usize::from(b)]).collect();
        let nibbles = bytes.iter().map(|&b| NIBBLES[usize::from(b)]).collect();
        Self { rows, columns, bytes, affine, nibbles }
    }

    /// The whole matrix.
    pub fn view(&self) -> Product<'_> {
        self.part(0, self.rows, 0, self.columns)
    }

    /// What a change of one input does to every output: its column twice, for the input as it was
    /// and as it is.
    pub fn change(&self, column: usize) -> Product<'_> {
        Product { columns: 2, stride: 0, ..self.part(0, self.rows, column, 1) }
    }

    /// `count` rows from `first`.
    pub fn row_range(&self, first: usize, count: usize) -> Product<'_> {
        self.part(first, count, 0, self.columns)
    }

    fn part(&self, row: usize, rows: usize, column: usize, columns: usize) -> Product<'_> {
        assert!(row + rows <= self.rows);
        assert!(column + columns <= self.columns);
        let from = (column * self.rows + row).min(self.bytes.len());
        Product {
            rows,
            columns,
            stride: self.rows,
            bytes: &self.bytes[from..],
            affine: &self.affine[from..],
            nibbles: &self.nibbles[from..],
        }
    }
}

/// A rectangle of a [`Coefficients`] matrix, as the engines take it.
///
/// Coefficient (row, column) is at `column * stride + row` of each table; every such index with
/// `row < rows` and `column < columns` is inside. Stride 0 repeats one column.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    rows: usize,
    columns: usize,
    stride: usize,
    bytes: &'a [u8],
    affine: &'a [u64],
    nibbles: &'a [[u8; 32]],
}

impl<'a> Product<'a> {
    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Distance between columns in the tables.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The coefficient itself.
    pub fn coefficient(&self, row: usize, column: usize) -> u8 {
        assert!(row < self.rows && column < self.columns);
        self.bytes[column * self.stride + row]
    }

    /// Bit matrices for `vgf2p8affineqb`.
    pub fn affine(&self) -> &'a [u64] {
        self.affine
    }

    /// Nibble tables for byte shuffles.
    pub fn nibbles(&self) -> &'a [[u8; 32]] {
        self.nibbles
    }

    /// Panics unless the buffers fit: one per column and row, all of one length, which is returned.
    pub fn check(&self, inputs: &[&[u8]], outputs: &[&mut [u8]]) -> usize {
        assert_eq!(inputs.len(), self.columns, "one input per column");
        assert_eq!(outputs.len(), self.rows, "one output per row");
        let Some(len) = inputs.first().map(|i| i.len()).or(outputs.first().map(|o| o.len())) else {
            return 0;
        };
        assert!(inputs.iter().all(|i| i.len() == len), "inputs of one length");
        assert!(outputs.iter().all(|o| o.len() == len), "outputs of one length");
        if self.rows > 0 && self.columns > 0 {
            // What the vector engines rely on when they index the tables without bounds checks.
            assert!((self.columns - 1) * self.stride + self.rows <= self.affine.len());
            assert!(self.affine.len() == self.nibbles.len());
        }
        len
    }
}
