//! What lies on the media is read now and then, compared with its checksums, and mended.
//!
//! # A pass
//!
//! Reads every page of the tree and every block of content of this node, those of files and those that only snapshots have, a slice at a time, when there is nothing else to do: one that
//! was asked for as fast as it goes, one in the background at a pace. A page that is rotten is written again from DRAM. A block
//! of a file that is about to be published differs from its checksum for a moment; it is looked at again then.
//!
//! What is rotten is mended from other members ([`heal`](super::heal)).
//!
//! Nobody is given what is rotten: a read waits until it is mended, and fails if nobody has it; a node that joins waits as well.

use std::collections::{BTreeSet, VecDeque};

use base::planted::{Bug, planted};
use base::{InodeId, Nanos, StreamSeq};
use storage::format::item::Run;
use storage::limits::BLOCK_BYTES;
use storage::tree::Looked;
use storage::volume::Place;

use super::heal::Healing;
use super::{Failure, Node, Role};

/// Blocks read in one slice.
const SLICE: u64 = 64;
/// Pages looked at in one slice.
const PAGES: u64 = 32;
/// Items of the tree passed over in one slice.
const ITEMS: usize = 1000;
/// Bytes between two pauses of a pass at a pace.
const STRIDE: u64 = 1 << 20;
/// A pass in the background begins so long after the start at the latest, if there is to be one at all.
const FIRST: Nanos = 3_600_000_000_000;
/// What waits for a publication is looked at again after this time.
const PAUSE: Nanos = 10_000_000;
/// Pages that are judged together.
const DOUBTFUL_MAX: usize = 4096;
/// So often, until what its file waits for is published at once.
const LOOKS: u32 = 10;
/// Blocks that are looked at again; more are found by the next pass.
const AGAIN_MAX: usize = 65_536;
/// So often what was written may not stay before the medium is given up.
const FAILED_MAX: u32 = 3;

/// How far a pass is.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Pages from this number on.
    Pages(u64),
    /// Content from this block of this inode on.
    Content(InodeId, u64),
    /// Content that only snapshots have, from this place on: a page that hangs on one, and blocks of what was found in it.
    Past((u64, usize), u64),
    /// What was not published when it was read.
    Again,
}

#[derive(Clone, Copy, Debug)]
struct Pass {
    stage: Stage,
    /// As fast as it goes.
    asked_for: bool,
    /// Bytes read.
    bytes: u64,
    /// The next slice is due then.
    next: Nanos,
}

/// A block that differed while operations on its file were not published, up to there.
#[derive(Clone, Copy, Debug)]
struct Again {
    ino: InodeId,
    file: u64,
    seq: StreamSeq,
    /// How often it was looked at since.
    looks: u32,
}

/// What `status` shows.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[allow(missing_docs)]
pub struct ScrubStatus {
    /// Whether blocks have checksums.
    pub sums: bool,
    pub running: bool,
    /// Bytes that the pass under way, or the last one, has read.
    pub bytes: u64,
    /// Passes that came to their end.
    pub passes: u64,
    /// Blocks that are rotten now, and those of them that no member has.
    pub rotten: u64,
    pub lost: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Scrub {
    pass: Option<Pass>,
    /// Whether a pass was asked for.
    wanted: bool,
    passes: u64,
    last_bytes: u64,
    /// When the next one in the background is due.
    due: Option<Nanos>,
    again: VecDeque<Again>,
    /// Pages that are rotten, if they are in use.
    doubtful: BTreeSet<u64>,
    pub(super) healing: Healing,
    failed: u32,
}

/// What came of reading content.
pub(super) enum Content {
    /// So many bytes.
    Read(usize),
    /// Some of it is being mended.
    Waits,
    /// Some of it is rotten, and nobody has it.
    Lost,
}

impl Node {
    /// A pass shall begin, now.
    pub(super) fn scrub_wanted(&mut self) {
        self.scrub.wanted = true;
    }

    pub(super) fn scrub_status(&self) -> ScrubStatus {
        let scrub = &self.scrub;
        ScrubStatus {
            sums: self.volume.sums_base().is_some(),
            running: scrub.pass.is_some() || scrub.wanted,
            bytes: scrub.pass.map_or(scrub.last_bytes, |pass| pass.bytes),
            passes: scrub.passes,
            rotten: scrub.healing.len() as u64,
            lost: scrub.healing.lost() as u64,
        }
    }

    /// Whether what lies here is to be looked after: not while it is being replaced.
    pub(super) fn keeps_volume(&self) -> bool {
        matches!(self.role(), Role::Head | Role::Member) && self.member.incoming.is_none()
    }

    /// When there is something to do, if nothing comes before.
    pub(super) fn scrub_deadline(&self) -> Option<Nanos> {
        if !self.keeps_volume() {
            return None;
        }
        let pass = self.scrub.pass.map(|pass| pass.next);
        pass.into_iter().chain(self.scrub.healing.deadline()).min()
    }

