//! Disks that refuse reads now and then: a copy is given up for permanent errors, never for two
//! that lie far apart.

use std::time::Duration;

use crate::common::{Cluster, config};

/// The third of three replicas is away and lacks a part of the log.
fn one_lacks_a_part() -> Cluster {
    let mut c = Cluster::new(3, config());
    c.wait_in_sync(3);
    c.hosts[2].cut = true;
    c.disconnect(2);
    for block in 0..10 {
        c.write(block, 1);
    }
    c
}

/// The replica is back while a new target opens, which must read that part of the log; for two
/// seconds the disks of the others refuse that. Then it leaves again, so that no one requests the
/// part any more.
fn refused_for_a_moment(c: &mut Cluster) {
    for host in 0..2 {
        c.hosts[host].unreadable = true;
    }
    c.hosts[2].cut = false;
    c.replace_target(config());
    c.run(Duration::from_secs(4));
    assert!(!c.target.status().serving, "nobody can read what the third one lacks");
    c.hosts[2].cut = true;
    c.disconnect(2);
    for host in 0..2 {
        c.hosts[host].unreadable = false;
    }
    assert!((0..2).all(|host| !c.hosts[host].meta().damaged), "a whole copy was given up");
    assert_eq!(c.read(9 * 4096, 4096), vec![1; 4096]);
}

#[test]
fn two_moments_of_read_errors_that_lie_weeks_apart_damage_no_replica() {
    let mut c = one_lacks_a_part();
    for _ in 0..3 {
        refused_for_a_moment(&mut c);
        c.run(Duration::from_secs(30 * 24 * 3600));
    }
    c.hosts[2].cut = false;
    c.wait_in_sync(3);
}
