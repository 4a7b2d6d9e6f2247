//! Corbel: storage.
