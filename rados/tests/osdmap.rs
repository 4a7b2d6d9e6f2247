//! Where placement groups lie, against Ceph: by maps of a real cluster with what its own tool says of them, and, where that is installed, by random
//! and by large maps, with what it says of those. And maps that lie.

mod forge;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use base::random::Random;
use forge::{Base, resealed};
use rados::osdmap::{Kind, Mapper, NONE, OsdMap, Pg};

/// Maps of a real cluster of three OSDs (Ceph 16.2.15), with four kinds of pools, an OSD that takes 0.6 of its weight, one that would rather not be
/// first, OSDs that stand in while data moves; in the second one, one that is down, and groups that were moved by hand.
const REAL: [&str; 2] = ["backfilling", "down"];

fn real(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/osdmap").join(name)).unwrap()
}

fn seed() -> u64 {
    let fixed = std::env::var("CORBEL_SEED").ok().and_then(|seed| seed.parse().ok());
    fixed.unwrap_or_else(|| u64::from(std::process::id()) << 20)
}

/// A list as Ceph's tool prints it, with its first.
fn shown(list: &[i32], first: Option<i32>) -> String {
    let osds: Vec<String> = list.iter().map(i32::to_string).collect();
    format!("([{}], p{})", osds.join(","), first.unwrap_or(-1))
}

/// All groups of all pools, as `osdmaptool --test-map-pgs-dump-all` prints them, without what it calls raw.
fn mapped(map: &OsdMap) -> Vec<String> {
    let mut mapper = Mapper::new(map).unwrap();
    let mut lines = Vec::new();
    for (pool, description) in &map.pools {
        let seeds: Vec<u32> = (0..description.pg_num).collect();
        let mapped = mapper.map(*pool, &seeds).unwrap();
        for (i, seed) in seeds.iter().enumerate() {
            let up = shown(mapped.up.get(i), mapped.up_primary[i]);
            let acting = shown(mapped.acting.get(i), mapped.acting_primary[i]);
            lines.push(format!("{} up {up} acting {acting}", Pg { pool: *pool, seed: *seed }));
        }
    }
    lines
}

/// Compares, and says of what is different the first few.
fn assert_same(what: &str, ours: &[String], theirs: &[String]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let different: Vec<_> =
        ours.iter().zip(theirs).filter(|(ours, theirs)| ours != theirs).collect();
    for (ours, theirs) in different.iter().take(5) {
        eprintln!("{what}: {ours}\n  Ceph: {theirs}");
    }
    assert!(different.is_empty(), "{what}: {} of {} groups differ", different.len(), ours.len());
}

#[test]
fn groups_of_a_real_cluster_lie_where_ceph_says() {
    for name in REAL {
        let map = OsdMap::decode(&real(&format!("{name}.map"))).unwrap();
        let told = String::from_utf8(real(&format!("{name}.mapped"))).unwrap();
        let told: Vec<String> = told.lines().map(str::to_owned).collect();
        assert!(told.len() > 80);
        assert_same(name, &mapped(&map), &told);
    }
}

/// Every shard is counted, and every placement group has one primary, also where an OSD has several shards of it.
#[test]
fn what_lies_on_osds_adds_up() {
    for name in REAL {
        let map = OsdMap::decode(&real(&format!("{name}.map"))).unwrap();
        let mut mapper = Mapper::new(&map).unwrap();
        for (number, pool) in &map.pools {
            let seeds: Vec<u32> = (0..pool.pg_num).collect();
            let mapped = mapper.map(*number, &seeds).unwrap();
            let lists = || (0..seeds.len()).map(|i| mapped.acting.get(i));
            let copies = lists().flatten().filter(|osd| **osd != NONE).count() as u64;
            let served = lists().filter(|list| list.iter().any(|osd| *osd != NONE)).count() as u64;
            let spread = mapper.spread(*number, |_| 3).unwrap();
            assert_eq!(spread.osds.values().map(|share| share.copies).sum::<u64>(), 3 * copies);
            let primaries = spread.osds.values().map(|share| share.first).sum::<u64>();
            assert!(primaries <= 3 * served, "{name} pool {number}: {primaries} of {served}");
        }
    }
}

