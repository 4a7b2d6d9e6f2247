//! What a key-value server answers: read, or refused in words, and never more kept than came.

use kv::resp::{Reply, reply};

fn weight(reply: &Reply) -> usize {
    match reply {
        Reply::Array(all) => all.iter().map(weight).sum::<usize>() + 1,
        Reply::Bytes(Some(bytes)) => bytes.len(),
        Reply::Status(text) | Reply::Error(text) => text.len(),
        Reply::Int(_) | Reply::Bytes(None) => 0,
    }
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok(read) = reply(&mut rest) {
        // What is no text takes three bytes for one.
        assert!(weight(&read) <= 3 * bytes.len());
        let _ = read.number::<u64>();
        let _ = read.bytes();
    }
}

/// Answers of a server.
pub fn seeds() -> Vec<Vec<u8>> {
    let texts: [&[u8]; 8] = [
        b"+OK\r\n",
        b"-ERR unknown command\r\n:12\r\n",
        b"$5\r\na\r\nbc\r\n",
        b"$-1\r\n*-1\r\n",
        b"*2\r\n:0\r\n*3\r\n$1\r\na\r\n$0\r\n\r\n:-5\r\n",
        b"*0\r\n$0\r\n\r\n",
        b"*3\r\n:0\r\n$2\r\n10\r\n*2\r\n$3\r\nabc\r\n$-1\r\n",
        b"*1\r\n*1\r\n*1\r\n*1\r\n+deep\r\n",
    ];
    texts.iter().map(|text| text.to_vec()).collect()
}
