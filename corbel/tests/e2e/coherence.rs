//! The mounts of several nodes are one file system: what has returned on one of them is seen by every
//! call that begins later on another, whatever the kernels cache. Readers hammer while a writer writes:
//! a reader notes how far the writer has come, looks, and must not see less.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::harness::{Cluster, text};

mod drawn;

/// How long each kind of change is hammered.
const HAMMER: Duration = Duration::from_millis(4000);

/// A name in the mount of a node.
fn on(cluster: &Cluster, node: usize, name: &str) -> PathBuf {
    cluster.mount(node).join(name)
}

fn cluster() -> Option<Cluster> {
    Cluster::new(3, "128MiB")
}

/// `write(k)` for k = 1, 2, ... on one node, while `look` runs on others: what it returns must be at least
/// the last k whose write had returned before it began, and no more than the first that had not begun
/// after it returned. Returns how often was written, and looked.
fn hammer(write: impl Fn(u64) + Sync, lookers: &[&(dyn Fn() -> u64 + Sync)]) -> (u64, u64) {
    let counts = hammer_for(HAMMER, write, lookers);
    assert!(counts.0 > 20 && counts.1 > 20, "hardly anything happened: {counts:?}");
    counts
}

fn hammer_for(
    time: Duration,
    write: impl Fn(u64) + Sync,
    lookers: &[&(dyn Fn() -> u64 + Sync)],
) -> (u64, u64) {
    let (begun, done, looks) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (number, look) in lookers.iter().enumerate() {
            let (begun, done, looks, stop) = (&begun, &done, &looks, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let begin = Instant::now();
                    let least = done.load(Ordering::SeqCst);
                    let seen = look();
                    let most = begun.load(Ordering::SeqCst);
                    assert!(
                        seen >= least,
                        "looker {number} saw {seen}, but {least} had returned before (look \
                         {looks:?}, which took {:?}; after it {}, and after a while {})",
                        begin.elapsed(),
                        look(),
                        {
                            std::thread::sleep(Duration::from_millis(500));
                            look()
                        },
                    );
                    assert!(seen <= most, "saw {seen}, but only {most} had begun");
                    looks.fetch_add(1, Ordering::Relaxed);
                    // The writer shall come to its turn.
                    std::thread::sleep(Duration::from_micros(seen % 7 * 30));
                }
            });
        }
        let end = Instant::now() + time;
        let mut k = 0;
        // Longer where next to nothing happens.
        while Instant::now() < end || k <= 20 && Instant::now() < end + 9 * time {
            k += 1;
            begun.store(k, Ordering::SeqCst);
            write(k);
            done.store(k, Ordering::SeqCst);
            // Now and then things are quiet for long enough that the kernels keep what they know.
            let pause = if k % 16 == 0 { 130_000 } else { k % 5 * 200 };
            std::thread::sleep(Duration::from_micros(pause));
        }
        stop.store(true, Ordering::SeqCst);
    });
    (done.into_inner(), looks.into_inner())
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("the file is there")
}

fn number_at(file: &File) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, 0).expect("8 bytes");
    u64::from_le_bytes(bytes)
}

#[test]
fn data_is_never_stale() {
    let Some(cluster) = cluster() else { return };
    fs::write(on(&cluster, 1, "f"), [0; 8192]).unwrap();
    let writer = open(&on(&cluster, 1, "f"));
    let (held, here) = (open(&on(&cluster, 2, "f")), open(&on(&cluster, 1, "f")));
    let again = || {
        let file = File::open(on(&cluster, 3, "f")).unwrap();
        number_at(&file)
    };
    let counts = hammer(
        |k| writer.write_all_at(&k.to_le_bytes(), 0).unwrap(),
        &[&|| number_at(&held), &again, &|| number_at(&here)],
    );
    eprintln!("data: {counts:?}");
    cluster.assert_nobody_expelled();
}

