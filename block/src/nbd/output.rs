//! Replies on their way: whoever finishes a request sends its reply, and all that wait, without waiting itself. When the
//! socket takes no more, a thread of the connection's own goes on, so that a client which does not read holds up
//! nobody but itself.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::requests::Reply;
use super::wire::Wire;

/// What a client may have in flight: requests, and bytes of payload in requests and replies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub requests: usize,
    pub bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Vec<u8>>,
    /// Somebody sends.
    sending: bool,
    /// The sending thread has been started.
    started: bool,
    /// The sending thread shall go on with what lies in `rest`.
    stuck: bool,
    rest: Vec<Vec<u8>>,
    failed: bool,
    over: bool,
    requests: usize,
    bytes: usize,
    /// Threads that wait for a change. Mostly there is none, and to wake it would be a system call for each reply.
    waiting: usize,
}

/// The way out of a connection.
#[derive(Debug)]
pub(super) struct Output {
    wire: Arc<Wire>,
    state: Mutex<State>,
    changed: Condvar,
    limits: Flight,
    stall: Duration,
}

thread_local! {
    /// The output for which this thread collects replies.
    static CORKED: Cell<usize> = const { Cell::new(0) };
    /// Those, each with the bytes of payload of its request.
    static COLLECTED: RefCell<Vec<(Reply, usize)>> = const { RefCell::new(Vec::new()) };
}

