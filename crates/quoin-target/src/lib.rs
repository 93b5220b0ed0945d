//! quoin-target
