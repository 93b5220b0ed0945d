//! Steps of this target that are under way (see [`crate::step`]), and its progress, for observers
//! and for checks of its invariants.

use super::peer::{Link, Peer};
use super::rebuild::Stage;
use super::requests::Waiting;
use super::{Phase, Primary};
use crate::step::Step;
use quoin_types::entry::View;
use quoin_types::ids::Lsn;
use quoin_types::time::Time;

impl Primary {
    /// LSNs up to which entries are committed, and stable.
    pub fn reach(&self) -> (Lsn, Lsn) {
        (self.commit.lsn, self.commit.stable)
    }

    /// Time until which it may reply, by its own clock.
    pub fn lease(&self) -> Option<Time> {
        self.lease_until()
    }

    /// The View in force.
    pub fn active_view(&self) -> Option<(Lsn, &View)> {
        self.commit.views.active.as_ref().map(|(lsn, view)| (*lsn, view))
    }

    /// Number of counted replicas with a live session that hold everything up to this LSN.
    pub fn holders(&self, lsn: Lsn) -> usize {
        let holds = |p: &&Peer| {
            p.is_live() && self.commit.views.counts(p.member) && p.progress.applied >= lsn
        };
        self.members.peers.iter().filter(holds).count()
    }

    /// Every step that is under way, in the order of [`Step::ALL`].
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut add = |yes: bool, step: Step| {
            if yes {
                steps.push(step);
            }
        };
        let stage = |stage: Stage| {
            self.members.peers.iter().filter_map(|p| p.rebuild.as_ref()).any(|r| r.stage() == stage)
        };
        let recovering = self.phase == Phase::Recovering;
        let rebuilding = self.members.peers.iter().any(|p| p.link == Link::Rebuilding);
        add(self.phase == Phase::Acquiring, Step::Acquiring);
        add(matches!(self.phase, Phase::Opening { .. }), Step::Opening);
        add(matches!(self.phase, Phase::Fetching { .. }), Step::Fetching);
        add(recovering, Step::Recovering);
        add(recovering && rebuilding, Step::RecoveringByBase);
        add(self.requests.any(Waiting::Commit), Step::Writing);
        add(self.requests.any(Waiting::Stable), Step::Stabilising);
        add(!self.reads.is_empty(), Step::Reading);
        add(self.requests.merging(), Step::Merging);
        add(!self.commit.views.pending.is_empty() && !recovering, Step::ViewPending);
        let behind = self
            .members
            .peers
            .iter()
            .any(|p| p.link == Link::Fed && p.progress.applied < p.progress.tip);
        add(behind && !recovering, Step::CatchingUp);
        add(stage(Stage::Boundary), Step::RebuildBoundary);
        add(stage(Stage::Moving) || stage(Stage::Beginning), Step::RebuildMoving);
        add(stage(Stage::Committing), Step::RebuildCommitting);
        add(self.change.is_joint(), Step::Joint);
        add(self.change.is_swapping(), Step::Swapping);
        add(self.commit.quorum_lost.is_some() && self.phase == Phase::Serving, Step::BelowQuorum);
        add(matches!(self.phase, Phase::Draining { closing: false, .. }), Step::Draining);
        add(matches!(self.phase, Phase::Draining { closing: true, .. }), Step::Closing);
        steps
    }
}
