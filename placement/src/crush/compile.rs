//! Reading crushtool's text form.
//!
//! ```text
//! map     = { tunable | device | type } { bucket | rule } { choose_args }
//! tunable = "tunable" name number            device = "device" number name [ "class" name ]
//! type    = "type" number name
//! bucket  = name name "{" { "id" number [ "class" name ] } "alg" name { "hash" ( number | name ) }
//!           { "item" name [ "weight" real ] [ "pos" number ] } "}"
//! rule    = "rule" [ name ] "{" ( "id" | "ruleset" ) number "type" name
//!           [ "min_size" number ] [ "max_size" number ] { "step" … } "}"
//! choose_args = "choose_args" number "{" { "{" "bucket_id" number
//!           [ "weight_set" "[" { "[" { real } "]" } "]" ] [ "ids" "[" { number } "]" ] "}" } "}"
//! ```
//! A `#` begins a comment. This file makes syntax of the text; `assemble` makes a map of that.

use super::decompile::is_name;
use super::error::{Error, Result};
use super::map::CHOOSE_ARGS_DEFAULT;

/// Where something was, for errors.
pub(super) type Line = usize;

/// `item name weight w pos p`.
#[derive(Debug)]
pub(super) struct ItemText {
    pub line: Line,
    pub name: String,
    pub weight: Option<f32>,
    pub position: Option<usize>,
}

/// A bucket as written.
#[derive(Debug)]
pub(super) struct BucketText {
    pub line: Line,
    pub kind: String,
    pub name: String,
    pub id: Option<i32>,
    pub class_ids: Vec<(String, i32)>,
    pub algorithm: String,
    pub hash: u8,
    pub items: Vec<ItemText>,
}

/// A step as written: its words after `step`.
#[derive(Debug)]
pub(super) struct StepText {
    pub line: Line,
    pub words: Vec<String>,
}

/// A rule as written.
#[derive(Debug)]
pub(super) struct RuleText {
    pub line: Line,
    pub name: Option<String>,
    pub number: i32,
    pub kind: String,
    pub min_size: i32,
    pub max_size: i32,
    pub steps: Vec<StepText>,
}

/// One bucket's stand-in weights as written.
#[derive(Debug)]
pub(super) struct ArgText {
    pub line: Line,
    pub bucket: i32,
    pub weight_sets: Vec<Vec<f32>>,
    pub ids: Vec<i32>,
}

/// What stands at the outermost level, in order.
#[derive(Debug)]
pub(super) enum Part {
    Tunable { line: Line, name: String, value: i32 },
    Device { line: Line, id: i32, name: String, class: Option<String> },
    Type { id: i32, name: String },
    Bucket(BucketText),
    Rule(RuleText),
    ChooseArgs { line: Line, pool: i64, args: Vec<ArgText> },
}

/// Parses a whole text.
pub(super) fn parse(text: &str) -> Result<Vec<Part>> {
    let tokens = tokenize(text)?;
    let mut parser = Parser { tokens: &tokens, at: 0 };
    let mut parts = Vec::new();
    // The order of sections is part of the grammar.
    let mut section = 0;
    while let Some(word) = parser.peek() {
        let (rank, part) = match word {
            "tunable" => (0, parser.tunable()?),
            "device" => (0, parser.device()?),
            "type" => (0, parser.kind()?),
            "rule" => (1, Part::Rule(parser.rule()?)),
            "choose_args" => (2, parser.choose_args()?),
            _ => (1, Part::Bucket(parser.bucket()?)),
        };
        if rank < section {
            return parser.wrong("tunables, devices and types come first, choose_args last");
        }
        section = rank;
        parts.push(part);
    }
    Ok(parts)
}

struct Token<'a> {
    line: Line,
    text: &'a str,
}

fn tokenize(text: &str) -> Result<Vec<Token<'_>>> {
    let mut tokens = Vec::new();
    for (index, full) in text.lines().enumerate() {
        let line = index + 1;
        let code = full.split('#').next().unwrap_or("");
        let mut rest = code.trim_start();
        while let Some(first) = rest.chars().next() {
            let len = match first {
                '{' | '}' | '[' | ']' => 1,
                _ => rest
                    .find(|c: char| c.is_whitespace() || "{}[]".contains(c))
                    .unwrap_or(rest.len()),
            };
            tokens.push(Token { line, text: &rest[..len] });
            rest = rest[len..].trim_start();
        }
    }
    Ok(tokens)
}

struct Parser<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
}

impl<'a> Parser<'a> {
    fn line(&self) -> Line {
        let last = self.tokens.last().map_or(1, |t| t.line);
        self.tokens.get(self.at).map_or(last, |t| t.line)
    }

