//! Mounts and devices that a cluster would leave behind.
//!
//! A file system in use is never unmounted under its user: a stop waits and names the programs.
//! Only a second Ctrl-C takes the device away, after its content was written back. IO at a
//! standstill (its pools are full, or too few are there) is waited for only up to a limit: then the
//! device is taken away, with the reason.

use anyhow::Result;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::layout::Layout;
use super::{Ends, print_line};
use crate::client;
use crate::host::loop_devices::{self, Device, Mount, MountElsewhere};
use crate::host::lost;

/// How often a mount in use is tried again.
const RETRY: Duration = Duration::from_millis(500);
/// How long a forced stop writes back what file systems in use hold.
const SYNC_BUDGET: Duration = Duration::from_secs(15);
/// A device that has done nothing for so long, with something to do, is at a standstill.
const STANDSTILL: Duration = Duration::from_secs(20);
/// Waits longer than this are reported.
const SILENCE: Duration = Duration::from_secs(2);
/// How long the controller is asked for why.
const REASON_BUDGET: Duration = Duration::from_secs(3);

/// How far each device was when it last got on.
#[derive(Default)]
struct Progress(HashMap<PathBuf, (u64, Instant)>);

impl Progress {
    /// Returns true if the device gets nowhere, though it `has_work`; counted from its last IO.
    fn is_stalled(&mut self, device: &Device, has_work: bool) -> bool {
        let (done, in_flight) = device.io().unwrap_or_default();
        self.has_no_progress(&device.path, done, has_work || in_flight > 0, Instant::now())
    }

    fn has_no_progress(
        &mut self,
        device: &std::path::Path,
        done: u64,
        has_work: bool,
        now: Instant,
    ) -> bool {
        let seen = self.0.entry(device.into()).or_insert((done, now));
        if seen.0 != done || !has_work {
            *seen = (done, now);
        }
        now.duration_since(seen.1) >= STANDSTILL
    }
}

/// How an unmount went.
enum Unmounted {
    Yes,
    InUse,
    /// Waits for IO that makes no progress.
    Stuck,
}

/// Runs a call that may block in the kernel for ever; the receiver gets its result. The call has a
/// thread of its own, because at its end the runtime waits for the threads that it lends.
fn on_a_thread<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
) -> tokio::sync::oneshot::Receiver<T> {
    let (answer, reply) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // The caller may have stopped waiting.
        let _ = answer.send(call());
    });
    reply
}

async fn unmount_in_time(
    layout: &Layout,
    device: &Device,
    mount: &Mount,
    progress: &mut Progress,
) -> Unmounted {
    let target = mount.target.clone();
    // Content is written back first: an unmount does so only for the last mount of a file system,
    // and another table of mounts may have a copy.
    let mut outcome = on_a_thread(move || {
        let _ = sync(&target);
        unmount(&target, UnmountFlags::empty())
    });
    let (began, mut is_told) = (Instant::now(), false);
    loop {
        if !is_told && began.elapsed() > SILENCE {
            is_told = true;
            print_line(&waiting_for_io(layout, device, &mount.target).await);
        }
        match tokio::time::timeout(RETRY, &mut outcome).await {
            Ok(Ok(Ok(()))) => return Unmounted::Yes,
            Ok(_) => return Unmounted::InUse,
            Err(_) if progress.is_stalled(device, true) => return Unmounted::Stuck,
            Err(_) => {}
        }
    }
}

/// Writes back what the file system at a directory holds.
fn sync(directory: &std::path::Path) -> std::io::Result<()> {
    Ok(rustix::fs::syncfs(std::fs::File::open(directory)?)?)
}

/// A file system in use.
enum InUse {
    Here(Device, Mount),
    /// Only another table of mounts has it.
    Elsewhere(Device, Vec<MountElsewhere>),
}

impl InUse {
    fn describe(&self) -> String {
        match self {
            Self::Here(_, mount) => describe(mount),
            Self::Elsewhere(device, mounts) => {
                let shown = mounts.iter().map(|mount| {
                    format!("at {} in that of {}", mount.target.display(), mount.process)
                });
                let shown: Vec<_> = shown.take(5).collect();
                let at =
                    if shown.is_empty() { "location unknown".into() } else { shown.join(", ") };
                format!("{} is mounted in another mount namespace ({at})", device.path.display())
            }
        }
    }

