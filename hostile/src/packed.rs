//! Hostile packed messages: refused, or a message no longer than a frame may be, which packs and unpacks to itself; and any
//! bytes survive the way there and back.

use base::crc32c;
use cluster::limits::BODY_MAX;
use placement::codec::Codec;
use service::core::message::{CHUNK, ENTRIES, IMAGE, SNAPSHOT};
use service::packing::{pack, thin, unpack};
use storage::format::chunk::ChunkHeader;
use storage::format::entry::{Op, pad_over};

const KINDS: [u16; 4] = [CHUNK, ENTRIES, SNAPSHOT, IMAGE];
/// Longer claims are left as they are.
const CLAIM_MAX: usize = 1 << 20;

/// Makes its checksums right, as somebody can who knows the format.
fn seal(bytes: &mut [u8], whole: bool) {
    let Some(clear) = bytes.get(7).map(|clear| usize::from(*clear)) else { return };
    if bytes.len() < 20 + clear {
        return;
    }
    let claim = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) as usize;
    if whole
        && claim <= CLAIM_MAX
        && let Some(codec) = Codec::of(bytes[6])
    {
        let mut raw = vec![0; claim];
        if codec.unpack(&bytes[20 + clear..], &mut raw).is_ok() {
            bytes[12..16].copy_from_slice(&crc32c(0, &raw).to_le_bytes());
        }
    }
    let crc = crc32c(crc32c(0, &bytes[..16]), &bytes[20..20 + clear]);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
}

fn there_and_back(kind: u16, message: &[u8]) {
    for codec in Codec::ALL {
        if let Some(packed) = pack(codec, kind, message) {
            assert_eq!(unpack(&packed), Ok((kind, message.to_vec())), "{codec:?}");
        }
    }
    if kind == CHUNK
        && let Some(packed) = thin(message)
    {
        assert!(packed.len() < message.len());
        assert_eq!(unpack(&packed), Ok((kind, message.to_vec())));
    }
}

/// The target: two bytes that choose, and a message.
pub fn run(data: &[u8]) {
    let Some((&[how, which], rest)) = data.split_first_chunk::<2>() else { return };
    let mut bytes = rest.to_vec();
    if how & 1 == 0 {
        seal(&mut bytes, how & 2 == 0);
    }
    match unpack(&bytes) {
        Ok((kind, message)) => {
            assert!(KINDS.contains(&kind) && message.len() <= BODY_MAX);
            there_and_back(kind, &message);
        }
        Err(why) => assert!(why.to_string().len() > 10, "{why}"),
    }
    if rest.len() >= 12 && rest.len() <= BODY_MAX {
        there_and_back(KINDS[usize::from(which) % KINDS.len()], rest);
    }
}

/// Real ones.
pub fn seeds() -> Vec<Vec<u8>> {
    let (ino, epoch) = (base::InodeId(7), base::Epoch(1));
    let mut entries = Vec::new();
    for n in 1..5 {
        let op = Op::Write { ino, offset: 0, data: &[n as u8; 300], clear_setid: false };
        let mut entry = op.to_promised_entry(2, base::Sequence(n), epoch, 0, 7, 9);
        if n < 4 {
            pad_over(&mut entry, 9);
        }
        entries.extend(entry);
    }
    let body_bytes = entries.len() as u32;
    let header = ChunkHeader { entries: 4, body_bytes, incarnation: 9, ..ChunkHeader::default() };
    let chunk = [&[1; 12][..], &header.encode(), &entries].concat();
    let mut all: Vec<Vec<u8>> = thin(&chunk).into_iter().collect();
    for codec in Codec::ALL {
        all.extend(KINDS.iter().filter_map(|kind| pack(codec, *kind, &chunk)));
    }
    all.iter().map(|packed| [&[1, 0][..], packed].concat()).collect()
}
