//! Calls whose meaning is easily missed, by programs on the mount and under `corbel run`.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::harness::{CORBEL, Cluster, TESTS, limited, mounted, others_reach, text};

fn cluster() -> Option<Cluster> {
    Cluster::new(3, "256MiB")
}

fn script(mut command: Command, name: &str, args: &[&str]) -> String {
    command.arg("python3").arg(format!("{TESTS}/run/{name}")).args(args);
    text(&command.output().expect("python starts"))
}

/// FUSE has no way to ask for them, so they are there under `corbel run` alone.
#[test]
fn ranges_are_taken_out_of_files_and_put_in() {
    let Some(cluster) = cluster() else { return };
    for (seed, how) in [("1", ""), ("2", ""), ("3", ""), ("4", "mapped"), ("5", "mapped")] {
        let sum = script(cluster.hooked(1, &[]), "shift.py", &[seed, seed, how]);
        let elsewhere = text(&cluster.shell(3, &format!("md5sum < {seed}")).output().unwrap());
        assert_eq!(elsewhere, format!("{}  -\n", sum.trim_end()), "seed {seed}");
    }
    cluster.assert_nothing_refused();
}

/// Files that the kernel has, and for which the kernel passes nothing on.
#[test]
fn what_is_done_beside_the_kernel_takes_nobodys_error() {
    let Some(cluster) = cluster() else { return };
    let stats = cluster.mount(1).join(".corbel/stats");
    script(cluster.hooked(1, &[]), "beside_kernel.py", &[&stats.display().to_string()]);
    cluster.assert_nothing_refused();
}

#[test]
fn locks_stay_when_a_descriptor_changes_hands() {
    let Some(cluster) = cluster() else { return };
    let native = cluster.path("native");
    fs::create_dir(&native).unwrap();
    let mut command = limited();
    command.current_dir(&native);
    let want = script(command, "keeps.py", &[]);
    assert!(want.starts_with("mapped-2 held held free 5 2\n"), "{want}");
    for (view, command) in [("mount", cluster.native(1)), ("run", cluster.hooked(1, &[]))] {
        fs::create_dir(cluster.mount(1).join(view)).unwrap();
        let mut command = command;
        command.current_dir(cluster.mount(1).join(view));
        assert_eq!(script(command, "keeps.py", &[]), want, "{view}");
    }
}

/// Threads open, close, dup, fork and exit at the same time.
#[test]
fn descriptors_of_threads_that_fork_stay_apart() {
    let Some(cluster) = cluster() else { return };
    assert_eq!(script(cluster.hooked(1, &[]), "beside.py", &[".", "2"]), "right\n");
}

/// What another process mounts below the prefix is not seen, but is not taken away either.
#[test]
fn what_something_is_mounted_on_stays() {
    let Some(cluster) = cluster() else { return };
    let dir = cluster.mount(1);
    let point = dir.join("a b/point");
    fs::create_dir_all(&point).unwrap();
    let mut mount = limited();
    mount.args(["mount", "-t", "tmpfs", "none"]).arg(&point);
    assert!(mount.status().unwrap().success());
    let program = "import os, sys
for call in (lambda: os.rmdir('a b/point'), lambda: os.rename('a b/point', 'other'),
             lambda: os.rename('empty', 'a b/point'), lambda: os.rmdir('empty')):
    try: print(call())
    except OSError as e: print(e.errno)";
    fs::create_dir(dir.join("empty")).unwrap();
    let mut run = cluster.hooked(1, &[]);
    let said = text(&run.args(["python3", "-c", program]).output().unwrap());
    let mut umount = limited();
    assert!(umount.arg("umount").arg(&point).status().unwrap().success());
    assert_eq!(said, "16\n16\n16\nNone\n");
}

/// Odd calls, whose errors and results are the same natively and in both views.
#[test]
fn odd_calls_have_the_usual_answers() {
    let Some(cluster) = cluster() else { return };
    let native = cluster.path("native");
    fs::create_dir(&native).unwrap();
    let mut command = limited();
    command.current_dir(&native);
    let want = script(command, "odd.py", &[]);
    for (view, mut command) in [("mount", cluster.native(1)), ("run", cluster.hooked(1, &[]))] {
        fs::create_dir(cluster.mount(1).join(view)).unwrap();
        command.current_dir(cluster.mount(1).join(view));
        assert_eq!(script(command, "odd.py", &[]), want, "{view}");
    }
    let seen =
        "stat -c '%n %F' mount/* run/* | sed 's/^[^/]*.//' | sort | uniq -c | sort | head -1";
    let seen = text(&cluster.shell(3, seen).output().unwrap());
    assert!(seen.trim().starts_with('2'), "{seen}");
    cluster.assert_nothing_refused();
}

