//! The checker: `corbel fsck`, the end of every test, the simulator's judge. Reads only.
//!
//! It trusts nothing: it walks the pages itself, goes on past what is damaged, and compares every
//! statement on media that can be made twice: link counts with names, parents with names, block
//! counts with extents, owners of blocks with their counts, modes with arenas, orphans with link counts, the root record with the sum.

mod data;
mod items;
mod snapshots;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::InodeId;

use crate::format::item::{Inode, ReadClass, Run, Shared};
use crate::format::page::{Key, LEVEL_MAX};
use crate::format::rpc::{AccountId, Amount};
use crate::format::superblock::{ROOT_AT, ROOT_BYTES, RootRecord, Superblock, newest_root};
use crate::limits::{BLOCK_BYTES, FILE_SIZE_MAX};
use crate::media::{Media, MediaError, Segment};
use crate::tree::read_page;
use crate::volume::append_shared as append;
use crate::volume::reach::Unplaced;
use crate::volume::{ARENA_SERVICE, is_half_upgraded, read_roots, read_superblocks};
pub use data::{Data, Touched};
use items::Items;

/// Findings kept; more are only counted.
pub const FINDINGS_MAX: usize = 1000;

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// A spare copy is bad; nothing is lost (a root record may be torn by a crash).
    Note,
    /// The state contradicts itself, or part of it cannot be read.
    Damage,
}

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// Where: "superblock 1", "page 17", "inode 5".
    pub place: String,
    /// What.
    pub problem: String,
    /// What to do.
    pub remedy: &'static str,
}

impl core::fmt::Display for Finding {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}: {}; {}", self.place, self.problem, self.remedy)
    }
}

/// What was seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct Counts {
    pub pages: u64,
    pub items: u64,
    pub inodes: u64,
    pub directories: u64,
    pub files: u64,
    pub names: u64,
    pub extents: u64,
    pub blocks: u64,
    pub shared: u64,
    pub orphans: u64,
    pub clients: u64,
    pub arenas: u64,
    pub snapshots: u64,
    /// Pages that only snapshots have.
    pub snapshot_pages: u64,
    /// Blocks that only snapshots have.
    pub snapshot_blocks: u64,
    /// Blocks whose content was compared with its checksum.
    pub compared: u64,
    /// Those that differ.
    pub rotten: u64,
    /// Those of which none is known.
    pub unsummed: u64,
    /// Those that differ because the stream ring is about to write them anew.
    pub excused: u64,
}

/// The checker's report.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What is wrong, at most [`FINDINGS_MAX`].
    pub findings: Vec<Finding>,
    /// Findings in all.
    pub total: u64,
    /// What was seen.
    pub counts: Counts,
    /// The root that was checked.
    pub root: Option<RootRecord>,
    /// The superblock.
    pub superblock: Option<Superblock>,
}

const RESYNC: &str = "let this node rejoin: it fetches a sound copy from its replicas";
const REWRITE: &str = "the other copy serves; publishing writes this one anew";
const HEAL: &str = "start the node: a scrub repairs it from a replica (`corbel scrub`); what no other member has must come from a copy";
const UPGRADE: &str = "`corbel upgrade`, or a start of the node, ends it";
const REPLACE: &str = "the other copy serves; mkfs this node anew when convenient";

impl Report {
    /// Whether nothing is wrong, notes apart.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|f| f.severity == Severity::Note)
    }

    fn add(&mut self, severity: Severity, place: String, problem: String, remedy: &'static str) {
        self.total += 1;
        // Damage is never crowded out by notes: there are at most four of them.
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(Finding { severity, place, problem, remedy });
        }
    }

    fn damage(&mut self, place: impl Into<String>, problem: impl Into<String>) {
        self.add(Severity::Damage, place.into(), problem.into(), RESYNC);
    }
}

/// Checks the newest published state of a region. An error means that the region itself could
/// not be reached.
pub fn check(media: &dyn Media) -> Result<Report, MediaError> {
    check_all(media, None)
}

/// The same, and reads the content of all files.
pub fn check_with_data(media: &dyn Media, data: &mut Data<'_>) -> Result<Report, MediaError> {
    check_all(media, Some(data))
}