    /// Directories by which it is written back.
    fn directories(&self) -> Vec<PathBuf> {
        match self {
            Self::Here(_, mount) => vec![mount.target.clone()],
            Self::Elsewhere(_, mounts) => {
                mounts.iter().map(|mount| mount.reachable_at.clone()).take(1).collect()
            }
        }
    }
}

/// Unmounts every file system on this cluster's devices, the latest first. Returns those that are
/// in use, and those whose devices are at a standstill. IO must still be served, so that each is
/// written back whole.
async fn unmount_volumes(
    layout: &Layout,
    progress: &mut Progress,
) -> Result<(Vec<InUse>, Vec<(Device, Mount)>)> {
    let (mut busy, mut stuck) = (Vec::new(), Vec::new());
    for device in Device::over(&layout.run())? {
        for mount in device.mounts()?.into_iter().rev() {
            match unmount_in_time(layout, &device, &mount, progress).await {
                Unmounted::Yes => print_line(&format!("unmounted {}", mount.target.display())),
                Unmounted::InUse if progress.is_stalled(&device, false) => {
                    stuck.push((device.clone(), mount));
                }
                Unmounted::InUse => busy.push(InUse::Here(device.clone(), mount)),
                Unmounted::Stuck => stuck.push((device.clone(), mount)),
            }
        }
        if device.mounts()?.is_empty() && device.is_held_by_a_file_system() {
            let reply = device.clone();
            let other_mounts = on_a_thread(move || reply.mounts_elsewhere());
            let other_mounts = tokio::time::timeout(REASON_BUDGET, other_mounts).await;
            let other_mounts = other_mounts.ok().and_then(Result::ok).unwrap_or_default();
            busy.push(InUse::Elsewhere(device, other_mounts));
        }
    }
    Ok((busy, stuck))
}

/// Devices without a file system whose IO does not seem to make progress, and those that are at a
/// standstill: their server cannot end before this IO is answered. A program that reads or writes
/// one without a pause is not waited for.
fn bare_devices(layout: &Layout, progress: &mut Progress) -> Result<(Vec<Device>, Vec<Device>)> {
    let (mut busy, mut stuck) = (Vec::new(), Vec::new());
    for device in Device::over(&layout.run())? {
        let (done, in_flight) = device.io().unwrap_or_default();
        if in_flight == 0 || !device.mounts()?.is_empty() {
            continue;
        }
        let gets_on = progress.0.get(&device.path).is_some_and(|(before, _)| *before != done);
        match progress.is_stalled(&device, true) {
            true => stuck.push(device),
            false if !gets_on => busy.push(device),
            false => {}
        }
    }
    Ok((busy, stuck))
}

