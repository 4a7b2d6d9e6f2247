//! The block layer and pools on simulated stores. `corbel-sim block` runs more of them.

use sim::block::run;

#[test]
fn histories_are_right_and_the_same_again() {
    let mut total = std::collections::BTreeMap::new();
    for seed in 1..=40 {
        let outcome = run(seed, None);
        assert_eq!(outcome.violation, None, "corbel-sim block --seed {seed} --trace");
        if seed % 20 == 0 {
            assert_eq!(run(seed, None).hash, outcome.hash, "seed {seed} is not deterministic");
        }
        outcome.counts.into_iter().for_each(|(what, n)| *total.entry(what).or_insert(0) += n);
    }
    for what in ["crashes", "repairs", "losses", "settled", "stores that hang", "stores that lie"] {
        assert!(total.get(what).is_some_and(|n| *n > 5), "{what}: {total:?}");
    }
}
