//! Random histories against a model of a file system in maps; power cuts; replicas; idempotence.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::random::Random;
use base::{Epoch, Errno, InodeId, Sequence, StreamSeq};
use common::whole::differences_are_complete;
use common::*;
use storage::acl::{self, Acl};
use storage::check::{Data, Touched, check, check_with_data};
use storage::format::entry::{self, HEADER_BYTES, Op};
use storage::media::{Media, Segment};
use storage::memory::MemoryRegion;
use storage::volume::{AccountId, Amount, Fault, Refusal, Volume, run_copies};

#[derive(Clone, Debug, Default, PartialEq)]
struct Node {
    mode: u32,
    nlink: u32,
    data: Vec<u8>,
    parent: u64,
    entries: BTreeMap<Vec<u8>, u64>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Made without a name, and may be given one.
    linkable: bool,
    /// Directory whose quota counts it.
    project: u64,
}

impl Node {
    fn is_dir(&self) -> bool {
        self.mode & 0o170000 == 0o040000
    }

    /// Four pieces of 960 bytes are a block, and what is less is free.
    fn attribute_blocks(&self) -> u64 {
        let pieces =
            |(name, value): (&Vec<u8>, &Vec<u8>)| (5 + name.len() + value.len()).div_ceil(960);
        self.xattrs.iter().map(pieces).sum::<usize>() as u64 / 4
    }

    fn list(&self, name: &[u8]) -> Option<Acl> {
        Acl::decode(self.xattrs.get(name)?).unwrap()
    }

    fn put_list(&mut self, name: &[u8], list: Option<&Acl>) {
        match list {
            Some(list) => drop(self.xattrs.insert(name.to_vec(), list.encode())),
            None => drop(self.xattrs.remove(name)),
        }
    }

    fn set_list(&mut self, name: &[u8], value: &[u8]) -> Verdict {
        let list = Acl::decode(value).map_err(|_| Errno::INVAL)?;
        if name == acl::DEFAULT {
            if !self.is_dir() && list.is_some() {
                return Err(Errno::INVAL);
            }
            self.put_list(name, list.as_ref());
            return Ok(());
        }
        if let Some(list) = &list {
            self.mode = self.mode & !0o777 | list.mode();
        }
        self.put_list(name, list.as_ref().filter(|list| !list.is_minimal()));
        Ok(())
    }

    /// What is made in a directory has the lists that it says.
    fn inherit(&mut self, dir: &Node) {
        let Some(default) = dir.list(acl::DEFAULT) else { return };
        let (mode, own) = default.inherited(self.mode);
        self.mode = mode;
        self.put_list(acl::ACCESS, own.as_ref());
        if self.is_dir() {
            self.put_list(acl::DEFAULT, Some(&default));
        }
    }
}

/// The model: as plain as can be.
#[derive(Clone, Debug)]
struct Model {
    nodes: BTreeMap<u64, Node>,
    /// What was there when a snapshot was made.
    snapshots: BTreeMap<Vec<u8>, BTreeMap<u64, Node>>,
    /// Their slots, which the volume gives them.
    slots: BTreeMap<u16, Vec<u8>>,
}

type Verdict = Result<(), Errno>;

fn file_of(nodes: &mut BTreeMap<u64, Node>, ino: u64) -> Result<&mut Node, Errno> {
    let node = nodes.get_mut(&ino).ok_or(Errno::NOENT)?;
    if node.is_dir() { Err(Errno::ISDIR) } else { Ok(node) }
}

impl Model {
    fn new() -> Self {
        let root = Node { mode: DIR, nlink: 2, parent: 1, ..Default::default() };
        Self {
            nodes: BTreeMap::from([(1, root)]),
            snapshots: BTreeMap::new(),
            slots: BTreeMap::new(),
        }
    }

    fn dir(&mut self, ino: u64) -> Result<&mut Node, Errno> {
        let node = self.nodes.get_mut(&ino).ok_or(Errno::NOENT)?;
        match (node.is_dir(), node.nlink) {
            (false, _) => Err(Errno::NOTDIR),
            (_, 0) => Err(Errno::NOENT),
            _ => Ok(node),
        }
    }

    fn file(&mut self, ino: u64) -> Result<&mut Node, Errno> {
        file_of(&mut self.nodes, ino)
    }

    fn below(&self, mut dir: u64, ancestor: u64) -> bool {
        while dir != ancestor && dir != 1 {
            dir = self.nodes[&dir].parent;
        }
        dir == ancestor
    }

