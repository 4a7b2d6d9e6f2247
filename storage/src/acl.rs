//! POSIX access control lists (acl(5)): the form of the attributes `system.posix_acl_access` and
//! `system.posix_acl_default`, who may do what by one, how it keeps step with the mode, and what a
//! new inode inherits. The client and the service ask the same code.
//!
//! ```text
//! value: version u32 (2), then entries of 8 bytes: tag u16, permission u16, id u32
//!        (0xffff_ffff where the tag has none)
//! tags:  1 owner, 2 user, 4 owning group, 8 group, 16 mask, 32 others; in this order, the first,
//!        third and last exactly once, the mask once at most and at least if there are users or groups
//! ```
//!
//! The owner's, the others' and (in the place of the group's) the mask's permissions are the mode's:
//! whoever changes one changes the other.

use alloc::vec::Vec;

use base::planted::{Bug, planted};

use crate::format::{Corrupt, Reader};

/// Name of the attribute that says who may use an inode.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the attribute of a directory that says what is made in it inherits.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";
/// Entries of a list, at most.
pub const ENTRIES_MAX: usize = 256;

const VERSION: u32 = 2;
const NO_ID: u32 = u32::MAX;
const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

/// Whether an attribute of this name is a list.
pub fn is_acl(name: &[u8]) -> bool {
    name == ACCESS || name == DEFAULT
}

/// One entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A list that keeps the rules.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acl {
    entries: Vec<Entry>,
}

impl Acl {
    /// Reads and checks an attribute's value. None: a list without entries, which is no list.
    pub fn decode(value: &[u8]) -> Result<Option<Self>, Corrupt> {
        if value.is_empty() {
            return Ok(None);
        }
        let mut r = Reader::new("access control list", value);
        if r.u32()? != VERSION {
            return Err(r.corrupt("has an unknown version"));
        }
        if r.left() == 0 {
            return Ok(None);
        }
        if r.left() > ENTRIES_MAX * 8 {
            return Err(r.corrupt("has too many entries"));
        }
        let mut entries = Vec::with_capacity(r.left() / 8);
        while r.left() > 0 {
            let (tag, perm, id) = (r.u16()?, r.u16()?, r.u32()?);
            let named = matches!(tag, USER | GROUP);
            if perm > 7 || (named && id == NO_ID) {
                return Err(r.corrupt("has an entry with an impossible permission or id"));
            }
            entries.push(Entry { tag, perm, id: if named { id } else { NO_ID } });
        }
        let tags = entries.iter().map(|e| e.tag);
        let count = |tag| tags.clone().filter(|t| *t == tag).count();
        let named = count(USER) + count(GROUP) > 0;
        let known = tags.clone().all(|t| t.is_power_of_two() && t <= OTHER);
        let right = known
            && tags.clone().is_sorted()
            && [USER_OBJ, GROUP_OBJ, OTHER].map(count) == [1; 3]
            && (count(MASK) == 1 || (count(MASK) == 0 && !named));
        if !right {
            return Err(r.corrupt("lacks an entry, or has too many or in a wrong order"));
        }
        Ok(Some(Self { entries }))
    }

