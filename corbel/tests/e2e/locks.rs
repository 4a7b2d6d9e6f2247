//! File locks that hold across the nodes of a cluster, by programs on the mounts and under
//! `corbel run`; and SQLite, which trusts its data to them.

use super::harness::{CORBEL, Cluster, TESTS, limited, text};

fn cluster() -> Option<Cluster> {
    Cluster::new(3, "128MiB")
}

/// A case of `tests/run/locks.py`.
fn check(cluster: &Cluster, case: &str) {
    let mut command = limited();
    command.arg("python3").arg(format!("{TESTS}/run/locks.py")).arg(case);
    command.arg(cluster.path("")).arg(CORBEL);
    assert_eq!(text(&command.output().expect("python starts")), "fine\n", "{case}");
}

#[test]
fn locks_hold_between_nodes_and_end_with_their_holders() {
    let Some(cluster) = cluster() else { return };
    for case in ["kinds", "waiting", "death", "deadlock"] {
        check(&cluster, case);
    }
}

#[test]
fn locks_survive_the_head() {
    let Some(cluster) = cluster() else { return };
    check(&cluster, "failover");
}

#[test]
fn a_mount_gets_its_locks_back_from_a_restarted_service() {
    let Some(cluster) = cluster() else { return };
    check(&cluster, "restart");
}

/// One database, written at once through two mounts and under `corbel run` on the third node.
#[test]
fn sqlite_on_three_nodes_loses_nothing() {
    let Some(cluster) = cluster() else { return };
    let program = "import sqlite3, sys
db = sqlite3.connect('db', timeout=60, isolation_level=None)
db.execute('create table if not exists t (who text, n integer)')
db.execute('create table if not exists sum (n integer)')
for n in range(20):
    db.execute('begin immediate')
    db.execute('insert into t values (?, ?)', (sys.argv[1], n))
    before = db.execute('select count(*) from sum').fetchone()[0]
    db.execute('insert into sum values (?)', (before + 1,))
    db.execute('commit')";
    let children: Vec<_> = (1..=3)
        .map(|node| {
            let mut command =
                if node == 3 { cluster.hooked(node, &[]) } else { cluster.native(node) };
            command.args(["python3", "-c", program]).arg(node.to_string());
            command.spawn().expect("python starts")
        })
        .collect();
    for mut child in children {
        assert!(child.wait().expect("a child").success());
    }
    let check = "import sqlite3
db = sqlite3.connect('db')
print(db.execute('pragma integrity_check').fetchone()[0],
    db.execute('select count(*) from t').fetchone()[0],
    db.execute('select count(distinct n), max(n) from sum').fetchone())";
    for node in 1..=3 {
        let said = cluster.native(node).args(["python3", "-c", check]).output();
        let said = text(&said.expect("python starts"));
        assert_eq!(said, "ok 60 (60, 60)\n", "node {node}");
    }
}
