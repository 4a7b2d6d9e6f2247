//! Operations: the entry, what it brings about, the append.

use super::*;

impl World<'_> {
    pub(crate) fn enter(&mut self, c: usize, plan: Plan) -> Result<(), String> {
        let slot = c % 8;
        let word = self.word(c, control::in_op(slot));
        self.put(c, control::in_op(slot), word | 1)?;
        let delay = match self.actors[c].stop_for.take() {
            Some(lasts) => lasts,
            None => self.between(100, 20 * US),
        };
        self.actors[c].phase = Phase::Inside(plan, slot);
        self.step_in(c, delay);
        Ok(())
    }

    pub(crate) fn leave(&mut self, c: usize, slot: usize) -> Result<(), String> {
        let word = self.word(c, control::in_op(slot));
        self.put(c, control::in_op(slot), word + 1)
    }

    /// Appends, and leaves the operation.
    pub(crate) fn finish(&mut self, c: usize, plan: &Plan, slot: usize) -> Result<(), String> {
        let n = self.actors[c].node;
        // A node that is cut off suspends its leases; what its clients are about to append cannot
        // count any more if others have taken over.
        let fenced = self.hosts[n].should_fence(self.now)
            || self.hosts[n].node.as_ref().is_none_or(|x| x.status().fenced);
        if fenced {
            self.leave(c, slot)?;
            return self.rest(c);
        }
        let appended = self.perform(c, plan)?;
        self.leave(c, slot)?;
        if appended {
            self.ring(c, false)?;
            return self.rest(c);
        }
        self.actors[c].phase = Phase::Space(plan.clone(), self.word(c, control::reclaim(0)));
        self.ring(c, true)?;
        self.wait(c)
    }

    /// Works out the entry and what it brings about. `false`: the log is full.
    pub(crate) fn perform(&mut self, c: usize, plan: &Plan) -> Result<bool, String> {
        let mut states: BTreeMap<u64, State> = BTreeMap::new();
        let (dir, name) = (plan.dir, plan.name.clone());
        let target = self.target(dir, &name).unwrap_or(0);
        let fresh = self.session(c).and_then(|s| s.fresh.last().copied()).unwrap_or(0);
        for ino in [dir, plan.dir2, target, fresh] {
            if let Some(state) = self.model.current(ino) {
                states.insert(ino, state.clone());
            }
        }
        let (parent, ino) = (InodeId(dir), InodeId(target));
        let mut changed = vec![target];
        let mut data = Vec::new();
        let op = match plan.kind {
            Kind::Create | Kind::Mkdir => {
                let is_dir = plan.kind == Kind::Mkdir && self.model.dirs().len() < DIRS;
                let (mode, body) = if is_dir {
                    (S_IFDIR | 0o755, Body::Dir(BTreeMap::new()))
                } else {
                    (S_IFREG | 0o644, Body::File(Vec::new(), 1))
                };
                states.insert(fresh, State { mode, body });
                put_name(&mut states, dir, &name, Some(fresh));
                changed = vec![fresh, dir];
                let (ino, target) = (InodeId(fresh), &b""[..]);
                Op::Create { ino, parent, mode, rdev: 0, uid: 0, gid: 0, name: &name, target }
            }
            Kind::Write | Kind::Append => {
                let size = file_size(&states, target);
                let len = 1 + self.random.below(self.preset.write_max);
                let offset = if plan.kind == Kind::Append && size + len <= self.preset.file_max {
                    size
                } else {
                    self.random.below(self.preset.file_max.saturating_sub(len) + 1)
                };
                data.resize(len as usize, 0);
                self.random.fill(&mut data);
                if let Some(State { body: Body::File(bytes, _), .. }) = states.get_mut(&target) {
                    let end = offset as usize + data.len();
                    bytes.resize(bytes.len().max(end), 0);
                    bytes[offset as usize..end].copy_from_slice(&data);
                }
                Op::Write { ino, offset, data: &data, clear_setid: false }
            }
            Kind::Truncate => {
                let size = self.random.below(self.preset.file_max);
                if let Some(State { body: Body::File(bytes, _), .. }) = states.get_mut(&target) {
                    bytes.resize(size as usize, 0);
                }
                Op::Truncate { ino, size, clear_setid: false }
            }
            Kind::Chmod => {
                let old = states.get(&target).map_or(0, |s| s.mode);
                let bits = [0o644, 0o600, 0o640, 0o755][self.random.below(4) as usize];
                let mode = if old & S_IFMT == S_IFREG { bits } else { 0o755 };
                if let Some(s) = states.get_mut(&target) {
                    s.mode = old & S_IFMT | mode;
                }
                let (atime, mtime) = (Stamp::from_nanos(self.now), Stamp::from_nanos(self.now));
                Op::SetAttr { ino, mask: mask::MODE, mode, uid: 0, gid: 0, atime, mtime }
            }
            Kind::Unlink => {
                put_name(&mut states, dir, &name, None);
                let is_dir = matches!(states.get(&target).map(|s| &s.body), Some(Body::Dir(_)));
                drop_link(&mut states, target);
                changed = vec![target, dir];
                if is_dir {
                    Op::Rmdir { ino, parent, name: &name }
                } else {
                    Op::Unlink { ino, parent, name: &name, open: false }
                }
            }
            Kind::Link => {
                put_name(&mut states, plan.dir2, &plan.name2, Some(target));
                if let Some(State { body: Body::File(_, links), .. }) = states.get_mut(&target) {
                    *links += 1;
                }
                changed = vec![target, plan.dir2];
                Op::Link { ino, parent: InodeId(plan.dir2), name: &plan.name2 }
            }
            Kind::Rename => {
                let replaced = self.target(plan.dir2, &plan.name2).unwrap_or(0);
                if let Some(state) = self.model.current(replaced) {
                    states.insert(replaced, state.clone());
                    drop_link(&mut states, replaced);
                    changed.push(replaced);
                }
                put_name(&mut states, dir, &name, None);
                put_name(&mut states, plan.dir2, &plan.name2, Some(target));
                changed.extend([dir, plan.dir2]);
                Op::Rename {
                    ino,
                    parent,
                    name: &name,
                    new_parent: InodeId(plan.dir2),
                    new_name: &plan.name2,
                    replaced: InodeId(replaced),
                    noreplace: false,
                    exchange: false,
                    open: false,
                }
            }
            Kind::Read | Kind::List => return Ok(true),
        };
        let Some(seq) = self.append(c, &op)? else { return Ok(false) };
        if matches!(op, Op::Create { .. })
            && let Some(s) = &mut self.actors[c].session
        {
            s.fresh.pop();
        }
        changed.sort_unstable();
        changed.dedup();
        let changes: Vec<(u64, State)> =
            changed.iter().filter_map(|i| Some((*i, states.get(i)?.clone()))).collect();
        self.trace(|| format!("client {c} does {seq} {:?} {}", plan.kind, brief(&op)));
        self.outcome.operations += 1;
        if let Some(s) = self.session(c) {
            let number = s.number;
            self.model.appended(number, seq, changes);
        }
        Ok(true)
    }

    /// Into the log: `None` when there is no room.
    pub(crate) fn append(&mut self, c: usize, op: &Op<'_>) -> Result<Option<u64>, String> {
        let lane = match self.session(c) {
            Some(s) if self.preset.write_max < 100_000 => {
                self.random.below(s.heads.len() as u64) as usize
            }
            _ => 0,
        };
        let epoch = base::Epoch(self.word(c, control::EPOCH) as u32);
        let reclaimed = self.word(c, control::reclaim(lane));
        let time = self.now + 1_700_000_000_000_000_000;
        let Some(s) = self.session(c) else { return Ok(None) };
        let (lane_bytes, incarnation) = (s.descriptor.lane_bytes, s.descriptor.incarnation);
        let (mut head, mut seq) = (s.heads[lane], s.next);
        let segment = s.segment;
        let base = s.descriptor.lane_offset(lane);
        let length = op.to_entry(Sequence(seq), epoch, lane as u8, time, incarnation).len();
        let left = lane_bytes - head % lane_bytes;
        let pad = left < length as u64;
        let end = head + length as u64 + if pad { left } else { 0 };
        if end.saturating_sub(lane_bytes) > reclaimed {
            return Ok(None);
        }
        let write = |at: u64, bytes: &[u8]| {
            let media = self.media(c);
            media.write(segment, at, bytes)?;
            media.persist(segment, at, bytes.len() as u64)
        };
        let fault = |e: storage::media::MediaError| format!("client {c}: {e}");
        if pad {
            let raw = RawHeader {
                op: op::PAD,
                length: (left - HEADER_BYTES as u64) as u32,
                sequence: seq,
                lane: lane as u8,
                epoch: epoch.0,
                ..RawHeader::default()
            };
            write(base + head % lane_bytes, &raw.seal(incarnation, &[])).map_err(fault)?;
            (head, seq) = (head + left, seq + 1);
        }
        let bytes = op.to_entry(Sequence(seq), epoch, lane as u8, time, incarnation);
        debug_assert_eq!(bytes.len(), entry_bytes(bytes.len() - HEADER_BYTES));
        write(base + head % lane_bytes, &bytes).map_err(fault)?;
        self.media(c).fence().map_err(fault)?;
        if let Some(s) = &mut self.actors[c].session {
            (s.heads[lane], s.next) = (head + bytes.len() as u64, seq + 1);
        }
        self.put(c, control::LAST_SEQUENCE, seq)?;
        Ok(Some(seq))
    }
}

fn put_name(states: &mut BTreeMap<u64, State>, dir: u64, name: &[u8], ino: Option<u64>) {
    if let Some(State { body: Body::Dir(names), .. }) = states.get_mut(&dir) {
        match ino {
            Some(ino) => names.insert(name.to_vec(), ino),
            None => names.remove(name),
        };
    }
}

fn drop_link(states: &mut BTreeMap<u64, State>, ino: u64) {
    let Some(state) = states.get_mut(&ino) else { return };
    match &mut state.body {
        Body::File(_, links) if *links > 1 => *links -= 1,
        _ => *state = State::gone(),
    }
}

fn file_size(states: &BTreeMap<u64, State>, ino: u64) -> u64 {
    match states.get(&ino).map(|s| &s.body) {
        Some(Body::File(bytes, _)) => bytes.len() as u64,
        _ => 0,
    }
}

fn brief(op: &Op<'_>) -> String {
    match *op {
        Op::Write { ino, offset, data, .. } => format!("write {ino} {offset}+{}", data.len()),
        ref other => {
            let mut text = format!("{other:?}");
            text.truncate(160);
            text
        }
    }
}
