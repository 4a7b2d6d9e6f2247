//! Compares ten million mappings and more with Ceph's own tools: the long form of tests/crush.
//!
//! `cargo run --release -p placement --example crush_compare [-- MAPPINGS]`

#[path = "../tests/crush/ceph.rs"]
mod ceph;
#[path = "../tests/crush/corpus.rs"]
mod corpus;

use ceph::{Scratch, Tally};
use placement::crush::{Engine, Options};

fn main() {
    let wanted: u64 = std::env::args().nth(1).map_or(10_500_000, |n| n.parse().expect("a number"));
    for tool in ["crushtool", "osdmaptool"] {
        assert!(ceph::is_there(tool), "{tool} is not installed (Debian: ceph-base)");
    }
    let dir = Scratch::new("compare");
    let mut total = Tally::default();
    let mut cases = 0;
    while total.mappings < wanted {
        let case = corpus::case(cases);
        let engine = Engine::ALL[cases % 3];
        let engine = Some(engine).filter(|e| e.is_available());
        let options = Options { engine, choose_args: None, ..Options::default() };
        let inputs = if cases < 10 { 60_000 } else { 2_500 };
        let tally = ceph::compare(&case, &options, inputs, &dir.0);
        total.add(tally);
        if tally.different > 0 || cases % 25 == 0 {
            println!("{}: {} of {}", case.name, tally.different, tally.mappings);
        }
        cases += 1;
    }
    println!("crushtool: {cases} maps, {} mappings, {} different", total.mappings, total.different);
    let mut groups = Tally::default();
    // osdmaptool --mark-up-in gives devices without weight one, so that those maps are left out.
    let weighted = |case: &corpus::Case| {
        let buckets = case.map.buckets.iter().flatten();
        !buckets.flat_map(|b| b.item_weights()).any(|weight| weight == 0)
    };
    for mut case in (0..60).map(corpus::case).filter(|c| c.reweights.len() > 3 && weighted(c)) {
        case.map.choose_args.clear();
        groups.add(ceph::compare_osdmap(&case, &Options::default(), 6, &dir.0));
    }
    println!("osdmaptool: {} groups, {} different", groups.mappings, groups.different);
    std::process::exit(i32::from(total.different + groups.different > 0));
}
