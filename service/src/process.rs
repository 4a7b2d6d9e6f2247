//! What a service asks of the system for itself.
#![allow(unsafe_code)]

use std::time::Duration;

/// Raises the priority of this process, where it may: others depend on its heartbeats. `nice` is
/// its nice value, below 0. Says whether it might.
///
/// Where the kernel shares the processor out between sessions first (autogroup), the nice value counts
/// inside of a session only. A process that has a session of its own raises that of the session, too. It
/// does not make one: services that wake each other across sessions are woken late (an fsync on three
/// replicas of one machine took twice as long).
pub fn raise_priority(nice: i32) -> bool {
    // SAFETY: the calls take plain numbers; failure (no permission) leaves things as they are.
    unsafe {
        let raised = libc::setpriority(libc::PRIO_PROCESS, 0, nice) == 0;
        if libc::getsid(0) == libc::getpid() {
            // Absent where the kernel has no such groups.
            let _ = std::fs::write("/proc/self/autogroup", nice.to_string());
        }
        raised
    }
}

/// As many descriptors as an administrator allows: each client has several.
pub fn raise_descriptors() {
    let which = rustix::process::Resource::Nofile;
    let most = rustix::process::getrlimit(which).maximum;
    let limit = rustix::process::Rlimit { current: most, maximum: most };
    if let Err(e) = rustix::process::setrlimit(which, limit) {
        log::warn!("cannot have as many descriptors as are allowed: {e}");
    }
}

/// Gives up every right that goes beyond its user's, for this thread and all that it starts from now on, for good: a service
/// speaks to clients and peers, and needs none. What it did with one, priorities above others', it is left the limits for;
/// who may not raise those (a container without CAP_SYS_RESOURCE) keeps CAP_SYS_NICE.
///
/// As root it then opens what is root's, or everybody's, and nothing else: region, keys and run directory belong to who runs a
/// service. To be called before there is a second thread.
pub fn give_up_rights() {
    use rustix::thread as own;
    if own::capabilities(None).is_ok_and(|sets| !sets.permitted.is_empty()) {
        let left = if raise_limits().is_ok() {
            own::CapabilitySet::empty()
        } else {
            own::CapabilitySet::SYS_NICE
        };
        let all = (0..64).map(|bit| own::CapabilitySet::from_bits_retain(1 << bit));
        // The first that the kernel does not know ends them.
        let known = all.take_while(|one| own::capability_is_in_bounding_set(*one).is_ok());
        for one in known.filter(|one| !left.contains(*one)) {
            // Who lacks CAP_SETPCAP cannot; a new program is bounded by `no_new_privs` all the same.
            let _ = own::remove_capability_from_bounding_set(one);
        }
        let _ = own::clear_ambient_capability_set();
        let had = own::capabilities(None).map_or(own::CapabilitySet::empty(), |s| s.permitted);
        let left = own::CapabilitySets {
            effective: left & had,
            permitted: left & had,
            inheritable: own::CapabilitySet::empty(),
        };
        if let Err(e) = own::set_capabilities(None, left) {
            log::warn!("this service keeps rights that it does not need: {e}");
        }
    }
    if let Err(e) = own::set_no_new_privs(true) {
        log::warn!("programs that this service starts may get more rights than it has: {e}");
    }
}

/// Nice values down to -15 (20 less than the limit), and the two lowest realtime priorities.
fn raise_limits() -> rustix::io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    for (which, least) in [(Resource::Nice, 35), (Resource::Rtprio, 2)] {
        let limit = getrlimit(which);
        let at_least = |value: Option<u64>| value.map(|value| value.max(least));
        let limit = Rlimit { current: at_least(limit.current), maximum: at_least(limit.maximum) };
        setrlimit(which, limit)?;
    }
    Ok(())
}

/// Processor time that this process has used.
pub fn cpu_time() -> std::time::Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    std::time::Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec as u32)
}

/// Keeps this thread, and all that is started from it, to some cores; what is wrong with them. To be called before there
/// is a second thread.
pub fn keep_to(cores: &[u16]) -> Result<(), String> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    if cores.is_empty() {
        return Ok(());
    }
    let may = sched_getaffinity(None).map_err(|e| e.to_string())?;
    let mut set = CpuSet::new();
    for core in cores {
        let number = usize::from(*core);
        if number >= CpuSet::MAX_CPU || !may.is_set(number) {
            return Err(format!("core {core} is not there, or not this process's to use"));
        }
        set.set(number);
    }
    sched_setaffinity(None, &set).map_err(|e| e.to_string())
}

/// A thread of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Thread(libc::c_long);