    /// Some of it; `true` when there is more to do at once.
    pub(super) fn scrub_step(&mut self) -> Result<bool, Failure> {
        if !self.keeps_volume() {
            return Ok(false);
        }
        self.mend_step()?;
        let every = self.env.config.limits.scrub_every;
        let first = self.env.now.saturating_add(every.min(FIRST));
        let due = every > 0 && self.env.now >= *self.scrub.due.get_or_insert(first);
        let Some(pass) = self.scrub.pass else {
            if self.scrub.wanted || due {
                let (stage, asked_for) = (Stage::Pages(0), self.scrub.wanted);
                self.scrub.wanted = false;
                self.scrub.pass = Some(Pass { stage, asked_for, bytes: 0, next: self.env.now });
                log::info!("a scrub begins");
                return Ok(true);
            }
            return Ok(false);
        };
        if self.scrub.wanted {
            // All of it, from the beginning, unless that is under way.
            self.scrub.wanted = false;
            let (stage, next) = (Stage::Pages(0), self.env.now);
            let anew = Pass { stage, asked_for: true, bytes: 0, next };
            self.scrub.pass = Some(if pass.asked_for { pass } else { anew });
            return Ok(true);
        }
        if self.env.now < pass.next {
            return Ok(false);
        }
        self.pass_on(pass)
    }

    fn pass_on(&mut self, pass: Pass) -> Result<bool, Failure> {
        let mut bytes = 0;
        let stage = match pass.stage {
            Stage::Pages(from) => {
                let end = (from + PAGES).min(self.volume.page_numbers());
                for number in from..end {
                    bytes += self.look_at_page(number)?;
                }
                if end == from {
                    self.judge_pages()?;
                }
                let content = Stage::Content(InodeId::NONE, 0);
                Some(if end > from { Stage::Pages(end) } else { content })
            }
            Stage::Content(ino, file) => {
                let (found, next) = match self.volume.sums_base() {
                    Some(_) => self.volume.content_after(ino, file, ITEMS)?,
                    // Nothing says what it should be.
                    None => (None, None),
                };
                let next = match found {
                    Some((ino, run)) => {
                        let part = run.cut(run.file, run.file + SLICE);
                        bytes += part.len * BLOCK_BYTES;
                        self.compare_with_sums(ino, &part)?;
                        Some((ino, part.end()))
                    }
                    None => next,
                };
                let past = Stage::Past((0, 0), 0);
                Some(next.map_or(past, |(ino, file)| Stage::Content(ino, file)))
            }
            Stage::Past(at, done) => {
                let (found, next) = match self.volume.sums_base() {
                    Some(_) if !planted(Bug::PastUnscrubbed) => self.volume.past_content(at)?,
                    _ => (Vec::new(), None),
                };
                // A slice of what the page leads to, behind what was read of that.
                let (mut skip, mut left) = (done, SLICE);
                for (ino, run) in &found {
                    let gone = skip.min(run.len);
                    skip -= gone;
                    let part = run.cut(run.file + gone, run.file + gone + left);
                    if part.len > 0 {
                        left -= part.len;
                        bytes += part.len * BLOCK_BYTES;
                        self.compare_with_sums(*ino, &part)?;
                    }
                }
                let all: u64 = found.iter().map(|(_, run)| run.len).sum();
                Some(match next {
                    _ if done + SLICE - left < all => Stage::Past(at, done + SLICE - left),
                    Some(next) => Stage::Past(next, 0),
                    None => Stage::Again,
                })
            }
            Stage::Again => {
                self.look_again()?;
                Some(Stage::Again).filter(|_| !self.scrub.again.is_empty())
            }
        };
        let read = pass.bytes + bytes;
        let Some(stage) = stage else {
            self.scrub.passes += 1;
            (self.scrub.pass, self.scrub.last_bytes) = (None, read);
            self.scrub.due = Some(self.env.now.saturating_add(self.env.config.limits.scrub_every));
            log::info!(
                "the scrub has ended: {read} bytes read, {} rotten",
                self.scrub.healing.len()
            );
            return Ok(false);
        };
        let strides = read / STRIDE - pass.bytes / STRIDE;
        let rate = self.env.config.limits.scrub_rate.max(1);
        let rest = u128::from(strides * STRIDE) * 1_000_000_000 / u128::from(rate);
        let rest = if pass.asked_for { 0 } else { u64::try_from(rest).unwrap_or(Nanos::MAX) };
        // It waits for a publication, which comes by itself.
        let waits = matches!((pass.stage, stage), (Stage::Again, Stage::Again));
        let next = self.env.now.saturating_add(if waits { PAUSE } else { rest });
        self.scrub.pass = Some(Pass { stage, bytes: read, next, ..pass });
        self.env.counters.scrubbed_bytes += bytes;
        Ok(!waits && rest == 0)
    }

