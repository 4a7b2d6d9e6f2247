//! The head's lease table: per inode one writer or many readers, or, of a directory, many who use its names jointly, or, of a regular
//! file, many who have other bytes of it.
//!
//! Always true: a writer excludes every other holder that was granted its lease here, and joint holders exclude readers, and of a file
//! each other where their bytes overlap; whoever waits is behind a holder that is being recalled; each (client, inode) is recalled at most once at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::always;
use base::planted::{Bug, planted};
use base::spans::Spans;
use base::{ClientId, InodeId};
use storage::format::control::LeaseMode;
use storage::format::rpc::Span;

use super::ranges::Way;

/// A client that waits for a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Want {
    /// Who.
    pub client: ClientId,
    /// The agent's name for the request.
    pub token: u64,
    /// What.
    pub mode: LeaseMode,
    /// What is asked for beside the lease, if it is to be judged when the lease is granted.
    pub judge: Option<u8>,
    /// It will do before every member has what others did (`rpc::WANT_EARLY`).
    pub early: bool,
    /// Of a regular file that is to be used jointly: the bytes. When it is granted: those that were.
    pub span: Span,
    /// As many around them as nobody minds, but no more than these.
    pub most: Span,
}

impl Want {
    /// A lease on all of an inode, that nobody has to judge.
    pub const fn all(client: ClientId, token: u64, mode: LeaseMode) -> Self {
        let (span, most) = (Span::NONE, Span::NONE);
        Self { client, token, mode, judge: None, early: false, span, most }
    }
}

/// Of which bytes of a regular file a client has a joint lease.
#[derive(Clone, Debug)]
enum Bytes {
    /// It is not known which: its agent has reported the lease to a head that has not given it. Whoever wants some takes back all.
    Any,
    Some(Spans),
}

impl Bytes {
    fn count(&self) -> usize {
        match self {
            Self::Any => 0,
            Self::Some(spans) => spans.len(),
        }
    }

    fn has_all(&self, span: Span) -> bool {
        match self {
            Self::Any => true,
            Self::Some(spans) => spans.has_all(&span.range()),
        }
    }

    fn has_some(&self, span: Span) -> bool {
        match self {
            Self::Any => !span.is_empty(),
            Self::Some(spans) => spans.has_some(&span.range()),
        }
    }
}

#[derive(Clone, Debug)]
struct Holder {
    mode: LeaseMode,
    /// Of the want that was granted last; 0: adopted.
    token: u64,
    bytes: Bytes,
}

impl Holder {
    const NONE: Self = Self { mode: LeaseMode::None, token: 0, bytes: Bytes::Some(Spans::new()) };
}

#[derive(Debug, Default)]
struct Entry {
    holders: BTreeMap<ClientId, Holder>,
    waiting: VecDeque<Want>,
    recalling: BTreeSet<ClientId>,
}

/// What a change of the table asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Take the lease back from the client.
    Recall(ClientId, InodeId),
    /// The client has it now.
    Grant(InodeId, Want),
}

/// Whether what somebody has is in the way of somebody else's lease of mode `wanted` (of those bytes, if it is a joint one of a file).
fn excludes((wanted, span): (LeaseMode, Span), held: &Holder) -> bool {
    let reader_too = !planted(Bug::ReaderBesideWriter);
    match (wanted, held.mode) {
        (_, LeaseMode::None) => false,
        (LeaseMode::Write, _) => true,
        (_, LeaseMode::Write) => reader_too,
        (LeaseMode::Read, LeaseMode::Joint) => !planted(Bug::ReaderBesideJoint),
        (LeaseMode::Joint, LeaseMode::Read) => !planted(Bug::ReaderBesideJoint),
        (LeaseMode::Joint, LeaseMode::Joint) => {
            held.bytes.has_some(span) && !planted(Bug::RangeUnjudged)
        }
        (LeaseMode::None, _) | (LeaseMode::Read, LeaseMode::Read) => false,
    }
}

