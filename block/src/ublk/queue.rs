//! What becomes of each request of a hardware queue: a machine that is told what has happened and says what to do next. It knows no ring, no
//! thread and no clock.
//!
//! A tag belongs to the kernel until a request comes under it, then to the server until it is committed. What the kernel says is
//! believed only where it makes sense: a request for a tag that is the server's already, or beyond the end of the disk, is none.

use base::Errno;
use base::planted::{Bug, planted};

use super::abi::{ABORTED, Description, SECTOR_SHIFT, op};
use crate::device::{Answer, Op, Outcome, Traits, Zero};

/// What requests are judged by, as the kernel was told it.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bytes of the disk.
    pub size: u64,
    /// What it is like.
    pub traits: Traits,
    /// Most bytes of a read or write.
    pub io_bytes: u32,
    /// Reads and writes go to a file, with the kernel's own pages.
    pub direct: bool,
}

/// A move of bytes between a file and the pages of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// To the file.
    pub write: bool,
    /// Where in the file.
    pub offset: u64,
    /// Where in the pages.
    pub from: u32,
    /// How many bytes.
    pub len: u32,
    /// It is done when it is durable.
    pub durable: bool,
}

/// What to do next for a tag.
#[derive(PartialEq, Eq, Debug)]
pub enum Next {
    /// Nothing: it is the device's, or over.
    Nothing,
    /// Have the device carry that out.
    Carry(Op),
    /// Have the ring move bytes.
    Move(Move),
    /// Commit the request with that result, and fetch the next one.
    Commit(i32),
}

/// The data of requests, which are in the kernel's pages.
pub trait Pages {
    /// What is to be written.
    fn take(&self, tag: u16, data: &mut [u8]) -> Result<(), Errno>;
    /// What was read.
    fn give(&self, tag: u16, data: &[u8]) -> Result<(), Errno>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Slot {
    /// The kernel's: it has a command of ours under it.
    Fetching,
    /// A request that the device has; the bytes that it reads or writes.
    Device { len: u32, read: bool },
    /// A request of which the ring moves what is left.
    Moving(Move),
    /// The kernel has given it up.
    Over,
}

/// The requests of a queue.
#[derive(Debug)]
pub struct Queue {
    rules: Rules,
    slots: Vec<Slot>,
    over: usize,
}

impl Queue {
    /// A queue of that many requests, for all of which a fetch was just asked.
    pub fn new(rules: Rules, depth: u16) -> Self {
        Self { rules, slots: vec![Slot::Fetching; depth.into()], over: 0 }
    }

    /// Whether the kernel has given all of them up.
    pub fn is_over(&self) -> bool {
        self.over == self.slots.len()
    }

    /// A fetch has ended: with a request, or not. `Err` is what the kernel should never say.
    pub fn fetched(
        &mut self,
        tag: u16,
        result: i32,
        describe: impl FnOnce() -> Description,
        pages: &impl Pages,
    ) -> Result<Next, String> {
        let slot = self.slots.get_mut(usize::from(tag));
        let Some(slot) = slot.filter(|slot| **slot == Slot::Fetching) else {
            return Err(format!("a request with tag {tag}, which is not the kernel's"));
        };
        if result == ABORTED {
            *slot = Slot::Over;
            self.over += 1;
            return Ok(Next::Nothing);
        }
        if result != 0 {
            let error = std::io::Error::from_raw_os_error(result.saturating_neg());
            return Err(format!("a fetch failed: {error}"));
        }
        let asked = describe();
        let next = match judge(&self.rules, &asked) {
            Ok(next) => next,
            Err(errno) => return Ok(Next::Commit(failure(errno))),
        };
        Ok(match next {
            Next::Move(what) => {
                *slot = Slot::Moving(what);
                next
            }
            Next::Carry(mut op) => {
                if let Op::Write { data, .. } = &mut op
                    && let Err(errno) = pages.take(tag, data)
                {
                    return Ok(Next::Commit(failure(errno)));
                }
                let (len, read) = match &op {
                    Op::Read { len, .. } => (*len, true),
                    Op::Write { data, .. } => (data.len() as u32, false),
                    _ => (0, false),
                };
                *slot = Slot::Device { len, read };
                Next::Carry(op)
            }
            next => next,
        })
    }

