//! Observations of a target between its start and its end.

use std::collections::VecDeque;

use quoin_types::entry::Rule;
use quoin_types::message::OpenAck;
use quoin_types::{Desired, Epoch, Lsn, Member, Membership, ReplicaGuid, SessionKey, View};

/// Rules that a target's requests may be counted by at once, at most.
const RULES_MAX: usize = 16;

#[derive(Default, Debug)]
pub(super) struct Target {
    /// The desired membership that was sent last.
    pub desired: Desired,
    /// The membership that answers of the control plane gave it.
    pub ruling: Membership,
    pub epoch: Epoch,
    pub peers: Peers,
    pub views: Views,
    pub refusals: Refusals,
    /// The highest LSN that a write was acknowledged at.
    pub acknowledged: Lsn,
    /// Peers beside the known ones at the last check, unless that was in another epoch.
    pub beside: Option<Vec<Member>>,
    pub below_cf: bool,
    pub is_dirty: bool,
    /// A session ended in this batch: what was decided may be of before.
    pub is_unsettled: bool,
}

/// Replicas in the present epoch.
#[derive(Default, Debug)]
pub(super) struct Peers {
    pub all: Vec<Peer>,
    /// Highest LSN that each replica has reported as applied.
    applied: Vec<(ReplicaGuid, Lsn)>,
    /// Known replicas that have answered the open, quorum on and whole.
    pub voters: Vec<Member>,
    /// Named by joint Views that the open brought.
    pub named: Vec<Member>,
    /// Whose quorum was seen to be on.
    pub seen_on: Vec<Member>,
}

/// A replica that has answered a target's Open, as long as the session lasts.
#[derive(Debug)]
pub(super) struct Peer {
    pub session: SessionKey,
    pub member: Member,
    pub quorum: bool,
    pub membership_version: u64,
    pub durable: Lsn,
    /// The next entry that it must be sent; `None` before it is known where it stands.
    pub next: Option<Lsn>,
    /// It has reported its position.
    pub is_live: bool,
    /// Entries were sent to it.
    pub is_fed: bool,
    /// The first View of this session that counts it.
    pub listed: Option<Lsn>,
}

/// Views that were sent in the present epoch.
#[derive(Default, Debug)]
pub(super) struct Views {
    /// The newest, and where the first under its second rule is.
    pub newest: Option<(Lsn, View)>,
    pub joint_at: Lsn,
    /// Rules of the latest ones.
    pub counted_by: VecDeque<(Lsn, Rule)>,
}

/// Replicas that were not let in, and changes that were not made.
#[derive(Default, Debug)]
pub(super) struct Refusals {
    pub refused: Vec<Member>,
    /// Refusals that were reported, and whether of too many.
    pub reported: Vec<(Member, bool)>,
    pub given_up: Vec<Member>,
    pub not_taken: Vec<Member>,
}

impl Peer {
    /// Its quorum was off, and no View counts it.
    pub fn is_off(&self) -> bool {
        !self.quorum && self.listed.is_none()
    }

    pub fn is_fed_quorum_off(&self) -> bool {
        self.is_off() && self.is_fed
    }
}

impl Peers {
    pub fn of(&mut self, session: SessionKey) -> Option<&mut Peer> {
        self.all.iter_mut().find(|peer| peer.session == session)
    }

    pub fn answered(&mut self, session: SessionKey, member: Member, is_known: bool, ack: &OpenAck) {
        if is_known && ack.quorum && !ack.damaged && !self.voters.contains(&member) {
            self.voters.push(member);
        }
        if let Some((_, View { joint: Some(rule), .. })) = &ack.last_view {
            self.named.extend(&rule.known);
        }
        self.all.retain(|peer| peer.member != member);
        self.all.push(Peer {
            session,
            member,
            quorum: ack.quorum,
            membership_version: ack.membership_version,
            durable: Lsn::ZERO,
            next: None,
            is_live: false,
            is_fed: false,
            listed: None,
        });
    }

    pub fn note_applied(&mut self, guid: ReplicaGuid, lsn: Lsn, again: bool) {
        match self.applied.iter_mut().find(|(of, _)| *of == guid) {
            Some((_, has)) => *has = if again { lsn } else { lsn.max(*has) },
            None => self.applied.push((guid, lsn)),
        }
    }

    pub fn holds(&self, member: Member, lsn: Lsn) -> bool {
        self.applied.iter().any(|(of, has)| *of == member.guid && *has >= lsn)
    }

    pub fn connected(&self, rule: &Rule) -> usize {
        self.all.iter().filter(|peer| rule.known.contains(&peer.member)).count()
    }
}

impl Views {
    pub fn add(&mut self, lsn: Lsn, view: &View) {
        self.newest = Some((lsn, view.clone()));
        self.counted_by.push_back((lsn, view.rule.clone()));
        self.counted_by.extend(view.joint.clone().map(|joint| (lsn, joint)));
        self.counted_by.drain(..self.counted_by.len().saturating_sub(RULES_MAX));
    }
}

impl Target {
    pub fn known(&self, member: Member) -> bool {
        self.ruling.known.contains(&member)
    }

    /// The rules that its newest View counts by.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.views
            .newest
            .iter()
            .flat_map(|(_, view)| std::iter::once(&view.rule).chain(&view.joint))
    }

    /// A second rule knows it.
    pub fn is_joint(&self, member: Member) -> bool {
        let joint = self.views.newest.as_ref().and_then(|(_, view)| view.joint.as_ref());
        joint.is_some_and(|rule| rule.known.contains(&member))
    }

    pub fn set_desired(&mut self, desired: &Desired) {
        if self.desired != *desired {
            self.desired = desired.clone();
            self.is_dirty = true;
        }
    }

    /// A new epoch: sessions and Views are the old one's.
    pub fn begin_epoch(&mut self, epoch: Epoch) {
        let old = std::mem::take(self);
        *self = Self {
            desired: old.desired,
            ruling: old.ruling,
            refusals: old.refusals,
            is_dirty: true,
            epoch,
            ..Self::default()
        };
    }
}
