//! What lies on media.

use base::{ClientId, Epoch, InodeId, NodeId, Sequence, StreamSeq, crc32c};
use storage::acl::Acl;
use storage::format::chunk::{CHUNK_HEADER_BYTES, ChunkHeader};
use storage::format::clients::{self, HELD_BYTES, Held, PROGRESS_BYTES, Progress, Record};
use storage::format::entry::{self, HEADER_BYTES, Op, Stamp};
use storage::format::item::{
    AccountItem, Inode, ReadClass, Run, Shared, Snapshot, SnapshotRoot, decode_name,
};
use storage::format::page::{Key, PAGE_BYTES, Page};
use storage::format::publications::Publications;
use storage::format::rpc::Amount;
use storage::format::superblock::{
    Durability, ROOT_BYTES, RootRecord, SUPERBLOCK_BYTES, Superblock,
};
use storage::format::transfer;
use storage::limits::LANES_MAX;

use super::{Format, Sum, words};

/// Number of the sample page.
const NUMBER: u64 = 5;
/// Incarnation of the sample log, the seed of its checksums.
pub const INCARNATION: u32 = 7;

/// Every structure on media.
pub const MEDIA: &[Format] = &[
    Format {
        sum: Some(Sum { at: 12, from: 16, to: Some(SUPERBLOCK_BYTES) }),
        ..Format::new("superblock", superblocks, |b| {
            Superblock::decode(b).map(|s| s.encode()).map_err(words)
        })
    }
    .version(8, 4)
    .prefix(),
    Format {
        sum: Some(Sum { at: 4, from: 8, to: Some(ROOT_BYTES) }),
        ..Format::new("root record", roots, |b| {
            RootRecord::decode(b).map(|r| r.encode()).map_err(words)
        })
    }
    .version(8, 4)
    .prefix(),
    Format {
        sum: Some(Sum { at: 4, from: 8, to: None }),
        ..Format::new("publications", publications, |b| {
            Publications::decode(b).map(|p| p.encode()).map_err(words)
        })
    }
    .version(8, 4)
    .prefix(),
    Format {
        sum: Some(Sum { at: 4, from: 8, to: Some(PAGE_BYTES) }),
        ..Format::new("tree page", pages, page)
    }
    .version(8, 2)
    .prefix(),
    Format::new("attributes", inodes, |b| {
        Inode::decode(b).map(|i| i.encode().to_vec()).map_err(words)
    }),
    Format {
        // Ids of entries that have none are not looked at, as in the kernel.
        lossy: true,
        ..Format::new("access control list", acls, |b| match Acl::decode(b).map_err(words)? {
            Some(acl) => Ok(acl.encode()),
            // One that says nothing.
            None => Ok(Vec::new()),
        })
    }
    .version(0, 4),
    Format::new("extent", runs, |b| Run::decode(9, b).map(|r| r.encode().to_vec()).map_err(words)),
    Format::new("shared blocks", shared, |b| {
        Shared::decode(9, b).map(|s| s.encode().to_vec()).map_err(words)
    }),
    Format::new("arena", classes, |b| {
        ReadClass::decode(b).map(|c| c.encode().to_vec()).map_err(words)
    }),
    Format::new("directory entry", names, |b| {
        let (ino, kind, name) = decode_name(b).map_err(words)?;
        Ok([&ino.0.to_le_bytes()[..], &[(kind >> 12) as u8], name].concat())
    }),
    Format::new("log entry", entries, log_entry).prefix(),
    Format {
        sum: Some(Sum { at: 8, from: 12, to: Some(CHUNK_HEADER_BYTES) }),
        ..Format::new("chunk header", chunks, |b| {
            ChunkHeader::decode(b).map(|c| c.encode().to_vec()).map_err(words)
        })
    }
    .version(4, 2)
    .prefix(),
    Format {
        sum: Some(Sum { at: 4, from: 8, to: Some(64) }),
        ..Format::new("client table header", table_headers, |b| {
            clients::Header::decode(b).map(|h| h.encode()).map_err(words)
        })
    }
    .version(8, 4)
    .prefix(),
    Format::new("client record", records, |b| match Record::decode(b).map_err(words)? {
        Some(record) => Ok(record.encode()),
        // A row that is free.
        None => Ok(vec![0; 8]),
    })
    .sum(4, 8)
    .version(8, 4)
    .prefix(),
    Format {
        sum: Some(Sum { at: 4, from: 8, to: Some(PROGRESS_BYTES) }),
        ..Format::new("client progress", progresses, |b| {
            Progress::decode(b).map(|p| p.encode()).map_err(words)
        })
    }
    .prefix(),
    Format::new("held lease", helds, held).prefix(),
    Format::new("account", accounts, |b| {
        AccountItem::decode(b).map(|a| a.encode().to_vec()).map_err(words)
    }),
    Format::new("snapshot", snapshots, |b| Snapshot::decode(b).map(|s| s.encode()).map_err(words)),
    Format::new("root of a snapshot", snapshot_roots, |b| {
        SnapshotRoot::decode(b).map(|r| r.encode()).map_err(words)
    }),
    // What a file or a pipe brings (`corbel receive`).
    Format::new("record of a sent snapshot", transfers, transfer).sum(4, 8),
];

