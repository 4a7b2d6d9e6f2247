//! Corbel: capi.
