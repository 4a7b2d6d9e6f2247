//! Calls beside a fault that may cost something: a node that loses its place loses what was not synced
//! (docs/service.md), and a full volume refuses what the reference has room for.
//!
//! A *section* begins with such a fault and ends with a calm. Before it everything is made durable, and read. At first
//! its calls are judged as always. With the first difference for which the fault is an excuse the reference is
//! left behind: from there on answers are judged by themselves. At its end
//!
//! - nothing is lost or changed that was there before the section and was not touched in it,
//! - nothing that was synced in the section has gone back,
//! - all views show the same,
//! - everything can be removed, and a volume that was full has its space again;
//!
//! then the history goes on from an empty directory, exactly judged.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Actor, CALL, Stage, TICKS, remove_below};
use crate::judge::Difference;
use crate::script::Step;
use crate::text::field;

/// Space that is given back may take so long: a minute while somebody is waited for who may have a removed file open (docs/service.md),
/// and some more on a busy machine.
const SPACE: Duration = Duration::from_secs(100);
/// Bytes that a volume may take for itself meanwhile.
const OWN: u64 = 2 << 20;
/// How often fsync may fail for what was lost once: what was lost while it failed may be told, too.
const EIO_AT_ONCE: u32 = 2;

/// What is remembered of a section.
#[derive(Debug)]
pub struct Section {
    /// The epoch before it.
    epoch: u64,
    /// Bytes that were free before the volume was filled.
    space: Option<u64>,
    /// What was there before it.
    before: Option<String>,
    /// The reference was left behind.
    pub loose: bool,
    /// What was synced in it, by inode.
    synced: BTreeMap<String, Synced>,
    /// Content was changed through mappings, of which times tell nothing.
    mapped: bool,
    /// Calls that may have taken names away.
    names: u64,
}

/// A file when it was synced.
#[derive(Debug)]
struct Synced {
    said: String,
    names: u64,
}

/// Faults by which a node may lose its place.
pub fn is_lossy(what: &str) -> bool {
    let words: Vec<&str> = what.split_whitespace().collect();
    match words[..] {
        ["stop", _, name, ..] => name != "hostd",
        [name, ..] => matches!(name, "nicfs" | "node" | "cut" | "coordinator" | "full"),
        [] => false,
    }
}

fn error(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or_default()
}

/// Calls by which it is told what was lost.
pub fn tells(name: &str) -> bool {
    matches!(name, "fsync" | "fdatasync" | "syncfs" | "syncrange" | "syncall" | "msync" | "close")
}

/// Calls that change a file, and tell as those do where it was opened to be synced with each change.
fn may_sync(name: &str) -> bool {
    name.contains("write") || matches!(name, "copyrange" | "sendfile")
}

