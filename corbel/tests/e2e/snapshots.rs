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

/// A tree of a snapshot comes back as one that can be changed, all at once, and takes no space; so does a file by `cp`.
#[test]
fn what_a_snapshot_has_comes_back_without_being_copied() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let sh = |node: usize, script: &str| text(&cluster.shell(node, script).output().unwrap());
    sh(
        1,
        "mkdir -p p/d/sub; head -c 20000000 /dev/urandom > p/d/big; ln p/d/big p/d/again; ln -s big p/d/link; mkfifo p/d/pipe
        truncate -s 50M p/d/holes; printf end | dd of=p/d/holes bs=1M seek=40 conv=notrunc status=none
        echo mine > p/d/secret; chmod 600 p/d/secret; setfattr -n user.a -v then p/d/big; mknod p/d/dev c 1 3
        echo locked > p/d/sub/x; chown 65534:65534 p/d/sub/x; chmod 4755 p/d/sub/x; chmod 555 p/d/sub
        mkdir p/d/acl; setfacl -m u:1000:rwx -d -m u:1001:r p/d/acl; echo a > p/d/acl/f; touch -d '2001-02-03 04:05:06.789' p/d/sub p/d/link -h
        touch -d '2002-02-03 04:05:06.789' p/d; sync -f .",
    );
    text(&snapshot(&cluster, 2, &["create", "s"]));
    // Half of it is gone when it is wanted again.
    sh(2, "chmod 755 p/d/sub; rm -r p/d; mkdir p/d; echo new > p/d/new; sync -f .");
    let used =
        || sh(3, "sync -f .; df -k . | tail -1 | awk '{print $3}'").trim().parse::<i64>().unwrap();
    let before = used();
    let said = json(&snapshot(&cluster, 3, &["clone", "s", "/c", "--path", "p/d"]));
    assert_eq!(
        (&said["cloned"], &said["directories"], &said["files"]),
        (&"s".into(), &3.into(), &8.into()),
        "{said}"
    );
    assert_eq!(said["copied_bytes"], 0, "{said}");
    assert!((used() - before).abs() < 4000, "nothing was copied: {before} KiB, then {}", used());
    for node in 1..=3 {
        let script = "s=.corbel/snapshots/s/p/d
            for d in c $s; do (cd $d; find . -printf '%P %y %m %U %G %s %n %T@ %l\n' | grep -v '^ d' | sort
            md5sum big holes secret acl/f sub/x; getfattr --only-values -n user.a big; echo; getfacl -pn acl acl/f; stat -c '%a %y %t' dev . ) > /tmp/$$; md5sum < /tmp/$$; done | uniq | wc -l
            rm /tmp/$$; stat -c '%b %h' c/holes c/again; ls -A | grep -c corbel-clone";
        let said = sh(node, &format!("{script} || true"));
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((lines[0], lines[2], lines[3]), ("1", "39064 2", "0"), "node {node}: {said}");
        let holes: u64 = lines[1].split(' ').next().unwrap().parse().unwrap();
        assert!(holes <= 16, "holes stay: {holes} blocks");
    }
    // It is nobody's but its own.
    sh(1, "echo over | dd of=c/big conv=notrunc status=none; head -c 4 c/again; sync -f .");
    assert_eq!(
        sh(2, "cmp c/big .corbel/snapshots/s/p/d/big | grep -c differ; cat c/sub/x"),
        "1\nlocked\n"
    );
    // What is there is not replaced, and nothing is left of what failed.
    let taken = snapshot(&cluster, 1, &["clone", "s", "/c"]);
    assert_eq!(
        (taken.status.code(), &json(&taken)["error"]["message"]),
        (Some(1), &"/c: file exists".into())
    );
    for (args, code) in [
        (&["clone", "none", "/x"][..], 1),
        (&["clone", "s", "/x", "--path", "p/d/big"], 1),
        (&["clone", "s", "/nowhere/x"], 1),
        (&["restore", "s", "p/d"], 1),
        (&["restore", "s", "/"], 2),
        (&["restore", "s", "p/none"], 1),
    ] {
        let output = snapshot(&cluster, 1, args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", json(&output));
        assert!(json(&output)["error"]["remedy"].as_str().is_some_and(|r| !r.is_empty()));
    }
    let said = json(&snapshot(&cluster, 1, &["restore", "s", "p/d", "--force"]));
    assert_eq!((&said["restored"], &said["files"]), (&"s".into(), &8.into()), "{said}");
    assert_eq!(
        sh(2, "ls p/d | tr '\n' ' '; ls -A p"),
        "acl again big dev holes link pipe secret sub d\n"
    );
    assert_eq!(sh(3, "rm p/d/big; ls p/d/big 2>&1 | grep -c 'No such'"), "1\n");
    text(&snapshot(&cluster, 2, &["restore", "s", "/p/d/big"]));
    assert_eq!(sh(3, "cmp p/d/big .corbel/snapshots/s/p/d/big; cat p/d/secret"), "mine\n");
    // By the programs themselves, on a mount and without it.
    let before = used();
    sh(2, "cp .corbel/snapshots/s/p/d/big mounted; cmp mounted p/d/big");
    assert!((used() - before).abs() < 4000, "copy_file_range shares");
    let script = "cp --reflink=always .corbel/snapshots/s/p/d/big shared; cmp shared p/d/big";
    text(&cluster.run(3, script).output().unwrap());
    assert!((used() - before).abs() < 4000, "FICLONE shares");
    // Whoever might not read it then does not by this.
    let script = format!(
        "mkdir -m 777 own; cd own; {STRANGER} cp --reflink=auto ../.corbel/snapshots/s/p/d/secret . 2>&1 | grep -c denied
        {STRANGER} cp ../.corbel/snapshots/s/p/d/big . ; cmp big ../p/d/big; ls"
    );
    assert_eq!(sh(1, &script), "1\nbig\n");
    // Nothing of it needs the snapshot.
    text(&snapshot(&cluster, 1, &["delete", "s"]));
    assert_eq!(sh(3, "cmp shared mounted; cmp shared p/d/big; cat c/sub/x"), "locked\n");
}
