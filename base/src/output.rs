//! Where output ends: `println!` panics when nobody takes what it prints, and none of our programs shall.

use std::io::Write;

/// What the shell says of a program that SIGPIPE has ended.
const SIGPIPE: i32 = 128 + 13;

/// Output that nobody takes is no fault of `program`: who reads it may have heard enough (`corbel status | head`). That ends the
/// process as SIGPIPE would, which Rust ignores; what a full disk refuses is said. Any other panic ends the process. To be called first in `main`.
pub fn end_where_it_ends(program: &'static str) {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let said = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        // As std words it.
        match said.strip_prefix("failed printing to std") {
            None => {
                report(info);
                // Whether it was built to unwind or not (`scripts/test.sh`): no thread goes on without another.
                std::process::abort();
            }
            Some(what) if what.contains("Broken pipe") => std::process::exit(SIGPIPE),
            Some(what) => {
                let _ = writeln!(
                    std::io::stderr(),
                    "{program}: std{what}\n  remedy: give the output a place that takes it"
                );
                std::process::exit(1);
            }
        }
    }));
}
