//! The target `osd_map` of the crate `hostile` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hostile::run("osd_map", data));
