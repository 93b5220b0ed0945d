//! Record of what the attach process has made on its host: loop devices, and links to them under
//! their volumes' names.
//!
//! Paths prove nothing. Two attach processes may run on one kernel in different mount namespaces,
//! with the same paths in each, and any program may free a loop device and use it for something
//! else. So each device is recorded with its sequence number before its path is reported, in a file
//! of this process's own directory. Only recorded devices are removed again.
//!
//! Links are in one directory (`/dev/quoin`) that such processes may share. A link is created,
//! replaced and removed only if it belongs to this process, or leads to a loop device that is free.
//!
//! systemd waits for a device of fstab until udev names it. So the link of each device is written for
//! udev too (`udev/loopN`, read by the rule of the package), and the kernel is asked to announce the
//! device again.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::fuse::mount;
use crate::loopdev::LoopDevice;

/// Limit of a file name.
const NAME_BYTES_MAX: usize = 255;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CreatedDevice {
    volume: String,
    path: PathBuf,
    sequence: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CreatedLink {
    volume: String,
    link: PathBuf,
    device: PathBuf,
}

/// Content of the file. Devices end with the kernel that has them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Content {
    #[serde(default)]
    boot: String,
    #[serde(default)]
    devices: Vec<CreatedDevice>,
    /// Volumes whose device is being made, and has no number yet.
    #[serde(default)]
    intended: Vec<String>,
    #[serde(default)]
    links: Vec<CreatedLink>,
    /// Devices of volumes that are attached no more, still there as programs had them open.
    #[serde(default)]
    spent: Vec<CreatedDevice>,
}

/// Kind of what is made for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MadeKind {
    Device,
    /// FUSE file below a device.
    File,
    Link,
}

/// A thing that an attach process has made for a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    pub volume: String,
    pub kind: MadeKind,
    pub path: PathBuf,
    /// A mount or a program has it, as far as the kernel shows that without an open of it.
    pub is_used: bool,
}

/// Returns what the attach process with this directory has made and not removed, as the kernel has it
/// now: by its record and by the table of mounts. Nothing of a volume is waited for.
#[must_use]
pub fn made_in(own: &Path) -> Vec<Made> {
    let created = Created::open(own, Path::new("/"));
    let content = created.lock();
    let mut found = Vec::new();
    for one in &content.devices {
        let device = LoopDevice::of(one.path.clone(), Some(one.sequence));
        if device.backing_file().is_some() && device.is_current() {
            found.push(one.made(device.is_held()));
        }
    }
    for one in &content.spent {
        // A number that was bound again is another's; one that is bound still waits for its last user.
        let device = LoopDevice::of(one.path.clone(), Some(one.sequence));
        let is_bound = device.backing_file().is_some();
        if device.is_current() || !is_bound && device.exists() {
            found.push(one.made(is_bound));
        }
    }
    for CreatedLink { volume, link, device } in &content.links {
        if points_to(link, device) {
            let (volume, path) = (volume.clone(), link.clone());
            found.push(Made { volume, kind: MadeKind::Link, path, is_used: false });
        }
    }
    let mounts = own.join("volumes");
    let mounts = mounts.canonicalize().unwrap_or(mounts);
    for path in mount::mounts_under(&mounts).unwrap_or_default() {
        let volume = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.push(Made { volume, kind: MadeKind::File, path, is_used: false });
    }
    found
}

impl CreatedDevice {
    fn made(&self, is_used: bool) -> Made {
        let (volume, path) = (self.volume.clone(), self.path.clone());
        Made { volume, kind: MadeKind::Device, path, is_used }
    }
}

/// The record, written to disk with every change.
pub(super) struct Created {
    file: PathBuf,
    /// Directory of the links.
    directory: PathBuf,
    content: Mutex<Content>,
}

impl Created {
    /// Reads the file in `own`, as far as it is of this boot. An unreadable file names nothing.
    pub(super) fn open(own: &Path, links: &Path) -> Self {
        let file = own.join("made.json");
        let boot = boot();
        let found = fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let found = found.filter(|content: &Content| content.boot == boot).unwrap_or_default();
        let content = Mutex::new(Content { boot, ..found });
        Self { file, directory: links.to_owned(), content }
    }

