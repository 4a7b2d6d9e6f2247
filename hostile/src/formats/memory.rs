//! What a client and its node put into shared memory and into the socket between them.

use std::sync::Arc;

use base::wire::{Corrupt, Reader};
use base::{ClientId, Epoch, Errno, InodeId, NodeId, Sequence};
use storage::acl::Acl;
use storage::format::control::{Descriptor, LeaseMode, LeaseWord};
use storage::format::lock::{LOCK_END, Lock, LockKind, LockSpace};
use storage::format::page::Key;
use storage::format::proof::Proof;
use storage::format::rpc::{
    self, Account, AccountId, Amount, Difference, Differences, Extent, Granted, HOST_ARENA,
    HOST_ATTACH, HOST_KNOWS, InodeRecord, InodeReply, Name, Request, SnapshotRecord, Span,
};

use super::{Format, Sum, words};

/// Every structure in memory shared with clients.
pub const MEMORY: &[Format] = &[
    Format {
        sum: Some(Sum { at: 12, from: 16, to: Some(80) }),
        ..Format::new("log descriptor", descriptors, |b| {
            Descriptor::decode(b).map(|d| d.encode()).map_err(words)
        })
    }
    .version(8, 4)
    .prefix(),
    Format::new("request", requests, |b| {
        let (after, proof, request) = Request::decode(b).map_err(words)?;
        let mut out = Vec::new();
        request.encode_shown(after, proof, &mut out);
        Ok(out)
    }),
    Format::new("reply with an inode", inode_replies, |b| {
        let reply = after_status(b, InodeReply::decode)?;
        let mut out = Vec::new();
        reply.encode(&mut out);
        Ok(out)
    }),
    Format::new("reply with names", name_replies, |b| {
        let mut out = b.get(..9).unwrap_or_default().to_vec();
        after_status(b, |r| {
            r.u8()?;
            while r.left() > 0 {
                rpc::put_name(&mut out, &rpc::take_name(r)?);
            }
            Ok(())
        })?;
        Ok(out)
    }),
    Format::new("reply with extents", extent_replies, |b| {
        let (reflected, complete, extents) = after_status(b, rpc::take_extents)?;
        let mut out = Vec::new();
        rpc::put_extents(&mut out, reflected, complete, &extents);
        Ok(out)
    }),
    Format::new("reply with a lock", lock_replies, |b| {
        let found = after_status(b, rpc::take_lock_test)?;
        let mut out = Vec::new();
        rpc::put_lock_test(&mut out, found.as_ref());
        Ok(out)
    }),
    Format::new("lock", locks, |b| {
        let lock = whole(b, Lock::decode)?;
        let mut out = Vec::new();
        lock.encode(&mut base::wire::Writer(&mut out));
        Ok(out)
    }),
    Format::new("request to hostd", host_requests, |b| {
        let (kind, argument) = rpc::host_request_decode(b).map_err(words)?;
        Ok(rpc::host_request(kind, argument).to_vec())
    })
    .version(4, 4),
    Format {
        // The text of an error is for people, who also read it when it is cut.
        lossy: true,
        ..Format::new("reply of hostd", host_replies, |b| {
            let status = rpc::host_reply_decode(b).map_err(words)?;
            Ok(rpc::host_reply(status.map_err(|e| (e, ""))).to_vec())
        })
    }
    .version(4, 4),
    Format::new("reply with accounts", account_replies, |b| {
        let mut out = b.get(..8).unwrap_or_default().to_vec();
        after_status(b, |r| {
            while r.left() > 0 {
                Account::decode(r)?.encode(&mut out);
            }
            Ok(())
        })?;
        Ok(out)
    }),
    Format::new("reply with snapshots", snapshot_replies, |b| {
        let mut out = b.get(..8).unwrap_or_default().to_vec();
        after_status(b, |r| {
            while r.left() > 0 {
                SnapshotRecord::decode(r)?.encode(&mut out);
            }
            Ok(())
        })?;
        Ok(out)
    }),
    Format::new("reply with differences", difference_replies, |b| {
        let mut out = b.get(..8).unwrap_or_default().to_vec();
        after_status(b, |r| {
            Differences::decode(r)?.encode(&mut out);
            Ok(())
        })?;
        Ok(out)
    }),
];

