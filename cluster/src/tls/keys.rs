//! The files that say who this side is and whom it believes, and the judge of certificates.
//!
//! ```text
//! FOLDER/authority.pem   certificates of the authority; several while it is being replaced
//! FOLDER/ROLE.pem        this side's certificate and its private key, in one file so that they change together
//! FOLDER/revoked         certificates that are believed no more: SHA-256 of each in hexadecimal, one a line
//! ```
//!
//! They are read again when they have changed: before a new connection, and once a second. Connections that are there
//! stay, but for those whose certificate has been revoked. Files that cannot be used leave those in use that were read before;
//! whom to believe does not wait for an own certificate that is of use.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::planted::{Bug, planted};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring as provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, TrustAnchor, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};

use super::{Name, Role};

/// Between two looks whether the files have changed, without a new connection.
const LOOK: Duration = Duration::from_secs(1);
/// Seconds before its end from which on it is said, and how often.
pub const SOON: i64 = 14 * 86_400;
const WARN: Duration = Duration::from_secs(86_400);
/// The same of the authority, to which each machine and each certificate has to be moved.
pub const AUTHORITY_SOON: i64 = 90 * 86_400;
/// What to do about that.
pub const RENEW_AUTHORITY: &str = "no certificate is believed after it: put another authority's certificate beside it in \
     every authority.pem, issue all anew from that one, and take this one out then";
/// Longest file that is read.
const FILE_MAX: u64 = 1 << 20;

/// SHA-256 of a certificate.
pub type Fingerprint = [u8; 32];

/// The fingerprint of a certificate.
pub fn fingerprint(der: &[u8]) -> Fingerprint {
    let mut bytes = [0u8; 32];
    bytes.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, der).as_ref());
    bytes
}

/// As it is written in `revoked`.
pub fn show_fingerprint(fingerprint: &Fingerprint) -> String {
    fingerprint.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse_fingerprint(text: &str) -> Option<Fingerprint> {
    let digits: Vec<u8> = text.bytes().filter(|b| *b != b':').collect();
    let mut bytes = [0u8; 32];
    if digits.len() != 64 {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).ok()?;
        *byte = u8::from_str_radix(pair, 16).ok().filter(|_| !pair.contains('+'))?;
    }
    Some(bytes)
}

/// Reads a list of revoked certificates; what is wrong with it, if it is none.
pub fn parse_revoked(text: &str) -> Result<BTreeSet<Fingerprint>, String> {
    let mut all = BTreeSet::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let one = parse_fingerprint(line).ok_or_else(|| {
            format!(
                "line {} is no SHA-256 of a certificate; write 64 hexadecimal digits",
                number + 1
            )
        })?;
        all.insert(one);
    }
    Ok(all)
}

/// When a certificate begins and ends to count, in seconds since 1970.
pub fn validity(der: &[u8]) -> Option<(i64, i64)> {
    let (whole, _) = element(der, 0x30)?;
    let (mut rest, _) = element(whole, 0x30)?;
    if let Some((_, after)) = element(rest, 0xa0) {
        rest = after; // The version.
    }
    for tag in [0x02, 0x30, 0x30] {
        rest = element(rest, tag)?.1; // Number, algorithm, issuer.
    }
    let (times, _) = element(rest, 0x30)?;
    let (from, times) = moment(times)?;
    let (until, _) = moment(times)?;
    Some((from, until))
}

/// The first element of DER, if it has this tag: its content, and what comes after it.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&len, rest) = rest.split_first()?;
    if found != tag {
        return None;
    }
    let (len, rest) = if len < 0x80 {
        (usize::from(len), rest)
    } else {
        let (digits, rest) =
            rest.split_at_checked(usize::from(len & 0x7f)).filter(|d| d.0.len() <= 4)?;
        (digits.iter().fold(0, |len, digit| len << 8 | usize::from(*digit)), rest)
    };
    rest.split_at_checked(len)
}

/// A time of DER: YYMMDDHHMMSSZ or YYYYMMDDHHMMSSZ.
fn moment(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let (text, century, rest) = match element(bytes, 0x17) {
        Some((text, rest)) => (text, None, rest),
        None => {
            let (text, rest) = element(bytes, 0x18)?;
            let (century, text) = text.split_at_checked(2)?;
            (text, Some(two(century)?), rest)
        }
    };
    let [year, month, day, hour, minute, second] = text.strip_suffix(b"Z").and_then(|digits| {
        let pairs: Vec<i64> = digits.chunks(2).map(two).collect::<Option<_>>()?;
        pairs.try_into().ok()
    })?;
    let year = match century {
        Some(century) => century * 100 + year,
        None if year < 50 => 2000 + year,
        None => 1900 + year,
    };
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years that begin in March: the odd day comes last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = y * 365 + y / 4 - y / 100 + y / 400 + (m * 153 + 2) / 5 + day - 1 - 719_468;
    Some((((days * 24 + hour) * 60 + minute) * 60 + second, rest))
}

