//! The part that a view gives to a node, with all that goes with it and nothing that goes with another: a view builds it, at one
//! place (`view`), and what is dropped there is the reset. Who is not head has no lease table and no accounts, who does not join
//! has not half a join.

use super::Role;
use super::head::Head;
use super::join::Join;

/// See the module.
#[derive(Debug)]
pub(super) enum Part {
    /// No view yet, or not in it.
    Outside,
    /// Joins.
    Syncing(Join),
    /// In the chain, not first.
    Member,
    /// First of the chain.
    Head(Box<Head>),
}

impl Part {
    /// What the head has, if this is it.
    pub(super) fn head(&self) -> Option<&Head> {
        match self {
            Self::Head(head) => Some(head),
            _ => None,
        }
    }

    /// The same, to change it.
    pub(super) fn head_mut(&mut self) -> Option<&mut Head> {
        match self {
            Self::Head(head) => Some(head),
            _ => None,
        }
    }

    /// How far a node that joins is, if this is one.
    pub(super) const fn join(&self) -> Option<&Join> {
        match self {
            Self::Syncing(join) => Some(join),
            _ => None,
        }
    }

    /// The same, to change it.
    pub(super) const fn join_mut(&mut self) -> Option<&mut Join> {
        match self {
            Self::Syncing(join) => Some(join),
            _ => None,
        }
    }

    /// What it is called.
    pub(super) const fn role(&self) -> Role {
        match self {
            Self::Outside => Role::Outside,
            Self::Syncing(_) => Role::Syncing,
            Self::Member => Role::Member,
            Self::Head(_) => Role::Head,
        }
    }
}
