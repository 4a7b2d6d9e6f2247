//! Pools over stores that fail, hang, lie, and lose what they were given last.

mod rig;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use base::Errno;
use base::random::Random;
use block::device::Disk;
use block::pool::dir::Dir;
use block::pool::patch::PATCHES_MAX;
use block::pool::repair::{self, Orders, Report};
use block::pool::store::Store;
use block::pool::{Coding, Image, Pool, Spec, StoreSpec};

use rig::Scratch;
use rig::disk::{check, work};

const OBJECT: u32 = 64 << 10;
const SIZE: u64 = 1 << 20;
const REPAIR: Orders = Orders { verify: false, repair: true, rate: 0 };
const SCRUB: Orders = Orders { verify: true, repair: true, rate: 0 };

/// A store in memory that can be made to misbehave.
#[derive(Default)]
struct Faulty {
    names: Mutex<BTreeMap<String, Vec<u8>>>,
    fails: AtomicBool,
    /// It keeps nothing more.
    full: AtomicBool,
    /// Names that it says it has kept, and has not.
    forgets: AtomicBool,
    /// It keeps what it is given, and says that it has not.
    denies: AtomicBool,
    /// It says that it has removed what it is to remove, and has not: it was not reached in time.
    hoards: AtomicBool,
    /// It does not come to what is to be removed.
    dawdles: Mutex<bool>,
    /// Bytes that it was given to keep.
    taken: AtomicU64,
    hangs: Mutex<bool>,
    goes_on: Condvar,
    hurries: Condvar,
    locked: Arc<AtomicBool>,
}

struct Lock(Arc<AtomicBool>);

impl block::pool::ground::Hold for Lock {}

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Faulty {
    fn hang(&self, hang: bool) {
        *self.hangs.lock().unwrap() = hang;
        self.goes_on.notify_all();
    }

    fn dawdle(&self, dawdles: bool) {
        *self.dawdles.lock().unwrap() = dawdles;
        self.hurries.notify_all();
    }

    fn enter(&self) -> Result<(), Errno> {
        let mut hangs = self.hangs.lock().unwrap();
        while *hangs {
            hangs = self.goes_on.wait(hangs).unwrap();
        }
        if self.fails.load(Ordering::SeqCst) { Err(Errno::IO) } else { Ok(()) }
    }

    fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::SeqCst);
    }

    /// Turns a bit of everything that it holds of objects.
    fn corrupt(&self, random: &mut Random) {
        for (name, bytes) in self.names.lock().unwrap().iter_mut() {
            if !name.ends_with("info") && !bytes.is_empty() {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << random.below(8);
            }
        }
    }

    /// Names of patches.
    fn patches(&self) -> Vec<String> {
        let names = self.names.lock().unwrap();
        names.keys().filter(|name| name.contains(".p")).cloned().collect()
    }

    fn lose(&self, name: &str) {
        self.names.lock().unwrap().remove(name);
    }

    fn lose_all(&self) {
        self.names.lock().unwrap().clear();
    }

    fn count(&self) -> usize {
        self.names.lock().unwrap().len()
    }
}

impl Store for Faulty {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<(), Errno> {
        self.enter()?;
        if self.full.load(Ordering::SeqCst) {
            return Err(Errno::NOSPC);
        }
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        self.taken.fetch_add(bytes as u64, Ordering::SeqCst);
        if !self.forgets.load(Ordering::SeqCst) {
            self.names.lock().unwrap().insert(name.to_owned(), parts.concat());
        }
        if self.denies.load(Ordering::SeqCst) { Err(Errno::IO) } else { Ok(()) }
    }

    fn get(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        self.enter()?;
        let names = self.names.lock().unwrap();
        let bytes = names.get(name).ok_or(Errno::NOENT)?;
        let from = (offset as usize).min(bytes.len());
        Ok(bytes[from..bytes.len().min(from + len)].to_vec())
    }

    fn list(&self, image: &str) -> Result<Vec<String>, Errno> {
        self.enter()?;
        let names = self.names.lock().unwrap();
        let of = |name: &String| Some(name.strip_prefix(image)?.strip_prefix('/')?.to_owned());
        Ok(names.keys().filter_map(of).collect())
    }

    fn remove(&self, name: &str) -> Result<(), Errno> {
        drop(self.hurries.wait_while(self.dawdles.lock().unwrap(), |dawdles| *dawdles).unwrap());
        self.enter()?;
        if self.denies.load(Ordering::SeqCst) {
            return Err(Errno::IO);
        }
        if !self.hoards.load(Ordering::SeqCst) {
            self.names.lock().unwrap().remove(name);
        }
        Ok(())
    }

    fn lock(&self, _: &str) -> Result<block::pool::ground::Lock, Errno> {
        self.enter()?;
        if self.locked.swap(true, Ordering::SeqCst) {
            return Err(Errno::BUSY);
        }
        Ok(Box::new(Lock(Arc::clone(&self.locked))))
    }
}

struct Rig {
    spec: Spec,
    stores: Vec<Arc<Faulty>>,
}

