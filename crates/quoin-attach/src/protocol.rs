//! The control socket's language: one JSON object a line, each request answered by one line.
//!
//! ```text
//! {"attach":{"volume":"db","nbd_socket":"/run/quoin/nbd/1.sock","size":1073741824,"block_size":4096,"read_only":false}}
//! {"ok":{"volume":"db","device":"/dev/loop0",…}}
//! {"detach":{"volume":"db"}}
//! {"error":{"kind":"busy","message":"volume db is in use as /dev/loop0: …"}}
//! ```

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Longest line that is read.
pub const LINE_BYTES_MAX: u64 = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    Attach(AttachVolume),
    Detach {
        volume: String,
    },
    /// Grows the device to `size` bytes after the target has grown.
    Resize {
        volume: String,
        size: u64,
    },
    List {},
    /// Links an attached volume's device under its name.
    Link {
        volume: String,
        name: String,
    },
    /// Ends the device whatever uses it: its IO fails.
    End {
        volume: String,
    },
    /// The volume was written by another node: what is attached here of an earlier use is dead.
    ServedElsewhere(ServedElsewhere),
    /// What is attached, and whether it is used.
    Usage {},
}

/// That another node has a volume, and since when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedElsewhere {
    pub volume: String,
    /// As people call it.
    pub name: String,
    pub node: String,
    /// The first epoch of that node's use. A device of a later use is left alone.
    pub since_epoch: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachVolume {
    pub volume: String,
    pub nbd_socket: PathBuf,
    /// Bytes, a multiple of the block size.
    pub size: u64,
    /// 512 or 4096.
    pub block_size: u32,
    #[serde(default)]
    pub read_only: bool,
    /// Only the FUSE file, no loop device on it: `device` in the answer is the file.
    #[serde(default)]
    pub file_only: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// Of attach and resize.
    Ok(Attached),
    /// Of list.
    List(Vec<Attached>),
    /// Of detach, whether or not it was attached.
    Detached {},
    /// Of end: what was done, in words; empty where nothing was attached. Of word that the volume is
    /// served elsewhere: empty.
    Ended {
        did: Vec<String>,
    },
    Usage(Vec<Usage>),
    Error {
        kind: Kind,
        message: String,
    },
}

/// One attached volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    pub volume: String,
    /// `/dev/loopN`, or the file.
    pub device: PathBuf,
    pub nbd_socket: PathBuf,
    pub size: u64,
    pub block_size: u32,
    pub read_only: bool,
    #[serde(default)]
    pub file_only: bool,
    /// Whether the target answers; IO waits otherwise.
    pub connected: bool,
    /// Requests of the kernel that wait for the target.
    pub in_flight: u64,
    /// The link to the device under the volume's name, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<PathBuf>,
    /// Why all IO fails for good; empty: it does not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub dead: String,
}

/// An attached volume, as far as others must know of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub volume: String,
    pub device: PathBuf,
    /// A mount, a device mapper or a swap holds it, or IO was done within the last moments.
    pub in_use: bool,
    /// The first epoch of the node's use that it was made for; 0: the target did not say.
    #[serde(default)]
    pub since_epoch: u64,
    /// As in [`Attached::dead`].
    #[serde(default)]
    pub dead: String,
}

/// What a caller does about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The request can never succeed.
    Invalid,
    /// Attached already with other parameters.
    Conflict,
    /// Somebody uses the device.
    Busy,
    /// The target is not there, or not as asked: try again.
    Unavailable,
    /// This host cannot do it: FUSE, loop devices or privileges are missing.
    Host,
}
