//! Loop devices over sparse files: the kernel keeps them, so a new plugin finds them again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use quoin_node::{AttachRequest, Attacher, Error, Session};

pub struct LoopAttacher {
    directory: PathBuf,
    /// Number of devices made so far.
    pub made: AtomicUsize,
    /// Questions about sessions get no answer.
    pub is_silent: AtomicBool,
    /// Devices are not made, and their requests get no answer.
    pub is_stuck: AtomicBool,
    /// Devices have no session.
    pub is_cut_off: AtomicBool,
    /// Every request is refused, as where no attach process runs.
    pub is_away: AtomicBool,
    /// Why all IO of the devices fails; `None`: they work.
    pub dead: Mutex<Option<String>>,
}

impl LoopAttacher {
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            made: AtomicUsize::new(0),
            is_silent: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            is_cut_off: AtomicBool::new(false),
            is_away: AtomicBool::new(false),
            dead: Mutex::default(),
        }
    }

    pub fn is_possible() -> bool {
        let id = Command::new("id").arg("-u").output().unwrap().stdout;
        id == b"0\n" && Path::new("/dev/loop-control").exists()
    }

    fn file(&self, volume: &str) -> PathBuf {
        self.directory.join(volume)
    }

    /// `losetup -j` is not used: it opens every loop device of the host and blocks on a device
    /// whose server is away.
    fn find(&self, volume: &str) -> Option<PathBuf> {
        let file = self.file(volume);
        let is_on = |device: &std::fs::DirEntry| {
            let text = std::fs::read_to_string(device.path().join("loop/backing_file"));
            text.is_ok_and(|text| Path::new(text.trim_end_matches('\n')) == file)
        };
        let device = std::fs::read_dir("/sys/block").ok()?.flatten().find(is_on)?;
        Some(Path::new("/dev").join(device.file_name()))
    }

    fn volumes(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(&self.directory) else { return Vec::new() };
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
    }

    pub fn attached(&self) -> Vec<PathBuf> {
        self.volumes().iter().filter_map(|volume| self.find(volume)).collect()
    }

    pub fn detach_all(&self) {
        for device in self.attached() {
            let _ = Command::new("losetup").arg("-d").arg(device).status();
        }
    }
}

/// Returns true if the kernel removes a loop device once nobody has it open any more.
fn is_leaving(device: &Path) -> bool {
    let name = device.file_name().unwrap();
    let flag = Path::new("/sys/block").join(name).join("loop/autoclear");
    std::fs::read_to_string(flag).is_ok_and(|flag| flag.trim() == "1")
}

#[tonic::async_trait]
impl Attacher for LoopAttacher {
    async fn attach(&self, request: &AttachRequest) -> Result<PathBuf, Error> {
        while self.is_stuck.load(Ordering::Relaxed) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        // A device that is half removed is still listed, and has no size in a moment.
        while let Some(device) = self.find(&request.volume) {
            if !is_leaving(&device) {
                return Ok(device);
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let path = self.file(&request.volume);
        let file = File::options().create(true).append(true).open(&path).unwrap();
        if file.metadata().unwrap().len() < request.size_bytes {
            file.set_len(request.size_bytes).unwrap();
        }
        self.made.fetch_add(1, Ordering::Relaxed);
        let mut command = Command::new("losetup");
        if request.read_only {
            command.arg("-r");
        }
        let output = command.args(["-f", "--show"]).arg(&path).output().unwrap();
        if !output.status.success() {
            return Err(Error::Attach(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        Ok(String::from_utf8(output.stdout).unwrap().trim().into())
    }

    async fn detach(&self, volume: &str) -> Result<(), Error> {
        // The next device is of a new use.
        *self.dead.lock().unwrap() = None;
        for _ in 0..100 {
            let Some(device) = self.find(volume) else { return Ok(()) };
            let _ = Command::new("losetup").arg("-d").arg(device).output();
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        Err(Error::Attach(format!("the loop device of {volume} is not removed")))
    }

    async fn resize(&self, volume: &str, size_bytes: u64) -> Result<(), Error> {
        let file = File::options().append(true).open(self.file(volume)).unwrap();
        file.set_len(size_bytes).unwrap();
        if let Some(device) = self.find(volume) {
            Command::new("losetup").arg("-c").arg(device).status().unwrap();
        }
        Ok(())
    }

    async fn device(&self, volume: &str) -> Result<Option<PathBuf>, Error> {
        if self.is_away.load(Ordering::Relaxed) {
            return Err(Error::Attach("no attach process runs".to_owned()));
        }
        Ok(self.find(volume))
    }

    async fn session(&self, volume: &str) -> Result<Session, Error> {
        if self.is_silent.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let device = self.device(volume).await?;
        let is_connected = !self.is_cut_off.load(Ordering::Relaxed);
        Ok(Session { device, is_connected, dead: self.dead(volume).await? })
    }

    async fn dead(&self, _volume: &str) -> Result<Option<String>, Error> {
        Ok(self.dead.lock().unwrap().clone())
    }
}
