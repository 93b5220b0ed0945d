//! Object of a call: by the deprecated `volume_id`, by `replication_source`, or by both.

use quoin_api::csi_addons::replication::ReplicationSource;
use quoin_api::csi_addons::replication::replication_source::Type;
use tonic::Status;

use crate::backend::Source;
use crate::limits;
use crate::refusal::{invalid, missing};

const SOURCE: &str = "replication_source";

/// Reads what a call is about. Clients of the first edition send `volume_id` alone, those of 2026 the source alone.
///
/// # Errors
/// 3: it has neither, or both and another one in each; an id is empty or too long; snapshots are not replicated;
/// `replication_id` is not that of the source.
pub(super) fn read(
    volume_id: &str,
    source: Option<&ReplicationSource>,
    replication_id: &str,
) -> Result<Source, Status> {
    limits::optional("volume_id", volume_id)?;
    limits::optional("replication_id", replication_id)?;
    let found = match source {
        None if volume_id.is_empty() => return Err(missing(SOURCE)),
        None => Source::Volume(volume_id.to_owned()),
        Some(source) => of_kind(source)?,
    };
    if !volume_id.is_empty() && found != Source::Volume(volume_id.to_owned()) {
        return Err(invalid("volume_id", format!("is another volume than {SOURCE} names")));
    }
    // A source has one replication, which has its id.
    if !replication_id.is_empty() && replication_id != found.id() {
        let why = format!("is not that of the source, which is {:?}", found.id());
        return Err(invalid("replication_id", why));
    }
    Ok(found)
}

/// Reads the source of a call that has no other field for it.
///
/// # Errors
/// As [`read`].
pub(super) fn of_source(source: Option<&ReplicationSource>) -> Result<Source, Status> {
    read("", source, "")
}

fn of_kind(source: &ReplicationSource) -> Result<Source, Status> {
    match &source.r#type {
        None => Err(invalid(SOURCE, "has no kind: name a volume or a volume group")),
        Some(Type::Volume(volume)) => {
            limits::required("replication_source.volume.volume_id", &volume.volume_id)?;
            Ok(Source::Volume(volume.volume_id.clone()))
        }
        Some(Type::Volumegroup(group)) => {
            let id = &group.volume_group_id;
            limits::required("replication_source.volumegroup.volume_group_id", id)?;
            Ok(Source::Group(id.clone()))
        }
        Some(Type::Volumesnapshot(snapshot)) => {
            let id = &snapshot.volume_snapshot_id;
            limits::required("replication_source.volumesnapshot.volume_snapshot_id", id)?;
            let why =
                "names a snapshot, and snapshots are not replicated: name a volume or a group";
            Err(invalid(SOURCE, why))
        }
    }
}
