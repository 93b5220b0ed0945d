//! Places that are not as their caller says: links, mounts of others above, below and beside, and leftovers.

use rustix::mount::UnmountFlags;

use super::*;

fn tmpfs_at(path: &Path) {
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("other", path, "tmpfs", flags, c"size=64k").unwrap();
}

fn unmount(path: &Path) {
    rustix::mount::unmount(path, UnmountFlags::empty()).unwrap();
}

fn mounts_at(path: &Path) -> Vec<String> {
    let mounts = mountinfo::read().unwrap();
    let here = mounts.iter().filter(|mount| mount.mount_point == path);
    here.map(|mount| mount.fs_type.clone()).collect()
}

/// A mount of another owner, made above the volume's own, is neither taken away nor taken for it, whatever the
/// call, and whether the device is there or not.
#[tokio::test]
async fn a_mount_of_another_owner_above_the_volumes_own_stays_and_is_named() {
    let Some(world) = World::new() else { return };
    for access in [ext4(), Access::Block] {
        let node = world.node();
        node.stage(&world.stage_request(access.clone())).await.unwrap();
        let publish = world.publish_request(access.clone(), "pods/a");
        node.publish(&publish).await.unwrap();
        let target = world.path("pods/a");
        let before = mounts_at(&target);
        if access == Access::Block {
            // Only a file can be above a device's node.
            let file = world.path("file");
            fs::write(&file, "of another").unwrap();
            rustix::mount::mount_bind(&file, &target).unwrap();
        } else {
            tmpfs_at(&target);
        }
        let shown = mountinfo::read().unwrap();
        let shown: Vec<_> = shown.iter().filter(|one| one.mount_point == target).collect();
        let refused = node.unpublish(VOLUME, &target).await;
        let refused = refused.err().unwrap_or_else(|| panic!("taken away: {shown:?}"));
        assert!(matches!(refused, Error::ForeignMount { .. }), "{refused}");
        assert_eq!(mounts_at(&target).len(), before.len() + 1, "nothing was taken away");
        let refused = node.unstage(VOLUME, &world.path("stage")).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::FailedPrecondition, "{refused}");
        unmount(&target);
        assert_eq!(mounts_at(&target), before);
        assert!(node.unpublish(VOLUME, &target).await.unwrap());

        if access != Access::Block {
            let stage = world.path("stage");
            tmpfs_at(&stage);
            for _ in 0..2 {
                let refused = node.unstage(VOLUME, &stage).await.unwrap_err();
                assert!(matches!(refused, Error::ForeignMount { .. }), "{refused}");
                let refused = node.publish(&publish).await.unwrap_err();
                assert_eq!(refused.kind(), Kind::FailedPrecondition, "{refused}");
            }
            assert_eq!(mounts_at(&stage), ["ext4", "tmpfs"]);
            unmount(&stage);
        }
        world.unstage(&node).await;
        world.assert_clean();
    }
}

/// The device is gone, as after the death of the attach process, and another mount is where the volume's was.
#[tokio::test]
async fn a_mount_of_another_owner_in_the_place_of_the_volumes_own_stays() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    node.stage(&world.stage_request(ext4())).await.unwrap();
    node.publish(&world.publish_request(ext4(), "pods/a")).await.unwrap();
    let (target, stage) = (world.path("pods/a"), world.path("stage"));
    unmount(&target);
    unmount(&stage);
    world.attacher.detach(VOLUME).await.unwrap();
    for path in [&target, &stage] {
        tmpfs_at(path);
    }
    fs::write(target.join("x"), "of another").unwrap();
    let refused = node.unpublish(VOLUME, &target).await.unwrap_err();
    assert!(matches!(refused, Error::ForeignMount { .. }), "{refused}");
    node.unstage(VOLUME, &stage).await.unwrap_err();
    assert_eq!(node.staged_pieces(&mountinfo::read().unwrap()).unwrap(), []);
    assert_eq!(node.take_down_left(VOLUME).await.unwrap(), None);
    assert_eq!(
        (mounts_at(&target), mounts_at(&stage)),
        (vec!["tmpfs".into()], vec!["tmpfs".into()])
    );
    assert_eq!(fs::read_to_string(target.join("x")).unwrap(), "of another");
    unmount(&target);
    node.unpublish(VOLUME, &target).await.unwrap();
    let refused = node.unstage(VOLUME, &stage).await;
    assert_eq!(mounts_at(&stage), ["tmpfs"], "{refused:?}");
    unmount(&stage);
    world.unstage(&node).await;
    world.assert_clean();
}