/// The same of a script's every line, natively and in both views.
fn same_everywhere(name: &str) {
    let Some(cluster) = cluster() else { return };
    let native = cluster.path("native");
    fs::create_dir(&native).unwrap();
    let mut command = limited();
    command.current_dir(&native);
    let want = script(command, name, &[]);
    assert!(want.lines().count() > 20, "{want}");
    for (view, mut command) in [("mount", cluster.native(1)), ("run", cluster.hooked(1, &[]))] {
        fs::create_dir(cluster.mount(1).join(view)).unwrap();
        command.current_dir(cluster.mount(1).join(view));
        let said = script(command, name, &[]);
        for (line, want) in said.lines().zip(want.lines()) {
            assert_eq!(line, want, "{view}");
        }
        assert_eq!(said.lines().count(), want.lines().count(), "{view}");
    }
}

#[test]
fn rights_end_as_on_other_file_systems() {
    same_everywhere("rights.py");
}

/// A program that gives up the super-user's rights has nothing left of what it could do before: not the log of its
/// session, not the memory that it shared, not the descriptors; nor have the programs that it starts.
#[test]
fn who_gives_up_rights_parts_from_the_session() {
    if !others_reach() {
        return;
    }
    let Some(cluster) = cluster() else { return };
    let dir = cluster.mount(1).join("parted");
    fs::create_dir(&dir).unwrap();
    let mut command = cluster.hooked(1, &[]);
    command.current_dir(&dir);
    let region = cluster.path("n1/region").display().to_string();
    assert_eq!(
        script(command, "parted.py", &[&region]),
        "root is served True True\nchild maps []\nuser maps []\n\
        user EACCES b'written by root'\nuser 13\nuser 3002 None EPERM\nuser 0o104755 3002 EPERM\n\
        user is served True True\n1\nprogram is barred\nprogram 3002\nwrit of the descriptor\nended 0\n\
        threads [True, True, True, True] keep set() EACCES\nthreads made True {3002}\nended 0\n\
        for a time EACCES\nagain data of root True\nended 0\n\
        1\nprogram is barred\nprogram 3002\nwrit of the descriptor\nroot written by root, and by user 0\n"
    );
    cluster.assert_nothing_refused();
}

/// The loader gives a program that has capabilities of its own no library, so its descriptors must be the kernel's.
#[test]
fn a_program_with_capabilities_of_its_own_reads_what_it_is_handed() {
    let Some(cluster) = cluster() else { return };
    let own = cluster.path("cat");
    fs::copy("/bin/cat", &own).unwrap();
    let give = "import os, struct, sys; os.setxattr(sys.argv[1], 'security.capability', \
        struct.pack('<IIIII', 0x02000001, 1 << 13, 0, 0, 0))";
    text(&limited().args(["python3", "-c", give]).arg(&own).output().unwrap());
    let mut run = cluster.run(
        1,
        "echo handed > f; chmod 666 f; exec setpriv --reuid=3002 --regid=3002 --clear-groups \
        bash -c 'exec 5< f; \"$0\" <&5' \"$0\"",
    );
    assert_eq!(text(&run.arg(&own).output().unwrap()), "handed\n");
}

/// The holder's name is anybody's once `corbel run` has ended.
#[test]
fn the_holders_name_is_not_enough_to_be_given_descriptors() {
    let Some(cluster) = cluster() else { return };
    let mut command = limited();
    command.current_dir(cluster.mount(1)).arg("python3").arg(format!("{TESTS}/run/imposter.py"));
    command.args([CORBEL, "run", "--mount"]).arg(cluster.mount(1)).arg("--");
    let said = text(&command.output().expect("python starts"));
    assert_eq!(said, "4097\ndescriptors for the imposter: 0\n");
}

#[test]
fn bounds_are_as_on_other_file_systems() {
    same_everywhere("bounds.py");
}

/// What is not published yet is found as it is found later, and on another node (xfstests 445, 490, 539).
#[test]
fn data_and_holes_are_whole_blocks_at_any_moment() {
    let Some(cluster) = cluster() else { return };
    for (view, mut command) in [("mount", cluster.native(1)), ("run", cluster.hooked(1, &[]))] {
        fs::create_dir(cluster.mount(1).join(view)).unwrap();
        command.current_dir(cluster.mount(1).join(view));
        assert_eq!(script(command, "seeks.py", &[]), "right\n", "{view}");
        let mut command = cluster.native(2);
        command.current_dir(cluster.mount(2).join(view));
        assert_eq!(script(command, "seeks.py", &["look"]), "right\n", "{view}, of node 2");
    }
    cluster.assert_nothing_refused();
}

