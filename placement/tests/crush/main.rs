//! CRUSH against Ceph: by vectors that its tools made, by the tools themselves where they are
//! installed, and against hostile maps. The long form is `--example crush_compare`.

mod ceph;
mod corpus;
mod hostile;

use ceph::{Scratch, Tally};
use corpus::Random;
use placement::crush::{
    Algorithm, Engine, Inputs, Map, Options, Placer, Tunables, Weights, Workspace, limits,
    movement, usage,
};
use std::path::PathBuf;

fn golden(name: &str) -> Vec<u8> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/crush/golden");
    std::fs::read(dir.join(name)).expect("the vectors are in the repository")
}

fn golden_text(name: &str) -> String {
    String::from_utf8(golden(name)).expect("text")
}

const GOLDEN: [&str; 6] = ["mixed", "uniform", "list", "tree", "straw", "straw2"];

/// Node 0 of a tree bucket is not used; libcrush leaves there what the memory held.
fn without_node_0(mut map: Map) -> Map {
    for bucket in map.buckets.iter_mut().flatten() {
        if let Weights::Tree(nodes) = &mut bucket.weights
            && let Some(node) = nodes.first_mut()
        {
            *node = 0;
        }
    }
    map
}

#[test]
fn maps_that_crushtool_wrote_come_back_byte_for_byte() {
    for name in GOLDEN {
        let bytes = golden(&format!("{name}.bin"));
        assert_eq!(Map::decode(&bytes).expect(name).encode(), bytes, "{name}");
    }
}

#[test]
fn text_compiles_and_decompiles_as_by_crushtool() {
    let theirs = Map::decode(&golden("mixed.bin")).expect("a map");
    let ours = Map::compile(&golden_text("mixed.txt")).expect("a text");
    assert_eq!(without_node_0(ours), without_node_0(theirs.clone()));
    assert_eq!(theirs.decompile().expect("names are fine"), golden_text("mixed.decompiled.txt"));
}

#[test]
fn mappings_are_those_of_crushtool() {
    let mut compared = 0;
    for name in GOLDEN {
        let map = Map::decode(&golden(&format!("{name}.bin"))).expect(name);
        let mut reweights = vec![0x1_0000; map.device_count()];
        (reweights[4], reweights[11]) = (0, 26_214);
        for engine in Engine::ALL.into_iter().filter(|e| e.is_available()) {
            let options =
                Options { engine: Some(engine), choose_args: Some(0), ..Options::default() };
            let placer = Placer::new(&map, &options).expect(name);
            let mut workspace = Workspace::new();
            for line in golden_text(&format!("{name}.mappings")).lines() {
                let Some([rule, n, x, items]) = fields(line) else { continue };
                let mut out = vec![0; n.parse().expect("a number")];
                let (rule, x) = (rule.parse().expect("a number"), x.parse().expect("a number"));
                let found =
                    placer.place(rule, x, &reweights, &mut out, &mut workspace).expect("it runs");
                let list: Vec<String> = out[..found].iter().map(i32::to_string).collect();
                assert_eq!(format!("[{}]", list.join(",")), items, "{name}: {line}");
                compared += 1;
            }
        }
    }
    assert!(compared >= 1080, "{compared}");
}

fn fields(line: &str) -> Option<[&str; 4]> {
    line.split(' ').collect::<Vec<_>>().try_into().ok().filter(|_| !line.starts_with('#'))
}

