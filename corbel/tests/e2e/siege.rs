//! The siege of the crate `hostile`: whatever a local user tries on a cluster that runs, it comes to nothing, and everybody else is
//! served meanwhile.

use std::process::Command;

use super::harness::{Cluster, built, json};

/// Far more than it takes, on a busy machine.
const LIMIT: &str = "600";

#[test]
fn nothing_that_a_stranger_tries_comes_to_anything() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(cluster) = Cluster::new(2, "256MiB") else { return };
    let epochs = || [1, 2].map(|node| cluster.status(node)["epoch"].as_u64());
    // On a machine that is busy with other things a node is silent for too long now and then, and ends all its clients: what is
    // seen then says nothing. What an attack does happens each time.
    let mut tries = 3;
    let (output, said) = loop {
        let before = epochs();
        assert!(before[0].is_some(), "a node says its epoch");
        let mut command = Command::new("timeout");
        command.arg(LIMIT).arg(built("hostile", "corbel-siege")).arg(cluster.path(""));
        let output = command.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        tries -= 1;
        if epochs() == before {
            break (output, said);
        }
        assert!(tries > 0, "a node loses its place each time: {said}");
    };
    let figures = json(&output);
    assert!(figures["attacks"].as_u64().is_some_and(|n| n >= 40), "{said}");
    let bad: Vec<&str> =
        said.lines().filter(|l| l.contains("SUCCEEDED") || l.contains("UNTRIED")).collect();
    assert!(bad.is_empty(), "{bad:#?} of\n{said}");
    assert_eq!((&figures["succeeded"], &figures["untried"]), (&0.into(), &0.into()), "{said}");
}
