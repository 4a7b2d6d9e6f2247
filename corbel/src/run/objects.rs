//! System calls that a program or library makes by itself, and not by libc: `liburing` does, programs of
//! some languages do, and whoever was linked with such a library statically.
//!
//! Of libc and the loader it is known what they are made of (sites.rs). Here nothing is, and there may be tables of
//! constants between the functions: so what lies in a function with a frame is taken if the whole function
//! decodes; elsewhere only `mov eax, N; syscall`, seven bytes that nobody meets by chance.
//!
//! Most files have no such calls, and the two bytes of one by chance here and there: looking at the functions
//! around them takes milliseconds. Only a file that does have some is decoded as a whole, for what jumps where.
//!
//! # The cache file
//!
//! `$XDG_CACHE_HOME/corbel/calls-BUILDID`, little-endian: magic `CORBCALL` (8), version (4), CRC32C of all that
//! follows (4), number of calls (4), 1 if the file may make a ring of io_uring in a way that cannot be caught (4),
//! then per call the fields of [`Call`]. At most [`FILES_MAX`] of them are kept.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};

use crate::elf::{Elf, number};
use crate::format::{ANY_NUMBER, CALLS, Call, Site, WINDOW_MAX, WINDOW_MIN};
use crate::frames::{Frame, frames, landing_pads};
use crate::sites::{self, is_sigreturn, window};

const MAGIC: &[u8; 8] = b"CORBCALL";
const VERSION: u32 = 1;
const HEADER: usize = 24;
const CALL: usize = 16;
/// Calls of one file at most.
const OBJECT_CALLS: usize = CALLS / 8;
/// Larger files are not looked at.
const FILE_MAX: u64 = 1 << 30;
/// Cache files kept, of every kind.
const FILES_MAX: usize = 1000;
/// How far a window can reach from its `syscall`, with room to spare.
const REACH: u64 = 48;
/// Entries of one jump table followed.
const JUMPS_MAX: usize = 1024;
/// Instructions looked at for the number of a call.
const STEPS: usize = 24;
/// `io_uring_setup`, as it stands behind the first byte of what loads it.
const RING: u16 = 425;
const RING_LOADED: [u8; 4] = [0xa9, 1, 0, 0];
/// `rt_sigreturn`, whose bytes unwinders know.
const SIGRETURN: u16 = 15;
/// Bytes before something that may be a call in which that is looked for.
const CAUTION: usize = 128;
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// What a file has of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Object {
    /// By place.
    pub calls: Vec<Call>,
    /// There is a call that cannot be caught and may make a ring.
    pub unseen: bool,
}

/// A function that was decoded, all of it.
struct Function {
    frame: Frame,
    code: Vec<Instruction>,
}

impl Function {
    fn new(elf: &Elf, frame: Frame) -> Option<Self> {
        let bytes = elf.at_address(frame.from)?;
        let bytes = bytes.get(..usize::try_from(frame.to - frame.from).ok()?)?;
        let code: Vec<_> =
            Decoder::with_ip(64, bytes, frame.from, DecoderOptions::NONE).into_iter().collect();
        let whole = code.iter().all(|i| !i.is_invalid());
        (whole && code.last()?.next_ip() == frame.to).then_some(Self { frame, code })
    }

    fn syscalls(&self) -> impl Iterator<Item = usize> {
        let is = |(_, i): &(usize, &Instruction)| i.mnemonic() == Mnemonic::Syscall;
        self.code.iter().enumerate().filter(is).map(|(at, _)| at)
    }
}

/// Addresses of the two bytes of `syscall` in what may be executed.
fn pairs(elf: &Elf) -> Vec<u64> {
    let mut all = Vec::new();
    for (_, address, bytes) in elf.loaded().filter(|l| l.0) {
        let mut from = 0;
        while let Some(next) = bytes[from..].iter().position(|b| *b == SYSCALL[0]) {
            from += next + 1;
            if bytes.get(from) == Some(&SYSCALL[1]) {
                all.push(address.wrapping_add(from as u64 - 1));
            }
        }
    }
    all
}

