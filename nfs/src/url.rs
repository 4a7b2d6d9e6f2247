//! Where an export is: `nfs://HOST/EXPORT?version=4`, with the names that libnfs gives to the options.

use std::str::FromStr;
use std::time::Duration;

/// Which protocol is spoken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// NFSv3: MOUNT for the first handle, NLM for locks.
    V3,
    /// NFSv4.0.
    V4,
}

/// An export, and how it is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Url {
    /// Name or address of the server.
    pub host: String,
    /// The path that it exports.
    pub export: String,
    /// The protocol.
    pub version: Version,
    /// Port of NFS: 2049 with version 4, else asked for (the port mapper) if none is given.
    pub nfs_port: Option<u16>,
    /// Port of MOUNT (version 3), else asked for.
    pub mount_port: Option<u16>,
    /// Port of NLM, the locks of version 3, else asked for.
    pub lock_port: Option<u16>,
    /// Port of the port mapper.
    pub map_port: u16,
    /// A request that has no answer for so long fails.
    pub patience: Duration,
    /// Locks are the server's, and hold for all its clients; else they are the guest's own.
    pub locks: bool,
}

/// Port of the port mapper, if nobody says another one.
const MAP_PORT: u16 = 111;
/// How long a request may take, in seconds, if nobody says: longer than a server's grace period after a start, which is 90 with most.
const PATIENCE: u64 = 120;

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "nfs://HOST[:PORT]/EXPORT[?version=3|4&nfsport=N&mountport=N&lockport=N&mapport=N&timeout=SECONDS&locks=0|1]";
        let wrong = |what: &str| format!("{text}: {what}: {form}");
        let rest = text.strip_prefix("nfs://").ok_or_else(|| wrong("no address of an export"))?;
        let (place, options) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, export) = place.split_once('/').ok_or_else(|| wrong("no path"))?;
        let port = |text: &str| {
            text.parse::<u16>()
                .ok()
                .filter(|port| *port > 0)
                .ok_or_else(|| wrong("a port is 1 to 65535"))
        };
        // An address of version 6 has colons of its own, and stands in brackets.
        let (host, given) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, rest)) => {
                let rest = rest.strip_prefix(':').ok_or_else(|| wrong("no host"))?;
                (host, Some(port(rest)?))
            }
            None => match host.split_once(':') {
                Some((host, given)) => (host, Some(port(given)?)),
                None => (host, None),
            },
        };
        if host.is_empty() || host.len() > 255 || !host.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(wrong("no host"));
        }
        if export.len() > 1023
            || export.contains('\0')
            || export.split('/').any(|name| name == "..")
        {
            return Err(wrong("no path of an export"));
        }
        let mut url = Self {
            host: host.into(),
            export: format!("/{}", export.trim_matches('/')),
            version: Version::V3,
            nfs_port: given,
            mount_port: None,
            lock_port: None,
            map_port: MAP_PORT,
            patience: Duration::from_secs(PATIENCE),
            locks: true,
        };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            match (key, value) {
                ("version", "3") => url.version = Version::V3,
                ("version", "4") => url.version = Version::V4,
                ("version", _) => return Err(wrong("version is 3 or 4")),
                ("nfsport", value) => url.nfs_port = Some(port(value)?),
                ("mountport", value) => url.mount_port = Some(port(value)?),
                ("lockport", value) => url.lock_port = Some(port(value)?),
                ("mapport", value) => url.map_port = port(value)?,
                ("locks", "0") => url.locks = false,
                ("locks", "1") => url.locks = true,
                ("locks", _) => return Err(wrong("locks is 0 or 1")),
                ("timeout", value) => {
                    let seconds =
                        value.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
                    url.patience = Duration::from_secs(
                        seconds.ok_or_else(|| wrong("timeout is 1 to 86400 seconds"))?,
                    );
                }
                (key, _) => return Err(wrong(&format!("{key} is no option"))),
            }
        }
        Ok(url)
    }
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "nfs://{}{}", self.host, self.export)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let url: Url = "nfs://server/srv/data/?version=4&timeout=5&locks=0".parse().unwrap();
        assert_eq!((url.host.as_str(), url.export.as_str()), ("server", "/srv/data"));
        assert_eq!((url.version, url.patience.as_secs(), url.locks), (Version::V4, 5, false));
        let url: Url = "nfs://[fe80::1]:2050/".parse().unwrap();
        assert_eq!(
            (url.host.as_str(), url.nfs_port, url.export.as_str()),
            ("fe80::1", Some(2050), "/")
        );
        let url: Url = "nfs://10.0.0.1:2050/a?mountport=1&lockport=2&mapport=3".parse().unwrap();
        assert_eq!(
            (url.nfs_port, url.mount_port, url.lock_port, url.map_port),
            (Some(2050), Some(1), Some(2), 3)
        );
    }

    #[test]
    fn what_is_none_is_refused_in_words() {
        for bad in [
            "server:/a",
            "nfs://",
            "nfs:///a",
            "nfs://a",
            "nfs://a/b?version=2",
            "nfs://a:0/b",
            "nfs://a/b?nfsport=x",
            "nfs://a/b?timeout=0",
            "nfs://a/../b",
            "nfs://a/b?uid=0",
            "nfs://[::1]x/b",
            "nfs://a/b?locks=2",
            "nfs://a b/c",
        ] {
            let said = Url::from_str(bad).unwrap_err();
            assert!(said.contains("nfs://HOST"), "{said}");
        }
    }
}