impl Rig {
    fn new(coding: &str, stores: usize) -> Self {
        let coding: Coding = coding.parse().unwrap();
        let store = |i| StoreSpec { domain: format!("d{i}"), at: format!("dir:/{i}"), out: false };
        let spec = Spec::new(coding, (0..stores).map(store).collect()).unwrap();
        let rig = Self { spec, stores: (0..stores).map(|_| Arc::default()).collect() };
        rig.pool().create("vm", SIZE, OBJECT).unwrap();
        rig
    }

    fn pool(&self) -> Arc<Pool> {
        let stores = self.stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>);
        Arc::new(Pool::over(self.spec.clone(), stores.collect()).unwrap())
    }

    fn open(&self) -> Image {
        Image::open(self.pool(), "vm", false).unwrap()
    }

    fn repair(&self, orders: Orders) -> Report {
        repair::run(&self.open(), orders, |_, _, _| true).unwrap()
    }
}

impl Rig {
    /// Waits until nobody asks the stores anything any more: who had them open let go, and their threads ended.
    fn settle(&self) {
        let idle = || self.stores.iter().all(|store| Arc::strong_count(store) == 1);
        let settled = (0..4000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            idle()
        });
        assert!(settled, "stores are still asked");
    }
}

type Names = BTreeMap<String, Vec<u8>>;

impl Rig {
    /// What each store holds.
    fn names(&self) -> Vec<Names> {
        self.stores.iter().map(|store| store.names.lock().unwrap().clone()).collect()
    }

    /// Waits until shards that were there before are removed: that happens after the write that replaced them.
    fn await_removal(&self, before: &[Names]) {
        let is_shard = |name: &&String| name.contains('.');
        let left = |store: &Faulty, before: &Names| {
            let names = store.names.lock().unwrap();
            before.keys().filter(is_shard).any(|name| names.contains_key(name))
        };
        let stores = || self.stores.iter().zip(before);
        let gone = (0..4000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            !stores().any(|(store, before)| left(store, before))
        });
        assert!(gone, "old shards are still there");
    }
}

#[test]
fn what_was_written_is_there_after_all_that_may_be_lost() {
    for (coding, stores, may_lose) in [("replicated:3", 5, 1), ("rs:4,2", 8, 2), ("rs:6,3", 9, 3)] {
        let rig = Rig::new(coding, stores);
        let mut random = Random::new(3);
        let mut model = vec![0; SIZE as usize];
        let image = rig.open();
        work(&image, &mut model, &mut random, 60);
        check(&image, &model);
        drop(image);
        check(&rig.open(), &model);
        for round in 0..3 {
            let lost: Vec<usize> = (0..may_lose).map(|i| (round * 3 + i) % stores).collect();
            for store in &lost {
                rig.stores[*store].fail(true);
            }
            check(&rig.open(), &model);
            for store in &lost {
                rig.stores[*store].fail(false);
                rig.stores[*store].lose_all();
            }
            let report = rig.repair(REPAIR);
            assert!(report.rebuilt > 0 && report.lost == 0, "{report:?}");
            let again = rig.repair(REPAIR);
            assert_eq!((again.missing, again.misplaced, again.whole), (0, 0, again.objects));
        }
        check(&rig.open(), &model);
    }
}

/// A running image goes on reading when as many stores fail as there is parity, and writing as long as enough are left.
#[test]
fn stores_fail_under_a_running_image() {
    let rig = Rig::new("rs:4,2", 6);
    let mut random = Random::new(5);
    let mut model = vec![0; SIZE as usize];
    let image = rig.open();
    work(&image, &mut model, &mut random, 40);
    rig.stores[1].fail(true);
    work(&image, &mut model, &mut random, 20);
    check(&image, &model);
    rig.stores[4].fail(true);
    check(&image, &model);
    // Five would have to take a whole object, and four are left: it fails, and what was there stays.
    let object = vec![1; OBJECT as usize];
    assert_eq!(image.write(u64::from(OBJECT), &object), Err(Errno::IO));
    check(&image, &model);
    // Three would do for a patch; but not over what may be half there.
    assert_eq!(image.write(u64::from(OBJECT), &[1; 512]), Err(Errno::IO));
    model[..512].fill(7);
    image.write(0, &[7; 512]).unwrap();
    check(&image, &model);
    rig.stores[0].fail(true);
    rig.stores[2].fail(true);
    assert_eq!(image.write(0, &[1; 512]), Err(Errno::IO));
    rig.stores[0].fail(false);
    rig.stores[2].fail(false);
    check(&image, &model);
    rig.stores[4].fail(false);
    work(&image, &mut model, &mut random, 20);
    check(&image, &model);
    drop(image);
    rig.stores[1].fail(false);
    // It comes back with what it had, and is believed in nothing that is old.
    check(&rig.open(), &model);
    assert_eq!(rig.repair(REPAIR).lost, 0);
    for store in [0, 2] {
        rig.stores[store].fail(true);
    }
    check(&rig.open(), &model);
}

/// An accelerator that hangs, or says that it cannot; what it does late it does to itself.
struct Odd {
    hangs: Mutex<bool>,
    goes_on: Condvar,
    fails: AtomicBool,
}

impl placement::dispatch::Accelerator for Odd {
    fn name(&self) -> &str {
        "odd"
    }

