//! Requests of clients: each goes through stages until it can be answered.
//!
//! ```text
//! Drain     the client's own operations up to `after` are settled, and applied here if this node's
//!           state is what answers
//! Lease     ask the head for the lease (if one is wanted)
//! Asked     wait for the head
//! Granted   wait until this node's state is new enough, then answer
//! ```

use base::planted::{Bug, planted};
use base::wire::Corrupt;
use base::{ClientId, Errno, InodeId, Nanos, Sequence, StreamSeq};
use storage::format::clients::{PIN_READ, PIN_WRITE};
use storage::format::control::LeaseMode;
use storage::format::lock::{Lock, LockKind};
use storage::format::page::Key;
use storage::format::proof::Proof;
use storage::format::rpc::{
    self, AccountId, InodeReply, Name, Request, Span, WANT_JOINT, WANT_PIN, WANT_REACH, WANT_READ,
    WANT_TOGETHER, WANT_WRITE,
};
use storage::permission::{R, X};
use storage::volume::Volume;

use super::client::Client;
use super::heir::Inherited;
use super::limits::LIST_BYTES;
use super::message::{LockAsk, Message};
use super::recall::QUIET;
use super::scrub::Content;
use super::sought::{SEEK_AGAIN, SEEK_FOR};
use super::{Failure, Node, Role};

/// Regular file.
pub(super) const S_IFREG: u32 = 0o100_000;
pub(super) const S_IFDIR: u32 = 0o040_000;
pub(super) const S_IFMT: u32 = 0o170_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Drain,
    Lease,
    Asked(u64),
    /// The inode that a name led to is gone: to be looked up again when this node knows it, too.
    Gone(StreamSeq),
    Granted(LeaseMode, Span, StreamSeq, u64),
    /// Its client has such a lease, and asks for nothing else that the head must know.
    Held(LeaseMode),
    Numbers(InodeId, u32),
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) client: ClientId,
    slot: usize,
    pub(super) after: Sequence,
    /// The inode that it names by number, and the proof that the client was shown it.
    pub(super) shown: Option<(InodeId, Proof)>,
    pub(super) what: What,
    stage: Stage,
    ino: InodeId,
    /// The bytes of a file that will do, if others have others; `NONE`: nothing but all of it.
    span: Span,
    /// The head was asked how far this node's state must reach, for what it says of a directory that is used jointly.
    reached: bool,
}

/// A request that owns its names.
#[derive(Debug, Clone)]
pub(super) enum What {
    Inode { mode: LeaseMode, flags: u8 },
    Lookup { dir: InodeId, name: Vec<u8>, mode: LeaseMode, flags: u8 },
    Names { cookie: u64 },
    Extents { from: u64 },
    XattrGet { name: Vec<u8> },
    XattrList,
    XattrPart { name: Vec<u8>, from: u32 },
    Inodes { count: u32 },
    Unpin(Vec<InodeId>),
    Keep { before: Vec<ClientId>, inodes: Vec<InodeId>, last: bool },
    StatFs,
    Inherit { heir: u128, waits: Option<Wait>, seeks: Seeks },
    Release(Vec<u32>),
    Read { offset: u64, len: u32 },
    Lock(LockAsk),
    Accounts { after: Option<AccountId>, upto: Option<StreamSeq> },
    Snapshots { after: u64, upto: Option<StreamSeq> },
    Differences { before: u64, number: u64, from: Key },
}

/// An heir waits for those whose heir it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    until: Nanos,
    /// What `Agent::ends` was at the last look.
    seen: u64,
}

/// How far the search for those whose heir one is has come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seeks {
    /// When the head was asked first, and last.
    asked: Option<(Nanos, Nanos)>,
    /// Somebody beside it had it.
    found: bool,
    /// Nobody is left to be asked.
    over: bool,
}

/// What a step of a request came to.
pub(super) enum Step {
    Wait,
    Next,
    Answer(Vec<u8>),
}

pub(super) type Stepped = Result<Step, Failure>;

pub(super) fn refuse(errno: Errno) -> Stepped {
    let mut out = Vec::new();
    rpc::reply_error(errno, &mut out);
    Ok(Step::Answer(out))
}

fn done() -> Stepped {
    let mut out = Vec::new();
    rpc::reply_ok(&mut out);
    Ok(Step::Answer(out))
}

