//! What programs do, as the kernel carries it out, and what other nodes do.

use std::sync::Arc;

use zerocopy::{FromBytes, IntoBytes};

use super::fiber::{Fiber, Pause, pause};
use super::{
    CELL, CELLS, DIR, Dentry, FILES, File, Inode, NAMES, PAGE_CELLS, PAGES, Since, State, Truth,
    World,
};
use crate::fuse::wire::{
    AttrOut, CreateIn, Dirent, EntryOut, FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, ForgetIn, FuseAttr,
    GETATTR_FH, GetattrIn, OpenIn, OpenOut, ReadIn, ReleaseIn, SetattrIn, WriteIn, fattr, op,
};
use client::fs::O_APPEND;

const ENOENT: i32 = -2;
const PAGE_BYTES: usize = PAGE_CELLS * CELL;
/// Handles that stay open, one for each of [`FILES`]: the server counts from 1.
const HANDLES: [u64; 2] = [1, 2];
/// The same, opened for appending.
const APPENDS: [u64; 2] = [3, 4];

/// What an answer says of an inode.
#[derive(Clone, Copy, Debug)]
struct Seen {
    size: usize,
    mode: u32,
    mtime: i64,
    /// It may be kept.
    keep: bool,
}

impl Seen {
    fn of(attr: &FuseAttr, valid: u64) -> Self {
        let (size, mode) = (attr.size.get() as usize / CELL, attr.mode.get() & 0o7777);
        Self { size, mode, mtime: attr.mtime.get(), keep: valid > 0 }
    }
}

fn reply<T: FromBytes>(body: &[u8]) -> Result<(T, &[u8]), String> {
    T::read_from_prefix(body).map_err(|_| format!("a reply of {} bytes", body.len()))
}

/// What the histories draw from that are about one thing: the data of files, or names and what they lead to.
const DATA: [u64; 10] = [0, 1, 4, 7, 8, 9, 10, 14, 15, 16];
const ABOUT: [u64; 10] = [5, 6, 5, 6, 11, 12, 13, 17, 17, 18];

/// The next call of a thread. `alone`: nobody else is at work, so that what a kernel knows of a file's end is right.
pub fn draw(world: &Arc<World>, number: u64, alone: bool) -> Result<Fiber, String> {
    let (which, file, at, more) = {
        let mut state = world.shared.lock();
        let theme = state.theme;
        let random = &mut state.random;
        let which = match theme {
            0 => random.below(20),
            1 => DATA[random.below(DATA.len() as u64) as usize],
            _ => ABOUT[random.below(ABOUT.len() as u64) as usize],
        };
        (which, usize::from(random.chance(1, 4)), random.below(6) as usize, random.below(12))
    };
    let world = world.clone();
    let wide = 1 + (more % 2) as usize;
    let back = more > 3;
    Fiber::new(move || {
        let what = match which {
            0..=3 => format!("read {}", FILES[file]),
            4 => format!("seek {}", FILES[file]),
            5 | 6 => format!("stat {file}"),
            7 => format!("open {file}"),
            9 if more % 3 == 0 => format!("append {}", FILES[file]),
            8 | 9 => format!("write {} {at} {wide}", FILES[file]),
            10 => format!("chmod {}", FILES[file]),
            11 => format!("create {file}"),
            12 => format!("unlink {file}"),
            13 => "list".into(),
            14 if alone => format!("elsewhere cut {} {at}", FILES[file]),
            14..=16 => format!("elsewhere write {} {at} {wide}, back {back}", FILES[file]),
            17 => format!("elsewhere chmod {file}"),
            _ => format!("elsewhere name {file}"),
        };
        world.note(format!("{number} {what}"));
        let since = world.shared.lock().returned.clone();
        let done = match which {
            0..=3 => world.read(&since, file),
            4 => world.seek(&since, file),
            5 | 6 => world.stat(&since, file),
            7 => world.open(&since, file),
            9 if more % 3 == 0 => world.append(file),
            8 | 9 => world.write(file, at, wide),
            10 => world.chmod(file, back),
            11 => world.create(&since, file),
            12 => world.unlink(file),
            13 => world.list(),
            14 if alone => world.cut(file, at + 1),
            14..=16 => world.write_elsewhere(file, at, wide, back),
            17 => world.chmod_elsewhere(file, back),
            _ => world.name_elsewhere(file, more),
        };
        world.note(format!("{number} {what}: done"));
        if let Err(text) = done {
            world.shared.lock().object(format!("{number} {what}: {text}"));
        }
    })
}

