//! quoin-bench