/// Answers with at most so many names of a directory, after a cookie, each with the inode and the proof that `show` says.
pub(super) fn list_names(
    volume: &Volume,
    (dir, cookie): (InodeId, u64),
    most: usize,
    show: impl Fn(&Name<'_>) -> (InodeId, Proof),
) -> Stepped {
    let mut body = Vec::new();
    rpc::reply_ok(&mut body);
    body.push(0);
    let mut full = false;
    let listed = volume.readdir(dir, cookie, most, &mut |name| {
        if body.len() + name.name.len() + 40 > LIST_BYTES {
            full = true;
            return false;
        }
        let (ino, proof) = show(name);
        rpc::put_name(&mut body, &Name { ino, proof, ..*name });
        true
    })?;
    match listed {
        None => refuse(Errno::NOTDIR),
        Some(end) => {
            body[8] = u8::from(end && !full);
            Ok(Step::Answer(body))
        }
    }
}

impl Pending {
    /// Reads a request; the names are copied out of it.
    pub(super) fn parse(client: ClientId, slot: usize, body: &[u8]) -> Result<Self, Corrupt> {
        let (after, proof, request) = Request::decode(body)?;
        let shown = request.names().map(|ino| (ino, proof));
        let none = InodeId::NONE;
        let mut span = Span::NONE;
        let (ino, what) = match request {
            // It asks for nothing else: nobody judges what else it says.
            Request::Inode { ino, flags, .. } if flags & WANT_REACH != 0 => {
                let flags = if planted(Bug::ReachUnjudged) { flags } else { WANT_REACH };
                (ino, What::Inode { mode: LeaseMode::None, flags })
            }
            Request::Inode { ino, mode, flags } => (ino, What::Inode { mode, flags }),
            Request::Range { ino, flags, from, to } => {
                span = Span { from, to };
                // (It asks for a lease: how far the state reaches is another question.)
                let flags = flags & !(WANT_REACH | WANT_JOINT);
                (ino, What::Inode { mode: LeaseMode::Write, flags })
            }
            Request::Lookup { dir, name, mode, flags } => {
                if !storage::format::entry::name_is_legal(name) {
                    return Err(Corrupt::new("client request", "asks for an illegal name"));
                }
                (none, What::Lookup { dir, name: name.to_vec(), mode, flags })
            }
            Request::Names { dir, cookie } => (dir, What::Names { cookie }),
            Request::Extents { ino, from } => (ino, What::Extents { from }),
            Request::XattrGet { ino, name } => (ino, What::XattrGet { name: name.to_vec() }),
            Request::XattrList { ino } => (ino, What::XattrList),
            Request::XattrPart { ino, name, from } => {
                (ino, What::XattrPart { name: name.to_vec(), from })
            }
            Request::Inodes { count } => (none, What::Inodes { count }),
            Request::Unpin { inodes } => (none, What::Unpin(inodes)),
            Request::Keep { before, inodes, last } => (none, What::Keep { before, inodes, last }),
            Request::StatFs => (none, What::StatFs),
            Request::Inherit { heir } => {
                (none, What::Inherit { heir, waits: None, seeks: Seeks::default() })
            }
            Request::Release { slots } => (none, What::Release(slots)),
            Request::Read { ino, offset, len } => (ino, What::Read { offset, len }),
            Request::Lock { ino, wait, lock } => (ino, What::Lock(LockAsk::Set { lock, wait })),
            Request::LockTest { ino, lock } => (ino, What::Lock(LockAsk::Test { lock })),
            Request::LockCancel { ino, wait } => (ino, What::Lock(LockAsk::Cancel { wait })),
            Request::Accounts { after } => (none, What::Accounts { after, upto: None }),
            Request::Snapshots { after } => (none, What::Snapshots { after, upto: None }),
            Request::Differences { before, number, from } => {
                (none, What::Differences { before, number, from })
            }
        };
        let (stage, reached) = (Stage::Drain, false);
        Ok(Self { client, slot, after, shown, what, stage, ino, span, reached })
    }

    /// Whose it is, and in which slot it lies.
    pub(super) const fn place(&self) -> (ClientId, usize) {
        (self.client, self.slot)
    }

    /// Whether this request was granted a lease on `ino` that is not written down yet.
    pub(super) fn is_granted(&self, client: ClientId, ino: InodeId) -> bool {
        let granted = matches!(self.stage, Stage::Granted(..)) && !self.is_reach();
        self.client == client && self.ino == ino && granted
    }

    /// Whether it asks for no lease, but how far the state must reach.
    fn is_reach(&self) -> bool {
        matches!(self.what, What::Inode { flags, .. } if flags & WANT_REACH != 0)
    }

    /// Whether the head was asked for a lease on `ino` that is not written down yet.
    pub(super) fn wants(&self, client: ClientId, ino: InodeId) -> bool {
        self.client == client
            && self.ino == ino
            && matches!(self.stage, Stage::Asked(_) | Stage::Granted(..))
            && !self.is_reach()
    }

    /// Whether its client waits for a lease that it needs together with the one it has on `ino`.
    pub(super) fn needs_together(&self, client: ClientId, ino: InodeId) -> bool {
        let together = matches!(self.what, What::Inode { flags, .. } if flags & WANT_TOGETHER != 0);
        self.client == client && together && self.ino > ino
    }

    /// Whether the head was asked for a lock on `ino` and has not answered yet.
    pub(super) fn asks_for_lock(&self, client: ClientId, ino: InodeId) -> bool {
        let sets = matches!(self.what, What::Lock(LockAsk::Set { .. }));
        (self.client, self.ino) == (client, ino) && sets && matches!(self.stage, Stage::Asked(_))
    }

    /// Whether it says that its client has `ino` open no more.
    fn unpins(&self, client: ClientId, ino: InodeId) -> bool {
        self.client == client && self.closes().contains(&ino)
    }

    /// What it says that its client has closed.
    pub(super) fn closes(&self) -> &[InodeId] {
        match &self.what {
            What::Unpin(inodes) => inodes,
            _ => &[],
        }
    }

    /// Whether it is to be looked at before others that came with it.
    pub(super) const fn goes_first(&self) -> bool {
        matches!(self.what, What::Unpin(_))
    }

    /// Whether it gives something back: that is never too much.
    pub(super) const fn gives_back(&self) -> bool {
        matches!(
            self.what,
            What::Unpin(_)
                | What::Release(_)
                | What::Keep { .. }
                | What::Lock(LockAsk::Cancel { .. })
        )
    }

    /// Whether the answer comes out of this node's state. What only passes through, or is the head's to
    /// say, needs to come after the client's operations and no more.
    const fn asks_of_volume(&self) -> bool {
        !matches!(
            self.what,
            What::Inodes { .. }
                | What::Unpin(_)
                | What::Keep { .. }
                | What::Inherit { .. }
                | What::Release(_)
                | What::Lock(_)
        )
    }

    /// Whether it asks for what others leave.
    const fn inherits(&self) -> bool {
        matches!(self.what, What::Inherit { .. })
    }

    /// Whether it asks for a pin.
    pub(super) const fn pins(&self) -> bool {
        matches!(self.what, What::Inode { flags, .. } | What::Lookup { flags, .. } if flags & WANT_PIN != 0)
    }

    /// The snapshot, by its slot, and the inode in it that it is about.
    fn of_snapshot(&self) -> Option<(u16, InodeId)> {
        match self.what {
            What::Lookup { dir, .. } => dir.of_snapshot(),
            _ => self.ino.of_snapshot(),
        }
    }

    /// The directory whose names the answer tells of.
    const fn lists(&self) -> Option<InodeId> {
        match self.what {
            What::Lookup { dir, .. } => Some(dir),
            What::Names { .. } => Some(self.ino),
            _ => None,
        }
    }

    /// The head changed or was out of reach: whatever was asked of it is asked again.
    pub(super) fn ask_again(&mut self) {
        self.reached = false;
        if !matches!(self.stage, Stage::Drain) {
            self.stage = Stage::Lease;
        }
    }
}

impl Node {
    pub(super) fn granted(
        &mut self,
        client: ClientId,
        ino: InodeId,
        token: u64,
        (mode, span): (LeaseMode, Span),
        errno: u16,
        stream: StreamSeq,
    ) {
        let waiting = |p: &&mut Pending| p.client == client && p.stage == Stage::Asked(token);
        let Some(at) = self.agent.requests.iter_mut().find(waiting) else {
            return;
        };
        if errno == Errno::NOENT.0 && matches!(at.what, What::Lookup { .. }) {
            // The name may lead to another one now.
            at.stage = Stage::Gone(stream);
            return;
        }
        at.ino = ino;
        at.stage = Stage::Granted(mode, span, stream, token);
        if errno != 0 {
            let (slot, pins) = (at.slot, at.pins());
            self.agent.requests.retain(|p| !(p.client == client && p.slot == slot));
            let mut reply = Vec::new();
            rpc::reply_error(Errno(errno), &mut reply);
            if let Some(client) = self.agent.clients.get_mut(&client) {
                if pins {
                    client.stays_closed(ino);
                }
                client.answer(slot, &reply);
            }
        }
    }

    pub(super) fn numbers_arrived(
        &mut self,
        client: ClientId,
        token: u64,
        first: InodeId,
        count: u32,
    ) {
        let waiting = |p: &&mut Pending| p.client == client && p.stage == Stage::Asked(token);
        if let Some(pending) = self.agent.requests.iter_mut().find(waiting) {
            pending.stage = Stage::Numbers(first, count);
        }
    }

    pub(super) fn lock_answered(
        &mut self,
        client: ClientId,
        token: u64,
        errno: u16,
        found: Option<Lock>,
    ) -> Result<(), Failure> {
        self.agent.locking.heard(token);
        let waiting = |p: &Pending| p.client == client && p.stage == Stage::Asked(token);
        let Some(at) = self.agent.requests.iter().position(waiting) else { return Ok(()) };
        let What::Lock(ask) = self.agent.requests[at].what else { return Ok(()) };
        let pending = self.agent.requests.remove(at);
        self.note_lock(client, pending.ino, ask, errno);
        let mut body = Vec::new();
        match ask {
            _ if errno != 0 => rpc::reply_error(Errno(errno), &mut body),
            LockAsk::Test { .. } => rpc::put_lock_test(&mut body, found.as_ref()),
            LockAsk::Set { .. } | LockAsk::Cancel { .. } => rpc::reply_ok(&mut body),
        }
        if let Some(client) = self.agent.clients.get(&client) {
            client.answer(pending.slot, &body);
        }
        match ask {
            LockAsk::Set { lock, .. } if errno == 0 && lock.kind != LockKind::None => {
                self.want_sole(client, pending.ino)
            }
            _ => Ok(()),
        }
    }

    /// Advances requests; `true` when one was answered.
    pub(super) fn step_requests(&mut self) -> Result<bool, Failure> {
        let mut answered = false;
        let mut all = std::mem::take(&mut self.agent.requests);
        let mut kept = Vec::with_capacity(all.len());
        let (from, most) = (self.volume.tree().visits(), self.env.config.limits.turn);
        let mut over = false;
        for mut pending in all.drain(..) {
            if over {
                kept.push(pending);
                continue;
            }
            let (client, ino) = (pending.client, pending.ino);
            if pending.pins() && kept.iter().any(|before: &Pending| before.unpins(client, ino)) {
                // Opened again: the close before waits for its client's operations, and would take this
                // pin away if it came later.
                kept.push(pending);
                continue;
            }
            let opens =
                |before: &Pending| before.pins() && pending.unpins(before.client, before.ino);
            if kept.iter().any(opens) {
                // An open that was given up is still asked for, and pins it.
                kept.push(pending);
                continue;
            }
            // One of a client waits.
            let waits = |before: &Pending| before.inherits() && before.client == client;
            let refused = pending.inherits() && kept.iter().any(waits);
            loop {
                let stepped = if refused { refuse(Errno::AGAIN) } else { self.step(&mut pending) };
                match stepped? {
                    Step::Next => {}
                    Step::Wait => {
                        kept.push(pending);
                        break;
                    }
                    Step::Answer(body) => {
                        answered = true;
                        if pending.asks_of_volume() {
                            self.stand_by_it()?;
                        }
                        // What others ask for is answered in the turns that follow.
                        over = self.volume.tree().visits().saturating_sub(from) >= most;
                        if let Some(client) = self.agent.clients.get_mut(&pending.client) {
                            if pending.pins() {
                                client.stays_closed(pending.ino);
                            }
                            client.answer(pending.slot, &body);
                        }
                        break;
                    }
                }
            }
        }
        kept.append(&mut self.agent.requests);
        self.agent.requests = kept;
        self.turn.unanswered = over || self.turn.inherited;
        Ok(answered && !over)
    }

    fn step(&mut self, p: &mut Pending) -> Stepped {
        if !self.serves() || self.closing.is_some() {
            return Ok(Step::Wait);
        }
        if let Some(of) = p.of_snapshot() {
            return self.step_snapshot(p, of);
        }
        match p.stage {
            Stage::Drain => self.step_drain(p),
            Stage::Lease => self.step_ask(p),
            Stage::Asked(_) => Ok(Step::Wait),
            Stage::Gone(stream) if self.member.applied < stream => Ok(Step::Wait),
            Stage::Gone(_) => {
                if let What::Lookup { dir, name, .. } = &p.what
                    && self.volume.lookup(*dir, name)?.is_some_and(|(ino, _)| ino == p.ino)
                {
                    // A name without a file: no volume that is sound has one, and nobody asks for ever.
                    return refuse(Errno::NOENT);
                }
                p.stage = Stage::Lease;
                Ok(Step::Next)
            }
            Stage::Granted(mode, span, stream, token) => {
                self.step_granted(p, (mode, span), stream, Some(token))
            }
            // This node's state has all that others did to it before that lease was granted.
            Stage::Held(mode) => self.step_granted(p, (mode, Span::NONE), StreamSeq(0), None),
            Stage::Numbers(first, count) => self.answer_numbers(p, first, count),
        }
    }

    fn step_drain(&mut self, p: &mut Pending) -> Stepped {
        let Some(client) = self.agent.clients.get(&p.client) else { return Ok(Step::Wait) };
        if client.settled < p.after {
            let next = client.next();
            let drained = self.drain(p.client)?;
            let Some(client) = self.agent.clients.get(&p.client) else { return Ok(Step::Wait) };
            if client.settled < p.after {
                // What was never handed out cannot be waited for. What was, but is not there, is
                // being written by another thread of the client, perhaps behind a finished one.
                let handed_out = p.after <= client.last_sequence();
                let never = drained && client.next() == next && next <= p.after && !handed_out;
                return if never { refuse(Errno::INVAL) } else { Ok(Step::Wait) };
            }
        }
        let Some(client) = self.agent.clients.get(&p.client) else { return Ok(Step::Wait) };
        if client.applied < p.after && p.asks_of_volume() && !planted(Bug::OwnWritesUnseen) {
            // Settled is what lies in the ring. A member applies it a little later, and would answer as if
            // it had not been.
            return Ok(Step::Wait);
        }
        p.stage = Stage::Lease;
        Ok(Step::Next)
    }

    /// Whether the client came to the inode by a name, as far as the request needs one.
    fn was_shown(&self, p: &Pending) -> bool {
        let Some((ino, proof)) = p.shown else { return true };
        let Some(client) = self.agent.clients.get(&p.client) else { return false };
        client.identity.uid == 0
            || ino == InodeId::ROOT
            || proof == Proof::new(self.agent.table.secret(), ino)
            || client.has(ino)
    }

    /// What shows the client later that it was shown the inode now.
    pub(super) fn proof_for(&self, client: ClientId, ino: InodeId) -> Proof {
        match self.agent.clients.get(&client) {
            Some(client) if client.identity.uid != 0 => Proof::new(self.agent.table.secret(), ino),
            _ => Proof::NONE,
        }
    }

    fn step_ask(&mut self, p: &mut Pending) -> Stepped {
        if !self.was_shown(p) {
            self.env.counters.unshown += 1;
            return refuse(Errno::STALE);
        }
        if let Some(dir) = p.lists()
            && !p.reached
            && self
                .agent
                .clients
                .get(&p.client)
                .is_some_and(|c| c.is_joint(dir) || !c.has_lease(dir))
            && !planted(Bug::JointAnsweredStale)
        {
            // Others change its names meanwhile, here or on other nodes; or had it jointly with this client until a moment ago.
            let token = self.token();
            (p.stage, p.ino) = (Stage::Asked(token), dir);
            let (client, mode, flags) = (p.client, LeaseMode::None, WANT_REACH);
            let span = Span::NONE;
            self.to_head(Message::LeaseWant { client, ino: dir, token, mode, flags, span });
            return Ok(Step::Wait);
        }
        let (mode, flags) = match &p.what {
            What::Inode { mode, flags } => (*mode, *flags),
            What::Lookup { dir, name, mode, flags } => {
                let (dir, mode, flags) = (*dir, *mode, *flags & !WANT_REACH);
                if let Err(errno) = self.may(p.client, dir, X)? {
                    return refuse(errno);
                }
                match self.volume.lookup(dir, name)? {
                    None => return refuse(Errno::NOENT),
                    Some((ino, _)) => p.ino = ino,
                }
                (mode, flags)
            }
            What::Inodes { count } => {
                let token = self.token();
                p.stage = Stage::Asked(token);
                let message = Message::NumbersWant { client: p.client, token, count: *count };
                self.to_head(message);
                return Ok(Step::Wait);
            }
            What::Lock(ask) => {
                let ask = *ask;
                let sole = |c: &Client| c.has_sole(p.ino);
                if !matches!(ask, LockAsk::Cancel { .. })
                    && self.agent.clients.get(&p.client).is_some_and(sole)
                {
                    // Who asks the head lets it know first what he has granted himself.
                    self.return_sole(p.client, p.ino)?;
                    if self.agent.clients.get(&p.client).is_none_or(sole) {
                        return Ok(Step::Wait);
                    }
                }
                let token = self.token();
                p.stage = Stage::Asked(token);
                self.to_head(Message::LockWant { client: p.client, ino: p.ino, token, ask });
                return Ok(Step::Wait);
            }
            _ => return self.answer_simple(p),
        };
        let looks = flags & (WANT_PIN | WANT_READ | WANT_WRITE) == 0 && mode != LeaseMode::None;
        let held = |c: &Client| c.has_now(p.ino, mode).is_some();
        if looks && self.agent.clients.get(&p.client).is_some_and(held) {
            p.stage = Stage::Held(mode);
            return Ok(Step::Next);
        }
        if flags & WANT_PIN != 0
            && let Some(client) = self.agent.clients.get_mut(&p.client)
        {
            client.reopens(p.ino);
        }
        if mode != LeaseMode::None {
            self.agent.rests.asks(p.ino, p.client, self.env.now, QUIET);
        }
        let token = self.token();
        p.stage = Stage::Asked(token);
        let (client, ino, span) = (p.client, p.ino, p.span);
        let want = Message::LeaseWant { client, ino, token, mode, flags, span };
        self.to_head(want);
        Ok(Step::Wait)
    }

    /// Whether this node's state reflects the stream up to `stream` and, for file content, the
    /// client's own operations up to `after`.
    fn fresh_enough(&mut self, p: &Pending, stream: StreamSeq, content: bool) -> bool {
        if !content || planted(Bug::GrantBeforePublished) {
            return self.member.applied >= stream;
        }
        let own = self.agent.clients.get(&p.client).is_some_and(|c| c.published >= p.after);
        // A block allocated by an operation that is not published holds bytes of its former life. (Who has some bytes of a file, or is
        // given some, reads no others: and those he has from the stream up to there, or from himself. What others do to theirs meanwhile
        // never ends, perhaps.)
        let bytes = matches!(p.stage, Stage::Granted(LeaseMode::Joint, ..))
            || self.agent.clients.get(&p.client).is_some_and(|c| c.is_joint(p.ino));
        let clean = match bytes {
            true => self
                .agent
                .clients
                .get(&p.client)
                .is_some_and(|c| c.published >= c.applied || planted(Bug::RangeHalfPublished)),
            false => {
                let dirty = self.member.dirty.get(&p.ino);
                dirty.is_none_or(|(seq, ..)| *seq <= self.member.published)
            }
        };
        if self.member.published >= stream && own && clean {
            return true;
        }
        self.member.publish_now = true;
        false
    }

    fn step_granted(
        &mut self,
        p: &mut Pending,
        (mode, span): (LeaseMode, Span),
        stream: StreamSeq,
        token: Option<u64>,
    ) -> Stepped {
        let stale = !span.is_empty() && planted(Bug::RangeGrantStale);
        let stream = if stale { StreamSeq(0) } else { stream };
        if self.member.applied < stream {
            return Ok(Step::Wait);
        }
        if let Some(dir) = p.lists()
            && !p.reached
            && p.ino == dir
        {
            (p.reached, p.stage) = (true, Stage::Lease);
            return Ok(Step::Next);
        }
        if let What::Lookup { dir, name, .. } = &p.what {
            match self.volume.lookup(*dir, name)? {
                Some((ino, _)) if ino == p.ino => {}
                // It changed hands while we waited.
                _ => {
                    p.stage = Stage::Lease;
                    return Ok(Step::Next);
                }
            }
        }
        let Some(record) = self.volume.attr(p.ino)? else { return refuse(Errno::NOENT) };
        let regular = record.mode & S_IFMT == S_IFREG;
        // (Who asks how far it must reach reads nothing of what the answer shows.)
        if !p.is_reach() && !self.fresh_enough(p, stream, regular) {
            return Ok(Step::Wait);
        }
        if regular && token.is_some() && !p.is_reach() {
            let upto = self.changed_by_others(p.ino, p.client);
            self.note_seen_early(p.ino, upto);
        }
        let flags = match p.what {
            What::Inode { flags, .. } | What::Lookup { flags, .. } => flags,
            _ => 0,
        };
        if let Some(client) = self.agent.clients.get_mut(&p.client)
            && (flags & WANT_PIN != 0
                || flags & (WANT_READ | WANT_WRITE) != 0 && client.has_pin(p.ino))
        {
            // What it may from now on is written down also where it had it open before, for less: a service that starts
            // anew, and a new head, know the right by this alone.
            client.pin_for(p.ino, flags)?;
        }
        // It goes on with the bytes that it has, and gets some more.
        let more = !span.is_empty()
            && self.agent.clients.get(&p.client).is_some_and(|c| c.is_joint(p.ino));
        let granted = if mode == LeaseMode::None {
            rpc::Granted::default()
        } else {
            let held = self.agent.clients.get(&p.client).and_then(|c| c.has_now(p.ino, mode));
            match (token, held) {
                (Some(token), _) => match self.write_lease(p.client, p.ino, mode, token)? {
                    Some(granted) => granted,
                    None => return refuse(Errno::NFILE),
                },
                (None, Some(granted)) => granted,
                (None, None) => {
                    // It was taken back meanwhile.
                    p.stage = Stage::Lease;
                    return Ok(Step::Next);
                }
            }
        };
        if flags & WANT_TOGETHER != 0
            && let Some(client) = self.agent.clients.get_mut(&p.client)
        {
            client.needs_together(p.ino, self.env.now);
        }
        let mut extents = Vec::new();
        let mut complete = true;
        if more {
            complete = false;
        } else if regular {
            extents = self.volume.extents(p.ino, 0, self.env.config.limits.extents)?;
            complete = extents.len() < self.env.config.limits.extents;
        }
        let target = self.volume.symlink(p.ino)?;
        let reflected = self.reflected(p, regular);
        let proof = Proof::new(self.agent.table.secret(), p.ino);
        let directory = record.mode & S_IFMT == S_IFDIR;
        let parent_proof = if directory && self.may(p.client, p.ino, X)?.is_ok() {
            self.proof_for(p.client, record.parent)
        } else {
            Proof::NONE
        };
        let since = match self.agent.clients.get(&p.client) {
            Some(client) if !span.is_empty() => client.joint_since(p.ino),
            _ => 0,
        };
        let reply = InodeReply {
            granted,
            reflected,
            record,
            extents,
            complete,
            target,
            proof,
            parent_proof,
            span,
            since,
        };
        let mut body = Vec::new();
        reply.encode(&mut body);
        Ok(Step::Answer(body))
    }

    fn reflected(&self, p: &Pending, content: bool) -> Sequence {
        let client = self.agent.clients.get(&p.client);
        client.map_or(Sequence(0), |c| if content { c.published } else { c.applied })
    }

    fn answer_numbers(&mut self, p: &Pending, first: InodeId, count: u32) -> Stepped {
        let mut body = Vec::new();
        rpc::reply_ok(&mut body);
        let at = body.len();
        base::wire::Writer(&mut body).u32(0);
        let mut given = 0u32;
        for n in 0..u64::from(count.min(4096)) {
            let ino = InodeId(first.0.saturating_add(n));
            if let Some(client) = self.agent.clients.get_mut(&p.client) {
                client.hand_out(ino);
            }
            let Some(granted) = self.write_lease(p.client, ino, LeaseMode::Write, 0)? else {
                break;
            };
            if let Some(client) = self.agent.clients.get_mut(&p.client) {
                // Who makes it reads and writes it, whatever its mode.
                client.pin(ino, PIN_READ | PIN_WRITE)?;
            }
            let proof = self.proof_for(p.client, ino);
            let mut w = base::wire::Writer(&mut body);
            w.u64(ino.0).u32(granted.slot).u64(granted.word.0).u64(proof.0);
            given += 1;
        }
        body[at..at + 4].copy_from_slice(&given.to_le_bytes());
        Ok(Step::Answer(body))
    }

    /// Permission of a client on an inode, by the attributes here and now.
    fn may(&self, client: ClientId, ino: InodeId, what: u32) -> Result<Result<(), Errno>, Failure> {
        let Some(record) = self.volume.attr(ino)? else { return Ok(Err(Errno::NOENT)) };
        let Some(client) = self.agent.clients.get(&client) else { return Ok(Err(Errno::STALE)) };
        let id = &client.identity;
        let creds = storage::permission::Creds { uid: id.uid, gid: id.gid, groups: &id.groups };
        Ok(creds.may(&record, what))
    }

    /// The value of an extended attribute that the client may read.
    fn readable_xattr(&self, p: &Pending, name: &[u8]) -> Result<Result<Vec<u8>, Errno>, Failure> {
        // Access lists are attributes like the mode: whoever sees the inode sees them; and whoever changes a file has
        // to know whether that ends its capabilities.
        let security = name.starts_with(b"security.") && !planted(Bug::CapabilityHidden);
        let known_to_all = storage::acl::is_acl(name) || security;
        if !known_to_all && let Err(errno) = self.may(p.client, p.ino, R)? {
            return Ok(Err(errno));
        }
        if self.is_hidden(p.client, name) {
            return Ok(Err(Errno::NODATA));
        }
        Ok(self.volume.xattr(p.ino, name)?.ok_or(Errno::NODATA))
    }

    /// Whether an attribute is there for the super-user only (xattr(7)).
    fn is_hidden(&self, client: ClientId, name: &[u8]) -> bool {
        let super_user =
            self.agent.clients.get(&client).is_some_and(|client| client.identity.uid == 0);
        name.starts_with(b"trusted.") && !super_user
    }

    /// The names of an inode's extended attributes that the client may see, each ended by NUL.
    fn xattr_names(&self, p: &Pending) -> Result<Vec<u8>, Failure> {
        let mut names = self.volume.xattrs(p.ino)?;
        names.retain(|name| !self.is_hidden(p.client, name));
        names.iter_mut().for_each(|name| name.push(0));
        Ok(names.concat())
    }

    /// Requests that need no lease of their own.
    fn answer_simple(&mut self, p: &mut Pending) -> Stepped {
        if p.shown.is_some() && self.volume.attr(p.ino)?.is_none() {
            // Of what is not there nothing is said: no attributes and no extents are an answer.
            return refuse(Errno::NOENT);
        }
        let mut body = Vec::new();
        match p.what.clone() {
            What::Names { cookie } => {
                if let Err(errno) = self.may(p.client, p.ino, R)? {
                    return refuse(errno);
                }
                // Who may not search a directory may know what is there, and no more.
                let shows = self.may(p.client, p.ino, X)?.is_ok();
                return self.answer_names(p.client, p.ino, cookie, shows);
            }
            What::Extents { from } => {
                if !self.fresh_enough(p, StreamSeq(0), true) {
                    return Ok(Step::Wait);
                }
                let extents = self.volume.extents(p.ino, from, self.env.config.limits.extents)?;
                let complete = extents.len() < self.env.config.limits.extents;
                rpc::put_extents(&mut body, self.reflected(p, true), complete, &extents);
            }
            What::XattrGet { name } => match self.readable_xattr(p, &name)? {
                Ok(value) if value.len() > self.env.config.limits.xattr_bytes => {
                    return refuse(Errno::TOOBIG);
                }
                Ok(value) => {
                    rpc::reply_ok(&mut body);
                    body.extend_from_slice(&value);
                }
                Err(errno) => return refuse(errno),
            },
            What::XattrList => {
                let names = self.xattr_names(p)?;
                if names.len() > self.env.config.limits.xattr_bytes {
                    return refuse(Errno::TOOBIG);
                }
                rpc::reply_ok(&mut body);
                body.extend_from_slice(&names);
            }
            What::XattrPart { name, from } => {
                let whole = match name.as_slice() {
                    b"" => Ok(self.xattr_names(p)?),
                    name => self.readable_xattr(p, name)?,
                };
                let most = self.env.config.limits.xattr_bytes;
                match whole {
                    Ok(whole) => {
                        let cut = planted(Bug::PartLost) && from as usize >= 2 * most;
                        let rest = whole.get(from as usize..).filter(|_| !cut).unwrap_or(&[]);
                        rpc::reply_ok(&mut body);
                        body.extend_from_slice(&rest[..rest.len().min(most)]);
                    }
                    Err(errno) => return refuse(errno),
                }
            }
            What::Unpin(inodes) => {
                if let Some(client) = self.agent.clients.get_mut(&p.client) {
                    let inodes = client.tell_these(&inodes)?;
                    if !inodes.is_empty() {
                        self.to_head(Message::Unpin { client: p.client, inodes });
                    }
                }
                return done();
            }
            What::Keep { before, inodes, last } => {
                let asked = (&before[..], &inodes[..], last);
                let Some(open) = self.keep_open(p.client, asked)? else {
                    return Ok(Step::Wait);
                };
                rpc::reply_ok(&mut body);
                rpc::put_kept(&open.kept, &open.lost, &mut body);
            }
            What::Inherit { heir, waits, seeks } => {
                return self.answer_inherit(p, heir, waits, seeks);
            }
            What::StatFs => {
                let mut s = self.volume.statfs();
                s.blocks_free = self.free_below();
                rpc::reply_ok(&mut body);
                let mut w = base::wire::Writer(&mut body);
                w.u32(storage::limits::BLOCK_BYTES as u32).u64(s.blocks).u64(s.blocks_free);
                w.u64(s.inodes + s.inodes_free).u64(s.inodes_free);
            }
            What::Accounts { after, upto } => {
                // What was in the stream when it was asked is in the answer.
                let upto = upto.unwrap_or_else(|| self.ring.last());
                if self.member.applied < upto {
                    p.what = What::Accounts { after, upto: Some(upto) };
                    return Ok(Step::Wait);
                }
                let Some(client) = self.agent.clients.get(&p.client) else { return done() };
                let uid = client.identity.uid;
                let own = AccountId::User(uid);
                rpc::reply_ok(&mut body);
                let all = match after {
                    // Of users others see only themselves.
                    None if uid != 0 => vec![self.volume.account(own)],
                    Some(AccountId::User(_)) if uid != 0 => {
                        let users = AccountId::User(u32::MAX);
                        self.volume.accounts(Some(users), self.env.config.limits.accounts)
                    }
                    after => self.volume.accounts(after, self.env.config.limits.accounts),
                };
                all.iter().for_each(|account| account.encode(&mut body));
            }
            What::Snapshots { after, upto } => return self.answer_snapshots(p, after, upto),
            What::Differences { before, number, from } => {
                return self.answer_differences(p.client, before, number, from);
            }
            What::Release(slots) => {
                let Some(client) = self.agent.clients.get(&p.client) else { return done() };
                // The client may have asked for some of them again, and be using them.
                for ino in client.inodes_of(&slots.into_iter().collect()) {
                    self.release_wanted(p.client, ino);
                }
                return done();
            }
            What::Read { offset, len } => {
                // Who has it open was asked then.
                let reads = self.agent.clients.get(&p.client).is_some_and(|c| c.reads(p.ino));
                if !reads && let Err(errno) = self.may(p.client, p.ino, R)? {
                    return refuse(errno);
                }
                if !self.fresh_enough(p, StreamSeq(0), true) {
                    return Ok(Step::Wait);
                }
                let mut bytes = vec![0u8; (len as usize).min(LIST_BYTES)];
                let n = match self.read_content(p.ino, offset, &mut bytes)? {
                    Content::Read(n) => n,
                    Content::Waits => return Ok(Step::Wait),
                    Content::Lost => return refuse(Errno::IO),
                };
                rpc::reply_ok(&mut body);
                body.extend_from_slice(&bytes[..n]);
            }
            What::Inode { .. } | What::Lookup { .. } | What::Inodes { .. } | What::Lock(_) => {}
        }
        Ok(Step::Answer(body))
    }

    /// Who does not end in time is not waited for: an heir that had to wait for ever would keep its guest waiting.
    fn answer_inherit(
        &mut self,
        p: &mut Pending,
        heir: u128,
        waits: Option<Wait>,
        seeks: Seeks,
    ) -> Stepped {
        let (now, ends) = (self.env.now, self.agent.ends);
        if waits.is_some_and(|wait| wait.seen == ends && now < wait.until) {
            return Ok(Step::Wait);
        }
        match self.inherit(p.client, heir)? {
            Inherited::Nobody if seeks.over || heir == 0 => done(),
            Inherited::Nobody => {
                // Perhaps somebody on another node.
                let (first, _) = seeks.asked.unwrap_or((now, now));
                if now >= first.saturating_add(SEEK_FOR) {
                    // (A head or an agent of an older version does not know the question.)
                    return if seeks.found { done() } else { refuse(Errno::AGAIN) };
                }
                let token = self.token();
                p.stage = Stage::Asked(token);
                let seeks = Seeks { asked: Some((first, now)), ..seeks };
                p.what = What::Inherit { heir, waits, seeks };
                self.agent.locking.seeks(p.client);
                self.to_head(Message::HeirSeek { client: p.client, token, secret: heir });
                Ok(Step::Wait)
            }
            Inherited::One => {
                p.what = What::Inherit { heir, waits, seeks: Seeks { found: true, ..seeks } };
                Ok(Step::Wait)
            }
            Inherited::Later => Ok(Step::Wait),
            Inherited::Waits => {
                let until = waits.map_or(now.saturating_add(self.env.config.grace), |w| w.until);
                if now >= until {
                    return refuse(Errno::AGAIN);
                }
                let waits = Some(Wait { until, seen: ends });
                p.what = What::Inherit { heir, waits, seeks };
                Ok(Step::Wait)
            }
        }
    }

    /// All other nodes have been asked for those whose heir a client is.
    pub(super) fn heirs_found(&mut self, client: ClientId, token: u64, given: bool) {
        let waiting = |p: &&mut Pending| p.client == client && p.stage == Stage::Asked(token);
        let Some(at) = self.agent.requests.iter_mut().find(waiting) else { return };
        if let What::Inherit { seeks, .. } = &mut at.what {
            seeks.over = true;
            at.stage = Stage::Lease;
            // (The answer before this one may have said that there was something.)
            let once = seeks.asked.is_some_and(|(first, last)| first == last);
            if !given && once {
                self.agent.locking.got_nothing(client);
            }
        }
    }

    /// Who has asked for them and heard nothing asks again.
    pub(super) fn seek_again(&mut self) {
        let now = self.env.now;
        for p in &mut self.agent.requests {
            if let (What::Inherit { seeks, .. }, Stage::Asked(_)) = (&p.what, p.stage)
                && seeks.asked.is_some_and(|(_, last)| now >= last.saturating_add(SEEK_AGAIN))
            {
                p.stage = Stage::Lease;
            }
        }
    }

    fn answer_names(
        &mut self,
        client: ClientId,
        dir: InodeId,
        cookie: u64,
        shows: bool,
    ) -> Stepped {
        let show = |name: &Name<'_>| {
            let proof = if shows { self.proof_for(client, name.ino) } else { Proof::NONE };
            (name.ino, proof)
        };
        list_names(&self.volume, (dir, cookie), self.env.config.limits.names, show)
    }

    /// Everything asked of a head that is no more is asked of the new one.
    pub(super) fn ask_again(&mut self) {
        if self.role() != Role::Outside {
            self.agent.requests.iter_mut().for_each(Pending::ask_again);
        }
    }
}
