//! What requests are given to: an image, or the layer before it. The device carries out what the layer asks of it in any order.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::Errno;
use base::random::Random;
use block::device::{Answer, Disk, Op, Outcome};
use block::layer::{Config, Effect, Layer};
use block::pool::Image;

use super::stores::Stage;

pub struct Front {
    image: Image,
    layer: Option<Layer>,
    stage: Arc<Stage>,
    /// Asked of the image by the layer, and not carried out.
    lower: Vec<(u64, Op)>,
    ended: BTreeMap<u64, Outcome>,
    next: u64,
}

impl Front {
    pub fn new(image: Image, config: Option<Config>, stage: &Arc<Stage>) -> Self {
        let layer = config.map(|config| Layer::new(config, image.size()));
        let stage = Arc::clone(stage);
        Self { image, layer, stage, lower: Vec::new(), ended: BTreeMap::new(), next: 0 }
    }

    pub fn image(&self) -> &Image {
        &self.image
    }

    fn carry_out(&self, op: Op) -> Outcome {
        let image = &self.image;
        match op {
            Op::Read { offset, len } => {
                let mut data = vec![0xa5; len as usize];
                image.read(offset, &mut data).map(|()| Answer::Data(data))
            }
            Op::Write { offset, data, .. } => image.write(offset, &data).map(|()| Answer::Done),
            Op::Flush => image.flush().map(|()| Answer::Done),
            Op::Trim { offset, len, .. } => image.trim(offset, len).map(|()| Answer::Done),
            Op::Zero { offset, len, .. } => image.zero(offset, len, false).map(|()| Answer::Done),
            Op::Status { .. } => Err(Errno::OPNOTSUPP),
        }
    }

    /// How each ended; `None`: the process was killed before.
    pub fn perform(&mut self, ops: Vec<Op>, random: &mut Random) -> Vec<Option<Outcome>> {
        if self.layer.is_none() {
            let each = ops.into_iter().map(|op| {
                let outcome = self.carry_out(op);
                (!self.stage.is_dead()).then_some(outcome)
            });
            return each.collect();
        }
        let first = self.next;
        let count = ops.len() as u64;
        for op in ops {
            let (number, now) = (self.next, self.stage.now());
            self.next += 1;
            self.tell(|layer, out| layer.request(now, number, op, out));
            if random.chance(1, 3) {
                self.step(random);
            }
        }
        let is_over = |front: &Self| (first..first + count).all(|n| front.ended.contains_key(&n));
        while !is_over(self) && !self.stage.is_dead() && self.step(random) {}
        (first..first + count).map(|n| self.ended.remove(&n)).collect()
    }

    fn tell(&mut self, what: impl FnOnce(&mut Layer, &mut Vec<Effect>)) {
        let mut out = Vec::new();
        if let Some(layer) = &mut self.layer {
            what(layer, &mut out);
        }
        for effect in out {
            match effect {
                Effect::Submit(number, op) => self.lower.push((number, op)),
                Effect::Complete(number, outcome) => drop(self.ended.insert(number, outcome)),
            }
        }
    }

    /// One thing that the layer asked for, or the time that it waits for. False: there is neither.
    fn step(&mut self, random: &mut Random) -> bool {
        if self.lower.is_empty() {
            let Some(at) = self.layer.as_ref().and_then(Layer::wake_at) else { return false };
            self.stage.pass(at.saturating_sub(self.stage.now()));
            let now = self.stage.now();
            self.tell(|layer, out| layer.tick(now, out));
            return true;
        }
        let which = random.below(self.lower.len() as u64) as usize;
        let (number, op) = self.lower.swap_remove(which);
        let outcome = self.carry_out(op);
        if self.stage.is_dead() {
            return false;
        }
        let now = self.stage.now();
        self.tell(|layer, out| layer.answered(now, number, outcome, out));
        true
    }
}
