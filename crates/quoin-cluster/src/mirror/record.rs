//! The record of a mirrored group, which is changed by compare-and-swap, and what a recovery makes of an
//! older one.

use quoin_types::ids::{GroupId, PointId, VolumeId};
use quoin_types::mutant;

use super::chain::{Begun, Chain, ClusterId, Generation};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    Off,
    /// Its volumes are published, and points of them are sent.
    Primary,
    /// A final point is being cut; it becomes Secondary.
    Demoting,
    Secondary,
    /// A complete point is being brought back; it becomes Primary, and never Secondary again.
    Promoting,
    /// Both sides wrote behind one point.
    Diverged,
    /// A person discards what this side wrote.
    Resyncing,
    /// A copy without a primary: an ordinary group, once it is promoted.
    Orphan,
}

impl Role {
    /// All roles, each at the place by which records and messages name it.
    pub const ALL: [Self; 8] = [
        Self::Off,
        Self::Primary,
        Self::Demoting,
        Self::Secondary,
        Self::Promoting,
        Self::Diverged,
        Self::Resyncing,
        Self::Orphan,
    ];

    /// Returns true for roles in which a member may be published.
    pub fn is_primary(self) -> bool {
        matches!(self, Self::Primary | Self::Demoting)
    }

    /// Returns true for a copy that is the mirror's and not the orchestrator's.
    pub fn is_copy(self) -> bool {
        matches!(self, Self::Secondary | Self::Promoting | Self::Diverged | Self::Resyncing)
    }
}

/// Role and generation as pools keep them, with the record of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Keepsake {
    pub is_primary: bool,
    pub begun: Begun,
}

/// Place of a record in time: an order with a lower one than a member has seen is late.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Stamp {
    pub term: u64,
    pub version: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Member {
    pub volume: VolumeId,
    /// Both sides have a point of it.
    pub has_base: bool,
}

/// Way of a copy from one point to the next.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Transfer {
    pub point: PointId,
    /// `None`: everything is sent.
    pub base: Option<PointId>,
}

/// The wish to begin a generation at a point. Its id is drawn at random: a yield counts for one claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Claim {
    pub number: u64,
    pub point: PointId,
    pub id: u128,
}

/// A transfer that this side takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Receiving {
    pub transfer: Transfer,
    /// Every member was at its base, and no older order was left.
    pub is_begun: bool,
    /// Blocks up to which each member has it on stable media.
    pub cursors: Vec<u64>,
    /// Names the orders of this transfer: no stream opens without it.
    pub token: u128,
    /// Wall clock of the other side when the point was cut.
    pub cut_ms: u64,
    /// Size that each member needs before a slot comes.
    pub blocks: Vec<u64>,
}

impl Receiving {
    /// The order of its targets.
    pub fn order(&self) -> (Transfer, u128) {
        (self.transfer, self.token)
    }
}

