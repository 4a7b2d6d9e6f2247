//! The thread of a hardware queue: it fetches requests, hands them to the device and commits what has become of them. The device may
//! complete them on any thread; what it completes while the worker waits for the kernel wakes it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::planted::{Bug, planted};
use rustix::event::{EventfdFlags, eventfd};

use super::abi::Description;
use super::queue::{Move, Next, Pages, Queue, Rules};
use crate::device::{Device, Outcome, Request};

/// What the kernel has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A fetch has ended with that result.
    Fetched(u16, i32),
    /// A move has.
    Moved(u16, i32),
    /// The worker is wanted.
    Woken,
}

/// The kernel, as a worker sees it. What is asked of it may be put off until [`Kernel::wait`].
pub trait Kernel: Pages {
    /// Asks for the first request under a tag.
    fn fetch(&mut self, tag: u16) -> io::Result<()>;
    /// Says what has become of a request, and asks for the next one under its tag.
    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()>;
    /// Asks for a move between the file and the pages of a request.
    fn start_move(&mut self, tag: u16, what: Move) -> io::Result<()>;
    /// Says what came under a tag.
    fn describe(&self, tag: u16) -> Description;
    /// Waits until something has happened, or `bell` is readable (which it may empty), and adds it to `events`.
    fn wait(&mut self, bell: BorrowedFd<'_>, events: &mut Vec<Event>) -> io::Result<()>;
}

/// What the device has completed and the worker has not yet committed.
#[derive(Debug)]
struct Completions {
    list: Mutex<Vec<(u16, Outcome)>>,
    /// The worker waits for the kernel: whoever adds something rings.
    asleep: AtomicBool,
    bell: OwnedFd,
}

impl Completions {
    fn new() -> io::Result<Arc<Self>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { list: Mutex::default(), asleep: AtomicBool::new(false), bell }))
    }

    fn add(&self, tag: u16, outcome: Outcome) {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).push((tag, outcome));
        if self.asleep.swap(false, Ordering::SeqCst) {
            // It fails only when it was rung very often already.
            let _ = rustix::io::write(&self.bell, &1_u64.to_le_bytes());
        }
    }

    fn swap(&self, with: &mut Vec<(u16, Outcome)>) {
        std::mem::swap(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner), with);
    }
}

/// Runs a queue of that many requests until the kernel has given all of them up.
///
/// # Errors
/// When the kernel cannot be asked, or says what makes no sense. What it had given out is then still with the device.
pub fn run(
    kernel: &mut impl Kernel,
    device: &dyn Device,
    rules: Rules,
    depth: u16,
) -> io::Result<()> {
    let completions = Completions::new()?;
    let mut queue = Queue::new(rules, depth);
    for tag in 0..depth {
        kernel.fetch(tag)?;
    }
    let (mut events, mut done) = (Vec::new(), Vec::new());
    while !queue.is_over() {
        let late = planted(Bug::BellTooLate);
        completions.asleep.store(!late, Ordering::SeqCst);
        // What was added before that did not ring.
        completions.swap(&mut done);
        if late {
            std::thread::yield_now();
            completions.asleep.store(true, Ordering::SeqCst);
        }
        if done.is_empty() {
            kernel.wait(completions.bell.as_fd(), &mut events)?;
        }
        completions.asleep.store(false, Ordering::SeqCst);
        for (tag, outcome) in done.drain(..) {
            let next = queue.completed(tag, outcome, kernel);
            ask(kernel, tag, next)?;
        }
        let mut batch = Vec::new();
        for event in events.drain(..) {
            let (tag, next) = match event {
                Event::Woken => continue,
                Event::Moved(tag, result) => (tag, queue.moved(tag, result)),
                Event::Fetched(tag, result) => {
                    let next = queue.fetched(tag, result, || kernel.describe(tag), kernel);
                    (tag, next.map_err(io::Error::other)?)
                }
            };
            if let Next::Carry(op) = next {
                let completions = Arc::clone(&completions);
                let done = Box::new(move |outcome| completions.add(tag, outcome));
                batch.push(Request { op, done });
            } else {
                ask(kernel, tag, next)?;
            }
        }
        if !batch.is_empty() {
            device.submit_many(batch);
        }
    }
    Ok(())
}

/// Asks the kernel for what comes next.
fn ask(kernel: &mut impl Kernel, tag: u16, next: Next) -> io::Result<()> {
    match next {
        Next::Commit(result) => kernel.commit(tag, result),
        Next::Move(what) => kernel.start_move(tag, what),
        Next::Nothing | Next::Carry(_) => Ok(()),
    }
}
