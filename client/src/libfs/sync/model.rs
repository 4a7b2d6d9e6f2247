//! Every interleaving of a few threads at a lock: each step of a thread is one atomic access or one futex
//! call. Looks for two that are inside at once, and for sleepers whom nobody wakes. What the steps decide
//! is asked of the code itself ([`for_reader`], [`for_writer`], [`is_held`], [`is_for_counted`]). Readers of a spread
//! lock have two words to count themselves in; a writer looks at one after the other.

use std::collections::HashSet;

use super::{DRAINING, READERS, WAITING, WRITER, for_reader, for_writer, is_for_counted, is_held};

/// Words of a spread lock.
const WORDS: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Want {
    Read,
    Write,
    TryRead,
    TryWrite,
    /// In a word of his own.
    ReadBy(usize),
    /// He has, and is on his way out.
    Gone(usize),
}

impl Want {
    fn entered(self, word: u32) -> Option<u32> {
        if self.writes() { for_writer(word) } else { for_reader(word) }
    }

    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::TryWrite)
    }

    fn word(self) -> usize {
        let (Self::ReadBy(word) | Self::Gone(word)) = self else { panic!("{self:?} has none") };
        word
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
    /// Of a reader with a word of his own: he counts himself, looks, and is out again.
    Count,
    Counted,
    Uncount,
    /// Whether somebody waits for that; and then.
    Uncounted,
    WakeDraining,
    /// Of a writer who has the lock: he looks at that word, says that he waits, looks again, and sleeps.
    Drain(usize),
    Draining(usize),
    DrainAgain(usize, u32),
    DrainSleep(usize, u32),
    DrainAsleep(usize),
    Drained,
    /// Of one who only tries.
    TryDrain(usize),
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
    /// A reader looks whether he is in before he counts himself.
    CountedLate,
    /// A writer looks at no other words.
    NotDrained,
    /// A writer who waits for readers does not look again once he has said so.
    DrainsBlindly,
    /// A reader that is out leaves the lock's word as it is when he wakes the writer.
    UncountedSilently,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    word: u32,
    counts: [u32; WORDS],
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
            match *at {
                At::Asleep => *at = At::Load,
                At::DrainAsleep(i) => *at = At::Drain(i),
                _ => {}
            }
        }
    }

    fn uncounted(&mut self, n: usize) -> At {
        match self.threads[n].1[0] {
            Want::Gone(_) => self.next_wish(n),
            _ => At::Load,
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
            At::Load if matches!(want, Want::ReadBy(_)) => match is_for_counted(self.word) {
                true => At::Count,
                false if self.word & WAITING != 0 => At::Sleep(self.word),
                false => At::Mark(self.word),
            },
            At::Count => {
                self.counts[want.word()] += 1;
                if flaw == Flaw::CountedLate { At::Inside } else { At::Counted }
            }
            At::Counted if is_for_counted(self.word) => At::Inside,
            At::Counted => At::Uncount,
            At::Uncount => {
                self.counts[want.word()] -= 1;
                At::Uncounted
            }
            // (One who comes by here from inside has left.)
            At::Uncounted if self.word & DRAINING != 0 => {
                if flaw != Flaw::UncountedSilently {
                    self.word &= !DRAINING;
                }
                At::WakeDraining
            }
            At::Uncounted => self.uncounted(n),
            At::WakeDraining => {
                self.wake_all();
                self.uncounted(n)
            }
            At::Drain(i) if flaw == Flaw::NotDrained || i == WORDS => At::Drained,
            At::Drain(i) if self.counts[i] == 0 => At::Drain(i + 1),
            At::Drain(i) => At::Draining(i),
            At::Draining(i) => {
                self.word |= DRAINING;
                if flaw == Flaw::DrainsBlindly {
                    At::DrainSleep(i, self.word)
                } else {
                    At::DrainAgain(i, self.word)
                }
            }
            At::DrainAgain(i, _) if self.counts[i] == 0 => At::Drain(i),
            At::DrainAgain(i, seen) => At::DrainSleep(i, seen),
            At::DrainSleep(i, seen) if self.word == seen => At::DrainAsleep(i),
            At::DrainSleep(i, _) | At::DrainAsleep(i) => At::Drain(i),
            At::Drained => {
                self.word &= !DRAINING;
                At::Inside
            }
            At::TryDrain(WORDS) => At::Drain(0),
            At::TryDrain(i) if self.counts[i] == 0 => At::TryDrain(i + 1),
            At::TryDrain(_) => At::Leave,
            At::Load => match want.entered(self.word) {
                Some(_) => At::Enter(self.word),
                None if want.tries() && flaw == Flaw::FailedTryLeaves => At::Leave,
                None if want.tries() => self.next_wish(n),
                None if !is_held(self.word) => At::Clear(self.word),
                None if self.word & WAITING != 0 || flaw == Flaw::Unmarked => At::Sleep(self.word),
                None => At::Mark(self.word),
            },
            At::Enter(seen) => match want.entered(seen) {
                Some(to) if self.swap(seen, to) => match want {
                    Want::Write => At::Drain(0),
                    Want::TryWrite => At::TryDrain(0),
                    _ => At::Inside,
                },
                _ => At::Load,
            },
            At::Clear(seen) if self.swap(seen, 0) => At::WakeOnTheWay,
            At::Mark(seen) if self.swap(seen, seen | WAITING) => At::Sleep(seen | WAITING),
            At::Sleep(seen) if self.word == seen || flaw == Flaw::SleepsBlindly => At::Asleep,
            At::Clear(_) | At::Mark(_) | At::Sleep(_) | At::Asleep => At::Load,
            At::Inside if matches!(want, Want::ReadBy(_)) => {
                self.counts[want.word()] -= 1;
                // From here on he is as one who was never in, but wants nothing more.
                self.threads[n].1[0] = Want::Gone(want.word());
                At::Uncounted
            }
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
        let sleeps = |at: &At| matches!(at, At::Asleep | At::DrainAsleep(_));
        let all_wait = self.threads.iter().all(|(at, wants)| sleeps(at) || wants.is_empty());
        let some_wait = self.threads.iter().any(|(at, _)| sleeps(at));
        let held = is_held(self.word) || self.word & DRAINING != 0 || self.counts != [0; WORDS];
        if all_wait && (some_wait || held) {
            return Err(format!("nobody wakes them: {self:?}"));
        }
        Ok(())
    }
}

