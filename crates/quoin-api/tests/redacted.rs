//! Properties of the generated messages beyond their fields.

use std::collections::HashMap;

use quoin_api::csi::{
    CreateVolumeRequest, NodeExpandVolumeRequest, NodeStageVolumeRequest, VolumeCapability,
    volume_capability::{AccessType, MountVolume},
};

fn secrets() -> HashMap<String, String> {
    HashMap::from([("passphrase".to_owned(), "hunter2".to_owned())])
}

/// Proves CSI-SECRET-01, CSI-VOLCAP-03: for the debug output of messages.
#[test]
fn debug_output_of_a_message_shows_neither_secrets_nor_mount_flags() {
    let capability = VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            fs_type: "ext4".to_owned(),
            mount_flags: vec!["username=bob,password=hunter2".to_owned()],
            volume_mount_group: String::new(),
        })),
        access_mode: None,
    };
    let create = CreateVolumeRequest {
        name: "db".to_owned(),
        secrets: secrets(),
        volume_capabilities: vec![capability.clone()],
        ..Default::default()
    };
    let stage = NodeStageVolumeRequest { secrets: secrets(), ..Default::default() };
    let expand = NodeExpandVolumeRequest { secrets: secrets(), ..Default::default() };
    for text in [
        format!("{create:?}"),
        format!("{stage:#?}"),
        format!("{expand:?}"),
        format!("{capability:#?}"),
    ] {
        assert!(!text.contains("hunter2"), "{text}");
        assert!(!text.contains("password"), "{text}");
    }
    assert_eq!(format!("{create:?}"), "CreateVolumeRequest { .. }");
}
