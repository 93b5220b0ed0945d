//! A disk of one pool's own, small enough to be filled: an ext4 file system in a sparse file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::files::run;

const IMAGE_BYTES: u64 = 8 << 30;
/// Smallest free space that is taken.
const CRUMB_BYTES: u64 = 4 << 10;

pub struct SmallDisk {
    pub mount: PathBuf,
}

impl SmallDisk {
    pub fn make(directory: &Path, name: &str) -> Result<Self> {
        let image = directory.join(format!("{name}.disk"));
        File::create(&image)?.set_len(IMAGE_BYTES)?;
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&image))?;
        let mount = directory.join(format!("disk-{name}"));
        std::fs::create_dir_all(&mount)?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount))?;
        Ok(Self { mount })
    }

    fn ballast(&self) -> PathBuf {
        self.mount.join("ballast")
    }

    /// Takes all free space.
    pub fn fill(&self) -> Result<()> {
        let path = self.ballast();
        let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let (mut at, mut step) = (0, IMAGE_BYTES);
        while step >= CRUMB_BYTES {
            match fallocate(&file, FallocateFlags::empty(), at, step) {
                Ok(()) => at += step,
                Err(Errno::NOSPC) => step /= 2,
                Err(error) => return Err(error).context("take the free space of a disk"),
            }
        }
        Ok(())
    }

    /// Frees the space again.
    pub fn relieve(&self) -> Result<()> {
        std::fs::remove_file(self.ballast()).context("give a disk its free space back")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A lazy unmount, in case that a process still reads files there.
        if let Err(error) = run(Command::new("umount").arg("-l").arg(&self.mount)) {
            eprintln!("{error:#}");
        }
    }
}
