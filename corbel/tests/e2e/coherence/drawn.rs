//! Calls drawn from a seed, on the mounts of three nodes and under `corbel run`: files that stay open, are opened
//! anew, mapped, read past the cache; times that are set back, sizes that stay, names that move. Every
//! read is judged.
//!
//! `CORBEL_SEED` chooses the seed, `CORBEL_SECONDS` how long it goes on (the soak's form).

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::random::Random;
use serde_json::{Value, json};

use super::super::harness::{CORBEL, Cluster, TESTS};
use super::{cluster, on};

/// How long each test goes on if nobody says.
const SHORT: Duration = Duration::from_secs(12);
/// Calls shown when one was wrong.
const SHOWN: usize = 40;
/// Longest file.
const LONGEST: u64 = 40_000;

fn seed() -> u64 {
    let given = std::env::var("CORBEL_SEED").ok().and_then(|seed| seed.parse().ok());
    given.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64)
    })
}

fn limit() -> Duration {
    let given = std::env::var("CORBEL_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    given.map_or(SHORT, Duration::from_secs)
}

/// A program that does calls as it is told.
struct Actor {
    name: String,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Actor {
    fn new(cluster: &Cluster, node: usize, hooked: bool) -> Self {
        let mount = cluster.mount(node);
        let mut command = Command::new("timeout");
        command.args(["-k", "5", &(limit().as_secs() + 100).to_string()]).current_dir(&mount);
        if hooked {
            command.args([CORBEL, "run", "--mount"]).arg(&mount);
            command.arg("--socket").arg(cluster.socket(node)).arg("--");
        }
        command.arg("python3").arg(format!("{TESTS}/run/actor.py")).arg(&mount);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("python starts");
        let to = child.stdin.take().expect("a pipe");
        let from = BufReader::new(child.stdout.take().expect("a pipe"));
        let view = if hooked { "run" } else { "mount" };
        Self { name: format!("{view} {node}"), child, to, from }
    }

    fn ask(&mut self, call: &Value) -> Result<Value, String> {
        writeln!(self.to, "{call}").map_err(|e| e.to_string())?;
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(|e| e.to_string())?;
        let said: Value = serde_json::from_str(&line)
            .map_err(|e| format!("{e}: {line:?}, {:?}", self.child.try_wait()))?;
        match &said[1] {
            Value::Null => Ok(said[0].clone()),
            error => Err(error.to_string()),
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// What a file must be.
#[derive(Clone, Default)]
struct Is {
    name: String,
    /// A second name.
    other: Option<String>,
    data: Vec<u8>,
    mode: u64,
    /// Times of modification and change, once somebody has seen them.
    mtime: Option<i64>,
    ctime: Option<i64>,
}

struct Play {
    random: Random,
    actors: Vec<Actor>,
    files: Vec<Is>,
    trace: VecDeque<String>,
    calls: u64,
    judged: u64,
    names: u64,
}

impl Play {
    fn below(&mut self, n: u64) -> u64 {
        self.random.below(n.max(1))
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.random.below(all.len() as u64) as usize]
    }

    /// A call by an actor, which must work.
    fn ask(&mut self, who: usize, call: Value) -> Value {
        self.calls += 1;
        let mut text = format!("{}: {call}", self.actors[who].name);
        text.truncate(160);
        self.trace.push_back(text);
        if self.trace.len() > SHOWN {
            self.trace.pop_front();
        }
        match self.actors[who].ask(&call) {
            Ok(said) => said,
            Err(error) => self.wrong(&error),
        }
    }

    fn wrong(&self, what: &str) -> ! {
        let trace: Vec<&str> = self.trace.iter().map(String::as_str).collect();
        panic!("{what}\nafter {} calls, the last ones:\n{}", self.calls, trace.join("\n"));
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.random.fill(&mut bytes);
        bytes
    }

    fn changed(&mut self, file: usize) {
        (self.files[file].mtime, self.files[file].ctime) = (None, None);
    }

    /// Writes bytes in some way.
    fn write(&mut self, who: usize, file: usize) {
        let size = self.files[file].data.len() as u64;
        let how = self.pick(&["held", "held", "opened", "direct", "append", "mapped"]);
        let (at, len) = match how {
            "direct" => (512 * self.below(LONGEST / 2 / 512), 512 * (1 + self.below(9))),
            "append" => (size, 1 + self.below(700)),
            "mapped" if size > 1 => {
                let at = self.below(size);
                (at, 1 + self.below((size - at).min(5000)))
            }
            "mapped" => return,
            _ => {
                // Mostly where there is something.
                let most = if self.below(5) == 0 { LONGEST / 2 } else { size.max(1) };
                let at = self.below(most);
                let len = 1 + self.below(6000);
                (at, if self.below(3) > 0 && at < size { len.min(size - at) } else { len })
            }
        };
        let data = self.bytes(len);
        let is = &self.files[file];
        let call = json!(["write", file, is.name, how, at, hex(&data)]);
        self.ask(who, call);
        let is = &mut self.files[file].data;
        is.resize(is.len().max((at + len) as usize), 0);
        is[at as usize..(at + len) as usize].copy_from_slice(&data);
        self.changed(file);
    }

    fn change(&mut self, who: usize, file: usize) {
        let is = self.files[file].clone();
        let size = is.data.len() as u64;
        match self.below(16) {
            0..=6 => self.write(who, file),
            7 => {
                let to = if self.below(2) == 0 { size } else { self.below(LONGEST / 2) };
                let how = self.pick(&["held", "name"]);
                self.ask(who, json!(["cut", file, is.name, how, to]));
                self.files[file].data.resize(to as usize, 0);
                self.changed(file);
            }
            8 => {
                let data = self.bytes(size);
                self.ask(who, json!(["rewrite", file, is.name, hex(&data)]));
                self.files[file].data = data;
                self.changed(file);
            }
            9 => {
                // Punch, and zero with and without the size that follows from it.
                let mode = self.pick(&[3u32, 16, 17]);
                let (at, len) = (self.below(size + 4096), 1 + self.below(9000));
                self.ask(who, json!(["fallocate", file, is.name, mode, at, len]));
                let data = &mut self.files[file].data;
                if mode == 16 {
                    data.resize(data.len().max((at + len) as usize), 0);
                }
                let end = data.len().min((at + len) as usize);
                if (at as usize) < end {
                    data[at as usize..end].fill(0);
                }
                self.changed(file);
            }
            10 => self.copy(who, file),
            11 => {
                let (how, mode) = (self.pick(&["held", "name"]), self.pick(&[0o600, 0o644, 0o755]));
                self.ask(who, json!(["chmod", file, is.name, how, mode]));
                self.files[file].mode = mode;
                self.files[file].ctime = None;
            }
            12 | 13 => self.rename(who, file),
            _ => {
                let ns = 1_600_000_000_000_000_000 + self.below(3) as i64 * 1_000_000_007;
                let how = self.pick(&["held", "name"]);
                self.ask(who, json!(["times", file, is.name, how, ns]));
                self.files[file].mtime = Some(ns);
                self.files[file].ctime = None;
            }
        }
        // As if it had not been.
        if let Some(before) = is.mtime
            && self.files[file].mtime.is_none()
            && self.below(5) < 3
        {
            let by = if self.below(4) == 0 { self.any() } else { who };
            let how = self.pick(&["held", "name"]);
            let name = self.files[file].name.clone();
            self.ask(by, json!(["times", file, name, how, before]));
            self.files[file].mtime = Some(before);
        }
    }

    fn any(&mut self) -> usize {
        let all = self.actors.len() as u64;
        self.below(all) as usize
    }

    fn copy(&mut self, who: usize, file: usize) {
        let from = (file + 1) % self.files.len();
        let (is, source) = (self.files[file].clone(), self.files[from].clone());
        if self.actors[who].name.starts_with("run") && self.below(2) == 0 {
            // All of it, in a file that may be longer.
            let done = self.ask(who, json!(["clone", file, is.name, from, source.name]));
            if done == json!(false) {
                return;
            }
            let data = &mut self.files[file].data;
            data.resize(data.len().max(source.data.len()), 0);
            data[..source.data.len()].copy_from_slice(&source.data);
        } else {
            let size = source.data.len() as u64;
            if size == 0 {
                return;
            }
            let at = self.below(size);
            let (to, len) = (self.below(LONGEST / 2), 1 + self.below(size - at));
            self.ask(who, json!(["copy", file, is.name, from, source.name, at, to, len]));
            let (at, to, len) = (at as usize, to as usize, len as usize);
            let data = &mut self.files[file].data;
            data.resize(data.len().max(to + len), 0);
            data[to..to + len].copy_from_slice(&source.data[at..at + len]);
        }
        self.changed(file);
    }

    fn rename(&mut self, who: usize, file: usize) {
        self.names += 1;
        let new = format!("n{}", self.names);
        let is = self.files[file].clone();
        self.files[file].ctime = None;
        match is.other {
            _ if self.below(3) == 0 => {
                self.ask(who, json!(["rename", file, is.name, new]));
                self.files[file].name = new;
            }
            None => {
                self.ask(who, json!(["link", file, is.name, new]));
                self.files[file].other = Some(new);
            }
            Some(other) => {
                // Either of them goes.
                let (goes, stays) =
                    if self.below(2) == 0 { (is.name, other) } else { (other, is.name) };
                self.ask(who, json!(["unlink", file, goes]));
                (self.files[file].name, self.files[file].other) = (stays, None);
            }
        }
    }

    /// Looks at a file in some way.
    fn look(&mut self, who: usize, file: usize) {
        self.judged += 1;
        let is = self.files[file].clone();
        let size = is.data.len() as u64;
        let name = match is.other {
            Some(other) if self.below(2) == 0 => other,
            _ => is.name,
        };
        match self.below(10) {
            0 | 1 => {
                let how = self.pick(&["held", "name"]);
                let said = self.ask(who, json!(["stat", file, name, how]));
                let [mtime, ctime] = [1, 2].map(|at| said[at].as_i64().unwrap_or(0));
                let links = 1 + u64::from(self.files[file].other.is_some());
                let must = json!([
                    size,
                    is.mtime.unwrap_or(mtime),
                    is.ctime.unwrap_or(ctime),
                    links,
                    is.mode
                ]);
                if said != must {
                    self.wrong(&format!("{}: stat is {said}, not {must}", self.actors[who].name));
                }
                (self.files[file].mtime, self.files[file].ctime) = (Some(mtime), Some(ctime));
            }
            2 => {
                let said = self.ask(who, json!(["end", file, name]));
                if said != json!(size) {
                    self.wrong(&format!(
                        "{}: the end is {said}, not {size}",
                        self.actors[who].name
                    ));
                }
            }
            what => {
                let how = ["held", "held", "held", "opened", "direct", "mapped", "newly"]
                    [what as usize - 3];
                if size == 0 && matches!(how, "mapped" | "newly") {
                    return;
                }
                let (at, len) = match self.below(3) {
                    0 => (0, LONGEST * 2),
                    1 => (self.below(size + 1), 1 + self.below(9000)),
                    // Behind the end as well.
                    _ => (self.below(LONGEST), 1 + self.below(100)),
                };
                // A mapping does not end where the file does.
                let len = if how == "mapped" { len.min(size.saturating_sub(at)) } else { len };
                if how == "mapped" && (len == 0 || self.below(3) == 0) {
                    let call = json!(["close", file, name]);
                    self.ask(who, call);
                    return;
                }
                let said = self.ask(who, json!(["read", file, name, how, at, len]));
                let (from, to) = (at.min(size) as usize, (at + len).min(size) as usize);
                let must = hex(&is.data[from..to]);
                let said = said.as_str().unwrap_or("");
                // A mapping that was made when the file was shorter shows less.
                let fits = if how == "mapped" { must.starts_with(said) } else { must == said };
                if !fits {
                    let first =
                        said.bytes().zip(must.bytes()).take_while(|(a, b)| a == b).count() / 2;
                    self.wrong(&format!(
                        "{}: file {file}, {how}, {at} + {len}: {} bytes, must be {}, the first wrong one is {}",
                        self.actors[who].name,
                        said.len() / 2,
                        must.len() / 2,
                        at + first as u64,
                    ));
                }
            }
        }
    }
}

/// One call after the other, wherever it is: what has returned is what all others see.
#[test]
fn every_look_at_a_file_sees_the_last_change_of_it() {
    let Some(cluster) = cluster() else { return };
    let seed = seed();
    eprintln!("CORBEL_SEED={seed}");
    let actors = [(1, false), (2, false), (3, false), (1, true), (3, true)]
        .map(|(node, hooked)| Actor::new(&cluster, node, hooked));
    let files: Vec<Is> = (0..3)
        .map(|n| Is { name: format!("f{n}"), mode: 0o644, data: vec![7; 9000], ..Is::default() })
        .collect();
    for is in &files {
        fs::write(on(&cluster, 1, &is.name), &is.data).expect("a new file");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        fs::set_permissions(on(&cluster, 1, &is.name), mode).expect("it is ours");
    }
    let mut play = Play {
        random: Random::new(seed),
        actors: actors.into(),
        files,
        trace: VecDeque::new(),
        calls: 0,
        judged: 0,
        names: 0,
    };
    let end = Instant::now() + limit();
    while Instant::now() < end {
        let (who, file) = (play.any(), play.below(3) as usize);
        if play.below(3) == 0 {
            play.change(who, file)
        } else {
            play.look(who, file)
        }
        // Now and then things are quiet for long enough that the kernels keep what they know.
        if play.below(40) == 0 {
            std::thread::sleep(Duration::from_millis(60 + play.below(120)));
        }
    }
    eprintln!("{} calls, {} judged", play.calls, play.judged);
    cluster.assert_nobody_expelled();
    cluster.assert_nothing_refused();
}

/// Slots of 8 bytes in one file, each with its writer; each has a number that only grows.
struct Slots {
    begun: Vec<AtomicU64>,
    done: Vec<AtomicU64>,
}

const SLOTS: usize = 6;
/// Of these some share a page, and some blocks.
const PLACES: [u64; SLOTS] = [0, 8, 4096, 4600, 8192, 12_000];
const STORM_BYTES: usize = 16_384;

/// All at once: writers on every node, each in its own bytes of one file, which keep its size and mostly set
/// its time back; readers on every node, of all bytes, in all ways. Nobody sees less than had returned when it began.
#[test]
fn what_returned_is_seen_among_writers_on_all_nodes() {
    let Some(cluster) = cluster() else { return };
    let seed = seed();
    eprintln!("CORBEL_SEED={seed}");
    fs::write(on(&cluster, 1, "f"), [0; STORM_BYTES]).expect("a new file");
    let slots = Slots {
        begun: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
        done: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
    };
    let (stop, looks) = (AtomicBool::new(false), AtomicU64::new(0));
    let until = Instant::now() + limit();
    let path = |node: usize| on(&cluster, node, "f");
    let open = |node: usize, flags: i32| -> File {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path(node))
            .expect("it is there")
    };
    let writer = |slot: usize| {
        let mut random = Random::new(seed ^ slot as u64);
        let node = 1 + slot % 3;
        let file = open(node, if slot == 4 { libc::O_DIRECT } else { 0 });
        let restored = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000);
        let mut k = 0;
        while Instant::now() < until && !stop.load(Ordering::SeqCst) {
            k += 1;
            slots.begun[slot].store(k, Ordering::SeqCst);
            file.write_all_at(&k.to_le_bytes(), PLACES[slot]).expect("a write");
            match random.below(4) {
                0 => {}
                1 => file.set_len(STORM_BYTES as u64).expect("the same size"),
                _ => file.set_modified(restored).expect("it is ours"),
            }
            slots.done[slot].store(k, Ordering::SeqCst);
            let pause = if random.below(20) == 0 { 130_000 } else { random.below(4) * 300 };
            std::thread::sleep(Duration::from_micros(pause));
        }
    };
    let reader = |number: usize| {
        let mut random = Random::new(seed ^ (100 + number as u64));
        let node = 1 + number % 3;
        let (held, direct) = (open(node, 0), open(node, libc::O_DIRECT));
        while Instant::now() < until && !stop.load(Ordering::SeqCst) {
            let least: Vec<u64> = slots.done.iter().map(|n| n.load(Ordering::SeqCst)).collect();
            let mut bytes = vec![0; STORM_BYTES];
            let how = random.below(4);
            match how {
                0 => direct.read_exact_at(&mut bytes, 0).expect("all of it"),
                1 => bytes = fs::read(path(node)).expect("all of it"),
                2 => bytes = mapped(&File::open(path(node)).expect("it is there")),
                _ => held.read_exact_at(&mut bytes, 0).expect("all of it"),
            }
            assert_eq!(bytes.len(), STORM_BYTES);
            for slot in 0..SLOTS {
                let at = PLACES[slot] as usize;
                let seen = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
                let most = slots.begun[slot].load(Ordering::SeqCst);
                if !(least[slot]..=most).contains(&seen) {
                    stop.store(true, Ordering::SeqCst);
                    let least = least[slot];
                    panic!("node {node}, way {how}, slot {slot}: {seen}, not in {least}..={most}");
                }
            }
            looks.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for slot in 0..SLOTS {
            scope.spawn(move || writer(slot));
        }
        for number in 0..4 {
            scope.spawn(move || reader(number));
        }
        // And one that has no kernel's cache.
        let mut hooked = Actor::new(&cluster, 2, true);
        let (slots, stop) = (&slots, &stop);
        scope.spawn(move || {
            while Instant::now() < until && !stop.load(Ordering::SeqCst) {
                let least: Vec<u64> = slots.done.iter().map(|n| n.load(Ordering::SeqCst)).collect();
                let said =
                    hooked.ask(&json!(["read", 0, "f", "held", 0, STORM_BYTES])).expect("read");
                for slot in 0..SLOTS {
                    let at = 2 * PLACES[slot] as usize;
                    let digits = &said.as_str().expect("bytes")[at..at + 16];
                    let seen = u64::from_str_radix(digits, 16).expect("a number").swap_bytes();
                    let most = slots.begun[slot].load(Ordering::SeqCst);
                    if !(least[slot]..=most).contains(&seen) {
                        stop.store(true, Ordering::SeqCst);
                        panic!("run, slot {slot}: {seen}, not in {}..={most}", least[slot]);
                    }
                }
            }
        });
    });
    let written: u64 = slots.done.iter().map(|n| n.load(Ordering::SeqCst)).sum();
    eprintln!("{written} writes, {looks:?} looks of {SLOTS} slots");
    assert!(written > 20 && looks.into_inner() > 20, "hardly anything happened");
    cluster.assert_nobody_expelled();
}

/// What a mapping made now shows.
fn mapped(file: &File) -> Vec<u8> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let mut bytes = vec![0; STORM_BYTES];
    // SAFETY: a new mapping of so many bytes of a file that is never shorter, which is read within its
    // length and unmapped once.
    #[allow(unsafe_code)]
    unsafe {
        let at = mmap(
            std::ptr::null_mut(),
            STORM_BYTES,
            ProtFlags::READ,
            MapFlags::SHARED,
            file.as_fd(),
            0,
        )
        .expect("a mapping");
        std::ptr::copy_nonoverlapping(at.cast::<u8>(), bytes.as_mut_ptr(), STORM_BYTES);
        munmap(at, STORM_BYTES).expect("it is mapped");
    }
    bytes
}
