//! The controller's records as its store has them, and volumes as users request them.

use prost::Message as _;
use quoin_api::control::VolumeSpec;
use quoin_api::volume::Spread;
use quoin_control::records::{PoolRecord, VolumeRecord};
use quoin_control::spec;
use quoin_types::Membership;

/// The first byte chooses what the rest is.
pub fn run(input: &[u8]) {
    let Some((what, rest)) = input.split_first() else { return };
    match what % 4 {
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
    vec![asked, [&[0][..], volume].concat(), vec![1, b'{', b'}'], sizes]
}
