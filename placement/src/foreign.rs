//! The established libraries, opened at run time for comparison only: ISA-L, Jerasure, liblz4.
//! Nothing is linked; where a library is absent, `load` says so and the caller goes without.
//!
//! # Safety
//! Each binding declares the function as the library's header does, and each wrapper checks the
//! lengths that the C function takes on trust. The library itself is trusted.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use crate::coding::Kind;

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn free(pointer: *mut c_void);
}

/// Resolve every symbol at once, so that a broken library fails here.
const RTLD_NOW: c_int = 2;

/// A library that is not there, or not the one expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing(
    /// File or symbol.
    pub &'static CStr,
);

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} is not there: install the library to compare with it",
            self.0.to_string_lossy()
        )
    }
}

impl std::error::Error for Missing {}

/// An open library; never closed, since its functions are handed around.
#[derive(Clone, Copy)]
struct Library(*mut c_void);

impl Library {
    fn open(file: &'static CStr) -> Result<Self, Missing> {
        // SAFETY: the name is a C string.
        let handle = unsafe { dlopen(file.as_ptr(), RTLD_NOW) };
        if handle.is_null() { Err(Missing(file)) } else { Ok(Self(handle)) }
    }

    /// # Safety
    /// `F` is the function pointer type of the symbol's declaration.
    unsafe fn symbol<F: Copy>(self, name: &'static CStr) -> Result<F, Missing> {
        assert!(size_of::<F>() == size_of::<*mut c_void>());
        // SAFETY: the handle is open, the name is a C string.
        let symbol = unsafe { dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return Err(Missing(name));
        }
        // SAFETY: the caller vouches for the type; the sizes are equal.
        Ok(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

/// Intel's storage library.
#[derive(Clone, Copy, Debug)]
pub struct Isal {
    rs_matrix: unsafe extern "C" fn(*mut u8, c_int, c_int),
    cauchy_matrix: unsafe extern "C" fn(*mut u8, c_int, c_int),
    invert_matrix: unsafe extern "C" fn(*mut u8, *mut u8, c_int) -> c_int,
    init_tables: unsafe extern "C" fn(c_int, c_int, *const u8, *mut u8),
    encode_data:
        unsafe extern "C" fn(c_int, c_int, c_int, *const u8, *const *const u8, *const *mut u8),
}

/// ISA-L's prepared tables: 32 bytes a coefficient.
#[derive(Clone, Debug)]
pub struct IsalTables {
    columns: usize,
    rows: usize,
    bytes: Vec<u8>,
}

impl Isal {
    /// Opens `libisal.so.2`.
    pub fn load() -> Result<Self, Missing> {
        let library = Library::open(c"libisal.so.2")?;
        // SAFETY: the types are those of isa-l/erasure_code.h, version 2.
        unsafe {
            Ok(Self {
                rs_matrix: library.symbol(c"gf_gen_rs_matrix")?,
                cauchy_matrix: library.symbol(c"gf_gen_cauchy1_matrix")?,
                invert_matrix: library.symbol(c"gf_invert_matrix")?,
                init_tables: library.symbol(c"ec_init_tables")?,
                encode_data: library.symbol(c"ec_encode_data")?,
            })
        }
    }

    /// The whole (k + m) x k generator matrix, or none for a kind that ISA-L does not have.
    pub fn matrix(&self, kind: Kind, k: usize, m: usize) -> Option<Vec<u8>> {
        assert!(k >= 1 && k + m <= 255);
        let make = match kind {
            Kind::IsalVandermonde => self.rs_matrix,
            Kind::Cauchy => self.cauchy_matrix,
            Kind::JerasureVandermonde => return None,
        };
        let mut matrix = vec![0u8; (k + m) * k];
        // SAFETY: the matrix has (k + m) * k bytes.
        unsafe { make(matrix.as_mut_ptr(), (k + m) as c_int, k as c_int) };
        Some(matrix)
    }

    /// Inverse of an n x n matrix, or none.
    pub fn invert(&self, matrix: &[u8], n: usize) -> Option<Vec<u8>> {
        assert!(matrix.len() == n * n && n <= 255);
        let mut work = matrix.to_vec();
        let mut out = vec![0u8; n * n];
        // SAFETY: both have n * n bytes.
        let rc = unsafe { (self.invert_matrix)(work.as_mut_ptr(), out.as_mut_ptr(), n as c_int) };
        (rc == 0).then_some(out)
    }

    /// Prepares a rows x columns matrix.
    pub fn tables(&self, columns: usize, rows: usize, matrix: &[u8]) -> IsalTables {
        assert!(matrix.len() == rows * columns && rows <= 255 && columns <= 255);
        let mut bytes = vec![0u8; 32 * matrix.len()];
        let (c, r) = (columns as c_int, rows as c_int);
        // SAFETY: 32 bytes for each coefficient.
        unsafe { (self.init_tables)(c, r, matrix.as_ptr(), bytes.as_mut_ptr()) };
        IsalTables { columns, rows, bytes }
    }

    /// outputs = matrix x inputs.
    pub fn encode(&self, tables: &IsalTables, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let len = check(inputs, outputs, tables.columns, tables.rows);
        let mut from = [ptr::null(); 255];
        let mut to = [ptr::null_mut(); 255];
        from.iter_mut().zip(inputs).for_each(|(p, i)| *p = i.as_ptr());
        to.iter_mut().zip(outputs).for_each(|(p, o)| *p = o.as_mut_ptr());
        // SAFETY: every buffer has len bytes, there are as many as the tables say.
        unsafe {
            (self.encode_data)(
                len,
                tables.columns as c_int,
                tables.rows as c_int,
                tables.bytes.as_ptr(),
                from.as_ptr(),
                to.as_ptr(),
            );
        }
        clear_upper_halves();
    }
}

/// ISA-L leaves the upper halves of the vector registers in use, which slows every SSE instruction
/// after it down, two- to threefold on Zen 5; a compiler would have cleared them.
fn clear_upper_halves() {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx")]
        fn clear() {
            std::arch::x86_64::_mm256_zeroupper();
        }
        if is_x86_feature_detected!("avx") {
            // SAFETY: the CPU has AVX.
            unsafe { clear() }
        }
    }
}

fn check(inputs: &[&[u8]], outputs: &[&mut [u8]], columns: usize, rows: usize) -> c_int {
    assert!(inputs.len() == columns && outputs.len() == rows && columns <= 255 && rows <= 255);
    let len = inputs[0].len();
    assert!(inputs.iter().all(|i| i.len() == len));
    assert!(outputs.iter().all(|o| o.len() == len));
    c_int::try_from(len).expect("chunks below 2 GiB")
}

/// Plank and Greenan's library, as Ceph's jerasure plugin uses it.
#[derive(Clone, Copy, Debug)]
pub struct Jerasure {
    matrix: unsafe extern "C" fn(c_int, c_int, c_int) -> *mut c_int,
    encode: unsafe extern "C" fn(
        c_int,
        c_int,
        c_int,
        *const c_int,
        *const *const u8,
        *const *mut u8,
        c_int,
    ),
}

/// Word size in bits, the only one that Corbel has.
const W: c_int = 8;

impl Jerasure {
    /// Opens `libJerasure.so.2`.
    pub fn load() -> Result<Self, Missing> {
        let library = Library::open(c"libJerasure.so.2")?;
        // SAFETY: the types are those of jerasure.h and reed_sol.h, version 2.
        unsafe {
            Ok(Self {
                matrix: library.symbol(c"reed_sol_vandermonde_coding_matrix")?,
                encode: library.symbol(c"jerasure_matrix_encode")?,
            })
        }
    }

    /// The m x k parity rows of `reed_sol_van`, w = 8.
    pub fn matrix(&self, k: usize, m: usize) -> Vec<c_int> {
        assert!(k >= 1 && m >= 1 && k + m <= 255);
        // SAFETY: the result is k * m ints from malloc, or null.
        unsafe {
            let matrix = (self.matrix)(k as c_int, m as c_int, W);
            assert!(!matrix.is_null(), "reed_sol_vandermonde_coding_matrix({k}, {m}, 8)");
            let copy = std::slice::from_raw_parts(matrix, k * m).to_vec();
            free(matrix.cast());
            copy
        }
    }

    /// Encodes; the chunks' length is a multiple of 8.
    pub fn encode(&self, matrix: &[c_int], data: &[&[u8]], parity: &mut [&mut [u8]]) {
        let (k, m) = (data.len(), parity.len());
        let len = check(data, parity, k, m);
        assert!(matrix.len() == k * m && len % 8 == 0);
        let from: Vec<*const u8> = data.iter().map(|d| d.as_ptr()).collect();
        let to: Vec<*mut u8> = parity.iter_mut().map(|p| p.as_mut_ptr()).collect();
        let (from, to) = (from.as_ptr(), to.as_ptr());
        // SAFETY: every buffer has len bytes, the matrix m * k entries.
        unsafe { (self.encode)(k as c_int, m as c_int, W, matrix.as_ptr(), from, to, len) };
    }
}

/// The reference implementation of LZ4.
#[derive(Clone, Copy, Debug)]
pub struct Lz4 {
    compress: unsafe extern "C" fn(*const u8, *mut u8, c_int, c_int) -> c_int,
    decompress: unsafe extern "C" fn(*const u8, *mut u8, c_int, c_int) -> c_int,
}

impl Lz4 {
    /// Opens `liblz4.so.1`.
    pub fn load() -> Result<Self, Missing> {
        let library = Library::open(c"liblz4.so.1")?;
        // SAFETY: the types are those of lz4.h, version 1.
        unsafe {
            Ok(Self {
                compress: library.symbol(c"LZ4_compress_default")?,
                decompress: library.symbol(c"LZ4_decompress_safe")?,
            })
        }
    }

    /// Bytes written, or none when the output is too small.
    pub fn compress(&self, input: &[u8], output: &mut [u8]) -> Option<usize> {
        // SAFETY: the lengths are those of the buffers.
        Self::call(input, output, |i, o, n, m| unsafe { (self.compress)(i, o, n, m) })
            .filter(|&n| n > 0)
    }

    /// Bytes written, or none for a bad block.
    pub fn decompress(&self, input: &[u8], output: &mut [u8]) -> Option<usize> {
        // SAFETY: the lengths are those of the buffers.
        Self::call(input, output, |i, o, n, m| unsafe { (self.decompress)(i, o, n, m) })
    }

    fn call(
        input: &[u8],
        output: &mut [u8],
        f: impl FnOnce(*const u8, *mut u8, c_int, c_int) -> c_int,
    ) -> Option<usize> {
        let n = c_int::try_from(input.len()).ok()?;
        let m = c_int::try_from(output.len()).ok()?;
        usize::try_from(f(input.as_ptr(), output.as_mut_ptr(), n, m)).ok()
    }
}
