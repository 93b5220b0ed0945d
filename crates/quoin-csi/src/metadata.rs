//! The SnapshotMetadata service: which blocks of a snapshot are allocated, and which differ between
//! two snapshots. No data is read for it.
//!
//! A stream is made of parts that the control plane gives one after the other, so it takes no more
//! memory for a large volume than for a small one, and a caller that does not read makes it wait. It
//! ends with OK only after the last part.

use std::time::Duration;

use quoin_api::control as api;
use quoin_api::csi::snapshot_metadata_server::SnapshotMetadata;
use quoin_api::csi::*;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use crate::backend::Backend;
use crate::edition::Edition;
use crate::refusal::{invalid, no_snapshot, out_of_range};
use crate::{Plugin, limits};

/// Parts of a snapshot begin at multiples of this.
const BLOCK_BYTES: u64 = 4096;
/// Ranges in one message where the caller names no bound; some 100 KiB.
const RANGES_A_MESSAGE: usize = 4096;
/// Messages that wait for a caller that does not read.
const MESSAGES_WAITING: usize = 4;
/// Time for which a stream waits for its turn where too many are open.
const TURN_TIME: Duration = Duration::from_secs(30);
const TURN_PAUSE: Duration = Duration::from_millis(200);

/// Serves SnapshotMetadata in the modes with a controller.
pub(crate) struct MetadataService(pub Plugin);

type Messages<T> = ReceiverStream<Result<T, Status>>;

/// A message of one of the two streams.
trait Message: Send + 'static {
    fn new(capacity: i64, ranges: Vec<BlockMetadata>) -> Self;
}

impl Message for GetMetadataAllocatedResponse {
    fn new(volume_capacity_bytes: i64, block_metadata: Vec<BlockMetadata>) -> Self {
        let block_metadata_type = BlockMetadataType::VariableLength.into();
        Self { block_metadata_type, volume_capacity_bytes, block_metadata }
    }
}

impl Message for GetMetadataDeltaResponse {
    fn new(volume_capacity_bytes: i64, block_metadata: Vec<BlockMetadata>) -> Self {
        let block_metadata_type = BlockMetadataType::VariableLength.into();
        Self { block_metadata_type, volume_capacity_bytes, block_metadata }
    }
}

/// Request of a stream.
struct Asked {
    backend: Backend,
    base: Option<api::Snapshot>,
    target: api::Snapshot,
    starting_offset: u64,
    ranges_max: usize,
}

fn ranges_max(max_results: i32) -> Result<usize, Status> {
    match usize::try_from(max_results) {
        Ok(0) => Ok(RANGES_A_MESSAGE),
        Ok(max) => Ok(max.min(RANGES_A_MESSAGE)),
        Err(_) => Err(invalid("max_results", "is negative")),
    }
}

fn starting_offset(offset: i64, capacity: u64) -> Result<u64, Status> {
    match u64::try_from(offset) {
        Ok(at) if at <= capacity => Ok(at),
        _ => Err(out_of_range(format!(
            "starting_offset {offset} is outside of the snapshot, which has {capacity} bytes"
        ))),
    }
}

/// A snapshot that is cut: before that nobody was given its id.
async fn find(backend: &Backend, id: &str) -> Result<api::Snapshot, Status> {
    let found = backend.find_snapshot(id).await?.filter(|s| s.phase == "Ready");
    found.ok_or_else(|| no_snapshot(id))
}

/// Ranges of a part that a caller has not had, neighbours joined.
fn changed(part: &api::SnapshotPart, starting_offset: u64) -> Vec<BlockMetadata> {
    let mut ranges = Vec::<BlockMetadata>::new();
    for range in &part.ranges {
        let (offset, length) = (range.offset as i64, range.length as i64);
        match ranges.last_mut() {
            Some(last) if last.byte_offset + last.size_bytes == offset => {
                last.size_bytes += length;
            }
            _ if range.offset + range.length <= starting_offset => {}
            _ => ranges.push(BlockMetadata { byte_offset: offset, size_bytes: length }),
        }
    }
    ranges
}

impl Asked {
    /// The part that begins at `offset`. Where too many are read at once it waits for its turn.
    async fn part(&self, offset: u64) -> Result<api::SnapshotPart, Status> {
        let until = Instant::now() + TURN_TIME;
        loop {
            let since = self.base.as_ref().map(|base| base.id.as_str());
            match self.backend.pull_snapshot(&self.target.id, since, offset).await {
                Err(status)
                    if status.code() == Code::ResourceExhausted && Instant::now() < until =>
                {
                    tokio::time::sleep(TURN_PAUSE).await;
                }
                answer => return answer,
            }
        }
    }

    /// Sends all messages. The caller may leave at any moment.
    async fn send<M: Message>(self, messages: mpsc::Sender<Result<M, Status>>) {
        let capacity = i64::try_from(self.target.size_bytes).unwrap_or(i64::MAX);
        let mut next = Some(self.starting_offset - self.starting_offset % BLOCK_BYTES);
        while let Some(offset) = next.filter(|offset| *offset < self.target.size_bytes) {
            let part = match self.part(offset).await {
                Ok(part) => part,
                Err(status) => {
                    let _ = messages.send(Err(status)).await;
                    return;
                }
            };
            for ranges in changed(&part, self.starting_offset).chunks(self.ranges_max) {
                if messages.send(Ok(M::new(capacity, ranges.to_vec()))).await.is_err() {
                    return;
                }
            }
            next = part.next_offset;
        }
    }

