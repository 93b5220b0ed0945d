//! `quoin volume …`: create, look at, attach, resize and delete volumes.

mod at_boot;
mod attach;
mod detach;
mod doctor;
mod flatten;
mod heal;
mod keys;
mod modify;
mod options;
mod reclaim;
mod remote;
mod replica_view;
mod replicas;
mod verify;
mod view;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use quoin_api::control::{
    CreateVolumeRequest, DeleteVolumeRequest, GetVolumeRequest, ListVolumesRequest,
    ResizeVolumeRequest, SnapshotRef, Topology, Volume, VolumeSource, VolumeSpec,
};
use quoin_api::topology::{is_key, is_label};
use quoin_api::volume::Local;
use std::io::{BufRead, IsTerminal, Write};
use std::time::Instant;

use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal, volume_ref};
use crate::document::Document;
use crate::output::{self, Format};
use crate::size::{number_within, parse_size, show_size};
use detach::DetachedView;
use options::OptionFlags;

pub use replicas::{ReplicaCommand, run as run_replica, wait_until_changed};
pub use view::{LocalDeviceView, VolumeView};

#[derive(Subcommand)]
pub enum VolumeCommand {
    /// Create a volume and wait until it can be attached. It begins empty, or as a copy of a snapshot
    /// or of another volume: that takes moments whatever the size, and no space until either is
    /// written.
    #[command(after_help = "Examples:\n  quoin volume create db --size 10GiB --replicas 3\n  \
                            quoin volume create db --size 10GiB --spread rack\n  \
                            quoin volume create db --size 10GiB --topology quoin.io/zone=west\n  \
                            quoin volume create test --from-snapshot before-upgrade\n  \
                            quoin volume create copy --from-volume db --size 20GiB\n\
                            A copy has the options of its source unless others are given, and is as \
                            large at least.\nSee docs/clones.md.")]
    Create(Box<CreateOptions>),
    /// One volume whole: health, what it survives, its replicas, what it waits for.
    Get {
        /// Its name or id.
        volume: String,
        /// As the document that `quoin apply -f` takes, with its status.
        #[arg(long)]
        manifest: bool,
        #[command(flatten)]
        host: attach::HostOptions,
    },
    /// All volumes.
    #[command(visible_alias = "ls")]
    List {
        /// Deleted ones too, while pools that are away still hold some of them.
        #[arg(long)]
        all: bool,
        /// Only those of claims in this namespace of Kubernetes.
        #[arg(long, value_name = "NAMESPACE")]
        namespace: Option<String>,
        /// Only those of claims of this name.
        #[arg(long, value_name = "NAME")]
        claim: Option<String>,
    },
    /// Make a volume a block device of this host, or of another, and print the device.
    #[command(after_help = "Examples:\n  quoin volume attach db          prints /dev/quoin/db\n  \
                            quoin volume attach db --nbd    prints an NBD address; needs no root\n \
                             quoin volume attach db --at-boot --mount /srv/db    at each boot too")]
    Attach(attach::AttachOptions),
    /// Attach and mount again what this host has at boot; run by quoin-volume@.service.
    #[command(hide = true)]
    AttachAtBoot(at_boot::AttachAtBootOptions),
    /// Take the block device away. Unmount its file system first.
    Detach(detach::DetachOptions),
    /// Make a volume larger, attached or not. (Volumes never shrink.)
    Resize {
        /// Its name or id.
        volume: String,
        /// The new size, as in 20GiB.
        #[arg(long, value_parser = parse_size, allow_hyphen_values = true)]
        size: u64,
        #[command(flatten)]
        host: attach::HostOptions,
    },
    /// Give a volume more replicas, or change how many of them must hold a write; while it is used,
    /// or attached nowhere (then a node's target opens it for as long as that takes).
    #[command(after_help = "Examples:\n  quoin volume scale db --replicas 5 --wait\n  \
                            quoin volume scale db --consistency-factor 3")]
    Scale(replicas::ScaleOptions),
    /// Make a volume independent of what it was made from: it takes over the blocks that it shares,
    /// in the background, beside its use. Its source may be deleted before or after.
    #[command(after_help = flatten::HELP)]
    Flatten(flatten::FlattenOptions),
    /// Give back space that is dead in a volume's replicas: overwritten, trimmed or deleted blocks.
    #[command(after_help = reclaim::HELP)]
    Reclaim(reclaim::ReclaimOptions),
    /// Change options of a volume, attached or not: limits, durability, what IO does without a
    /// quorum or room, how many replicas it has.
    #[command(after_help = modify::HELP)]
    Modify(Box<modify::ModifyOptions>),
    /// Say what is wrong with a volume, since when, what Quoin does about it, and what you can do.
    #[command(after_help = doctor::HELP)]
    Doctor {
        /// Its name or id.
        volume: String,
    },
    /// Heal a volume that CSI has staged on this host: mounts, device, file system, session.
    #[command(after_help = heal::HELP)]
    Heal(heal::HealOptions),
    /// Go on with the replicas that are left, where too few are to open the volume; what only the
    /// others held is lost. Refused while a majority is there.
    #[command(after_help = "Example: two of three pools burned down\n  \
                            quoin volume recover db --keep pool-a --destroyed pool-b \\\n    \
                            --destroyed pool-c --accept-loss-of db\n\
                            A replica whose pool is back without it (wiped) needs no --destroyed. \
                            As many\nreplicas as are desired are made again by themselves.")]
    Recover(replicas::RecoverOptions),
    /// Compare all replicas of a volume with each other, block by block, while it is used.
    #[command(after_help = verify::VERIFY_HELP)]
    Verify(verify::VerifyOptions),
    /// Compare all replicas, and replace what is bad in one by the copy of another.
    #[command(after_help = verify::REPAIR_HELP)]
    Repair(verify::RepairOptions),
    /// The keys of an encrypted volume: list, add, remove and rotate its key slots.
    #[command(subcommand)]
    Key(keys::KeyCommand),
    /// Delete a volume and all its data. Where it has snapshots, these stay until they are deleted.
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name or id.
        volume: String,
        /// Do not ask.
        #[arg(long, short)]
        yes: bool,
    },
}

