//! Volumes that a host attaches at each boot: what `quoin volume attach --at-boot` writes to
//! `/etc`.
//!
//! A volume has a file in `/etc/quoin/volumes`, an instance of `quoin-volume@.service` that quoin.target
//! wants, and, where it is to be mounted, a line in `/etc/fstab` that requires this instance. The
//! records of the cluster say already that the volume is attached to this host, so its target serves
//! it after a boot, and no controller has to be asked.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const FORMAT: u32 = 1;
/// systemd takes no longer name of a unit.
const UNIT_NAME_BYTES_MAX: usize = 255;
const WANTS: &str = "systemd/system/quoin.target.wants";
const UNIT_FILE: &str = "/lib/systemd/system/quoin-volume@.service";
/// Option of a line in fstab that mount ignores: names the volume of the line.
const MARK: &str = "x-quoin.volume=";

/// A volume that is attached at boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AtBoot {
    pub format: u32,
    /// The volume's name.
    pub volume: String,
    pub id: String,
    pub block_size: u32,
    pub read_only: bool,
    /// Where its file system is mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<PathBuf>,
}

/// File system of a block device.
struct FileSystem {
    uuid: String,
    kind: String,
}

impl AtBoot {
    pub fn new(volume: &str, id: &str, block_size: u32, read_only: bool) -> Self {
        let (volume, id) = (volume.to_owned(), id.to_owned());
        Self { format: FORMAT, volume, id, block_size, read_only, mount: None }
    }

    /// The instance of the unit: the volume's name, or its id where that makes too long a name.
    fn instance(&self) -> String {
        instance_of(&self.volume, &self.id)
    }

    fn unit(&self) -> String {
        unit_of(&self.instance())
    }
}

fn unit_of(instance: &str) -> String {
    format!("quoin-volume@{instance}.service")
}

fn instance_of(name: &str, id: &str) -> String {
    let escaped = escape(name);
    if unit_of(&escaped).len() <= UNIT_NAME_BYTES_MAX { escaped } else { id.to_owned() }
}

/// Escapes a name like systemd-escape(1): characters that the name of a unit cannot have become
/// `\xHH`, a slash a dash.
fn escape(name: &str) -> String {
    let mut escaped = String::with_capacity(name.len());
    for (index, byte) in name.bytes().enumerate() {
        match byte {
            b'/' => escaped.push('-'),
            b'.' if index == 0 => escaped.push_str("\\x2e"),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b':' | b'_' | b'.' => {
                escaped.push(char::from(byte));
            }
            // Writing into a string does not fail.
            other => drop(write!(escaped, "\\x{other:02x}")),
        }
    }
    escaped
}

/// A field of fstab: blanks, backslashes and what begins a comment are octal.
fn fstab_field(text: &str) -> String {
    let mut field = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            ' ' | '\t' | '\n' | '\\' | '#' => drop(write!(field, "\\{:03o}", letter as u32)),
            other => field.push(other),
        }
    }
    field
}

/// The directory below which all is written: `/etc`, but in tests.
#[derive(Clone, Debug)]
pub struct Etc(PathBuf);

impl Default for Etc {
    fn default() -> Self {
        Self("/etc".into())
    }
}

impl Etc {
    fn record(&self, instance: &str) -> PathBuf {
        self.0.join("quoin/volumes").join(format!("{instance}.json"))
    }

    fn link(&self, instance: &str) -> PathBuf {
        self.0.join(WANTS).join(unit_of(instance))
    }

    fn fstab(&self) -> PathBuf {
        self.0.join("fstab")
    }

    /// The volume of that name, where it is attached at boot.
    pub fn find(&self, volume: &str, id: &str) -> Result<Option<AtBoot>> {
        let path = self.record(&instance_of(volume, &escape(id)));
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        let shown = path.display();
        let found: AtBoot = serde_json::from_slice(&text).with_context(|| {
            format!("{shown} is damaged: run `quoin volume attach --at-boot` again")
        })?;
        if found.format > FORMAT {
            bail!("{shown} is of a newer Quoin (format {}): use that one", found.format);
        }
        Ok(Some(found))
    }

    /// Refuses a place that something else is mounted on at boot.
    pub fn check_mount(&self, volume: &AtBoot, mount: &Path) -> Result<()> {
        let shown = mount.display();
        if !mount.is_absolute() {
            bail!("--mount {shown} is not absolute: name the whole path, as in /srv/db");
        }
        let field = fstab_field(&mount.to_string_lossy());
        let text = fs::read_to_string(self.fstab()).unwrap_or_default();
        let is_there = |line: &&str| {
            !line.trim_start().starts_with('#')
                && line.split_whitespace().nth(1) == Some(field.as_str())
                && !is_line_of(line, &volume.id)
        };
        if let Some(line) = text.lines().find(is_there) {
            bail!(
                "{} has another file system for {shown}: `{}`. Remove that line, or name another \
                 path by --mount",
                self.fstab().display(),
                line.trim()
            );
        }
        Ok(())
    }

