//! The tree by itself, against a BTreeMap: deep, with a cache far smaller than it, through many
//! transactions of which several are sealed at once.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Included};
use std::sync::Arc;

use base::random::Random;
use storage::format::page::{Key, VALUE_MAX};
use storage::media::{Media, Segment};
use storage::memory::MemoryRegion;
use storage::tree::{Fault, Root, SealedTree, Tree};

const PAGES: u64 = 6000;

fn key(random: &mut Random) -> Key {
    let ino = random.below(300);
    Key::new(ino * ino, (random.below(3) + 1) as u8, random.below(40))
}

fn publish(media: &MemoryRegion, tree: &mut Tree, sealed: SealedTree) -> Root {
    sealed.write(media).unwrap();
    let root = sealed.root;
    tree.publish(sealed);
    root
}

fn compare(tree: &Tree, model: &BTreeMap<Key, Vec<u8>>, random: &mut Random) {
    let mut items = model.iter();
    tree.scan(Key::MIN, Key::MAX, &mut |k, v| {
        assert_eq!(items.next(), Some((&k, &v.to_vec())));
        true
    })
    .unwrap();
    assert_eq!(items.next(), None);
    for _ in 0..200 {
        let (a, b) = (key(random), key(random));
        let last = tree.last(a, b, |k, _| k).unwrap();
        let want = if a <= b { model.range(a..=b).next_back().map(|(k, _)| *k) } else { None };
        assert_eq!(last, want);
        assert_eq!(tree.get_with(a, <[u8]>::to_vec).unwrap(), model.get(&a).cloned());
        let mut next = None;
        tree.scan(a.next().unwrap(), Key::MAX, &mut |k, _| {
            next = Some(k);
            false
        })
        .unwrap();
        let want = model.range((Excluded(a), Included(Key::MAX))).next().map(|(k, _)| *k);
        assert_eq!(next, want);
    }
}

#[test]
fn random_changes_match_a_map() {
    for seed in 0..4 {
        let mut random = Random::new(seed);
        let media = Arc::new(MemoryRegion::new());
        media.ensure(Segment::Tree, PAGES * 4096).unwrap();
        let mut tree = Tree::new(media.clone(), PAGES, 64).unwrap();
        let mut model = BTreeMap::new();
        let mut waiting: VecDeque<SealedTree> = VecDeque::new();
        for round in 0..60 {
            // Grows, then shrinks to nothing.
            let grows = round < 30;
            for _ in 0..600 {
                let at = key(&mut random);
                if random.chance(if grows { 3 } else { 1 }, 4) {
                    let max = if random.chance(1, 10) { VALUE_MAX as u64 + 1 } else { 90 };
                    let mut value = vec![0; random.below(max) as usize];
                    random.fill(&mut value);
                    tree.put(at, &value).unwrap();
                    model.insert(at, value);
                } else {
                    // Something that is there, mostly.
                    let at = model.range(at..).next().map_or(at, |(k, _)| *k);
                    assert_eq!(tree.remove(at), Ok(model.remove(&at).is_some()));
                }
            }
            waiting.push_back(tree.seal());
            while waiting.len() > random.below(3) as usize {
                let sealed = waiting.pop_front().unwrap();
                publish(&media, &mut tree, sealed);
            }
            if random.chance(1, 4) {
                let mut root = None;
                while let Some(sealed) = waiting.pop_front() {
                    root = Some(publish(&media, &mut tree, sealed));
                }
                if let Some(root) = root {
                    let (published, used) = (tree.published(), tree.pages());
                    let mut count = 0;
                    let seen = &mut |_: Key, _: &[u8]| {
                        count += 1;
                        Ok(())
                    };
                    tree = Tree::open(media.clone(), PAGES, 64, root, published, seen).unwrap();
                    assert_eq!((count, tree.pages()), (model.len(), used), "no page is lost");
                    assert_eq!(tree.free_pages() + used, PAGES);
                }
            }
            compare(&tree, &model, &mut random);
        }
        while let Some((&at, _)) = model.iter().next() {
            assert_eq!(tree.remove(at), Ok(true));
            model.remove(&at);
        }
        assert_eq!(tree.pages(), 1);
        while let Some(sealed) = waiting.pop_front() {
            publish(&media, &mut tree, sealed);
        }
        let sealed = tree.seal();
        publish(&media, &mut tree, sealed);
        assert_eq!((tree.free_pages(), tree.pending_pages()), (PAGES - 1, 0));
        assert!(tree.cached_pages() < 200, "{}", tree.cached_pages());
    }
}

#[test]
fn a_full_tree_says_so() {
    let media = Arc::new(MemoryRegion::new());
    media.ensure(Segment::Tree, 40 * 4096).unwrap();
    let mut tree = Tree::new(media, 40, 64).unwrap();
    let full = (0..1000).find_map(|i| tree.put(Key::new(1, 1, i), &[0; 900]).err());
    assert_eq!(full, Some(Fault::Full));
}
