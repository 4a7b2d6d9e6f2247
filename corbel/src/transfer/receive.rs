//! `corbel receive`: takes a stream in ([`storage::format::transfer`]).
//!
//! A new directory gets its name when all of it is there. What changes one that is there goes through states between the two snapshots; the snapshot
//! that is made at the end is what the sender's was.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use base::{Errno, InodeId};
use clap::Args;
use serde_json::json;
use storage::format::transfer::{self, FRAME_BYTES, HEAD_BYTES, Position, Record};

use super::place::{Coming, Known, Place, Sent, TREE, empty, home_name, open_home, quoted};
use super::take::{self, Receiver};
use super::{MIB, failed, stop};
use crate::cli::Global;
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;
use crate::volume::Volume;

/// Content after which progress is told.
const TELL: u64 = 512 * MIB;

/// Arguments of `corbel receive`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  corbel send monday | ssh other corbel receive /copies/home\n  corbel send tuesday --from monday | \
    ssh other corbel receive /copies/home\n  corbel receive /restored < monday.corbel\n  corbel receive --status /copies/home      \
    how far an interrupted one is, and how to go on\n\nThe first stream makes the directory; one that was sent with --from changes it from that \
    snapshot to the\nlater one. At the end a snapshot of it is made, with the name of the one that was sent: that is what is \
    consistent,\nand the directory itself is in between while it is changed. Leave it alone otherwise. What is known of it lies beside it, \
    in\n.NAME.receive; without that it is a directory as any other, and takes no more streams."
)]
pub struct ReceiveArgs {
    /// The directory, by its path in the volume
    pub target: PathBuf,
    /// Name of the snapshot that is made at the end, if it is not to be the one of the snapshot that was sent
    #[arg(long, value_name = "NAME")]
    pub snapshot: Option<OsString>,
    /// Make no snapshot at the end
    #[arg(long, conflicts_with = "snapshot")]
    pub no_snapshot: bool,
    /// Say what was received, and how to go on with what was interrupted
    #[arg(long)]
    pub status: bool,
    /// Remove what has come of a first stream that was interrupted
    #[arg(long, conflicts_with = "status")]
    pub abort: bool,
    /// Read the stream from a file instead of standard input
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Socket of the local node, if it is not the configuration's
    #[arg(long, value_name = "SOCKET")]
    pub socket: Option<PathBuf>,
}

/// The records of a stream, as they come.
struct Source<R: Read> {
    from: R,
    chain: u32,
}

/// Why there is no next record.
enum NoMore {
    /// The stream ends before its end.
    Cut,
    Failed(Failure),
}

impl<R: Read> Source<R> {
    /// Fills all of it.
    fn fill(&mut self, mut buf: &mut [u8]) -> std::result::Result<(), NoMore> {
        while !buf.is_empty() {
            match self.from.read(buf) {
                Ok(0) => return Err(NoMore::Cut),
                Ok(n) => buf = &mut buf[n..],
                // (A signal, perhaps the one to stop.)
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {
                    stop().map_err(NoMore::Failed)?;
                }
                Err(e) => return Err(NoMore::Failed(Failure::io("the stream", &e))),
            }
        }
        Ok(())
    }

    fn next(&mut self) -> std::result::Result<Record, NoMore> {
        let damaged = |e| {
            let remedy =
                "nothing of the record that is wrong was taken in: send it again from where it is";
            NoMore::Failed(Failure::new(Kind::Damaged, format!("{e}"), remedy))
        };
        stop().map_err(NoMore::Failed)?;
        let mut frame = [0; FRAME_BYTES];
        self.fill(&mut frame)?;
        let (len, crc) = Record::frame(&frame).map_err(damaged)?;
        let mut body = vec![0; len];
        self.fill(&mut body)?;
        Record::decode(&body, crc, &mut self.chain).map_err(damaged)
    }
}

/// What the first record says.
struct Begin {
    volume: String,
    root: InodeId,
    sent: Sent,
    before: u64,
    from: Position,
    name: Vec<u8>,
}