impl Stage<'_> {
    /// Whether the reference was left behind.
    pub fn is_loose(&self) -> bool {
        self.section.as_ref().is_some_and(|section| section.loose)
    }

    /// Begins a section, unless one is under way.
    pub fn begin_section(&mut self, step: &Step, full: bool) -> io::Result<Option<Difference>> {
        if self.section.is_some() {
            return Ok(None);
        }
        if let Some(difference) = self.sync_all(step) {
            return Ok(Some(difference));
        }
        std::thread::sleep(TICKS);
        let before = self.read_all().into_iter().next().map(|(_, said)| said);
        std::thread::sleep(TICKS);
        let space = if full { Some(self.ground.space()?) } else { None };
        self.section = Some(Section {
            epoch: self.ground.epoch()?,
            space,
            before,
            loose: false,
            synced: BTreeMap::new(),
            mapped: false,
            names: 0,
        });
        Ok(None)
    }

    /// Every process makes durable what it has changed, this one too. There is no reason for this to fail.
    pub fn sync_all(&mut self, step: &Step) -> Option<Difference> {
        if let Err(error) = self.ground.sync() {
            return Some(self.difference(step, "sync".into(), "success", &error.to_string()));
        }
        for actor in 0..self.actors.len() {
            for seat in 0..crate::worker::SEATS {
                let peer = &mut self.actors[actor].real;
                if peer.pid(seat).is_none() {
                    continue;
                }
                peer.say(seat, "syncall\n");
                match peer.hear(seat, CALL) {
                    Ok(answer) if answer == "0 0" => {}
                    Ok(answer) => {
                        let kind = format!("sync: {}", error(&answer));
                        let mut difference = self.difference(step, kind, "0 0", &answer);
                        difference.detail = format!("by {actor}.{seat}, before the fault");
                        return Some(difference);
                    }
                    Err(silence) => return Some(self.silent(step, silence, "sync ")),
                }
            }
        }
        None
    }

    /// What everybody sees who may see everything.
    fn read_all(&mut self) -> Vec<(usize, String)> {
        let mut all = Vec::new();
        let loose = self.is_loose();
        for number in 0..self.actors.len() {
            let Actor { real: peer, reference } = &mut self.actors[number];
            if !loose {
                // Whoever closes a file gives up its locks.
                reference.say(0, "sweep 0\n");
                let _ = reference.hear(0, CALL);
            }
            peer.say(0, "sweep 0\n");
            if let Ok(said) = peer.hear(0, CALL)
                && said != "noslot"
            {
                all.push((number, said));
            }
        }
        all
    }

    /// Whether the fault that is under way, or was, is an excuse for a difference. If it is, the reference is left
    /// behind.
    pub fn excuse(&mut self, difference: &Difference) -> io::Result<bool> {
        let silent = difference.kind.ends_with("hangs") || difference.kind.ends_with("died");
        let Some(section) = self.section.as_ref().filter(|_| !silent) else { return Ok(false) };
        let (epoch, full) = (section.epoch, section.space.is_some());
        if !full {
            // Only then it is known.
            self.ground.heal()?;
            if self.ground.epoch()? == epoch {
                return Ok(false);
            }
        }
        if let Some(section) = &mut self.section {
            section.loose = true;
        }
        Ok(true)
    }

    /// Notes calls after which less can be judged at the end.
    pub fn note(&mut self, name: &str) {
        let Some(section) = &mut self.section else { return };
        section.mapped |= matches!(name, "poke" | "mapcopy");
        section.names += u64::from(matches!(name, "unlink" | "rmdir" | "rename"));
    }

    /// After a sync that succeeded: what must not go back.
    pub fn note_synced(&mut self, actor: usize, seat: usize, slot: &str) {
        if self.section.is_none() {
            return;
        }
        std::thread::sleep(TICKS);
        let line = format!("durable {slot}\n");
        let loose = self.is_loose();
        let Actor { real: peer, reference } = &mut self.actors[actor];
        if !loose {
            // Whoever closes a file gives up its locks.
            reference.say(seat, &line);
            let _ = reference.hear(seat, CALL);
        }
        peer.say(seat, &line);
        let Ok(said) = peer.hear(seat, CALL) else { return };
        std::thread::sleep(TICKS);
        let tokens: Vec<&str> = said.split(' ').collect();
        let Some(ino) = field(&tokens, "ino").filter(|_| error(&said) == "0") else { return };
        if let Some(section) = &mut self.section {
            let synced = Synced { said: said.clone(), names: section.names };
            section.synced.insert(ino.to_string(), synced);
        }
    }

    /// Judges an answer that is compared with nothing.
    pub fn judge_alone(
        &mut self,
        step: &Step,
        (actor, seat): (usize, usize),
        line: &str,
        answer: &str,
    ) -> io::Result<Option<Difference>> {
        self.calls += 1;
        let name = step.name();
        self.note(name);
        let wrong = ["EIO", "ENOTCONN", "ECONNABORTED", "ETIMEDOUT", "ENOSYS", "ENODEV"];
        let said = error(answer);
        if answer.starts_with("bad ") || !wrong.contains(&said) {
            return Ok(None);
        }
        let lost = |stage: &Self| -> io::Result<bool> {
            let section = stage.section.as_ref();
            Ok(section.is_none_or(|s| s.epoch < stage.ground.epoch().unwrap_or(s.epoch)))
        };
        self.ground.heal()?;
        if said == "EIO" && tells(name) && lost(self)? {
            if name == "close" {
                return Ok(None);
            }
            // Once: it is not told again and again.
            let peer = &mut self.actors[actor].real;
            for _ in 0..EIO_AT_ONCE {
                peer.say(seat, &format!("{line}\n"));
                match peer.hear(seat, CALL) {
                    Ok(again) if error(&again) == "EIO" => {}
                    Ok(_) => return Ok(None),
                    Err(silence) => return Ok(Some(self.silent(step, silence, ""))),
                }
            }
            let kind = format!("{name}: EIO again and again");
            return Ok(Some(self.difference(step, kind, "EIO once", answer)));
        }
        if said == "EIO" && may_sync(name) && lost(self)? {
            return Ok(None);
        }
        let kind = format!("{name}: {said} beside a fault");
        Ok(Some(self.difference(step, kind, "another answer", answer)))
    }

    /// Ends the section, if there is one.
    pub fn calm(&mut self, step: &Step) -> io::Result<Option<Difference>> {
        self.ground.heal()?;
        let Some(section) = &self.section else { return Ok(None) };
        let full = section.space.is_some();
        if full {
            self.ground.free()?;
        }
        if !section.loose && (full || self.ground.epoch()? == section.epoch) {
            // All was as it should be, and goes on, with the space that was taken: it is there when all that had the file open
            // have closed it, and nobody is waited for who may have.
            let space = self.section.take().and_then(|section| section.space);
            return space.map_or(Ok(None), |space| self.judge_space(step, space / 2));
        }
        for number in 0..self.actors.len() {
            if let Some(difference) = self.start_anew(step, number)? {
                return Ok(Some(difference));
            }
        }
        // A mount says once what was lost with a place, to who syncs its root: now.
        for _ in 0..EIO_AT_ONCE {
            if self.ground.sync().is_ok() {
                break;
            }
        }
        self.hear_of_losses();
        let after = self.read_all();
        if let Some(difference) = self.judge_section(step, &after) {
            return Ok(Some(difference));
        }
        if let Some(difference) = self.wipe(step)? {
            return Ok(Some(difference));
        }
        let section = self.section.take();
        if let Some(space) = section.and_then(|section| section.space) {
            return self.judge_space(step, space);
        }
        Ok(None)
    }

    /// What was lost of a directory a client says at the next fsync of it, whoever opened it since: who has renamed something opens
    /// the directory only to sync it. Those of the history outlive the section.
    fn hear_of_losses(&self) {
        for view in &self.ground.views {
            let real = self.real(&view.name);
            for dir in with_those_above(&real).filter_map(|dir| std::fs::File::open(dir).ok()) {
                let _ = (0..EIO_AT_ONCE).find(|_| dir.sync_all().is_ok());
            }
        }
    }

    fn judge_section(&self, step: &Step, after: &[(usize, String)]) -> Option<Difference> {
        let section = self.section.as_ref()?;
        let (first, said) = after.first()?;
        for (number, other) in &after[1..] {
            if let Some((kind, got, expected)) = self.judge.compare_trees(other, said) {
                let kind = format!("after a fault, {kind}");
                let mut difference = self.difference(step, kind, &expected, &got);
                difference.detail = format!("as actors {first} and {number} see it");
                return Some(difference);
            }
        }
        let before = section.before.as_deref().unwrap_or("0 0");
        if let Some((kind, got, expected)) =
            self.judge.compare_untouched(said, before, !section.mapped)
        {
            let kind = format!("untouched beside a fault, {kind}");
            return Some(self.difference(step, kind, &expected, &got));
        }
        for (ino, synced) in &section.synced {
            let may_be_gone = synced.names != section.names;
            let sums = !section.mapped;
            if let Some(why) = self.judge.compare_synced(said, ino, &synced.said, may_be_gone, sums)
                && !(why == "it is gone" && self.is_above(ino))
            {
                let kind = format!("synced beside a fault: {why}");
                return Some(self.difference(step, kind, &synced.said, said));
            }
        }
        None
    }

    /// Whether an inode has a name in one of the directories above that of the history: links may lead there.
    fn is_above(&self, ino: &str) -> bool {
        let real = self.real(&self.views[0].clone());
        with_those_above(&real)
            .skip(1)
            .filter_map(|dir| std::fs::read_dir(dir).ok())
            .flatten()
            .flatten()
            .any(|entry| {
                std::fs::symlink_metadata(entry.path())
                    .is_ok_and(|about| about.ino().to_string() == ino)
            })
    }

    /// Removes everything, and begins with nothing. Links may lead above the directory of the history, so what lies there goes,
    /// too, and what was done to the directories themselves.
    fn wipe(&mut self, step: &Step) -> io::Result<Option<Difference>> {
        let real = self.real(&self.views[0].clone());
        as_at_first(&self.reference())?;
        if let Err(error) = as_at_first(&real) {
            let kind = format!("remove after a fault: {error}");
            return Ok(Some(self.difference(step, kind, "success", &error.to_string())));
        }
        // Reading the reference's has changed the time of access; both begin with the same.
        let start = std::time::SystemTime::now();
        let times = std::fs::FileTimes::new().set_accessed(start).set_modified(start);
        self.pause(TICKS);
        for dir in [&real, &self.reference()] {
            with_those_above(dir).try_for_each(|dir| std::fs::File::open(dir)?.set_times(times))?;
        }
        self.pause(TICKS);
        for (number, said) in self.read_all() {
            if said != "0 0" {
                let mut difference =
                    self.difference(step, "removed, and still there".into(), "0 0", &said);
                difference.detail = format!("as actor {number} sees it");
                return Ok(Some(difference));
            }
        }
        self.anew = true;
        Ok(None)
    }

    fn judge_space(&self, step: &Step, before: u64) -> io::Result<Option<Difference>> {
        let end = Instant::now() + SPACE;
        loop {
            let free = self.ground.space()?;
            if free + OWN >= before {
                return Ok(None);
            }
            if Instant::now() > end {
                let kind = "space is not given back".to_string();
                let (before, free) = (format!("{before} bytes free"), format!("{free}"));
                return Ok(Some(self.difference(step, kind, &before, &free)));
            }
            std::thread::sleep(TICKS);
        }
    }
}