    fn stream<M: Message>(self) -> Response<Messages<M>> {
        let (sender, messages) = mpsc::channel(MESSAGES_WAITING);
        tokio::spawn(self.send(sender));
        Response::new(ReceiverStream::new(messages))
    }
}

impl MetadataService {
    /// The mode is checked before anything else.
    fn served(&self, rpc: &'static str) -> Result<Backend, Status> {
        let backend = self.0.served_by_controller(rpc)?;
        self.0.serves_since(rpc, Edition::V1_10)?;
        Ok(backend)
    }
}

#[tonic::async_trait]
impl SnapshotMetadata for MetadataService {
    type GetMetadataAllocatedStream = Messages<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Messages<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let backend = self.served("GetMetadataAllocated")?;
        let mut request = request.into_inner();
        limits::required("snapshot_id", &request.snapshot_id)?;
        self.0.admit("GetMetadataAllocated", &mut request.secrets)?;
        let ranges_max = ranges_max(request.max_results)?;
        let target = find(&backend, &request.snapshot_id).await?;
        let starting_offset = starting_offset(request.starting_offset, target.size_bytes)?;
        Ok(Asked { backend, base: None, target, starting_offset, ranges_max }.stream())
    }

    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let backend = self.served("GetMetadataDelta")?;
        let mut request = request.into_inner();
        limits::required("base_snapshot_id", &request.base_snapshot_id)?;
        limits::required("target_snapshot_id", &request.target_snapshot_id)?;
        self.0.admit("GetMetadataDelta", &mut request.secrets)?;
        let ranges_max = ranges_max(request.max_results)?;
        let base = find(&backend, &request.base_snapshot_id).await?;
        let target = find(&backend, &request.target_snapshot_id).await?;
        if base.volume_id != target.volume_id {
            let why = "is of another volume than the snapshot of base_snapshot_id";
            return Err(invalid("target_snapshot_id", why));
        }
        if base.lsn >= target.lsn {
            let why = "was not cut after the snapshot of base_snapshot_id";
            return Err(invalid("target_snapshot_id", why));
        }
        let starting_offset = starting_offset(request.starting_offset, target.size_bytes)?;
        Ok(Asked { backend, base: Some(base), target, starting_offset, ranges_max }.stream())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(ranges: &[(u64, u64)]) -> api::SnapshotPart {
        let range = |(offset, length): &(u64, u64)| api::SnapshotRange {
            offset: *offset,
            length: *length,
            ..Default::default()
        };
        api::SnapshotPart { ranges: ranges.iter().map(range).collect(), ..Default::default() }
    }

    #[test]
    fn neighbours_are_one_range_and_what_a_caller_has_had_is_left_out() {
        let of = |ranges: &[(u64, u64)], from| -> Vec<(i64, i64)> {
            let ranges = changed(&part(ranges), from).into_iter();
            ranges.map(|range| (range.byte_offset, range.size_bytes)).collect()
        };
        assert_eq!(of(&[(0, 4096), (4096, 4096), (12288, 4096)], 0), [(0, 8192), (12288, 4096)]);
        // A range that begins before the offset, and ends behind it, is needed whole.
        assert_eq!(of(&[(0, 4096), (8192, 4096)], 100), [(0, 4096), (8192, 4096)]);
        assert_eq!(of(&[(0, 4096), (8192, 4096)], 4096), [(8192, 4096)]);
    }

    #[test]
    fn a_message_has_as_many_ranges_as_are_asked_for_up_to_its_own_limit() {
        for (asked, max) in
            [(0, 4096), (1, 1), (4095, 4095), (4096, 4096), (4097, 4096), (i32::MAX, 4096)]
        {
            assert_eq!(ranges_max(asked).unwrap(), max, "{asked}");
        }
        for negative in [-1, i32::MIN] {
            assert_eq!(ranges_max(negative).unwrap_err().code(), Code::InvalidArgument);
        }
    }

    #[test]
    fn the_last_range_of_a_part_is_told_wherever_a_caller_begins() {
        let of = |ranges: &[(u64, u64)], from| -> Vec<(i64, i64)> {
            let ranges = changed(&part(ranges), from).into_iter();
            ranges.map(|range| (range.byte_offset, range.size_bytes)).collect()
        };
        let last = [(0, 4096), (8192, 4096), (61440, 4096)];
        for (from, count) in [
            (0, 3),
            (4095, 3),
            (4096, 2),
            (12287, 2),
            (12288, 1),
            (61440, 1),
            (65535, 1),
            (65536, 0),
        ] {
            let expected: Vec<_> =
                last[3 - count..].iter().map(|(at, length)| (*at as i64, *length as i64)).collect();
            assert_eq!(of(&last, from), expected, "from {from}");
        }
        assert_eq!(of(&[], 0), []);
        // Neighbours of which the first was had already begin where that ended, or are needed whole.
        assert_eq!(of(&[(0, 4096), (4096, 4096)], 4096), [(4096, 4096)]);
        assert_eq!(of(&[(0, 8192), (8192, 4096)], 4096), [(0, 12288)]);
    }

    #[test]
    fn an_offset_may_be_the_end_of_the_snapshot_and_no_further() {
        assert_eq!(starting_offset(8192, 8192).unwrap(), 8192);
        for wrong in [-1, 8193, i64::MIN, i64::MAX] {
            assert_eq!(starting_offset(wrong, 8192).unwrap_err().code(), Code::OutOfRange);
        }
    }
}
