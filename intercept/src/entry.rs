//! The way in and out of the engine: assembly between a patched site and [`dispatch`].
//!
//! A site jumps to its stub (patch.rs), which has put its own continuation into `rcx` (the kernel
//! clobbers `rcx` and `r11` anyway) and comes here with the system call's registers untouched.
//! At `rcx` the stub has the original `syscall`: going there makes the call; going to `rcx + 2`
//! returns to the site with the result in `rax`. The application's stack is not touched on the
//! way (red zones, small stacks), except below the red zone in the rare paths marked so.
//!
//! [`dispatch`]: crate::calls::dispatch
#![allow(unsafe_code)]

use core::arch::global_asm;
use core::arch::x86_64::__cpuid;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use crate::table::FDS;
use crate::thread::{Area, FRAME};

/// Saved registers, at the top of a frame.
#[repr(C, align(16))]
#[derive(Debug)]
pub struct Regs {
    /// Call number on the way in, result on the way out.
    pub rax: usize,
    /// First argument.
    pub rdi: usize,
    /// Second.
    pub rsi: usize,
    /// Third.
    pub rdx: usize,
    /// Fourth.
    pub r10: usize,
    /// Fifth.
    pub r8: usize,
    /// Sixth.
    pub r9: usize,
    /// The stub's continuation.
    pub rcx: usize,
    /// The application's stack pointer.
    pub rsp: usize,
    /// Replacement of `rdi` for [`RAW_REPLACED`].
    pub new_rdi: usize,
    /// Replacement of `rdx`.
    pub new_rdx: usize,
    /// Replacement of `rax`.
    pub new_rax: usize,
    spare: [usize; 4],
    xmm: [[u64; 2]; 16],
}
const _: () = assert!(size_of::<Regs>() == 384);

/// `rax` is the result.
pub const DONE: usize = 0;
/// Let the kernel do the call as the application made it.
pub const RAW: usize = 1;
/// Let the kernel do it, and come back to [`after_vfork`] in the parent.
///
/// [`after_vfork`]: crate::calls::process::after_vfork
pub const VFORK: usize = 2;
/// Let the kernel do it with the replacements; the application's registers are put back.
pub const RAW_REPLACED: usize = 3;

/// Let the kernel make a thread, whose way back lies below its stack (strict mode only).
pub const THREAD: usize = 4;

/// What was put off is raised first, and then the call comes to [`dispatch`] once more.
///
/// [`dispatch`]: crate::calls::dispatch
pub const FLUSH: usize = 5;

/// Not 0: no system call may be made but in this library's text, so [`RAW`] is done here.
pub static STRICT: AtomicU8 = AtomicU8::new(0);

/// Pseudo call number with which the parent of a vfork comes back.
pub const AFTER_VFORK: usize = 511;
/// Bytes of the stack on which a thread's area is made, of which a few are touched. (A handler may come meanwhile.)
const ASIDE: usize = 256 * 1024;
/// Call numbers looked at.
pub const CALLS: usize = 512;

// SAFETY: these are the labels of the assembly below, with the arguments and results that it has there.
unsafe extern "C" {
    /// Where the stubs jump to.
    pub fn corbel_entry();
    /// The same for calls that are not libc's: as over a `syscall`, every register stays as it is, and so do the flags. (A
    /// function of libc's promises neither to its callers.)
    pub fn corbel_entry_whole();
    fn corbel_window(call: *const [usize; 7]) -> isize;
    /// The handler that stands for every handler of the application.
    pub fn corbel_sigwrap();
    /// Returns from a handler whose owner gave no way (signal.rs).
    pub fn corbel_restorer();
}

/// What [`unless_put_off`] answers where it made no call.
pub const PUT_OFF: isize = -5000;

/// A system call (its number, its arguments) that is not made once a signal has been put off, not even by one that
/// comes at the last moment: of calls that wait, and of the one that does not come back.
pub fn unless_put_off(call: &[usize; 7]) -> isize {
    // SAFETY: makes the call, as `sys::call6`.
    unsafe { corbel_window(call) }
}

