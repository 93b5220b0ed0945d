//! quoin-store
