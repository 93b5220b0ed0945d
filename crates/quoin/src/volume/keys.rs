//! Keys of encrypted volumes on the command line: made, handed to this host's target, and their
//! slots changed.
//!
//! A key is read from a file or the standard input, never from an argument, which other users of
//! the host can see. It is used in this process: the controller is sent key slots, and the target of
//! this host the data key.

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use quoin_api::control::{self as api, SetKeySlotsRequest, Volume};
use quoin_encryption::{DataKey, Encryption, UserKey, handing};
use serde::Serialize;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::host::at_boot::BootKey;
use crate::output::{self, Format, Row};

/// Longest key file; a key is much shorter.
const KEY_FILE_BYTES_MAX: u64 = 4096;
/// Attempts at a change of slots that another change overtakes.
const ATTEMPTS: usize = 5;

/// A file with a key.
#[derive(Clone, Debug)]
pub struct KeyFile(PathBuf);

impl From<&str> for KeyFile {
    fn from(path: &str) -> Self {
        Self(path.into())
    }
}

impl KeyFile {
    pub fn read(&self) -> Result<UserKey> {
        self.parse(&self.bytes()?)
    }

    /// The key as text, for the secret of a call.
    pub fn text(&self) -> Result<String> {
        let text = self.bytes()?;
        self.parse(&text)?;
        String::from_utf8(text.to_vec()).context("a key is text")
    }

    /// Another secret than a key: the file without its last end of line.
    pub fn line(&self) -> Result<String> {
        let text = String::from_utf8(self.bytes()?.to_vec()).context("a secret is text")?;
        Ok(text.trim_end_matches(['\r', '\n']).to_owned())
    }

    fn parse(&self, text: &[u8]) -> Result<UserKey> {
        UserKey::parse(text).with_context(|| format!("the key file {}", self.0.display()))
    }

    fn bytes(&self) -> Result<Zeroizing<Vec<u8>>> {
        let mut text = Zeroizing::new(Vec::with_capacity(KEY_FILE_BYTES_MAX as usize + 1));
        let name = self.0.display();
        let read = match self.0 == Path::new("-") {
            true => std::io::stdin().lock().take(KEY_FILE_BYTES_MAX + 1).read_to_end(&mut text),
            false => std::fs::File::open(&self.0)
                .and_then(|file| file.take(KEY_FILE_BYTES_MAX + 1).read_to_end(&mut text)),
        };
        read.with_context(|| format!("read the key file {name}"))?;
        Ok(text)
    }

    /// The file as a boot finds it.
    ///
    /// # Errors
    /// It is no file of its own, or others can read it.
    fn at_boot(&self) -> Result<PathBuf> {
        if self.0 == Path::new("-") {
            bail!(
                "a boot has no standard input: name the file with the key by --key-file, where each \
                 boot finds it"
            );
        }
        let name = self.0.display();
        let path = self.0.canonicalize().with_context(|| format!("read the key file {name}"))?;
        let found = path.metadata().with_context(|| format!("read the key file {name}"))?;
        if found.mode() & 0o077 != 0 {
            bail!(
                "the key file {name} is open to others (mode {:o}): `chmod 600` closes it",
                found.mode() & 0o7777
            );
        }
        if found.uid() != rustix::process::geteuid().as_raw() {
            bail!("the key file {name} is another user's: `chown root` makes it this host's");
        }
        Ok(path)
    }
}

/// The key with which the volume is attached at each boot: `None` where it is not encrypted.
pub fn boot_key(volume: &Volume, file: Option<&KeyFile>) -> Result<Option<BootKey>> {
    let (Some(slots), Some(file)) = (encryption_of(volume)?, file) else { return Ok(None) };
    Ok(Some(BootKey { file: file.at_boot()?, slots }))
}

/// The data key of a volume at a boot.
pub fn unlock_at_boot(key: &BootKey) -> Result<DataKey> {
    let file = KeyFile(key.file.clone());
    file.at_boot()?;
    let user = file.read()?;
    let unlocked = key.slots.unlock(&user).with_context(|| {
        format!(
            "the key in {} opens no slot that the volume had: where its keys were changed since, run \
             `quoin volume attach --at-boot` with --key-file again",
            key.file.display()
        )
    })?;
    Ok(unlocked.key)
}

/// Encryption of a volume that is to be made.
#[derive(Args)]
pub struct EncryptOptions {
    /// Encrypt its blocks on their way to the replicas, with AES-256-XTS. The key of --key-file is
    /// needed whenever it is attached, and lost data is lost with it. See docs/encryption.md.
    #[arg(long, requires = "key_file")]
    encrypt: bool,
    /// The file with the key: a passphrase of 8 bytes at least, or 64 hex digits (`openssl rand
    /// -hex 32`); - is the standard input.
    #[arg(long, value_name = "FILE", requires = "encrypt")]
    key_file: Option<KeyFile>,
    /// Name of the key slot.
    #[arg(long, value_name = "NAME", default_value = "default", requires = "encrypt")]
    key_name: String,
}

