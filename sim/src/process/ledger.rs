//! What every account uses, by the stream alone: the head judges in its order, so what a limit bars is known exactly,
//! inode by inode. (Of blocks it is known only which operations may need some.)

use std::collections::BTreeMap;

use base::StreamSeq;
use storage::format::entry::{Op, mask};
use storage::format::rpc::{AccountId, Amount};
use storage::volume::Volume;

use crate::actor::quota::{account_of, of_directory, of_user_number};

/// What an operation does to accounts.
#[derive(Clone, Debug)]
enum Deed {
    /// With its name, if it is no directory and has one.
    Made {
        ino: u64,
        uid: u32,
        parent: u64,
        name: Option<Name>,
    },
    Named {
        ino: u64,
        name: Name,
    },
    Unnamed {
        name: Name,
    },
    /// What had the name that it gets has one name less.
    Renamed {
        from: Name,
        to: Name,
    },
    Swapped {
        from: Name,
        to: Name,
    },
    Freed {
        ino: u64,
    },
    Given {
        ino: u64,
        uid: u32,
    },
    Moved {
        ino: u64,
        project: u64,
    },
    Limited {
        number: u64,
        limit: Amount,
    },
}

/// A directory, and a name in it.
type Name = (u64, Vec<u8>);

/// See the module.
#[derive(Debug)]
pub struct Ledger {
    chunks: BTreeMap<StreamSeq, Vec<Deed>>,
    /// Owner and project of everything that is there.
    inodes: BTreeMap<u64, (u32, u64)>,
    /// Names of all but directories.
    names: BTreeMap<Name, u64>,
    limits: BTreeMap<u64, Amount>,
}

impl Default for Ledger {
    fn default() -> Self {
        let inodes = BTreeMap::from([(1, (0, 0))]);
        Self { chunks: BTreeMap::new(), inodes, names: BTreeMap::new(), limits: BTreeMap::new() }
    }
}

impl Deed {
    fn of(op: &Op<'_>) -> Option<Self> {
        Some(match *op {
            Op::Create { ino, uid, parent, mode, name, .. } => {
                let is_dir = mode & 0o170_000 == 0o040_000;
                let name = (!is_dir).then(|| (parent.0, name.to_vec()));
                Self::Made { ino: ino.0, uid, parent: parent.0, name }
            }
            Op::Tmpfile { ino, uid, parent, .. } => {
                Self::Made { ino: ino.0, uid, parent: parent.0, name: None }
            }
            Op::Link { ino, parent, name } => {
                Self::Named { ino: ino.0, name: (parent.0, name.to_vec()) }
            }
            Op::Unlink { parent, name, .. } => Self::Unnamed { name: (parent.0, name.to_vec()) },
            Op::Rename { parent, name, new_parent, new_name, exchange, .. } => {
                let (from, to) = ((parent.0, name.to_vec()), (new_parent.0, new_name.to_vec()));
                if exchange { Self::Swapped { from, to } } else { Self::Renamed { from, to } }
            }
            Op::Reap { ino } => Self::Freed { ino: ino.0 },
            Op::SetAttr { ino, mask, uid, .. } if mask & mask::UID != 0 => {
                Self::Given { ino: ino.0, uid }
            }
            Op::SetProject { ino, project } => Self::Moved { ino: ino.0, project: project.0 },
            Op::SetQuota { user: Some(uid), limit, .. } => {
                Self::Limited { number: of_user_number(uid), limit }
            }
            Op::SetQuota { ino, limit, .. } => Self::Limited { number: of_directory(ino.0), limit },
            _ => return None,
        })
    }
}

/// The accounts of an owner and a project.
fn accounts(uid: u32, project: u64) -> impl Iterator<Item = u64> {
    let user = (uid != 0).then(|| of_user_number(uid));
    let directory = (project != 0).then(|| of_directory(project));
    user.into_iter().chain(directory)
}

impl Ledger {
    /// The chunks from there on are no more.
    pub fn rewind(&mut self, from: StreamSeq) {
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.split_off(&from);
        *self = Self::default();
        chunks.values().flatten().for_each(|deed| self.apply(deed.clone()));
        self.chunks = chunks;
    }

