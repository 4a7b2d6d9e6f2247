//! A server that lies: about lengths, numbers and ends of lists; that sends what is no answer, hangs, hangs up, or does something and does not say so.
//! Nothing of it may take a panic, a hang or memory.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::{Errno, InodeId};
use client::fs::*;
use nfs::NfsFs;
use nfs::guard::marked;
use nfs::xdr::{In, Out};

const ROOT: InodeId = InodeId::ROOT;
const NFS: u32 = 100_003;
const MOUNT: u32 = 100_005;

/// Procedures of NFSv3.
const GETATTR: u32 = 1;
const LOOKUP: u32 = 3;
const ACCESS: u32 = 4;
const READLINK: u32 = 5;
const READ: u32 = 6;
const WRITE: u32 = 7;
const CREATE: u32 = 8;
const MKDIR: u32 = 9;
const REMOVE: u32 = 12;
const READDIRPLUS: u32 = 17;
const FSSTAT: u32 = 18;
const FSINFO: u32 = 19;
const PATHCONF: u32 = 20;
const COMMIT: u32 = 21;

/// A request as it came.
#[derive(Clone, Debug)]
struct Call {
    xid: u32,
    program: u32,
    procedure: u32,
    args: Vec<u8>,
    /// How many of this procedure came before it.
    nth: usize,
}

/// What is done about one.
enum Say {
    /// An answer with these results.
    Results(Vec<u8>),
    /// An answer that has only this.
    Status(u32),
    /// Bytes, as they are.
    Raw(Vec<u8>),
    Nothing,
    HangUp,
    /// As an honest server.
    Honestly,
}

type Script = dyn Fn(&Call) -> Say + Send + Sync;

struct Liar {
    port: u16,
    calls: Arc<Mutex<Vec<Call>>>,
    ended: Arc<AtomicBool>,
}

fn answer(xid: u32, results: &[u8]) -> Vec<u8> {
    let record = Out::default().u32(xid).u32(1).u32(0).u32(0).u32(0).u32(0).fixed(results).take();
    let mut wire = Vec::new();
    marked(&record, &mut wire);
    wire
}

fn put_attr(out: &mut Out, kind: u32, fileid: u64, fsid: u64) {
    out.u32(kind).u32(0o644).u32(1).u32(0).u32(0).u64(100).u64(4096).u32(0).u32(0).u64(fsid);
    out.u64(fileid).u64(1 << 32).u64(2 << 32).u64(3 << 32);
}

/// Status 0, and a directory or file by its handle: `root`, `dir`, `link`, anything else is a file.
fn attr_of(fh: &[u8], out: &mut Out) {
    match fh {
        b"root" => put_attr(out, 2, 77, 5),
        b"dir" => put_attr(out, 2, 78, 5),
        b"link" => put_attr(out, 5, 79, 5),
        _ => put_attr(out, 1, 1000, 5),
    }
}

fn honest(call: &Call) -> Vec<u8> {
    let mut args = In::new(&call.args);
    let fh = args.bytes(64).unwrap_or(b"").to_vec();
    let mut out = Out::default();
    out.u32(0);
    match (call.program, call.procedure) {
        (MOUNT, _) => {
            out.bytes(b"root").u32(1).u32(1);
        }
        (_, GETATTR) => attr_of(&fh, &mut out),
        (_, LOOKUP) => {
            let name = args.bytes(255).unwrap_or(b"");
            out.bytes(name).u32(1);
            attr_of(name, &mut out);
            out.u32(0);
        }
        (_, ACCESS) => {
            out.u32(0).u32(63);
        }
        (_, READ) => {
            out.u32(0).u32(4).flag(true).bytes(b"data");
        }
        (_, WRITE) => {
            let (_, count, how) = (args.u64().unwrap(), args.u32().unwrap(), args.u32().unwrap());
            out.u32(0).u32(0).u32(count).u32(how).fixed(b"verifier");
        }
        (_, CREATE) => {
            out.u32(1).bytes(b"made").u32(1);
            attr_of(b"made", &mut out);
            out.u32(0).u32(0);
        }
        (_, FSINFO) => {
            out.u32(0).u32(1 << 20).u32(0).u32(0).u32(1 << 20).u32(0).u32(0).u32(0).u64(0);
            out.u64(0).u32(0);
        }
        (_, PATHCONF) => {
            out.u32(0).u32(10).u32(255);
        }
        (_, COMMIT) => {
            out.u32(0).u32(0).fixed(b"verifier");
        }
        (_, FSSTAT) => {
            out.u32(0);
            (0..6).for_each(|n| {
                out.u64(n << 20);
            });
        }
        _ => {}
    }
    out.take()
}