/// What it would take for a stream that begins so.
fn fits(place: &Place<'_>, begin: &Begin, known: Option<Known>) -> Result<Known> {
    let refuse = |message: String, remedy: String| {
        Err(Failure::failed(format!("{}: {message}", place.path), remedy))
    };
    let name = &begin.sent.name;
    let Some(known) = known else {
        if place.target()?.is_some() {
            return refuse(
                "it is there, and was not made by a receive".into(),
                "give a name that is not taken: the directory is made".into(),
            );
        }
        if begin.before != 0 {
            return refuse(
                format!("{name} was sent with --from, and nothing was received here before"),
                format!("send a snapshot without --from first: corbel send -- {}", quoted(name)),
            );
        }
        if begin.from != Position::default() {
            return refuse(
                "the stream goes on from somewhere, and nothing was received here before".into(),
                "send it without --resume".into(),
            );
        }
        let (volume, root) = (begin.volume.clone(), begin.root);
        let coming = Some(Coming { sent: begin.sent.clone(), at: begin.from, after: 0 });
        return Ok(Known { volume, root, complete: None, coming });
    };
    if (&known.volume, known.root) != (&begin.volume, begin.root) {
        return refuse(
            "the stream is of another volume, or of another directory of it".into(),
            "receive each into a directory of its own".into(),
        );
    }
    if let (Some(Coming { sent: coming, at, .. }), Some(command)) = (&known.coming, known.command())
    {
        if coming.number != begin.sent.number {
            let rest = if known.complete.is_none() {
                format!(", or corbel receive --abort {}", place.path)
            } else {
                String::new()
            };
            return refuse(
                format!("it is between two snapshots: {} has come up to {at}", coming.name),
                format!("go on with that first: {command}{rest}"),
            );
        }
        if begin.from > *at {
            return refuse(
                format!("the stream begins at {}, and it has come up to {at} only", begin.from),
                format!("go on with: {command}"),
            );
        }
    } else if begin.from != Position::default() {
        return refuse(
            "the stream goes on from somewhere, and none of it has come here".into(),
            "send it without --resume".into(),
        );
    }
    let has = known.complete.as_ref().map_or(0, |one| one.number);
    if has == begin.sent.number && known.coming.is_none() {
        return refuse(format!("it is as {name} already"), "there is nothing to receive".into());
    }
    if has != begin.before {
        let complete = known.complete.as_ref().map_or("", |one| one.name.as_str());
        return refuse(
            match has {
                0 => format!("{name} was sent with --from, and nothing was received here before"),
                _ => format!(
                    "it is as {complete}, and the stream changes another snapshot to {name}"
                ),
            },
            match has {
                0 => format!("send it without --from: corbel send -- {}", quoted(name)),
                _ => format!(
                    "send what changed since: corbel send --from={} -- {}",
                    quoted(complete),
                    quoted(name)
                ),
            },
        );
    }
    let known_before = known.coming.clone();
    let coming = known_before.unwrap_or(Coming {
        sent: begin.sent.clone(),
        at: Position::default(),
        after: 0,
    });
    Ok(Known { coming: Some(coming), ..known })
}

fn receive(volume: &Volume, args: &ReceiveArgs, from: impl Read, out: &Output) -> Result<()> {
    let place = Place::new(volume, &args.target)?;
    let mut source = Source { from, chain: 0 };
    let cut = |no_more: NoMore, what: &str| match no_more {
        NoMore::Failed(failure) => failure,
        NoMore::Cut => Failure::failed(
            format!("{}: {what}", args.target.display()),
            "see why the sender ended, and send it again",
        ),
    };
    let mut head = [0; HEAD_BYTES];
    source.fill(&mut head).map_err(|e| cut(e, "the stream ends before it begins"))?;
    transfer::check_head(&head).map_err(|e| {
        Failure::new(Kind::Damaged, format!("{e}"), "give what corbel send has written")
    })?;
    let record = source.next().map_err(|e| cut(e, "the stream ends before it begins"))?;
    let Record::Begin { volume: uuid, number, before, root, from, name, .. } = record else {
        let message = "the stream does not begin with what it is of";
        return Err(Failure::new(Kind::Damaged, message, "give what corbel send has written"));
    };
    let text = String::from_utf8_lossy(&name).into_owned();
    let begin = Begin {
        volume: crate::mkfs::show_uuid(&uuid),
        root,
        sent: Sent { number, name: text },
        before,
        from,
        name,
    };
    let before = place.known()?;
    let known = fits(&place, &begin, before.clone())?;
    let going_on = before.as_ref().is_some_and(|known| known.coming.is_some());
    let snapshot = match (&args.snapshot, args.no_snapshot) {
        (_, true) => None,
        (Some(name), _) => Some(name.as_bytes()),
        (None, _) => Some(&begin.name[..]),
    };
    if let Some(name) = snapshot
        && !going_on
        && place.snapshots()?.iter().any(|one| one.name == name)
    {
        let message = format!("there is a snapshot {} already", String::from_utf8_lossy(name));
        let remedy = "give another name with --snapshot, or --no-snapshot";
        return Err(Failure::failed(message, remedy));
    }
    let mut receiver = take::open(place, &before, known)?;
    let taken = take_all(&mut receiver, &mut source, out);
    receiver.close();
    let ended = taken.and_then(|()| receiver.end(snapshot));
    if let Err(mut failure) = ended {
        // What has come stays; the caller is told how to go on. (From where all was taken, if something was not.)
        let _ = receiver.known.coming.is_some() && receiver.note().is_ok();
        if let Some(command) = receiver.known.command() {
            failure.remedy = format!("{}; to go on: {command}", failure.remedy);
        }
        return Err(failure);
    }
    let (path, name) = (&receiver.place.path, &begin.sent.name);
    let said = json!({
        "received": name,
        "target": path,
        "records": receiver.records,
        "content_bytes": receiver.content,
        "snapshot": snapshot.map(|name| String::from_utf8_lossy(name)),
        "first": receiver.first,
    });
    out.result(&said, || {
        println!("{path}: as {name} ({} bytes of content received)", receiver.content);
    });
    Ok(())
}

