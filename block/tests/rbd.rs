//! Images of RBD: made, read and judged by Ceph's own tools, where Ceph is installed.

mod rig;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::Errno;
use base::random::Random;
use block::device::{Answer, Device, Op, Request, Zero, wait_for};
use block::rbd::RbdImage;
use rados::librados::Lock;
use rados::{Connection, Io, Step};
use rig::ceph::Ceph;
use rig::{Scratch, program};

const SIZE: u64 = 48 << 20;

fn open(ceph: &Ceph, name: &str, read_only: bool) -> Result<RbdImage, String> {
    RbdImage::open(&format!("{name}?conf={}", ceph.conf()).parse().unwrap(), read_only)
}

fn read(image: &RbdImage, offset: u64, len: u32) -> Vec<u8> {
    let Ok(Answer::Data(data)) = wait_for(image, Op::Read { offset, len }) else { panic!() };
    data
}

/// Writes, trims and zeroes, over borders of objects and not.
fn work(image: &RbdImage, model: &mut [u8], random: &mut Random) {
    for _ in 0..60 {
        let longest = if random.chance(1, 4) { 20_000 } else { 100 };
        let offset = random.below(SIZE / 512) * 512;
        let len = ((1 + random.below(longest)) * 512).min(SIZE - offset);
        let range = offset as usize..(offset + len) as usize;
        let op = match random.below(8) {
            0 => Op::Trim { offset, len, fua: false },
            1 => Op::Zero { offset, len, how: Zero::default() },
            2 => Op::Zero { offset, len, how: Zero { no_hole: true, ..Zero::default() } },
            _ => {
                random.fill(&mut model[range.clone()]);
                Op::Write { offset, data: model[range.clone()].to_vec(), fua: random.chance(1, 2) }
            }
        };
        if !matches!(op, Op::Write { .. }) {
            model[range].fill(0);
        }
        assert_eq!(wait_for(image, op), Ok(Answer::Done));
    }
    assert_eq!(wait_for(image, Op::Flush), Ok(Answer::Done));
}

fn check(image: &RbdImage, model: &[u8]) {
    for (i, part) in model.chunks(5 << 20).enumerate() {
        let got = read(image, (i * (5 << 20)) as u64, part.len() as u32);
        assert_eq!(got.iter().zip(part).position(|(a, b)| a != b), None, "{i}");
    }
}

/// What Ceph's own tool says is in an image or a snapshot.
fn exported(ceph: &Ceph, scratch: &Scratch, name: &str) -> Vec<u8> {
    let file = scratch.path("exported");
    let _ = std::fs::remove_file(&file);
    ceph.run("rbd", &["export", name, &file.display().to_string(), "--no-progress"]);
    std::fs::read(file).unwrap()
}

fn same(a: &[u8], b: &[u8]) {
    assert_eq!(a.len(), b.len());
    assert_eq!(a.iter().zip(b).position(|(a, b)| a != b), None);
}

/// The object map agrees with what there is; it may say of an empty object that it is there.
fn check_map(ceph: &Ceph, name: &str) {
    let said = ceph.run("rbd", &["object-map", "check", name, "--no-progress"]);
    assert!(!said.contains("error"), "{said}");
    assert!(!ceph.run("rbd", &["info", name]).contains("invalid"));
}

#[test]
fn images_are_what_ceph_says_they_are() {
    let Some(ceph) = Ceph::start("rbd") else { return };
    if program("rbd").is_none() {
        eprintln!("skipped: no rbd (apt install --no-install-recommends ceph-common)");
        return;
    }
    let scratch = Scratch::new("rbd-files");
    what_is_not_understood_is_refused(&ceph);
    an_image_with_all_the_usual_features(&ceph, &scratch);
    a_map_is_believed_where_it_is_known(&ceph);
    an_image_without_a_lock(&ceph, &scratch);
    a_snapshot_waits_for_what_is_under_way(&ceph, &scratch);
    what_is_written_waits_for_the_header(&ceph, &scratch);
    replicas_serve_reads(&ceph, &scratch);
    an_osd_is_waited_for(&ceph);
    what_was_given_up_keeps_the_lock(&ceph, &scratch);
    who_is_shut_out_writes_no_more(&ceph);
    a_pool_gets_another_name(&ceph);
    through_nbd(&ceph, &scratch);
}

