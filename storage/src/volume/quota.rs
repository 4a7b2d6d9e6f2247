//! Quotas: what the inodes of a user, and those of a directory's tree, may take in blocks and number.
//!
//! Which account an inode belongs to is in its attributes: its owner, and the quota directory that it
//! was made or put under ([`Inode::project`], which what is made in a directory inherits). What it takes is its data, its
//! attributes and its names ([`Inode::weight`]): all that its user can make grow. What an
//! account uses is summed up when the volume is opened and kept in memory; of accounts that have a
//! limit it is also on media, changed in the same transaction as the inodes, and the checker compares.
//!
//! Only the head enforces ([`Volume::enforce_quotas`]): what it let pass holds on every member.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::InodeId;
use base::planted::{Bug, planted};

use super::{Applied, Done, Fault, Refusal, Volume};
use crate::format::entry::Stamp;
use crate::format::item::{AccountItem, Inode, kind};
use crate::format::page::Key;
use crate::format::rpc::Account;
pub use crate::format::rpc::{AccountId, Amount};

/// Accounts: use of all, limits of some.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    used: HashMap<AccountId, Amount>,
    limits: BTreeMap<AccountId, Amount>,
    /// Accounts with limits whose use has changed since the last seal.
    changed: BTreeSet<AccountId>,
    enforced: bool,
}

fn key(account: AccountId) -> Key {
    match account {
        AccountId::User(uid) => Key::new(0, kind::USER_ACCOUNT, uid.into()),
        AccountId::Directory(ino) => Key::new(0, kind::DIRECTORY_ACCOUNT, ino.0),
    }
}

/// The accounts of an inode.
fn accounts(uid: u32, project: InodeId) -> impl Iterator<Item = AccountId> {
    let directory = (project != InodeId::NONE).then_some(AccountId::Directory(project));
    [Some(AccountId::User(uid)), directory].into_iter().flatten()
}

impl Accounts {
    /// The limits, without what is used.
    pub fn limits_alone(&self) -> Self {
        Self { limits: self.limits.clone(), ..Self::default() }
    }

    /// An inode found at open.
    pub fn found_inode(&mut self, inode: &Inode) {
        self.add(inode.uid, inode.project, inode.weight());
    }

    /// An account found at open; what it uses is summed up from the inodes.
    pub fn found_account(&mut self, account: AccountId, item: &AccountItem) {
        self.limits.insert(account, item.limit);
    }

    /// Inodes of all users.
    pub fn inodes(&self) -> u64 {
        let users = self.used.iter().filter(|(id, _)| matches!(id, AccountId::User(_)));
        users.map(|(_, amount)| amount.inodes).sum()
    }

    fn change(&mut self, account: AccountId, with: impl FnOnce(&mut Amount)) {
        with(self.used.entry(account).or_default());
        if self.limits.contains_key(&account) {
            self.changed.insert(account);
        }
    }

    pub fn add(&mut self, uid: u32, project: InodeId, more: Amount) {
        for account in accounts(uid, project) {
            self.change(account, |a| {
                a.blocks = a.blocks.saturating_add(more.blocks);
                a.inodes = a.inodes.saturating_add(more.inodes);
            });
        }
    }

    pub fn take(&mut self, uid: u32, project: InodeId, less: Amount) {
        for account in accounts(uid, project) {
            self.change(account, |a| {
                a.blocks = a.blocks.saturating_sub(less.blocks);
                a.inodes = a.inodes.saturating_sub(less.inodes);
            });
        }
    }

    fn used(&self, account: AccountId) -> Amount {
        self.used.get(&account).copied().unwrap_or_default()
    }

    /// Whether an account may take so much more.
    fn permits(&self, account: AccountId, blocks: u64, inodes: u64) -> Result<(), Refusal> {
        let Some(limit) = self.limits.get(&account).filter(|_| self.enforced) else {
            return Ok(());
        };
        let used = self.used(account);
        let over = |limit: u64, used: u64, more: u64| {
            limit != 0 && more != 0 && used.saturating_add(more) > limit
        };
        if over(limit.blocks, used.blocks, blocks) || over(limit.inodes, used.inodes, inodes) {
            return Err(Refusal::Quota);
        }
        Ok(())
    }
}

impl Volume {
    /// From now on operations that take more than a limit leaves are refused, or no longer.
    pub fn enforce_quotas(&mut self, enforced: bool) {
        self.accounts.enforced = enforced;
    }

    /// Accounts with use or limits after `after`, users first, at most `max`.
    pub fn accounts(&self, after: Option<AccountId>, max: usize) -> Vec<Account> {
        let accounts = &self.accounts;
        let live =
            accounts.used.iter().filter(|(_, a)| **a != Amount::default()).map(|(id, _)| *id);
        let ids: BTreeSet<AccountId> = live.chain(accounts.limits.keys().copied()).collect();
        let later = ids.into_iter().filter(|id| after.is_none_or(|after| *id > after)).take(max);
        later.map(|id| self.account(id)).collect()
    }

