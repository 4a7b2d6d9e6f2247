//! `corbel cert`: the authority of a cluster, and the certificates by which its nodes, its coordinator and who administers
//! it know each other over TCP. `cluster/src/tls` says what is believed; here is what is made.
//!
//! ```text
//! DIR/authority.pem   the authority's certificate, for every machine
//! DIR/authority.key   its private key (mode 0600), for none but the machine that issues
//! DIR/ROLE.pem        a certificate with its key (mode 0600): node-N, coordinator, admin
//! DIR/revoked         certificates that are believed no more, for every machine
//! ```

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use cluster::tls::keys::{
    AUTHORITY_SOON, RENEW_AUTHORITY, SOON, believed, fingerprint, name_of, parse_revoked,
    show_fingerprint, validity,
};
use cluster::tls::{KeyPlace, Name, Role};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::clock::moment;
use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;

/// Verbs of `corbel cert`.
#[derive(Subcommand, Debug)]
#[command(after_help = "Three machines, from the one that keeps the authority's key:\n  \
    corbel cert authority\n  \
    corbel cert issue coordinator\n  \
    corbel cert issue admin\n  \
    corbel cert issue node-1\n  \
    corbel cert issue node-2 --out /root/keys-2    copy it to /etc/corbel/keys on machine 2\n  \
    corbel cert issue node-3 --out /root/keys-3    copy it to /etc/corbel/keys on machine 3\n\n\
    Services read their keys again when the files change; links that are there stay.")]
pub enum CertVerb {
    /// Make the authority of a cluster
    #[command(after_help = "Example:\n  corbel cert authority --dir /root/authority")]
    Authority {
        /// Directory [default: cluster.keys]
        #[arg(long)]
        dir: Option<PathBuf>,
        /// Days that it counts
        #[arg(long, default_value_t = 3650, value_parser = days())]
        days: u32,
        /// Replace the authority that is there: what it has issued is of no use from then on
        #[arg(long)]
        force: bool,
    },
    /// Issue a certificate for a role: node-N, coordinator or admin
    #[command(
        after_help = "Examples:\n  corbel cert issue node-1\n  corbel cert issue node-2 --out /root/keys-2   \
        with all that machine 2 needs\n  corbel cert issue admin --days 30"
    )]
    Issue {
        /// Role: node-N, coordinator or admin
        #[arg(value_parser = role)]
        role: Role,
        /// Where, and how long
        #[command(flatten)]
        making: Making,
        /// Replace the certificate that is there
        #[arg(long)]
        force: bool,
    },
    /// Show whose certificates these are, until when they count and whether they would be believed
    #[command(
        after_help = "Examples:\n  corbel cert show\n  corbel cert show /root/keys-2/node-2.pem --json"
    )]
    Show {
        /// Files, or directories of keys [default: cluster.keys]
        paths: Vec<PathBuf>,
    },
    /// Issue a certificate anew, with a new key, in the place of the one that is there
    #[command(
        after_help = "Examples:\n  corbel cert renew node-1\n  corbel cert renew node-2 --out /root/keys-2"
    )]
    Renew {
        /// Role whose certificate it is
        #[arg(value_parser = role)]
        role: Role,
        /// Where, and how long
        #[command(flatten)]
        making: Making,
    },
    /// Have a certificate believed no more: put it on the list of revoked ones
    #[command(after_help = "Example:\n  corbel cert revoke /root/keys-2/node-2.pem\n\n\
        The list is the file `revoked`: copy it to the keys of every machine. Links of its holder end there within a\n\
        second.")]
    Revoke {
        /// Certificate, or its SHA-256 as `corbel cert show` prints it
        what: String,
        /// Directory of the list [default: cluster.keys]
        #[arg(long)]
        dir: Option<PathBuf>,
    },
}

/// How a certificate is made.
#[derive(Args, Debug)]
pub struct Making {
    /// Directory of the authority and its key [default: cluster.keys]
    #[arg(long)]
    pub authority: Option<PathBuf>,
    /// Directory to write to [default: cluster.keys]
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Days that it counts
    #[arg(long, default_value_t = 365, value_parser = days())]
    pub days: u32,
}