/// Waits until no program uses the cluster's file systems and unmounts them. A further signal ends
/// the wait: their content is written back, and their devices may go. Devices at a standstill go by
/// themselves.
///
/// # Errors
/// File systems that were still in use then.
pub async fn release_devices(layout: &Layout, ends: &mut Ends) -> Result<()> {
    let mut reported = String::new();
    let mut problems = Vec::new();
    let mut progress = Progress::default();
    let mut cut = HashSet::new();
    let mut bare = HashMap::<PathBuf, Option<Instant>>::new();
    loop {
        let (busy, stuck) = unmount_volumes(layout, &mut progress).await?;
        for (device, mount) in &stuck {
            problems.push(at_standstill(layout, device, &mount.target).await);
            force_detach(device, mount).await;
        }
        let (bare_busy, mut bare_stuck) = bare_devices(layout, &mut progress)?;
        // Once for each device: a second attempt would not end it either.
        bare_stuck.retain(|device| cut.insert(device.path.clone()));
        for device in &bare_stuck {
            problems.push(at_standstill(layout, device, &device.path).await);
            cut_off(device).await;
        }
        if busy.is_empty() && stuck.is_empty() && bare_busy.is_empty() && bare_stuck.is_empty() {
            return match problems.is_empty() {
                true => Ok(()),
                false => Err(anyhow::anyhow!("{}", problems.join("; "))),
            };
        }
        let text = busy.iter().map(InUse::describe).collect::<Vec<_>>().join("; ");
        for device in &bare_busy {
            // `None`: reported already.
            let since = bare.entry(device.path.clone()).or_insert_with(|| Some(Instant::now()));
            if since.is_some_and(|since| since.elapsed() > SILENCE) {
                *since = None;
                print_line(&waiting_for_io(layout, device, &device.path).await);
            }
        }
        bare.retain(|path, _| bare_busy.iter().any(|device| device.path == *path));
        if text != reported && !busy.is_empty() {
            print_line(&format!(
                "waiting: {text}. End these programs or leave the directory, and everything stops \
                 by itself. Ctrl-C again takes the device away: its programs then get IO errors"
            ));
            reported = text;
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = ends.wait() => {
                write_back(&busy).await;
                for device in &bare_busy {
                    problems.push(format!("{} was detached by force", device.path.display()));
                    cut_off(device).await;
                }
                for used in busy.iter().rev() {
                    if let InUse::Here(_, mount) = used {
                        // From the tree now, wholly when its users let go.
                        let _ = unmount(&mount.target, UnmountFlags::DETACH);
                    }
                }
                if !busy.is_empty() {
                    problems.push(format!("detached by force while in use: {reported}"));
                }
                anyhow::bail!("{}", problems.join("; "));
            }
        }
    }
}

/// Message about a wait for IO that no program causes.
async fn waiting_for_io(layout: &Layout, device: &Device, path: &std::path::Path) -> String {
    let (path, reason) = (path.display(), wait_reason(layout, device).await);
    format!(
        "waiting: the IO of {path} makes no progress, since its volume waits for {reason}. If that \
         lasts {} s, it is detached by force, and its IO fails; Ctrl-C again does so now",
        STANDSTILL.as_secs()
    )
}

/// Reports that the device or mount at `path` is taken away, and the reason.
async fn at_standstill(layout: &Layout, device: &Device, path: &std::path::Path) -> String {
    let (path, reason) = (path.display(), wait_reason(layout, device).await);
    print_line(&format!("{path} makes no progress and is detached by force"));
    format!(
        "{path} was detached by force: its IO made no progress for {} s, since the volume waits \
         for {reason}; what was not synced may be lost",
        STANDSTILL.as_secs()
    )
}

/// Reason why the volume's IO waits, as the controller knows it.
async fn wait_reason(layout: &Layout, device: &Device) -> String {
    let ask = async {
        let mut cluster = client::connect(&layout.admin_socket()).await.ok()?;
        let volume = client::get_volume(&mut cluster, &device.volume).await.ok()?;
        Some(volume.waiting_for).filter(|waiting_for| !waiting_for.is_empty())
    };
    let reply = tokio::time::timeout(REASON_BUDGET, ask).await;
    reply.ok().flatten().unwrap_or_else(|| "an unknown reason (see the logs)".to_owned())
}

/// Fails the device's IO, so that no program waits for it any more.
async fn cut_off(device: &Device) {
    let device = device.clone();
    let cut = on_a_thread(move || device.cut_off());
    // Nothing more can be done about it.
    let _ = tokio::time::timeout(SYNC_BUDGET, cut).await;
}

/// Fails the device's IO, and takes the mount from the tree.
async fn force_detach(device: &Device, mount: &Mount) {
    cut_off(device).await;
    let target = mount.target.clone();
    let detached = on_a_thread(move || unmount(&target, UnmountFlags::DETACH));
    let _ = tokio::time::timeout(SYNC_BUDGET, detached).await;
}

/// Says what the attach process of an earlier supervisor holds on to; ends it if that is nothing.
pub fn report_leftovers(layout: &Layout, pid: Pid) {
    let devices = Device::over(&layout.run()).unwrap_or_default();
    if devices.is_empty() {
        let _ = kill_process(pid, Signal::TERM);
        return;
    }
    let shown = devices.iter().map(|device| {
        let mounts = device.mounts().unwrap_or_default();
        let on = mounts.iter().map(|mount| format!(" on {}", mount.target.display()));
        format!("{}{}", device.path.display(), on.collect::<String>())
    });
    print_line(&format!(
        "unchanged since the last `quoin dev`, which was killed: {}. Process {pid} holds their \
         IO until the next start, whose Ctrl-C takes them down",
        shown.collect::<Vec<_>>().join(", ")
    ));
}

