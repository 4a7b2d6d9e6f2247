//! The structures of the client table: what was written is read back, and nothing else is taken for
//! it. Whatever the bytes, decoding ends with a value or an error.

use base::random::Random;
use base::{ClientId, Epoch, InodeId, Sequence};
use storage::format::clients::{
    GROUPS_MAX, HEADER_BYTES, HELD_BYTES, Header, Held, LEASES, PINS, PROGRESS_BYTES, Progress,
    RECORD_BYTES, Record,
};
use storage::limits::{LANE_BYTES_MAX, LANE_BYTES_MIN, LANES_MAX};

fn record(random: &mut Random) -> Record {
    let pages = (LANE_BYTES_MAX - LANE_BYTES_MIN) / 4096;
    let most = if random.chance(1, 4) { GROUPS_MAX as u64 + 1 } else { 8 };
    let groups = random.below(most);
    Record {
        client: ClientId(random.next_u64()),
        segment: random.next_u64() as u32,
        incarnation: random.next_u64() as u32,
        lanes: 1 + random.below(LANES_MAX as u64) as u32,
        lane_bytes: (LANE_BYTES_MIN + random.below(pages) * 4096).next_multiple_of(4096),
        pid: random.next_u64() as u32,
        start_time: random.next_u64(),
        epoch: Epoch(random.next_u64() as u32),
        uid: random.next_u64() as u32,
        gid: random.next_u64() as u32,
        groups: (0..groups).map(|_| random.next_u64() as u32).collect(),
    }
}

fn progress(random: &mut Random) -> Progress {
    let mut lanes = [0; LANES_MAX];
    lanes.iter_mut().for_each(|at| *at = random.below(1 << 55) * 64);
    let sealed = random.chance(1, 2).then(|| Sequence(random.below(Sequence::END.0)));
    Progress {
        incarnation: random.next_u64() as u32,
        number: random.next_u64(),
        published: Sequence(random.below(Sequence::END.0)),
        lanes,
        over: sealed.is_some() && random.chance(1, 2),
        sealed,
    }
}

#[test]
fn what_was_written_is_read_back_and_every_flipped_bit_is_noticed() {
    let mut random = Random::new(1);
    for _ in 0..200 {
        let header = Header {
            starts: random.next_u64() as u32,
            number: random.next_u64(),
            boot: u128::from(random.next_u64()) << 64 | u128::from(random.next_u64()),
            secret: u128::from(random.next_u64()) << 64 | u128::from(random.next_u64()),
        };
        let (record, progress) = (record(&mut random), progress(&mut random));
        let mut written = [header.encode(), record.encode(), progress.encode()];
        let record_bytes = 96 + 4 * record.groups.len();
        assert!(record_bytes <= RECORD_BYTES);
        assert_eq!(written.each_ref().map(Vec::len), [HEADER_BYTES, record_bytes, PROGRESS_BYTES]);
        assert_eq!(Header::decode(&written[0]), Ok(header));
        assert_eq!(Record::decode(&written[1]), Ok(Some(record)));
        assert_eq!(Progress::decode(&written[2]), Ok(progress));
        for bytes in &mut written {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        assert!(Header::decode(&written[0]).is_err());
        assert!(Record::decode(&written[1]).is_err());
        assert!(Progress::decode(&written[2]).is_err());
        for bytes in &written {
            let cut = &bytes[..random.below(bytes.len() as u64) as usize];
            assert!(Header::decode(cut).is_err());
            assert!(!matches!(Record::decode(cut), Ok(Some(_))));
            assert!(Progress::decode(cut).is_err());
        }
    }
}

#[test]
fn a_lease_counts_in_its_place_and_for_its_owner_only() {
    let mut random = Random::new(2);
    for _ in 0..2000 {
        let (incarnation, slot) = (random.next_u64() as u32, random.below(16_384));
        let held =
            Held { ino: InodeId(1 + random.next_u64() / 2), what: 1 + random.below(2) as u32 };
        let at = if random.chance(1, 2) { LEASES } else { PINS } + slot * HELD_BYTES as u64;
        let bytes = held.encode(incarnation, at);
        assert_eq!(Held::decode(&bytes, incarnation, at), Ok(Some(held)));
        assert!(Held::decode(&bytes, incarnation ^ 1, at).is_err());
        assert!(Held::decode(&bytes, incarnation, at + 16).is_err());
        let mut torn = bytes;
        torn[8..].fill(0);
        assert!(Held::decode(&torn, incarnation, at).is_err(), "a torn store");
        let mut flipped = bytes;
        flipped[random.below(16) as usize] ^= 1 << random.below(8);
        assert!(Held::decode(&flipped, incarnation, at).is_err());
    }
    assert_eq!(Held::decode(&[0; 16], 1, LEASES), Ok(None));
    let free = Held::FREE.encode(1, LEASES);
    assert_eq!(Held::decode(&free, 1, LEASES), Ok(Some(Held::FREE)));
}

/// What comes after it has a number, too.
#[test]
fn numbers_that_nothing_can_have_are_refused() {
    let mut random = Random::new(4);
    let sound = progress(&mut random);
    for bad in [
        Progress { published: Sequence::END, ..sound },
        Progress { sealed: Some(Sequence(u64::MAX)), ..sound },
        Progress { lanes: [(1 << 62) + 64; LANES_MAX], ..sound },
    ] {
        assert!(Progress::decode(&bad.encode()).is_err(), "{bad:?}");
    }
}

/// Also with a checksum that fits: then the fields themselves are checked.
#[test]
fn any_bytes_are_a_structure_or_an_error() {
    let mut random = Random::new(3);
    for _ in 0..3000 {
        let mut bytes = record(&mut random).encode();
        for _ in 0..1 + random.below(4) {
            let at = 8 + random.below(88) as usize;
            bytes[at] = random.next_u64() as u8;
        }
        let groups = u32::from_le_bytes([bytes[64], bytes[65], bytes[66], bytes[67]]) as usize;
        let len = (96 + 4 * groups.min(GROUPS_MAX)).min(bytes.len());
        let crc = base::crc32c(0, &bytes[8..len]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        if let Ok(Some(read)) = Record::decode(&bytes) {
            assert_eq!(read.encode(), bytes[..len], "nothing is read that would not be written so");
            assert!((1..=LANES_MAX as u32).contains(&read.lanes));
            assert!((LANE_BYTES_MIN..=LANE_BYTES_MAX).contains(&read.lane_bytes));
        }
        let mut bytes = progress(&mut random).encode();
        let at = 8 + random.below(120) as usize;
        bytes[at] = random.next_u64() as u8;
        let crc = base::crc32c(0, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        if let Ok(read) = Progress::decode(&bytes) {
            assert_eq!(read.encode(), bytes);
            assert!(read.lanes.iter().all(|at| at % 64 == 0));
        }
        random.fill(&mut bytes);
        assert!(Progress::decode(&bytes).is_err());
    }
}
