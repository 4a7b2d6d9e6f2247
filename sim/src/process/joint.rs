//! Operations on the names of directories that several processes use jointly (`storage::format::control`, "Joint"). Of
//! these the append is not yet the moment at which they are so: it is the one at which the head puts the chunk that holds them into
//! its ring. So they wait here until a chunk says what became of them: it holds them, and they change the model, in the
//! order of the stream; or it settles them and does not hold them, and they never were, for which there must be a reason in what is so
//! then. A head that is lost before anybody has its chunk takes its word back, and the next one judges anew.
//!
//! Whether those who did them are told is asked when their calls come back: who is told that it is done has been judged, and
//! it stays so; who is told that it did not fit has done nothing.

use base::{Epoch, StreamSeq};
use service::core::entries;
use storage::format::chunk::ChunkHeader;
use storage::format::control::LeaseMode;
use storage::format::entry::Header;

use super::call::Reply;
use super::*;
use crate::model::Made;

/// What became of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// No chunk has said it.
    Waits,
    /// It is so from this chunk on.
    Taken(StreamSeq),
    /// It never was, says this chunk.
    Untaken(StreamSeq),
    /// Only the ring of a head that has been replaced has it.
    Stale,
}

/// An operation of a process.
#[derive(Debug)]
struct Done {
    /// Who did it, and in which session.
    actor: usize,
    session: usize,
    /// The entry as it lies in the log.
    bytes: Vec<u8>,
    incarnation: u32,
    fate: Fate,
    /// Versions that it has made.
    made: Vec<Made>,
    /// Its call has said that it is done.
    returned: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Jointly {
    /// Chunks that were heard.
    stream: BTreeMap<StreamSeq, Epoch>,
    done: BTreeMap<(ClientId, u64), Done>,
    /// The epoch of the last head that has begun.
    epoch: Epoch,
}

/// The directories in which an operation makes or removes names.
fn directories(op: &Op<'_>) -> Vec<u64> {
    match *op {
        Op::Create { parent, .. }
        | Op::Link { parent, .. }
        | Op::Unlink { parent, .. }
        | Op::Rmdir { parent, .. } => vec![parent.0],
        Op::Rename { parent, new_parent, .. } => vec![parent.0, new_parent.0],
        _ => Vec::new(),
    }
}

impl World<'_> {
    /// Whether what a process has just appended counts only if it is taken: the lease that it was given last on one of the
    /// directories is joint. (It may be on its way back by now.)
    pub(super) fn counts_if_taken(&self, c: usize, op: &Op<'_>) -> bool {
        let last = self.actors[c].process.as_ref().and_then(|p| p.attached.last());
        let jointly = |dir| last.is_some_and(|a| a.given.1.get(dir) == Some(&LeaseMode::Joint));
        self.preset.shares() && directories(op).iter().any(jointly)
    }

    /// A node may have granted leases.
    pub(super) fn look_at_grants(&mut self, n: usize) {
        let now = self.model.now();
        let actors = self.actors.iter_mut().filter(|a| a.node == n);
        let last = actors.filter_map(|a| a.process.as_mut()?.attached.last_mut());
        last.for_each(|attached| attached.look_at_grants(now));
    }

    /// A process has appended one that counts if it is taken.
    pub(super) fn note_joint(
        &mut self,
        (c, t): (usize, usize),
        attached: &Attached,
        header: &Header,
        bytes: Vec<u8>,
    ) {
        let key = (attached.client, header.sequence.0);
        let done = Done {
            actor: c,
            session: attached.session,
            bytes,
            incarnation: attached.descriptor.incarnation,
            fate: Fate::Waits,
            made: Vec::new(),
            returned: false,
        };
        self.jointly.done.insert(key, done);
        self.outcome.joint += 1;
        if let Some(under_way) = self.thread(c, t).and_then(|t| t.under_way.as_mut()) {
            // It counts for the call when it is taken.
            under_way.entries -= 1;
            under_way.joint.push(key);
        }
    }

