//! Volumes that a host attaches at each boot: what `quoin volume attach --at-boot` writes to
//! `/etc`.
//!
//! A volume has a file in `/etc/quoin/volumes`, an instance of `quoin-volume@.service` that quoin.target
//! wants, and, where it is to be mounted, a line in `/etc/fstab` that requires this instance. The
//! records of the cluster say already that the volume is attached to this host, so its target serves
//! it after a boot, and no controller has to be asked.
//!
//! The line names the volume's link, and Quoin mounts the device that it has just attached: a UUID is
//! in the content of a volume, and each clone has that of its source. What was mounted is compared
//! with what was meant.

use anyhow::{Context, Result, bail};
use quoin_encryption::Encryption;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::loop_devices;
use crate::output;

const FORMAT: u32 = 2;
/// Format of a volume without a key.
const FORMAT_WITHOUT_KEY: u32 = 1;
/// systemd takes no longer name of a unit.
const UNIT_NAME_BYTES_MAX: usize = 255;
const WANTS: &str = "systemd/system/quoin.target.wants";
const UNIT_FILE: &str = "/lib/systemd/system/quoin-volume@.service";
/// Option of a line in fstab that mount ignores: names the volume of the line.
const MARK: &str = "x-quoin.volume=";
/// Where the attach process of a package's host has its links.
const LINKS: &str = "/dev/quoin";
/// File systems that are mounted without being asked for by name. The content of a volume says which
/// it has, and the kernel's code for others is less used to hostile content.
const FILE_SYSTEMS: [&str; 2] = ["ext4", "xfs"];
/// The content of a volume may be another's: its files are no way to root's rights.
const MOUNT_OPTIONS: &str = "nosuid,nodev";
/// Times that mean: as usual, not bounded by a flag of a command.
pub const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

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
    /// Its partitions are made devices.
    pub partitions: bool,
    /// Where its file system is mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<PathBuf>,
    /// Key of an encrypted volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<BootKey>,
}

/// Key of an encrypted volume at a boot. The slots are kept beside it, so that no controller has to be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootKey {
    /// The file that has it, by its whole path.
    pub file: PathBuf,
    pub slots: Encryption,
}

/// How a file system is mounted, as a user asked.
#[derive(Clone, Debug, Default)]
pub struct MountOptions {
    /// Words for mount(8) in the place of [`MOUNT_OPTIONS`].
    pub options: Option<String>,
    /// The kernel's name of the file system, where it is none of [`FILE_SYSTEMS`].
    pub file_system: Option<String>,
}

impl AtBoot {
    pub fn new(volume: &str, id: &str, block_size: u32, read_only: bool) -> Self {
        let (volume, id) = (volume.to_owned(), id.to_owned());
        Self {
            format: FORMAT_WITHOUT_KEY,
            volume,
            id,
            block_size,
            read_only,
            partitions: false,
            mount: None,
            key: None,
        }
    }

