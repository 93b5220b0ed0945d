//! quoin-control
