//! Mounts and devices that a cluster would leave behind.
//!
//! A file system that somebody uses is never pulled away from below him: a stop waits and says
//! for whom; only a second Ctrl-C takes the device away, after what it holds was written back.

use anyhow::Result;
use rustix::mount::{UnmountFlags, unmount};
use std::time::Duration;

use super::layout::Layout;
use super::{Ends, say};
use crate::host::devices::{self, Device, Mount};
use crate::host::lost;

/// How often a mount in use is tried again.
const RETRY: Duration = Duration::from_millis(500);
/// How long a forced stop writes back what file systems in use hold.
const SYNC_BUDGET: Duration = Duration::from_secs(15);

/// Unmounts every file system on this cluster's devices, the latest first, and gives those that
/// are in use. IO must still be served, so that each is written back whole.
fn unmount_volumes(layout: &Layout) -> Result<Vec<Mount>> {
    let mut busy = Vec::new();
    for device in Device::over(&layout.run())? {
        for mount in device.mounts()?.into_iter().rev() {
            if unmount(&mount.target, UnmountFlags::empty()).is_err() {
                busy.push(mount);
            }
        }
    }
    Ok(busy)
}

/// Waits until nobody uses the cluster's file systems and unmounts them. A further signal ends
/// the waiting: what they hold is written back, and their devices may go.
///
/// # Errors
/// File systems that were still in use then.
pub async fn let_go(layout: &Layout, ends: &mut Ends) -> Result<()> {
    let mut told = String::new();
    loop {
        let busy = unmount_volumes(layout)?;
        if busy.is_empty() {
            return Ok(());
        }
        let text = busy.iter().map(describe).collect::<Vec<_>>().join("; ");
        if text != told {
            say(&format!(
                "waiting: {text}. End these programs or leave the directory, and everything stops \
                 by itself. Ctrl-C again takes the device away: its programs then get IO errors"
            ));
            told = text;
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = ends.wait() => {
                write_back(&busy).await;
                for mount in busy.iter().rev() {
                    // From the tree now, wholly when its users let go.
                    let _ = unmount(&mount.target, UnmountFlags::DETACH);
                }
                anyhow::bail!("taken away while in use: {told}");
            }
        }
    }
}

fn describe(mount: &Mount) -> String {
    match mount.users().as_slice() {
        [] => format!("{} is in use", mount.target.display()),
        users => format!("{} is in use by {}", mount.target.display(), users.join(", ")),
    }
}

/// What programs have written goes to the volume before its device does; it is still served.
async fn write_back(mounts: &[Mount]) {
    say("writing back what the file systems hold, then taking the devices away");
    for mount in mounts {
        let target = mount.target.clone();
        let sync = tokio::task::spawn_blocking(move || {
            let directory = std::fs::File::open(&target)?;
            rustix::fs::syncfs(directory).map_err(std::io::Error::from)
        });
        match tokio::time::timeout(SYNC_BUDGET, sync).await {
            Ok(Ok(Ok(()))) => {}
            _ => say(&format!("{} could not be written back whole", mount.target.display())),
        }
    }
}

/// What becomes of a dead file system that somebody still uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum InUse {
    /// It stays, and says so: what is written below its directory must not land elsewhere.
    Stays,
    /// It goes from the tree now, and wholly when its users let go.
    Goes,
}

/// Frees what a killed cluster left: mounts, loop devices and FUSE mounts that nobody serves.
/// Called only when none of its processes runs. Gives the mounts that stay.
pub fn release_leftovers(layout: &Layout, in_use: InUse) -> Result<Vec<(Device, Mount)>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Vec::new());
    }
    let run = layout.run();
    // What is still served by somebody is his.
    let devices: Vec<_> = Device::over(&run)?.into_iter().filter(Device::is_dead).collect();
    for device in devices.iter().chain(&lost::recall(&run)) {
        for mount in device.mounts()?.iter().rev() {
            if unmount(&mount.target, UnmountFlags::empty()).is_err() && in_use == InUse::Goes {
                let _ = unmount(&mount.target, UnmountFlags::DETACH);
            }
        }
        device.free()?;
    }
    for mount in devices::mounts()?.iter().rev().filter(|mount| mount.target.starts_with(&run)) {
        if devices::is_dead(&mount.target) {
            let _ = unmount(&mount.target, UnmountFlags::DETACH);
        }
    }
    let used = devices.into_iter().filter(Device::still_there).collect();
    lost::remember(&run, used)?;
    let mut dead = Vec::new();
    for device in lost::recall(&run) {
        dead.extend(device.mounts()?.into_iter().map(|mount| (device.clone(), mount)));
    }
    Ok(dead)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_that_was_never_started_has_nothing_to_release() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        assert!(release_leftovers(&layout, InUse::Stays).unwrap().is_empty());
        assert!(unmount_volumes(&layout).unwrap().is_empty());
    }
}
