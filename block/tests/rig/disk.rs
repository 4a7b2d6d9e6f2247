//! What is written to a disk, beside a model of it.

use base::random::Random;
use block::device::Disk;

/// Random writes and zeroes.
pub fn work(disk: &dyn Disk, model: &mut [u8], random: &mut Random, count: usize) {
    let size = model.len() as u64;
    for _ in 0..count {
        let from = random.below(size / 512) * 512;
        let longest = if random.chance(1, 4) { 300 } else { 20 };
        let len = ((1 + random.below(longest)) * 512).min(size - from);
        let range = from as usize..(from + len) as usize;
        if random.chance(1, 6) {
            model[range].fill(0);
            disk.zero(from, len, false).unwrap();
        } else {
            random.fill(&mut model[range.clone()]);
            disk.write(from, &model[range]).unwrap();
        }
    }
}

/// All that it holds is what the model does.
pub fn check(disk: &dyn Disk, model: &[u8]) {
    let mut all = vec![0; model.len()];
    disk.read(0, &mut all).unwrap();
    assert_eq!(all.iter().zip(model).position(|(a, b)| a != b), None);
    // And in pieces, which take other ways.
    for at in (0..model.len() - 8192).step_by(50_000) {
        let mut piece = vec![0; 6000];
        disk.read(at as u64, &mut piece).unwrap();
        assert!(piece == model[at..at + 6000], "at {at}");
    }
}
