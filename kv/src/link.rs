//! Connections to the server. A request that changes something has a number, by which the script knows it again: so one whose
//! connection broke is made again until there is an answer, and done once. One of before, which comes late over a connection that was given
//! up, is done no more.

use std::io::{self, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use base::Errno;
use client::fs::Caller;

use crate::resp::{self, Reply};

/// Every operation, as the server runs it.
const SCRIPT: &str = include_str!("ops.lua");
/// A server that has not answered for so long is asked over another connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// A request that changes something and may have been done is asked for again for so long: the script knows it for a week.
const MEMORY: Duration = Duration::from_secs(3 * 86_400);
/// Who ends waits so long for the server to forget its connections.
const FAREWELL: Duration = Duration::from_secs(1);
/// Between two tries, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));
/// Connections at most; who needs another one waits.
const CONNECTIONS_MAX: usize = 64;

/// Where a server is, and which file system of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Address {
    /// Its socket, or host and port.
    pub place: Place,
    /// The name under which the file system's keys are.
    pub name: String,
    /// What it is told before anything else, if it wants to know: password, or user and password.
    pub login: Option<Login>,
}

/// See [`Address`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// A socket of this machine.
    Unix(PathBuf),
    /// `HOST:PORT`.
    Tcp(String),
}

impl std::str::FromStr for Address {
    type Err = String;

    /// `HOST:PORT#NAME` or `/SOCKET#NAME`; the name may be left out.
    fn from_str(text: &str) -> Result<Self, String> {
        let (place, name) = text.rsplit_once('#').unwrap_or((text, "corbel"));
        let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        if name.is_empty() || name.len() > 64 || !name.bytes().all(good) {
            return Err(format!(
                "{name}: a name of a file system is 1 to 64 letters, digits, '.', '_', '-'"
            ));
        }
        let place = if place.starts_with('/') {
            Place::Unix(place.into())
        } else {
            let port = place.rsplit_once(':').and_then(|(host, port)| {
                port.parse::<u16>().ok().filter(|port| *port > 0 && !host.is_empty())
            });
            if port.is_none() {
                return Err(format!("{place}: HOST:PORT, or the path of a socket"));
            }
            Place::Tcp(place.into())
        };
        Ok(Self { place, name: name.into(), login: None })
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(place) => f.write_str(place),
        }
    }
}

/// A user, if the server knows any, and a password.
pub type Login = (Option<String>, String);

/// Bytes of a file with such at most.
pub const LOGIN_BYTES_MAX: usize = 4096;

/// What a file says that has a password, or a user and on the next line a password.
///
/// # Errors
/// It has neither, or is too long.
pub fn login(text: &str) -> Result<Login, String> {
    if text.len() > LOGIN_BYTES_MAX {
        return Err(format!("is longer than {LOGIN_BYTES_MAX} bytes"));
    }
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    match lines[..] {
        [password] => Ok((None, password.into())),
        [user, password] => Ok((Some(user.into()), password.into())),
        _ => Err("should have a password, or a user and on the next line a password".into()),
    }
}