    fn drop_link(&mut self, ino: u64) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.nlink = if node.is_dir() { 0 } else { node.nlink - 1 };
        }
    }

    /// Nothing but a directory with a quota of its own moves from one quota's tree to another.
    fn same_quota(&self, from: u64, to: u64, moved: &[u64]) -> Verdict {
        let of = |ino: u64| self.nodes[&ino].project;
        let own = moved.iter().all(|ino| of(*ino) == *ino);
        if from == to || of(from) == of(to) || own { Ok(()) } else { Err(Errno::XDEV) }
    }

    fn remove(&mut self, ino: u64, parent: u64, name: &[u8], dir: bool) -> Verdict {
        let found = self.dir(parent)?.entries.get(name).copied();
        match found {
            None if self.nodes.get(&ino).is_some_and(|n| n.nlink > 0) => return Err(Errno::NOENT),
            None => return Ok(()),
            Some(other) if other != ino => return Err(Errno::STALE),
            Some(_) => {}
        }
        let node = &self.nodes[&ino];
        match (node.is_dir(), dir) {
            (true, false) => return Err(Errno::ISDIR),
            (false, true) => return Err(Errno::NOTDIR),
            (true, true) if !node.entries.is_empty() => return Err(Errno::NOTEMPTY),
            _ => {}
        }
        self.drop_link(ino);
        let parent = self.dir(parent)?;
        parent.entries.remove(name);
        parent.nlink -= u32::from(dir);
        Ok(())
    }

    fn rename(&mut self, op: &Op<'_>) -> Verdict {
        let Op::Rename { ino, parent, name, new_parent, new_name, replaced, .. } = *op else {
            panic!()
        };
        let Op::Rename { noreplace, exchange, .. } = *op else { panic!() };
        let (ino, replaced) = (ino.0, replaced.0);
        let old = self.dir(parent.0)?.entries.get(name).copied();
        let new = self.dir(new_parent.0)?.entries.get(new_name).copied();
        if exchange {
            let (Some(old), Some(new)) = (old, new) else { return Err(Errno::NOENT) };
            if new == ino && old == replaced {
                return Ok(());
            }
            if old != ino || new != replaced {
                return Err(Errno::STALE);
            }
            let (a, b) = (self.nodes[&old].is_dir(), self.nodes[&new].is_dir());
            if a && self.below(new_parent.0, old) || b && self.below(parent.0, new) {
                return Err(Errno::INVAL);
            }
            if old == new {
                return Ok(());
            }
            self.same_quota(parent.0, new_parent.0, &[old, new])?;
            self.dir(parent.0)?.entries.insert(name.to_vec(), new);
            self.dir(new_parent.0)?.entries.insert(new_name.to_vec(), old);
            for (node, from, to) in [(old, parent.0, new_parent.0), (new, new_parent.0, parent.0)] {
                if self.nodes[&node].is_dir() {
                    self.dir(from)?.nlink -= 1;
                    self.dir(to)?.nlink += 1;
                    self.dir(node)?.parent = to;
                }
            }
            return Ok(());
        }
        let Some(old) = old else {
            return if new == Some(ino) { Ok(()) } else { Err(Errno::NOENT) };
        };
        if old != ino {
            return Err(Errno::STALE);
        }
        if noreplace && new.is_some() {
            return Err(Errno::EXIST);
        }
        if new == Some(ino) {
            return Ok(());
        }
        if new.unwrap_or(0) != replaced {
            return Err(Errno::STALE);
        }
        self.same_quota(parent.0, new_parent.0, &[ino])?;
        let is_dir = self.nodes[&ino].is_dir();
        if is_dir && self.below(new_parent.0, ino) {
            return Err(Errno::INVAL);
        }
        if let Some(new) = new {
            let other = &self.nodes[&new];
            match (is_dir, other.is_dir()) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                (true, true) if !other.entries.is_empty() => return Err(Errno::NOTEMPTY),
                _ => {}
            }
            self.drop_link(new);
            self.dir(new_parent.0)?.nlink -= u32::from(is_dir);
        }
        self.dir(parent.0)?.entries.remove(name);
        self.dir(new_parent.0)?.entries.insert(new_name.to_vec(), ino);
        if is_dir {
            self.dir(parent.0)?.nlink -= 1;
            self.dir(new_parent.0)?.nlink += 1;
            self.dir(ino)?.parent = new_parent.0;
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op<'_>) -> Verdict {
        match *op {
            Op::Create { ino, parent, mode, name, .. } => {
                let found = self.dir(parent.0)?.entries.get(name).copied();
                if found.is_some() {
                    return if found == Some(ino.0) { Ok(()) } else { Err(Errno::EXIST) };
                }
                if self.nodes.contains_key(&ino.0) {
                    return Err(Errno::EXIST);
                }
                let dir = mode == DIR;
                let (nlink, parent_of) = if dir { (2, parent.0) } else { (1, 0) };
                let mut node = Node { mode, nlink, parent: parent_of, ..Default::default() };
                node.inherit(self.dir(parent.0)?);
                node.project = self.dir(parent.0)?.project;
                self.nodes.insert(ino.0, node);
                let parent = self.dir(parent.0)?;
                parent.entries.insert(name.to_vec(), ino.0);
                parent.nlink += u32::from(dir);
            }
            Op::Link { ino, parent, name } => {
                self.dir(parent.0)?;
                let node = self.nodes.get(&ino.0).ok_or(Errno::NOENT)?.clone();
                if node.is_dir() {
                    return Err(Errno::PERM);
                }
                match self.dir(parent.0)?.entries.get(name) {
                    Some(other) if *other == ino.0 => return Ok(()),
                    Some(_) => return Err(Errno::EXIST),
                    None if node.nlink == 0 && !node.linkable => return Err(Errno::NOENT),
                    None => {}
                }
                if self.dir(parent.0)?.project != node.project {
                    return Err(Errno::XDEV);
                }
                self.dir(parent.0)?.entries.insert(name.to_vec(), ino.0);
                self.file(ino.0)?.nlink += 1;
                self.file(ino.0)?.linkable = false;
            }
            Op::Unlink { ino, parent, name, .. } => self.remove(ino.0, parent.0, name, false)?,
            Op::Rmdir { ino, parent, name, .. } => self.remove(ino.0, parent.0, name, true)?,
            Op::Rename { .. } => self.rename(op)?,
            Op::Write { ino, offset, data, .. } => {
                let node = self.file(ino.0)?;
                let end = offset as usize + data.len();
                if !data.is_empty() {
                    node.data.resize(node.data.len().max(end), 0);
                    node.data[offset as usize..end].copy_from_slice(data);
                }
            }
            Op::Truncate { ino, size, .. } => self.file(ino.0)?.data.resize(size as usize, 0),
            Op::Fallocate { ino, offset, len, mode } => {
                let node = self.file(ino.0)?;
                let end = (offset + len) as usize;
                if mode & 1 == 0 {
                    node.data.resize(node.data.len().max(end), 0);
                }
                if mode & (2 | 16) != 0 {
                    let len = node.data.len();
                    node.data[(offset as usize).min(len)..end.min(len)].fill(0);
                }
            }
            Op::Shift { ino, offset, len, insert, size } => {
                shift(&mut self.file(ino.0)?.data, (offset, len), insert, size)?;
            }
            Op::SetAttr { ino, mode, .. } => {
                let node = self.nodes.get_mut(&ino.0).ok_or(Errno::NOENT)?;
                node.mode = (node.mode & 0o170000) | mode;
                if let Some(mut list) = node.list(acl::ACCESS) {
                    list.chmod(mode);
                    node.put_list(acl::ACCESS, Some(&list));
                }
            }
            Op::SetXattr { ino, name, value } => {
                let node = self.nodes.get_mut(&ino.0).ok_or(Errno::NOENT)?;
                if acl::is_acl(name) {
                    return node.set_list(name, value);
                }
                node.xattrs.insert(name.to_vec(), value.to_vec());
            }
            Op::RemoveXattr { ino, name } => {
                let node = self.nodes.get_mut(&ino.0).ok_or(Errno::NOENT)?;
                if acl::is_acl(name) {
                    return node.set_list(name, &[]);
                }
                node.xattrs.remove(name).ok_or(Errno::NODATA)?;
            }
            Op::CloneRange { ino, offset, len, source, source_offset, .. } => {
                self.file(ino.0)?;
                let (from, to) = (source_offset as usize, (source_offset + len) as usize);
                let node = match source.of_snapshot() {
                    Some((slot, ino)) => {
                        let name = self.slots.get(&slot).ok_or(Errno::NOENT)?;
                        file_of(self.snapshots.get_mut(name).ok_or(Errno::NOENT)?, ino.0)?
                    }
                    None => self.file(source.0)?,
                };
                let data = node.data.get(from..to).ok_or(Errno::INVAL)?.to_vec();
                if ino == source && offset < source_offset + len && source_offset < offset + len {
                    return Err(Errno::INVAL);
                }
                let node = self.file(ino.0)?;
                let end = (offset + len) as usize;
                node.data.resize(node.data.len().max(end), 0);
                node.data[offset as usize..end].copy_from_slice(&data);
            }
            Op::Reap { ino } => match self.nodes.get(&ino.0) {
                Some(node) if node.nlink > 0 => return Err(Errno::INVAL),
                _ => drop(self.nodes.remove(&ino.0)),
            },
            // By the service only; who reaches what is judged by a test of its own.
            Op::Place { .. } => return Err(Errno::INVAL),
            Op::Tmpfile { ino, parent, mode, linkable, .. } => {
                self.dir(parent.0)?;
                if let Some(node) = self.nodes.get(&ino.0) {
                    let same = node.nlink == 0 && !node.is_dir() && node.linkable == linkable;
                    return if same { Ok(()) } else { Err(Errno::EXIST) };
                }
                let mut node = Node { mode, linkable, ..Default::default() };
                node.inherit(self.dir(parent.0)?);
                node.project = self.dir(parent.0)?.project;
                self.nodes.insert(ino.0, node);
            }
            Op::SetQuota { ino, user, .. } => match user {
                Some(0) => return Err(Errno::INVAL),
                Some(_) => {}
                None => drop(self.dir(ino.0)?),
            },
            Op::Snapshot { ino, name } => {
                if self.snapshots.contains_key(name) {
                    return Err(Errno::EXIST);
                }
                self.dir(ino.0)?;
                self.snapshots.insert(name.to_vec(), self.nodes.clone());
            }
            Op::DropSnapshot { name, .. } => {
                self.snapshots.remove(name);
                self.slots.retain(|_, other| other != name);
            }
            // Where blocks lie is nothing that anybody sees.
            Op::Move { .. } => {}
            Op::SetProject { ino, project } => {
                self.nodes.get_mut(&ino.0).ok_or(Errno::NOENT)?.project = project.0;
            }
            Op::Pad => {}
        }
        Ok(())
    }
}

