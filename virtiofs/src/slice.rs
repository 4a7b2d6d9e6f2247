//! Threads that a guest waits for ask the kernel for short slices of time: whoever has such is let in sooner when it wakes, before those with
//! longer ones, and gives way sooner. The share that it gets is the same.
//!
//! Among the threads of one process that is what tells those of a guest that asks for little from those of one that floods: the kernel, too, must
//! know whom to take the processor from when a request comes. Between two of the same kind it waits for its next tick, which is
//! milliseconds away. A thread of one that floods, beside others, takes the processor from nobody when it wakes: it has work for longer than
//! that anyway, and its guest meanwhile asks for more, so that it wakes less often.
#![allow(unsafe_code)] // a system call that has no safe wrapper

use std::cell::Cell;

/// Nanoseconds of a short slice; the kernel takes 0.1 ms at least.
const SHORT: u64 = 100_000;
/// Of a long one; the kernel takes 100 ms at most. What was due to a thread is had by when its slice ends (its deadline), and the earliest is first: with slices of the usual
/// length those of floods, that have waited for each other, often end before a short one that begins now.
const LONG: u64 = 10_000_000;

/// How long a thread goes on if others want the processor as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slice {
    /// For one that does little and is waited for.
    Short,
    /// As the kernel has it for everybody.
    Usual,
    /// Longer ones, for one that takes the processor from nobody when it wakes.
    Last,
}

thread_local! {
    static NOW: Cell<Slice> = const { Cell::new(Slice::Usual) };
}

/// Short slices for the calling thread.
pub fn short() {
    set(Slice::Short);
}

/// For the calling thread, on kernels that can (Linux 6.12; EEVDF); others leave it as it is. A thread that somebody has given a real-time
/// policy keeps it.
pub fn set(slice: Slice) {
    if NOW.replace(slice) == slice {
        return;
    }
    const SIZE: u32 = size_of::<libc::sched_attr>() as u32;
    // SAFETY: all fields are numbers, of which zero is one.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most SIZE bytes to it, and it lives until the call returns.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, SIZE, 0) };
    let (other, batch) = (libc::SCHED_OTHER as u32, libc::SCHED_BATCH as u32);
    if got != 0 || attr.sched_policy != other && attr.sched_policy != batch {
        return;
    }
    (attr.sched_policy, attr.sched_runtime) = match slice {
        Slice::Short => (other, SHORT),
        Slice::Usual => (other, 0),
        Slice::Last => (batch, LONG),
    };
    // SAFETY: the kernel reads it, and it lives until the call returns.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    if set != 0 {
        log::debug!("slices of the usual length: {}", std::io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_goes_on_whatever_the_kernel_says() {
        for slice in [Slice::Short, Slice::Short, Slice::Usual, Slice::Last, Slice::Short] {
            set(slice);
            assert_eq!(NOW.get(), slice);
        }
    }
}
