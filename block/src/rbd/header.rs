//! What an image of RBD says of itself: asked of the methods that the cluster's class `rbd` has for it, as librbd does.

use std::sync::Arc;

use base::Errno;
use rados::{ImagePlace, Io};

/// The image now, and none of its snapshots.
const NOW: u64 = u64::MAX - 1;
/// Most bytes that an image has.
const BYTES_MAX: u64 = 1 << 60;
/// Most bytes of an answer.
const ANSWER_MAX: usize = 1 << 20;

/// Features, by their bits.
const LAYERING: u64 = 1 << 0;
const EXCLUSIVE_LOCK: u64 = 1 << 2;
const OBJECT_MAP: u64 = 1 << 3;
const FAST_DIFF: u64 = 1 << 4;
const DEEP_FLATTEN: u64 = 1 << 5;
/// Those that are understood.
const UNDERSTOOD: u64 = LAYERING | EXCLUSIVE_LOCK | OBJECT_MAP | FAST_DIFF | DEEP_FLATTEN;
/// Those that are not, and what to do.
const REFUSED: [(u64, &str, &str); 6] = [
    (
        1 << 1,
        "striping",
        "copy it to an image without: rbd deep cp --stripe-unit 4M --stripe-count 1 {} COPY",
    ),
    (1 << 6, "journaling", "rbd feature disable {} journaling"),
    (1 << 7, "data-pool", "copy it to an image without: rbd deep cp {} COPY"),
    (
        1 << 8,
        "operations",
        "end the clones, groups or trashed snapshots that it is for: rbd children {}, rbd snap ls --all {}",
    ),
    (1 << 9, "migrating", "rbd migration commit {}, or abort"),
    (1 << 10, "non-primary", "rbd mirror image promote {}"),
];
/// A flag of the object map: it is not to be believed, and not kept.
const OBJECT_MAP_INVALID: u64 = 1 << 0;

/// Snapshots that what is overwritten is kept for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Snapshots {
    /// The newest number that was given.
    pub sequence: u64,
    /// Those that there are, the newest first.
    pub all: Vec<u64>,
}

/// What an image says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// Its number, in names of objects.
    pub id: String,
    /// Bytes.
    pub size: u64,
    /// An object has two to the power of this many bytes.
    pub order: u8,
    /// What the names of its objects begin with.
    pub prefix: String,
    /// Whether there is to be one writer by the rules of librbd.
    pub exclusive: bool,
    /// Whether a map says which objects there are.
    pub object_map: bool,
    /// Its snapshots.
    pub snapshots: Snapshots,
}

/// Reads what Ceph encodes: integers little-endian, texts with their length before them.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Errno> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Errno::IO)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, Errno> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, Errno> {
        self.take(4)?.try_into().map(u32::from_le_bytes).map_err(|_| Errno::IO)
    }

    fn u64(&mut self) -> Result<u64, Errno> {
        self.take(8)?.try_into().map(u64::from_le_bytes).map_err(|_| Errno::IO)
    }

    fn text(&mut self) -> Result<String, Errno> {
        let len = self.u32()? as usize;
        String::from_utf8(self.take(len)?.to_vec()).map_err(|_| Errno::IO)
    }
}

/// Name of the object that has what the image says of itself.
pub fn object(id: &str) -> String {
    format!("rbd_header.{id}")
}

/// The image's size and the power of two of its objects.
///
/// # Errors
/// EOVERFLOW: so many bytes it cannot have.
pub fn size(io: &Io, id: &str) -> Result<(u64, u8), Errno> {
    let told = io.exec(&object(id), c"rbd", c"get_size", &NOW.to_le_bytes(), ANSWER_MAX)?;
    let mut told = Bytes(&told);
    let (order, size) = (told.u8()?, told.u64()?);
    if size > BYTES_MAX { Err(Errno::OVERFLOW) } else { Ok((size, order)) }
}

/// The image's snapshots.
pub fn snapshots(io: &Io, id: &str) -> Result<Snapshots, Errno> {
    let told = io.exec(&object(id), c"rbd", c"get_snapcontext", &[], ANSWER_MAX)?;
    let mut told = Bytes(&told);
    let (sequence, count) = (told.u64()?, told.u32()?);
    let mut all = (0..count).map(|_| told.u64()).collect::<Result<Vec<_>, _>>()?;
    all.sort_unstable_by(|a, b| b.cmp(a));
    Ok(Snapshots { sequence, all })
}

