//! Generated gRPC messages and services, one module a package.

#![allow(clippy::all, clippy::pedantic)]

/// The control plane's own services.
pub mod control {
    tonic::include_proto!("quoin.control.v1");
}
