//! Watches of objects, and notifications of who watches.

use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use base::Errno;

use super::io::Io;
use super::{called_back, outside, text, told};

impl Io {
    /// Notifies who watches an object, waits for them for so long, and returns what the cluster says of them, as it encodes it.
    pub fn notify(&self, name: &str, payload: &[u8], patience: Duration) -> Result<Vec<u8>, Errno> {
        let name = text(name)?;
        let len = c_int::try_from(payload.len()).map_err(|_| Errno::INVAL)?;
        let time = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        let lib = self.cluster.lib;
        let (mut at, mut size) = (null_mut(), 0);
        // SAFETY: the handle lives, the name ends in NUL, there are so many bytes, and room for where the answer is.
        let code = unsafe {
            let (name, payload) = (name.as_ptr(), payload.as_ptr().cast());
            (lib.notify)(self.raw, name, payload, len, time, &raw mut at, &raw mut size)
        };
        let mut answer = Vec::new();
        if !at.is_null() {
            // SAFETY: so many bytes are there, and are the library's to free, once.
            unsafe {
                answer.extend(std::slice::from_raw_parts(at.cast::<u8>(), size));
                (lib.buffer_free)(at);
            }
        }
        match told(code) {
            // Somebody did not answer: that is in what is said.
            Err(Errno::TIMEDOUT) if !answer.is_empty() => Ok(answer),
            code => code.map(|_| answer),
        }
    }

    /// Watches an object: `notice` is called by a thread of the library, which it must not hold up.
    pub fn watch(self: &Arc<Self>, name: &str, notice: Notice) -> Result<Watch, Errno> {
        let name = text(name)?;
        let notice = Box::into_raw(Box::new(notice));
        let mut cookie = 0;
        // SAFETY: the handle lives, the name ends in NUL, and the callbacks are given the box that they look into, which lives until
        // the watch has ended.
        let watched = told(unsafe {
            (self.cluster.lib.watch)(
                self.raw,
                name.as_ptr(),
                &raw mut cookie,
                Some(notified),
                Some(broken),
                0,
                notice.cast(),
            )
        });
        // What failed may still call: a box is lost rather than used after its end.
        watched?;
        Ok(Watch { io: Arc::clone(self), name, cookie, notice })
    }
}

/// What a watch is told.
#[derive(Debug)]
pub enum Told {
    /// Somebody notifies; the number is to be acknowledged.
    Notified(u64, Vec<u8>),
    /// The watch is broken: what was said since is not known.
    Broken(Errno),
}

/// Who is told.
pub type Notice = Box<dyn Fn(Told) + Send + Sync>;

// SAFETY: only the library calls it and the next, with the box that the watch was given, and with as many bytes as it says.
unsafe extern "C" fn notified(
    notice: *mut c_void,
    id: u64,
    _: u64,
    _: u64,
    data: *mut c_void,
    len: usize,
) {
    called_back();
    // SAFETY: the box lives until the watch has ended, and is only read.
    let notice = unsafe { &*notice.cast::<Notice>() };
    let bytes = if data.is_null() {
        Vec::new()
    } else {
        // SAFETY: so many bytes are the library's for the length of the call.
        unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec()
    };
    notice(Told::Notified(id, bytes));
}

unsafe extern "C" fn broken(notice: *mut c_void, _: u64, code: c_int) {
    called_back();
    // SAFETY: as above.
    let notice = unsafe { &*notice.cast::<Notice>() };
    notice(Told::Broken(told(code).err().unwrap_or(Errno::IO)));
}

/// A watch, until it is dropped.
pub struct Watch {
    io: Arc<Io>,
    name: CString,
    cookie: u64,
    notice: *mut Notice,
}

// SAFETY: what is behind the pointer is `Send` and `Sync`.
unsafe impl Send for Watch {}
// SAFETY: as above.
unsafe impl Sync for Watch {}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

impl Watch {
    /// What the cluster calls it.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Answers a notification.
    pub fn acknowledge(&self, id: u64, answer: &[u8]) -> Result<(), Errno> {
        let len = c_int::try_from(answer.len()).map_err(|_| Errno::INVAL)?;
        let ack = self.io.cluster.lib.notify_ack;
        let (name, at) = (self.name.as_ptr(), answer.as_ptr().cast());
        // SAFETY: the handle lives, the name ends in NUL, and there are so many bytes.
        told(unsafe { ack(self.io.raw, name, id, self.cookie, at, len) }).map(drop)
    }
}

/// A watch on its way to who ends it.
struct Ending {
    io: Arc<Io>,
    cookie: u64,
    notice: *mut Notice,
}

// SAFETY: as of `Watch`.
unsafe impl Send for Ending {}

impl Ending {
    fn end(self) {
        let lib = self.io.cluster.lib;
        // SAFETY: the watch is ended once; after the flush no callback runs any more, so the box is nobody else's.
        unsafe {
            (lib.unwatch)(self.io.raw, self.cookie);
            if (lib.watch_flush)(self.io.cluster.raw) >= 0 {
                drop(Box::from_raw(self.notice));
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let ending = Ending { io: Arc::clone(&self.io), cookie: self.cookie, notice: self.notice };
        outside(move || ending.end());
    }
}
