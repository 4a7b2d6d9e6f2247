//! What other users of the machine reach of the services.

use super::harness::{Cluster, TESTS, limited, text};

/// Between services of one machine there are local sockets only, and only their own user and the super-user are heard there.
#[test]
fn a_cluster_on_one_machine_has_no_port_and_hears_no_stranger() {
    let Some(cluster) = Cluster::new(2, "64MiB") else { return };
    let mut command = limited();
    command.arg("python3").arg(format!("{TESTS}/run/doors.py")).arg(cluster.path(""));
    assert_eq!(
        text(&command.output().expect("python starts")),
        "ports that are not for metrics: []\n\
        coordinator.sock PermissionError\nnode-1.sock PermissionError\n\
        nicfs.status PermissionError\nhostd.sock.nicfs PermissionError\n\
        coordinator.sock turned away\nnode-1.sock turned away\n"
    );
    text(&cluster.shell(2, "echo x > f").output().unwrap());
    assert_eq!(text(&cluster.shell(1, "cat f").output().unwrap()), "x\n");
}
