//! Parts of a snapshot's content, one after the other: from the target of this host where it serves the
//! volume, and else from the controller.

use anyhow::{Result, bail};
use quoin_api::control::{PullSnapshotRequest, Snapshot, SnapshotPart, SnapshotRef};
use quoin_types::BLOCK_SIZE;
use quoin_types::ids::{SnapshotId, VolumeId};
use quoin_wire::history::{SOCKET, Wanted};
use std::time::{Duration, Instant};
use tonic::{Code, Response, Status};

use super::stream::Stream;
use crate::client::{ClientOptions, Cluster, refusal};

/// Pause before a part that did not come is requested again, and between two lines about it.
const AGAIN: Duration = Duration::from_millis(300);
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// Time for which a target that did not serve a part is passed over: a target that was started again, or to
/// which the volume came meanwhile, is used from then on.
const PASSED_OVER: Duration = Duration::from_secs(5);

/// Reads a snapshot part by part; each part is the same whenever it is requested.
pub struct Pull<'a> {
    pub cluster: &'a mut Cluster,
    pub client: &'a ClientOptions,
    pub snapshot: &'a Snapshot,
    pub since: Option<&'a Snapshot>,
    pub want_data: bool,
    pub source: Source,
}

/// Source of the last part.
#[derive(Default)]
pub enum Source {
    /// No part was read yet.
    #[default]
    Unknown,
    Target(Stream),
    /// The target of this host is passed over until then.
    Controller {
        until: Instant,
    },
}

pub fn by_id(snapshot: &Snapshot) -> SnapshotRef {
    SnapshotRef { id: snapshot.id.clone(), name: String::new() }
}

impl Pull<'_> {
    /// The part that begins at this offset. What passes by itself is waited for.
    ///
    /// # Errors
    /// A refusal that waiting does not change, or nothing came for as long as the user waits.
    pub async fn part(&mut self, offset: u64) -> Result<SnapshotPart> {
        if let Some(part) = self.part_of_this_host(offset).await {
            return Ok(part);
        }
        let part = patiently(self.client, async || {
            let request = PullSnapshotRequest {
                snapshot: Some(by_id(self.snapshot)),
                since: self.since.map(by_id),
                offset,
                want_data: self.want_data,
            };
            self.cluster.pull_snapshot(request).await
        })
        .await?;
        check(&part, offset)?;
        Ok(part)
    }

    /// The part, if the target of this host serves it.
    async fn part_of_this_host(&mut self, offset: u64) -> Option<SnapshotPart> {
        let block = offset / BLOCK_SIZE as u64;
        match &self.source {
            // Ranges alone are few bytes, and the controller knows who has them.
            _ if !self.want_data || !offset.is_multiple_of(BLOCK_SIZE as u64) => return None,
            Source::Controller { until } if Instant::now() < *until => return None,
            Source::Target(stream) if stream.is_at(block) => {}
            _ => match self.stream_at(block) {
                Some(stream) => self.source = Source::Target(stream),
                None => return self.pass_over(),
            },
        }
        let Source::Target(stream) = &mut self.source else { return None };
        match stream.part().await {
            Ok(part) => Some(SnapshotPart { size_bytes: self.snapshot.size_bytes, ..part }),
            Err(error) => {
                tracing::debug!(%error, "the target of this host is passed over");
                self.pass_over()
            }
        }
    }

    fn pass_over<T>(&mut self) -> Option<T> {
        self.source = Source::Controller { until: Instant::now() + PASSED_OVER };
        None
    }

    fn stream_at(&self, block: u64) -> Option<Stream> {
        let id = |snapshot: &Snapshot| snapshot.id.parse::<SnapshotId>().ok();
        let from = match self.since {
            Some(since) => Some(id(since)?),
            None => None,
        };
        let volume = self.snapshot.volume_id.parse::<VolumeId>().ok()?;
        let (to, want_data) = (id(self.snapshot)?, self.want_data);
        let wanted = Wanted { volume, from, to, cursor: block, want_data };
        Stream::open(&self.client.run_directory().join("nbd").join(SOCKET), wanted).ok()
    }
}

/// Calls until there is an answer, where a refusal passes by itself.
///
/// # Errors
/// A refusal that waiting does not change, or nothing came for as long as the user waits.
pub async fn patiently<T>(
    client: &ClientOptions,
    mut call: impl AsyncFnMut() -> std::result::Result<Response<T>, Status>,
) -> Result<T> {
    let began = Instant::now();
    let mut reported = began;
    loop {
        let status = match call().await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => status,
        };
        let passes =
            matches!(status.code(), Code::Unavailable | Code::ResourceExhausted | Code::Unknown);
        if !passes || began.elapsed() > client.timeout() {
            return Err(refusal(status));
        }
        if reported.elapsed() >= REPORT_INTERVAL {
            eprintln!("waits: {}", status.message());
            reported = Instant::now();
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// # Errors
/// A part whose bytes were changed on their way, or after which an export would never end.
fn check(part: &SnapshotPart, offset: u64) -> Result<()> {
    if part.next_offset.is_some_and(|next| next <= offset) {
        bail!("the controller's answer cannot be: a part that does not end behind its begin");
    }
    for range in &part.ranges {
        if !range.data.is_empty() && quoin_types::crc32c(&range.data) != range.checksum {
            bail!("bytes of the snapshot at offset {} were changed on their way", range.offset);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use quoin_api::control::SnapshotRange;

    use super::*;

    #[test]
    fn bytes_that_were_changed_on_their_way_and_parts_without_progress_are_refused() {
        let data = vec![7; 4096];
        let checksum = quoin_types::crc32c(&data);
        let range = SnapshotRange { data, checksum, length: 4096, ..SnapshotRange::default() };
        let part = |range: &SnapshotRange, next_offset| SnapshotPart {
            ranges: vec![range.clone()],
            next_offset,
            ..SnapshotPart::default()
        };
        assert!(check(&part(&range, None), 0).is_ok());
        assert!(check(&part(&range, Some(4096)), 0).is_ok());
        assert!(check(&part(&range, Some(4096)), 4096).is_err());
        let changed = SnapshotRange { checksum: checksum ^ 1, ..range };
        assert!(check(&part(&changed, None), 0).is_err());
    }
}
