//! Everything that can be seen of a tree, to be compared with another view of it.

use super::args::{Args, Stop, c_string, errno_name};
use super::names::list;
use super::{ROOT_FD, Worker, done, errno, sys};
use crate::pattern::{self, Sum};
use crate::text;

/// Bytes read at a time.
const STEP: usize = 256 << 10;
/// Files above that are looked at in their beginning and their end only.
const WHOLE: i64 = 64 << 20;
/// Deeper is a loop.
const DEPTH: usize = 64;

impl Worker {
    /// `sweep WAY`: one token for each name below the directory that the worker was started in, with
    /// attributes, content and extended attributes after semicolons. Ways of reading: 0 from the
    /// beginning, 1 from the end, 2 the middle first.
    pub fn sweep(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let way = args.length(0)?;
        // Whoever it is now: the whole tree is read as root, from its root.
        let (uid, keep) = (sys!(geteuid()), libc::uid_t::MAX);
        if uid != 0 {
            return Err(Stop::NoSlot);
        }
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let root = c_string(self.start.root.clone());
        let dir = done(sys!(open(root.as_ptr(), flags)))? as i32;
        let _ = keep;
        let mut out = String::from("0 0");
        self.descend(dir, "", way, 0, &mut out);
        sys!(close(dir));
        Ok(out)
    }

    /// `syncall`: all that was changed here is durable. `syncfs` alone does not do that in a mount, of which the kernel
    /// tells it nothing (docs/mount.md); `fsync` of the root does.
    pub fn sync_all(&self) -> Result<String, Stop> {
        let kept = sys!(fcntl(ROOT_FD, libc::F_GETFD)) != -1;
        let dir = if kept { ROOT_FD } else { self.open_root()? };
        let result = done(sys!(syncfs(dir))).and_then(|_| done(sys!(fsync(dir))));
        if !kept {
            sys!(close(dir));
        }
        super::calls::number(result)
    }

    /// The root of the file system, of which the history has a directory.
    fn open_root(&self) -> Result<i32, Stop> {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let root = self.start.root.strip_suffix(b"/x/y/z").unwrap_or(&self.start.root);
        let root = c_string([root, b"/.."].concat());
        Ok(done(sys!(open(root.as_ptr(), flags)))? as i32)
    }

    /// Before rights are given up: the root stays open for [`Self::sync_all`], also for programs that are started.
    pub fn keep_root(&self) {
        if self.start.plain || sys!(fcntl(ROOT_FD, libc::F_GETFD)) != -1 {
            return;
        }
        if let Ok(dir) = self.open_root() {
            sys!(dup2(dir, ROOT_FD));
            sys!(close(dir));
        }
    }

