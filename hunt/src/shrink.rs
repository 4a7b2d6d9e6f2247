//! Makes a history that shows a difference short: leaves steps out, then makes what is left simpler,
//! as long as the same difference appears.

use std::io;
use std::time::{Duration, Instant};

use crate::ground::Ground;
use crate::judge::Difference;
use crate::script::{Script, Step};
use crate::stage::{Fixed, Setting, play};

/// A way to run scripts again and again.
pub struct Bench<'a> {
    /// Where.
    pub ground: &'a mut Ground,
    /// With what.
    pub setting: &'a Setting,
    /// Names of directories begin so.
    pub name: String,
    runs: u64,
    /// Runs for one question: what depends on chance needs more.
    tries: u32,
    end: Instant,
}

impl std::fmt::Debug for Bench<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").field("name", &self.name).field("runs", &self.runs).finish()
    }
}

/// What is left of a history.
#[derive(Debug)]
pub struct Shrunk {
    /// The short script.
    pub script: Script,
    /// What it shows.
    pub difference: Difference,
    /// How often it was shown when the whole history was run again: of so many runs.
    pub shown: (u32, u32),
    /// Runs that this took.
    pub runs: u64,
}

/// Runs of the whole history at first.
const FIRST: u32 = 4;
/// Most runs for one question.
const MOST: u32 = 12;

impl<'a> Bench<'a> {
    /// For so long.
    pub fn new(ground: &'a mut Ground, setting: &'a Setting, name: &str, limit: Duration) -> Self {
        Self { ground, setting, name: name.into(), runs: 0, tries: 1, end: Instant::now() + limit }
    }

    /// Runs a script once.
    pub fn run(&mut self, script: &Script) -> io::Result<Option<Difference>> {
        self.runs += 1;
        let name = format!("{}-{}", self.name, self.runs);
        let mut source = Fixed::new(&script.steps);
        play(self.ground, self.setting, &name, &script.actors, &mut source)
            .map(|outcome| outcome.difference)
    }

    fn shows(&mut self, script: &Script, kind: &str) -> io::Result<Option<Difference>> {
        for _ in 0..self.tries {
            if let Some(difference) = self.run(script)?.filter(|d| d.kind == kind) {
                return Ok(Some(difference));
            }
        }
        Ok(None)
    }

    /// Makes a history short. None if it does not show the difference again.
    pub fn shrink(&mut self, script: &Script, kind: &str) -> io::Result<Option<Shrunk>> {
        let mut shown = 0;
        let mut found = None;
        for _ in 0..FIRST {
            if let Some(difference) = self.run(script)?.filter(|d| d.kind == kind) {
                shown += 1;
                found = Some(difference);
            }
        }
        let Some(mut found) = found else { return Ok(None) };
        self.tries = if shown == FIRST { 1 } else { (3 * FIRST / shown).min(MOST) };
        let mut best = cut(script, &found);
        loop {
            let before = best.to_string();
            self.leave_out(&mut best, &mut found)?;
            self.simplify(&mut best, &mut found)?;
            if best.to_string() == before || Instant::now() > self.end {
                break;
            }
        }
        let best = without_idle(&best);
        // Once more, for what is said about it.
        if let Some(difference) = self.shows(&best, kind)? {
            found = difference;
        }
        Ok(Some(Shrunk { script: best, difference: found, shown: (shown, FIRST), runs: self.runs }))
    }

    /// Tries another script in place of the best one.
    fn try_one(
        &mut self,
        best: &mut Script,
        found: &mut Difference,
        other: Script,
    ) -> io::Result<bool> {
        if Instant::now() > self.end {
            return Ok(false);
        }
        let Some(difference) = self.shows(&other, &found.kind)? else { return Ok(false) };
        *best = cut(&other, &difference);
        *found = difference;
        Ok(true)
    }

    /// Leaves out what all but the last step can do without: long stretches first.
    fn leave_out(&mut self, best: &mut Script, found: &mut Difference) -> io::Result<()> {
        for actor in (0..best.actors.len()).rev() {
            let mut other = best.clone();
            other.steps.retain(|step| who(step) != Some(actor));
            if other.steps.len() < best.steps.len() && !other.steps.is_empty() {
                self.try_one(best, found, other)?;
            }
        }
        // All calls of a kind that come before the last step, or all of one process.
        let last = best.steps.len().saturating_sub(1);
        let mut kinds: Vec<String> = best.steps[..last].iter().map(|s| s.name().into()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            let mut other = best.clone();
            let last = other.steps.pop();
            other.steps.retain(|step| step.name() != kind);
            other.steps.extend(last);
            if other.steps.len() < best.steps.len() {
                self.try_one(best, found, other)?;
            }
        }
        let mut length = best.steps.len() / 2;
        while length > 0 {
            let mut end = best.steps.len().saturating_sub(1);
            while end > 0 {
                let begin = end.saturating_sub(length);
                let mut other = best.clone();
                other.steps.drain(begin..end);
                self.try_one(best, found, other)?;
                end = begin.min(best.steps.len().saturating_sub(1));
                if Instant::now() > self.end {
                    return Ok(());
                }
            }
            length /= 2;
        }
        Ok(())
    }

