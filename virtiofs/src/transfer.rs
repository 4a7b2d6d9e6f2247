//! The state of a device on its way to another one, which goes on for the same guest (vhost-user's device state): which inodes the guest was
//! told of, which files it has open, what it has locked, and which requests have no answer yet (they wait for locks). The other device must have the same file system behind it, in which inodes have the same numbers.
//!
//! It goes through the hands of the monitors, which must not be able to make one: an inode in it is an inode that the guest may use,
//! whosever it is. So it is sealed with a key that both devices have and no monitor has, and a device without a key hands nothing on.
//!
//! Numbers of eight bytes, the least significant first: magic with the version, how many inodes, files, locks, requests, and two numbers drawn
//! by chance; then each inode with how often it was told, each file as handle, inode, flags, each lock as a [ledger](crate::ledger) has it,
//! each request as its queue times 65536 and its first descriptor; then 32 bytes: HMAC-SHA-256 of all of that. The key of it is another HMAC,
//! with the key that the devices have: of the tenant's name, a zero byte, and the five numbers that tell the directory that it shares from
//! others ([`Tenant::mark`]). The inodes of one directory are nothing to another, least of all its root.
//!
//! By the secret with which the other device shows the file system that it gets the locks (`FileSystem::leave`) no monitor could get them: it is the HMAC
//! of the two drawn numbers.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;
use std::thread::JoinHandle;

use base::InodeId;
use client::fs::LOCK_END;
use frontend::fuse::{Guest, Locked, OpenFile};
use ring::hmac;

use crate::device::Device;
use crate::ledger::{Kept, LOCKS_MAX, Row, lock_in, row_of};
use crate::tenant::Tenant;
use crate::vring::{SIZE_MAX, Vrings};

const MAGIC: u64 = u64::from_le_bytes(*b"CRBLVFM3");
/// Numbers before the lists, for an inode, for a file, for a lock.
const HEAD: usize = 7;
const NODE: usize = 2;
const HANDLE: usize = 3;
const LOCK: usize = size_of::<Row>() / 8;
/// Bytes of the seal.
const SEAL: usize = 32;
/// How many bytes a key has.
pub const KEY: std::ops::RangeInclusive<usize> = 32..=4096;

/// What all devices of a tenant have, and no monitor.
#[derive(Clone, Debug)]
pub struct Key {
    key: hmac::Key,
    tenant: String,
}

impl Key {
    /// That of a tenant's devices. Other tenants may have the same bytes, under other names.
    ///
    /// # Errors
    /// The key is shorter than 32 bytes or longer than 4096, or the name is empty or has a zero byte.
    pub fn new(key: &[u8], tenant: &str) -> Result<Self, String> {
        if !KEY.contains(&key.len()) {
            return Err(format!("a key of {} bytes, where it has {KEY:?}", key.len()));
        }
        if tenant.is_empty() || tenant.contains('\0') {
            return Err("a tenant without a name, or with a zero byte in it".into());
        }
        Ok(Self { key: hmac::Key::new(hmac::HMAC_SHA256, key), tenant: tenant.into() })
    }

    /// What seals the state of a device that serves `shared`.
    ///
    /// # Errors
    /// Of the file system.
    pub fn seal(&self, shared: &Tenant) -> client::fs::Result<Seal> {
        Ok(self.seal_of(shared.mark()?))
    }

    fn seal_of(&self, mark: [u64; 5]) -> Seal {
        let mut own = hmac::Context::with_key(&self.key);
        own.update(self.tenant.as_bytes());
        own.update(b"\0");
        mark.iter().for_each(|number| own.update(&number.to_le_bytes()));
        Seal(hmac::Key::new(hmac::HMAC_SHA256, own.sign().as_ref()))
    }
}

/// By what a device knows the states of those devices that serve the same directory to the same tenant, and no others.
#[derive(Clone, Debug)]
pub struct Seal(hmac::Key);

impl Seal {
    fn of(&self, body: &[u8]) -> hmac::Tag {
        hmac::sign(&self.0, body)
    }