    fn can(&self, _: &placement::dispatch::Work) -> bool {
        true
    }

    fn run(&self, work: &mut placement::dispatch::Work) -> Result<(), String> {
        let mut hangs = self.hangs.lock().unwrap();
        while *hangs {
            hangs = self.goes_on.wait(hangs).unwrap();
        }
        if self.fails.load(Ordering::SeqCst) {
            return Err("no".into());
        }
        work.carry_out_here()
    }

    fn patience(&self) -> std::time::Duration {
        std::time::Duration::from_millis(20)
    }

    fn expected(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// Several objects are made anew by one request, and several degraded ones are read, their stripes computed by tasks that end in any order, by an
/// accelerator that fails and hangs as well.
#[test]
fn what_one_request_writes_of_several_objects_is_theirs() {
    let rig = Rig::new("rs:4,2", 6);
    let pool = rig.pool();
    let odd = Arc::new(Odd {
        hangs: Mutex::new(false),
        goes_on: Condvar::new(),
        fails: AtomicBool::new(false),
    });
    pool.dispatcher().add(Arc::clone(&odd));
    let image = Image::open(pool, "vm", false).unwrap();
    let mut random = Random::new(77);
    let mut model = vec![0; SIZE as usize];
    for round in 0..8 {
        *odd.hangs.lock().unwrap() = round % 4 == 2;
        odd.fails.store(round % 4 == 1, Ordering::SeqCst);
        let from = random.below(SIZE / 2 / 512) as usize * 512;
        let len = (SIZE / 4 + random.below(SIZE / 4) / 512 * 512) as usize;
        random.fill(&mut model[from..from + len]);
        image.write(from as u64, &model[from..from + len]).unwrap();
        check(&image, &model);
        for store in [round % 6, (round + 1) % 6] {
            rig.stores[store].fail(true);
        }
        check(&image, &model);
        for store in &rig.stores {
            store.fail(false);
        }
        *odd.hangs.lock().unwrap() = false;
        odd.goes_on.notify_all();
    }
    drop(image);
    check(&rig.open(), &model);
}

#[test]
fn wrong_bytes_are_not_believed_and_are_made_good() {
    for coding in ["replicated:3", "rs:4,2"] {
        let rig = Rig::new(coding, 7);
        let mut random = Random::new(9);
        let mut model = vec![0; SIZE as usize];
        work(&rig.open(), &mut model, &mut random, 60);
        for store in [1, 4] {
            rig.stores[store].corrupt(&mut random);
        }
        check(&rig.open(), &model);
        let report = rig.repair(SCRUB);
        assert!(report.damaged > 0 && report.lost == 0, "{report:?}");
        assert_eq!(rig.repair(SCRUB).damaged, 0);
        for store in [0, 3] {
            rig.stores[store].fail(true);
        }
        let open = Image::open(rig.pool(), "vm", true);
        // Two of three copies silent: the third might be old, and nobody could tell.
        match (coding, open) {
            ("replicated:3", open) => assert!(open.is_err()),
            (_, open) => check(&open.unwrap(), &model),
        }
    }
}

/// Stores that hang hold nobody up for long, and what they missed is made good when they go on.
#[test]
fn a_store_that_hangs_is_left_behind() {
    let rig = Rig::new("rs:4,2", 6);
    let mut random = Random::new(13);
    let mut model = vec![0; SIZE as usize];
    let image = rig.open();
    work(&image, &mut model, &mut random, 30);
    rig.stores[2].hang(true);
    check(&image, &model);
    work(&image, &mut model, &mut random, 5);
    check(&image, &model);
    rig.stores[2].hang(false);
    drop(image);
    rig.repair(REPAIR);
    let report = rig.repair(REPAIR);
    assert_eq!(report.whole, report.objects);
    check(&rig.open(), &model);
}

/// A store says that it has kept something, and has not: as if its power had failed, and it had lied of its flushes.
#[test]
fn a_store_that_forgets_is_one_that_is_lost() {
    let rig = Rig::new("rs:4,2", 6);
    let mut random = Random::new(17);
    let mut model = vec![0; SIZE as usize];
    let image = rig.open();
    work(&image, &mut model, &mut random, 30);
    for store in [0, 5] {
        rig.stores[store].forgets.store(true, Ordering::SeqCst);
    }
    work(&image, &mut model, &mut random, 20);
    for store in [0, 5] {
        rig.stores[store].forgets.store(false, Ordering::SeqCst);
    }
    check(&image, &model);
    drop(image);
    check(&rig.open(), &model);
}

/// A crash in the middle of a write leaves the old bytes or the new ones, the same whoever looks and whichever stores answer.
#[test]
fn half_a_write_is_none_or_all() {
    let mut outcomes = [0; 2];
    for cut in 0..7 {
        let rig = Rig::new("rs:4,2", 6);
        let image = rig.open();
        image.write(0, &vec![1; OBJECT as usize]).unwrap();
        let before = rig.names();
        image.write(0, &vec![2; OBJECT as usize]).unwrap();
        drop(image);
        rig.await_removal(&before);
        // The first `cut` stores have the new shard (and still the old one), the others had not got it.
        for (i, store) in rig.stores.iter().enumerate() {
            let mut names = store.names.lock().unwrap();
            if i >= cut {
                names.clear();
            }
            names.extend(before[i].clone());
        }
        // While two of them are away nobody can tell in some cases; then it is refused, not guessed.
        let mut first = None;
        for away in [vec![], vec![0, 1], vec![3, 4], vec![]] {
            for store in &away {
                rig.stores[*store].fail(true);
            }
            let mut byte = vec![0; OBJECT as usize];
            match rig.open().read(0, &mut byte) {
                Ok(()) => {
                    assert!(byte.iter().all(|b| *b == byte[0]) && byte[0] > 0, "cut {cut}");
                    assert_eq!(*first.get_or_insert(byte[0]), byte[0], "cut {cut}: {away:?}");
                }
                Err(errno) => assert_eq!(errno, Errno::IO),
            }
            for store in &away {
                rig.stores[*store].fail(false);
            }
        }
        outcomes[usize::from(first == Some(2))] += 1;
    }
    assert!(outcomes[0] > 0 && outcomes[1] > 0, "{outcomes:?}");
}

/// What a small write puts into stores is a few copies of what was written, whatever the size of the object; and however many
/// there are, they stay within bounds.
#[test]
fn a_small_write_costs_little() {
    const BIG: u32 = 1 << 20;
    for (coding, stores, copies) in [("replicated:3", 3, 3), ("rs:4,2", 6, 3), ("rs:6,3", 9, 4)] {
        let rig = Rig::new(coding, stores);
        rig.pool().create("big", SIZE, BIG).unwrap();
        let image = Image::open(rig.pool(), "big", false).unwrap();
        let mut model = vec![0; SIZE as usize];
        Random::new(31).fill(&mut model);
        image.write(0, &model).unwrap();
        let taken = || -> u64 { rig.stores.iter().map(|s| s.taken.load(Ordering::SeqCst)).sum() };
        let whole = taken();
        model[8192..12288].fill(3);
        image.write(8192, &model[8192..12288]).unwrap();
        image.zero(100 << 10, 300 << 10, false).unwrap();
        model[100 << 10..400 << 10].fill(0);
        // A store that was slow may have been stood in for.
        let most = 2 * (copies + 1) * (4096 + 200);
        assert!(taken() - whole <= most, "{coding}: {} bytes", taken() - whole);
        check(&image, &model);
        let mut random = Random::new(37);
        for _ in 0..2 * PATCHES_MAX {
            let at = random.below(SIZE / 512 - 4) as usize * 512;
            random.fill(&mut model[at..at + 2048]);
            image.write(at as u64, &model[at..at + 2048]).unwrap();
        }
        check(&image, &model);
        drop(image);
        let image = Image::open(rig.pool(), "big", false).unwrap();
        check(&image, &model);
        let report = repair::run(&image, REPAIR, |_, _, _| true).unwrap();
        assert!(report.patches <= PATCHES_MAX as u64, "{report:?}");
    }
}

/// A crash in the middle of a small write leaves the old bytes or the new ones, the same whoever looks.
#[test]
fn half_a_patch_is_none_or_all() {
    for before in [None, Some(1)] {
        let mut outcomes = [0; 2];
        for cut in 0..4 {
            let rig = Rig::new("rs:4,2", 6);
            let image = rig.open();
            if let Some(byte) = before {
                image.write(0, &vec![byte; OBJECT as usize]).unwrap();
            }
            image.write(1024, &[2; 512]).unwrap();
            drop(image);
            rig.settle();
            let have = rig.stores.iter().filter(|store| !store.patches().is_empty());
            for store in have.skip(cut) {
                let names = store.patches();
                names.iter().for_each(|name| store.lose(name));
            }
            let mut first = None;
            for away in [vec![], vec![0, 1], vec![3, 4], vec![2, 5], vec![]] {
                for store in &away {
                    rig.stores[*store].fail(true);
                }
                let mut bytes = vec![0; 1536];
                rig.open().read(512, &mut bytes).unwrap();
                let old = before.unwrap_or(0);
                assert!(bytes[..512].iter().chain(&bytes[1024..]).all(|b| *b == old));
                assert!(bytes[512..1024].iter().all(|b| *b == bytes[512]));
                assert_eq!(*first.get_or_insert(bytes[512]), bytes[512], "{cut}: {away:?}");
                for store in &away {
                    rig.stores[*store].fail(false);
                }
            }
            outcomes[usize::from(first == Some(2))] += 1;
        }
        assert!(outcomes[0] > 0 && outcomes[1] > 0, "{outcomes:?}");
    }
}

/// Bytes that a patch changed are never read as they were before it because the patch is lost, nor over something else than what it
/// was laid over.
#[test]
fn a_patch_that_is_lost_is_missed() {
    let written = || {
        let rig = Rig::new("rs:4,2", 6);
        let image = rig.open();
        image.write(0, &vec![1; OBJECT as usize]).unwrap();
        let before = rig.names();
        image.write(0, &vec![2; OBJECT as usize]).unwrap();
        rig.await_removal(&before);
        for i in 0..3 {
            image.write(4096 * i, &[3 + i as u8; 4096]).unwrap();
        }
        drop(image);
        rig.settle();
        (rig, before)
    };
    let mut byte = [0; 512];
    // The second of three.
    let (rig, _) = written();
    let second = rig.stores.iter().flat_map(|store| store.patches());
    let second = second.min_by_key(|name| (!name.contains("-0001-"), name.clone())).unwrap();
    rig.stores.iter().for_each(|store| store.lose(&second));
    assert_eq!(rig.open().read(4096, &mut byte), Err(Errno::IO));
    let report = rig.repair(REPAIR);
    assert_eq!((report.lost, report.removed), (1, 0), "{report:?}");
    // What they lie on: an older version came to light.
    let (rig, before) = written();
    for (store, before) in rig.stores.iter().zip(before) {
        store.names.lock().unwrap().retain(|name, _| name.contains(".p") || name.ends_with("info"));
        store.names.lock().unwrap().extend(before);
    }
    assert_eq!(rig.open().read(60 << 10, &mut byte), Err(Errno::IO));
    assert_eq!(rig.open().read(4096, &mut byte), Err(Errno::IO));
}

/// A write fails, and all of it may be there all the same: what is written next is not laid over what was before.
#[test]
fn what_failed_is_not_built_upon() {
    let rig = Rig::new("rs:4,2", 6);
    let image = rig.open();
    image.write(0, &vec![1; OBJECT as usize]).unwrap();
    for store in &rig.stores {
        store.denies.store(true, Ordering::SeqCst);
    }
    assert_eq!(image.write(0, &vec![2; OBJECT as usize]), Err(Errno::IO));
    assert_eq!(image.write(0, &[2; 512]), Err(Errno::IO));
    for store in &rig.stores {
        store.denies.store(false, Ordering::SeqCst);
    }
    image.write(512, &[3; 512]).unwrap();
    image.write(8192, &[4; 512]).unwrap();
    drop(image);
    let mut bytes = [0; 512];
    for (at, byte) in [(512, 3), (8192, 4)] {
        rig.open().read(at, &mut bytes).unwrap();
        assert_eq!(bytes, [byte; 512]);
    }
}

/// Writes fail again and again, and one store keeps what it is given of each. It is away when the next writer comes, whose writes count all the
/// same when it is back.
#[test]
fn what_failed_often_never_comes_before_what_was_answered() {
    // Whole objects and parts of them, over an object and over nothing.
    for (failed, written, first) in [
        (512, 512, true),
        (OBJECT, 512, true),
        (512, OBJECT, true),
        (OBJECT, OBJECT, true),
        (OBJECT, 512, false),
        (512, 512, false),
    ] {
        let rig = Rig::new("replicated:3", 3);
        let image = rig.open();
        if first {
            image.write(0, &vec![1; OBJECT as usize]).unwrap();
        }
        rig.stores[0].fail(true);
        rig.stores[1].fail(true);
        rig.stores[2].hoards.store(true, Ordering::SeqCst);
        for byte in 2..6 {
            assert_eq!(image.write(0, &vec![byte; failed as usize]), Err(Errno::IO));
        }
        drop(image);
        rig.settle();
        rig.stores[2].hoards.store(false, Ordering::SeqCst);
        for (i, store) in rig.stores.iter().enumerate() {
            store.fail(i == 2);
        }
        let image = rig.open();
        image.write(0, &vec![9; written as usize]).unwrap();
        image.write(u64::from(OBJECT) - 512, &[7; 512]).unwrap();
        image.flush().unwrap();
        drop(image);
        rig.settle();
        rig.stores[2].fail(false);
        for _ in 0..2 {
            let image = rig.open();
            let mut bytes = [0; 512];
            image.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [9; 512], "{failed} {written} {first}");
            image.read(u64::from(OBJECT) - 512, &mut bytes).unwrap();
            assert_eq!(bytes, [7; 512], "{failed} {written} {first}");
            drop(image);
            rig.repair(SCRUB);
            rig.settle();
        }
    }
}

/// A write over nothing fails, one store keeps what it was given of it, and zeroes are written there: they stay. (Seed 1653 of `corbel-sim block`.)
#[test]
fn what_failed_over_nothing_never_comes_back_over_zeroes() {
    let rig = Rig::new("replicated:3", 3);
    let image = rig.open();
    rig.stores[0].fail(true);
    rig.stores[1].fail(true);
    rig.stores[2].hoards.store(true, Ordering::SeqCst);
    assert_eq!(image.write(0, &[2; 512]), Err(Errno::IO));
    rig.stores.iter().for_each(|store| store.fail(false));
    image.zero(0, 1024, false).unwrap();
    drop(image);
    rig.settle();
    for _ in 0..2 {
        let mut bytes = [1; 512];
        rig.open().read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 512]);
        rig.repair(SCRUB);
        rig.settle();
    }
}

