//! What Ceph's headers say of hashes, by hand and by what its tools print of names.

use super::{stable_mod, str_hash};

#[test]
fn remainders_are_in_range_and_stable() {
    for n in 1..300u32 {
        for x in 0..2000 {
            let r = stable_mod(x, n);
            assert!(r < n, "{x} of {n}");
            // One more group takes from one group only, and only what is its own.
            let more = stable_mod(x, n + 1);
            assert!(more == r || more == n, "{x} of {n}: {r}, then {more}");
        }
    }
    assert_eq!((stable_mod(5, 0), stable_mod(u32::MAX, 1 << 31)), (0, u32::MAX >> 1));
    assert_eq!(stable_mod(u32::MAX, u32::MAX), u32::MAX >> 1);
}

/// By `osdmaptool --test-map-object NAME` of Ceph 16.2.15, which prints the whole hash: all lengths around the borders of words.
#[test]
fn names_are_hashed_as_by_ceph() {
    let known = include_str!("tests/names");
    let mut lens = std::collections::BTreeSet::new();
    for line in known.lines() {
        let (name, hash) = line.rsplit_once(' ').unwrap();
        assert_eq!(format!("{:x}", str_hash(name.as_bytes())), hash, "{name:?}");
        lens.insert(name.len());
    }
    assert!((1..30).all(|len| lens.contains(&len)), "{lens:?}");
}