/// Whether a client's own lease of mode `held` has to come back before it gets one of mode `wanted`, which says something else.
fn supersedes(wanted: LeaseMode, held: LeaseMode) -> bool {
    match (wanted, held) {
        // What it knows of the names must go before others change them.
        (LeaseMode::Joint, LeaseMode::Read) => true,
        // What it has done to them beside others is judged as that: who does not wait for it any more would be told of a refusal.
        (LeaseMode::Read | LeaseMode::Write, LeaseMode::Joint) => !planted(Bug::JointTurnedOver),
        _ => false,
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct LeaseTable {
    entries: BTreeMap<InodeId, Entry>,
    /// What each client holds, for its end.
    of: BTreeMap<ClientId, BTreeSet<InodeId>>,
    /// What each client waits for, for its end: short-lived processes come and go, and a mount beside them
    /// holds a hundred thousand leases that need not be looked at.
    wanted: BTreeMap<ClientId, BTreeSet<InodeId>>,
    /// Spans of bytes in all of them.
    spans: usize,
}

impl LeaseTable {
    /// Of how many spans what `client` has jointly of a file consists, and how many spans there are in all.
    pub fn spans(&self, client: ClientId, ino: InodeId) -> (usize, usize) {
        let holder = self.entries.get(&ino).and_then(|e| e.holders.get(&client));
        (holder.map_or(0, |holder| holder.bytes.count()), self.spans)
    }

    /// Whether `client` has a joint lease of all these bytes of a regular file.
    pub fn has_bytes(&self, client: ClientId, ino: InodeId, span: Span) -> bool {
        let holder = self.entries.get(&ino).and_then(|e| e.holders.get(&client));
        holder.is_some_and(|h| h.mode == LeaseMode::Joint && h.bytes.has_all(span))
    }

    /// Who else has a joint lease of an inode.
    pub fn sharers(&self, client: ClientId, ino: InodeId) -> Vec<ClientId> {
        let joint = |(c, h): &(&ClientId, &Holder)| **c != client && h.mode == LeaseMode::Joint;
        let holders = self.entries.get(&ino).into_iter().flat_map(|e| &e.holders);
        holders.filter(joint).map(|(c, _)| *c).collect()
    }

    /// What is in the way of `client`, who would have these bytes of a regular file.
    pub(super) fn way(&self, client: ClientId, ino: InodeId, span: Span) -> Way {
        let Some(entry) = self.entries.get(&ino) else { return Way::Free };
        let mut way = Way::Free;
        for (_, holder) in entry.holders.iter().filter(|(c, _)| **c != client) {
            match holder.mode {
                LeaseMode::Joint if holder.bytes.has_some(span) => return Way::Taken,
                LeaseMode::Joint => way = Way::Beside,
                _ if way == Way::Free => way = Way::Whole,
                _ => {}
            }
        }
        match way {
            Way::Free if entry.waiting.iter().any(|w| w.client != client) => Way::Whole,
            way => way,
        }
    }

    /// The mode that `client` holds on `ino`.
    pub fn mode(&self, client: ClientId, ino: InodeId) -> LeaseMode {
        self.entries
            .get(&ino)
            .and_then(|e| e.holders.get(&client))
            .map_or(LeaseMode::None, |holder| holder.mode)
    }

    /// The token of the want by which `client` got what it holds on `ino`; 0 if it was adopted.
    pub fn token(&self, client: ClientId, ino: InodeId) -> Option<u64> {
        Some(self.entries.get(&ino)?.holders.get(&client)?.token)
    }

    /// Whether a lease of that mode would have to be taken from somebody else first, or somebody waits for that.
    pub fn is_in_the_way(&self, client: ClientId, ino: InodeId, mode: LeaseMode) -> bool {
        let others = |e: &Entry| {
            let holds =
                |(c, h): (&ClientId, &Holder)| *c != client && excludes((mode, Span::NONE), h);
            e.holders.iter().any(holds) || e.waiting.iter().any(|w| w.client != client)
        };
        self.entries.get(&ino).is_some_and(others)
    }

    /// Whether somebody else may write, and may have done what is not known yet.
    pub fn is_written_beside(&self, client: ClientId, ino: InodeId) -> bool {
        let writes = |(c, h): (&ClientId, &Holder)| *c != client && h.mode == LeaseMode::Write;
        self.entries.get(&ino).is_some_and(|e| e.holders.iter().any(writes))
    }

    /// What `client` holds on `ino` shall come back; `false` if it holds nothing, or is asked already.
    pub fn take_back(&mut self, client: ClientId, ino: InodeId) -> bool {
        self.entries
            .get_mut(&ino)
            .is_some_and(|e| e.holders.contains_key(&client) && e.recalling.insert(client))
    }

    /// A lease that nobody can dispute: a fresh inode number, or one reported by an agent.
    pub fn adopt(&mut self, client: ClientId, ino: InodeId, mode: LeaseMode) {
        if mode > LeaseMode::None {
            let bytes = match planted(Bug::RangesUnreported) {
                true => Bytes::Some(Spans::new()),
                false => Bytes::Any,
            };
            let holders = &mut self.entries.entry(ino).or_default().holders;
            let before = holders.insert(client, Holder { mode, token: 0, bytes });
            self.spans -= before.map_or(0, |holder| holder.bytes.count());
            self.of.entry(client).or_default().insert(ino);
        }
    }

    /// A client asks.
    pub fn want(&mut self, ino: InodeId, want: Want, out: &mut Vec<Action>) {
        self.entries.entry(ino).or_default().waiting.push_back(want);
        self.wanted.entry(want.client).or_default().insert(ino);
        self.advance(ino, out);
    }

    /// Strikes out everything that `client` holds and waits for; where that was.
    fn strike(&mut self, client: ClientId) -> BTreeSet<InodeId> {
        let mut touched = self.of.remove(&client).unwrap_or_default();
        touched.extend(self.wanted.remove(&client).unwrap_or_default());
        for ino in &touched {
            if let Some(entry) = self.entries.get_mut(ino) {
                entry.waiting.retain(|w| w.client != client);
                let before = entry.holders.remove(&client);
                self.spans -= before.map_or(0, |holder| holder.bytes.count());
                entry.recalling.remove(&client);
            }
        }
        touched
    }

    /// A recalled or returned lease is gone.
    pub fn released(&mut self, client: ClientId, ino: InodeId, out: &mut Vec<Action>) {
        if let Some(entry) = self.entries.get_mut(&ino) {
            let before = entry.holders.remove(&client);
            self.spans -= before.map_or(0, |holder| holder.bytes.count());
            entry.recalling.remove(&client);
        }
        if let Some(inodes) = self.of.get_mut(&client) {
            inodes.remove(&ino);
        }
        self.advance(ino, out);
    }

    /// The agent of `client` says what it holds: that and nothing else counts from now on.
    pub fn replace(
        &mut self,
        client: ClientId,
        held: &[(InodeId, LeaseMode)],
        out: &mut Vec<Action>,
    ) {
        let mut touched = self.strike(client);
        for (ino, mode) in held {
            self.adopt(client, *ino, *mode);
            touched.insert(*ino);
        }
        for ino in touched {
            self.advance(ino, out);
        }
    }

    /// A client ended: everything it held or waited for is void.
    pub fn gone(&mut self, client: ClientId, out: &mut Vec<Action>) {
        for ino in self.strike(client) {
            self.advance(ino, out);
        }
    }

    /// Serves the queue of an inode as far as holders allow.
    fn advance(&mut self, ino: InodeId, out: &mut Vec<Action>) {
        let Some(entry) = self.entries.get_mut(&ino) else { return };
        while let Some(&want) = entry.waiting.front() {
            // What it holds already it keeps: agents may have reported others beside it, who gave theirs back before.
            let own = entry.holders.get(&want.client).map_or(LeaseMode::None, |h| h.mode);
            let wanted = own.max(want.mode);
            let blockers: Vec<ClientId> = entry
                .holders
                .iter()
                .filter(|(c, h)| match **c == want.client {
                    true => supersedes(want.mode, h.mode),
                    false => excludes((wanted, want.span), h),
                })
                .map(|(c, _)| *c)
                .collect();
            if !blockers.is_empty() {
                for client in blockers {
                    if entry.recalling.insert(client) {
                        out.push(Action::Recall(client, ino));
                    }
                }
                return;
            }
            if entry.recalling.contains(&want.client) {
                // Its old lease is on its way back; it gets the new one afterwards.
                return;
            }
            entry.waiting.pop_front();
            if !entry.waiting.iter().any(|w| w.client == want.client)
                && let Some(inodes) = self.wanted.get_mut(&want.client)
            {
                inodes.remove(&ino);
                if inodes.is_empty() {
                    self.wanted.remove(&want.client);
                }
            }
            let mut span = Span::NONE;
            if wanted == LeaseMode::Joint && !want.span.is_empty() {
                // As wide as nobody minds.
                let (asked, mut most) = (want.span.range(), want.most.range());
                for (_, other) in entry.holders.iter().filter(|(c, _)| **c != want.client) {
                    if let Bytes::Some(spans) = &other.bytes {
                        most = spans.gap(&asked, most);
                    }
                }
                span = Span { from: most.start.min(asked.start), to: most.end.max(asked.end) };
            }
            let held = entry.holders.entry(want.client).or_insert(Holder::NONE);
            (held.mode, held.token) = (wanted, want.token);
            self.spans -= held.bytes.count();
            match &mut held.bytes {
                Bytes::Some(spans) if wanted == LeaseMode::Joint => spans.insert(span.range()),
                Bytes::Any if wanted == LeaseMode::Joint => {}
                bytes => *bytes = Bytes::Some(Spans::new()),
            }
            self.spans += held.bytes.count();
            let granted = Want { mode: held.mode, span, ..want };
            if held.mode > LeaseMode::None {
                self.of.entry(want.client).or_default().insert(ino);
            } else {
                entry.holders.remove(&want.client);
            }
            out.push(Action::Grant(ino, granted));
        }
        if entry.holders.is_empty() && entry.waiting.is_empty() {
            self.entries.remove(&ino);
        }
    }

    /// Inodes with holders, for status.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is leased.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What the module says is always true; else what is not.
    pub fn invariants(&self) -> Result<(), String> {
        for (ino, entry) in &self.entries {
            // (What agents report a head that does not know has to take as it is: who gave a lease back holds it until all
            // that was done under it is settled, and the next one may have it already.)
            let granted: Vec<LeaseMode> =
                entry.holders.values().filter(|h| h.token != 0).map(|h| h.mode).collect();
            let having = |mode| granted.iter().filter(|m| **m == mode).count();
            let (writers, jointly) = (having(LeaseMode::Write), having(LeaseMode::Joint));
            always!(writers == 0 || granted.len() == 1, "{ino}: a writer beside others");
            let alike = jointly == 0 || jointly == granted.len();
            always!(alike, "{ino}: a reader beside those who change its names or bytes");
            let granted: Vec<&Spans> = entry
                .holders
                .values()
                .filter(|h| h.token != 0)
                .filter_map(|h| if let Bytes::Some(spans) = &h.bytes { Some(spans) } else { None })
                .collect();
            for (at, spans) in granted.iter().enumerate() {
                let own = |span| granted[at + 1..].iter().all(|other| !other.has_some(&span));
                always!(spans.iter().all(own), "{ino}: two have the same bytes");
            }
            for client in entry.holders.keys() {
                let known = self.of.get(client).is_some_and(|s| s.contains(ino));
                always!(known, "{ino}: a lease that its client's end would not find");
            }
            for want in &entry.waiting {
                let known = self.wanted.get(&want.client).is_some_and(|s| s.contains(ino));
                always!(known, "{ino}: a wait that its client's end would not find");
            }
            let served = entry.waiting.is_empty() || !entry.recalling.is_empty();
            always!(served, "{ino}: somebody waits for nothing");
            let held = entry.recalling.iter().all(|c| entry.holders.contains_key(c));
            always!(held, "{ino}: a lease comes back that nobody holds");
        }
        let spans = |e: &Entry| e.holders.values().map(|h| h.bytes.count()).sum::<usize>();
        always!(
            self.entries.values().map(spans).sum::<usize>() == self.spans,
            "spans of bytes are miscounted"
        );
        for (client, inodes) in &self.of {
            let holds = |ino| self.entries.get(ino).is_some_and(|e| e.holders.contains_key(client));
            always!(
                inodes.iter().all(holds),
                "client {:#x} is said to hold what it does not",
                client.0
            );
        }
        Ok(())
    }

    /// Who holds a lease or waits for one.
    pub fn clients(&self) -> impl Iterator<Item = ClientId> {
        let holds = self.of.iter().filter(|(_, inodes)| !inodes.is_empty()).map(|(c, _)| *c);
        holds.chain(self.wanted.keys().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;

    impl LeaseTable {
        /// Of one client at a time nothing is reported that another has.
        fn is_exclusive(&self) -> bool {
            let alone = |e: &Entry| {
                let writes = e.holders.values().any(|h| h.mode == LeaseMode::Write);
                !writes || e.holders.len() == 1
            };
            self.entries.values().all(alone)
        }

        fn waits(&self, client: ClientId) -> Vec<u64> {
            let all = self.entries.values().flat_map(|e| &e.waiting);
            all.filter(|w| w.client == client).map(|w| w.token).collect()
        }

        fn held(&self, client: ClientId) -> Vec<(InodeId, LeaseMode)> {
            let of = |(i, e): (&InodeId, &Entry)| Some((*i, e.holders.get(&client)?.mode));
            self.entries.iter().filter_map(of).collect()
        }
    }

    /// Agents report in any order what a client uses and what another one gave back before: whoever wants it then waits for both.
    #[test]
    fn whatever_agents_report_is_asked_for() {
        let (uses, gave_back, wants, ino) = (ClientId(1), ClientId(2), ClientId(3), InodeId(7));
        for order in [[uses, gave_back], [gave_back, uses]] {
            let (mut table, mut out) = (LeaseTable::default(), Vec::new());
            for client in order {
                table.replace(client, &[(ino, LeaseMode::Write)], &mut out);
            }
            assert!(table.invariants().is_ok() && out.is_empty());
            let want = Want::all(wants, 1, LeaseMode::Write);
            table.want(ino, want, &mut out);
            assert_eq!(out, [Action::Recall(uses, ino), Action::Recall(gave_back, ino)]);
            for client in order {
                table.released(client, ino, &mut out);
            }
            assert_eq!(out.pop(), Some(Action::Grant(ino, want)));
        }
    }

    /// Two have other bytes of a file, each as many as nobody minds; what a report says they have is not known.
    #[test]
    fn who_wants_other_bytes_takes_nothing() {
        let (a, b, ino) = (ClientId(1), ClientId(2), InodeId(7));
        let (mut table, mut out) = (LeaseTable::default(), Vec::new());
        let mut ask = |table: &mut LeaseTable, client, token, (from, to), most| {
            let (span, most) = (Span { from, to }, Span { from: 0, to: most });
            let want = Want { span, most, ..Want::all(client, token, LeaseMode::Joint) };
            table.want(ino, want, &mut out);
            assert_eq!(table.invariants(), Ok(()));
            std::mem::take(&mut out)
        };
        let span = |out: &[Action]| match out {
            [Action::Grant(_, want)] => want.span.range(),
            other => panic!("{other:?}"),
        };
        assert_eq!(span(&ask(&mut table, a, 1, (0, 8), 16)), 0..16, "as wide as it may be");
        assert_eq!(span(&ask(&mut table, b, 2, (24, 32), 64)), 16..64, "as nobody has");
        assert!(table.has_bytes(a, ino, Span { from: 3, to: 16 }));
        assert!(!table.has_bytes(a, ino, Span { from: 3, to: 17 }));
        assert_eq!(table.spans(b, ino), (1, 2));
        assert_eq!(table.way(a, ino, Span { from: 64, to: 65 }), Way::Beside);
        assert_eq!(table.way(a, ino, Span { from: 63, to: 65 }), Way::Taken);
        assert_eq!(ask(&mut table, a, 3, (63, 65), 65), [Action::Recall(b, ino)]);
        let mut out = Vec::new();
        table.released(b, ino, &mut out);
        assert_eq!(span(&out), 0..65, "its own among them");
        assert_eq!((table.spans(a, ino), table.spans(b, ino)), ((1, 1), (0, 1)), "one, by now");
        let mut out = Vec::new();
        table.replace(a, &[(ino, LeaseMode::Joint)], &mut out);
        assert!(table.has_bytes(a, ino, Span { from: 100, to: 200 }), "any of them");
        assert_eq!(ask(&mut table, b, 4, (500, 501), 501), [Action::Recall(a, ino)]);
    }

    #[test]
    fn random_histories_keep_the_invariants_and_serve_everybody() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut table = LeaseTable::default();
            let mut recalls: Vec<(ClientId, InodeId)> = Vec::new();
            let (mut asked, mut granted) = (0u64, 0u64);
            let settle = |actions: Vec<Action>, recalls: &mut Vec<_>, granted: &mut u64| {
                for action in actions {
                    match action {
                        Action::Recall(c, i) => recalls.push((c, i)),
                        Action::Grant(_, want) => {
                            *granted += 1;
                            let (span, most) = (want.span, want.most);
                            let within = most.from <= span.from && span.to <= most.to;
                            assert!(span.is_empty() || within, "seed {seed}: {want:?}");
                        }
                    }
                }
            };
            for _ in 0..200 {
                let mut out = Vec::new();
                if random.chance(1, 40) {
                    // A client ends, or its agent says anew what it holds: what it waited for counts no more.
                    let client = ClientId(1 + random.below(4));
                    let waited: Vec<u64> = table.waits(client);
                    if random.chance(1, 2) {
                        table.gone(client, &mut out);
                    } else {
                        let held = table.held(client);
                        table.replace(client, &held, &mut out);
                    }
                    asked -= waited.len() as u64;
                    recalls.retain(|(c, _)| *c != client);
                    assert!(table.waits(client).is_empty(), "seed {seed}: it waits no more");
                } else if random.chance(1, 2) && !recalls.is_empty() {
                    let at = random.below(recalls.len() as u64) as usize;
                    let (client, ino) = recalls.swap_remove(at);
                    table.released(client, ino, &mut out);
                } else {
                    let mode = [LeaseMode::Read, LeaseMode::Write, LeaseMode::Joint]
                        [random.below(3) as usize];
                    let (client, ino) = (ClientId(1 + random.below(4)), 1 + random.below(3));
                    // The first is a directory.
                    let (mut span, mut most) = (Span::NONE, Span::NONE);
                    if ino > 1 && mode == LeaseMode::Joint {
                        let from = random.below(12);
                        span = Span { from, to: from + 1 + random.below(4) };
                        most = Span { from: from / 4 * 4, to: span.to.next_multiple_of(4) };
                    }
                    let want = Want { span, most, ..Want::all(client, asked, mode) };
                    asked += 1;
                    table.want(InodeId(ino), want, &mut out);
                }
                settle(out, &mut recalls, &mut granted);
                assert_eq!(table.invariants(), Ok(()));
                assert!(table.is_exclusive(), "a writer beside others");
            }
            while let Some((client, ino)) = recalls.pop() {
                let mut out = Vec::new();
                table.released(client, ino, &mut out);
                settle(out, &mut recalls, &mut granted);
                assert_eq!(table.invariants(), Ok(()));
                assert!(table.is_exclusive(), "a writer beside others");
            }
            assert_eq!(asked, granted, "seed {seed}: nobody waits for ever");
        }
    }
}