#[derive(Args)]
pub struct CreateOptions {
    /// The volume's name: up to 128 bytes, no control characters.
    #[arg(value_parser = parse_name)]
    name: String,
    /// Its size, as in 10GiB: whole blocks of 4 KiB, at least 1 MiB [default: that of its source].
    #[arg(long, value_parser = parse_size, allow_hyphen_values = true,
          required_unless_present_any = ["from_snapshot", "from_volume"])]
    size: Option<u64>,
    /// Begin with the content of this snapshot, by its name or id.
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["from_volume", "encrypt"])]
    from_snapshot: Option<String>,
    /// Begin with the content that this volume has now, by its name or id.
    #[arg(long, value_name = "VOLUME", conflicts_with = "encrypt")]
    from_volume: Option<String>,
    /// Copies to keep, each in a pool of its own [default: the cluster's, 3].
    #[arg(long, allow_hyphen_values = true, value_parser = number_within::<u32>(1..=8,
          "a volume has 1 to 8 replicas, each in a pool of its own"))]
    replicas: Option<u32>,
    /// Copies that must hold a write before it is acknowledged [default: a majority].
    #[arg(long, allow_hyphen_values = true, value_parser = number_within::<u32>(1..=8,
          "1 to as many as there are replicas (8 at most) must hold a write; leave it out for a \
           majority"))]
    consistency_factor: Option<u32>,
    #[command(flatten)]
    options: OptionFlags,
    /// Where the volume is to be, as in quoin.io/zone=west (several segments with commas between
    /// them); may be repeated, the best first. Its replicas go into as few of these as hold them;
    /// with `--spread zone` (or rack, or `--local required`) each takes one replica. Its users are
    /// bound to these as well, and `--local any` makes the list a wish.
    #[arg(long, value_name = "KEY=VALUE[,KEY=VALUE]", value_parser = parse_topology)]
    topology: Vec<Topology>,
    #[command(flatten)]
    encryption: keys::EncryptOptions,
    /// Accept a consistency factor below a majority: one failure may then lose acknowledged
    /// writes.
    #[arg(long)]
    allow_loss_on_single_failure: bool,
    /// Return at once instead of waiting until the volume is ready.
    #[arg(long)]
    no_wait: bool,
}

/// Names as CSI allows them: anything readable of at most 128 bytes.
pub fn parse_name(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("a volume needs a name, as in `quoin volume create db --size 1GiB`".into());
    }
    if text.len() > 128 {
        return Err(format!("{} bytes long; names have at most 128", text.len()));
    }
    if let Some(letter) = text.chars().find(|letter| letter.is_control()) {
        return Err(format!(
            "holds the control character U+{:04X}; names are plain text",
            letter as u32
        ));
    }
    Ok(text.into())
}

