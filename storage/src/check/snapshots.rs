//! What snapshots have and no newer state: pages that are whole, and blocks that lie where they may. Their states are not judged again
//! as states: each was one of the volume when it was made.

use std::collections::BTreeSet;

use super::items::Items;
use super::{Pages, Report};
use crate::format::item::{Run, kind};
use crate::format::page::LEVEL_MAX;
use crate::tree::read_page;

/// Looks at all of them, after the published state.
pub(super) fn judge(pages: &mut Pages<'_>, items: &mut Items, report: &mut Report) {
    report.counts.snapshots = items.snapshots.len() as u64;
    if !items.snapshots.keys().eq(items.roots.keys()) {
        report.damage("snapshots", "some have no root, or some roots no snapshot");
    }
    let names: BTreeSet<_> = items.snapshots.values().map(|s| &s.name).collect();
    let slots: BTreeSet<_> = items.snapshots.values().map(|s| s.slot).collect();
    if names.len().min(slots.len()) < items.snapshots.len() {
        report.damage("snapshots", "two have the same name or slot");
    }
    let before: Vec<u64> = items.roots.values().map(|root| root.transaction).collect();
    let newest = before.last().copied().unwrap_or(0);
    if !before.is_sorted_by(|a, b| a < b) || newest >= pages.root.transaction && newest > 0 {
        report.damage("snapshots", "are not in the order of their transactions");
    }
    let roots: Vec<_> = items.roots.iter().rev().map(|(n, root)| (*n, *root)).collect();
    let seen = pages.seen.len();
    for (number, root) in roots {
        let name = format!("snapshot {number}");
        walk(pages, (root.page, root.level), (&name, root.transaction), items, report);
    }
    report.counts.snapshot_pages = (pages.seen.len() - seen) as u64;
    count(items, report);
}

fn walk(
    pages: &mut Pages<'_>,
    (number, level): (u64, u8),
    (name, transaction): (&str, u64),
    items: &mut Items,
    report: &mut Report,
) {
    let place = format!("page {number} of {name}");
    if number >= pages.superblock.tree_pages || level > LEVEL_MAX {
        return report.damage(place, "lies outside the tree segment");
    }
    if !pages.seen.insert(number) {
        return;
    }
    let page = match read_page(pages.media, number) {
        Ok(page) => page,
        Err(e) => return report.damage(place, e.to_string()),
    };
    if page.level() != level {
        return report.damage(place, format!("has level {}, not {level}", page.level()));
    }
    if page.transaction() > transaction {
        report.damage(&place, "was written after the snapshot was made");
    }
    for i in 0..page.count() {
        if level > 0 {
            walk(pages, (page.child(i), level - 1), (name, transaction), items, report);
            continue;
        }
        let key = page.key(i);
        if key.kind == kind::EXTENT {
            match Run::decode(key.item, page.value(i)) {
                Ok(run) => items.dead.push((key.ino, run)),
                Err(e) => report.damage(&place, e.to_string()),
            }
        }
    }
}

/// Blocks that only snapshots have; that their extents lie in arenas.
fn count(items: &Items, report: &mut Report) {
    let mut blocks = BTreeSet::new();
    for (ino, run) in &items.dead {
        if !items.arenas.contains_key(&run.arena) {
            let place = format!("inode {ino} of a snapshot, block {}", run.file);
            report.damage(place, format!("lies in arena {}, which is none", run.arena));
        }
        blocks.insert((run.arena, run.block, run.block + run.len));
    }
    let live: BTreeSet<_> =
        items.runs.iter().map(|(_, r)| (r.arena, r.block, r.block + r.len)).collect();
    let all: BTreeSet<_> = blocks.union(&live).copied().collect();
    report.counts.snapshot_blocks = covered(&all) - covered(&live);
}

/// Blocks in some of these runs.
fn covered(runs: &BTreeSet<(u32, u64, u64)>) -> u64 {
    let (mut sum, mut at) = (0, (0, 0));
    for &(arena, from, to) in runs {
        let from = if at.0 == arena { from.max(at.1) } else { from };
        if from < to {
            sum += to - from;
            at = (arena, to);
        }
    }
    sum
}
