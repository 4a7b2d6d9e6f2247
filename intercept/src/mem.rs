//! What the compiler expects a C library to have, and copies that survive bad addresses.
//!
//! The symbols are hidden: nothing of the application may bind to them.
#![allow(unsafe_code)]

use core::arch::global_asm;

global_asm!(
    ".macro hidden_fn name",
    ".globl \\name",
    ".hidden \\name",
    ".type \\name,@function",
    "\\name:",
    ".endm",
    ".text",
    "hidden_fn memmove",
    "mov rax, rdi",
    "mov rcx, rdi",
    "sub rcx, rsi",
    "cmp rcx, rdx",
    "jb 2f",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    "2: mov rcx, rdx",
    "lea rdi, [rdi + rdx - 1]",
    "lea rsi, [rsi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "hidden_fn memcpy",
    "mov rax, rdi",
    "mov rcx, rdx",
    "cmp rdx, 16",
    "jb 3f",
    "cmp rdx, 64",
    "ja 5f",
    // 16 to 64 bytes: whole vectors from both ends.
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + rdx - 16]",
    "cmp rdx, 32",
    "jbe 4f",
    "movups xmm2, [rsi + 16]",
    "movups xmm3, [rsi + rdx - 32]",
    "movups [rdi + 16], xmm2",
    "movups [rdi + rdx - 32], xmm3",
    "4: movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm1",
    "ret",
    "3: cmp rdx, 8",
    "jb 6f",
    "mov rcx, [rsi]",
    "mov r8, [rsi + rdx - 8]",
    "mov [rdi], rcx",
    "mov [rdi + rdx - 8], r8",
    "ret",
    "6: cmp rdx, 4",
    "jb 5f",
    "mov ecx, [rsi]",
    "mov r8d, [rsi + rdx - 4]",
    "mov [rdi], ecx",
    "mov [rdi + rdx - 4], r8d",
    "ret",
    "5: rep movsb",
    "ret",
    "hidden_fn memset",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "hidden_fn bcmp",
    "hidden_fn memcmp",
    "xor ecx, ecx",
    "2: cmp rcx, rdx",
    "jae 3f",
    "movzx eax, byte ptr [rdi + rcx]",
    "movzx r8d, byte ptr [rsi + rcx]",
    "inc rcx",
    "sub eax, r8d",
    "je 2b",
    "ret",
    "3: xor eax, eax",
    "ret",
    "hidden_fn strlen",
    "xor eax, eax",
    "2: cmp byte ptr [rdi + rax], 0",
    "je 3f",
    "inc rax",
    "jmp 2b",
    "3: ret",
    // The prebuilt core library names these; with panic = abort nothing calls them.
    "hidden_fn rust_eh_personality",
    "hidden_fn _Unwind_Resume",
    "ud2",
    // Accesses to application memory. A fault between the two marks makes the function return 1
    // (the signal wrapper in signal.rs sees to that): leaf functions, stack untouched.
    "hidden_fn corbel_user_begin",
    "hidden_fn corbel_user_copy",
    "mov rcx, rdx",
    "rep movsb",
    "xor eax, eax",
    "ret",
    "hidden_fn corbel_user_string",
    // rdi: ours, rsi: theirs, rdx: room. Returns 0, or 2 when there is no NUL within the room.
    "2: test rdx, rdx",
    "je 3f",
    "mov al, [rsi]",
    "mov [rdi], al",
    "inc rsi",
    "inc rdi",
    "dec rdx",
    "test al, al",
    "jne 2b",
    "xor eax, eax",
    "ret",
    "3: mov eax, 2",
    "ret",
    "hidden_fn corbel_user_probe_read",
    "mov al, [rdi]",
    "xor eax, eax",
    "ret",
    "hidden_fn corbel_user_probe_write",
    "lock or byte ptr [rdi], 0",
    "xor eax, eax",
    "ret",
    "hidden_fn corbel_user_end",
    "hidden_fn corbel_user_fault",
    "mov eax, 1",
    "ret",
);

// SAFETY: defined above with these arguments; they touch no memory but what they are given.
unsafe extern "C" {
    fn corbel_user_copy(dst: *mut u8, src: *const u8, len: usize) -> u32;
    fn corbel_user_string(dst: *mut u8, src: *const u8, room: usize) -> u32;
    fn corbel_user_probe_read(at: *const u8) -> u32;
    fn corbel_user_probe_write(at: *mut u8) -> u32;
}

const PAGE: usize = 4096;
/// First address that no application can own.
const USER_END: usize = 0x7fff_ffff_f000;

