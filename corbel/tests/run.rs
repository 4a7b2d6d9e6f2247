//! `corbel run` with real programs. Each script runs twice: natively in a plain directory, and
//! under `corbel run` on a mount; the output must be the same.
//!
//! Needs root and /dev/fuse for the mount (a container without them says so and passes).

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const CORBEL: &str = env!("CARGO_BIN_EXE_corbel");
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run");
/// A test that takes longer hangs.
const LIMIT_S: &str = "100";

/// Builds the library (alone, as it must be: see intercept/Cargo.toml).
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "intercept"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo runs").success(), "intercept builds");
        Path::new(CORBEL).with_file_name("libintercept.so")
    })
}

/// A scratch directory in memory with a directory mounted through the dir back end.
struct World {
    dir: PathBuf,
    server: Child,
}

impl World {
    fn new(name: &str) -> Option<Self> {
        library();
        if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: no right to mount here");
            return None;
        }
        let dir = PathBuf::from(format!("/dev/shm/corbel-run-{name}-{}", std::process::id()));
        for part in ["native", "back", "mnt", "cache"] {
            fs::create_dir_all(dir.join(part)).unwrap();
        }
        let mut command = Command::new(CORBEL);
        let source = format!("dir:{}", dir.join("back").display());
        command.args(["mount", "-f", &source]).arg(dir.join("mnt"));
        let server = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap();
        let world = World { dir, server };
        let point = format!(" {} ", world.path("mnt").display());
        let end = Instant::now() + Duration::from_secs(10);
        while !fs::read_to_string("/proc/self/mounts").unwrap().contains(&point) {
            assert!(Instant::now() < end, "not mounted");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(world)
    }

    fn path(&self, part: &str) -> PathBuf {
        self.dir.join(part)
    }

    fn mount(&self) -> PathBuf {
        self.path("mnt")
    }

    /// `corbel run` with the fast path, the program to be added.
    fn run(&self) -> Command {
        let mut command = Command::new("timeout");
        command.arg(LIMIT_S).arg(CORBEL).args(["run", "--mount"]).arg(self.mount());
        command.args(["--audit", "--"]);
        command.env("CORBEL_BACKEND", format!("dir:{}", self.path("back").display()));
        command.env("XDG_CACHE_HOME", self.path("cache"));
        command
    }

    fn shell(&self, script: &str) -> Output {
        let output = self.run().args(["bash", "-c", script]).current_dir(self.mount()).output();
        output.unwrap()
    }

    /// Compiles a C program of the scripts; `None` without a compiler.
    fn compile(&self, name: &str, args: &[&str]) -> Option<PathBuf> {
        let to = self.path(name);
        let mut cc = Command::new("cc");
        cc.args(["-w", "-O1"]).arg(format!("{SCRIPTS}/{name}.c")).arg("-o").arg(&to).args(args);
        cc.status().is_ok_and(|status| status.success()).then_some(to)
    }

    /// Runs `program` in both views and compares.
    fn same(&self, program: &[&OsStr], env: &[(&str, &Path)]) -> Output {
        self.same_in(self.run(), program, env)
    }

    /// The same with the strict mode.
    fn strict(&self) -> Command {
        let mut command = Command::new("timeout");
        command.arg(LIMIT_S).arg(CORBEL).args(["run", "--mode", "strict", "--mount"]);
        command.arg(self.mount()).args(["--audit", "--"]);
        command.env("CORBEL_BACKEND", format!("dir:{}", self.path("back").display()));
        command.env("XDG_CACHE_HOME", self.path("cache"));
        command
    }

    fn same_in(&self, caught: Command, program: &[&OsStr], env: &[(&str, &Path)]) -> Output {
        let run = |mut command: Command, dir: PathBuf| {
            command.args(program).arg(&dir).env("TMPDIR", &dir);
            for (name, value) in env {
                command.env(name, value);
            }
            command.output().unwrap()
        };
        let mut native = Command::new("timeout");
        native.arg(LIMIT_S);
        let native = run(native, self.path("native"));
        let caught = run(caught, self.mount());
        let text = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
        let (a, b) = (text(&native), text(&caught));
        for (i, (native, caught)) in a.lines().zip(b.lines()).enumerate() {
            assert_eq!(native, caught, "line {} of {program:?}", i + 1);
        }
        let errors = String::from_utf8_lossy(&caught.stderr);
        assert_eq!(a.lines().count(), b.lines().count(), "{errors}");
        assert_eq!(native.status.code(), caught.status.code(), "{errors}");
        assert!(a.lines().count() > 10, "{a}{}", String::from_utf8_lossy(&native.stderr));
        assert!(audit(&caught, "fast") > 0, "{errors}");
        caught
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.mount()).status();
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// What `--audit` says.
fn audited(output: &Output) -> serde_json::Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    let line = errors.lines().rev().find(|line| line.starts_with("{\"demoted\""));
    serde_json::from_str(line.unwrap_or("{}")).unwrap_or_default()
}