#[test]
fn a_real_map_is_read_whole() {
    let map = OsdMap::decode(&real("down.map")).unwrap();
    let (id, three) = map.pool("three").unwrap();
    assert_eq!((three.kind, three.size, three.min_size), (Kind::Replicated, 3, 1));
    assert_eq!((three.pg_num, three.pgp_num), (24, 24));
    assert_eq!(map.pool("ecpool").unwrap().1.kind, Kind::Erasure);
    assert_eq!((map.release, map.osds.len()), (16, 3));
    assert!(!map.osds[0].is_up() && map.osds[0].exists() && map.osds[1].is_up());
    assert_eq!(map.osds[2].weight, 39321);
    assert!(map.osds[1].primary_affinity < map.osds[0].primary_affinity);
    let (two, _) = map.pool("two").unwrap();
    assert_eq!(map.pg_upmap_items[&Pg { pool: two, seed: 0 }], [(1, 2)]);
    assert_eq!(map.pg_upmap[&Pg { pool: two, seed: 1 }], [0, 1]);
    assert_eq!(map.primary_temp[&Pg { pool: two, seed: 3 }], 2);
    assert!(map.pg_temp.keys().any(|group| group.pool == id));
    assert!(map.crush.class_names.values().any(|name| name == "c1"));
    // As `ceph osd map rbd foo.bar`, and the same in the namespace ns1, said.
    let (rbd, pool) = map.pool("rbd").unwrap();
    assert_eq!(pool.pg_of(rbd, b"", b"foo.bar").unwrap(), Pg { pool: rbd, seed: 0 });
    assert_eq!(pool.pg_of(rbd, b"ns1", b"foo.bar").unwrap(), Pg { pool: rbd, seed: 2 });
}

#[test]
fn what_is_not_known_is_named() {
    let map = OsdMap::decode(&real("down.map")).unwrap();
    let mut mapper = Mapper::new(&map).unwrap();
    assert!(mapper.map(99, &[0]).unwrap_err().contains("no pool 99"));
    assert!(mapper.map(7, &[24]).unwrap_err().contains("no placement group 7.18"));
    let mut other = map.clone();
    other.pools.get_mut(&6).unwrap().flags |= 1 << 19;
    other.pools.get_mut(&5).unwrap().object_hash = 1;
    let error = Mapper::new(&other).unwrap().map(6, &[0]).unwrap_err();
    assert!(error.contains("ecpool") && error.contains("allow_ec_optimizations"), "{error}");
    let error = other.pools[&5].pg_of(5, b"", b"x").unwrap_err();
    assert!(error.contains("method 1"), "{error}");
    // A bucket that contains itself.
    let mut other = map.clone();
    let bucket = other.crush.buckets[0].as_mut().unwrap();
    bucket.items[0] = bucket.id;
    let error = Mapper::new(&other).unwrap_err();
    assert!(error.contains("contain themselves"), "{error}");
    // The parts by their versions: what a later Ceph may append is not passed over where it may say where groups lie.
    let bytes = real("down.map");
    for (at, version, expected) in
        [(0, 7, "older"), (1, 9, "later"), (6, 11, "6..=10"), (6, 5, "6..=10")]
    {
        let mut changed = bytes.clone();
        changed[at] = version;
        let error = OsdMap::decode(&resealed(changed)).unwrap_err();
        assert!(error.contains(expected), "{at}: {error}");
    }
    let mut changed = bytes.clone();
    changed[100] ^= 1;
    assert!(OsdMap::decode(&changed).unwrap_err().contains("checksum"));
    let mut longer = bytes;
    longer.push(0);
    assert!(OsdMap::decode(&longer).unwrap_err().contains("behind"));
}

/// Reads what is damaged, and maps what of it can be read: whatever comes out, it comes out soon.
fn exercise(bytes: &[u8]) -> bool {
    let Ok(map) = OsdMap::decode(bytes) else { return false };
    let Ok(mut mapper) = Mapper::new(&map) else { return true };
    for (number, pool) in &map.pools {
        let seeds: Vec<u32> = (0..pool.pg_num.min(4)).collect();
        if let Ok(mapped) = mapper.map(*number, &seeds) {
            assert_eq!(mapped.len(), seeds.len());
        }
        let _ = pool.pg_of(*number, b"ns", b"name");
    }
    true
}

#[test]
fn every_cut_is_refused() {
    for name in REAL {
        let bytes = real(&format!("{name}.map"));
        for len in 0..bytes.len() {
            assert!(OsdMap::decode(&bytes[..len]).is_err(), "{name} cut to {len}");
            assert!(
                OsdMap::decode(&resealed(bytes[..len].to_vec())).is_err(),
                "{name} cut to {len}, resealed"
            );
        }
    }
}