/// Places that something in the file leads to, as far as they are near one of `syscalls` (sorted).
struct Targets<'a> {
    syscalls: &'a [u64],
    all: BTreeSet<u64>,
    /// Some function has the number of `io_uring_setup` at hand.
    rings: bool,
}

impl Targets<'_> {
    fn add(&mut self, target: u64) {
        let next = self.syscalls.partition_point(|at| *at < target);
        let near = |at: Option<&u64>| at.is_some_and(|at| at.abs_diff(target) <= REACH);
        if near(self.syscalls.get(next)) || near(next.checked_sub(1).map(|i| &self.syscalls[i])) {
            self.all.insert(target);
        }
    }

    fn collect(&mut self, elf: &Elf, frames: &[Frame]) {
        for symbol in elf.symbols() {
            self.add(symbol);
        }
        let mut tables = BTreeSet::new();
        for frame in frames {
            self.add(frame.from);
        }
        for (executable, address, bytes) in elf.loaded() {
            if executable {
                self.segment(address, bytes, frames, &mut tables);
            }
            // Tables of whole addresses, and what relocations add to the load address.
            let skip = (address.wrapping_neg() & 7) as usize;
            for word in bytes.get(skip..).unwrap_or_default().chunks_exact(8) {
                self.add(word.iter().rev().fold(0, |all, b| all << 8 | u64::from(*b)));
            }
        }
        for table in tables {
            self.jump_table(elf, table);
        }
    }

    /// Functions one after the other, and what is between them.
    fn segment(
        &mut self,
        address: u64,
        bytes: &[u8],
        frames: &[Frame],
        tables: &mut BTreeSet<u64>,
    ) {
        let end = address.saturating_add(bytes.len() as u64);
        let part = |from: u64, to: u64| &bytes[(from - address) as usize..(to - address) as usize];
        let mut behind = address;
        let first = frames.partition_point(|f| f.from < address);
        // Frames may lie within each other.
        for frame in frames[first..].iter().take_while(|f| f.from < end) {
            if frame.from < behind {
                continue;
            }
            let to = frame.to.min(end);
            self.strays(behind, part(behind, frame.from));
            self.decode(part(frame.from, to), frame.from, tables);
            behind = to;
        }
        self.strays(behind, part(behind, end));
    }

    fn decode(&mut self, bytes: &[u8], address: u64, tables: &mut BTreeSet<u64>) {
        for i in &mut Decoder::with_ip(64, bytes, address, DecoderOptions::NONE) {
            if matches!(
                i.op0_kind(),
                OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
            ) {
                self.add(i.near_branch_target());
            } else if i.is_ip_rel_memory_operand() {
                let address = i.ip_rel_memory_address();
                self.add(address);
                if i.mnemonic() == Mnemonic::Lea {
                    tables.insert(address);
                }
            }
            self.rings |= i.mnemonic() == Mnemonic::Mov
                && i.op1_kind() == OpKind::Immediate32
                && i.immediate32() == u32::from(RING);
        }
    }

    /// Entries relative to the table's own place.
    fn jump_table(&mut self, elf: &Elf, table: u64) {
        let Some(bytes) = elf.at_address(table) else { return };
        for entry in bytes.chunks_exact(4).take(JUMPS_MAX) {
            let entry = i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            let target = table.wrapping_add_signed(i64::from(entry));
            let inside = |l: &(bool, u64, &[u8])| {
                l.0 && target.checked_sub(l.1).is_some_and(|at| at < l.2.len() as u64)
            };
            if !elf.loaded().any(|l| inside(&l)) {
                break;
            }
            self.add(target);
        }
    }

    /// Jumps and calls of code between functions, which may be out of step: by their first bytes.
    fn strays(&mut self, address: u64, bytes: &[u8]) {
        for (at, code) in bytes.windows(6).enumerate() {
            if !matches!(code, [_, 0xe8 | 0xe9, ..] | [0x0f, 0x80..=0x8f, ..]) {
                continue;
            }
            let by = i32::from_le_bytes([code[2], code[3], code[4], code[5]]);
            let from = address.wrapping_add(at as u64 + 6);
            self.add(from.wrapping_add_signed(i64::from(by)));
        }
    }
}

