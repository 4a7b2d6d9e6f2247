//! Locks that end before they are let go: what the image that had them does.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use base::Errno;
use block::device::Disk;
use block::pool::ground::{Hold, Lock};
use block::pool::store::Store;
use block::pool::{Image, Pool, Spec, StoreSpec};

/// A store in memory, whose locks are held in the term that the test says.
#[derive(Default)]
struct Kept {
    names: Mutex<BTreeMap<String, Vec<u8>>>,
    term: Arc<Mutex<Option<u64>>>,
}

struct Held(Arc<Mutex<Option<u64>>>);

impl Hold for Held {
    fn term(&self) -> Option<u64> {
        *self.0.lock().unwrap()
    }
}

impl Store for Kept {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<(), Errno> {
        self.names.lock().unwrap().insert(name.to_owned(), parts.concat());
        Ok(())
    }

    fn get(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let names = self.names.lock().unwrap();
        let bytes = names.get(name).ok_or(Errno::NOENT)?;
        Ok(bytes.iter().skip(offset as usize).take(len).copied().collect())
    }

    fn list(&self, image: &str) -> Result<Vec<String>, Errno> {
        let prefix = format!("{image}/");
        let names = self.names.lock().unwrap();
        Ok(names.keys().filter_map(|name| name.strip_prefix(&prefix)).map(str::to_owned).collect())
    }

    fn remove(&self, name: &str) -> Result<(), Errno> {
        self.names.lock().unwrap().remove(name);
        Ok(())
    }

    fn lock(&self, _: &str) -> Result<Lock, Errno> {
        Ok(Box::new(Held(Arc::clone(&self.term))))
    }
}

#[test]
fn who_may_not_be_alone_answers_for_nothing() {
    let stores: Vec<Arc<Kept>> = (0..3).map(|_| Arc::default()).collect();
    let set = |store: usize, term| *stores[store].term.lock().unwrap() = term;
    (0..3).for_each(|store| set(store, Some(0)));
    let spec =
        (0..3).map(|i| StoreSpec { domain: format!("d{i}"), at: format!("dir:/{i}"), out: false });
    let spec = Spec::new("replicated:3".parse().unwrap(), spec.collect()).unwrap();
    let all = stores.iter().map(|store| Arc::clone(store) as Arc<dyn Store>).collect();
    let pool = Arc::new(Pool::over(spec, all).unwrap());
    pool.create("vm", 1 << 20, 64 << 10).unwrap();
    let image = Image::open(pool, "vm", false).unwrap();
    // A patch, and a whole object.
    let write = || {
        let patch = image.write(0, &[1; 512]);
        patch.and(image.write(64 << 10, &[1; 64 << 10]))
    };
    assert_eq!(write(), Ok(()));
    // One of three does not matter,
    set(0, None);
    assert_eq!(write(), Ok(()));
    // and counts again when it is held again, whoever had it in between: the others had the image in hand.
    set(0, Some(1));
    assert_eq!(write(), Ok(()));
    set(1, None);
    assert_eq!(write(), Ok(()));
    // Two ended: late renewals show that nobody had them.
    set(2, None);
    assert_eq!(write(), Err(Errno::IO));
    set(2, Some(0));
    assert_eq!(write(), Ok(()));
    // Two ended, and somebody else may have had them: it is over, though all are held again. What there was is not touched.
    (1..3).for_each(|store| set(store, None));
    assert_eq!(write(), Err(Errno::IO));
    let names = |store: usize| stores[store].list("vm").unwrap();
    let before: Vec<_> = (0..3).map(names).collect();
    (1..3).for_each(|store| set(store, Some(1)));
    assert_eq!(write(), Err(Errno::IO));
    for (store, before) in before.iter().enumerate() {
        let now = names(store);
        assert!(before.iter().all(|name| now.contains(name)), "{before:?} {now:?}");
    }
}