/// A counter of it.
fn audit(output: &Output, key: &str) -> u64 {
    audited(output)[key].as_u64().unwrap_or(0)
}

/// Requests of hooked processes that reached the mount.
fn reached(output: &Output, op: &str) -> u64 {
    let all = &audited(output)["fuse"];
    assert!(all.is_object(), "{all}");
    all[op].as_u64().unwrap_or(0)
}

fn stdout(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_library_needs_nothing_and_offers_nothing() {
    let readelf = |flag: &str| {
        let output = Command::new("readelf").args(["-W", flag]).arg(library()).output();
        output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default()
    };
    let dynamic = readelf("-d");
    if dynamic.is_empty() {
        eprintln!("skipped: no readelf");
        return;
    }
    assert!(dynamic.contains("INIT_ARRAY"), "{dynamic}");
    for word in ["NEEDED", "TEXTREL", "JMPREL", "(INIT)"] {
        assert!(!dynamic.contains(word), "{word} in {dynamic}");
    }
    // One entry: the empty symbol 0.
    assert!(readelf("--dyn-syms").contains("contains 1 entry"), "{}", readelf("--dyn-syms"));
    assert!(!readelf("-l").contains("TLS"));
}

#[test]
fn one_description_has_one_offset() {
    let Some(world) = World::new("offsets") else { return };
    let Some(program) = world.compile("static", &["-static"]) else { return };
    let script = format!("{SCRIPTS}/offsets.sh");
    world.same(&["bash".as_ref(), script.as_ref()], &[("STATIC", &program)]);
}

#[test]
fn programs_see_a_file_system_like_any_other() {
    let Some(world) = World::new("programs") else { return };
    let Some(program) = world.compile("static", &["-static"]) else { return };
    let script = format!("{SCRIPTS}/programs.sh");
    world.same(&["bash".as_ref(), script.as_ref()], &[("STATIC", &program)]);
}

#[test]
fn every_call_answers_as_the_kernel_does() {
    let Some(world) = World::new("calls") else { return };
    let Some(program) = world.compile("calls", &["-pthread"]) else { return };
    world.same(&[program.as_os_str()], &[]);
}

/// System calls that libc does not make: caught by the net of the strict mode, and only by it.
#[test]
fn the_strict_mode_catches_calls_made_elsewhere() {
    let Some(world) = World::new("strict") else { return };
    let Some(program) = world.compile("strict", &["-pthread"]) else { return };
    let caught = world.same_in(world.strict(), &[program.as_os_str()], &[]);
    assert!(audit(&caught, "trapped") > 1000, "{caught:?}");
    assert_eq!(audit(&caught, "kernel_opens"), 0, "{caught:?}");
    assert_eq!(reached(&caught, "write"), 0, "{caught:?}");
    assert_eq!(reached(&caught, "mkdir"), 0, "{caught:?}");
    // Without the net they reach the mount, and the audit says so.
    let fresh = world.mount().join("fresh");
    fs::create_dir(&fresh).unwrap();
    let patched = world.run().arg(&program).arg(&fresh).output().unwrap();
    assert_eq!(audit(&patched, "trapped"), 0);
    assert!(reached(&patched, "write") > 100, "{patched:?}");
    assert_eq!(reached(&patched, "mkdir"), 1, "{patched:?}");
}

#[test]
fn programs_run_the_same_in_the_strict_mode() {
    let Some(world) = World::new("strict-programs") else { return };
    let Some(program) = world.compile("static", &["-static"]) else { return };
    let script = format!("{SCRIPTS}/programs.sh");
    world.same_in(world.strict(), &["bash".as_ref(), script.as_ref()], &[("STATIC", &program)]);
}

#[test]
fn every_call_answers_the_same_in_the_strict_mode() {
    let Some(world) = World::new("strict-calls") else { return };
    let Some(program) = world.compile("calls", &["-pthread"]) else { return };
    world.same_in(world.strict(), &[program.as_os_str()], &[]);
}

#[test]
fn what_one_view_writes_the_other_reads() {
    let Some(world) = World::new("views") else { return };
    let text = stdout(&world.shell("echo caught > a; cat a"));
    assert_eq!(text, "caught\n");
    assert_eq!(fs::read_to_string(world.mount().join("a")).unwrap(), "caught\n");
    fs::write(world.mount().join("b"), "mount").unwrap();
    assert_eq!(stdout(&world.shell("cat b; stat -c %s,%h b")), "mount5,1\n");
    // Inode and device numbers are the mount's.
    let ids = "stat -c %d:%i a b .";
    let output = Command::new("sh").args(["-c", ids]).current_dir(world.mount()).output().unwrap();
    assert_eq!(stdout(&world.shell(ids)), stdout(&output));
}

#[test]
fn the_exit_status_is_the_programs() {
    let Some(world) = World::new("status") else { return };
    let code = |script: &str| world.shell(script).status.code();
    assert_eq!(code("exit 42"), Some(42));
    assert_eq!(code("kill -TERM $$"), Some(128 + 15));
    assert_eq!(world.run().arg("/nonexistent").status().unwrap().code(), Some(127));
    assert_eq!(world.run().arg("/etc/passwd").status().unwrap().code(), Some(126));
}

#[test]
fn preloads_of_the_user_stay() {
    let Some(world) = World::new("preload") else { return };
    let mut run = world.run();
    run.env("LD_PRELOAD", "/lib/x86_64-linux-gnu/libm.so.6");
    let output = run.args(["sh", "-c", "sh -c 'echo $LD_PRELOAD'"]).output().unwrap();
    let text = stdout(&output);
    let parts: Vec<&str> = text.trim().split(':').collect();
    assert_eq!(parts.len(), 2, "{text}");
    assert!(parts[0].ends_with("libintercept.so"));
    assert_eq!(parts[1], "/lib/x86_64-linux-gnu/libm.so.6");
}

#[test]
fn a_program_that_cannot_be_hooked_is_named_and_served_by_the_mount() {
    let Some(world) = World::new("static") else { return };
    let Some(program) = world.compile("static", &["-static"]) else { return };
    let output = world.run().arg(&program).args(["echo", "text"]).output().unwrap();
    assert_eq!(stdout(&output), "text\n");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("statically linked"), "{errors}");
    assert_eq!(audit(&output, "fast"), 0);
}

