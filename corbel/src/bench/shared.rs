//! Threads that share a file, each with a descriptor of its own: random readers beside writers, through the library in
//! one process. The same loop on ext4 (a loop device on tmpfs), and through the library as it was when whoever
//! wrote or read had the inode locked the whole time ([`Limits::aside`]).

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::Errno;
use base::random::Random;
use client::fs::{Caller, FileSystem, Handle, O_RDWR};
use client::libfs::{Config, LibFs, Limits};

use super::steady::median;
use super::world::World;
use super::{Bench, Measured};
use crate::failure::{Context, Failure, Kind, Result};

/// Bytes of one operation.
const BLOCK: u64 = 4096;
/// Threads that write.
const WRITERS: u64 = 4;
/// Threads that read beside them, and the key of each figure.
const READERS: [(u64, &str); 5] = [(1, "t1"), (2, "t2"), (4, "t4"), (8, "t8"), (16, "t16")];
const NAME: &str = "shared";

/// How much is done.
#[derive(Clone, Copy)]
struct Size {
    bytes: u64,
    turn: Duration,
    turns: usize,
}

/// Operations a second.
#[derive(Clone, Copy, Default)]
struct Rate {
    reads: f64,
    writes: f64,
}

impl Rate {
    fn all(self) -> f64 {
        self.reads + self.writes
    }
}

/// An open file of a thread.
trait Shared: Send {
    fn read(&self, at: u64, buf: &mut [u8]) -> std::io::Result<usize>;
    fn write(&self, at: u64, data: &[u8]) -> std::io::Result<usize>;
}

impl Shared for std::fs::File {
    fn read(&self, at: u64, buf: &mut [u8]) -> std::io::Result<usize> {
        self.read_at(buf, at)
    }

    fn write(&self, at: u64, data: &[u8]) -> std::io::Result<usize> {
        self.write_at(data, at)
    }
}

struct OfLibrary<'a>(&'a LibFs, Handle);

fn os(errno: Errno) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno.0.into())
}

impl Shared for OfLibrary<'_> {
    fn read(&self, at: u64, buf: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(self.1, at, buf).map_err(os)
    }

    fn write(&self, at: u64, data: &[u8]) -> std::io::Result<usize> {
        self.0.write(self.1, at, data, false).map(|written| written.len).map_err(os)
    }
}

impl Drop for OfLibrary<'_> {
    fn drop(&mut self) {
        self.0.release(self.1);
    }
}

/// Lets so many threads read beside those that write.
fn load<F: Shared>(
    readers: u64,
    size: Size,
    open: impl Fn() -> std::io::Result<F>,
) -> std::io::Result<Rate> {
    let (end, blocks) = (AtomicBool::new(false), size.bytes / BLOCK);
    let files = (0..readers + WRITERS).map(|_| open()).collect::<std::io::Result<Vec<F>>>()?;
    let since = Instant::now();
    let counts: Vec<std::io::Result<u64>> = std::thread::scope(|scope| {
        let end = &end;
        let threads: Vec<_> = files
            .into_iter()
            .enumerate()
            .map(|(n, file)| {
                scope.spawn(move || {
                    let mut random = Random::new(n as u64 + 1);
                    let (mut buf, mut count) = (vec![n as u8; BLOCK as usize], 0);
                    while !end.load(Ordering::Relaxed) {
                        let at = random.below(blocks) * BLOCK;
                        let done = match (n as u64) < readers {
                            true => file.read(at, &mut buf)?,
                            false => file.write(at, &buf)?,
                        };
                        if done != buf.len() {
                            return Err(std::io::Error::other(format!("{done} bytes at {at}")));
                        }
                        count += 1;
                    }
                    Ok(count)
                })
            })
            .collect();
        std::thread::sleep(size.turn);
        end.store(true, Ordering::Relaxed);
        let lost = || Err(std::io::Error::other("a thread has ended"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
    });
    let seconds = since.elapsed().as_secs_f64();
    let mut rate = Rate::default();
    for (n, count) in counts.into_iter().enumerate() {
        let each = count? as f64 / seconds;
        *(if (n as u64) < readers { &mut rate.reads } else { &mut rate.writes }) += each;
    }
    Ok(rate)
}

/// The library in this process.
struct Library(LibFs);

impl Library {
    fn attach(world: &World, aside: bool) -> Result<Self> {
        let socket = world.local.config(1)?.node.socket;
        let limits = Limits { aside, ..Limits::SHIPPED };
        let config = Config { limits, ..Config::new(socket.as_os_str().as_encoded_bytes()) };
        LibFs::attach(config).map(Self).map_err(|e| failed("the library", &os(e)))
    }

    fn open(&self, name: &str) -> std::result::Result<OfLibrary<'_>, Errno> {
        let caller = Caller { uid: 0, gid: 0, groups: &[], pid: std::process::id(), umask: 0o022 };
        let found = self.0.lookup(&caller, base::InodeId::ROOT, name.as_bytes())?;
        Ok(OfLibrary(&self.0, self.0.open(&caller, found.ino, O_RDWR)?))
    }

    fn load(&self, readers: u64, size: Size) -> Result<Rate> {
        let rate = load(readers, size, || self.open(NAME).map_err(os));
        rate.map_err(|e| failed("the shared file", &e))
    }
}

fn failed(what: &str, error: &std::io::Error) -> Failure {
    Failure::new(Kind::Failed, format!("{what}: {error}"), "see the logs of the services")
}

/// ext4 on a loop device on tmpfs; unmounted when dropped.
struct Ext4(PathBuf);

impl Ext4 {
    /// None, and why, where there is no such thing.
    fn make(dir: &Path, bytes: u64) -> std::result::Result<Self, String> {
        let (image, mount) = (dir.join("ext4.img"), dir.join("ext4"));
        let made =
            std::fs::File::create(&image).and_then(|file| file.set_len(bytes * 5 / 4 + (64 << 20)));
        made.and_then(|()| std::fs::create_dir(&mount)).map_err(|e| e.to_string())?;
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount))?;
        Ok(Self(mount))
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        if let Err(why) = run(Command::new("umount").arg(&self.0)) {
            eprintln!("corbel: cleaning up: {why}");
        }
    }
}

