//! The map as people and formats see it: buckets, rules, tunables, names.
//!
//! Nothing here is trusted: fields are public and may hold anything. [`super::Placer::new`] checks a
//! map before it places by it.

use std::collections::BTreeMap;

/// How a bucket chooses among its items. The discriminants are in the binary form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Items of one weight; a pseudo-random permutation.
    Uniform = 1,
    /// A list walked from its end; good when it only grows.
    List = 2,
    /// A binary tree of weights.
    Tree = 3,
    /// Straws whose lengths depend on all weights (superseded).
    Straw = 4,
    /// Exponential draws, each depending on its own weight only.
    Straw2 = 5,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Uniform, Self::List, Self::Tree, Self::Straw, Self::Straw2];

    /// By its number in the binary form.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|a| *a as u32 == number)
    }

    /// By its name in the text form.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|a| a.name() == name)
    }

    /// Its name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::List => "list",
            Self::Tree => "tree",
            Self::Straw => "straw",
            Self::Straw2 => "straw2",
        }
    }
}

/// Weights of a bucket, 16.16 fixed point, as its algorithm keeps them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// One weight for every item.
    Uniform(u32),
    /// Weights and running sums.
    List {
        /// Weight of each item.
        items: Vec<u32>,
        /// Sum of the weights up to and including each item.
        sums: Vec<u32>,
    },
    /// Weights of the nodes of a binary tree; the items are the odd ones.
    Tree(Vec<u32>),
    /// Weights and the straw lengths that follow from them.
    Straw {
        /// Weight of each item.
        items: Vec<u32>,
        /// Straw length of each item.
        straws: Vec<u32>,
    },
    /// Weights.
    Straw2(Vec<u32>),
}

/// A bucket: an inner node of the hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Number, negative.
    pub id: i32,
    /// Type: host, rack …; 0 is for devices.
    pub kind: u16,
    /// Hash function; 0 is rjenkins1, and there is no other.
    pub hash: u8,
    /// Sum of the weights of the items.
    pub weight: u32,
    /// Devices (not negative) and buckets (negative).
    pub items: Vec<i32>,
    /// Weights, and with them the algorithm.
    pub weights: Weights,
}

impl Bucket {
    /// Its algorithm.
    pub const fn algorithm(&self) -> Algorithm {
        match self.weights {
            Weights::Uniform(_) => Algorithm::Uniform,
            Weights::List { .. } => Algorithm::List,
            Weights::Tree(_) => Algorithm::Tree,
            Weights::Straw { .. } => Algorithm::Straw,
            Weights::Straw2(_) => Algorithm::Straw2,
        }
    }

    /// Weight of the item at `position`; 0 where there is none.
    pub fn item_weight(&self, position: usize) -> u32 {
        if position >= self.items.len() {
            return 0;
        }
        let at = |weights: &[u32], i: usize| weights.get(i).copied().unwrap_or(0);
        match &self.weights {
            Weights::Uniform(weight) => *weight,
            Weights::List { items, .. } | Weights::Straw { items, .. } => at(items, position),
            Weights::Tree(nodes) => at(nodes, super::build::tree_node(position)),
            Weights::Straw2(items) => at(items, position),
        }
    }

    /// Weights of all items.
    pub fn item_weights(&self) -> Vec<u32> {
        (0..self.items.len()).map(|i| self.item_weight(i)).collect()
    }
}

/// A step of a rule. The numbers are those of the binary form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Does nothing.
    Noop,
    /// Starts from an item.
    Take(i32),
    /// Chooses `count` items of a type below each item held, filling from the front.
    ChooseFirstn(i32, i32),
    /// The same with positions kept: a hole where none was found.
    ChooseIndep(i32, i32),
    /// Appends what is held to the result.
    Emit,
    /// Chooses `count` items of a type and then one device below each.
    ChooseLeafFirstn(i32, i32),
    /// The same with positions kept.
    ChooseLeafIndep(i32, i32),
    /// Overrules `choose_total_tries`.
    SetChooseTries(i32),
    /// Sets the tries for the device below.
    SetChooseLeafTries(i32),
    /// Overrules `choose_local_tries`.
    SetChooseLocalTries(i32),
    /// Overrules `choose_local_fallback_tries`.
    SetChooseLocalFallbackTries(i32),
    /// Overrules `chooseleaf_vary_r`.
    SetChooseLeafVaryR(i32),
    /// Overrules `chooseleaf_stable`.
    SetChooseLeafStable(i32),
    /// A step that is not known here; libcrush passes over it.
    Unknown(u32, i32, i32),
}

