//! Consequences of any change of a volume's record.

use quoin_types::Term;

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
    if before.opened.owner.is_some() && before.opened.owner != volume.opened.owner {
        fence(volume, false, term)?;
    }
    volume.membership.version += u64::from(is_confirmed && volume.takes_back(before));
    volume.generation += u64::from(volume.differs(before));
    Ok(())
}