fn days() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=36_500)
}

fn role(text: &str) -> std::result::Result<Role, String> {
    text.parse()
}

const AUTHORITY: &str = "authority.pem";
const AUTHORITY_KEY: &str = "authority.key";
const REVOKED: &str = "revoked";
const DAY: i64 = 86_400;

/// Runs `corbel cert …`.
pub fn run(global: &Global, out: &Output, verb: &CertVerb) -> Result<()> {
    let config = global.load()?;
    let (keys, cluster) = (&config.cluster.keys, config.cluster.id.as_str());
    let or_keys = |dir: &Option<PathBuf>| dir.clone().unwrap_or_else(|| keys.clone());
    match verb {
        CertVerb::Authority { dir, days, force } => {
            let dir = or_keys(dir);
            make_authority(&dir, *days, *force)?;
            show(out, cluster, &[dir.join(AUTHORITY)])
        }
        CertVerb::Issue { role, making, force } => {
            let (from, to) = (or_keys(&making.authority), or_keys(&making.out));
            let path = issue(&from, &to, cluster, *role, making.days, *force)?;
            show(out, cluster, &[path])
        }
        CertVerb::Show { paths } if paths.is_empty() => {
            show(out, cluster, std::slice::from_ref(keys))
        }
        CertVerb::Show { paths } => show(out, cluster, paths),
        CertVerb::Renew { role, making } => {
            let (from, to) = (or_keys(&making.authority), or_keys(&making.out));
            let at = to.join(format!("{role}.pem"));
            if !at.exists() {
                return Err(Failure::failed(
                    format!("{}: there is nothing to renew", at.display()),
                    format!("make it: `corbel cert issue {role}`; --out names another directory"),
                ));
            }
            let path = issue(&from, &to, cluster, *role, making.days, true)?;
            show(out, cluster, &[path])
        }
        CertVerb::Revoke { what, dir } => revoke(out, &or_keys(dir), what),
    }
}

fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}

fn wrong(what: &str) -> impl Fn(rcgen::Error) -> Failure + '_ {
    move |error| Failure::failed(format!("{what}: {error}"), "make it anew with `corbel cert`")
}

/// A directory that nobody else looks into, if it is not there yet.
fn directory(dir: &Path) -> Result<()> {
    let mut own = std::fs::DirBuilder::new();
    own.recursive(true).mode(0o700).create(dir).context(dir.display())
}

/// Writes a file as a whole, or leaves what is there.
fn write(path: &Path, mode: u32, text: &str) -> Result<()> {
    let fresh = path.with_added_extension(format!("{}.new", std::process::id()));
    let put = || -> std::io::Result<()> {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(mode).open(&fresh)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&fresh, path)
    };
    put().inspect_err(|_| drop(std::fs::remove_file(&fresh))).context(path.display())
}

fn refuse_to_replace(path: &Path, force: bool, means: &str) -> Result<()> {
    if force || !path.exists() {
        return Ok(());
    }
    Err(Failure::failed(
        format!("{}: there is one already", path.display()),
        format!("--force replaces it{means}; --dir or --out names another directory"),
    ))
}

/// What every authority of ours is like: the key tells one from the other.
fn authority_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "Corbel authority");
    params
}

/// Makes an authority in `dir`.
pub fn make_authority(dir: &Path, days: u32, force: bool) -> Result<()> {
    let (at, key_at) = (dir.join(AUTHORITY), dir.join(AUTHORITY_KEY));
    for path in [&at, &key_at] {
        refuse_to_replace(path, force, ", and with it the use of all that was issued")?;
    }
    directory(dir)?;
    let mut params = authority_params();
    params.not_before = moment(now() - DAY);
    params.not_after = moment(now() + i64::from(days) * DAY);
    let key = KeyPair::generate().map_err(wrong("a key"))?;
    let cert = params.self_signed(&key).map_err(wrong("the authority"))?;
    write(&key_at, 0o600, &key.serialize_pem())?;
    write(&at, 0o644, &cert.pem())
}

