//! Maps made to break: each must end in an error or in a mapping, within bounds, and never panic.

use super::corpus::{self, Random};
use super::golden;
use placement::crush::{
    Algorithm, Bucket, Error, Map, Options, Placer, RULE_REPLICATED, Rule, Step, Tunables, Weights,
    Workspace, limits, make_bucket,
};
use std::time::{Duration, Instant};

/// Decodes, checks, writes and maps: whatever comes out, it comes out soon.
fn exercise(bytes: &[u8]) {
    let Ok(map) = Map::decode(bytes) else { return };
    // What was read can be written and read again.
    assert_eq!(Map::decode(&map.encode()).as_ref(), Ok(&map));
    if let Ok(text) = map.decompile() {
        let _ = Map::compile(&text);
    }
    let options = Options { engine: None, choose_args: Some(0), draws_max: Some(1 << 14) };
    let Ok(placer) = Placer::new(&map, &options) else { return };
    let reweights = vec![0x1_0000; placer.device_count().min(1 << 16)];
    let mut workspace = Workspace::new();
    for rule in 0..map.rules.len().min(5) as u32 {
        let _ = placer.place_many(rule, &[0, 1, u32::MAX], 3, &reweights, &mut workspace);
    }
}

#[test]
fn every_bit_flip_is_survived() {
    for name in ["mixed", "straw2"] {
        let bytes = golden(&format!("{name}.bin"));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            exercise(&damaged);
        }
    }
}

#[test]
fn every_truncation_is_refused_or_an_older_map() {
    for name in ["mixed", "uniform", "list", "tree", "straw"] {
        let bytes = golden(&format!("{name}.bin"));
        let whole = Map::decode(&bytes).expect("a map");
        for len in 0..bytes.len() {
            if let Ok(map) = Map::decode(&bytes[..len]) {
                // Releases appended fields: a map may end before tunables, classes, choose_args.
                assert_eq!(map.buckets, whole.buckets, "{name} cut to {len}");
                assert_eq!(map.item_names, whole.item_names, "{name} cut to {len}");
            }
        }
    }
}

#[test]
fn random_bytes_in_place_of_fields_are_survived() {
    let bytes = golden("mixed.bin");
    let mut random = Random(3);
    for _ in 0..5_000 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(damaged.len() - 4);
            let value = match random.below(4) {
                0 => u32::MAX,
                1 => 0x7fff_ffff,
                2 => 0x8000_0000,
                _ => random.next() as u32,
            };
            damaged[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        exercise(&damaged);
    }
}

#[test]
fn damaged_text_is_survived() {
    let text = String::from_utf8(golden("mixed.txt")).expect("text");
    let words: Vec<&str> = text.split_inclusive([' ', '\n']).collect();
    let odd = ["-1 ", "99999999999 ", "{ ", "} ", "[ ", "nan ", "1e9 ", "-5.0 ", "item ", "é ", ""];
    for at in 0..words.len() {
        for odd in odd {
            let mut changed = words.clone();
            changed[at] = odd;
            if let Ok(map) = Map::compile(&changed.concat()) {
                exercise(&map.encode());
            }
        }
        let _ = Map::compile(&words[..at].concat());
    }
}

fn one_rule(map: &mut Map, steps: Vec<Step>) {
    map.rules.push(Some(Rule {
        ruleset: 0,
        kind: RULE_REPLICATED,
        min_size: 1,
        max_size: 10,
        steps,
    }));
}

fn holding(id: i32, items: Vec<i32>) -> Bucket {
    let weights = vec![0x1_0000; items.len()];
    let bucket = make_bucket(Algorithm::Straw2, 1, items, weights, 1).expect("a bucket");
    Bucket { id, ..bucket }
}

fn refusal(map: &Map) -> Error {
    Placer::new(map, &Options::default()).expect_err("such a map is refused")
}

#[test]
fn cycles_are_refused() {
    let mut map = Map::new(Tunables::DEFAULT);
    for (id, below) in [(-1, -2), (-2, -3), (-3, -2)] {
        map.add_bucket(holding(id, vec![below, 0])).expect("a number");
    }
    assert!(refusal(&map).to_string().contains("contain themselves"));
    assert!(map.decompile().is_err());
    let mut own = Map::new(Tunables::DEFAULT);
    own.add_bucket(holding(-1, vec![-1])).expect("a number");
    assert!(refusal(&own).to_string().contains("contain themselves"));
}

#[test]
fn depth_bombs_are_refused() {
    let mut map = Map::new(Tunables::DEFAULT);
    for id in 1..=5_000 {
        map.add_bucket(holding(-id, vec![if id == 5_000 { 0 } else { -id - 1 }]))
            .expect("a number");
    }
    assert!(refusal(&map).to_string().contains("deeper than"));
    assert!(map.decompile().is_err());
    let mut text = "type 0 osd\ntype 1 host\ndevice 0 osd.0 class a\n".to_owned();
    text += "host b0 { alg straw2 item osd.0 }\n";
    for i in 1..5_000 {
        text += &format!("host b{i} {{ alg straw2 item b{} }}\n", i - 1);
    }
    text += "rule { id 0 type replicated step take b0 class a step emit }\n";
    assert!(Map::compile(&text).expect_err("too deep").to_string().contains("deeper than"));
}