    /// One account.
    pub fn account(&self, id: AccountId) -> Account {
        let limit = self.accounts.limits.get(&id).copied().unwrap_or_default();
        Account { id, limit, used: self.accounts.used(id) }
    }

    /// Limits that are set.
    pub fn limits(&self) -> impl Iterator<Item = (AccountId, Amount)> + '_ {
        self.accounts.limits.iter().map(|(id, limit)| (*id, *limit))
    }

    /// Whether any limit may bar what is made in a directory.
    pub(super) fn is_limited(&self, dir: &Inode) -> bool {
        let users = AccountId::User(0)..=AccountId::User(u32::MAX);
        self.accounts.limits.contains_key(&AccountId::Directory(dir.project))
            || self.accounts.limits.range(users).next().is_some()
    }

    /// Whether the owner and the directory of an inode may take so much more.
    pub(super) fn may_take(&self, inode: &Inode, blocks: u64, inodes: u64) -> Result<(), Refusal> {
        let mut ids = accounts(inode.uid, inode.project);
        ids.try_for_each(|id| self.accounts.permits(id, blocks, inodes))
    }

    /// What an inode takes was `before`.
    pub(super) fn account_change(&mut self, inode: &Inode, before: Amount) {
        let (uid, project, mut now) = (inode.uid, inode.project, inode.weight());
        if planted(Bug::LinksUncounted) {
            now.inodes = before.inodes;
        }
        if planted(Bug::AttributesUncounted) {
            now.blocks = inode.blocks;
        }
        if now != before {
            self.accounts.add(uid, project, now);
            self.accounts.take(uid, project, before);
        }
    }

    /// An inode came to be, or is no more.
    pub(super) fn account_inode(&mut self, inode: &Inode, there: bool) {
        let (uid, project, weight) = (inode.uid, inode.project, inode.weight());
        if there {
            self.accounts.add(uid, project, weight);
        } else {
            self.accounts.take(uid, project, weight);
        }
    }

    /// Whether an inode may get a new owner.
    pub(super) fn may_give(&self, inode: &Inode, uid: u32) -> Result<(), Refusal> {
        if uid == inode.uid || planted(Bug::GivenUncounted) {
            return Ok(());
        }
        let Amount { blocks, inodes } = inode.weight();
        self.accounts.permits(AccountId::User(uid), blocks, inodes)
    }

    /// Sets the limits of an account; without any it has none.
    pub(super) fn set_quota(&mut self, account: AccountId, limit: Amount) -> Done {
        match account {
            AccountId::User(0) => return Err(Refusal::Invalid),
            AccountId::User(_) => {}
            AccountId::Directory(ino) => {
                self.need_dir(ino)?;
            }
        }
        if limit == Amount::default() {
            self.drop_quota(account)?;
        } else {
            self.accounts.limits.insert(account, limit);
            self.accounts.changed.insert(account);
        }
        Ok(Applied::default())
    }

    /// The same, of whatever is told to have them.
    pub(super) fn limit_account(&mut self, account: AccountId, limit: Amount) -> Result<(), Fault> {
        if limit == Amount::default() {
            return self.drop_quota(account);
        }
        self.accounts.limits.insert(account, limit);
        self.accounts.changed.insert(account);
        Ok(())
    }

    /// Removes the limits of an account.
    pub(super) fn drop_quota(&mut self, account: AccountId) -> Result<(), Fault> {
        if self.accounts.limits.remove(&account).is_some() {
            self.accounts.changed.remove(&account);
            self.tree.remove(key(account))?;
        }
        Ok(())
    }

    /// Puts an inode under another quota directory, or none.
    pub(super) fn set_project(&mut self, ino: InodeId, project: InodeId, now: Stamp) -> Done {
        let mut inode = self.need(ino)?;
        if inode.project == project {
            return Ok(Applied { orphaned: None, already: true });
        }
        self.account_inode(&inode, false);
        inode.project = project;
        inode.ctime = now;
        self.account_inode(&inode, true);
        self.put_inode(ino, &inode)?;
        Ok(Applied::default())
    }

    /// Writes the accounts that have changed, at the end of a transaction.
    pub(super) fn store_accounts(&mut self) -> Result<(), Fault> {
        for account in std::mem::take(&mut self.accounts.changed) {
            let Some(limit) = self.accounts.limits.get(&account).copied() else { continue };
            let item = AccountItem { limit, used: self.accounts.used(account) };
            self.tree.put(key(account), &item.encode())?;
        }
        Ok(())
    }
}
