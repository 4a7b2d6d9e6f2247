//! The stages of the data path. Each has a file; [`STAGES`] says what waits before each, how much of it there can be, and who
//! does the work. `docs/service.md` has the same table (`service/tests/docs.rs` compares them).

pub(in crate::core) mod apply;
pub(in crate::core) mod check;
pub(in crate::core) mod draft;
pub(in crate::core) mod fetch;
pub(in crate::core) mod keep;
pub(in crate::core) mod order;
pub(in crate::core) mod publish;
pub(in crate::core) mod send;

/// One stage.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// Its name, and that of its file.
    pub name: &'static str,
    /// What it does.
    pub does: &'static str,
    /// What waits before it.
    pub queue: &'static str,
    /// How much can wait, by the configuration (`limits.memory`) or the limits that are compiled in (`fetch_bytes`).
    pub bound: &'static str,
    /// Who does it.
    pub run_by: &'static str,
}

/// All of them, in the order in which a write passes them.
pub const STAGES: [Stage; 7] = [
    Stage {
        name: "fetch",
        does: "copies whole entries out of a client's log, in their sequence, and compares their checksums",
        queue: "entries in the lanes of a log",
        bound: "`log.lanes` × `log.lane_bytes`; 1 MiB at a time (`fetch_bytes`), 256 KiB for another node (`forward_bytes`)",
        run_by: "the pool, one piece a client, from 128 KiB on (`service.inline`), beside others that wait from a quarter of that on; less, or a log that has to be read to its end, the thread that decides; for each node's own clients",
    },
    Stage {
        name: "check",
        does: "form, epoch, lease, number, permission, name; cycles, quota and space when it is applied",
        queue: "messages of agents that found no room (`Head::stalled`)",
        bound: "what the logs hold from which they come",
        run_by: "the thread that decides, at the head",
    },
    Stage {
        name: "order",
        does: "applies what passes, leaves out what the chunk undoes, gives the next stream number",
        queue: "one draft",
        bound: "4 MiB (`CHUNK_BYTES_MAX`); a turn (`turn`)",
        run_by: "the thread that decides, at the head",
    },
    Stage {
        name: "keep",
        does: "makes the chunk persistent in this node's ring",
        queue: "chunks that came before others; chunks on their way into the ring",
        bound: "256 chunks (`stash`); 16 MiB (`behind_bytes`), 4 MiB a piece (`piece_bytes`), 4 pieces (`keepers`); the ring is `node.stream`",
        run_by: "the pool, from 128 KiB on (`service.inline`), where chunks of several clients follow within a millisecond (`crowd`) from a quarter of that on; else the thread that decides; on every member",
    },
    Stage {
        name: "send",
        does: "down the chain; acknowledgements back to the head, which tells what all have",
        queue: "chunks that not every member has acknowledged",
        bound: "`limits.high_watermark` percent of `limits.memory` and a chunk; 512 KiB of a client beside whom others wait (`shared_window`)",
        run_by: "the thread that decides; the pool compresses",
    },
    Stage {
        name: "apply",
        does: "brings the chunk into the working state",
        queue: "chunks in the ring that are not applied",
        bound: "the ring; 8 MiB of them in memory (`recent_bytes`)",
        run_by: "the thread that decides: the head as it orders, others in slices of work",
    },
    Stage {
        name: "publish",
        does: "copies into the arenas, new tree pages, a fence, the root",
        queue: "chunks that are applied and not published",
        bound: "the ring; begins at 2 MiB (`publish_bytes`), after 5 ms, or when somebody waits",
        run_by: "hostd copies 16 MiB at a time from 128 KiB on; without it the pool, one piece of 4 MiB (`piece_bytes`) at a time, from 128 KiB on (`service.inline`); less, the thread that decides, 256 KiB a slice",
    },
];

/// The table of [`STAGES`] in Markdown.
pub fn table() -> String {
    let mut text = String::from("| stage | what it does | before it waits | at most | done by |\n");
    text.push_str("| --- | --- | --- | --- | --- |\n");
    for Stage { name, does, queue, bound, run_by } in &STAGES {
        text.push_str(&format!("| `{name}` | {does} | {queue} | {bound} | {run_by} |\n"));
    }
    text
}
