//! What a node says of itself, as one JSON object.

use std::collections::BTreeMap;
use std::time::Duration;

use base::{Level, NodeId};
use cluster::transport::Counters;
use serde_json::{Value, json};

use crate::config::Pipeline;
use crate::core::snapshot::JoinStatus;
use crate::core::work::Kind;
use crate::core::{NodeStatus, Role};
use crate::packing::{self, Compression};

/// What the process knows and its node does not.
#[derive(Clone, Debug)]
pub struct Own {
    /// Which run of nicfs this is: counters begin at 0 with each.
    pub incarnation: u64,
    /// hostd is there.
    pub hostd: bool,
    /// Time for which peers and clients were not heard, at most.
    pub longest_turn: Duration,
    /// What somebody has to do, soon.
    pub warnings: Vec<String>,
    /// How messages to other nodes are packed.
    pub compression: Compression,
    /// What that came to.
    pub packing: packing::Counters,
    /// Who does the work of the stages.
    pub pipeline: Pipeline,
    /// What was done of it apart from deciding, by stage.
    pub work: BTreeMap<&'static str, Work>,
    /// Threads for it that there are now.
    pub threads: usize,
    /// Processor time of the process since it began.
    pub cpu: Duration,
}

/// Work of a stage that was done in pieces.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// How many.
    pub pieces: u64,
    /// Of how many bytes.
    pub bytes: u64,
    /// How long they took, by the clock.
    pub time: Duration,
}

