//! The store in a bucket: against a server of the test's own that hangs, lies and tears, and, where there is one, against a real one.

mod rig;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::Errno;
use base::random::Random;
use block::pool::repair::{self, Orders};
use block::pool::s3::{Keys, S3};
use block::pool::store::Store;
use block::pool::{Image, Pool, Spec, StoreSpec};
use rig::disk::{check, work};

/// What a server does instead of what it should.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    Right,
    /// In chunks, each connection for one answer.
    Chunked,
    /// All of an object, whatever the range.
    Whole,
    /// It takes a request and says nothing.
    Hangs,
    /// It says half of the answer.
    Tears,
    /// It sends other bytes of the object than were asked for, and says so.
    OtherRange,
    /// It turns a bit of each object.
    Lies,
    Busy,
    NoBucket,
    Garbage,
    /// No HTTP either, and a letter of two bytes lies where an excerpt of it might end.
    Umlauts,
    EndlessHeader,
    TooLong,
}

const MODES: [Mode; 10] = [
    Mode::Hangs,
    Mode::Tears,
    Mode::OtherRange,
    Mode::Busy,
    Mode::NoBucket,
    Mode::Garbage,
    Mode::Umlauts,
    Mode::EndlessHeader,
    Mode::TooLong,
    Mode::Right,
];

struct Served {
    names: Mutex<BTreeMap<String, Vec<u8>>>,
    mode: Mutex<Mode>,
    over: AtomicBool,
    port: u16,
    /// Connections that were made.
    made: Mutex<Vec<TcpStream>>,
}