/// A write fails, and a repair by the same process comes before what there is of it is removed: that is not made whole, and what was there before
/// stays.
#[test]
fn a_repair_does_not_build_upon_what_failed() {
    // Four shards, and five are asked for; two copies of a patch, and three are.
    for (bytes, fail) in [(OBJECT as usize, 2), (512, 4)] {
        let rig = Rig::new("rs:4,2", 6);
        let image = rig.open();
        image.write(0, &vec![1; OBJECT as usize]).unwrap();
        rig.stores.iter().for_each(|store| store.dawdle(true));
        rig.stores[..fail].iter().for_each(|store| store.fail(true));
        assert_eq!(image.write(0, &vec![2; bytes]), Err(Errno::IO));
        rig.stores.iter().for_each(|store| store.fail(false));
        let report = repair::run(&image, REPAIR, |done, total, _| {
            if done == total {
                rig.stores.iter().for_each(|store| store.dawdle(false));
            }
            true
        });
        let report = report.unwrap();
        assert_eq!((report.lost, report.left), (0, 0), "{report:?}");
        let mut read = vec![0; OBJECT as usize];
        image.read(0, &mut read).unwrap();
        assert!(read.iter().all(|b| *b == 1), "{bytes}");
        drop(image);
        rig.settle();
        rig.open().read(0, &mut read).unwrap();
        assert!(read.iter().all(|b| *b == 1), "{bytes}");
        // And it is gone: a shard of each store, what the image is and who wrote it.
        rig.settle();
        assert!(rig.stores.iter().all(|store| store.count() == 3), "{bytes}");
    }
}

