//! Says what the libraries were built of, had they been built beside this program.

#[path = "../base/build_id.rs"]
mod build_id;

fn main() {
    println!("cargo:rustc-env=CORBEL_INTERCEPT_OF={}", build_id::of(build_id::INTERCEPT));
    println!("cargo:rustc-env=CORBEL_CAPI_OF={}", build_id::of(build_id::CAPI));
}
