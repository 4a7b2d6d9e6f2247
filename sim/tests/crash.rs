//! Crash states of memory and of disks, the quick form. `corbel-sim crash` is the long one.

use sim::crash::lab::{Effort, Lab};
use sim::crash::run::{Plan, run};
use sim::crash::workload::Workload;
use storage::format::superblock::Durability;

#[test]
fn every_crash_state_of_short_workloads_is_right() {
    let effort = Effort { random: 2, nested: 50, ..Effort::default() };
    let plan = Plan {
        effort,
        thin: 300,
        sample: 50,
        // A bound for what hangs, and no measure: how fast the machine is must not decide.
        seconds: Some(3600),
        returned: true,
        ..Plan::default()
    };
    let report = run(&plan).unwrap();
    println!("{}", report.line());
    let found: Vec<_> = report.violations.iter().map(ToString::to_string).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(report.complete, "it hangs: {}", report.line());
    assert!(report.tally.checked > 100_000, "{}", report.line());
}

/// Found by the crash states: service/src/core/stream.rs published a part of a chunk, which did not fit any more
/// when the whole chunk was applied again after a crash.
#[test]
fn a_chunk_is_published_whole_or_not_at_all() {
    let text = "Fresh Lazy Member; create A/y; clone A/x A/y; pause; create z; rename z B/x; \
                write A/x 5 10; fsync";
    let workload = Workload::parse(text).unwrap();
    let mut lab = Lab::new(Effort { nested: 1, ..Effort::default() }, false);
    let found = lab.explore(&workload, Durability::Pmem, None);
    assert!(found.is_ok(), "{}", found.unwrap_err());
}

/// The pin of a number goes before the chunk that frees its inode is durable: after a crash in between the
/// log is judged again from its Create on, which must find the number unused.
#[test]
fn a_number_made_and_removed_in_the_log_is_made_again_after_a_crash() {
    let text = "Fresh Lazy; rename A z; chmod B 448; create B/x; utime B; unlink B/x; fsync; pause; \
        chmod B 448; fsync";
    let workload = Workload::parse(text).unwrap();
    let mut lab = Lab::new(Effort { nested: 1, ..Effort::default() }, false);
    let found = lab.explore(&workload, Durability::Pmem, None);
    assert!(found.is_ok(), "{}", found.unwrap_err());
}

/// Half a root record of a transaction that never was, completed by a torn write of the next one: its pages were in
/// use for something else by then.
#[test]
fn half_a_root_is_not_completed_by_the_next() {
    let text = "Full Fetching; setxattr A/x user.big 3000; fsync; write A/x 4096 4096; chmod A/x 420; fsync; \
        rename A B; fsync; quota 100000; pause; setacl B 5 1; fsync; pause";
    let workload = Workload::parse(text).unwrap();
    let mut lab = Lab::new(Effort::default().twice(), false);
    let found = lab.explore(&workload, Durability::Pmem, None);
    assert!(found.is_ok(), "{}", found.unwrap_err());
}
