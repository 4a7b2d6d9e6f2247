//! One connection: a thread that reads and writes, and a queue of frames that others fill.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};

use super::frame::{self, Header, PAYLOAD_MAX, kind};
use super::link::Link;

/// What is done with a frame.
type Each<'a> = dyn FnMut(&Link, &Header, &[u8]) -> Result<(), String> + 'a;

/// After so long without a frame to send, a PING is.
const PING: Duration = Duration::from_secs(1);

/// What others hand to the connection's thread.
pub(super) struct Outbox {
    frames: Mutex<VecDeque<Vec<u8>>>,
    bell: OwnedFd,
    closed: AtomicBool,
}

impl Outbox {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            frames: Mutex::default(),
            bell: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            closed: AtomicBool::new(false),
        })
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1u64.to_le_bytes());
    }

    /// Sends a frame, if the connection stands.
    pub fn send(&self, frame: Vec<u8>) {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        frames.push_back(frame);
        let was_empty = frames.len() == 1;
        drop(frames);
        if was_empty {
            self.ring();
        }
    }

    /// Ends the connection's thread.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.ring();
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn take(&self) -> Option<Vec<u8>> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

/// Reads and writes until the connection ends: why. `each` takes frames; what it says ends it. `silence`: a connection over
/// which nothing comes for so long is dead.
pub(super) fn run(
    link: &mut Link,
    outbox: &Outbox,
    silence: Duration,
    mut each: impl FnMut(&Link, &Header, &[u8]) -> Result<(), String>,
) -> String {
    let (mut inbox, mut sending) = (Vec::new(), (Vec::new(), 0));
    let (mut heard, mut said) = (Instant::now(), Instant::now());
    let step = |inbox: &mut Vec<u8>,
                sending: &mut (Vec<u8>, usize),
                heard: &mut Instant,
                said: &mut Instant,
                link: &mut Link,
                each: &mut Each<'_>|
     -> Result<(), String> {
        // Out.
        loop {
            if sending.1 == sending.0.len() {
                let Some(next) = outbox.take() else { break };
                *sending = (next, 0);
            }
            let took = link.write(&sending.0[sending.1..])?;
            if took == 0 {
                break;
            }
            sending.1 += took;
            *said = Instant::now();
        }
        let stuck = link.flush()? || sending.1 < sending.0.len();
        let out = if stuck { PollFlags::OUT } else { PollFlags::empty() };
        let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: 250_000_000 };
        let mut fds = [
            PollFd::from_borrowed_fd(link.fd(), PollFlags::IN | out),
            PollFd::new(&outbox.bell, PollFlags::IN),
        ];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.to_string()),
        }
        if !fds[1].revents().is_empty() {
            let _ = rustix::io::read(&outbox.bell, &mut [0u8; 8]);
        }
        // In.
        while link.read(inbox, PAYLOAD_MAX + size_of::<Header>())? {
            *heard = Instant::now();
            let mut used = 0;
            while let Some((header, payload, len)) = frame::take(&inbox[used..])? {
                if header.kind == kind::BYE {
                    return Err(String::from_utf8_lossy(&payload[..payload.len().min(200)]).into());
                }
                each(link, &header, payload)?;
                used += len;
            }
            inbox.drain(..used);
        }
        if heard.elapsed() > silence {
            return Err(format!("nothing was heard for {} s", silence.as_secs()));
        }
        if said.elapsed() > PING {
            outbox.send(frame::frame(&Header::of(kind::PING, 0), &[]));
        }
        Ok(())
    };
    while !outbox.is_closed() {
        let done = step(&mut inbox, &mut sending, &mut heard, &mut said, link, &mut each);
        if let Err(why) = done {
            let bye = frame::frame(&Header::of(kind::BYE, why.len()), why.as_bytes());
            let _ = link.write(&bye);
            return why;
        }
    }
    "it was ended here".into()
}