fn check_all(media: &dyn Media, data: Option<&mut Data<'_>>) -> Result<Report, MediaError> {
    let mut report = Report::default();
    let Some(superblock) = check_superblocks(media, &mut report)? else { return Ok(report) };
    let Some(root) = check_roots(media, &superblock, &mut report)? else { return Ok(report) };
    let mut items = Items::new(superblock.uuid);
    let mut pages = Pages { media, superblock: &superblock, root: &root, seen: BTreeSet::new() };
    let top = (root.page, u8::try_from(root.level).unwrap_or(u8::MAX));
    pages.walk(top, (Key::MIN, None), &mut report, &mut items);
    report.counts.pages = pages.seen.len() as u64;
    judge(&items, &superblock, &mut report);
    snapshots::judge(&mut pages, &mut items, &mut report);
    compare_root(&root, &items, &mut report);
    if let Some(data) = data {
        data.check(media, &items, &superblock, &mut report)?;
    }
    (report.superblock, report.root) = (Some(superblock), Some(root));
    Ok(report)
}

fn check_superblocks(
    media: &dyn Media,
    report: &mut Report,
) -> Result<Option<Superblock>, MediaError> {
    let copies = read_superblocks(media)?;
    for (i, copy) in copies.iter().enumerate() {
        if let Err(e) = copy {
            let spare = copies[1 - i].is_ok();
            let severity = if spare { Severity::Note } else { Severity::Damage };
            let remedy = if spare { REPLACE } else { RESYNC };
            report.add(severity, format!("superblock {i}"), e.to_string(), remedy);
        }
    }
    if let [Ok(a), Ok(b)] = &copies
        && a != b
    {
        if is_half_upgraded(a, b) {
            let what = "is of before an upgrade, the other copy of after it";
            let place = format!("superblock {}", u8::from(a.sums));
            report.add(Severity::Note, place, what.into(), UPGRADE);
        } else {
            report.damage("superblock 1", "differs from copy 0");
        }
    }
    let [a, b] = copies;
    let superblock = match (a, b) {
        (Ok(a), Ok(b)) if is_half_upgraded(&a, &b) => Some(if a.sums { a } else { b }),
        (a, b) => a.or(b).ok(),
    };
    let pages = media.size(Segment::Tree)? / BLOCK_BYTES;
    if superblock.as_ref().is_some_and(|s| s.tree_pages > pages) {
        report.damage("superblock", "gives more tree pages than the region has");
    }
    Ok(superblock)
}

fn check_roots(
    media: &dyn Media,
    superblock: &Superblock,
    report: &mut Report,
) -> Result<Option<RootRecord>, MediaError> {
    let slots = read_roots(media, &superblock.uuid)?;
    for (i, slot) in slots.iter().enumerate() {
        let Err(e) = slot else { continue };
        let mut bytes = [0; ROOT_BYTES];
        media.read(Segment::Super, ROOT_AT[i], &mut bytes)?;
        // A new volume has only one.
        let fresh =
            matches!(&slots[1 - i], Ok(r) if r.transaction == 1) && bytes == [0; ROOT_BYTES];
        if !fresh {
            let spare = slots[1 - i].is_ok();
            let severity = if spare { Severity::Note } else { Severity::Damage };
            let remedy = if spare { REWRITE } else { RESYNC };
            report.add(severity, format!("root record {i}"), e.to_string(), remedy);
        }
    }
    Ok(newest_root(&slots))
}

/// The walk over the pages.
struct Pages<'a> {
    media: &'a dyn Media,
    superblock: &'a Superblock,
    root: &'a RootRecord,
    seen: BTreeSet<u64>,
}

impl Pages<'_> {
    fn walk(
        &mut self,
        (number, level): (u64, u8),
        (low, high): (Key, Option<Key>),
        report: &mut Report,
        items: &mut Items,
    ) {
        let place = format!("page {number}");
        if number >= self.superblock.tree_pages || level > LEVEL_MAX {
            return report.damage(place, "lies outside the tree segment");
        }
        if !self.seen.insert(number) {
            return report.damage(place, "is referred to twice");
        }
        let page = match read_page(self.media, number) {
            Ok(page) => page,
            Err(e) => return report.damage(place, e.to_string()),
        };
        if page.level() != level {
            return report.damage(place, format!("has level {}, not {level}", page.level()));
        }
        if page.transaction() > self.root.transaction {
            report.damage(&place, "was written by a transaction after the root");
        }
        let count = page.count();
        if count > 0 && (page.key(0) < low || high.is_some_and(|h| page.key(count - 1) >= h)) {
            report.damage(&place, "has keys outside its parent's bounds");
        }
        for i in 0..count {
            if level == 0 {
                report.counts.items += 1;
                items.add(page.key(i), page.value(i), report);
            } else {
                let next = if i + 1 < count { Some(page.key(i + 1)) } else { high };
                self.walk((page.child(i), level - 1), (page.key(i), next), report, items);
            }
        }
    }
}

