//! Types of values in the configuration: how each is read from TOML, and shown as TOML.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use cluster::transport::PeerAddress;
use service::core::schedule::WEIGHT_MAX;
use toml::de::DeValue;

use crate::units;

/// Why a value was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wrong {
    /// What is wrong.
    pub what: String,
    /// What to write instead.
    pub remedy: String,
}

/// Result of reading one value.
pub type Parsed<T> = Result<T, Wrong>;

/// A type that a key can have.
pub trait Value: Sized {
    /// Reads it.
    fn read(value: &DeValue<'_>) -> Parsed<Self>;
    /// Shows it as TOML that reads back to the same.
    fn show(&self) -> String;
}

fn text<'a>(value: &'a DeValue<'_>, example: &str) -> Parsed<&'a str> {
    match value {
        DeValue::String(text) => Ok(text),
        _ => Err(Wrong {
            what: "is not a string".into(),
            remedy: format!("write it in quotes, for example {example}"),
        }),
    }
}

fn quote(text: &str) -> String {
    toml::Value::String(text.into()).to_string()
}

impl Value for u32 {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        let number = match value {
            DeValue::Integer(int) => Self::from_str_radix(int.as_str(), int.radix()).ok(),
            _ => None,
        };
        number.ok_or_else(|| Wrong {
            what: "is not a whole number".into(),
            remedy: "write a number from 0 to 4294967295 without quotes".into(),
        })
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for String {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        text(value, "\"corbel\"").map(Into::into)
    }

    fn show(&self) -> String {
        quote(self)
    }
}

impl Value for PathBuf {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        let path = text(value, "\"/var/lib/corbel\"")?;
        if !path.starts_with('/') || path.contains('\0') {
            return Err(Wrong {
                what: format!("is {path:?}, which is no absolute path"),
                remedy: "write a path that begins with /".into(),
            });
        }
        Ok(path.into())
    }

    fn show(&self) -> String {
        quote(&self.to_string_lossy())
    }
}

impl Value for SocketAddr {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        let address = text(value, "\"127.0.0.1:9560\"")?;
        address.parse().map_err(|_| Wrong {
            what: format!("is {address:?}, which is no address"),
            remedy: "write IP:PORT, for example \"127.0.0.1:9560\" or \"[::1]:9560\"".into(),
        })
    }

    fn show(&self) -> String {
        quote(&self.to_string())
    }
}

impl Value for PeerAddress {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        let address = text(value, "\"127.0.0.1:9560\"")?;
        if address.starts_with('/') {
            return PathBuf::read(value).map(Self::Local);
        }
        address.parse().map(Self::Tcp).map_err(|_| Wrong {
            what: format!("is {address:?}, which is no address"),
            remedy:
                "write IP:PORT, for example \"127.0.0.1:9560\" or \"[::1]:9560\", or the path of a \
                socket of this machine"
                    .into(),
        })
    }

    fn show(&self) -> String {
        quote(&self.to_string())
    }
}

impl Value for Duration {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        units::parse_duration(text(value, "\"100ms\"")?).map_err(|why| Wrong {
            what: format!("is wrong: {why}"),
            remedy: "for example \"100ms\"".into(),
        })
    }

    fn show(&self) -> String {
        quote(&units::show_duration(*self))
    }
}

/// A number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size(pub u64);

impl Value for Size {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        let parsed = match value {
            DeValue::Integer(int) => {
                u64::from_str_radix(int.as_str(), int.radix()).map_err(|e| e.to_string())
            }
            _ => units::parse_bytes(text(value, "\"64MiB\"")?),
        };
        parsed.map(Self).map_err(|why| Wrong {
            what: format!("is wrong: {why}"),
            remedy: "for example \"64MiB\"".into(),
        })
    }

    fn show(&self) -> String {
        quote(&units::show_bytes(self.0))
    }
}

/// Where /metrics is served: a loopback address, or nowhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Metrics(pub Option<SocketAddr>);

impl Value for Metrics {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        if text(value, "\"127.0.0.1:9568\"")?.is_empty() {
            return Ok(Self(None));
        }
        let address = SocketAddr::read(value)?;
        if !address.ip().is_loopback() {
            return Err(Wrong {
                what: format!("is {address}, which others can reach"),
                remedy: "metrics have no password: write a loopback address, and a proxy before it"
                    .into(),
            });
        }
        Ok(Self(Some(address)))
    }

    fn show(&self) -> String {
        quote(&self.0.map_or_else(String::new, |a| a.to_string()))
    }
}

/// Processor cores, by number; none: all.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cores(pub Vec<u16>);

/// Numbers of cores that the system calls take.
const CORES_MAX: u16 = 1024;

impl Cores {
    fn parse(list: &str) -> Option<Vec<u16>> {
        let mut cores = Vec::new();
        for part in list.split(',').filter(|_| !list.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let [first, last] = [first, last].map(|n| n.trim().parse::<u16>().ok());
            let (first, last) = (first?, last?);
            if first > last || last >= CORES_MAX {
                return None;
            }
            cores.extend(first..=last);
        }
        cores.sort_unstable();
        cores.dedup();
        Some(cores)
    }
}

