//! Join tokens: who may use one, and which ones a recovery of the records ends.
//!
//! Records that are an old copy do not know which tokens were used or revoked since. So no token that
//! was made before they were doubted is taken, and a recovery removes those.

use quoin_types::mutant;

use crate::records::{RecoveryRecord, TokenRecord};

/// Reason why a token is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotTaken {
    /// Another key has used it, its time is over, or its records are doubted.
    Bad,
    OtherRole,
    OtherHolder,
}

/// Returns true if the token is good, whoever uses it. `doubt`: the records do not rule, since then.
pub fn is_good(token: &TokenRecord, doubt: Option<&RecoveryRecord>, now_ms: u64) -> bool {
    let is_doubted = doubt.is_some_and(|doubt| token.created_ms < doubt.since_ms)
        && !mutant::is("tokens-taken-in-doubt");
    token.is_good(now_ms) && !is_doubted
}

/// Uses a token for the member `role/holder` with this key. The key that used it first may use it again,
/// as its answer can get lost. Returns true for the first use.
///
/// # Errors
/// The reason why it is not taken.
pub fn take(
    token: &mut TokenRecord,
    (role, holder, key_hash): (&str, &str, &str),
    doubt: Option<&RecoveryRecord>,
    now_ms: u64,
) -> Result<bool, NotTaken> {
    let user = (format!("{role}/{holder}"), key_hash.to_owned());
    let is_others = token.used_by.as_ref().is_some_and(|by| *by != user);
    if !is_good(token, doubt, now_ms) || is_others {
        return Err(NotTaken::Bad);
    }
    let is_for = match token.role.as_str() {
        "" => matches!(role, "pool" | "node"),
        only => only == role,
    };
    if !is_for {
        return Err(NotTaken::OtherRole);
    }
    if !token.holder.is_empty() && token.holder != holder {
        return Err(NotTaken::OtherHolder);
    }
    Ok(token.used_by.replace(user).is_none())
}

/// Returns true if a recovery of the records ends the token: it was made before the records were doubted,
/// or they were not known as old, since they may be an old copy all the same.
pub fn ends_with_recovery(token: &TokenRecord, doubt: Option<&RecoveryRecord>) -> bool {
    doubt.is_none_or(|doubt| token.created_ms < doubt.since_ms)
        && !mutant::is("tokens-kept-over-a-recovery")
}
