//! Ceph's binary form of a map, as `crushtool` and the monitors write it. Little-endian, unversioned:
//! later releases append fields, and a reader stops where the bytes end.
//!
//! ```text
//! u32 magic 0x00010000   i32 buckets   u32 rules   i32 devices
//! per bucket:  u32 algorithm (0: none, nothing follows)
//!              i32 id   u16 type   u8 algorithm   u8 hash   u32 weight   u32 n   n × i32 item
//!              uniform: u32 weight      list: n × (u32 weight, u32 sum)     straw2: n × u32 weight
//!              tree: u8 nodes, nodes × u32 weight      straw: n × (u32 weight, u32 straw)
//! per rule:    u32 present (0: nothing follows)   u32 n   u8 ruleset, type, min, max
//!              n × (u32 step, i32 argument, i32 argument)
//! names of types, items, rules: u32 n, n × (i32 number, u32 length, bytes)
//! tunables:    u32 local, u32 fallback, u32 total | u32 descend_once | u8 vary_r | u8 straw_calc
//!              | u32 allowed algorithms | u8 stable        (each | may be where old maps end)
//! classes:     u32 n, n × (i32 item, i32 class);  u32 n, n × (i32 class, name);
//!              u32 n, n × (i32 bucket, u32 m, m × (i32 class, i32 shadow))
//! choose_args: u32 n, n × (i64 pool, u32 m, m × (u32 bucket index,
//!              u32 positions, positions × (u32 k, k × u32 weight), u32 k, k × i32 id))
//! multi-step retry (since release 19): u32, u32
//! ```

use super::error::{Error, Result};
use super::limits::{BUCKETS_MAX, RULES_MAX};
use super::map::{Algorithm, Bucket, ChooseArg, Map, Rule, Step, Tunables, Weights};
use std::collections::BTreeMap;

const MAGIC: u32 = 0x0001_0000;

/// Reads from the front; every length is held against what is left before anything is allocated.
struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    fn error<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(Error::Malformed { offset: self.offset, what: what.into() })
    }

    fn at_end(&self) -> bool {
        self.offset == self.bytes.len()
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let end = self.offset.checked_add(len).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            return self.error(format!("{len} bytes expected, the map ends before"));
        };
        let part = &self.bytes[self.offset..end];
        self.offset = end;
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn i32(&mut self) -> Result<i32> {
        Ok(i32::from_le_bytes(self.array()?))
    }

    fn i64(&mut self) -> Result<i64> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    /// A count of things of `size` bytes each at least.
    fn count(&mut self, size: usize) -> Result<usize> {
        let count = self.u32()? as usize;
        self.fits(count, size)
    }

    fn fits(&self, count: usize, size: usize) -> Result<usize> {
        if count > (self.bytes.len() - self.offset) / size {
            return self.error(format!("a count of {count} exceeds what the rest can hold"));
        }
        Ok(count)
    }

    fn list<T>(&mut self, count: usize, one: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        (0..count).map(|_| one(self)).collect()
    }

    fn text(&mut self, len: usize) -> Result<String> {
        let start = self.offset;
        match std::str::from_utf8(self.take(len)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(Error::Malformed { offset: start, what: "a name is not text".into() }),
        }
    }

    fn name(&mut self) -> Result<String> {
        let len = self.u32()? as usize;
        self.text(len)
    }

    /// Names by number. Old maps have 64-bit numbers here; names are never empty, so that a length
    /// of 0 is the upper half of one.
    fn names(&mut self) -> Result<BTreeMap<i32, String>> {
        let count = self.count(8)?;
        let mut names = BTreeMap::new();
        for _ in 0..count {
            let number = self.i32()?;
            let mut len = self.u32()?;
            if len == 0 {
                len = self.u32()?;
            }
            if len == 0 {
                return self.error("a name is empty");
            }
            names.insert(number, self.text(len as usize)?);
        }
        Ok(names)
    }
}

