//! Lock of a directory, for one `quoin dev` at a time.

use anyhow::{Context, Result, bail};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};

use super::layout::Layout;

/// Held for as long as the file is open; the kernel releases it even after `kill -9`.
pub struct Lock(#[expect(dead_code, reason = "held, not read")] File);

/// Takes the directory, or names the process that has it.
pub fn take(layout: &Layout) -> Result<Lock> {
    let path = layout.lock();
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    use rustix::fs::{FlockOperation, flock};
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut pid = String::new();
        // The number only makes the message better; the lock itself is the kernel's.
        let _ = file.read_to_string(&mut pid);
        bail!(
            "another `quoin dev` (process {}) runs in {}: use it, stop it, or choose another --dir",
            pid.trim(),
            layout.root().display()
        );
    }
    let write = |file: &mut File| {
        file.rewind()?;
        file.set_len(0)?;
        writeln!(file, "{}", std::process::id())
    };
    write(&mut file).with_context(|| format!("write {}", path.display()))?;
    Ok(Lock(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_instance_is_refused_by_pid_and_the_next_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::open(directory.path()).unwrap();
        let first = take(&layout).unwrap();
        let message = take(&layout).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(&std::process::id().to_string()), "{message}");
        drop(first);
        take(&layout).unwrap();
    }
}