impl Step {
    /// From the three words of the binary form.
    pub const fn from_words(op: u32, a: i32, b: i32) -> Self {
        match op {
            0 => Self::Noop,
            1 => Self::Take(a),
            2 => Self::ChooseFirstn(a, b),
            3 => Self::ChooseIndep(a, b),
            4 => Self::Emit,
            6 => Self::ChooseLeafFirstn(a, b),
            7 => Self::ChooseLeafIndep(a, b),
            8 => Self::SetChooseTries(a),
            9 => Self::SetChooseLeafTries(a),
            10 => Self::SetChooseLocalTries(a),
            11 => Self::SetChooseLocalFallbackTries(a),
            12 => Self::SetChooseLeafVaryR(a),
            13 => Self::SetChooseLeafStable(a),
            _ => Self::Unknown(op, a, b),
        }
    }

    /// The three words of the binary form.
    pub const fn to_words(self) -> (u32, i32, i32) {
        match self {
            Self::Noop => (0, 0, 0),
            Self::Take(a) => (1, a, 0),
            Self::ChooseFirstn(a, b) => (2, a, b),
            Self::ChooseIndep(a, b) => (3, a, b),
            Self::Emit => (4, 0, 0),
            Self::ChooseLeafFirstn(a, b) => (6, a, b),
            Self::ChooseLeafIndep(a, b) => (7, a, b),
            Self::SetChooseTries(a) => (8, a, 0),
            Self::SetChooseLeafTries(a) => (9, a, 0),
            Self::SetChooseLocalTries(a) => (10, a, 0),
            Self::SetChooseLocalFallbackTries(a) => (11, a, 0),
            Self::SetChooseLeafVaryR(a) => (12, a, 0),
            Self::SetChooseLeafStable(a) => (13, a, 0),
            Self::Unknown(op, a, b) => (op, a, b),
        }
    }
}

/// Rules for pools of replicas have this type.
pub const RULE_REPLICATED: u8 = 1;
/// Rules for erasure-coded pools have this type.
pub const RULE_ERASURE: u8 = 3;

/// A placement rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Rule set; equal to the rule's number in every map since 2017.
    pub ruleset: u8,
    /// [`RULE_REPLICATED`] or [`RULE_ERASURE`].
    pub kind: u8,
    /// Fewest replicas it is for (ignored since 2022).
    pub min_size: u8,
    /// Most replicas it is for (ignored since 2022).
    pub max_size: u8,
    /// What to do.
    pub steps: Vec<Step>,
}

/// Parameters of the choosing that apply to the whole map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunables {
    /// Retries within a bucket after a collision.
    pub choose_local_tries: u32,
    /// Retries within a bucket by permutation after that.
    pub choose_local_fallback_tries: u32,
    /// Retries from the top.
    pub choose_total_tries: u32,
    /// Whether the search for the device below a chosen bucket is made once only.
    pub chooseleaf_descend_once: u32,
    /// Whether, and how much, the parent's attempt varies the search below.
    pub chooseleaf_vary_r: u8,
    /// How straw lengths are computed: 0 or 1.
    pub straw_calc_version: u8,
    /// Bit set of the algorithms that new buckets may have.
    pub allowed_bucket_algs: u32,
    /// Whether the search below starts from the first replica for all of them.
    pub chooseleaf_stable: u8,
}

impl Tunables {
    const LEGACY_ALGS: u32 = (1 << 1) | (1 << 2) | (1 << 4);
    const HAMMER_ALGS: u32 = Self::LEGACY_ALGS | (1 << 5);

    /// Profile `argonaut`, also called legacy: what a text without tunables means.
    pub const ARGONAUT: Self = Self {
        choose_local_tries: 2,
        choose_local_fallback_tries: 5,
        choose_total_tries: 19,
        chooseleaf_descend_once: 0,
        chooseleaf_vary_r: 0,
        straw_calc_version: 0,
        allowed_bucket_algs: Self::LEGACY_ALGS,
        chooseleaf_stable: 0,
    };

    /// Profile `bobtail`.
    pub const BOBTAIL: Self = Self {
        choose_local_tries: 0,
        choose_local_fallback_tries: 0,
        choose_total_tries: 50,
        chooseleaf_descend_once: 1,
        ..Self::ARGONAUT
    };

    /// Profile `firefly`.
    pub const FIREFLY: Self = Self { chooseleaf_vary_r: 1, ..Self::BOBTAIL };

    /// Profile `hammer`.
    pub const HAMMER: Self = Self { allowed_bucket_algs: Self::HAMMER_ALGS, ..Self::FIREFLY };

    /// Profile `jewel`.
    pub const JEWEL: Self = Self { chooseleaf_stable: 1, ..Self::HAMMER };

    /// What Ceph gives a new map: jewel with the repaired straw lengths.
    pub const DEFAULT: Self = Self { straw_calc_version: 1, ..Self::JEWEL };