/// A file is opened and mapped without being read: the pages that the kernel has must be right.
#[test]
fn what_is_mapped_after_opening_is_never_stale() {
    let Some(cluster) = cluster() else { return };
    fs::write(on(&cluster, 1, "f"), [0; 8192]).unwrap();
    let writer = open(&on(&cluster, 1, "f"));
    let program = Command::new("python3")
        .args(["-c", MAPPER])
        .arg(on(&cluster, 1, "f"))
        .arg(on(&cluster, 2, "f"))
        .output()
        .unwrap();
    drop(writer);
    assert!(program.status.success(), "{program:?}");
}

const MAPPER: &str = "import mmap, os, sys
w = os.open(sys.argv[1], os.O_RDWR)
for k in range(300):
    os.pwrite(w, b'%08d' % k, 0)
    for _ in range(2):
        fd = os.open(sys.argv[2], os.O_RDONLY)
        m = mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
        assert m[:8] == b'%08d' % k, (k, m[:8])
        m.close(); os.close(fd)
";

/// What does not change is asked for once.
#[test]
fn the_kernel_keeps_what_does_not_change() {
    let Some(cluster) = cluster() else { return };
    fs::write(on(&cluster, 1, "f"), "12345678").unwrap();
    let (here, there) = (open(&on(&cluster, 1, "f")), open(&on(&cluster, 2, "f")));
    let settle = |file: &File| {
        for _ in 0..2 {
            let _ = (file.metadata().unwrap(), number_at(file));
            std::thread::sleep(Duration::from_millis(150));
        }
        let _ = (file.metadata().unwrap(), number_at(file));
    };
    let asked = |node: usize| -> u64 {
        let stats = fs::read_to_string(on(&cluster, node, ".corbel/stats")).unwrap();
        let of = |name: &str| {
            let line = stats.lines().find(|l| l.starts_with(name));
            line.map_or(0, |l| l.split(' ').nth(1).unwrap().parse::<u64>().unwrap())
        };
        of("fuse_getattr_total") + of("fuse_statx_total") + of("fuse_read_total")
    };
    for (node, file) in [(1, &here), (2, &there)] {
        settle(file);
        let before = asked(node);
        for _ in 0..100 {
            assert_eq!((file.metadata().unwrap().len(), number_at(file)), (8, NUMBER));
        }
        let more = asked(node) - before;
        // Looking at the counters takes some itself.
        assert!(more < 20, "node {node} was asked {more} times");
    }
    here.write_all_at(b"x", 8).unwrap();
    assert_eq!(there.metadata().unwrap().len(), 9);
    cluster.assert_nobody_expelled();
}

/// `12345678`.
const NUMBER: u64 = 0x3837_3635_3433_3231;

#[test]
fn attributes_of_new_files_are_never_stale() {
    let Some(cluster) = cluster() else { return };
    for number in 0..60 {
        let name = format!("f{number}");
        let name = name.as_str();
        let size = |node: usize| fs::metadata(on(&cluster, node, name)).unwrap().len();
        fs::write(on(&cluster, 1, name), "").unwrap();
        let writer = open(&on(&cluster, 1, name));
        let held = open(&on(&cluster, 2, name));
        hammer_for(
            Duration::from_millis(30),
            |k| writer.write_all_at(b"x", k - 1).unwrap(),
            &[&|| size(2), &|| held.metadata().unwrap().len(), &|| size(3), &|| size(1)],
        );
    }
    cluster.assert_nobody_expelled();
}