impl Served {
    fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let served = Arc::new(Self {
            names: Mutex::default(),
            mode: Mutex::new(Mode::Right),
            over: AtomicBool::new(false),
            port: listener.local_addr().unwrap().port(),
            made: Mutex::default(),
        });
        let accepts = Arc::clone(&served);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if accepts.over.load(Ordering::SeqCst) {
                    return;
                }
                stream.set_nodelay(true).unwrap();
                accepts.made.lock().unwrap().push(stream.try_clone().unwrap());
                let served = Arc::clone(&accepts);
                std::thread::spawn(move || {
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    while served.serve(&stream, &mut reader).is_some() {}
                });
            }
        });
        served
    }

    fn be(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
    }

    /// Closes every connection, as a server does with those that say nothing for long.
    fn close(&self) {
        for stream in self.made.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        self.close();
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/bucket/in%", self.port)
    }

    fn store(&self) -> S3 {
        S3::new(self.url().parse().unwrap(), keys()).unwrap().patient(Duration::from_millis(500))
    }

    /// One request and its answer; `None`: the connection ends.
    fn serve(&self, stream: &TcpStream, reader: &mut BufReader<TcpStream>) -> Option<()> {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_owned(), value.to_owned());
        }
        let length: usize = headers["content-length"].parse().unwrap();
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        // What was signed is what came.
        let sum = ring::digest::digest(&ring::digest::SHA256, &body);
        let sum: String = sum.as_ref().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(headers["x-amz-content-sha256"], sum);
        let signed = "SignedHeaders=host;";
        assert!(headers["authorization"].contains(signed), "{headers:?}");
        assert_eq!(headers["host"], format!("127.0.0.1:{}", self.port));
        let mode = *self.mode.lock().unwrap();
        let (status, extra, answer) = self.answer(&words, &headers, body, mode);
        self.say(stream, mode, status, &extra, &answer)
    }

    fn answer(
        &self,
        words: &[String],
        headers: &BTreeMap<String, String>,
        body: Vec<u8>,
        mode: Mode,
    ) -> (u16, String, Vec<u8>) {
        let error = |status, code: &str| {
            (status, String::new(), format!("<Error><Code>{code}</Code></Error>").into_bytes())
        };
        match mode {
            Mode::Busy => return error(503, "SlowDown"),
            Mode::NoBucket => return error(404, "NoSuchBucket"),
            _ => {}
        }
        let (path, query) = words[1].split_once('?').unwrap_or((&words[1], ""));
        let mut names = self.names.lock().unwrap();
        let key = path.strip_prefix("/bucket").unwrap().trim_start_matches('/');
        // The prefix of the URL, escaped once.
        assert!(key.is_empty() || key.starts_with("in%25/"), "{key}");
        let key = key.replace("%25", "%");
        match words[0].as_str() {
            "PUT" => {
                names.insert(key, body);
                (200, String::new(), Vec::new())
            }
            "DELETE" => {
                names.remove(&key);
                (204, String::new(), Vec::new())
            }
            _ if key.is_empty() => (200, String::new(), list(&names, query)),
            _ => {
                let Some(object) = names.get(&key) else { return error(404, "NoSuchKey") };
                let mut object = object.clone();
                if mode == Mode::Lies {
                    let at = object.len() / 2;
                    object[at] ^= 4;
                }
                if mode == Mode::Whole {
                    return (200, String::new(), object);
                }
                let range = headers["range"].strip_prefix("bytes=").unwrap();
                let (from, to) = range.split_once('-').unwrap();
                let (mut from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
                if from >= object.len() {
                    return error(416, "InvalidRange");
                }
                let mut end = object.len().min(to + 1);
                if mode == Mode::OtherRange {
                    (from, end) = (from + 1, object.len().min(end + 1));
                }
                let all = object.len();
                let extra = format!("Content-Range: bytes {from}-{}/{all}\r\n", end - 1);
                (206, extra, object[from..end].to_vec())
            }
        }
    }

    fn say(
        &self,
        mut stream: &TcpStream,
        mode: Mode,
        status: u16,
        extra: &str,
        answer: &[u8],
    ) -> Option<()> {
        let first = format!("HTTP/1.1 {status} Said\r\nServer: test\r\n{extra}");
        let plain = format!("{first}Content-Length: {}\r\n\r\n", answer.len());
        let say = |mut stream: &TcpStream, bytes: &[u8]| stream.write_all(bytes).ok();
        match mode {
            Mode::Hangs => {
                let mut rest = Vec::new();
                // Until the client has had enough.
                let _ = stream.read_to_end(&mut rest);
                None
            }
            Mode::Tears => {
                let all = [plain.as_bytes(), answer].concat();
                say(stream, &all[..all.len() - answer.len().div_ceil(2).max(1)])?;
                let _ = stream.shutdown(std::net::Shutdown::Both);
                None
            }
            Mode::Garbage => {
                say(stream, b"SSH-2.0-OpenSSH\r\n\r\n")?;
                None
            }
            Mode::Umlauts => {
                say(stream, format!("x{}\r\n\r\n", "ä".repeat(40)).as_bytes())?;
                None
            }
            Mode::EndlessHeader => {
                say(stream, first.as_bytes())?;
                for _ in 0..4000 {
                    say(stream, b"x-more: and more and more and more\r\n")?;
                }
                None
            }
            Mode::TooLong => {
                say(stream, format!("{first}Content-Length: {}\r\n\r\n", u64::MAX).as_bytes())?;
                None
            }
            Mode::Chunked if status != 204 => {
                let head =
                    format!("{first}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n");
                say(stream, head.as_bytes())?;
                for chunk in answer.chunks(1000) {
                    say(stream, format!("{:x};of=1\r\n", chunk.len()).as_bytes())?;
                    say(stream, chunk)?;
                    say(stream, b"\r\n")?;
                }
                say(stream, b"0\r\nTrailer: yes\r\n\r\n")?;
                None
            }
            _ if status == 204 => say(stream, format!("{first}\r\n").as_bytes()),
            _ => {
                say(stream, plain.as_bytes())?;
                say(stream, answer)
            }
        }
    }
}

/// A page of three names.
fn list(names: &BTreeMap<String, Vec<u8>>, query: &str) -> Vec<u8> {
    let unescape = |text: &str| text.replace("%2F", "/").replace("%25", "%");
    let query: BTreeMap<String, String> = query
        .split('&')
        .map(|pair| pair.split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), unescape(value)))
        .collect();
    assert_eq!(query["list-type"], "2");
    let after = query.get("continuation-token").cloned().unwrap_or_default();
    let of: Vec<&String> =
        names.keys().filter(|key| key.starts_with(&query["prefix"]) && **key > after).collect();
    let mut out =
        String::from("<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"s3\"><Name>bucket</Name>");
    for key in of.iter().take(3) {
        out += &format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>");
    }
    if of.len() > 3 {
        out += &format!("<NextContinuationToken>{}</NextContinuationToken>", of[2]);
    }
    out += &format!("<IsTruncated>{}</IsTruncated></ListBucketResult>", of.len() > 3);
    out.into_bytes()
}