/// Names and contents from which the operations borrow.
struct Source {
    names: Vec<Vec<u8>>,
    data: Vec<u8>,
    /// Access lists, and what is none.
    lists: Vec<Vec<u8>>,
}

/// Takes a range out of a file, or puts zeroes in.
fn shift(
    data: &mut Vec<u8>,
    (offset, len): (u64, u64),
    insert: bool,
    size: u64,
) -> Result<(), Errno> {
    let before = if insert { size.checked_sub(len) } else { Some(size + len) };
    let last = if insert { offset } else { offset + len };
    let Some(before) = before.filter(|b| (offset | len).is_multiple_of(4096) && last < *b) else {
        return Err(Errno::INVAL);
    };
    if data.len() as u64 == size {
        return Ok(());
    }
    if data.len() as u64 != before {
        return Err(Errno::INVAL);
    }
    let (from, by) = (offset as usize, len as usize);
    if insert {
        data.splice(from..from, std::iter::repeat_n(0, by));
    } else {
        data.drain(from..from + by);
    }
    Ok(())
}

impl Source {
    fn new(random: &mut Random) -> Self {
        let mut data = vec![0; 60_000];
        random.fill(&mut data);
        let mut names: Vec<_> = (0..12u8).map(|i| vec![b'a' + i; 1 + usize::from(i)]).collect();
        names.push(vec![0xff; 255]);
        let list = |perms: [u16; 3], named: &[(u16, u16, u32)]| {
            let mut entries = vec![(1, perms[0], u32::MAX), (4, perms[1], u32::MAX)];
            entries.push((32, perms[2], u32::MAX));
            entries.extend(named);
            entries.sort_unstable();
            let mut value = 2u32.to_le_bytes().to_vec();
            for (tag, perm, id) in entries {
                value.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
                value.extend(id.to_le_bytes());
            }
            value
        };
        let many: Vec<_> = (0..200).map(|i| (2, 4, i)).chain([(16, 7, u32::MAX)]).collect();
        let lists = vec![
            list([6, 4, 4], &[]),
            list([7, 5, 0], &[(2, 6, 10), (8, 4, 20), (16, 6, u32::MAX)]),
            list([6, 0, 4], &[(16, 4, u32::MAX)]),
            list([0, 7, 7], &many),
            list([6, 4, 4], &[(2, 6, 10)]),
            vec![1, 2, 3],
            vec![],
        ];
        Self { names, data, lists }
    }

