//! The way to the kernel's caches: notifications written to `/dev/fuse`.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use base::InodeId;
use client::fs::{FileSystem, Invalidate};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::fuse::Server;
use crate::fuse::wire::{NotifyInvalEntry, NotifyInvalInode, NotifyStore, OutHeader, notify};
use crate::planted::{Bug, planted};

/// Sends notifications. A call returns when the kernel's cache is empty, and waits for requests
/// on the pages concerned: never call it while serving one.
#[derive(Debug)]
pub struct Notifier {
    device: Arc<OwnedFd>,
}

impl Notifier {
    /// A notifier on an open FUSE device.
    pub fn new(device: Arc<OwnedFd>) -> Self {
        Self { device }
    }

    /// Whether the kernel knew what it is about.
    fn send(&self, code: i32, parts: &[&[u8]]) -> bool {
        let len = size_of::<OutHeader>() + parts.iter().map(|p| p.len()).sum::<usize>();
        let Ok(len) = u32::try_from(len) else { return false };
        let header = OutHeader { len: len.into(), error: code.into(), unique: 0.into() };
        let mut slices = vec![IoSlice::new(header.as_bytes())];
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        match rustix::io::writev(&*self.device, &slices) {
            Ok(_) => true,
            // The kernel does not have it, or is no more: then nothing of it is cached.
            Err(Errno::NOENT | Errno::NOTCONN | Errno::NODEV) => false,
            Err(error) => {
                log::warn!("kernel cache notification {code} failed: {error}");
                false
            }
        }
    }
}

impl Notifier {
    /// As [`Invalidate::inode`]; whether the kernel knew the inode.
    pub fn known_inode(&self, ino: InodeId, offset: i64, len: i64) -> bool {
        let body = NotifyInvalInode { ino: ino.0.into(), off: offset.into(), len: len.into() };
        self.send(notify::INVAL_INODE, &[body.as_bytes()])
    }
}

/// The kernel's cache, for a file system that takes leases back: also of inodes that the kernel is only
/// just being told of. The reply may be with us still, or in the kernel and not taken in.
#[derive(Debug)]
pub struct KernelCache {
    notifier: Arc<Notifier>,
    server: Weak<Server<dyn FileSystem>>,
}

/// Looks at an inode that the kernel is about to know, this far apart.
const ABOUT_TO_KNOW: Duration = Duration::from_micros(50);
/// Most such looks: longer than a lease is waited for.
const LOOKS_MAX: u32 = 4000;

/// Tells the kernel something until it knows what that is about, or is not about to know it. Whether it came
/// to that.
pub(crate) fn until_known(
    told: impl Fn() -> bool,
    tell: impl Fn() -> bool,
    wait: impl Fn(),
) -> bool {
    for _ in 0..LOOKS_MAX {
        if tell() || !told() || planted(Bug::UnknownSkipped) {
            return true;
        }
        wait();
    }
    false
}

impl KernelCache {
    /// Of the kernel behind `server`.
    pub fn new(notifier: Arc<Notifier>, server: &Arc<Server<dyn FileSystem>>) -> Self {
        Self { notifier, server: Arc::downgrade(server) }
    }
}

impl Invalidate for KernelCache {
    fn inode(&self, ino: InodeId, offset: i64, len: i64) {
        let told = || self.server.upgrade().is_some_and(|server| server.is_told(ino));
        let tell = || self.notifier.known_inode(ino, offset, len);
        if !until_known(told, tell, || std::thread::sleep(ABOUT_TO_KNOW)) {
            log::warn!("the kernel was told of inode {ino} and does not know it");
        }
    }

    fn entry(&self, parent: InodeId, name: &[u8]) {
        self.notifier.entry(parent, name);
    }

    fn store(&self, ino: InodeId, offset: u64, data: &[u8]) {
        self.notifier.store(ino, offset, data);
    }
}

impl Invalidate for Notifier {
    fn inode(&self, ino: InodeId, offset: i64, len: i64) {
        self.known_inode(ino, offset, len);
    }

    fn entry(&self, parent: InodeId, name: &[u8]) {
        let Ok(namelen) = u32::try_from(name.len()) else { return };
        let body =
            NotifyInvalEntry { parent: parent.0.into(), namelen: namelen.into(), flags: 0.into() };
        self.send(notify::INVAL_ENTRY, &[body.as_bytes(), name, b"\0"]);
    }

    fn store(&self, ino: InodeId, offset: u64, data: &[u8]) {
        let Ok(size) = u32::try_from(data.len()) else { return };
        let body = NotifyStore {
            nodeid: ino.0.into(),
            offset: offset.into(),
            size: size.into(),
            padding: 0.into(),
        };
        self.send(notify::STORE, &[body.as_bytes(), data]);
    }
}

/// Inodes whose cached data shall go soon, noted down by request handlers and dropped by a
/// thread of their own. Holds each inode once, so it is bounded by the open files.
#[derive(Debug, Default)]
pub struct Deferred {
    state: Mutex<DeferredState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct DeferredState {
    inodes: BTreeSet<InodeId>,
    closed: bool,
}

impl Deferred {
    /// Notes an inode down.
    pub fn push(&self, ino: InodeId) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).inodes.insert(ino);
        self.changed.notify_one();
    }

    /// Ends [`run`](Self::run).
    pub fn close(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.changed.notify_one();
    }

    /// Drops what is noted down until closed.
    pub fn run(&self, notifier: &Notifier) {
        loop {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            while state.inodes.is_empty() && !state.closed {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let inodes = std::mem::take(&mut state.inodes);
            if inodes.is_empty() {
                return;
            }
            drop(state);
            for ino in inodes {
                notifier.inode(ino, 0, 0);
            }
        }
    }
}
