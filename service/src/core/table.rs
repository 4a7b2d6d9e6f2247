//! The client table as the service keeps it (`storage::format::clients` has the bytes).
//!
//! Always true, also after a power cut of a `pmem` region: a lease is written down here before its
//! client learns of it, and crossed out only when everything that was appended under it is in the
//! stream; a position is written down before its client may write over what lies before it; a row
//! is free, or its log exists. So what a restarted service finds in the logs it can judge exactly as
//! it would have done without the restart.

use std::collections::BTreeSet;
use std::sync::Arc;

use base::always;
use base::planted::{Bug, planted};
use base::{ClientId, InodeId, Sequence};
use storage::format::clients::{
    HEADER_BYTES, HELD_BYTES, Header, Held, LEASE_UNMADE, LEASES, PINS, PROGRESS, PROGRESS_BYTES,
    Progress, RECORD_BYTES, ROW_BYTES, ROWS, ROWS_MAX, Record, row_at,
};
use storage::format::control::LeaseMode;
use storage::limits::{LANES_MAX, LEASE_SLOTS, PIN_SLOTS};
use storage::media::{Media, MediaError, Segment};

const TABLE: Segment = Segment::Clients;
/// Leases or pins read at once.
const PAGE_SLOTS: usize = 64;

/// See the module.
pub struct Table {
    media: Arc<dyn Media>,
    strict: bool,
    header: Header,
    used: BTreeSet<u32>,
    /// The machine was started anew since the table was written last.
    pub rebooted: bool,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("header", &self.header).field("used", &self.used).finish()
    }
}

/// One row: what its client needs to keep it.
pub struct Row {
    media: Arc<dyn Media>,
    strict: bool,
    index: u32,
    progress: Progress,
    free: bool,
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Row").field("index", &self.index).finish_non_exhaustive()
    }
}

/// A client of an earlier run.
#[derive(Debug)]
pub struct Found {
    /// Its row.
    pub row: Row,
    /// Who it is.
    pub record: Record,
    /// Leases by slot.
    pub leases: Vec<(u32, InodeId, LeaseMode)>,
    /// Those of their inodes that nothing had been made with when they were written down.
    pub unmade: BTreeSet<InodeId>,
    /// Pins by slot.
    pub pins: Vec<(u32, InodeId, u32)>,
}

impl Table {
    /// Opens the table, or makes an empty one, and counts the start. `strict`: what is written here
    /// must survive a power cut. `boot` names the boot of the machine, `secret` is for a new table.
    pub fn open(
        media: Arc<dyn Media>,
        strict: bool,
        boot: u128,
        secret: u128,
    ) -> Result<(Self, Vec<Found>), MediaError> {
        media.ensure(TABLE, ROWS)?;
        let mut newest: Option<Header> = None;
        for at in [0, HEADER_BYTES as u64] {
            let mut bytes = [0; HEADER_BYTES];
            media.read(TABLE, at, &mut bytes)?;
            if let Ok(header) = Header::decode(&bytes) {
                newest = newest.filter(|n| n.number > header.number).or(Some(header));
            }
        }
        let (old, known) = (newest.unwrap_or_default(), newest.is_some());
        let secret = if known { old.secret } else { secret };
        let header = Header { starts: old.starts + 1, number: old.number + 1, boot, secret };
        let rebooted = old.boot != boot;
        let mut table = Self { media, strict, header, used: BTreeSet::new(), rebooted };
        let found = table.read_rows()?;
        if !known && !found.is_empty() {
            log::warn!("both headers of the client table are damaged; its rows are still good");
        }
        let at = (table.header.number % 2) * HEADER_BYTES as u64;
        table.media.write(TABLE, at, &table.header.encode())?;
        table.media.persist(TABLE, at, HEADER_BYTES as u64)?;
        table.media.fence()?;
        Ok((table, found))
    }

    /// Key of the proofs that this node gives and takes.
    pub const fn secret(&self) -> u128 {
        self.header.secret
    }