/// The number with which the call at `at` is made, if all ways to it lead past a constant.
fn number_of(function: &[Instruction], at: usize, joins: &BTreeSet<u64>) -> u16 {
    let mut info = InstructionInfoFactory::new();
    for i in (0..at).rev().take(STEPS) {
        let (this, next) = (&function[i], &function[i + 1]);
        if joins.contains(&next.ip()) || this.flow_control() != FlowControl::Next {
            break;
        }
        let writes = |used: &iced_x86::UsedRegister| {
            used.register().full_register() == Register::RAX
                && !matches!(used.access(), OpAccess::Read | OpAccess::CondRead)
        };
        if !info.info(this).used_registers().iter().any(writes) {
            continue;
        }
        let whole = matches!(this.op0_register(), Register::EAX | Register::RAX);
        let constant = match this.mnemonic() {
            Mnemonic::Mov if whole && this.op1_kind() == OpKind::Immediate32 => this.immediate(1),
            Mnemonic::Mov if whole && this.op1_kind() == OpKind::Immediate32to64 => {
                this.immediate(1)
            }
            Mnemonic::Xor if whole && this.op1_register() == this.op0_register() => 0,
            _ => break,
        };
        return u16::try_from(constant).ok().filter(|n| *n < ANY_NUMBER).unwrap_or(ANY_NUMBER);
    }
    ANY_NUMBER
}

/// Branches within a function.
fn branches(function: &Function) -> BTreeSet<u64> {
    let near = |i: &&Instruction| {
        matches!(i.op0_kind(), OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64)
    };
    function.code.iter().filter(near).map(Instruction::near_branch_target).collect()
}

fn call(elf: &Elf, address: u64, len: u8, syscall: u8, number: u16) -> Option<Call> {
    let at = u32::try_from(elf.offset_of(address)?).ok()?;
    let bytes = elf.bytes.get(at as usize..)?.get(..usize::from(len))?;
    if bytes.get(usize::from(syscall)..)?.get(..2)? != SYSCALL {
        return None;
    }
    Some(Call { at, len, syscall, number, check: base::crc32c(0, bytes), reserved: 0 })
}

/// Whether the number of `io_uring_setup` is loaded somewhere before an address.
fn may_make_ring(elf: &Elf, before: u64) -> bool {
    let loads = |code: &[u8]| matches!(code, [0xb8..=0xbf, rest @ ..] if rest == RING_LOADED);
    let Some(at) = elf.offset_of(before).and_then(|at| usize::try_from(at).ok()) else {
        return false;
    };
    let code = elf.bytes.get(at.saturating_sub(CAUTION)..at).unwrap_or_default();
    code.windows(5).any(loads)
}

/// What there is to look at in a file.
struct Search<'a> {
    elf: &'a Elf,
    frames: Vec<Frame>,
    /// Those around two bytes that may be a call, as far as they can be read.
    functions: Vec<Function>,
    /// The two bytes where no such function is.
    others: Vec<u64>,
}

impl<'a> Search<'a> {
    fn new(elf: &'a Elf) -> Self {
        let frames = frames(elf);
        let pairs = pairs(elf);
        let around: BTreeSet<usize> = pairs.iter().filter_map(|at| holds(&frames, *at)).collect();
        // A file whose functions lie within each other is not from a compiler.
        let len = |i: usize| usize::try_from(frames[i].to - frames[i].from).unwrap_or(usize::MAX);
        let all = around.iter().fold(0, |all: usize, i| all.saturating_add(len(*i)));
        let functions: Vec<_> = around
            .into_iter()
            .filter(|i| all <= elf.bytes.len() && !frames[*i].signal)
            .filter_map(|i| Function::new(elf, frames[i]))
            .collect();
        let known = |at: &u64| {
            let next = functions.partition_point(|f| f.frame.from <= *at);
            functions[..next].last().is_none_or(|f| *at >= f.frame.to)
        };
        let others = pairs.into_iter().filter(known).collect();
        Self { elf, frames, functions, others }
    }

