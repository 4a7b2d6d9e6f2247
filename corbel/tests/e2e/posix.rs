//! A cluster of three nodes, used by unmodified programs at once through `corbel run` and through
//! the mounts of several nodes.

use std::fs;
use std::process::{Command, Output};
use std::time::Duration;

use super::harness::{CORBEL, Cluster, TESTS, json, text, wait_for};

const CAPACITY: &str = "512MiB";

/// Several short-lived processes make names in one directory at once: the lease of the directory
/// goes round, and each process ends right after its last operation.
#[test]
fn processes_that_share_a_directory_lose_nothing() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let script = "mkdir d; for i in $(seq 40); do (echo $i > d/$i; cp d/$i d/c$i) & \
        [ $((i % 4)) = 0 ] && wait; done; wait; cat d/c* | sort -n | tail -n 1; ls d | wc -l";
    assert_eq!(text(&cluster.run(1, script).output().unwrap()), "40\n80\n");
    assert_eq!(text(&cluster.shell(3, "ls d | wc -l").output().unwrap()), "80\n");
    cluster.assert_nothing_refused();
}

/// A write of 256 KiB is one log entry, longer than a batch that a follower forwards.
#[test]
fn long_writes_beside_a_follower_return() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let script = "head -c 3000000 /dev/urandom > /dev/shm/$$.r; dd if=/dev/shm/$$.r of=F bs=1M \
        conv=fsync status=none && cmp F /dev/shm/$$.r; rc=$?; rm /dev/shm/$$.r; exit $rc";
    text(&cluster.run(2, &script.replace('F', "a")).output().unwrap());
    text(&cluster.shell(3, &script.replace('F', "b")).output().unwrap());
    assert_eq!(text(&cluster.shell(1, "stat -c %s a b").output().unwrap()), "3000000\n3000000\n");
    cluster.assert_nothing_refused();
}

/// Appenders on all nodes, hooked and not: no line is lost or torn, and O_EXCL is a lock.
#[test]
fn appends_and_lock_files_hold_across_views_and_nodes() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let script = "for i in $(seq 60); do printf 'W %s %0*d\\n' $i $((i * 7)) 0 >> log; done
        for i in $(seq 8); do
            until (set -C; : > lock) 2>/dev/null; do sleep 0.002; done
            n=$(cat counter 2>/dev/null || echo 0); echo $((n + 1)) > new; mv new counter; rm lock
        done";
    let commands = [
        cluster.run(1, &script.replace('W', "a")),
        cluster.shell(1, &script.replace('W', "b")),
        cluster.shell(2, &script.replace('W', "c")),
        cluster.run(3, &script.replace('W', "d")),
    ];
    let children: Vec<_> = commands.into_iter().map(|mut c| c.spawn().unwrap()).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let mut wanted: Vec<String> = Vec::new();
    for who in ["a", "b", "c", "d"] {
        wanted.extend((1..=60).map(|i| format!("{who} {i} {:0width$}", 0, width = i * 7)));
    }
    wanted.sort();
    for node in 1..=3 {
        let log = fs::read_to_string(cluster.mount(node).join("log")).unwrap();
        let mut lines: Vec<&str> = log.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, wanted, "node {node}");
        let counter = fs::read_to_string(cluster.mount(node).join("counter")).unwrap();
        assert_eq!(counter, "32\n", "node {node}");
    }
    cluster.assert_nothing_refused();
}

/// A file whose last name goes on another node while a program has it open lives on for the program
/// and for those that inherit the descriptor, by fork, fork and exec, and posix_spawn.
#[test]
fn a_file_unlinked_elsewhere_lives_on_for_those_who_inherit_it() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let program = "import os, subprocess, time
fd = os.open('f', os.O_RDWR | os.O_CREAT); os.write(fd, b'content\\n'); os.set_inheritable(fd, True)
other = os.open('g', os.O_RDWR | os.O_CREAT); os.write(other, b'other\\n')
open('ready', 'w').close()
while not os.path.exists('gone'): time.sleep(0.002)
def all(fd): return os.pread(fd, 100, 0)
assert os.fstat(fd).st_nlink == 0
if os.fork() == 0:
    assert all(other) == b'other\\n'
    os.write(other, b'child\\n'); os._exit(0)
assert os.wait()[1] == 0
assert all(other) == b'other\\nchild\\n', all(other)
spawn = f'cat <&{fd} && echo spawned >&{fd}'
os.lseek(fd, 0, 0)
pid = os.posix_spawn('/bin/sh', ['sh', '-c', spawn], os.environ)
assert os.waitpid(pid, 0)[1] == 0
os.lseek(fd, 0, 0)
print(subprocess.check_output(['cat'], stdin=fd).decode(), end='')";
    let remove = "until [ -e ready ]; do sleep 0.01; done; rm f g; touch gone";
    let mut remover = cluster.shell(2, remove).spawn().unwrap();
    let output = cluster.run(1, &format!("exec python3 -c \"{program}\"")).output().unwrap();
    assert!(remover.wait().unwrap().success());
    assert_eq!(text(&output), "content\ncontent\nspawned\n");
    cluster.assert_nothing_refused();
}