#[test]
fn attributes_are_never_stale() {
    let Some(cluster) = cluster() else { return };
    fs::write(on(&cluster, 1, "f"), "").unwrap();
    let writer = open(&on(&cluster, 1, "f"));
    let held = open(&on(&cluster, 2, "f"));
    let size = |node: usize| fs::metadata(on(&cluster, node, "f")).unwrap().len();
    let counts = hammer(
        |k| writer.write_all_at(b"x", k - 1).unwrap(),
        &[&|| size(2), &|| held.metadata().unwrap().len(), &|| size(3), &|| size(1)],
    );
    eprintln!("size: {counts:?}");
    // The mode counts as well; 12 bits of it do.
    let mode =
        |node: usize| u64::from(fs::metadata(on(&cluster, node, "f")).unwrap().mode() & 0o777);
    for base in [0u64, 0o400] {
        fs::set_permissions(on(&cluster, 1, "f"), fs::Permissions::from_mode(base as u32)).unwrap();
        for k in 1..0o200u64 {
            let permissions = fs::Permissions::from_mode((base + k) as u32);
            fs::set_permissions(on(&cluster, 1 + (k % 2) as usize, "f"), permissions).unwrap();
            assert_eq!([mode(1), mode(2), mode(3)], [base + k; 3]);
        }
    }
    let links = |node: usize| fs::metadata(on(&cluster, node, "f")).unwrap().nlink();
    for k in 0..60 {
        let (here, there) = (1 + k % 3, 1 + (k + 1) % 3);
        fs::hard_link(on(&cluster, here, "f"), on(&cluster, here, "g")).unwrap();
        assert_eq!((links(here), links(there)), (2, 2), "round {k}");
        fs::remove_file(on(&cluster, there, "g")).unwrap();
        assert_eq!((links(here), links(there)), (1, 1), "round {k}");
    }
    cluster.assert_nobody_expelled();
}

/// Files that are made on one node, and looked at on another as soon as they are there: the kernel there
/// is being told of them while they change.
#[test]
fn new_files_are_never_stale() {
    let Some(cluster) = cluster() else { return };
    fs::create_dir(on(&cluster, 1, "d")).unwrap();
    let newest = AtomicU64::new(0);
    let name = |k: u64| format!("d/f{k}");
    let write = |k: u64| {
        let path = on(&cluster, 1, &name(k));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
        newest.store(k, Ordering::SeqCst);
        for byte in 0..8 {
            file.write_all_at(b"x", byte).unwrap();
        }
    };
    // Complete once the writer has gone on to the next.
    let look = |node: usize| {
        let k = newest.load(Ordering::SeqCst);
        let size = match fs::metadata(on(&cluster, node, &name(k))) {
            Ok(found) => found.len(),
            Err(error) if k == 0 && error.kind() == ErrorKind::NotFound => 0,
            Err(error) => panic!("file {k}: {error}"),
        };
        if size == 8 { k } else { k.saturating_sub(1) }
    };
    let counts = hammer(write, &[&|| look(2), &|| look(2), &|| look(3)]);
    eprintln!("new: {counts:?}");
    cluster.assert_nobody_expelled();
}

#[test]
fn names_are_never_stale() {
    let Some(cluster) = cluster() else { return };
    fs::create_dir(on(&cluster, 1, "d")).unwrap();
    for k in 0..150u64 {
        let (here, there) = (1 + (k % 3) as usize, 1 + ((k + 1) % 3) as usize);
        let (a, b) = (format!("d/a{}", k % 4), format!("d/b{}", k % 4));
        let is = |node, name: &str| on(&cluster, node, name).exists();
        assert!(!is(there, &a) && !is(here, &a), "round {k}");
        fs::write(on(&cluster, here, &a), k.to_string()).unwrap();
        assert!(is(there, &a), "round {k}: made");
        assert_eq!(fs::read_to_string(on(&cluster, there, &a)).unwrap(), k.to_string());
        fs::rename(on(&cluster, there, &a), on(&cluster, there, &b)).unwrap();
        assert_eq!((is(here, &a), is(here, &b)), (false, true), "round {k}: renamed");
        assert_eq!(fs::read_to_string(on(&cluster, here, &b)).unwrap(), k.to_string());
        fs::remove_file(on(&cluster, here, &b)).unwrap();
        assert_eq!((is(there, &b), is(here, &b)), (false, false), "round {k}: removed");
    }
    // One name that is replaced all the time: it is always there, and never an older one.
    let put = |k: u64| {
        fs::write(on(&cluster, 1, "d/new"), k.to_le_bytes()).unwrap();
        fs::rename(on(&cluster, 1, "d/new"), on(&cluster, 1, "d/it")).unwrap();
    };
    put(0);
    let get = |node: usize| loop {
        match File::open(on(&cluster, node, "d/it")) {
            Ok(file) => return number_at(&file),
            // Replaced between look-up and opening, twice in a row.
            Err(error) => assert_eq!(error.raw_os_error(), Some(116), "{error}"),
        }
    };
    let counts = hammer(put, &[&|| get(2), &|| get(3), &|| get(1)]);
    eprintln!("names: {counts:?}");
    cluster.assert_nobody_expelled();
}

