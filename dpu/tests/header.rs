//! A C program with the header and the static library, as somebody else's.

use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn a_c_program_serves_a_directory() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The library lies beside the tests' own folder.
    let built: PathBuf = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().into();
    let library = [built.join("libcorbel_dpu.so"), built.join("deps/libcorbel_dpu.so")];
    let library = library.into_iter().find(|file| file.exists()).expect("the library was built");
    let place = std::env::temp_dir().join(format!("corbel-dpu-{}", std::process::id()));
    std::fs::create_dir_all(place.join("shared")).unwrap();
    let program = place.join("program");
    let compiled = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(here.join("tests/header.c"))
        .arg("-I")
        .arg(here.join("include"))
        .arg(&library)
        .args(["-lpthread", &format!("-Wl,-rpath,{}", library.parent().unwrap().display())])
        .status()
        .unwrap();
    assert!(compiled.success());
    let ran =
        Command::new("timeout").arg("60").arg(&program).arg(place.join("shared")).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    let _ = std::fs::remove_dir_all(&place);
    assert_eq!(said, "fine\n", "{ran:?}");
}