/// A mount in the background says what it has to say in the log of its node.
#[test]
fn a_mount_in_the_background_logs_beside_the_services() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let point = cluster.path("second");
    fs::create_dir(&point).unwrap();
    let mut mount = Command::new(CORBEL);
    mount.args(["--log-level", "info", "mount"]).arg(cluster.socket(1)).arg(&point);
    text(&mount.output().unwrap());
    let line = format!("mounted on {}, process ", point.display());
    // The command returns when the kernel has the mount, which may be before the line is written.
    wait_for("a line in the log", Duration::from_secs(60), || {
        cluster.log(1).contains(&line).then_some(())
    });
    assert!(Command::new("umount").arg(&point).status().unwrap().success());
}

/// A reader behind a mount, whose kernel caches, sees each change of the same bytes at once, however
/// quickly they follow each other: it tells by the time of the file.
#[test]
fn changes_within_a_tick_are_seen_behind_the_mount() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let (there, back) = (cluster.path("there"), cluster.path("back"));
    text(&Command::new("mkfifo").args([&there, &back]).output().unwrap());
    text(&cluster.shell(1, "echo 00000000 > f").output().unwrap());
    let (there, back) = (there.display(), back.display());
    let writer = format!(
        "python3 -c \"import os
o = open('{there}', 'wb', 0); i = open('{back}', 'rb', 0); fd = os.open('f', os.O_RDWR)
for k in range(150): os.pwrite(fd, b'%08d' % k, 0); o.write(b'x'); i.read(1)\""
    );
    let reader = format!(
        "python3 -c \"import os
i = open('{there}', 'rb', 0); o = open('{back}', 'wb', 0); fd = os.open('f', os.O_RDONLY)
stale = 0
for k in range(150): i.read(1); stale += int(os.pread(fd, 8, 0)) != k; o.write(b'y')
print(stale)\""
    );
    for node in [1, 2] {
        let mut child = cluster.run(1, &writer).spawn().unwrap();
        assert_eq!(text(&cluster.shell(node, &reader).output().unwrap()), "0\n", "node {node}");
        assert!(child.wait().unwrap().success());
    }
}

/// A volume that runs full says so, in both views, and goes on once something is removed.
#[test]
fn a_full_volume_is_an_error_and_not_a_loss() {
    let Some(cluster) = Cluster::new(3, "48MiB") else { return };
    let fill = "echo before > kept; \
        ! dd if=/dev/zero of=big bs=1M count=80 conv=fsync 2> said; \
        grep -q 'No space left' /dev/stdin < said || cat said; cat kept; rm big; sync; \
        echo after > kept2; sync kept2; cat kept2; rm kept kept2 said";
    for _ in 0..2 {
        assert_eq!(text(&cluster.run(1, fill).output().unwrap()), "before\nafter\n");
        assert_eq!(text(&cluster.shell(2, fill).output().unwrap()), "before\nafter\n");
    }
    // The write that has no room says so, and nothing after it again.
    let many = "python3 -c \"import os
for i in range(80):
    fd = os.open('c%d' % i, os.O_CREAT | os.O_WRONLY)
    try: assert os.write(fd, b'x' * 1000000) == 1000000
    except OSError as e: print('write', i > 10, e.errno); break
    finally: os.close(fd)
\"; rm c*";
    assert_eq!(text(&cluster.shell(2, many).output().unwrap()), "write True 28\n");
}

/// What a write says is done has room, although it is judged later: nobody is told of more than there is, neither
/// alone nor among writers on all nodes, also while the chain changes.
#[test]
fn no_more_is_acknowledged_than_there_is() {
    const CAPACITY: u64 = 48 << 20;
    let Some(cluster) = Cluster::new(3, "48MiB") else { return };
    let fill = |name: &str| {
        format!(
            "import os, sys
fd = os.open('{name}', os.O_CREAT | os.O_WRONLY); done = 0
try:
    while True: done += os.write(fd, b'x' * 65536)
except OSError as e: print(done, e.errno)
try: os.fsync(fd); print('synced')
except OSError as e: print('fsync', e.errno)"
        )
    };
    let figures = |said: &str| {
        let mut words = said.split_whitespace();
        let mut next = || words.next().expect("a word").to_string();
        (next().parse::<u64>().expect("bytes"), next(), next())
    };
    // Where it was written: a mount tells a little later what it has open no more.
    let empty = |node: usize, name: &str| {
        text(&cluster.shell(node, &format!("rm {name}; sync .")).output().unwrap());
    };
    for node in 1..=3 {
        let program = fill("f");
        for mut command in [cluster.native(node), cluster.hooked(node, &[])] {
            let output = command.args(["python3", "-c", &program]).output().unwrap();
            let (done, error, synced) = figures(&text(&output));
            assert!(done <= CAPACITY, "node {node}: {done} bytes");
            assert!(done > CAPACITY / 2, "node {node}: {done} bytes only");
            // Said once, by the write.
            assert_eq!((&*error, &*synced), ("28", "synced"), "node {node}");
            empty(node, "f");
        }
    }
    for trouble in [false, true] {
        let programs: Vec<_> = (1..=3)
            .map(|node| {
                let mut command = cluster.native(node);
                command.args(["python3", "-c", &fill(&format!("f{node}"))]);
                command.stdout(std::process::Stdio::piped()).spawn().unwrap()
            })
            .collect();
        if trouble {
            // The others get a new head in the middle of it.
            cluster.restart_services(1);
        }
        let said: Vec<String> =
            programs.into_iter().map(|p| text(&p.wait_with_output().unwrap())).collect();
        let done: u64 = said.iter().map(|said| figures(said).0).sum();
        assert!(done <= CAPACITY, "{done} bytes, a new head: {trouble}: {said:?}");
        assert!(said.iter().all(|said| figures(said).1 == "28"), "{said:?}");
        (1..=3).for_each(|node| empty(node, &format!("f{node}")));
    }
    cluster.assert_nobody_expelled();
}

