//! RESP, the protocol of Redis, version 2 (redis.io, "Redis serialization protocol specification"): commands as arrays of strings, and
//! replies, of which nothing is believed that was not asked for.

use std::io::{self, BufRead, Read};

/// Bytes of one string of a reply at most: a read of the longest kind, and something.
pub const STRING_MAX: usize = 4 << 20;
/// Replies within one reply at most.
pub const ARRAY_MAX: usize = 1 << 16;
/// Replies within replies within …
pub const DEPTH_MAX: usize = 8;
/// Bytes of one reply, all in all.
pub const REPLY_MAX: usize = 16 << 20;
/// Bytes of a line: a number, or what went wrong.
const LINE_MAX: u64 = 4096;

/// What a server answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Done.
    Status(String),
    /// It went wrong, in the server's words.
    Error(String),
    /// A number.
    Int(i64),
    /// Bytes; None: there is nothing.
    Bytes(Option<Vec<u8>>),
    /// Several.
    Array(Vec<Reply>),
}

impl Reply {
    /// Its bytes, also of a number.
    pub fn bytes(self) -> Option<Vec<u8>> {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Int(number) => Some(number.to_string().into_bytes()),
            Self::Status(text) => Some(text.into_bytes()),
            Self::Error(_) | Self::Array(_) => None,
        }
    }

    /// Its number, also of bytes that are digits.
    pub fn number<T: std::str::FromStr>(&self) -> Option<T> {
        match self {
            Self::Int(number) => number.to_string().parse().ok(),
            Self::Bytes(Some(bytes)) => std::str::from_utf8(bytes).ok()?.parse().ok(),
            _ => None,
        }
    }
}

/// Appends a command to `to`.
pub fn command(parts: &[&[u8]], to: &mut Vec<u8>) {
    to.extend_from_slice(format!("*{}\r\n", parts.len()).as_bytes());
    for part in parts {
        to.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
        to.extend_from_slice(part);
        to.extend_from_slice(b"\r\n");
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("no RESP: {what}"))
}

fn line(from: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    from.by_ref().take(LINE_MAX).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match line.strip_suffix(b"\r\n") {
        Some(line) => Ok(line.to_vec()),
        None => Err(bad("a line without an end")),
    }
}

/// Reads one reply.
///
/// # Errors
/// The connection broke, or what came is no reply, or a longer one than is ever asked for.
pub fn reply(from: &mut impl BufRead) -> io::Result<Reply> {
    let mut left = REPLY_MAX;
    read(from, DEPTH_MAX, &mut left)
}

fn read(from: &mut impl BufRead, depth: usize, left: &mut usize) -> io::Result<Reply> {
    let line = line(from)?;
    let (kind, rest) = line.split_first().ok_or_else(|| bad("an empty line"))?;
    let mut charge = |bytes: usize| {
        *left = left.checked_sub(bytes).ok_or_else(|| bad("a reply that is too long"))?;
        Ok::<(), io::Error>(())
    };
    charge(16 + rest.len())?;
    let text = || String::from_utf8_lossy(rest).into_owned();
    let number = || {
        let text = std::str::from_utf8(rest).ok().filter(|text| !text.starts_with('+'));
        text.and_then(|text| text.parse::<i64>().ok()).ok_or_else(|| bad("a number"))
    };
    let length = |max: usize| match number()? {
        -1 => Ok(None),
        n => match usize::try_from(n).ok().filter(|n| *n <= max) {
            Some(n) => Ok(Some(n)),
            None => Err(bad("a length")),
        },
    };
    Ok(match kind {
        b'+' => Reply::Status(text()),
        b'-' => Reply::Error(text()),
        b':' => Reply::Int(number()?),
        b'$' => match length(STRING_MAX)? {
            None => Reply::Bytes(None),
            Some(len) => {
                charge(len)?;
                let mut bytes = vec![0; len];
                from.read_exact(&mut bytes)?;
                let mut end = [0; 2];
                from.read_exact(&mut end)?;
                if end != *b"\r\n" {
                    return Err(bad("a string without an end"));
                }
                Reply::Bytes(Some(bytes))
            }
        },
        b'*' => match length(ARRAY_MAX)? {
            None => Reply::Bytes(None),
            Some(_) if depth == 0 => return Err(bad("too deep")),
            Some(len) => {
                let mut all = Vec::new();
                for _ in 0..len {
                    all.push(read(from, depth - 1, left)?);
                }
                Reply::Array(all)
            }
        },
        _ => return Err(bad("a kind of reply that there is not")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(reply: &Reply, to: &mut Vec<u8>) {
        match reply {
            Reply::Status(text) => to.extend_from_slice(format!("+{text}\r\n").as_bytes()),
            Reply::Error(text) => to.extend_from_slice(format!("-{text}\r\n").as_bytes()),
            Reply::Int(n) => to.extend_from_slice(format!(":{n}\r\n").as_bytes()),
            Reply::Bytes(None) => to.extend_from_slice(b"$-1\r\n"),
            Reply::Bytes(Some(bytes)) => {
                to.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
                to.extend_from_slice(bytes);
                to.extend_from_slice(b"\r\n");
            }
            Reply::Array(all) => {
                to.extend_from_slice(format!("*{}\r\n", all.len()).as_bytes());
                all.iter().for_each(|one| encode(one, to));
            }
        }
    }

    fn any_reply() -> impl Strategy<Value = Reply> {
        let leaf = prop_oneof![
            "[ -~]{0,40}".prop_map(Reply::Status),
            "[ -~]{0,40}".prop_map(Reply::Error),
            any::<i64>().prop_map(Reply::Int),
            proptest::option::of(proptest::collection::vec(any::<u8>(), 0..100))
                .prop_map(Reply::Bytes),
        ];
        leaf.prop_recursive(4, 64, 8, |inner| {
            proptest::collection::vec(inner, 0..8).prop_map(Reply::Array)
        })
    }

    proptest! {
        #[test]
        fn what_was_said_is_heard(said in any_reply()) {
            let mut bytes = Vec::new();
            encode(&said, &mut bytes);
            prop_assert_eq!(reply(&mut &bytes[..]).unwrap(), said);
            // And nothing of it without its end.
            bytes.pop();
            prop_assert!(reply(&mut &bytes[..]).is_err());
        }

        #[test]
        fn anything_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = reply(&mut &bytes[..]);
        }
    }

    #[test]
    fn nothing_is_kept_for_what_is_only_promised() {
        for said in [
            "$99999999999\r\n",
            "*99999999\r\n",
            ":12a\r\n",
            ":+1\r\n",
            "$3\r\nabcd\r\n",
            "?\r\n",
            "\r\n",
            "$-2\r\n",
        ] {
            assert!(reply(&mut said.as_bytes()).is_err(), "{said:?}");
        }
        let deep = "*1\r\n".repeat(DEPTH_MAX + 1) + ":1\r\n";
        assert!(reply(&mut deep.as_bytes()).is_err());
        // Many strings, each of which would do.
        let mut long = format!("*{ARRAY_MAX}\r\n").into_bytes();
        for _ in 0..5 {
            encode(&Reply::Bytes(Some(vec![0; STRING_MAX])), &mut long);
        }
        let refused = reply(&mut &long[..]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn commands_are_arrays_of_strings() {
        let mut to = Vec::new();
        command(&[b"SET", b"k", b"a\r\nb"], &mut to);
        assert_eq!(to, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\na\r\nb\r\n");
    }
}
