//! Maps in Ceph's binary form: one that its tool made, of which everything that says where groups lie is replaced.

use std::path::Path;
use std::process::Command;

use base::random::Random;
use placement::checksum::crc32c;
use placement::crush::{Map, Step};
use rados::osdmap::NONE;

// The same maps by which CRUSH itself is compared.
#[path = "../../../placement/tests/crush/corpus.rs"]
mod corpus;

const ONE: u32 = 0x1_0000;

/// The same with a checksum that is right, wherever the lengths say that it is.
pub fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut at = 6;
    for _part in ["for clients", "for OSDs"] {
        let Some(len) = bytes.get(at + 2..at + 6) else { return bytes };
        at += 6 + u32::from_le_bytes(len.try_into().unwrap()) as usize;
    }
    if bytes.get(at..at + 4).is_some() {
        let crc = !crc32c(crc32c(0, &bytes[..at]), &bytes[at + 4..]);
        bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    }
    bytes
}

/// A section: version, oldest version of a reader, length.
fn section(version: u8, oldest: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![version, oldest];
    bytes.extend(u32::try_from(body.len()).unwrap().to_le_bytes());
    bytes.extend(body);
    bytes
}

/// Appends fields.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn i32(&mut self, value: i32) {
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    fn list<T>(&mut self, list: &[T], mut one: impl FnMut(&mut Self, &T)) {
        self.u32(u32::try_from(list.len()).unwrap());
        list.iter().for_each(|item| one(self, item));
    }

    fn group(&mut self, (pool, seed): (i64, u32)) {
        self.bytes(&[1]);
        self.bytes(&pool.to_le_bytes());
        self.u32(seed);
        self.i32(-1);
    }
}

/// What is written of a pool.
#[derive(Debug)]
struct Pool {
    kind: u8,
    size: u8,
    rule: u8,
    groups: u32,
    placed: u32,
    flags: u64,
}

/// By group, a list of OSDs.
type Moved<T> = Vec<((i64, u32), T)>;

/// Everything that says where groups lie.
#[derive(Default)]
struct Parts {
    pools: Vec<Pool>,
    states: Vec<u32>,
    weights: Vec<u32>,
    affinities: Vec<u32>,
    crush: Vec<u8>,
    temporary: Moved<Vec<i32>>,
    temporary_first: Moved<i32>,
    placed: Moved<Vec<i32>>,
    exchanged: Moved<Vec<(i32, i32)>>,
}

/// A map that `osdmaptool --createsimple` made, of so many OSDs.
pub struct Base {
    count: usize,
    /// The section of its only pool, without its head.
    pool: Vec<u8>,
    /// The section for OSDs, with its head.
    for_osds: Vec<u8>,
}

impl Base {
    pub fn new(dir: &Path, count: usize) -> Self {
        let file = dir.join("base");
        let made = Command::new("osdmaptool")
            .args(["--createsimple", &count.to_string(), file.to_str().unwrap()])
            .args(["--clobber", "--with-default-pool", "--pg-bits", "1", "--pgp-bits", "1"])
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let bytes = std::fs::read(file).unwrap();
        let len =
            |at: usize| u32::from_le_bytes(bytes[at + 2..at + 6].try_into().unwrap()) as usize;
        // The head of the map, that of the part for clients, 36 bytes, one pool: its number, its head.
        let pool = 6 + 6 + 36 + 4 + 8;
        assert_eq!(bytes[pool], 29);
        let for_osds = 6 + 6 + len(6);
        Self {
            count,
            pool: bytes[pool + 6..pool + 6 + len(pool)].to_vec(),
            for_osds: bytes[for_osds..for_osds + 6 + len(for_osds)].to_vec(),
        }
    }

    fn write_pool(&self, w: &mut Writer, number: i64, pool: &Pool) {
        let mut body = self.pool.clone();
        body[..4].copy_from_slice(&[pool.kind, pool.size, pool.rule, 2]);
        body[4..8].copy_from_slice(&pool.groups.to_le_bytes());
        body[8..12].copy_from_slice(&pool.placed.to_le_bytes());
        body[52..60].copy_from_slice(&pool.flags.to_le_bytes());
        w.bytes(&number.to_le_bytes());
        w.bytes(&section(29, 5, &body));
    }

    fn write(&self, parts: &Parts) -> Vec<u8> {
        let mut w = Writer::default();
        w.bytes(&[7; 16]);
        w.u32(3);
        w.bytes(&[0; 16]);
        let mut number = 0;
        w.list(&parts.pools, |w, pool| {
            number += 1;
            self.write_pool(w, number, pool);
        });
        let mut number = 0i64;
        w.list(&parts.pools, |w, _| {
            number += 1;
            w.bytes(&number.to_le_bytes());
            let name = format!("pool{number}");
            w.list(name.as_bytes(), |w, byte| w.bytes(&[*byte]));
        });
        w.u32(9); // the highest number of a pool
        w.u32(0); // flags
        w.u32(u32::try_from(self.count).unwrap());
        w.list(&parts.states, |w, state| w.u32(*state));
        w.list(&parts.weights, |w, weight| w.u32(*weight));
        w.list(&parts.states, |w, _| w.bytes(&[2, 0, 0, 0, 0])); // no address
        let osds = |w: &mut Writer, (group, osds): &((i64, u32), Vec<i32>)| {
            w.group(*group);
            w.list(osds, |w, osd| w.i32(*osd));
        };
        w.list(&parts.temporary, osds);
        w.list(&parts.temporary_first, |w, (group, osd)| {
            w.group(*group);
            w.i32(*osd);
        });
        w.list(&parts.affinities, |w, affinity| w.u32(*affinity));
        w.list(&parts.crush, |w, byte| w.bytes(&[*byte]));
        w.u32(0); // profiles
        w.list(&parts.placed, osds);
        w.list(&parts.exchanged, |w, (group, pairs)| {
            w.group(*group);
            w.list(pairs, |w, (from, to)| {
                w.i32(*from);
                w.i32(*to);
            });
        });
        w.u32(1); // changes of the CRUSH map
        w.bytes(&[0; 8]); // snapshots
        w.bytes(&[0; 16]); // last up, last in
        let mut body = section(9, 1, &w.0);
        body.extend(&self.for_osds);
        body.extend([0; 4]);
        resealed(section(8, 7, &body))
    }