    /// The same with the key that opens it.
    pub fn with_key(self, key: Option<BootKey>) -> Self {
        let format = if key.is_some() { FORMAT } else { self.format };
        Self { format, key, ..self }
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

    /// The volume of that name or id, where it is attached at boot. A file that cannot be read is none.
    pub fn find_by_name_or_id(&self, named: &str) -> Option<AtBoot> {
        let entries = fs::read_dir(self.0.join("quoin/volumes")).into_iter().flatten().flatten();
        let read = |entry: fs::DirEntry| serde_json::from_slice(&fs::read(entry.path()).ok()?).ok();
        entries.filter_map(read).find(|one: &AtBoot| one.volume == named || one.id == named)
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
    pub fn add(
        &self,
        volume: &AtBoot,
        device: &Path,
        options: &MountOptions,
    ) -> Result<Vec<String>> {
        let instance = volume.instance();
        let line = match volume.mount.as_deref() {
            Some(mount) => {
                let until = Instant::now() + PATIENCE;
                Some(line_of(volume, mount, &file_system(device, until)?, options)?)
            }
            None => None,
        };
        let text = serde_json::to_string_pretty(volume)? + "\n";
        let (record, link) = (self.record(&instance), self.link(&instance));
        for path in [&record, &link] {
            let directory = path.parent().unwrap_or(Path::new("/"));
            fs::create_dir_all(directory)
                .with_context(|| format!("make {}", directory.display()))?;
        }
        // A slot opens to whoever guesses the key.
        let mode = if volume.key.is_some() { 0o600 } else { 0o644 };
        replace(&record, &text, mode)?;
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
/// mounted when there is a network, and is no local one. It is checked by Quoin, and not by systemd,
/// which would do it while Quoin mounts it.
fn line_of(volume: &AtBoot, mount: &Path, found: &str, options: &MountOptions) -> Result<String> {
    match options.file_system.as_deref() {
        Some(asked) if asked != found => bail!(
            "the volume holds {found}, and --file-system asks for {asked}: name what it holds"
        ),
        None if !FILE_SYSTEMS.contains(&found) => bail!(
            "the volume holds {found}, and only {} are mounted at boot without being named: give \
             --file-system {found} if it is to be mounted",
            FILE_SYSTEMS.join(" and ")
        ),
        _ => {}
    }
    let link = quoin_attach::file_name(&volume.volume).with_context(|| {
        format!("the name of volume {} is too long for a device's", volume.volume)
    })?;
    let options = options.options.as_deref().unwrap_or(MOUNT_OPTIONS);
    if options.is_empty() || options.contains(|letter: char| letter.is_whitespace()) {
        bail!(
            "--mount-options has words with commas between them and no blanks, as in nosuid,nodev"
        );
    }
    let mode = if volume.read_only { ",ro" } else { "" };
    // A clone has the UUID of its source, and both may be mounted here.
    let unique = if found == "xfs" { ",nouuid" } else { "" };
    Ok(format!(
        "{LINKS}/{} {} {found} {}{mode}{unique},nofail,_netdev,x-systemd.requires={},{MARK}{} 0 0",
        fstab_field(&link),
        fstab_field(&mount.to_string_lossy()),
        fstab_field(options),
        fstab_field(&volume.unit()),
        volume.id
    ))
}

/// The kernel's name of the file system on a device.
fn file_system(device: &Path, until: Instant) -> Result<String> {
    let shown = device.display();
    let mut command = Command::new("blkid");
    command.args(["--probe", "--output", "export"]).arg(device);
    let output = output_until(&mut command, until)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines();
    let kind = lines.find_map(|line| line.strip_prefix("TYPE="));
    kind.map(str::to_owned).with_context(|| {
        format!(
            "there is no file system on {shown}: make one, as by `mkfs.ext4 {shown}`, and run this \
             again"
        )
    })
}

/// Writes beside, syncs and renames: a crash leaves the old file or the new one.
fn replace(path: &Path, text: &str, mode: u32) -> Result<()> {
    let beside = path.with_extension(format!("{}.new", std::process::id()));
    let write = || -> std::io::Result<()> {
        use std::io::Write;
        let mut file = fs::File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode & 0o600)
            .open(&beside)?;
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

/// Mounts this device where the volume's line in fstab says, with its type and options, unless it is
/// mounted there.
pub fn mount(etc: &Etc, volume: &AtBoot, device: &Path, until: Instant) -> Result<()> {
    let Some(path) = volume.mount.as_deref() else { return Ok(()) };
    let number = loop_devices::number_of(device)?;
    let name = output::quoted(&volume.volume);
    if let Some(present) = loop_devices::mounts()?.iter().rev().find(|one| one.target == path) {
        if present.number == number {
            return Ok(());
        }
        bail!(
            "{} has another file system mounted ({}): it is not volume {name}, which is {}. Unmount \
             it, and run `quoin volume attach {name} --at-boot --mount {}` again",
            path.display(),
            present.source.display(),
            device.display(),
            path.display()
        );
    }
    let text = fs::read_to_string(etc.fstab()).unwrap_or_default();
    let line = text.lines().find(|line| is_line_of(line, &volume.id)).with_context(|| {
        format!(
            "{} has no line of volume {name}: `quoin volume attach {name} --at-boot --mount PATH` \
             writes it",
            etc.fstab().display()
        )
    })?;
    let field = |index: usize| line.split_whitespace().nth(index).unwrap_or_default();
    let (kind, options) = (field(2), field(3));
    fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))?;
    let is_writable = !options.split(',').any(|option| option == "ro");
    // A file system that is mounted elsewhere on this host was checked, and cannot be.
    if kind == "ext4" && is_writable && loop_devices::mounts_of(device)?.is_empty() {
        let mut check = Command::new("e2fsck");
        let output = output_until(check.arg("-p").arg(device), until)?;
        // 1: it is repaired.
        if output.status.code().is_none_or(|code| code > 1) {
            bail!(
                "the file system of volume {name} has damage that is not repaired without being \
                 asked: run `e2fsck {}` by hand: {}",
                device.display(),
                said(&output)
            );
        }
    }
    let mut command = Command::new("mount");
    command.args(["-t", kind, "-o"]).arg(loop_devices::unescape(options)).arg(device).arg(path);
    run_until(&mut command, until)?;
    check_mounted(path, &number)
}

/// Unmounts what is not the device that was meant: its number may be another volume's by now.
fn check_mounted(path: &Path, number: &str) -> Result<()> {
    let mounts = loop_devices::mounts()?;
    let Some(present) = mounts.iter().rev().find(|one| one.target == path) else {
        bail!(
            "nothing is mounted at {} after it was mounted: run the command again",
            path.display()
        )
    };
    if present.number == number {
        return Ok(());
    }
    let shown = format!("{} ({})", present.source.display(), present.number);
    run_until(Command::new("umount").arg(path), Instant::now() + PATIENCE)?;
    bail!("{} got {shown} and not {number}: it is unmounted again", path.display())
}

/// Has the kernel make devices of the partitions of a device. A process of its own reads them, so that
/// it can be given up.
pub fn show_partitions(device: &Path, until: Instant) -> Result<()> {
    let mut command = Command::new("partx");
    let output = output_until(command.arg("--update").arg(device), until)?;
    if !output.status.success() {
        bail!(
            "the partitions of {} are not there: partx failed: {}",
            device.display(),
            said(&output)
        );
    }
    Ok(())
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
    run_until(command, Instant::now() + PATIENCE)
}

fn run_until(command: &mut Command, until: Instant) -> Result<()> {
    let output = output_until(command, until)?;
    if !output.status.success() {
        bail!("{} failed: {}", command.get_program().to_string_lossy(), said(&output));
    }
    Ok(())
}

fn said(output: &Output) -> String {
    let text = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
    output::plain(String::from_utf8_lossy(text).trim())
}

/// Runs a program to its end, or gives it up: one that waits for a device without an answer may not
/// even be killed.
fn output_until(command: &mut Command, until: Instant) -> Result<Output> {
    let program = command.get_program().to_string_lossy().into_owned();
    let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().with_context(|| format!("start {program}"))?;
    let mut read = [child.stdout.take().map(read_all), child.stderr.take().map(read_all)];
    loop {
        if let Some(status) = child.try_wait().with_context(|| format!("wait for {program}"))? {
            let [stdout, stderr] = read.each_mut().map(|reader| {
                reader.take().and_then(|reader| reader.join().ok()).unwrap_or_default()
            });
            return Ok(Output { status, stdout, stderr });
        }
        if Instant::now() >= until {
            let _ = child.kill();
            bail!("{program} has not ended in time: its device does not answer. Run this again");
        }
        std::thread::sleep(POLL);
    }
}

/// Reads what a program prints, of which the first 64 KiB are kept.
fn read_all(mut pipe: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = pipe.read(&mut buffer) {
            let room = (64 << 10) - kept.len();
            kept.extend_from_slice(&buffer[..count.min(room)]);
        }
        kept
    })
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
        let wrote = etc.add(&volume, Path::new("/dev/null"), &MountOptions::default()).unwrap();
        assert_eq!(wrote.len(), 2, "{wrote:?}");
        assert_eq!(etc.find("my-db", "0123").unwrap(), Some(volume.clone()));
        assert_eq!(etc.find("other", "0123").unwrap(), None);
        assert_eq!(fs::read_link(etc.link("my\\x2ddb")).unwrap(), Path::new(UNIT_FILE));

        let line =
            line_of(&volume, Path::new("/srv/db"), "ext4", &MountOptions::default()).unwrap();
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

        // An older Quoin reads a record without a key, and refuses one with it. Its slots are root's alone.
        let mode_of = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((volume.format, mode_of(etc.record("my\\x2ddb"))), (1, 0o644));
        let user = quoin_encryption::UserKey::parse(b"correct horse battery staple").unwrap();
        let slots = Encryption::create(&user, "default").unwrap();
        let key = BootKey { file: "/root/key".into(), slots };
        let locked = AtBoot::new("locked", "89ab", 4096, false).with_key(Some(key));
        etc.add(&locked, Path::new("/dev/null"), &MountOptions::default()).unwrap();
        assert_eq!((locked.format, mode_of(etc.record("locked"))), (FORMAT, 0o600));
        assert_eq!(etc.find("locked", "89ab").unwrap(), Some(locked.clone()));
        etc.remove(&locked).unwrap();

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
        etc.add(&newer, Path::new("/dev/null"), &MountOptions::default()).unwrap();
        assert!(etc.find("db", "0123").unwrap_err().to_string().contains("newer Quoin"));
        fs::write(etc.record("db"), "{").unwrap();
        assert!(format!("{:#}", etc.find("db", "0123").unwrap_err()).contains("damaged"));
    }

