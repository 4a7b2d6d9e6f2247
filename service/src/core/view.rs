//! Views: taking over as head, following a new one, joining.
//!
//! A new view reaches every member. Each member tells the head of it what its clients hold
//! (`ClientUp`, one each) and then how far its stream reaches (`Position`). A new head grants
//! nothing before every member has spoken. If a member holds more of the stream than the head, the
//! head fetches it; what a member lacks is sent to it. Chunks are only ever made by one head an
//! epoch and passed down the chain, so of two members one's stream is a prefix of the other's.
//!
//! A node that joins gets the head's namespace as synthetic entries of one moment, then the content
//! of the files, then the stream from that moment on. Content copied later than the moment may be
//! newer than it; the stream that follows says the same again (entries carry absolute results).

use std::collections::VecDeque;
use std::sync::Arc;

use base::planted::{Bug, planted};
use base::{ClientId, Epoch, InodeId, Nanos, NodeId, Sequence, StreamSeq};
use storage::acl;
use storage::format::entry::{Op, Stamp, mask};
use storage::format::rpc::InodeRecord;
use storage::media::Segment;
use storage::volume::{AccountId, Params, Refusal, Volume, run_copies};

use super::message::Message;
use super::{Effect, Failure, Node, Role, entries};

/// Inode numbers skipped at a takeover: the old head may have handed out numbers unknown here.
const TAKEOVER_SKIP: u64 = 1 << 20;
/// A joining node that hears nothing asks again after this time.
const JOIN_AGAIN: u64 = 500_000_000;
/// One that has everything and is not in the chain after this time begins anew.
const JOIN_GIVE_UP: u64 = 5_000_000_000;
/// Between two requests to let a follower into the chain.
const PROMOTE_PAUSE: u64 = 50_000_000;
/// After this time a head that is not fenced knows what became of such a request: a heartbeat sent later
/// has been confirmed, on the same connection.
const PROMOTE_KNOWN: u64 = 1_000_000_000;
/// Bytes of synthetic entries in one snapshot message.
const PIECE: usize = 512 * 1024;
/// Bytes of file content in one entry.
const CONTENT: usize = 128 * 1024;
const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;

/// A snapshot on its way to a joining node.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) seq: StreamSeq,
    pieces: VecDeque<Vec<u8>>,
    files: VecDeque<(InodeId, u64)>,
    at: u64,
    /// Messages sent.
    number: u32,
    /// All of it is on its way.
    sent: bool,
}

impl Outgoing {
    /// Whether all of it is on its way: no content is read for it any more.
    pub(super) const fn is_sent(&self) -> bool {
        self.sent
    }

    /// The number of the next message.
    const fn next(&mut self) -> u32 {
        self.number += 1;
        self.number - 1
    }
}

/// A snapshot arriving.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// The snapshot of which pieces have arrived, and the piece that is next.
    begun: Option<(StreamSeq, u32)>,
}