impl EncryptOptions {
    /// Draws a data key where one is asked for; returns its slots and the key that opens them.
    pub fn make(&self) -> Result<Option<(api::Encryption, UserKey)>> {
        let Some(file) = self.key_file.as_ref().filter(|_| self.encrypt) else { return Ok(None) };
        let user = file.read()?;
        let encryption = Encryption::create(&user, &self.key_name)?;
        Ok(Some((api::Encryption::from(&encryption), user)))
    }
}

/// Refuses a volume that exists already under another key.
pub fn check_made(volume: &Volume, user: &UserKey) -> Result<()> {
    unlock(volume, user).map(drop).with_context(|| {
        format!("volume {} existed before, and was made with another key", name_of(volume))
    })
}

/// The data key of a volume that is to be used: `None` where it is not encrypted.
pub fn key_of(volume: &Volume, file: Option<&KeyFile>) -> Result<Option<DataKey>> {
    let name = name_of(volume);
    match (encryption_of(volume)?, file) {
        (None, None) => Ok(None),
        (None, Some(_)) => bail!("volume {name} is not encrypted: leave --key-file out"),
        (Some(_), None) => bail!(
            "volume {name} is encrypted: name the file with its key with --key-file (- is the \
             standard input)"
        ),
        (Some(_), Some(file)) => unlock(volume, &file.read()?).map(Some),
    }
}

/// Hands the key to the target of this host, once it has the volume of this id.
pub async fn hand_over(id: &str, key: &DataKey, client: &ClientOptions) -> Result<()> {
    let socket = client.run_directory().join("nbd").join(handing::SOCKET);
    let handed = handing::hand_over_within(client.timeout(), &socket, id, key).await;
    handed.context("the volume is published, and its target on this host has no key yet")
}

/// Returns true if the records have the volume encrypted.
pub fn is_encrypted(volume: &Volume) -> bool {
    volume.spec.as_ref().is_some_and(|spec| spec.encryption.is_some())
}

fn encryption_of(volume: &Volume) -> Result<Option<Encryption>> {
    let slots = volume.spec.as_ref().and_then(|spec| spec.encryption.as_ref());
    let read = slots.map(Encryption::try_from).transpose();
    read.with_context(|| format!("the key slots of volume {}", name_of(volume)))
}

fn unlock(volume: &Volume, user: &UserKey) -> Result<DataKey> {
    let encryption = encryption_of(volume)?;
    let encryption =
        encryption.with_context(|| format!("volume {} is not encrypted", name_of(volume)))?;
    Ok(encryption.unlock(user)?.key)
}

fn name_of(volume: &Volume) -> String {
    let name = volume.spec.as_ref().map(|spec| spec.name.as_str()).unwrap_or_default();
    output::plain(name).to_string()
}

#[derive(Subcommand)]
pub enum KeyCommand {
    /// The key slots of a volume, by name.
    #[command(visible_alias = "ls")]
    List {
        /// Its name or id.
        volume: String,
    },
    /// Add a key slot: another key that opens the volume.
    Add {
        /// Its name or id.
        volume: String,
        /// Name of the new slot.
        #[arg(long, value_name = "NAME")]
        name: String,
        #[command(flatten)]
        files: KeyFiles,
    },
    /// Remove a key slot. The key of --key-file must open another one.
    #[command(visible_alias = "rm")]
    Remove {
        /// Its name or id.
        volume: String,
        /// Name of the slot.
        #[arg(long, value_name = "NAME")]
        name: String,
        /// The file with a key that stays.
        #[arg(long, value_name = "FILE")]
        key_file: KeyFile,
    },
    /// Replace a key by another one in its slot; the volume may be in use. The data is not encrypted
    /// anew.
    Rotate {
        /// Its name or id.
        volume: String,
        #[command(flatten)]
        files: KeyFiles,
    },
}

#[derive(Args)]
pub struct KeyFiles {
    /// The file with the present key; - is the standard input.
    #[arg(long, value_name = "FILE")]
    key_file: KeyFile,
    /// The file with the new key.
    #[arg(long, value_name = "FILE")]
    new_key_file: KeyFile,
}

/// A key slot as commands print it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KeySlotView {
    pub name: String,
    pub derivation: String,
}

impl Row for KeySlotView {
    const HEADER: &'static [&'static str] = &["NAME", "DERIVATION"];
    const NARROW: usize = 2;

    fn cells(&self) -> Vec<String> {
        vec![self.name.clone(), self.derivation.clone()]
    }
}

impl From<&api::KeySlot> for KeySlotView {
    fn from(slot: &api::KeySlot) -> Self {
        Self { name: slot.name.clone(), derivation: slot.derivation.clone() }
    }
}

