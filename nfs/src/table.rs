//! Which file a number stands for. A server names files by handles, a guest by numbers of 64 bits: those that the server gives to its files, as
//! long as they are one to one.
//!
//! - The export's root is 1, and a file that has number 1 there has the root's.
//! - A handle of a new file may come with a number that an old one has whose handle is still known here (ext4 gives a number away again at
//!   once): then the new one gets a number of ours. It is made of the server's and the handle, so that a device that comes back finds
//!   the file by it. By then the file may be known by the server's number: then it has both.
//! - What nobody knows any more is kept for a while, so that who is just being told of it finds it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use base::InodeId;

use crate::proto::Fh;
use crate::rpc::Cred;

/// Files that are kept after they were forgotten.
const FORGOTTEN_MAX: usize = 4096;
/// Numbers of ours begin here.
const OWN: u64 = 1 << 63;
/// So many bits of one are a sum of the handle; those above are the lower ones of the server's number.
const SUM_BITS: u32 = 23;

/// The number of ours that a file gets, if it needs one.
pub fn own(fileid: u64, fh: &Fh) -> u64 {
    let sum = base::checksum::crc32c(0, &fh.0) & ((1 << SUM_BITS) - 1);
    OWN | (fileid << SUM_BITS & (OWN - 1)) | u64::from(sum)
}

/// Whether a file to which the server gives that number can have this one of ours.
pub const fn may_be_own(ino: InodeId, fileid: u64) -> bool {
    ino.0 & OWN != 0 && ino.0 >> SUM_BITS == (OWN | (fileid << SUM_BITS & (OWN - 1))) >> SUM_BITS
}

/// A name that keeps an open file that has lost its last one.
#[derive(Clone, Debug)]
pub struct Stand {
    /// In which directory.
    pub dir: Fh,
    /// The name.
    pub name: Vec<u8>,
    /// On whose behalf it was made, and is taken away.
    pub cred: Cred,
}

/// What changes of a file that is known.
#[derive(Debug, Default)]
pub struct NodeState {
    /// A directory and a name there under which it was seen.
    pub named: Option<(Fh, Vec<u8>)>,
    /// With which the names of a directory are asked for.
    pub verifier: [u8; 8],
    /// Who has opened it last, to read and to write.
    pub openers: [Option<Cred>; 2],
    forgotten: bool,
}

/// Data that a server has and may lose.
#[derive(Clone, Debug)]
pub struct Unstable {
    /// Where.
    pub offset: u64,
    /// What.
    pub data: Vec<u8>,
    /// In which life of the server.
    pub verifier: [u8; 8],
    /// On whose behalf.
    pub cred: Cred,
}

/// What is kept of a file because the server may lose it, in the order in which it was written.
#[derive(Debug, Default)]
pub struct Kept {
    all: Vec<Unstable>,
    bytes: usize,
}

impl Kept {
    /// What one takes beside its data.
    const EACH: usize = 128;

    fn cost(one: &Unstable) -> usize {
        one.data.len() + Self::EACH
    }

    /// What all of it takes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there is nothing.
    pub const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All of it.
    pub fn iter(&self) -> impl Iterator<Item = &Unstable> {
        self.all.iter()
    }

    /// One more, which takes so much.
    pub fn push(&mut self, one: Unstable) -> usize {
        let cost = Self::cost(&one);
        self.bytes += cost;
        self.all.push(one);
        cost
    }

    /// Takes all of it out.
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Puts back what was taken, before what was written since.
    pub fn put_back(&mut self, older: Self) {
        let newer = std::mem::replace(self, older);
        self.bytes += newer.bytes;
        self.all.extend(newer.all);
    }

    /// Takes the oldest out.
    pub fn drop_first(&mut self, count: usize) {
        let gone = self.all.drain(..count.min(self.all.len()));
        self.bytes -= gone.map(|one| Self::cost(&one)).sum::<usize>();
    }
}

