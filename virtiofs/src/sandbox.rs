//! Less than nothing to gain: what a process that serves a hostile guest gives up before it does.
//!
//! - *No new privileges*: whatever it might execute gets no more than it has. Always.
//! - *Namespaces*: a network of its own, without devices, and a tree of mounts in which there is nothing but what it serves,
//!   `/proc`, and the directory of the node's socket.
//! - *System calls*: none that start programs, change namespaces or mounts, look into other processes, or change the kernel.
#![allow(unsafe_code)] // system calls that have no safe wrapper

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What happens when a system call is made that is not allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seccomp {
    /// Everything is allowed.
    None,
    /// The process dies.
    Kill,
    /// The kernel logs it, and it is done.
    Log,
    /// SIGSYS.
    Trap,
}

fn check(what: &str, result: libc::c_int) -> Result<(), String> {
    if result == 0 { Ok(()) } else { Err(format!("{what}: {}", std::io::Error::last_os_error())) }
}

fn c_path(path: &Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| format!("{}: a NUL", path.display()))
}

/// No program that this process starts gains anything by being set-user-ID.
///
/// # Errors
/// The kernel refused.
pub fn no_new_privileges() -> Result<(), String> {
    // SAFETY: takes numbers only.
    check("no_new_privs", unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
}

fn mount(from: &Path, to: &Path, kind: &str, flags: libc::c_ulong) -> Result<(), String> {
    let (source, target) = (c_path(from)?, c_path(to)?);
    let kind = CString::new(kind).map_err(|e| e.to_string())?;
    // SAFETY: three strings that end in NUL, and no data.
    let done = unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null())
    };
    check(&format!("mounting {} on {}", from.display(), to.display()), done)
}

/// Leaves everything behind but `keep` (directories, at the paths that they have) and `/proc`. Before any other thread is
/// started, as root.
///
/// # Errors
/// What the kernel refused. The process should end then.
pub fn enter_namespaces(keep: &[PathBuf]) -> Result<(), String> {
    let spaces = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    // SAFETY: takes a number only; there is one thread.
    check("namespaces of its own", unsafe { libc::unshare(spaces) })?;
    let root = Path::new("/");
    mount(root, root, "", libc::MS_REC | libc::MS_SLAVE)?;
    // Who serves all that there is has nothing to leave. (Bound on the new root, it would lie over that, and be as little changed.)
    if keep.iter().any(|path| path == root) {
        return Ok(());
    }
    // The new root grows on a directory that is always there; what is kept is bound from the old one while it is seen.
    let base = Path::new("/tmp");
    let keep = keep
        .iter()
        .map(|path| {
            let file = std::fs::File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok((path.clone(), file))
        })
        .collect::<Result<Vec<_>, String>>()?;
    let proc = std::fs::File::open("/proc").map_err(|e| format!("/proc: {e}"))?;
    mount(Path::new("tmpfs"), base, "tmpfs", libc::MS_NOSUID | libc::MS_NODEV)?;
    let all = keep.iter().map(|(path, file)| (path.as_path(), file));
    for (path, file) in all.chain([(Path::new("/proc"), &proc)]) {
        let to = base.join(path.strip_prefix("/").unwrap_or(path));
        std::fs::create_dir_all(&to).map_err(|e| format!("{}: {e}", to.display()))?;
        let from = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
        mount(Path::new(&from), &to, "", libc::MS_BIND | libc::MS_REC)?;
    }
    let remount =
        libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV;
    mount(Path::new("tmpfs"), base, "", remount)?;
    rustix::process::chdir(base).map_err(|e| format!("{}: {e}", base.display()))?;
    // The old root lies on top of the new one for a moment, and is taken away.
    // SAFETY: two strings that end in NUL.
    let pivoted = unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) };
    check("pivot_root", libc::c_int::try_from(pivoted).unwrap_or(-1))?;
    // SAFETY: a string that ends in NUL.
    check("old root", unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) })?;
    rustix::process::chdir("/").map_err(|e| format!("/: {e}"))
}

/// System calls that nothing here makes once it serves, and that would be of use to who has broken in.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_open_by_handle_at,
    libc::SYS_quotactl,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_pidfd_getfd,
    libc::SYS_listen,
    libc::SYS_bind,
];

/// Bans the system calls that are not needed any more, for all threads that there are and come. [`no_new_privileges`] must have
/// been called. `binds`: a back end chooses the ports from which it connects, or looks up hosts (which the C library does over a socket
/// of the kernel's routes that it binds), and does so again when a connection breaks.
///
/// # Errors
/// The kernel has no such filter.
pub fn ban_system_calls(action: Seccomp, binds: bool) -> Result<(), String> {
    const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    /// `AUDIT_ARCH_X86_64`, `AUDIT_ARCH_AARCH64`.
    const ARCH: u32 = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };
    let refuse = match action {
        Seccomp::None => return Ok(()),
        Seccomp::Kill => libc::SECCOMP_RET_KILL_PROCESS,
        Seccomp::Log => libc::SECCOMP_RET_LOG,
        Seccomp::Trap => libc::SECCOMP_RET_TRAP,
    };
    let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let mut program = vec![
        step(LOAD, 4, 0, 0),
        step(EQUAL, ARCH, 1, 0),
        step(RET, refuse, 0, 0),
        step(LOAD, 0, 0, 0),
        // The x32 numbers of the same calls.
        step(AT_LEAST, 0x4000_0000, 0, 1),
        step(RET, refuse, 0, 0),
    ];
    for call in REFUSED.iter().filter(|call| !binds || **call != libc::SYS_bind) {
        program.push(step(EQUAL, u32::try_from(*call).unwrap_or(0), 0, 1));
        program.push(step(RET, refuse, 0, 0));
    }
    program.push(step(RET, libc::SECCOMP_RET_ALLOW, 0, 0));
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|e| e.to_string())?,
        filter: program.as_mut_ptr(),
    };
    // For the threads that are there already, too: a back end has some, and they speak to its servers.
    // SAFETY: the program lives until the call returns, and the kernel copies and checks it.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const filter,
        )
    };
    match done {
        0 => Ok(()),
        ..0 => Err(format!("seccomp: {}", std::io::Error::last_os_error())),
        thread => Err(format!("seccomp: thread {thread} has a filter of its own")),
    }
}
