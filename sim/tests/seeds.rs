//! A few hundred histories, and a few that once found something.

use sim::{Flavour, Preset, run};

fn check(seed: u64) {
    check_as(seed, Preset::of(seed));
}

fn check_as(seed: u64, preset: Preset) {
    let outcome = run(seed, preset.clone(), None);
    if let Some(why) = outcome.violation {
        let again = run(seed, preset, None);
        let same = (again.hash, again.events) == (outcome.hash, outcome.events);
        let word = if same { "the same again" } else { "ANOTHER HISTORY when run again" };
        panic!(
            "seed {seed}: {why} ({word}: {:?})\nreplay: cargo run --release -p sim -- --seed {seed} --trace (--flavour, where the test has one)",
            again.violation
        );
    }
}

/// A number that changes with each commit, so that each brings seeds of its own.
fn of_this_commit() -> Option<u64> {
    let out = std::process::Command::new("git").args(["rev-parse", "HEAD"]).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    u64::from_str_radix(text.get(..12)?, 16).ok()
}

#[test]
fn fixed_seeds() {
    (1..=40).for_each(check);
}

/// What each found is told in docs/testing.md.
#[test]
fn seeds_that_found_something() {
    let small = [71, 84, 87, 113, 260, 377, 436, 1376, 1379, 1589, 1593, 2217, 5456];
    let large = [
        9_530_840,
        9_521_910,
        9_511_267,
        9_505_445,
        8_909_565,
        8_912_577,
        9_305_651,
        9_403_704,
        9_621_331,
        9_624_295,
        9_626_599,
        9_680_757,
        1_795_291_928_306,
    ];
    small.into_iter().chain(large).for_each(check);
    let mut preset = Preset::of(5_319_006);
    preset.make(Flavour::Large);
    check_as(5_319_006, preset);
}

#[test]
fn seeds_of_this_commit() {
    let from = of_this_commit().unwrap_or(1 << 20);
    (from..from + 12).for_each(check);
}

/// Some thirty times a node is cut off from all others while clients everywhere write. (Thousands in `scripts/soak.sh`.)
#[test]
fn nodes_that_are_cut_off_again_and_again() {
    let from = of_this_commit().unwrap_or(1 << 20);
    for seed in [1001, from, from + 1] {
        let mut preset = Preset::of(seed);
        preset.make(Flavour::Parted);
        check_as(seed, preset);
    }
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in [3, 16, 1 << 40] {
        let (a, b) = (run(seed, Preset::of(seed), None), run(seed, Preset::of(seed), None));
        assert!(a.events > 1000, "{a:?}");
        assert_eq!((a.hash, a.events), (b.hash, b.events), "seed {seed}");
    }
}
