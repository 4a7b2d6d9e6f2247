//! Children on other seats, and the ends of processes.

use std::ffi::CString;

use super::args::{Args, Stop, c_string};
use super::{SEAT_FD, SEATS, Slot, Worker, done, errno, sys};
use crate::text;

/// Ends this process as `_exit` does.
pub fn exit() -> ! {
    // SAFETY: ends the process without running anything of it.
    #[allow(unsafe_code)]
    unsafe {
        libc::_exit(0)
    }
}

/// Closes the sockets of the seats that are taken by others.
pub fn close_seats(own: usize) {
    for seat in (0..own).chain(own + 1..SEATS) {
        if seat < own {
            sys!(close(SEAT_FD + seat as i32));
        }
    }
}

/// In a mount namespace of its own, the directory is shown without times of access.
pub fn without_atime(root: &[u8]) {
    // Where this is not allowed times of access are compared all the same, and may differ.
    if sys!(unshare(libc::CLONE_NEWNS)) == -1 {
        return;
    }
    // With the directories above it, into which names may lead.
    let root = c_string(root.strip_suffix(b"/x/y/z").unwrap_or(root).to_vec());
    let (none, slash) = (std::ptr::null(), c"/".as_ptr());
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let again = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_NOATIME;
    sys!(mount(none, slash, none, private, std::ptr::null()));
    sys!(mount(root.as_ptr(), root.as_ptr(), none, libc::MS_BIND, std::ptr::null()));
    sys!(mount(none, root.as_ptr(), none, again, std::ptr::null()));
}

impl Worker {
    /// `fork SEAT`, `exec SEAT`, `spawn SEAT`: a child that takes that seat.
    pub fn child(&mut self, how: &str, args: &Args<'_>) -> Result<String, Stop> {
        let seat = args.length(0)?;
        if !self.free.contains(&seat) {
            return Err(Stop::NoSlot);
        }
        self.free.retain(|free| *free != seat);
        let pid = match how {
            "spawn" => self.spawn(seat)?,
            _ => self.fork(seat, how == "exec")?,
        };
        self.children.insert(seat, pid);
        sys!(close(SEAT_FD + seat as i32));
        Ok("0 0".into())
    }

    fn fork(&mut self, seat: usize, exec: bool) -> Result<libc::pid_t, Stop> {
        let program = self.program(seat);
        let pid = done(sys!(fork()))?;
        if pid != 0 {
            return Ok(pid as libc::pid_t);
        }
        if exec {
            let arguments = pointers(&program);
            sys!(execv(program[0].as_ptr(), arguments.as_ptr().cast()));
            exit();
        }
        sys!(close(self.seat_fd()));
        self.start.seat = seat;
        self.children.clear();
        self.touch();
        self.serve();
        exit()
    }

    /// Looks at all that is open: under `corbel run` a child keeps what its parent had open from its first touch on
    /// (docs/interception.md); who removes and closes it before is a limit.
    pub fn touch(&self) {
        for slot in self.slots.iter().flatten() {
            // SAFETY: the structure is plain numbers, for which zeros are values.
            #[allow(unsafe_code)]
            let mut about: libc::stat = unsafe { std::mem::zeroed() };
            sys!(fstat(slot.fd, &raw mut about));
        }
    }

    fn spawn(&self, seat: usize) -> Result<libc::pid_t, Stop> {
        let program = self.program(seat);
        let arguments = pointers(&program);
        let mut pid = 0;
        let environment = std::env::vars_os().map(|(key, value)| {
            use std::os::unix::ffi::OsStringExt as _;
            let mut line = key.into_vec();
            line.push(b'=');
            line.extend(value.into_vec());
            c_string(line)
        });
        let environment: Vec<CString> = environment.collect();
        let variables = pointers(&environment);
        let none = std::ptr::null();
        let (path, nothing) = (program[0].as_ptr(), std::ptr::null());
        let error = sys!(posix_spawn(
            &raw mut pid,
            path,
            none,
            nothing,
            arguments.as_ptr(),
            variables.as_ptr()
        ));
        if error != 0 { Err(Stop::Errno(error)) } else { Ok(pid) }
    }

    /// This program again, for another seat, with the descriptors that are open here.
    fn program(&self, seat: usize) -> Vec<CString> {
        let path = std::env::current_exe().unwrap_or_default();
        let slots = self.slots.iter().enumerate();
        let slots: Vec<String> = slots
            .filter_map(|(index, slot)| {
                slot.as_ref().map(|Slot { fd, .. }| format!("{index}={fd}"))
            })
            .collect();
        let mut arguments = vec![path.to_string_lossy().into_owned()];
        arguments.extend([
            format!("--seat={seat}"),
            format!("--root={}", text::escape(&self.start.root)),
            format!("--slots={}", slots.join(",")),
            "--again".into(),
        ]);
        let flags = [
            (self.start.reference, "--reference"),
            (self.start.plain, "--plain"),
            (self.start.ends, "--ends"),
        ];
        arguments.extend(flags.iter().filter(|(set, _)| *set).map(|(_, flag)| (*flag).into()));
        arguments.into_iter().map(|a| c_string(a.into_bytes())).collect()
    }

    /// `reap SEAT`: waits for the end of a child.
    pub fn reap(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let pid = self.children.remove(&args.length(0)?).ok_or(Stop::NoSlot)?;
        let mut status = 0;
        while sys!(waitpid(pid, &raw mut status, 0)) == -1 {
            if errno() != libc::EINTR {
                return Err(Stop::Errno(errno()));
            }
        }
        Ok(format!("0 0 status={status:x}"))
    }
}

/// Pointers to strings, and the null that ends them.
fn pointers(strings: &[CString]) -> Vec<*mut libc::c_char> {
    let all = strings.iter().map(|s| s.as_ptr().cast_mut());
    all.chain([std::ptr::null_mut()]).collect()
}
