//! The replicas of a volume as its target knows them: the membership, the desired one, and a
//! session for each replica.
//!
//! Peers are created here alone: those of the known list when an epoch is granted, newcomers that
//! [`admit`] accepts, and witnesses, which are asked in an open and take no seat.

use std::ops::{Index, IndexMut};
use std::time::Duration;

use super::admission::{Admission, Applicant, Connected, Refusal, Seats, admit};
use super::change::rule_of;
use super::peer::{Link, Peer};
use super::slow::Slowness;
use quoin_types::entry::Rule;
use quoin_types::ids::{Lsn, VolumeId};
use quoin_types::membership::{Desired, Member, Membership};
use quoin_types::time::Time;

/// Time for which a replica that broke the protocol is not connected.
const BANNED_FOR: Duration = Duration::from_secs(10);

pub(super) struct Members {
    /// The membership in force.
    pub membership: Membership,
    /// The membership that the controller desires.
    pub desired: Desired,
    /// The lease is kept while the volume is idle too.
    pub keeps_lease: bool,
    pub peers: Vec<Peer>,
    next_nonce: u64,
    /// Replicas that broke the protocol, each with the time of its next attempt.
    banned: Vec<(Member, Time)>,
    /// Times that the replicas take to apply writes.
    pub slow: Slowness,
    /// Refusals that were reported, each once.
    refused: Vec<(Member, Refusal)>,
}

/// The outcome of a round of admission for newcomers.
#[derive(Default)]
pub(super) struct Seating {
    /// Replicas that have a seat, the known ones among them.
    seated: Vec<Connected>,
    /// Replicas whose sessions end.
    pub gone: Vec<Member>,
    /// Refusals that are to be reported.
    pub news: Vec<(Member, Refusal)>,
}

impl Index<usize> for Members {
    type Output = Peer;

    fn index(&self, index: usize) -> &Peer {
        &self.peers[index]
    }
}

impl IndexMut<usize> for Members {
    fn index_mut(&mut self, index: usize) -> &mut Peer {
        &mut self.peers[index]
    }
}

