//! /metrics over HTTP: just enough of HTTP/1.0 for a scraper on this machine.
//!
//! One connection at a time, a request of at most 4 KiB within a second: a client that sends
//! slowly, much or nonsense costs one short wait and gets an error. It has no password, so the
//! configuration allows loopback addresses only.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::failure::{Context, Result};

const REQUEST_BYTES_MAX: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(1);

/// What a metric is, in the words of the exposition format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// The text of a scrape, version 0.0.4.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Adds one metric without labels.
    pub fn add(&mut self, kind: MetricKind, name: &str, help: &str, value: f64) {
        self.head(kind, name, help);
        let _ = writeln!(self.text, "{name} {value}");
    }

    /// Adds one metric with a value for each of several, of which the label says whose it is. None, if there are no values.
    pub fn add_each(
        &mut self,
        kind: MetricKind,
        (name, help): (&str, &str),
        label: &str,
        values: &[(String, f64)],
    ) {
        if values.is_empty() {
            return;
        }
        self.head(kind, name, help);
        for (whose, value) in values {
            let whose = whose.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = writeln!(self.text, "{name}{{{label}=\"{whose}\"}} {value}");
        }
    }

    fn head(&mut self, kind: MetricKind, name: &str, help: &str) {
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
        };
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// The text.
    pub fn finish(self) -> String {
        self.text
    }
}

/// The text of a scrape, from what a service says of itself: numbers are gauges, those under
/// `counters` counters, lists their lengths.
pub fn from_status(said: &serde_json::Value) -> String {
    let mut out = Exposition::default();
    for (key, value) in said.as_object().into_iter().flatten() {
        let name = metric_name(key);
        match value {
            serde_json::Value::Object(fields) if key == "counters" => {
                for (key, value) in fields {
                    let (name, help) = (format!("{}_total", metric_name(key)), "Since the start.");
                    let value = value.as_f64().unwrap_or(0.0);
                    out.add(MetricKind::Counter, &name, help, value);
                }
            }
            serde_json::Value::Array(items) => {
                let name = format!("{name}_count");
                out.add(MetricKind::Gauge, &name, "How many there are.", items.len() as f64);
            }
            serde_json::Value::Bool(is) => {
                out.add(MetricKind::Gauge, &name, "1 for yes.", f64::from(u8::from(*is)));
            }
            _ => {
                if let Some(number) = value.as_f64() {
                    out.add(MetricKind::Gauge, &name, "As it is now.", number);
                }
            }
        }
    }
    out.finish()
}

fn metric_name(key: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    format!("corbel_{}", key.chars().map(safe).collect::<String>())
}

/// Listens on `address` and answers from a thread of its own until the process ends. Returns the
/// address in use (of interest for port 0).
pub fn serve(
    address: SocketAddr,
    scrape: impl Fn() -> String + Send + 'static,
) -> Result<SocketAddr> {
    let listener = bind(address)?;
    let bound = listener.local_addr().context(address)?;
    serve_on(listener, scrape)?;
    Ok(bound)
}

/// Where [`serve_on`] will answer: for a process that must listen before it cuts itself off, and starts threads after that.
pub fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).context(format!("metrics on {address}"))
}

/// The same as [`serve`] where somebody listens already.
pub fn serve_on(listener: TcpListener, scrape: impl Fn() -> String + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name("metrics".into())
        .spawn(move || {
            for stream in listener.incoming() {
                match stream.and_then(|s| answer(s, &scrape)) {
                    Ok(()) => {}
                    Err(error) => {
                        log::debug!("metrics: {error}");
                        std::thread::sleep(Duration::from_millis(10));
                    }
                }
            }
        })
        .context("metrics thread")?;
    Ok(())
}

fn answer(mut stream: TcpStream, scrape: &impl Fn() -> String) -> std::io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = read_request(&mut stream)?;
    let (status, body) = match request.as_deref() {
        Some("/metrics") => ("200 OK", scrape()),
        Some("/") => ("200 OK", "/metrics has the metrics\n".into()),
        Some(_) => ("404 Not Found", "only /metrics is here\n".into()),
        None => ("400 Bad Request", "GET /metrics HTTP/1.0 is what this understands\n".into()),
    };
    let head = format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// The path asked for, or `None` when it is no request that we understand.
fn read_request(stream: &mut TcpStream) -> std::io::Result<Option<String>> {
    let end = Instant::now() + PATIENCE;
    let mut bytes = Vec::new();
    let mut buffer = [0u8; 512];
    while !bytes.windows(4).any(|w| w == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || bytes.len() > REQUEST_BYTES_MAX {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left))?;
        let got = stream.read(&mut buffer)?;
        if got == 0 {
            return Ok(None);
        }
        bytes.extend_from_slice(&buffer[..got]);
    }
    let line = bytes.split(|b| *b == b'\r').next().unwrap_or_default();
    let mut words = line.split(|b| *b == b' ');
    let (method, path, version) = (words.next(), words.next(), words.next());
    let right = method == Some(b"GET") && version.is_some_and(|v| v.starts_with(b"HTTP/1."));
    let path = path.map(|p| p.split(|b| *b == b'?').next().unwrap_or_default());
    Ok(path.filter(|_| right).map(|p| String::from_utf8_lossy(p).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(request);
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        String::from_utf8_lossy(&reply).into_owned()
    }

    #[test]
    fn a_status_becomes_metrics() {
        let text = from_status(&serde_json::json!({
            "epoch": 3, "role": "head", "chain": [1, 2], "counters": {"fsyncs": 5}, "bad name": 1,
        }));
        for line in
            ["corbel_epoch 3", "corbel_chain_count 2", "corbel_fsyncs_total 5", "corbel_bad_name 1"]
        {
            assert!(text.lines().any(|l| l == line), "{line} in {text}");
        }
        assert!(!text.contains("role"));
    }

    #[test]
    fn a_label_says_whose_it_is() {
        let mut out = Exposition::default();
        let of = |name: &str| (name.to_owned(), 2.5);
        let said = ("corbel_x", "X.");
        out.add_each(MetricKind::Gauge, said, "tenant", &[of("a"), of("b\"\\\n")]);
        out.add_each(MetricKind::Gauge, ("corbel_y", "Y."), "tenant", &[]);
        let text = "# HELP corbel_x X.\n# TYPE corbel_x gauge\n\
            corbel_x{tenant=\"a\"} 2.5\ncorbel_x{tenant=\"b\\\"\\\\\\n\"} 2.5\n";
        assert_eq!(out.finish(), text);
    }

    #[test]
    fn scrapes_and_nonsense() {
        let address = serve("127.0.0.1:0".parse().unwrap(), || {
            let mut out = Exposition::default();
            out.add(MetricKind::Counter, "corbel_x_total", "X.", 3.0);
            out.finish()
        })
        .unwrap();
        let good = ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(good.starts_with("HTTP/1.0 200 OK\r\n"), "{good}");
        assert!(good.ends_with("# TYPE corbel_x_total counter\ncorbel_x_total 3\n"), "{good}");
        assert!(ask(address, b"GET /etc/passwd HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 404"));
        assert!(ask(address, b"POST /metrics HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 400"));
        assert!(ask(address, b"\0\xff \r\n\r\n").starts_with("HTTP/1.0 400"));
        assert!(!ask(address, &[b'x'; 100_000]).contains("200 OK"));
        assert!(ask(address, b"GET / HTTP/1.0\r\n\r\n").contains("200 OK"), "still answers");
    }
}
