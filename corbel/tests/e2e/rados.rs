//! `corbel rados map` on maps of a real cluster that the crate rados keeps, with what Ceph's tool says of them.

use std::path::Path;

use serde_json::Value;

use super::harness::{Scratch, corbel, json};

fn real(name: &str) -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../rados/tests/osdmap");
    dir.join(name).display().to_string()
}

fn answer(args: &[&str]) -> (Option<i32>, Value) {
    let output = corbel(["--json", "rados", "map"].iter().chain(args));
    (output.status.code(), json(&output))
}

/// A list and its primary, as Ceph's tool prints them.
fn shown(osds: &Value, primary: &Value) -> String {
    let osds = osds.as_array().unwrap().iter();
    let osds: Vec<String> =
        osds.map(|osd| osd.as_i64().unwrap_or(2_147_483_647).to_string()).collect();
    format!("([{}], p{})", osds.join(","), primary.as_i64().unwrap_or(-1))
}

#[test]
fn placement_groups_lie_where_ceph_says() {
    let told = std::fs::read_to_string(real("down.mapped")).unwrap();
    for (pool, number) in [("ecpool", 6), ("three", 7), ("two", 8)] {
        let what = format!("rados:{pool}");
        let (code, found) = answer(&[&what, "--list", "--osdmap", &real("down.map")]);
        assert_eq!(code, Some(0), "{found}");
        assert_eq!(found["pool_id"], number);
        let ours = found["mapped"].as_array().unwrap().iter().map(|one| {
            let up = shown(&one["up"], &one["up_primary"]);
            let acting = shown(&one["acting"], &one["acting_primary"]);
            format!("{} up {up} acting {acting}", one["pg"].as_str().unwrap())
        });
        let prefix = format!("{number}.");
        let theirs = told.lines().filter(|line| line.starts_with(&prefix));
        assert_eq!(ours.collect::<Vec<_>>(), theirs.collect::<Vec<_>>());
        // What lies on OSDs adds up.
        let listed: usize = found["mapped"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| {
                one["acting"].as_array().unwrap().iter().filter(|osd| !osd.is_null()).count()
            })
            .sum();
        let copies: u64 = found["osds"]
            .as_array()
            .unwrap()
            .iter()
            .map(|osd| osd["copies"].as_u64().unwrap())
            .sum();
        assert_eq!(copies, listed as u64);
        assert!(found["copies_max_over_mean"].as_f64().unwrap() >= 1.0);
    }
}

#[test]
fn objects_are_in_the_groups_that_ceph_says() {
    let map = real("down.map");
    // As `ceph osd map` said of this cluster.
    for (what, pg) in [("rados:rbd", "5.0"), ("rados:rbd/ns1", "5.2"), ("rados:rbd//foo", "5.")] {
        let (code, found) = answer(&[what, "foo.bar", "--osdmap", &map]);
        assert_eq!(code, Some(0), "{found}");
        let one = &found["mapped"][0];
        assert!(one["pg"].as_str().unwrap().starts_with(pg), "{found}");
        assert_eq!((&found["objects"], &found["pgs"]), (&Value::from(1), &Value::from(1)));
    }
    let (_, found) = answer(&["rados:rbd//a/b", "x", "--osdmap", &map]);
    assert_eq!(found["mapped"][0]["object"], "a/b/x");
    let text = corbel(["rados", "map", "rados:rbd", "foo.bar", "--osdmap", &map]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("foo.bar  5.0") && text.contains("most / mean"), "{text}");
}

#[test]
fn what_is_wrong_is_said() {
    let (map, scratch) = (real("down.map"), Scratch::new());
    let damaged = scratch.path("damaged");
    let mut bytes = std::fs::read(&map).unwrap();
    bytes[200] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let damaged = damaged.display().to_string();
    for (args, exit, code) in [
        (&["rados:none", "--osdmap", &map][..], 1, "failed"),
        (&["rbd:rbd/disk", "--osdmap", &map][..], 2, "usage"),
        (&["pool", "--osdmap", &map][..], 2, "usage"),
        (&["rados:rbd?reads=all", "--osdmap", &map][..], 2, "usage"),
        (&["rados:rbd/ns&reads=balance", "--osdmap", &map][..], 2, "usage"),
        (&["rados:rbd", "--osdmap", "/dev/zero"][..], 5, "damaged"),
        (&["rados:rbd", "--osdmap", &damaged][..], 5, "damaged"),
    ] {
        let (status, said) = answer(args);
        assert_eq!((status, said["error"]["code"].as_str()), (Some(exit), Some(code)), "{said}");
    }
}
