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

#[cfg(test)]
mod tests {
    use super::*;

    fn volume() -> String {
        "v".to_owned()
    }

    fn path() -> PathBuf {
        "/x".into()
    }

    /// The table: each error, what its caller may conclude, and whether the host or the volume failed.
    fn all() -> Vec<(Error, Kind, bool)> {
        use Kind::{
            AlreadyExists, FailedPrecondition, Internal, InvalidArgument, NotFound, OutOfRange,
            Unauthenticated, Unavailable, Unsupported,
        };
        let text = || "text".to_owned();
        let (volume, path, target) = (volume, path, path);
        vec![
            (Error::StagedElsewhere { volume: volume(), path: path() }, FailedPrecondition, false),
            (Error::StagedDifferently { volume: volume(), path: path() }, AlreadyExists, false),
            (Error::NotStaged { volume: volume(), path: path() }, FailedPrecondition, false),
            (
                Error::StillPublished { volume: volume(), target: target() },
                FailedPrecondition,
                false,
            ),
            (
                Error::PublishedDifferently { volume: volume(), target: target() },
                AlreadyExists,
                false,
            ),
            (
                Error::PublishedElsewhere { volume: volume(), target: target() },
                FailedPrecondition,
                false,
            ),
            (
                Error::OtherCapability { volume: volume(), staged: text(), wanted: text() },
                FailedPrecondition,
                false,
            ),
            (Error::MixedReadOnly { volume: volume() }, FailedPrecondition, false),
            (Error::NotPresent { volume: volume(), path: path() }, NotFound, false),
            (Error::Path { path: path(), why: "is none" }, InvalidArgument, false),
            (Error::ForeignMount { path: path(), source_name: text() }, FailedPrecondition, true),
            (
                Error::OtherContent {
                    volume: volume(),
                    found: text(),
                    wanted: text(),
                    way_out: text(),
                },
                FailedPrecondition,
                true,
            ),
            (Error::ExternalJournal { volume: volume() }, FailedPrecondition, true),
            (Error::EmptyReadOnly { volume: volume() }, FailedPrecondition, true),
            (Error::NoFileSystem { volume: volume() }, FailedPrecondition, true),
            (
                Error::MissingTool { tool: "mkfs", package: "e2fsprogs", looked: text() },
                FailedPrecondition,
                true,
            ),
            (
                Error::ImageTooLarge { volume: volume(), size_bytes: 1, scratch: path() },
                FailedPrecondition,
                true,
            ),
            (Error::Tool { tool: "mkfs", volume: volume(), output: text() }, Internal, true),
            (
                Error::Damaged { volume: volume(), tool: "e2fsck", device: path(), output: text() },
                FailedPrecondition,
                true,
            ),
            (Error::NotPermitted { path: path() }, FailedPrecondition, true),
            (Error::MountFlag { volume: volume() }, InvalidArgument, true),
            (Error::Busy { path: path() }, Unavailable, true),
            (
                Error::TooSmall { volume: volume(), device: path(), has_bytes: 1, want_bytes: 2 },
                OutOfRange,
                false,
            ),
            (Error::GrowNotPermitted { volume: volume() }, FailedPrecondition, false),
            (Error::ReadOnlyGrow { volume: volume() }, FailedPrecondition, false),
            (Error::NotTrimmed { volume: volume(), path: path() }, Unsupported, false),
            (Error::ReadOnlyTrim { volume: volume() }, FailedPrecondition, false),
            (
                Error::AboveLimit { volume: volume(), has_bytes: 2, limit_bytes: 1 },
                OutOfRange,
                false,
            ),
            (Error::WrongKey { volume: volume() }, Unauthenticated, false),
            (Error::Waiting { what: text(), waited_ms: 1, way_out: "wait" }, Unavailable, true),
            (
                Error::DeadStaging { volume: volume(), path: path(), why: text() },
                FailedPrecondition,
                true,
            ),
            (Error::Attach(text()), Unavailable, true),
            (Error::AttachImpossible(text()), FailedPrecondition, true),
            (Error::io("reading", path())(std::io::ErrorKind::NotFound.into()), Internal, true),
            (Error::Record { path: path(), why: text() }, Internal, true),
            (Error::Stopped("mounting"), Internal, true),
        ]
    }

    /// One line for each error: a new one does not compile before it has a row.
    fn number(error: &Error) -> usize {
        match error {
            Error::StagedElsewhere { .. } => 0,
            Error::StagedDifferently { .. } => 1,
            Error::NotStaged { .. } => 2,
            Error::StillPublished { .. } => 3,
            Error::PublishedDifferently { .. } => 4,
            Error::PublishedElsewhere { .. } => 5,
            Error::OtherCapability { .. } => 6,
            Error::MixedReadOnly { .. } => 7,
            Error::NotPresent { .. } => 8,
            Error::Path { .. } => 9,
            Error::ForeignMount { .. } => 10,
            Error::OtherContent { .. } => 11,
            Error::ExternalJournal { .. } => 12,
            Error::EmptyReadOnly { .. } => 13,
            Error::NoFileSystem { .. } => 14,
            Error::MissingTool { .. } => 15,
            Error::ImageTooLarge { .. } => 16,
            Error::Tool { .. } => 17,
            Error::Damaged { .. } => 18,
            Error::NotPermitted { .. } => 19,
            Error::MountFlag { .. } => 20,
            Error::Busy { .. } => 21,
            Error::TooSmall { .. } => 22,
            Error::GrowNotPermitted { .. } => 23,
            Error::ReadOnlyGrow { .. } => 24,
            Error::NotTrimmed { .. } => 25,
            Error::ReadOnlyTrim { .. } => 26,
            Error::AboveLimit { .. } => 27,
            Error::WrongKey { .. } => 28,
            Error::Waiting { .. } => 29,
            Error::DeadStaging { .. } => 30,
            Error::Attach(_) => 31,
            Error::AttachImpossible(_) => 32,
            Error::Io { .. } => 33,
            Error::Record { .. } => 34,
            Error::Stopped(_) => 35,
        }
    }

    #[test]
    fn every_error_says_what_its_caller_may_conclude_and_who_failed() {
        for (row, (error, kind, is_fault)) in all().iter().enumerate() {
            assert_eq!(number(error), row, "{error}");
            assert_eq!((error.kind(), error.is_fault()), (*kind, *is_fault), "{error}");
        }
        assert_eq!(all().len(), 36);
    }
}