    /// The device has completed a request.
    pub fn completed(&mut self, tag: u16, outcome: Outcome, pages: &impl Pages) -> Next {
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return Next::Nothing };
        let Slot::Device { len, read } = *slot else { return Next::Nothing };
        *slot = Slot::Fetching;
        Next::Commit(match outcome {
            Err(errno) => failure(errno),
            Ok(Answer::Data(data)) if read && data.len() == len as usize => {
                pages.give(tag, &data).map_or_else(failure, |()| len.cast_signed())
            }
            Ok(Answer::Done) if !read => len.cast_signed(),
            // What a device owes and does not give.
            Ok(_) => failure(Errno::IO),
        })
    }

    /// The ring has moved bytes, or failed to.
    pub fn moved(&mut self, tag: u16, result: i32) -> Next {
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return Next::Nothing };
        let Slot::Moving(what) = slot else { return Next::Nothing };
        let done = match u32::try_from(result) {
            Ok(done) if done > 0 && done < what.len && !planted(Bug::MoveCutShort) => {
                // The rest of it.
                what.offset += u64::from(done);
                what.from += done;
                what.len -= done;
                return Next::Move(*what);
            }
            Ok(done) if done == what.len || (done > 0 && planted(Bug::MoveCutShort)) => {
                (what.from + what.len).cast_signed()
            }
            // The file ends before the disk does.
            Ok(_) => failure(Errno::IO),
            Err(_) => {
                let number = u16::try_from(result.unsigned_abs()).map_or(Errno::IO, Errno);
                if matches!(number, Errno::INTR | Errno::AGAIN) {
                    return Next::Move(*what);
                }
                failure(number)
            }
        };
        *slot = Slot::Fetching;
        Next::Commit(done)
    }
}

/// The number that the kernel makes an error of: those that it tells apart and block devices have, else `EIO`.
fn failure(errno: Errno) -> i32 {
    let told = match errno {
        Errno::NOSPC | Errno::OPNOTSUPP => errno,
        _ => Errno::IO,
    };
    -i32::from(told.0)
}

/// What a request asks of the device. The data of a write is still to come.
fn judge(rules: &Rules, asked: &Description) -> Result<Next, Errno> {
    let code = (asked.op_flags & 0xff) as u8;
    if code == op::FLUSH {
        return Ok(Next::Carry(Op::Flush));
    }
    let len = u64::from(asked.sectors) << SECTOR_SHIFT;
    let mask = u64::from(rules.traits.block_min) - 1;
    let offset = asked.start.checked_mul(1 << SECTOR_SHIFT).ok_or(Errno::INVAL)?;
    let end = offset.checked_add(len).ok_or(Errno::INVAL)?;
    if len == 0 || end > rules.size || (offset | len) & mask != 0 {
        return Err(Errno::INVAL);
    }
    let write = code != op::READ;
    if write && rules.traits.read_only {
        return Err(Errno::ROFS);
    }
    let fua = asked.op_flags & op::FUA != 0;
    match code {
        op::READ | op::WRITE => {
            let bytes = u32::try_from(len).ok().filter(|bytes| *bytes <= rules.io_bytes);
            let len = bytes.ok_or(Errno::INVAL)?;
            Ok(match (rules.direct, write) {
                (true, _) => {
                    Next::Move(Move { write, offset, from: 0, len, durable: write && fua })
                }
                (false, false) => Next::Carry(Op::Read { offset, len }),
                (false, true) => {
                    Next::Carry(Op::Write { offset, data: vec![0; len as usize], fua })
                }
            })
        }
        op::DISCARD => Ok(Next::Carry(Op::Trim { offset, len, fua })),
        op::WRITE_ZEROES => {
            let no_hole = asked.op_flags & op::NO_UNMAP != 0;
            Ok(Next::Carry(Op::Zero { offset, len, how: Zero { fua, no_hole, fast: false } }))
        }
        _ => Err(Errno::OPNOTSUPP),
    }
}
