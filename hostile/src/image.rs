//! A region that was changed while nobody looked: any bytes anywhere, and, since checksums can be
//! forged, with those of what was changed made right. Opening it ends in an error or in a volume
//! that can be read and written; what the checker calls sound is sound.

use std::sync::Arc;

use base::random::Random;
use base::{ClientId, Epoch, InodeId, NodeId, Sequence, StreamSeq, crc32c};
use service::core::{Event, Node, NodeConfig};
use storage::format::chunk::ChunkHeader;
use storage::format::clients;
use storage::format::entry::{self, Op, RawHeader};
use storage::format::page::Key;
use storage::format::superblock::{
    Durability, ROOT_AT, ROOT_BYTES, SUPERBLOCK_AT, SUPERBLOCK_BYTES,
};
use storage::media::{Media, MediaError, Segment};
use storage::memory::MemoryRegion;
use storage::volume::{Params, Volume, run_copies};

use crate::forge;
use crate::input::Input;

const CAPACITY: u64 = 1 << 20;
const STREAM: u64 = 17 << 20;
/// Segments do not grow beyond this: a full device.
const DEVICE: u64 = 64 << 20;
/// Inodes looked at.
const WALK: usize = 4000;
/// Pieces of differences looked at: far more than a small volume has.
const PIECES: usize = 20_000;

/// A region on a device of limited size.
struct Device(MemoryRegion);

impl Media for Device {
    fn size(&self, s: Segment) -> Result<u64, MediaError> {
        self.0.size(s)
    }
    fn read(&self, s: Segment, at: u64, buf: &mut [u8]) -> Result<(), MediaError> {
        self.0.read(s, at, buf)
    }
    fn write(&self, s: Segment, at: u64, data: &[u8]) -> Result<(), MediaError> {
        self.0.write(s, at, data)
    }
    fn persist(&self, s: Segment, at: u64, len: u64) -> Result<(), MediaError> {
        self.0.persist(s, at, len)
    }
    fn fence(&self) -> Result<(), MediaError> {
        self.0.fence()
    }
    fn load64(&self, s: Segment, at: u64) -> Result<u64, MediaError> {
        self.0.load64(s, at)
    }
    fn store64(&self, s: Segment, at: u64, value: u64) -> Result<(), MediaError> {
        self.0.store64(s, at, value)
    }
    fn cas64(&self, s: Segment, at: u64, expect: u64, value: u64) -> Result<u64, MediaError> {
        self.0.cas64(s, at, expect, value)
    }
    fn copy(&self, from: (Segment, u64), to: (Segment, u64), len: u64) -> Result<(), MediaError> {
        self.0.copy(from, to, len)
    }
    fn ensure(&self, s: Segment, size: u64) -> Result<(), MediaError> {
        if size > DEVICE {
            return Err(MediaError::Io(format!("{s:?}: no space for {size} bytes")));
        }
        self.0.ensure(s, size)
    }
    fn discard(&self, s: Segment, at: u64, len: u64) -> Result<(), MediaError> {
        self.0.discard(s, at, len)
    }
    fn remove(&self, s: Segment) -> Result<(), MediaError> {
        self.0.remove(s)
    }
    fn segments(&self) -> Result<Vec<Segment>, MediaError> {
        self.0.segments()
    }
    fn wake(&self, s: Segment, at: u64) -> Result<(), MediaError> {
        self.0.wake(s, at)
    }
}

fn config() -> NodeConfig {
    NodeConfig {
        limits: service::core::limits::Limits::SHIPPED,
        node: NodeId(1),
        lanes: 1,
        lane_bytes: crate::rig::LANE,
        clients_max: 8,
        clients_per_user: 8,
        per_user: service::core::PerUser::SHIPPED,
        scheduler: Default::default(),
        weights: Default::default(),
        ring_bytes: STREAM,
        memory: 16 << 20,
        high: 70,
        low: 30,
        join_step: service::core::JOIN_STEP,
        room: service::core::Shares::SHIPPED,
        grace: 0,
        boot: 1,
        secret: 1,
        incarnation: 1,
    }
}

