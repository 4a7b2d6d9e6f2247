//! Snapshots: made at one node and read at all of them, as what was there then, by those who might read it then.

use std::fs;
use std::process::{Command, Output};
use std::time::Duration;

use super::harness::{CORBEL, Cluster, Scratch, corbel, json, text, wait_for};

const CAPACITY: &str = "256MiB";

/// `corbel snapshot` by the node's socket.
fn snapshot(cluster: &Cluster, node: usize, args: &[&str]) -> Output {
    let mut command = Command::new(CORBEL);
    command.args(["--json", "snapshot", "--socket"]).arg(cluster.socket(node)).args(args);
    command.output().unwrap()
}

fn names(cluster: &Cluster, node: usize) -> Vec<String> {
    let output = snapshot(cluster, node, &["list"]);
    text(&output);
    let said = json(&output);
    let all = said["snapshots"].as_array().unwrap();
    all.iter().map(|one| one["name"].as_str().unwrap().to_string()).collect()
}

/// Nobody but the super-user, who has given up everything else.
const STRANGER: &str = "setpriv --reuid=65534 --regid=65534 --clear-groups";

#[test]
fn a_snapshot_shows_what_was_there_to_those_who_might_see_it() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let sh = |node: usize, script: &str| text(&cluster.shell(node, script).output().unwrap());
    sh(
        1,
        "mkdir -p d/sub; echo before > d/f; head -c 300000 /dev/urandom > d/big;
        cp d/big d/sub/big; echo mine > d/secret; chmod 600 d/secret; ln -s f d/link; mkdir d/gone; echo x > d/gone/x
        setfattr -n user.a -v then d/f; chown 65534 d/sub; mkdir -m 700 hidden; mkdir hidden/open; echo h > hidden/open/h
        sync -f .",
    );
    let sum = sh(1, "sha256sum < d/big");
    let made = snapshot(&cluster, 2, &["create", "first"]);
    text(&made);
    assert_eq!(json(&made)["created"], "first");
    text(&snapshot(&cluster, 3, &["create", "only d", "--dir", "/d"]));
    text(&snapshot(&cluster, 3, &["create", "below", "--dir", "/hidden/open"]));
    sh(
        3,
        "echo after, and longer > d/f; echo over | dd of=d/big conv=notrunc status=none; chmod 644 d/secret
        rm -r d/gone; mv d/sub d/moved; rm d/link; setfattr -n user.a -v now d/f; echo new > d/new; sync -f .",
    );
    for node in 1..=3 {
        let said = sh(
            node,
            "ls .corbel/snapshots; cd .corbel/snapshots/first; ls d; cat d/f d/link d/gone/x; readlink d/link
            stat -c %a d/secret; stat -c %u d/sub; getfattr --only-values -n user.a d/f; echo
            cat d/secret; cmp d/big d/sub/big; ls ../'only d'; cat ../'only d'/f; cat ../below/h",
        );
        assert_eq!(
            said,
            "below\nfirst\nonly d\nbig\nf\ngone\nlink\nsecret\nsub\nbefore\nbefore\nx\nf\n600\n65534\nthen\nmine\n\
            big\nf\ngone\nlink\nsecret\nsub\nbefore\nh\n",
            "node {node}"
        );
        assert_eq!(sh(node, "sha256sum < .corbel/snapshots/first/d/big"), sum, "node {node}");
        assert_eq!(sh(node, "cat d/f d/new"), "after, and longer\nnew\n", "node {node}");
        // Another user, with the rights of then: now he might read the secret.
        let script = format!(
            "cat d/secret; cd .corbel/snapshots/first; {STRANGER} cat d/f; {STRANGER} cat d/secret 2>&1 | grep -c denied; \
            {STRANGER} ls hidden 2>&1 | grep -c denied; {STRANGER} cat ../'only d'/secret 2>&1 | grep -c denied"
        );
        assert_eq!(sh(node, &script), "mine\nbefore\n1\n1\n1\n", "node {node}");
        // Nobody changes anything, and what would need it says so.
        let refused = "import errno, os
os.chdir('.corbel/snapshots/first/d')
def no(what, *args, **more):
    try: what(*args, **more); print('not refused:', what, args)
    except OSError as e: print(errno.errorcode[e.errno], end=' ')
no(os.open, 'f', os.O_WRONLY); no(os.open, 'f', os.O_RDWR); no(os.open, 'f', os.O_RDONLY | os.O_TRUNC)
no(os.open, 'new', os.O_WRONLY | os.O_CREAT); no(os.mkdir, 'm'); no(os.symlink, 'a', 'b'); no(os.unlink, 'f')
no(os.rmdir, 'gone/'); no(os.rename, 'f', 'g'); no(os.link, 'f', 'g'); no(os.chmod, 'f', 0o644); no(os.utime, 'f')
no(os.truncate, 'f', 1); no(os.setxattr, 'f', 'user.b', b''); no(os.removexattr, 'f', 'user.a'); no(os.mkfifo, 'p')
no(os.rename, '../../../../d/new', 'x'); no(os.rename, 'f', '../../../../d/x'); no(os.mkdir, '../../made')
print()
import fcntl
with open('f') as f:
    fcntl.flock(f, fcntl.LOCK_SH); fcntl.flock(f, fcntl.LOCK_UN); no(fcntl.flock, f, fcntl.LOCK_EX)
    print(os.lseek(f.fileno(), 2, os.SEEK_DATA), os.lseek(f.fileno(), 2, os.SEEK_HOLE), end=' ')
    os.fsync(f.fileno())
import mmap
with open('big', 'rb') as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m: print(len(m))";
        let mut python = cluster.native(node);
        let said = text(&python.args(["python3", "-c", refused]).output().unwrap());
        let rofs = "EROFS ".repeat(18);
        assert_eq!(said, format!("{rofs}EPERM \nENOLCK 2 7 300000\n"), "node {node}");
        // A program of the fast path comes there by the mount, and copies back what it needs.
        let back = format!(
            "cat .corbel/snapshots/first/d/f; cp -a .corbel/snapshots/first/d/gone back{node}; cat back{node}/x"
        );
        assert_eq!(text(&cluster.run(node, &back).output().unwrap()), "before\nx\n");
    }

    // As it is told.
    let listed = snapshot(&cluster, 1, &["list"]);
    let said = json(&listed);
    let first = &said["snapshots"][0];
    assert_eq!((&first["name"], &first["dir"]), (&"first".into(), &"/".into()), "{said}");
    assert_eq!(said["snapshots"][1]["dir"], "/d");
    assert!(first["time"].as_str().unwrap().ends_with('Z') && first["bytes"].is_u64(), "{said}");
    assert!(first["inodes"].as_u64().unwrap() > 10, "{said}");
    let of = |args: &[&str]| {
        let output = snapshot(&cluster, 1, args);
        (output.status.code(), json(&output)["error"]["message"].as_str().map(str::to_string))
    };
    let refused = |args: &[&str], why: &str| {
        let (code, message) = of(args);
        assert_eq!(code, Some(1), "{args:?}");
        assert!(message.as_ref().is_some_and(|m| m.contains(why)), "{args:?}: {message:?}");
    };
    refused(&["create", "first"], "exists");
    refused(&["create", ".."], "invalid");
    refused(&["create", "x", "--dir", "/d/f"], "not a directory");
    refused(&["create", "x", "--dir", "/none"], "no such");
    refused(&["delete", "none"], "no such");

    // Mounted by itself.
    let scratch = Scratch::new();
    let point = scratch.path("then");
    fs::create_dir(&point).unwrap();
    let mount = |name: &str| {
        let option = format!("snapshot={name}");
        let args = ["mount".into(), cluster.socket(2).into_os_string(), point.clone().into()];
        corbel(args.into_iter().chain(["-o".into(), option.into()]))
    };
    let none = mount("none");
    assert!(!none.status.success() && String::from_utf8_lossy(&none.stderr).contains("none"));
    text(&mount("only d"));
    assert_eq!(fs::read_to_string(point.join("f")).unwrap(), "before\n");
    assert!(!point.join(".corbel").exists());
    let written = fs::write(point.join("f"), "x").unwrap_err();
    assert_eq!(written.kind(), std::io::ErrorKind::ReadOnlyFilesystem);

    // Gone: at once where it was deleted, soon everywhere, also for who stands in it.
    text(&snapshot(&cluster, 2, &["delete", "first", "only d"]));
    for node in 1..=3 {
        assert_eq!(names(&cluster, node), ["below"], "node {node}");
        wait_for("the end of a snapshot", Duration::from_secs(10), || {
            let there = fs::metadata(cluster.mount(node).join(".corbel/snapshots/first/d/f"));
            there.is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound).then_some(())
        });
    }
    wait_for("the end of a mounted snapshot", Duration::from_secs(10), || {
        fs::read_dir(&point).is_err().then_some(())
    });
    assert_eq!(sh(1, "cat d/f .corbel/snapshots/below/h"), "after, and longer\nh\n");
    text(&Command::new("umount").arg(&point).output().unwrap());
    cluster.assert_nothing_refused();
}

