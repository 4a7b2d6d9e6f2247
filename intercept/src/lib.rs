//! Corbel: intercept.
