//! Limits, with their arithmetic. Ceph's own formats allow more; no cluster comes near.

/// Buckets in a map. A bucket costs some 200 bytes here; libcrush doubles its table up to this.
pub const BUCKETS_MAX: usize = 1 << 20;

/// Highest device number + 1. Reweight vectors have an entry each: 64 MiB at most.
pub const DEVICES_MAX: usize = 1 << 24;

/// Rules in a map: the rule number is one byte in the mask.
pub const RULES_MAX: usize = 256;

/// Items that all buckets together may hold: 64 Mi placements of 8 bytes in the flat form.
pub const ITEMS_MAX: usize = 1 << 26;

/// Levels of the hierarchy. Ceph's default has 12 types; recursion over the map stops here.
pub const DEPTH_MAX: usize = 64;

/// Results of one rule. Ceph's pools are limited to 10 replicas and some 30 chunks.
pub const RESULT_MAX: usize = 1024;

/// Work of one mapping, in items drawn. With Ceph's tunables a three-replica mapping over 1,000
/// devices draws 105, and some 5,000 with every device out. A tenth of a second ends it here.
pub const DRAWS_MAX: u64 = 1 << 24;

/// Weight of one device in text form, 100.0 in 16.16, as in crushtool.
pub const DEVICE_WEIGHT_MAX: u32 = 100 * 0x1_0000;

/// Weight of a bucket in text form, 65,535.0 in 16.16.
pub const BUCKET_WEIGHT_MAX: u32 = 65_535 * 0x1_0000;

/// Items of a tree bucket: its number of nodes, a power of two, is one byte in the binary form.
pub const TREE_ITEMS_MAX: usize = 64;