    /// Returns the devices that this process, or one before it, has made and not removed, but for those
    /// of volumes in `attached`; `mounts` is the directory of their files.
    pub(super) fn devices_but(
        &self,
        attached: &[String],
        mounts: &Path,
    ) -> io::Result<Vec<LoopDevice>> {
        let content = self.lock();
        let known =
            |created: &CreatedDevice| LoopDevice::of(created.path.clone(), Some(created.sequence));
        let is_left = |created: &&CreatedDevice| !attached.contains(&created.volume);
        let mut devices: Vec<_> = content.devices.iter().filter(is_left).map(known).collect();
        // Only the path is known for a device whose process was killed while it made the device.
        if !content.intended.is_empty() {
            let intended = content.intended.iter().filter(|volume| !attached.contains(volume));
            let files: Vec<_> = intended.map(|volume| mounts.join(volume)).collect();
            let found = LoopDevice::list_under(mounts)?;
            let matches =
                |found: &LoopDevice| found.backing_file().is_some_and(|f| files.contains(&f));
            devices.extend(found.into_iter().filter(matches));
        }
        Ok(devices)
    }

    /// Records that a device is about to be made.
    pub(super) fn record_intent(&self, volume: &str) -> io::Result<()> {
        let mut content = self.lock();
        remove_spent(&mut content);
        content.intended.push(volume.to_owned());
        self.write(&content)
    }

    /// Records a device as made here.
    pub(super) fn add(&self, volume: &str, device: &LoopDevice) -> io::Result<()> {
        // A kernel without sequence numbers (before Linux 5.15) leaves only the path.
        let Some(sequence) = device.sequence() else { return Ok(()) };
        let created =
            CreatedDevice { volume: volume.to_owned(), path: device.path().to_owned(), sequence };
        let mut content = self.lock();
        content.intended.retain(|intended| intended != volume);
        content.devices.retain(|known| known.volume != volume && known.path != created.path);
        content.devices.push(created);
        self.write(&content)
    }

    /// Forgets a volume's device, and removes its link.
    pub(super) fn remove(&self, volume: &str) {
        let mut content = self.lock();
        let spent: Vec<CreatedDevice>;
        (spent, content.devices) = std::mem::take(&mut content.devices)
            .into_iter()
            .partition(|known| known.volume == volume);
        spent.iter().for_each(|device| self.forget_for_udev(&device.path));
        content.spent.extend(spent);
        remove_spent(&mut content);
        content.intended.retain(|intended| intended != volume);
        let (gone, keep_bound) = std::mem::take(&mut content.links)
            .into_iter()
            .partition(|created| created.volume == volume);
        content.links = keep_bound;
        let gone: Vec<CreatedLink> = gone;
        gone.iter().for_each(remove_link);
        // Seldom there.
        let _ = fs::remove_file(self.beside(volume));
        if let Err(error) = self.write(&content) {
            tracing::warn!(file = %self.file.display(), %error, "cannot be written");
        }
    }

    /// Removes devices of ended attachments that no program has open any more.
    pub(super) fn remove_spent(&self) {
        let mut content = self.lock();
        remove_spent(&mut content);
        if let Err(error) = self.write(&content) {
            tracing::warn!(file = %self.file.display(), %error, "cannot be written");
        }
    }

    /// Returns the recorded device of a volume that has no attachment, if the kernel has it still.
    pub(super) fn device_of(&self, volume: &str) -> Option<LoopDevice> {
        let content = self.lock();
        let created = content.devices.iter().find(|created| created.volume == volume)?;
        Some(LoopDevice::of(created.path.clone(), Some(created.sequence)))
    }

    /// Removes what is left of volumes that are not among `attached`.
    pub(super) fn remove_all_but(&self, attached: &[String]) {
        remove_spent(&mut self.lock());
        let gone: Vec<String> = {
            let content = self.lock();
            let devices = content.devices.iter().map(|created| &created.volume);
            let all = devices.chain(&content.intended);
            let all = all.chain(content.links.iter().map(|created| &created.volume));
            all.filter(|volume| !attached.contains(volume)).cloned().collect()
        };
        gone.iter().for_each(|volume| self.remove(volume));
    }