/// Likewise beside the writer, by somebody who does not know that it failed, and finds as much of it as of what was answered: one store has taken it and
/// was not heard.
#[test]
fn a_repair_beside_a_writer_leaves_what_it_goes_back_to() {
    let rig = Rig::new("rs:4,2", 6);
    let image = rig.open();
    image.write(0, &vec![1; OBJECT as usize]).unwrap();
    rig.stores.iter().for_each(|store| store.dawdle(true));
    rig.stores[2].fail(true);
    rig.stores[3].denies.store(true, Ordering::SeqCst);
    assert_eq!(image.write(0, &vec![2; OBJECT as usize]), Err(Errno::IO));
    rig.stores[2].fail(false);
    rig.stores[3].denies.store(false, Ordering::SeqCst);
    let beside = Image::open(rig.pool(), "vm", true).unwrap();
    let report = repair::run(&beside, REPAIR, |done, total, _| {
        if done == total {
            rig.stores.iter().for_each(|store| store.dawdle(false));
        }
        true
    });
    let report = report.unwrap();
    assert_eq!((report.removed, report.rebuilt), (0, 1), "{report:?}");
    drop(beside);
    let mut read = vec![0; OBJECT as usize];
    image.read(0, &mut read).unwrap();
    assert!(read.iter().all(|b| *b == 1));
    drop(image);
    rig.settle();
    rig.open().read(0, &mut read).unwrap();
    assert!(read.iter().all(|b| *b == 1));
}

