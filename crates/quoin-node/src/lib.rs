//! quoin-node