fn transfers() -> Vec<Vec<u8>> {
    let (ino, dir, at) = (InodeId(7), InodeId(1), Stamp { sec: 5, nsec: 6 });
    let xattrs = vec![b"user.a".to_vec(), b"user.b".to_vec()];
    let (mode, uid, gid, atime, mtime) = (0o644, 1, 2, at, at);
    let what = transfer::Attributes { mode, uid, gid, atime, mtime, xattrs };
    let all = [
        transfer::Record::Begin {
            volume: *b"0123456789abcdef",
            number: 3,
            before: 2,
            time: 1,
            root: dir,
            from: transfer::Position { offset: 5, ..transfer::Position::default() },
            name: b"tuesday".to_vec(),
        },
        transfer::Record::Inode { ino, mode: 0o120_000, rdev: 0, target: b"a/b".to_vec() },
        transfer::Record::Unnamed { dir, ino, last: true, name: b"n".to_vec() },
        transfer::Record::Named { dir, ino, name: vec![b'n'; 255] },
        transfer::Record::Attributes { ino, last: true, what },
        transfer::Record::Xattr { ino, name: b"user.a".to_vec(), value: vec![1; 50] },
        transfer::Record::File { ino, size: 9 },
        transfer::Record::Data { ino, offset: 4096, bytes: vec![1, 2, 3] },
        transfer::Record::Zero { ino, offset: 8192, len: 4096 },
        transfer::Record::Gone { ino },
        transfer::Record::End { records: 8 },
    ];
    let frame = |record: &transfer::Record| {
        let mut bytes = Vec::new();
        record.encode(&mut 0, &mut bytes);
        bytes
    };
    all.iter().map(frame).collect()
}

fn transfer(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let Some((frame, body)) = bytes.split_first_chunk() else {
        return Err("the frame of a record is cut off".into());
    };
    let (len, crc) = transfer::Record::frame(frame).map_err(words)?;
    if body.len() != len {
        return Err("the body of a record is cut off".into());
    }
    let record = transfer::Record::decode(body, crc, &mut 0).map_err(words)?;
    let mut again = Vec::new();
    record.encode(&mut 0, &mut again);
    Ok(again)
}

fn superblocks() -> Vec<Vec<u8>> {
    let sample = Superblock {
        uuid: *b"0123456789abcdef",
        created: 7,
        capacity_blocks: 1 << 20,
        node: NodeId(3),
        durability: Durability::Disk,
        name: "vol".into(),
        tree_pages: 1 << 16,
        stream_bytes: 64 << 20,
        sums: true,
    };
    vec![sample.encode()]
}

fn roots() -> Vec<Vec<u8>> {
    let sample = RootRecord { transaction: 9, page: 4, blocks: 17, ..Default::default() };
    vec![sample.encode(), RootRecord { snapshots: 3, ..sample }.encode()]
}

fn publications() -> Vec<Vec<u8>> {
    let of = |n: u64| (1..=n).map(|n| (StreamSeq(7 * n), 3 * n)).collect();
    [0, 1, 240].map(|n| Publications { uuid: [9; 16], start: 4, all: of(n) }.encode()).into()
}

fn pages() -> Vec<Vec<u8>> {
    let mut leaf = Page::new(NUMBER, 1, 0);
    for i in 0..12 {
        assert!(leaf.insert_at(i, Key::new(1, 1, i as u64), &[i as u8; 40]), "there is room");
    }
    let mut branch = Page::new(NUMBER, 1, 1);
    for i in 0..3u64 {
        let child = (i + 8).to_le_bytes();
        assert!(branch.insert_at(i as usize, Key::new(i, 0, 0), &child), "there is room");
    }
    vec![leaf.encode().to_vec(), branch.encode().to_vec()]
}