fn judge(items: &Items, superblock: &Superblock, report: &mut Report) {
    items.judge_names(report);
    judge_inodes(items, report);
    judge_directories(items, report);
    report.counts.blocks = judge_extents(items, superblock, report);
    report.counts.shared = items.shared.iter().map(|s| s.len).sum();
    for &ino in &items.orphans {
        match items.inodes.get(&ino) {
            None => report.damage(format!("orphan {ino}"), "is no inode"),
            Some(inode) if inode.nlink > 0 => {
                report.damage(format!("orphan {ino}"), "has links");
            }
            _ => {}
        }
    }
    judge_accounts(items, report);
    judge_reach(items, report);
    for ino in items.strays.iter().filter(|ino| !items.inodes.contains_key(ino)) {
        report.damage(format!("inode {ino}"), "has items but no attributes");
    }
    if items.arenas.get(&0) != Some(&ReadClass::World)
        || items.arenas.get(&ARENA_SERVICE) != Some(&ReadClass::Service)
    {
        report.damage("arenas", "0 must be everybody's and 1 the service's");
    }
    let classes: BTreeSet<_> = items.arenas.values().collect();
    if classes.len() != items.arenas.len() {
        report.damage("arenas", "two have the same class");
    }
}

/// What accounts say they use is what their inodes add up to.
fn judge_accounts(items: &Items, report: &mut Report) {
    let mut sums: BTreeMap<AccountId, Amount> = BTreeMap::new();
    for inode in items.inodes.values() {
        let directory = (inode.project.0 != 0).then_some(AccountId::Directory(inode.project));
        for id in [Some(AccountId::User(inode.uid)), directory].into_iter().flatten() {
            let sum = sums.entry(id).or_default();
            let weight = inode.weight();
            sum.blocks = sum.blocks.saturating_add(weight.blocks);
            sum.inodes = sum.inodes.saturating_add(weight.inodes);
        }
    }
    for (id, says) in &items.accounts {
        let is = sums.get(id).copied().unwrap_or_default();
        if *says != is {
            report.damage(format!("account {id:?}"), format!("says {says:?}, and there is {is:?}"));
        }
        if let AccountId::Directory(dir) = id
            && !items.inodes.get(&dir.0).is_some_and(Inode::is_dir)
        {
            report.damage(format!("account {id:?}"), "is of no directory");
        }
    }
}

/// No inode is reached by more than the directory lets in that holds its name, or that is about to be so.
fn judge_reach(items: &Items, report: &mut Report) {
    for (ino, what) in &items.unplaced {
        let is_dir = items.inodes.get(ino).map(Inode::is_dir);
        if is_dir != Some(*what == Unplaced::Directory) {
            report.damage(format!("inode {ino}"), "is to be placed as what it is not");
        }
    }
    if items.inodes.get(&1).is_some_and(|root| root.reach != ReadClass::World) {
        report.damage("directory 1", "is the root, and not everybody reaches it");
    }
    for (dir, ino) in &items.held {
        let (Some(holder), Some(inode)) = (items.inodes.get(dir), items.inodes.get(ino)) else {
            continue;
        };
        let (by, what) = (holder.lets_in(), items.unplaced.get(ino));
        let reach = match what {
            Some(Unplaced::Reach(reach)) => *reach,
            _ => inode.reach,
        };
        let right = if inode.is_dir() { reach == by } else { reach.is_within(by) };
        if !right && !items.unplaced.contains_key(dir) {
            let problem = format!("is reached by {reach:?}, and directory {dir} lets in {by:?}");
            report.damage(format!("inode {ino}"), problem);
        }
    }
}

