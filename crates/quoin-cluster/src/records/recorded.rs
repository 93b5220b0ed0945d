//! The controller's records as they were recorded: what a later Quoin finds, and what a cluster
//! that goes back leaves to an earlier one of the same format.

use std::collections::BTreeMap;
use std::time::Duration;

use quoin_api::volume::{
    BlockSize, Durability, FileSystem, Frontend, Local, OnFull, OnQuorumLoss, Reads, ReplaceAfter,
    Spread, VolumeOptions,
};
use quoin_recorded::Recorded;
use quoin_types::ids::{GroupId, PointId, SnapshotId};
use quoin_types::{Incarnation, ReplicaGuid, ReplicaId, TermId, VolumeId};
use serde_json::{Value, json};

use crate::mirror;
use crate::records::*;

const RAISE: &str = "FORMAT in quoin-cluster/src/records/mod.rs, unless every build that reads the \
                     format of today may take the new field for absent (`serde(default)`)";
const CRATE: &str = env!("CARGO_MANIFEST_DIR");

fn recorded() -> Recorded {
    Recorded::current(CRATE, "records", FORMAT.into(), RAISE)
}

fn words(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn spec() -> Spec {
    Spec {
        name: "db".into(),
        replicas: 3,
        consistency_factor: 2,
        options: VolumeOptions {
            durability: Durability::Media,
            spread: Spread::Host,
            on_quorum_loss: OnQuorumLoss::Wait,
            on_full: OnFull::Wait,
            reads: Reads::Leased,
            block_size: BlockSize::Bytes4096,
            fs_type: Some(FileSystem::Xfs),
            frontend: Some(Frontend::Nbd),
            iops_limit: 2000,
            bandwidth_limit: 100 << 20,
            replace_after: Some(ReplaceAfter::After(Duration::from_secs(900))),
            local: Local::Any,
        },
        allow_loss_on_single_failure: true,
        parameters: words(&[("purpose", "test")]),
        accessible_topology: vec![words(&[("zone", "a")]), words(&[("zone", "b")])],
        mutable_parameters: BTreeMap::new(),
        claim: BTreeMap::new(),
        created_options: None,
        encryption: None,
    }
}

fn replica(n: u128, phase: ReplicaPhase, cause: Cause) -> ReplicaRecord {
    ReplicaRecord {
        id: Text(ReplicaId(n)),
        guid: Text(ReplicaGuid(n << 64 | 0x9d)),
        pool: format!("pool-{n}"),
        phase,
        leaving: n == 3,
        placed: false,
        cause,
    }
}

/// With a value in every field.
pub fn volume() -> VolumeRecord {
    let replicas = vec![
        replica(1, ReplicaPhase::Keep, Cause::Asked),
        replica(2, ReplicaPhase::Init, Cause::Asked),
        replica(3, ReplicaPhase::Delete, Cause::Drain),
        replica(4, ReplicaPhase::Recreate, Cause::Healing),
    ];
    let known = replicas[..3].iter().map(|r| MemberRecord { id: r.id, guid: r.guid });
    VolumeRecord {
        id: Text(VolumeId(0xf01)),
        spec: spec(),
        size_bytes: 1 << 30,
        phase: VolumePhase::Ready,
        created_ms: 1_700_000_000_000,
        membership: MembershipRecord {
            version: 4,
            rf: 3,
            cf: 2,
            drf: 4,
            known: known.collect(),
            retired: vec![Text(ReplicaGuid(0xdead))],
            formed: true,
        },
        discarded: vec![replica(9, ReplicaPhase::Keep, Cause::Asked).into()],
        replicas,
        attachments: vec![AttachmentRecord {
            node: "node-1".into(),
            read_only: false,
            usage: "mount".into(),
            device: false,
            sharing: Default::default(),
            replay: Default::default(),
            client: 0,
        }],
        opened: Opened {
            owner: Some("node-1".into()),
            epoch: 7,
            incarnation: Text(Incarnation(0x19)),
        },
        consistency_factor: 2,
        may_have_lost_ms: 1_700_000_000_001,
        generation: 12,
        source: None,
        grants: Grants { epochs_skipped: 3, ..Grants::default() },
        used: Default::default(),
        mirror: None,
    }
}

fn mirrored() -> VolumeRecord {
    let mirror = VolumeMirror {
        group: Text(GroupId(0x67)),
        is_primary: true,
        number: 4,
        cluster: Text(mirror::ClusterId(0xa)),
        claim: Text(PointId(0xc1)),
        at: Some(Text(PointId(0x77))),
        since_generation: 11,
        fence: Text(PointId(0xfe)),
        fenced_epoch: 6,
        is_fenced: true,
    };
    let grants = Grants { written: Some(5), ..volume().grants };
    VolumeRecord { mirror: Some(mirror), grants, ..volume() }
}

fn mirror_of_a_group() -> MirrorRecord {
    let clusters = [0xa, 0xb].map(mirror::ClusterId);
    let members = vec![VolumeId(0xf01), VolumeId(0xf02)];
    let parameters = mirror::record::Parameters { interval_s: 10, may_take_over: true };
    let brain = mirror::Record::primary(GroupId(0x67), clusters, members, parameters);
    let settings = MirrorSettings {
        interval_s: 10,
        may_take_over: true,
        compresses: true,
        bandwidth_limit: 1 << 20,
        is_paused: true,
    };
    let made = MirrorRecord::new(brain, ("shop".into(), false), settings, 1_700_000_000_000);
    MirrorRecord { version: 1, ..made }
}

fn mirror_that_was_compared() -> MirrorRecord {
    let mut comparison = MirrorComparison::begun(PointId(0xc0), 1_700_000_000_100, None);
    comparison.state = ComparisonState::Failed;
    comparison.ended_ms = 1_700_000_000_900;
    comparison.point = Some(Text(PointId(0x77)));
    (comparison.volume, comparison.range) = (Text(VolumeId(0xf02)), 17);
    comparison.done_bytes = 80 << 20;
    comparison.note(DifferingRange { volume: Text(VolumeId(0xf01)), range: 3 });
    comparison.differed = true;
    comparison.failure = "the peer is silent".into();
    MirrorRecord { comparison: Some(comparison), orphan_s: 86_400, ..mirror_of_a_group() }
}

/// A record that is kept as one file of JSON.
fn hold<R: Record + std::fmt::Debug>(name: &str, record: &R) {
    let here: Value = serde_json::from_slice(&encode(record)).expect("JSON");
    let (file, text) = (format!("{name}.json"), serde_json::to_string_pretty(&here));
    // A field that may be absent is added within a format.
    let all = recorded().names(".json").contains(&name.to_owned())
        && says(&here, &serde_json::from_str(&recorded().read_text(&file)).expect("JSON"));
    if !all {
        recorded().holds_text(&file, &(text.expect("JSON") + "\n"));
    }
    for version in Recorded::all(CRATE, "records", RAISE) {
        let bytes = version.read_text(&format!("{name}.json"));
        let read = decode::<R>(bytes.as_bytes()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(&read, record, "{name}");
        // A later version of the same format may say more, and what it says does no harm.
        let mut later: Value = serde_json::from_str(&bytes).expect("JSON");
        add_fields(&mut later["record"]);
        let read = decode::<R>(later.to_string().as_bytes());
        assert_eq!(read.as_ref(), Ok(record), "{name} with fields of a later version");
        // A later format may mean anything, and nothing of it is taken.
        later["format"] = json!(FORMAT + 1);
        let refused = decode::<R>(later.to_string().as_bytes()).expect_err("a later format");
        assert!(refused.contains("written by a newer Quoin"), "{refused}");
    }
}

/// Returns true if all that was recorded is said still, and in the same way.
fn says(here: &Value, recorded: &Value) -> bool {
    match (here, recorded) {
        (Value::Object(here), Value::Object(recorded)) => recorded
            .iter()
            .all(|(field, value)| here.get(field).is_some_and(|here| says(here, value))),
        (Value::Array(here), Value::Array(recorded)) => {
            here.len() == recorded.len() && here.iter().zip(recorded).all(|(h, r)| says(h, r))
        }
        _ => here == recorded,
    }
}

/// Adds a field to the record. (Maps from users' words to words are no records, and known ones
/// would become users' words.)
fn add_fields(record: &mut Value) {
    let Value::Object(fields) = record else { return };
    fields.values_mut().for_each(|value| match value {
        Value::Array(items) if items.iter().all(|i| i.get("guid").is_some()) => {
            items.iter_mut().for_each(add_fields);
        }
        Value::Object(inner) if inner.values().any(|v| !v.is_string()) => add_fields(value),
        _ => {}
    });
    fields.insert("added_by_a_later_version".into(), json!({"any": ["thing"]}));
}

#[test]
fn every_record_is_written_as_was_recorded_and_read_from_every_version() {
    hold("volume", &volume());
    let bare = VolumeRecord {
        spec: Spec {
            options: VolumeOptions {
                durability: Durability::Cache,
                spread: Spread::Pool,
                replace_after: Some(ReplaceAfter::Never),
                ..spec().options
            },
            ..spec()
        },
        phase: VolumePhase::Pending,
        opened: Opened { owner: None, ..volume().opened },
        replicas: vec![],
        ..volume()
    };
    hold("volume-pending", &bare);
    hold("volume-retained", &VolumeRecord { phase: VolumePhase::Retained, ..volume() });
    let sharer = |node: &str, read_only, sharing| AttachmentRecord {
        node: node.into(),
        read_only,
        usage: "block".into(),
        device: true,
        sharing,
        replay: Default::default(),
        client: 0,
    };
    let shared = VolumeRecord {
        spec: Spec {
            options: VolumeOptions {
                spread: Spread::Rack,
                local: Local::Required,
                ..spec().options
            },
            ..spec()
        },
        attachments: vec![
            sharer("node-1", false, Sharing::SingleWriter),
            sharer("node-2", true, Sharing::ReadOnly),
            sharer("node-3", true, Sharing::MultiWriter),
        ],
        used: Use {
            by: "*".into(),
            since_epoch: 5,
            before_by: "node-2".into(),
            before_since_epoch: 3,
            unproven: false,
        },
        ..volume()
    };
    hold("volume-shared", &shared);
    let used = Use { unproven: true, ..shared.used.clone() };
    hold("volume-of-an-unproven-use", &VolumeRecord { used, ..shared });
    hold("volume-deleting", &VolumeRecord { phase: VolumePhase::Deleting, ..bare });
    let source = SourceRecord {
        volume: Text(VolumeId(0xf00)),
        snapshot: Text(SnapshotId(0x5a)),
        volume_name: "db".into(),
        snapshot_name: "before-upgrade".into(),
        of_volume: false,
        depth: 2,
        base: BaseUse::InUse,
    };
    let clone = VolumeRecord {
        replicas: vec![replica(1, ReplicaPhase::Clone, Cause::Asked)],
        source: Some(source.clone()),
        ..volume()
    };
    hold("volume-clone", &clone);
    let copy = SourceRecord { snapshot_name: String::new(), of_volume: true, ..source };
    for (name, base) in [
        ("volume-clone-flattening", BaseUse::Flattening),
        ("volume-clone-flattened", BaseUse::Flattened),
    ] {
        let source = Some(SourceRecord { base, ..copy.clone() });
        hold(name, &VolumeRecord { source, ..volume() });
    }
    let name = NameRecord { volume_name: "db".into(), volume_id: Text(VolumeId(0xf01)) };
    hold("volume-name", &name);
    let pool = PoolRecord {
        name: "pool-1".into(),
        pool_id: "00000000000000000000000000009001".into(),
        node: "node-1".into(),
        address: "10.0.0.1:7001".into(),
        topology: words(&[("zone", "a")]),
        start_counter: 5,
        start_nonce: 0,
        former_start: 4,
        former_nonce: 40,
        mark: 0,
        rolled_back: true,
        scrub_request: 2,
    };
    hold("pool", &pool);
    let cordon = CordonRecord {
        kind: "pool".into(),
        holder: "pool-1".into(),
        drain: true,
        told: true,
        since_ms: 1_700_000_000_000,
        dying: String::new(),
    };
    hold("cordon", &cordon);
    let node = NodeRecord {
        name: "node-1".into(),
        address: "10.0.0.1:7002".into(),
        topology: words(&[("zone", "a")]),
        volumes_max: 64,
        version: "0.1.0".into(),
        host_addresses: Default::default(),
    };
    hold("node", &node);
    let host_addresses = ["10.0.0.1".parse().expect("an address")].into();
    hold("node-with-addresses", &NodeRecord { host_addresses, ..node });
    let fence = FenceRecord {
        block: Text("10.0.0.0/24".parse().expect("a block")),
        since_ms: 1_700_000_000_000,
        nodes: ["node-1".to_owned()].into(),
        volumes: [volume().id].into(),
    };
    hold("fence", &fence);
    let token = TokenRecord {
        secret_hash: "5ec2e7".into(),
        role: "pool".into(),
        holder: "pool-1".into(),
        expires_ms: 1_700_000_000_000,
        used_by: Some(("pool/pool-1".into(), "4a54".into())),
        manages_volumes: false,
        created_ms: 0,
    };
    hold("token", &token);
    let member = MemberOfCluster {
        role: "pool".into(),
        holder: "pool-1".into(),
        key_hash: "4a54".into(),
        next_key_hash: String::new(),
        joined_ms: 1_700_000_000_000,
        removed: true,
        manages_volumes: true,
    };
    hold("member", &member);
    let introduction = Introduction {
        authorities_pem: "-----BEGIN CERTIFICATE-----".into(),
        keys: vec!["0a".repeat(32)],
        addresses: vec!["mirror-1.example:10810".into()],
    };
    let (cluster, name, paired_ms) = ("c1".repeat(16), "east".into(), 1_700_000_000_000);
    let limits = PeerLimits::default();
    let peer = PeerRecord { cluster, name, introduction, paired_ms, limits };
    hold("peer", &peer);
    let limits = PeerLimits { copies: Some(9), bytes: Some(1 << 40), orphans_s: Some(604_800) };
    hold("peer-with-limits", &PeerRecord { limits, ..peer });
    let (mirror, address) = ("host-1".into(), "10.0.0.1:10810".into());
    hold("mirror-address", &MirrorAddressRecord { mirror, address });
    let recovery = RecoveryRecord { why: "they were lost".into(), since_ms: 1_700_000_000_000 };
    hold("recovery", &recovery);
    let (number, id) = (3, Text(TermId(0x7e41)));
    hold("term", &TermRecord { number, id, since_ms: 1_700_000_000_000 });
    let superseded =
        SupersededRecord { number, id, told_by: "pool pool-1".into(), since_ms: 1_700_000_000_000 };
    hold("superseded", &superseded);
    for (name, state) in [("filling", MoveState::Filling), ("moved", MoveState::Moved)] {
        let (place, since_ms) = ("etcd below /quoin".into(), 1_700_000_000_000);
        hold(name, &MoveRecord { state, id, number, place, since_ms });
    }
    let event = EventRecord {
        sequence: 17,
        time_ms: 1_700_000_000_000,
        severity: "warning".into(),
        object_kind: "volume".into(),
        object_id: "f01".into(),
        object_name: "db".into(),
        reason: "ReplicaLost".into(),
        message: "in words".into(),
        count: 2,
        reporter: "pool/pool-1".into(),
    };
    hold("event", &event);
    let mut snapshot = SnapshotRecord {
        id: Text(SnapshotId(0x5a)),
        name: "before-upgrade".into(),
        volume: Text(VolumeId(0xf01)),
        volume_name: "db".into(),
        phase: SnapshotPhase::Wished,
        wished_ms: 1_700_000_000_000,
        cut: None,
        schedule: "hourly".into(),
        group: None,
        failure: "in words".into(),
        used_by: vec![Text(VolumeId(0xf02))],
        made_for: String::new(),
        point: None,
    };
    hold("snapshot-wished", &snapshot);
    let (lsn, epoch, chain) = (9, 3, 0xc4a1);
    snapshot.cut = Some(Cut { lsn, epoch, chain, at_ms: 1_700_000_000_001, size_bytes: 1 << 30 });
    for (name, phase) in [
        ("snapshot-ready", SnapshotPhase::Ready),
        ("snapshot-deleting", SnapshotPhase::Deleting),
        ("snapshot-retained", SnapshotPhase::Retained),
    ] {
        hold(name, &SnapshotRecord { phase, ..snapshot.clone() });
    }
    hold("snapshot-of-a-copy", &SnapshotRecord { made_for: "copy".into(), ..snapshot.clone() });
    let group = Text(GroupId(0x66));
    hold("snapshot-of-a-group", &SnapshotRecord { group: Some(group), ..snapshot.clone() });
    let point = Some(Text(PointId(0x77)));
    hold("snapshot-of-a-mirror", &SnapshotRecord { point, ..snapshot.clone() });
    hold("volume-mirrored", &mirrored());
    hold("mirror", &mirror_of_a_group());
    hold("mirror-compared", &mirror_that_was_compared());
    let mut asked = mirror_of_a_group();
    asked.given = Some(asked.settings.clone());
    asked.confirmed = vec![Text(VolumeId(0xf01))];
    asked.released = vec![Text(VolumeId(0xf01))];
    hold("mirror-of-an-orchestrator", &asked);
    let members = vec![Text(VolumeId(0xf01))];
    let shop = VolumeGroupRecord::new(GroupId(0x67), "shop", members, 7);
    hold("volume-group", &shop);
    let claim = Some(GroupClaim { name: "shop".into(), prefix: "vgr-".into() });
    hold("volume-group-claimed", &VolumeGroupRecord { claim, ..shop });
    let member = |volume, with: bool| GroupMember {
        volume: Text(VolumeId(volume)),
        volume_name: "db".into(),
        snapshot: with.then_some(snapshot.id),
        cut: snapshot.cut.filter(|_| with),
    };
    for (name, phase, with) in [
        ("group-snapshot-wished", GroupPhase::Wished, false),
        ("group-snapshot-ready", GroupPhase::Ready, true),
        ("group-snapshot-deleting", GroupPhase::Deleting, true),
    ] {
        let record = GroupRecord {
            id: group,
            name: "before-upgrade".into(),
            phase,
            wished_ms: 1_700_000_000_000,
            members: vec![member(0xf01, with), member(0xf02, with)],
        };
        hold(name, &record);
    }
    let name = SnapshotName { snapshot_name: "before-upgrade".into(), snapshot_id: snapshot.id };
    hold("snapshot-name", &name);
    let schedule = ScheduleRecord {
        name: "hourly".into(),
        volume: Text(VolumeId(0xf01)),
        volume_name: "db".into(),
        every_ms: 3_600_000,
        keep: 24,
        keep_for_ms: 604_800_000,
        created_ms: 1_700_000_000_000,
        last_ms: 1_700_003_600_000,
    };
    hold("schedule", &schedule);
    let revert = RevertRecord {
        volume: Text(VolumeId(0xf01)),
        attempt: Text(SnapshotId(0xa77)),
        snapshot: snapshot.id,
        snapshot_name: "before-upgrade".into(),
        phase: RevertPhase::Wished,
        wished_ms: 1_700_000_000_000,
        ended_ms: 1_700_000_000_001,
        lsn: 12,
        failure: "in words".into(),
        recorded: true,
        trims: false,
        former: vec![Text(SnapshotId(0xa76))],
    };
    for (name, phase) in [
        ("revert-wished", RevertPhase::Wished),
        ("revert-done", RevertPhase::Done),
        ("revert-failing", RevertPhase::Failing),
        ("revert-failed", RevertPhase::Failed),
    ] {
        hold(name, &RevertRecord { phase, ..revert.clone() });
    }
    let replica = ReplicaResult {
        replica_id: "1".into(),
        guid: "2".into(),
        pool: "pool-1".into(),
        checked_bytes: 1 << 30,
        bad: 2,
        repaired: 1,
        left_out: "it is not in sync".into(),
    };
    let finding = FindingRecord {
        offset: 4096,
        length: 8192,
        what: "bad".into(),
        replica_id: "1".into(),
        pool: "pool-1".into(),
        repaired: true,
        message: "in words".into(),
    };
    let verify = VerifyRecord {
        volume: Text(VolumeId(0xf01)),
        request: 3,
        repair: true,
        from: Some(Text(ReplicaId(1))),
        state: VerifyState::Ended,
        began_ms: 1_700_000_000_000,
        ended_ms: 1_700_000_000_001,
        message: "in words".into(),
        found: VerifyCounts {
            checked_bytes: 1 << 30,
            total_bytes: 1 << 30,
            read_bytes: 3 << 30,
            bad: 2,
            lost: 1,
            differing: 1,
            repaired: 1,
            unsettled: 1,
        },
        replicas: vec![replica],
        findings: vec![finding],
    };
    hold("verify", &verify);
}

/// No other format of before is read, in part or whole.
#[test]
fn a_record_of_before_is_refused_with_both_formats_and_the_way_out() {
    let mut before: Value = serde_json::from_slice(&encode(&volume())).expect("JSON");
    before["format"] = json!(FORMAT - 1);
    let refused = decode::<VolumeRecord>(before.to_string().as_bytes()).expect_err("of before");
    for part in ["format 1", "format 2", "quoin pool export"] {
        assert!(refused.contains(part), "{refused}");
    }
}

/// A value that only a later version has names would be lost if it was taken for another one.
#[test]
fn a_value_that_this_version_has_no_name_for_refuses_the_record_and_names_it() {
    let mut later: Value = serde_json::from_slice(&encode(&volume())).expect("JSON");
    later["record"]["replicas"][0]["phase"] = json!("Teleporting");
    let refused = decode::<VolumeRecord>(later.to_string().as_bytes()).expect_err("no such phase");
    assert!(refused.contains("Teleporting") && refused.contains("newer Quoin"), "{refused}");
}
