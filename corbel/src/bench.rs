//! `corbel bench`: figures, measured here and now. Each bench starts what it needs (a cluster of
//! its own in memory), measures its baseline in the same run, and cleans up, also after an error
//! or a signal. [`BENCHES`] is the list: name, what is asked, and the function.

mod block;
mod built;
mod cores;
mod device_restart;
mod doors;
pub mod failover;
pub mod floor;
mod guest;
mod hunt;
mod integrity;
pub mod kernels;
mod library;
mod line;
mod linefs;
pub mod load;
mod mount;
mod pipeline;
mod race;
pub mod rados;
mod rejoin;
mod restart;
mod shared;
mod snapshot;
mod steady;
mod straw2;
mod strided;
mod tenants;
mod together;
mod trace;
mod virtiofs;
pub mod world;

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use crate::config::Transport;
use crate::failure::{Failure, Kind, Result};
use crate::output::Output;

/// Options of the benches that start a cluster.
#[derive(Args, Debug, Clone)]
pub struct ClusterOptions {
    /// Members of the chain, each a node of its own
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=5))]
    pub replicas: u32,
    /// Fabric between the nodes
    #[arg(long, default_value = "shm", value_parser = ["shm", "tcp"])]
    pub transport: String,
    /// Leave the cluster's directory (logs, regions) for inspection
    #[arg(long)]
    pub keep: bool,
    /// Fewer operations, where a bench has many (mount)
    #[arg(long)]
    pub quick: bool,
    /// upgrade: a corbel of another build, which begins; its services are ended for this one's
    #[arg(long, value_name = "PROGRAM")]
    pub from: Option<std::path::PathBuf>,
}

