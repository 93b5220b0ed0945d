//! Records for the tests of snapshots.

use quoin_cluster::records::{
    Cut, RevertRecord, SnapshotPhase, SnapshotRecord, Text, VolumePhase, VolumeRecord,
};
use quoin_types::{SnapshotId, VolumeId};

use crate::volume::spec::{Defaults, complete};

pub(crate) fn snapshot(id: u128, volume: u128) -> SnapshotRecord {
    SnapshotRecord {
        id: Text(SnapshotId(id)),
        name: format!("s{id}"),
        volume: Text(VolumeId(volume)),
        volume_name: "db".into(),
        phase: SnapshotPhase::Wished,
        wished_ms: 1_700_000_000_000,
        cut: None,
        schedule: String::new(),
        group: None,
        failure: String::new(),
        used_by: Vec::new(),
        made_for: String::new(),
        point: None,
    }
}

pub(crate) fn cut(at_ms: u64) -> Cut {
    Cut { lsn: 9, epoch: 3, chain: 0xc4a1, at_ms, size_bytes: 1 << 30 }
}

pub(crate) fn revert(volume: u128, attempt: u128) -> RevertRecord {
    RevertRecord::wished(&snapshot(1, volume), SnapshotId(attempt), 1_700_000_000_000)
}

pub(crate) fn volume() -> VolumeRecord {
    let asked = quoin_api::control::VolumeSpec { name: "db".into(), ..Default::default() };
    let defaults = Defaults { replicas: 3, spread: quoin_api::volume::Spread::Pool };
    let spec = complete(&asked, defaults).expect("a complete specification");
    let volume = VolumeRecord::new(VolumeId(0xf01), spec, 1 << 30, 1_700_000_000_000);
    VolumeRecord { phase: VolumePhase::Ready, ..volume }
}
