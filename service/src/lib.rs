//! Corbel: service.