    /// A profile by its name (`legacy`, `argonaut`, `bobtail`, `firefly`, `hammer`, `jewel`,
    /// `optimal`, `default`).
    pub fn profile(name: &str) -> Option<Self> {
        Some(match name {
            "legacy" | "argonaut" => Self::ARGONAUT,
            "bobtail" => Self::BOBTAIL,
            "firefly" => Self::FIREFLY,
            "hammer" => Self::HAMMER,
            "jewel" | "optimal" => Self::JEWEL,
            "default" => Self::DEFAULT,
            _ => return None,
        })
    }
}

/// Weights and names that stand in for a straw2 bucket's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChooseArg {
    /// Per replica position, weights of the items; the last one serves further positions.
    pub weight_sets: Vec<Vec<u32>>,
    /// Numbers to hash instead of the items' own.
    pub ids: Vec<i32>,
}

/// Which set of choose_args applies where none is named for a pool.
pub const CHOOSE_ARGS_DEFAULT: i64 = -1;

/// A CRUSH map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    /// Bucket −1 is at 0, −2 at 1 …
    pub buckets: Vec<Option<Bucket>>,
    /// Rules by number.
    pub rules: Vec<Option<Rule>>,
    /// Tunables.
    pub tunables: Tunables,
    /// Names of bucket types.
    pub type_names: BTreeMap<i32, String>,
    /// Names of devices and buckets; shadow buckets are called `name~class`.
    pub item_names: BTreeMap<i32, String>,
    /// Names of rules.
    pub rule_names: BTreeMap<i32, String>,
    /// Class of each device and shadow bucket.
    pub item_classes: BTreeMap<i32, i32>,
    /// Names of device classes.
    pub class_names: BTreeMap<i32, String>,
    /// Per bucket and class, the shadow bucket that holds only the devices of that class.
    pub class_buckets: BTreeMap<i32, BTreeMap<i32, i32>>,
    /// Per pool (or [`CHOOSE_ARGS_DEFAULT`]) and bucket index, stand-in weights.
    pub choose_args: BTreeMap<i64, BTreeMap<u32, ChooseArg>>,
    /// The two tunables of multi-step retry, which newer releases append. Kept, not used.
    pub msr: Option<(u32, u32)>,
}

impl Map {
    /// A map with nothing in it.
    pub const fn new(tunables: Tunables) -> Self {
        Self {
            buckets: Vec::new(),
            rules: Vec::new(),
            tunables,
            type_names: BTreeMap::new(),
            item_names: BTreeMap::new(),
            rule_names: BTreeMap::new(),
            item_classes: BTreeMap::new(),
            class_names: BTreeMap::new(),
            class_buckets: BTreeMap::new(),
            choose_args: BTreeMap::new(),
            msr: None,
        }
    }

    /// Place of a bucket's number in [`Map::buckets`]; none for devices.
    pub const fn bucket_index(id: i32) -> Option<usize> {
        if id < 0 { Some((-1 - id) as usize) } else { None }
    }

    /// A bucket by its number.
    pub fn bucket(&self, id: i32) -> Option<&Bucket> {
        self.buckets.get(Self::bucket_index(id)?)?.as_ref()
    }

    /// A bucket by its number, to change it.
    pub fn bucket_mut(&mut self, id: i32) -> Option<&mut Bucket> {
        self.buckets.get_mut(Self::bucket_index(id)?)?.as_mut()
    }

    /// A rule by its number.
    pub fn rule(&self, number: u32) -> Option<&Rule> {
        self.rules.get(usize::try_from(number).ok()?)?.as_ref()
    }

    /// The number of the item that is called `name`.
    pub fn item_by_name(&self, name: &str) -> Option<i32> {
        self.item_names.iter().find(|(_, n)| n.as_str() == name).map(|(id, _)| *id)
    }

    /// Highest device number in any bucket, plus one.
    pub fn device_count(&self) -> usize {
        let items = self.buckets.iter().flatten().flat_map(|b| &b.items);
        items.copied().max().map_or(0, |id| usize::try_from(i64::from(id) + 1).unwrap_or(0))
    }

    /// Whether a number is a bucket made for a device class.
    pub fn is_shadow(&self, id: i32) -> bool {
        self.item_names.get(&id).is_some_and(|name| name.contains('~'))
    }

    /// Buckets that no bucket contains, by ascending number.
    pub fn roots(&self) -> Vec<i32> {
        let mut inner = vec![false; self.buckets.len()];
        for item in self.buckets.iter().flatten().flat_map(|b| &b.items) {
            if let Some(flag) = Self::bucket_index(*item).and_then(|i| inner.get_mut(i)) {
                *flag = true;
            }
        }
        let roots = self.buckets.iter().enumerate().filter(|(i, b)| b.is_some() && !inner[*i]);
        let mut roots: Vec<i32> = roots.map(|(i, _)| -1 - i as i32).collect();
        roots.sort_unstable();
        roots
    }
}
