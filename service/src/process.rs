//! What a service asks of the system for itself.
#![allow(unsafe_code)]

/// Raises the priority of this process, where it may: others depend on its heartbeats. `nice` is
/// its nice value, below 0.
///
/// Where the kernel shares the processor out between sessions first (autogroup), the nice value counts
/// inside of a session only. A process that has a session of its own raises that of the session, too. It
/// does not make one: services that wake each other across sessions are woken late (an fsync on three
/// replicas of one machine took twice as long).
pub fn raise_priority(nice: i32) {
    // SAFETY: the calls take plain numbers; failure (no permission) leaves things as they are.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, nice);
        if libc::getsid(0) == libc::getpid() {
            // Absent where the kernel has no such groups.
            let _ = std::fs::write("/proc/self/autogroup", nice.to_string());
        }
    }
}

/// A thread of this process.
#[derive(Clone, Copy, Debug)]
pub struct Thread(libc::c_long);

impl Thread {
    /// The thread that calls.
    pub fn current() -> Self {
        // SAFETY: the call takes nothing and cannot fail.
        Self(unsafe { libc::syscall(libc::SYS_gettid) })
    }

    /// Gives it a realtime priority (1 is the lowest), which comes before all that is not realtime. Says
    /// whether that is allowed (root, CAP_SYS_NICE or a limit RLIMIT_RTPRIO).
    pub fn realtime(self, priority: i32) -> bool {
        self.schedule(libc::SCHED_RR, priority)
    }

    /// Takes it back; the nice value is as before.
    pub fn ordinary(self) {
        self.schedule(libc::SCHED_OTHER, 0);
    }

    /// Sets its nice value, if that is allowed.
    pub fn nice(self, nice: i32) {
        // SAFETY: the call takes plain numbers; failure leaves things as they are.
        unsafe { libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, self.0, nice) };
    }

    fn schedule(self, policy: i32, priority: i32) -> bool {
        let param = libc::sched_param { sched_priority: priority };
        // What it starts is ordinary.
        let policy = policy | libc::SCHED_RESET_ON_FORK;
        // SAFETY: the call reads `param` and keeps no pointer to it. (Not through the C library: musl's
        // function does nothing.)
        unsafe {
            libc::syscall(libc::SYS_sched_setscheduler, self.0, policy, &raw const param) == 0
        }
    }
}

/// Keeps freed memory for the next chunk. By default the allocator maps and unmaps every buffer of
/// a chunk's size, and the kernel clears each page anew: that was more than half of all CPU time of
/// a sequential write.
pub fn keep_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the calls set numbers of the allocator; failure leaves its defaults.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 20);
        libc::mallopt(libc::M_TOP_PAD, 8 << 20);
    }
}

/// Names this boot of the machine.
pub fn boot() -> std::io::Result<u128> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map_err(std::io::Error::other)
}

/// A number that nobody can guess.
pub fn secret() -> std::io::Result<u128> {
    let mut bytes = [0; 16];
    let mut source = std::fs::File::open("/dev/urandom")?;
    std::io::Read::read_exact(&mut source, &mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}