impl Thread {
    /// The thread that calls.
    pub fn current() -> Self {
        // SAFETY: the call takes nothing and cannot fail.
        Self(unsafe { libc::syscall(libc::SYS_gettid) })
    }

    /// The first thread of a process.
    pub fn first_of(process: i32) -> Self {
        Self(process.into())
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

/// Looks at a process that is late: whether it gets too little of the processor to do what it is to do.
#[derive(Debug)]
pub struct Watch {
    process: i32,
    /// Nanoseconds of processor time that its first thread had at the first look.
    ran: Option<u64>,
}

impl Watch {
    /// The first look.
    pub fn new(process: i32) -> Self {
        Self { process, ran: ran(process) }
    }

    /// It could go on, and has not run for `enough` since the first look. One that is stopped, or sleeps, or
    /// that has run, is late for another reason.
    pub fn starves(&self, enough: Duration) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process));
        let state = stat.ok().and_then(|stat| Some(stat.rsplit_once(") ")?.1.chars().next()));
        let (Some(Some('R')), Some(first)) = (state, self.ran) else { return false };
        ran(self.process).is_some_and(|now| u128::from(now - first.min(now)) < enough.as_nanos())
    }
}

/// Nanoseconds for which the first thread of a process has run.
fn ran(process: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/task/{process}/schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// For how long turns hold this thread: the time that they have the processor for, or wait for something else than that. That
/// others have it meanwhile is not the turn's doing, be they other threads or other virtual machines.
///
/// The kernel is asked now and then ([`Self::look`]) and about turns that were long, so that short ones cost nothing. What it says is of
/// the time since it was asked before. All that the thread ran in that time counts, so never less than the turn did; of what it waited
/// for other things, what others had the processor for before the turn, or another processor of this machine, is missing.
#[derive(Debug)]
pub struct Held {
    /// Of this thread: nanoseconds that it ran, and that it was ready to run and others of this machine did.
    schedstat: Option<std::fs::File>,
    /// Of the machine: what it was ready to run and its host let others.
    stat: Option<std::fs::File>,
    before: Spent,
}

/// Where time went, in nanoseconds since the beginning of something.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    ran: u64,
    waited: u64,
    /// On all processors together.
    stolen: u64,
}

/// Turns under this are short.
const SHORT: Duration = Duration::from_millis(5);

impl Held {
    /// By the thread that calls, which is the one that does the turns.
    pub fn new() -> Self {
        let open = |path| std::fs::File::open(path).ok();
        let (schedstat, stat) = (open("/proc/thread-self/schedstat"), open("/proc/stat"));
        let mut this = Self { schedstat, stat, before: Spent::default() };
        this.look(true);
        this
    }

    /// Asks the kernel, which does not say everywhere.
    fn now(&self, stolen: bool) -> Option<Spent> {
        let mut text = [0; 256];
        let mut words = start_of(self.schedstat.as_ref()?, &mut text)?.split_whitespace();
        let (ran, waited) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let mut text = [0; 256];
        let stat = self.stat.as_ref().filter(|_| stolen);
        let stolen = stat.and_then(|stat| steal(start_of(stat, &mut text)?));
        Some(Spent { ran, waited, stolen: stolen.unwrap_or(self.before.stolen) })
    }

    /// What went until now is of no turn to come. What the host let others have is asked for where this machine is `busy`: it takes
    /// long on one of many processors, and of one that sleeps nothing is taken.
    pub fn look(&mut self, busy: bool) {
        if let Some(now) = self.now(busy) {
            self.before = now;
        }
    }

    /// For how long a turn held the thread that has taken so long.
    pub fn turn(&mut self, took: Duration) -> Duration {
        if took < SHORT {
            return took;
        }
        let Some(now) = self.now(true) else { return took };
        held(took, now, std::mem::replace(&mut self.before, now))
    }
}

/// What a file of the kernel's begins with, as far as it is read now.
fn start_of<'a>(file: &std::fs::File, text: &'a mut [u8]) -> Option<&'a str> {
    let got = std::os::unix::fs::FileExt::read_at(file, text, 0).ok()?;
    // Cut in the middle of a word: numbers are ASCII.
    std::str::from_utf8(&text[..got]).ok()
}

/// Nanoseconds for which others than this virtual machine had its processors, by the first line of `/proc/stat` (proc(5): the eighth
/// number after `cpu`, in hundredths of a second).
fn steal(stat: &str) -> Option<u64> {
    let steal: u64 = stat.lines().next()?.split_whitespace().nth(8)?.parse().ok()?;
    Some(steal.saturating_mul(10_000_000))
}

