//! What became of the operations of processes where some may be refused: on a volume that runs full, or under limits.
//!
//! A call has often returned when the head judges what it did. What the head took is in its chunk, and what that settles
//! and does not hold was refused; so each verdict is known at the moment at which it is given. What was refused never
//! was: the model forgets it, and does again what the same client did since. Whether it may have been refused is asked
//! here; whether those are told who must hear of it, at the end of each call:
//!
//! - A write, an allocation, a clone or a shift of blocks that says it is done is done, for good.
//! - What else is refused later is said by the next fsync or write through each file that was open when it came to light.
//! - Nobody is told for whom all was judged before, or done afterwards, and nobody twice.
//!
//! Until then the process may see what it did itself, and not afterwards.

use base::{Epoch, StreamSeq};
use service::core::entries;
use storage::format::chunk::ChunkHeader;
use storage::format::entry::Header;

use super::call::Call;
use super::*;

/// What the stream says of one client's operations.
#[derive(Debug)]
struct Said {
    epoch: Epoch,
    client: ClientId,
    /// They are settled up to here.
    upto: u64,
}

/// An operation of a process.
#[derive(Debug)]
struct Done {
    /// The entry as it lies in the log.
    bytes: Vec<u8>,
    /// The model's time.
    at: u64,
    inos: Vec<u64>,
    promised: bool,
    /// The last refusal that its process could see when the call began.
    seen: u64,
    /// It follows from one that was refused, and cannot be.
    void: bool,
    /// Where the stream says it, and whether it was taken.
    verdict: Option<(StreamSeq, bool)>,
    /// Its call has returned: whether it said that this was done, for good.
    returned: Returned,
}

/// What the call has said of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Returned {
    /// Nothing yet, or nothing that counts.
    Not,
    /// That it is in the log: what becomes of it is told later.
    Later,
    /// That it is done.
    Done,
    /// That there was no space.
    Refused,
}

/// All operations of one attachment.
#[derive(Debug)]
struct Journal {
    actor: usize,
    session: usize,
    incarnation: u32,
    done: BTreeMap<u64, Done>,
}

impl Journal {
    /// The operations behind one, up to another, that were refused.
    fn refused(&self, from: u64, upto: u64) -> impl Iterator<Item = (&u64, &Done)> {
        let all = self.done.range(from + 1..).take_while(move |(seq, _)| **seq <= upto);
        all.filter(|(_, done)| matches!(done.verdict, Some((_, false))))
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Verdicts {
    stream: BTreeMap<StreamSeq, Said>,
    journals: BTreeMap<ClientId, Journal>,
    /// What accounts use.
    pub(crate) ledger: super::ledger::Ledger,
}

/// What an open file was told of.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Told {
    /// The session it is about.
    session: usize,
    /// Refusals up to here are told for certain, or need not be ...
    surely: u64,
    /// ... and up to here perhaps.
    perhaps: u64,
    /// What was done to the file up to here is judged, or was told of.
    clean: u64,
}

/// What a process may know of an inode that never was.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taint {
    session: usize,
    /// Calls that began later see what is so.
    until: Nanos,
    /// The last operation that was refused.
    seq: u64,
}