/// A file that is known.
#[derive(Debug)]
pub struct Node {
    /// Its number.
    pub ino: InodeId,
    /// Its handle.
    pub fh: Fh,
    /// Its type bits.
    pub kind: u32,
    /// Opening and taking names away exclude each other: how often it is open.
    pub gate: Mutex<Gate>,
    /// Held to write, shared, and to do what must not meet a write: cutting, appending, writing again.
    pub io: RwLock<()>,
    /// What was written and may be lost with the server.
    pub unstable: Mutex<Kept>,
    /// Held while it is made durable, so that nobody takes what somebody else is still about for done.
    pub committing: Mutex<()>,
    state: Mutex<NodeState>,
}

/// See [`Node::gate`].
#[derive(Debug, Default)]
pub struct Gate {
    /// Handles.
    pub opens: usize,
    /// Names that it has only because it is open.
    pub stands: Vec<Stand>,
}

impl Node {
    /// What changes of it.
    pub fn state(&self) -> MutexGuard<'_, NodeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It was seen under a name.
    pub fn seen_under(&self, dir: &Fh, name: &[u8]) {
        if matches!(name, b"." | b"..") {
            return;
        }
        let mut state = self.state();
        if state.named.as_ref().is_none_or(|(d, n)| d != dir || n != name) {
            state.named = Some((dir.clone(), name.to_vec()));
        }
    }

    /// Its door.
    pub fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What may be lost.
    pub fn unstable(&self) -> MutexGuard<'_, Kept> {
        self.unstable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody else makes it durable.
    pub fn committing(&self) -> MutexGuard<'_, ()> {
        self.committing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open file.
#[derive(Debug)]
pub struct Open {
    /// Which.
    pub node: Arc<Node>,
    /// Read only, write only, both.
    pub mode: u32,
    /// Every write goes to the end.
    pub append: bool,
    /// Every write is durable.
    pub sync: bool,
    /// Whoever opened it.
    pub cred: Cred,
}

/// All that is known.
#[derive(Debug)]
pub struct Table {
    root: Arc<Node>,
    root_fileid: u64,
    nodes: HashMap<u64, Arc<Node>>,
    numbers: HashMap<Fh, u64>,
    /// Numbers of ours that a device of before gave to files which have others now.
    others: HashMap<u64, u64>,
    forgotten: VecDeque<u64>,
    opens: HashMap<u64, Arc<Open>>,
    last_open: u64,
}

/// What a handle is to a table.
#[derive(Debug)]
pub enum Seen {
    /// Known, or made known.
    Node(Arc<Node>),
    /// Its number is that of another one: who that is must be asked.
    Doubtful(Arc<Node>),
}

fn node(ino: u64, fh: &Fh, kind: u32) -> Arc<Node> {
    Arc::new(Node {
        ino: InodeId(ino),
        fh: fh.clone(),
        kind,
        gate: Mutex::default(),
        io: RwLock::default(),
        unstable: Mutex::default(),
        committing: Mutex::default(),
        state: Mutex::default(),
    })
}

impl Table {
    /// Nothing but the root.
    pub fn new(root: &Fh, fileid: u64) -> Self {
        let root = node(InodeId::ROOT.0, root, client::fs::S_IFDIR);
        Self {
            nodes: HashMap::from([(InodeId::ROOT.0, root.clone())]),
            numbers: HashMap::from([(root.fh.clone(), InodeId::ROOT.0)]),
            root,
            root_fileid: fileid,
            others: HashMap::new(),
            forgotten: VecDeque::new(),
            opens: HashMap::new(),
            last_open: 0,
        }
    }

    /// The server's number of a file to ours, and back.
    pub fn swap(&self, fileid: u64) -> u64 {
        match fileid {
            1 => self.root_fileid,
            n if n == self.root_fileid => 1,
            n => n,
        }
    }

    /// The root.
    pub fn root(&self) -> Arc<Node> {
        self.root.clone()
    }

    /// The file of a number.
    pub fn node(&self, ino: InodeId) -> Option<Arc<Node>> {
        self.nodes.get(self.others.get(&ino.0).unwrap_or(&ino.0)).cloned()
    }

    /// All that is known.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.nodes.values().cloned().collect()
    }

