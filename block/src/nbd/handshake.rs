//! The negotiation as a machine: bytes of the client in, bytes for it out. It knows no socket and no clock.

use std::sync::Arc;

use super::exports::{Export, Exports};
use super::proto::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, FIXED_NEWSTYLE, Fields, IHAVEOPT, NAME_MAX, NBDMAGIC,
    NO_ZEROES, Put, REPLY_MAGIC, info, option, reply, transmission,
};
use crate::device::PAYLOAD_MAX;

/// Longest data of an option. What is longer is refused without being read, and ends the connection: nothing that we
/// understand comes near it.
const OPTION_MAX: usize = 64 << 10;
/// Options that a client may send: it haggles, it does not talk for ever.
const OPTIONS_MAX: u32 = 1024;
/// Exports told by one LIST.
const LIST_MAX: usize = 1024;
/// Bytes before the data of an option.
const HEAD: usize = 16;

/// Whether TLS is offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TlsPolicy {
    /// Not at all.
    #[default]
    Off,
    /// To those that ask for it.
    On,
    /// Without it nothing is told.
    Required,
}

/// What was agreed on.
#[derive(Clone, Debug)]
pub struct Agreed {
    /// Name of the export.
    pub name: String,
    /// The export.
    pub export: Export,
    /// Replies come in chunks.
    pub structured: bool,
    /// `base:allocation` may be asked for.
    pub block_status: bool,
}

/// What the connection does next.
#[derive(Debug)]
pub enum Next {
    /// More bytes are needed.
    More,
    /// The client's next bytes are those of a TLS handshake; then it goes on here.
    StartTls,
    /// The haggling is over.
    Transmit(Box<Agreed>),
    /// It is over altogether, for that reason (none: the client said farewell).
    Close(Option<&'static str>),
}

/// The machine.
#[derive(Debug)]
pub struct Handshake {
    exports: Arc<Exports>,
    tls: TlsPolicy,
    /// TLS is up.
    secure: bool,
    /// The client's flags have come.
    greeted: bool,
    no_zeroes: bool,
    structured: bool,
    /// The export for which `base:allocation` was chosen.
    chosen: Option<String>,
    options: u32,
}

impl Handshake {
    /// A machine, and the greeting to send first.
    pub fn new(exports: Arc<Exports>, tls: TlsPolicy) -> (Self, Vec<u8>) {
        let mut out = Vec::new();
        Put(&mut out).u64(NBDMAGIC).u64(IHAVEOPT).u16(FIXED_NEWSTYLE | NO_ZEROES);
        let machine = Self {
            exports,
            tls,
            secure: false,
            greeted: false,
            no_zeroes: false,
            structured: false,
            chosen: None,
            options: 0,
        };
        (machine, out)
    }

    /// TLS is up: what was haggled before counts no more.
    pub fn secured(&mut self) {
        self.secure = true;
        self.structured = false;
        self.chosen = None;
    }

    /// Takes what it can off the front of `bytes`: how many, what to do next; answers are appended to `out`. One
    /// option at a time, so that what follows STARTTLS or GO is left to others.
    pub fn take(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> (usize, Next) {
        let mut fields = Fields(bytes);
        if !self.greeted {
            let Some(flags) = fields.u32() else { return (0, Next::More) };
            if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
                return (4, Next::Close(Some("flags in the greeting that are not known")));
            }
            if flags & u32::from(FIXED_NEWSTYLE) == 0 {
                return (4, Next::Close(Some("a client that does not speak fixed newstyle")));
            }
            self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
            self.greeted = true;
            return (4, Next::More);
        }
        let (Some(magic), Some(number), Some(len)) = (fields.u64(), fields.u32(), fields.u32())
        else {
            return (0, Next::More);
        };
        if magic != IHAVEOPT {
            return (bytes.len(), Next::Close(Some("an option without its magic number")));
        }
        let len = len as usize;
        if len > OPTION_MAX {
            answer(out, number, reply::ERR_TOO_BIG, b"the option's data are too long");
            return (bytes.len(), Next::Close(Some("an option of more than 64 KiB")));
        }
        let Some(data) = fields.bytes(len) else { return (0, Next::More) };
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return (bytes.len(), Next::Close(Some("more than 1024 options")));
        }
        (HEAD + len, self.option(number, data, out))
    }

