//! Every interleaving of threads that grant themselves locks and an agent that takes the sole use back, gives the place to
//! another file, and takes that back, too; each step is one access to what they share. Looks for a lock of the client's that
//! is not known when somebody else is granted one, and for one that is known of a file on which it never was.

use std::collections::HashSet;

use storage::format::sole::SoleWord;

const FILES: usize = 2;

/// What a thread of the client does next, for one of the files.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    /// Finds the place, and the word beside it.
    Find,
    Enter(u64),
    Look(u64),
    LookAtFile(u64),
    /// The table is of another grant: its records are cleared.
    Clear(u64),
    Write(u64),
    /// From now on it counts.
    Use(u64),
    Leave(bool),
    Done(bool),
}

/// What the agent does next, with the file that has the place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Agent {
    Back(usize),
    /// Of one that is wrong: the word goes when it has seen who is inside.
    Late(usize),
    Marks(usize),
    Wait(usize),
    Read(usize),
    Free(usize),
    /// Somebody else is granted all that seems free.
    Other(usize),
    NextFile(usize),
    NextWord(usize),
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flaw {
    None,
    /// A thread looks at the word, and enters then.
    LooksBefore,
    /// It does not look whether the place is its file's still.
    FileNotLookedAt,
    /// It uses records of before as they are.
    NotCleared,
    /// The agent looks who is inside before it stores the word.
    MarksBefore,
    /// It waits for nobody.
    NotWaited,
    /// It reads the table before it waits.
    ReadsBefore,
    /// It believes a table that is of an older grant.
    UsedUnchecked,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    file: usize,
    word: u64,
    used: u64,
    /// Records of the place: of which thread.
    table: Vec<bool>,
    marks: Vec<u64>,
    /// Grant under which the table was written last.
    written: u64,
    threads: Vec<(usize, At)>,
    agent: Agent,
    waits: Vec<(usize, u64)>,
    /// What the agent has read of each file; by thread.
    read: Vec<Vec<bool>>,
    granted_elsewhere: Vec<bool>,
}

impl World {
    fn new(threads: &[usize]) -> Self {
        Self {
            file: 0,
            word: SoleWord::given(1).0,
            used: 0,
            table: vec![false; threads.len()],
            marks: vec![0; threads.len()],
            written: 0,
            threads: threads.iter().map(|file| (*file, At::Find)).collect(),
            agent: Agent::Back(0),
            waits: Vec::new(),
            read: vec![vec![false; threads.len()]; FILES],
            granted_elsewhere: vec![false; FILES],
        }
    }

    fn step_thread(&mut self, n: usize, flaw: Flaw) {
        let (file, at) = self.threads[n];
        let holds = |word| self.word == word && SoleWord(word).is_given();
        let next = match at {
            At::Find if self.file != file => At::Done(false),
            // (The word is read a step later than the place.)
            At::Find if flaw == Flaw::LooksBefore => At::Look(self.word),
            At::Find => At::Enter(u64::MAX),
            At::Enter(word) => {
                self.marks[n] += 1;
                match flaw {
                    Flaw::LooksBefore => At::Clear(word),
                    _ => At::Look(self.word),
                }
            }
            At::Look(word) if !holds(word) && flaw == Flaw::LooksBefore => At::Done(false),
            At::Look(word) if flaw == Flaw::LooksBefore => At::Enter(word),
            At::Look(word) if !holds(word) => At::Leave(false),
            At::Look(word) if flaw == Flaw::FileNotLookedAt => At::Clear(word),
            At::Look(word) => At::LookAtFile(word),
            At::LookAtFile(_) if self.file != file => At::Leave(false),
            At::LookAtFile(word) => At::Clear(word),
            At::Clear(word) => {
                if self.written != word && flaw != Flaw::NotCleared {
                    self.table.fill(false);
                }
                self.written = word;
                At::Write(word)
            }
            At::Write(word) => {
                self.table[n] = true;
                At::Use(word)
            }
            At::Use(word) => {
                self.used = word;
                At::Leave(true)
            }
            At::Leave(done) => {
                self.marks[n] += 1;
                At::Done(done)
            }
            At::Done(_) => at,
        };
        self.threads[n].1 = next;
    }

