//! The session's table of files with code: what each has of its own system calls (objects.rs). This process fills it
//! in; the processes of the session read it.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use corbel_input::{format, objects, sites};

/// Bytes of a [`format::Object`] up to its key.
const STATE: usize = 16;

/// The table, in the session's memory.
pub struct Directory {
    memory: File,
    /// libc and the loader. A program may map them once more (`dlmopen`), and all their calls are known.
    libraries: Vec<(PathBuf, sites::Sites)>,
    /// What is entered.
    entered: Mutex<Entered>,
}

#[derive(Default)]
struct Entered {
    keys: Vec<Option<[u64; 4]>>,
    calls: usize,
}

/// How the file is known: device, inode number, size, change time.
fn key(file: &File) -> Option<[u64; 4]> {
    let meta = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let seconds = meta.ctime().cast_unsigned().wrapping_mul(1_000_000_000);
    let changed = seconds.wrapping_add(meta.ctime_nsec().cast_unsigned());
    Some([meta.dev(), meta.ino(), meta.size(), changed])
}

impl Directory {
    /// An empty one.
    pub fn new(memory: File, libraries: Vec<(PathBuf, sites::Sites)>) -> Self {
        Self { memory, libraries, entered: Mutex::default() }
    }

    fn find_out(&self, file: &File, of: &[u64; 4]) -> objects::Object {
        let is = |path: &PathBuf| File::open(path).ok().and_then(|f| key(&f)).as_ref() == Some(of);
        let known = self.libraries.iter().find(|(path, _)| is(path));
        let object = match known {
            Some((path, sites)) => objects::of_sites(path, &sites.sites),
            None => objects::of(file),
        };
        // Something that is no ELF file has no calls.
        object.unwrap_or_default()
    }

    /// Looks at a file and enters it. What cannot be entered stays unknown, and whoever asked makes do.
    pub fn look_at(&self, file: &File) -> Option<()> {
        let key = key(file)?;
        if self.place(&key).is_none_or(|(_, known)| known) {
            return None;
        }
        let object = self.find_out(file, &key);
        let mut entered = self.entered.lock().unwrap_or_else(PoisonError::into_inner);
        entered.keys.resize(format::OBJECTS, None);
        let (place, false) = find(&entered.keys, &key)? else { return None };
        let first = entered.calls;
        let after = first.checked_add(object.calls.len()).filter(|n| *n <= format::CALLS)?;
        let bytes: Vec<u8> = object.calls.iter().flat_map(objects::call_bytes).collect();
        let at = format::CALLS_AT + first * size_of::<format::Call>();
        self.memory.write_all_at(&bytes, at as u64).ok()?;
        let at = (format::OBJECTS_AT + place * size_of::<format::Object>()) as u64;
        let key_bytes: Vec<u8> = key.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.memory.write_all_at(&key_bytes, at + STATE as u64).ok()?;
        let numbers = [object.calls.len(), first, usize::from(object.unseen)];
        let numbers: Vec<u8> =
            numbers.iter().flat_map(|n| u32::try_from(*n).unwrap_or(0).to_le_bytes()).collect();
        self.memory.write_all_at(&numbers, at + 4).ok()?;
        // Last: from here on it is seen.
        self.memory.write_all_at(&1u32.to_le_bytes(), at).ok()?;
        entered.keys[place] = Some(key);
        entered.calls = after;
        Some(())
    }

    fn place(&self, key: &[u64; 4]) -> Option<(usize, bool)> {
        let mut entered = self.entered.lock().unwrap_or_else(PoisonError::into_inner);
        entered.keys.resize(format::OBJECTS, None);
        find(&entered.keys, key)
    }
}

/// Where a key stands, or would; none if there is no room for it.
fn find(keys: &[Option<[u64; 4]>], key: &[u64; 4]) -> Option<(usize, bool)> {
    let first = format::object_place(key);
    let places = (first..first + format::OBJECT_PLACES).map(|place| place % format::OBJECTS);
    places.into_iter().find_map(|place| match &keys[place] {
        None => Some((place, false)),
        Some(known) => (known == key).then_some((place, true)),
    })
}