fn read(path: &Path, remedy: &str) -> Result<String> {
    std::fs::read_to_string(path)
        .map_err(|error| Failure::failed(format!("{}: {error}", path.display()), remedy))
}

/// Issues a certificate for `role` with the authority in `from`, and puts all that its machine needs into `to`.
pub fn issue(
    from: &Path,
    to: &Path,
    cluster: &str,
    role: Role,
    days: u32,
    force: bool,
) -> Result<PathBuf> {
    let at = to.join(format!("{role}.pem"));
    refuse_to_replace(&at, force, " (as `corbel cert renew` does)")?;
    let elsewhere = "make it with `corbel cert authority`, or name its directory with --authority";
    let authority = read(&from.join(AUTHORITY), elsewhere)?;
    let key_at = from.join(AUTHORITY_KEY);
    let key = KeyPair::from_pem(&read(
        &key_at,
        "issue where the authority's key is, and name its directory with --authority",
    )?)
    .map_err(wrong(&key_at.display().to_string()))?;
    let issuer = Issuer::new(authority_params(), key);
    let name = Name { cluster: cluster.to_owned(), role }.to_string();
    name.parse::<Name>().map_err(|_| {
        let what = format!("cluster.id {cluster:?} cannot stand in a certificate");
        Failure::new(Kind::Config, what, "use 1 to 64 of a-z A-Z 0-9 - _ .")
    })?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, format!("{role} of {cluster}"));
    let uri = name.as_str().try_into().map_err(wrong("the name"))?;
    params.subject_alt_names = vec![SanType::URI(uri)];
    // A clock that is a little behind does not make it one of the future.
    params.not_before = moment(now() - DAY);
    params.not_after = moment(now() + i64::from(days) * DAY);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate().map_err(wrong("a key"))?;
    let cert = params.signed_by(&key, &issuer).map_err(wrong("the certificate"))?;
    let place =
        KeyPlace { folder: from.to_path_buf(), role, cluster: cluster.to_owned(), encrypts: true };
    believed(&place, cert.der()).map_err(|why| {
        let what = format!("{why}; {} and {} do not belong together", AUTHORITY, AUTHORITY_KEY);
        Failure::failed(what, "use the pair that `corbel cert authority` has made")
    })?;
    directory(to)?;
    if from != to {
        write(&to.join(AUTHORITY), 0o644, &authority)?;
        if let Ok(revoked) = std::fs::read_to_string(from.join(REVOKED)) {
            write(&to.join(REVOKED), 0o644, &revoked)?;
        }
    }
    write(&at, 0o600, &format!("{}{}", cert.pem(), key.serialize_pem()))?;
    Ok(at)
}

/// The first certificate of a file.
fn certificate(path: &Path) -> Result<CertificateDer<'static>> {
    let text = read(path, "name a certificate that `corbel cert issue` has made")?;
    CertificateDer::from_pem_slice(text.as_bytes()).map_err(|error| {
        let what = format!("{}: no certificate in PEM: {error}", path.display());
        Failure::new(Kind::Damaged, what, "issue it anew with `corbel cert issue`")
    })
}

