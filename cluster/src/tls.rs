//! Who speaks over TCP: TLS 1.3 with certificates on both sides.
//!
//! A certificate names a [`Role`] of one cluster, in a URI: `corbel://CLUSTER/node-2`. It is believed if the
//! cluster's authority has signed it, it has not expired, it is not on the list of revoked ones and it is of this
//! cluster ([`keys`]). What its holder may then say, each message is held against: the transport lets a node say hello as
//! itself only, the coordinator lets it register as itself only, and only who administers may force and choose.
//!
//! Nothing here waits: [`session`] turns bytes of a socket into bytes of frames and back, as far as there are any.
//! Connections over local sockets have no session: there the kernel says who speaks.

mod alone;
pub mod keys;
pub(crate) mod pool;
pub(crate) mod session;
mod signed;

use base::NodeId;

pub use alone::Alone;
pub use keys::{KeyPlace, Keys};
#[doc(hidden)]
pub use pool::worked_here;

/// As whom somebody speaks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Role {
    /// A node: it registers, and says what it has, as itself.
    Node(NodeId),
    /// The coordinator.
    Coordinator,
    /// A person who decides what the cluster does not decide by itself.
    Admin,
}

/// Largest number of a node, as in the configuration.
const NODE_MAX: u32 = 65_535;

impl core::fmt::Display for Role {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Node(node) => write!(f, "node-{node}"),
            Self::Coordinator => f.write_str("coordinator"),
            Self::Admin => f.write_str("admin"),
        }
    }
}

impl core::str::FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let role = match text.strip_prefix("node-") {
            Some(number) => number.parse().ok().map(|n| Self::Node(NodeId(n))),
            None if text == "coordinator" => Some(Self::Coordinator),
            None if text == "admin" => Some(Self::Admin),
            None => None,
        };
        // One way to write each: what is shown is what is compared.
        let known = |role: &Self| match role {
            Self::Node(node) => (1..=NODE_MAX).contains(&node.0) && role.to_string() == text,
            _ => true,
        };
        role.filter(known).ok_or_else(|| {
            format!(
                "{text:?} is no role: write node-N (N from 1 to {NODE_MAX}), coordinator or admin"
            )
        })
    }
}

/// What a certificate says: a role of a cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Name {
    /// The cluster's name in the configuration.
    pub cluster: String,
    /// The role in it.
    pub role: Role,
}

const SCHEME: &str = "corbel://";

impl core::fmt::Display for Name {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.cluster, self.role)
    }
}

impl core::str::FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "it names no role of a cluster (corbel://CLUSTER/ROLE)".to_owned();
        let (cluster, role) =
            text.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/')).ok_or_else(wrong)?;
        if !crate::coordinator::message::valid_name(cluster) {
            return Err(wrong());
        }
        Ok(Self { cluster: cluster.to_owned(), role: role.parse()? })
    }
}
