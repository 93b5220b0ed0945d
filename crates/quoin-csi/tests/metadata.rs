//! The SnapshotMetadata service over a real controller; the target is the test's own.

use quoin_api::csi::snapshot_metadata_client::SnapshotMetadataClient;
use quoin_api::csi::*;
use quoin_csi::Mode;
use tonic::Code;
use tonic::transport::Channel;

use crate::common::control::{SNAPSHOT_BLOCKS, is_pulled};
use crate::common::*;
use crate::snapshots::remove;

const CAPACITY: i64 = 64 * MIB;

fn allocated(snapshot_id: &str) -> GetMetadataAllocatedRequest {
    GetMetadataAllocatedRequest { snapshot_id: snapshot_id.to_owned(), ..Default::default() }
}

fn delta(base: &str, target: &str) -> GetMetadataDeltaRequest {
    GetMetadataDeltaRequest {
        base_snapshot_id: base.to_owned(),
        target_snapshot_id: target.to_owned(),
        ..Default::default()
    }
}

/// One message, whichever of the two streams it is of.
struct Heard {
    kind: BlockMetadataType,
    capacity: i64,
    ranges: Vec<BlockMetadata>,
}

impl From<GetMetadataAllocatedResponse> for Heard {
    fn from(message: GetMetadataAllocatedResponse) -> Self {
        let (kind, capacity) = (message.block_metadata_type(), message.volume_capacity_bytes);
        Self { kind, capacity, ranges: message.block_metadata }
    }
}

impl From<GetMetadataDeltaResponse> for Heard {
    fn from(message: GetMetadataDeltaResponse) -> Self {
        let (kind, capacity) = (message.block_metadata_type(), message.volume_capacity_bytes);
        Self { kind, capacity, ranges: message.block_metadata }
    }
}

async fn heard<T: Into<Heard>>(
    answer: Result<tonic::Response<tonic::Streaming<T>>, tonic::Status>,
) -> Result<Vec<Heard>, Code> {
    let mut stream = answer.map_err(|status| status.code())?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await.map_err(|status| status.code())? {
        messages.push(message.into());
    }
    Ok(messages)
}

/// Two snapshots of a volume, and one of another, with a client of the service.
struct Snapshots {
    world: World,
    client: SnapshotMetadataClient<Channel>,
    base: String,
    target: String,
    other: String,
}

impl Snapshots {
    async fn start() -> Self {
        let mut world = World::start().await;
        let (db, other) = (world.served("db").await, world.served("other").await);
        let base = world.snap(&db, "base").await.snapshot_id;
        let target = world.snap(&db, "target").await.snapshot_id;
        let other = world.snap(&other, "other").await.snapshot_id;
        let client = SnapshotMetadataClient::new(world.channel.clone());
        Self { world, client, base, target, other }
    }

    async fn allocated(
        &mut self,
        request: GetMetadataAllocatedRequest,
    ) -> Result<Vec<Heard>, Code> {
        heard(self.client.get_metadata_allocated(request).await).await
    }

    async fn delta(&mut self, request: GetMetadataDeltaRequest) -> Result<Vec<Heard>, Code> {
        heard(self.client.get_metadata_delta(request).await).await
    }
}

/// Byte ranges of all messages, after what holds for every stream was checked.
fn checked(messages: Vec<Heard>, results_max: usize) -> Vec<(i64, i64)> {
    let (mut ranges, mut end) = (Vec::new(), 0);
    for message in messages {
        assert_eq!(message.kind, BlockMetadataType::VariableLength);
        assert_eq!(message.capacity, CAPACITY);
        assert!(message.ranges.len() <= results_max);
        for BlockMetadata { byte_offset, size_bytes } in message.ranges {
            assert!(size_bytes > 0 && byte_offset >= end, "{byte_offset} after {end}");
            end = byte_offset + size_bytes;
            assert!(end <= CAPACITY);
            ranges.push((byte_offset, size_bytes));
        }
    }
    ranges
}

fn expected(since: bool) -> Vec<(i64, i64)> {
    let blocks = (0..SNAPSHOT_BLOCKS).filter(|block| is_pulled(*block, since));
    blocks.map(|block| (block as i64 * 4096, 4096)).collect()
}