/// What the service refuses while LibFS asks about an earlier refusal is told with that, and not again by fsync and close.
#[test]
fn a_full_volume_says_so_once() {
    let Some(cluster) = Cluster::new(1, "32MiB") else { return };
    let fill = |how: &str| format!("python3 {TESTS}/run/full.py . 6 {how}");
    for said in [
        cluster.run(1, &fill("fsync")).output().unwrap(),
        cluster.shell(1, &fill("fsync")).output().unwrap(),
        cluster.shell(1, &fill("")).output().unwrap(),
    ] {
        let said = text(&said);
        assert!(said.lines().all(|line| line.starts_with("ENOSPC ")), "{said}");
        assert!(!said.contains("ENOSPC ENOSPC") && !said.contains("ok ENOSPC"), "{said}");
    }
}

/// Their names stayed in the client's cache: stat and unlink were EIO.
#[test]
fn files_that_a_full_volume_refused_are_not_there() {
    let Some(cluster) = Cluster::new(1, "32MiB") else { return };
    let said = text(&cluster.run(1, &format!("python3 {TESTS}/run/refused.py")).output().unwrap());
    assert_eq!(said.lines().count(), 4, "{said}");
    let right = ["False ENOENT ENOENT", "True ok ok"];
    assert!(said.lines().all(|line| right.contains(&line)), "{said}");
}

/// What another node's mount had open, once, goes when it is removed: the mount is idle, and is not asked.
#[test]
fn space_of_a_file_that_another_mount_had_open_is_free_at_once() {
    let Some(cluster) = Cluster::new(3, "48MiB") else { return };
    let free = |node: usize| {
        let program =
            "import os; s = os.statvfs('.'); print(s.f_bfree * s.f_frsize, s.f_files - s.f_ffree)";
        let mut command = cluster.native(node);
        text(&command.args(["python3", "-c", program]).output().unwrap())
    };
    let before = free(1);
    // The mounts live on, and did something else in between; programs under `run` end.
    text(
        &cluster
            .shell(1, "head -c 20000000 /dev/urandom > f; mkdir d; ln -s f l; sync")
            .output()
            .unwrap(),
    );
    text(
        &cluster
            .shell(2, "cksum f > /dev/null; ls -l d l > /dev/null; mkdir e; ln -s f k; mknod m p")
            .output()
            .unwrap(),
    );
    text(&cluster.shell(3, "exec 3< f; read -n 1 -u 3 x; exec 3<&-; : > own").output().unwrap());
    assert_ne!(free(1), before);
    text(&cluster.shell(1, "rm -r f d l e k m own; sync .").output().unwrap());
    wait_for("the space of what nobody has open", Duration::from_secs(20), || {
        (free(1) == before).then_some(())
    });
    cluster.assert_nobody_expelled();
}

/// A removed directory is there for who stands in it or has it open, and for nobody else: neither mounts nor programs
/// keep what they have once looked at.
#[test]
fn a_removed_directory_is_there_for_as_long_as_somebody_is_in_it() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let inodes = |node: usize| {
        let program = "import os; s = os.statvfs('.'); print(s.f_files - s.f_ffree)";
        let mut command = cluster.native(node);
        text(&command.args(["python3", "-c", program]).output().unwrap())
    };
    let before = inodes(1);
    text(&cluster.shell(1, "mkdir -p a/b/c a/d e; sync .").output().unwrap());
    text(&cluster.shell(2, "ls -lR . > /dev/null; cd a/b; ls > /dev/null").output().unwrap());
    let looks = "cd a/b; ls -lR .. > /dev/null; exec 3< c; exec 3<&-";
    text(&cluster.run(3, looks).output().unwrap());
    let inside = "mkdir f; cd f; exec 3< .; rmdir ../f; chmod 700 .; chown 1:2 .; \
        touch -d @5 /proc/self/fd/3; stat -c '%h %a %u %g %Y' .; : > x || echo none";
    let said = "0 700 1 2 5\nnone\n";
    for made in [cluster.shell(2, inside), cluster.run(2, inside)] {
        let mut made = made;
        assert_eq!(text(&made.output().unwrap()), said);
    }
    let across = "import os, subprocess, sys\n\
        os.mkdir('g'); d = os.open('g', os.O_RDONLY)\n\
        subprocess.check_call(['rmdir', sys.argv[1] + '/g'])\n\
        os.fchmod(d, 0o711); os.fchown(d, 3, 4); os.fsync(d); s = os.fstat(d)\n\
        print(s.st_nlink, oct(s.st_mode), s.st_uid, s.st_gid, os.listdir(d))\n";
    let there = cluster.mount(1).display().to_string();
    let across = format!("python3 -c \"{across}\" {there}");
    for mut command in [cluster.shell(3, &across), cluster.run(3, &across)] {
        assert_eq!(text(&command.output().unwrap()), "0 0o40711 3 4 []\n");
    }
    text(&cluster.shell(1, "rm -r a e; sync .").output().unwrap());
    wait_for("directories that nobody is in", Duration::from_secs(20), || {
        (inodes(1) == before).then_some(())
    });
    cluster.assert_nobody_expelled();
    cluster.assert_nothing_refused();
}