impl Node {
    pub(super) fn on_view(
        &mut self,
        epoch: Epoch,
        chain: Vec<NodeId>,
        syncing: Vec<NodeId>,
        lapse: Nanos,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if epoch < self.epoch
            || (epoch == self.epoch && chain == self.chain && syncing == self.syncing)
        {
            return Ok(());
        }
        let (was, new_epoch) = (self.role(), epoch != self.epoch);
        (self.epoch, self.chain, self.syncing) = (epoch, chain, syncing);
        log::info!("epoch {epoch}: chain {:?}, joining {:?}", self.chain, self.syncing);
        let members = self.chain.clone();
        self.acked.retain(|n, _| members.contains(n));
        let joining = self.syncing.clone();
        self.snapshots.retain(|n, _| joining.contains(n));
        self.followers.retain(|n| joining.contains(n));
        if new_epoch {
            // Pieces under way are refused as of an old epoch: who joins asks anew.
            self.snapshots.clear();
            self.followers.clear();
            self.joining.clear();
            self.promised.clear();
        }
        if matches!(self.role(), Role::Head | Role::Member) {
            self.end_join()?;
        }
        match self.role() {
            Role::Head if was == Role::Head && self.ready => {
                self.forget_lost_nodes(lapse, out)?;
                self.advance_acks(out)?;
            }
            // Who joins has changed; what members have said stands.
            Role::Head if was == Role::Head && !new_epoch => self.take_over_step(out)?,
            Role::Head => self.begin_take_over(lapse, out)?,
            Role::Member => {
                self.become_follower(out);
            }
            Role::Syncing | Role::Outside => {
                // Whoever is to join had lost its place: others have served since, and may have
                // granted anew what the clients of an earlier run held.
                let lost =
                    self.role() == Role::Syncing && self.taken_up && !planted(Bug::JoinKeepsLogs);
                if lost || matches!(was, Role::Head | Role::Member) {
                    self.leave_chain(out)?;
                }
                if self.role() == Role::Syncing && (new_epoch || was != Role::Syncing) {
                    self.begin_join(out);
                }
            }
        }
        for client in self.clients.values() {
            client.set_epoch(epoch);
        }
        out.push(Effect::Position(self.ring.last()));
        let early = std::mem::take(&mut self.early);
        for (from, its_epoch, message) in early {
            if its_epoch == self.epoch {
                self.message(from, message, out)?;
            } else if its_epoch > self.epoch {
                self.early.push_back((from, its_epoch, message));
            }
        }
        Ok(())
    }

    /// Clients of nodes that left the chain are gone: as soon as their leases have lapsed, for the node
    /// may not know that it is out, and its processes may be dead or stopped while its clients go on.
    fn forget_lost_nodes(&mut self, lapse: Nanos, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if planted(Bug::LostNodeKept) {
            return Ok(());
        }
        let lost: Vec<_> =
            self.known.keys().copied().filter(|c| !self.chain.contains(&c.node())).collect();
        for client in lost {
            if self.lingering.contains_key(&client) {
                continue;
            }
            if lapse > 0 && !planted(Bug::SuspectedAtOnce) {
                self.lingering.insert(client, self.now + lapse);
            } else {
                self.head_message(client.node(), Message::ClientGone { client }, out)?;
            }
        }
        Ok(())
    }

    /// Clients of suspected nodes whose time is over.
    pub(super) fn forget_lingering(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if !self.is_head() || !self.ready {
            return Ok(());
        }
        let over: Vec<ClientId> =
            self.lingering.iter().filter(|(_, at)| **at <= self.now).map(|(c, _)| *c).collect();
        for client in over {
            self.lingering.remove(&client);
            self.head_message(client.node(), Message::ClientGone { client }, out)?;
        }
        Ok(())
    }

    /// A member has told of all its clients: those that it did not name have ended, and the word of
    /// it was lost.
    fn report_ends(&mut self, from: NodeId, out: &mut Vec<Effect>) -> Result<(), Failure> {
        let named = self.reported.remove(&from).unwrap_or_default();
        let ended =
            |c: &&ClientId| c.node() == from && !named.contains(*c) && !planted(Bug::EndUnheard);
        let ended: Vec<ClientId> = self.known.keys().filter(ended).copied().collect();
        for client in ended {
            self.head_message(from, Message::ClientGone { client }, out)?;
        }
        Ok(())
    }

    fn begin_take_over(&mut self, lapse: Nanos, out: &mut Vec<Effect>) -> Result<(), Failure> {
        self.ready = false;
        self.positions.clear();
        self.unready.clear();
        self.reported.clear();
        if !planted(Bug::SuspectedAtOnce) {
            // What the lost nodes' clients hold is not known here.
            self.grants_from = self.grants_from.max(self.now + lapse);
        }
        self.lingering.clear();
        self.positions.insert(self.me(), self.ring.last());
        self.known.clear();
        self.leases = super::lease::LeaseTable::default();
        self.locking.begin_take_over();
        self.held_grants.clear();
        self.recall_tokens.clear();
        self.stalled.clear();
        self.acked.clear();
        self.stash.clear();
        self.next_inode = self.volume.last_inode().0 + TAKEOVER_SKIP;
        self.rewind_clients();
        self.renew_recalls();
        for message in self.client_ups() {
            self.local.push_back(message);
        }
        self.take_over_step(out)
    }