/// What is refused of an image with these features, and of which parent.
///
/// # Errors
/// The feature, and what to do.
pub fn check(features: u64, name: &str) -> Result<(), String> {
    for (bit, feature, remedy) in REFUSED {
        if features & bit != 0 {
            let remedy = remedy.replace("{}", name);
            return Err(format!(
                "image {name} has the feature {feature}, which is not understood here: {remedy}"
            ));
        }
    }
    let unknown = features & !(UNDERSTOOD | REFUSED.iter().fold(0, |all, (bit, _, _)| all | bit));
    if unknown != 0 {
        return Err(format!(
            "image {name} has features {unknown:#x}, of a Ceph that is later than this program: see rbd info {name}, and rbd feature disable"
        ));
    }
    Ok(())
}

impl Header {
    /// Reads it, and refuses an image of which something is not understood.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    pub fn read(io: &Arc<Io>, at: &ImagePlace) -> Result<Self, String> {
        let name = full_name(at);
        let told = |errno: Errno| format!("image {name}: its header cannot be read: {errno}");
        let id = match io.exec(&format!("rbd_id.{}", at.image), c"rbd", c"get_id", &[], ANSWER_MAX)
        {
            Ok(id) => Bytes(&id).text().map_err(told)?,
            Err(Errno::NOENT) => {
                let wait = |done| io.read(&format!("{}.rbd", at.image), 0, 1, done);
                return Err(if Io::wait(rados::PATIENCE, wait).is_ok() {
                    format!(
                        "image {name} is of format 1: rbd export, and rbd import --image-format 2"
                    )
                } else {
                    format!(
                        "there is no image {name}: see rbd ls, or make one: rbd create {name} --size 1G"
                    )
                });
            }
            Err(errno) => return Err(told(errno)),
        };
        let ask = |method, input: &[u8]| io.exec(&object(&id), c"rbd", method, input, ANSWER_MAX);
        let now = NOW.to_le_bytes();
        let features = ask(c"get_features", &[&now[..], &[0]].concat()).map_err(told)?;
        let features = Bytes(&features).u64().map_err(told)?;
        check(features, &name)?;
        if features & LAYERING != 0 {
            let parent = match ask(c"get_parent", &now) {
                // One in another namespace is not told in this form.
                Err(Errno::XDEV) => 0,
                parent => Bytes(&parent.map_err(told)?).u64().map_err(told)?.cast_signed(),
            };
            if parent >= 0 {
                return Err(format!("image {name} has a parent: rbd flatten {name}"));
            }
        }
        let (size, order) = size(io, &id).map_err(told)?;
        if !(12..=25).contains(&order) {
            return Err(format!(
                "image {name}: objects of 2^{order} bytes: from 4 KiB to 32 MiB are served"
            ));
        }
        let prefix = ask(c"get_object_prefix", &[]).map_err(told)?;
        let flags = ask(c"get_flags", &now).map_err(told)?;
        let flags = Bytes(&flags).u64().map_err(told)?;
        if flags & OBJECT_MAP_INVALID != 0 {
            log::warn!("rbd: the object map of {name} is invalid: rbd object-map rebuild {name}");
        }
        Ok(Self {
            size,
            order,
            prefix: Bytes(&prefix).text().map_err(told)?,
            exclusive: features & EXCLUSIVE_LOCK != 0,
            object_map: features & OBJECT_MAP != 0 && flags & OBJECT_MAP_INVALID == 0,
            snapshots: snapshots(io, &id).map_err(told)?,
            id,
        })
    }
}

/// The image as Ceph's tools name it.
pub fn full_name(at: &ImagePlace) -> String {
    let parts = [at.place.pool.as_str(), &at.place.namespace, &at.image];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_named() {
        assert_eq!(check(UNDERSTOOD, "rbd/a"), Ok(()));
        for (bit, feature, _) in REFUSED {
            let error = check(bit | LAYERING, "rbd/a").unwrap_err();
            assert!(
                error.contains(feature) && error.contains("rbd/a") && error.contains("rbd "),
                "{error}"
            );
        }
        assert!(check(1 << 40, "rbd/a").is_err_and(|error| error.contains("0x10000000000")));
    }

    #[test]
    fn answers_that_are_cut_off_are_errors() {
        let whole = [&3u32.to_le_bytes()[..], b"abc"].concat();
        assert_eq!(Bytes(&whole).text().as_deref(), Ok("abc"));
        for cut in 0..whole.len() {
            assert_eq!(Bytes(&whole[..cut]).text(), Err(Errno::IO));
        }
        assert_eq!(Bytes(&u32::MAX.to_le_bytes()).text(), Err(Errno::IO));
    }
}