    fn slice(&self, random: &mut Random, max: u64) -> &[u8] {
        let len = random.below(max) as usize;
        let at = random.below((self.data.len() - len) as u64) as usize;
        &self.data[at..at + len]
    }

    fn op(&self, random: &mut Random, model: &Model, next: &mut u64) -> Op<'_> {
        let any = |random: &mut Random| {
            let n = random.below(model.nodes.len() as u64) as usize;
            *model.nodes.keys().nth(n).unwrap()
        };
        let dirs: Vec<u64> =
            model.nodes.iter().filter(|(_, n)| n.is_dir()).map(|(i, _)| *i).collect();
        let dir = |random: &mut Random| {
            if random.chance(1, 50) {
                any(random)
            } else {
                dirs[random.below(dirs.len() as u64) as usize]
            }
        };
        let name =
            |random: &mut Random| &self.names[random.below(self.names.len() as u64) as usize][..];
        let held = |random: &mut Random, dir: u64, name: &[u8]| {
            let held = model.nodes.get(&dir).and_then(|n| n.entries.get(name)).copied();
            if random.chance(1, 30) { any(random) } else { held.unwrap_or(0) }
        };
        let one = |ino: u64| InodeId(ino.max(1));
        let (d, n, ino) = (dir(random), name(random), InodeId(any(random)));
        let (offset, len) = (random.below(40_000), 1 + random.below(20_000));
        let list = &self.lists[random.below(self.lists.len() as u64) as usize];
        let of = if random.chance(1, 2) { acl::ACCESS } else { acl::DEFAULT };
        match random.below(37) {
            0..=3 => {
                *next += 1;
                let fresh = if random.chance(1, 40) { any(random) } else { *next };
                create(fresh, d, n, if random.chance(1, 3) { DIR } else { FILE })
            }
            4 => Op::Link { ino, parent: InodeId(d), name: n },
            5 => Op::Unlink {
                ino: one(held(random, d, n)),
                parent: InodeId(d),
                name: n,
                open: false,
            },
            6 => {
                Op::Rmdir { ino: one(held(random, d, n)), parent: InodeId(d), name: n, open: false }
            }
            7..=8 => {
                let (e, m) = (dir(random), name(random));
                let (noreplace, exchange) =
                    [(false, false), (true, false), (false, true)][random.below(3) as usize];
                Op::Rename {
                    ino: one(held(random, d, n)),
                    parent: InodeId(d),
                    name: n,
                    new_parent: InodeId(e),
                    new_name: m,
                    replaced: InodeId(held(random, e, m)),
                    noreplace,
                    exchange,
                    open: false,
                }
            }
            9..=12 => {
                let max = if random.chance(1, 5) { 30_000 } else { 3000 };
                let data = self.slice(random, max);
                write(ino.0, offset, data)
            }
            13 => truncate(ino.0, offset),
            14 => {
                let mode = [0, 1, 3, 16, 17, 64, 65][random.below(7) as usize];
                Op::Fallocate { ino, offset, len, mode }
            }
            15 => chmod(ino.0, [0o644, 0o640, 0o600, 0o604][random.below(4) as usize]),
            16 => Op::SetXattr { ino, name: n, value: self.slice(random, 6000) },
            17 => Op::RemoveXattr { ino, name: n },
            18 | 27..=28 => {
                let mut source = InodeId(any(random));
                let mut nodes = &model.nodes;
                if !model.slots.is_empty() && random.chance(1, 3) {
                    let at = random.below(model.slots.len() as u64) as usize;
                    let (slot, name) = model.slots.iter().nth(at).unwrap();
                    nodes = &model.snapshots[name];
                    source = source.in_snapshot(*slot);
                }
                let from = random.below(9000);
                let there = source.of_snapshot().map_or(source, |(_, ino)| ino);
                let size = nodes.get(&there.0).map_or(0, |n| n.data.len() as u64);
                // Whole blocks can be shared, also of what was shared already.
                let (offset, source_offset) = match random.below(4) {
                    0 => (offset, from),
                    1 => (offset & !4095 | from & 4095, from),
                    2 => (offset & !4095, from & !4095),
                    _ => (0, 0),
                };
                let rest = size.saturating_sub(source_offset).max(1);
                let len = if random.chance(2, 3) { rest } else { len.min(rest) };
                Op::CloneRange { ino, offset, len, source, source_offset, zeroes: false }
            }
            19 => {
                *next += 1;
                let fresh = if random.chance(1, 20) { any(random) } else { *next };
                let (ino, parent, linkable) = (InodeId(fresh), InodeId(d), random.chance(2, 3));
                Op::Tmpfile { ino, parent, mode: FILE, uid: 10, gid: 20, linkable }
            }
            20..=21 => Op::SetXattr { ino, name: of, value: list },
            22 => Op::RemoveXattr { ino, name: of },
            23 => {
                let limit = Amount { blocks: random.below(9), inodes: random.below(3) };
                let user = random.chance(1, 3).then(|| 10 * random.below(2) as u32);
                Op::SetQuota { ino: InodeId(d), user, limit }
            }
            24 => Op::SetProject { ino, project: InodeId(if random.chance(1, 2) { d } else { 0 }) },
            25 => {
                let (insert, even) = (random.chance(1, 2), random.chance(19, 20));
                let mask = if even { 4095 } else { 0 };
                let (offset, len) = (offset & !mask, (len & !mask).max(4096));
                let now = model.nodes.get(&ino.0).map_or(0, |n| n.data.len() as u64);
                let size = if insert { now + len } else { now.saturating_sub(len) };
                let size = if random.chance(1, 20) { size + 1 } else { size };
                Op::Shift { ino, offset, len, insert, size }
            }
            26..=28 => {
                let (from, out) = (random.below(3), random.chance(1, 2));
                let to = if random.chance(1, 2) { u64::MAX } else { from + 1 + random.below(3) };
                Op::Move { ino, from, to, out }
            }
            29 => Op::Snapshot { ino: InodeId(d), name: n },
            30 => Op::DropSnapshot { ino: InodeId(1), name: n },
            31..=34 if !model.slots.is_empty() => self.back(random, model),
            _ => Op::Reap { ino },
        }
    }
}

