//! What other users of the machine reach of the services.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};

use super::harness::{Cluster, TESTS, corbel, limited, text};

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
        beyond 1024: ['Too many open files in system: too many connections of this user']\n\
        coordinator.sock turned away\nnode-1.sock turned away\n"
    );
    text(&cluster.shell(2, "echo x > f").output().unwrap());
    assert_eq!(text(&cluster.shell(1, "cat f").output().unwrap()), "x\n");
}

/// In a directory of somebody else's, as `/dev/shm/corbel-0` would be if another user had made it first, nothing is put.
#[test]
fn a_cluster_is_not_put_where_others_may_write() {
    if !rustix::process::getuid().is_root() {
        return;
    }
    let dir = std::env::temp_dir().join(format!("corbel-others-{}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    for (owner, mode) in [(3002, 0o755), (0, 0o775)] {
        chown(&dir, Some(owner), None).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
        let up = ["cluster", "up", "--no-mount", "--nodes", "1", "--capacity", "64MiB", "--dir"];
        let refused = corbel(up.iter().map(std::ffi::OsStr::new).chain([dir.as_os_str()]));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.contains("others may write to it"), "{said}");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "nothing is left there");
    }
    fs::remove_dir(&dir).unwrap();
}
