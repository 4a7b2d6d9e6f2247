//! Chunks without what their pads stand for. A pad stands where a write was whose bytes the end of the chunk does not show
//! (`core::coalesce`): its bytes are zeroes, and its header says how many. The header is all that travels.

use storage::format::chunk::CHUNK_HEADER_BYTES;
use storage::format::entry::{HEADER_BYTES, claimed_length, entry_bytes, op};

/// What an entry's header says of it, in a chunk of which `left` bytes are left: its bytes, and how many of these are left out.
fn look(header: &[u8], left: usize) -> Option<(usize, usize)> {
    let header = header.first_chunk::<HEADER_BYTES>()?;
    let bytes = entry_bytes(claimed_length(header)?).min(left);
    let out = if header[20] == op::PAD { bytes - HEADER_BYTES } else { 0 };
    Some((bytes, out))
}

/// How many bytes of a chunk are left out.
pub(super) fn saves(chunk: &[u8]) -> usize {
    let mut rest = chunk.get(CHUNK_HEADER_BYTES..).unwrap_or(&[]);
    let mut saved = 0;
    while let Some((bytes, out)) = look(rest, rest.len()) {
        saved += out;
        rest = &rest[bytes..];
    }
    saved
}

/// Appends a chunk without them; `false` if they are not all zeroes.
pub(super) fn leave_out(chunk: &[u8], thin: &mut Vec<u8>) -> bool {
    let (header, mut rest) = chunk.split_at(CHUNK_HEADER_BYTES.min(chunk.len()));
    thin.extend_from_slice(header);
    while let Some((bytes, out)) = look(rest, rest.len()) {
        let (entry, behind) = rest.split_at(bytes);
        let (kept, left_out) = entry.split_at(bytes - out);
        if left_out.iter().any(|b| *b != 0) {
            return false;
        }
        thin.extend_from_slice(kept);
        rest = behind;
    }
    thin.extend_from_slice(rest);
    true
}

/// Whether a chunk that came without them is so long with them: said by its headers alone, before there is memory for it.
pub(super) fn fits(thin: &[u8], chunk: usize) -> bool {
    let header = CHUNK_HEADER_BYTES.min(chunk);
    let Some((_, mut thin)) = thin.split_at_checked(header) else { return false };
    let mut left = chunk - header;
    while left >= HEADER_BYTES
        && let Some((bytes, out)) = look(thin, left)
    {
        let Some((_, behind)) = thin.split_at_checked(bytes - out) else { return false };
        (thin, left) = (behind, left - bytes);
    }
    thin.len() == left
}

/// Fills `chunk` with one that came without them; `false` if that does not come out even.
pub(super) fn put_in(thin: &[u8], chunk: &mut [u8]) -> bool {
    let header = CHUNK_HEADER_BYTES.min(chunk.len());
    let Some((front, mut thin)) = thin.split_at_checked(header) else { return false };
    chunk[..header].copy_from_slice(front);
    let mut rest = &mut chunk[header..];
    while rest.len() >= HEADER_BYTES
        && let Some((bytes, out)) = look(thin, rest.len())
    {
        let Some((kept, behind)) = thin.split_at_checked(bytes - out) else { return false };
        let (entry, after) = rest.split_at_mut(bytes);
        // What is left out is zero there already.
        entry[..kept.len()].copy_from_slice(kept);
        (thin, rest) = (behind, after);
    }
    if thin.len() != rest.len() {
        return false;
    }
    rest.copy_from_slice(thin);
    true
}
