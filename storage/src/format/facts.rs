//! What an operation is, said once: which inodes it touches, what it makes, what loses a name. Who judges leases, notes what has
//! changed, leaves out what a chunk undoes, or looks for room, asks here, so that a new operation is classified at one place.

use base::{InodeId, Level};

use super::entry::Op;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Facts {
    /// What it is about; a second one that is replaced, or comes to share blocks.
    pub inodes: [Option<InodeId>; 2],
    /// The directories in which it changes names.
    pub dirs: [Option<InodeId>; 2],
    /// It comes into being.
    pub makes: Option<InodeId>,
    /// It loses a name, perhaps the last one.
    pub unlinks: Option<InodeId>,
    /// What loses its name, or has none, is open by who did it.
    pub open: bool,
    /// Names of `inodes` change.
    pub names: bool,
    /// It is there to give something back, and is done also where nothing is left.
    pub frees_space: bool,
    /// Alone among the operations it makes use of content that is there.
    pub reads_content: bool,
    /// What is behind it must not be taken together with what is before it.
    pub divides: bool,
    /// Only the service does it.
    pub by_service: bool,
}

impl Facts {
    /// All inodes that change, or of which others learn something new: whose write lease it takes. Directories first.
    pub fn touches(&self) -> impl Iterator<Item = InodeId> {
        self.dirs.into_iter().chain(self.inodes).flatten()
    }
}

impl Op<'_> {
    /// What a node must understand to follow it. (A snapshot that is there is understood by all: it can be given up.)
    pub fn level(&self) -> Level {
        match self {
            Op::Snapshot { .. } => Level::SNAPSHOTS,
            Op::CloneRange { source, .. } if source.of_snapshot().is_some() => Level::SNAPSHOTS,
            _ => Level::FIRST,
        }
    }

    /// What it is, whatever it is done with.
    pub fn facts(&self) -> Facts {
        let of = |ino| Facts { inodes: [Some(ino), None], ..Facts::default() };
        let named = |ino, parent| Facts { dirs: [Some(parent), None], names: true, ..of(ino) };
        match *self {
            Op::Pad => Facts::default(),
            Op::Create { ino, parent, .. } => Facts { makes: Some(ino), ..named(ino, parent) },
            // Its directory does not change.
            Op::Tmpfile { ino, .. } => {
                Facts { makes: Some(ino), open: true, names: true, ..of(ino) }
            }
            Op::Link { ino, parent, .. } => named(ino, parent),
            Op::Unlink { ino, parent, open, .. } | Op::Rmdir { ino, parent, open, .. } => {
                Facts { unlinks: Some(ino), open, frees_space: true, ..named(ino, parent) }
            }
            Op::Rename { ino, parent, new_parent, replaced, exchange, open, .. } => {
                let replaced = Some(replaced).filter(|ino| *ino != InodeId::NONE);
                Facts {
                    inodes: [Some(ino), replaced],
                    dirs: [Some(parent), Some(new_parent)],
                    unlinks: replaced.filter(|_| !exchange),
                    open,
                    names: true,
                    ..Facts::default()
                }
            }
            Op::Truncate { ino, .. } => Facts { frees_space: true, ..of(ino) },
            // What is in a snapshot is nobody's to change, and everybody knows that its blocks are shared.
            Op::CloneRange { ino, source, .. } if source.of_snapshot().is_some() => {
                Facts { reads_content: true, ..of(ino) }
            }
            Op::CloneRange { ino, source, .. } => {
                Facts { inodes: [Some(ino), Some(source)], reads_content: true, ..Facts::default() }
            }
            Op::Shift { ino, .. } => Facts { reads_content: true, ..of(ino) },
            // Nobody's lease is needed: it is about the state that the order of operations makes.
            Op::Snapshot { .. } => Facts { reads_content: true, divides: true, ..Facts::default() },
            Op::DropSnapshot { .. } => {
                Facts { frees_space: true, divides: true, ..Facts::default() }
            }
            Op::Reap { ino } => Facts { frees_space: true, by_service: true, ..of(ino) },
            Op::Place { ino, .. } | Op::Move { ino, .. } => Facts { by_service: true, ..of(ino) },
            Op::Write { ino, .. }
            | Op::Fallocate { ino, .. }
            | Op::SetAttr { ino, .. }
            | Op::SetXattr { ino, .. }
            | Op::RemoveXattr { ino, .. }
            | Op::SetQuota { ino, .. }
            | Op::SetProject { ino, .. } => of(ino),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: InodeId = InodeId(7);
    const B: InodeId = InodeId(8);
    const DIR: InodeId = InodeId(1);

    fn rename(replaced: InodeId, exchange: bool) -> Op<'static> {
        let (name, new_name) = (b"a".as_slice(), b"b".as_slice());
        let (noreplace, open) = (false, false);
        let (parent, new_parent) = (DIR, InodeId(2));
        Op::Rename {
            ino: A,
            parent,
            name,
            new_parent,
            new_name,
            replaced,
            noreplace,
            exchange,
            open,
        }
    }

    #[test]
    fn a_rename_touches_both_directories_and_what_it_replaces() {
        let touched = |op: Op<'_>| op.facts().touches().collect::<Vec<_>>();
        assert_eq!(touched(rename(InodeId::NONE, false)), [DIR, InodeId(2), A]);
        assert_eq!(touched(rename(B, false)), [DIR, InodeId(2), A, B]);
        assert_eq!(rename(B, false).facts().unlinks, Some(B));
        assert_eq!(rename(B, true).facts().unlinks, None, "both keep a name");
        assert_eq!(rename(InodeId::NONE, false).facts().unlinks, None);
    }

    #[test]
    fn what_is_made_without_a_name_is_open_and_leaves_its_directory_alone() {
        let op = Op::Tmpfile { ino: A, parent: DIR, mode: 0, uid: 0, gid: 0, linkable: true };
        let facts = op.facts();
        assert_eq!(facts.touches().collect::<Vec<_>>(), [A]);
        assert!(facts.open && facts.makes == Some(A));
    }

    #[test]
    fn a_clone_touches_its_source_and_a_pad_nothing() {
        let (offset, len, source_offset, zeroes) = (0, 4096, 0, false);
        let op = Op::CloneRange { ino: A, offset, len, source: B, source_offset, zeroes };
        assert_eq!(op.facts().touches().collect::<Vec<_>>(), [A, B]);
        assert!(op.facts().reads_content);
        let source = B.in_snapshot(3);
        let op = Op::CloneRange { ino: A, offset, len, source, source_offset, zeroes };
        assert_eq!(op.facts().touches().collect::<Vec<_>>(), [A]);
        assert_eq!(Op::Pad.facts(), Facts::default());
        assert!(Op::Reap { ino: A }.facts().by_service);
    }
}