fn request(stream: &mut TcpStream) -> Option<(u32, u32, u32, Vec<u8>)> {
    let mut mark = [0; 4];
    stream.read_exact(&mut mark).ok()?;
    let len = In::new(&mark).u32().ok()? & 0x7fff_ffff;
    let mut record = vec![0; len as usize];
    stream.read_exact(&mut record).ok()?;
    let mut read = In::new(&record);
    let (xid, _, _) = (read.u32().ok()?, read.u32().ok()?, read.u32().ok()?);
    let (program, _, procedure) = (read.u32().ok()?, read.u32().ok()?, read.u32().ok()?);
    for _ in 0..2 {
        read.u32().ok()?;
        read.bytes(400).ok()?;
    }
    let args = read.fixed(read.left()).ok()?.to_vec();
    Some((xid, program, procedure, args))
}

impl Liar {
    fn start(script: impl Fn(&Call) -> Say + Send + Sync + 'static) -> Option<Self> {
        if let Err(why) = nfs::libnfs::load() {
            println!("skipped: {why} (scripts/prepare.sh tools installs it)");
            return None;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let calls: Arc<Mutex<Vec<Call>>> = Arc::default();
        let ended: Arc<AtomicBool> = Arc::default();
        let script: Arc<Script> = Arc::new(script);
        let counts: Arc<Mutex<HashMap<(u32, u32), usize>>> = Arc::default();
        let (told, over) = (calls.clone(), ended.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let (script, told, counts) = (script.clone(), told.clone(), counts.clone());
                let Ok(mut stream) = stream else { return };
                std::thread::spawn(move || {
                    while let Some((xid, program, procedure, args)) = request(&mut stream) {
                        let nth = {
                            let mut counts = counts.lock().unwrap();
                            let count = counts.entry((program, procedure)).or_default();
                            *count += 1;
                            *count - 1
                        };
                        let call = Call { xid, program, procedure, args, nth };
                        told.lock().unwrap().push(call.clone());
                        let said = match script(&call) {
                            Say::Results(results) => answer(xid, &results),
                            Say::Status(status) => answer(xid, &Out::default().u32(status).take()),
                            Say::Raw(bytes) => bytes,
                            Say::Nothing => continue,
                            Say::HangUp => return,
                            Say::Honestly => answer(xid, &honest(&call)),
                        };
                        if stream.write_all(&said).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Some(Self { port, calls, ended })
    }

    fn url(&self, timeout_ms: u64) -> nfs::url::Url {
        let port = self.port;
        let text = format!("nfs://127.0.0.1:{port}/x?mountport={port}&locks=0");
        let mut url: nfs::url::Url = text.parse().unwrap();
        url.patience = Duration::from_millis(timeout_ms);
        url
    }

    fn open(&self, timeout_ms: u64) -> NfsFs {
        NfsFs::open(&self.url(timeout_ms)).unwrap()
    }

    fn of(&self, procedure: u32) -> Vec<Call> {
        let calls = self.calls.lock().unwrap();
        let wanted = |call: &&Call| (call.program, call.procedure) == (NFS, procedure);
        calls.iter().filter(wanted).cloned().collect()
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// A server that is honest but for one procedure of NFS.
fn lies(of: u32, say: impl Fn(&Call) -> Say + Send + Sync + 'static) -> Option<Liar> {
    Liar::start(
        move |call| {
            if call.program == NFS && call.procedure == of { say(call) } else { Say::Honestly }
        },
    )
}

fn words(words: &[u32]) -> Vec<u8> {
    let mut out = Out::default();
    words.iter().for_each(|n| {
        out.u32(*n);
    });
    out.take()
}

#[test]
fn lengths_that_lie_end_in_errors() {
    let reads: Vec<Vec<u8>> = vec![
        // More than was asked for; another number than there are; lengths without data; a length that is negative as a signed one.
        Out::default().u32(0).u32(0).u32(200).flag(true).bytes(&[7; 200]).take(),
        Out::default().u32(0).u32(0).u32(5).flag(true).bytes(b"four").take(),
        words(&[0, 0, 100, 1, 100]),
        words(&[0, 0, 0xffff_fff0, 1, 0xffff_fff0, 0, 0]),
        words(&[0, 7]),
        words(&[0]),
        vec![],
        // Nothing, and not the end.
        words(&[0, 0, 0, 0, 0]),
    ];
    let count = reads.len();
    let Some(liar) = lies(READ, move |call| Say::Results(reads[call.nth % count].clone())) else {
        return;
    };
    let fs = liar.open(5000);
    let file = fs.lookup(&Caller::ROOT, ROOT, b"file").unwrap();
    let handle = fs.open(&Caller::ROOT, file.ino, O_RDWR).unwrap();
    for n in 0..count {
        let mut data = [0xee; 100];
        assert_eq!(fs.read(handle, 0, &mut data), Err(Errno::IO), "{n}");
        assert_eq!(data, [0xee; 100], "{n}");
    }
    drop(fs);

    let writes = [
        words(&[0, 0, 0, 0, 2, 1, 1]),
        words(&[0, 0, 0, 999, 2, 1, 1]),
        words(&[0, 0, 0, 4, 9, 1, 1]),
    ];
    let Some(liar) = lies(WRITE, move |call| Say::Results(writes[call.nth % 3].clone())) else {
        return;
    };
    let fs = liar.open(5000);
    let file = fs.lookup(&Caller::ROOT, ROOT, b"file").unwrap();
    let handle = fs.open(&Caller::ROOT, file.ino, O_RDWR).unwrap();
    for _ in 0..3 {
        assert_eq!(fs.write(handle, 0, b"data", false), Err(Errno::IO));
    }
    assert_eq!(fs.unstable(), 0);
    drop(fs);

    // Handles that are too long, or none; types that are none; attributes that are cut off.
    let mut kind = Out::default();
    put_attr(kind.u32(0).bytes(b"fh").u32(1), 9, 5, 5);
    let lookups = [
        Out::default().u32(0).bytes(&[1; 65]).u32(0).u32(0).take(),
        Out::default().u32(0).bytes(b"").u32(0).u32(0).take(),
        words(&[0, u32::MAX]),
        kind.take(),
        words(&[0, 4, 0, 1, 2, 3]),
    ];
    let Some(liar) = lies(LOOKUP, move |call| Say::Results(lookups[call.nth % 5].clone())) else {
        return;
    };
    let fs = liar.open(5000);
    for _ in 0..5 {
        assert_eq!(fs.lookup(&Caller::ROOT, ROOT, b"file"), Err(Errno::IO));
    }
    drop(fs);
    let targets = [
        Out::default().u32(0).u32(0).bytes(b"a\0b").take(),
        Out::default().u32(0).u32(0).bytes(b"").take(),
        Out::default().u32(0).u32(0).bytes(&[b'x'; 5000]).take(),
    ];
    let Some(liar) = lies(READLINK, move |call| Say::Results(targets[call.nth % 3].clone())) else {
        return;
    };
    let fs = liar.open(5000);
    let link = fs.lookup(&Caller::ROOT, ROOT, b"link").unwrap();
    for _ in 0..3 {
        assert_eq!(fs.readlink(&Caller::ROOT, link.ino), Err(Errno::IO));
    }
}

#[test]
fn what_is_no_answer_ends_in_errors_and_in_time() {
    let Some(liar) = lies(ACCESS, |call| {
        let xid = call.xid;
        let mut wire = Vec::new();
        match call.nth {
            // A record that is longer than any.
            0 => wire = words(&[0xffff_ffff]),
            // Fragments without an end.
            1 => {
                for _ in 0..64 {
                    wire.extend(words(&[0x0001_0000]));
                    wire.extend(vec![0; 0x1_0000]);
                }
            }
            // A request, to us.
            2 => marked(&words(&[xid, 0, 2, 1, 1, 1]), &mut wire),
            // A verifier whose length goes back; one that is longer than what there is.
            3 => marked(&words(&[xid, 1, 0, 0, 0xffff_fff0, 0, 0, 0]), &mut wire),
            4 => marked(&words(&[xid, 1, 0, 0, 396, 0]), &mut wire),
            // Less than a head.
            5 => marked(&words(&[xid]), &mut wire),
            6 => marked(&words(&[xid, 1, 7]), &mut wire),
            // An empty fragment.
            7 => wire = words(&[0]),
            // What was not asked, and then the answer, twice.
            8 => {
                wire = answer(xid ^ 0x5555, &words(&[0, 0, 63]));
                wire.extend(answer(xid, &words(&[0, 0, 63])));
                wire.extend(answer(xid, &words(&[0, 0, 63])));
            }
            _ => return Say::Honestly,
        }
        Say::Raw(wire)
    }) else {
        return;
    };
    let fs = liar.open(20_000);
    let file = fs.lookup(&Caller::ROOT, ROOT, b"file").unwrap();
    // Each of them costs a connection, and the request is made again.
    assert_eq!(fs.access(&Caller::ROOT, file.ino, 4), Ok(()));
    assert_eq!(liar.of(ACCESS).len(), 9);
    let xids: std::collections::BTreeSet<u32> = liar.of(ACCESS).iter().map(|c| c.xid).collect();
    assert_eq!(xids.len(), 1);
    assert_eq!(fs.access(&Caller::ROOT, file.ino, 4), Ok(()));
    drop(fs);

    // What a server refuses is told, and not asked again.
    let Some(liar) = lies(ACCESS, |call| {
        let mut wire = Vec::new();
        let tail: &[u32] = match call.nth {
            0 => &[1, 1, 1, 5],
            1 => &[1, 1, 0, 2, 2],
            2 => &[1, 0, 0, 0, 1],
            3 => &[1, 0, 0, 0, 2, 4, 4],
            4 => &[1, 0, 0, 0, 3],
            5 => &[1, 0, 0, 0, 4],
            6 => &[1, 0, 0, 0, 5],
            _ => &[1, 0, 0, 0, 99],
        };
        marked(&words(&[&[call.xid], tail].concat()), &mut wire);
        Say::Raw(wire)
    }) else {
        return;
    };
    let fs = liar.open(10_000);
    let file = fs.lookup(&Caller::ROOT, ROOT, b"file").unwrap();
    for n in 0..8 {
        let refused = fs.access(&Caller::ROOT, file.ino, 4).unwrap_err();
        let want = [
            Errno::ACCES,
            Errno::ACCES,
            Errno::OPNOTSUPP,
            Errno::OPNOTSUPP,
            Errno::OPNOTSUPP,
            Errno::IO,
            Errno::IO,
            Errno::IO,
        ][n];
        assert_eq!(refused, want, "{n}");
    }
    assert_eq!(liar.of(ACCESS).len(), 8);
}

#[test]
fn a_server_that_hangs_holds_nobody_longer_than_it_may() {
    let hangs = Arc::new(AtomicBool::new(true));
    let script = hangs.clone();
    let Some(liar) =
        lies(
            ACCESS,
            move |_| {
                if script.load(Ordering::Relaxed) { Say::Nothing } else { Say::Honestly }
            },
        )
    else {
        return;
    };
    let fs = liar.open(1500);
    let file = fs.lookup(&Caller::ROOT, ROOT, b"file").unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..40).map(|_| scope.spawn(|| fs.access(&Caller::ROOT, file.ino, 4))).collect();
        // Others are served meanwhile.
        assert!(fs.getattr(&Caller::ROOT, file.ino).is_ok());
        for one in all {
            assert_eq!(one.join().unwrap(), Err(Errno::IO));
        }
    });
    assert!(begun.elapsed() >= Duration::from_millis(1500));
    hangs.store(false, Ordering::Relaxed);
    let well = (0..20).any(|_| fs.access(&Caller::ROOT, file.ino, 4).is_ok());
    assert!(well);
    // One that never says anything ends the mount, in words.
    let Some(liar) = Liar::start(|_| Say::Nothing) else { return };
    let said = NfsFs::open(&liar.url(800)).unwrap_err();
    assert!(said.contains("mount service") && said.contains("answer"), "{said}");
    let Some(liar) = Liar::start(|_| Say::Status(13)) else { return };
    let said = NfsFs::open(&liar.url(800)).unwrap_err();
    assert!(said.contains("not for this machine"), "{said}");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nobody: nfs::url::Url =
        format!("nfs://127.0.0.1/x?mapport={port}&timeout=1").parse().unwrap();
    let said = NfsFs::open(&nobody).unwrap_err();
    assert!(said.contains("port mapper") && said.contains("nfsport="), "{said}");
}

#[test]
fn what_was_done_and_not_said_is_done_once() {
    let Some(liar) = Liar::start(|call| match (call.program, call.procedure, call.nth) {
        (NFS, REMOVE | MKDIR, 0) => Say::HangUp,
        (NFS, REMOVE, _) => Say::Status(2),
        (NFS, MKDIR, _) => Say::Status(17),
        _ => Say::Honestly,
    }) else {
        return;
    };
    let fs = liar.open(10_000);
    // The second time it is gone, and it is there: the first time did that.
    assert_eq!(fs.unlink(&Caller::ROOT, ROOT, b"file"), Ok(()));
    let dir = NewNode { mode: S_IFDIR | 0o755, rdev: 0, target: b"" };
    assert!(fs.mknod(&Caller::ROOT, ROOT, b"dir", &dir).unwrap().is_dir());
    for procedure in [REMOVE, MKDIR] {
        let calls = liar.of(procedure);
        assert_eq!((calls.len(), calls[0].xid), (2, calls[1].xid));
        assert_eq!(calls[0].args, calls[1].args);
    }
    // Nobody has hung up: then it is as the server says.
    assert_eq!(fs.unlink(&Caller::ROOT, ROOT, b"file"), Err(Errno::NOENT));
    assert_eq!(fs.mknod(&Caller::ROOT, ROOT, b"dir", &dir).map(drop), Err(Errno::EXIST));
    // What is there is something else.
    let Some(liar) = lies(MKDIR, |call| if call.nth == 0 { Say::HangUp } else { Say::Status(17) })
    else {
        return;
    };
    let fs = liar.open(10_000);
    assert_eq!(fs.mknod(&Caller::ROOT, ROOT, b"file", &dir).map(drop), Err(Errno::EXIST));
}

#[test]
fn what_a_server_lost_is_written_again() {
    let Some(liar) = lies(COMMIT, |_| {
        Say::Results(Out::default().u32(0).u32(0).u32(0).fixed(b"new life").take())
    }) else {
        return;
    };
    let fs = liar.open(10_000);
    let file = fs.lookup(&Caller::ROOT, ROOT, b"file").unwrap();
    let handle = fs.open(&Caller::ROOT, file.ino, O_RDWR).unwrap();
    fs.write(handle, 10, b"first", false).unwrap();
    fs.write(handle, 12, b"second", false).unwrap();
    // The data, and what is kept of each beside it: many small ones are bounded like few large ones.
    assert_eq!(fs.unstable(), 11 + 2 * 128);
    fs.fsync(handle, false).unwrap();
    assert_eq!(fs.unstable(), 0);
    // As unstable ones, and then durable, in order.
    let told: Vec<(u64, u32, Vec<u8>)> = liar
        .of(WRITE)
        .iter()
        .map(|call| {
            let mut args = In::new(&call.args);
            args.bytes(64).unwrap();
            let (at, _, how) = (args.u64().unwrap(), args.u32().unwrap(), args.u32().unwrap());
            (at, how, args.bytes(100).unwrap().to_vec())
        })
        .collect();
    let want = [(10, 0, &b"first"[..]), (12, 0, b"second"), (10, 2, b"first"), (12, 2, b"second")];
    assert_eq!(told, want.map(|(at, how, data)| (at, how, data.to_vec())));
    // What is cut off does not come again.
    fs.write(handle, 0, b"third", false).unwrap();
    let size = SetAttr { size: Some(0), handle: Some(handle), ..SetAttr::default() };
    fs.setattr(&Caller::ROOT, file.ino, &size).unwrap();
    assert_eq!((fs.unstable(), liar.of(WRITE).len()), (0, 6));
    fs.release(handle);
    // What is kept is bounded, also where a server never makes anything durable by itself.
    let handle = fs.open(&Caller::ROOT, file.ino, O_RDWR).unwrap();
    for n in 0..40 {
        fs.write(handle, n << 20, &vec![1; 1 << 20], false).unwrap();
        assert!(fs.unstable() <= 9 << 20);
    }
    // And with O_DSYNC nothing is.
    let sync = fs.open(&Caller::ROOT, file.ino, O_WRONLY | O_DSYNC).unwrap();
    let before = fs.unstable();
    fs.write(sync, 0, b"sync", false).unwrap();
    assert_eq!(fs.unstable(), before);
}

/// A server does not answer the one who asks it to make data durable: another one who wants the same is not told that it is.
#[test]
fn nobody_takes_what_another_is_about_for_durable() {
    let Some(liar) = lies(COMMIT, |call| if call.nth == 0 { Say::Nothing } else { Say::Honestly })
    else {
        return;
    };
    let fs = liar.open(6000);
    let file = fs.lookup(&Caller::ROOT, ROOT, b"file").unwrap();
    let handle = fs.open(&Caller::ROOT, file.ino, O_RDWR).unwrap();
    fs.write(handle, 0, b"data", false).unwrap();
    std::thread::scope(|scope| {
        let one = scope.spawn(|| fs.fsync(handle, false));
        while liar.of(COMMIT).is_empty() {
            std::thread::yield_now();
        }
        fs.fsync(handle, false).unwrap();
        // The first, the first again over another connection, and ours.
        assert_eq!(liar.of(COMMIT).len(), 3);
        one.join().unwrap().unwrap();
    });
}

/// What a server could not make durable when the file was closed is not forgotten.
#[test]
fn what_is_owed_is_tried_again() {
    let full = Arc::new(AtomicBool::new(true));
    let script = full.clone();
    let Some(liar) = lies(COMMIT, move |_| match script.load(Ordering::Relaxed) {
        true => Say::Results(Out::default().u32(5).u32(0).u32(0).take()),
        false => Say::Honestly,
    }) else {
        return;
    };
    let fs = liar.open(10_000);
    let file = fs.lookup(&Caller::ROOT, ROOT, b"file").unwrap();
    let handle = fs.open(&Caller::ROOT, file.ino, O_RDWR).unwrap();
    fs.write(handle, 0, b"data", false).unwrap();
    fs.release(handle);
    fs.forget(file.ino, &|| false);
    assert!(fs.unstable() > 0);
    full.store(false, Ordering::Relaxed);
    let other = fs.lookup(&Caller::ROOT, ROOT, b"dir").unwrap();
    assert_eq!(fs.open(&Caller::ROOT, other.ino, O_RDONLY), Err(Errno::ISDIR));
    assert_eq!((fs.unstable(), liar.of(COMMIT).len()), (0, 2));
}

fn page(entries: &[(&[u8], u64)], end: bool) -> Vec<u8> {
    let mut out = Out::default();
    out.u32(0).u32(0).u64(0);
    for (n, (name, cookie)) in entries.iter().enumerate() {
        out.flag(true).u64(1000 + n as u64).bytes(name).u64(*cookie).u32(0).u32(0);
    }
    out.flag(false).flag(end).take()
}

fn list(fs: &NfsFs) -> Result<Vec<Vec<u8>>> {
    let mut all = Vec::new();
    fs.readdir(&Caller::ROOT, ROOT, 0, &mut |entry| {
        all.push(entry.name.to_vec());
        true
    })?;
    Ok(all)
}

#[test]
fn lists_that_lie_end() {
    let Some(liar) = lies(READDIRPLUS, |call| {
        Say::Results(match call.nth {
            // Names that are none are not told.
            0 => page(
                &[
                    (b"..", 4),
                    (b"a/b", 5),
                    (b"", 6),
                    (b"../x", 7),
                    (b"n\0l", 8),
                    (&[b'x'; 256], 9),
                    (b"good", 10),
                ],
                true,
            ),
            // In circles; nothing, and not the end; beyond what kernels take.
            1..=2 => page(&[(b"a", 7)], false),
            3 => page(&[], false),
            4 => page(&[(b"a", 1 << 63)], true),
            // A name that is longer than the record; a list that is cut off.
            5 => words(&[0, 0, 0, 0, 1, 0, 1, u32::MAX]),
            6 => words(&[0, 0, 0, 0, 1, 0, 1, 4, 0x6161_6161]),
            // As many as a record holds.
            _ => page(&(0..28_000).map(|n| (&b"n"[..], n + 1)).collect::<Vec<_>>(), true),
        })
    }) else {
        return;
    };
    let fs = liar.open(10_000);
    assert_eq!(list(&fs).unwrap(), [&b"."[..], b"..", b"good"]);
    assert_eq!(list(&fs), Err(Errno::IO));
    assert_eq!(list(&fs), Err(Errno::IO));
    assert_eq!(list(&fs), Err(Errno::OVERFLOW));
    assert_eq!((list(&fs), list(&fs)), (Err(Errno::IO), Err(Errno::IO)));
    assert_eq!(list(&fs).unwrap().len(), 28_002);
}

#[test]
fn numbers_that_are_given_away_again_are_other_files() {
    let Some(liar) = Liar::start(|call| {
        let mut args = In::new(&call.args);
        let fh = args.bytes(64).unwrap_or(b"");
        let mut out = Out::default();
        match (call.program, call.procedure) {
            (NFS, LOOKUP) if args.bytes(255) == Ok(b"elsewhere") => {
                put_attr(out.u32(0).bytes(b"elsewhere").u32(1), 2, 5, 999);
                Say::Results(out.u32(0).take())
            }
            // The file that had the number first is gone.
            (NFS, GETATTR) if fh == b"old" => Say::Status(70),
            (NFS, READDIRPLUS) => Say::Results(page(&[(b"new", 5)], true)),
            _ => Say::Honestly,
        }
    }) else {
        return;
    };
    let fs = liar.open(10_000);
    let old = fs.lookup(&Caller::ROOT, ROOT, b"old").unwrap();
    let new = fs.lookup(&Caller::ROOT, ROOT, b"new").unwrap();
    assert_ne!(old.ino, new.ino);
    assert_eq!(fs.lookup(&Caller::ROOT, ROOT, b"new").unwrap().ino, new.ino);
    assert_eq!(fs.getattr(&Caller::ROOT, old.ino), Err(Errno::STALE));
    assert!(fs.getattr(&Caller::ROOT, new.ino).is_ok());
    // A device that comes back knows the file by the number of ours, also if it was told of it before by that of the server.
    let next = liar.open(10_000);
    assert_eq!(next.getattr(&Caller::ROOT, new.ino).unwrap().ino, new.ino);
    assert_eq!(next.lookup(&Caller::ROOT, ROOT, b"new").unwrap().ino, new.ino);
    let next = liar.open(10_000);
    assert_eq!(next.lookup(&Caller::ROOT, ROOT, b"new").unwrap().ino, old.ino);
    let handle = next.open(&Caller::ROOT, new.ino, O_RDONLY).unwrap();
    let mut data = [0; 4];
    assert_eq!((next.read(handle, 0, &mut data).unwrap(), &data), (4, b"data"));
    next.release(handle);
    // One that goes by several handles is one.
    let again = fs.lookup(&Caller::ROOT, ROOT, b"third").unwrap();
    assert_ne!(again.ino, old.ino);
    // Another file system.
    assert_eq!(fs.lookup(&Caller::ROOT, ROOT, b"elsewhere"), Err(Errno::XDEV));
    // A number of which nobody knows: the tree is looked through, and ends.
    assert_eq!(fs.getattr(&Caller::ROOT, InodeId(123_456)), Err(Errno::STALE));
}

#[test]
fn later_is_later() {
    let Some(liar) =
        lies(
            GETATTR,
            |call| if matches!(call.nth, 1 | 2) { Say::Status(10_008) } else { Say::Honestly },
        )
    else {
        return;
    };
    let fs = liar.open(10_000);
    assert!(fs.getattr(&Caller::ROOT, ROOT).is_ok());
    assert_eq!(liar.of(GETATTR).len(), 4);
    let Some(liar) =
        lies(GETATTR, |call| if call.nth > 0 { Say::Status(10_008) } else { Say::Honestly })
    else {
        return;
    };
    let fs = liar.open(700);
    assert_eq!(fs.getattr(&Caller::ROOT, ROOT), Err(Errno::IO));
}
