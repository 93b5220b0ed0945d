//! The fate of a volume's grants: which node has the present epoch, and which ones no pool opens.

use quoin_types::{Epoch, Term};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::state::records::{Text, VolumeRecord};
use crate::volume::devices::is_zero;

/// A part of a volume's record; its fields stand among the record's own.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Grants {
    /// Left out when the next epoch is given: a record that was made from pools cannot know of
    /// epochs that were given and never shown to a pool.
    pub epochs_skipped: u64,
    /// The node that acquired the record's epoch; empty: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub holder: String,
    /// Sessions up to this epoch are opened by no pool any more: see [`VolumeRecord::fence`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fenced: u64,
    /// Replicas that are open do not get time to close either.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fenced_at_once: bool,
}

impl VolumeRecord {
    /// Takes back all earlier grants. This uses up an epoch that is granted to no target: pools
    /// promise it, and refuse opens with earlier grants. An open session may still be closed in a
    /// bounded time, unless `at_once` cuts it. `at_once` uses up an epoch also where none was
    /// granted since the last fence: former versions signed grants for the epoch of a fence itself.
    pub(crate) fn fence(&mut self, at_once: bool, term: Term) -> Result<(), Error> {
        if self.opened.epoch == 0 || (self.grants.fenced == self.opened.epoch && !at_once) {
            return Ok(());
        }
        self.use_up_epoch(Epoch::ZERO, term)?;
        self.opened.incarnation = Text::default();
        (self.grants.fenced, self.grants.fenced_at_once) = (self.opened.epoch, at_once);
        Ok(())
    }

    /// Advances to the next epoch of the term in which the controller rules, above `at_least`.
    pub(crate) fn use_up_epoch(&mut self, at_least: Epoch, term: Term) -> Result<(), Error> {
        let after = self.epoch().max(at_least).0.saturating_add(self.grants.epochs_skipped);
        let Some(next) = term.next_epoch(Epoch(after)) else {
            return Err(Error::Precondition(format!(
                "volume {}: epoch {} is of a later term than this controller's, which is {term}, or \
                 its last one: `quoin controller recover` begins another term",
                self.spec.name,
                Epoch(after)
            )));
        };
        (self.opened.epoch, self.grants.epochs_skipped) = (next.0, 0);
        Ok(())
    }

    /// Returns true if a node that has it may write it at present.
    pub(crate) fn has_writers(&self) -> bool {
        self.attachments.iter().any(|attachment| !attachment.writes_nothing())
    }

    /// Takes back a grant that writes where the volume had writers and has readers alone now: their
    /// target opens it again, by a grant that reads.
    pub(crate) fn fence_last_writer(
        &mut self,
        had_writers: bool,
        at_once: bool,
        term: Term,
    ) -> Result<(), Error> {
        match had_writers && !self.has_writers() && !self.attachments.is_empty() {
            true => self.fence(at_once, term),
            false => Ok(()),
        }
    }

    /// Returns true if there is a grant that its holder may still use.
    pub(crate) fn is_granted(&self) -> bool {
        self.grants.fenced < self.opened.epoch
    }

    /// Returns true if this node may hold the current grant. Recovered records do not say which
    /// node holds the epoch.
    pub(crate) fn may_be_held_by(&self, node: &str) -> bool {
        self.is_granted() && (self.grants.holder.is_empty() || self.grants.holder == node)
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::{Epoch, Incarnation, Term, TermId};

    use crate::state::records::{Text, VolumeRecord};

    fn granted(epoch: u64) -> VolumeRecord {
        let mut volume = crate::state::recorded::volume();
        (volume.opened.epoch, volume.grants.epochs_skipped, volume.grants.fenced) = (epoch, 0, 0);
        volume.opened.incarnation = Text(Incarnation(9));
        volume
    }

    #[test]
    fn a_fence_uses_up_an_epoch_of_no_target_and_only_while_a_grant_is_valid() {
        let mut volume = granted(7);
        volume.fence(false, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.opened.incarnation.0.0),
            (8, 8, 0)
        );
        volume.fence(false, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.grants.fenced_at_once),
            (8, 8, false)
        );
        // A former version may have signed a grant for the epoch of the fence itself.
        volume.fence(true, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.grants.fenced_at_once),
            (9, 9, true)
        );
        volume.fence(false, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.grants.fenced_at_once),
            (9, 9, true)
        );
        // After another grant and another fence, sessions have time to close again.
        volume.opened.epoch = 10;
        volume.fence(false, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.grants.fenced_at_once),
            (11, 11, false)
        );

        let mut never_opened = granted(0);
        never_opened.fence(true, Term::default()).unwrap();
        assert_eq!((never_opened.opened.epoch, never_opened.grants.fenced), (0, 0));

        // Epochs that recovered records may not contain are fenced too.
        let mut recovered = granted(7);
        recovered.grants.epochs_skipped = 1000;
        recovered.fence(false, Term::default()).unwrap();
        assert_eq!(
            (recovered.opened.epoch, recovered.grants.fenced, recovered.grants.epochs_skipped),
            (1008, 1008, 0)
        );
    }

    #[test]
    fn an_epoch_without_a_known_holder_may_be_held_by_any_node() {
        let mut volume = granted(7);
        volume.grants.holder = "h1".to_owned();
        assert!(volume.may_be_held_by("h1") && !volume.may_be_held_by("h2"));
        volume.grants.holder.clear();
        assert!(volume.may_be_held_by("h1") && volume.may_be_held_by("h2"));
        volume.fence(false, Term::default()).unwrap();
        assert!(!volume.may_be_held_by("h1"));
        assert!(!granted(0).may_be_held_by("h1"), "nobody ever opened it");
    }

    #[test]
    fn a_new_term_fences_and_grants_above_all_that_a_former_controller_goes_on_to_grant() {
        let term = Term { number: 2, id: TermId(5) };
        let mut fenced = granted(7);
        fenced.fence(false, term).unwrap();
        assert_eq!(fenced.epoch().to_string(), "2/1");
        assert_eq!(fenced.grants.fenced, fenced.opened.epoch);
        fenced.use_up_epoch(Epoch(1 << 30), term).unwrap();
        assert_eq!(
            fenced.epoch().to_string(),
            "2/2",
            "what the former term granted counts for nothing"
        );
        // Records that were restored by hand cannot use up epochs of a later term.
        let old = Term { number: 1, id: TermId(4) };
        let before = fenced.clone();
        let refused = fenced.fence(true, old).unwrap_err().to_string();
        assert!(refused.contains("later term") && refused.contains("recover"), "{refused}");
        assert_eq!(fenced, before);
    }
}
