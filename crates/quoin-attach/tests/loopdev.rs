//! Loop devices on plain files of this kernel. These tests need root and /dev/loop-control, and
//! report it if they are missing.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::daemon::{have_requirements, sh};
use quoin_attach::loopdev::{LoopDevice, LoopError};

const BYTES: u64 = 1 << 20;
/// Long enough to detect a call that waits for it.
const WAIT: Duration = Duration::from_secs(20);

struct Scratch {
    _directory: tempfile::TempDir,
    file: PathBuf,
    device: LoopDevice,
}

impl Scratch {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("disk");
        File::create(&file).unwrap().set_len(BYTES).unwrap();
        let device = LoopDevice::attach(&file, 4096, false).unwrap();
        Self { _directory: directory, file, device }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = self.device.release();
    }
}

/// Returns true if nothing uses the device. A process that another test starts has a copy of each
/// descriptor until it executes its program: this waits for that.
fn is_free(device: &LoopDevice) -> bool {
    let start = Instant::now();
    while device.in_use().unwrap() {
        if start.elapsed() > WAIT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

fn wait_until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < WAIT);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_open_device_is_in_use_and_its_detach_fails_at_once_without_a_change() {
    if !have_requirements() {
        return;
    }
    let scratch = Scratch::new();
    let device = &scratch.device;
    assert!(device.is_bound_to(&scratch.file) && is_free(device));
    let mut exclusive = OpenOptions::new();
    exclusive.read(true).custom_flags(libc::O_EXCL);
    let held = exclusive.open(device.path()).unwrap();
    assert!(device.in_use().unwrap());
    let start = Instant::now();
    let refused = device.detach(WAIT);
    assert!(matches!(refused, Err(LoopError::Busy { .. })), "{refused:?}");
    assert!(start.elapsed() < WAIT, "a busy device is detected without a wait");
    drop(held);
    // The device was not released: it stays after its last user.
    assert!(device.is_bound_to(&scratch.file) && is_free(device));
    assert!(device.detach(WAIT).unwrap());
    assert_eq!(device.backing_file(), None);
}

#[test]
fn a_device_that_is_open_stays_after_the_timeout_and_a_free_one_is_detached() {
    if !have_requirements() {
        return;
    }
    let scratch = Scratch::new();
    let device = &scratch.device;
    let open = File::open(device.path()).unwrap();
    let refused = device.detach(Duration::from_millis(20));
    assert!(matches!(refused, Err(LoopError::Busy { .. })), "{refused:?}");
    drop(open);
    assert!(device.is_bound_to(&scratch.file), "the device was removed with its last user");
    assert!(device.detach(WAIT).unwrap());
}

#[test]
fn a_device_that_is_already_free_is_released_and_detached_without_an_error() {
    if !have_requirements() {
        return;
    }
    let scratch = Scratch::new();
    scratch.device.release().unwrap();
    let start = Instant::now();
    while scratch.device.backing_file().is_some() {
        assert!(start.elapsed() < WAIT);
        std::thread::sleep(Duration::from_millis(1));
    }
    scratch.device.release().unwrap();
    assert!(scratch.device.detach(WAIT).unwrap());
    // Any binding under the path, as for a kernel without sequence numbers.
    LoopDevice::at(scratch.device.path().to_owned()).release().unwrap();
}

fn sysfs(device: &LoopDevice) -> PathBuf {
    PathBuf::from("/sys/block").join(device.path().file_name().unwrap())
}

fn partitions(device: &LoopDevice) -> usize {
    let entries = std::fs::read_dir(sysfs(device)).into_iter().flatten().flatten();
    entries.filter(|entry| entry.path().join("partition").exists()).count()
}

fn setting(device: &LoopDevice, name: &str) -> String {
    std::fs::read_to_string(sysfs(device).join(name)).unwrap().trim().to_owned()
}

/// State that the kernel keeps with the number of a device is that of one use alone.
#[test]
fn nothing_that_a_user_set_on_a_device_is_there_at_the_next_use_of_its_number() {
    if !have_requirements() {
        return;
    }
    let all = |device: &LoopDevice| {
        ["ro", "queue/read_ahead_kb", "queue/scheduler", "queue/nr_requests", "queue/rotational"]
            .map(|name| setting(device, name))
    };
    let first = Scratch::new();
    let fresh = all(&first.device);
    let path = first.device.path().display();
    sh(&format!("addpart {path} 1 8 64; addpart {path} 2 128 64"));
    sh(&format!("blockdev --setro --setra 2222 {path}"));
    sh(&format!("echo 1 >{}/queue/rotational", sysfs(&first.device).display()));
    assert_eq!(partitions(&first.device), 2);
    assert_ne!(all(&first.device), fresh);
    // A mounted partition holds the device as the whole one would.
    assert!(is_free(&first.device) && first.device.detach(WAIT).unwrap());
    assert_eq!(partitions(&first.device), 0, "they are left");
    let second = Scratch::new();
    assert_eq!(partitions(&second.device), 0);
    assert_eq!(all(&second.device), fresh, "{}", second.device.path().display());
}

#[test]
fn a_mounted_partition_holds_its_device_and_goes_with_the_last_user_of_a_released_one() {
    if !have_requirements() {
        return;
    }
    let scratch = Scratch::new();
    let device = &scratch.device;
    let path = device.path().display();
    sh(&format!("addpart {path} 1 8 1024; mkfs.ext4 -q -F {path}p1"));
    let at = scratch.file.with_file_name("mounted");
    std::fs::create_dir(&at).unwrap();
    sh(&format!("mount {path}p1 {}", at.display()));
    assert!(device.is_held() && device.in_use().unwrap());
    let refused = device.detach(WAIT);
    assert!(matches!(refused, Err(LoopError::Busy { .. })), "{refused:?}");
    device.release().unwrap();
    assert!(!device.remove(), "it is in use");
    sh(&format!("umount {}", at.display()));
    let start = Instant::now();
    while !device.remove() {
        assert!(start.elapsed() < WAIT);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(partitions(device), 0);
}

/// A program that is given the number while the device stays must not find what the former use left.
#[test]
fn a_device_that_a_program_keeps_open_after_its_use_loses_its_partitions_and_is_removed_later() {
    if !have_requirements() {
        return;
    }
    let scratch = Scratch::new();
    let device = &scratch.device;
    sh(&format!("addpart {} 1 8 64", device.path().display()));
    assert!(is_free(device));
    device.release().unwrap();
    wait_until(|| device.backing_file().is_none());
    assert_eq!(partitions(device), 1, "the kernel keeps them");
    let open = File::open(device.path()).unwrap();
    assert!(!device.remove(), "a program has it open");
    assert_eq!(partitions(device), 0, "they are left");
    drop(open);
    wait_until(|| device.remove());
}
