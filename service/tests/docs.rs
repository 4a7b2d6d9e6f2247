//! Tables of docs/ are those in the code.

use std::path::Path;

use service::core::limits::Limits;
use service::core::message;
use service::core::stage::{STAGES, table};

#[test]
fn docs_show_the_stages_as_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_to_string(root.join("../docs/service.md")).expect("docs/service.md");
    assert!(docs.contains(&table()), "docs/service.md is to have this table:\n{}", table());
    for stage in &STAGES {
        let file = root.join(format!("src/core/stage/{}.rs", stage.name));
        assert!(file.exists(), "{} has no file", stage.name);
    }
}

#[test]
fn the_table_names_the_limits_that_are_shipped() {
    let of = |name: &str| STAGES.iter().find(|s| s.name == name).map_or("", |s| s.bound);
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let kib = |bytes: u64| format!("{} KiB", bytes >> 10);
    let l = Limits::SHIPPED;
    for (stage, figure, limit) in [
        ("fetch", mib(l.fetch_bytes as u64), "fetch_bytes"),
        ("fetch", kib(l.forward_bytes as u64), "forward_bytes"),
        ("order", mib(storage::limits::CHUNK_BYTES_MAX as u64), "CHUNK_BYTES_MAX"),
        ("keep", format!("{} chunks", l.stash), "stash"),
        ("keep", mib(l.behind_bytes as u64), "behind_bytes"),
        ("keep", mib(l.piece_bytes as u64), "piece_bytes"),
        ("send", kib(l.shared_window), "shared_window"),
        ("apply", mib(l.recent_bytes as u64), "recent_bytes"),
        ("publish", mib(l.publish_bytes), "publish_bytes"),
    ] {
        let bound = of(stage);
        assert!(bound.contains(&figure) && bound.contains(limit), "{stage}: {limit} is {figure}");
    }
    for stage in STAGES.iter().filter(|stage| stage.run_by.contains("service.inline")) {
        assert!(stage.run_by.contains(&kib(l.inline_bytes as u64)), "{}", stage.name);
    }
}

#[test]
fn docs_show_the_messages_as_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_to_string(root.join("../docs/protocol.md")).expect("docs/protocol.md");
    let table = message::table();
    assert!(docs.contains(&table), "docs/protocol.md is to have this table:\n{table}");
}
