//! A small client, for tests and benches: one connection, any number of requests in flight.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use base::Errno;

use super::proto::{
    BASE_ALLOCATION, CHUNK_MAGIC, Fields, IHAVEOPT, NBDMAGIC, Put, REPLY_MAGIC, REQUEST_MAGIC,
    SIMPLE_MAGIC, chunk, command, errno, info, option, reply,
};
use super::server::Address;

/// What the client runs over.
pub trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A reply to an option: its kind and data.
pub type OptionReply = (u32, Vec<u8>);

/// What a server said to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The mark of the request.
    pub cookie: u64,
    /// What it came to: bytes of a read, or none.
    pub result: Result<Vec<u8>, Errno>,
    /// Lengths and flags of block status.
    pub extents: Vec<(u32, u32)>,
}

/// A connection.
pub struct Client {
    stream: Box<dyn Stream>,
    /// Bytes that came and were not looked at.
    ahead: Vec<u8>,
    at: usize,
    /// Bytes of the export.
    pub size: u64,
    /// What it can do.
    pub flags: u16,
    /// Length of each read in flight, for simple replies.
    reads: std::collections::HashMap<u64, u32>,
    next: u64,
    structured: bool,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("size", &self.size).finish_non_exhaustive()
    }
}

fn odd(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Connects a socket; whatever takes longer than ten seconds is an error.
pub fn connect(address: &Address) -> io::Result<Box<dyn Stream>> {
    let limit = Some(Duration::from_secs(10));
    Ok(match address {
        Address::Tcp(address) => {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(limit)?;
            Box::new(stream)
        }
        Address::Unix(path) => {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(limit)?;
            Box::new(stream)
        }
    })
}

impl Client {
    /// Connects and greets.
    pub fn greet(address: &Address) -> io::Result<Self> {
        Self::greet_over(connect(address)?)
    }

    /// The same over a stream.
    pub fn greet_over(stream: Box<dyn Stream>) -> io::Result<Self> {
        let mut client = Self::over(stream);
        let head = client.read(18)?;
        let mut fields = Fields(&head);
        if fields.u64() != Some(NBDMAGIC) || fields.u64() != Some(IHAVEOPT) {
            return Err(odd("no newstyle server"));
        }
        let mut out = Vec::new();
        Put(&mut out).u32(3);
        client.stream.write_all(&out)?;
        Ok(client)
    }

    /// A client over a stream on which nothing was said yet, or that goes on under TLS.
    pub fn over(stream: Box<dyn Stream>) -> Self {
        Self {
            stream,
            ahead: Vec::new(),
            at: 0,
            size: 0,
            flags: 0,
            reads: std::collections::HashMap::new(),
            next: 1,
            structured: false,
        }
    }

    /// The stream below, for what goes on under TLS.
    pub fn into_stream(self) -> Box<dyn Stream> {
        self.stream
    }

    /// Connects, greets, and agrees on an export with structured replies and block status.
    pub fn open(address: &Address, name: &str) -> io::Result<Self> {
        let mut client = Self::greet(address)?;
        client.agree(name, true)?;
        Ok(client)
    }

    /// Haggles until requests may be sent.
    pub fn agree(&mut self, name: &str, structured: bool) -> io::Result<()> {
        if structured {
            self.option(option::STRUCTURED_REPLY, b"")?;
            self.structured = true;
            let mut data = Vec::new();
            Put(&mut data).u32(name.len() as u32).bytes(name.as_bytes()).u32(1);
            Put(&mut data).u32(BASE_ALLOCATION.len() as u32).bytes(BASE_ALLOCATION.as_bytes());
            self.option(option::SET_META_CONTEXT, &data)?;
        }
        let mut data = Vec::new();
        Put(&mut data).u32(name.len() as u32).bytes(name.as_bytes()).u16(1).u16(info::BLOCK_SIZE);
        for (kind, told) in self.option(option::GO, &data)? {
            let mut fields = Fields(&told);
            if kind == reply::INFO && fields.u16() == Some(info::EXPORT) {
                self.size = fields.u64().ok_or_else(|| odd("short information"))?;
                self.flags = fields.u16().ok_or_else(|| odd("short information"))?;
            }
        }
        Ok(())
    }

    /// Sends an option and reads its replies up to the last; an error reply is an error with its text.
    pub fn option(&mut self, number: u32, data: &[u8]) -> io::Result<Vec<OptionReply>> {
        let mut out = Vec::new();
        Put(&mut out).u64(IHAVEOPT).u32(number).u32(data.len() as u32).bytes(data);
        self.send(&out)?;
        let mut told = Vec::new();
        loop {
            let head = self.read(20)?;
            let mut fields = Fields(&head);
            let (magic, of) = (fields.u64(), fields.u32());
            let kind = fields.u32().unwrap_or(0);
            let len = fields.u32().unwrap_or(0);
            if magic != Some(REPLY_MAGIC) || of != Some(number) {
                return Err(odd("a reply to something else"));
            }
            let data = self.read(len as usize)?;
            if kind >> 31 != 0 {
                let text = String::from_utf8_lossy(&data).into_owned();
                return Err(io::Error::other(format!("{:#x}: {text}", kind)));
            }
            if kind == reply::ACK {
                return Ok(told);
            }
            told.push((kind, data));
        }
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// The next `len` bytes.
    pub fn read(&mut self, len: usize) -> io::Result<Vec<u8>> {
        while self.ahead.len() - self.at < len {
            self.ahead.drain(..self.at);
            self.at = 0;
            let have = self.ahead.len();
            self.ahead.resize(have.max(len) + (64 << 10), 0);
            let got = self.stream.read(&mut self.ahead[have..]);
            self.ahead.truncate(have + got.as_ref().map_or(0, |n| *n));
            if got? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let bytes = self.ahead[self.at..self.at + len].to_vec();
        self.at += len;
        Ok(bytes)
    }

    /// Appends a request to `out`: its mark.
    pub fn put(
        &mut self,
        out: &mut Vec<u8>,
        (command, flags): (u16, u16),
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> u64 {
        let cookie = self.next;
        self.next += 1;
        if command == command::READ {
            self.reads.insert(cookie, len);
        }
        Put(out).u32(REQUEST_MAGIC).u16(flags).u16(command).u64(cookie).u64(offset).u32(len);
        out.extend_from_slice(data);
        cookie
    }

    /// Sends a request: its mark.
    pub fn ask(&mut self, what: (u16, u16), offset: u64, len: u32, data: &[u8]) -> io::Result<u64> {
        let mut out = Vec::with_capacity(28 + data.len());
        let cookie = self.put(&mut out, what, offset, len, data);
        self.send(&out)?;
        Ok(cookie)
    }

    /// Whether a simple reply, or the head of another, has come already.
    pub fn has_reply(&self) -> bool {
        let have = &self.ahead[self.at..];
        let mut fields = Fields(have);
        let (magic, _, cookie) = (fields.u32(), fields.u32(), fields.u64());
        let data = cookie.and_then(|c| self.reads.get(&c)).copied().unwrap_or(0);
        magic.is_some() && cookie.is_some() && fields.0.len() >= data as usize
    }

    /// The next reply, whichever it is of.
    pub fn reply(&mut self) -> io::Result<Reply> {
        let head = self.read(16)?;
        let mut fields = Fields(&head);
        match fields.u32() {
            Some(SIMPLE_MAGIC) => {
                let error = fields.u32().unwrap_or(0);
                let cookie = fields.u64().unwrap_or(0);
                let len = self.reads.remove(&cookie).unwrap_or(0);
                let result = match error {
                    0 => Ok(self.read(len as usize)?),
                    error => Err(errno(error)),
                };
                Ok(Reply { cookie, result, extents: Vec::new() })
            }
            Some(CHUNK_MAGIC) if self.structured => {
                let flags = fields.u16().unwrap_or(0);
                let kind = fields.u16().unwrap_or(0);
                let cookie = fields.u64().unwrap_or(0);
                let len = self.read(4)?;
                let len = Fields(&len).u32().unwrap_or(0) as usize;
                let body = self.read(len)?;
                if flags & chunk::DONE == 0 {
                    return Err(odd("our server sends one chunk"));
                }
                self.reads.remove(&cookie);
                let mut body = Fields(&body);
                let mut answer = Reply { cookie, result: Ok(Vec::new()), extents: Vec::new() };
                match kind {
                    chunk::NONE => {}
                    chunk::OFFSET_DATA => {
                        body.u64();
                        answer.result = Ok(body.0.to_vec());
                    }
                    chunk::BLOCK_STATUS => {
                        body.u32();
                        while let (Some(len), Some(state)) = (body.u32(), body.u32()) {
                            answer.extents.push((len, state));
                        }
                    }
                    chunk::ERROR | chunk::ERROR_OFFSET => {
                        answer.result = Err(errno(body.u32().unwrap_or(5)));
                    }
                    _ => return Err(odd("a chunk of an unknown kind")),
                }
                Ok(answer)
            }
            _ => Err(odd("a reply without its magic number")),
        }
    }

    /// Sends a request and waits for its reply, when nothing else is in flight.
    pub fn call(
        &mut self,
        what: (u16, u16),
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> io::Result<Reply> {
        let cookie = self.ask(what, offset, len, data)?;
        let reply = self.reply()?;
        if reply.cookie == cookie { Ok(reply) } else { Err(odd("a reply to something else")) }
    }
}
