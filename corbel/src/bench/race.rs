//! Comparing the speed of functions on a machine that does other things too: they take turns, and
//! each is judged by its best turn.

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
