//! What the tests of the volume share: a region that is removed afterwards, and a driver that
//! writes entries into the stream segment and applies them from there, as the service does.
#![allow(dead_code)]

pub mod whole;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use base::{Epoch, InodeId, NodeId, Sequence, StreamSeq};
use storage::format::entry::{self, HEADER_BYTES, Op};
use storage::format::superblock::Durability;
use storage::media::{Media, Segment};
use storage::region::FileRegion;
use storage::volume::{Applied, Params, Refusal, Volume, run_copies};

/// A directory that lives as long as the value.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let shm = PathBuf::from("/dev/shm");
        let base = if shm.is_dir() { shm } else { std::env::temp_dir() };
        let path = base.join(format!("corbel-test-{}-{n}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Dir(path)
    }

    pub fn region(&self) -> Arc<dyn Media> {
        Arc::new(FileRegion::create(&self.0, Durability::Replicated).unwrap())
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn params(capacity_bytes: u64) -> Params {
    Params {
        uuid: *b"corbel test uuid",
        name: "test".into(),
        node: NodeId(1),
        durability: Durability::Replicated,
        capacity_bytes,
        stream_bytes: 0,
        time: 1_000_000_007,
        uid: 0,
        gid: 0,
        mode: 0o755,
    }
}

pub const STREAM: u64 = 64 << 20;

/// A volume with the means to feed it.
pub struct Driver {
    pub dir: Dir,
    pub media: Arc<dyn Media>,
    pub volume: Volume,
    pub sequence: u64,
    pub position: u64,
    pub time: u64,
}

impl Driver {
    pub fn new(capacity_bytes: u64) -> Self {
        let dir = Dir::new();
        let media = dir.region();
        let volume = Volume::format(media.clone(), &params(capacity_bytes)).unwrap();
        media.ensure(Segment::Stream, STREAM).unwrap();
        Self { dir, media, volume, sequence: 0, position: 0, time: 2_000_000_000 }
    }

    /// Applies one operation by way of its bytes in the stream.
    pub fn apply(&mut self, op: &Op<'_>) -> Result<Applied, Refusal> {
        self.sequence += 1;
        self.time += 1_000_003;
        let bytes = op.to_entry(Sequence(self.sequence), Epoch(1), 0, self.time, 7);
        if self.position + bytes.len() as u64 > STREAM {
            self.publish();
            self.position = 0;
        }
        self.media.write(Segment::Stream, self.position, &bytes).unwrap();
        let source = (Segment::Stream, self.position + HEADER_BYTES as u64);
        self.position += bytes.len() as u64;
        let (header, decoded) = entry::decode(&bytes, 7).unwrap();
        assert_eq!(decoded, *op);
        self.volume.apply(&header, &decoded, source)
    }

    /// The same, publishing first when the volume asks for it.
    pub fn must(&mut self, op: &Op<'_>) -> Result<Applied, Refusal> {
        match self.apply(op) {
            Err(Refusal::NeedsPublish) => {
                self.publish();
                self.apply(op)
            }
            done => done,
        }
    }

    pub fn publish(&mut self) {
        let sealed = self.volume.seal(StreamSeq(self.sequence), Epoch(1), &[]).unwrap();
        run_copies(&*self.media, &sealed.copies).unwrap();
        self.volume.publish(sealed).unwrap();
    }

    pub fn reopen(&mut self) {
        self.volume = Volume::open(self.media.clone()).unwrap();
    }

    pub fn read(&self, ino: u64) -> Vec<u8> {
        let size = self.volume.attr(InodeId(ino)).unwrap().unwrap().size;
        let mut bytes = vec![0xaa; size as usize];
        assert_eq!(self.volume.read_file(InodeId(ino), 0, &mut bytes), Ok(bytes.len()));
        bytes
    }
}

pub fn create<'a>(ino: u64, parent: u64, name: &'a [u8], mode: u32) -> Op<'a> {
    let (ino, parent) = (InodeId(ino), InodeId(parent));
    Op::Create { ino, parent, mode, rdev: 0, uid: 10, gid: 20, name, target: b"" }
}

pub fn write(ino: u64, offset: u64, data: &[u8]) -> Op<'_> {
    Op::Write { ino: InodeId(ino), offset, data, clear_setid: false }
}

pub fn truncate(ino: u64, size: u64) -> Op<'static> {
    Op::Truncate { ino: InodeId(ino), size, clear_setid: false }
}

pub fn unlink(ino: u64, parent: u64, name: &[u8]) -> Op<'_> {
    Op::Unlink { ino: InodeId(ino), parent: InodeId(parent), name, open: false }
}

pub fn chmod(ino: u64, mode: u32) -> Op<'static> {
    let zero = Default::default();
    let (uid, gid) = (0, 0);
    Op::SetAttr { ino: InodeId(ino), mask: 1, mode, uid, gid, atime: zero, mtime: zero }
}

pub fn rename<'a>(
    ino: u64,
    (parent, name): (u64, &'a [u8]),
    (new_parent, new_name): (u64, &'a [u8]),
    replaced: u64,
) -> Op<'a> {
    Op::Rename {
        ino: InodeId(ino),
        parent: InodeId(parent),
        name,
        new_parent: InodeId(new_parent),
        new_name,
        replaced: InodeId(replaced),
        noreplace: false,
        exchange: false,
        open: false,
    }
}

pub const FILE: u32 = 0o100644;
pub const DIR: u32 = 0o040755;
