//! What one state of a tree has otherwise than another, without reading what they share.

use std::sync::Arc;

use super::{Fault, Tree};
use crate::format::page::{Key, Page};

/// An item that differs: its value in the later state, or that it is gone.
pub type Change = (Key, Option<Vec<u8>>);

/// The pages on the way to a key: of each its number, and where the next one begins; and the leaf.
struct Path {
    pages: Vec<(u64, Option<Key>)>,
    leaf: Arc<Page>,
}

impl Path {
    /// Where the next leaf begins.
    fn end(&self) -> Option<Key> {
        self.pages.last().and_then(|(_, end)| *end)
    }
}

/// The lower of two ends; none is beyond everything.
fn lower(a: Option<Key>, b: Option<Key>) -> Option<Key> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Tree {
    fn path(&self, key: Key) -> Result<Path, Fault> {
        let mut page = self.get(self.root.page, self.root.level)?;
        let mut pages = vec![(self.root.page, None)];
        let mut end = None;
        for level in (0..self.root.level).rev() {
            let i = page.child_of(key);
            if i + 1 < page.count() {
                end = Some(page.key(i + 1));
            }
            let child = page.child(i);
            page = self.get(child, level)?;
            pages.push((child, end));
        }
        Ok(Path { pages, leaf: page })
    }

    /// Items from `from` on that this state has otherwise than an earlier one (`None`: than one that has nothing), in order, until they are so many
    /// bytes or so many leaves were looked at; and where to go on, unless that was all.
    pub fn changes(
        &self,
        before: Option<&Self>,
        from: Key,
        (bytes, leaves): (usize, usize),
    ) -> Result<(Vec<Change>, Option<Key>), Fault> {
        let (mut found, mut size, mut at) = (Vec::new(), 0, from);
        for _ in 0..leaves.max(1) {
            let now = self.path(at)?;
            let then = before.map(|before| before.path(at)).transpose()?;
            let old = then.as_ref().map_or(&[][..], |then| &then.pages);
            // The highest page that both have holds the same in both.
            let shared = now.pages.iter().find_map(|(page, end)| {
                let same = old.iter().find(|(other, _)| other == page)?;
                Some(lower(*end, same.1))
            });
            let end = match shared {
                Some(end) => end,
                None => {
                    let end = lower(now.end(), then.as_ref().and_then(Path::end));
                    let then = then.as_ref().map(|then| &*then.leaf);
                    size += differ(&now.leaf, then, (at, end), &mut found);
                    end
                }
            };
            match end {
                None => return Ok((found, None)),
                Some(next) => at = next,
            }
            if size >= bytes {
                break;
            }
        }
        Ok((found, Some(at)))
    }
}

/// Compares two leaves between two keys; how many bytes what differs has.
fn differ(
    now: &Page,
    then: Option<&Page>,
    (from, end): (Key, Option<Key>),
    found: &mut Vec<Change>,
) -> usize {
    let range = |page: &Page| {
        let first = page.search(from).unwrap_or_else(|i| i);
        let last = end.map_or(page.count(), |end| page.search(end).unwrap_or_else(|i| i));
        (first, last.max(first))
    };
    let (mut size, (mut i, to)) = (0, range(now));
    let (mut j, until) = then.map_or((0, 0), range);
    while i < to || j < until {
        let a = (i < to).then(|| now.key(i));
        let b = then.filter(|_| j < until).map(|then| then.key(j));
        match (a, b) {
            (Some(a), Some(b)) if a == b => {
                let value = now.value(i);
                if then.is_some_and(|then| then.value(j) != value) {
                    found.push((a, Some(value.to_vec())));
                    size += 32 + value.len();
                }
                (i, j) = (i + 1, j + 1);
            }
            (Some(a), b) if b.is_none_or(|b| a < b) => {
                let value = now.value(i);
                found.push((a, Some(value.to_vec())));
                size += 32 + value.len();
                i += 1;
            }
            (_, Some(b)) => {
                found.push((b, None));
                size += 32;
                j += 1;
            }
            // (The arms before this one have all others.)
            (Some(_) | None, None) => break,
        }
    }
    size
}