    /// By what the device shows the file system that it goes on for the one that drew these numbers.
    fn secret(&self, drawn: [u64; 2]) -> u128 {
        let mut of = b"heir".to_vec();
        of.extend(drawn.into_iter().flat_map(u64::to_le_bytes));
        let tag = hmac::sign(&self.0, &of);
        tag.as_ref().iter().take(16).fold(0, |n, byte| n << 8 | u128::from(*byte))
    }

    fn fits(&self, body: &[u8], seal: &[u8]) -> bool {
        hmac::verify(&self.0, body, seal).is_ok()
    }
}

fn encode(kept: &Kept, drawn: [u64; 2], seal: &Seal) -> Vec<u8> {
    let counts = [kept.told.len(), kept.opened.len(), kept.locked.len(), kept.begun.len()];
    let head = [MAGIC].into_iter().chain(counts.map(|n| n as u64)).chain(drawn);
    let told = kept.told.iter().flat_map(|(ino, lookups)| [ino.0, *lookups]);
    let opened = kept.opened.iter().flat_map(|open| [open.fh, open.ino.0, open.flags.into()]);
    let locked = kept
        .locked
        .iter()
        .flat_map(|Locked { ino, fh, lock }| row_of((*ino, lock.space, lock.owner), *fh, lock));
    let begun = kept.begun.iter().map(|(queue, head)| u64::from(*queue) << 16 | u64::from(*head));
    let numbers = head.chain(told).chain(opened).chain(locked).chain(begun);
    let mut bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
    let seal = seal.of(&bytes);
    bytes.extend_from_slice(seal.as_ref());
    bytes
}

/// Requests without an answer at most.
const BEGUN_MAX: usize = (crate::vhost::QUEUES_MAX + 1) * SIZE_MAX as usize;

/// How long the longest state is, of a guest that may know and open so much.
fn longest(guest: &Guest) -> usize {
    let lists = guest.nodes_max.saturating_mul(NODE);
    let lists = lists.saturating_add(guest.handles_max.saturating_mul(HANDLE));
    let lists = lists.saturating_add(LOCKS_MAX * LOCK + BEGUN_MAX);
    lists.saturating_add(HEAD).saturating_mul(8).saturating_add(SEAL)
}

fn decode(bytes: &[u8], seal: &Seal) -> Result<Kept, String> {
    let split = bytes.len().checked_sub(SEAL).filter(|n| n.is_multiple_of(8) && *n >= 8 * HEAD);
    let (body, end) = bytes.split_at(split.ok_or("the state of the device is cut off")?);
    if !seal.fits(body, end) {
        return Err(
            "the state of the device is damaged, of another tenant or another directory, or sealed with another key"
                .into(),
        );
    }
    let numbers: Vec<u64> = body
        .chunks_exact(8)
        .map(|number| number.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte)))
        .collect();
    let (head, lists) = numbers.split_at(HEAD);
    if head[0] != MAGIC {
        return Err("the state of another kind of device, or of another version".into());
    }
    let mut lists = lists;
    let mut list = |at: usize, of: usize| {
        let len = usize::try_from(head[at]).ok().and_then(|n| n.checked_mul(of));
        let (list, rest) = len.and_then(|len| lists.split_at_checked(len))?;
        lists = rest;
        Some(list)
    };
    let (Some(told), Some(opened), Some(locked), Some(begun)) =
        (list(1, NODE), list(2, HANDLE), list(3, LOCK), list(4, 1))
    else {
        return Err("more inodes, files, locks or requests than there are".into());
    };
    if !lists.is_empty() {
        return Err("more than it says".into());
    }
    let told: Vec<(InodeId, u64)> =
        told.chunks_exact(NODE).map(|node| (InodeId(node[0]), node[1])).collect();
    let open = |open: &[u64]| {
        let flags = u32::try_from(open[2]).map_err(|_| "flags that there are not")?;
        Ok(OpenFile { fh: open[0], ino: InodeId(open[1]), flags })
    };
    let opened = opened.chunks_exact(HANDLE).map(open).collect::<Result<Vec<_>, String>>()?;
    let mut numbers: Vec<u64> = opened.iter().map(|open| open.fh).collect();
    numbers.sort_unstable();
    let twice = numbers.windows(2).any(|pair| pair[0] == pair[1]);
    if twice
        || numbers.last() == Some(&u64::MAX)
        || told.iter().any(|(ino, n)| ino.0 == 0 || *n == 0)
    {
        return Err("inodes or files that cannot be".into());
    }
    let lock = |row: &Row| {
        let locked = lock_in(row).filter(|l| {
            let lock = &l.lock;
            l.ino.0 != 0 && lock.start <= lock.end && lock.end <= LOCK_END
        })?;
        // As it was said, and in no other way.
        let owner = (locked.ino, locked.lock.space, locked.lock.owner);
        (row_of(owner, locked.fh, &locked.lock) == *row).then_some(locked)
    };
    let locked = locked.as_chunks().0.iter().map(lock).collect::<Option<Vec<_>>>();
    let queue = |n: &u64| Some((u16::try_from(n >> 16).ok()?, (n & 0xffff) as u16));
    let begun = begun.iter().map(queue).collect::<Option<Vec<_>>>();
    let (Some(locked), Some(begun)) = (locked, begun) else {
        return Err("locks or requests that cannot be".into());
    };
    let secret = Some(seal.secret([head[5], head[6]]));
    Ok(Kept { told, opened, locked, begun, secret })
}