/// A path of a call is its caller's word, and the last name of it may be a link to anything.
#[tokio::test]
async fn links_in_the_place_of_a_path_are_not_followed_and_links_above_it_are_the_same_place() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    fs::create_dir(world.path("precious")).unwrap();
    fs::write(world.path("precious/file"), "kept").unwrap();
    let link = |to: &str, at: &str| {
        std::os::unix::fs::symlink(world.path(to), world.path(at)).unwrap();
    };
    link("precious", "pods/link");
    link("precious/file", "pods/file link");
    link("nowhere", "pods/dangling");
    link("stage", "stage link");
    for access in [ext4(), Access::Block] {
        let request = world.stage_request(access.clone());
        let by_link = StageRequest { staging_path: world.path("stage link"), ..request.clone() };
        assert_eq!(node.stage(&by_link).await.unwrap_err().kind(), Kind::InvalidArgument);
        node.stage(&request).await.unwrap();
        for target in ["pods/link", "pods/file link", "pods/dangling"] {
            let refused = node.publish(&world.publish_request(access.clone(), target)).await;
            assert_eq!(refused.unwrap_err().kind(), Kind::InvalidArgument, "{target}");
            assert!(!node.unpublish(VOLUME, &world.path(target)).await.unwrap());
            let kind = fs::symlink_metadata(world.path(target)).unwrap().file_type();
            assert!(kind.is_symlink(), "{target} stays");
        }
        assert!(!world.path("nowhere").exists());
        // A directory above that is a link is resolved: both ways are one place.
        let _ = fs::remove_file(world.path("pods link"));
        link("pods", "pods link");
        node.publish(&world.publish_request(access.clone(), "pods link/a")).await.unwrap();
        node.publish(&world.publish_request(access.clone(), "pods/a")).await.unwrap();
        assert_eq!(mounts_at(&world.path("pods/a")).len(), 1);
        assert!(node.unpublish(VOLUME, &world.path("pods link/a")).await.unwrap());
        assert_eq!(mounts_at(&world.path("pods/a")).len(), 0);

        // It leads elsewhere by the time of the next call: nothing there is touched.
        node.publish(&world.publish_request(access.clone(), "pods link/a")).await.unwrap();
        fs::remove_file(world.path("pods link")).unwrap();
        link("precious", "pods link");
        node.unpublish(VOLUME, &world.path("pods link/file")).await.unwrap();
        node.unpublish(VOLUME, &world.path("pods link/a")).await.unwrap();
        let refused = node.unstage(VOLUME, &world.path("stage")).await.unwrap_err();
        assert!(matches!(refused, Error::StillPublished { .. }), "{refused}");
        assert!(node.unpublish(VOLUME, &world.path("pods/a")).await.unwrap());
        world.unstage(&node).await;
        world.assert_clean();
    }
    assert_eq!(fs::read_to_string(world.path("precious/file")).unwrap(), "kept");
}

/// Leftovers of a process that was killed, or of another hand, in the node's own directories.
#[tokio::test]
async fn leftovers_in_the_state_directory_neither_stop_a_call_nor_name_a_volume() {
    let Some(world) = World::new() else { return };
    let node = world.node();
    let records = world.path("state/volumes");
    for name in ["x.json.new", ".json", "no-json", "00000000000000000000000000000def.json"] {
        fs::write(records.join(name), "{\"format\":1").unwrap();
    }
    fs::create_dir_all(world.path("state/scratch")).unwrap();
    let scratch = world.path(&format!("state/scratch/{VOLUME}"));
    fs::write(&scratch, [0xa5; 8192]).unwrap();
    fs::create_dir(records.join("directory.json")).unwrap();
    assert_eq!(node.staged_pieces(&mountinfo::read().unwrap()).unwrap(), []);
    node.stage(&world.stage_request(ext4())).await.unwrap();
    let pieces = node.staged_pieces(&mountinfo::read().unwrap()).unwrap();
    assert_eq!(pieces.len(), 1);
    world.unstage(&node).await;
    let damaged = node.has_record("00000000000000000000000000000def").unwrap_err();
    assert!(damaged.to_string().contains("move it away"), "{damaged}");
}
