//! The devices of this host as its node reports them: their volumes, and whether they are in use. The
//! controller's answer says what the records have of them, and this host follows: a device of a
//! volume that is detached or deleted goes, or fails its IO; one that is too small grows; and whatever
//! else was made here for a volume and belongs to nothing any more goes too, or is named.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use quoin_attach::protocol::{DetachedHere, ServedElsewhere, Usage};
use quoin_attach::{AttachClient, Error, MadeKind, holder};

use quoin_api::control::{DeviceReport, ReportAnswer};

use crate::host::NodeHost;
use crate::reconcile::{self, Attachment, Kind, Piece, Standing, Step, Table, Word};
use crate::{device, mountinfo};

/// Longest wait for the attach process. One that takes longer is busy with its devices.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Most mounts that are listed of each device.
const MOUNTS_MAX: usize = 4;
/// Most files of volumes at boot that are read, and the longest one.
const AT_BOOT_MAX: usize = 4096;
const AT_BOOT_BYTES_MAX: u64 = 64 << 10;

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceUse {
    pub volume: String,
    /// Empty while it is being made, or its process is away.
    pub device: PathBuf,
    /// Some process holds it, or has done IO within the last moments.
    pub in_use: bool,
    /// Mount points of its file system, as this process sees them; the first ones.
    pub mounts: Vec<PathBuf>,
    /// The first epoch of the use that it was made for; 0: unknown.
    pub since_epoch: u64,
    /// Why all its IO fails; empty while it does not.
    pub dead: String,
    /// 0: unknown.
    pub size_bytes: u64,
    /// Which request to attach it was the last one; 0: unknown.
    asked: u64,
}

/// The devices of one report, to which an answer refers, and all else that Quoin has made on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reported {
    devices: BTreeMap<String, DeviceUse>,
    pieces: Vec<Piece>,
    /// The attach process has answered, so that what it does not name belongs to no attachment.
    is_attach_there: bool,
}

/// Work that is left after an answer was followed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Followed {
    /// Volumes of which something is left here that should not be, and what.
    pub left: Vec<(String, String)>,
    /// Volumes whose mounts at recorded paths are to be taken away.
    pub to_take_down: Vec<String>,
}

impl Reported {
    /// Returns them as they are reported to the controller.
    #[must_use]
    pub fn reports(&self) -> Vec<DeviceReport> {
        self.devices.values().cloned().map(DeviceReport::from).collect()
    }

    /// Returns the volumes of which something is here and no device, so that no answer to a report speaks of
    /// them.
    #[must_use]
    pub fn unspoken(&self) -> Vec<String> {
        let is_asked = |piece: &&Piece| matches!(piece.kind, Kind::Staged | Kind::AtBoot);
        let volumes = self.pieces.iter().filter(is_asked).map(|piece| &piece.volume);
        let volumes: BTreeSet<_> = volumes.filter(|one| !self.devices.contains_key(*one)).collect();
        volumes.into_iter().cloned().collect()
    }

    fn table(&self, answer: &ReportAnswer, learned: BTreeMap<String, Word>) -> Table {
        let attachments = self.devices.iter().map(|(volume, device)| {
            let attachment = Attachment {
                device: device.device.clone(),
                asked: device.asked,
                in_use: device.in_use,
                is_dead: !device.dead.is_empty(),
                size_bytes: device.size_bytes,
            };
            (volume.clone(), attachment)
        });
        let mut words = learned;
        // Whatever an answer does not name is attached here.
        for volume in self.devices.keys() {
            let standing = Standing::Here { size_bytes: 0 };
            words.insert(volume.clone(), Word { standing, ..Word::default() });
        }
        for size in &answer.sizes {
            if let Some(word) = words.get_mut(&size.volume_id) {
                word.standing = Standing::Here { size_bytes: size.size_bytes };
            }
        }
        for detached in &answer.detached {
            let Some(word) = words.get_mut(&detached.volume_id) else { continue };
            let is_deleted = detached.name.is_empty();
            word.standing = if is_deleted { Standing::Deleted } else { Standing::NotHere };
            word.name.clone_from(&detached.name);
        }
        for served in &answer.served_elsewhere {
            let Some(word) = words.get_mut(&served.volume_id) else { continue };
            word.name.clone_from(&served.name);
            word.served_elsewhere = Some((served.node.clone(), served.since_epoch));
        }
        Table {
            pieces: self.pieces.clone(),
            attachments: self.is_attach_there.then(|| attachments.collect()),
            words,
        }
    }
}

