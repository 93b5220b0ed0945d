//! The next timer of a target: the minimum over its parts.

use std::time::Duration;

use super::serve::PATIENCE;
use super::{Link, OnQuorumLoss, Phase, Primary, PrimaryAction};
use quoin_types::time::Time;

/// Shortest delay of a timer; work that is due earlier waits for it.
pub const TIMER_DELAY_MIN: Duration = Duration::from_millis(1);

fn soonest(times: impl IntoIterator<Item = Option<Time>>) -> Option<Time> {
    times.into_iter().flatten().min()
}

impl Primary {
    pub(super) fn set_timer(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        if self.phase == Phase::Stopped {
            return;
        }
        let due =
            [self.phase_due(), self.sessions_due(now), self.io_due(now), self.hedge_reads(now)];
        // Never in the past: this very call has handled what is overdue.
        let Some(at) = soonest(due).map(|t| t.max(now + TIMER_DELAY_MIN)) else { return };
        if self.announced.set_timer(at) {
            actions.push(PrimaryAction::Timer { at: Some(at) });
        }
    }

    fn phase_due(&self) -> Option<Time> {
        match self.phase {
            Phase::Resting { until } | Phase::Draining { until, .. } => Some(until),
            Phase::Acquiring | Phase::Fetching { .. } => Some(self.opening.answer_by),
            Phase::Recovering if self.waits_in_vain() => Some(self.opening.answer_by),
            _ => self.open_deadline(),
        }
    }

    /// Time of the next session that begins, counts as dead, or is too late.
    fn sessions_due(&self, now: Time) -> Option<Time> {
        let connects = !matches!(self.phase, Phase::Draining { .. });
        let connect = self.members.connect_at().filter(|_| connects);
        let age = Duration::from_millis(self.config.drop_after_ms.into());
        let sessions = self.members.peers.iter().enumerate().map(|(index, peer)| {
            let view = if peer.link == Link::Fed && self.commit.views.counts(peer.member) {
                let behind = peer.progress.applied < self.history.last.lsn;
                let since = peer.progress.behind_since.filter(|_| behind);
                since.map(|t| if t + age > now { t + age } else { now + PATIENCE })
            } else {
                Some(peer.lasting.return_at).filter(|at| peer.link == Link::Fed && *at > now)
            };
            let bulk = peer.bulk.due().filter(|_| !self.is_closing());
            soonest([self.silent_at(index), bulk, view])
        });
        soonest(sessions.chain([connect]))
    }

    /// Time of the next step of IO, and of work beside it.
    fn io_due(&self, now: Time) -> Option<Time> {
        if !self.is_running() || self.phase == Phase::Recovering {
            return None;
        }
        let renewal = self.wants_lease().then(|| {
            let half = Duration::from_millis(u64::from(self.config.lease_ms) / 2);
            let renew = self.lease_until().map_or(now, |until| until - half);
            renew.max(now + self.ping_interval())
        });
        let fails = self.config.on_quorum_loss == OnQuorumLoss::Fail && self.replies_wait();
        let failure = self.commit.quorum_lost.filter(|_| fails).map(|since| {
            let grace = Duration::from_millis(self.config.lease_ms.into());
            (since + grace).max(now + self.ping_interval())
        });
        let sync_after = Duration::from_millis(self.config.sync_after_ms.into());
        soonest([
            renewal,
            failure,
            self.commit.due(now, &self.members.peers, sync_after),
            self.room_due(),
            self.verify_due(),
            self.rebuilds.due(now),
            self.change.due(now),
            self.changes.due(),
            self.holds.due(),
        ])
    }
}
