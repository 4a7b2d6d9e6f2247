//! Corbel: base.
