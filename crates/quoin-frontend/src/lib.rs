//! quoin-frontend