/// More files than a program remembers (24,000).
#[test]
fn one_process_makes_more_files_than_it_remembers() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let script = "mkdir d; cd d; for i in $(seq 26000); do : > $i; done; ls | wc -l";
    assert_eq!(text(&cluster.run(1, script).output().unwrap()), "26000\n");
    assert_eq!(text(&cluster.shell(2, "ls d | wc -l").output().unwrap()), "26000\n");
    cluster.assert_nothing_refused();
}

/// Files are up to 16 TiB long, in both views, and what lies at their ends is seen everywhere.
#[test]
fn the_ends_of_the_largest_file_are_the_same_in_both_views() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let on = |what: &str, file: &str| format!("python3 {TESTS}/run/ends.py {what} {file}");
    for (hooked, file) in [(false, "mounted"), (true, "hooked")] {
        let run = |hooked: bool, node: usize, what: &str| {
            let script = on(what, file);
            let mut command =
                if hooked { cluster.run(node, &script) } else { cluster.shell(node, &script) };
            assert_eq!(text(&command.output().unwrap()), "good\n", "{script}, hooked: {hooked}");
        };
        run(hooked, 1, "write");
        run(hooked, 1, "read");
        run(!hooked, 1, "read");
        run(hooked, 2, "read");
        run(!hooked, 3, "read");
    }
}

/// Another user reads what its permissions say, in both views.
#[test]
fn another_user_is_another_user() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let make = "echo secret > s; chmod 600 s; echo open > o; mkdir -m 1777 t; echo x > t/x; \
        echo then > p; cat p; chmod 600 p";
    text(&cluster.run(1, make).output().unwrap());
    let other = "setpriv --reuid=65534 --regid=65534 --clear-groups sh -c 'cat s; cat p; cat o; \
        rm -f t/x; echo mine > t/m; cat t/m; stat -c %u t/m; rm t/m' 2>/dev/null";
    for node in [1, 2] {
        let expected = "open\nmine\n65534\n";
        assert_eq!(text(&cluster.shell(node, other).output().unwrap()), expected, "mount {node}");
        assert_eq!(text(&cluster.run(node, other).output().unwrap()), expected, "run {node}");
    }
    assert_eq!(text(&cluster.run(3, "cat s p t/x").output().unwrap()), "secret\nthen\nx\n");
    cluster.assert_nothing_refused();
}

/// A file without a name: data, a name by either form of linkat, none where O_EXCL forbids it; it is
/// gone with its process, and its space with it.
#[test]
fn a_file_made_without_a_name_gets_one_or_goes() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let program = "import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True); AT = -100; w = sys.argv[1]
def link(fd, name, empty):
    if empty: r = libc.linkat(fd, b'', AT, name.encode(), 0x1000)
    else: r = libc.linkat(AT, b'/proc/self/fd/%d' % fd, AT, name.encode(), 0x400)
    return 0 if r == 0 else ctypes.get_errno()
T = os.O_RDWR | os.O_TMPFILE
for empty in (False, True):
    fd = os.open('.', T, 0o640); os.write(fd, b'x' * 300000)
    assert os.fstat(fd).st_nlink == 0 and os.fstat(fd).st_mode == 0o100640
    name = f'{w}-{empty}'; assert link(fd, name, empty) == 0; os.close(fd)
    assert open(name).read() == 'x' * 300000 and os.stat(name).st_nlink == 1
    assert link(os.open(name, os.O_RDONLY), name + '2', empty) == 0
    assert os.stat(name).st_nlink == 2
