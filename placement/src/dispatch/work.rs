//! What is asked of an accelerator, with its buffers.

use std::ops::Range;
use std::sync::Arc;

use crate::coding::{Code, Plan};
use crate::crush::{Batch, Placer, Workspace};
use crate::engine::Engine;

/// A part of bytes that several share.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    of: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl Piece {
    /// A range of them, which must lie within.
    pub fn new(of: &Arc<Vec<u8>>, range: Range<usize>) -> Self {
        debug_assert!(range.start <= range.end && range.end <= of.len());
        let end = range.end.min(of.len());
        Self { of: Arc::clone(of), range: range.start.min(end)..end }
    }

    /// Bytes, without a look at what they are of: that may be in no cache.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl From<Vec<u8>> for Piece {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { of: Arc::new(bytes), range }
    }
}

impl std::ops::Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.of.get(self.range.clone()).unwrap_or_default()
    }
}

/// Buffers of one stripe.
#[derive(Clone, Default, Debug)]
pub struct Buffers {
    /// Chunks read: all of one length. Shared, so that who stands in for an accelerator that hangs reads the same.
    pub inputs: Arc<[Piece]>,
    /// Chunks written, of the same length. What is given back may be others than were submitted: an accelerator that hung has those.
    pub outputs: Vec<Vec<u8>>,
}

impl Buffers {
    /// Bytes of each chunk.
    fn chunk(&self) -> usize {
        self.inputs.first().map_or(0, Piece::len)
    }

    /// Calls `each` with the chunks as slices, which need no memory of their own where they are few, as they mostly are: a stripe of
    /// 64 KiB takes two microseconds.
    fn with_slices<T>(&mut self, each: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> T) -> T {
        match (self.inputs.len(), self.outputs.len()) {
            (0..=8, 0..=4) => self.with_few::<8, 4, T>(each),
            (0..=16, 0..=16) => self.with_few::<16, 16, T>(each),
            _ => self.with_many(each),
        }
    }

    fn with_many<T>(&mut self, each: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> T) -> T {
        let inputs: Vec<&[u8]> = self.inputs.iter().map(|input| &**input).collect();
        let mut outputs: Vec<&mut [u8]> = self.outputs.iter_mut().map(Vec::as_mut_slice).collect();
        each(&inputs, &mut outputs)
    }

    /// The same of `I` inputs and `O` outputs at most.
    fn with_few<const I: usize, const O: usize, T>(
        &mut self,
        each: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> T,
    ) -> T {
        let (inputs, outputs) = (self.inputs.len(), self.outputs.len());
        let mut some_inputs: [&[u8]; I] = [&[]; I];
        for (slice, input) in some_inputs.iter_mut().zip(self.inputs.iter()) {
            *slice = input;
        }
        let mut some_outputs: [&mut [u8]; O] = std::array::from_fn(|_| <&mut [u8]>::default());
        for (slice, output) in some_outputs.iter_mut().zip(&mut self.outputs) {
            *slice = output;
        }
        each(&some_inputs[..inputs], &mut some_outputs[..outputs])
    }
}

/// Work with its buffers.
#[derive(Debug)]
pub enum Work {
    /// Parity of stripes.
    Encode {
        /// The code.
        code: Arc<Code>,
        /// k chunks in, m out.
        stripes: Vec<Buffers>,
    },
    /// Lost chunks of stripes.
    Rebuild {
        /// Which, from which.
        plan: Arc<Plan>,
        /// [`Plan::sources`] in, [`Plan::targets`] out.
        stripes: Vec<Buffers>,
    },
    /// Placements.
    Place {
        /// The map.
        placer: Arc<Placer>,
        /// The rule.
        rule: u32,
        /// What is placed.
        inputs: Vec<u32>,
        /// Replicas of each.
        width: usize,
        /// Reweights of devices.
        reweights: Arc<Vec<u32>>,
        /// Where, afterwards.
        batch: Option<Box<Batch>>,
    },
}

impl Work {
    pub(super) const KINDS: usize = 3;

    pub(super) fn kind(&self) -> usize {
        match self {
            Self::Encode { .. } => 0,
            Self::Rebuild { .. } => 1,
            Self::Place { .. } => 2,
        }
    }

