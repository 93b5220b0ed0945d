//! Volumes with data, and the expected content of every block.

use quoin_types::*;

use super::{Cluster, config};

pub const FILL: u64 = 100;

pub fn member(id: u128, guid: u128) -> Member {
    Member { id: ReplicaId(id), guid: ReplicaGuid(guid) }
}

/// A volume of `rf` replicas with data.
pub fn filled(rf: u8) -> Cluster {
    let mut c = Cluster::new(rf, config());
    for block in 0..FILL {
        c.write(block, block as u8 + 1);
    }
    c.wait_in_sync(rf.into());
    c
}

pub fn check_data(c: &mut Cluster) {
    for block in 0..FILL {
        assert_eq!(c.read(block * 4096, 4096), vec![block as u8 + 1; 4096], "block {block}");
    }
}