    /// The file of a handle, if it is known.
    pub fn by_handle(&self, fh: &Fh) -> Option<Arc<Node>> {
        self.numbers.get(fh).and_then(|ino| self.nodes.get(ino)).cloned()
    }

    /// Somebody is told of a file.
    pub fn see(&mut self, fh: &Fh, fileid: u64, kind: u32) -> Seen {
        if let Some(node) = self.by_handle(fh) {
            node.state().forgotten = false;
            return Seen::Node(node);
        }
        let number = self.swap(fileid);
        match self.nodes.get(&number) {
            Some(other) => Seen::Doubtful(other.clone()),
            None => Seen::Node(self.insert(number, fh, kind)),
        }
    }

    /// The same for one whose number another one has, which is another file: it gets a number of ours.
    pub fn see_apart(&mut self, fh: &Fh, fileid: u64, kind: u32) -> Arc<Node> {
        if let Some(node) = self.by_handle(fh) {
            node.state().forgotten = false;
            return node;
        }
        let mut number = own(fileid, fh);
        while self.nodes.contains_key(&number) || self.others.contains_key(&number) {
            number = OWN | number.wrapping_add(1);
        }
        self.insert(number, fh, kind)
    }

    /// A device of before told somebody of a file by this number of ours.
    pub fn see_again(&mut self, ino: InodeId, fh: &Fh, kind: u32) -> Arc<Node> {
        self.others.remove(&ino.0);
        match self.by_handle(fh) {
            Some(node) => {
                if node.ino != ino {
                    self.others.insert(ino.0, node.ino.0);
                }
                node
            }
            None => self.insert(ino.0, fh, kind),
        }
    }

    fn insert(&mut self, number: u64, fh: &Fh, kind: u32) -> Arc<Node> {
        let node = node(number, fh, kind);
        self.nodes.insert(number, node.clone());
        self.numbers.insert(fh.clone(), number);
        node
    }

    /// Somebody is told of a file by its number: whether it is known. Then it stays so.
    pub fn keeps(&self, ino: InodeId) -> bool {
        let Some(node) = self.nodes.get(&ino.0) else { return false };
        node.state().forgotten = false;
        true
    }

    /// Nobody knows it any more, except who has it open.
    pub fn forget(&mut self, ino: InodeId) {
        if self.others.remove(&ino.0).is_some() {
            return;
        }
        let Some(node) = self.nodes.get(&ino.0).filter(|node| node.ino != InodeId::ROOT) else {
            return;
        };
        if std::mem::replace(&mut node.state().forgotten, true) {
            return;
        }
        self.forgotten.push_back(ino.0);
        for _ in 0..self.forgotten.len() {
            if self.forgotten.len() <= FORGOTTEN_MAX {
                break;
            }
            let Some(old) = self.forgotten.pop_front() else { break };
            let Some(node) = self.nodes.get(&old).filter(|node| node.state().forgotten) else {
                continue;
            };
            // Whoever has one in hand or open has a reference beside the table's; what could not be made durable yet is tried again.
            if Arc::strong_count(node) > 1 || !node.unstable().is_empty() {
                self.forgotten.push_back(old);
                continue;
            }
            self.numbers.remove(&node.fh);
            self.nodes.remove(&old);
        }
    }

    /// A number for an open file.
    pub fn register(&mut self, open: Open) -> u64 {
        self.last_open += 1;
        self.opens.insert(self.last_open, Arc::new(open));
        self.last_open
    }

    /// An open file by its number.
    pub fn open(&self, handle: u64) -> Option<Arc<Open>> {
        self.opens.get(&handle).cloned()
    }

