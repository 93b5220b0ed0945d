//! Which entries are kept in memory, for whom, and how many at most.
//!
//! What is not stable, or what a member that is fed lacks, is kept whatever it takes: writes are
//! pushed back before that grows beyond a multiple of the window. Beyond it entries are kept for
//! replicas that are away or being rebuilt, so that they need no increment, or no further one.
//! That is a convenience: whoever runs many targets in one process says how much memory it may take
//! ([`PrimaryEvent::Retain`](super::PrimaryEvent)), as each volume whose replica is away would else
//! hold a window.

use super::{Link, Phase, Primary, PrimaryAction};
use quoin_types::ids::Lsn;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Of the window; what follows an increment's boundary until it is in place must fit.
const LEAST_PART: usize = 64;

impl Primary {
    /// Keeps what is not stable and what a fed member lacks; and, within the window, what a
    /// member that is away may be fed from later, and within more of it one that is being rebuilt:
    /// else writers that fill the window while an increment is synced would make its rounds endless.
    pub(super) fn trim_history(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        if self.phase == Phase::Recovering {
            // What follows the authority's base was fetched for those that get the base first.
            return;
        }
        let away = self.config.window_bytes.min(self.rebuilds.retain_bytes_max);
        let behind = self.catch_up_bytes();
        for index in 0..self.members.len() {
            let peer = &self.members[index];
            let lag = self.history.weight_after(peer.progress.applied);
            if peer.link == Link::Fed && lag > behind && !self.commit.views.counts(peer.member) {
                // It fell out of the window: increments bring it back, from where it says that
                // it stands in a new session. What is on its way to it now would be beyond that.
                self.hang_up(now, index, actions);
            }
        }
        let mut keep_after = self.commit.stable;
        let mut kept_bytes =
            (self.members.membership.known.len() > self.members.len()).then_some(away);
        for peer in &self.members.peers {
            match peer.link {
                Link::Fed => keep_after = keep_after.min(peer.progress.applied),
                Link::Rebuilding => kept_bytes = Some(behind),
                _ => kept_bytes = kept_bytes.max(Some(away)),
            }
        }
        let oldest = kept_bytes.map_or(keep_after, |bytes| self.oldest_within(bytes));
        self.history.trim(oldest.min(keep_after));
    }

    /// How far a member that is brought back may be behind and be fed plain entries. As much as may
    /// be unstable, so that a rebuild takes no more of the target's memory than slow syncs do, and
    /// never so little that no increment could be its last.
    pub(super) fn catch_up_bytes(&self) -> usize {
        let window = self.config.window_bytes;
        let least = if mutant::is("last-increment-without-room") { 0 } else { window / LEAST_PART };
        window.saturating_mul(4).min(self.rebuilds.retain_bytes_max.max(least))
    }

    /// Bytes of entries that are held, for whatever reason.
    pub fn retained_bytes(&self) -> usize {
        self.history.weight_after(Lsn(self.history.first().0.saturating_sub(1)))
    }

    /// The highest LSN after which at most so many bytes of entries follow.
    fn oldest_within(&self, bytes: usize) -> Lsn {
        let first = self.history.first();
        let (mut low, mut high) = (Lsn(first.0.saturating_sub(1)), self.history.last.lsn);
        while low < high {
            let middle = Lsn(low.0 + (high.0 - low.0) / 2);
            if self.history.weight_after(middle) > bytes {
                low = middle.next();
            } else {
                high = middle;
            }
        }
        low
    }
}
