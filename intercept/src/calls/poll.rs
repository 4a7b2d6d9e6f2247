//! Waiting for descriptors: a file of ours is always ready to be read and written, as POSIX says of regular files, and never
//! for anything else.

use alloc::vec::Vec;

use super::{Reply, identity};
use crate::entry::{self, PUT_OFF, Regs};
use crate::mem;
use crate::path::Stop;
use crate::sys::{self, err, nr};
use crate::table;

/// POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM.
const READY: u16 = 0x1 | 0x4 | 0x40 | 0x100;
/// Longer lists go to the kernel.
const LIST_MAX: usize = 65_536;

fn ours(fd: i32) -> bool {
    table::index(table::entry(fd)).is_some()
}

/// See the module text.
pub fn poll(r: &mut Regs) -> Reply {
    match r.rax {
        nr::POLL | nr::PPOLL => poll_list(r),
        nr::SELECT | nr::PSELECT6 => select(r),
        nr::EPOLL_CTL => {
            const DELETE: usize = 2;
            super::to_kernel(r.rdi)?;
            if !ours(r.rdx as i32) {
                return Err(Stop::Kernel);
            }
            if r.rsi as u32 as usize != DELETE {
                mem::get::<[u32; 3]>(r.r10)?;
            }
            Err(Stop::Error(err::PERM))
        }
        _ => Err(Stop::Kernel),
    }
}

/// Waits in the kernel for what is not ours. Signals end it, as they do natively: what is put off here is raised when the
/// call returns.
fn wait(call: &[usize; 7]) -> Result<isize, Stop> {
    match identity::aside(|| entry::unless_put_off(call)) {
        PUT_OFF => Err(Stop::Flush),
        ret => Ok(ret),
    }
}

/// fd, events, revents.
type Entry = (i32, u16, u16);

fn poll_list(r: &Regs) -> Reply {
    let count = r.rsi as u32 as usize;
    if count > LIST_MAX || table::used().is_empty() {
        return Err(Stop::Kernel);
    }
    let mut list: Vec<Entry> = Vec::with_capacity(count);
    let mut any = false;
    for i in 0..count {
        let word: u64 = mem::get(r.rdi.wrapping_add(i * 8))?;
        let entry = (word as u32 as i32, (word >> 32) as u16, 0);
        any |= ours(entry.0);
        list.push(entry);
    }
    if !any {
        return Err(Stop::Kernel);
    }
    let mut others: Vec<u64> = list
        .iter()
        .map(|e| {
            let fd = if ours(e.0) { -1 } else { e.0 };
            u64::from(fd as u32) | u64::from(e.1) << 32
        })
        .collect();
    let at = others.as_mut_ptr() as usize;
    // Where something is ready the others are only looked at.
    let ready = list.iter().any(|e| ours(e.0) && e.1 & READY != 0);
    let ret = match r.rax {
        _ if ready => sys::call3(nr::POLL, at, count, 0),
        nr::POLL => wait(&[nr::POLL, at, count, r.rdx, 0, 0, 0])?,
        _ => wait(&[nr::PPOLL, at, count, r.rdx, r.r10, r.r8, 0])?,
    };
    if sys::failed(ret) {
        return Ok(ret);
    }
    let mut ready = 0;
    for (i, entry) in list.iter_mut().enumerate() {
        entry.2 = if ours(entry.0) { entry.1 & READY } else { (others[i] >> 48) as u16 };
        ready += isize::from(entry.2 != 0);
        mem::put(r.rdi + i * 8 + 6, &entry.2)?;
    }
    Ok(ready)
}

fn select(r: &Regs) -> Reply {
    let count = (r.rdi as i32).clamp(0, 1024) as usize;
    let used = table::used().end.min(count);
    let sets = [r.rsi, r.rdx, r.r10];
    let mut bits = [[0u64; 16]; 3];
    let words = count.div_ceil(64);
    let mut any = false;
    let mine = |fd: usize| ours(fd as i32);
    for (set, at) in bits.iter_mut().zip(sets).filter(|(_, at)| *at != 0) {
        for (i, word) in set.iter_mut().enumerate().take(words) {
            *word = mem::get(at + i * 8)?;
        }
        any |= (0..used).any(|fd| set[fd / 64] >> (fd % 64) & 1 != 0 && mine(fd));
    }
    if !any || r.rdi as i32 > 1024 {
        return Err(Stop::Kernel);
    }
    let asked = bits;
    for set in &mut bits {
        for fd in (0..used).filter(|fd| mine(*fd)) {
            set[fd / 64] &= !(1 << (fd % 64));
        }
    }
    let zero = [0i64; 2];
    let at = |i: usize, bits: &mut [[u64; 16]; 3]| {
        if sets[i] == 0 { 0 } else { bits[i].as_mut_ptr() as usize }
    };
    let (a, b, c) = (at(0, &mut bits), at(1, &mut bits), at(2, &mut bits));
    let asks =
        |set: usize| (0..used).any(|fd| mine(fd) && asked[set][fd / 64] >> (fd % 64) & 1 != 0);
    // Nothing exceptional ever happens to a file.
    let ret = if asks(0) || asks(1) {
        sys::call6(nr::PSELECT6, count, a, b, c, (&raw const zero) as usize, 0)
    } else {
        wait(&[r.rax, count, a, b, c, r.r8, r.r9])?
    };
    if sys::failed(ret) {
        return Ok(ret);
    }
    let mut ready = ret;
    for i in 0..2 {
        for fd in (0..used).filter(|fd| mine(*fd)) {
            let bit = 1u64 << (fd % 64);
            if sets[i] != 0 && asked[i][fd / 64] & bit != 0 {
                bits[i][fd / 64] |= bit;
                ready += 1;
            }
        }
    }
    for (set, at) in bits.iter().zip(sets).filter(|(_, at)| *at != 0) {
        for (i, word) in set.iter().enumerate().take(words) {
            mem::put(at + i * 8, word)?;
        }
    }
    Ok(ready)
}
