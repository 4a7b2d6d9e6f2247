//! Reed-Solomon over GF(2^8): k data chunks, m parity chunks, any m of them may be lost.
//!
//! A [`Code`] holds the matrix and an engine; [`Code::encode`] fills parity, [`Code::plan`] says
//! which chunks to read after a loss and [`Plan::rebuild`] computes the lost ones, [`Code::update`]
//! carries a partial write into the parity, [`Code::verify`] finds parity that does not fit. Bytes
//! at the same offset of the chunks form one code word, so any range of a stripe can be worked on
//! alone. The arithmetic is in [`crate::engine`], the matrices in [`matrix`].
//!
//! ```
//! use placement::coding::{Code, Kind};
//!
//! let code = Code::new(Kind::Cauchy, 3, 2)?;
//! let data: [&[u8]; 3] = [b"one.", b"two.", b"six."];
//! let (mut p, mut q) = ([0; 4], [0; 4]);
//! code.encode(&data, &mut [&mut p, &mut q])?;
//!
//! // Chunks 0 and 2 are lost: read what the plan names, rebuild both.
//! let plan = code.plan(&[0, 2])?;
//! assert_eq!(plan.sources(), [1, 3, 4]);
//! let (mut one, mut six) = ([0; 4], [0; 4]);
//! plan.rebuild(&[data[1], &p, &q], &mut [&mut one, &mut six])?;
//! assert_eq!((&one, &six), (b"one.", b"six."));
//! # Ok::<(), placement::coding::CodingError>(())
//! ```

pub mod field;
pub mod matrix;
mod product;
#[cfg(test)]
mod tests;

use std::fmt;

use crate::engine::{Engine, Mode};
pub use matrix::{CHUNKS_MAX, Kind};
pub use product::{Coefficients, Product};

/// Bytes worked on at a time where a scratch copy is needed; rows x this stays in the L1 cache.
const SCRATCH_BYTES: usize = 2048;
/// Parity rows verified together.
const VERIFY_ROWS: usize = 4;

/// What is wrong with a request to the coder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodingError {
    /// k is 0, or k + m is above [`CHUNKS_MAX`].
    Shape {
        /// Data chunks asked for.
        data: usize,
        /// Parity chunks asked for.
        parity: usize,
    },
    /// A list of chunks has the wrong number of entries.
    Count {
        /// What the list is.
        what: &'static str,
        /// Entries needed.
        expected: usize,
        /// Entries given.
        found: usize,
    },
    /// A chunk is longer or shorter than the first one.
    Length {
        /// What list the chunk is in.
        what: &'static str,
        /// Its place in that list.
        index: usize,
        /// Length of the others.
        expected: usize,
        /// Its length.
        found: usize,
    },
    /// A chunk number is not below k + m (or k, where data is meant).
    Index {
        /// The number given.
        index: usize,
        /// The numbers must be below this.
        limit: usize,
    },
    /// A chunk is named twice, or asked for though it is not lost.
    Listed {
        /// The chunk.
        index: usize,
    },
    /// More chunks are lost than there are parity chunks.
    TooManyLost {
        /// Chunks lost.
        lost: usize,
        /// Parity chunks of the code.
        parity: usize,
    },
    /// The surviving rows of this matrix do not determine the data; see [`Kind::is_safe`].
    Singular {
        /// Data chunks lost.
        lost: usize,
        /// Independent equations that the surviving parity gives for them.
        rank: usize,
    },
}

impl fmt::Display for CodingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Shape { data, parity } => write!(
                f,
                "no code with k = {data}, m = {parity}: k must be at least 1 and k + m at most \
                 {CHUNKS_MAX}"
            ),
            Self::Count { what, expected, found } => {
                write!(f, "{found} {what} given, {expected} needed")
            }
            Self::Length { what, index, expected, found } => {
                write!(f, "{what} {index} has {found} bytes, the stripe has {expected}")
            }
            Self::Index { index, limit } => write!(f, "chunk {index} is not below {limit}"),
            Self::Listed { index } => {
                write!(f, "chunk {index} is named twice, or wanted but not lost")
            }
            Self::TooManyLost { lost, parity } => {
                write!(f, "{lost} chunks lost, parity covers {parity}: restore from a copy")
            }
            Self::Singular { lost, rank } => write!(
                f,
                "the surviving parity determines {rank} of {lost} lost data chunks: this matrix \
                 is not safe for this k and m, use Cauchy"
            ),
        }
    }
}

impl std::error::Error for CodingError {}

/// The first byte at which stored parity differs from what the data gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Parity row, from 0.
    pub row: usize,
    /// Offset in the chunk.
    pub offset: usize,
}

