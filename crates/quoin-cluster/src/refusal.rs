//! Reasons for which the records stay as they are.

/// A request that the records do not allow. Each message names the object, the rule and, if there is
/// one, the remedy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// A field of a request breaks its rule.
    #[error("{field}: {rule}")]
    Invalid { field: &'static str, rule: String },

    #[error("{what} {name:?} does not exist{}", shown_by(what))]
    NotFound { what: &'static str, name: String },

    /// An object that differs has the name already.
    #[error("{what} {name:?} exists already with other {difference}")]
    Exists { what: &'static str, name: String, difference: String },

    /// The state does not allow the request until a user changes it.
    #[error("{0}")]
    Precondition(String),

    /// The state will change by itself; the caller may try again.
    #[error("{0}")]
    Busy(String),

    #[error("{0}")]
    Aborted(String),
}

impl Refusal {
    pub fn invalid(field: &'static str, rule: impl Into<String>) -> Self {
        Self::Invalid { field, rule: rule.into() }
    }

    pub fn missing(what: &'static str, name: impl Into<String>) -> Self {
        Self::NotFound { what, name: name.into() }
    }
}

/// Hint with the command that lists the existing names.
pub fn shown_by(what: &str) -> &'static str {
    match what {
        "volume" => ": `quoin volume list` shows those that do",
        "pool" => ": `quoin pool list` shows those that do",
        "node" => ": `quoin node list` shows those that do",
        "group snapshot" => ": `quoin snapshot group list` shows those that do",
        "snapshot" => ": `quoin snapshot list` shows those that do",
        "schedule" => ": `quoin schedule list` shows those that do",
        "revert" => {
            " or is not the last one of its volume: `quoin volume get VOLUME` shows that one"
        }
        "admin" => ": `quoin admin list` shows those that do",
        "replica" | "known replica" => ": `quoin replica list` shows those that do",
        "join token" => ": `quoin token list` shows those that do",
        _ => "",
    }
}
