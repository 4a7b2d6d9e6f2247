//! What went wrong, for people and for programs: one shape for every verb.
//!
//! With `--json` a failure is one line on standard output,
//! `{"error":{"code":…,"message":…,"remedy":…}}`; without, two lines on standard error. The exit
//! code follows from the kind ([`Kind::exit`]; docs/cli.md has the table).

use std::fmt;

use placement::crush::Error;

/// Kind of a failure: decides `code` and the exit code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The operation was tried and did not succeed.
    Failed,
    /// The command line is wrong.
    Usage,
    /// The configuration is wrong.
    Config,
    /// A service that is needed does not answer.
    Unreachable,
    /// Data on media is damaged.
    Damaged,
    /// Something did not happen in time.
    Timeout,
    /// The machine lacks something: a device, a tool, a right.
    Environment,
    /// Ended by a signal.
    Interrupted,
}

impl Kind {
    /// The word in `error.code`.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Usage => "usage",
            Self::Config => "config",
            Self::Unreachable => "unreachable",
            Self::Damaged => "damaged",
            Self::Timeout => "timeout",
            Self::Environment => "environment",
            Self::Interrupted => "interrupted",
        }
    }

    /// The kind with an exit code, of another process of ours.
    pub fn of_exit(code: u8) -> Self {
        let all = [
            Self::Usage,
            Self::Config,
            Self::Unreachable,
            Self::Damaged,
            Self::Timeout,
            Self::Environment,
            Self::Interrupted,
        ];
        all.into_iter().find(|kind| kind.exit() == code).unwrap_or(Self::Failed)
    }

    /// Exit code of every verb but `fsck` and `run`.
    pub const fn exit(self) -> u8 {
        match self {
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Config => 3,
            Self::Unreachable => 4,
            Self::Damaged => 5,
            Self::Timeout => 6,
            Self::Environment => 7,
            Self::Interrupted => 130,
        }
    }
}

/// A failure with its remedy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Kind.
    pub kind: Kind,
    /// What was wrong, and where.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
    /// Exit code, where the verb's convention differs from [`Kind::exit`].
    pub exit: Option<u8>,
}

/// Result of a verb.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure of `kind`.
    pub fn new(kind: Kind, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { kind, message: message.into(), remedy: remedy.into(), exit: None }
    }

    /// Something was tried and failed.
    pub fn failed(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Kind::Failed, message, remedy)
    }

    /// An operating-system error on `what`.
    pub fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        let (kind, remedy) = match error.kind() {
            std::io::ErrorKind::NotFound => (Kind::Failed, "check that the path exists"),
            std::io::ErrorKind::PermissionDenied => (
                Kind::Environment,
                "run as its owner (a service of root opens only what is root's), or use a directory of your own",
            ),
            std::io::ErrorKind::StorageFull => (Kind::Environment, "free some space there"),
            std::io::ErrorKind::AddrInUse => {
                (Kind::Environment, "end what listens there, or choose another address")
            }
            _ => (Kind::Failed, "see the operating system's reason; run with --log-level debug"),
        };
        Self::new(kind, format!("{what}: {error}"), remedy)
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        self.exit.unwrap_or(self.kind.exit())
    }

    /// Prints it: JSON to standard output, or text to standard error.
    pub fn print(&self, json: bool) {
        if json {
            println!("{}", self.to_json());
        } else {
            eprintln!("corbel: {}", self.message);
            if !self.remedy.is_empty() {
                eprintln!("  remedy: {}", self.remedy);
            }
        }
    }

    /// The one error shape.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({"error": {
            "code": self.kind.code(),
            "message": self.message,
            "remedy": self.remedy,
        }})
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (kind, remedy) = match &error {
            Error::Malformed { .. } | Error::Map(_) => {
                (Kind::Damaged, "check the map with crushtool, or write it anew")
            }
            Error::Text { .. } => {
                (Kind::Config, "correct the line; corbel crush decompile shows the form")
            }
            Error::Request(_) => (Kind::Usage, "corbel crush decompile shows rules and devices"),
            Error::Budget { .. } => (Kind::Failed, "lower choose_total_tries, or bring devices in"),
        };
        Self::new(kind, error.to_string(), remedy)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (remedy: {})", self.message, self.remedy)
    }
}

impl std::error::Error for Failure {}

/// Turns an operating-system error into a [`Failure`] that says on what it happened.
pub trait Context<T> {
    /// Names what was being done, and to what.
    fn context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T> Context<T> for std::io::Result<T> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Failure::io(what, &error))
    }
}