    /// `durable sN`: what can be seen of a file that has just been synced, as a sweep tells it.
    pub fn durable(&mut self, args: &Args<'_>) -> Result<String, Stop> {
        let fd = self.fd(args, 0)?;
        let mut about = super::meta::empty_stat();
        done(sys!(fstat(fd, &raw mut about)))?;
        if about.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(Stop::NoSlot);
        }
        let path = c_string(format!("/proc/self/fd/{fd}").into_bytes());
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let again = done(sys!(open(path.as_ptr(), flags)))? as i32;
        let content = self.content(again, 0);
        sys!(close(again));
        Ok(format!("0 0 {}{}", super::meta::show_stat(&about), content.replace(';', " ")))
    }

    fn descend(&mut self, dir: i32, prefix: &str, way: usize, depth: usize, out: &mut String) {
        let mut names = match list(dir) {
            Ok(names) => names,
            Err(Stop::Errno(error)) => {
                out.push_str(&format!(" {prefix}/;list={}", errno_name(error)));
                return;
            }
            Err(_) => return,
        };
        names.sort_unstable_by(|a, b| a.2.cmp(&b.2));
        for (_, kind, name) in names {
            if name == b"." || name == b".." {
                continue;
            }
            let path = format!("{prefix}{}", text::escape(&name));
            let about = self.look(dir, &name, kind, way);
            out.push_str(&format!(" {path};{about}"));
            if depth < DEPTH && about.contains(";dir") {
                let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
                let name = c_string(name);
                let below = sys!(openat(dir, name.as_ptr(), flags));
                if below == -1 {
                    out.push_str(&format!(" {path}/;open={}", errno_name(errno())));
                    continue;
                }
                self.descend(below, &format!("{path}/"), way, depth + 1, out);
                sys!(close(below));
            }
        }
    }

    /// What is told of one name.
    fn look(&mut self, dir: i32, name: &[u8], kind: u8, way: usize) -> String {
        let name = c_string(name.to_vec());
        let mut about = super::meta::empty_stat();
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        if sys!(fstatat(dir, name.as_ptr(), &raw mut about, flags)) == -1 {
            return format!("stat={}", errno_name(errno()));
        }
        let mut said = format!("type={kind};{}", super::meta::show_stat(&about).replace(' ', ";"));
        match about.st_mode & libc::S_IFMT {
            libc::S_IFDIR => {
                self.attributes(dir, &name, libc::O_DIRECTORY, &mut said);
                said.push_str(";dir");
            }
            libc::S_IFREG => {
                let fd = self.attributes(dir, &name, libc::O_NOATIME, &mut said);
                if let Some(fd) = fd {
                    said.push_str(&self.content(fd, way));
                    sys!(close(fd));
                }
                return said;
            }
            libc::S_IFLNK => {
                let mut target = vec![0_u8; 4096];
                let into = target.as_mut_ptr().cast();
                let got = sys!(readlinkat(dir, name.as_ptr(), into, target.len()));
                match usize::try_from(got) {
                    Ok(got) => said.push_str(&format!(";target={}", text::escape(&target[..got]))),
                    Err(_) => said.push_str(&format!(";readlink={}", errno_name(errno()))),
                }
            }
            _ => {}
        }
        said
    }

    /// Adds the extended attributes of a file or directory; the open file.
    fn attributes(
        &mut self,
        dir: i32,
        name: &std::ffi::CStr,
        flag: i32,
        said: &mut String,
    ) -> Option<i32> {
        let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC | flag;
        let fd = sys!(openat(dir, name.as_ptr(), flags));
        if fd == -1 {
            said.push_str(&format!(";open={}", errno_name(errno())));
            return None;
        }
        let mut names = vec![0_u8; 65536];
        let got = sys!(flistxattr(fd, names.as_mut_ptr().cast(), names.len()));
        let Ok(got) = usize::try_from(got) else {
            said.push_str(&format!(";listxattr={}", errno_name(errno())));
            return Some(fd);
        };
        let mut names: Vec<&[u8]> =
            names[..got].split(|b| *b == 0).filter(|n| !n.is_empty()).collect();
        names.sort_unstable();
        for key in names {
            let text = text::escape(key);
            let key = c_string(key.to_vec());
            let mut value = vec![0_u8; 65536];
            let got = sys!(fgetxattr(fd, key.as_ptr(), value.as_mut_ptr().cast(), value.len()));
            match usize::try_from(got) {
                Ok(got) => {
                    said.push_str(&format!(";x:{text}={got}:{:x}", pattern::sum(&value[..got])))
                }
                Err(_) => said.push_str(&format!(";x:{text}={}", errno_name(errno()))),
            }
        }
        if flag == libc::O_DIRECTORY {
            sys!(close(fd));
            return None;
        }
        Some(fd)
    }

    fn content(&mut self, fd: i32, way: usize) -> String {
        let mut about = super::meta::empty_stat();
        sys!(fstat(fd, &raw mut about));
        let size = about.st_size;
        let mut steps: Vec<i64> = (0..size).step_by(STEP).collect();
        if size > WHOLE {
            let last = steps.len() - 1;
            steps = vec![steps[0], steps[1], steps[last - 1], steps[last]];
        }
        let mut order: Vec<usize> = (0..steps.len()).collect();
        match way {
            1 => order.reverse(),
            2 => order.rotate_left(steps.len() / 2),
            _ => {}
        }
        let mut sums = vec![(0, 0); steps.len()];
        for index in order {
            let bytes = self.buffer.take(STEP);
            let mut got = 0;
            while got < STEP {
                let offset = steps[index] + got as i64;
                // Not from a boundary, the second way: the rest comes with the next read.
                let most = if way == 1 && got == 0 { 4097 } else { STEP - got };
                let at = bytes[got..].as_mut_ptr().cast();
                let read = sys!(pread(fd, at, most.min(STEP - got), offset));
                match usize::try_from(read) {
                    Ok(0) => break,
                    Ok(read) => got += read,
                    Err(_) => return format!(";read={}", errno_name(errno())),
                }
            }
            sums[index] = (pattern::sum(&bytes[..got]), got);
        }
        let mut all = Sum::new();
        for (sum, got) in &sums {
            all.add(&sum.to_le_bytes());
            all.add(&got.to_le_bytes());
        }
        format!(";sum={:x}", all.end().0)
    }
}
