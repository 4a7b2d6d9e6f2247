//! What is to be removed from stores: nobody waits for it, it does not pile up, and a repair says how much of it was done.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use base::Errno;
use block::device::Disk;
use block::pool::ground::{Access, Lock};
use block::pool::repair::{self, Orders};
use block::pool::shard::{self, Version};
use block::pool::store::Store;
use block::pool::worker::{Ask, Piece, Worker};
use block::pool::{Image, Pool, Spec, StoreSpec};

/// Far longer than anything here takes: who waits for so long has found a bug.
const LONG: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Seen {
    names: BTreeMap<String, Vec<u8>>,
    /// Names of what was removed.
    removed: Vec<String>,
    /// Removals fail from now on.
    keeps: bool,
    /// Removals wait.
    idles: bool,
    /// Puts that begin from now on are answered only when so many names were removed.
    until_removed: usize,
    /// Puts that have begun, and were answered before that was so.
    begun: usize,
    impatient: usize,
}

/// A store that counts.
#[derive(Default)]
struct Counting {
    seen: Mutex<Seen>,
    changed: Condvar,
}

impl Counting {
    fn change(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen.lock().unwrap());
        self.changed.notify_all();
    }

    fn count(&self) -> usize {
        self.seen.lock().unwrap().names.len()
    }
}

impl Store for Counting {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<(), Errno> {
        let mut seen = self.seen.lock().unwrap();
        seen.begun += 1;
        self.changed.notify_all();
        let until = seen.until_removed;
        let waits = |seen: &mut Seen| seen.removed.len() < until;
        let (mut seen, waited) = self.changed.wait_timeout_while(seen, LONG, waits).unwrap();
        seen.impatient += usize::from(waited.timed_out());
        seen.names.insert(name.to_owned(), parts.concat());
        Ok(())
    }

    fn get(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let seen = self.seen.lock().unwrap();
        let bytes = seen.names.get(name).ok_or(Errno::NOENT)?;
        let from = (offset as usize).min(bytes.len());
        Ok(bytes[from..bytes.len().min(from + len)].to_vec())
    }

    fn list(&self, image: &str) -> Result<Vec<String>, Errno> {
        let of = |name: &String| Some(name.strip_prefix(image)?.strip_prefix('/')?.to_owned());
        Ok(self.seen.lock().unwrap().names.keys().filter_map(of).collect())
    }

    fn remove(&self, name: &str) -> Result<(), Errno> {
        let seen = self.seen.lock().unwrap();
        let (mut seen, _) = self.changed.wait_timeout_while(seen, LONG, |seen| seen.idles).unwrap();
        if seen.keeps {
            return Err(Errno::IO);
        }
        seen.names.remove(name);
        seen.removed.push(name.to_owned());
        drop(seen);
        self.changed.notify_all();
        Ok(())
    }

    fn lock(&self, _: &str) -> Result<Lock, Errno> {
        Ok(Box::new(()))
    }
}

/// A store that is never without something to do: what is to be removed comes before it once there is much of it, and does not take
/// all threads.
#[test]
fn what_is_to_be_removed_does_not_pile_up_behind_puts() {
    let store = Arc::new(Counting::default());
    let worker = Worker::start("one", Arc::clone(&store) as Arc<dyn Store>).unwrap();
    let (to, from) = channel();
    let put = |number: usize| {
        let ask = Ask::Put(format!("vm/new{number}"), Piece::default(), Piece::default());
        worker.ask(ask, number, &to);
    };
    // All threads are at something.
    store.change(|seen| seen.until_removed = 1);
    (0..4).for_each(put);
    let seen = store.seen.lock().unwrap();
    let (seen, waited) =
        store.changed.wait_timeout_while(seen, LONG, |seen| seen.begun < 4).unwrap();
    assert!(!waited.timed_out());
    drop(seen);
    for old in (0..300).collect::<Vec<usize>>().chunks(50) {
        let names = old.iter().map(|number| format!("vm/old{number}")).collect();
        worker.ask(Ask::Remove(names), usize::MAX, &to);
    }
    // And more is asked than they can be at, none of which is answered before a part was removed.
    (4..12).for_each(put);
    store.change(|seen| {
        seen.removed.push("the four go on".into());
        seen.until_removed = 1 + 44;
    });
    let done = (0..12 + 6).map(|_| from.recv_timeout(2 * LONG).unwrap().1).filter(Result::is_ok);
    assert_eq!(done.count(), 12 + 6);
    assert_eq!(store.seen.lock().unwrap().impatient, 0, "puts waited for removals that never came");
}

struct Rig {
    spec: Spec,
    stores: Vec<Arc<Counting>>,
}

