//! Threads of a history: coroutines, of which the history goes on with one after the other.
#![allow(unsafe_code)]

use std::cell::Cell;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

/// Bytes of a stack.
const STACK: usize = 256 << 10;

/// Why a thread does not go on by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pause {
    /// Others may go on here.
    Point,
    /// It waits for others.
    Blocked,
    /// It waits for time to pass.
    Sleeps,
}

type Here = *const Yielder<(), Pause>;

thread_local! {
    static HERE: Cell<Option<Here>> = const { Cell::new(None) };
}

/// A thread.
pub struct Fiber {
    coroutine: Option<Coroutine<(), Pause, (), DefaultStack>>,
    here: Option<Here>,
}

impl std::fmt::Debug for Fiber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fiber").field("ended", &self.coroutine.is_none()).finish_non_exhaustive()
    }
}

impl Fiber {
    /// One that has not begun.
    pub fn new(program: impl FnOnce() + 'static) -> Result<Self, String> {
        let stack = DefaultStack::new(STACK).map_err(|e| format!("no stack: {e}"))?;
        let coroutine = Coroutine::with_stack(stack, move |yielder, ()| {
            HERE.set(Some(std::ptr::from_ref(yielder)));
            program();
        });
        Ok(Self { coroutine: Some(coroutine), here: None })
    }

    /// Goes on until the next pause; `None`: it has ended.
    pub fn resume(&mut self) -> Option<Pause> {
        let coroutine = self.coroutine.as_mut()?;
        HERE.set(self.here);
        let result = coroutine.resume(());
        self.here = HERE.take();
        match result {
            CoroutineResult::Yield(pause) => Some(pause),
            CoroutineResult::Return(()) => {
                self.coroutine = None;
                None
            }
        }
    }
}

impl Drop for Fiber {
    fn drop(&mut self) {
        if let Some(mut coroutine) = self.coroutine.take() {
            // SAFETY: what lies on the stack is leaked; nothing outside refers to it.
            unsafe { coroutine.force_reset() };
        }
    }
}

/// Whether this is a thread of a history.
pub fn is_here() -> bool {
    HERE.get().is_some()
}

/// Pauses the thread that runs. Outside of any it goes on.
pub fn pause(why: Pause) {
    if let Some(here) = HERE.get() {
        // SAFETY: the yielder lives as long as its coroutine, which is the one that runs: `resume` has set it.
        unsafe { (*here).suspend(why) };
    }
}