/// A value of `.corbel/stats`.
fn asked(cluster: &Cluster, node: usize, name: &str) -> u64 {
    let stats = fs::read_to_string(on(cluster, node, ".corbel/stats")).unwrap();
    let line = stats.lines().find(|line| line.starts_with(name));
    line.map_or(0, |line| line.split(' ').nth(1).unwrap().parse().unwrap())
}

/// Directories that were quiet for long enough that the kernels keep names of them, also of what is not there,
/// when something changes: a name, a directory on the way, what has been missing.
#[test]
fn names_that_a_kernel_keeps_are_never_stale() {
    let Some(cluster) = cluster() else { return };
    let quiet = Duration::from_millis(2300);
    let at = |node, name: &str| on(&cluster, node, name);
    fs::create_dir(at(1, "d")).unwrap();
    // Number k is told by a name that is replaced, by a directory that is, and by names that appear.
    let put = |k: u64, by: usize| {
        fs::create_dir(at(by, "new")).unwrap();
        fs::write(at(by, "new/it"), k.to_le_bytes()).unwrap();
        if k > 0 {
            fs::rename(at(by, "d/way"), at(by, &format!("old{k}"))).unwrap();
        }
        fs::rename(at(by, "new"), at(by, "d/way")).unwrap();
        fs::write(at(by, "new"), k.to_le_bytes()).unwrap();
        fs::rename(at(by, "new"), at(by, "d/it")).unwrap();
        fs::write(at(by, &format!("d/{k}")), "").unwrap();
    };
    put(0, 1);
    let number = |path: PathBuf| loop {
        match File::open(&path) {
            Ok(file) => return number_at(&file),
            // Between two renames, or replaced between look-up and opening, twice in a row.
            Err(error) => assert!(matches!(error.raw_os_error(), Some(2 | 116)), "{error}"),
        }
    };
    let (begun, done, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let looks = AtomicU64::new(0);
    let looker = |node: usize| {
        while !stop.load(Ordering::SeqCst) {
            let least = done.load(Ordering::SeqCst);
            let by_name = number(at(node, "d/it"));
            let by_way = number(at(node, "d/way/it"));
            let missing = at(node, &format!("d/{}", least + 1)).exists();
            let there = at(node, &format!("d/{least}")).exists();
            let most = begun.load(Ordering::SeqCst);
            for seen in [by_name, by_way] {
                assert!((least..=most).contains(&seen), "{node}: {seen} of {least}..{most}");
            }
            assert!(
                there && (!missing || most > least),
                "{node}: {there} {missing} {least} {most}"
            );
            looks.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros(200));
        }
    };
    std::thread::scope(|scope| {
        for node in [1, 2, 3] {
            scope.spawn(move || looker(node));
        }
        for k in 1..=6 {
            std::thread::sleep(quiet);
            begun.store(k, Ordering::SeqCst);
            put(k, 1 + (k % 3) as usize);
            done.store(k, Ordering::SeqCst);
        }
        stop.store(true, Ordering::SeqCst);
    });
    eprintln!("quiet names: {looks:?} looks");
    // They are kept indeed.
    std::thread::sleep(quiet);
    let before = asked(&cluster, 2, "fuse_lookup_total");
    for _ in 0..100 {
        assert!(at(2, "d/way/it").exists() && !at(2, "d/none").exists());
    }
    let more = asked(&cluster, 2, "fuse_lookup_total") - before;
    assert!(more < 100, "{more} look-ups for 200 paths of two and three names");
    cluster.assert_nobody_expelled();
}

