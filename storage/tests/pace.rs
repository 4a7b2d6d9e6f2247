//! Pace of `apply`: prints figures (`cargo test --release -p storage --test pace -- --nocapture`),
//! and fails when something has become slower by an order of magnitude.

mod common;

use std::time::{Duration, Instant};

use base::random::Random;
use base::{Epoch, InodeId, Sequence, StreamSeq};
use common::*;
use storage::check::check;
use storage::format::entry::{Header, Op};
use storage::media::Segment;
use storage::volume::run_copies;

fn header(n: u64) -> Header {
    let time = 3_000_000_000 + n * 1000;
    Header { length: 0, sequence: Sequence(n), epoch: Epoch(1), lane: 0, time, promised: 0 }
}

fn report(what: &str, n: u64, took: Duration, limit: Duration) {
    let each = took / u32::try_from(n).unwrap();
    println!("{what}: {n} in {took:?}, {each:?} each");
    assert!(each < limit, "{what} takes {each:?} each, more than {limit:?}");
}

#[test]
fn operations_take_microseconds() {
    let mut d = Driver::new(2 << 30);
    let n = if cfg!(debug_assertions) { 30_000u64 } else { 100_000 };
    let start = Instant::now();
    for i in 0..n {
        let name = format!("file {i}");
        d.volume
            .apply(&header(i + 1), &create(i + 2, 1, name.as_bytes(), FILE), (Segment::Stream, 0))
            .unwrap();
    }
    report("create in one directory", n, start.elapsed(), Duration::from_micros(80));
    let start = Instant::now();
    d.publish();
    println!("publish of {} pages: {:?}", d.volume.tree().pages(), start.elapsed());

    let start = Instant::now();
    let (mut cookie, mut seen) = (0, 0);
    while !d
        .volume
        .readdir(InodeId(1), cookie, 1000, &mut |name| {
            (cookie, seen) = (name.next, seen + 1);
            true
        })
        .unwrap()
        .unwrap()
    {}
    assert_eq!(seen, n + 2);
    report("readdir", n, start.elapsed(), Duration::from_micros(20));
    let start = Instant::now();
    for i in 0..n {
        let found = d.volume.lookup(InodeId(1), format!("file {i}").as_bytes()).unwrap();
        assert_eq!(found.unwrap().0, InodeId(i + 2));
    }
    report("lookup", n, start.elapsed(), Duration::from_micros(40));

    let data = vec![5u8; 4096];
    let start = Instant::now();
    for i in 0..n {
        d.volume.apply(&header(i + 1), &write(2, i * 4096, &data), (Segment::Stream, 0)).unwrap();
    }
    report("append 4 KiB to one file", n, start.elapsed(), Duration::from_micros(60));
    assert_eq!(d.volume.extents(InodeId(2), 0, 100).unwrap().len(), 1);
    let mut random = Random::new(1);
    let start = Instant::now();
    for i in 0..n {
        let at = random.below(n) * 4096;
        d.volume.apply(&header(i + 1), &write(2, at, &data), (Segment::Stream, 0)).unwrap();
    }
    report("overwrite 4 KiB", n, start.elapsed(), Duration::from_micros(60));
    let start = Instant::now();
    for i in 0..n {
        let ino = 3 + random.below(n - 1);
        d.volume.apply(&header(i + 1), &write(ino, 0, &data), (Segment::Stream, 0)).unwrap();
    }
    report("write 4 KiB to random files", n, start.elapsed(), Duration::from_micros(80));
    let start = Instant::now();
    d.publish();
    println!("publish of {} writes: {:?}", 3 * n, start.elapsed());
    let start = Instant::now();
    d.reopen();
    println!("open: {:?}", start.elapsed());
    let start = Instant::now();
    assert!(check(&*d.media).unwrap().is_sound());
    println!("check: {:?}", start.elapsed());

    // One small transaction after another, as fsync makes them.
    let start = Instant::now();
    for i in 0..2000 {
        d.volume.apply(&header(i + 1), &write(2, i * 4096, &data), (Segment::Stream, 0)).unwrap();
        let sealed = d.volume.seal(StreamSeq(i), Epoch(1), &[]).unwrap();
        run_copies(&*d.media, &sealed.copies).unwrap();
        d.volume.publish(sealed).unwrap();
    }
    report("write, seal, publish", 2000, start.elapsed(), Duration::from_micros(500));

    let start = Instant::now();
    for i in 0..n {
        let name = format!("file {i}");
        let h = header(i + 1);
        let gone = d.volume.apply(&h, &unlink(i + 2, 1, name.as_bytes()), (Segment::Stream, 0));
        assert_eq!(gone.unwrap().orphaned, Some(InodeId(i + 2)));
        d.volume.apply(&h, &Op::Reap { ino: InodeId(i + 2) }, (Segment::Stream, 0)).unwrap();
    }
    report("unlink and reap", n, start.elapsed(), Duration::from_micros(160));
    d.publish();
    assert_eq!(d.volume.tree().pages(), 1);
    assert_eq!(d.volume.statfs().blocks_free, d.volume.statfs().blocks);
    assert!(check(&*d.media).unwrap().is_sound());
}
