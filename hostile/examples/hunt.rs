//! Random input without a nightly toolchain: `hunt SECONDS [SEED] [TARGET…]` changes what is kept in
//! `fuzz/corpus` at random and feeds it to each target for so long. What makes one panic is left in
//! `fuzz/artifacts/TARGET`, and the program ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use base::random::Random;
use hostile::{TARGETS, Target};

/// What is being tried: for the panic hook.
static TRIED: Mutex<(&str, Vec<u8>)> = Mutex::new(("", Vec::new()));
/// An input that takes longer is as bad as a panic.
const PATIENCE: Duration = Duration::from_secs(20);
const BYTES_MAX: usize = 4096;

fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let folder = Path::new("fuzz/corpus").join(target.name);
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = files.map(|entry| entry.path()).collect();
    paths.sort();
    let mut all: Vec<Vec<u8>> = paths.iter().filter_map(|path| fs::read(path).ok()).collect();
    all.extend((target.seeds)());
    all
}

fn change(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    let at = random.below(bytes.len() as u64 + 1) as usize;
    let odd = [0, 1, 2, 0x7f, 0x80, 0xff, b'l', b's'];
    let byte = match random.below(3) {
        0 => odd[random.below(8) as usize],
        1 => random.below(24) as u8,
        _ => random.next_u64() as u8,
    };
    match random.below(8) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, byte),
        2 if at < bytes.len() => {
            bytes.remove(at);
        }
        3 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        4 => {
            let from = random.below(other.len() as u64 + 1) as usize;
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        5 => {
            let more = random.below(24);
            (0..more).for_each(|_| bytes.insert(at, random.next_u64() as u8));
        }
        _ if at < bytes.len() => bytes[at] = byte,
        _ => bytes.push(byte),
    }
}

fn hunt(target: &Target, time: Duration, random: &mut Random) -> u64 {
    let corpus = corpus(target);
    let (start, mut runs) = (Instant::now(), 0);
    while start.elapsed() < time {
        let pick = |random: &mut Random| &corpus[random.below(corpus.len() as u64) as usize];
        let mut bytes = if random.chance(1, 6) {
            let mut fresh = vec![0; random.below(600) as usize];
            random.fill(&mut fresh);
            fresh
        } else {
            pick(random).clone()
        };
        for _ in 0..random.below(12) {
            let other = pick(random).clone();
            change(random, &mut bytes, &other);
        }
        bytes.truncate(BYTES_MAX);
        if let Ok(mut tried) = TRIED.lock() {
            *tried = (target.name, bytes.clone());
        }
        let one = Instant::now();
        (target.body)(&bytes);
        assert!(one.elapsed() < PATIENCE, "an input takes {:?}", one.elapsed());
        runs += 1;
    }
    runs
}

fn keep() {
    let Ok(tried) = TRIED.try_lock() else { return };
    let folder = Path::new("fuzz/artifacts").join(tried.0);
    let path = folder.join(format!("panic-{:08x}", base::crc32c(0, &tried.1)));
    if fs::create_dir_all(&folder).and_then(|()| fs::write(&path, &tried.1)).is_ok() {
        eprintln!("the input is in {}", path.display());
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let seconds = args.next().and_then(|text| text.parse().ok()).unwrap_or(5);
    let mut random = Random::new(args.next().and_then(|text| text.parse().ok()).unwrap_or(1));
    let wanted: Vec<String> = args.collect();
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        keep();
        report(info);
    }));
    for target in TARGETS.iter().filter(|t| wanted.is_empty() || wanted.iter().any(|w| w == t.name))
    {
        let runs = hunt(target, Duration::from_secs(seconds), &mut random);
        println!("{}: {runs} runs in {seconds} s", target.name);
    }
}
