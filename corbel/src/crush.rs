//! `corbel crush`: placement maps, as people know them from crushtool.
//!
//! A map is read in Ceph's binary form or in crushtool's text form, whichever it is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use placement::crush::{
    Engine, Error, Inputs, Map, Options, Placer, Step, Usage, limits, movement, usage,
};
use serde_json::json;

use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;

/// Verbs of `corbel crush`.
#[derive(Subcommand, Debug)]
pub enum CrushVerb {
    /// Make a binary map of a text
    #[command(after_help = "Example:\n  corbel crush compile map.txt --out map.bin")]
    Compile {
        /// Text in crushtool's form
        text: PathBuf,
        /// Where the binary map goes
        #[arg(long, short, value_name = "FILE")]
        out: PathBuf,
    },
    /// Print a map as text
    #[command(after_help = "Example:\n  corbel crush decompile map.bin > map.txt")]
    Decompile {
        /// Map
        map: PathBuf,
        /// Where the text goes instead of standard output
        #[arg(long, short, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Map a range of inputs: how devices are used, and what moves after a change
    #[command(after_help = "Examples:\n  corbel crush test map.bin --rule 0 --replicas 3\n  \
        corbel crush test map.bin --weight 7=0.5 --show-mappings\n  \
        corbel crush test map.bin --leave 7        what moves when device 7 is out\n  \
        corbel crush test old.bin --against new.bin --json")]
    Test(TestArgs),
}

/// Arguments of `corbel crush test`.
#[derive(Args, Debug)]
pub struct TestArgs {
    /// Map, binary or text
    pub map: PathBuf,
    /// Rule
    #[arg(long, default_value_t = 0)]
    pub rule: u32,
    /// Replicas (crushtool's --num-rep)
    #[arg(long, alias = "num-rep", default_value_t = 3)]
    pub replicas: usize,
    /// First input
    #[arg(long, default_value_t = 0)]
    pub min_x: u32,
    /// Last input
    #[arg(long, default_value_t = 1023)]
    pub max_x: u32,
    /// Pool whose number is hashed with each input, and whose choose_args apply
    #[arg(long)]
    pub pool: Option<u32>,
    /// Reweight of a device, 0 (out) to 1 (repeatable)
    #[arg(long, value_name = "DEVICE=WEIGHT")]
    pub weight: Vec<String>,
    /// What moves if this device leaves (repeatable)
    #[arg(long, value_name = "DEVICE", conflicts_with = "against")]
    pub leave: Vec<usize>,
    /// What moves if this device, which is out, joins (repeatable)
    #[arg(long, value_name = "DEVICE", conflicts_with = "against")]
    pub join: Vec<usize>,
    /// What moves if this map replaces the first
    #[arg(long, value_name = "MAP")]
    pub against: Option<PathBuf>,
    /// Print every mapping
    #[arg(long)]
    pub show_mappings: bool,
    /// Print mappings with fewer replicas than wanted
    #[arg(long)]
    pub show_bad_mappings: bool,
    /// Print every device
    #[arg(long)]
    pub show_utilization: bool,
    /// Which code draws straw2: portable, avx2 or avx512
    #[arg(long)]
    pub engine: Option<String>,
}

/// Runs `corbel crush …`.
pub fn run(out: &Output, verb: &CrushVerb) -> Result<()> {
    match verb {
        CrushVerb::Compile { text, out: file } => compile(out, text, file),
        CrushVerb::Decompile { map, out: file } => decompile(out, map, file.as_deref()),
        CrushVerb::Test(args) => test(out, args),
    }
}

/// Reads a map in either form.
fn read(path: &Path) -> Result<Map> {
    let bytes = std::fs::read(path).context(path.display())?;
    let failed = |error: Error| {
        let failure = Failure::from(error);
        let message = format!("{}: {}", path.display(), failure.message);
        Failure { message, ..failure }
    };
    // A binary map begins with its magic number, whose first bytes no text has.
    if bytes.starts_with(&[0, 0, 1, 0]) {
        return Map::decode(&bytes).map_err(failed);
    }
    match std::str::from_utf8(&bytes) {
        Ok(text) => Map::compile(text).map_err(failed),
        Err(_) => Map::decode(&bytes).map_err(failed),
    }
}

fn count(map: &Map) -> (usize, usize, usize) {
    let buckets = map.buckets.iter().flatten().count();
    (map.device_count(), buckets, map.rules.iter().flatten().count())
}

fn compile(out: &Output, text: &Path, file: &Path) -> Result<()> {
    let source = std::fs::read_to_string(text).context(text.display())?;
    let map = Map::compile(&source).map_err(|error| {
        let failure = Failure::from(error);
        let message = format!("{}: {}", text.display(), failure.message);
        Failure { message, ..failure }
    })?;
    let bytes = map.encode();
    std::fs::write(file, &bytes).context(file.display())?;
    let (devices, buckets, rules) = count(&map);
    let object = json!({"file": file.display().to_string(), "bytes": bytes.len(),
        "devices": devices, "buckets": buckets, "rules": rules});
    out.result(&object, || {
        println!("{}: {devices} devices, {buckets} buckets, {rules} rules", file.display());
    });
    Ok(())
}

fn decompile(out: &Output, map: &Path, file: Option<&Path>) -> Result<()> {
    let text = read(map)?.decompile()?;
    if let Some(file) = file {
        std::fs::write(file, &text).context(file.display())?;
    }
    out.result(&json!({"map": map.display().to_string(), "text": text}), || {
        if file.is_none() {
            print!("{text}");
        }
    });
    Ok(())
}

/// Reweights: in, but for what `--weight` says.
fn reweights(args: &TestArgs, devices: usize) -> Result<Vec<u32>> {
    let mut reweights = vec![0x1_0000; devices];
    for setting in &args.weight {
        let parsed = setting.split_once('=').and_then(|(device, weight)| {
            let weight: f64 = weight.parse().ok()?;
            Some((device.parse::<usize>().ok()?, weight))
        });
        let Some((device, weight)) = parsed.filter(|(_, weight)| (0.0..=1.0).contains(weight))
        else {
            return Err(Failure::new(
                Kind::Usage,
                format!("--weight {setting} is not DEVICE=0..1"),
                "for example --weight 7=0.5",
            ));
        };
        *slot(&mut reweights, device)? = (weight * 65_536.0) as u32;
    }
    Ok(reweights)
}

fn slot(reweights: &mut [u32], device: usize) -> Result<&mut u32> {
    let last = reweights.len();
    reweights.get_mut(device).ok_or_else(|| {
        Failure::new(Kind::Usage, format!("device {device} is not below {last}"), "see decompile")
    })
}

/// Weight of each device in the trees that a rule takes, for what it is entitled to.
fn device_weights(map: &Map, rule: u32) -> Vec<u64> {
    let mut weights = vec![0u64; map.device_count()];
    let takes = map.rule(rule).into_iter().flat_map(|rule| &rule.steps);
    let mut todo: Vec<i32> = takes
        .filter_map(|step| if let Step::Take(item) = step { Some(*item) } else { None })
        .collect();
    let mut seen = std::collections::BTreeSet::new();
    while let Some(id) = todo.pop() {
        let Some(bucket) = map.bucket(id).filter(|_| seen.insert(id)) else { continue };
        for (position, item) in bucket.items.iter().enumerate() {
            match usize::try_from(*item).ok().and_then(|device| weights.get_mut(device)) {
                Some(weight) => *weight += u64::from(bucket.item_weight(position)),
                None => todo.push(*item),
            }
        }
    }
    weights
}

fn options(args: &TestArgs) -> Result<Options> {
    let engine = match args.engine.as_deref().map(|name| (name, Engine::from_name(name))) {
        None => None,
        Some((_, Some(engine))) => Some(engine),
        Some((name, None)) => {
            return Err(Failure::new(
                Kind::Usage,
                format!("engine '{name}' is not known"),
                "portable, avx2 or avx512",
            ));
        }
    };
    let choose_args = Some(args.pool.map_or(0, i64::from));
    Ok(Options { engine, choose_args, ..Options::default() })
}

fn test(out: &Output, args: &TestArgs) -> Result<()> {
    let map = read(&args.map)?;
    let options = options(args)?;
    let placer = Placer::new(&map, &options)?;
    let reweights = reweights(args, map.device_count())?;
    if args.replicas > limits::RESULT_MAX {
        return Err(
            Error::Request(format!("--replicas is limited to {}", limits::RESULT_MAX)).into()
        );
    }
    let inputs = Inputs {
        rule: args.rule,
        replicas: args.replicas,
        first: args.min_x,
        last: args.max_x,
        pool: args.pool,
        reweights: &reweights,
    };
    let show = args.show_mappings && !out.json;
    let mut mappings = BTreeMap::new();
    let used = usage(&placer, &inputs, &device_weights(&map, args.rule), |x, items| {
        if show {
            println!("CRUSH rule {} x {x} {items:?}", args.rule);
        } else if args.show_mappings {
            mappings.insert(x, items.to_vec());
        }
    })?;
    let moved = match &args.against {
        None if args.leave.is_empty() && args.join.is_empty() => None,
        None => {
            let mut after = reweights.clone();
            for device in &args.leave {
                *slot(&mut after, *device)? = 0;
            }
            for device in &args.join {
                *slot(&mut after, *device)? = 0x1_0000;
            }
            Some(movement((&placer, &reweights), (&placer, &after), &inputs)?)
        }
        Some(path) => {
            let other = read(path)?;
            let after = Placer::new(&other, &options)?;
            let mut in_after = reweights.clone();
            in_after.resize(other.device_count(), 0x1_0000);
            Some(movement((&placer, &reweights), (&after, &in_after), &inputs)?)
        }
    };
    let mut object = json!({
        "rule": args.rule, "replicas": args.replicas, "inputs": used.inputs,
        "placements": used.placements, "bad_mappings": used.bad_count, "deviation": used.deviation,
        "sizes": used.sizes, "engine": placer.engine().name(),
        "devices": used.devices.iter().map(|d| json!({"device": d.device,
            "placements": d.placements, "expected": d.expected})).collect::<Vec<_>>(),
    });
    if args.show_mappings {
        object["mappings"] = json!(mappings.values().collect::<Vec<_>>());
    }
    if args.show_bad_mappings {
        object["bad"] = json!(used.bad);
    }
    if let Some(moved) = &moved {
        object["movement"] = json!({"moved": moved.moved, "reordered": moved.reordered,
            "placements": moved.placements, "changed_inputs": moved.changed_inputs,
            "by_device": moved.by_device.iter().map(|(device, from, to)|
                json!({"device": device, "from": from, "to": to})).collect::<Vec<_>>()});
    }
    out.result(&object, || {
        print_usage(args, &used);
        if let Some(m) = &moved {
            let share = m.moved as f64 * 100.0 / m.placements.max(1) as f64;
            println!(
                "movement: {} of {} replicas ({share:.3} %) move, {} change places; {} inputs",
                m.moved, m.placements, m.reordered, m.changed_inputs
            );
            for (device, from, to) in &m.by_device {
                println!("  device {device}: {from} leave, {to} arrive");
            }
        }
    });
    Ok(())
}

fn print_usage(args: &TestArgs, used: &Usage) {
    println!(
        "rule {}: {} inputs, {} replicas placed; placements / expected deviate by {:.4}",
        args.rule, used.inputs, used.placements, used.deviation
    );
    for (size, inputs) in used.sizes.iter().enumerate().filter(|(_, inputs)| **inputs > 0) {
        println!("  {size} replicas: {inputs} of {}", used.inputs);
    }
    if args.show_bad_mappings {
        for (x, items) in &used.bad {
            println!("  bad mapping rule {} x {x} {items:?}", args.rule);
        }
    }
    if args.show_utilization {
        for device in &used.devices {
            println!(
                "  device {}: stored {}, expected {:.2}",
                device.device, device.placements, device.expected
            );
        }
    }
}