/// What a writer has written is not given up for something older because the stores that have it are silent when it is looked for.
#[test]
fn what_is_not_found_now_is_not_forgotten() {
    let rig = Rig::new("rs:4,2", 6);
    let image = rig.open();
    image.write(0, &vec![1; OBJECT as usize]).unwrap();
    let old = rig.names();
    image.write(0, &vec![2; OBJECT as usize]).unwrap();
    rig.await_removal(&old);
    // What was removed is there again in four of them, and these have lost the new.
    for (store, old) in rig.stores.iter().zip(old).take(4) {
        let mut names = store.names.lock().unwrap();
        let new: Names = std::mem::replace(&mut *names, old);
        names.extend(new.into_iter().filter(|(name, _)| !name.contains('.')));
    }
    let orders = [REPAIR, SCRUB];
    for orders in orders {
        let _ = repair::run(&image, orders, |_, _, _| true);
        let mut read = vec![0; OBJECT as usize];
        if image.read(0, &mut read).is_ok() {
            assert!(read.iter().all(|b| *b == 2), "what was written is taken back");
        }
    }
    assert!(rig.stores[4..].iter().all(|store| store.count() == 3), "what was written is removed");
}

/// A store that names a writer beyond all that there can have been is not believed, and bars nobody; what most say is.
#[test]
fn a_store_that_names_the_last_of_all_writers_bars_nobody() {
    let rig = Rig::new("replicated:3", 3);
    let epochs = |store: &Faulty| -> Vec<String> {
        let names = store.names.lock().unwrap();
        names.keys().filter(|name| name.contains("epoch-")).cloned().collect()
    };
    drop(rig.open());
    rig.settle();
    // The last but one as well: the next writer would be the last.
    for wrong in ["vm/epoch-3fffff", "vm/epoch-3ffffe", "vm/epoch-200000"] {
        rig.stores[1].names.lock().unwrap().insert(wrong.into(), Vec::new());
        drop(rig.open());
        rig.settle();
        assert_eq!(epochs(&rig.stores[0]).len(), 1);
        assert_eq!(epochs(&rig.stores[1]), epochs(&rig.stores[0]), "after {wrong}");
    }
    assert_eq!(epochs(&rig.stores[0]), ["vm/epoch-000004"]);
    // One that does not answer may name it too, and then it would count.
    rig.stores[0].names.lock().unwrap().insert("vm/epoch-300000".into(), Vec::new());
    rig.stores[2].fail(true);
    let error = Image::open(rig.pool(), "vm", false).unwrap_err();
    assert!(error.contains("vm/epoch-300000") && error.contains("dir:/0"), "{error}");
    rig.settle();
    rig.stores[2].fail(false);
    drop(rig.open());
    rig.settle();
    assert_eq!(epochs(&rig.stores[2]), ["vm/epoch-000005"]);
    // What as many name as take it counts.
    for store in &rig.stores[..2] {
        store.names.lock().unwrap().insert("vm/epoch-300000".into(), Vec::new());
    }
    drop(rig.open());
    rig.settle();
    assert_eq!(epochs(&rig.stores[2]), ["vm/epoch-300001"]);
    // And when there is really no number left, it says which names say so.
    for store in &rig.stores {
        store.names.lock().unwrap().insert("vm/epoch-3fffff".into(), Vec::new());
    }
    let error = Image::open(rig.pool(), "vm", false).unwrap_err();
    assert!(error.contains("vm/epoch-3fffff") && error.contains("dir:/1"), "{error}");
}

