//! The way to the kernel's caches: notifications written to `/dev/fuse`.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use base::InodeId;
use client::fs::Invalidate;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::fuse::wire::{NotifyInvalEntry, NotifyInvalInode, NotifyStore, OutHeader, notify};

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

    fn send(&self, code: i32, parts: &[&[u8]]) {
        let len = size_of::<OutHeader>() + parts.iter().map(|p| p.len()).sum::<usize>();
        let Ok(len) = u32::try_from(len) else { return };
        let header = OutHeader { len: len.into(), error: code.into(), unique: 0.into() };
        let mut slices = vec![IoSlice::new(header.as_bytes())];
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        match rustix::io::writev(&*self.device, &slices) {
            // The kernel does not have it, or is no more: then nothing of it is cached.
            Ok(_) | Err(Errno::NOENT | Errno::NOTCONN | Errno::NODEV) => {}
            Err(error) => log::warn!("kernel cache notification {code} failed: {error}"),
        }
    }
}

impl Invalidate for Notifier {
    fn inode(&self, ino: InodeId, offset: i64, len: i64) {
        let body = NotifyInvalInode { ino: ino.0.into(), off: offset.into(), len: len.into() };
        self.send(notify::INVAL_INODE, &[body.as_bytes()]);
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
