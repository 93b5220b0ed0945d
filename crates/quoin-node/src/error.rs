//! Errors of work on a node: each names the thing, the rule and the way out.

use std::path::PathBuf;

/// Conclusion that a caller may draw from an [`Error`], whatever its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request itself is wrong.
    InvalidArgument,
    /// The thing exists already, with other arguments.
    AlreadyExists,
    /// A step that must come before has not been made, or one that must end has not ended.
    FailedPrecondition,
    /// Nothing of the volume is at that place.
    NotFound,
    /// The size asked for cannot be delivered.
    OutOfRange,
    /// The key is not the volume's.
    Unauthenticated,
    /// The call is not possible now; the same call may succeed later.
    Unavailable,
    /// The file system or the device cannot do it; no retry helps.
    Unsupported,
    /// The host failed.
    Internal,
}

/// A failed step of attaching, formatting, mounting, growing or measuring.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "volume {volume} is already staged at {}, and a node stages a volume once; \
         unstage it there first", path.display()
    )]
    StagedElsewhere { volume: String, path: PathBuf },
    #[error(
        "volume {volume} is staged at {} with another capability; unstage it first to change it",
        path.display()
    )]
    StagedDifferently { volume: String, path: PathBuf },
    #[error("volume {volume} is not staged at {} on this node; stage it first", path.display())]
    NotStaged { volume: String, path: PathBuf },
    #[error(
        "volume {volume} is still published at {}; unpublish it there before unstaging",
        target.display()
    )]
    StillPublished { volume: String, target: PathBuf },
    #[error(
        "volume {volume} is published at {} with other arguments; unpublish it first to change \
         them", target.display()
    )]
    PublishedDifferently { volume: String, target: PathBuf },
    #[error(
        "volume {volume} is published at {} on this node, and its access mode allows one target \
         path; use SINGLE_NODE_MULTI_WRITER for several", target.display()
    )]
    PublishedElsewhere { volume: String, target: PathBuf },
    #[error(
        "volume {volume} is staged for {staged} use, not for {wanted} use; unstage it and stage it \
         again"
    )]
    OtherCapability { volume: String, staged: String, wanted: String },
    #[error(
        "a raw block volume is writable or read-only for the whole node, and {volume} is \
         published here with the other access; unpublish that one first"
    )]
    MixedReadOnly { volume: String },
    #[error("volume {volume} is not present at {} on this node", path.display())]
    NotPresent { volume: String, path: PathBuf },
    #[error("{}: {why}", path.display())]
    Path { path: PathBuf, why: &'static str },
    #[error(
        "{} is a mount point of another source ({source_name}); unmount that first",
        path.display()
    )]
    ForeignMount { path: PathBuf, source_name: String },
    #[error(
        "volume {volume} holds {found} and {wanted} was requested; it is never formatted over: {way_out}"
    )]
    OtherContent { volume: String, found: String, wanted: String, way_out: String },
    #[error(
        "the ext4 of volume {volume} has its journal on another device, and is mounted on no host but \
         its own; give it a journal of its own there (`tune2fs -O ^has_journal`, `tune2fs -j`)"
    )]
    ExternalJournal { volume: String },
    #[error("volume {volume} is empty and may only be read here; stage it writable once")]
    EmptyReadOnly { volume: String },
    #[error(
        "volume {volume} has no file system, and healing makes none; stage it again for a new one"
    )]
    NoFileSystem { volume: String },
    #[error("{tool} is not installed on this node; install {package} (searched in {looked})")]
    MissingTool { tool: &'static str, package: &'static str, looked: String },
    #[error(
        "the file system of volume {volume} is made in a sparse file of the volume's size, \
         {size_bytes} bytes, and the file system under {} takes no file that large (ext4: 16 TiB); \
         put the node's --state directory on xfs, or make the file system on the device by hand",
        scratch.display()
    )]
    ImageTooLarge { volume: String, size_bytes: u64, scratch: PathBuf },
    #[error("{tool} failed on volume {volume}: {output}")]
    Tool { tool: &'static str, volume: String, output: String },
    #[error(
        "the file system of volume {volume} has damage that {tool} does not repair by itself: \
         run it by hand on {}: {output}", device.display()
    )]
    Damaged { volume: String, tool: &'static str, device: PathBuf, output: String },
    #[error(
        "mounting at {} needs root (CAP_SYS_ADMIN); run the node as root, or use the volume \
         over its NBD socket without mounting", path.display()
    )]
    NotPermitted { path: PathBuf },
    #[error(
        "the file system refused a mount flag of volume {volume} (flags are not shown, they may \
         be sensitive); check mountOptions"
    )]
    MountFlag { volume: String },
    #[error("{} is in use; stop what uses it and try again", path.display())]
    Busy { path: PathBuf },
    #[error("volume {volume}: {} has {has_bytes} bytes, fewer than the requested \
             {want_bytes}", device.display())]
    TooSmall { volume: String, device: PathBuf, has_bytes: u64, want_bytes: u64 },
    #[error(
        "growing the mounted ext4 of volume {volume} needs CAP_SYS_RESOURCE, which this node \
         lacks; give it to the process, or unstage the volume: it grows with the next staging"
    )]
    GrowNotPermitted { volume: String },
    #[error(
        "volume {volume} is staged read-only here, so its file system cannot be grown; stage it \
         writable"
    )]
    ReadOnlyGrow { volume: String },
    #[error(
        "the file system of volume {volume} at {} cannot be trimmed: its device takes no discards",
        path.display()
    )]
    NotTrimmed { volume: String, path: PathBuf },
    #[error(
        "volume {volume} is mounted read-only here, so its file system cannot be trimmed; call this \
         where it is written"
    )]
    ReadOnlyTrim { volume: String },
    #[error("volume {volume} has {has_bytes} bytes, more than the limit of {limit_bytes}")]
    AboveLimit { volume: String, has_bytes: u64, limit_bytes: u64 },
    #[error("the key is not that of volume {volume}")]
    WrongKey { volume: String },
    #[error("waited {waited_ms} ms for {what}; {way_out}")]
    Waiting { what: String, waited_ms: u64, way_out: &'static str },
    #[error(
        "the staged mount of volume {volume} at {} is of an earlier use ({why}): unpublish and \
         unstage it, then stage it anew",
        path.display()
    )]
    DeadStaging { volume: String, path: PathBuf, why: String },
    #[error("{0}")]
    Attach(String),
    #[error("{0}")]
    AttachImpossible(String),
    #[error("{operation} {}: {source}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the record {} cannot be read: {why}; move it away and unstage the volume", path.display())]
    Record { path: PathBuf, why: String },
    /// A simulated kill at this very step; only tests ask for it.
    #[error("stopped before {0}")]
    Stopped(&'static str),
}

