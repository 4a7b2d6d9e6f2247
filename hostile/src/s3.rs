//! What a server of buckets answers: read, or refused in words, and never more kept than was asked for.

use std::io;

use block::pool::s3::answer::{Answers, Source};
use block::pool::s3::{page, part};

/// Bytes that come a few at a time.
struct Drip<'a>(&'a [u8], usize);

impl Source for Drip<'_> {
    fn more(&mut self, ahead: &mut Vec<u8>) -> io::Result<bool> {
        let (now, later) = self.0.split_at(self.0.len().min(self.1));
        ahead.extend_from_slice(now);
        self.0 = later;
        Ok(!now.is_empty())
    }
}

/// The target: how many bytes come at a time, how long an answer may be, which bytes of it are wanted, and the answers.
pub fn run(bytes: &[u8]) {
    let [piece, most, offset, rest @ ..] = bytes else { return };
    let (most, offset) = (usize::from(*most) * 16, u64::from(*offset));
    let mut answers = Answers::new(Drip(rest, usize::from(*piece) + 1));
    while let Ok((answer, again)) = answers.next(piece % 7 == 6, most) {
        assert!(answer.body.len() <= most, "{} bytes, {most} asked for", answer.body.len());
        let mut names = Vec::new();
        if page(&answer.body, "vm/", &mut names).is_ok() {
            assert!(names.iter().map(String::len).sum::<usize>() <= answer.body.len());
        }
        if let Ok(part) = part(answer, offset, 64) {
            assert!(part.len() <= 64);
        }
        if !again {
            break;
        }
    }
}

/// Answers of a server.
pub fn seeds() -> Vec<Vec<u8>> {
    let list = "<ListBucketResult><Contents><Key>vm/a&amp;b</Key></Contents><IsTruncated>true</IsTruncated>\
                <NextContinuationToken>vm/a</NextContinuationToken></ListBucketResult>";
    let texts = [
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 204 Gone\r\n\r\n".to_owned(),
        "HTTP/1.1 206 Part\r\nContent-Range: bytes 7-9/12\r\nContent-Length: 3\r\n\r\nabc".to_owned(),
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;of=1\r\nabc\r\n0\r\nTrailer: yes\r\n\r\n"
            .to_owned(),
        "HTTP/1.1 100 Go on\r\n\r\nHTTP/1.0 404 No\r\nConnection: close\r\n\r\n<Error><Code>NoSuchKey</Code></Error>"
            .to_owned(),
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{list}", list.len()),
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", u64::MAX),
        format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n", u64::MAX),
        format!("x{}\r\n\r\n", "ä".repeat(40)),
    ];
    texts.iter().map(|text| [&[200, 64, 8], text.as_bytes()].concat()).collect()
}