fd = os.open('.', T | os.O_EXCL, 0o600)
assert link(fd, 'never', False) == 2, link(fd, 'never', False)
fd = os.open('.', T); os.set_inheritable(fd, True); os.write(fd, b'y' * 9000000); os.fsync(fd)
if os.fork() == 0: os.lseek(fd, 0, 0); os.execlp('sh', 'sh', '-c', f'wc -c <&{fd}')
assert os.wait()[1] == 0
print(os.statvfs('.').f_bfree)";
    let names = "ls; stat -c %h r-True; [ ! -e never ]";
    let run = |w: &str| format!("umask 022; exec python3 -c \"{program}\" {w}");
    let free = |o: Output| -> u64 {
        let said = text(&o);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[0], "9000000");
        lines[1].parse().unwrap()
    };
    let during = free(cluster.run(1, &run("r")).output().unwrap());
    free(cluster.shell(2, &run("m")).output().unwrap());
    let all = "m-False\nm-False2\nm-True\nm-True2\nr-False\nr-False2\nr-True\nr-True2\n2\n";
    assert_eq!(text(&cluster.shell(3, names).output().unwrap()), all);
    wait_for("the space of the file", Duration::from_secs(10), || {
        let free = text(&cluster.shell(1, "stat -fc %f .").output().unwrap());
        (free.trim().parse::<u64>().unwrap() > during + 1500).then_some(())
    });
    cluster.assert_nothing_refused();
}

/// Copies inside the volume, with and without alignment, onto what is there and beyond the end, of a
/// file whose last bytes are in the log only; and FICLONE where the kernel lets it through.
#[test]
fn copies_inside_the_volume_are_what_they_copy() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let program = "import fcntl, mmap, os, struct, sys, errno
w = sys.argv[1]; FICLONE, RANGE = 0x40049409, 0x4020940d
data = bytearray(os.urandom(3_000_000)); data[500_000:1_500_000] = bytes(1_000_000)
open(w, 'wb').write(data)
src = os.open(w, os.O_RDWR)
os.pwrite(src, b'last', 7); data[7:11] = b'last'
def copy(dst, at, to, n):
    done = 0
    while done < n:
        got = os.copy_file_range(src, dst, n - done, at + done, to + done)
        if got == 0: break
        done += got
    return done
for k, (at, to, n, old) in enumerate([(0, 0, 3_000_000, 0), (4096, 8192, 2_000_000, 9_000_000),
        (777, 31, 1_999_999, 1_000_000), (2_500_000, 100, 900_000, 50), (3_000_000, 0, 9, 5)]):
    want = bytearray(b'o' * old); n_ = min(n, 3_000_000 - at)
    want += bytes(max(0, to + n_ - len(want)) if n_ > 0 else 0); want[to:to + n_] = data[at:at + n_]
    open(f'{w}{k}', 'wb').write(b'o' * old); dst = os.open(f'{w}{k}', os.O_RDWR)
    assert copy(dst, at, to, n) == max(n_, 0), k
    assert os.pread(dst, 1 << 24, 0) == want, k
    assert open(f'{w}{k}', 'rb').read() == want, k
    os.fsync(dst); assert os.fstat(dst).st_size == len(want)
assert copy(src, 0, 1_000_000, 900_000) == 900_000; data[1_000_000:1_900_000] = data[:900_000]
assert os.pread(src, 1 << 24, 0) == data
try: os.copy_file_range(src, src, 500_000, 0, 100_000); assert False
except OSError as e: assert e.errno == errno.EINVAL
if w == 'run':
    dst = os.open('clone', os.O_RDWR | os.O_CREAT); fcntl.ioctl(dst, FICLONE, src)
    assert os.pread(dst, 1 << 24, 0) == data
    fcntl.ioctl(dst, RANGE, struct.pack('<qQQQ', src, 4096, 8192, 0)); data[:8192] = data[4096:12288]
    before = os.pread(src, 4, 0); os.pwrite(dst, b'own', 0); assert os.pread(src, 4, 0) == before
    assert os.pread(dst, 3, 0) == b'own' and os.pread(dst, 8192, 4096) == data[4096:12288]
    try: fcntl.ioctl(dst, RANGE, struct.pack('<qQQQ', src, 1, 8192, 0)); assert False
    except OSError as e: assert e.errno == errno.EINVAL
    tmp = os.open('/etc/passwd', os.O_RDONLY)
    try: fcntl.ioctl(dst, FICLONE, tmp); assert False
    except OSError as e: assert e.errno == errno.EXDEV
    # Whichever end becomes the kernel's, since somebody maps the file: the other one stays.
    for n in range(4):
        a, b = f'a{n}', f'b{n}'; open(b, 'wb').write(data[:9000])
        to = os.open(a, os.O_RDWR | os.O_CREAT); os.ftruncate(to, 5000); source = os.open(b, os.O_RDWR)
        where = os.open((a, b)[n % 2], os.O_RDWR); mmap.mmap(where, 4096)[:3] = b'map'
        if n < 2: fcntl.ioctl(to, FICLONE, source)
        else: assert os.copy_file_range(source, to, 9000, 0, 0) == 9000
        assert os.pread(to, 9001, 0) == os.pread(source, 9001, 0), n
        # FIDEDUPERANGE: no file of ours can.
        ask = bytearray(struct.pack('<QQHHIqQQiI', 0, 4096, 1, 0, 0, source, 0, 0, 0, 0))
        try: fcntl.ioctl(to, 0xc0189436, ask); assert False
        except OSError as e: assert e.errno == errno.EOPNOTSUPP, e