/// Reads one topology: its segments with commas between them.
fn parse_topology(text: &str) -> Result<Topology, String> {
    let mut topology = Topology::default();
    for segment in text.split(',') {
        let (key, value) = segment
            .split_once('=')
            .filter(|(key, value)| is_key(key) && is_label(value))
            .ok_or("write it as KEY=VALUE, as in quoin.io/zone=west or quoin.io/node=h1")?;
        if topology.segments.insert(key.to_ascii_lowercase(), value.to_owned()).is_some() {
            return Err(format!("it gives {key} twice; repeat the flag for another topology"));
        }
    }
    Ok(topology)
}

impl CreateOptions {
    /// The source of a copy; `None`: the volume begins empty.
    async fn source(&self, cluster: &mut Cluster) -> Result<Option<VolumeSource>> {
        let source = match (&self.from_snapshot, &self.from_volume) {
            (Some(name), _) => {
                let found = crate::snapshot::get(cluster, name).await?;
                let snapshot = Some(SnapshotRef { id: found.id, name: String::new() });
                VolumeSource { snapshot, volume: None, as_source: true }
            }
            (_, Some(name)) => {
                let volume = Some(id_ref(&get_volume(cluster, name).await?.id));
                VolumeSource { snapshot: None, volume, as_source: true }
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(source))
    }

    fn spec(&self) -> VolumeSpec {
        let mut options = self.options.spec.clone();
        // A person who lists topologies means those alone; an orchestrator lists all that it knows.
        if !self.topology.is_empty() && options.local.is_empty() {
            options.local = Local::Pinned.to_string();
        }
        VolumeSpec {
            name: self.name.clone(),
            size_bytes: self.size.unwrap_or(0),
            // 0 and empty mean: as the cluster has it.
            replicas: self.replicas.unwrap_or(0),
            consistency_factor: self.consistency_factor.unwrap_or(0),
            allow_loss_on_single_failure: self.allow_loss_on_single_failure,
            // The order of the flags is the order of preference.
            accessible_topology: self.topology.clone(),
            preferred_topology: self.topology.clone(),
            ..options
        }
    }
}

pub async fn run(command: VolumeCommand, client: &ClientOptions, format: Format) -> Result<()> {
    if let VolumeCommand::AttachAtBoot(options) = command {
        // A boot asks no controller.
        return at_boot::attach_at_boot(options, client).await;
    }
    let mut cluster = client.connect().await?;
    match command {
        VolumeCommand::AttachAtBoot(options) => at_boot::attach_at_boot(options, client).await,
        VolumeCommand::Create(options) => create(&mut cluster, *options, client, format).await,
        VolumeCommand::Get { volume, manifest: true, .. } => {
            let document = Document::of(get_volume(&mut cluster, &volume).await?)?;
            output::print_line(
                match format {
                    Format::Json => serde_json::to_string_pretty(&document)?,
                    _ => serde_yaml_ng::to_string(&document)?,
                }
                .trim_end(),
            )
        }
        VolumeCommand::Get { volume, manifest: false, host } => {
            let volume = get_volume(&mut cluster, &volume).await?;
            let here = attach::local_device(&volume, &host.client(client)).await;
            let view = VolumeView { here, ..VolumeView::from(volume) };
            output::print_one(format, &view, || view.text())
        }
        VolumeCommand::List { all, namespace, claim } => {
            let volumes = list(&mut cluster, all).await?;
            let mut rows: Vec<_> = volumes.into_iter().map(VolumeView::from).collect();
            rows.retain(|row| row.is_of(namespace.as_deref(), claim.as_deref()));
            rows.sort_by(|one, other| (&one.name, &one.id).cmp(&(&other.name, &other.id)));
            let none = match (namespace, claim) {
                (None, None) => "no volumes: make one with `quoin volume create db --size 1GiB`",
                _ => "no volumes of such a claim; `quoin volume list -o wide` shows all claims",
            };
            output::print_list(format, &rows, none)
        }
        VolumeCommand::Attach(options) => {
            attach::attach(&mut cluster, options, client, format).await
        }
        VolumeCommand::Detach(options) => {
            detach::detach(&mut cluster, options, client, format).await
        }
        VolumeCommand::Resize { volume, size, host } => {
            resize(&mut cluster, &volume, size, &host.client(client), format).await
        }
        VolumeCommand::Scale(options) => {
            replicas::scale(&mut cluster, options, client, format).await
        }
        VolumeCommand::Reclaim(options) => {
            reclaim::reclaim(&mut cluster, options, client, format).await
        }
        VolumeCommand::Flatten(options) => {
            flatten::flatten(&mut cluster, options, client, format).await
        }
        VolumeCommand::Modify(options) => {
            modify::modify(&mut cluster, *options, client, format).await
        }
        VolumeCommand::Doctor { volume } => doctor::doctor(&mut cluster, &volume, format).await,
        VolumeCommand::Heal(options) => heal::heal(&mut cluster, options, client, format).await,
        VolumeCommand::Verify(options) => {
            verify::verify(&mut cluster, options, client, format).await
        }
        VolumeCommand::Repair(options) => {
            verify::repair(&mut cluster, options, client, format).await
        }
        VolumeCommand::Recover(options) => {
            replicas::recover(&mut cluster, options, client, format).await
        }
        VolumeCommand::Key(command) => keys::run(&mut cluster, command, format).await,
        VolumeCommand::Delete { volume, yes } => {
            // A volume that does not exist needs no confirmation.
            let found = get_volume(&mut cluster, &volume).await?;
            // An orchestrator's deletion of a copy is answered, and takes nothing: a person is told.
            let role = found.mirror.as_ref().map(|mirror| mirror.role.as_str()).unwrap_or_default();
            if ["secondary", "promoting", "diverged", "resyncing"].contains(&role) {
                bail!(
                    "volume {volume} is a copy of a volume of another cluster, and belongs to its mirror: end \
                     that on the other side (`quoin mirror disable`), and promote or delete what is left here"
                );
            }
            if !yes {
                confirm_delete(&volume)?;
            }
            let request = DeleteVolumeRequest { volume: Some(id_ref(&found.id)) };
            cluster.delete_volume(request).await.map_err(refusal)?;
            let view = wait_until_deleted(&mut cluster, volume, &found.id, client).await?;
            output::print_one(format, &view, || match view.state {
                "deleted" => format!("volume {} is deleted", view.volume),
                "retained" => format!(
                    "volume {} is deleted, and its snapshots are kept: {}",
                    view.volume, view.waiting_for
                ),
                _ => format!(
                    "volume {} is being deleted; the deletion continues by itself and waits for {}",
                    view.volume, view.waiting_for
                ),
            })
        }
    }
}

/// Pools free the space of each replica; one that is away does so when it is back.
async fn wait_until_deleted(
    cluster: &mut Cluster,
    name: String,
    id: &str,
    client: &ClientOptions,
) -> Result<DetachedView> {
    let began = Instant::now();
    let view =
        |state, waiting_for| DetachedView { volume: name, id: id.to_owned(), state, waiting_for };
    loop {
        let request = GetVolumeRequest { volume: Some(volume_ref(id)) };
        let volume = match cluster.get_volume(request).await {
            Ok(volume) => volume.into_inner(),
            Err(status) if status.code() == tonic::Code::NotFound => {
                return Ok(view("deleted", String::new()));
            }
            Err(status) => return Err(refusal(status)),
        };
        if volume.phase == "Retained" {
            let kept = match volume.snapshots {
                1 => "1 snapshot".to_owned(),
                count => format!("{count} snapshots"),
            };
            let id = &volume.id;
            let waiting_for = format!(
                "{kept} (`quoin snapshot list {id}`); its space is free once they are deleted"
            );
            return Ok(view("retained", waiting_for));
        }
        if began.elapsed() > client.timeout() {
            return Ok(view("deleting", volume.waiting_for));
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// Every volume, page by page.
pub async fn list(cluster: &mut Cluster, include_deleting: bool) -> Result<Vec<Volume>> {
    let mut volumes = Vec::new();
    let mut starting_token = String::new();
    loop {
        let request = ListVolumesRequest { starting_token, include_deleting, ..Default::default() };
        let page = cluster.list_volumes(request).await.map_err(refusal)?.into_inner();
        volumes.extend(page.volumes);
        if page.next_token.is_empty() {
            return Ok(volumes);
        }
        starting_token = page.next_token;
    }
}

async fn create(
    cluster: &mut Cluster,
    options: CreateOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    // A user who names a size wants that one, not any that is at least as large.
    let limit_bytes = match options.size {
        Some(size) => quoin_control::spec::size(size, 0)?,
        None => 0,
    };
    let source = options.source(cluster).await?;
    let (encryption, user) = options.encryption.make()?.unzip();
    let spec = Some(VolumeSpec { encryption, ..options.spec() });
    let any_size = options.size.is_none();
    let request = CreateVolumeRequest { spec, limit_bytes, any_size, source };
    let mut volume = cluster.create_volume(request).await.map_err(in_flags)?.into_inner();
    if let Some(user) = user {
        keys::check_made(&volume, &user)?;
    }
    let began = Instant::now();
    while !options.no_wait && volume.phase == "Pending" {
        if began.elapsed() > client.timeout() {
            bail!(
                "volume {} is made but not ready after {} s; it waits for: {}. It continues by \
                 itself: watch it with `quoin volume get {}`",
                options.name,
                client.timeout,
                volume.waiting_for,
                options.name
            );
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        volume = get_volume(cluster, &volume.id).await?;
    }
    let view = VolumeView::from(volume);
    output::print_one(format, &view, || {
        let more = match options.size.filter(|size| view.size_bytes > *size) {
            Some(size) => format!(
                " ({} were requested; a volume has whole blocks of 4 KiB, at least 1 MiB)",
                show_size(size)
            ),
            None => String::new(),
        };
        let replicas = match view.replicas.len() {
            1 => "1 replica".into(),
            count => format!("{count} replicas"),
        };
        format!(
            "volume {} is {}: {}{more}, {replicas}, {}\nnext: quoin volume attach {}{}",
            view.name,
            view.state.phase.to_lowercase(),
            show_size(view.size_bytes),
            view.state.contract,
            output::quoted(&view.name),
            if view.encryption.is_some() { " --key-file FILE" } else { "" }
        )
    })
}

async fn resize(
    cluster: &mut Cluster,
    name: &str,
    size: u64,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let before = get_volume(cluster, name).await?;
    if size < before.size_bytes {
        bail!(
            "volume {name} has {}; volumes never shrink, since that would cut off data: \
             make a smaller one and copy",
            show_size(before.size_bytes)
        );
    }
    let request =
        ResizeVolumeRequest { volume: Some(id_ref(&before.id)), size_bytes: size, limit_bytes: 0 };
    let volume = cluster.resize_volume(request).await.map_err(refusal)?.into_inner();
    let next = attach::resize_device(&volume, client).await?;
    let view = VolumeView::from(volume);
    output::print_one(format, &view, || {
        let next: String = next.iter().map(|command| format!("\nnext: {command}")).collect();
        format!("volume {} has {} now{next}", view.name, show_size(view.size_bytes))
    })
}

/// The controller names fields, as orchestrators do; a user has typed flags.
fn in_flags(status: tonic::Status) -> anyhow::Error {
    const FLAGS: [(&str, &str); 12] = [
        ("allowLossOnSingleFailure", "--allow-loss-on-single-failure"),
        ("consistencyFactor", "--consistency-factor"),
        ("onQuorumLoss", "--on-quorum-loss"),
        ("onFull", "--on-full"),
        ("iopsLimit", "--iops-limit"),
        ("bandwidthLimit", "--bandwidth-limit"),
        ("blockSize", "--block-size"),
        ("fsType", "--fs-type"),
        ("spread: pool", "--spread pool"),
        ("spread: host", "--spread host"),
        ("local: required", "--local required"),
        ("local: preferred", "--local preferred"),
    ];
    let message = refusal(status).to_string();
    let words = FLAGS.iter().fold(message, |text, (field, flag)| text.replace(field, flag));
    anyhow::anyhow!(words)
}

/// Data is lost only after the volume's name was typed, or with --yes in a script.
fn confirm_delete(volume: &str) -> Result<()> {
    if !std::io::stdin().is_terminal() {
        bail!(
            "deleting destroys the data of volume `{}`: add --yes to do it without the question",
            output::plain(volume)
        );
    }
    print!("This destroys all data of volume {volume}. Type its name to continue: ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if answer.trim() != volume {
        bail!("not deleted: that was not its name");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_creation_names_the_flags_of_the_command() {
        let status = tonic::Status::invalid_argument(
            "consistencyFactor: too low; accept that with allowLossOnSingleFailure",
        );
        let message = in_flags(status).to_string();
        assert!(message.contains("--consistency-factor: too low"), "{message}");
        assert!(message.ends_with("--allow-loss-on-single-failure"), "{message}");
    }

    #[test]
    fn names_that_are_empty_too_long_or_unreadable_are_refused_with_the_reason() {
        assert!(parse_name("db-1").is_ok());
        assert!(parse_name("größe 7").is_ok());
        assert!(parse_name("").unwrap_err().contains("needs a name"));
        assert!(parse_name(&"x".repeat(129)).unwrap_err().contains("at most 128"));
        assert!(parse_name("a\u{7}b").unwrap_err().contains("U+0007"));
        assert!(parse_name("a\nb").unwrap_err().contains("control character"));
    }
}
