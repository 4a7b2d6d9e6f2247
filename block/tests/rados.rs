//! The store in a pool of Ceph: against a real cluster, where Ceph is installed, whose OSDs are ended and stopped.

mod rig;

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::Errno;
use base::random::Random;
use block::pool::rados::Rados;
use block::pool::repair::{self, Orders};
use block::pool::store::{self, Store};
use block::pool::{Image, Pool, Spec, StoreSpec};
use rados::osdmap::{Mapper, NONE};
use rados::{Cluster, Io, Purpose, Reads, Step};
use rig::ceph::Ceph;
use rig::disk::{check, work};

const SIZE: u64 = 1 << 20;
/// A request is given up, and a lock ends, after so long here.
const PATIENCE: Duration = Duration::from_secs(5);
const LEASE: Duration = Duration::from_secs(12);

fn open(ceph: &Ceph, place: &str) -> Rados {
    let place = format!("{place}?conf={}", ceph.conf()).parse().unwrap();
    Rados::patient(place, PATIENCE, LEASE).unwrap()
}

fn pool_of(ceph: &Ceph, coding: &str, places: &[String]) -> Arc<Pool> {
    let spec = places.iter().enumerate().map(|(i, place)| StoreSpec {
        domain: format!("d{i}"),
        at: format!("rados:{place}"),
        out: false,
    });
    let spec = Spec::new(coding.parse().unwrap(), spec.collect()).unwrap();
    again(ceph, &spec, places)
}

/// The same pool, with stores of its own.
fn again(ceph: &Ceph, spec: &Spec, places: &[String]) -> Arc<Pool> {
    let stores = places.iter().map(|place| Arc::new(open(ceph, place)) as Arc<dyn Store>).collect();
    Arc::new(Pool::over(spec.clone(), stores).unwrap())
}

/// One cluster for all: it takes half a minute to start.
#[test]
fn a_real_cluster_keeps_images() {
    let Some(ceph) = Ceph::start("rados") else { return };
    the_librarys_threads_end_nothing_themselves(&ceph);
    replicas_are_read(&ceph);
    objects_lie_where_the_map_says(&ceph);
    names_are_kept_found_and_removed(&ceph);
    one_writes(&ceph);
    a_full_cluster_takes_no_lock_away(&ceph);
    who_is_shut_out_takes_the_lock_anew(&ceph);
    stores_share_a_pool(&ceph);
    osds_are_ended_hang_and_rot(&ceph);
}

