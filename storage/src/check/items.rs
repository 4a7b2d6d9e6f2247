//! Collects the items of the tree, and judges each by itself and against the one before.

use std::collections::BTreeSet;

use super::{Report, Sums};
use crate::acl::{self, Acl};
use crate::format::item::{
    AccountItem, Inode, PIECE_BYTES, ReadClass, Run, S_IFDIR, S_IFMT, Shared, Snapshot,
    SnapshotRoot,
};
use crate::format::item::{decode_name, kind, name_hash, orphan_value};
use crate::format::page::Key;
use crate::format::rpc::{AccountId, Amount};
use crate::limits::{TARGET_MAX, XATTR_VALUE_MAX};
use crate::volume::reach::{self, Unplaced};

/// What the tree says.
#[derive(Debug)]
pub(super) struct Items {
    uuid: [u8; 16],
    pub inodes: Sums<Inode>,
    /// Names that each inode has.
    pub links: Sums<u64>,
    /// Names that each directory holds, and how many are directories.
    pub entries: Sums<u64>,
    pub subdirs: Sums<u64>,
    /// Directory that holds the name of each directory.
    pub home: Sums<u64>,
    pub runs: Vec<(u64, Run)>,
    /// Shared runs, as they are counted.
    pub shared: Vec<Shared>,
    pub blocks: Sums<u64>,
    pub targets: Sums<u64>,
    pub xattrs: Sums<u32>,
    /// Access lists: the permission bits of one for the inode, whether there is one to inherit.
    pub lists: Sums<(Option<u32>, bool)>,
    pub arenas: std::collections::BTreeMap<u32, ReadClass>,
    pub orphans: BTreeSet<u64>,
    /// Directory and inode of each name.
    pub held: Vec<(u64, u64)>,
    /// Inodes that are not placed yet.
    pub unplaced: std::collections::BTreeMap<u64, Unplaced>,
    /// Snapshots, and where their trees begin.
    pub snapshots: std::collections::BTreeMap<u64, Snapshot>,
    pub roots: std::collections::BTreeMap<u64, SnapshotRoot>,
    /// Runs of snapshots, of blocks that no newer state has.
    pub dead: Vec<(u64, Run)>,
    /// What accounts say they use.
    pub accounts: std::collections::BTreeMap<AccountId, Amount>,
    /// Inodes that have any item.
    pub strays: BTreeSet<u64>,
    /// Type that each name states; compared at the end of the directory walk.
    kinds: Sums<u32>,
    /// Names of the hash seen last.
    same_hash: (u64, u64, Vec<Vec<u8>>),
    /// The xattr under way: inode, item of piece 0, pieces, bytes still missing.
    xattr: (u64, u64, u64, usize),
    /// The access list under way: whether to be inherited, its bytes so far.
    list: Option<(bool, Vec<u8>)>,
}

impl Items {
    pub fn new(uuid: [u8; 16]) -> Self {
        Self {
            uuid,
            inodes: Sums::new(),
            links: Sums::new(),
            entries: Sums::new(),
            subdirs: Sums::new(),
            home: Sums::new(),
            runs: Vec::new(),
            shared: Vec::new(),
            blocks: Sums::new(),
            targets: Sums::new(),
            xattrs: Sums::new(),
            lists: Sums::new(),
            arenas: std::collections::BTreeMap::new(),
            orphans: BTreeSet::new(),
            held: Vec::new(),
            unplaced: std::collections::BTreeMap::new(),
            snapshots: std::collections::BTreeMap::new(),
            roots: std::collections::BTreeMap::new(),
            dead: Vec::new(),
            accounts: std::collections::BTreeMap::new(),
            strays: BTreeSet::new(),
            kinds: Sums::new(),
            same_hash: (0, 0, Vec::new()),
            xattr: (0, 0, 0, 0),
            list: None,
        }
    }