/// Listing a directory with the attributes of its files takes no request for each.
#[test]
fn a_listing_brings_attributes() {
    let Some(cluster) = cluster() else { return };
    fs::create_dir(on(&cluster, 1, "d")).unwrap();
    for n in 0..300 {
        fs::write(on(&cluster, 1, &format!("d/{n}")), "12345").unwrap();
    }
    std::thread::sleep(Duration::from_millis(2300));
    let list = |node: usize| {
        let all = fs::read_dir(on(&cluster, node, "d")).unwrap();
        let sizes: Vec<u64> = all.map(|entry| entry.unwrap().metadata().unwrap().len()).collect();
        assert_eq!(sizes, [5; 300]);
    };
    // A kernel that has pages of the files takes attributes that are news to it one by one.
    list(1);
    std::thread::sleep(Duration::from_millis(200));
    for node in [2, 1] {
        let count = || {
            asked(&cluster, node, "fuse_lookup_total") + asked(&cluster, node, "fuse_getattr_total")
        };
        let before = count();
        list(node);
        let more = count() - before;
        assert!(more < 150, "node {node}: {more} requests for 300 files");
    }
    // And what it brought is not believed for longer than it is so.
    for n in 0..300 {
        fs::write(on(&cluster, 1 + n % 3, &format!("d/{n}")), "123").unwrap();
    }
    for node in [1, 2, 3] {
        for entry in fs::read_dir(on(&cluster, node, "d")).unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().len(), 3);
        }
    }
    cluster.assert_nobody_expelled();
}

/// Writers on the reader's own node as well: the kernel there throws attributes away that it asked for
/// before a write of its own ended, and with them the news that another node has written.
#[test]
fn data_is_never_stale_beside_own_writers() {
    let Some(cluster) = cluster() else { return };
    fs::write(on(&cluster, 1, "f"), [0; 16384]).unwrap();
    let writer = open(&on(&cluster, 1, "f"));
    let own = open(&on(&cluster, 2, "f"));
    let held = open(&on(&cluster, 2, "f"));
    let stop = AtomicBool::new(false);
    let until = Instant::now() + 12 * HAMMER;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut k = 0u64;
            while !stop.load(Ordering::SeqCst) && Instant::now() < until {
                k += 1;
                own.write_all_at(&k.to_le_bytes(), 512 + k % 3 * 4096).unwrap();
            }
        });
        let counts = hammer_for(
            HAMMER,
            |k| writer.write_all_at(&k.to_le_bytes(), 0).unwrap(),
            &[&|| number_at(&held), &|| number_at(&held)],
        );
        stop.store(true, Ordering::SeqCst);
        eprintln!("beside: {counts:?}");
    });
    cluster.assert_nobody_expelled();
}