impl Error {
    /// Returns what a caller may conclude.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::StagedDifferently { .. } | Self::PublishedDifferently { .. } => {
                Kind::AlreadyExists
            }
            Self::StagedElsewhere { .. }
            | Self::NotStaged { .. }
            | Self::StillPublished { .. }
            | Self::PublishedElsewhere { .. }
            | Self::OtherCapability { .. }
            | Self::MixedReadOnly { .. }
            | Self::ForeignMount { .. }
            | Self::OtherContent { .. }
            | Self::ExternalJournal { .. }
            | Self::EmptyReadOnly { .. }
            | Self::NoFileSystem { .. }
            | Self::ReadOnlyGrow { .. }
            | Self::GrowNotPermitted { .. }
            | Self::MissingTool { .. }
            | Self::ImageTooLarge { .. }
            | Self::NotPermitted { .. }
            | Self::AttachImpossible(_)
            | Self::Damaged { .. } => Kind::FailedPrecondition,
            Self::ReadOnlyTrim { .. } => Kind::FailedPrecondition,
            Self::NotTrimmed { .. } => Kind::Unsupported,
            Self::NotPresent { .. } => Kind::NotFound,
            Self::Path { .. } | Self::MountFlag { .. } => Kind::InvalidArgument,
            Self::TooSmall { .. } | Self::AboveLimit { .. } => Kind::OutOfRange,
            Self::Busy { .. } | Self::Waiting { .. } | Self::Attach(_) => Kind::Unavailable,
            Self::WrongKey { .. } => Kind::Unauthenticated,
            Self::DeadStaging { .. } => Kind::FailedPrecondition,
            Self::Tool { .. } | Self::Io { .. } | Self::Record { .. } | Self::Stopped(_) => {
                Kind::Internal
            }
        }
    }

    /// Returns whether the host or the volume failed, and not the request.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        match self {
            Self::StagedElsewhere { .. }
            | Self::StagedDifferently { .. }
            | Self::NotStaged { .. }
            | Self::StillPublished { .. }
            | Self::PublishedDifferently { .. }
            | Self::PublishedElsewhere { .. }
            | Self::OtherCapability { .. }
            | Self::MixedReadOnly { .. }
            | Self::NotPresent { .. }
            | Self::Path { .. }
            | Self::TooSmall { .. }
            | Self::GrowNotPermitted { .. }
            | Self::ReadOnlyGrow { .. }
            | Self::ReadOnlyTrim { .. }
            | Self::NotTrimmed { .. }
            | Self::WrongKey { .. }
            | Self::AboveLimit { .. } => false,
            Self::ForeignMount { .. }
            | Self::OtherContent { .. }
            | Self::ExternalJournal { .. }
            | Self::EmptyReadOnly { .. }
            | Self::NoFileSystem { .. }
            | Self::MissingTool { .. }
            | Self::ImageTooLarge { .. }
            | Self::Tool { .. }
            | Self::Damaged { .. }
            | Self::NotPermitted { .. }
            | Self::MountFlag { .. }
            | Self::Busy { .. }
            | Self::Waiting { .. }
            | Self::DeadStaging { .. }
            | Self::Attach(_)
            | Self::AttachImpossible(_)
            | Self::Io { .. }
            | Self::Record { .. }
            | Self::Stopped(_) => true,
        }
    }

    /// Wraps an I/O error with the attempted action and its path.
    pub(crate) fn io(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { operation, path, source }
    }
}
