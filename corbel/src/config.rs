//! The configuration file: TOML in five sections, every key with its meaning, default and bounds.
//!
//! The table in [`config!`] below is the only place that knows the keys: structures, reading,
//! `corbel config generate` and the documented file `config/corbel.toml` come from it. Reading
//! refuses unknown keys (naming the nearest known one) and says of every error the file, line,
//! key, what is wrong and what to write instead. Nothing read from a file can make it panic.

mod value;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use value::{
    Authentication, Compression, Copies, Cores, Durability, Encryption, Leases, Metrics, Pipeline,
    Scheduler, Size, Transport, Value, Weights,
};

use cluster::transport::PeerAddress;

use crate::failure::{Failure, Kind, Result};
use crate::units::show_bytes;

/// Bytes for data that a node may have.
pub const CAPACITY: std::ops::RangeInclusive<u64> = 16 << 20..=1 << 46;

/// One key, for people.
#[derive(Clone, Debug)]
pub struct KeyDoc {
    /// Section.
    pub section: &'static str,
    /// Name in the section.
    pub key: &'static str,
    /// What it means.
    pub doc: &'static [&'static str],
}

macro_rules! config {
    ($($(#[doc = $section_doc:literal])* $section:ident: $name:ident {
        $($(#[doc = $doc:literal])+ $key:ident: $type:ty = $default:expr;)*
    })*) => {
        $(
            $(#[doc = $section_doc])*
            #[derive(Clone, PartialEq, Eq, Debug)]
            pub struct $name { $($(#[doc = $doc])+ pub $key: $type,)* }

            impl Default for $name {
                fn default() -> Self {
                    Self { $($key: $default,)* }
                }
            }

            impl $name {
                fn set(&mut self, key: &str, value: &toml::de::DeValue<'_>) -> value::Parsed<()> {
                    match key {
                        $(stringify!($key) => self.$key = Value::read(value)?,)*
                        _ => return Err(unknown(stringify!($section), key)),
                    }
                    Ok(())
                }
            }
        )*

        /// The whole configuration.
        #[derive(Clone, PartialEq, Eq, Debug, Default)]
        pub struct Config { $($(#[doc = $section_doc])* pub $section: $name,)* }

        const SECTIONS: &[(&str, &[&str], &[&str])] =
            &[$((stringify!($section), &[$($section_doc),*], &[$(stringify!($key)),*])),*];

        impl Config {
            fn set(
                &mut self,
                section: &str,
                key: &str,
                value: &toml::de::DeValue<'_>,
            ) -> value::Parsed<()> {
                match section {
                    $(stringify!($section) => self.$section.set(key, value),)*
                    _ => Err(unknown_section(section)),
                }
            }

            /// Every key with its value as TOML, in the order of the file.
            pub fn entries(&self) -> Vec<(&'static str, &'static str, String)> {
                vec![$($((stringify!($section), stringify!($key), self.$section.$key.show()),)*)*]
            }

            /// Every key for people.
            pub fn keys() -> Vec<KeyDoc> {
                vec![$($(KeyDoc {
                    section: stringify!($section),
                    key: stringify!($key),
                    doc: &[$($doc),+],
                },)*)*]
            }
        }
    };
}

config! {
    /// The cluster, the same on every node.
    cluster: ClusterConfig {
        /// Name of the cluster. Nodes and coordinator of another name are refused.
        id: String = "corbel".into();
        /// Address of the coordinator, which keeps membership, epochs and chains: IP:PORT, or the
        /// path of a socket if all nodes are on one machine; that answers its own user and root only.
        coordinator: PeerAddress = PeerAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], 9560)));
        /// How nodes, coordinator and administration know each other over TCP: by "certificates" in the directory
        /// `keys`, or "none": whoever reaches a port is believed, and reads and replaces everything. Sockets of this
        /// machine need neither: there the kernel says who speaks.
        authentication: Authentication = Authentication::Certificates;
        /// Directory of the keys: authority.pem, of what runs here node-N.pem, coordinator.pem or admin.pem (each
        /// certificate and key, mode 0600), and the list "revoked". `corbel cert` makes them.
        keys: PathBuf = "/etc/corbel/keys".into();
        /// Whether what passes over TCP between those who have shown who they are is encrypted: "on", or "off" for links
        /// that nobody else can listen to. Then it is signed all the same. It is encrypted unless both sides say "off".
        encryption: Encryption = Encryption::On;
        /// How bulk messages between nodes are compressed (each member keeps them as they were): "auto", where the link is slower
        /// than compressing is, as what had to wait for it shows, and they look as if they would gain something; "lz4" or "zstd",
        /// always; "none". What is sent small, an fsync above all, is sent as it is.
        compression: Compression = Compression::Auto;
        /// Directory in which `corbel serve coordinator` keeps its state across restarts.
        coordinator_dir: PathBuf = "/var/lib/corbel/coordinator".into();
        /// Members of the volume's chain, the primary included. fsync waits for all of them.
        replicas: u32 = 3;
        /// Members that must hold what fsync has promised: while the chain has fewer, fsync waits, and `corbel status`
        /// says so. 0 is a majority of `replicas` (2 of 3); 1 goes on with the last copy alone. What the coordinator is
        /// told counts.
        min_replicas: u32 = 0;
        /// Interval of the heartbeats of a node to the coordinator.
        heartbeat: Duration = Duration::from_millis(100);
        /// Silence after which a node counts as dead; leases last half of it. At least four
        /// heartbeats, and at least two and 150ms.
        failure_timeout: Duration = Duration::from_millis(500);
        /// The same after its connection has ended, which is what the death of a process looks
        /// like. 100ms up to failure_timeout.
        lost_connection: Duration = Duration::from_millis(120);
        /// How long the first member of a chain waits for the others after all were away.
        grace: Duration = Duration::from_secs(2);
    }
    /// This node.
    node: NodeConfig {
        /// Number of the node, unique in the cluster, from 1 on.
        id: u32 = 1;
        /// Address on which nicfs listens for the other nodes. They must be able to reach it.
        listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 9561));
        /// Fabric between the nodes: "tcp", or "shm" for nodes of one machine.
        transport: Transport = Transport::Tcp;
        /// Directory in which the nodes of one machine meet for the fabric "shm".
        shm_dir: PathBuf = "/run/corbel".into();
        /// Directory of the persistent-memory region. On a DAX file system for "pmem", on tmpfs
        /// or huge pages for "replicated", on an SSD for "disk".
        region: PathBuf = "/var/lib/corbel/region".into();
        /// Promise that fsync makes on this node alone: "pmem" (durable when stored and fenced),
        /// "replicated" (durable through the other members only), "disk" (durable on the SSD).
        durability: Durability = Durability::Replicated;
        /// Space for the data of files.
        capacity: Size = Size(4 << 30);
        /// Size of the ring that keeps the replication stream.
        stream: Size = Size(256 << 20);
        /// Unix socket of hostd, where programs attach.
        socket: PathBuf = "/run/corbel/corbel.sock".into();
        /// Loopback address that serves /metrics over HTTP; "" serves none.
        metrics: Metrics = Metrics(None);
        /// Delay added to every fabric operation of nicfs, to stand for PCIe in measurements.
        fabric_delay: Duration = Duration::ZERO;
    }
    /// How the services of this node work.
    service: ServiceConfig {
        /// Processor cores that hostd and nicfs use, for example "2,4-7", so that applications keep theirs; "" leaves
        /// them all. nicfs has as many threads for bulk work as these are cores.
        cores: Cores = Cores::default();
        /// Who does the work of the stages of the data path: "pipelined" (threads beside the one that decides); and to compare with,
        /// same formats and guarantees, "serial" (that one alone, a stage after the other: LineFS-NotParallel),
        /// "host-background" (the same on the cores of the applications: Assise-BgRepl) and "host" (the same, and not before somebody
        /// asks, for an fsync or for room in a log, or 30 s have passed: Assise). The last two go with no `cores`.
        pipeline: Pipeline = Pipeline::Pipelined;
        /// Who makes the copies of what is published where they are long: "hostd" (LineFS's publishing on the host) or "nicfs", which makes
        /// the short ones in any case.
        copies: Copies = Copies::Hostd;
        /// What programs of different processes are given that write one file at the same time: "files" (all of it, one after the other) or
        /// "ranges" (the bytes that each of them uses, as long as these are others: a checkpoint in strides, a table for each).
        leases: Leases = Leases::Files;
        /// Which of the programs that want something at the same time is served first: "urgent" (one that waits for an answer or for an
        /// fsync; the others wait for `hold_back` at most; among them users share by `weights`, however many programs each
        /// runs) or "round-robin" (one program after the other).
        scheduler: Scheduler = Scheduler::Urgent;
        /// Shares of users, by number, for example "1000=4,1001=2": 1 to 1000, and 1 for who is not named. They count where programs
        /// wait for each other; what one does not use is the others'.
        weights: Weights = Weights::default();
        /// Work on no more bytes than that is done by the thread that decides, and takes no hop to another: an fsync of little
        /// on a quiet node above all. 4KiB to 4MiB.
        inline: Size = Size(128 << 10);
        /// How long entries of a log that nobody waits for may be held back before they are fetched: what is overwritten, or removed
        /// with its file, meanwhile and in the same chunk is neither sent nor kept. fsync does not wait for it. 0s to 100ms.
        hold_back: Duration = Duration::from_millis(2);
        /// How long after a scrub the next one begins in the background: it reads all that lies here, compares it with its
        /// checksums, and mends what is rotten from another node. 0s: only when `corbel scrub` asks for one. Else 1min to 8760h.
        scrub_every: Duration = Duration::from_secs(7 * 24 * 3600);
        /// Bytes that it reads in a second. 1MiB to 16GiB.
        scrub_rate: Size = Size(64 << 20);
        /// Bytes that the head sends in a second to a node that is filled; 64 times as many it compares with what the node
        /// has. 0B: as many as it can beside its other work. Else 1MiB to 16GiB.
        join_rate: Size = Size(0);
    }
    /// The operation log of each client process.
    log: LogConfig {
        /// Lanes: descriptors that can append at once without meeting. 1 to 8.
        lanes: u32 = 4;
        /// Bytes of a lane, a multiple of 4KiB. The papers use 512MiB.
        lane_bytes: Size = Size(8 << 20);
    }
    /// Bounds of nicfs.
    limits: LimitsConfig {
        /// Client processes of a node at once.
        clients: u32 = 256;
        /// Client processes of one user, but root, on a node at once. Root finds a place that no other user can take.
        clients_per_user: u32 = 192;
        /// Connections of one user, but root, to hostd at once.
        connections_per_user: u32 = 1024;
        /// Leases of all clients of one user, but root, on a node. Beyond, each further one takes another of them back.
        leases_per_user: u32 = 524_288;
        /// Requests a second of all clients of one user, but root, on a node. Beyond, they wait.
        requests_per_user: u32 = 50_000;
        /// Memory that nicfs may use for chunks in its pipelines.
        memory: Size = Size(256 << 20);
        /// Percentage of `memory` above which replication pauses.
        high_watermark: u32 = 70;
        /// Percentage of `memory` under which it resumes.
        low_watermark: u32 = 30;
    }
}

/// Edits between two words (insert, delete, replace).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}

fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> &'a str {
    known.min_by_key(|name| distance(word, name)).unwrap_or("")
}

fn unknown(section: &str, key: &str) -> value::Wrong {
    let elsewhere = SECTIONS.iter().find(|(name, _, keys)| *name != section && keys.contains(&key));
    let keys = SECTIONS.iter().find(|(name, ..)| *name == section).map_or(&[][..], |s| s.2);
    let remedy = match elsewhere {
        Some((name, ..)) => format!("it belongs into the section [{name}]"),
        None => format!("did you mean {:?}?", nearest(key, keys.iter().copied())),
    };
    value::Wrong { what: "is not a key of this section".into(), remedy }
}

fn unknown_section(section: &str) -> value::Wrong {
    let near = nearest(section, SECTIONS.iter().map(|s| s.0));
    value::Wrong { what: "is not a section".into(), remedy: format!("did you mean [{near}]?") }
}

/// Where a configuration came from, for messages.
struct Source<'a> {
    name: &'a str,
    text: &'a str,
}

impl Source<'_> {
    fn fail(&self, at: usize, key: &str, wrong: &value::Wrong) -> Failure {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = before.bytes().filter(|b| *b == b'\n').count() + 1;
        let message = format!("{}:{line}: {key} {}", self.name, wrong.what);
        Failure::new(Kind::Config, message, wrong.remedy.clone())
    }
}

