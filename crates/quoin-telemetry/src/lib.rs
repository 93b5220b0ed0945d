//! What a role tells of itself: `/metrics` and `/healthz` over HTTP, what is wrong with it, and what
//! happened.
//!
//! * [`http`] serves both pages.
//! * [`health`] keeps the problems that `/healthz` names.
//! * [`notices`] carries what operators want to know from a role's shards to its reports.
//!
//! This crate knows neither storage nor the control plane.

pub mod health;
mod http;
pub mod notices;

pub use http::{Error, Source, listen, serve};
