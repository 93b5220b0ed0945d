//! Room that is kept for what targets have sequenced, and each replica's share of it.
//!
//! An entry with an LSN is owed to every replica. So a pool stops granting room while it has some
//! left: as much as all its replicas together may have under way. A target keeps what a replica has
//! not applied within the replica's share; the pool holds it to that once it grants nothing more.

use quoin_types::mutant;

/// Units that one replica's share is made of, at most: more than a target sends ahead.
const SHARE_UNITS_MAX: u32 = 8;
/// Divisors: this part of a pool is kept for all shares, or a unit for each replica if that is more,
/// and never more than that one.
const KEPT_PART: u32 = 64;
const KEPT_PART_MAX: u32 = 8;
/// Longest entry, and its header: what may be left over at the end of a segment.
const LEFT_OVER_BLOCKS: u32 = quoin_types::WRITE_BLOCKS_MAX + 1;

/// What a pool keeps for its replicas.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Shares {
    /// Units that are kept for all of them.
    pub kept_units: u32,
    /// Blocks, headers included, that each may have under way.
    pub share_blocks: u32,
}

impl Shares {
    /// The shares of so many replicas of a pool.
    pub fn among(replicas: usize, units: u32, unit_blocks: u32) -> Self {
        let replicas = u32::try_from(replicas).unwrap_or(u32::MAX).max(1);
        // It never falls as replicas are added: what was granted to fewer still fits.
        let kept_units = (units / KEPT_PART).max(replicas);
        let kept_units = kept_units.min(replicas.saturating_mul(SHARE_UNITS_MAX));
        let kept_units = kept_units.min(units / KEPT_PART_MAX).max(1);
        let usable = unit_blocks.saturating_sub(1);
        let usable = usable - LEFT_OVER_BLOCKS.min(usable / 2);
        let share_blocks = match kept_units / replicas {
            // Most of them find place in the segment that they have open.
            0 => (u64::from(kept_units) * u64::from(usable) / u64::from(replicas)) as u32,
            units => units * usable,
        };
        let kept_units = if mutant::is("shares-not-kept") { 0 } else { kept_units };
        Shares { kept_units, share_blocks: share_blocks.max(SHARE_BLOCKS_MIN) }
    }
}

/// A target cuts requests into parts that fit; one block of data with its header is the least.
const SHARE_BLOCKS_MIN: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_all_replicas_fit_into_what_is_kept_for_them() {
        for units in [16, 61, 700, 25_600, 2_097_152] {
            for replicas in [1, 2, 3, 8, 40, 1000] {
                let Shares { kept_units, share_blocks } = Shares::among(replicas, units, 1024);
                assert!(kept_units <= (units / 8).max(1), "{units} units, {replicas} replicas");
                let blocks = u64::from(share_blocks) * replicas as u64;
                if replicas as u32 <= units / KEPT_PART_MAX {
                    assert!(blocks <= u64::from(kept_units) * 1023, "{units}, {replicas}");
                }
            }
        }
    }

    #[test]
    fn what_is_kept_never_falls_as_replicas_are_added_and_holds_the_shares_of_before() {
        for units in [61, 700, 25_600] {
            let mut before = Shares::among(1, units, 1024);
            for replicas in 2..200 {
                let next = Shares::among(replicas, units, 1024);
                assert!(next.kept_units >= before.kept_units);
                assert!(next.share_blocks <= before.share_blocks);
                before = next;
            }
        }
    }

    #[test]
    fn small_pools_grant_what_a_request_needs_and_large_ones_more_than_is_sent_ahead() {
        assert_eq!(Shares::among(1, 61, 1024), Shares { kept_units: 1, share_blocks: 766 });
        assert_eq!(Shares::among(3, 61, 1024), Shares { kept_units: 3, share_blocks: 766 });
        let large = Shares::among(20, 25_600, 1024);
        assert_eq!(large, Shares { kept_units: 160, share_blocks: 8 * 766 });
    }
}
