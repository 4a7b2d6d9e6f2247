//! The system call sites of a library: where the interception library may write its jumps.
//!
//! Made by disassembly, once per library (by build-id), and kept in the user's cache directory. A
//! window is a run of whole instructions around one `syscall`, at least five bytes long, each of
//! which may be moved (no branch, nothing relative to the instruction pointer), and into the
//! middle of which nothing jumps: no branch, no entry of a jump table, no symbol.
//!
//! # The cache file
//!
//! `$XDG_CACHE_HOME/corbel/sites-BUILDID`, mode 0600 in a directory of mode 0700. Little-endian:
//! magic `CORBSITE` (8), version (4), CRC32C of all that follows (4), number of sites (4), then per
//! site the fields of [`Site`]: address (4), length (1), place of the `syscall` (1), zero (2). A
//! file that is not exactly so is made anew.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::elf::{Elf, number, refuse};
use crate::failure::Result;
use crate::format::{self, BUILD_ID_MAX, SITES, Site, WINDOW_MAX, WINDOW_MIN};

const MAGIC: &[u8; 8] = b"CORBSITE";
const VERSION: u32 = 1;
const HEADER: usize = 20;
/// Entries of one jump table followed.
const JUMPS_MAX: usize = 1024;
/// Instructions of a window before or after the `syscall`.
const NEIGHBOURS: usize = 4;

/// The sites of one library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sites {
    /// Its NT_GNU_BUILD_ID.
    pub build_id: Vec<u8>,
    /// By address.
    pub sites: Vec<Site>,
}

/// A library's text with the jumps in it, and the stubs.
#[derive(Debug)]
pub struct Overlay {
    /// The stubs, from a page behind the one with their pointer.
    pub stubs: Vec<u8>,
    /// The pages of [`format::text_range`].
    pub text: Vec<u8>,
}

/// The same for every process, wherever the library lies, since all of it is relative.
pub fn overlay(path: &Path, sites: &Sites) -> Option<Overlay> {
    let elf = Elf::read(path).ok()?;
    let (low, high) = format::text_range(&sites.sites)?;
    let mut text =
        elf.pages(low, high).filter(|_| elf.build_id().as_ref() == Some(&sites.build_id))?;
    let mut stubs = Vec::new();
    let pointer = -(format::STUBS_BELOW as i64);
    for (i, site) in sites.sites.iter().enumerate() {
        let (at, len, split) = (site.at as usize, site.len as usize, site.syscall as usize);
        let window = text.get_mut(at - low..)?.get_mut(..len)?;
        if len < WINDOW_MIN.into()
            || len > WINDOW_MAX.into()
            || window.get(split..split + 2)? != [0x0f, 5]
        {
            return None;
        }
        let place = pointer + (format::PAGE + i * format::STUB) as i64;
        stubs.extend_from_slice(&format::stub(window, split, [place, pointer, at as i64]).0);
        // What is left of the window is never reached; int3 says so.
        window.fill(0xcc);
        window[..5].copy_from_slice(&format::jump(at as i64, place));
    }
    stubs.resize(stubs.len().next_multiple_of(format::PAGE), 0xcc);
    Some(Overlay { stubs, text })
}

/// Addresses into the middle of which no window may reach.
fn targets(elf: &Elf, code: &[Instruction]) -> BTreeSet<u64> {
    let mut all: BTreeSet<u64> = elf.symbols().into_iter().collect();
    for i in code {
        match i.op0_kind() {
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                all.insert(i.near_branch_target());
            }
            _ => {}
        }
        if !i.is_ip_rel_memory_operand() {
            continue;
        }
        let address = i.ip_rel_memory_address();
        all.insert(address);
        // `lea` of read-only data may begin a jump table: entries relative to its start.
        if i.mnemonic() == Mnemonic::Lea
            && let Some(table) = elf.at_address(address)
        {
            for entry in table.chunks_exact(4).take(JUMPS_MAX) {
                let entry = i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
                let target = address.wrapping_add_signed(i64::from(entry));
                if !elf.in_code(target) {
                    break;
                }
                all.insert(target);
            }
        }
    }
    all
}

