//! This host: the kernel's devices that attaching needs, and what stands on them.

pub mod at_boot;
pub mod attacher;
pub mod loop_devices;
pub mod lost;
pub mod ports;

use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Succeeds if block devices can be made here.
///
/// # Errors
/// The obstacle, and the way out.
pub fn can_attach() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("attaching a block device needs root (sudo)".into());
    }
    check_device(Path::new("/dev/fuse"), (10, 229), "fuse")?;
    check_device(Path::new("/dev/loop-control"), (10, 237), "loop")
}

/// A file of that name is not enough: containers are given empty ones, or ones they may not open.
fn check_device(path: &Path, (major, minor): (u32, u32), module: &str) -> Result<(), String> {
    let shown = path.display();
    let Ok(found) = std::fs::metadata(path) else {
        return Err(format!(
            "there is no {shown}: load the kernel's module with `modprobe {module}`, or pass the \
             device into this container"
        ));
    };
    let is_it =
        found.file_type().is_char_device() && found.rdev() == rustix::fs::makedev(major, minor);
    if !is_it {
        return Err(format!(
            "{shown} is not the kernel's device: move it away and make it with \
             `mknod {shown} c {major} {minor}`"
        ));
    }
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!(
            "{shown} cannot be opened ({error}): load the module with `modprobe {module}`, or \
             allow this container to use the device"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_and_a_file_in_its_place_are_refused_with_the_way_out() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fuse");
        let message = check_device(&path, (10, 229), "fuse").unwrap_err();
        assert!(message.contains("there is no") && message.contains("modprobe fuse"), "{message}");
        std::fs::write(&path, "").unwrap();
        let message = check_device(&path, (10, 229), "fuse").unwrap_err();
        assert!(
            message.contains("not the kernel's device") && message.contains("mknod"),
            "{message}"
        );
        // Another device is not it either.
        let message = check_device(Path::new("/dev/null"), (10, 229), "fuse").unwrap_err();
        assert!(message.contains("not the kernel's device"), "{message}");
        check_device(Path::new("/dev/null"), (1, 3), "mem").unwrap();
    }
}
