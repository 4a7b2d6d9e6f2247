//! Every interleaving of a few calls on one file: writers of several entries and of one, an appender, one who truncates,
//! a reader, and the service, which publishes in place what is in the log. A step is what happens under the file's lock,
//! or one access outside of it. Looks for a write that is cut by another, for bytes that a reader sees and that never
//! were there together, and for sleepers whom nobody wakes. Who has to wait is decided by [`Ranges`] itself.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use super::{Ranges, Ticket, WHOLE};

/// Bytes of the file at most.
const SIZE: usize = 4;

/// Which write a byte is of; 0: none.
type Bytes = [u8; SIZE];

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Call {
    /// An entry a byte.
    Long(Range<u64>),
    /// One entry.
    Short(Range<u64>),
    /// One entry of one byte at the end.
    Append,
    Truncate(u64),
    Read(Range<u64>),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    Begin,
    /// Queues up, with that range.
    Enter,
    Look,
    Due(u32),
    Sleep(u32),
    Asleep,
    /// An entry: so many are done.
    Entry(u64),
    Leave,
    Bump,
    Wake,
    Copy(usize),
    Check,
    End,
}

/// Where a byte lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Source {
    Log(u8),
    Arena,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flaw {
    None,
    /// A range overlaps only what begins in it.
    ByStart,
    /// A write of one entry asks nobody.
    ShortIgnores,
    /// Who leaves wakes nobody.
    NoWake,
    /// Sleeps without looking whether the word has changed.
    SleepsBlindly,
    /// A copy counts whatever was written meanwhile.
    Unchecked,
    /// A copy counts if the bytes lie where they did.
    ComesBack,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Thread {
    call: Call,
    at: At,
    ticket: Option<Ticket>,
    /// Of a reader: what was so since it began, where it found the bytes, and what it has copied.
    possible: BTreeSet<(usize, Bytes)>,
    plan: (usize, [Option<Source>; SIZE], u32, u32),
    copied: Bytes,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    ranges: Ranges,
    ended: u32,
    threads: Vec<Thread>,
    /// Entries: the write, and its bytes.
    log: Vec<(u8, Range<u64>)>,
    size: usize,
    index: [Source; SIZE],
    /// Locked by so many writers; and so often were log pieces dropped.
    version: u32,
    shape: u32,
    arena: Bytes,
    /// Bytes of the log that are in the arena, in its order.
    published: usize,
    /// The service's list of extents was taken in so often.
    installed: u32,
}

impl World {
    fn bytes(&self) -> (usize, Bytes) {
        let mut bytes = [0; SIZE];
        for (write, range) in &self.log {
            for i in range.clone() {
                bytes[i as usize] = *write;
            }
        }
        (self.size, bytes)
    }

    /// A change is committed, with the file locked: bytes of a write, or (0) zeroes.
    fn commit(&mut self, n: usize, write: u8, range: Range<u64>) -> Result<(), String> {
        for (m, other) in self.threads.iter().enumerate() {
            if let (Call::Long(theirs), At::Entry(done)) = (&other.call, other.at)
                && m != n
                && done > 0
                && theirs.start.max(range.start) < theirs.end.min(range.end)
            {
                return Err(format!("{n} changes {range:?} in the middle of {m}: {self:?}"));
            }
        }
        for i in range.clone() {
            self.index[i as usize] = Source::Log(write);
        }
        self.size =
            if write > 0 { self.size.max(range.end as usize) } else { range.start as usize };
        self.log.push((write, range));
        self.version += 1;
        self.saw();
        Ok(())
    }

    fn saw(&mut self) {
        let now = self.bytes();
        for thread in self.threads.iter_mut().filter(|t| t.at != At::Begin && t.at != At::End) {
            if let Call::Read(_) = thread.call {
                thread.possible.insert(now);
            }
        }
    }

    fn barred(&self, range: &Range<u64>, own: Option<Ticket>, flaw: Flaw) -> bool {
        match flaw {
            Flaw::ByStart => self.ranges.held.iter().any(|(held, theirs)| {
                own.is_none_or(|own| *held < own) && range.contains(&theirs.start)
            }),
            _ => self.ranges.bars(range, own),
        }
    }

    /// The next step of a thread that is neither asleep nor at its end.
    fn step(&mut self, n: usize, flaw: Flaw) -> Result<(), String> {
        let thread = self.threads[n].clone();
        let at_end = self.size as u64..self.size as u64 + 1;
        // What it asks for when it queues up, and what it needs at the moment.
        let (asks, needs) = match &thread.call {
            Call::Long(range) | Call::Short(range) => (range.clone(), range.clone()),
            Call::Append => (WHOLE, at_end),
            Call::Truncate(_) => (WHOLE, WHOLE),
            Call::Read(range) => (range.clone(), range.clone()),
        };
        self.threads[n].at = match (thread.at, &thread.call) {
            (At::Begin, Call::Read(range)) => self.look_up(n, range),
            (At::Begin, Call::Long(_)) | (At::Enter, _) => {
                self.version += 1;
                self.threads[n].ticket = Some(self.ranges.enter(asks));
                At::Look
            }
            // One entry: it is committed at once if nobody bars it.
            (At::Begin, call)
            | (At::Entry(0), call @ (Call::Short(_) | Call::Append | Call::Truncate(_))) => {
                let ignores = flaw == Flaw::ShortIgnores && matches!(call, Call::Short(_));
                if self.barred(&needs, thread.ticket, flaw) && !ignores {
                    self.version += 1;
                    At::Enter
                } else {
                    match call {
                        Call::Truncate(size) => {
                            self.shape += 1;
                            self.commit(n, 0, *size..SIZE as u64)?;
                        }
                        _ if needs.end > SIZE as u64 => {}
                        _ => self.commit(n, n as u8 + 1, needs)?,
                    }
                    if thread.ticket.is_some() { At::Leave } else { At::End }
                }
            }
            (At::Look, _) => At::Due(self.ended),
            (At::Due(seen), _) => match self.barred(&asks, thread.ticket, flaw) {
                true => At::Sleep(seen),
                false => At::Entry(0),
            },
            (At::Sleep(seen), _) if self.ended == seen || flaw == Flaw::SleepsBlindly => At::Asleep,
            (At::Sleep(_) | At::Asleep, _) => At::Look,
            (At::Entry(done), Call::Long(range)) if range.start + done < range.end => {
                let at = range.start + done;
                self.commit(n, n as u8 + 1, at..at + 1)?;
                At::Entry(done + 1)
            }
            (At::Entry(_), _) => At::Leave,
            (At::Leave, _) => {
                self.version += 1;
                let ticket = self.threads[n].ticket.take().expect("it has queued up");
                if self.ranges.leave(ticket) { At::Bump } else { At::End }
            }
            (At::Bump, _) => {
                self.ended += 1;
                At::Wake
            }
            (At::Wake, _) => {
                for other in &mut self.threads {
                    if other.at == At::Asleep && flaw != Flaw::NoWake {
                        other.at = At::Look;
                    }
                }
                At::End
            }
            (At::Copy(i), Call::Read(range)) => {
                let (size, sources, ..) = thread.plan;
                if i as u64 >= range.end || i >= size {
                    At::Check
                } else {
                    self.threads[n].copied[i] = match sources[i] {
                        Some(Source::Log(write)) => write,
                        _ => self.arena[i],
                    };
                    At::Copy(i + 1)
                }
            }
            (At::Check, Call::Read(range)) => {
                let (size, sources, version, shape) = thread.plan;
                let same = self.plan(range) == (size, sources);
                let good = self.version == version
                    || same && (self.shape == shape || flaw == Flaw::ComesBack)
                    || flaw == Flaw::Unchecked;
                if good { self.judge_read(n, range)? } else { self.look_up(n, range) }
            }
            (at, call) => return Err(format!("{call:?} at {at:?}")),
        };
        Ok(())
    }

    fn plan(&self, range: &Range<u64>) -> (usize, [Option<Source>; SIZE]) {
        let mut sources = [None; SIZE];
        for i in range.clone().filter(|i| (*i as usize) < self.size) {
            sources[i as usize] = Some(self.index[i as usize]);
        }
        (self.size, sources)
    }

    fn look_up(&mut self, n: usize, range: &Range<u64>) -> At {
        let ((size, sources), now) = (self.plan(range), self.bytes());
        let thread = &mut self.threads[n];
        thread.possible.insert(now);
        thread.plan = (size, sources, self.version, self.shape);
        At::Copy(range.start as usize)
    }

    fn judge_read(&mut self, n: usize, range: &Range<u64>) -> Result<At, String> {
        let thread = &self.threads[n];
        let part = |size: usize, bytes: &Bytes| {
            let end = size.min(range.end as usize);
            bytes.get(range.start as usize..end).map(<[u8]>::to_vec).unwrap_or_default()
        };
        let got = part(thread.plan.0, &thread.copied);
        if !thread.possible.iter().any(|(size, bytes)| part(*size, bytes) == got) {
            return Err(format!("{n} has read {got:?}: {self:?}"));
        }
        Ok(At::End)
    }

    /// The service publishes the next byte of the log in place, or its list is taken in.
    fn serve(&self) -> Vec<Self> {
        let mut next = Vec::new();
        let all =
            self.log.iter().flat_map(|(write, range)| range.clone().map(|i| (*write, i as usize)));
        let mut rest = all.clone().skip(self.published);
        if let Some((write, i)) = rest.next() {
            let mut world = self.clone();
            world.arena[i] = write;
            world.published += 1;
            next.push(world);
        }
        if self.installed < 2 && self.published > 0 {
            let mut world = self.clone();
            for i in 0..SIZE {
                // The newest of this byte is published.
                let newest = all.clone().enumerate().filter(|(_, (_, at))| *at == i).last();
                if newest.is_some_and(|(at, _)| at < self.published) {
                    world.index[i] = Source::Arena;
                }
            }
            world.version += 1;
            world.shape += 1;
            world.installed += 1;
            next.push(world);
        }
        next
    }

    fn judge(&self) -> Result<(), String> {
        let stands = |t: &Thread| matches!(t.at, At::Asleep | At::End);
        let sleeps = self.threads.iter().any(|t| t.at == At::Asleep);
        if sleeps && self.threads.iter().all(stands) {
            return Err(format!("nobody wakes them: {self:?}"));
        }
        if self.threads.iter().all(|t| t.at == At::End) && self.ranges.bars(&WHOLE, None) {
            return Err(format!("a ticket is left: {self:?}"));
        }
        Ok(())
    }
}

/// Looks at every state that can be reached from a file of so many published bytes; how many there are.
fn explore(size: usize, calls: &[Call], flaw: Flaw) -> Result<usize, String> {
    let thread = |call: &Call| Thread {
        call: call.clone(),
        at: At::Begin,
        ticket: None,
        possible: BTreeSet::new(),
        plan: (0, [None; SIZE], 0, 0),
        copied: [0; SIZE],
    };
    let mut todo = vec![World {
        ranges: Ranges::default(),
        ended: 0,
        threads: calls.iter().map(thread).collect(),
        log: Vec::new(),
        size,
        index: [Source::Arena; SIZE],
        version: 0,
        shape: 0,
        arena: [0; SIZE],
        published: 0,
        installed: 0,
    }];
    let mut seen: HashSet<World> = todo.iter().cloned().collect();
    while let Some(world) = todo.pop() {
        world.judge()?;
        let mut all =
            if world.threads.iter().any(|t| matches!(t.call, Call::Read(_)) && t.at != At::End) {
                world.serve()
            } else {
                Vec::new()
            };
        for (n, thread) in world.threads.iter().enumerate() {
            if !matches!(thread.at, At::Asleep | At::End) {
                let mut next = world.clone();
                next.step(n, flaw)?;
                all.push(next);
            }
        }
        todo.extend(all.into_iter().filter(|next| seen.insert(next.clone())));
    }
    Ok(seen.len())
}

use Call::{Append, Long, Read, Short, Truncate};

#[test]
fn no_interleaving_cuts_a_write_tears_a_read_or_forgets_a_sleeper() {
    let programs: [(usize, &[Call]); 11] = [
        (4, &[Long(0..3), Long(1..4)]),
        (4, &[Long(0..3), Long(2..4), Short(1..3)]),
        (4, &[Long(0..2), Long(2..4), Long(1..3)]),
        (4, &[Long(0..3), Short(2..4), Truncate(1)]),
        (2, &[Long(0..2), Append, Append]),
        (2, &[Long(0..4), Append, Truncate(1)]),
        (4, &[Read(0..2), Short(0..2)]),
        (4, &[Read(0..3), Short(1..3), Short(0..2)]),
        (4, &[Read(1..3), Long(0..2), Short(2..4)]),
        (2, &[Read(1..3), Append, Short(0..2)]),
        (3, &[Read(1..3), Truncate(2), Short(1..2)]),
    ];
    for (size, calls) in programs {
        let states = explore(size, calls, Flaw::None).expect("ranges that are right");
        assert!(states > 50, "{calls:?} has {states} states");
    }
}

#[test]
fn what_is_wrong_on_purpose_is_found() {
    let writers = [Long(0..3), Short(1..3), Long(2..4)];
    for flaw in [Flaw::ByStart, Flaw::ShortIgnores, Flaw::NoWake, Flaw::SleepsBlindly] {
        assert!(explore(4, &writers, flaw).is_err(), "{flaw:?}");
    }
    let readers = [Read(0..3), Short(1..3), Short(0..2)];
    for flaw in [Flaw::Unchecked, Flaw::ComesBack] {
        assert!(explore(4, &readers, flaw).is_err(), "{flaw:?}");
    }
}