    /// Of two bytes outside of all functions: the number, if what is before them loads it.
    fn bare(&self, at: u64) -> Option<u16> {
        match self.elf.at_address(at.checked_sub(5)?)?.first_chunk::<5>()? {
            [0xb8, low, high, 0, 0] if holds(&self.frames, at).is_none() => {
                Some(u16::from_le_bytes([*low, *high])).filter(|number| *number < 512)
            }
            _ => None,
        }
    }

    /// What else could be a call is left alone; near the number of a ring it is a reason for caution.
    fn is_suspicious(&self) -> bool {
        let rest = self.others.iter().filter(|at| self.bare(**at).is_none());
        rest.into_iter().any(|at| may_make_ring(self.elf, *at))
    }

    /// The addresses of all calls.
    fn syscalls(&self) -> Vec<u64> {
        let within = |f: &Function| f.syscalls().map(|at| f.code[at].ip()).collect::<Vec<_>>();
        let bare = self.others.iter().copied().filter(|at| self.bare(*at).is_some());
        let mut all: Vec<u64> = self.functions.iter().flat_map(within).chain(bare).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The calls of one function.
    fn function(&self, function: &Function, targets: &Targets<'_>, object: &mut Object) {
        // Without the places where exceptions lead, nothing is sure.
        let pads = landing_pads(self.elf, &function.frame);
        let mut joins = branches(function);
        joins.extend(targets.all.range(function.frame.from..function.frame.to));
        joins.extend(pads.iter().flatten());
        for at in function.syscalls() {
            if is_sigreturn(at.checked_sub(1).map(|before| &function.code[before])) {
                continue;
            }
            let number = number_of(&function.code, at, &joins);
            let site = window(&function.code, at, &joins).filter(|_| pads.is_some());
            // The next one's must not reach into this one's.
            joins.extend(site.map(|site| u64::from(site.at) + u64::from(site.len)));
            let found = site.and_then(|s| call(self.elf, s.at.into(), s.len, s.syscall, number));
            object.unseen |=
                found.is_none() && (number == RING || number == ANY_NUMBER && targets.rings);
            object.calls.extend(found);
        }
    }

    /// A call outside of all functions.
    fn stray(&self, at: u64, targets: &Targets<'_>, object: &mut Object) {
        let Some(number) = self.bare(at).filter(|number| *number != SIGRETURN) else { return };
        let free = targets.all.range(at - 4..at + 2).next().is_none();
        let found = call(self.elf, at - 5, 7, 5, number).filter(|_| free);
        object.unseen |= found.is_none() && number == RING;
        object.calls.extend(found);
    }
}

/// Which function an address is in, with the one behind it.
fn holds(frames: &[Frame], at: u64) -> Option<usize> {
    let last = frames.partition_point(|f| f.from <= at).checked_sub(1)?;
    (at + 2 <= frames[last].to).then_some(last)
}

/// Disassembles what has to be.
pub fn scan(elf: &Elf) -> Object {
    let search = Search::new(elf);
    let mut object = Object { calls: Vec::new(), unseen: search.is_suspicious() };
    let syscalls = search.syscalls();
    if syscalls.is_empty() {
        return object;
    }
    let mut targets = Targets { syscalls: &syscalls, all: BTreeSet::new(), rings: false };
    targets.collect(elf, &search.frames);
    for function in &search.functions {
        search.function(function, &targets, &mut object);
    }
    for at in &search.others {
        search.stray(*at, &targets, &mut object);
    }
    object.unseen |= apart(&mut object.calls) && targets.rings;
    object
}

/// Puts calls in order, without those that reach into the one before; whether some are left out.
fn apart(calls: &mut Vec<Call>) -> bool {
    calls.sort_unstable_by_key(|call| call.at);
    let all = calls.len();
    let mut end = 0;
    calls.retain(|call| {
        let free = call.at >= end;
        if free {
            end = call.at.saturating_add(u32::from(call.len));
        }
        free
    });
    calls.truncate(OBJECT_CALLS);
    calls.len() < all
}

/// What a library has of which all sites are known.
pub fn of_sites(path: &Path, sites: &[Site]) -> Option<Object> {
    let elf = Elf::read(path).ok()?;
    let whole = |s: &Site| call(&elf, s.at.into(), s.len, s.syscall, ANY_NUMBER);
    Some(Object { calls: sites.iter().map(whole).collect::<Option<_>>()?, unseen: false })
}

/// What the bytes of a file have.
pub fn scan_bytes(bytes: Vec<u8>) -> Option<Object> {
    Some(scan(&Elf::parse(bytes)?))
}

/// A call as it lies in the session's memory, and in a cache file.
pub fn call_bytes(call: &Call) -> [u8; CALL] {
    let mut bytes = [0; CALL];
    bytes[..4].copy_from_slice(&call.at.to_le_bytes());
    bytes[4..6].copy_from_slice(&[call.len, call.syscall]);
    bytes[6..8].copy_from_slice(&call.number.to_le_bytes());
    bytes[8..12].copy_from_slice(&call.check.to_le_bytes());
    bytes
}

/// The cache file of an object.
pub fn encode(object: &Object) -> Vec<u8> {
    let count = u32::try_from(object.calls.len()).unwrap_or(0);
    let mut body = count.to_le_bytes().to_vec();
    body.extend_from_slice(&u32::from(object.unseen).to_le_bytes());
    body.extend(object.calls.iter().flat_map(call_bytes));
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&base::crc32c(0, &body).to_le_bytes());
    file.extend_from_slice(&body);
    file
}