/// The directories above what a snapshot shows keep those out whom they kept out then.
#[test]
fn a_snapshot_leads_nobody_past_the_directories_above_it() {
    let Some(cluster) = Cluster::new(1, CAPACITY) else { return };
    let sh = |script: &str| text(&cluster.shell(1, script).output().unwrap());
    sh("mkdir -m 700 hidden; mkdir hidden/open; echo h > hidden/open/h; sync -f .");
    text(&snapshot(&cluster, 1, &["create", "below", "--dir", "/hidden/open"]));
    sh("chmod 755 hidden; sync -f .");
    let script = format!(
        "{STRANGER} cat hidden/open/h; cat .corbel/snapshots/below/h; \
        {STRANGER} cat .corbel/snapshots/below/h 2>&1 | grep -c denied"
    );
    assert_eq!(sh(&script), "h\nh\n1\n");
}

#[test]
fn a_policy_makes_one_in_its_time_and_deletes_what_it_does_not_keep() {
    let Some(cluster) = Cluster::new(1, CAPACITY) else { return };
    let policy = |more: &[&str]| {
        let output = snapshot(&cluster, 1, &[&["policy"], more].concat());
        text(&output);
        json(&output)
    };
    let old = [
        "auto-2020-01-01T10-00-00Z",
        "auto-2020-01-01T11-00-00Z",
        "auto-2020-01-02T10-00-00Z",
        "auto-2020-01-02T10-30-00Z",
    ];
    for name in old {
        text(&snapshot(&cluster, 1, &["create", name]));
    }
    text(&snapshot(&cluster, 1, &["create", "auto-by-hand"]));
    text(&snapshot(&cluster, 1, &["create", "other-2020-01-01T10-00-00Z"]));
    let keep = ["--keep-hourly", "2", "--keep-daily", "3"];
    let would = policy(&[&keep[..], &["--dry-run"]].concat());
    assert_eq!((&would["done"], names(&cluster, 1).len()), (&false.into(), 6), "{would}");
    let done = policy(&keep);
    let created = done["created"].as_str().expect("it was time").to_string();
    let deleted: Vec<_> = done["deleted"].as_array().unwrap().iter().collect();
    assert_eq!(deleted, [old[0], old[2]], "{done}");
    let left = names(&cluster, 1);
    assert_eq!(
        left,
        [old[1], old[3], "auto-by-hand", "other-2020-01-01T10-00-00Z", created.as_str()],
        "none but its own"
    );
    // Unless the hour has just ended.
    let again = policy(&keep);
    if again["created"].is_null() {
        assert_eq!(again["deleted"].as_array().map(Vec::len), Some(0), "{again}");
        assert_eq!(names(&cluster, 1), left, "again: nothing is due");
    }
    let none = snapshot(&cluster, 1, &["policy"]);
    assert_eq!((none.status.code(), &json(&none)["error"]["code"]), (Some(2), &"usage".into()));
}