fn difference_replies() -> Vec<Vec<u8>> {
    let (dir, ino, name) = (InodeId(1), InodeId(7), b"name".to_vec());
    let all = vec![
        Difference::Named { dir, ino, kind: 0o100_000, name: name.clone() },
        Difference::Unnamed { dir, ino, name },
        Difference::Touched { ino },
        Difference::Content { ino, offset: 4096, len: 8192 },
    ];
    let reply = |next, all| {
        let mut out = Vec::new();
        rpc::reply_ok(&mut out);
        Differences { volume: *b"0123456789abcdef", next, all }.encode(&mut out);
        out
    };
    vec![reply(Some(Key::new(7, 4, 3)), all), reply(None, vec![])]
}

fn whole<'a, T>(
    bytes: &'a [u8],
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, Corrupt>,
) -> Result<T, String> {
    let mut r = Reader::new("structure", bytes);
    let value = read(&mut r).map_err(words)?;
    r.end().map_err(words)?;
    Ok(value)
}

/// What follows the status of a reply that is no error.
fn after_status<'a, T>(
    bytes: &'a [u8],
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, Corrupt>,
) -> Result<T, String> {
    let (status, mut r) = rpc::reply_status(bytes).map_err(words)?;
    status.map_err(|e| format!("refused with {e:?}"))?;
    let value = read(&mut r).map_err(words)?;
    r.end().map_err(words)?;
    Ok(value)
}

fn descriptors() -> Vec<Vec<u8>> {
    let sample = Descriptor {
        client: ClientId(9),
        incarnation: 7,
        lanes: 2,
        lane_bytes: 8 << 20,
        first_sequence: Sequence(1),
        node: NodeId(1),
        epoch: Epoch(1),
        arena_bytes: 1 << 20,
        keeps: true,
    };
    vec![sample.encode()]
}

fn lock(space: LockSpace, kind: LockKind) -> Lock {
    Lock { space, kind, owner: 3, pid: 4, start: 0, end: LOCK_END }
}

fn locks() -> Vec<Vec<u8>> {
    let all = [lock(LockSpace::Record, LockKind::Read), lock(LockSpace::Flock, LockKind::Write)];
    all.map(|l| {
        let mut out = Vec::new();
        l.encode(&mut base::wire::Writer(&mut out));
        out
    })
    .to_vec()
}

fn requests() -> Vec<Vec<u8>> {
    let (ino, mode, lock) =
        (InodeId(7), LeaseMode::Write, lock(LockSpace::Record, LockKind::Write));
    let all = [
        Request::Inode { ino, mode, flags: 7 },
        Request::Range { ino, flags: 7, from: 4096, to: 9000 },
        Request::Lookup { dir: ino, mode, flags: 1, name: b"name" },
        Request::Names { dir: ino, cookie: 2 },
        Request::Extents { ino, from: 1 },
        Request::XattrGet { ino, name: b"user.a" },
        Request::XattrList { ino },
        Request::XattrPart { ino, name: b"user.a", from: 3 },
        Request::Inodes { count: 5 },
        Request::Unpin { inodes: vec![ino, InodeId(8)] },
        Request::Keep { before: vec![ClientId(3)], inodes: vec![ino], last: true },
        Request::StatFs,
        Request::Inherit { heir: 0x1234_5678_9abc_def0_0fed_cba9_8765_4321 },
        Request::Release { slots: vec![1, 2, 3] },
        Request::Read { ino, offset: 1, len: 2 },
        Request::Lock { ino, wait: 1, lock },
        Request::LockTest { ino, lock },
        Request::LockCancel { ino, wait: 1 },
        Request::Accounts { after: None },
        Request::Accounts { after: Some(AccountId::User(7)) },
        Request::Accounts { after: Some(AccountId::Directory(ino)) },
        Request::Snapshots { after: 6 },
        Request::Differences { before: 1, number: 2, from: Key::new(3, 4, 5) },
    ];
    all.iter()
        .map(|request| {
            let mut out = Vec::new();
            request.encode(Sequence(5), &mut out);
            out
        })
        .collect()
}

