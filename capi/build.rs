//! Says what the library is built of.

#[path = "../base/build_id.rs"]
#[allow(dead_code)]
mod build_id;

fn main() {
    println!("cargo:rustc-env=CORBEL_BUILT_OF={}", build_id::of(build_id::CAPI));
}
