//! A store in a bucket of S3, or of another server that speaks its protocol: `s3:http://HOST:PORT/BUCKET[/PREFIX]`, or `https`.
//!
//! Five requests are all it takes: PUT, GET with a range, DELETE, ListObjectsV2. The client is small and our own, since what there
//! is brings two to four times as many crates as it has functions that we call. S3 puts an object in one step, and shows it
//! to whoever asks afterwards. It has no locks that end with their holder: see [`Store::lock`].
//!
//! Keys come from the environment, by the names that everybody uses: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
//! `AWS_SESSION_TOKEN`, `AWS_REGION`; authorities from the file `AWS_CA_BUNDLE`, else the system's.

pub mod answer;
mod http;
mod sign;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base::Errno;

use self::answer::Response;
use self::http::{Client, Request};
pub use self::sign::Keys;
use self::sign::{Signed, escape, hash, stamp};
use super::ground::Lock;
use super::shard::SHARD_MAX;
use super::store::Store;

/// Most bytes of an answer that is no object: a page of names, an error.
const TEXT_MAX: usize = 16 << 20;
/// Pages of names that are read; a thousand names each.
const PAGES_MAX: usize = 100_000;
/// Bytes of all names together: those of an image of some TiB.
const NAMES_BYTES_MAX: usize = 512 << 20;
/// Where Debian and others keep the authorities that they believe.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Where a bucket is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Whether it is reached by TLS.
    pub tls: bool,
    /// Name or address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Bucket and prefix, with a slash before and none after.
    pub path: String,
}

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            |what: &str| format!("{text:?}: {what}: write http://HOST:PORT/BUCKET[/PREFIX]");
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("no scheme"))?;
        let tls = match scheme {
            "http" => false,
            "https" => true,
            _ => return Err(wrong("the scheme is neither http nor https")),
        };
        let (server, path) = rest.split_once('/').ok_or_else(|| wrong("no bucket"))?;
        // An address of IPv6 stands in brackets.
        let (host, port) = match server.rsplit_once(':').filter(|(_, port)| !port.contains(']')) {
            Some((host, port)) => (host, Some(port.parse().map_err(|_| wrong("no such port"))?)),
            None => (server, None),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let path = path.trim_end_matches('/');
        if host.is_empty() || host.contains(char::is_whitespace) {
            return Err(wrong("no host"));
        }
        if path.is_empty() || path.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(wrong("no bucket, or a part of its path is empty"));
        }
        let port = port.unwrap_or(if tls { 443 } else { 80 });
        Ok(Self { tls, host: host.into(), port, path: format!("/{path}") })
    }
}

impl Keys {
    /// Those of the environment.
    pub fn from_environment() -> Result<Self, String> {
        let get = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let needed =
            |name: &str| get(name).ok_or_else(|| format!("{name} is not in the environment"));
        Ok(Self {
            id: needed("AWS_ACCESS_KEY_ID")?,
            secret: needed("AWS_SECRET_ACCESS_KEY")?,
            token: get("AWS_SESSION_TOKEN"),
            region: get("AWS_REGION").unwrap_or_else(|| "us-east-1".into()),
        })
    }
}

/// The store.
#[derive(Debug)]
pub struct S3 {
    place: Place,
    keys: Keys,
    client: Client,
    /// `Host`.
    host: String,
}

fn authorities() -> Result<Arc<rustls::ClientConfig>, String> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    let file = std::env::var("AWS_CA_BUNDLE").unwrap_or_else(|_| AUTHORITIES.into());
    let told = |error: String| format!("{file}: {error}");
    let mut roots = rustls::RootCertStore::empty();
    let found =
        CertificateDer::pem_file_iter(Path::new(&file)).map_err(|error| told(error.to_string()))?;
    for certificate in found.flatten() {
        // Some of a system's are of forms that nobody uses any more.
        let _ = roots.add(certificate);
    }
    if roots.is_empty() {
        return Err(told("no authority in it".into()));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?;
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

fn errno(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Errno::TIMEDOUT,
        _ => error.raw_os_error().and_then(|n| u16::try_from(n).ok()).map_or(Errno::IO, Errno),
    }
}