impl World {
    fn note(&self, text: String) {
        self.shared.lock().trace.push(text);
    }

    /// The kernel gets to know the directory and both files, which stay open.
    pub(super) fn mount(&self) {
        let mount = || -> Result<(), String> {
            let version = self.shared.lock().kernel.versions;
            let (_, body) = self.call(op::LOOKUP, 1, &[b"d\0"]);
            self.told(&reply::<EntryOut>(&body)?.0, version);
            for at in 0..2 {
                self.walk(at)?;
                let asked = OpenIn { flags: 2.into(), ..OpenIn::default() };
                let (_, body) = self.call(op::OPEN, FILES[at], &[asked.as_bytes()]);
                let (out, _) = reply::<OpenOut>(&body)?;
                assert_eq!(out.fh.get(), HANDLES[at]);
            }
            for at in 0..2 {
                let asked = OpenIn { flags: (2 | O_APPEND).into(), ..OpenIn::default() };
                let (_, body) = self.call(op::OPEN, FILES[at], &[asked.as_bytes()]);
                let (out, _) = reply::<OpenOut>(&body)?;
                assert_eq!(out.fh.get(), APPENDS[at]);
                assert_ne!(out.open_flags.get() & FOPEN_DIRECT_IO, 0);
            }
            Ok(())
        };
        if let Err(text) = mount() {
            self.shared.lock().object(text);
        }
    }

    /// Inodes that nothing leads to are forgotten.
    pub(super) fn forget(&self) {
        let gone: Vec<(u64, u64)> = {
            let mut state = self.shared.lock();
            let ms = state.ms;
            for name in &mut state.kernel.names {
                *name = name.filter(|name| name.until > ms);
            }
            let names = state.kernel.names;
            let named = |ino: u64| names.iter().flatten().any(|name| name.to == Some(ino));
            let stays = |ino: u64| ino == DIR || FILES.contains(&ino) || named(ino);
            let inodes = &mut state.kernel.inodes;
            let gone: Vec<u64> = inodes.keys().copied().filter(|ino| !stays(*ino)).collect();
            gone.iter()
                .filter_map(|ino| inodes.remove(ino).map(|inode| (*ino, inode.lookups)))
                .collect()
        };
        for (ino, lookups) in gone {
            let arg = ForgetIn { nlookup: lookups.into() };
            self.call(op::FORGET, ino, &[arg.as_bytes()]);
        }
    }

    /// An answer is taken in (`fuse_change_attributes`); version 0: without a look at what came meanwhile.
    fn take_in(&self, ino: u64, seen: Seen, version: u64) {
        let (size, other) = {
            let mut state = self.shared.lock();
            let inode = state.kernel.inode(ino);
            if version != 0 && inode.version > version || inode.unstable {
                state.trace.push(format!("{ino}: {seen:?} is thrown away"));
                return;
            }
            let (size, other) =
                (inode.size != seen.size, inode.size != seen.size || inode.mtime != seen.mtime);
            (inode.size, inode.mtime, inode.mode) = (seen.size, seen.mtime, seen.mode);
            inode.valid = seen.keep;
            state.kernel.bump(ino);
            state.trace.push(format!("{ino}: {seen:?}"));
            (size, other)
        };
        if size {
            self.cut_pages(ino, seen.size);
        }
        if other {
            pause(Pause::Point);
            self.shared.drop_pages(ino);
        }
    }

