//! `quoin volume attach --node`: a volume as a block device of another host.
//!
//! The controller instructs that host's target, whose attach process makes the device. This command
//! asks for the device, polls its progress and prints where it is; interrupted, the work goes on.

use anyhow::{Result, bail};
use quoin_api::control::{Attachment, PublishVolumeRequest, UnpublishVolumeRequest, Volume};
use std::time::{Duration, Instant};

use super::attach::{AttachedView, USAGE};
use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::output::{self, Format};

const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two lines about the same.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

pub struct Request {
    pub volume: Volume,
    pub node: String,
    pub read_only: bool,
    /// How nodes share the volume; empty: this one alone has it.
    pub sharing: &'static str,
}

pub async fn attach(
    cluster: &mut Cluster,
    asked: Request,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let Request { volume, node, read_only, sharing } = asked;
    let name = volume.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let was_there = volume.attachments.iter().any(|attachment| attachment.node == node);
    let request = PublishVolumeRequest {
        volume: Some(id_ref(&volume.id)),
        node: node.clone(),
        read_only,
        usage: USAGE.into(),
        device: true,
        sharing: sharing.to_owned(),
        ..Default::default()
    };
    cluster.publish_volume(request).await.map_err(refusal)?;
    let device = match follow(cluster, &volume.id, &name, &node, client).await? {
        Ok(device) => device,
        Err(message) if was_there => bail!("node {node}: {message}"),
        // The refusal is permanent, so the volume is not left attached without a device.
        Err(message) => {
            let volume = Some(id_ref(&volume.id));
            let request =
                UnpublishVolumeRequest { volume, node: node.clone(), ..Default::default() };
            cluster.unpublish_volume(request).await.map_err(refusal)?;
            bail!("node {node}: {message}; the volume is detached again")
        }
    };
    let view = AttachedView {
        volume: name,
        id: volume.id,
        node,
        device,
        link: String::new(),
        nbd_uri: String::new(),
        read_only,
    };
    output::print_one(format, &view, || view.device.clone())
}

/// Polls until the device is there; the inner error is a refusal that waiting does not change.
async fn follow(
    cluster: &mut Cluster,
    id: &str,
    name: &str,
    node: &str,
    client: &ClientOptions,
) -> Result<Result<String, String>> {
    let began = Instant::now();
    let mut last_report = (String::new(), Instant::now());
    loop {
        let now = get_volume(cluster, id).await?;
        let Some(attachment) = now.attachments.iter().find(|found| found.node == node) else {
            bail!("volume {name} was detached from node {node} meanwhile");
        };
        if !attachment.device.is_empty() {
            return Ok(Ok(attachment.device.clone()));
        }
        if attachment.device_refused {
            return Ok(Err(attachment.device_message.clone()));
        }
        let waits = waits(&now, attachment);
        if began.elapsed() > client.timeout() {
            bail!(
                "the volume is attached to node {node}, and is no block device there after {} s \
                 (--timeout): {waits}. Run the command again to wait on, or give it up with `quoin \
                 volume detach {} --node {node}`",
                client.timeout,
                output::quoted(name)
            );
        }
        if began.elapsed() > REPORT_INTERVAL
            && (last_report.0 != waits || last_report.1.elapsed() > REPORT_INTERVAL)
        {
            eprintln!("node {node}: {waits}");
            last_report = (waits, Instant::now());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The cause that keeps the device from being there, the nearest one first.
fn waits(volume: &Volume, attachment: &Attachment) -> String {
    let causes = [&attachment.device_message, &attachment.message, &volume.waiting_for];
    match causes.into_iter().find(|cause| !cause.is_empty()) {
        Some(cause) => cause.clone(),
        None => "its target has not reported the device yet".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_cause_is_named() {
        let mut attachment = Attachment::default();
        let mut volume = Volume::default();
        assert!(waits(&volume, &attachment).contains("has not reported"));
        volume.waiting_for = "pool a to come online".into();
        assert_eq!(waits(&volume, &attachment), "pool a to come online");
        attachment.message = "node h2 is offline".into();
        assert_eq!(waits(&volume, &attachment), "node h2 is offline");
        attachment.device_message = "no `quoin attach`".into();
        assert_eq!(waits(&volume, &attachment), "no `quoin attach`");
    }
}