/// One that hangs, be it in its lock, holds up nobody who opens the pool, and keeps no lock that it gives too late.
#[test]
fn a_pool_opens_beside_a_store_that_hangs() {
    let rig = Rig::new("replicated:3", 3);
    drop(rig.open());
    rig.settle();
    rig.stores[1].hang(true);
    let (pool, (to, from)) = (rig.pool(), std::sync::mpsc::channel());
    std::thread::spawn(move || {
        let image = Image::open(pool, "vm", false).unwrap();
        image.write(0, &[1; 512]).unwrap();
        to.send(image).unwrap();
    });
    // It never comes back before the image is open.
    let image = from.recv_timeout(std::time::Duration::from_secs(120)).unwrap();
    drop(image);
    rig.stores[1].hang(false);
    rig.settle();
    assert!(rig.stores.iter().all(|store| !store.locked.load(Ordering::SeqCst)));
    rig.open();
}

/// A repair that cannot make the newer version safe leaves the older one.
#[test]
fn what_is_old_goes_only_when_the_new_is_safe() {
    let rig = Rig::new("rs:4,2", 6);
    let image = rig.open();
    image.write(0, &vec![1; OBJECT as usize]).unwrap();
    let before = rig.names();
    image.write(0, &vec![2; OBJECT as usize]).unwrap();
    drop(image);
    rig.await_removal(&before);
    for (i, store) in rig.stores.iter().enumerate() {
        let mut names = store.names.lock().unwrap();
        if i >= 4 {
            names.clear();
        }
        names.extend(before[i].clone());
        store.full.store(i >= 4, Ordering::SeqCst);
    }
    drop(rig.open());
    // The removals, if any were asked for, are carried out.
    std::thread::sleep(std::time::Duration::from_millis(50));
    rig.stores[0].lose_all();
    let mut bytes = vec![0; OBJECT as usize];
    rig.open().read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|b| *b == 1));
}

/// A version that was answered is not taken back because the stores that know it are away.
#[test]
fn what_silent_stores_may_know_is_not_guessed() {
    let rig = Rig::new("replicated:3", 3);
    let image = rig.open();
    image.write(0, &[1; 512]).unwrap();
    rig.stores[2].fail(true);
    image.write(0, &[2; 512]).unwrap();
    drop(image);
    rig.stores[2].fail(false);
    rig.stores[0].fail(true);
    rig.stores[1].fail(true);
    assert!(Image::open(rig.pool(), "vm", true).is_err());
    rig.stores[1].fail(false);
    let mut byte = [0; 512];
    rig.open().read(0, &mut byte).unwrap();
    assert_eq!(byte, [2; 512]);

    // The same with a code: a few shards of the newer version are there, and too few to read it.
    let rig = Rig::new("rs:4,2", 6);
    let image = rig.open();
    image.write(0, &vec![1; OBJECT as usize]).unwrap();
    let old = rig.names();
    image.write(0, &vec![2; OBJECT as usize]).unwrap();
    drop(image);
    rig.await_removal(&old);
    rig.settle();
    // One had not taken its shard: the write was answered without it.
    rig.stores[0].lose_all();
    for (store, old) in rig.stores.iter().zip(old) {
        store.names.lock().unwrap().extend(old);
    }
    for store in &rig.stores[4..] {
        store.fail(true);
    }
    let image = rig.open();
    assert_eq!(image.write(0, &[3; 512]), Err(Errno::IO));
    silent_stores_come_back(&rig, &image);
}

/// They are asked again, now and then; of two one is enough.
fn silent_stores_come_back(rig: &Rig, image: &Image) {
    let mut bytes = vec![0; 512];
    assert_eq!(image.read(0, &mut bytes), Err(Errno::IO));
    rig.stores[4].fail(false);
    let known = (0..1000).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        image.read(0, &mut bytes).is_ok()
    });
    assert!(known, "nobody asks them again");
    assert_eq!(bytes, [2; 512]);
    image.write(0, &[3; 512]).unwrap();
    image.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 512]);
    image.read(512, &mut bytes).unwrap();
    assert_eq!(bytes, [2; 512]);
}