impl Map {
    /// Reads the binary form.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader { bytes, offset: 0 };
        if r.u32()? != MAGIC {
            return Err(Error::Malformed { offset: 0, what: "the magic number is missing".into() });
        }
        let (bucket_count, rule_count) = (r.u32()? as usize, r.u32()? as usize);
        let _devices = r.i32()?; // follows from the buckets
        if bucket_count > BUCKETS_MAX || rule_count > RULES_MAX {
            return r.error(format!("more than {BUCKETS_MAX} buckets or {RULES_MAX} rules"));
        }
        let mut map = Self::new(Tunables::ARGONAUT);
        r.fits(bucket_count + rule_count, 4)?;
        for index in 0..bucket_count {
            map.buckets.push(read_bucket(&mut r, index)?);
        }
        map.rules = r.list(rule_count, read_rule)?;
        map.type_names = r.names()?;
        map.item_names = r.names()?;
        map.rule_names = r.names()?;
        read_tunables(&mut r, &mut map.tunables)?;
        if !r.at_end() {
            read_classes(&mut r, &mut map)?;
        }
        if !r.at_end() {
            map.choose_args = read_choose_args(&mut r, bucket_count)?;
        }
        if !r.at_end() {
            map.msr = Some((r.u32()?, r.u32()?));
        }
        if !r.at_end() {
            return r.error("bytes follow that no known release writes");
        }
        Ok(map)
    }

    /// Writes the binary form, with everything that Ceph 16 knows.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::new());
        w.u32(MAGIC);
        w.count(self.buckets.len());
        w.count(self.rules.len());
        w.count(self.device_count());
        for bucket in &self.buckets {
            w.bucket(bucket.as_ref());
        }
        for rule in &self.rules {
            w.rule(rule.as_ref());
        }
        for names in [&self.type_names, &self.item_names, &self.rule_names] {
            w.names(names);
        }
        w.tunables(&self.tunables);
        w.classes(self);
        w.choose_args(&self.choose_args);
        if let Some((descents, collisions)) = self.msr {
            w.u32(descents);
            w.u32(collisions);
        }
        w.0
    }
}

fn read_bucket(r: &mut Reader<'_>, index: usize) -> Result<Option<Bucket>> {
    let number = r.u32()?;
    if number == 0 {
        return Ok(None);
    }
    let Some(algorithm) = Algorithm::from_number(number) else {
        return r.error(format!("bucket algorithm {number} is not known"));
    };
    let id = r.i32()?;
    if Map::bucket_index(id) != Some(index) {
        return r.error(format!("bucket {id} is in place {index}"));
    }
    let kind = r.u16()?;
    if u32::from(r.u8()?) != number {
        return r.error(format!("bucket {id} names two algorithms"));
    }
    let hash = r.u8()?;
    let weight = r.u32()?;
    let n = r.count(4)?;
    let items = r.list(n, Reader::i32)?;
    let weights = match algorithm {
        Algorithm::Uniform => Weights::Uniform(r.u32()?),
        Algorithm::List => {
            let pairs = read_pairs(r, n)?;
            Weights::List { items: pairs.0, sums: pairs.1 }
        }
        Algorithm::Tree => {
            let nodes = usize::from(r.u8()?);
            r.fits(nodes, 4)?;
            Weights::Tree(r.list(nodes, Reader::u32)?)
        }
        Algorithm::Straw => {
            let pairs = read_pairs(r, n)?;
            Weights::Straw { items: pairs.0, straws: pairs.1 }
        }
        Algorithm::Straw2 => Weights::Straw2(r.list(n, Reader::u32)?),
    };
    Ok(Some(Bucket { id, kind, hash, weight, items, weights }))
}

fn read_pairs(r: &mut Reader<'_>, n: usize) -> Result<(Vec<u32>, Vec<u32>)> {
    Ok(r.list(n, |r| Ok((r.u32()?, r.u32()?)))?.into_iter().unzip())
}

fn read_rule(r: &mut Reader<'_>) -> Result<Option<Rule>> {
    if r.u32()? == 0 {
        return Ok(None);
    }
    let n = r.u32()? as usize;
    let [ruleset, kind, min_size, max_size] = r.array()?;
    r.fits(n, 12)?;
    let steps = r.list(n, |r| Ok(Step::from_words(r.u32()?, r.i32()?, r.i32()?)))?;
    Ok(Some(Rule { ruleset, kind, min_size, max_size, steps }))
}

fn read_tunables(r: &mut Reader<'_>, t: &mut Tunables) -> Result<()> {
    if !r.at_end() {
        t.choose_local_tries = r.u32()?;
        t.choose_local_fallback_tries = r.u32()?;
        t.choose_total_tries = r.u32()?;
    }
    if !r.at_end() {
        t.chooseleaf_descend_once = r.u32()?;
    }
    if !r.at_end() {
        t.chooseleaf_vary_r = r.u8()?;
    }
    if !r.at_end() {
        t.straw_calc_version = r.u8()?;
    }
    if !r.at_end() {
        t.allowed_bucket_algs = r.u32()?;
    }
    if !r.at_end() {
        t.chooseleaf_stable = r.u8()?;
    }
    Ok(())
}

fn read_classes(r: &mut Reader<'_>, map: &mut Map) -> Result<()> {
    for _ in 0..r.count(8)? {
        map.item_classes.insert(r.i32()?, r.i32()?);
    }
    for _ in 0..r.count(8)? {
        map.class_names.insert(r.i32()?, r.name()?);
    }
    for _ in 0..r.count(8)? {
        let shadows = map.class_buckets.entry(r.i32()?).or_default();
        for _ in 0..r.count(8)? {
            shadows.insert(r.i32()?, r.i32()?);
        }
    }
    Ok(())
}