#[test]
fn a_damaged_cache_file_is_made_anew() {
    let Some(world) = World::new("cache") else { return };
    stdout(&world.shell("true"));
    let files: Vec<PathBuf> =
        fs::read_dir(world.path("cache/corbel")).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(!files.is_empty());
    for file in &files {
        fs::write(file, "garbage").unwrap();
    }
    let output = world.shell("echo x > x; cat x");
    assert_eq!(stdout(&output), "x\n");
    assert!(audit(&output, "fast") > 0);
    assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() > 20));
}

#[test]
fn killed_programs_leave_the_session_usable() {
    let Some(world) = World::new("kill") else { return };
    let script = "
        for i in 1 2 3 4 5 6; do
            (while :; do echo line >> log; echo $i > f$i; done) & pid=$!
            sleep 0.0$i; kill -9 $pid; wait $pid 2>/dev/null
        done
        sort -u log; echo end >> log; tail -n 1 log; exec 3>> log; echo shared >&3; tail -n 1 log";
    assert_eq!(stdout(&world.shell(script)), "line\nend\nshared\n");
}

#[test]
fn starting_costs_less_than_three_milliseconds() {
    let Some(world) = World::new("start") else { return };
    let script = "for i in $(seq 40); do /bin/true; done";
    let time = |mut command: Command| {
        let begin = Instant::now();
        assert!(command.args(["sh", "-c", script]).status().unwrap().success());
        begin.elapsed()
    };
    let plain = || {
        let mut native = Command::new("timeout");
        native.arg(LIMIT_S);
        native
    };
    // The best of several rounds: other tests run beside this one.
    let native = (0..8).map(|_| time(plain())).min().unwrap();
    let caught = (0..8).map(|_| time(world.run())).min().unwrap();
    let extra = caught.saturating_sub(native) / 40;
    assert!(extra < Duration::from_millis(3), "{extra:?} a start");
}

#[test]
fn a_signal_ends_both() {
    let Some(world) = World::new("signal") else { return };
    let mut run = Command::new(CORBEL);
    run.args(["run", "--mount"]).arg(world.mount()).args(["--", "sleep", "60"]);
    run.env("CORBEL_BACKEND", format!("dir:{}", world.path("back").display()));
    let mut child = run.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code().or(status.signal()), Some(128 + 15));
}
