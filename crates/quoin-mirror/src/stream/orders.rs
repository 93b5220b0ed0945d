//! Orders of the controller, read.

use quoin_api::control::{MirrorSend, MirrorTake};
use quoin_identity::ClusterId;
use quoin_types::ids::{PointId, SnapshotId, VolumeId};

use super::frame::Begin;

/// Words for an order that has no ids.
pub const UNREADABLE: &str = "the order cannot be read: update the mirror of this host";

/// Transfer to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sending {
    pub peer: ClusterId,
    pub group: u128,
    pub volume: VolumeId,
    pub point: PointId,
    pub base: Option<PointId>,
    pub snapshot: SnapshotId,
    pub since: Option<SnapshotId>,
    pub token: u128,
    pub from_block: u64,
    pub compress: bool,
    pub bandwidth_limit: u64,
    pub size_blocks: u64,
}

/// Ids are 32 hex digits; dashes are ignored.
fn id(text: &str) -> Option<u128> {
    text.parse().ok().map(|VolumeId(id)| id)
}

fn optional(text: &str) -> Option<Option<u128>> {
    match text {
        "" => Some(None),
        text => id(text).map(Some),
    }
}

impl Sending {
    pub fn read(order: &MirrorSend) -> Option<Self> {
        Some(Self {
            peer: order.peer_cluster_id.parse().ok()?,
            group: id(&order.group_id)?,
            volume: VolumeId(id(&order.volume_id)?),
            point: PointId(id(&order.point_id)?),
            base: optional(&order.base_id)?.map(PointId),
            snapshot: SnapshotId(id(&order.snapshot_id)?),
            since: optional(&order.since_snapshot_id)?.map(SnapshotId),
            token: id(&order.token)?,
            from_block: order.from_block,
            compress: order.compress,
            bandwidth_limit: order.bandwidth_limit,
            size_blocks: order.size_blocks,
        })
    }

    /// Returns true if the other order is for the same content to the same copy. Its cursor and its limits may
    /// be others.
    pub fn is_of(&self, other: &Self) -> bool {
        let content = |order: &Self| (order.point, order.base, order.snapshot, order.since);
        let copy = |order: &Self| (order.peer, order.group, order.volume, order.token);
        content(self) == content(other) && copy(self) == copy(other)
    }
}

/// Checks that a stream of that peer is one that the controller ordered.
///
/// # Errors
/// The words that the peer is told.
pub fn check(takes: &[MirrorTake], peer: ClusterId, begin: &Begin) -> Result<(), &'static str> {
    let of_volume = |take: &&MirrorTake| {
        id(&take.volume_id) == Some(begin.volume.0)
            && take.peer_cluster_id.parse::<ClusterId>().is_ok_and(|of| of == peer)
    };
    let mut of_volume = takes.iter().filter(of_volume).peekable();
    if of_volume.peek().is_none() {
        return Err("not here: the target of this host takes nothing for the volume");
    }
    let is_ordered = |take: &MirrorTake| {
        id(&take.token) == Some(begin.token)
            && id(&take.group_id) == Some(begin.group)
            && id(&take.point_id) == Some(begin.point.0)
            && optional(&take.base_id) == Some(begin.base.map(|base| base.0))
    };
    match of_volume.any(is_ordered) {
        true => Ok(()),
        false => Err("another transfer is ordered for the volume, or with another token"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_let_in_where_all_of_it_was_ordered_from_that_peer() {
        let hex = |id: u128| format!("{id:032x}");
        let take = MirrorTake {
            peer_cluster_id: hex(1),
            group_id: hex(2),
            volume_id: hex(3),
            point_id: hex(4),
            base_id: String::new(),
            token: hex(5),
        };
        let (volume, point) = (VolumeId(3), PointId(4));
        let begin = Begin { group: 2, volume, point, base: None, token: 5 };
        let based = MirrorTake { base_id: hex(6), volume_id: hex(8), ..take.clone() };
        let takes = [based, take];
        let ask = |peer, begin: Begin| check(&takes, ClusterId(peer), &begin);
        assert_eq!(ask(1, begin), Ok(()));
        let with_base = Begin { base: Some(PointId(6)), ..begin };
        assert_eq!(ask(1, Begin { volume: VolumeId(8), ..with_base }), Ok(()));
        assert!(ask(2, begin).unwrap_err().starts_with("not here"));
        assert!(
            ask(1, Begin { volume: VolumeId(9), ..begin }).unwrap_err().starts_with("not here")
        );
        for wrong in [
            Begin { token: 6, ..begin },
            Begin { group: 1, ..begin },
            Begin { point: PointId(5), ..begin },
            with_base,
        ] {
            assert!(ask(1, wrong).unwrap_err().contains("another token"), "{wrong:?}");
        }
    }

    #[test]
    fn an_order_with_ids_that_are_none_is_not_read() {
        let hex = |id: u128| format!("{id:032x}");
        let order = MirrorSend {
            peer_cluster_id: hex(1),
            group_id: hex(2),
            volume_id: hex(3),
            point_id: hex(4),
            snapshot_id: hex(5),
            token: hex(6),
            ..MirrorSend::default()
        };
        let read = Sending::read(&order).unwrap();
        assert_eq!((read.base, read.since, read.token), (None, None, 6));
        let later = Sending { from_block: 7, bandwidth_limit: 8, ..read };
        assert!(read.is_of(&later) && !read.is_of(&Sending { token: 7, ..read }));
        assert_eq!(Sending::read(&MirrorSend { token: "x".into(), ..order.clone() }), None);
        assert_eq!(Sending::read(&MirrorSend { base_id: "x".into(), ..order }), None);
    }
}