fn draw() -> std::io::Result<[u64; 2]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    let (low, high) = bytes.split_at(8);
    Ok([low, high].map(|half| half.iter().fold(0, |n: u64, byte| n << 8 | u64::from(*byte))))
}

/// A transfer that is under way.
#[derive(Debug)]
pub struct Transfer(JoinHandle<Result<(), String>>);

impl Transfer {
    /// Writes the device's state to a pipe, whose other end is read meanwhile. Its `rings` are stopped.
    ///
    /// # Errors
    /// Out of threads, or a request is being served.
    pub fn save(
        device: &Device,
        rings: &Vrings,
        seal: &Seal,
        mut to: File,
    ) -> std::io::Result<Self> {
        let begun = rings.begun().map_err(std::io::Error::other)?;
        // Whoever has got an earlier state of the same guest has shown the same secret, and may have to give it back.
        let drawn = match device.drawn() {
            Some(drawn) => drawn,
            None => draw()?,
        };
        let kept = Kept { begun, ..device.leave(seal.secret(drawn), drawn) };
        let bytes = encode(&kept, drawn, seal);
        let body = move || to.write_all(&bytes).map_err(|e| format!("sending the state: {e}"));
        Ok(Self(std::thread::Builder::new().name("virtiofs-state".into()).spawn(body)?))
    }