    pub(super) fn position_arrived(
        &mut self,
        from: NodeId,
        seq: StreamSeq,
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        if !self.is_head() {
            return Ok(());
        }
        self.positions.insert(from, seq);
        if self.chain.contains(&from) {
            self.report_ends(from, out)?;
        }
        if self.ready {
            // A member that was out of reach, or a node that has the snapshot.
            if seq > self.ring.last() {
                self.counters.bad_messages += 1;
                return Ok(());
            }
            let acked = self.acked.entry(from).or_default();
            *acked = (*acked).max(seq);
            let complete = self.send_all(from, StreamSeq(seq.0 + 1), out)?;
            if complete && self.syncing.contains(&from) {
                // From here on it is sent every chunk and nothing is acknowledged without it, so
                // that whatever is acknowledged when it enters the chain is there.
                self.followers.insert(from);
                self.snapshots.remove(&from);
            }
            return self.advance_acks(out);
        }
        self.take_over_step(out)
    }

    /// Goes on with a takeover as far as what the members said allows.
    pub(super) fn take_over_step(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if self.ready || !self.chain.iter().all(|n| self.positions.contains_key(n)) {
            return Ok(());
        }
        let best = self.positions.iter().max_by_key(|(_, seq)| **seq).map(|(n, s)| (*n, *s));
        let Some((holder, most)) = best else { return Ok(()) };
        if most > self.ring.last() && !planted(Bug::TakeOverShort) {
            let from = StreamSeq(self.ring.last().0 + 1);
            self.send(holder, &Message::StreamWant { from }, out);
            return Ok(());
        }
        while self.applied < self.ring.last() {
            self.apply_next()?;
        }
        for (node, seq) in self.positions.clone() {
            if node == self.me() || !self.chain.contains(&node) {
                continue;
            }
            self.acked.insert(node, seq);
            self.send_all(node, StreamSeq(seq.0 + 1), out)?;
        }
        // Handle what this node's own clients reported before anything is granted.
        while let Some(message) = self.local.pop_front() {
            let me = self.me();
            self.message(me, message, out)?;
        }
        self.ready = true;
        self.next_inode = self.next_inode.max(self.volume.last_inode().0 + TAKEOVER_SKIP);
        log::info!("head of epoch {} from stream position {}", self.epoch, self.ring.last());
        self.advance_acks(out)?;
        // Those known here that are not in the chain left during the takeover: all grants wait.
        self.forget_lost_nodes(0, out)?;
        let orphans = self.volume.orphans()?;
        self.reap_unpinned(orphans, out)?;
        self.ask_again();
        self.retry_stalled(out)?;
        for (from, message) in std::mem::take(&mut self.unready) {
            self.head_message(from, message, out)?;
        }
        self.serve_early_locks(out)?;
        self.wake_lock_waiters();
        let all: Vec<_> = self.clients.keys().copied().collect();
        self.active.extend(all);
        Ok(())
    }

    /// Sends everything from `from` on; `false` when that is no longer kept.
    fn send_all(
        &mut self,
        node: NodeId,
        mut from: StreamSeq,
        out: &mut Vec<Effect>,
    ) -> Result<bool, Failure> {
        while from <= self.ring.last() {
            if !self.send_stream(node, from, out)? {
                return Ok(false);
            }
            from.0 += super::stream::RESEND_MAX;
        }
        Ok(true)
    }

    /// Nodes that hold everything enter the chain.
    pub(super) fn promote_followers(&mut self, out: &mut Vec<Effect>) {
        if self.now < self.promoted_at + PROMOTE_PAUSE {
            return;
        }
        for node in &self.followers {
            let process = self.joining.get(node).copied();
            if let Some(process) = process
                && self.acked_by(*node) >= self.all_acked
            {
                self.promoted_at = self.now;
                self.promised.insert(*node, self.now);
                out.push(Effect::CaughtUp(*node, process, self.epoch));
            }
        }
    }