print('same')";
    for (node, w) in [(1, "run"), (2, "mount")] {
        let script = format!("exec python3 -c \"{program}\" {w}");
        let mut command =
            if w == "run" { cluster.run(node, &script) } else { cluster.shell(node, &script) };
        assert_eq!(text(&command.output().unwrap()), "same\n", "{w}");
    }
    let script = "cp --reflink=auto mount 2; cmp mount 2; cp --reflink=always run 3; cmp run 3; \
        md5sum < mount > sums; cat sums | wc -l";
    assert_eq!(text(&cluster.run(3, script).output().unwrap()), "1\n");
    let sums =
        "for f in run mount; do for i in '' 0 1 2 3 4; do md5sum < $f$i; done; done | md5sum";
    let want = text(&cluster.shell(1, sums).output().unwrap());
    for node in [2, 3] {
        assert_eq!(text(&cluster.shell(node, sums).output().unwrap()), want, "node {node}");
    }
    let stats = fs::read_to_string(cluster.mount(2).join(".corbel/stats")).unwrap();
    let copied = stats.lines().find_map(|l| l.strip_prefix("fuse_copied_bytes_total ")).unwrap();
    assert!(copied.parse::<u64>().unwrap() > 4_000_000, "{stats}");
    cluster.assert_nothing_refused();
}