/// Every engine, one by one and many at once, on random maps.
#[test]
fn engines_agree() {
    for n in 0..30 {
        let case = corpus::case(n);
        let placers: Vec<Placer> = Engine::ALL
            .into_iter()
            .filter(|e| e.is_available())
            .map(|e| Options { engine: Some(e), choose_args: Some(7), ..Options::default() })
            .map(|options| Placer::new(&case.map, &options).expect("a sound map"))
            .collect();
        let mut random = Random(n as u64);
        let xs: Vec<u32> = (0..100).map(|_| random.next() as u32).collect();
        let mut workspace = Workspace::new();
        for rule in 0..case.map.rules.len() as u32 {
            for width in [1, 3, 7] {
                let mut expected = Vec::new();
                let mut out = vec![0; width];
                for x in &xs {
                    let found = placers[0]
                        .place(rule, *x, &case.reweights, &mut out, &mut workspace)
                        .expect("it runs");
                    expected.push(out[..found].to_vec());
                }
                for placer in &placers {
                    let batch = placer
                        .place_many(rule, &xs, width, &case.reweights, &mut workspace)
                        .expect("it runs");
                    for (i, expected) in expected.iter().enumerate() {
                        let engine = placer.engine().name();
                        assert_eq!(batch.get(i), expected, "{} rule {rule} {engine}", case.name);
                    }
                }
                let one = placers.last().expect("portable is there");
                for (x, expected) in xs.iter().zip(&expected) {
                    let found = one
                        .place(rule, *x, &case.reweights, &mut out, &mut workspace)
                        .expect("it runs");
                    assert_eq!(&out[..found], expected, "{} rule {rule} x {x}", case.name);
                }
            }
        }
    }
}

/// Vectors with partly filled ends: every size around the widths of the engines, weights of every
/// magnitude, equal ones among them so that draws tie.
#[test]
fn engines_agree_on_every_size_and_weight() {
    use placement::crush::{RULE_REPLICATED, Rule, Step, make_bucket};
    for size in 1..70usize {
        let mut random = Random(size as u64);
        let weights: Vec<u32> = (0..size)
            .map(|_| match random.below(5) {
                0 => 0,
                1 => 1,
                2 => 0x1_0000,
                3 => (random.next() >> 39) as u32,
                _ => 1 << random.below(25),
            })
            .collect();
        let mut map = Map::new(Tunables::DEFAULT);
        let items = (0..size as i32).collect();
        let bucket = make_bucket(Algorithm::Straw2, 1, items, weights, 1).expect("a bucket");
        let root = map.add_bucket(bucket).expect("a number");
        let steps = vec![Step::Take(root), Step::ChooseFirstn(0, 0), Step::Emit];
        let kind = RULE_REPLICATED;
        map.rules.push(Some(Rule { ruleset: 0, kind, min_size: 1, max_size: 9, steps }));
        let reweights = vec![0x1_0000; size];
        let xs: Vec<u32> = (0..2000).collect();
        let batches: Vec<_> = Engine::ALL
            .into_iter()
            .filter(|e| e.is_available())
            .map(|e| {
                let options = Options { engine: Some(e), choose_args: None, ..Options::default() };
                let placer = Placer::new(&map, &options).expect("a sound map");
                placer.place_many(0, &xs, 2, &reweights, &mut Workspace::new()).expect("it runs")
            })
            .collect();
        assert!(batches.windows(2).all(|pair| pair[0] == pair[1]), "{size} items");
    }
}

#[test]
fn random_maps_survive_both_forms() {
    for n in 0..80 {
        let map = corpus::case(n).map;
        assert_eq!(Map::decode(&map.encode()).as_ref(), Ok(&map));
        // Text rounds weights to three decimals: from then on it is stable.
        let once = Map::compile(&map.decompile().expect("names are fine"));
        let Ok(once) = once else {
            let heavy = map.buckets.iter().flatten().any(|b| {
                let weights = b.item_weights().into_iter().zip(&b.items);
                weights.into_iter().any(|(w, i)| *i >= 0 && w > limits::DEVICE_WEIGHT_MAX)
            });
            assert!(heavy, "{once:?}");
            continue;
        };
        let text = once.decompile().expect("names are fine");
        assert_eq!(Map::compile(&text).and_then(|m| m.decompile()), Ok(text));
    }
}

