//! quoin-sim