/// Encryption of a volume as commands print it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EncryptionView {
    pub cipher: String,
    pub key_slots: Vec<KeySlotView>,
}

impl From<&api::Encryption> for EncryptionView {
    fn from(encryption: &api::Encryption) -> Self {
        let key_slots = encryption.slots.iter().map(KeySlotView::from).collect();
        Self { cipher: encryption.cipher.clone(), key_slots }
    }
}

impl EncryptionView {
    pub fn sentence(&self) -> String {
        let names: Vec<_> = self.key_slots.iter().map(|slot| slot.name.as_str()).collect();
        format!("{}, key slots: {}", self.cipher, names.join(", "))
    }
}

pub async fn run(cluster: &mut Cluster, command: KeyCommand, format: Format) -> Result<()> {
    let volume = match command {
        KeyCommand::List { volume } => get_volume(cluster, &volume).await?,
        KeyCommand::Add { volume, name, files } => {
            let (user, new) = (files.key_file.read()?, files.new_key_file.read()?);
            change(cluster, &volume, |slots| slots.add(&user, &new, &name)).await?
        }
        KeyCommand::Remove { volume, name, key_file } => {
            let user = key_file.read()?;
            change(cluster, &volume, |slots| slots.remove(&user, &name)).await?
        }
        KeyCommand::Rotate { volume, files } => {
            let (user, new) = (files.key_file.read()?, files.new_key_file.read()?);
            change(cluster, &volume, |slots| slots.rotate(&user, &new).map(drop)).await?
        }
    };
    let Some(encryption) = volume.spec.as_ref().and_then(|spec| spec.encryption.as_ref()) else {
        bail!("volume {} is not encrypted", name_of(&volume));
    };
    output::print_list(format, &EncryptionView::from(encryption).key_slots, "no key slots")
}

/// Changes the slots of a volume, again where another change came between.
async fn change(
    cluster: &mut Cluster,
    name: &str,
    change: impl Fn(&mut Encryption) -> Result<(), quoin_encryption::Error>,
) -> Result<Volume> {
    for attempt in 1.. {
        let volume = get_volume(cluster, name).await?;
        let encryption = encryption_of(&volume)?;
        let mut slots =
            encryption.with_context(|| format!("volume {} is not encrypted", name_of(&volume)))?;
        change(&mut slots)?;
        let request = SetKeySlotsRequest {
            volume: Some(id_ref(&volume.id)),
            encryption: Some(api::Encryption::from(&slots)),
            resource_version: volume.resource_version,
        };
        match cluster.set_key_slots(request).await {
            Ok(volume) => return Ok(volume.into_inner()),
            Err(status) if status.code() == tonic::Code::Aborted && attempt < ATTEMPTS => {}
            Err(status) => return Err(refusal(status)),
        }
    }
    unreachable!("the last attempt returns")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encrypted(user: &UserKey) -> Volume {
        let encryption = Encryption::create(user, "default").unwrap();
        let spec = api::VolumeSpec {
            name: "db".into(),
            encryption: Some((&encryption).into()),
            ..api::VolumeSpec::default()
        };
        Volume { spec: Some(spec), ..Volume::default() }
    }

    fn file(text: &str) -> (tempfile::NamedTempFile, KeyFile) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let key_file = KeyFile(file.path().into());
        (file, key_file)
    }

    #[test]
    fn an_encrypted_volume_needs_its_key_and_another_one_takes_none() {
        let (_held, right) = file("correct horse\n");
        let (_held_too, wrong) = file("correct house\n");
        let volume = encrypted(&right.read().unwrap());
        assert!(key_of(&volume, Some(&right)).unwrap().is_some());
        let refused = |volume, file| format!("{:#}", key_of(volume, file).unwrap_err());
        assert!(refused(&volume, None).contains("--key-file"));
        let message = refused(&volume, Some(&wrong));
        assert!(message.contains("opens no key slot") && !message.contains("house"), "{message}");
        let plain = Volume::default();
        assert!(key_of(&plain, None).unwrap().is_none());
        assert!(refused(&plain, Some(&right)).contains("not encrypted"));
        assert!(check_made(&volume, &wrong.read().unwrap()).is_err());
    }

    #[test]
    fn a_key_file_that_is_missing_or_holds_no_key_is_named() {
        let missing = KeyFile("/no/such/key".into());
        assert!(format!("{:#}", missing.read().unwrap_err()).contains("/no/such/key"));
        for text in ["", "hunter2", &"x".repeat(5000)] {
            let (held, wrong) = file(text);
            let message = format!("{:#}", wrong.read().unwrap_err());
            assert!(message.contains(held.path().to_str().unwrap()), "{message}");
            assert!(!message.contains("hunter2"), "{message}");
        }
    }
}
