//! Writes the seeds of all targets into a folder (fuzz/corpus), each into that of its target.

use std::path::Path;

use base::random::Random;

fn main() -> std::io::Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "fuzz/corpus".into());
    for target in hostile::TARGETS {
        let folder = Path::new(&folder).join(target.name);
        std::fs::create_dir_all(&folder)?;
        let mut seeds = (target.seeds)();
        let mut random = Random::new(1);
        // Scripts: any bytes are one, and small numbers are the ones that mean something.
        while seeds.len() < 8 {
            let mut bytes = vec![0; 64 << (seeds.len() % 4)];
            random.fill(&mut bytes);
            bytes.iter_mut().filter(|_| random.chance(1, 2)).for_each(|b| *b &= 15);
            seeds.push(bytes);
        }
        for (n, seed) in seeds.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{n:03}")), seed)?;
        }
    }
    Ok(())
}