/// Who may execute a program, and not read it, starts it; in both views, on another node than where it was put.
#[test]
fn what_may_only_be_executed_starts() {
    let Some(cluster) = cluster() else { return };
    text(&cluster.shell(1, "cp /bin/echo say; chmod 0711 say; sync").output().unwrap());
    let user = "setpriv --reuid=65534 --regid=65534 --clear-groups sh -c './say it runs; cat say \
                >/dev/null 2>&1 || echo closed'";
    assert_eq!(text(&cluster.shell(2, user).output().unwrap()), "it runs\nclosed\n", "mount");
    assert_eq!(text(&cluster.run(3, user).output().unwrap()), "it runs\nclosed\n", "run");
    cluster.assert_nothing_refused();
}

/// `open_by_handle_at` of what the kernel of a mount does not have: as after it has dropped it from its caches (NFS).
#[test]
fn a_handle_opens_what_the_kernel_has_never_seen() {
    let Some(cluster) = cluster() else { return };
    let mounts = [1, 2].map(|node| cluster.mount(node).display().to_string());
    let said = script(limited(), "handles.py", &[&mounts[0], &mounts[1]]);
    assert_eq!(said, "its content\n['file']\nStale file handle\n");
}

/// The longest values and lists of names take several answers of the service, which are of one moment.
#[test]
fn extended_attributes_are_as_long_as_they_may_be() {
    let Some(cluster) = cluster() else { return };
    for (view, mut command) in [("mount", cluster.native(1)), ("run", cluster.hooked(1, &[]))] {
        let dir = |node| cluster.mount(node).join(view);
        fs::create_dir(dir(1)).unwrap();
        command.current_dir(dir(1));
        assert_eq!(script(command, "xattrs.py", &["write"]), "right\n", "{view}");
        let there = |mut command: Command, node, what| {
            command.current_dir(dir(node));
            let said = script(command, "xattrs.py", &[what]);
            assert_eq!(said, "right\n", "{view}: {what} on node {node}");
        };
        there(cluster.native(2), 2, "look");
        there(cluster.hooked(3, &[]), 3, "look");
        std::thread::scope(|s| {
            s.spawn(|| there(cluster.native(2), 2, "watch"));
            s.spawn(|| there(cluster.hooked(3, &[]), 3, "watch"));
            there(cluster.native(1), 1, "change");
        });
    }
    cluster.assert_nothing_refused();
}

/// On a volume that runs full, also while the file stays open.
#[test]
fn what_is_reserved_can_be_written() {
    let Some(cluster) = Cluster::new(3, "32MiB") else { return };
    let program = "import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.posix_fallocate(fd, 0, 1 << 20)
other = os.open(sys.argv[1] + '-other', os.O_CREAT | os.O_RDWR)
full = []
for call in (lambda: os.write(other, bytes(1 << 16)), lambda: os.fsync(other)):
    for _ in range(1024):
        try: call()
        except OSError as e:
            full.append(e.errno)
            break
print(set(full), os.pwrite(fd, b'x' * (1 << 20), 0), os.fsync(fd), os.close(fd))
os.unlink(sys.argv[1] + '-other')";
    for (view, mut command) in [("mount", cluster.native(1)), ("run", cluster.hooked(1, &[]))] {
        let output = command.current_dir(cluster.mount(1)).args(["python3", "-c", program, view]);
        assert_eq!(text(&output.output().unwrap()), "{28} 1048576 None None\n", "{view}");
    }
}

/// Which error comes first, and that bad memory is EFAULT or the end of what is done.
#[test]
fn wrong_calls_fail_as_elsewhere() {
    let Some(cluster) = cluster() else { return };
    let native = cluster.path("native");
    fs::create_dir(&native).unwrap();
    let in_dir = |mut command: Command, dir: &Path, view: &str| {
        command.current_dir(dir).env("VIEW", view);
        script(command, "edges.py", &[])
    };
    for (view, command) in [("mount", cluster.native(1)), ("run", cluster.hooked(1, &[]))] {
        let dir = cluster.mount(1).join(view);
        fs::create_dir(&dir).unwrap();
        let want = in_dir(limited(), &native, view);
        let said = in_dir(command, &dir, view);
        for (want, said) in want.lines().zip(said.lines()) {
            assert_eq!(said, want, "{view}");
        }
        assert_eq!(said.lines().count(), want.lines().count(), "{view}");
        assert!(want.lines().count() > 2000, "{want}");
    }
    cluster.assert_nothing_refused();
}