    /// truncate_pagecache.
    fn cut_pages(&self, ino: u64, size: usize) {
        for page in 0..PAGES {
            self.shared.wait(|state| {
                let inode = state.kernel.inode(ino);
                if page * PAGE_CELLS >= size {
                    if inode.locked[page] {
                        return None;
                    }
                    inode.pages[page] = None;
                } else if let Some(cells) = &mut inode.pages[page] {
                    cells[(size - page * PAGE_CELLS).min(PAGE_CELLS)..].fill(0);
                }
                Some(())
            });
        }
    }

    /// Told of an inode (`fuse_iget`).
    fn told(&self, entry: &EntryOut, version: u64) {
        let ino = entry.nodeid.get();
        let seen = Seen::of(&entry.attr, entry.attr_valid.get());
        {
            let mut state = self.shared.lock();
            let is_new = !state.kernel.inodes.contains_key(&ino);
            let inode = state.kernel.inode(ino);
            if is_new {
                (inode.size, inode.mtime, inode.mode) = (seen.size, seen.mtime, seen.mode);
            }
            inode.lookups += 1;
        }
        self.take_in(ino, seen, version);
    }

    /// Attributes, asked for if they are not kept.
    fn attributes(&self, ino: u64, handle: u64) -> Result<Seen, String> {
        let version = {
            let mut state = self.shared.lock();
            let Inode { valid, size, mode, mtime, .. } = *state.kernel.inode(ino);
            if valid {
                return Ok(Seen { size, mode, mtime, keep: true });
            }
            state.kernel.versions
        };
        let flags = if handle == 0 { 0 } else { GETATTR_FH };
        let arg =
            GetattrIn { getattr_flags: flags.into(), fh: handle.into(), ..GetattrIn::default() };
        let (error, body) = self.call(op::GETATTR, ino, &[arg.as_bytes()]);
        if error != 0 {
            return Err(format!("getattr: {error}"));
        }
        let (out, _) = reply::<AttrOut>(&body)?;
        let seen = Seen::of(&out.attr, out.attr_valid.get());
        self.take_in(ino, seen, version);
        Ok(seen)
    }

    /// What a name leads to.
    fn walk(&self, at: usize) -> Result<Option<u64>, String> {
        // The directory may be searched; its attributes must be known for that.
        if self.shared.checks {
            self.attributes(DIR, 0)?;
        }
        pause(Pause::Point);
        let known = self.shared.wait(|state| {
            let ms = state.ms;
            let known = state.kernel.names[at].filter(|name| name.until > ms);
            if known.is_none() {
                if state.kernel.looking[at] {
                    return None;
                }
                state.kernel.looking[at] = true;
            }
            Some(known)
        });
        if let Some(known) = known {
            return Ok(known.to);
        }
        let version = self.shared.lock().kernel.versions;
        let (error, body) = self.call(op::LOOKUP, DIR, &[NAMES[at], b"\0"]);
        let found = match error {
            0 => {
                let (entry, _) = reply::<EntryOut>(&body)?;
                self.name(at, &entry, version)
            }
            ENOENT => {
                self.shared.lock().kernel.names[at] = None;
                None
            }
            error => return Err(format!("lookup: {error}")),
        };
        self.shared.lock().kernel.looking[at] = false;
        Ok(found)
    }

    /// A name and what it leads to are taken in.
    fn name(&self, at: usize, entry: &EntryOut, version: u64) -> Option<u64> {
        let to = Some(entry.nodeid.get()).filter(|ino| *ino != 0);
        if to.is_some() {
            self.told(entry, version);
        }
        let mut state = self.shared.lock();
        let valid =
            entry.entry_valid.get() * 1000 + u64::from(entry.entry_valid_nsec.get() / 1_000_000);
        let until = state.ms + valid;
        state.kernel.names[at] = Some(Dentry { to, until });
        to
    }