/// Why fsync waits, and what to do, if the chain has fewer members than must hold what is acknowledged.
fn too_few(status: &NodeStatus) -> Option<String> {
    let listed = |nodes: &[base::NodeId]| {
        nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    let members = matches!(status.role, Role::Head | Role::Member);
    (members && status.too_few).then(|| {
        let joins = match &status.syncing[..] {
            [] => "start the services of the other nodes".to_owned(),
            nodes => format!("node {} is being brought up to date, wait for it", listed(nodes)),
        };
        format!(
            "fsync waits: the chain is node {} alone, and {} members must hold what is acknowledged \
             (cluster.min_replicas); {joins}. If they are lost for good, and only then: lower cluster.min_replicas \
             in the coordinator's configuration and start it again",
            listed(&status.chain),
            status.min_replicas
        )
    })
}

/// What is rotten, and what to do, if no other member has it.
fn rotten(status: &NodeStatus) -> Option<String> {
    (status.scrub.lost > 0).then(|| {
        format!(
            "{} blocks of files are rotten on node {}, and no other member of the chain has them: reading them fails (EIO). \
             Start the members that are away, if they may have them; else write these files anew from a copy, or remove \
             them. `corbel fsck --data` says which they are",
            status.scrub.lost, status.node
        )
    })
}

/// The object, ended by a newline.
pub fn json(status: &NodeStatus, net: &Counters, mut own: Own) -> String {
    own.warnings.extend(too_few(status));
    own.warnings.extend(rotten(status));
    let role = match status.role {
        Role::Outside => "outside",
        Role::Head => "head",
        Role::Member => "member",
        Role::Syncing => "syncing",
    };
    let numbers = |nodes: &[base::NodeId]| nodes.iter().map(|n| n.0).collect::<Vec<_>>();
    let clients: Vec<Value> = status
        .clients
        .iter()
        .map(|c| {
            json!({
                "client": format!("{:#x}", c.client.0),
                "pid": c.pid,
                "uid": c.uid,
                "pending_bytes": c.pending_bytes,
                "settled": c.settled.0,
                "published": c.published.0,
                "replicated": c.replicated.0,
                "leases": c.leases,
                "refusals": c.refusals,
            })
        })
        .collect();
    let c = &status.counters;
    let mut object = json!({
        "node": status.node.0,
        "role": role,
        "ready": status.ready,
        "fenced": status.fenced,
        "epoch": status.epoch.0,
        "chain": numbers(&status.chain),
        "syncing": numbers(&status.syncing),
        "stream_seq": status.stream.0,
        "applied": status.applied.0,
        "published": status.published.0,
        "all_acked": status.all_acked.0,
        "leases": status.leases,
        "requests": status.requests,
        "recalls": status.recalls,
        "hostd": own.hostd,
        "failure": status.failure,
        "clients": clients,
        "counters": {
            "chunks": c.chunks,
            "entries": c.entries,
            "entry_bytes": c.entry_bytes,
            "refused": c.refused,
            "publishes": c.publishes,
            "copied_bytes": c.copied_bytes,
            "host_copies": c.host_copies,
            "isolated_copies": c.isolated_copies,
            "leases_granted": c.leases_granted,
            "recalls": c.recalls,
            "expelled": c.expelled,
            "requests": c.requests,
            "bad_requests": c.bad_requests,
            "bad_messages": c.bad_messages,
            "foreign": c.foreign,
            "unshown": c.unshown,
            "old_epoch": c.old_epoch,
            "syncs": c.syncs,
            "snapshots": c.snapshots,
            "frames_out": net.frames_out,
            "frames_in": net.frames_in,
            "bytes_out": net.bytes_out,
            "bytes_in": net.bytes_in,
        },
    });
    // The macro does not take many more fields than these.
    object["counters"]["settled_copies"] = c.settled_copies.into();
    object["counters"]["broken_logs"] = c.broken_logs.into();
    object["counters"]["not_due"] = c.not_due.into();
    object["counters"]["resized_logs"] = c.resized_logs.into();
    object["counters"]["crowded_out"] = c.crowded_out.into();
    object["counters"]["barred"] = c.barred.into();
    object["counters"]["throttled"] = c.throttled.into();
    object["counters"]["leases_over"] = c.leases_over.into();
    object["counters"]["coalesced"] = c.coalesced.into();
    object["counters"]["coalesced_bytes"] = c.coalesced_bytes.into();
    object["counters"]["parts"] = c.parts.into();
    let p = own.packing;
    object["counters"]["message_bytes"] = p.raw_out.into();
    object["counters"]["message_wire_bytes"] = p.wire_out.into();
    object["counters"]["packed"] = p.packed.into();
    object["counters"]["packed_from_bytes"] = p.packed_from.into();
    object["counters"]["packed_to_bytes"] = p.packed_to.into();
    object["counters"]["packed_in_vain"] = p.not_worth.into();
    object["counters"]["packed_passed_on"] = p.passed_on.into();
    object["counters"]["unpacked"] = p.unpacked.into();
    object["counters"]["unpacked_bytes"] = p.unpacked_to.into();
    object["counters"]["bad_packed"] = p.bad.into();
    object["pipeline"] = own.pipeline.name().into();
    object["work_threads"] = own.threads.into();
    object["cpu_us"] = (own.cpu.as_micros() as u64).into();
    // Each stage is there, whether it has done anything or not.
    let stages = Kind::ALL.into_iter().map(Kind::name).chain(["verify", "pack", "unpack"]);
    for stage in stages {
        let work = own.work.get(stage).copied().unwrap_or_default();
        object["counters"][format!("work_{stage}")] = work.pieces.into();
        object["counters"][format!("work_{stage}_bytes")] = work.bytes.into();
        object["counters"][format!("work_{stage}_us")] = (work.time.as_micros() as u64).into();
    }
    object["counters"]["fetched_bytes"] = c.fetched_bytes.into();
    object["counters"]["hosted_bytes"] = c.hosted_bytes.into();
    object["counters"]["kept_bytes"] = c.kept_bytes.into();
    object["counters"]["kept_inline"] = c.kept_inline.into();
    object["compression"] = own.compression.name().into();
    object["compression_ratio"] = p.ratio().into();
    object["longest_turn_us"] = (own.longest_turn.as_micros() as u64).into();
    object["warnings"] = own.warnings.into();
    object["locks"] = status.locks.into();
    object["own_locks"] = status.own_locks.into();
    object["checksums"] = status.scrub.sums.into();
    object["incarnation"] = own.incarnation.into();
    object["scrub_running"] = status.scrub.running.into();
    object["scrub_bytes"] = status.scrub.bytes.into();
    object["scrub_passes"] = status.scrub.passes.into();
    object["snapshots"] = status.snapshots.into();
    object["snapshot_blocks"] = status.snapshot_blocks.into();
    object["rotten_blocks"] = status.scrub.rotten.into();
    object["lost_blocks"] = status.scrub.lost.into();
    object["counters"]["scrubbed_bytes"] = c.scrubbed_bytes.into();
    object["counters"]["rotten"] = c.rotten.into();
    object["counters"]["mended"] = c.mended.into();
    let join = |j: &JoinStatus| {
        let seconds = j.since as f64 / 1e9;
        json!({"node": j.node.0, "inodes": j.inodes, "inodes_done": j.passed, "sent_bytes": j.sent, "seconds": seconds})
    };
    object["joins"] = status.joins.iter().map(join).collect::<Vec<_>>().into();
    let lacks = |(node, chunks): &(NodeId, u64)| json!({"node": node.0, "chunks_missing": chunks});
    object["catching_up"] = status.catching_up.iter().map(lacks).collect::<Vec<_>>().into();
    object["unplaced"] = status.unplaced.into();
    object["min_replicas"] = status.min_replicas.into();
    object["level"] = status.level.0.into();
    object["newest_level"] = Level::NEWEST.0.into();
    object["too_few_replicas"] = status.too_few.into();
    object["counters"]["locks"] = c.locks.into();
    object["counters"]["snapshot_bytes"] = c.snapshot_bytes.into();
    object["counters"]["taken_over_bytes"] = c.taken_over_bytes.into();
    object["counters"]["returns"] = c.returns.into();
    object["counters"]["locks_refused"] = c.locks_refused.into();
    object["counters"]["soles"] = c.soles.into();
    object["counters"]["soles_back"] = c.soles_back.into();
    format!("{object}\n")
}