/// What a program has just done is what it sees, also of what its library asks the service for each time
/// (extended attributes, names of directories of others): on every node, not only on the head.
#[test]
fn own_changes_are_seen_at_once_on_every_node() {
    let Some(cluster) = cluster() else { return };
    let program = "import os, sys
os.mkdir(sys.argv[1]); os.chdir(sys.argv[1])
wrong = []
def same(what, seen, wanted):
    if seen != wanted: wrong.append((what, seen, wanted))
def value(name):
    try: return os.getxattr(name, 'user.a')
    except OSError as e: return e.errno
for i in range(60):
    name = 'f%d' % i
    open(name, 'w').close()
    os.setxattr(name, 'user.a', b'1'); same('new', value(name), b'1')
    os.setxattr(name, 'user.a', b'%d' % i); same('set', value(name), b'%d' % i)
    os.setxattr('f0', 'user.a', b'%d' % i); same('again', value('f0'), b'%d' % i)
    os.setxattr(name, 'user.b', b''); same('list', sorted(os.listxattr(name)), ['user.a', 'user.b'])
    os.removexattr(name, 'user.a'); same('gone', value(name), 61)
    same('left', os.listxattr(name), ['user.b'])
    os.mkdir('d%d' % i); same('empty', os.listdir('d%d' % i), [])
    same('names', len(os.listdir('.')), 2 * i + 2)
print(len(wrong), wrong[:5])
";
    for node in 1..=3 {
        let views = [("native", cluster.native(node)), ("hooked", cluster.hooked(node, &[]))];
        for (view, mut command) in views {
            let said = command.args(["python3", "-c", program, &format!("{view}{node}")]).output();
            assert_eq!(text(&said.unwrap()), "0 []\n", "node {node}, {view}");
        }
    }
    cluster.assert_nobody_expelled();
}

