//! A directory of very many names: what making, finding, listing and removing one costs may grow with the
//! depth of the tree only. Prints figures; `cargo test --release -p storage --test names -- --ignored
//! --nocapture` goes to ten million, which takes minutes and some 5 GB of memory.

mod common;

use std::time::Duration;

use base::random::Random;
use base::{Epoch, InodeId, Sequence};
use common::*;
use storage::format::entry::{Header, Op};
use storage::media::Segment;

/// Operations between two publications, as in the service.
const BATCH: u64 = 2000;
/// Names of a sample that is looked up, or listed at once.
const SAMPLE: u64 = 5000;

/// Time that this thread has run: what else the machine does is left out.
fn ran() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn each(n: u64, run: impl FnOnce()) -> Duration {
    let begun = ran();
    run();
    (ran() - begun) / u32::try_from(n).unwrap()
}

fn apply(d: &mut Driver, n: u64, op: &Op<'_>) {
    let time = 3_000_000_000 + n * 1000;
    let header =
        Header { length: 0, sequence: Sequence(n), epoch: Epoch(1), lane: 0, time, promised: 0 };
    d.sequence = n;
    d.volume.apply(&header, op, (Segment::Stream, 0)).unwrap();
    if n.is_multiple_of(BATCH) {
        d.publish();
    }
}

fn name(i: u64) -> String {
    format!("a file with the number {i}")
}

/// Looks a sample of the names 0..n up, and lists as many from somewhere in the middle on.
fn look(d: &Driver, n: u64, random: &mut Random) -> (Duration, Duration) {
    let lookup = each(SAMPLE, || {
        for _ in 0..SAMPLE {
            let i = random.below(n);
            let found = d.volume.lookup(InodeId(1), name(i).as_bytes()).unwrap();
            assert_eq!(found.unwrap().0, InodeId(i + 2));
        }
        assert_eq!(d.volume.lookup(InodeId(1), name(n).as_bytes()), Ok(None));
    });
    let list = each(SAMPLE, || {
        let (mut cookie, mut seen) = ((random.next_u64() >> 2) & !0xff, 0);
        while seen < SAMPLE {
            let before = cookie;
            let all = d.volume.readdir(InodeId(1), cookie, 500, &mut |name| {
                (cookie, seen) = (name.next, seen + 1);
                true
            });
            if all.unwrap().unwrap() {
                cookie = 0; // the end: on from the front
            }
            assert_ne!(before, cookie, "listing goes on");
        }
    });
    (lookup, list)
}

/// Costs with `few` and with `many` names.
fn grow(few: u64, many: u64, capacity: u64) {
    let mut d = Driver::new(capacity);
    let mut random = Random::new(few);
    let mut costs = Vec::new();
    let (mut at, mut steps) = (0, 0);
    for n in [few, many] {
        let last = n - few / 2;
        for i in at..last {
            apply(&mut d, i + 1, &create(i + 2, 1, name(i).as_bytes(), FILE));
        }
        let made = each(n - last, || {
            for i in last..n {
                apply(&mut d, i + 1, &create(i + 2, 1, name(i).as_bytes(), FILE));
            }
        });
        (at, steps) = (n, n);
        let (lookup, list) = look(&d, n, &mut random);
        costs.push([made, lookup, list]);
        println!("{n} names: create {made:?}, lookup {lookup:?}, list {list:?} a name");
    }
    assert_eq!(d.volume.attr(InodeId(1)).unwrap().unwrap().entries, many);
    let mut removed = Vec::new();
    for (from, to) in [(0, few / 2), (few / 2, many - few / 2), (many - few / 2, many)] {
        removed.push(each(to - from, || {
            for i in from..to {
                steps += 1;
                apply(&mut d, steps, &unlink(i + 2, 1, name(i).as_bytes()));
                steps += 1;
                apply(&mut d, steps, &Op::Reap { ino: InodeId(i + 2) });
            }
        }));
    }
    println!("unlink of {many} {:?}, of {few} {:?}", removed[0], removed[2]);
    d.publish();
    assert_eq!(d.volume.attr(InodeId(1)).unwrap().unwrap().entries, 0);
    assert_eq!(d.volume.tree().pages(), 1, "everything is given back");
    // Twice the depth and a cache that holds no longer everything; a cost in proportion would be far above.
    let slack = |few: Duration| few * 8 + Duration::from_micros(20);
    for (few, many) in costs[0].iter().zip(costs[1]) {
        assert!(many < slack(*few), "{costs:?}");
    }
    assert!(removed[0] < slack(removed[2]), "{removed:?}");
}

#[test]
fn a_directory_grows_to_a_hundred_thousand_names() {
    grow(2000, if cfg!(debug_assertions) { 50_000 } else { 100_000 }, 2 << 30);
}

#[test]
#[ignore = "takes minutes and 5 GB of memory"]
fn a_directory_grows_to_ten_million_names() {
    grow(10_000, 1_000_000, 32 << 30);
    grow(10_000, 10_000_000, 32 << 30);
}
