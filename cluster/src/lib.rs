//! Corbel: cluster.
