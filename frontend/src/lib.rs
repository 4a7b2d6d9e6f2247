//! Corbel: frontend.