fn feed(volume: &mut Volume, n: u64, op: &Op<'_>) {
    let bytes = op.to_entry(Sequence(n), Epoch(1), 0, n, 7);
    let Ok((header, op)) = entry::decode(&bytes, 7) else { return };
    // Refusals are answers too; a fault condemns the volume, which the caller sees.
    let _ = volume.apply(&header, &op, (Segment::Stream, 0));
}

/// Publishes what was done.
fn publish(volume: &mut Volume, media: &Arc<Device>) {
    let clients = [(ClientId(9), Sequence(301))];
    let sealed = volume.seal(StreamSeq(0), Epoch(1), &clients).expect("a sound volume");
    run_copies(&**media, &sealed.copies).expect("room");
    volume.publish(sealed).expect("a sound volume");
}

/// Snapshots, files that have changed since, and clones that brought back what they have.
fn with_snapshots(volume: &mut Volume, media: &Arc<Device>) {
    let snapshot = |name| Op::Snapshot { ino: InodeId::ROOT, name };
    let back = |volume: &Volume, name, ino, from: u64| {
        let slot = volume.snapshot_named(name).map_or(1, |snapshot| snapshot.slot);
        let source = InodeId(from).in_snapshot(slot);
        let (offset, len, source_offset) = (4096, 8192, 0);
        Op::CloneRange { ino: InodeId(ino), offset, len, source, source_offset, zeroes: false }
    };
    let cut = |ino, size| Op::Truncate { ino: InodeId(ino), size, clear_setid: false };
    feed(volume, 302, &snapshot(b"one"));
    publish(volume, media);
    feed(volume, 303, &cut(2, 100));
    feed(volume, 304, &cut(3, 0));
    let (ino, data) = (InodeId(6), &[b'6'; 5000]);
    feed(volume, 305, &Op::Write { ino, offset: 20_000, data, clear_setid: false });
    feed(volume, 306, &snapshot(b"two"));
    publish(volume, media);
    for (n, name, ino, from) in
        [(307, &b"one"[..], 2, 2), (308, b"one", 6, 3), (309, b"two", 3, 6), (310, b"one", 9, 9)]
    {
        let op = back(volume, name, ino, from);
        feed(volume, n, &op);
    }
    feed(volume, 311, &snapshot(b"three"));
    publish(volume, media);
    feed(volume, 312, &Op::Write { ino, offset: 4096, data, clear_setid: false });
}

/// A volume with an item of every kind; `size` says how many.
fn sample(size: u8, snapshots: bool) -> Arc<Device> {
    let media = Arc::new(Device(MemoryRegion::new()));
    let params = Params {
        uuid: *b"corbel hostile 1",
        name: "image".into(),
        node: NodeId(1),
        durability: Durability::Pmem,
        capacity_bytes: CAPACITY,
        stream_bytes: STREAM,
        time: 7,
        uid: 0,
        gid: 0,
        mode: 0o777,
    };
    let dyn_media = Arc::clone(&media) as Arc<dyn Media>;
    let mut volume = Volume::format(Arc::clone(&dyn_media), &params).expect("an empty device");
    media.ensure(Segment::Stream, STREAM).expect("room");
    let data = [b'd'; 5000];
    for ino in 2..10 + u64::from(size) {
        let (dir, link) = (ino % 4 == 0, ino % 7 == 0);
        let mode = if dir {
            0o040_755
        } else if link {
            0o120_777
        } else {
            0o100_640
        };
        let (name, target) = (format!("name {ino}"), if link { &b"target"[..] } else { b"" });
        let (name, parent) = (name.as_bytes(), InodeId(if ino > 8 { 4 } else { 1 }));
        let (uid, ino) = (1000 + ino as u32 % 3, InodeId(ino));
        let op = Op::Create { ino, parent, mode, rdev: 0, uid, gid: uid, name, target };
        feed(&mut volume, ino.0, &op);
        feed(&mut volume, ino.0, &Op::SetXattr { ino, name: b"user.x", value: &data[..600] });
        let write = Op::Write { ino, offset: ino.0 * 3000, data: &data, clear_setid: false };
        feed(&mut volume, ino.0, &write);
    }
    let source = InodeId(2);
    let clone = Op::CloneRange {
        ino: InodeId(3),
        offset: 0,
        len: 8192,
        source,
        source_offset: 4096,
        zeroes: false,
    };
    feed(&mut volume, 300, &clone);
    feed(
        &mut volume,
        301,
        &Op::Unlink { ino: InodeId(5), parent: InodeId(1), name: b"name 5", open: true },
    );
    if snapshots {
        with_snapshots(&mut volume, &media);
    }
    publish(&mut volume, &media);
    with_logs(&media);
    media
}