/// An image of which every replica is read is the same image.
fn replicas_serve_reads(ceph: &Ceph, scratch: &Scratch) {
    ceph.run("ceph", &["osd", "pool", "create", "threefold", "8"]);
    ceph.run("ceph", &["osd", "pool", "set", "threefold", "size", "3"]);
    ceph.run("rbd", &["create", "threefold/disk", "--size", "48M"]);
    let place = format!("threefold/disk?conf={}&reads=balance", ceph.conf());
    let mut model = vec![0; SIZE as usize];
    let mut random = Random::new(5);
    {
        let image = RbdImage::open(&place.parse().unwrap(), false).unwrap();
        for _ in 0..4 {
            work(&image, &mut model, &mut random);
            check(&image, &model);
        }
    }
    same(&exported(ceph, scratch, "threefold/disk"), &model);
    ceph.run(
        "ceph",
        &["osd", "pool", "rm", "threefold", "threefold", "--yes-i-really-really-mean-it"],
    );
}

fn what_is_not_understood_is_refused(ceph: &Ceph) {
    let error = |name: &str| open(ceph, name, false).unwrap_err();
    let said = error("rbd/nothing");
    assert!(said.contains("no image rbd/nothing") && said.contains("rbd create"), "{said}");
    let said = error("nothing/nothing");
    assert!(said.contains("no pool nothing"), "{said}");
    let made = ["--size", "8M", "--image-feature"];
    let create = |name: &str, features: &str, more: &[&str]| {
        ceph.run("rbd", &[&["create", name][..], &made, &[features], more].concat());
    };
    create("journaled", "layering,exclusive-lock,journaling", &[]);
    let said = error("rbd/journaled");
    assert!(
        said.contains("journaling") && said.contains("rbd feature disable rbd/journaled"),
        "{said}"
    );
    create("striped", "layering,striping", &["--stripe-unit", "65536", "--stripe-count", "4"]);
    assert!(error("rbd/striped").contains("striping"));
    create("elsewhere", "layering", &["--data-pool", "osd0"]);
    assert!(error("rbd/elsewhere").contains("data-pool"));
    create("parent", "layering", &[]);
    ceph.run("rbd", &["snap", "create", "parent@s", "--no-progress"]);
    ceph.run("rbd", &["snap", "protect", "parent@s"]);
    ceph.run("rbd", &["clone", "parent@s", "child"]);
    let said = error("rbd/child");
    assert!(said.contains("parent") && said.contains("rbd flatten rbd/child"), "{said}");
    // Somebody has it, by a lock of his own.
    create("locked", "layering", &[]);
    ceph.run("rbd", &["lock", "add", "locked", "mine"]);
    let said = error("rbd/locked");
    assert!(
        said.contains("is open at") && said.contains("rbd lock rm rbd/locked 'mine' client."),
        "{said}"
    );
}

