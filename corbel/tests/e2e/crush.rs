//! `corbel crush` as a person uses it, on the maps and answers of crushtool that the placement
//! crate keeps.

use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use super::harness::{Scratch, corbel, json};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../placement/tests/crush/golden").join(name)
}

fn crush(args: &[&str]) -> Output {
    corbel(["crush"].iter().chain(args))
}

fn answer(args: &[&str]) -> (Option<i32>, Value) {
    let output = crush(&[&["--json"], args].concat());
    (output.status.code(), json(&output))
}

fn file(scratch: &Scratch, name: &str) -> String {
    scratch.path(name).display().to_string()
}

#[test]
fn a_text_becomes_a_map_and_a_text_again() {
    let scratch = Scratch::new();
    let (text, binary) = (golden("mixed.txt").display().to_string(), file(&scratch, "map"));
    let (code, made) = answer(&["compile", &text, "--out", &binary]);
    assert_eq!(code, Some(0), "{made}");
    assert_eq!((&made["devices"], &made["rules"]), (&Value::from(15), &Value::from(4)));
    assert_eq!(made["bytes"], std::fs::metadata(&binary).unwrap().len());

    let wanted = std::fs::read_to_string(golden("mixed.decompiled.txt")).unwrap();
    for source in [&binary, &text] {
        let shown = crush(&["decompile", source]);
        assert!(shown.status.success(), "{shown:?}");
        assert_eq!(String::from_utf8_lossy(&shown.stdout), wanted, "{source}");
    }
    let file = file(&scratch, "again");
    let quiet = crush(&["decompile", &binary, "--out", &file]);
    assert!(quiet.status.success() && quiet.stdout.is_empty(), "{quiet:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), wanted);
}

#[test]
fn mappings_are_those_that_crushtool_printed() {
    let map = golden("straw2.bin").display().to_string();
    let answers = std::fs::read_to_string(golden("straw2.mappings")).unwrap();
    let mut compared = 0;
    for (rule, replicas) in [("0", "1"), ("0", "3"), ("1", "3")] {
        let theirs: Vec<(&str, &str)> = answers
            .lines()
            .filter_map(|line| line.strip_prefix(&format!("{rule} {replicas} ")))
            .filter_map(|rest| rest.split_once(' '))
            .collect();
        let Some((last, _)) = theirs.last() else { continue };
        let args = ["test", &map, "--rule", rule, "--num-rep", replicas, "--max-x", last];
        let shown = ["--weight", "4=0", "--weight", "11=0.4", "--show-mappings"];
        let output = crush(&[&args[..], &shown].concat());
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        for (x, items) in theirs {
            let line = format!("CRUSH rule {rule} x {x} {}", items.replace(',', ", "));
            assert!(text.lines().any(|l| l == line), "{line} is not in {text}");
            compared += 1;
        }
    }
    assert!(compared >= 60, "{compared}");
}

#[test]
fn a_device_that_leaves_gives_away_what_it_had() {
    let map = golden("straw2.bin").display().to_string();
    let (code, said) = answer(&["test", &map, "--leave", "7"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!((&said["inputs"], &said["bad_mappings"]), (&Value::from(1024), &Value::from(0)));
    let had = &said["devices"][7]["placements"];
    let movement = &said["movement"];
    let moves = movement["by_device"].as_array().unwrap();
    let own = moves.iter().find(|m| m["device"] == 7).unwrap();
    assert_eq!((&own["from"], &own["to"]), (had, &Value::from(0)), "{movement}");
    assert!(movement["moved"].as_u64() >= had.as_u64() && had.as_u64() > Some(0), "{movement}");

    // The same maps: nothing moves.
    let (_, same) = answer(&["test", &map, "--against", &map]);
    assert_eq!(same["movement"]["moved"], 0, "{same}");
}

#[test]
fn wrong_maps_and_numbers_are_refused_by_name() {
    let scratch = Scratch::new();
    let map = golden("straw2.bin").display().to_string();
    let (cut, bad, no) = (file(&scratch, "cut"), file(&scratch, "bad.txt"), file(&scratch, "none"));
    let whole = std::fs::read(&map).unwrap();
    std::fs::write(&cut, &whole[..300]).unwrap();
    std::fs::write(&bad, "device x osd.0\n").unwrap();
    let cases: [(&[&str], &str, &str); 8] = [
        (&["decompile", &cut], "damaged", "byte 296"),
        (&["compile", &bad, "--out", &no], "config", "line 1"),
        (&["test", &no], "failed", "No such file"),
        (&["test", &map, "--rule", "77"], "usage", "rule 77"),
        (&["test", &map, "--weight", "1=7"], "usage", "1=7"),
        (&["test", &map, "--weight", "99=1"], "usage", "device 99"),
        (&["test", &map, "--replicas", "100000"], "usage", "1024"),
        (&["test", &map, "--engine", "abacus"], "usage", "abacus"),
    ];
    for (args, word, message) in cases {
        let (code, said) = answer(args);
        assert_ne!(code, Some(0), "{args:?}");
        assert_eq!(said["error"]["code"], word, "{args:?}");
        assert!(said["error"]["message"].as_str().unwrap().contains(message), "{said}");
        assert!(!said["error"]["remedy"].as_str().unwrap().is_empty(), "{said}");
    }
    assert!(!Path::new(&no).exists(), "a text that was refused left a map");
}
