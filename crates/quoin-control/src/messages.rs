//! Parts of records as messages have them.

use quoin_api::control::{self as api, VolumeSpec};
use quoin_cluster::records::VolumeRecord;
use quoin_identity::convert::membership_message;

pub(crate) fn membership(record: &VolumeRecord) -> api::Membership {
    membership_message(&(&record.membership).into())
}

pub(crate) fn spec(record: &VolumeRecord) -> VolumeSpec {
    VolumeSpec { size_bytes: record.size_bytes, ..VolumeSpec::from(&record.spec) }
}