    /// Links the volume's name to its device.
    ///
    /// # Errors
    /// The obstacle, as text.
    pub(super) fn link(&self, volume: &str, name: &str, device: &Path) -> Result<PathBuf, String> {
        let file_name = file_name(name).ok_or_else(|| {
            format!(
                "the name of volume {volume} is too long for a file name, so the volume has no link"
            )
        })?;
        let link = self.directory.join(file_name);
        let wanted = CreatedLink {
            volume: volume.to_owned(),
            link: link.clone(),
            device: device.to_owned(),
        };
        let mut content = self.lock();
        if content.links.contains(&wanted) && points_to(&link, device) {
            self.tell_udev(&link, device);
            return Ok(link);
        }
        let failed = |error: io::Error| format!("cannot make {}: {error}", link.display());
        fs::create_dir_all(&self.directory).map_err(failed)?;
        let is_ours = |found: &Path| {
            let known = |created: &CreatedLink| created.link == link && created.device == found;
            content.links.iter().any(known)
        };
        match fs::read_link(&link) {
            Ok(found) if found == device || is_ours(&found) || is_free(&found) => {}
            Ok(found) => {
                let (link, found) = (link.display(), found.display());
                return Err(format!(
                    "{link} points to {found}, which is in use: the link is not replaced"
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => return Err(format!("{} is not a link and is not replaced", link.display())),
        }
        // The link is created under another name first, so that it exists at every moment.
        let beside = self.beside(volume);
        let _ = fs::remove_file(&beside);
        std::os::unix::fs::symlink(device, &beside)
            .and_then(|()| fs::rename(&beside, &link))
            .map_err(failed)?;
        let former: Vec<CreatedLink> = {
            let all = std::mem::take(&mut content.links);
            let (of_volume, others) = all.into_iter().partition(|created| created.volume == volume);
            content.links = others;
            of_volume
        };
        former.iter().filter(|created| created.link != link).for_each(remove_link);
        content.links.retain(|created| created.link != link);
        content.links.push(wanted);
        self.write(&content).map_err(failed)?;
        self.tell_udev(&link, device);
        Ok(link)
    }

    /// The other name of a link in the making. A process that is killed then leaves it: the next one finds it by
    /// the volume alone.
    fn beside(&self, volume: &str) -> PathBuf {
        self.directory.join(format!(".{volume}.new"))
    }

    /// Where udev finds the name of a device.
    fn udev_file(&self, device: &Path) -> Option<PathBuf> {
        Some(self.file.with_file_name("udev").join(device.file_name()?))
    }

    /// Has udev name the device by its link too. A host without udev ignores it.
    fn tell_udev(&self, link: &Path, device: &Path) {
        let (Some(file), Some(name)) = (self.udev_file(device), device.file_name()) else { return };
        let text = format!("SYSTEMD_ALIAS={}\n", link.display());
        if fs::read_to_string(&file).is_ok_and(|present| present == text) {
            return;
        }
        let written = file.parent().map_or(Ok(()), fs::create_dir_all);
        if let Err(error) = written.and_then(|()| fs::write(&file, text)) {
            tracing::warn!(file = %file.display(), %error, "cannot be written");
            return;
        }
        // Where this is refused, udev reads the file with the next change of the device.
        let _ = fs::write(Path::new("/sys/block").join(name).join("uevent"), "change");
    }

    /// The next device of this number is another's.
    fn forget_for_udev(&self, device: &Path) {
        if let Some(file) = self.udev_file(device) {
            let _ = fs::remove_file(file);
        }
    }

    /// Returns the link of a volume to this device, if it exists.
    pub(super) fn link_of(&self, volume: &str, device: &Path) -> Option<PathBuf> {
        let content = self.lock();
        let created = content.links.iter().find(|created| created.volume == volume)?;
        points_to(&created.link, device).then(|| created.link.clone())
    }

    fn write(&self, content: &Content) -> io::Result<()> {
        let text = serde_json::to_vec(content)?;
        let beside = self.file.with_extension("json.new");
        fs::write(&beside, text)?;
        fs::rename(&beside, &self.file)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Removes the devices that no program has open any more.
fn remove_spent(content: &mut Content) {
    content.spent.retain(|one| !LoopDevice::of(one.path.clone(), Some(one.sequence)).remove());
}

fn points_to(link: &Path, device: &Path) -> bool {
    fs::read_link(link).is_ok_and(|found| found == device)
}

fn remove_link(created: &CreatedLink) {
    if points_to(&created.link, &created.device) {
        // A link that stays is replaced by the next one.
        let _ = fs::remove_file(&created.link);
    }
}

/// Returns true if `device` is a loop device that is bound to no file, or to one whose mount is
/// gone: a link to it is stale.
fn is_free(device: &Path) -> bool {
    let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_loop = name
        .strip_prefix("loop")
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    is_loop
        && device.parent() == Some(Path::new("/dev"))
        && LoopDevice::at(device.to_owned())
            .backing_file()
            .is_none_or(|file| file == Path::new("/"))
}

/// Converts a volume's name to a file name. Characters that could make it a path, or that need
/// quoting in a shell, are written as `%` and two hex digits; `None` if the result is too long.
pub fn file_name(name: &str) -> Option<String> {
    let mut plain = String::with_capacity(name.len());
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'.' if at == 0 => plain.push_str("%2E"),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'+' | b':' | b'@' => {
                plain.push(char::from(byte));
            }
            other => plain.push_str(&format!("%{other:02X}")),
        }
    }
    (1..=NAME_BYTES_MAX).contains(&plain.len()).then_some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_volume_name_becomes_a_file_name_of_its_own() {
        assert_eq!(file_name("db-1.x").as_deref(), Some("db-1.x"));
        assert_eq!(file_name("../etc/passwd").as_deref(), Some("%2E.%2Fetc%2Fpasswd"));
        assert_eq!(file_name(".").as_deref(), Some("%2E"));
        assert_eq!(file_name("a b").as_deref(), Some("a%20b"));
        assert_eq!(file_name("a%20b").as_deref(), Some("a%2520b"));
        assert_eq!(file_name("größe").as_deref(), Some("gr%C3%B6%C3%9Fe"));
        assert_eq!(file_name(""), None);
        assert_eq!(file_name(&"ü".repeat(64)), None);
    }

    #[test]
    fn a_link_is_replaced_and_removed_only_if_it_is_our_own_or_stale() {
        let directory = tempfile::tempdir().unwrap();
        let links = directory.path().join("links");
        let created = Created::open(directory.path(), &links);
        let free = Path::new("/dev/loop4000001");
        let link = created.link("1", "db", free).unwrap();
        assert_eq!(link, links.join("db"));
        assert_eq!(created.link_of("1", free), Some(link.clone()));

        // The next process recognizes it as its own, with another device.
        let created = Created::open(directory.path(), &links);
        let next = Path::new("/dev/loop4000002");
        assert_eq!(created.link("1", "db", next), Ok(link.clone()));
        assert_eq!(fs::read_link(&link).unwrap(), next);
        let told = |device: &str| fs::read_to_string(directory.path().join("udev").join(device));
        let alias = format!("SYSTEMD_ALIAS={}\n", link.display());
        assert_eq!(told("loop4000002").unwrap(), alias, "systemd waits for the link too");
        // The former link is removed when the name changes.
        let renamed = created.link("1", "db2", next).unwrap();
        assert!(!link.exists() && fs::symlink_metadata(&link).is_err());
        // A process that was killed while it made the link.
        std::os::unix::fs::symlink(next, created.beside("1")).unwrap();
        created.remove("1");
        assert!(fs::symlink_metadata(&renamed).is_err());
        assert_eq!(fs::read_dir(&links).unwrap().count(), 0);

        // A file that is no link, and a link to something that exists, stay.
        fs::write(links.join("file"), "kept").unwrap();
        assert!(created.link("2", "file", free).unwrap_err().contains("not a link"));
        std::os::unix::fs::symlink("/dev/null", links.join("null")).unwrap();
        assert!(created.link("2", "null", free).unwrap_err().contains("not replaced"));
        assert_eq!(fs::read_link(links.join("null")).unwrap(), Path::new("/dev/null"));
        // A link to a free loop device was left by an earlier process.
        std::os::unix::fs::symlink(next, links.join("stale")).unwrap();
        created.link("2", "stale", free).unwrap();
        // A link that another program changed meanwhile is not removed.
        fs::remove_file(links.join("stale")).unwrap();
        std::os::unix::fs::symlink("/dev/null", links.join("stale")).unwrap();
        created.remove("2");
        assert!(fs::symlink_metadata(links.join("stale")).is_ok());
    }

    /// The process may be killed between making a device and recording its number.
    #[test]
    fn an_intended_device_is_recorded_until_it_is_made_or_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Created::open(directory.path(), &directory.path().join("links"));
        let intended = || open().lock().intended.clone();
        let created = open();
        created.record_intent("1").unwrap();
        created.record_intent("2").unwrap();
        assert_eq!(intended(), ["1", "2"]);
        created.add("1", &LoopDevice::of("/dev/loop4000001".into(), Some(3))).unwrap();
        assert_eq!(intended(), ["2"]);
        assert_eq!(open().lock().devices.len(), 1);
        created.remove("2");
        assert_eq!(intended(), [""; 0]);
    }

    #[test]
    fn records_of_another_boot_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("made.json");
        let mounts = directory.path();
        let text =
            r#"{"boot":"another","devices":[{"volume":"1","path":"/dev/loop0","sequence":1}]}"#;
        fs::write(&file, text).unwrap();
        let found = || {
            Created::open(mounts, Path::new("/dev/quoin")).devices_but(&[], mounts).unwrap().len()
        };
        assert_eq!(found(), 0);
        fs::write(&file, text.replace("another", &boot())).unwrap();
        assert_eq!(found(), 1);
        fs::write(&file, "{").unwrap();
        assert_eq!(found(), 0);
    }
}