#[test]
fn one_writer_at_a_time() {
    let rig = Rig::new("replicated:3", 3);
    let image = rig.open();
    assert!(Image::open(rig.pool(), "vm", false).is_err());
    let reader = Image::open(rig.pool(), "vm", true).unwrap();
    assert_eq!(reader.write(0, &[1; 512]), Err(Errno::ROFS));
    drop(image);
    rig.open();
    assert!(rig.pool().create("vm", SIZE, OBJECT).is_err());
    assert!(rig.pool().create("../x", SIZE, OBJECT).is_err());
}

/// A store more, and one out: shards move, nothing else does, and reads go on meanwhile in who has it open.
#[test]
fn stores_come_and_go() {
    let mut rig = Rig::new("rs:4,2", 7);
    let mut random = Random::new(23);
    let mut model = vec![0; SIZE as usize];
    work(&rig.open(), &mut model, &mut random, 60);
    let reader = Image::open(rig.pool(), "vm", true).unwrap();
    rig.spec.stores[2].out = true;
    rig.spec.stores.push(StoreSpec { domain: "new".into(), at: "dir:/new".into(), out: false });
    rig.stores.push(Arc::default());
    let report = rig.repair(REPAIR);
    assert!(report.misplaced > 0 && report.lost == 0);
    check(&reader, &model);
    check(&rig.open(), &model);
    rig.repair(REPAIR);
    drop(reader);
    let left = (0..100).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        (rig.stores[2].count() <= 1).then_some(())
    });
    assert!(left.is_some(), "{} names left", rig.stores[2].count());
    assert!(rig.stores[7].count() > 1);
    assert_eq!(rig.repair(REPAIR).misplaced, 0);
}

/// In directories, over NBD's device, with a process that ends in between.
#[test]
fn directories_keep_an_image() {
    let scratch = Scratch::new("pool-dirs");
    let mut stores = Vec::new();
    for i in 0..4 {
        let path = scratch.path(&format!("s{i}"));
        std::fs::create_dir(&path).unwrap();
        stores.push(StoreSpec {
            domain: "here".into(),
            at: format!("dir:{}", path.display()),
            out: false,
        });
    }
    let spec = Spec::new("rs:2,1".parse().unwrap(), stores).unwrap();
    let file = scratch.path("pool.json");
    std::fs::write(&file, spec.text()).unwrap();
    let spec = Spec::read(&file).unwrap();
    let pool = || Arc::new(Pool::open(spec.clone()).unwrap());
    pool().create("a", SIZE, OBJECT).unwrap();
    let image = Image::open(pool(), "a", false).unwrap();
    let mut random = Random::new(29);
    let mut model = vec![0; SIZE as usize];
    work(&image, &mut model, &mut random, 50);
    assert!(Image::open(pool(), "a", false).is_err());
    drop(image);
    std::fs::remove_dir_all(scratch.path("s1")).unwrap();
    check(&Image::open(pool(), "a", false).unwrap(), &model);
    std::fs::create_dir(scratch.path("s1")).unwrap();
    let image = Image::open(pool(), "a", false).unwrap();
    let report = repair::run(&image, SCRUB, |_, _, _| true).unwrap();
    assert_eq!((report.lost, report.damaged), (0, 0));
    drop(image);
    std::fs::remove_dir_all(scratch.path("s0")).unwrap();
    check(&Image::open(pool(), "a", false).unwrap(), &model);
    // A name that no store would give: nothing outside of it is touched.
    assert!(Dir::open(&scratch.path("nowhere")).is_err());
}

/// Each broken variant is missed by one of the tests above.
#[cfg(feature = "planted")]
#[test]
#[ignore = "alone: the variant is one for the whole process"]
fn broken_variants_are_found() {
    use base::planted::{Bug, missed};
    let tests: [(Bug, fn()); 16] = [
        (Bug::OldVersionBelieved, what_silent_stores_may_know_is_not_guessed),
        (Bug::ShardUnverified, wrong_bytes_are_not_believed_and_are_made_good),
        (Bug::WriteWithoutQuorum, stores_fail_under_a_running_image),
        (Bug::CleanedTooEarly, what_is_old_goes_only_when_the_new_is_safe),
        (Bug::PatchWithoutQuorum, stores_fail_under_a_running_image),
        (Bug::PatchOrder, a_small_write_costs_little),
        (Bug::PatchOfAnother, a_patch_that_is_lost_is_missed),
        (Bug::PatchNotMissed, a_patch_that_is_lost_is_missed),
        (Bug::FailedForgotten, what_failed_is_not_built_upon),
        (Bug::EpochNotCounted, what_failed_often_never_comes_before_what_was_answered),
        (Bug::TaskOfAnother, what_one_request_writes_of_several_objects_is_theirs),
        (Bug::LaidOverUnseen, what_failed_often_never_comes_before_what_was_answered),
        (Bug::UnknownForGood, what_silent_stores_may_know_is_not_guessed),
        (Bug::UndoneRepaired, a_repair_does_not_build_upon_what_failed),
        (Bug::SweptBeside, a_repair_beside_a_writer_leaves_what_it_goes_back_to),
        (Bug::ZeroesUnwritten, what_failed_over_nothing_never_comes_back_over_zeroes),
    ];
    assert_eq!(missed(&tests), []);
}
