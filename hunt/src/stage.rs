//! The director of serial histories: one call at a time over all workers, each carried out beside
//! on the reference, and every result compared.
//!
//! Calls of one process that follow each other are told to it together, so that it makes them as
//! fast as a program would; nobody else does anything meanwhile.

mod section;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirEntryExt as _, FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::ground::Ground;
use crate::judge::{Difference, Judge, Pass};
use crate::peer::{Launch, Peer, Silence};
use crate::script::{Script, Step};
use crate::text::field;
use crate::worker::{SEATS, SLOTS, named_slot};
use section::{Section, is_lossy};

/// A call takes no longer, also while a node restarts and on a busy machine.
const CALL: Duration = Duration::from_secs(120);
/// A mount asks again within a second for the locks of a node that has lost its place (docs/service.md).
const LOCKS_BACK: Duration = Duration::from_millis(1500);
/// Long enough for every clock by which files are stamped to have ticked.
const TICKS: Duration = Duration::from_millis(15);
/// Longer than a mount's kernel keeps names.
const NAMES_KEPT: Duration = Duration::from_millis(300);
/// Calls told to a process at once.
pub const BATCH: usize = 24;
/// How the kind of a difference begins that is a limit of `run` (docs/interception.md).
pub const BARRED: &str = "barred: ";
/// Between the root of a volume and the directory of a history: names may lead upwards.
const NEST: &str = "x/y/z"; // also in worker/processes.rs

/// What a history was run with.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The reference: a directory of a file system of this machine.
    pub reference: PathBuf,
    /// A planted difference.
    pub lie: Option<String>,
    /// Kinds of differences that are known, and after which both sides are still the same.
    pub tolerated: Vec<String>,
    /// Where workers print what goes wrong.
    pub log: PathBuf,
    /// Whether somebody wants it to end.
    pub stopped: fn() -> bool,
}

/// What is told to whoever draws the next steps.
pub trait Source {
    /// The next steps: one that is for all, or several calls of one process. None at the end.
    fn next(&mut self, stage: &Stage<'_>) -> Vec<Step>;
    /// What the reference said to a call.
    fn heard(&mut self, _step: &Step, _answer: &str) {}
    /// All actors have started anew, in an empty directory.
    fn anew(&mut self) {}
    /// This actor has started anew.
    fn begun(&mut self, _actor: usize) {}
}

/// Steps that are known before.
#[derive(Debug)]
pub struct Fixed<'a> {
    rest: &'a [Step],
}

impl<'a> Fixed<'a> {
    /// These steps.
    pub fn new(steps: &'a [Step]) -> Self {
        Self { rest: steps }
    }
}

fn same_process(one: &Step, two: &Step) -> bool {
    matches!((one, two), (Step::Call { actor: a, seat: b, .. }, Step::Call { actor: c, seat: d, .. })
        if (a, b) == (c, d))
}

impl Source for Fixed<'_> {
    fn next(&mut self, _: &Stage<'_>) -> Vec<Step> {
        let Some(first) = self.rest.first() else { return Vec::new() };
        let count =
            self.rest.iter().take(BATCH).take_while(|step| same_process(first, step)).count();
        let (now, rest) = self.rest.split_at(count.max(1));
        self.rest = rest;
        now.to_vec()
    }
}

/// How a history ended.
#[derive(Debug)]
pub struct Outcome {
    /// What happened, up to the difference.
    pub script: Script,
    /// Where it went wrong.
    pub difference: Option<Difference>,
    /// Calls that were made and compared.
    pub calls: u64,
}

/// The end of a file, as far as there is one.
fn last_lines(path: &Path, count: usize) -> String {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

struct Actor {
    real: Peer,
    reference: Peer,
}

impl Actor {
    fn greet(&mut self) -> io::Result<()> {
        self.real.greet(0, CALL)?;
        self.reference.greet(0, CALL)
    }
}

/// Two directories, and the workers of a history on them.
pub struct Stage<'a> {
    ground: &'a mut Ground,
    setting: &'a Setting,
    views: Vec<String>,
    actors: Vec<Actor>,
    judge: Judge,
    /// Directories that descriptors read: actor, seat, slot.
    passes: BTreeMap<(usize, usize, usize), Pass>,
    /// Whether descriptors have been shared, so that nobody knows who reads on where.
    shared: bool,
    /// Somebody has locked something.
    locked: bool,
    /// Nodes whose services were ended in order, and started again, while calls went on.
    ended: BTreeSet<u32>,
    /// Actors under `run` of which a process has executed a program while it had something open that it could not open then.
    executed: BTreeSet<usize>,
    name: String,
    done: Vec<Step>,
    calls: u64,
    /// Calls beside a fault that may cost something.
    section: Option<Section>,
    /// All has just begun anew.
    anew: bool,
    /// Actors that have, without a step that says so.
    begun: Vec<usize>,
}

impl std::fmt::Debug for Stage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").field("name", &self.name).field("calls", &self.calls).finish()
    }
}

/// Runs a history in a directory of that name, which is new and removed afterwards.
pub fn play(
    ground: &mut Ground,
    setting: &Setting,
    name: &str,
    views: &[String],
    source: &mut dyn Source,
) -> io::Result<Outcome> {
    let mut stage = Stage {
        ground,
        setting,
        views: views.to_vec(),
        actors: Vec::new(),
        judge: Judge::default(),
        passes: BTreeMap::new(),
        shared: false,
        locked: false,
        ended: BTreeSet::new(),
        executed: BTreeSet::new(),
        name: name.into(),
        done: Vec::new(),
        calls: 0,
        section: None,
        anew: false,
        begun: Vec::new(),
    };
    stage.judge.atime = is_root();
    let result = stage.run(source);
    let removed = stage.clear();
    let difference = result?;
    removed?;
    let script = Script { actors: stage.views.clone(), steps: std::mem::take(&mut stage.done) };
    Ok(Outcome { script, difference, calls: stage.calls })
}

/// Whether this process may mount, change owners, and so on.
pub fn is_root() -> bool {
    // SAFETY: has no arguments.
    #[allow(unsafe_code)]
    unsafe {
        libc::geteuid() == 0
    }
}

