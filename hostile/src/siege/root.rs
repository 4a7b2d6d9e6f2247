//! The super-user's side: lays the ground, starts each attack as the stranger, does what it asks for, and looks whether the
//! cluster serves as before.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::attacker::Attacker;
use super::{Attack, Ground, Outcome, STRANGER, Tried, arenas};

/// No attack takes longer.
const LIMIT: Duration = Duration::from_secs(300);
/// What is appended, or freed, has been published after this time.
const PUBLISHED: Duration = Duration::from_secs(20);

/// How one ended, and what was wrong afterwards.
#[derive(Debug)]
pub struct Ended {
    /// Which.
    pub attack: Attack,
    /// How.
    pub outcome: Tried,
}

/// Lets other users attach to the services of a cluster, as an administrator does who wants them to.
pub fn open_doors(cluster: &Path) -> std::io::Result<()> {
    for dir in ["", "n1", "n1/run", "n2"] {
        fs::set_permissions(cluster.join(dir), fs::Permissions::from_mode(0o711))?;
    }
    Ok(())
}

/// Runs one, in a process of the stranger's.
pub fn run(attack: Attack, cluster: &Path, program: &Path) -> Ended {
    let name = format!("{}-{}", attack.name, std::process::id());
    let ground = Ground::new(cluster, &name);
    let outcome = ground.make().map_err(|e| format!("the ground: {e}"));
    let outcome = outcome.and_then(|()| besiege(attack, &ground, program));
    // Whatever came of it, the super-user is served, on both nodes.
    let outcome = outcome.map(|outcome| match serves(&ground) {
        Ok(_) => outcome,
        Err(e) => Outcome::Succeeded(format!("root is not served any more: {e} ({outcome:?})")),
    });
    let _ = fs::remove_dir_all(ground.path(""));
    Ended { attack, outcome }
}

