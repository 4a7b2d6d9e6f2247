//! How one process of Corbel tells another about itself: a Unix socket beside the pid file that
//! answers every connection with one JSON object and closes. No request, so nothing to parse.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::failure::{Context, Failure, Kind, Result};

/// Longest answer that is read.
const ANSWER_MAX: u64 = 4 << 20;

/// Answers on `path` from a thread of its own until the process ends.
pub fn answer(path: &Path, about: impl Fn() -> Value + Send + 'static) -> Result<()> {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).context(path.display())?;
    let serve = move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
            let _ = stream.write_all(about().to_string().as_bytes());
        }
    };
    std::thread::Builder::new().name("status".into()).spawn(serve).context("status thread")?;
    Ok(())
}

/// Asks the process behind `path`.
pub fn ask(path: &Path, patience: Duration) -> Result<Value> {
    let unreachable = |why: String| {
        Failure::new(
            Kind::Unreachable,
            format!("{}: {why}", path.display()),
            "is the service running? `corbel serve`, or `corbel cluster status`",
        )
    };
    let end = Instant::now() + patience;
    let mut stream = UnixStream::connect(path).map_err(|e| unreachable(e.to_string()))?;
    let mut text = Vec::new();
    let mut buffer = vec![0u8; 64 << 10];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || text.len() as u64 > ANSWER_MAX {
            return Err(unreachable(format!("no whole answer within {patience:?}")));
        }
        stream.set_read_timeout(Some(left)).map_err(|e| unreachable(e.to_string()))?;
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(got) => text.extend_from_slice(&buffer[..got]),
            Err(error) => return Err(unreachable(error.to_string())),
        }
    }
    serde_json::from_slice(&text).map_err(|e| unreachable(format!("strange answer: {e}")))
}

/// The socket on which a process called `name` answers, in the run directory `dir`.
pub fn socket(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.status"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_and_gives_up() {
        let dir = std::env::temp_dir().join(format!("corbel-ask-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = socket(&dir, "x");
        let second = Duration::from_secs(1);
        assert_eq!(ask(&path, second).unwrap_err().kind, Kind::Unreachable);
        answer(&path, || serde_json::json!({"epoch": 3})).unwrap();
        assert_eq!(ask(&path, second).unwrap()["epoch"], 3);
        assert_eq!(ask(&path, second).unwrap()["epoch"], 3);
        // One that hangs: connected to, but silent.
        let silent = socket(&dir, "silent");
        let _listener = UnixListener::bind(&silent).unwrap();
        let begin = Instant::now();
        assert!(ask(&silent, Duration::from_millis(100)).is_err());
        assert!(begin.elapsed() < Duration::from_secs(5));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