/// The address is bad: the call answers EFAULT.
#[derive(Clone, Copy, Debug)]
pub struct Fault;

/// Whether an application could have memory there at all.
pub fn in_range(at: usize, len: usize) -> Result<(), Fault> {
    match at.checked_add(len) {
        Some(end) if end <= USER_END => Ok(()),
        _ => Err(Fault),
    }
}

/// Copies a value in.
pub fn get<T: Copy>(at: usize) -> Result<T, Fault> {
    in_range(at, size_of::<T>())?;
    let mut value = core::mem::MaybeUninit::<T>::uninit();
    // SAFETY: the destination is ours and large enough; a fault on the source is caught. Used with
    // integers and repr(C) structs of integers only, for which any bytes are a value.
    unsafe {
        if corbel_user_copy(value.as_mut_ptr().cast(), at as *const u8, size_of::<T>()) != 0 {
            return Err(Fault);
        }
        Ok(value.assume_init())
    }
}

/// Copies a value out.
pub fn put<T: Copy>(at: usize, value: &T) -> Result<(), Fault> {
    put_bytes(at, core::ptr::from_ref(value).cast(), size_of::<T>())
}

/// Copies bytes out.
pub fn put_slice(at: usize, bytes: &[u8]) -> Result<(), Fault> {
    put_bytes(at, bytes.as_ptr(), bytes.len())
}

fn put_bytes(at: usize, from: *const u8, len: usize) -> Result<(), Fault> {
    in_range(at, len)?;
    // SAFETY: the source is `len` readable bytes of ours; a fault on the destination is caught.
    match unsafe { corbel_user_copy(at as *mut u8, from, len) } {
        0 => Ok(()),
        _ => Err(Fault),
    }
}

/// Copies a C string into `room`; the length without NUL, or `None` when it does not fit.
pub fn get_string(at: usize, room: &mut [u8]) -> Result<Option<usize>, Fault> {
    in_range(at, 1)?;
    // SAFETY: at most `room.len()` bytes are stored; a fault on the source is caught.
    match unsafe { corbel_user_string(room.as_mut_ptr(), at as *const u8, room.len()) } {
        0 => Ok(room.iter().position(|b| *b == 0)),
        1 => Err(Fault),
        _ => Ok(None),
    }
}

/// The application's buffer for reading from, once each page has been seen to be readable. Where
/// only its beginning is, [`source_some`] takes that.
///
/// Another thread that unmaps it meanwhile makes the process die of SIGSEGV instead of the call
/// failing with EFAULT: the one difference to the kernel.
pub fn source<'a>(at: usize, len: usize) -> Result<&'a [u8], Fault> {
    let bytes = source_some(at, len)?;
    if bytes.len() == len { Ok(bytes) } else { Err(Fault) }
}

/// What of the buffer lies before the first bad page: a call that gets so far has succeeded in part.
pub fn source_some<'a>(at: usize, mut len: usize) -> Result<&'a [u8], Fault> {
    in_range(at, len)?;
    if len == 0 {
        return Ok(&[]);
    }
    let mut page = at;
    while page < at + len {
        // SAFETY: a fault is caught.
        if unsafe { corbel_user_probe_read(page as *const u8) } != 0 {
            if page == at {
                return Err(Fault);
            }
            len = page - at;
        }
        page = (page & !(PAGE - 1)) + PAGE;
    }
    // SAFETY: the range is mapped (probed above) and the application lent it for this call.
    Ok(unsafe { core::slice::from_raw_parts(at as *const u8, len) })
}

/// The same for a buffer to be filled: what lies before the first bad page.
pub fn sink<'a>(at: usize, mut len: usize) -> Result<&'a mut [u8], Fault> {
    in_range(at, len)?;
    if len == 0 {
        return Ok(&mut []);
    }
    let mut page = at;
    while page < at + len {
        // SAFETY: a fault is caught; the byte keeps its value.
        if unsafe { corbel_user_probe_write(page as *mut u8) } != 0 {
            if page == at {
                return Err(Fault);
            }
            len = page - at;
        }
        page = (page & !(PAGE - 1)) + PAGE;
    }
    // SAFETY: as in `source`; the application gave the range to the call for writing.
    Ok(unsafe { core::slice::from_raw_parts_mut(at as *mut u8, len) })
}

/// Memory that the engine has just mapped for the application.
pub fn fresh<'a>(at: usize, len: usize) -> &'a mut [u8] {
    // SAFETY: the caller got the range from mmap a moment ago, writable, and nobody else has it.
    unsafe { core::slice::from_raw_parts_mut(at as *mut u8, len) }
}