fn keys() -> Keys {
    Keys { id: "id".into(), secret: "secret".into(), token: None, region: "us-east-1".into() }
}

#[test]
fn names_are_kept_found_and_removed() {
    let served = Served::start();
    let store = served.store();
    let mut random = Random::new(1);
    let mut bytes = vec![0; 300_000];
    random.fill(&mut bytes);
    for mode in [Mode::Right, Mode::Chunked, Mode::Whole] {
        served.be(mode);
        store.put("vm/a", &[&bytes[..1000], &bytes[1000..]]).unwrap();
        for _ in 0..20 {
            let from = random.below(bytes.len() as u64 + 10);
            let len = 1 + random.below(60_000) as usize;
            let got = store.get("vm/a", from, len).unwrap();
            let from = (from as usize).min(bytes.len());
            assert!(got == bytes[from..bytes.len().min(from + len)], "{mode:?} {from}+{len}");
        }
        assert_eq!(store.get("vm/b", 0, 5), Err(Errno::NOENT));
        assert_eq!(store.get("vm/a", 3, 0), Ok(Vec::new()));
        let mut names: Vec<String> = (0..10).map(|i| format!("n{i}")).collect();
        for name in &names {
            store.put(&format!("vm/{name}"), &[name.as_bytes()]).unwrap();
        }
        store.put("vm2/other", &[]).unwrap();
        names.insert(0, "a".into());
        assert_eq!(store.list("vm"), Ok(names));
        assert_eq!(store.list("nothing"), Ok(Vec::new()));
        store.remove("vm/a").unwrap();
        store.remove("vm/a").unwrap();
        // A kept connection that the server has closed meanwhile is no failure.
        served.close();
        assert_eq!(store.get("vm/a", 0, 1), Err(Errno::NOENT));
    }
    served.end();
}

#[test]
fn what_is_no_answer_is_an_error() {
    let served = Served::start();
    let store = served.store();
    let bytes: Vec<u8> = (0..100_000u32).map(|i| (i / 7) as u8).collect();
    store.put("vm/a", &[&bytes]).unwrap();
    for mode in MODES {
        served.be(mode);
        let (put, got) = (store.put("vm/b", &[b"b"]), store.get("vm/a", 4096, 4096));
        let (listed, removed) = (store.list("vm"), store.remove("vm/c"));
        match mode {
            Mode::Right => {
                assert_eq!(got, Ok(bytes[4096..8192].to_vec()));
                assert_eq!((put, removed), (Ok(()), Ok(())));
                assert_eq!(listed.unwrap(), ["a", "b"]);
            }
            // It says what it gives, and that is not what was asked for.
            Mode::OtherRange => assert_eq!(got, Err(Errno::IO)),
            _ => {
                // An answer without bytes is not too long.
                let removed = if mode == Mode::TooLong { Some(Errno::IO) } else { removed.err() };
                let all = [put.err(), got.err(), listed.err(), removed];
                assert!(all.iter().all(Option::is_some), "{mode:?}: {all:?}");
                assert!(!all.contains(&Some(Errno::NOENT)), "{mode:?}: {all:?}");
                assert!(store.lock("vm").is_err(), "{mode:?}");
            }
        }
    }
    served.end();
    assert!(served.store().get("vm/a", 0, 1).is_err());
}

#[test]
fn places_are_read() {
    type Place = block::pool::s3::Place;
    let place: Place = "https://s3.example.org/b/c/".parse().unwrap();
    assert_eq!((place.port, place.tls, place.path.as_str()), (443, true, "/b/c"));
    let place: Place = "http://[::1]:9000/b".parse().unwrap();
    assert_eq!((place.host.as_str(), place.port), ("::1", 9000));
    for bad in
        ["", "ftp://a/b", "http://a", "http://a/", "http://:9/b", "http://a:x/b", "http://a/b/../c"]
    {
        assert!(bad.parse::<Place>().is_err(), "{bad}");
    }
}

const SIZE: u64 = 1 << 20;