/// A node has run on it: a client's log and its row in the table are there.
fn with_logs(media: &Arc<Device>) {
    let media = Arc::clone(media) as Arc<dyn Media>;
    let mut node = Node::new(config(), media, Random::new(1)).expect("a sound region");
    let mut out = Vec::new();
    let chain = vec![NodeId(1)];
    node.apply(1, Event::View { epoch: Epoch(1), chain, syncing: Vec::new(), lapse: 0 }, &mut out);
    let attach = Event::Attach {
        token: 1,
        pid: 1,
        start_time: 1,
        uid: 0,
        gid: 0,
        groups: vec![4, 5],
        lanes: 1,
    };
    node.apply(2, attach, &mut out);
    assert_eq!(node.failure(), None);
}

fn patch(media: &Device, segment: Segment, at: u64, bytes: &[u8]) {
    let size = media.size(segment).unwrap_or(0);
    let at = at.min(size);
    let len = bytes.len().min((size - at) as usize);
    media.0.damage(segment, at, &bytes[..len]).expect("within the segment");
}

/// Makes a checksum right: that of `len` bytes at `at`, which lies at `sum` in them and covers
/// what begins at `from`.
fn seal(media: &Device, segment: Segment, at: u64, (len, sum, from): (usize, usize, usize)) {
    let mut bytes = vec![0; len];
    if media.read(segment, at, &mut bytes).is_ok() {
        let crc = crc32c(0, &bytes[from..]);
        patch(media, segment, at + sum as u64, &crc.to_le_bytes());
    }
}

/// The ring: its two slots, and the chunks from its first page on.
fn stream(media: &Device, forged: bool, input: &mut Input<'_>) {
    let (slot, at) = (u64::from(input.u8() & 1) * 64, u64::from(input.u16()));
    if !forged {
        return patch(media, Segment::Stream, at, input.piece());
    }
    let mut bytes = b"CBSR\0\0\0\0".to_vec();
    for number in [input.odd(), input.odd(), input.odd()] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.resize(40, 0);
    patch(media, Segment::Stream, slot, &bytes);
    seal(media, Segment::Stream, slot, (40, 4, 8));
    let header = ChunkHeader {
        epoch: Epoch(1),
        stream_seq: StreamSeq(input.odd() >> 1),
        client: ClientId(9),
        last_seq: Sequence(input.odd() >> 1),
        incarnation: 7,
        entries: input.odd() as u32,
        body_bytes: input.odd() as u32,
        time: 1,
        refusals: u32::from(at % 3 == 0),
        refused: Sequence(at),
        errno: 28,
    };
    let (raw, payload) = forge::operation(input, &[InodeId(2), InodeId(4), InodeId(300)], 0);
    let entry = forge::seal(&RawHeader { sequence: 1, ..raw }, &payload, 7);
    patch(media, Segment::Stream, 4096 + at, &[&header.encode()[..], &entry].concat());
}