impl Members {
    pub fn new() -> Self {
        Self {
            membership: Membership::default(),
            desired: Desired::default(),
            keeps_lease: false,
            peers: Vec::new(),
            next_nonce: 1,
            banned: Vec::new(),
            slow: Slowness::default(),
            refused: Vec::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.peers.len()
    }

    pub fn position(&self, member: Member) -> Option<usize> {
        self.peers.iter().position(|p| p.member == member)
    }

    pub fn get(&self, member: Member) -> Option<&Peer> {
        self.peers.iter().find(|p| p.member == member)
    }

    /// The rule of the membership in force.
    pub fn rule(&self) -> Rule {
        rule_of(&self.membership)
    }

    /// Begins an epoch that was granted with this membership: all known replicas are to be
    /// connected.
    pub fn open(&mut self, now: Time, volume: VolumeId, membership: Membership) {
        self.membership = membership;
        self.peers.clear();
        let seats = Seats {
            volume,
            membership: &self.membership,
            drf: self.membership.drf,
            connected: &[],
            moving: &[],
        };
        for member in &self.membership.known {
            let applicant = Applicant {
                volume,
                member: *member,
                quorum: true,
                empty: true,
                membership_version: 0,
            };
            if matches!(admit(&seats, &applicant), Admission::Known { .. }) {
                self.peers.push(Peer::new(*member, now));
            }
        }
    }

    /// Connects a replica that may know what the known replicas do not. It has no seat.
    pub fn ask_witness(&mut self, now: Time, member: Member) {
        if self.get(member).is_none() && !self.membership.retired.contains(&member.guid) {
            self.peers.push(Peer::new(member, now));
        }
    }

    /// Decides which newcomers get sessions like known replicas: those that [`admit`] accepts
    /// beside the known ones that are connected. The others lose their sessions, unless a second
    /// rule `keeps` them.
    pub fn seat_newcomers(
        &mut self,
        volume: VolumeId,
        keeps: impl Fn(Member) -> bool,
    ) -> Option<Seating> {
        let strangers = self.peers.len() > self.membership.known.len();
        if self.desired.newcomers.is_empty() && !strangers {
            // A replica that applies again is reported again.
            self.refused.clear();
            return None;
        }
        let connected = |p: &Peer| !matches!(p.link, Link::Down | Link::Connecting | Link::Opening);
        let mut seated: Vec<Connected> = self
            .peers
            .iter()
            .filter(|p| self.membership.contains(p.member) && connected(p))
            .map(|p| Connected { member: p.member, quorum: true })
            .collect();
        let moving: Vec<Member> =
            self.desired.newcomers.iter().filter(|n| n.beside).map(|n| n.member).collect();
        // Newcomers that are fed already come first, so that no seat changes without need.
        let mut applicants: Vec<Member> = self.desired.newcomers.iter().map(|n| n.member).collect();
        applicants.retain(|m| !self.membership.contains(*m));
        applicants.sort_by_key(|m| self.get(*m).is_none());
        let mut refused: Vec<(Member, Refusal)> = Vec::new();
        for member in applicants {
            let ack = self.get(member).and_then(|p| p.ack.as_ref());
            let applicant = Applicant {
                volume,
                member,
                quorum: ack.is_some_and(|a| a.quorum),
                empty: ack.is_none_or(|a| a.position.lsn == Lsn::ZERO),
                membership_version: ack.map_or(0, |a| a.membership_version),
            };
            let seats = Seats {
                volume,
                membership: &self.membership,
                drf: self.desired.drf,
                connected: &seated,
                moving: &moving,
            };
            match admit(&seats, &applicant) {
                Admission::Known { displaces } | Admission::Unknown { displaces } => {
                    if let Some(displaced) = displaces {
                        seated.retain(|c| c.member != displaced);
                        refused.push((displaced, Refusal::Full));
                    }
                    seated.push(Connected { member, quorum: applicant.quorum });
                }
                // K is written complete when a volume is created: no replica is formed here.
                Admission::Forming => refused.push((member, Refusal::NotDesired)),
                Admission::Rejected(refusal) => refused.push((member, refusal)),
            }
        }
        let stays = |m: Member| {
            self.membership.contains(m) || keeps(m) || seated.iter().any(|c| c.member == m)
        };
        let gone = self.peers.iter().map(|p| p.member).filter(|m| !stays(*m)).collect();
        let news = refused.iter().filter(|refusal| !self.refused.contains(refusal));
        let news = news.copied().collect();
        self.refused = refused;
        Some(Seating { seated, gone, news })
    }

    /// Creates the peers of newcomers that got a seat.
    pub fn admit(&mut self, now: Time, seating: &Seating) {
        for Connected { member, .. } in &seating.seated {
            if self.get(*member).is_none() {
                self.peers.push(Peer::new(*member, now));
            }
        }
    }

    pub fn nonce(&mut self) -> u64 {
        let nonce = self.next_nonce;
        self.next_nonce += 1;
        nonce
    }

    /// Begins the sessions that are due; returns their peers.
    pub fn connect_due(&mut self, now: Time) -> Vec<usize> {
        let mut begun = Vec::new();
        for index in 0..self.peers.len() {
            let member = self.peers[index].member;
            let banned = self.banned.iter().any(|(m, until)| *m == member && now < *until);
            let peer = &self.peers[index];
            if peer.link == Link::Down && peer.retry.at <= now && !banned {
                let nonce = self.nonce();
                let peer = &mut self.peers[index];
                (peer.link, peer.since, peer.nonce) = (Link::Connecting, now, nonce);
                begun.push(index);
            }
        }
        self.banned.retain(|(_, until)| now < *until);
        begun
    }

    /// Time at which [`Members::connect_due`] has something to do.
    pub fn connect_at(&self) -> Option<Time> {
        let down = self.peers.iter().filter(|p| p.link == Link::Down);
        let at = down.map(|peer| {
            let banned = self.banned.iter().find(|(m, _)| *m == peer.member).map(|b| b.1);
            banned.map_or(peer.retry.at, |until| until.max(peer.retry.at))
        });
        at.min()
    }

    /// Bans a replica that broke the protocol.
    pub fn ban(&mut self, now: Time, member: Member) {
        self.banned.push((member, now + BANNED_FOR));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::ids::{ReplicaGuid, ReplicaId};
    use quoin_types::membership::Newcomer;

    fn member(id: u128) -> Member {
        Member { id: ReplicaId(id), guid: ReplicaGuid(id) }
    }

    fn at(s: u64) -> Time {
        Time::from_millis(s * 1000)
    }

    /// Members with two known replicas, under an epoch granted at 0.
    fn members() -> Members {
        let known = vec![member(1), member(2)];
        let retired = vec![ReplicaGuid(9)];
        let membership =
            Membership { version: 1, rf: 2, cf: 2, drf: 2, known, retired, formed: true };
        let mut members = Members::new();
        members.open(at(0), VolumeId(7), membership);
        members
    }

    fn wants(members: &mut Members, id: u128) {
        members.desired.drf = 3;
        members.desired.newcomers.push(Newcomer { member: member(id), beside: false });
    }

    fn of(members: &Members) -> Vec<u128> {
        members.peers.iter().map(|p| p.member.id.0).collect()
    }

    #[test]
    fn known_replicas_are_connected_at_once_and_a_banned_one_after_its_time() {
        let mut members = members();
        assert_eq!(members.connect_at(), Some(at(0)));
        members.ban(at(0), member(1));
        assert_eq!(members.connect_due(at(0)), [1]);
        assert_eq!(members.connect_at(), Some(at(10)));
        assert_eq!(members.connect_due(at(9)), []);
        assert_eq!(members.connect_due(at(10)), [0]);
        assert_eq!([members[0].nonce, members[1].nonce], [2, 1]);
        assert_eq!(members.connect_at(), None);
    }

    #[test]
    fn witnesses_are_asked_once_and_retired_replicas_never() {
        let mut members = members();
        for id in [1, 5, 5, 9] {
            members.ask_witness(at(0), member(id));
        }
        assert_eq!(of(&members), [1, 2, 5]);
    }

    #[test]
    fn a_newcomer_gets_a_seat_while_one_is_free_and_a_refusal_is_news_once() {
        let mut members = members();
        assert!(members.seat_newcomers(VolumeId(7), |_| false).is_none());
        wants(&mut members, 3);
        wants(&mut members, 9);
        let seating = members.seat_newcomers(VolumeId(7), |_| false).unwrap();
        assert_eq!(seating.news, [(member(9), Refusal::Retired)]);
        members.admit(at(0), &seating);
        assert_eq!(of(&members), [1, 2, 3]);
        let again = members.seat_newcomers(VolumeId(7), |_| false).unwrap();
        assert!(again.news.is_empty() && again.gone.is_empty());
        members.desired.newcomers.clear();
        let kept = members.seat_newcomers(VolumeId(7), |m| m == member(3)).unwrap();
        assert!(kept.gone.is_empty(), "the second rule of a change knows it");
        let over = members.seat_newcomers(VolumeId(7), |_| false).unwrap();
        assert_eq!(over.gone, [member(3)]);
    }
}