#[test]
fn maps_that_make_no_sense_are_refused() {
    let sound = || {
        let mut map = Map::new(Tunables::DEFAULT);
        map.add_bucket(holding(-1, vec![0, 1, 2])).expect("a number");
        map
    };
    assert!(Placer::new(&sound(), &Options::default()).is_ok());
    type Breaking = fn(&mut Bucket);
    let broken: [(&str, Breaking); 6] = [
        ("does not exist", |b| b.items[1] = -9),
        ("is not below", |b| b.items[1] = i32::MAX),
        ("type 0", |b| b.kind = 0),
        ("hash", |b| b.hash = 2),
        ("number of weights", |b| b.weights = Weights::Straw2(vec![1])),
        ("number of weights", |b| b.weights = Weights::Tree(vec![1; 4])),
    ];
    for (words, breaking) in broken {
        let mut map = sound();
        breaking(map.bucket_mut(-1).expect("it is there"));
        assert!(refusal(&map).to_string().contains(words), "{words}");
    }
    let mut far = holding(i32::MIN, vec![0]);
    assert!(sound().add_bucket(far.clone()).is_err());
    far.id = -(limits::BUCKETS_MAX as i32) - 1;
    assert!(sound().add_bucket(far).is_err());
}

#[test]
fn counts_beyond_the_bytes_allocate_nothing() {
    // Magic, then counts of buckets, rules, devices.
    for counts in [[1 << 20, 0, 0], [0, 256, 0], [u32::MAX, 0, 0], [8, u32::MAX, u32::MAX]] {
        let mut bytes = 0x0001_0000u32.to_le_bytes().to_vec();
        counts.iter().for_each(|c: &u32| bytes.extend_from_slice(&c.to_le_bytes()));
        bytes.extend_from_slice(&[0; 12]);
        assert!(matches!(Map::decode(&bytes), Err(Error::Malformed { .. })), "{counts:?}");
    }
}

/// No device has weight or is in, and the tunables say to try for ever.
#[test]
fn endless_tries_end_in_an_error() {
    let mut map = corpus::thousand(Algorithm::Straw2, Tunables::DEFAULT);
    let root = map.roots()[0];
    map.tunables.choose_total_tries = u32::MAX - 1;
    map.tunables.chooseleaf_descend_once = 0;
    one_rule(&mut map, vec![Step::Take(root), Step::ChooseFirstn(i32::MAX, 0), Step::Emit]);
    one_rule(&mut map, vec![Step::Take(root), Step::ChooseLeafIndep(i32::MAX, 1), Step::Emit]);
    let placer = Placer::new(&map, &Options::default()).expect("a sound map");
    let out_of_all = vec![0; 1000];
    let start = Instant::now();
    for rule in 0..3 {
        let mut found = [0; 3];
        let result = placer.place(rule, 1, &out_of_all, &mut found, &mut Workspace::new());
        assert_eq!(result, Err(Error::Budget { x: 1 }), "rule {rule}");
    }
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn weightless_and_empty_buckets_give_fewer_replicas() {
    for algorithm in Algorithm::ALL {
        let mut map = Map::new(Tunables::DEFAULT);
        let items = vec![0, 1, 2];
        let bucket = make_bucket(algorithm, 1, items, vec![0; 3], 1).expect("a bucket");
        map.add_bucket(bucket).expect("a number");
        let empty = make_bucket(algorithm, 1, Vec::new(), Vec::new(), 1).expect("a bucket");
        map.add_bucket(empty).expect("a number");
        for root in [-1, -2] {
            let take = Step::Take(root);
            one_rule(&mut map, vec![take, Step::ChooseFirstn(0, 0), Step::Emit]);
            one_rule(&mut map, vec![take, Step::ChooseIndep(0, 0), Step::Emit]);
        }
        let placer = Placer::new(&map, &Options::default()).expect("a sound map");
        for rule in 0..4 {
            let batch = placer
                .place_many(rule, &[1, 2, 3], 3, &[0x1_0000; 3], &mut Workspace::new())
                .expect("it ends");
            assert!(batch.lens.iter().all(|n| *n <= 3));
        }
    }
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let map = corpus::thousand(Algorithm::Straw2, Tunables::DEFAULT);
    let placer = Placer::new(&map, &Options::default()).expect("a sound map");
    let mut workspace = Workspace::new();
    assert!(placer.place(9, 0, &[], &mut [0; 3], &mut workspace).is_err());
    assert!(placer.place(0, 0, &[], &mut [0; 2000], &mut workspace).is_err());
    // No list of reweights: every device is out.
    assert_eq!(placer.place(0, 0, &[], &mut [0; 3], &mut workspace), Ok(0));
    assert_eq!(placer.place(0, 0, &[0x1_0000; 1000], &mut [], &mut workspace), Ok(0));
}
