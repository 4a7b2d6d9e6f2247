//! What a server of version 4 keeps of us: who we are, which files it has open for us (to make them, or to lock them), and locks.
//!
//! An open has an owner of its own, so that none waits for another one, and is closed as soon as nothing is locked under it. Locks are kept
//! alive ([`States::tend`]), and asked for again where the server has forgotten them: as reclaimed while it is in its grace period. Where it is
//! not known what the server knows, we come as one who has begun anew, and it forgets all that was before.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::Errno;
use client::fs::{LOCK_END, Lock, LockKind, LockSpace, Result};

use crate::held::Held;
use crate::proto::{Facts, Fh, Locked, errno, is_later};
use crate::rpc::Cred;
use crate::v4::{Compound, Results, StateId, Wire, find, op, put_mode, skip_bitmap};
use crate::xdr::{Garbage, In};

/// What it answers.
const GRACE: u32 = 10_013;
const DENIED: u32 = 10_010;
const OPENMODE: u32 = 10_038;
/// Its grace period is over, or there is nothing to reclaim.
const NO_RECLAIM: [u32; 2] = [10_033, 10_034];
/// It knows our state no more, or not as we do: EXPIRED, `STALE_CLIENTID`, `STALE_STATEID`, `OLD_STATEID`, `BAD_STATEID`, `BAD_SEQID`.
const LOST: [u32; 6] = [10_011, 10_022, 10_023, 10_024, 10_025, 10_026];
/// Between two tries.
const LATER: Duration = Duration::from_millis(200);
/// Times that something is done again because the server had lost our state.
const TRIES: u32 = 4;

/// Access of an open: read, write.
const READ: u32 = 1;
const WRITE: u32 = 2;

/// Locks of one owner in one file.
#[derive(Debug)]
struct LockState {
    name: Vec<u8>,
    id: StateId,
    seq: u32,
}

/// A file that the server has open for us.
#[derive(Debug)]
struct Opened {
    id: StateId,
    seq: u32,
    locks: HashMap<(LockSpace, u64), LockState>,
    cred: Cred,
    reclaimed: bool,
}

#[derive(Debug)]
struct State {
    client: Option<u64>,
    /// Of this life of ours.
    life: u64,
    names: u64,
    renewed: Instant,
    breaks: u64,
    files: HashMap<Fh, Opened>,
    held: Held,
    /// What the server knows is not what is here.
    lost: bool,
}

/// All of it.
#[derive(Debug)]
pub struct States {
    own: String,
    lease: Duration,
    state: Mutex<State>,
}

/// What a server did, or the status with which it did not; or no answer.
type Tried<T> = Result<std::result::Result<T, u32>>;