/// Whatever is accepted can be searched and emptied.
fn page(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let page = Page::decode(bytes, NUMBER).map_err(words)?;
    let mut copy = page.clone();
    for i in 0..copy.count() {
        assert_eq!(copy.search(copy.key(i)), Ok(i));
        let (key, value) = (copy.key(i), copy.value(i));
        let _ = (Inode::decode(value), Run::decode(key.item, value));
        let _ = (ReadClass::decode(value), decode_name(value), Shared::decode(key.item, value));
    }
    while copy.count() > 0 && copy.level() == 0 {
        copy.remove_at(copy.count() / 2);
    }
    // Room between the cells need not be zero; the checksum covers it.
    let again = page.encode();
    assert!(Page::decode(&again, NUMBER).is_ok());
    Ok(bytes[..PAGE_BYTES].to_vec())
}

fn inodes() -> Vec<Vec<u8>> {
    let stamp = Stamp { sec: -1, nsec: 999_999_999 };
    let sample = Inode { mode: 0o100_644, nlink: 1, mtime: stamp, size: 5, ..Default::default() };
    let listed = Inode { acl: true, default_acl: true, xattrs: 70, ..sample };
    let counted = Inode { project: InodeId(5), ..sample };
    [sample, listed, counted].map(|inode| inode.encode().to_vec()).to_vec()
}

fn accounts() -> Vec<Vec<u8>> {
    let limit = Amount { blocks: 100, inodes: 0 };
    vec![AccountItem { limit, used: Amount { blocks: 7, inodes: 3 } }.encode().to_vec()]
}

fn snapshots() -> Vec<Vec<u8>> {
    let sample = Snapshot {
        slot: 3,
        dir: InodeId(9),
        time: 77,
        inodes: 5,
        name: b"before the move".to_vec(),
    };
    vec![sample.encode(), Snapshot { slot: 0x7fff, name: b"x".to_vec(), ..sample }.encode()]
}

fn snapshot_roots() -> Vec<Vec<u8>> {
    vec![SnapshotRoot { page: 12, level: 2, transaction: 8 }.encode()]
}

/// As programs and the kernel write them: version 2, then tag, permissions and id of each entry.
pub(super) fn acls() -> Vec<Vec<u8>> {
    let list = |entries: &[(u16, u16, u32)]| {
        let mut bytes = vec![2, 0, 0, 0];
        for (tag, bits, id) in entries {
            bytes.extend_from_slice(&tag.to_le_bytes());
            bytes.extend_from_slice(&bits.to_le_bytes());
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        bytes
    };
    let (none, owner) = (u32::MAX, (1, 6, u32::MAX));
    let named = [owner, (2, 7, 1000), (4, 4, none), (8, 5, 100), (16, 7, none), (32, 0, none)];
    vec![list(&named), list(&[owner, (4, 4, none), (32, 4, none)])]
}

fn runs() -> Vec<Vec<u8>> {
    let run = |unwritten| Run { file: 9, arena: 1, block: 7, len: 3, unwritten };
    vec![run(false).encode().to_vec(), run(true).encode().to_vec()]
}

fn shared() -> Vec<Vec<u8>> {
    let shared = |len, owners| Shared { arena: 0, block: 9, len, owners }.encode().to_vec();
    vec![shared(1, 2), shared(700, 9)]
}

fn classes() -> Vec<Vec<u8>> {
    let all = [
        ReadClass::World,
        ReadClass::Group { uid: 1, gid: 2 },
        ReadClass::Owner { uid: 3 },
        ReadClass::Service,
    ];
    all.iter().map(|c| c.encode().to_vec()).collect()
}

fn names() -> Vec<Vec<u8>> {
    vec![[&7u64.to_le_bytes()[..], &[8], b"a name"].concat()]
}

/// One entry of every operation.
pub(super) fn operations() -> Vec<Op<'static>> {
    let (ino, parent, name) = (InodeId(7), InodeId(1), &b"name"[..]);
    let stamp = Stamp::default();
    vec![
        Op::Pad,
        Op::Create { ino, parent, mode: 0o100_644, rdev: 0, uid: 1, gid: 2, name, target: b"" },
        Op::Link { ino, parent, name },
        Op::Unlink { ino, parent, name, open: true },
        Op::Rmdir { ino, parent, name, open: true },
        Op::Rename {
            ino,
            parent,
            name,
            new_parent: InodeId(5),
            new_name: b"new",
            replaced: InodeId(8),
            noreplace: false,
            exchange: true,
            open: false,
        },
        Op::Write { ino, offset: 100, data: b"some bytes", clear_setid: true },
        Op::Truncate { ino, size: 5, clear_setid: false },
        Op::Fallocate { ino, offset: 1, len: 2, mode: 3 },
        Op::SetAttr { ino, mask: 31, mode: 0o600, uid: 1, gid: 2, atime: stamp, mtime: stamp },
        Op::SetXattr { ino, name: b"user.a", value: b"value" },
        Op::RemoveXattr { ino, name: b"user.a" },
        Op::CloneRange {
            ino,
            offset: 0,
            len: 5,
            source: InodeId(9),
            source_offset: 3,
            zeroes: true,
        },
        Op::Shift { ino, offset: 4096, len: 8192, insert: true, size: 20480 },
        Op::Move { ino, from: 1, to: 9, out: true },
        Op::Reap { ino },
        Op::Place { ino, reach: ReadClass::Group { uid: 3, gid: 4 }, later: true },
        Op::Tmpfile { ino, parent, mode: 0o100_600, uid: 1, gid: 2, linkable: true },
        Op::SetQuota { ino, user: None, limit: Amount { blocks: 9, inodes: 8 } },
        Op::SetQuota { ino: parent, user: Some(7), limit: Amount::default() },
        Op::SetProject { ino, project: InodeId(5) },
        Op::Snapshot { ino: parent, name },
        Op::DropSnapshot { ino: parent, name },
    ]
}

