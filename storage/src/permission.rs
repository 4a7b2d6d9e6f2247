//! Permission rules of a local file system, on attributes alone. The client asks them for the right
//! error number; the service asks them again, because it does not trust the client.

use base::Errno;
use base::planted::{Bug, planted};

use crate::format::rpc::InodeRecord;

/// Read permission.
pub const R: u32 = 4;
/// Write permission.
pub const W: u32 = 2;
/// Execute or search permission.
pub const X: u32 = 1;

const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Creds<'a> {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: &'a [u32],
}

impl Creds<'_> {
    /// Whether group `gid` is among the groups.
    pub fn in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether they may do `what` (a set of [`R`], [`W`], [`X`]) with the inode.
    pub fn may(&self, r: &InodeRecord, what: u32) -> Result<(), Errno> {
        if self.uid == 0 {
            let dir = r.mode & S_IFMT == S_IFDIR;
            if what & X != 0 && !dir && r.mode & 0o111 == 0 {
                return Err(Errno::ACCES);
            }
            return Ok(());
        }
        // Linux asks no list whose mask allows nothing: then only the mode counts, also for who is named.
        if self.uid != r.uid
            && r.mode & 0o070 != 0
            && let Some(acl) = &r.acl
        {
            let allowed = acl.permits(self.uid, r.gid, &|gid| self.in_group(gid), what);
            return if allowed { Ok(()) } else { Err(Errno::ACCES) };
        }
        let shift = if self.uid == r.uid {
            6
        } else if self.in_group(r.gid) {
            3
        } else {
            0
        };
        if (r.mode >> shift) & what == what { Ok(()) } else { Err(Errno::ACCES) }
    }

    /// Whether they own the inode (or are the super-user).
    pub fn owns(&self, r: &InodeRecord) -> bool {
        self.uid == 0 || self.uid == r.uid
    }

    /// Whether they may give the inode one more name. A file of others keeps its blocks, its set-id bits and its place in
    /// somebody's quota for as long as it has one: so of these only who may read and write it gives it another, and never
    /// with set-user-ID (what Linux calls `protected_hardlinks`, proc_sys_fs(5); here it holds wherever a call
    /// comes from).
    pub fn may_link(&self, r: &InodeRecord) -> Result<(), Errno> {
        if self.owns(r) || planted(Bug::LinkOfOthers) {
            return Ok(());
        }
        let plain = r.mode & S_IFMT == S_IFREG && r.mode & 0o4000 == 0 && r.mode & 0o2010 != 0o2010;
        if plain && self.may(r, R | W).is_ok() { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Sticky rule: in a sticky directory only the owner of the entry or of the directory removes.
    pub fn may_remove(&self, dir: &InodeRecord, victim: &InodeRecord) -> Result<(), Errno> {
        self.may(dir, W | X)?;
        let sticks = dir.mode & 0o1000 != 0 && !planted(Bug::StickyIgnored);
        if sticks && !self.owns(dir) && self.uid != victim.uid {
            return Err(Errno::PERM);
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn the_first_matching_class_decides() {
        let r = InodeRecord { mode: 0o100_074, uid: 7, gid: 8, ..InodeRecord::default() };
        let who = |uid, gid| Creds { uid, gid, groups: &[9] };
        assert_eq!(who(7, 8).may(&r, R), Err(Errno::ACCES), "owner bits, not group bits");
        assert_eq!(who(6, 8).may(&r, R | W | X), Ok(()));
        assert_eq!(who(6, 6).may(&r, R), Ok(()));
        assert_eq!(who(6, 6).may(&r, W), Err(Errno::ACCES));
        assert_eq!(who(0, 0).may(&r, R | W), Ok(()));
        let by_group = InodeRecord { gid: 9, mode: 0o100_020, ..r.clone() };
        assert_eq!(who(6, 6).may(&by_group, W), Ok(()), "supplementary groups count");
    }

    #[test]
    fn a_list_whose_mask_allows_nothing_is_not_asked() {
        // Owner 6, user 5: 6, group 5, mask 0, others 7.
        let entries: [(u16, u16, u32); 5] =
            [(1, 6, !0), (2, 6, 5), (4, 5, !0), (16, 0, !0), (32, 7, !0)];
        let entries = entries.into_iter().flat_map(|(tag, perm, id)| {
            [tag.to_le_bytes(), perm.to_le_bytes()].concat().into_iter().chain(id.to_le_bytes())
        });
        let value: Vec<u8> = 2_u32.to_le_bytes().into_iter().chain(entries).collect();
        let mut list = crate::acl::Acl::decode(&value).unwrap().unwrap();
        let mut r = InodeRecord { mode: 0o100_607, uid: 7, gid: 8, ..InodeRecord::default() };
        r.acl = Some(list.clone().into());
        let who = |uid, gid| Creds { uid, gid, groups: &[] };
        assert_eq!(who(5, 9).may(&r, R | X), Ok(()), "as one of the others");
        assert_eq!(who(6, 8).may(&r, X), Err(Errno::ACCES), "the owning group");
        list.chmod(0o617);
        (r.mode, r.acl) = (0o100_617, Some(list.into()));
        assert_eq!(who(5, 9).may(&r, R), Err(Errno::ACCES), "the mask bounds who is named");
    }

    #[test]
    fn files_of_others_get_no_more_names() {
        let file = |mode| InodeRecord { mode, uid: 5, gid: 9, ..InodeRecord::default() };
        let who = |uid, gid| Creds { uid, gid, groups: &[] };
        for mode in [0o100_644, 0o100_600, 0o104_777, 0o102_777, 0o010_666, 0o120_777, 0o020_666] {
            assert_eq!(who(6, 6).may_link(&file(mode)), Err(Errno::PERM), "{mode:o}");
            assert_eq!(who(5, 6).may_link(&file(mode)), Ok(()), "{mode:o}: its owner");
            assert_eq!(who(0, 0).may_link(&file(mode)), Ok(()), "{mode:o}: the super-user");
        }
        assert_eq!(who(6, 6).may_link(&file(0o100_666)), Ok(()));
        assert_eq!(
            who(6, 9).may_link(&file(0o102_660)),
            Ok(()),
            "not set-id, as nobody executes it"
        );
        assert_eq!(who(6, 6).may_link(&file(0o100_660)), Err(Errno::PERM));
    }

    #[test]
    fn sticky_directories_protect_entries() {
        let dir = InodeRecord { mode: 0o041_777, uid: 0, ..InodeRecord::default() };
        let victim = InodeRecord { uid: 5, ..InodeRecord::default() };
        let who = |uid| Creds { uid, gid: 1, groups: &[] };
        assert_eq!(who(5).may_remove(&dir, &victim), Ok(()));
        assert_eq!(who(6).may_remove(&dir, &victim), Err(Errno::PERM));
        assert_eq!(who(0).may_remove(&dir, &victim), Ok(()));
    }
}
