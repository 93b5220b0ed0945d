//! Comparison of all replicas while a client uses the volume.

use std::time::Duration;

use crate::common::{BLOCKS, Cluster, config};
use bytes::Bytes;
use quoin_replication::primary::{Found, VerifyOrder, VerifyReport};
use quoin_types::block::Operation;

fn order(request: u64) -> VerifyOrder {
    VerifyOrder { request, repair: false, from: None }
}

fn begin(cluster: &mut Cluster, order: VerifyOrder) {
    cluster.event(quoin_replication::primary::PrimaryEvent::Verify(Some(order)));
}

fn end(cluster: &mut Cluster) -> VerifyReport {
    for _ in 0..600 {
        cluster.run(Duration::from_millis(100));
        if let Some(report) = cluster.target.status().verify.filter(|report| report.ended) {
            return report;
        }
    }
    panic!("it never ended: {:?}", cluster.target.status().verify);
}

fn verify(cluster: &mut Cluster, order: VerifyOrder) -> VerifyReport {
    begin(cluster, order);
    end(cluster)
}

fn filled(rf: u8) -> Cluster {
    let mut cluster = Cluster::new(rf, config());
    cluster.wait_in_sync(rf.into());
    for lba in (0..BLOCKS).step_by(3) {
        cluster.write(lba, lba as u8);
    }
    cluster
}

#[test]
fn replicas_at_rest_are_all_found_to_be_the_same() {
    let mut cluster = filled(3);
    let report = verify(&mut cluster, order(1));
    assert_eq!((report.checked_blocks, report.total_blocks), (BLOCKS, BLOCKS));
    assert_eq!((report.bad, report.lost, report.differing, report.unsettled), (0, 0, 0, 0));
    assert_eq!(report.read_bytes, 3 * BLOCKS.div_ceil(3) * 4096);
    assert_eq!(report.members.len(), 3);
    assert!(report.members.iter().all(|m| m.checked_blocks == BLOCKS && m.left_out.is_empty()));
    assert_eq!(report.findings, []);
}

#[test]
fn a_damaged_block_is_found_in_its_replica_and_nothing_is_changed() {
    let mut cluster = filled(3);
    for lba in [3, 300, 303] {
        cluster.hosts[1].spoil(lba);
    }
    cluster.hosts[2].spoil(600);
    let report = verify(&mut cluster, order(1));
    assert_eq!((report.bad, report.repaired, report.lost), (4, 0, 0));
    let bad = |host: usize| Found::Bad(cluster.hosts[host].member);
    let found: Vec<_> = report.findings.iter().map(|f| (f.lba, f.blocks, f.what.clone())).collect();
    let wanted = [(3, 1, bad(1)), (300, 1, bad(1)), (303, 1, bad(1)), (600, 1, bad(2))];
    assert_eq!(found, wanted);
    assert!(cluster.hosts[1].look(3).0, "a verification repairs nothing");
    assert_eq!(verify(&mut cluster, order(2)).bad, 4);
}

#[test]
fn a_repair_mends_what_is_bad_and_a_client_never_reads_wrong_data() {
    let mut cluster = filled(3);
    for lba in (0..90).step_by(3) {
        cluster.hosts[(lba / 3 % 3) as usize].spoil(lba);
    }
    begin(&mut cluster, VerifyOrder { repair: true, ..order(1) });
    for _ in 0..40 {
        cluster.run(Duration::from_millis(20));
        // A pool's scrub does this with findings of a verification.
        for lba in (0..90).step_by(3) {
            let host = (lba / 3 % 3) as usize;
            let (bad, version) = cluster.hosts[host].look(lba);
            if bad {
                cluster.found_bad(host, lba, version);
            }
        }
        assert_eq!(cluster.read(30 * 4096, 4096), vec![30; 4096]);
    }
    let report = end(&mut cluster);
    assert_eq!((report.bad, report.repaired, report.lost), (30, 30, 0));
    assert!(report.findings.iter().all(|finding| finding.repaired));
    assert_eq!(verify(&mut cluster, order(2)).bad, 0);
}

#[test]
fn a_block_that_no_replica_has_is_lost_and_a_repair_does_not_wait_for_it() {
    let mut cluster = filled(3);
    cluster.hosts.iter_mut().for_each(|host| host.spoil(9));
    let report = verify(&mut cluster, VerifyOrder { repair: true, ..order(1) });
    assert_eq!((report.bad, report.lost, report.repaired), (3, 1, 0));
    assert!(report.findings.iter().any(|f| f.what == Found::Lost && f.lba == 9));
}

#[test]
fn a_bad_copy_that_nobody_repairs_is_given_up_and_said_to_be_left() {
    let mut cluster = filled(3);
    cluster.hosts[1].spoil(3);
    cluster.hosts[1].spoil(900);
    let began = cluster.now;
    let report = verify(&mut cluster, VerifyOrder { repair: true, ..order(1) });
    assert_eq!((report.bad, report.repaired), (2, 0));
    assert_eq!(report.checked_blocks, BLOCKS);
    assert!(cluster.now.since(began) > Duration::from_secs(10), "it was waited for");
}