/// One stripe of a batch: inputs and outputs of the same length.
#[derive(Debug)]
pub struct Stripe<'a, 'i, 'o> {
    /// Chunks read, in the order of the code (or of [`Plan::sources`]).
    pub inputs: &'a [&'i [u8]],
    /// Chunks written, in the order of the code (or of [`Plan::targets`]).
    pub outputs: &'a mut [&'o mut [u8]],
}

/// A systematic code of k data and m parity chunks, numbered 0 .. k and k .. k + m.
#[derive(Clone, Debug)]
pub struct Code {
    kind: Kind,
    data: usize,
    parity: usize,
    /// Parity rows, row by row.
    matrix: Vec<u8>,
    coefficients: Coefficients,
    engine: &'static dyn Engine,
}

impl Code {
    /// A code of `data` and `parity` chunks on the fastest engine of this CPU.
    pub fn new(kind: Kind, data: usize, parity: usize) -> Result<Self, CodingError> {
        Self::with_engine(kind, data, parity, crate::engine::best())
    }

    /// A code on an engine chosen by the caller.
    pub fn with_engine(
        kind: Kind,
        data: usize,
        parity: usize,
        engine: &'static dyn Engine,
    ) -> Result<Self, CodingError> {
        if data == 0 || data > CHUNKS_MAX || parity > CHUNKS_MAX - data {
            return Err(CodingError::Shape { data, parity });
        }
        let matrix = kind.parity_rows(data, parity);
        let coefficients = Coefficients::new(parity, data, &matrix);
        Ok(Self { kind, data, parity, matrix, coefficients, engine })
    }

    /// Data chunks, k.
    pub fn data_chunks(&self) -> usize {
        self.data
    }

    /// Parity chunks, m.
    pub fn parity_chunks(&self) -> usize {
        self.parity
    }

    /// Which matrix.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The m x k parity rows, row by row, as the libraries give them.
    pub fn matrix(&self) -> &[u8] {
        &self.matrix
    }