    pub fn add(&mut self, key: Key, value: &[u8], report: &mut Report) {
        let place = || format!("inode {}, item {}.{}", key.ino, key.kind, key.item);
        if self.xattr.3 > 0 && key.kind != kind::XATTR {
            report.damage(format!("inode {}", self.xattr.0), "has an xattr that is cut short");
            self.xattr.3 = 0;
        }
        if key.ino != 0 {
            self.strays.insert(key.ino);
        }
        match (key.ino == 0, key.kind) {
            (false, kind::ATTR) if key.item == 0 => match Inode::decode(value) {
                Ok(inode) => {
                    self.inodes.insert(key.ino, inode);
                }
                Err(e) => report.damage(place(), e.to_string()),
            },
            (false, kind::TARGET) => self.target(key, value, report),
            (false, kind::NAME) => self.name(key, value, report),
            (false, kind::EXTENT) => match Run::decode(key.item, value) {
                Ok(run) => self.run(key.ino, run, report),
                Err(e) => report.damage(place(), e.to_string()),
            },
            (false, kind::XATTR) => self.xattr(key, value, report),
            (true, kind::ORPHAN) if value.is_empty() || value == orphan_value(true) => {
                self.orphans.insert(key.item);
            }
            (true, kind::USER_ACCOUNT | kind::DIRECTORY_ACCOUNT) => {
                let id = AccountId::from_parts(key.kind - kind::USER_ACCOUNT + 1, key.item);
                match (id, AccountItem::decode(value)) {
                    (Some(id), Ok(item)) => drop(self.accounts.insert(id, item.used)),
                    (_, Err(e)) => report.damage(place(), e.to_string()),
                    (None, _) => report.damage(place(), "is nobody's account"),
                }
            }
            (true, kind::SHARED) => match Shared::decode(key.item, value) {
                Ok(shared) => self.shared.push(shared),
                Err(e) => report.damage(place(), e.to_string()),
            },
            (true, kind::UNPLACED) => match reach::decode(value) {
                Ok(what) => drop(self.unplaced.insert(key.item, what)),
                Err(e) => report.damage(place(), e.to_string()),
            },
            (true, kind::SNAPSHOT) => match Snapshot::decode(value) {
                Ok(snapshot) => drop(self.snapshots.insert(key.item, snapshot)),
                Err(e) => report.damage(place(), e.to_string()),
            },
            (true, kind::SNAPSHOT_ROOT) => match SnapshotRoot::decode(value) {
                Ok(root) => drop(self.roots.insert(key.item, root)),
                Err(e) => report.damage(place(), e.to_string()),
            },
            (true, kind::CLIENT) if value.len() == 8 => report.counts.clients += 1,
            (true, kind::ARENA) => match (u32::try_from(key.item), ReadClass::decode(value)) {
                (Ok(number), Ok(class)) => {
                    self.arenas.insert(number, class);
                }
                (_, Err(e)) => report.damage(place(), e.to_string()),
                (Err(_), _) => report.damage(place(), "has an impossible arena number"),
            },
            _ => report.damage(place(), "is of an unknown kind or form"),
        }
    }

    fn target(&mut self, key: Key, value: &[u8], report: &mut Report) {
        let len = self.targets.entry(key.ino).or_default();
        if *len != key.item * PIECE_BYTES as u64 || value.is_empty() {
            report.damage(format!("inode {}", key.ino), "has a link target with pieces missing");
        }
        *len += value.len() as u64;
        if *len > TARGET_MAX as u64 {
            report.damage(format!("inode {}", key.ino), "has a link target over the limit");
        }
    }

    fn name(&mut self, key: Key, value: &[u8], report: &mut Report) {
        let place = format!("directory {}, name {:x}", key.ino, key.item);
        let (ino, mode, name) = match decode_name(value) {
            Ok(decoded) => decoded,
            Err(e) => return report.damage(place, e.to_string()),
        };
        let hash = key.item >> 8;
        if hash != (name_hash(&self.uuid, name) >> 9).max(1) {
            report.damage(&place, "lies under another name's hash");
        }
        if (self.same_hash.0, self.same_hash.1) != (key.ino, hash) {
            self.same_hash = (key.ino, hash, Vec::new());
        }
        if self.same_hash.2.iter().any(|other| other == name) {
            report.damage(&place, "is there twice");
        }
        self.same_hash.2.push(name.to_vec());
        self.held.push((key.ino, ino.0));
        *self.links.entry(ino.0).or_default() += 1;
        *self.entries.entry(key.ino).or_default() += 1;
        if mode == S_IFDIR {
            *self.subdirs.entry(key.ino).or_default() += 1;
            self.home.insert(ino.0, key.ino);
        }
        if *self.kinds.entry(ino.0).or_insert(mode) != mode {
            report.damage(&place, "states another type than a name of the same inode");
        }
    }

