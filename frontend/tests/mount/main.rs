//! Real programs on a mounted `dir` back end. The server is another process (this test binary
//! again, as [`harness::serve_child`]), so that killing it is a test too.
//!
//! Needs `/dev/fuse` and root; says so and passes where they are absent.

mod cache;
mod harness;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use harness::Mounted;

fn has(program: &str) -> bool {
    let found = Command::new("which").arg(program).output().is_ok_and(|o| o.status.success());
    if !found {
        println!("skipped: no {program}");
    }
    found
}

#[test]
fn coreutils_and_tar() {
    let Some(mount) = Mounted::new("coreutils") else { return };
    mount.sh(
        "mkdir -p a/b/c; echo one >a/f; cp -a a z; mv z/f z/g; ln z/g z/h; ln -s ../a/f z/s
         test \"$(cat z/s)\" = one; test \"$(stat -c %h z/g)\" = 2; rm z/g; test \"$(cat z/h)\" = one
         dd if=/dev/urandom of=big bs=64k count=40 status=none; split -b 100k big part.
         cat part.* | cmp - big; head -c 1000000 big >cut; truncate -s 12345 cut
         test \"$(stat -c %s cut)\" = 12345; install -m 700 big prog; test \"$(stat -c %a prog)\" = 700
         touch -d 2001-02-03T04:05:06.123456789Z t; date -u -r t +%s.%N | grep -qx 981173106.123456789
         mktemp -p . tmp.XXXX >/dev/null; find . -name 'part.*' | sort >list; test $(wc -l <list) -gt 20
         du -s . >/dev/null; df . >/dev/null; sync; sort -R list | sort | cmp - list
         rm -r a z part.* big",
    );
    // A real tree, there and back, compared with all that tar knows.
    mount.sh(
        "tar -C /usr/include -cf - linux asm-generic | tar -xf -
         diff -r linux /usr/include/linux
         tar -cf - linux | tar -tf - | sort >names; (cd /usr/include; find linux) | sed 's|/$||' | sort >want
         sed -i 's|/$||' names; sort -o names names; cmp names want; rm -r linux asm-generic",
    );
}

#[test]
fn git_repository() {
    let Some(mount) = Mounted::new("git") else { return };
    if !has("git") {
        return;
    }
    mount.sh(
        "git init -q r; cd r; git config user.name n; git config user.email e@x
         cp -r /usr/include/linux/netfilter .; git add .; git commit -qm first
         for i in 1 2 3 4 5; do echo $i >f$i; git add f$i; git commit -qm c$i; done
         git checkout -qb side HEAD~2; echo side >s; git add s; git commit -qm side
         git checkout -q -; git merge -q -m merged side; git gc -q; git fsck --strict
         test -z \"$(git status --porcelain)\"; cd ..; git clone -q r copy; diff -r -x .git r copy",
    );
}