impl World<'_> {
    /// A process does something.
    pub(super) fn note_done(
        &mut self,
        (c, t): (usize, usize),
        attached: &Attached,
        header: &Header,
        op: &Op<'_>,
        (bytes, void): (Vec<u8>, bool),
    ) {
        if !self.preset.doubts() || matches!(op, Op::Pad) {
            return;
        }
        let at = self.model.now();
        let under_way = self.thread(c, t).and_then(|t| t.under_way.as_mut());
        let Some(under_way) = under_way else { return };
        under_way.own.push((attached.client, header.sequence.0));
        let seen = if under_way.current == Some(attached.session) { under_way.refused } else { 0 };
        let done = Done {
            bytes,
            at,
            inos: effects::touched(op),
            promised: header.promised > 0,
            seen,
            void,
            verdict: None,
            returned: Returned::Not,
        };
        let journal = self.verdicts.journals.entry(attached.client).or_insert_with(|| Journal {
            actor: c,
            session: attached.session,
            incarnation: attached.descriptor.incarnation,
            done: BTreeMap::new(),
        });
        journal.done.insert(header.sequence.0, done);
    }

    /// A node may have put chunks into its ring.
    pub(crate) fn look_at_verdicts(&mut self, n: usize) -> Result<(), String> {
        if !self.preset.hears() {
            return Ok(());
        }
        self.hosts[n].collect();
        for (header, body) in std::mem::take(&mut self.hosts[n].chunks) {
            self.trace(|| {
                let ChunkHeader { epoch, stream_seq, client, last_seq, entries, refusals, .. } = header;
                format!(
                    "chunk {}: {stream_seq} epoch {epoch} {:#x} up to {last_seq}: {entries} taken, {refusals} refused",
                    n + 1,
                    client.0
                )
            });
            let heard = match self.preset.doubts() {
                true => self.hear(&header, &body),
                false => self.hear_joint(&header, &body),
            };
            heard.map_err(|e| format!("node {} says: {e}", n + 1))?;
        }
        if self.preset.shares() {
            self.look_at_grants(n);
            self.look_at_head(n)?;
        }
        Ok(())
    }

    /// What a chunk says.
    fn hear(&mut self, header: &ChunkHeader, body: &[u8]) -> Result<(), String> {
        let (at, client) = (header.stream_seq, header.client);
        let newest = self.verdicts.stream.range(..=at).next_back();
        match newest.map(|(newest, said)| (*newest, said.epoch)) {
            // A node that was away still has what its head had made beyond the place where the others went on without it (seed 9505445);
            // epochs only grow.
            Some((_, epoch)) if epoch > header.epoch => return Ok(()),
            Some((newest, epoch)) if newest == at && epoch == header.epoch => return Ok(()),
            Some((newest, _)) if newest == at => self.unsay(at)?,
            _ => {}
        }
        let before = self.verdicts.stream.values().filter(|said| said.client == client);
        let before = before.map(|said| said.upto).max().unwrap_or(0);
        let upto = header.last_seq.0;
        self.verdicts.stream.insert(at, Said { epoch: header.epoch, client, upto });
        let barred = self.weigh(header, body, before)?;
        let Some(journal) = self.verdicts.journals.get_mut(&client) else { return Ok(()) };
        if header.is_farewell() || upto <= before {
            return Ok(());
        }
        let taken: Vec<u64> = entries(body, header.incarnation)
            .filter_map(|entry| entry.ok().map(|(_, header, _)| header.sequence.0))
            .collect();
        let judged = journal.done.range(before + 1..=upto).map(|(seq, _)| *seq);
        let (judged, refused): (Vec<u64>, Vec<u64>) = judged.partition(|seq| taken.contains(seq));
        if refused.len() != header.refusals as usize {
            let count = header.refusals;
            return Err(format!("{client:?}: refused {refused:?} up to {upto}, and says {count}"));
        }
        for seq in refused {
            // One by one: what follows from it cannot be, and is refused for that.
            if let Some(done) = self.done(client, seq) {
                done.verdict = Some((at, false));
            }
            let errno = (header.refused.0 == seq).then_some(header.errno);
            self.refused_entry(client, seq, errno, barred.contains(&seq))?;
        }
        for seq in judged {
            if let Some(done) = self.done(client, seq) {
                done.verdict = Some((at, true));
                // To remove what never was is done already: nothing comes of it.
                let removes =
                    entries(&done.bytes, header.incarnation).next().is_some_and(|entry| {
                        matches!(entry, Ok((_, _, Op::Unlink { .. } | Op::Rmdir { .. })))
                    });
                if done.void && !removes {
                    return Err(format!("{client:?}: {seq} is taken, and cannot be"));
                }
            }
        }
        Ok(())
    }

    /// Goes through a chunk in its order: which of the operations that it refuses a limit may bar. None that it takes
    /// may exceed one.
    fn weigh(
        &mut self,
        header: &ChunkHeader,
        body: &[u8],
        before: u64,
    ) -> Result<BTreeSet<u64>, String> {
        let mut barred = BTreeSet::new();
        if !self.preset.quota {
            return Ok(barred);
        }
        let Verdicts { journals, ledger, .. } = &mut self.verdicts;
        let journal = journals.get(&header.client);
        let taken = entries(body, header.incarnation).filter_map(Result::ok);
        let mut all: Vec<(u64, bool, Op<'_>)> =
            taken.map(|(_, header, op)| (header.sequence.0, true, op)).collect();
        let upto = header.last_seq.0.max(before);
        let done = journal.into_iter().flat_map(|j| j.done.range(before + 1..upto + 1));
        for (seq, done) in done {
            if !all.iter().any(|(taken, ..)| taken == seq) {
                let (_, op) = entry::decode(&done.bytes, header.incarnation)
                    .map_err(|e| format!("{:?}: {seq}: {e}", header.client))?;
                all.push((*seq, false, op));
            }
        }
        all.sort_by_key(|(seq, ..)| *seq);
        for (seq, taken, op) in all {
            if taken {
                let took = ledger.took(header.stream_seq, &op);
                took.map_err(|e| format!("{:?}: {seq} {} {e}", header.client, brief(&op)))?;
            } else if ledger.may_bar(&op) {
                barred.insert(seq);
            }
        }
        Ok(barred)
    }

    fn done(&mut self, client: ClientId, seq: u64) -> Option<&mut Done> {
        self.verdicts.journals.get_mut(&client)?.done.get_mut(&seq)
    }

    /// The head that said it is gone, and its word with it: all from there on is judged anew.
    fn unsay(&mut self, from: StreamSeq) -> Result<(), String> {
        self.trace(|| format!("the stream begins anew at {from}"));
        self.verdicts.stream.retain(|at, _| *at < from);
        self.verdicts.ledger.rewind(from);
        let clients: Vec<ClientId> = self.verdicts.journals.keys().copied().collect();
        for client in clients {
            let Some(journal) = self.verdicts.journals.get_mut(&client) else { continue };
            let later = |done: &Done| done.verdict.is_some_and(|(at, _)| at >= from);
            let all = journal.done.iter_mut().filter(|(_, done)| later(done));
            let all: Vec<(u64, bool)> =
                all.filter_map(|(seq, done)| Some((*seq, done.verdict.take()?.1))).collect();
            if let Some((first, _)) = all.iter().find(|(_, taken)| !taken) {
                self.do_again(client, *first)?;
            }
        }
        Ok(())
    }

    /// An operation was refused: it may have been, and never was.
    fn refused_entry(
        &mut self,
        client: ClientId,
        seq: u64,
        errno: Option<u16>,
        barred: bool,
    ) -> Result<(), String> {
        let Some(journal) = self.verdicts.journals.get(&client) else { return Ok(()) };
        let Some(done) = journal.done.get(&seq) else { return Ok(()) };
        let (c, session) = (journal.actor, journal.session);
        let (_, op) = entry::decode(&done.bytes, journal.incarnation)
            .map_err(|e| format!("{client:?}: {seq}: {e}"))?;
        let (what, inos) = (brief(&op), done.inos.clone());
        let why = |text: &str| Err(format!("client {c} {client:?}: {seq} {what}: {text}"));
        if !done.void {
            let no_space = self.preset.full && errno.is_none_or(|e| e == Errno::NOSPC.0);
            let limited = self.preset.quota && errno.is_none_or(|e| e == Errno::DQUOT.0);
            let limited = limited && (barred || !no_space);
            if !no_space && !limited {
                return why(&format!("refused with {errno:?}"));
            }
            if limited && !barred {
                return why("refused with no limit that bars it");
            }
            if !needs_space(&op) {
                return why("refused for want of space that it does not need");
            }
            if done.promised && !limited {
                return why("refused for want of space, which was promised");
            }
            if done.returned == Returned::Done {
                return why("refused when its call had said that it was done");
            }
            if limited {
                self.outcome.over_quota += 1;
            } else {
                self.outcome.no_space += 1;
            }
        }
        let lacks = if self.preset.quota { "quota" } else { "space" };
        self.trace(|| format!("client {c} has no {lacks} for {seq} {what}"));
        self.do_again(client, seq)?;
        if self.process(c).is_some_and(|p| p.is_client(client)) {
            self.taint(c, session, seq, inos);
        }
        Ok(())
    }

    /// Operations of a client from `from` on are done again in the model: as the verdicts are by now.
    fn do_again(&mut self, client: ClientId, from: u64) -> Result<(), String> {
        let Some(journal) = self.verdicts.journals.get_mut(&client) else { return Ok(()) };
        let (session, incarnation) = (journal.session, journal.incarnation);
        let out = self.model.take_out(session, from);
        for (seq, done) in journal.done.range_mut(from..) {
            let refused = matches!(done.verdict, Some((_, false)));
            if refused || !out.contains_key(seq) && done.verdict.is_some() {
                continue;
            }
            let (header, op) = entry::decode(&done.bytes, incarnation)
                .map_err(|e| format!("{client:?}: {seq}: {e}"))?;
            match effects::effects(&self.model, &op, header.time) {
                Ok(changes) => {
                    done.void = false;
                    self.model.put_back(session, *seq, done.at, changes);
                }
                _ => done.void = true,
            }
        }
        Ok(())
    }

    /// Whether what a call sees of these inodes may be what its process did and was refused.
    pub(super) fn is_tainted(&self, c: usize, u: &UnderWay, inos: &[u64]) -> bool {
        let Some(process) = &self.actors[c].process else { return false };
        inos.iter().any(|ino| {
            process.tainted.get(ino).is_some_and(|taint| {
                u.at <= taint.until && u.current.is_none_or(|session| session <= taint.session)
            })
        })
    }

    /// What a process knows of these inodes is not so until it is told.
    pub(super) fn taint(&mut self, c: usize, session: usize, seq: u64, inos: Vec<u64>) {
        let Some(process) = self.process(c) else { return };
        for ino in inos {
            process.tainted.insert(ino, Taint { session, until: Nanos::MAX, seq });
        }
    }

    /// Whether an operation may be one that cannot be, since its process does not know of a refusal.
    pub(super) fn may_be_void(&mut self, c: usize, t: usize, op: &Op<'_>) -> bool {
        let under_way = self.thread(c, t).and_then(|t| t.under_way.take());
        let Some(under_way) = under_way else { return false };
        let void = self.is_tainted(c, &under_way, &effects::touched(op));
        if let Some(thread) = self.thread(c, t) {
            thread.under_way = Some(under_way);
        }
        void
    }

    /// The process has learnt what is so of an inode; but for what another thread's call has done that waits for its
    /// verdict: until that returns the others may see it.
    fn cleanse(&mut self, c: usize, client: ClientId, ino: u64, upto: u64) {
        let now = self.now;
        let Some(process) = self.process(c) else { return };
        let waits = |seq: u64| {
            let calls = process.threads.iter().filter_map(|thread| thread.under_way.as_ref());
            calls.flat_map(|u| &u.own).any(|own| *own == (client, seq))
        };
        if let Some(taint) = process.tainted.get_mut(&ino)
            && taint.seq <= upto
            && !waits(taint.seq)
        {
            taint.until = taint.until.min(now);
        }
    }

    /// What an open file will have to be told from now on. `refused`: the last refusal seen before.
    pub(super) fn told_at_open(&mut self, c: usize, u: &UnderWay) -> Told {
        let Some(attached) = self.process(c).and_then(|p| p.attached.last()) else {
            return Told::default();
        };
        let (session, surely) = (attached.session, attached.memory.peek(control::REFUSED_SEQ));
        let perhaps = if u.current == Some(session) { u.refused.min(surely) } else { 0 };
        Told { session, surely, perhaps, clean: 0 }
    }

    /// Whether an error is the one of the last refusal that the process can see.
    pub(super) fn is_refusal(&mut self, c: usize, u: &UnderWay, errno: Errno) -> bool {
        // Of several refusals at once LibFS cannot tell which its call was about: it says the last one's error.
        let waits = matches!(
            u.call,
            Call::Make { .. } | Call::Create { .. } | Call::Tmpfile { .. } | Call::SetQuota { .. }
        );
        let attached = self.process(c).and_then(|p| p.attached.last()).cloned();
        if self.preset.doubts()
            && waits
            && let Some(a) = attached
        {
            let (visible, shown) =
                (a.memory.peek(control::REFUSED_SEQ), a.memory.peek(control::REFUSED_ERRNO));
            let journal = self.verdicts.journals.get(&a.client);
            let many = journal.is_some_and(|j| j.refused(u.refused, visible).nth(1).is_some());
            if many && shown == u64::from(errno.0) {
                return true;
            }
        }
        let lacks = errno == Errno::NOSPC && self.preset.full;
        let lacks = lacks || errno == Errno::DQUOT && self.preset.quota;
        let named = matches!(errno, Errno::NOSPC | Errno::DQUOT);
        if named || !self.preset.doubts() || handle_of(&u.call).is_none() {
            return lacks;
        }
        let attached = self.process(c).and_then(|p| p.attached.last());
        attached.is_some_and(|a| a.memory.peek(control::REFUSED_ERRNO) == u64::from(errno.0))
    }

    /// A call has come back: what it says of its operations, and whether it tells what it must, and may.
    pub(super) fn judge_told(
        &mut self,
        c: usize,
        u: &UnderWay,
        errno: Option<Errno>,
    ) -> Result<(), String> {
        if !self.preset.doubts() {
            return Ok(());
        }
        let Some(attached) = self.process(c).and_then(|p| p.attached.last()).cloned() else {
            return Ok(());
        };
        let same = u.current == Some(attached.session)
            && attached.memory.peek(control::STATE) == control::STATE_ATTACHED;
        let visible = attached.memory.peek(control::REFUSED_SEQ);
        // (What follows from a refusal and cannot be is refused for a reason of its own: the last one is told.)
        let shown = attached.memory.peek(control::REFUSED_ERRNO);
        let fd = handle_of(&u.call).is_some();
        let no_space = matches!(errno, Some(Errno::NOSPC | Errno::DQUOT))
            || fd && errno.is_some_and(|e| u64::from(e.0) == shown && visible > 0);
        let waits =
            matches!(u.call, Call::Write { .. } | Call::Allocate { .. } | Call::Clone { .. });
        let returned = match errno {
            None if waits && same => Returned::Done,
            None => Returned::Later,
            Some(_) if no_space => Returned::Refused,
            Some(_) => Returned::Not,
        };
        for (client, seq) in &u.own {
            let journal = self.verdicts.journals.get_mut(client);
            let Some(done) = journal.and_then(|j| j.done.get_mut(seq)) else { continue };
            // A limit may bar a write for which there is space: that is told later.
            let write = matches!(u.call, Call::Write { .. });
            let limited = self.preset.quota && write && returned == Returned::Done;
            done.returned = if limited { Returned::Later } else { returned };
            let returned = done.returned;
            if returned == Returned::Done && matches!(done.verdict, Some((_, false))) {
                let memory = &attached.memory;
                let count = memory.peek(control::REFUSALS);
                return Err(format!(
                    "{seq} was refused, and its call says that it is done ({count} refusals shown, the last {visible})"
                ));
            }
        }
        if !no_space && !matches!(u.call, Call::Fsync { .. }) {
            return Ok(());
        }
        let Some(journal) = self.verdicts.journals.get(&attached.client) else {
            return if no_space && same { Err("nothing was refused".into()) } else { Ok(()) };
        };
        let refused = |from: u64| journal.refused(from, visible);
        let Some(handle) = handle_of(&u.call) else {
            // It waits for the service's word itself: some was refused meanwhile.
            let any = !same || refused(u.refused).next().is_some();
            return if any { Ok(()) } else { Err("nothing was refused meanwhile".into()) };
        };
        let told =
            self.process(c).and_then(|p| p.open.get(&handle)).map(|open| (open.ino, open.refused));
        let Some((ino, told)) = told else { return Ok(()) };
        let told = if told.session == attached.session {
            told
        } else {
            Told { session: attached.session, ..Told::default() }
        };
        let Some(journal) = self.verdicts.journals.get(&attached.client) else { return Ok(()) };
        let refused = |from: u64| journal.refused(from, visible);
        let of = |done: &Done| done.inos.contains(&ino);
        let before = u.newest.iter().filter(|(session, _)| *session == attached.session);
        let before = before.map(|(_, seq)| *seq).max().unwrap_or(0);
        let mut now = told;
        if no_space {
            let suspect = |after: u64| {
                let all = journal.done.range(told.clean + 1..);
                all.filter(|(_, done)| of(done)).any(|(_, done)| done.seen < after)
            };
            let waited = matches!(u.call, Call::Allocate { .. } | Call::Clone { .. });
            // What it waited for itself; or what was not said before.
            // (A call that began in the session before has heard of nothing in this one.)
            let from = if u.current == Some(attached.session) { u.refused } else { 0 };
            let own = refused(from).filter(|_| waited).map(|(seq, _)| *seq);
            let due = refused(told.perhaps).map(|(seq, _)| *seq).find(|seq| suspect(*seq));
            let (own, due) = (own.collect::<Vec<_>>(), due);
            // What was refused last may have failed with the same error, which is this call's own.
            let by_itself = errno.is_some_and(|errno| {
                !matches!(errno, Errno::NOSPC | Errno::DQUOT)
                    && self.judge_error_of(c, u, &u.call, errno).is_ok()
            });
            let Some(legit) = due.or(own.first().copied()) else {
                if by_itself {
                    return Ok(());
                }
                let why = format!("nothing was refused of which it is to hear: {told:?}");
                return if same { Err(why) } else { Ok(()) };
            };
            now.surely = visible;
            // (Of several refusals at once LibFS cannot tell which its call was about.)
            if (due.is_some() || own.len() == 1) && !by_itself {
                now.perhaps = now.perhaps.max(from).max(legit);
            }
            if due.is_some() && !by_itself {
                now.clean = now.clean.max(before);
            }
            self.cleanse(c, attached.client, ino, visible);
        } else if errno.is_none() && same {
            let must = refused(told.surely).find(|(seq, done)| {
                of(done) && **seq <= before && done.returned == Returned::Later && !done.void
            });
            if let Some((seq, _)) = must {
                return Err(format!("{seq} was refused, and nobody says so: {told:?}"));
            }
            now.clean = now.clean.max(before);
        }
        if let Some(open) = self.process(c).and_then(|p| p.open.get_mut(&handle)) {
            open.refused = now;
        }
        Ok(())
    }
}

/// Whether there may be no space for it.
fn needs_space(op: &Op<'_>) -> bool {
    !matches!(op, Op::Pad | Op::Reap { .. } | Op::Place { .. } | Op::SetQuota { .. })
}

/// The open file of which a call would be told something.
fn handle_of(call: &Call) -> Option<u64> {
    match call {
        Call::Write { handle, .. } | Call::Allocate { handle, .. } | Call::Fsync { handle, .. } => {
            Some(number(*handle))
        }
        Call::Clone { to, .. } => Some(number(to.0)),
        _ => None,
    }
}