    /// Whether that was so at some moment.
    fn led_to(&self, since: &Since, at: usize, found: Option<u64>) -> bool {
        let state = self.shared.lock();
        state.states[since.of(DIR)..].iter().any(|truth| truth.names[at] == found)
    }

    fn file_was(&self, since: &Since, ino: u64, what: impl Fn(&File) -> bool) -> bool {
        let state = self.shared.lock();
        state.states[since.of(ino)..].iter().any(|truth| truth.files.get(&ino).is_some_and(&what))
    }

    fn read(&self, since: &Since, file: usize) -> Result<(), String> {
        self.attributes(FILES[file], HANDLES[file])?;
        pause(Pause::Point);
        self.read_pages(since, FILES[file], HANDLES[file], false)
    }

    /// `mapped`: pages as they are, without a look at the size.
    fn read_pages(&self, since: &Since, ino: u64, handle: u64, mapped: bool) -> Result<(), String> {
        for page in 0..PAGES {
            enum Next {
                End(usize),
                Found([u32; PAGE_CELLS], usize),
                Fill(u64),
            }
            loop {
                let next = self.shared.wait(|state| {
                    let versions = state.kernel.versions;
                    let inode = state.kernel.inode(ino);
                    let size = if mapped { CELLS } else { inode.size };
                    if page * PAGE_CELLS >= size {
                        return Some(Next::End(size));
                    }
                    if inode.locked[page] {
                        return None;
                    }
                    if let Some(cells) = inode.pages[page] {
                        return Some(Next::Found(cells, size));
                    }
                    inode.locked[page] = true;
                    Some(Next::Fill(versions))
                });
                match next {
                    Next::End(size) => {
                        self.judge(since, ino, page, [0; PAGE_CELLS], size, mapped)?;
                        return Ok(());
                    }
                    Next::Found(cells, size) => {
                        self.judge(since, ino, page, cells, size, mapped)?;
                        break;
                    }
                    Next::Fill(version) => self.fill(ino, handle, page, version)?,
                }
                pause(Pause::Point);
            }
        }
        Ok(())
    }

    /// A page is read in.
    fn fill(&self, ino: u64, handle: u64, page: usize, version: u64) -> Result<(), String> {
        let arg = ReadIn {
            fh: handle.into(),
            offset: ((page * PAGE_BYTES) as u64).into(),
            size: (PAGE_BYTES as u32).into(),
            ..ReadIn::default()
        };
        let (error, body) = self.call(op::READ, ino, &[arg.as_bytes()]);
        if error != 0 {
            return Err(format!("read: {error}"));
        }
        let mut cells = [0; PAGE_CELLS];
        for (cell, bytes) in cells.iter_mut().zip(body.chunks(CELL)) {
            *cell = bytes.try_into().map(u32::from_le_bytes).unwrap_or(0);
        }
        let mut state = self.shared.lock();
        let end = page * PAGE_CELLS + body.len() / CELL;
        let inode = state.kernel.inode(ino);
        let cut = body.len() < PAGE_BYTES
            && version >= inode.version
            && end < inode.size
            && !inode.unstable;
        inode.locked[page] = false;
        inode.pages[page] = Some(cells);
        if cut {
            inode.size = end;
            state.kernel.bump(ino);
        }
        Ok(())
    }

    /// Whether what was found in a page, up to where the file ended for the reader, was so at some moment.
    fn judge(
        &self,
        since: &Since,
        ino: u64,
        page: usize,
        cells: [u32; PAGE_CELLS],
        size: usize,
        mapped: bool,
    ) -> Result<(), String> {
        let state = self.shared.lock();
        for (at, cell) in cells.into_iter().enumerate() {
            let at = page * PAGE_CELLS + at;
            let is = |file: &File| (at < file.size).then(|| file.cells[at]);
            let were: Vec<Option<u32>> = state.states[since.of(ino)..]
                .iter()
                .filter_map(|truth| truth.files.get(&ino).map(is))
                .collect();
            let found = (at < size).then_some(cell);
            let early = found.is_some_and(|cell| state.early.contains(&cell));
            // Whoever maps the file sees zeroes behind its end.
            let behind = mapped && found == Some(0);
            // Of what is cut away while it is read zeroes may be seen, as on any file system.
            let cut = found == Some(0) && were.contains(&None) && were.iter().any(Option::is_some);
            if !early && !behind && !cut && !were.contains(&found) {
                return Err(format!("cell {at} is {found:?}, not of {were:?}"));
            }
        }
        Ok(())
    }

