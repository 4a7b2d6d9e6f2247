//! `corbel quota`: what users and directories take, and may take.

use std::path::{Path, PathBuf};

use base::{Errno, InodeId};
use clap::{Args, Subcommand};
use client::fs::{Account, AccountId, Amount};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;
use crate::units::parse_bytes;
use crate::volume::Volume;

/// Bytes of the blocks that are counted.
const BLOCK: u64 = storage::limits::BLOCK_BYTES;

/// Arguments of `corbel quota`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  corbel quota show                                   what everybody takes\n  \
    corbel quota set --user alice --bytes 10GiB         all files that alice owns\n  \
    corbel quota set --dir /projects/a --bytes 1TiB --inodes 1000000\n  \
    corbel quota clear --dir /projects/a\n\nPaths are those of the volume: / is its root. Space is \
    counted in blocks of 4 KiB:\ndata, and a block for each 3.75 KiB of extended attributes. Each name of a file \
    counts as\nan inode, each directory as one.\nA directory is counted with all that is below it; what is moved in or \
    out of it is copied\n(EXDEV). A directory with a quota inside another is counted by its own only. \
    Limits of\nusers and directories hold together; the super-user's files have none of their own."
)]
pub struct QuotaArgs {
    /// What to do
    #[command(subcommand)]
    pub verb: QuotaVerb,
    /// Socket of the local node, if it is not the configuration's
    #[arg(long, global = true, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,
}

/// Verbs of `corbel quota`.
#[derive(Subcommand, Debug)]
pub enum QuotaVerb {
    /// Show use and limits: of all, of a user, or of a directory
    Show(Whose),
    /// Set the limits of a user or of a directory; a limit that is not given is none
    Set {
        /// Whose.
        #[command(flatten)]
        whose: Whose,
        /// Space, for example 10GiB
        #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
        bytes: Option<u64>,
        /// Number of files, directories and links
        #[arg(long, value_name = "NUMBER")]
        inodes: Option<u64>,
    },
    /// Take the limits of a user or of a directory away
    Clear(Whose),
}

/// Whose account.
#[derive(Args, Debug, Clone)]
#[group(multiple = false)]
pub struct Whose {
    /// A user, by name or number
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// A directory, by its path in the volume
    #[arg(long, value_name = "PATH")]
    pub dir: Option<PathBuf>,
}

fn failed(what: impl std::fmt::Display, error: Errno) -> Failure {
    let remedy = match error {
        Errno::PERM => "only the super-user sets quotas",
        Errno::NOENT => "paths are those of the volume: / is its root",
        Errno::OPNOTSUPP => "only volumes have quotas, not the back ends dir: and null:",
        _ => "corbel status shows how the node is",
    };
    Failure::failed(format!("{what}: {error}"), remedy)
}

/// Number of a user given by name or number.
fn uid_of(text: &str) -> Result<u32> {
    if let Ok(uid) = text.parse() {
        return Ok(uid);
    }
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let find = |line: &str| -> Option<u32> {
        let mut fields = line.split(':');
        (fields.next()? == text).then(|| fields.nth(1)?.parse().ok()).flatten()
    };
    let unknown = || {
        let message = format!("no user {text} in /etc/passwd");
        Failure::new(Kind::Usage, message, "give the user's number")
    };
    users.lines().find_map(find).ok_or_else(unknown)
}

impl Volume {
    fn directory(&self, path: &Path) -> Result<InodeId> {
        self.at(path).map_err(|e| failed(path.display(), e))
    }

    fn account(&self, whose: &Whose) -> Result<Option<AccountId>> {
        match (&whose.user, &whose.dir) {
            (Some(user), _) => uid_of(user).map(|uid| Some(AccountId::User(uid))),
            (_, Some(dir)) => self.directory(dir).map(|ino| Some(AccountId::Directory(ino))),
            _ => Ok(None),
        }
    }

    fn one(&self, whose: &Whose) -> Result<AccountId> {
        self.account(whose)?.ok_or_else(|| {
            Failure::new(Kind::Usage, "whose quota?", "give --user USER or --dir PATH")
        })
    }

    /// Lets the quota of `of` (0: none) count `dir` and all below it (from above, so that what is made
    /// meanwhile is counted or met). Directories with quotas of their own stay theirs. Returns how many
    /// changed.
    fn count_below(&self, dir: InodeId, of: InodeId) -> std::result::Result<u64, Errno> {
        let own: Vec<InodeId> = self.accounts()?.iter().filter_map(limited_directory).collect();
        let (mut changed, mut dirs) = (u64::from(self.count(dir, of)?), vec![dir]);
        while let Some(at) = dirs.pop() {
            for (_, ino, kind) in self.list(at)? {
                if ino != dir && own.contains(&ino) {
                    continue;
                }
                match self.count(ino, of) {
                    Ok(more) => changed += u64::from(more),
                    Err(Errno::NOENT | Errno::STALE) => continue, // removed meanwhile
                    Err(e) => return Err(e),
                }
                if kind == client::fs::S_IFDIR {
                    dirs.push(ino);
                }
            }
        }
        self.fs.fsync_inode(&self.caller(), InodeId::ROOT)?;
        Ok(changed)
    }