    fn rewind_clients(&mut self) {
        for client in self.clients.values_mut() {
            client.rewind();
        }
    }

    /// What the clients of this node hold, for a head that does not know. Also those that ended:
    /// what they wrote may not be settled yet, and the head takes entries only of clients it knows.
    fn client_ups(&mut self) -> Vec<Message> {
        self.clients.values_mut().for_each(super::client::Client::forget_tokens);
        self.clients
            .values()
            .map(|c| Message::ClientUp {
                client: c.id,
                incarnation: c.descriptor.incarnation,
                settled: c.settled,
                identity: c.identity.clone(),
                leases: c.leases().into_iter().chain(c.returned()).collect(),
                pins: c.pins().into_iter().chain(c.unmade().iter().copied()).collect(),
                rights: c.rights(),
                refusals: c.refusals,
            })
            .chain(self.clients.keys().flat_map(|c| self.locking.report(*c)))
            .collect()
    }

    /// Tells the head everything it must know of this node.
    fn become_follower(&mut self, out: &mut Vec<Effect>) {
        self.ready = true;
        // Whatever was under way between head and agent may be lost: it begins anew.
        self.rewind_clients();
        self.renew_recalls();
        for message in self.client_ups() {
            self.to_head(message, out);
        }
        let seq = self.ring.last();
        self.to_head(Message::Position { seq }, out);
        self.ask_again();
        self.wake_lock_waiters();
        let all: Vec<_> = self.clients.keys().copied().collect();
        self.active.extend(all);
        self.want_stream(out);
    }