/// A clone takes no space and is made at once; who writes to one of the files gets blocks of its own,
/// also a process that knew the blocks before they were shared; and they are free in the end.
#[test]
fn clones_share_blocks() {
    let Some(cluster) = Cluster::new(2, CAPACITY) else { return };
    let program = "import fcntl, os, sys
FICLONE = 0x40049409; size = 24 << 20
def free(): return os.statvfs('.').f_bfree
def make(name): return os.open(name, os.O_RDWR | os.O_CREAT)
def clone(a, b): fd = make(b); fcntl.ioctl(fd, FICLONE, a); return fd
whole = free(); data = bytearray(os.urandom(size)); a = make('a')
for at in range(0, size, 1 << 20): os.pwrite(a, data[at:at + (1 << 20)], at)
os.fsync(a); assert os.pread(a, size, 0) == data
left = free(); b = clone(a, 'b'); assert free() == left, 'a clone takes space'
assert os.fstat(b).st_blocks == os.fstat(a).st_blocks == size // 512
c = clone(b, 'c'); assert free() == left
old = bytes(data)
os.pwrite(a, b'few', 5000); data[5000:5003] = b'few'
assert os.pread(a, 20000, 0) == data[:20000]; os.fsync(a)
assert left - free() == 1 and os.pread(a, size, 0) == data
assert os.pread(b, size, 0) == old and os.pread(c, size, 0) == old
os.ftruncate(b, 10000); os.ftruncate(b, 20000)
assert os.pread(b, 20000, 0) == old[:10000] + bytes(10000)
assert os.pread(c, size, 0) == old and os.pread(a, size, 0) == data
os.unlink('b'); os.close(b)
# Another process clones a file whose blocks are known here, takes it away, and uses what is free.
def child(step):
    if os.fork() == 0:
        step(); os._exit(0)
    assert os.wait()[1] == 0
def share(): os.close(clone(os.open('a', os.O_RDONLY), 'd'))
def reuse():
    os.unlink('d'); os.unlink('c'); fd = make('e')
    for at in range(0, size // 2, 1 << 20): os.pwrite(fd, b'x' * (1 << 20), at)
    os.fsync(fd)
child(share)
for at in range(9000, size, 1 << 20): os.pwrite(a, b'own', at); data[at:at + 3] = b'own'
os.fsync(a); os.close(c); child(reuse)
assert os.pread(a, size, 0) == data, 'read what is another file now'
os.fsync(a); print('same')";
    let script = format!("exec python3 -c \"{program}\"");
    assert_eq!(text(&cluster.run(1, &script).output().unwrap()), "same\n");
    let sums = "md5sum a e | md5sum";
    let want = text(&cluster.run(1, sums).output().unwrap());
    assert_eq!(text(&cluster.shell(2, sums).output().unwrap()), want);
    let script = "cp --reflink=always a f && rm a && cmp f f && md5sum < f";
    let got = text(&cluster.run(2, script).output().unwrap());
    assert_eq!(text(&cluster.shell(1, "md5sum < f").output().unwrap()), got);
    cluster.assert_nothing_refused();
    assert!(cluster.corbel(&["cluster", "down", "--keep"]).status.success());
    let region = |node: usize| cluster.path(&format!("n{node}/region")).display().to_string();
    let (first, second) = (region(1), region(2));
    let fsck = super::harness::corbel(["--json", "fsck", "--region", &first, "--compare", &second]);
    assert_eq!(json(&fsck)["sound"], true, "{fsck:?}");
}

/// Access control lists, set in one view and obeyed in the other: named users and groups, the mask
/// and chmod, what is inherited, and the programs that keep lists when they copy.
#[test]
fn access_lists_are_kept_and_obeyed_in_both_views() {
    let found = |name: &str| Command::new(name).arg("--version").output().is_ok();
    if !found("setfacl") || !found("rsync") {
        eprintln!("skipped: the packages acl and rsync are not here");
        return;
    }
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let make = "umask 077; mkdir W; cd W; echo secret > s; setfacl -m u:65534:r s; chmod o= s
        getfacl -cn s; stat -c %a s; chmod g-r s; getfacl -cn s | grep effective; chmod g+r s
        mkdir d; setfacl -m u:65534:rwx,d:u:65534:rw,d:o::r d; echo in > d/f; mkdir d/sub
        getfacl -cn d/f d/sub | tr '\\n' ' '; echo; stat -c %a d/f d/sub
        cp -a s s2; rsync -A s s3; getfacl -cn s2 s3 | md5sum; getfacl -cn s s | md5sum
        setfacl -b s3; getfacl -cn s3; stat -c %a s3; ! setfacl -m d:u:1:r s 2> /dev/null
        setfacl -k d; getfacl -cn d; chown 65533 s2; chmod 711 .; chmod 755 ..";
    let start = "user::rw-\nuser:65534:r--\ngroup::---\nmask::r--\nother::---\n\n640\n\
        user:65534:r--\t#effective:---\n\
        user::rw- user:65534:rw- group::--- mask::rw- other::r--  ";
    for (node, w) in [(1, "r"), (2, "m")] {
        let script = make.replace('W', w);
        let output = match w {
            "r" => cluster.run(node, &script).output(),
            _ => cluster.shell(node, &script).output(),
        };
        let said = text(&output.unwrap());
        assert!(said.starts_with(start), "{w}: {said}");
        let lines: Vec<&str> = said.lines().collect();
        let sums: Vec<&&str> = lines.iter().filter(|l| l.ends_with("  -")).collect();
        assert_eq!((sums.len(), sums[0]), (2, sums[1]), "copies have the same lists");
        assert!(said.contains("\n664\n764\n"), "{w}: a default list takes the place of the umask");
        assert!(said.contains("default:user:65534:rw-"), "{w}: a directory hands it on");
        assert!(said.ends_with("user::rwx\nuser:65534:rwx\ngroup::---\nmask::rwx\nother::---\n\n"));
    }
    let other =
        "setpriv --reuid=65534 --regid=65534 --clear-groups sh -c 'for d in r m; do cat $d/s
        cat $d/s3; cat $d/d/f; echo more >> $d/d/f; echo own > $d/d/own && cat $d/d/own
        echo no > $d/s; [ -r $d/s ] && ! [ -w $d/s ] && echo right; setfacl -m u:1:r $d/s
        rm $d/d/own; done' 2>/dev/null";
    // What a kernel keeps of a list goes when another node changes it.
    let reads = "setpriv --reuid=65534 --regid=65534 --clear-groups cat seen 2>/dev/null; true";
    text(&cluster.shell(1, "echo seen > seen; chmod 600 seen").output().unwrap());
    for (change, want) in [
        ("chmod 600", ""),
        ("setfacl -m u:65534:r", "seen\n"),
        ("chmod 600", ""),
        ("setfacl -m m::r", "seen\n"),
        ("setfacl -b", ""),
    ] {
        text(&cluster.shell(2, &format!("{change} seen")).output().unwrap());
        assert_eq!(text(&cluster.shell(1, reads).output().unwrap()), want, "{change}");
    }
    let want = "secret\nin\nown\nright\n".repeat(2);
    for node in [1, 3] {
        let undo = "for d in r m; do echo in > $d/d/f; done";
        text(&cluster.shell(2, undo).output().unwrap());
        assert_eq!(text(&cluster.shell(node, other).output().unwrap()), want, "mount {node}");
        text(&cluster.shell(2, undo).output().unwrap());
        assert_eq!(text(&cluster.run(node, other).output().unwrap()), want, "run {node}");
    }
    let third = "setpriv --reuid=65533 --regid=65533 --clear-groups sh -c 'cat r/s; cat m/d/f; \
        cat r/s2' 2>/dev/null";
    assert_eq!(text(&cluster.shell(1, third).output().unwrap()), "secret\n");
    assert_eq!(text(&cluster.run(3, third).output().unwrap()), "secret\n");
    cluster.assert_nothing_refused();
}

/// Limits of directories and users: set by the command, EDQUOT in both views, nothing gets in or out
/// but by copying; the sums are those of the files, also for the checker and after a restart.
#[test]
fn quotas_hold_in_both_views_and_add_up() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let quota = |node: usize, args: &[&str]| {
        let mut command = Command::new(CORBEL);
        command.args(["--json", "quota", "--socket"]);
        command.arg(cluster.socket(node)).args(args);
        command.output().unwrap()
    };
    let of = |node: usize, args: &[&str]| {
        let output = quota(node, args);
        text(&output);
        let account = &json(&output)["accounts"][0];
        let pair =
            |a: &serde_json::Value| (a["bytes"].as_u64().unwrap(), a["inodes"].as_u64().unwrap());
        (pair(&account["used"]), pair(&account["limit"]))
    };
    let make =
        "mkdir -p p/q/r u; head -c 1000000 /dev/zero > p/q/f; echo > p/q/r/g; chmod 777 p/q u";
    text(&cluster.run(1, make).output().unwrap());
    let dir = ["set", "--dir", "/p/q", "--bytes", "2MiB", "--inodes", "8"];
    let blocks = 1_000_000u64.div_ceil(4096) * 4096;
    assert_eq!(of(2, &dir), ((blocks + 4096, 4), (2 << 20, 8)));
    of(3, &["set", "--user", "65534", "--bytes", "1MiB", "--inodes", "3"]);
    for output in [
        cluster.shell(1, "cd p/q; stat -fc '%b %c' .").output(),
        cluster.run(3, "stat -fc '%b %c' p/q/r").output(),
    ] {
        assert_eq!(text(&output.unwrap()), "512 8\n", "df shows the quota");
    }
    let full = "cd p/q; for i in 1 2 3 4 5; do echo > W$i; done 2>&1 | grep -c 'Disk quota exceeded'
        ls W? | wc -l; rm W?; dd if=/dev/zero of=Wbig bs=64K count=40 conv=fsync 2>&1 | \
        grep -c 'Disk quota exceeded' | sed s/2/1/; rm Wbig; cd ../..; echo x > Wo
        python3 -c \"import errno, os
for f in (os.rename, os.link):
    try: f('Wo', 'p/q/Wo'); assert False
    except OSError as e: assert e.errno == errno.EXDEV
    try: f('p/q/f', 'Wf'); assert False
    except OSError as e: assert e.errno == errno.EXDEV\"
        mv Wo p/q/Wo; cat p/q/Wo; mv p/q/r/g p/q/g; mv p/q/g p/q/r/g; rm p/q/Wo; mv p/q p/t; mv p/t p/q
        rm -f p/q/none; sync -f .";
    let user = "setpriv --reuid=65534 --regid=65534 --clear-groups sh -c 'cd u; for i in 1 2 3 4; do \
        mkdir W$i; done 2>&1 | grep -c exceeded; rmdir W1 W2 W3; head -c 1100000 /dev/zero > Wf; \
        sync Wf 2>&1 | grep -c exceeded; rm Wf'; true";
    // What is removed counts until nobody has it open any more, and a program's end is noticed soon.
    let settled = || {
        wait_for("what is gone not to be counted", Duration::from_secs(10), || {
            (of(3, &["show", "--dir", "/p/q"]).0 == (blocks + 4096, 4)).then_some(())
        });
    };
    for node in [1, 2] {
        for (w, view) in [("r", true), ("m", false)] {
            settled();
            let (full, user) = (full.replace('W', w), user.replace('W', w));
            let go = |script: &str| match view {
                true => text(&cluster.run(node, script).output().unwrap()),
                false => text(&cluster.shell(node, script).output().unwrap()),
            };
            assert_eq!(go(&full), "1\n4\n1\nx\n", "node {node}, {w}");
            let said = go(&user);
            assert!(said.starts_with("1\n"), "node {node}, {w}: {said}");
        }
    }
    // Who gives files away is told that the quota bars it, and does not go on to make one set-user-ID that is still his.
    let give = "cd u; for i in 1 2 3 4; do echo > W$i; chown 65534 W$i && chmod 4755 W$i; done 2>&1 | \
        grep -c 'Disk quota exceeded'; stat -c '%u %a' W?; rm W?; sync -f .";
    for (w, view) in [("r", true), ("m", false)] {
        let script = give.replace('W', w);
        let said = match view {
            true => text(&cluster.run(2, &script).output().unwrap()),
            false => text(&cluster.shell(2, &script).output().unwrap()),
        };
        // (The directory is root's: three of them are his.)
        assert_eq!(said, "1\n65534 4755\n65534 4755\n65534 4755\n0 644\n", "{w}");
    }
    settled();
    let other = quota(1, &["set", "--user", "0", "--inodes", "1"]);
    assert_eq!(other.status.code(), Some(2), "the super-user has no quota");
    let cleared = of(1, &["clear", "--dir", "/p/q"]);
    assert_eq!(cleared, ((0, 0), (0, 0)));
    text(&cluster.shell(3, "mv p/q/f f").output().unwrap());
    let user = of(2, &["show", "--user", "65534"]);
    assert_eq!(user.1, (1 << 20, 3));
}

#[test]
fn an_ordinary_user_is_shown_what_it_may_see_and_hands_it_on() {
    let Some(cluster) = Cluster::new(3, CAPACITY) else { return };
    let make =
        "mkdir -m 700 private; mkdir private/open; echo x > private/open/f; mkdir -m 777 1 2";
    text(&cluster.run(1, make).output().unwrap());
    let script = fs::read_to_string(format!("{TESTS}/run/ordinary.sh")).expect("the script");
    let expected =
        "child read one\none\nf\nb\none\nb'data' ['f', 'g'] 4 data\n102\n2\nclosed\nclosed\n";
    for node in [1, 2] {
        let mut run = cluster.run(
            node,
            "cd $0; exec setpriv --reuid=1000 --regid=1000 \
            --clear-groups bash -c \"$1\"",
        );
        run.arg(node.to_string()).arg(&script);
        assert_eq!(text(&run.output().unwrap()), expected, "node {node}");
    }
    for node in 1..=3 {
        assert_eq!(cluster.status(node)["counters"]["unshown"], 0, "node {node}");
    }
    cluster.assert_nothing_refused();
}
