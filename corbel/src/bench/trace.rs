//! Counts the system calls of a program and its children, by ptrace: what really enters the
//! kernel, so a call that the interception library answers in user space does not count.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::failure::{Context, Failure, Result};

const WNOTHREAD: libc::c_int = 0x2000_0000;
const OPTIONS: libc::c_int = libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEEXEC
    | libc::PTRACE_O_EXITKILL;

fn ptrace(request: libc::c_uint, pid: libc::pid_t, data: libc::c_long) -> std::io::Result<()> {
    // SAFETY: none of the requests used here reads or writes memory of this process: `data` is a
    // number (options, or a signal).
    let result = unsafe { libc::ptrace(request, pid, 0, data) };
    if result == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Runs `command` to its end and counts its system calls (entries). Its output is thrown away.
pub fn count_syscalls(mut command: Command) -> Result<u64> {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: between fork and exec only ptrace is called, which is a plain system call.
    unsafe {
        command.pre_exec(|| ptrace(libc::PTRACE_TRACEME, 0, 0));
    }
    let child = command.spawn().context("starting the traced program")?;
    let first = libc::pid_t::try_from(child.id()).unwrap_or_default();
    let mut stops = 0u64;
    let mut known = BTreeSet::new();
    loop {
        let mut status = 0;
        // SAFETY: `status` outlives the call. __WALL waits for traced threads too, and
        // __WNOTHREAD leaves the children of other threads of this process alone.
        let pid = unsafe {
            libc::waitpid(first_or_any(&known, first), &mut status, libc::__WALL | WNOTHREAD)
        };
        if pid < 0 {
            break;
        }
        if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
            known.remove(&pid);
            if pid == first {
                return finish(status, stops);
            }
            continue;
        }
        if known.insert(pid) {
            // The first stop of each process; for a new one it is the SIGSTOP of attaching.
            let _ = ptrace(libc::PTRACE_SETOPTIONS, pid, libc::c_long::from(OPTIONS));
        }
        let signal = libc::WSTOPSIG(status);
        let forward = match signal {
            s if s == libc::SIGTRAP | 0x80 => {
                stops += 1;
                0
            }
            libc::SIGTRAP | libc::SIGSTOP => 0,
            other => other,
        };
        let _ = ptrace(libc::PTRACE_SYSCALL, pid, libc::c_long::from(forward));
    }
    Err(Failure::failed("the traced program was lost", "run the bench again"))
}

/// Until the program has told of its first stop only it may be waited for.
fn first_or_any(known: &BTreeSet<libc::pid_t>, first: libc::pid_t) -> libc::pid_t {
    if known.is_empty() { first } else { -1 }
}

fn finish(status: libc::c_int, stops: u64) -> Result<u64> {
    if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 {
        // Each call stops twice, at its entry and at its exit.
        return Ok(stops.div_ceil(2));
    }
    Err(Failure::failed(format!("the traced program failed (wait status {status:#x})"), ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_a_program_calls() {
        let count = |blocks: u32| {
            let mut dd = Command::new("dd");
            dd.args(["if=/dev/zero", "of=/dev/null", "bs=16", &format!("count={blocks}")]);
            dd.stderr(Stdio::null());
            count_syscalls(dd).unwrap()
        };
        // One read and one write a block.
        let (few, many) = (count(100), count(1100));
        let extra = many - few;
        assert!((1990..=2010).contains(&extra), "{extra}");
        let mut shell = Command::new("sh");
        shell.args(["-c", "true & wait; exit 3"]);
        assert!(count_syscalls(shell).is_err(), "its code is not 0");
    }
}
