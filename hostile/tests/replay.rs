//! Every input that is kept in `fuzz/corpus`, and every seed, through the bodies of the targets: what was
//! found once stays found, without nightly.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hostile::TARGETS;

/// No input may take longer, not even on a busy machine in a debug build.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of the whole corpus.
const CORPUS_MAX: u64 = 1 << 20;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut all: Vec<PathBuf> = entries.map(|e| e.expect("an entry").path()).collect();
    all.sort();
    all
}

fn names(dir: &Path) -> BTreeSet<String> {
    let stem = |path: PathBuf| path.file_stem().map(|s| s.to_string_lossy().into_owned());
    files(dir).into_iter().filter_map(stem).collect()
}

#[test]
fn the_whole_corpus_is_survived() {
    let mut runs = 0;
    for target in TARGETS {
        let start = Instant::now();
        let kept = files(&fuzz().join("corpus").join(target.name));
        assert!(kept.len() >= 8, "{}: {} files are no corpus", target.name, kept.len());
        let kept = kept.iter().map(|path| {
            (path.display().to_string(), fs::read(path).expect("a file of the corpus"))
        });
        let seeds = (target.seeds)().into_iter().map(|seed| ("a seed".to_string(), seed));
        for (name, input) in kept.chain(seeds) {
            // Seen only if the body panics.
            println!("{}: {name}", target.name);
            let one = Instant::now();
            (target.body)(&input);
            assert!(one.elapsed() < PATIENCE, "{name} takes {:?}", one.elapsed());
            runs += 1;
        }
        println!("{}: {:?}", target.name, start.elapsed());
    }
    assert!(runs > 200, "{runs}");
}

/// Wrapper, body and corpus of each target belong together.
#[test]
fn targets_wrappers_and_corpus_agree() {
    let known: BTreeSet<String> = TARGETS.iter().map(|t| t.name.to_string()).collect();
    assert_eq!(names(&fuzz().join("fuzz_targets")), known);
    assert_eq!(names(&fuzz().join("corpus")), known);
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).expect("the manifest");
    for name in &known {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let wrapper = fuzz().join("fuzz_targets").join(format!("{name}.rs"));
        let wrapper = fs::read_to_string(wrapper).expect("a wrapper");
        assert!(wrapper.contains(&format!("hostile::run(\"{name}\", data)")), "{name}");
    }
    let mut bytes = 0;
    for name in &known {
        let size = |path: &PathBuf| fs::metadata(path).expect("a file").len();
        bytes += files(&fuzz().join("corpus").join(name)).iter().map(size).sum::<u64>();
    }
    assert!(bytes < CORPUS_MAX, "the corpus has {bytes} bytes: minimise it");
}
