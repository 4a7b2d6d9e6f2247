//! How fast placement groups are mapped: those of all pools of a map that `ceph osd getmap` wrote, in one thread.
//! `cargo run --release -p rados --example osdmap_bench MAP`; beside it `osdmaptool MAP --test-map-pgs`.

use std::time::Instant;

use rados::osdmap::{Mapper, OsdMap};

fn main() {
    let file = std::env::args().nth(1).expect("osdmap_bench MAP");
    let map = OsdMap::decode(&std::fs::read(file).expect("a file")).expect("a map");
    let mut mapper = Mapper::new(&map).expect("a map that makes sense");
    let mut best = f64::MAX;
    let mut pgs = 0;
    for _ in 0..3 {
        let begun = Instant::now();
        pgs = 0;
        for (number, pool) in &map.pools {
            let seeds: Vec<u32> = (0..pool.pg_num).collect();
            pgs += mapper.map(*number, &seeds).expect("it maps").len();
        }
        best = best.min(begun.elapsed().as_secs_f64());
    }
    println!("{pgs} placement groups in {best:.3} s: {:.0} a second", pgs as f64 / best);
}
