//! Which file system a source names.

use std::path::Path;
use std::sync::Arc;

use client::dir::{self, DirFs};
use client::fs::FileSystem;

/// Descriptors of ours start here, above what a shell or a service manager hands down.
const FD_MIN: i32 = 64;
/// Inodes held by descriptor, if the limit of open files allows twice as many.
const NODES_MAX: usize = 16_384;

/// Opens a back end that needs no cluster: `dir:/PATH` serves a directory, `kv:HOST:PORT#NAME` (or `kv:/SOCKET#NAME`) what a
/// key-value server keeps, `nfs://HOST/EXPORT` an NFS export ([`nfs::url`]), `lib:/PATH.so#ARGUMENT` what a shared library
/// has (`corbel-fs.h`), `null:` swallows data.
/// None when the source is none of these, and so is a node's socket.
///
/// # Errors
/// Why the back end cannot be opened.
pub fn open_back_end(source: &str) -> Option<Result<Arc<dyn FileSystem>, String>> {
    if let Some(path) = source.strip_prefix("dir:") {
        return Some(open_dir(path));
    }
    if let Some(address) = source.strip_prefix("kv:") {
        return Some(open_kv(address));
    }
    if let Some(library) = source.strip_prefix("lib:") {
        return Some(open_library(library));
    }
    if source.starts_with("nfs://") {
        return Some(open_nfs(source));
    }
    (source == "null:").then(|| Ok(Arc::new(client::null::NullFs::default()) as Arc<_>))
}

/// A file that has what a key-value server wants to hear first: see [`kv::link::login`].
const KV_LOGIN: &str = "CORBEL_KV_LOGIN";

/// What such a file says.
///
/// # Errors
/// In words that begin with its path: others can read it, or it is too long, or no such file.
pub fn login(file: &Path) -> Result<kv::link::Login, String> {
    let wrong = |what: String| format!("{}: {what}", file.display());
    let text = crate::secret::read(file, kv::link::LOGIN_BYTES_MAX)?;
    let text = String::from_utf8(text).map_err(|_| wrong("is not UTF-8".into()))?;
    kv::link::login(&text).map_err(wrong)
}

fn open_kv(address: &str) -> Result<Arc<dyn FileSystem>, String> {
    let mut parsed: kv::link::Address =
        address.parse().map_err(|e| format!("kv:{address}: {e}"))?;
    if let Some(file) = std::env::var_os(KV_LOGIN) {
        let login = login(Path::new(&file)).map_err(|what| format!("{KV_LOGIN}={what}"))?;
        parsed.login = Some(login);
    }
    Ok(Arc::new(kv::KvFs::open(parsed, kv::Options::default())?))
}

fn open_library(library: &str) -> Result<Arc<dyn FileSystem>, String> {
    let (path, argument) = library.split_once('#').unwrap_or((library, ""));
    if path.is_empty() {
        return Err(format!("lib:{library}: which library? (lib:/PATH.so#ARGUMENT)"));
    }
    Ok(Arc::new(foreign::ForeignFs::open(Path::new(path), argument)?))
}

fn open_nfs(source: &str) -> Result<Arc<dyn FileSystem>, String> {
    Ok(Arc::new(nfs::NfsFs::open(&source.parse()?)?))
}

fn open_dir(path: &str) -> Result<Arc<dyn FileSystem>, String> {
    let path = std::path::absolute(path).map_err(|e| format!("dir:{path}: {e}"))?;
    let impersonate = rustix::process::geteuid().is_root();
    let options =
        dir::Options { fd_min: FD_MIN, nodes_max: raise_limit(), watch: None, impersonate };
    let fs = DirFs::open(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()), options)
        .map_err(|e| format!("dir:{}: {e}", path.display()))?;
    // Modes come with the caller's umask applied; ours must not be applied on top.
    rustix::process::umask(rustix::fs::Mode::empty());
    Ok(Arc::new(fs))
}

/// Lifts the limit of open files as far as we may; returns how many inodes to hold open.
fn raise_limit() -> usize {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If it is refused, the old limit counts.
    let _ = setrlimit(Resource::Nofile, limit);
    let now = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(now / 2).unwrap_or(usize::MAX).min(NODES_MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_login_is_a_secret_of_one_or_two_lines() {
        let path = std::env::temp_dir().join(format!("corbel-login-{}", std::process::id()));
        let of = |text: &[u8], mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            login(&path)
        };
        assert_eq!(of(b"secret\n", 0o600), Ok((None, "secret".into())));
        assert_eq!(of(b"me\nsecret\n", 0o400), Ok((Some("me".into()), "secret".into())));
        let longest = vec![b'x'; kv::link::LOGIN_BYTES_MAX];
        assert!(of(&longest, 0o600).is_ok());
        let long = vec![b'x'; kv::link::LOGIN_BYTES_MAX + 1];
        for (text, mode, what) in [
            (&b"secret\n"[..], 0o644, "644"),
            (b"secret\n", 0o640, "640"),
            (&long, 0o600, "longer"),
            (b"", 0o600, "a password"),
            (b"\n\n", 0o600, "a password"),
            (b"a\nb\nc\n", 0o600, "a password"),
            (b"\xff\xfe", 0o600, "UTF-8"),
        ] {
            let said = of(text, mode).unwrap_err();
            assert!(said.contains(what) && said.contains("corbel-login"), "{said}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(login(&path).unwrap_err().contains("corbel-login"));
    }
}
