//! State of the cluster: the records with their store, what is observed, events, and changes of all
//! of them.

pub mod changes;
pub mod events;
pub(crate) mod member_records;
pub(crate) mod observed;
#[cfg(test)]
pub(crate) mod recorded;
pub mod records;
pub mod store;
pub(crate) mod table;
pub(crate) mod term_records;
pub(crate) mod volume_index;