    fn seek(&self, since: &Since, file: usize) -> Result<(), String> {
        self.attributes(FILES[file], HANDLES[file])?;
        pause(Pause::Point);
        let mut state = self.shared.lock();
        let size = state.kernel.inode(FILES[file]).size;
        // A write of this node that has just ended may show an end between two.
        let sizes = || {
            state.states[since.of(FILES[file])..].iter().map(|truth| truth.files[&FILES[file]].size)
        };
        if sizes().min() <= Some(size) && Some(size) <= sizes().max() {
            Ok(())
        } else {
            Err(format!("the end is {size}"))
        }
    }

    fn stat(&self, since: &Since, at: usize) -> Result<(), String> {
        let found = self.walk(at)?;
        if !self.led_to(since, at, found) {
            return Err(format!("the name leads to {found:?}"));
        }
        let Some(ino) = found else { return Ok(()) };
        self.look(since, ino)?;
        // Again, of what is open by now: nobody looks at its name.
        pause(Pause::Point);
        let since = self.shared.lock().returned.clone();
        self.look(&since, ino)
    }

    fn look(&self, since: &Since, ino: u64) -> Result<(), String> {
        let seen = self.attributes(ino, 0)?;
        let so = self.file_was(since, ino, |file| file.size == seen.size)
            && self.file_was(since, ino, |file| file.mode == seen.mode);
        if so { Ok(()) } else { Err(format!("{ino} is {seen:?}")) }
    }

    fn open(&self, since: &Since, at: usize) -> Result<(), String> {
        let Some(ino) = self.walk(at)? else { return Ok(()) };
        let (error, body) = self.call(op::OPEN, ino, &[OpenIn::default().as_bytes()]);
        if error != 0 {
            return Err(format!("open: {error}"));
        }
        let (out, _) = reply::<OpenOut>(&body)?;
        if out.open_flags.get() & FOPEN_KEEP_CACHE == 0 {
            self.shared.drop_pages(ino);
        }
        // What is mapped now is read without a look at the attributes.
        self.read_pages(since, ino, out.fh.get(), true)?;
        let arg = ReleaseIn { fh: out.fh, ..ReleaseIn::default() };
        self.call(op::RELEASE, ino, &[arg.as_bytes()]);
        Ok(())
    }

    /// The inode's lock.
    fn lock_inode(&self, ino: u64) {
        self.shared.wait(|state| {
            let inode = state.kernel.inode(ino);
            (!std::mem::replace(&mut inode.writing, true)).then_some(())
        });
    }