fn inode_replies() -> Vec<Vec<u8>> {
    let extent = Extent {
        offset: 0,
        len: 4096,
        arena: 1,
        unwritten: true,
        shared: true,
        arena_offset: 8192,
    };
    let reply = InodeReply {
        granted: Granted { slot: 3, word: LeaseWord::new(4, LeaseMode::Read) },
        reflected: Sequence(9),
        record: InodeRecord {
            ino: InodeId(7),
            mode: 0o100_644,
            xattrs: true,
            ..Default::default()
        },
        extents: vec![extent, Extent { unwritten: false, ..extent }],
        complete: true,
        target: b"target".to_vec(),
        proof: Proof(5),
        parent_proof: Proof(6),
        span: Span { from: 4096, to: 12288 },
        since: 3,
    };
    let list = Acl::decode(&super::media::acls()[0]).expect("a list").map(Arc::new);
    let record = InodeRecord {
        acl: list.clone(),
        default_acl: list,
        project: InodeId(5),
        limited: true,
        linkable: true,
        ..reply.record.clone()
    };
    let listed = InodeReply { record, ..reply.clone() };
    [reply, listed]
        .map(|reply| {
            let mut out = Vec::new();
            reply.encode(&mut out);
            out
        })
        .to_vec()
}

fn extent_replies() -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    rpc::put_extents(&mut out, Sequence(3), false, &[Extent { len: 4096, ..Default::default() }]);
    vec![out]
}

fn account_replies() -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    rpc::reply_ok(&mut out);
    let (limit, used) = (Amount { blocks: 4, inodes: 0 }, Amount { blocks: 2, inodes: 1 });
    for id in [AccountId::User(7), AccountId::Directory(InodeId(9))] {
        Account { id, limit, used }.encode(&mut out);
    }
    vec![out]
}

fn snapshot_replies() -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    rpc::reply_ok(&mut out);
    for (number, slot) in [(1, 1), (9, 0x7fff)] {
        SnapshotRecord {
            number,
            slot,
            dir: InodeId(7),
            time: 77,
            inodes: 5,
            own_blocks: 3,
            proof: Proof(11),
            name: b"before the move".to_vec(),
        }
        .encode(&mut out);
    }
    vec![out]
}

fn lock_replies() -> Vec<Vec<u8>> {
    let found = lock(LockSpace::Record, LockKind::Read);
    [None, Some(&found)]
        .map(|found| {
            let mut out = Vec::new();
            rpc::put_lock_test(&mut out, found);
            out
        })
        .to_vec()
}

fn name_replies() -> Vec<Vec<u8>> {
    // A status that says yes, and that no more names follow.
    let mut out = vec![0, 0, 0, 0, 0, 0, 0, 0, 1];
    for name in [&b"a"[..], &[b'n'; 255]] {
        let proof = Proof(5);
        rpc::put_name(&mut out, &Name { ino: InodeId(7), kind: 0o100_000, next: 9, proof, name });
    }
    vec![out]
}

fn host_requests() -> Vec<Vec<u8>> {
    [(HOST_ATTACH, 4), (HOST_ARENA, 1), (HOST_KNOWS, 7)]
        .map(|(kind, argument)| rpc::host_request(kind, argument).to_vec())
        .to_vec()
}

fn host_replies() -> Vec<Vec<u8>> {
    vec![rpc::host_reply(Ok(7)).to_vec(), rpc::host_reply(Err((Errno::AGAIN, "full"))).to_vec()]
}