fn describe(mount: &Mount) -> String {
    match mount.users().as_slice() {
        [] => format!("{} is in use", mount.target.display()),
        users => format!("{} is in use by {}", mount.target.display(), users.join(", ")),
    }
}

/// Writes back to the volume what programs have written, while its device is still served.
async fn write_back(busy: &[InUse]) {
    print_line("writing back the file systems, then detaching the devices");
    for used in busy {
        let directories = used.directories();
        let synced =
            on_a_thread(move || directories.iter().try_for_each(|directory| sync(directory)));
        if !matches!(tokio::time::timeout(SYNC_BUDGET, synced).await, Ok(Ok(Ok(())))) {
            let path = match used {
                InUse::Here(_, mount) => mount.target.display(),
                InUse::Elsewhere(device, _) => device.path.display(),
            };
            print_line(&format!("{path} could not be written back completely"));
            match used {
                InUse::Here(device, mount) => force_detach(device, mount).await,
                InUse::Elsewhere(device, _) => cut_off(device).await,
            }
        }
    }
}

/// Treatment of a dead file system.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Dead {
    /// Stays mounted and is reported, also while no program has it open: data written below its
    /// directory must not land elsewhere.
    Stays,
    /// Leaves the tree now, and is freed when its users close it.
    Goes,
}

/// Frees the leftovers of a killed cluster: mounts, loop devices, and FUSE mounts without a server.
/// Called only when none of its processes runs. Returns the mounts that stay.
pub fn release_leftovers(layout: &Layout, dead: Dead) -> Result<Vec<(Device, Mount)>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Vec::new());
    }
    let run = layout.run();
    // Devices that still have a server belong to it.
    let devices: Vec<_> = Device::over(&run)?.into_iter().filter(Device::is_dead).collect();
    for device in devices.iter().chain(&lost::recall(&run)) {
        let mounts = if dead == Dead::Goes { device.mounts()? } else { Vec::new() };
        for mount in mounts.iter().rev() {
            if unmount(&mount.target, UnmountFlags::empty()).is_err() {
                let _ = unmount(&mount.target, UnmountFlags::DETACH);
            }
        }
        device.free()?;
    }
    for mount in loop_devices::mounts()?.iter().rev().filter(|mount| mount.target.starts_with(&run))
    {
        if loop_devices::is_dead(&mount.target) {
            let _ = unmount(&mount.target, UnmountFlags::DETACH);
        }
    }
    let used = devices.into_iter().filter(Device::still_there).collect();
    lost::remember(&run, used)?;
    let mut stay = Vec::new();
    for device in lost::recall(&run) {
        stay.extend(device.mounts()?.into_iter().map(|mount| (device.clone(), mount)));
    }
    Ok(stay)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_with_pending_io_and_no_progress_is_stalled_after_a_while() {
        let mut progress = Progress::default();
        let mut has_no_progress = |done, has_work, seconds| {
            static BEGAN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
            let now = *BEGAN.get_or_init(Instant::now) + Duration::from_secs(seconds);
            progress.has_no_progress(std::path::Path::new("/dev/loop0"), done, has_work, now)
        };
        assert!(!has_no_progress(1, true, 0));
        assert!(!has_no_progress(1, true, 19));
        assert!(!has_no_progress(2, true, 20), "it got on");
        assert!(!has_no_progress(2, true, 39));
        assert!(has_no_progress(2, true, 40));
        assert!(!has_no_progress(2, false, 60), "it is only open");
        assert!(!has_no_progress(2, true, 79));
        assert!(has_no_progress(2, true, 80));
    }

    #[tokio::test]
    async fn a_cluster_that_was_never_started_has_nothing_to_release() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        assert!(release_leftovers(&layout, Dead::Stays).unwrap().is_empty());
        let (busy, stuck) = unmount_volumes(&layout, &mut Progress::default()).await.unwrap();
        assert!(busy.is_empty() && stuck.is_empty());
    }
}