fn movable(i: &Instruction) -> bool {
    i.flow_control() == FlowControl::Next
        && !i.is_ip_rel_memory_operand()
        && i.mnemonic() != Mnemonic::Syscall
        && !i.is_invalid()
}

/// Whether the window is the return from a signal handler, whose bytes unwinders know.
pub fn is_sigreturn(before: Option<&Instruction>) -> bool {
    before.is_some_and(|i| {
        i.mnemonic() == Mnemonic::Mov
            && matches!(i.op0_register(), Register::EAX | Register::RAX)
            && i.op1_kind() != OpKind::Register
            && i.op1_kind() != OpKind::Memory
            && i.immediate(1) == 15
    })
}

/// The window around the `syscall` at `at`, if there is one.
pub fn window(code: &[Instruction], at: usize, targets: &BTreeSet<u64>) -> Option<Site> {
    let syscall = &code[at];
    let adjacent = |a: &Instruction, b: &Instruction| a.next_ip() == b.ip();
    let mut best: Option<(usize, Site)> = None;
    let mut first = at;
    for before in 0..=NEIGHBOURS {
        if before > 0 {
            let Some(previous) = at.checked_sub(before) else { break };
            if !movable(&code[previous]) || !adjacent(&code[previous], &code[previous + 1]) {
                break;
            }
            first = previous;
        }
        let mut last = at;
        for after in 0..=NEIGHBOURS {
            if after > 0 {
                let Some(next) = code.get(at + after) else { break };
                if !movable(next) || !adjacent(&code[at + after - 1], next) {
                    break;
                }
                last = at + after;
            }
            let (from, to) = (code[first].ip(), code[last].next_ip());
            // Past the end of the address space the decoder begins at 0 again.
            let Some(len) = to.checked_sub(from) else { break };
            if len > u64::from(WINDOW_MAX) || targets.range(from + 1..to).next().is_some() {
                break;
            }
            if len < u64::from(WINDOW_MIN) {
                continue;
            }
            // Fewer instructions after the call are better than fewer before it.
            let cost = after * 8 + before;
            let site = Site {
                at: u32::try_from(from).ok()?,
                len: len as u8,
                syscall: (syscall.ip() - from) as u8,
                reserved: 0,
            };
            if best.is_none_or(|(c, _)| cost < c) {
                best = Some((cost, site));
            }
            break;
        }
    }
    best.map(|(_, site)| site)
}

/// Disassembles a library.
fn scan(path: &Path) -> Result<Sites> {
    scan_elf(path, &Elf::read(path)?)
}

/// Disassembles what the file at `path` holds.
pub fn scan_bytes(path: &Path, bytes: Vec<u8>) -> Result<Sites> {
    let elf = Elf::parse(bytes).ok_or_else(|| refuse(path, "is not a 64-bit x86 ELF file"))?;
    scan_elf(path, &elf)
}

fn scan_elf(path: &Path, elf: &Elf) -> Result<Sites> {
    let build_id = elf.build_id().filter(|id| (8..=BUILD_ID_MAX).contains(&id.len()));
    let build_id = build_id.ok_or_else(|| refuse(path, "has no build-id"))?;
    if elf.code().map(|(_, bytes)| bytes.len()).sum::<usize>() > elf.bytes.len() {
        return Err(refuse(path, "has sections of code that overlap"));
    }
    let mut code = Vec::new();
    for (address, bytes) in elf.code() {
        let decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
        code.extend(decoder);
    }
    let targets = targets(elf, &code);
    let mut sites: Vec<Site> = Vec::new();
    let mut end = 0;
    for (at, _) in code.iter().enumerate().filter(|(_, i)| i.mnemonic() == Mnemonic::Syscall) {
        if is_sigreturn(at.checked_sub(1).map(|b| &code[b])) {
            continue;
        }
        let Some(site) = window(&code, at, &targets) else { continue };
        let Some(next) = site.at.checked_add(u32::from(site.len)) else { continue };
        if site.at >= end && sites.len() < SITES {
            end = next;
            sites.push(site);
        }
    }
    Ok(Sites { build_id, sites })
}