fn an_image_with_all_the_usual_features(ceph: &Ceph, scratch: &Scratch) {
    ceph.run("rbd", &["create", "disk", "--size", "48M"]);
    let info = ceph.run("rbd", &["info", "disk"]);
    assert!(info.contains("exclusive-lock, object-map, fast-diff"), "{info}");
    let (mut model, mut random) = (vec![0; SIZE as usize], Random::new(1));
    let image = open(ceph, "rbd/disk", false).unwrap();
    assert_eq!(image.size(), SIZE);
    check(&image, &model);
    work(&image, &mut model, &mut random);
    check(&image, &model);
    // Nobody else gets it, of ours or of Ceph's; who only reads does.
    let said = open(ceph, "rbd/disk", false).unwrap_err();
    assert!(said.contains("is open at") && said.contains("'auto "), "{said}");
    let locks = ceph.run("rbd", &["lock", "ls", "disk"]);
    assert!(locks.contains("auto "), "{locks}");
    let begun = Instant::now();
    let (done, said) = ceph.try_run("rbd", &["snap", "create", "disk@no", "--no-progress"]);
    assert!(!done, "{said}");
    eprintln!("a snapshot of what is held: {:?}: {}", begun.elapsed(), said.trim());
    assert!(begun.elapsed() < Duration::from_secs(30));
    let reader = open(ceph, "rbd/disk", true).unwrap();
    check(&reader, &model);
    let refused = wait_for(&reader, Op::Write { offset: 0, data: vec![1; 512], fua: false });
    assert_eq!(refused, Err(Errno::ROFS));
    drop((image, reader));
    same(&exported(ceph, scratch, "disk"), &model);
    check_map(ceph, "disk");
    assert_eq!(ceph.run("rbd", &["lock", "ls", "disk"]).trim(), "");
    // One died that had it: its client is shut out, and the lock is taken.
    let dead = Connection::to(None, Some(&ceph.conf()), Duration::from_secs(9)).unwrap();
    let dead = dead.cluster().unwrap();
    let its = Arc::new(dead.io("rbd", "").unwrap());
    let id = info.split_once("id: ").unwrap().1.split_whitespace().next().unwrap();
    let header = format!("rbd_header.{id}");
    let lock =
        Lock { name: "rbd_lock", cookie: "auto 94000000000000", tag: "internal", description: "" };
    its.lock(&header, &lock, Duration::ZERO, false).unwrap();
    let image = open(ceph, "rbd/disk", false).unwrap();
    let said =
        Io::wait(Duration::from_secs(9), |done| its.change(&header, &[Step::Zero(0, 1)], done));
    assert_eq!(said, Err(Errno(108)));
    drop(image);

    // What a snapshot has stays as it was; Ceph writes in between.
    ceph.run("rbd", &["snap", "create", "disk@then", "--no-progress"]);
    let then = model.clone();
    let image = open(ceph, "rbd/disk", false).unwrap();
    work(&image, &mut model, &mut random);
    check(&image, &model);
    drop(image);
    same(&exported(ceph, scratch, "disk@then"), &then);
    same(&exported(ceph, scratch, "disk"), &model);
    check_map(ceph, "disk");
    what_is_trimmed_has_changed(ceph);
    ceph.run(
        "rbd",
        &["bench", "disk", "--io-type", "write", "--io-total", "1M", "--io-size", "64K"],
    );
    let all = exported(ceph, scratch, "disk");
    let image = open(ceph, "rbd/disk", false).unwrap();
    check(&image, &all);

    // The OSD that has the header is ended and comes back: whoever it is, the image is held still, and goes on.
    for osd in 0..3 {
        ceph.signal(osd, "-KILL");
        ceph.revive(osd);
    }
    let mut model = all;
    work(&image, &mut model, &mut random);
    assert!(open(ceph, "rbd/disk", false).is_err());
    drop(image);
    same(&exported(ceph, scratch, "disk"), &model);
    check_map(ceph, "disk");
}