/// Calls that the reference makes only if they succeeded: it cannot tell whether they may.
fn waits_for_real(line: &str) -> bool {
    let words: Vec<&str> = line.split(' ').collect();
    match words[0] {
        "clone" | "clonerange" => true,
        "fallocate" => words.get(2).is_some_and(|mode| {
            ["collapse", "insert", "unshare"].iter().any(|special| mode.contains(special))
        }),
        "lseek" => words.get(3).is_some_and(|whence| matches!(*whence, "data" | "hole")),
        _ => false,
    }
}

/// What differs under `corbel run` for reasons that docs/interception.md tells (limits): a descriptor that has become
/// the kernel's shows no O_NOFOLLOW; one that becomes so while its file is locked may leave a number taken.
fn as_under_run(name: &str, locked: bool, real: &mut String, reference: &str) {
    let (a, b) = (real.clone(), reference);
    match name {
        "getfl" => {
            let flags = |said: &str| {
                let (flags, rest) = said.strip_prefix("0x")?.split_once(' ')?;
                Some((u32::from_str_radix(flags, 16).ok()?, rest.to_string()))
            };
            if let (Some(got), Some(wanted)) = (flags(&a), flags(b))
                && got.0 | libc::O_NOFOLLOW as u32 == wanted.0
                && got.1 == wanted.1
            {
                *real = b.into();
            }
        }
        "open" | "creat" | "dup" | "dup2" | "fdupfd" if locked => {
            let number = |said: &str| said.split(' ').next()?.parse::<i32>().ok();
            if let (Some(got), Some(wanted)) = (number(&a), number(b))
                && wanted >= 0
                && got >= 0
            {
                *real = b.into();
            }
        }
        _ => {}
    }
}

/// Calls for which `corbel run` opens a file anew, through the mount (docs/interception.md).
fn gives_away(line: &str) -> bool {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["flock" | "lock", ..] | ["getlk", _, "ofd", ..] => true,
        ["linkfd", _, _, "empty"] => true,
        ["mmap", _, _, _, _, _, kind, ..] => kind.contains("shared"),
        _ => false,
    }
}

/// What such a call says if the file cannot be opened now as it was once.
fn is_barred(line: &str, answer: &str) -> bool {
    answer == "-1 EACCES" && gives_away(line)
}

/// Calls that make what is in a file durable.
fn is_sync(name: &str) -> bool {
    matches!(name, "fsync" | "fdatasync")
}

/// Calls of which more may be asked before their answers are judged: nothing that was told after them may lie in between.
fn is_asked_again(line: &str) -> bool {
    let name = line.split(' ').next().unwrap_or_default();
    name == "getcwd" || line.contains("dontsync") || looks_first(name) || makes_name(line)
}

/// Calls that make a name.
fn makes_name(line: &str) -> bool {
    match line.split(' ').next().unwrap_or_default() {
        "creat" | "mkdir" | "mknod" | "symlink" | "link" | "linkfd" | "rename" => true,
        name => name == "open" && line.contains("creat"),
    }
}

/// Changes that a mount's kernel may refuse, or for another reason, until it has looked again (docs/mount.md).
fn looks_first(name: &str) -> bool {
    let changes = ["chmod", "chown", "utimens", "setacl", "setxattr", "removexattr", "linkfd"];
    changes.iter().any(|change| name.ends_with(change))
}

/// Calls that are told alone.
fn alone(line: &str) -> bool {
    let name = line.split(' ').next().unwrap_or_default();
    matches!(name, "fork" | "exec" | "spawn" | "exit" | "getdents" | "seekdir")
        || waits_for_real(line)
}

