//! Consequences of any change of a volume's record.

use quoin_types::{Term, mutant};

use crate::Refusal;
use crate::ownership::grants::fence;
use crate::records::VolumeRecord;

/// Completes a change of a volume's record from `before`. Where the owner changes, the former owner
/// loses its grants. Where the record loses a newcomer, the membership gets its next version: a joint
/// View that names the newcomer can never rule then, so no target that opens the volume waits for a
/// replica that is being deleted. The version stays where nothing has confirmed yet that the record is
/// current: that View may have ruled for long there.
///
/// # Errors
/// No epoch is left in this term.
pub fn complete(
    before: &VolumeRecord,
    volume: &mut VolumeRecord,
    is_confirmed: bool,
    term: Term,
) -> Result<(), Refusal> {
    let loses = before.opened.owner.is_some() && before.opened.owner != volume.opened.owner;
    let is_left = volume.opened.owner.is_none() && mutant::is("detached-and-not-taken-back");
    if loses && !is_left {
        fence(volume, false, term)?;
    }
    let takes_back = is_confirmed && volume.takes_back(before);
    let goes_on = takes_back && !mutant::is("newcomer-taken-back-without-a-version");
    volume.membership.version += u64::from(goes_on);
    volume.generation += u64::from(volume.differs(before));
    Ok(())
}