    /// A write of one cell or two of one page.
    fn write(&self, file: usize, at: usize, wide: usize) -> Result<(), String> {
        let ino = FILES[file];
        let to = (at + wide).min((at / PAGE_CELLS + 1) * PAGE_CELLS);
        let page = at / PAGE_CELLS;
        self.lock_inode(ino);
        let (number, locks) = self.shared.wait(|state| {
            let number = state.writes + 1;
            let inode = state.kernel.inode(ino);
            if inode.locked[page] {
                return None;
            }
            let whole = to - at == PAGE_CELLS;
            if whole {
                inode.pages[page] = Some([number; PAGE_CELLS]);
            } else if let Some(cells) = &mut inode.pages[page] {
                cells[at % PAGE_CELLS..][..to - at].fill(number);
            }
            let locks = inode.pages[page].is_none();
            inode.locked[page] = locks;
            inode.unstable = to > inode.size;
            state.writes = number;
            state.early.push(number);
            Some((number, locks))
        });
        let data = number.to_le_bytes().repeat(to - at);
        let arg = WriteIn {
            fh: HANDLES[file].into(),
            offset: ((at * CELL) as u64).into(),
            size: (data.len() as u32).into(),
            ..WriteIn::default()
        };
        let (error, _) = self.call(op::WRITE, ino, &[arg.as_bytes(), &data]);
        let mut state = self.shared.lock();
        state.kernel.bump(ino);
        let inode = state.kernel.inode(ino);
        inode.locked[page] &= !locks;
        (inode.unstable, inode.writing, inode.valid) = (false, false, false);
        inode.size = inode.size.max(to);
        state.early.retain(|early| *early != number);
        Self::returned(&mut state, ino, |truth| truth.files[&ino].cells[at] == number);
        if error == 0 { Ok(()) } else { Err(format!("write: {error}")) }
    }

    /// A write past the pages, to where the kernel believes that the file ends; where it goes, it is not told.
    fn append(&self, file: usize) -> Result<(), String> {
        let ino = FILES[file];
        self.lock_inode(ino);
        let (number, at) = {
            let mut state = self.shared.lock();
            let inode = state.kernel.inode(ino);
            let at = inode.size;
            if at >= CELLS {
                inode.writing = false;
                return Ok(());
            }
            state.writes += 1;
            let number = state.writes;
            state.early.push(number);
            (number, at)
        };
        let data = number.to_le_bytes();
        let arg = WriteIn {
            fh: APPENDS[file].into(),
            offset: ((at * CELL) as u64).into(),
            size: (CELL as u32).into(),
            flags: O_APPEND.into(),
            ..WriteIn::default()
        };
        let (error, _) = self.call(op::WRITE, ino, &[arg.as_bytes(), &data]);
        if error != 0 {
            return Err(format!("append: {error}"));
        }
        {
            // It drops what it believes to have written over.
            self.shared.wait(|state| {
                let inode = state.kernel.inode(ino);
                let page = (at / PAGE_CELLS).min(PAGES - 1);
                (!inode.locked[page]).then(|| inode.pages[page] = None)
            });
        }
        let mut state = self.shared.lock();
        state.kernel.bump(ino);
        let inode = state.kernel.inode(ino);
        (inode.writing, inode.valid) = (false, false);
        inode.size = inode.size.max(at + 1);
        state.early.retain(|early| *early != number);
        Self::returned(&mut state, ino, |truth| truth.files[&ino].cells.contains(&number));
        Ok(())
    }

    /// A change of this node has returned: what is so of it counts from here on.
    fn returned(state: &mut State, ino: u64, is: impl Fn(&Truth) -> bool) {
        let at = state.states.iter().position(is).unwrap_or(0);
        state.returned.raise(ino, at);
    }

    /// SETATTR of mode, and of the time or not.
    fn chmod(&self, file: usize, times: bool) -> Result<(), String> {
        let ino = FILES[file];
        self.lock_inode(ino);
        let mode = {
            let mut state = self.shared.lock();
            state.kernel.inode(ino).setting = true;
            state.random.below(0o7777) as u32 | 0o400
        };
        let bits = fattr::MODE | if times { fattr::MTIME } else { 0 };
        let arg = SetattrIn {
            valid: bits.into(),
            mode: mode.into(),
            mtime: 1.into(),
            ..SetattrIn::default()
        };
        let (error, body) = self.call(op::SETATTR, ino, &[arg.as_bytes()]);
        if error != 0 {
            return Err(format!("setattr: {error}"));
        }
        let (out, _) = reply::<AttrOut>(&body)?;
        let seen = Seen::of(&out.attr, out.attr_valid.get());
        let size = {
            let mut state = self.shared.lock();
            let inode = state.kernel.inode(ino);
            let size = inode.size != seen.size;
            (inode.size, inode.mtime, inode.mode) = (seen.size, seen.mtime, seen.mode);
            inode.valid = seen.keep;
            state.kernel.bump(ino);
            size
        };
        if size {
            self.cut_pages(ino, seen.size);
            self.shared.drop_pages(ino);
        }
        let mut state = self.shared.lock();
        let inode = state.kernel.inode(ino);
        (inode.writing, inode.setting) = (false, false);
        Self::returned(&mut state, ino, |truth| truth.files[&ino].mode == mode);
        Ok(())
    }

