//! Where the services of a server are: the port mapper (version 2), and the first handle of an export (MOUNT version 3).

use std::time::Duration;

use base::Errno;

use crate::proto::Fh;
use crate::rpc::{Cred, Link, Procedure, Said};
use crate::url::Url;
use crate::xdr::{Garbage, In, Out};

/// The protocols' numbers.
pub const NFS: u32 = 100_003;
/// Of MOUNT.
pub const MOUNT: u32 = 100_005;
/// Of NLM.
pub const NLM: u32 = 100_021;

const GETPORT: Procedure = Procedure { program: 100_000, version: 2, number: 3 };
const MNT: Procedure = Procedure { program: MOUNT, version: 3, number: 1 };
const TCP: u32 = 6;
/// Who makes a mount waits no longer than that.
const PATIENCE: Duration = Duration::from_secs(20);

/// Asks one thing over a connection of its own.
fn once(url: &Url, port: u16, what: Procedure, args: Vec<u8>) -> Result<Said, String> {
    let patience = url.patience.min(PATIENCE);
    let link = Link::new(&url.host, port, patience)?;
    link.call(what, &Cred::ROOT, args).map_err(|error| {
        let why = link.trouble().unwrap_or_else(|| format!("{error:?}"));
        format!("{} port {port}: {why}", url.host)
    })
}

/// The port of a service.
///
/// # Errors
/// In words: no port mapper, no such service.
pub fn port(url: &Url, program: u32, version: u32) -> Result<u16, String> {
    let args = Out::default().u32(program).u32(version).u32(TCP).u32(0).take();
    let said = once(url, url.map_port, GETPORT, args).map_err(|e| {
        format!("the port mapper, {e} (with nfsport=, mountport= and lockport= it is not asked)")
    })?;
    let port = In::new(&said.results).u32().ok().and_then(|port| u16::try_from(port).ok());
    port.filter(|port| *port > 0).ok_or_else(|| {
        format!(
            "{}: the port mapper knows no program {program} version {version} over TCP",
            url.host
        )
    })
}

/// The root of the export.
///
/// # Errors
/// In words: no such export, not for us.
pub fn mount(url: &Url) -> Result<Fh, String> {
    let port = url.mount_port.map_or_else(|| port(url, MOUNT, 3), Ok)?;
    let args = Out::default().bytes(url.export.as_bytes()).take();
    let said = once(url, port, MNT, args).map_err(|e| format!("the mount service, {e}"))?;
    match root(&said.results) {
        Ok(Ok(fh)) => Ok(fh),
        Ok(Err(Errno::NOENT)) => Err(format!("{url}: there is no such export")),
        Ok(Err(Errno::ACCES | Errno::PERM)) => Err(format!(
            "{url}: the export is not for this machine (or only for those who come from a port below 1024: run as root)"
        )),
        Ok(Err(error)) => Err(format!("{url}: mounting: {error:?}")),
        Err(Garbage) => Err(format!("{url}: what the mount service says is no answer")),
    }
}

/// An answer of MNT.
fn root(results: &[u8]) -> Result<Result<Fh, Errno>, Garbage> {
    let mut read = In::new(results);
    match read.u32()? {
        0 => {}
        status => return Ok(Err(crate::proto::errno(status))),
    }
    let fh = Fh::read(&mut read, 64)?;
    // Whether AUTH_SYS is among the flavours that it wants; some say none.
    let count = read.u32()?;
    let mut flavours = (0..count.min(64)).map(|_| read.u32());
    let known = count == 0 || flavours.any(|flavour| flavour == Ok(1) || flavour == Ok(0));
    Ok(if known { Ok(fh) } else { Err(Errno::OPNOTSUPP) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_mount() {
        let mut out = Out::default();
        assert_eq!(
            root(&out.u32(0).bytes(b"handle").u32(1).u32(1).take()),
            Ok(Ok(Fh((*b"handle").into())))
        );
        assert_eq!(
            root(&out.u32(0).bytes(b"handle").u32(1).u32(390_003).take()),
            Ok(Err(Errno::OPNOTSUPP))
        );
        assert_eq!(root(&out.u32(2).take()), Ok(Err(Errno::NOENT)));
        assert_eq!(root(&out.u32(0).bytes(&[0; 65]).u32(0).take()), Err(Garbage));
        assert_eq!(root(&out.u32(0).bytes(b"").u32(0).take()), Err(Garbage));
        // As many flavours as it says are not there: AUTH_SYS is not among them.
        assert_eq!(root(&out.u32(0).bytes(b"h").u32(u32::MAX).take()), Ok(Err(Errno::OPNOTSUPP)));
    }
}
