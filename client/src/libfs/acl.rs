//! Access control lists: the attributes `system.posix_acl_access` and `system.posix_acl_default`,
//! which come with the attributes of an inode and are kept in step with its mode.

use alloc::sync::Arc;
use alloc::vec::Vec;

use base::{Errno, InodeId};
use storage::acl::{self, Acl};
use storage::format::control::LeaseMode;
use storage::format::entry::{Op, Stamp, mask};
use storage::format::rpc::InodeRecord;

use super::LibFsOn;
use super::host::Host;
use super::permission::owns;
use crate::fs::{Caller, Result, S_IFDIR, S_IFLNK, S_IFMT, XattrMode};

const S_ISGID: u32 = 0o2000;

fn list<'a>(r: &'a InodeRecord, name: &[u8]) -> &'a Option<Arc<Acl>> {
    if name == acl::ACCESS { &r.acl } else { &r.default_acl }
}

/// The value of a list that is there.
pub(super) fn value(r: &InodeRecord, name: &[u8]) -> Result<Vec<u8>> {
    match list(r, name) {
        _ if r.mode & S_IFMT == S_IFLNK => Err(Errno::OPNOTSUPP),
        Some(list) => Ok(list.encode()),
        None => Err(Errno::NODATA),
    }
}

impl<H: Host> LibFsOn<H> {
    /// Sets a list, or removes it.
    pub(super) fn set_acl(
        &self,
        caller: &Caller<'_>,
        ino: InodeId,
        name: &[u8],
        value: Option<&[u8]>,
        how: XattrMode,
    ) -> Result<()> {
        // What it says is judged after who says it, and of what, as Linux does.
        let new = Acl::decode(value.unwrap_or_default()).map_err(|_| Errno::INVAL);
        let sets = !matches!(new, Ok(None));
        let is_access = name == acl::ACCESS;
        self.with_state(ino, LeaseMode::Write, |turn, state| {
            let r = &state.record;
            match r.mode & S_IFMT {
                S_IFLNK => return Err(Errno::OPNOTSUPP.into()),
                S_IFDIR => {}
                _ if is_access => {}
                // Only a directory has a default list; nobody asks who takes none away.
                _ if sets => return Err(Errno::ACCES.into()),
                _ => return Ok(()),
            }
            if !owns(caller, r) {
                return Err(Errno::PERM.into());
            }
            let new = new.clone()?;
            match (how, list(r, name).is_some()) {
                (XattrMode::Create, true) => return Err(Errno::EXIST.into()),
                (XattrMode::Replace, false) => return Err(Errno::NODATA.into()),
                // Nothing to remove.
                (_, false) if new.is_none() => return Ok(()),
                _ => {}
            }
            let now = Self::now(&[r]);
            let outsider = caller.uid != 0 && !caller.in_group(r.gid);
            if is_access && new.is_some() && r.mode & S_ISGID != 0 && outsider {
                // As with chmod, whose rule this is.
                let mode = r.mode & 0o7777 & !S_ISGID;
                let none = Stamp::default();
                let (uid, gid, atime, mtime) = (0, 0, none, none);
                let op = Op::SetAttr { ino, mask: mask::MODE, mode, uid, gid, atime, mtime };
                state.last = self.log(turn, ino.0, &[state], &op, now)?.sequence;
                state.record.mode &= !S_ISGID;
            }
            let encoded = new.as_ref().map(Acl::encode);
            let op = match &encoded {
                Some(value) => Op::SetXattr { ino, name, value },
                None => Op::RemoveXattr { ino, name },
            };
            let place = self.log(turn, ino.0, &[state], &op, now)?;
            apply(&mut state.record, is_access, new.clone());
            state.record.ctime = Stamp::from_nanos(now);
            state.last = place.sequence;
            // Who may read decides in which arena the blocks lie: they may move.
            state.moved(place.sequence);
            Ok(())
        })
    }
}

/// What the service makes of the operation.
fn apply(r: &mut InodeRecord, is_access: bool, new: Option<Acl>) {
    if !is_access {
        r.xattrs |= new.is_some();
        r.default_acl = new.map(Arc::new);
        return;
    }
    if let Some(list) = &new {
        r.mode = r.mode & !0o777 | list.mode();
    }
    r.acl = new.filter(|list| !list.is_minimal()).map(Arc::new);
    r.xattrs |= r.acl.is_some();
}

/// Follows a change of the mode.
pub(super) fn chmod(r: &mut InodeRecord) {
    if let Some(list) = &mut r.acl {
        Arc::make_mut(list).chmod(r.mode);
    }
}

/// Mode and lists of what is made in a directory, as the service will make them: the default list
/// decides if there is one, else the umask.
pub(super) fn inherit(r: &mut InodeRecord, dir: &InodeRecord, umask: u32) {
    let is_dir = r.mode & S_IFMT == S_IFDIR;
    match &dir.default_acl {
        _ if r.mode & S_IFMT == S_IFLNK => {}
        None => r.mode &= !(umask & 0o777),
        Some(list) => {
            let (mode, own) = list.inherited(r.mode);
            r.mode = mode;
            r.acl = own.map(Arc::new);
            r.default_acl = is_dir.then(|| Arc::clone(list));
            r.xattrs = r.acl.is_some() || is_dir;
        }
    }
}
