//! Plain random bytes through the body of every target: nothing is made of a real object, and no input led to another. (What is changed
//! of known inputs is seldom as far from all of them: of such bytes one in forty led a chain with a mad member to what is never true.)

use base::random::Random;
use hostile::TARGETS;

/// Inputs of each target.
const RUNS: u64 = 40;
const BYTES_MAX: u64 = 4096;

/// The seed of the first input, printed by whoever fails.
fn seed() -> u64 {
    let fixed = std::env::var("CORBEL_SEED").ok().and_then(|s| s.parse().ok());
    fixed.unwrap_or_else(|| {
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        time.map_or(1, |t| t.as_micros() as u64)
    })
}

fn input(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = vec![0; random.below(BYTES_MAX) as usize];
    random.fill(&mut bytes);
    bytes
}

#[test]
fn plain_random_bytes_are_survived() {
    let first = seed();
    for target in TARGETS {
        for seed in first..first + RUNS {
            // Seen only if the body panics.
            println!("{}: CORBEL_SEED={seed}", target.name);
            (target.body)(&input(seed));
        }
    }
}