    /// Makes the volume attach at each boot, and mount where it says so. `device`: where it is now.
    /// Returns what was written.
    pub fn add(&self, volume: &AtBoot, device: &Path) -> Result<Vec<String>> {
        let instance = volume.instance();
        let line =
            volume.mount.as_deref().map(|mount| line_of(volume, mount, device)).transpose()?;
        let text = serde_json::to_string_pretty(volume)? + "\n";
        let (record, link) = (self.record(&instance), self.link(&instance));
        for path in [&record, &link] {
            let directory = path.parent().unwrap_or(Path::new("/"));
            fs::create_dir_all(directory)
                .with_context(|| format!("make {}", directory.display()))?;
        }
        replace(&record, &text, 0o644)?;
        let mut wrote = vec![record.display().to_string()];
        if fs::symlink_metadata(&link).is_err() {
            std::os::unix::fs::symlink(UNIT_FILE, &link)
                .with_context(|| format!("make {}", link.display()))?;
        }
        wrote.push(link.display().to_string());
        if self.change_fstab(volume, line.as_deref())?
            && let Some(line) = line
        {
            wrote.push(format!("{}: {line}", self.fstab().display()));
        }
        Ok(wrote)
    }

    /// Removes all of it. Returns what was removed.
    pub fn remove(&self, volume: &AtBoot) -> Result<Vec<String>> {
        let instance = volume.instance();
        let mut gone = Vec::new();
        if self.change_fstab(volume, None)? {
            gone.push(format!("{}: its line", self.fstab().display()));
        }
        // The record last: while it is there, the command can be repeated.
        for path in [self.link(&instance), self.record(&instance)] {
            match fs::remove_file(&path) {
                Ok(()) => gone.push(path.display().to_string()),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("remove {}", path.display()));
                }
            }
        }
        Ok(gone)
    }

    /// Puts this line in the place of the volume's; returns whether anything changed.
    fn change_fstab(&self, volume: &AtBoot, line: Option<&str>) -> Result<bool> {
        let path = self.fstab();
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.with_context(|| format!("read {}", path.display()))?,
        };
        let mut lines: Vec<&str> =
            text.lines().filter(|line| !is_line_of(line, &volume.id)).collect();
        lines.extend(line);
        let mut changed = lines.join("\n");
        if !lines.is_empty() {
            changed.push('\n');
        }
        let is_same = changed == text || (lines.is_empty() && text.is_empty());
        if !is_same {
            let mode = fs::metadata(&path).map_or(0o644, |meta| meta.permissions().mode() & 0o7777);
            replace(&path, &changed, mode)?;
        }
        Ok(!is_same)
    }
}

fn is_line_of(line: &str, id: &str) -> bool {
    let options = line.split_whitespace().nth(3).unwrap_or_default();
    options.split(',').any(|option| option.strip_prefix(MARK) == Some(id))
}

/// The line of fstab. `nofail`: a host boots without the volume as well. `_netdev`: its file system is
/// mounted when there is a network, and is no local one.
fn line_of(volume: &AtBoot, mount: &Path, device: &Path) -> Result<String> {
    let FileSystem { uuid, kind } = file_system(device)?;
    let mode = if volume.read_only { "ro," } else { "" };
    Ok(format!(
        "UUID={uuid} {} {kind} {mode}nofail,_netdev,x-systemd.requires={},{MARK}{} 0 2",
        fstab_field(&mount.to_string_lossy()),
        fstab_field(&volume.unit()),
        volume.id
    ))
}

fn file_system(device: &Path) -> Result<FileSystem> {
    let shown = device.display();
    let output = Command::new("blkid")
        .args(["--probe", "--output", "export"])
        .arg(device)
        .stdin(Stdio::null())
        .output()
        .context("start blkid, which reads the type of a file system")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let value = |key: &str| {
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('=').map(str::to_owned))
    };
    match (value("UUID"), value("TYPE")) {
        (Some(uuid), Some(kind)) => Ok(FileSystem { uuid, kind }),
        _ => bail!(
            "there is no file system on {shown}: make one, as by `mkfs.ext4 {shown}`, and run this \
             again"
        ),
    }
}

