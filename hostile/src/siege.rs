//! The siege: attacks of a local user on a cluster that really runs, by its real doors: sockets, descriptors, logs, arenas,
//! requests, mounts, ports. One list ([`attacks`]), for the end-to-end test and for `corbel bench doors`; `corbel-siege`
//! (`src/bin`) runs it.
//!
//! An attack is a process of its own, of a user whom nobody has given anything ([`STRANGER`]). It is on a [`Ground`] made for it alone,
//! tries what it says, and says how that ended: held or succeeded, with what it saw. It may ask the super-user, who runs the siege, to do something
//! meanwhile, or to try the same ([`Ground::root`]): so that what is held is known to be there to be had. After
//! each attack the cluster must serve the super-user as before.

mod arenas;
pub mod attacker;
mod entries;
mod files;
mod ground;
mod log;
mod requests;
pub mod root;
mod sockets;

pub use ground::Ground;

/// The attacker. No group of it is a group of anything that is attacked.
pub const STRANGER: u32 = 3002;
/// Whose group may read some of what is attacked.
pub const OTHERS: u32 = 3003;

/// `limits.clients_per_user` as it is shipped.
const PER_USER: usize = 192;

/// How an attack ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It came to nothing; what it met.
    Held(String),
    /// It has what it must not have, or did what it must not do.
    Succeeded(String),
}

impl Outcome {
    /// Succeeded, if it did.
    pub fn of(succeeded: bool, saw: impl Into<String>) -> Self {
        if succeeded { Self::Succeeded(saw.into()) } else { Self::Held(saw.into()) }
    }
}

/// What an attack comes to, or why it could not be tried.
pub type Tried = Result<Outcome, String>;

/// An attack.
#[derive(Clone, Copy, Debug)]
pub struct Attack {
    /// Its name.
    pub name: &'static str,
    /// What it tries.
    pub tries: &'static str,
    /// Does it.
    pub body: fn(&Ground) -> Tried,
}

const fn attack(name: &'static str, tries: &'static str, body: fn(&Ground) -> Tried) -> Attack {
    Attack { name, tries, body }
}

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let doors = [
        sockets::ATTACKS,
        arenas::ATTACKS,
        log::ATTACKS,
        entries::ATTACKS,
        requests::ATTACKS,
        files::ATTACKS,
    ];
    doors.concat()
}
