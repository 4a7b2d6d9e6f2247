//! Corbel: corbel.
fn main() {}