fn two(digits: &[u8]) -> Option<i64> {
    match digits {
        [a @ b'0'..=b'9', b @ b'0'..=b'9'] => Some(i64::from(a - b'0') * 10 + i64::from(b - b'0')),
        _ => None,
    }
}

/// What a certificate says of its holder; not whether that is to be believed.
pub fn name_of(der: &CertificateDer<'_>) -> Result<Name, String> {
    let cert = EndEntityCert::try_from(der).map_err(|e| format!("it cannot be read ({e})"))?;
    let mut names = cert.valid_uri_names();
    match (names.next(), names.next()) {
        (Some(name), None) => name.parse(),
        (None, _) => Err("it names nobody of a cluster".to_owned()),
        (Some(_), Some(_)) => Err("it has more than one name".to_owned()),
    }
}

/// Where the keys of one side lie.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyPlace {
    /// The folder; see the module.
    pub folder: PathBuf,
    /// As whom this side speaks.
    pub role: Role,
    /// The cluster's name.
    pub cluster: String,
    /// Whether all is encrypted; else what goes to others that want it so, too, is signed only.
    pub encrypts: bool,
}

/// What sides that would do without encryption agree on with each other.
pub(crate) const SIGNED: &[u8] = b"corbel/signed";
/// What all others agree on.
const ENCRYPTED: &[u8] = b"corbel/encrypted";

impl KeyPlace {
    /// The certificate of the authority.
    pub fn authority(&self) -> PathBuf {
        self.folder.join("authority.pem")
    }

    /// This side's certificate and key.
    pub fn own(&self) -> PathBuf {
        self.folder.join(format!("{}.pem", self.role))
    }

    /// The list of revoked certificates.
    pub fn revoked(&self) -> PathBuf {
        self.folder.join("revoked")
    }
}

/// Seconds since 1970.
fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}

/// Tells whether a file is another one than before, without reading it.
type Stamp = [(u64, i64, i64, u64); 3];

fn stamp(place: &KeyPlace) -> Stamp {
    [place.authority(), place.own(), place.revoked()].map(|path| {
        std::fs::metadata(path)
            .map_or((0, 0, 0, 0), |m| (m.ino(), m.ctime(), m.ctime_nsec(), m.size()))
    })
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let about = std::fs::metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
    if about.len() > FILE_MAX {
        return Err(format!("{}: longer than 1 MiB; it is no file of keys", path.display()));
    }
    std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// What was read, ready for use.
pub(crate) struct Loaded {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
    judge: Arc<Judge>,
    /// When the own certificate ends.
    until: i64,
    /// When the last of the authority's does: nobody's is believed any more then.
    authority_until: i64,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl core::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Loaded").field("judge", &self.judge).finish_non_exhaustive()
    }
}

impl Loaded {
    /// As the files are. Whom to believe is taken from them also if the own certificate is of no use; then that of `before`
    /// stays, and why is said.
    fn read(place: &KeyPlace, before: Option<&Self>) -> Result<(Self, Option<String>), String> {
        let judge = Arc::new(Judge::read(place)?);
        let provider = Arc::clone(&judge.provider);
        let (chain, key, trouble) = match (own(place, &judge), before) {
            (Ok((chain, key)), _) => (chain, key, None),
            (Err(why), Some(before)) => (before.chain.clone(), before.key.clone_key(), Some(why)),
            (Err(why), None) => return Err(why),
        };
        let until =
            chain.first().and_then(|own| validity(own)).map_or(i64::MAX, |(_, until)| until);
        let wrong = |e: Error| format!("{}: {e}", place.own().display());
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(wrong)?
            .dangerous() // The judge believes less than the usual verifier, not more.
            .with_custom_certificate_verifier(judge.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(wrong)?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(wrong)?
            .with_client_cert_verifier(judge.clone())
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(wrong)?;
        // Each connection is judged: none goes on with what another was believed.
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        let ways = if place.encrypts {
            vec![ENCRYPTED.to_vec()]
        } else {
            vec![SIGNED.to_vec(), ENCRYPTED.to_vec()]
        };
        client.alpn_protocols.clone_from(&ways);
        server.alpn_protocols = ways;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let (client, server) = (Arc::new(client), Arc::new(server));
        let authority_until = judge.until;
        Ok((Self { client, server, judge, until, authority_until, chain, key }, trouble))
    }

    pub fn has_revoked(&self, fingerprint: &Fingerprint) -> bool {
        self.judge.has_revoked(fingerprint)
    }
}

/// TLS 1.3 alone, the cheaper of the good ciphers first.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            provider::cipher_suite::TLS13_AES_128_GCM_SHA256,
            provider::cipher_suite::TLS13_AES_256_GCM_SHA384,
            provider::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..provider::default_provider()
    }
}