fn revoke(out: &Output, dir: &Path, what: &str) -> Result<()> {
    let path = Path::new(what);
    let (line, whose) = if path.exists() {
        let der = certificate(path)?;
        let whose = name_of(&der).map_or_else(|why| why, |name| name.to_string());
        (show_fingerprint(&fingerprint(&der)), whose)
    } else {
        (what.to_owned(), String::new())
    };
    let at = dir.join(REVOKED);
    let before = match std::fs::read_to_string(&at) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        read => read.context(at.display())?,
    };
    let damaged = |why: String| {
        let remedy = "correct the line, or name a certificate that is there";
        Failure::new(Kind::Damaged, format!("{}: {why}", at.display()), remedy)
    };
    let known = parse_revoked(&before).map_err(damaged)?;
    let one = parse_revoked(&line).map_err(|_| {
        let what = format!("{what:?} is neither a file nor the SHA-256 of a certificate");
        Failure::new(Kind::Usage, what, "`corbel cert show` prints both")
    })?;
    let new = one.iter().any(|fingerprint| !known.contains(fingerprint));
    if new {
        directory(dir)?;
        let gap = if before.is_empty() || before.ends_with('\n') { "" } else { "\n" };
        let about = if whose.is_empty() { String::new() } else { format!("  # {whose}") };
        write(&at, 0o644, &format!("{before}{gap}{line}{about}\n"))?;
    }
    let object =
        json!({"list": at.display().to_string(), "sha256": line, "name": whose, "new": new});
    out.result(&object, || {
        let already = if new { "" } else { "already " };
        println!("{already}revoked: {line} {whose}");
        println!("copy {} to the keys of every machine of the cluster", at.display());
    });
    Ok(())
}

/// The certificates of a directory.
fn inside(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(path).context(path.display())?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|end| end == "pem"))
        .collect();
    found.sort();
    Ok(found)
}

fn show(out: &Output, cluster: &str, paths: &[PathBuf]) -> Result<()> {
    let mut shown = Vec::new();
    for path in paths {
        for file in inside(path)? {
            shown.push(describe(&file, cluster)?);
        }
    }
    out.result(&json!({"certificates": shown}), || {
        for one in &shown {
            println!("{}", line(one));
        }
        if shown.is_empty() {
            println!("no certificates here; `corbel cert --help` shows how they are made");
        }
    });
    Ok(())
}

/// What a certificate says, and whether those of its directory would believe it.
fn describe(path: &Path, cluster: &str) -> Result<Value> {
    let der = certificate(path)?;
    let (from, until) = validity(&der).unzip();
    let name = name_of(&der).ok();
    let folder = path.parent().unwrap_or(Path::new("/")).to_path_buf();
    let is_authority = path.file_name().is_some_and(|name| name == AUTHORITY);
    let trouble = if is_authority {
        None
    } else {
        let place =
            KeyPlace { folder, role: Role::Admin, cluster: cluster.to_owned(), encrypts: true };
        believed(&place, &der).err()
    };
    let left = until.map(|until| until - now());
    let soon = |soon: i64| left.is_some_and(|left| left < soon);
    let warning = match is_authority {
        true if soon(AUTHORITY_SOON) => Some(RENEW_AUTHORITY.to_owned()),
        false if soon(SOON) => Some("renew it with `corbel cert renew`".to_owned()),
        _ => None,
    };
    Ok(json!({
        "file": path.display().to_string(),
        "role": if is_authority { "authority".to_owned() } else {
            name.as_ref().map_or_else(|| "?".to_owned(), |name| name.role.to_string())
        },
        "cluster": name.map(|name| name.cluster),
        "from": from,
        "until": until,
        "days_left": until.map(|until| (until - now()).div_euclid(DAY)),
        "sha256": show_fingerprint(&fingerprint(&der)),
        "believed": trouble.is_none(),
        "trouble": trouble,
        "warning": warning,
    }))
}