/// The object of a cache file; `None` when it is not exactly what [`encode`] writes.
pub fn decode(file: &[u8]) -> Option<Object> {
    let count = number::<4>(file, 16)? as usize;
    let unseen = number::<4>(file, 20)?;
    let right = file.starts_with(MAGIC)
        && number::<4>(file, 8)? == u64::from(VERSION)
        && number::<4>(file, 12)? == u64::from(base::crc32c(0, &file[16..]))
        && count <= OBJECT_CALLS
        && unseen <= 1
        && file.len() == HEADER + count * CALL;
    if !right {
        return None;
    }
    let mut calls = Vec::with_capacity(count);
    let mut end = 0;
    for entry in file[HEADER..].chunks_exact(CALL) {
        let call = Call {
            at: u32::try_from(number::<4>(entry, 0)?).ok()?,
            len: entry[4],
            syscall: entry[5],
            number: u16::from_le_bytes([entry[6], entry[7]]),
            check: u32::try_from(number::<4>(entry, 8)?).ok()?,
            reserved: 0,
        };
        let good = (WINDOW_MIN..=WINDOW_MAX).contains(&call.len)
            && call.syscall.checked_add(2)? <= call.len
            && call.at >= end
            && entry[12..] == [0; 4];
        if !good {
            return None;
        }
        end = call.at.checked_add(u32::from(call.len))?;
        calls.push(call);
    }
    Some(Object { calls, unseen: unseen == 1 })
}

/// Build-id of a file, from its first pages only.
fn build_id(file: &File) -> Option<Vec<u8>> {
    let mut head = vec![0; 16 << 10];
    let got = file.read_at(&mut head, 0).ok()?;
    head.truncate(got);
    // The table of sections lies at the end, and is of no use here: it has no rows, at 0.
    head.get_mut(40..48)?.fill(0);
    head.get_mut(60..62)?.fill(0);
    Elf::parse(head)?.build_id().filter(|id| (8..=64).contains(&id.len()))
}