    fn judge_pages(&mut self) -> Result<(), Failure> {
        let doubtful = std::mem::take(&mut self.scrub.doubtful);
        Ok(self.volume.tree().judge(&doubtful)?)
    }

    /// Bytes read.
    fn look_at_page(&mut self, number: u64) -> Result<u64, Failure> {
        match self.volume.tree().look_at(number)? {
            Looked::Unused => return Ok(0),
            Looked::Right => {}
            // Judged when all were looked at: that takes a walk of the tree.
            Looked::Doubtful => {
                self.scrub.doubtful.insert(number);
                if self.scrub.doubtful.len() >= DOUBTFUL_MAX {
                    self.judge_pages()?;
                }
            }
            Looked::Mended => {
                (self.env.counters.rotten, self.env.counters.mended) =
                    (self.env.counters.rotten + 1, self.env.counters.mended + 1);
                log::warn!("page {number} of the tree was rotten; it is written again");
            }
            Looked::Failed => {
                self.env.counters.rotten += 1;
                self.medium_fails(&format!("page {number} of the tree"))?;
            }
        }
        Ok(BLOCK_BYTES)
    }

    fn compare_with_sums(&mut self, ino: InodeId, run: &Run) -> Result<(), Failure> {
        let mut wrong = Vec::new();
        let short = Run { len: run.len - 1, ..*run };
        let run = if planted(Bug::ScrubCutsShort) { &short } else { run };
        self.volume.compare(ino, run, &mut wrong)?;
        wrong.iter().for_each(|place| self.suspect(place));
        Ok(())
    }

    fn look_again(&mut self) -> Result<(), Failure> {
        for _ in 0..self.scrub.again.len().min(SLICE as usize) {
            let Some(Again { ino, file, seq, looks }) = self.scrub.again.pop_front() else { break };
            // A file that is written all the time never rests by itself.
            let waits = looks < LOOKS;
            if !waits {
                self.publish_all()?;
            }
            let published = seq <= self.member.published;
            let mut wrong = Vec::new();
            if published && let Some(place) = self.volume.place_of(ino, file)? {
                let Place { arena, block, .. } = place;
                let run = Run { file, arena, block, len: 1, unwritten: false };
                self.volume.compare(ino, &run, &mut wrong)?;
            }
            let next = if published { self.unpublished(ino) } else { Some(seq) };
            match next.filter(|_| waits && (!published || !wrong.is_empty())) {
                Some(seq) => {
                    self.scrub.again.push_back(Again { ino, file, seq, looks: looks + 1 });
                }
                None => self.suspect_all(&wrong),
            }
        }
        Ok(())
    }

    /// A block differs, and may be on its way to the medium up to there.
    pub(super) fn look_again_after(&mut self, place: &Place, seq: StreamSeq) {
        if self.scrub.again.len() < AGAIN_MAX {
            let (ino, file) = (place.ino, place.file);
            self.scrub.again.push_back(Again { ino, file, seq, looks: 0 });
        }
    }

    /// Up to where operations on a file are that are not published.
    pub(super) fn unpublished(&self, ino: InodeId) -> Option<StreamSeq> {
        let seq = self.member.dirty.get(&ino)?.0;
        (seq > self.member.published).then_some(seq)
    }

    /// What was written to the medium is not what is read from it.
    pub(super) fn medium_fails(&mut self, what: &str) -> Result<(), Failure> {
        self.scrub.failed += 1;
        log::error!("{what} was written again, and is not what was written");
        if self.scrub.failed < FAILED_MAX {
            return Ok(());
        }
        Err(Failure::Medium(format!(
            "{what} and {} others do not keep what is written",
            FAILED_MAX - 1
        )))
    }

    /// Reads content for somebody else than this node: never what is rotten.
    pub(super) fn read_content(
        &mut self,
        ino: InodeId,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<Content, Failure> {
        let mut wrong = Vec::new();
        let mut read = self.volume.read_checked(ino, offset, buf, &mut wrong)?;
        if wrong.is_empty() || planted(Bug::RotServed) {
            return Ok(Content::Read(read));
        }
        if wrong.iter().any(|place| self.unpublished(place.ino).is_some()) {
            // On its way to the medium.
            self.publish_all()?;
            wrong.clear();
            read = self.volume.read_checked(ino, offset, buf, &mut wrong)?;
        }
        if wrong.is_empty() {
            return Ok(Content::Read(read));
        }
        wrong.iter().for_each(|place| self.suspect(place));
        Ok(if self.is_lost(&wrong) { Content::Lost } else { Content::Waits })
    }

    /// What was known is of a volume that is no more.
    pub(super) fn forget_scrub(&mut self) {
        let scrub = &mut self.scrub;
        // Who asked for a pass waits for one, of what lies here then.
        scrub.wanted |= scrub.pass.is_some_and(|pass| pass.asked_for);
        (scrub.pass, scrub.failed) = (None, 0);
        scrub.again.clear();
        scrub.doubtful.clear();
        scrub.healing.clear();
    }
}
