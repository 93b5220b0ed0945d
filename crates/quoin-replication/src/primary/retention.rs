//! Retention of entries in memory: which ones, for which replicas, and how many at most.
//!
//! Entries that are not stable, or that a fed member lacks, are always kept: writes are pushed back
//! before these grow beyond a multiple of the window. Further entries are kept for replicas that
//! are away or being rebuilt, so that they need no increment, or no further one. That is optional.
//! Each volume with a missing replica would hold a window of them, so the process that runs many
//! targets limits their memory ([`PrimaryEvent::Retain`](super::PrimaryEvent)).

use super::{Link, Phase, Primary, PrimaryAction};
use quoin_types::ids::Lsn;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Fraction of the window; the entries that follow an increment's boundary until it is in place
/// must fit.
const LEAST_PART: usize = 64;

impl Primary {
    /// Drops entries, except those that are not stable or that a fed member lacks. Within the
    /// window it keeps those that a member which is away may be fed from later; for a member that
    /// is being rebuilt it keeps more of the window. Otherwise writers that fill the window while
    /// an increment is synced would make its rounds endless.
    pub(super) fn trim_history(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        if self.phase == Phase::Recovering {
            // Entries after the authority's base were fetched for those that get the base first.
            return;
        }
        let away = self.config.window_bytes.min(self.rebuilds.retain_bytes_max);
        let behind = self.catch_up_bytes();
        for index in 0..self.members.len() {
            let peer = &self.members[index];
            let lag = self.history.weight_after(peer.progress.applied);
            if peer.link == Link::Fed && lag > behind && !self.commit.views.counts(peer.member) {
                // The member is beyond the window: increments bring it back, from the state that it
                // reports in a new session. Entries on their way to it now would be beyond that.
                self.hang_up(now, index, actions);
            }
        }
        // Reads of a held volume look for the entries that they may not show.
        let mut keep_after = self.holds.shown(self.commit.stable);
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

    /// Limit of how far a member that is brought back may be behind and be fed plain entries. It is
    /// as much as may be unstable, so that a rebuild takes no more of the target's memory than slow
    /// syncs do, and never so little that no increment could be its last.
    pub(super) fn catch_up_bytes(&self) -> usize {
        let window = self.config.window_bytes;
        let least = if mutant::is("last-increment-without-room") { 0 } else { window / LEAST_PART };
        window.saturating_mul(4).min(self.rebuilds.retain_bytes_max.max(least))
    }

    /// Bytes of entries that are held, for any reason.
    pub fn retained_bytes(&self) -> usize {
        self.history.weight_after(Lsn(self.history.first().0.saturating_sub(1)))
    }

    /// The highest LSN that is followed by at most so many bytes of entries.
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