/// What changes a file's mode behind the kernel's back, an access list, has the kernel drop what it knows of it. That must be over
/// when the call returns: what the next `read` asks for would be dropped with it, and the read would find what another node has cut off.
#[test]
fn what_was_cut_elsewhere_is_gone_after_a_list_is_set() {
    let Some(cluster) = cluster() else { return };
    let program = "import os, struct, sys, time
own, other = sys.argv[1] + '/cut', sys.argv[2] + '/cut'
def acl(i):
    entries = (1, 6, -1), (2, i % 8, 1000), (4, i // 8 % 8, -1), (16, i % 7, -1), (32, 4, -1)
    return struct.pack('<I', 2) + b''.join(struct.pack('<HHi', *entry) for entry in entries)
there = os.open(other, os.O_RDWR | os.O_CREAT, 0o666)
here = os.open(own, os.O_RDWR)
begin, rounds, wrong = time.time(), 0, []
while (time.time() < begin + 15 or rounds < 100) and not wrong:
    rounds += 1
    content = bytes([1 + rounds % 255]) * 20000
    os.pwrite(there, content, 0)
    if os.pread(here, 20000, 0) != content: wrong.append(('content', rounds))
    os.ftruncate(there, 100 + rounds % 50)
    os.setxattr(own, 'system.posix_acl_access', acl(rounds))
    seen = os.pread(here, 711, 8192)
    if seen: wrong.append((rounds, len(seen), seen[:4]))
    if rounds % 3: continue
    os.setxattr(other, 'system.posix_acl_access', acl(rounds + 5))
    lists = [os.getxattr(file, 'system.posix_acl_access') for file in (here, other)]
    if lists[0] != lists[1]: wrong.append(('list', rounds))
print(wrong)
";
    let mounts = [cluster.mount(1), cluster.mount(3)];
    let said = cluster.native(1).args(["python3", "-c", program]).args(mounts).output();
    assert_eq!(text(&said.unwrap()), "[]\n");
    cluster.assert_nobody_expelled();
}

/// Directories are moved into each other, over each other and exchanged by programs on all nodes: each of them needs several leases that
/// the others need as well. All of them come to an end, with what POSIX lets them fail for, and what is left is a tree, the same everywhere.
#[test]
fn directories_that_all_move_stay_a_tree() {
    let Some(cluster) = cluster() else { return };
    let mover = "import ctypes, errno, os, random, sys, time
base, own = sys.argv[1], random.Random(int(sys.argv[2]))
exchange = ctypes.CDLL(None, use_errno=True).renameat2
names = ['A', 'B', 'A/e', 'B/a', 'a', 'e', 'A/e/x', 'B/x', 'a/A', 'e/x/B']
usual = errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, *map(int, sys.argv[3:])
begin, slowest = time.time(), 0
def tried(call):
    global slowest
    begun = time.time()
    try: call()
    except OSError as e:
        if e.errno not in usual: print('FAILED', e)
    slowest = max(slowest, time.time() - begun)
while time.time() < begin + 5:
    a, b = (base + '/' + name for name in own.sample(names, 2))
    tried(lambda: os.rename(a, b))
    a, b = (base + '/' + name for name in own.sample(names, 2))
    if exchange(-100, a.encode(), -100, b.encode(), 2) and ctypes.get_errno() not in usual:
        print('FAILED', os.strerror(ctypes.get_errno()))
    tried(lambda: os.mkdir(base + '/' + own.choice(names)))
print('slowest', round(slowest, 3), file=sys.stderr)
";
    fs::create_dir(on(&cluster, 1, "moved")).unwrap();
    let program = |node: usize, hooked: bool, seed: u32| {
        let mut command = if hooked { cluster.hooked(node, &[]) } else { cluster.native(node) };
        command.args(["python3", "-c", mover]).arg(on(&cluster, node, "moved"));
        // Linux says ESTALE or ELOOP where it looks up, for a rename, a directory that it knows elsewhere (`d_splice_alias` in fs/dcache.c).
        command.args([&seed.to_string()]).args(if hooked { &[][..] } else { &["116", "40"] });
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let movers = [(1, true), (2, true), (3, true), (1, false), (3, false)];
    let movers: Vec<_> =
        (1..).zip(movers).map(|(seed, (n, hook))| program(n, hook, seed)).collect();
    for mover in movers {
        assert_eq!(text(&mover.wait_with_output().unwrap()), "");
    }
    let lister = "import os, sys
for path, dirs, files in os.walk(sys.argv[1]):
    there = os.stat(path)
    print(os.path.relpath(path, sys.argv[1]), there.st_ino, there.st_nlink, sorted(dirs), files)
    assert there.st_nlink == 2 + len(dirs), (path, there.st_nlink, dirs)
    for name in dirs: assert os.stat(path + '/' + name + '/..').st_ino == there.st_ino, (path, name)
";
    let listed = [1, 2, 3].map(|node| {
        let mut command = cluster.native(node);
        command.args(["python3", "-c", lister]).arg(on(&cluster, node, "moved"));
        let said = command.output().unwrap();
        assert!(said.status.success(), "{said:?}");
        let mut lines: Vec<String> = text(&said).lines().map(String::from).collect();
        lines.sort();
        lines
    });
    assert!(listed[0].len() > 1 && listed[0] == listed[1] && listed[1] == listed[2], "{listed:?}");
    cluster.assert_nothing_refused();
    cluster.assert_nobody_expelled();
}

/// Two processes make directories in one directory and move them to another. Each moves more out than it has seen come in.
#[test]
fn directories_that_are_made_and_moved_on_are_there() {
    let Some(cluster) = cluster() else { return };
    let program = "import os, sys
base, own = sys.argv[1:]
for n in range(400):
    os.mkdir(base + '/D/' + own)
    os.rename(base + '/D/' + own, base + '/E/' + own + str(n))
";
    fs::create_dir_all(on(&cluster, 1, "made/D")).unwrap();
    fs::create_dir(on(&cluster, 1, "made/E")).unwrap();
    let makers = [(1, "a"), (1, "b"), (2, "c")].map(|(node, own)| {
        let mut command = cluster.hooked(node, &[]);
        command.args(["python3", "-c", program]).arg(on(&cluster, node, "made")).arg(own);
        command.spawn().unwrap()
    });
    for mut maker in makers {
        assert!(maker.wait().unwrap().success());
    }
    for (dir, entries) in [("made/D", 0), ("made/E", 1200)] {
        let path = on(&cluster, 3, dir);
        assert_eq!(fs::metadata(&path).unwrap().nlink(), 2 + entries);
        assert_eq!(fs::read_dir(&path).unwrap().count() as u64, entries);
    }
    cluster.assert_nothing_refused();
}