/// What an open file has, from the cache or by looking. None: it is no ELF file of this machine.
pub fn of(file: &File) -> Option<Object> {
    let meta = file.metadata().ok().filter(|m| m.is_file() && m.len() <= FILE_MAX)?;
    // What the file says of itself counts only if nobody else could have written it.
    let mine = [0, rustix::process::getuid().as_raw()].contains(&meta.uid());
    let id = if mine && meta.mode() & 0o022 == 0 { build_id(file) } else { None };
    let name = id.map(|id| id.iter().map(|b| format!("{b:02x}")).collect::<String>());
    let cached = name.and_then(|name| Some(sites::cache_dir()?.join(format!("calls-{name}"))));
    if let Some(known) = cached.as_ref().and_then(|path| decode(&sites::load(path)?)) {
        return Some(known);
    }
    // Not by the file's own offset: whoever sent it shares that.
    let mut bytes = vec![0; usize::try_from(meta.len()).ok()?];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let found = scan_bytes(bytes)?;
    if let Some(path) = cached {
        if let Err(error) = sites::store(&path, &encode(&found)) {
            log::warn!("{}: not kept for the next time: {error}", path.display());
        }
        if let Some(dir) = path.parent() {
            prune(dir);
        }
    }
    Some(found)
}

/// Of too many cache files the oldest fifth goes.
fn prune(dir: &Path) {
    let Ok(list) = fs::read_dir(dir) else { return };
    let files: Vec<_> = list.flatten().map(|entry| entry.path()).collect();
    if files.len() <= FILES_MAX {
        return;
    }
    let age = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).ok();
    let mut files: Vec<_> = files.into_iter().map(|path| (age(&path), path)).collect();
    files.sort_unstable();
    for (_, path) in files.iter().take(FILES_MAX / 5) {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most of what libc has, but for the three that are in no function's frame: nothing is taken that is not there.
    #[test]
    fn frames_show_the_calls_of_libc() {
        for path in sites::libraries() {
            let elf = Elf::read(&path).unwrap();
            let found = scan(&elf);
            let known = sites::of(&path).unwrap().sites;
            assert!(found.calls.len() + 5 >= known.len(), "{} {}", found.calls.len(), known.len());
            let syscall =
                |at: u64| known.iter().any(|s| u64::from(s.at) + u64::from(s.syscall) == at);
            let (_, address, _) = elf.loaded().find(|l| l.0).unwrap();
            let skip = address - elf.offset_of(address).unwrap();
            for call in &found.calls {
                assert!(syscall(u64::from(call.at) + u64::from(call.syscall) + skip), "{call:?}");
            }
            assert!(!found.unseen);
            assert_eq!(of_sites(&path, &known).unwrap().calls.len(), known.len());
        }
    }

    /// The first pages are enough to know a file by.
    #[test]
    fn large_files_have_their_build_id() {
        for path in sites::libraries() {
            let known = Elf::read(&path).unwrap().build_id();
            assert!(known.is_some() && build_id(&File::open(&path).unwrap()) == known);
        }
    }

    #[test]
    fn numbers_are_known_where_the_code_says_them() {
        // mov eax, 1; xor edi, edi; syscall; xor eax, eax; syscall; mov eax, ebx; syscall; mov eax, 2; 1: syscall; je 1b
        let code = b"\xb8\x01\0\0\0\x31\xff\x0f\x05\x31\xc0\x0f\x05\x89\xd8\x0f\x05\xb8\x02\0\0\0\x0f\x05\x74\xfc";
        let code: Vec<_> =
            Decoder::with_ip(64, code, 0, DecoderOptions::NONE).into_iter().collect();
        let frame = Frame { from: 0, to: 28, exceptions: 0, signal: false };
        let function = Function { frame, code };
        let joins = branches(&function);
        let numbers: Vec<_> =
            function.syscalls().map(|at| number_of(&function.code, at, &joins)).collect();
        assert_eq!(numbers, [1, 0, ANY_NUMBER, ANY_NUMBER]);
    }

    #[test]
    fn cache_files_are_read_back_and_damage_is_refused() {
        let call = |at| Call { at, len: 7, syscall: 5, number: 1, check: 9, reserved: 0 };
        let object = Object { calls: vec![call(100), call(200)], unseen: true };
        let file = encode(&object);
        assert_eq!(decode(&file), Some(object));
        assert_eq!(decode(&encode(&Object::default())), Some(Object::default()));
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
        let overlap = Object { calls: vec![call(100), call(103)], unseen: false };
        assert_eq!(decode(&encode(&overlap)), None);
    }
}