impl Value for Cores {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        let list = text(value, "\"2,4-7\"")?;
        Self::parse(list).map(Self).ok_or_else(|| Wrong {
            what: format!("is {list:?}, which is no list of cores"),
            remedy: format!(
                "write numbers and ranges of cores below {CORES_MAX}, for example \"2,4-7\", or \"\" for all"
            ),
        })
    }

    fn show(&self) -> String {
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        let runs = runs.filter_map(|run| match run {
            [] => None,
            [one] => Some(one.to_string()),
            [first, .., last] => Some(format!("{first}-{last}")),
        });
        quote(&runs.collect::<Vec<_>>().join(","))
    }
}

/// Shares of users, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights(pub std::collections::BTreeMap<u32, u32>);

impl Weights {
    fn parse(list: &str) -> Option<std::collections::BTreeMap<u32, u32>> {
        let mut weights = std::collections::BTreeMap::new();
        for part in list.split(',').filter(|_| !list.is_empty()) {
            let (user, weight) = part.split_once('=')?;
            let (user, weight) = (user.trim().parse().ok()?, weight.trim().parse().ok()?);
            if !(1..=WEIGHT_MAX).contains(&weight) || weights.insert(user, weight).is_some() {
                return None;
            }
        }
        Some(weights)
    }
}

impl Value for Weights {
    fn read(value: &DeValue<'_>) -> Parsed<Self> {
        let list = text(value, "\"1000=4,1001=2\"")?;
        Self::parse(list).map(Self).ok_or_else(|| Wrong {
            what: format!("is {list:?}, which is no list of users and weights"),
            remedy: format!(
                "write numbers of users, each once, with a weight of 1 to {WEIGHT_MAX}, for example \"1000=4,1001=2\", or \"\""
            ),
        })
    }

    fn show(&self) -> String {
        let all = self.0.iter().map(|(user, weight)| format!("{user}={weight}"));
        quote(&all.collect::<Vec<_>>().join(","))
    }
}

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$word_doc:meta])* $variant:ident = $word:literal),* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name { $($(#[$word_doc])* $variant),* }

        impl $name {
            /// The word in the file.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word),* }
            }
        }

        impl Value for $name {
            fn read(value: &DeValue<'_>) -> Parsed<Self> {
                const WORDS: &[&str] = &[$($word),*];
                match text(value, WORDS[0])? {
                    $($word => Ok(Self::$variant),)*
                    other => Err(Wrong {
                        what: format!("is {other:?}"),
                        remedy: format!("write one of {WORDS:?}"),
                    }),
                }
            }

            fn show(&self) -> String {
                quote(self.word())
            }
        }
    };
}

words! {
    /// How nodes reach each other.
    Transport {
        /// TCP.
        Tcp = "tcp",
        /// Shared memory of one machine.
        Shm = "shm"
    }
}

words! {
    /// How those who speak over TCP are known.
    Authentication {
        /// By certificates, in both directions.
        Certificates = "certificates",
        /// Not at all.
        None = "none"
    }
}

words! {
    /// Whether what passes over TCP is encrypted.
    Encryption {
        /// It is.
        On = "on",
        /// It is signed only, where both sides want it so.
        Off = "off"
    }
}

words! {
    /// How what passes between nodes is compressed.
    Compression {
        /// Where the link is slower.
        Auto = "auto",
        /// Not at all.
        None = "none",
        /// LZ4.
        Lz4 = "lz4",
        /// Zstandard.
        Zstd = "zstd"
    }
}

words! {
    /// Who does the work of the stages of the data path.
    Pipeline {
        /// Threads beside the one that decides.
        Pipelined = "pipelined",
        /// That one alone, a stage after the other.
        Serial = "serial",
        /// The same on the cores of the applications.
        HostBackground = "host-background",
        /// The same, and not before somebody asks.
        Host = "host"
    }
}

words! {
    /// Whose turn it is, where several programs want something of nicfs.
    Scheduler {
        /// Who is waited for, and by users.
        Urgent = "urgent",
        /// One after the other.
        RoundRobin = "round-robin"
    }
}

words! {
    /// Who makes the long copies of what is published.
    Copies {
        /// The host.
        Hostd = "hostd",
        /// The offload processor.
        Nicfs = "nicfs"
    }
}

words! {
    /// What programs are given that use one file at the same time.
    Leases {
        /// All of it, one after the other.
        Files = "files",
        /// The bytes that each of them uses.
        Ranges = "ranges"
    }
}

words! {
    /// What makes data durable on a node.
    Durability {
        /// Persistent memory.
        Pmem = "pmem",
        /// The other replicas only.
        Replicated = "replicated",
        /// A disk, when fsync returns.
        Disk = "disk"
    }
}

impl Durability {
    /// What it means when fsync returns, for people.
    pub const fn promise(self) -> &'static str {
        match self {
            Self::Pmem => "survives a power cut of this node",
            Self::Replicated => "survives as long as one replica keeps its power",
            Self::Disk => "survives a power cut, on the disk below the region",
        }
    }
}