impl Config {
    /// Reads a file; without one, the defaults.
    pub fn load(path: Option<&Path>, overrides: &[String]) -> Result<Self> {
        let mut config = match path {
            None => Self::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| {
                    Failure::new(
                        Kind::Config,
                        format!("{}: {error}", path.display()),
                        "`corbel config generate` prints a file to start from",
                    )
                })?;
                Self::parse(&path.display().to_string(), &text)?
            }
        };
        for one in overrides {
            config.set_from_flag(one)?;
        }
        config
            .check(path.map_or("defaults and --set", |p| p.to_str().unwrap_or("configuration")))?;
        Ok(config)
    }

    /// Reads the text of a file called `name`; bounds over several keys are left to `check`.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let source = Source { name, text };
        let table = toml::de::DeTable::parse(text).map_err(|error| {
            let wrong = value::Wrong {
                what: format!("is no TOML: {}", error.message()),
                remedy: "write `key = value` under a [section]; strings in quotes".into(),
            };
            source.fail(error.span().map_or(0, |s| s.start), "the text", &wrong)
        })?;
        let mut config = Self::default();
        for (section, body) in table.get_ref() {
            let name = section.get_ref().as_ref();
            let at = section.span().start;
            if !SECTIONS.iter().any(|s| s.0 == name) {
                return Err(source.fail(at, &format!("[{name}]"), &unknown_section(name)));
            }
            let toml::de::DeValue::Table(keys) = body.get_ref() else {
                let wrong = value::Wrong {
                    what: "is not a section of keys".into(),
                    remedy: format!("write [{name}] on a line of its own, keys below it"),
                };
                return Err(source.fail(at, name, &wrong));
            };
            for (key, value) in keys {
                let word = key.get_ref().as_ref();
                config.set(name, word, value.get_ref()).map_err(|wrong| {
                    source.fail(key.span().start, &format!("{name}.{word}"), &wrong)
                })?;
            }
        }
        Ok(config)
    }

    /// `--set section.key=value`; the value as TOML, or a bare word for a string.
    fn set_from_flag(&mut self, text: &str) -> Result<()> {
        let usage = || {
            Failure::new(
                Kind::Usage,
                format!("--set {text:?} is not SECTION.KEY=VALUE"),
                "for example --set node.id=2",
            )
        };
        let (path, value) = text.split_once('=').ok_or_else(usage)?;
        let (section, key) = path.trim().split_once('.').ok_or_else(usage)?;
        let source = Source { name: "--set", text: "" };
        let fail = |wrong| source.fail(0, path.trim(), &wrong);
        let line = format!("v = {value}");
        let parsed = toml::de::DeTable::parse(&line).ok();
        match parsed.as_ref().and_then(|table| table.get_ref().iter().next()) {
            Some((_, value)) => self.set(section, key, value.get_ref()).map_err(fail),
            None => {
                let bare = toml::de::DeValue::String(value.trim().into());
                self.set(section, key, &bare).map_err(fail)
            }
        }
    }

    /// Bounds, also between keys.
    pub fn check(&self, name: &str) -> Result<()> {
        let refuse = |key: &str, what: String, remedy: &str| {
            Err(Failure::new(Kind::Config, format!("{name}: {key} {what}"), remedy))
        };
        let within = |key: &str, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            refuse(key, format!("is {value}"), &format!("write a value from {low} to {high}"))
        };
        within("cluster.replicas", self.cluster.replicas.into(), 1, 16)?;
        let most = u64::from(self.cluster.replicas);
        within("cluster.min_replicas", self.cluster.min_replicas.into(), 0, most)?;
        let size = |key: &str, value: Size, low: u64, high: u64| {
            if (low..=high).contains(&value.0) {
                return Ok(());
            }
            let remedy = format!("write a size from {} to {}", show_bytes(low), show_bytes(high));
            refuse(key, format!("is {}", show_bytes(value.0)), &remedy)
        };
        within("node.id", self.node.id.into(), 1, 65_535)?;
        size("node.capacity", self.node.capacity, *CAPACITY.start(), *CAPACITY.end())?;
        size("node.stream", self.node.stream, 16 << 20, 1 << 40)?;
        within("log.lanes", self.log.lanes.into(), 1, storage::limits::LANES_MAX as u64)?;
        let (low, high) = (storage::limits::LANE_BYTES_MIN, storage::limits::LANE_BYTES_MAX);
        size("log.lane_bytes", self.log.lane_bytes, low, high)?;
        if !self.log.lane_bytes.0.is_multiple_of(4096) {
            let what = format!("is {}", show_bytes(self.log.lane_bytes.0));
            return refuse("log.lane_bytes", what, "write a multiple of 4KiB");
        }
        within("limits.clients", self.limits.clients.into(), 1, 4096)?;
        within("limits.clients_per_user", self.limits.clients_per_user.into(), 1, 4096)?;
        within("limits.connections_per_user", self.limits.connections_per_user.into(), 1, 7168)?;
        within("limits.leases_per_user", self.limits.leases_per_user.into(), 1024, 1 << 31)?;
        within(
            "limits.requests_per_user",
            self.limits.requests_per_user.into(),
            10,
            1_000_000_000,
        )?;
        size("limits.memory", self.limits.memory, 32 << 20, 1 << 40)?;
        within("limits.high_watermark", self.limits.high_watermark.into(), 2, 95)?;
        let below = u64::from(self.limits.high_watermark) - 1;
        within("limits.low_watermark", self.limits.low_watermark.into(), 1, below)?;
        if self.service.hold_back > Duration::from_millis(100) {
            let what = format!("is {}", crate::units::show_duration(self.service.hold_back));
            return refuse("service.hold_back", what, "write at most 100ms");
        }
        let host = matches!(self.service.pipeline, Pipeline::Host | Pipeline::HostBackground);
        if host && !self.service.cores.0.is_empty() {
            let what = format!("is {}", self.service.cores.show());
            let remedy = format!(
                "leave it out: with service.pipeline = \"{}\" the services run on the cores of the applications",
                self.service.pipeline.word()
            );
            return refuse("service.cores", what, &remedy);
        }
        let every = self.service.scrub_every;
        let hours = Duration::from_secs(60)..=Duration::from_secs(8760 * 3600);
        if !every.is_zero() && !hours.contains(&every) {
            let what = format!("is {}", crate::units::show_duration(every));
            return refuse("service.scrub_every", what, "write 0s (never), or 1min to 8760h");
        }
        size("service.inline", self.service.inline, 4 << 10, 4 << 20)?;
        size("service.scrub_rate", self.service.scrub_rate, 1 << 20, 16 << 30)?;
        if self.service.join_rate.0 > 0 {
            size("service.join_rate", self.service.join_rate, 1 << 20, 16 << 30)?;
        }
        self.check_times(&refuse)?;
        if !cluster::coordinator::message::valid_name(&self.cluster.id) {
            let what = format!("is {:?}", self.cluster.id);
            return refuse("cluster.id", what, "write 1 to 64 of a-z A-Z 0-9 - _ .");
        }
        if self.node.socket.as_os_str().len() > 100 {
            let what = format!("is {} bytes long", self.node.socket.as_os_str().len());
            return refuse("node.socket", what, "choose a path of at most 100 bytes");
        }
        Ok(())
    }

    fn check_times(&self, refuse: &dyn Fn(&str, String, &str) -> Result<()>) -> Result<()> {
        let (beat, limit) = (self.cluster.heartbeat, self.cluster.failure_timeout);
        if beat < Duration::from_millis(5) || beat > Duration::from_secs(60) {
            return refuse("cluster.heartbeat", "is out of range".into(), "write 5ms to 60s");
        }
        // Leases last half of it, less what clocks lag: a heartbeat may be late and must not end them.
        let least = (beat * 4).max(beat * 2 + Duration::from_millis(150));
        if limit < least || limit > Duration::from_secs(600) {
            let least = crate::units::show_duration(least);
            return refuse(
                "cluster.failure_timeout",
                format!("is {}", crate::units::show_duration(limit)),
                &format!("write at least {least} with this cluster.heartbeat, and at most 10min"),
            );
        }
        let lost = self.cluster.lost_connection;
        if lost < Duration::from_millis(100) || lost > limit {
            let what = format!("is {}", crate::units::show_duration(lost));
            return refuse("cluster.lost_connection", what, "write 100ms to failure_timeout");
        }
        if self.cluster.grace > Duration::from_secs(600) {
            return refuse("cluster.grace", "is out of range".into(), "write at most 10min");
        }
        if self.node.fabric_delay > Duration::from_millis(100) {
            return refuse("node.fabric_delay", "is out of range".into(), "write at most 100ms");
        }
        Ok(())
    }

    /// The file, every key with its meaning; keys that have their default stay comments when
    /// `terse`, otherwise all are written.
    pub fn render(&self) -> String {
        let mut text = String::from(
            "# Corbel's configuration. Every key is here with its default; `corbel config check FILE`\n\
             # reads a file and says what is wrong with it. Sizes: B, KiB, MiB, GiB, TiB (powers of\n\
             # 1024), kB, MB, GB, TB (powers of 1000). Durations: ns, us, ms, s, min, h.\n",
        );
        let docs = Self::keys();
        for (section, about, _) in SECTIONS {
            text.push('\n');
            about.iter().for_each(|line| text.push_str(&format!("#{line}\n")));
            text.push_str(&format!("[{section}]\n"));
            for (_, key, value) in self.entries().iter().filter(|e| e.0 == *section) {
                let doc = docs.iter().find(|d| d.section == *section && d.key == *key);
                doc.iter().flat_map(|d| d.doc).for_each(|l| text.push_str(&format!("#{l}\n")));
                text.push_str(&format!("{key} = {value}\n"));
            }
        }
        text
    }

    /// As JSON, one object a section.
    pub fn to_json(&self) -> serde_json::Value {
        let mut all = serde_json::Map::new();
        for (section, key, value) in self.entries() {
            let body = all.entry(section).or_insert_with(|| serde_json::json!({}));
            let shown = serde_json::from_str(&value).unwrap_or(serde_json::Value::String(value));
            body[key] = shown;
        }
        serde_json::Value::Object(all)
    }
}

#[cfg(test)]
mod tests;