    /// The attribute's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for e in &self.entries {
            value.extend_from_slice(&e.tag.to_le_bytes());
            value.extend_from_slice(&e.perm.to_le_bytes());
            value.extend_from_slice(&e.id.to_le_bytes());
        }
        value
    }

    fn perm(&self, tag: u16) -> Option<u32> {
        self.entries.iter().find(|e| e.tag == tag).map(|e| e.perm.into())
    }

    fn set(&mut self, tag: u16, perm: u32) {
        for e in self.entries.iter_mut().filter(|e| e.tag == tag) {
            e.perm = (perm & 7) as u16;
        }
    }

    /// The entry whose permissions are the mode's group bits.
    fn group_tag(&self) -> u16 {
        if self.perm(MASK).is_some() { MASK } else { GROUP_OBJ }
    }

    /// Whether it says no more than a mode.
    pub fn is_minimal(&self) -> bool {
        self.entries.len() == 3
    }

    /// The nine permission bits of the mode that goes with it.
    pub fn mode(&self) -> u32 {
        let perm = |tag| self.perm(tag).unwrap_or(0);
        perm(USER_OBJ) << 6 | perm(self.group_tag()) << 3 | perm(OTHER)
    }

    /// Follows a change of the mode.
    pub fn chmod(&mut self, mode: u32) {
        self.set(USER_OBJ, mode >> 6);
        self.set(self.group_tag(), mode >> 3);
        self.set(OTHER, mode);
    }

    /// Whether somebody who is not the owner may do `what`; `group` is the inode's.
    pub fn permits(&self, uid: u32, group: u32, in_group: &dyn Fn(u32) -> bool, what: u32) -> bool {
        let allows = |e: &Entry| u32::from(e.perm) & what == what;
        let masked = self.perm(MASK).is_none_or(|mask| mask & what == what);
        if let Some(user) = self.entries.iter().find(|e| e.tag == USER && e.id == uid) {
            return allows(user) && (masked || planted(Bug::MaskIgnored));
        }
        let mut of_groups = self.entries.iter().filter(|e| match e.tag {
            GROUP_OBJ => in_group(group),
            GROUP => in_group(e.id),
            _ => false,
        });
        let mut any = false;
        if of_groups.any(|e| {
            any = true;
            allows(e)
        }) {
            return masked;
        }
        !any && self.perm(OTHER).is_some_and(|other| other & what == what)
    }

    /// What an inode gets that is made with `mode` in a directory with this default list: its own
    /// permission bits (without regard to the umask), and its list if that says more than they.
    /// Asked again with the mode that came out, it gives the same.
    pub fn inherited(&self, mode: u32) -> (u32, Option<Self>) {
        let mut own = self.clone();
        own.chmod(mode & self.mode());
        let mode = mode & !0o777 | own.mode();
        (mode, (!own.is_minimal()).then_some(own))
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for (tag, perm, id) in entries {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&perm.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    const FULL: [(u16, u16, u32); 7] = [
        (USER_OBJ, 7, NO_ID),
        (USER, 6, 10),
        (USER, 0, 11),
        (GROUP_OBJ, 5, NO_ID),
        (GROUP, 2, 20),
        (MASK, 6, NO_ID),
        (OTHER, 1, NO_ID),
    ];

    #[test]
    fn the_first_that_matches_decides_and_the_mask_bounds() {
        let list = Acl::decode(&acl(&FULL)).unwrap().unwrap();
        assert_eq!(list.encode(), acl(&FULL));
        assert_eq!(list.mode(), 0o761);
        let may = |uid, groups: &[u32], what| list.permits(uid, 30, &|g| groups.contains(&g), what);
        assert!(may(10, &[], 6) && !may(10, &[30], 1), "a named user, whatever the groups say");
        assert!(!may(11, &[20, 30], 4) && !may(11, &[], 1));
        assert!(may(12, &[30], 4), "the owning group");
        assert!(!may(12, &[30], 1), "the mask takes it");
        assert!(may(12, &[20], 2) && !may(12, &[20], 4));
        assert!(!may(12, &[20, 30], 6), "no one entry allows both");
        assert!(may(12, &[], 1) && !may(12, &[], 2), "others are not masked");
        assert!(!may(12, &[20], 1), "who is in a group is not the others");
    }

    #[test]
    fn it_keeps_step_with_the_mode() {
        let mut list = Acl::decode(&acl(&FULL)).unwrap().unwrap();
        list.chmod(0o640);
        assert_eq!((list.mode(), list.perm(GROUP_OBJ), list.perm(MASK)), (0o640, Some(5), Some(4)));
        let (mode, own) = list.inherited(0o100_666);
        assert_eq!((mode, own.as_ref().map(Acl::mode)), (0o100_640, Some(0o640)));
        assert_eq!(list.inherited(mode), (mode, own), "asked again");
        let plain = [(USER_OBJ, 7, NO_ID), (GROUP_OBJ, 5, NO_ID), (OTHER, 0, NO_ID)];
        let plain = Acl::decode(&acl(&plain)).unwrap().unwrap();
        assert!(plain.is_minimal());
        assert_eq!(plain.inherited(0o042_777), (0o042_750, None));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        assert_eq!(Acl::decode(&[]), Ok(None));
        assert_eq!(Acl::decode(&VERSION.to_le_bytes()), Ok(None));
        assert!(Acl::decode(&3u32.to_le_bytes()).is_err());
        let whole = acl(&FULL);
        for len in (1..whole.len()).filter(|len| *len != 4) {
            assert!(Acl::decode(&whole[..len]).is_err(), "cut to {len}");
        }
        let long = FULL[..3].iter().chain(&[(USER, 0, 5); ENTRIES_MAX]).chain(&FULL[3..]).copied();
        assert!(Acl::decode(&acl(&long.collect::<Vec<_>>())).is_err());
        for (at, entry) in
            [(1, (USER, 8, 10)), (1, (USER, 0, NO_ID)), (1, (64, 0, 0)), (5, FULL[6])]
        {
            let mut wrong = FULL;
            wrong[at] = entry;
            assert!(Acl::decode(&acl(&wrong)).is_err(), "{entry:?}");
        }
        let mut swapped = FULL;
        swapped.swap(1, 4);
        assert!(Acl::decode(&acl(&swapped)).is_err());
    }
}
