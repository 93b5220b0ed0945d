//! Volumes that begin with the content of another one's snapshot: opened, written, rebuilt.

use std::time::Duration;

use crate::common::filled::member;
use crate::common::{Cluster, config};
use quoin_types::*;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// LSN of the snapshot.
const BEGINS: u64 = 21;

/// Blocks of the source have these bytes, those behind it none.
fn check_base(c: &mut Cluster, blocks: std::ops::Range<u64>) {
    for lba in blocks {
        let wanted = if lba < 20 { 7 + lba as u8 } else { 0 };
        let read = c.read(lba * BLOCK, BLOCK as u32);
        assert!(read.iter().all(|byte| *byte == wanted), "block {lba}");
    }
}

fn begun(rf: u8) -> Cluster {
    let mut c = Cluster::new(rf, config());
    let content: Vec<(u64, u8)> = (0..20).map(|lba| (lba, 7 + lba as u8)).collect();
    c.begin_with(&content);
    c
}

#[test]
fn a_volume_that_begins_with_a_snapshot_serves_it_and_goes_on_behind_its_lsn() {
    let mut c = begun(3);
    let first = c.hosts[0].state();
    assert_eq!(first.position, Position { epoch: Epoch::ZERO, lsn: Lsn(BEGINS) });
    assert!(c.hosts.iter_mut().all(|host| host.state() == first), "they begin alike");
    check_base(&mut c, 0..30);
    c.write(3, 99);
    assert!(c.hosts[0].position().lsn > Lsn(BEGINS));
    let read = c.read(3 * BLOCK, BLOCK as u32);
    assert!(read.iter().all(|byte| *byte == 99));
    for host in 0..3 {
        c.crash_replica(host);
        check_base(&mut c, 4..30);
        c.write(40 + host as u64, 1);
        c.start_replica(host);
        c.wait_in_sync(3);
    }
    c.replace_target(config());
    check_base(&mut c, 4..30);
}

/// An empty replica of a clone counts only once it has the base too.
#[test]
fn a_newcomer_of_a_clone_is_rebuilt_with_its_base_before_it_counts() {
    let mut c = begun(1);
    check_base(&mut c, 0..30);
    c.write(3, 99);
    c.want(|desired| desired.drf = 3);
    let newcomers = [c.add_newcomer(member(2, 202), false), c.add_newcomer(member(3, 203), false)];
    c.wait_for_version(2);
    c.wait_in_sync(3);
    for host in newcomers {
        assert!(c.hosts[host].meta().quorum);
    }
    c.crash_replica(0);
    c.run(Duration::from_secs(5));
    check_base(&mut c, 4..30);
    let read = c.read(3 * BLOCK, BLOCK as u32);
    assert!(read.iter().all(|byte| *byte == 99));
}

#[test]
fn a_clone_that_was_never_opened_is_opened_with_what_a_majority_began_with() {
    let mut c = begun(3);
    c.crash_replica(1);
    check_base(&mut c, 0..30);
    c.start_replica(1);
    c.wait_in_sync(3);
    c.crash_replica(0);
    check_base(&mut c, 0..30);
}