fn run(command: &mut Command) -> std::result::Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|e| format!("{name}: {e}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(()).ok_or_else(|| format!("{name}: {}", said.trim()))
}

/// See the module.
pub fn shared_file(bench: &Bench<'_>) -> Result<Measured> {
    let size = match bench.quick {
        true => Size { bytes: 64 << 20, turn: Duration::from_millis(400), turns: 3 },
        false => Size { bytes: 1 << 30, turn: Duration::from_secs(2), turns: 5 },
    };
    let world = World::start(bench, World::plan(bench), &[1])?;
    let blocks = (size.bytes / 65536).to_string();
    // Written by a process that has ended: what is read first is published.
    super::load::figures(world.under_run(1, &["fill", &world.file(1, NAME), "65536", &blocks])?)?;
    let ext4 = match Ext4::make(world.scratch(), size.bytes) {
        Ok(ext4) => Some(ext4),
        Err(why) => {
            bench.out.step(format!("  without ext4: {why}"));
            None
        }
    };
    let on_ext4 = |readers: u64, path: &Path| -> Result<Rate> {
        let open = || OpenOptions::new().read(true).write(true).open(path);
        load(readers, size, open).map_err(|e| failed("ext4", &e))
    };
    let plain = ext4.as_ref().map(|ext4| ext4.0.join(NAME));
    if let Some(plain) = &plain {
        let fill = world.bare(&["fill", &plain.display().to_string(), "65536", &blocks]);
        super::load::figures(fill)?;
    }
    let mut measured = Measured::new();
    let (mut all, mut reads, mut writes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut of_ext4, mut of_own, mut own_writes) = (Vec::new(), Vec::new(), Vec::new());
    for (readers, key) in READERS {
        let (last, mut rates) = (key == "t16", Vec::new());
        for _ in 0..if last { size.turns } else { 1 } {
            crate::signals::check()?;
            // A session of its own each time, so that both begin with what is published.
            let rate = Library::attach(&world, true)?.load(readers, size)?;
            rates.push(rate.all());
            if last {
                reads.push(rate.reads);
                writes.push(rate.writes);
                let rate = Library::attach(&world, false)?.load(readers, size)?;
                of_own.push(rate.all());
                own_writes.push(rate.writes);
                if let Some(plain) = &plain {
                    of_ext4.push(on_ext4(readers, plain)?.all());
                }
            }
        }
        all.push(median(rates));
        measured.push((key, all[all.len() - 1]));
    }
    let most = all[all.len() - 1];
    measured.push(("t16_reads", median(reads)));
    measured.push(("t16_writes", median(writes)));
    measured.push(("own_inode_lock_t16", median(of_own.clone())));
    // Of a mix that nobody fixes: who writes less reads more, where both share few processors.
    measured.push(("own_inode_lock_t16_writes", median(own_writes)));
    measured.push(("vs_own_inode_lock", most / median(of_own)));
    if !of_ext4.is_empty() {
        let ext4 = median(of_ext4);
        measured.push(("ext4_t16", ext4));
        measured.push(("vs_ext4_16", most / ext4));
    }
    measured.push(("replicas", f64::from(bench.replicas)));
    drop(ext4);
    let _ = std::fs::remove_file(world.file(1, NAME)).context("the shared file");
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The load itself, on an ordinary file: it counts what it does, and says what is wrong.
    #[test]
    fn the_load_counts_reads_and_writes() {
        let path = std::env::temp_dir().join(format!("corbel-shared-{}", std::process::id()));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let size = Size { bytes: 1 << 20, turn: Duration::from_millis(30), turns: 1 };
        let open = || OpenOptions::new().read(true).write(true).open(&path);
        let rate = load(2, size, open).unwrap();
        assert!(rate.reads > 0.0 && rate.writes > 0.0);
        // (A file that writers make longer has bytes soon wherever it is read.)
        let empty = || OpenOptions::new().read(true).write(true).open("/dev/null");
        let said = load(2, size, empty).map(|rate| rate.all()).unwrap_err().to_string();
        assert!(said.contains("0 bytes at"), "{said}");
        std::fs::remove_file(&path).unwrap();
    }
}
