//! Encrypted volumes in the records: made with their slots, and their slots replaced.

use quoin_api::control::{Encryption as Message, SetKeySlotsRequest, VolumeSpec};
use quoin_encryption::{Encryption, UserKey};
use tonic::Code;

use crate::cluster::{Cluster, by_name, spec};

fn user(fill: u8) -> UserKey {
    UserKey::parse(format!("{fill:02x}").repeat(32).as_bytes()).unwrap()
}

fn encrypted(name: &str, encryption: &Encryption) -> VolumeSpec {
    VolumeSpec { encryption: Some(Message::from(encryption)), ..spec(name) }
}

fn set(encryption: &Encryption, resource_version: u64) -> SetKeySlotsRequest {
    let encryption = Some(Message::from(encryption));
    SetKeySlotsRequest { volume: by_name("db"), encryption, resource_version }
}

#[tokio::test]
async fn a_repeated_creation_finds_the_encrypted_volume_and_its_first_slots_stay() {
    let cluster = Cluster::new().await;
    let catalog = &cluster.controller.volumes.catalog;
    let first = Encryption::create(&user(1), "a").unwrap();
    let made = catalog.create(&encrypted("db", &first), 0).await.unwrap();
    let again = Encryption::create(&user(1), "a").unwrap();
    let found = catalog.create(&encrypted("db", &again), 0).await.unwrap();
    assert_eq!(found.id, made.id);
    assert_eq!(found.spec.encryption.as_ref(), Some(&first));
    let refused = catalog.create(&spec("db"), 0).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert!(refused.to_string().contains("encryption"), "{refused}");
}

#[tokio::test]
async fn slots_are_replaced_for_the_same_data_key_and_the_version_that_was_read() {
    let cluster = Cluster::new().await;
    let (catalog, slots) =
        (&cluster.controller.volumes.catalog, &cluster.controller.volumes.key_slots);
    let mut encryption = Encryption::create(&user(1), "a").unwrap();
    let made = catalog.create(&encrypted("db", &encryption), 0).await.unwrap();
    let version = cluster.controller.status.volume(&made).resource_version;
    encryption.add(&user(1), &user(2), "b").unwrap();
    let changed = slots.set(&set(&encryption, version)).await.unwrap();
    assert_eq!(changed.spec.encryption.as_ref(), Some(&encryption));
    let code = |outcome: Result<_, quoin_control::Error>| outcome.map(drop).unwrap_err().code();
    let stale = slots.set(&set(&encryption, version)).await;
    assert_eq!(code(stale), Code::Aborted);
    // Slots that name no version would undo whatever was changed since they were read.
    let version = cluster.shown("db").resource_version;
    let unread = slots.set(&set(&encryption, 0)).await.unwrap_err();
    assert_eq!(unread.code(), Code::InvalidArgument);
    assert!(unread.to_string().starts_with("resourceVersion"), "{unread}");
    // With another data key, the data would be lost.
    let other = Encryption::create(&user(1), "a").unwrap();
    assert_eq!(code(slots.set(&set(&other, version)).await), Code::InvalidArgument);
    let none = SetKeySlotsRequest { encryption: None, ..set(&encryption, version) };
    assert_eq!(code(slots.set(&none).await), Code::InvalidArgument);
    catalog.create(&spec("plain"), 0).await.unwrap();
    let version = cluster.shown("plain").resource_version;
    let plain = SetKeySlotsRequest { volume: by_name("plain"), ..set(&encryption, version) };
    assert_eq!(code(slots.set(&plain).await), Code::FailedPrecondition);
}
