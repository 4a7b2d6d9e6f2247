//! A guest that works while its device dies, and knows afterwards what must be there: a [`Driver`] that writes blocks, syncs and makes
//! files, some of each at once, and keeps book of what was answered.

use std::time::{Duration, Instant};

use base::random::Random;
use frontend::fuse::wire::{
    CreateIn, EntryOut, FsyncIn, OpenOut, OutHeader, ReadIn, ReleaseIn, WriteIn, op,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::driver::{Config, Driver, Result};

/// Requests under way.
const SLOTS: usize = 8;
/// Blocks of the file that is written.
const BLOCKS: u64 = 256;
const BLOCK: usize = 4096;

/// The queues that such a guest needs.
pub fn config() -> Config {
    Config { queues: 1, size: 256, slots: SLOTS, data: BLOCK, ..Config::default() }
}

/// What a slot asked.
#[derive(Clone, Debug)]
enum Asked {
    Write { block: u64, version: u64 },
    Fsync,
    Create(String),
}

/// A guest that keeps book of what it was answered.
#[derive(Debug)]
pub struct Guest {
    /// Its queues.
    pub driver: Driver,
    node: u64,
    fh: u64,
    random: Random,
    under_way: Vec<Option<Asked>>,
    /// What each block has that was written and answered last.
    blocks: Vec<u64>,
    version: u64,
    made: Vec<String>,
    /// Slots of the first queue in which something is under way.
    closing: Vec<bool>,
    /// Answers that were errors.
    pub errors: u64,
    /// Answers in all.
    pub answers: u64,
    last: Instant,
    longest: Duration,
}

fn block(number: u64, version: u64) -> Vec<u8> {
    let seal = [number.to_le_bytes(), version.to_le_bytes()].concat();
    seal.into_iter().cycle().take(BLOCK).collect()
}

impl Guest {
    /// Sends INIT, makes a file and begins.
    ///
    /// # Errors
    /// What the device refused.
    pub fn begin(mut driver: Driver) -> Result<Self> {
        driver.init()?;
        let arg = CreateIn { flags: 2.into(), mode: 0o644.into(), ..CreateIn::default() };
        let reply = driver.call(op::CREATE, 1, &[arg.as_bytes(), b"file\0"])?;
        let (entry, rest) = EntryOut::read_from_prefix(&reply.body)
            .map_err(|_| format!("making the file: error {}", -reply.error))?;
        let (open, _) = OpenOut::read_from_prefix(rest).map_err(|_| "short open")?;
        let mut guest = Self {
            driver,
            node: entry.nodeid.get(),
            fh: open.fh.get(),
            random: Random::new(7),
            under_way: vec![None; SLOTS],
            blocks: vec![0; BLOCKS as usize],
            version: 0,
            made: Vec::new(),
            closing: vec![false; SLOTS],
            errors: 0,
            answers: 0,
            last: Instant::now(),
            longest: Duration::ZERO,
        };
        (0..SLOTS).for_each(|slot| guest.ask(slot));
        Ok(guest)
    }

    /// The longest time without an answer since this was asked last.
    pub fn longest(&mut self) -> Duration {
        std::mem::take(&mut self.longest)
    }

    /// How many requests have no answer yet.
    pub fn under_way(&self) -> usize {
        self.under_way.iter().flatten().count()
    }

    fn ask(&mut self, slot: usize) {
        let busy = |guest: &Self, number: u64| {
            let same =
                |asked: &Asked| matches!(asked, Asked::Write { block, .. } if *block == number);
            guest.under_way.iter().flatten().any(same)
        };
        let asked = match self.random.below(8) {
            0 => Asked::Fsync,
            1 => Asked::Create(format!("n{}", self.version)),
            _ => {
                let mut number = self.random.below(BLOCKS);
                while busy(self, number) {
                    number = (number + 1) % BLOCKS;
                }
                Asked::Write { block: number, version: self.version + 1 }
            }
        };
        self.version += 1;
        let (head, data) = match &asked {
            Asked::Write { block: number, version } => {
                let (fh, offset) = (self.fh.into(), (number * BLOCK as u64).into());
                let size = (BLOCK as u32).into();
                let arg = WriteIn { fh, offset, size, ..WriteIn::default() };
                let head = self.driver.request(op::WRITE, self.node, &[arg.as_bytes()], BLOCK);
                (head, block(*number, *version))
            }
            Asked::Fsync => {
                let arg = FsyncIn { fh: self.fh.into(), ..FsyncIn::default() };
                (self.driver.request(op::FSYNC, self.node, &[arg.as_bytes()], 0), Vec::new())
            }
            Asked::Create(name) => {
                let arg =
                    CreateIn { flags: 0o302.into(), mode: 0o644.into(), ..CreateIn::default() };
                let parts: [&[u8]; 3] = [arg.as_bytes(), name.as_bytes(), b"\0"];
                (self.driver.request(op::CREATE, 1, &parts, 0), Vec::new())
            }
        };
        self.under_way[slot] = Some(asked);
        let queue = &mut self.driver.queues[1];
        let head = queue.prepare(slot, &head, &data, BLOCK, 0);
        queue.offer(head);
        queue.notify();
    }

    /// Takes an answer, which is waited for so long at most, and asks for more if `more`; false if there was none.
    ///
    /// # Errors
    /// What came is no answer.
    pub fn take(&mut self, limit: Duration, more: bool) -> Result<bool> {
        while let Some((head, _)) = self.driver.queues[0].pop() {
            let slot = self.driver.queues[0].slot_of(head);
            if let Some(closing) = self.closing.get_mut(slot) {
                *closing = false;
            }
        }
        let queue = &mut self.driver.queues[1];
        let Some((head, written)) = queue.wait_for(limit)? else { return Ok(false) };
        let slot = queue.slot_of(head);
        let reply = self.driver.reply(1, slot, written, BLOCK)?;
        self.longest = self.longest.max(self.last.elapsed());
        self.last = Instant::now();
        self.answers += 1;
        let asked = self.under_way.get_mut(slot).and_then(Option::take);
        match asked.ok_or_else(|| format!("an answer in slot {slot} to nothing"))? {
            _ if reply.error != 0 => self.errors += 1,
            Asked::Write { block, version } => self.blocks[block as usize] = version,
            Asked::Fsync => {}
            Asked::Create(name) => {
                if let Ok((entry, rest)) = EntryOut::read_from_prefix(&reply.body)
                    && let Ok((open, _)) = OpenOut::read_from_prefix(rest)
                {
                    self.release(slot, entry.nodeid.get(), open.fh.get());
                }
                self.made.push(name);
            }
        }
        if more {
            self.ask(slot);
        }
        Ok(true)
    }

    /// Closes what was made, without waiting: it shall not be open for ever.
    fn release(&mut self, slot: usize, node: u64, fh: u64) {
        if std::mem::replace(&mut self.closing[slot], true) {
            return;
        }
        let arg = ReleaseIn { fh: fh.into(), ..ReleaseIn::default() };
        let head = self.driver.request(op::RELEASE, node, &[arg.as_bytes()], 0);
        let queue = &mut self.driver.queues[0];
        let head = queue.prepare(slot, &head, &[], size_of::<OutHeader>(), 0);
        queue.offer(head);
        queue.notify();
    }

    /// How much is not there, of what was answered. Nothing may be under way.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn lost(&mut self) -> Result<u64> {
        let mut lost = 0;
        for number in 0..BLOCKS {
            let (fh, offset) = (self.fh.into(), (number * BLOCK as u64).into());
            let arg = ReadIn { fh, offset, size: (BLOCK as u32).into(), ..ReadIn::default() };
            let parts: [&[u8]; 1] = [arg.as_bytes()];
            let read = self.driver.call_on(1, op::READ, self.node, &parts, &[], BLOCK);
            let read = read?;
            let version = self.blocks[number as usize];
            let is = version == 0 || read.body == block(number, version);
            lost += u64::from(read.error != 0 || !is);
        }
        for name in std::mem::take(&mut self.made) {
            let there = self.driver.call(op::LOOKUP, 1, &[name.as_bytes(), b"\0"])?;
            lost += u64::from(there.error != 0);
        }
        Ok(lost)
    }
}
