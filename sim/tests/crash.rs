//! Crash states of memory and of disks, the quick form. `corbel-sim crash` is the long one.

use sim::crash::run::{Plan, run};

#[test]
fn every_crash_state_of_short_workloads_is_right() {
    let plan = Plan { thin: 60, sample: 100, seconds: Some(100), ..Plan::default() };
    let report = run(&plan).unwrap();
    println!("{}", report.line());
    let found: Vec<_> = report.violations.iter().map(ToString::to_string).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(report.complete, "too slow for the quick form: {}", report.line());
    assert!(report.tally.checked > 100_000, "{}", report.line());
}
