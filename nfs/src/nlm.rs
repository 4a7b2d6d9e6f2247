//! The locks of NFSv3: the network lock manager (version 4). A lock is asked for without waiting; who waits asks again.
//!
//! Nobody listens here for a server that begins anew (NSM): when the connection was lost, all locks are asked for again, as reclaimed while
//! the server is in its grace period.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::Errno;
use client::fs::{LOCK_END, Lock, LockKind, LockSpace, Result};

use crate::held::Held;
use crate::proto::Locked;
use crate::rpc::{Cred, Link, Procedure};
use crate::service::{self, NLM};
use crate::url::Url;
use crate::xdr::{Garbage, In, Out};

const TEST: u32 = 1;
const LOCK: u32 = 2;
const UNLOCK: u32 = 4;

/// Between two tries, in the time in which a server takes only what was locked before.
const LATER: Duration = Duration::from_millis(200);

/// What it answers.
const GRANTED: u32 = 0;
const DENIED: u32 = 1;
const GRACE: u32 = 4;

/// Owners that a server is told of, by numbers of 32 bits as it knows processes.
#[derive(Default)]
struct Owners {
    numbers: HashMap<(LockSpace, u64), (u32, usize)>,
    last: u32,
}

#[derive(Default)]
struct State {
    link: Option<std::sync::Arc<Link>>,
    owners: Owners,
    held: Held,
    /// Connections that were lost when we last had all locks; `None`: another one was made since.
    breaks: Option<u64>,
    /// What the server could not be told that it is given up.
    given_up: Vec<(Locked, Lock)>,
}

/// Of those, so many at most: the server forgets them when it begins anew.
const GIVEN_UP_MAX: usize = 1024;

/// Locks of an export.
pub struct Nlm {
    url: Url,
    /// Our machine, as the server sees it: it wants to know whom to tell when it begins anew.
    caller: String,
    /// Tells apart devices of one machine, whose owners have the same numbers.
    own: u32,
    state: Mutex<State>,
}

/// The address from which the server is reached. No packet is sent for that.
fn own_address(url: &Url) -> Option<String> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok();
    let there = (url.host.as_str(), url.map_port);
    let socket = socket.filter(|socket| socket.connect(there).is_ok()).or_else(|| {
        let socket = std::net::UdpSocket::bind("[::]:0").ok()?;
        socket.connect(there).ok().map(|()| socket)
    })?;
    socket.local_addr().ok().map(|address| address.ip().to_string())
}

