//! What the workers stand on: several views of one volume, and the services behind them, which can be
//! disturbed; or a plain directory, by which the hunter itself is tested.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A way into the files.
#[derive(Clone, Debug)]
pub struct View {
    /// As `m1`: the mount of node 1; `r2`: under `corbel run` on node 2.
    pub name: String,
    /// The node, from 1 on.
    pub node: u32,
    /// Where the volume is.
    pub root: PathBuf,
    /// What comes before a program.
    pub prefix: Vec<OsString>,
}

/// What serves the files, and how it is disturbed. It ends when it is dropped.
pub trait Services: Send + Sync + fmt::Debug {
    /// Brings about a fault (see [`Ground::fault`]) and comes back when all is well again.
    fn fault(&self, words: &[&str]) -> io::Result<()>;
    /// A number that grows when a node loses its place: then what was not synced may be lost.
    fn epoch(&self) -> io::Result<u64>;
    /// Whether a node can be cut off.
    fn can_cut(&self) -> bool;
    /// Keeps what the services have logged.
    fn keep_logs(&self, to: &Path);
}

/// The ground.
#[derive(Debug)]
pub struct Ground {
    /// Ways into it.
    pub views: Vec<View>,
    services: Option<Arc<dyn Services>>,
    mischief: Option<Mischief>,
    /// Faults so far.
    pub faults: u64,
}

/// Brings about faults beside the calls. One thread for all: what it starts may be bound to its life.
#[derive(Debug)]
struct Mischief {
    jobs: Option<Sender<String>>,
    ended: Receiver<io::Result<()>>,
    under_way: bool,
    thread: Option<JoinHandle<()>>,
}

/// Takes up the space of a full volume; in the root, where no history is.
const FILLER: &str = "hunt-filler";

impl Ground {
    /// A directory; every view leads there.
    pub fn plain(dir: &Path, nodes: u32) -> Self {
        let name = |node| [format!("m{node}"), format!("r{node}")].map(|name| (name, node));
        let views = (1..=nodes).flat_map(name).map(|(name, node)| View {
            name,
            node,
            root: dir.to_path_buf(),
            prefix: Vec::new(),
        });
        Self { views: views.collect(), services: None, mischief: None, faults: 0 }
    }

    /// Views of a volume, and what serves it.
    pub fn served(views: Vec<View>, services: Arc<dyn Services>) -> Self {
        let mischief = Mischief::new(Arc::clone(&services));
        Self { views, services: Some(services), mischief: Some(mischief), faults: 0 }
    }

    /// The view of that name, or another if there is none: scripts outlive the clusters they were found on.
    pub fn view(&self, name: &str) -> &View {
        let same = |view: &&View| view.name == name;
        let alike = |view: &&View| view.name[..1] == name[..1];
        let found = self.views.iter().find(same).or_else(|| self.views.iter().find(alike));
        found.unwrap_or(&self.views[0])
    }

    /// The number of nodes.
    pub fn nodes(&self) -> u32 {
        self.views.iter().map(|view| view.node).max().unwrap_or(0)
    }

    /// Whether services stand behind it, or it is a plain directory.
    pub fn has_services(&self) -> bool {
        self.services.is_some()
    }

    /// Whether a node can be cut off.
    pub fn can_cut(&self) -> bool {
        self.services.as_ref().is_some_and(|services| services.can_cut())
    }

    /// See [`Services::epoch`].
    pub fn epoch(&self) -> io::Result<u64> {
        self.services.as_ref().map_or(Ok(0), |services| services.epoch())
    }

    /// Brings about a fault. With `beside` it goes on while calls are made, until [`Self::heal`]; else all is well
    /// again when this returns.
    ///
    /// ```text
    /// nicfs N         kill -9 of the service, which its supervisor starts again
    /// hostd N         the same
    /// stop N WHO MS   SIGSTOP of nicfs or hostd for some milliseconds
    /// coordinator MS  SIGSTOP of the coordinator
    /// term N          the services of a node end in order, and are started
    /// node N          kill -9 of all services of a node, and start
    /// cut N MS        nothing reaches node N, and nothing leaves it, for some milliseconds
    /// ```
    pub fn fault(&mut self, what: &str, beside: bool) -> io::Result<()> {
        self.heal()?;
        let Some(mischief) = &mut self.mischief else { return Ok(()) };
        self.faults += 1;
        mischief.begin(what)?;
        if beside { Ok(()) } else { self.heal() }
    }

    /// Waits until a fault that went on beside the calls is over.
    pub fn heal(&mut self) -> io::Result<()> {
        self.mischief.as_mut().map_or(Ok(()), Mischief::wait)
    }

