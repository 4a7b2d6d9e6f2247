//! One seed gives one history, whatever else the machine does.

use std::path::{Path, PathBuf};

use sim::{Preset, run};

/// Several threads run the same seeds at once, with others that do nothing but turn: if anything outside (time, the
/// scheduling of threads, addresses, the order of a hash table) had a part in a history, their traces would differ.
#[test]
fn a_busy_machine_changes_no_history() {
    let seeds = [2, 7, 11, 18, 29, 36];
    let trace = |seed| {
        let outcome = run(seed, Preset::of(seed), None);
        (seed, outcome.hash, outcome.events, outcome.violation)
    };
    let alone = seeds.map(trace);
    let done = std::sync::atomic::AtomicBool::new(false);
    let (done, alone) = (&done, &alone);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(move || {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let runs = [0, 3].map(|first| {
            scope.spawn(move || {
                let order = (0..seeds.len()).map(|i| (i + first) % seeds.len());
                order.map(|i| trace(seeds[i]) == alone[i]).collect::<Vec<bool>>()
            })
        });
        let same = runs.map(|run| run.join());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        for same in same {
            assert_eq!(same.ok(), Some(vec![true; seeds.len()]));
        }
    });
}

/// What runs in a history asks nobody for the time, for threads, or for an order that changes from run to run.
#[test]
fn what_runs_in_a_history_has_no_clock_of_its_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let whole = ["service/src/core", "storage/src/tree", "storage/src/volume", "sim/src/world"];
    let more = ["sim/src/actor", "sim/src/process", "cluster/src/coordinator/machine"];
    let files = ["service/src/core.rs", "service/src/serving.rs", "storage/src/volume.rs"];
    let others =
        ["storage/src/memory.rs", "sim/src/world.rs", "sim/src/actor.rs", "sim/src/host.rs"];
    let mut all: Vec<PathBuf> = files.iter().chain(&others).map(|f| root.join(f)).collect();
    all.push(root.join("cluster/src/coordinator/machine.rs"));
    for dir in whole.iter().chain(&more) {
        collect(&root.join(dir), &mut all);
    }
    assert!(all.len() > 35, "{all:?}");
    let words = ["Instant::", "SystemTime", "thread::", "env::var", "RandomState", "process::id"];
    for path in all {
        let text = std::fs::read_to_string(&path).unwrap();
        // Tests of a file stand at its end, and run in no history.
        let text = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(&text);
        for word in words {
            assert!(!text.contains(word), "{}: {word}", path.display());
        }
    }
}

fn collect(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}
