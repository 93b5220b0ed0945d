//! quoin-csi
