//! States of two clusters and one group.

use super::Bounds;

pub const MEMBERS: usize = 2;
/// Points have the numbers from one on, in the order in which they were named; 0: none.
pub const POINTS: usize = 8;
const CHAIN: usize = 5;

/// Writes of each member, one bit each: they go to the members in turn.
pub const OF_MEMBER: [u8; MEMBERS] = [0b0101_0101, 0b1010_1010];

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Role {
    Primary,
    Demoting,
    #[default]
    Secondary,
    Promoting,
    Diverged,
    Resyncing,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Generation {
    pub number: u8,
    pub cluster: u8,
}

/// A generation and the point that it began at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Begun {
    pub generation: Generation,
    pub at: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Chain {
    begun: [Begun; CHAIN],
    length: u8,
}

impl Chain {
    pub fn push(&mut self, begun: Begun) {
        self.begun[usize::from(self.length)] = begun;
        self.length += 1;
    }

    pub fn is_full(&self) -> bool {
        usize::from(self.length) == CHAIN
    }

    pub fn all(&self) -> &[Begun] {
        &self.begun[..usize::from(self.length)]
    }

    pub fn top(&self) -> Begun {
        self.begun[usize::from(self.length) - 1]
    }

    pub fn place(&self, generation: Generation) -> Option<usize> {
        self.all().iter().position(|begun| begun.generation == generation)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Transfer {
    pub point: u8,
    /// 0: everything is sent.
    pub base: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Claim {
    pub number: u8,
    pub point: u8,
    pub id: u8,
}

/// The record of the mirror, which is changed by compare-and-swap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Record {
    pub role: Role,
    pub chain: Chain,
    /// Point that is named and may be cut on some members.
    pub cutting: u8,
    /// Point that is cut and is to be sent.
    pub offered: u8,
    pub receiving: Option<Transfer>,
    /// Every member was at the base when the transfer began.
    pub is_begun: bool,
    pub complete: u8,
    pub common: u8,
    /// The final point of a demotion.
    pub last: u8,
    pub claim: Option<Claim>,
    pub yielded: Option<Claim>,
    /// A promotion under way.
    pub promoting: Option<Claim>,
    pub is_forced: bool,
    /// A recovery of older records; the other side has not spoken since.
    pub is_unsure: bool,
}

/// Word of a side to the other one: all that its record says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Word {
    pub role: Role,
    pub chain: Chain,
    /// Points that every member holds, one bit each.
    pub held: u8,
    pub offer: Option<Transfer>,
    pub complete: u8,
    pub common: u8,
    pub last: u8,
    pub claim: Option<Claim>,
    pub yielded: Option<Claim>,
}

/// Content of the live view of one member.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Live {
    /// These writes.
    Whole(u8),
    /// Some of the slots of a transfer, on its base.
    Fed(Transfer),
    /// The content of no point.
    Mixed,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Volume {
    pub live: Live,
    /// Points that are held, one bit each.
    pub held: u8,
    /// Every slot of the order was taken.
    pub is_fed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Side {
    pub record: Record,
    pub backup: Option<Record>,
    /// Role and generation that a quorum of the pools has.
    pub pools_primary: bool,
    pub pools: Begun,
    /// Everything that was granted before the present transition is ended.
    pub is_fenced: bool,
    /// A client may write.
    pub is_writable: bool,
    /// Order to take slots that the targets have.
    pub order: Option<Transfer>,
    /// Order that was ended and of which slots are still under way.
    pub ended_order: Option<Transfer>,
    pub volumes: [Volume; MEMBERS],
    /// Writes that a snapshot keeps which no transfer touches.
    pub lost: u8,
    /// The last word of the other side that was heard.
    pub heard: Option<Word>,
    /// A word that is on its way to this side.
    pub coming: Option<Word>,
    /// A yield that was said and not recorded.
    pub unrecorded: Option<Claim>,
    /// The highest generation and role that the other side was told.
    pub told: (Generation, u8),
    /// The last point that was complete here, whatever the record says.
    pub completed: u8,
    pub restores: u8,
}

impl Side {
    /// Points that every member holds.
    pub fn held(&self) -> u8 {
        self.volumes.iter().fold(u8::MAX, |held, volume| held & volume.held)
    }

    pub fn holds(&self, point: u8) -> bool {
        point != 0 && self.held() & bit(point) != 0
    }

    /// Points that a rule of the record keeps.
    pub fn kept(&self) -> u8 {
        let record = &self.record;
        let receiving = record.receiving.map_or([0; 2], |t| [t.point, t.base]);
        let promoting = record.promoting.map_or(0, |claim| claim.point);
        let claimed = record.claim.map_or(0, |claim| claim.point);
        [record.cutting, record.offered, record.complete, record.common, record.last]
            .into_iter()
            .chain(receiving)
            .chain([promoting, claimed])
            .fold(0, |kept, point| kept | bit(point))
    }

    pub fn is_own(&self, side: usize) -> bool {
        usize::from(self.record.chain.top().generation.cluster) == side
    }

    /// Role and generation of the record are those of the pools.
    pub fn pools_have_it(&self) -> bool {
        let is_primary = matches!(self.record.role, Role::Primary | Role::Demoting);
        self.pools_primary == is_primary && self.pools == self.record.chain.top()
    }
}

pub fn bit(point: u8) -> u8 {
    if point == 0 { 0 } else { 1 << (point - 1) }
}

/// The newest of these points.
pub fn newest(points: u8) -> u8 {
    (u8::BITS - points.leading_zeros()) as u8
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct State {
    pub sides: [Side; 2],
    /// Writes of each point.
    pub content: [u8; POINTS + 1],
    pub points: u8,
    pub writes: u8,
    pub claims: u8,
    /// Rest of the bounds.
    pub promotions: u8,
    pub forced: u8,
    pub demotions: u8,
    pub resyncs: u8,
    pub deaths: u8,
    /// Force was used.
    pub was_forced: bool,
    pub broken: Option<&'static str>,
}

impl State {
    pub fn first(bounds: &Bounds) -> Self {
        let first = Begun { generation: Generation { number: 1, cluster: 0 }, at: 0 };
        let mut chain = Chain::default();
        chain.push(first);
        let side = |role, complete| Side {
            record: Record { role, chain, common: 1, complete, ..Record::default() },
            backup: None,
            pools_primary: role == Role::Primary,
            pools: first,
            is_fenced: false,
            is_writable: role == Role::Primary,
            order: None,
            ended_order: None,
            volumes: [Volume { live: Live::Whole(0), held: bit(1), is_fed: false }; MEMBERS],
            lost: 0,
            heard: None,
            coming: None,
            unrecorded: None,
            told: (first.generation, 0),
            completed: complete,
            restores: 0,
        };
        State {
            sides: [side(Role::Primary, 0), side(Role::Secondary, 1)],
            content: [0; POINTS + 1],
            points: 1,
            writes: 0,
            claims: 0,
            promotions: bounds.promotions,
            forced: bounds.forced,
            demotions: bounds.demotions,
            resyncs: bounds.resyncs,
            deaths: bounds.deaths,
            was_forced: false,
            broken: None,
        }
    }

    pub fn acknowledged(&self) -> u8 {
        (1u8 << self.writes) - 1
    }

    /// Content of a point on one member.
    pub fn of_point(&self, point: u8, member: usize) -> Live {
        Live::Whole(self.content[usize::from(point)] & OF_MEMBER[member])
    }

    /// The live view of every member is this point.
    pub fn shows(&self, side: usize, point: u8) -> bool {
        (0..MEMBERS).all(|m| self.sides[side].volumes[m].live == self.of_point(point, m))
    }

    /// Writes that a side has anywhere.
    fn kept_writes(&self, side: usize) -> u8 {
        let side = &self.sides[side];
        let mut kept = side.lost;
        for (m, volume) in side.volumes.iter().enumerate() {
            if let Live::Whole(writes) = volume.live {
                kept |= writes;
            }
            for point in (1..=POINTS as u8).filter(|point| volume.held & bit(*point) != 0) {
                kept |= self.content[usize::from(point)] & OF_MEMBER[m];
            }
        }
        kept
    }

    /// The invariant that the state breaks.
    pub fn judge(&self) -> Option<&'static str> {
        if self.broken.is_some() {
            return self.broken;
        }
        if self.acknowledged() & !(self.kept_writes(0) | self.kept_writes(1)) != 0 {
            return Some("NothingIsLost");
        }
        let rules = |side: &Side| side.record.role == Role::Primary || side.is_writable;
        if !self.was_forced && self.sides.iter().all(rules) {
            return Some("NoSecondPrimaryWithoutForce");
        }
        let [a, b] = &self.sides;
        if a.held() & b.held() == 0 {
            return Some("LastCommonPinnedBothSides");
        }
        let serve = |side: &Side| side.pools_primary && side.is_writable;
        if serve(a) && serve(b) && a.pools.generation == b.pools.generation {
            return Some("OnePrimaryPerG");
        }
        None
    }
}