    /// Tries simpler arguments, and other views.
    fn simplify(&mut self, best: &mut Script, found: &mut Difference) -> io::Result<()> {
        for actor in 0..best.actors.len() {
            for view in ["m1", "r1", "m2", "r2"] {
                if best.actors[actor] == view || Instant::now() > self.end {
                    break;
                }
                let mut other = best.clone();
                other.actors[actor] = view.into();
                if self.try_one(best, found, other)? {
                    break;
                }
            }
        }
        for from in (1..best.actors.len()).rev() {
            // Two actors may be one.
            let mut other = best.clone();
            for step in &mut other.steps {
                if let Step::Call { actor, seat: 0, .. } = step
                    && *actor == from
                {
                    *actor = 0;
                }
            }
            if other != *best {
                self.try_one(best, found, other)?;
            }
        }
        let mut at = 0;
        while at < best.steps.len() && Instant::now() < self.end {
            let mut again = true;
            while again && at < best.steps.len() {
                again = false;
                for step in simpler(&best.steps[at]) {
                    let mut other = best.clone();
                    other.steps[at] = step;
                    if self.try_one(best, found, other)? {
                        again = true;
                        break;
                    }
                }
            }
            at += 1;
        }
        Ok(())
    }
}

fn who(step: &Step) -> Option<usize> {
    match step {
        Step::Call { actor, .. } | Step::Restart(actor) => Some(*actor),
        _ => None,
    }
}

/// Without what comes after the difference.
fn cut(script: &Script, difference: &Difference) -> Script {
    let mut script = script.clone();
    script.steps.truncate(difference.step + 1);
    script
}

/// Without actors that do nothing; of sweeps one is enough to look.
fn without_idle(script: &Script) -> Script {
    let busy: Vec<usize> = (0..script.actors.len())
        .filter(|n| script.steps.iter().any(|step| who(step) == Some(*n)))
        .collect();
    if busy.is_empty() || script.steps.iter().any(|step| matches!(step, Step::Sweep(_))) {
        return script.clone();
    }
    let number = |old: usize| busy.iter().position(|n| *n == old).unwrap_or(0);
    let mut new = Script {
        actors: busy.iter().map(|n| script.actors[*n].clone()).collect(),
        steps: Vec::new(),
    };
    for step in &script.steps {
        new.steps.push(match step {
            Step::Call { actor, seat, line } => Step::call(number(*actor), *seat, line.clone()),
            Step::Restart(actor) => Step::Restart(number(*actor)),
            other => other.clone(),
        });
    }
    new
}

/// Simpler forms of a step, the simplest first.
fn simpler(step: &Step) -> Vec<Step> {
    let Step::Call { actor, seat, line } = step else { return Vec::new() };
    let words: Vec<&str> = line.split(' ').collect();
    let mut all = Vec::new();
    for index in 1..words.len() {
        for word in simpler_word(words[0], index, words[index]) {
            let mut other: Vec<&str> = words.clone();
            other[index] = &word;
            all.push(Step::call(*actor, *seat, other.join(" ")));
        }
    }
    all
}

fn simpler_word(name: &str, index: usize, word: &str) -> Vec<String> {
    let mut all = Vec::new();
    let is_mode = matches!((name, index), ("open", 4) | ("creat", 3));
    if is_mode {
        return if word == "0644" { all } else { vec!["0644".into()] };
    }
    if let Ok(number) = word.parse::<i64>() {
        let below = |n: &i64| n.unsigned_abs() < number.unsigned_abs() && number != 0;
        let mut numbers = vec![0, 1, 10, 100, 4096];
        numbers.extend([
            number / 2,
            number / 4096 * 4096,
            number / 1000 * 1000,
            number / 100 * 100,
            number - number.signum(),
        ]);
        numbers.retain(below);
        // A number that begins with a zero would be octal.
        all.extend(numbers.iter().map(i64::to_string));
        all.dedup();
        return all;
    }
    if word.contains('|') {
        let parts: Vec<&str> = word.split('|').collect();
        for out in 0..parts.len() {
            let rest: Vec<&str> =
                parts.iter().enumerate().filter(|(n, _)| *n != out).map(|(_, p)| *p).collect();
            all.push(rest.join("|"));
        }
    }
    if word.contains(',') {
        let parts: Vec<&str> = word.split(',').collect();
        for out in 0..parts.len() {
            let rest: Vec<&str> =
                parts.iter().enumerate().filter(|(n, _)| *n != out).map(|(_, p)| *p).collect();
            all.push(rest.join(","));
        }
    }
    if let Some((dir, rest)) = word.split_once(':')
        && crate::worker::named_slot(dir).is_some()
        && rest != "''"
    {
        all.push(rest.into());
    }
    for odd in ["@", "./"] {
        if let Some(rest) = word.strip_prefix(odd)
            && !rest.is_empty()
        {
            all.push(rest.into());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simpler_forms_get_shorter_and_end() {
        let mut step = Step::call(0, 0, "pwritev2 s3 70000,12,5 17 123456 append|dsync");
        let mut steps = 0;
        while let Some(next) = simpler(&step).into_iter().next() {
            step = next;
            steps += 1;
            assert!(steps < 100, "{step}");
        }
        assert_eq!(step.to_string(), "0 pwritev2 s3 0 0 0 dsync");
        assert!(simpler(&Step::Pause(3)).is_empty());
        let open = simpler(&Step::call(0, 0, "open s0 s2:./a rd|excl 0600"));
        let open: Vec<String> = open.iter().map(Step::to_string).collect();
        assert_eq!(
            open,
            [
                "0 open s0 ./a rd|excl 0600",
                "0 open s0 s2:./a excl 0600",
                "0 open s0 s2:./a rd 0600",
                "0 open s0 s2:./a rd|excl 0644"
            ]
        );
    }
}