    fn step_agent(&mut self, flaw: Flaw) {
        self.agent = match self.agent {
            Agent::Back(f) if flaw == Flaw::MarksBefore => {
                self.waits = self.inside();
                Agent::Late(f)
            }
            Agent::Late(f) => {
                self.word = SoleWord(self.word).coming_back().0;
                Agent::Wait(f)
            }
            Agent::Back(f) => {
                self.word = SoleWord(self.word).coming_back().0;
                if flaw == Flaw::ReadsBefore {
                    self.take(f, flaw);
                }
                Agent::Marks(f)
            }
            Agent::Marks(f) => {
                self.waits = self.inside();
                Agent::Wait(f)
            }
            Agent::Wait(f) => {
                let marks = &self.marks;
                self.waits.retain(|(n, seen)| marks[*n] == *seen);
                let out = self.waits.is_empty() || flaw == Flaw::NotWaited;
                if out { Agent::Read(f) } else { Agent::Wait(f) }
            }
            Agent::Read(f) => {
                if flaw != Flaw::ReadsBefore {
                    self.take(f, flaw);
                }
                Agent::Free(f)
            }
            Agent::Free(f) => {
                self.word = 0;
                Agent::Other(f)
            }
            Agent::Other(f) => {
                self.granted_elsewhere[f] = true;
                if f + 1 < FILES { Agent::NextFile(f + 1) } else { Agent::Done }
            }
            Agent::NextFile(f) => {
                self.file = f;
                Agent::NextWord(f)
            }
            Agent::NextWord(f) => {
                self.word = SoleWord::given(1 + f as u64).0;
                Agent::Back(f)
            }
            Agent::Done => Agent::Done,
        };
    }

    fn inside(&self) -> Vec<(usize, u64)> {
        self.marks.iter().copied().enumerate().filter(|(_, mark)| mark % 2 == 1).collect()
    }

    /// Reads the table, if it is complete.
    fn take(&mut self, f: usize, flaw: Flaw) {
        let given = SoleWord::given(1 + f as u64).0;
        if self.used == given || flaw == Flaw::UsedUnchecked {
            self.read[f].clone_from(&self.table);
        }
    }

    fn judge(&self) -> Result<(), String> {
        for (n, (file, at)) in self.threads.iter().enumerate() {
            let has = matches!(at, At::Done(true));
            if self.granted_elsewhere[*file] && has && !self.read[*file][n] {
                return Err(format!("{n} has a lock that nobody knows: {self:?}"));
            }
            if (0..FILES).any(|f| f != *file && self.read[f][n]) {
                return Err(format!("{n} is said to have a lock where it has none: {self:?}"));
            }
        }
        Ok(())
    }
}

/// Looks at every state that can be reached; how many there are, and in how many of those that end somebody was granted one.
fn explore(threads: &[usize], flaw: Flaw) -> Result<(usize, usize), String> {
    let mut todo = vec![World::new(threads)];
    let mut seen: HashSet<World> = todo.iter().cloned().collect();
    let mut granted = 0;
    while let Some(world) = todo.pop() {
        world.judge()?;
        let over = world.agent == Agent::Done;
        granted += usize::from(over && world.threads.iter().any(|t| t.1 == At::Done(true)));
        for n in 0..=threads.len() {
            let mut next = world.clone();
            match n {
                0 => next.step_agent(flaw),
                n => next.step_thread(n - 1, flaw),
            }
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    Ok((seen.len(), granted))
}

#[test]
fn no_interleaving_hides_a_lock_or_makes_one_up() {
    for threads in [&[0][..], &[1], &[0, 0], &[0, 1], &[1, 1], &[0, 0, 1], &[0, 1, 1]] {
        let (states, granted) = explore(threads, Flaw::None).expect("what is right");
        assert!(states > 30 && granted > 0, "{threads:?}: {states} states, {granted} with locks");
    }
}

#[test]
fn what_is_wrong_on_purpose_is_found() {
    use Flaw::{
        FileNotLookedAt, LooksBefore, MarksBefore, NotCleared, NotWaited, ReadsBefore,
        UsedUnchecked,
    };
    for flaw in [
        LooksBefore,
        FileNotLookedAt,
        NotCleared,
        MarksBefore,
        NotWaited,
        ReadsBefore,
        UsedUnchecked,
    ] {
        let found = [&[0, 0][..], &[0, 1], &[0, 0, 1]].iter().any(|t| explore(t, flaw).is_err());
        assert!(found, "{flaw:?}");
    }
}