    fn lock_dir(&self) {
        self.shared
            .wait(|state| (!std::mem::replace(&mut state.kernel.dir_locked, true)).then_some(()));
    }

    /// What the kernel does when it has changed a directory.
    fn dir_changed(&self) {
        let mut state = self.shared.lock();
        state.kernel.inode(DIR).valid = false;
        state.kernel.dir_locked = false;
    }

    fn create(&self, since: &Since, at: usize) -> Result<(), String> {
        self.lock_dir();
        if let Some(ino) = self.walk(at)? {
            self.shared.lock().kernel.dir_locked = false;
            let so = self.led_to(since, at, Some(ino));
            return if so { Ok(()) } else { Err(format!("there is {ino}")) };
        }
        let arg = CreateIn { flags: 2.into(), mode: 0o600.into(), ..CreateIn::default() };
        let (error, body) = self.call(op::CREATE, DIR, &[arg.as_bytes(), NAMES[at], b"\0"]);
        if error != 0 {
            return Err(format!("create: {error}"));
        }
        let (entry, rest) = reply::<EntryOut>(&body)?;
        let (out, _) = reply::<OpenOut>(rest)?;
        self.name(at, &entry, 0);
        self.dir_changed();
        let ino = entry.nodeid.get();
        let arg = ReleaseIn { fh: out.fh, ..ReleaseIn::default() };
        self.call(op::RELEASE, ino, &[arg.as_bytes()]);
        Self::returned(&mut self.shared.lock(), DIR, |truth| truth.names[at] == Some(ino));
        Ok(())
    }

    fn unlink(&self, at: usize) -> Result<(), String> {
        self.lock_dir();
        let before = self.shared.lock().states.len();
        let found = self.walk(at)?;
        if found.is_some() {
            let (error, _) = self.call(op::UNLINK, DIR, &[NAMES[at], b"\0"]);
            if error != 0 && error != ENOENT {
                return Err(format!("unlink: {error}"));
            }
            self.shared.lock().kernel.names[at] = None;
            self.dir_changed();
            let mut state = self.shared.lock();
            let gone = state.states[before..].iter().position(|truth| truth.names[at].is_none());
            if let Some(gone) = gone {
                state.returned.raise(DIR, before + gone);
            }
        } else {
            self.shared.lock().kernel.dir_locked = false;
        }
        Ok(())
    }

    /// READDIRPLUS.
    fn list(&self) -> Result<(), String> {
        if self.shared.checks {
            self.attributes(DIR, 0)?;
        }
        self.lock_dir();
        let version = self.shared.lock().kernel.versions;
        let arg = ReadIn { size: 4096.into(), ..ReadIn::default() };
        let (error, body) = self.call(op::READDIRPLUS, DIR, &[arg.as_bytes()]);
        if error != 0 {
            return Err(format!("readdirplus: {error}"));
        }
        let mut rest = body.as_slice();
        while !rest.is_empty() {
            let (entry, after) = reply::<EntryOut>(rest)?;
            let (dirent, _) = reply::<Dirent>(after)?;
            let len = dirent.namelen.get() as usize;
            let name = after.get(size_of::<Dirent>()..).and_then(|rest| rest.get(..len));
            let at = NAMES.iter().position(|known| Some(*known) == name);
            let at = at.ok_or("a name that is not there")?;
            if entry.nodeid.get() != 0 {
                self.shared.wait(|state| {
                    (!std::mem::replace(&mut state.kernel.looking[at], true)).then_some(())
                });
                self.name(at, &entry, version);
                self.shared.lock().kernel.looking[at] = false;
            }
            let step = (size_of::<Dirent>() + len).next_multiple_of(8);
            rest = after.get(step..).unwrap_or(&[]);
        }
        self.shared.lock().kernel.dir_locked = false;
        Ok(())
    }