/// Client that asks the attach process of this host for its devices, and the kernel for all that was made
/// there.
#[derive(Clone)]
pub struct DeviceReports {
    client: AttachClient,
    directory: PathBuf,
    /// Node whose records name mounts.
    host: Option<Arc<NodeHost>>,
    /// Directory of the files by which volumes are attached at boot.
    at_boot: Option<PathBuf>,
}

impl DeviceReports {
    /// Asks the attach process behind this socket, which may start later.
    #[must_use]
    pub fn of(attach_socket: &Path) -> Self {
        let directory = attach_socket.parent().unwrap_or(Path::new("/")).to_owned();
        Self { client: AttachClient::new(attach_socket), directory, host: None, at_boot: None }
    }

    /// Returns the same, with the mounts of a node and the volumes that are attached at boot.
    #[must_use]
    pub fn with_host(self, host: Option<Arc<NodeHost>>, at_boot: &Path) -> Self {
        Self { host, at_boot: Some(at_boot.to_owned()), ..self }
    }

    /// Returns the devices, and whether the attach process named them.
    async fn query(&self) -> Option<(Vec<DeviceUse>, bool)> {
        match tokio::time::timeout(ANSWER_MAX, self.client.usage()).await {
            Ok(Ok(usage)) => {
                // No mount is named where the table cannot be read.
                let mounts = mountinfo::read().unwrap_or_default();
                let named = usage.into_iter().map(|usage| with_mounts(usage, &mounts)).collect();
                Some((named, true))
            }
            // The holder keeps these devices for the next process.
            Ok(Err(Error::Daemon { .. })) => {
                let holder = self.directory.join("holder.sock");
                let held = tokio::task::spawn_blocking(move || holder::held_at(&holder)).await;
                Some((held.ok()?.into_iter().map(held_device).collect(), false))
            }
            // An older process does not know the request; one that hangs does not answer.
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// Returns all devices as they are now; `None`: unknown.
    pub async fn report(&self) -> Option<Reported> {
        // Before the attach process is asked: what it makes meanwhile is then of one of its attachments.
        let this = self.clone();
        let pieces = tokio::task::spawn_blocking(move || this.pieces());
        let pieces = tokio::time::timeout(ANSWER_MAX, pieces).await;
        let (devices, is_attach_there) = self.query().await?;
        let mut pieces = pieces.ok().and_then(Result::ok).unwrap_or_default();
        for device in &devices {
            pieces.extend(device.mounts.iter().map(|path| Piece {
                volume: device.volume.clone(),
                kind: Kind::Foreign,
                path: path.clone(),
                is_used: false,
            }));
        }
        let named = devices.into_iter().map(|device| (device.volume.clone(), device));
        Some(Reported { devices: named.collect(), pieces, is_attach_there })
    }

    fn pieces(&self) -> Vec<Piece> {
        let made = quoin_attach::made_in(&self.directory).into_iter().map(|made| Piece {
            volume: made.volume,
            kind: match made.kind {
                MadeKind::Device => Kind::Device,
                MadeKind::File => Kind::File,
                MadeKind::Link => Kind::Link,
            },
            path: made.path,
            is_used: made.is_used,
        });
        let mut pieces: Vec<_> = made.collect();
        let mounts = mountinfo::read().unwrap_or_default();
        if let Some(host) = &self.host {
            pieces.extend(host.staged_pieces(&mounts).unwrap_or_default());
        }
        pieces.extend(self.at_boot.iter().flat_map(|directory| at_boot(directory)));
        pieces
    }

    /// Follows what the controller answered to a report, and what else was learned of volumes of which
    /// something is here: [`reconcile::decide`] says how.
    pub async fn follow(
        &self,
        reported: Option<&Reported>,
        answer: &ReportAnswer,
        learned: BTreeMap<String, Word>,
    ) -> Followed {
        let Some(reported) = reported else { return Followed::default() };
        let table = reported.table(answer, learned);
        let name_of = |volume: &String| {
            let name = table.words.get(volume).map(|word| word.name.clone());
            name.filter(|name| !name.is_empty()).unwrap_or_else(|| volume.clone())
        };
        let mut followed = Followed::default();
        for step in reconcile::decide(&table) {
            match step {
                Step::FailEarlierUse { volume, node, since_epoch } => {
                    let name = name_of(&volume);
                    let served = ServedElsewhere { volume, name: name.clone(), node, since_epoch };
                    self.tell(&name, self.client.served_elsewhere(served)).await;
                }
                Step::EndDevice { volume, asked, why } => {
                    let name = name_of(&volume);
                    let detached = DetachedHere { volume, asked, why: why.to_owned() };
                    self.tell(&name, self.client.detached(detached)).await;
                }
                Step::Grow { volume, size_bytes } => {
                    let resized = self.client.resize(&volume, size_bytes);
                    self.tell(&volume, async { resized.await.map(drop) }).await;
                }
                Step::Sweep { volume } => self.tell(&volume, self.client.sweep(&volume)).await,
                Step::TakeDown { volume, .. } => followed.to_take_down.push(volume),
                Step::Name { volume, text } => {
                    let name = name_of(&volume);
                    match followed.left.iter_mut().find(|(told, _)| *told == name) {
                        Some((_, told)) => *told = format!("{told}; {text}"),
                        None => followed.left.push((name, text)),
                    }
                }
            }
        }
        followed
    }

    async fn tell(&self, volume: &str, told: impl Future<Output = Result<(), Error>>) {
        if let Ok(Err(error)) = tokio::time::timeout(ANSWER_MAX, told).await {
            tracing::debug!(volume, %error, "the attach process does not follow yet; retrying");
        }
    }
}

/// Returns the files by which volumes are attached at boot.
fn at_boot(directory: &Path) -> Vec<Piece> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let piece = |path: PathBuf| {
        #[derive(serde::Deserialize)]
        struct AtBoot {
            id: String,
        }
        let file = std::fs::File::open(&path).ok()?;
        let mut text = Vec::new();
        file.take(AT_BOOT_BYTES_MAX).read_to_end(&mut text).ok()?;
        let AtBoot { id: volume } = serde_json::from_slice(&text).ok()?;
        Some(Piece { volume, kind: Kind::AtBoot, path, is_used: false })
    };
    let paths = entries.map(|entry| entry.path()).take(AT_BOOT_MAX);
    paths
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .filter_map(piece)
        .collect()
}

impl From<DeviceUse> for DeviceReport {
    fn from(device_use: DeviceUse) -> Self {
        let shown = |path: &PathBuf| path.display().to_string();
        DeviceReport {
            device: shown(&device_use.device),
            in_use: device_use.in_use,
            mounts: device_use.mounts.iter().map(shown).collect(),
            since_epoch: device_use.since_epoch,
            volume_id: device_use.volume,
            size_bytes: device_use.size_bytes,
            dead: device_use.dead,
        }
    }
}

fn with_mounts(usage: Usage, mounts: &[mountinfo::Mount]) -> DeviceUse {
    let numbers = device::numbers_with_partitions(&usage.device);
    let of_device = |mount: &&mountinfo::Mount| numbers.contains(&(mount.major, mount.minor));
    let points = mounts.iter().filter(of_device).map(|mount| mount.mount_point.clone());
    DeviceUse {
        mounts: points.take(MOUNTS_MAX).collect(),
        volume: usage.volume,
        device: usage.device,
        in_use: usage.in_use,
        since_epoch: usage.since_epoch,
        dead: usage.dead,
        size_bytes: usage.size,
        asked: usage.asked,
    }
}

/// A device whose process is away: its users wait for the next one.
fn held_device(volume: String) -> DeviceUse {
    DeviceUse {
        volume,
        device: PathBuf::new(),
        in_use: true,
        mounts: Vec::new(),
        since_epoch: 0,
        dead: String::new(),
        size_bytes: 0,
        asked: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use quoin_api::control::{DetachedDevice, DeviceSize, ServedElsewhere as Served};
    use quoin_attach::protocol::{Request, Response};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::*;

    #[tokio::test]
    async fn without_attach_process_and_holder_there_are_no_devices() {
        let directory = tempfile::tempdir().unwrap();
        let devices = DeviceReports::of(&directory.path().join("attach.sock"));
        assert_eq!(devices.query().await, Some((Vec::new(), false)));
        assert_eq!(devices.report().await, Some(Reported::default()));
        // A process that hangs is not a process without devices.
        let _listener =
            tokio::net::UnixListener::bind(directory.path().join("attach.sock")).unwrap();
        assert_eq!(devices.query().await, None);
    }

    fn device(volume: &str, asked: u64, size_bytes: u64) -> DeviceUse {
        let device = format!("/dev/of-{volume}").into();
        DeviceUse { device, asked, size_bytes, in_use: false, ..held_device(volume.into()) }
    }

    fn piece(volume: &str, kind: Kind) -> Piece {
        let path = format!("/of-{volume}").into();
        Piece { volume: volume.into(), kind, path, is_used: false }
    }

    /// A host with a volume for each thing that an answer may say, and one of which it says nothing.
    fn host() -> Reported {
        let mut dead = device("moved", 3, 4096);
        dead.dead = "served by h2".into();
        let devices =
            [device("grown", 1, 4096), device("gone", 2, 4096), dead, device("same", 4, 4096)];
        Reported {
            devices: devices.into_iter().map(|one| (one.volume.clone(), one)).collect(),
            pieces: vec![
                piece("gone", Kind::Staged),
                piece("left", Kind::Staged),
                piece("boot", Kind::AtBoot),
                piece("stray", Kind::File),
                piece("linked", Kind::Link),
                piece("foreign", Kind::Foreign),
            ],
            is_attach_there: true,
        }
    }

    fn answer() -> ReportAnswer {
        let detached = |volume_id: &str, name: &str| DetachedDevice {
            volume_id: volume_id.into(),
            name: name.into(),
        };
        let size = |volume_id: &str| DeviceSize { volume_id: volume_id.into(), size_bytes: 8192 };
        let served = |volume_id: &str| Served {
            volume_id: volume_id.into(),
            name: "m".into(),
            node: "h2".into(),
            since_epoch: 31,
        };
        ReportAnswer {
            // Nothing is said of what was not reported.
            detached: vec![detached("gone", "g"), detached("nowhere", "")],
            sizes: vec![size("grown"), size("nowhere")],
            served_elsewhere: vec![served("moved"), served("nowhere")],
            ..ReportAnswer::default()
        }
    }

    #[test]
    fn each_word_of_an_answer_is_of_its_own_volume_and_of_none_that_was_not_reported() {
        let learned = BTreeMap::from([(
            "left".to_owned(),
            Word { standing: Standing::NotHere, ..Word::default() },
        )]);
        let table = host().table(&answer(), learned.clone());
        let is = |volume: &str| table.words[volume].standing;
        assert_eq!(is("grown"), Standing::Here { size_bytes: 8192 });
        assert_eq!((is("gone"), table.words["gone"].name.as_str()), (Standing::NotHere, "g"));
        assert_eq!(is("same"), Standing::Here { size_bytes: 0 }, "it is attached here");
        assert_eq!(is("moved"), Standing::Here { size_bytes: 0 });
        assert_eq!(table.words["moved"].served_elsewhere, Some(("h2".to_owned(), 31)));
        assert_eq!((is("left"), table.words.len()), (Standing::NotHere, 5));
        let attached = table.attachments.unwrap();
        let of = |volume: &str| (attached[volume].asked, attached[volume].is_dead);
        assert_eq!((of("grown"), of("moved"), attached.len()), ((1, false), (3, true), 4));
        assert_eq!(attached["gone"].size_bytes, 4096);
        // One without a name is deleted.
        let mut deleted = answer();
        deleted.detached[0].name.clear();
        assert_eq!(host().table(&deleted, learned).words["gone"].standing, Standing::Deleted);
        // Without its process nothing is known of devices.
        let away = Reported { is_attach_there: false, ..host() };
        assert_eq!(away.table(&answer(), BTreeMap::new()).attachments, None);
        assert_eq!(host().unspoken(), ["boot", "left"]);
    }

    #[test]
    fn all_that_is_known_of_a_device_is_reported() {
        let one = DeviceUse {
            mounts: vec!["/a b".into(), "/c".into()],
            in_use: true,
            since_epoch: 7,
            dead: "why".into(),
            ..device("v", 9, 4096)
        };
        let reported = DeviceReport::from(one);
        assert_eq!((reported.volume_id.as_str(), reported.device.as_str()), ("v", "/dev/of-v"));
        assert_eq!(reported.mounts, ["/a b", "/c"]);
        assert_eq!((reported.in_use, reported.since_epoch, reported.size_bytes), (true, 7, 4096));
        assert_eq!(reported.dead, "why");
        // A device that the holder keeps has users that wait for it.
        let held = DeviceReport::from(held_device("v".into()));
        assert!(held.in_use && held.device.is_empty() && held.size_bytes == 0);
    }

    /// The requests to the attach process, in order.
    #[tokio::test]
    async fn an_answer_is_followed_volume_by_volume_and_what_stays_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("attach.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let heard = asked.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let mut stream = BufReader::new(stream);
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                heard.lock().unwrap().push(serde_json::from_str::<Request>(&line).unwrap());
                let mut reply = serde_json::to_vec(&Response::Ended { did: Vec::new() }).unwrap();
                reply.push(b'\n');
                stream.get_mut().write_all(&reply).await.unwrap();
            }
        });
        let devices = DeviceReports::of(&socket);
        let learned = BTreeMap::from([
            ("left".to_owned(), Word { standing: Standing::NotHere, ..Word::default() }),
            ("foreign".to_owned(), Word { standing: Standing::Deleted, ..Word::default() }),
            ("boot".to_owned(), Word { standing: Standing::Deleted, ..Word::default() }),
        ]);
        let followed = devices.follow(Some(&host()), &answer(), learned).await;
        let why = "its volume is not attached to this host any more".to_owned();
        let expected = [
            Request::Detached(DetachedHere { volume: "gone".into(), asked: 2, why }),
            Request::Resize { volume: "grown".into(), size: 8192 },
            Request::Sweep { volume: "linked".into() },
            Request::ServedElsewhere(ServedElsewhere {
                volume: "moved".into(),
                name: "m".into(),
                node: "h2".into(),
                since_epoch: 31,
            }),
            Request::Sweep { volume: "stray".into() },
        ];
        assert_eq!(*asked.lock().unwrap(), expected);
        // The device of "gone" goes first.
        assert_eq!(followed.to_take_down, ["left"]);
        let named: Vec<&str> = followed.left.iter().map(|(volume, _)| volume.as_str()).collect();
        assert_eq!(named, ["boot", "foreign", "m"]);
        // Nothing was reported: nothing is followed.
        let nothing = devices.follow(None, &answer(), BTreeMap::new()).await;
        assert_eq!((nothing, asked.lock().unwrap().len()), (Followed::default(), 5));
    }

    #[test]
    fn files_of_volumes_at_boot_are_read_up_to_their_limit_and_others_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            std::fs::write(directory.path().join(name), text).unwrap();
        };
        let long = |bytes: usize| {
            let bare = r#"{"pad":"","id":"long"}"#.len();
            format!(r#"{{"pad":"{}","id":"long"}}"#, "x".repeat(bytes - bare))
        };
        file("a.json", r#"{"id":"1","name":"db"}"#);
        file("b.json.new", r#"{"id":"2"}"#);
        file("c.txt", r#"{"id":"3"}"#);
        file("d.json", "{");
        file("e.json", r#"{"name":"none"}"#);
        std::fs::create_dir(directory.path().join("f.json")).unwrap();
        let found = || {
            let mut found: Vec<_> =
                at_boot(directory.path()).into_iter().map(|piece| piece.volume).collect();
            found.sort();
            found
        };
        assert_eq!(found(), ["1"]);
        for (bytes, is_read) in [((64 << 10) - 1, true), (64 << 10, true), ((64 << 10) + 1, false)]
        {
            file("g.json", &long(bytes));
            assert_eq!(found().contains(&"long".to_owned()), is_read, "{bytes} bytes");
        }
        let pieces = at_boot(directory.path());
        assert!(pieces.iter().all(|one| one.kind == Kind::AtBoot && !one.is_used));
        assert_eq!(at_boot(Path::new("/nowhere")), []);
    }
}