    /// Takes an open file out.
    pub fn close(&mut self, handle: u64) -> Option<Arc<Open>> {
        self.opens.remove(&handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fh(n: u64) -> Fh {
        Fh(n.to_string().into_bytes().into())
    }

    fn seen(table: &mut Table, n: u64, fileid: u64) -> u64 {
        match table.see(&fh(n), fileid, client::fs::S_IFREG) {
            Seen::Node(node) => node.ino.0,
            Seen::Doubtful(_) => table.see_apart(&fh(n), fileid, client::fs::S_IFREG).ino.0,
        }
    }

    #[test]
    fn numbers_are_one_to_one() {
        let mut table = Table::new(&fh(0), 128);
        assert_eq!(seen(&mut table, 0, 128), 1);
        assert_eq!((seen(&mut table, 1, 1), seen(&mut table, 2, 2)), (128, 2));
        // A number that is used again.
        let again = seen(&mut table, 3, 2);
        assert!(again > OWN);
        assert_eq!((seen(&mut table, 3, 2), seen(&mut table, 2, 2)), (again, 2));
        assert_eq!(table.node(InodeId(again)).unwrap().fh, fh(3));
        // One that has the same sum.
        table.nodes.insert(own(2, &fh(4)), table.node(InodeId(2)).unwrap());
        assert_eq!(seen(&mut table, 4, 2), OWN | (own(2, &fh(4)) + 1));
    }

    #[test]
    fn a_number_of_ours_is_found_again() {
        let mut before = Table::new(&fh(0), 128);
        let fileid = 1 << 50 | 77;
        seen(&mut before, 1, fileid);
        let ino = InodeId(seen(&mut before, 2, fileid));
        assert_eq!(ino.0, own(fileid, &fh(2)));
        assert!(may_be_own(ino, fileid) && !may_be_own(ino, fileid + 1));
        assert!(!may_be_own(InodeId(fileid), fileid));
        // In a device that does not know the file yet, and in one that knows it by the server's number.
        let mut fresh = Table::new(&fh(0), 128);
        assert!(fresh.node(ino).is_none());
        assert_eq!(fresh.see_again(ino, &fh(2), client::fs::S_IFREG).ino, ino);
        assert_eq!(InodeId(seen(&mut fresh, 2, fileid)), ino);
        let mut told = Table::new(&fh(0), 128);
        assert_eq!(seen(&mut told, 2, fileid), fileid);
        for _ in 0..2 {
            assert_eq!(told.see_again(ino, &fh(2), client::fs::S_IFREG).ino.0, fileid);
            assert_eq!(told.node(ino).unwrap().ino.0, fileid);
            told.forget(ino);
            assert!(told.node(ino).is_none() && told.node(InodeId(fileid)).is_some());
        }
        assert!(!told.node(InodeId(fileid)).unwrap().state().forgotten);
    }

    #[test]
    fn what_is_forgotten_goes_in_time_unless_it_is_used() {
        let mut table = Table::new(&fh(0), 1000);
        let open = match table.see(&fh(1), 2000, client::fs::S_IFREG) {
            Seen::Node(node) => node,
            Seen::Doubtful(_) => panic!(),
        };
        table.forget(InodeId(2000));
        table.forget(InodeId::ROOT);
        // One that somebody was just being told of.
        let kept = InodeId(seen(&mut table, 2, 3000));
        table.forget(kept);
        assert!(table.keeps(kept) && !table.keeps(InodeId(4000)));
        for n in 0..3 * FORGOTTEN_MAX as u64 {
            let ino = seen(&mut table, 10 + n, 10_000 + n);
            table.forget(InodeId(ino));
            table.forget(InodeId(ino));
        }
        assert!(table.node(InodeId(2000)).is_some() && table.node(InodeId::ROOT).is_some());
        assert!(table.nodes().len() <= FORGOTTEN_MAX + 3, "{}", table.nodes().len());
        // One that is told of again stays.
        let n = 3 * FORGOTTEN_MAX as u64 - 1;
        let last = 10_000 + n;
        assert_eq!(seen(&mut table, 10 + n, last), last);
        drop(open);
        for n in 0..2 * FORGOTTEN_MAX as u64 {
            let ino = seen(&mut table, 1 << 40 | n, 1 << 40 | n);
            table.forget(InodeId(ino));
        }
        assert!(table.node(kept).is_some());
        assert!(table.node(InodeId(2000)).is_none() && table.node(InodeId(last)).is_some());
    }
}