    /// The engine in use.
    pub fn engine(&self) -> &'static dyn Engine {
        self.engine
    }

    /// Fills `parity` (m chunks) from `data` (k chunks of the same length).
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) -> Result<(), CodingError> {
        self.encode_on(self.engine, data, parity)
    }

    /// The same on another engine than the code's own.
    pub fn encode_on(
        &self,
        engine: &dyn Engine,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
    ) -> Result<(), CodingError> {
        self.check_data_parity(data, parity)?;
        engine.combine(self.coefficients.view(), data, parity, Mode::Set);
        Ok(())
    }

    /// Encodes many stripes; nothing is written when any of them has the wrong shape.
    pub fn encode_many(&self, stripes: &mut [Stripe<'_, '_, '_>]) -> Result<(), CodingError> {
        for s in stripes.iter() {
            self.check_data_parity(s.inputs, s.outputs)?;
        }
        self.engine.combine_many(self.coefficients.view(), stripes, Mode::Set);
        Ok(())
    }

    /// Carries a write into the parity: `old` and `new` are what data chunk `index` held and holds
    /// in some byte range, `parity` the same byte range of all m parity chunks.
    pub fn update(
        &self,
        index: usize,
        old: &[u8],
        new: &[u8],
        parity: &mut [&mut [u8]],
    ) -> Result<(), CodingError> {
        if index >= self.data {
            return Err(CodingError::Index { index, limit: self.data });
        }
        check_count("parity chunks", parity.len(), self.parity)?;
        check_lengths("parity chunk", parity.iter().map(|p| p.len()), new.len())?;
        check_lengths("old data", [old.len()].into_iter(), new.len())?;
        self.engine.combine(self.coefficients.change(index), &[old, new], parity, Mode::Add);
        Ok(())
    }

    /// Compares stored parity with what the data gives; none when they agree.
    pub fn verify(
        &self,
        data: &[&[u8]],
        parity: &[&[u8]],
    ) -> Result<Option<Mismatch>, CodingError> {
        let len = self.check_data(data)?;
        check_count("parity chunks", parity.len(), self.parity)?;
        check_lengths("parity chunk", parity.iter().map(|p| p.len()), len)?;
        let mut scratch = [[0u8; SCRATCH_BYTES]; VERIFY_ROWS];
        let mut part: Vec<&[u8]> = Vec::with_capacity(self.data);
        let mut at = 0;
        while at < len {
            let n = SCRATCH_BYTES.min(len - at);
            part.clear();
            part.extend(data.iter().map(|d| &d[at..at + n]));
            for (group, stored) in parity.chunks(VERIFY_ROWS).enumerate() {
                let first = group * VERIFY_ROWS;
                let mut out = scratch.each_mut().map(|row| &mut row[..n]);
                let out = &mut out[..stored.len()];
                let rows = self.coefficients.row_range(first, stored.len());
                self.engine.combine(rows, &part, out, Mode::Set);
                for (r, (got, stored)) in out.iter().zip(stored).enumerate() {
                    let stored = &stored[at..at + n];
                    if **got != *stored {
                        let byte = got.iter().zip(stored).position(|(a, b)| a != b).unwrap_or(0);
                        return Ok(Some(Mismatch { row: first + r, offset: at + byte }));
                    }
                }
            }
            at += n;
        }
        Ok(None)
    }

    /// How to rebuild every chunk of `lost`.
    pub fn plan(&self, lost: &[usize]) -> Result<Plan, CodingError> {
        self.plan_for(lost, lost)
    }

    /// How to rebuild only `wanted` of the chunks in `lost` (a degraded read).
    ///
    /// The chunks to read are all data chunks that survive and as many parity chunks as data chunks
    /// are lost: the first ones that determine the data, so an unsafe matrix fails only where no
    /// choice of k survivors would do.
    pub fn plan_for(&self, lost: &[usize], wanted: &[usize]) -> Result<Plan, CodingError> {
        let gone = self.check_lost(lost, wanted)?;
        let (k, m) = (self.data, self.parity);
        let lost_data: Vec<usize> = (0..k).filter(|&i| gone[i]).collect();
        let left_data: Vec<usize> = (0..k).filter(|&i| !gone[i]).collect();
        let left_parity: Vec<usize> = (0..m).filter(|&i| !gone[k + i]).collect();

        // What the surviving parity rows say about the lost data chunks, and its inverse.
        let e = lost_data.len();
        let equations: Vec<u8> = left_parity
            .iter()
            .flat_map(|&p| lost_data.iter().map(move |&d| self.matrix[p * k + d]))
            .collect();
        let (picked, inverse) = matrix::invert_some_rows(&equations, left_parity.len(), e)
            .map_err(|rank| CodingError::Singular { lost: e, rank })?;
        let parity_read: Vec<usize> = picked.iter().map(|&p| left_parity[p]).collect();

        // Each lost data chunk over the chunks read: first the data left, then the parity read.
        let mut solved = vec![0u8; e * k];
        for (i, row) in solved.chunks_mut(k).enumerate() {
            for (t, &p) in parity_read.iter().enumerate() {
                let x = inverse[i * e + t];
                for (cell, &d) in row.iter_mut().zip(&left_data) {
                    *cell ^= field::mul(x, self.matrix[p * k + d]);
                }
                row[left_data.len() + t] = x;
            }
        }
        let mut rows = Vec::with_capacity(wanted.len() * k);
        for &target in wanted {
            match lost_data.iter().position(|&d| d == target) {
                Some(i) => rows.extend_from_slice(&solved[i * k..][..k]),
                None => rows.extend(self.parity_row(target - k, &left_data, &lost_data, &solved)),
            }
        }
        let mut sources = left_data;
        sources.extend(parity_read.iter().map(|&p| k + p));
        Ok(Plan {
            sources,
            targets: wanted.to_vec(),
            coefficients: Coefficients::new(wanted.len(), k, &rows),
            engine: self.engine,
        })
    }

    /// Rebuilds in place: `chunks` are all k + m chunks of a stripe, those in `lost` are written.
    pub fn decode(&self, chunks: &mut [&mut [u8]], lost: &[usize]) -> Result<(), CodingError> {
        check_count("chunks", chunks.len(), self.data + self.parity)?;
        let plan = self.plan(lost)?;
        let mut sources: Vec<Option<&[u8]>> = vec![None; chunks.len()];
        let mut targets: Vec<Option<&mut [u8]>> = Vec::new();
        targets.resize_with(chunks.len(), || None);
        for (i, chunk) in chunks.iter_mut().enumerate() {
            match plan.targets.contains(&i) {
                true => targets[i] = Some(chunk),
                false => sources[i] = Some(chunk),
            }
        }
        let sources: Vec<&[u8]> = plan.sources.iter().filter_map(|&i| sources[i]).collect();
        let mut targets: Vec<&mut [u8]> =
            plan.targets.iter().filter_map(|&i| targets[i].take()).collect();
        plan.rebuild(&sources, &mut targets)
    }

    /// A lost parity row over the chunks read.
    fn parity_row(
        &self,
        row: usize,
        left_data: &[usize],
        lost_data: &[usize],
        solved: &[u8],
    ) -> Vec<u8> {
        let k = self.data;
        let mut out = vec![0u8; k];
        for (cell, &d) in out.iter_mut().zip(left_data) {
            *cell = self.matrix[row * k + d];
        }
        for (i, &d) in lost_data.iter().enumerate() {
            let x = self.matrix[row * k + d];
            for (cell, &s) in out.iter_mut().zip(&solved[i * k..][..k]) {
                *cell ^= field::mul(x, s);
            }
        }
        out
    }

    fn check_lost(
        &self,
        lost: &[usize],
        wanted: &[usize],
    ) -> Result<[bool; CHUNKS_MAX], CodingError> {
        let limit = self.data + self.parity;
        let mut gone = [false; CHUNKS_MAX];
        for &index in lost {
            if index >= limit {
                return Err(CodingError::Index { index, limit });
            }
            if std::mem::replace(&mut gone[index], true) {
                return Err(CodingError::Listed { index });
            }
        }
        if lost.len() > self.parity {
            return Err(CodingError::TooManyLost { lost: lost.len(), parity: self.parity });
        }
        let mut seen = [false; CHUNKS_MAX];
        for &index in wanted {
            if index >= limit {
                return Err(CodingError::Index { index, limit });
            }
            if !gone[index] || std::mem::replace(&mut seen[index], true) {
                return Err(CodingError::Listed { index });
            }
        }
        Ok(gone)
    }

    fn check_data(&self, data: &[&[u8]]) -> Result<usize, CodingError> {
        check_count("data chunks", data.len(), self.data)?;
        let len = data[0].len();
        check_lengths("data chunk", data.iter().map(|d| d.len()), len)?;
        Ok(len)
    }

    fn check_data_parity(
        &self,
        data: &[&[u8]],
        parity: &[&mut [u8]],
    ) -> Result<usize, CodingError> {
        let len = self.check_data(data)?;
        check_count("parity chunks", parity.len(), self.parity)?;
        check_lengths("parity chunk", parity.iter().map(|p| p.len()), len)?;
        Ok(len)
    }
}

