//! What is mounted below the prefix: the kernel knows, and refuses to take such a directory away.

use alloc::vec::Vec;

use crate::calls::limit;
use crate::sys::{self, nr, o};
use crate::{session, table};

const TABLE: &[u8] = b"/proc/self/mountinfo\0";

/// Whether anything is mounted below the prefix, in this process's view. What cannot be read
/// counts as something: then the kernel decides.
pub fn any_below() -> bool {
    let open = || sys::call3(nr::OPEN, TABLE.as_ptr() as usize, o::CLOEXEC as usize, 0);
    let fd = limit::with_room(open);
    if sys::failed(fd) {
        return true;
    }
    let fd = table::raise(fd as i32, true);
    let mut text = Vec::with_capacity(64 << 10);
    let mut piece = [0u8; 4096];
    let known = loop {
        let n = sys::call3(nr::READ, fd as usize, piece.as_mut_ptr() as usize, piece.len());
        match n {
            0 => break true,
            n if n < 0 => break false,
            n => text.extend_from_slice(&piece[..n as usize]),
        }
    };
    table::close_internal(fd);
    let prefix = session::mount();
    !known || text.split(|b| *b == b'\n').any(|line| is_below(line, prefix))
}

/// Whether a line of mountinfo tells of a mount point below `prefix`.
fn is_below(line: &[u8], prefix: &[u8]) -> bool {
    let Some(point) = line.split(|b| *b == b' ').nth(4) else { return false };
    let mut left = point;
    for want in prefix {
        // Blanks and the like come as three octal digits.
        let (byte, len) = match *left {
            [b'\\', a, b, c, ..] => ((a & 7) << 6 | (b & 7) << 3 | c & 7, 4),
            [byte, ..] => (byte, 1),
            [] => return false,
        };
        if byte != *want {
            return false;
        }
        left = &left[len..];
    }
    left.first() == Some(&b'/')
}
