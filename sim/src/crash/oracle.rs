//! The oracle: what POSIX says of each operation, on plain maps. It shares nothing with the code
//! under test but the names of the operations. A crash state is right when it is the state after
//! a prefix of the history that holds everything an fsync has covered.

use std::collections::{BTreeMap, BTreeSet};

use super::workload::{Act, Flag};
use crate::acl;

const DIR: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const FMT: u32 = 0o170_000;
const ACL: &[u8] = b"system.posix_acl_access";
/// Name under which the limit of user 7 is shown, with the attributes of the root.
pub const LIMIT: &[u8] = b"limit of user 7";

/// What snapshots show is seen below this.
pub const SNAPSHOTS: &str = ".snapshots";

/// What is seen of one name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Path from the root; the root's is empty.
    pub path: String,
    /// Equal for two names of one inode: the number of the first.
    pub id: usize,
    /// Type and permissions.
    pub mode: u32,
    /// Links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Bytes.
    pub size: u64,
    /// Nanoseconds: content changed.
    pub mtime: u64,
    /// Nanoseconds: anything changed.
    pub ctime: u64,
    /// Content of a file, target of a link.
    pub body: Vec<u8>,
    /// Extended attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

fn fold(state: &mut u64, bytes: &[u8]) {
    let mut h = *state ^ (bytes.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut words = bytes.chunks_exact(8);
    for w in &mut words {
        let mut word = [0; 8];
        word.copy_from_slice(w);
        h = (h ^ u64::from_le_bytes(word)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
    }
    for &b in words.remainder() {
        h = (h ^ u64::from(b)).wrapping_mul(0xc4ce_b9fe_1a85_ec53).rotate_left(31);
    }
    *state = h ^ (h >> 32);
}

/// A number that stands for all of it.
pub fn print_of(seen: &[Seen]) -> u64 {
    let mut h = 0x1234_5678_9abc_def1;
    for s in seen {
        fold(&mut h, s.path.as_bytes());
        let words = [s.id as u64, s.mode.into(), s.nlink.into(), s.uid.into(), s.size];
        for word in words.into_iter().chain([s.mtime, s.ctime]) {
            h = (h ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(27);
        }
        fold(&mut h, &s.body);
        for (name, value) in &s.xattrs {
            fold(&mut h, name);
            fold(&mut h, value);
        }
    }
    h
}

/// What differs between two views, in words.
pub fn difference(want: &[Seen], got: &[Seen]) -> String {
    let of = |all: &[Seen]| -> BTreeMap<String, Seen> {
        all.iter().map(|s| (s.path.clone(), s.clone())).collect()
    };
    let (want, got) = (of(want), of(got));
    let mut text = Vec::new();
    for path in want.keys().chain(got.keys().filter(|p| !want.contains_key(*p))) {
        match (want.get(path), got.get(path)) {
            (Some(w), Some(g)) if w == g => {}
            (Some(w), Some(g)) if w.body != g.body => {
                let at = w.body.iter().zip(&g.body).position(|(a, b)| a != b);
                let at = at.unwrap_or(w.body.len().min(g.body.len()));
                text.push(format!(
                    "/{path}: content of {} bytes differs from {} bytes from {at} on",
                    g.body.len(),
                    w.body.len()
                ));
            }
            (Some(w), Some(g)) => text.push(format!("/{path}: {}, not {}", facts(g), facts(w))),
            (Some(_), None) => text.push(format!("/{path} is missing")),
            (None, _) => text.push(format!("/{path} should not be there")),
        }
    }
    text.join("; ")
}

fn facts(s: &Seen) -> String {
    let names: Vec<_> =
        s.xattrs.iter().map(|(n, v)| (n.escape_ascii().to_string(), v.len())).collect();
    format!(
        "[id {} mode {:o} nlink {} uid {} size {} mtime {} ctime {} xattrs {names:?}]",
        s.id, s.mode, s.nlink, s.uid, s.size, s.mtime, s.ctime
    )
}

#[derive(Clone, Debug, Default)]
struct Node {
    mode: u32,
    nlink: u32,
    uid: u32,
    mtime: u64,
    ctime: u64,
    body: Vec<u8>,
    names: BTreeMap<String, u64>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Blocks that the file has: of them there is a limited number.
    blocks: BTreeSet<u64>,
}

/// A file system.
#[derive(Clone, Debug)]
pub struct Model {
    nodes: BTreeMap<u64, Node>,
    next: u64,
    blocks: usize,
    /// What there was when a snapshot was made.
    snapshots: BTreeMap<String, BTreeMap<u64, Node>>,
}

/// Bytes of a block.
const BLOCK: u64 = 4096;

/// Bytes that step `step` writes.
pub fn content(step: u64, len: usize) -> Vec<u8> {
    let mut x = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(step | 1);
        bytes.extend_from_slice(&(x >> 8 | 1).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn is_dir(node: &Node) -> bool {
    node.mode & FMT == DIR
}

fn put_bytes(file: &mut Node, at: usize, data: &[u8]) {
    let body = &mut file.body;
    body.resize(body.len().max(at + data.len()), 0);
    body[at..at + data.len()].copy_from_slice(data);
    take_blocks(file, at as u64, (at + data.len()) as u64);
}

fn take_blocks(file: &mut Node, at: u64, end: u64) {
    file.blocks.extend(at / BLOCK..end.div_ceil(BLOCK));
}

/// COLLAPSE_RANGE and INSERT_RANGE.
fn shift(file: &mut Node, at: u64, len: u64, insert: bool, time: u64) -> Option<()> {
    let size = file.body.len() as u64;
    let last = if insert { at } else { at + len };
    if !(at | len).is_multiple_of(BLOCK) || last >= size {
        return None;
    }
    let (from, by) = (at as usize, len as usize);
    let (first, by_blocks) = (at / BLOCK, len / BLOCK);
    let moved = |b: u64| match b {
        b if b < first => Some(b),
        b if insert => Some(b + by_blocks),
        b => b.checked_sub(by_blocks).filter(|b| *b >= first),
    };
    file.blocks = file.blocks.iter().filter_map(|b| moved(*b)).collect();
    if insert {
        file.body.splice(from..from, std::iter::repeat_n(0, by));
    } else {
        file.body.drain(from..from + by);
    }
    (file.mtime, file.ctime) = (time, time);
    Some(())
}

impl Model {
    /// An empty file system, made at that time, with room for so many blocks of data.
    pub fn new(mode: u32, time: u64, blocks: usize) -> Self {
        let root = Node { mode: DIR | mode, nlink: 2, mtime: time, ctime: time, ..Node::default() };
        let nodes = BTreeMap::from([(1, root)]);
        Self { nodes, next: 2, blocks, snapshots: BTreeMap::new() }
    }

    /// Number of the inode at a path.
    pub fn find(&self, path: &str) -> Option<u64> {
        find(&self.nodes, path)
    }

    /// Number of the file at a path in a snapshot, and its size.
    pub fn find_then(&self, name: &str, path: &str) -> Option<(u64, u64)> {
        let nodes = self.snapshots.get(name)?;
        let id = find(nodes, path)?;
        Some((id, nodes.get(&id)?.body.len() as u64))
    }

    /// The number that the next inode made will have.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Directory and last component of a path.
    pub fn parent<'a>(&self, path: &'a str) -> Option<(u64, &'a str)> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.find(dir)?;
        is_dir(self.nodes.get(&dir)?).then_some((dir, name))
    }

    /// Bytes of a file.
    pub fn size(&self, id: u64) -> u64 {
        self.nodes.get(&id).map_or(0, |n| n.body.len() as u64)
    }

    /// Owner, and so on.
    pub fn mode(&self, id: u64) -> u32 {
        self.nodes.get(&id).map_or(0, |n| n.mode)
    }

    fn file(&mut self, path: &str) -> Option<&mut Node> {
        let id = self.find(path)?;
        self.nodes.get_mut(&id).filter(|n| n.mode & FMT == FILE)
    }

    fn any(&mut self, path: &str) -> Option<&mut Node> {
        let id = self.find(path)?;
        self.nodes.get_mut(&id)
    }

    fn make(&mut self, path: &str, mode: u32, body: Vec<u8>, time: u64) -> Option<()> {
        let (dir, name) = self.parent(path)?;
        if self.find(path).is_some() {
            return None;
        }
        let nlink = if mode & FMT == DIR { 2 } else { 1 };
        let node = Node { mode, nlink, mtime: time, ctime: time, body, ..Node::default() };
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, node);
        self.enter(dir, name, id, time)
    }

    fn enter(&mut self, dir: u64, name: &str, id: u64, time: u64) -> Option<()> {
        let sub = u32::from(is_dir(self.nodes.get(&id)?));
        let dir = self.nodes.get_mut(&dir)?;
        dir.names.insert(name.into(), id);
        dir.nlink += sub;
        (dir.mtime, dir.ctime) = (time, time);
        Some(())
    }

    fn leave(&mut self, dir: u64, name: &str, time: u64) -> Option<u64> {
        let id = self.nodes.get_mut(&dir)?.names.remove(name)?;
        let sub = u32::from(is_dir(self.nodes.get(&id)?));
        let dir = self.nodes.get_mut(&dir)?;
        dir.nlink -= sub;
        (dir.mtime, dir.ctime) = (time, time);
        Some(id)
    }

    fn drop_link(&mut self, id: u64, time: u64) -> Option<()> {
        let node = self.nodes.get_mut(&id)?;
        node.nlink = if is_dir(node) { 0 } else { node.nlink - 1 };
        node.ctime = time;
        if node.nlink == 0 {
            self.nodes.remove(&id);
        }
        Some(())
    }

    /// Whether `dir` is `top` or lies below it.
    fn below(&self, dir: u64, top: u64) -> bool {
        dir == top
            || self.nodes.get(&top).is_some_and(|n| n.names.values().any(|&c| self.below(dir, c)))
    }

    /// Blocks of the files, and at most those that snapshots hold back.
    fn used(&self) -> usize {
        let states = self.snapshots.values().chain([&self.nodes]);
        states.flat_map(BTreeMap::values).map(|n| n.blocks.len()).sum()
    }

    /// Blocks that nothing has.
    pub fn free(&self) -> usize {
        self.blocks.saturating_sub(self.used())
    }

    /// Does an operation; None when POSIX refuses it (or it would change nothing at all), and
    /// then nothing has changed.
    pub fn apply(&mut self, act: &Act, step: u64, time: u64) -> Option<()> {
        let mut after = self.clone();
        after.change(act, step, time)?;
        if after.used() > self.blocks {
            return None;
        }
        *self = after;
        Some(())
    }

    fn change(&mut self, act: &Act, step: u64, time: u64) -> Option<()> {
        match act {
            Act::Create(n) => self.make(n, FILE | 0o644, Vec::new(), time),
            Act::Mkdir(n) => self.make(n, DIR | 0o755, Vec::new(), time),
            Act::Symlink(n, to) => self.make(n, LINK | 0o777, to.clone().into(), time),
            Act::Unlink(n) => {
                let (dir, name) = self.parent(n)?;
                let id = self.find(n)?;
                if is_dir(self.nodes.get(&id)?) {
                    return None;
                }
                self.leave(dir, name, time)?;
                self.drop_link(id, time)
            }
            Act::Rmdir(n) => {
                let (dir, name) = self.parent(n)?;
                let id = self.find(n)?;
                let node = self.nodes.get(&id)?;
                if !is_dir(node) || !node.names.is_empty() {
                    return None;
                }
                self.leave(dir, name, time)?;
                self.drop_link(id, time)
            }
            Act::Link(a, b) => {
                let (dir, name) = self.parent(b)?;
                let id = self.find(a)?;
                if is_dir(self.nodes.get(&id)?) || self.find(b).is_some() {
                    return None;
                }
                self.enter(dir, name, id, time)?;
                let node = self.nodes.get_mut(&id)?;
                node.nlink += 1;
                node.ctime = time;
                Some(())
            }
            Act::Rename(a, b, Flag::Exchange) => self.exchange(a, b, time),
            Act::Rename(a, b, flag) => self.rename(a, b, *flag, time),
            Act::Tmpfile(n, len) => {
                // Its directory changes when it is named.
                self.make(n, FILE | 0o644, Vec::new(), time)?;
                put_bytes(self.file(n)?, 0, &content(step, *len as usize));
                Some(())
            }
            Act::Snapshot(name) => {
                if self.snapshots.contains_key(name) {
                    return None;
                }
                let mut then = self.nodes.clone();
                // (Limits are none of a state.)
                then.values_mut().for_each(|node| drop(node.xattrs.remove(LIMIT)));
                self.snapshots.insert(name.clone(), then);
                Some(())
            }
            Act::DropSnapshot(name) => self.snapshots.remove(name).map(drop),
            Act::Fsync | Act::Pause => Some(()),
            other => self.change_inode(other, step, time),
        }
    }

    fn rename(&mut self, a: &str, b: &str, flag: Flag, time: u64) -> Option<()> {
        let ((from, name), (to, new_name)) = (self.parent(a)?, self.parent(b)?);
        let (id, old) = (self.find(a)?, self.find(b));
        let dir = is_dir(self.nodes.get(&id)?);
        if (dir && self.below(to, id)) || old == Some(id) {
            return None;
        }
        if let Some(old) = old {
            let node = self.nodes.get(&old)?;
            if flag == Flag::NoReplace || is_dir(node) != dir || !node.names.is_empty() {
                return None;
            }
            self.leave(to, new_name, time)?;
            self.drop_link(old, time)?;
        }
        self.leave(from, name, time)?;
        self.enter(to, new_name, id, time)?;
        self.nodes.get_mut(&id)?.ctime = time;
        Some(())
    }

    fn exchange(&mut self, a: &str, b: &str, time: u64) -> Option<()> {
        let ((from, name), (to, new_name)) = (self.parent(a)?, self.parent(b)?);
        let (x, y) = (self.find(a)?, self.find(b)?);
        if x == y || self.below(to, x) || self.below(from, y) {
            return None;
        }
        self.leave(from, name, time)?;
        self.leave(to, new_name, time)?;
        self.enter(from, name, y, time)?;
        self.enter(to, new_name, x, time)?;
        self.nodes.get_mut(&x)?.ctime = time;
        self.nodes.get_mut(&y)?.ctime = time;
        Some(())
    }

    fn change_inode(&mut self, act: &Act, step: u64, time: u64) -> Option<()> {
        match act {
            Act::Write(n, at, len) => {
                let file = self.file(n)?;
                put_bytes(file, *at as usize, &content(step, *len as usize));
                (file.mtime, file.ctime) = (time, time);
            }
            Act::Append(n, len) => {
                let file = self.file(n)?;
                let end = file.body.len();
                put_bytes(file, end, &content(step, *len as usize));
                (file.mtime, file.ctime) = (time, time);
            }
            Act::Truncate(n, size) => {
                let file = self.file(n)?;
                file.body.resize(*size as usize, 0);
                file.blocks.retain(|b| *b < size.div_ceil(BLOCK));
                (file.mtime, file.ctime) = (time, time);
            }
            Act::Fallocate(n, at, len, mode @ (8 | 32)) => {
                shift(self.file(n)?, *at, *len, *mode == 32, time)?;
            }
            Act::Fallocate(n, at, len, mode) => {
                let file = self.file(n)?;
                if mode & 2 == 0 {
                    take_blocks(file, *at, *at + *len);
                } else {
                    let gone = at.div_ceil(BLOCK)..(*at + *len) / BLOCK;
                    file.blocks.retain(|b| !gone.contains(b));
                }
                let (at, end) = (*at as usize, (*at + *len) as usize);
                if mode & 1 == 0 {
                    file.body.resize(file.body.len().max(end), 0);
                }
                if mode & (2 | 16) != 0 {
                    let size = file.body.len();
                    file.body[at.min(size)..end.min(size)].fill(0);
                }
                (file.mtime, file.ctime) = (time, time);
            }
            Act::Clone(a, b) => {
                let data = self.file(a)?.body.clone();
                let file = self.file(b)?;
                if data.is_empty() || a == b {
                    return None;
                }
                put_bytes(file, 0, &data);
                (file.mtime, file.ctime) = (time, time);
                if self.find(a) == self.find(b) {
                    return None;
                }
            }
            Act::Back(name, a, b) => {
                let (_, size) = self.find_then(name, a)?;
                self.bring(name, a, b, [0, 0, size], time)?;
            }
            Act::Piece(name, a, b, piece) => self.bring(name, a, b, *piece, time)?,
            Act::Chmod(n, mode) => {
                let node = self.any(n).filter(|n| n.mode & FMT != LINK)?;
                node.mode = node.mode & FMT | mode & 0o7777;
                if let Some(list) = node.xattrs.get_mut(ACL) {
                    acl::chmod(list, *mode);
                }
                node.ctime = time;
            }
            Act::Chown(n, uid) => {
                let node = self.any(n)?;
                node.uid = *uid;
                node.ctime = time;
            }
            Act::Utime(n) => {
                let node = self.any(n)?;
                (node.mtime, node.ctime) = (UTIME + step, time);
            }
            Act::SetXattr(n, name, len) => {
                let node = self.any(n).filter(|n| n.mode & FMT != LINK)?;
                node.xattrs.insert(name.clone().into(), content(step, *len));
                node.ctime = time;
            }
            Act::SetAcl(n, user, others) => {
                let node = self.any(n).filter(|n| n.mode & FMT != LINK)?;
                node.mode = node.mode & !0o777 | acl::mode(7, *others);
                node.xattrs.insert(ACL.into(), acl::list(7, *user, *others));
                node.ctime = time;
            }
            Act::Quota(blocks) => {
                let root = self.nodes.get_mut(&1)?;
                match blocks {
                    0 => root.xattrs.remove(LIMIT)?,
                    _ => root
                        .xattrs
                        .insert(LIMIT.into(), blocks.to_le_bytes().into())
                        .unwrap_or_default(),
                };
            }
            Act::RemoveXattr(n, name) => {
                let node = self.any(n)?;
                node.xattrs.remove(name.as_bytes())?;
                node.ctime = time;
            }
            _ => return None,
        }
        Some(())
    }

    /// A piece of a file as a snapshot has it.
    fn bring(
        &mut self,
        name: &str,
        a: &str,
        b: &str,
        [from, to, len]: [u64; 3],
        time: u64,
    ) -> Option<()> {
        let nodes = self.snapshots.get(name)?;
        let then = nodes.get(&find(nodes, a)?).filter(|n| n.mode & FMT == FILE)?;
        let data = then.body.get(from as usize..(from + len) as usize)?.to_vec();
        let file = self.file(b)?;
        if data.is_empty() {
            return None;
        }
        put_bytes(file, to as usize, &data);
        (file.mtime, file.ctime) = (time, time);
        Some(())
    }

    /// Everything that can be seen, in the order of the names.
    pub fn view(&self) -> Vec<Seen> {
        let (mut seen, mut ids) = (Vec::new(), BTreeMap::new());
        look(&self.nodes, 1, String::new(), &mut ids, &mut seen);
        for (name, nodes) in &self.snapshots {
            look(nodes, 1, format!("{SNAPSHOTS}/{name}"), &mut BTreeMap::new(), &mut seen);
        }
        seen
    }
}

fn find(nodes: &BTreeMap<u64, Node>, path: &str) -> Option<u64> {
    path.split('/').filter(|p| !p.is_empty()).try_fold(1, |at, name| {
        let node = nodes.get(&at)?;
        node.names.get(name).copied()
    })
}

fn look(
    nodes: &BTreeMap<u64, Node>,
    id: u64,
    path: String,
    ids: &mut BTreeMap<u64, usize>,
    seen: &mut Vec<Seen>,
) {
    let Some(node) = nodes.get(&id) else { return };
    let first = ids.len();
    let number = *ids.entry(id).or_insert(first);
    let size = if is_dir(node) { 0 } else { node.body.len() as u64 };
    let below = if path.is_empty() { String::new() } else { format!("{path}/") };
    seen.push(Seen {
        path,
        id: number,
        mode: node.mode,
        nlink: node.nlink,
        uid: node.uid,
        size,
        mtime: node.mtime,
        ctime: node.ctime,
        body: node.body.clone(),
        xattrs: node.xattrs.clone(),
    });
    for (name, &child) in &node.names {
        look(nodes, child, format!("{below}{name}"), ids, seen);
    }
}

/// The time that `utime` sets in step 0.
pub const UTIME: u64 = 1_000_000_000_000_000_000;

/// What may be found after a crash: the states after each prefix of a history.
#[derive(Clone, Debug)]
pub struct Oracle {
    states: Vec<(u64, Model)>,
}

/// How far the application was at the moment of the crash, in operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bounds {
    /// What must be there.
    pub least: usize,
    /// What may be there.
    pub most: usize,
}

impl Oracle {
    /// Begins with that state.
    pub fn new(start: Model) -> Self {
        let print = print_of(&start.view());
        Self { states: vec![(print, start)] }
    }

    /// The state after everything.
    pub fn last(&self) -> &Model {
        &self.states[self.states.len() - 1].1
    }

    /// Operations done.
    pub fn len(&self) -> usize {
        self.states.len() - 1
    }

    /// Whether nothing was done.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next operation brought about this.
    pub fn push(&mut self, model: Model) {
        self.states.push((print_of(&model.view()), model));
    }

    /// Whether that state is allowed: the prefixes that it can be.
    pub fn allows(&self, print: u64, bounds: Bounds) -> bool {
        self.states.iter().take(bounds.most + 1).skip(bounds.least).any(|s| s.0 == print)
    }

    /// The state that looks like that.
    pub fn state(&self, print: u64) -> Option<&Model> {
        self.states.iter().find(|s| s.0 == print).map(|s| &s.1)
    }

    /// What is wrong with a state, in words.
    pub fn judge(&self, seen: &[Seen], bounds: Bounds) -> Result<(), String> {
        let print = print_of(seen);
        if self.allows(print, bounds) {
            return Ok(());
        }
        let Bounds { least, most } = bounds;
        let at = self.states.iter().position(|s| s.0 == print);
        if let Some(at) = at {
            return Err(format!(
                "the state after operation {at} was found, but {least} had to be there, and {most} \
                 had begun: {}",
                difference(&self.states[least.min(self.len())].1.view(), seen)
            ));
        }
        let nearest = (least..=most.min(self.len()))
            .map(|n| difference(&self.states[n].1.view(), seen))
            .min_by_key(String::len)
            .unwrap_or_default();
        Err(format!("no state after {least} to {most} operations; from the nearest: {nearest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(acts: &[&str]) -> Oracle {
        let mut oracle = Oracle::new(Model::new(0o755, 1, 100));
        for (i, text) in acts.iter().enumerate() {
            let mut model = oracle.last().clone();
            let act = Act::parse(text).unwrap();
            model.apply(&act, i as u64, 10 + i as u64).unwrap_or_else(|| panic!("{text}"));
            oracle.push(model);
        }
        oracle
    }

    #[test]
    fn prefixes_from_the_last_fsync_on_are_allowed_and_nothing_else() {
        let o = history(&["create a", "write a 0 100", "rename a b", "unlink b"]);
        for found in 0..=4 {
            let seen = o.states[found].1.view();
            for least in 0..=4 {
                for most in least..=4 {
                    let right = (least..=most).contains(&found);
                    let bounds = Bounds { least, most };
                    // The last operation removes everything but the times of the root directory.
                    assert_eq!(o.judge(&seen, bounds).is_ok(), right, "{found} {bounds:?}");
                }
            }
        }
    }

    #[test]
    fn every_small_deviation_is_refused() {
        let o = history(&["create a", "write a 0 100", "setxattr a user.k 8", "link a b"]);
        let all = Bounds { least: 0, most: 4 };
        let right = o.last().view();
        assert!(o.judge(&right, all).is_ok());
        let changes: [fn(&mut Vec<Seen>); 9] = [
            |s| s[1].body[50] ^= 1,
            |s| s[1].size += 1,
            |s| s[1].mode ^= 1,
            |s| s[2].nlink = 1,
            |s| s[1].mtime += 1,
            |s| s[1].ctime += 1,
            |s| s[2].id = 2,
            |s| s[1].xattrs.clear(),
            |s| drop(s.pop()),
        ];
        for (i, change) in changes.iter().enumerate() {
            let mut wrong = right.clone();
            change(&mut wrong);
            assert!(o.judge(&wrong, all).is_err(), "change {i}");
        }
        // The write without the create's name: an operation without one before it.
        let mut wrong = o.states[1].1.view();
        wrong[1].xattrs = right[1].xattrs.clone();
        assert!(o.judge(&wrong, all).is_err());
    }

    #[test]
    fn what_posix_refuses_changes_nothing() {
        let o = history(&["mkdir d", "mkdir d/e", "create f", "link f g"]);
        for text in [
            "create f",
            "rmdir d",
            "unlink d",
            "rename d d/e/x",
            "rename f d",
            "rename d f",
            "rename f g",
            "noreplace f g",
            "exchange d d/e",
            "link d h",
            "write d 0 1",
            "removexattr f user.k",
            "create x/y",
        ] {
            let mut model = o.last().clone();
            assert!(model.apply(&Act::parse(text).unwrap(), 9, 99).is_none(), "{text}");
            assert_eq!(model.view(), o.last().view(), "{text}");
        }
        let mut full = Model::new(0o755, 1, 2);
        let mut act = |text| full.apply(&Act::parse(text).unwrap(), 1, 1).is_some();
        assert!(act("create f") && act("write f 4000 200") && !act("append f 4096"));
        assert!(act("fallocate f 4096 4096 3") && act("append f 1") && !act("append f 8192"));
        assert!(!act("fallocate f 0 8192 8") && act("fallocate f 0 4096 8") && act("append f 9"));
        let o = history(&["mkdir d", "mkdir e", "mkdir d/s", "exchange d e", "rename e/s d/s"]);
        let links: Vec<_> = o.last().view().iter().map(|s| (s.path.clone(), s.nlink)).collect();
        let want = [("", 4), ("d", 3), ("d/s", 2), ("e", 2)];
        assert_eq!(links, want.map(|(p, n)| (p.to_string(), n)));
    }
}