/// Bits, bytes and words that were changed by somebody who has made the checksum right.
#[test]
fn damage_ends_in_an_error_or_in_a_mapping() {
    let first = seed();
    let begun = Instant::now();
    let mut read = 0;
    for run in first..first + 600 {
        let mut random = Random::new(run);
        let mut bytes = real(&format!("{}.map", REAL[random.below(2) as usize]));
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len() as u64 - 4) as usize;
            let value = match random.below(6) {
                0 => u32::MAX,
                1 => 0x7fff_ffff,
                2 => 0x8000_0000,
                3 => random.below(40) as u32,
                4 => {
                    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
                        ^ (1 << random.below(32))
                }
                _ => random.next_u64() as u32,
            };
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        // Seen only if it panics.
        println!("CORBEL_SEED={run}");
        read += u32::from(exercise(&resealed(bytes)));
    }
    assert!(read > 40, "{read} of them could be read");
    assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
}

/// A directory that goes away.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("corbel-osdmap-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn tool(name: &str, args: &[&str]) -> String {
    let out = Command::new(name).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{name} {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

fn is_installed() -> bool {
    let there = ["osdmaptool", "crushtool"]
        .iter()
        .all(|tool| Command::new(tool).arg("--help").output().is_ok());
    if !there {
        eprintln!(
            "osdmaptool and crushtool are not installed (Debian: ceph-base): only the maps in the repository were compared"
        );
    }
    there
}

/// What Ceph's tool says of a map, in the form of [`mapped`].
fn told(file: &str) -> Vec<String> {
    let text = tool("osdmaptool", &[file, "--test-map-pgs-dump-all"]);
    let lines = text.lines().filter_map(|line| {
        let (group, rest) = line.split_once(" raw (")?;
        Some(format!("{group} up {}", rest.split_once(" up ")?.1))
    });
    lines.collect()
}

/// Random maps: all kinds of buckets, pools of both kinds and any number of groups, classes, odd weights and tunables, stand-in weights of CRUSH, OSDs
/// that are gone, down, out or half out, that would rather not be first; groups moved by hand, and served by others.
#[test]
fn random_maps_are_mapped_as_by_osdmaptool() {
    if !is_installed() {
        return;
    }
    let dir = Scratch::new("random");
    let file = dir.file("map");
    let runs = std::env::var("CORBEL_OSDMAP_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    let first = seed();
    let mut groups = 0;
    for run in first..first + runs {
        println!("CORBEL_SEED={run}");
        let mut random = Random::new(run);
        let bytes = forge::random(&dir.0, &mut random);
        std::fs::write(&file, &bytes).unwrap();
        let map = OsdMap::decode(&bytes).unwrap();
        let ours = mapped(&map);
        groups += ours.len();
        assert_same(&format!("CORBEL_SEED={run}"), &ours, &told(&file));
    }
    println!("{groups} groups of {runs} maps");
}

/// Large maps, as Ceph's own tools make them.
#[test]
fn large_maps_are_mapped_as_by_osdmaptool() {
    if !is_installed() {
        return;
    }
    let dir = Scratch::new("large");
    let (file, crush) = (dir.file("map"), dir.file("crush"));
    for (osds, levels) in [
        (400, &["host", "straw2", "8", "rack", "straw2", "10", "root", "straw2", "0"][..]),
        (1000, &["root", "straw2", "0"][..]),
    ] {
        let count = osds.to_string();
        tool(
            "crushtool",
            &[&["--outfn", &crush, "--build", "--num_osds", &count], levels].concat(),
        );
        let base = Base::new(&dir.0, osds);
        let built = placement::crush::Map::decode(&std::fs::read(&crush).unwrap()).unwrap();
        let bytes = base.with_all_up(&built, 16_384);
        std::fs::write(&file, &bytes).unwrap();
        let map = OsdMap::decode(&bytes).unwrap();
        let ours = mapped(&map);
        assert_eq!(ours.len(), 16_384);
        assert!(!ours[0].contains(&NONE.to_string()));
        assert_same(&format!("{osds} OSDs"), &ours, &told(&file));
    }
}

/// Whoever made the map decides how much it takes to answer: no more than this machine has.
#[test]
fn what_is_mapped_at_once_is_bounded() {
    let mut map = OsdMap::decode(&real("down.map")).unwrap();
    let (number, rule) = {
        let (number, pool) = map.pools.iter_mut().next().unwrap();
        pool.size = 255;
        (*number, pool.crush_rule)
    };
    let all = vec![0; 300_000];
    assert!(Mapper::new(&map).unwrap().map(number, &all).unwrap_err().contains("too many"));
    assert!(Mapper::new(&map).unwrap().map(number, &all[..1000]).is_ok());
    // All of the pool comes in parts.
    assert!(Mapper::new(&map).unwrap().spread(number, |_| 1).is_ok());
    let steps = &mut map.crush.rules[usize::from(rule)].as_mut().unwrap().steps;
    let first = steps[0];
    steps.splice(0..0, std::iter::repeat_n(first, 300));
    assert!(Mapper::new(&map).unwrap().map(number, &[0]).unwrap_err().contains("steps"));
}
