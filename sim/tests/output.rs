//! Output that nobody takes.

use std::process::{Command, Stdio};

/// `corbel-sim ... | head -1`: who reads may have heard enough.
#[test]
fn output_that_nobody_takes_is_no_panic() {
    for args in [&["--help"][..], &["--seeds", "1"], &["block", "--seeds", "1"]] {
        let (read, write) = std::io::pipe().expect("a pipe");
        drop(read);
        let mut command = Command::new(env!("CARGO_BIN_EXE_corbel-sim"));
        command.args(args).stdout(write).stderr(Stdio::piped());
        let output = command.spawn().and_then(|child| child.wait_with_output());
        let output = output.expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(141), ""), "{args:?}");
    }
}
