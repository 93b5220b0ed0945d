//! Why a pool cannot be made or opened.

use quoin_replication::replica::store::{IoFault, StoreError};

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error(
        "this is not a Quoin pool: name one. To make a pool here, if nothing on it is needed, wipe \
         it (`blkdiscard -z`, or remove the file) and start with --format"
    )]
    Foreign,
    #[error(
        "this holds a pool already; if nothing on it is needed, wipe it (`blkdiscard -z`, or \
         remove the file) and make a pool again"
    )]
    NotEmpty,
    #[error(
        "this is not a Quoin pool: it holds {0}; if nothing on it is needed, wipe it (`blkdiscard \
         -z`, or remove the file) and make a pool again"
    )]
    Holds(&'static str),
    #[error(
        "the pool is of format {version} with features that a newer Quoin gave it; start that one: \
         nothing was changed here"
    )]
    Newer { version: u32 },
    #[error(
        "the pool should have {expected_bytes} bytes but only {size_bytes} are there; restore the \
         whole file or device, or remove the pool and let its replicas be rebuilt"
    )]
    Truncated { size_bytes: u64, expected_bytes: u64 },
    #[error("a pool needs at least {needed_bytes} bytes, here are {size_bytes}")]
    TooSmall { size_bytes: u64, needed_bytes: u64 },
    #[error("{0}")]
    Unfit(&'static str),
    #[error(
        "the pool's metadata cannot be read from either of its two copies; remove the pool and \
         let its replicas be rebuilt"
    )]
    MetadataLost,
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<IoFault> for PoolError {
    fn from(fault: IoFault) -> Self {
        PoolError::Store(StoreError::Io(fault))
    }
}
