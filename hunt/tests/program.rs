//! The program that carries out the calls.

use std::process::{Command, Stdio};

/// What it is told and cannot be read is named; when its director is gone, so is it.
#[test]
fn it_ends_with_its_director_and_says_what_it_cannot_read() {
    let root = std::env::temp_dir().join(format!("corbel-hunt-program-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("a writable temporary directory");
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_corbel-hunt"));
        command.arg("--root").arg(&root).args(args).stdin(Stdio::null());
        let output = command.output().expect("it starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(run(&[]), (Some(0), String::new()));
    let (code, said) = run(&["--slots", "one"]);
    assert!(code == Some(1) && said.contains("--slots cannot be read"), "{code:?}: {said}");
    let left = std::fs::read_dir(&root).expect("it is still there").count();
    std::fs::remove_dir_all(&root).expect("it is ours");
    assert_eq!(left, 0, "nothing is left there");
}