    fn option(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) -> Next {
        let closed = self.tls == TlsPolicy::Required && !self.secure;
        match number {
            option::ABORT => {
                answer(out, number, reply::ACK, b"");
                return Next::Close(None);
            }
            option::STARTTLS => return self.start_tls(data, out),
            option::EXPORT_NAME if closed => {
                // There is no way to tell an error here.
                return Next::Close(Some("EXPORT_NAME before STARTTLS, which is required"));
            }
            _ if closed => {
                answer(out, number, reply::ERR_TLS_REQD, b"this server wants STARTTLS first");
            }
            option::EXPORT_NAME => return self.export_name(data, out),
            option::LIST => self.list(data, out),
            option::INFO | option::GO => return self.go(number, data, out),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                answer(out, number, reply::ACK, b"");
            }
            option::STRUCTURED_REPLY => invalid(out, number, b"STRUCTURED_REPLY has no data"),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(number, data, out);
            }
            _ => answer(out, number, reply::ERR_UNSUP, b"this option is not known here"),
        }
        Next::More
    }

    fn start_tls(&mut self, data: &[u8], out: &mut Vec<u8>) -> Next {
        let number = option::STARTTLS;
        if !data.is_empty() || self.secure {
            invalid(out, number, b"STARTTLS has no data, and comes once");
            return Next::More;
        }
        if self.tls == TlsPolicy::Off {
            answer(out, number, reply::ERR_POLICY, b"this server has no certificates");
            return Next::More;
        }
        answer(out, number, reply::ACK, b"");
        Next::StartTls
    }

    fn agreed(&self, name: &str, export: &Export) -> Next {
        Next::Transmit(Box::new(Agreed {
            name: name.to_owned(),
            export: export.clone(),
            structured: self.structured,
            block_status: self.chosen.as_deref() == Some(name),
        }))
    }

    fn export_name(&mut self, data: &[u8], out: &mut Vec<u8>) -> Next {
        let Some((name, export)) = self.exports.find(data) else {
            return Next::Close(Some("EXPORT_NAME of an export that there is not"));
        };
        Put(out).u64(export.device.size()).u16(flags(export, self.structured));
        if !self.no_zeroes {
            out.resize(out.len() + 124, 0);
        }
        self.agreed(name, export)
    }

    fn list(&self, data: &[u8], out: &mut Vec<u8>) {
        if !data.is_empty() {
            return invalid(out, option::LIST, b"LIST has no data");
        }
        for (name, export) in self.exports.iter().take(LIST_MAX) {
            let mut told = Vec::new();
            Put(&mut told).u32(name.len() as u32).bytes(name.as_bytes());
            Put(&mut told).bytes(export.description.as_bytes());
            answer(out, option::LIST, reply::SERVER, &told);
        }
        answer(out, option::LIST, reply::ACK, b"");
    }

    fn go(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) -> Next {
        let Some((name, wanted)) = parse_go(data) else {
            invalid(out, number, b"a name with its length, and a list of numbers with its own");
            return Next::More;
        };
        let Some((name, export)) = self.exports.find(name) else {
            answer(out, number, reply::ERR_UNKNOWN, b"no export has this name");
            return Next::More;
        };
        let traits = export.device.traits();
        if traits.block_min > 1 && !wanted.contains(&info::BLOCK_SIZE) && number == option::GO {
            // Clients that do not ask keep to 512 bytes, says the protocol; more they must know of.
            if traits.block_min > 512 {
                answer(out, number, reply::ERR_BLOCK_SIZE_REQD, b"ask for the block sizes");
                return Next::More;
            }
        }
        let mut tell = |kind: u16, put: &dyn Fn(&mut Put<'_>)| {
            let mut told = Vec::new();
            put(Put(&mut told).u16(kind));
            answer(out, number, reply::INFO, &told);
        };
        tell(info::EXPORT, &|put| {
            put.u64(export.device.size()).u16(flags(export, self.structured));
        });
        tell(info::BLOCK_SIZE, &|put| {
            put.u32(traits.block_min).u32(traits.block_preferred).u32(PAYLOAD_MAX);
        });
        if wanted.contains(&info::NAME) {
            tell(info::NAME, &|put| {
                put.bytes(name.as_bytes());
            });
        }
        if wanted.contains(&info::DESCRIPTION) && !export.description.is_empty() {
            tell(info::DESCRIPTION, &|put| {
                put.bytes(export.description.as_bytes());
            });
        }
        answer(out, number, reply::ACK, b"");
        if number == option::GO { self.agreed(name, export) } else { Next::More }
    }

    fn meta_context(&mut self, number: u32, data: &[u8], out: &mut Vec<u8>) {
        if number == option::SET_META_CONTEXT {
            self.chosen = None;
        }
        if !self.structured {
            return invalid(out, number, b"STRUCTURED_REPLY comes first");
        }
        let Some((name, queries)) = parse_meta(data) else {
            return invalid(out, number, b"a name with its length, and queries with theirs");
        };
        let Some((name, _)) = self.exports.find(name) else {
            return answer(out, number, reply::ERR_UNKNOWN, b"no export has this name");
        };
        let setting = number == option::SET_META_CONTEXT;
        // No query at all lists everything, and sets nothing; so does, when listing, a namespace alone.
        let all = !setting && queries.is_empty();
        let means = |query: &&[u8]| **query == *BASE_ALLOCATION.as_bytes();
        let namespace = |query: &&[u8]| !setting && **query == *b"base:";
        if all || queries.iter().any(|query| means(query) || namespace(query)) {
            let mut told = Vec::new();
            let id = if setting { BASE_ALLOCATION_ID } else { 0 };
            Put(&mut told).u32(id).bytes(BASE_ALLOCATION.as_bytes());
            answer(out, number, reply::META_CONTEXT, &told);
            if setting {
                self.chosen = Some(name.to_owned());
            }
        }
        answer(out, number, reply::ACK, b"");
    }
}

