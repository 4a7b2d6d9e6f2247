//! Comparing the speed of functions on a machine that does other things too: they take turns, and
//! each is judged by its best turn, or two by the median of what one takes of the other.

use std::time::{Duration, Instant};

/// Seconds per call of each contender, best of `rounds` turns of about `turn` each.
pub fn race<const N: usize>(
    rounds: usize,
    turn: Duration,
    mut contenders: [&mut dyn FnMut(); N],
) -> [f64; N] {
    let mut best = [f64::INFINITY; N];
    let calls = contenders.each_mut().map(|f| calls_per_turn(turn, *f));
    for _ in 0..rounds {
        for (i, f) in contenders.iter_mut().enumerate() {
            let start = Instant::now();
            for _ in 0..calls[i] {
                f();
            }
            best[i] = best[i].min(start.elapsed().as_secs_f64() / f64::from(calls[i]));
        }
    }
    best
}

/// How many times as long a call of the second takes as one of the first: the median of `rounds` turns of both, each about `turn`
/// long. For what is nearly alike: the best turns of the two may be of different moments.
pub fn ratio(rounds: usize, turn: Duration, mut contenders: [&mut dyn FnMut(); 2]) -> f64 {
    let calls = contenders.each_mut().map(|f| calls_per_turn(turn, *f));
    let mut ratios: Vec<f64> = (0..rounds)
        .map(|round| {
            let mut times = [0.0; 2];
            // Neither is always the one that comes after the other.
            for i in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                let start = Instant::now();
                for _ in 0..calls[i] {
                    contenders[i]();
                }
                times[i] = start.elapsed().as_secs_f64() / f64::from(calls[i]);
            }
            times[1] / times[0]
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

/// How many calls fill a turn; also warms the caches.
fn calls_per_turn(turn: Duration, f: &mut dyn FnMut()) -> u32 {
    let mut calls = 1u32;
    loop {
        let start = Instant::now();
        for _ in 0..calls {
            f();
        }
        let took = start.elapsed();
        if took * 4 >= turn || calls >= 1 << 24 {
            let scale = turn.as_secs_f64() / took.as_secs_f64().max(1e-9);
            return (f64::from(calls) * scale).clamp(1.0, 1e9) as u32;
        }
        calls *= 4;
    }
}
