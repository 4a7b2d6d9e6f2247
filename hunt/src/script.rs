//! A history as text: who works where, and one step a line.
//!
//! ```text
//! actor 0 m1            actor 0 works in the mount of node 1
//! actor 1 r2            actor 1 works under `corbel run` on node 2
//! 0 open s0 a rdwr|creat 0644
//! 1.2 pread s0 100 4096     the process on seat 2 of actor 1
//! * pause 30            nobody does anything for 30 ms
//! * sweep 1             everybody reads everything, in that way
//! * restart 1           actor 1 is killed and starts anew
//! * fault nicfs 2       a fault, and calls go on when all is well again; see ground.rs
//! * fault cut 1 900 &   a fault, and calls go on meanwhile
//! * fault full 100      nothing but 100 KiB of the volume is free
//! * calm                all is well again; what may have been lost is judged
//! ```

use std::fmt;

/// One step of a history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// A call by the process on a seat of an actor.
    Call {
        /// Who.
        actor: usize,
        /// Which of its processes.
        seat: usize,
        /// What.
        line: String,
    },
    /// Nothing happens for some milliseconds.
    Pause(u64),
    /// Everybody reads everything, in some way.
    Sweep(usize),
    /// All processes of an actor are killed; it starts anew.
    Restart(usize),
    /// Something happens to what serves the files.
    Fault(String),
    /// All is well again.
    Calm,
}

/// Actors and what they do.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Script {
    /// The view that each actor works in.
    pub actors: Vec<String>,
    /// What happens.
    pub steps: Vec<Step>,
}

impl Step {
    /// A call of the first process of an actor.
    pub fn call(actor: usize, seat: usize, line: impl Into<String>) -> Self {
        Self::Call { actor, seat, line: line.into() }
    }

    /// The name of the call.
    pub fn name(&self) -> &str {
        match self {
            Self::Call { line, .. } => line.split(' ').next().unwrap_or_default(),
            Self::Pause(_) => "pause",
            Self::Sweep(_) => "sweep",
            Self::Restart(_) => "restart",
            Self::Fault(_) => "fault",
            Self::Calm => "calm",
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let (who, what) = line.split_once(' ')?;
        if who == "*" {
            let (name, rest) = what.split_once(' ').unwrap_or((what, ""));
            return Some(match name {
                "pause" => Self::Pause(rest.parse().ok().filter(|ms| *ms <= 60_000)?),
                "sweep" => Self::Sweep(rest.parse().ok()?),
                "restart" => Self::Restart(rest.parse().ok()?),
                "fault" => Self::Fault(rest.into()),
                "calm" => Self::Calm,
                _ => return None,
            });
        }
        let (actor, seat) = who.split_once('.').unwrap_or((who, "0"));
        let seat = seat.parse().ok().filter(|seat| *seat < crate::worker::SEATS)?;
        Some(Self::call(actor.parse().ok()?, seat, what.trim()))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call { actor, seat: 0, line } => write!(f, "{actor} {line}"),
            Self::Call { actor, seat, line } => write!(f, "{actor}.{seat} {line}"),
            Self::Pause(ms) => write!(f, "* pause {ms}"),
            Self::Sweep(way) => write!(f, "* sweep {way}"),
            Self::Restart(actor) => write!(f, "* restart {actor}"),
            Self::Fault(what) => write!(f, "* fault {what}"),
            Self::Calm => write!(f, "* calm"),
        }
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, view) in self.actors.iter().enumerate() {
            writeln!(f, "actor {number} {view}")?;
        }
        self.steps.iter().try_for_each(|step| writeln!(f, "{step}"))
    }
}

impl Script {
    /// Reads a script; lines that begin with `#` say nothing.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut this = Self::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = || format!("line {}: {line}", number + 1);
            if let Some(actor) = line.strip_prefix("actor ") {
                let (name, view) = actor.split_once(' ').ok_or_else(wrong)?;
                if name.parse() != Ok(this.actors.len()) {
                    return Err(wrong());
                }
                this.actors.push(view.trim().into());
                continue;
            }
            let step = Step::parse(line).ok_or_else(wrong)?;
            match &step {
                Step::Call { actor, .. } | Step::Restart(actor) if *actor >= this.actors.len() => {
                    return Err(wrong());
                }
                _ => this.steps.push(step),
            }
        }
        Ok(this)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_what_it_prints() {
        let text = "actor 0 m1\nactor 1 r2\n0 open s0 a rdwr|creat 0644\n1.2 pread s0 1 2\n* pause 30\n\
                    * sweep 1\n* restart 1\n* fault nicfs 2\n* calm\n";
        let script = Script::parse(text).unwrap();
        assert_eq!(script.to_string(), text);
        assert_eq!(Script::parse(&format!("# why\n\n{text}")).unwrap(), script);
        for bad in [
            "x",
            "0 read s0",
            "actor 1 m1",
            "actor 0 m1\n1 read s0 1",
            "actor 0 m1\n* fly",
            "actor 0 m1\n0.9 read s0 1",
            "actor 0 m1\n* restart 1",
        ] {
            assert!(Script::parse(bad).is_err(), "{bad}");
        }
    }
}
