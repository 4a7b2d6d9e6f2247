//! The load program: C source carried in this binary, compiled with cc when a bench needs it, so
//! that what is measured is an ordinary program.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::failure::{Context, Failure, Kind, Result};

const SOURCE: &str = include_str!("../../../bench/load.c");
const GREEDY: &str = include_str!("../../../bench/greedy.c");
const LSM: &str = include_str!("../../../bench/lsm.c");
const SQLITE: &str = include_str!("../../../bench/sqlite.py");

/// Compiles the load program into `dir`.
pub fn compile(dir: &Path) -> Result<PathBuf> {
    let (source, program) = (dir.join("load.c"), dir.join("load"));
    std::fs::write(&source, SOURCE).context(source.display())?;
    cc(&["-O2", "-o"], &[&program, &source], &[])?;
    Ok(program)
}

/// The same for the program that asks for much.
pub fn compile_greedy(dir: &Path) -> Result<PathBuf> {
    let (source, program) = (dir.join("greedy.c"), dir.join("greedy"));
    std::fs::write(&source, GREEDY).context(source.display())?;
    cc(&["-O2", "-o"], &[&program, &source], &[])?;
    Ok(program)
}

/// The same for the log-structured merge tree.
pub fn compile_lsm(dir: &Path) -> Result<PathBuf> {
    let (source, program) = (dir.join("lsm.c"), dir.join("lsm"));
    std::fs::write(&source, LSM).context(source.display())?;
    cc(&["-O2", "-pthread", "-o"], &[&program, &source], &[])?;
    Ok(program)
}