/// How a file is opened.
#[derive(Clone, Copy)]
enum How<'a> {
    /// It is made, under a name; with a verifier, or with a mode.
    Make(&'a [u8], std::result::Result<u64, u32>),
    /// It is there, under a name.
    There(&'a [u8]),
    /// We had it open before the server began anew.
    Reclaim,
}

/// What an open answers.
struct Answer {
    id: StateId,
    confirm: bool,
    delegation: Option<StateId>,
    found: (Fh, Facts),
}

fn state_id(read: &mut In<'_>) -> std::result::Result<StateId, Garbage> {
    read.fixed(16)?.try_into().map_err(|_| Garbage)
}

/// `nfsace4`, of which nothing is used.
fn skip_ace(read: &mut In<'_>) -> std::result::Result<(), Garbage> {
    read.fixed(12)?;
    read.bytes(1024).map(drop)
}

fn opened(wire: &Wire, results: &mut Results<'_>) -> std::result::Result<Answer, Garbage> {
    results.op(op::PUTFH)?;
    let read = results.op(op::OPEN)?;
    let id = state_id(read)?;
    read.fixed(20)?;
    let flags = read.u32()?;
    skip_bitmap(read)?;
    let delegation = match read.u32()? {
        0 => None,
        1 => {
            let id = state_id(read)?;
            read.flag()?;
            skip_ace(read)?;
            Some(id)
        }
        2 => {
            let id = state_id(read)?;
            read.flag()?;
            read.fixed(12)?;
            skip_ace(read)?;
            Some(id)
        }
        _ => return Err(Garbage),
    };
    Ok(Answer { id, confirm: flags & 2 != 0, delegation, found: wire.found(results)? })
}

/// `nfs_lock_type4`.
fn kind(lock: &Lock) -> u32 {
    if lock.kind == LockKind::Write { 2 } else { 1 }
}

fn len(lock: &Lock) -> u64 {
    if lock.end >= LOCK_END { u64::MAX } else { lock.end - lock.start + 1 }
}

/// A lock that bars ours.
fn denied(read: &mut In<'_>, lock: &Lock) -> std::result::Result<Lock, Garbage> {
    let (start, len, kind) = (read.u64()?, read.u64()?, read.u32()?);
    let start = start.min(LOCK_END);
    let end = match len {
        0 | u64::MAX => LOCK_END,
        len => start.saturating_add(len - 1).min(LOCK_END),
    };
    let kind = if kind.is_multiple_of(2) { LockKind::Write } else { LockKind::Read };
    Ok(Lock { kind, start, end, pid: 0, ..*lock })
}

impl State {
    fn name(&mut self, own: &str) -> Vec<u8> {
        self.names += 1;
        format!("{own}-{:x}-{:x}", self.life, self.names).into_bytes()
    }

    /// Whether a status says that the server knows us no more; then we do not know what it knows.
    fn note(&mut self, status: u32) -> bool {
        let lost = LOST.contains(&status);
        self.lost |= lost;
        if lost {
            self.client = None;
        }
        lost
    }
}

impl States {
    /// The server knows nothing of us.
    pub fn new(lease: Duration) -> Self {
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
        let state = State {
            client: None,
            life: seed,
            names: 0,
            renewed: Instant::now(),
            breaks: 0,
            files: HashMap::new(),
            held: Held::default(),
            lost: false,
        };
        let own = format!("corbel-{seed:016x}-{:x}", std::process::id());
        Self { own, lease, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who we are to the server.
    fn client(&self, wire: &Wire, state: &mut State) -> Result<u64> {
        if let Some(client) = state.client {
            return Ok(client);
        }
        let mut ops = Compound::default();
        // Nobody listens for calls from the server, and it is told an address where nobody is: so it delegates nothing.
        let out = ops.op(op::SETCLIENTID).u64(state.life).bytes(self.own.as_bytes());
        out.u32(0).bytes(b"tcp").bytes(b"0.0.0.0.0.0").u32(0);
        let told = wire.once(&Cred::ROOT, &mut ops, false, &|_, results| {
            let read = results.op(op::SETCLIENTID)?;
            Ok((read.u64()?, read.eight()?))
        })?;
        let (client, confirm) = told.result.ok_or_else(|| errno(told.status))?;
        ops.op(op::SETCLIENTID_CONFIRM).u64(client).fixed(&confirm);
        let done = wire.once(&Cred::ROOT, &mut ops, false, &|_, _| Ok(()))?;
        if done.status != 0 {
            return Err(errno(done.status));
        }
        (state.client, state.renewed) = (Some(client), Instant::now());
        Ok(client)
    }

    /// Opens; what there is then. Nothing of us is locked for the length of it.
    fn open(
        &self,
        wire: &Wire,
        cred: &Cred,
        at: &Fh,
        access: u32,
        how: How<'_>,
        client: &mut dyn FnMut(Option<u32>) -> Result<(u64, Vec<u8>)>,
    ) -> Tried<(Opened, (Fh, Facts))> {
        let begun = Instant::now();
        let mut failed = None;
        let mut tries = 0;
        let answer = loop {
            let (id, owner) = client(failed.take())?;
            let mut ops = Compound::at(at);
            let out = ops.op(op::OPEN).u32(0).u32(access).u32(0).u64(id).bytes(&owner);
            match how {
                How::Make(_, Ok(verifier)) => {
                    out.u32(1).u32(2).u64(verifier);
                }
                How::Make(_, Err(mode)) => put_mode(out.u32(1).u32(1), mode),
                How::There(_) | How::Reclaim => {
                    out.u32(0);
                }
            }
            match how {
                How::Make(name, _) | How::There(name) => out.u32(0).bytes(name),
                How::Reclaim => out.u32(1).u32(0),
            };
            find(&mut ops);
            let done = wire.once(cred, &mut ops, false, &|_, results| opened(wire, results))?;
            tries += 1;
            match (done.result, done.status) {
                (Some(answer), _) => break answer,
                (None, GRACE) if matches!(how, How::Reclaim) => return Ok(Err(GRACE)),
                (None, status) if is_later(status) && begun.elapsed() + LATER < wire.patience => {
                    std::thread::sleep(LATER);
                }
                (None, status) if LOST.contains(&status) && tries < TRIES => failed = Some(status),
                (None, status) => return Ok(Err(status)),
            }
        };
        let Answer { mut id, confirm, delegation, found } = answer;
        let mut seq = 1;
        if let Some(id) = delegation {
            let mut ops = Compound::at(&found.0);
            ops.op(op::DELEGRETURN).fixed(&id);
            wire.once(cred, &mut ops, false, &|_, _| Ok(()))?;
        }
        if confirm {
            let mut ops = Compound::at(&found.0);
            ops.op(op::OPEN_CONFIRM).fixed(&id).u32(seq);
            seq += 1;
            let done = wire.once(cred, &mut ops, false, &|_, results| {
                results.op(op::PUTFH)?;
                state_id(results.op(op::OPEN_CONFIRM)?)
            })?;
            match done.result {
                Some(confirmed) => id = confirmed,
                None => return Ok(Err(done.status)),
            }
        }
        let reclaimed = matches!(how, How::Reclaim);
        let opened = Opened { id, seq, locks: HashMap::new(), cred: cred.clone(), reclaimed };
        Ok(Ok((opened, found)))
    }

    /// Closes. If that fails, the server forgets it in time.
    fn close(wire: &Wire, fh: &Fh, opened: &Opened) {
        let mut ops = Compound::at(fh);
        ops.op(op::CLOSE).u32(opened.seq).fixed(&opened.id);
        match wire.once(&opened.cred, &mut ops, false, &|_, _| Ok(())) {
            Ok(done) if done.status == 0 => {}
            Ok(done) => log::debug!("closing a file: {:?}", errno(done.status)),
            Err(error) => log::debug!("closing a file: {error:?}"),
        }
    }

    /// Makes a file.
    ///
    /// # Errors
    /// EEXIST: there is one; with `sure`, which was not made by this very request.
    pub fn create(
        &self,
        wire: &Wire,
        cred: &Cred,
        dir: &Fh,
        name: &[u8],
        mode: u32,
        sure: bool,
    ) -> Result<(Fh, Facts)> {
        let mark = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), name);
        let make = How::Make(name, if sure { Ok(mark) } else { Err(mode) });
        let mut client = |failed: Option<u32>| {
            let mut state = self.state();
            if let Some(status) = failed {
                state.note(status);
                // Locks are not at stake, or are asked for again by who tends them.
                state.lost &= !state.held.is_empty();
            }
            let id = self.client(wire, &mut state)?;
            Ok((id, state.name(&self.own)))
        };
        let made = self.open(wire, cred, dir, READ | WRITE, make, &mut client)?;
        let (opened, found) = made.map_err(errno)?;
        Self::close(wire, &found.0, &opened);
        Ok(found)
    }

    /// The file of a lock, open.
    fn open_to_lock(
        &self,
        wire: &Wire,
        state: &mut State,
        file: &Locked,
        kind: LockKind,
        reclaim: bool,
    ) -> Tried<()> {
        if state.files.contains_key(&file.fh) {
            return Ok(Ok(()));
        }
        let Some((dir, name)) = &file.named else {
            log::warn!("a file that is not known by a name cannot be locked over NFSv4");
            return Err(Errno::NOLCK);
        };
        let (at, how) = if reclaim { (&file.fh, How::Reclaim) } else { (dir, How::There(name)) };
        let own = if kind == LockKind::Write { WRITE } else { READ };
        // For both, so that other locks can be had under it; else for what this one needs.
        let mut last = 0;
        for access in [READ | WRITE, own] {
            let mut client = |failed: Option<u32>| {
                if let Some(status) = failed {
                    state.note(status);
                    return Err(Errno::IO);
                }
                let id = self.client(wire, state)?;
                Ok((id, state.name(&self.own)))
            };
            match self.open(wire, &file.cred, at, access, how, &mut client) {
                Ok(Ok((opened, (fh, _)))) if fh == file.fh => {
                    state.files.insert(fh, opened);
                    return Ok(Ok(()));
                }
                Ok(Ok((opened, (fh, _)))) => {
                    Self::close(wire, &fh, &opened);
                    log::warn!(
                        "a file that another client has renamed cannot be locked over NFSv4"
                    );
                    return Err(Errno::NOLCK);
                }
                Ok(Err(status)) => last = status,
                Err(error) => {
                    state.lost = true;
                    return Err(error);
                }
            }
            // ACCESS, ROFS.
            if !matches!(last, 13 | 30) {
                break;
            }
        }
        Ok(Err(last))
    }

    /// One LOCK under an open file: its status.
    fn ask(
        &self,
        wire: &Wire,
        state: &mut State,
        file: &Locked,
        lock: &Lock,
        reclaim: bool,
    ) -> Result<u32> {
        let client = self.client(wire, state)?;
        let name = state.name(&self.own);
        let key = (lock.space, lock.owner);
        let opened = state.files.get_mut(&file.fh).ok_or(Errno::NOLCK)?;
        let mut ops = Compound::at(&file.fh);
        let out = ops.op(op::LOCK).u32(kind(lock)).flag(reclaim).u64(lock.start).u64(len(lock));
        let known = opened.locks.get(&key).map(|known| (known.id, known.seq));
        match known {
            Some((id, seq)) => out.flag(false).fixed(&id).u32(seq),
            None => {
                out.flag(true).u32(opened.seq).fixed(&opened.id).u32(0).u64(client).bytes(&name)
            }
        };
        let done = wire.once(&file.cred, &mut ops, false, &|_, results| {
            results.op(op::PUTFH)?;
            state_id(results.op(op::LOCK)?)
        });
        let done = match done {
            Ok(done) => done,
            Err(error) => {
                state.lost = true;
                return Err(error);
            }
        };
        if state.note(done.status) {
            return Ok(done.status);
        }
        let opened = state.files.get_mut(&file.fh).ok_or(Errno::NOLCK)?;
        match (known, done.result) {
            (Some(_), result) => {
                if let Some(known) = opened.locks.get_mut(&key) {
                    known.seq += 1;
                    known.id = result.unwrap_or(known.id);
                }
            }
            (None, result) => {
                opened.seq += 1;
                if let Some(id) = result {
                    opened.locks.insert(key, LockState { name, id, seq: 1 });
                } else {
                    self.release(wire, state, &file.cred, &name);
                }
            }
        }
        Ok(done.status)
    }

    /// The server may forget an owner.
    fn release(&self, wire: &Wire, state: &mut State, cred: &Cred, name: &[u8]) {
        let Some(client) = state.client else { return };
        let mut ops = Compound::default();
        ops.op(op::RELEASE_LOCKOWNER).u64(client).bytes(name);
        if let Err(error) = wire.once(cred, &mut ops, false, &|_, _| Ok(())) {
            log::debug!("an owner of locks is left: {error:?}");
        }
    }

    /// What has no locks any more is closed.
    fn tidy(&self, wire: &Wire, state: &mut State, fh: &Fh) {
        if state.lost {
            return;
        }
        let Some(mut opened) = state.files.remove(fh) else { return };
        let (space_owner, held) = (opened.locks.keys().copied().collect::<Vec<_>>(), &state.held);
        let idle = space_owner
            .into_iter()
            .filter(|(space, owner)| !held.has(&(*space, *owner, fh.clone())))
            .collect::<Vec<_>>();
        let cred = opened.cred.clone();
        let gone: Vec<LockState> = idle.iter().filter_map(|key| opened.locks.remove(key)).collect();
        gone.iter().for_each(|known| self.release(wire, state, &cred, &known.name));
        if opened.locks.is_empty() {
            Self::close(wire, fh, &opened);
        } else {
            state.files.insert(fh.clone(), opened);
        }
    }

    /// Locks or unlocks, without waiting.
    ///
    /// # Errors
    /// EAGAIN: somebody else's bars it. ENOLCK: there are none to be had.
    pub fn lock(&self, wire: &Wire, file: &Locked, lock: &Lock) -> Result<()> {
        let mut guard = self.state();
        let state = &mut *guard;
        if lock.kind == LockKind::None {
            // Whatever comes of it: nobody has it any more, so that it is not asked for again.
            state.held.note(file, lock);
            if state.lost && self.recover(wire, state).is_err() {
                // The server forgets what it had of us, or has.
                return Ok(());
            }
        } else if state.lost {
            self.recover(wire, state)?;
        }
        let done = if lock.kind == LockKind::None {
            self.unlock(wire, state, file, lock)
        } else if state.held.is_full() {
            Err(Errno::NOLCK)
        } else {
            self.take(wire, state, file, lock)
        };
        self.tidy(wire, state, &file.fh);
        done
    }

    fn unlock(&self, wire: &Wire, state: &mut State, file: &Locked, lock: &Lock) -> Result<()> {
        let key = (lock.space, lock.owner);
        let known = state.files.get_mut(&file.fh).and_then(|opened| opened.locks.get_mut(&key));
        let Some(known) = known else { return Ok(()) };
        let mut ops = Compound::at(&file.fh);
        let out = ops.op(op::LOCKU).u32(1).u32(known.seq).fixed(&known.id);
        out.u64(lock.start).u64(len(lock));
        let done = wire.once(&file.cred, &mut ops, false, &|_, results| {
            results.op(op::PUTFH)?;
            state_id(results.op(op::LOCKU)?)
        });
        known.seq += 1;
        if let Ok(done) = &done {
            known.id = done.result.unwrap_or(known.id);
        }
        // Without an answer it forgets all that we have, and gets the rest anew.
        match done {
            Ok(done) if done.status == 0 || state.note(done.status) => Ok(()),
            Ok(done) => {
                state.lost = true;
                Err(errno(done.status))
            }
            Err(error) => {
                state.lost = true;
                Err(error)
            }
        }
    }

    fn take(&self, wire: &Wire, state: &mut State, file: &Locked, lock: &Lock) -> Result<()> {
        let (begun, mut reopened) = (Instant::now(), false);
        for _ in 0..TRIES {
            let key = (lock.space, lock.owner);
            let known =
                state.files.get(&file.fh).is_some_and(|opened| opened.locks.contains_key(&key));
            // Who waits shall not have a file opened and closed for each time that it asks.
            if !known && self.ask_who(wire, state, file, lock)?.is_some() {
                return Err(Errno::AGAIN);
            }
            let status = loop {
                let status = match self.open_to_lock(wire, state, file, lock.kind, false)? {
                    Ok(()) => self.ask(wire, state, file, lock, false)?,
                    Err(status) => status,
                };
                if !is_later(status) || begun.elapsed() + LATER > wire.patience {
                    break status;
                }
                std::thread::sleep(LATER);
            };
            match status {
                0 => {
                    state.held.note(file, lock);
                    return Ok(());
                }
                // The file is open for us, but not for that: on behalf of somebody who may only read it. Without locks it is opened anew.
                OPENMODE if !state.held.has_file(&file.fh) && !reopened => {
                    reopened = true;
                    self.tidy(wire, state, &file.fh);
                }
                OPENMODE => {
                    log::warn!(
                        "a file with locks of who may only read it cannot be locked to write over NFSv4"
                    );
                    return Err(Errno::NOLCK);
                }
                // The name by which it was known leads nowhere: another client has renamed it.
                2 => return Err(Errno::NOLCK),
                status if LOST.contains(&status) => self.recover(wire, state)?,
                status => return Err(errno(status)),
            }
        }
        Err(Errno::NOLCK)
    }

    /// A lock that bars this one.
    ///
    /// # Errors
    /// The server says none.
    pub fn test(&self, wire: &Wire, file: &Locked, lock: &Lock) -> Result<Option<Lock>> {
        self.ask_who(wire, &mut self.state(), file, lock)
    }

    fn ask_who(
        &self,
        wire: &Wire,
        state: &mut State,
        file: &Locked,
        lock: &Lock,
    ) -> Result<Option<Lock>> {
        let begun = Instant::now();
        let mut tries = 0;
        loop {
            let client = self.client(wire, state)?;
            let key = (lock.space, lock.owner);
            let opened = state.files.get(&file.fh);
            let name = opened.and_then(|opened| opened.locks.get(&key)).map(|l| l.name.clone());
            let name = name.unwrap_or_else(|| state.name(&self.own));
            let mut ops = Compound::at(&file.fh);
            let out = ops.op(op::LOCKT).u32(kind(lock)).u64(lock.start).u64(len(lock));
            out.u64(client).bytes(&name);
            let done = wire.once(&file.cred, &mut ops, true, &|_, results| {
                let (status, _) = results.any(op::PUTFH)?;
                if status != 0 {
                    return Ok(None);
                }
                let (status, read) = results.any(op::LOCKT)?;
                if status == DENIED { denied(read, lock).map(Some) } else { Ok(None) }
            })?;
            tries += 1;
            match done.status {
                0 => return Ok(None),
                DENIED => return Ok(done.result.flatten()),
                status if is_later(status) && begun.elapsed() + LATER < wire.patience => {
                    std::thread::sleep(LATER);
                }
                status if state.note(status) && tries < TRIES => {
                    if !state.held.is_empty() {
                        self.recover(wire, state)?;
                    }
                }
                status => return Err(errno(status)),
            }
        }
    }

    /// We come anew, and get all locks back.
    fn recover(&self, wire: &Wire, state: &mut State) -> Result<()> {
        state.files.clear();
        state.client = None;
        state.lost = true;
        // It forgets what it knows of our last life.
        state.life = state.life.wrapping_add(1);
        let breaks = wire.link.breaks();
        for (file, lock) in state.held.all() {
            let reclaims = state.files.get(&file.fh).is_none_or(|opened| opened.reclaimed);
            let mut status = u32::MAX;
            for reclaim in [true, false] {
                if reclaim && !reclaims {
                    continue;
                }
                status = match self.open_to_lock(wire, state, &file, lock.kind, reclaim) {
                    Ok(Ok(())) => self.ask(wire, state, &file, &lock, reclaim)?,
                    Ok(Err(status)) => status,
                    // Not to be found under its name any more.
                    Err(Errno::NOLCK) => DENIED,
                    Err(error) => return Err(error),
                };
                if !NO_RECLAIM.contains(&status) {
                    break;
                }
            }
            match status {
                0 => {}
                status if is_later(status) || LOST.contains(&status) => return Err(Errno::AGAIN),
                status => {
                    log::error!(
                        "a lock is lost: the server has begun anew and does not give it back ({:?})",
                        errno(status)
                    );
                    state.held.lose(&file, &lock);
                }
            }
        }
        (state.lost, state.breaks, state.renewed) = (false, breaks, Instant::now());
        Ok(())
    }

    /// Keeps locks alive, and gets back those that the server has forgotten.
    pub fn tend(&self, wire: &Wire) {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.held.is_empty() {
            return;
        }
        let breaks = wire.link.breaks();
        let quiet = state.breaks == breaks && state.renewed.elapsed() < self.lease / 3;
        if !state.lost && quiet {
            return;
        }
        if !state.lost {
            let Some(client) = state.client else {
                state.lost = true;
                return;
            };
            let mut ops = Compound::default();
            ops.op(op::RENEW).u64(client);
            match wire.once(&Cred::ROOT, &mut ops, false, &|_, _| Ok(())) {
                // CB_PATH_DOWN: it cannot call us, which it need not.
                Ok(done) if matches!(done.status, 0 | 10_048) => {
                    (state.renewed, state.breaks) = (Instant::now(), breaks);
                    return;
                }
                Ok(done) if !state.note(done.status) => {
                    log::warn!("keeping locks alive: {:?}", errno(done.status));
                    return;
                }
                Ok(_) => {}
                Err(error) => {
                    log::warn!("keeping locks alive: {error:?}");
                    return;
                }
            }
        }
        if let Err(error) = self.recover(wire, state)
            && error != Errno::AGAIN
        {
            log::warn!("getting locks back: {error:?}; goes on trying");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xdr::Out;

    #[test]
    fn a_lock_that_bars_is_read() {
        let ours = Lock {
            space: LockSpace::Record,
            kind: LockKind::Read,
            owner: 1,
            pid: 5,
            start: 0,
            end: 9,
        };
        let mut out = Out::default();
        let bytes = out.u64(3).u64(u64::MAX).u32(4).take();
        let theirs = denied(&mut In::new(&bytes), &ours).unwrap();
        assert_eq!(
            (theirs.kind, theirs.start, theirs.end, theirs.pid),
            (LockKind::Write, 3, LOCK_END, 0)
        );
        let bytes = out.u64(u64::MAX).u64(7).u32(1).take();
        let theirs = denied(&mut In::new(&bytes), &ours).unwrap();
        assert_eq!((theirs.kind, theirs.start, theirs.end), (LockKind::Read, LOCK_END, LOCK_END));
    }

    #[test]
    fn an_owners_range_to_the_end_has_all_ones() {
        let lock = Lock::all_of(LockSpace::Record, 1);
        assert_eq!((len(&lock), len(&Lock { end: 9, ..lock })), (u64::MAX, 10));
    }
}