/// Whoever has the last of a watch and of a connection may be called by the library, which waits for that very thread then.
fn the_librarys_threads_end_nothing_themselves(ceph: &Ceph) {
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names
            .filter(|name| name.starts_with("msgr-worker") || name.starts_with("rados-end"))
            .count()
    };
    let before = threads();
    let conf = ceph.conf();
    let cluster = Cluster::connect(None, Some(&conf), PATIENCE, Purpose::Store).unwrap();
    let io = Arc::new(Arc::new(cluster).io("osd0", "").unwrap());
    assert!(threads() > before);
    Io::wait(PATIENCE, |done| io.change("watched", &[Step::WriteFull(b"x")], done)).unwrap();
    let alive = Arc::new(());
    let heard = Arc::clone(&alive);
    let watch = io.watch("watched", Box::new(move |_| drop(Arc::clone(&heard)))).unwrap();
    let reads = Arc::clone(&io);
    let (begun, go_on) = std::sync::mpsc::channel();
    let done = Box::new(move |read: Result<Vec<u8>, Errno>| {
        // Everybody else has let go.
        go_on.recv().unwrap();
        assert_eq!(read, Ok(b"x".to_vec()));
        drop((watch, io));
    });
    reads.read("watched", 0, 10, done);
    drop(reads);
    begun.send(()).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while Arc::strong_count(&alive) > 1 || threads() > before {
        assert!(Instant::now() < end, "{} threads, {before} before", threads());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Reads of clients that an OSD has answered.
fn reads_of(ceph: &Ceph, osd: usize) -> u64 {
    let said = ceph.run("ceph", &["tell", &format!("osd.{osd}"), "perf", "dump", "osd", "op_r"]);
    let (_, number) = said.split_once("\"op_r\":").expect(&said);
    let number: String = number.chars().filter(char::is_ascii_digit).collect();
    number.parse().expect(&said)
}

/// With `reads=balance` all OSDs of an object answer, none of them with what was there before.
fn replicas_are_read(ceph: &Ceph) {
    ceph.run("ceph", &["osd", "pool", "create", "threefold", "8"]);
    ceph.run("ceph", &["osd", "pool", "set", "threefold", "size", "3"]);
    let plain = open(ceph, "threefold");
    let place = format!("threefold?reads=balance&conf={}", ceph.conf()).parse().unwrap();
    let balanced = Rados::patient(place, PATIENCE, LEASE).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while plain.put("vm/a", &[b"0123456789"]).is_err() {
        assert!(Instant::now() < end);
    }
    // A replica answers for what it knows all others to have: that it is told with the next write to the same group.
    for other in 0..80 {
        plain.put(&format!("vm/other{other}"), &[b"x"]).unwrap();
    }
    // How many of so many reads each OSD has answered.
    let answered = |store: &Rados, times: u64| -> Vec<u64> {
        let before = [0, 1, 2].map(|osd| reads_of(ceph, osd));
        for _ in 0..times {
            assert_eq!(store.get("vm/a", 2, 5), Ok(b"23456".to_vec()));
        }
        (0..3).map(|osd| reads_of(ceph, osd) - before[osd]).collect()
    };
    let by_first = answered(&plain, 90);
    assert_eq!(by_first.iter().filter(|reads| **reads >= 90).count(), 1, "{by_first:?}");
    assert_eq!(by_first.iter().filter(|reads| **reads < 10).count(), 2, "{by_first:?}");
    // One in 10^9 has less than 6 of 90.
    let by_all = answered(&balanced, 90);
    assert!(by_all.iter().all(|reads| *reads >= 6), "{by_all:?}");
    println!("of 90 reads by the first {by_first:?}, by all {by_all:?}");
    // Ends, and what is not there.
    assert_eq!(balanced.get("vm/a", 8, 100), Ok(b"89".to_vec()));
    assert_eq!(balanced.get("vm/a", 100, 5), Ok(Vec::new()));
    assert_eq!(balanced.get("vm/none", 0, 5), Err(Errno::NOENT));
    // What was written is what all of them have.
    let mut random = Random::new(11);
    let mut bytes = vec![0; 50_000];
    for round in 0..60 {
        random.fill(&mut bytes);
        let name = format!("vm/{}", round % 3);
        plain.put(&name, &[&bytes]).unwrap();
        for _ in 0..3 {
            assert_eq!(balanced.get(&name, 0, 60_000).as_ref(), Ok(&bytes), "{round}");
        }
    }
    // Where there are no replicas.
    ceph.run("ceph", &["osd", "pool", "create", "coded", "8", "8", "erasure"]);
    let cluster = Cluster::connect(None, Some(&ceph.conf()), PATIENCE, Purpose::Store).unwrap();
    let coded = Arc::new(cluster).io("coded", "").unwrap();
    let error = coded.reading(Reads::Balance).unwrap_err();
    assert!(error.contains("erasure-coded"), "{error}");
}

/// What is computed here is what the cluster says.
fn objects_lie_where_the_map_says(ceph: &Ceph) {
    ceph.run("ceph", &["osd", "primary-affinity", "osd.1", "0.2"]);
    ceph.run("ceph", &["osd", "reweight", "2", "0.7"]);
    let cluster = Cluster::connect(None, Some(&ceph.conf()), PATIENCE, Purpose::Store).unwrap();
    let names = |pool: &'static str| (0..12).map(move |n| (pool, format!("object.{n}")));
    let end = Instant::now() + Duration::from_secs(60);
    for (pool, name) in names("threefold").chain(names("coded")).chain(names("osd2")) {
        // While groups move the one moment's map is not the next one's.
        loop {
            let map = cluster.osd_map().unwrap();
            let said = ceph.run("ceph", &["osd", "map", pool, &name, "ns"]);
            if said.contains(&format!("osdmap e{} ", map.epoch)) {
                let (number, described) = map.pool(pool).unwrap();
                let pg = described.pg_of(number, b"ns", name.as_bytes()).unwrap();
                let mapped = Mapper::new(&map).unwrap().map(number, &[pg.seed]).unwrap();
                let list = |osds: &[i32], primary: Option<i32>| {
                    let osds = osds.iter().map(|osd| match *osd {
                        NONE => "NONE".to_owned(),
                        osd => osd.to_string(),
                    });
                    let osds = osds.collect::<Vec<_>>().join(",");
                    format!("([{osds}], p{})", primary.unwrap_or(-1))
                };
                let up = list(mapped.up.get(0), mapped.up_primary[0]);
                let acting = list(mapped.acting.get(0), mapped.acting_primary[0]);
                let ours = format!("({pg}) -> up {up} acting {acting}");
                assert!(said.contains(&ours), "{ours}, and the cluster says: {said}");
                break;
            }
            assert!(Instant::now() < end);
        }
    }
    ceph.run("ceph", &["osd", "primary-affinity", "osd.1", "1"]);
    ceph.run("ceph", &["osd", "reweight", "2", "1"]);
    for pool in ["threefold", "coded"] {
        ceph.run("ceph", &["osd", "pool", "rm", pool, pool, "--yes-i-really-really-mean-it"]);
    }
}

fn names_are_kept_found_and_removed(ceph: &Ceph) {
    let store = open(ceph, "osd0/ns/a/b");
    let mut bytes = vec![0; 300_000];
    Random::new(1).fill(&mut bytes);
    store.put("vm/a", &[&bytes[..1000], &bytes[1000..]]).unwrap();
    assert_eq!(store.get("vm/a", 0, 400_000), Ok(bytes.clone()));
    assert_eq!(store.get("vm/a", 290_000, 20_000), Ok(bytes[290_000..].to_vec()));
    assert_eq!(store.get("vm/a", 300_000, 1), Ok(Vec::new()));
    assert_eq!(store.get("vm/a", 3, 0), Ok(Vec::new()));
    assert_eq!(store.get("vm/b", 0, 5), Err(Errno::NOENT));
    // A shorter one takes the place of all of it.
    store.put("vm/a", &[b"short"]).unwrap();
    assert_eq!(store.get("vm/a", 0, 100), Ok(b"short".to_vec()));
    store.put("vm/empty", &[]).unwrap();
    assert_eq!(store.get("vm/empty", 0, 5), Ok(Vec::new()));
    // Neighbours: of a name that begins alike, of another prefix, of another namespace.
    store.put("vm2/other", &[b"x"]).unwrap();
    open(ceph, "osd0/ns/a").put("vm/n", &[b"x"]).unwrap();
    open(ceph, "osd0/ns2/a/b").put("vm/n", &[b"x"]).unwrap();
    open(ceph, "osd0//a/b").put("vm/n", &[b"x"]).unwrap();
    let mut names = store.list("vm").unwrap();
    names.sort();
    assert_eq!(names, ["a", "empty"]);
    assert_eq!(store.list("nothing"), Ok(Vec::new()));
    store.remove("vm/a").unwrap();
    store.remove("vm/a").unwrap();
    assert_eq!(store.list("vm").unwrap(), ["empty"]);
    // A pool that is not there, or no more, is no empty store.
    let absent = open(ceph, "nothing");
    assert_eq!(absent.list("vm"), Err(Errno::NODEV));
    assert!(absent.lock("vm").is_err());
    ceph.run("ceph", &["osd", "pool", "create", "gone", "1"]);
    let gone = open(ceph, "gone");
    gone.put("vm/a", &[b"x"]).unwrap();
    ceph.run("ceph", &["osd", "pool", "rm", "gone", "gone", "--yes-i-really-really-mean-it"]);
    // OSDs and clients hear of it one after the other.
    let end = Instant::now() + Duration::from_secs(60);
    while let Ok(bytes) = gone.get("vm/a", 0, 1) {
        assert!(bytes == b"x" && Instant::now() < end);
    }
    assert_eq!(gone.get("vm/a", 0, 1), Err(Errno::NODEV));
    assert_eq!(gone.list("vm"), Err(Errno::NODEV));
}

/// A lock is one writer's, ends with it, and what was written with one that has ended does not count.
fn one_writes(ceph: &Ceph) {
    let (store, other) = (open(ceph, "osd1/lock"), open(ceph, "osd1/lock"));
    let lock = store.lock("vm").unwrap();
    assert_eq!(lock.term(), Some(0));
    assert!(matches!(store.lock("vm"), Err(Errno::BUSY)));
    assert!(matches!(other.lock("vm"), Err(Errno::BUSY)));
    let another = other.lock("vm2").unwrap();
    // It is renewed.
    std::thread::sleep(LEASE + LEASE / 2);
    assert_eq!((lock.term(), another.term()), (Some(0), Some(0)));
    assert!(matches!(other.lock("vm"), Err(Errno::BUSY)));
    assert_eq!(store.list("vm"), Ok(Vec::new()));
    drop(lock);
    let lock = other.lock("vm").unwrap();
    // Somebody breaks it: it is found out before it would have ended.
    let list: String =
        ceph.run("rados", &["-p", "osd1", "-N", "lock", "lock", "info", "vm/.lock", "corbel"]);
    let (_, lockers) = list.split_once("lockers").unwrap();
    let word = |key: &str| {
        let (_, rest) =
            lockers.split_once(&format!("\"{key}\":\"")).unwrap_or_else(|| panic!("{list}"));
        rest.split_once('"').unwrap().0.to_owned()
    };
    let (client, cookie) = (word("name"), word("cookie"));
    let args = ["-p", "osd1", "-N", "lock", "lock", "break", "vm/.lock", "corbel", &client];
    ceph.run("rados", &[&args[..], &["--lock-cookie", &cookie]].concat());
    let now = store.lock("vm").unwrap();
    std::thread::sleep(LEASE / 2);
    assert_eq!(lock.term(), None);
    assert_eq!(other.put("vm/a", &[b"x"]), Err(Errno::STALE));
    assert_eq!(other.remove("vm/a"), Err(Errno::STALE));
    // Who has it now is not hindered, nor are other images.
    store.put("vm/a", &[b"x"]).unwrap();
    other.put("vm2/a", &[b"x"]).unwrap();
    drop(lock);
    assert_eq!(now.term(), Some(0));
    // An OSD that hangs for longer than a lock lasts: nothing counts until it is certain that nobody else had it.
    ceph.signal(1, "-STOP");
    std::thread::sleep(LEASE);
    assert_eq!(now.term(), None);
    assert!(store.put("vm/a", &[b"y"]).is_err());
    let begun = Instant::now();
    drop(another);
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    ceph.signal(1, "-CONT");
    ceph.wait_for(1);
    std::thread::sleep(LEASE);
    // It ended, and is taken anew: in another term, or the OSD found the renewals that had waited in time.
    assert!(now.term().is_some());
    store.put("vm/a", &[b"y"]).unwrap();
}

/// What is put does not fit, but who has a lock keeps it, and lets it go.
fn a_full_cluster_takes_no_lock_away(ceph: &Ceph) {
    let fill = |nearly: &str, full: &str, is_full: bool| {
        for (which, ratio) in [("nearfull", nearly), ("backfillfull", nearly), ("full", full)] {
            ceph.run("ceph", &["osd", &format!("set-{which}-ratio"), ratio]);
        }
        let end = Instant::now() + Duration::from_secs(60);
        let pool = || {
            let said = ceph.run("ceph", &["osd", "dump"]);
            said.lines().find(|line| line.contains("'osd1'")).unwrap().contains("full ")
        };
        while pool() != is_full {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    let store = open(ceph, "osd1/full");
    let lock = store.lock("vm").unwrap();
    store.put("vm/a", &[b"x"]).unwrap();
    fill("0.000001", "0.000002", true);
    std::thread::sleep(LEASE + LEASE / 2);
    assert_eq!(lock.term(), Some(0));
    assert_eq!(store.put("vm/b", &[&[1; 100_000]]), Err(Errno::NOSPC));
    drop(lock);
    // It was there before: a new object would not be.
    let lock = store.lock("vm").unwrap();
    fill("0.85", "0.95", false);
    let end = Instant::now() + Duration::from_secs(30);
    while store.put("vm/b", &[b"y"]).is_err() {
        assert!(Instant::now() < end);
    }
    assert_eq!(lock.term(), Some(0));
}

/// A client that is shut out stays so: its locks are lost at once, and the next one is another client's.
fn who_is_shut_out_takes_the_lock_anew(ceph: &Ceph) {
    let store = open(ceph, "osd1/out");
    let lock = store.lock("vm").unwrap();
    let list =
        ceph.run("rados", &["-p", "osd1", "-N", "out", "lock", "info", "vm/.lock", "corbel"]);
    let (_, rest) = list.split_once("\"addr\":\"").unwrap();
    ceph.run("ceph", &["osd", "blacklist", "add", rest.split_once('"').unwrap().0]);
    std::thread::sleep(LEASE / 2);
    assert_eq!(lock.term(), None);
    // Nobody waits for it.
    let begun = Instant::now();
    assert_eq!(store.put("vm/a", &[b"x"]), Err(Errno::STALE));
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    drop(lock);
    let end = Instant::now() + 3 * LEASE;
    let lock = loop {
        match store.lock("vm") {
            Ok(lock) => break lock,
            Err(errno) => assert!(Instant::now() < end, "{errno}"),
        }
        std::thread::sleep(LEASE / 6);
    };
    store.put("vm/a", &[b"x"]).unwrap();
    assert_eq!(lock.term(), Some(0));
}

/// Three stores in one pool of Ceph, of which each image is another one's neighbour.
fn stores_share_a_pool(ceph: &Ceph) {
    let places: Vec<String> = (0..3).map(|i| format!("rbd/shared/s{i}")).collect();
    let pool = pool_of(ceph, "rs:2,1", &places);
    let mut random = Random::new(3);
    for name in ["vm", "vm2"] {
        pool.create(name, SIZE, 128 << 10).unwrap();
        let image = Image::open(Arc::clone(&pool), name, false).unwrap();
        let mut model = vec![0; SIZE as usize];
        work(&image, &mut model, &mut random, 15);
        check(&image, &model);
        let other = again(ceph, pool.spec(), &places);
        let error = Image::open(Arc::clone(&other), name, false).unwrap_err();
        assert!(error.contains("open elsewhere"), "{error}");
        drop(image);
        check(&Image::open(other, name, false).unwrap(), &model);
    }
}

/// Each store on an OSD of its own.
fn osds_are_ended_hang_and_rot(ceph: &Ceph) {
    let places: Vec<String> = (0..3).map(|i| format!("osd{i}/vm")).collect();
    let pool = pool_of(ceph, "replicated:3", &places);
    pool.create("vm", SIZE, 128 << 10).unwrap();
    let image = Image::open(Arc::clone(&pool), "vm", false).unwrap();
    let (mut model, mut random) = (vec![0; SIZE as usize], Random::new(5));
    work(&image, &mut model, &mut random, 15);
    check(&image, &model);
    // One of two shards of data and one of parity may be lost; but not to write, which takes one more than is needed to read.
    let coded = places.iter().map(|place| format!("{place}-coded")).collect::<Vec<_>>();
    let coded = pool_of(ceph, "rs:2,1", &coded);
    coded.create("vm", SIZE, 128 << 10).unwrap();
    let coded = Image::open(coded, "vm", false).unwrap();
    let mut coded_model = vec![0; SIZE as usize];
    work(&coded, &mut coded_model, &mut random, 15);

    // One is ended; it misses what is written, and is given it afterwards.
    ceph.signal(2, "-KILL");
    let begun = Instant::now();
    check(&image, &model);
    work(&image, &mut model, &mut random, 15);
    check(&image, &model);
    check(&coded, &coded_model);
    eprintln!("with an OSD ended: {:?}", begun.elapsed());
    drop(coded);
    // What it was to be given is given up.
    std::thread::sleep(2 * PATIENCE);
    ceph.revive(2);
    let orders = Orders { verify: true, repair: true, rate: 0 };
    let report = repair::run(&image, orders, |_, _, _| true).unwrap();
    assert_eq!((report.lost, report.silent), (0, 0), "{report:?}");
    assert!(report.rebuilt > 0, "{report:?}");

    // One hangs.
    ceph.signal(0, "-STOP");
    let begun = Instant::now();
    check(&image, &model);
    work(&image, &mut model, &mut random, 15);
    check(&image, &model);
    eprintln!("with an OSD that hangs: {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    let hung = open(ceph, &places[0]);
    let begun = Instant::now();
    assert!(hung.list("vm").is_err());
    assert!(hung.lock("vm").is_err());
    assert!(hung.get("vm/info", 0, 10).is_err() || hung.put("vm/.x", &[b"x"]).is_err());
    assert!(begun.elapsed() < 6 * PATIENCE, "{:?}", begun.elapsed());
    ceph.signal(0, "-CONT");
    ceph.wait_for(0);
    let report = repair::run(&image, orders, |_, _, _| true).unwrap();
    assert_eq!((report.lost, report.silent), (0, 0), "{report:?}");

    // Bits turn in one store.
    let store = open(ceph, &places[1]);
    let mut turned = 0;
    for name in store.list("vm").unwrap() {
        let name = format!("vm/{name}");
        let mut bytes = store.get(&name, 0, 1 << 20).unwrap();
        if bytes.len() > 4096 {
            let at = bytes.len() - 100;
            bytes[at] ^= 4;
            store.put(&name, &[&bytes]).unwrap();
            turned += 1;
        }
    }
    assert!(turned > 0);
    check(&image, &model);
    let report = repair::run(&image, orders, |_, _, _| true).unwrap();
    assert_eq!(report.lost, 0, "{report:?}");
    assert!(report.damaged > 0, "{report:?}");
    let report = repair::run(&image, orders, |_, _, _| true).unwrap();
    assert_eq!((report.damaged, report.missing), (0, 0), "{report:?}");
    drop(image);
    check(&Image::open(pool, "vm", false).unwrap(), &model);
}

/// A cluster that is not there is said to be not there, in time, and with what to do.
#[test]
fn what_cannot_be_reached_is_told() {
    if let Err(error) = rados::librados::load() {
        assert!(error.contains("apt install librados2"), "{error}");
        eprintln!("skipped: {error}");
        return;
    }
    let scratch = rig::Scratch::new("rados-nowhere");
    let conf = scratch.path("ceph.conf");
    let error = |place: &str| {
        let place: rados::Place = place.parse().unwrap();
        let (user, conf) = (place.user.as_deref(), place.conf.as_deref());
        rados::Connection::to(user, conf, PATIENCE).unwrap().cluster().unwrap_err()
    };
    let absent = format!("p?conf={}", conf.display());
    let said = error(&absent);
    assert!(said.contains("ceph.conf") && said.contains("CEPH_CONF"), "{said}");
    std::fs::write(&conf, "[global]\nmon_host = v2:127.0.0.1:1\nauth_client_required = none\n")
        .unwrap();
    let begun = Instant::now();
    let said = error(&absent);
    assert!(said.contains("no monitor answers"), "{said}");
    assert!(begun.elapsed() < 2 * PATIENCE, "{:?}", begun.elapsed());
    let store = open_at(&absent);
    assert_eq!(store.get("vm/a", 0, 1), Err(Errno::NODEV));
    assert!(store::open("rados:").is_err_and(|error| error.contains("write [USER@]POOL")));
}

fn open_at(place: &str) -> Rados {
    Rados::patient(place.parse().unwrap(), PATIENCE, LEASE).unwrap()
}
