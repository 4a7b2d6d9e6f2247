//! Who asked for what: requests by thread and operation, as in `.corbel/calls`. `corbel run --audit`
//! finds there which calls of a hooked process reached the mount all the same.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

/// Pairs of thread and operation remembered; then it begins anew.
const PAIRS_MAX: usize = 16_384;

/// The counts.
#[derive(Debug, Default)]
pub(super) struct Callers(Mutex<BTreeMap<(u32, u32), u64>>);

impl Callers {
    /// Counts a request. The kernel itself is thread 0 and not counted.
    pub fn count(&self, thread: u32, opcode: u32) {
        if thread == 0 {
            return;
        }
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() >= PAIRS_MAX {
            counts.clear();
        }
        *counts.entry((thread, opcode)).or_insert(0) += 1;
    }

    /// Lines `THREAD OPERATION COUNT`.
    pub fn text(&self, name: impl Fn(u32) -> Option<&'static str>) -> String {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        for ((thread, opcode), count) in counts.iter() {
            let _ = writeln!(text, "{thread} {} {count}", name(*opcode).unwrap_or("unknown"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_by_thread_and_bounded() {
        let callers = Callers::default();
        for (thread, opcode) in [(7, 1), (7, 1), (7, 16), (9, 1), (0, 1)] {
            callers.count(thread, opcode);
        }
        let name = |opcode| (opcode == 1).then_some("lookup");
        assert_eq!(callers.text(name), "7 lookup 2\n7 unknown 1\n9 lookup 1\n");
        for thread in 1..=PAIRS_MAX as u32 {
            callers.count(thread, 2);
        }
        assert!(callers.text(name).lines().count() < PAIRS_MAX);
    }
}