/// Who asks the object map for what changed since a snapshot is told of what was trimmed and zeroed, and of nothing else.
fn what_is_trimmed_has_changed(ceph: &Ceph) {
    const OBJECT: u64 = 4 << 20;
    let made = ["create", "trimmed", "--size", "48M"];
    ceph.run("rbd", &made);
    let image = open(ceph, "rbd/trimmed", false).unwrap();
    for object in [0, 1, 2, 3, 5] {
        let op = Op::Write { offset: object * OBJECT, data: vec![7; 8192], fua: false };
        assert_eq!(wait_for(&image, op), Ok(Answer::Done));
    }
    drop(image);
    ceph.run("rbd", &["snap", "create", "trimmed@then", "--no-progress"]);
    let image = open(ceph, "rbd/trimmed", false).unwrap();
    let how = Zero::default();
    let trims = [
        // Of the last three there is one.
        Op::Trim { offset: 0, len: OBJECT, fua: false },
        Op::Zero { offset: 2 * OBJECT + 4096, len: 4096, how },
        Op::Trim { offset: 4 * OBJECT, len: 3 * OBJECT, fua: false },
    ];
    for op in trims {
        assert_eq!(wait_for(&image, op), Ok(Answer::Done));
    }
    drop(image);
    let args = ["diff", "trimmed", "--whole-object", "--from-snap", "then", "--format", "json"];
    let said = ceph.run("rbd", &args);
    let offsets = said.split("\"offset\":").skip(1);
    let offsets = offsets.map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap();
        rest[..end].parse::<u64>().unwrap() / OBJECT
    });
    assert_eq!(offsets.collect::<Vec<_>>(), [0, 2, 5], "{said}");
    check_map(ceph, "trimmed");
}

/// What the map of an image says when it is opened need not be said again; what it does not say must be.
fn a_map_is_believed_where_it_is_known(ceph: &Ceph) {
    let (objects, object) = (12, 4 << 20);
    ceph.run("rbd", &["create", "rbd/known", "--size", "48M"]);
    let write = |image: &RbdImage, number: u64| {
        let op = Op::Write { offset: number * object + 512, data: vec![7; 512], fua: false };
        assert_eq!(wait_for(image, op), Ok(Answer::Done));
    };
    let image = open(ceph, "rbd/known", false).unwrap();
    [1, 5, 6, 11].into_iter().for_each(|number| write(&image, number));
    drop(image);
    check_map(ceph, "rbd/known");
    // All of them are there, and as the snapshot has them.
    ceph.run("rbd", &["snap", "create", "rbd/known@then", "--no-progress"]);
    let image = open(ceph, "rbd/known", false).unwrap();
    [0, 5, 7].into_iter().for_each(|number| write(&image, number));
    drop(image);
    check_map(ceph, "rbd/known");
    let image = open(ceph, "rbd/known", false).unwrap();
    (0..objects).for_each(|number| write(&image, number));
    for number in 0..objects {
        // Of one object, of which most is not there; of two of them.
        let mut all = vec![0; 2048];
        all[512..1024].fill(7);
        assert!(read(&image, number * object, 2048) == all, "{number}");
        if number > 0 {
            let both = [&[0; 1024][..], &all[..1024]].concat();
            assert!(read(&image, number * object - 1024, 2048) == both, "{number}");
        }
    }
    drop(image);
    check_map(ceph, "rbd/known");
    let changed = ceph.run("rbd", &["diff", "--whole-object", "--from-snap", "then", "rbd/known"]);
    assert_eq!(changed.lines().filter(|line| line.contains("data")).count(), 12, "{changed}");
}