/// The client table: its headers, and the record, progress and leases of the first row.
fn table(media: &Device, forged: bool, input: &mut Input<'_>) {
    let row = clients::row_at(0);
    let (at, len) = match input.below(5) {
        0 => (0, 64),
        1 => (row, 96),
        2 => (row + clients::PROGRESS, clients::PROGRESS_BYTES),
        3 => (row + clients::PROGRESS + 128, clients::PROGRESS_BYTES),
        _ => (row + clients::LEASES, 0),
    };
    patch(media, Segment::Clients, at + u64::from(input.u8()), input.piece());
    if forged && len > 0 {
        seal(media, Segment::Clients, at, (len, 4, 8));
    }
}

fn damage(media: &Device, input: &mut Input<'_>) {
    let choice = input.u8();
    let forged = choice & 0x80 == 0;
    match choice % 8 {
        0 => {
            let copy = usize::from(choice >> 4) & 1;
            patch(
                media,
                Segment::Super,
                SUPERBLOCK_AT[copy] + u64::from(input.u8()),
                input.piece(),
            );
            if forged {
                seal(media, Segment::Super, SUPERBLOCK_AT[copy], (SUPERBLOCK_BYTES, 12, 16));
            }
        }
        1 => {
            let copy = usize::from(choice >> 4) & 1;
            patch(media, Segment::Super, ROOT_AT[copy] + u64::from(input.u8()), input.piece());
            if forged {
                seal(media, Segment::Super, ROOT_AT[copy], (ROOT_BYTES, 4, 8));
            }
        }
        2..=4 => {
            let page = u64::from(input.u8()) * 4096;
            patch(media, Segment::Tree, page + u64::from(input.u16()) % 4096, input.piece());
            if forged {
                seal(media, Segment::Tree, page, (4096, 4, 8));
            }
        }
        5 => stream(media, forged, input),
        6 => table(media, forged, input),
        _ => {
            let logs = media.segments().unwrap_or_default().into_iter();
            if let Some(log) = logs.rev().find(|s| matches!(s, Segment::Log(_))) {
                patch(media, log, u64::from(input.u16()) * 16, input.piece());
            }
        }
    }
}

/// Everything that can be asked of a volume; true if nothing was found wrong.
fn walk(volume: &Volume) -> bool {
    let Ok(inodes) = volume.inodes_after(InodeId(0), WALK) else { return false };
    let mut good = true;
    let mut buf = vec![0; 16 << 10];
    for ino in inodes {
        good &= volume.attr(ino).is_ok();
        good &= volume.xattrs(ino).is_ok();
        good &= volume.xattr(ino, b"user.x").is_ok();
        good &= volume.symlink(ino).is_ok() || !volume.attr(ino).is_ok_and(|r| r.is_some());
        good &= volume.read_file(ino, 0, &mut buf).is_ok();
        good &= volume.read_file(ino, u64::MAX - 5, &mut buf).is_ok();
        good &= volume.lookup(ino, b"name 9").is_ok();
    }
    good &= volume.orphans().is_ok() && volume.published(ClientId(9)).is_ok();
    volume.digest().is_ok() && good
}

/// Everything that can be asked of snapshots, and clones of what they have and have not. (The checker does not judge what only they
/// have as a state: there may be anything.)
fn snapshots(volume: &mut Volume) {
    let all = volume.snapshots(0, usize::MAX);
    let mut slots: Vec<u16> = all.iter().map(|stat| stat.snapshot.slot).collect();
    for (slot, before) in slots.iter().zip(std::iter::once(None).chain(slots.iter().map(Some))) {
        let _ = volume.read_snapshot(*slot).is_none_or(walk);
        let (mut at, mut pieces) = (Some(Key::MIN), 0);
        while let Some(from) = at.filter(|_| pieces < PIECES) {
            let found = volume.snapshot_difference(before.copied(), *slot, from, (2000, 9));
            at = found.ok().flatten().and_then(|(_, next)| next);
            pieces += 1;
        }
        assert!(at.is_none(), "differences have no end");
        for from in [Key::new(2, 0x80 | 4, u64::MAX), Key::new(u64::MAX, 0xff, u64::MAX)] {
            let _ = volume.snapshot_difference(before.copied(), *slot, from, (0, 0));
        }
    }
    slots.extend([1, 0x7fff]);
    for slot in slots {
        for source in [1, 2, 3, 6, 9, u64::MAX >> 16] {
            let source = InodeId(source).in_snapshot(slot);
            for (offset, len, source_offset) in [
                (0, 4096, 0),
                (4096, 9000, 4096),
                (u64::MAX, 1, 0),
                (0, u64::MAX, 1),
                (0, 0, 0),
                (1 << 40, 5000, 3),
                (7, 3000, u64::MAX),
            ] {
                let (ino, zeroes) = (InodeId(2), false);
                let op = Op::CloneRange { ino, offset, len, source, source_offset, zeroes };
                feed(volume, 405, &op);
            }
        }
    }
    let one = volume.snapshots(0, 1).pop().map(|stat| stat.snapshot.name);
    let ino = InodeId::ROOT;
    one.iter().for_each(|name| feed(volume, 406, &Op::DropSnapshot { ino, name }));
}