    fn read_rows(&mut self) -> Result<Vec<Found>, MediaError> {
        let rows = (self.media.size(TABLE)?.saturating_sub(ROWS) / ROW_BYTES).min(ROWS_MAX);
        let mut found: Vec<Found> = Vec::new();
        for index in 0..rows as u32 {
            let mut bytes = vec![0; RECORD_BYTES];
            self.media.read(TABLE, row_at(index), &mut bytes)?;
            let record = match Record::decode(&bytes) {
                Ok(None) => continue,
                Ok(Some(record)) => record,
                Err(e) => {
                    log::warn!("row {index}: {e}; what its log held beyond the stream is lost");
                    continue;
                }
            };
            if found
                .iter()
                .any(|f| f.record.client == record.client || f.record.segment == record.segment)
            {
                log::warn!("row {index} of the client table names a client a second time");
                continue;
            }
            found.push(self.read_row(index, record)?);
            self.used.insert(index);
        }
        Ok(found)
    }

    fn read_row(&self, index: u32, record: Record) -> Result<Found, MediaError> {
        let at = row_at(index);
        let mut progress = Progress { incarnation: record.incarnation, ..Progress::default() };
        for slot in 0..2 {
            let mut bytes = [0; PROGRESS_BYTES];
            self.media.read(TABLE, at + PROGRESS + slot * PROGRESS_BYTES as u64, &mut bytes)?;
            if let Ok(read) = Progress::decode(&bytes)
                && read.incarnation == record.incarnation
                && read.number > progress.number
            {
                progress = read;
            }
        }
        let leases = self.read_held(index, LEASES, LEASE_SLOTS, record.incarnation)?;
        let pins = self.read_held(index, PINS, PIN_SLOTS, record.incarnation)?;
        let row = Row {
            media: Arc::clone(&self.media),
            strict: self.strict,
            index,
            progress,
            free: false,
        };
        let lease = |(slot, held): (u32, Held)| Some((slot, held.ino, held.mode()?));
        let unmade = leases.iter().filter(|(_, held)| held.what == LEASE_UNMADE);
        Ok(Found {
            row,
            record,
            unmade: unmade.map(|(_, held)| held.ino).collect(),
            leases: leases.into_iter().filter_map(lease).collect(),
            pins: pins.into_iter().map(|(slot, held)| (slot, held.ino, held.what)).collect(),
        })
    }

    fn read_held(
        &self,
        index: u32,
        from: u64,
        slots: usize,
        incarnation: u32,
    ) -> Result<Vec<(u32, Held)>, MediaError> {
        let mut held = Vec::new();
        let mut page = [0; PAGE_SLOTS * HELD_BYTES];
        for first in (0..slots as u32).step_by(PAGE_SLOTS) {
            let begin = from + u64::from(first) * HELD_BYTES as u64;
            self.media.read(TABLE, row_at(index) + begin, &mut page)?;
            let mut used = false;
            for (slot, bytes) in (first..).zip(page.chunks_exact(HELD_BYTES)) {
                let at = from + u64::from(slot) * HELD_BYTES as u64;
                // Torn, or of an earlier owner of the row: free.
                let Ok(Some(entry)) = Held::decode(bytes, incarnation, at) else { continue };
                used = true;
                if entry != Held::FREE {
                    held.push((slot, entry));
                }
            }
            if !used {
                break;
            }
        }
        Ok(held)
    }

    /// Grows with each start: generations of leases never come again.
    pub const fn starts(&self) -> u32 {
        self.header.starts
    }

    /// Writes a new client down, durably.
    pub fn put(&mut self, record: &Record) -> Result<Row, MediaError> {
        let free = (0..ROWS_MAX as u32).find(|i| !self.used.contains(i));
        let Some(index) = free else {
            return Err(MediaError::Io("the client table is full".into()));
        };
        let at = row_at(index);
        self.media.ensure(TABLE, at + ROW_BYTES)?;
        let bytes = record.encode();
        self.media.write(TABLE, at, &bytes)?;
        if !planted(Bug::RowNotFlushed) {
            self.media.persist(TABLE, at, bytes.len() as u64)?;
        }
        if self.strict {
            self.media.fence()?;
        }
        self.used.insert(index);
        let progress = Progress { incarnation: record.incarnation, ..Progress::default() };
        let media = Arc::clone(&self.media);
        Ok(Row { media, strict: self.strict, index, progress, free: false })
    }