#[test]
fn sqlite_in_both_journal_modes() {
    let Some(mount) = Mounted::new("sqlite") else { return };
    if !has("sqlite3") {
        return;
    }
    for mode in ["wal", "delete"] {
        let out = mount.sh(&format!(
            "sqlite3 {mode}.db 'pragma journal_mode={mode}; create table t(a);'
             for i in 1 2 3 4; do (for j in $(seq 10); do
               sqlite3 -cmd '.timeout 20000' {mode}.db \"insert into t values($i$j)\"; done) & done; wait
             sqlite3 {mode}.db 'select count(*) from t; pragma integrity_check;'"
        ));
        assert!(out.ends_with("40\nok\n"), "{out}");
    }
}

#[test]
fn python_and_mmap() {
    let Some(mount) = Mounted::new("python") else { return };
    if !has("python3") {
        return;
    }
    mount.sh(
        r#"cat >t.py <<'PY'
import mmap, os, fcntl, subprocess, shutil, tempfile
with open("m", "wb") as f: f.write(b"a" * 10000)
fd = os.open("m", os.O_RDWR)
shared = mmap.mmap(fd, 10000)
private = mmap.mmap(fd, 10000, access=mmap.ACCESS_COPY)
shared[5000:5004] = b"SHAR"
assert os.pread(fd, 4, 5000) == b"SHAR"
private[0:4] = b"PRIV"
assert os.pread(fd, 4, 0) == b"aaaa"
assert os.pwrite(fd, b"written", 100) == 7
assert shared[100:107] == b"written"
shared.flush()
out = subprocess.check_output(["dd", "if=m", "bs=1", "skip=5000", "count=4", "status=none"])
assert out == b"SHAR", out
shared.close(); os.close(fd)
assert open("m", "rb").read()[5000:5004] == b"SHAR"
# Locks are the kernel's, between processes on this mount.
l = open("lock", "w"); fcntl.lockf(l, fcntl.LOCK_EX)
code = "import fcntl,sys\ntry: fcntl.lockf(open('lock','w'), fcntl.LOCK_EX|fcntl.LOCK_NB)\nexcept OSError: sys.exit(7)"
assert subprocess.call(["python3", "-c", code]) == 7
assert subprocess.call(["flock", "-n", "other", "true"]) == 0
os.setxattr("m", "user.k", b"v"); assert os.listxattr("m") == ["user.k"]; assert os.getxattr("m", "user.k") == b"v"
os.removexattr("m", "user.k"); assert os.listxattr("m") == []
with tempfile.TemporaryFile(dir=".") as t:
    t.write(b"x"); t.seek(0); assert t.read() == b"x"
fd = os.open("sparse", os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"x", 1 << 20)
assert os.lseek(fd, 0, os.SEEK_DATA) == 1 << 20 and os.lseek(fd, 0, os.SEEK_HOLE) == 0
os.posix_fallocate(fd, 0, 2 << 20); assert os.fstat(fd).st_size == 2 << 20
a = os.open("src", os.O_RDWR | os.O_CREAT); os.write(a, b"copy me")
b = os.open("dst", os.O_RDWR | os.O_CREAT); os.lseek(a, 0, 0)
assert os.copy_file_range(a, b, 100) == 7 and os.pread(b, 100, 0) == b"copy me"
os.lseek(a, 0, 0); assert os.sendfile(b, a, 0, 4) == 4
os.mkfifo("fifo"); assert os.stat("fifo").st_mode & 0o170000 == 0o010000
shutil.copytree("/usr/include/linux/can", "can"); shutil.rmtree("can")
PY
python3 t.py"#,
    );
}

#[test]
fn compile_and_execute() {
    let Some(mount) = Mounted::new("gcc") else { return };
    if !has("gcc") {
        return;
    }
    mount.sh(
        "printf '#include <stdio.h>\nint main(void){puts(\"from the mount\");return 0;}' >p.c
         for i in 1 2 3; do gcc -o p p.c; test \"$(./p)\" = 'from the mount'; done
         gcc -c p.c -o p.o; ar rcs lib.a p.o; gcc -o q lib.a; ./q >/dev/null
         printf '#!/bin/sh\necho script' >s.sh; chmod +x s.sh; test \"$(./s.sh)\" = script
         cp /bin/sleep .; ./sleep 0.2 & sleep 0.05; (echo x >sleep || true) 2>&1 | grep -q 'Text file busy'; wait",
    );
}

#[test]
fn open_files_outlive_their_names() {
    let Some(mount) = Mounted::new("unlink") else { return };
    let (f, g) = (mount.path("f"), mount.path("g"));
    fs::write(&f, "first").unwrap();
    fs::write(&g, "second").unwrap();
    let mut held = File::options().read(true).write(true).open(&g).unwrap();
    fs::rename(&f, &g).unwrap();
    assert_eq!(fs::read(&g).unwrap(), b"first");
    let mut text = String::new();
    held.read_to_string(&mut text).unwrap();
    assert_eq!(text, "second");
    assert_eq!(held.metadata().unwrap().nlink(), 0);
    let unlinked = File::options().read(true).write(true).open(&g).unwrap();
    fs::remove_file(&g).unwrap();
    unlinked.write_all_at(b"FIRST and more", 0).unwrap();
    unlinked.set_len(5).unwrap();
    let mut buf = [0; 16];
    assert_eq!(unlinked.read_at(&mut buf, 0).unwrap(), 5);
    assert_eq!(&buf[..5], b"FIRST");
    assert_eq!(unlinked.metadata().unwrap().len(), 5);
    assert!(!g.exists());
    // Their space comes back once they are closed.
    held.set_len(0).unwrap();
    unlinked.set_len(64 << 20).unwrap();
}

#[test]
fn appends_meet_at_the_end() {
    let Some(mount) = Mounted::new("append") else { return };
    let path = mount.path("log");
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let path = &path;
            scope.spawn(move || {
                let mut file = File::options().append(true).create(true).open(path).unwrap();
                for _ in 0..200 {
                    file.write_all(&[b'a' + writer; 50]).unwrap();
                }
            });
        }
    });
    let log = fs::read(&path).unwrap();
    assert_eq!(log.len(), 4 * 200 * 50);
    assert!(log.chunks(50).all(|record| record.iter().all(|b| *b == record[0])));
    // Somebody else makes it longer beside the kernel, which does not know: nothing is lost.
    let mut file = File::options().append(true).read(true).open(&path).unwrap();
    File::options()
        .append(true)
        .open(mount.back().join("log"))
        .unwrap()
        .write_all(b"beside")
        .unwrap();
    file.write_all(b"through").unwrap();
    let end = log.len() as u64;
    file.seek(SeekFrom::Start(end)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "besidethrough");
}

