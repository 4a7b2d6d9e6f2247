//! What an attack is on: files of the super-user that it must not reach, and some of its own.

use std::cell::RefCell;
use std::fs;
use std::io::{BufRead as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use base::InodeId;

use super::{OTHERS, STRANGER};

/// Bytes of each file with something to be found in it.
pub const BYTES: usize = 64 << 10;

/// The ground of one attack: a directory of the volume.
///
/// ```text
/// secret           0600   root's
/// closed/          0700   root's
/// closed/open      0644   readable, but for the way to it
/// group            0640   root's, for a group of others
/// way/             0755   open until somebody closes it
/// way/open         0644
/// setid            4755   root's program
/// sticky/ 1777     with root's file in it
/// pub/    0777     for everybody
/// pub/attributes   0644   root's, with attributes that only root may see
/// pub/mine         0644   the attacker's
/// ```
#[derive(Debug)]
pub struct Ground {
    /// Directory of the cluster.
    pub cluster: PathBuf,
    /// Name of the directory in the volume.
    pub name: String,
    answers: RefCell<Vec<String>>,
}

impl Ground {
    /// Of that name, in that cluster.
    pub fn new(cluster: &Path, name: &str) -> Self {
        Self { cluster: cluster.into(), name: name.into(), answers: RefCell::default() }
    }

    /// The part in the mount of node 1.
    pub fn path(&self, part: &str) -> PathBuf {
        self.cluster.join("n1/mnt").join(&self.name).join(part)
    }

    /// The same in the mount of node 2.
    pub fn there(&self, part: &str) -> PathBuf {
        self.cluster.join("n2/mnt").join(&self.name).join(part)
    }

    /// The socket of hostd on node 1.
    pub fn socket(&self) -> PathBuf {
        self.cluster.join("n1/run/hostd.sock")
    }

    /// What is to be found in a file of the ground.
    pub fn marker(&self, part: &str) -> String {
        format!("<{}:{part}>", self.name)
    }

    /// The inode of a part, which everybody may guess.
    pub fn ino(&self, part: &str) -> Result<InodeId, String> {
        let ino = self.root(&format!("number {part}"))?;
        ino.parse().map(InodeId).map_err(|e| format!("{ino}: {e}"))
    }

    /// Asks the super-user, who runs the siege ([`super::root`]).
    pub fn root(&self, what: &str) -> Result<String, String> {
        println!("ask {what}");
        std::io::stdout().flush().map_err(|e| e.to_string())?;
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map_err(|e| e.to_string())?;
        self.answers.borrow_mut().push(line.clone());
        match line.trim().split_once(' ').unwrap_or((line.trim(), "")) {
            ("ok", said) => Ok(said.to_owned()),
            (_, said) => Err(format!("root: {what}: {said}")),
        }
    }

    /// Makes all of it, as root. Each has its mode and owner before there is anything in it: nobody was ever let in.
    pub fn make(&self) -> std::io::Result<()> {
        let mode = |part: &str, bits: u32| {
            fs::set_permissions(self.path(part), fs::Permissions::from_mode(bits))
        };
        for (dir, bits) in
            [("", 0o755), ("closed", 0o700), ("way", 0o755), ("sticky", 0o1777), ("pub", 0o777)]
        {
            fs::create_dir(self.path(dir))?;
            mode(dir, bits)?;
        }
        let (root, others, mine) =
            ((None, None), (None, Some(OTHERS)), (Some(STRANGER), Some(STRANGER)));
        for (part, bits, (uid, gid)) in [
            ("secret", 0o600, root),
            ("closed/open", 0o644, root),
            ("group", 0o640, others),
            ("way/open", 0o644, root),
            ("setid", 0o4755, root),
            ("sticky/root", 0o644, root),
            ("pub/attributes", 0o644, root),
            ("pub/mine", 0o644, mine),
        ] {
            let path = self.path(part);
            let mut file =
                fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            chown(&path, uid, gid)?;
            mode(part, bits)?;
            let marker = self.marker(part);
            file.write_all(&marker.as_bytes().repeat(BYTES / marker.len()))?;
            file.sync_all()?;
        }
        for name in ["trusted.key", "user.key"] {
            let path = self.path("pub/attributes");
            rustix::fs::setxattr(&path, name, b"value", rustix::fs::XattrFlags::empty())?;
        }
        rustix::fs::fsync(fs::File::open(self.path(""))?)?;
        Ok(())
    }

    /// Mode, owner, group, links, size and seconds of ctime of a part, as the super-user sees them.
    pub(super) fn stat(&self, part: &str) -> std::io::Result<String> {
        let m = fs::symlink_metadata(self.there(part))?;
        Ok(format!(
            "{:o} {} {} {} {} {}",
            m.mode(),
            m.uid(),
            m.gid(),
            m.nlink(),
            m.size(),
            m.ctime()
        ))
    }
}
