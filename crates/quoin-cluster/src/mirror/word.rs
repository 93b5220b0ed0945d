//! The one message from brain to brain: all that the other one may know of this side, as its record has it.
//!
//! It is sent whole, so one that is lost costs nothing once the next one comes.

use quoin_types::ids::{GroupId, PointId};

use super::chain::Chain;
use super::record::{Claim, Member, Parameters, Role, Transfer};
use super::session::Header;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    pub transfer: Transfer,
    /// Wall clock of the side that offers, when the point was cut.
    pub cut_ms: u64,
    /// Sizes that the members of the copy need, in the order of the members.
    pub blocks: Vec<u64>,
}

/// A side is ready to take slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Want {
    pub transfer: Transfer,
    pub token: u128,
    /// Where each member goes on, in the order of the members.
    pub cursors: Vec<u64>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Word {
    pub role: Role,
    pub chain: Chain,
    pub members: Vec<Member>,
    /// Points that every member with a base holds, the oldest first.
    pub held: Vec<PointId>,
    pub offer: Option<Offer>,
    pub want: Option<Want>,
    pub complete: Option<PointId>,
    pub common: Option<PointId>,
    pub last: Option<PointId>,
    pub claim: Option<Claim>,
    pub yielded: Option<Claim>,
    pub asks_step_down: bool,
    /// The resync that is under way here, and the one of the other side that this primary has heard of.
    pub resync: Option<PointId>,
    pub heard_resync: Option<PointId>,
    pub parameters: Parameters,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    pub group: GroupId,
    pub header: Header,
    /// `None`: a transition is under way, or pools have not heard of the role yet.
    pub word: Option<Word>,
}