/// Looks at every state that can be reached; how many there are.
fn explore(programs: &[&[Want]], flaw: Flaw) -> Result<usize, String> {
    let threads = programs.iter().map(|wants| (At::Load, wants.to_vec())).collect();
    let mut todo = vec![World { word: 0, counts: [0; WORDS], threads }];
    let mut seen: HashSet<World> = todo.iter().cloned().collect();
    while let Some(world) = todo.pop() {
        world.judge()?;
        for (n, (at, wants)) in world.threads.iter().enumerate() {
            if matches!(at, At::Asleep | At::DrainAsleep(_)) || wants.is_empty() {
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

use Want::{Read, ReadBy, TryRead, TryWrite, Write};

#[test]
fn no_interleaving_lets_two_in_or_forgets_a_sleeper() {
    let programs: [&[&[Want]]; 9] = [
        &[&[ReadBy(0), ReadBy(0)], &[Write, Write], &[ReadBy(1)]],
        &[&[ReadBy(0), ReadBy(1)], &[Write, ReadBy(0)], &[TryWrite, Write]],
        &[&[ReadBy(0), Read], &[Write, Read], &[ReadBy(0), Write]],
        &[&[ReadBy(0)], &[Write], &[ReadBy(1)], &[TryWrite, TryRead]],
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
    let spread = [&[ReadBy(0), ReadBy(0)][..], &[Write, Write], &[ReadBy(1)]];
    let flaws = [Flaw::CountedLate, Flaw::NotDrained, Flaw::DrainsBlindly, Flaw::UncountedSilently];
    for flaw in flaws {
        assert!(explore(&spread, flaw).is_err(), "{flaw:?}");
    }
}