/// Runs the compiler.
pub fn cc(options: &[&str], paths: &[&Path], libraries: &[&str]) -> Result<()> {
    let mut command = Command::new("cc");
    let output = command.args(options).args(paths).args(libraries).output().map_err(|error| {
        Failure::new(
            Kind::Environment,
            format!("cc: {error}"),
            "install a C compiler (apt-get install gcc libc6-dev)",
        )
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::failed(format!("cc failed: {}", said.trim()), "apt-get install gcc libc6-dev"))
}

/// Writes the SQLite load into `dir`.
pub fn sqlite_script(dir: &Path) -> Result<PathBuf> {
    let script = dir.join("sqlite.py");
    std::fs::write(&script, SQLITE).context(script.display())?;
    Ok(script)
}

/// The Python that has sqlite3: the system's own before one of the user's.
pub fn python() -> Result<PathBuf> {
    let candidates = ["/usr/bin/python3", "/usr/local/bin/python3"];
    candidates.iter().map(PathBuf::from).find(|path| path.exists()).ok_or_else(|| {
        Failure::new(
            Kind::Environment,
            "no python3 in /usr/bin or /usr/local/bin",
            "apt-get install python3",
        )
    })
}

/// Runs a command to its end; the last line of its output is JSON.
pub fn figures(mut command: Command) -> Result<Value> {
    let output = command.stdin(Stdio::null()).output().context(name(&command))?;
    crate::signals::check()?;
    let (text, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        let last: Vec<&str> = said.trim().lines().rev().take(4).collect();
        let last = last.into_iter().rev().collect::<Vec<_>>().join(" / ");
        return Err(Failure::failed(
            format!("{} ended with {}: {last}", name(&command), output.status),
            "see the logs of the services; --keep leaves them",
        ));
    }
    let line = text.trim().lines().last().unwrap_or("");
    serde_json::from_str(line).map_err(|_| {
        Failure::failed(format!("{} printed {line:?}, no figures", name(&command)), "")
    })
}

/// What a command runs, for messages: the words from the last `--` on, paths cut to names.
pub fn name(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    let from = words.iter().rposition(|word| *word == "--").map_or(0, |at| at + 1);
    let short = |word: &&std::ffi::OsStr| {
        let name = Path::new(word).file_name().unwrap_or(word);
        name.to_string_lossy().into_owned()
    };
    words[from..].iter().map(short).collect::<Vec<_>>().join(" ")
}

/// A number in an object of figures.
pub fn number(figures: &Value, key: &str) -> Result<f64> {
    figures[key].as_f64().ok_or_else(|| Failure::failed(format!("no figure {key}: {figures}"), ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The load program itself, on an ordinary file system: every load runs, and `verify` sees a
    /// record that was damaged.
    #[test]
    fn loads_run_on_an_ordinary_file_system() {
        let dir = std::env::temp_dir().join(format!("corbel-load-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let program = compile(&dir).unwrap();
        let run = |args: &[&str]| {
            let mut command = Command::new(&program);
            command.current_dir(&dir).args(args);
            command
        };
        for load in [
            "persist", "write", "append", "seq", "read", "memcpy", "mixed-0", "mixed-80", "rewrite",
        ] {
            let got = figures(run(&[load, "f", "4096", "100"])).unwrap();
            assert_eq!(got["ops"], 100, "{load}");
        }
        assert_eq!(figures(run(&["files", ".", "4096", "10"])).unwrap()["ops"], 10);
        assert_eq!(figures(run(&["tmp", ".", "4096", "10"])).unwrap()["ops"], 10);
        assert_eq!(figures(run(&["turns", "t", "4096", "10"])).unwrap()["ops"], 10);
        std::fs::write(dir.join("turn"), [0; 4096]).unwrap();
        let mut other = run(&["peer-1", "p", "4096", "10", "turn"]).spawn().unwrap();
        let peer = figures(run(&["peer-0", "p", "4096", "10", "turn"])).unwrap();
        assert!(peer["ops"] == 10 && other.wait().unwrap().success());
        for load in ["varmail", "server", "stream"] {
            let got = figures(run(&[load, ".", "40000", "20"])).unwrap();
            assert!(got["ops"].as_u64() > Some(0), "{load}: {got}");
        }
        ["tmp", "new"].iter().for_each(|name| std::fs::create_dir(dir.join(name)).unwrap());
        let mailed = figures(run(&["mail", ".", "4096", "20"])).unwrap()["ops"].as_u64();
        let there = std::fs::read_dir(dir.join("new")).unwrap().count() as u64;
        assert!(there > 0 && mailed == Some(there));
        for (args, code) in [(&["append", "f", "0", "1"][..], 2), (&["x", "f", "16", "1"], 2)] {
            assert_eq!(run(args).output().unwrap().status.code(), Some(code));
        }
        run(&["records", "r", "5", "10"]).output().unwrap();
        run(&["records", "r", "5", "10"]).output().unwrap();
        let whole = figures(run(&["verify", "r"])).unwrap();
        assert_eq!((&whole["records"], &whole["bad"]), (&10.into(), &0.into()));
        let mut bytes = std::fs::read(dir.join("r")).unwrap();
        bytes[3 * 4096 + 77] ^= 1;
        std::fs::write(dir.join("r"), bytes).unwrap();
        let damaged = figures(run(&["verify", "r"])).unwrap();
        assert_eq!((&damaged["records"], &damaged["bad"]), (&3.into(), &4.into()));
        std::fs::create_dir(dir.join("sort")).unwrap();
        assert_eq!(figures(run(&["sort-60", "sort", "100", "4000"])).unwrap()["ops"], 4000);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// The tree as well: what it was given it has, also what was only in its log, and when it was opened anew.
    #[test]
    fn the_tree_has_what_it_was_given() {
        let dir = std::env::temp_dir().join(format!("corbel-lsm-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let program = compile_lsm(&dir).unwrap();
        let run = |load: &str, tree: &str, count: &str| {
            let mut command = Command::new(&program);
            command.current_dir(&dir).args([load, tree, "1024", count]);
            command
        };
        for tree in ["seq", "random", "sync"] {
            std::fs::create_dir(dir.join(tree)).unwrap();
        }
        assert_eq!(figures(run("fillseq", "seq", "9000")).unwrap()["ops"], 9000);
        for load in ["readseq", "readrandom", "readhot", "readseq"] {
            assert_eq!(figures(run(load, "seq", "9000")).unwrap()["found"], 9000, "{load}");
        }
        // Each key that was drawn, once, though most were overwritten, and tables were merged.
        assert_eq!(figures(run("fillrandom", "random", "30000")).unwrap()["ops"], 30000);
        let found = |count| figures(run("readseq", "random", count)).unwrap()["found"].as_u64();
        let there = found("30000").unwrap();
        assert!((15_000..25_000).contains(&there), "{there}");
        assert_eq!(found("30000"), Some(there));
        figures(run("fillsync", "sync", "50")).unwrap();
        let logged = figures(run("readseq", "sync", "50")).unwrap()["found"].as_u64();
        assert!(logged > Some(20), "{logged:?}");
        assert_eq!(run("fillsync", "none", "50").output().unwrap().status.code(), Some(1));
        assert_eq!(run("x", "sync", "50").output().unwrap().status.code(), Some(2));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