/// What is appended by one call reaches the server as one request, so that nobody can append in its
/// middle: also when it begins in a page that the kernel does not hold, where it would cut it.
#[test]
fn an_append_is_one_request() {
    let Some(mount) = Mounted::new("one-append") else { return };
    let writes = || {
        let stats = fs::read_to_string(mount.path(".corbel/stats")).unwrap();
        let count = |l: &str| l.strip_prefix("fuse_write_total ").and_then(|n| n.parse().ok());
        stats.lines().find_map(count).unwrap_or(0u64)
    };
    let path = mount.path("f");
    fs::write(mount.back().join("f"), [b'a'; 3000]).unwrap();
    let before = writes();
    let mut file = File::options().append(true).read(true).open(&path).unwrap();
    assert_eq!(file.write(&[b'b'; 50_000]).unwrap(), 50_000);
    assert_eq!(writes(), before + 1);
    file.write_all(b"c").unwrap();
    assert_eq!(writes(), before + 2);
    assert_eq!(fs::metadata(&path).unwrap().len(), 53_001);
    // Such a file can be mapped all the same, and both see the same bytes.
    mount.sh("python3 -c 'import mmap, os
fd = os.open(\"f\", os.O_RDWR | os.O_APPEND)
shared = mmap.mmap(fd, 53001)
shared[10:13] = b\"xyz\"; shared.flush()
assert os.pread(fd, 5, 9) == b\"axyza\"
assert os.write(fd, b\"end\") == 3
assert os.pread(fd, 9, 53000) == b\"cend\"'");
}

/// The kernel drops pages before a direct write; another process maps them in again meanwhile.
#[test]
fn a_mapping_sees_direct_writes() {
    let Some(mount) = Mounted::new("direct") else { return };
    mount.sh("timeout 60 python3 -c 'import mmap, os, signal
fd = os.open(\"f\", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
block = mmap.mmap(-1, 8192)
assert os.pwritev(fd, [block], 0) == 8192
shared = mmap.mmap(fd, 8192)
parent = os.getpid()
child = os.fork()
if child == 0:
    while os.getppid() == parent: shared[0]; shared[4096]
    os._exit(0)
for n in range(3000):
    block[0:4] = block[4096:4100] = n.to_bytes(4)
    assert os.pwritev(fd, [block], 0) == 8192
    assert int.from_bytes(shared[0:4]) == int.from_bytes(shared[4096:4100]) == n
shared[8:12] = b\"mine\"; shared.flush()
assert os.preadv(fd, [block], 0) == 8192 and block[8:12] == b\"mine\"
os.kill(child, signal.SIGKILL); os.wait()
'");
}

#[test]
fn changes_beside_the_mount_are_seen() {
    let Some(mount) = Mounted::new("beside") else { return };
    let (path, back) = (mount.path("f"), mount.back().join("f"));
    fs::write(&path, "0000").unwrap();
    let open = File::open(&path).unwrap();
    for round in 1..20u32 {
        fs::write(&back, format!("{round:04}{}", "x".repeat(round as usize))).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 4 + u64::from(round));
        let mut buf = [0; 4];
        open.read_at(&mut buf, 0).unwrap();
        assert_eq!(buf, format!("{round:04}").as_bytes());
    }
    fs::remove_file(&back).unwrap();
    assert!(!path.exists());
    fs::create_dir(&back).unwrap();
    assert!(path.is_dir());
}

#[test]
fn names_of_every_length_and_byte() {
    let Some(mount) = Mounted::new("names") else { return };
    for len in [1, 127, 254, 255] {
        let path = mount.path(&"n".repeat(len));
        fs::write(&path, "x").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"x");
    }
    let long = fs::write(mount.path(&"n".repeat(256)), "x").unwrap_err();
    assert_eq!(long.raw_os_error(), Some(36));
    let odd: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"\x01\n\\\"' \xff\xfe*");
    fs::create_dir(mount.dir.join(odd)).unwrap();
    let listed: Vec<_> =
        fs::read_dir(&mount.dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(listed.len(), 5);
    assert!(listed.iter().any(|name| name == odd));
}

#[test]
fn listing_is_stable_while_names_go() {
    let Some(mount) = Mounted::new("readdir") else { return };
    const COUNT: usize = 10_000;
    let dir = mount.back().join("d");
    fs::create_dir(&dir).unwrap();
    for i in 0..COUNT {
        File::create(dir.join(format!("entry-{i:05}"))).unwrap();
    }
    let mut seen = vec![0u8; COUNT];
    for (n, entry) in fs::read_dir(mount.path("d")).unwrap().enumerate() {
        let name = entry.unwrap().file_name();
        let i: usize = name.to_str().unwrap()[6..].parse().unwrap();
        seen[i] += 1;
        // Odd ones go while the listing is under way.
        if n < COUNT / 2 {
            let _ = fs::remove_file(mount.path(&format!("d/entry-{:05}", 2 * n + 1)));
        }
    }
    assert!(seen.iter().all(|count| *count <= 1), "an entry was listed twice");
    assert!(seen.iter().step_by(2).all(|count| *count == 1), "an entry that stayed was missed");
    assert_eq!(fs::read_dir(mount.path("d")).unwrap().count(), COUNT / 2);
    fs::remove_dir_all(mount.path("d")).unwrap();
    assert!(!dir.exists());
}

#[test]
fn a_full_disk_is_reported_and_stays_usable() {
    let full = |back: &Path| {
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
            .arg(back)
            .status()
            .unwrap();
        assert!(status.success());
    };
    let Some(mount) = Mounted::with_back("enospc", full) else { return };
    let path = mount.path("f");
    fs::write(&path, "kept").unwrap();
    let big = File::create(mount.path("big")).unwrap();
    let block = vec![7u8; 64 << 10];
    let error = (0..64).find_map(|i| big.write_all_at(&block, i * (64 << 10)).err());
    assert_eq!(error.and_then(|e| e.raw_os_error()), Some(28));
    assert_eq!(fs::read(&path).unwrap(), b"kept");
    drop(big);
    fs::remove_file(mount.path("big")).unwrap();
    // The kernel tells of the close when it has returned already (FUSE_RELEASE); until then the file is open.
    let begin = Instant::now();
    while let Err(error) = fs::write(mount.path("again"), &block) {
        assert_eq!(error.raw_os_error(), Some(28));
        assert!(begin.elapsed() < Duration::from_secs(20), "its space does not come back");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_killed_server_leaves_a_mount_that_can_be_taken_over() {
    let Some(mut mount) = Mounted::new("kill") else { return };
    fs::write(mount.path("f"), "survives").unwrap();
    mount.server.kill().unwrap();
    mount.server.wait().unwrap();
    let dead = fs::read(mount.path("f")).unwrap_err().raw_os_error();
    // ECANCELED only over io_uring, and for a moment.
    assert!(matches!(dead, Some(107 | 103 | 125)), "{dead:?}");
    mount.serve_again();
    assert_eq!(fs::read(mount.path("f")).unwrap(), b"survives");
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    let ours = table.lines().filter(|l| l.contains(mount.dir.to_str().unwrap())).count();
    assert_eq!(ours, 1, "the dead mount is gone");
}

/// Whether requests shall go over io_uring here; says why not.
fn expects_io_uring() -> bool {
    let enabled = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let is_on = enabled.as_ref().is_ok_and(|text| text.trim() == "Y");
    // A process that is confined to some CPUs does without.
    let all = "test $(nproc) = $(getconf _NPROCESSORS_ONLN)";
    let all = Command::new("bash").args(["-c", all]).status().is_ok_and(|status| status.success());
    if !is_on || !all {
        println!("skipped: no FUSE over io_uring, enable_uring is {enabled:?}, all CPUs: {all}");
    }
    is_on && all
}

#[test]
fn requests_go_over_io_uring_where_the_kernel_offers_it() {
    let Some(mut mount) = Mounted::new("io_uring") else { return };
    let transport = |mount: &Mounted| {
        let config = fs::read_to_string(mount.path(".corbel/config")).unwrap();
        config.lines().find_map(|l| l.strip_prefix("transport ")).unwrap().to_owned()
    };
    let expected = expects_io_uring();
    assert_eq!(transport(&mount), if expected { "io_uring" } else { "device" });
    // More at once than a queue has entries, of all lengths, on all CPUs.
    mount.sh("for i in $(seq 48); do
             (head -c $((i * 40961)) /dev/urandom >s.$i
              dd if=s.$i of=t.$i bs=$((i * 4099)) status=none; cat t.$i | cmp - s.$i
              dd if=t.$i of=u.$i bs=1M iflag=direct status=none; cmp u.$i s.$i
              setfattr -n user.n -v $i t.$i; test $(getfattr --only-values -n user.n t.$i) = $i
              rm s.$i t.$i u.$i) &
             jobs[i]=$!
         done
         for job in ${jobs[@]}; do wait $job; done; test -z \"$(ls)\"");
    // Nobody hangs whose server dies with requests in it.
    let busy = |dir: &Path| {
        let script = "while echo x >$0/f.$$ && cat $0/f.$$ && ls $0; do :; done";
        let mut command = Command::new("timeout");
        command.args(["-k", "1", "60", "bash", "-c", script]).arg(dir);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        command.spawn().unwrap()
    };
    let mut programs: Vec<_> = (0..12).map(|_| busy(&mount.dir)).collect();
    std::thread::sleep(std::time::Duration::from_millis(300));
    mount.server.kill().unwrap();
    mount.server.wait().unwrap();
    for program in &mut programs {
        assert_ne!(program.wait().unwrap().code(), Some(124), "it went on, or hung");
    }
    mount.serve_again();
    assert_eq!(transport(&mount), if expected { "io_uring" } else { "device" });
}

#[test]
fn callers_keep_their_identity() {
    let Some(mount) = Mounted::new("identity") else { return };
    if !has("setpriv") {
        return;
    }
    fs::set_permissions(&mount.base, PermissionsExt::from_mode(0o755)).unwrap();
    mount.sh(
        "chmod 1777 .; U='setpriv --reuid 1234 --regid 2345 --groups 77,78'
         V='setpriv --reuid 4321 --regid 5432 --clear-groups'
         $U bash -euc 'umask 027; echo mine >f; mkdir d; umask 0; echo x >open'
         test \"$(stat -c %u:%g:%a f)\" = 1234:2345:640; test \"$(stat -c %a d open | xargs)\" = '750 666'
         ! $V cat f 2>/dev/null; ! $V ls d 2>/dev/null; ! $V rm -f f 2>/dev/null; ! $V chmod 777 f 2>/dev/null
         $U chgrp 77 f; test \"$(stat -c %g f)\" = 77; ! $U chgrp 99 f 2>/dev/null; ! $U chown 0 f 2>/dev/null
         setpriv --reuid 4321 --regid 5432 --groups 77 cat f >/dev/null
         mkdir g; chown :78 g; chmod 2775 g; $U touch g/x; test \"$(stat -c %g g/x)\" = 78
         cp /bin/true s; chown 4321 s; chmod 6777 s; $U bash -c 'echo >>s'; test \"$(stat -c %a s)\" = 777
         chmod 6777 s; $U truncate -s 0 s; test \"$(stat -c %a s)\" = 777",
    );
}

#[test]
fn the_virtual_directory() {
    let Some(mount) = Mounted::new("virtual") else { return };
    fs::write(mount.path("f"), "by number").unwrap();
    let ino = fs::metadata(mount.path("f")).unwrap().ino();
    let by_number = mount.path(&format!(".corbel/inode/{ino}"));
    assert_eq!(fs::read(&by_number).unwrap(), b"by number");
    assert_eq!(fs::metadata(&by_number).unwrap().ino(), ino);
    let held = File::open(mount.path("f")).unwrap();
    fs::remove_file(mount.path("f")).unwrap();
    assert_eq!(fs::read(&by_number).unwrap(), b"by number", "reopened though it has no name");
    drop(held);
    for bad in ["", "0", "1", "x", "-1", "99999999999999999999", "9223372036854775809"] {
        assert!(fs::read(mount.path(&format!(".corbel/inode/{bad}"))).is_err(), "{bad}");
    }
    assert!(fs::read_dir(&mount.dir).unwrap().next().is_none(), "it is not listed");
    let stats = fs::read_to_string(mount.path(".corbel/stats")).unwrap();
    assert!(stats.contains("fuse_lookup_total "), "{stats}");
    for attempt in [
        fs::write(mount.path(".corbel/x"), ""),
        fs::create_dir(mount.path(".corbel")),
        fs::remove_dir(mount.path(".corbel")),
        fs::rename(mount.path(".corbel"), mount.path("y")),
        fs::write(mount.path(".corbel/stats"), ""),
    ] {
        assert!(attempt.is_err());
    }
}