/// The directory of a history, and those between it and the root of the volume.
fn with_those_above(dir: &Path) -> impl Iterator<Item = &Path> {
    dir.ancestors().take(1 + super::NEST.split('/').count())
}

/// Makes of them what they were when the history began.
fn as_at_first(dir: &Path) -> io::Result<()> {
    let mut below = None;
    for at in with_those_above(dir) {
        // Whoever it belongs to now, root does it.
        std::os::unix::fs::lchown(at, Some(0), Some(0))?;
        let mode = if below.is_none() { 0o777 } else { 0o755 };
        crate::worker::without_attributes(at)?;
        std::fs::set_permissions(at, std::fs::Permissions::from_mode(mode))?;
        remove_below(at, below)?;
        below = at.file_name();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a history that went on for a while.
    #[test]
    fn what_was_done_above_goes_with_the_history() {
        let scratch = std::env::temp_dir().join(format!("corbel-hunt-{}", std::process::id()));
        let dir = scratch.join("history").join(super::super::NEST);
        std::fs::create_dir_all(&dir).unwrap();
        for at in with_those_above(&dir).collect::<Vec<_>>() {
            std::fs::create_dir_all(at.join("more/and more")).unwrap();
            std::fs::write(at.join("file"), "text").unwrap();
            std::fs::set_permissions(at, std::fs::Permissions::from_mode(0o700)).unwrap();
        }
        assert_eq!(with_those_above(&dir).last(), Some(&*scratch.join("history")));
        // (Only root may give a file to root.)
        if as_at_first(&dir).is_ok() {
            for at in with_those_above(&dir) {
                let names = std::fs::read_dir(at).unwrap().count();
                let mode = at.metadata().unwrap().mode() & 0o777;
                let wanted = if at == dir { (0, 0o777) } else { (1, 0o755) };
                assert_eq!((names, mode), wanted, "{}", at.display());
            }
        }
        std::fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    fn only_some_faults_cost_something() {
        for lossy in
            ["nicfs 1", "node 2 &", "cut 1 500", "stop 2 nicfs 40", "full 10", "coordinator 5"]
        {
            assert!(is_lossy(lossy), "{lossy}");
        }
        for harmless in ["hostd 1", "term 3 &", "stop 1 hostd 900", ""] {
            assert!(!is_lossy(harmless), "{harmless}");
        }
    }

    #[test]
    fn a_copy_to_a_file_that_is_synced_with_each_change_tells_as_a_write_does() {
        assert!(["write", "pwritev2", "copyrange", "sendfile"].into_iter().all(may_sync));
        assert!(!["read", "pread", "stat", "open", "clonerange"].into_iter().any(may_sync));
    }
}