/// How to rebuild lost chunks; made once per pattern of loss and used for every stripe.
#[derive(Clone, Debug)]
pub struct Plan {
    sources: Vec<usize>,
    targets: Vec<usize>,
    coefficients: Coefficients,
    engine: &'static dyn Engine,
}

impl Plan {
    /// The k chunks to read, by number, in the order that [`Plan::rebuild`] takes them.
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// The chunks rebuilt, by number.
    pub fn targets(&self) -> &[usize] {
        &self.targets
    }

    /// Computes the targets from the sources (any byte range of both).
    pub fn rebuild(&self, sources: &[&[u8]], targets: &mut [&mut [u8]]) -> Result<(), CodingError> {
        self.rebuild_on(self.engine, sources, targets)
    }

    /// The same on another engine than the code's own.
    pub fn rebuild_on(
        &self,
        engine: &dyn Engine,
        sources: &[&[u8]],
        targets: &mut [&mut [u8]],
    ) -> Result<(), CodingError> {
        self.check(sources, targets)?;
        engine.combine(self.coefficients.view(), sources, targets, Mode::Set);
        Ok(())
    }

    /// Rebuilds many stripes; nothing is written when any of them has the wrong shape.
    pub fn rebuild_many(&self, stripes: &mut [Stripe<'_, '_, '_>]) -> Result<(), CodingError> {
        for s in stripes.iter() {
            self.check(s.inputs, s.outputs)?;
        }
        self.engine.combine_many(self.coefficients.view(), stripes, Mode::Set);
        Ok(())
    }

    fn check(&self, sources: &[&[u8]], targets: &[&mut [u8]]) -> Result<(), CodingError> {
        check_count("source chunks", sources.len(), self.sources.len())?;
        let len = sources[0].len();
        check_lengths("source chunk", sources.iter().map(|s| s.len()), len)?;
        check_count("target chunks", targets.len(), self.targets.len())?;
        check_lengths("target chunk", targets.iter().map(|t| t.len()), len)
    }
}

fn check_count(what: &'static str, found: usize, expected: usize) -> Result<(), CodingError> {
    if found != expected {
        return Err(CodingError::Count { what, expected, found });
    }
    Ok(())
}

fn check_lengths(
    what: &'static str,
    lengths: impl Iterator<Item = usize>,
    expected: usize,
) -> Result<(), CodingError> {
    for (index, found) in lengths.enumerate() {
        if found != expected {
            return Err(CodingError::Length { what, index, expected, found });
        }
    }
    Ok(())
}