/// The quick form of the comparison, where Ceph's tools are.
#[test]
fn crushtool_agrees() {
    if !ceph::is_there("crushtool") {
        eprintln!("crushtool is not installed: only the vectors were compared");
        return;
    }
    let dir = Scratch::new("quick");
    let mut tally = Tally::default();
    for n in 0..18 {
        tally.add(ceph::compare(&corpus::case(n), &Options::default(), 100, &dir.0));
    }
    assert!(tally.mappings > 8_000, "{tally:?}");
    assert_eq!(tally.different, 0);
    let mut groups = Tally::default();
    for n in 0..6 {
        groups.add(ceph::compare_osdmap(&corpus::case(n), &Options::default(), 3, &dir.0));
    }
    assert!(groups.mappings > 1000, "{groups:?}");
    assert_eq!(groups.different, 0);
}

/// crushtool compiles our text to the map that we make of it, and writes our map as we do.
#[test]
fn crushtool_reads_and_writes_the_same() {
    if !ceph::is_there("crushtool") {
        eprintln!("crushtool is not installed: only the vectors were compared");
        return;
    }
    let dir = Scratch::new("forms");
    let path = |name: &str| dir.path(name).to_str().expect("text").to_owned();
    let (bin, txt, back) = (path("bin"), path("txt"), path("back"));
    for n in 0..24 {
        let map = corpus::case(n).map;
        std::fs::write(&bin, map.encode()).expect("written");
        let text = ceph::output("crushtool", &["-d", &bin]);
        assert_eq!(map.decompile().expect("names are fine"), text, "case {n}");
        std::fs::write(&txt, &text).expect("written");
        let ours = Map::compile(&text);
        let theirs =
            std::process::Command::new("crushtool").args(["-c", &txt, "-o", &back]).output();
        let theirs = theirs.expect("it runs");
        if !theirs.status.success() {
            let why = String::from_utf8_lossy(&theirs.stderr);
            let why: Vec<&str> = why.lines().take(3).collect();
            assert!(ours.is_err(), "case {n}: crushtool refuses what is accepted here: {why:?}");
            continue;
        }
        let theirs = Map::decode(&std::fs::read(&back).expect("read")).expect("a map");
        assert_eq!(without_node_0(ours.expect("a text")), without_node_0(theirs), "case {n}");
    }
}

#[test]
fn usage_and_movement_add_up() {
    let map = corpus::thousand(Algorithm::Straw2, Tunables::DEFAULT);
    let placer = Placer::new(&map, &Options::default()).expect("a sound map");
    let full = vec![0x1_0000; 1000];
    let weights = vec![0x1_0000; 1000];
    let inputs =
        Inputs { rule: 0, replicas: 3, first: 0, last: 9_999, pool: None, reweights: &full };
    let mut shown = 0u64;
    let used = usage(&placer, &inputs, &weights, |_, _| shown += 1).expect("it runs");
    assert_eq!((used.inputs, shown, used.placements, used.bad_count), (10_000, 10_000, 30_000, 0));
    assert_eq!(used.devices.iter().map(|d| d.placements).sum::<u64>(), 30_000);
    assert!((used.devices[0].expected - 30.0).abs() < 1e-9);
    // 30 placements a device: the deviation of counts is near 1 / sqrt(30).
    assert!((0.15..0.22).contains(&used.deviation), "{}", used.deviation);

    let mut out = full.clone();
    out[17] = 0;
    let moved = movement((&placer, &full), (&placer, &out), &inputs).expect("it runs");
    let lost = used.devices.iter().find(|d| d.device == 17).expect("it was used").placements;
    let from_17 = moved.by_device.iter().find(|(d, ..)| *d == 17).expect("it moved");
    assert_eq!((from_17.1, from_17.2), (lost, 0));
    // What one of 1,000 devices held moves, and little more.
    assert!(moved.moved >= lost && moved.moved < 2 * lost, "{moved:?}");
    let same = movement((&placer, &full), (&placer, &full), &inputs).expect("it runs");
    assert_eq!((same.moved, same.changed_inputs, same.placements), (0, 0, 30_000));
}
