//! From the syntax of a text to a map: names become numbers, shadow trees are built.

use super::build::make_bucket;
use super::compile::{ArgText, BucketText, Line, Part, RuleText, StepText, parse};
use super::error::{Error, Result};
use super::limits::{BUCKET_WEIGHT_MAX, BUCKETS_MAX, DEVICE_WEIGHT_MAX, DEVICES_MAX, RULES_MAX};
use super::map::{
    Algorithm, Bucket, ChooseArg, Map, RULE_ERASURE, RULE_REPLICATED, Rule, Step, Tunables,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

impl Map {
    /// Makes a map of crushtool's text. Tunables that the text does not name have their oldest
    /// values, so that a text means the same for ever.
    pub fn compile(text: &str) -> Result<Self> {
        let mut parts = parse(text)?;
        order_buckets(&mut parts)?;
        let mut a = Assembler::new(&parts);
        let mut classes_built = false;
        for part in &parts {
            match part {
                Part::Tunable { line, name, value } => a.tunable(*line, name, *value)?,
                Part::Device { line, id, name, class } => {
                    a.device(*line, *id, name, class.as_deref())?;
                }
                Part::Type { id, name } => {
                    a.types.insert(name.clone(), *id);
                    a.map.type_names.insert(*id, name.clone());
                }
                Part::Bucket(bucket) if classes_built => {
                    return wrong(bucket.line, "buckets must be defined before rules");
                }
                Part::Bucket(bucket) => a.bucket(bucket)?,
                Part::Rule(rule) => {
                    if !classes_built {
                        classes_built = true;
                        let wanted = std::mem::take(&mut a.class_ids);
                        a.map.build_shadow_trees(&wanted)?;
                    }
                    a.rule(rule)?;
                }
                Part::ChooseArgs { line, pool, args } => a.choose_args(*line, *pool, args)?,
            }
        }
        Ok(a.map)
    }
}

fn wrong<T>(line: Line, what: impl Into<String>) -> Result<T> {
    Err(Error::Text { line, what: what.into() })
}

/// A bucket may be written after one that contains it: the two change places, in the order in which
/// crushtool swaps them, because numbers are given in order.
fn order_buckets(parts: &mut [Part]) -> Result<()> {
    let mut slots = Vec::new();
    let mut slot_of = HashMap::new();
    let mut children: Vec<(Line, String, BTreeSet<String>)> = Vec::new();
    for (slot, part) in parts.iter().enumerate() {
        if let Part::Bucket(bucket) = part {
            slot_of.insert(bucket.name.clone(), slots.len());
            slots.push(slot);
            let items = bucket.items.iter().map(|item| item.name.clone()).collect();
            children.push((bucket.line, bucket.name.clone(), items));
        }
    }
    for i in 0..children.len() {
        let later: BTreeSet<usize> = children[i]
            .2
            .iter()
            .filter_map(|c| slot_of.get(c).copied())
            .filter(|j| *j > i)
            .collect();
        for j in later {
            if children[j].2.contains(&children[i].1) {
                let (line, name, _) = &children[i];
                return wrong(
                    *line,
                    format!("'{name}' and '{}' contain each other", children[j].1),
                );
            }
            parts.swap(slots[i], slots[j]);
        }
    }
    Ok(())
}

/// What is known while the text is gone through.
struct Assembler {
    map: Map,
    types: HashMap<String, i32>,
    items: HashMap<String, i32>,
    rules: BTreeSet<String>,
    /// Bucket numbers that the text names anywhere, and those given since.
    taken: BTreeSet<i32>,
    /// No number above this one is free.
    free: i32,
    /// Weight of each bucket that was defined.
    weights: HashMap<i32, u32>,
    class_ids: BTreeMap<i32, BTreeMap<i32, i32>>,
}

impl Assembler {
    fn new(parts: &[Part]) -> Self {
        let mut taken = BTreeSet::new();
        for part in parts {
            if let Part::Bucket(bucket) = part {
                taken.extend(bucket.id);
                taken.extend(bucket.class_ids.iter().map(|(_, id)| *id));
            }
        }
        Self {
            map: Map::new(Tunables::ARGONAUT),
            types: HashMap::new(),
            items: HashMap::new(),
            rules: BTreeSet::new(),
            taken,
            free: -1,
            weights: HashMap::new(),
            class_ids: BTreeMap::new(),
        }
    }

    fn tunable(&mut self, line: Line, name: &str, value: i32) -> Result<()> {
        let t = &mut self.map.tunables;
        match name {
            "choose_local_tries" => t.choose_local_tries = value as u32,
            "choose_local_fallback_tries" => t.choose_local_fallback_tries = value as u32,
            "choose_total_tries" => t.choose_total_tries = value as u32,
            "chooseleaf_descend_once" => t.chooseleaf_descend_once = value as u32,
            "chooseleaf_vary_r" => t.chooseleaf_vary_r = value as u8,
            "chooseleaf_stable" => t.chooseleaf_stable = value as u8,
            "straw_calc_version" => t.straw_calc_version = value as u8,
            "allowed_bucket_algs" => t.allowed_bucket_algs = value as u32,
            _ => return wrong(line, format!("tunable '{name}' is not known")),
        }
        Ok(())
    }

    fn device(&mut self, line: Line, id: i32, name: &str, class: Option<&str>) -> Result<()> {
        if !usize::try_from(id).is_ok_and(|id| id < DEVICES_MAX) {
            return wrong(line, format!("device number {id} is not below {DEVICES_MAX}"));
        }
        if self.items.insert(name.to_owned(), id).is_some() {
            return wrong(line, format!("item '{name}' is defined twice"));
        }
        self.map.item_names.insert(id, name.to_owned());
        if let Some(class) = class {
            let class = self.map.class_or_new(class);
            self.map.item_classes.insert(id, class);
        }
        Ok(())
    }

    fn bucket(&mut self, text: &BucketText) -> Result<()> {
        let line = text.line;
        let Some(kind) = self.types.get(&text.kind).and_then(|kind| u16::try_from(*kind).ok())
        else {
            return wrong(line, format!("bucket type '{}' is not defined", text.kind));
        };
        if self.items.contains_key(&text.name) {
            return wrong(line, format!("'{}' is already defined", text.name));
        }
        let Some(algorithm) = Algorithm::from_name(&text.algorithm) else {
            return wrong(line, format!("bucket algorithm '{}' is not known", text.algorithm));
        };
        let mut class_ids = BTreeMap::new();
        for (class, id) in &text.class_ids {
            let number = self.map.class_or_new(class);
            if class_ids.insert(number, *id).is_some() {
                return wrong(line, format!("'{}' has class '{class}' twice", text.name));
            }
        }
        let (items, weights) = self.bucket_items(text)?;
        let id = self.bucket_number(text)?;
        if !class_ids.is_empty() {
            self.class_ids.insert(id, class_ids);
        }
        let version = self.map.tunables.straw_calc_version;
        let made = make_bucket(algorithm, kind, items, weights, version);
        let made = made.map_err(|e| Error::Text { line, what: e.to_string() })?;
        self.items.insert(text.name.clone(), id);
        self.weights.insert(id, made.weight);
        let bucket = Bucket { id, hash: text.hash, ..made };
        self.map.add_bucket(bucket).map_err(|e| Error::Text { line, what: e.to_string() })?;
        self.map.item_names.insert(id, text.name.clone());
        Ok(())
    }

    /// The bucket's own number, or the first that the text does not name.
    fn bucket_number(&mut self, text: &BucketText) -> Result<i32> {
        if let Some(id) = text.id {
            return Ok(id);
        }
        while self.taken.contains(&self.free) {
            self.free -= 1;
        }
        if self.free < -(BUCKETS_MAX as i32) {
            return wrong(text.line, format!("more than {BUCKETS_MAX} buckets"));
        }
        self.taken.insert(self.free);
        Ok(self.free)
    }

    /// Numbers and weights of a bucket's items, in the order of their positions.
    fn bucket_items(&self, text: &BucketText) -> Result<(Vec<i32>, Vec<u32>)> {
        let size = text.items.len();
        let mut used = BTreeSet::new();
        for item in &text.items {
            let Some(position) = item.position else { continue };
            if position >= size {
                return wrong(
                    item.line,
                    format!("pos {position} of '{}' is not below {size}", item.name),
                );
            }
            if !used.insert(position) {
                return wrong(item.line, format!("pos {position} is used twice"));
            }
        }
        let (mut items, mut weights) = (vec![0; size], vec![0; size]);
        let mut next = 0;
        for item in &text.items {
            let Some(id) = self.items.get(&item.name) else {
                return wrong(item.line, format!("item '{}' is not defined", item.name));
            };
            let position = item.position.unwrap_or_else(|| {
                while used.contains(&next) {
                    next += 1;
                }
                next += 1;
                next - 1
            });
            let weight = match item.weight {
                // The product is exact, the conversion truncates.
                Some(weight) => (weight * 65_536.0) as u32,
                None => self.weights.get(id).copied().unwrap_or(0x1_0000),
            };
            let limit = if *id < 0 { BUCKET_WEIGHT_MAX } else { DEVICE_WEIGHT_MAX };
            if item.weight.is_some() && weight > limit {
                return wrong(item.line, format!("weight is limited to {}", limit / 0x1_0000));
            }
            items[position] = *id;
            weights[position] = weight;
        }
        Ok((items, weights))
    }

    fn rule(&mut self, text: &RuleText) -> Result<()> {
        let line = text.line;
        let Some(number) = usize::try_from(text.number).ok().filter(|n| *n < RULES_MAX) else {
            return wrong(line, format!("rule number {} is not below {RULES_MAX}", text.number));
        };
        let kind = match text.kind.as_str() {
            "replicated" => RULE_REPLICATED,
            "erasure" => RULE_ERASURE,
            other => return wrong(line, format!("rule type '{other}' is not known")),
        };
        if self.map.rule(number as u32).is_some() {
            return wrong(line, format!("rule {number} already exists"));
        }
        if let Some(name) = &text.name {
            if !self.rules.insert(name.clone()) {
                return wrong(line, format!("rule name '{name}' is already defined"));
            }
            self.map.rule_names.insert(text.number, name.clone());
        }
        let steps = text.steps.iter().map(|s| self.step(s)).collect::<Result<_>>()?;
        let (min_size, max_size) = (text.min_size as u8, text.max_size as u8);
        if number >= self.map.rules.len() {
            self.map.rules.resize(number + 1, None);
        }
        self.map.rules[number] =
            Some(Rule { ruleset: number as u8, kind, min_size, max_size, steps });
        Ok(())
    }

    fn step(&self, text: &StepText) -> Result<Step> {
        let words: Vec<&str> = text.words.iter().map(String::as_str).collect();
        let number = |word: &str| match word.parse::<i32>() {
            Ok(number) => Ok(number),
            Err(_) => wrong(text.line, format!("a number expected, not '{word}'")),
        };
        Ok(match words.as_slice() {
            ["noop"] => Step::Noop,
            ["emit"] => Step::Emit,
            ["take", item] => Step::Take(self.take(text.line, item, None)?),
            ["take", item, "class", class] => {
                Step::Take(self.take(text.line, item, Some(class))?)
            }
            ["set_choose_tries", n] => Step::SetChooseTries(number(n)?),
            ["set_chooseleaf_tries", n] => Step::SetChooseLeafTries(number(n)?),
            ["set_choose_local_tries", n] => Step::SetChooseLocalTries(number(n)?),
            ["set_choose_local_fallback_tries", n] => Step::SetChooseLocalFallbackTries(number(n)?),
            ["set_chooseleaf_vary_r", n] => Step::SetChooseLeafVaryR(number(n)?),
            ["set_chooseleaf_stable", n] => Step::SetChooseLeafStable(number(n)?),
            [verb, mode, count, "type", kind] => {
                let Some(kind) = self.types.get(*kind).copied() else {
                    return wrong(text.line, format!("type '{kind}' is not defined"));
                };
                let count = number(count)?;
                match (*verb, *mode) {
                    ("choose", "firstn") => Step::ChooseFirstn(count, kind),
                    ("choose", "indep") => Step::ChooseIndep(count, kind),
                    ("chooseleaf", "firstn") => Step::ChooseLeafFirstn(count, kind),
                    ("chooseleaf", "indep") => Step::ChooseLeafIndep(count, kind),
                    _ => {
                        return wrong(
                            text.line,
                            format!("step '{}' is not known", words.join(" ")),
                        );
                    }
                }
            }
            _ => return wrong(text.line, format!("step '{}' is not known", words.join(" "))),
        })
    }

    fn take(&self, line: Line, item: &str, class: Option<&str>) -> Result<i32> {
        let Some(id) = self.items.get(item).copied() else {
            return wrong(line, format!("item '{item}' is not defined"));
        };
        let Some(class) = class else { return Ok(id) };
        let number = self.map.class_names.iter().find(|(_, name)| name.as_str() == class);
        let shadow = number.and_then(|(n, _)| self.map.class_buckets.get(&id)?.get(n));
        match shadow {
            Some(shadow) => Ok(*shadow),
            None => wrong(line, format!("'{item}' has no devices of class '{class}'")),
        }
    }

    fn choose_args(&mut self, line: Line, pool: i64, args: &[ArgText]) -> Result<()> {
        let mut set = BTreeMap::new();
        for arg in args {
            let bucket = self.map.bucket(arg.bucket);
            let (Some(bucket), Some(index)) = (bucket, Map::bucket_index(arg.bucket)) else {
                return wrong(arg.line, format!("bucket {} does not exist", arg.bucket));
            };
            let size = bucket.items.len();
            if arg.weight_sets.iter().any(|w| w.len() != size)
                || (!arg.ids.is_empty() && arg.ids.len() != size)
            {
                return wrong(arg.line, format!("bucket {} has {size} items", arg.bucket));
            }
            let fixed =
                |weights: &Vec<f32>| weights.iter().map(|w| (w * 65_536.0) as u32).collect();
            let weight_sets = arg.weight_sets.iter().map(fixed).collect();
            set.insert(index as u32, ChooseArg { weight_sets, ids: arg.ids.clone() });
        }
        if self.map.choose_args.insert(pool, set).is_some() {
            return wrong(line, format!("choose_args {pool} are there twice"));
        }
        Ok(())
    }
}