    /// Takes all space of the volume but some KiB.
    pub fn fill(&mut self, leave: u64) -> io::Result<()> {
        self.faults += 1;
        let file = fs::File::create(self.views[0].root.join(FILLER))?;
        let (mut at, mut step) = (0_i64, 64_i64 << 20);
        while step >= 4096 {
            // SAFETY: takes numbers only.
            #[allow(unsafe_code)]
            let result = unsafe { libc::fallocate(file.as_raw_fd(), 0, at, step) };
            let error = io::Error::last_os_error();
            match (result, error.raw_os_error()) {
                (0, _) => at += step,
                (_, Some(libc::ENOSPC)) => step /= 2,
                (_, Some(libc::EINTR)) => {}
                _ => return Err(error),
            }
        }
        let shorter = file.set_len(at.cast_unsigned().saturating_sub(leave << 10));
        // Space that was promised may be refused later: then it is full all the same.
        shorter.and_then(|()| file.sync_all()).or_else(|error| match error.raw_os_error() {
            Some(libc::ENOSPC) => Ok(()),
            _ => Err(error),
        })
    }

    /// Makes durable what this process has done in the mounts: `fsync` of a root covers a mount.
    pub fn sync(&self) -> io::Result<()> {
        self.views.iter().try_for_each(|view| fs::File::open(&view.root)?.sync_all())
    }

    /// Gives back what [`Self::fill`] took.
    pub fn free(&self) -> io::Result<()> {
        match fs::remove_file(self.views[0].root.join(FILLER)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Bytes of the volume that nothing takes.
    pub fn space(&self) -> io::Result<u64> {
        use std::os::unix::ffi::OsStrExt as _;
        let path = std::ffi::CString::new(self.views[0].root.as_os_str().as_bytes())?;
        // SAFETY: the structure is plain numbers, for which zeros are values.
        #[allow(unsafe_code)]
        let mut about: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: the path ends with a zero, the structure is ours.
        #[allow(unsafe_code)]
        if unsafe { libc::statvfs(path.as_ptr(), &raw mut about) } == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(about.f_bfree * about.f_frsize)
    }

    /// Keeps what the services have logged.
    pub fn keep_logs(&self, to: &Path) {
        if let Some(services) = &self.services
            && fs::create_dir_all(to).is_ok()
        {
            services.keep_logs(to);
        }
    }
}

impl Mischief {
    fn new(services: Arc<dyn Services>) -> Self {
        let (jobs, todo) = channel::<String>();
        let (done, ended) = channel();
        let work = move || {
            for job in todo {
                let words: Vec<&str> = job.split_whitespace().collect();
                if done.send(services.fault(&words)).is_err() {
                    break;
                }
            }
        };
        let thread = Some(std::thread::spawn(work));
        Self { jobs: Some(jobs), ended, under_way: false, thread }
    }

    fn begin(&mut self, what: &str) -> io::Result<()> {
        let gone = || io::Error::other("faults cannot be brought about any more");
        self.jobs.as_ref().ok_or_else(gone)?.send(what.into()).map_err(|_| gone())?;
        self.under_way = true;
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.under_way) {
            return Ok(());
        }
        let gone = |_| Err(io::Error::other("a fault could not be brought about"));
        self.ended.recv().unwrap_or_else(gone)
    }
}

impl Drop for Mischief {
    fn drop(&mut self) {
        let _ = self.wait();
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Slow;

    impl Services for Slow {
        fn fault(&self, words: &[&str]) -> io::Result<()> {
            match words {
                ["nicfs", "1"] => Ok(()),
                _ => Err(io::Error::other(words.join(" "))),
            }
        }
        fn epoch(&self) -> io::Result<u64> {
            Ok(7)
        }
        fn can_cut(&self) -> bool {
            false
        }
        fn keep_logs(&self, _: &Path) {}
    }

    #[test]
    fn a_fault_is_waited_for_and_its_failure_is_told() {
        let views = Ground::plain(Path::new("/nowhere"), 1).views;
        let mut ground = Ground::served(views, Arc::new(Slow));
        ground.fault("nicfs 1", false).unwrap();
        ground.fault("nicfs 1", true).unwrap();
        ground.heal().unwrap();
        ground.fault("nicfs 9", true).unwrap();
        assert_eq!(ground.heal().unwrap_err().to_string(), "nicfs 9");
        ground.heal().unwrap();
        assert_eq!((ground.faults, ground.epoch().unwrap()), (3, 7));
        assert_eq!(ground.view("r9").name, "r1");
    }
}
