//! A disk whose calls may wait, as a device that does not: a few threads of its own do the waiting.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::{Blocking, Device, Disk, Op, Request, Traits};

#[derive(Default)]
struct Queue {
    requests: VecDeque<Request>,
    over: bool,
}

struct Inner<D> {
    disk: Blocking<D>,
    queue: Mutex<Queue>,
    filled: Condvar,
}

/// The device. Whoever submits bounds the queue by what it has in flight.
pub struct Threads<D: Disk + 'static> {
    inner: Arc<Inner<D>>,
    threads: Vec<JoinHandle<()>>,
    /// What is prompt is done by whoever submits it.
    in_place: bool,
}

impl<D: Disk> std::fmt::Debug for Threads<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl<D: Disk + 'static> Threads<D> {
    /// A device of that many threads.
    pub fn new(disk: D, threads: usize) -> std::io::Result<Self> {
        let inner = Arc::new(Inner {
            disk: Blocking(disk),
            queue: Mutex::default(),
            filled: Condvar::new(),
        });
        let mut started = Self { inner, threads: Vec::new(), in_place: false };
        for _ in 0..threads.max(1) {
            let inner = Arc::clone(&started.inner);
            let thread = std::thread::Builder::new()
                .name("block-disk".into())
                .spawn(move || inner.work())?;
            started.threads.push(thread);
        }
        Ok(started)
    }

    /// The same, but what the disk answers promptly is done where it is submitted: a change of threads would take longer.
    pub fn for_what_waits(disk: D, threads: usize) -> std::io::Result<Self> {
        let mut started = Self::new(disk, threads)?;
        started.in_place = true;
        Ok(started)
    }
}

impl<D: Disk> Inner<D> {
    fn work(&self) {
        loop {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            let request = loop {
                if let Some(request) = queue.requests.pop_front() {
                    break request;
                }
                if queue.over {
                    return;
                }
                queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            self.disk.submit(request);
        }
    }
}

impl<D: Disk + 'static> Device for Threads<D> {
    fn traits(&self) -> Traits {
        self.inner.disk.traits()
    }

    fn size(&self) -> u64 {
        self.inner.disk.size()
    }

    fn is_prompt(&self, _: &Op) -> bool {
        true
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.inner.disk.file()
    }

    fn submit(&self, request: Request) {
        if self.in_place && self.inner.disk.is_prompt(&request.op) {
            return self.inner.disk.submit(request);
        }
        let mut queue = self.inner.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.requests.push_back(request);
        drop(queue);
        self.inner.filled.notify_one();
    }
}

impl<D: Disk + 'static> Drop for Threads<D> {
    /// What was submitted is carried out first.
    fn drop(&mut self) {
        self.inner.queue.lock().unwrap_or_else(PoisonError::into_inner).over = true;
        self.inner.filled.notify_all();
        let own = std::thread::current().id();
        for thread in self.threads.drain(..) {
            // The last one to let go may be one of them.
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
    }
}
