//! Links the library against nothing: it is loaded into strangers' processes, beside their libc. And says what it is built of.

#[path = "../base/build_id.rs"]
#[allow(dead_code)]
mod build_id;

fn main() {
    for arg in ["-nostdlib", "-nostartfiles", "-Wl,-z,now", "-Wl,-z,defs", "-Wl,--gc-sections"] {
        println!("cargo:rustc-cdylib-link-arg={arg}");
    }
    println!("cargo:rustc-env=CORBEL_BUILT_OF={}", build_id::of(build_id::INTERCEPT));
}
