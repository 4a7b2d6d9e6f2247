//! What the filter of system calls does: each case is a process of its own, which is this program again.
#![allow(unsafe_code)] // system calls that nobody wraps

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;

use virtiofs::sandbox::{self, Seccomp};

/// What a child is to do: the action of the filter, whether `bind` is needed, the call, and whether a thread makes it that was there before.
const CASE: &str = "VIRTIOFS_SANDBOX_CASE";
/// The call was made, and the kernel did it or said why not.
const MADE: i32 = 21;

/// A call with arguments by which it changes nothing where it is not banned.
fn call(name: &str) {
    let number = match name {
        "execve" => libc::SYS_execve,
        "ptrace" => libc::SYS_ptrace,
        "process_vm_readv" => libc::SYS_process_vm_readv,
        "mount" => libc::SYS_mount,
        "unshare" => libc::SYS_unshare,
        "setns" => libc::SYS_setns,
        "bpf" => libc::SYS_bpf,
        "io_uring_setup" => libc::SYS_io_uring_setup,
        "open_by_handle_at" => libc::SYS_open_by_handle_at,
        "init_module" => libc::SYS_init_module,
        "listen" => libc::SYS_listen,
        "bind" => libc::SYS_bind,
        "openat" => libc::SYS_openat,
        "statx" => libc::SYS_statx,
        // The x32 number of execve.
        "x32" => 0x4000_0000 | 520,
        _ => panic!("{name}"),
    };
    // SAFETY: no argument is an address or a descriptor that there is; the kernel refuses them all.
    unsafe { libc::syscall(number, -1, -1, -1, -1, -1, -1) };
}

/// Not a test: what the others start.
#[test]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let words: Vec<&str> = case.split(' ').collect();
    let [action, binds, name, thread] = words[..] else { panic!("{case}") };
    let action = match action {
        "kill" => Seccomp::Kill,
        "trap" => Seccomp::Trap,
        "log" => Seccomp::Log,
        _ => Seccomp::None,
    };
    let (go, gone) = mpsc::channel::<String>();
    let before = std::thread::spawn(move || {
        if let Ok(name) = gone.recv() {
            call(&name);
        }
    });
    sandbox::no_new_privileges().expect("it may give up privileges");
    sandbox::ban_system_calls(action, binds == "binds").expect("the kernel has filters");
    if thread == "before" {
        go.send(name.into()).expect("it waits");
        before.join().expect("it goes on");
    } else {
        call(name);
    }
    std::process::exit(MADE);
}

fn ends(case: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "child", "--nocapture"]).env(CASE, case);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().expect("it starts")
}

#[test]
fn a_banned_call_ends_the_process() {
    let banned = [
        "execve",
        "ptrace",
        "process_vm_readv",
        "mount",
        "unshare",
        "setns",
        "bpf",
        "io_uring_setup",
        "open_by_handle_at",
        "init_module",
        "listen",
        "bind",
    ];
    for name in banned {
        let ended = ends(&format!("kill no {name} own"));
        assert_eq!(ended.signal(), Some(libc::SIGSYS), "{name}: {ended:?}");
    }
    if cfg!(target_arch = "x86_64") {
        assert_eq!(ends("kill no x32 own").signal(), Some(libc::SIGSYS));
    }
    // Also when it is made by a thread that was there before the filter; and all of the process ends, not the thread.
    assert_eq!(ends("kill no unshare before").signal(), Some(libc::SIGSYS));
    assert_eq!(ends("trap no unshare own").signal(), Some(libc::SIGSYS));
    assert_eq!(ends("trap no unshare before").signal(), Some(libc::SIGSYS));
}

#[test]
fn what_is_not_banned_is_done() {
    for case in [
        "kill no openat own",
        "kill no statx before",
        // A back end that makes connections again.
        "kill binds bind own",
        "log no unshare own",
        "none no unshare own",
    ] {
        let ended = ends(case);
        assert_eq!(ended.code(), Some(MADE), "{case}: {ended:?}");
    }
    let ended = ends("kill binds listen own");
    assert_eq!(ended.signal(), Some(libc::SIGSYS), "nobody is listened to: {ended:?}");
}
