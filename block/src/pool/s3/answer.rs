//! Answers of HTTP/1.1, as they come from a server that may say anything: every length is bounded.

use std::io;

/// Most bytes of the status line and the headers.
pub(super) const HEAD_MAX: usize = 64 << 10;

fn broken(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Where bytes come from.
pub trait Source {
    /// Appends some that have come; false at the end of the stream.
    ///
    /// # Errors
    /// None come any more.
    fn more(&mut self, ahead: &mut Vec<u8>) -> io::Result<bool>;
}

/// What a server answered.
#[derive(Debug)]
pub struct Response {
    /// 200 and so on.
    pub status: u16,
    headers: Vec<(String, String)>,
    /// The bytes.
    pub body: Vec<u8>,
}

impl Response {
    /// A header, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }
}

type Head = (u16, Vec<(String, String)>);

/// Answers, one after the other.
#[derive(Debug)]
pub struct Answers<S> {
    pub(super) source: S,
    /// Read, and not taken.
    ahead: Vec<u8>,
}

impl<S: Source> Answers<S> {
    /// Those that come from there.
    pub fn new(source: S) -> Self {
        Self { source, ahead: Vec::new() }
    }

    /// Whether nothing has come that nobody has taken.
    pub fn is_clean(&self) -> bool {
        self.ahead.is_empty()
    }

    /// A line without its end, at most `max` bytes.
    fn line(&mut self, max: usize) -> io::Result<String> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.ahead[searched..].iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.ahead.drain(..=searched + at).collect();
                let line = line.strip_suffix(b"\n").unwrap_or(&line);
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                return String::from_utf8(line.to_vec()).map_err(|_| broken("a line is no text"));
            }
            searched = self.ahead.len();
            if searched > max {
                return Err(broken("a line without an end"));
            }
            if !self.source.more(&mut self.ahead)? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Appends exactly so many bytes.
    fn take(&mut self, count: usize, out: &mut Vec<u8>) -> io::Result<()> {
        let end = out.len() + count;
        loop {
            let n = self.ahead.len().min(end - out.len());
            out.extend(self.ahead.drain(..n));
            if out.len() == end {
                return Ok(());
            }
            if !self.source.more(&mut self.ahead)? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn head(&mut self) -> io::Result<Head> {
        let first = self.line(HEAD_MAX)?;
        let mut words = first.split(' ');
        let version = words.next().unwrap_or_default();
        let status =
            words.next().and_then(|word| word.parse().ok()).filter(|s| (100..600).contains(s));
        let (true, Some(status)) = (version.starts_with("HTTP/1."), status) else {
            let begins: String = first.chars().take(40).collect();
            return Err(broken(format!("{begins:?} is no answer of HTTP/1")));
        };
        let (mut headers, mut left) = (Vec::new(), HEAD_MAX);
        loop {
            let line = self.line(left)?;
            if line.is_empty() {
                return Ok((status, headers));
            }
            left =
                left.checked_sub(line.len() + 2).ok_or_else(|| broken("headers without an end"))?;
            let (name, value) =
                line.split_once(':').ok_or_else(|| broken("a header without a colon"))?;
            headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// The next answer, of at most so many bytes, and whether another may follow. `bodiless`: it has no bytes, though its headers say how
    /// many there would be.
    ///
    /// # Errors
    /// What comes is no answer, is too long, or ends too soon.
    pub fn next(&mut self, bodiless: bool, most: usize) -> io::Result<(Response, bool)> {
        let (status, headers) = loop {
            let (status, headers) = self.head()?;
            // 1xx are words on the way.
            if status >= 200 {
                break (status, headers);
            }
        };
        let mut response = Response { status, headers, body: Vec::new() };
        let mut again =
            response.header("connection").is_none_or(|v| !v.eq_ignore_ascii_case("close"));
        if bodiless || matches!(status, 204 | 304) {
            return Ok((response, again));
        }
        let chunked = response
            .header("transfer-encoding")
            .is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
        let length = response.header("content-length").map(str::to_owned);
        let too_long = || broken(format!("an answer of more than {} bytes", most));
        if chunked {
            loop {
                let line = self.line(1024)?;
                let digits = line.split(';').next().unwrap_or_default().trim();
                let size = usize::from_str_radix(digits, 16)
                    .map_err(|_| broken(format!("{line:?} is no size of a chunk")))?;
                if size == 0 {
                    while !self.line(HEAD_MAX)?.is_empty() {}
                    break;
                }
                if size > most - response.body.len() {
                    return Err(too_long());
                }
                self.take(size, &mut response.body)?;
                if !self.line(2)?.is_empty() {
                    return Err(broken("a chunk is longer than it says"));
                }
            }
        } else if let Some(length) = length {
            let size: usize =
                length.parse().map_err(|_| broken(format!("{length:?} is no length")))?;
            if size > most {
                return Err(too_long());
            }
            self.take(size, &mut response.body)?;
        } else {
            // Until its end.
            again = false;
            response.body.append(&mut self.ahead);
            while self.source.more(&mut self.ahead)? {
                response.body.append(&mut self.ahead);
                if response.body.len() > most {
                    return Err(too_long());
                }
            }
        }
        Ok((response, again))
    }
}
