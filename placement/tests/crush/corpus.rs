//! Maps to compare by: all bucket kinds, tree shapes, weights, tunables and rules, from one seed.

#![allow(dead_code)]

use placement::crush::{
    Algorithm, CHOOSE_ARGS_DEFAULT, ChooseArg, Map, RULE_ERASURE, RULE_REPLICATED, Rule, Step,
    Tunables, make_bucket,
};

/// Numbers from a seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A map, what its devices are reweighted to, and how its rules are to be asked.
#[derive(Debug)]
pub struct Case {
    pub name: String,
    pub map: Map,
    pub reweights: Vec<u32>,
    pub replicas: Vec<usize>,
}

/// How the weights of devices are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightStyle {
    Equal,
    Fractional,
    /// Some 0, the others of any size.
    Wild,
}

/// Shape of a tree.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Number of children at each level, the root's first; the last are devices.
    pub fanout: Vec<usize>,
    /// Algorithm of the buckets at each level; none: any.
    pub algorithms: Vec<Option<Algorithm>>,
    pub weights: WeightStyle,
    /// Whether sizes vary around the fan-out.
    pub ragged: bool,
}

const TYPES: [&str; 5] = ["osd", "host", "rack", "room", "root"];

/// Builds a tree into `map`; returns the root's number.
pub fn build_tree(map: &mut Map, shape: &Shape, random: &mut Random) -> i32 {
    let depth = shape.fanout.len();
    let mut device = 0;
    let (root, _) = build(map, shape, random, 0, depth, &mut device);
    root
}

fn build(
    map: &mut Map,
    shape: &Shape,
    random: &mut Random,
    level: usize,
    depth: usize,
    device: &mut i32,
) -> (i32, u32) {
    let mut size = shape.fanout[level];
    if shape.ragged && size > 2 {
        size = size / 2 + random.below(size) + 1;
    }
    let algorithm = shape.algorithms[level % shape.algorithms.len()]
        .unwrap_or_else(|| Algorithm::ALL[random.below(5)]);
    let (mut items, mut weights) = (Vec::new(), Vec::new());
    for _ in 0..size {
        let (item, weight) = if level + 1 == depth {
            *device += 1;
            map.item_names.insert(*device - 1, format!("osd.{}", *device - 1));
            (*device - 1, device_weight(shape.weights, random))
        } else {
            build(map, shape, random, level + 1, depth, device)
        };
        items.push(item);
        weights.push(weight);
    }
    let uniform = algorithm == Algorithm::Uniform;
    // A tree bucket without any weight reads past its items in libcrush.
    if uniform || algorithm == Algorithm::Tree && weights.iter().all(|w| *w == 0) {
        let one = weights[0].max(0x8000);
        weights.fill(one);
    }
    let kind = (depth - level).min(4) as u16;
    let version = map.tunables.straw_calc_version;
    let bucket = make_bucket(algorithm, kind, items, weights, version).expect("weights are small");
    let weight = bucket.weight;
    let id = map.add_bucket(bucket).expect("numbers are free");
    map.item_names.insert(id, format!("{}{}", TYPES[kind as usize], -id));
    (id, weight)
}

fn device_weight(style: WeightStyle, random: &mut Random) -> u32 {
    match style {
        WeightStyle::Equal => 0x1_0000,
        WeightStyle::Fractional => 0x4000 + random.below(0x4_0000) as u32,
        WeightStyle::Wild => match random.below(6) {
            0 => 0,
            1 => 1 + random.below(64) as u32,
            2 => 0x10_0000 + random.below(0x100_0000) as u32,
            _ => 0x1000 + random.below(0x8_0000) as u32,
        },
    }
}

/// All rules worth asking of a tree with `levels` levels under `root`.
pub fn add_rules(map: &mut Map, root: i32, levels: usize) {
    let top = levels.min(4) as i32;
    let domain = 1.min(top - 1);
    let mut rules = vec![
        (RULE_REPLICATED, vec![Step::Take(root), Step::ChooseFirstn(0, 0), Step::Emit]),
        (
            RULE_ERASURE,
            vec![
                Step::SetChooseLeafTries(5),
                Step::SetChooseTries(100),
                Step::Take(root),
                Step::ChooseIndep(0, 0),
                Step::Emit,
            ],
        ),
    ];
    for kind in domain..top {
        rules.push((
            RULE_REPLICATED,
            vec![Step::Take(root), Step::ChooseLeafFirstn(0, kind), Step::Emit],
        ));
        rules.push((
            RULE_ERASURE,
            vec![Step::Take(root), Step::ChooseLeafIndep(0, kind), Step::Emit],
        ));
    }
    if top >= 3 {
        rules.push((
            RULE_REPLICATED,
            vec![
                Step::Take(root),
                Step::ChooseFirstn(2, top - 1),
                Step::ChooseLeafFirstn(2, 1),
                Step::Emit,
            ],
        ));
        rules.push((
            RULE_ERASURE,
            vec![
                Step::SetChooseLeafTries(3),
                Step::Take(root),
                Step::ChooseIndep(3, top - 1),
                Step::ChooseIndep(2, 1),
                Step::ChooseIndep(1, 0),
                Step::Emit,
            ],
        ));
        rules.push((
            RULE_REPLICATED,
            vec![
                Step::SetChooseLocalTries(3),
                Step::SetChooseLocalFallbackTries(2),
                Step::SetChooseLeafVaryR(2),
                Step::SetChooseLeafStable(0),
                Step::Take(root),
                Step::ChooseLeafFirstn(-1, 1),
                Step::Emit,
                Step::Take(root),
                Step::ChooseLeafFirstn(1, 1),
                Step::Emit,
            ],
        ));
    }
    for (kind, steps) in rules {
        let number = map.rules.len();
        map.rule_names.insert(number as i32, format!("rule-{number}"));
        let rule = Rule { ruleset: number as u8, kind, min_size: 1, max_size: 20, steps };
        map.rules.push(Some(rule));
    }
}