fn open(media: &Arc<Device>, sound: bool) {
    let dyn_media = Arc::clone(media) as Arc<dyn Media>;
    let mut volume = match Volume::open(Arc::clone(&dyn_media)) {
        Ok(volume) => volume,
        Err(fault) => {
            assert!(!sound, "the checker finds it sound, but: {fault}");
            assert!(!fault.to_string().is_empty());
            return;
        }
    };
    assert!(walk(&volume) || !sound, "the checker finds it sound");
    let last = volume.last_inode().0;
    for (n, parent) in (1..).zip([1, 4, 8]) {
        let (ino, parent) = (InodeId(last.wrapping_add(n)), InodeId(parent));
        feed(
            &mut volume,
            400,
            &Op::Create {
                ino,
                parent,
                mode: 0o100_600,
                rdev: 0,
                uid: 1,
                gid: 1,
                name: b"new",
                target: b"",
            },
        );
        feed(&mut volume, 401, &Op::Write { ino, offset: 0, data: b"new", clear_setid: false });
        feed(
            &mut volume,
            402,
            &Op::Truncate { ino: InodeId(n + 1), size: 5000, clear_setid: true },
        );
        feed(
            &mut volume,
            403,
            &Op::Rename {
                ino: InodeId(6),
                parent: InodeId(1),
                name: b"name 6",
                new_parent: parent,
                new_name: b"moved",
                replaced: InodeId::NONE,
                noreplace: false,
                exchange: false,
                open: false,
            },
        );
        feed(&mut volume, 404, &Op::Reap { ino: InodeId(5) });
    }
    // What is cloned from pages that only snapshots have may be anything as well.
    let sound = sound && !volume.has_snapshots();
    snapshots(&mut volume);
    let published = volume.root().stream_seq;
    let Ok(sealed) = volume.seal(published, Epoch(1), &[]) else {
        assert!(!sound, "a sound volume can be published");
        return;
    };
    if run_copies(&*dyn_media, &sealed.copies).is_ok() && volume.publish(sealed).is_ok() && sound {
        let report = storage::check::check(&**media).expect("a region that can be read");
        assert!(report.is_sound(), "{:?}", report.findings);
    }
}

/// The target.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let how = input.u8();
    let media = sample(how % 64, how & 0x40 != 0);
    for _ in 0..24 {
        if input.is_empty() {
            break;
        }
        damage(&media, &mut input);
    }
    let sound = storage::check::check(&*media).is_ok_and(|report| report.is_sound());
    if how & 0x80 == 0 {
        return open(&media, sound);
    }
    if let Ok(mut node) = Node::new(config(), media, Random::new(1)) {
        let mut out = Vec::new();
        let chain = vec![NodeId(1)];
        node.apply(
            1,
            Event::View { epoch: Epoch(2), chain, syncing: Vec::new(), lapse: 0 },
            &mut out,
        );
        for now in 2..20 {
            node.apply(now * 1_000_000, Event::Tick, &mut out);
            node.look_around(now * 1_000_000, &mut out);
            node.work(now * 1_000_000, &mut out);
        }
    }
}
