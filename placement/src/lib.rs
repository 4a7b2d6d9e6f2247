//! Corbel: placement.