impl Source {
    /// A file as a snapshot has it comes into the same file, or another one: in whole, in blocks, or in bytes.
    fn back(&self, random: &mut Random, model: &Model) -> Op<'static> {
        let files = |nodes: &BTreeMap<u64, Node>| -> Vec<u64> {
            nodes.iter().filter(|(_, n)| !n.is_dir()).map(|(ino, _)| *ino).collect()
        };
        let one = |random: &mut Random, all: &[u64]| {
            let at = random.below(all.len().max(1) as u64) as usize;
            all.get(at).copied().unwrap_or(1)
        };
        let at = random.below(model.slots.len() as u64) as usize;
        let (slot, name) = model.slots.iter().nth(at).unwrap();
        let then = &model.snapshots[name];
        let mut had = files(then);
        had.retain(|ino| !then[ino].data.is_empty());
        let there = one(random, &had);
        let same = model.nodes.contains_key(&there) && random.chance(1, 2);
        let ino = InodeId(if same { there } else { one(random, &files(&model.nodes)) });
        let size = then.get(&there).map_or(0, |node| node.data.len() as u64);
        let mask = if random.chance(1, 4) { 0 } else { 4095 };
        let (from, to) = (random.below(size.max(1)) & !mask, random.below(20_000) & !mask);
        let source = InodeId(there).in_snapshot(*slot);
        let (offset, source_offset, len) = match random.below(3) {
            0 => (0, 0, size),
            1 => (to, from, size - from),
            _ => (to, from, (4096 * (1 + random.below(3))).min(size - from)),
        };
        Op::CloneRange { ino, offset, len, source, source_offset, zeroes: false }
    }
}

/// A volume in memory with its history: entries lie in the stream segment, which is durable.
struct World {
    media: Arc<MemoryRegion>,
    volume: Volume,
    ends: Vec<u64>,
}

const STREAM_BYTES: u64 = 12 << 20;

impl World {
    fn new(capacity: u64) -> Self {
        let media = Arc::new(MemoryRegion::new());
        media.ensure(Segment::Stream, STREAM_BYTES).unwrap();
        let volume = Volume::format(media.clone(), &params(capacity)).unwrap();
        Self { media, volume, ends: vec![0] }
    }

