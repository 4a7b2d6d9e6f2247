//! Writing crushtool's text form.

use super::error::{Error, Result};
use super::limits::DEPTH_MAX;
use super::map::{
    Algorithm, Bucket, ChooseArg, Map, RULE_ERASURE, RULE_REPLICATED, Rule, Step, Tunables,
};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Whether a name can stand in the text form.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

/// 16.16 with three decimals, rounded through single precision as crushtool does.
fn fixed(weight: u32) -> String {
    format!("{:.3}", f64::from(weight as i32 as f32 / 65_536.0))
}

impl Map {
    /// The map as crushtool's text.
    pub fn decompile(&self) -> Result<String> {
        self.check_names()?;
        let mut writer = Decompiler { map: self, out: String::new() };
        writer.tunables();
        writer.devices();
        writer.types();
        writer.out.push_str("\n# buckets\n");
        writer.buckets()?;
        writer.out.push_str("\n# rules\n");
        for (number, rule) in self.rules.iter().enumerate() {
            if let Some(rule) = rule {
                writer.rule(number, rule)?;
            }
        }
        if !self.choose_args.is_empty() {
            writer.out.push_str("\n# choose_args\n");
            self.choose_args.iter().for_each(|(pool, args)| writer.choose_args(*pool, args));
        }
        writer.out.push_str("\n# end crush map\n");
        Ok(writer.out)
    }

    /// Names come from outside: one with a line break in it would write lines of its own.
    fn check_names(&self) -> Result<()> {
        let items = self.item_names.iter().filter(|(id, _)| !self.is_shadow(**id));
        let others = self.type_names.iter().chain(&self.rule_names).chain(&self.class_names);
        match items.chain(others).find(|(_, name)| !is_name(name)) {
            Some((number, name)) => Err(Error::Map(format!(
                "the name {name:?} of {number} cannot be written as text; rename it"
            ))),
            None => Ok(()),
        }
    }
}

struct Decompiler<'a> {
    map: &'a Map,
    out: String,
}