    /// Counts a directory that has a quota by its own, and another by the one that it lies in.
    fn recount(&self, dir: InodeId, limit: Amount) -> std::result::Result<u64, Errno> {
        if limit != Amount::default() {
            return self.count_below(dir, dir);
        }
        let above = self.fs.lookup(&self.caller(), dir, b"..")?.ino;
        let outer = self.fs.project(&self.caller(), above)?;
        self.count_below(dir, if above == dir { InodeId::NONE } else { outer })
    }

    fn count(&self, ino: InodeId, of: InodeId) -> std::result::Result<bool, Errno> {
        if self.fs.project(&self.caller(), ino)? == of {
            return Ok(false);
        }
        self.fs.set_project(&self.caller(), ino, of).map(|()| true)
    }

    fn accounts(&self) -> std::result::Result<Vec<Account>, Errno> {
        self.fs.accounts(&self.caller())
    }

    fn json(&self, account: &Account) -> Value {
        let side = |a: Amount| json!({"bytes": a.blocks.saturating_mul(BLOCK), "inodes": a.inodes});
        let mut said = json!({"used": side(account.used), "limit": side(account.limit)});
        match account.id {
            AccountId::User(uid) => said["user"] = json!(uid),
            AccountId::Directory(ino) => {
                said["inode"] = json!(ino.0);
                said["dir"] = json!(self.path(ino));
            }
        }
        said
    }
}

fn limited_directory(account: &Account) -> Option<InodeId> {
    match account.id {
        AccountId::Directory(ino) if account.limit != Amount::default() => Some(ino),
        _ => None,
    }
}

fn print(said: &Value) {
    let who = match (&said["user"], &said["dir"]) {
        (Value::Number(uid), _) => format!("user {uid}"),
        (_, Value::String(path)) => format!("dir {path}"),
        _ => format!("inode {}", said["inode"]),
    };
    let limit = |what: &str| match said["limit"][what].as_u64() {
        Some(0) | None => "none".to_string(),
        Some(n) => n.to_string(),
    };
    let used = |what: &str| said["used"][what].to_string();
    println!(
        "{who:<32} {:>16} of {:>16} bytes {:>12} of {:>12} inodes",
        used("bytes"),
        limit("bytes"),
        used("inodes"),
        limit("inodes")
    );
}

fn show(volume: &Volume, whose: &Whose, out: &Output) -> Result<()> {
    let wanted = volume.account(whose)?;
    let mut accounts = volume.accounts().map_err(|e| failed("accounts", e))?;
    if let Some(id) = wanted {
        accounts.retain(|account| account.id == id);
        if accounts.is_empty() {
            let none = Amount::default();
            accounts.push(Account { id, limit: none, used: none });
        }
    }
    let said: Vec<Value> = accounts.iter().map(|account| volume.json(account)).collect();
    out.result(&json!({"accounts": said}), || said.iter().for_each(print));
    Ok(())
}

fn set(volume: &Volume, whose: &Whose, limit: Amount, out: &Output) -> Result<()> {
    let id = volume.one(whose)?;
    if id == AccountId::User(0) {
        return Err(Failure::new(
            Kind::Usage,
            "the super-user has no quota",
            "choose another user",
        ));
    }
    volume.fs.set_quota(&volume.caller(), id, limit).map_err(|e| failed("setting limits", e))?;
    if let AccountId::Directory(dir) = id {
        let counted =
            volume.recount(dir, limit).map_err(|e| failed("counting what is there", e))?;
        out.step(format_args!("{counted} inodes changed their account"));
    }
    show(volume, whose, out)
}

/// Runs `corbel quota`.
pub fn run(global: &Global, args: &QuotaArgs, out: &Output) -> Result<()> {
    let volume = Volume::open(global, args.socket.as_deref())?;
    match &args.verb {
        QuotaVerb::Show(whose) => show(&volume, whose, out),
        QuotaVerb::Clear(whose) => set(&volume, whose, Amount::default(), out),
        QuotaVerb::Set { whose, bytes, inodes } => {
            let blocks = bytes.unwrap_or(0).div_ceil(BLOCK);
            let limit = Amount { blocks, inodes: inodes.unwrap_or(0) };
            if limit == Amount::default() {
                let remedy = "give --bytes, --inodes or both; corbel quota clear takes limits away";
                return Err(Failure::new(Kind::Usage, "no limit is given", remedy));
            }
            set(&volume, whose, limit, out)
        }
    }
}