fn take_all<R: Read>(
    receiver: &mut Receiver<'_>,
    source: &mut Source<R>,
    out: &Output,
) -> Result<()> {
    loop {
        match source.next() {
            Ok(Record::End { records }) if records == receiver.records + 1 => return Ok(()),
            Ok(Record::Begin { .. } | Record::End { .. }) => {
                let message =
                    format!("{}: the stream is put together wrongly", receiver.place.path);
                return Err(Failure::new(Kind::Damaged, message, "send it again"));
            }
            Ok(record) => receiver.take(record)?,
            Err(NoMore::Failed(failure)) => return Err(failure),
            Err(NoMore::Cut) => {
                let message = format!("{}: the stream ends in the middle", receiver.place.path);
                return Err(Failure::failed(message, "see why the sender ended"));
            }
        }
        if receiver.content - receiver.told >= TELL {
            receiver.told = receiver.content;
            out.step(format!("{} MiB of content received", receiver.content / MIB));
        }
    }
}

fn status(place: &Place<'_>, out: &Output) -> Result<()> {
    let Some(known) = place.known()? else {
        let message = format!("{}: nothing was received there", place.path);
        return Err(Failure::failed(message, "give the directory that corbel receive was given"));
    };
    let mut said = known.to_json();
    said["target"] = json!(place.path);
    said["resume"] = json!(known.command());
    out.result(&said, || {
        match &known.complete {
            Some(one) if known.coming.is_none() => println!("{}: as {}", place.path, one.name),
            Some(one) => println!("{}: between {} and a later one", place.path, one.name),
            None => println!("{}: not there yet", place.path),
        }
        if let (Some(Coming { sent: one, at, .. }), Some(command)) =
            (&known.coming, known.command())
        {
            println!("{} has come up to {at}; to go on: {command}", one.name);
        }
    });
    Ok(())
}

fn abort(mut place: Place<'_>, out: &Output) -> Result<()> {
    if place.home.is_none() {
        let message = format!("{}: nothing is being received there", place.path);
        return Err(Failure::failed(message, "give the directory that corbel receive was given"));
    }
    let (home, _) = open_home(&mut place)?;
    let known = place.known()?;
    if known.as_ref().is_some_and(|known| known.complete.is_some()) {
        let message = format!("{}: its first stream has come", place.path);
        let remedy = "only a first stream can be given up: go on with the one that was interrupted (corbel receive --status)";
        return Err(Failure::failed(message, remedy));
    }
    let built = place.fs().lookup(&place.volume.caller(), home, TREE).is_ok();
    if known.is_some() && !built && place.target()?.is_some() {
        let message = format!("{}: all of it has come but the end", place.path);
        return Err(Failure::failed(message, "go on with it: corbel receive --status"));
    }
    // First what is known of it: a kill in between leaves what the next one removes.
    let caller = place.volume.caller();
    match place.fs().unlink(&caller, home, b"state") {
        Err(Errno::NOENT) => {}
        gone => place.said("removing it", gone)?,
    }
    empty(&place, home)?;
    place.said("removing it", place.fs().unlink(&caller, home, b"lock"))?;
    let name = home_name(&place.name);
    place.said("removing it", place.fs().rmdir(&caller, place.parent, &name))?;
    place.said("removing it", place.fs().refused())?;
    out.result(&json!({"aborted": place.path}), || {
        println!("{}: what had come of it is removed", place.path);
    });
    Ok(())
}

/// Runs `corbel receive`.
pub fn run(global: &Global, args: &ReceiveArgs, out: &Output) -> Result<()> {
    crate::signals::catch();
    let volume = Volume::open(global, args.socket.as_deref())?;
    if volume.caller().uid != 0 {
        return Err(failed("receiving", Errno::PERM));
    }
    if args.status || args.abort {
        let place = Place::new(&volume, &args.target)?;
        return if args.status { status(&place, out) } else { abort(place, out) };
    }
    match &args.input {
        Some(path) => {
            let file = std::fs::File::open(path).map_err(|e| Failure::io(path.display(), &e))?;
            receive(&volume, args, std::io::BufReader::with_capacity(1 << 20, file), out)
        }
        None => {
            let input = std::io::stdin().lock();
            receive(&volume, args, std::io::BufReader::with_capacity(1 << 20, input), out)
        }
    }
}