const OBJECT: u32 = 64 << 10;
const SIZE: u64 = 1 << 20;

impl Rig {
    fn new() -> Self {
        let store = |i| StoreSpec { domain: format!("d{i}"), at: format!("dir:/{i}"), out: false };
        let spec = Spec::new("replicated:3".parse().unwrap(), (0..3).map(store).collect()).unwrap();
        let rig = Self { spec, stores: (0..3).map(|_| Arc::default()).collect() };
        rig.pool().create("vm", SIZE, OBJECT).unwrap();
        rig
    }

    fn pool(&self) -> Arc<Pool> {
        let stores = self.stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>);
        Arc::new(Pool::over(self.spec.clone(), stores.collect()).unwrap())
    }

    /// The same without one store.
    fn beside_a_silent_one(&self) -> Arc<Pool> {
        let mut stores: Vec<_> =
            self.stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect();
        stores[2] = Arc::new(Silent);
        Arc::new(Pool::over(self.spec.clone(), stores).unwrap())
    }
}

struct Silent;

impl Store for Silent {
    fn put(&self, _: &str, _: &[&[u8]]) -> Result<(), Errno> {
        Err(Errno::IO)
    }

    fn get(&self, _: &str, _: u64, _: usize) -> Result<Vec<u8>, Errno> {
        Err(Errno::IO)
    }

    fn list(&self, _: &str) -> Result<Vec<String>, Errno> {
        Err(Errno::IO)
    }

    fn remove(&self, _: &str) -> Result<(), Errno> {
        Err(Errno::IO)
    }

    fn lock(&self, _: &str) -> Result<Lock, Errno> {
        Err(Errno::IO)
    }
}

/// `mkfs` and `fstrim` give all of a disk back: that costs nothing where nothing was ever written, whichever stores are away.
#[test]
fn giving_back_what_was_never_written_writes_nothing() {
    let rig = Rig::new();
    let image = Image::open(rig.beside_a_silent_one(), "vm", false).unwrap();
    let before = rig.stores[0].count();
    image.trim(0, SIZE).unwrap();
    assert_eq!(rig.stores[0].count(), before);
    // What is there goes all the same.
    image.write(0, &vec![1; OBJECT as usize]).unwrap();
    image.trim(0, SIZE).unwrap();
    let mut bytes = vec![1; OBJECT as usize];
    image.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    // And that it shall read as zeroes is written, since nobody knows what the one that is away has.
    image.zero(u64::from(OBJECT), u64::from(OBJECT), false).unwrap();
    assert!(rig.stores[0].count() > before + 1);
}

/// What a repair says that it has removed is gone when it says so, since its process may end then; what is not, it says too.
#[test]
fn a_repair_says_what_it_has_removed() {
    let rig = Rig::new();
    let image = Image::open(rig.pool(), "vm", false).unwrap();
    image.write(0, &vec![1; OBJECT as usize]).unwrap();
    let whole: Vec<usize> = rig.stores.iter().map(|store| store.count()).collect();
    // Versions of before, which should have been removed.
    let litter = |count: u64| {
        for store in &rig.stores {
            store.change(|seen| {
                let mut shards = seen.names.keys().filter_map(|name| shard::parse(&name[3..]));
                let (object, _, number, _) = shards.next_back().unwrap();
                for old in 1..=count {
                    let version = Version { number: old, drawn: 7 };
                    let name = shard::name(object, version, number, false);
                    seen.names.insert(format!("vm/{name}"), vec![0; 100]);
                }
            });
        }
    };
    litter(50);
    rig.stores.iter().for_each(|store| store.change(|seen| seen.idles = true));
    let orders = Orders { repair: true, ..Orders::default() };
    // They get on with it only when somebody waits for that.
    let mut waits = 0;
    let report = repair::run(&image, orders, |_, _, _| {
        waits += 1;
        if waits == 5 {
            rig.stores.iter().for_each(|store| store.change(|seen| seen.idles = false));
        }
        true
    });
    let report = report.unwrap();
    assert_eq!((report.removed, report.left), (3 * 50, 0), "{report:?}");
    let left: Vec<usize> = rig.stores.iter().map(|store| store.count()).collect();
    assert_eq!(left, whole);
    // One that fails in it.
    litter(20);
    rig.stores[1].change(|seen| seen.keeps = true);
    let report = repair::run(&image, orders, |_, _, _| true).unwrap();
    assert_eq!((report.removed, report.left), (2 * 20, 20), "{report:?}");
    // And when it does no more, the next repair is none the worse for it.
    rig.stores[1].change(|seen| seen.keeps = false);
    let report = repair::run(&image, orders, |_, _, _| true).unwrap();
    assert_eq!((report.removed, report.left), (20, 0), "{report:?}");
}