/// A user who owns nothing maps, locks and executes what is open to all, and finds nothing else by
/// its number.
#[test]
fn a_user_without_rights_hands_files_to_the_kernel() {
    let Some(cluster) = cluster() else { return };
    let make = "echo content > read; echo content > write; chmod 666 write; cp /bin/true .
        mkdir hidden; echo secret > hidden/s; chmod 700 hidden; chmod 755 true .; stat -c %i hidden/s";
    let hidden = text(&cluster.shell(1, make).output().unwrap());
    let program = "import fcntl, mmap, os, subprocess
fd = os.open('read', os.O_RDONLY)
print(mmap.mmap(fd, 3, prot=mmap.PROT_READ)[:], fcntl.flock(fd, fcntl.LOCK_SH))
fd = os.open('write', os.O_RDWR)
mmap.mmap(fd, 3)[:1] = b'C'
print(os.pread(fd, 3, 0), fcntl.lockf(fd, fcntl.LOCK_EX), fcntl.flock(fd, fcntl.LOCK_EX))
print(subprocess.run(['./true']).returncode)";
    let user = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"];
    let mut command = limited();
    command.args(user).args(["test", "-x", CORBEL]);
    if !command.status().unwrap().success() {
        eprintln!("skipped: other users cannot reach {CORBEL}");
        return;
    }
    let mut command = limited();
    command.current_dir(cluster.mount(1)).args(user).args([CORBEL, "run", "--mount"]);
    command.arg(cluster.mount(1)).arg("--socket").arg(cluster.socket(1));
    command.args(["--", "python3", "-c", program]).env("XDG_CACHE_HOME", cluster.path("cache"));
    let said = text(&command.output().unwrap());
    assert_eq!(said, "b'con' None\nb'Con' None None\n0\n");
    for proof in ["", ".1", ".x", "."] {
        let mut command = limited();
        let path = format!("{}/.corbel/inode/{}{proof}", cluster.mount(1).display(), hidden.trim());
        let output = command.args(user).arg("cat").arg(path).output().unwrap();
        assert!(!output.status.success(), "{output:?}");
    }
}

/// A mount whose node is dead can be taken away by whoever would take away another.
#[test]
fn a_mount_without_a_node_can_be_unmounted() {
    let Some(cluster) = cluster() else { return };
    for program in [&["umount"][..], &["umount", "-l"], &["umount", "-f"], &["fusermount3", "-u"]] {
        if program[0] != "umount" && Command::new(program[0]).arg("-V").output().is_err() {
            eprintln!("skipped: no {}", program[0]);
            continue;
        }
        let dir = cluster.mount(2);
        assert!(mounted(&dir).is_some());
        assert!(cluster.corbel(&["cluster", "kill", "2"]).status.success());
        let begin = Instant::now();
        let mut command = limited();
        let status = command.args(program).arg(&dir).status().expect("it starts");
        assert!(status.success(), "{program:?}: {status:?}");
        assert!(begin.elapsed() < Duration::from_secs(15), "{program:?}");
        assert!(mounted(&dir).is_none(), "{program:?}");
        let started = cluster.corbel(&["cluster", "start", "2"]);
        assert!(started.status.success(), "{started:?}");
    }
}

/// Random calls on two files, and what is locked after each. With each of these seeds it was another thing once under `corbel
/// run`: locks outlived an exec that closes a descriptor of their file.
#[test]
fn what_is_locked_is_the_same_in_all_views() {
    let Some(cluster) = cluster() else { return };
    for seed in ["33", "44", "47"] {
        let native = cluster.path(&format!("native-{seed}"));
        fs::create_dir(&native).unwrap();
        let mut command = limited();
        command.current_dir(&native);
        let want = script(command, "holds.py", &[seed, "100"]);
        assert!(want.lines().count() > 100, "{want}");
        for (view, mut command) in [("mount", cluster.native(1)), ("run", cluster.hooked(1, &[]))] {
            let dir = cluster.mount(1).join(format!("{view}-{seed}"));
            fs::create_dir(&dir).unwrap();
            command.current_dir(&dir);
            let said = script(command, "holds.py", &[seed, "100"]);
            let mut lines = want.lines().zip(said.lines());
            let other = lines.find(|(want, said)| want != said);
            assert!(other.is_none() && said.len() == want.len(), "{view}, seed {seed}: {other:?}");
        }
    }
}