    #[test]
    fn a_line_names_the_link_and_no_content_of_the_volume_and_gives_no_rights_unasked() {
        let volume = AtBoot::new("my db", "0123", 4096, true);
        let line = |found: &str, options: &str, file_system: &str| {
            let given = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
            let options = MountOptions { options: given(options), file_system: given(file_system) };
            line_of(&volume, Path::new("/srv/db"), found, &options).map_err(|e| e.to_string())
        };
        let usual = line("ext4", "", "").unwrap();
        let begin = "/dev/quoin/my%20db /srv/db ext4 nosuid,nodev,ro,nofail,_netdev,";
        assert!(usual.starts_with(begin) && usual.ends_with(" 0 0"), "{usual}");
        assert!(line("xfs", "", "").unwrap().contains(" xfs nosuid,nodev,ro,nouuid,"));
        assert!(line("ext4", "noatime", "").unwrap().contains(" ext4 noatime,ro,"));
        assert!(line("btrfs", "", "btrfs").unwrap().contains(" btrfs nosuid,"));
        for (found, options, file_system, why) in [
            ("btrfs", "", "", "--file-system btrfs"),
            ("ext4", "", "xfs", "holds ext4"),
            ("ext4", "a b", "", "commas"),
        ] {
            let refused = line(found, options, file_system).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn a_program_that_does_not_end_is_given_up_and_one_that_prints_much_is_not() {
        let began = Instant::now();
        let soon = began + Duration::from_millis(100);
        let error = output_until(Command::new("sleep").arg("60"), soon).unwrap_err().to_string();
        assert!(error.contains("sleep has not ended"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(30));
        let mut prints = Command::new("head");
        let later = Instant::now() + PATIENCE;
        let output = output_until(prints.args(["-c", "1000000", "/dev/zero"]), later).unwrap();
        assert!(output.status.success() && output.stdout.len() == 64 << 10);
    }
}