trait Stream: io::Read + io::Write + Send {
    /// Who reads or writes waits for so long.
    fn set_patience(&self, limit: Duration) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn set_patience(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

impl Stream for UnixStream {
    fn set_patience(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

type Wire = BufReader<Box<dyn Stream>>;

/// A connection, or the number of one that broke.
struct Link {
    /// Under which the script remembers the last request.
    client: String,
    /// Of the last request that changes something.
    seq: u64,
    /// One that changes something was left on a connection that was given up, and may still come from there.
    left: bool,
    wire: Option<Wire>,
}

#[derive(Default)]
struct State {
    idle: Vec<Link>,
    made: usize,
}

/// Connections to one server.
pub struct Links {
    address: Address,
    /// Of this process, in the names of the connections.
    own: String,
    prefix: String,
    /// By which the server knows the script.
    digest: OnceLock<String>,
    state: Mutex<State>,
    back: Condvar,
}

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Links").field("address", &self.address.place).finish_non_exhaustive()
    }
}

/// What is to be done about an error that the server tells.
enum Failed {
    /// It does not know the script (any more).
    Unknown,
    /// It is not ready.
    Later,
    /// That is the answer.
    With(Errno),
}

fn judge(text: &str) -> Failed {
    match text.split([' ', ':']).next().unwrap_or("") {
        "NOSCRIPT" => Failed::Unknown,
        "LOADING" | "BUSY" | "MASTERDOWN" | "TRYAGAIN" | "CLUSTERDOWN" => Failed::Later,
        "OOM" => Failed::With(Errno::NOSPC),
        "NOAUTH" | "WRONGPASS" | "NOPERM" => Failed::With(Errno::ACCES),
        "READONLY" => Failed::With(Errno::ROFS),
        // An error within a script is told with the error first, or somewhere.
        _ if text.contains("OOM command not allowed") => Failed::With(Errno::NOSPC),
        _ => Failed::With(Errno::IO),
    }
}

fn ask(wire: &mut Wire, bytes: &[u8]) -> io::Result<Reply> {
    wire.get_mut().write_all(bytes)?;
    wire.get_mut().flush()?;
    resp::reply(wire)
}

fn say(wire: &mut Wire, parts: &[&[u8]]) -> io::Result<Reply> {
    let mut bytes = Vec::new();
    resp::command(parts, &mut bytes);
    ask(wire, &bytes)
}

impl Links {
    /// No connection yet. `own` is a name that no other process has.
    pub fn new(address: Address, own: String) -> Self {
        let prefix = format!("{{{}}}", address.name);
        let (digest, state, back) = (OnceLock::new(), Mutex::default(), Condvar::new());
        Self { address, own, prefix, digest, state, back }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Link {
        let mut state = self.state();
        loop {
            if let Some(link) = state.idle.pop() {
                return link;
            }
            if state.made < CONNECTIONS_MAX {
                state.made += 1;
                let client = format!("{}-{}", self.own, state.made);
                return Link { client, seq: 0, left: false, wire: None };
            }
            state = self.back.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give(&self, link: Link) {
        self.state().idle.push(link);
        self.back.notify_one();
    }

    fn connect(&self) -> io::Result<Wire> {
        let stream: Box<dyn Stream> = match &self.address.place {
            Place::Unix(path) => Box::new(UnixStream::connect(path)?),
            Place::Tcp(place) => {
                let stream = TcpStream::connect(place)?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        };
        stream.set_patience(PATIENCE)?;
        let mut wire = BufReader::with_capacity(64 << 10, stream);
        if let Some((user, password)) = &self.address.login {
            let mut parts: Vec<&[u8]> = vec![b"AUTH"];
            parts.extend(user.as_ref().map(|user| user.as_bytes()));
            parts.push(password.as_bytes());
            if let Reply::Error(text) = say(&mut wire, &parts)? {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
            }
        }
        Ok(wire)
    }

    /// One command that is not the script's and changes nothing: what the server says, or why there is none.
    ///
    /// # Errors
    /// No connection.
    pub fn once(&self, parts: &[&[u8]]) -> io::Result<Reply> {
        let mut link = self.take();
        let kept = link.wire.take().and_then(|mut wire| Some((say(&mut wire, parts).ok()?, wire)));
        // One that was kept may have been closed meanwhile.
        let said = kept.map_or_else(
            || self.connect().and_then(|mut wire| Ok((say(&mut wire, parts)?, wire))),
            Ok,
        );
        let said = said.map(|(reply, wire)| {
            link.wire = Some(wire);
            reply
        });
        self.give(link);
        said
    }

    /// Lets the server forget the last request of each connection, for the end of the process; else it does so by itself, after a week.
    /// It must go on remembering where a request may still come from a connection that was given up. Connections that are at something
    /// are passed over.
    pub fn end(&self) {
        let mut idle = std::mem::take(&mut self.state().idle);
        let done = |link: &&Link| link.seq > 0 && !link.left;
        let names =
            idle.iter().filter(done).map(|link| format!("{}:r:{}", self.prefix, link.client));
        let names: Vec<String> = names.collect();
        let wire = idle.iter_mut().find_map(|link| link.wire.take());
        if let Some(mut wire) = wire.filter(|_| !names.is_empty()) {
            let mut parts: Vec<&[u8]> = vec![b"UNLINK"];
            parts.extend(names.iter().map(|name| name.as_bytes()));
            let said = wire.get_ref().set_patience(FAREWELL).and_then(|()| say(&mut wire, &parts));
            match said {
                Ok(Reply::Error(text)) => log::debug!("{}: forgetting: {text}", self.address.place),
                Ok(_) => {}
                Err(error) => log::debug!("{}: forgetting: {error}", self.address.place),
            }
        }
        // They may be made anew; the numbers go on, so that what is late is late.
        idle.iter_mut().for_each(|link| link.wire = None);
        self.state().idle.append(&mut idle);
        self.back.notify_all();
    }

    /// Does an operation. What it answers stands behind the error number; one that is not 0 is returned.
    ///
    /// # Errors
    /// What the operation says; EIO for what no server should say, and where for days there is no word of whether it was done; EACCES, ENOSPC, EROFS where it does not let us. Waits for a server
    /// that is away.
    pub fn call(
        &self,
        op: &str,
        caller: &Caller<'_>,
        args: &[&[u8]],
        changes: bool,
    ) -> Result<Vec<Reply>, Errno> {
        let mut link = self.take();
        if changes {
            link.seq += 1;
        }
        let answer = self.call_over(&mut link, op, caller, args, changes);
        self.give(link);
        answer
    }

    fn call_over(
        &self,
        link: &mut Link,
        op: &str,
        caller: &Caller<'_>,
        args: &[&[u8]],
        changes: bool,
    ) -> Result<Vec<Reply>, Errno> {
        let seq = if changes { link.seq } else { 0 }.to_string();
        let (uid, gid) = (caller.uid.to_string(), caller.gid.to_string());
        let groups: Vec<String> = caller.groups.iter().map(u32::to_string).collect();
        let groups = groups.join(",");
        let client = link.client.clone();
        let mut whole = Vec::with_capacity(256 + args.iter().map(|arg| arg.len()).sum::<usize>());
        let build = |how: &[u8], script: &[u8], to: &mut Vec<u8>| {
            let fixed: [&[u8]; 10] = [
                how,
                script,
                b"1",
                self.prefix.as_bytes(),
                op.as_bytes(),
                client.as_bytes(),
                seq.as_bytes(),
                uid.as_bytes(),
                gid.as_bytes(),
                groups.as_bytes(),
            ];
            let parts: Vec<&[u8]> = fixed.into_iter().chain(args.iter().copied()).collect();
            to.clear();
            resp::command(&parts, to);
        };
        let mut pause = PAUSE.0;
        let mut sent: Option<Instant> = None;
        loop {
            if changes && sent.is_some_and(|sent| sent.elapsed() > MEMORY) {
                log::error!("{}: {op}: whether it was done is not known", self.address.place);
                return Err(Errno::IO);
            }
            let mut wire = match link.wire.take().map_or_else(|| self.connect(), Ok) {
                Ok(wire) => wire,
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    log::error!("{}: {error}", self.address.place);
                    return Err(Errno::ACCES);
                }
                Err(error) => {
                    self.rest(&mut pause, &error.to_string());
                    continue;
                }
            };
            let asked = match self.digest(&mut wire) {
                Ok(Ok(digest)) => {
                    if whole.is_empty() {
                        build(b"EVALSHA", digest.as_bytes(), &mut whole);
                    }
                    sent.get_or_insert_with(Instant::now);
                    ask(&mut wire, &whole)
                }
                Ok(Err(text)) => Ok(Reply::Error(text)),
                Err(error) => Err(error),
            };
            match asked {
                Ok(Reply::Error(text)) => {
                    link.wire = Some(wire);
                    match judge(&text) {
                        Failed::Unknown => build(b"EVAL", SCRIPT.as_bytes(), &mut whole),
                        Failed::Later => self.rest(&mut pause, &text),
                        Failed::With(error) => {
                            log::warn!("{}: {op}: {text}", self.address.place);
                            return Err(error);
                        }
                    }
                }
                Ok(Reply::Array(mut all)) if !all.is_empty() => {
                    link.wire = Some(wire);
                    return match all.remove(0).number::<u16>() {
                        Some(0) => Ok(all),
                        Some(error) => Err(Errno(error)),
                        None => Err(Errno::IO),
                    };
                }
                Ok(other) => {
                    log::warn!("{}: {op}: an answer that is none: {other:?}", self.address.place);
                    return Err(Errno::IO);
                }
                // The connection is gone, and whether it was done is not known.
                Err(error) => {
                    link.left |= changes && sent.is_some();
                    self.rest(&mut pause, &error.to_string());
                }
            }
        }
    }

    /// Gives the server the script, unless that was done before; the inner error is what it has against it.
    fn digest(&self, wire: &mut Wire) -> io::Result<Result<&str, String>> {
        if let Some(digest) = self.digest.get() {
            return Ok(Ok(digest));
        }
        let digest = match say(wire, &[b"SCRIPT", b"LOAD", SCRIPT.as_bytes()])? {
            Reply::Error(text) => return Ok(Err(text)),
            other => other.bytes().and_then(|bytes| String::from_utf8(bytes).ok()),
        };
        let digest = digest.ok_or("ERR no digest of the script");
        Ok(digest.map(|digest| &**self.digest.get_or_init(|| digest)).map_err(String::from))
    }

    fn rest(&self, pause: &mut Duration, why: &str) {
        if *pause >= Duration::from_millis(500) {
            log::warn!("{}: {why}; trying again", self.address.place);
        }
        std::thread::sleep(*pause);
        *pause = (*pause * 2).min(PAUSE.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let parse = |text: &str| text.parse::<Address>();
        let local = parse("/run/redis.sock#vol").unwrap();
        assert_eq!((local.place, &*local.name), (Place::Unix("/run/redis.sock".into()), "vol"));
        let far = parse("db.example:6379").unwrap();
        assert_eq!((far.place, &*far.name), (Place::Tcp("db.example:6379".into()), "corbel"));
        for wrong in ["", "host", "host:0", ":6379", "host:1#", "host:1#a b", "host:1#{x}"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_a_server_says_is_understood() {
        assert!(matches!(judge("NOSCRIPT No matching script."), Failed::Unknown));
        assert!(matches!(judge("LOADING Redis is loading"), Failed::Later));
        let full =
            "ERR Error running script (call to f_1): @user_script:1: OOM command not allowed";
        assert!(matches!(judge(full), Failed::With(Errno::NOSPC)));
        assert!(matches!(judge("ERR what"), Failed::With(Errno::IO)));
    }
}
