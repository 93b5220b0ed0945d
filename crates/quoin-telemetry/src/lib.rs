//! Telemetry of a role: `/metrics` and `/healthz` over HTTP, its problems, and its notices.
//!
//! * [`http`] serves both pages.
//! * [`health`] keeps the problems that `/healthz` names.
//! * [`notices`] carries events for operators from a role's shards to its reports.
//!
//! This crate has no dependency on storage or the control plane.

pub mod health;
mod http;
pub mod notices;
pub mod volume_labels;

pub use http::{Error, Source, listen, serve};