/// The cache file of these sites.
pub fn encode(sites: &[Site]) -> Vec<u8> {
    let mut body = u32::try_from(sites.len()).unwrap_or(0).to_le_bytes().to_vec();
    for site in sites {
        body.extend_from_slice(&site.at.to_le_bytes());
        body.extend_from_slice(&[site.len, site.syscall, 0, 0]);
    }
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&base::crc32c(0, &body).to_le_bytes());
    file.extend_from_slice(&body);
    file
}

/// The sites of a cache file; `None` when it is not exactly what [`encode`] writes.
pub fn decode(file: &[u8]) -> Option<Vec<Site>> {
    let count = number::<4>(file, 16)? as usize;
    let right = file.starts_with(MAGIC)
        && number::<4>(file, 8)? == u64::from(VERSION)
        && number::<4>(file, 12)? == u64::from(base::crc32c(0, &file[16..]))
        && (1..=SITES).contains(&count)
        && file.len() == HEADER + count * 8;
    if !right {
        return None;
    }
    let mut sites = Vec::with_capacity(count);
    let mut end = 0;
    for entry in file[HEADER..].chunks_exact(8) {
        let at = u32::try_from(number::<4>(entry, 0)?).ok()?;
        let site = Site { at, len: entry[4], syscall: entry[5], reserved: 0 };
        let good = (WINDOW_MIN..=WINDOW_MAX).contains(&site.len)
            && site.syscall.checked_add(2)? <= site.len
            && at >= end
            && entry[6..] == [0, 0];
        if !good {
            return None;
        }
        end = at.checked_add(u32::from(site.len))?;
        sites.push(site);
    }
    Some(sites)
}

/// Whether nobody else can have written what lies there.
fn is_own(meta: &fs::Metadata) -> bool {
    meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0
}

/// `$XDG_CACHE_HOME/corbel`, or `~/.cache/corbel`; absolute or none. None, too, where it is somebody else's (as when the
/// super-user has kept a user's HOME): what lies there says where code is written over.
pub fn cache_dir() -> Option<PathBuf> {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let dir = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    let dir = dir.join("corbel");
    let there = dir.ancestors().find_map(|dir| fs::metadata(dir).ok())?;
    is_own(&there).then_some(dir)
}

/// A cache file, if it is the user's own.
pub fn load(path: &Path) -> Option<Vec<u8>> {
    let mut file = fs::File::open(path).ok()?;
    let mut bytes = Vec::new();
    let own = file.metadata().is_ok_and(|meta| meta.is_file() && is_own(&meta));
    (own && file.read_to_end(&mut bytes).is_ok()).then_some(bytes)
}

/// Writes a cache file, all of it or nothing.
pub fn store(path: &Path, file: &[u8]) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    // Others may store the same: threads of this process, and processes of its number in other namespaces.
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    let mine = COUNT.fetch_add(1, Ordering::Relaxed);
    let fresh = path.with_extension(format!("new-{}-{mine}-{now}", std::process::id()));
    let mut out =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    out.write_all(file)?;
    fs::rename(&fresh, path)
}

/// The sites of a library, from the cache or by looking.
pub fn of(path: &Path) -> Result<Sites> {
    let elf = Elf::read(path)?;
    let id = elf.build_id().ok_or_else(|| refuse(path, "has no build-id"))?;
    let name: String = id.iter().map(|b| format!("{b:02x}")).collect();
    let cached = cache_dir().map(|dir| dir.join(format!("sites-{name}")));
    let known = cached.as_ref().and_then(|file| decode(&load(file)?));
    if let Some(sites) = known {
        return Ok(Sites { build_id: id, sites });
    }
    let found = scan(path)?;
    if let Some(file) = cached
        && let Err(error) = store(&file, &encode(&found.sites))
    {
        log::warn!("{}: not kept for the next time: {error}", file.display());
    }
    Ok(found)
}

