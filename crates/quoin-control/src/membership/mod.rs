//! Members of the cluster: join tokens, certificates, keys, removals, and the controller's term.

pub(crate) mod admission;
pub(crate) mod members;
pub(crate) mod removal;
pub(crate) mod term;