    fn run(&mut self, ino: u64, run: Run, report: &mut Report) {
        if let Some((before, last)) = self.runs.last()
            && *before == ino
            && last.end() > run.file
        {
            report.damage(format!("inode {ino}, block {}", run.file), "is mapped twice");
        }
        *self.blocks.entry(ino).or_default() += run.len;
        self.runs.push((ino, run));
    }

    fn xattr(&mut self, key: Key, value: &[u8], report: &mut Report) {
        *self.xattrs.entry(key.ino).or_default() += 1;
        let place = || format!("inode {}, xattr {:x}", key.ino, key.item);
        if key.item & 0xff != 0 {
            let (ino, first, pieces, missing) = &mut self.xattr;
            if *ino != key.ino || key.item != *first + *pieces || value.len() > *missing {
                return report.damage(place(), "is a piece that belongs to nothing");
            }
            (*pieces, *missing) = (*pieces + 1, *missing - value.len());
            if let Some((_, list)) = &mut self.list {
                list.extend_from_slice(value);
            }
            return self.judge_list(key.ino, report);
        }
        if self.xattr.3 > 0 {
            report.damage(format!("inode {}", self.xattr.0), "has an xattr that is cut short");
        }
        self.xattr = (key.ino, key.item, 1, 0);
        let head = value.split_first_chunk::<5>().map(|(head, rest)| {
            let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
            (usize::from(head[0]), len, rest)
        });
        let Some((name_len, len, rest)) = head else {
            return report.damage(place(), "is cut short");
        };
        let Some(name) = rest.get(..name_len).filter(|n| !n.is_empty()) else {
            return report.damage(place(), "has an illegal name");
        };
        if (name_hash(&self.uuid, name) >> 17).max(1) != key.item >> 16 {
            report.damage(place(), "lies under another name's hash");
        }
        let list = acl::is_acl(name).then(|| (name == acl::DEFAULT, rest[name_len..].to_vec()));
        match len.checked_sub(rest.len() - name_len) {
            Some(missing) if len <= XATTR_VALUE_MAX => self.xattr.3 = missing,
            _ => report.damage(place(), "has a value of impossible length"),
        }
        self.list = list;
        self.judge_list(key.ino, report);
    }

    /// Judges an access list whose last piece is there.
    fn judge_list(&mut self, ino: u64, report: &mut Report) {
        if self.xattr.3 > 0 {
            return;
        }
        let Some((is_default, value)) = self.list.take() else { return };
        let lists = self.lists.entry(ino).or_default();
        match Acl::decode(&value) {
            Ok(Some(_)) if is_default => lists.1 = true,
            Ok(Some(list)) if !list.is_minimal() => lists.0 = Some(list.mode()),
            Ok(_) => {
                report.damage(format!("inode {ino}"), "has an access list that says nothing");
            }
            Err(e) => report.damage(format!("inode {ino}"), e.to_string()),
        }
    }

    /// Names that state another type than their inode has, or have no inode.
    pub fn judge_names(&self, report: &mut Report) {
        for (&ino, &mode) in &self.kinds {
            match self.inodes.get(&ino) {
                None => report.damage(format!("inode {ino}"), "has a name but no attributes"),
                Some(inode) if inode.mode & S_IFMT != mode => {
                    report.damage(format!("inode {ino}"), "has a name that states another type");
                }
                _ => {}
            }
        }
        for &dir in self.entries.keys() {
            if !self.inodes.get(&dir).is_some_and(Inode::is_dir) {
                report.damage(format!("inode {dir}"), "holds names, but is no directory");
            }
        }
        if self.xattr.3 > 0 {
            report.damage(format!("inode {}", self.xattr.0), "has an xattr that is cut short");
        }
    }
}
