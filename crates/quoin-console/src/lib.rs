//! quoin-console
