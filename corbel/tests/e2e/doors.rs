//! What other users of the machine reach of the services.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};

use super::harness::{Cluster, TESTS, corbel, limited, text, wait_for};

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

/// Also when root starts them: whoever takes over what speaks to clients and peers is not root of the machine.
#[test]
fn services_of_root_give_its_rights_up() {
    if !rustix::process::getuid().is_root() {
        return;
    }
    let Some(cluster) = Cluster::new(2, "64MiB") else { return };
    for service in ["n1/run/serve", "n1/run/nicfs", "n1/run/hostd", "coordinator/coordinator"] {
        let pid = fs::read_to_string(cluster.path(&format!("{service}.pid"))).unwrap();
        let pid = pid.split_whitespace().next().unwrap();
        for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let line = |name: &str| {
                let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
                line.trim_start_matches(':').trim().to_owned()
            };
            // Priorities, where the limits of them cannot be raised.
            const SYS_NICE: u64 = 1 << 23;
            for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                let has = u64::from_str_radix(&line(set), 16).unwrap();
                assert_eq!(has & !SYS_NICE, 0, "{service}: {status}");
            }
            assert_eq!(line("NoNewPrivs"), "1", "{service}");
        }
    }
}

/// As the units run them: as a user that has nothing but its files, without any capability. What clients may is judged by who
/// they are all the same: the super-user's file is the super-user's.
#[test]
fn services_need_no_capability_to_serve_root_and_others() {
    if !rustix::process::getuid().is_root() {
        return;
    }
    let dir = std::env::temp_dir().join(format!("corbel-bare-{}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    chown(&dir, Some(3003), Some(3003)).unwrap();
    let home = dir.join("c");
    let bare = |user: &str, args: &[&str]| {
        let mut command = limited();
        command.args(["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]);
        command.args(["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]);
        let done = command.args(args).env("HOME", &dir).current_dir("/").output();
        done.expect("setpriv starts (util-linux)")
    };
    // The program where that user reaches it.
    let program = dir.join("corbel");
    fs::copy(super::harness::CORBEL, &program).unwrap();
    fs::copy(super::harness::library(), dir.join("libintercept.so")).unwrap();
    let (program, home_text) = (program.to_str().unwrap(), home.to_str().unwrap());
    let up =
        [program, "cluster", "up", "--no-mount", "--nodes", "2", "--capacity", "64MiB", "--dir"];
    let started = bare("3003", &[&up[..], &[home_text]].concat());
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    // As RuntimeDirectoryMode has it; only the socket of hostd is for everybody.
    for open in ["", "n1", "n1/run"] {
        fs::set_permissions(home.join(open), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let pid = fs::read_to_string(home.join("n1/run/nicfs.pid")).unwrap();
    let pid = pid.split_whitespace().next().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains("CapBnd:\t0000000000000000"), "{status}");
    let mount = home.join("n1/mnt");
    let run = |script: &str| {
        let socket = home.join("n1/run/hostd.sock");
        let (socket, mount) = (socket.to_str().unwrap(), mount.to_str().unwrap());
        let args = [program, "run", "--socket", socket, "--mount", mount, "--", "sh", "-c"];
        [&args[..], &[script]].concat().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let mnt = mount.to_str().unwrap();
    let root = run(&format!(
        "chmod 1777 {mnt}; echo s > {mnt}/root; chmod 600 {mnt}/root; cat {mnt}/root"
    ));
    let mut command = limited();
    assert_eq!(text(&command.args(root).current_dir("/").output().unwrap()), "s\n");
    let other =
        run(&format!("echo m > {mnt}/mine; cat {mnt}/mine; cat {mnt}/root; stat -c %u {mnt}/mine"));
    let other = bare("3002", &other.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(String::from_utf8_lossy(&other.stdout), "m\n3002\n");
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(said.contains("Permission denied"), "{said}");
    let down = bare("3003", &[program, "cluster", "down", "--dir", home_text]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    fs::remove_dir_all(&dir).unwrap();
}

/// The units ask for no more than that: systemd's own judgement, where it is installed.
#[test]
fn units_are_exposed_below_three() {
    let units = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    for unit in ["corbel.service", "corbel-coordinator.service"] {
        let mut command = std::process::Command::new("systemd-analyze");
        command.args(["security", "--offline=true", "--threshold=30", "--no-pager"]);
        match command.arg(units.join(unit)).output() {
            Ok(judged) => {
                let said = String::from_utf8_lossy(&judged.stdout).into_owned();
                assert!(judged.status.success(), "{said}");
                assert!(said.contains("Overall exposure level"), "{said}");
            }
            Err(e) => eprintln!("{unit} is not judged here: systemd-analyze: {e}"),
        }
    }
}

/// A mount of root's logs beside the services of its node, in a directory of theirs: whoever has taken them over has no
/// file of root's written to.
#[test]
fn a_mount_logs_to_nothing_that_was_put_in_its_way() {
    let Some(cluster) = Cluster::new(1, "16MiB") else { return };
    let (run, point) = (cluster.path("taken"), cluster.path("point"));
    let victim = cluster.path("victim");
    for dir in [&run, &point] {
        fs::create_dir(dir).unwrap();
    }
    chown(&run, Some(1000), Some(1000)).unwrap();
    std::os::unix::fs::symlink(cluster.socket(1), run.join("hostd.sock")).unwrap();
    let log = run.join("log");
    let mount = || {
        let args = [
            "mount".into(),
            run.join("hostd.sock").into_os_string(),
            point.clone().into_os_string(),
        ];
        text(&corbel(args.iter().map(std::convert::AsRef::<std::ffi::OsStr>::as_ref)));
        text(&limited().arg("umount").arg(&point).output().unwrap());
    };
    fs::write(&victim, "").unwrap();
    for link in [0, 1] {
        match link {
            0 => std::os::unix::fs::symlink(&victim, &log).unwrap(),
            _ => fs::hard_link(&victim, &log).unwrap(),
        }
        mount();
        // It says that it is mounted a moment after whoever waits for that is told.
        std::thread::sleep(std::time::Duration::from_secs(1));
        assert_eq!(fs::read_to_string(&victim).unwrap(), "", "link {link}");
        fs::remove_file(&log).unwrap();
    }
    mount();
    wait_for("a log of its own", std::time::Duration::from_secs(20), || {
        fs::symlink_metadata(&log).is_ok_and(|log| log.is_file()).then_some(())
    });
}