    /// Reads a state to its end, and lets the device go on with it.
    ///
    /// # Errors
    /// Out of threads.
    pub fn load(
        device: &Arc<Device>,
        rings: &Arc<Vrings>,
        seal: &Seal,
        from: File,
    ) -> std::io::Result<Self> {
        let (device, rings, seal) = (device.clone(), rings.clone(), seal.clone());
        let most = longest(&device.guest()) as u64;
        let body = move || {
            let mut bytes = Vec::new();
            let read = from.take(most.saturating_add(1)).read_to_end(&mut bytes);
            read.map_err(|e| format!("reading the state: {e}"))?;
            if bytes.len() as u64 > most {
                return Err("a state of more than a guest here may know".into());
            }
            let kept = decode(&bytes, &seal)?;
            let (told, opened, locked) = (kept.told.len(), kept.opened.len(), kept.locked.len());
            rings.has_queues(&kept.begun)?;
            let begun = kept.begun.clone();
            let (lost, unlocked) = device.take_over(kept)?;
            log::info!(
                "goes on with a guest of another device, which knows {told} inodes and has {opened} files open, of which {lost} are lost, and {locked} locks, of which {unlocked} are lost"
            );
            rings.begin_again(&begun);
            Ok(())
        };
        Ok(Self(std::thread::Builder::new().name("virtiofs-state".into()).spawn(body)?))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Why it went wrong.
    pub fn end(self) -> Result<(), String> {
        self.0.join().unwrap_or_else(|_| Err("the transfer has ended before its time".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::fs::{Lock, LockKind, LockSpace};
    use proptest::prelude::*;

    fn any_kept() -> impl Strategy<Value = Kept> {
        let told = proptest::collection::vec((1..u64::MAX, 1..u64::MAX), 0..20);
        let opened =
            proptest::collection::btree_map(0..u64::MAX, (any::<u64>(), any::<u32>()), 0..20);
        let lock = (1..u64::MAX, any::<u64>(), any::<u64>(), 0..LOCK_END, any::<u32>(), 0..4);
        let lock = lock.prop_map(|(ino, fh, owner, start, pid, what)| {
            let kind = if what & 1 == 0 { LockKind::Read } else { LockKind::Write };
            let space = if what & 2 == 0 { LockSpace::Record } else { LockSpace::Flock };
            let end = start + (LOCK_END - start) / 3;
            Locked { ino: InodeId(ino), fh, lock: Lock { space, kind, owner, pid, start, end } }
        });
        let locked = proptest::collection::vec(lock, 0..20);
        let begun = proptest::collection::vec((any::<u16>(), any::<u16>()), 0..20);
        (told, opened, locked, begun).prop_map(|(told, opened, locked, begun)| Kept {
            told: told.into_iter().map(|(ino, n)| (InodeId(ino), n)).collect(),
            opened: opened
                .into_iter()
                .map(|(fh, (ino, flags))| OpenFile { fh, ino: InodeId(ino), flags })
                .collect(),
            locked,
            begun,
            secret: None,
        })
    }

    fn numbers_at(bytes: &[u8], at: usize) -> u64 {
        bytes[8 * at..][..8].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte))
    }

    fn seal(tenant: &str) -> Seal {
        seal_of(tenant, [5, 1_700_000_000, 7, 1_600_000_000, 9])
    }

    fn seal_of(tenant: &str, mark: [u64; 5]) -> Seal {
        Key::new(&[7; 32], tenant).unwrap().seal_of(mark)
    }

    proptest! {
        #[test]
        fn a_state_arrives_as_it_was(kept in any_kept(), at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let mut bytes = encode(&kept, [1, 2], &seal("one"));
            let read = decode(&bytes, &seal("one")).unwrap();
            prop_assert_eq!(&read.told, &kept.told);
            prop_assert_eq!(&read.opened, &kept.opened);
            prop_assert_eq!(&read.locked, &kept.locked);
            prop_assert_eq!(&read.begun, &kept.begun);
            // Drawn anew each time, and nothing without the key.
            let secret = |drawn| seal("one").secret(drawn);
            prop_assert_eq!(read.secret, Some(secret([1, 2])));
            prop_assert_ne!(secret([1, 2]), secret([1, 3]));
            prop_assert_ne!(secret([1, 2]), seal("two").secret([1, 2]));
            // Another tenant's is none, though the key is the same.
            prop_assert!(decode(&bytes, &seal("two")).is_err());
            // And another directory's.
            for number in 0..5 {
                let mut mark = [5, 1_700_000_000, 7, 1_600_000_000, 9];
                mark[number] += 1;
                prop_assert!(decode(&bytes, &seal_of("one", mark)).is_err());
            }
            let at = at.index(bytes.len());
            prop_assert!(decode(&bytes[..at], &seal("one")).is_err());
            bytes[at] ^= 1 << bit;
            prop_assert!(decode(&bytes, &seal("one")).is_err());
        }

        #[test]
        fn any_numbers_are_read_or_refused(numbers in proptest::collection::vec(0..40u64, 0..30)) {
            let numbers = [MAGIC].into_iter().chain(numbers);
            let mut bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
            // Without the key nobody can say it.
            let plain = [&bytes[..], &u64::from(base::crc32c(0, &bytes)).to_le_bytes()].concat();
            prop_assert!(decode(&plain, &seal("one")).is_err());
            bytes.extend_from_slice(seal("one").of(&bytes).as_ref());
            if let Ok(kept) = decode(&bytes, &seal("one")) {
                prop_assert_eq!(encode(&kept, [numbers_at(&bytes, 5), numbers_at(&bytes, 6)], &seal("one")), bytes);
            }
        }
    }

    #[test]
    fn a_key_is_long_and_a_tenant_has_a_name() {
        assert!(Key::new(&[1; 31], "one").is_err() && Key::new(&[1; 4097], "one").is_err());
        assert!(Key::new(&[1; 32], "").is_err() && Key::new(&[1; 32], "o\0e").is_err());
        assert!(Key::new(&[1; 32], "one").is_ok());
    }
}