/// Writes beside, syncs and renames: a crash leaves the old file or the new one.
fn replace(path: &Path, text: &str, mode: u32) -> Result<()> {
    let beside = path.with_extension(format!("{}.new", std::process::id()));
    let write = || -> std::io::Result<()> {
        use std::io::Write;
        let mut file = fs::File::create(&beside)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&beside, path)
    };
    let done = write();
    if done.is_err() {
        let _ = fs::remove_file(&beside);
    }
    done.with_context(|| format!("write {}", path.display()))
}

/// Mounts what fstab has for this path, where nothing is mounted there.
pub fn mount(path: &Path) -> Result<()> {
    if super::loop_devices::mounts()?.iter().any(|mount| mount.target == path) {
        return Ok(());
    }
    fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))?;
    run(Command::new("mount").arg(path))
}

/// Tells systemd of a unit that is wanted now; nothing where systemd does not run.
pub fn notify_systemd(volume: &AtBoot, is_wanted: bool) -> Result<()> {
    if !Path::new("/run/systemd/system").exists() {
        return Ok(());
    }
    run(Command::new("systemctl").arg("daemon-reload"))?;
    let verb = if is_wanted { "start" } else { "stop" };
    run(Command::new("systemctl").args([verb, &volume.unit()]))
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("start {program}"))?;
    if !output.status.success() {
        bail!("{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_instances_equal_the_output_of_systemd_escape() {
        for (name, escaped) in [
            ("db", "db"),
            ("my-db", "my\\x2ddb"),
            (".hidden", "\\x2ehidden"),
            ("a b/c", "a\\x20b-c"),
            ("größe", "gr\\xc3\\xb6\\xc3\\x9fe"),
            ("50%", "50\\x25"),
        ] {
            assert_eq!(escape(name), escaped);
        }
        let id = "0123456789abcdef0123456789abcdef";
        assert_eq!(instance_of(&"é".repeat(64), id), id, "too long for the name of a unit");
        assert_eq!(fstab_field("/srv/my db\\x2d"), "/srv/my\\040db\\134x2d");
    }

    #[test]
    fn the_line_of_a_volume_is_added_found_and_removed_and_other_lines_stay() {
        let directory = tempfile::tempdir().unwrap();
        let etc = Etc(directory.path().into());
        let before = "# local\nUUID=1 / ext4 defaults 0 1\n/dev/sdb1 /srv/other xfs defaults 0 2\n";
        fs::write(etc.fstab(), before).unwrap();
        fs::set_permissions(etc.fstab(), fs::Permissions::from_mode(0o640)).unwrap();
        let volume = AtBoot::new("my-db", "0123", 4096, false);
        // Without a file system to mount there is no line.
        let wrote = etc.add(&volume, Path::new("/dev/null")).unwrap();
        assert_eq!(wrote.len(), 2, "{wrote:?}");
        assert_eq!(etc.find("my-db", "0123").unwrap(), Some(volume.clone()));
        assert_eq!(etc.find("other", "0123").unwrap(), None);
        assert_eq!(fs::read_link(etc.link("my\\x2ddb")).unwrap(), Path::new(UNIT_FILE));

        let line = format!("UUID=2 /srv/db ext4 nofail,{MARK}0123 0 2");
        assert!(etc.change_fstab(&volume, Some(&line)).unwrap());
        assert!(!etc.change_fstab(&volume, Some(&line)).unwrap(), "it is there already");
        assert_eq!(fs::read_to_string(etc.fstab()).unwrap(), format!("{before}{line}\n"));
        etc.check_mount(&volume, Path::new("/srv/db")).unwrap();
        let other = AtBoot::new("other", "4567", 4096, false);
        for (of, taken) in [(&volume, "/srv/other"), (&other, "/srv/db")] {
            let message = etc.check_mount(of, Path::new(taken)).unwrap_err().to_string();
            assert!(message.contains(taken) && message.contains("another path"), "{message}");
        }
        assert!(etc.check_mount(&volume, Path::new("srv/db")).is_err());

        assert_eq!(etc.remove(&volume).unwrap().len(), 3);
        assert_eq!(fs::read_to_string(etc.fstab()).unwrap(), before);
        let mode = fs::metadata(etc.fstab()).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o640);
        assert_eq!(etc.find("my-db", "0123").unwrap(), None);
        assert!(etc.remove(&volume).unwrap().is_empty());
    }

    #[test]
    fn a_damaged_record_and_one_of_a_newer_format_are_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let etc = Etc(directory.path().into());
        let newer = AtBoot { format: FORMAT + 1, ..AtBoot::new("db", "0123", 512, true) };
        etc.add(&newer, Path::new("/dev/null")).unwrap();
        assert!(etc.find("db", "0123").unwrap_err().to_string().contains("newer Quoin"));
        fs::write(etc.record("db"), "{").unwrap();
        assert!(format!("{:#}", etc.find("db", "0123").unwrap_err()).contains("damaged"));
    }
}
