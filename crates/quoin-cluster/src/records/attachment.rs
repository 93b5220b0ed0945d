//! The attachment of a volume to a node, in the record of the volume.

use serde::{Deserialize, Serialize};

use crate::Refusal;
use crate::records::is_zero;

/// Attachment in a volume's record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AttachmentRecord {
    pub node: String,
    pub read_only: bool,
    /// Usage text of the publisher, unchanged.
    pub usage: String,
    /// True if the node is to make a block device of the volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub device: bool,
    #[serde(default, skip_serializing_if = "Sharing::is_exclusive")]
    pub sharing: Sharing,
    #[serde(default, skip_serializing_if = "Replay::is_none")]
    pub replay: Replay,
    /// Names the attachment, where others may be beside it: higher than those of all before it; else
    /// 0. Requests of the node are numbered, and it ends with the attachment.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub client: u64,
}

impl AttachmentRecord {
    /// Returns true if the volume is served to the node read-only at present.
    pub fn writes_nothing(&self) -> bool {
        self.read_only && self.replay != Replay::Due
    }
}

/// Way in which a node's attachment bears others beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// No other node has the volume.
    #[default]
    Exclusive,
    /// Other nodes have it, and none writes.
    ReadOnly,
    /// Other nodes have it, and at most one of all writes.
    SingleWriter,
    /// Other nodes have it, and all may write.
    MultiWriter,
}

impl Sharing {
    pub const ALL: [Self; 4] =
        [Self::Exclusive, Self::ReadOnly, Self::SingleWriter, Self::MultiWriter];

    pub fn is_exclusive(&self) -> bool {
        *self == Self::Exclusive
    }

    /// Word of the messages; empty: the volume is not shared.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "",
            Self::ReadOnly => "read-only",
            Self::SingleWriter => "single-writer",
            Self::MultiWriter => "multi-writer",
        }
    }

    /// Reads the word of a message.
    ///
    /// # Refusals
    /// It is none of the words.
    pub fn read(word: &str) -> Result<Self, Refusal> {
        let found = Self::ALL.into_iter().find(|sharing| sharing.as_str() == word);
        let rule = "it is read-only, single-writer or multi-writer, or empty";
        found.ok_or_else(|| Refusal::invalid("sharing", rule))
    }
}

/// Share of a read-only attachment in the replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replay {
    /// None: it was done, or is not asked for.
    #[default]
    None,
    /// Another node replays the journal; this one takes its place if it leaves.
    Awaited,
    /// The node may write until it has confirmed the replay, or its time is over.
    Due,
    /// The node did not confirm it in time, and writes no more.
    Late,
}

impl Replay {
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}
