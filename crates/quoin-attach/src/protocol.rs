//! Messages of the control socket: one JSON object on each line; each request is answered by one
//! line.
//!
//! ```text
//! {"attach":{"volume":"db","nbd_socket":"/run/quoin/nbd/1.sock","size":1073741824,"block_size":4096,"read_only":false}}
//! {"ok":{"volume":"db","device":"/dev/loop0",…}}
//! {"detach":{"volume":"db"}}
//! {"error":{"kind":"busy","message":"volume db is in use as /dev/loop0: …"}}
//! ```

use std::path::PathBuf;

use quoin_encryption::DataKey;
use quoin_encryption::written::bare_key_or_none;
use serde::{Deserialize, Serialize};

/// Limit of a line.
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
    /// Requests one volume of the list. Work on another one does not delay the answer.
    Find {
        volume: String,
    },
    /// Links an attached volume's device under its name.
    Link {
        volume: String,
        name: String,
    },
    /// Ends the device, even in use: its IO fails.
    End {
        volume: String,
    },
    /// Another node wrote to the volume: a device here of an earlier use is dead.
    ServedElsewhere(ServedElsewhere),
    /// The volume is not attached to this host any more.
    Detached(DetachedHere),
    /// Removes what was made for a volume and belongs to no attachment of it.
    Sweep {
        volume: String,
    },
    /// Requests the attached volumes, and whether they are used.
    Usage {},
}

/// Statement that the records have a volume attached to this host no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetachedHere {
    pub volume: String,
    /// The device that is meant, as [`Usage::asked`]: one that was asked for since is another use.
    pub asked: u64,
    /// Reason, for people.
    pub why: String,
}

/// Statement that another node has a volume, and since when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedElsewhere {
    pub volume: String,
    /// Name for people.
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
    /// Size in bytes, a multiple of the block size.
    pub size: u64,
    /// Block size in bytes: 512 or 4096.
    pub block_size: u32,
    #[serde(default)]
    pub read_only: bool,
    /// Set to get the FUSE file alone, without a loop device: `device` in the answer is the file.
    #[serde(default)]
    pub file_only: bool,
    /// Key of an encrypted volume: the daemon hands it to the target again after that was restarted.
    /// In memory only, here and at the holder.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "bare_key_or_none")]
    pub key: Option<DataKey>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// Answer to attach and resize.
    Ok(Attached),
    /// Answer to list and find.
    List(Vec<Attached>),
    /// Answer to detach, for attached and other volumes alike.
    Detached {},
    /// Answer to end: the actions taken, as text; empty if the volume was not attached. Answer to
    /// the statements about a volume: empty.
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
    pub file_only: bool,
    /// Set while the target answers; IO waits otherwise.
    pub connected: bool,
    /// Number of kernel requests that wait for the target.
    pub in_flight: u64,
    /// The link to the device under the volume's name, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<PathBuf>,
    /// Reason for which all IO fails permanently; empty: it does not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub dead: String,
}

/// An attached volume, in the form that other roles need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub volume: String,
    pub device: PathBuf,
    /// Set if a mount, a device mapper or a swap holds it, or IO was done recently.
    pub in_use: bool,
    /// The first epoch of the node's use that it was made for; 0: the target did not report it.
    pub since_epoch: u64,
    /// Same as [`Attached::dead`].
    pub dead: String,
    /// Size in bytes; 0: the device is worked on.
    #[serde(default)]
    pub size: u64,
    /// Number of the last request to attach it, of this process; 0: none, as while it is worked on.
    #[serde(default)]
    pub asked: u64,
}

/// Kind of a failure, by the action that it requires of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The request can never succeed.
    Invalid,
    /// Attached already with other parameters.
    Conflict,
    /// The device is in use.
    Busy,
    /// The target is absent, or differs from the request: the caller tries again.
    Unavailable,
    /// This host cannot do it: FUSE, loop devices or privileges are missing.
    Host,
}