impl S3 {
    /// A store at a place; nothing is asked yet.
    pub fn new(place: Place, keys: Keys) -> Result<Self, String> {
        let tls = if place.tls { Some(authorities()?) } else { None };
        let client = Client::new(&place.host, place.port, tls);
        let name =
            if place.host.contains(':') { format!("[{}]", place.host) } else { place.host.clone() };
        let usual = if place.tls { 443 } else { 80 };
        let host = if place.port == usual { name } else { format!("{name}:{}", place.port) };
        Ok(Self { place, keys, client, host })
    }

    /// The same, giving up on an answer sooner.
    pub fn patient(self, answer: Duration) -> Self {
        Self { client: self.client.patient(answer), ..self }
    }

    /// Asks for a key (empty: the bucket itself).
    fn ask(
        &self,
        method: &str,
        key: &str,
        query: &str,
        range: Option<&str>,
        parts: &[&[u8]],
        most: usize,
    ) -> Result<Response, Errno> {
        // The prefix is a part of the key; of a list, of the query.
        let bucket = self.place.path[1..].split('/').next().unwrap_or_default();
        let path = match key {
            "" => format!("/{bucket}"),
            key => format!("{}/{key}", self.place.path),
        };
        let (path, payload) = (escape(&path, true), hash(parts));
        let stamp = stamp(SystemTime::now());
        let mut headers = vec![
            ("host", self.host.as_str()),
            ("x-amz-content-sha256", payload.as_str()),
            ("x-amz-date", stamp.as_str()),
        ];
        headers.extend(range.map(|range| ("range", range)));
        headers.extend(self.keys.token.as_deref().map(|token| ("x-amz-security-token", token)));
        headers.sort_unstable();
        let authorization = self.keys.authorize(&Signed {
            method,
            path: &path,
            query,
            headers: &headers,
            payload: &payload,
            stamp: &stamp,
        });
        let mark = if query.is_empty() { "" } else { "?" };
        let mut head = format!("{method} {path}{mark}{query} HTTP/1.1\r\n");
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let length = length.to_string();
        headers.extend([("authorization", authorization.as_str()), ("content-length", &length)]);
        for (name, value) in headers {
            head.extend([name, ": ", value, "\r\n"]);
        }
        let request = Request { head: &head, parts, bodiless: false, most };
        let answer = self.client.ask(request).map_err(|error| {
            log::debug!("pool: {method} {path} at {}: {error}", self.host);
            errno(&error)
        })?;
        match answer.status {
            200..=299 => Ok(answer),
            416 => Err(Errno::INVAL),
            status => {
                let text = String::from_utf8_lossy(&answer.body);
                let code = element(&text, "Code").map_or("", |(code, _)| code);
                // A bucket that is not there is a store that is not there, never an empty one.
                if status == 404 && code == "NoSuchKey" {
                    return Err(Errno::NOENT);
                }
                log::warn!("pool: {method} {path} at {}: {status} {code}", self.host);
                Err(match status {
                    401 | 403 => Errno::ACCES,
                    404 => Errno::NODEV,
                    503 => Errno::AGAIN,
                    507 => Errno::NOSPC,
                    _ => Errno::IO,
                })
            }
        }
    }
}

/// What stands in the first element of that name, and what comes after it.
fn element<'a>(text: &'a str, name: &str) -> Option<(&'a str, &'a str)> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>"))
}

