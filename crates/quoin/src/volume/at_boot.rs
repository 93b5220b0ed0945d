//! `quoin volume attach --at-boot` and what its unit runs at a boot: [`crate::host::at_boot`] has the
//! files.

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use quoin_api::control::Volume;
use quoin_attach::AttachClient;
use quoin_attach::protocol::{AttachVolume, Attached};
use quoin_encryption::DataKey;
use quoin_nbd::client::{Address, ClientOptions as NbdOptions, Pipe};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::attach::HostOptions;
use super::keys;
use crate::client::ClientOptions;
use crate::host::at_boot::{
    AtBoot, BootKey, Etc, MountOptions, PATIENCE, mount, notify_systemd, show_partitions,
};
use crate::output;

/// Devices and mounts of a volume that a host is to have after a boot.
#[derive(Args)]
pub struct AtBootOptions {
    /// Attach it at each boot of this host as well (systemd); says what it writes for that.
    /// `quoin volume detach`, or --not-at-boot, takes it back. A boot reads the key of an encrypted
    /// volume from its --key-file, which must be closed to others.
    #[arg(long, conflicts_with = "nbd")]
    at_boot: bool,
    /// Mount its file system here, now and at each boot: by a line in /etc/fstab.
    #[arg(long, value_name = "PATH", requires = "at_boot")]
    mount: Option<PathBuf>,
    /// Options of that mount in the place of `nosuid,nodev`, with commas between them.
    #[arg(long, value_name = "OPTIONS", requires = "mount")]
    mount_options: Option<String>,
    /// The type of its file system, where it is another than ext4 and xfs: only these are mounted
    /// without being named.
    #[arg(long, value_name = "TYPE", requires = "mount")]
    file_system: Option<String>,
    /// Make its partitions devices too (`/dev/loop0p1`), by partx of util-linux; with --at-boot, at
    /// each boot. They go when the volume is detached.
    #[arg(long, conflicts_with = "nbd")]
    partitions: bool,
    /// Do not attach it at boot any more.
    #[arg(long, conflicts_with_all = ["at_boot", "nbd"])]
    not_at_boot: bool,
}

#[derive(Args)]
pub struct AttachAtBootOptions {
    /// Its name, as `--at-boot` was given it.
    volume: String,
    #[command(flatten)]
    host: HostOptions,
}

fn record_of(volume: &Volume, read_only: bool) -> AtBoot {
    let spec = volume.spec.as_ref();
    let name = spec.map(|spec| spec.name.as_str()).unwrap_or_default();
    AtBoot::new(name, &volume.id, spec.map_or(0, |spec| spec.block_size), read_only)
}

impl AtBootOptions {
    /// Returns true if a change for the next boot is asked for.
    pub fn changes(&self) -> bool {
        self.at_boot || self.not_at_boot
    }

    pub fn is_at_boot(&self) -> bool {
        self.at_boot
    }

    /// Returns true if partitions are to be devices.
    pub fn shows_partitions(&self) -> bool {
        self.partitions
    }

    /// Refuses what could not be written later, before anything is changed.
    pub fn check(&self, volume: &Volume) -> Result<()> {
        if self.changes() && !rustix::process::geteuid().is_root() {
            bail!(
                "attachment at boot is written to /etc, which needs root: run the command with sudo"
            );
        }
        match &self.mount {
            Some(path) => Etc::default().check_mount(&record_of(volume, false), path),
            None => Ok(()),
        }
    }

    /// Writes, or takes back, what the next boot needs. `device`: where the volume is now.
    pub fn apply(
        &self,
        volume: &Volume,
        read_only: bool,
        key: Option<BootKey>,
        device: &Path,
    ) -> Result<()> {
        if self.partitions {
            show_partitions(device, Instant::now() + PATIENCE)?;
        }
        if self.not_at_boot {
            return forget(volume);
        }
        if !self.at_boot {
            return Ok(());
        }
        let (mount_path, partitions) = (self.mount.clone(), self.partitions);
        let record = record_of(volume, read_only).with_key(key);
        let record = AtBoot { mount: mount_path, partitions, ..record };
        let options = MountOptions {
            options: self.mount_options.clone(),
            file_system: self.file_system.clone(),
        };
        for path in Etc::default().add(&record, device, &options)? {
            eprintln!("wrote {path}");
        }
        notify_systemd(&record, true)?;
        mount(&Etc::default(), &record, device, Instant::now() + PATIENCE)
    }
}

/// Takes back what `--at-boot` wrote on this host; nothing where it wrote nothing.
pub fn forget(volume: &Volume) -> Result<()> {
    let record = record_of(volume, false);
    let etc = Etc::default();
    if etc.find(&record.volume, &record.id)?.is_none_or(|found| found.id != record.id) {
        return Ok(());
    }
    for path in etc.remove(&record)? {
        eprintln!("removed {path}");
    }
    notify_systemd(&record, false)
}

/// Command of `quoin-volume@.service`. The records have the volume attached to this host, so its
/// target serves it, and only the device and the mount are missing.
pub async fn attach_at_boot(options: AttachAtBootOptions, client: &ClientOptions) -> Result<()> {
    let client = &options.host.client(client);
    let name = output::quoted(&options.volume);
    let Some(record) = Etc::default().find(&options.volume, &options.volume)? else {
        bail!(
            "{name} is not attached at boot here: `quoin volume attach {name} --at-boot` sets that"
        );
    };
    let run = client.run_directory();
    let socket = run.join("nbd").join(format!("{}.sock", record.id));
    let daemon = AttachClient::new(run.join("attach").join("attach.sock"));
    let key = record.key.as_ref().map(keys::unlock_at_boot).transpose()?;
    let until = Instant::now() + client.timeout();
    let attached = loop {
        let left = until.saturating_duration_since(Instant::now());
        let attaching = async {
            if let Some(key) = &key {
                keys::hand_over(&record.id, key, client).await?;
            }
            attach(&record, &socket, &daemon, key.clone()).await
        };
        let attempt = tokio::time::timeout(left, attaching).await;
        let unanswered =
            |_| anyhow!("the attach process waits for the kernel, or for the volume's IO");
        match attempt.map_err(unanswered).and_then(|outcome| outcome) {
            Ok(attached) => break attached,
            Err(error) if Instant::now() >= until => {
                return Err(error).with_context(|| {
                    format!(
                        "volume {name} is no device here after {} s. Its target serves it where the \
                         records have it attached to this host: `quoin volume get {name}` says to \
                         which it is, `quoin volume attach {name}` attaches it here",
                        client.timeout
                    )
                });
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    };
    let device = &attached.device;
    // Where something is in the way of the link, the attach process reports it in its log.
    let left = until.saturating_duration_since(Instant::now());
    let _ = tokio::time::timeout(left, daemon.link(&record.id, &record.volume)).await;
    if record.partitions {
        show_partitions(device, until)?;
    }
    mount(&Etc::default(), &record, device, until)?;
    output::print_line(&device.display().to_string())
}

async fn attach(
    record: &AtBoot,
    socket: &Path,
    daemon: &AttachClient,
    key: Option<DataKey>,
) -> Result<Attached> {
    let asked = NbdOptions::new(Address::Unix(socket.to_owned()));
    // The volume may have grown since.
    let size = Pipe::connect(&asked)?.info().size_bytes;
    let request = AttachVolume {
        volume: record.id.clone(),
        nbd_socket: socket.to_owned(),
        size,
        block_size: record.block_size,
        read_only: record.read_only,
        file_only: false,
        key,
    };
    Ok(daemon.attach(request).await?)
}