/// Of a turn: what it ran for, and what it neither ran for nor waited for the processor.
fn held(took: Duration, now: Spent, before: Spent) -> Duration {
    let since =
        |spent: fn(&Spent) -> u64| Duration::from_nanos(spent(&now).saturating_sub(spent(&before)));
    let others = since(|spent| spent.waited) + since(|spent| spent.stolen);
    took.min(since(|spent| spent.ran).max(took.saturating_sub(others)))
}

impl Default for Held {
    fn default() -> Self {
        Self::new()
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

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn bash(script: &str) -> Child {
        Command::new("bash").args(["-c", script]).spawn().expect("bash is installed")
    }

    /// Looks at the process until it starves, or does not.
    fn becomes(child: &Child, starves: bool, enough: Duration) -> bool {
        let watch = Watch::new(child.id() as i32);
        let end = Instant::now() + Duration::from_secs(90);
        // (What it was seen to be it may not be in the next moment.)
        while watch.starves(enough) != starves {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }

    #[test]
    fn a_turn_holds_its_thread_by_working_or_waiting() {
        let long = Duration::from_millis(20);
        let mut held = Held::new();
        let ran = || {
            // SAFETY: the call fills the structure, of which all zeroes is a value.
            unsafe {
                let mut time: libc::timespec = std::mem::zeroed();
                libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
                Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
            }
        };
        // On the processor for as long, whoever has it in between.
        let (begin, first) = (Instant::now(), ran());
        while ran() - first < long {}
        let worked = held.turn(begin.elapsed());
        assert!(worked >= long * 9 / 10, "{worked:?}");
        // It waits for something else than the processor, but for what it waits for that afterwards.
        let before = held.before;
        let begin = Instant::now();
        std::thread::sleep(long);
        let took = begin.elapsed();
        let waited = held.turn(took);
        let others = held.before.waited - before.waited + held.before.stolen - before.stolen;
        let others = Duration::from_nanos(others);
        assert!(waited + others >= long, "{waited:?}, {others:?}");
        let ms = Duration::from_millis;
        let held_for = |took, [ran, waited, stolen]: [u64; 3]| {
            let before = Spent { ran: 5, waited: 6, stolen: 7 };
            let now = |spent, ms: u64| spent + ms * 1_000_000;
            let (ran, waited) = (now(before.ran, ran), now(before.waited, waited));
            let now = Spent { ran, waited, stolen: now(before.stolen, stolen) };
            super::held(ms(took), now, before)
        };
        assert_eq!(held_for(90, [1, 88, 0]), ms(2), "others had it");
        assert_eq!(held_for(90, [1, 8, 80]), ms(2), "others, and other machines had it");
        assert_eq!(held_for(90, [70, 40, 0]), ms(70), "it ran");
        assert_eq!(held_for(90, [1, 0, 0]), ms(90), "it waited for something");
        assert_eq!(held_for(10, [70, 70, 0]), ms(10), "others ran before it");
        let stat = "cpu  1971325 519542 1187976 1936574 15217 0 4038 8621 0 0\ncpu0 1 2 3 4 5 6 7";
        assert_eq!(super::steal(stat), Some(86_210_000_000));
        assert_eq!(super::steal("cpu  1 2 3 4"), None, "a kernel before 2.6.11");
        assert_eq!(held.turn(Duration::from_millis(1)), Duration::from_millis(1));
    }

    #[test]
    fn a_thread_is_kept_to_cores_that_are_there() {
        let kept = std::thread::spawn(|| {
            let may = || rustix::thread::sched_getaffinity(None).expect("a set");
            let first = (0..1024).find(|core| may().is_set(*core)).expect("it runs somewhere");
            assert!(super::keep_to(&[]).is_ok());
            let why = super::keep_to(&[first as u16, 1023]).expect_err("no such core");
            assert!(why.contains("1023"), "{why}");
            super::keep_to(&[first as u16]).expect("its own");
            assert_eq!((may().count(), may().is_set(first)), (1, true));
        });
        kept.join().expect("no panic");
    }

    #[test]
    fn only_who_could_run_and_does_not_starves() {
        let busy = bash("while :; do :; done");
        let idle = bash("read -t 60 <> <(:)");
        // However little it gets of a busy machine: less than an hour.
        assert!(becomes(&busy, true, LONG));
        assert!(becomes(&busy, false, Duration::from_millis(1)), "it runs");
        assert!(becomes(&idle, false, LONG), "it sleeps");
        // SAFETY: the call takes plain numbers; it is our own child.
        unsafe { libc::kill(busy.id() as i32, libc::SIGSTOP) };
        assert!(becomes(&busy, false, LONG), "it is stopped");
        for mut child in [busy, idle] {
            child.kill().expect("our own child");
            child.wait().expect("our own child");
        }
        assert!(!Watch::new(i32::MAX).starves(LONG), "there is no such process");
    }
}
