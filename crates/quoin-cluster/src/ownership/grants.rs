//! Grants: epochs are used up, and what was granted is taken back.

use quoin_types::{Epoch, Term, mutant};

use crate::Refusal;
use crate::records::{Text, VolumeRecord};

/// Takes back all earlier grants. This uses up an epoch that is granted to no target: pools
/// promise it, and refuse opens with earlier grants. An open session may still be closed in a
/// bounded time, unless `at_once` cuts it. `at_once` uses up an epoch also where none was
/// granted since the last fence: former versions signed grants for the epoch of a fence itself.
///
/// # Errors
/// No epoch is left in this term.
pub fn fence(volume: &mut VolumeRecord, at_once: bool, term: Term) -> Result<(), Refusal> {
    let is_granted = volume.opened.epoch != 0 && volume.grants.fenced != volume.opened.epoch;
    // Records that were recovered may lack what was granted last before that, and the first grant too.
    let may_lack_grants = volume.epoch().term_number() < term.number
        && !mutant::is("grants-that-recovered-records-lack-not-fenced");
    if !is_granted && !may_lack_grants && (volume.opened.epoch == 0 || !at_once) {
        return Ok(());
    }
    let is_over = !is_granted && !may_lack_grants && volume.grants.ended >= volume.opened.epoch;
    use_up_epoch(volume, Epoch::ZERO, term)?;
    volume.opened.incarnation = Text::default();
    (volume.grants.fenced, volume.grants.fenced_at_once) = (volume.opened.epoch, at_once);
    if is_over {
        // Nothing was granted since the last fence, which holds.
        volume.grants.end_below(volume.opened.epoch);
    }
    Ok(())
}

/// The epoch was granted to a target that may change the content.
pub fn note_writer(volume: &mut VolumeRecord) {
    volume.grants.written = Some(volume.opened.epoch);
}

/// Advances to the next epoch of the term in which the controller rules, above `at_least`.
///
/// # Errors
/// The record has an epoch of a later term, or the last one of this term.
pub fn use_up_epoch(volume: &mut VolumeRecord, at_least: Epoch, term: Term) -> Result<(), Refusal> {
    let after = volume.epoch().max(at_least).0.saturating_add(volume.grants.epochs_skipped);
    let Some(next) = term.next_epoch(Epoch(after)) else {
        return Err(Refusal::Precondition(format!(
            "volume {}: epoch {} is of a later term than this controller's, which is {term}, or \
             its last one: `quoin controller recover` begins another term",
            volume.spec.name,
            Epoch(after)
        )));
    };
    (volume.opened.epoch, volume.grants.epochs_skipped) = (next.0, 0);
    Ok(())
}

/// Takes back a grant that writes where the volume had writers and has readers alone now: their
/// target opens it again, by a grant that reads.
///
/// # Errors
/// As those of [`fence`].
pub fn fence_last_writer(
    volume: &mut VolumeRecord,
    had_writers: bool,
    at_once: bool,
    term: Term,
) -> Result<(), Refusal> {
    match had_writers && !volume.has_writers() && !volume.attachments.is_empty() {
        true => fence(volume, at_once, term),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::{Incarnation, TermId};

    use super::*;

    fn granted(epoch: u64) -> VolumeRecord {
        let mut volume = crate::records::recorded::volume();
        (volume.opened.epoch, volume.grants.epochs_skipped, volume.grants.fenced) = (epoch, 0, 0);
        volume.opened.incarnation = Text(Incarnation(9));
        volume
    }

    /// A copy from before the grant, or from after a fence that is over.
    #[test]
    fn a_fence_takes_back_what_recovered_records_do_not_know_of() {
        crate::break_a_rule();
        let term = Term { number: 1, id: TermId(5) };
        for (epoch, fenced) in [(0, 0), (7, 7)] {
            let mut volume = granted(epoch);
            volume.grants.fenced = fenced;
            fence(&mut volume, false, Term::default()).unwrap();
            assert_eq!((volume.opened.epoch, volume.grants.fenced), (epoch, fenced));
            fence(&mut volume, false, term).unwrap();
            let next = term.floor().0 + 1;
            assert_eq!((volume.opened.epoch, volume.grants.fenced), (next, next));
            fence(&mut volume, false, term).unwrap();
            assert_eq!(volume.opened.epoch, next, "once");
        }
    }

    #[test]
    fn a_fence_uses_up_an_epoch_of_no_target_and_only_while_a_grant_is_valid() {
        let mut volume = granted(7);
        fence(&mut volume, false, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.opened.incarnation.0.0),
            (8, 8, 0)
        );
        fence(&mut volume, false, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.grants.fenced_at_once),
            (8, 8, false)
        );
        // A former version may have signed a grant for the epoch of the fence itself.
        fence(&mut volume, true, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.grants.fenced_at_once),
            (9, 9, true)
        );
        fence(&mut volume, false, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.grants.fenced_at_once),
            (9, 9, true)
        );
        // After another grant and another fence, sessions have time to close again.
        volume.opened.epoch = 10;
        fence(&mut volume, false, Term::default()).unwrap();
        assert_eq!(
            (volume.opened.epoch, volume.grants.fenced, volume.grants.fenced_at_once),
            (11, 11, false)
        );

        let mut never_opened = granted(0);
        fence(&mut never_opened, true, Term::default()).unwrap();
        assert_eq!((never_opened.opened.epoch, never_opened.grants.fenced), (0, 0));

        // Epochs that recovered records may not contain are fenced too.
        let mut recovered = granted(7);
        recovered.grants.epochs_skipped = 1000;
        fence(&mut recovered, false, Term::default()).unwrap();
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
        fence(&mut volume, false, Term::default()).unwrap();
        assert!(!volume.may_be_held_by("h1"));
        assert!(!granted(0).may_be_held_by("h1"), "nobody ever opened it");
    }

    #[test]
    fn a_new_term_fences_and_grants_above_all_that_a_former_controller_goes_on_to_grant() {
        let term = Term { number: 2, id: TermId(5) };
        let mut fenced = granted(7);
        fence(&mut fenced, false, term).unwrap();
        assert_eq!(fenced.epoch().to_string(), "2/1");
        assert_eq!(fenced.grants.fenced, fenced.opened.epoch);
        use_up_epoch(&mut fenced, Epoch(1 << 30), term).unwrap();
        assert_eq!(
            fenced.epoch().to_string(),
            "2/2",
            "what the former term granted counts for nothing"
        );
        // Records that were restored by hand cannot use up epochs of a later term.
        let old = Term { number: 1, id: TermId(4) };
        let before = fenced.clone();
        let refused = fence(&mut fenced, true, old).unwrap_err().to_string();
        assert!(refused.contains("later term") && refused.contains("recover"), "{refused}");
        assert_eq!(fenced, before);
    }
}