/// Others may make snapshots of it, and resize it, while it is served.
fn an_image_without_a_lock(ceph: &Ceph, scratch: &Scratch) {
    ceph.run("rbd", &["create", "plain", "--size", "48M", "--image-feature", "layering"]);
    let (mut model, mut random) = (vec![0; SIZE as usize], Random::new(2));
    let image = open(ceph, "rbd/plain", false).unwrap();
    work(&image, &mut model, &mut random);
    ceph.run("rbd", &["snap", "create", "plain@then", "--no-progress"]);
    let then = model.clone();
    work(&image, &mut model, &mut random);
    ceph.run("rbd", &["resize", "plain", "--size", "50M", "--no-progress"]);
    let end = Instant::now() + Duration::from_secs(10);
    while image.size() != 50 << 20 {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(read(&image, SIZE, 1 << 20), vec![0; 1 << 20]);
    drop(image);
    same(&exported(ceph, scratch, "plain@then"), &then);
    same(&exported(ceph, scratch, "plain")[..SIZE as usize], &model);
}

/// The OSD that answers for an object.
fn primary(ceph: &Ceph, object: &str) -> usize {
    let said = ceph.run("ceph", &["osd", "map", "rbd", object, "-f", "json"]);
    let (_, rest) = said.split_once("\"acting_primary\":").unwrap();
    rest.trim_start()[..1].parse().unwrap()
}

fn id_of(ceph: &Ceph, name: &str) -> String {
    let info = ceph.run("rbd", &["info", name]);
    info.split_once("id: ").unwrap().1.split_whitespace().next().unwrap().to_owned()
}

/// An OSD that has objects of an image but not what tools ask of it, and where in the image the first of these is.
fn apart(ceph: &Ceph, name: &str) -> (usize, u64) {
    let id = id_of(ceph, name);
    let asked = [format!("rbd_id.{name}"), format!("rbd_header.{id}")];
    let asked = asked.map(|object| primary(ceph, &object));
    let found = (0..12).find_map(|number| {
        let osd = primary(ceph, &format!("rbd_data.{id}.{number:016x}"));
        (!asked.contains(&osd)).then_some((osd, number * (4 << 20)))
    });
    found.unwrap()
}

fn begin(image: &RbdImage, op: Op) -> std::sync::mpsc::Receiver<Result<Answer, Errno>> {
    let (tell, told) = std::sync::mpsc::channel();
    let done = Box::new(move |outcome| drop(tell.send(outcome)));
    image.submit(Request { op, done });
    told
}

/// A write is under way while somebody makes a snapshot: he is told that it is made when it does not change any more.
fn a_snapshot_waits_for_what_is_under_way(ceph: &Ceph, scratch: &Scratch) {
    let mut model = exported(ceph, scratch, "plain");
    let image = open(ceph, "rbd/plain", false).unwrap();
    let (osd, offset) = apart(ceph, "plain");
    let range = offset as usize..offset as usize + 4096;
    let write = |byte: u8| Op::Write { offset, data: vec![byte; 4096], fua: false };
    ceph.signal(osd, "-STOP");
    let under_way = begin(&image, write(3));
    std::thread::scope(|scope| {
        let made =
            scope.spawn(|| ceph.run("rbd", &["snap", "create", "plain@waited", "--no-progress"]));
        std::thread::sleep(Duration::from_secs(4));
        let is_made = made.is_finished();
        ceph.signal(osd, "-CONT");
        made.join().unwrap();
        assert!(!is_made);
    });
    assert_eq!(under_way.recv(), Ok(Ok(Answer::Done)));
    assert_eq!(wait_for(&image, write(4)), Ok(Answer::Done));
    drop(image);
    model[range.clone()].fill(3);
    same(&exported(ceph, scratch, "plain@waited"), &model);
    model[range].fill(4);
    same(&exported(ceph, scratch, "plain"), &model);
}

/// There is news of an image whose header cannot be read: nothing is written until it can, and whoever has the news waits.
fn what_is_written_waits_for_the_header(ceph: &Ceph, scratch: &Scratch) {
    let image = open(ceph, "rbd/plain", false).unwrap();
    let header = format!("rbd_header.{}", id_of(ceph, "plain"));
    let (size, none) = (scratch.path("size"), scratch.path("none"));
    let (size, none) = (size.display().to_string(), none.display().to_string());
    std::fs::write(&none, "x").unwrap();
    ceph.run("rados", &["-p", "rbd", "getomapval", &header, "size", &size]);
    let set = |file: &str| {
        ceph.run("rados", &["-p", "rbd", "setomapval", &header, "size", "--input-file", file]);
    };
    set(&none);
    let other = Connection::to(None, Some(&ceph.conf()), Duration::from_secs(9)).unwrap();
    let io = other.cluster().unwrap().io("rbd", "").unwrap();
    let news = rados::librados::envelope(&3u32.to_le_bytes());
    std::thread::scope(|scope| {
        let told = scope.spawn(|| io.notify(&header, &news, Duration::from_secs(20)));
        std::thread::sleep(Duration::from_secs(2));
        let write = begin(&image, Op::Write { offset: 0, data: vec![9; 512], fua: false });
        let waited = write.recv_timeout(Duration::from_secs(2));
        let is_told = told.is_finished();
        set(&size);
        assert!(waited.is_err() && !is_told, "{waited:?}");
        let end = Duration::from_secs(10);
        assert_eq!(write.recv_timeout(end), Ok(Ok(Answer::Done)));
        told.join().unwrap().unwrap();
    });
    assert_eq!(wait_for(&image, Op::Trim { offset: 0, len: 512, fua: false }), Ok(Answer::Done));
}

/// A guest hears nothing of an OSD that is slow, or fails until another one stands in for it.
fn an_osd_is_waited_for(ceph: &Ceph) {
    let image = open(ceph, "rbd/plain", false).unwrap();
    let (osd, offset) = apart(ceph, "plain");
    ceph.signal(osd, "-STOP");
    let write = begin(&image, Op::Write { offset, data: vec![5; 4096], fua: false });
    let read = begin(&image, Op::Read { offset, len: 4096 });
    let waited = write.recv_timeout(rados::PATIENCE + Duration::from_secs(8));
    ceph.signal(osd, "-CONT");
    assert!(waited.is_err(), "{waited:?}");
    assert_eq!(write.recv(), Ok(Ok(Answer::Done)));
    assert!(matches!(read.recv(), Ok(Ok(Answer::Data(_)))));
}

/// The configuration says that a write is given up. It may be carried out yet: who comes next sees to it that it is not.
fn what_was_given_up_keeps_the_lock(ceph: &Ceph, scratch: &Scratch) {
    let conf = scratch.path("patient.conf");
    let text = std::fs::read_to_string(ceph.conf()).unwrap();
    std::fs::write(&conf, text.replace("[client]", "[client]\nrados_osd_op_timeout = 3")).unwrap();
    let at = format!("rbd/plain?conf={}", conf.display()).parse().unwrap();
    let image = RbdImage::open(&at, false).unwrap();
    let (osd, offset) = apart(ceph, "plain");
    ceph.signal(osd, "-STOP");
    let write = Op::Write { offset, data: vec![6; 4096], fua: false };
    let given_up = wait_for(&image, write);
    drop(image);
    let locks = ceph.run("rbd", &["lock", "ls", "plain"]);
    // The next one comes before it has been carried out.
    let image = open(ceph, "rbd/plain", false);
    ceph.signal(osd, "-CONT");
    assert_eq!(given_up, Err(Errno::TIMEDOUT));
    assert!(locks.contains("auto "), "{locks}");
    let image = image.unwrap();
    let old = locks.split_whitespace().find(|word| word.contains(":0/")).unwrap();
    let shut_out = ceph.run("ceph", &["osd", "blacklist", "ls"]);
    assert!(shut_out.contains(old.rsplit_once('/').unwrap().1), "{shut_out}, {locks}");
    let write = Op::Write { offset, data: vec![7; 4096], fua: false };
    assert_eq!(wait_for(&image, write), Ok(Answer::Done));
    assert_eq!(read(&image, offset, 4096), vec![7; 4096]);
    drop(image);
    assert_eq!(ceph.run("rbd", &["lock", "ls", "plain"]).trim(), "");
}

/// Whoever is shut out has lost his image, and no other one.
fn who_is_shut_out_writes_no_more(ceph: &Ceph) {
    let (image, other) = (open(ceph, "rbd/plain", false).unwrap(), open(ceph, "rbd/disk", false));
    let locks = ceph.run("rbd", &["lock", "ls", "plain"]);
    let address = locks.split_whitespace().find(|word| word.contains(":0/")).unwrap();
    ceph.run("ceph", &["osd", "blacklist", "add", address]);
    let write = || Op::Write { offset: 0, data: vec![1; 512], fua: false };
    let end = Instant::now() + Duration::from_secs(30);
    while let Ok(done) = wait_for(&image, write()) {
        assert!(done == Answer::Done && Instant::now() < end);
    }
    assert_eq!(wait_for(&image, write()), Err(Errno::STALE));
    assert_eq!(wait_for(&other.unwrap(), write()), Ok(Answer::Done));
    drop(image);
    let image = open(ceph, "rbd/plain", false).unwrap();
    assert_eq!(wait_for(&image, write()), Ok(Answer::Done));
    // A writer that takes no lock is known by his watch.
    drop(image);
    let other = Connection::to(None, Some(&ceph.conf()), Duration::from_secs(9)).unwrap();
    let io = Arc::new(other.cluster().unwrap().io("rbd", "").unwrap());
    let header = format!("rbd_header.{}", id_of(ceph, "plain"));
    let watch = io.watch(&header, Box::new(|_| {})).unwrap();
    let said = open(ceph, "rbd/plain", false).unwrap_err();
    assert!(said.contains("is open as client.") && said.contains("exclusive-lock"), "{said}");
    drop(watch);
    drop(open(ceph, "rbd/plain", false).unwrap());
}

fn a_pool_gets_another_name(ceph: &Ceph) {
    ceph.run("rbd", &["create", "hole", "--size", "8M"]);
    let image = open(ceph, "rbd/hole", false).unwrap();
    ceph.run("ceph", &["osd", "pool", "rename", "rbd", "renamed"]);
    // With what is written the news of it comes.
    let write = Op::Write { offset: 4 << 20, data: vec![1; 512], fua: false };
    assert_eq!(wait_for(&image, write), Ok(Answer::Done));
    assert_eq!(read(&image, 0, 4096), vec![0; 4096]);
    ceph.run("ceph", &["osd", "pool", "rename", "renamed", "rbd"]);
    assert_eq!(read(&image, 0, 4096), vec![0; 4096]);
}

/// QEMU and libnbd copy to it and from it.
fn through_nbd(ceph: &Ceph, scratch: &Scratch) {
    ceph.run("rbd", &["create", "copied", "--size", "48M"]);
    let mut model = vec![0; SIZE as usize];
    let mut random = Random::new(3);
    random.fill(&mut model[..10 << 20]);
    random.fill(&mut model[40_000_000..]);
    let source = scratch.path("source");
    std::fs::write(&source, &model).unwrap();
    let source = source.display().to_string();
    let back = scratch.path("back").display().to_string();
    for tool in ["qemu-img", "nbdcopy"] {
        if program(tool).is_none() {
            eprintln!("skipped: no {tool} (apt install qemu-utils libnbd-bin)");
            continue;
        }
        let image = Arc::new(open(ceph, "rbd/copied", false).unwrap());
        let server = rig::serve(scratch, image);
        let url = format!("nbd+unix:///disk?socket={}", scratch.path("nbd.sock").display());
        let run = |args: &[&str]| {
            let done = Command::new("timeout").arg("120").arg(tool).args(args).output().unwrap();
            assert!(done.status.success(), "{tool}: {}", String::from_utf8_lossy(&done.stderr));
        };
        let _ = std::fs::remove_file(&back);
        if tool == "qemu-img" {
            run(&["convert", "-n", "-f", "raw", "-O", "raw", &source, &url]);
            run(&["compare", "-f", "raw", "-F", "raw", &source, &url]);
        } else {
            run(&[&source, &url]);
            run(&[&url, &back]);
            same(&std::fs::read(&back).unwrap(), &model);
        }
        drop(server);
        same(&exported(ceph, scratch, "copied"), &model);
        check_map(ceph, "copied");
        // The other one writes something else.
        random.fill(&mut model[5 << 20..6 << 20]);
        std::fs::write(&source, &model).unwrap();
    }
}