    /// What the clients wrote and not every member has does not count: a chain without this node
    /// goes on without it.
    fn leave_chain(&mut self, out: &mut Vec<Effect>) -> Result<(), Failure> {
        log::warn!("this node is no longer in the chain; its clients must attach anew");
        for client in self.clients.values_mut() {
            let kept = client.settled.min(client.replicated);
            client.dismiss(kept);
            client.forget_row()?;
            out.push(Effect::Detached(client.id));
        }
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            self.remove_client(id)?;
        }
        self.requests.clear();
        self.recalls.clear();
        self.locking.drop_all();
        self.ready = false;
        self.taken_up = false;
        Ok(())
    }

    pub(super) fn peer_up(&mut self, node: NodeId, out: &mut Vec<Effect>) -> Result<(), Failure> {
        match self.role() {
            Role::Head => {
                // What was in flight to the agent may be lost: recalls are asked again when the
                // agent's clients ask; grants are void until then.
                Ok(())
            }
            Role::Member => {
                if self.chain.first() == Some(&node) {
                    self.become_follower(out);
                } else if self.predecessor() == Some(node) {
                    self.want_stream(out);
                }
                Ok(())
            }
            Role::Syncing => {
                if self.chain.first() == Some(&node) {
                    match self.incoming {
                        Some(_) => self.begin_join(out),
                        None => self.to_head(Message::Position { seq: self.ring.last() }, out),
                    }
                }
                Ok(())
            }
            Role::Outside => Ok(()),
        }
    }

    pub(super) fn peer_down(&mut self, node: NodeId) {
        self.snapshots.remove(&node);
        self.reported.remove(&node);
    }

    pub(super) fn resume(&mut self, seq: StreamSeq, out: &mut Vec<Effect>) -> Result<(), Failure> {
        if seq < self.applied {
            return Err(Failure::Diverged(seq, "the chain went on without it".into()));
        }
        self.ring.cut(seq);
        self.acknowledge(out);
        Ok(())
    }

    // --- joining ---

    fn begin_join(&mut self, out: &mut Vec<Effect>) {
        log::info!("joining: asking the head for the volume's state");
        self.incoming = Some(Incoming::default());
        self.joining_at = self.now;
        self.want_snapshot(out);
    }

    fn want_snapshot(&mut self, out: &mut Vec<Effect>) {
        self.to_head(Message::SnapshotWant { incarnation: self.config.incarnation }, out);
    }

    /// It is in the chain: what it asked for since it had everything will not come.
    fn end_join(&mut self) -> Result<(), Failure> {
        match self.incoming.take().and_then(|i| i.begun) {
            None => Ok(()),
            Some((seq, _)) => {
                Err(Failure::Diverged(seq, "it is in the chain with half a snapshot".into()))
            }
        }
    }

    /// What a joining node asked for may have come before the head knew of it, or got lost.
    pub(super) fn join_again(&mut self, out: &mut Vec<Effect>) {
        if self.role() != Role::Syncing || self.now < self.joining_at + JOIN_AGAIN {
            return;
        }
        self.joining_at = self.now;
        match self.incoming {
            Some(_) => self.want_snapshot(out),
            // The head no longer keeps what is missing here, or it would be in the chain by now.
            None if self.now > self.joined_at + JOIN_GIVE_UP => self.begin_join(out),
            None => self.to_head(Message::Position { seq: self.ring.last() }, out),
        }
    }

    /// A node wants to join: fixes the namespace of this moment.
    pub(super) fn snapshot_wanted(
        &mut self,
        from: NodeId,
        incarnation: u64,
    ) -> Result<(), Failure> {
        if !self.is_head() || !self.ready || !self.syncing.contains(&from) {
            return Ok(());
        }
        self.followers.remove(&from);
        let before = self.joining.insert(from, incarnation);
        let asks_again = before == Some(incarnation);
        if before.is_some_and(|old| old != incarnation) {
            // What was promised for the process before it, the coordinator refuses to this one.
            self.promised.remove(&from);
        }
        let open = |at: &u64| self.fenced || self.now < at + PROMOTE_KNOWN;
        if self.promised.get(&from).is_some_and(open) && !planted(Bug::PromisedWiped) {
            // It may be in the chain already, by the word of this head, and must not be wiped. It asks again.
            return Ok(());
        }
        if asks_again && self.snapshots.get(&from).is_some_and(|s| s.number == 0 && !s.sent) {
            // Making it took longer than the node waits before it asks again. It would for ever.
            return Ok(());
        }
        // What it held before is about to be wiped.
        self.acked.remove(&from);
        self.counters.snapshots += 1;
        // Content is read from the arenas, which hold what is published.
        self.publish_all()?;
        let mut writer = Synthetic::default();
        let mut files = VecDeque::new();
        self.dump(&mut writer, &mut files)?;
        let pieces = writer.finish();
        log::info!("node {from} joins at stream position {}", self.applied);
        self.snapshots.insert(
            from,
            Outgoing { seq: self.applied, pieces, files, at: 0, number: 0, sent: false },
        );
        Ok(())
    }

    /// Every name, attribute and extended attribute as entries, parents first.
    fn dump(
        &self,
        out: &mut Synthetic,
        files: &mut VecDeque<(InodeId, u64)>,
    ) -> Result<(), Failure> {
        let mut seen = std::collections::BTreeSet::new();
        let mut dirs = VecDeque::from([InodeId::ROOT]);
        let (mut late, mut counted) = (Vec::new(), Vec::new());
        if let Some(root) = self.volume.attr(InodeId::ROOT)? {
            counted.push((root.ino, root.project));
            late.push(root);
        }
        while let Some(dir) = dirs.pop_front() {
            let mut names = Vec::new();
            self.volume.readdir(dir, 0, usize::MAX, &mut |n| {
                if n.name != b"." && n.name != b".." {
                    names.push((n.ino, n.name.to_vec()));
                }
                true
            })?;
            for (ino, name) in names {
                if !seen.insert(ino) {
                    out.op(&Op::Link { ino, parent: dir, name: &name });
                    continue;
                }
                let Some(record) = self.volume.attr(ino)? else { continue };
                counted.push((ino, record.project));
                let target = self.volume.symlink(ino)?;
                self.dump_inode(out, &record, dir, &name, &target)?;
                if record.mode & S_IFMT == S_IFDIR {
                    dirs.push_back(ino);
                }
                if record.mode & S_IFMT == S_IFREG && record.size > 0 {
                    files.push_back((ino, record.size));
                }
                late.push(record);
            }
        }
        // Orphans that somebody still has open live on without a name, here too: a name in the
        // root that goes away at once.
        for ino in self.volume.orphans()? {
            let Some(record) = self.volume.attr(ino)? else { continue };
            counted.push((ino, record.project));
            if record.linkable {
                let (mode, uid, gid, parent) = (record.mode, record.uid, record.gid, InodeId::ROOT);
                out.time = nanos(record.btime);
                out.op(&Op::Tmpfile { ino, parent, mode, uid, gid, linkable: true });
                self.dump_rest(out, &record)?;
                files.push_back((ino, record.size));
                continue;
            }
            let name = format!(".corbel-orphan-{ino}").into_bytes();
            let target = self.volume.symlink(ino)?;
            self.dump_inode(out, &record, InodeId::ROOT, &name, &target)?;
            if record.mode & S_IFMT == S_IFDIR {
                out.op(&Op::Rmdir { ino, parent: InodeId::ROOT, name: &name });
                late.push(record);
            } else {
                out.op(&Op::Unlink { ino, parent: InodeId::ROOT, name: &name, open: true });
                files.push_back((ino, record.size));
            }
        }
        // Whose quota counts them comes after all names: a file may have names in two trees since
        // before one of them had a quota.
        for (ino, project) in counted.into_iter().filter(|(_, of)| *of != InodeId::NONE) {
            out.op(&Op::SetProject { ino, project });
        }
        for (account, limit) in self.volume.limits() {
            let (ino, user) = match account {
                AccountId::User(uid) => (InodeId::ROOT, Some(uid)),
                AccountId::Directory(ino) => (ino, None),
            };
            out.op(&Op::SetQuota { ino, user, limit });
        }
        // Lists to be inherited come after all that would inherit them, times last: making names
        // changes those of directories.
        for record in late.into_iter().rev() {
            if let Some(list) = &record.default_acl {
                let (ino, name, value) = (record.ino, acl::DEFAULT, list.encode());
                out.op(&Op::SetXattr { ino, name, value: &value });
            }
            out.times(&record);
        }
        Ok(())
    }

    fn dump_inode(
        &self,
        out: &mut Synthetic,
        r: &InodeRecord,
        parent: InodeId,
        name: &[u8],
        target: &[u8],
    ) -> Result<(), Failure> {
        out.time = nanos(r.btime);
        let (ino, mode, rdev, uid, gid) = (r.ino, r.mode, r.rdev, r.uid, r.gid);
        out.op(&Op::Create { ino, parent, mode, rdev, uid, gid, name, target });
        self.dump_rest(out, r)
    }

    /// What an inode has besides what it was made with, content and times apart.
    fn dump_rest(&self, out: &mut Synthetic, r: &InodeRecord) -> Result<(), Failure> {
        let ino = r.ino;
        if r.mode & S_IFMT == S_IFREG && r.size > 0 {
            out.op(&Op::Truncate { ino, size: r.size, clear_setid: false });
        }
        for name in self.volume.xattrs(ino)? {
            if name == acl::DEFAULT {
                continue;
            }
            if let Some(value) = self.volume.xattr(ino, &name)? {
                out.op(&Op::SetXattr { ino, name: &name, value: &value });
            }
        }
        Ok(())
    }

    /// Sends the next piece of a snapshot; `true` when there was one.
    pub(super) fn snapshot_step(&mut self, out: &mut Vec<Effect>) -> Result<bool, Failure> {
        let going = |(n, s): (&NodeId, &Outgoing)| (!s.sent).then_some(*n);
        let Some(node) = self.snapshots.iter().find_map(going) else { return Ok(false) };
        let Some(mut going) = self.snapshots.remove(&node) else { return Ok(false) };
        let last_inode = self.volume.last_inode();
        let seq = going.seq;
        if let Some(raw) = going.pieces.pop_front() {
            let piece = going.next();
            self.send(node, &Message::Snapshot { seq, piece, last_inode, end: false, raw }, out);
            self.snapshots.insert(node, going);
            return Ok(true);
        }
        let mut writer = Synthetic::default();
        while writer.len() < PIECE {
            let Some((ino, size)) = going.files.front().copied() else { break };
            let record = self.volume.attr(ino)?;
            if going.at >= size || record.is_none() {
                // Writing the content has changed the times.
                record.iter().for_each(|r| writer.times(r));
                going.files.pop_front();
                going.at = 0;
                continue;
            }
            let moving = self.dirty.get(&ino).is_some_and(|(seq, _)| *seq > self.published);
            if moving && !planted(Bug::MovedContent) {
                // Blocks that an operation has moved hold nothing before it is published.
                self.publish_all()?;
            }
            going.at = self.content(&mut writer, ino, going.at, size)?;
        }
        if planted(Bug::SnapshotPieceLost) && going.files.len() == 1 {
            going.files.clear();
        }
        let end = going.files.is_empty();
        for raw in writer.finish() {
            let piece = going.next();
            self.send(node, &Message::Snapshot { seq, piece, last_inode, end: false, raw }, out);
        }
        if end {
            // The entry stays, and with it the chunks after `seq`, until the node says it is done.
            let (piece, raw) = (going.next(), Vec::new());
            self.send(node, &Message::Snapshot { seq, piece, last_inode, end: true, raw }, out);
            going.sent = true;
            if planted(Bug::CaughtUpEarly) {
                let process = self.joining.get(&node).copied().unwrap_or(0);
                out.push(Effect::CaughtUp(node, process, self.epoch));
            }
        }
        self.snapshots.insert(node, going);
        Ok(true)
    }

    /// Content of a file from `at` on, holes left out; returns where to go on.
    fn content(
        &self,
        out: &mut Synthetic,
        ino: InodeId,
        at: u64,
        size: u64,
    ) -> Result<u64, Failure> {
        let Some(extent) = self
            .volume
            .extents(ino, at, 16)?
            .into_iter()
            .find(|e| !e.unwritten && e.offset + e.len > at)
        else {
            return Ok(size);
        };
        let from = at.max(extent.offset);
        let to = (extent.offset + extent.len).min(size).min(from + CONTENT as u64);
        if from >= size {
            return Ok(size);
        }
        let mut data = vec![0u8; (to - from) as usize];
        let n = self.volume.read_file(ino, from, &mut data)?;
        data.truncate(n);
        if n > 0 {
            out.op(&Op::Write { ino, offset: from, data: &data, clear_setid: false });
        }
        Ok(to)
    }

    pub(super) fn snapshot_arrived(
        &mut self,
        seq: StreamSeq,
        piece: u32,
        end: bool,
        raw: &[u8],
        out: &mut Vec<Effect>,
    ) -> Result<(), Failure> {
        let Some(incoming) = &mut self.incoming else { return Ok(()) };
        // Whoever asks twice is sent two, and may forget in the middle of the first that it has begun: of
        // which its end alone would be a state with nothing in it.
        let headless = planted(Bug::SnapshotHeadless) && incoming.begun.is_none();
        if piece != 0 && incoming.begun != Some((seq, piece)) && !headless {
            return Ok(());
        }
        incoming.begun = Some((seq, piece + 1));
        self.joining_at = self.now;
        if (piece == 0 || headless) && !planted(Bug::JoinKeepsOld) {
            self.wipe(seq)?;
        }
        let Some((segment, base)) = self.ring.next_body(raw.len()) else {
            return Err(Failure::Diverged(seq, "a snapshot piece exceeds the stream ring".into()));
        };
        // The free part of the ring holds the piece while its data is copied out.
        self.media.write(segment, base, raw)?;
        for entry in entries(raw, 0) {
            let (offset, header, op) = entry.map_err(|e| Failure::Diverged(seq, e.to_string()))?;
            let source = (segment, base + offset as u64 + 64);
            let mut applied = self.volume.apply(&header, &op, source);
            if matches!(applied, Err(Refusal::NeedsPublish)) {
                self.publish_piece()?;
                applied = self.volume.apply(&header, &op, source);
            }
            match applied {
                Ok(_) => {}
                Err(Refusal::Fault(fault)) => return Err(fault.into()),
                // Content of a file that was removed or cut since: the stream says so, too.
                Err(Refusal::NoEntry) => {}
                Err(refusal) => {
                    return Err(Failure::Diverged(seq, format!("snapshot: {refusal}")));
                }
            }
        }
        self.publish_piece()?;
        if end {
            let sealed = self.volume.seal(seq, self.epoch, &[])?;
            self.volume.publish(sealed)?;
            (self.applied, self.published) = (seq, seq);
            self.ring.restart(seq)?;
            self.incoming = None;
            self.joined_at = self.now;
            log::info!("state as of stream position {seq} is here");
            out.push(Effect::Position(seq));
            self.to_head(Message::Position { seq }, out);
        }
        Ok(())
    }

    /// Publishes a part of a snapshot, as a state of before the stream.
    fn publish_piece(&mut self) -> Result<(), Failure> {
        let sealed = self.volume.seal(StreamSeq(0), self.epoch, &[])?;
        run_copies(&*self.media, &sealed.copies)?;
        self.volume.publish(sealed)?;
        Ok(())
    }

    /// Makes the volume empty before a snapshot comes.
    fn wipe(&mut self, seq: StreamSeq) -> Result<(), Failure> {
        self.drop_job()?;
        let old = self.volume.superblock().clone();
        let params = Params {
            uuid: old.uuid,
            name: old.name.clone(),
            node: old.node,
            durability: old.durability,
            capacity_bytes: old.capacity_blocks * storage::limits::BLOCK_BYTES,
            stream_bytes: old.stream_bytes,
            time: old.created,
            uid: 0,
            gid: 0,
            mode: 0o755,
        };
        for segment in self.media.segments()? {
            match segment {
                Segment::Log(_) if planted(Bug::JoinKeepsLogs) => {}
                Segment::Log(_) => self.media.remove(segment)?,
                // Emptied, not removed: hostd and clients have them mapped.
                Segment::Arena(_) | Segment::Tree => {
                    self.media.discard(segment, 0, self.media.size(segment)?)?;
                }
                Segment::Super | Segment::Stream | Segment::Clients => {}
            }
        }
        if !planted(Bug::JoinKeepsLogs) {
            for (_, client) in std::mem::take(&mut self.clients) {
                self.table.remove(client.into_row())?;
            }
        }
        self.locking.drop_all();
        self.batch.clear();
        self.settled.clear();
        self.stash.clear();
        self.dirty.clear();
        self.volume = Volume::format(Arc::clone(&self.media), &params)?;
        self.ring.restart(seq)?;
        (self.applied, self.published) = (StreamSeq(0), StreamSeq(0));
        Ok(())
    }
}