/// One reply to an option. Errors carry their text.
fn answer(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    Put(out).u64(REPLY_MAGIC).u32(option).u32(kind).u32(data.len() as u32).bytes(data);
}

fn invalid(out: &mut Vec<u8>, option: u32, why: &[u8]) {
    answer(out, option, reply::ERR_INVALID, why);
}

/// Data of INFO and GO: the name, and which information is wanted.
fn parse_go(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut fields = Fields(data);
    let len = fields.u32()? as usize;
    let name = fields.bytes(len).filter(|_| len <= NAME_MAX)?;
    let count = fields.u16()?;
    let wanted = (0..count).map(|_| fields.u16()).collect::<Option<_>>()?;
    fields.0.is_empty().then_some((name, wanted))
}

/// Data of the options about contexts: the name, and the queries.
fn parse_meta(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut fields = Fields(data);
    let len = fields.u32()? as usize;
    let name = fields.bytes(len).filter(|_| len <= NAME_MAX)?;
    let count = fields.u32()? as usize;
    // Each takes four bytes at least: the count is no reason to set memory aside.
    if count > fields.0.len() / 4 {
        return None;
    }
    let mut queries = Vec::with_capacity(count);
    for _ in 0..count {
        let len = fields.u32()? as usize;
        queries.push(fields.bytes(len).filter(|_| len <= NAME_MAX)?);
    }
    fields.0.is_empty().then_some((name, queries))
}

/// What an export can do.
fn flags(export: &Export, structured: bool) -> u16 {
    let traits = export.device.traits();
    let mut flags = transmission::HAS_FLAGS | transmission::SEND_CACHE;
    if traits.read_only {
        flags |= transmission::READ_ONLY;
    } else {
        flags |= transmission::SEND_FLUSH
            | transmission::SEND_FUA
            | transmission::SEND_TRIM
            | transmission::SEND_WRITE_ZEROES
            | transmission::SEND_FAST_ZERO;
    }
    if structured {
        flags |= transmission::SEND_DF;
    }
    if export.multi_conn || traits.read_only {
        flags |= transmission::CAN_MULTI_CONN;
    }
    flags
}