fn besiege(attack: Attack, ground: &Ground, program: &Path) -> Tried {
    let mut command = Command::new(program);
    command.args(["--attack", attack.name]).arg(&ground.cluster).arg(&ground.name).current_dir("/");
    command.uid(STRANGER).gid(STRANGER).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("{}: {e}", program.display()))?;
    let watch = child.id();
    let (told, ended) = std::sync::mpsc::channel::<()>();
    // Nobody waits for ever for an attacker.
    let guard = std::thread::spawn(move || {
        if ended.recv_timeout(LIMIT).is_err()
            && let Some(pid) = rustix::process::Pid::from_raw(watch as i32)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    let outcome = converse(&mut child, ground);
    drop(told);
    let _ = child.kill();
    let _ = child.wait();
    let _ = guard.join();
    outcome
}

fn converse(child: &mut Child, ground: &Ground) -> Tried {
    let (Some(mut to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("no pipes".into());
    };
    let mut started = Started::default();
    for line in BufReader::new(from).lines() {
        let line = line.map_err(|e| e.to_string())?;
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "held" => return Ok(Outcome::Held(rest.to_owned())),
            "succeeded" => return Ok(Outcome::Succeeded(rest.to_owned())),
            "untried" => return Err(rest.to_owned()),
            "ask" => {
                let answer = match asked(rest, ground, &mut started) {
                    Ok(said) => format!("ok {said}\n"),
                    Err(e) => format!("no {}\n", e.replace('\n', " ")),
                };
                to.write_all(answer.as_bytes()).map_err(|e| e.to_string())?;
            }
            _ => return Err(format!("it says {line:?}")),
        }
    }
    Err("it ended without a word".into())
}

/// What the super-user has started for an attack: it ends with its input.
#[derive(Default)]
struct Started(Vec<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        for child in &mut self.0 {
            drop(child.stdin.take());
            let begin = Instant::now();
            while matches!(child.try_wait(), Ok(None)) && begin.elapsed() < PUBLISHED {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn asked(what: &str, ground: &Ground, started: &mut Started) -> Result<String, String> {
    let words: Vec<&str> = what.split(' ').collect();
    let path = |part: &str| ground.path(part);
    let io = |e: std::io::Error| e.to_string();
    match words[..] {
        ["serve"] => serves(ground).map(|took| took.as_millis().to_string()),
        ["touch", part] => {
            let begin = Instant::now();
            fs::write(path(part), b"x").map_err(io)?;
            Ok(begin.elapsed().as_millis().to_string())
        }
        ["session"] => session(&ground.cluster, started),
        ["ports"] => ports(&ground.cluster).map_err(io),
        ["attach"] => Attacker::attach(&ground.socket()).map(|_| String::new()),
        ["number", part] => {
            let number = fs::symlink_metadata(path(part)).map_err(io)?;
            Ok(std::os::unix::fs::MetadataExt::ino(&number).to_string())
        }
        ["stat", part] => ground.stat(part).map_err(io),
        ["read", part] => fs::read(ground.there(part))
            .map_err(io)
            .map(|bytes| format!("{:.60}", String::from_utf8_lossy(&bytes))),
        ["remove", part] => fs::remove_file(path(part)).map_err(io).map(|()| String::new()),
        ["mode", part, bits] => {
            let bits = u32::from_str_radix(bits, 8).map_err(|e| e.to_string())?;
            fs::set_permissions(path(part), fs::Permissions::from_mode(bits)).map_err(io)?;
            Ok(String::new())
        }
        ["rename", from, to] => {
            fs::rename(path(from), path(to)).map_err(io).map(|()| String::new())
        }
        // The super-user is shown all arenas: it is there to be found.
        ["find", part] => {
            let (root, begin) = (Attacker::attach(&ground.socket())?, Instant::now());
            loop {
                let found = arenas::search(&root, &ground.marker(part))?;
                if found > 0 {
                    return Ok(found.to_string());
                }
                if begin.elapsed() > PUBLISHED {
                    return Err(format!("{part} is in no arena"));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        _ => Err(format!("what is {what:?}?")),
    }
}

/// A session of programs under `corbel run`, with files of the volume open; the name of its socket.
fn session(cluster: &Path, started: &mut Started) -> Result<String, String> {
    let own = std::env::current_exe().map_err(|e| e.to_string())?;
    let (node, program) = (cluster.join("n1"), own.with_file_name("corbel"));
    let mut command = Command::new(&program);
    command.arg("run").arg("--mount").arg(node.join("mnt"));
    command.arg("--socket").arg(node.join("run/hostd.sock")).args(["--", "sh", "-c"]);
    // Programs that share a file, which they write behind one another: the kernel's, and the session's.
    command.args(["exec 3<>$0; (echo a >&3); cat <&3; read end", "session-file"]);
    command.current_dir(node.join("mnt")).stdin(Stdio::piped()).stdout(Stdio::null());
    let child = command.spawn().map_err(|e| format!("{}: {e}", program.display()))?;
    let (name, begin) = (format!("corbel-run-0-{}", child.id()), Instant::now());
    started.0.push(child);
    while begin.elapsed() < PUBLISHED {
        let all = fs::read_to_string("/proc/net/unix").unwrap_or_default();
        if all.lines().any(|line| line.ends_with(&format!("@{name}"))) {
            std::thread::sleep(Duration::from_millis(500));
            return Ok(name);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(format!("there is no socket {name}"))
}

/// TCP ports on which processes listen whose command names the cluster's directory.
fn ports(cluster: &Path) -> std::io::Result<String> {
    let mut sockets = std::collections::HashSet::new();
    let mut whose = 0;
    for process in fs::read_dir("/proc")?.flatten().map(|e| e.path()) {
        // Each may end meanwhile.
        let Ok(command) = fs::read(process.join("cmdline")) else { continue };
        if !String::from_utf8_lossy(&command).contains(&*cluster.to_string_lossy()) {
            continue;
        }
        whose += 1;
        for fd in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            if let Ok(to) = fs::read_link(fd.path())
                && let Some(number) = to.to_string_lossy().strip_prefix("socket:[")
            {
                sockets.insert(number.trim_end_matches(']').to_owned());
            }
        }
    }
    if whose < 2 {
        return Err(std::io::Error::other("no process names the cluster's directory"));
    }
    let mut ports = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in fs::read_to_string(table).unwrap_or_default().lines() {
            // Local address, state, inode: proc(5).
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [_, local, _, "0A", _, _, _, _, _, inode, ..] = words[..]
                && sockets.contains(inode)
                && let Some((_, port)) = local.rsplit_once(':')
                && let Ok(port) = u16::from_str_radix(port, 16)
            {
                ports.push(port.to_string());
            }
        }
    }
    Ok(ports.join(" "))
}

/// A write and fsync on each node, read on the other; how long it took.
fn serves(ground: &Ground) -> Result<Duration, String> {
    let begin = Instant::now();
    let (here, there) = (ground.path("serves"), ground.there("serves"));
    for (to, from, text) in [(&here, &there, "one"), (&there, &here, "two")] {
        let mut file = fs::File::create(to).map_err(|e| format!("{}: {e}", to.display()))?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(|e| format!("fsync: {e}"))?;
        let read = fs::read_to_string(from).map_err(|e| format!("{}: {e}", from.display()))?;
        if read != text {
            return Err(format!("{} is {read:?} and not {text:?}", from.display()));
        }
    }
    Ok(begin.elapsed())
}
