//! Property tests of every format in the table: what is whole is read; what is cut, flipped, forged
//! or of another version is refused with a reason, or means exactly what it says.

use base::crc32c;
use base::random::Random;
use hostile::formats::{Format, INCARNATION, MEDIA, MEMORY, WIRE};

fn all() -> impl Iterator<Item = (&'static Format, Vec<u8>)> {
    let formats = MEDIA.iter().chain(MEMORY).chain(WIRE);
    formats.flat_map(|f| (f.samples)().into_iter().map(move |s| (f, s)))
}

/// Formats of several kinds, and where the byte lies that tells them apart.
const KINDS: [(&str, usize); 5] = [
    ("log entry", 20),
    ("request", 0),
    ("message between nodes", 0),
    ("message of the coordinator", 0),
    ("packet between nicfs and hostd", 0),
];

/// A kind that no sample has is one that the reader does not know.
#[test]
fn every_kind_has_a_sample() {
    for (name, at) in KINDS {
        let samples: Vec<_> = all().filter(|(format, _)| format.name == name).collect();
        let (format, last) = samples.last().expect(name);
        for kind in 0..=u8::MAX {
            let mut bytes = last.clone();
            bytes[at] = kind;
            if name == "log entry" {
                let crc = crc32c(INCARNATION, &bytes[4..]);
                bytes[..4].copy_from_slice(&crc.to_le_bytes());
            }
            let read = (format.read)(&bytes);
            let unknown =
                read.is_err_and(|e| e.contains("unknown kind") || e.contains("operation"));
            let sampled = samples.iter().any(|(_, sample)| sample[at] == kind);
            assert!(unknown != sampled, "{name}, kind {kind}: sample {sampled}");
        }
    }
}

/// Whether a flip anywhere must be noticed: the bytes carry a checksum over all of them.
fn is_covered(format: &Format) -> bool {
    format.sum.is_some() || ["log entry", "held lease"].contains(&format.name)
}

#[test]
fn what_is_whole_is_read_and_written_as_it_was() {
    let mut seen = 0;
    for (format, sample) in all() {
        let again = format.judge(&sample).unwrap_or_else(|e| panic!("{}: {e}", format.name));
        assert!(format.lossy || again == sample, "{}", format.name);
        seen += 1;
    }
    assert!(seen > 90, "{seen}");
}

#[test]
fn what_is_cut_is_refused_or_means_what_is_left() {
    for (format, sample) in all() {
        for cut in 0..sample.len() {
            let read = format.judge(&sample[..cut]);
            assert!(read.is_err() || !is_covered(format), "{} cut at {cut}", format.name);
        }
        if !format.prefix {
            let _ = format.judge(&[&sample[..], &[0]].concat());
        }
    }
}

#[test]
fn every_flipped_bit_is_noticed_or_has_a_meaning_of_its_own() {
    for (format, sample) in all() {
        for bit in 0..sample.len() * 8 {
            let mut bytes = sample.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let read = format.judge(&bytes);
            assert!(read.is_err() || !is_covered(format), "{}, bit {bit}", format.name);
        }
    }
}

/// Numbers that lengths, counts and offsets may be.
const ODD: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 44,
    i64::MAX as u64,
    u64::MAX - 63,
    u64::MAX,
];

#[test]
fn numbers_out_of_range_with_right_checksums_do_no_harm() {
    for (format, sample) in all() {
        // Pages are large and alike; their cells begin within the first bytes.
        let ends = sample.len().min(160);
        for at in (0..ends).chain(sample.len().saturating_sub(80)..sample.len()) {
            for size in [1, 2, 4, 8] {
                for n in ODD {
                    let mut bytes = sample.clone();
                    let end = bytes.len().min(at + size);
                    bytes[at..end].copy_from_slice(&n.to_le_bytes()[..end - at]);
                    format.seal(&mut bytes);
                    let _ = format.judge(&bytes);
                }
            }
        }
    }
}

#[test]
fn unknown_versions_are_refused_as_such() {
    let mut seen = 0;
    for (format, sample) in all() {
        let Some((at, size)) = format.version else { continue };
        for n in [0, 2, 3, 0x80, 0xff] {
            let mut bytes = sample.clone();
            bytes[at..at + size].fill(0);
            bytes[at] = n;
            let same = |other: &[u8]| other.get(at..at + size) == Some(&bytes[at..at + size]);
            if all().any(|(other, known)| other.name == format.name && same(&known)) {
                // There are such.
                continue;
            }
            format.seal(&mut bytes);
            let error = format.judge(&bytes).expect_err(format.name);
            assert!(error.contains("version"), "{}: {error}", format.name);
            seen += 1;
        }
    }
    assert!(seen > 50, "{seen}");
}

#[test]
fn random_changes_with_right_checksums_do_no_harm() {
    let mut random = Random::new(17);
    for (format, sample) in all() {
        for _ in 0..400 {
            let mut bytes = sample.clone();
            for _ in 0..1 + random.below(4) {
                let at = random.below(bytes.len() as u64) as usize;
                match random.below(4) {
                    0 => bytes.truncate(at + 1),
                    1 => bytes.insert(at, random.next_u64() as u8),
                    _ => bytes[at] = random.next_u64() as u8,
                }
            }
            format.seal(&mut bytes);
            let _ = format.judge(&bytes);
        }
    }
}
