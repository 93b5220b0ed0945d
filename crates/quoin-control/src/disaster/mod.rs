//! Backups of the records, and recovery where records or replicas were lost.

pub mod backup;
pub mod kept_backups;
pub(crate) mod recovery;
pub mod salvage;
pub(crate) mod scheduled_backup;