fn unescape(text: &str) -> String {
    let pairs = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    pairs.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// Where the bytes of an answer begin, by its `Content-Range: bytes FROM-TO/ALL`.
fn range_start(answer: &Response) -> Option<u64> {
    let range = answer.header("content-range")?.strip_prefix("bytes ")?;
    range.split_once('-')?.0.trim().parse().ok()
}

/// The bytes that were asked for, of an answer that may have others.
///
/// # Errors
/// EIO: they are not in it.
pub fn part(answer: Response, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
    let start = match answer.status {
        206 => range_start(&answer).ok_or(Errno::IO)?,
        _ => 0,
    };
    let skip = offset.checked_sub(start).and_then(|n| usize::try_from(n).ok());
    let mut body = answer.body;
    match skip {
        Some(0) => {}
        Some(skip) => drop(body.drain(..skip.min(body.len()))),
        None => return Err(Errno::IO),
    }
    body.truncate(len);
    Ok(body)
}

/// Takes the names of a page of a list, those that begin with `prefix`, without it; how the next page is asked for, if there is one.
///
/// # Errors
/// EIO: an answer that is cut off, or something else, is no list.
pub fn page(body: &[u8], prefix: &str, names: &mut Vec<String>) -> Result<Option<String>, Errno> {
    let text = std::str::from_utf8(body).map_err(|_| Errno::IO)?;
    let (list, _) = text
        .split_once("<ListBucketResult")
        .and_then(|(_, rest)| rest.split_once("</ListBucketResult>"))
        .ok_or(Errno::IO)?;
    let mut rest = list;
    while let Some((key, after)) = element(rest, "Key") {
        if let Some(name) = unescape(key).strip_prefix(prefix) {
            names.push(name.to_owned());
        }
        rest = after;
    }
    let more = element(list, "IsTruncated").is_some_and(|(text, _)| text.trim() == "true");
    if !more {
        return Ok(None);
    }
    let (next, _) = element(list, "NextContinuationToken").ok_or(Errno::IO)?;
    Ok(Some(unescape(next)))
}

impl Store for S3 {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<(), Errno> {
        self.ask("PUT", name, "", None, parts, TEXT_MAX).map(|_| ())
    }

    fn get(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let range = format!("bytes={offset}-{}", offset + len as u64 - 1);
        // A server may give all of it.
        let most = TEXT_MAX.max(2 * SHARD_MAX);
        let answer = match self.ask("GET", name, "", Some(&range), &[], most) {
            // It ends before.
            Err(Errno::INVAL) => return Ok(Vec::new()),
            answer => answer?,
        };
        part(answer, offset, len)
    }

    fn list(&self, image: &str) -> Result<Vec<String>, Errno> {
        let inner = self.place.path[1..].split_once('/').map_or("", |(_, prefix)| prefix);
        let slash = if inner.is_empty() { "" } else { "/" };
        let prefix = format!("{inner}{slash}{image}/");
        let (mut names, mut bytes, mut token) = (Vec::new(), 0, None::<String>);
        for _ in 0..PAGES_MAX {
            let on = token.map(|token| format!("continuation-token={}&", escape(&token, false)));
            let query =
                format!("{}list-type=2&prefix={}", on.unwrap_or_default(), escape(&prefix, false));
            let answer = self.ask("GET", "", &query, None, &[], TEXT_MAX)?;
            let begun = names.len();
            token = page(&answer.body, &prefix, &mut names)?;
            bytes += names[begun..].iter().map(String::len).sum::<usize>();
            if token.is_none() {
                return Ok(names);
            }
            if bytes > NAMES_BYTES_MAX {
                break;
            }
        }
        log::warn!("pool: the list of {prefix} at {} has no end", self.host);
        Err(Errno::IO)
    }

    fn remove(&self, name: &str) -> Result<(), Errno> {
        match self.ask("DELETE", name, "", None, &[], TEXT_MAX) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Everybody gets one. An image whose stores are all buckets has one writer only as long as whoever runs the servers sees to it.
    fn lock(&self, image: &str) -> Result<Lock, Errno> {
        // At least a bucket that is not there must not count.
        self.list(image).map(|_| Box::new(()) as Lock)
    }
}