/// Stand-in weights for some straw2 buckets, in one position or several, some with other numbers.
pub fn add_choose_args(map: &mut Map, random: &mut Random) {
    let mut args = std::collections::BTreeMap::new();
    let positions = 1 + random.below(3);
    for (index, bucket) in map.buckets.iter().enumerate() {
        let Some(bucket) = bucket else { continue };
        if bucket.algorithm() != Algorithm::Straw2 || random.one_in(3) {
            continue;
        }
        let size = bucket.items.len();
        let weights =
            |random: &mut Random| (0..size).map(|_| random.below(0x4_0000) as u32).collect();
        let mut arg = ChooseArg::default();
        if !random.one_in(4) {
            arg.weight_sets = (0..positions).map(|_| weights(random)).collect();
        }
        if random.one_in(3) {
            arg.ids = bucket.items.iter().map(|i| i.wrapping_sub(1000)).collect();
        }
        if arg != ChooseArg::default() {
            args.insert(index as u32, arg);
        }
    }
    map.choose_args.insert(CHOOSE_ARGS_DEFAULT, args);
}

/// Reweights: mostly in, some out, some half.
pub fn reweights(map: &Map, random: &mut Random) -> Vec<u32> {
    let style = random.below(3);
    (0..map.device_count())
        .map(|_| match (style, random.below(10)) {
            (0, _) => 0x1_0000,
            (1, 0) | (2, 0..3) => 0,
            (2, 3..6) => 0x400 * (1 + random.below(63) as u32),
            _ => 0x1_0000,
        })
        .collect()
}

fn type_names(map: &mut Map) {
    for (kind, name) in TYPES.iter().enumerate() {
        map.type_names.insert(kind as i32, (*name).to_owned());
    }
}

/// The `n`-th case. The first ten are fixed (each bucket kind on three levels, equal and fractional
/// weights), the others drawn.
pub fn case(n: usize) -> Case {
    let mut random = Random(n as u64 ^ 0x5eed);
    let profiles = ["argonaut", "bobtail", "firefly", "hammer", "jewel", "default"];
    let mut shape = Shape {
        fanout: vec![4, 4, 5],
        algorithms: vec![Some(Algorithm::ALL[n % 5])],
        weights: if n < 5 { WeightStyle::Equal } else { WeightStyle::Fractional },
        ragged: false,
    };
    let mut profile = "default";
    if n >= 10 {
        profile = profiles[random.below(profiles.len())];
        let fanouts: [&[usize]; 7] =
            [&[12], &[5, 4], &[40, 3], &[3, 4, 6], &[10, 5, 20], &[3, 3, 3, 4], &[2, 30, 9]];
        shape.fanout = fanouts[random.below(7)].to_vec();
        let any = random.one_in(2);
        shape.algorithms =
            (0..4).map(|_| (!any).then(|| Algorithm::ALL[random.below(5)])).collect();
        if random.one_in(3) {
            shape.algorithms = vec![Some(Algorithm::Straw2)];
        }
        shape.weights =
            [WeightStyle::Equal, WeightStyle::Fractional, WeightStyle::Wild][random.below(3)];
        shape.ragged = random.one_in(2);
    }
    let mut tunables = Tunables::profile(profile).expect("a known profile");
    if n >= 10 && random.one_in(4) {
        tunables.choose_local_tries = random.below(4) as u32;
        tunables.choose_local_fallback_tries = random.below(6) as u32;
        tunables.choose_total_tries = random.below(60) as u32;
        tunables.chooseleaf_descend_once = random.below(2) as u32;
        tunables.chooseleaf_vary_r = random.below(5) as u8;
        tunables.chooseleaf_stable = random.below(2) as u8;
        tunables.straw_calc_version = random.below(2) as u8;
    }
    let mut map = Map::new(tunables);
    type_names(&mut map);
    let root = build_tree(&mut map, &shape, &mut random);
    add_rules(&mut map, root, shape.fanout.len());
    if n >= 10 && random.one_in(3) {
        add_choose_args(&mut map, &mut random);
    }
    let reweights =
        if n < 10 { vec![0x1_0000; map.device_count()] } else { reweights(&map, &mut random) };
    let name = format!("{n}: {:?} {profile} {:?}", shape.fanout, shape.weights);
    Case { name, map, reweights, replicas: if n < 10 { vec![3] } else { vec![1, 3, 6] } }
}

/// Three levels and 1,000 devices, all of one bucket kind: the map of the figures.
pub fn thousand(algorithm: Algorithm, tunables: Tunables) -> Map {
    let mut map = Map::new(tunables);
    type_names(&mut map);
    let shape = Shape {
        fanout: vec![10, 5, 20],
        algorithms: vec![Some(algorithm)],
        weights: WeightStyle::Equal,
        ragged: false,
    };
    let root = build_tree(&mut map, &shape, &mut Random(1));
    let steps = vec![Step::Take(root), Step::ChooseLeafFirstn(0, 1), Step::Emit];
    let kind = RULE_REPLICATED;
    map.rules.push(Some(Rule { ruleset: 0, kind, min_size: 1, max_size: 10, steps }));
    map.rule_names.insert(0, "replicated".into());
    map
}