/// Link counts, sizes, and counts of what belongs to each inode.
fn judge_inodes(items: &Items, report: &mut Report) {
    for (&ino, inode) in &items.inodes {
        let place = || format!("inode {ino}");
        let names = items.links.get(&ino).copied().unwrap_or(0);
        let orphan = items.orphans.contains(&ino);
        if (inode.nlink == 0) != orphan {
            report.damage(place(), "has no link but is no orphan, or the reverse");
        }
        if inode.is_dir() {
            report.counts.directories += 1;
            judge_directory(InodeId(ino), inode, names, items, report);
        } else {
            report.counts.files += 1;
            if u64::from(inode.nlink) != names {
                let problem = format!("has link count {}, and {names} names", inode.nlink);
                report.damage(place(), problem);
            }
            if inode.entries != 0 || inode.parent.0 != 0 {
                report.damage(place(), "has a directory's fields, but is none");
            }
        }
        let target = items.targets.get(&ino).copied().unwrap_or(0);
        let right = match (inode.is_link(), inode.is_file()) {
            (true, _) => inode.size == target,
            (_, true) => inode.size <= FILE_SIZE_MAX && target == 0,
            _ => inode.size == 0 && target == 0,
        };
        if !right {
            report.damage(place(), format!("has impossible size {}", inode.size));
        }
        let blocks = items.blocks.get(&ino).copied().unwrap_or(0);
        if blocks != inode.blocks || (blocks > 0 && !inode.is_file()) {
            let problem = format!("counts {} blocks, and has {blocks}", inode.blocks);
            report.damage(place(), problem);
        }
        let xattrs = items.xattrs.get(&ino).copied().unwrap_or(0);
        let lists = items.lists.get(&ino).copied().unwrap_or((None, false));
        let step = lists.0.is_none_or(|mode| mode == inode.mode & 0o777);
        if inode.acl != lists.0.is_some() || inode.default_acl != lists.1 || !step {
            report.damage(place(), "has access lists that its mode or attributes do not tell of");
        }
        if lists.1 && !inode.is_dir() || lists.0.is_some() && inode.is_link() {
            report.damage(place(), "has an access list that its type cannot have");
        }
        if xattrs != inode.xattrs {
            let problem = format!("counts {} pieces of xattrs, and has {xattrs}", inode.xattrs);
            report.damage(place(), problem);
        }
    }
}

fn judge_directory(ino: InodeId, inode: &Inode, names: u64, items: &Items, report: &mut Report) {
    let place = format!("directory {ino}");
    let subdirs = items.subdirs.get(&ino.0).copied().unwrap_or(0);
    let orphan = items.orphans.contains(&ino.0);
    let want = if orphan { 0 } else { 2 + subdirs };
    if u64::from(inode.nlink) != want {
        report.damage(&place, format!("has link count {}, not {want}", inode.nlink));
    }
    let entries = items.entries.get(&ino.0).copied().unwrap_or(0);
    if inode.entries != entries {
        report.damage(&place, format!("counts {} names, and has {entries}", inode.entries));
    }
    let want = u64::from(ino != InodeId::ROOT && !orphan);
    if names != want {
        report.damage(&place, format!("has {names} names, not {want}"));
    }
    if !orphan && ino != InodeId::ROOT && items.home.get(&ino.0) != Some(&inode.parent.0) {
        report.damage(&place, format!("says that {} is its parent", inode.parent));
    }
    if ino == InodeId::ROOT && inode.parent != InodeId::ROOT {
        report.damage(&place, "is the root, but says otherwise");
    }
}

/// Every directory with a name leads to the root.
fn judge_directories(items: &Items, report: &mut Report) {
    if !items.inodes.get(&1).is_some_and(Inode::is_dir) {
        report.damage("directory 1", "is missing");
    }
    let mut known: HashMap<u64, bool> = HashMap::from([(1, true)]);
    for (&ino, inode) in items.inodes.iter().filter(|(_, i)| i.is_dir() && i.nlink > 0) {
        let (mut path, mut at, mut next) = (Vec::new(), ino, inode.parent.0);
        let leads = loop {
            if let Some(&leads) = known.get(&at) {
                break leads;
            }
            // Until judged, a directory met again on the way is a cycle.
            known.insert(at, false);
            path.push(at);
            let Some(parent) = items.inodes.get(&next).filter(|i| i.is_dir()) else { break false };
            (at, next) = (next, parent.parent.0);
        };
        for dir in path {
            known.insert(dir, leads);
        }
        if !leads {
            report.damage(format!("directory {ino}"), "does not lead to the root");
        }
    }
}