    fn apply(&mut self, deed: Deed) {
        match deed {
            Deed::Made { ino, uid, parent, name } => {
                let project = self.inodes.get(&parent).map_or(0, |of| of.1);
                self.inodes.insert(ino, (uid, project));
                self.names.extend(name.map(|name| (name, ino)));
            }
            Deed::Named { ino, name } => drop(self.names.insert(name, ino)),
            Deed::Unnamed { name } => drop(self.names.remove(&name)),
            Deed::Renamed { from, to } => {
                self.names.remove(&to);
                if let Some(ino) = self.names.remove(&from) {
                    self.names.insert(to, ino);
                }
            }
            Deed::Swapped { from, to } => {
                let (a, b) = (self.names.remove(&from), self.names.remove(&to));
                self.names.extend(a.map(|ino| (to, ino)));
                self.names.extend(b.map(|ino| (from, ino)));
            }
            Deed::Freed { ino } => {
                self.inodes.remove(&ino);
                self.limits.remove(&of_directory(ino));
            }
            Deed::Given { ino, uid } => {
                self.inodes.entry(ino).and_modify(|of| of.0 = uid);
            }
            Deed::Moved { ino, project } => {
                self.inodes.entry(ino).and_modify(|of| of.1 = project);
            }
            Deed::Limited { number, limit } if limit == Amount::default() => {
                self.limits.remove(&number);
            }
            Deed::Limited { number, limit } => drop(self.limits.insert(number, limit)),
        }
    }

    /// An operation of that chunk was taken. An error says which limit it exceeds.
    pub fn took(&mut self, at: StreamSeq, op: &Op<'_>) -> Result<(), String> {
        let exceeds = self.exceeds(op);
        if let Some(deed) = Deed::of(op) {
            self.apply(deed.clone());
            self.chunks.entry(at).or_default().push(deed);
        }
        exceeds.map_or(Ok(()), |why| Err(format!("is taken, and {why}")))
    }

    /// An inode counts under each of its names; a directory, and what has none, once.
    fn weight(&self, ino: u64) -> u64 {
        (self.names.values().filter(|of| **of == ino).count() as u64).max(1)
    }

    fn used(&self, number: u64) -> u64 {
        let counts = |of: &(u32, u64)| accounts(of.0, of.1).any(|of| of == number);
        let counted = self.inodes.iter().filter(|(_, of)| counts(of));
        counted.map(|(ino, _)| self.weight(*ino)).sum()
    }

    fn of(&self, ino: u64) -> Vec<u64> {
        self.inodes.get(&ino).map_or(Vec::new(), |of| accounts(of.0, of.1).collect())
    }

    /// The accounts that would count more inodes, and how many.
    fn adds(&self, op: &Op<'_>) -> (Vec<u64>, u64) {
        match Deed::of(op) {
            Some(Deed::Made { uid, parent, .. }) => {
                let project = self.inodes.get(&parent).map_or(0, |of| of.1);
                (accounts(uid, project).collect(), 1)
            }
            Some(Deed::Given { ino, uid })
                if self.inodes.get(&ino).is_some_and(|of| of.0 != uid) =>
            {
                (accounts(uid, 0).collect(), self.weight(ino))
            }
            Some(Deed::Named { ino, name })
                if !self.names.contains_key(&name) && self.names.values().any(|of| *of == ino) =>
            {
                (self.of(ino), 1)
            }
            _ => (Vec::new(), 0),
        }
    }

    /// The limit of inodes that an operation exceeds.
    fn exceeds(&self, op: &Op<'_>) -> Option<String> {
        let (accounts, more) = self.adds(op);
        accounts.into_iter().find_map(|number| {
            let limit = self.limits.get(&number)?.inodes;
            let used = self.used(number);
            let over = limit != 0 && used + more > limit;
            over.then(|| format!("{:?} has {used} of {limit} inodes", account_of(number)))
        })
    }

    /// Whether a limit may bar an operation now.
    pub fn may_bar(&self, op: &Op<'_>) -> bool {
        let blocks = match *op {
            Op::Write { ino, .. }
            | Op::Truncate { ino, .. }
            | Op::Fallocate { ino, .. }
            | Op::CloneRange { ino, .. }
            | Op::Shift { ino, .. }
            | Op::SetXattr { ino, .. } => self.of(ino.0),
            Op::SetAttr { .. } | Op::Create { .. } | Op::Tmpfile { .. } => self.adds(op).0,
            _ => Vec::new(),
        };
        let limited = |number: &u64| self.limits.get(number).is_some_and(|l| l.blocks != 0);
        self.exceeds(op).is_some() || blocks.iter().any(limited)
    }

    /// In the end the volume counts the same.
    pub fn judge(&self, volume: &Volume) -> Result<(), String> {
        for (number, limit) in &self.limits {
            let Some(id) = account_of(*number) else { continue };
            let (account, used) = (volume.account(id), self.used(*number));
            if account.used.inodes != used || account.limit != *limit {
                return Err(format!("{account:?}, by the stream {used} inodes of {limit:?}"));
            }
        }
        let known = |id: AccountId| match id {
            AccountId::User(uid) => self.limits.contains_key(&of_user_number(uid)),
            AccountId::Directory(ino) => self.limits.contains_key(&of_directory(ino.0)),
        };
        match volume.limits().find(|(id, _)| !known(*id)) {
            Some((id, limit)) => Err(format!("{id:?} has limits of its own: {limit:?}")),
            None => Ok(()),
        }
    }
}