/// This side's own certificate, which must be one that the others will believe.
fn own(
    place: &KeyPlace,
    judge: &Judge,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), String> {
    let (at, role) = (place.own(), place.role);
    let issue = format!("make one with `corbel cert issue {role}`");
    let pem = read(&at).map_err(|e| format!("{e}; {issue}"))?;
    let mode = std::fs::metadata(&at).map_or(0, |m| m.mode() & 0o777);
    if mode & 0o077 != 0 {
        return Err(format!(
            "{}: has mode {mode:03o}, so that others can read the key: chmod 600, and think about a new one",
            at.display()
        ));
    }
    let wrong = |e: String| format!("{}: {e}", at.display());
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .map_err(|e| wrong(format!("no certificate in PEM: {e}")))?;
    let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|e| {
        wrong(format!("no private key in PEM beside the certificate: {e}; {issue}"))
    })?;
    let first = chain
        .first()
        .ok_or_else(|| wrong(format!("has no certificate beside the key; {issue}")))?;
    for usage in [KeyUsage::client_auth(), KeyUsage::server_auth()] {
        let name =
            judge.judge(first, &chain[1..], usage, UnixTime::now()).map_err(|r| wrong(r.text))?;
        if name.role != role {
            return Err(wrong(format!("is the certificate of {}; {issue}", name.role)));
        }
    }
    Ok((chain, key))
}

/// Why a certificate is not believed.
pub(crate) struct Refused {
    alert: CertificateError,
    text: String,
}