fn pool_of(coding: &str, urls: &[String], stores: Vec<Arc<dyn Store>>) -> (Arc<Pool>, Spec) {
    let spec = urls.iter().enumerate().map(|(i, url)| StoreSpec {
        domain: format!("d{i}"),
        at: format!("s3:{url}"),
        out: false,
    });
    let spec = Spec::new(coding.parse().unwrap(), spec.collect()).unwrap();
    (Arc::new(Pool::over(spec.clone(), stores).unwrap()), spec)
}

/// A pool over six servers, of which two at a time do what they should not.
#[test]
fn a_pool_does_without_servers_that_misbehave() {
    let servers: Vec<Arc<Served>> = (0..6).map(|_| Served::start()).collect();
    let urls: Vec<String> = servers.iter().map(|served| served.url()).collect();
    let stores = servers.iter().map(|served| Arc::new(served.store()) as Arc<dyn Store>).collect();
    let (pool, _) = pool_of("rs:4,2", &urls, stores);
    pool.create("vm", SIZE, 64 << 10).unwrap();
    let image = Image::open(Arc::clone(&pool), "vm", false).unwrap();
    let (mut model, mut random) = (vec![0; SIZE as usize], Random::new(7));
    work(&image, &mut model, &mut random, 20);
    check(&image, &model);
    for (i, modes) in
        [[Mode::Lies, Mode::Tears], [Mode::Busy, Mode::OtherRange], [Mode::Garbage, Mode::Lies]]
            .into_iter()
            .enumerate()
    {
        servers[i].be(modes[0]);
        servers[i + 3].be(modes[1]);
        check(&image, &model);
        servers[i].be(Mode::Right);
        work(&image, &mut model, &mut random, 20);
        servers[i + 3].be(Mode::Right);
        check(&image, &model);
        // What missed something is made good before the next two.
        let orders = Orders { verify: true, repair: true, rate: 0 };
        let report = repair::run(&image, orders, |_, _, _| true).unwrap();
        assert_eq!(report.lost, 0, "{modes:?}: {report:?}");
    }
    servers[2].be(Mode::Hangs);
    check(&image, &model);
    servers[2].be(Mode::Right);
    drop(image);
    check(&Image::open(pool, "vm", false).unwrap(), &model);
    servers.iter().for_each(|served| served.end());
}

struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Against moto's server of S3 (PyPI's `moto[s3,server]`), where it is installed.
#[test]
fn a_real_server_keeps_an_image() {
    let Some(program) = rig::program("moto_server") else {
        eprintln!("skipped: no moto_server (pip install 'moto[s3,server]')");
        return;
    };
    let port = {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port()
    };
    let mut command = Command::new(program);
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
    let _server = Ends(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let up = (0..600).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    assert!(up, "moto_server does not listen");
    let urls: Vec<String> =
        (0..3).map(|i| format!("http://127.0.0.1:{port}/bucket{i}/some where")).collect();
    // A bucket that is not there is no empty store.
    let open = |url: &String| S3::new(url.parse().unwrap(), keys()).unwrap();
    assert_eq!(open(&urls[0]).list("vm"), Err(Errno::NODEV));
    for i in 0..3 {
        // Buckets are made by whoever runs the server: here by a request of its own.
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let head =
            format!("PUT /bucket{i} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\n");
        let auth = "Authorization: AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0\r\n";
        write!(stream, "{head}{auth}Connection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let stores = || urls.iter().map(|url| Arc::new(open(url)) as Arc<dyn Store>).collect();
    let (pool, _) = pool_of("replicated:3", &urls, stores());
    pool.create("vm", SIZE, 256 << 10).unwrap();
    let image = Image::open(Arc::clone(&pool), "vm", false).unwrap();
    let (mut model, mut random) = (vec![0; SIZE as usize], Random::new(11));
    work(&image, &mut model, &mut random, 20);
    check(&image, &model);
    drop(image);
    let image = Image::open(pool, "vm", false).unwrap();
    check(&image, &model);
    let store = open(&urls[0]);
    for i in 0..20 {
        store.put(&format!("many/n{i}"), &[b"x"]).unwrap();
    }
    assert_eq!(store.list("many").unwrap().len(), 20);
    let orders = Orders { verify: true, repair: true, rate: 0 };
    let report = repair::run(&image, orders, |_, _, _| true).unwrap();
    assert_eq!((report.lost, report.damaged, report.missing), (0, 0, 0), "{report:?}");
}
