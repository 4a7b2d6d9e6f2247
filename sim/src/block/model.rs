//! What each sector may hold.

use block::device::SECTOR;

/// Sectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    pub from: u64,
    pub count: u64,
}

impl Range {
    pub fn overlaps(self, other: Self) -> bool {
        self.from < other.from + other.count && other.from < self.from + self.count
    }
}

/// Bytes of sectors that were written with a stamp: each says which, and where.
pub fn bytes(stamp: u64, range: Range) -> Vec<u8> {
    (range.from..range.from + range.count)
        .flat_map(|sector| word(stamp, sector).to_le_bytes().repeat(SECTOR as usize / 8))
        .collect()
}

/// No stamp: zeroes.
fn word(stamp: u64, sector: u64) -> u64 {
    if stamp == 0 { 0 } else { stamp ^ (sector << 48) }
}

#[derive(Clone, Debug)]
struct Sector {
    /// What was written last.
    last: u64,
    /// What may be found after a crash, `last` among it.
    options: Vec<u64>,
    /// Any of the options may be read now: a write failed, or a crash is not looked into yet.
    open: bool,
}

/// All of them.
#[derive(Clone, Debug)]
pub struct Model(Vec<Sector>);

impl Model {
    pub fn new(sectors: u64) -> Self {
        let sector = Sector { last: 0, options: vec![0], open: false };
        Self(vec![sector; sectors as usize])
    }

    pub fn sectors(&self) -> u64 {
        self.0.len() as u64
    }

    fn of(&mut self, range: Range) -> impl Iterator<Item = &mut Sector> {
        self.0[range.from as usize..(range.from + range.count) as usize].iter_mut()
    }

    /// A write was answered, with success or not; with `durable` what is answered stays.
    pub fn wrote(&mut self, range: Range, stamp: u64, done: bool, durable: bool) {
        for sector in self.of(range) {
            sector.last = stamp;
            if done && durable {
                sector.options.clear();
            }
            sector.options.push(stamp);
            sector.open = !done;
        }
    }

    /// Everything that was answered is durable.
    pub fn flushed(&mut self) {
        for sector in self.0.iter_mut().filter(|sector| !sector.open) {
            sector.options = vec![sector.last];
        }
    }

    /// What is there now is not known.
    pub fn crashed(&mut self) {
        self.0.iter_mut().for_each(|sector| sector.open = true);
    }

    /// What was read is what may be read.
    pub fn check(&self, range: Range, data: &[u8]) -> Result<(), String> {
        for (i, got) in data.chunks(SECTOR as usize).enumerate() {
            let at = range.from + i as u64;
            let sector = &self.0[at as usize];
            let mut may = if sector.open { sector.options.clone() } else { vec![sector.last] };
            if !may.iter().any(|stamp| is(got, *stamp, at)) {
                may.dedup();
                let found = got.first_chunk::<8>().map(|b| u64::from_le_bytes(*b) ^ (at << 48));
                return Err(format!("sector {at} holds {found:x?}, and may hold {may:x?}"));
            }
        }
        Ok(())
    }

    /// This is what is there, from now on.
    pub fn is(&mut self, data: &[u8]) {
        for (at, (sector, got)) in self.0.iter_mut().zip(data.chunks(SECTOR as usize)).enumerate() {
            if let Some(stamp) = sector.options.iter().copied().find(|s| is(got, *s, at as u64)) {
                *sector = Sector { last: stamp, options: vec![stamp], open: false };
            }
        }
    }
}

fn is(got: &[u8], stamp: u64, sector: u64) -> bool {
    let word = word(stamp, sector).to_le_bytes();
    got.chunks(8).all(|chunk| chunk == word)
}