fn read_choose_args(
    r: &mut Reader<'_>,
    bucket_count: usize,
) -> Result<BTreeMap<i64, BTreeMap<u32, ChooseArg>>> {
    let mut sets = BTreeMap::new();
    for _ in 0..r.count(12)? {
        let pool = r.i64()?;
        let mut args = BTreeMap::new();
        for _ in 0..r.count(12)? {
            let index = r.u32()?;
            if index as usize >= bucket_count {
                return r.error(format!("choose_args name bucket {index} of {bucket_count}"));
            }
            let positions = r.count(4)?;
            let weight_sets = r.list(positions, |r| {
                let n = r.count(4)?;
                r.list(n, Reader::u32)
            })?;
            let n = r.count(4)?;
            let arg = ChooseArg { weight_sets, ids: r.list(n, Reader::i32)? };
            if arg != ChooseArg::default() {
                args.insert(index, arg);
            }
        }
        sets.insert(pool, args);
    }
    Ok(sets)
}

/// Appends fields.
struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn i32(&mut self, value: i32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Counts come from lists in memory, whose entries are four bytes and more: they fit.
    fn count(&mut self, count: usize) {
        self.u32(count as u32);
    }

    fn words(&mut self, values: &[u32]) {
        values.iter().for_each(|v| self.u32(*v));
    }

    fn pairs(&mut self, a: &[u32], b: &[u32]) {
        for (a, b) in a.iter().zip(b) {
            self.words(&[*a, *b]);
        }
    }

    fn name(&mut self, name: &str) {
        self.count(name.len());
        self.0.extend_from_slice(name.as_bytes());
    }

    fn names(&mut self, names: &BTreeMap<i32, String>) {
        self.count(names.len());
        for (number, name) in names {
            self.i32(*number);
            self.name(name);
        }
    }

    fn bucket(&mut self, bucket: Option<&Bucket>) {
        let Some(b) = bucket else { return self.u32(0) };
        let algorithm = b.algorithm() as u8;
        self.u32(u32::from(algorithm));
        self.i32(b.id);
        self.0.extend_from_slice(&b.kind.to_le_bytes());
        self.u8(algorithm);
        self.u8(b.hash);
        self.u32(b.weight);
        self.count(b.items.len());
        b.items.iter().for_each(|item| self.i32(*item));
        match &b.weights {
            Weights::Uniform(weight) => self.u32(*weight),
            Weights::List { items, sums } => self.pairs(items, sums),
            Weights::Tree(nodes) => {
                // `make_bucket` and the reader make no larger ones; what does not fit is cut off.
                let nodes = &nodes[..nodes.len().min(255)];
                self.u8(nodes.len() as u8);
                self.words(nodes);
            }
            Weights::Straw { items, straws } => self.pairs(items, straws),
            Weights::Straw2(items) => self.words(items),
        }
    }

    fn rule(&mut self, rule: Option<&Rule>) {
        let Some(rule) = rule else { return self.u32(0) };
        self.u32(1);
        self.count(rule.steps.len());
        self.0.extend_from_slice(&[rule.ruleset, rule.kind, rule.min_size, rule.max_size]);
        for step in &rule.steps {
            let (op, a, b) = step.to_words();
            self.u32(op);
            self.i32(a);
            self.i32(b);
        }
    }

    fn tunables(&mut self, t: &Tunables) {
        self.words(&[
            t.choose_local_tries,
            t.choose_local_fallback_tries,
            t.choose_total_tries,
            t.chooseleaf_descend_once,
        ]);
        self.u8(t.chooseleaf_vary_r);
        self.u8(t.straw_calc_version);
        self.u32(t.allowed_bucket_algs);
        self.u8(t.chooseleaf_stable);
    }

    fn classes(&mut self, map: &Map) {
        self.count(map.item_classes.len());
        for (item, class) in &map.item_classes {
            self.i32(*item);
            self.i32(*class);
        }
        self.names(&map.class_names);
        self.count(map.class_buckets.len());
        for (bucket, shadows) in &map.class_buckets {
            self.i32(*bucket);
            self.count(shadows.len());
            for (class, shadow) in shadows {
                self.i32(*class);
                self.i32(*shadow);
            }
        }
    }

    fn choose_args(&mut self, sets: &BTreeMap<i64, BTreeMap<u32, ChooseArg>>) {
        self.count(sets.len());
        for (pool, args) in sets {
            self.0.extend_from_slice(&pool.to_le_bytes());
            let used =
                || args.iter().filter(|(_, a)| !a.weight_sets.is_empty() || !a.ids.is_empty());
            self.count(used().count());
            for (index, arg) in used() {
                self.u32(*index);
                self.count(arg.weight_sets.len());
                for weights in &arg.weight_sets {
                    self.count(weights.len());
                    self.words(weights);
                }
                self.count(arg.ids.len());
                arg.ids.iter().for_each(|id| self.i32(*id));
            }
        }
    }
}
