//! Paths of `quoin dev`, and where commands search for a controller.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// Socket addresses have 108 bytes; the longest name below the run directory is
/// `nbd/<32 hex digits>.sock`.
pub const ROOT_BYTES_MAX: usize = 107 - "/run/nbd/.sock".len() - 32;

/// Directory of one `quoin dev`, with everything in it: deleting it uninstalls all.
#[derive(Clone, Debug)]
pub struct Layout {
    root: PathBuf,
    /// The uppermost directory that [`Layout::open`] made, if it made any.
    made: Option<PathBuf>,
}

impl Layout {
    /// Makes the directory where it is missing.
    ///
    /// # Errors
    /// A path too long for sockets, one that cannot be made, or a directory of something else.
    pub fn open(root: &Path) -> Result<Self> {
        let root = std::path::absolute(root).with_context(|| format!("{}", root.display()))?;
        let shown = root.display().to_string();
        if root.as_os_str().len() > ROOT_BYTES_MAX {
            bail!(
                "{shown} is too long for the sockets below it: choose a shorter --dir (at most {ROOT_BYTES_MAX} bytes)"
            );
        }
        let missing = root.ancestors().take_while(|path| !path.exists()).last();
        let made = missing.map(Path::to_path_buf);
        std::fs::create_dir_all(&root).with_context(|| {
            format!("cannot make {shown}: choose a directory you may write with --dir")
        })?;
        let layout = Self { root, made };
        layout.refuse_foreign()?;
        // First of all that is made, since it marks the directory as ours if we die right after.
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(layout.lock())
            .with_context(|| format!("cannot write in {shown}: choose another --dir"))?;
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&layout.root, std::fs::Permissions::from_mode(0o700))
            .with_context(|| format!("{shown} belongs to another user: choose another --dir"))?;
        for directory in [layout.run(), layout.nbd(), layout.run().join("csi"), layout.logs()] {
            std::fs::create_dir_all(&directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
        }
        Ok(layout)
    }

    /// The places below `root`, without checking or making any.
    pub fn at(root: &Path) -> Self {
        Self { root: root.into(), made: None }
    }

    /// Removes what [`Layout::open`] made, where no cluster came of it. Directories with other
    /// content stay.
    pub fn discard_unused(&self) {
        if self.settings().exists() {
            return;
        }
        // A directory is removed only if it is empty: a failure means that it has other content.
        let _ = std::fs::remove_file(self.lock());
        for directory in [self.run().join("csi"), self.nbd(), self.run(), self.logs()] {
            let _ = std::fs::remove_dir(directory);
        }
        let Some(made) = &self.made else { return };
        for directory in self.root.ancestors().take_while(|path| path.starts_with(made)) {
            let _ = std::fs::remove_dir(directory);
        }
    }

    /// A directory with files in it that no `quoin dev` made is left alone.
    fn refuse_foreign(&self) -> Result<()> {
        if self.settings().exists() || self.lock().exists() {
            return Ok(());
        }
        let entries = std::fs::read_dir(&self.root)
            .with_context(|| format!("cannot read {}", self.root.display()))?;
        // A new ext4 file system is empty in spite of its own directory.
        let mut others = entries.flatten().filter(|entry| entry.file_name() != "lost+found");
        if let Some(entry) = others.next() {
            bail!(
                "{} holds other files ({}): choose an empty directory with --dir",
                self.root.display(),
                entry.file_name().to_string_lossy()
            );
        }
        Ok(())
    }

    pub fn root(&self) -> &Path {
        &self.root
    }
    pub fn lock(&self) -> PathBuf {
        self.root.join("dev.lock")
    }
    pub fn settings(&self) -> PathBuf {
        self.root.join("dev.json")
    }
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }
    pub fn nbd(&self) -> PathBuf {
        self.run().join("nbd")
    }
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }
    pub fn log(&self, process: &str) -> PathBuf {
        self.logs().join(format!("{process}.log"))
    }
    pub fn admin_socket(&self) -> PathBuf {
        self.run().join("admin.sock")
    }
    /// Socket for requests to the attach process.
    pub fn attach_socket(&self) -> PathBuf {
        self.run().join("attach/attach.sock")
    }
    pub fn holder_socket(&self) -> PathBuf {
        self.run().join("attach/holder.sock")
    }
    pub fn csi_socket(&self) -> PathBuf {
        self.run().join("csi/csi.sock")
    }
    pub fn csi_addons_socket(&self) -> PathBuf {
        self.run().join("csi-addons/csi-addons.sock")
    }
    /// Which process runs under which pid, for people and for the demo.
    pub fn processes(&self) -> PathBuf {
        self.run().join("processes.json")
    }
    pub fn controller(&self) -> PathBuf {
        self.root.join("controller")
    }
    /// Identity and data of one pool.
    pub fn pool(&self, name: &str) -> PathBuf {
        self.root.join("pools").join(name)
    }
    /// Data of a pool, apart from its identity.
    pub fn pool_data(&self, name: &str) -> PathBuf {
        self.pool(name).join("data")
    }
    /// While this file is there, the process of that name is not started again.
    pub fn hold(&self, process: &str) -> PathBuf {
        self.run().join(format!("hold-{process}"))
    }
    /// Identity of the mirror.
    pub fn mirror(&self) -> PathBuf {
        self.root.join("mirror")
    }
    /// The whole of a second cluster.
    pub fn peer(&self) -> PathBuf {
        self.root.join("peer")
    }
    /// Identity and records of the node; its target uses the same identity.
    pub fn node(&self) -> PathBuf {
        self.root.join("node")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_with_other_files_is_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("thesis.tex"), "x").unwrap();
        let message = Layout::open(directory.path()).unwrap_err().to_string();
        assert!(message.contains("thesis.tex") && message.contains("--dir"), "{message}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "something was made");
    }

    #[test]
    fn a_path_too_long_for_sockets_is_refused_before_anything_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let long = directory.path().join("x".repeat(90));
        let message = Layout::open(&long).unwrap_err().to_string();
        assert!(message.contains("too long"), "{message}");
        assert!(!long.exists());
    }

    #[test]
    fn a_refused_start_removes_its_own_files_and_keeps_all_others() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("a/b");
        Layout::open(&deep).unwrap().discard_unused();
        assert!(!directory.path().join("a").exists());
        let empty = directory.path().join("empty");
        std::fs::create_dir(&empty).unwrap();
        Layout::open(&empty).unwrap().discard_unused();
        assert_eq!(std::fs::read_dir(&empty).unwrap().count(), 0);
        let used = Layout::open(&deep).unwrap();
        std::fs::write(used.settings(), "{}").unwrap();
        used.discard_unused();
        assert!(used.lock().exists() && used.run().exists());
    }

    #[test]
    fn the_longest_socket_path_fits_an_address() {
        let root = PathBuf::from("/").join("r".repeat(ROOT_BYTES_MAX - 1));
        let socket = Layout::at(&root).nbd().join(format!("{}.sock", "0".repeat(32)));
        assert_eq!(socket.as_os_str().len(), 107);
    }
}
