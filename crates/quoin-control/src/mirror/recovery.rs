//! Mirrors after the records were lost or restored: role and generation are those that the pools keep with
//! the members, and nothing counts that says what live views are until the peer has spoken.

use std::collections::BTreeMap;
use std::sync::Arc;

use quoin_cluster::mirror::record::Parameters;
use quoin_cluster::mirror::{ClusterId, Keepsake, Record as Brain};
use quoin_cluster::records::{
    MirrorRecord, MirrorSettings, VolumeGroupRecord, VolumeMirror, VolumeRecord,
};
use quoin_types::ids::GroupId;

use crate::Error;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::time::now_ms;

/// Interval of a mirror whose settings were lost.
const INTERVAL_S: u64 = 60;

/// Makes the records of mirrors agree with those of their members. They do not rule yet.
pub(crate) async fn agree(state: &State) -> Result<(), Error> {
    let mut groups: BTreeMap<GroupId, Vec<Arc<VolumeRecord>>> = BTreeMap::new();
    for volume in state.volumes.list() {
        if let Some(mirror) = &volume.mirror {
            groups.entry(mirror.group.0).or_default().push(volume.clone());
        }
    }
    let term = state.term().number;
    for (group, members) in groups {
        let Some(pools) = newest(&members) else { continue };
        let change = |record: &mut MirrorRecord| {
            let recovered = record.brain().clone().recovered(pools, term);
            let version = record.version;
            record.change(version, recovered);
            Ok(())
        };
        if state.mirrored.records.update(&group.to_string(), change).await?.is_none() {
            make(state, group, &members, pools, term).await?;
        }
        for member in &members {
            state.mirrored.forget(member.id.0);
        }
    }
    Ok(())
}

/// Role and generation that the pools of any member heard of last.
fn newest(members: &[Arc<VolumeRecord>]) -> Option<Keepsake> {
    let kept = members.iter().filter_map(|member| member.mirror.as_ref());
    // Within one generation a side is primary first.
    let rank = |keepsake: &Keepsake| (keepsake.begun.generation, !keepsake.is_primary);
    kept.map(VolumeMirror::keepsake).max_by_key(rank)
}

/// Name of a group until its peer tells the one that it had: pools keep none.
pub(super) fn name_of(group: GroupId) -> String {
    format!("group-{}", &group.to_string()[..8])
}

/// The mirror of volumes that say that they have one, and whose record is lost.
async fn make(
    state: &State,
    group: GroupId,
    members: &[Arc<VolumeRecord>],
    pools: Keepsake,
    term: u64,
) -> Result<(), Error> {
    let own: ClusterId = crate::fields::id("cluster", &state.identity.cluster().to_string())?;
    let began = pools.begun.generation.cluster;
    let peers = state.joined.peers.list();
    let peer = match peers.as_slice() {
        _ if began != own => Some(began),
        [only] => Some(crate::fields::id("peer", &only.cluster)?),
        _ => None,
    };
    let name = match members {
        [only] if only.id.0.0 == group.0 => only.spec.name.clone(),
        _ => name_of(group),
    };
    let about = Object::new("mirror", group, &name);
    let Some(peer) = peer else {
        let message = "its record is lost, and it is not known to which peer it was mirrored: pair with \
                       that one, and recover again";
        state.events.record(Severity::Error, about, "MirrorLost", message);
        return Ok(());
    };
    let volumes: Vec<_> = members.iter().map(|member| member.id).collect();
    let is_volume = matches!(volumes.as_slice(), [only] if only.0.0 == group.0);
    let parameters = Parameters { interval_s: INTERVAL_S, may_take_over: false };
    let ids = volumes.iter().map(|volume| volume.0).collect();
    let brain = Brain::lost(group, [own, peer], ids, pools, (parameters, term));
    let settings = MirrorSettings {
        interval_s: INTERVAL_S,
        may_take_over: false,
        compresses: true,
        bandwidth_limit: 0,
        is_paused: false,
    };
    if !is_volume {
        let record = VolumeGroupRecord::new(group, name.clone(), volumes, now_ms());
        // A group that is there keeps its name.
        let _ = state.mirrored.groups.create(record).await?;
    }
    let record = MirrorRecord::new(brain, (name, is_volume), settings, now_ms());
    if state.mirrored.records.create(record).await?.is_ok() {
        let message = format!(
            "its record was made again from {} volumes: its points count once the peer has spoken",
            members.len()
        );
        state.events.record(Severity::Warning, about, "MirrorFound", message);
    }
    Ok(())
}