/// Every block inside its arena, every arena readable by whom the mode says, every block counted as
/// often as it is mapped. Returns how many blocks are mapped.
fn judge_extents(items: &Items, superblock: &Superblock, report: &mut Report) -> u64 {
    // Where a run begins and ends, in the order of the blocks.
    let mut edges: Vec<(u32, u64, bool)> = Vec::with_capacity(2 * items.runs.len());
    for (ino, run) in &items.runs {
        let place = || format!("inode {ino}, block {}", run.file);
        judge_run(*ino, run, items, superblock, &place, report);
        edges.push((run.arena, run.block, true));
        edges.push((run.arena, run.block + run.len, false));
    }
    edges.sort_unstable();
    let (mut owners, mut blocks, mut mapped) = (0, 0, Vec::new());
    for (i, &(arena, at, begins)) in edges.iter().enumerate() {
        owners = if begins { owners + 1 } else { owners - 1 };
        let Some(&(_, next, _)) = edges.get(i + 1).filter(|_| owners > 0) else { continue };
        blocks += next - at;
        if owners > 1 && next > at {
            append(&mut mapped, Shared { arena, block: at, len: next - at, owners });
        }
    }
    let mut counted = Vec::new();
    for shared in &items.shared {
        append(&mut counted, *shared);
    }
    compare_shared(&mapped, &counted, report);
    for (ino, run) in items.runs.iter().filter(|(_, run)| run.unwritten) {
        let at = mapped.partition_point(|s| (s.arena, s.end()) <= (run.arena, run.block));
        let shared = mapped.get(at).filter(|s| s.arena == run.arena);
        if shared.is_some_and(|s| s.block < run.block + run.len) {
            report.damage(format!("inode {ino}, block {}", run.file), "is unwritten and shared");
        }
    }
    blocks
}

/// Shared runs as extents give them, and as their items count them.
fn compare_shared(mapped: &[Shared], counted: &[Shared], report: &mut Report) {
    for s in counted.windows(2).filter(|s| s[0].arena == s[1].arena && s[0].end() > s[1].block) {
        let place = format!("arena {}, block {}", s[1].arena, s[1].block);
        report.damage(place, "has two counts of its owners");
    }
    let damage = |s: &Shared, report: &mut Report, says: &str| {
        let place = format!("arena {}, blocks {} to {}", s.arena, s.block, s.end());
        report.damage(place, format!("{says} {} owners", s.owners));
    };
    for s in mapped.iter().filter(|s| counted.binary_search(s).is_err()) {
        damage(s, report, "are mapped by, and not counted for,");
    }
    for s in counted.iter().filter(|s| mapped.binary_search(s).is_err()) {
        damage(s, report, "are counted for, and not mapped by,");
    }
}

fn judge_run(
    ino: u64,
    run: &Run,
    items: &Items,
    superblock: &Superblock,
    place: &dyn Fn() -> String,
    report: &mut Report,
) {
    if run.block + run.len > superblock.capacity_blocks {
        report.damage(place(), "has an extent that reaches beyond its arena");
    }
    let Some(class) = items.arenas.get(&run.arena) else {
        return report.damage(place(), format!("lies in arena {}, which is none", run.arena));
    };
    let Some(inode) = items.inodes.get(&ino) else { return };
    let want = inode.class();
    if *class != want && *class != ReadClass::Service {
        let problem = format!("may be read by {want:?}, but lies in an arena of {class:?}");
        report.damage(place(), problem);
    }
}

fn compare_root(root: &RootRecord, items: &Items, report: &mut Report) {
    report.counts.inodes = items.inodes.len() as u64;
    report.counts.extents = items.runs.len() as u64;
    report.counts.orphans = items.orphans.len() as u64;
    report.counts.arenas = items.arenas.len() as u64;
    report.counts.names = items.entries.values().sum();
    let c = report.counts;
    for (what, says, is) in [
        ("pages", root.pages, c.pages),
        ("inodes", root.inodes, c.inodes),
        ("blocks", root.blocks, c.blocks),
        ("snapshots", root.snapshots, c.snapshots),
    ] {
        if says != is {
            report.damage("root record", format!("counts {says} {what}, and there are {is}"));
        }
    }
    if items.inodes.keys().next_back().is_some_and(|last| *last > root.last_inode) {
        report.damage("root record", "an inode has a higher number than the highest given out");
    }
}

/// Sums per inode.
type Sums<T> = BTreeMap<u64, T>;