    /// Appends an entry to the stream, durably, whatever happens to the power afterwards.
    fn append(&mut self, op: &Op<'_>) {
        let n = self.ends.len() as u64;
        let bytes = op.to_entry(Sequence(n), Epoch(1), 0, 5_000_000_000 + n * 1_000_003, 7);
        let at = *self.ends.last().unwrap();
        self.media.damage(Segment::Stream, at, &bytes).unwrap();
        self.ends.push(at + bytes.len() as u64);
    }

    /// Applies entry `n` (from 1) of the stream.
    fn apply(&mut self, n: usize) -> Result<bool, Refusal> {
        let (at, end) = (self.ends[n - 1], self.ends[n]);
        let mut bytes = vec![0; (end - at) as usize];
        self.media.read(Segment::Stream, at, &mut bytes)?;
        let (header, op) = entry::decode(&bytes, 7).unwrap();
        let source = (Segment::Stream, at + HEADER_BYTES as u64);
        Ok(self.volume.apply(&header, &op, source)?.already)
    }

    fn publish(&mut self, n: usize) -> Result<(), Fault> {
        let sealed = self.volume.seal(StreamSeq(n as u64), Epoch(1), &[])?;
        run_copies(&*self.media, &sealed.copies)?;
        self.volume.publish(sealed).map(|_| ())
    }

    /// Applies entry `n`, publishing first if that is asked for.
    fn must(&mut self, n: usize) -> Result<bool, Refusal> {
        match self.apply(n) {
            Err(Refusal::NeedsPublish) => {
                self.publish(n - 1)?;
                self.apply(n)
            }
            done => done,
        }
    }

    fn assert_sound(&self) {
        let report = check(&*self.media).unwrap();
        assert!(report.is_sound(), "{:#?}", report.findings);
    }

    /// Every block is what its checksum says, but for those that entries `pending` (from 1) may overwrite.
    fn assert_data(&self, pending: std::ops::Range<usize>) {
        let mut touched = Vec::new();
        for n in pending {
            let (at, end) = (self.ends[n - 1], self.ends[n]);
            let mut bytes = vec![0; (end - at) as usize];
            self.media.read(Segment::Stream, at, &mut bytes).unwrap();
            touched.extend(Touched::by(&entry::decode(&bytes, 7).unwrap().1));
        }
        let mut data = Data { pending: &touched, progress: &mut |_, _| {} };
        let report = check_with_data(&*self.media, &mut data).unwrap();
        assert!(report.is_sound(), "{:#?}", report.findings);
        assert_eq!(report.counts.unsummed, 0);
    }

    /// What each snapshot has otherwise than any other, an older one or a younger one, or than nothing: that and no less.
    fn assert_differences(&mut self) {
        let all = self.volume.snapshots(0, usize::MAX);
        let slots: Vec<u16> = all.iter().map(|stat| stat.snapshot.slot).collect();
        let mut random = Random::new(self.ends.len() as u64);
        for slot in &slots {
            for before in slots.iter().copied().map(Some).chain([None]) {
                let mut bounds =
                    || (1 + random.below(9000) as usize, 1 + random.below(30) as usize);
                differences_are_complete(&mut self.volume, before, *slot, &mut bounds)
                    .unwrap_or_else(|why| panic!("slots {before:?} and {slot}: {why}"));
            }
        }
    }

    fn assert_equals(&mut self, model: &Model) {
        assert_shows(&self.volume, &model.nodes);
        let all = self.volume.snapshots(0, usize::MAX);
        let names: BTreeSet<_> = all.iter().map(|stat| &stat.snapshot.name).collect();
        assert!(names.into_iter().eq(model.snapshots.keys()), "snapshots");
        for stat in all {
            let state = self.volume.read_snapshot(stat.snapshot.slot).unwrap();
            assert_shows(state, &model.snapshots[&stat.snapshot.name]);
            assert_eq!(stat.snapshot.inodes, state.statfs().inodes);
        }
        self.assert_differences();
        self.volume.invariants().unwrap();
        let mut used: BTreeMap<AccountId, Amount> = BTreeMap::new();
        for (ino, node) in &model.nodes {
            let data = self.volume.attr(InodeId(*ino)).unwrap().unwrap().blocks / 8;
            // The root is the super-user's, all else the same user's.
            let user = AccountId::User(if *ino == 1 { 0 } else { 10 });
            let tree = (node.project != 0).then_some(AccountId::Directory(InodeId(node.project)));
            for id in [Some(user), tree].into_iter().flatten() {
                let used = used.entry(id).or_default();
                used.inodes += if node.is_dir() { 1 } else { node.nlink.max(1).into() };
                used.blocks += data + node.attribute_blocks();
            }
        }
        for account in self.volume.accounts(None, usize::MAX) {
            let want = used.remove(&account.id).unwrap_or_default();
            assert_eq!(account.used, want, "{:?}", account.id);
        }
        assert!(used.is_empty(), "accounts that are not shown: {used:?}");
    }
}