impl Decompiler<'_> {
    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.out.write_fmt(text);
        self.out.push('\n');
    }

    fn tunables(&mut self) {
        let (t, usual) = (&self.map.tunables, &Tunables::ARGONAUT);
        let rows: [(&str, u32, u32); 8] = [
            ("choose_local_tries", t.choose_local_tries, usual.choose_local_tries),
            (
                "choose_local_fallback_tries",
                t.choose_local_fallback_tries,
                usual.choose_local_fallback_tries,
            ),
            ("choose_total_tries", t.choose_total_tries, usual.choose_total_tries),
            ("chooseleaf_descend_once", t.chooseleaf_descend_once, usual.chooseleaf_descend_once),
            ("chooseleaf_vary_r", t.chooseleaf_vary_r.into(), usual.chooseleaf_vary_r.into()),
            ("chooseleaf_stable", t.chooseleaf_stable.into(), usual.chooseleaf_stable.into()),
            ("straw_calc_version", t.straw_calc_version.into(), usual.straw_calc_version.into()),
            ("allowed_bucket_algs", t.allowed_bucket_algs, usual.allowed_bucket_algs),
        ];
        self.line(format_args!("# begin crush map"));
        for (name, value, usual) in rows {
            if value != usual {
                self.line(format_args!("tunable {name} {}", value as i32));
            }
        }
    }

    fn devices(&mut self) {
        self.out.push_str("\n# devices\n");
        let map = self.map;
        let devices = map.device_count() as i64;
        for (id, name) in map.item_names.range(0..).take_while(|(id, _)| i64::from(**id) < devices)
        {
            match map.item_classes.get(id).and_then(|class| map.class_names.get(class)) {
                Some(class) => self.line(format_args!("device {id} {name} class {class}")),
                None => self.line(format_args!("device {id} {name}")),
            }
        }
    }

    fn types(&mut self) {
        self.out.push_str("\n# types\n");
        let map = self.map;
        if !map.type_names.is_empty() && !map.type_names.contains_key(&0) {
            self.line(format_args!("type 0 osd"));
        }
        for (number, name) in map.type_names.range(0..) {
            self.line(format_args!("type {number} {name}"));
        }
    }

    fn item_name(&self, id: i32) -> String {
        match self.map.item_names.get(&id) {
            Some(name) => name.clone(),
            None if id >= 0 => format!("device{id}"),
            None => format!("bucket{}", -1 - i64::from(id)),
        }
    }

    fn type_name(&self, kind: i32) -> String {
        match self.map.type_names.get(&kind) {
            Some(name) => name.clone(),
            None if kind == 0 => "device".into(),
            None => format!("type{kind}"),
        }
    }

    /// All buckets, each after those that it contains.
    fn buckets(&mut self) -> Result<()> {
        let mut done = vec![false; self.map.buckets.len()];
        for index in 0..self.map.buckets.len() {
            self.bucket_tree(-1 - index as i32, &mut done, 0)?;
        }
        Ok(())
    }

    fn bucket_tree(&mut self, id: i32, done: &mut [bool], depth: usize) -> Result<()> {
        let map = self.map;
        let (Some(bucket), Some(index)) = (map.bucket(id), Map::bucket_index(id)) else {
            return Ok(());
        };
        if done[index] {
            return Ok(());
        }
        if depth >= DEPTH_MAX {
            return Err(Error::Map(format!(
                "bucket {id} contains itself, or is deeper than {DEPTH_MAX} levels"
            )));
        }
        for item in &bucket.items {
            self.bucket_tree(*item, done, depth + 1)?;
        }
        done[index] = true;
        if !map.is_shadow(id) {
            self.bucket(bucket);
        }
        Ok(())
    }

    fn bucket(&mut self, bucket: &Bucket) {
        let map = self.map;
        let id = bucket.id;
        let (kind, name) = (self.type_name(bucket.kind.into()), self.item_name(id));
        self.line(format_args!("{kind} {name} {{"));
        self.line(format_args!("\tid {id}\t\t# do not change unnecessarily"));
        for (class, shadow) in map.class_buckets.get(&id).into_iter().flatten() {
            if let Some(class) = map.class_names.get(class) {
                self.line(format_args!(
                    "\tid {shadow} class {class}\t\t# do not change unnecessarily"
                ));
            }
        }
        self.line(format_args!("\t# weight {}", fixed(bucket.weight)));
        let algorithm = bucket.algorithm();
        let note = match algorithm {
            Algorithm::Uniform => {
                format!("\t# do not change bucket size ({}) unnecessarily", bucket.items.len())
            }
            Algorithm::List => {
                "\t# add new items at the end; do not change order unnecessarily".into()
            }
            Algorithm::Tree => "\t# do not change pos for existing items unnecessarily".into(),
            Algorithm::Straw | Algorithm::Straw2 => String::new(),
        };
        self.line(format_args!("\talg {}{note}", algorithm.name()));
        let hash = if bucket.hash == 0 { "rjenkins1" } else { "unknown" };
        self.line(format_args!("\thash {}\t# {hash}", bucket.hash));
        let positions = matches!(algorithm, Algorithm::Uniform | Algorithm::Tree);
        for (position, item) in bucket.items.iter().enumerate() {
            let (name, weight) = (self.item_name(*item), fixed(bucket.item_weight(position)));
            match positions {
                true => self.line(format_args!("\titem {name} weight {weight} pos {position}")),
                false => self.line(format_args!("\titem {name} weight {weight}")),
            }
        }
        self.line(format_args!("}}"));
    }

    fn rule(&mut self, number: usize, rule: &Rule) -> Result<()> {
        let name = i32::try_from(number).ok().and_then(|n| self.map.rule_names.get(&n)).cloned();
        self.line(format_args!("rule {} {{", name.unwrap_or_default()));
        self.line(format_args!("\tid {number}"));
        if usize::from(rule.ruleset) != number {
            self.line(format_args!(
                "\t# WARNING: ruleset {} != id {number}; this will not recompile to the same map",
                rule.ruleset
            ));
        }
        match rule.kind {
            RULE_REPLICATED => self.line(format_args!("\ttype replicated")),
            RULE_ERASURE => self.line(format_args!("\ttype erasure")),
            other => self.line(format_args!("\ttype {other}")),
        }
        self.line(format_args!("\tmin_size {}", rule.min_size));
        self.line(format_args!("\tmax_size {}", rule.max_size));
        for step in &rule.steps {
            let text = self.step(*step)?;
            self.line(format_args!("\tstep {text}"));
        }
        self.line(format_args!("}}"));
        Ok(())
    }

    fn step(&self, step: Step) -> Result<String> {
        let choose = |verb: &str, mode: &str, count: i32, kind: i32| {
            format!("{verb} {mode} {count} type {}", self.type_name(kind))
        };
        Ok(match step {
            Step::Noop => "noop".into(),
            Step::Take(item) => self.take(item),
            Step::Emit => "emit".into(),
            Step::ChooseFirstn(n, kind) => choose("choose", "firstn", n, kind),
            Step::ChooseIndep(n, kind) => choose("choose", "indep", n, kind),
            Step::ChooseLeafFirstn(n, kind) => choose("chooseleaf", "firstn", n, kind),
            Step::ChooseLeafIndep(n, kind) => choose("chooseleaf", "indep", n, kind),
            Step::SetChooseTries(n) => format!("set_choose_tries {n}"),
            Step::SetChooseLeafTries(n) => format!("set_chooseleaf_tries {n}"),
            Step::SetChooseLocalTries(n) => format!("set_choose_local_tries {n}"),
            Step::SetChooseLocalFallbackTries(n) => format!("set_choose_local_fallback_tries {n}"),
            Step::SetChooseLeafVaryR(n) => format!("set_chooseleaf_vary_r {n}"),
            Step::SetChooseLeafStable(n) => format!("set_chooseleaf_stable {n}"),
            Step::Unknown(op, ..) => {
                return Err(Error::Map(format!("rule step {op} has no text form")));
            }
        })
    }

    /// `take name`, or for a shadow bucket `take name class c`.
    fn take(&self, item: i32) -> String {
        let of = self.map.class_buckets.iter().find_map(|(original, shadows)| {
            let class = shadows.iter().find(|(_, shadow)| **shadow == item)?.0;
            Some((*original, self.map.class_names.get(class)?))
        });
        match of {
            Some((original, class)) => format!("take {} class {class}", self.item_name(original)),
            None => format!("take {}", self.item_name(item)),
        }
    }

    fn choose_args(&mut self, pool: i64, args: &BTreeMap<u32, ChooseArg>) {
        // The default set's number, −1, is written without a sign.
        self.line(format_args!("choose_args {} {{", pool as u64));
        for (index, arg) in args {
            if arg.weight_sets.is_empty() && arg.ids.is_empty() {
                continue;
            }
            self.line(format_args!("  {{\n    bucket_id {}", -1 - i64::from(*index)));
            if !arg.weight_sets.is_empty() {
                self.line(format_args!("    weight_set ["));
                for weights in &arg.weight_sets {
                    let weights: String = weights.iter().map(|w| fixed(*w) + " ").collect();
                    self.line(format_args!("      [ {weights}]"));
                }
                self.line(format_args!("    ]"));
            }
            if !arg.ids.is_empty() {
                let ids: String = arg.ids.iter().map(|id| format!("{id} ")).collect();
                self.line(format_args!("    ids [ {ids}]"));
            }
            self.line(format_args!("  }}"));
        }
        self.line(format_args!("}}"));
    }
}