fn entries() -> Vec<Vec<u8>> {
    let whole = |op: &Op<'_>| {
        let mut bytes = op.to_entry(Sequence(3), Epoch(2), 1, 77, INCARNATION);
        let length = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
        bytes.truncate(HEADER_BYTES + length);
        bytes
    };
    operations().iter().map(whole).collect()
}

/// An entry as it is, and with its checksum made right (its seed is the log's incarnation).
fn log_entry(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let read = |bytes: &[u8]| {
        let (header, op) = entry::decode(bytes, INCARNATION).map_err(words)?;
        let length = header.length as usize;
        if op == Op::Pad {
            return Ok(bytes[..HEADER_BYTES].to_vec());
        }
        let (seq, epoch) = (header.sequence, header.epoch);
        let (lane, time) = (header.lane, header.time);
        let mut again = op.to_promised_entry(header.promised, seq, epoch, lane, time, INCARNATION);
        again.truncate(HEADER_BYTES + length);
        Ok(again)
    };
    let mut forged = bytes.to_vec();
    if forged.len() >= HEADER_BYTES {
        let claimed = u32::from_le_bytes([forged[4], forged[5], forged[6], forged[7]]) as usize;
        let end = HEADER_BYTES.saturating_add(claimed).min(forged.len());
        let crc = crc32c(INCARNATION, &forged[4..end]);
        forged[..4].copy_from_slice(&crc.to_le_bytes());
        if let Ok(again) = read(&forged) {
            super::same("forged log entry", &forged[..again.len()], &again);
        }
    }
    read(bytes)
}

fn chunks() -> Vec<Vec<u8>> {
    let sample = ChunkHeader {
        epoch: Epoch(1),
        stream_seq: StreamSeq(2),
        client: ClientId(3),
        last_seq: Sequence(4),
        incarnation: 5,
        entries: 3,
        body_bytes: 640,
        time: 9,
        refusals: 2,
        refused: Sequence(4),
        errno: 28,
    };
    vec![sample.encode().to_vec()]
}

fn table_headers() -> Vec<Vec<u8>> {
    vec![clients::Header { starts: 3, number: 4, boot: 5, secret: 6 }.encode()]
}

fn records() -> Vec<Vec<u8>> {
    let sample = |groups| Record {
        client: ClientId(9),
        segment: 1,
        incarnation: INCARNATION,
        lanes: 2,
        lane_bytes: 8 << 20,
        pid: 100,
        start_time: 5,
        epoch: Epoch(1),
        uid: 1,
        gid: 2,
        groups,
    };
    vec![sample(Vec::new()).encode(), sample(vec![4, 5, 6]).encode()]
}

fn progresses() -> Vec<Vec<u8>> {
    let mut lanes = [0; LANES_MAX];
    lanes[1] = 640;
    let sample = Progress {
        incarnation: INCARNATION,
        number: 2,
        published: Sequence(3),
        lanes,
        sealed: None,
        over: false,
    };
    let sealed = Progress { sealed: Some(Sequence(9)), ..sample };
    let over = Progress { over: true, ..sealed };
    vec![sample.encode(), sealed.encode(), over.encode()]
}

/// Where in its row the sample lies.
const HELD_AT: u64 = clients::PINS;

fn helds() -> Vec<Vec<u8>> {
    let held = |ino, what| Held { ino: InodeId(ino), what }.encode(INCARNATION, HELD_AT).to_vec();
    vec![held(7, 1), held(7, 3), Held::FREE.encode(INCARNATION, HELD_AT).to_vec()]
}

fn held(bytes: &[u8]) -> Result<Vec<u8>, String> {
    match Held::decode(bytes, INCARNATION, HELD_AT).map_err(words)? {
        Some(held) => Ok(held.encode(INCARNATION, HELD_AT).to_vec()),
        None => Ok(vec![0; HELD_BYTES]),
    }
}