/// A state is what the model says.
fn assert_shows(volume: &Volume, nodes: &BTreeMap<u64, Node>) {
    let inodes = volume.inodes_after(InodeId(0), usize::MAX).unwrap();
    assert!(inodes.iter().map(|i| i.0).eq(nodes.keys().copied()), "inodes");
    let mut orphans = BTreeSet::new();
    for (&ino, node) in nodes {
        let id = InodeId(ino);
        let attr = volume.attr(id).unwrap().unwrap();
        let size = if node.is_dir() { 0 } else { node.data.len() as u64 };
        assert_eq!((attr.mode, attr.nlink, attr.size), (node.mode, node.nlink, size), "{ino}");
        if node.nlink == 0 {
            orphans.insert(id);
        }
        let mut data = vec![0xaa; node.data.len() + 10];
        let got = volume.read_file(id, 0, &mut data).unwrap();
        assert!(data[..got] == node.data, "content of {ino}");
        for (name, value) in &node.xattrs {
            assert_eq!(volume.xattr(id, name).unwrap().as_ref(), Some(value));
        }
        assert_eq!(attr.xattrs, !node.xattrs.is_empty());
        assert_eq!(attr.acl.as_deref(), node.list(acl::ACCESS).as_ref());
        assert_eq!(attr.default_acl.as_deref(), node.list(acl::DEFAULT).as_ref());
        assert_eq!(attr.linkable, node.linkable && node.nlink == 0);
        if node.is_dir() {
            let mut names = BTreeMap::new();
            let mut cookie = 2;
            // In small steps, continuing by cookie.
            while !volume
                .readdir(id, cookie, 3, &mut |n| {
                    cookie = n.next;
                    assert!(names.insert(n.name.to_vec(), n.ino.0).is_none());
                    true
                })
                .unwrap()
                .unwrap()
            {}
            assert_eq!(names, node.entries, "names of {ino}");
        }
    }
    assert_eq!(volume.orphans().unwrap(), Vec::from_iter(orphans));
}

fn history(seed: u64, ops: usize, capacity: u64) -> (World, Model, Vec<Verdict>) {
    let mut random = Random::new(seed);
    let source = Source::new(&mut random);
    let (mut world, mut model) = (World::new(capacity), Model::new());
    let (mut verdicts, mut next) = (Vec::new(), 1);
    for n in 1..=ops {
        let op = source.op(&mut random, &model, &mut next);
        world.append(&op);
        let done = world.must(n);
        assert!(!matches!(done, Err(Refusal::Fault(_))), "seed {seed}, op {n} {op:?}: {done:?}");
        if done == Err(Refusal::NoSpace) {
            verdicts.push(Err(Errno::NOSPC));
        } else {
            let want = model.apply(&op);
            let got = done.as_ref().map(|_| ()).map_err(Refusal::errno);
            assert_eq!(got, want, "seed {seed}, op {n} {op:?}");
            for stat in world.volume.snapshots(0, usize::MAX) {
                model.slots.insert(stat.snapshot.slot, stat.snapshot.name);
            }
            verdicts.push(want);
        }
        if done.is_ok() && random.chance(1, 4) {
            // Once more: nothing may change (the comparison with the model shows it).
            match world.must(n) {
                Ok(_) => {}
                Err(Refusal::NoSpace) => assert!(matches!(op, Op::CloneRange { .. }), "{op:?}"),
                Err(e) => {
                    let gone = matches!(op, Op::RemoveXattr { .. } | Op::Unlink { .. });
                    assert!(gone, "seed {seed}, op {n} again {op:?}: {e:?}");
                }
            }
        }
        if random.chance(1, 25) {
            world.publish(n).unwrap();
            if random.chance(1, 2) {
                world.volume = Volume::open(world.media.clone()).unwrap();
            }
        }
    }
    world.publish(ops).unwrap();
    (world, model, verdicts)
}

#[test]
fn random_histories_match_the_model() {
    for seed in 0..18 {
        let capacity = if seed % 3 == 0 { 400_000 } else { 4 << 20 };
        let (mut world, model, _) = history(seed, 600, capacity);
        world.assert_sound();
        world.assert_data(0..0);
        world.assert_equals(&model);
        world.volume = Volume::open(world.media.clone()).unwrap();
        world.assert_equals(&model);
    }
}

#[test]
fn replicas_agree_whatever_their_layout() {
    for seed in 100..103 {
        let (world, _, _) = history(seed, 500, 4 << 20);
        let mut other = World::new(4 << 20);
        other.ends = world.ends.clone();
        let mut bytes = vec![0; *world.ends.last().unwrap() as usize];
        world.media.read(Segment::Stream, 0, &mut bytes).unwrap();
        other.media.damage(Segment::Stream, 0, &bytes).unwrap();
        for n in 1..other.ends.len() {
            let _ = other.must(n);
        }
        other.publish(1).unwrap();
        assert_eq!(world.volume.differences(&other.volume), Ok(vec![]));
        assert_eq!(world.volume.digest(), other.volume.digest());
        let n = other.ends.len();
        other.append(&create(1_000_000, 1, b"one more", FILE));
        other.must(n).unwrap();
        other.publish(2).unwrap();
        assert_ne!(world.volume.digest(), other.volume.digest());
        assert!(!world.volume.differences(&other.volume).unwrap().is_empty());
    }
}