fn line(one: &Value) -> String {
    let word = |key: &str| one[key].as_str().unwrap_or("-").to_owned();
    let left = one["days_left"].as_i64().map_or_else(|| "?".to_owned(), |days| days.to_string());
    let trouble =
        one["trouble"].as_str().map_or_else(String::new, |why| format!("\n  not believed: {why}"));
    let warning =
        one["warning"].as_str().map_or_else(String::new, |what| format!("\n  ends soon: {what}"));
    format!(
        "{}: {} of {}, {left} days left\n  sha256 {}{trouble}{warning}",
        word("file"),
        word("role"),
        word("cluster"),
        word("sha256")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let at =
                std::env::temp_dir().join(format!("corbel-cert-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&at);
            Self(at)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn mode(path: &Path) -> u32 {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn what_is_issued_is_believed_until_it_is_revoked() {
        let (dir, two) = (Folder::new("issue"), Folder::new("issue-2"));
        make_authority(&dir.0, 10, false).unwrap();
        assert!(make_authority(&dir.0, 10, false).unwrap_err().remedy.contains("--force"));
        let node = Role::Node(base::NodeId(2));
        let at = issue(&dir.0, &two.0, "c", node, 3, false).unwrap();
        assert_eq!(
            (mode(&at), mode(&dir.0.join(AUTHORITY_KEY)), mode(&two.0)),
            (0o600, 0o600, 0o700)
        );
        assert!(!two.0.join(AUTHORITY_KEY).exists(), "the authority's key left its machine");
        let place =
            |role| KeyPlace { folder: two.0.clone(), role, cluster: "c".into(), encrypts: true };
        cluster::tls::Keys::open(place(node)).unwrap();
        assert!(
            issue(&dir.0, &two.0, "c", node, 3, false).unwrap_err().message.contains("already")
        );
        let old = certificate(&at).unwrap();
        issue(&dir.0, &two.0, "c", node, 3, true).unwrap();
        let new = certificate(&at).unwrap();
        assert_ne!(old, new);
        let out = Output { json: true };
        revoke(&out, &two.0, at.to_str().unwrap()).unwrap();
        revoke(&out, &two.0, &show_fingerprint(&fingerprint(&old))).unwrap();
        revoke(&out, &two.0, &show_fingerprint(&fingerprint(&old))).unwrap();
        assert_eq!(std::fs::read_to_string(two.0.join(REVOKED)).unwrap().lines().count(), 2);
        // What ends soon is said of both: a node's counts for three days here, the authority for ten.
        let ends = |path: &Path| describe(path, "c").unwrap()["warning"].take();
        assert!(ends(&at).as_str().is_some_and(|what| what.contains("corbel cert renew")));
        assert!(ends(&two.0.join(AUTHORITY)).as_str().is_some_and(|what| what.contains("another")));
        make_authority(&dir.0, 3650, true).unwrap();
        assert!(ends(&dir.0.join(AUTHORITY)).is_null());
        for der in [old, new] {
            assert!(believed(&place(node), &der).unwrap_err().contains("revoked"));
        }
        assert!(revoke(&out, &two.0, "nonsense").unwrap_err().message.contains("neither"));
        // An authority and a key that do not belong together issue nothing.
        let other = Folder::new("issue-other");
        make_authority(&other.0, 10, false).unwrap();
        std::fs::copy(other.0.join(AUTHORITY_KEY), dir.0.join(AUTHORITY_KEY)).unwrap();
        let why = issue(&dir.0, &two.0, "c", Role::Admin, 3, false).unwrap_err();
        assert!(why.message.contains("do not belong together"), "{}", why.message);
        assert!(issue(&two.0, &two.0, "c", Role::Admin, 3, false).is_err(), "there is no key");
    }

    #[test]
    fn certificates_are_described() {
        let dir = Folder::new("show");
        make_authority(&dir.0, 10, false).unwrap();
        let at = issue(&dir.0, &dir.0, "c", Role::Coordinator, 3, false).unwrap();
        let shown = describe(&at, "c").unwrap();
        assert_eq!(
            (shown["role"].as_str(), shown["cluster"].as_str()),
            (Some("coordinator"), Some("c"))
        );
        assert!(matches!(shown["days_left"].as_i64(), Some(2..=3)) && shown["believed"] == true);
        assert_eq!(inside(&dir.0).unwrap().len(), 2);
        let elsewhere = describe(&at, "d").unwrap();
        assert!(line(&elsewhere).contains("not believed"), "{elsewhere}");
        std::fs::write(dir.0.join("x.pem"), "x").unwrap();
        assert_eq!(describe(&dir.0.join("x.pem"), "c").unwrap_err().kind, Kind::Damaged);
    }
}
