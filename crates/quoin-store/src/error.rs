//! Why a pool cannot be made or opened.

use quoin_replication::replica::store::{IoFault, StoreError};

use crate::format::superblock::FORMAT_VERSION;

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
        "the pool is of format {version}, perhaps with features that a newer Quoin gave it, and this \
         Quoin reads format {FORMAT_VERSION} as it knows it; start the newer one: nothing was \
         changed here"
    )]
    Newer { version: u32 },
    #[error(
        "the pool is of format {version}, from before the first release, and this Quoin reads format \
         {FORMAT_VERSION} alone; nothing was changed here. Take what its replicas hold out with the \
         quoin that wrote it (`quoin pool export`), then wipe the pool and make a new one"
    )]
    Older { version: u32 },
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
