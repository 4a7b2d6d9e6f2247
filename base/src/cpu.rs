//! What this CPU can do and the operating system saves across switches. Asked once, without libc: the client runs
//! where `std::arch`'s own detection is not there.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use core::sync::atomic::{AtomicU8, Ordering};

/// SSE4.2 and PCLMULQDQ.
#[cfg(target_arch = "x86_64")]
const CRC: u8 = 1;
/// AVX-512 F and VL, and the operating system saves its registers.
#[cfg(target_arch = "x86_64")]
const WIDE: u8 = 2;
/// VPCLMULQDQ on 512-bit vectors.
#[cfg(target_arch = "x86_64")]
const WIDE_CLMUL: u8 = 4;
/// The `clwb` instruction.
#[cfg(target_arch = "x86_64")]
const CLWB: u8 = 8;
#[cfg(target_arch = "x86_64")]
const ASKED: u8 = 128;

/// What was found, 0 before that.
#[cfg(target_arch = "x86_64")]
static KNOWN: AtomicU8 = AtomicU8::new(0);

/// What this CPU can do, for [`be_told`] in another process of this machine.
#[must_use]
pub fn tell() -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        has(ASKED);
        KNOWN.load(Ordering::Relaxed).into()
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// Takes over what another process of this machine was [told](tell), who need not be asked again then. 0 says nothing.
pub fn be_told(known: u32) {
    #[cfg(target_arch = "x86_64")]
    if known & u32::from(ASKED) != 0 {
        KNOWN.store(known as u8, Ordering::Relaxed);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = known;
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn has(what: u8) -> bool {
    let mut known = KNOWN.load(Ordering::Relaxed);
    if known == 0 {
        // A race only asks twice.
        known = detect();
        KNOWN.store(known, Ordering::Relaxed);
    }
    known & what == what
}

/// Whether the `crc32` instruction and carry-less multiplication are there.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn crc() -> bool {
    has(CRC)
}

/// Whether 512-bit vectors (F and VL) may be used.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn wide() -> bool {
    has(WIDE)
}

/// Whether [`crc`], [`wide`] and carry-less multiplication of 512-bit vectors are there.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn wide_clmul() -> bool {
    has(CRC | WIDE | WIDE_CLMUL)
}

/// Whether a line can be written back and kept (`clwb`).
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn clwb() -> bool {
    has(CLWB)
}

#[cfg(target_arch = "x86_64")]
#[cold]
fn detect() -> u8 {
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    let bit = |word: u32, n: u32| word & (1 << n) != 0;
    let basic = __cpuid(1).ecx;
    let mut known = ASKED;
    if bit(basic, 20) && bit(basic, 1) {
        known |= CRC;
    }
    if __cpuid(0).eax < 7 {
        return known;
    }
    let more = __cpuid_count(7, 0);
    if bit(more.ebx, 24) {
        known |= CLWB;
    }
    // OSXSAVE: the operating system says in XCR0 which registers it saves.
    if !bit(basic, 27) {
        return known;
    }
    let (low, _high): (u32, u32);
    // SAFETY: OSXSAVE was checked, so the instruction exists; it reads XCR0.
    unsafe {
        core::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _high,
            options(nomem, nostack, preserves_flags));
    }
    // XCR0: SSE, AVX, and the three parts of AVX-512.
    if low & 0xe6 == 0xe6 && bit(more.ebx, 16) && bit(more.ebx, 31) {
        known |= WIDE;
        if bit(more.ecx, 10) {
            known |= WIDE_CLMUL;
        }
    }
    known
}