impl Nlm {
    /// Nothing is asked yet.
    pub fn new(url: &Url) -> Self {
        let caller = own_address(url).unwrap_or_else(|| "localhost".into());
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
        Self { url: url.clone(), caller, own: seed as u32, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection, made when the first lock is asked for: many a server has no locks, and many a guest asks for none.
    fn link(&self) -> Result<std::sync::Arc<Link>> {
        if let Some(link) = &self.state().link {
            return Ok(link.clone());
        }
        let port = self.url.lock_port.map_or_else(|| service::port(&self.url, NLM, 4), Ok);
        let made = port.and_then(|port| Link::new(&self.url.host, port, self.url.patience));
        let made = made.map(std::sync::Arc::new).map_err(|why| {
            log::warn!("{}: no locks: {why}", self.url);
            Errno::NOLCK
        })?;
        let mut state = self.state();
        if state.held.is_empty() {
            state.breaks = Some(0);
        }
        Ok(state.link.get_or_insert(made).clone())
    }

    /// The number of an owner, kept for as long as it may have locks.
    fn number(&self, lock: &Lock) -> u32 {
        let own = self.own;
        let Owners { numbers, last } = &mut self.state().owners;
        let (number, users) = numbers.entry((lock.space, lock.owner)).or_insert_with(|| {
            *last = last.wrapping_add(1);
            (own.wrapping_add(*last) & 0x7fff_ffff, 0)
        });
        *users += 1;
        *number
    }

    /// Its request is done; without locks it is forgotten.
    fn leave(&self, lock: &Lock) {
        let mut state = self.state();
        let key = (lock.space, lock.owner);
        let has = state.held.owns(lock.space, lock.owner);
        if let Some((_, users)) = state.owners.numbers.get_mut(&key) {
            *users -= 1;
            if *users == 0 && !has {
                state.owners.numbers.remove(&key);
            }
        }
    }

    /// `nlm4_lock`.
    fn put(&self, out: &mut Out, file: &Locked, lock: &Lock, number: u32) {
        let owner = format!("{:08x}{:x}{:016x}", self.own, lock.space as u8, lock.owner);
        // 0: however far the file grows.
        let len = if lock.end >= LOCK_END { 0 } else { lock.end - lock.start + 1 };
        out.bytes(self.caller.as_bytes()).bytes(&file.fh.0).bytes(owner.as_bytes());
        out.u32(number).u64(lock.start).u64(len);
    }

    /// One request; what it answers, and what is behind that.
    fn ask<T>(
        &self,
        number: u32,
        cred: &Cred,
        out: &mut Out,
        read: impl Fn(u32, &mut In<'_>) -> std::result::Result<T, Garbage>,
    ) -> Result<(u32, T)> {
        let link = self.link()?;
        let what = Procedure { program: NLM, version: 4, number };
        let said = link.call(what, cred, out.take()).inspect_err(|_| {
            if self.url.lock_port.is_none() && link.trouble().is_some() {
                // A server that has begun anew may have its locks at another port: it is asked for again.
                let mut state = self.state();
                if state.link.as_ref().is_some_and(|l| std::sync::Arc::ptr_eq(l, &link)) {
                    (state.link, state.breaks) = (None, None);
                }
            }
        })?;
        let mut rest = In::new(&said.results);
        let answer = rest.bytes(1024).and_then(|_cookie| rest.u32());
        let answer = answer.and_then(|status| Ok((status, read(status, &mut rest)?)));
        answer.map_err(|Garbage| {
            log::warn!("{link:?}: what it answers about a lock is no answer");
            Errno::IO
        })
    }

    fn ask_for(&self, file: &Locked, lock: &Lock, number: u32, reclaim: bool) -> Result<u32> {
        let mut out = Out::default();
        out.bytes(b"");
        let procedure = if lock.kind == LockKind::None {
            self.put(&mut out, file, lock, number);
            UNLOCK
        } else {
            out.flag(false).flag(lock.kind == LockKind::Write);
            self.put(&mut out, file, lock, number);
            out.flag(reclaim).u32(1);
            LOCK
        };
        let status = self.ask(procedure, &file.cred, &mut out, |_, _| Ok(()));
        status.map(|(status, ())| status)
    }

    /// Locks or unlocks, without waiting.
    ///
    /// # Errors
    /// EAGAIN: somebody else's bars it. ENOLCK: the server has no locks (any more).
    pub fn lock(&self, file: &Locked, lock: &Lock) -> Result<()> {
        let number = self.number(lock);
        let gives_up = lock.kind == LockKind::None;
        if gives_up {
            // Whatever comes of it: nobody has it any more, so that it is not asked for again.
            self.state().held.note(file, lock);
        }
        let done = self.lock_as(file, lock, number);
        match &done {
            Ok(()) if !gives_up => self.state().held.note(file, lock),
            Err(_) if gives_up => self.note_given_up(file, lock),
            _ => {}
        }
        // Its number is forgotten with its last lock.
        self.leave(lock);
        done
    }

    fn lock_as(&self, file: &Locked, lock: &Lock, number: u32) -> Result<()> {
        if lock.kind != LockKind::None && self.state().held.is_full() {
            return Err(Errno::NOLCK);
        }
        let begun = Instant::now();
        loop {
            match self.ask_for(file, lock, number, false)? {
                GRANTED => return Ok(()),
                GRACE if begun.elapsed() < self.url.patience => std::thread::sleep(LATER),
                status => return Err(errno(status)),
            }
        }
    }

    /// A lock that bars this one.
    ///
    /// # Errors
    /// The server says none.
    pub fn test(&self, file: &Locked, lock: &Lock) -> Result<Option<Lock>> {
        let number = self.number(lock);
        let mut out = Out::default();
        out.bytes(b"").flag(lock.kind == LockKind::Write);
        self.put(&mut out, file, lock, number);
        let answer = self.ask(TEST, &file.cred, &mut out, |status, read| {
            if status != DENIED {
                return Ok(None);
            }
            let exclusive = read.flag()?;
            let _number = read.u32()?;
            read.bytes(1024)?;
            let (start, len) = (read.u64()?, read.u64()?);
            Ok(Some((exclusive, start, len)))
        });
        self.leave(lock);
        match answer? {
            (GRANTED, _) => Ok(None),
            (DENIED, Some((exclusive, start, len))) => {
                let kind = if exclusive { LockKind::Write } else { LockKind::Read };
                let start = start.min(LOCK_END);
                let end = match len {
                    0 => LOCK_END,
                    len => start.saturating_add(len - 1).min(LOCK_END),
                };
                Ok(Some(Lock { kind, start, end, pid: 0, ..*lock }))
            }
            (status, _) => Err(errno(status)),
        }
    }

    /// Gets all locks back where the connection was lost.
    pub fn tend(&self) {
        let given_up = std::mem::take(&mut self.state().given_up);
        for (file, lock) in given_up {
            self.give_up(&file, &lock);
        }
        if self.state().held.is_empty() {
            return;
        }
        let Ok(link) = self.link() else { return };
        let breaks = link.breaks();
        let held = {
            let state = self.state();
            if state.breaks == Some(breaks) {
                return;
            }
            state.held.all()
        };
        for (file, lock) in held {
            if !self.state().held.holds(&file, &lock) {
                // Given up meanwhile.
                continue;
            }
            // In its grace period it takes only what is asked for back; after that it knows no difference.
            let number = self.number(&lock);
            let status = match self.ask_for(&file, &lock, number, true) {
                Ok(GRANTED) => Ok(GRANTED),
                _ => self.ask_for(&file, &lock, number, false),
            };
            self.leave(&lock);
            match status {
                Ok(GRANTED) if self.state().held.holds(&file, &lock) => {}
                // Given up while it was asked for: it may have come after that.
                Ok(GRANTED) => self.give_up(&file, &lock),
                Err(error) => {
                    log::warn!("{}: getting locks back: {error:?}; goes on trying", self.url);
                    return;
                }
                Ok(GRACE) => return,
                Ok(status) => {
                    log::error!(
                        "{}: a lock is lost, the server has begun anew and somebody else has it ({:?})",
                        self.url,
                        errno(status)
                    );
                    self.state().held.lose(&file, &lock);
                }
            }
        }
        self.state().breaks = Some(breaks);
    }

    /// Tells the server of what nobody has any more, as far as its owner has not got it again.
    fn give_up(&self, file: &Locked, lock: &Lock) {
        let number = self.number(lock);
        let left = self.state().held.lacks(file, lock);
        for lock in left {
            let gone = Lock { kind: LockKind::None, ..lock };
            if let Err(error) = self.ask_for(file, &gone, number, false) {
                log::warn!("{}: giving a lock up: {error:?}; goes on trying", self.url);
                self.note_given_up(file, &gone);
            }
        }
        self.leave(lock);
    }

    fn note_given_up(&self, file: &Locked, lock: &Lock) {
        let given_up = &mut self.state().given_up;
        if given_up.len() < GIVEN_UP_MAX {
            given_up.push((file.clone(), *lock));
        }
    }

    /// Nothing more is asked.
    pub fn end(&self) {
        if let Some(link) = &self.state().link {
            link.end();
        }
    }
}

/// The number of an error, by the lock manager's.
fn errno(status: u32) -> Errno {
    match status {
        // DENIED, BLOCKED.
        DENIED | 3 => Errno::AGAIN,
        5 => Errno::DEADLK,
        6 => Errno::ROFS,
        7 => Errno::STALE,
        8 => Errno::FBIG,
        // DENIED_NOLOCKS, GRACE, FAILED.
        _ => Errno::NOLCK,
    }
}