impl Stage<'_> {
    /// The directory of the history on the reference.
    pub fn reference(&self) -> PathBuf {
        self.setting.reference.join(&self.name).join(NEST)
    }

    fn real(&self, view: &str) -> PathBuf {
        self.ground.view(view).root.join(&self.name).join(NEST)
    }

    fn run(&mut self, source: &mut dyn Source) -> io::Result<Option<Difference>> {
        let real = self.real(&self.views[0].clone());
        for dir in [real, self.reference()] {
            fs::create_dir_all(&dir)?;
            // For users who are not root.
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o777))?;
        }
        for actor in 0..self.views.len() {
            let started = self.start(actor)?;
            self.actors.push(started);
        }
        self.actors.iter_mut().try_for_each(Actor::greet)?;
        loop {
            let steps = source.next(self);
            if steps.is_empty() || (self.setting.stopped)() {
                break;
            }
            if let Some(difference) = self.take(&steps, source)? {
                return Ok(Some(difference));
            }
            self.begun.drain(..).for_each(|actor| source.begun(actor));
            if std::mem::take(&mut self.anew) {
                source.anew();
            }
        }
        self.ground.heal()?;
        Ok(None)
    }

    fn start(&self, actor: usize) -> io::Result<Actor> {
        let view = self.ground.view(&self.views[actor]);
        let root = self.real(&view.name);
        let log = &self.setting.log;
        let lie = self.setting.lie.as_deref();
        let plain = !self.ground.has_services();
        let ends = !plain;
        let prefix = &view.prefix[..];
        let real = Launch { prefix, root: &root, reference: false, plain, ends, lie, log };
        let root = self.reference();
        let (prefix, lie) = (&[][..], None);
        let reference =
            Launch { prefix, root: &root, reference: true, plain: true, ends, lie, log };
        Ok(Actor { real: Peer::start(&real)?, reference: Peer::start(&reference)? })
    }

    /// Ends all workers, and removes both directories.
    fn clear(&mut self) -> io::Result<()> {
        let _ = self.ground.heal();
        let _ = self.ground.free();
        self.actors.clear();
        let real = self.ground.view(&self.views[0]).root.join(&self.name);
        let reference = self.setting.reference.join(&self.name);
        remove(&reference)?;
        remove(&real)
    }

    fn difference(&self, step: &Step, kind: String, expected: &str, got: &str) -> Difference {
        Difference {
            step: self.done.len() - 1,
            text: step.to_string(),
            kind,
            expected: expected.into(),
            got: got.into(),
            detail: String::new(),
        }
    }

    /// Nothing happens for some ticks, and for so long after the middle of that. What comes next is stamped by clocks that are some ticks
    /// behind: not before the pause.
    fn pause(&mut self, after: Duration) {
        std::thread::sleep(TICKS);
        self.judge.pause();
        std::thread::sleep(TICKS.max(after));
    }

    fn take(&mut self, steps: &[Step], source: &mut dyn Source) -> io::Result<Option<Difference>> {
        let step = &steps[0];
        match step {
            Step::Call { .. } => return self.calls(steps, source),
            Step::Pause(ms) => {
                self.pause(Duration::from_millis(*ms).saturating_sub(TICKS));
                self.done.push(step.clone());
            }
            Step::Fault(what) => {
                self.done.push(step.clone());
                return self.fault(step, what);
            }
            Step::Calm => {
                self.done.push(step.clone());
                return self.calm(step);
            }
            Step::Restart(actor) => {
                self.done.push(step.clone());
                return self.start_anew(step, *actor);
            }
            Step::Sweep(way) => {
                self.done.push(step.clone());
                if self.is_loose() {
                    return Ok(None);
                }
                return match self.sweep(step, *way) {
                    Some(difference) if self.excuse(&difference)? => Ok(None),
                    found => Ok(found),
                };
            }
        }
        Ok(None)
    }

    fn fault(&mut self, step: &Step, what: &str) -> io::Result<Option<Difference>> {
        let beside = what.strip_suffix('&').map(str::trim);
        let what = beside.unwrap_or(what);
        let leave = what.strip_prefix("full").map(|rest| rest.trim().parse().unwrap_or(0));
        if !self.ground.has_services() {
            return Ok(None);
        }
        if is_lossy(what) {
            let begun = if beside.is_some() || leave.is_some() {
                self.begin_section(step, leave.is_some())?
            } else {
                // Nothing is under way: then nothing is lost, and nothing said.
                self.sync_all(step).filter(|_| !self.is_loose())
            };
            if begun.is_some() {
                return Ok(begun);
            }
        }
        if let Some(leave) = leave {
            self.ground.fill(leave)?;
            return Ok(None);
        }
        let epoch = self.ground.epoch()?;
        self.ground.fault(what, beside.is_some())?;
        if let Some(node) = what.strip_prefix("term ").filter(|_| self.locked) {
            if beside.is_none() {
                std::thread::sleep(LOCKS_BACK);
            } else if let Ok(node) = node.trim().parse() {
                self.ended.insert(node);
            }
        }
        if beside.is_none() && is_lossy(what) && self.ground.epoch()? != epoch {
            if self.locked {
                std::thread::sleep(LOCKS_BACK);
            }
            return self.leave_stale(step, what);
        }
        Ok(None)
    }

    /// What an ordinary user had open on a node that has lost its place is stale, the working directory too, as the service
    /// knows of nobody there any more what it was shown (docs/service.md): such actors begin anew.
    fn leave_stale(&mut self, step: &Step, what: &str) -> io::Result<Option<Difference>> {
        let node = |actor: usize| self.ground.view(&self.views[actor]).node.to_string();
        let there: Vec<usize> = (0..self.actors.len())
            .filter(|actor| self.views[*actor].starts_with('r'))
            .filter(|actor| {
                what.starts_with("coordinator")
                    || what.split_whitespace().nth(1) == Some(&node(*actor)[..])
            })
            .collect();
        for number in there {
            let peer = &mut self.actors[number].real;
            let ordinary = (0..SEATS).any(|seat| {
                peer.pid(seat).is_some() && {
                    peer.say(seat, "euid\n");
                    peer.hear(seat, CALL).is_ok_and(|answer| answer != "0 0")
                }
            });
            if !ordinary {
                continue;
            }
            if let Some(difference) = self.start_anew(step, number)? {
                return Ok(Some(difference));
            }
            self.begun.push(number);
        }
        Ok(None)
    }

    /// Kills all processes of an actor, and starts it again.
    fn start_anew(&mut self, step: &Step, actor: usize) -> io::Result<Option<Difference>> {
        let gone = &mut self.actors[actor];
        let ended = gone.real.kill() & gone.reference.kill();
        self.passes.retain(|(who, ..), _| *who != actor);
        if !ended {
            let kind = "restart: hangs".into();
            return Ok(Some(self.difference(step, kind, "ended", "still there")));
        }
        let mut started = self.start(actor)?;
        started.greet()?;
        self.actors[actor] = started;
        Ok(None)
    }

    fn silent(&self, step: &Step, silence: Silence, who: &str) -> Difference {
        let said = if silence == Silence::Dead { "died" } else { "hangs" };
        let mut difference =
            self.difference(step, format!("{}: {who}{said}", step.name()), "an answer", said);
        // Who started it ends a moment after it.
        std::thread::sleep(Duration::from_millis(200));
        let ends = self.actors.iter().enumerate().map(|(number, actor)| {
            format!("actor {number}: [{}] [{}]\n", actor.real.ends(), actor.reference.ends())
        });
        difference.detail = ends.collect();
        difference.detail.push_str(&last_lines(&self.setting.log, 10));
        difference
    }

    /// Several calls of one process.
    fn calls(&mut self, steps: &[Step], source: &mut dyn Source) -> io::Result<Option<Difference>> {
        let line = |step: &Step| match step {
            Step::Call { line, .. } => line.clone(),
            _ => String::new(),
        };
        let mut rest = steps;
        while let Some(first) = rest.first() {
            let under_run =
                matches!(first, Step::Call { actor, .. } if self.views[*actor].starts_with('r'));
            let alone = |line: &str| alone(line) || under_run && gives_away(line);
            let special = alone(&line(first));
            let count = if special {
                1
            } else {
                let more =
                    rest.iter().take_while(|s| same_process(first, s) && !alone(&line(s))).count();
                // What was synced is looked at, in a section.
                let section = self.section.is_some();
                let synced = |s: &Step| section && section::tells(s.name());
                let ends = |s: &Step| synced(s) || is_asked_again(&line(s));
                rest.iter().position(ends).map_or(more, |at| more.min(at + 1))
            };
            let (now, after) = rest.split_at(count);
            rest = after;
            let lines: Vec<String> = now.iter().map(line).collect();
            let Step::Call { actor, seat, .. } = first else { break };
            let found = if self.actors[*actor].real.pid(*seat).is_none() {
                // Nobody is there: no call, but still a step.
                self.done.extend_from_slice(now);
                None
            } else if !special {
                self.plain(now, *actor, *seat, &lines, source)?
            } else if self.is_loose() {
                self.special_alone(first, *actor, *seat, &lines[0], source)?
            } else {
                match self.special(first, *actor, *seat, &lines[0], source)? {
                    Some(found) if self.excuse(&found)? => None,
                    Some(found) if found.detail.is_empty() => {
                        Some(self.explained(found, (*actor, *seat), (first, &lines[0]), 0))
                    }
                    found => found,
                }
            };
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    fn plain(
        &mut self,
        steps: &[Step],
        actor: usize,
        seat: usize,
        lines: &[String],
        source: &mut dyn Source,
    ) -> io::Result<Option<Difference>> {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        self.actors[actor].real.say(seat, &text);
        let compared = !self.is_loose();
        if compared {
            self.actors[actor].reference.say(seat, &text);
        }
        for (number, (step, line)) in steps.iter().zip(lines).enumerate() {
            self.done.push(step.clone());
            let mut answers = [Ok(String::new()), Ok(String::new())];
            answers[0] = self.actors[actor].real.hear(seat, CALL);
            if compared {
                answers[1] = self.actors[actor].reference.hear(seat, CALL);
            }
            let [real, reference] = answers;
            let real = match real {
                Ok(answer) => answer,
                Err(silence) => return Ok(Some(self.silent(step, silence, ""))),
            };
            let reference = match reference {
                Ok(answer) => answer,
                Err(silence) => return Ok(Some(self.silent(step, silence, "reference "))),
            };
            let mut found = None;
            if self.is_loose() {
                source.heard(step, &real);
                found = self.judge_alone(step, (actor, seat), line, &real)?;
            } else {
                source.heard(step, &reference);
                self.note(step.name());
                if let Some(difference) = self.judge(step, (actor, seat), line, &real, &reference) {
                    if self.excuse(&difference)? {
                        found = self.judge_alone(step, (actor, seat), line, &real)?;
                    } else {
                        let (who, unread) = ((actor, seat), steps.len() - 1 - number);
                        found = Some(self.explained(difference, who, (step, line), unread));
                    }
                }
            }
            if found.is_some() {
                return Ok(found);
            }
            if is_sync(step.name()) && real.starts_with("0 0") {
                let slot = line.split(' ').nth(1).unwrap_or_default();
                self.note_synced(actor, seat, slot);
            }
        }
        Ok(None)
    }

    /// A call that is made alone, when the reference was left behind.
    fn special_alone(
        &mut self,
        step: &Step,
        actor: usize,
        seat: usize,
        line: &str,
        source: &mut dyn Source,
    ) -> io::Result<Option<Difference>> {
        self.done.push(step.clone());
        if matches!(step.name(), "fork" | "exec" | "spawn" | "exit") {
            source.heard(step, "noslot");
            return Ok(None);
        }
        let peer = &mut self.actors[actor].real;
        peer.say(seat, &format!("{line}\n"));
        match peer.hear(seat, CALL) {
            Ok(answer) => {
                source.heard(step, &answer);
                self.judge_alone(step, (actor, seat), line, &answer)
            }
            Err(silence) => Ok(Some(self.silent(step, silence, ""))),
        }
    }

    fn judge(
        &mut self,
        step: &Step,
        (actor, seat): (usize, usize),
        line: &str,
        real: &str,
        reference: &str,
    ) -> Option<Difference> {
        self.calls += 1;
        let name = step.name();
        match name {
            "dup" | "dup2" | "fdupfd" => self.shared = true,
            // To ask for one takes a descriptor as well.
            "lock" | "getlk" => self.locked = true,
            "lseek" => {
                if let Some(slot) = line.split(' ').nth(1).and_then(named_slot) {
                    self.passes.entry((actor, seat, slot)).or_default().lose();
                }
            }
            // (What fails, or finds the slot taken, leaves in it what is there.)
            "open" | "creat" | "close" if reference.starts_with(|c: char| c.is_ascii_digit()) => {
                let slot = line.split(' ').nth(1).and_then(named_slot);
                self.passes.retain(|key, _| Some(*key) != slot.map(|slot| (actor, seat, slot)));
            }
            _ => {}
        }
        let (mut a, mut b) = (real.to_string(), reference.to_string());
        if name == "getlk" {
            (a, b) = (self.holder(actor, &a, true), self.holder(actor, &b, false));
            if field(&a.split(' ').collect::<Vec<_>>(), "pid") == Some("elsewhere") {
                let pid = b.split(' ').find(|token| token.starts_with("pid=")).unwrap_or_default();
                a = a.replace("pid=elsewhere", pid);
            }
        }
        if self.views[actor].starts_with('r') {
            as_under_run(name, self.locked, &mut a, &b);
        }
        let kind = self.judge.compare(name, &a, &b)?;
        if self.tolerates(actor, &kind)
            || self.second_chance(actor, seat, line, &kind, reference)
            || line.contains("tmpfile") && kind == "open: ENOENT for EPERM"
            || name == "getcwd" && self.elsewhere_now(actor, seat, real, reference)
            || line.contains("dontsync") && self.synced_is_same(actor, seat, line, reference)
            || kind.starts_with("rename: ESTALE for ")
                && self.renamed_now(actor, seat, line, reference)
            || [": ENOTDIR for ENOENT", ": EACCES for ENOENT", ": EPERM for ENOENT"]
                .iter()
                .any(|end| kind.ends_with(end))
                && makes_name(line)
                && self.is_where_all_is_gone(actor, seat, line)
            || kind.ends_with(": ENAMETOOLONG for ENOENT")
                && self.is_where_all_is_gone(actor, seat, line)
        {
            return None;
        }
        Some(self.difference(step, kind, reference, real))
    }

    /// A difference with what can be learnt of it, once `unread` answers to what was told after the call are heard. What
    /// a process under `run` is refused because it could not open the file now is a limit, not a difference, but both
    /// sides are no longer the same.
    fn explained(
        &mut self,
        mut difference: Difference,
        (actor, seat): (usize, usize),
        (step, line): (&Step, &str),
        unread: usize,
    ) -> Difference {
        let both = &mut self.actors[actor];
        for peer in [&mut both.real, &mut both.reference] {
            if (0..unread).any(|_| peer.hear(seat, CALL).is_err()) {
                return difference;
            }
        }
        let reads = difference.kind.ends_with(": sum")
            || line.starts_with("read")
            || line.starts_with("pread");
        if reads && unread == 0 {
            difference.detail = self.where_bytes_differ(actor, step).unwrap_or_default();
        }
        if difference.detail.is_empty() {
            difference.detail = self.as_both_have_it(actor, seat, line).unwrap_or_default();
        }
        let words: Vec<&str> = line.split(' ').collect();
        if self.views[actor].starts_with('r')
            && difference.got == "-1 EACCES"
            && words.iter().any(|word| named_slot(word).is_some())
            && self.may_not_open_again(actor, seat, &words)
        {
            difference.kind = format!("{BARRED}{}", difference.kind);
        }
        if self.is_of_a_lost_lock(actor, seat, &words, &difference)
            || self.stands_in_what_others_removed(actor, seat, &difference)
            || self.locks_a_directory_elsewhere(actor, seat, &words, &difference)
            || self.is_a_placeholder(actor, seat, &words)
        {
            difference.kind = format!("{BARRED}{}", difference.kind);
        }
        difference
    }

    /// Through a mount, something was not to be had in the directory where the process stands, which is there for the
    /// reference although it was removed, or has another error there: nothing keeps a directory in which somebody only stands, if another node or a
    /// program under `corbel run` removes it (docs/mount.md).
    fn stands_in_what_others_removed(
        &mut self,
        actor: usize,
        seat: usize,
        difference: &Difference,
    ) -> bool {
        let gone = matches!(&difference.got[..], "-1 ENOENT" | "-1 ESTALE");
        let views = self.views.iter().collect::<BTreeSet<_>>();
        gone && self.views[actor].starts_with('m')
            && views.len() > 1
            && self.stands_in_nothing(actor, seat)
    }

    /// Whether the directory in which the reference's process stands was removed.
    fn stands_in_nothing(&mut self, actor: usize, seat: usize) -> bool {
        let peer = &mut self.actors[actor].reference;
        peer.say(seat, "stat .\n");
        let said = peer.hear(seat, CALL).unwrap_or_default();
        field(&said.split(' ').collect::<Vec<_>>(), "nlink") == Some("0")
    }

    /// A lock is had, or nothing is in its way, where the reference knows one of a process on a node whose services were
    /// ended in order while calls went on: its client asks for it again within a second, and somebody else may be first
    /// (docs/service.md). Whose it is a record lock of a process tells; of others it may be anybody's on such a node.
    fn is_of_a_lost_lock(
        &mut self,
        actor: usize,
        seat: usize,
        words: &[&str],
        difference: &Difference,
    ) -> bool {
        let (got, expected) = (&difference.got, &difference.expected);
        let had = match words[0] {
            "lock" | "flock" => got.starts_with("0 0") && expected == "-1 EAGAIN",
            "getlk" => got.contains(" type=2 ") && !expected.contains(" type=2 "),
            _ => false,
        };
        if !had || self.ended.is_empty() {
            return false;
        }
        let ended = |actor: usize| self.ended.contains(&self.ground.view(&self.views[actor]).node);
        let anybody = (0..self.actors.len()).any(ended);
        if words[0] == "flock" {
            return anybody;
        }
        let question = format!("getlk {}\n", words[1..].join(" "));
        let reference = &mut self.actors[actor].reference;
        reference.say(seat, &question);
        let Ok(answer) = reference.hear(seat, CALL) else { return false };
        let tokens: Vec<&str> = answer.split(' ').collect();
        let pid = field(&tokens, "pid").and_then(|pid| pid.parse::<i32>().ok());
        let is = |actor: &Actor| pid.is_some_and(|pid| actor.reference.seat_of(pid).is_some());
        match self.actors.iter().position(is) {
            Some(holder) => self.ended.contains(&self.ground.view(&self.views[holder]).node),
            None => pid == Some(-1) && anybody,
        }
    }

    /// A directory is locked, or nothing is in the way of that, where the reference knows of a lock: FUSE passes none of a
    /// directory on, so a kernel knows those of its own machine (docs/mount.md).
    fn locks_a_directory_elsewhere(
        &mut self,
        actor: usize,
        seat: usize,
        words: &[&str],
        difference: &Difference,
    ) -> bool {
        let [call @ ("flock" | "lock" | "getlk"), slot, ..] = words else { return false };
        let nodes = self.views.iter().map(|view| self.ground.view(view).node);
        let several = nodes.collect::<BTreeSet<_>>().len() > 1;
        let (got, expected) = (&difference.got[..], &difference.expected[..]);
        let unknown = match *call {
            // Which of several the reference tells is for it to say.
            "getlk" => got.starts_with("0 0 ") && !expected.contains(" type=2 "),
            _ => (got, expected) == ("0 0", "-1 EAGAIN"),
        };
        several
            && unknown
            && self.shown(actor, seat, slot, false, "mode").is_some_and(|mode| {
                let mode = u32::from_str_radix(&mode, 8).unwrap_or_default();
                mode & libc::S_IFMT == libc::S_IFDIR
            })
    }

    /// A slot has the placeholder of a file, and not the file: a program was executed by who had it open, as another user say, and
    /// could not open it any more (docs/interception.md).
    fn is_a_placeholder(&mut self, actor: usize, seat: usize, words: &[&str]) -> bool {
        if !self.executed.contains(&actor) {
            return false;
        }
        let slots = words[1..].iter().filter(|word| named_slot(word).is_some());
        slots.into_iter().any(|slot| {
            let mode = self.shown(actor, seat, slot, false, "mode");
            mode.is_some() && self.shown(actor, seat, slot, true, "mode") != mode
        })
    }

    /// What `fstat` of a slot says of one thing, to the worker or to the reference.
    fn shown(
        &mut self,
        actor: usize,
        seat: usize,
        slot: &str,
        real: bool,
        what: &str,
    ) -> Option<String> {
        let actor = &mut self.actors[actor];
        let peer = if real { &mut actor.real } else { &mut actor.reference };
        peer.say(seat, &format!("fstat {slot}\n"));
        let said = peer.hear(seat, CALL).ok()?;
        field(&said.split(' ').collect::<Vec<_>>(), what).map(String::from)
    }

    /// Where both workers stand in what a slot has open, and what they know of it.
    fn as_both_have_it(&mut self, actor: usize, seat: usize, line: &str) -> Option<String> {
        let slot = line.split(' ').find(|word| named_slot(word).is_some())?;
        let actor = &mut self.actors[actor];
        let mut said = Vec::new();
        for question in ["lseek SLOT 0 cur", "getfl SLOT", "fstat SLOT"] {
            let question = question.replace("SLOT", slot);
            for (who, peer) in [("reference", &mut actor.reference), ("real", &mut actor.real)] {
                peer.say(seat, &format!("{question}\n"));
                said.push(format!("{who} {question}: {}", peer.hear(seat, CALL).ok()?));
            }
        }
        Some(said.join("; "))
    }

    /// A mount's kernel judges some calls of users by the owner that it saw last, and is right when it has looked
    /// again (docs/mount.md). What is open under `corbel run` may be the kernel's, too.
    fn second_chance(
        &mut self,
        actor: usize,
        seat: usize,
        line: &str,
        kind: &str,
        reference: &str,
    ) -> bool {
        let refusals = ["EPERM for success", "EACCES for success", "EACCES for EPERM"];
        let refused = refusals.iter().any(|s| kind.ends_with(s));
        let words: Vec<&str> = line.split(' ').collect();
        if !refused || !looks_first(words[0]) {
            return false;
        }
        let open = words[0].starts_with('f') || words[0] == "linkfd";
        let look = if open { "fstat" } else { "stat" };
        let peer = &mut self.actors[actor].real;
        std::thread::sleep(NAMES_KEPT);
        peer.say(seat, &format!("{look} {}\n{line}\n", words[1]));
        let answer = peer.hear(seat, CALL).and_then(|_| peer.hear(seat, CALL));
        answer.is_ok_and(|answer| self.judge.compare(words[0], &answer, reference).is_none())
    }

    /// AT_STATX_DONT_SYNC asks for what a kernel happens to know.
    fn synced_is_same(&mut self, actor: usize, seat: usize, line: &str, reference: &str) -> bool {
        let peer = &mut self.actors[actor].real;
        peer.say(seat, &format!("{}\n", line.replace("dontsync", "forcesync")));
        let again = peer.hear(seat, CALL);
        again.is_ok_and(|answer| self.judge.compare("statx", &answer, reference).is_none())
    }

    /// A kernel does not hear where others move its directories to, and knows when somebody has looked there
    /// (docs/mount.md).
    fn elsewhere_now(&mut self, actor: usize, seat: usize, real: &str, reference: &str) -> bool {
        if self.actors.len() == 1 {
            return false;
        }
        let root = self.real(&self.views[actor].clone());
        std::thread::sleep(NAMES_KEPT);
        for said in [real, reference] {
            let tokens: Vec<&str> = said.split(' ').collect();
            let path = field(&tokens, "path").and_then(crate::text::unescape);
            if let Some(path) = path {
                let below = path.strip_prefix(b"/").unwrap_or(&path);
                let _ = fs::symlink_metadata(root.join(std::ffi::OsStr::from_bytes(below)));
            }
        }
        let peer = &mut self.actors[actor].real;
        peer.say(seat, "getcwd\n");
        let again = peer.hear(seat, CALL);
        again.is_ok_and(|answer| self.judge.compare("getcwd", &answer, reference).is_none())
    }

    /// A mount's kernel does not rename from one directory to another what it has at a third place, and does when it has
    /// looked (docs/mount.md). Once: what is still stale then is a difference.
    fn renamed_now(&mut self, actor: usize, seat: usize, line: &str, reference: &str) -> bool {
        let words: Vec<&str> = line.split(' ').collect();
        let ["rename", from, to, _] = words[..] else { return false };
        if !self.views[actor].starts_with('m') || self.actors.len() == 1 {
            return false;
        }
        let peer = &mut self.actors[actor].real;
        peer.say(seat, &format!("lstat {from}\nlstat {to}\n{line}\n"));
        let (Ok(one), Ok(other), Ok(answer)) =
            (peer.hear(seat, CALL), peer.hear(seat, CALL), peer.hear(seat, CALL))
        else {
            return false;
        };
        let is_dir = |said: &str| said.contains(" mode=40");
        (is_dir(&one) || is_dir(&other))
            && self.judge.compare("rename", &answer, reference).is_none()
    }

    /// Whether a kind of difference is known, everywhere or (as in `r:lstat: size`) under `corbel run`.
    fn tolerates(&self, actor: usize, kind: &str) -> bool {
        let here = format!("{}:{kind}", &self.views[actor][..1]);
        self.setting.tolerated.iter().any(|known| known == kind || *known == here)
    }

    /// Who holds a lock, by actor and seat.
    fn holder(&self, asker: usize, answer: &str, real: bool) -> String {
        let tokens: Vec<&str> = answer.split(' ').collect();
        let Some(pid) = field(&tokens, "pid").and_then(|pid| pid.parse::<i32>().ok()) else {
            return answer.into();
        };
        let peers =
            self.actors.iter().map(|actor| if real { &actor.real } else { &actor.reference });
        let mut holders = peers.enumerate().filter_map(|(n, peer)| Some((n, peer.seat_of(pid)?)));
        let node = |actor: usize| self.ground.view(&self.views[actor]).node;
        let name = match (pid, holders.next()) {
            (_, Some((actor, seat))) => format!("{actor}.{seat}"),
            // Nobody here: then on another node, if there is one.
            (0, None) if (0..self.actors.len()).any(|n| node(n) != node(asker)) => {
                "elsewhere".into()
            }
            _ => pid.to_string(),
        };
        answer.replace(&format!("pid={pid}"), &format!("pid={name}"))
    }

    /// Asks both workers where what they read last differs.
    fn where_bytes_differ(&mut self, actor: usize, step: &Step) -> Option<String> {
        let Step::Call { seat, .. } = step else { return None };
        let actor = &mut self.actors[actor];
        let mut ask = |line: &str| {
            let short = Duration::from_secs(10);
            actor.real.say(*seat, line);
            actor.reference.say(*seat, line);
            Some((actor.real.hear(*seat, short).ok()?, actor.reference.hear(*seat, short).ok()?))
        };
        let (a, b) = ask("sums\n")?;
        let (a, b): (Vec<&str>, Vec<&str>) = (a.split(' ').collect(), b.split(' ').collect());
        let blocks = a.len().max(b.len());
        let bad: Vec<usize> =
            (2..blocks).filter(|n| a.get(*n) != b.get(*n)).map(|n| n - 2).collect();
        let (first, last) = (*bad.first()?, *bad.last()?);
        let (x, y) = ask(&format!("show {} 512\n", first * 512))?;
        let (x, y) = (x.split("bytes=").nth(1)?.to_string(), y.split("bytes=").nth(1)?.to_string());
        let same =
            x.as_bytes().chunks(2).zip(y.as_bytes().chunks(2)).take_while(|(a, b)| a == b).count();
        let shown = |bytes: &str| {
            bytes.get(same * 2..(same * 2 + 32).min(bytes.len())).unwrap_or("").to_string()
        };
        Some(format!(
            "bytes of this read: {} blocks of 512 differ, the first is number {first}, the last {last} of {}; \
             at byte {} expected {} got {}",
            bad.len(),
            blocks - 2,
            first * 512 + same,
            shown(&y),
            shown(&x)
        ))
    }

    /// A call that is made alone, for one of several reasons.
    fn special(
        &mut self,
        step: &Step,
        actor: usize,
        seat: usize,
        line: &str,
        source: &mut dyn Source,
    ) -> io::Result<Option<Difference>> {
        let words: Vec<&str> = line.split(' ').collect();
        if words[0] == "exit" {
            return Ok(self.exit(step, actor, seat, source));
        }
        self.done.push(step.clone());
        if matches!(words[0], "exec" | "spawn")
            && self.views[actor].starts_with('r')
            && self.may_not_open_again(actor, seat, &words)
        {
            self.executed.insert(actor);
        }
        let mut ask = |real: bool, line: &str| {
            let actor = &mut self.actors[actor];
            let peer = if real { &mut actor.real } else { &mut actor.reference };
            peer.say(seat, &format!("{line}\n"));
            peer.hear(seat, CALL)
        };
        let real = match ask(true, line) {
            Ok(answer) => answer,
            Err(silence) => return Ok(Some(self.silent(step, silence, ""))),
        };
        if self.views[actor].starts_with('r')
            && (is_barred(line, &real) && self.may_not_open_again(actor, seat, &words)
                || words[0] == "linkfd" && real == "-1 ENOENT")
        {
            // It keeps what it has, and the kernel cannot have it; or the kernel has it, and knows that another process
            // has opened it (docs/interception.md).
            source.heard(step, &real);
            return Ok(None);
        }
        let mut instead = line.to_string();
        if waits_for_real(line) {
            match Self::instead(&words, &real) {
                Ok(Some(other)) => instead = other,
                Ok(None) => {
                    source.heard(step, &real);
                    return Ok(None);
                }
                Err(why) => {
                    let kind = format!("{}: {why}", words[0]);
                    return Ok(Some(self.difference(step, kind, "another answer", &real)));
                }
            }
        }
        let mut ask = |line: &str| {
            let peer = &mut self.actors[actor].reference;
            peer.say(seat, &format!("{line}\n"));
            peer.hear(seat, CALL)
        };
        let reference = match ask(&instead) {
            Ok(answer) => answer,
            Err(silence) => return Ok(Some(self.silent(step, silence, "reference "))),
        };
        source.heard(step, &reference);
        match words[0] {
            "getdents" | "seekdir" => {
                return Ok(self.directory(step, actor, seat, &words, &real, &reference));
            }
            _ => {}
        }
        if let Some(difference) = self.judge(step, (actor, seat), line, &real, &reference) {
            return Ok(Some(difference));
        }
        if matches!(words[0], "fork" | "exec" | "spawn") && real.starts_with("0 0") {
            self.shared = true;
            let new = words.get(1).and_then(|seat| seat.parse().ok()).filter(|seat| *seat < SEATS);
            let new: usize = new.unwrap_or_default();
            for (peer, who) in [(true, ""), (false, "reference ")] {
                let both = &mut self.actors[actor];
                let peer = if peer { &mut both.real } else { &mut both.reference };
                if let Err(error) = peer.greet(new, CALL) {
                    let mut difference = self.silent(step, Silence::Dead, who);
                    difference.detail = error.to_string();
                    return Ok(Some(difference));
                }
            }
        }
        Ok(None)
    }

    /// Whether what is in a slot could not be opened now: its mode or owner has changed since, or who has it. Where
    /// the call names no slot: in any of them.
    fn may_not_open_again(&mut self, actor: usize, seat: usize, words: &[&str]) -> bool {
        let slots: Vec<usize> = match words.iter().find_map(|word| named_slot(word)) {
            Some(slot) => vec![slot],
            None => (0..SLOTS).collect(),
        };
        let peer = &mut self.actors[actor].reference;
        slots.into_iter().any(|slot| {
            peer.say(seat, &format!("again s{slot}\n"));
            peer.hear(seat, CALL).is_ok_and(|answer| answer == "-1 EACCES")
        })
    }

    /// What the reference is asked instead, once the worker has answered; nothing, if the call does not count;
    /// or why the answer is wrong.
    fn instead(words: &[&str], real: &str) -> Result<Option<String>, String> {
        let line = words.join(" ");
        let Some((value, error)) = real.split_once(' ') else { return Ok(Some(line)) };
        let error = error.split(' ').next().unwrap_or_default();
        match (words[0], error) {
            ("clone" | "clonerange", "EIO" | "ENOSPC" | "ESTALE") => Err(real.into()),
            ("clone" | "clonerange", "0") => Ok(Some(line)),
            // Whether it may, the reference cannot say.
            ("clone" | "clonerange", _) => Ok(None),
            // The reference changes times also when it refuses.
            ("fallocate", "EOPNOTSUPP" | "EINVAL") => Ok(None),
            ("lseek", _) => {
                let [_, slot, from, whence] = words else { return Ok(Some(line)) };
                Ok(Some(format!("checkhole {slot} {from} {whence} {value} {error}")))
            }
            _ => Ok(Some(line)),
        }
    }

    fn exit(
        &mut self,
        step: &Step,
        actor: usize,
        seat: usize,
        source: &mut dyn Source,
    ) -> Option<Difference> {
        self.done.push(step.clone());
        source.heard(step, "0 0");
        let both = &mut self.actors[actor];
        let mut ended = true;
        for peer in [&mut both.real, &mut both.reference] {
            peer.say(seat, "exit\n");
            ended &= peer.wait_end(seat, CALL);
            peer.leave(seat);
        }
        (!ended).then(|| self.silent(step, Silence::Hangs, ""))
    }

    /// A directory that is read in pieces has an order of its own: it is judged by what is there.
    fn directory(
        &mut self,
        step: &Step,
        actor: usize,
        seat: usize,
        words: &[&str],
        real: &str,
        reference: &str,
    ) -> Option<Difference> {
        self.calls += 1;
        let tokens: Vec<&str> = real.split(' ').collect();
        let wanted: Vec<&str> = reference.split(' ').collect();
        if words[0] == "seekdir"
            && wanted.get(1) == Some(&"EINVAL")
            && self.is_gone(actor, seat, words[1])
        {
            // A directory that was removed has no positions any more, on some file systems.
            let slot = named_slot(words[1])?;
            self.passes.entry((actor, seat, slot)).or_default().lose();
            return None;
        }
        if tokens.get(1) != wanted.get(1) {
            let kind = self.judge.compare(words[0], real, reference)?;
            return Some(self.difference(step, kind, reference, real));
        }
        if tokens.get(1) != Some(&"0") || self.shared {
            return None;
        }
        let slot = named_slot(words[1])?;
        let key = (actor, seat, slot);
        if words[0] == "seekdir" {
            let to = field(&tokens, "to")?.parse().ok()?;
            self.passes.entry(key).or_default().seek(to);
            return None;
        }
        let there = self.names(actor, seat, words[1])?;
        let names: Vec<&str> =
            field(&tokens, "names")?.split(',').filter(|n| !n.is_empty()).collect();
        let why = self.passes.entry(key).or_default().told(&names, &there)?;
        Some(self.difference(step, "getdents: names".into(), &why, real))
    }

    /// Whether what a descriptor of the reference leads to was removed.
    fn is_gone(&mut self, actor: usize, seat: usize, slot: &str) -> bool {
        let peer = &mut self.actors[actor].reference;
        peer.say(seat, &format!("fstat {slot}\n"));
        let said = peer.hear(seat, CALL).unwrap_or_default();
        field(&said.split(' ').collect::<Vec<_>>(), "nlink") == Some("0")
    }

    /// Whether a mount's kernel was asked for a name in a directory that was removed, which it does not know if others
    /// have done that: it compares types, rights and lengths first (docs/mount.md).
    fn is_where_all_is_gone(&mut self, actor: usize, seat: usize, line: &str) -> bool {
        let words: Vec<&str> = line.split(' ').collect();
        let slots: Vec<&str> =
            words[1..].iter().filter_map(|w| Some(w.split_once(':')?.0)).collect();
        if slots.iter().any(|slot| self.is_gone(actor, seat, slot)) {
            return true;
        }
        // (Under `corbel run` it may stand there by `fchdir` to what it has in common with a child, which is the kernel's.)
        self.stands_in_nothing(actor, seat)
    }

    /// What is in the directory of a descriptor of the reference.
    fn names(&mut self, actor: usize, seat: usize, slot: &str) -> Option<BTreeSet<(String, u64)>> {
        let peer = &mut self.actors[actor].reference;
        peer.say(seat, &format!("fdof {slot}\n"));
        let fd = peer.hear(seat, CALL).ok()?;
        let fd = fd.split(' ').next()?;
        let path = format!("/proc/{}/fd/{fd}/", peer.pid(seat)?);
        let mut all = BTreeSet::new();
        for dots in [".", ".."] {
            all.insert((format!("{dots}/4"), 0));
        }
        for entry in fs::read_dir(path).ok()? {
            let entry = entry.ok()?;
            let kind = entry.file_type().ok()?;
            let number = match () {
                () if kind.is_dir() => libc::DT_DIR,
                () if kind.is_symlink() => libc::DT_LNK,
                () if kind.is_fifo() => libc::DT_FIFO,
                () if kind.is_socket() => libc::DT_SOCK,
                () if kind.is_char_device() => libc::DT_CHR,
                () if kind.is_block_device() => libc::DT_BLK,
                () => libc::DT_REG,
            };
            let name = crate::text::escape(entry.file_name().as_bytes());
            all.insert((format!("{name}/{number}"), entry.ino()));
        }
        Some(all)
    }

    /// Everybody reads everything; twice, if that may help.
    fn sweep(&mut self, step: &Step, way: usize) -> Option<Difference> {
        let found = self.sweep_once(step, way)?;
        if !self.setting.tolerated.iter().any(|known| known == "transient") {
            return Some(found);
        }
        std::thread::sleep(TICKS * 4);
        self.sweep_once(step, way)
    }

    fn sweep_once(&mut self, step: &Step, way: usize) -> Option<Difference> {
        let line = format!("sweep {way}\n");
        let mut wanted: Option<String> = None;
        for actor in &mut self.actors {
            actor.real.say(0, &line);
            actor.reference.say(0, &line);
        }
        for number in 0..self.actors.len() {
            // Each of the reference's, too: whoever closes a file gives up its locks.
            match self.actors[number].reference.hear(0, CALL) {
                Ok(answer) if answer != "noslot" => wanted = wanted.or(Some(answer)),
                Ok(_) => {}
                Err(silence) => return Some(self.silent(step, silence, "reference ")),
            }
        }
        for number in 0..self.actors.len() {
            let real = match self.actors[number].real.hear(0, CALL) {
                Ok(answer) => answer,
                Err(silence) => return Some(self.silent(step, silence, "")),
            };
            self.calls += 1;
            let Some(wanted) = &wanted else { continue };
            if real == "noslot" {
                continue;
            }
            if let Some((kind, got, expected)) = self.judge.compare_trees(&real, wanted) {
                let mut difference = self.difference(step, kind, &expected, &got);
                difference.detail = format!("as actor {number} ({}) sees it", self.views[number]);
                return Some(difference);
            }
        }
        None
    }
}

/// Removes what is in a directory, but for one name.
fn remove_below(dir: &Path, but: Option<&std::ffi::OsStr>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if but.is_some() && path.file_name() == but {
            continue;
        }
        if path.symlink_metadata()?.is_dir() {
            fs::remove_dir_all(path)?;
        } else {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Removes a tree whatever modes its directories have.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn under_run_only_what_is_told_differs() {
        let seen = |name: &str, locked: bool, real: &str, reference: &str| {
            let mut real = real.to_string();
            as_under_run(name, locked, &mut real, reference);
            real == reference
        };
        assert!(seen("getfl", false, "0x802 0", "0x20802 0"));
        assert!(!seen("getfl", false, "0x2 0", "0x20802 0"));
        assert!(!seen("getfl", false, "0x20802 0", "0x802 0"));
        assert!(seen("open", true, "7 0", "6 0"));
        assert!(!seen("open", false, "7 0", "6 0"));
        // The number is free again.
        assert!(seen("open", true, "5 0", "6 0"));
        assert!(!seen("open", true, "-1 ENOENT", "6 0"));
        assert!(!seen("open", true, "7 0", "-1 EEXIST"));
    }
}
