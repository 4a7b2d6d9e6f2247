//! What a file system costs a program, call by call: `latency DIR...` prints the median and the
//! minimum in nanoseconds of the same calls in each directory.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

const ROUNDS: usize = 4000;

/// Minimum and median of `body`'s duration.
fn time(mut body: impl FnMut(usize)) -> (u128, u128) {
    let mut took: Vec<u128> = (0..ROUNDS)
        .map(|round| {
            let start = Instant::now();
            body(round);
            start.elapsed().as_nanos()
        })
        .collect();
    took.sort_unstable();
    (took[0], took[ROUNDS / 2])
}

fn measure(dir: &Path) -> std::io::Result<Vec<(&'static str, (u128, u128))>> {
    let path = dir.join("latency-file");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    let mut block = [7u8; 4096];
    for i in 0..64 {
        file.write_all_at(&block, i * 4096)?;
    }
    let at = |round: usize| (round % 64) as u64 * 4096;
    let made = dir.join("latency-made");
    let rows = vec![
        ("fstat", time(|_| drop(file.metadata()))),
        ("stat(path)", time(|_| drop(fs::metadata(&path)))),
        ("pread 4K", time(|round| drop(file.read_at(&mut block, at(round))))),
        ("pwrite 4K", time(|round| drop(file.write_at(&[1u8; 4096], at(round))))),
        ("open+close", time(|_| drop(File::open(&path)))),
        (
            "create+close+unlink",
            time(|_| {
                drop(File::create(&made));
                let _ = fs::remove_file(&made);
            }),
        ),
    ];
    fs::remove_file(&path)?;
    Ok(rows)
}

fn main() -> std::io::Result<()> {
    for dir in std::env::args().skip(1) {
        println!("{dir}");
        for (name, (min, median)) in measure(Path::new(&dir))? {
            println!("  {name:<20} min {min:>7}  median {median:>7}");
        }
    }
    Ok(())
}
