//! quoin-wire