    /// How much it is: bytes of outputs times inputs; placements times a thousand.
    pub fn units(&self) -> u64 {
        let bytes = |stripes: &[Buffers], chunks: usize| {
            stripes.iter().map(|s| (s.chunk() * s.outputs.len() * chunks) as u64).sum()
        };
        match self {
            Self::Encode { code, stripes } => bytes(stripes, code.data_chunks()),
            Self::Rebuild { plan, stripes } => bytes(stripes, plan.sources().len()),
            Self::Place { inputs, width, .. } => {
                (inputs.len() as u64).saturating_mul(*width as u64).saturating_mul(1000)
            }
        }
    }

    /// Whether the buffers are of the shape that is asked for.
    pub(super) fn check(&self) -> Result<(), String> {
        let (stripes, inputs, outputs) = match self {
            Self::Encode { code, stripes } => (stripes, code.data_chunks(), code.parity_chunks()),
            Self::Rebuild { plan, stripes } => {
                (stripes, plan.sources().len(), plan.targets().len())
            }
            Self::Place { .. } => return Ok(()),
        };
        for (i, stripe) in stripes.iter().enumerate() {
            let counts = (stripe.inputs.len(), stripe.outputs.len());
            if counts != (inputs, outputs) {
                let (found_in, found_out) = counts;
                return Err(format!(
                    "stripe {i}: {found_in} chunks in and {found_out} out, and not {inputs} and {outputs}"
                ));
            }
            let chunk = stripe.chunk();
            let is_other = |len: &usize| *len != chunk || chunk == 0;
            let input = stripe.inputs.iter().map(Piece::len).find(is_other);
            let output = || stripe.outputs.iter().map(Vec::len).find(is_other);
            if let Some(other) = input.or_else(output) {
                return Err(format!("stripe {i}: a chunk of {other} bytes beside one of {chunk}"));
            }
        }
        Ok(())
    }

    /// The same work, for whoever stands in for one that has this and does not give it back: it reads the same bytes, and writes into
    /// none of the buffers of this one. Nothing is asked of memory for those before [`renew`](Self::renew).
    pub(super) fn spare(&self) -> Self {
        let bare = |stripes: &[Buffers]| {
            let bare = |stripe: &Buffers| Buffers {
                inputs: Arc::clone(&stripe.inputs),
                outputs: Vec::new(),
            };
            stripes.iter().map(bare).collect()
        };
        match self {
            Self::Encode { code, stripes } => {
                Self::Encode { code: Arc::clone(code), stripes: bare(stripes) }
            }
            Self::Rebuild { plan, stripes } => {
                Self::Rebuild { plan: Arc::clone(plan), stripes: bare(stripes) }
            }
            Self::Place { placer, rule, inputs, width, reweights, .. } => Self::Place {
                placer: Arc::clone(placer),
                rule: *rule,
                inputs: inputs.clone(),
                width: *width,
                reweights: Arc::clone(reweights),
                batch: None,
            },
        }
    }

    /// Gives a spare its buffers.
    pub(super) fn renew(&mut self) {
        let (stripes, count) = match self {
            Self::Encode { code, stripes } => (stripes, code.parity_chunks()),
            Self::Rebuild { plan, stripes } => (stripes, plan.targets().len()),
            Self::Place { .. } => return,
        };
        for stripe in stripes {
            stripe.outputs = vec![vec![0; stripe.chunk()]; count];
        }
    }

    /// Does it in this thread, on the best engine of this CPU: for who cannot wait until somebody does it.
    ///
    /// # Errors
    /// The buffers are not of the shape that it asks for.
    pub fn carry_out_here(&mut self) -> Result<(), String> {
        self.check()?;
        self.carry_out(crate::engine::best())
    }

    /// Does it on the CPU.
    pub(super) fn carry_out(&mut self, engine: &dyn Engine) -> Result<(), String> {
        match self {
            Self::Encode { code, stripes } => stripes.iter_mut().try_for_each(|stripe| {
                stripe
                    .with_slices(|input, output| code.encode_on(engine, input, output))
                    .map_err(|error| error.to_string())
            }),
            Self::Rebuild { plan, stripes } => stripes.iter_mut().try_for_each(|stripe| {
                stripe
                    .with_slices(|input, output| plan.rebuild_on(engine, input, output))
                    .map_err(|error| error.to_string())
            }),
            Self::Place { placer, rule, inputs, width, reweights, batch } => {
                let mut workspace = Workspace::default();
                let placed = placer.place_many(*rule, inputs, *width, reweights, &mut workspace);
                *batch = Some(Box::new(placed.map_err(|error| error.to_string())?));
                Ok(())
            }
        }
    }
}
