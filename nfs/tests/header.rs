//! What we believe of libnfs 4.0.0 beside its header, by the C compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

use nfs::libnfs::{LAYOUT, VALUES};

/// The functions that are used, as they are declared here. Two more are in no header that is installed; that they do what they
/// should is seen when the library is loaded.
const FUNCTIONS: &str = "
struct rpc_context *(*a)(void) = rpc_init_context;
void (*b)(struct rpc_context *) = rpc_destroy_context;
int (*c)(struct rpc_context *, const char *, int, rpc_cb, void *) = rpc_connect_async;
int (*d)(struct rpc_context *) = rpc_get_fd;
int (*e)(struct rpc_context *) = rpc_which_events;
int (*f)(struct rpc_context *, int) = rpc_service;
char *(*g)(struct rpc_context *) = rpc_get_error;
void (*h)(struct rpc_context *, struct AUTH *) = rpc_set_auth;
void (*i)(struct rpc_context *, uint32_t) = rpc_set_next_xid;
struct AUTH *(*j)(const char *, uint32_t, uint32_t, uint32_t, uint32_t *) = libnfs_authunix_create;
bool_t (*k)(ZDR *, char *, uint32_t) = libnfs_zdr_opaque;
void (*l)(struct rpc_context *, int, void *, void *) = (rpc_cb)0;
uint32_t (*m)(ZDR *, void *, ...) = (zdrproc_t)0;
";

fn version() -> Option<String> {
    let dirs = std::fs::read_dir("/usr/lib").ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let dirs = dirs.chain([PathBuf::from("/usr/lib"), PathBuf::from("/usr/local/lib")]);
    let found =
        dirs.filter_map(|dir| std::fs::read_to_string(dir.join("pkgconfig/libnfs.pc")).ok());
    found
        .filter_map(|text| Some(text.split_once("Version:")?.1.lines().next()?.trim().to_string()))
        .next()
}

#[test]
fn the_library_is_as_its_header_says() {
    let header = Path::new("/usr/include/nfsc/libnfs-raw.h");
    if !header.is_file() || Command::new("cc").arg("--version").output().is_err() {
        println!(
            "skipped: no header of libnfs or no C compiler here (scripts/prepare.sh tools installs libnfs-dev)"
        );
        return;
    }
    if version().as_deref() != Some("4.0.0") {
        println!("skipped: the header here is of libnfs {:?}, not of 4.0.0", version());
        return;
    }
    let mut text = String::from(
        "#include <stddef.h>\n#include <sys/types.h>\n#include <nfsc/libnfs.h>\n#include <nfsc/libnfs-raw.h>\n",
    );
    text.push_str(FUNCTIONS);
    for (what, size) in LAYOUT {
        text += &format!("_Static_assert({what} == {size}, \"{}\");\n", what.replace('"', ""));
    }
    for (what, value) in VALUES {
        text += &format!("_Static_assert({what} == {value}, \"{what}\");\n");
    }
    let judge = |text: &str| {
        let file = std::env::temp_dir().join(format!("nfs-header-{}.c", std::process::id()));
        std::fs::write(&file, text).unwrap();
        let said = Command::new("cc")
            .args(["-fsyntax-only", "-Wall", "-Werror=incompatible-pointer-types"])
            .arg(&file)
            .output()
            .unwrap();
        std::fs::remove_file(&file).unwrap();
        (said.status.success(), String::from_utf8_lossy(&said.stderr).into_owned())
    };
    let (good, said) = judge(&text);
    assert!(good, "{said}");
    // The compiler would say so.
    let wrong = text.replace("offsetof(struct ZDR, pos) ==", "1 + offsetof(struct ZDR, pos) ==");
    assert!(wrong != text && !judge(&wrong).0);
    let wrong = text
        .replace("int (*f)(struct rpc_context *, int)", "int (*f)(struct rpc_context *, char *)");
    assert!(wrong != text && !judge(&wrong).0);
}

#[test]
fn the_library_that_is_here_can_be_used() {
    match nfs::libnfs::load() {
        Ok(()) => {}
        Err(why) => {
            assert!(why.contains("apt install libnfs13"), "{why}");
            println!("skipped: {why}");
        }
    }
}