    /// A chunk is in a ring.
    pub(super) fn hear_joint(&mut self, header: &ChunkHeader, body: &[u8]) -> Result<(), String> {
        let (at, client) = (header.stream_seq, header.client);
        let last = self.jointly.epoch;
        match self.jointly.stream.get(&at).copied() {
            Some(epoch) if epoch == header.epoch => return Ok(()),
            known if known.unwrap_or(last) > header.epoch => {
                // What a head that has been replaced tells its own clients.
                let Jointly { done, .. } = &mut self.jointly;
                for (_, done) in done.range_mut((client, 0)..=(client, header.last_seq.0)) {
                    if done.fate == Fate::Waits {
                        done.fate = Fate::Stale;
                    }
                }
                return Ok(());
            }
            Some(_) => self.unsay_joint(at)?,
            None => {}
        }
        self.jointly.stream.insert(at, header.epoch);
        if header.is_farewell() {
            return Ok(());
        }
        let waits = |done: &Done| matches!(done.fate, Fate::Waits | Fate::Stale);
        let settled = self.jointly.done.range((client, 0)..=(client, header.last_seq.0));
        let settled: Vec<u64> =
            settled.filter(|(_, done)| waits(done)).map(|((_, seq), _)| *seq).collect();
        if settled.is_empty() {
            return Ok(());
        }
        // (The service adds entries of its own under the same number: what is freed.)
        let taken: BTreeMap<u64, (Header, Op<'_>)> = entries(body, header.incarnation)
            .filter_map(Result::ok)
            .filter(|(.., op)| !directories(op).is_empty())
            .map(|(_, header, op)| (header.sequence.0, (header, op)))
            .collect();
        for seq in settled {
            let Some(done) = self.jointly.done.get(&(client, seq)) else { continue };
            let (bytes, incarnation) = (done.bytes.clone(), done.incarnation);
            let (entry, op) = entry::decode(&bytes, incarnation)
                .map_err(|e| format!("{client:?}: {seq}: {e}"))?;
            let refused = header.refused.0 == seq
                || header.refusals > 0 && effects::effects(&self.model, &op, entry.time).is_err();
            match taken.get(&seq) {
                Some((entry, op)) => self.take_joint((client, seq), at, entry, op)?,
                None if refused => self.untake_joint((client, seq), header, (&entry, &op))?,
                // What undoes itself in one chunk is not in it.
                None => self.take_joint((client, seq), at, &entry, &op)?,
            }
        }
        Ok(())
    }

    /// A node is the head in a new epoch: what it has not got is no more.
    pub(super) fn look_at_head(&mut self, n: usize) -> Result<(), String> {
        let Some(node) = &self.hosts[n].node else { return Ok(()) };
        if node.role() != service::core::Role::Head {
            return Ok(());
        }
        let (status, position) = (node.status(), node.position());
        if !status.ready || status.epoch <= self.jointly.epoch {
            return Ok(());
        }
        self.jointly.epoch = status.epoch;
        self.unsay_joint(StreamSeq(position.0 + 1))
    }

    /// It is so from now on.
    fn take_joint(
        &mut self,
        (client, seq): (ClientId, u64),
        at: StreamSeq,
        header: &Header,
        op: &Op<'_>,
    ) -> Result<(), String> {
        let Some(done) = self.jointly.done.get_mut(&(client, seq)) else { return Ok(()) };
        done.fate = Fate::Taken(at);
        let (c, session, mut made) = (done.actor, done.session, std::mem::take(&mut done.made));
        let changes = effects::effects(&self.model, op, header.time);
        let mut changes = match changes {
            // What stayed of it when it was judged before, and more was done after.
            Err(_) if !made.is_empty() => Vec::new(),
            changes => changes.map_err(|e| {
                let what = brief(op);
                format!("client {c} {client:?}: {seq} {what} is taken, and cannot be: {e}")
            })?,
        };
        self.trace(|| format!("client {c}: {seq} {} is taken", brief(op)));
        changes.retain(|(ino, _)| made.iter().all(|one| one.ino != *ino));
        made.iter().for_each(|one| self.model.firm(session, seq, one.at, true));
        made.extend(self.model.took(session, seq, changes));
        if let Some(done) = self.jointly.done.get_mut(&(client, seq)) {
            done.made = made;
        }
        self.each_call_of(c, (client, seq), |u| u.entries += 1);
        Ok(())
    }

    /// It never was.
    fn untake_joint(
        &mut self,
        (client, seq): (ClientId, u64),
        header: &ChunkHeader,
        (entry, op): (&Header, &Op<'_>),
    ) -> Result<(), String> {
        let Some(done) = self.jointly.done.get_mut(&(client, seq)) else { return Ok(()) };
        let (c, session, returned) = (done.actor, done.session, done.returned);
        done.fate = Fate::Untaken(header.stream_seq);
        let what = brief(op);
        self.outcome.untaken += 1;
        self.trace(|| format!("client {c}: {seq} {what} is not taken"));
        let why = |text: &str| Err(format!("client {c} {client:?}: {seq} {what}: {text}"));
        if returned && self.model.is_alive(session) {
            return why("is not taken, and its call had said that it was done");
        }
        if effects::effects(&self.model, op, entry.time).is_ok() {
            let errno = header.errno;
            return why(&format!("is not taken ({errno}), and would fit"));
        }
        if let Op::Create { ino, .. } = *op {
            self.each_call_of(c, (client, seq), |u| {
                u.made.take_if(|made| *made == ino.0);
            });
        }
        Ok(())
    }

    /// The call that has done it, if it has not come back.
    fn each_call_of(
        &mut self,
        c: usize,
        key: (ClientId, u64),
        mut tell: impl FnMut(&mut UnderWay),
    ) {
        let threads = self.process(c).into_iter().flat_map(|p| &mut p.threads);
        let calls = threads.filter_map(|t| t.under_way.as_mut());
        calls.filter(|u| u.joint.contains(&key)).for_each(&mut tell);
    }

    /// The head that said it is gone, and its word with it: all from there on is judged anew.
    fn unsay_joint(&mut self, from: StreamSeq) -> Result<(), String> {
        if self.jointly.stream.range(from..).next().is_none() {
            return Ok(());
        }
        self.trace(|| format!("the stream begins anew at {from}"));
        self.jointly.stream.retain(|at, _| *at < from);
        let said = |done: &Done| match done.fate {
            Fate::Taken(at) | Fate::Untaken(at) if at >= from => Some(at),
            _ => None,
        };
        let mut all: Vec<(StreamSeq, (ClientId, u64))> = self
            .jointly
            .done
            .iter()
            .filter_map(|(key, done)| said(done).map(|at| (at, *key)))
            .collect();
        all.sort_by_key(|(at, (client, seq))| std::cmp::Reverse((*at, *client, *seq)));
        for (_, key) in all {
            let Some(done) = self.jointly.done.get_mut(&key) else { continue };
            let (c, session, taken) =
                (done.actor, done.session, matches!(done.fate, Fate::Taken(_)));
            done.fate = Fate::Waits;
            let made = std::mem::take(&mut done.made);
            done.made = self.model.untook(session, key.1, made);
            if taken {
                self.each_call_of(c, key, |u| u.entries -= 1);
            }
            self.outcome.unsaid += 1;
        }
        Ok(())
    }

    /// A call has come back: what it says of what was taken, and was not.
    pub(super) fn judge_joint(
        &mut self,
        c: usize,
        u: &UnderWay,
        reply: &Reply,
    ) -> Result<(), String> {
        for (client, seq) in &u.joint {
            let lives = self.lives(c, *client);
            let Some(done) = self.jointly.done.get_mut(&(*client, *seq)) else { continue };
            done.returned |= reply.is_ok() && matches!(done.fate, Fate::Taken(_));
            match (done.fate, reply) {
                (Fate::Waits, _) if lives => {
                    return Err(format!("comes back when {seq} is not judged"));
                }
                (Fate::Taken(_), Err(errno)) if lives => {
                    return Err(format!("fails with {errno:?}, and {seq} was taken"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether a call was judged by a head that had been replaced, and could not know: its leases counted still. What it says then
    /// goes with its session, like all that is not synced.
    pub(super) fn is_of_past_head(&self, c: usize, u: &UnderWay) -> bool {
        let stale = |key| self.jointly.done.get(key).is_some_and(|done| done.fate == Fate::Stale);
        u.joint.iter().any(stale) && self.is_in_time(c)
    }

    /// Whether a process has that session still.
    pub(super) fn lives(&self, c: usize, client: ClientId) -> bool {
        let host = &self.hosts[self.actors[c].node];
        let last = self.actors[c].process.as_ref().and_then(|p| p.attached.last());
        !host.gone
            && last.is_some_and(|a| {
                a.client == client
                    && !a.ended
                    && a.memory.peek(control::STATE) == control::STATE_ATTACHED
            })
    }

    /// In the end: what was said to be done, by those who live or did sync, is done.
    pub(crate) fn judge_joint_lost(&self) -> Result<(), String> {
        for ((client, seq), done) in &self.jointly.done {
            let lost = matches!(done.fate, Fate::Waits | Fate::Untaken(_));
            let counts = done.returned && self.model.is_alive(done.session)
                || self.model.is_vouched(done.session, *seq) && done.fate == Fate::Waits;
            if lost && counts {
                let c = done.actor;
                return Err(format!("client {c} {client:?}: {seq} was done, and is lost"));
            }
        }
        Ok(())
    }
}
