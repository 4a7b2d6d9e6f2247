//! Requests that come a second time. A device that was killed may have done what a request asked for without having said so: the next
//! device does it again. For most requests that changes nothing. For those that make or take away a name the second time fails, and
//! the failure says that the first one did not.
//!
//! Nobody else is believed to have made or taken just that name in between; NFS without a cache of replies does the same.

use frontend::fuse::wire::{CreateIn, InHeader, LinkIn, MkdirIn, MknodIn, OutHeader, op};
use zerocopy::{FromBytes, IntoBytes};

/// What to do when a request that came again has failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Instead {
    /// Nothing: it failed.
    Fail,
    /// It had been done.
    Done,
    /// This request tells what it had made.
    Ask(Vec<u8>),
}

fn exist() -> i32 {
    -i32::from(base::Errno::EXIST.0)
}

fn noent() -> i32 {
    -i32::from(base::Errno::NOENT.0)
}

/// Whether a request may have to be looked at when it has failed.
pub fn concerns(opcode: u32) -> bool {
    matches!(
        opcode,
        op::MKDIR
            | op::MKNOD
            | op::SYMLINK
            | op::LINK
            | op::CREATE
            | op::UNLINK
            | op::RMDIR
            | op::RENAME
            | op::RENAME2
            | op::REMOVEXATTR
            | op::SETXATTR
    )
}

/// A LOOKUP by the same caller, of the name at the front of `rest`.
fn lookup(header: &InHeader, rest: &[u8]) -> Option<Vec<u8>> {
    let end = rest.iter().position(|b| *b == 0)?;
    let name = &rest[..=end];
    let len = u32::try_from(size_of::<InHeader>() + name.len()).ok()?;
    let header =
        InHeader { len: len.into(), opcode: op::LOOKUP.into(), total_extlen: 0.into(), ..*header };
    Some([header.as_bytes(), name].concat())
}

/// What a failure means, of a request that came again.
pub fn instead(request: &[u8], error: i32) -> Instead {
    let Ok((header, rest)) = InHeader::ref_from_prefix(request) else { return Instead::Fail };
    let after = |len: usize| rest.get(len..).unwrap_or(&[]);
    let ask = |rest: &[u8]| lookup(header, rest).map_or(Instead::Fail, Instead::Ask);
    match header.opcode.get() {
        op::MKDIR if error == exist() => ask(after(size_of::<MkdirIn>())),
        op::MKNOD if error == exist() => ask(after(size_of::<MknodIn>())),
        op::LINK if error == exist() => ask(after(size_of::<LinkIn>())),
        op::SYMLINK if error == exist() => ask(rest),
        op::CREATE if error == exist() => {
            let mut again = request.to_vec();
            let Ok((arg, _)) = CreateIn::mut_from_prefix(&mut again[size_of::<InHeader>()..])
            else {
                return Instead::Fail;
            };
            arg.flags = (arg.flags.get() & !client::fs::O_EXCL).into();
            Instead::Ask(again)
        }
        op::UNLINK | op::RMDIR | op::RENAME | op::RENAME2 if error == noent() => Instead::Done,
        op::REMOVEXATTR if error == -libc::ENODATA => Instead::Done,
        op::SETXATTR if error == exist() => Instead::Done,
        _ => Instead::Fail,
    }
}

/// The reply that says that it was done.
pub fn done(unique: u64) -> OutHeader {
    OutHeader::alone(unique, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, parts: &[&[u8]]) -> Vec<u8> {
        let body = parts.concat();
        let len = u32::try_from(size_of::<InHeader>() + body.len()).unwrap();
        let header = InHeader { len: len.into(), opcode: opcode.into(), ..InHeader::default() };
        [header.as_bytes(), &body].concat()
    }

    #[test]
    fn what_had_been_done_is_told_as_done() {
        let mkdir = request(op::MKDIR, &[MkdirIn::default().as_bytes(), b"d\0"]);
        assert_eq!(instead(&mkdir, exist()), Instead::Ask(request(op::LOOKUP, &[b"d\0"])));
        assert_eq!(instead(&mkdir, noent()), Instead::Fail);
        assert_eq!(instead(&request(op::UNLINK, &[b"f\0"]), noent()), Instead::Done);
        let exclusive = CreateIn { flags: 0o202.into(), ..CreateIn::default() };
        let open = CreateIn { flags: 2.into(), ..CreateIn::default() };
        assert_eq!(
            instead(&request(op::CREATE, &[exclusive.as_bytes(), b"f\0"]), exist()),
            Instead::Ask(request(op::CREATE, &[open.as_bytes(), b"f\0"]))
        );
        // Cut where the name would be.
        for len in 0..mkdir.len() - 1 {
            assert_eq!(instead(&mkdir[..len], exist()), Instead::Fail);
        }
        assert_eq!(instead(&request(op::CREATE, &[b"x"]), exist()), Instead::Fail);
    }
}
