//! The judging at the end.

use storage::check::{Data, check_with_data};

use super::*;
use crate::actor::quota;

/// All invariants of a node are asked for after one in so many steps of it: they go through all that it knows, and were a
/// quarter of what a history costs. (What is not so once rarely is so again a few steps later.)
const SELDOM: u64 = 8;

impl World<'_> {
    pub(crate) fn is_quiet(&self) -> bool {
        if !self.actors.iter().all(Actor::is_done) {
            return false;
        }
        let mut first = None;
        let members = self.hosts.iter().filter(|h| !h.gone);
        for host in members.clone() {
            let Some(node) = &host.node else { return false };
            let s = node.status();
            let serves = matches!(s.role, Role::Head | Role::Member) && s.ready && !s.fenced;
            let still = s.applied == s.stream && s.published == s.stream;
            if !serves
                || !still
                || s.chain.len() != members.clone().count()
                || s.requests + s.recalls > 0
            {
                return false;
            }
            let key = (s.stream, s.epoch);
            if *first.get_or_insert(key) != key {
                return false;
            }
        }
        true
    }

    /// What is always true of a node, is: what costs little, after each step.
    pub(crate) fn judge_invariants(&mut self, n: usize) -> Result<(), String> {
        let host = &mut self.hosts[n];
        let Some(node) = &host.node else { return Ok(()) };
        host.steps += 1;
        let judged = match host.steps.is_multiple_of(SELDOM) {
            true => node.invariants(),
            false => node.cheap_invariants(),
        };
        judged.map_err(|e| format!("node {}: invariant: {e}", n + 1))
    }

    /// What a head acknowledges is held by as many members as the volume asks for. (A member that is away holds what it had.)
    pub(crate) fn judge_acknowledged(&mut self, n: usize) -> Result<(), String> {
        let Some(node) = &self.hosts[n].node else { return Ok(()) };
        let (holds, upto, role) = (node.holds(), node.acknowledged(), node.role());
        if matches!(role, Role::Head | Role::Member) {
            self.hosts[n].lost = StreamSeq(0);
        } else if holds < self.hosts[n].holds {
            // It is out of the chain, and gives up what it had there: so it does with its region (seed 40002140, in which a
            // head that hung hears of neither, and of what it was told before).
            self.hosts[n].lose();
        }
        self.hosts[n].holds = holds;
        // What a new process says first was acknowledged before it.
        let before = std::mem::replace(&mut self.hosts[n].acknowledged, upto);
        if role != Role::Head || upto <= before {
            return Ok(());
        }
        let Some(node) = &self.hosts[n].node else { return Ok(()) };
        let chain = node.status().chain;
        let least = usize::from(self.spec().least());
        // What a member had when it said so, and has lost since, nobody can know before it is out of the chain.
        let had = |host: &&Host| chain.contains(&host.id) && host.lost >= upto;
        let holders = self.hosts.iter().filter(|host| host.holds >= upto || had(host)).count();
        if holders < least {
            return Err(format!(
                "node {}: {upto} of the stream is acknowledged, which {holders} nodes hold, of at least {least}",
                n + 1
            ));
        }
        Ok(())
    }

    pub(crate) fn state_of_affairs(&self) -> String {
        let mut text = String::new();
        for host in &self.hosts {
            match &host.node {
                None => text += &format!("[{} down]", host.id),
                Some(node) => {
                    let s = node.status();
                    text += &format!(
                        "[{} {:?} ready {} fenced {} epoch {} chain {:?} syncing {:?} stream {} \
                         applied {} published {} acked {} requests {} recalls {}]",
                        host.id,
                        s.role,
                        s.ready,
                        s.fenced,
                        s.epoch,
                        s.chain,
                        s.syncing,
                        s.stream,
                        s.applied,
                        s.published,
                        s.all_acked,
                        s.requests,
                        s.recalls
                    );
                }
            }
        }
        for (c, actor) in self.actors.iter().enumerate() {
            if !actor.is_done() {
                text += &format!("[client {c} {}]", actor.describe());
            }
        }
        text
    }

    /// Everything is quiet: every member shows what the model allows, and the same.
    pub(crate) fn judge(&mut self) -> Result<(), String> {
        self.trace(|| "JUDGE".into());
        let (mut digests, mut free) = (Vec::new(), Vec::new());
        self.history.shown = None;
        let members: Vec<usize> = (0..self.hosts.len()).filter(|n| !self.hosts[*n].gone).collect();
        for &n in &members {
            let media: Arc<dyn Media> = Arc::clone(&self.hosts[n].region) as _;
            let mut data = Data { pending: &[], progress: &mut |_, _| {} };
            let report = check_with_data(&*media, &mut data).map_err(|e| format!("check: {e}"))?;
            if !report.is_sound() {
                let findings: Vec<String> =
                    report.findings.iter().map(ToString::to_string).collect();
                return Err(format!("region of node {}: {}", n + 1, findings.join("; ")));
            }
            // Twice: as nicfs has it, and as somebody finds it who opens the region.
            let mut opened = Volume::open(media).map_err(|e| format!("open: {e:?}"))?;
            self.judge_snapshots(n, &mut opened)?;
            let cold = opened.digest().map_err(|e| format!("digest: {e:?}"))?;
            let Some(node) = &self.hosts[n].node else { continue };
            let warm = node.volume().digest().map_err(|e| format!("digest: {e:?}"))?;
            if cold != warm {
                let what = opened.differences(node.volume());
                return Err(format!("node {}: its region differs from its state: {what:?}", n + 1));
            }
            digests.push(cold);
            free.push(opened.blocks_free());
            self.judge_content(n, &opened)?;
            if digests[0] != cold {
                let first = &self.hosts[members[0]].region;
                let first = Volume::open(Arc::clone(first) as _).map_err(|e| format!("{e:?}"))?;
                let what = first.differences(&opened);
                return Err(format!("members {} and {} differ: {what:?}", members[0] + 1, n + 1));
            }
            if free[0] != opened.blocks_free() {
                // As head each takes what fits it, which has to fit the others.
                return Err(format!(
                    "members {} and {} differ: {} and {} blocks are free",
                    members[0] + 1,
                    n + 1,
                    free[0],
                    opened.blocks_free()
                ));
            }
        }
        self.judge_joint_lost()?;
        self.judge_logs()?;
        self.judge_locks()?;
        members.first().map_or(Ok(()), |n| self.judge_orphans(*n))
    }

    /// The log of every process went on: LibFS leaves nothing out, and writes over nothing that is still needed. The
    /// service would expel its client, which loses what it did, and is told so: nothing else would object. (Clients by
    /// hand spoil theirs, and what was not fenced is torn when the power goes.)
    fn judge_logs(&self) -> Result<(), String> {
        if self.preset.by_hand() || self.outcome.faults.contains_key("power-cut") {
            return Ok(());
        }
        let broken = |host: &&Host| {
            host.node.as_ref().is_some_and(|node| node.status().counters.broken_logs > 0)
        };
        match self.hosts.iter().find(broken) {
            Some(host) => Err(format!("the log of a process of node {} went on no more", host.id)),
            None => Ok(()),
        }
    }

    /// What has no name is open somewhere. (What clients by hand have open is their affair.)
    fn judge_orphans(&self, n: usize) -> Result<(), String> {
        let Some(node) = &self.hosts[n].node else { return Ok(()) };
        if self.hosts[n].is_patient() {
            // They may still be waited for.
            return Ok(());
        }
        let orphans = node.volume().orphans().map_err(|e| format!("orphans: {e:?}"))?;
        let processes: Option<Vec<_>> = self.actors.iter().map(|a| a.process.as_ref()).collect();
        let Some(processes) = processes else { return Ok(()) };
        match orphans.iter().find(|ino| !processes.iter().any(|p| p.has_open(ino.0))) {
            Some(ino) => {
                Err(format!("inode {ino} has no name, nobody has it open, and it is there"))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn judge_content(&mut self, n: usize, volume: &Volume) -> Result<(), String> {
        for ino in self.model.inodes() {
            self.outcome.observations += 1;
            let judged = match quota::account_of(ino) {
                Some(account) => self.judge_limit(volume, ino, account),
                None => self.model.observe(None, ino, &state_of(volume, ino)?),
            };
            judged.map_err(|e| format!("in the end, node {}: {e}", n + 1))?;
        }
        self.judge_use(volume).map_err(|e| format!("in the end, node {}: {e}", n + 1))
    }
}

/// What a volume says of an inode.
pub(crate) fn state_of(volume: &Volume, ino: u64) -> Result<State, String> {
    let ino = base::InodeId(ino);
    let fault = |e: storage::volume::Fault| format!("{ino}: {e:?}");
    let Some(record) = volume.attr(ino).map_err(fault)? else { return Ok(State::gone()) };
    if record.nlink == 0 && record.mode & 0o170_000 != 0o100_000 {
        return Ok(State::gone());
    }
    let body = if record.mode & 0o170_000 == 0o040_000 {
        let mut names = BTreeMap::new();
        volume
            .readdir(ino, 0, usize::MAX, &mut |n| {
                if n.name != b"." && n.name != b".." {
                    names.insert(n.name.to_vec(), n.ino.0);
                }
                true
            })
            .map_err(fault)?;
        Body::Dir(names)
    } else if record.mode & 0o170_000 == 0o120_000 {
        Body::Symlink(volume.symlink(ino).map_err(fault)?, record.nlink)
    } else {
        let mut bytes = vec![0; record.size as usize];
        volume.read_file(ino, 0, &mut bytes).map_err(fault)?;
        Body::File(bytes, record.nlink)
    };
    let mut xattrs = BTreeMap::new();
    for name in volume.xattrs(ino).map_err(fault)? {
        let value = volume.xattr(ino, &name).map_err(fault)?.unwrap_or_default();
        xattrs.insert(name, value);
    }
    let (mtime, ctime) = (record.mtime.nanos(), record.ctime.nanos());
    let (mode, uid, gid, project) = (record.mode, record.uid, record.gid, record.project.0);
    Ok(State { mode, uid, gid, project, mtime, ctime, xattrs: Some(xattrs), body })
}
