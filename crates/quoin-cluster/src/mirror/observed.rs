//! Members of a side, as its cluster sees them.

use quoin_types::ids::PointId;
use quoin_types::mutant;

use super::record::{Keepsake, Stamp, Transfer};

/// Report of one member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Observed {
    /// Order of the reports of one member; a late one is older.
    pub serial: u64,
    /// Wall clock of this side before its target was asked.
    pub seen_ms: u64,
    /// The highest stamp of an order that it has seen: none of a lower one is carried out any more.
    pub stamp: Stamp,
    /// Points that it holds, the oldest cut first.
    pub points: Vec<PointId>,
    /// Size of the live view, which never shrinks.
    pub blocks: u64,
    /// The point whose content the live view has: nothing that changes content came after its cut, or
    /// after the last Revert to it.
    pub at: Option<PointId>,
    /// The last fence after which an open quorum of its pools refuses everything that was granted before.
    pub fenced: u128,
    /// The transfer whose slots it takes, and its token.
    pub order: Option<(Transfer, u128)>,
    /// Slots of that transfer that were taken, and those that are stable.
    pub taken_to: u64,
    pub stable_to: u64,
    /// The end of that transfer came, and the digest over what was sent is equal.
    pub is_fed: bool,
    /// Role and generation that an open quorum of its pools keeps.
    pub keepsake: Option<Keepsake>,
    /// A snapshot that keeps what a resync discards.
    pub lost: Option<PointId>,
    pub is_published: bool,
}

impl Observed {
    /// Returns true once all of the transfer is on stable media: what is not, a target that ends takes with it.
    pub fn is_whole(&self) -> bool {
        let is_stable = self.stable_to >= self.taken_to || mutant::is("cut-before-it-is-stable");
        self.is_fed && is_stable
    }

    pub fn holds(&self, point: PointId) -> bool {
        self.points.contains(&point)
    }
}