macro_rules! verbs {
    ($($(#[doc = $doc:literal])+ $verb:ident = $name:literal,)*) => {
        /// Verbs of `corbel bench`.
        #[derive(Subcommand, Debug)]
        pub enum BenchVerb {
            $($(#[doc = $doc])+ $verb(ClusterOptions),)*
            /// Each of the benches above, one after the other
            All(ClusterOptions),
            /// Placement, Reed-Solomon, CRC32C and LZ4 on one core, against the established libraries
            #[command(after_help = "Examples:\n  corbel bench kernels\n  \
                corbel bench kernels --engine avx2 --json\n\n\
                Libraries and tools that are not installed (libisal2, libjerasure2, ceph-base) are left out, and the\n\
                figures that need them are null.")]
            Kernels(kernels::Options),
            /// Images of Ceph's RBD beside librbd, driven by fio, on a cluster that runs: latency, and processor time of the client
            #[command(after_help = "Examples:\n  scripts/ceph.sh start DIR\n  \
                corbel bench rados --conf DIR/ceph.conf --json\n\n\
                Makes an image, and removes it at the end. Without --conf: CEPH_CONF. fio, rbd and the cluster must be there.")]
            Rados(rados::Options),
            /// Random system calls on several nodes, in both views, beside a reference file system, with faults;
            /// what differs is shrunk to a script
            #[command(after_help = "Examples:\n  corbel bench hunt --seconds 600 --json\n  \
                corbel bench hunt --seed 7 --histories 1 --faults 0 --verbose\n  \
                corbel bench hunt --replay found/7.txt --times 10\n\n\
                Needs root, and `corbel-hunt` beside `corbel` (cargo build -p hunt). Ends with 1 if anything differs; docs/testing.md tells how to read a script.")]
            Hunt(Box<hunt::Options>),
            /// A member of a chain that does nothing (fsync-chain starts them)
            #[command(hide = true)]
            FloorMember(floor::Member),
        }

        impl BenchVerb {
            /// The name and the options of a bench that starts a cluster.
            fn cluster(&self) -> Option<(&'static str, &ClusterOptions)> {
                match self {
                    $(Self::$verb(options) => Some(($name, options)),)*
                    Self::All(options) => Some(("all", options)),
                    Self::Kernels(_) | Self::Rados(_) | Self::Hunt(_) | Self::FloorMember(_) => None,
                }
            }
        }
    };
}

verbs! {
    /// 4 KiB durable write through the C library, against bare persisting
    WriteLocal = "write-local",
    /// The same call by an unmodified binary under `corbel run`
    WriteRun = "write-run",
    /// 4 KiB append + fsync, acknowledged by every replica
    FsyncChain = "fsync-chain",
    /// 16 KiB sequential writes of 512 MiB and one fsync
    SeqWrite = "seq-write",
    /// The same with stages side by side and one after the other, in turns; copies of a byte by place in the chain
    Pipeline = "pipeline",
    /// LineFS's tables: its pipeline beside its own comparison modes, and what the paper says
    Linefs = "linefs",
    /// Append + fsync beside another process that writes as fast as it can
    Fairness = "fairness",
    /// 4 KiB random reads of published data, against memcpy of cold memory
    RandRead = "rand-read",
    /// Create, write 4 KiB, fsync, close, unlink
    Files = "files",
    /// Mail delivery: several processes, and nodes, in one directory
    Maildir = "maildir",
    /// Two processes that read and write one block in turns
    Handover = "handover",
    /// Four processes that write strided blocks of one file, beside four with a file each
    SharedFileProcs = "shared-file-procs",
    /// One synchronous SQLite transaction a row
    Sqlite = "sqlite",
    /// kill -9 of the primary node and of a replica, SIGSTOP of a replica
    Failover = "failover",
    /// kill -9 of nicfs at each place of the chain, its supervisor alive
    Restart = "restart",
    /// A node that was away while one file in a hundred changed: bytes sent, time until it is back, what a writer waits for
    Rejoin = "rejoin",
    /// Snapshots: made in an empty and in a filled volume, written over, and removed beside a program that writes
    Snapshot = "snapshot",
    /// All services of each node ended and started, one node after the other, under load
    Upgrade = "upgrade",
    /// Bits flipped in one member's region, found and mended by a scrub; what checksums cost, beside regions without
    Integrity = "integrity",
    /// The mount beside ext4 and a pass-through: names, reads, writes, fsync, a build
    Mount = "mount",
    /// Make, its compilers and the linker: the mount, and under `corbel run`, where each is a process of its own that reads what others wrote
    Build = "build",
    /// What certificates and encryption cost between nodes, against plain TCP
    Doors = "doors",
    /// Links of 1 Gbit/s, in network namespaces: replicated bytes against what such a link takes (as root)
    Compress = "compress",
    /// The virtio-fs device beside virtiofsd, by a driver without a virtual machine
    Virtiofs = "virtiofs",
    /// Tenants of one process: a polite one beside seven that flood, and shares by weight
    Tenants = "tenants",
    /// kill -9 of the virtio-fs device under load
    VirtiofsRestart = "virtiofs-restart",
    /// Volume files as NBD disks, beside nbdkit's memory
    Nbd = "nbd",
    /// The block cache, read-ahead and merging, beside the same path without them
    BlockCache = "block-cache",
    /// A coded pool: writes, reads with stores lost, reads with one that hangs
    Pool = "pool",
    /// Blocks overwritten, and files removed, before the next fsync: bytes sent over bytes written
    Coalesce = "coalesce",
    /// CPU of an idle cluster
    Idle = "idle",
    /// 4 KiB random reads by 1 to 16 threads beside 4 that write to the same file, against ext4
    SharedFile = "shared-file",
}

/// What a bench may use.
#[derive(Debug)]
pub struct Bench<'a> {
    /// Members of the chain.
    pub replicas: u32,
    /// Fabric.
    pub transport: Transport,
    /// Whether to leave the directory.
    pub keep: bool,
    /// Whether fewer operations will do.
    pub quick: bool,
    /// Another build's program, which begins.
    pub from: Option<&'a std::path::Path>,
    /// For progress.
    pub out: &'a Output,
}

/// Figures of the kernels, by name.
pub type Figures = Map<String, Value>;

/// Figures by key, in the order in which they are shown.
pub type Measured = Vec<(&'static str, f64)>;

/// A bound on a figure.
#[derive(Clone, Copy, Debug)]
pub enum Asked {
    /// No more than.
    Max(f64),
    /// No less than.
    Min(f64),
    /// No more than another figure of the run.
    MaxOf(&'static str),
}

/// One bench.
#[derive(Debug)]
pub struct Row {
    /// Name.
    pub name: &'static str,
    /// What it does, for people.
    pub about: &'static str,
    /// What is asked of its figures.
    pub asked: &'static [(&'static str, Asked)],
    /// The bench.
    pub run: fn(&Bench<'_>) -> Result<Measured>,
}

/// Every bench.
pub const BENCHES: &[Row] = &[
    Row {
        name: "write-local",
        about: "4 KiB write through the C library, against bare persisting of 4 KiB + 64 B",
        asked: &[("p50_us", Asked::MaxOf("limit_us"))],
        run: library::write_local,
    },
    Row {
        name: "write-run",
        about: "the same call by an unmodified binary under corbel run, against the library",
        asked: &[("extra_ns", Asked::Max(150.0))],
        run: library::write_run,
    },
    Row {
        name: "fsync-chain",
        about: "4 KiB append + fsync, acknowledged by every replica, against the same frames through processes that do nothing",
        asked: &[
            ("p50_us", Asked::Max(100.0)),
            ("p99_us", Asked::Max(1000.0)),
            ("ratio", Asked::Max(1.5)),
        ],
        run: steady::fsync_chain,
    },
    Row {
        name: "seq-write",
        about: "16 KiB sequential writes, 512 MiB, one fsync, against a copy into memory on one core",
        asked: &[("mb_s", Asked::Min(300.0))],
        run: steady::seq_write,
    },
    Row {
        name: "pipeline",
        about: "16 KiB sequential writes with stages side by side, against one after the other; copies and processor time of a byte",
        asked: &[
            ("virtual_speedup_8", Asked::Min(3.0)),
            ("real_ratio", Asked::Min(0.95)),
            ("head_copies", Asked::Max(4.0)),
            ("middle_copies", Asked::Max(3.0)),
            ("tail_copies", Asked::Max(3.0)),
        ],
        run: pipeline::pipeline,
    },
    Row {
        name: "linefs",
        about: "the pipeline beside its comparison modes (serial, and Assise on the applications' cores with and without replication in the background): writes, fsync, file and mail servers, mail delivery, a log-structured merge tree (no LevelDB), who publishes, a sort that is compressed",
        // What the paper has, on hundreds of cores, is printed beside each ratio.
        asked: &[],
        run: linefs::linefs,
    },
    Row {
        name: "fairness",
        about: "4 KiB append + fsync beside another process that writes as fast as it can",
        asked: &[("p99_ratio", Asked::Max(5.0))],
        run: steady::fairness,
    },
    Row {
        name: "rand-read",
        about: "4 KiB random reads of published data, against memcpy of cold 4 KiB",
        asked: &[("ratio", Asked::Max(3.0)), ("syscalls_per_op", Asked::Max(0.01))],
        run: steady::rand_read,
    },
    Row {
        name: "files",
        about: "create + write 4 KiB + fsync + close + unlink",
        asked: &[("per_s", Asked::Min(3000.0))],
        run: steady::files,
    },
    Row {
        name: "maildir",
        about: "200 KiB messages, write + fsync + rename, in one directory: 1, 2 and 8 processes, and one on each node",
        asked: &[
            ("p2_ratio", Asked::Min(1.3)),
            ("p8_ratio", Asked::Min(1.3)),
            ("nodes_ratio", Asked::Min(0.7)),
            ("nodes_sharded_ratio", Asked::Min(1.5)),
            ("recalls_per_message", Asked::Max(0.1)),
        ],
        run: together::maildir,
    },
    Row {
        name: "handover",
        about: "two processes read and write one 4 KiB block in turns, on one node and on two; a turn",
        asked: &[("p50_us", Asked::Max(60.0)), ("nodes_p50_us", Asked::Max(200.0))],
        run: together::handover,
    },
    Row {
        name: "shared-file-procs",
        about: "four processes write strided 64 KiB blocks of one file and fsync, beside four with a file each; on one node and on three",
        asked: &[
            ("one_node_ratio", Asked::Min(0.8)),
            ("three_nodes_ratio", Asked::Min(0.6)),
            ("recalls_per_1000", Asked::Max(1.0)),
        ],
        run: strided::shared_file_procs,
    },
    Row {
        name: "sqlite",
        about: "one synchronous WAL transaction a row, unmodified Python under corbel run",
        asked: &[
            ("tx_per_s", Asked::Min(2000.0)),
            ("p50_over_fsync", Asked::Max(2.2)),
            ("locks_asked_per_tx", Asked::Max(0.01)),
        ],
        run: steady::sqlite,
    },
    Row {
        name: "failover",
        about: "kill -9 of the primary node; of a replica; SIGSTOP of a replica",
        asked: &[
            ("first_write_ms", Asked::Max(1000.0)),
            ("replica_kill_stall_ms", Asked::Max(1000.0)),
            ("replica_hang_stall_ms", Asked::Max(1000.0)),
            ("lost", Asked::Max(0.0)),
        ],
        run: failover::failover,
    },
    Row {
        name: "restart",
        about: "kill -9 of nicfs with its supervisor alive, at head, middle and tail, while programs write on all nodes",
        asked: &[
            ("stall_ms", Asked::Max(500.0)),
            ("bytes", Asked::Max(0.0)),
            ("errors", Asked::Max(0.0)),
            ("lost", Asked::Max(0.0)),
        ],
        run: restart::restart,
    },
    Row {
        name: "rejoin",
        about: "a node that was away for longer than the stream is kept, while one file in a hundred was written anew",
        asked: &[
            ("bytes_ratio", Asked::Max(1.3)),
            ("back_ms", Asked::Max(2000.0)),
            ("writer_p99_ratio", Asked::Max(3.0)),
            ("errors", Asked::Max(0.0)),
        ],
        run: rejoin::rejoin,
    },
    Row {
        name: "snapshot",
        about: "snapshots of an empty and of a filled volume are made, written over, and removed beside a program that writes",
        asked: &[
            ("create_us", Asked::Max(1000.0)),
            ("write_cost", Asked::Max(2.0)),
            ("delete_stall_ms", Asked::Max(5.0)),
            ("errors", Asked::Max(0.0)),
        ],
        run: snapshot::snapshot,
    },
    Row {
        name: "upgrade",
        about: "the coordinator and three nodes ended in order and started, one after the other, under sqlite, a build, and programs that write",
        asked: &[
            ("errors", Asked::Max(0.0)),
            ("lost", Asked::Max(0.0)),
            ("bytes", Asked::Max(0.0)),
        ],
        run: restart::upgrade,
    },
    Row {
        name: "integrity",
        about: "1,000 bits flipped in blocks and pages of one member, and a scrub; writes beside regions without checksums",
        asked: &[
            ("not_healed", Asked::Max(0.0)),
            ("left", Asked::Max(0.0)),
            ("write_cost", Asked::Max(0.05)),
            ("fsync_cost", Asked::Max(0.02)),
            ("scrub_mb_s", Asked::Min(2000.0)),
        ],
        run: integrity::integrity,
    },
    Row {
        name: "mount",
        about: "the mount beside ext4 and a pass-through of it; times, and ratios (below 1: faster)",
        asked: &[
            ("stat_again_vs_passed", Asked::Max(1.2)),
            ("reopen_vs_passed", Asked::Max(1.2)),
            ("read_qd1_vs_passed", Asked::Max(1.2)),
            ("read_qd32_vs_passed", Asked::Max(1.2)),
            ("build_vs_passed", Asked::Max(1.2)),
            ("fsync_files_vs_passed", Asked::Max(1.0)),
            ("fsync_append_vs_passed", Asked::Max(1.0)),
        ],
        run: mount::mount,
    },
    Row {
        name: "build",
        about: "a package of C, made on the mount and under `corbel run`, in turns; seconds, and their ratio (below 1: `run` is faster)",
        asked: &[("run_over_mount", Asked::Max(0.9))],
        run: mount::build_bench,
    },
    Row {
        name: "doors",
        about: "TLS beside plain TCP; the longest turn; a storm of writers; attacks of a local user",
        asked: &[
            ("tls_fsync_ratio", Asked::Max(1.3)),
            ("tls_seq_ratio", Asked::Min(0.6)),
            ("longest_turn_ms", Asked::Max(50.0)),
            ("storm_evictions", Asked::Max(0.0)),
            ("storm_errors", Asked::Max(0.0)),
            ("attacks", Asked::Min(40.0)),
            ("succeeded", Asked::Max(0.0)),
        ],
        run: doors::doors,
    },
    Row {
        name: "compress",
        about: "replicated bytes a second over those of a link of 1 Gbit/s: 80 % compressible, and noise",
        asked: &[("effective_ratio_80", Asked::Min(3.0)), ("effective_ratio_0", Asked::Min(0.97))],
        run: line::compress,
    },
    Row {
        name: "virtiofs",
        about: "the virtio-fs device beside virtiofsd: times, and ratios (below 1: faster)",
        asked: &[
            ("null_vs_virtiofsd", Asked::Max(0.8)),
            ("dir_vs_virtiofsd", Asked::Max(0.8)),
            ("corbel_fsync_vs_virtiofsd", Asked::Max(1.0)),
            ("queues_4_over_1", Asked::Min(1.6)),
            ("tenant_instructions_ratio", Asked::Max(0.4)),
        ],
        run: virtiofs::virtiofs,
    },
    Row {
        name: "tenants",
        about: "p99 of a polite tenant beside seven that flood, over that alone; shares against weights 1, 2, 4",
        asked: &[("flood_p99_ratio", Asked::Max(3.0)), ("share_error", Asked::Max(0.1))],
        run: tenants::tenants,
    },
    Row {
        name: "virtiofs-restart",
        about: "kill -9 of the virtio-fs device while its guest writes, makes files and syncs on a volume",
        asked: &[
            ("pause_ms", Asked::Max(500.0)),
            ("errors", Asked::Max(0.0)),
            ("lost", Asked::Max(0.0)),
        ],
        run: device_restart::restart,
    },
    Row {
        name: "nbd",
        about: "4 KiB by NBD from a file of the volume, depth 1 and 32, beside nbdkit memory",
        asked: &[("vs_nbdkit", Asked::Max(0.9)), ("replicated_vs_nbdkit", Asked::Max(1.5))],
        run: block::nbd,
    },
    Row {
        name: "block-cache",
        about: "4 KiB on a pool of stores that take 1 ms, beside the same without cache and merging",
        asked: &[
            ("seq_ratio", Asked::Min(8.0)),
            ("rand_ratio", Asked::Min(1.0)),
            ("coalesce_gain", Asked::Min(4.0)),
        ],
        run: block::cache,
    },
    Row {
        name: "pool",
        about: "RS(6,3) over nine directories; three lost; one that hangs",
        asked: &[("degraded_read_ratio", Asked::Min(0.7)), ("hang_p99_ratio", Asked::Max(2.0))],
        run: block::pool,
    },
    Row {
        name: "coalesce",
        about: "bytes sent over bytes written: 4 KiB written eight times, files of 16 KiB removed, before the next fsync",
        asked: &[
            ("wire_share_overwrite", Asked::Max(0.2)),
            ("wire_share_tmpfiles", Asked::Max(0.05)),
        ],
        run: line::coalesce,
    },
    Row {
        name: "idle",
        about: "CPU of an idle cluster, all processes, in percent of one core",
        asked: &[("cpu_percent", Asked::Max(1.0))],
        run: steady::idle,
    },
    Row {
        name: "shared-file",
        about: "4 KiB random reads by 1 to 16 threads beside 4 that write to the same file: operations a second",
        asked: &[("vs_ext4_16", Asked::Min(4.0)), ("vs_own_inode_lock", Asked::Min(2.0))],
        run: shared::shared_file,
    },
];

/// Runs `corbel bench …`; the exit code.
pub fn run(out: &Output, verb: &BenchVerb) -> Result<u8> {
    match verb {
        BenchVerb::FloorMember(member) => member.run()?,
        BenchVerb::Kernels(options) => {
            let figures = kernels::run(out.json, options)?;
            out.result(&json!({"bench": "kernels", "figures": figures}), || {
                for (figure, value) in &figures {
                    println!("{figure:<24} {value}");
                }
            });
        }
        BenchVerb::Rados(options) => {
            let figures = rados::run(out, options)?;
            out.result(&json!({"bench": "rados", "figures": figures}), || {
                for (figure, value) in &figures {
                    let asked = rados::ASKED.iter().find(|(key, _)| key == figure);
                    let note = asked.zip(value.as_f64()).map(|((_, asked), value)| {
                        let (met, text) = verdict(*asked, value, &Vec::new());
                        format!("  asked: {text}{}", if met { "" } else { "  MISSED" })
                    });
                    println!("{figure:<28}{value:>8}{}", note.unwrap_or_default());
                }
            });
        }
        // What was found is told; the code says the same.
        BenchVerb::Hunt(options) => {
            return Ok(if hunt::run(out, options)? { 0 } else { Kind::Failed.exit() });
        }
        _ => {}
    }
    let Some((name, options)) = verb.cluster() else { return Ok(0) };
    crate::signals::catch();
    let transport = if options.transport == "shm" { Transport::Shm } else { Transport::Tcp };
    let bench = Bench {
        replicas: options.replicas,
        transport,
        keep: options.keep,
        quick: options.quick,
        from: options.from.as_deref(),
        out,
    };
    if options.from.is_some() && name != "upgrade" {
        return Err(Failure::new(
            Kind::Usage,
            format!("bench {name} --from"),
            "only `corbel bench upgrade` begins with another build's program",
        ));
    }
    for row in BENCHES.iter().filter(|row| name == "all" || row.name == name) {
        out.step(format!("{}: {}", row.name, row.about));
        let figures = (row.run)(&bench)?;
        show(row, &figures, out);
    }
    Ok(0)
}

fn verdict(asked: Asked, value: f64, figures: &Measured) -> (bool, String) {
    match asked {
        Asked::Max(limit) => (value <= limit, format!("at most {limit}")),
        Asked::Min(limit) => (value >= limit, format!("at least {limit}")),
        Asked::MaxOf(key) => {
            let limit = figures.iter().find(|f| f.0 == key).map_or(0.0, |f| f.1);
            (value <= limit, format!("at most {key}"))
        }
    }
}

fn show(row: &Row, figures: &Measured, out: &Output) {
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    let object: Map<String, Value> =
        figures.iter().map(|(key, value)| ((*key).into(), json!(rounded(*value)))).collect();
    out.result(&json!({"bench": row.name, "figures": object}), || {
        for (key, value) in figures {
            let asked = row.asked.iter().find(|a| a.0 == *key);
            let note = asked.map_or_else(String::new, |(_, asked)| {
                let (met, text) = verdict(*asked, *value, figures);
                format!("  asked: {text}{}", if met { "" } else { "  MISSED" })
            });
            println!("  {key:<24}{:>12}{note}", rounded(*value));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_judged() {
        let figures: Measured = vec![("a", 2.0), ("limit", 3.0)];
        assert!(verdict(Asked::Max(2.0), 2.0, &figures).0);
        assert!(!verdict(Asked::Max(1.9), 2.0, &figures).0);
        assert!(!verdict(Asked::Min(2.1), 2.0, &figures).0);
        assert!(verdict(Asked::MaxOf("limit"), 2.0, &figures).0);
        assert!(!verdict(Asked::MaxOf("none"), 2.0, &figures).0);
    }
}
