//! quoin-pool
