//! What one thread has under way of several objects at the same time: while what one needs is computed, others are asked for and put.
//! Answers of stores and tasks that have ended come the same way, under numbers that say whose they are.

use std::sync::mpsc::{Receiver, Sender, channel};

use base::Nanos;
use base::planted::{Bug, planted};
use placement::dispatch::Work;

use super::image::Image;
use super::worker::{Answer, Ask};

/// Objects of one request that are under way at the same time.
pub(super) const AT_A_TIME: usize = 4;
/// Numbers of what one object asks for; those of tasks are the upper half.
const NUMBERS: usize = 1 << 24;
pub(super) const TASKS: usize = NUMBERS / 2;

/// How an object asks, and is answered.
#[derive(Clone, Debug)]
pub(super) struct Line {
    to: Sender<Answer>,
    base: usize,
    /// Others are asked first: nobody waits for this.
    behind: bool,
}

impl Line {
    /// One of its own.
    pub fn new(behind: bool) -> (Self, Receiver<Answer>) {
        let (to, from) = channel();
        (Self { to, base: 0, behind }, from)
    }

    /// Asks a store.
    pub fn ask(&self, image: &Image, store: usize, ask: Ask, number: usize) {
        let ask = if self.behind { Ask::Behind(Box::new(ask)) } else { ask };
        image.pool.stores[store].ask(ask, self.base + number, &self.to);
    }

    /// Has something computed. `alone`: whoever waits for it does nothing else meanwhile.
    pub fn compute(&self, image: &Image, work: Work, number: usize, alone: bool) {
        let (pool, number) = (&image.pool, self.base + number);
        pool.ground.compute(&pool.dispatcher, work, number, &self.to, alone);
    }
}

/// What is under way of one object.
pub(super) trait Leg {
    /// Takes an answer in.
    fn take(&mut self, answer: Answer);
    /// Goes on as far as it can. Whether it is over.
    fn advance(&mut self) -> bool;
    /// When it wants to go on although nothing was answered.
    fn until(&self) -> Nanos;
}

/// Several of them.
pub(super) struct Flight<'a, T> {
    image: &'a Image,
    to: Sender<Answer>,
    from: Receiver<Answer>,
    behind: bool,
    legs: Vec<(usize, T)>,
    next: usize,
}

impl<'a, T: Leg> Flight<'a, T> {
    /// None.
    pub fn new(image: &'a Image, behind: bool) -> Self {
        let (to, from) = channel();
        Self { image, to, from, behind, legs: Vec::new(), next: 0 }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.legs.len()
    }

    /// All of them.
    pub fn legs(&self) -> impl Iterator<Item = &T> {
        self.legs.iter().map(|(_, leg)| leg)
    }

    /// How the next one asks.
    pub fn line(&mut self) -> Line {
        self.next += 1;
        Line { to: self.to.clone(), base: self.next * NUMBERS, behind: self.behind }
    }

    /// Adds the one that has the last line.
    pub fn add(&mut self, leg: T) {
        self.legs.push((self.next, leg));
    }

    /// Waits until one more thing has happened, but no longer than until then; those that are over.
    pub fn step(&mut self, until: Nanos) -> Vec<T> {
        // What has come while its owner did something else came in time.
        if !planted(Bug::AnswersUnread) {
            while let Some(answer) = self.image.pool.ground.wait(&self.from, 0) {
                self.deliver(answer);
            }
        }
        let over = self.over();
        if !over.is_empty() {
            return over;
        }
        let until = self.legs.iter().map(|(_, leg)| leg.until()).fold(until, Nanos::min);
        if let Some(answer) = self.image.pool.ground.wait(&self.from, until) {
            self.deliver(answer);
        }
        self.over()
    }

    fn deliver(&mut self, (number, told): Answer) {
        let mut of = number / NUMBERS;
        if number % NUMBERS >= TASKS && planted(Bug::TaskOfAnother) {
            of = self.legs.last().map_or(of, |(last, _)| *last);
        }
        // Of one that is over, nobody waits for it any more.
        if let Some((_, leg)) = self.legs.iter_mut().find(|(number, _)| *number == of) {
            leg.take((number % NUMBERS, told));
        }
    }

    fn over(&mut self) -> Vec<T> {
        let mut over = Vec::new();
        let mut at = 0;
        while at < self.legs.len() {
            if self.legs[at].1.advance() {
                over.push(self.legs.remove(at).1);
            } else {
                at += 1;
            }
        }
        over
    }
}
