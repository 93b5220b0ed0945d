//! What users ask of volumes: creation and deletion, attachments, replicas and their places, and the
//! compare-and-swaps of targets.

pub(crate) mod attach;
pub(crate) mod declare;
pub(crate) mod devices;
pub(crate) mod epochs;
pub(crate) mod fencing;
pub mod placement;
pub mod policy;
pub(crate) mod scale;
pub mod spec;
pub(crate) mod verification;
pub(crate) mod volumes;