/// Parts of the registers that [`corbel_entry_whole`] keeps besides the general ones and xmm0 to xmm15.
static KEPT: AtomicU32 = AtomicU32::new(0);
/// Vector registers of 128, 256 and 512 bits and their masks, in the processor's XCR0. They take less than 4 KiB.
const VECTORS: u32 = 1 << 1 | 1 << 2 | 7 << 5;

/// Before [`corbel_entry_whole`] is used: which registers there are.
pub fn learn_registers() {
    const OSXSAVE: u32 = 1 << 27;
    // A virtual machine is left for the instruction below.
    if KEPT.load(Ordering::Relaxed) != 0 || __cpuid(1).ecx & OSXSAVE == 0 {
        return;
    }
    let (low, _high): (u32, u32);
    // SAFETY: the instruction is there, and reads a register.
    unsafe {
        core::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _high,
            options(nomem, nostack, preserves_flags));
    }
    KEPT.store(low & VECTORS, Ordering::Relaxed);
}

global_asm!(
    ".macro hidden_entry name",
    ".globl \\name",
    ".hidden \\name",
    ".type \\name,@function",
    "\\name:",
    ".endm",
    // The registers of the call, below the red zone.
    ".macro push_call",
    "lea rsp, [rsp - 128]",
    "push rax",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r10",
    "push r8",
    "push r9",
    "push rcx",
    ".endm",
    ".macro pop_call",
    "pop rcx",
    "pop r9",
    "pop r8",
    "pop r10",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "pop rax",
    "lea rsp, [rsp + 128]",
    ".endm",
    // Saves every register that a Rust function may change, on the application's stack below the
    // red zone; r11 and flags are free. Undone by app_restore.
    ".macro app_save",
    "push_call",
    "mov r11, rsp",
    "sub rsp, 272",
    "and rsp, -16",
    "mov [rsp + 256], r11",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movups [rsp + 16 * \\n], xmm\\n",
    ".endr",
    ".endm",
    ".macro app_restore",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movups xmm\\n, [rsp + 16 * \\n]",
    ".endr",
    "mov rsp, [rsp + 256]",
    "pop_call",
    ".endm",
    // Makes the thread's area, on a stack of its own: the application's may be one of few bytes (a goroutine's). Of it 192 bytes are
    // used, the red zone counted; more if there is no memory for another.
    ".macro new_area",
    "push_call",
    // mmap: private, of no file.
    "mov eax, 9",
    "xor edi, edi",
    "mov esi, {aside}",
    "mov edx, 3",
    "mov r10d, 0x22",
    "mov r8, -1",
    "xor r9d, r9d",
    "syscall",
    "lea r11, [rax + {aside}]",
    "test rax, rax",
    "jns 710f",
    "xor eax, eax",
    "mov r11, rsp",
    "710: sub r11, 272",
    "and r11, -16",
    "mov [r11 + 256], rsp",
    "mov [r11 + 264], rax",
    "mov rsp, r11",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movups [rsp + 16 * \\n], xmm\\n",
    ".endr",
    "call {thread_new}",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movups xmm\\n, [rsp + 16 * \\n]",
    ".endr",
    "mov rdi, [rsp + 264]",
    "mov rsp, [rsp + 256]",
    "test rdi, rdi",
    "je 711f",
    // munmap.
    "mov eax, 11",
    "mov esi, {aside}",
    "syscall",
    "711:",
    "pop_call",
    ".endm",
    // Reserves a frame with one instruction (a handler that comes now sees it or not), and saves the registers there.
    ".macro enter_frame",
    "sub qword ptr gs:[{a_cur}], {frame}",
    "mov r11, gs:[{a_cur}]",
    "lea r11, [r11 + {frame} - 384]",
    "mov [r11], rax",
    "mov [r11 + 8], rdi",
    "mov [r11 + 16], rsi",
    "mov [r11 + 24], rdx",
    "mov [r11 + 32], r10",
    "mov [r11 + 40], r8",
    "mov [r11 + 48], r9",
    "mov [r11 + 56], rcx",
    "mov [r11 + 64], rsp",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movups [r11 + 128 + 16 * \\n], xmm\\n",
    ".endr",
    "mov rsp, r11",
    ".endm",
    // Goes on behind it, at 2, if the engine looks at the call, else at 9; at 7 in a thread without an area, which comes back to 1.
    ".macro who_serves",
    "lea r11, [rip + {class}]",
    "cmp byte ptr [r11 + rax], 0",
    "je 9f",
    "mov r11, fs:[0]",
    "cmp r11, gs:[0]",
    "jne 7f",
    "1: lea r11, [rip + {class}]",
    "cmp byte ptr [r11 + rax], 1",
    "ja 2f",
    // Class 1: the descriptor in edi decides.
    "mov r11d, edi",
    "cmp r11d, {fds}",
    "jae 9f",
    "shl r11, 2",
    "add r11, gs:[{a_fds}]",
    "cmp dword ptr [r11], 0",
    "je 9f",
    ".endm",
    ".text",
    ".p2align 6",
    "hidden_entry corbel_entry",
    "cmp rax, {calls}",
    "jae 9f",
    "who_serves",
    "2: enter_frame",
    "mov rdi, r11",
    "call {dispatch}",
    "corbel_dispatched: mov r11, rsp",
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movups xmm\\n, [r11 + 128 + 16 * \\n]",
    ".endr",
    "mov rdi, [r11 + 8]",
    "mov rsi, [r11 + 16]",
    "mov rdx, [r11 + 24]",
    "mov r10, [r11 + 32]",
    "mov r8, [r11 + 40]",
    "mov r9, [r11 + 48]",
    "mov rcx, [r11 + 56]",
    "test eax, eax",
    "jne 3f",
    "mov rax, [r11]",
    "mov rsp, [r11 + 64]",
    "add qword ptr gs:[{a_cur}], {frame}",
    "cmp qword ptr gs:[{a_pending}], 0",
    "jne 6f",
    "add rcx, 2",
    "jmp rcx",
    // Not answered here: 1 raw, 2 vfork, 3 raw with replacements, 4 a thread.
    "3: cmp eax, 2",
    "je 4f",
    "cmp eax, 4",
    "je 95f",
    "cmp eax, 3",
    "je 5f",
    "cmp eax, 5",
    "je 98f",
    "mov rax, [r11]",
    "mov rsp, [r11 + 64]",
    "add qword ptr gs:[{a_cur}], {frame}",
    "cmp qword ptr gs:[{a_pending}], 0",
    "jne 8f",
    "9: cmp byte ptr [rip + {strict}], 0",
    "jne 90f",
    "jmp rcx",
    // Strict: the call is made here, since only our text may. The way back waits in the area, in a
    // ring that nested handlers use like a stack; one that a longjmp left for good is passed over.
    "90: mov r11, fs:[0]",
    "cmp r11, gs:[0]",
    "jne 92f",
    "91: inc byte ptr gs:[{a_raw}]",
    "movzx r11d, byte ptr gs:[{a_raw}]",
    "mov gs:[{a_raw_return} + r11 * 8], rcx",
    "syscall",
    "movzx ecx, byte ptr gs:[{a_raw}]",
    "mov rcx, gs:[{a_raw_return} + rcx * 8]",
    "dec byte ptr gs:[{a_raw}]",
    "add rcx, 2",
    "jmp rcx",
    "92: new_area",
    "jmp 91b",
    // A thread: the parent's way back is in the ring, the child's below its own stack.
    "95: mov rax, [r11]",
    "mov rsp, [r11 + 64]",
    "add qword ptr gs:[{a_cur}], {frame}",
    "cmp qword ptr gs:[{a_pending}], 0",
    "je 96f",
    "app_save",
    "call {flush}",
    "app_restore",
    "96: inc byte ptr gs:[{a_raw}]",
    "movzx r11d, byte ptr gs:[{a_raw}]",
    "mov gs:[{a_raw_return} + r11 * 8], rcx",
    "syscall",
    "test rax, rax",
    "je 97f",
    "movzx ecx, byte ptr gs:[{a_raw}]",
    "mov rcx, gs:[{a_raw_return} + rcx * 8]",
    "dec byte ptr gs:[{a_raw}]",
    "add rcx, 2",
    "jmp rcx",
    "97: mov rcx, [rsp - 8]",
    "new_area",
    "add rcx, 2",
    "jmp rcx",
    // Once more, without what was put off.
    "98: mov rax, [r11]",
    "mov rsp, [r11 + 64]",
    "add qword ptr gs:[{a_cur}], {frame}",
    "app_save",
    "call {flush}",
    "app_restore",
    "lea r11, [rip + corbel_whole_back]",
    "cmp rcx, r11",
    "je corbel_whole_enter",
    "jmp corbel_entry",
    // vfork: the child runs on this stack and may write over anything on it, so the way back is
    // kept in the area (pushed by dispatch).
    "4: mov rax, [r11]",
    "mov rsp, [r11 + 64]",
    "add qword ptr gs:[{a_cur}], {frame}",
    "syscall",
    "mov r11, gs:[{a_vforks}]",
    "mov rcx, gs:[{a_vfork_return} - 8 + r11 * 8]",
    "test rax, rax",
    "jne 41f",
    // The child: signals were blocked until here (process.rs). The area lies at `top`.
    "lea rsp, [rsp - 128]",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r10",
    "push rcx",
    "mov rsi, gs:[{a_top}]",
    "lea rsi, [rsi + r11 * 8 + {a_vfork_mask} - 8]",
    "mov edi, 2",
    "xor edx, edx",
    "mov r10d, 8",
    "mov eax, 14",
    "syscall",
    "pop rcx",
    "pop r10",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "lea rsp, [rsp + 128]",
    "xor eax, eax",
    "add rcx, 2",
    "jmp rcx",
    // The parent: enter again with the result as an argument. rdi is put back afterwards.
    "41: lea rsp, [rsp - 128]",
    "push rdi",
    "mov rdi, rax",
    "mov eax, {after_vfork}",
    "push rcx",
    "lea rcx, [rip + 42f - 2]",
    "jmp corbel_entry",
    "42: pop rcx",
    "pop rdi",
    "lea rsp, [rsp + 128]",
    "add rcx, 2",
    "jmp rcx",
    // Raw with replacements: the application's registers wait below its red zone.
    "5: mov rax, [r11 + 88]",
    "mov rsp, [r11 + 64]",
    "lea rsp, [rsp - 128]",
    "push rdi",
    "push rdx",
    "push rcx",
    "mov rdi, [r11 + 72]",
    "mov rdx, [r11 + 80]",
    "add qword ptr gs:[{a_cur}], {frame}",
    "cmp qword ptr gs:[{a_pending}], 0",
    "je 51f",
    "app_save",
    "call {flush}",
    "app_restore",
    "51: syscall",
    "pop rcx",
    "pop rdx",
    "pop rdi",
    "lea rsp, [rsp + 128]",
    "add rcx, 2",
    "jmp rcx",
    // A signal was put off: raise it now that the engine is left.
    "6: app_save",
    "call {flush}",
    "app_restore",
    "add rcx, 2",
    "jmp rcx",
    "8: app_save",
    "call {flush}",
    "app_restore",
    "jmp 9b",
    "7: new_area",
    "jmp 1b",
    // As corbel_entry, with the flags and the way back below the red zone, and a continuation of its own. What makes
    // processes has its own ways back, and what the engine does not look at goes on as it came.
    ".p2align 6",
    "hidden_entry corbel_entry_whole",
    "lea rsp, [rsp - 128]",
    "pushfq",
    "push rcx",
    "cmp rax, {calls}",
    "jae 9f",
    ".irp n,56,57,58,435",
    "cmp eax, \\n",
    "je 8f",
    ".endr",
    "who_serves",
    "2: lea rcx, [rip + corbel_whole_back]",
    "corbel_whole_enter: enter_frame",
    // The program's string operations may go backwards; Rust's do not.
    "cld",
    // XSAVE in its standard form, whose header must be zero.
    "lea rsp, [rsp - 4096]",
    "xor edx, edx",
    ".irp n,0,8,16,24,32,40,48,56",
    "mov [rsp + 512 + \\n], rdx",
    ".endr",
    "mov eax, [rip + {kept}]",
    "test eax, eax",
    "je 3f",
    "xsave [rsp]",
    "3: mov rdi, r11",
    "call {dispatch}",
    "mov [rsp + 4088], eax",
    "mov eax, [rip + {kept}]",
    "xor edx, edx",
    "test eax, eax",
    "je 4f",
    "xrstor [rsp]",
    "4: mov eax, [rsp + 4088]",
    "lea rsp, [rsp + 4096]",
    "jmp corbel_dispatched",
    "7: new_area",
    "jmp 1b",
    "8: pop rcx",
    "popfq",
    "lea rsp, [rsp + 128]",
    "jmp corbel_entry",
    "9: cmp byte ptr [rip + {strict}], 0",
    "jne 91f",
    "pop rcx",
    "popfq",
    "lea rsp, [rsp + 128]",
    "jmp rcx",
    // Strict: made in this text. After munmap and exit, and for rt_sigreturn, nothing may lie on the stack.
    "91:",
    ".irp n,11,15,60",
    "cmp eax, \\n",
    "je 8b",
    ".endr",
    "lea rcx, [rip + corbel_whole_back]",
    "jmp corbel_entry",
    "corbel_whole_back: syscall",
    "pop rcx",
    "popfq",
    "lea rsp, [rsp + 128]",
    "lea rcx, [rcx + 2]",
    "jmp rcx",
    // rdi: the call. Between the two marks it has not been made yet: a signal that is put off there goes to the third.
    ".p2align 4",
    "hidden_entry corbel_window",
    "mov rax, [rdi]",
    "mov rsi, [rdi + 16]",
    "mov rdx, [rdi + 24]",
    "mov r10, [rdi + 32]",
    "mov r8, [rdi + 40]",
    "mov r9, [rdi + 48]",
    "mov rdi, [rdi + 8]",
    "corbel_window_begin: cmp qword ptr gs:[{a_pending}], 0",
    "jne corbel_window_shut",
    "syscall",
    "corbel_window_end: ret",
    "corbel_window_shut: mov rax, {put_off}",
    "ret",
    // rdi: signal, rsi: siginfo, rdx: ucontext (rip at 168).
    ".p2align 4",
    "hidden_entry corbel_sigwrap",
    "mov rax, [rdx + 168]",
    "lea rcx, [rip + corbel_user_begin]",
    "cmp rax, rcx",
    "jb 1f",
    "lea rcx, [rip + corbel_user_end]",
    "cmp rax, rcx",
    "jae 1f",
    "cmp edi, 11",
    "je 4f",
    "cmp edi, 7",
    "jne 1f",
    "4: lea rcx, [rip + corbel_user_fault]",
    "mov [rdx + 168], rcx",
    "ret",
    "1: mov rax, fs:[0]",
    "cmp rax, gs:[0]",
    "jne 2f",
    "mov rax, gs:[{a_top}]",
    "cmp rax, gs:[{a_cur}]",
    "je 2f",
    "mov rax, [rdx + 168]",
    "lea rcx, [rip + corbel_window_begin]",
    "cmp rax, rcx",
    "jb {defer}",
    "lea rcx, [rip + corbel_window_end]",
    "cmp rax, rcx",
    "jae {defer}",
    "lea rcx, [rip + corbel_window_shut]",
    "mov [rdx + 168], rcx",
    "jmp {defer}",
    "2: lea rcx, [rip + {handlers}]",
    "mov eax, edi",
    "mov rax, [rcx + rax * 8]",
    "jmp rax",
    // The bytes that debuggers and unwinders know as a signal frame.
    ".p2align 4",
    "hidden_entry corbel_restorer",
    "mov rax, 15",
    "syscall",
    calls = const CALLS,
    fds = const FDS,
    frame = const FRAME,
    after_vfork = const AFTER_VFORK,
    strict = sym STRICT,
    aside = const ASIDE,
    a_raw = const offset_of!(Area, raw),
    a_raw_return = const offset_of!(Area, raw_return),
    a_cur = const offset_of!(Area, cur),
    a_top = const offset_of!(Area, top),
    a_fds = const offset_of!(Area, fds),
    a_pending = const offset_of!(Area, pending),
    a_vforks = const offset_of!(Area, vforks),
    a_vfork_return = const offset_of!(Area, vfork_return),
    a_vfork_mask = const offset_of!(Area, vfork_mask),
    put_off = const PUT_OFF,
    kept = sym KEPT,
    class = sym crate::calls::CLASS,
    dispatch = sym crate::calls::dispatch,
    flush = sym crate::signal::flush,
    defer = sym crate::signal::defer,
    thread_new = sym crate::thread::corbel_thread_new,
    handlers = sym crate::signal::HANDLERS,
);