/// Points that this side has, by what they are for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Points {
    /// Named, and perhaps cut on some members.
    pub cutting: Option<PointId>,
    /// Named and given up: nobody offers it any more, and its cuts are dropped.
    pub dropping: Option<PointId>,
    /// Cut, and to be sent.
    pub offered: Option<PointId>,
    pub offered_cut_ms: u64,
    /// The last whole point of a copy, and the wall clock of the other side when it was cut; 0: not known.
    pub complete: Option<PointId>,
    pub complete_cut_ms: u64,
    /// The last point that both sides recorded.
    pub common: Option<PointId>,
    pub common_cut_ms: u64,
    /// The final point of a demotion.
    pub last: Option<PointId>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Claims {
    pub own: Option<Claim>,
    pub yielded: Option<Claim>,
    /// The promotion that is under way.
    pub promoting: Option<Claim>,
    /// The promotion under way was asked for with force.
    pub is_forced: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parameters {
    pub interval_s: u64,
    pub may_take_over: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    pub group: GroupId,
    pub cluster: ClusterId,
    pub peer: ClusterId,
    /// Term of the controller that wrote it.
    pub term: u64,
    pub role: Role,
    pub members: Vec<Member>,
    pub chain: Chain,
    pub points: Points,
    pub receiving: Option<Receiving>,
    pub claims: Claims,
    /// Names the fence that the present transition needs: nothing that was granted before it counts.
    pub fence: u128,
    /// The record was recovered, and the other side has not spoken since.
    pub is_unsure: bool,
    /// The other side is asked to step down.
    pub asks_step_down: bool,
    /// The other side recorded its copy.
    pub is_paired: bool,
    pub parameters: Parameters,
    /// The snapshot that keeps what the last resync discarded.
    pub lost: Option<PointId>,
}

impl Record {
    /// The record of a group that is mirrored from here on.
    pub fn primary(
        group: GroupId,
        [cluster, peer]: [ClusterId; 2],
        members: Vec<VolumeId>,
        parameters: Parameters,
    ) -> Self {
        let generation = Generation { number: 1, cluster, id: 0 };
        let member = |volume| Member { volume, has_base: false };
        Self {
            group,
            cluster,
            peer,
            term: 0,
            role: Role::Primary,
            members: members.into_iter().map(member).collect(),
            chain: Chain::new(Begun { generation, at: None }),
            points: Points::default(),
            receiving: None,
            claims: Claims::default(),
            fence: 0,
            is_unsure: false,
            asks_step_down: false,
            is_paired: false,
            parameters,
            lost: None,
        }
    }

    /// The record that the other side makes of it.
    pub fn secondary(
        group: GroupId,
        [cluster, peer]: [ClusterId; 2],
        members: Vec<VolumeId>,
        chain: Chain,
        parameters: Parameters,
    ) -> Self {
        let record = Self::primary(group, [cluster, peer], members, parameters);
        Self { role: Role::Secondary, chain, is_paired: true, ..record }
    }

    /// The record of a group whose records were lost, as its members' pools have it. Its peer has to speak before
    /// anything counts that is in no pool.
    pub fn lost(
        group: GroupId,
        clusters: [ClusterId; 2],
        members: Vec<VolumeId>,
        pools: Keepsake,
        (parameters, term): (Parameters, u64),
    ) -> Self {
        let record = Self::primary(group, clusters, members, parameters);
        let role = if pools.is_primary { Role::Primary } else { Role::Secondary };
        let chain = Chain::new(pools.begun);
        Self { term, role, chain, is_paired: true, is_unsure: true, ..record }
    }

    /// Returns true if this side ruled last.
    pub fn is_own(&self) -> bool {
        self.chain.top().generation.cluster == self.cluster
    }

    /// Role and generation that pools are to keep.
    pub fn keepsake(&self) -> Keepsake {
        Keepsake { is_primary: self.role.is_primary(), begun: self.chain.top() }
    }

    /// Points that a rule keeps.
    pub fn kept(&self) -> impl Iterator<Item = PointId> + '_ {
        let points = &self.points;
        let receiving = self.receiving.as_ref().map(|receiving| receiving.transfer);
        let claims = [self.claims.own, self.claims.promoting];
        [points.cutting, points.offered, points.complete, points.common, points.last]
            .into_iter()
            .flatten()
            .chain(receiving.map(|transfer| transfer.point))
            .chain(receiving.and_then(|transfer| transfer.base))
            .chain(claims.into_iter().flatten().map(|claim| claim.point))
    }

    /// The record that a recovery makes of an older one. Role and generation are those of the pools, which heard of
    /// them before anybody else did. Nothing counts any more that says what the live views are.
    pub fn recovered(mut self, pools: Keepsake, term: u64) -> Self {
        self.term = term;
        self.is_unsure = true;
        self.points.cutting = None;
        self.points.dropping = None;
        self.points.offered = None;
        self.claims.own = None;
        self.asks_step_down = false;
        if !mutant::is("transfer-kept-over-a-recovery") {
            self.receiving = None;
        }
        // A fence of it holds for what came after it too.
        self.fence = 0;
        if mutant::is("role-of-restored-records-believed") {
            return self;
        }
        let is_newer = !self.chain.has(pools.begun.generation);
        if is_newer {
            self.chain.push(pools.begun);
        }
        let is_top = self.chain.top().generation == pools.begun.generation;
        // Within one generation a side is Primary first and Secondary after it.
        if is_newer || is_top && self.role.is_primary() && !pools.is_primary {
            self.role = if pools.is_primary { Role::Primary } else { Role::Secondary };
            self.claims = Claims::default();
            self.points.last = None;
        }
        self
    }
}