    fn write_elsewhere(
        &self,
        file: usize,
        at: usize,
        wide: usize,
        back: bool,
    ) -> Result<(), String> {
        let to = (at + wide).min(CELLS);
        // An answer to SETATTR is taken in as it is, though others make the file longer meanwhile.
        let number = self.shared.wait(|state| {
            let longer = to > state.truth().files[&FILES[file]].size;
            if longer && state.kernel.inode(FILES[file]).setting {
                return None;
            }
            state.writes += 1;
            Some(state.writes)
        });
        self.recall(FILES[file], |truth, now| {
            if let Some(file) = truth.files.get_mut(&FILES[file]) {
                file.cells[at..to].fill(number);
                file.size = file.size.max(to);
                file.ctime = now;
                file.mtime = if back { file.mtime } else { now };
            }
        });
        Ok(())
    }

    fn cut(&self, file: usize, size: usize) -> Result<(), String> {
        self.recall(FILES[file], |truth, now| {
            if let Some(file) = truth.files.get_mut(&FILES[file]) {
                file.cells[size.min(file.size)..].fill(0);
                (file.size, file.ctime, file.mtime) = (size, now, now);
            }
        });
        // Who looks first has to be alone, for a moment (`pages`, "What is not covered").
        let (more, opens, appends) = {
            let mut state = self.shared.lock();
            let random = &mut state.random;
            (random.chance(1, 2), random.chance(1, 3), random.chance(1, 3))
        };
        if appends {
            self.append(file)?;
        }
        if opens {
            let since = self.shared.lock().returned.clone();
            self.open(&since, file)?;
        }
        let since = self.shared.lock().returned.clone();
        self.read(&since, file)?;
        if more {
            self.write_elsewhere(file, 0, 1, true)?;
            let since = self.shared.lock().returned.clone();
            self.read(&since, file)?;
        }
        if appends {
            self.write_elsewhere(file, size, 1, true)?;
            self.append(file)?;
            let since = self.shared.lock().returned.clone();
            self.read(&since, file)?;
        }
        self.shared.lock().ms += 110;
        Ok(())
    }

    fn chmod_elsewhere(&self, at: usize, back: bool) -> Result<(), String> {
        let (mode, ino) = {
            let mut state = self.shared.lock();
            let ino = state.truth().names[at];
            (state.random.below(0o7777) as u32 | 0o400, ino)
        };
        let Some(ino) = ino else { return Ok(()) };
        self.recall(ino, |truth, now| {
            if let Some(file) = truth.files.get_mut(&ino) {
                (file.mode, file.ctime) = (mode, now);
                file.mtime = if back { 1 } else { file.mtime };
            }
        });
        Ok(())
    }

    /// Another node makes, removes, replaces or exchanges names.
    fn name_elsewhere(&self, at: usize, how: u64) -> Result<(), String> {
        let made = {
            let mut state = self.shared.lock();
            state.made += 1;
            100 + state.made
        };
        let quiet = self.shared.clone();
        self.recall(DIR, |truth, now| {
            truth.dir_time = now;
            match how % 4 {
                0 => truth.names[at] = None,
                1 => truth.names.swap(0, 1),
                2 => truth.names[at] = Some(FILES[at]),
                _ => {
                    let file = File { mode: 0o600, mtime: now, ctime: now, ..File::default() };
                    truth.files.insert(made, file);
                    truth.names[at] = Some(made);
                }
            }
        });
        let mut state = quiet.lock();
        state.dir_changed = state.ms;
        Ok(())
    }
}
