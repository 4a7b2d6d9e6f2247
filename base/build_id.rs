//! For build scripts, which have this file as a module: of which sources a library is built, in one number. It is the same for
//! one state of these files, wherever and whenever they are built, and says nothing of others.

use std::path::{Path, PathBuf};

/// What the library is made of that `corbel run` loads into programs.
pub const INTERCEPT: &[&str] = &["base", "storage", "client", "intercept"];
/// What the C library is made of.
pub const CAPI: &[&str] = &["base", "storage", "client", "capi"];

/// The number, of these crates of the workspace and of the versions of others; 16 digits. Cargo is told what it depends on.
pub fn of(crates: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = vec![PathBuf::from("Cargo.lock")];
    for name in crates {
        files.push(Path::new(name).join("Cargo.toml"));
        let sources = Path::new(name).join("src");
        println!("cargo:rerun-if-changed={}", root.join(&sources).display());
        collect(&root, &sources, &mut files);
    }
    files.sort();
    let mut sum = 0xcbf2_9ce4_8422_2325;
    for file in &files {
        println!("cargo:rerun-if-changed={}", root.join(file).display());
        let bytes =
            std::fs::read(root.join(file)).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        add(&mut sum, file.as_os_str().as_encoded_bytes());
        add(&mut sum, &(bytes.len() as u64).to_le_bytes());
        add(&mut sum, &bytes);
    }
    println!("cargo:rerun-if-changed={}", root.join("base/build_id.rs").display());
    println!("cargo:rerun-if-changed=build.rs");
    format!("{sum:016x}")
}

/// Sources below a folder.
fn collect(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) {
    let listed = std::fs::read_dir(root.join(folder));
    for entry in listed.unwrap_or_else(|e| panic!("{}: {e}", folder.display())).flatten() {
        let path = folder.join(entry.file_name());
        if entry.path().is_dir() {
            collect(root, &path, files);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            files.push(path);
        }
    }
}

/// FNV-1a: against mistakes, not against anybody.
fn add(sum: &mut u64, bytes: &[u8]) {
    for byte in bytes {
        *sum = (*sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
}