fn nanos(s: Stamp) -> u64 {
    u64::try_from(s.sec).unwrap_or(0).saturating_mul(1_000_000_000) + u64::from(s.nsec)
}

/// Entries made by the service to describe a state.
#[derive(Default)]
struct Synthetic {
    done: VecDeque<Vec<u8>>,
    raw: Vec<u8>,
    time: u64,
}

impl Synthetic {
    fn op(&mut self, op: &Op<'_>) {
        let bytes = op.to_entry(Sequence(1), Epoch(0), 0, self.time, 0);
        if self.raw.len() + bytes.len() > PIECE && !self.raw.is_empty() {
            self.done.push_back(std::mem::take(&mut self.raw));
        }
        self.raw.extend(bytes);
    }

    fn times(&mut self, r: &InodeRecord) {
        self.time = nanos(r.ctime);
        self.op(&Op::SetAttr {
            ino: r.ino,
            mask: mask::ALL,
            mode: r.mode & 0o7777,
            uid: r.uid,
            gid: r.gid,
            atime: r.atime,
            mtime: r.mtime,
        });
    }

    fn len(&self) -> usize {
        self.raw.len() + self.done.iter().map(Vec::len).sum::<usize>()
    }

    fn finish(mut self) -> VecDeque<Vec<u8>> {
        if !self.raw.is_empty() {
            self.done.push_back(self.raw);
        }
        self.done
    }
}
