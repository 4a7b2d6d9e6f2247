//! What is always true is said by a function of the type that keeps it, and called: after each step of the simulator, and in debug
//! builds by the service itself.

/// Returns from a function that says what is always true, with the reason, if it is not.
#[macro_export]
macro_rules! always {
    ($holds:expr, $($why:tt)+) => {
        if !$holds {
            return Err($crate::format!($($why)+));
        }
    };
}
