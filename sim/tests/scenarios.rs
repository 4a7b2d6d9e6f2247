//! Directed histories: with the code as it is shipped, each is clean, and gets to where it leads.
//! With a planted bug each finds it: `corbel-sim planted` (docs/testing.md), but for those that a test has taken over (`ELSEWHERE` in
//! `sim/src/planted.rs`).

use sim::run;
use sim::scenario::ALL;

/// Histories that showed something.
const FOUND: &[(&str, u64)] = &[
    ("old-epoch-accepted", 24),
    ("heir-untold", 9),
    ("heir-untold", 80),
    ("shared-bytes", 69),
    ("shared-bytes", 116),
];

#[test]
fn every_scenario_is_clean() {
    for scenario in ALL {
        let drawn = scenario.name == "drawn";
        let mut seeds = if drawn { (1..=12).chain([253]).collect() } else { vec![1] };
        seeds.extend(FOUND.iter().filter(|of| of.0 == scenario.name).map(|of| of.1));
        for seed in seeds {
            let preset = scenario.preset(seed);
            let scripted = preset.script.rounds > 0;
            let outcome = run(seed, preset, None);
            if let Some(why) = outcome.violation {
                let name = scenario.name;
                panic!(
                    "{name}, seed {seed}: {why}\nreplay: corbel-sim scenario {name} --seed {seed} --trace"
                );
            }
            assert!(outcome.operations > 10, "{}: {outcome:?}", scenario.name);
            assert!(outcome.steps > 0 || !scripted || drawn, "{}: nothing happened", scenario.name);
        }
    }
}