    /// Each of these rows, of which there is one for each client, is in use, and no row has two; else what is wrong.
    pub fn invariants<'a>(&self, rows: impl Iterator<Item = &'a Row>) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for row in rows {
            always!(self.used.contains(&row.index), "row {} of a client is free", row.index);
            always!(seen.insert(row.index), "row {} has two clients", row.index);
        }
        Ok(())
    }

    /// Frees a row.
    pub fn remove(&mut self, mut row: Row) -> Result<(), MediaError> {
        row.forget()?;
        self.used.remove(&row.index);
        Ok(())
    }
}

impl Row {
    /// Durable after the next fence.
    fn put_held(&self, from: u64, slot: u32, held: Held) -> Result<(), MediaError> {
        let in_row = from + u64::from(slot) * HELD_BYTES as u64;
        let bytes = held.encode(self.progress.incarnation, in_row);
        let at = row_at(self.index) + in_row;
        self.media.write(TABLE, at, &bytes)?;
        if self.strict && !planted(Bug::HeldNotFlushed) {
            self.media.persist(TABLE, at, HELD_BYTES as u64)?;
        }
        Ok(())
    }

    /// Writes a lease down; durable when it returns. `unmade`: nothing was made with the number.
    pub fn put_lease(
        &self,
        slot: u32,
        ino: InodeId,
        mode: LeaseMode,
        unmade: bool,
    ) -> Result<(), MediaError> {
        let unmade = unmade && mode == LeaseMode::Write;
        let held = Held { ino, what: if unmade { LEASE_UNMADE } else { mode as u32 } };
        self.put_held(LEASES, slot, if mode == LeaseMode::None { Held::FREE } else { held })?;
        self.fence()
    }

    /// Writes down that something was made with the number of a lease; durable after [`Row::fence`].
    pub fn note_made(&self, slot: u32, ino: InodeId, mode: LeaseMode) -> Result<(), MediaError> {
        self.put_held(LEASES, slot, Held { ino, what: mode as u32 })
    }

    /// Crosses a lease out.
    pub fn drop_lease(&self, slot: u32) -> Result<(), MediaError> {
        self.put_held(LEASES, slot, Held::FREE)?;
        self.fence()
    }

    /// Writes a pin down, or crosses it out (`what` 0).
    pub fn put_pin(&self, slot: u32, ino: InodeId, what: u32) -> Result<(), MediaError> {
        self.put_held(PINS, slot, if what == 0 { Held::FREE } else { Held { ino, what } })?;
        self.fence()
    }

    /// The progress as it was written last.
    pub const fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Writes down how far the log is published; durable after [`Row::fence`].
    pub fn note(&mut self, published: Sequence, lanes: [u64; LANES_MAX]) -> Result<(), MediaError> {
        self.progress.published = published;
        self.progress.lanes = lanes;
        self.write_progress()
    }

    /// Writes down the last sequence that counts; durable when it returns.
    pub fn seal(&mut self, last: Sequence) -> Result<(), MediaError> {
        self.progress.sealed = Some(last);
        self.write_progress()?;
        self.fence()
    }

    fn write_progress(&mut self) -> Result<(), MediaError> {
        if self.free {
            return Ok(());
        }
        self.progress.number += 1;
        let slot = self.progress.number % 2;
        let at = row_at(self.index) + PROGRESS + slot * PROGRESS_BYTES as u64;
        self.media.write(TABLE, at, &self.progress.encode())?;
        if self.strict {
            self.media.persist(TABLE, at, PROGRESS_BYTES as u64)?;
        }
        Ok(())
    }

    /// What was noted is durable.
    pub fn fence(&self) -> Result<(), MediaError> {
        if self.strict { self.media.fence() } else { Ok(()) }
    }

    /// The log counts no more; what the process has open does. Durable when it returns.
    pub fn end_log(&mut self) -> Result<(), MediaError> {
        self.progress.over = true;
        self.progress.sealed.get_or_insert_default();
        self.write_progress()?;
        self.fence()
    }

    /// The client is no more, or its log counts no more: nothing of it is taken up again. The row
    /// stays in use until it is removed.
    pub fn forget(&mut self) -> Result<(), MediaError> {
        if self.free {
            return Ok(());
        }
        self.free = true;
        let at = row_at(self.index);
        self.media.write(TABLE, at, &[0; 64])?;
        if self.strict {
            self.media.persist(TABLE, at, 64)?;
            self.media.fence()?;
        }
        Ok(())
    }
}

/// The client of a row.
impl Found {
    /// Its id.
    pub const fn client(&self) -> ClientId {
        self.record.client
    }
}
