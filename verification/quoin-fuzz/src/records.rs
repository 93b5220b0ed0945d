//! The controller's records as its store has them, volumes as users request them, and parts of
//! snapshots as targets answer them.

use prost::Message as _;
use quoin_api::control::{PullPart, PulledPart, SnapshotRange, VolumeSpec};
use quoin_api::volume::Spread;
use quoin_cluster::records::{PoolRecord, VolumeRecord};
use quoin_control::{check_part, spec};
use quoin_types::Membership;

/// The first byte chooses what the rest is.
pub fn run(input: &[u8]) {
    let Some((what, rest)) = input.split_first() else { return };
    match what % 5 {
        0 => {
            let Ok(record) = serde_json::from_slice::<VolumeRecord>(rest) else { return };
            let membership = Membership::from(&record.membership);
            // Either result is right; the test is that it answers.
            let _ = membership.check();
            let _ = record.epoch();
            for replica in &record.replicas {
                let _ = record.is_known(replica);
                let _ = record.known_guid(replica.id.0);
            }
        }
        1 => {
            let _ = serde_json::from_slice::<PoolRecord>(rest);
        }
        2 => {
            let Ok(asked) = VolumeSpec::decode(rest) else { return };
            let defaults = spec::Defaults { replicas: 3, spread: Spread::Pool };
            if let Ok(complete) = spec::complete(&asked, defaults) {
                assert!((1..=complete.replicas).contains(&complete.consistency_factor));
                // Completed options need no further completion.
                let again = spec::complete(&VolumeSpec::from(&complete), defaults);
                assert_eq!(again.ok(), Some(complete));
            }
        }
        4 => {
            let Some((from, rest)) = rest.split_first_chunk::<8>() else { return };
            let Ok(part) = PulledPart::decode(rest) else { return };
            let cursor_block = u64::from_le_bytes(*from) >> 12;
            let pull =
                PullPart { cursor_block, want_data: from[0] & 1 == 1, ..PullPart::default() };
            let size_bytes = 64 << 20;
            if check_part(&part, &pull, size_bytes).is_ok() {
                let end = |range: &SnapshotRange| range.offset + range.length;
                assert!(part.ranges.iter().all(|range| end(range) <= size_bytes));
            }
        }
        _ => {
            let Some((asked, rest)) = rest.split_first_chunk::<8>() else { return };
            let Some(limit) = rest.first_chunk::<8>() else { return };
            let (asked, limit) = (u64::from_le_bytes(*asked), u64::from_le_bytes(*limit));
            if let Ok(size) = spec::size(asked, limit) {
                assert!(size >= asked && (limit == 0 || size <= limit));
            }
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut asked = VolumeSpec { name: "db".into(), replicas: 3, ..VolumeSpec::default() };
    asked.parameters.insert("fsType".into(), "xfs".into());
    let asked = [&[2][..], &asked.encode_to_vec()].concat();
    let volume = br#"{"id":"00000000000000000000000000000001","spec":{"name":"db","replicas":3,
        "consistencyFactor":2,"durability":"cache","spread":"pool"},"membership":{"version":1,
        "rf":1,"cf":1,"drf":1,"known":[{"id":"00000000000000000000000000000002",
        "guid":"00000000000000000000000000000003"}],"retired":[],"formed":true},"replicas":[]}"#;
    let sizes = [&[3][..], &1u64.to_le_bytes(), &u64::MAX.to_le_bytes()].concat();
    let range =
        SnapshotRange { offset: 8192, length: 4096, hole: true, ..SnapshotRange::default() };
    let part = PulledPart { ranges: vec![range], next_block: Some(9), ..PulledPart::default() };
    let part = [&[4][..], &[0; 8], &part.encode_to_vec()].concat();
    vec![part, asked, [&[0][..], volume].concat(), vec![1, b'{', b'}'], sizes]
}