/// Blocks behind a bad copy are read again and again while that one waits for its repair.
#[test]
fn a_block_that_differs_behind_one_that_is_being_repaired_is_counted_once() {
    let mut cluster = filled(3);
    cluster.hosts[1].spoil(3);
    cluster.hosts[2].forge(6, 0xee);
    begin(&mut cluster, VerifyOrder { repair: true, ..order(1) });
    cluster.run(Duration::from_secs(1));
    let (_, version) = cluster.hosts[1].look(3);
    cluster.found_bad(1, 3, version);
    let report = end(&mut cluster);
    assert_eq!((report.bad, report.repaired, report.differing), (1, 1, 1), "{report:?}");
}

#[test]
fn good_copies_that_differ_are_told_and_only_the_one_that_a_person_names_wins() {
    let mut cluster = filled(3);
    cluster.hosts[2].forge(6, 0xee);
    let report = verify(&mut cluster, order(1));
    assert_eq!((report.bad, report.differing), (0, 1));
    let Found::Differs(copies) = &report.findings[0].what else { panic!("{report:?}") };
    assert_eq!(copies.len(), 3);
    let repair = VerifyOrder { repair: true, ..order(2) };
    let report = verify(&mut cluster, repair);
    assert_eq!((report.differing, report.repaired), (1, 0), "nobody's to choose by itself");
    let from = Some(cluster.hosts[0].member.id);
    let report = verify(&mut cluster, VerifyOrder { request: 3, from, ..repair });
    assert_eq!((report.differing, report.repaired), (1, 1));
    assert_eq!(verify(&mut cluster, order(4)).differing, 0);
    for _ in 0..12 {
        assert_eq!(cluster.read(6 * 4096, 4096), vec![6; 4096]);
    }
}

#[test]
fn a_volume_that_is_written_all_the_time_is_compared_whole_and_nothing_differs() {
    let mut cluster = filled(3);
    begin(&mut cluster, order(1));
    let mut n = 0u64;
    let report = loop {
        for _ in 0..4 {
            n += 1;
            let (offset, fill) = (n * 7919 % BLOCKS * 4096, n as u8);
            let data = Bytes::from(vec![fill; 4096]);
            cluster.submit(Operation::Write { offset, data, fua: false });
        }
        cluster.run(Duration::from_millis(1));
        if let Some(report) = cluster.target.status().verify.filter(|report| report.ended) {
            break report;
        }
        assert!(n < 100_000, "it never ends: {:?}", cluster.target.status().verify);
    };
    assert_eq!((report.bad, report.lost, report.differing), (0, 0, 0));
    assert_eq!(report.checked_blocks, BLOCKS);
}

#[test]
fn a_replica_that_is_away_is_left_out_and_said_so() {
    let mut cluster = filled(3);
    cluster.hosts[2].cut = true;
    cluster.disconnect(2);
    cluster.run(Duration::from_secs(5));
    let report = verify(&mut cluster, order(1));
    let of = |host: usize| {
        let member = cluster.hosts[host].member;
        report.members.iter().find(|m| m.member == member).unwrap().clone()
    };
    assert_eq!(of(2).checked_blocks, 0);
    assert!(of(2).left_out.contains("not in sync"), "{report:?}");
    assert_eq!((of(0).checked_blocks, of(1).checked_blocks), (BLOCKS, BLOCKS));
}

#[test]
fn a_new_epoch_goes_on_where_the_old_one_was() {
    let mut cluster = filled(3);
    cluster.hosts[1].spoil(3);
    begin(&mut cluster, order(1));
    cluster.run(Duration::from_millis(1));
    for host in 0..3 {
        cluster.disconnect(host);
    }
    let report = end(&mut cluster);
    assert_eq!((report.checked_blocks, report.bad), (BLOCKS, 1));
}

#[test]
fn a_withdrawn_order_is_forgotten_and_an_older_one_begins_nothing() {
    let mut cluster = filled(1);
    assert_eq!(verify(&mut cluster, order(5)).request, 5);
    begin(&mut cluster, order(4));
    cluster.run(Duration::from_secs(1));
    assert_eq!(cluster.target.status().verify.unwrap().request, 5);
    cluster.event(quoin_replication::primary::PrimaryEvent::Verify(None));
    cluster.run(Duration::from_secs(1));
    assert_eq!(cluster.target.status().verify, None);
}

/// 256 MiB a second of each replica, independent of the timers of other work.
#[test]
fn a_verification_of_an_idle_volume_takes_its_time_by_its_rate_and_no_more() {
    let mut cluster = Cluster::new(3, config());
    cluster.wait_in_sync(3);
    for lba in 0..BLOCKS {
        cluster.write(lba, 1);
    }
    cluster.run(Duration::from_secs(30));
    begin(&mut cluster, order(1));
    cluster.settle();
    let began = cluster.now;
    for _ in 0..1000 {
        if cluster.target.status().verify.is_some_and(|report| report.ended) {
            break;
        }
        cluster.run(Duration::from_millis(1));
    }
    let at_rate = Duration::from_nanos(BLOCKS * 4096 * 1_000_000_000 / (256 << 20));
    let took = cluster.now.since(began);
    // The first stretch is read at once.
    assert!(took >= at_rate / 4 && took <= 4 * at_rate, "{took:?} where the rate says {at_rate:?}");
}