    /// All OSDs up and in, and one pool of three copies.
    pub fn with_all_up(&self, crush: &Map, groups: u32) -> Vec<u8> {
        let pool = Pool { kind: 1, size: 3, rule: 0, groups, placed: groups, flags: 1 };
        self.write(&Parts {
            pools: vec![pool],
            states: vec![3; self.count],
            weights: vec![ONE; self.count],
            crush: crush.encode(),
            ..Parts::default()
        })
    }
}

/// One that is drawn.
pub fn random(dir: &Path, random: &mut Random) -> Vec<u8> {
    let case = corpus::case(random.below(1000) as usize);
    let mut crush = case.map;
    let devices = crush.device_count();
    if random.chance(1, 2) {
        give_classes(&mut crush, devices, random);
    }
    let base = Base::new(dir, devices + random.below(3) as usize);
    let mut parts = Parts { crush: crush.encode(), ..Parts::default() };
    for _ in 0..1 + random.below(3) {
        let rule = random.below(crush.rules.len() as u64) as usize;
        let kind = crush.rules[rule].as_ref().unwrap().kind;
        // One in twenty is of a kind that its rule is not for.
        let kind = if random.chance(1, 20) { 4 - kind } else { kind };
        let groups = 1 + random.below(120) as u32;
        let placed =
            if random.chance(1, 3) { 1 + random.below(groups.into()) as u32 } else { groups };
        let size = 1 + random.below(if kind == 1 { 5 } else { 8 }) as u8;
        let flags = u64::from(!random.chance(1, 4));
        parts.pools.push(Pool { kind, size, rule: rule as u8, groups, placed, flags });
    }
    // OSDs that are gone, down, out: none of them, few, or many.
    let bad = [0, 3, 25][random.below(3) as usize];
    for osd in 0..base.count {
        parts.states.push(match random.chance(bad, 100) {
            true => [0, 1, 2][random.below(3) as usize],
            false => 3 | (random.below(2) << 2) as u32,
        });
        let reweight = case.reweights.get(osd).copied().unwrap_or(ONE);
        parts.weights.push(if random.chance(bad, 100) { 0 } else { reweight });
    }
    if random.chance(1, 2) {
        let some = |random: &mut Random| random.below(0x1_0001) as u32;
        parts.affinities = (0..base.count)
            .map(|_| match random.below(6) {
                0 => 0,
                1 | 2 => some(random),
                _ => ONE,
            })
            .collect();
    }
    let osd = |random: &mut Random| match random.below(40) {
        0 => NONE,
        1 => base.count as i32 + random.below(3) as i32,
        2 => -1,
        _ => random.below(base.count as u64) as i32,
    };
    for (number, pool) in (1i64..).zip(&parts.pools) {
        if random.chance(1, 4) {
            continue;
        }
        let list = |random: &mut Random| -> Vec<i32> {
            let len = random.below(u64::from(pool.size) + 2);
            (0..len).map(|_| osd(random)).collect()
        };
        for seed in 0..pool.groups {
            let group = (number, seed);
            if random.chance(1, 6) {
                parts.temporary.push((group, list(random)));
            }
            if random.chance(1, 12) {
                parts.temporary_first.push((group, random.below(base.count as u64) as i32));
            }
            if random.chance(1, 8) {
                parts.placed.push((group, list(random)));
            }
            if random.chance(1, 3) {
                let pairs = (0..1 + random.below(3)).map(|_| (osd(random), osd(random))).collect();
                parts.exchanged.push((group, pairs));
            }
        }
    }
    base.write(&parts)
}

/// Gives most devices a class, makes the trees of each, and rules that begin there.
fn give_classes(crush: &mut Map, devices: usize, random: &mut Random) {
    let classes = ["hdd", "ssd", "nvme"].map(|name| crush.class_or_new(name));
    for device in 0..devices as i32 {
        if !random.chance(1, 10) {
            crush.item_classes.insert(device, classes[random.below(3) as usize]);
        }
    }
    // Uniform buckets have no shadows whose items weigh differently: such a map stays without classes.
    let before = crush.clone();
    if crush.build_shadow_trees(&Default::default()).is_err() {
        *crush =
            Map { class_names: Default::default(), item_classes: Default::default(), ..before };
        return;
    }
    for number in 0..crush.rules.len() {
        let Some(rule) = &mut crush.rules[number] else { continue };
        let class = classes[random.below(3) as usize];
        for step in &mut rule.steps {
            if let Step::Take(item) = step
                && let Some(shadow) = crush.class_buckets.get(item).and_then(|of| of.get(&class))
                && random.chance(1, 2)
            {
                *step = Step::Take(*shadow);
            }
        }
    }
}