thread_local! {
    /// What the judge said last on this thread: rustls passes on what kind of error it was, not of whom.
    static SAID: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// What the judge has said of the connection whose packets this thread has just processed.
pub(crate) fn take_said() -> Option<String> {
    SAID.with_borrow_mut(Option::take)
}

/// Whom this side believes.
#[derive(Debug)]
struct Judge {
    anchors: Vec<TrustAnchor<'static>>,
    /// When the last of them ends.
    until: i64,
    revoked: BTreeSet<Fingerprint>,
    cluster: String,
    provider: Arc<CryptoProvider>,
}

impl Judge {
    fn read(place: &KeyPlace) -> Result<Self, String> {
        let at = place.authority();
        let unmade = |e: String| format!("{e}; make it with `corbel cert authority`");
        let pem = read(&at).map_err(unmade)?;
        let authority: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<_, _>>()
            .map_err(|e| format!("{}: no certificates in PEM: {e}", at.display()))?;
        let anchors = authority
            .iter()
            .map(|der| anchor_from_trusted_cert(der).map(|anchor| anchor.to_owned()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| format!("{}: no certificate of an authority: {e}", at.display()))?;
        if anchors.is_empty() {
            return Err(unmade(format!("{}: has no certificate", at.display())));
        }
        let at = place.revoked();
        let revoked = match std::fs::symlink_metadata(&at) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => BTreeSet::new(),
            _ => parse_revoked(&String::from_utf8_lossy(&read(&at)?))
                .map_err(|e| format!("{}: {e}", at.display()))?,
        };
        let provider = Arc::new(provider());
        let ends = authority.iter().map(|der| validity(der).map_or(i64::MAX, |(_, until)| until));
        let until = ends.max().unwrap_or(i64::MAX);
        Ok(Self { anchors, until, revoked, cluster: place.cluster.clone(), provider })
    }

    fn has_revoked(&self, fingerprint: &Fingerprint) -> bool {
        self.revoked.contains(fingerprint) && !planted(Bug::RevokedBelieved)
    }

    /// Whether a certificate is to be believed, and of whom it is.
    fn judge(
        &self,
        der: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        usage: KeyUsage,
        now: UnixTime,
    ) -> Result<Name, Refused> {
        let refuse = |alert, text: &str| {
            let whose = name_of(der).map_or_else(
                |_| "a certificate".to_owned(),
                |name| format!("the certificate of {} of cluster {:?}", name.role, name.cluster),
            );
            Refused { alert, text: format!("{whose} {text}") }
        };
        let cert = EndEntityCert::try_from(der)
            .map_err(|_| refuse(CertificateError::BadEncoding, "cannot be read"))?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        cert.verify_for_usage(algorithms, &self.anchors, intermediates, now, usage, None, None)
            .map_err(|error| match error {
                webpki::Error::CertExpired { .. } | webpki::Error::InvalidCertValidity => refuse(
                    CertificateError::Expired,
                    "has expired: renew it where the authority's key is with `corbel cert renew`",
                ),
                webpki::Error::CertNotValidYet { .. } => refuse(
                    CertificateError::NotValidYet,
                    "is not valid yet: set the clocks of both machines",
                ),
                webpki::Error::UnknownIssuer | webpki::Error::InvalidSignatureForPublicKey => refuse(
                    CertificateError::UnknownIssuer,
                    "is of another authority: all of a cluster have theirs from one, and its authority.pem",
                ),
                other => refuse(CertificateError::BadEncoding, &format!("is not good: {other}")),
            })?;
        if self.has_revoked(&fingerprint(der)) {
            let text = "was revoked: issue another with `corbel cert issue`";
            return Err(refuse(CertificateError::Revoked, text));
        }
        let name = name_of(der)
            .map_err(|why| refuse(CertificateError::ApplicationVerificationFailure, &why))?;
        if name.cluster != self.cluster && !planted(Bug::ClusterUnchecked) {
            let text = format!("is of no use in cluster {:?}: issue one for it", self.cluster);
            return Err(refuse(CertificateError::ApplicationVerificationFailure, &text));
        }
        Ok(name)
    }

    fn tell(refused: Refused) -> Error {
        SAID.set(Some(refused.text));
        Error::InvalidCertificate(refused.alert)
    }

    fn verify(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn no_tls12() -> Error {
    Error::General("TLS 1.2 is not spoken".to_owned())
}

impl ServerCertVerifier for Judge {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        wanted: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let name = self
            .judge(end_entity, intermediates, KeyUsage::server_auth(), now)
            .map_err(Self::tell)?;
        // The dialler says whom it means as if that were the name of a host.
        let (wanted, found) = (wanted.to_str(), name.role.to_string());
        if wanted != found && !planted(Bug::WhomUnchecked) {
            return Err(Self::tell(Refused {
                alert: CertificateError::ApplicationVerificationFailure,
                text: format!(
                    "{found} answers where {wanted} was meant: check addresses, and which certificate is whose"
                ),
            }));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Judge {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.judge(end_entity, intermediates, KeyUsage::client_auth(), now)
            .map(|_| ClientCertVerified::assertion())
            .map_err(Self::tell)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

struct Shared {
    stamp: Stamp,
    looked: Instant,
    loaded: Arc<Loaded>,
    /// When it was said that the own certificate ends soon.
    warned: Option<Instant>,
    /// For the log.
    notes: Vec<String>,
}

/// The keys of one side. Copies are the same keys.
#[derive(Clone)]
pub struct Keys {
    place: Arc<KeyPlace>,
    shared: Arc<Mutex<Shared>>,
}

impl core::fmt::Debug for Keys {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Keys").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Keys {
    /// Reads them; what is wrong and what to do, if they are of no use.
    pub fn open(place: KeyPlace) -> Result<Self, String> {
        let stamp = stamp(&place);
        let loaded = Arc::new(Loaded::read(&place, None)?.0);
        let shared =
            Shared { stamp, looked: Instant::now(), loaded, warned: None, notes: Vec::new() };
        Ok(Self { place: Arc::new(place), shared: Arc::new(Mutex::new(shared)) })
    }

    /// See [`KeyPlace::encrypts`].
    pub(crate) fn encrypts(&self) -> bool {
        self.place.encrypts
    }

    fn with<T>(&self, change: impl FnOnce(&mut Shared) -> T) -> T {
        change(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn look(&self, shared: &mut Shared) {
        shared.looked = Instant::now();
        let stamp = stamp(&self.place);
        if stamp == shared.stamp {
            return;
        }
        shared.stamp = stamp;
        match Loaded::read(&self.place, Some(&shared.loaded)) {
            Ok((loaded, trouble)) => {
                shared.loaded = Arc::new(loaded);
                shared.notes.push(match trouble {
                    None => format!("keys: read again from {}", self.place.folder.display()),
                    Some(why) => format!("keys: the own certificate of before stays in use: {why}"),
                });
            }
            Err(why) => {
                shared.notes.push(format!("keys: what was read before stays in use: {why}"))
            }
        }
    }

    /// As the files are now: for a new connection.
    pub(crate) fn fresh(&self) -> Arc<Loaded> {
        self.with(|shared| {
            self.look(shared);
            Arc::clone(&shared.loaded)
        })
    }

    /// What is about to be of no use, and what to do.
    fn warnings_of(&self, loaded: &Loaded) -> Vec<String> {
        let ends = |until: i64, soon: i64| {
            let left = until.saturating_sub(now());
            (left < soon).then(|| match left {
                ..=0 => "has ended".to_owned(),
                left => format!("ends in {} days", left / 86_400),
            })
        };
        let mut all = Vec::new();
        if let Some(how) = ends(loaded.until, SOON) {
            let (at, role) = (self.place.own(), self.place.role);
            let what = format!("`corbel cert renew {role}` where the authority's key is");
            all.push(format!("{} {how}: {what}", at.display()));
        }
        if let Some(how) = ends(loaded.authority_until, AUTHORITY_SOON) {
            all.push(format!("{} {how}: {RENEW_AUTHORITY}", self.place.authority().display()));
        }
        all
    }

    /// The same as of now, for `status`.
    pub fn warnings(&self) -> Vec<String> {
        self.with(|shared| self.warnings_of(&shared.loaded))
    }

    /// Reads the files again, also if they look as before: somebody says that they have changed.
    pub fn read_again(&self) {
        self.with(|shared| {
            shared.stamp = Stamp::default();
            self.look(shared);
            shared.warned = None;
        });
    }

    /// Looks at the files once a second, and says in time that they are about to be of no use.
    pub(crate) fn current(&self) -> Arc<Loaded> {
        self.with(|shared| {
            if shared.looked.elapsed() >= LOOK {
                self.look(shared);
                let warnings = self.warnings_of(&shared.loaded);
                let due = shared.warned.is_none_or(|at| at.elapsed() >= WARN);
                if !warnings.is_empty() && due {
                    shared.warned = Some(Instant::now());
                    shared.notes.extend(warnings.into_iter().map(|what| format!("keys: {what}")));
                }
            }
            Arc::clone(&shared.loaded)
        })
    }

    /// What a log should have, since the last call.
    pub fn take_notes(&self) -> Vec<String> {
        self.with(|shared| std::mem::take(&mut shared.notes))
    }
}

/// Whether a certificate would be believed in the cluster of `place`, where these files are; of whom it is, or why not.
pub fn believed(place: &KeyPlace, der: &CertificateDer<'_>) -> Result<Name, String> {
    let judge = Judge::read(place)?;
    judge.judge(der, &[], KeyUsage::client_auth(), UnixTime::now()).map_err(|refused| refused.text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::random::Random;

    #[test]
    fn times_are_read() {
        let time = |tag: u8, text: &str| {
            moment(&[&[tag, text.len() as u8], text.as_bytes()].concat()).map(|m| m.0)
        };
        assert_eq!(time(0x17, "700101000000Z"), Some(0));
        assert_eq!(time(0x17, "000301000001Z"), Some(951_868_801));
        assert_eq!(time(0x18, "20240229235959Z"), Some(1_709_251_199));
        assert_eq!(time(0x18, "20500101000000Z"), Some(2_524_608_000));
        assert_eq!(time(0x17, "491231235959Z"), Some(2_524_607_999));
        for wrong in ["", "Z", "700101000000", "700001000000Z", "7001010000Z", "70-101000000Z"] {
            assert_eq!(time(0x17, wrong), None, "{wrong}");
        }
    }

    #[test]
    fn lists_of_revoked_ones_are_read_or_refused() {
        let one = "ab".repeat(32);
        let text = format!("# lost\n{one} # node 2\n\n{}\n", vec!["AB"; 32].join(":"));
        assert_eq!(parse_revoked(&text).map(|all| all.len()), Ok(1));
        for wrong in [&one[1..], "+b".repeat(32).as_str(), "zz", &format!("{one}00")] {
            assert!(parse_revoked(wrong).unwrap_err().contains("line 1"), "{wrong}");
        }
    }

    /// Whatever bytes there are: they are read or refused.
    #[test]
    fn bytes_of_any_kind_are_read_or_refused() {
        let mut random = Random::new(11);
        for _ in 0..20_000 {
            let mut bytes = vec![0u8; random.below(80) as usize];
            random.fill(&mut bytes);
            if random.chance(1, 2) && bytes.len() > 4 {
                bytes[..4].copy_from_slice(&[0x30, 0x82, 0, 60]);
            }
            let _ = validity(&bytes);
            let _ = moment(&bytes);
            let _ = name_of(&CertificateDer::from(&bytes[..]));
            let text = String::from_utf8_lossy(&bytes);
            let _ = parse_revoked(&text);
            assert!(text.parse::<Name>().is_err());
        }
    }
}