/// Who applies several operations at once is told before whether one of them may have to wait: a node that found it out
/// in their middle would have to begin anew, and to publish all that lies behind it at once.
#[test]
fn operations_that_may_have_to_wait_are_known_before() {
    let (mut waited, mut asked) = (0, 0);
    for seed in 300..330 {
        let mut random = Random::new(seed);
        let (clean, _, _) = history(seed, 400, 300_000);
        let mut world = World::new(300_000);
        world.ends = clean.ends.clone();
        let mut bytes = vec![0; *clean.ends.last().unwrap() as usize];
        clean.media.read(Segment::Stream, 0, &mut bytes).unwrap();
        world.media.damage(Segment::Stream, 0, &bytes).unwrap();
        let mut n = 1;
        while n < world.ends.len() {
            let end = (n + 1 + random.below(12) as usize).min(world.ends.len());
            let entries: Vec<Vec<u8>> = (n..end)
                .map(|n| bytes[world.ends[n - 1] as usize..world.ends[n] as usize].to_vec())
                .collect();
            let ops: Vec<_> =
                entries.iter().map(|bytes| entry::decode(bytes, 7).unwrap().1).collect();
            let told = world.volume.may_have_to_wait(ops.iter()).unwrap();
            asked += usize::from(told);
            for n in n..end {
                if world.apply(n) == Err(Refusal::NeedsPublish) {
                    waited += 1;
                    // Blocks that others of these operations read are another matter.
                    assert!(told || world.volume.has_read(), "seed {seed}, entry {n}");
                    world.publish(n - 1).unwrap();
                    let _ = world.apply(n);
                }
            }
            n = end;
            if random.chance(1, 30) {
                world.publish(n - 1).unwrap();
            }
        }
    }
    assert!(waited > 20 && asked < 900, "{waited} had to wait, {asked} may have had to");
}

/// Power cuts at every step of publications, then recovery from the stream.
#[test]
fn power_cuts_lose_nothing_that_the_stream_holds() {
    let mut total = 0;
    for seed in 200..214 {
        let mut random = Random::new(seed);
        let (clean, model, _) = history(seed, 200, 4 << 20);
        let mut world = World::new(4 << 20);
        world.ends = clean.ends.clone();
        let mut bytes = vec![0; *clean.ends.last().unwrap() as usize];
        clean.media.read(Segment::Stream, 0, &mut bytes).unwrap();
        world.media.damage(Segment::Stream, 0, &bytes).unwrap();
        let (mut n, mut reached) = (1, 0);
        let mut cuts = 0;
        while n < world.ends.len() {
            if cuts < 6 {
                world.media.limit(Some(random.below(120)));
            }
            let failed = loop {
                if n > reached {
                    world.volume.end_replay();
                    reached = usize::MAX;
                }
                if n == world.ends.len() {
                    break world.publish(n - 1).is_err();
                }
                match world.must(n) {
                    Err(Refusal::Fault(_)) => break true,
                    _ => n += 1,
                }
                if random.chance(1, 12) && world.publish(n - 1).is_err() {
                    break true;
                }
            };
            world.media.limit(None);
            if failed {
                cuts += 1;
                world.media = Arc::new(world.media.cut(&mut random));
                world.volume = Volume::open(world.media.clone()).unwrap();
                world.assert_sound();
                // What came before a cut is replayed, unless there is another one meanwhile.
                reached = if reached == usize::MAX { n } else { reached.max(n) };
                n = world.volume.root().stream_seq.0 as usize + 1;
                world.assert_data(n..(reached + 1).min(world.ends.len()));
                world.volume.begin_replay();
            }
        }
        total += cuts;
        world.assert_sound();
        world.assert_data(0..0);
        world.assert_equals(&model);
    }
    assert!(total > 30, "only {total} power cuts were met");
}

/// A clone has what was there before it, however often it is replayed: whether it shares blocks, or
/// has to copy them because of who may read the files.
#[test]
fn a_clone_is_not_disturbed_by_writes_to_its_source() {
    for mode in [FILE, 0o100600] {
        let mut world = World::new(4 << 20);
        let (ino, source) = (InodeId(3), InodeId(2));
        let clone =
            Op::CloneRange { ino, offset: 0, len: 3000, source, source_offset: 0, zeroes: false };
        let (old, new) = ([1; 3000], [2; 3000]);
        let ops = [
            create(2, 1, b"a", FILE),
            create(3, 1, b"b", mode),
            write(2, 0, &old),
            clone,
            write(2, 0, &new),
        ];
        for op in &ops {
            world.append(op);
        }
        for n in 1..=3 {
            world.must(n).unwrap();
        }
        world.publish(3).unwrap();
        world.must(4).unwrap();
        // The service would publish now; a crash between copies and root must not show.
        let put_off = world.apply(5) == Err(Refusal::NeedsPublish);
        let sealed = world.volume.seal(StreamSeq(5), Epoch(1), &[]).unwrap();
        run_copies(&*world.media, &sealed.copies).unwrap();
        drop(sealed);
        world.volume = Volume::open(world.media.clone()).unwrap();
        world.assert_data(4..6);
        world.volume.begin_replay();
        for n in 4..=5 {
            world.must(n).unwrap();
        }
        world.publish(5).unwrap();
        world.assert_data(0..0);
        let read = |ino| {
            let mut data = [0; 3000];
            world.volume.read_file(ino, 0, &mut data).unwrap();
            data
        };
        assert_eq!(put_off, mode != FILE);
        assert!(read(ino) == old && read(source) == new);
    }
}
