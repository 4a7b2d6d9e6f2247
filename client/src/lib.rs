//! Corbel: client.
