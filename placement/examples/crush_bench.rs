//! CRUSH placements a CPU second, ours and libcrush's, in one run: the table of docs/placement.md.
//!
//! `cargo run --release -p placement --example crush_bench`

#[path = "../tests/crush/ceph.rs"]
mod ceph;
#[path = "../tests/crush/corpus.rs"]
mod corpus;

use ceph::Scratch;
use placement::crush::{Algorithm, Engine, Map, Options, Placer, Tunables, Workspace};
use std::path::Path;

const REPLICAS: usize = 3;

/// CPU seconds of this thread.
fn thread_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let ns = stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
    ns.expect("nanoseconds first") / 1e9
}

/// CPU seconds of the children that ended.
fn children_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields = stat.rsplit(')').next().unwrap_or("").split_whitespace();
    // User and system time of waited-for children, in hundredths of a second.
    fields.skip(13).take(2).filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Best of three: µs a placement.
fn best(mut run: impl FnMut() -> f64) -> f64 {
    (0..3).map(|_| run()).fold(f64::INFINITY, f64::min) * 1e6
}

fn ours(map: &Map, engine: Engine, many: bool, inputs: u32) -> f64 {
    let options = Options { engine: Some(engine), ..Options::default() };
    let placer = Placer::new(map, &options).expect("a sound map");
    let reweights = vec![0x1_0000; map.device_count()];
    let mut workspace = Workspace::new();
    let xs: Vec<u32> = (0..inputs).collect();
    let mut out = [0; REPLICAS];
    best(|| {
        let start = thread_seconds();
        if many {
            // As a service would: some thousands at a time, the memory reused.
            for xs in xs.chunks(4096) {
                let batch = placer.place_many(0, xs, REPLICAS, &reweights, &mut workspace);
                assert!(batch.expect("it runs").lens.iter().all(|n| *n == 3));
            }
        } else {
            for x in &xs {
                let found = placer.place(0, *x, &reweights, &mut out, &mut workspace);
                assert_eq!(found, Ok(REPLICAS));
            }
        }
        (thread_seconds() - start) / f64::from(inputs)
    })
}

/// `crushtool --test` without output, less what it takes to start.
fn crushtool(map: &Map, inputs: u32, dir: &Path) -> f64 {
    let file = dir.join("map");
    std::fs::write(&file, map.encode()).expect("written");
    let run = |last: u32| {
        let start = children_seconds();
        let (last, file) = (last.to_string(), file.to_str().expect("text"));
        let args = ["-i", file, "--test", "--rule", "0", "--num-rep", "3", "--min-x", "0"];
        ceph::output("crushtool", &[&args[..], &["--max-x", &last, "--show-statistics"]].concat());
        children_seconds() - start
    };
    best(|| (run(inputs) - run(0)) / f64::from(inputs))
}

fn main() {
    assert!(ceph::is_there("crushtool"), "crushtool is not installed (Debian: ceph-base)");
    let dir = Scratch::new("bench");
    let engines: Vec<Engine> = Engine::ALL.into_iter().filter(|e| e.is_available()).collect();
    println!("µs of CPU a placement of {REPLICAS} replicas, 1,000 devices on three levels");
    for algorithm in Algorithm::ALL {
        let map = corpus::thousand(algorithm, Tunables::DEFAULT);
        let theirs = crushtool(&map, 300_000, &dir.0);
        print!("{:8} crushtool {theirs:.3}", algorithm.name());
        for engine in &engines {
            let (one, many) =
                (ours(&map, *engine, false, 200_000), ours(&map, *engine, true, 500_000));
            print!("   {} one {one:.3} many {many:.3} ({:.1}x)", engine.name(), theirs / many);
        }
        println!();
    }
}
