//! Every interleaving of a few threads at a lock: each step of a thread is one atomic access or one futex
//! call. Looks for two that are inside at once, and for sleepers whom nobody wakes. What the steps decide
//! is asked of the code itself ([`for_reader`], [`for_writer`], [`is_held`]).

use std::collections::HashSet;

use super::{READERS, WAITING, WRITER, for_reader, for_writer, is_held};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Want {
    Read,
    Write,
    TryRead,
    TryWrite,
}

impl Want {
    fn entered(self, word: u32) -> Option<u32> {
        if self.writes() { for_writer(word) } else { for_reader(word) }
    }

    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::TryWrite)
    }

    fn tries(self) -> bool {
        matches!(self, Self::TryRead | Self::TryWrite)
    }
}

/// What a thread does next; the numbers are what it saw.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    Load,
    Enter(u32),
    Clear(u32),
    Mark(u32),
    Sleep(u32),
    Asleep,
    Inside,
    Leave,
    Unmark,
    /// Of a thread that found the word without holders, and of one that left.
    WakeOnTheWay,
    WakeAtTheEnd,
}

/// What is wrong on purpose, to see that it is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flaw {
    None,
    /// A guard is made and dropped by a try that fails.
    FailedTryLeaves,
    /// One who waits does not say so.
    Unmarked,
    /// The last reader wakes nobody.
    ReaderWakesNobody,
    /// Sleeps without looking at the word again.
    SleepsBlindly,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    word: u32,
    /// Place, and what is still wanted, the present first.
    threads: Vec<(At, Vec<Want>)>,
}

impl World {
    fn next_wish(&mut self, n: usize) -> At {
        self.threads[n].1.remove(0);
        At::Load
    }

    fn wake_all(&mut self) {
        for (at, _) in &mut self.threads {
            if *at == At::Asleep {
                *at = At::Load;
            }
        }
    }

    fn swap(&mut self, from: u32, to: u32) -> bool {
        let is_same = self.word == from;
        if is_same {
            self.word = to;
        }
        is_same
    }

    /// One step of thread `n`, which is neither asleep nor at its end.
    fn step(&mut self, n: usize, flaw: Flaw) {
        let want = self.threads[n].1[0];
        let at = self.threads[n].0;
        let next = match at {
            At::Load => match want.entered(self.word) {
                Some(_) => At::Enter(self.word),
                None if want.tries() && flaw == Flaw::FailedTryLeaves => At::Leave,
                None if want.tries() => self.next_wish(n),
                None if !is_held(self.word) => At::Clear(self.word),
                None if self.word & WAITING != 0 || flaw == Flaw::Unmarked => At::Sleep(self.word),
                None => At::Mark(self.word),
            },
            At::Enter(seen) => match want.entered(seen) {
                Some(to) if self.swap(seen, to) => At::Inside,
                _ => At::Load,
            },
            At::Clear(seen) if self.swap(seen, 0) => At::WakeOnTheWay,
            At::Mark(seen) if self.swap(seen, seen | WAITING) => At::Sleep(seen | WAITING),
            At::Sleep(seen) if self.word == seen || flaw == Flaw::SleepsBlindly => At::Asleep,
            At::Clear(_) | At::Mark(_) | At::Sleep(_) | At::Asleep => At::Load,
            At::Inside => At::Leave,
            At::Leave => {
                let before = self.word;
                self.word = if want.writes() { before & !WRITER } else { before.wrapping_sub(1) };
                let last = want.writes() || before & READERS == 1;
                let silent = flaw == Flaw::ReaderWakesNobody && !want.writes();
                if last && before & WAITING != 0 && !silent {
                    At::Unmark
                } else {
                    self.next_wish(n)
                }
            }
            At::Unmark => {
                self.word &= !WAITING;
                At::WakeAtTheEnd
            }
            At::WakeOnTheWay => {
                self.wake_all();
                At::Load
            }
            At::WakeAtTheEnd => {
                self.wake_all();
                self.next_wish(n)
            }
        };
        self.threads[n].0 = next;
    }

    fn judge(&self) -> Result<(), String> {
        let inside = |writes| {
            let is_inside = |(at, wants): &&(At, Vec<Want>)| {
                matches!(at, At::Inside) && wants[0].writes() == writes
            };
            self.threads.iter().filter(is_inside).count()
        };
        let (readers, writers) = (inside(false), inside(true));
        if writers > 1 || writers == 1 && readers > 0 {
            return Err(format!("two at once: {self:?}"));
        }
        let all_wait = self.threads.iter().all(|(at, wants)| *at == At::Asleep || wants.is_empty());
        let some_wait = self.threads.iter().any(|(at, _)| *at == At::Asleep);
        if all_wait && (some_wait || is_held(self.word)) {
            return Err(format!("nobody wakes them: {self:?}"));
        }
        Ok(())
    }
}

/// Looks at every state that can be reached; how many there are.
fn explore(programs: &[&[Want]], flaw: Flaw) -> Result<usize, String> {
    let threads = programs.iter().map(|wants| (At::Load, wants.to_vec())).collect();
    let mut todo = vec![World { word: 0, threads }];
    let mut seen: HashSet<World> = todo.iter().cloned().collect();
    while let Some(world) = todo.pop() {
        world.judge()?;
        for (n, (at, wants)) in world.threads.iter().enumerate() {
            if *at == At::Asleep || wants.is_empty() {
                continue;
            }
            let mut next = world.clone();
            next.step(n, flaw);
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    Ok(seen.len())
}

use Want::{Read, TryRead, TryWrite, Write};

#[test]
fn no_interleaving_lets_two_in_or_forgets_a_sleeper() {
    let programs: [&[&[Want]]; 5] = [
        &[&[Write, Write], &[Write, Write], &[Write]],
        &[&[Write, Read], &[Read, Write], &[Read, Read]],
        &[&[Write], &[Write], &[Read], &[Read]],
        &[&[TryWrite, Read], &[Write, TryRead], &[Read, TryWrite]],
        &[&[TryWrite, TryWrite], &[Write], &[Read], &[TryRead]],
    ];
    for program in programs {
        let states = explore(program, Flaw::None).expect("a lock that is right");
        assert!(states > 500, "{program:?} has {states} states");
    }
}

#[test]
fn what_is_wrong_on_purpose_is_found() {
    let two = [&[TryWrite, Write][..], &[Write], &[Write]];
    assert!(explore(&two, Flaw::FailedTryLeaves).is_err(), "the bug that there was");
    let mixed = [&[Read, Write][..], &[Write, Read], &[Read]];
    for flaw in [Flaw::Unmarked, Flaw::ReaderWakesNobody, Flaw::SleepsBlindly] {
        assert!(explore(&mixed, flaw).is_err(), "{flaw:?}");
    }
}
