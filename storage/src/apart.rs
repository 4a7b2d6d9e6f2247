//! What takes long to let go of (the last descriptor of a file that has no name any more: the kernel frees its pages
//! one by one, 13 ms for 64 MiB) is let go of by a thread of its own, which sleeps but for that. Who decides serves others meanwhile.

use std::any::Any;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};

/// So many things wait at most. Who has more lets go of it himself, so that what is to be freed does not pile up.
const WAITING: usize = 4;

/// Something that is dropped.
type Thing = Box<dyn Any + Send>;

fn start() -> Option<SyncSender<Thing>> {
    let (sender, things) = sync_channel::<Thing>(WAITING);
    let thread = std::thread::Builder::new().name("corbel-drop".into());
    let done = thread.spawn(move || {
        for thing in things {
            // (Here, and not at the end of the loop's turn.)
            drop(thing);
        }
    });
    done.is_ok().then_some(sender)
}

/// Drops it, some time soon.
pub(crate) fn drop_apart(thing: impl Any + Send) {
    static SENDER: OnceLock<Option<SyncSender<Thing>>> = OnceLock::new();
    if let Some(sender) = SENDER.get_or_init(start) {
        give(sender, Box::new(thing));
    }
}

fn give(sender: &SyncSender<Thing>, thing: Thing) {
    // What is not taken comes back, and is dropped here.
    let _ = sender.try_send(thing);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::{ThreadId, current};
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(20);

    /// Says which thread drops it, and waits there for a word.
    struct Told(Sender<ThreadId>, Receiver<()>);

    impl Drop for Told {
        fn drop(&mut self) {
            let _ = self.0.send(current().id());
            let _ = self.1.recv_timeout(LONG);
        }
    }

    #[test]
    fn what_is_dropped_apart_is_dropped_elsewhere_and_does_not_pile_up() {
        let sender = start().expect("a thread");
        let (told, tells) = channel();
        let mut words = Vec::new();
        let mut next = || {
            let (word, waits) = channel();
            words.push(word);
            Box::new(Told(told.clone(), waits))
        };
        give(&sender, next());
        let other = tells.recv_timeout(LONG).expect("somebody drops it");
        assert_ne!(other, current().id());
        // Those wait until it has done that.
        (0..WAITING).for_each(|_| give(&sender, next()));
        // There is no room for the last, which waits for no word.
        let beyond = Box::new(Told(told.clone(), channel().1));
        give(&sender, beyond);
        assert_eq!(tells.recv_timeout(LONG), Ok(current().id()));
        words.clear();
        for _ in 0..WAITING {
            assert_eq!(tells.recv_timeout(LONG), Ok(other));
        }
    }
}