impl Output {
    pub fn new(wire: Arc<Wire>, limits: Flight, stall: Duration) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self { wire, state, changed: Condvar::new(), limits, stall })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.waiting += 1;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// Lets go of what was changed, and wakes who waits for that.
    fn tell(&self, state: MutexGuard<'_, State>) {
        let anybody = state.waiting > 0;
        drop(state);
        if anybody {
            self.changed.notify_all();
        }
    }

    /// Counts a request of that many bytes; waits while there are too many. False: the connection is broken.
    pub fn admit(self: &Arc<Self>, bytes: usize) -> bool {
        let mut state = self.lock();
        loop {
            if state.failed {
                return false;
            }
            let full =
                state.requests >= self.limits.requests || state.bytes + bytes > self.limits.bytes;
            // A request larger than the limit goes alone.
            if !full || state.requests == 0 {
                state.requests += 1;
                state.bytes += bytes;
                return true;
            }
            // What this thread has collected must go out, or it may wait for itself.
            if !state.queue.is_empty() && !state.sending {
                drop(state);
                self.kick();
                state = self.lock();
                continue;
            }
            state = self.wait(state);
        }
    }

    /// Whether a request of that many bytes would not have to wait.
    pub fn has_room(&self, bytes: usize) -> bool {
        let state = self.lock();
        state.requests < self.limits.requests && state.bytes + bytes <= self.limits.bytes
    }

    /// A request is done: its reply goes out.
    pub fn finish(self: &Arc<Self>, reply: Reply, bytes: usize) {
        if CORKED.get() == Arc::as_ptr(self).addr() {
            COLLECTED.with_borrow_mut(|collected| collected.push((reply, bytes)));
        } else {
            self.take(std::iter::once((reply, bytes)));
        }
    }

    /// Runs `work`; replies that this thread finishes meanwhile go out together at its end, also where another thread sends meanwhile: who is
    /// told of one request after the other asks for one after the other, and each has a flush of its own.
    pub fn corked(self: &Arc<Self>, work: impl FnOnce()) {
        let before = CORKED.replace(Arc::as_ptr(self).addr());
        let outer = COLLECTED.take();
        work();
        CORKED.set(before);
        self.take(COLLECTED.replace(outer).into_iter());
    }

    fn take(self: &Arc<Self>, replies: impl Iterator<Item = (Reply, usize)>) {
        let mut state = self.lock();
        for (reply, bytes) in replies {
            state.requests -= 1;
            state.bytes -= bytes;
            if !state.failed {
                state.queue.push_back(reply.head);
                if !reply.data.is_empty() {
                    state.queue.push_back(reply.data);
                }
            }
        }
        self.tell(state);
        self.kick();
    }

    /// Sends what there is, as far as the socket takes it.
    pub fn kick(self: &Arc<Self>) {
        loop {
            let pieces = {
                let mut state = self.lock();
                if state.sending || state.queue.is_empty() {
                    return;
                }
                state.sending = true;
                Vec::from(std::mem::take(&mut state.queue))
            };
            match self.wire.encode(pieces).and_then(|pieces| self.push(pieces)) {
                Ok(rest) if rest.is_empty() => self.lock().sending = false,
                Ok(rest) => return self.hand_over(rest),
                Err(error) => return self.fail(&error),
            }
        }
    }

    /// What the socket would not take.
    fn push(&self, mut pieces: Vec<Vec<u8>>) -> std::io::Result<Vec<Vec<u8>>> {
        while !pieces.is_empty() {
            let slices: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let mut sent = self.wire.send_now(&slices)?;
            if sent == 0 {
                break;
            }
            let whole = pieces
                .iter()
                .take_while(|piece| {
                    let all = piece.len() <= sent;
                    if all {
                        sent -= piece.len();
                    }
                    all
                })
                .count();
            pieces.drain(..whole);
            if let Some(first) = pieces.first_mut() {
                first.drain(..sent);
            }
        }
        Ok(pieces)
    }

    fn hand_over(self: &Arc<Self>, rest: Vec<Vec<u8>>) {
        let mut state = self.lock();
        state.rest = rest;
        state.stuck = true;
        if !state.started {
            let output = Arc::clone(self);
            let spawned =
                std::thread::Builder::new().name("nbd-send".into()).spawn(move || output.send_on());
            if let Err(error) = spawned {
                drop(state);
                return self.fail(&error);
            }
            state.started = true;
        }
        self.tell(state);
    }

    /// The sending thread.
    fn send_on(self: Arc<Self>) {
        loop {
            let mut rest = {
                let mut state = self.lock();
                while !state.stuck {
                    if state.over || state.failed {
                        return;
                    }
                    state = self.wait(state);
                }
                std::mem::take(&mut state.rest)
            };
            while !rest.is_empty() {
                let sent = match self.wire.await_room(self.stall) {
                    Ok(true) => self.push(rest),
                    Ok(false) => Err(std::io::ErrorKind::TimedOut.into()),
                    Err(error) => Err(error),
                };
                match sent {
                    Ok(left) => rest = left,
                    Err(error) => return self.fail(&error),
                }
            }
            {
                let mut state = self.lock();
                state.stuck = false;
                state.sending = false;
            }
            self.kick();
        }
    }

    /// Nothing goes out any more.
    fn fail(&self, error: &std::io::Error) {
        log::debug!("nbd: sending: {error}");
        let mut state = self.lock();
        state.failed = true;
        state.stuck = false;
        state.queue.clear();
        self.wire.shut();
        self.tell(state);
    }

    /// Waits until every request is answered and gone out.
    pub fn settle(&self) {
        let mut state = self.lock();
        while state.requests > 0 || (!state.failed && (state.sending || !state.queue.is_empty())) {
            state.waiting += 1;
            let (next, _) = self
                .changed
                .wait_timeout(state, Duration::from_millis(20))
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
            state.waiting -= 1;
        }
        state.over = true;
        self.tell(state);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// What a thread finishes of one batch goes out at its end, and not before that because another thread sends.
    #[test]
    fn a_batch_is_answered_at_once() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let wire = Arc::new(Wire::new(ours.into()).unwrap());
        let flight = Flight { requests: 8, bytes: 1 << 20 };
        let output = Output::new(wire, flight, Duration::from_secs(1));
        let reply = |byte| Reply { head: vec![byte; 16], data: vec![byte; 3] };
        let mut came = [0; 200];
        assert!((0..4).all(|_| output.admit(3)));
        output.corked(|| {
            output.finish(reply(1), 3);
            // One that somebody else has finished.
            std::thread::scope(|scope| scope.spawn(|| output.finish(reply(2), 3)).join().unwrap());
            assert_eq!(theirs.read(&mut came).unwrap(), 19);
            assert_eq!(came[..19], [2; 19]);
            output.finish(reply(3), 3);
            output.finish(reply(4), 3);
        });
        assert_eq!(theirs.read(&mut came).unwrap(), 57);
        assert_eq!(came[..57], [[1; 19], [3; 19], [4; 19]].concat());
        output.settle();
        let state = output.lock();
        assert_eq!((state.requests, state.bytes), (0, 0));
    }
}
