use super::{BUGS, history};
use crate::planted::{Bug, choose};

/// How many histories; `CORBEL_SEEDS` says how many more.
const SEEDS: u64 = 400;
/// How many of them a planted bug may stay unseen in.
const CAUGHT: u64 = 4000;

#[test]
fn what_a_kernel_keeps_is_never_older_than_the_call() {
    let more = std::env::var("CORBEL_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 0..SEEDS + more.unwrap_or(0) {
        history(seed).unwrap();
    }
}

/// Each in histories that are clean without it.
#[test]
fn planted_bugs_are_caught() {
    let mut late = Vec::new();
    for bug in BUGS {
        choose(*bug);
        let seed = (0..CAUGHT).find(|seed| history(*seed).is_err());
        choose(Bug::None);
        println!("{bug:?}: {seed:?}");
        match seed {
            Some(seed) => history(seed).unwrap(),
            None => late.push(bug),
        }
    }
    assert!(late.is_empty(), "not caught: {late:?}");
}