/// glibc's loader and C library, as this very process has them.
pub fn libraries() -> Vec<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut found: Vec<PathBuf> = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().as_bytes();
            name == b"libc.so.6"
                || name.starts_with(b"ld-linux-x86-64")
                || name.starts_with(b"ld-2.")
        })
        .collect();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn libc() -> PathBuf {
        libraries().into_iter().find(|p| p.ends_with("libc.so.6")).expect("glibc")
    }

    #[test]
    fn an_overlay_differs_from_the_library_in_its_windows_only() {
        let sites = of(&libc()).unwrap();
        let overlay = overlay(&libc(), &sites).unwrap();
        let elf = Elf::read(&libc()).unwrap();
        let (low, high) = format::text_range(&sites.sites).unwrap();
        let mut before = elf.pages(low, high).unwrap();
        assert_eq!(before[..], elf.at_address(low as u64).unwrap()[..high - low]);
        for (i, site) in sites.sites.iter().enumerate() {
            let at = site.at as usize - low;
            let window = at..at + site.len as usize;
            // The jump leads to the stub, and the stub's last one behind the window.
            let jump = i32::from_le_bytes(overlay.text[at + 1..at + 5].try_into().unwrap());
            let stub = site.at as i64 + 5 + i64::from(jump) + format::STUBS_BELOW as i64;
            assert_eq!(stub as usize, format::PAGE + i * format::STUB);
            let len = 7 + 6 + site.len as usize + 5;
            let back = i * format::STUB + len;
            let jump = i32::from_le_bytes(overlay.stubs[back - 4..back].try_into().unwrap());
            let end = stub - format::STUBS_BELOW as i64 + len as i64 + i64::from(jump);
            assert_eq!(end, (site.at as usize + site.len as usize) as i64);
            before[window.clone()].copy_from_slice(&overlay.text[window]);
        }
        assert!(before == overlay.text);
    }

    #[test]
    fn every_site_of_libc_but_sigreturn_has_a_window() {
        let found = scan(&libc()).unwrap();
        let elf = Elf::read(&libc()).unwrap();
        let all: usize = elf
            .code()
            .map(|(a, b)| Decoder::with_ip(64, b, a, DecoderOptions::NONE).into_iter())
            .map(|d| d.filter(|i| i.mnemonic() == Mnemonic::Syscall).count())
            .sum();
        assert!(all > 300, "{all} sites");
        assert!(found.sites.len() + 3 >= all, "{} of {all}", found.sites.len());
    }

    #[test]
    fn windows_hold_a_syscall_and_do_not_overlap() {
        let found = scan(&libc()).unwrap();
        let elf = Elf::read(&libc()).unwrap();
        let mut end = 0;
        for site in &found.sites {
            assert!(site.at >= end);
            end = site.at + u32::from(site.len);
            let bytes = elf.at_address(u64::from(site.at)).unwrap();
            assert_eq!(bytes[usize::from(site.syscall)..][..2], [0x0f, 0x05]);
        }
    }

    #[test]
    fn cache_files_of_others_are_not_read() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = std::env::temp_dir().join(format!("corbel-sites-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("sites-0");
        store(&file, b"own").unwrap();
        assert_eq!(load(&file).as_deref(), Some(&b"own"[..]));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(load(&file), None, "anybody may have written it");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        if std::os::unix::fs::chown(&file, Some(3002), None).is_ok() {
            assert_eq!(load(&file), None, "somebody else's");
        }
        assert_eq!(load(Path::new("/dev/null")), None);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn cache_files_are_read_back_and_damage_is_refused() {
        let site = |at| Site { at, len: 7, syscall: 5, reserved: 0 };
        let sites = vec![site(100), site(200)];
        let file = encode(&sites);
        assert_eq!(decode(&file), Some(sites));
        for at in 0..file.len() {
            for bit in 0..8 {
                let mut bad = file.clone();
                bad[at] ^= 1 << bit;
                assert_eq!(decode(&bad), None, "byte {at} bit {bit}");
            }
        }
        for len in 0..file.len() {
            assert_eq!(decode(&file[..len]), None);
        }
        assert_eq!(decode(&encode(&[site(100), site(103)])), None, "overlap");
    }
}