    fn wrong<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(Error::Text { line: self.line(), what: what.into() })
    }

    fn peek(&self) -> Option<&'a str> {
        self.tokens.get(self.at).map(|t| t.text)
    }

    fn next(&mut self, what: &str) -> Result<&'a str> {
        match self.tokens.get(self.at) {
            Some(token) => {
                self.at += 1;
                Ok(token.text)
            }
            None => self.wrong(format!("{what} expected, the text ends")),
        }
    }

    fn accept(&mut self, word: &str) -> bool {
        let found = self.peek() == Some(word);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        match self.peek() {
            Some(found) if found != word => self.wrong(format!("'{word}' expected, not '{found}'")),
            _ => self.next(&format!("'{word}'")).map(|_| ()),
        }
    }

    fn name(&mut self, what: &str) -> Result<String> {
        match self.peek() {
            Some(word) if !is_name(word) => self.wrong(format!("{what} expected, not '{word}'")),
            _ => self.next(what).map(str::to_owned),
        }
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Result<T> {
        match self.peek().map(str::parse) {
            Some(Ok(value)) => {
                self.at += 1;
                Ok(value)
            }
            found => {
                let found = found.and(self.peek()).unwrap_or("the end");
                self.wrong(format!("{what} (a number in range) expected, not '{found}'"))
            }
        }
    }

    fn weight(&mut self) -> Result<f32> {
        let line = self.line();
        let weight: f32 = self.number("a weight")?;
        if !(0.0..65_536.0).contains(&weight) {
            return Err(Error::Text { line, what: format!("weight {weight} is not 0 to 65,535") });
        }
        Ok(weight)
    }

    fn tunable(&mut self) -> Result<Part> {
        let line = self.line();
        self.expect("tunable")?;
        Ok(Part::Tunable { line, name: self.name("a tunable")?, value: self.number("its value")? })
    }

    fn device(&mut self) -> Result<Part> {
        let line = self.line();
        self.expect("device")?;
        let (id, name) = (self.number("a device number")?, self.name("a device name")?);
        let class = if self.accept("class") { Some(self.name("a class")?) } else { None };
        Ok(Part::Device { line, id, name, class })
    }

    fn kind(&mut self) -> Result<Part> {
        self.expect("type")?;
        let line = self.line();
        let id: i32 = self.number("a type number")?;
        if !(0..=i32::from(u16::MAX)).contains(&id) {
            return Err(Error::Text { line, what: format!("type {id} is not 0 to 65,535") });
        }
        Ok(Part::Type { id, name: self.name("a type name")? })
    }

    fn bucket(&mut self) -> Result<BucketText> {
        let line = self.line();
        let mut bucket = BucketText {
            line,
            kind: self.name("a bucket type")?,
            name: self.name("a bucket name")?,
            id: None,
            class_ids: Vec::new(),
            algorithm: String::new(),
            hash: 0,
            items: Vec::new(),
        };
        self.expect("{")?;
        while self.accept("id") {
            let id: i32 = self.number("a bucket number")?;
            if id >= 0 {
                return self.wrong(format!("bucket number {id} is not negative"));
            }
            if self.accept("class") {
                bucket.class_ids.push((self.name("a class")?, id));
            } else {
                bucket.id = Some(id);
            }
        }
        self.expect("alg")?;
        bucket.algorithm = self.name("a bucket algorithm")?;
        while self.accept("hash") {
            bucket.hash =
                if self.accept("rjenkins1") { 0 } else { self.number("a hash function")? };
        }
        while self.peek() == Some("item") {
            bucket.items.push(self.item()?);
        }
        self.expect("}")?;
        Ok(bucket)
    }

    fn item(&mut self) -> Result<ItemText> {
        let line = self.line();
        self.expect("item")?;
        let name = self.name("an item name")?;
        let weight = if self.accept("weight") { Some(self.weight()?) } else { None };
        let position = if self.accept("pos") { Some(self.number("a position")?) } else { None };
        Ok(ItemText { line, name, weight, position })
    }

    fn rule(&mut self) -> Result<RuleText> {
        let line = self.line();
        self.expect("rule")?;
        let name = if self.peek() == Some("{") { None } else { Some(self.name("a rule name")?) };
        self.expect("{")?;
        if !self.accept("id") {
            self.expect("ruleset")?;
        }
        let number = self.number("a rule number")?;
        self.expect("type")?;
        let kind = self.name("a rule type")?;
        let min_size = if self.accept("min_size") { self.number("min_size")? } else { 1 };
        let max_size = if self.accept("max_size") { self.number("max_size")? } else { 100 };
        let mut steps = Vec::new();
        while self.peek() == Some("step") {
            let line = self.line();
            self.at += 1;
            let mut words = Vec::new();
            while let Some(word) = self.peek().filter(|w| !matches!(*w, "step" | "}")) {
                words.push(word.to_owned());
                self.at += 1;
            }
            steps.push(StepText { line, words });
        }
        self.expect("}")?;
        Ok(RuleText { line, name, number, kind, min_size, max_size, steps })
    }

    fn choose_args(&mut self) -> Result<Part> {
        let line = self.line();
        self.expect("choose_args")?;
        let pool: u64 = self.number("a pool number")?;
        let pool = i64::try_from(pool).unwrap_or(CHOOSE_ARGS_DEFAULT);
        self.expect("{")?;
        let mut args = Vec::new();
        while self.accept("{") {
            let line = self.line();
            self.expect("bucket_id")?;
            let bucket = self.number("a bucket number")?;
            let (mut weight_sets, mut ids) = (Vec::new(), Vec::new());
            if self.accept("weight_set") {
                self.expect("[")?;
                while self.accept("[") {
                    let mut weights = Vec::new();
                    while !self.accept("]") {
                        weights.push(self.weight()?);
                    }
                    weight_sets.push(weights);
                }
                self.expect("]")?;
            }
            if self.accept("ids") {
                self.expect("[")?;
                while !self.accept("]") {
                    ids.push(self.number("an item number")?);
                }
            }
            self.expect("}")?;
            args.push(ArgText { line, bucket, weight_sets, ids });
        }
        self.expect("}")?;
        Ok(Part::ChooseArgs { line, pool, args })
    }
}