/// Proves CSIN-METADATA-01.
#[tokio::test]
async fn the_service_is_advertised_and_served_in_the_modes_with_a_controller_alone() {
    use plugin_capability::{Service, Type, service};
    let mut snapshots = Snapshots::start().await;
    let request = GetPluginCapabilitiesRequest {};
    let told = snapshots.world.identity.get_plugin_capabilities(request).await.unwrap();
    let kind = service::Type::SnapshotMetadataService.into();
    let wanted = Some(Type::Service(Service { r#type: kind }));
    assert!(told.into_inner().capabilities.iter().any(|one| one.r#type == wanted));
    let (base, target) = (snapshots.base.clone(), snapshots.target.clone());
    assert!(snapshots.allocated(allocated(&base)).await.is_ok());
    assert!(snapshots.delta(delta(&base, &target)).await.is_ok());
    let node = World::start_in(Mode::NODE).await;
    let mut client = SnapshotMetadataClient::new(node.channel.clone());
    let refused = heard(client.get_metadata_allocated(allocated("")).await).await;
    assert_eq!(refused.err(), Some(Code::Unimplemented));
    let refused = heard(client.get_metadata_delta(delta("", "")).await).await;
    assert_eq!(refused.err(), Some(Code::Unimplemented));
}

/// Proves CSIN-METADATA-02, CSIN-METADATA-03, CSIN-METADATA-04, CSIN-METADATA-05,
/// CSIN-METADATA-06: the last one by a base that is as old as a snapshot can be.
#[tokio::test]
async fn what_no_stream_can_be_made_of_is_refused_with_the_code_of_the_interface() {
    let mut s = Snapshots::start().await;
    let (base, target, other) = (s.base.clone(), s.target.clone(), s.other.clone());
    assert_eq!(s.allocated(allocated("")).await.err(), Some(Code::InvalidArgument));
    assert_eq!(s.allocated(allocated(UNKNOWN)).await.err(), Some(Code::NotFound));
    for (base, target, code) in [
        ("", target.as_str(), Code::InvalidArgument),
        (base.as_str(), "", Code::InvalidArgument),
        (UNKNOWN, &target, Code::NotFound),
        (&base, UNKNOWN, Code::NotFound),
        (&other, &target, Code::InvalidArgument),
        (&target, &base, Code::InvalidArgument),
        (&target, &target, Code::InvalidArgument),
    ] {
        assert_eq!(s.delta(delta(base, target)).await.err(), Some(code), "{base} {target}");
    }
    let negative = GetMetadataAllocatedRequest { max_results: -1, ..allocated(&base) };
    assert_eq!(s.allocated(negative).await.err(), Some(Code::InvalidArgument));
    let negative = GetMetadataDeltaRequest { max_results: -1, ..delta(&base, &target) };
    assert_eq!(s.delta(negative).await.err(), Some(Code::InvalidArgument));
    for (starting_offset, code) in [(-1, Some(Code::OutOfRange)), (CAPACITY, None)]
        .into_iter()
        .chain([(CAPACITY + 1, Some(Code::OutOfRange)), (i64::MAX, Some(Code::OutOfRange))])
    {
        let request = GetMetadataAllocatedRequest { starting_offset, ..allocated(&base) };
        let heard = s.allocated(request).await;
        assert!(heard.as_ref().is_ok_and(|heard| heard.is_empty()) || code.is_some());
        assert_eq!(heard.err(), code, "{starting_offset}");
        let request = GetMetadataDeltaRequest { starting_offset, ..delta(&base, &target) };
        assert_eq!(s.delta(request).await.err(), code, "{starting_offset}");
    }
}

/// Proves CSIN-METADATA-07, CSIN-METADATA-08, CSIN-METADATA-09, CSIN-METADATA-10,
/// CSIN-METADATA-11: the client refuses messages of more than 4 MiB.
#[tokio::test]
async fn a_stream_has_all_ranges_in_order_in_messages_of_the_size_that_was_asked_for() {
    let mut s = Snapshots::start().await;
    let (base, target) = (s.base.clone(), s.target.clone());
    for (max_results, results_max) in [(0, usize::MAX), (1, 1), (7, 7), (i32::MAX, usize::MAX)] {
        let request = GetMetadataAllocatedRequest { max_results, ..allocated(&base) };
        let ranges = checked(s.allocated(request).await.unwrap(), results_max);
        assert_eq!(ranges, expected(false), "{max_results}");
        let request = GetMetadataDeltaRequest { max_results, ..delta(&base, &target) };
        let ranges = checked(s.delta(request).await.unwrap(), results_max);
        assert_eq!(ranges, expected(true), "holes have changed as well: {max_results}");
    }
}

/// Proves CSIN-METADATA-12, CSIN-METADATA-15.
#[tokio::test]
async fn a_stream_that_begins_where_another_one_was_interrupted_is_exactly_its_rest() {
    let mut s = Snapshots::start().await;
    let (base, target) = (s.base.clone(), s.target.clone());
    let (whole, changed) = (expected(false), expected(true));
    for had in [1, 500, whole.len() / 2, whole.len() - 1, whole.len()] {
        let (offset, length) = whole[had - 1];
        let starting_offset = offset + length;
        let request = GetMetadataAllocatedRequest { starting_offset, ..allocated(&base) };
        let rest = checked(s.allocated(request).await.unwrap(), usize::MAX);
        assert_eq!(rest, whole[had..], "{had}");
    }
    for starting_offset in [1, 4095, 4096, 4097, 5 * 4096 + 100, CAPACITY - 1] {
        let request = GetMetadataDeltaRequest { starting_offset, ..delta(&base, &target) };
        let rest = checked(s.delta(request).await.unwrap(), usize::MAX);
        let is_new = |(offset, length): &&(i64, i64)| offset + length > starting_offset;
        let expected: Vec<_> = changed.iter().filter(is_new).copied().collect();
        assert_eq!(rest, expected, "{starting_offset}");
    }
}

/// Proves CSIN-METADATA-16.
#[tokio::test]
async fn a_snapshot_that_is_deleted_in_the_middle_ends_its_stream_with_an_error() {
    let mut s = Snapshots::start().await;
    let base = s.base.clone();
    let request = GetMetadataAllocatedRequest { max_results: 1, ..allocated(&base) };
    let mut stream = s.client.get_metadata_allocated(request).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    s.world.controller.delete_snapshot(remove(&base)).await.unwrap();
    let mut count = 1;
    let ended = loop {
        match stream.message().await {
            Ok(Some(_)) => count += 1,
            Ok(None) => panic!("it ended with OK after {count} ranges"),
            Err(status) => break status,
        }
    };
    assert_eq!(ended.code(), Code::NotFound, "{ended}");
    assert!(count < expected(false).len());
}
