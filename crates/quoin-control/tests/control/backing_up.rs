//! Backups: checked whole, and restored unchanged.

use quoin_control::backup::Backup;
use quoin_control::store::{Embedded, Store};
use quoin_identity::Lifetimes;

use crate::cluster::Cluster;

#[tokio::test]
async fn a_backup_with_any_byte_changed_or_cut_off_anywhere_is_refused() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let bytes = cluster.controller.disaster.backups.make(true).await.unwrap();
    assert!(Backup::parse(&bytes).unwrap().has_authority());
    for at in (0..bytes.len()).step_by(5).chain(bytes.len() - 80..bytes.len() - 1) {
        for bit in [0, 5, 7] {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            assert!(Backup::parse(&changed).is_err(), "byte {at}, bit {bit}");
        }
        // The last line end alone carries no data.
        if at + 1 < bytes.len() {
            assert!(Backup::parse(&bytes[..at]).is_err(), "cut at {at}");
        }
    }
}

#[tokio::test]
async fn what_is_restored_is_what_was_backed_up_and_does_not_rule_yet() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    let fence = ["192.0.2.0/24".to_owned()];
    cluster.controller.volumes.network_fences.add(&fence).await.unwrap();
    let backup =
        Backup::parse(&cluster.controller.disaster.backups.make(true).await.unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    assert_eq!(backup.restore(&state, false).await.unwrap(), None);
    let again = backup.restore(&state, false).await.unwrap_err().to_string();
    assert!(again.contains("never overwritten"), "{again}");
    let aside = backup.restore(&state, true).await.unwrap().unwrap();
    assert!(aside.exists());
    let store = Embedded::open(&state.join("records.redb")).unwrap();
    let in_use = backup.restore(&state, true).await.unwrap_err().to_string();
    assert!(in_use.contains("another process"), "{in_use}");
    let entry = store.get(&format!("volume/{}", volume.id.0)).await.unwrap().unwrap();
    let text = String::from_utf8(entry.value).unwrap();
    assert!(text.contains("\"name\":\"db\""), "{text}");
    drop(store);
    let options = quoin_control::Options::new(&state);
    let restored = quoin_control::open(&options).await.unwrap();
    assert_eq!(restored.state.recovery_reason(), "they come from a backup");
    assert_eq!(restored.volumes.network_fences.list()[0].block, fence[0], "a fence is kept");
    assert!(restored.assignments.of_pool("p1").replicas.is_empty(), "nothing is ordered");
    let assigned = restored.assignments.of_node("n1");
    assert!(assigned.targets.is_empty() && !assigned.complete, "what is served is served on");
    let asked = crate::cluster::by_name("db");
    let refused = restored.volumes.catalog.delete(asked.as_ref()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable, "not deleted already");
    assert!(refused.to_string().contains("quoin controller recover"), "{refused}");
    // Another cluster's directory, and one with foreign files.
    let other = dir.path().join("other");
    quoin_control::init(&other, Lifetimes::default()).await.unwrap();
    let foreign = backup.restore(&other, true).await.unwrap_err().to_string();
    assert!(foreign.contains("holds the authority of cluster"), "{foreign}");
    let letters = dir.path().join("letters");
    std::fs::create_dir(&letters).unwrap();
    std::fs::write(letters.join("dear"), "x").unwrap();
    assert!(backup.restore(&letters, true).await.unwrap_err().to_string().contains("dear"));
    assert_eq!(std::fs::read_dir(&letters).unwrap().count(), 1, "something was made");
}
