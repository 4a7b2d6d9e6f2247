//! The target `s3` of the crate `hostile` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hostile::run("s3", data));
